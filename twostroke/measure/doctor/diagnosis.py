"""`diagnose`: rules that turn the observations of a server into a verdict.

The computation of a request's own prompt and tokens is not a fault, if the machine computes as
quickly as it can (`machine.py`; `twostroke roofline` estimates the time). A rule names the time
that a request waits for other requests, for memory, for the template or for the network. A rule
applies if its share of the time exceeds a threshold and the time is long enough to be noticed.
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
from twostroke.measure.doctor.machine import machine_findings
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

# Thresholds. A share is of the time to the first token or of the time between tokens.
START_SHARE, START_S = 0.35, 0.1  # of the time to the first token; mean seconds a request
BEHIND_SHARE = 0.5  # of the time to the first token, behind the prompts of other requests
STALLED_SHARE = 0.2  # of the time between tokens, in gaps that prompts made long
PREFILL_SHARE = 0.7  # of the time between tokens, prompts of other requests
STREAMS_SHARE = 0.1  # of all the time: below it, the time between tokens does not matter
PREEMPTION_SHARE = 0.15  # of the time between tokens
HOST_SHARE, HOST_S = 0.3, 0.002  # of the time between tokens; mean seconds a token
REPEATED_SHARE = 0.4  # of the computed prompt tokens
OUTSIDE_SHARE, OUTSIDE_S = 0.3, 0.12  # of a probe's time; seconds
UNREADY_S = 0.5
SMALL_BATCH = {"cpu": 16}  # below this number of running requests a device is mostly idle
SMALL_BATCH_ELSEWHERE = 64
LEVEL_CONFIDENCE = {"step records": 0.95, "/metrics": 0.8, "client only": 0.65}
MIN_CONFIDENCE = 0.5  # of a cause that counts for the verdict


def diagnose(observed: Observations) -> Verdict:
    account = _account(observed)
    rules = _Rules(observed, account)
    causes = sorted(rules.causes(), key=_order)
    sure = [one for one in causes if one.confidence >= MIN_CONFIDENCE]
    if sure:
        phases = {one.phase for one in sure}
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
        experiment=experiment(sure[0], observed, account) if sure else None,
        notes=tuple(rules.notes()),
        not_examined=rules.not_examined(),
        figures=rules.figures(),
        server=observed.server,
        seconds=observed.seconds,
        requests=account.requests,
    )


def _order(cause: Cause) -> tuple[int, float]:
    """An engine that was down explains the other causes, and comes first; then the machine."""
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
        self.outside = client_extra_of(observed)
        self.round_trip_s = statistics.median(observed.pings_s) if observed.pings_s else 0.0
        self.repeats = self._repeats()

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
                found[cause.cause] = _merged(found.get(cause.cause), cause)
        return list(found.values())

    # ── before the first token ──────────────────────────────────────────────────────────────

    def _repeats(self) -> float:
        share = self.account.repeated_share
        own = self.account.start_share(Part.OWN_PREFILL, Part.BEHIND_PROMPTS, Part.OTHERS_PROMPTS)
        return share if share >= REPEATED_SHARE and own * share >= START_SHARE else 0.0

    def _start(
        self, cause: str, seconds: float, *evidence: str, min_share: float = START_SHARE
    ) -> Iterator[Cause]:
        """Yield a cause if `seconds`, summed over all requests, exceed its thresholds."""
        account = self.account
        share = seconds / account.start_s if account.start_s > 0 else 0.0
        mean_s = seconds / max(1, len(account.parts) if account.each else account.requests)
        if share >= min_share and mean_s >= START_S:
            message = (
                f"{duration(mean_s)} of {duration(account.ttft_s)} to the first token ({share:.0%})"
            )
            yield self._cause(cause, share, min_share, "start", message, *evidence)

    def _cause(
        self, cause: str, share: float, min_share: float, phase: str, *evidence: str, count: int = 0
    ) -> Cause:
        """Return a cause. `count`: number of observations; 0: the number of requests."""
        account = self.account
        sure = LEVEL_CONFIDENCE[account.level]
        sure *= 0.75 + 0.25 * min(1.0, (share - min_share) / min_share)
        if (count or account.requests) < 3:
            sure *= 0.7
        # Figures of steps include streams that have not ended.
        phase_s = account.start_s if phase == "start" else account.stream_s
        weight = share if count else share * phase_s / (account.total_s or 1.0)
        message = tuple(filter(None, evidence))
        return Cause(cause, round(sure, 2), message, round(share, 3), phase, round(weight, 4))

    def tokenizer(self) -> Iterator[Cause]:
        yield from self._start(
            "tokenizer_or_template",
            self.account.seconds(Part.TOKENISING),
            "spent before the request reached the queue: chat template, tokenizer, or the wait for "
            "a thread",
        )

    def no_prefix_reuse(self) -> Iterator[Cause]:
        if not self.repeats:
            return
        account = self.account
        computed = account.seconds(Part.OWN_PREFILL, Part.BEHIND_PROMPTS, Part.OTHERS_PROMPTS)
        yield from self._start(
            "no_prefix_reuse",
            computed * self.repeats,
            f"at least {self.repeats:.0%} of the prompt tokens computed stood at the beginning of "
            "an earlier prompt, too",
        )

    def queue(self) -> Iterator[Cause]:
        account, observed = self.account, self.observed
        if account.level != "step records":
            yield from self._queue_by_gauges()
            return
        behind = account.seconds(Part.BEHIND_PROMPTS, Part.OTHERS_PROMPTS) * (1 - self.repeats)
        longest = max(
            (one["num_prompt"] - one["num_cached"] for one in observed.requests), default=0
        )
        yield from self._start(
            "queueing_behind_prefills",
            behind,
            f"meanwhile the prompts of other requests were computed, the longest {longest:,} "
            "tokens",
            min_share=BEHIND_SHARE,
        )
        full = observed.max_num_seqs is not None and not self._is_small(observed.max_num_seqs)
        yield from self._start(
            "overloaded" if full else "batch_too_small",
            account.seconds(Part.FULL_BATCH),
            f"the batch was full (--max-num-seqs {observed.max_num_seqs}), and the KV cache had "
            "room",
        )
        yield from self._start(
            "kv_pressure",
            account.seconds(Part.NO_KV_ROOM),
            f"the KV cache ({observed.limits.get('kv_tokens', 0):,} tokens) had no room for the "
            "requests",
        )

    def _is_small(self, max_num_seqs: float) -> bool:
        device = str(self.observed.limits.get("device", "")).partition(":")[0]
        return max_num_seqs < SMALL_BATCH.get(device, SMALL_BATCH_ELSEWHERE)

    def _queue_by_gauges(self) -> Iterator[Cause]:
        """Judge the queue of a server that reports only its running and waiting requests."""
        account, gauges = self.account, self.observed.gauges
        away_s = self.round_trip_s * len(account.parts)
        waited = account.seconds(Part.QUEUE) + max(
            0.0, account.seconds(Part.BEFORE_PREFILL) - away_s
        )
        queued = [reading for reading in gauges if reading.waiting]
        running = [reading.running or 0.0 for reading in queued]
        usage = statistics.median([reading.kv_usage or 0.0 for reading in queued] or [0.0])
        preempted = change(self.observed.before, self.observed.after, "preemptions")
        message = f"requests waited in {len(queued)} of {len(gauges)} samples of the gauges"
        if usage >= FULL_KV or (queued and preempted):
            yield from self._start(
                "kv_pressure", waited, message, f"the KV cache was {usage:.0%} full"
            )
            return
        limit = self.observed.max_num_seqs or (max(running) if running else 0)
        full = sum(one >= limit for one in running)
        if queued and len(queued) >= 0.3 * len(gauges) and full >= 0.7 * len(queued):
            name = "batch_too_small" if self._is_small(limit) else "overloaded"
            yield from self._start(
                name, waited, f"{message}, while {limit:g} ran, the limit of the server"
            )
        elif self._others_prefill() >= 0.3:
            message = f"prompts were computed in {self._others_prefill():.0%} of the time"
            yield from self._start("queueing_behind_prefills", waited, message)

    def _others_prefill(self) -> float:
        prefill = change(self.observed.before, self.observed.after, "prefill_s")
        return (prefill or 0.0) / self.observed.seconds if self.observed.seconds else 0.0

    def cold_start(self) -> Iterator[Cause]:
        observed = self.observed
        restarts = 0.0
        if observed.before is not None and observed.after is not None:
            name = "twostroke:engine_restarts_total"
            restarts = observed.after.series.get(name, 0.0) - observed.before.series.get(name, 0.0)
        if observed.unready_s < UNREADY_S and not restarts:
            return
        share = observed.unready_s / max(observed.seconds + observed.unready_s, 1e-9)
        evidence = [f"the engine was not up for {duration(observed.unready_s)}"] * bool(
            observed.unready_s
        )
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
        outside = self.outside
        if outside is None:
            if self.round_trip_s >= OUTSIDE_S and len(self.observed.pings_s) >= 3:
                message = f"a round trip to /health takes {duration(self.round_trip_s)}"
                if self.account.ttft_s and self.round_trip_s > OUTSIDE_SHARE * self.account.ttft_s:
                    share = min(1.0, self.round_trip_s / self.account.ttft_s)
                    yield self._cause("client_or_network", share, OUTSIDE_SHARE, "start", message)
            return
        share = outside.start_s / outside.ttft_s if outside.ttft_s else 0.0
        round_trip = (
            f"a round trip to /health takes {duration(self.round_trip_s)}"
            if self.observed.pings_s
            else ""
        )
        if share >= OUTSIDE_SHARE and outside.start_s >= OUTSIDE_S:
            message = (
                f"the first token of {outside.count} probes arrived {duration(outside.start_s)} "
                f"after the server wrote the token ({share:.0%} of their time to the first token)"
            )
            yield self._cause(
                "client_or_network", share, OUTSIDE_SHARE, "start", message, round_trip
            )
        share = outside.stream_s / outside.span_s if outside.span_s else 0.0
        if share >= OUTSIDE_SHARE and outside.stream_s >= OUTSIDE_S:
            message = (
                f"the tokens of probes took {duration(outside.stream_s)} longer to arrive than to "
                f"be written ({share:.0%} of the time between the first and the last)"
            )
            yield self._cause(
                "client_or_network", share, OUTSIDE_SHARE, "stream", message, round_trip
            )

    # ── between tokens ──────────────────────────────────────────────────────────────────────

    def kv_preemption(self) -> Iterator[Cause]:
        account = self.account
        share, waited = account.stream_share(Part.PREEMPTION), account.kv_waited_share
        if share >= PREEMPTION_SHARE:
            message = (
                f"{share:.0%} of the time between tokens was lost to {account.preempted} "
                "preemptions"
            )
            yield self._cause("kv_pressure", share, PREEMPTION_SHARE, "stream", message)
        if waited >= PREEMPTION_SHARE and account.preempted:
            message = (
                f"{account.preempted} requests lost their blocks to others, and requests waited "
                f"for blocks for {waited:.0%} of their time"
            )
            count = account.gaps
            yield self._cause(
                "kv_pressure", waited, PREEMPTION_SHARE, "stream", message, count=count
            )
        if account.level != "step records":
            preempted = change(self.observed.before, self.observed.after, "preemptions") or 0.0
            if preempted >= 2:
                message = f"{preempted:.0f} requests were preempted because of missing KV blocks"
                yield self._cause("kv_pressure", 0.3, PREEMPTION_SHARE, "stream", message)

    def prefill_starves(self) -> Iterator[Cause]:
        account = self.account
        share = account.stalled_share
        if account.level != "step records" and self._others_prefill() < 0.1:
            return  # the stalls have another reason than prompts
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
        if share >= PREFILL_SHARE and account.stream_s >= STREAMS_SHARE * account.total_s:
            message = (
                f"{share:.0%} of the time between tokens went into the prompts of other requests"
            )
            yield self._cause("prefill_starves_decode", share, PREFILL_SHARE, "stream", message)

    def host_bound(self) -> Iterator[Cause]:
        account = self.account
        share = account.stream_share(Part.HOST)
        tokens = max(1.0, account.output_tokens * len(account.parts))
        each_s = account.seconds(Part.HOST) / tokens
        if share >= HOST_SHARE and each_s >= HOST_S:
            message = (
                f"{share:.0%} of the time between tokens the device was idle: "
                f"{duration(each_s)} a token"
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
        good = [one for one in self.observed.probes if one.ok]
        if not good:
            return bool(self.observed.stuck_s)
        ttft = statistics.median(one.ttft_s for one in good)
        tpots = [tpot for one in good if (tpot := one.tpot_s) is not None]
        return bool(self.observed.stuck_s) or is_stall(
            ttft, statistics.median(tpots) if tpots else ttft
        )

    def notes(self) -> Iterator[str]:
        account, observed = self.account, self.observed
        if not account.requests:
            yield "No request ended during the watch; watch longer (--for), or allow probes."
        elif not observed.traffic:
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
        failed = [one for one in observed.probes if not one.ok]
        if failed:
            yield f"{len(failed)} of {len(observed.probes)} probes failed: {failed[0].error}"
        if observed.stuck_s:
            yield f"A probe got no answer within {duration(max(observed.stuck_s))}."

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
        if self.outside is None:
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
        if self.outside is not None:
            found["outside_start_ms"] = 1e3 * self.outside.start_s
            found["outside_stream_ms"] = 1e3 * self.outside.stream_s
        return found


def _merged(before: Cause | None, now: Cause) -> Cause:
    """Return one cause for a cause that was found in both phases."""
    if before is None:
        return now
    phase = before.phase if before.phase == now.phase else "both"
    return Cause(
        now.cause,
        max(before.confidence, now.confidence),
        before.evidence + now.evidence,
        max(before.share, now.share),
        phase,
        max(before.weight, now.weight),
    )
