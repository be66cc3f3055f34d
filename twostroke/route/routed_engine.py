"""`RoutedEngine`: several engines behind the interface of one engine. It does not import torch.

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
from twostroke.kv.usage import KVUsage
from twostroke.model.text.tokenizer import Tokenizer
from twostroke.network_auth import add_counts
from twostroke.observe.record import ENGINE_STEPS, Records, RequestRecord, StepRecord
from twostroke.observe.totals import TransferTotals
from twostroke.request import EngineRequest
from twostroke.route.member import Member
from twostroke.route.pool_settings import EnginePlacement, LocalPlacement, PooledEngine
from twostroke.route.routed_requests import RoutedRequests
from twostroke.route.router import EngineState, Role
from twostroke.route.scaling import Scaling, StartedEngine, pool_name, start_engines
from twostroke.sched.updates import Update

ROLES = {pool_name(role): role for role in Role}

log = logging.getLogger(__name__)


class RoutedEngine(ProcessClient):
    """Several engines, each in a process of its own, behind one client.

    Create it with `await RoutedEngine.start(engines)`. Use it with `async with`, or call
    `await close()` at the end. Call all methods in the event loop that called `start`."""

    def __init__(
        self,
        input_processor: InputProcessor,
        seed: int,
        engines: Sequence[PooledEngine],
        placement: EnginePlacement,
        hang_timeout_s: float,
        restart_limit: int,
    ) -> None:
        super().__init__(input_processor, seed)
        self.records = Records()  # of all engines
        self.members: list[Member] = []  # replaced by a new list at each change
        self.requests = RoutedRequests(self._outputs, self.records, self._request_ended.set)
        self._scaling = Scaling(self, engines, placement, hang_timeout_s)
        self._hang_timeout_s, self._restart_limit = hang_timeout_s, restart_limit
        self._step_offsets = count(ENGINE_STEPS, ENGINE_STEPS)
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
        """Start all engines. `spawned`: their processes, if these have been started already.
        `placement`: decides where the engines run; None: on this machine. The other arguments are
        those of `RemoteEngine.start`."""
        config = engines[0].config
        if placement is None:
            names = (engine.name for engine in engines)
            placement = LocalPlacement(builder, dict(zip(names, spawned or (), strict=False)))
        opened: list[tuple[Tokenizer | None, str | None]] = []  # one entry, after `start_engines`
        started = await start_engines(
            engines,
            placement,
            hang_timeout_s,
            lambda: opened.append(open_tokenizer_and_template(config)),
        )
        inputs = InputProcessor(*opened[0], limits_of(started[0].ready.info))
        routed = cls(inputs, config.seed, engines, placement, hang_timeout_s, restart_limit)
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
        counts = {pool_name(role): count for role, count in self._scaling.counts().items()}
        num_by_member = self.requests.num_by_member()
        engines = [member.status(num_by_member[member]) for member in self.members]
        return PoolsStatus(counts, self._scaling.active, engines)

    def open_requests(self) -> list[EngineRequest]:
        return [routed.request for routed in self.requests.routed.values()]

    def join(self, started: Sequence[StartedEngine]) -> None:
        """Add started engines to the members."""
        joined = []
        for engine, launcher, child, ready in started:
            state = EngineState(engine.name, engine.role)
            limits = (self._hang_timeout_s, self._restart_limit)
            member = Member(self, state, launcher, child, ready, *limits)
            member.records.listeners.append(_StepForwarder(self.records, member))
            joined.append(member)
        self._set_members([*self.members, *joined])
        for member in joined:
            member.watch()
        self.requests.place_unplaced_requests()

    def remove(self, member: Member) -> None:
        self._set_members([other for other in self.members if other is not member])
        self.requests.hand_overs.remove_totals(member)

    def _set_members(self, members: list[Member]) -> None:
        self.members = members
        self.requests.set_members(members)
        self.input_processor.limits = limits_of(self.info)

    def num_requests_of(self, member: Member) -> int:
        return self.requests.num_requests_of(member)

    def move_requests_from(self, member: Member) -> None:
        self.requests.move_requests_from(member)

    def new_step_offset(self) -> int:
        """Return the number to add to the step numbers of a new process of an engine, so that step
        numbers are unique."""
        return next(self._step_offsets)

    # ── all members together ────────────────────────────────────────────────────────────────

    async def sleep(self, drain: bool = False) -> None:
        raise RequestError("sleep needs a server with one engine, and this server has several")

    async def start_profile(self) -> None:
        raise RequestError("profiling needs a server with one engine, and this server has several")

    async def stop_profile(self) -> bytes:
        raise RequestError("profiling needs a server with one engine, and this server has several")

    def reset_prefix_cache(self) -> None:
        for member in self.members:
            member.reset_prefix_cache()
            member.state.forget_prompts()

    async def audit(self) -> None:
        """Have every engine check its own bookkeeping. Raise `EngineError` if an engine finds an
        error."""
        for member in self.members:
            await member.audit()

    @property
    def info(self) -> EngineInfo:  # type: ignore[override]
        """The properties of the first engine that decodes, with these exceptions: `max_num_seqs`,
        `kv_tokens` and `kv_groups` are sums over the engines that decode, bytes are sums over all
        engines, and `max_model_len` is the smallest of all engines."""
        infos = [member.info for member in self.members]
        decoding = [member.info for member in self.members if member.state.role is not Role.PREFILL]
        same_groups = zip(*(info.kv_groups for info in decoding), strict=True)
        return replace(
            decoding[0],
            max_model_len=min(info.max_model_len for info in infos),
            max_num_seqs=sum(info.max_num_seqs for info in decoding),
            kv_tokens=sum(info.kv_tokens for info in decoding),
            kv_groups=tuple(
                groups[0]._replace(num_blocks=sum(group.num_blocks for group in groups))
                for groups in same_groups
            ),
            weight_bytes=sum(info.weight_bytes for info in infos),
            kv_bytes=sum(info.kv_bytes for info in infos),
            draft_bytes=sum(info.draft_bytes for info in infos),
            total_bytes=sum(info.total_bytes for info in infos),
        )

    def transfers_by_engine_pair(self) -> Mapping[tuple[str, str], TransferTotals]:
        return self.requests.hand_overs.transfers()

    def engines_by_name(self) -> Mapping[str, EngineStatus]:
        return {member.name: member for member in self.members}

    @property
    def healthy(self) -> bool:
        return any(member.healthy for member in self.members)

    @property
    def num_restarts(self) -> int:  # type: ignore[override]
        return sum(member.num_restarts for member in self.members)

    @property
    def dropped(self) -> dict[str, int]:
        """The number of messages between processes that were dropped, by reason."""
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
        """Remove a request that could not be sent to an engine. Its listener gets no output."""
        self.requests.forget(self._outputs.close(state))

    def _abort(self, state: RequestState) -> None:
        """Have the engines end a request. Its listener gets a last output."""
        self.requests.abort(self._outputs.ids_in_engine(state))

    # ── events of the members (`MemberOwner`) ───────────────────────────────────────────────

    def on_updates(self, member: Member, updates: list[Update]) -> None:
        self.requests.on_updates(member, updates)

    def on_refused(self, member: Member, request_ids: list[str], reason: Exception) -> None:
        self.requests.on_refused(member, request_ids, reason)

    def on_fetched(self, member: Member, request_id: str, fetched: FetchedOffer) -> None:
        self.requests.on_fetched(member, request_id, fetched)

    def on_fetched_ahead(self, member: Member, handle: int, fetched: FetchedOffer) -> None:
        self.requests.on_fetched_ahead(member, handle, fetched)

    def on_death(self, member: Member, reason: str) -> None:
        self.requests.on_death(member, reason)

    def on_restart(self, member: Member) -> None:
        self.input_processor.limits = limits_of(self.info)
        self.requests.place_unplaced_requests()

    def on_end(self, member: Member, reason: str) -> None:
        if any(not other.given_up for other in self.members):
            if not self._closing:
                if not member.leaving:
                    log.warning("%s has ended and is not started again: %s", member.name, reason)
                self.requests.on_death(member, reason)
            return
        if not self.stop_reason.done():
            self.stop_reason.set_result(reason)
        self.requests.fail_all(reason)


class _StepForwarder:
    """Copies the step records of one engine to the records of all engines. The copies have the
    engine's name and unique step numbers."""

    def __init__(self, records: Records, member: Member) -> None:
        self._records, self._member = records, member

    def add_step(self, record: StepRecord) -> None:
        number = self._member.step_offset + record.step
        self._records.add_step(record._replace(step=number, engine=self._member.name))

    def add_request(self, record: RequestRecord) -> None:
        """Do nothing: `RoutedRequests` adds the records of requests."""
