"""Token masks as bits, the format of llguidance and of the kernels: token t is bit t % 32 of word
t // 32. Bits past the vocabulary are 0."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

Mask = npt.NDArray[np.uint32]  # [⌈vocabulary / 32⌉]


def mask_words(vocab_size: int) -> int:
    return -(-vocab_size // 32)


def mask_of(token_ids: Sequence[int], vocab_size: int) -> Mask:
    is_in = np.zeros(32 * mask_words(vocab_size), np.bool_)
    is_in[np.array(token_ids, np.int64)] = True
    return np.packbits(is_in, bitorder="little").view(np.uint32)


def mask_from_bytes(bits: bytes, vocab_size: int) -> Mask:
    """Return a mask from bytes of a vocabulary that may be shorter or longer."""
    mask = np.zeros(mask_words(vocab_size), np.uint32)
    found = np.frombuffer(bits, np.uint32)[: len(mask)]
    mask[: len(found)] = found
    if vocab_size % 32:
        mask[-1] &= np.uint32((1 << vocab_size % 32) - 1)
    return mask


def unpack_mask(mask: Mask, vocab_size: int) -> npt.NDArray[np.bool_]:
    """Return for each token of the vocabulary whether the mask contains it."""
    bits = np.unpackbits(mask.view(np.uint8), bitorder="little", count=vocab_size)
    return bits.view(np.bool_)
