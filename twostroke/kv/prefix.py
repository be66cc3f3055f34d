"""`PrefixIndex`: the index from tokens to blocks, for prefix reuse.

The key of a full block is the digest of all tokens up to its end:

    digest(0) = H(seed, tokens of block 0)      seed = H(salt, adapter, ...)
    digest(i) = H(digest(i − 1), tokens of block i)

Equal digests mean equal prefixes. A lookup also compares the tokens of the block: a collision can
lose a hit, but cannot return a wrong block. The index names blocks; `blocks.py` owns them.
"""

from __future__ import annotations

from array import array
from collections import OrderedDict
from collections.abc import Sequence
from hashlib import blake2b
from typing import NamedTuple

DIGEST_BYTES = 16


class BlockKey(NamedTuple):
    digest: bytes
    tokens: bytes


def seed_digest(*parts: str) -> bytes:
    """Return the start of a digest chain. Prompts with different salts share no blocks."""
    hasher = blake2b(digest_size=DIGEST_BYTES)
    for part in parts:
        data = part.encode()
        hasher.update(len(data).to_bytes(4, "little") + data)
    return hasher.digest()


def block_key(parent: bytes, tokens: Sequence[int]) -> BlockKey:
    return _key(parent, array("I", tokens).tobytes())


def _key(parent: bytes, packed: bytes) -> BlockKey:
    return BlockKey(blake2b(parent + packed, digest_size=DIGEST_BYTES).digest(), packed)


class PromptKeys:
    """The keys of recent prompts. A prompt that begins like one of them reuses its keys: comparing
    32,000 tokens takes 0.05 ms, and computing their keys takes several milliseconds."""

    def __init__(self, block_size: int, max_blocks: int = 1 << 15) -> None:
        """`max_blocks`: of all prompts that are kept; about 300 bytes each."""
        self._block_bytes, self._max_blocks = 4 * block_size, max_blocks
        # By the digest of the first block: the tokens of the last prompt with this block, its keys.
        self._recent: OrderedDict[bytes, tuple[bytes, list[BlockKey]]] = OrderedDict()
        self._num_blocks = 0

    def of(self, seed: bytes, tokens: Sequence[int]) -> list[BlockKey]:
        """Return the keys of all blocks of `tokens`, which are whole blocks."""
        packed, size = array("I", tokens).tobytes(), self._block_bytes
        if not packed:
            return []
        first = _key(seed, packed[:size])
        known, known_keys = self._recent.pop(first.digest, (b"", []))
        self._num_blocks -= len(known_keys)
        keys = known_keys[: common_prefix(packed, known) // size] or [first]
        for start in range(len(keys) * size, len(packed), size):
            keys.append(_key(keys[-1].digest, packed[start : start + size]))
        if len(keys) <= self._max_blocks:
            self._recent[first.digest] = packed, list(keys)
            self._num_blocks += len(keys)
        while self._num_blocks > self._max_blocks:
            _, (_, dropped) = self._recent.popitem(last=False)
            self._num_blocks -= len(dropped)
        return keys


def common_prefix(one: bytes, other: bytes) -> int:
    """Return the number of equal bytes at the start."""
    equal, end = 0, min(len(one), len(other))
    if one[:end] == other[:end]:
        return end
    while end - equal > 1:
        middle = (equal + end) // 2
        if one[equal:middle] == other[equal:middle]:
            equal = middle
        else:
            end = middle
    return equal


class PrefixIndex:
    """The maps digest → block and block → key of one KV group. If several blocks have the same
    digest, only the first is registered."""

    def __init__(self) -> None:
        self._block: dict[bytes, int] = {}
        self._key: dict[int, BlockKey] = {}

    def __contains__(self, block: int) -> bool:
        return block in self._key

    def find(self, key: BlockKey) -> int | None:
        block = self._block.get(key.digest)
        if block is None or self._key[block].tokens != key.tokens:
            return None
        return block

    def register(self, block: int, key: BlockKey) -> None:
        if key.digest not in self._block and block not in self._key:
            self._block[key.digest] = block
            self._key[block] = key

    def forget(self, block: int) -> None:
        key = self._key.pop(block, None)
        if key is not None:
            del self._block[key.digest]

    def check(self) -> None:
        """Check that both directions agree."""
        assert len(self._block) == len(self._key), "prefix index: one direction has lost entries"
        for block, key in self._key.items():
            assert self._block[key.digest] == block, f"prefix index: block {block} is lost"
