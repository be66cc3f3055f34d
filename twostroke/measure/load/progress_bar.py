"""A progress bar for a run of requests, with what they took so far."""

from __future__ import annotations

import statistics
from types import TracebackType
from typing import Any

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, TextColumn, TimeElapsedColumn
from rich.progress import Progress as Bar

from twostroke.measure.load.definitions import Sample


class Progress:
    def __init__(self, total: int | None, shown: bool) -> None:
        """`total`: None where it is not known."""
        self._bar = Bar(
            TextColumn("{task.description}"),
            BarColumn(bar_width=None),
            MofNCompleteColumn(),
            TimeElapsedColumn(),
            console=Console(stderr=True),
            transient=True,
            disable=not shown,
        )
        self._task = self._bar.add_task("requests", total=total)
        self._ttfts_s: list[float] = []
        self._failed = 0

    def __enter__(self) -> Progress:
        self._bar.start()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._bar.stop()

    def add(self, sample: Sample) -> None:
        if sample.ok:
            self._ttfts_s.append(sample.ttft_s)
        else:
            self._failed += 1
        words = ["requests"]
        if self._ttfts_s:
            words.append(f"TTFT {1e3 * statistics.median(self._ttfts_s[-100:]):,.0f} ms")
        if self._failed:
            words.append(f"[red]{self._failed} failed[/red]")
        self._bar.update(self._task, advance=1, description=" · ".join(words))

    def tried(self, row: dict[str, Any]) -> None:
        """A rate of a search is done."""
        word = "met" if row["met"] else "not met"
        self._bar.console.print(
            f"{row['request_rate']:8.2f} requests a second: goals {word} by {row['share']:.0%}",
            highlight=False,
        )
