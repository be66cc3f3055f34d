"""The servers of a comparison. An arm is the URL of a running server, a command with `{port}` that
starts a server on that port, or the options of a `twostroke serve` to start.
"""

from __future__ import annotations

import asyncio
import shlex
import socket
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from time import monotonic
from typing import IO

from twostroke.errors import ConfigError
from twostroke.measure.load.http_client import Connections, Endpoint, ServerError

START_S = 600.0
END_S = 30.0
PORT = "{port}"


def is_url(arm: str) -> bool:
    return arm.startswith(("http://", "https://"))


@contextmanager
def serving(arms: Sequence[str]) -> Iterator[list[str]]:
    """Start the servers that are not URLs, and yield the URLs when all servers are ready."""
    with ExitStack() as stack:
        # Start all servers before waiting, so that the models load at the same time.
        started = [None if is_url(arm) else stack.enter_context(_started(arm)) for arm in arms]
        for server in started:
            if server is not None:
                asyncio.run(server.ready())
        yield [
            arm if server is None else server.url for arm, server in zip(arms, started, strict=True)
        ]


def command_line(arm: str, port: int) -> list[str]:
    try:
        words = shlex.split(arm)
    except ValueError as error:
        raise ConfigError(f"{arm!r} is not a command line: {error}") from None
    if PORT in arm:
        return [word.replace(PORT, str(port)) for word in words]
    return [sys.executable, "-m", "twostroke", "serve", "--port", str(port), *words]


class _Server:
    """A server that was started for a comparison."""

    def __init__(self, arm: str, port: int, process: subprocess.Popen[bytes], log: IO[bytes]):
        self.url = f"http://127.0.0.1:{port}"
        self._arm, self._process, self._log = arm, process, log

    async def ready(self) -> None:
        connections = Connections(Endpoint(self.url))
        end_s = monotonic() + START_S
        try:
            while monotonic() < end_s:
                if self._process.poll() is not None:
                    self._fail(f"exited with status {self._process.returncode} during the start")
                try:
                    await connections.fetch("/health", timeout_s=5.0)
                    return
                except ServerError as error:
                    if error.status == 404:  # the server is up, but has no such route
                        return
                    await asyncio.sleep(0.05)
        finally:
            connections.close()
        self._fail(f"not ready after {START_S:.0f} s")

    def _fail(self, reason: str) -> None:
        name = self._arm if PORT in self._arm else f"twostroke serve {self._arm}".rstrip()
        self._log.seek(0)
        last_lines = self._log.read().decode(errors="replace").strip().splitlines()[-3:]
        raise ServerError(f"`{name}`: {reason}" + "".join(f"\n  {line}" for line in last_lines))


@contextmanager
def _started(arm: str) -> Iterator[_Server]:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    command = command_line(arm, port)
    with tempfile.TemporaryFile() as log:
        try:
            process = subprocess.Popen(command, stdout=log, stderr=subprocess.STDOUT)
        except OSError as error:
            raise ServerError(f"`{command[0]}` does not start: {error.strerror}") from None
        try:
            yield _Server(arm, port, process, log)
        finally:
            process.terminate()
            try:
                process.wait(END_S)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()
