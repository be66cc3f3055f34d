"""`spawn` starts the engine's process (`process.py`). This module imports little, so that it can
start the process first: parent and engine then import their modules at the same time.

Each engine has a `Launcher`. `LocalLauncher` starts a process on this machine, the launcher of
`route/on_ray.py` an actor of a Ray cluster.
"""

from __future__ import annotations

import contextlib
import dataclasses
import json
import signal
import socket
import subprocess
import sys
from typing import Protocol

from twostroke import child_process
from twostroke.config import EngineConfig
from twostroke.owned_folder import OwnedFolder

DEFAULT_BUILDER = "twostroke.engine.build:build_core_engine"
MAX_IPC_FOLDER = 90  # characters; the path of a socket has room for about 100 bytes


class EngineProcess(Protocol):
    """The process of an engine: it is starting, runs, or has ended."""

    @property
    def endpoint(self) -> str:
        """The address at which the server must listen for messages of the process. The port "*" is
        any free port."""

    @property
    def secret(self) -> str | None:
        """The secret of the sockets between the process and the server. None: only this user can
        reach the sockets."""

    @property
    def start_timeout_s(self) -> float:
        """The time after which a process that is not ready is killed; 0: no limit."""

    @property
    def running(self) -> bool:
        """Return whether the process has been started."""

    @property
    def stopped(self) -> bool:
        """Return whether the process is known to be stopped, as by SIGSTOP."""

    def set_parent_endpoint(self, endpoint: str) -> None:
        """Set the address at which the server listens for messages of the process."""

    def wait(self) -> None:
        """Return when the process has ended. Called in a separate thread."""

    def how_it_ended(self) -> str: ...

    def end(self) -> None:
        """Kill the process, so that `wait` returns soon. Called in the event loop, at any time."""

    def clean_up(self) -> None:
        """Remove the files of a process that has ended."""


class Launcher(Protocol):
    """Starts the process of one engine, and a new process after each end."""

    def launch(self) -> EngineProcess: ...

    async def close(self) -> None:
        """Release the resources of the engine. No process is launched after this."""


@dataclasses.dataclass(frozen=True, slots=True)
class Spawned:
    """A process of this machine, and the address to which it sends its messages."""

    process: subprocess.Popen[bytes]
    endpoint: str
    folder: OwnedFolder | None  # the folder of the sockets, if they are files
    start_timeout_s: float = 0.0
    secret: str | None = None

    @property
    def running(self) -> bool:
        return True

    @property
    def stopped(self) -> bool:
        return child_process.is_stopped(self.process.pid)

    def set_parent_endpoint(self, endpoint: str) -> None: ...

    def wait(self) -> None:
        self.process.wait()

    def how_it_ended(self) -> str:
        code = self.process.returncode
        if code is not None and code < 0:
            memory = ", perhaps for lack of memory" if -code == signal.SIGKILL else ""
            return f"its process was ended by signal {-code}{memory}"
        return f"its process ended with exit code {code}"

    def end(self) -> None:
        with contextlib.suppress(ProcessLookupError):
            self.process.kill()

    def clean_up(self) -> None:
        assert self.process.stdin is not None
        with contextlib.suppress(OSError):
            self.process.stdin.close()
        if self.folder is not None:
            self.folder.remove()

    def kill(self) -> None:
        """Kill the process, wait for its end, and clean up."""
        self.end()
        self.process.wait()
        self.clean_up()


class LocalLauncher:
    """Starts an engine as a process of this machine."""

    def __init__(
        self, config: EngineConfig, builder: str = DEFAULT_BUILDER, spawned: Spawned | None = None
    ) -> None:
        """`spawned`: the first process, if it has been started already."""
        self._config, self._builder, self._spawned = config, builder, spawned

    def launch(self) -> Spawned:
        spawned, self._spawned = self._spawned, None
        return spawned or spawn(self._config, self._builder)

    async def close(self) -> None: ...


def spawn(config: EngineConfig, builder: str = DEFAULT_BUILDER) -> Spawned:
    """Start an engine process. `builder`: "module:function", the function that makes an object with
    `core` and `info()` from an `EngineConfig`."""
    folder, endpoint = _endpoint()
    process = child_process.start(
        "twostroke.engine.process",
        endpoint,
        builder,
        stdin=subprocess.PIPE,  # closed when this process ends: the engine then ends, too
    )
    assert process.stdin is not None
    with contextlib.suppress(BrokenPipeError):  # the process has ended, which `wait` reports
        process.stdin.write(json.dumps(dataclasses.asdict(config)).encode() + b"\n")
        process.stdin.flush()
    return Spawned(process, endpoint, folder, config.start_timeout_s)


def _endpoint() -> tuple[OwnedFolder | None, str]:
    if sys.platform == "win32":
        with socket.socket() as free:
            free.bind(("127.0.0.1", 0))
            return None, f"tcp://127.0.0.1:{free.getsockname()[1]}"
    folder = OwnedFolder()
    if len(folder.path) > MAX_IPC_FOLDER:
        folder.remove()
        folder = OwnedFolder(parent="/tmp")
    return folder, f"ipc://{folder.path}/out"
