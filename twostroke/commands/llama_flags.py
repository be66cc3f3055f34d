"""The flags of llama-server. A flag that twostroke supports is accepted. Another flag is refused or
ignored, with the reason. These two commands start the same server:

llama-server -m model.gguf -c 4096 -np 8 -t 4 --temp 0.7
twostroke serve -m model.gguf -c 4096 -np 8 -t 4 --temp 0.7

`foreign.py` explains the tables.
"""

from __future__ import annotations

import argparse
import mmap
import os
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

from twostroke.commands.flags import json_object, merged
from twostroke.commands.foreign import (
    ForeignOption,
    Restrictions,
    Table,
    add_hidden,
    add_speculation,
    negations,
    table,
)
from twostroke.commands.parser import Parser

ALL_LAYERS = 99  # -ngl 99 or more means all layers
DEFAULT_QUANT = "Q4_K_M"  # the file of a GGUF repository that is used by default
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
    """Return a number; None for 0 or less, so that the server chooses the number."""
    return int(text) if int(text) > 0 else None


def _cache_ram(text: str) -> float:
    """Return GiB for a size in MiB. -1 (no limit) means half of the machine's memory."""
    if int(text) < -1:
        raise argparse.ArgumentTypeError("expected MiB of memory, 0 for none, or -1 for no limit")
    if int(text) == -1:
        pages = os.sysconf("SC_PHYS_PAGES") if hasattr(os, "sysconf") else 0
        return pages * mmap.PAGESIZE / 2 / 2**30
    return int(text) / 1024


def _seed(text: str) -> int | None:
    return int(text) if int(text) >= 0 else None


def _words(text: str) -> list[str]:
    return [word for part in text.split(",") if (word := part.strip())]


def _repository(text: str) -> str:
    return text if ":" in text else f"{text}:{DEFAULT_QUANT}"


def _origins(text: str) -> list[list[str]]:
    return [_words(text)]


def _lines(text: str) -> list[str]:
    try:
        lines = [line.strip() for line in Path(text).read_text(encoding="utf-8").splitlines()]
    except (OSError, UnicodeDecodeError) as error:
        raise argparse.ArgumentTypeError(f"the file cannot be read ({error})") from None
    keys = [line for line in lines if line and not line.startswith("#")]
    if not keys:
        raise argparse.ArgumentTypeError("the file has no key; write one key on each line")
    return keys


def _kv_type(text: str) -> str:
    if text not in KV_TYPES:
        raise argparse.ArgumentTypeError(
            "the KV cache supports f32, f16, bf16 and q8_0; give one of these, or leave it out"
        )
    return KV_TYPES[text]


def _layers(text: str) -> str | None:
    """Return the device for a number of layers on the GPU: the CPU for 0, otherwise the default."""
    if text in ("auto", "all") or int(text) != 0:
        return None
    return "cpu"


def device(text: str) -> str:
    """Return `cuda:1` for llama-server's `CUDA1`, and `cpu` for `none`."""
    name = text.lower()
    if name == "none":
        return "cpu"
    return f"cuda:{name[4:]}" if name.startswith("cuda") and name[4:].isdigit() else text


def _seconds(text: str) -> float:
    return float(text)


def _thinking(text: str) -> dict[str, Any] | None:
    """Return a chat template variable for `--reasoning off` and `--reasoning-budget 0`."""
    if text in ("on", "off", "auto", "-1", "0"):
        return {"enable_thinking": False} if text in ("off", "0") else None
    raise argparse.ArgumentTypeError(
        "the tokens of thinking cannot be limited; only 0 and -1 are supported"
    )


def _reasoning_format(text: str) -> str:
    if text not in ("none", "auto", "deepseek"):
        raise argparse.ArgumentTypeError("expected none, auto or deepseek")
    return "none" if text == "none" else "auto"


def _rope(
    name: str, read: Callable[[str], float] = float, inverse: bool = False
) -> Callable[[str], dict[str, Any] | None]:
    """Return a function that reads one setting of the rope. 0 or less means the model's setting."""

    def setting(text: str) -> dict[str, Any] | None:
        value = read(text)
        if value <= 0:
            return None
        return {"rope_scaling": {name: 1 / value if inverse else value}}

    return setting


def _metadata(text: str) -> dict[str, Any]:
    """Return entries of a GGUF file's metadata from `KEY=TYPE:VALUE,…`."""
    found: dict[str, Any] = {}
    for entry in text.split(","):
        match = re.fullmatch(r"([\w.-]+)=(int|float|bool|str):(.*)", entry.strip())
        if match is None or "." not in match[1]:
            raise argparse.ArgumentTypeError(
                "expected KEY=TYPE:VALUE with the type int, float, bool or str, such as "
                "llama.context_length=int:8192"
            )
        name, type_name, value = match.groups()
        if name.startswith("tokenizer."):
            raise argparse.ArgumentTypeError(
                f"settings of the tokenizer cannot be replaced; leave {name} out"
            )
        found[name] = value == "true" if type_name == "bool" else METADATA_TYPES[type_name](value)
    return found


def _effort(text: str) -> dict[str, Any] | None:
    return None if text == "default" else {"reasoning_effort": text}


# Flags, the setting of twostroke that they set, and the function that reads the value. If the
# function returns None, the setting is not changed. A list is appended to an earlier value, and an
# object is merged with it.
_RENAMED: list[tuple[str, str, Callable[[str], Any]]] = [
    ("-cram --cache-ram", "kv_offloading_size", _cache_ram),
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
RENAMED = {flag: (name, read) for flags, name, read in _RENAMED for flag in flags.split()}
EXPECTED = {"write_timeout_s": "a number of seconds", "hf_overrides": "a number"}
# Options of speculative decoding → the key of --speculative-config.
SPECULATION = {
    "--draft": "num_speculative_tokens",
    "--draft-n": "num_speculative_tokens",
    "--draft-max": "num_speculative_tokens",
    "--spec-draft-n-max": "num_speculative_tokens",
    "--draft-min": "min_speculative_tokens",
    "--draft-n-min": "min_speculative_tokens",
    "--spec-draft-n-min": "min_speculative_tokens",
    "-md": "model",
    "--model-draft": "model",
    "--spec-draft-model": "model",
    "-hfd": "model",
    "-hfrd": "model",
    "--hf-repo-draft": "model",
    "--spec-draft-hf": "model",
    "--draft-p-min": "draft_model_min_token_prob",
    "--spec-draft-p-min": "draft_model_min_token_prob",
}
DRAFT_SIMPLE = "draft-simple"
SPEC_TYPE, SPEC_DEFAULT = "--spec-type", "--spec-default"
NO_CACHE = "--no-cache-prompt"
NODES_OR_TOKENS = "-n"  # --nnodes of vLLM, --predict of llama-server

REDUNDANT: Table = table(
    {
        "chat templates are always Jinja templates": "--jinja",
        "requests always join the running batch and share one KV cache": "-cb --cont-batching -kvu "
        "--kv-unified --cache-prompt",
        "a text ends when it fills the context": "--no-context-shift",
        "/metrics is always available": "--metrics",
        "there are no such features": "--no-slots --no-mmproj --no-mmproj-auto --no-agent -no-ag",
        "files are memory-mapped and packed once": "--mmap --no-mmap --repack",
        "kernels are ready before the first request": "--warmup --no-warmup",
        "every answer has timings": "--perf --no-perf",
        "twostroke works that way": "--escape -e --no-escape --kv-offload -kvo --op-offload "
        "--no-skip-chat-parsing --no-prefill-assistant",
    }
)
RESTRICTED: Restrictions = {
    "-sm --split-mode": (("none", "layer", "row"), "--tensor-parallel-size splits a model"),
    "-mg --main-gpu": (("0",), "--device cuda:1 names another GPU"),
}
IGNORED: Table = table(
    {
        "the depth and the matches of drafts follow from measured costs and counts": (
            "--spec-ngram-mod-n-min= --spec-ngram-mod-n-max= --spec-ngram-mod-n-match= "
            "--spec-ngram-simple-size-n= --spec-ngram-simple-size-m= "
            "--spec-ngram-simple-min-hits= --spec-ngram-map-k-size-n= --spec-ngram-map-k-size-m= "
            "--spec-ngram-map-k-min-hits= --spec-ngram-map-k4v-size-n= "
            "--spec-ngram-map-k4v-size-m= --spec-ngram-map-k4v-min-hits= --spec-ngram-size-n= "
            "--spec-ngram-size-m= --spec-ngram-min-hits="
        ),
        "the draft model uses the threads and the device of the model": (
            "-ngld= --gpu-layers-draft= --n-gpu-layers-draft= --spec-draft-ngl= -devd= "
            "--device-draft= --spec-draft-device= -td= --threads-draft= --spec-draft-threads= "
            "-tbd= --threads-batch-draft= --spec-draft-threads-batch="
        ),
        "-b is the size of a step, which is computed as a whole": "-ub= --ubatch-size=",
        "attention never stores the scores of a whole context": "-fa=? --flash-attn=?",
        "weights are in ordinary memory": "--mlock -lm= --load-mode= -lzm= --lazy-mode= "
        "--check-tensors --no-repack -nr --no-host --no-op-offload",
        "the operating system schedules threads": "--cpu-strict= --cpu-strict-batch= --prio= "
        "--prio-batch= --poll= --poll-batch= --numa= --threads-http=",
        "memory is planned before the start": "-fit=? --fit=? -fitt= --fit-target= -fitc= "
        "--fit-ctx=",
        "the prefix cache has no such settings": "--cache-reuse= -sps= "
        "--slot-prompt-similarity= -ctxcp= --ctx-checkpoints= --swa-checkpoints= -cms= "
        "--checkpoint-min-step= --swa-full --cache-idle-slots --kv-unified-per-slot= -no-kvu "
        "--no-kv-unified -nocb --no-cont-batching -dt= --defrag-thold= -bs --backend-sampling",
        "a text ends when it fills the context": "--keep=",
        "models read and write text only": "--mmproj-auto --mmproj-offload --no-mmproj-offload "
        "-mmdev= --mmproj-device= --image-min-tokens= --image-max-tokens= --mtmd-batch-max-tokens= "
        "--video-fps= --video-timestamp-interval= --video-ffmpeg-dir=",
        "the chat page keeps its settings in the browser": "--ui-config= --webui-config= "
        "--ui-config-file= --webui-config-file= --slots --tags= --ui-mcp-proxy --webui-mcp-proxy",
        "logs go to stderr": "-v --verbose --log-verbose -lv= --verbosity= --log-verbosity= "
        "--log-disable --log-file= --log-jsonl --log-colors=? --log-prefix --log-timestamps",
        "a stream sends a token as soon as it is generated": "--sse-ping-interval= "
        "--sleep-idle-seconds=",
        "penalties always consider the whole text": "--repeat-last-n=",
        "--reasoning-parser separates reasoning from the answer": "--reasoning-preserve "
        "--reasoning-budget-message=",
        "GET and POST are allowed, and all headers": "--cors-methods= --cors-headers=",
    }
)
REFUSED: Table = table(
    {
        "URLs are not supported; download the file and give its path": "-mu= --model-url= -dr= "
        "--docker-repo=",
        "a model runs on one device, or in equal parts on several (--tensor-parallel-size)": "-ts= "
        "--tensor-split= -ot= --override-tensor= -cmoe --cpu-moe -ncmoe= "
        "--n-cpu-moe= -ncffn= --n-cpu-ffn= --rpc= -nkvo --no-kv-offload",
        "use taskset or numactl to select cores": "-C= --cpu-mask= -Cr= --cpu-range= -Cb= "
        "--cpu-mask-batch= -Crb= --cpu-range-batch=",
        "the draft model has the settings of the model; leave the option out": (
            "--draft-p-split= --spec-draft-p-split= "
            "-lcs= --lookup-cache-static= -lcd= --lookup-cache-dynamic= "
            "-ctkd= --cache-type-k-draft= --spec-draft-type-k= -ctvd= --cache-type-v-draft= "
            "--spec-draft-type-v= -Cd= --cpu-mask-draft= "
            "--spec-draft-cpu-mask= -Crd= --cpu-range-draft= --spec-draft-cpu-range= "
            "--cpu-strict-draft= --spec-draft-cpu-strict= --prio-draft= --spec-draft-prio= "
            "--poll-draft= --spec-draft-poll= -Cbd= --cpu-mask-batch-draft= "
            "--spec-draft-cpu-mask-batch= --cpu-strict-batch-draft= "
            "--spec-draft-cpu-strict-batch= --prio-batch-draft= --spec-draft-prio-batch= "
            "--poll-batch-draft= --spec-draft-poll-batch= -otd= --override-tensor-draft= "
            "--spec-draft-override-tensor= -cmoed --cpu-moe-draft --spec-draft-cpu-moe -ncmoed= "
            "--n-cpu-moe-draft= --spec-draft-n-cpu-moe= --spec-draft-ncmoe= --spec-synth-len= "
            "--spec-synth-rates= --spec-draft-backend-sampling --fim-qwen-7b-spec "
            "--fim-qwen-14b-spec"
        ),
        "LoRA adapters and control vectors are not supported yet; merge them into the model": (
            "--lora= --lora-scaled= --lora-init-without-apply --control-vector= "
            "--control-vector-scaled= --control-vector-layer-range=+"
        ),
        "models read and write text only; leave the option out": "-mm= --mmproj= -mmu= "
        "--mmproj-url= --media-path= --vision-gemma-4b-default --vision-gemma-12b-default",
        "the server only generates text: no embeddings, scores or classes": "--embedding "
        "--embeddings --rerank --reranking --pooling= --embd-normalize= --embd-gemma-default",
        "this sampler is not supported; temperature, top-k, top-p, min-p and penalties are": (
            "--samplers= --sampler-seq= --sampling-seq= --mirostat= --mirostat-lr= "
            "--mirostat-ent= --xtc-probability= --xtc-threshold= --typical= --typical-p= "
            "--top-nsigma= --top-n-sigma= --dry-multiplier= --dry-base= --dry-allowed-length= "
            "--dry-penalty-last-n= --dry-sequence-breaker= --dynatemp-range= --dynatemp-exp= "
            "--adaptive-target= --adaptive-decay="
        ),
        "give this setting in the request": "--grammar= --grammar-file= -j= --json-schema= -jf= "
        "--json-schema-file= -l= --logit-bias= --ignore-eos --reverse-prompt= -sp --special "
        "--prefill-assistant",
        "chat templates are always Jinja templates": "--no-jinja",
        "the model's template selects the parser of answers; leave the option "
        "out": "--skip-chat-parsing",
        "a text ends when it fills the context; leave the option out": "--context-shift",
        "a slot keeps no conversation; --kv-disk-cache DIR keeps all prefixes in a folder": (
            "--slot-save-path="
        ),
        "there is no such route": "--props --spm-infill",
        "use --root-path for the prefix that a proxy strips": "--api-prefix=",
        "the server serves no files": "--path=",
        "prompts and answers are never logged; leave the option out": "--log-prompts-dir=",
        "one server has one address": "--reuse-port",
        "--allowed-origins is the only setting of CORS; cookies are never allowed": (
            "--cors-credentials"
        ),
        "clients define and run tools, not the server": "--tools= --tools-runtime= "
        "--mcp-servers-config= --mcp-servers-json= --agent -ag",
        "a server has one model; give --model": "--models-dir= --models-preset= --models-max= "
        "--models-autoload --fim-qwen-1.5b-default --fim-qwen-3b-default --fim-qwen-7b-default "
        "--fim-qwen-30b-default --gpt-oss-20b-default --gpt-oss-120b-default",
        "there is no such command": "-cl --cache-list --list-devices --completion-bash",
    }
)
# Negations that are not in the tables.
REDUNDANT |= {
    flag: option
    for flag, option in negations(REFUSED, IGNORED).items()
    if not (flag in IGNORED or flag in REFUSED or flag in REDUNDANT)
}


class _RenamedLlamaOption(ForeignOption):
    def apply(self, parser: Parser, args: argparse.Namespace, flag: str, value: str) -> None:
        name, read = RENAMED[flag]
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
            parser.note(f"{flag} {value}", "all layers of a model run on one device")
        if setting is None:
            return
        before = getattr(args, name, None)
        if isinstance(setting, list):
            setting = [*(before or ()), *setting]
        elif isinstance(setting, dict):
            setting = merged(before or {}, setting)
        elif name == "kv_cache_dtype" and before not in (None, setting):
            parser.problem(
                f"{flag} {value}: keys and values have the same type; give both options one type"
            )
        setattr(args, name, setting)
        if read is _seconds:
            args.body_timeout_s = setting


class _DraftOption(ForeignOption):
    def apply(self, parser: Parser, args: argparse.Namespace, flag: str, value: str) -> None:
        add_speculation(parser, args, SPECULATION[flag], flag, value)


class _SpeculationType(ForeignOption):
    """llama-server's drafters: a draft model, or drafters that search texts. twostroke has one
    n-gram drafter for the latter."""

    def apply(self, parser: Parser, args: argparse.Namespace, flag: str, value: str) -> None:
        names = ["ngram-mod"] if flag == SPEC_DEFAULT else _words(value)
        if names == ["none"]:
            return
        methods: dict[str, None] = {}
        for name in names:
            if name != DRAFT_SIMPLE and not name.startswith("ngram-"):
                parser.problem(
                    f"{flag} {name}: not supported yet; {DRAFT_SIMPLE} drafts with a draft model, "
                    "and ngram-mod without a model"
                )
                return
            methods["draft_model" if name == DRAFT_SIMPLE else "ngram"] = None
        add_speculation(parser, args, "method", flag, ",".join(methods))


class _SamplingOption(ForeignOption):
    def apply(self, parser: Parser, args: argparse.Namespace, flag: str, value: str) -> None:
        name = SAMPLING[flag]
        try:
            setting: float = int(value) if name == "top_k" else float(value)
        except ValueError:
            parser.problem(f"{flag} {value}: expected a number")
            return
        before = getattr(args, "override_generation_config", {})
        args.override_generation_config = {**before, name: setting}


class _RopeScaling(ForeignOption):
    """The type of the rope's scaling or, as in earlier versions of vLLM, all settings as JSON."""

    def apply(self, parser: Parser, args: argparse.Namespace, flag: str, value: str) -> None:
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
        before = getattr(args, "hf_overrides", None) or {}
        args.hf_overrides = merged(before, {"rope_scaling": scaling})


class _YarnExtFactor(ForeignOption):
    def apply(self, parser: Parser, args: argparse.Namespace, flag: str, value: str) -> None:
        if value not in ("-1", "-1.0", "1", "1.0"):
            parser.problem(
                f"{flag} {value}: yarn always extrapolates fully; give 1, or leave the option out"
            )


class _NoCache(ForeignOption):
    def apply(self, parser: Parser, args: argparse.Namespace, flag: str, value: str) -> None:
        args.enable_prefix_caching = False


class _NodesOrTokens(ForeignOption):
    """`-n 1` is vLLM's one node. A larger number is llama-server's limit of output tokens."""

    def apply(self, parser: Parser, args: argparse.Namespace, flag: str, value: str) -> None:
        try:
            tokens = _number(value)
        except ValueError:
            parser.problem(f"{flag} {value}: expected a whole number")
            return
        if tokens is not None and tokens > 1:
            args.max_output_tokens = tokens
            parser.note(f"{flag} {value}", "read as llama-server's --n-predict")


def add_llama_arguments(parser: Parser) -> None:
    """Add llama-server's options. The help shows vLLM's names of these settings."""
    add_hidden(parser, RENAMED, _RenamedLlamaOption)
    add_hidden(parser, SAMPLING, _SamplingOption)
    add_hidden(parser, SPECULATION, _DraftOption)
    add_hidden(parser, [SPEC_TYPE], _SpeculationType)
    add_hidden(parser, [SPEC_DEFAULT], _SpeculationType, nargs=0)
    add_hidden(parser, [NO_CACHE], _NoCache, nargs=0)
    add_hidden(parser, ["--rope-scaling"], _RopeScaling)
    add_hidden(parser, ["--yarn-ext-factor"], _YarnExtFactor)
    add_hidden(parser, [NODES_OR_TOKENS], _NodesOrTokens)
