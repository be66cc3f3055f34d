"""Log lines on stderr, with level and time: `INFO 11-16 13:20:01 what happened`.

Only programs (`twostroke serve`, the engine's process) call `configure`; who uses twostroke as a
library decides about its own logs.
"""

from __future__ import annotations

import logging
from typing import Any

FORMAT, DATE = "%(levelname)s %(asctime)s %(message)s", "%m-%d %H:%M:%S"
# What a server says of its work, whatever the level of the rest is.
WORK = "twostroke.work"


def configure(level: str = "warning") -> None:
    """`level`: the least that is logged of what is not about the work; uvicorn's names."""
    ours = logging.getLogger("twostroke")
    if not ours.handlers:
        handler = logging.StreamHandler()
        handler.setFormatter(logging.Formatter(FORMAT, DATE))
        ours.addHandler(handler)
        ours.propagate = False
    ours.setLevel("DEBUG" if level == "trace" else level.upper())
    logging.getLogger(WORK).setLevel("INFO")


def uvicorn_config() -> dict[str, Any]:
    """`log_config` of uvicorn's, which sets the levels itself."""
    handler = {"class": "logging.StreamHandler", "formatter": "line"}
    logger = {"handlers": ["stderr"], "propagate": False}
    return {
        "version": 1,
        "disable_existing_loggers": False,
        "formatters": {"line": {"format": FORMAT, "datefmt": DATE}},
        "handlers": {"stderr": handler},
        "loggers": {"uvicorn": logger, "uvicorn.access": logger},
    }
