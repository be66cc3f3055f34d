"""What `serve` takes from the environment: keys, development mode, and where traces go."""

from __future__ import annotations

import os
import sys
from typing import Any

from twostroke.errors import ConfigError


def keys_of_environment() -> list[str]:
    for name in ("TWOSTROKE_API_KEY", "VLLM_API_KEY"):
        if key := os.environ.get(name):
            return [key]
    return []


def admin_keys_of_environment() -> list[str]:
    key = os.environ.get("TWOSTROKE_ADMIN_API_KEY")
    return [key] if key else []


def dev_mode_of_environment() -> bool:
    names = ("TWOSTROKE_SERVER_DEV_MODE", "VLLM_SERVER_DEV_MODE")
    return any(os.environ.get(name) == "1" for name in names)


def settle_traces(given: dict[str, Any]) -> None:
    """The flag needs what it needs; variables that are there for every program only ask for it."""
    names = ("OTEL_EXPORTER_OTLP_TRACES_ENDPOINT", "OTEL_EXPORTER_OTLP_ENDPOINT")
    asked = "otlp_traces_endpoint" in given
    named = any(map(os.environ.get, names))
    if not asked and (not named or os.environ.get("OTEL_TRACES_EXPORTER") == "none"):
        return
    from twostroke.serve.monitor.tracing import missing

    problem = missing()
    if problem and asked:
        raise ConfigError(f"--otlp-traces-endpoint: {problem}")
    if problem:
        print(f"no traces are exported, though the environment asks: {problem}", file=sys.stderr)
    else:
        given.setdefault("otlp_traces_endpoint", "")
