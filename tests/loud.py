"""`Loud`: random weights of models in which attention matters. It needs no torch."""

from __future__ import annotations

import numpy as np

from twostroke.model.weights import ALL_ROWS, Floats
from twostroke.model.weights.dummy import STD, DummyWeights, mean_of


class Loud(DummyWeights):
    """Random weights with matrices ten times as large as usual: the tokens that a query attends to
    change the token that the model writes.

    The numbers have all bits of fp32, so that a kernel that rounds weights shows it. numpy draws
    the same numbers on every architecture.
    """

    def floats(self, name: str, rows: slice = ALL_ROWS) -> Floats:
        weight = super().floats(name, rows)
        return weight * np.float32(10) if weight.ndim == 2 else weight

    def draw(self, name: str, count: int) -> Floats:
        random = np.random.default_rng(self.seed_of(name))
        drawn = random.standard_normal(count, dtype=np.float32)
        return drawn * np.float32(STD) + np.float32(mean_of(name))
