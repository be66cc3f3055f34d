"""The tensor names of a `ModelSpec`'s weights in a file, and each weight's place in its tensor."""

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
    """The place of a weight: rows of a tensor, all of them unless the tensor holds several weights.

    For a tensor of all experts, [experts, …], the place refers to the part of one expert.
    """

    tensor: str
    first_row: int = 0
    rows_of_others: int = 0
    weights: tuple[str, ...] = ()  # all weights in the tensor
    # Indices of the weight's rows in the tensor, if they are not consecutive. Computed when needed,
    # because a config may claim any number of rows.
    order: Callable[[], Order] | None = None
    transposed: bool = False  # the tensor is (in, out): its columns are our rows
    dims: int = 2  # of the weight
    expert: int = 0
    num_experts: int = 0  # in the tensor; 0 unless it holds all experts

    def part_shape(self, stored: tuple[int, ...]) -> tuple[int, ...]:
        """Return the shape of the expert's part of a tensor of shape `stored`. If the tensor is not
        of all experts, return its own shape, with surplus leading dimensions joined to rows."""
        if self.num_experts:
            return stored[1:]
        extra = len(stored) - self.dims
        return stored if extra <= 0 else (math.prod(stored[: extra + 1]), *stored[extra + 1 :])

    def part_bytes(self, data: Bytes) -> Bytes:
        """Return the bytes of the expert's part of a tensor, or all bytes."""
        if not self.num_experts:
            return data
        size = data.size // self.num_experts
        return data[self.expert * size : (self.expert + 1) * size]

    def rows_in(self, stored: Any, rows: slice) -> Any:
        """Return some of the weight's rows from all rows of the tensor."""
        if self.order is not None:
            return stored[self.order()[rows]]
        num_rows = len(stored) - self.rows_of_others
        return stored[self.first_row : self.first_row + num_rows][rows]

    def shape_in(self, stored: tuple[int, ...]) -> tuple[int, ...]:
        """Return the weight's shape in a tensor of shape `stored`; fewer rows if the tensor has
        fewer."""
        if self.num_experts and (len(stored) != self.dims + 1 or stored[0] != self.num_experts):
            return stored
        stored = self.part_shape(stored)
        stored = stored[::-1] if self.transposed else stored
        if not self.rows_of_others or not stored:
            return stored
        return (max(0, stored[0] - self.rows_of_others), *stored[1:])


@dataclass(frozen=True, slots=True)
class TensorNames:
    """Canonical name → tensor name in a file.

    Weights of a layer with the same tensor name lie in that tensor one after another, in the order
    of the table: `{"q": "qkv", "k": "qkv", "v": "qkv"}`. An expert's tensor name has {e} for its
    number; without {e} one tensor holds all experts one after another.
    """

    model: Mapping[str, str]
    layer: Mapping[str, str]  # after `layer_prefix`
    layer_prefix: str  # with {n} for the layer's number
    norm_offset: float = 0.0  # added to norm weights: 1 if the file has w for 1 + w
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
        """`layers.3.q` → `model.layers.3.self_attn.q_proj.weight`, or `blk.3.attn_q.weight`."""
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
        order = {part: number for number, part in enumerate(self.layer)}
        shapes = spec.weight_shapes()
        inside: dict[str, list[str]] = defaultdict(list)
        for name in shapes:
            inside[self.tensor(name)].append(name)
        places = {}
        for tensor, names in inside.items():
            weights, by_expert = tuple(names), defaultdict(list)
            for name in names:
                by_expert[_split_expert(name)[1]].append(name)
            for expert, own in by_expert.items():
                if len(own) > 1:
                    own.sort(key=lambda name: order[_split_expert(name)[0]])
                ends = list(accumulate(shapes[name][0] for name in own))
                for number, (name, end) in enumerate(zip(own, ends, strict=True)):
                    rows, dims = shapes[name][0], len(shapes[name])
                    row_order = self._order(name, spec, end - rows)
                    if self.gate_up_interleaved and len(own) > 1 and ".experts." in name:
                        row_order = partial(np.arange, number, ends[-1], len(own))
                    transposed = dims == 2 and _split_expert(name)[0] in self.transposed
                    places[name] = Place(
                        tensor,
                        first_row=end - rows,
                        rows_of_others=ends[-1] - rows,
                        weights=weights,
                        order=row_order,
                        transposed=transposed,
                        dims=dims,
                        expert=expert,
                        num_experts=self._experts_in_one(name, spec),
                    )
        return places

    def _experts_in_one(self, canonical: str, spec: ModelSpec) -> int:
        """Return the number of experts in a weight's tensor; 0 if it does not hold all of them."""
        stem = _split_expert(canonical)[0]
        if not stem.startswith("experts.") or "{e}" in self.layer[stem]:
            return 0
        mlp = spec.layers[int(canonical.split(".")[1])].mlp
        return mlp.num_experts if isinstance(mlp, ExpertsSpec) else 0

    def offset(self, canonical: str) -> float:
        return self.norm_offset if canonical.endswith("norm") else 0.0

    def _order(self, canonical: str, spec: ModelSpec, first_row: int) -> Callable[[], Order] | None:
        """Return the order of a weight's rows in its tensor; None if they are consecutive."""
        part = canonical.rpartition(".")[2].removesuffix("_bias")
        interleaved = self.rope_interleaved and part in ("q", "k", "q_b", "kv_a")
        grouped = self.grouped_qkv and part in ("q", "k", "v")
        if not interleaved and not grouped:
            return None
        attention = spec.layers[int(canonical.split(".")[1])].attention
        heads = (attention.num_kv_heads, attention.group_size, attention.head_dim)
        if grouped:
            return partial(rows_in_groups, part, *heads)
        if attention.latent is not None:
            shape = attention.num_heads, attention.head_dim
            if part == "kv_a":
                shape = attention.cached_shape[:2]
            skipped = shape[1] - attention.rope.dim
            return partial(halves_from_interleaved, *shape, attention.rope.dim, first_row, skipped)
        count = attention.num_heads if part == "q" else attention.num_kv_heads
        return partial(
            halves_from_interleaved, count, attention.head_dim, attention.rope.dim, first_row
        )

    def but(
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
    """`layers.3.experts.7.gate` → `experts.gate`, 7. Other weights have the number 0."""
    part = canonical.split(".", 2)[-1]
    found = re.match(r"experts\.(\d+)\.", part)
    return (part, 0) if found is None else (f"experts.{part[found.end() :]}", int(found[1]))


def halves_from_interleaved(
    num_heads: int, head_dim: int, rope_dim: int, first_row: int = 0, skipped: int = 0
) -> Order:
    """Return the row order that moves rope pairs from (2i, 2i + 1) to (i, i + rope_dim/2).

    `skipped`: channels of a head before the rotated ones.
    """
    rows = first_row + np.arange(num_heads * head_dim).reshape(num_heads, head_dim)
    before, rotated, rest = np.split(rows, [skipped, skipped + rope_dim], axis=1)
    halves = [before, rotated[:, 0::2], rotated[:, 1::2], rest]
    return np.concatenate(halves, axis=1).reshape(-1)


def rows_in_groups(part: str, num_kv_heads: int, group_size: int, head_dim: int) -> Order:
    """Return the rows of q, k or v in a tensor that has, for each KV head, its queries, its key and
    its value."""
    rows = np.arange(num_kv_heads * (group_size + 2) * head_dim)
    first = {"q": 0, "k": group_size, "v": group_size + 1}[part]
    end = group_size if part == "q" else first + 1
    return rows.reshape(num_kv_heads, group_size + 2, head_dim)[:, first:end].reshape(-1)
