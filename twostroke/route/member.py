"""`Member`: one of several engines; `Placed`: where a request stands that is in one of them."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Protocol

from twostroke.config import EngineConfig
from twostroke.engine.child import Child
from twostroke.engine.supervised import SupervisedEngine
from twostroke.engine.wire import FetchedOffer, Ready
from twostroke.kv.transfer import Offer
from twostroke.observe.record import RequestRecord, StepRecord
from twostroke.observe.totals import TransferTotals
from twostroke.request import EngineRequest
from twostroke.route.router import EngineState
from twostroke.sched.scheduler import Update


class Owner(Protocol):
    """Whoever knows the requests."""

    def on_updates(self, member: Member, updates: list[Update]) -> None: ...

    def on_refused(self, member: Member, names: list[str], reason: Exception) -> None: ...

    def on_fetched(self, member: Member, name: str, fetched: FetchedOffer) -> None: ...

    def on_death(self, member: Member, reason: str) -> None: ...

    def on_restart(self, member: Member) -> None: ...

    def on_end(self, member: Member, reason: str) -> None: ...


class Member(SupervisedEngine):
    asleep = False
    transfers: TransferTotals | None

    def __init__(
        self,
        owner: Owner,
        state: EngineState,
        config: EngineConfig,
        builder: str,
        child: Child,
        ready: Ready,
        hang_timeout_s: float,
        restart_limit: int,
    ) -> None:
        super().__init__(config, builder, child, ready, hang_timeout_s, restart_limit)
        self.state, self._owner = state, owner
        self.transfers = self._fetched = TransferTotals()
        self.records.listeners.append(self)

    @property
    def name(self) -> str:
        return self.state.name

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
        totals = self._fetched
        totals.num_bytes += fetched.num_bytes
        totals.seconds += fetched.seconds
        totals.fetched += not fetched.problem
        totals.failed += bool(fetched.problem)
        self._owner.on_fetched(self, name, fetched)

    def on_death(self, reason: str) -> None:
        self.state.up = False
        self.state.forget_prompts()
        self._owner.on_death(self, reason)

    def on_restart(self) -> None:
        self.state.up = True
        self._owner.on_restart(self)

    def on_end(self, reason: str) -> None:
        self.state.up = False
        self._owner.on_end(self, reason)


@dataclass(slots=True, eq=False)
class Standing:
    """An offer that a request's next engine has not fetched yet."""

    member: Member  # who made it
    offer: Offer


@dataclass(slots=True, eq=False)
class Placed:
    """One continuation of a request, from its acceptance to its end."""

    given: EngineRequest  # as it was accepted
    member: Member | None = None  # who has it; None: nobody is up
    queued: int = 0  # prompt tokens that are counted as queued there, until its first token
    attempts: int = 0  # engines that died with it
    record: RequestRecord | None = None  # of the engines that had it before
    standing: Standing | None = None
    handed_over_s: float = 0.0  # when; 0: its next engine has written a token since
    last_s: float = 0.0  # when its last token came
    route: list[str] = field(default_factory=list)  # what was decided, and why
