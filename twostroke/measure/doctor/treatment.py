"""`experiment`: the one change to try against a cause, and what it should gain by the ledger."""

from __future__ import annotations

import math

from twostroke.measure.doctor import account as of
from twostroke.measure.doctor.account import Account
from twostroke.measure.doctor.doctor import Seen
from twostroke.measure.doctor.verdict import Cause, Experiment

MAX_STALL = 8  # serve's default for --max-decode-stall


def experiment(cause: Cause, seen: Seen, account: Account) -> Experiment | None:
    """None: no setting of the server helps; the docs say what does."""
    makers = {
        "queueing_behind_prefills": _let_short_prompts_overtake,
        "prefill_starves_decode": _bound_stalls,
        "batch_too_small": _more_seats,
        "kv_pressure": _more_cache,
        "no_prefix_reuse": _reuse_prefixes,
    }
    maker = makers.get(cause.cause)
    return None if maker is None else maker(cause, seen, account)


def _let_short_prompts_overtake(cause: Cause, seen: Seen, account: Account) -> Experiment:
    parts = (of.BEHIND_PROMPTS, of.OTHERS_PROMPTS, of.QUEUE, of.BEFORE_PREFILL)
    unhindered_s = account.ttft_s * account.median_start_ratio(*parts)
    goal_ms = 50 * math.ceil(max(250.0, 4e3 * unhindered_s) / 50)
    return Experiment(
        "short-prompts-first",
        {"--ttft-slo-ms": goal_ms},
        "ttft",
        _rounded(account.median_start_ratio(*parts)),
        "with a goal for the first token, a prompt that can still meet it goes before a long one "
        "that is under way",
    )


def _bound_stalls(cause: Cause, seen: Seen, account: Account) -> Experiment:
    bound_s = max(0.04, MAX_STALL * account.gap_s)
    ratio = bound_s / account.worst_gap_s if account.worst_gap_s else 1.0
    setting = {"--max-decode-stall": MAX_STALL}
    if ratio > 0.9:  # that bound is kept already: a tighter one
        setting, ratio = {"--max-decode-stall": 3}, 3 / MAX_STALL
    return Experiment(
        "bounded-stalls",
        setting,
        "itl",
        _rounded(ratio),
        "each step's prefill is cut so that a stream waits at most so many times as long for a "
        "token as it does alone",
    )


def _more_seats(cause: Cause, seen: Seen, account: Account) -> Experiment:
    at_once = max(((look.running or 0) + (look.waiting or 0) for look in seen.looks), default=1)
    wanted = 1 << max(1, math.ceil(math.log2(max(at_once, 2 * (seen.seats or 1), 2))))
    flag = " (llama-server: -np)" if seen.server.get("kind") == "llama-server" else ""
    return Experiment(
        "more-seats",
        {"--max-num-seqs": wanted},
        "ttft",
        _rounded(account.median_start_ratio(of.NO_SEAT, of.QUEUE, of.BEFORE_PREFILL)),
        f"{at_once:.0f} requests were there at one time and {seen.seats} may run{flag}; decoding "
        "them together reads the weights once for all",
    )


def _more_cache(cause: Cause, seen: Seen, account: Account) -> Experiment:
    blocks = seen.limits.get("kv_tokens", 0) // max(1, seen.limits.get("block_size", 16))
    wanted = {"--num-gpu-blocks-override": 4 * blocks} if blocks else {}
    if cause.phase == "stream":
        lost = max(account.stream_share(of.PREEMPTION), account.kv_waited_share)
        metric, ratio = "tpot", 1 - lost
    else:
        metric, ratio = "ttft", account.median_start_ratio(of.NO_KV_ROOM, of.QUEUE)
    return Experiment(
        "more-kv-cache",
        wanted or {"--gpu-memory-utilization": 0.95},
        metric,
        _rounded(ratio),
        "requests wait for blocks or lose theirs; with more of them they need not. Where there is "
        "no more memory: fewer at one time (--max-num-seqs), or --kv-cache-dtype float16",
    )


def _reuse_prefixes(cause: Cause, seen: Seen, account: Account) -> Experiment:
    parts = (of.OWN_PREFILL, of.BEHIND_PROMPTS, of.OTHERS_PROMPTS)
    reused = any(one["num_cached"] for one in seen.requests)
    setting: dict[str, object] = {"--enable-prefix-caching": True}
    if reused:  # it is on; what it keeps is lost again before it is needed
        blocks = seen.limits.get("kv_tokens", 0) // max(1, seen.limits.get("block_size", 16))
        setting = {"--num-gpu-blocks-override": 4 * blocks}
    return Experiment(
        "prefix-reuse",
        setting,
        "ttft",
        _rounded(account.median_start_ratio(*parts, factor=account.repeated_share)),
        "the part that prompts share is computed once and kept",
    )


def _rounded(ratio: float) -> float:
    return round(min(1.0, max(0.02, ratio)), 3)
