"""The tiers of `gpu_tiers.py` without an engine: the link to the GPU, and a disk."""

from __future__ import annotations

import os
import statistics
from collections.abc import Callable
from functools import partial
from pathlib import Path
from time import perf_counter
from typing import Any

import torch

from bench.gpu_tiers_common import BLOCK_BYTES, Sizes, each, tell
from bench.tiers import leave_the_cache, pieces, plain_reads
from twostroke.exec.memory import available_memory_bytes, host_memory_bytes
from twostroke.kv.device_memory import DeviceBlocks
from twostroke.kv.pinned_memory import PinnedMemory
from twostroke.kv.tiers import disk
from twostroke.kv.tiers.disk import DiskFolder, DiskTier
from twostroke.kv.tiers.host import HostTier
from twostroke.kv.tiers.piece_file import PieceLayout, identity_of
from twostroke.kv.tiers.tier import Load, Store, Tier

# ── the link ────────────────────────────────────────────────────────────────────────────────


def link(sizes: Sizes) -> None:
    device, total = sizes.device, sizes.copied
    on_gpu = device.type == "cuda"
    name = torch.cuda.get_device_name(device) if on_gpu else "cpu"
    memory_bytes = {"host": host_memory_bytes(), "available": available_memory_bytes()}
    tell("machine", {"device": name, "torch": torch.__version__, "cpus": os.cpu_count()})
    tell("memory", memory_bytes)
    start = perf_counter()
    memory = PinnedMemory(total, device)
    tell("pin", {"bytes": total, "seconds": perf_counter() - start})
    there = torch.zeros(total, dtype=torch.uint8, device=device)
    each("copies", lambda: copies(memory.data, there))
    memory.close()
    for size in BLOCK_BYTES:
        each(f"tier_{size}", partial(tier_alone, there, size))


def seconds_of(device: torch.device, work: Callable[[], object], times: int = 5) -> float:
    """The median of several, after one that does not count."""
    taken = []
    for _ in range(times + 1):
        if device.type == "cuda":
            torch.cuda.synchronize()
        start = perf_counter()
        work()
        if device.type == "cuda":
            torch.cuda.synchronize()
        taken.append(perf_counter() - start)
    return statistics.median(taken[1:])


def copies(here: torch.Tensor, there: torch.Tensor) -> dict[str, Any]:
    device, found = there.device, dict[str, Any]()
    for size in (len(here), *BLOCK_BYTES):
        parts = (torch.split(memory, size) for memory in (here, there))
        pairs = list(zip(*parts, strict=True))

        def to_device(pairs: list[tuple[torch.Tensor, torch.Tensor]] = pairs) -> None:
            for one, other in pairs:
                other.copy_(one, non_blocking=True)

        def to_host(pairs: list[tuple[torch.Tensor, torch.Tensor]] = pairs) -> None:
            for one, other in pairs:
                one.copy_(other, non_blocking=True)

        label = "whole" if size == len(here) else str(size)
        found[f"to_device_{label}"] = len(here) / seconds_of(device, to_device)
        found[f"to_host_{label}"] = len(here) / seconds_of(device, to_host)
    return found


def tier_alone(memory: torch.Tensor, size: int) -> dict[str, float]:
    """Bytes a second of the host tier without an engine, one block a piece."""
    data = memory.view(-1, size)
    count = len(data) - 1
    blocks = DeviceBlocks([data], 16)
    start = perf_counter()
    tier = HostTier(blocks, 1, count * size)
    opened_s = perf_counter() - start
    stores = []
    for _ in range(3):
        start = perf_counter()
        store_all(tier, count)
        stores.append(perf_counter() - start)
    fetches = [fetch_all(tier, count) for _ in range(3)]
    probed = tier.speed.bytes_per_s
    tier.close(1.0)
    return {
        "opened_s": opened_s,
        "stored_per_s": count * size / statistics.median(stores),
        "fetched_per_s": count * size / statistics.median(fetches),
        "probed_per_s": probed,
    }


def name_of(number: int) -> bytes:
    return number.to_bytes(4, "little")


def store_all(tier: Tier, count: int) -> None:
    for n in range(count):
        store = Store(tier.name_of(name_of(n)), name_of(n), [[1 + n]])
        store.slot = n
        tier.store(store)
    ended = tier.finished()
    while len(ended) < count:
        tier.wait(1.0)
        ended += tier.finished()
    assert all(one.ok for one in ended), "a store failed"


def fetch_all(tier: Tier, count: int) -> float:
    loads = [Load(tier.name_of(name_of(n)), n, name_of(n), ((0, 0, 1 + n),)) for n in range(count)]
    start = perf_counter()
    read = tier.fetch(loads)
    while not read.poll():
        tier.wait(1.0)
    return perf_counter() - start


# ── a disk ──────────────────────────────────────────────────────────────────────────────────


def file_system(folder: str) -> str:
    """Return the device and the type of the file system of a folder."""
    found = max(
        (line.split()[:3] for line in Path("/proc/mounts").read_text().splitlines()),
        key=lambda mount: (
            len(mount[1]) if f"{folder}/".startswith(mount[1].rstrip("/") + "/") else -1
        ),
    )
    return f"{found[0]} {found[2]}"


def disk_alone(sizes: Sizes, path: Path) -> dict[str, Any]:
    """Bytes a second of the disk tier without an engine, by its number of reading threads, beside
    plain reads of the same files by as many threads."""
    size = BLOCK_BYTES[0]
    total = sizes.copied // 2
    data = torch.randint(255, (total,), dtype=torch.uint8, device=sizes.device).view(-1, size)
    count, found = len(data) - 1, dict[str, Any]()
    layout = PieceLayout(identity_of("bench"), 4, (size,), 1)
    before = disk.READERS
    try:
        for readers in (before, 1, 2, 2 * before, 4 * before):
            disk.READERS = readers  # of the tiers that are opened now
            tier = DiskTier(DiskFolder(str(path), layout, 4 * total), DeviceBlocks([data], 16))
            if not found:
                start = perf_counter()
                store_all(tier, count)
                found["written_per_s"] = count * size / (perf_counter() - start)
                found["direct"] = bool(tier.folder.direct)
            leave_the_cache(path)
            fetched = count * size / fetch_all(tier, count)
            tier.close(5.0)
            plain = plain_reads(path, pieces(path), readers)
            share = fetched / plain
            found[str(readers)] = {"fetched_per_s": fetched, "plain_per_s": plain, "share": share}
            tell("tier_alone", found)
    finally:
        disk.READERS = before
        for file in pieces(path):
            file.unlink()
    return found
