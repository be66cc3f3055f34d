"""`Recent`: what happened lately, for whoever looks on: `Totals` as they were second by second, so
that what a minute brought is one subtraction, and how times were spread in each of those seconds.

    Records ──▶ Recent.add_step ──▶ Totals.add_step
                  │ a new second: Mark of the totals as they were before this step
                  └ always: the step's gaps and first tokens, into bins 2 % wide

A second without steps costs nothing, since nothing changed in it. No torch here.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from math import log2
from operator import sub
from typing import NamedTuple

from twostroke.observe.record import RequestRecord, StepRecord
from twostroke.observe.totals import Totals

SLICE_S = 1.0
MINUTE_S = 60.0
KEPT_SLICES = 64  # a minute, and what it takes to know where that began
BINS = 32  # a doubling; each is 2.2 % wide
LEAST_S = 1e-7


class Spread:
    """Durations by size, so finely that a quantile is off by 1.1 % at most."""

    __slots__ = ("counts",)

    def __init__(self) -> None:
        self.counts: dict[int, int] = {}

    def add(self, seconds: float, times: int = 1) -> None:
        at = round(log2(max(seconds, LEAST_S)) * BINS)
        self.counts[at] = self.counts.get(at, 0) + times

    def quantiles(self, shares: Sequence[float]) -> list[float | None]:
        """None where nothing was added. `shares` must grow."""
        bins = sorted(self.counts.items())
        total = sum(count for _, count in bins)
        if not total:
            return [None] * len(shares)
        found: list[float | None] = []
        seen = at = 0
        for share in shares:
            while seen + bins[at][1] < share * total and at < len(bins) - 1:
                seen += bins[at][1]
                at += 1
            found.append(2.0 ** (bins[at][0] / BINS))
        return found

    @property
    def count(self) -> int:
        return sum(self.counts.values())


def merged(spreads: Iterable[Spread]) -> Spread:
    whole = Spread()
    counts = whole.counts
    for spread in spreads:
        for at, count in list(spread.counts.items()):  # another thread may be adding to it
            counts[at] = counts.get(at, 0) + count
    return whole


class Mark(NamedTuple):
    """Some of the totals, at one moment; or their growth between two."""

    prompt_tokens: float
    cached_tokens: float
    generated_tokens: float
    preemptions: float
    prefill_tokens: float
    prefill_flops: float
    prefill_bytes: float
    prefill_device_s: float
    decode_tokens: float
    decode_flops: float
    decode_bytes: float
    decode_device_s: float
    gap_decode_s: float
    gap_prefill_s: float
    gap_preemption_s: float
    gap_host_s: float

    def since(self, before: Mark) -> Mark:
        return Mark(*map(sub, self, before))


NOTHING = Mark(*[0.0] * len(Mark._fields))


def mark_of(totals: Totals) -> Mark:
    prefill, decode = totals.prefill, totals.decode
    return Mark(
        totals.prompt_tokens,
        totals.cached_tokens,
        totals.generation_tokens,
        totals.preemptions,
        *(prefill.tokens, prefill.flops, prefill.num_bytes, prefill.device_s),
        *(decode.tokens, decode.flops, decode.num_bytes, decode.device_s),
        *totals.cause_s.values(),
    )


@dataclass(slots=True)
class Slice:
    """About a second in which steps ended."""

    from_s: float  # when the work on its first step began
    began_s: float  # when that ended
    last_s: float  # when its last step did
    before: Mark
    gaps: Spread = field(default_factory=Spread)
    firsts: Spread = field(default_factory=Spread)


class Window(NamedTuple):
    seconds: float
    work: Mark
    gaps: Spread
    firsts: Spread


class Recent:
    """A listener that must be told of a step before `totals` is."""

    def __init__(self, totals: Totals, started_s: float) -> None:
        self.totals = totals
        self.started_s = started_s
        self.num_steps = 0  # told so far, of all engines
        self._slices: deque[Slice] = deque(maxlen=KEPT_SLICES)
        self._gaps, self._firsts = Spread(), Spread()  # since the start

    def add_step(self, record: StepRecord) -> None:
        now = record.committed_s
        slices = self._slices
        if not slices or now - slices[-1].began_s >= SLICE_S:
            from_s = max(record.planned_s, now - record.since_s.total_s)
            slices.append(Slice(from_s, now, now, mark_of(self.totals)))
        current = slices[-1]
        current.last_s = now
        if record.regular:
            gap = record.since_s.total_s
            current.gaps.add(gap, record.regular)
            self._gaps.add(gap, record.regular)
        for late in record.late:
            current.gaps.add(late.total_s)
            self._gaps.add(late.total_s)
        for first in record.first:
            current.firsts.add(first.ttft_s)
            self._firsts.add(first.ttft_s)
        self.num_steps += 1

    def add_request(self, record: RequestRecord) -> None:
        pass

    def window(self, now: float, seconds: float | None) -> Window:
        """The last `seconds`, a minute at most, to within a second; None: since the start."""
        whole, up_s = mark_of(self.totals), max(now - self.started_s, 1e-9)
        if seconds is None:
            return Window(up_s, whole, merged([self._gaps]), merged([self._firsts]))
        began, before = now - seconds, None
        inside = []
        for one in list(self._slices):
            if one.began_s >= began:
                inside.append(one)
            else:
                before = one
        # The slice that the window cuts is left out, so the time it takes is left out too.
        cut_s = began if before is None else max(began, before.last_s)
        covered_s = max(min(now - cut_s, up_s), 1e-9)
        work = whole.since(inside[0].before) if inside else NOTHING
        gaps, firsts = ([getattr(one, name) for one in inside] for name in ("gaps", "firsts"))
        return Window(covered_s, work, merged(gaps), merged(firsts))

    def series(self, now: float) -> list[tuple[float, float, float, float]]:
        """Of each slice of the last minute: how long ago it began and ended, and the rates in it:
        prompt tokens computed and tokens written, a second."""
        slices = list(self._slices)
        after = [*(one.before for one in slices[1:]), mark_of(self.totals)]
        told = []
        for one, mark in zip(slices, after, strict=False):  # of no slice there is a mark, too
            if now - one.last_s > MINUTE_S:
                continue
            work, took_s = mark.since(one.before), max(one.last_s - one.from_s, 1e-3)
            rates = work.prefill_tokens / took_s, work.generated_tokens / took_s
            told.append((now - one.from_s, now - one.last_s, *rates))
        return told
