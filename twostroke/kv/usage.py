"""`KVUsage`: the number of token slots of a pool or a tier, by use."""

from __future__ import annotations

from typing import NamedTuple


class KVUsage(NamedTuple):
    """Token slots of a pool, or of all pools. reserved = used + fragmented + cached + free."""

    reserved: int
    used: int
    fragmented: int  # allocated, not filled
    cached: int  # filled, without owner: reusable prefixes
    free: int

    @property
    def taken(self) -> float:
        """The share owned by running requests, 0 to 1."""
        return (self.used + self.fragmented) / self.reserved if self.reserved else 0.0
