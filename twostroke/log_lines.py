"""Log lines on stderr, with level and time: `INFO 11-16 13:20:01 what happened`.

Only programs (`twostroke serve`, the engine's process) call `configure`. A program that uses
twostroke as a library configures its own logs.
"""

from __future__ import annotations

import logging
from time import monotonic
from typing import Any

FORMAT, DATE = "%(levelname)s %(asctime)s %(message)s", "%m-%d %H:%M:%S"
# The logger of a server's work. It logs at INFO, whatever the level of other loggers.
WORK = "twostroke.work"
MAX_LINES_PER_S = 20  # of a `RateLimitedLog`, and of uvicorn


def configure(level: str = "warning") -> None:
    """Set up the log. `level`: the name of a level of uvicorn. `WORK` is always logged."""
    ours = logging.getLogger("twostroke")
    if not ours.handlers:
        handler = logging.StreamHandler()
        handler.setFormatter(logging.Formatter(FORMAT, DATE))
        ours.addHandler(handler)
        ours.propagate = False
    ours.setLevel("DEBUG" if level == "trace" else level.upper())
    logging.getLogger(WORK).setLevel("INFO")


def uvicorn_config() -> dict[str, Any]:
    """Return uvicorn's `log_config`. uvicorn sets the levels."""
    handler = {"class": "logging.StreamHandler", "formatter": "line"}
    return {
        "version": 1,
        "disable_existing_loggers": False,
        "formatters": {"line": {"format": FORMAT, "datefmt": DATE}},
        "filters": {"limit": {"()": LineRateLimit}},
        "handlers": {"stderr": handler, "limited": {**handler, "filters": ["limit"]}},
        "loggers": {
            "uvicorn": {"handlers": ["limited"], "propagate": False},
            "uvicorn.access": {"handlers": ["stderr"], "propagate": False},
        },
    }


class LineRateLimit(logging.Filter):
    """A filter that passes `MAX_LINES_PER_S` lines each second, so that clients cannot fill the
    disk. The next line that it passes says how many lines were dropped."""

    def __init__(self) -> None:
        super().__init__()
        self._second, self._lines, self._dropped = 0.0, 0, 0

    def filter(self, record: logging.LogRecord) -> bool:
        now = monotonic()
        if now - self._second >= 1:
            self._second, self._lines = now, 0
        self._lines += 1
        if self._lines > MAX_LINES_PER_S:
            self._dropped += 1
            return False
        dropped, self._dropped = self._dropped, 0
        if dropped:
            text = f"{record.getMessage()} ({dropped} lines before it were dropped)"
            record.msg, record.args = text, ()
        return True


class RateLimitedLog:
    """A logger that logs at most `MAX_LINES_PER_S` lines each second."""

    def __init__(self, name: str) -> None:
        self._log = logging.getLogger(name)
        self._limit = LineRateLimit()

    def log(self, level: int, message: str, *args: object) -> None:
        if self._log.isEnabledFor(level):
            record = self._log.makeRecord(self._log.name, level, "", 0, message, args, None)
            if self._limit.filter(record):
                self._log.handle(record)
