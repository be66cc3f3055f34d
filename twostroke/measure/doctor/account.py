"""`TimeAccount`: the time of the observed requests by part, before and after the first token.

The account is made from a server's step records if there are any, otherwise from its counters, or
from the probes. Better evidence separates more parts.
"""

from __future__ import annotations

import statistics
from bisect import bisect_left
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass, field
from enum import StrEnum
from itertools import pairwise

from twostroke.measure.doctor.watch import Observations, is_probe
from twostroke.measure.explain.why import Explainer, Record
from twostroke.measure.load.scrape import change

MAX_REQUESTS = 150  # number of requests that are explained one by one
FULL_KV = 0.85  # above this usage the KV cache limits admission


class Part(StrEnum):
    """Parts of a request's time. The verdict's ledger has their values as keys."""

    TOKENISING = "template and tokenizer"
    QUEUE = "queue"
    BEHIND_PROMPTS = "queue, behind prompts"
    FULL_BATCH = "queue, full batch"
    UNDER_WAY = "queue, a step under way"
    NO_KV_ROOM = "queue, no room in the KV cache"
    NO_STEP = "queue, engine not running"
    OWN_PREFILL = "prefill of its own prompt"
    OTHERS_PROMPTS = "prompts of others, during prefill"
    OTHERS_STREAMS = "streams of others, during prefill"
    PREFILL_HOST = "host, during prefill"
    DECODE = "decode"
    OTHERS_PREFILL = "prefill of others, between its tokens"
    PREEMPTION = "preemption"
    HOST = "host, between its tokens"
    BEFORE_PREFILL = "before prefill, queue and network"


START_PARTS = (
    Part.TOKENISING,
    Part.QUEUE,
    Part.BEHIND_PROMPTS,
    Part.FULL_BATCH,
    Part.NO_KV_ROOM,
    Part.NO_STEP,
    Part.UNDER_WAY,
    Part.OWN_PREFILL,
    Part.OTHERS_PROMPTS,
    Part.OTHERS_STREAMS,
    Part.PREFILL_HOST,
    Part.BEFORE_PREFILL,
)
_RENAMED = {"tokenising": Part.TOKENISING}


@dataclass(slots=True)
class TimeAccount:
    """Seconds of the requests by part, with statistics of TTFT and gaps.

    `parts` has one dict for each request, or a single dict with sums if `one_per_request` is False.
    """

    level: str
    requests: int = 0
    parts: list[dict[str, float]] = field(default_factory=list)
    one_per_request: bool = True
    ttft_s: float = 0.0  # mean
    gap_s: float = 0.0  # median between two tokens
    worst_gap_s: float = 0.0
    gaps: int = 0  # number of gaps between tokens
    stalled_share: float = 0.0  # share of the time between tokens in gaps that prefill made long
    # Share of the total time in waits for KV blocks, with those of unfinished requests.
    kv_waited_share: float = 0.0
    preempted: int = 0  # preempted requests
    repeated_share: float = 0.0  # computed prompt tokens that were in an earlier prompt
    output_tokens: float = 0.0  # mean
    prompt_tokens: float = 0.0

    def seconds(self, *names: str) -> float:
        return sum(part.get(name, 0.0) for part in self.parts for name in names)

    @property
    def start_s(self) -> float:
        return self.seconds(*START_PARTS)

    @property
    def total_s(self) -> float:
        return sum(map(sum, (part.values() for part in self.parts)))

    @property
    def stream_s(self) -> float:
        return max(0.0, self.total_s - self.start_s)

    def start_share(self, *names: str) -> float:
        return self.seconds(*names) / self.start_s if self.start_s > 0 else 0.0

    def stream_share(self, *names: str) -> float:
        return self.seconds(*names) / self.stream_s if self.stream_s > 0 else 0.0

    def ledger(self) -> dict[str, float]:
        """Return the share of each part in the total time, the largest first. The sum is 1."""
        total = self.total_s
        if total <= 0:
            return {}
        names = dict.fromkeys(name for part in self.parts for name in part)
        found = {name: self.seconds(name) / total for name in names}
        return dict(sorted(found.items(), key=lambda item: -item[1]))

    def median_start_ratio(self, *removed: str, factor: float = 1.0) -> float:
        """Return the median TTFT without the parts `removed`, divided by the median TTFT."""
        starts = [sum(part.get(name, 0.0) for name in START_PARTS) for part in self.parts]
        saved = [factor * sum(part.get(name, 0.0) for name in removed) for part in self.parts]
        before = statistics.median(starts)
        after = statistics.median(a - b for a, b in zip(starts, saved, strict=True))
        return after / before if before > 0 else 1.0


# ── from records ────────────────────────────────────────────────────────────────────────────────


def account_of_records(observed: Observations) -> TimeAccount:
    steps = observed.steps or []
    ended = [one for one in observed.requests if one["first_token_s"] and one["token_s"]]
    # With traffic, the waits of probes do not represent the requests of other clients.
    requests = [one for one in ended if not is_probe(one)] if observed.has_traffic else ended
    account = TimeAccount("step records", len(requests))
    queue = QueueReasons(steps, observed.max_num_seqs)
    watched = [step for step in steps if step["committed_s"] >= observed.since_s]
    _set_gaps(account, watched)
    account.preempted = sum(step["preempted"] for step in watched)
    account.kv_waited_share = queue.kv_waited_share(watched)
    if not requests:
        return account
    chosen = _evenly(requests, MAX_REQUESTS)
    explainer = Explainer({"requests": observed.requests, "steps": steps})
    for request in chosen:
        parts: defaultdict[str, float] = defaultdict(float)
        for entry in explainer.explain(request).entries:
            if entry.part == "waiting in the queue":
                begun = request["tokenised_s"] or request["received_s"]
                parts |= queue.split(begun, request["scheduled_s"], entry.seconds)
            else:
                parts[_RENAMED.get(entry.part, entry.part)] += entry.seconds
        account.parts.append(dict(parts))
    account.ttft_s = statistics.fmean(one["first_token_s"] - one["received_s"] for one in chosen)
    account.output_tokens = statistics.fmean(len(one["token_s"]) for one in chosen)
    account.prompt_tokens = statistics.fmean(one["num_prompt"] for one in chosen)
    account.repeated_share = _repeated_share(requests, observed.known_marks)
    return account


def _evenly(requests: Sequence[Record], count: int) -> list[Record]:
    if len(requests) <= count:
        return list(requests)
    return [requests[n * len(requests) // count] for n in range(count)]


def _set_gaps(account: TimeAccount, steps: Sequence[Record]) -> None:
    """Set the median gap, the worst gap, and the share of the time in stalls. A stall is a gap
    that the prompts of other requests made long (see `is_stall`)."""
    gaps, total, stalled = [], 0.0, 0.0
    for step in steps:
        if not step["regular"]:
            continue
        causes = step["since_s"]
        gap = sum(causes.values())
        gaps.append((gap, step["regular"]))
        total += gap * step["regular"]
        if is_stall(gap, causes["decode"]) and causes["prefill"] > 0.5 * gap:
            stalled += gap * step["regular"]
    if not gaps:
        return
    gaps.sort()
    account.gaps = sum(count for _, count in gaps)
    half, so_far = account.gaps / 2, 0
    for gap, count in gaps:
        so_far += count
        if so_far >= half:
            account.gap_s = gap
            break
    account.worst_gap_s = gaps[-1][0]
    account.stalled_share = stalled / total if total else 0.0


def is_stall(gap_s: float, usual_s: float) -> bool:
    """Return True for a gap of at least 250 ms that is 10 times as long as usual."""
    return gap_s >= 0.25 and gap_s >= 10 * usual_s


def _repeated_share(requests: Sequence[Record], earlier: set[str]) -> float:
    """Return the share of computed prompt tokens that an earlier prompt began with. This is a lower
    bound: prefix marks compare only the first 64, 128, 256, … tokens."""
    known = set(earlier)
    repeated = computed = 0
    for request in sorted(requests, key=lambda one: one["received_s"]):
        length, shared = 64, 0
        for mark in request.get("prefix_marks") or ():
            if mark in known:
                shared = length
            known.add(mark)
            length *= 2
        cached = request["num_cached"]
        computed += request["num_prompt"] - cached
        repeated += max(0, shared - cached)
    return repeated / computed if computed else 0.0


class QueueReasons:
    """The reasons why requests wait in the queue, step by step."""

    def __init__(self, steps: Sequence[Record], max_num_seqs: int | None) -> None:
        self._steps, self._max_num_seqs = steps, max_num_seqs
        self._ends = [step["committed_s"] for step in steps]

    def split(self, start: float, end: float, seconds: float) -> dict[str, float]:
        """Split `seconds`, a wait from `start` to `end`, by the reasons why each step in that time
        did not run the request."""
        found: defaultdict[str, float] = defaultdict(float)
        begun = start
        for step in self._steps[bisect_left(self._ends, start) :]:
            if begun >= end:
                break
            until = min(step["committed_s"], end)
            launched = min(max(step["planned_s"], begun), until)
            found[Part.NO_STEP] += launched - begun
            found[self._reason(step)] += until - launched
            begun = until
        found[Part.NO_STEP] += max(0.0, end - begun)
        total = sum(found.values())
        if total <= 0:
            return {Part.QUEUE: seconds}
        return {name: seconds * part / total for name, part in found.items() if part > 0}

    def kv_waited_share(self, steps: Sequence[Record]) -> float:
        """Return the share of the requests' time that passed in waits for KV blocks. Only this
        figure includes preempted requests that have not ended."""
        waited = total = 0.0
        for before, step in pairwise(steps):
            took = step["committed_s"] - before["committed_s"]
            total += took * (step["running"] + step["waiting"])
            if step["waiting"] and self._reason(step) == Part.NO_KV_ROOM:
                waited += took * step["waiting"]
        return waited / total if total else 0.0

    def _reason(self, step: Record) -> str:
        kv = step["kv"]
        taken = 1 - (kv["free"] + kv["cached"]) / kv["reserved"] if kv["reserved"] else 0.0
        if taken >= FULL_KV:
            return Part.NO_KV_ROOM
        if self._max_num_seqs is not None and step["running"] >= self._max_num_seqs:
            return Part.FULL_BATCH
        if step["prefill"]["tokens"]:
            return Part.BEHIND_PROMPTS
        if not step["waiting"]:
            return Part.UNDER_WAY  # no request waited when the step was planned
        return Part.NO_KV_ROOM if taken > 0.5 else Part.BEHIND_PROMPTS


# ── from counters, and from the client ──────────────────────────────────────────────────────────


def account_of_metrics(observed: Observations) -> TimeAccount | None:
    """Return the account of a server's counters; None if it does not count its queue time."""
    grown = {
        name: change(observed.before, observed.after, name)
        for name in ("queue_s", "prefill_s", "decode_s", "requests", "output_tokens")
    }
    queue_s, prefill_s, decode_s = grown["queue_s"], grown["prefill_s"], grown["decode_s"]
    count = int(grown["requests"] or 0)
    if queue_s is None or prefill_s is None or decode_s is None or not count:
        return None
    parts: dict[str, float] = {
        Part.QUEUE: queue_s,
        Part.OWN_PREFILL: prefill_s,
        Part.DECODE: decode_s,
    }
    account = TimeAccount("/metrics", count, [parts], one_per_request=False)
    account.ttft_s = (prefill_s + queue_s) / count
    account.output_tokens = (grown["output_tokens"] or 0.0) / count
    _gaps_of_histogram(account, observed)
    return account


def account_of_probes(observed: Observations) -> TimeAccount:
    """Return the account of the probes, for servers that do not report the times of requests."""
    good = [one for one in observed.probes if one.ok]
    counted = change(observed.before, observed.after, "output_tokens") is not None
    account = TimeAccount(
        "/metrics" if counted else "client only", len(good) + len(observed.unanswered_s)
    )
    for sample in good:
        prefill_s = 0.0
        if sample.timings and "prompt_ms" in sample.timings:
            prefill_s = min(sample.timings["prompt_ms"] / 1e3, sample.ttft_s)
        waited_s, stream_s = sample.ttft_s - prefill_s, sample.e2el_s - sample.ttft_s
        account.parts.append(
            {Part.OWN_PREFILL: prefill_s, Part.BEFORE_PREFILL: waited_s, Part.DECODE: stream_s}
        )
    account.parts += [{Part.BEFORE_PREFILL: waited_s} for waited_s in observed.unanswered_s]
    if account.parts:
        account.ttft_s = account.start_s / len(account.parts)
    if good:
        account.output_tokens = statistics.fmean(one.output_tokens for one in good)
    _gaps_of_probes(account, observed)
    return account


def _gaps_of_histogram(account: TimeAccount, observed: Observations) -> None:
    names = ("vllm:inter_token_latency_seconds", "vllm:time_per_output_token_seconds")
    name = next((one for one in names if observed.after and one in observed.after.buckets), None)
    if name is None or observed.before is None or observed.after is None:
        return
    earlier = observed.before.buckets.get(name, {})
    below = sorted((le, n - earlier.get(le, 0.0)) for le, n in observed.after.buckets[name].items())
    count = below[-1][1]
    if count <= 0:
        return
    account.gaps = int(count)
    account.gap_s = next(le for le, n in below if n >= count / 2)
    lower, before, stalled, total = 0.0, 0.0, 0.0, 0.0
    for le, n in below:
        gap, here = (lower if le == float("inf") else (lower + le) / 2), n - before
        total += gap * here
        if here and is_stall(lower, account.gap_s):
            stalled += gap * here
            account.worst_gap_s = gap
        lower, before = min(le, 1e9), n
    account.stalled_share = stalled / total if total else 0.0


def _gaps_of_probes(account: TimeAccount, observed: Observations) -> None:
    gaps = [gap for one in observed.probes if one.ok for gap in one.itls_s]
    if not gaps:
        return
    account.gaps = len(gaps)
    account.gap_s = statistics.median(gaps)
    account.worst_gap_s = max(gaps)
    account.stalled_share = sum(g for g in gaps if is_stall(g, account.gap_s)) / (sum(gaps) or 1.0)


# ── between client and server ───────────────────────────────────────────────────────────────────


@dataclass(frozen=True, slots=True)
class ClientExtra:
    """The time of probes outside the server: medians of `count` probes in seconds. `start_s` and
    `stream_s` are the extra times of `ttft_s` and `span_s`."""

    start_s: float
    ttft_s: float
    stream_s: float
    span_s: float  # from the first to the last token, at the client
    count: int


def client_extra_of(observed: Observations) -> ClientExtra | None:
    """Return the time of probes outside the server; None if the server has no records of them."""
    records = [one for one in observed.requests if is_probe(one) and one["token_s"]]
    starts, ttfts, streams, spans = [], [], [], []
    for sample, name in zip(observed.probes, observed.probe_names, strict=True):
        record = next((one for one in records if name in one["request_id"]), None)
        if record is None or not sample.ok:
            continue
        span = sample.content_s[-1] - sample.content_s[0]
        starts.append(sample.ttft_s - (record["first_token_s"] - record["received_s"]))
        ttfts.append(sample.ttft_s)
        streams.append(span - (record["token_s"][-1] - record["token_s"][0]))
        spans.append(span)
    if not starts:
        return None
    start_s, ttft_s, stream_s, span_s = map(statistics.median, (starts, ttfts, streams, spans))
    return ClientExtra(start_s, ttft_s, stream_s, span_s, len(starts))
