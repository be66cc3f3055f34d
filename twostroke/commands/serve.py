"""`twostroke serve`: an OpenAI-compatible server, started with the flags of `vllm serve`."""

from __future__ import annotations

import argparse
import contextlib
import dataclasses
import ipaddress
import json
import re
import sys
from collections.abc import AsyncIterator, Iterable, Iterator, Sequence
from contextlib import asynccontextmanager
from pathlib import Path
from time import monotonic
from typing import Any

from twostroke.commands.banner import banner
from twostroke.commands.environment import (
    dev_mode_of_environment,
    keys_of_environment,
    settle_traces,
)
from twostroke.commands.flags import (
    TYPES,
    add_engine_arguments,
    engine_config,
    json_object,
    parse_bytes,
)
from twostroke.commands.vllm_flags import ONLY, REFUSED, add_foreign_arguments
from twostroke.errors import ConfigError, nearest
from twostroke.serve.settings import ServeSettings

SUMMARY = "serve a model over HTTP, as `vllm serve` does"
DESCRIPTION = (
    "Serve a model over HTTP with OpenAI's API. Flags and their names are those of `vllm serve`; "
    "one that twostroke does not have is refused with the reason."
)
OPERANDS = " [MODEL]"
EVERYWHERE = "0.0.0.0"
DTYPES = {"half": "float16", "float": "float32"}  # vLLM's other names
LOG_LEVELS = ("critical", "error", "warning", "info", "debug", "trace")
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
    "client_priority": "requests may set their own priority; if not, theirs is ignored",
    "engine_hang_timeout_s": "seconds without a sign of life after which the engine's process is "
    "killed and started again; 0: never",
    "engine_restart_limit": "deaths of the engine in a row, each soon after its start, that end "
    "the server",
    "open_health": "/health and /ping answer without a key",
    "open_metrics": "/metrics answers without a key (default: only if there are no keys)",
    "dash": "there is a page at /dash",
}
# Flags whose settings have other names.
SETTINGS = {
    "api_key": "api_keys",
    "served_model_name": "served_model_names",
    "allowed_origins": "cors_origins",
    "default_chat_template_kwargs": "chat_template_kwargs",
    "enable_log_requests": "access_log",
    "shutdown_timeout": "drain_s",
}
SCALES = {"k": 1000, "m": 1000**2, "g": 1000**3, "K": 1024, "M": 1024**2, "G": 1024**3}


def add_arguments(parser: argparse.ArgumentParser) -> None:
    # No option has a default: what is in the namespace was given, here or in the file.
    parser.add_argument(
        "operand",
        nargs="?",
        default=argparse.SUPPRESS,
        metavar="MODEL",
        help="the model, as --model has it",
    )
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
        "--tool-call-parser",
        metavar="NAME",
        help="how the model's calls of tools are read (default: by its template)",
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
        "--default-chat-template-kwargs",
        type=json_object,
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
        "--enable-log-requests",
        action=argparse.BooleanOptionalAction,
        help="a line of log for each request: who, what route, which status; never the text",
    )
    _add(
        group,
        "--disable-log-stats",
        action="store_true",
        help="no line about both phases and the KV cache every ten seconds while there is work",
    )
    _add(group, "--max-log-len", type=int, help=argparse.SUPPRESS)  # no text is ever logged
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
    _add_limits(parser.add_argument_group("limits of the server (the names are twostroke's)"))
    add_engine_arguments(parser, leave_out={"skip_tokenizer_init"})
    _add(
        parser,
        "--skip-tokenizer-init",
        action=argparse.BooleanOptionalAction,
        help="prompts and answers are token ids only",
    )
    _add(parser, "-q", dest="quantization", help=argparse.SUPPRESS)
    _add(parser, "-tp", dest="tensor_parallel_size", type=int, help=argparse.SUPPRESS)
    for action in parser._actions:
        if action.dest in ("max_model_len", "max_num_batched_tokens"):
            action.type = parse_count
    add_foreign_arguments(parser)


def spelt(words: Sequence[str]) -> list[str]:
    """As vLLM reads them: `--max_model_len` is `--max-model-len`, and `--a.b` is part of `--a`."""
    read = []
    for word in words:
        flag, equals, value = word.partition("=")
        if flag.startswith("--"):
            flag = flag.replace("_", "-")
            part_of = flag.partition(".")[0]
            flag = part_of if part_of in REFUSED else flag
        read.append(flag + equals + value)
    return read


def execute(args: argparse.Namespace) -> int:
    started_s = monotonic()
    args = with_file(args)
    config, settings = engine_config(args), serve_settings(args)
    from twostroke.engine.spawn import spawn
    from twostroke.serve.sockets import bind

    # A port in use costs no model's loading, and the engine starts while the rest is imported.
    listener = bind(settings)
    spawned = spawn(config)
    from twostroke.engine.remote import RemoteEngine
    from twostroke.serve.run import HttpServer, serve

    @asynccontextmanager
    async def engine() -> AsyncIterator[RemoteEngine]:
        started = await RemoteEngine.start(
            config,
            spawned=spawned,
            hang_timeout_s=settings.engine_hang_timeout_s,
            restart_limit=settings.engine_restart_limit,
        )
        async with started:
            yield started

    def announce(server: HttpServer, client: RemoteEngine, url: str) -> None:
        exposed = settings.uds is None and not is_loopback(settings.host)
        ready_s = monotonic() - started_s
        where = f"{url}; /dash shows it at work" if settings.dash else url
        text = banner(client.info, where, len(settings.api_keys), exposed, ready_s)
        with contextlib.suppress(OSError):  # a full disk for the log is no reason not to serve
            print(text, file=sys.stderr, flush=True)

    try:
        serve(engine, settings, announce, listener)
    finally:
        spawned.kill()
    return 0


def is_loopback(host: str) -> bool:
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"


def with_file(args: argparse.Namespace) -> argparse.Namespace:
    """The options of `--config`'s file, with those of the command line over them."""
    parser: argparse.ArgumentParser = args.parser
    given = vars(_resolved(args, parser))
    if "config" not in given:
        return argparse.Namespace(**given)
    words = list(file_words(Path(given["config"]), parser))
    in_file = vars(_resolved(parser.parse_args(words), parser))
    return argparse.Namespace(**{**in_file, **given})


def file_words(path: Path, parser: argparse.ArgumentParser) -> Iterator[str]:
    """A YAML file's keys and values as words of the command line."""
    import yaml

    try:
        said = yaml.safe_load(path.read_text(encoding="utf-8"))
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"--config {path} cannot be read: {error}") from None
    except yaml.YAMLError as error:
        raise ConfigError(f"--config {path} is not YAML: {error}") from None
    if not isinstance(said, dict):
        raise ConfigError(f"--config {path} must have lines such as `port: 8000`")
    options = parser._option_string_actions
    for key, value in said.items():
        (flag,) = spelt([f"--{key}"])
        if flag not in options or flag in ("--config", "--help"):
            raise ConfigError(f"--config {path}: there is no option {key!r}{_near(flag, options)}")
        if value is False and flag in REFUSED:
            continue  # what happens anyway
        if options[flag].nargs == 0:
            yield from _switch(path, flag, value, negative=f"--no-{flag[2:]}" in options)
        elif isinstance(value, list):
            yield from (f"{flag}={_word(item)}" for item in value)
        elif isinstance(value, bool) and flag in ONLY:
            yield f"{flag}={'on' if value else 'off'}"  # as YAML reads those
        elif value is not None:
            yield f"{flag}={_word(value)}"


def serve_settings(args: argparse.Namespace) -> ServeSettings:
    """Without a key the server is for this machine alone, unless an address is given."""
    known = {field.name for field in dataclasses.fields(ServeSettings)}
    renamed = {SETTINGS.get(name, name): value for name, value in vars(args).items()}
    given = {name: value for name, value in renamed.items() if name in known}
    given.setdefault("api_keys", keys_of_environment())
    given.setdefault("dev_mode", dev_mode_of_environment())
    given["cors_origins"] = [one for some in given.get("cors_origins", ()) for one in some]
    settle_traces(given)
    given["log_stats"] = not renamed.get("disable_log_stats", False)
    given.setdefault("host", EVERYWHERE if given["api_keys"] else "127.0.0.1")
    return ServeSettings(**given)


def parse_count(text: str) -> int:
    """`4096`, or as vLLM has it `4k` (4,000) and `4K` (4,096)."""
    match = re.fullmatch(r"(\d+(?:\.\d+)?)([kmgKMG]?)", text.strip())
    if match is None or (not match[2] and "." in match[1]):
        raise argparse.ArgumentTypeError(f"{text!r} is no number; give one such as 4096 or 4K")
    return int(float(match[1]) * SCALES[match[2]]) if match[2] else int(match[1])


def _structured_outputs_config(text: str) -> bool:
    """vLLM's settings of structured outputs: of those there is one to choose here, whether objects
    are closed."""
    given = json_object(text)
    closed = given.pop("disable_additional_properties", True)
    if not isinstance(closed, bool):
        raise argparse.ArgumentTypeError("disable_additional_properties must be true or false")
    if given.pop("backend", "auto") not in ("auto", "guidance"):
        raise argparse.ArgumentTypeError("llguidance is the one backend of structured outputs")
    given.pop("disable_fallback", None)  # there is no other backend
    if others := [name for name, value in given.items() if value]:
        raise argparse.ArgumentTypeError(
            f"{others[0]} is not supported; disable_additional_properties is all there is to choose"
        )
    return closed


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


def _add(group: Any, flag: str, **options: Any) -> None:
    group.add_argument(flag, default=argparse.SUPPRESS, **options)


def _near(flag: str, options: Iterable[str]) -> str:
    return nearest(flag, [option for option in options if option not in REFUSED])


def _resolved(args: argparse.Namespace, parser: argparse.ArgumentParser) -> argparse.Namespace:
    """One model, whichever way it was given, and the types under our names."""
    if hasattr(args, "operand"):
        if hasattr(args, "model"):
            parser.error(f"the model is given twice: {args.operand} and --model {args.model}")
        args.model = args.operand
        del args.operand
    if hasattr(args, "dtype"):
        args.dtype = DTYPES.get(args.dtype, args.dtype)
    return args


def _switch(path: Path, flag: str, value: object, negative: bool) -> Iterator[str]:
    if not isinstance(value, bool):
        raise ConfigError(f"--config {path}: {flag[2:]} is true or false, not {value!r}")
    if value:
        yield flag
    elif negative:
        yield f"--no-{flag[2:]}"


def _word(value: object) -> str:
    return json.dumps(value) if isinstance(value, dict | list | bool) else str(value)


def _origins(text: str) -> list[str]:
    if not text.startswith("["):
        return [text]
    try:
        origins = json.loads(text)
    except ValueError:
        origins = None
    if not isinstance(origins, list) or not all(isinstance(origin, str) for origin in origins):
        raise argparse.ArgumentTypeError(f"{text!r} is no JSON list of origins")
    return origins
