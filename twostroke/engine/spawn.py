"""Starting the engine's process (`process.py`). It imports next to nothing, so that it can be done
first: what the parent imports next, it imports while the engine does the same."""

from __future__ import annotations

import contextlib
import dataclasses
import json
import os
import shutil
import socket
import subprocess
import sys
import tempfile

from twostroke.config import EngineConfig

DEFAULT_BUILDER = "twostroke.engine.build:build_core_engine"
LONGEST_IPC_FOLDER = 90  # a socket's path has room for about 100 bytes


@dataclasses.dataclass(frozen=True, slots=True)
class Spawned:
    """A process that is starting, and where it will send its messages."""

    process: subprocess.Popen[bytes]
    endpoint: str
    folder: str | None  # of the sockets, if they are files; only this user may enter it

    def kill(self) -> None:
        """End it and leave nothing."""
        with contextlib.suppress(ProcessLookupError):
            self.process.kill()
        self.process.wait()
        assert self.process.stdin is not None
        with contextlib.suppress(OSError):
            self.process.stdin.close()
        if self.folder is not None:
            shutil.rmtree(self.folder, ignore_errors=True)


def spawn(config: EngineConfig, builder: str = DEFAULT_BUILDER) -> Spawned:
    """`builder` is "module:function": EngineConfig → an object with `core` and `info()`."""
    folder, endpoint = _endpoint()
    # It finds modules where this process does, "" being the present folder, and nowhere else.
    path = os.pathsep.join(entry or os.getcwd() for entry in sys.path)
    process = subprocess.Popen(
        [sys.executable, "-P", "-m", "twostroke.engine.process", endpoint, builder],
        stdin=subprocess.PIPE,  # its end tells the child that we are gone
        env=os.environ | {"PYTHONPATH": path},
    )
    assert process.stdin is not None
    with contextlib.suppress(BrokenPipeError):  # whoever waits for it learns that it has ended
        process.stdin.write(json.dumps(dataclasses.asdict(config)).encode() + b"\n")
        process.stdin.flush()
    return Spawned(process, endpoint, folder)


def _endpoint() -> tuple[str | None, str]:
    if sys.platform == "win32":
        with socket.socket() as free:
            free.bind(("127.0.0.1", 0))
            return None, f"tcp://127.0.0.1:{free.getsockname()[1]}"
    folder = tempfile.mkdtemp(prefix="twostroke-")
    if len(folder) > LONGEST_IPC_FOLDER:
        os.rmdir(folder)
        folder = tempfile.mkdtemp(prefix="twostroke-", dir="/tmp")
    return folder, f"ipc://{folder}/out"
