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
    return {
        "version": 1,
        "disable_existing_loggers": False,
        "formatters": {"line": {"format": FORMAT, "datefmt": DATE}},
        "filters": {"limit": {"()": LineLimit}},
        "handlers": {"stderr": handler, "limited": {**handler, "filters": ["limit"]}},
        "loggers": {
            "uvicorn": {"handlers": ["limited"], "propagate": False},
            "uvicorn.access": {"handlers": ["stderr"], "propagate": False},
        },
    }


class LineLimit(logging.Filter):
    """At most `MAX_LINES_PER_S` lines a second: clients must not fill the disk. The next line says
    how many were left out."""

    def __init__(self) -> None:
        super().__init__()
        self._second, self._lines, self._left_out = 0.0, 0, 0

    def filter(self, record: logging.LogRecord) -> bool:
        now = monotonic()
        if now - self._second >= 1:
            self._second, self._lines = now, 0
        self._lines += 1
        if self._lines > MAX_LINES_PER_S:
            self._left_out += 1
            return False
        left_out, self._left_out = self._left_out, 0
        if left_out:
            text = f"{record.getMessage()} ({left_out} lines before it were left out)"
            record.msg, record.args = text, ()
        return True


class LimitedLog:
    """A logger of at most `MAX_LINES_PER_S` lines a second."""

    def __init__(self, name: str) -> None:
        self._log = logging.getLogger(name)
        self._limit = LineLimit()

    def log(self, level: int, message: str, *args: object) -> None:
        if self._log.isEnabledFor(level):
            record = self._log.makeRecord(self._log.name, level, "", 0, message, args, None)
            if self._limit.filter(record):
                self._log.handle(record)
