"""`serve`'s options: those of `vllm serve`, our limits, and the file that may hold them."""

from __future__ import annotations

import argparse
import dataclasses
import json
import logging
import os
import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from twostroke import log_lines
from twostroke.commands.config_file import file_words
from twostroke.commands.environment import (
    admin_keys_of_environment,
    dev_mode_of_environment,
    keys_of_environment,
    settle_traces,
)
from twostroke.commands.flags import (
    TYPES,
    MergeJson,
    add_engine_arguments,
    add_model_argument,
    engine_config,
    given_of,
    json_object,
    parse_bytes,
    settings,
    take_model,
)
from twostroke.commands.llama_flags import device
from twostroke.commands.parser import NUMBER, Parser
from twostroke.commands.vllm_flags import add_foreign_arguments
from twostroke.config import EngineConfig
from twostroke.errors import ConfigError
from twostroke.route.pool_settings import PoolSettings
from twostroke.serve.settings import ServeSettings

EVERYWHERE = "0.0.0.0"
LOAD_FORMATS = {  # the same files, by other ways
    "hf": "auto",
    "mistral": "auto",
    "fastsafetensors": "safetensors",
    "instanttensor": "safetensors",
    "ipc_cache": "auto",
    "runai_streamer": "safetensors",
}
# vLLM's, which accept the same texts as llguidance.
STRUCTURED_BACKENDS = ("auto", "guidance", "xgrammar", "outlines", "lm-format-enforcer")
LOG_LEVELS = ("critical", "error", "warning", "info", "debug", "trace")
# The options that `serve --help` shows.
USUAL = (
    *("--host", "--port", "--api-key", "--served-model-name", "--config"),
    *("--model", "--tokenizer", "--chat-template", "--max-model-len", "--dtype"),
    *("--quantization", "--kv-cache-dtype", "--device", "--gpu-memory-utilization"),
    *("--max-num-seqs", "--threads", "--tensor-parallel-size", "--data-parallel-size"),
    *("--tool-call-parser", "--reasoning-parser", "--enable-log-requests"),
)
# vLLM's names of groups, as `--help=GROUP` takes them there.
VLLM_GROUPS = {"frontend": "server", "parallelconfig": "several engines"} | dict.fromkeys(
    [
        "modelconfig",
        "loadconfig",
        "cacheconfig",
        "schedulerconfig",
        "compilationconfig",
        "vllmconfig",
    ],
    "model and engine",
)
LIMITS = {
    "max_body_bytes": "longest body of a request (default: 8 MiB, or 64 bytes a token of "
    "max_model_len)",
    "max_body_weight": "most JSON in a body: a comma weighs 1, a bracket 4, a colon 8 (default: "
    "524288, or 8 a token of max_model_len)",
    "min_body_bytes_per_s": "bodies that arrive slower are answered 408",
    "max_choices": "texts that one request may ask for: its prompts, times n",
    "max_connections": "more are answered 503 (default: what the limit of open files leaves)",
    "max_header_bytes": "longest head of a request",
    "max_prompt_tokens": "longest prompt (default: what the engine takes)",
    "max_output_tokens": "longest answer; a request that asks for more gets this many",
    "max_unread_bytes": "bytes of a stream that its client may leave unread; in total, 8 times "
    "as many",
    "max_queue": "requests that may wait; more are answered 429",
    "head_timeout_s": "seconds to send a request's head in",
    "body_timeout_s": "seconds to send a request's body in",
    "write_timeout_s": "seconds in which a client must read some of what is written to it",
    "keep_alive_s": "seconds a connection may idle between requests",
    "prefix_cache_sharing": "requests with different keys share cached prefixes",
    "strict_fields": "a request with an unknown field is answered 400 (default: the field is "
    "ignored, with a warning in the answer's headers and in the log)",
    "client_priority": "requests may set their own priority; if not, theirs is ignored",
    "engine_hang_timeout_s": "seconds without a sign of life after which the engine's process is "
    "killed and started again; 0: never",
    "engine_restart_limit": "deaths of the engine in a row, each soon after its start, that end "
    "the server",
    "open_health": "/health and /ping answer without a key",
    "open_metrics": "/metrics answers without a key (default: only if there are no keys)",
    "ui": "there are pages for people: a chat at /, and /learn and /dash",
    "dash": "there is a page at /dash",
    "max_stored_responses": "answers of /v1/responses that are kept; 0: none",
    "max_stored_response_bytes": "memory for them, and for what their requests keep while they run",
    "stored_response_ttl_s": "seconds after which they are forgotten",
}
# Flags whose settings have other names.
SETTINGS = {
    "api_key": "api_keys",
    "admin_api_key": "admin_api_keys",
    "served_model_name": "served_model_names",
    "allowed_origins": "cors_origins",
    "default_chat_template_kwargs": "chat_template_kwargs",
    "enable_log_requests": "access_log",
    "enable_force_include_usage": "force_include_usage",
    "shutdown_timeout": "drain_s",
}
SCALES = {"k": 1000, "m": 1000**2, "g": 1000**3, "K": 1024, "M": 1024**2, "G": 1024**3}


def add_server_arguments(parser: Parser) -> None:
    parser.usual, parser.other_groups = USUAL, VLLM_GROUPS
    # No option has a default: what is in the namespace was given, here or in the file.
    add_model_argument(parser)
    _add(
        parser,
        "--config",
        metavar="FILE.yaml",
        help="read options from here; the command line goes over it",
    )
    group = parser.add_argument_group("server (the names are vLLM's)")
    _add(
        group,
        "--host",
        metavar="ADDRESS",
        help="where to listen (default: 0.0.0.0 with a key, 127.0.0.1 without)",
    )
    _add(group, "--port", type=int, metavar="N", help="(default: 8000)")
    _add(group, "--uds", metavar="PATH", help="listen on a Unix domain socket instead")
    _add(
        group,
        "--api-key",
        nargs="+",
        action="extend",
        metavar="KEY",
        help="keys that clients must show one of (default: TWOSTROKE_API_KEY or VLLM_API_KEY from "
        "the environment)",
    )
    _add(
        group,
        "--admin-api-key",
        nargs="+",
        action="extend",
        metavar="KEY",
        help="keys that may also act on the server (profiles, sleep, pools) and see the requests "
        "of every key (default: TWOSTROKE_ADMIN_API_KEY from the environment)",
    )
    _add(
        group,
        "--served-model-name",
        nargs="+",
        action="extend",
        metavar="NAME",
        help="what clients call the model; the first is in the answers",
    )
    _add(group, "--response-role", metavar="ROLE", help="(default: assistant)")
    _add(
        group,
        "--enable-auto-tool-choice",
        action=argparse.BooleanOptionalAction,
        help="let the model decide whether to call a tool (default: yes)",
    )
    _add(
        group,
        "--exclude-tools-when-tool-choice-none",
        action=argparse.BooleanOptionalAction,
        help='do not show the model the tools of a request whose tool_choice is "none"',
    )
    _add(
        group,
        "--tool-call-parser",
        metavar="NAME",
        help="how the model's calls of tools are read (default: auto, by its template)",
    )
    _add(
        group,
        "--structured-outputs-config",
        dest="disable_additional_properties",
        type=_structured_outputs_config,
        metavar="JSON",
        help='{"disable_additional_properties": false}: where a JSON schema gives properties and '
        "says nothing of others, an object may have others (default: it may not)",
    )
    _add(group, "--ssl-keyfile", metavar="FILE", help="key of the TLS certificate")
    _add(group, "--ssl-certfile", metavar="FILE", help="TLS certificate")
    _add(
        group,
        "--allowed-origins",
        nargs="+",
        action="extend",
        type=_origins,
        metavar="ORIGIN",
        help="pages that may call from a browser, one by one or as a JSON list (default: none)",
    )
    _add(
        group,
        "--allowed-hosts",
        nargs="+",
        action="extend",
        metavar="NAME",
        help="names that clients may reach the server by, such as llm.example.org, *.example.org "
        "or * (default: this machine's alone; with a key, any)",
    )
    _add(
        group,
        "--default-chat-template-kwargs",
        type=json_object,
        action=MergeJson,
        metavar="JSON",
        help="variables of the chat template that a request may change",
    )
    _add(
        group,
        "--trust-request-chat-template",
        action=argparse.BooleanOptionalAction,
        help="let a request bring its own chat template",
    )
    _add(
        group,
        "--reasoning-parser",
        type=lambda name: "none" if name.lower() == "none" else name,
        metavar="NAME",
        help="how the model's thinking is parted from its answer (default: only where the prompt "
        "leaves it thinking)",
    )
    _add(
        group,
        "--root-path",
        metavar="PATH",
        help="a prefix that every route has as well, for a proxy that leaves it there",
    )
    _add(
        group,
        "--enable-request-id-headers",
        action=argparse.BooleanOptionalAction,
        help="answers carry X-Request-Id: the request's own, or a new one",
    )
    _add(
        group,
        "--enable-force-include-usage",
        action=argparse.BooleanOptionalAction,
        help="every chunk of every stream has its usage, whether or not the request asks",
    )
    _add(
        group,
        "--enable-per-request-metrics",
        action=argparse.BooleanOptionalAction,
        help="answers have vLLM's metrics: time to first token, in the queue, between tokens; a "
        "stream that has its usage has them there",
    )
    _add(
        group,
        "--reasoning-effort-map",
        type=json_object,
        action=MergeJson,
        metavar="JSON",
        help="the reasoning effort that the chat template gets for the one a request asks for, "
        'such as {"xhigh": "high"}',
    )
    _add(
        group,
        "--enable-tokenizer-info-endpoint",
        action=argparse.BooleanOptionalAction,
        help="/tokenizer_info tells the special tokens and the chat template",
    )
    _add(
        group,
        "--return-tokens-as-token-ids",
        action=argparse.BooleanOptionalAction,
        help="log-probabilities name their tokens by id, unless a request says otherwise",
    )
    _add(
        group,
        "--enable-log-requests",
        action=argparse.BooleanOptionalAction,
        help="a line of log for each request: who, what route, which status; never the text",
    )
    _add(
        group,
        "--disable-log-stats",
        action=argparse.BooleanOptionalAction,
        help="no line about both phases and the KV cache every ten seconds while there is work",
    )
    _add(
        group,
        "--uvicorn-log-level",
        choices=LOG_LEVELS,
        metavar="LEVEL",
        help=f"{', '.join(LOG_LEVELS[:-1])} or {LOG_LEVELS[-1]} (default: warning)",
    )
    _add(
        group,
        "--otlp-traces-endpoint",
        metavar="URL",
        help="send a span for each request there, by OpenTelemetry's protocol (default: where "
        "OTEL_EXPORTER_OTLP_ENDPOINT or OTEL_EXPORTER_OTLP_TRACES_ENDPOINT say)",
    )
    _add(
        group,
        "--shutdown-timeout",
        type=float,
        metavar="SECONDS",
        help="how long running requests may go on after SIGTERM (default: 30)",
    )
    _add_limits(parser.add_argument_group("limits (the names are twostroke's)"))
    _add_pools(parser.add_argument_group("several engines, here or on a cluster"))
    add_engine_arguments(parser, leave_out={"skip_tokenizer_init"})
    _add(
        parser,
        "--skip-tokenizer-init",
        action=argparse.BooleanOptionalAction,
        help="prompts and answers are token ids only",
    )
    switch = argparse.BooleanOptionalAction
    _add(parser, "--webui", dest="ui", action=switch, help=argparse.SUPPRESS)  # llama-server's
    _add(parser, "-q", dest="quantization", help=argparse.SUPPRESS)
    _add(parser, "-tp", dest="tensor_parallel_size", type=int, help=argparse.SUPPRESS)
    readers = {
        "max_model_len": parse_length,
        "max_num_batched_tokens": parse_count,
        "device": device,
        "quantization": _quantization,
    }
    for action in parser._actions:
        action.type = readers.get(action.dest, action.type)
    add_foreign_arguments(parser)


def spelt(words: Sequence[str]) -> list[str]:
    """As vLLM reads them: `--max_model_len` is `--max-model-len`, `--a.b.c 1` is part of the
    object that `--a` takes."""
    read: list[str] = []
    rest = iter(words)
    for word in rest:
        if word == "--":
            return [*read, word, *rest]
        flag, equals, value = word.partition("=")
        if not flag.startswith("-") or NUMBER.match(flag):
            read.append(word)
            continue
        # (`--fim-qwen-1.5b-default` of llama-server's is no such path.)
        name = re.match(r"[^.]+(?=\.[A-Za-z_])", flag)
        flag, path = (name[0], flag[name.end() + 1 :]) if name else (flag, "")
        if flag.startswith("--"):
            flag = flag.replace("_", "-")
        if not path:
            read.append(flag + equals + value)
            continue
        if not equals:
            value = next(rest, "")
        read += [flag, json.dumps(_nested(path, value))]
    return read


def _nested(path: str, value: str) -> Any:
    try:
        found: Any = json.loads(value)
    except ValueError:
        found = value
    for key in reversed(path.split(".")):
        found = {key.removesuffix("+"): [found] if key.endswith("+") else found}
    return found


def settle(args: argparse.Namespace) -> tuple[EngineConfig, ServeSettings, argparse.Namespace]:
    """All settings, from the line, the file and the environment. What is wrong with them, all of
    it, ends the program."""
    args = with_file(args)
    config = engine_config(args)
    server = serve_settings(args)
    args.pools = pool_settings(args)
    args.parser.finish()
    assert config is not None
    assert server is not None
    return config, server, args


def start_logging(args: argparse.Namespace, settings: ServeSettings) -> None:
    """Log lines from here on; the first says which options change nothing."""
    os.environ.update(getattr(args, "environment", {}))  # what the Hub's library reads
    log_lines.configure(settings.uvicorn_log_level)
    if notice := args.parser.notice():
        logging.getLogger(log_lines.WORK).info(notice)


def with_file(args: argparse.Namespace) -> argparse.Namespace:
    """The options of `--config`'s file, with those of the command line over them."""
    parser: Parser = args.parser
    given = vars(_resolved(args))
    if "config" not in given:
        return argparse.Namespace(**given)
    words = file_words(Path(given["config"]), parser)
    in_file = vars(_resolved(parser.parse_args(spelt(words))))
    return argparse.Namespace(**{**in_file, **given})


def serve_settings(args: argparse.Namespace) -> ServeSettings | None:
    """Without a key the server is for this machine alone, unless an address is given. None: a
    problem was found."""
    renamed = {SETTINGS.get(name, name): value for name, value in vars(args).items()}
    given = given_of(argparse.Namespace(**renamed), ServeSettings)
    given.setdefault("api_keys", keys_of_environment())
    given.setdefault("admin_api_keys", admin_keys_of_environment())
    given.setdefault("dev_mode", dev_mode_of_environment())
    for flag, name in (("--api-key", "api_keys"), ("--admin-api-key", "admin_api_keys")):
        if not all(given[name]):  # said here, where no other key is repeated
            args.parser.problem(f"{flag}: a key is empty; give one, or leave the option out")
            return None
    given["cors_origins"] = [one for some in given.get("cors_origins", ()) for one in some]
    try:
        settle_traces(given)
    except ConfigError as error:
        args.parser.problem(str(error))
        return None
    given["log_stats"] = not renamed.get("disable_log_stats", False)
    given.setdefault("host", EVERYWHERE if given["api_keys"] else "127.0.0.1")
    flags = {setting: flag for flag, setting in SETTINGS.items()}
    return settings(args.parser, ServeSettings, given, flags)


def pool_settings(args: argparse.Namespace) -> PoolSettings | None:
    """How many engines there are. None: a problem was found."""
    return settings(args.parser, PoolSettings, given_of(args, PoolSettings))


def parse_length(text: str) -> int | None:
    """As `parse_count`; `auto` and -1 are what model and memory allow."""
    return None if text in ("auto", "-1") else parse_count(text)


def parse_count(text: str) -> int:
    """`4096`, or as vLLM has it `4k` (4,000) and `4K` (4,096)."""
    match = re.fullmatch(r"(\d+(?:\.\d+)?)([kmgKMG]?)", text.strip())
    if match is None or (not match[2] and "." in match[1]):
        raise argparse.ArgumentTypeError("expected a number such as 4096 or 4K")
    return int(float(match[1]) * SCALES[match[2]]) if match[2] else int(match[1])


def _add_limits(group: argparse._ArgumentGroup) -> None:
    fields = {field.name: field for field in dataclasses.fields(ServeSettings)}
    for name, text in LIMITS.items():
        flag, kind = "--" + name.replace("_", "-"), str(fields[name].type).removesuffix(" | None")
        if fields[name].default is not None:
            text += f" (default: {fields[name].default})"
        if kind == "bool":
            _add(group, flag, action=argparse.BooleanOptionalAction, help=text)
            continue
        read = parse_bytes if name.endswith("_bytes") else TYPES[kind]
        _add(group, flag, type=read, metavar="N" if kind == "int" else "X", help=text)


def _add_pools(group: argparse._ArgumentGroup) -> None:
    counts = {
        "--prefill-engines": "engines that prefill, and hand requests over (default: 0)",
        "--decode-engines": "engines that decode them (default: 0)",
        "--data-parallel-size": "engines that do both, each with a copy of the model (default: 1)",
    }
    for flag, text in counts.items():
        _add(group, flag, type=int, metavar="N", help=text)
    _add(group, "-dp", dest="data_parallel_size", type=int, help=argparse.SUPPRESS)
    for phase in ("prefill", "decode"):
        _add(
            group,
            f"--{phase}-config",
            type=json_object,
            action=MergeJson,
            metavar="JSON",
            help=f"settings of the {phase} engines alone, such as "
            '{"threads": 2, "max_num_batched_tokens": 1024}',
        )
    _add(
        group,
        "--ray",
        metavar="ADDRESS",
        help="run the engines as actors of a Ray cluster: HOST:PORT of its head, or auto for the "
        "one that this machine is a node of; needs pip install 'twostroke[cluster]'",
    )
    _add(
        group,
        "--ray-timeout-s",
        type=float,
        metavar="X",
        help="seconds an engine may wait for room in the cluster (default: 60)",
    )
    for phase in ("prefill", "decode"):
        _add(
            group,
            f"--{phase}-resources",
            type=json_object,
            metavar="JSON",
            help=f"what each {phase} engine takes of a Ray node, besides CPUs or GPUs, such as "
            f'{{"{phase}": 1}}: only nodes that have it get one',
        )
    _add(
        group,
        "--kv-transfer-checksums",
        action=argparse.BooleanOptionalAction,
        help="check every KV block that travels between engines; slower (default: no)",
    )
    _add(
        group,
        "--kv-transfer-timeout-s",
        type=float,
        metavar="S",
        help="KV blocks of which none has come for so long are computed again (default: 3)",
    )
    _add(
        group,
        "--kv-transport",
        metavar="WAY",
        help="how KV blocks travel between engines: memory, device, nixl or sockets alone "
        "(default: auto, the fastest that reaches)",
    )


def _add(group: Any, flag: str, **options: Any) -> None:
    group.add_argument(flag, default=argparse.SUPPRESS, **options)


def _resolved(args: argparse.Namespace) -> argparse.Namespace:
    """The model and how it is loaded, under our names."""
    take_model(args)
    if hasattr(args, "hf_file") and hasattr(args, "model"):
        args.model = f"{args.model.partition(':')[0]}:{args.hf_file}"
    if hasattr(args, "load_format"):
        args.load_format = LOAD_FORMATS.get(args.load_format, args.load_format)
    return args


def _structured_outputs_config(text: str) -> bool:
    """vLLM's settings of structured outputs: of those there is one to choose here, whether objects
    are closed."""
    given = json_object(text)
    closed = given.pop("disable_additional_properties", True)
    if not isinstance(closed, bool):
        raise argparse.ArgumentTypeError("disable_additional_properties must be true or false")
    backend = given.pop("backend", "auto")
    if backend not in STRUCTURED_BACKENDS:
        known = ", ".join(STRUCTURED_BACKENDS)
        raise argparse.ArgumentTypeError(
            f"backend must be one of {known}; llguidance does the work"
        )
    given.pop("disable_fallback", None)  # there is no other backend
    if others := [name for name, value in given.items() if value]:
        raise argparse.ArgumentTypeError(
            f"{others[0]} is not supported; disable_additional_properties is all there is to choose"
        )
    return closed


# Of vLLM's, for weights that are as their files have them.
AS_STORED = (
    "gguf",
    "compressed-tensors",
    "gptq",
    "gptq_marlin",
    "awq",
    "awq_marlin",
    "none",
    "None",
)


def _quantization(text: str) -> str | None:
    if text in AS_STORED:
        return None  # weights that are quantised are as their files have them
    if text not in ("int8", "int4", "fp8"):
        raise argparse.ArgumentTypeError(
            "int8 and int4 round weights, and on a GPU fp8; what is read as it is are GGUF files, "
            "GPTQ, AWQ, compressed-tensors and fp8: give one of these, or the model's own weights"
        )
    return text


def _origins(text: str) -> list[str]:
    if not text.startswith("["):
        return [text]
    try:
        origins = json.loads(text)
    except ValueError:
        origins = None
    if not isinstance(origins, list) or not all(isinstance(origin, str) for origin in origins):
        raise argparse.ArgumentTypeError("expected a JSON list of origins")
    return origins
