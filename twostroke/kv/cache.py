"""`KVCache`: block tables of running sequences over one `BlockPool` per KV group. No tensors.

For one sequence, with blocks of 4 tokens, in a group without a window and in one of window 8:

    tokens    aaaabbbbccccddddeeeef...        capacity = 24
                                   ^ num_computed = 21: planned, launched or done
    group 0   [ 5 | 8 | 7 | 3 | 9 | 12 ]
    group 1   [ 0 | 0 | 0 | 4 | 2 | 6  ]      0: null, outside the window of every later token
    full blocks are registered: other sequences may share them
    12 and 6  fragmented by 3 slots each

Block numbers belong to their group: block 2 of group 0 and block 2 of group 1 are different memory.
Tables are equally long in all groups and only grow; a block outside the window becomes null so that
positions stay put. Blocks that are evicted (`eviction.py`) leave their tables, which close up: the
capacity counts them. A block that a step in flight may still touch is freed when that step commits:
the step is an owner. So at any moment reserved = used + fragmented + cached + free, in each group.
"""

from __future__ import annotations

import sys
from collections import Counter, deque
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

from twostroke.kv.blocks import NULL_BLOCK, BlockPool
from twostroke.kv.eviction import Eviction
from twostroke.kv.prefix import BlockKey, block_key
from twostroke.kv.transfer import ReceiverFullError


class GroupLimits(NamedTuple):
    """One KV group as the scheduler knows it: its pool, and what its layers weigh in a step."""

    num_blocks: int
    window: int | None = None  # None: all positions stay visible
    query_channels: int = 1  # in all its layers: its share of attention's FLOPs
    kv_elements: int = 1  # that a token leaves in all its layers: its share of the bytes read


class KVUsage(NamedTuple):
    """Token slots of a pool, or of all pools. reserved = used + fragmented + cached + free."""

    reserved: int
    used: int
    fragmented: int  # allocated, not filled
    cached: int  # filled, nobody's: reusable prefixes
    free: int

    @property
    def taken(self) -> float:
        """The share that running requests have, 0 to 1."""
        return (self.used + self.fragmented) / self.reserved if self.reserved else 0.0


def table_length(tables: Sequence[Sequence[int]]) -> int:
    """Blocks of a sequence: its tables are equally long in every group, null blocks included."""
    (length,) = {len(table) for table in tables}
    return length


@dataclass(slots=True, eq=False)
class KVSequence:
    """The KV state of one request, changed by `KVCache` alone."""

    seed: bytes | None  # where its digest chain starts; None: shares nothing
    tables: list[list[int]] = field(default_factory=list)  # per group
    num_dropped: list[int] = field(default_factory=list)  # leading null entries, per group
    keys: list[BlockKey] = field(default_factory=list)
    num_computed: int = 0
    num_registered: int = 0  # leading blocks that have been offered to the prefix index
    register_at: int = 0  # tokens computed at which there is another one to offer
    capacity: int = 0  # tokens that the tables hold, or held before they were evicted
    num_evicted: int = 0  # tokens
    last_step: int = -1  # the newest step that names it


def blocks_held(num_tokens: int, window: int | None, chunk: int, block_size: int) -> int:
    """Blocks of one group that a sequence of this length holds at most at one time, if no step
    computes more than `chunk` of its tokens."""
    blocks = -(-num_tokens // block_size)
    if window is None:
        return blocks
    # The window of the chunk's first token and the chunk itself, wherever in a block they begin.
    return min(blocks, -(-(window + chunk - 2) // block_size) + 1)


class KVCache:
    def __init__(
        self,
        groups: Sequence[GroupLimits],
        block_size: int,
        keep_cached: bool = True,
        max_chunk: int = 1,
        eviction: Eviction | None = None,
    ) -> None:
        assert eviction is None or [group.window for group in groups] == [None]
        self.block_size = block_size
        self.eviction = eviction
        self.windows = tuple(group.window for group in groups)
        self.pools = tuple(BlockPool(group.num_blocks, keep_cached) for group in groups)
        # The most blocks a sequence holds in each group, while it is prefilled and while it decodes
        self._most_prefill, self._most_decode = (
            [blocks_held(sys.maxsize, window, chunk, block_size) for window in self.windows]
            for chunk in (max_chunk, 1)
        )
        self._live: dict[KVSequence, None] = {}
        self._held: dict[int, list[list[int]]] = {}  # blocks that others may fetch, by offer
        self._receiving: set[KVSequence] = set()  # whose blocks are on their way here
        # (step, group, blocks that the step still owns)
        self._in_flight: deque[tuple[int, int, list[int]]] = deque()
        self._committed_step = -1
        self._fragmented = 0  # slots, the same number in every group

    # ── asking ──────────────────────────────────────────────────────────────────────────────

    def blocks_for(self, group: int, num_tokens: int, num_prompt: int | None = None) -> int:
        """Blocks that a sequence of this length holds at most at one time; `num_prompt`: so much of
        it is a prompt, of which nothing is evicted before all of it has been computed."""
        most = min(-(-num_tokens // self.block_size), self._most_prefill[group])
        if self.eviction is None or num_prompt is None:
            return most
        return min(most, max(-(-num_prompt // self.block_size), self.eviction.budget_blocks))

    def blocks_missing(
        self, group: int, seq: KVSequence, num_tokens: int, num_prompt: int, decodes: bool = False
    ) -> int:
        """Blocks that a running sequence still has to take to reach this length."""
        if self.eviction is not None:
            most = self.blocks_for(group, num_tokens, num_prompt)
        else:
            most = (self._most_decode if decodes else self._most_prefill)[group]
            most = min(-(-num_tokens // self.block_size), most)
        held = len(seq.tables[group]) - seq.num_dropped[group]
        return max(0, most - held)

    def next_eviction(self, seq: KVSequence, num_prompt: int) -> int:
        """The next position for which blocks must be given up first."""
        assert self.eviction is not None
        return max(num_prompt, seq.num_evicted + self.eviction.budget_blocks * self.block_size)

    @property
    def tokens_available(self) -> int:
        """Tokens by whose blocks a sequence at the end of its last block could grow now."""
        return min(pool.num_available for pool in self.pools) * self.block_size

    @property
    def awaits_blocks(self) -> bool:
        """Whether blocks will be freed when the steps in flight commit."""
        return bool(self._in_flight)

    def group_usage(self) -> list[KVUsage]:
        size, fragmented, usage = self.block_size, self._fragmented, []
        for pool in self.pools:
            free, cached, reserved = pool.num_free, pool.num_cached, pool.num_blocks
            used = (reserved - free - cached) * size - fragmented
            usage.append(KVUsage(reserved * size, used, fragmented, cached * size, free * size))
        return usage

    def usage(self) -> KVUsage:
        """Of all groups together: a token takes a slot in each."""
        usage = self.group_usage()
        return usage[0] if len(usage) == 1 else KVUsage(*map(sum, zip(*usage, strict=True)))

    def match(self, seq: KVSequence, tokens: Sequence[int]) -> list[list[int]]:
        """The longest cached prefix, as one table per group. At least one token is left over.

        A group with a window needs only the blocks that the next token can see; the rest are null.
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
        for n in range(count):  # without a window nothing after the first gap is of use
            block = find(keys[n])
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
        """Make room for `num_tokens` in all. Returns the blocks added to each table, or None if
        a group has too few, and then nothing has changed in any."""
        grow = -(-(num_tokens - seq.capacity) // self.block_size)
        if grow <= 0:
            return 0
        for pool in self.pools:
            if grow > pool.num_available:
                return None
        for pool, table in zip(self.pools, seq.tables):  # noqa: B905 - one for each, and often
            table.extend(pool.allocate(grow))
        seq.capacity += grow * self.block_size
        self._fragmented += grow * self.block_size
        return grow

    def advance(self, seq: KVSequence, count: int, step: int) -> None:
        """`step` computes the next `count` tokens."""
        seq.num_computed += count
        seq.last_step = step
        self._fragmented -= count

    def advance_each(self, sequences: Sequence[KVSequence], step: int) -> None:
        """`step` computes the next token of every one of them."""
        for seq in sequences:
            seq.num_computed += 1
            seq.last_step = step
        self._fragmented -= len(sequences)

    def rewind(self, seq: KVSequence, count: int) -> None:
        """The last `count` tokens were rejected drafts: their slots are written again.

        What a window dropped meanwhile does not come back: a step planned on drafts that are not
        known yet must drop by the tokens that are certain.
        """
        seq.num_computed -= count
        self._fragmented += count

    def register(self, seq: KVSequence, tokens: Sequence[int]) -> None:
        """Offer the blocks that are full, computed by a launched step, and whose tokens are known.

        A step stores all its keys and values before it attends, layer by layer, so even a request
        planned in the same step may share them.
        """
        if seq.num_evicted:  # what is computed now has not seen all that its digest stands for
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
        seq.num_registered = full

    def drop_outside_windows(self, seq: KVSequence) -> list[tuple[int, int]]:
        """Give up the blocks that no later token can see: (group, leading null entries) changed."""
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
        """Table entries to give up before the next token can be stored within the budget. The
        caller has seen that a policy is set and the prompt is computed."""
        assert self.eviction is not None
        (table,) = seq.tables
        grows = seq.num_computed >= seq.capacity
        return self.eviction.gone(len(table) + grows, scores)

    def evict(self, seq: KVSequence, gone: list[range]) -> None:
        (table,) = seq.tables
        for entries in gone:
            self._release(0, table[entries.start : entries.stop], seq.last_step)
            del table[entries.start : entries.stop]
            seq.num_evicted += len(entries) * self.block_size

    def close(self, seq: KVSequence) -> None:
        """Give everything up; the tail is evicted before the head it hangs on."""
        if seq not in self._live:
            return
        del self._live[seq]
        self._receiving.discard(seq)
        self._fragmented -= seq.capacity - seq.num_computed
        for group, table in enumerate(seq.tables):
            self._release(group, table[seq.num_dropped[group] :][::-1], seq.last_step)
        seq.tables, seq.num_dropped = [], []
        seq.num_computed = seq.num_registered = seq.capacity = seq.num_evicted = 0

    def hold(self, seq: KVSequence, offer: int) -> None:
        """As `close`, but the blocks stay owned, by an offer, until `release_held`."""
        del self._live[seq]
        self._fragmented -= seq.capacity - seq.num_computed
        held = zip(seq.tables, seq.num_dropped, strict=True)
        self._held[offer] = [table[dropped:] for table, dropped in held]
        seq.tables, seq.num_dropped = [], []
        seq.num_computed = seq.num_registered = seq.capacity = seq.num_evicted = 0

    def part(self, seq: KVSequence, num_tokens: int) -> list[list[int]] | None:
        """Its tables as they are to whoever goes on after the first `num_tokens`, which fill whole
        blocks; None: a window has passed some that would be needed."""
        end, tables = num_tokens // self.block_size, []
        for group, window in enumerate(self.windows):
            first = self._first_visible(num_tokens, window)
            if first < seq.num_dropped[group]:
                return None
            tables.append([NULL_BLOCK] * first + seq.tables[group][first:end])
        return tables

    def hold_part(self, tables: Sequence[Sequence[int]], offer: int) -> None:
        """An offer owns these blocks, too, until `release_held`."""
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
        """Offers that own blocks."""
        return len(self._held)

    def receive(self, seq: KVSequence, num_tokens: int) -> list[list[int]]:
        """Make room for the first `num_tokens` of a sequence just opened on its cached prefix, as
        if they were computed: the table entries of each group that are to be fetched.

        Raises `ReceiverFullError` if a group has too few blocks, and then nothing has changed."""
        start, end = table_length(seq.tables), -(-num_tokens // self.block_size)
        # Where a window has passed, nothing is wanted.
        visible = [min(end, self._first_visible(num_tokens, window)) for window in self.windows]
        for pool, first in zip(self.pools, visible, strict=True):
            if end - max(start, first) > pool.num_available:
                raise ReceiverFullError(
                    f"{end - max(start, first)} blocks are needed, {pool.num_available} are free"
                )
        for group, first in enumerate(visible):
            table, dropped = seq.tables[group], seq.num_dropped[group]
            if first > dropped:  # hits that no later token sees
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
        """What `receive` made room for has come."""
        self._receiving.discard(seq)

    @property
    def num_receiving(self) -> int:
        """Sequences whose blocks are on their way here."""
        return len(self._receiving)

    def commit(self, step: int) -> None:
        """`step` has run: what only it still owned is freed."""
        self._committed_step = step
        while self._in_flight and self._in_flight[0][0] <= step:
            _, group, blocks = self._in_flight.popleft()
            self.pools[group].release(blocks)

    def reset_prefixes(self) -> None:
        """Drop every cached prefix, of running sequences too."""
        for pool in self.pools:
            pool.reset_prefixes()

    def _release(self, group: int, blocks: list[int], last_step: int) -> None:
        if last_step > self._committed_step:
            # Kept in step order: a sequence is never closed with an older step than the last.
            newest = self._in_flight[-1][0] if self._in_flight else -1
            self._in_flight.append((max(last_step, newest), group, blocks))
        else:
            self.pools[group].release(blocks)

    def _extend_keys(self, seq: KVSequence, tokens: Sequence[int], count: int) -> None:
        size, keys = self.block_size, seq.keys
        assert seq.seed is not None
        for n in range(len(keys), count):
            parent = keys[-1].digest if keys else seq.seed
            keys.append(block_key(parent, tokens[n * size : (n + 1) * size]))

    # ── proving ─────────────────────────────────────────────────────────────────────────────

    def audit(self) -> None:
        """In every group each block has exactly the owners it claims, and nothing leaked."""
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
        assert self._receiving <= self._live.keys(), "blocks are on their way to nobody"
        assert fragmented == self._fragmented, (
            f"fragmented is {fragmented}, counted {self._fragmented}"
        )
        for usage in (*self.group_usage(), self.usage()):
            parts = (usage.used, usage.fragmented, usage.cached, usage.free)
            assert min(parts) >= 0, f"negative usage: {usage}"
            assert sum(parts) == usage.reserved, f"usage does not add up: {usage}"

    def is_idle(self) -> bool:
        """No sequence and no step owns a block."""
        return not self._live and not self._in_flight
