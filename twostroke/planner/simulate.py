"""`simulate`: a trace through simulated engines behind the product's router, on a virtual clock.

Events are arrivals and ends of steps, in the order of their times. Same trace, same engines, same
seeds: same times of every token.
"""

from __future__ import annotations

import heapq
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from itertools import count
from typing import Any

from twostroke.kv.transfer import Offer
from twostroke.measure.load.traces import MOONCAKE_BLOCK, TraceRequest
from twostroke.observe.record import RequestRecord, continued
from twostroke.planner.engine import TOKEN, SimulatedEngine
from twostroke.request import EngineRequest, Resumed, SamplingParams
from twostroke.route.router import EngineState, Prompt, Queued, Router
from twostroke.sched.step import StepInFlight
from twostroke.sched.updates import Update

OWN_TOKENS = 1 << 31  # from here on, token ids that one request has to itself


class Clock:
    """The time of a simulation, in seconds from its start."""

    def __init__(self) -> None:
        self.now = 0.0

    def __call__(self) -> float:
        return self.now


def simulate(
    trace: Sequence[TraceRequest],
    clock: Clock,
    engines: Sequence[SimulatedEngine],
    make_router: Callable[[list[EngineState]], Router] = Router,
    block_tokens: int = MOONCAKE_BLOCK,
    start_s: float = 0.0,
) -> list[RequestRecord]:
    """Return the record of every request, in the order in which they end. `block_tokens`: those of
    a block of the trace. `start_s`: from a request's arrival until a scheduler has it."""
    router = make_router([one.state for one in engines])
    found = Simulation(clock, engines, router, block_tokens, start_s).run(trace)
    assert len(found) == len(trace), "a simulated request has not ended"
    return found


@dataclass(slots=True, eq=False)
class Sent:
    """A request on its way through the engines."""

    given: EngineRequest
    queued: Queued | None  # of its prompt, where it is; None: it writes
    record: RequestRecord | None = None  # of the engines that had it before
    goes_on: SimulatedEngine | None = None  # that fetches what is computed of its prompt
    handed_over_s: float = 0.0  # until its next token
    fetch_s: float = 0.0


class Simulation:
    """The events of one run. A hand-over is as in `route/routed_engine.py`: the prefill engine
    offers the blocks, a decode engine fetches them, those of a long prompt while the rest is
    computed."""

    def __init__(
        self,
        clock: Clock,
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
        self._busy: set[int] = set()
        self._sent: dict[str, Sent] = {}
        self._offers: dict[str, tuple[SimulatedEngine, int]] = {}  # by who fetches
        self._ended: list[RequestRecord] = []

    def run(self, trace: Sequence[TraceRequest]) -> list[RequestRecord]:
        for number, one in enumerate(trace):
            self._at(one.at_s + self._start_s, self._arrive, number, one)
        while self._events:
            self._clock.now, _, event, args = heapq.heappop(self._events)
            event(*args)
        return self._ended

    def _at(self, at_s: float, event: Callable[..., None], *args: Any) -> None:
        heapq.heappush(self._events, (at_s, next(self._order), event, args))

    # ── events ──────────────────────────────────────────────────────────────────────────────

    def _arrive(self, number: int, asked: TraceRequest) -> None:
        received_s = self._clock.now - self._start_s
        given = request_of(f"r{number}", number, asked, received_s, self._block_tokens)
        prompt = prompt_of(given)
        placement = self._router.place(prompt)
        assert placement is not None
        engine = self._engine_of[id(placement.engine)]
        engine.state.note_prompt(prompt)
        engine.state.add_queued(placement.queued)
        self._sent[given.request_id] = Sent(given, placement.queued)
        engine.scheduler.add(replace(given, hand_over=placement.hand_over))
        self._begin(engine)

    def _end_step(self, engine: SimulatedEngine, step: StepInFlight) -> None:
        self._busy.discard(id(engine))
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
        """Start the engine's next step, if it has none and there is something to do."""
        if id(engine) in self._busy:
            return
        begun = engine.begin(self._clock.now)
        if engine.link is not None:
            self._release_fetched(engine)
        if begun is not None:
            self._busy.add(id(engine))
            self._at(begun[0], self._end_step, engine, begun[1])
        elif (wake_s := engine.wake_s()) is not None:
            self._at(wake_s, self._begin, engine)

    # ── what becomes of a request ───────────────────────────────────────────────────────────

    def _note_token(self, engine: SimulatedEngine, sent: Sent) -> None:
        if sent.queued is not None:
            engine.state.remove_queued(sent.queued)
            engine.state.streams += 1
            sent.queued = None
        if sent.handed_over_s:
            self._router.note_hand_over(self._clock.now - sent.handed_over_s, sent.fetch_s)
            sent.handed_over_s = 0.0

    def _end(self, engine: SimulatedEngine, sent: Sent, update: Update) -> None:
        record = update.record
        assert record is not None
        engine.state.streams -= 1
        if sent.record is not None:
            record = continued(sent.record, record)
        self._router.note_answer(len(record.token_s))
        del self._sent[update.request_id]
        self._ended.append(record)

    def _hand_over(self, engine: SimulatedEngine, sent: Sent, update: Update) -> None:
        """One engine has prefilled the request; another goes on."""
        assert update.offer is not None
        now, given = self._clock.now, sent.given
        engine.state.streams -= 1
        sent.record, sent.handed_over_s, sent.fetch_s = update.record, now, 0.0
        target = self._goes_on(sent, prompt_of(given, 1))
        target.state.promised -= 1
        target.state.note_prompt(prompt_of(given, 1))
        target.state.streams += 1
        self._offers[given.request_id] = engine, update.offer.number
        resumed = Resumed((TOKEN,), now, update.offer)
        target.scheduler.add(replace(given, resumed=resumed))
        self._begin(target)

    def _send_ahead(self, engine: SimulatedEngine, sent: Sent, offer: Offer) -> None:
        """The engine that will go on fetches what is computed so far."""
        given = sent.given
        target = self._goes_on(sent, prompt_of(given))
        name = f"{given.request_id} {offer.number}"
        tokens = given.prompt_token_ids
        if offer.num_tokens >= len(tokens):
            engine.scheduler.offers.release(offer.number)
            return
        self._offers[name] = engine, offer.number
        part = replace(
            given,
            request_id=name,
            prompt_token_ids=tokens[: offer.num_tokens],
            resumed=Resumed((tokens[offer.num_tokens],), self._clock.now, offer),
        )
        target.scheduler.fetch_ahead(part)
        self._begin(target)

    def _goes_on(self, sent: Sent, prompt: Prompt) -> SimulatedEngine:
        """The decode engine that goes on with the request: the same until its end."""
        if sent.goes_on is None:
            placement = self._router.place_decode(prompt)
            assert placement is not None
            sent.goes_on = self._engine_of[id(placement.engine)]
            sent.goes_on.state.promised += 1
        return sent.goes_on

    def _release_fetched(self, engine: SimulatedEngine) -> None:
        """Tell the senders of blocks that are here, or are not wanted, that they may go."""
        assert engine.link is not None
        for fetched in engine.scheduler.received.take_fetched():
            sender, number = self._offers.pop(fetched.request_id)
            sender.scheduler.offers.release(number)
            if not fetched.ahead:
                sent = self._sent[fetched.request_id]
                sent.fetch_s = fetched.num_bytes / engine.link.bytes_per_s
            self._at(self._clock.now, self._begin, sender)


def prompt_of(given: EngineRequest, num_written: int = 0) -> Prompt:
    """What the router is told of a request."""
    num_tokens = len(given.prompt_token_ids) + num_written
    max_tokens = given.params.max_tokens
    assert max_tokens is not None
    return Prompt(num_tokens, given.prefix_marks, "", max_tokens - num_written)


def request_of(
    name: str, number: int, asked: TraceRequest, received_s: float, block_tokens: int
) -> EngineRequest:
    params = SamplingParams(temperature=0, max_tokens=asked.output_tokens, ignore_eos=True)
    return EngineRequest(
        name,
        tokens_of(asked, number, block_tokens),
        params,
        seed=0,
        received_s=received_s or 1e-9,  # 0 is no time to an engine
        prefix_marks=marks_of(asked, block_tokens),
    )


def tokens_of(asked: TraceRequest, number: int, block_tokens: int) -> list[int]:
    """Equal blocks, equal tokens; what no block covers is the request's own."""
    length, tokens = asked.prompt_tokens, []
    for block in asked.blocks[: -(-length // block_tokens)]:
        tokens += [block] * block_tokens
    tokens += [OWN_TOKENS + number] * (length - len(tokens))
    return tokens[:length]


def marks_of(asked: TraceRequest, block_tokens: int) -> tuple[str, ...]:
    """The prompt's marks, as `InputProcessor` makes them of the first 64, 128, 256, … tokens."""
    found, end = [], 64
    covered = len(asked.blocks) * block_tokens
    while end <= min(covered, asked.prompt_tokens):
        blocks = asked.blocks[: -(-end // block_tokens)]
        found.append(f"{end} {hash(blocks)}")
        end *= 2
    return tuple(found)
