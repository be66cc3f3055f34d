"""Shares of attention that stretches of the cache get: what decides which heavy hitters stay."""

from __future__ import annotations

import numpy as np
import pytest

from tests.kernels.native_pair import ISAS, Floats, Pair
from tests.kernels.test_native_model import spec_of
from twostroke.kernels import cpu
from twostroke.kv.eviction import SEGMENT_TOKENS

pytestmark = pytest.mark.skipif(not cpu.available(), reason="built without the native kernels")


def expected(pair: Pair, rows: list[int], parts: int) -> Floats:
    layers = range(len(pair.spec.layers))
    found = np.zeros((len(rows), parts), np.float32)
    for n, row in enumerate(rows):
        weights = np.stack([pair.reference.attended[layer, row][:, -1] for layer in layers])
        for part in range(parts):
            some = weights[..., part * SEGMENT_TOKENS : (part + 1) * SEGMENT_TOKENS]
            found[n, part] = some.sum(-1).mean()
    return found


@pytest.mark.parametrize("isa", ISAS)
@pytest.mark.parametrize("threads", [(1, 1), (2, 3)])
def test_shares_are_those_of_the_softmax(isa: str, threads: tuple[int, int]) -> None:
    pair = Pair(spec_of("plain"), isa, threads=threads)
    pair.native.model.keep_shares()
    pair.difference((), [(0, 0, 150), (1, 0, 40), (2, 0, 64)])
    assert pair.native.model.shares().shape[0] == 0
    # Alone; beside a chunk, all tokens kept; beside a chunk of which the last layer keeps one.
    for at, slots, chunks, which in (
        (0, [(0, 150), (1, 40), (2, 64)], [], None),
        (1, [(0, 151), (1, 41)], [(3, 0, 200)], None),
        (2, [(0, 152), (1, 42)], [(3, 200, 9)], [0, 1, 10]),
    ):
        pair.step(slots, chunks, which)
        pair.expected(slots, chunks)
        got = pair.native.model.shares()
        rows = [row for row, _ in slots]
        np.testing.assert_allclose(got, expected(pair, rows, 3), atol=2e-3)
        np.testing.assert_allclose(got.sum(axis=1), 1.0, atol=1e-4)
        assert got[0, 2] > 0.01
        assert (got[1, 1:] == 0).all(), at
