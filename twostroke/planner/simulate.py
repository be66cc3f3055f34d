"""`simulate`: runs a trace on simulated engines behind the product's router, on a virtual clock.

Events are arrivals and ends of steps or of stretches of steps, in the order of their times. The
same trace, engines and seeds give the same times of every token.
"""

from __future__ import annotations

import heapq
import math
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from itertools import count
from typing import Any

from twostroke.kv.transfer import Offer
from twostroke.measure.load.traces import MOONCAKE_BLOCK, TraceRequest
from twostroke.observe.record import RequestRecord, continued
from twostroke.planner.engine import SimulatedEngine
from twostroke.planner.stretch import TOKEN
from twostroke.request import FIRST_MARK_TOKENS, EngineRequest, Resumed, SamplingParams
from twostroke.route.router import EngineState, Prompt, Queued, Router
from twostroke.sched.step import StepInFlight
from twostroke.sched.updates import Update

OWN_TOKENS = 1 << 31  # first token id that belongs to a single request


class VirtualClock:
    """The time of a simulation, in seconds from its start."""

    def __init__(self) -> None:
        self.now = 0.0

    def __call__(self) -> float:
        return self.now


def simulate(
    trace: Sequence[TraceRequest],
    clock: VirtualClock,
    engines: Sequence[SimulatedEngine],
    make_router: Callable[[list[EngineState]], Router] = Router,
    block_tokens: int = MOONCAKE_BLOCK,
    start_s: float = 0.0,
) -> list[RequestRecord]:
    """Return the records of the requests in the order of their ends. `block_tokens`: tokens of a
    block of the trace. `start_s`: time from the arrival of a request to its scheduler."""
    router = make_router([one.state for one in engines])
    found = Simulation(clock, engines, router, block_tokens, start_s).run(trace)
    assert len(found) == len(trace), "a simulated request has not ended"
    return found


@dataclass(slots=True, eq=False)
class SimulatedRequest:
    """The state of a request in the simulation."""

    request: EngineRequest
    queued: Queued | None  # the prompt's entry in its engine's queue; None during decode
    record: RequestRecord | None = None  # of the earlier engines
    decode_engine: SimulatedEngine | None = None  # the engine that fetches the KV blocks
    handed_over_s: float = 0.0  # time of the hand-over; 0 after the next token
    fetch_s: float = 0.0


class Simulation:
    """The events of one run.

    A hand-over works as in `route/routed_engine.py`: the prefill engine offers the KV blocks and a
    decode engine fetches them. The blocks of a long prompt are fetched while the rest is computed.
    """

    def __init__(
        self,
        clock: VirtualClock,
        engines: Sequence[SimulatedEngine],
        router: Router,
        block_tokens: int,
        start_s: float,
    ) -> None:
        self._clock, self._router = clock, router
        self._block_tokens, self._start_s = block_tokens, start_s
        self._engine_of = {id(one.state): one for one in engines}
        self._events: list[tuple[float, int, Callable[..., None], tuple[Any, ...]]] = []
        self._order = count()
        self._busy: set[int] = set()  # engines that plan nothing before a step or stretch ends
        self._deferred: set[int] = set()  # engines whose next plan waits for the end of a step
        self._sent: dict[str, SimulatedRequest] = {}
        self._offers: dict[str, tuple[SimulatedEngine, int]] = {}  # by request id of the fetch
        self._ended: list[RequestRecord] = []
        self._arrivals: deque[float] = deque()  # times of the requests that have not arrived

    def run(self, trace: Sequence[TraceRequest]) -> list[RequestRecord]:
        self._arrivals.extend(sorted(one.at_s + self._start_s for one in trace))
        for number, one in enumerate(trace):
            self._at(one.at_s + self._start_s, self._arrive, number, one)
        while self._events:
            self._clock.now, _, event, args = heapq.heappop(self._events)
            event(*args)
        return self._ended

    def _at(self, at_s: float, event: Callable[..., None], *args: Any) -> None:
        heapq.heappush(self._events, (at_s, next(self._order), event, args))

    # ── events ──────────────────────────────────────────────────────────────────────────────

    def _arrive(self, number: int, traced: TraceRequest) -> None:
        self._arrivals.popleft()
        received_s = self._clock.now - self._start_s
        request = request_of(f"r{number}", number, traced, received_s, self._block_tokens)
        prompt = prompt_of(request)
        placement = self._router.place(prompt)
        assert placement is not None
        engine = self._engine_of[id(placement.engine)]
        engine.state.note_prompt(prompt)
        engine.state.add_queued(placement.queued)
        self._sent[request.request_id] = SimulatedRequest(request, placement.queued)
        request = replace(request, hand_over=placement.hand_over)
        now = self._clock.now
        if engine.offload is None:
            self._queue(engine, request)
        elif (fetched_s := engine.offload.fetch_end_s(request, now)) > now:
            self._at(fetched_s, self._fetched, engine, request)
        else:
            self._fetched(engine, request)

    def _fetched(self, engine: SimulatedEngine, request: EngineRequest) -> None:
        """Queue a request whose part of the prompt the offload tier has copied."""
        assert engine.offload is not None
        engine.offload.store(request)
        self._queue(engine, request)

    def _queue(self, engine: SimulatedEngine, request: EngineRequest) -> None:
        if id(engine) in self._deferred:  # the engine has planned its next step already
            self._deferred.discard(id(engine))
            self._plan(engine)
        engine.scheduler.add(request)
        self._begin(engine)

    def _end_step(self, engine: SimulatedEngine, step: StepInFlight) -> None:
        self._busy.discard(id(engine))
        self._deferred.discard(id(engine))
        for update in engine.end(step, self._clock.now):
            sent = self._sent[update.request_id]
            if update.tokens:
                self._note_token(engine, sent)
            if update.finish_reason is None:
                if update.offer is not None:
                    self._send_ahead(engine, sent, update.offer)
            elif update.offer is not None:
                self._hand_over(engine, sent, update)
            else:
                self._end(engine, sent, update)
        self._begin(engine)

    def _begin(self, engine: SimulatedEngine) -> None:
        """Plan the engine's next steps, unless enough are planned or there is no work."""
        if id(engine) in self._busy or id(engine) in self._deferred:
            return
        if not engine.scheduler.in_flight:
            until_s = self._arrivals[0] if self._arrivals else math.inf
            end_s = engine.stretch(self._clock.now, until_s)
            if end_s is not None:
                self._busy.add(id(engine))
                self._at(end_s, self._end_stretch, engine)
                return
        while True:
            if engine.scheduler.in_flight and engine.defers_plan:
                self._deferred.add(id(engine))
                return
            if not self._plan(engine) or engine.full:
                return

    def _plan(self, engine: SimulatedEngine) -> bool:
        """Plan one step; return False if there is nothing to do."""
        begun = engine.begin(self._clock.now)
        if engine.link is not None:
            self._release_fetched(engine)
        if begun is not None:
            self._at(begun[0], self._end_step, engine, begun[1])
        elif not engine.scheduler.in_flight:
            if (wake_s := engine.wake_s()) is not None:
                self._at(wake_s, self._begin, engine)
            return False
        if begun is None or engine.full:  # the engine waits for a step in flight
            self._busy.add(id(engine))
        return begun is not None

    def _end_stretch(self, engine: SimulatedEngine) -> None:
        self._busy.discard(id(engine))
        self._begin(engine)

    # ── requests ────────────────────────────────────────────────────────────────────────────

    def _note_token(self, engine: SimulatedEngine, sent: SimulatedRequest) -> None:
        if sent.queued is not None:
            engine.state.remove_queued(sent.queued)
            engine.state.streams += 1
            sent.queued = None
        if sent.handed_over_s:
            self._router.note_hand_over(self._clock.now - sent.handed_over_s, sent.fetch_s)
            sent.handed_over_s = 0.0

    def _end(self, engine: SimulatedEngine, sent: SimulatedRequest, update: Update) -> None:
        record = update.record
        assert record is not None
        engine.state.streams -= 1
        if sent.record is not None:
            record = continued(sent.record, record)
        self._router.note_answer(len(record.token_s))
        del self._sent[update.request_id]
        self._ended.append(record)

    def _hand_over(self, engine: SimulatedEngine, sent: SimulatedRequest, update: Update) -> None:
        """Move a prefilled request to its decode engine."""
        assert update.offer is not None
        now, request = self._clock.now, sent.request
        engine.state.streams -= 1
        sent.record, sent.handed_over_s, sent.fetch_s = update.record, now, 0.0
        target = self._decode_engine(sent, prompt_of(request, 1))
        target.state.promised -= 1
        target.state.note_prompt(prompt_of(request, 1))
        target.state.streams += 1
        self._offers[request.request_id] = engine, update.offer.number
        resumed = Resumed((TOKEN,), now, update.offer)
        target.scheduler.add(replace(request, resumed=resumed))
        self._begin(target)

    def _send_ahead(self, engine: SimulatedEngine, sent: SimulatedRequest, offer: Offer) -> None:
        """Let the decode engine fetch the KV blocks that are computed so far."""
        request = sent.request
        target = self._decode_engine(sent, prompt_of(request))
        name = f"{request.request_id} {offer.number}"
        tokens = request.prompt_token_ids
        if offer.num_tokens >= len(tokens):
            engine.scheduler.offers.release(offer.number)
            return
        self._offers[name] = engine, offer.number
        partial = replace(
            request,
            request_id=name,
            prompt_token_ids=tokens[: offer.num_tokens],
            resumed=Resumed((tokens[offer.num_tokens],), self._clock.now, offer),
        )
        target.scheduler.fetch_ahead(partial)
        self._begin(target)

    def _decode_engine(self, sent: SimulatedRequest, prompt: Prompt) -> SimulatedEngine:
        """Return the decode engine of the request, and choose one at the first call."""
        if sent.decode_engine is None:
            placement = self._router.place_decode(prompt)
            assert placement is not None
            sent.decode_engine = self._engine_of[id(placement.engine)]
            sent.decode_engine.state.promised += 1
        return sent.decode_engine

    def _release_fetched(self, engine: SimulatedEngine) -> None:
        """Release the offers of fetched or cancelled blocks at their senders."""
        assert engine.link is not None
        for fetched in engine.scheduler.received.take_fetched():
            sender, number = self._offers.pop(fetched.request_id)
            sender.scheduler.offers.release(number)
            if not fetched.ahead:
                sent = self._sent[fetched.request_id]
                sent.fetch_s = fetched.num_bytes / engine.link.bytes_per_s
            self._at(self._clock.now, self._begin, sender)


def prompt_of(request: EngineRequest, num_written: int = 0) -> Prompt:
    """Return the router's view of a request."""
    num_tokens = len(request.prompt_token_ids) + num_written
    max_tokens = request.params.max_tokens
    assert max_tokens is not None
    return Prompt(num_tokens, request.prefix_marks, "", max_tokens - num_written)


def request_of(
    name: str, number: int, traced: TraceRequest, received_s: float, block_tokens: int
) -> EngineRequest:
    params = SamplingParams(temperature=0, max_tokens=traced.output_tokens, ignore_eos=True)
    return EngineRequest(
        name,
        tokens_of(traced, number, block_tokens),
        params,
        seed=0,
        received_s=received_s or 1e-9,  # an engine reads 0 as unset
        prefix_marks=marks_of(traced, block_tokens),
    )


def tokens_of(traced: TraceRequest, number: int, block_tokens: int) -> list[int]:
    """Return the prompt: equal tokens for equal blocks, and unique tokens after the blocks."""
    length, tokens = traced.prompt_tokens, []
    for block in traced.blocks[: -(-length // block_tokens)]:
        tokens += [block] * block_tokens
    tokens += [OWN_TOKENS + number] * (length - len(tokens))
    return tokens[:length]


def marks_of(traced: TraceRequest, block_tokens: int) -> tuple[str, ...]:
    """Return prefix marks of the first 64, 128, 256, … tokens, like `InputProcessor`."""
    found, end = [], FIRST_MARK_TOKENS
    covered = len(traced.blocks) * block_tokens
    while end <= min(covered, traced.prompt_tokens):
        blocks = traced.blocks[: -(-end // block_tokens)]
        found.append(f"{end} {hash(blocks)}")
        end *= 2
    return tuple(found)
