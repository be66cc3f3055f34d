"""What the machine can do at the most, measured in the background while somebody looks at /dash."""

from __future__ import annotations

import asyncio
import json
import logging
import subprocess
import sys
from time import monotonic

from twostroke import child_process
from twostroke.engine.api import EngineClient
from twostroke.observe.ceilings import Ceilings

log = logging.getLogger(__name__)

IDLE_S = 5.0  # of the engine, before it begins
SPACING_S = 20.0  # between two measurements
MEASUREMENTS = 5  # the best counts: others may have had the machine meanwhile
MAX_TRIES = 20  # with those that a request has ended
PATIENCE_S = 60.0
POLL_S = 0.05


class Roof:
    """The engine's ceilings where it measured them (`--measure-ceilings`); else, on a CPU, those
    that a process of its own measures while the engine is idle: about a second, a few times. A
    request that arrives ends that process, and it is tried again in the next idle time."""

    def __init__(self, client: EngineClient) -> None:
        self._client = client
        self._measured = Ceilings()
        self._left, self._tries, self._next_s = MEASUREMENTS, 0, 0.0
        self._task: asyncio.Task[None] | None = None

    @property
    def ceilings(self) -> Ceilings:
        return self._of_engine() if any(self._of_engine()) else self._measured

    def _of_engine(self) -> Ceilings:
        return Ceilings(self._client.info.read_bytes_per_s, self._client.info.ops_per_s)

    @property
    def is_coming(self) -> bool:
        """It is not known yet, and an idle engine is waited for."""
        return not any(self.ceilings) and (self._wants_more() or self._task is not None)

    def _wants_more(self) -> bool:
        on_cpu = self._client.info.threads > 0
        return on_cpu and not any(self._of_engine()) and self._left > 0 and self._tries < MAX_TRIES

    def look(self, idle_s: float) -> None:
        """Somebody looks on, and the engine has been idle for so long."""
        due = idle_s >= IDLE_S and monotonic() >= self._next_s
        if due and self._task is None and self._wants_more():
            self._tries += 1
            self._task = asyncio.create_task(self._measure(self._client.info.threads))

    async def measure(self) -> None:
        """Measure now, whether somebody looks on or not."""
        if self._wants_more():
            await self._measure(self._client.info.threads)

    async def _measure(self, threads: int) -> None:
        try:
            async with asyncio.timeout(PATIENCE_S):
                said = await self._run(threads)
            if said:
                found = Ceilings(**json.loads(said))
                self._measured = Ceilings(*map(max, self._measured, found))
                self._left -= 1
                self._next_s = monotonic() + SPACING_S
        except (OSError, ValueError, TypeError, TimeoutError) as error:
            log.warning("what this machine can do could not be measured: %s", error)
            self._left = 0
        finally:
            self._task = None

    async def _run(self, threads: int) -> bytes:
        """What the process prints; nothing if the engine got work before it ended."""
        words = (sys.executable, "-P", "-m", "twostroke.observe.ceilings", str(threads))
        with subprocess.Popen(
            words,
            env=child_process.environment(),
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
        ) as child:
            try:
                while child.poll() is None:
                    load = self._client.load()
                    if load.running or load.waiting:
                        return b""
                    await asyncio.sleep(POLL_S)
            finally:
                child.kill()
            if child.returncode:
                raise OSError(f"the process that measures ended with {child.returncode}")
            assert child.stdout is not None
            return child.stdout.read()  # two numbers: they fit into the pipe
