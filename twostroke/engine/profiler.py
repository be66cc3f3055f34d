"""`Profiler`: starts and ends the profiles of an engine. A profile has limits of time and steps."""

from __future__ import annotations

from collections.abc import Callable
from time import monotonic
from typing import Any

from twostroke.errors import RequestError
from twostroke.exec.stage_profile import Profile
from twostroke.observe.record import Records, RequestRecord, StepRecord

MAX_SECONDS = 60.0


class Profiler:
    """Runs one profile at a time. The result of a profile that has reached a limit is kept until
    `stop` returns it or another profile begins."""

    def __init__(self, begin: Callable[[], Profile] | None, records: Records) -> None:
        self._begin, self._records = begin, records
        self._profile: Profile | None = None
        self._began_s = 0.0
        self._ended_s: float | None = None
        self._ended_by = ""

    def start(self) -> None:
        if self._begin is None:
            raise RequestError("this engine's executor cannot be profiled")
        self._check_time()
        if self._profile is not None and self._ended_s is None:
            raise RequestError(
                f"a profile has been running for {monotonic() - self._began_s:.1f} s; end it with "
                f"POST /stop_profile, or wait: it ends after {MAX_SECONDS:.0f} s"
            )
        self._profile, self._began_s, self._ended_s = self._begin(), monotonic(), None
        self._records.listeners.append(self)

    def stop(self) -> dict[str, Any]:
        profile = self._profile
        if profile is None:
            raise RequestError("no profile is running; begin one with POST /start_profile")
        self._check_time()
        if self._ended_s is None:
            self._end("stop")
        self._profile = None
        assert self._ended_s is not None
        return {
            "seconds": self._ended_s - self._began_s,
            "ended_by": self._ended_by,
            "began_s": self._began_s,
            **profile.result(),
        }

    # ── a listener of the records while a profile runs ──────────────────────────────────────

    def add_step(self, record: StepRecord) -> None:
        assert self._profile is not None
        self._profile.add_step(record)
        if self._profile.num_steps >= self._profile.max_steps:
            self._end("step limit")
        else:
            self._check_time()

    def add_request(self, record: RequestRecord) -> None: ...

    def _check_time(self) -> None:
        running = self._profile is not None and self._ended_s is None
        if running and monotonic() - self._began_s > MAX_SECONDS:
            self._end("time limit")

    def _end(self, by: str) -> None:
        assert self._profile is not None
        # A new list: the old one may be being iterated.
        self._records.listeners = [one for one in self._records.listeners if one is not self]
        self._profile.end()
        self._ended_s = min(monotonic(), self._began_s + MAX_SECONDS)
        self._ended_by = by
