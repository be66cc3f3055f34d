"""The environment variables that twostroke reads. No other module reads its settings from the
environment.

| variable                                                 | setting                              |
|----------------------------------------------------------|--------------------------------------|
| TWOSTROKE_API_KEY, VLLM_API_KEY                          | the key of a server                  |
| TWOSTROKE_ADMIN_API_KEY                                  | the administrator's key of a server  |
| TWOSTROKE_SERVER_DEV_MODE, VLLM_SERVER_DEV_MODE          | a server's development routes        |
| TWOSTROKE_ENGINE_SECRET, TWOSTROKE_ENGINE_SECRET_FILE    | the secret of engines on a network   |
| TWOSTROKE_CACHE, XDG_CACHE_HOME, LOCALAPPDATA            | the folder of downloaded models      |
| OPENAI_API_KEY                                           | the key that a client sends          |
| OTEL_TRACES_EXPORTER, OTEL_EXPORTER_OTLP_…               | where traces go, and how             |
| CUDA_VISIBLE_DEVICES                                     | the GPUs that this process can use   |
| COLUMNS                                                  | the width of the terminal            |

Other modules use the environment only for other programs: they pass it to a child process or set a
variable that a library reads. `tests/unit/test_environment.py` lists these modules.
"""

from __future__ import annotations

import os

ENGINE_SECRET = "TWOSTROKE_ENGINE_SECRET"
ENGINE_SECRET_FILE = "TWOSTROKE_ENGINE_SECRET_FILE"
SERVER_KEYS = ("TWOSTROKE_API_KEY", "VLLM_API_KEY")
ADMIN_KEY = "TWOSTROKE_ADMIN_API_KEY"
DEV_MODE = ("TWOSTROKE_SERVER_DEV_MODE", "VLLM_SERVER_DEV_MODE")
OTLP_ENDPOINTS = ("OTEL_EXPORTER_OTLP_TRACES_ENDPOINT", "OTEL_EXPORTER_OTLP_ENDPOINT")
OTLP_PROTOCOLS = ("OTEL_EXPORTER_OTLP_TRACES_PROTOCOL", "OTEL_EXPORTER_OTLP_PROTOCOL")


def server_api_keys() -> list[str]:
    """Return the key of the first variable that is set; an empty list if none is set."""
    return _first_set(*SERVER_KEYS)


def admin_api_keys() -> list[str]:
    return _first_set(ADMIN_KEY)


def dev_mode() -> bool:
    return any(os.environ.get(name) == "1" for name in DEV_MODE)


def engine_secret() -> str | None:
    return os.environ.get(ENGINE_SECRET)


def engine_secret_file() -> str | None:
    return os.environ.get(ENGINE_SECRET_FILE)


def cache_folder() -> str | None:
    return os.environ.get("TWOSTROKE_CACHE") or None


def xdg_cache_home() -> str:
    return os.environ.get("XDG_CACHE_HOME", "")


def local_app_data() -> str | None:
    """Return the folder for caches on Windows."""
    return os.environ.get("LOCALAPPDATA") or None


def client_api_key() -> str | None:
    return os.environ.get("OPENAI_API_KEY")


def asks_for_traces() -> bool:
    """Return whether a variable names an OTLP endpoint and none switches traces off."""
    exporter = os.environ.get("OTEL_TRACES_EXPORTER")
    return any(map(os.environ.get, OTLP_ENDPOINTS)) and exporter != "none"


def otlp_protocol() -> tuple[str, str] | None:
    """Return the variable that sets the protocol of traces, and its value."""
    for name in OTLP_PROTOCOLS:
        if value := os.environ.get(name):
            return name, value
    return None


def visible_gpus() -> str:
    """Return CUDA_VISIBLE_DEVICES, or `all` if it is not set."""
    return os.environ.get("CUDA_VISIBLE_DEVICES", "all")


def hides_gpus() -> bool:
    """Return whether this process may use no GPU, even if the machine has one."""
    return visible_gpus().strip() in ("", "-1")


def visible_gpu(index: int) -> int | str:
    """Return the driver's number or UUID of the GPU that CUDA calls `index` in this process."""
    visible = os.environ.get("CUDA_VISIBLE_DEVICES", "").split(",")
    name = visible[index].strip() if index < len(visible) else ""
    return int(name or index) if not name or name.isdecimal() else name


def terminal_columns() -> int | None:
    """Return the width that the user set; None if COLUMNS is not a positive number."""
    columns = os.environ.get("COLUMNS", "")
    return int(columns) if columns.isdigit() and int(columns) > 0 else None


def _first_set(*names: str) -> list[str]:
    return next(([value] for name in names if (value := os.environ.get(name))), [])
