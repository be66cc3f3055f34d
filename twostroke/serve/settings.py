"""`ServeSettings`: the HTTP side's settings, validated once. The engine has its own."""

from __future__ import annotations

import re
from dataclasses import dataclass, field
from typing import Any

from twostroke.config import EngineConfig
from twostroke.errors import ConfigError
from twostroke.serve.parsers import REASONING_PARSERS, TOOL_PARSERS
from twostroke.strict import StrictSettings

MIB = 1024**2


@dataclass(frozen=True, kw_only=True)
class ServeSettings(StrictSettings):
    host: str = "127.0.0.1"
    port: int = 8000  # 0: any that is free
    uds: str | None = None  # a Unix socket's path, instead of host and port
    ssl_certfile: str | None = None
    ssl_keyfile: str | None = None
    access_log: bool = False
    uvicorn_log_level: str = "warning"

    api_keys: tuple[str, ...] = ()  # none: no key is needed
    # They may act on the server and see the requests of every key. None: a server with at most one
    # key lets every client do so, a server with several keys no client.
    admin_api_keys: tuple[str, ...] = ()
    prefix_cache_sharing: bool = False  # between keys, where there are several
    client_priority: bool = True  # requests may set their priority; else theirs is ignored
    open_health: bool = True  # /health and /ping answer without a key
    open_metrics: bool | None = None  # /metrics does; None: only if there are no keys
    ui: bool = True  # the pages for people are there: the chat at /, /learn and /dash
    dash: bool = True  # /dash is there, if `ui` is
    engine: EngineConfig | None = None  # the engine's settings, for what /learn shows of its model
    learn_engines: bool = False  # experiments of /learn may start engines of their own
    dev_mode: bool = False  # /sleep, /wake_up, /reset_prefix_cache, /server_info are there
    enable_tokenizer_info_endpoint: bool = False  # /tokenizer_info is there
    root_path: str = ""  # a prefix that routes may have, as behind a proxy that leaves it there
    enable_request_id_headers: bool = False  # answers have X-Request-Id
    log_stats: bool = True  # a line of log about both phases while there is work
    cors_origins: tuple[str, ...] = ()  # none: other sites' pages may not ask
    # Names that a Host header may have besides this machine's. None: with a key, any.
    allowed_hosts: tuple[str, ...] = ()

    served_model_names: tuple[str, ...] = ()  # the first is in the responses; none: the engine's
    response_role: str = "assistant"
    return_tokens_as_token_ids: bool = False  # in log-probabilities, unless a request says
    force_include_usage: bool = False  # every chunk of every stream has `usage`
    enable_per_request_metrics: bool = False  # answers have vLLM's `metrics`
    # A request's reasoning effort → the one that the chat template gets.
    reasoning_effort_map: dict[str, str] = field(default_factory=dict)
    chat_template_kwargs: dict[str, Any] = field(default_factory=dict)
    trust_request_chat_template: bool = False  # whether a request may bring its own template
    enable_auto_tool_choice: bool = True  # a model may call tools unless it is told not to
    exclude_tools_when_tool_choice_none: bool = False  # the model is not shown them
    tool_call_parser: str | None = None  # how its calls are read; None: by its chat template
    reasoning_parser: str | None = None  # None: only where the prompt leaves the model thinking

    # A request's JSON schemas: an object has no other names than its `properties`.
    disable_additional_properties: bool = True
    strict_fields: bool = False  # unknown fields of requests are refused, not ignored

    max_body_bytes: int | None = None  # None: 8 MiB, or 64 for each token of max_model_len
    # Of its JSON: a comma weighs 1, a bracket 4, a colon 8. None: 524288, or 8 for each token.
    max_body_weight: int | None = None
    min_body_bytes_per_s: int = 1024  # slower senders are answered 408
    # Texts that one request may ask for: prompts times n. None: 128 on a GPU, 8 a core on a CPU.
    max_choices: int | None = None
    max_connections: int | None = None  # None: what the limit of open files leaves
    max_header_bytes: int = 64 * 1024  # request line and headers together
    max_prompt_tokens: int | None = None  # None: what the engine takes
    max_output_tokens: int | None = None  # requests that ask for more get this many
    max_unread_bytes: int = 4 * MIB  # of a stream that its client leaves unread; in total, 8 times
    # What /v1/responses keeps. 0: nothing. In bytes: with what running requests keep for it.
    max_stored_responses: int = 1024
    max_stored_response_bytes: int = 32 * MIB
    stored_response_ttl_s: float = 24 * 3600.0
    max_queue: int = 4096  # sequences that may wait; more are answered 429
    head_timeout_s: float = 30.0  # to send a request's headers
    body_timeout_s: float = 60.0  # to send its body
    write_timeout_s: float = 60.0  # for a client to read some of what is written to it
    keep_alive_s: float = 60.0
    engine_hang_timeout_s: float = 30.0  # an engine that is silent for longer is killed; 0: never
    engine_restart_limit: int = 6  # deaths soon after the start, in a row, that end the server
    drain_s: float = 30.0  # for running requests, once the server is asked to stop

    otlp_traces_endpoint: str | None = None  # "": as OTEL_EXPORTER_OTLP_* say; None: no traces

    def __post_init__(self) -> None:
        self._check_int("port", 0, 65535)
        self._check_int("max_body_bytes", 1024, optional=True)
        self._check_int("max_body_weight", 1024, optional=True)
        self._check_int("min_body_bytes_per_s", 0)
        self._check_int("max_choices", 1, optional=True)
        self._check_int("max_connections", 1, optional=True)
        self._check_int("max_header_bytes", 1024)
        self._check_int("max_prompt_tokens", 1, optional=True)
        self._check_int("max_output_tokens", 1, optional=True)
        self._check_int("max_unread_bytes", 1024)
        self._check_int("max_stored_responses", 0)
        self._check_int("max_stored_response_bytes", MIB)
        self._check_int("max_queue", 0)
        self._check_int("engine_restart_limit", 1)
        self._check_number("engine_hang_timeout_s", 0.0, 1e6, "a number of seconds, or 0")
        if 0 < self.engine_hang_timeout_s < 2:
            self._refuse("engine_hang_timeout_s", "at least 2 seconds, or 0 for never")
        times = ("head_timeout_s", "body_timeout_s", "write_timeout_s", "keep_alive_s", "drain_s")
        for name in times:
            self._check_number(name, 0.0, 1e6, "a number of seconds")
        self._check_number("stored_response_ttl_s", 0.0, 1e9, "a number of seconds")
        self._check_bools(
            "access_log",
            "prefix_cache_sharing",
            "client_priority",
            "open_health",
            "ui",
            "dash",
            "learn_engines",
            "dev_mode",
            "enable_tokenizer_info_endpoint",
            "enable_request_id_headers",
            "force_include_usage",
            "enable_per_request_metrics",
            "return_tokens_as_token_ids",
            "log_stats",
            "trust_request_chat_template",
            "enable_auto_tool_choice",
            "exclude_tools_when_tool_choice_none",
            "disable_additional_properties",
            "strict_fields",
        )
        efforts = self.reasoning_effort_map
        if not isinstance(efforts, dict) or not all(
            isinstance(word, str) for pair in efforts.items() for word in pair
        ):
            self._refuse("reasoning_effort_map", 'a dict such as {"xhigh": "high"}')
        levels = ("critical", "error", "warning", "info", "debug", "trace")
        self._check_choice("uvicorn_log_level", levels)
        if not isinstance(self.otlp_traces_endpoint, str | None):
            self._refuse("otlp_traces_endpoint", "an address such as http://localhost:4317")
        for name in (
            "api_keys",
            "admin_api_keys",
            "cors_origins",
            "allowed_hosts",
            "served_model_names",
        ):
            given = getattr(self, name)
            if isinstance(given, str) or not all(isinstance(one, str) and one for one in given):
                self._refuse(name, "a list of non-empty strings")
            object.__setattr__(self, name, tuple(given))
        self._check_allowed_hosts()
        if self.ssl_keyfile is not None and self.ssl_certfile is None:
            raise ConfigError("ssl_keyfile is given without ssl_certfile; give both")
        path = self.root_path
        if not isinstance(path, str) or (path and not path.startswith("/")) or "?" in path:
            self._refuse("root_path", "a path that begins with '/', such as /llm")
        object.__setattr__(self, "root_path", path.rstrip("/"))
        if self.tool_call_parser is not None:
            self._check_choice("tool_call_parser", ("auto", *TOOL_PARSERS))
        if self.reasoning_parser is not None:
            self._check_choice("reasoning_parser", ("auto", "none", *REASONING_PARSERS))

    def _check_allowed_hosts(self) -> None:
        for name in self.allowed_hosts:
            rest = name.removeprefix("*.").strip("[]")
            is_address = ":" in rest and set(rest) <= set(":.0123456789abcdefABCDEF")
            if name != "*" and not is_address and not re.fullmatch(r"[\w.-]+", rest):
                self._refuse(
                    "allowed_hosts",
                    "names or addresses without a scheme or a port, such as llm.example.org, or "
                    "*.example.org for the names below it, or * for any",
                )
        object.__setattr__(self, "allowed_hosts", tuple(map(str.lower, self.allowed_hosts)))

    @property
    def metrics_open(self) -> bool:
        return not self.api_keys if self.open_metrics is None else self.open_metrics
