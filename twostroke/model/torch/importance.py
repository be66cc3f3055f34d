"""How much each input of a matrix matters: the mean of x² over a calibration text.

The unquantised model runs as the decoder always does, in one step that has every window as a chunk;
its layers are read one after another, so that two of them are in memory at one time, and not the
model. With several ranks each sees the inputs of its own parts.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence
from time import monotonic

import torch

from twostroke.kernels.activations import Activation
from twostroke.kernels.reference import Kernels
from twostroke.kv.pool import KVPool
from twostroke.model.describe.spec import ModelSpec
from twostroke.model.describe.tensor_parallel import ONE_RANK, Ranks
from twostroke.model.formats.linear import Activations, Linear
from twostroke.model.torch.decoder import Decoder
from twostroke.model.torch.step_inputs import PrefillInputs, StepInputs
from twostroke.model.weights import WeightSource

log = logging.getLogger(__name__)

# Of the mean over all inputs, added to each: what this text never uses another may.
DAMPING = 0.01

Importance = dict[str, torch.Tensor]  # of a weight's inputs, [in] fp32


@torch.inference_mode()
def measure_importance(
    spec: ModelSpec,
    source: WeightSource,
    windows: Sequence[Sequence[int]],
    dtype: torch.dtype,
    device: torch.device,
    max_len: int,
    weight_dtype: torch.dtype | None = None,
    ranks: Ranks = ONE_RANK,
) -> Importance:
    """Of the matrices of all layers and of the head (`embed`, where that is the head)."""
    begun = monotonic()
    found: Importance = {}

    def observe(names: Sequence[str], linear: Linear) -> Linear:
        return ObservedLinear(linear, names, found)

    decoder = Decoder(
        spec,
        source,
        dtype,
        device,
        max_len,
        Kernels(),
        weight_dtype=weight_dtype,
        ranks=ranks,
        observe=observe,
    )
    tokens = torch.tensor(windows, device=device)
    groups = len(decoder.spec.kv_groups())
    # A window has a block of its own.
    pool = KVPool(decoder.spec, [len(windows)] * groups, tokens.shape[1], dtype, device)
    hidden = decoder.forward(one_step(tokens, groups), pool)
    found["embed" if spec.tie_embeddings else "head"] = mean_square(hidden)
    log.info("calibration: %d windows of %d tokens, %.1f s", *tokens.shape, monotonic() - begun)
    return found


def mean_square(x: torch.Tensor) -> torch.Tensor:
    """Of each channel."""
    found = x.float().square().mean(0)
    return found + DAMPING * found.mean()


def one_step(tokens: torch.Tensor, groups: int) -> StepInputs:
    """All windows, [windows, size], as chunks that begin a sequence each."""
    (count, size), device = tokens.shape, tokens.device
    place = torch.arange(tokens.numel(), device=device)
    rows = torch.arange(count, dtype=torch.int32, device=device)
    prefill = PrefillInputs(
        rows,
        [torch.zeros_like(rows)] * groups,
        torch.arange(0, tokens.numel() + 1, size, dtype=torch.int32, device=device),
        tokens.numel(),
        max_first=size,
        max_continued=0,
        spans=[[(0, size)] * count] * groups,
    )
    slots, tables = size + place, (rows + 1).unsqueeze(1)  # block 0 is nobody's
    return StepInputs(
        tokens.flatten(), place % size, [slots] * groups, [tables] * groups, None, prefill, None
    )


class ObservedLinear:
    """A `Linear` that keeps what it is multiplied with, squared and averaged."""

    def __init__(self, linear: Linear, names: Sequence[str], found: Importance) -> None:
        self._linear, self._names, self._found = linear, names, found
        self.num_bytes = linear.num_bytes

    def product(
        self, x: Activations, *, pdl: bool = False, out: torch.Tensor | None = None
    ) -> torch.Tensor:
        self._see(x)
        return self._linear.product(x, pdl=pdl, out=out)

    def gated_product(
        self,
        x: Activations,
        activation: Activation,
        *,
        pdl: bool = False,
        to: torch.dtype | None = None,
    ) -> Activations:
        self._see(x)
        return self._linear.gated_product(x, activation, pdl=pdl, to=to)

    def a8_type(self, rows: int) -> torch.dtype | None:
        return None

    def to_meta(self) -> Linear:
        return self._linear.to_meta()

    def _see(self, x: Activations) -> None:
        assert isinstance(x, torch.Tensor)
        self._found.update(dict.fromkeys(self._names, mean_square(x)))
