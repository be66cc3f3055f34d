"""An OpenAI-compatible server whose every delay is given, so that a measuring tool can be measured.

It can stall, as an engine that hangs: nothing is sent from the arrival of one request to that of a
later one.
"""

from __future__ import annotations

import asyncio
import json
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from time import perf_counter
from typing import Any


@dataclass
class PacedServer:
    ttft_s: float = 0.0
    itl_s: float = 0.0
    key: str = ""
    content: bool = True  # False: a stream without any
    cached: int = 0  # tokens of every prompt that a cache is said to have had
    stall: range = range(0)  # numbers of the requests during which nothing is sent
    stall_ended_s: float = 0.0
    url: str = ""
    bodies: list[dict[str, Any]] = field(default_factory=list)
    _stall_over: asyncio.Event = field(default_factory=asyncio.Event)

    async def serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            while await self._answer(reader, writer):
                pass
        except (ConnectionError, asyncio.IncompleteReadError):
            pass
        finally:
            writer.close()

    async def _answer(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> bool:
        head = await reader.readuntil(b"\r\n\r\n")
        method, path, _ = head.split(b"\r\n")[0].decode().split(" ")
        headers = dict(
            line.lower().split(": ", 1) for line in head.decode().split("\r\n")[1:] if ": " in line
        )
        body = await reader.readexactly(int(headers.get("content-length", "0")))
        if self.key and headers.get("authorization") != f"bearer {self.key}".lower():
            self._reply(writer, 401, {"error": {"message": "a valid API key is needed"}})
        elif path == "/v1/models":
            self._reply(writer, 200, {"data": [{"id": "paced"}]})
        elif method == "POST" and path == "/v1/completions":
            await self._stream(writer, json.loads(body))
        else:
            self._reply(writer, 404, {"error": {"message": f"there is no {path}"}})
        await writer.drain()
        return True

    def _reply(self, writer: asyncio.StreamWriter, status: int, content: Any) -> None:
        data = json.dumps(content).encode()
        writer.write(b"HTTP/1.1 %d X\r\nContent-Length: %d\r\n\r\n%b" % (status, len(data), data))

    async def _stream(self, writer: asyncio.StreamWriter, body: dict[str, Any]) -> None:
        self.bodies.append(body)
        if len(self.bodies) == self.stall.stop:
            self.stall_ended_s = perf_counter()
            self._stall_over.set()
        writer.write(b"HTTP/1.1 200 OK\r\nContent-Type: text/event-stream\r\n")
        writer.write(b"Transfer-Encoding: chunked\r\n\r\n")
        await self._wait(self.ttft_s)
        count = body["max_tokens"]
        for n in range(count if self.content else 0):
            if n:
                await self._wait(self.itl_s)
            _event(writer, {"choices": [{"index": 0, "text": f" {n}"}]})
        prompt = len(body["prompt"]) if isinstance(body["prompt"], list) else 1
        usage = {"prompt_tokens": prompt, "completion_tokens": count}
        usage["prompt_tokens_details"] = {"cached_tokens": self.cached}  # type: ignore[assignment]
        _event(writer, {"choices": [], "usage": usage})
        writer.write(_chunk(b"data: [DONE]\n\n") + b"0\r\n\r\n")

    async def _wait(self, seconds: float) -> None:
        await asyncio.sleep(seconds)
        if len(self.bodies) in self.stall:
            await self._stall_over.wait()


def _event(writer: asyncio.StreamWriter, content: Any) -> None:
    writer.write(_chunk(b"data: " + json.dumps(content).encode() + b"\n\n"))


def _chunk(data: bytes) -> bytes:
    return b"%x\r\n%b\r\n" % (len(data), data)


@contextmanager
def paced_server(**settings: Any) -> Iterator[PacedServer]:
    """In a thread of its own, on a free port."""
    found = PacedServer(**settings)
    loop = asyncio.new_event_loop()
    ready = threading.Event()
    stop = asyncio.Event()

    async def main() -> None:
        server = await asyncio.start_server(found.serve, "127.0.0.1", 0)
        found.url = f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}"
        ready.set()
        await stop.wait()
        server.close()
        others = asyncio.all_tasks() - {asyncio.current_task()}
        for task in others:
            task.cancel()
        await asyncio.gather(*others, return_exceptions=True)

    thread = threading.Thread(target=lambda: loop.run_until_complete(main()), daemon=True)
    thread.start()
    assert ready.wait(30)
    try:
        yield found
    finally:
        loop.call_soon_threadsafe(stop.set)
        thread.join(30)
        loop.close()
