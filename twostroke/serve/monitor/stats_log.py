"""`log_stats`: logs the throughput of both phases and the KV cache, every ten seconds while there
is work. The figures are those of `/metrics` and `/dash`."""

from __future__ import annotations

import asyncio
import logging
from time import monotonic

from twostroke.engine.api import EngineClient
from twostroke.log_lines import WORK
from twostroke.observe.totals import Totals

log = logging.getLogger(WORK)
EVERY_S = 10.0


class StatsLog:
    def __init__(self, client: EngineClient, totals: Totals, now: float) -> None:
        self._client, self._totals = client, totals
        self._last_s = now
        self._last = self._amounts()

    def _amounts(self) -> tuple[int, int, int]:
        totals = self._totals
        return totals.prefill.tokens, totals.decode.tokens, sum(totals.ended.values())

    def line(self, now: float) -> str | None:
        """Return the log line; None if nothing has run since the last line and nothing waits."""
        amounts, load = self._amounts(), self._client.load()
        if amounts == self._last and not load.running and not load.waiting:
            self._last_s = now
            return None
        seconds = max(now - self._last_s, 1e-3)
        prefill, decode, ended = (new - old for new, old in zip(amounts, self._last, strict=True))
        self._last, self._last_s = amounts, now
        kv = load.kv
        return (
            f"prefill {prefill / seconds:,.1f} tok/s, decode {decode / seconds:,.1f} tok/s; "
            f"{load.running} running, {load.waiting} waiting, {ended} ended; "
            f"KV tokens: {kv.used:,} used + {kv.fragmented:,} fragmented + {kv.cached:,} cached + "
            f"{kv.free:,} free = {kv.reserved:,} reserved"
        )


async def log_stats(client: EngineClient, totals: Totals) -> None:
    """Log lines until the task is cancelled."""
    stats = StatsLog(client, totals, monotonic())
    while True:
        await asyncio.sleep(EVERY_S)
        line = stats.line(monotonic())
        if line is not None:
            log.info(line)
