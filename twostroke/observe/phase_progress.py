"""`PhaseProgress`: a progress bar with the speeds of both phases, from the step records."""

from __future__ import annotations

import sys
from time import monotonic
from types import TracebackType
from typing import Any

from twostroke.observe.record import Records

REFRESH_S = 0.1


class PhaseProgress:
    """Requests done, prefill tok/s and decode tok/s, on stderr while a batch runs."""

    def __init__(self, records: Records, total: int, show: bool) -> None:
        self._records, self._total = records, total
        self._show = show and total > 0 and sys.stderr.isatty()
        self._bar: Any = None
        self._task: Any = None
        self._seen = records.steps[-1].step if records.steps else -1
        self._prefill_tokens = self._decode_tokens = 0
        self._start = self._shown = monotonic()

    def __enter__(self) -> PhaseProgress:
        if self._show:
            from rich.console import Console
            from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn

            self._bar = Progress(
                TextColumn("requests"),
                BarColumn(),
                MofNCompleteColumn(),
                TextColumn("prefill {task.fields[prefill]:,.0f} tok/s"),
                TextColumn("decode {task.fields[decode]:,.0f} tok/s"),
                console=Console(stderr=True),
            )
            self._bar.start()
            self._task = self._bar.add_task("", total=self._total, prefill=0.0, decode=0.0)
        return self

    def __exit__(
        self,
        error_type: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        if self._bar is not None:
            self._bar.stop()

    def update(self, done: int) -> None:
        if self._bar is None:
            return
        for record in reversed(self._records.steps):
            if record.step <= self._seen:
                break
            self._prefill_tokens += record.prefill.tokens
            self._decode_tokens += record.decode.tokens
        if self._records.steps:
            self._seen = self._records.steps[-1].step
        now = monotonic()
        if now - self._shown < REFRESH_S and done < self._total:
            return
        self._shown, elapsed = now, now - self._start
        self._bar.update(
            self._task,
            completed=done,
            prefill=self._prefill_tokens / elapsed,
            decode=self._decode_tokens / elapsed,
        )
