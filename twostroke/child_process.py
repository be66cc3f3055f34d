"""Child processes that Linux kills when their parent ends, even if the parent is killed, and even
if the child is stopped (SIGSTOP). On other systems a child notices the end of its stdin.

    start ─▶ python -m twostroke.child_process PARENT MODULE …    sets the signal ─▶ runs the module

Linux sends the signal when the *thread* that started the process ends. So each process is started
in its own thread, which then waits for the process.
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
    """Start `python -m MODULE ARGUMENTS`, with options of `Popen`. The child imports modules only
    from the folders from which this process imports them."""
    parent = str(os.getpid())
    command = [sys.executable, "-P", "-m", "twostroke.child_process", parent, module, *arguments]
    started: queue.SimpleQueue[subprocess.Popen[bytes] | BaseException] = queue.SimpleQueue()

    def run() -> None:
        try:
            process = subprocess.Popen(command, env=environment(env), **options)
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


def environment(base: dict[str, str] | None = None) -> dict[str, str]:
    """Return an environment for a child, with this process's module folders. `base`: the variables
    of the child; None: the variables of this process."""
    path = os.pathsep.join(entry or os.getcwd() for entry in sys.path)
    return (dict(os.environ) if base is None else base) | {"PYTHONPATH": path}


def end_with_parent(parent: int) -> None:
    """Make Linux kill this process when its parent ends. End now if the parent has ended."""
    if sys.platform != "linux":
        return
    import ctypes  # takes 10 ms

    ctypes.CDLL(None, use_errno=True).prctl(PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
    if os.getppid() != parent:  # the parent ended before the signal was set
        os._exit(1)


def is_stopped(pid: int) -> bool:
    """Return whether a process is known to be stopped, as by SIGSTOP."""
    try:
        with open(f"/proc/{pid}/stat") as stat:
            return stat.read().rpartition(")")[2].split()[0] == "T"
    except OSError:
        return False


def main() -> None:
    end_with_parent(int(sys.argv[1]))
    module = sys.argv[2]
    del sys.argv[:2]
    runpy.run_module(module, run_name="__main__", alter_sys=True)


if __name__ == "__main__":
    main()
