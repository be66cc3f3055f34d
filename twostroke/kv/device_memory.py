"""KV blocks in device memory that other processes of the machine map with CUDA IPC.

    sender    pool ── handle of its memory ─▶ Address      receiver   maps it once, keeps it
                                              Offer ─────▶            one launch copies the blocks,
                                                                      on a separate stream, while
                                                                      steps run

Copies go from device to device and contain only the requested blocks. On a CPU the same code copies
between shared host memory, for tests. The table of offers is in shared memory (`shared_memory.py`),
which also shows whether the sender is alive: memory of ended senders is unmapped (`tidy`), so that
the GPU can reuse it.
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
from twostroke.kv.pinned_memory import pinned
from twostroke.kv.shared_memory import OthersMemory, SharedMemory, SharedPools
from twostroke.kv.transfer import (
    Address,
    BlockPairs,
    Copy,
    KVTransfer,
    Offer,
    Region,
    SenderGoneError,
    Transport,
    TruncatedError,
    UnreachableError,
    this_host,
)
from twostroke.kv.transports import TransportConfig, nixl, sockets

LAUNCHED_BYTES = 1 << 30  # per launch while requests run: half a millisecond on an H200
STAGED_BYTES = 64 << 20  # buffer of copies without a kernel


log = logging.getLogger(__name__)


class Handle(msgspec.Struct, array_like=True, frozen=True):
    """The IPC handle of one KV group's pool."""

    num_blocks: int
    start: int  # on a CPU: offset in the memory of the address
    # The values that torch uses to share a storage on a GPU.
    cuda: tuple[int, bytes, int, int, bytes | None, int, bytes | None, bool] | None


_encode = msgspec.msgpack.Encoder().encode
_decode = msgspec.msgpack.Decoder(list[Handle]).decode
CopyBlocks = Callable[[torch.Tensor, torch.Tensor, torch.Tensor], None]


class DeviceBlocks:
    """Blocks of pool tensors: for each KV group [blocks, …], contiguous."""

    def __init__(self, groups: Sequence[torch.Tensor], block_size: int) -> None:
        first = groups[0]
        name = str(first.dtype).removeprefix("torch.")
        self.layout, self.block_size = f"{name}, tokens first", block_size
        self.device = first.device
        self.block_bytes = tuple(data[0].numel() * data.element_size() for data in groups)
        with torch.inference_mode():
            # As the widest words that divide the blocks of all groups.
            size = math.gcd(8, *self.block_bytes)
            word = {8: torch.int64, 4: torch.int32, 2: torch.int16, 1: torch.uint8}[size]
            self.words = [data.view(len(data), -1).view(word) for data in groups]
        # A separate stream: copies do not wait for queued steps.
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

    def read_into(self, group: int, number: int, data: memoryview) -> None:
        words = self.words[group]
        with torch.inference_mode(), on_stream(self._stream):
            torch.frombuffer(data, dtype=words.dtype).copy_(words[number])

    def write(self, group: int, number: int, data: bytes | memoryview) -> None:
        with torch.inference_mode(), on_stream(self._stream):
            words = self.words[group]
            # torch has no read-only memory.
            in_place = isinstance(data, memoryview) and not data.readonly
            block = torch.frombuffer(data if in_place else bytearray(data), dtype=words.dtype)
            words[number].copy_(block)
            if self._stream is not None:
                self._stream.synchronize()

    def pinned(self, data: memoryview) -> contextlib.AbstractContextManager[None]:
        return pinned(data, self.device)


def stream_of(device: torch.device) -> torch.cuda.Stream | None:
    """Return a new stream that starts after the queued work, such as the zeroing of a pool."""
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


class DeviceMemory(Transport):
    """The transport by CUDA IPC."""

    name = "device"

    def __init__(self, blocks: DeviceBlocks, shared: SharedPools | None = None) -> None:
        """`shared`: the table of offers, if other engines can fetch; on a CPU also the pools."""
        self._blocks, self._shared = blocks, shared
        self._others = OthersMemory()
        self._opened: dict[str, list[torch.Tensor]] = {}  # pools of other engines by path, as words
        self._closed: set[str] = set()  # paths that cannot be mapped
        self._stream = stream_of(blocks.device)
        self._copy_blocks = direct_copy(blocks.device)

    def address(self) -> Address | None:
        if self._shared is None:
            return None
        handles = []
        for group, words in enumerate(self._blocks.words):
            cuda = start = None
            if words.is_cuda:
                # The sender offers blocks after they are computed, so no event is needed.
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
        return address.scope == self._reach()

    def _reach(self) -> str:
        """Return the visible devices. A handle names its device by number, so both engines must see
        the same devices."""
        if self._blocks.device.type == "cpu":
            return f"{this_host()} cpu"
        return f"{this_host()} cuda {visible_gpus()}"

    def begin(self, address: Address, offer: Offer, pairs: BlockPairs) -> Copy:
        self._others.check_offer(address.endpoint, offer.number)
        pools = self._pools_at(address)
        return _DeviceCopy(self, address.endpoint, pools, offer, pairs)

    def check_offer(self, path: str, number: int) -> None:
        if not os.path.exists(path):
            self.tidy()
            raise SenderGoneError(f"{path} does not exist any more")
        self._others.check_offer(path, number)

    def launch(
        self, group: int, source: torch.Tensor, pairs: list[tuple[int, int]]
    ) -> torch.Tensor:
        """Start to copy blocks on the transport's stream. The caller keeps the returned tensor
        until the copy has ended."""
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
        """Compile the copy kernel before the first fetch."""
        for group, words in enumerate(self._blocks.words):
            self.launch(group, words, [(0, 0)])
        if self._stream is not None:
            self._stream.synchronize()

    def event(self) -> torch.cuda.Event | None:
        """Return an event at the end of all copies so far; None if they have finished."""
        if self._stream is None:
            return None
        event = torch.cuda.Event()  # type: ignore[no-untyped-call]
        event.record(self._stream)
        return event

    def tidy(self) -> None:
        for path in [path for path in self._opened if not os.path.exists(path)]:
            if self._stream is not None:
                self._stream.synchronize()  # no copy reads the memory any more
            del self._opened[path]
        self._closed = {path for path in self._closed if os.path.exists(path)}

    def close(self) -> None:
        self._opened.clear()

    def _pools_at(self, address: Address) -> list[torch.Tensor]:
        if address.endpoint not in self._opened and address.endpoint not in self._closed:
            self.tidy()
            handles = _decode(address.data)
            words = [own.dtype for own in self._blocks.words]
            each = zip(handles, self._blocks.block_bytes, strict=True)
            try:
                storages = [
                    _open(address.endpoint, handle, handle.num_blocks * size)
                    for handle, size in each
                ]
            except (OSError, RuntimeError) as error:
                log.warning("the memory of another engine cannot be mapped: %s", error)
                self._closed.add(address.endpoint)
            else:
                self._opened[address.endpoint] = [
                    data.view(word).view(handle.num_blocks, -1)
                    for data, word, handle in zip(storages, words, handles, strict=True)
                ]
        if address.endpoint in self._closed:
            raise UnreachableError("the sender's memory cannot be mapped")
        return self._opened[address.endpoint]


def _open(path: str, handle: Handle, num_bytes: int) -> torch.Tensor:
    """Map the pool of another process, as bytes."""
    if handle.cuda is not None:
        storage: Any = torch.UntypedStorage._new_shared_cuda(*handle.cuda)
        device = torch.device("cuda", handle.cuda[0])
        return torch.empty(0, dtype=torch.uint8, device=device).set_(storage)[:num_bytes]
    file = os.open(path, os.O_RDWR | os.O_CLOEXEC)  # torch has no read-only memory
    try:
        memory = mmap.mmap(file, 0)
    finally:
        os.close(file)
    if len(memory) < handle.start + num_bytes:
        raise TruncatedError(f"{path} has {len(memory)} bytes, but a pool ends beyond them")
    return torch.frombuffer(memory, dtype=torch.uint8, count=num_bytes, offset=handle.start)


def direct_copy(device: torch.device) -> CopyBlocks:
    """Return the copy kernel, or `staged_copy` without Triton or GPU."""
    if device.type == "cuda":
        with contextlib.suppress(ImportError):
            from twostroke.kernels.cuda.copy_blocks import copy_blocks

            return copy_blocks
    return staged_copy


def staged_copy(source: torch.Tensor, target: torch.Tensor, pairs: torch.Tensor) -> None:
    """Copy blocks like the kernel `copy_blocks`, in parts through a temporary buffer."""
    count = max(1, STAGED_BYTES // (source.shape[1] * source.element_size()))
    for some in torch.split(pairs, count):
        target.index_copy_(0, some[:, 1], source.index_select(0, some[:, 0]))


class _DeviceCopy(Copy):
    @property
    def own_bytes(self) -> int:
        return 0  # the device copies, not this thread

    def __init__(
        self,
        transport: DeviceMemory,
        path: str,
        pools: list[torch.Tensor],
        offer: Offer,
        block_pairs: BlockPairs,
    ) -> None:
        self._transport, self._path, self._pools, self._offer = transport, path, pools, offer
        self._left = [  # per group: sender's block, receiver's block
            [(offer.tables[group][entry], target) for entry, target in wanted]
            for group, wanted in enumerate(block_pairs)
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
        self._event: torch.cuda.Event | None = None

    def advance(self, max_bytes: int | None) -> bool:
        self._transport.check_offer(self._path, self._offer.number)
        if any(self._left):
            self._launch(None if max_bytes is None else LAUNCHED_BYTES)
        if self._event is not None and not self._event.query():  # type: ignore[no-untyped-call]
            return False
        self._event = None
        self._kept.clear()
        self.num_bytes = self._launched_bytes
        # Blocks that were released during the copy may have been overwritten before.
        self._transport.check_offer(self._path, self._offer.number)
        return not any(self._left)

    def _launch(self, max_bytes: int | None) -> None:
        for group, pairs in enumerate(self._left):
            size = self._offer.block_bytes[group]
            count = len(pairs)
            if max_bytes is not None:
                count = min(count, max(1, max_bytes // size)) if max_bytes > 0 else 0
                max_bytes -= count * size
            if count:
                self._kept.append(self._transport.launch(group, self._pools[group], pairs[:count]))
                self._left[group] = pairs[count:]
                self._launched_bytes += count * size
        self._event = self._transport.event()

    def abandon(self) -> None:
        if self._event is not None:
            self._event.synchronize()  # the blocks may be reused now
            self._event = None
        self._left = []


def device_transfer(
    blocks: DeviceBlocks, shared: SharedPools | None, config: TransportConfig
) -> KVTransfer:
    """Return the transfer endpoint of blocks on a device. `shared`: the table of offers."""
    transports: list[Transport] = []
    if config.allows("device"):
        transports.append(DeviceMemory(blocks, shared))
    if config.allows("memory") and blocks.device.type == "cpu":
        transports.append(SharedMemory(blocks, shared))
    transports += nixl(blocks, blocks.regions(), shared, config)
    if config.allows("sockets"):
        # Some systems do not let processes map each other's GPU memory.
        transports.append(sockets(blocks, config, always=blocks.device.type == "cuda"))
    return KVTransfer(blocks, transports, shared, config.offers == "checked")
