"""Random weights from a spec alone: to measure and to test a model without having it."""

from __future__ import annotations

import hashlib

import torch

from twostroke.errors import ModelError, nearest
from twostroke.model.spec import ModelSpec

STD = 0.02

# Random numbers are drawn for the first TILE elements of a weight and then repeated: drawing is a
# hundred times slower than copying, and models of many billions must start. TILE is prime, so the
# repetition falls into step with no row length and no two rows of a matrix are the same.
TILE = 1_048_573


class DummyWeights:
    """Values depend on seed, name and kind of device only: not on the order of reading."""

    def __init__(self, spec: ModelSpec, seed: int = 0, device: str | torch.device = "cpu") -> None:
        self._shapes = spec.weight_shapes()
        self._seed = seed
        self._device = torch.device(device)

    def shape(self, name: str) -> tuple[int, ...] | None:
        return self._shapes.get(name)

    def read(self, name: str, dtype: torch.dtype) -> torch.Tensor:
        """Made on the device, in its dtype, with a tile as the only other memory."""
        shape = self.shape(name)
        if shape is None:
            raise ModelError(
                f"the model has no weight {name!r}{nearest(name, self._shapes)}. "
                "Expected a name from its description."
            )
        weight = torch.empty(shape, dtype=dtype, device=self._device)
        flat = weight.view(-1)
        tile = self._draw(name, min(TILE, flat.numel())).to(dtype)
        for first in range(0, flat.numel(), TILE):
            part = flat[first : first + TILE]
            part.copy_(tile[: part.numel()])
        return weight

    def _draw(self, name: str, count: int) -> torch.Tensor:
        """Drawn in float32, so that a narrower dtype holds the same weights rounded."""
        digest = hashlib.blake2b(f"{self._seed}/{name}".encode(), digest_size=8).digest()
        generator = torch.Generator(self._device)
        generator.manual_seed(int.from_bytes(digest, "little") >> 1)
        mean = 1.0 if name.endswith("norm") else 0.0
        tile = torch.empty(count, device=self._device)
        return tile.normal_(mean, STD, generator=generator)
