"""llama-server's flags: those of the same meaning are taken, the others refused by name.

llama-server -m model.gguf -c 4096 -np 8 -t 4 --temp 0.7        the line as it is …
twostroke serve -m model.gguf -c 4096 -np 8 -t 4 --temp 0.7     … with another first word
"""

from __future__ import annotations

import argparse
from collections.abc import Callable
from pathlib import Path
from typing import Any

from twostroke.commands.flags import json_object
from twostroke.commands.foreign import Foreign, Parser, add_hidden

ALL_LAYERS = 99  # -ngl: so many, or more, are written for "all"
USUAL_QUANT = "Q4_K_M"  # of a repository of GGUF files, if none is named
KV_TYPES = {"f32": "float32", "f16": "float16", "bf16": "bfloat16"}
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
        raise argparse.ArgumentTypeError("only f32, f16 and bf16 are supported")
    return KV_TYPES[text]


def _layers(text: str) -> str | None:
    """A device: with all layers the one there is, with none of them the CPU."""
    if text in ("auto", "all", "-1") or (text.isdigit() and int(text) >= ALL_LAYERS):
        return None
    if text == "0":
        return "cpu"
    raise argparse.ArgumentTypeError(
        f"a model runs on one device; give 0 for the CPU, or {ALL_LAYERS} (all) for the GPU"
    )


# What they set under our names. A reader that gives None asks for what happens anyway; a list is
# added to what was given before.
_TAKEN: list[tuple[str, str, Callable[[str], Any]]] = [
    ("-c --ctx-size", "max_model_len", _number),
    ("-np --parallel", "max_num_seqs", _number),
    ("-b --batch-size", "max_num_batched_tokens", _number),
    ("-t", "threads", _number),
    ("-tb", "threads_batch", _number),
    ("--predict --n-predict", "max_output_tokens", _number),
    ("-s", "seed", _seed),
    ("-a --alias", "served_model_name", _words),
    ("-hf -hfr --hf-repo", "model", _repository),
    ("-ngl --gpu-layers --n-gpu-layers", "device", _layers),
    ("-ctk --cache-type-k -ctv --cache-type-v", "kv_cache_dtype", _kv_type),
    ("--chat-template-file", "chat_template", str),
    ("--chat-template-kwargs", "default_chat_template_kwargs", json_object),
    ("--api-key-file", "api_key", _lines),
    ("--ssl-key-file", "ssl_keyfile", str),
    ("--ssl-cert-file", "ssl_certfile", str),
    ("--cors-origins", "allowed_origins", _origins),
]
TAKEN = {flag: (name, read) for flags, name, read in _TAKEN for flag in flags.split()}
NO_CACHE = "--no-cache-prompt"

# As in `vllm_flags.py`.
ANYWAY = {
    "--jinja": "chat templates are always Jinja's",
    "-cb": "requests always join the running batch",
    "--cont-batching": "requests always join the running batch",
    "-kvu": "requests share one cache",
    "--kv-unified": "requests share one cache",
    "--cache-prompt": "known beginnings of prompts are reused",
    "--no-context-shift": "a text that fills the context ends there",
    "--metrics": "/metrics is always there",
    "--no-slots": "there is no such route",
    "--no-ui": "there is no chat page",
    "--no-webui": "there is no chat page",
    "--no-mmproj": "models read and write text only",
    "--mmap": "files are mapped, and packed into memory once",
    "--no-mmap": "files are mapped, and packed into memory once",
    "--repack": "weights are packed for the CPU",
    "--warmup": "a GPU's kernels are ready before the first request; a CPU's need nothing",
    "--no-warmup": "a GPU's kernels are ready before the first request; a CPU's need nothing",
    "--perf": "every answer has its timings",
    "--no-perf": "only what is measured",
}
ONLY = {
    "-fa": (("on", "auto"), "attention never holds the scores of a whole context"),
    "--flash-attn": (("on", "auto"), "attention never holds the scores of a whole context"),
    "--reasoning-format": (("none", "auto"), "thinking is not parted from the answer yet"),
    "-sm": (("none",), "a model runs on one device in this version"),
    "--split-mode": (("none",), "a model runs on one device in this version"),
    "--cache-reuse": (("0",), "only beginnings of prompts are reused"),
}
OR_NOTHING = ("-fa", "--flash-attn")  # is "on"
_BY_REASON = {
    "a step is computed whole; -b, which is --max-num-batched-tokens, is its size": "-ub "
    "--ubatch-size",
    "give the file with the model: -hf org/name:FILE.gguf": "-hff --hf-file",
    "download the file and give its path": "-mu --model-url -dr --docker-repo",
    "the token is read from HF_TOKEN or `hf auth login`, where others cannot see it": "-hft",
    "set HF_HUB_OFFLINE=1": "--offline",
    "a model runs on one device in this version": "-ts --tensor-split -mg --main-gpu -dev "
    "-ot --override-tensor -cmoe --cpu-moe -ncmoe --n-cpu-moe -ncffn --n-cpu-ffn --rpc",
    "KV blocks stay on the device": "-nkvo --no-kv-offload",
    "weights are ordinary memory; keep the machine from swapping instead": "--mlock -lm "
    "--load-mode",
    "the team's threads are placed and scheduled by the system; use taskset, numactl or nice": (
        "-C --cpu-mask -Cr --cpu-range --cpu-strict -Cb --cpu-mask-batch -Crb --cpu-range-batch "
        "--cpu-strict-batch --prio --prio-batch --poll --poll-batch --numa"
    ),
    "one HTTP process serves without threads": "--threads-http",
    "the model's file is read as it stands": "--rope-scale --rope-freq-base --rope-freq-scale "
    "--yarn-orig-ctx --yarn-ext-factor --yarn-attn-factor --yarn-beta-slow --yarn-beta-fast "
    "--override-kv",
    "speculative decoding is not there yet": "-md --model-draft --spec-draft-model -hfd "
    "--hf-repo-draft --spec-type --spec-default --spec-draft-n-max --spec-draft-n-min --draft "
    "--draft-max --draft-min --draft-p-min -ngld --gpu-layers-draft -devd --device-draft -lcs "
    "--lookup-cache-static -lcd --lookup-cache-dynamic",
    "LoRA adapters and control vectors are not there yet; merge them into the model": "--lora "
    "--lora-scaled --lora-init-without-apply --control-vector --control-vector-scaled",
    "models read and write text only": "-mm --mmproj -mmu --mmproj-url --media-path",
    "the server generates text: no embeddings, scores or classes": "--embedding --embeddings "
    "--rerank --reranking --pooling",
    "this sampler is not there; temperature, top-k, top-p, min-p and penalties are": "--samplers "
    "--sampler-seq --mirostat --mirostat-lr --mirostat-ent --xtc-probability --xtc-threshold "
    "--typical --typical-p --top-nsigma --top-n-sigma --dry-multiplier --dry-base "
    "--dry-allowed-length --dry-penalty-last-n --dynatemp-range --dynatemp-exp --adaptive-target",
    "penalties look at the whole text": "--repeat-last-n",
    "a request asks for this itself": "--grammar --grammar-file -j --json-schema -jf "
    "--json-schema-file -l --logit-bias --ignore-eos --reverse-prompt",
    "chat templates are always Jinja's": "--no-jinja",
    "thinking is not parted from the answer yet; the template's own switch goes into "
    "--default-chat-template-kwargs": "-rea --reasoning --reasoning-budget --reasoning-effort",
    "a text that fills the context ends there": "--context-shift --keep",
    "KV blocks are not written to disk or host memory yet": "--slot-save-path -cram --cache-ram",
    "there are no such routes; /metrics and /dash show what is at work": "--slots --props",
    "--head-timeout-s, --body-timeout-s and --keep-alive-s are the limits": "-to --timeout",
    "routes start at /; let the proxy in front strip its prefix": "--api-prefix",
    "there are no files to serve": "--path",
    "logs go to stderr; only --uvicorn-log-level changes them": "-v --verbose --log-verbose -lv "
    "--verbosity --log-verbosity --log-disable --log-file --log-colors --log-prefix "
    "--log-timestamps",
    "a server has one model": "--models-dir --models-preset --models-max",
}
REFUSED = {
    flag: f"{flag} is llama-server's and not supported: {reason}"
    for reason, flags in _BY_REASON.items()
    for flag in flags.split()
}


class _Take(Foreign):
    def meet(self, parser: Parser, given: argparse.Namespace, flag: str, value: str) -> None:
        name, read = TAKEN[flag]
        try:
            setting = read(value)
        except argparse.ArgumentTypeError as error:
            parser.error(f"{flag} {value}: {error}")
        except ValueError:
            parser.error(f"{flag} takes a whole number, not {value!r}")
        if setting is None:
            return
        before = getattr(given, name, None)
        if isinstance(setting, list):
            setting = [*(before or ()), *setting]
        elif name == "kv_cache_dtype" and before not in (None, setting):
            parser.error("keys and values of the cache have one type; give -ctk and -ctv the same")
        setattr(given, name, setting)


class _Sample(Foreign):
    def meet(self, parser: Parser, given: argparse.Namespace, flag: str, value: str) -> None:
        name = SAMPLING[flag]
        try:
            setting: float = int(value) if name == "top_k" else float(value)
        except ValueError:
            parser.error(f"{flag} takes a number, not {value!r}")
        before = getattr(given, "override_generation_config", {})
        given.override_generation_config = {**before, name: setting}


class _NoCache(Foreign):
    def meet(self, parser: Parser, given: argparse.Namespace, flag: str, value: str) -> None:
        given.enable_prefix_caching = False


def add_llama_arguments(parser: Parser) -> None:
    """In the help they have vLLM's names."""
    add_hidden(parser, TAKEN, _Take)
    add_hidden(parser, SAMPLING, _Sample)
    add_hidden(parser, [NO_CACHE], _NoCache, nargs=0)
