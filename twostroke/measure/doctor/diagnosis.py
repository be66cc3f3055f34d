"""`diagnose`: rules that turn the observations of a server into a verdict.

A rule examines the time that requests wait for other requests, for memory, for the template or for
the network. It yields a cause if this time exceeds a share of the requests' time and is long enough
to be noticed. The computation of a request's own prompt and tokens is no cause if the machine
computes as fast as it can (`machine_causes.py`; `twostroke roofline` estimates that time).
"""

from __future__ import annotations

import statistics
from collections.abc import Iterator

from twostroke.measure.doctor.account import (
    FULL_KV,
    Part,
    TimeAccount,
    account_of_metrics,
    account_of_probes,
    account_of_records,
    client_extra_of,
    is_stall,
)
from twostroke.measure.doctor.machine_causes import machine_findings
from twostroke.measure.doctor.treatment import experiment
from twostroke.measure.doctor.verdict import (
    BOTH,
    HEALTHY,
    NOT_ENOUGH,
    NOTES,
    OF_MACHINE,
    SLOW_TO_START,
    SLOW_TO_STREAM,
    Cause,
    Verdict,
)
from twostroke.measure.doctor.watch import Observations
from twostroke.measure.load.scrape import change
from twostroke.measure.report.tables import duration

# Thresholds of the rules. Shares of the time to the first token:
START_SHARE = 0.35  # any cause, unless another threshold is given
QUEUE_SHARE = 0.5  # waiting in the queue while prompts of other requests are computed
START_S = 0.1  # the mean time of a request that any cause must reach

# Shares of the time between tokens:
STALLED_SHARE = 0.2  # gaps that are long because a prompt was computed
PREFILL_SHARE = 0.7  # computation of prompts of other requests, in gaps of any length
PREEMPTION_SHARE = 0.15  # lost to preemptions
HOST_SHARE = 0.3  # the device is idle
HOST_S = 0.002  # with HOST_SHARE: the minimum of the mean idle time for a token
MIN_STREAM_SHARE = 0.1  # share of the total time; a smaller time between tokens is not judged

REPEATED_SHARE = 0.4  # share of the computed prompt tokens that an earlier prompt began with
CLIENT_SHARE = 0.3  # share of a probe's time that passes between the server and the client
CLIENT_S = 0.12  # with CLIENT_SHARE: the minimum of that time
UNREADY_S = 0.5  # time during which the engine was not up
SMALL_BATCH = {"cpu": 16}  # by device: with fewer running requests the device is mostly idle
SMALL_BATCH_DEFAULT = 64  # for every other device

COUNTED_PREEMPTION_SHARE = 0.3  # assumed if only the number of preemptions is known
LEVEL_CONFIDENCE = {"step records": 0.95, "/metrics": 0.8, "client only": 0.65}
MIN_CONFIDENCE = 0.5  # causes with less confidence do not decide the verdict


def diagnose(observed: Observations) -> Verdict:
    """Return the verdict on a server from its observations, with causes, notes and figures."""
    account = _account(observed)
    rules = _Rules(observed, account)
    causes = sorted(rules.causes(), key=_order)
    deciding = [cause for cause in causes if cause.confidence >= MIN_CONFIDENCE]
    if deciding:
        phases = {cause.phase for cause in deciding}
        both = "both" in phases or phases == {"start", "stream"}
        verdict = BOTH if both else SLOW_TO_START if phases == {"start"} else SLOW_TO_STREAM
    else:
        verdict = HEALTHY if account.requests >= 2 and not causes else NOT_ENOUGH
        if verdict == HEALTHY and rules.unexplained_start():
            verdict = NOT_ENOUGH
    return Verdict(
        verdict,
        evidence_level=account.level,
        causes=tuple(causes),
        ledger=account.ledger(),
        experiment=experiment(deciding[0], observed, account) if deciding else None,
        notes=tuple(rules.notes()),
        not_examined=rules.not_examined(),
        figures=rules.figures(),
        server=observed.server,
        seconds=observed.seconds,
        requests=account.requests,
    )


def _order(cause: Cause) -> tuple[int, float]:
    """Return the sort key of a cause. An engine that was down explains all other causes, and comes
    first; then come causes in the machine."""
    rank = 0 if cause.cause == "cold_start" else 1 if cause.cause in OF_MACHINE else 2
    return rank, -cause.weight * cause.confidence


def _account(observed: Observations) -> TimeAccount:
    """Return the account from the best evidence."""
    if observed.steps is not None:
        return account_of_records(observed)
    return account_of_metrics(observed) or account_of_probes(observed)


class _Rules:
    """The rules over one account and its observations."""

    def __init__(self, observed: Observations, account: TimeAccount) -> None:
        self.observed, self.account = observed, account
        self.client_extra = client_extra_of(observed)
        self.round_trip_s = statistics.median(observed.pings_s) if observed.pings_s else 0.0
        self.repeated_share = self._relevant_repeated_share()

    def causes(self) -> list[Cause]:
        rules = (
            self.cold_start,
            self.client_or_network,
            self.tokenizer,
            self.no_prefix_reuse,
            self.queue,
            self.kv_preemption,
            self.prefill_starves,
            self.host_bound,
            self.machine,
        )
        found: dict[str, Cause] = {}
        for rule in rules:
            for cause in rule():
                found[cause.cause] = _merge(found.get(cause.cause), cause)
        return list(found.values())

    # ── before the first token ──────────────────────────────────────────────────────────────

    def _relevant_repeated_share(self) -> float:
        """Return the share of prompt tokens that a prefix cache could have served, or 0 if their
        computation delayed first tokens too little to be a cause."""
        share = self.account.repeated_share
        prompts = self.account.start_share(
            Part.OWN_PREFILL, Part.BEHIND_PROMPTS, Part.OTHERS_PROMPTS
        )
        return share if share >= REPEATED_SHARE and prompts * share >= START_SHARE else 0.0

    def _start_cause(
        self, cause: str, seconds: float, *evidence: str, min_share: float = START_SHARE
    ) -> Iterator[Cause]:
        """Yield a cause of slow first tokens if `seconds`, the sum over all requests, are at least
        `min_share` of the time to the first token and `START_S` a request."""
        account = self.account
        share = seconds / account.start_s if account.start_s > 0 else 0.0
        num_requests = len(account.parts) if account.one_per_request else account.requests
        mean_s = seconds / max(1, num_requests)
        if share >= min_share and mean_s >= START_S:
            message = (
                f"{duration(mean_s)} of {duration(account.ttft_s)} to the first token ({share:.0%})"
            )
            yield self._cause(cause, share, min_share, "start", message, *evidence)

    def _cause(
        self, cause: str, share: float, min_share: float, phase: str, *evidence: str, count: int = 0
    ) -> Cause:
        """Return a cause. `count`: the number of observed gaps, if `share` comes from gaps; 0: the
        share comes from the requests."""
        account = self.account
        confidence = LEVEL_CONFIDENCE[account.level]
        confidence *= 0.75 + 0.25 * min(1.0, (share - min_share) / min_share)
        if (count or account.requests) < 3:
            confidence *= 0.7
        # A share of gaps is not scaled: gaps include streams that have not ended, and `total_s`
        # does not.
        phase_s = account.start_s if phase == "start" else account.stream_s
        weight = share if count else share * phase_s / (account.total_s or 1.0)
        message = tuple(filter(None, evidence))
        return Cause(cause, round(confidence, 2), message, round(share, 3), phase, round(weight, 4))

    def tokenizer(self) -> Iterator[Cause]:
        yield from self._start_cause(
            "tokenizer_or_template",
            self.account.seconds(Part.TOKENISING),
            "spent before the request reached the queue: chat template, tokenizer, or the wait for "
            "a thread",
        )

    def no_prefix_reuse(self) -> Iterator[Cause]:
        if not self.repeated_share:
            return
        account = self.account
        computed = account.seconds(Part.OWN_PREFILL, Part.BEHIND_PROMPTS, Part.OTHERS_PROMPTS)
        yield from self._start_cause(
            "no_prefix_reuse",
            computed * self.repeated_share,
            f"at least {self.repeated_share:.0%} of the computed prompt tokens were also at the "
            "beginning of an earlier prompt",
        )

    def queue(self) -> Iterator[Cause]:
        account, observed = self.account, self.observed
        if account.level != "step records":
            yield from self._queue_by_gauges()
            return
        behind = account.seconds(Part.BEHIND_PROMPTS, Part.OTHERS_PROMPTS) * (
            1 - self.repeated_share
        )
        longest = max(
            (one["num_prompt"] - one["num_cached"] for one in observed.requests), default=0
        )
        yield from self._start_cause(
            "queueing_behind_prefills",
            behind,
            f"meanwhile the prompts of other requests were computed, the longest {longest:,} "
            "tokens",
            min_share=QUEUE_SHARE,
        )
        is_large = observed.max_num_seqs is not None and not self._is_small(observed.max_num_seqs)
        yield from self._start_cause(
            "overloaded" if is_large else "batch_too_small",
            account.seconds(Part.FULL_BATCH),
            f"the batch was full (--max-num-seqs {observed.max_num_seqs}), and the KV cache had "
            "room",
        )
        yield from self._start_cause(
            "kv_pressure",
            account.seconds(Part.NO_KV_ROOM),
            f"the KV cache ({observed.limits.get('kv_tokens', 0):,} tokens) had no room for the "
            "requests",
        )

    def _is_small(self, max_num_seqs: float) -> bool:
        device = str(self.observed.limits.get("device", "")).partition(":")[0]
        return max_num_seqs < SMALL_BATCH.get(device, SMALL_BATCH_DEFAULT)

    def _queue_by_gauges(self) -> Iterator[Cause]:
        """Yield causes for a server that reports only its running and waiting requests."""
        account, gauges = self.account, self.observed.gauges
        round_trips_s = self.round_trip_s * len(account.parts)
        waited_s = account.seconds(Part.QUEUE) + max(
            0.0, account.seconds(Part.BEFORE_PREFILL) - round_trips_s
        )
        queued = [reading for reading in gauges if reading.waiting]
        running = [reading.running or 0.0 for reading in queued]
        usage = statistics.median([reading.kv_usage or 0.0 for reading in queued] or [0.0])
        preempted = change(self.observed.before, self.observed.after, "preemptions")
        message = f"requests waited in {len(queued)} of {len(gauges)} samples of the gauges"
        if usage >= FULL_KV or (queued and preempted):
            yield from self._start_cause(
                "kv_pressure", waited_s, message, f"the KV cache was {usage:.0%} full"
            )
            return
        limit = self.observed.max_num_seqs or (max(running) if running else 0)
        num_full = sum(count >= limit for count in running)
        if queued and len(queued) >= 0.3 * len(gauges) and num_full >= 0.7 * len(queued):
            name = "batch_too_small" if self._is_small(limit) else "overloaded"
            yield from self._start_cause(
                name, waited_s, f"{message}, and the server ran its limit of {limit:g}"
            )
        elif self._prefill_share() >= 0.3:
            message = f"prompts were computed in {self._prefill_share():.0%} of the time"
            yield from self._start_cause("queueing_behind_prefills", waited_s, message)

    def _prefill_share(self) -> float:
        """Return the prefill time of all requests divided by the time of the watch."""
        prefill_s = change(self.observed.before, self.observed.after, "prefill_s")
        return (prefill_s or 0.0) / self.observed.seconds if self.observed.seconds else 0.0

    def cold_start(self) -> Iterator[Cause]:
        observed = self.observed
        restarts = 0.0
        if observed.before is not None and observed.after is not None:
            name = "twostroke:engine_restarts_total"
            restarts = observed.after.series.get(name, 0.0) - observed.before.series.get(name, 0.0)
        if observed.unready_s < UNREADY_S and not restarts:
            return
        share = observed.unready_s / max(observed.seconds + observed.unready_s, 1e-9)
        evidence = []
        if observed.unready_s:
            evidence.append(f"the engine was not up for {duration(observed.unready_s)}")
        if restarts:
            evidence.append(f"an engine died and was restarted {restarts:.0f} times")
        yield Cause(
            "cold_start",
            LEVEL_CONFIDENCE["step records"],
            tuple(evidence),
            round(share, 3),
            "start",
        )

    # ── between the client and the server ───────────────────────────────────────────────────

    def client_or_network(self) -> Iterator[Cause]:
        extra = self.client_extra
        if extra is None:
            if self.round_trip_s >= CLIENT_S and len(self.observed.pings_s) >= 3:
                message = f"a round trip to /health takes {duration(self.round_trip_s)}"
                if self.account.ttft_s and self.round_trip_s > CLIENT_SHARE * self.account.ttft_s:
                    share = min(1.0, self.round_trip_s / self.account.ttft_s)
                    yield self._cause("client_or_network", share, CLIENT_SHARE, "start", message)
            return
        share = extra.start_s / extra.ttft_s if extra.ttft_s else 0.0
        round_trip = (
            f"a round trip to /health takes {duration(self.round_trip_s)}"
            if self.observed.pings_s
            else ""
        )
        if share >= CLIENT_SHARE and extra.start_s >= CLIENT_S:
            message = (
                f"the first token of {extra.count} probes arrived {duration(extra.start_s)} "
                f"after the server wrote the token ({share:.0%} of their time to the first token)"
            )
            yield self._cause(
                "client_or_network", share, CLIENT_SHARE, "start", message, round_trip
            )
        share = extra.stream_s / extra.span_s if extra.span_s else 0.0
        if share >= CLIENT_SHARE and extra.stream_s >= CLIENT_S:
            message = (
                f"the tokens of probes took {duration(extra.stream_s)} longer to arrive than to "
                f"be written ({share:.0%} of the time from the first token to the last)"
            )
            yield self._cause(
                "client_or_network", share, CLIENT_SHARE, "stream", message, round_trip
            )

    # ── between tokens ──────────────────────────────────────────────────────────────────────

    def kv_preemption(self) -> Iterator[Cause]:
        account = self.account
        share, waited_share = account.stream_share(Part.PREEMPTION), account.kv_waited_share
        if share >= PREEMPTION_SHARE:
            message = (
                f"{share:.0%} of the time between tokens was lost to {account.preempted} "
                "preemptions"
            )
            yield self._cause("kv_pressure", share, PREEMPTION_SHARE, "stream", message)
        if waited_share >= PREEMPTION_SHARE and account.preempted:
            message = (
                f"{account.preempted} requests lost their blocks to others, and requests waited "
                f"for blocks for {waited_share:.0%} of their time"
            )
            count = account.gaps
            yield self._cause(
                "kv_pressure", waited_share, PREEMPTION_SHARE, "stream", message, count=count
            )
        if account.level != "step records":
            preempted = change(self.observed.before, self.observed.after, "preemptions") or 0.0
            if preempted >= 2:
                message = f"{preempted:.0f} requests were preempted because of missing KV blocks"
                share = COUNTED_PREEMPTION_SHARE
                yield self._cause("kv_pressure", share, PREEMPTION_SHARE, "stream", message)

    def prefill_starves(self) -> Iterator[Cause]:
        account = self.account
        share = account.stalled_share
        if account.level != "step records" and self._prefill_share() < 0.1:
            return  # prompts cannot be the reason of the stalls
        if share >= STALLED_SHARE:
            message = (
                f"{share:.0%} of the time between tokens passed in gaps at least 10 times as long "
                f"as usual, the longest {duration(account.worst_gap_s)}; the usual gap is "
                f"{duration(account.gap_s)}"
            )
            yield self._cause(
                "prefill_starves_decode",
                share,
                STALLED_SHARE,
                "stream",
                message,
                count=account.gaps,
            )
            return
        share = account.stream_share(Part.OTHERS_PREFILL)
        if share >= PREFILL_SHARE and account.stream_s >= MIN_STREAM_SHARE * account.total_s:
            message = (
                f"{share:.0%} of the time between tokens went into the prompts of other requests"
            )
            yield self._cause("prefill_starves_decode", share, PREFILL_SHARE, "stream", message)

    def host_bound(self) -> Iterator[Cause]:
        account = self.account
        share = account.stream_share(Part.HOST)
        tokens = max(1.0, account.output_tokens * len(account.parts))
        idle_s = account.seconds(Part.HOST) / tokens
        if share >= HOST_SHARE and idle_s >= HOST_S:
            message = (
                f"the device was idle for {share:.0%} of the time between tokens, "
                f"{duration(idle_s)} for each token"
            )
            yield self._cause("host_bound_decode", share, HOST_SHARE, "stream", message)

    # ── the machine ─────────────────────────────────────────────────────────────────────────

    def machine(self) -> Iterator[Cause]:
        for found in machine_findings(self.observed, self.account):
            share = min(1.0, found.share)
            yield self._cause(found.cause, share, found.min_share, "both", *found.evidence)

    # ── notes, and causes that could not be examined ────────────────────────────────────────

    def unexplained_start(self) -> bool:
        """Return True if the start was slow for a reason that no rule names."""
        account = self.account
        if account.level == "step records":
            seconds = account.seconds(Part.NO_STEP)
            mean_s = seconds / max(1, len(account.parts))
            return account.start_share(Part.NO_STEP) >= START_SHARE and mean_s >= START_S
        answered = [probe for probe in self.observed.probes if probe.ok]
        if self.observed.unanswered_s or not answered:
            return bool(self.observed.unanswered_s)
        ttft_s = statistics.median(probe.ttft_s for probe in answered)
        tpots_s = [tpot_s for probe in answered if (tpot_s := probe.tpot_s) is not None]
        return is_stall(ttft_s, statistics.median(tpots_s) if tpots_s else ttft_s)

    def notes(self) -> Iterator[str]:
        account, observed = self.account, self.observed
        if not account.requests:
            yield "No request ended during the watch; watch longer (--for), or allow probes."
        elif not observed.has_traffic:
            yield f"There was no traffic except {len(observed.probes)} probes of the doctor."
        if account.total_s:
            decode = account.seconds(Part.DECODE) / account.total_s
            if decode >= 0.6:
                yield (
                    f"{NOTES['output_bound']} ({decode:.0%} is decode, {account.output_tokens:.0f} "
                    "tokens a request)"
                )
            own = account.seconds(Part.OWN_PREFILL) / account.total_s
            if own >= 0.6:
                yield f"{NOTES['prompt_bound']} ({own:.0%})"
        used = [reading.kv_usage for reading in observed.gauges if reading.kv_usage is not None]
        if used and max(used) < 0.3:
            yield f"{NOTES['memory_reserved']} (at most {max(used):.1%} was in use)"
        failed = [probe for probe in observed.probes if not probe.ok]
        if failed:
            yield f"{len(failed)} of {len(observed.probes)} probes failed: {failed[0].error}"
        if observed.unanswered_s:
            yield f"A probe got no answer within {duration(max(observed.unanswered_s))}."

    def not_examined(self) -> dict[str, str]:
        found = {
            "slow_interconnect": "servers do not report how long their devices wait for each "
            "other; profile the server (`twostroke profile`, nsys)"
        }
        if self.account.level != "step records":
            why = f"needs step records; the evidence here is {self.account.level}"
            for name in ("host_bound_decode", "tokenizer_or_template", "no_prefix_reuse"):
                found[name] = why
        if self.observed.machine_after is None:
            why = "the server does not report the counters of its machine"
            found |= dict.fromkeys(("cpu_taken", "clock_throttled", "memory_swapped"), why)
        if self.client_extra is None:
            found["client_or_network"] = (
                "only the round trip to /health was examined; the rest needs probes and a server "
                "with request records"
            )
        return found

    def figures(self) -> dict[str, float]:
        account, observed = self.account, self.observed
        found = {
            "requests": float(account.requests),
            "ttft_ms": 1e3 * account.ttft_s,
            "median_gap_ms": 1e3 * account.gap_s,
            "worst_gap_ms": 1e3 * account.worst_gap_s,
            "stalled_share": account.stalled_share,
            "repeated_prompt_share": account.repeated_share,
            "round_trip_ms": 1e3 * self.round_trip_s,
            "unready_s": observed.unready_s,
            "most_running": max(
                (reading.running or 0.0 for reading in observed.gauges), default=0.0
            ),
            "most_waiting": max(
                (reading.waiting or 0.0 for reading in observed.gauges), default=0.0
            ),
        }
        if self.client_extra is not None:
            found["outside_start_ms"] = 1e3 * self.client_extra.start_s
            found["outside_stream_ms"] = 1e3 * self.client_extra.stream_s
        return found


def _merge(first: Cause | None, second: Cause) -> Cause:
    """Merge two findings of the same cause, by several rules or in both phases."""
    if first is None:
        return second
    phase = first.phase if first.phase == second.phase else "both"
    return Cause(
        second.cause,
        max(first.confidence, second.confidence),
        first.evidence + second.evidence,
        max(first.share, second.share),
        phase,
        max(first.weight, second.weight),
    )
