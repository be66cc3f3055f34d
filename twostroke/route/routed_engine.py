"""`RoutedEngine`: several engines behind the interface of one. No torch.

submit, abort ─▶ RoutedRequests ─▶ Router ─▶ a member: an engine process (`member.py`)
                 (`routed_requests.py`)         │ updates, deaths
listeners ◀──── OutputProcessor ◀───────────────┘
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Mapping, Sequence
from dataclasses import replace
from itertools import count

from twostroke.engine.api import EngineInfo, EngineLoad, EngineStatus, PoolsStatus
from twostroke.engine.input_processor import InputProcessor
from twostroke.engine.output_processor import RequestState
from twostroke.engine.process_client import ProcessClient
from twostroke.engine.remote import limits_of, open_tokenizer_and_template
from twostroke.engine.spawn import DEFAULT_BUILDER, Spawned
from twostroke.engine.supervised import HANG_TIMEOUT_S, MAX_QUICK_DEATHS
from twostroke.engine.wire import FetchedOffer
from twostroke.errors import RequestError
from twostroke.kv.cache import KVUsage
from twostroke.model.text.tokenizer import Tokenizer
from twostroke.network_auth import add_counts
from twostroke.observe.record import ENGINE_STEPS, Records, RequestRecord, StepRecord
from twostroke.observe.totals import TransferTotals
from twostroke.request import EngineRequest
from twostroke.route.member import Member
from twostroke.route.pool_settings import EnginePlacement, LocalPlacement, PooledEngine
from twostroke.route.routed_requests import RoutedRequests
from twostroke.route.router import EngineState, Role
from twostroke.route.scaling import Scaling, StartedEngine, name_of, start_engines
from twostroke.sched.updates import Update

ROLES = {name_of(role): role for role in Role}

log = logging.getLogger(__name__)


class RoutedEngine(ProcessClient):
    """Start with `await RoutedEngine.start(engines)`; use as `async with`, or `await close()`.
    Everything else is called in the event loop that started it."""

    def __init__(
        self,
        input_processor: InputProcessor,
        seed: int,
        engines: Sequence[PooledEngine],
        placement: EnginePlacement,
        limits: tuple[float, int],
    ) -> None:
        """`limits`: `hang_timeout_s` and `restart_limit` of every engine."""
        super().__init__(input_processor, seed)
        self.records = Records()  # of all engines
        self.members: list[Member] = []  # replaced, never changed in place
        self.requests = RoutedRequests(self._outputs, self.records, self._some_ended.set)
        self._scaling = Scaling(self, engines, placement, limits[0])
        self._limits = limits
        self._first_steps = count(ENGINE_STEPS, ENGINE_STEPS)
        self._closing = False

    # ── start and stop ──────────────────────────────────────────────────────────────────────

    @classmethod
    async def start(
        cls,
        engines: Sequence[PooledEngine],
        builder: str = DEFAULT_BUILDER,
        spawned: Sequence[Spawned] | None = None,
        hang_timeout_s: float = HANG_TIMEOUT_S,
        restart_limit: int = MAX_QUICK_DEATHS,
        placement: EnginePlacement | None = None,
    ) -> RoutedEngine:
        """Start all engines. `spawned`: their processes, if they have been started already.
        `placement`: where they run, if not on this machine. See `RemoteEngine.start`."""
        config = engines[0].config
        if placement is None:
            names = (engine.name for engine in engines)
            placement = LocalPlacement(builder, dict(zip(names, spawned or (), strict=False)))
        text: list[tuple[Tokenizer | None, str | None]] = []
        started = await start_engines(
            engines,
            placement,
            hang_timeout_s,
            lambda: text.append(open_tokenizer_and_template(config)),
        )
        inputs = InputProcessor(*text[0], limits_of(started[0].ready.info))
        routed = cls(inputs, config.seed, engines, placement, (hang_timeout_s, restart_limit))
        routed.join(started)
        return routed

    async def _end_processes(self) -> None:
        self._closing = True
        await self._scaling.close()
        await asyncio.gather(*(member.stop() for member in self.members))

    # ── members ─────────────────────────────────────────────────────────────────────────────

    async def scale(self, counts: Mapping[str, int], drain_timeout_s: float) -> None:
        await self._scaling.scale({ROLES[name]: n for name, n in counts.items()}, drain_timeout_s)

    def pools(self) -> PoolsStatus:
        counts = {name_of(role): count for role, count in self._scaling.counts().items()}
        num_requests = self.requests.per_member()
        engines = [member.status(num_requests[member]) for member in self.members]
        return PoolsStatus(counts, self._scaling.active, engines)

    def join(self, started: Sequence[StartedEngine]) -> None:
        """Make started engines members."""
        joined = []
        for engine, launcher, child, ready in started:
            state = EngineState(engine.name, engine.role)
            member = Member(self, state, launcher, child, ready, *self._limits)
            member.records.listeners.append(_AllSteps(self.records, member))
            joined.append(member)
        self._set_members([*self.members, *joined])
        for member in joined:
            member.watch()
        self.requests.place_unplaced()

    def remove(self, member: Member) -> None:
        self._set_members([one for one in self.members if one is not member])
        self.requests.hand_overs.remove(member)

    def _set_members(self, members: list[Member]) -> None:
        self.members = members
        self.requests.set_members(members)
        self.input_processor.limits = limits_of(self.info)

    def num_in(self, member: Member) -> int:
        return self.requests.num_in(member)

    def move_all(self, member: Member) -> None:
        self.requests.move_all(member)

    def new_first_step(self) -> int:
        return next(self._first_steps)

    # ── all members together ────────────────────────────────────────────────────────────────

    async def sleep(self, drain: bool = False) -> None:
        raise RequestError("several engines cannot sleep; serve with one to use /sleep")

    async def start_profile(self) -> None:
        raise RequestError("several engines cannot be profiled; serve with one to use it")

    async def stop_profile(self) -> bytes:
        raise RequestError("several engines cannot be profiled; serve with one to use it")

    def reset_prefix_cache(self) -> None:
        for member in self.members:
            member.reset_prefix_cache()
            member.state.forget_prompts()

    async def audit(self) -> None:
        """Have every engine check its own bookkeeping; raises `EngineError` if one is wrong."""
        for member in self.members:
            await member.audit()

    @property
    def info(self) -> EngineInfo:  # type: ignore[override]
        """The properties of an engine that decodes, with the sizes of all such engines together."""
        decoding = [one for one in self.members if one.state.role is not Role.PREFILL]
        length = min(one.info.max_model_len for one in self.members)
        groups = zip(*(one.info.kv_groups for one in decoding), strict=True)
        return replace(
            decoding[0].info,
            max_model_len=length,
            max_num_seqs=sum(one.info.max_num_seqs for one in decoding),
            kv_tokens=sum(one.info.kv_tokens for one in decoding),
            kv_groups=tuple(
                each[0]._replace(num_blocks=sum(one.num_blocks for one in each)) for each in groups
            ),
            weight_bytes=sum(one.info.weight_bytes for one in self.members),
            kv_bytes=sum(one.info.kv_bytes for one in self.members),
            total_bytes=sum(one.info.total_bytes for one in self.members),
        )

    def transfers_between(self) -> Mapping[tuple[str, str], TransferTotals]:
        return self.requests.hand_overs.transfers()

    def each_engine(self) -> Mapping[str, EngineStatus]:
        return {member.name: member for member in self.members}

    @property
    def healthy(self) -> bool:
        return any(member.healthy for member in self.members)

    @property
    def num_restarts(self) -> int:  # type: ignore[override]
        return sum(member.num_restarts for member in self.members)

    @property
    def dropped(self) -> dict[str, int]:
        return add_counts(*(member.dropped for member in self.members))

    def load(self) -> EngineLoad:
        loads = [member.load() for member in self.members]
        return EngineLoad(
            self.requests.num_unplaced + sum(load.waiting for load in loads),
            sum(load.running for load in loads),
            KVUsage(*map(sum, zip(*(load.kv for load in loads), strict=True))),
        )

    # ── requests ────────────────────────────────────────────────────────────────────────────

    def _send(self, state: RequestState, requests: list[EngineRequest]) -> None:
        self.requests.add(requests)

    def _drop(self, state: RequestState) -> None:
        self.requests.forget(self._outputs.close(state))

    def _abort(self, state: RequestState) -> None:
        self.requests.abort(self._outputs.in_engine(state))

    # ── events of the members ───────────────────────────────────────────────────────────────

    def on_updates(self, member: Member, updates: list[Update]) -> None:
        self.requests.on_updates(member, updates)

    def on_refused(self, member: Member, names: list[str], reason: Exception) -> None:
        self.requests.on_refused(member, names, reason)

    def on_fetched(self, member: Member, name: str, fetched: FetchedOffer) -> None:
        self.requests.on_fetched(member, name, fetched)

    def on_fetched_ahead(self, member: Member, handle: int, fetched: FetchedOffer) -> None:
        self.requests.on_fetched_ahead(member, handle, fetched)

    def on_death(self, member: Member, reason: str) -> None:
        self.requests.on_death(member, reason)

    def on_restart(self, member: Member) -> None:
        self.input_processor.limits = limits_of(self.info)
        self.requests.place_unplaced()

    def on_end(self, member: Member, reason: str) -> None:
        if any(not one.given_up for one in self.members):
            if not self._closing:
                if not member.leaving:
                    log.warning("%s has stopped for good: %s", member.name, reason)
                self.requests.on_death(member, reason)
            return
        if not self.lost.done():
            self.lost.set_result(reason)
        self.requests.fail_all(reason)


class _AllSteps:
    """Passes the steps of one engine on to the records of all, with its name and numbers."""

    def __init__(self, records: Records, member: Member) -> None:
        self._records, self._member = records, member

    def add_step(self, record: StepRecord) -> None:
        number = self._member.first_step + record.step
        self._records.add_step(record._replace(step=number, engine=self._member.name))

    def add_request(self, record: RequestRecord) -> None: ...
