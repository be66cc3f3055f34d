"""What the machine can do at the most, measured in the background while somebody looks at /dash."""

from __future__ import annotations

import asyncio
import contextlib
import json
import logging
import os
import sys

from twostroke.engine.api import EngineClient
from twostroke.observe.ceilings import Ceilings

log = logging.getLogger(__name__)

IDLE_S = 5.0  # of the engine, before it begins
PATIENCE_S = 60.0
POLL_S = 0.05
MAX_TRIES = 10


class Roof:
    """The engine's ceilings where it measured them (`--measure-ceilings`); else, on a CPU, those
    that a process of low priority measures once while the engine is idle: about a second. A request
    that arrives ends that process, and it is tried again in the next idle time."""

    def __init__(self, client: EngineClient) -> None:
        self._client = client
        self._measured = Ceilings()
        self._tries = 0
        self._task: asyncio.Task[None] | None = None

    @property
    def ceilings(self) -> Ceilings:
        info = self._client.info
        told = Ceilings(info.read_bytes_per_s, info.ops_per_s)
        return told if any(told) else self._measured

    @property
    def is_coming(self) -> bool:
        """It is not known yet, and an idle engine is waited for."""
        can = self._client.info.threads > 0 and self._tries < MAX_TRIES
        return not any(self.ceilings) and (can or self._task is not None)

    def look(self, idle_s: float) -> None:
        """Somebody looks on, and the engine has been idle for so long."""
        if self.is_coming and self._task is None and idle_s >= IDLE_S:
            self._tries += 1
            self._task = asyncio.create_task(self._measure(self._client.info.threads))

    async def _measure(self, threads: int) -> None:
        try:
            async with asyncio.timeout(PATIENCE_S):
                said = await self._run(threads)
            if said:
                self._measured = Ceilings(**json.loads(said))
        except (OSError, ValueError, TypeError, TimeoutError) as error:
            log.warning("what this machine can do could not be measured: %s", error)
            self._tries = MAX_TRIES
        finally:
            self._task = None

    async def _run(self, threads: int) -> bytes:
        """What the process prints; nothing if the engine got work before it ended."""
        words = (sys.executable, "-P", "-m", "twostroke.observe.ceilings", str(threads))
        path = os.pathsep.join(entry or os.getcwd() for entry in sys.path)  # as the engine's
        child = await asyncio.create_subprocess_exec(
            *words,
            env=os.environ | {"PYTHONPATH": path},
            stdin=asyncio.subprocess.DEVNULL,
            stdout=asyncio.subprocess.PIPE,
            stderr=asyncio.subprocess.DEVNULL,
        )
        reading = asyncio.create_task(child.communicate())
        try:
            while not reading.done():
                load = self._client.load()
                if load.running or load.waiting:
                    return b""
                await asyncio.wait((reading,), timeout=POLL_S)
            if child.returncode:
                raise OSError(f"the process that measures ended with {child.returncode}")
            return reading.result()[0]
        finally:
            with contextlib.suppress(ProcessLookupError):
                child.kill()
            await reading
