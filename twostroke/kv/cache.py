"""`KVCache`: block tables of running sequences over one `BlockPool`. Numbers only, no tensors.

For one sequence and one KV group, with blocks of 4 tokens:

    table     [ 0  0 | 7  3 | 9  12 ]       0: null, a window has passed
    tokens    ........aaaabbbbccccd...      capacity = 24
                                  ^ num_computed = 21: planned, launched or done
    7, 3, 9   full and registered: other sequences may share them
    12        fragmented by 3 slots

Tables only grow; a passed block becomes null so that positions stay put. A block that a step in
flight may still touch is released when that step commits: the step is an owner. So at any moment
reserved = used + fragmented + cached + free.
"""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

from twostroke.kv.blocks import NULL_BLOCK, BlockPool
from twostroke.kv.prefix import BlockKey, block_key


class KVUsage(NamedTuple):
    """The pool in token slots. reserved = used + fragmented + cached + free."""

    reserved: int
    used: int
    fragmented: int  # allocated, not filled
    cached: int  # filled, nobody's: reusable prefixes
    free: int


@dataclass(slots=True, eq=False)
class KVSequence:
    """The KV state of one request, changed by `KVCache` alone."""

    seed: bytes | None  # where its digest chain starts; None: shares nothing
    tables: list[list[int]] = field(default_factory=list)
    dropped: list[int] = field(default_factory=list)  # leading null entries, per group
    keys: list[BlockKey] = field(default_factory=list)
    num_computed: int = 0
    num_registered: int = 0  # leading blocks that have been offered to the prefix index
    register_at: int = 0  # tokens computed at which there is another one to offer
    capacity: int = 0  # tokens that the tables hold
    last_step: int = -1  # the newest step that names it


class KVCache:
    def __init__(
        self,
        num_blocks: int,
        block_size: int,
        windows: Sequence[int | None] = (None,),
        keep_cached: bool = True,
        max_chunk: int = 1,
    ) -> None:
        """`windows`: one entry per KV group, None where all positions stay visible."""
        self.block_size = block_size
        self.windows = tuple(windows)
        self.pool = BlockPool(num_blocks, keep_cached)
        # A windowed sequence never holds more than its window, a chunk, and the two ragged ends.
        self._most_blocks = [
            None if w is None else -(-(w + max_chunk) // block_size) + 1 for w in self.windows
        ]
        self._live: dict[KVSequence, None] = {}
        self._in_flight: deque[tuple[int, list[int]]] = deque()  # (step, blocks it still owns)
        self._committed_step = -1
        self._fragmented = 0

    # ── asking ──────────────────────────────────────────────────────────────────────────────

    def blocks_for(self, num_tokens: int) -> int:
        """Blocks that a sequence of this length holds at most at one time, over all groups."""
        blocks = -(-num_tokens // self.block_size)
        return sum(blocks if most is None else min(blocks, most) for most in self._most_blocks)

    def blocks_missing(self, seq: KVSequence, num_tokens: int) -> int:
        """Blocks that a running sequence still has to take to reach this length."""
        if len(self.windows) == 1 and self.windows[0] is None:
            return max(0, -(-num_tokens // self.block_size) - len(seq.tables[0]))
        held = sum(len(t) - d for t, d in zip(seq.tables, seq.dropped, strict=True))
        return max(0, self.blocks_for(num_tokens) - held)

    @property
    def returning(self) -> bool:
        """Whether blocks will come back when the steps in flight commit."""
        return bool(self._in_flight)

    def usage(self) -> KVUsage:
        size = self.block_size
        free, cached = self.pool.num_free * size, self.pool.num_cached * size
        reserved = self.pool.num_blocks * size
        used = reserved - free - cached - self._fragmented
        return KVUsage(reserved, used, self._fragmented, cached, free)

    def match(self, seq: KVSequence, tokens: Sequence[int]) -> list[list[int]]:
        """The longest cached prefix, as one table per group. At least one token is left over.

        A windowed group needs only the blocks that the next token can see; the rest are null.
        """
        if seq.seed is None:
            return [[] for _ in self.windows]
        longest = (len(tokens) - 1) // self.block_size
        self._extend_keys(seq, tokens, longest)
        found = [self._find(group, seq.keys, longest) for group in range(len(self.windows))]
        count = longest
        while count:
            usable = [self._usable(found[g], w, count) for g, w in enumerate(self.windows)]
            if min(usable) == count:
                break
            count = min(usable)
        tables = []
        for group, window in enumerate(self.windows):
            first = self._first_visible(count * self.block_size, window)
            visible = [block for block in found[group][first:count] if block is not None]
            tables.append([NULL_BLOCK] * first + visible)
        return tables

    def _find(self, group: int, keys: list[BlockKey], count: int) -> list[int | None]:
        find = self.pool.prefix.find
        if self.windows[group] is not None:
            return [find(group, keys[n]) for n in range(count)]
        found: list[int | None] = []
        for n in range(count):  # without a window nothing after the first gap is of use
            block = find(group, keys[n])
            if block is None:
                break
            found.append(block)
        return found + [None] * (count - len(found))

    def _usable(self, found: list[int | None], window: int | None, count: int) -> int:
        """The largest n ≤ count such that a hit of n blocks has all that its next token sees."""
        while count:
            first = self._first_visible(count * self.block_size, window)
            gaps = [n for n in range(first, count) if found[n] is None]
            if not gaps:
                break
            count = gaps[0] if window is None else gaps[-1]
        return count

    def _first_visible(self, position: int, window: int | None) -> int:
        """The first block that the token at `position` can see."""
        if window is None:
            return 0
        return max(0, position - window + 1) // self.block_size

    # ── changing ────────────────────────────────────────────────────────────────────────────

    def open(self, seq: KVSequence, tables: list[list[int]]) -> int:
        """Start a sequence on a cached prefix from `match`; returns the tokens it saves."""
        for table in tables:
            for block in table:
                if block != NULL_BLOCK:
                    self.pool.share(block)
        seq.tables = tables
        seq.dropped = [t.count(NULL_BLOCK) for t in tables]
        seq.num_registered = len(tables[0])
        seq.register_at = (len(tables[0]) + 1) * self.block_size
        seq.capacity = seq.num_computed = len(tables[0]) * self.block_size
        self._live[seq] = None
        return seq.num_computed

    def reserve(self, seq: KVSequence, num_tokens: int) -> int | None:
        """Make room for `num_tokens` in all. Returns the blocks added to each table, or None if
        the pool has too few, and then nothing has changed."""
        grow = -(-(num_tokens - seq.capacity) // self.block_size)
        if grow <= 0:
            return 0
        if grow * len(seq.tables) > self.pool.num_available:
            return None
        for table in seq.tables:
            table.extend(self.pool.take(grow))
        seq.capacity += grow * self.block_size
        self._fragmented += grow * self.block_size * len(seq.tables)
        return grow

    def advance(self, seq: KVSequence, count: int, step: int) -> None:
        """`step` computes the next `count` tokens."""
        seq.num_computed += count
        seq.last_step = step
        self._fragmented -= count * len(seq.tables)

    def advance_each(self, sequences: Sequence[KVSequence], step: int) -> None:
        """`step` computes the next token of every one of them."""
        for seq in sequences:
            seq.num_computed += 1
            seq.last_step = step
        self._fragmented -= len(sequences) * len(self.windows)

    def register(self, seq: KVSequence, tokens: Sequence[int]) -> None:
        """Offer the blocks that are full, computed by a launched step, and whose tokens are known.

        A step stores all its keys and values before it attends, layer by layer, so even a request
        planned in the same step may share them.
        """
        full = min(seq.num_computed, len(tokens)) // self.block_size
        seq.register_at = (full + 1) * self.block_size
        if full <= seq.num_registered or seq.seed is None:
            return
        self._extend_keys(seq, tokens, full)
        for n in range(seq.num_registered, full):
            for group, table in enumerate(seq.tables):
                if table[n] != NULL_BLOCK:
                    self.pool.prefix.register(table[n], group, seq.keys[n])
        seq.num_registered = full

    def drop_passed(self, seq: KVSequence) -> list[tuple[int, int]]:
        """Give up the blocks that no later token can see: (group, leading null entries) changed."""
        changed = []
        for group, window in enumerate(self.windows):
            if window is None:
                continue
            first = min(self._first_visible(seq.num_computed, window), len(seq.tables[group]))
            start = seq.dropped[group]
            if first > start:
                table = seq.tables[group]
                passed = [b for b in table[start:first] if b != NULL_BLOCK]
                table[start:first] = [NULL_BLOCK] * (first - start)
                seq.dropped[group] = first
                self._release(passed, seq.last_step)
                changed.append((group, first))
        return changed

    def close(self, seq: KVSequence) -> None:
        """Give everything up; the tail is evicted before the head it hangs on."""
        if seq not in self._live:
            return
        del self._live[seq]
        self._fragmented -= (seq.capacity - seq.num_computed) * len(seq.tables)
        for table in seq.tables:
            self._release([b for b in reversed(table) if b != NULL_BLOCK], seq.last_step)
        seq.tables, seq.dropped = [], []
        seq.num_computed = seq.num_registered = seq.capacity = 0

    def commit(self, step: int) -> None:
        """`step` has run: what only it still owned is released."""
        self._committed_step = step
        while self._in_flight and self._in_flight[0][0] <= step:
            self.pool.release(self._in_flight.popleft()[1])

    def forget_all(self) -> None:
        """Drop every cached prefix, of running sequences too."""
        self.pool.forget_all()

    def _release(self, blocks: list[int], last_step: int) -> None:
        if last_step > self._committed_step:
            # Kept in step order: a sequence is never closed with an older step than the last.
            self._in_flight.append((max(last_step, self._newest_owner()), blocks))
        else:
            self.pool.release(blocks)

    def _newest_owner(self) -> int:
        return self._in_flight[-1][0] if self._in_flight else -1

    def _extend_keys(self, seq: KVSequence, tokens: Sequence[int], count: int) -> None:
        size, keys = self.block_size, seq.keys
        assert seq.seed is not None
        for n in range(len(keys), count):
            parent = keys[-1].digest if keys else seq.seed
            keys.append(block_key(parent, tokens[n * size : (n + 1) * size]))

    # ── proving ─────────────────────────────────────────────────────────────────────────────

    def audit(self) -> None:
        """Every block has exactly the owners it claims, and nothing leaked."""
        owners: Counter[int] = Counter()
        fragmented = 0
        for seq in self._live:
            for group, table in enumerate(seq.tables):
                dropped = seq.dropped[group]
                assert all(b == NULL_BLOCK for b in table[:dropped]), "a passed block is not null"
                assert NULL_BLOCK not in table[dropped:], "a visible block is null"
                assert len(table) * self.block_size == seq.capacity, "a table and capacity differ"
                owners.update(table[dropped:])
            assert 0 <= seq.num_computed <= seq.capacity, "more computed than there is room for"
            fragmented += (seq.capacity - seq.num_computed) * len(seq.tables)
        for step, blocks in self._in_flight:
            assert step > self._committed_step, "a committed step still owns blocks"
            owners.update(blocks)
        self.pool.check(dict(owners))
        assert fragmented == self._fragmented, (
            f"fragmented is {fragmented}, counted {self._fragmented}"
        )
        usage = self.usage()
        parts = (usage.used, usage.fragmented, usage.cached, usage.free)
        assert min(parts) >= 0, f"negative usage: {usage}"
        assert sum(parts) == usage.reserved, f"usage does not add up: {usage}"

    def is_idle(self) -> bool:
        """Nobody owns a block."""
        return not self._live and not self._in_flight
