"""A TCP link that is far away, or a proxy that keeps what it should pass on; for the doctor's exam.

far       every byte arrives `seconds` later, in either direction
buffering answers are passed on when nothing has come for `seconds`, as by a proxy that collects
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, suppress

MOST = 1 << 16


@asynccontextmanager
async def slow_link(port: int, kind: str, seconds: float) -> AsyncIterator[int]:
    """The port of a link to another port of this machine."""

    async def connect(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        server_reader, server_writer = await asyncio.open_connection("127.0.0.1", port)
        back = _buffered if kind == "buffering" else _delayed
        there_s = 0.0 if kind == "buffering" else seconds
        with suppress(ConnectionError):
            await asyncio.gather(
                _delayed(reader, server_writer, there_s), back(server_reader, writer, seconds)
            )

    server = await asyncio.start_server(connect, "127.0.0.1", 0)
    try:
        yield server.sockets[0].getsockname()[1]
    finally:
        server.close()


async def _delayed(
    reader: asyncio.StreamReader, writer: asyncio.StreamWriter, seconds: float
) -> None:
    loop = asyncio.get_running_loop()
    under_way: asyncio.Queue[tuple[float, bytes]] = asyncio.Queue()

    async def arrive() -> None:
        while True:
            due, data = await under_way.get()
            await asyncio.sleep(max(0.0, due - loop.time()))
            if not data:
                writer.close()
                return
            writer.write(data)

    async with asyncio.TaskGroup() as tasks:
        tasks.create_task(arrive())
        while data := await reader.read(MOST):
            under_way.put_nowait((loop.time() + seconds, data))
        under_way.put_nowait((loop.time() + seconds, b""))


async def _buffered(
    reader: asyncio.StreamReader, writer: asyncio.StreamWriter, seconds: float
) -> None:
    kept = b""
    reading = asyncio.ensure_future(reader.read(MOST))
    while True:
        done, _ = await asyncio.wait({reading}, timeout=seconds if kept else None)
        if not done:
            writer.write(kept)
            kept = b""
            continue
        data = reading.result()
        if not data:
            break
        kept += data
        reading = asyncio.ensure_future(reader.read(MOST))
    writer.write(kept)
    writer.close()
