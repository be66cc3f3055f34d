"""`simulate`: a trace through simulated engines behind the product's router, on a virtual clock.

Events are arrivals and ends of steps, in the order of their times. Same trace, same engines, same
seeds: same times of every token.
"""

from __future__ import annotations

import heapq
from collections.abc import Callable, Sequence
from itertools import count
from typing import Any

from twostroke.measure.traces import MOONCAKE_BLOCK, TraceRequest
from twostroke.observe.record import RequestRecord
from twostroke.planner.engine import SimulatedEngine
from twostroke.request import EngineRequest, SamplingParams
from twostroke.route.router import EngineState, Prompt, Queued, Router
from twostroke.sched.step import StepInFlight

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
    by_state = {id(one.state): one for one in engines}
    order, ended = count(), []
    events: list[tuple[float, int, SimulatedEngine | None, Any]] = [
        (one.at_s + start_s, next(order), None, (n, one)) for n, one in enumerate(trace)
    ]
    heapq.heapify(events)
    sent: dict[str, Queued] = {}  # requests without a first token
    busy: set[int] = set()

    def arrive(number: int, asked: TraceRequest) -> SimulatedEngine:
        marks = marks_of(asked, block_tokens)
        prompt = Prompt(asked.prompt_tokens, marks, "", asked.output_tokens)
        placement = router.place(prompt)
        assert placement is not None
        placement.engine.note_prompt(prompt)
        placement.engine.add_queued(placement.queued)
        name = f"r{number}"
        sent[name] = placement.queued
        engine = by_state[id(placement.engine)]
        received_s = clock.now - start_s
        engine.scheduler.add(request_of(name, number, asked, received_s, block_tokens))
        return engine

    def commit(engine: SimulatedEngine, step: StepInFlight) -> None:
        state = engine.state
        for update in engine.end(step, clock.now):
            if (queued := sent.pop(update.request_id, None)) is not None:  # its first token
                state.remove_queued(queued)
                state.streams += 1
            if update.record is not None:
                state.streams -= 1
                router.note_answer(len(update.record.token_s))
                ended.append(update.record)

    while events:
        clock.now, _, ending, what = heapq.heappop(events)
        if ending is None:
            engine = arrive(*what)
        else:
            engine = ending
            busy.discard(id(engine))
            commit(engine, what)
        if id(engine) not in busy and (begun := engine.begin(clock.now)):
            busy.add(id(engine))
            heapq.heappush(events, (begun[0], next(order), engine, begun[1]))
    assert len(ended) == len(trace), "a simulated request has not ended"
    return ended


def request_of(
    name: str, number: int, asked: TraceRequest, received_s: float, block_tokens: int
) -> EngineRequest:
    params = SamplingParams(temperature=0, max_tokens=asked.output_tokens, ignore_eos=True)
    tokens = tokens_of(asked, number, block_tokens)
    # 0 is no time to an engine.
    return EngineRequest(name, tokens, params, seed=0, received_s=received_s or 1e-9)


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
