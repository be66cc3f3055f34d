"""`PrefixIndex`: the index from tokens to blocks, for prefix reuse.

The key of a full block is the digest of all tokens up to its end:

    digest(0) = H(seed, tokens of block 0)      seed = H(salt, adapter, ...)
    digest(i) = H(digest(i − 1), tokens of block i)

Equal digests mean equal prefixes. A lookup also compares the tokens of the block: a collision can
lose a hit, but cannot return a wrong block. The index names blocks; `blocks.py` owns them.
"""

from __future__ import annotations

from array import array
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
    packed = array("I", tokens).tobytes()
    return BlockKey(blake2b(parent + packed, digest_size=DIGEST_BYTES).digest(), packed)


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
