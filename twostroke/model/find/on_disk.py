"""Names of model files on a disk: split GGUF files, similar names and lists for error messages."""

from __future__ import annotations

import contextlib
import errno
import mmap
import os
import re
from pathlib import Path

from twostroke.errors import ModelError, did_you_mean

GGUF_MAGIC = b"GGUF"
DISK_FULL = (errno.ENOSPC, errno.EDQUOT)
# A file of a split GGUF model: NAME-00002-of-00005.gguf
SPLIT_NAME = re.compile(r"(.*)-(\d{5})-of-(\d{5})(\.gguf)", re.IGNORECASE | re.DOTALL)
MAX_SPLIT_FILES = 1024


def nearest_on_disk(path: Path) -> str:
    """Return `; did you mean 'x'?` if the folder of `path` holds a similar name."""
    try:
        return did_you_mean(path.name, os.listdir(path.parent))
    except OSError:
        return ""


def names_for_message(files: list[str], max_names: int = 5) -> str:
    """Return the first names, and the number of the others: `a, b and 3 more`."""
    more = f" and {len(files) - max_names} more" if len(files) > max_names else ""
    return ", ".join(files[:max_names]) + more


def split_files(file: str) -> list[str]:
    """Return the names of all files of a split GGUF in order; `[file]` for any other file."""
    part = SPLIT_NAME.fullmatch(file)
    if part is None:
        return [file]
    number, count = int(part[2]), int(part[3])
    if not 1 <= number <= count <= MAX_SPLIT_FILES:
        raise ModelError(
            f"{file}: there is no part {number} of {count} (a split GGUF has 1 to "
            f"{MAX_SPLIT_FILES} parts, numbered from 00001). Rename the file, or download it again."
        )
    return [f"{part[1]}-{n:05}-of-{part[3]}{part[4]}" for n in range(1, count + 1)]


def release_pages(mapped: mmap.mmap, first: int, end: int) -> None:
    """Release the memory of the bytes from `first` to `end` of a mapped file. The next access reads
    them from the disk again."""
    if hasattr(mmap, "MADV_DONTNEED"):
        first = first // mmap.PAGESIZE * mmap.PAGESIZE
        with contextlib.suppress(OSError):
            mapped.madvise(mmap.MADV_DONTNEED, first, end - first)
