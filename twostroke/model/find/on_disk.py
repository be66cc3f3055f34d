"""What the places models come from have in common: files on a disk, and how to speak of them."""

from __future__ import annotations

import contextlib
import errno
import mmap
import os
import re
from pathlib import Path

from twostroke.errors import ModelError, nearest

GGUF_MAGIC = b"GGUF"
DISK_FULL = (errno.ENOSPC, errno.EDQUOT)
# One of several files that a GGUF model is cut into: NAME-00002-of-00005.gguf
GGUF_PART = re.compile(r"(.*)-(\d{5})-of-(\d{5})(\.gguf)", re.IGNORECASE | re.DOTALL)
MAX_GGUF_PARTS = 1024


def nearest_on_disk(path: Path) -> str:
    """`; did you mean 'x'?` if the folder where `path` should be holds something like it."""
    try:
        return nearest(path.name, os.listdir(path.parent))
    except OSError:
        return ""


def listed(files: list[str], at_most: int = 5) -> str:
    more = f" and {len(files) - at_most} more" if len(files) > at_most else ""
    return ", ".join(files[:at_most]) + more


def gguf_parts(file: str) -> list[str]:
    """All parts of a split GGUF in their order, by the name of one; other files alone."""
    part = GGUF_PART.fullmatch(file)
    if part is None:
        return [file]
    number, count = int(part[2]), int(part[3])
    if not 1 <= number <= count <= MAX_GGUF_PARTS:
        raise ModelError(
            f"{file}: there is no part {number} of {count} (a split GGUF has 1 to {MAX_GGUF_PARTS} "
            "parts, numbered from 00001). Rename the file, or download it again."
        )
    return [f"{part[1]}-{n:05}-of-{part[3]}{part[4]}" for n in range(1, count + 1)]


def forget_pages(mapped: mmap.mmap, first: int, end: int) -> None:
    """These bytes of a mapped file need no memory until someone reads them again."""
    if hasattr(mmap, "MADV_DONTNEED"):
        first = first // mmap.PAGESIZE * mmap.PAGESIZE
        with contextlib.suppress(OSError):
            mapped.madvise(mmap.MADV_DONTNEED, first, end - first)
