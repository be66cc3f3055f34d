"""`Families`: the totals of an engine as Prometheus metric families. A metric that vLLM also has
gets vLLM's name, type and labels (`vllm:…`). All other names begin with `twostroke:`."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence

from prometheus_client.core import (
    CounterMetricFamily,
    GaugeMetricFamily,
    HistogramMetricFamily,
    Metric,
)

from twostroke.engine.api import EngineInfo, EngineLoad, EngineStatus
from twostroke.kv.tiers.tiers import TierStatus
from twostroke.network_auth import REASONS
from twostroke.observe.totals import BucketCounts, DraftTotals, Totals, TransferTotals

Values = Mapping[str, float]

VLLM_HISTOGRAMS = {
    "iteration_tokens_total": (
        "iteration_tokens",
        "Output tokens of a step, and the computed tokens of prompts that end in it.",
    ),
    "time_to_first_token_seconds": ("ttft_s", "Received → first token."),
    "inter_token_latency_seconds": ("gap_s", "Each gap between two tokens of one stream."),
    "request_time_per_output_token_seconds": ("tpot_s", "Decode time / (tokens - 1)."),
    "e2e_request_latency_seconds": ("e2e_s", "Received → finished."),
    "request_queue_time_seconds": ("queue_s", "Received → first token scheduled."),
    "request_prefill_time_seconds": ("prefill_s", "First scheduled → first output token."),
    "request_decode_time_seconds": ("decode_s", "First output token → last."),
    "request_inference_time_seconds": ("inference_s", "Prefill time + decode time."),
    "request_prompt_tokens": ("request_prompt", "Prompt tokens of a request."),
    "request_prefill_kv_computed_tokens": ("request_computed", "Prompt tokens not cached."),
    "request_generation_tokens": ("request_generated", "Tokens written for a request."),
    "request_max_num_generation_tokens": ("max_generated", "Tokens of the longest completion."),
    "request_num_preemptions": ("request_preemptions", "Preemptions of a request."),
    "request_params_n": ("n", "The parameter n."),
    "request_params_max_tokens": ("max_tokens", "The parameter max_tokens, if it is given."),
}

# Counters of a tier: name → (field of `TierStatus`, help text).
TIER_COUNTERS = {
    "vllm:kv_offload_tiering_read_bytes": ("fetched_bytes", "KV bytes read from a tier."),
    "vllm:kv_offload_tiering_read_time": ("fetch_s", "Seconds that reads took."),
    "vllm:kv_offload_tiering_write_bytes": ("stored_bytes", "KV bytes written to a tier."),
    "vllm:kv_offload_tiering_write_time": ("store_s", "Seconds that writes took."),
    "twostroke:kv_tier_dropped_stores": (
        "dropped_stores",
        "Parts of prefixes that were not copied, because the queue was full.",
    ),
    "twostroke:kv_tier_failed_stores": (
        "failed_stores",
        "Copies that failed, or were cancelled because the KV cache needed the blocks.",
    ),
    "twostroke:kv_tier_fetches": ("fetches", "Fetches from a tier, including failed ones."),
    "twostroke:kv_tier_failed_fetches": (
        "failed_fetches",
        "Fetches that failed; their tokens were computed instead.",
    ),
}


class Families:
    """The metric families of one engine. Every series has the labels `model_name` and `engine`; a
    single engine is "0", as in vLLM. With several engines, series also have the label `phase` with
    the engine's pool, except series whose label `phase` is the phase of the work."""

    def __init__(self, model_name: str, engine: str = "0") -> None:
        self._names = ["model_name", "engine"]
        self._values = [model_name, engine]
        self._phase = ""

    def all(self, client: EngineStatus, totals: Totals) -> Iterator[Metric]:
        self._phase = client.phase
        load = client.load()
        yield from self._vllm_now(load, client.asleep)
        yield self._cache_config(client.info)
        yield from self._vllm_counters(totals)
        if totals.drafts.steps:
            yield from self._drafts(totals.drafts)
        for name, (field, text) in VLLM_HISTOGRAMS.items():
            yield self._histogram(f"vllm:{name}", text, {"": getattr(totals, field)})
        # The name before vLLM 0.11, which dashboards still use.
        old_name = "vllm:time_per_output_token_seconds"
        text = "Older name of vllm:inter_token_latency_seconds."
        yield self._histogram(old_name, text, {"": totals.gap_s})
        yield from self._own_now(client, load)
        if client.transfers is not None:
            yield from self._own_transfers(client.transfers)
        if load.tiers:
            yield from self._tiers(load.tiers, totals)
        yield from self._own_steps(totals)
        yield from self._own_gaps(totals)

    # ── metrics of vLLM ─────────────────────────────────────────────────────────────────────

    def _vllm_now(self, load: EngineLoad, asleep: bool) -> Iterator[Metric]:
        yield self._gauge("vllm:num_requests_running", "Running requests.", load.running)
        yield self._gauge("vllm:num_requests_waiting", "Waiting requests.", load.waiting)
        reasons = {"capacity": float(load.waiting), "deferred": 0.0}
        name, text = "vllm:num_requests_waiting_by_reason", "Waiting requests, by reason."
        yield self._gauges(name, text, reasons, "reason")
        text = "Share of the KV cache that running requests use, 0 to 1."
        yield self._gauge("vllm:kv_cache_usage_perc", text, load.kv.taken)
        states = {
            "awake": float(not asleep),
            "weights_offloaded": float(asleep),
            "discard_all": 0.0,
        }
        text = "1 for the current state; after /sleep the engine's process has ended."
        yield self._gauges("vllm:engine_sleep_state", text, states, "sleep_state")

    def _cache_config(self, info: EngineInfo) -> Metric:
        labels = {
            "block_size": str(info.block_size),
            "num_gpu_blocks": str(info.kv_tokens // info.block_size),
            "kv_cache_size_tokens": str(info.kv_tokens),
            "kv_cache_max_concurrency": f"{info.kv_tokens / info.max_model_len:.2f}",
            "engine": self._values[1],
        }
        text = "The KV cache's settings, as labels; always 1."
        family = GaugeMetricFamily("vllm:cache_config_info", text, labels=list(labels))
        family.add_metric(list(labels.values()), 1.0)
        return family

    def _vllm_counters(self, totals: Totals) -> Iterator[Metric]:
        prompt, cached = totals.prompt_tokens, totals.cached_tokens
        flops = totals.prefill.flops + totals.decode.flops
        for name, text, value in (
            ("num_preemptions", "Preemptions, for lack of KV blocks.", totals.preemptions),
            ("prompt_tokens", "Prompt tokens of requests with a first token.", prompt),
            ("generation_tokens", "Output tokens.", totals.generation_tokens),
            ("prefix_cache_queries", "Prompt tokens looked up in the prefix cache.", prompt),
            (
                "prefix_cache_hits",
                "Prompt tokens found in the prefix cache.",
                cached - totals.fetched_tokens,
            ),
            ("prompt_tokens_cached", "Prompt tokens that were not computed.", cached),
            ("estimated_flops_per_gpu", "FLOPs that all steps need at least.", flops),
        ):
            yield self._counters(f"vllm:{name}", text, {"": value})
        fetched = totals.fetched_tokens
        sources = {"local_compute": prompt - cached, "local_cache_hit": cached - fetched}
        sources["external_kv_transfer"] = fetched
        name, text = "vllm:prompt_tokens_by_source", "Prompt tokens, by source."
        yield self._counters(name, text, sources, "source")
        text = "Ended requests, by finish reason."
        yield self._counters("vllm:request_success", text, totals.ended, "finished_reason")

    def _drafts(self, drafts: DraftTotals) -> Iterator[Metric]:
        """Speculative decoding. These families exist after the first draft."""
        for name, text, value in (
            ("num_drafts", "Verified drafts: rows with drafted tokens.", drafts.drafts),
            ("num_draft_tokens", "Verified drafted tokens.", drafts.tokens),
            ("num_accepted_tokens", "Accepted drafted tokens.", drafts.accepted),
        ):
            yield self._counters(f"vllm:spec_decode_{name}", text, {"": value})
        name = "vllm:spec_decode_num_accepted_tokens_per_pos"
        text = "Accepted drafted tokens, by position in the draft."
        counts = {str(n): float(count) for n, count in enumerate(drafts.accepted_per_pos)}
        yield self._counters(name, text, counts, "position")
        text = "Drafted tokens that were expected to be accepted, before each step."
        yield self._counters("twostroke:draft_expected_tokens", text, {"": drafts.expected})
        text = "Rows for which a drafter offered tokens, verified or not."
        yield self._counters("twostroke:draft_offers", text, {"": drafts.offers})
        text = "Seconds of the draft model's steps."
        yield self._counters("twostroke:draft_model_seconds", text, {"": drafts.model_s})

    # ── metrics of twostroke ────────────────────────────────────────────────────────────────

    def _own_now(self, client: EngineStatus, load: EngineLoad) -> Iterator[Metric]:
        text = "1 while the engine works, 0 while its process is being restarted."
        yield self._gauge("twostroke:engine_up", text, float(client.healthy))
        text = "Restarts of the engine's process after its death."
        yield self._counters("twostroke:engine_restarts", text, {"": client.num_restarts})
        text = "Messages between processes that were dropped, by reason."
        counts = dict.fromkeys(REASONS, 0) | dict(client.dropped)
        yield self._counters("twostroke:dropped_messages", text, counts, "reason")
        info = client.info
        if info.read_bytes_per_s:
            text = "Measured bandwidth of reading memory (--measure-ceilings)."
            yield self._gauge("twostroke:ceiling_bytes_per_second", text, info.read_bytes_per_s)
        if info.ops_per_s:
            text = "Measured operations per second of matrix products (--measure-ceilings)."
            yield self._gauge("twostroke:ceiling_ops_per_second", text, info.ops_per_s)
        states = load.kv._asdict()
        reserved = states.pop("reserved")
        name = "twostroke:kv_cache_reserved_tokens"
        yield self._gauge(name, "Size of the KV cache: the sum of the four states.", reserved)
        text = "Tokens of the KV cache by state; fragmented: unfilled, in a request's block."
        yield self._gauges("twostroke:kv_cache_tokens", text, states, "state")

    def _own_transfers(self, transfers: TransferTotals) -> Iterator[Metric]:
        """KV transfers. These families exist only with several engines."""
        outcomes = {"fetched": transfers.fetched, "failed": transfers.failed}
        text = "Requests whose KV blocks another engine had; failed: they were recomputed."
        yield self._counters("twostroke:kv_transfers", text, outcomes, "outcome")
        text = "KV bytes fetched from other engines."
        yield self._counters("twostroke:kv_transfer_bytes", text, {"": transfers.num_bytes})
        text = "Seconds of these fetches, from the first request for a block to the last arrival."
        yield self._counters("twostroke:kv_transfer_seconds", text, {"": transfers.seconds})

    def _tiers(self, tiers: Sequence[TierStatus], totals: Totals) -> Iterator[Metric]:
        """Host memory and disk below the KV cache. These families exist only with such tiers."""
        queried = totals.prompt_tokens - totals.cached_tokens + totals.fetched_tokens
        for name, text, value in (
            ("queries", "Prompt tokens looked up in the tiers below the KV cache.", queried),
            ("hits", "Prompt tokens fetched from these tiers.", totals.fetched_tokens),
        ):
            yield self._counters(f"vllm:external_prefix_cache_{name}", text, {"": value})
        for host in (tier for tier in tiers if tier.name == "host"):
            text = "KV bytes copied between the GPU and host memory."
            sizes = {"GPU_to_CPU": host.stored_bytes, "CPU_to_GPU": host.fetched_bytes}
            yield self._counters("vllm:kv_offload_total_bytes", text, sizes, "transfer_type")
            text = "Seconds that these copies took."
            times = {"GPU_to_CPU": host.store_s, "CPU_to_GPU": host.fetch_s}
            yield self._counters("vllm:kv_offload_total_time", text, times, "transfer_type")
        for name, (field, text) in TIER_COUNTERS.items():
            values = {tier.name: getattr(tier, field) for tier in tiers}
            yield self._counters(name, text, values, "tier")
        text = "Bandwidth of recent fetches, in bytes per second."
        rates = {tier.name: tier.bytes_per_s for tier in tiers}
        yield self._gauges("twostroke:kv_tier_bytes_per_second", text, rates, "tier")
        family = GaugeMetricFamily(
            "twostroke:kv_tier_tokens",
            "Tokens of a tier, by state; used: being written or read.",
            labels=[*self._labels("tier"), "state"],
        )
        for tier in tiers:
            for state, count in tier.usage._asdict().items():
                family.add_metric([*self._label_values("tier", tier.name), state], count)
        yield family

    def _own_steps(self, totals: Totals) -> Iterator[Metric]:
        phases = {"prefill": totals.prefill, "decode": totals.decode}
        text = "The executor's time of a step, by the phases in the step."
        yield self._histogram("twostroke:step_seconds", text, totals.step_s, "mix")
        for name, field, text in (
            ("tokens", "tokens", "Computed tokens."),
            ("flops", "flops", "FLOPs that the work needs at least."),
            ("bytes", "num_bytes", "Bytes that the work needs at least; weights once per step."),
            ("device_seconds", "device_s", "The executor's time; attributed in mixed steps."),
        ):
            values = {phase: getattr(total, field) for phase, total in phases.items()}
            yield self._counters(f"twostroke:phase_{name}", text, values, "phase")
        for name, field, text in (
            ("seconds", "comm_s", "The executor's time in collectives, in rank 0."),
            ("bytes", "comm_bytes", "Bytes that a rank sent for collectives, mean over ranks."),
        ):
            values = {phase: getattr(total, field) for phase, total in phases.items()}
            yield self._counters(f"twostroke:collective_{name}", text, values, "phase")
        for name, text, value in (
            ("recomputed_tokens", "Tokens recomputed after preemptions.", totals.recomputed_tokens),
            (
                "kv_evicted_tokens",
                "Tokens evicted from the KV cache while their request ran.",
                totals.kv_evicted_tokens,
            ),
            ("step_predicted_seconds", "Predicted time of steps.", totals.predicted_s),
            ("step_foreseen_seconds", "Measured time of these steps.", totals.predicted_actual_s),
            ("step_error_seconds", "Sum of |predicted - measured|.", totals.prediction_error_s),
        ):
            yield self._counters(f"twostroke:{name}", text, {"": value})

    def _own_gaps(self, totals: Totals) -> Iterator[Metric]:
        text = "Time between tokens of all streams, by cause; attributed in mixed steps."
        yield self._counters("twostroke:gap_seconds", text, totals.cause_s, "cause")
        text = (
            "The part of a gap between tokens that is due to a cause; gaps without it not counted."
        )
        yield self._histogram("twostroke:gap_part_seconds", text, totals.part_s, "cause")

    # ── making families ─────────────────────────────────────────────────────────────────────

    def _gauge(self, name: str, text: str, value: float) -> Metric:
        return self._gauges(name, text, {"": value})

    def _gauges(self, name: str, text: str, values: Values, label: str = "") -> Metric:
        family = GaugeMetricFamily(name, text, labels=self._labels(label))
        for key, value in values.items():
            family.add_metric(self._label_values(label, key), value)
        return family

    def _counters(self, name: str, text: str, values: Values, label: str = "") -> Metric:
        family = CounterMetricFamily(name, text, labels=self._labels(label))
        for key, value in values.items():
            family.add_metric(self._label_values(label, key), value)
        return family

    def _histogram(
        self, name: str, text: str, values: Mapping[str, BucketCounts], label: str = ""
    ) -> Metric:
        family = HistogramMetricFamily(name, text, labels=self._labels(label))
        for key, histogram in values.items():
            buckets, total = [], 0
            bounds = [*map(float, histogram.bounds), float("inf")]
            for bound, count in zip(bounds, histogram.counts, strict=True):
                total += count
                buckets.append(("+Inf" if bound == float("inf") else str(bound), float(total)))
            family.add_metric(self._label_values(label, key), buckets, histogram.sum)
        return family

    def _labels(self, label: str) -> list[str]:
        return [*self._names, *self._of_pool(label, "phase"), *([label] if label else [])]

    def _label_values(self, label: str, value: str) -> list[str]:
        return [*self._values, *self._of_pool(label, self._phase), *([value] if label else [])]

    def _of_pool(self, label: str, text: str) -> list[str]:
        """Return [`text`] if the series has a label for the engine's pool, else []."""
        return [text] if self._phase and label != "phase" else []
