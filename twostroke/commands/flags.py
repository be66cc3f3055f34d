"""Settings as command-line options, made from the settings' own fields so that they cannot drift.

An option that is not given is not passed on: the defaults are those of `EngineConfig` and
`SamplingParams`, and what values are allowed is theirs to say.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import re
from typing import Any, TypeVar

from twostroke.commands.parser import Parser
from twostroke.config import EngineConfig
from twostroke.errors import TwostrokeError
from twostroke.request import SamplingParams

S = TypeVar("S")

ENGINE_HELP = {
    "model": "path of a .gguf file or a model folder, or a Hugging Face id (default: a small "
    "model that is fetched once)",
    "tokenizer": "where the tokenizer is, if not with the model",
    "revision": "branch, tag or commit of a Hugging Face model",
    "chat_template": "a Jinja template, or a file that holds one, instead of the model's own",
    "load_format": "auto, safetensors, gguf or dummy (made-up weights)",
    "dtype": "auto, float32, float16 or bfloat16; auto is the model's own on a GPU and float32 on "
    "a CPU",
    "kv_cache_dtype": "of the KV cache; auto is the same as dtype, on a CPU float16; fp8 (that is "
    "fp8_e4m3) and fp8_e5m2 on a GPU, and int8 everywhere, hold twice as much",
    "device": "auto, cpu or cuda",
    "seed": "what random sampling starts from",
    "max_model_len": "longest sequence, prompt and answer (default: as model and cache allow)",
    "max_num_seqs": "requests that run at one time (default: 256, or by performance_mode)",
    "max_num_batched_tokens": "tokens in a step (default: by device)",
    "ttft_slo_ms": "goal for the time to the first token: prompts go by what is left of it",
    "itl_slo_ms": "goal for the time between two tokens: prefill takes what it leaves",
    "max_decode_stall": "how many times its steady gap a stream may wait while prompts are "
    "prefilled; 0 is no bound (default: 8, or by performance_mode)",
    "performance_mode": "interactivity (goals), balanced (streams flow beside long prompts) or "
    "throughput (larger steps): what is not given otherwise",
    "block_size": "tokens in a KV block",
    "gpu_memory_utilization": "share of the GPU's memory to use",
    "kv_cache_memory_bytes": "size of the KV cache, such as 512M or 4GiB (default: by device)",
    "num_gpu_blocks_override": "size of the KV cache in blocks, of layers without a window",
    "kv_eviction": "sinks: a request that writes keeps its first KV block and its newest, within "
    "kv_eviction_budget; heavy-hitters: and those between that got the most attention (default: "
    "it keeps all)",
    "kv_eviction_budget": "tokens that a request keeps with kv_eviction",
    "enable_prefix_caching": "reuse the KV blocks of a prompt's known beginning",
    "enable_chunked_prefill": "let a long prompt take several steps",
    "scheduling_policy": "fcfs or priority",
    "override_generation_config": "sampling for requests that do not say, as JSON, such as "
    '{"temperature": 0.5}; over what the model\'s makers recommend',
    "hf_overrides": "settings in the place of those in config.json, as JSON, such as "
    '{"rope_scaling": {"rope_type": "yarn", "factor": 4.0}}; a GGUF file takes those of the rope '
    "and the context, and entries of its metadata by their full names",
    "max_logprobs": "most log-probabilities a request may ask for",
    "enforce_eager": "no graphs and no compilation; the tokens stay the same",
    "max_cudagraph_capture_size": "largest decode batch that runs as a graph (default: all)",
    "cudagraph_capture_sizes": "decode batches that run as graphs, others padded up to them "
    "(default: 1, 2, 4, then by eights)",
    "nvtx": "name steps and the parts of layers for a profiler of a GPU",
    "tensor_parallel_size": "ranks that share the model: GPUs, or on a CPU processes that compute "
    "with torch (--kernels reference)",
    "quantization": "round weights that are not quantised yet: int8 or int4; fp8 on a GPU, where "
    "int8 and fp8 round activations, too (W8A8)",
    "prefill_quantization": "the same of steps with prefill alone, or none (default: as "
    "quantization says); both formats are kept",
    "decode_quantization": "the same of steps that only decode (default: as quantization says)",
    "calibration": 'a text file, or a .jsonl with a "text" a line, that the unquantised model '
    "reads first: weights are then rounded with regard to what they are multiplied with (default: "
    "without)",
    "kernels": "auto, reference (plain torch) or native (a CPU's own)",
    "isa": "instruction set of the native kernels: auto, amx, avx512, avx512bw (without VNNI), "
    "avx2, neon or portable",
    "exact": "native kernels: products and attention in floats, nothing rounded; slower",
    "threads": "threads of a decode step on a CPU (default: one a core)",
    "threads_batch": "threads of a step with prefill in it (default: as --threads)",
    "measure_ceilings": "measure at the start what the device can do, for /metrics and /dash",
}
SAMPLING_HELP = {
    "max_tokens": "most tokens to write; the model may stop before",
    "temperature": "0 takes the likeliest token, more makes the choice freer",
    "top_p": "choose among the likeliest tokens that have this much probability together",
    "top_k": "choose among this many of the likeliest tokens; 0 is all",
    "min_p": "leave out tokens below this share of the likeliest one's probability",
    "repetition_penalty": "above 1 avoids what prompt and answer have said before",
    "presence_penalty": "above 0 avoids what the answer has said before",
    "frequency_penalty": "as presence_penalty, and more with every repetition",
    "stop": "end at this text; may be given several times",
    "ignore_eos": "write on when the model wants to stop",
    "min_tokens": "fewest tokens to write",
}
# What `run` and `chat` need not have: they read and write text, and have options of sampling.
OF_A_SERVER = {"skip_tokenizer_init", "override_generation_config"}
# Which sets them, for each engine.
OF_A_ROUTER = {
    "engines_on_host",
    "engine_index",
    "engine_secret",
    "kv_sharing",
    "kv_receives",
    "kv_transport",
    "kv_host",
    "kv_transfer_timeout_s",
}
MAX_TOKENS = 512
TYPES = {"str": str, "int": int, "float": float}
UNITS = {"": 0, "k": 1, "m": 2, "g": 3, "t": 4}


def add_model_argument(parser: argparse.ArgumentParser) -> None:
    """`take_model` reads it."""
    parser.add_argument(
        "operand",
        nargs="?",
        default=argparse.SUPPRESS,
        metavar="MODEL",
        help="the model, as --model has it",
    )


def take_model(args: argparse.Namespace) -> None:
    """One model, whichever way it was given."""
    if hasattr(args, "operand"):
        if hasattr(args, "model"):
            args.parser.problem(
                f"the model is given twice: {args.operand} and --model {args.model}"
            )
        args.model = args.operand
        del args.operand


def add_engine_arguments(parser: argparse.ArgumentParser, leave_out: set[str]) -> None:
    """An option for every field of `EngineConfig` except those that the command cannot use."""
    group = parser.add_argument_group("model and engine (the names are vLLM's)")
    for field in dataclasses.fields(EngineConfig):
        if field.name not in leave_out | OF_A_ROUTER:
            _add(group, field, ENGINE_HELP[field.name], field.default)


def add_sampling_arguments(parser: argparse.ArgumentParser) -> None:
    group = parser.add_argument_group(
        "sampling", "what is not given is as the model's makers recommend"
    )
    fields = {field.name: field for field in dataclasses.fields(SamplingParams)}
    for name, text in SAMPLING_HELP.items():
        _add(group, fields[name], text, MAX_TOKENS if name == "max_tokens" else None)


def engine_config(args: argparse.Namespace) -> EngineConfig | None:
    """None: a problem was found."""
    return settings(args.parser, EngineConfig, engine_settings(args))


def engine_settings(args: argparse.Namespace) -> dict[str, Any]:
    """What the user gave of the engine's settings."""
    return given_of(args, EngineConfig)


def settings(
    parser: Parser, kind: type[S], given: dict[str, Any], flags: dict[str, str] | None = None
) -> S | None:
    """A `kind` of what was given, or None: what is wrong is now among the parser's problems.

    `flags` are those that have other names than their settings."""
    try:
        return kind(**given)
    except TwostrokeError as error:
        found = [str(error)]
    for name, value in given.items():  # each alone, so that all wrong ones are told
        try:
            kind(**{name: value})
        except TwostrokeError as error:
            others = [one for one in given if one != name and "_" in one and one in str(error)]
            if str(error).startswith(name) and not others:  # else it may be right beside them
                found.append(str(error))
    fields = [field.name for field in dataclasses.fields(kind)]  # type: ignore[arg-type]
    for message in found:
        parser.problem(_with_flags(message, fields, flags or {}))
    return None


def _with_flags(message: str, fields: list[str], flags: dict[str, str]) -> str:
    """The same with the flags' names for the settings'."""

    def flag(match: re.Match[str]) -> str:
        return "--" + flags.get(match[0], match[0]).replace("_", "-")

    several = [name for name in fields if "_" in name]
    first = "|".join(sorted(fields, key=len, reverse=True))
    message = re.sub(rf"^({first})\b", flag, message)
    return re.sub(rf"(?<![-\w])({'|'.join(several)})(?!\w)", flag, message)


def checked(args: argparse.Namespace) -> EngineConfig:
    """The engine's settings; what is wrong with them, or with the sampling, ends the program."""
    config = engine_config(args)
    settings(args.parser, SamplingParams, given_of(args, SamplingParams))
    args.parser.finish()
    assert config is not None
    return config


def sampling_params(
    args: argparse.Namespace, recommended: SamplingParams | None = None
) -> SamplingParams:
    """What the user gave, over what the model's makers recommend, over the likeliest token."""
    if recommended is None or recommended == SamplingParams():
        recommended = SamplingParams(temperature=0)
    given = {"max_tokens": MAX_TOKENS} | given_of(args, SamplingParams)
    return dataclasses.replace(recommended, **given)


def parse_bytes(text: str) -> int:
    """`4096`, `512M` and `4GiB` (powers of 1024), `4GB` (powers of 1000)."""
    match = re.fullmatch(r"(\d+(?:\.\d+)?) ?([kmgt]?)(i?b)?", text.strip().lower())
    if match is None or (match[3] == "ib" and not match[2]):
        raise argparse.ArgumentTypeError("expected a size such as 512M or 4GiB")
    base = 1000 if match[3] == "b" else 1024
    return int(float(match[1]) * base ** UNITS[match[2]])


def parse_threads(text: str) -> int | None:
    """Return a number of threads; with 0 or -1, as llama-server has it, the default."""
    try:
        return int(text) if int(text) not in (0, -1) else None
    except ValueError:
        raise argparse.ArgumentTypeError("expected a whole number") from None


def json_object(text: str) -> dict[str, Any]:
    try:
        value = json.loads(text)
    except ValueError:
        value = None
    if not isinstance(value, dict):
        raise argparse.ArgumentTypeError('expected a JSON object such as {"key": 1}')
    return value


class MergeJson(argparse.Action):
    """Objects that are given one after the other are one."""

    def __call__(
        self, parser: Any, namespace: argparse.Namespace, values: Any, option: str | None = None
    ) -> None:
        before = getattr(namespace, self.dest, None) or {}
        setattr(namespace, self.dest, merged(before, values))


def merged(one: Any, other: Any) -> Any:
    if isinstance(one, dict) and isinstance(other, dict):
        return {**one, **{key: merged(one.get(key), value) for key, value in other.items()}}
    return [*one, *other] if isinstance(one, list) and isinstance(other, list) else other


def given_of(args: argparse.Namespace, settings: type[Any]) -> dict[str, Any]:
    names = [field.name for field in dataclasses.fields(settings)]
    return {name: getattr(args, name) for name in names if hasattr(args, name)}


def _add(
    group: argparse._ArgumentGroup, field: dataclasses.Field[Any], text: str, default: Any
) -> None:
    option = "--" + field.name.replace("_", "-")
    names = ["-m", option] if field.name == "model" else [option]
    kind = str(field.type).removesuffix(" | None")
    options: dict[str, Any] = {"default": argparse.SUPPRESS, "dest": field.name}
    if kind == "bool":
        options["action"] = argparse.BooleanOptionalAction
        if default is not None:
            text += f" (default: {'yes' if default else 'no'})"
    elif kind == "dict[str, Any]":
        options |= {"type": json_object, "action": MergeJson, "metavar": "JSON"}
    elif kind == "tuple[int, ...]":
        options |= {"type": int, "nargs": "+", "action": "extend", "metavar": "N"}
    elif field.name == "stop":
        options |= {"action": "append", "metavar": "TEXT"}
    elif field.name in ("threads", "threads_batch"):
        options |= {"type": parse_threads, "metavar": "N"}
    else:
        options["type"] = parse_bytes if field.name.endswith("_bytes") else TYPES[kind]
        options["metavar"] = {"int": "N", "float": "X", "str": "NAME"}[kind]
        if default is not None:
            text += f" (default: {default})"
    group.add_argument(*names, help=text, **options)
