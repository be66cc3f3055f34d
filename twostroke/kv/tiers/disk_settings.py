"""`DiskSettings`: the setting `kv_disk_cache`, "DIR[:SIZE]"."""

from __future__ import annotations

import os
import re
import shutil
from typing import NamedTuple

from twostroke.errors import ConfigError

UNITS = {"": 0, "k": 1, "m": 2, "g": 3, "t": 4}
SIZE = re.compile(r"(\d+(?:\.\d+)?) ?([kmgt]?)(i?b)?")
SHARE_OF_FREE = 0.5  # share of the free space that is used if no size is set
EXPECTED = "a folder, or a folder and a size such as /var/cache/kv:20GiB"


class DiskSettings(NamedTuple):
    folder: str
    max_bytes: int | None  # None: `SHARE_OF_FREE` of the free space


def read_size(text: str) -> int | None:
    """Parse `4096`, `512M` and `4GiB` (powers of 1024), and `4GB` (powers of 1000). Return None if
    the text is not a size."""
    match = SIZE.fullmatch(text.strip().lower())
    if match is None or (match[3] == "ib" and not match[2]):
        return None
    base = 1000 if match[3] == "b" else 1024
    return int(float(match[1]) * base ** UNITS[match[2]])


def read_disk_cache(text: str) -> DiskSettings:
    """Parse "DIR" or "DIR:SIZE"."""
    folder, colon, size = text.rpartition(":")
    max_bytes = read_size(size) if colon else None
    if max_bytes is None:
        if colon and re.match(r"-?\.?\d", size):
            raise ConfigError(f"kv_disk_cache: {size!r} is not a size; give {EXPECTED}")
        folder = text
    if not folder:
        raise ConfigError(f"kv_disk_cache needs {EXPECTED}")
    if max_bytes == 0:
        raise ConfigError(
            f"kv_disk_cache: the size is 0; leave kv_disk_cache out, or give {EXPECTED}"
        )
    return DiskSettings(os.path.abspath(os.path.expanduser(folder)), max_bytes)


def disk_bytes(settings: DiskSettings) -> int:
    """Return the size of the cache; raise `ConfigError` if the disk is smaller."""
    parent = settings.folder
    while not os.path.exists(parent):
        parent = os.path.dirname(parent)
    try:
        usage = shutil.disk_usage(parent)
    except OSError as error:
        raise ConfigError(
            f"kv_disk_cache: the disk of {settings.folder} cannot be examined ({error.strerror})"
        ) from None
    if settings.max_bytes is None:
        return int(usage.free * SHARE_OF_FREE) + _size_of(settings.folder)
    if settings.max_bytes > usage.total:
        raise ConfigError(
            f"kv_disk_cache: {settings.max_bytes / 1024**3:.1f} GiB were given, and the disk of "
            f"{settings.folder} has {usage.total / 1024**3:.1f} GiB; lower the size"
        )
    return settings.max_bytes


def _size_of(folder: str) -> int:
    """Return the bytes of the existing cache in the folder."""
    total = 0
    for where, _, names in os.walk(folder):
        for name in names:
            try:
                total += os.lstat(os.path.join(where, name)).st_size
            except OSError:
                continue
    return total
