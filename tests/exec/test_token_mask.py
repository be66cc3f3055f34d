"""Sets of tokens as bits: what goes in comes out, and nothing past the vocabulary."""

from __future__ import annotations

import numpy as np
import pytest

from twostroke.exec.token_mask import mask_from_bytes, mask_of, mask_words, unpack_mask


@pytest.mark.parametrize("vocab", [1, 31, 32, 33, 300])
def test_a_mask_holds_the_tokens_it_was_made_of(vocab: int) -> None:
    ids = sorted({0, vocab // 2, vocab - 1})
    mask = mask_of(ids, vocab)
    assert mask.shape == (mask_words(vocab),)
    assert np.flatnonzero(unpack_mask(mask, vocab)).tolist() == ids
    assert [int(mask[t // 32]) >> t % 32 & 1 for t in ids] == [1] * len(ids)


def test_a_mask_of_another_vocabulary_is_cut_or_filled_with_nothing() -> None:
    everything = np.full(3, 2**32 - 1, np.uint32).tobytes()  # 96 tokens
    assert unpack_mask(mask_from_bytes(everything, 200), 200).sum() == 96
    shorter = mask_from_bytes(everything, 40)
    assert unpack_mask(shorter, 40).all()
    assert shorter.tolist() == [2**32 - 1, 2**8 - 1]
