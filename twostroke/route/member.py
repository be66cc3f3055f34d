"""`Member`: one of several engines; `RoutedRequest`: a request and the engine that has it."""

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
    """Whoever knows the requests."""

    def on_updates(self, member: Member, updates: list[Update]) -> None: ...

    def on_refused(self, member: Member, names: list[str], reason: Exception) -> None: ...

    def on_fetched(self, member: Member, name: str, fetched: FetchedOffer) -> None: ...

    def on_fetched_ahead(self, member: Member, handle: int, fetched: FetchedOffer) -> None: ...

    def on_death(self, member: Member, reason: str) -> None: ...

    def on_restart(self, member: Member) -> None: ...

    def on_end(self, member: Member, reason: str) -> None: ...

    def new_first_step(self) -> int: ...


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
        self.leaving = False  # it is sent nothing any more, and is removed once nothing is in it
        self.transfers = self._fetched = TransferTotals()
        self.totals = totals = Totals(ready.info.max_model_len)
        self.records.listeners += [totals, self]
        self.first_step = owner.new_first_step()  # that the others' are told apart by
        self._tell_state()

    def _tell_state(self) -> None:
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
        where = self.host, self.pid
        return MemberStatus(self.name, self.phase, state, *where, self.num_restarts, num_requests)

    def leave(self) -> None:
        self.leaving, self.state.up = True, False

    def add_step(self, record: StepRecord) -> None:
        self.state.add_step(record)

    def add_request(self, record: RequestRecord) -> None: ...

    # ── to those who know the requests ──────────────────────────────────────────────────────

    @property
    def num_open(self) -> int:
        return 0  # they go on elsewhere

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
        self.first_step = self._owner.new_first_step()  # it counts from 0 again
        self._tell_state()
        self._owner.on_restart(self)

    def on_end(self, reason: str) -> None:
        self.state.up = False
        self._owner.on_end(self, reason)


@dataclass(slots=True, eq=False)
class ActiveOffer:
    """An offer that a request's next engine has not fetched yet."""

    member: Member  # who made it
    offer: Offer


@dataclass(slots=True, eq=False)
class RoutedRequest:
    """One continuation of a request, from its acceptance to its end."""

    given: EngineRequest  # as it was accepted
    member: Member | None = None  # who has it; None: nobody is up
    queued: Queued = NOTHING  # what is counted as queued there, until its first token
    attempts: int = 0  # engines that died with it
    record: RequestRecord | None = None  # of the engines that had it before
    standing: ActiveOffer | None = None
    ahead: Member | None = None  # who fetches its blocks while the rest is computed
    promised: bool = False  # it is counted as one that will come there
    ahead_bytes: int = 0  # that have come there
    handed_over_s: float = 0.0  # when; 0: its next engine has written a token since
    fetch_s: float = 0.0  # what its next engine took to fetch its blocks
    last_s: float = 0.0  # when its last token came
    route: list[str] = field(default_factory=list)  # what was decided, and why
    stays: list[EngineSpan] = field(default_factory=list)
