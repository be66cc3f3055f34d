"""Engines whose time is simulated, behind a router; for bench/router.py.

The planner's engines (`twostroke/planner/engine.py`), whose step times are those of `Machine`, from
figures of docs/PERFORMANCE.md. Blocks have the trace's 512 tokens instead of 16, so that an hour
takes a minute.
"""

from __future__ import annotations

import random
from collections import OrderedDict
from collections.abc import Callable, Sequence
from itertools import count, takewhile
from typing import NamedTuple

from twostroke.kv.cache import GroupLimits
from twostroke.measure.load.traces import MOONCAKE_BLOCK, TraceRequest
from twostroke.observe.record import RequestRecord
from twostroke.plan import PhaseWork
from twostroke.planner.engine import SimulatedEngine
from twostroke.planner.simulate import Clock
from twostroke.planner.simulate import simulate as planner_simulate
from twostroke.route.router import EngineState, Router
from twostroke.sched.step import SchedulerConfig

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


def simulate(
    trace: Sequence[TraceRequest],
    num_engines: int,
    make_router: Callable[[list[EngineState]], Router],
    machine: Machine,
) -> tuple[list[RequestRecord], list[EngineState]]:
    """The record of every request, and the engines as they are at the end."""
    clock = Clock()
    config = SchedulerConfig(
        max_num_seqs=256,
        max_num_batched_tokens=machine.budget,
        max_model_len=MAX_LEN,
        block_size=MOONCAKE_BLOCK,
        groups=(GroupLimits(machine.kv_tokens // MOONCAKE_BLOCK),),
    )
    engines = [
        SimulatedEngine(f"engine-{n}", config, machine, machine.host_s, clock)
        for n in range(num_engines)
    ]
    records = planner_simulate(trace, clock, engines, make_router)
    return records, [one.state for one in engines]


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


def tokens_of(asked: TraceRequest, block: int, vocabulary: int) -> list[int]:
    """Equal blocks, equal tokens, of a real model's vocabulary."""
    tokens: list[int] = []
    for number in asked.blocks:
        positions = range(number * block, (number + 1) * block)
        tokens += [(7919 * n) % vocabulary for n in positions]
    return tokens[: asked.prompt_tokens]


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
