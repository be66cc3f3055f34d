"""`RoutedEngine`: several engines as a server uses one. No torch.

    submit ─▶ Router ─▶ a prefill engine ── first token ─▶ the client
                              │ PREFILLED, with an offer of its blocks
                              ▼
              Router ─▶ a decode engine: fetches the blocks ── the other tokens ─▶ the client
                              │ fetched
                              └─▶ the prefill engine: release

Of a long prompt the decode engine is chosen, and fetches, while the prefill engine still computes:
each time that the blocks so far are offered (`_send_ahead`). They are in its prefix cache when the
request comes. If they are not, all that is lost is the time.

A request is in one engine at a time, and this side knows all that has been told of it. So whichever
engine dies, at whatever stage, it goes on in another from its last token: with its blocks, if they
are still offered, or computed again. What it draws depends on its seed and the position alone, so
that it writes the same. It ends with an error only when `MAX_ATTEMPTS` engines have died with it.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
from array import array
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from itertools import count
from time import monotonic

import msgspec

from twostroke.engine.api import EngineClient, EngineInfo, EngineLoad, EngineStatus, PoolsStatus
from twostroke.engine.input_processor import InputProcessor
from twostroke.engine.output_processor import OnError, OnOutput, OutputProcessor, RequestState
from twostroke.engine.remote import limits_of, open_text
from twostroke.engine.spawn import DEFAULT_BUILDER, Spawned
from twostroke.engine.supervised import HANG_TIMEOUT_S, MAX_QUICK_DEATHS
from twostroke.engine.wire import FetchedOffer
from twostroke.errors import EngineError, RequestError
from twostroke.kv.cache import KVUsage
from twostroke.model.text.tokenizer import Tokenizer
from twostroke.observe.record import (
    ENGINE_STEPS,
    EngineSpan,
    Records,
    RequestRecord,
    StepRecord,
    continued,
)
from twostroke.observe.totals import TransferTotals
from twostroke.request import EngineRequest, FinishReason, Resumed, SamplingParams
from twostroke.route.member import ActiveOffer, Member, RoutedRequest
from twostroke.route.pool_settings import Places, PooledEngine, ThisMachine
from twostroke.route.router import NOTHING, EngineState, Prompt, Queued, Role, Router
from twostroke.route.scaling import Scaling, StartedEngine, name_of, start_engines
from twostroke.sched.updates import Update

ROLES = {name_of(role): role for role in Role}
LONG_WAIT_S = 0.02  # for room at the engine that goes on with a request: told in its record
MAX_ATTEMPTS = 4  # engines that may die with one request: it may be what kills them

log = logging.getLogger(__name__)


class RoutedEngine(EngineClient):
    """Start with `await RoutedEngine.start(engines)`; use as `async with`, or `await close()`.
    Everything else is called in the event loop that started it."""

    def __init__(
        self,
        input_processor: InputProcessor,
        seed: int,
        engines: Sequence[PooledEngine],
        places: Places,
        limits: tuple[float, int],
    ) -> None:
        """`limits`: `hang_timeout_s` and `restart_limit` of every engine."""
        self.input_processor = input_processor
        self.records = Records()  # of all engines
        self.lost: asyncio.Future[str] = asyncio.get_running_loop().create_future()
        self.members: list[Member] = []  # another list after each change
        self._router = Router([])
        self._outputs = OutputProcessor(input_processor.tokenizer, seed)
        self._placed: dict[str, RoutedRequest] = {}  # by engine request, until its end
        self._some_ended = asyncio.Event()
        self._scaling = Scaling(self, engines, places, limits[0])
        self._limits = limits
        self._transfers: dict[tuple[str, str], TransferTotals] = {}  # by sender and receiver
        # What members fetch ahead, by what they call it.
        self._ahead: dict[tuple[Member, int], tuple[RoutedRequest, ActiveOffer]] = {}
        self._first_steps = count(ENGINE_STEPS, ENGINE_STEPS)
        self._closing = False

    # ── life ────────────────────────────────────────────────────────────────────────────────

    @classmethod
    async def start(
        cls,
        engines: Sequence[PooledEngine],
        builder: str = DEFAULT_BUILDER,
        spawned: Sequence[Spawned] | None = None,
        hang_timeout_s: float = HANG_TIMEOUT_S,
        restart_limit: int = MAX_QUICK_DEATHS,
        places: Places | None = None,
    ) -> RoutedEngine:
        """`spawned`: their processes, if they have been started already. `places`: where they run
        if not on this machine. The others: see `RemoteEngine.start`."""
        config = engines[0].config
        if places is None:
            names = (engine.name for engine in engines)
            places = ThisMachine(builder, dict(zip(names, spawned or (), strict=False)))
        text: list[tuple[Tokenizer | None, str | None]] = []
        started = await start_engines(
            engines, places, hang_timeout_s, lambda: text.append(open_text(config))
        )
        inputs = InputProcessor(*text[0], limits_of(started[0].ready.info))
        routed = cls(inputs, config.seed, engines, places, (hang_timeout_s, restart_limit))
        routed.join(started)
        return routed

    async def __aenter__(self) -> RoutedEngine:
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.close()

    async def close(self, drain: bool = False) -> None:
        """End all engines. Open requests are waited for (`drain`), or end with an `EngineError`."""
        if drain:
            await self.drain()
        self._closing = True
        await self._scaling.close()
        await asyncio.gather(*(member.stop() for member in self.members))

    async def drain(self, timeout_s: float | None = None) -> bool:
        """Wait until no request is left; False if some are, after so long."""
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(timeout_s):
                while self._outputs:
                    self._some_ended.clear()
                    await self._some_ended.wait()
        return not self._outputs

    # ── which engines there are ─────────────────────────────────────────────────────────────

    async def scale(self, counts: Mapping[str, int], drain_timeout_s: float) -> None:
        await self._scaling.scale({ROLES[name]: n for name, n in counts.items()}, drain_timeout_s)

    def pools(self) -> PoolsStatus:
        counts = {name_of(role): count for role, count in self._scaling.counts().items()}
        inside = Counter(placed.member for placed in self._placed.values())
        engines = [member.status(inside[member]) for member in self.members]
        return PoolsStatus(counts, self._scaling.active, engines)

    def join(self, started: Sequence[StartedEngine]) -> None:
        joined = []
        for engine, launcher, child, ready in started:
            state = EngineState(engine.name, engine.role)
            member = Member(self, state, launcher, child, ready, *self._limits)
            member.records.listeners.append(_AllSteps(self.records, member))
            joined.append(member)
        self._set_members([*self.members, *joined])
        for member in joined:
            member.watch()
        self._go_on_where_possible()

    def remove(self, member: Member) -> None:
        self._set_members([one for one in self.members if one is not member])
        for pair in [pair for pair in self._transfers if member.name in pair]:
            del self._transfers[pair]

    def _set_members(self, members: list[Member]) -> None:
        self.members = members
        self._router.engines = [member.state for member in members]
        self.input_processor.limits = limits_of(self.info)

    def num_in(self, member: Member) -> int:
        return sum(
            placed.member is member
            or (placed.standing is not None and placed.standing.member is member)
            for placed in self._placed.values()
        )

    def move_all(self, member: Member) -> None:
        for placed in list(self._placed.values()):
            if placed.member is member:
                member.forget(placed.given.request_id)
                self._take_from(placed, f"moved from {member.name}, which leaves")
                self._rescue(placed, "it left")

    # ── all at once ─────────────────────────────────────────────────────────────────────────

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

    # ── what they are together ──────────────────────────────────────────────────────────────

    @property
    def info(self) -> EngineInfo:  # type: ignore[override]
        """Of an engine that decodes, for as many requests as all of those together."""
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

    def new_first_step(self) -> int:
        return next(self._first_steps)

    def transfers_between(self) -> Mapping[tuple[str, str], TransferTotals]:
        return self._transfers

    def each_engine(self) -> Mapping[str, EngineStatus]:
        return {member.name: member for member in self.members}

    @property
    def healthy(self) -> bool:
        return any(member.healthy for member in self.members)

    @property
    def num_restarts(self) -> int:  # type: ignore[override]
        return sum(member.num_restarts for member in self.members)

    def load(self) -> EngineLoad:
        loads = [member.load() for member in self.members]
        unplaced = sum(placed.member is None for placed in self._placed.values())
        return EngineLoad(
            unplaced + sum(load.waiting for load in loads),
            sum(load.running for load in loads),
            KVUsage(*map(sum, zip(*(load.kv for load in loads), strict=True))),
        )

    # ── requests ────────────────────────────────────────────────────────────────────────────

    def submit(
        self,
        request: EngineRequest,
        on_output: OnOutput,
        on_error: OnError,
        request_id: str | None = None,
    ) -> RequestState:
        if self.lost.done():
            raise EngineError(f"all engines have stopped ({self.lost.result()}); start new ones")
        state, requests = self._outputs.add(request, request_id, on_output, on_error)
        placed = [RoutedRequest(one) for one in requests]
        self._placed |= {one.given.request_id: one for one in placed}
        try:
            self._begin(placed)
        except (ValueError, OverflowError, msgspec.MsgspecError) as error:
            self._forget(self._outputs.close(state))
            raise RequestError(f"the request cannot be sent to an engine: {error}") from None
        return state

    def leave(self, state: RequestState) -> None:
        if state in self._outputs:
            state.on_output = state.on_error = None
            self.abort(state.request_id)

    def abort(self, request_id: str) -> None:
        state = self._outputs.get(request_id)
        if state is not None and not state.aborted:
            state.aborted = True
            self._abort(self._outputs.in_engine(state))

    def _abort(self, names: Iterable[str]) -> None:
        nowhere = []
        for name in names:
            member = self._placed[name].member
            if member is None:
                nowhere.append(name)
            else:
                member.abort_all([name])
        self._end_here(nowhere)

    def _begin(self, placed: Sequence[RoutedRequest]) -> None:
        """Send the continuations of one request to the engine that is to prefill them."""
        given = placed[0].given
        placement = self._router.place(prompt_of(given))
        if placement is None:
            return  # the next engine that is up is sent them
        member = self._member(placement.engine)
        requests = [replace(one.given, hand_over=placement.hand_over) for one in placed]
        if member.add(requests):
            member.state.note_prompt(prompt_of(given))
            for n, one in enumerate(placed):
                one.route.append(placement.reason)
                # What the first has computed is cached for its siblings.
                self._settle(one, member, Queued(1) if n else placement.queued)

    def _settle(self, placed: RoutedRequest, member: Member, queued: Queued) -> None:
        """A member has been sent it."""
        placed.member, placed.queued = member, queued
        num_written = len(self._outputs.written(placed.given.request_id))
        placed.stays.append(EngineSpan(member.name, monotonic(), num_written))
        if queued.tokens:
            member.state.add_queued(queued)
        else:
            member.state.streams += 1

    def _unsettle(self, placed: RoutedRequest) -> None:
        """It has left the member that it was in."""
        if placed.member is not None:
            if placed.queued.tokens:
                placed.member.state.remove_queued(placed.queued)
            else:
                placed.member.state.streams -= 1
        placed.member, placed.queued = None, NOTHING
        self._promise(placed, placed.ahead, False)

    def _go_on(self, placed: RoutedRequest) -> None:
        """Place a request that is in no engine, from its last token on."""
        name = placed.given.request_id
        written = tuple(self._outputs.written(name))
        if not written:
            self._begin([placed])
            return
        standing = placed.standing
        offer = None if standing is None else standing.offer
        given = placed.given
        prompt = prompt_of(given, len(written))
        chosen = None if placed.ahead is None else placed.ahead.state
        target = self._router.place_decode(prompt, chosen) if offer is not None else None
        # What was asked of the prompt has been told.
        params = replace(given.params, prompt_logprobs=None)
        resumed = replace(given, params=params, progress=False)
        if offer is not None and target is not None and standing is not None:
            member, queued, hand_over = self._member(target.engine), NOTHING, False
            reason = target.reason
        else:
            self._release(placed)
            placement = self._router.place(prompt)
            if placement is None:
                return
            member, queued, hand_over = (
                self._member(placement.engine),
                placement.queued,
                placement.hand_over,
            )
            offer, reason = None, f"goes on after {len(written)} tokens, {placement.reason}"
        more = Resumed(written, placed.last_s, offer)
        if member.add([replace(resumed, hand_over=hand_over, resumed=more)]):
            member.state.note_prompt(prompt)
            placed.route.append(reason)
            self._settle(placed, member, queued)

    def _member(self, state: EngineState) -> Member:
        return next(member for member in self.members if member.state is state)

    def _release(self, placed: RoutedRequest) -> None:
        """What was offered of it is needed no more."""
        if placed.standing is not None:
            placed.standing.member.release(placed.standing.offer.number)
            placed.standing = None

    def _forget(self, names: Iterable[str]) -> None:
        """Requests that nobody waits for any more; an engine that still has one is to end it."""
        for name in names:
            placed = self._placed.pop(name)
            if placed.member is not None:
                placed.member.abort_all([name])
            self._unsettle(placed)
            self._release(placed)

    def _end_here(self, names: Iterable[str]) -> None:
        """Requests that are in no engine have been aborted."""
        ends = []
        for name in names:
            record = self._placed[name].record or self._new_record(name)
            record.finished_s, record.finish_reason = monotonic(), FinishReason.ABORT
            ends.append(Update(name, (), finish_reason=FinishReason.ABORT, record=record))
        if ends:
            self._deliver(None, ends)

    def _new_record(self, name: str) -> RequestRecord:
        given = self._placed[name].given
        record = RequestRecord(name, len(given.prompt_token_ids), given.received_s)
        record.n, record.family = given.params.n, given.family
        return record

    # ── what the engines say ────────────────────────────────────────────────────────────────

    def on_updates(self, member: Member, updates: list[Update]) -> None:
        now, handed_over, told = monotonic(), [], []
        for update in updates:
            if update.record is not None:
                number_steps(update.record, member.first_step)
            placed = self._placed.get(update.request_id)
            if placed is None:  # it has been forgotten here
                if update.offer is not None:
                    member.release(update.offer.number)
                told.append(update)
                continue
            if update.tokens:
                self._note_tokens(placed, now)
            if update.offer is not None and update.finish_reason is None:
                self._send_ahead(placed, ActiveOffer(member, update.offer))
            elif update.offer is not None:
                handed_over.append((placed, update))
                told.append(update._replace(finish_reason=None, record=None, offer=None))
            else:
                told.append(update)
        aborts = self._deliver(member, told)
        for placed, update in handed_over:
            self._hand_over(member, placed, update)
        self._abort(name for name in aborts if name in self._placed)

    def _note_tokens(self, placed: RoutedRequest, now: float) -> None:
        placed.last_s = now
        if placed.queued.tokens:
            assert placed.member is not None
            placed.member.state.remove_queued(placed.queued)
            placed.member.state.streams += 1
            placed.queued = NOTHING
        if placed.handed_over_s:
            self._router.note_hand_over(now - placed.handed_over_s, placed.fetch_s)
            placed.handed_over_s = 0.0

    def _deliver(self, member: Member | None, updates: list[Update]) -> list[str]:
        """Give updates to those who listen, and keep the records of ends. Returns what is to be
        aborted."""
        ended = []
        for n, update in enumerate(updates):
            if update.finish_reason is not None and update.request_id in self._placed:
                placed = self._placed.pop(update.request_id)
                self._note_end(placed, len(update.tokens))
                self._unsettle(placed)
                self._release(placed)
                record = update.record
                if record is not None:
                    if placed.record is not None and placed.record is not record:
                        record = continued(placed.record, record)
                    record.route, record.stays = "; ".join(placed.route), placed.stays
                    updates[n] = update._replace(record=record)
                    ended.append(record)
        _, aborts = self._outputs.process(updates)
        for record in ended:
            self.records.requests.append(record)
            self.records.tell_request(record)
            if member is not None:
                member.records.tell_request(record)
        if ended:
            self._some_ended.set()
        return aborts

    def _note_end(self, placed: RoutedRequest, newest: int) -> None:
        """`newest`: tokens that came with its end."""
        given = placed.given
        num_written = newest + len(self._outputs.written(given.request_id))
        self._router.note_answer(num_written)
        if placed.member is not None:  # what the next turn finds there
            length = len(given.prompt_token_ids) + num_written
            placed.member.state.note_session(given.session, length)

    def _hand_over(self, member: Member, placed: RoutedRequest, update: Update) -> None:
        """One has prefilled it; another goes on."""
        assert update.offer is not None
        assert update.record is not None
        name = update.request_id
        record = update.record if placed.record is None else continued(placed.record, update.record)
        placed.record, placed.standing = record, ActiveOffer(member, update.offer)
        placed.handed_over_s = placed.last_s
        self._unsettle(placed)
        state = self._outputs.of(name)
        if state.aborted or state.on_output is None or self._outputs.has_ended(name):
            self._end_here([name])
        else:
            self._go_on(placed)

    def _send_ahead(self, placed: RoutedRequest, standing: ActiveOffer) -> None:
        """One still prefills it; whoever will go on with it fetches what there is."""
        offer, handle, given = standing.offer, None, placed.given
        tokens = [*given.prompt_token_ids, *self._outputs.written(given.request_id)]
        if placed.ahead is None or not placed.ahead.state.up:
            self._promise(placed, None, False)
            target = self._router.place_decode(prompt_of(given))
            if target is not None:
                self._promise(placed, self._member(target.engine), True)
                placed.ahead_bytes = 0
        if placed.ahead is not None and offer.num_tokens < len(tokens):
            part = replace(
                given,
                request_id=f"{given.request_id} {offer.number}",
                prompt_token_ids=tokens[: offer.num_tokens],
                params=SamplingParams(),
                prompt=None,
                resumed=Resumed((tokens[offer.num_tokens],), placed.last_s, offer),
            )
            handle = placed.ahead.fetch_ahead(part)
        if placed.ahead is None or handle is None:
            standing.member.release(offer.number)
        else:
            self._ahead[placed.ahead, handle] = placed, standing

    def _promise(self, placed: RoutedRequest, to: Member | None, promised: bool) -> None:
        """Note who is to go on with it, and whether it is still to come there."""
        for member, change in ((placed.ahead, -placed.promised), (to, promised)):
            if member is not None:
                member.state.promised += change
        placed.ahead, placed.promised = to, promised

    def on_fetched_ahead(self, member: Member, handle: int, fetched: FetchedOffer) -> None:
        placed, standing = self._ahead.pop((member, handle))
        standing.member.release(standing.offer.number)
        if fetched.problem:  # nothing is lost by it
            log.info("%s has fetched nothing ahead: %s", member.name, fetched.problem)
            return
        self._count_transfer(standing, member, fetched)
        placed.ahead_bytes += fetched.num_bytes
        member.state.note_part(prompt_of(placed.given), standing.offer.num_tokens)

    def _count_transfer(self, standing: ActiveOffer, to: Member, fetched: FetchedOffer) -> None:
        totals = self._transfers.setdefault((standing.member.name, to.name), TransferTotals())
        totals.add(fetched.num_bytes, fetched.seconds, bool(fetched.problem))

    def on_fetched(self, member: Member, name: str, fetched: FetchedOffer) -> None:
        placed = self._placed.get(name)
        if placed is None:
            return
        if placed.standing is not None:
            self._count_transfer(placed.standing, member, fetched)
        self._release(placed)
        placed.fetch_s = fetched.seconds
        if not fetched.problem:
            placed.stays[-1] = placed.stays[-1]._replace(
                fetched_s=monotonic(), fetch_s=fetched.seconds, fetched_bytes=fetched.num_bytes
            )
        told = (
            f"{fetched.num_bytes / 1e6:.1f} MB fetched in {1e3 * fetched.seconds:.1f} ms by "
            f"{fetched.way}"
        )
        if placed.ahead is member and placed.ahead_bytes:
            told += f", {placed.ahead_bytes / 1e6:.1f} MB before, while it was prefilled"
        if fetched.problem:
            log.warning("%s computes a prompt again: %s", member.name, fetched.problem)
            told = f"computed again by {member.name} ({fetched.problem})"
            placed.handed_over_s = 0.0  # not what a hand-over takes
        if fetched.waited_s > LONG_WAIT_S:
            told += f", after {1e3 * fetched.waited_s:.0f} ms without room there"
        placed.route.append(told)

    def on_refused(self, member: Member, names: list[str], reason: Exception) -> None:
        if names[0] not in self._placed:
            return
        state = self._outputs.of(names[0])
        for name in names:
            self._unsettle(self._placed[name])
        if state.aborted:
            self._end_here(names)
        else:
            self._forget(self._outputs.close(state, reason))
        self._some_ended.set()

    # ── deaths ──────────────────────────────────────────────────────────────────────────────

    def on_death(self, member: Member, reason: str) -> None:
        """All that was in it goes on elsewhere."""
        for key in [key for key in self._ahead if key[0] is member]:
            _, standing = self._ahead.pop(key)
            standing.member.release(standing.offer.number)
        for placed in list(self._placed.values()):
            if placed.standing is not None and placed.standing.member is member:
                placed.standing = None  # whoever is to fetch it may still, or computes it again
            if placed.member is member:
                placed.attempts += 1
                self._take_from(placed, f"{member.name} died ({reason})")
                self._rescue(placed, reason)

    def _take_from(self, placed: RoutedRequest, why: str) -> None:
        """It is not in its engine any more, which has not told its record."""
        self._unsettle(placed)
        placed.route.append(why)
        self._keep_times(placed)

    def _rescue(self, placed: RoutedRequest, reason: str) -> None:
        name = placed.given.request_id
        if name not in self._placed:  # it went with a sibling
            return
        state = self._outputs.of(name)
        if state.aborted or state.on_output is None or self._outputs.has_ended(name):
            self._end_here([name])
        elif placed.attempts >= MAX_ATTEMPTS:
            error = f"{placed.attempts} engines died while this request was in them ({reason})"
            self._lose(state, error)
        else:
            self._go_on(placed)

    def _keep_times(self, placed: RoutedRequest) -> None:
        """The record of an engine that died went with it: what is known here takes its place."""
        name = placed.given.request_id
        record = placed.record = placed.record or self._new_record(name)
        missing = len(self._outputs.written(name)) - len(record.token_s)
        record.token_s.extend([placed.last_s] * missing)
        record.token_step.extend([-1] * missing)
        if record.token_s and not record.first_token_s:
            record.first_token_s = record.scheduled_s = record.token_s[0]

    def _lose(self, state: RequestState, error: str) -> None:
        names = self._outputs.in_engine(state)
        records = []
        for name in names:
            record = self._placed[name].record or self._new_record(name)
            record.finished_s, record.finish_reason = monotonic(), FinishReason.ERROR
            record.route = "; ".join(self._placed[name].route)
            record.stays = self._placed[name].stays
            records.append(record)
        self._forget(self._outputs.close(state, EngineError(error)))
        for record in records:
            self.records.requests.append(record)
            self.records.tell_request(record)
        self._some_ended.set()

    def on_restart(self, member: Member) -> None:
        self.input_processor.limits = limits_of(self.info)
        self._go_on_where_possible()

    def _go_on_where_possible(self) -> None:
        """An engine is up: to those that no engine has."""
        for placed in list(self._placed.values()):
            if placed.member is None:
                self._go_on(placed)

    def on_end(self, member: Member, reason: str) -> None:
        if any(not one.given_up for one in self.members):
            if not self._closing:
                if not member.leaving:
                    log.warning("%s has stopped for good: %s", member.name, reason)
                self.on_death(member, reason)
            return
        if not self.lost.done():
            self.lost.set_result(reason)
        for state in self._outputs:
            names = self._outputs.in_engine(state)
            if state.aborted or state.on_output is None or state.output.finished:
                self._end_here(names)
            else:
                self._lose(state, f"the engines have stopped ({reason})")
        self._some_ended.set()


def number_steps(record: RequestRecord, first_step: int) -> None:
    """An engine counts its own steps from 0; in what is told of all, they begin at `first_step`."""
    record.token_step = array("q", [first_step + step for step in record.token_step])
    record.chunks = [(when, first_step + step, *rest) for when, step, *rest in record.chunks]  # type: ignore[misc]


def prompt_of(given: EngineRequest, num_written: int = 0) -> Prompt:
    """What the router is told of a request that has written so many tokens."""
    most = given.params.max_tokens
    return Prompt(
        len(given.prompt_token_ids) + num_written,
        given.prefix_marks,
        given.session,
        None if most is None else max(1, most - num_written),
    )


class _AllSteps:
    """Passes one engine's steps on to the records of all, under its name and numbers."""

    def __init__(self, records: Records, member: Member) -> None:
        self._records, self._member = records, member

    def add_step(self, record: StepRecord) -> None:
        number = self._member.first_step + record.step
        self._records.add_step(record._replace(step=number, engine=self._member.name))

    def add_request(self, record: RequestRecord) -> None: ...
