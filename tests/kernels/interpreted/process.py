"""A process that runs the tests of interpreted kernels, for a pytest that compiles kernels.

Triton decides at its import whether it interprets. A pytest process (a worker of pytest-xdist, too)
starts one such process at its first interpreted test, sends it the node ids of tests, and receives
the reports. The process imports torch and collects the tests once.
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import tempfile
from contextlib import suppress
from multiprocessing.connection import Connection, Pipe
from pathlib import Path
from typing import Any

import pytest
from _pytest.runner import runtestprotocol

FOLDER = Path(__file__).parent
OUTPUT_BYTES = 6000  # the part of the process's output that a failure shows
START_S = 300.0  # time limit of the imports and the collection
END_S = 10.0  # time for the process to end by itself

Report = dict[str, Any]  # serialised by pytest


class Interpreter:
    """The parent's side: starts the process at the first test, and after the end of another one."""

    def __init__(self, config: pytest.Config) -> None:
        self._command = [sys.executable, "-m", __name__, config.getoption("tbstyle")]
        self._root = config.rootpath
        self._process: Process | None = None
        self._failure: BaseException | None = None  # of a start: there is no other start

    def run(self, nodeid: str, limit_s: float | None) -> list[Report]:
        """Run one test, within a time limit that does not include the start of the process."""
        if self._failure is None and (self._process is None or self._process.has_ended):
            self.end()
            self._process = Process(self._command, self._root)
            try:
                self._process.wait_for_start()
            except pytest.fail.Exception as failure:
                self._failure = failure
        if self._failure is not None:
            raise self._failure
        assert self._process is not None
        return self._process.run(nodeid, limit_s)

    def end(self) -> None:
        if self._process is not None:
            self._process.end()
            self._process = None


class Process:
    """One process, from its start to its end."""

    def __init__(self, command: list[str], root: Path) -> None:
        self._connection, other = Pipe()
        self._output = tempfile.TemporaryFile()  # noqa: SIM115
        self._collected: set[str] = set()
        env = {**os.environ, "TRITON_INTERPRET": "1", "PYTHONWARNINGS": "ignore"}
        env.pop("PYTEST_ADDOPTS", None)
        with other:
            self._child = subprocess.Popen(
                [*command, str(root), str(other.fileno())],
                cwd=root,
                env=env,
                stdin=subprocess.DEVNULL,
                stdout=self._output,
                stderr=subprocess.STDOUT,
                pass_fds=[other.fileno()],
            )

    @property
    def has_ended(self) -> bool:
        return self._child.poll() is not None

    def wait_for_start(self) -> None:
        self._collected = set(self._receive("start", START_S))

    def run(self, nodeid: str, limit_s: float | None) -> list[Report]:
        if nodeid not in self._collected:
            raise self._failed("did not collect the test")
        with suppress(OSError):  # the process has ended: `_receive` fails
            self._connection.send(nodeid)
        return self._receive("test", limit_s)

    def end(self) -> None:
        """End the process: it ends by itself at the end of the connection."""
        self._connection.close()
        self._wait()
        self._output.close()

    def _receive(self, work: str, limit_s: float | None) -> Any:
        """The result of the work that the process does now."""
        try:
            if self._connection.poll(limit_s):
                return self._connection.recv()
        except (EOFError, OSError):
            code = self._wait()
            status = signal.Signals(-code).name if code < 0 else f"status {code}"
            raise self._failed(f"ended with {status} during the {work}") from None
        self._child.send_signal(signal.SIGABRT)  # faulthandler writes the stacks of all threads
        self._wait()
        raise self._failed(f"exceeded the time limit of the {work}, {limit_s} s")

    def _wait(self) -> int:
        """Wait for the end of the process, and return its exit code."""
        try:
            return self._child.wait(END_S)
        except subprocess.TimeoutExpired:
            self._child.kill()
            return self._child.wait()

    def _failed(self, message: str) -> BaseException:
        """A failure of the test, with the last output of the process."""
        file = self._output.fileno()
        start = max(0, os.fstat(file).st_size - OUTPUT_BYTES)
        output = os.pread(file, OUTPUT_BYTES, start).decode(errors="replace")
        message = f"The interpreter process {message}. Its last output:\n{output}"
        return pytest.fail.Exception(message, pytrace=False)


class Requests:
    """The child's side: a plugin that runs the tests that it receives, not all tests."""

    def __init__(self, connection: Connection) -> None:
        self._connection = connection

    @pytest.hookimpl(tryfirst=True)
    def pytest_runtestloop(self, session: pytest.Session) -> bool:
        serialise = session.config.hook.pytest_report_to_serializable
        items = {item.nodeid: item for item in session.items}
        self._connection.send(list(items))
        with suppress(EOFError, KeyboardInterrupt):
            while True:
                item = items[self._connection.recv()]
                reports = runtestprotocol(item, log=False, nextitem=None)
                self._connection.send([serialise(config=session.config, report=r) for r in reports])
        return True


def main(style: str, root: str, descriptor: str) -> int:
    """Collect all tests of the folder, with all markers, then serve requests."""
    options = ["-q", "-o", "addopts=", "-p", "no:cacheprovider", "-p", "no:xdist"]
    options += [f"--rootdir={root}", f"--tb={style}", str(FOLDER)]
    return int(pytest.main(options, [Requests(Connection(int(descriptor)))]))


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))
