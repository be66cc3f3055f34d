"""Tensor parallelism: the shard of a model on each rank, and the collectives between ranks.

    q, k, v, gate, up   rows split: a rank has whole heads, and channels of the MLP
    o, down             columns split: the ranks' outputs are summed                 all_reduce
    experts             each split like an MLP; one sum with the shared expert       all_reduce
    embed               rows split: zeros for the tokens of other ranks' rows        all_reduce
    head                rows split: the first rank concatenates the logits           gather

A rank runs the model of `rank_spec`, which has fewer heads and a narrower MLP. The split of a
weight follows from its shapes in the model and in the rank: along the axis in which they differ
(`part_of`), or none. So a new weight is split if its shape depends on heads or on channels of the
MLP, and replicated otherwise. If there are fewer key and value heads than ranks, heads are
replicated.
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

Part = tuple[slice, ...]  # a slice for each axis of a weight
WHOLE: Part = ()


class Comm(NamedTuple):
    """Time and bytes of this rank's collectives."""

    seconds: float = 0.0
    # Twice the bytes of sums, once the bytes of gathers and broadcasts. In a ring of n ranks, each
    # sends (n - 1) / n of this on average.
    ring_bytes: int = 0

    def plus(self, other: Comm) -> Comm:
        return Comm(self.seconds + other.seconds, self.ring_bytes + other.ring_bytes)

    def sent_bytes(self, ranks: int) -> float:
        """Return the bytes that each rank sends, the mean over `ranks` ranks."""
        return self.ring_bytes * (ranks - 1) / ranks

    def since(self, before: Comm) -> Comm:
        return Comm(self.seconds - before.seconds, self.ring_bytes - before.ring_bytes)


class Ranks:
    """This rank's number, the number of ranks, and the collectives.

    The collectives of this base class do nothing: it is for one rank, and for tensors without
    memory.
    """

    ranks_per_device = 1  # number of ranks on the GPU of this rank

    def __init__(self, rank: int = 0, size: int = 1) -> None:
        self.rank, self.size = rank, size
        self.alone = size == 1  # no collectives are needed
        self.comm = Comm()  # so far
        # Set while a graph is recorded: ends the graph, runs its argument at every replay, and
        # begins the next graph.
        self.cut: Callable[[Callable[[], None]], None] | None = None

    def all_reduce(self, x: torch.Tensor) -> torch.Tensor:
        """Sum over the ranks, in place."""
        return x

    def gather(self, x: torch.Tensor) -> Sequence[torch.Tensor]:
        """Return each rank's tensor in order, on the first rank; undefined values on the others."""
        return [x] * self.size

    def broadcast(self, x: torch.Tensor) -> None:
        """Copy the first rank's tensor to all ranks, in place."""

    def all_gather_numbers(self, numbers: Sequence[int]) -> list[list[int]]:
        """Return the numbers that each rank passes, in the order of the ranks."""
        return [list(numbers)] * self.size


ONE_RANK = Ranks()


def rank_spec(spec: ModelSpec, size: int) -> ModelSpec:
    """Return the model that each of `size` ranks runs."""
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
    """Refuse a number of ranks that does not divide the model."""
    problem = _unequal(spec, size)
    if problem:
        max_size = min(layer.attention.num_heads for layer in spec.layers)
        fit = [str(n) for n in range(2, max_size + 1) if not _unequal(spec, n)]
        instead = f"use {' or '.join(fit)}, or leave it out" if fit else "leave it out"
        raise ConfigError(
            f"tensor_parallel_size is {size}, but the model has {problem}, which {size} ranks "
            f"cannot share equally; {instead}"
        )


def _unequal(spec: ModelSpec, size: int) -> str:
    """Describe a number of the model that `size` does not divide; "" if it divides all."""
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
    """Return this rank's part, of shape `own`, of a weight of shape `whole`."""
    if whole == own:
        return WHOLE
    parts = []
    for full, size in zip(whole, own, strict=True):
        number = ranks.rank * (full // size) // ranks.size  # several ranks may have the same part
        parts.append(slice(number * size, (number + 1) * size))
    return tuple(parts)


def is_summed(whole: tuple[int, ...], own: tuple[int, ...]) -> bool:
    """Return whether the ranks' outputs of a matrix (…, out, in) must be summed."""
    return whole[-1] != own[-1] and len(whole) > 1


def vocab_rows(vocab_size: int, ranks: Ranks) -> slice:
    """Return this rank's rows of embedding and head. The last rank may have fewer."""
    places = -(-vocab_size // ranks.size)
    first = min(vocab_size, ranks.rank * places)
    return slice(first, min(vocab_size, first + places))


def rank_parameters(spec: ModelSpec, size: int) -> int:
    """Return the largest number of parameters of a rank."""
    shapes = rank_spec(spec, size).weight_shapes()
    vocab = -(-spec.vocab_size // size)
    for name in ("embed", "head"):
        if name in shapes:
            shapes[name] = (vocab, spec.hidden_size)
    return sum(math.prod(shape) for shape in shapes.values())
