"""`OwnedFolder`: a temporary folder that belongs to a process.

The process holds a lock on a file in the folder. The system releases the lock when the process
ends, even if it is killed. So a folder without a lock is left over, and the next process that makes
a folder removes it. Unlike process ids, locks work between containers that share the directory, and
are never reused.
"""

from __future__ import annotations

import contextlib
import os
import shutil
import tempfile
from pathlib import Path
from typing import Final

try:
    import fcntl
except ImportError:  # Windows
    fcntl = None  # type: ignore[assignment]

PREFIX: Final = "twostroke-"
LOCK: Final = "owner"


class OwnedFolder:
    def __init__(self, prefix: str = PREFIX, parent: str | None = None) -> None:
        """Make a folder that only this user may enter. `prefix` begins with `PREFIX`."""
        parent = parent or tempfile.gettempdir()
        remove_left_over(parent)
        lock: int | None = None
        while lock is None:  # repeated if another process removes the folder before it is locked
            self.path = tempfile.mkdtemp(prefix=prefix, dir=parent)
            lock = _lock(os.path.join(self.path, LOCK), os.O_CREAT)
        self._lock: int | None = lock

    def remove(self) -> None:
        """Remove the folder and its files. May be called again."""
        if self._lock is not None:
            shutil.rmtree(self.path, ignore_errors=True)
            os.close(self._lock)
            self._lock = None


def remove_left_over(parent: str) -> None:
    """Remove this user's folders whose owners have ended."""
    if fcntl is None:
        return
    with contextlib.suppress(OSError):
        for entry in list(os.scandir(parent)):
            with contextlib.suppress(OSError):
                if entry.name.startswith(PREFIX) and _is_own(entry):
                    _remove_if_left(entry.path)


def _is_own(entry: os.DirEntry[str]) -> bool:
    if not entry.is_dir(follow_symlinks=False):
        return False
    return entry.stat(follow_symlinks=False).st_uid == os.getuid()


def _remove_if_left(path: str) -> None:
    lock = _lock(os.path.join(path, LOCK))
    if lock is not None:
        shutil.rmtree(path, ignore_errors=True)
        os.close(lock)


def _lock(path: str, flags: int = 0) -> int | None:
    """Lock a file and return its descriptor; None if another process has locked or removed it."""
    try:
        file = os.open(path, os.O_RDWR | os.O_CLOEXEC | os.O_NOFOLLOW | flags, 0o600)
    except FileNotFoundError:
        return None
    try:
        if fcntl is not None:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        if Path(path).stat().st_ino == os.fstat(file).st_ino:
            return file
    except OSError:
        pass
    os.close(file)
    return None
