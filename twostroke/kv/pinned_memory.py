"""`PinnedMemory`: host memory that a GPU reads and writes without the driver's buffers.

Only copies of pinned memory run beside the host and at the full rate of the link. torch's pinned
tensors have a power of two of bytes: an arena of 40 GiB would take 64. Here the memory is mapped
with huge pages where the system has them, written by torch's threads, so that its pages exist, and
then pinned as it is.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

import torch

from twostroke.kv.host_pool import zero_pages


class PinnedMemory:
    """Zeroed memory, as bytes. It is pinned if the device is a GPU, until `close`."""

    def __init__(self, num_bytes: int, device: torch.device) -> None:
        """Raise a `RuntimeError` if the memory cannot be pinned."""
        self.data = torch.frombuffer(zero_pages(num_bytes), dtype=torch.uint8)
        self._pinned = False
        if device.type == "cuda":
            self.data.zero_()
            _pin(self.data)
            self._pinned = True

    def close(self) -> None:
        """Unpin the memory. No copy may be under way."""
        if self._pinned:
            self._pinned = False
            _unpin(self.data)


@contextlib.contextmanager
def pinned(view: memoryview, device: torch.device) -> Iterator[None]:
    """Pin memory in this context, if the device is a GPU. Memory that cannot be pinned is copied
    more slowly."""
    if device.type != "cuda":
        yield
        return
    data = torch.frombuffer(view, dtype=torch.uint8)
    try:
        _pin(data)
    except RuntimeError:
        yield
        return
    try:
        yield
    finally:
        _unpin(data)


def _pin(data: torch.Tensor) -> None:
    torch.cuda.init()  # type: ignore[no-untyped-call]
    runtime: Any = torch.cuda.cudart()  # type: ignore[no-untyped-call]
    torch.cuda.check_error(runtime.cudaHostRegister(data.data_ptr(), data.numel(), 0))


def _unpin(data: torch.Tensor) -> None:
    runtime: Any = torch.cuda.cudart()  # type: ignore[no-untyped-call]
    runtime.cudaHostUnregister(data.data_ptr())
