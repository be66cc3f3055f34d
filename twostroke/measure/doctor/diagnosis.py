"""`diagnose`: what a doctor has seen → a verdict. Rules over an `Account`, and nothing else.

Slow is what is not a request's own work. Computing its prompt and writing its tokens take as long
as they take (`twostroke roofline` says how long they should); waiting for others, for room, for a
template or for the network is what a rule can name. A rule speaks if its part of the time is both
large in proportion and long enough to be noticed; each threshold stands beside its name below.
"""

from __future__ import annotations

import statistics
from collections.abc import Iterator

from twostroke.measure.doctor import account as of
from twostroke.measure.doctor.account import Account, is_stall
from twostroke.measure.doctor.doctor import Seen
from twostroke.measure.doctor.treatment import experiment
from twostroke.measure.doctor.verdict import (
    BOTH,
    HEALTHY,
    NOT_ENOUGH,
    NOTES,
    SLOW_TO_START,
    SLOW_TO_STREAM,
    Cause,
    Verdict,
)
from twostroke.measure.load.scrape import change
from twostroke.measure.report.tables import duration

START_SHARE, START_S = 0.35, 0.1  # of the time to the first token; mean a request
BEHIND_SHARE = 0.5  # of it, behind the prompts of others: longer than all its own work
STALLED_SHARE = 0.2  # of the time between tokens, in gaps that prompts made long
PREFILL_SHARE = 0.7  # of the time between tokens, prompts of others
STREAMS_SHARE = 0.1  # of all the time: where less is between tokens, nobody waits for them
PREEMPTION_SHARE = 0.15
HOST_SHARE, HOST_S = 0.3, 0.002  # of the time between tokens; mean a token
REPEATED_SHARE = 0.4  # of the prompt tokens computed
OUTSIDE_SHARE, OUTSIDE_S = 0.3, 0.12  # of a probe's time, seen by its client and by the server
UNREADY_S = 0.5
SMALL_BATCH = {"cpu": 16}  # requests at one time; fewer leave a machine mostly idle
SMALL_BATCH_ELSEWHERE = 64
SURE = {"step records": 0.95, "/metrics": 0.8, "client only": 0.65}
LEAST_SURE = 0.5  # a cause that is less sure is no verdict


def diagnose(seen: Seen) -> Verdict:
    account = _account(seen)
    rules = _Rules(seen, account)
    # An engine that was not there explains all else, and comes first.
    causes = sorted(
        rules.causes(), key=lambda one: (one.cause != "cold_start", -one.weight * one.confidence)
    )
    sure = [one for one in causes if one.confidence >= LEAST_SURE]
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
        account.level,
        tuple(causes),
        account.ledger(),
        experiment(sure[0], seen, account) if sure else None,
        tuple(rules.notes()),
        rules.not_examined(),
        rules.figures(),
        seen.server,
        seen.seconds,
        account.requests,
    )


def _account(seen: Seen) -> Account:
    """Of the best evidence that there is."""
    if seen.steps is not None:
        return of.account_of_records(seen)
    return of.account_of_metrics(seen) or of.account_of_probes(seen)


class _Rules:
    def __init__(self, seen: Seen, account: Account) -> None:
        self.seen, self.account = seen, account
        self.outside = of.outside_of(seen)
        self.round_trip_s = statistics.median(seen.pings_s) if seen.pings_s else 0.0
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
        )
        found: dict[str, Cause] = {}
        for rule in rules:
            for cause in rule():
                found[cause.cause] = _merged(found.get(cause.cause), cause)
        return list(found.values())

    # ── before the first token ──────────────────────────────────────────────────────────────

    def _repeats(self) -> float:
        share = self.account.repeated_share
        own = self.account.start_share(of.OWN_PREFILL, of.BEHIND_PROMPTS, of.OTHERS_PROMPTS)
        return share if share >= REPEATED_SHARE and own * share >= START_SHARE else 0.0

    def _start(
        self, cause: str, seconds: float, *evidence: str, least: float = START_SHARE
    ) -> Iterator[Cause]:
        """A cause, if so many seconds of all requests' times to the first token are enough."""
        account = self.account
        share = seconds / account.start_s if account.start_s > 0 else 0.0
        mean_s = seconds / max(1, len(account.parts) if account.each else account.requests)
        if share >= least and mean_s >= START_S:
            said = (
                f"{duration(mean_s)} of {duration(account.ttft_s)} to the first token ({share:.0%})"
            )
            yield self._cause(cause, share, least, "start", said, *evidence)

    def _cause(
        self, cause: str, share: float, least: float, phase: str, *evidence: str, count: int = 0
    ) -> Cause:
        """`count`: of what was looked at; without it, of the requests."""
        account = self.account
        sure = SURE[account.level]
        sure *= 0.75 + 0.25 * min(1.0, (share - least) / least)
        if (count or account.requests) < 3:
            sure *= 0.7
        # What is known of steps counts for streams that have not ended, too.
        for_phase = account.start_s if phase == "start" else account.stream_s
        weight = share if count else share * for_phase / (account.total_s or 1.0)
        said = tuple(filter(None, evidence))
        return Cause(cause, round(sure, 2), said, round(share, 3), phase, round(weight, 4))

    def tokenizer(self) -> Iterator[Cause]:
        yield from self._start(
            "tokenizer_or_template",
            self.account.seconds(of.TOKENISING),
            "spent before the request reaches the queue: chat template, tokenizer, or the wait for "
            "a thread to run them",
        )

    def no_prefix_reuse(self) -> Iterator[Cause]:
        if not self.repeats:
            return
        account = self.account
        computed = account.seconds(of.OWN_PREFILL, of.BEHIND_PROMPTS, of.OTHERS_PROMPTS)
        yield from self._start(
            "no_prefix_reuse",
            computed * self.repeats,
            f"at least {self.repeats:.0%} of the prompt tokens computed stood at the beginning of "
            "an earlier prompt, too",
        )

    def queue(self) -> Iterator[Cause]:
        account, seen = self.account, self.seen
        if account.level != "step records":
            yield from self._queue_by_gauges()
            return
        behind = account.seconds(of.BEHIND_PROMPTS, of.OTHERS_PROMPTS) * (1 - self.repeats)
        longest = max((one["num_prompt"] - one["num_cached"] for one in seen.requests), default=0)
        yield from self._start(
            "queueing_behind_prefills",
            behind,
            f"meanwhile the prompts of others were computed, the longest {longest:,} tokens",
            least=BEHIND_SHARE,
        )
        full = seen.seats is not None and not self._is_small(seen.seats)
        yield from self._start(
            "overloaded" if full else "batch_too_small",
            account.seconds(of.NO_SEAT),
            f"all {seen.seats} seats (--max-num-seqs) were taken, and the KV cache had room",
        )
        yield from self._start(
            "kv_pressure",
            account.seconds(of.NO_KV_ROOM),
            f"the KV cache ({seen.limits.get('kv_tokens', 0):,} tokens) had no room for them",
        )

    def _is_small(self, seats: float) -> bool:
        device = str(self.seen.limits.get("device", "")).partition(":")[0]
        return seats < SMALL_BATCH.get(device, SMALL_BATCH_ELSEWHERE)

    def _queue_by_gauges(self) -> Iterator[Cause]:
        """What is waited for, where a server only says how many wait and run."""
        account, looks = self.account, self.seen.looks
        away_s = self.round_trip_s * len(account.parts)
        waited = account.seconds(of.QUEUE) + max(0.0, account.seconds(of.BEFORE_PREFILL) - away_s)
        queued = [look for look in looks if look.waiting]
        running = [look.running or 0.0 for look in queued]
        usage = statistics.median([look.kv_usage or 0.0 for look in queued] or [0.0])
        preempted = change(self.seen.before, self.seen.after, "preemptions")
        said = f"requests waited in {len(queued)} of {len(looks)} looks at the server"
        if usage >= of.FULL_KV or (queued and preempted):
            yield from self._start(
                "kv_pressure", waited, said, f"the KV cache was {usage:.0%} full"
            )
            return
        seats = self.seen.seats or (max(running) if running else 0)
        taken = sum(one >= seats for one in running)
        if queued and len(queued) >= 0.3 * len(looks) and taken >= 0.7 * len(queued):
            name = "batch_too_small" if self._is_small(seats) else "overloaded"
            yield from self._start(name, waited, f"{said}, while {seats:g} ran: all that may")
        elif self._others_prefill() >= 0.3:
            said = f"prompts were computed in {self._others_prefill():.0%} of the time"
            yield from self._start("queueing_behind_prefills", waited, said)

    def _others_prefill(self) -> float:
        prefill = change(self.seen.before, self.seen.after, "prefill_s")
        return (prefill or 0.0) / self.seen.seconds if self.seen.seconds else 0.0

    def cold_start(self) -> Iterator[Cause]:
        seen = self.seen
        restarts = 0.0
        if seen.before is not None and seen.after is not None:
            name = "twostroke:engine_restarts_total"
            restarts = seen.after.series.get(name, 0.0) - seen.before.series.get(name, 0.0)
        if seen.unready_s < UNREADY_S and not restarts:
            return
        share = seen.unready_s / max(seen.seconds + seen.unready_s, 1e-9)
        evidence = [f"the engine was not up for {duration(seen.unready_s)}"] * bool(seen.unready_s)
        if restarts:
            evidence.append(f"{restarts:.0f} times an engine that had died was started again")
        yield Cause("cold_start", SURE["step records"], tuple(evidence), round(share, 3), "start")

    # ── between the client and the server ───────────────────────────────────────────────────

    def client_or_network(self) -> Iterator[Cause]:
        outside = self.outside
        if outside is None:
            if self.round_trip_s >= OUTSIDE_S and len(self.seen.pings_s) >= 3:
                said = f"a round trip to /health takes {duration(self.round_trip_s)}"
                if self.account.ttft_s and self.round_trip_s > OUTSIDE_SHARE * self.account.ttft_s:
                    share = min(1.0, self.round_trip_s / self.account.ttft_s)
                    yield self._cause("client_or_network", share, OUTSIDE_SHARE, "start", said)
            return
        share = outside.start_s / outside.ttft_s if outside.ttft_s else 0.0
        round_trip = (
            f"a round trip to /health takes {duration(self.round_trip_s)}"
            if self.seen.pings_s
            else ""
        )
        if share >= OUTSIDE_SHARE and outside.start_s >= OUTSIDE_S:
            said = (
                f"the first token of {outside.count} probes came {duration(outside.start_s)} later "
                f"here than the server wrote it ({share:.0%} of their time to the first token)"
            )
            yield self._cause("client_or_network", share, OUTSIDE_SHARE, "start", said, round_trip)
        share = outside.stream_s / outside.span_s if outside.span_s else 0.0
        if share >= OUTSIDE_SHARE and outside.stream_s >= OUTSIDE_S:
            said = (
                f"their tokens took {duration(outside.stream_s)} longer to arrive here than to be "
                f"written ({share:.0%} of the time between the first and the last)"
            )
            yield self._cause("client_or_network", share, OUTSIDE_SHARE, "stream", said, round_trip)

    # ── between tokens ──────────────────────────────────────────────────────────────────────

    def kv_preemption(self) -> Iterator[Cause]:
        account = self.account
        share, waited = account.stream_share(of.PREEMPTION), account.kv_waited_share
        if share >= PREEMPTION_SHARE:
            said = (
                f"{share:.0%} of the time between tokens was lost to {account.preempted} "
                "preemptions"
            )
            yield self._cause("kv_pressure", share, PREEMPTION_SHARE, "stream", said)
        if waited >= PREEMPTION_SHARE and account.preempted:
            said = (
                f"{account.preempted} requests lost their blocks to others, and requests waited "
                f"for blocks for {waited:.0%} of their time"
            )
            count = account.gaps
            yield self._cause("kv_pressure", waited, PREEMPTION_SHARE, "stream", said, count=count)
        if account.level != "step records":
            preempted = change(self.seen.before, self.seen.after, "preemptions") or 0.0
            if preempted >= 2:
                said = f"{preempted:.0f} requests were sent back for want of KV blocks"
                yield self._cause("kv_pressure", 0.3, PREEMPTION_SHARE, "stream", said)

    def prefill_starves(self) -> Iterator[Cause]:
        account = self.account
        share = account.stalled_share
        if account.level != "step records" and self._others_prefill() < 0.1:
            return  # streams stand still, and not because of prompts
        if share >= STALLED_SHARE:
            said = (
                f"{share:.0%} of the time between tokens passed in gaps at least 10 times as long "
                f"as usual, the longest {duration(account.worst_gap_s)}; the usual gap is "
                f"{duration(account.gap_s)}"
            )
            yield self._cause(
                "prefill_starves_decode", share, STALLED_SHARE, "stream", said, count=account.gaps
            )
            return
        share = account.stream_share(of.OTHERS_PREFILL)
        if share >= PREFILL_SHARE and account.stream_s >= STREAMS_SHARE * account.total_s:
            said = f"{share:.0%} of the time between tokens went into the prompts of others"
            yield self._cause("prefill_starves_decode", share, PREFILL_SHARE, "stream", said)

    def host_bound(self) -> Iterator[Cause]:
        account = self.account
        share = account.stream_share(of.HOST)
        tokens = max(1.0, account.output_tokens * len(account.parts))
        each_s = account.seconds(of.HOST) / tokens
        if share >= HOST_SHARE and each_s >= HOST_S:
            said = (
                f"{share:.0%} of the time between tokens the device had nothing to do: "
                f"{duration(each_s)} a token"
            )
            yield self._cause("host_bound_decode", share, HOST_SHARE, "stream", said)

    # ── what is no fault, and what could not be told ────────────────────────────────────────

    def unexplained_start(self) -> bool:
        """Slow to start, for a reason that no rule knows."""
        account = self.account
        if account.level == "step records":
            seconds = account.seconds(of.NO_STEP)
            mean_s = seconds / max(1, len(account.parts))
            return account.start_share(of.NO_STEP) >= START_SHARE and mean_s >= START_S
        good = [one for one in self.seen.probes if one.ok]
        if not good:
            return bool(self.seen.stuck_s)
        ttft = statistics.median(one.ttft_s for one in good)
        tpots = [tpot for one in good if (tpot := one.tpot_s) is not None]
        return bool(self.seen.stuck_s) or is_stall(
            ttft, statistics.median(tpots) if tpots else ttft
        )

    def notes(self) -> Iterator[str]:
        account, seen = self.account, self.seen
        if not account.requests:
            yield "No request ended while we looked; look longer (--for), or let it probe."
        elif not seen.traffic:
            yield f"There was no traffic but {len(seen.probes)} probes of the doctor's own."
        if account.total_s:
            decode = account.seconds(of.DECODE) / account.total_s
            if decode >= 0.6:
                yield (
                    f"{NOTES['output_bound']} ({decode:.0%} is decode, {account.output_tokens:.0f} "
                    "tokens a request)"
                )
            own = account.seconds(of.OWN_PREFILL) / account.total_s
            if own >= 0.6:
                yield f"{NOTES['prompt_bound']} ({own:.0%})"
        used = [look.kv_usage for look in seen.looks if look.kv_usage is not None]
        if used and max(used) < 0.3:
            yield f"{NOTES['memory_reserved']} (at most {max(used):.1%} was in use)"
        failed = [one for one in seen.probes if not one.ok]
        if failed:
            yield f"{len(failed)} of {len(seen.probes)} probes failed: {failed[0].error}"
        if seen.stuck_s:
            yield f"A probe had no answer after {duration(max(seen.stuck_s))}."

    def not_examined(self) -> dict[str, str]:
        found = {
            "slow_interconnect": "no server tells how long its devices wait for each other; "
            "profile it (`twostroke profile`, nsys)"
        }
        if self.account.level != "step records":
            why = f"needs step records; the evidence here is {self.account.level}"
            for name in ("host_bound_decode", "tokenizer_or_template", "no_prefix_reuse"):
                found[name] = why
        if self.outside is None:
            found["client_or_network"] = (
                "only by the round trip to /health: needs probes, and a server that times them"
            )
        return found

    def figures(self) -> dict[str, float]:
        account, seen = self.account, self.seen
        found = {
            "requests": float(account.requests),
            "ttft_ms": 1e3 * account.ttft_s,
            "median_gap_ms": 1e3 * account.gap_s,
            "worst_gap_ms": 1e3 * account.worst_gap_s,
            "stalled_share": account.stalled_share,
            "repeated_prompt_share": account.repeated_share,
            "round_trip_ms": 1e3 * self.round_trip_s,
            "unready_s": seen.unready_s,
            "most_running": max((look.running or 0.0 for look in seen.looks), default=0.0),
            "most_waiting": max((look.waiting or 0.0 for look in seen.looks), default=0.0),
        }
        if self.outside is not None:
            found["outside_start_ms"] = 1e3 * self.outside.start_s
            found["outside_stream_ms"] = 1e3 * self.outside.stream_s
        return found


def _merged(before: Cause | None, now: Cause) -> Cause:
    """The same cause found in both phases."""
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
