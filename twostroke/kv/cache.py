"""`KVCache`: block tables of running sequences over one `BlockPool` per KV group. No tensors.

A sequence with blocks of 4 tokens, in a group without a window and in a group with window 8:

    tokens    aaaabbbbccccddddeeeef...        capacity = 24
                                   ^ num_computed = 21: planned, launched or done
    group 0   [ 5 | 8 | 7 | 3 | 9 | 12 ]
    group 1   [ 0 | 0 | 0 | 4 | 2 | 6  ]      0: null, outside the window of every later token
    full blocks are registered: other sequences may share them
    12 and 6  fragmented by 3 slots each

Block numbers belong to their group: block 2 of group 0 and block 2 of group 1 are different memory.
Tables have equal lengths in all groups and only grow. A block outside the window becomes null, so
that later entries keep their places. Evicted blocks (`eviction.py`) are removed from their tables;
the capacity still counts them. A step in flight owns the blocks that it may touch, so that they are
freed when the step commits. At any moment reserved = used + fragmented + cached + free, in each
group.
"""

from __future__ import annotations

import sys
from collections import Counter, deque
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import NamedTuple

from twostroke.kv.blocks import NULL_BLOCK, BlockPool
from twostroke.kv.eviction import Eviction
from twostroke.kv.prefix import BlockKey, PromptKeys, block_key
from twostroke.kv.tiers.tiers import Found, Tiers, TierStatus
from twostroke.kv.transfer import ReceiverFullError
from twostroke.kv.usage import KVUsage


class GroupLimits(NamedTuple):
    """The properties of a KV group that the scheduler needs: its pool, and its cost in a step."""

    num_blocks: int
    window: int | None = None  # None: all positions stay visible
    query_channels: int = 1  # in all layers; determines the FLOPs of attention
    kv_elements: int = 1  # of a token in all layers; determines the bytes read


def table_length(tables: Sequence[Sequence[int]]) -> int:
    """Return the number of table entries of a sequence, with null blocks; equal in all groups."""
    (length,) = {len(table) for table in tables}
    return length


@dataclass(slots=True, eq=False)
class KVSequence:
    """The KV state of one request. Only `KVCache` changes the state."""

    seed: bytes | None  # start of the digest chain; None: no prefix sharing
    tables: list[list[int]] = field(default_factory=list)  # per group
    num_dropped: list[int] = field(default_factory=list)  # leading null entries, per group
    keys: list[BlockKey] = field(default_factory=list)
    num_computed: int = 0
    num_registered: int = 0  # leading blocks registered in the prefix index
    register_at: int = 0  # computed tokens at which the next block can be registered
    capacity: int = 0  # tokens in the tables, including evicted tokens
    num_evicted: int = 0  # tokens
    last_step: int = -1  # the newest step that uses the sequence


def blocks_held(num_tokens: int, window: int | None, chunk: int, block_size: int) -> int:
    """Return the maximum number of blocks of one group that a sequence of this length holds at one
    time, if a step computes at most `chunk` of its tokens."""
    blocks = -(-num_tokens // block_size)
    if window is None:
        return blocks
    # The window of the chunk's first token and the chunk, at any offset in a block.
    return min(blocks, -(-(window + chunk - 2) // block_size) + 1)


class KVCache:
    """The block tables of all sequences, and the pools of all KV groups."""

    def __init__(
        self,
        groups: Sequence[GroupLimits],
        block_size: int,
        keep_cached: bool = True,
        max_chunk: int = 1,
        eviction: Eviction | None = None,
        tiers: Tiers | None = None,
    ) -> None:
        """`tiers`: host memory and disks, to which full blocks are copied and from which they are
        fetched after the pool has evicted them."""
        assert eviction is None or [group.window for group in groups] == [None]
        self.block_size = block_size
        self._prompt_keys = PromptKeys(block_size)
        self.eviction = eviction
        self.windows = tuple(group.window for group in groups)
        self.tiers = tiers
        self.pools = tuple(
            BlockPool(
                group.num_blocks, keep_cached, None if tiers is None else partial(tiers.evicted, n)
            )
            for n, group in enumerate(groups)
        )
        # Maximum blocks of a sequence in each group, during prefill and during decode
        self._max_prefill, self._max_decode = (
            [blocks_held(sys.maxsize, window, chunk, block_size) for window in self.windows]
            for chunk in (max_chunk, 1)
        )
        self._live: dict[KVSequence, None] = {}
        self._held: dict[int, list[list[int]]] = {}  # offer → blocks that other engines may fetch
        self._receiving: set[KVSequence] = set()  # sequences whose blocks are being fetched
        # (step, group, blocks that only the step owns)
        self._in_flight: deque[tuple[int, int, list[int]]] = deque()
        self._committed_step = -1
        self._fragmented = 0  # slots, equal in every group

    # ── queries ─────────────────────────────────────────────────────────────────────────────

    def blocks_for(self, group: int, num_tokens: int, num_prompt: int | None = None) -> int:
        """Return the maximum number of blocks that a sequence of this length holds at one time.
        `num_prompt`: the number of prompt tokens; they are not evicted before all are computed."""
        max_blocks = min(-(-num_tokens // self.block_size), self._max_prefill[group])
        if self.eviction is None or num_prompt is None:
            return max_blocks
        return min(max_blocks, max(-(-num_prompt // self.block_size), self.eviction.budget_blocks))

    def blocks_missing(
        self, group: int, seq: KVSequence, num_tokens: int, num_prompt: int, decodes: bool = False
    ) -> int:
        """Return the blocks that a running sequence still needs to reach this length."""
        if self.eviction is not None:
            max_blocks = self.blocks_for(group, num_tokens, num_prompt)
        else:
            max_blocks = (self._max_decode if decodes else self._max_prefill)[group]
            max_blocks = min(-(-num_tokens // self.block_size), max_blocks)
        held = len(seq.tables[group]) - seq.num_dropped[group]
        return max(0, max_blocks - held)

    def next_eviction(self, seq: KVSequence, num_prompt: int) -> int:
        """Return the next position that cannot be computed before an eviction."""
        assert self.eviction is not None
        return max(num_prompt, seq.num_evicted + self.eviction.budget_blocks * self.block_size)

    @property
    def tokens_available(self) -> int:
        """Number of tokens by which a sequence whose last block is full could grow now."""
        return min(pool.num_available for pool in self.pools) * self.block_size

    @property
    def awaits_blocks(self) -> bool:
        """True if steps in flight will free blocks when they commit."""
        return bool(self._in_flight)

    def group_usage(self) -> list[KVUsage]:
        size, fragmented, usage = self.block_size, self._fragmented, []
        for pool in self.pools:
            free, cached, reserved = pool.num_free, pool.num_cached, pool.num_blocks
            used = (reserved - free - cached) * size - fragmented
            usage.append(KVUsage(reserved * size, used, fragmented, cached * size, free * size))
        return usage

    def usage(self) -> KVUsage:
        """Return the usage of all groups together. A token takes a slot in each group."""
        usage = self.group_usage()
        return usage[0] if len(usage) == 1 else KVUsage(*map(sum, zip(*usage, strict=True)))

    def tier_status(self) -> tuple[TierStatus, ...]:
        return () if self.tiers is None else self.tiers.status()

    def match(self, seq: KVSequence, tokens: Sequence[int]) -> list[list[int]]:
        """Return the longest cached prefix, as one table per group. The prefix leaves at least one
        token to compute.

        A group with a window needs only the blocks that the next token sees; the rest are null.
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
        find = self.pools[group].prefix.find
        if self.windows[group] is not None:
            return [find(keys[n]) for n in range(count)]
        found: list[int | None] = []
        for n in range(count):  # without a window, blocks after the first gap are useless
            block = find(keys[n])
            if block is None:
                break
            found.append(block)
        return found + [None] * (count - len(found))

    def _usable(self, found: list[int | None], window: int | None, count: int) -> int:
        """Return the largest n ≤ count for which the next token finds all blocks that it sees."""
        while count:
            first = self._first_visible(count * self.block_size, window)
            gaps = [n for n in range(first, count) if found[n] is None]
            if not gaps:
                break
            count = gaps[0] if window is None else gaps[-1]
        return count

    def _first_visible(self, position: int, window: int | None) -> int:
        """Return the first block that the token at `position` sees."""
        if window is None:
            return 0
        return max(0, position - window + 1) // self.block_size

    # ── changes ─────────────────────────────────────────────────────────────────────────────

    def open(self, seq: KVSequence, tables: list[list[int]]) -> int:
        """Start a sequence with a cached prefix from `match`. Return the number of cached
        tokens."""
        for pool, table in zip(self.pools, tables, strict=True):
            for block in table:
                if block != NULL_BLOCK:
                    pool.share(block)
        seq.tables = tables
        seq.num_dropped = [t.count(NULL_BLOCK) for t in tables]
        length = table_length(tables)
        seq.num_registered = length
        seq.register_at = (length + 1) * self.block_size
        seq.capacity = seq.num_computed = length * self.block_size
        self._live[seq] = None
        return seq.num_computed

    def reserve(self, seq: KVSequence, num_tokens: int) -> int | None:
        """Allocate blocks for a total of `num_tokens`. Return the number of blocks added to each
        table, or None, without any change, if a group has too few blocks."""
        grow = -(-(num_tokens - seq.capacity) // self.block_size)
        if grow <= 0:
            return 0
        for pool in self.pools:
            if grow > pool.num_available:
                return None
        for pool, table in zip(self.pools, seq.tables):  # noqa: B905 - hot path; lengths are equal
            table.extend(pool.allocate(grow))
        seq.capacity += grow * self.block_size
        self._fragmented += grow * self.block_size
        return grow

    def advance(self, seq: KVSequence, count: int, step: int) -> None:
        """Record that `step` computes the next `count` tokens."""
        seq.num_computed += count
        seq.last_step = step
        self._fragmented -= count

    def advance_each(self, sequences: Sequence[KVSequence], step: int) -> None:
        """Record that `step` computes the next token of each sequence."""
        for seq in sequences:
            seq.num_computed += 1
            seq.last_step = step
        self._fragmented -= len(sequences)

    def rewind(self, seq: KVSequence, count: int) -> None:
        """Remove the last `count` tokens, which were rejected drafts. Their slots are reused.

        Blocks that a window has dropped do not come back: a step planned on unverified drafts must
        drop blocks by the verified tokens only.
        """
        seq.num_computed -= count
        self._fragmented += count

    def register(self, seq: KVSequence, tokens: Sequence[int]) -> None:
        """Register full blocks that a launched step computes and whose tokens are known.

        In each layer a step stores all keys and values before attention, so even a request planned
        in the same step may share the blocks.
        """
        if seq.num_evicted:  # the tokens attend to less than the digest covers
            seq.register_at = sys.maxsize
            return
        full = min(seq.num_computed, len(tokens)) // self.block_size
        seq.register_at = (full + 1) * self.block_size
        if full <= seq.num_registered or seq.seed is None:
            return
        self._extend_keys(seq, tokens, full)
        for group, pool in enumerate(self.pools):
            table, register = seq.tables[group], pool.prefix.register
            for n in range(seq.num_registered, full):
                if table[n] != NULL_BLOCK:
                    register(table[n], seq.keys[n])
        if self.tiers is not None:
            self._copy_to_tiers(seq, range(seq.num_registered, full))
        seq.num_registered = full

    def _copy_to_tiers(self, seq: KVSequence, blocks: range) -> None:
        """Copy registered blocks to the tiers, after the step that computes the blocks."""
        assert self.tiers is not None
        self.tiers.register(seq.keys, blocks, seq.last_step, self._find_block, len(self.pools))

    def _find_block(self, group: int, key: BlockKey) -> int | None:
        return self.pools[group].prefix.find(key)

    def find_in_tiers(
        self, seq: KVSequence, tokens: Sequence[int], tables: Sequence[Sequence[int]]
    ) -> Found | None:
        """Return the pieces in the tiers that continue the cached prefix `tables`, which is the
        result of `match`. They leave at least one token to compute."""
        if self.tiers is None or seq.seed is None:
            return None
        self._extend_keys(seq, tokens, len(tokens) // self.block_size)
        longest = (len(tokens) - 1) // self.block_size
        return self.tiers.find(seq.keys, table_length(tables), longest)

    def drop_outside_windows(self, seq: KVSequence) -> list[tuple[int, int]]:
        """Release the blocks that no later token sees. Return (group, leading null entries) of each
        changed table."""
        changed = []
        for group, window in enumerate(self.windows):
            if window is None:
                continue
            first = min(self._first_visible(seq.num_computed, window), len(seq.tables[group]))
            start = seq.num_dropped[group]
            if first > start:
                table = seq.tables[group]
                dropped = table[start:first]
                table[start:first] = [NULL_BLOCK] * (first - start)
                seq.num_dropped[group] = first
                self._release(group, dropped, seq.last_step)
                changed.append((group, first))
        return changed

    def excess(self, seq: KVSequence, scores: Sequence[float] = ()) -> list[range]:
        """Return the table entries to evict so that the next token fits in the budget. The caller
        has checked that eviction is enabled and the prompt is computed."""
        assert self.eviction is not None
        (table,) = seq.tables
        grows = seq.num_computed >= seq.capacity
        return self.eviction.evicted(len(table) + grows, scores)

    def evict(self, seq: KVSequence, gone: list[range]) -> None:
        (table,) = seq.tables
        for entries in gone:
            self._release(0, table[entries.start : entries.stop], seq.last_step)
            del table[entries.start : entries.stop]
            seq.num_evicted += len(entries) * self.block_size

    def close(self, seq: KVSequence) -> None:
        """Release all blocks, the last blocks first, so that a prefix is evicted after its
        suffix."""
        if seq not in self._live:
            return
        if self.tiers is not None and seq not in self._receiving:
            full = seq.num_registered
            self._copy_to_tiers(seq, range(full))  # copies that a full queue has dropped before
            self.tiers.touch(seq.keys[:full])
        del self._live[seq]
        self._receiving.discard(seq)
        self._fragmented -= seq.capacity - seq.num_computed
        for group, table in enumerate(seq.tables):
            self._release(group, table[seq.num_dropped[group] :][::-1], seq.last_step)
        seq.tables, seq.num_dropped = [], []
        seq.num_computed = seq.num_registered = seq.capacity = seq.num_evicted = 0

    def hold(self, seq: KVSequence, offer: int) -> None:
        """Close the sequence. An offer owns the blocks until `release_held`."""
        del self._live[seq]
        self._fragmented -= seq.capacity - seq.num_computed
        held = zip(seq.tables, seq.num_dropped, strict=True)
        self._held[offer] = [table[dropped:] for table, dropped in held]
        seq.tables, seq.num_dropped = [], []
        seq.num_computed = seq.num_registered = seq.capacity = seq.num_evicted = 0

    def part(self, seq: KVSequence, num_tokens: int) -> list[list[int]] | None:
        """Return the tables needed to continue after the first `num_tokens`, a whole number of
        blocks; None if a window has dropped a needed block."""
        end, tables = num_tokens // self.block_size, []
        for group, window in enumerate(self.windows):
            first = self._first_visible(num_tokens, window)
            if first < seq.num_dropped[group]:
                return None
            tables.append([NULL_BLOCK] * first + seq.tables[group][first:end])
        return tables

    def hold_part(self, tables: Sequence[Sequence[int]], offer: int) -> None:
        """Add an offer as an owner of these blocks, until `release_held`."""
        held = [[block for block in table if block != NULL_BLOCK] for table in tables]
        for pool, blocks in zip(self.pools, held, strict=True):
            for block in blocks:
                pool.share(block)
        self._held[offer] = held

    def release_held(self, offer: int) -> None:
        for group, blocks in enumerate(self._held.pop(offer, ())):
            self.pools[group].release(blocks[::-1])

    @property
    def num_held(self) -> int:
        """Number of offers that own blocks."""
        return len(self._held)

    def receive(self, seq: KVSequence, num_tokens: int) -> list[list[int]]:
        """Allocate blocks for the first `num_tokens` of a sequence, just opened on its cached
        prefix, and count the tokens as computed. Return the table entries of each group to fetch.

        Raise `ReceiverFullError`, without any change, if a group has too few blocks."""
        start, end = table_length(seq.tables), -(-num_tokens // self.block_size)
        # Blocks that have left a window are not fetched.
        visible = [min(end, self._first_visible(num_tokens, window)) for window in self.windows]
        for pool, first in zip(self.pools, visible, strict=True):
            if end - max(start, first) > pool.num_available:
                raise ReceiverFullError(
                    f"{end - max(start, first)} blocks are needed, {pool.num_available} are free"
                )
        for group, first in enumerate(visible):
            table, dropped = seq.tables[group], seq.num_dropped[group]
            if first > dropped:  # cached blocks that no later token sees
                passed = table[dropped:first]
                table[dropped:first] = [NULL_BLOCK] * len(passed)
                self._release(group, passed, seq.last_step)
                seq.num_dropped[group] = first
            table += [NULL_BLOCK] * (first - len(table))
            table += self.pools[group].allocate(end - len(table))
        self._fragmented += end * self.block_size - num_tokens
        seq.capacity = end * self.block_size
        seq.num_computed = num_tokens
        self._receiving.add(seq)
        return [list(range(max(start, first), end)) for first in visible]

    def received(self, seq: KVSequence) -> None:
        """Record that all blocks of `receive` have arrived."""
        self._receiving.discard(seq)

    @property
    def num_receiving(self) -> int:
        """Number of sequences whose blocks are being fetched."""
        return len(self._receiving)

    def commit(self, step: int) -> None:
        """Free the blocks that only `step` owned, after the step has run."""
        self._committed_step = step
        while self._in_flight and self._in_flight[0][0] <= step:
            _, group, blocks = self._in_flight.popleft()
            self.pools[group].release(blocks)
        if self.tiers is not None:
            self.tiers.commit(step)

    def reset_prefixes(self) -> None:
        """Drop every cached prefix, including those of running sequences."""
        for pool in self.pools:
            pool.reset_prefixes()

    def _release(self, group: int, blocks: list[int], last_step: int) -> None:
        if last_step > self._committed_step:
            # The deque stays ordered by step.
            newest = self._in_flight[-1][0] if self._in_flight else -1
            self._in_flight.append((max(last_step, newest), group, blocks))
        else:
            self.pools[group].release(blocks)

    def _extend_keys(self, seq: KVSequence, tokens: Sequence[int], count: int) -> None:
        size, keys = self.block_size, seq.keys
        assert seq.seed is not None
        if not keys:
            keys.extend(self._prompt_keys.of(seq.seed, tokens[: count * size]))
        for n in range(len(keys), count):
            parent = keys[-1].digest if keys else seq.seed
            keys.append(block_key(parent, tokens[n * size : (n + 1) * size]))

    # ── audit ───────────────────────────────────────────────────────────────────────────────

    def audit(self) -> None:
        """Check in every group that each block has its recorded owners, and no block leaked."""
        owners: list[Counter[int]] = [Counter() for _ in self.pools]
        fragmented = 0
        for seq in self._live:
            for group, table in enumerate(seq.tables):
                dropped = seq.num_dropped[group]
                assert not any(table[:dropped]), "a block outside the window is not null"
                assert NULL_BLOCK not in table[dropped:], "a visible block is null"
                length = len(table) * self.block_size + seq.num_evicted
                assert length == seq.capacity, "a table and capacity differ"
                owners[group].update(table[dropped:])
            assert 0 <= seq.num_computed <= seq.capacity, "more computed than there is room for"
            fragmented += seq.capacity - seq.num_computed
        for held in self._held.values():
            for group, blocks in enumerate(held):
                owners[group].update(blocks)
        for step, group, blocks in self._in_flight:
            assert step > self._committed_step, "a committed step still owns blocks"
            owners[group].update(blocks)
        for pool, owned in zip(self.pools, owners, strict=True):
            pool.check(dict(owned))
        if self.tiers is not None:
            self.tiers.check(lambda group, block: block in self.pools[group].prefix)
        assert self._receiving <= self._live.keys(), (
            "blocks are being fetched for a closed sequence"
        )
        assert fragmented == self._fragmented, (
            f"fragmented is {fragmented}, counted {self._fragmented}"
        )
        for usage in (*self.group_usage(), self.usage()):
            parts = (usage.used, usage.fragmented, usage.cached, usage.free)
            assert min(parts) >= 0, f"negative usage: {usage}"
            assert sum(parts) == usage.reserved, f"usage does not add up: {usage}"

    def is_idle(self) -> bool:
        """True if no sequence and no step owns a block."""
        return not self._live and not self._in_flight
