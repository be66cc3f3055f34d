"""`ServeSettings`: the settings of the HTTP server, validated once. `EngineConfig` has the
engine's."""

from __future__ import annotations

import re
from dataclasses import dataclass, field
from typing import Any

from twostroke.config import EngineConfig
from twostroke.errors import ConfigError
from twostroke.model.text.template_source import CONTENT_FORMATS
from twostroke.route.autoscale import Bounds
from twostroke.serve.parsers import REASONING_PARSERS, TOOL_PARSERS
from twostroke.strict import StrictSettings

MIB = 1024**2
BOOLS = (
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


@dataclass(frozen=True, kw_only=True)
class ServeSettings(StrictSettings):
    host: str = "127.0.0.1"
    port: int = 8000  # 0: any free port
    uds: str | None = None  # the path of a Unix socket, instead of host and port
    ssl_certfile: str | None = None
    ssl_keyfile: str | None = None
    access_log: bool = False
    uvicorn_log_level: str = "warning"

    api_keys: tuple[str, ...] = ()  # empty: no key is needed
    # A client with an admin key may change the server, and sees the requests of every key. Empty:
    # with at most one API key every client is an admin, with several keys no client is.
    admin_api_keys: tuple[str, ...] = ()
    prefix_cache_sharing: bool = False  # between API keys, if there are several
    client_priority: bool = True  # requests may set their priority
    open_health: bool = True  # /health and /ping answer without a key
    open_metrics: bool | None = None  # /metrics needs no key; None: only if there are no keys
    ui: bool = True  # serve the pages: the chat at /, /learn and /dash
    dash: bool = True  # serve /dash, if `ui`
    engine: EngineConfig | None = None  # the engine's settings, for /learn
    learn_engines: bool = False  # experiments of /learn may start engines
    dev_mode: bool = False  # serve /sleep, /wake_up, /reset_prefix_cache, /server_info
    enable_tokenizer_info_endpoint: bool = False  # serve /tokenizer_info
    root_path: str = ""  # a path prefix that a proxy adds and does not remove
    enable_request_id_headers: bool = False  # responses have the header X-Request-Id
    autoscale: str | None = None  # MIN:MAX engines of each pool; None: a fixed number
    autoscale_interval_s: float = 60.0  # between two requests for the planner's advice
    log_stats: bool = True  # log the throughput of both phases while there is work
    cors_origins: tuple[str, ...] = ()  # empty: pages of other sites may not call the server
    # Names in the Host header, in addition to this machine's. Empty: with a key, any name.
    allowed_hosts: tuple[str, ...] = ()

    served_model_names: tuple[str, ...] = ()  # responses have the first; empty: the engine's name
    response_role: str = "assistant"
    return_tokens_as_token_ids: bool = False  # in log-probabilities; requests may override it
    force_include_usage: bool = False  # every chunk of every stream has `usage`
    enable_per_request_metrics: bool = False  # answers have vLLM's `metrics`
    # Reasoning effort of a request → the value for the chat template.
    reasoning_effort_map: dict[str, str] = field(default_factory=dict)
    chat_template_kwargs: dict[str, Any] = field(default_factory=dict)
    chat_template_content_format: str = "auto"  # one of CONTENT_FORMATS
    trust_request_chat_template: bool = False  # requests may have a chat template
    enable_auto_tool_choice: bool = True  # tool_choice "auto" is allowed
    exclude_tools_when_tool_choice_none: bool = False  # "none" leaves tools out of the prompt
    tool_call_parser: str | None = None  # None: chosen by the chat template
    reasoning_parser: str | None = None  # None: parse only if the prompt opens reasoning

    # In JSON schemas of requests, objects may have no properties but those in `properties`.
    disable_additional_properties: bool = True
    strict_fields: bool = False  # unknown fields of requests are refused, not ignored

    max_body_bytes: int | None = None  # None: 8 MiB, or 64 for each token of max_model_len
    # Weight of the JSON: comma 1, bracket 4, colon 8. None: 524288, or 8 for each token.
    max_body_weight: int | None = None
    min_body_bytes_per_s: int = 1024  # slower bodies are refused with 408
    # Choices of one request: prompts times n. None: 128 on a GPU, 8 for each core on a CPU.
    max_choices: int | None = None
    max_connections: int | None = None  # None: as many as the limit of open files allows
    max_header_bytes: int = 64 * 1024  # request line and headers together
    max_prompt_tokens: int | None = None  # None: the engine's limit
    max_output_tokens: int | None = None  # a higher max_tokens is lowered to this value
    max_unread_bytes: int = 4 * MIB  # unread bytes of one stream; all streams: 8 times as many
    # Responses stored by /v1/responses; 0: none. The bytes include those of running requests.
    max_stored_responses: int = 1024
    max_stored_response_bytes: int = 32 * MIB
    stored_response_ttl_s: float = 24 * 3600.0
    max_queue: int = 4096  # waiting sequences; if exceeded, requests are refused with 429
    head_timeout_s: float = 30.0  # to receive the headers
    body_timeout_s: float = 60.0  # to receive the body
    write_timeout_s: float = 60.0  # after which a client that reads nothing is disconnected
    keep_alive_s: float = 60.0
    engine_hang_timeout_s: float = 30.0  # an engine that is silent for longer is killed; 0: never
    engine_start_timeout_s: float = 3600.0  # an engine that starts for longer is killed; 0: never
    engine_restart_limit: int = 6  # consecutive early deaths that end the server
    drain_s: float = 30.0  # for running requests at shutdown

    otlp_traces_endpoint: str | None = None  # "": from OTEL_EXPORTER_OTLP_*; None: no traces

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
        self._check_number("engine_start_timeout_s", 0.0, 1e6, "a number of seconds, or 0")
        times = ("head_timeout_s", "body_timeout_s", "write_timeout_s", "keep_alive_s", "drain_s")
        for name in times:
            self._check_number(name, 0.0, 1e6, "a number of seconds")
        self._check_number("autoscale_interval_s", 1.0, 86400.0, "seconds from 1 to 86400")
        if self.autoscale is not None:
            Bounds.read(self.autoscale)
        self._check_number("stored_response_ttl_s", 0.0, 1e9, "a number of seconds")
        self._check_bools(*BOOLS)
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
            values = getattr(self, name)
            if isinstance(values, str) or not all(
                isinstance(each, str) and each for each in values
            ):
                self._refuse(name, "a list of non-empty strings")
            object.__setattr__(self, name, tuple(values))
        self._check_allowed_hosts()
        if self.ssl_keyfile is not None and self.ssl_certfile is None:
            raise ConfigError("ssl_keyfile is set without ssl_certfile; set both")
        path = self.root_path
        if not isinstance(path, str) or (path and not path.startswith("/")) or "?" in path:
            self._refuse("root_path", "a path that begins with '/', such as /llm")
        object.__setattr__(self, "root_path", path.rstrip("/"))
        self._check_choice("chat_template_content_format", CONTENT_FORMATS)
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
