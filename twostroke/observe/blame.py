"""`GapLedger`: the causes of each gap between two tokens of a stream.

    committed    n-1                                                        n
                  │  host  │ drafting │ communication │    prefill    │  decode   │
                  │        │          └────────────── device_s ────────────────┘
                  │        └── steps of a draft model
                  └── planning, committing, stalls

Nearly all streams with a token in step n also had one in step n-1. They share one gap, the time
between the two commits, which is split once for all of them. The time of ranks in collectives is
subtracted from both phases in proportion to their times. Streams that were preempted, or that had
no free block for a while, are handled one by one: the executor's time in steps without a slot for
them counts as preemption. The causes of a gap always add up to the gap.

For each of the last `KEPT` steps the ledger has the sums since the engine's start. So the total of
a stream is one subtraction, however long the stream is. This module does not import torch.
"""

from __future__ import annotations

from array import array
from bisect import bisect_left, bisect_right
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from math import nan
from operator import sub

from twostroke.observe.record import NO_TIME, Causes, RequestRecord
from twostroke.plan import StepResult
from twostroke.sched.step import StepInFlight
from twostroke.sched.steptime import StepTimes

KEPT = 1 << 16  # steps whose sums are kept; an earlier step counts as the oldest of these


@dataclass(slots=True)
class StreamAccount:
    """The account of a running stream: the sums at its first token, and the time that preemption
    has taken since."""

    decode: float
    prefill: float
    host: float
    communication: float
    drafting: float
    lost_decode: float = 0.0
    lost_prefill: float = 0.0
    lost_communication: float = 0.0
    lost_drafting: float = 0.0
    late: dict[int, Causes] = field(default_factory=dict)  # gaps of this stream alone, by step


class GapLedger:
    def __init__(self, times: StepTimes) -> None:
        self.times = times
        self._accounts: dict[str, StreamAccount] = {}
        self._decode, self._prefill, self._host, self._communication, self._drafting = (
            self._sums
        ) = tuple(array("d", bytes(8 * KEPT)) for _ in range(5))
        self._step = -1  # the newest step that has committed
        self._committed_s = 0.0

    def add_step(
        self,
        step: StepInFlight,
        result: StepResult,
        committed_s: float,
        decode_share: float,
    ) -> Causes:
        """Return the time since the previous commit, by cause. `decode_share`: the share of decode
        in a mixed step, used until a step without prefill has been timed."""
        plan, device_s = step.plan, result.device_s
        gap_s = committed_s - (self._committed_s or step.planned_s)
        busy_s = min(device_s, gap_s)
        decode_s = busy_s
        if plan.prefill_work.tokens:
            decode, decode_s = plan.decode_work, 0.0
            if decode.rows:
                alone_s = self.times.decode_only(decode)
                decode_s = busy_s * decode_share if alone_s is None else min(alone_s, busy_s)
        prefill_s = busy_s - decode_s
        model_s = 0.0 if step.drafts is None else step.drafts.model_s
        drafting_s = min(model_s, gap_s - busy_s)
        host_s = gap_s - busy_s - drafting_s
        causes = Causes(decode_s, prefill_s, 0.0, host_s, drafting=drafting_s)
        if result.comm_s and busy_s > 0.0:
            share = min(result.comm_s / device_s, 1.0)
            rest = 1.0 - share
            causes = causes._replace(
                decode=decode_s * rest, prefill=prefill_s * rest, communication=busy_s * share
            )
        self._add_sums(plan.step, causes)
        self._committed_s = committed_s
        return causes

    def _add_sums(self, step: int, causes: Causes) -> None:
        last = self._step
        at, before = step % KEPT, last % KEPT
        for skipped in range(max(last + 1, step - KEPT), step):  # steps that failed
            for sums in self._sums:
                sums[skipped % KEPT] = sums[before] if last >= 0 else 0.0
        self._decode[at] = self._decode[before] + causes.decode
        self._prefill[at] = self._prefill[before] + causes.prefill
        self._host[at] = self._host[before] + causes.host
        self._communication[at] = self._communication[before] + causes.communication
        self._drafting[at] = self._drafting[before] + causes.drafting
        self._step = step

    def open(self, record: RequestRecord) -> None:
        """Open an account for a stream whose first token the newest step wrote."""
        at = self._step % KEPT
        decode, prefill, host, communication, drafting = (sums[at] for sums in self._sums)
        account = StreamAccount(decode, prefill, host, communication, drafting)
        self._accounts[record.request_id] = account

    def late(self, record: RequestRecord, has_slot: bool) -> Causes:
        """Return the causes of the newest gap of a stream that got no token from the previous step,
        or that was recomputed. `has_slot`: the stream decoded in the newest step."""
        step = record.token_step[-1]
        at = bisect_left(record.token_step, step)  # the first of the newest step's tokens
        before = record.token_step[at - 1]
        gap = record.token_s[at] - record.token_s[at - 1]
        first, last = self._index(before), self._index(step - 1 if has_slot else step)
        lost_decode = self._decode[last] - self._decode[first]
        lost_prefill = self._prefill[last] - self._prefill[first]
        account = self._accounts[record.request_id]
        account.lost_decode += lost_decode
        account.lost_prefill += lost_prefill
        account.lost_communication += self._communication[last] - self._communication[first]
        account.lost_drafting += self._drafting[last] - self._drafting[first]
        at = step % KEPT
        own = (self._decode[at] - self._decode[last], self._prefill[at] - self._prefill[last])
        comm = self._communication[at] - self._communication[last]
        drafting = self._drafting[at] - self._drafting[last]
        host = self._host[at] - self._host[first]
        # Time whose sums are no longer kept counts as preemption, the reason for such long gaps.
        lost = max(0.0, gap - sum(own) - host - comm - drafting)
        causes = Causes(*own, lost, host, comm, drafting)
        account.late[step] = causes
        return causes

    def close(self, record: RequestRecord) -> None:
        """Write the sums and the worst gap of a request that has ended into its record."""
        account = self._accounts.pop(record.request_id, None)
        if account is None:
            return
        at = self._index(record.token_step[-1])
        record.gaps = Causes(
            self._decode[at] - account.decode - account.lost_decode,
            self._prefill[at] - account.prefill - account.lost_prefill,
            account.lost_decode
            + account.lost_prefill
            + account.lost_communication
            + account.lost_drafting,
            self._host[at] - account.host,
            self._communication[at] - account.communication - account.lost_communication,
            self._drafting[at] - account.drafting - account.lost_drafting,
        )
        gaps = _differences(record.token_s)
        if gaps:
            record.worst_gap_s = max(gaps)
            step = record.token_step[gaps.index(record.worst_gap_s) + 1]
            record.worst_gap = account.late.get(step) or self._causes(step)
        if record.gap_causes is not None:
            record.gap_causes = self._each_gap(record.token_step, account.late)

    def _each_gap(self, steps: Sequence[int], late: Mapping[int, Causes]) -> array[float]:
        """Return the causes of each gap between tokens of these steps, six numbers a gap. Made
        column by column: gap by gap would take ten times as long."""
        slots = [step % KEPT for step in steps[1:]]
        size = len(NO_TIME)
        found = array("f", bytes(4 * size * len(slots)))
        for column, sums in zip((0, 1, 3, 4, 5), self._sums, strict=True):
            found[column::size] = array("f", [sums[at] - sums[at - 1] for at in slots])
        forgotten = bisect_right(steps, self._step - KEPT + 1, 1) - 1
        found[: size * forgotten] = array("f", [nan] * (size * forgotten))
        for step, causes in late.items():
            at = size * (bisect_left(steps, step) - 1)
            found[at : at + size] = array("f", causes)
        for n, (before, step) in enumerate(pairwise(steps)):
            if before == step:  # drafts: the step wrote several tokens at once
                found[size * n : size * (n + 1)] = array("f", NO_TIME)
        return found

    def _causes(self, step: int) -> Causes | None:
        if step <= max(self._step - KEPT + 1, 0):
            return None
        at, before = step % KEPT, (step - 1) % KEPT
        decode, prefill, host, comm, drafting = (one[at] - one[before] for one in self._sums)
        return Causes(decode, prefill, 0.0, host, comm, drafting)

    def _index(self, step: int) -> int:
        return max(step, self._step - KEPT + 1) % KEPT


def _differences(times: Sequence[float]) -> list[float]:
    return list(map(sub, times[1:], times))
