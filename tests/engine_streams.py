"""Requests that tests send to asynchronous engines: with many settings, or ended at random."""

from __future__ import annotations

import asyncio
import contextlib
from random import Random
from typing import Any

import pytest

from twostroke import SamplingParams
from twostroke.errors import RequestError

MANY_SETTINGS = SamplingParams(
    n=3,
    seed=4,
    max_tokens=10,
    logprobs=2,
    prompt_logprobs=1,
    logit_bias={7: 3.0},
    frequency_penalty=0.5,
    bad_words=["the"],
    stop_token_ids=[9],
    top_k=50,
    min_p=0.01,
)
ENDS = {"read", "break", "abort", "cancel", "refuse"}


async def end_at_random(
    engine: Any, choose: Random, n: int, max_tokens: int, share_left_open: float = 0.0, **more: Any
) -> str:
    """Send request number `n` and end it in one of `ENDS`, which is returned. `share_left_open`: of
    the streams that are left early, those that are not closed."""

    async def read(prompt: list[int], **name: str) -> bool:
        finished = False
        async for output in engine.generate(prompt, params, **name):
            finished = output.finished
        return finished

    prompt = [50 + n % 7] * choose.randint(1, 60)
    params = SamplingParams(
        n=choose.choice([1, 1, 2]),
        max_tokens=choose.randint(1, max_tokens),
        stop=choose.choice([None, "a", "the"]),
        output_kind=choose.choice(["cumulative", "delta", "final_only"]),
        **more,
    )
    end = choose.choice(sorted(ENDS))
    name = f"request {n}"
    if end == "refuse":
        with pytest.raises(RequestError):
            await read([999])
    elif end == "break":
        leave_after = choose.randint(1, 10)
        stream = engine.generate(prompt, params, request_id=name)
        async for _ in stream:
            leave_after -= 1
            if not leave_after:
                break
        if choose.random() >= share_left_open:
            await stream.aclose()
    else:
        task = asyncio.create_task(read(prompt, request_id=name))
        await asyncio.sleep(choose.random() * 0.05)
        if end == "abort":
            engine.abort(name)
        elif end == "cancel":
            task.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            assert await task
    return end
