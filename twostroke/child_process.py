"""Processes that end with the process that started them, also if that is killed, and also if they
are stopped (SIGSTOP) at the time. Linux only; elsewhere a process notices the end of its stdin.

    start ─▶ python -m twostroke.child_process PARENT MODULE …    sets the signal ─▶ runs the module

Linux sends the signal when the *thread* that started the process ends. So that thread waits for
the process.
"""

from __future__ import annotations

import os
import queue
import runpy
import signal
import subprocess
import sys
import threading
from typing import Any, Final

PR_SET_PDEATHSIG: Final = 1


def start(
    module: str, *arguments: str, env: dict[str, str] | None = None, **options: Any
) -> subprocess.Popen[bytes]:
    """Start `python -m MODULE ARGUMENTS`; `options` are `Popen`'s. The process finds modules where
    this process does, "" being the present folder, and nowhere else."""
    path = os.pathsep.join(entry or os.getcwd() for entry in sys.path)
    environment = (dict(os.environ) if env is None else env) | {"PYTHONPATH": path}
    parent = str(os.getpid())
    command = [sys.executable, "-P", "-m", "twostroke.child_process", parent, module, *arguments]
    started: queue.SimpleQueue[subprocess.Popen[bytes] | BaseException] = queue.SimpleQueue()

    def run() -> None:
        try:
            process = subprocess.Popen(command, env=environment, **options)
        except BaseException as error:
            started.put(error)
            return
        started.put(process)
        process.wait()

    threading.Thread(target=run, name=f"wait for {module}", daemon=True).start()
    result = started.get()
    if isinstance(result, BaseException):
        raise result
    return result


def end_with(parent: int) -> None:
    """Have Linux kill this process when its parent ends, and end now if the parent has ended."""
    if sys.platform != "linux":
        return
    import ctypes  # which takes 10 ms to import

    ctypes.CDLL(None, use_errno=True).prctl(PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
    if os.getppid() != parent:  # it ended before the signal was set
        os._exit(1)


def main() -> None:
    end_with(int(sys.argv[1]))
    module = sys.argv[2]
    del sys.argv[:2]
    runpy.run_module(module, run_name="__main__", alter_sys=True)


if __name__ == "__main__":
    main()
