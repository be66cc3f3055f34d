"""The native kernels over a KV cache in int8, against the model in numpy with the same rounding.

What both round differs now and then by a step of the type, where sums in another order lie on the
other side of the middle between two: that is what the bounds allow."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from tests.kernels.native_pair import Life, Pair, heads
from tests.specs import make_spec as small_spec
from twostroke.kernels import cpu

pytestmark = pytest.mark.skipif(
    not cpu.available(), reason="this installation was built without the native kernels"
)
SPECS = {
    "plain": heads(6, 2, 64, vocab_size=64),
    "odd": heads(6, 2, 24, vocab_size=64, qk_norm="head"),
    "window": heads(5, 1, 32, vocab_size=64) | {"windows": (11, None), "softcap": 5.0},
}


@pytest.mark.parametrize("exact", [True, False])
@pytest.mark.parametrize("name", SPECS)
def test_steps_equal_the_definition(name: str, exact: bool) -> None:
    given: dict[str, Any] = SPECS[name]
    for isa in cpu.module().isas():
        pair = Pair(small_spec(**given), isa, exact=exact, block_size=5, int8=True)
        life = Life(pair, np.random.default_rng(1))
        for _ in range(8):
            step = life.step()
            got, expected = pair.step(*step), pair.expected(*step)
            if exact:
                assert np.abs(got - expected).max() <= pair.tolerance, isa
            else:
                bound = pair.rounding_error(*step, expected)
                assert np.abs(got - expected).mean() <= bound, isa


def test_a_head_of_zeros_and_a_large_one() -> None:
    """Zeros have the scale 0 and stay zeros; what is large keeps its digits."""
    spec = small_spec(**SPECS["plain"])
    pair = Pair(spec, int8=True)
    pair.step(chunks=[(0, 0, 20)])
    cache = pair.caches[0]
    heads_of = cache.reshape(-1, pair.block_size * (64 + 4))
    scales = heads_of[:, pair.block_size * 64 :].copy().view(np.float32)
    written = scales > 0
    assert written.sum() == 20 * 2 * 2 * 2  # tokens, layers, sides, heads
    codes = heads_of[:, : pair.block_size * 64].reshape(-1, pair.block_size, 64)
    assert (np.abs(codes.astype(int)).max(-1)[written] == 127).all()
    assert not codes[~written].any()


def test_a_cache_of_another_type_or_size_is_refused() -> None:
    pair = Pair(small_spec(**SPECS["plain"]), int8=True)
    pair.caches = [pair.caches[0][..., :-1].copy()]
    with pytest.raises(ValueError, match="the cache does not have the shape of this model"):
        pair.step(slots=[(0, 0)])
    pair.caches = [pair.caches[0].astype(np.float32)]
    with pytest.raises(ValueError, match="the cache does not have the shape of this model"):
        pair.step(slots=[(0, 0)])
