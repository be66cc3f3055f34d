"""`experiment`: the change to try against a cause, and its predicted gain."""

from __future__ import annotations

import math

from twostroke.measure.doctor.account import Part, TimeAccount
from twostroke.measure.doctor.verdict import Cause, ProposedExperiment
from twostroke.measure.doctor.watch import Observations

DEFAULT_STALL = 8  # serve's default for --max-decode-stall
MIN_STALL_S = 0.04  # serve does not limit shorter gaps (`sched.slo.MIN_ITL_S`)
MIN_TTFT_GOAL_MS, GOAL_STEP_MS = 250.0, 50
GOAL_RATIO = 4  # the proposed TTFT goal, divided by the TTFT without other prompts


def experiment(
    cause: Cause, observed: Observations, account: TimeAccount
) -> ProposedExperiment | None:
    """Return the change to try, or None if no setting of the server helps."""
    makers = {
        "queueing_behind_prefills": _let_short_prompts_overtake,
        "prefill_starves_decode": _bound_stalls,
        "batch_too_small": _larger_batch,
        "kv_pressure": _more_cache,
        "no_prefix_reuse": _reuse_prefixes,
    }
    maker = makers.get(cause.cause)
    return None if maker is None else maker(cause, observed, account)


def _let_short_prompts_overtake(
    cause: Cause, observed: Observations, account: TimeAccount
) -> ProposedExperiment:
    parts = (Part.BEHIND_PROMPTS, Part.OTHERS_PROMPTS, Part.QUEUE, Part.BEFORE_PREFILL)
    ratio = account.median_start_ratio(*parts)  # TTFT without the waits for other prompts / TTFT
    goal_ms = max(MIN_TTFT_GOAL_MS, 1e3 * GOAL_RATIO * (account.ttft_s * ratio))
    return ProposedExperiment(
        "short-prompts-first",
        {"--ttft-slo-ms": GOAL_STEP_MS * math.ceil(goal_ms / GOAL_STEP_MS)},
        "ttft",
        _clamped(ratio),
        "with a TTFT goal, a prompt that can still meet the goal goes before a long prompt that is "
        "being computed",
    )


def _bound_stalls(cause: Cause, observed: Observations, account: TimeAccount) -> ProposedExperiment:
    bound_s = max(MIN_STALL_S, DEFAULT_STALL * account.gap_s)
    ratio = bound_s / account.worst_gap_s if account.worst_gap_s else 1.0
    setting = {"--max-decode-stall": DEFAULT_STALL}
    if ratio > 0.9:  # the default bound already holds: propose a tighter bound
        setting, ratio = {"--max-decode-stall": 3}, 3 / DEFAULT_STALL
    return ProposedExperiment(
        "bounded-stalls",
        setting,
        "itl",
        _clamped(ratio),
        "the prefill of each step is limited: a gap between two tokens of a stream is at most "
        "this multiple of a gap without prefill",
    )


def _larger_batch(cause: Cause, observed: Observations, account: TimeAccount) -> ProposedExperiment:
    at_once = max(
        ((reading.running or 0) + (reading.waiting or 0) for reading in observed.gauges), default=1
    )
    wanted = 1 << max(1, math.ceil(math.log2(max(at_once, 2 * (observed.max_num_seqs or 1), 2))))
    limit = "" if observed.max_num_seqs is None else f" and {observed.max_num_seqs} may run"
    flag = " (llama-server: -np)" if observed.server.get("kind") == "llama-server" else ""
    return ProposedExperiment(
        "larger-batch",
        {"--max-num-seqs": wanted},
        "ttft",
        _clamped(account.median_start_ratio(Part.FULL_BATCH, Part.QUEUE, Part.BEFORE_PREFILL)),
        f"{at_once:.0f} requests were active at one time{limit}{flag}; a larger "
        "batch reads the weights once for all its requests",
    )


def _larger_cache(observed: Observations) -> dict[str, object]:
    """Return the option for a larger KV cache: four times the blocks, if their number is known."""
    blocks = observed.limits.get("kv_tokens", 0) // max(1, observed.limits.get("block_size", 16))
    if blocks:
        return {"--num-gpu-blocks-override": 4 * blocks}
    return {"--gpu-memory-utilization": 0.95}


def _more_cache(cause: Cause, observed: Observations, account: TimeAccount) -> ProposedExperiment:
    if cause.phase == "stream":
        lost = max(account.stream_share(Part.PREEMPTION), account.kv_waited_share)
        metric, ratio = "tpot", 1 - lost
    else:
        metric, ratio = "ttft", account.median_start_ratio(Part.NO_KV_ROOM, Part.QUEUE)
    return ProposedExperiment(
        "more-kv-cache",
        _larger_cache(observed),
        metric,
        _clamped(ratio),
        "requests wait for KV blocks or are preempted; a larger KV cache avoids both. Without more "
        "memory: fewer running requests (--max-num-seqs), or --kv-cache-dtype int8",
    )


def _reuse_prefixes(
    cause: Cause, observed: Observations, account: TimeAccount
) -> ProposedExperiment:
    parts = (Part.OWN_PREFILL, Part.BEHIND_PROMPTS, Part.OTHERS_PROMPTS)
    reused = any(one["num_cached"] for one in observed.requests)
    setting: dict[str, object] = {"--enable-prefix-caching": True}
    if reused:  # prefix caching is on, but blocks are evicted before they are reused
        setting = _larger_cache(observed)
    return ProposedExperiment(
        "prefix-reuse",
        setting,
        "ttft",
        _clamped(account.median_start_ratio(*parts, factor=account.repeated_share)),
        "the shared prefix of prompts is computed once and stays in the cache",
    )


def _clamped(ratio: float) -> float:
    return round(min(1.0, max(0.02, ratio)), 3)
