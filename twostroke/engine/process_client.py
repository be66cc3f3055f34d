"""`ProcessClient`: the common part of clients whose engines run in other processes."""

from __future__ import annotations

import asyncio
import contextlib
from abc import abstractmethod
from typing import Self

from twostroke.engine.input_processor import InputProcessor
from twostroke.engine.output_processor import OutputProcessor
from twostroke.engine.request_client import RequestClient


class ProcessClient(RequestClient):
    """Use it in the event loop that created it, with `async with`, or call `close` at the end."""

    def __init__(self, input_processor: InputProcessor, seed: int) -> None:
        self.input_processor = input_processor
        self._outputs = OutputProcessor(input_processor.tokenizer, seed)
        # Set when no engine will run again. The result is the reason.
        self.stop_reason: asyncio.Future[str] = asyncio.get_running_loop().create_future()
        self._request_ended = asyncio.Event()  # a request may have ended

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.close()

    async def close(self, drain: bool = False) -> None:
        """End the engines' processes. Open requests end with an `EngineError`. `drain`: wait for
        them first."""
        if drain:
            await self.drain()
        await self._end_processes()

    async def drain(self, timeout_s: float | None = None) -> bool:
        """Wait until no request is open. Return False if requests are open after the timeout."""
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(timeout_s):
                while self._outputs:
                    self._request_ended.clear()
                    await self._request_ended.wait()
        return not self._outputs

    @abstractmethod
    async def _end_processes(self) -> None: ...

    def _why_stopped(self) -> str:
        return self.stop_reason.result() if self.stop_reason.done() else ""
