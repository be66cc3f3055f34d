"""`TierIndex`: the pieces in a tier, and the slots that they take. It copies no data.

A slot of the tier is in exactly one of three places:

    free      holds no piece
    stored    holds a piece; the least recently used piece is replaced first
    busy      being written, or read by a fetch; it is not replaced
"""

from __future__ import annotations

from collections import Counter, OrderedDict
from collections.abc import Iterable


class TierIndex:
    def __init__(self, capacity: int, names: Iterable[bytes] = ()) -> None:
        """`names`: the pieces in the tier at the start, the least recently used first."""
        self.capacity = capacity
        self._slots: dict[bytes, int] = {}  # slot of each piece, stored or being written
        self._tokens: dict[bytes, bytes] = {}  # tokens of the pieces that this process has stored
        self._lru: OrderedDict[bytes, None] = OrderedDict()  # stored pieces that no fetch reads
        self._writing: set[bytes] = set()
        self._reads: Counter[bytes] = Counter()  # number of fetches that read each piece
        self._lost: set[bytes] = set()  # busy pieces to be removed when they are no longer busy
        self._recycled: list[int] = []
        self._next = 0
        for name in names:
            if self._next < capacity:
                self._slots[name] = self._take_slot()
                self._lru[name] = None

    def __len__(self) -> int:
        """The number of stored pieces."""
        return len(self._slots) - len(self._writing | self._lost)

    def __contains__(self, name: bytes) -> bool:
        """True if the piece is stored or being written."""
        return name in self._slots

    def find(self, name: bytes, tokens: bytes) -> int | None:
        """Return the slot of a stored piece with these tokens."""
        if name not in self._lru and (name not in self._reads or name in self._lost):
            return None
        return self._slots[name] if self._tokens.get(name, tokens) == tokens else None

    @property
    def num_free(self) -> int:
        return self.capacity - len(self._slots)

    @property
    def num_stored(self) -> int:
        """Stored pieces that no fetch reads."""
        return len(self._lru)

    @property
    def num_busy(self) -> int:
        return len(self._writing) + len(self._reads)

    def begin_store(self, name: bytes, tokens: bytes) -> tuple[int, bytes | None] | None:
        """Take a slot for a new piece. Return the slot, and the name of the piece that it replaces;
        None if every slot is busy."""
        replaced = None
        if not self.num_free:
            if not self._lru:
                return None
            replaced = next(iter(self._lru))
            self._remove(replaced)
        slot = self._take_slot()
        self._slots[name], self._tokens[name] = slot, tokens
        self._writing.add(name)
        return slot, replaced

    def end_store(self, name: bytes, ok: bool) -> list[bytes]:
        """End the store of a piece. Return its name if the tier must remove it again."""
        self._writing.discard(name)
        lost = name in self._lost
        if ok and not lost:
            self._lru[name] = None
            return []
        self._remove(name)
        return [name] if ok else []

    def begin_read(self, names: Iterable[bytes]) -> None:
        """Keep these stored pieces until `end_read`."""
        for name in names:
            self._reads[name] += 1
            self._lru.pop(name, None)

    def end_read(self, names: Iterable[bytes]) -> list[bytes]:
        """End a read of a chain of pieces. Its first pieces are replaced last. Return the names of
        the pieces that the tier must remove."""
        removed = []
        for name in reversed(list(names)):
            self._reads[name] -= 1
            if not self._reads[name]:
                del self._reads[name]
                if name in self._lost:
                    self._remove(name)
                    removed.append(name)
                else:
                    self._lru[name] = None
        return removed

    def touch(self, names: Iterable[bytes]) -> list[bytes]:
        """Record a use of the pieces of a chain. Return the stored ones from last to first: the
        first piece counts as used most recently, so it is replaced last."""
        touched = [name for name in names if name in self._lru][::-1]
        for name in touched:
            self._lru.move_to_end(name)
        return touched

    def lose(self, name: bytes) -> None:
        """Forget a stored piece that the tier cannot deliver."""
        if name in self._reads:
            self._lost.add(name)
        elif name in self._lru:
            self._remove(name)

    def clear(self) -> list[bytes]:
        """Forget all pieces. Return the names of those that are not busy, which the tier must
        remove."""
        gone = list(self._lru)
        for name in gone:
            self._remove(name)
        self._lost |= self._reads.keys() | self._writing
        return gone

    def _take_slot(self) -> int:
        if self._recycled:
            return self._recycled.pop()
        self._next += 1
        return self._next - 1

    def _remove(self, name: bytes) -> None:
        self._recycled.append(self._slots.pop(name))
        self._tokens.pop(name, None)
        self._lru.pop(name, None)
        self._lost.discard(name)

    def check(self) -> None:
        """Check that each slot is in one place."""
        stored, reads = self._lru.keys(), self._reads.keys()
        places = len(stored) + len(reads) + len(self._writing)
        assert len(stored | reads | self._writing) == places, "a piece of a tier is in two places"
        assert self._slots.keys() == stored | reads | self._writing, "a piece of a tier is lost"
        slots = [*self._slots.values(), *self._recycled]
        assert sorted(slots) == list(range(self._next)), "a slot of a tier leaked"
        assert self._lost <= reads | self._writing, "a lost piece is not busy"
        assert self.num_free + self.num_stored + self.num_busy == self.capacity
        assert self.num_free >= 0, "a tier holds more than its capacity"
