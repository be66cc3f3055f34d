"""`CeilingsProbe`: the maximum rates (ceilings) of the machine, measured in the background while a
page that shows them is open."""

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

IDLE_S = 5.0  # idle time of the engine before a measurement
SPACING_S = 20.0  # between two measurements
MEASUREMENTS = 5  # the best counts, because other programs may slow down a measurement
MAX_TRIES = 20  # including measurements that were stopped because a request arrived
TIMEOUT_S = 60.0
POLL_S = 0.05


class CeilingsProbe:
    """Provides the ceilings that the engine has measured (`--measure-ceilings`). If it has measured
    none, a process measures those of a CPU while the engine is idle: a few times, for about a
    second. When a request arrives, the process is killed, and started again at the next idle
    time."""

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
    def is_pending(self) -> bool:
        """Whether the ceilings are unknown and will be measured when the engine is idle."""
        return not any(self.ceilings) and (self._wants_more() or self._task is not None)

    def _wants_more(self) -> bool:
        on_cpu = self._client.info.threads > 0
        return on_cpu and not any(self._of_engine()) and self._left > 0 and self._tries < MAX_TRIES

    def measure_if_idle(self, idle_s: float) -> None:
        """Start a measurement if the engine has been idle long enough. Called while a page is
        open."""
        due = idle_s >= IDLE_S and monotonic() >= self._next_s
        if due and self._task is None and self._wants_more():
            self._tries += 1
            self._task = asyncio.create_task(self._measure(self._client.info.threads))

    async def measure(self) -> None:
        """Measure now."""
        if self._wants_more():
            await self._measure(self._client.info.threads)

    async def _measure(self, threads: int) -> None:
        try:
            async with asyncio.timeout(TIMEOUT_S):
                output = await self._run(threads)
            if output:
                found = Ceilings(**json.loads(output))
                self._measured = Ceilings(*map(max, self._measured, found))
                self._left -= 1
                self._next_s = monotonic() + SPACING_S
        except (OSError, ValueError, TypeError, TimeoutError) as error:
            log.warning("the ceilings of this machine could not be measured: %s", error)
            self._left = 0
        finally:
            self._task = None

    async def _run(self, threads: int) -> bytes:
        """Return the output of the process; b"" if it was killed because a request arrived."""
        command = (sys.executable, "-P", "-m", "twostroke.observe.ceilings", str(threads))
        with subprocess.Popen(
            command,
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
            return child.stdout.read()  # two numbers, which fit into the pipe
