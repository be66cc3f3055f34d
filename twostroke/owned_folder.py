"""`OwnedFolder`: a temporary folder that belongs to a process.

The process locks a file in the folder. The system releases the lock when the process ends, even if
the process is killed. So a folder whose file is not locked is left over, and the next process that
makes a folder removes the left-over folder. Unlike process ids, locks work between containers that
share the directory, and are never reused.

On Windows and on file systems without locks, the folder of a killed process is not removed.
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
LOCK: Final = "owner"  # the name of the locked file


class OwnedFolder:
    def __init__(self, prefix: str = PREFIX, parent: str | None = None) -> None:
        """Make a folder that only this user may enter. `prefix` begins with `PREFIX`."""
        parent = parent or tempfile.gettempdir()
        remove_left_over(parent)
        file: int | None = None
        while file is None:  # repeated if another process removes the folder before it is locked
            self.path = tempfile.mkdtemp(prefix=prefix, dir=parent)
            file = _lock(os.path.join(self.path, LOCK), create=True)
        self._file: int | None = file

    def remove(self) -> None:
        """Remove the folder and its files. May be called again."""
        file, self._file = self._file, None
        if file is None:
            return
        if fcntl is None:
            os.close(file)  # Windows does not remove an open file
        shutil.rmtree(self.path, ignore_errors=True)
        if fcntl is not None:
            os.close(file)


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
    file = _lock(os.path.join(path, LOCK))
    if file is not None:
        shutil.rmtree(path, ignore_errors=True)
        os.close(file)


def _lock(path: str, create: bool = False) -> int | None:
    """Open and lock a file. Return its descriptor, or None if another process has locked or removed
    the file.

    On a file system without locks, return None for an existing file. With `create`, remove the name
    of the new file instead, so that no other process finds an unlocked file, and return its
    descriptor.
    """
    flags = os.O_RDWR | (os.O_CREAT if create else 0) | getattr(os, "O_NOFOLLOW", 0)
    try:
        file = os.open(path, flags, 0o600)
    except FileNotFoundError:
        return None
    if fcntl is None:
        return file
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        if Path(path).stat().st_ino == os.fstat(file).st_ino:
            return file
    except (BlockingIOError, FileNotFoundError):
        pass
    except OSError:  # the file system has no locks
        if create:
            with contextlib.suppress(OSError):
                os.remove(path)
            return file
    os.close(file)
    return None
