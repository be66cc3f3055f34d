"""`TensorNames` finds the tensor of each weight in a model file. `Place` locates the weight in this
tensor, which may hold several weights."""

from __future__ import annotations

import math
import re
from collections import defaultdict
from collections.abc import Callable, Collection, Iterable, Mapping
from dataclasses import dataclass, field, replace
from functools import partial
from itertools import accumulate
from types import MappingProxyType
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from twostroke.model.describe.spec import ExpertsSpec, ModelSpec

Order = npt.NDArray[np.intp]
Bytes = npt.NDArray[np.uint8]


class Place(NamedTuple):
    """The place of a weight: the tensor, and the weight's rows in the tensor.

    If the tensor has all experts, [experts, …], the rows are rows of one expert's part.
    """

    tensor: str
    first_row: int = 0
    num_other_rows: int = 0  # rows of other weights in the tensor
    weights: tuple[str, ...] = ()  # all weights in the tensor
    # Indices of the weight's rows in the tensor, if they are not consecutive. Computed when needed,
    # because a config may claim any number of rows.
    order: Callable[[], Order] | None = None
    transposed: bool = False  # the tensor is (in, out): its columns are the weight's rows
    dims: int = 2  # number of dimensions of the weight
    expert: int = 0
    num_experts: int = 0  # experts in the tensor; 0: the tensor has at most one expert

    def part_shape(self, stored: tuple[int, ...]) -> tuple[int, ...]:
        """Return the shape of the expert's part in a tensor of shape `stored`. For a tensor without
        several experts, return `stored`; if the tensor has more dimensions than the weight, its
        first dimensions are merged."""
        if self.num_experts:
            return stored[1:]
        extra = len(stored) - self.dims
        return stored if extra <= 0 else (math.prod(stored[: extra + 1]), *stored[extra + 1 :])

    def part_bytes(self, data: Bytes) -> Bytes:
        """Return the bytes of the expert's part of a tensor. For a tensor without several experts,
        return all bytes."""
        if not self.num_experts:
            return data
        size = data.size // self.num_experts
        return data[self.expert * size : (self.expert + 1) * size]

    def rows_in(self, stored: Any, rows: slice) -> Any:
        """Return some of the weight's rows from all rows of the tensor."""
        if self.order is not None:
            return stored[self.order()[rows]]
        num_rows = len(stored) - self.num_other_rows
        return stored[self.first_row : self.first_row + num_rows][rows]

    def shape_in(self, stored: tuple[int, ...]) -> tuple[int, ...]:
        """Return the shape that the weight has in a tensor of shape `stored`. It differs from the
        expected shape of the weight if the tensor is too small, so the caller must compare them."""
        if self.num_experts and (len(stored) != self.dims + 1 or stored[0] != self.num_experts):
            return stored
        stored = self.part_shape(stored)
        stored = stored[::-1] if self.transposed else stored
        if not self.num_other_rows or not stored:
            return stored
        return (max(0, stored[0] - self.num_other_rows), *stored[1:])


@dataclass(frozen=True, slots=True)
class TensorNames:
    """The names of a model's tensors in a file, by canonical weight name.

    If several weights of a layer have the same tensor name, the tensor has their rows one after
    another, in the order of the table: `{"q": "qkv", "k": "qkv", "v": "qkv"}`. In the tensor name
    of an expert's weight, {e} stands for the number of the expert. A name without {e} means that
    one tensor has all experts.
    """

    model: Mapping[str, str]
    layer: Mapping[str, str]  # names without the prefix of the layer
    layer_prefix: str  # with {n} for the layer's number
    norm_offset: float = 0.0  # added to norm weights; 1 if the model multiplies by 1 + weight
    # The rows of q and k (or of the latent projections) are in the order of interleaved rope, which
    # pairs the channels 2i and 2i + 1.
    rope_interleaved: bool = False
    # One tensor holds q, k and v: for each KV head its queries, its key and its value.
    grouped_qkv: bool = False
    gate_up_interleaved: bool = False  # gate and up of an expert alternate row by row
    transposed: Collection[str] = ()  # matrices of a layer that are (in, out)
    # Alternative names, used if the file has one of them.
    alternatives: Mapping[str, str] = field(default_factory=dict)

    def tensor(self, canonical: str) -> str:
        """Return the tensor name of a weight, such as `model.layers.3.self_attn.q_proj.weight` or
        `blk.3.attn_q.weight` for `layers.3.q`."""
        if canonical in self.model:
            return self.model[canonical]
        stem, expert = _split_expert(canonical)
        number = canonical.split(".")[1]
        return self.layer_prefix.format(n=number) + self.layer[stem].format(e=expert)

    def as_stored(self, tensors: Iterable[str]) -> TensorNames:
        """Return these names, with the alternative names if `tensors` has one of them."""
        endings = tuple(name.format(e=0) for name in self.alternatives.values())
        if not endings or not any(tensor.endswith(endings) for tensor in tensors):
            return self
        return replace(self, layer={**self.layer, **self.alternatives}, alternatives={})

    def places(self, spec: ModelSpec) -> dict[str, Place]:
        """Return the place of each weight of the model."""
        table_index = {stem: index for index, stem in enumerate(self.layer)}
        shapes = spec.weight_shapes()
        weights_of: dict[str, list[str]] = defaultdict(list)  # by tensor name
        for name in shapes:
            weights_of[self.tensor(name)].append(name)
        places = {}
        for tensor, names in weights_of.items():
            weights, by_expert = tuple(names), defaultdict(list)
            for name in names:
                by_expert[_split_expert(name)[1]].append(name)
            for expert, together in by_expert.items():
                if len(together) > 1:
                    together.sort(key=lambda name: table_index[_split_expert(name)[0]])
                ends = list(accumulate(shapes[name][0] for name in together))
                for index, (name, end) in enumerate(zip(together, ends, strict=True)):
                    rows, dims = shapes[name][0], len(shapes[name])
                    row_order = self._order(name, spec, end - rows)
                    if self.gate_up_interleaved and len(together) > 1 and ".experts." in name:
                        row_order = partial(np.arange, index, ends[-1], len(together))
                    transposed = dims == 2 and _split_expert(name)[0] in self.transposed
                    places[name] = Place(
                        tensor,
                        first_row=end - rows,
                        num_other_rows=ends[-1] - rows,
                        weights=weights,
                        order=row_order,
                        transposed=transposed,
                        dims=dims,
                        expert=expert,
                        num_experts=self._experts_in_one(name, spec),
                    )
        return places

    def _experts_in_one(self, canonical: str, spec: ModelSpec) -> int:
        """Return the number of experts in a weight's tensor; 0: the tensor has at most one."""
        stem = _split_expert(canonical)[0]
        if not stem.startswith("experts.") or "{e}" in self.layer[stem]:
            return 0
        mlp = spec.layers[int(canonical.split(".")[1])].mlp
        return mlp.num_experts if isinstance(mlp, ExpertsSpec) else 0

    def offset(self, canonical: str) -> float:
        return self.norm_offset if canonical.endswith("norm") else 0.0

    def _order(self, canonical: str, spec: ModelSpec, first_row: int) -> Callable[[], Order] | None:
        """Return the order of a weight's rows in its tensor; None if they are consecutive."""
        weight = canonical.rpartition(".")[2].removesuffix("_bias")
        interleaved = self.rope_interleaved and weight in ("q", "k", "q_b", "kv_a")
        grouped = self.grouped_qkv and weight in ("q", "k", "v")
        if not interleaved and not grouped:
            return None
        attention = spec.layers[int(canonical.split(".")[1])].attention
        heads = (attention.num_kv_heads, attention.group_size, attention.head_dim)
        if grouped:
            return partial(rows_in_groups, weight, *heads)
        if attention.latent is not None:
            shape = attention.num_heads, attention.head_dim
            if weight == "kv_a":
                shape = attention.cached_shape[:2]
            skipped = shape[1] - attention.rope.dim
            return partial(halves_from_interleaved, *shape, attention.rope.dim, first_row, skipped)
        count = attention.num_heads if weight == "q" else attention.num_kv_heads
        return partial(
            halves_from_interleaved, count, attention.head_dim, attention.rope.dim, first_row
        )

    def derive(
        self,
        layer: Mapping[str, str] = MappingProxyType({}),
        /,
        norm_offset: float = 0.0,
        rope_interleaved: bool = False,
        **more: str,
    ) -> TensorNames:
        """Return these names with some names of a layer replaced. `norm_offset` and
        `rope_interleaved` are not inherited."""
        return replace(
            self,
            layer={**self.layer, **layer, **more},
            norm_offset=norm_offset,
            rope_interleaved=rope_interleaved,
        )


class AlternativeSpec(NamedTuple):
    """The model that a config would describe if one of its boolean fields had the other value."""

    field: str
    spec: ModelSpec
    names: TensorNames


AlternativeSpecs = Callable[[], Iterable[AlternativeSpec]]  # called only for error messages


def _split_expert(canonical: str) -> tuple[str, int]:
    """Return a weight's name in the tables and the number of its expert: `experts.gate` and 7 for
    `layers.3.experts.7.gate`. The number is 0 for a weight that belongs to no expert."""
    name = canonical.split(".", 2)[-1]
    match = re.match(r"experts\.(\d+)\.", name)
    return (name, 0) if match is None else (f"experts.{name[match.end() :]}", int(match[1]))


def halves_from_interleaved(
    num_heads: int, head_dim: int, rope_dim: int, first_row: int = 0, skipped: int = 0
) -> Order:
    """Return the row order that converts interleaved rope to rope by halves: channels 2i and 2i + 1
    of a head become channels i and i + rope_dim/2.

    `skipped`: number of channels of a head before the rotated channels.
    """
    rows = first_row + np.arange(num_heads * head_dim).reshape(num_heads, head_dim)
    before, rotated, rest = np.split(rows, [skipped, skipped + rope_dim], axis=1)
    halves = [before, rotated[:, 0::2], rotated[:, 1::2], rest]
    return np.concatenate(halves, axis=1).reshape(-1)


def rows_in_groups(weight: str, num_kv_heads: int, group_size: int, head_dim: int) -> Order:
    """Return the rows of a weight (q, k or v) in a tensor of grouped q, k and v: for each KV head
    the rows of its query heads, then of its key, then of its value."""
    rows = np.arange(num_kv_heads * (group_size + 2) * head_dim)
    first = {"q": 0, "k": group_size, "v": group_size + 1}[weight]
    end = group_size if weight == "q" else first + 1
    return rows.reshape(num_kv_heads, group_size + 2, head_dim)[:, first:end].reshape(-1)
