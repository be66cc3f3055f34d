"""Processes end with their parent, and their folders do at the next start."""

from __future__ import annotations

import contextlib
import errno
import fcntl
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from twostroke import child_process, owned_folder
from twostroke.owned_folder import LOCK, OwnedFolder

PATIENCE_S = 240
linux = pytest.mark.skipif(sys.platform != "linux", reason="only Linux has PR_SET_PDEATHSIG")
# A program with a child that ignores the end of its stdin.
PARENT = """
import subprocess, sys, time
from twostroke import child_process
child = child_process.start("tests.engine.deaf", stdin=subprocess.PIPE, stdout=subprocess.PIPE)
child.stdout.readline()
print(child.pid, flush=True)
time.sleep(600)
"""


def until(condition: Callable[[], bool]) -> None:
    end = time.monotonic() + PATIENCE_S
    while not condition():
        assert time.monotonic() < end
        time.sleep(0.01)


def gone(pid: int) -> bool:
    try:
        stat = Path(f"/proc/{pid}/stat").read_text()
    except FileNotFoundError:
        return True
    return stat.rpartition(")")[2].split()[0] == "Z"


@linux
@pytest.mark.parametrize("stopped", [False, True])
def test_a_child_ends_with_its_parent_even_if_it_ignores_stdin_or_is_stopped(stopped: bool) -> None:
    parent = subprocess.Popen([sys.executable, "-c", PARENT], stdout=subprocess.PIPE)
    assert parent.stdout is not None
    child = int(parent.stdout.readline())
    if stopped:
        os.kill(child, signal.SIGSTOP)
    assert not gone(child)
    parent.kill()
    parent.communicate()
    until(lambda: gone(child))


@linux
def test_a_child_whose_parent_has_ended_before_the_signal_was_set_ends() -> None:
    done = subprocess.run(
        [sys.executable, "-m", "twostroke.child_process", "1", "tests.engine.deaf"],
        stdin=subprocess.DEVNULL,
        capture_output=True,
        timeout=PATIENCE_S,
    )
    assert (done.returncode, done.stdout) == (1, b"")


def test_a_child_outlives_the_thread_that_started_it() -> None:
    found: list[subprocess.Popen[bytes]] = []

    def start() -> None:
        pipe = subprocess.PIPE
        found.append(child_process.start("tests.engine.deaf", stdin=pipe, stdout=pipe))

    thread = threading.Thread(target=start)
    thread.start()
    thread.join(PATIENCE_S)
    (child,) = found
    try:
        assert child.stdin is not None
        assert child.stdout is not None
        assert child.stdout.readline() == b"ready\n"
        for word in (b"a\n", b"b\n"):  # it answers, so it lives
            child.stdin.write(word)
            child.stdin.flush()
            assert child.stdout.readline() == word
    finally:
        child.kill()
        assert child.wait(PATIENCE_S) == -signal.SIGKILL


OWNER = """
import sys, time
from twostroke.owned_folder import OwnedFolder
print(OwnedFolder(parent=sys.argv[1]).path, flush=True)
time.sleep(600)
"""


def test_folders_of_killed_processes_are_removed_by_the_next_start_and_no_others(
    tmp_path: Path,
) -> None:
    others = [tmp_path / "twostroke-none", tmp_path / "other"]
    for folder in others:
        folder.mkdir()
    (others[1] / LOCK).touch()
    (tmp_path / "twostroke-link").symlink_to(others[1])
    owners = [
        subprocess.Popen([sys.executable, "-c", OWNER, str(tmp_path)], stdout=subprocess.PIPE)
        for _ in range(2)
    ]
    paths = [Path(owner.stdout.readline().decode().strip()) for owner in owners if owner.stdout]
    assert paths[0].stat().st_mode & 0o777 == 0o700
    owners[0].kill()
    owners[0].communicate()
    assert paths[0].exists()
    mine = OwnedFolder(parent=str(tmp_path))
    assert not paths[0].exists()
    assert paths[1].exists()
    second = OwnedFolder(parent=str(tmp_path))  # this process's own is not left over either
    assert Path(mine.path).exists()
    for folder in (mine, second, second):
        folder.remove()
    assert not Path(mine.path).exists()
    assert not Path(second.path).exists()
    assert all(folder.exists() for folder in others)
    owners[1].kill()
    owners[1].communicate()


def test_a_new_folder_that_another_process_takes_for_a_left_one_is_made_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Between the making of the file and its lock."""
    plain, held = fcntl.flock, []

    def flock(file: int, operation: int) -> None:
        if not held:  # the other process is faster, and removes the folder
            path = os.readlink(f"/proc/self/fd/{file}")
            held.append(path)
            os.remove(path)
            os.rmdir(os.path.dirname(path))
        plain(file, operation)

    monkeypatch.setattr(fcntl, "flock", flock)
    folder = OwnedFolder(parent=str(tmp_path))
    assert (Path(folder.path) / LOCK).exists()
    assert held == [held[0]]
    assert os.path.dirname(held[0]) != folder.path
    folder.remove()


@pytest.mark.parametrize("code", [errno.ENOLCK, errno.EOPNOTSUPP])
def test_a_file_system_without_locks_gives_one_folder_that_other_processes_leave_alone(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, code: int
) -> None:
    with monkeypatch.context() as patch:

        def flock(file: int, operation: int) -> None:
            raise OSError(code, os.strerror(code))

        patch.setattr(fcntl, "flock", flock)
        folder = OwnedFolder(parent=str(tmp_path))
        assert [str(path) for path in tmp_path.iterdir()] == [folder.path]
        OwnedFolder(parent=str(tmp_path)).remove()
    OwnedFolder(parent=str(tmp_path)).remove()  # a process for which locks work
    assert Path(folder.path).exists()
    folder.remove()
    folder.remove()
    assert not list(tmp_path.iterdir())


def test_a_folder_needs_neither_locks_nor_flags_that_windows_lacks(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(owned_folder, "fcntl", None)
    for name in ("O_CLOEXEC", "O_NOFOLLOW", "getuid"):
        monkeypatch.delattr(os, name)
    folder = OwnedFolder(parent=str(tmp_path))
    file = folder._file
    assert file is not None
    is_closed = []

    def rmtree(path: str, ignore_errors: bool) -> None:  # Windows does not remove open files
        with contextlib.suppress(OSError):
            os.fstat(file)
            return
        is_closed.append(True)
        os.remove(os.path.join(path, LOCK))
        os.rmdir(path)

    monkeypatch.setattr(owned_folder.shutil, "rmtree", rmtree)
    folder.remove()
    folder.remove()
    assert is_closed == [True]
    assert not list(tmp_path.iterdir())
