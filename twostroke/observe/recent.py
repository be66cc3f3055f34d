"""`Recent`: the figures of the last minute and the last hour, for dashboards.

The last minute is divided into slices of one second, the last hour into slices of 15 seconds. Each
slice has a snapshot of `Totals` at its start, so that the growth in any window is one subtraction,
and histograms of its gaps and TTFTs.

    Records ──▶ Recent.add_step ──▶ Totals.add_step
                  │ at a new slice: take a snapshot of the totals before this step
                  └ always: add the step's gaps and TTFTs to bins 2 % wide

A second without events costs nothing. This module does not import torch.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from functools import reduce
from math import log2
from operator import add, sub
from typing import NamedTuple

from twostroke.observe.record import RequestRecord, StepRecord
from twostroke.observe.totals import Totals

MINUTE_S, HOUR_S = 60.0, 3600.0
# For a minute and an hour: the seconds of a slice, and the number of slices that are kept. The four
# extra slices show where the window begins.
FINE, COARSE = (1.0, 64), (15.0, 244)
BINS = 32  # for each doubling; a bin is 2.2 % wide
MIN_S = 1e-7
SERIES_QUANTILES = (0.5, 0.95)


class Spread:
    """A histogram of durations, so fine that a quantile is off by 1.1 % at most."""

    __slots__ = ("counts",)

    def __init__(self) -> None:
        self.counts: dict[int, int] = {}

    def add(self, seconds: float, times: int = 1) -> None:
        at = round(log2(max(seconds, MIN_S)) * BINS)
        self.counts[at] = self.counts.get(at, 0) + times

    def quantiles(self, shares: Sequence[float]) -> list[float | None]:
        """Return the quantiles at increasing `shares`; None if nothing was added."""
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
        for at, count in list(spread.counts.items()):  # a copy: another thread may add counts
            counts[at] = counts.get(at, 0) + count
    return whole


class TotalsSnapshot(NamedTuple):
    """Some of the totals at one moment, or their growth between two moments."""

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
    collective_bytes: float
    gap_decode_s: float
    gap_prefill_s: float
    gap_preemption_s: float
    gap_host_s: float
    gap_communication_s: float
    gap_drafting_s: float
    ended_stop: float
    ended_length: float
    ended_abort: float
    ended_error: float
    answered_429: float
    answered_4xx: float
    answered_5xx: float

    def since(self, before: TotalsSnapshot) -> TotalsSnapshot:
        return TotalsSnapshot(*map(sub, self, before))


NOTHING = TotalsSnapshot(*[0.0] * len(TotalsSnapshot._fields))


def totals_snapshot(totals: Totals) -> TotalsSnapshot:
    prefill, decode = totals.prefill, totals.decode
    return TotalsSnapshot(
        *(totals.prompt_tokens, totals.cached_tokens, totals.generation_tokens),
        totals.preemptions,
        *(prefill.tokens, prefill.flops, prefill.num_bytes, prefill.device_s),
        *(decode.tokens, decode.flops, decode.num_bytes, decode.device_s),
        prefill.comm_bytes + decode.comm_bytes,
        *totals.cause_s.values(),
        *totals.ended.values(),
        *totals.refused.values(),
    )


class Window(NamedTuple):
    seconds: float
    work: TotalsSnapshot
    gaps: Spread
    ttfts: Spread


class Point(NamedTuple):
    """The measurements of a slice of time. None: nothing was measured in it."""

    began_s: float  # seconds ago
    ended_s: float  # seconds ago
    prefill_rate: float | None  # prompt tokens computed per second
    written_rate: float | None  # tokens generated per second
    # Maxima over the steps, of all engines together.
    running: int | None
    waiting: int | None
    kv_share: float | None  # the share of the KV cache in use
    ended_rate: float  # requests that ended, per second
    error_rate: float  # requests that failed or were refused, per second
    first_p50_s: float | None
    first_p95_s: float | None
    gap_p50_s: float | None
    gap_p95_s: float | None


class StepLoad(NamedTuple):
    """The load at one step of an engine, or of several engines together."""

    running: int = 0
    waiting: int = 0
    kv_used: int = 0
    kv_reserved: int = 0

    def plus(self, other: StepLoad) -> StepLoad:
        return StepLoad(*map(add, self, other))

    def maxima(self, other: StepLoad) -> StepLoad:
        return StepLoad(*map(max, self, other))


NO_LOAD = StepLoad()


@dataclass(slots=True)
class Slice:
    """A span of time with events."""

    began_s: float  # the first event
    last_s: float  # the last event
    before: TotalsSnapshot
    from_s: float | None = None  # when its first step began; None: no step yet
    gaps: Spread = field(default_factory=Spread)
    ttfts: Spread = field(default_factory=Spread)
    load: StepLoad = NO_LOAD  # maxima
    quantiles: tuple[float | None, ...] | None = None  # once the slice has ended

    def find_quantiles(self) -> tuple[float | None, ...]:
        spreads = (self.ttfts, self.gaps)
        return tuple(q for one in spreads for q in one.quantiles(SERIES_QUANTILES))

    def joined(self, newer: Slice) -> Slice:
        """Join two slices."""
        return Slice(
            self.began_s,
            newer.last_s,
            self.before,
            newer.from_s if self.from_s is None else self.from_s,
            merged((self.gaps, newer.gaps)),
            merged((self.ttfts, newer.ttfts)),
            self.load.maxima(newer.load),
        )


class Recent:
    """A listener of the records. It must get each step and request before `totals` gets it.

    The slice of the newest second is only in `fine`. When the second has ended, the slice is joined
    to the last slice of `coarse` and to the slice since the start."""

    def __init__(self, totals: Totals, started_s: float) -> None:
        self.totals = totals
        self.started_s = started_s
        self.num_steps = 0  # since the start, of all engines
        self.fine: deque[Slice] = deque(maxlen=FINE[1])
        self.coarse: deque[Slice] = deque(maxlen=COARSE[1])
        self._loads: dict[str, StepLoad] = {}  # of each engine, at its last step
        self._whole = Slice(started_s, started_s, NOTHING)
        # By the length of a window: the starts of its first and last ended slices, and the merged
        # spreads of all its ended slices.
        self._merged: dict[float, tuple[float, float, Spread, Spread]] = {}

    def add_step(self, record: StepRecord) -> None:
        now = record.committed_s
        current = self._slice(now)
        if current.from_s is None:
            current.from_s = max(record.planned_s, now - record.since_s.total_s)
        if record.regular:
            current.gaps.add(record.since_s.total_s, record.regular)
        for late in record.late:
            current.gaps.add(late.total_s)
        for first in record.first:
            current.ttfts.add(first.ttft_s)
        kv = record.kv
        load = StepLoad(record.running, record.waiting, kv.used, kv.reserved)
        self._loads[record.engine] = load
        current.load = current.load.maxima(reduce(StepLoad.plus, self._loads.values()))
        self.num_steps += 1

    def add_request(self, record: RequestRecord) -> None:
        self.before_change(record.finished_s)

    def before_change(self, now: float) -> None:
        """Must be called before a change of the totals without a step: the end of a request, or an
        HTTP answer."""
        self._slice(now)

    def _slice(self, now: float) -> Slice:
        """Return the slice of the second that `now` is in."""
        fine, coarse = self.fine, self.coarse
        if fine and now - fine[-1].began_s < FINE[0]:
            fine[-1].last_s = max(fine[-1].last_s, now)
            return fine[-1]
        before = totals_snapshot(self.totals)
        if fine:
            ended = fine[-1]
            ended.quantiles = ended.find_quantiles()
            coarse[-1] = coarse[-1].joined(ended)
            self._whole = self._whole.joined(ended)
        if not coarse or now - coarse[-1].began_s >= COARSE[0]:
            if coarse:
                coarse[-1].quantiles = coarse[-1].find_quantiles()
            coarse.append(Slice(now, now, before))
        fine.append(Slice(now, now, before))
        return fine[-1]

    def _slices(self, seconds: float) -> list[Slice]:
        """Return the slices for a window of this length. The last slice has not ended."""
        if seconds <= MINUTE_S or not self.fine:
            return list(self.fine)
        ended = list(self.coarse)
        return [*ended[:-1], ended[-1].joined(self.fine[-1])]

    def window(self, now: float, seconds: float | None) -> Window:
        """Return the window of the last `seconds` (at most an hour, accurate to a slice), or since
        the start if `seconds` is None."""
        whole, up_s = totals_snapshot(self.totals), max(now - self.started_s, 1e-9)
        if seconds is None:
            spreads = self._whole.joined(self.fine[-1]) if self.fine else self._whole
            return Window(up_s, whole, spreads.gaps, spreads.ttfts)
        began, before = now - seconds, None
        inside = []
        for one in self._slices(seconds):
            if one.began_s >= began:
                inside.append(one)
            else:
                before = one
        # The slice that the window cuts is left out, and so is its time.
        cut_s = began if before is None else max(began, before.last_s)
        covered_s = max(min(now - cut_s, up_s), 1e-9)
        work = whole.since(inside[0].before) if inside else NOTHING
        return Window(covered_s, work, *self._spreads(seconds, inside))

    def _spreads(self, seconds: float, inside: list[Slice]) -> tuple[Spread, Spread]:
        """Return the merged gaps and TTFTs of slices. Those of ended slices are cached."""
        if len(inside) < 2:
            return merged(one.gaps for one in inside), merged(one.ttfts for one in inside)
        *ended, current = inside
        ends = ended[0].began_s, ended[-1].began_s
        known = self._merged.get(seconds)
        if known is None or known[:2] != ends:
            spreads = merged(one.gaps for one in ended), merged(one.ttfts for one in ended)
            known = self._merged[seconds] = (*ends, *spreads)
        return merged((known[2], current.gaps)), merged((known[3], current.ttfts))

    def series(self, now: float, seconds: float) -> list[Point]:
        """Return the points of the last `seconds`, at most an hour, the oldest first."""
        slices = self._slices(seconds)
        length_s = (FINE if seconds <= MINUTE_S else COARSE)[0]
        after = [*(one.before for one in slices[1:]), totals_snapshot(self.totals)]
        # Not strict: without slices, `after` still has one snapshot.
        return [
            _point(one, snapshot.since(one.before), now, length_s)
            for one, snapshot in zip(slices, after, strict=False)
            if now - one.last_s <= seconds
        ]


def _point(one: Slice, work: TotalsSnapshot, now: float, length_s: float) -> Point:
    """Return the point of a slice. `work`: the growth of the totals in it. `length_s`: the maximum
    length of the slice."""
    over_s = max(FINE[0], min(length_s, now - one.began_s))
    ended = work.ended_stop + work.ended_length + work.ended_abort + work.ended_error
    errors = work.ended_error + work.answered_429 + work.answered_4xx + work.answered_5xx
    requests = ended / over_s, errors / over_s
    quantiles = one.quantiles or one.find_quantiles()
    if one.from_s is None:  # requests ended or were refused, and no step ran
        nothing = (None,) * 5
        return Point(now - one.began_s, now - one.last_s, *nothing, *requests, *quantiles)
    took_s = max(one.last_s - one.from_s, 1e-3)
    load = one.load
    kv_share = load.kv_used / load.kv_reserved if load.kv_reserved else 0.0
    rates = work.prefill_tokens / took_s, work.generated_tokens / took_s
    ends_s = now - one.from_s, now - one.last_s
    return Point(*ends_s, *rates, load.running, load.waiting, kv_share, *requests, *quantiles)
