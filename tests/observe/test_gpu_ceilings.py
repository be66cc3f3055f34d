"""The arithmetic of a GPU's ceilings; the rates themselves are measured on a GPU."""

from __future__ import annotations

from collections.abc import Callable

import torch

from twostroke.observe.ceilings import TRIES
from twostroke.observe.gpu_ceilings import best_rates


def test_the_best_try_of_each_kind_counts() -> None:
    times = iter([0.5, 0.25, 0.5, 1.0, 2.0, *[4.0] * (TRIES - 1), 0.125])
    ran = []

    def seconds(run: Callable[[], object]) -> float:
        ran.append(run())
        return next(times)

    found = best_rates(torch.device("cpu"), torch.float32, 4096, 16, seconds)
    assert found.read_bytes_per_s == 4096 / 0.25
    assert found.ops_per_s == 2 * 16**3 / 0.125
    assert [int(one) for one in ran[:TRIES]] == [1024] * TRIES, "every element was read"
    assert all(one.shape == (16, 16) for one in ran[TRIES:])
