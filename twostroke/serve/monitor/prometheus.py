"""Totals as Prometheus families. Metrics that vLLM has too have vLLM's name, type and labels
(`vllm:`); other metrics begin with `twostroke:`."""

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
        "Tokens written in a step, and those computed of the prompts that it ended.",
    ),
    "time_to_first_token_seconds": ("ttft_s", "Received → first token."),
    "inter_token_latency_seconds": ("gap_s", "Each gap between two tokens of one stream."),
    "request_time_per_output_token_seconds": ("tpot_s", "Decode time / (tokens - 1), a request."),
    "e2e_request_latency_seconds": ("e2e_s", "Received → finished."),
    "request_queue_time_seconds": ("queue_s", "Received → first token of it scheduled."),
    "request_prefill_time_seconds": ("prefill_s", "First scheduled → first output token."),
    "request_decode_time_seconds": ("decode_s", "First output token → last."),
    "request_inference_time_seconds": ("inference_s", "Prefill time + decode time."),
    "request_prompt_tokens": ("request_prompt", "Prompt tokens of a request."),
    "request_prefill_kv_computed_tokens": ("request_computed", "Prompt tokens not cached."),
    "request_generation_tokens": ("request_generated", "Tokens written for a request."),
    "request_max_num_generation_tokens": ("max_generated", "Tokens of the longest of n."),
    "request_num_preemptions": ("request_preemptions", "How often a request was sent back."),
    "request_params_n": ("n", "The parameter n."),
    "request_params_max_tokens": ("max_tokens", "The parameter max_tokens, where given."),
}

# Counters of a tier: the field of `TierStatus`.
TIER_COUNTERS = {
    "vllm:kv_offload_tiering_read_bytes": ("fetched_bytes", "KV bytes read from a tier."),
    "vllm:kv_offload_tiering_read_time": ("fetch_s", "Seconds that reads took."),
    "vllm:kv_offload_tiering_write_bytes": ("stored_bytes", "KV bytes written to a tier."),
    "vllm:kv_offload_tiering_write_time": ("store_s", "Seconds that writes took."),
    "twostroke:kv_tier_dropped_stores": (
        "dropped_stores",
        "Parts of prefixes that were not copied, because too many waited.",
    ),
    "twostroke:kv_tier_failed_stores": (
        "failed_stores",
        "Copies that failed, or whose blocks the KV cache needed before.",
    ),
    "twostroke:kv_tier_fetches": ("fetches", "Fetches from a tier, with those that failed."),
    "twostroke:kv_tier_failed_fetches": (
        "failed_fetches",
        "Fetches that failed; their tokens were computed instead.",
    ),
}


class Families:
    """The metric families of one engine. Every series has the labels `model_name` and `engine`; a
    single engine is "0", as in vLLM. With several engines, series have the pool's `phase` too,
    except series whose label `phase` is the phase of the work."""

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
        # Also under the name before vLLM 0.11, which dashboards still use.
        old = "vllm:time_per_output_token_seconds"
        text = "As vllm:inter_token_latency_seconds, which replaces it."
        yield self._histogram(old, text, {"": totals.gap_s})
        yield from self._own_now(client, load)
        if client.transfers is not None:
            yield from self._own_transfers(client.transfers)
        if load.tiers:
            yield from self._tiers(load.tiers, totals)
        yield from self._own_steps(totals)
        yield from self._own_gaps(totals)

    # ── vLLM's ──────────────────────────────────────────────────────────────────────────────

    def _vllm_now(self, load: EngineLoad, asleep: bool) -> Iterator[Metric]:
        yield self._gauge("vllm:num_requests_running", "Running requests.", load.running)
        yield self._gauge("vllm:num_requests_waiting", "Waiting requests.", load.waiting)
        reasons = {"capacity": float(load.waiting), "deferred": 0.0}
        name, text = "vllm:num_requests_waiting_by_reason", "Waiting requests, by reason."
        yield self._gauges(name, text, reasons, "reason")
        text = "Share of the KV cache that running requests have taken, 0 to 1."
        yield self._gauge("vllm:kv_cache_usage_perc", text, load.kv.taken)
        states = {
            "awake": float(not asleep),
            "weights_offloaded": float(asleep),
            "discard_all": 0.0,
        }
        text = "1 for the state that the engine is in: asleep after /sleep, its process ended."
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
            ("num_preemptions", "Requests sent back for want of KV blocks.", totals.preemptions),
            ("prompt_tokens", "Prompt tokens of the streams that began.", prompt),
            ("generation_tokens", "Tokens written.", totals.generation_tokens),
            ("prefix_cache_queries", "Prompt tokens looked up in the prefix cache.", prompt),
            (
                "prefix_cache_hits",
                "Prompt tokens found there, and not computed.",
                cached - totals.fetched_tokens,
            ),
            ("prompt_tokens_cached", "Prompt tokens that were not computed.", cached),
            ("estimated_flops_per_gpu", "FLOPs that all steps needed at the least.", flops),
        ):
            yield self._counters(f"vllm:{name}", text, {"": value})
        fetched = totals.fetched_tokens
        sources = {"local_compute": prompt - cached, "local_cache_hit": cached - fetched}
        sources["external_kv_transfer"] = fetched
        name, text = "vllm:prompt_tokens_by_source", "Prompt tokens, by where they came from."
        yield self._counters(name, text, sources, "source")
        text = "Requests that ended, by how."
        yield self._counters("vllm:request_success", text, totals.ended, "finished_reason")

    def _drafts(self, drafts: DraftTotals) -> Iterator[Metric]:
        """Speculative decoding; only once a drafter has had an offer."""
        for name, text, value in (
            ("num_drafts", "Drafts that were verified: rows with drafted tokens.", drafts.drafts),
            ("num_draft_tokens", "Drafted tokens that were verified.", drafts.tokens),
            ("num_accepted_tokens", "Drafted tokens that became text.", drafts.accepted),
        ):
            yield self._counters(f"vllm:spec_decode_{name}", text, {"": value})
        name, text = "vllm:spec_decode_num_accepted_tokens_per_pos", "By their place in the draft."
        places = {str(n): float(count) for n, count in enumerate(drafts.accepted_per_pos)}
        yield self._counters(name, text, places, "position")
        text = "Drafted tokens that were expected to become text, before each step."
        yield self._counters("twostroke:draft_expected_tokens", text, {"": drafts.expected})
        text = "Rows for which a drafter had an offer, verified or not."
        yield self._counters("twostroke:draft_offers", text, {"": drafts.offers})
        text = "Seconds that the draft model ran."
        yield self._counters("twostroke:draft_model_seconds", text, {"": drafts.model_s})

    # ── ours ────────────────────────────────────────────────────────────────────────────────

    def _own_now(self, client: EngineStatus, load: EngineLoad) -> Iterator[Metric]:
        text = "1 while requests are worked on, 0 while an engine is being started."
        yield self._gauge("twostroke:engine_up", text, float(client.healthy))
        text = "Engines that were started because the one before had died."
        yield self._counters("twostroke:engine_restarts", text, {"": client.num_restarts})
        text = "Messages between processes that were dropped, by reason."
        counts = dict.fromkeys(REASONS, 0) | dict(client.dropped)
        yield self._counters("twostroke:dropped_messages", text, counts, "reason")
        info = client.info
        if info.read_bytes_per_s:
            text = "Bytes a second that the machine reads, measured (--measure-ceilings)."
            yield self._gauge("twostroke:ceiling_bytes_per_second", text, info.read_bytes_per_s)
        if info.ops_per_s:
            text = "Operations a second of its integer products, measured (--measure-ceilings)."
            yield self._gauge("twostroke:ceiling_ops_per_second", text, info.ops_per_s)
        states = load.kv._asdict()
        reserved = states.pop("reserved")
        name = "twostroke:kv_cache_reserved_tokens"
        yield self._gauge(name, "The KV cache's size: the sum of the four states.", reserved)
        text = "KV cache by state; fragmented: in a request's block, not filled yet."
        yield self._gauges("twostroke:kv_cache_tokens", text, states, "state")

    def _own_transfers(self, transfers: TransferTotals) -> Iterator[Metric]:
        """KV transfers; only with several engines."""
        outcomes = {"fetched": transfers.fetched, "failed": transfers.failed}
        text = "Requests whose KV blocks came from another engine; failed: were computed again."
        yield self._counters("twostroke:kv_transfers", text, outcomes, "outcome")
        text = "KV bytes fetched from other engines."
        yield self._counters("twostroke:kv_transfer_bytes", text, {"": transfers.num_bytes})
        text = "Time that fetching them took, from the first block asked for to the last one here."
        yield self._counters("twostroke:kv_transfer_seconds", text, {"": transfers.seconds})

    def _tiers(self, tiers: Sequence[TierStatus], totals: Totals) -> Iterator[Metric]:
        """Host memory and disk below the KV cache; only with such tiers."""
        queried = totals.prompt_tokens - totals.cached_tokens + totals.fetched_tokens
        for name, text, value in (
            ("queries", "Prompt tokens looked up in the tiers below the KV cache.", queried),
            ("hits", "Prompt tokens that were fetched from there.", totals.fetched_tokens),
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
        text = "Bytes a second of fetches, as measured lately."
        rates = {tier.name: tier.bytes_per_s for tier in tiers}
        yield self._gauges("twostroke:kv_tier_bytes_per_second", text, rates, "tier")
        family = GaugeMetricFamily(
            "twostroke:kv_tier_tokens",
            "Tokens of a tier by state; used: being written or read.",
            labels=[*self._labels("tier"), "state"],
        )
        for tier in tiers:
            for state, count in tier.usage._asdict().items():
                family.add_metric([*self._label_values("tier", tier.name), state], count)
        yield family

    def _own_steps(self, totals: Totals) -> Iterator[Metric]:
        phases = {"prefill": totals.prefill, "decode": totals.decode}
        text = "Executor's time of a step, by what was in it."
        yield self._histogram("twostroke:step_seconds", text, totals.step_s, "mix")
        for name, field, text in (
            ("tokens", "tokens", "Tokens computed."),
            ("flops", "flops", "FLOPs needed at the least."),
            ("bytes", "num_bytes", "Bytes read and written at the least; weights once a step."),
            ("device_seconds", "device_s", "Executor's time; attributed in mixed steps."),
        ):
            values = {phase: getattr(total, field) for phase, total in phases.items()}
            yield self._counters(f"twostroke:phase_{name}", text, values, "phase")
        for name, field, text in (
            ("seconds", "comm_s", "Of the executor's time, in collectives of rank 0."),
            ("bytes", "comm_bytes", "That a rank sent for them, the mean over the ranks."),
        ):
            values = {phase: getattr(total, field) for phase, total in phases.items()}
            yield self._counters(f"twostroke:collective_{name}", text, values, "phase")
        for name, text, value in (
            ("recomputed_tokens", "Lost to preemption.", totals.recomputed_tokens),
            (
                "kv_evicted_tokens",
                "That left the KV cache while their request wrote on.",
                totals.kv_evicted_tokens,
            ),
            ("step_predicted_seconds", "As the step-time model foresaw.", totals.predicted_s),
            ("step_foreseen_seconds", "Those steps, as they ran.", totals.predicted_actual_s),
            ("step_error_seconds", "|foreseen - ran|, summed.", totals.prediction_error_s),
        ):
            yield self._counters(f"twostroke:{name}", text, {"": value})

    def _own_gaps(self, totals: Totals) -> Iterator[Metric]:
        text = "Time between tokens, over all streams, by cause; attributed in mixed steps."
        yield self._counters("twostroke:gap_seconds", text, totals.cause_s, "cause")
        text = "A cause's part of a gap between tokens, of the gaps that it has a part in."
        yield self._histogram("twostroke:gap_part_seconds", text, totals.part_s, "cause")

    # ── shapes ──────────────────────────────────────────────────────────────────────────────

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
        return [*self._names, *self._pool(label, "phase"), *([label] if label else [])]

    def _label_values(self, label: str, value: str) -> list[str]:
        return [*self._values, *self._pool(label, self._phase), *([value] if label else [])]

    def _pool(self, label: str, text: str) -> list[str]:
        return [text] if self._phase and label != "phase" else []
