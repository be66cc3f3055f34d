"""The options of `serve`: vLLM's options, twostroke's limits, and several engines."""

from __future__ import annotations

import argparse
import dataclasses
import json
import re
from collections.abc import Sequence
from typing import Any

from twostroke.commands.flags import (
    TYPES,
    MergeJson,
    add_engine_arguments,
    add_model_argument,
    json_object,
    parse_bytes,
)
from twostroke.commands.llama_flags import device
from twostroke.commands.parser import NUMBER, Parser
from twostroke.commands.serve_plan import count_or_auto
from twostroke.commands.vllm_flags import add_foreign_arguments
from twostroke.serve.settings import ServeSettings

# vLLM's backends, which accept the same texts as llguidance.
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
# vLLM's names for `--help=GROUP` → ours
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
    "max_body_bytes": "maximum size of a request's body (default: 8 MiB, or 64 bytes for each "
    "token of max_model_len)",
    "max_body_weight": "maximum weight of the JSON in a body, in which a comma weighs 1, a bracket "
    "4, a colon 8 (default: 524288, or 8 for each token of max_model_len)",
    "min_body_bytes_per_s": "answer 408 to a body that arrives slower",
    "max_choices": "maximum number of completions of a request: prompts times n",
    "max_connections": "answer 503 to more connections (default: what the limit of open files "
    "allows)",
    "max_header_bytes": "maximum size of a request's head (request line and headers)",
    "max_prompt_tokens": "maximum length of a prompt (default: what the engine accepts)",
    "max_output_tokens": "maximum length of an answer; a request for more tokens gets this many",
    "max_unread_bytes": "bytes of a stream that its client may leave unread; 8 times as many for "
    "all streams",
    "max_queue": "maximum number of waiting requests; answer 429 to more",
    "head_timeout_s": "seconds that a client has to send the head of a request",
    "body_timeout_s": "seconds that a client has to send the body of a request",
    "write_timeout_s": "seconds within which a client must read a part of its answer",
    "keep_alive_s": "seconds that a connection may be idle between requests",
    "prefix_cache_sharing": "share cached prefixes between requests with different keys",
    "strict_fields": "answer 400 to a request with an unknown field (default: ignore the field, "
    "with a warning in the answer's headers and in the log)",
    "client_priority": "use the priority that a request sets; otherwise ignore it",
    "engine_hang_timeout_s": "seconds without a message of the engine's process after which the "
    "server restarts it; 0: never",
    "engine_start_timeout_s": "seconds after which an engine's process that is not ready, with its "
    "model loaded, is killed; 0: no limit",
    "engine_restart_limit": "end the server after this many deaths of the engine in a row, each "
    "soon after a start",
    "open_health": "answer /health and /ping without a key",
    "open_metrics": "answer /metrics without a key (default: only if the server has no keys)",
    "ui": "serve the pages for browsers: a chat at /, /learn and /dash",
    "dash": "serve the page /dash",
    "max_stored_responses": "answers of /v1/responses that the server keeps; 0: none",
    "max_stored_response_bytes": "memory for stored answers and for their requests while they run",
    "stored_response_ttl_s": "seconds after which a stored answer is deleted",
}
SWITCH = argparse.BooleanOptionalAction
SEVERAL: dict[str, Any] = {"nargs": "+", "action": "extend"}
SCALES = {"k": 1000, "m": 1000**2, "g": 1000**3, "K": 1024, "M": 1024**2, "G": 1024**3}


def add_server_arguments(parser: Parser) -> None:
    """Add the options of `serve`. No option has a default, so that the parsed arguments have only
    options that were given on the command line or in the file."""
    parser.usual_options, parser.group_aliases = USUAL, VLLM_GROUPS
    add_model_argument(parser)
    _add(
        parser,
        "--config",
        metavar="FILE.yaml",
        help="a file of options; the command line overrides it",
    )
    server = parser.add_argument_group("server (the names are vLLM's)")
    _add_network(server)
    _add_chat(server)
    _add_answers(server)
    _add_operation(server)
    _add_limits(parser.add_argument_group("limits (the names are twostroke's)"))
    _add_pools(parser.add_argument_group("several engines, here or on a cluster"))
    add_engine_arguments(parser, leave_out={"skip_tokenizer_init"})
    _add(
        parser,
        "--skip-tokenizer-init",
        action=SWITCH,
        help="accept and answer token ids only, without a tokenizer",
    )
    _add(parser, "--webui", dest="ui", action=SWITCH, help=argparse.SUPPRESS)  # llama-server's
    _add(parser, "-q", dest="quantization", help=argparse.SUPPRESS)
    _add(
        parser,
        "-sc",
        dest="speculative_config",
        type=json_object,
        action=MergeJson,
        help=argparse.SUPPRESS,
    )
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


def _add_network(group: argparse._ArgumentGroup) -> None:
    _add(
        group,
        "--host",
        metavar="ADDRESS",
        help="the address to listen on (default: 0.0.0.0 with a key, 127.0.0.1 without)",
    )
    _add(group, "--port", type=int, metavar="N", help="(default: 8000)")
    _add(group, "--uds", metavar="PATH", help="listen on a Unix domain socket instead")
    _add(
        group,
        "--api-key",
        **SEVERAL,
        metavar="KEY",
        help="keys of clients (default: TWOSTROKE_API_KEY or VLLM_API_KEY from the environment)",
    )
    _add(
        group,
        "--admin-api-key",
        **SEVERAL,
        metavar="KEY",
        help="keys that may also control the server (profiles, sleep, pools) and see the requests "
        "of every key (default: TWOSTROKE_ADMIN_API_KEY from the environment)",
    )
    _add(group, "--ssl-keyfile", metavar="FILE", help="key of the TLS certificate")
    _add(group, "--ssl-certfile", metavar="FILE", help="TLS certificate")
    _add(
        group,
        "--allowed-origins",
        **SEVERAL,
        type=_origins,
        metavar="ORIGIN",
        help="origins of pages that may call from a browser, or a JSON list of them (default: "
        "none)",
    )
    _add(
        group,
        "--allowed-hosts",
        **SEVERAL,
        metavar="NAME",
        help="host names of the server that clients may use, such as llm.example.org, "
        "*.example.org or * (default: the names of this machine; with a key, any)",
    )
    _add(
        group,
        "--root-path",
        metavar="PATH",
        help="a prefix of every route, for a proxy that does not strip it",
    )


def _add_chat(group: argparse._ArgumentGroup) -> None:
    """Add the options of models' names, templates, tools and reasoning."""
    _add(
        group,
        "--served-model-name",
        **SEVERAL,
        metavar="NAME",
        help="names of the model in requests; answers have the first name",
    )
    _add(group, "--response-role", metavar="ROLE", help="(default: assistant)")
    _add(
        group,
        "--default-chat-template-kwargs",
        type=json_object,
        action=MergeJson,
        metavar="JSON",
        help="variables of the chat template, which a request may override",
    )
    _add(
        group,
        "--chat-template-content-format",
        metavar="FORMAT",
        help="how the chat template gets the content of messages: string (a text), openai (a list "
        "of parts) or auto (by the template; the default)",
    )
    _add(
        group,
        "--trust-request-chat-template",
        action=SWITCH,
        help="let a request have its own chat template",
    )
    _add(
        group,
        "--enable-auto-tool-choice",
        action=SWITCH,
        help="let the model decide whether to call a tool (default: yes)",
    )
    _add(
        group,
        "--exclude-tools-when-tool-choice-none",
        action=SWITCH,
        help='leave the tools out of the prompt if a request\'s tool_choice is "none"',
    )
    _add(
        group,
        "--tool-call-parser",
        metavar="NAME",
        help="the parser of tool calls (default: auto, by the model's chat template)",
    )
    _add(
        group,
        "--structured-outputs-config",
        dest="disable_additional_properties",
        type=_structured_outputs_config,
        metavar="JSON",
        help='{"disable_additional_properties": false} allows other properties in an object whose '
        "JSON schema has properties and does not mention others (default: not allowed)",
    )
    _add(
        group,
        "--reasoning-parser",
        type=lambda name: "none" if name.lower() == "none" else name,
        metavar="NAME",
        help="the parser that separates reasoning from the answer (default: separate reasoning "
        "only if the prompt begins it)",
    )
    _add(
        group,
        "--reasoning-effort-map",
        type=json_object,
        action=MergeJson,
        metavar="JSON",
        help="the reasoning effort for the chat template by the effort of the request, such as "
        '{"xhigh": "high"}',
    )


def _add_answers(group: argparse._ArgumentGroup) -> None:
    """Add the options of what answers contain."""
    _add(
        group,
        "--enable-request-id-headers",
        action=SWITCH,
        help="add X-Request-Id to answers: the id of the request, or a new one",
    )
    _add(
        group,
        "--enable-force-include-usage",
        action=SWITCH,
        help="add the usage to every chunk of every stream",
    )
    _add(
        group,
        "--enable-per-request-metrics",
        action=SWITCH,
        help="add vLLM's metrics to answers: time to first token, in the queue, between tokens; "
        "a stream has them beside its usage",
    )
    _add(
        group,
        "--enable-tokenizer-info-endpoint",
        action=SWITCH,
        help="serve the special tokens and the chat template at /tokenizer_info",
    )
    _add(
        group,
        "--return-tokens-as-token-ids",
        action=SWITCH,
        help="name tokens by id in log-probabilities, unless a request sets this itself",
    )


def _add_operation(group: argparse._ArgumentGroup) -> None:
    """Add the options of logs, traces and the shutdown."""
    _add(
        group,
        "--enable-log-requests",
        action=SWITCH,
        help="log a line for each request: client, route and status, never the text",
    )
    _add(
        group,
        "--disable-log-stats",
        action=SWITCH,
        help="do not log the figures of both phases and the KV cache every ten seconds",
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
        help="send a span for each request to this URL by OTLP (default: "
        "OTEL_EXPORTER_OTLP_TRACES_ENDPOINT or OTEL_EXPORTER_OTLP_ENDPOINT from the environment)",
    )
    _add(
        group,
        "--shutdown-timeout",
        type=float,
        metavar="SECONDS",
        help="how long running requests may continue after SIGTERM (default: 30)",
    )


def normalize_options(words: Sequence[str]) -> list[str]:
    """Return the words as vLLM reads them: `--max_model_len` becomes `--max-model-len`, and
    `--a.b 1` becomes `--a {"b": 1}`."""
    read: list[str] = []
    rest = iter(words)
    for word in rest:
        if word == "--":
            return [*read, word, *rest]
        flag, equals, value = word.partition("=")
        if not flag.startswith("-") or NUMBER.match(flag):
            read.append(word)
            continue
        # Only a dot before a letter begins a path: llama-server has `--fim-qwen-1.5b-default`.
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


def parse_length(text: str) -> int | None:
    """Return the number of `parse_count`; None for `auto` and -1: the length that model and memory
    allow."""
    return None if text in ("auto", "-1") else parse_count(text)


def parse_count(text: str) -> int:
    """Read `4096`, and like vLLM `4k` (4,000) and `4K` (4,096)."""
    match = re.fullmatch(r"(\d+(?:\.\d+)?)([kmgKMG]?)", text.strip())
    if match is None or (not match[2] and "." in match[1]):
        raise argparse.ArgumentTypeError("expected a number such as 4096 or 4K")
    return int(float(match[1]) * SCALES[match[2]]) if match[2] else int(match[1])


def _add_limits(group: argparse._ArgumentGroup) -> None:
    fields = {field.name: field for field in dataclasses.fields(ServeSettings)}
    for name, text in LIMITS.items():
        flag = "--" + name.replace("_", "-")
        type_name = str(fields[name].type).removesuffix(" | None")
        if fields[name].default is not None:
            text += f" (default: {fields[name].default})"
        if type_name == "bool":
            _add(group, flag, action=SWITCH, help=text)
            continue
        read = parse_bytes if name.endswith("_bytes") else TYPES[type_name]
        _add(group, flag, type=read, metavar="N" if type_name == "int" else "X", help=text)


def _add_pools(group: argparse._ArgumentGroup) -> None:
    counts = {
        "--prefill-engines": "engines that prefill and hand requests over (default: 0)",
        "--decode-engines": "engines that decode handed-over requests (default: 0)",
        "--data-parallel-size": "engines that prefill and decode, each with a copy of the model "
        "(default: 1)",
    }
    for flag, text in counts.items():
        _add(group, flag, type=count_or_auto, metavar="N", help=text + "; auto: from --plan")
    dp = {"dest": "data_parallel_size", "type": count_or_auto}
    _add(group, "-dp", **dp, help=argparse.SUPPRESS)
    _add(
        group,
        "--plan",
        metavar="FILE",
        help="take the numbers of engines from this plan of `twostroke plan --save-plan`",
    )
    _add(
        group,
        "--plan-trace",
        metavar="FILE",
        help="plan the numbers of engines for this trace; needs --plan-steps, and --ttft-slo-ms or "
        "--itl-slo-ms",
    )
    _add(
        group,
        "--plan-steps",
        metavar="URL|FILE",
        help="step times for --plan-trace, from `twostroke plan --save-steps`",
    )
    for phase in ("prefill", "decode"):
        _add(
            group,
            f"--{phase}-config",
            type=json_object,
            action=MergeJson,
            metavar="JSON",
            help=f"settings of the {phase} engines only, such as "
            '{"threads": 2, "max_num_batched_tokens": 1024}',
        )
    _add(
        group,
        "--autoscale",
        metavar="MIN:MAX",
        help="let each pool grow and shrink between these numbers of engines, as the planner "
        "advises for the last minutes; needs --ttft-slo-ms or --itl-slo-ms, and "
        "--kv-cache-memory-bytes",
    )
    _add(
        group,
        "--autoscale-interval-s",
        type=float,
        metavar="X",
        help="seconds between two advised changes (default: 60)",
    )
    _add(
        group,
        "--ray",
        metavar="ADDRESS",
        help="run the engines as actors of a Ray cluster: HOST:PORT of its head, or auto for the "
        "cluster of this machine; needs pip install 'twostroke[cluster]'",
    )
    _add(
        group,
        "--ray-timeout-s",
        type=float,
        metavar="X",
        help="seconds that an engine may wait for resources of the cluster (default: 60)",
    )
    for phase in ("prefill", "decode"):
        _add(
            group,
            f"--{phase}-resources",
            type=json_object,
            metavar="JSON",
            help=f"Ray resources that each {phase} engine needs besides CPUs or GPUs, such as "
            f'{{"{phase}": 1}}: only nodes with them run one',
        )
    _add(
        group,
        "--kv-transfer-checksums",
        action=SWITCH,
        help="verify a checksum of every transferred KV block; slower (default: no)",
    )
    _add(
        group,
        "--kv-transfer-timeout-s",
        type=float,
        metavar="S",
        help="recompute KV blocks if none has arrived for this time (default: 3)",
    )
    _add(
        group,
        "--kv-transport",
        metavar="NAME",
        help="the transport of KV blocks between engines: memory, device, nixl or sockets "
        "(default: auto, the fastest that works)",
    )


def _add(group: Any, flag: str, **options: Any) -> None:
    group.add_argument(flag, default=argparse.SUPPRESS, **options)


def _structured_outputs_config(text: str) -> bool:
    """Return `disable_additional_properties`, the only supported setting of vLLM's object."""
    config = json_object(text)
    closed = config.pop("disable_additional_properties", True)
    if not isinstance(closed, bool):
        raise argparse.ArgumentTypeError("disable_additional_properties must be true or false")
    backend = config.pop("backend", "auto")
    if backend not in STRUCTURED_BACKENDS:
        known = ", ".join(STRUCTURED_BACKENDS)
        raise argparse.ArgumentTypeError(
            f"backend must be one of {known}; llguidance is used for all of them"
        )
    config.pop("disable_fallback", None)  # there is no other backend
    if others := [name for name, value in config.items() if value]:
        raise argparse.ArgumentTypeError(
            f"{others[0]} is not supported; only disable_additional_properties can be set"
        )
    return closed


# Values of vLLM's --quantization for weights that are used as the files store them.
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
        return None
    if text not in ("int8", "int4", "fp8"):
        raise argparse.ArgumentTypeError(
            "weights can be rounded to int8 or int4, and on a GPU to fp8; GGUF files and GPTQ, "
            "AWQ, compressed-tensors and fp8 weights are used as stored; give one of these formats"
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
