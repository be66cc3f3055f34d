"""`Account`: where the time of the requests went that a doctor has seen, by part, before the first
token and after it. One account is made from a server's records, or from its counters, or from what
a client saw: the better the evidence, the more parts are told apart.
"""

from __future__ import annotations

import statistics
from bisect import bisect_left
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import pairwise

from twostroke.measure.doctor.doctor import Seen, is_probe
from twostroke.measure.explain.why import Explainer, Record
from twostroke.measure.load.scrape import change

MOST_REQUESTS = 150  # that are looked at one by one
FULL_KV = 0.85  # share taken, from which on admission is bound by it

TOKENISING = "template and tokenizer"
QUEUE = "queue"
BEHIND_PROMPTS, NO_SEAT = "queue, behind prompts", "queue, no free seat"
UNDER_WAY = "queue, a step under way"
NO_KV_ROOM, NO_STEP = "queue, no room in the KV cache", "queue, engine not running"
OWN_PREFILL, OTHERS_PROMPTS = "prefill of its own prompt", "prompts of others, during prefill"
OTHERS_STREAMS, PREFILL_HOST = "streams of others, during prefill", "host, during prefill"
DECODE, OTHERS_PREFILL = "decode", "prefill of others, between its tokens"
PREEMPTION, HOST = "preemption", "host, between its tokens"
BEFORE_PREFILL = "before prefill, queue and network"
START_PARTS = (
    TOKENISING,
    QUEUE,
    BEHIND_PROMPTS,
    NO_SEAT,
    NO_KV_ROOM,
    NO_STEP,
    UNDER_WAY,
    OWN_PREFILL,
    OTHERS_PROMPTS,
    OTHERS_STREAMS,
    PREFILL_HOST,
    BEFORE_PREFILL,
)
_RENAMED = {"tokenising": TOKENISING}


@dataclass(slots=True)
class Account:
    """`parts`: one dict a request, seconds by part; a single one where only sums are known."""

    level: str
    requests: int = 0
    parts: list[dict[str, float]] = field(default_factory=list)
    each: bool = True  # False: `parts` has one entry, the sums of all requests
    ttft_s: float = 0.0  # mean
    gap_s: float = 0.0  # median between two tokens
    worst_gap_s: float = 0.0
    gaps: int = 0  # between tokens, that were looked at
    stalled_share: float = 0.0  # of the time between tokens: in gaps that prefill made long
    kv_waited_share: float = (
        0.0  # of all the time: waited for KV blocks, by requests under way, too
    )
    preempted: int = 0  # requests
    repeated_share: float = 0.0  # of the prompt tokens computed: were in an earlier prompt, too
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
        """Shares of all the time, the largest first; they sum to 1."""
        total = self.total_s
        if total <= 0:
            return {}
        names = dict.fromkeys(name for part in self.parts for name in part)
        found = {name: self.seconds(name) / total for name in names}
        return dict(sorted(found.items(), key=lambda item: -item[1]))

    def median_start_ratio(self, *removed: str, factor: float = 1.0) -> float:
        """The median time to the first token without these parts, divided by that with them."""
        starts = [sum(part.get(name, 0.0) for name in START_PARTS) for part in self.parts]
        saved = [factor * sum(part.get(name, 0.0) for name in removed) for part in self.parts]
        before = statistics.median(starts)
        after = statistics.median(a - b for a, b in zip(starts, saved, strict=True))
        return after / before if before > 0 else 1.0


# ── from records ────────────────────────────────────────────────────────────────────────────────


def account_of_records(seen: Seen) -> Account:
    steps = seen.steps or []
    ended = [one for one in seen.requests if one["first_token_s"] and one["token_s"]]
    # Probes that wait for others' long prompts say nothing of how the others fare.
    requests = [one for one in ended if not is_probe(one)] if seen.traffic else ended
    found = Account("step records", len(requests))
    queue = QueueReasons(steps, seen.seats)
    watched = [step for step in steps if step["committed_s"] >= seen.since_s]
    _look_at_gaps(found, watched)
    found.preempted = sum(step["preempted"] for step in watched)
    found.kv_waited_share = queue.kv_waited_share(watched)
    if not requests:
        return found
    chosen = _evenly(requests, MOST_REQUESTS)
    explainer = Explainer({"requests": seen.requests, "steps": steps})
    for request in chosen:
        parts: defaultdict[str, float] = defaultdict(float)
        for entry in explainer.explain(request).entries:
            if entry.part == "waiting in the queue":
                begun = request["tokenised_s"] or request["received_s"]
                parts |= queue.split(begun, request["scheduled_s"], entry.seconds)
            else:
                parts[_RENAMED.get(entry.part, entry.part)] += entry.seconds
        found.parts.append(dict(parts))
    found.ttft_s = statistics.fmean(one["first_token_s"] - one["received_s"] for one in chosen)
    found.output_tokens = statistics.fmean(len(one["token_s"]) for one in chosen)
    found.prompt_tokens = statistics.fmean(one["num_prompt"] for one in chosen)
    found.repeated_share = _repeated_share(requests, seen.known_marks)
    return found


def _evenly(requests: Sequence[Record], most: int) -> list[Record]:
    if len(requests) <= most:
        return list(requests)
    return [requests[n * len(requests) // most] for n in range(most)]


def _look_at_gaps(found: Account, steps: Sequence[Record]) -> None:
    """Median, worst, and how much of the streams' time passed in gaps that others' prompts made
    at least 10 times as long as their own work and longer than anybody overlooks."""
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
    found.gaps = sum(count for _, count in gaps)
    half, so_far = found.gaps / 2, 0
    for gap, count in gaps:
        so_far += count
        if so_far >= half:
            found.gap_s = gap
            break
    found.worst_gap_s = gaps[-1][0]
    found.stalled_share = stalled / total if total else 0.0


def is_stall(gap_s: float, usual_s: float) -> bool:
    return gap_s >= 0.25 and gap_s >= 10 * usual_s


def _repeated_share(requests: Sequence[Record], earlier: set[str]) -> float:
    """Of the prompt tokens that were computed, those that stood at the beginning of an earlier
    prompt, too: at least, since only the first 64, 128, 256, … tokens are compared."""
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
    """What those who wait in the queue wait for, step by step."""

    def __init__(self, steps: Sequence[Record], seats: int | None) -> None:
        self._steps, self._seats = steps, seats
        self._ends = [step["committed_s"] for step in steps]

    def split(self, start: float, end: float, seconds: float) -> dict[str, float]:
        """`seconds`, by what the steps between start and end had no room for."""
        found: defaultdict[str, float] = defaultdict(float)
        begun = start
        for step in self._steps[bisect_left(self._ends, start) :]:
            if begun >= end:
                break
            until = min(step["committed_s"], end)
            launched = min(max(step["planned_s"], begun), until)
            found[NO_STEP] += launched - begun
            found[self._reason(step)] += until - launched
            begun = until
        found[NO_STEP] += max(0.0, end - begun)
        total = sum(found.values())
        if total <= 0:
            return {QUEUE: seconds}
        return {name: seconds * part / total for name, part in found.items() if part > 0}

    def kv_waited_share(self, steps: Sequence[Record]) -> float:
        """Of the time of all requests that were there: those that waited for KV blocks. Requests
        that have been sent back and have not ended are in no other figure."""
        waited = total = 0.0
        for before, step in pairwise(steps):
            took = step["committed_s"] - before["committed_s"]
            total += took * (step["running"] + step["waiting"])
            if step["waiting"] and self._reason(step) == NO_KV_ROOM:
                waited += took * step["waiting"]
        return waited / total if total else 0.0

    def _reason(self, step: Record) -> str:
        kv = step["kv"]
        taken = 1 - (kv["free"] + kv["cached"]) / kv["reserved"] if kv["reserved"] else 0.0
        if taken >= FULL_KV:
            return NO_KV_ROOM
        if self._seats is not None and step["running"] >= self._seats:
            return NO_SEAT
        if step["prefill"]["tokens"]:
            return BEHIND_PROMPTS
        if not step["waiting"]:
            return UNDER_WAY  # nobody waited when it was planned
        return NO_KV_ROOM if taken > 0.5 else BEHIND_PROMPTS


# ── from counters, and from the client ──────────────────────────────────────────────────────────


def account_of_metrics(seen: Seen) -> Account | None:
    """None: the server does not count the time in its queue."""
    grown = {
        name: change(seen.before, seen.after, name)
        for name in ("queue_s", "prefill_s", "decode_s", "requests", "output_tokens")
    }
    queue_s, prefill_s, decode_s = grown["queue_s"], grown["prefill_s"], grown["decode_s"]
    count = int(grown["requests"] or 0)
    if queue_s is None or prefill_s is None or decode_s is None or not count:
        return None
    parts = {QUEUE: queue_s, OWN_PREFILL: prefill_s, DECODE: decode_s}
    found = Account("/metrics", count, [parts], each=False)
    found.ttft_s = (prefill_s + queue_s) / count
    found.output_tokens = (grown["output_tokens"] or 0.0) / count
    _gaps_of_histogram(found, seen)
    return found


def account_of_probes(seen: Seen) -> Account:
    """What the doctor's own requests took, where the server does not tell what others' did. With
    gauges and counters beside them there is more to say about it."""
    good = [one for one in seen.probes if one.ok]
    counted = change(seen.before, seen.after, "output_tokens") is not None
    found = Account("/metrics" if counted else "client only", len(good) + len(seen.stuck_s))
    for sample in good:
        prefill_s = 0.0
        if sample.timings and "prompt_ms" in sample.timings:
            prefill_s = min(sample.timings["prompt_ms"] / 1e3, sample.ttft_s)
        waited_s, stream_s = sample.ttft_s - prefill_s, sample.e2el_s - sample.ttft_s
        found.parts.append({OWN_PREFILL: prefill_s, BEFORE_PREFILL: waited_s, DECODE: stream_s})
    found.parts += [{BEFORE_PREFILL: waited_s} for waited_s in seen.stuck_s]
    if found.parts:
        found.ttft_s = found.start_s / len(found.parts)
    if good:
        found.output_tokens = statistics.fmean(one.output_tokens for one in good)
    _gaps_of_probes(found, seen)
    return found


def _gaps_of_histogram(found: Account, seen: Seen) -> None:
    names = ("vllm:inter_token_latency_seconds", "vllm:time_per_output_token_seconds")
    name = next((one for one in names if seen.after and one in seen.after.buckets), None)
    if name is None or seen.before is None or seen.after is None:
        return
    earlier = seen.before.buckets.get(name, {})
    below = sorted((le, n - earlier.get(le, 0.0)) for le, n in seen.after.buckets[name].items())
    count = below[-1][1]
    if count <= 0:
        return
    found.gaps = int(count)
    found.gap_s = next(le for le, n in below if n >= count / 2)
    lower, before, stalled, total = 0.0, 0.0, 0.0, 0.0
    for le, n in below:
        gap, here = (lower if le == float("inf") else (lower + le) / 2), n - before
        total += gap * here
        if here and is_stall(lower, found.gap_s):
            stalled += gap * here
            found.worst_gap_s = gap
        lower, before = min(le, 1e9), n
    found.stalled_share = stalled / total if total else 0.0


def _gaps_of_probes(found: Account, seen: Seen) -> None:
    gaps = [gap for one in seen.probes if one.ok for gap in one.itls_s]
    if not gaps:
        return
    found.gaps = len(gaps)
    found.gap_s = statistics.median(gaps)
    found.worst_gap_s = max(gaps)
    found.stalled_share = sum(g for g in gaps if is_stall(g, found.gap_s)) / (sum(gaps) or 1.0)


# ── between client and server ───────────────────────────────────────────────────────────────────


@dataclass(frozen=True, slots=True)
class Outside:
    """What the probes' client saw beyond what the server did, medians in seconds."""

    start_s: float
    ttft_s: float
    stream_s: float
    span_s: float  # first to last token, at the client
    count: int


def outside_of(seen: Seen) -> Outside | None:
    """None: no probe is known to the server."""
    records = [one for one in seen.requests if is_probe(one) and one["token_s"]]
    starts, ttfts, streams, spans = [], [], [], []
    for sample, name in zip(seen.probes, seen.probe_names, strict=True):
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
    return Outside(start_s, ttft_s, stream_s, span_s, len(starts))
