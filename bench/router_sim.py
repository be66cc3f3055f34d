"""Engines whose time is simulated, behind a router; for bench/router.py.

Each has the real scheduler with its real KV cache and prefix index, on a clock of the simulation.
Only what a step takes is not measured but computed: `Machine`, from figures of docs/PERFORMANCE.md.
Blocks have the trace's 512 tokens instead of 16, so that an hour takes a minute.
"""

from __future__ import annotations

import heapq
import random
from collections import OrderedDict
from collections.abc import Callable, Sequence
from itertools import count, takewhile
from typing import Any, NamedTuple

from twostroke.kv.cache import GroupLimits
from twostroke.measure.traces import MOONCAKE_BLOCK, TraceRequest
from twostroke.observe.record import PhaseRecord, RequestRecord, StepRecord
from twostroke.plan import PhaseWork, StepResult
from twostroke.request import EngineRequest, SamplingParams
from twostroke.route.router import EngineState, Prompt, Queued, Role, Router
from twostroke.sched.scheduler import Scheduler
from twostroke.sched.step import SchedulerConfig, StepInFlight

MAX_LEN = 1 << 18


class Machine(NamedTuple):
    """Llama-3.1-8B on an H200: 4,096 prompt tokens in 98 ms, of which 10 ms attention; a step of
    one stream in 4.2 ms, of 128 with 1,024 tokens each in 9.9 ms; 4 TB/s."""

    prompt_token_s: float = 21.5e-6
    attended_s: float = 1.24e-9  # a position, for each prompt token
    step_s: float = 4.15e-3
    stream_s: float = 11e-6
    read_s: float = 33e-9  # a position of a stream
    host_s: float = 0.3e-3
    kv_tokens: int = 800_000
    budget: int = 8192

    def seconds(self, prefill: PhaseWork, decode: PhaseWork) -> float:
        tokens = self.prompt_token_s * prefill.tokens + self.attended_s * prefill.kv_tokens
        streams = self.stream_s * decode.rows + self.read_s * decode.kv_reads
        return max(self.step_s, tokens) + streams


class SimulatedEngine:
    def __init__(self, name: str, machine: Machine, clock: Callable[[], float]) -> None:
        self.state = EngineState(name, Role.BOTH, capacity_tokens=machine.kv_tokens)
        self._machine = machine
        self.scheduler = Scheduler(
            SchedulerConfig(
                max_num_seqs=256,
                max_num_batched_tokens=machine.budget,
                max_model_len=MAX_LEN,
                block_size=MOONCAKE_BLOCK,
                groups=(GroupLimits(machine.kv_tokens // MOONCAKE_BLOCK),),
            ),
            clock,
        )

    def begin(self, now: float) -> tuple[float, StepInFlight] | None:
        """The next step, and when it will have ended."""
        step = self.scheduler.plan()
        if step is None:
            return None
        device_s = self._machine.seconds(step.plan.prefill_work, step.plan.decode_work)
        return now + device_s + self._machine.host_s, step

    def end(self, step: StepInFlight, now: float) -> Any:
        plan = step.plan
        device_s = now - step.planned_s - self._machine.host_s
        result = StepResult([7] * len(step.sampled), {}, {}, device_s)
        committed = self.scheduler.commit(result, now)
        prefill, decode = (
            PhaseRecord(one.rows, one.tokens, one.kv_tokens, 0.0, 0.0)
            for one in (plan.prefill_work, plan.decode_work)
        )
        times = step.planned_s, step.planned_s, now, device_s, self._machine.host_s
        kv = self.scheduler.kv.usage()
        self.state.add_step(StepRecord(plan.step, *times, prefill, decode, (), (), 0, 0, 0, kv))
        return committed.updates


def simulate(
    trace: Sequence[TraceRequest],
    num_engines: int,
    make_router: Callable[[list[EngineState]], Router],
    machine: Machine,
) -> tuple[list[RequestRecord], list[EngineState]]:
    """What became of every request."""
    now = 0.0
    engines = [SimulatedEngine(f"engine-{n}", machine, lambda: now) for n in range(num_engines)]
    router = make_router([one.state for one in engines])
    by_state = {id(one.state): one for one in engines}
    order, ended = count(), []
    events: list[tuple[float, int, Any, Any]] = [
        (one.at_s, next(order), None, (f"r{n}", one)) for n, one in enumerate(trace)
    ]
    heapq.heapify(events)
    sent: dict[str, Queued] = {}
    busy: set[int] = set()

    def begin(engine: SimulatedEngine) -> None:
        if id(engine) not in busy and (begun := engine.begin(now)):
            busy.add(id(engine))
            heapq.heappush(events, (begun[0], next(order), engine, begun[1]))

    while events:
        now, _, engine, what = heapq.heappop(events)
        if engine is None:
            name, asked = what
            prompt = Prompt(asked.prompt_tokens, marks_of(asked), "", asked.output_tokens)
            placement = router.place(prompt)
            assert placement is not None
            state, engine = placement.engine, by_state[id(placement.engine)]
            state.note_prompt(prompt)
            state.add_queued(placement.queued)
            sent[name] = placement.queued
            engine.scheduler.add(request_of(name, asked, now))
        else:
            busy.discard(id(engine))
            for update in engine.end(what, now):
                state, name = engine.state, update.request_id
                if name in sent:  # its first token
                    state.remove_queued(sent.pop(name))
                    state.streams += 1
                if update.finish_reason is not None:
                    state.streams -= 1
                    router.note_answer(len(update.record.token_s))
                    ended.append(update.record)
        begin(engine)
    assert len(ended) == len(trace)
    return ended, [one.state for one in engines]


def best_hit_rate(trace: Sequence[TraceRequest], num_tokens: int) -> float:
    """Of one cache as large as all together, which keeps what was used last."""
    kept: OrderedDict[int, None] = OrderedDict()
    hits = 0
    for one in trace:
        known = sum(1 for _ in takewhile(kept.__contains__, one.blocks))
        hits += min(one.prompt_tokens - 1, MOONCAKE_BLOCK * known)
        for number in reversed(one.blocks):
            kept[number] = None
            kept.move_to_end(number)
        while len(kept) > num_tokens // MOONCAKE_BLOCK:
            kept.popitem(last=False)
    return hits / sum(one.prompt_tokens for one in trace)


def request_of(name: str, asked: TraceRequest, now: float) -> EngineRequest:
    params = SamplingParams(temperature=0, max_tokens=asked.output_tokens, ignore_eos=True)
    return EngineRequest(name, tokens_of(asked), params, seed=0, received_s=now or 1e-9)


def tokens_of(
    asked: TraceRequest, block: int = MOONCAKE_BLOCK, vocabulary: int = 1 << 40
) -> list[int]:
    """Equal blocks, equal tokens."""
    tokens: list[int] = []
    for number in asked.blocks:
        rng = range(number * block, (number + 1) * block)
        tokens += rng if vocabulary > 1 << 32 else [(7919 * n) % vocabulary for n in rng]
    return tokens[: asked.prompt_tokens]


def marks_of(asked: TraceRequest) -> tuple[str, ...]:
    """As `InputProcessor` makes them of tokens: of the first 64, 128, 256, … of them."""
    found, end = [], 64
    while end <= asked.prompt_tokens:
        blocks = asked.blocks[: -(-end // MOONCAKE_BLOCK)]
        found.append(f"{end} {hash(blocks)}")
        end *= 2
    return tuple(found)


def conversations(seconds: float, rate: float, seed: int = 0) -> list[TraceRequest]:
    """A trace like Mooncake's conversations where none is given: turns of conversations that grow,
    one in three begun by one of a few long instructions, the first of them the most often."""
    rng = random.Random(seed)
    numbers = count()
    instructions = [[next(numbers) for _ in range(rng.randint(2, 12))] for _ in range(8)]
    found: list[TraceRequest] = []
    at_s = 0.0
    while (at_s := at_s + rng.expovariate(rate / 3)) < seconds:
        blocks = [next(numbers)]
        if rng.random() < 0.34:
            blocks = list(instructions[min(int(rng.expovariate(0.7)), len(instructions) - 1)])
        turn_s = at_s
        for _ in range(1 + min(int(rng.expovariate(0.5)), 9)):
            blocks += [
                next(numbers) for _ in range(min(1 + int(rng.lognormvariate(1.8, 1.2)), 120))
            ]
            output = min(2000, 1 + int(rng.lognormvariate(5.6, 0.8)))
            rest = rng.randint(1, MOONCAKE_BLOCK)
            length = (len(blocks) - 1) * MOONCAKE_BLOCK + rest
            found.append(TraceRequest(turn_s, length, output, tuple(blocks)))
            turn_s += 10.0 + rng.expovariate(1 / 40)
            if turn_s >= seconds:
                break
    return sorted(found, key=lambda one: one.at_s)


def spread_arrivals(trace: list[TraceRequest], seed: int = 0) -> list[TraceRequest]:
    """Mooncake's times come in bunches of about 3 s; within one, arrivals are drawn evenly."""
    times = sorted({one.at_s for one in trace})
    after = dict(zip(times, [*times[1:], times[-1] + 3.0], strict=True))
    rng = random.Random(seed)
    spread = [
        TraceRequest(
            rng.uniform(one.at_s, after[one.at_s]),
            one.prompt_tokens,
            one.output_tokens,
            one.blocks,
        )
        for one in trace
    ]
    return sorted(spread, key=lambda one: one.at_s)
