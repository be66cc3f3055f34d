"""What a kind of file calls the weights of a `ModelSpec`, and where in its tensors they lie."""

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
    """A weight is rows of a tensor: all of them, but for tensors that hold several weights.

    Of a tensor that all experts share, [experts, …], the expert's own part is looked at alone.
    """

    tensor: str
    first_row: int = 0
    rows_of_others: int = 0
    weights: tuple[str, ...] = ()  # all that the tensor holds
    # Of the tensor's rows, where ours are not those from the first on. Made when it is needed: a
    # config may promise any number of rows.
    order: Callable[[], Order] | None = None
    transposed: bool = False  # the tensor is (in, out): its columns are our rows
    dims: int = 2  # of the weight
    expert: int = 0
    num_experts: int = 0  # that share the tensor

    def part(self, stored: tuple[int, ...]) -> tuple[int, ...]:
        """The shape of the expert's part of a tensor, or of all of it, as rows of its weights."""
        if self.num_experts:
            return stored[1:]
        extra = len(stored) - self.dims
        return stored if extra <= 0 else (math.prod(stored[: extra + 1]), *stored[extra + 1 :])

    def part_of(self, data: Bytes) -> Bytes:
        """The bytes of that part."""
        if not self.num_experts:
            return data
        size = data.size // self.num_experts
        return data[self.expert * size : (self.expert + 1) * size]

    def rows_in(self, stored: Any, rows: slice) -> Any:
        """Some of the weight's rows, of all those of its tensor."""
        if self.order is not None:
            return stored[self.order()[rows]]
        return stored[self.first_row : len(stored) - self.rows_of_others + self.first_row][rows]

    def shape_in(self, stored: tuple[int, ...]) -> tuple[int, ...]:
        """The weight's shape in a tensor of that shape; not the expected one if rows lack."""
        if self.num_experts and (len(stored) != self.dims + 1 or stored[0] != self.num_experts):
            return stored
        stored = self.part(stored)
        stored = stored[::-1] if self.transposed else stored
        if not self.rows_of_others or not stored:
            return stored
        return (max(0, stored[0] - self.rows_of_others), *stored[1:])


@dataclass(frozen=True, slots=True)
class TensorNames:
    """Canonical name → the file's. Weights of a layer under one name lie in that tensor one after
    another, in the order of the table: `{"q": "qkv", "k": "qkv", "v": "qkv"}`. An expert's name has
    {e} for its number; without it all experts lie in one tensor, one after another."""

    model: Mapping[str, str]
    layer: Mapping[str, str]  # after `layer_prefix`
    layer_prefix: str  # with {n} for the layer's number
    norm_offset: float = 0.0  # the file has norm weights without it: 1 where it has w for 1 + w
    # The rows of q and k (of what makes them, with latents) are such that the channels rope turns
    # together are neighbours.
    rope_neighbours: bool = False
    # q, k and v are in one tensor, in which each KV head has its queries, its key and its value.
    grouped_qkv: bool = False
    interleaved: bool = False  # gate and up of an expert are in one tensor, a row of each in turn
    transposed: Collection[str] = ()  # which matrices of a layer are (in, out)
    # Names that take the place of the others in files which have one of them.
    otherwise: Mapping[str, str] = field(default_factory=dict)

    def tensor(self, canonical: str) -> str:
        """`layers.3.q` → `model.layers.3.self_attn.q_proj.weight`, or `blk.3.attn_q.weight`."""
        if canonical in self.model:
            return self.model[canonical]
        stem, expert = _split_expert(canonical)
        number = canonical.split(".")[1]
        return self.layer_prefix.format(n=number) + self.layer[stem].format(e=expert)

    def as_stored(self, tensors: Iterable[str]) -> TensorNames:
        """With the other names, if these are the tensors of a file that has them."""
        endings = tuple(name.format(e=0) for name in self.otherwise.values())
        if not endings or not any(tensor.endswith(endings) for tensor in tensors):
            return self
        return replace(self, layer={**self.layer, **self.otherwise}, otherwise={})

    def places(self, spec: ModelSpec) -> dict[str, Place]:
        """Where each weight of the model is."""
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
                    moved = self._order(name, spec, end - rows)
                    if self.interleaved and len(own) > 1 and ".experts." in name:
                        moved = partial(np.arange, number, ends[-1], len(own))
                    turned = dims == 2 and _split_expert(name)[0] in self.transposed
                    places[name] = Place(
                        tensor,
                        end - rows,
                        ends[-1] - rows,
                        weights,
                        moved,
                        turned,
                        dims,
                        expert,
                        self._experts_in_one(name, spec),
                    )
        return places

    def _experts_in_one(self, canonical: str, spec: ModelSpec) -> int:
        """How many experts share the tensor of a weight; 0 if it is no expert's, or one's alone."""
        stem = _split_expert(canonical)[0]
        if not stem.startswith("experts.") or "{e}" in self.layer[stem]:
            return 0
        mlp = spec.layers[int(canonical.split(".")[1])].mlp
        return mlp.num_experts if isinstance(mlp, ExpertsSpec) else 0

    def offset(self, canonical: str) -> float:
        return self.norm_offset if canonical.endswith("norm") else 0.0

    def _order(self, canonical: str, spec: ModelSpec, first_row: int) -> Callable[[], Order] | None:
        part = canonical.rpartition(".")[2].removesuffix("_bias")
        turned = self.rope_neighbours and part in ("q", "k", "q_b", "kv_a")
        grouped = self.grouped_qkv and part in ("q", "k", "v")
        if not turned and not grouped:
            return None
        attention = spec.layers[int(canonical.split(".")[1])].attention
        heads = (attention.num_kv_heads, attention.group_size, attention.head_dim)
        if grouped:
            return partial(part_of_groups, part, *heads)
        if attention.latent is not None:
            shape = attention.num_heads, attention.head_dim
            if part == "kv_a":
                shape = attention.cached[:2]
            skipped = shape[1] - attention.rope.dim
            return partial(halves_from_neighbours, *shape, attention.rope.dim, first_row, skipped)
        count = attention.num_heads if part == "q" else attention.num_kv_heads
        return partial(
            halves_from_neighbours, count, attention.head_dim, attention.rope.dim, first_row
        )

    def but(
        self,
        layer: Mapping[str, str] = MappingProxyType({}),
        /,
        norm_offset: float = 0.0,
        rope_neighbours: bool = False,
        **more: str,
    ) -> TensorNames:
        """These names with some of a layer's changed."""
        return replace(
            self,
            layer={**self.layer, **layer, **more},
            norm_offset=norm_offset,
            rope_neighbours=rope_neighbours,
        )


class Variant(NamedTuple):
    """The model that its description would be of, had one field of two values the other one."""

    field: str
    spec: ModelSpec
    names: TensorNames


Variants = Callable[[], Iterable[Variant]]  # called for a message alone


def _split_expert(canonical: str) -> tuple[str, int]:
    """`layers.3.experts.7.gate` → `experts.gate`, 7. Of what is no expert's, the number is 0."""
    part = canonical.split(".", 2)[-1]
    found = re.match(r"experts\.(\d+)\.", part)
    return (part, 0) if found is None else (f"experts.{part[found.end() :]}", int(found[1]))


def halves_from_neighbours(
    num_heads: int, head_dim: int, rope_dim: int, first_row: int = 0, skipped: int = 0
) -> Order:
    """Row order that takes rope's pairs from (2i, 2i + 1) to (i, i + rope_dim/2) in each head.
    `skipped`: channels of a head before those that rope turns."""
    rows = first_row + np.arange(num_heads * head_dim).reshape(num_heads, head_dim)
    before, rotated, rest = np.split(rows, [skipped, skipped + rope_dim], axis=1)
    halves = [before, rotated[:, 0::2], rotated[:, 1::2], rest]
    return np.concatenate(halves, axis=1).reshape(-1)


def part_of_groups(part: str, num_kv_heads: int, group_size: int, head_dim: int) -> Order:
    """The rows of q, k or v, where each KV head has its queries, its key and its value."""
    rows = np.arange(num_kv_heads * (group_size + 2) * head_dim)
    first = {"q": 0, "k": group_size, "v": group_size + 1}[part]
    end = group_size if part == "q" else first + 1
    return rows.reshape(num_kv_heads, group_size + 2, head_dim)[:, first:end].reshape(-1)
