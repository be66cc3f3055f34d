"""Log lines on stderr, with level and time: `INFO 11-16 13:20:01 what happened`.

Only programs (`twostroke serve`, the engine's process) call `configure`; who uses twostroke as a
library decides about its own logs.
"""

from __future__ import annotations

import logging
from time import monotonic
from typing import Any

FORMAT, DATE = "%(levelname)s %(asctime)s %(message)s", "%m-%d %H:%M:%S"
# What a server says of its work, whatever the level of the rest is.
WORK = "twostroke.work"
MAX_LINES_PER_S = 20  # of a `LimitedLog`


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


class LimitedLog:
    """A logger of at most `MAX_LINES_PER_S` lines a second: clients must not fill the disk."""

    def __init__(self, name: str) -> None:
        self._log = logging.getLogger(name)
        self._second, self._lines, self._left_out = 0.0, 0, 0

    def log(self, level: int, message: str, *args: object) -> None:
        now = monotonic()
        if now - self._second >= 1:
            self._second, self._lines = now, 0
        self._lines += 1
        if self._lines > MAX_LINES_PER_S:
            self._left_out += 1
            return
        left_out, self._left_out = self._left_out, 0
        if left_out:
            message, args = f"{message} (%d lines before it were left out)", (*args, left_out)
        self._log.log(level, message, *args)
