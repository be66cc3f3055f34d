"""KV blocks in a torch device's memory, which other processes on the machine open: CUDA IPC.

    sender    pool ── handle of its memory ─▶ Address      receiver   opens it once, keeps it
                                              Offer ─────▶            one launch copies the blocks,
                                                                      on a stream of its own, while
                                                                      steps run

Copies are device to device, and only of the blocks that are asked for. On a CPU the same code runs
over memory that both map: what the tests run. The offers that stand are in shared memory
(`shared_memory.py`), which also tells whether the sender is alive: memory of one that is not is let
go (`tidy`), or the GPU would not have it back for the next.
"""

from __future__ import annotations

import contextlib
import logging
import math
import mmap
import os
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import msgspec
import torch

from twostroke.environment import visible_gpus
from twostroke.kv.shared_memory import OthersMemory, SharedMemory, SharedPools
from twostroke.kv.transfer import (
    Address,
    Copy,
    KVTransfer,
    Offer,
    Places,
    Region,
    SenderGoneError,
    TruncatedError,
    UnreachableError,
    Way,
    this_host,
)
from twostroke.kv.ways import Sharing, nixl, sockets

LAUNCHED_BYTES = 1 << 30  # between two steps, while others write: half a millisecond on an H200
STAGED_BYTES = 64 << 20  # at one time, where there is no kernel that copies directly


log = logging.getLogger(__name__)


class Handle(msgspec.Struct, array_like=True, frozen=True):
    """The memory of one KV group's pool."""

    num_blocks: int
    start: int  # on a CPU: in the memory that the address names
    # As torch shares a storage of a GPU's memory.
    cuda: tuple[int, bytes, int, int, bytes | None, int, bytes | None, bool] | None


_encode = msgspec.msgpack.Encoder().encode
_decode = msgspec.msgpack.Decoder(list[Handle]).decode
CopyBlocks = Callable[[torch.Tensor, torch.Tensor, torch.Tensor], None]


class DeviceBlocks:
    """Blocks of a pool's tensors: [blocks, …] of each KV group, contiguous."""

    def __init__(self, groups: Sequence[torch.Tensor], block_size: int) -> None:
        first = groups[0]
        name = str(first.dtype).removeprefix("torch.")
        self.layout, self.block_size = f"{name}, tokens first", block_size
        self.device = first.device
        self.block_bytes = tuple(data[0].numel() * data.element_size() for data in groups)
        with torch.inference_mode():
            # As the widest words that blocks of all groups are whole numbers of.
            size = math.gcd(8, *self.block_bytes)
            word = {8: torch.int64, 4: torch.int32, 2: torch.int16, 1: torch.uint8}[size]
            self.words = [data.view(len(data), -1).view(word) for data in groups]
        # Not the steps' stream: a block is not to wait for what is queued there.
        self._stream = stream_of(self.device)

    def regions(self) -> list[Region]:
        kind, device = ("VRAM", self.device.index or 0) if self._stream else ("DRAM", 0)
        return [
            Region(words.data_ptr(), words.numel() * words.element_size(), device, kind)
            for words in self.words
        ]

    def read(self, group: int, number: int) -> bytes:
        with torch.inference_mode(), on_stream(self._stream):
            block = self.words[group][number].cpu()
        data: bytes = block.view(torch.uint8).numpy().tobytes()
        return data

    def write(self, group: int, number: int, data: bytes | memoryview) -> None:
        with torch.inference_mode(), on_stream(self._stream):
            words = self.words[group]
            block = torch.frombuffer(bytearray(data), dtype=words.dtype)
            words[number].copy_(block)
            if self._stream is not None:
                self._stream.synchronize()


def stream_of(device: torch.device) -> torch.cuda.Stream | None:
    """A new one, which begins after what is queued by now: a pool's zeros."""
    if device.type != "cuda":
        return None
    stream = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]
    stream.wait_stream(torch.cuda.current_stream(device))
    return stream


@contextlib.contextmanager
def on_stream(stream: torch.cuda.Stream | None) -> Iterator[None]:
    if stream is None:
        yield
        return
    with torch.cuda.device(stream.device), torch.cuda.stream(stream):
        yield


class DeviceMemory(Way):
    name = "device"

    def __init__(self, blocks: DeviceBlocks, shared: SharedPools | None = None) -> None:
        """`shared`: has the offers that stand, if others can fetch; on a CPU also the pools."""
        self._blocks, self._shared = blocks, shared
        self._others = OthersMemory()
        self._opened: dict[str, list[torch.Tensor]] = {}  # pools of others, by path, as words
        self._closed: set[str] = set()  # paths of those that cannot be opened
        self._stream = stream_of(blocks.device)
        self._copy_blocks = direct_copy(blocks.device)

    def address(self) -> Address | None:
        if self._shared is None:
            return None
        handles = []
        for group, words in enumerate(self._blocks.words):
            cuda = start = None
            if words.is_cuda:
                # What the sender has computed is there when it offers it: no event is needed.
                try:
                    cuda = words.untyped_storage()._share_cuda_()  # type: ignore[no-untyped-call]
                except RuntimeError as error:
                    log.warning("KV blocks cannot be shared by CUDA IPC (%s)", error)
                    return None
            else:
                start = self._shared.starts[group]
            handles.append(Handle(len(words), start or 0, cuda))
        return Address(self.name, self._reach(), self._shared.path, _encode(handles))

    def reaches(self, address: Address) -> bool:
        return address.reach == self._reach()

    def _reach(self) -> str:
        """Devices are named by number, so that both must see the same ones."""
        if self._blocks.device.type == "cpu":
            return f"{this_host()} cpu"
        return f"{this_host()} cuda {visible_gpus()}"

    def begin(self, address: Address, offer: Offer, places: Places) -> Copy:
        self._others.check_stands(address.at, offer.number)
        pools = self._pools_at(address)
        return _DeviceCopy(self, address.at, pools, offer, places)

    def check_stands(self, path: str, number: int) -> None:
        if not os.path.exists(path):
            self.tidy()
            raise SenderGoneError(f"{path} is there no more")
        self._others.check_stands(path, number)

    def launch(
        self, group: int, source: torch.Tensor, pairs: list[tuple[int, int]]
    ) -> torch.Tensor:
        """Copy blocks on this way's stream; what is returned must live until that has happened."""
        target = self._blocks.words[group]
        with torch.inference_mode(), on_stream(self._stream):
            where = torch.tensor(pairs, dtype=torch.int64)
            if self._stream is None:
                staged_copy(source, target, where)
            elif source.device != target.device:
                for there, here in pairs:
                    target[here].copy_(source[there], non_blocking=True)
            else:
                where = where.pin_memory().to(target.device, non_blocking=True)
                self._copy_blocks(source, target, where)
        return where

    def warm(self) -> None:
        """Compile what copies, before a stream waits for it."""
        for group, words in enumerate(self._blocks.words):
            self.launch(group, words, [(0, 0)])
        if self._stream is not None:
            self._stream.synchronize()

    def mark(self) -> torch.cuda.Event | None:
        """Reached when all copies so far have happened; None: they have."""
        if self._stream is None:
            return None
        event = torch.cuda.Event()  # type: ignore[no-untyped-call]
        event.record(self._stream)
        return event

    def tidy(self) -> None:
        for path in [path for path in self._opened if not os.path.exists(path)]:
            if self._stream is not None:
                self._stream.synchronize()  # nothing reads it any more
            del self._opened[path]
        self._closed = {path for path in self._closed if os.path.exists(path)}

    def close(self) -> None:
        self._opened.clear()

    def _pools_at(self, address: Address) -> list[torch.Tensor]:
        if address.at not in self._opened and address.at not in self._closed:
            self.tidy()
            handles = _decode(address.more)
            words = [own.dtype for own in self._blocks.words]
            each = zip(handles, self._blocks.block_bytes, strict=True)
            try:
                storages = [
                    _open(address.at, handle, handle.num_blocks * size) for handle, size in each
                ]
            except (OSError, RuntimeError) as error:
                log.warning("another engine's memory cannot be opened: %s", error)
                self._closed.add(address.at)
            else:
                self._opened[address.at] = [
                    data.view(word).view(handle.num_blocks, -1)
                    for data, word, handle in zip(storages, words, handles, strict=True)
                ]
        if address.at in self._closed:
            raise UnreachableError("the sender's memory cannot be opened")
        return self._opened[address.at]


def _open(path: str, handle: Handle, num_bytes: int) -> torch.Tensor:
    """Another process's pool, as bytes."""
    if handle.cuda is not None:
        storage: Any = torch.UntypedStorage._new_shared_cuda(*handle.cuda)
        device = torch.device("cuda", handle.cuda[0])
        return torch.empty(0, dtype=torch.uint8, device=device).set_(storage)[:num_bytes]
    file = os.open(path, os.O_RDWR | os.O_CLOEXEC)  # torch has no memory that is only read
    try:
        memory = mmap.mmap(file, 0)
    finally:
        os.close(file)
    if len(memory) < handle.start + num_bytes:
        raise TruncatedError(f"{path} has {len(memory)} bytes, and a pool ends beyond them")
    return torch.frombuffer(memory, dtype=torch.uint8, count=num_bytes, offset=handle.start)


def direct_copy(device: torch.device) -> CopyBlocks:
    """A kernel of ours, where there is Triton and a GPU."""
    if device.type == "cuda":
        with contextlib.suppress(ImportError):
            from twostroke.kernels.cuda.copy_blocks import copy_blocks

            return copy_blocks
    return staged_copy


def staged_copy(source: torch.Tensor, target: torch.Tensor, pairs: torch.Tensor) -> None:
    """As `copy_blocks` of the kernels, some blocks at a time by way of memory between."""
    count = max(1, STAGED_BYTES // (source.shape[1] * source.element_size()))
    for some in torch.split(pairs, count):
        target.index_copy_(0, some[:, 1], source.index_select(0, some[:, 0]))


class _DeviceCopy(Copy):
    @property
    def own_bytes(self) -> int:
        return 0  # the device copies, not this thread

    def __init__(
        self,
        way: DeviceMemory,
        path: str,
        pools: list[torch.Tensor],
        offer: Offer,
        places: Places,
    ) -> None:
        self._way, self._path, self._pools, self._offer = way, path, pools, offer
        self._left = [  # of each group: block there, block here
            [(offer.tables[group][entry], target) for entry, target in wanted]
            for group, wanted in enumerate(places)
        ]
        for group, pairs in enumerate(self._left):
            for there, _ in pairs:
                if there >= len(pools[group]):
                    raise TruncatedError(
                        f"the sender's group {group} has {len(pools[group])} blocks, and block "
                        f"{there} was offered"
                    )
        self._launched_bytes = 0
        self._kept: list[torch.Tensor] = []
        self._mark: torch.cuda.Event | None = None

    def advance(self, most_bytes: int | None) -> bool:
        self._way.check_stands(self._path, self._offer.number)
        if any(self._left):
            self._launch(None if most_bytes is None else LAUNCHED_BYTES)
        if self._mark is not None and not self._mark.query():  # type: ignore[no-untyped-call]
            return False
        self._mark = None
        self._kept.clear()
        self.num_bytes = self._launched_bytes
        # What was released meanwhile may have been written anew before it was copied.
        self._way.check_stands(self._path, self._offer.number)
        return not any(self._left)

    def _launch(self, most_bytes: int | None) -> None:
        for group, pairs in enumerate(self._left):
            size = self._offer.block_bytes[group]
            count = len(pairs)
            if most_bytes is not None:
                count = min(count, max(1, most_bytes // size)) if most_bytes > 0 else 0
                most_bytes -= count * size
            if count:
                self._kept.append(self._way.launch(group, self._pools[group], pairs[:count]))
                self._left[group] = pairs[count:]
                self._launched_bytes += count * size
        self._mark = self._way.mark()

    def abandon(self) -> None:
        if self._mark is not None:
            self._mark.synchronize()  # its places may be given to others now
            self._mark = None
        self._left = []


def device_transfer(
    blocks: DeviceBlocks, shared: SharedPools | None, sharing: Sharing
) -> KVTransfer:
    """`shared`: of blocks that are offered."""
    ways: list[Way] = []
    if sharing.allows("device"):
        ways.append(DeviceMemory(blocks, shared))
    if sharing.allows("memory") and blocks.device.type == "cpu":
        ways.append(SharedMemory(blocks, shared))
    ways += nixl(blocks, blocks.regions(), shared, sharing)
    if sharing.allows("sockets"):
        # Not every system lets processes open each other's GPU memory.
        ways.append(sockets(blocks, sharing, always=blocks.device.type == "cuda"))
    return KVTransfer(blocks, ways, shared, sharing.offers == "checked")
