"""`Totals`: the sums of all records since the start, without torch and without Prometheus.

    Records ──▶ add_step, add_request ──▶ counters, histograms ──▶ serve/monitor/metrics.py

A server has its totals in its own process, so they are kept when the engine's process ends. A
program with an `LLM` can add totals, too:

    totals = Totals(max_model_len)
    llm.engine.core.records.listeners.append(totals)
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Sequence

from twostroke.observe.record import Causes, DraftRecord, RequestRecord, StepRecord

PHASES = ("prefill", "decode")
MIXES = ("prefill", "decode", "mixed")
CAUSES = Causes._fields
REASONS = ("stop", "length", "abort", "error")
REFUSED = ("429", "4xx", "5xx")  # HTTP status; 4xx without 429
FINISHED = ("stop", "length")  # reasons of complete answers: only their latencies count

GAP_BUCKETS = (
    0.0005, 0.001, 0.002, 0.003, 0.005, 0.0075, 0.01, 0.015, 0.02, 0.025, 0.03, 0.04, 0.05, 0.075,
    0.1, 0.15, 0.2, 0.3, 0.4, 0.5, 0.75, 1.0, 2.5, 5.0, 7.5, 10.0, 20.0, 40.0, 80.0,
)  # fmt: skip
FIRST_BUCKETS = (
    0.001, 0.0025, 0.005, 0.01, 0.02, 0.04, 0.06, 0.08, 0.1, 0.15, 0.25, 0.5, 0.75, 1.0, 1.5, 2.5,
    5.0, 7.5, 10.0, 20.0, 40.0, 80.0, 160.0, 640.0, 2560.0,
)  # fmt: skip
REQUEST_BUCKETS = (
    0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.2, 0.3, 0.5, 0.8, 1.0, 1.5, 2.0, 2.5, 5.0,
    10.0, 15.0, 20.0, 30.0, 40.0, 50.0, 60.0, 120.0, 240.0, 480.0, 960.0, 1920.0, 7680.0,
)  # fmt: skip
STEP_TOKEN_BUCKETS = (1, 8, 16, 32, 64, 128, 256, 512, 1024, 2048, 4096, 8192, 16384)
N_BUCKETS = (1, 2, 5, 10, 20)
PREEMPTION_BUCKETS = (0, 1, 2, 5, 10, 20)


class BucketCounts:
    """A histogram."""

    __slots__ = ("bounds", "counts", "sum")

    def __init__(self, bounds: Sequence[float]) -> None:
        self.bounds = bounds
        self.counts = [0] * (len(bounds) + 1)  # the last: above all bounds
        self.sum = 0.0

    @property
    def count(self) -> int:
        return sum(self.counts)

    def add(self, value: float, times: int = 1) -> None:
        self.counts[bisect_left(self.bounds, value)] += times
        self.sum += value * times


def token_buckets(max_tokens: int) -> tuple[int, ...]:
    """Return 1, 2, 5, 10, 20, 50, … up to `max_tokens`."""
    buckets, unit = [], 1
    while unit <= max_tokens:
        buckets += [unit * m for m in (1, 2, 5) if unit * m <= max_tokens]
        unit *= 10
    return tuple(buckets)


class PhaseTotals:
    """The work of one phase. In mixed steps its device time is attributed (`record.Causes`)."""

    __slots__ = ("comm_bytes", "comm_s", "device_s", "flops", "num_bytes", "tokens")

    def __init__(self) -> None:
        self.tokens = 0
        self.flops = self.num_bytes = self.device_s = 0.0
        self.comm_s = self.comm_bytes = 0.0  # in mixed steps divided in proportion to tokens


class TransferTotals:
    """KV blocks that an engine has fetched from other engines."""

    __slots__ = ("failed", "fetched", "num_bytes", "seconds")

    def __init__(self) -> None:
        self.fetched = self.failed = self.num_bytes = 0  # requests, requests, bytes
        self.seconds = 0.0

    def add(self, num_bytes: int, seconds: float, failed: bool) -> None:
        self.num_bytes += num_bytes
        self.seconds += seconds
        self.failed += failed
        self.fetched += not failed


class DraftTotals:
    """The totals of speculative decoding."""

    __slots__ = (
        "accepted",
        "accepted_per_pos",
        "drafts",
        "expected",
        "model_s",
        "offers",
        "steps",
        "tokens",
    )

    def __init__(self) -> None:
        self.steps = self.offers = 0  # steps and rows for which a drafter offered drafts
        self.drafts = self.tokens = self.accepted = 0
        self.accepted_per_pos: list[int] = []
        self.expected = 0.0  # accepted tokens, as expected before each step
        self.model_s = 0.0  # time that a draft model ran

    def add(self, record: DraftRecord) -> None:
        self.steps += 1
        self.offers += record.offers
        self.drafts += record.rows
        self.tokens += record.tokens
        self.expected += record.expected
        self.model_s += record.model_s
        self.accepted += sum(record.accepted)
        self.accepted_per_pos += [0] * (len(record.accepted) - len(self.accepted_per_pos))
        for position, count in enumerate(record.accepted):
            self.accepted_per_pos[position] += count


class Totals:
    """The sums. One thread adds records; other threads may read at any time."""

    def __init__(self, max_model_len: int) -> None:
        tokens = token_buckets(max_model_len)
        # Steps
        self.prefill, self.decode = PhaseTotals(), PhaseTotals()
        self.step_s = {mix: BucketCounts(GAP_BUCKETS) for mix in MIXES}
        self.iteration_tokens = BucketCounts(STEP_TOKEN_BUCKETS)
        self.gap_s = BucketCounts(GAP_BUCKETS)
        self.cause_s = dict.fromkeys(CAUSES, 0.0)
        self.part_s = {cause: BucketCounts(GAP_BUCKETS) for cause in CAUSES}
        self.ttft_s = BucketCounts(FIRST_BUCKETS)
        self.preemptions = self.recomputed_tokens = 0
        self.kv_evicted_tokens = 0
        self.prompt_tokens = self.cached_tokens = self.generation_tokens = 0
        self.fetched_tokens = 0  # part of the cached tokens, from tiers below the KV cache
        self.predicted_s = self.predicted_actual_s = self.prediction_error_s = 0.0
        self.drafts = DraftTotals()
        # Requests
        self.ended = dict.fromkeys(REASONS, 0)
        self.refused = dict.fromkeys(REFUSED, 0)
        self.e2e_s, self.queue_s, self.inference_s, self.prefill_s, self.decode_s = (
            BucketCounts(REQUEST_BUCKETS) for _ in range(5)
        )
        self.tpot_s = BucketCounts(GAP_BUCKETS)
        self.request_preemptions = BucketCounts(PREEMPTION_BUCKETS)
        self.request_prompt, self.request_computed, self.request_generated = (
            BucketCounts(tokens) for _ in range(3)
        )
        self.max_generated, self.max_tokens = BucketCounts(tokens), BucketCounts(tokens)
        self.n = BucketCounts(N_BUCKETS)
        # By family: the completions that have ended, and the tokens of the longest of them.
        self._families: dict[str, tuple[int, int]] = {}

    # ── steps ───────────────────────────────────────────────────────────────────────────────

    def add_step(self, record: StepRecord) -> None:
        prefill, decode, since = record.prefill, record.decode, record.since_s
        device_s, own_s = record.device_s, 0.0
        if decode.rows:
            own_s = _decode_s(since) if prefill.rows else device_s
            total = self.decode
            total.tokens += decode.tokens
            total.flops += decode.flops
            total.num_bytes += decode.num_bytes
            total.device_s += own_s
        if prefill.rows:
            total = self.prefill
            total.tokens += prefill.tokens
            total.flops += prefill.flops
            total.num_bytes += prefill.num_bytes
            total.device_s += device_s - own_s
        self.step_s[mix_of(record)].add(device_s)
        iteration_tokens = num_written = record.num_written
        for first in record.first:
            self.ttft_s.add(first.ttft_s)
            self.prompt_tokens += first.num_prompt
            self.cached_tokens += first.num_cached
            self.fetched_tokens += first.num_fetched
            iteration_tokens += first.num_prompt - first.num_cached
        if iteration_tokens:
            self.iteration_tokens.add(iteration_tokens)
        self.preemptions += record.preempted
        self.recomputed_tokens += record.recomputed
        if record.comm_s:
            tokens = prefill.tokens + decode.tokens
            for total, phase in ((self.prefill, prefill), (self.decode, decode)):
                total.comm_s += record.comm_s * phase.tokens / tokens
                total.comm_bytes += record.comm_bytes * phase.tokens / tokens
        self.kv_evicted_tokens += record.kv_evicted_tokens
        self.generation_tokens += num_written
        if record.regular:
            self._add_gap(since, record.regular)
        for gap in record.late:
            self._add_gap(gap, 1)
        if record.drafts is not None:
            self.drafts.add(record.drafts)
        if record.predicted_s is not None:
            self.predicted_s += record.predicted_s
            self.predicted_actual_s += device_s
            self.prediction_error_s += abs(record.predicted_s - device_s)

    def _add_gap(self, gap: Causes, streams: int) -> None:
        self.gap_s.add(gap.total_s, streams)
        for cause, seconds in zip(CAUSES, gap, strict=True):
            if seconds > 0.0:
                self.cause_s[cause] += seconds * streams
                self.part_s[cause].add(seconds, streams)

    # ── requests ────────────────────────────────────────────────────────────────────────────

    def add_request(self, record: RequestRecord) -> None:
        reason = str(record.finish_reason)
        self.ended[reason] += 1
        written = len(record.token_s)
        self._add_family(record, written)
        if record.max_tokens:
            self.max_tokens.add(record.max_tokens)
        if reason not in FINISHED or not written:
            return
        self.e2e_s.add(record.finished_s - record.received_s)
        self.queue_s.add(record.queue_s)
        self.prefill_s.add(record.prefill_s)
        self.decode_s.add(record.decode_s)
        self.inference_s.add(record.prefill_s + record.decode_s)
        if written > 1:
            self.tpot_s.add(record.tpot_s)
        self.request_prompt.add(record.num_prompt)
        self.request_computed.add(record.num_prompt - record.num_cached)
        self.request_generated.add(written)
        self.request_preemptions.add(len(record.preempted))

    def add_answer(self, status: int) -> None:
        """Count an HTTP answer if it is a refusal or a failure."""
        if status >= 400:
            self.refused["429" if status == 429 else f"{status // 100}xx"] += 1

    def _add_family(self, record: RequestRecord, written: int) -> None:
        """Count a request once, when the last of its completions has ended."""
        ended, longest = self._families.pop(record.family, (0, 0)) if record.n > 1 else (0, 0)
        ended, longest = ended + 1, max(longest, written)
        if ended < record.n:
            self._families[record.family] = ended, longest
        else:
            self.n.add(record.n)
            self.max_generated.add(longest)


def _decode_s(since: Causes) -> float:
    """Return the time of decode in a mixed step, with its share of the communication."""
    if not since.communication:
        return since.decode
    rest = since.decode + since.prefill
    return since.decode * (rest + since.communication) / rest if rest else 0.0


def mix_of(record: StepRecord) -> str:
    if not record.decode.rows:
        return "prefill"
    return "mixed" if record.prefill.rows else "decode"
