"""`Member`: one of several engines. `RoutedRequest`: a request and the engine that has it."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Protocol

from twostroke.engine.api import MemberStatus
from twostroke.engine.child import Child
from twostroke.engine.spawn import Launcher
from twostroke.engine.supervised import SupervisedEngine
from twostroke.engine.wire import FetchedOffer, Ready
from twostroke.kv.transfer import Offer
from twostroke.observe.record import EngineSpan, RequestRecord, StepRecord
from twostroke.observe.totals import Totals, TransferTotals
from twostroke.request import EngineRequest
from twostroke.route.router import NOTHING, EngineState, Queued, Role
from twostroke.sched.updates import Update


class MemberOwner(Protocol):
    """The client that the member belongs to."""

    def on_updates(self, member: Member, updates: list[Update]) -> None: ...

    def on_refused(self, member: Member, request_ids: list[str], reason: Exception) -> None: ...

    def on_fetched(self, member: Member, request_id: str, fetched: FetchedOffer) -> None:
        """The member has fetched the KV blocks of a request from another engine, or the fetch has
        failed (`fetched.problem`)."""

    def on_fetched_ahead(self, member: Member, handle: int, fetched: FetchedOffer) -> None:
        """The same for the blocks of a part of a prompt. `handle`: from `Member.fetch_ahead`."""

    def on_death(self, member: Member, reason: str) -> None:
        """The process has died with all its requests, and another process is being started."""

    def on_restart(self, member: Member) -> None:
        """The next process of the member is up."""

    def on_end(self, member: Member, reason: str) -> None:
        """The member has ended and is not started again (`Member.given_up`)."""

    def new_step_offset(self) -> int:
        """Return the number to add to the step numbers of a new process of an engine, so that step
        numbers are unique."""


class Member(SupervisedEngine):
    asleep = False
    totals: Totals | None
    transfers: TransferTotals | None

    def __init__(
        self,
        owner: MemberOwner,
        state: EngineState,
        launcher: Launcher,
        child: Child,
        ready: Ready,
        hang_timeout_s: float,
        restart_limit: int,
    ) -> None:
        super().__init__(launcher, child, ready, hang_timeout_s, restart_limit)
        self.state, self._owner = state, owner
        self.leaving = False  # True: gets no new requests, and is removed when it has none
        self.transfers = self._fetched = TransferTotals()
        self.totals = totals = Totals(ready.info.max_model_len)
        self.records.listeners += [totals, self]
        self.step_offset = owner.new_step_offset()  # added to the step numbers of the process
        self._update_state()

    def _update_state(self) -> None:
        info = self.info
        self.state.capacity_tokens = info.kv_tokens
        self.state.token_bytes = info.kv_bytes / info.kv_tokens if info.kv_tokens else 0.0

    @property
    def phase(self) -> str:
        role = self.state.role
        return "both" if role is Role.BOTH else str(role)

    @property
    def name(self) -> str:
        return self.state.name

    def status(self, num_requests: int) -> MemberStatus:
        state = "up"
        if not self.healthy:
            state = "stopped" if self.given_up else "down"
        elif self.leaving:
            state = "leaving"
        return MemberStatus(
            name=self.name,
            phase=self.phase,
            state=state,
            host=self.host,
            pid=self.pid,
            restarts=self.num_restarts,
            requests=num_requests,
        )

    def leave(self) -> None:
        self.leaving, self.state.up = True, False

    def add_step(self, record: StepRecord) -> None:
        self.state.add_step(record)

    def add_request(self, record: RequestRecord) -> None: ...

    # ── events of the engine, passed on to the owner ────────────────────────────────────────

    @property
    def num_open(self) -> int:
        return 0  # its requests continue in other engines

    def on_updates(self, updates: list[Update]) -> None:
        self._owner.on_updates(self, updates)

    def on_refused(self, names: list[str], reason: Exception) -> None:
        self._owner.on_refused(self, names, reason)

    def on_fetched(self, name: str, fetched: FetchedOffer) -> None:
        self._count_fetched(fetched)
        self._owner.on_fetched(self, name, fetched)

    def on_fetched_ahead(self, handle: int, fetched: FetchedOffer) -> None:
        if not fetched.problem:
            self._count_fetched(fetched)
        self._owner.on_fetched_ahead(self, handle, fetched)

    def _count_fetched(self, fetched: FetchedOffer) -> None:
        self._fetched.add(fetched.num_bytes, fetched.seconds, bool(fetched.problem))
        if not fetched.problem:
            self.state.add_fetch(fetched.num_bytes, fetched.seconds)

    def on_death(self, reason: str) -> None:
        self.state.up = False
        self.state.forget_prompts()
        self._owner.on_death(self, reason)

    def on_restart(self) -> None:
        self.state.up = not self.leaving
        self.step_offset = self._owner.new_step_offset()  # the new process counts from 0 again
        self._update_state()
        self._owner.on_restart(self)

    def on_end(self, reason: str) -> None:
        self.state.up = False
        self._owner.on_end(self, reason)


@dataclass(slots=True, eq=False)
class ActiveOffer:
    """An offer of KV blocks that the request's next engine has not fetched yet."""

    member: Member  # the engine that made the offer
    offer: Offer

    def release(self) -> None:
        self.member.release(self.offer.number)


@dataclass(slots=True, eq=False)
class RoutedRequest:
    """One continuation of a request, from its acceptance to its end."""

    request: EngineRequest  # as accepted
    member: Member | None = None  # the engine that has the request; None: it is in no engine
    queued: Queued = NOTHING  # its share of the member's queue, until its first token
    num_deaths: int = 0  # of engines while they ran this request
    record: RequestRecord | None = None  # of the previous engines
    offer: ActiveOffer | None = None  # of its blocks, when its prompt has been computed
    next_member: Member | None = None  # the engine that will continue the request
    promised: bool = False  # the request counts in `EngineState.promised` of `next_member`
    ahead_bytes: int = 0  # bytes of its blocks that `next_member` has fetched ahead
    handed_over_s: float = 0.0  # the time of the hand-over; 0 when a token has arrived since
    fetch_s: float = 0.0  # the duration of the last fetch
    last_s: float = 0.0  # the time at which its last token arrived
    route: list[str] = field(default_factory=list)  # the decisions and their reasons
    spans: list[EngineSpan] = field(default_factory=list)  # the engines that had the request
