"""The file of a piece, and its name.

    file     [ header │ token ids │ padding │ group 0: blocks │ group 1: blocks │ … │ padding ]
    header   magic, version, checksum of all that follows, identity, name, sizes

All files of an identity have the same length, a multiple of `ALIGNMENT`, so that reads and writes
can bypass the page cache (O_DIRECT).

The identity is a digest of everything that determines the contents of a block, except the tokens:
the weights, the settings that change the computed values, the layout of blocks. The name is a
keyed digest of the identity and of the digest chain of all tokens up to the end of the piece, which
starts with the salt of the request (`kv/prefix.py`). The key is random bytes that only the owner of
the folder can read, so that names do not reveal prompts or salts.
"""

from __future__ import annotations

import mmap
import struct
from collections.abc import Sequence
from dataclasses import dataclass
from hashlib import blake2b
from zlib import crc32

from twostroke.kv.transfer import DamagedError

MAGIC = b"2stroke\n"
VERSION = 1
ALIGNMENT = 4096
NAME_BYTES, IDENTITY_BYTES, KEY_BYTES = 20, 16, 32
SUFFIX = ".kv"
# magic, checksum, version, identity, name, bytes of tokens, bytes of blocks
HEADER = struct.Struct(f"<8sII{IDENTITY_BYTES}s{NAME_BYTES}sIQ")
CHECKED_FROM = 12  # after magic and checksum


def identity_of(*parts: object) -> bytes:
    """Return the digest of everything that determines the contents of blocks."""
    hasher = blake2b(digest_size=IDENTITY_BYTES)
    for part in (VERSION, *parts):
        data = repr(part).encode()
        hasher.update(len(data).to_bytes(8, "little") + data)
    return hasher.digest()


def aligned(num_bytes: int) -> int:
    return -(-num_bytes // ALIGNMENT) * ALIGNMENT


class PieceBuffer:
    """Memory for the file of one piece, aligned to pages."""

    def __init__(self, layout: PieceLayout) -> None:
        self._memory = mmap.mmap(-1, layout.file_bytes)
        self.view = memoryview(self._memory)
        self.groups = layout.groups_of(self.view)


@dataclass(frozen=True)
class PieceLayout:
    """The layout of a piece in its file."""

    identity: bytes
    token_bytes: int
    block_bytes: tuple[int, ...]  # of each group
    span: int

    @property
    def blocks_at(self) -> int:
        return -(-(HEADER.size + self.token_bytes) // 64) * 64

    @property
    def num_block_bytes(self) -> int:
        return self.span * sum(self.block_bytes)

    @property
    def file_bytes(self) -> int:
        return aligned(self.blocks_at + self.num_block_bytes)

    def groups_of(self, view: memoryview) -> list[memoryview]:
        """Return the blocks of each group."""
        parts, start = [], self.blocks_at
        for size in self.block_bytes:
            parts.append(view[start : start + self.span * size])
            start += self.span * size
        return parts

    def name_of(self, digest: bytes, key: bytes) -> bytes:
        return blake2b(self.identity + digest, key=key, digest_size=NAME_BYTES).digest()

    def seal(self, view: memoryview, name: bytes, tokens: bytes) -> None:
        """Write header and tokens. The blocks must be in `view` already."""
        sizes = (len(tokens), self.num_block_bytes)
        HEADER.pack_into(view, 0, MAGIC, 0, VERSION, self.identity, name, *sizes)
        view[HEADER.size : HEADER.size + len(tokens)] = tokens
        checksum = crc32(view[CHECKED_FROM : self.blocks_at + self.num_block_bytes])
        HEADER.pack_into(view, 0, MAGIC, checksum, VERSION, self.identity, name, *sizes)

    def check(self, view: memoryview, name: bytes, tokens: bytes) -> None:
        """Raise `DamagedError` unless `seal` has written this file with this name and tokens."""
        magic, checksum, version, identity, own, *sizes = HEADER.unpack_from(view)
        expected = MAGIC, VERSION, self.identity, name, len(tokens), self.num_block_bytes
        if (magic, version, identity, own, *sizes) != expected:
            raise DamagedError("the header of a piece is not that of its name")
        if crc32(view[CHECKED_FROM : self.blocks_at + self.num_block_bytes]) != checksum:
            raise DamagedError("the checksum of a piece differs from its contents")
        if view[HEADER.size : HEADER.size + len(tokens)] != tokens:
            raise DamagedError("a piece holds other tokens than its name says")


def block_in(
    groups: Sequence[memoryview], block_bytes: Sequence[int], group: int, place: int
) -> memoryview:
    """Return one block of a piece."""
    size = block_bytes[group]
    return groups[group][place * size : (place + 1) * size]
