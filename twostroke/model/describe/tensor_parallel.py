"""Tensor parallelism: what each of several ranks holds of a model, and how they put it together.

    q, k, v, gate, up   rows split: a rank has whole heads, and channels of the MLP
    o, down             columns split: the ranks' products add up                    all_reduce
    experts             each as an MLP, on every rank: one sum, the shared one in it all_reduce
    embed               rows split: zeros for the tokens of other ranks' rows        all_reduce
    head                rows split: the first rank puts the logits side by side      gather

A rank runs the model of `rank_spec`, which has fewer heads and a narrower MLP. How a weight is
split follows from its two shapes, in the model and in the rank's: along the axis in which they
differ (`part_of`), or not at all. So a new weight is split where its shape counts heads or channels
of the MLP, and is on every rank where it does not. Key and value heads that are fewer than the
ranks are on several of them.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, NamedTuple

from twostroke.errors import ConfigError
from twostroke.model.describe.spec import ExpertsSpec, LayerSpec, MLPSpec, ModelSpec

if TYPE_CHECKING:
    import torch

Part = tuple[slice, ...]  # of each axis of a weight
WHOLE: Part = ()


class Comm(NamedTuple):
    """What went to collectives, on this rank."""

    seconds: float = 0.0
    # Twice what is summed, once what is gathered or broadcast: a rank sends (n - 1) / n of that,
    # the mean over n ranks in a ring.
    ring_bytes: int = 0

    def plus(self, other: Comm) -> Comm:
        return Comm(self.seconds + other.seconds, self.ring_bytes + other.ring_bytes)

    def sent_bytes(self, ranks: int) -> float:
        """By each of so many, the mean over them."""
        return self.ring_bytes * (ranks - 1) / ranks

    def since(self, before: Comm) -> Comm:
        return Comm(self.seconds - before.seconds, self.ring_bytes - before.ring_bytes)


class Ranks:
    """Which rank this is, of how many, and what it does with the others. This class does nothing
    with them: it is for one rank alone, and for tensors without memory."""

    per_device = 1  # ranks on this one's GPU

    def __init__(self, rank: int = 0, size: int = 1) -> None:
        self.rank, self.size = rank, size
        self.alone = size == 1  # whether there is nothing to put together
        self.comm = Comm()  # so far
        # Set while a graph is recorded: ends it, has this done at every replay, begins another.
        self.cut: Callable[[Callable[[], None]], None] | None = None

    def all_reduce(self, x: torch.Tensor) -> torch.Tensor:
        """The sum over the ranks, in place."""
        return x

    def gather(self, x: torch.Tensor) -> Sequence[torch.Tensor]:
        """What each rank has, in order; on other ranks than the first, nothing of use."""
        return [x] * self.size

    def broadcast(self, x: torch.Tensor) -> None:
        """What the first rank has, in place."""

    def all_numbers(self, numbers: Sequence[int]) -> list[list[int]]:
        """The numbers of each rank, in order."""
        return [list(numbers)] * self.size


ONE_RANK = Ranks()


def rank_spec(spec: ModelSpec, size: int) -> ModelSpec:
    """The model that each of `size` ranks runs."""
    if size == 1:
        return spec
    return replace(spec, layers=tuple(_rank_layer(layer, size) for layer in spec.layers))


def _rank_layer(layer: LayerSpec, size: int) -> LayerSpec:
    attention, mlp = layer.attention, layer.mlp
    return replace(
        layer,
        attention=replace(
            attention,
            num_heads=attention.num_heads // size,
            num_kv_heads=max(1, attention.num_kv_heads // size),
        ),
        mlp=_rank_mlp(mlp, size),
    )


def _rank_mlp(mlp: MLPSpec | ExpertsSpec, size: int) -> MLPSpec | ExpertsSpec:
    if isinstance(mlp, ExpertsSpec):
        shared = None if mlp.shared is None else _rank_dense(mlp.shared, size)
        return replace(mlp, expert=_rank_dense(mlp.expert, size), shared=shared)
    return _rank_dense(mlp, size)


def _rank_dense(mlp: MLPSpec, size: int) -> MLPSpec:
    return replace(mlp, intermediate_size=mlp.intermediate_size // size)


def check_ranks(spec: ModelSpec, size: int) -> None:
    """Refuse a number of ranks that the model cannot be shared out to."""
    problem = _unequal(spec, size)
    if problem:
        most = min(layer.attention.num_heads for layer in spec.layers)
        fit = [str(n) for n in range(2, most + 1) if not _unequal(spec, n)]
        instead = f"use {' or '.join(fit)}, or leave it out" if fit else "leave it out"
        raise ConfigError(
            f"tensor_parallel_size is {size}, but the model has {problem}, which {size} ranks "
            f"cannot share equally; {instead}"
        )


def _unequal(spec: ModelSpec, size: int) -> str:
    """What cannot be shared out, with its number; "" if all can."""
    for layer in dict.fromkeys(spec.layers):
        heads, kv_heads = layer.attention.num_heads, layer.attention.num_kv_heads
        if heads % size:
            return f"{heads} attention heads"
        if kv_heads % size and size % kv_heads:
            return f"{kv_heads} key and value heads"
        for mlp in _dense(layer.mlp):
            if mlp.intermediate_size % size:
                return f"an intermediate_size of {mlp.intermediate_size}"
    return ""


def _dense(mlp: MLPSpec | ExpertsSpec) -> list[MLPSpec]:
    if isinstance(mlp, MLPSpec):
        return [mlp]
    return [mlp.expert] if mlp.shared is None else [mlp.expert, mlp.shared]


def part_of(whole: tuple[int, ...], own: tuple[int, ...], ranks: Ranks) -> Part:
    """Which part of a weight of shape `whole` is this rank's, of shape `own`."""
    if whole == own:
        return WHOLE
    parts = []
    for full, size in zip(whole, own, strict=True):
        number = ranks.rank * (full // size) // ranks.size  # of a part that may be on several ranks
        parts.append(slice(number * size, (number + 1) * size))
    return tuple(parts)


def is_summed(whole: tuple[int, ...], own: tuple[int, ...]) -> bool:
    """Whether the products with a matrix (…, out, in) are parts of a sum."""
    return whole[-1] != own[-1] and len(whole) > 1


def vocab_rows(vocab_size: int, ranks: Ranks) -> slice:
    """The rows of embedding and head that are this rank's. Each has places for as many as the
    first; the last may have fewer."""
    places = -(-vocab_size // ranks.size)
    first = min(vocab_size, ranks.rank * places)
    return slice(first, min(vocab_size, first + places))


def rank_parameters(spec: ModelSpec, size: int) -> int:
    """Numbers that a rank holds at most."""
    shapes = rank_spec(spec, size).weight_shapes()
    vocab = -(-spec.vocab_size // size)
    for name in ("embed", "head"):
        if name in shapes:
            shapes[name] = (vocab, spec.hidden_size)
    return sum(math.prod(shape) for shape in shapes.values())
