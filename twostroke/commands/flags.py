"""Command-line options made from the fields of `EngineConfig` and `SamplingParams`.

Only options that the user gives are passed on. The two classes have the defaults and check the
values.
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
from twostroke.kv.tiers.disk_settings import read_size
from twostroke.request import SamplingParams

S = TypeVar("S")

ENGINE_HELP = {
    "model": "path of a .gguf file or a model folder, or a Hugging Face id (default: a small "
    "model, which is downloaded once)",
    "tokenizer": "folder or Hugging Face id of the tokenizer (default: the model's)",
    "revision": "branch, tag or commit of a Hugging Face model",
    "chat_template": "a Jinja template, or a file with one, instead of the model's",
    "load_format": "auto, safetensors, gguf or dummy (random weights)",
    "dtype": "auto, float32, float16 or bfloat16; auto is the model's dtype on a GPU and float32 "
    "on a CPU",
    "kv_cache_dtype": "dtype of the KV cache; auto is dtype on a GPU and float16 on a CPU; fp8 "
    "(the same as fp8_e4m3) and fp8_e5m2 on a GPU, and int8 on any device, hold twice as many "
    "tokens",
    "device": "auto, cpu or cuda",
    "seed": "seed of random sampling",
    "max_model_len": "maximum length of prompt and answer together (default: what model and KV "
    "cache allow)",
    "max_num_seqs": "maximum number of running requests (default: 256, or by performance_mode)",
    "max_num_batched_tokens": "maximum number of tokens in a step (default: by device)",
    "ttft_slo_ms": "goal for the time to the first token: prompts are ordered by the time left",
    "itl_slo_ms": "goal for the time between two tokens: prefill uses the rest of a step's time",
    "max_decode_stall": "longest time between two tokens of a stream during prefill, as a multiple "
    "of the time without prefill; 0: no limit (default: 8, or by performance_mode)",
    "performance_mode": "interactivity (latency goals), balanced (streams continue during long "
    "prompts) or throughput (larger steps): defaults of other settings",
    "block_size": "tokens in a KV block",
    "gpu_memory_utilization": "share of the GPU's memory to use",
    "kv_cache_memory_bytes": "size of the KV cache, such as 512M or 4GiB (default: by device)",
    "num_gpu_blocks_override": "size of the KV cache of layers without a window, in blocks",
    "kv_offloading_size": "GiB of host memory for prefixes that the KV cache of a GPU has no room "
    "for",
    "kv_disk_cache": "a folder for KV blocks of prefixes, as DIR or DIR:SIZE such as "
    "/var/cache/kv:20GiB: prefixes survive eviction and restarts (default size: half of the free "
    "space)",
    "kv_eviction": "sinks: while a request decodes it keeps its first and its newest KV blocks, up "
    "to kv_eviction_budget; heavy-hitters: it also keeps the blocks in between that get the most "
    "attention (default: it keeps all blocks)",
    "kv_eviction_budget": "tokens that a request keeps with kv_eviction",
    "speculative_config": "draft several tokens and verify them in one step, as JSON, such as "
    '{"method": "suffix", "num_speculative_tokens": 8}; methods are ngram, suffix, and draft_model '
    'with "model" (default: no drafts)',
    "enable_prefix_caching": "reuse the KV blocks of a prompt prefix that was computed before",
    "enable_chunked_prefill": "prefill a long prompt in several steps",
    "scheduling_policy": "fcfs or priority",
    "override_generation_config": "default sampling of requests, as JSON, such as "
    '{"temperature": 0.5}; it overrides the recommendation of the model\'s makers',
    "hf_overrides": "settings that replace settings of config.json, as JSON, such as "
    '{"rope_scaling": {"rope_type": "yarn", "factor": 4.0}}; a GGUF file accepts the settings of '
    "the rope and the context, and entries of its metadata by their full names",
    "max_logprobs": "maximum number of log-probabilities that a request may ask for",
    "enforce_eager": "use no CUDA graphs and no compilation; the tokens stay the same",
    "max_cudagraph_capture_size": "largest decode batch that runs as a graph (default: all)",
    "cudagraph_capture_sizes": "sizes of decode batches that run as graphs; other batches are "
    "padded to the next size (default: 1, 2, 4, then multiples of 8)",
    "nvtx": "name steps and the parts of layers with NVTX ranges for a GPU profiler",
    "tensor_parallel_size": "ranks that share the model: GPUs, or on a CPU processes that use "
    "torch (--kernels reference)",
    "quantization": "round unquantised weights to int8 or int4, or on a GPU to fp8; on a GPU int8 "
    "and fp8 also round activations (W8A8)",
    "prefill_quantization": "quantization of steps with prefill, or none (default: quantization); "
    "the weights are then stored in both formats",
    "decode_quantization": "quantization of steps that only decode, or none (default: "
    "quantization)",
    "calibration": 'a text file, or a .jsonl with a "text" on each line, that the unquantised '
    "model "
    "reads before weights are rounded: the inputs of a matrix decide how it is rounded (default: "
    "none)",
    "kernels": "auto, reference (plain torch) or native (C++ on a CPU)",
    "isa": "instruction set of the native kernels: auto, amx, avx512, avx512bw (without VNNI), "
    "avx2, neon or portable",
    "exact": "native kernels compute linear layers and attention in floats, without rounding "
    "activations; slower",
    "threads": "threads of a decode step on a CPU (default: one for each core)",
    "threads_batch": "threads of a step with prefill on a CPU (default: --threads)",
    "measure_ceilings": "measure the device's compute and memory rates at the start, for /metrics "
    "and /dash",
}
SAMPLING_HELP = {
    "max_tokens": "maximum number of tokens of the answer; the model may stop before",
    "temperature": "0 selects the most likely token; higher values are more random",
    "top_p": "sample from the most likely tokens that together have this probability",
    "top_k": "sample from this many of the most likely tokens; 0: all",
    "min_p": "leave out tokens below this share of the most likely token's probability",
    "repetition_penalty": "above 1 avoids tokens of the prompt and the answer",
    "presence_penalty": "above 0 avoids tokens of the answer",
    "frequency_penalty": "above 0 avoids tokens of the answer, more with every repetition",
    "stop": "end the answer at this text; may be given several times",
    "ignore_eos": "continue when the model would stop",
    "min_tokens": "minimum number of tokens of the answer",
}
# Settings that are no options of `run` and `chat`, because these commands need a tokenizer and have
# sampling options.
SERVER_ONLY = {"skip_tokenizer_init", "override_generation_config"}
# Settings that a server sets for each engine, and that are no options.
ROUTER_ONLY = {
    "engines_on_host",
    "engine_index",
    "engine_secret",
    "kv_sharing",
    "kv_receives",
    "kv_transport",
    "kv_host",
    "kv_transfer_timeout_s",
    "hang_timeout_s",
    "start_timeout_s",
}
MAX_TOKENS = 512
TYPES = {"str": str, "int": int, "float": float}


def add_model_argument(parser: argparse.ArgumentParser) -> None:
    """Add the model as an operand, which `resolve_model` reads."""
    parser.add_argument(
        "operand",
        nargs="?",
        default=argparse.SUPPRESS,
        metavar="MODEL",
        help="the model, like --model",
    )


def resolve_model(args: argparse.Namespace) -> None:
    """Set the model from the operand or from `--model`."""
    if hasattr(args, "operand"):
        if hasattr(args, "model"):
            args.parser.problem(
                f"the model is given twice: {args.operand} and --model {args.model}"
            )
        args.model = args.operand
        del args.operand


def add_engine_arguments(parser: argparse.ArgumentParser, leave_out: set[str]) -> None:
    """Add an option for every field of `EngineConfig` except those that the command cannot use."""
    group = parser.add_argument_group("model and engine (the names are vLLM's)")
    for field in dataclasses.fields(EngineConfig):
        if field.name not in leave_out | ROUTER_ONLY:
            _add(group, field, ENGINE_HELP[field.name], field.default)


def add_sampling_arguments(parser: argparse.ArgumentParser) -> None:
    group = parser.add_argument_group(
        "sampling", "defaults are the recommendation of the model's makers"
    )
    fields = {field.name: field for field in dataclasses.fields(SamplingParams)}
    for name, text in SAMPLING_HELP.items():
        _add(group, fields[name], text, MAX_TOKENS if name == "max_tokens" else None)


def engine_config(args: argparse.Namespace) -> EngineConfig | None:
    """Return the engine's settings; None if they have an error."""
    return settings(args.parser, EngineConfig, engine_settings(args))


def engine_settings(args: argparse.Namespace) -> dict[str, Any]:
    """Return the engine's settings that the user gave."""
    return chosen_settings(args, EngineConfig)


def settings(
    parser: Parser, cls: type[S], values: dict[str, Any], flags: dict[str, str] | None = None
) -> S | None:
    """Make a settings object. Add errors to the parser's problems, and return None after errors.

    `flags`: the flags of settings that have another name than their flag."""
    try:
        return cls(**values)
    except TwostrokeError as error:
        found = [str(error)]
    for name, value in values.items():  # one at a time, to report every invalid value
        try:
            cls(**{name: value})
        except TwostrokeError as error:
            others = [other for other in values if other != name and "_" in other]
            named = any(other in str(error) for other in others)
            # An error that names another setting may not occur with the value of that setting.
            if str(error).startswith(name) and not named:
                found.append(str(error))
    fields = [field.name for field in dataclasses.fields(cls)]  # type: ignore[arg-type]
    for message in found:
        parser.problem(_with_flags(message, fields, flags or {}))
    return None


def _with_flags(message: str, fields: list[str], flags: dict[str, str]) -> str:
    """Replace the names of settings in a message by the names of flags."""

    def flag(match: re.Match[str]) -> str:
        return "--" + flags.get(match[0], match[0]).replace("_", "-")

    several = [name for name in fields if "_" in name]
    first = "|".join(sorted(fields, key=len, reverse=True))
    message = re.sub(rf"^({first})\b", flag, message)
    return re.sub(rf"(?<![-\w])({'|'.join(several)})(?!\w)", flag, message)


def require_engine_config(args: argparse.Namespace) -> EngineConfig:
    """Return the engine's settings. Errors in them or in the sampling end the program."""
    config = engine_config(args)
    settings(args.parser, SamplingParams, chosen_settings(args, SamplingParams))
    args.parser.finish()
    assert config is not None
    return config


def sampling_params(
    args: argparse.Namespace, recommended: SamplingParams | None = None
) -> SamplingParams:
    """Return the recommendation of the model's makers with the user's parameters. Without a
    recommendation the temperature is 0."""
    if recommended is None or recommended == SamplingParams():
        recommended = SamplingParams(temperature=0)
    chosen = {"max_tokens": MAX_TOKENS} | chosen_settings(args, SamplingParams)
    return dataclasses.replace(recommended, **chosen)


def parse_bytes(text: str) -> int:
    """Read `4096`, `512M` and `4GiB` (powers of 1024), and `4GB` (powers of 1000)."""
    size = read_size(text)
    if size is None:
        raise argparse.ArgumentTypeError("expected a size such as 512M or 4GiB")
    return size


def parse_threads(text: str) -> int | None:
    """Return a number of threads; None, the default, for 0 and -1, as in llama-server."""
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
    """Merges the objects of an option that is given several times."""

    def __call__(
        self, parser: Any, namespace: argparse.Namespace, values: Any, option: str | None = None
    ) -> None:
        before = getattr(namespace, self.dest, None) or {}
        setattr(namespace, self.dest, merged(before, values))


def merged(one: Any, other: Any) -> Any:
    """Merge objects by key, and join lists. Any other value replaces `one`."""
    if isinstance(one, dict) and isinstance(other, dict):
        return {**one, **{key: merged(one.get(key), value) for key, value in other.items()}}
    return [*one, *other] if isinstance(one, list) and isinstance(other, list) else other


def chosen_settings(args: argparse.Namespace, cls: type[Any]) -> dict[str, Any]:
    """Return the fields of a settings class that the user gave."""
    names = [field.name for field in dataclasses.fields(cls)]
    return {name: getattr(args, name) for name in names if hasattr(args, name)}


def _add(
    group: argparse._ArgumentGroup, field: dataclasses.Field[Any], text: str, default: Any
) -> None:
    option = "--" + field.name.replace("_", "-")
    names = ["-m", option] if field.name == "model" else [option]
    type_name = str(field.type).removesuffix(" | None")
    options: dict[str, Any] = {"default": argparse.SUPPRESS, "dest": field.name}
    if type_name == "bool":
        options["action"] = argparse.BooleanOptionalAction
        if default is not None:
            text += f" (default: {'yes' if default else 'no'})"
    elif type_name == "dict[str, Any]":
        options |= {"type": json_object, "action": MergeJson, "metavar": "JSON"}
    elif type_name == "tuple[int, ...]":
        options |= {"type": int, "nargs": "+", "action": "extend", "metavar": "N"}
    elif field.name == "stop":
        options |= {"action": "append", "metavar": "TEXT"}
    elif field.name in ("threads", "threads_batch"):
        options |= {"type": parse_threads, "metavar": "N"}
    else:
        options["type"] = parse_bytes if field.name.endswith("_bytes") else TYPES[type_name]
        options["metavar"] = {"int": "N", "float": "X", "str": "NAME"}[type_name]
        if default is not None:
            text += f" (default: {default})"
    group.add_argument(*names, help=text, **options)
