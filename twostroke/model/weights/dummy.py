"""Random weights for a spec, for measurements and tests without a checkpoint."""

from __future__ import annotations

import hashlib
import math
from collections.abc import Sequence

import numpy as np

from twostroke.errors import ModelError, did_you_mean
from twostroke.model.describe.spec import ModelSpec
from twostroke.model.gguf.block_types import BlockType
from twostroke.model.weights import ALL_ROWS, Floats, PackedMatrix

STD = 0.02

# Random numbers are drawn for the first TILE elements of a weight and then repeated, because
# drawing is a hundred times slower than copying. TILE is prime, so that all rows differ.
TILE = 1_048_573


class DummyWeights:
    """A source of random weights. Values depend only on the seed, the name and the device type."""

    def __init__(self, spec: ModelSpec, seed: int = 0, device: str = "cpu") -> None:
        """`device`: the device on which `tensors.py` draws the weights."""
        self.device = device
        self._shapes = spec.weight_shapes()
        self.seed = seed

    def shape(self, name: str) -> tuple[int, ...] | None:
        return self._shapes.get(name)

    def fused_with(self, name: str) -> Sequence[str]:
        return (name,)

    def floats(self, name: str, rows: slice = ALL_ROWS) -> Floats:
        shape = self.known_shape(name)
        width = math.prod(shape[1:])
        first, last, _ = rows.indices(shape[0])
        tile = self.draw(name, min(TILE, shape[0] * width))
        flat = np.empty((last - first) * width, np.float32)
        at, filled = first * width % len(tile), 0
        while filled < len(flat):
            piece = tile[at : at + len(flat) - filled]
            flat[filled : filled + len(piece)] = piece
            at, filled = 0, filled + len(piece)
        return flat.reshape(-1, *shape[1:])

    def draw(self, name: str, count: int) -> Floats:
        tile = np.random.default_rng(self.seed_of(name)).standard_normal(count, dtype=np.float32)
        tile *= np.float32(STD)
        tile += np.float32(mean_of(name))
        bits = tile.view(np.uint32)  # round to bf16, the type of most checkpoints
        bits += np.uint32(0x7FFF) + (bits >> np.uint32(16) & np.uint32(1))
        bits &= np.uint32(0xFFFF0000)
        return tile

    def stored_type(self, name: str) -> BlockType | None:
        return None

    def packed(self, name: str, rows: slice = ALL_ROWS) -> PackedMatrix | None:
        return None

    def label(self, name: str) -> str:
        return f"the dummy weight {name!r}"

    def release(self, name: str) -> None:
        """Do nothing: the source holds no memory."""

    def known_shape(self, name: str) -> tuple[int, ...]:
        shape = self.shape(name)
        if shape is None:
            raise ModelError(
                f"the model has no weight {name!r}{did_you_mean(name, self._shapes)}. "
                "Expected a name of `ModelSpec.weight_shapes`."
            )
        return shape

    def seed_of(self, name: str) -> int:
        digest = hashlib.blake2b(f"{self.seed}/{name}".encode(), digest_size=8).digest()
        return int.from_bytes(digest, "little") >> 1


def mean_of(name: str) -> float:
    return 1.0 if name.endswith("norm") else 0.0
