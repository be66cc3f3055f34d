"""llama-server's flags: those of the same meaning are taken, the others refused by name.

llama-server -m model.gguf -c 4096 -np 8 -t 4 --temp 0.7        the line as it is …
twostroke serve -m model.gguf -c 4096 -np 8 -t 4 --temp 0.7     … with another first word

`foreign.py` says what the tables mean.
"""

from __future__ import annotations

import argparse
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

from twostroke.commands.flags import json_object, merged
from twostroke.commands.foreign import Foreign, Only, Table, add_hidden, negations, table
from twostroke.commands.parser import Parser

ALL_LAYERS = 99  # -ngl: so many, or more, are written for "all"
USUAL_QUANT = "Q4_K_M"  # of a repository of GGUF files, if none is named
KV_TYPES = {"f32": "float32", "f16": "float16", "bf16": "bfloat16", "q8_0": "int8"}
METADATA_TYPES: dict[str, Callable[[str], Any]] = {"int": int, "float": float, "str": str}
SAMPLING = {
    "--temp": "temperature",
    "--temperature": "temperature",
    "--top-k": "top_k",
    "--top-p": "top_p",
    "--min-p": "min_p",
    "--repeat-penalty": "repetition_penalty",
    "--presence-penalty": "presence_penalty",
    "--frequency-penalty": "frequency_penalty",
}


def _number(text: str) -> int | None:
    """0 or less leaves the choice to the server."""
    return int(text) if int(text) > 0 else None


def _seed(text: str) -> int | None:
    return int(text) if int(text) >= 0 else None


def _words(text: str) -> list[str]:
    return [word for part in text.split(",") if (word := part.strip())]


def _repository(text: str) -> str:
    return text if ":" in text else f"{text}:{USUAL_QUANT}"


def _origins(text: str) -> list[list[str]]:
    return [_words(text)]


def _lines(text: str) -> list[str]:
    try:
        lines = [line.strip() for line in Path(text).read_text(encoding="utf-8").splitlines()]
    except (OSError, UnicodeDecodeError) as error:
        raise argparse.ArgumentTypeError(f"it cannot be read ({error})") from None
    keys = [line for line in lines if line and not line.startswith("#")]
    if not keys:
        raise argparse.ArgumentTypeError("it holds no key; write one a line")
    return keys


def _kv_type(text: str) -> str:
    if text not in KV_TYPES:
        raise argparse.ArgumentTypeError(
            "the cache is f32, f16, bf16 or q8_0; give one of these, or leave it out"
        )
    return KV_TYPES[text]


def _layers(text: str) -> str | None:
    """A device: with some layers the GPU if there is one, with none of them the CPU."""
    if text in ("auto", "all") or int(text) != 0:
        return None
    return "cpu"


def device(text: str) -> str:
    """`cuda:1` of llama-server's `CUDA1`, `cpu` of its `none`."""
    name = text.lower()
    if name == "none":
        return "cpu"
    return f"cuda:{name[4:]}" if name.startswith("cuda") and name[4:].isdigit() else text


def _seconds(text: str) -> float:
    return float(text)


def _thinking(text: str) -> dict[str, Any] | None:
    """A variable of the chat template: `--reasoning off`, `--reasoning-budget 0`."""
    if text in ("on", "off", "auto", "-1", "0"):
        return {"enable_thinking": False} if text in ("off", "0") else None
    raise argparse.ArgumentTypeError("thinking is not limited in tokens; only 0 and -1 are taken")


def _reasoning_format(text: str) -> str:
    if text not in ("none", "auto", "deepseek"):
        raise argparse.ArgumentTypeError("expected none, auto or deepseek")
    return "none" if text == "none" else "auto"


def _rope(
    name: str, read: Callable[[str], float] = float, inverse: bool = False
) -> Callable[[str], dict[str, Any] | None]:
    """Return a reader of one setting of the rope. With 0 or less llama-server takes the model's
    own."""

    def setting(text: str) -> dict[str, Any] | None:
        value = read(text)
        if value <= 0:
            return None
        return {"rope_scaling": {name: 1 / value if inverse else value}}

    return setting


def _metadata(text: str) -> dict[str, Any]:
    """Entries of a GGUF file's metadata: `KEY=TYPE:VALUE`, several with commas between."""
    found: dict[str, Any] = {}
    for entry in text.split(","):
        match = re.fullmatch(r"([\w.-]+)=(int|float|bool|str):(.*)", entry.strip())
        if match is None or "." not in match[1]:
            raise argparse.ArgumentTypeError(
                "expected KEY=TYPE:VALUE with the type int, float, bool or str, such as "
                "llama.context_length=int:8192"
            )
        name, kind, value = match.groups()
        if name.startswith("tokenizer."):
            raise argparse.ArgumentTypeError(
                f"the tokenizer is read as it stands; leave {name} out"
            )
        found[name] = value == "true" if kind == "bool" else METADATA_TYPES[kind](value)
    return found


def _effort(text: str) -> dict[str, Any] | None:
    return None if text == "default" else {"reasoning_effort": text}


# What they set under our names. A reader that gives None asks for what happens anyway; a list is
# added to what was given before, and an object is merged with it.
_TAKEN: list[tuple[str, str, Callable[[str], Any]]] = [
    ("-c --ctx-size", "max_model_len", _number),
    ("-np --parallel", "max_num_seqs", _number),
    ("-b --batch-size", "max_num_batched_tokens", _number),
    ("-t", "threads", _number),
    ("--rope-scale", "hf_overrides", _rope("factor")),
    ("--rope-freq-scale", "hf_overrides", _rope("factor", inverse=True)),
    ("--rope-freq-base", "hf_overrides", _rope("rope_theta")),
    ("--yarn-orig-ctx", "hf_overrides", _rope("original_max_position_embeddings", int)),
    ("--yarn-attn-factor", "hf_overrides", _rope("attention_factor")),
    ("--yarn-beta-slow", "hf_overrides", _rope("beta_slow")),
    ("--yarn-beta-fast", "hf_overrides", _rope("beta_fast")),
    ("--override-kv", "hf_overrides", _metadata),
    ("-tb", "threads_batch", _number),
    ("--predict --n-predict", "max_output_tokens", _number),
    ("-s", "seed", _seed),
    ("-a --alias", "served_model_name", _words),
    ("-hf -hfr --hf-repo", "model", _repository),
    ("-hff --hf-file", "hf_file", str),
    ("-ngl --gpu-layers --n-gpu-layers", "device", _layers),
    ("-dev", "device", device),
    ("-ctk --cache-type-k -ctv --cache-type-v", "kv_cache_dtype", _kv_type),
    ("--chat-template-file", "chat_template", str),
    ("--chat-template-kwargs", "default_chat_template_kwargs", json_object),
    ("-rea --reasoning --reasoning-budget", "default_chat_template_kwargs", _thinking),
    ("--reasoning-effort", "default_chat_template_kwargs", _effort),
    ("--reasoning-format", "reasoning_parser", _reasoning_format),
    ("--api-key-file", "api_key", _lines),
    ("--ssl-key-file", "ssl_keyfile", str),
    ("--ssl-cert-file", "ssl_certfile", str),
    ("--cors-origins", "allowed_origins", _origins),
    ("-to --timeout", "write_timeout_s", _seconds),
]
TAKEN = {flag: (name, read) for flags, name, read in _TAKEN for flag in flags.split()}
EXPECTED = {"write_timeout_s": "a number of seconds", "hf_overrides": "a number"}
NO_CACHE = "--no-cache-prompt"
NODES_OR_TOKENS = "-n"  # vLLM's --nnodes, llama-server's --predict

ANYWAY: Table = table(
    {
        "chat templates are always Jinja's": "--jinja",
        "requests always join the running batch and share one cache": "-cb --cont-batching -kvu "
        "--kv-unified --cache-prompt",
        "a text that fills the context ends there": "--no-context-shift",
        "/metrics is always there": "--metrics",
        "there are no such routes": "--no-slots --no-mmproj --no-mmproj-auto --no-agent -no-ag",
        "files are mapped, and packed into memory once": "--mmap --no-mmap --repack",
        "kernels are ready before the first request": "--warmup --no-warmup",
        "every answer has its timings": "--perf --no-perf",
        "as it is": "--escape -e --no-escape --kv-offload -kvo --op-offload --no-skip-chat-parsing "
        "--no-prefill-assistant",
    }
)
ONLY: Only = {
    "-sm --split-mode": (("none", "layer", "row"), "--tensor-parallel-size splits it"),
    "-mg --main-gpu": (("0",), "--device cuda:1 names another GPU"),
}
NOTED: Table = table(
    {
        "a step is computed whole; -b is its size": "-ub= --ubatch-size=",
        "attention never holds the scores of a whole context": "-fa=? --flash-attn=?",
        "weights are ordinary memory": "--mlock -lm= --load-mode= -lzm= --lazy-mode= "
        "--check-tensors --no-repack -nr --no-host --no-op-offload",
        "threads are scheduled by the system": "--cpu-strict= --cpu-strict-batch= --prio= "
        "--prio-batch= --poll= --poll-batch= --numa= --threads-http=",
        "memory is planned before the start": "-fit=? --fit=? -fitt= --fit-target= -fitc= "
        "--fit-ctx=",
        "the prefix cache has its own ways": "--cache-reuse= -cram= --cache-ram= -sps= "
        "--slot-prompt-similarity= -ctxcp= --ctx-checkpoints= --swa-checkpoints= -cms= "
        "--checkpoint-min-step= --swa-full --cache-idle-slots --kv-unified-per-slot= -no-kvu "
        "--no-kv-unified -nocb --no-cont-batching -dt= --defrag-thold= -bs --backend-sampling",
        "a text that fills the context ends there": "--keep=",
        "text only": "--mmproj-auto --mmproj-offload --no-mmproj-offload -mmdev= --mmproj-device= "
        "--image-min-tokens= --image-max-tokens= --mtmd-batch-max-tokens= --video-fps= "
        "--video-timestamp-interval= --video-ffmpeg-dir=",
        "the chat page keeps its settings in the browser": "--ui-config= --webui-config= "
        "--ui-config-file= --webui-config-file= --slots --tags= --ui-mcp-proxy --webui-mcp-proxy",
        "logs go to stderr": "-v --verbose --log-verbose -lv= --verbosity= --log-verbosity= "
        "--log-disable --log-file= --log-jsonl --log-colors=? --log-prefix --log-timestamps",
        "a stream sends its tokens as they are written": "--sse-ping-interval= "
        "--sleep-idle-seconds=",
        "penalties look at the whole text": "--repeat-last-n=",
        "--reasoning-parser parts thinking from the answer": "--reasoning-preserve "
        "--reasoning-budget-message=",
        "GET and POST are allowed, and all headers": "--cors-methods= --cors-headers=",
    }
)
REFUSED: Table = table(
    {
        "download the file and give its path": "-mu= --model-url= -dr= --docker-repo=",
        "a model is on one device, or in equal parts on several (--tensor-parallel-size)": "-ts= "
        "--tensor-split= -ot= --override-tensor= -cmoe --cpu-moe -ncmoe= "
        "--n-cpu-moe= -ncffn= --n-cpu-ffn= --rpc= -nkvo --no-kv-offload",
        "use taskset or numactl": "-C= --cpu-mask= -Cr= --cpu-range= -Cb= --cpu-mask-batch= -Crb= "
        "--cpu-range-batch=",
        "speculative decoding is not there yet; leave it out, the answers are the same": (
            "-md= --model-draft= --spec-draft-model= -hfd= -hfrd= --hf-repo-draft= "
            "--spec-draft-hf= --spec-type= --spec-default --spec-draft-n-max= --spec-draft-n-min= "
            "--draft= --draft-n= --draft-max= --draft-min= --draft-n-min= --draft-p-min= "
            "--spec-draft-p-min= --draft-p-split= --spec-draft-p-split= -ngld= "
            "--gpu-layers-draft= --n-gpu-layers-draft= --spec-draft-ngl= -devd= --device-draft= "
            "--spec-draft-device= -lcs= --lookup-cache-static= -lcd= --lookup-cache-dynamic= "
            "-ctkd= --cache-type-k-draft= --spec-draft-type-k= -ctvd= --cache-type-v-draft= "
            "--spec-draft-type-v= -td= --threads-draft= --spec-draft-threads= -tbd= "
            "--threads-batch-draft= --spec-draft-threads-batch= -Cd= --cpu-mask-draft= "
            "--spec-draft-cpu-mask= -Crd= --cpu-range-draft= --spec-draft-cpu-range= "
            "--cpu-strict-draft= --spec-draft-cpu-strict= --prio-draft= --spec-draft-prio= "
            "--poll-draft= --spec-draft-poll= -Cbd= --cpu-mask-batch-draft= "
            "--spec-draft-cpu-mask-batch= --cpu-strict-batch-draft= "
            "--spec-draft-cpu-strict-batch= --prio-batch-draft= --spec-draft-prio-batch= "
            "--poll-batch-draft= --spec-draft-poll-batch= -otd= --override-tensor-draft= "
            "--spec-draft-override-tensor= -cmoed --cpu-moe-draft --spec-draft-cpu-moe -ncmoed= "
            "--n-cpu-moe-draft= --spec-draft-n-cpu-moe= --spec-draft-ncmoe= --spec-synth-len= "
            "--spec-synth-rates= --spec-draft-backend-sampling --spec-ngram-mod-n-min= "
            "--spec-ngram-mod-n-max= --spec-ngram-mod-n-match= --spec-ngram-simple-size-n= "
            "--spec-ngram-simple-size-m= --spec-ngram-simple-min-hits= --spec-ngram-map-k-size-n= "
            "--spec-ngram-map-k-size-m= --spec-ngram-map-k-min-hits= "
            "--spec-ngram-map-k4v-size-n= --spec-ngram-map-k4v-size-m= "
            "--spec-ngram-map-k4v-min-hits= --spec-ngram-size-n= --spec-ngram-size-m= "
            "--spec-ngram-min-hits= --fim-qwen-7b-spec --fim-qwen-14b-spec"
        ),
        "LoRA adapters and control vectors are not there yet; merge them into the model": (
            "--lora= --lora-scaled= --lora-init-without-apply --control-vector= "
            "--control-vector-scaled= --control-vector-layer-range=+"
        ),
        "models read and write text only; leave it out": "-mm= --mmproj= -mmu= --mmproj-url= "
        "--media-path= --vision-gemma-4b-default --vision-gemma-12b-default",
        "the server generates text: no embeddings, scores or classes": "--embedding --embeddings "
        "--rerank --reranking --pooling= --embd-normalize= --embd-gemma-default",
        "this sampler is not there; temperature, top-k, top-p, min-p and penalties are": (
            "--samplers= --sampler-seq= --sampling-seq= --mirostat= --mirostat-lr= "
            "--mirostat-ent= --xtc-probability= --xtc-threshold= --typical= --typical-p= "
            "--top-nsigma= --top-n-sigma= --dry-multiplier= --dry-base= --dry-allowed-length= "
            "--dry-penalty-last-n= --dry-sequence-breaker= --dynatemp-range= --dynatemp-exp= "
            "--adaptive-target= --adaptive-decay="
        ),
        "a request asks for this itself": "--grammar= --grammar-file= -j= --json-schema= -jf= "
        "--json-schema-file= -l= --logit-bias= --ignore-eos --reverse-prompt= -sp --special "
        "--prefill-assistant",
        "chat templates are always Jinja's": "--no-jinja",
        "answers are read by the model's template; leave it out": "--skip-chat-parsing",
        "a text that fills the context ends there; leave it out": "--context-shift",
        "KV blocks are not written to disk yet; leave it out": "--slot-save-path=",
        "there is no such route": "--props --spm-infill",
        "--root-path is the prefix that a proxy in front strips": "--api-prefix=",
        "there are no files to serve": "--path=",
        "no text of a prompt or an answer is ever logged; leave it out": "--log-prompts-dir=",
        "one server has one address": "--reuse-port",
        "--allowed-origins is all there is of CORS; cookies are never allowed": (
            "--cors-credentials"
        ),
        "clients bring their own tools": "--tools= --tools-runtime= --mcp-servers-config= "
        "--mcp-servers-json= --agent -ag",
        "a server has one model; name it": "--models-dir= --models-preset= --models-max= "
        "--models-autoload --fim-qwen-1.5b-default --fim-qwen-3b-default --fim-qwen-7b-default "
        "--fim-qwen-30b-default --gpt-oss-20b-default --gpt-oss-120b-default",
        "there is no such list": "-cl --cache-list --list-devices --completion-bash",
    }
)
# `--no-warmup` and its like are in the tables themselves.
ANYWAY |= {
    flag: option
    for flag, option in negations(REFUSED, NOTED).items()
    if not (flag in NOTED or flag in REFUSED or flag in ANYWAY)
}


class _Take(Foreign):
    def apply(self, parser: Parser, given: argparse.Namespace, flag: str, value: str) -> None:
        name, read = TAKEN[flag]
        try:
            setting = read(value)
        except argparse.ArgumentTypeError as error:
            parser.problem(f"{flag} {value}: {error}")
            return
        except ValueError:
            expected = EXPECTED.get(name, "a whole number")
            parser.problem(f"{flag} {value}: expected {expected}")
            return
        if read is _layers and value.isdigit() and 0 < int(value) < ALL_LAYERS:
            parser.note(f"{flag} {value}", "a model runs on one device, with all its layers")
        if setting is None:
            return
        before = getattr(given, name, None)
        if isinstance(setting, list):
            setting = [*(before or ()), *setting]
        elif isinstance(setting, dict):
            setting = merged(before or {}, setting)
        elif name == "kv_cache_dtype" and before not in (None, setting):
            parser.problem(f"{flag} {value}: keys and values have one type; give both the same")
        setattr(given, name, setting)
        if read is _seconds:
            given.body_timeout_s = setting


class _Sample(Foreign):
    def apply(self, parser: Parser, given: argparse.Namespace, flag: str, value: str) -> None:
        name = SAMPLING[flag]
        try:
            setting: float = int(value) if name == "top_k" else float(value)
        except ValueError:
            parser.problem(f"{flag} {value}: expected a number")
            return
        before = getattr(given, "override_generation_config", {})
        given.override_generation_config = {**before, name: setting}


class _RopeScaling(Foreign):
    """The type of the rope's scaling, or, as earlier versions of vLLM have it, all its settings as
    JSON."""

    def apply(self, parser: Parser, given: argparse.Namespace, flag: str, value: str) -> None:
        scaling: dict[str, Any] = {"rope_type": "default" if value == "none" else value}
        if value.startswith("{"):
            try:
                scaling = json_object(value)
            except argparse.ArgumentTypeError as error:
                parser.problem(f"{flag} {value}: {error}")
                return
        elif value not in ("none", "linear", "yarn"):
            parser.problem(f"{flag} {value}: expected none, linear, yarn or a JSON object")
            return
        before = getattr(given, "hf_overrides", None) or {}
        given.hf_overrides = merged(before, {"rope_scaling": scaling})


class _YarnExtFactor(Foreign):
    def apply(self, parser: Parser, given: argparse.Namespace, flag: str, value: str) -> None:
        if value not in ("-1", "-1.0", "1", "1.0"):
            parser.problem(
                f"{flag} {value}: yarn always extrapolates in full; give 1, or leave it out"
            )


class _NoCache(Foreign):
    def apply(self, parser: Parser, given: argparse.Namespace, flag: str, value: str) -> None:
        given.enable_prefix_caching = False


class _NodesOrTokens(Foreign):
    """One node is what there is, and an answer of one token nobody asks a server for."""

    def apply(self, parser: Parser, given: argparse.Namespace, flag: str, value: str) -> None:
        try:
            tokens = _number(value)
        except ValueError:
            parser.problem(f"{flag} {value}: expected a whole number")
            return
        if tokens is not None and tokens > 1:
            given.max_output_tokens = tokens
            parser.note(f"{flag} {value}", "read as llama-server's --n-predict")


def add_llama_arguments(parser: Parser) -> None:
    """In the help they have vLLM's names."""
    add_hidden(parser, TAKEN, _Take)
    add_hidden(parser, SAMPLING, _Sample)
    add_hidden(parser, [NO_CACHE], _NoCache, nargs=0)
    add_hidden(parser, ["--rope-scaling"], _RopeScaling)
    add_hidden(parser, ["--yarn-ext-factor"], _YarnExtFactor)
    add_hidden(parser, [NODES_OR_TOKENS], _NodesOrTokens)
