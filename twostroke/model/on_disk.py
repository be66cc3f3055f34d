"""What the places models come from have in common: files on a disk, and how to speak of them."""

from __future__ import annotations

import contextlib
import errno
import mmap
import os
from pathlib import Path

from twostroke.errors import nearest

GGUF_MAGIC = b"GGUF"
DISK_FULL = (errno.ENOSPC, errno.EDQUOT)


def nearest_on_disk(path: Path) -> str:
    """`; did you mean 'x'?` if the folder where `path` should be holds something like it."""
    try:
        return nearest(path.name, os.listdir(path.parent))
    except OSError:
        return ""


def listed(files: list[str], at_most: int = 5) -> str:
    more = f" and {len(files) - at_most} more" if len(files) > at_most else ""
    return ", ".join(files[:at_most]) + more


def forget_pages(mapped: mmap.mmap, first: int, end: int) -> None:
    """These bytes of a mapped file need no memory until someone reads them again."""
    if hasattr(mmap, "MADV_DONTNEED"):
        first = first // mmap.PAGESIZE * mmap.PAGESIZE
        with contextlib.suppress(OSError):
            mapped.madvise(mmap.MADV_DONTNEED, first, end - first)
