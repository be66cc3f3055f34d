"""`Tiers`: the pieces in all tiers of an engine, and the copies in progress. No tensors.

register(sequence)           new full pieces wait for the step that computes them
commit(step)                 computed pieces are copied to every tier that lacks them, unless the
                             queue is full
find(sequence) ─▶ Found      stored pieces that continue a cached prefix, and the time to fetch them
fetch(found)   ─▶ TierFetch  fills blocks of a request, which waits in `ReceivedQueue`
evicted(block)               the pool needs a block: copies that read the block are cancelled
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from time import monotonic
from typing import NamedTuple

from twostroke.kv.prefix import BlockKey
from twostroke.kv.tiers.index import TierIndex
from twostroke.kv.tiers.tier import Load, Read, Store, Tier, TierSpeed
from twostroke.kv.usage import KVUsage

# Maximum size of queued stores: a long prompt is computed faster than a disk takes its pieces.
QUEUED_BYTES = 8 << 30
MIN_QUEUED, MAX_QUEUED = 64, 4096  # pieces
MEASURED_BYTES = 1 << 20  # shorter fetches are not used to measure the speed
SMOOTHING = 0.3  # minimum weight of the newest fetch in the measured speed
SMOOTHED_BYTES = 1 << 30  # a fetch of this size has as much weight as all earlier fetches
FindBlock = Callable[[int, BlockKey], int | None]  # group, key → the registered block


class FoundPiece(NamedTuple):
    """A stored piece of a sequence."""

    tier: int
    name: bytes
    slot: int
    tokens: bytes
    number: int  # in its sequence


class Found(NamedTuple):
    """The pieces that continue the prefix in the device's cache, in order."""

    pieces: tuple[FoundPiece, ...]
    end_block: int
    num_bytes: int
    seconds: float  # expected time of the fetch, including the fetches in progress
    tiers: str


class TierStatus(NamedTuple):
    """The state of a tier, and its counts since the start. Plain data, sent between processes."""

    name: str
    usage: KVUsage  # in tokens
    bytes_per_s: float  # of recent fetches
    stored_bytes: int = 0
    store_s: float = 0.0
    fetched_bytes: int = 0
    fetch_s: float = 0.0
    dropped_stores: int = 0  # not started because the queue was full
    failed_stores: int = 0  # cancelled, or failed
    fetches: int = 0
    failed_fetches: int = 0


def tokens_of(keys: Sequence[BlockKey]) -> bytes:
    """Return the tokens of consecutive blocks."""
    return keys[0].tokens if len(keys) == 1 else b"".join([key.tokens for key in keys])


class TierCounts:
    def __init__(self, speed: TierSpeed) -> None:
        self.bytes_per_s = speed.bytes_per_s
        self.stored_bytes = self.fetched_bytes = 0
        self.store_s = self.fetch_s = 0.0
        self.dropped_stores = self.failed_stores = self.fetches = self.failed_fetches = 0
        self.pending_bytes = 0

    def measure(self, num_bytes: int, seconds: float) -> None:
        if num_bytes >= MEASURED_BYTES and seconds > 0:
            weight = max(SMOOTHING, num_bytes / (num_bytes + SMOOTHED_BYTES))
            self.bytes_per_s += weight * (num_bytes / seconds - self.bytes_per_s)


class TierFetch:
    """A fetch of a prefix from one or several tiers, with the interface of
    `twostroke.kv.transfer.Fetch`."""

    own_bytes = 0  # the tiers copy in their own threads

    def __init__(self, tiers: Tiers, loads: dict[int, list[Load]], reads: dict[int, Read]) -> None:
        """`loads`, `reads`: by the index of the tier."""
        self.began_s, self.loads, self.reads = monotonic(), loads, reads
        self._tiers, self._left = tiers, dict(reads)
        self.transport = " + ".join(tiers.tiers[tier].name for tier in sorted(reads))

    @property
    def num_bytes(self) -> int:
        """Bytes fetched so far."""
        return sum(read.num_bytes for read in self.reads.values())

    def advance(self, max_bytes: int | None = None) -> bool:
        """Return whether all blocks have arrived. Raise a `TransferError` if a block cannot be
        fetched."""
        for tier, read in list(self._left.items()):
            if read.poll():
                del self._left[tier]
        if not self._left:
            self._tiers.end_fetch(self, ok=True)
        return not self._left

    def abandon(self) -> None:
        """Cancel the fetch. Afterwards the blocks are not written."""
        for read in self._left.values():
            read.abandon()
        if self._left:
            self._left.clear()
            self._tiers.end_fetch(self, ok=False)


class Tiers:
    """The bookkeeping of all tiers of an engine."""

    def __init__(self, tiers: Sequence[Tier], block_size: int, span: int) -> None:
        """`tiers`: the fastest first."""
        self.tiers, self.span = tuple(tiers), span
        self._tokens = span * block_size  # of a piece
        self._indexes = [TierIndex(tier.capacity, tier.names()) for tier in tiers]
        self._counts = [TierCounts(tier.speed) for tier in tiers]
        sizes = max((tier.piece_bytes for tier in tiers), default=1)
        self.max_queued = min(MAX_QUEUED, max(MIN_QUEUED, QUEUED_BYTES // sizes))
        self._computed: deque[Store] = deque()  # pieces of steps that have not committed
        self._stores: dict[Store, None] = {}  # all copies that have not ended
        self._num_queued = [0] * len(self.tiers)  # of them, for each tier
        self._queued: set[tuple[int, bytes]] = set()  # their tiers and names
        # Copies that own a block, by group and block
        self._owners: dict[tuple[int, int], list[Store]] = {}
        self._fetches: dict[TierFetch, None] = {}

    # ── stores ──────────────────────────────────────────────────────────────────────────────

    def register(
        self, keys: Sequence[BlockKey], blocks: range, step: int, find: FindBlock, groups: int
    ) -> None:
        """Queue stores of the pieces that end with these blocks of a sequence. `step`: the step
        that computes the last block."""
        span = self.span
        for end in range(blocks.start // span * span + span, blocks.stop + 1, span):
            digest = keys[end - 1].digest
            lacking = [t for t in range(len(self.tiers)) if not self._has(t, digest)]
            if not lacking:
                continue
            own = keys[end - span : end]
            tables = [[find(group, key) for key in own] for group in range(groups)]
            numbers = [[n for n in table if n is not None] for table in tables]
            if any(len(table) < span for table in numbers):
                continue  # a block has left a window, or was evicted
            tokens = tokens_of(own)
            for tier in lacking:
                self._queue(tier, digest, tokens, numbers, step)

    def _has(self, tier: int, digest: bytes) -> bool:
        name = self.tiers[tier].name_of(digest)
        return name in self._indexes[tier] or (tier, name) in self._queued

    def _queue(
        self, tier: int, digest: bytes, tokens: bytes, blocks: list[list[int]], step: int
    ) -> None:
        if self._num_queued[tier] >= self.max_queued:
            self._counts[tier].dropped_stores += 1
            return
        store = Store(self.tiers[tier].name_of(digest), tokens, blocks, step)
        store.tier = tier
        self._computed.append(store)
        self._stores[store] = None
        self._num_queued[tier] += 1
        self._queued.add((tier, store.name))
        for group, numbers in enumerate(store.blocks):
            for number in numbers:
                self._owners.setdefault((group, number), []).append(store)

    def commit(self, step: int) -> None:
        """Start to copy the pieces that are computed after this step."""
        while self._computed and self._computed[0].step <= step:
            store = self._computed.popleft()
            index, counts = self._indexes[store.tier], self._counts[store.tier]
            if store.cancelled or store.name in index:
                self._end(store)
                continue
            begun = index.begin_store(store.name, store.tokens)
            if begun is None:
                counts.dropped_stores += 1
                self._end(store)
                continue
            store.slot, replaced = begun
            if replaced is not None:
                self.tiers[store.tier].drop([replaced])
            self.tiers[store.tier].store(store)

    def take_finished(self) -> None:
        """Process the copies that have ended."""
        for tier, index, counts in zip(self.tiers, self._indexes, self._counts, strict=True):
            for done in tier.finished():
                removed = index.end_store(done.store.name, done.ok)
                if removed:
                    tier.drop(removed)
                counts.stored_bytes += done.num_bytes
                counts.store_s += done.seconds
                counts.failed_stores += not done.ok
                self._end(done.store)

    def _end(self, store: Store) -> None:
        """Release the blocks of a copy that has ended."""
        del self._stores[store]
        self._num_queued[store.tier] -= 1
        self._queued.discard((store.tier, store.name))
        for group, numbers in enumerate(store.blocks):
            for number in numbers:
                owners = self._owners.get((group, number), [])
                if store in owners:
                    owners.remove(store)
                    if not owners:
                        del self._owners[group, number]

    def evicted(self, group: int, block: int) -> None:
        """Cancel the copies that own a block, because the pool needs the block."""
        for store in self._owners.pop((group, block), ()):
            store.cancel()

    # ── fetches ─────────────────────────────────────────────────────────────────────────────

    def find(self, keys: Sequence[BlockKey], num_cached: int, max_blocks: int) -> Found | None:
        """Return the stored pieces that continue the first `num_cached` blocks of a sequence, up to
        `max_blocks`. `keys`: of all full blocks."""
        span, pieces = self.span, list[FoundPiece]()
        sizes = [0] * len(self.tiers)
        for number in range(num_cached // span, len(keys) // span):
            piece = self._find_piece(keys[number * span : (number + 1) * span], number)
            if piece is None:
                break
            pieces.append(piece)
            sizes[piece.tier] += self.tiers[piece.tier].piece_bytes
        end = min(max_blocks, (num_cached // span + len(pieces)) * span)
        if end <= num_cached:
            return None
        names = " + ".join(t.name for t, size in zip(self.tiers, sizes, strict=True) if size)
        return Found(tuple(pieces), end, sum(sizes), self._seconds(sizes), names)

    def _find_piece(self, keys: Sequence[BlockKey], number: int) -> FoundPiece | None:
        """Return the piece with these blocks in the fastest tier that has it."""
        digest, tokens = keys[-1].digest, tokens_of(keys)
        for n, tier in enumerate(self.tiers):
            name = tier.name_of(digest)
            slot = self._indexes[n].find(name, tokens)
            if slot is not None:
                return FoundPiece(n, name, slot, tokens, number)
        return None

    def _seconds(self, sizes: Sequence[int]) -> float:
        """Return the expected time of a fetch. The tiers work at the same time."""
        each = [0.0]
        for size, tier, counts in zip(sizes, self.tiers, self._counts, strict=True):
            if size:
                queued = counts.pending_bytes + size
                each.append(tier.speed.latency_s + queued / max(1.0, counts.bytes_per_s))
        return max(each)

    def fetch(self, found: Found, pairs: Sequence[Sequence[tuple[int, int]]]) -> TierFetch:
        """Start to fill blocks. `found`: the result of `find`, before any other call. `pairs`: for
        each group, pairs of an index in the sequence's table and the block to fill."""
        parts: dict[int, list[tuple[int, int, int]]] = {}
        for group, wanted in enumerate(pairs):
            for entry, block in wanted:
                piece, place = divmod(entry, self.span)
                parts.setdefault(piece, []).append((group, place, block))
        loads: dict[int, list[Load]] = {}
        for tier, name, slot, tokens, number in found.pieces:
            if number in parts:
                loads.setdefault(tier, []).append(Load(name, slot, tokens, tuple(parts[number])))
        reads: dict[int, Read] = {}
        for tier, some in loads.items():
            self._indexes[tier].begin_read([load.name for load in some])
            self._counts[tier].pending_bytes += len(some) * self.tiers[tier].piece_bytes
            reads[tier] = self.tiers[tier].fetch(some)
        fetch = TierFetch(self, loads, reads)
        self._fetches[fetch] = None
        return fetch

    def end_fetch(self, fetch: TierFetch, ok: bool) -> None:
        """Release the pieces of a fetch, and measure the speed of the tiers."""
        del self._fetches[fetch]
        for tier, loads in fetch.loads.items():
            index, counts, read = self._indexes[tier], self._counts[tier], fetch.reads[tier]
            for name in read.bad:
                index.lose(name)
            removed = index.end_read([load.name for load in loads])
            if removed:
                self.tiers[tier].drop(removed)
            counts.pending_bytes -= len(loads) * self.tiers[tier].piece_bytes
            counts.fetched_bytes += read.num_bytes
            counts.fetch_s += read.seconds
            counts.fetches += 1
            counts.failed_fetches += not ok
            if ok:
                counts.measure(read.num_bytes, read.seconds)

    @property
    def is_storing(self) -> bool:
        """True if copies of committed steps have not ended."""
        return len(self._stores) > len(self._computed)

    @property
    def is_fetching(self) -> bool:
        return bool(self._fetches)

    def touch(self, keys: Sequence[BlockKey]) -> None:
        """Record that a sequence has used its pieces."""
        digests = [keys[n].digest for n in range(self.span - 1, len(keys), self.span)]
        for tier, index in zip(self.tiers, self._indexes, strict=True):
            touched = index.touch([tier.name_of(digest) for digest in digests])
            if touched:
                tier.touch(touched)

    # ── all tiers ───────────────────────────────────────────────────────────────────────────

    def cancel_stores(self) -> None:
        """Cancel all copies into tiers, because the blocks may be invalid."""
        for store in self._stores:
            store.cancel()

    def reset(self) -> None:
        """Remove every piece. The caller has ended the fetches."""
        self.cancel_stores()
        for tier, index in zip(self.tiers, self._indexes, strict=True):
            tier.drop(index.clear())

    def wait(self, timeout_s: float) -> None:
        """Wait until a copy or a fetch has ended."""
        for tier in self.tiers:
            tier.wait(timeout_s / len(self.tiers))

    def close(self, timeout_s: float) -> None:
        for tier in self.tiers:
            tier.close(timeout_s)

    def status(self) -> tuple[TierStatus, ...]:
        return tuple(
            TierStatus(
                tier.name,
                self._usage(index),
                bytes_per_s=counts.bytes_per_s,
                stored_bytes=counts.stored_bytes,
                store_s=counts.store_s,
                fetched_bytes=counts.fetched_bytes,
                fetch_s=counts.fetch_s,
                dropped_stores=counts.dropped_stores,
                failed_stores=counts.failed_stores,
                fetches=counts.fetches,
                failed_fetches=counts.failed_fetches,
            )
            for tier, index, counts in zip(self.tiers, self._indexes, self._counts, strict=True)
        )

    def _usage(self, index: TierIndex) -> KVUsage:
        """Return the usage in tokens. Pieces are full, so nothing is fragmented."""
        each = (index.capacity, index.num_busy, 0, index.num_stored, index.num_free)
        return KVUsage(*(count * self._tokens for count in each))

    def check(self, registered: Callable[[int, int], bool]) -> None:
        """Check the owners of blocks and slots. `registered`: whether a block of a group is in the
        prefix index."""
        owned = {
            (group, number, store)
            for store in self._stores
            for group, numbers in enumerate(store.blocks)
            for number in numbers
        }
        listed = {(*block, store) for block, stores in self._owners.items() for store in stores}
        assert listed <= owned, "an ended copy owns a block"
        for group, number, store in owned - listed:
            assert store.cancelled, f"a copy reads block {number} of group {group} unnoticed"
        for group, number, store in listed:
            assert registered(group, number) or store.cancelled, (
                f"block {number} of group {group} is copied to a tier and holds no prefix"
            )
        of_tiers = [store.tier for store in self._stores]
        counted = [of_tiers.count(tier) for tier in range(len(self.tiers))]
        assert counted == self._num_queued, "the copies of a tier are miscounted"
        for index in self._indexes:
            index.check()
        for usage in (self._usage(index) for index in self._indexes):
            parts = (usage.used, usage.fragmented, usage.cached, usage.free)
            assert min(parts) >= 0, f"negative usage of a tier: {usage}"
            assert sum(parts) == usage.reserved, f"the usage of a tier does not add up: {usage}"
        for counts in self._counts:
            assert counts.pending_bytes >= 0
        if not self._fetches:
            assert not any(counts.pending_bytes for counts in self._counts), "a fetch leaked"
