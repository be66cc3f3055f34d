"""A slow TCP link to a local port, for the doctor's exam.

far         every byte arrives `seconds` later, in both directions
buffering   a proxy that passes an answer on after `seconds` without a new byte
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, suppress

MAX_READ = 1 << 16  # bytes


@asynccontextmanager
async def slow_link(port: int, mode: str, seconds: float) -> AsyncIterator[int]:
    """Open a slow link to `port` of this machine, and yield the port of the link."""

    async def connect(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        server_reader, server_writer = await asyncio.open_connection("127.0.0.1", port)
        back = _buffered if mode == "buffering" else _delayed
        there_s = 0.0 if mode == "buffering" else seconds
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
        while data := await reader.read(MAX_READ):
            under_way.put_nowait((loop.time() + seconds, data))
        under_way.put_nowait((loop.time() + seconds, b""))


async def _buffered(
    reader: asyncio.StreamReader, writer: asyncio.StreamWriter, seconds: float
) -> None:
    kept = b""
    reading = asyncio.ensure_future(reader.read(MAX_READ))
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
        reading = asyncio.ensure_future(reader.read(MAX_READ))
    writer.write(kept)
    writer.close()
