"""The simulated network between pools: the product's `KVTransfer` over a simulated transport.

A copy takes bytes / bandwidth on the virtual clock. An engine's link carries one copy after the
other. Copies take no time of the engine's thread, as with RDMA; copies through CPU memory, which
delay the engine's streams, are not simulated.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import count

from twostroke.kv.transfer import Address, BlockPairs, Copy, KVTransfer, Offer, Transport

NAME = "simulated"


class SizedBlocks:
    """KV blocks without content."""

    layout = NAME

    def __init__(self, block_size: int, block_bytes: Sequence[int]) -> None:
        self.block_size, self.block_bytes = block_size, tuple(block_bytes)

    def read(self, group: int, number: int) -> bytes:
        raise NotImplementedError

    def write(self, group: int, number: int, data: bytes | memoryview) -> None:
        raise NotImplementedError


class OfferNumbers:
    """Numbers of the offers of one engine."""

    def __init__(self) -> None:
        self._numbers = count()

    def open_offer(self) -> int:
        return next(self._numbers)

    def close_offer(self, number: int) -> None:
        """Offers have no state here."""


class SimulatedCopy(Copy):
    """A copy that is complete at a given time."""

    def __init__(self, clock: Callable[[], float], end_s: float, num_bytes: int) -> None:
        self.end_s, self._size, self._clock = end_s, num_bytes, clock

    @property
    def own_bytes(self) -> int:
        return 0

    def advance(self, max_bytes: int | None) -> bool:
        if self._clock() < self.end_s:
            return False
        self.num_bytes = self._size
        return True


class SimulatedTransport(Transport):
    """The network link of one engine."""

    name = NAME

    def __init__(self, clock: Callable[[], float], bytes_per_s: float) -> None:
        self._clock, self._bytes_per_s = clock, bytes_per_s
        self._free_s = 0.0  # end of the last copy
        self._ends_s: list[float] = []

    def address(self) -> Address:
        return Address(NAME, "", NAME)

    def reaches(self, address: Address) -> bool:
        return True

    def begin(self, address: Address, offer: Offer, pairs: BlockPairs) -> Copy:
        sizes = zip(pairs, offer.block_bytes, strict=True)
        num_bytes = sum(len(group) * size for group, size in sizes)
        start_s = max(self._clock(), self._free_s)
        self._free_s = start_s + num_bytes / self._bytes_per_s
        self._ends_s.append(self._free_s)
        return SimulatedCopy(self._clock, self._free_s, num_bytes)

    def next_end_s(self) -> float | None:
        """Return when the next running copy ends, or None without one."""
        now = self._clock()
        self._ends_s = [end_s for end_s in self._ends_s if end_s > now]
        return min(self._ends_s, default=None)


def transfer_of(
    transport: SimulatedTransport, block_size: int, block_bytes: Sequence[int]
) -> KVTransfer:
    return KVTransfer(SizedBlocks(block_size, block_bytes), [transport], OfferNumbers())
