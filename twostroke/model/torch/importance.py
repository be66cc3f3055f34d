"""Measures the importance of each input of a matrix: the mean of x² over a calibration text.

The decoder runs the unquantised model in one step, with every window as a chunk. Its layers are
read one after another, so that only two of them are in memory at a time. Each of several ranks
measures the inputs of its own parts.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence
from time import monotonic

import torch

from twostroke.kernels.activations import Activation
from twostroke.kernels.records import DEFAULT_CONTEXT, PrefillWork, StepContext
from twostroke.kernels.reference import Kernels
from twostroke.kv.pool import KVPool
from twostroke.model.describe.spec import ModelSpec
from twostroke.model.describe.tensor_parallel import ONE_RANK, Ranks
from twostroke.model.formats.linear import Activations, Linear
from twostroke.model.torch.decoder import Decoder
from twostroke.model.torch.load_layers import LoadOptions
from twostroke.model.torch.step_inputs import StepInputs
from twostroke.model.weights import WeightSource

log = logging.getLogger(__name__)

# This share of the mean over all inputs is added to each input, because other texts may use inputs
# that the calibration text does not use.
DAMPING = 0.01

Importance = dict[str, torch.Tensor]  # name of a weight → importance of its inputs, [in] fp32


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
    """Return the importance of the inputs of all matrices of the layers, and of the head (named
    `embed` if the embedding is the head)."""
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
        LoadOptions(weight_dtype=weight_dtype, observe=observe),
        ranks=ranks,
    )
    tokens = torch.tensor(windows, device=device)
    groups = len(decoder.spec.kv_groups())
    # Each window has its own block.
    pool = KVPool(decoder.spec, [len(windows)] * groups, tokens.shape[1], dtype, device)
    hidden = decoder.forward(one_step(tokens, groups), pool)
    found["embed" if spec.tie_embeddings else "head"] = mean_square(hidden)
    log.info("calibration: %d windows of %d tokens, %.1f s", *tokens.shape, monotonic() - begun)
    return found


def mean_square(x: torch.Tensor) -> torch.Tensor:
    """Return the mean square of each channel."""
    found = x.float().square().mean(0)
    return found + DAMPING * found.mean()


def one_step(tokens: torch.Tensor, groups: int) -> StepInputs:
    """Return the inputs of a step with all windows, [windows, size], as chunks of new sequences."""
    (count, size), device = tokens.shape, tokens.device
    place = torch.arange(tokens.numel(), device=device)
    rows = torch.arange(count, dtype=torch.int32, device=device)
    prefill = PrefillWork(
        rows,
        torch.zeros_like(rows),
        torch.arange(0, tokens.numel() + 1, size, dtype=torch.int32, device=device),
        tokens.numel(),
        max_first=size,
        max_continued=0,
        spans=[(0, size)] * count,
    )
    slots, tables = size + place, (rows + 1).unsqueeze(1)  # block 0 is null
    return StepInputs(
        tokens.flatten(),
        place % size,
        slots=[slots] * groups,
        tables=[tables] * groups,
        decode=(),
        prefill=[prefill] * groups,
        kept=None,
    )


class ObservedLinear:
    """A `Linear` that keeps the mean square of its inputs."""

    def __init__(self, linear: Linear, names: Sequence[str], found: Importance) -> None:
        self._linear, self._names, self._found = linear, names, found
        self.num_bytes = linear.num_bytes

    def product(
        self,
        x: Activations,
        context: StepContext = DEFAULT_CONTEXT,
        *,
        out: torch.Tensor | None = None,
    ) -> torch.Tensor:
        self._measure(x)
        return self._linear.product(x, context, out=out)

    def gated_product(
        self,
        x: Activations,
        activation: Activation,
        context: StepContext = DEFAULT_CONTEXT,
        *,
        to: torch.dtype | None = None,
    ) -> Activations:
        self._measure(x)
        return self._linear.gated_product(x, activation, context, to=to)

    def quantised_dtype(self, rows: int) -> torch.dtype | None:
        return None

    def to_meta(self) -> Linear:
        return self._linear.to_meta()

    def _measure(self, x: Activations) -> None:
        assert isinstance(x, torch.Tensor)
        self._found.update(dict.fromkeys(self._names, mean_square(x)))
