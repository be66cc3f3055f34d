"""`OwnedFolder`: a folder under the temporary directory that belongs to a process.

Its owner holds a lock on a file in it. The lock goes with the owner, however that ends, so a folder
whose lock can be taken is left over, and the next folder's owner removes it. A lock, unlike a
process id, holds between containers that share the directory, and is never another process's.
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
        """Make the folder, which this user alone may enter. `prefix` begins with `PREFIX`."""
        parent = parent or tempfile.gettempdir()
        remove_left_over(parent)
        lock: int | None = None
        while lock is None:  # another process may take a new folder for one that is left over
            self.path = tempfile.mkdtemp(prefix=prefix, dir=parent)
            lock = _lock(os.path.join(self.path, LOCK), os.O_CREAT)
        self._lock: int | None = lock

    def remove(self) -> None:
        """Remove the folder with all that is in it; may be called again."""
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
    """Return a descriptor that locks the file; None if another process holds the lock, or has
    removed the file."""
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
