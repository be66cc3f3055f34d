"""`AttentionSource`: the attention of a short prompt. A process of its own computes it
(`model/attention_maps.py`), so this module imports neither torch nor numpy."""

from __future__ import annotations

import asyncio
import json
import sys
from array import array
from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import asdict

from twostroke import child_process
from twostroke.config import EngineConfig
from twostroke.serve.error_responses import ApiError, retry_after

TIMEOUT_S = 120.0
MAX_KEPT = 4  # prompts whose maps are cached


class AttentionMaps:
    """The attention probabilities of all layers and heads for one prompt."""

    def __init__(self, heads: list[int], size: int, values: array[float]) -> None:
        self.heads, self.size, self._values = heads, size, values

    def rows(self, layer: int, head: int) -> list[list[float]]:
        """Return a row for each query of one head: the attention to the keys up to the query."""
        square = self.size**2
        first = (sum(self.heads[:layer]) + head) * square
        return [
            [round(value, 4) for value in self._values[first + at : first + at + row + 1]]
            for row, at in enumerate(range(0, square, self.size))
        ]


class AttentionSource:
    def __init__(self, config: EngineConfig | None) -> None:
        self._config = config
        self._kept: OrderedDict[tuple[int, ...], AttentionMaps] = OrderedDict()
        self._running = False

    async def maps(self, tokens: Sequence[int]) -> AttentionMaps:
        """Return the attention of a prompt. Raise `ApiError` if it cannot be computed, or while the
        attention of another prompt is being computed."""
        key = tuple(tokens)
        if key not in self._kept:
            self._kept[key] = await self._computed(key)
            if len(self._kept) > MAX_KEPT:
                self._kept.popitem(last=False)
        self._kept.move_to_end(key)
        return self._kept[key]

    async def _computed(self, tokens: tuple[int, ...]) -> AttentionMaps:
        if self._config is None:
            raise ApiError(
                501, "this server does not know the files of its model", code="not_implemented"
            )
        if self._running:
            raise ApiError(
                429,
                "attention is being computed for another prompt; try again in a moment",
                code="attention_running",
                headers=retry_after(2),
            )
        self._running = True
        try:
            answer = await self._ask(self._config, tokens)
        finally:
            self._running = False
        line, _, rest = answer.partition(b"\n")
        if not line:
            raise ApiError(503, "the attention of this prompt could not be computed")
        head = json.loads(line)
        if head["error"]:
            raise ApiError(400, head["error"], param="tokens")
        values = array("f")
        values.frombytes(rest)
        return AttentionMaps(head["heads"], len(tokens), values)

    async def _ask(self, config: EngineConfig, tokens: tuple[int, ...]) -> bytes:
        words = (sys.executable, "-P", "-m", "twostroke.model.attention_maps")
        child = await asyncio.create_subprocess_exec(
            *words,
            env=child_process.environment(),
            stdin=asyncio.subprocess.PIPE,
            stdout=asyncio.subprocess.PIPE,
            stderr=asyncio.subprocess.DEVNULL,
        )
        request = json.dumps({"config": asdict(config), "tokens": tokens}).encode()
        try:
            async with asyncio.timeout(TIMEOUT_S):
                answer, _ = await child.communicate(request)
        except TimeoutError:
            raise ApiError(
                503, f"the attention took longer than {TIMEOUT_S:g} s; try a shorter prompt"
            ) from None
        finally:
            if child.returncode is None:
                child.kill()
                await child.wait()
        return answer
