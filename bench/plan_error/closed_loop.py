"""A closed loop of equal requests, as sums of step terms.

The product's simulation takes seconds for a loop, and a fit needs thousands of loops. This model
has the same steps for such a load (every stream, and prompts in order up to the token budget), and
takes all steps without a prompt together until a stream ends. A test compares both.
"""

from __future__ import annotations

import heapq
import math
import random
from collections import deque
from typing import Any

import numpy as np

from bench.plan_error.points import Point, roofline_of, terms_of
from twostroke.plan import PhaseWork
from twostroke.planner.learned import TERMS

Vector = np.ndarray[Any, np.dtype[np.float64]]
BUDGET = 8192  # tokens of a step
SHORTEST = 0.8  # of a length: the public benchmarks draw lengths from 80% to 100%
WAVES = 4  # requests of a user
FIRST_WAVE = 0.1  # of a benchmark's requests


def closed_loop(point: Point, waves: int = WAVES) -> tuple[Vector, Vector]:
    """Return the mean terms of TTFT and of TPOT. The terms times coefficients are a time."""
    terms = terms_of(point.model, point.system, point.precision, point.ranks)
    roofline = roofline_of(point.model, point.system, point.precision, point.ranks)
    room = roofline.kv_tokens or math.inf
    rng = random.Random(0)

    def length(longest: int) -> int:
        return rng.randint(math.ceil(SHORTEST * longest), longest) if point.varied else longest

    def request(arrived: Vector, first: bool) -> tuple[int, int, Vector, bool]:
        return length(point.prompt), length(point.output), arrived, first

    clock = np.zeros(len(TERMS))
    waiting = deque(request(clock, True) for _ in range(point.users))
    left = (waves - 1) * point.users  # requests to send
    streams: list[tuple[int, int, int, int, Vector]] = []  # last step, number, lengths, first token
    number = step = held = contexts = computed = 0
    first_wave: list[Vector] = []
    later: list[Vector] = []
    gaps: list[Vector] = []
    while waiting or streams:
        chunks: list[tuple[int, int]] = []  # tokens before, and of, each chunk
        budget, started = BUDGET - len(streams), []
        while waiting and budget > 0:
            prompt, output, _, _ = waiting[0]
            if not computed:
                if held + prompt + output > room and (streams or chunks):
                    break
                held += prompt + output
            size = min(prompt - computed, budget)
            chunks.append((computed, size))
            budget, computed = budget - size, computed + size
            if computed < prompt:
                break
            started.append(waiting.popleft())
            computed = 0
        rows = len(streams)
        steps = 1 if chunks else streams[0][0] - step
        middle = contexts + rows * (steps + 1) // 2
        clock = clock + steps * np.array(
            terms.of(_work(chunks), PhaseWork(rows, rows, middle, middle))
        )
        step += steps
        contexts += rows * steps
        for prompt, output, arrived, first in started:
            (first_wave if first else later).append(clock - arrived)
            number += 1
            heapq.heappush(streams, (step + max(1, output - 1), number, prompt, output, clock))
            contexts += prompt
        while streams and streams[0][0] <= step:
            _, _, prompt, output, since = heapq.heappop(streams)
            contexts -= prompt + max(1, output - 1)
            held -= prompt + output
            gaps.append((clock - since) / max(1, output - 1))
            if left:
                left -= 1
                waiting.append(request(clock, False))
    start = FIRST_WAVE * np.mean(first_wave, axis=0) + (1 - FIRST_WAVE) * np.mean(later, axis=0)
    return start, np.mean(gaps, axis=0)


def _work(chunks: list[tuple[int, int]]) -> PhaseWork:
    return PhaseWork(
        len(chunks),
        sum(size for _, size in chunks),
        sum(size * before + size * (size + 1) // 2 for before, size in chunks),
        sum(before + size for before, size in chunks),
    )
