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
    """The place of a weight in a file: some or all rows of a tensor.

    A tensor may hold the weights of all experts, [experts, …]. Then the rows are counted within the
    part of this weight's expert.
    """

    tensor: str
    first_row: int = 0
    other_rows: int = 0  # the number of the tensor's rows that belong to other weights
    weights: tuple[str, ...] = ()  # all weights in the tensor
    # Returns the indices of the weight's rows in the tensor; None if the rows are consecutive. The
    # indices are computed when a weight is read, not when a config is: the number of rows in a
    # config may be wrong, and larger than memory.
    order: Callable[[], Order] | None = None
    transposed: bool = False  # the tensor is stored as (in, out), the weight is (out, in)
    dims: int = 2  # of the weight
    expert: int = 0
    num_experts: int = 0  # in the tensor; 0 unless it holds all experts

    def expert_shape(self, stored: tuple[int, ...]) -> tuple[int, ...]:
        """Return the shape of the part of a tensor that belongs to this weight's expert.

        `stored`: the tensor's shape. If the tensor does not hold all experts, the part is the
        tensor. Its leading dimensions are merged into one if it has more dimensions than the
        weight.
        """
        if self.num_experts:
            return stored[1:]
        extra = len(stored) - self.dims
        return stored if extra <= 0 else (math.prod(stored[: extra + 1]), *stored[extra + 1 :])

    def expert_bytes(self, data: Bytes) -> Bytes:
        """Return the bytes of the part of a tensor that belongs to this weight's expert; all bytes
        if the tensor does not hold all experts."""
        if not self.num_experts:
            return data
        size = data.size // self.num_experts
        return data[self.expert * size : (self.expert + 1) * size]

    def select_rows(self, stored: Any, rows: slice) -> Any:
        """Return `rows` of the weight. `stored`: all rows of the tensor or of the expert's part."""
        if self.order is not None:
            return stored[self.order()[rows]]
        num_rows = len(stored) - self.other_rows
        return stored[self.first_row : self.first_row + num_rows][rows]

    def weight_shape(self, stored: tuple[int, ...]) -> tuple[int, ...]:
        """Return the shape of the weight that a tensor of shape `stored` holds. The shape differs
        from the shape in the spec if the tensor is not the expected one."""
        if self.num_experts and (len(stored) != self.dims + 1 or stored[0] != self.num_experts):
            return stored
        stored = self.expert_shape(stored)
        stored = stored[::-1] if self.transposed else stored
        if not self.other_rows or not stored:
            return stored
        return (max(0, stored[0] - self.other_rows), *stored[1:])


@dataclass(frozen=True, slots=True)
class TensorNames:
    """Canonical name → tensor name in a file.

    If several weights of a layer have the same tensor name, the tensor holds their rows in the
    order of `layer`: `{"q": "qkv", "k": "qkv", "v": "qkv"}`. In an expert's tensor name, {e} is the
    number of the expert; a name without {e} is a tensor that holds all experts.
    """

    model: Mapping[str, str]
    layer: Mapping[str, str]  # after `layer_prefix`
    layer_prefix: str  # with {n} for the layer's number
    norm_offset: float = 0.0  # added to norm weights: 1 if the norm multiplies by 1 + w
    # The rows of q and k (or of the latent projections) are in the order of interleaved rope, which
    # pairs the channels 2i and 2i + 1.
    rope_interleaved: bool = False
    # One tensor holds q, k and v: for each KV head its queries, its key and its value.
    grouped_qkv: bool = False
    gate_up_interleaved: bool = False  # gate and up of an expert alternate row by row
    transposed: Collection[str] = ()  # matrices of a layer that are (in, out)
    # Names that replace those of `layer` if the file has a tensor with any of these names.
    alternatives: Mapping[str, str] = field(default_factory=dict)

    def tensor(self, canonical: str) -> str:
        """Return the tensor name of a weight: for `layers.3.q`
        `model.layers.3.self_attn.q_proj.weight`, or `blk.3.attn_q.weight`."""
        if canonical in self.model:
            return self.model[canonical]
        key, expert = _split_expert(canonical)
        number = canonical.split(".")[1]
        return self.layer_prefix.format(n=number) + self.layer[key].format(e=expert)

    def resolve(self, tensors: Iterable[str]) -> TensorNames:
        """Return the names for a file with these tensors: with `alternatives` in place if the file
        has one of the alternative names."""
        endings = tuple(name.format(e=0) for name in self.alternatives.values())
        if not endings or not any(tensor.endswith(endings) for tensor in tensors):
            return self
        return replace(self, layer={**self.layer, **self.alternatives}, alternatives={})

    def places(self, spec: ModelSpec) -> dict[str, Place]:
        """Return the place of each weight of the model."""
        position = {key: number for number, key in enumerate(self.layer)}
        shapes = spec.weight_shapes()
        by_tensor: dict[str, list[str]] = defaultdict(list)
        for name in shapes:
            by_tensor[self.tensor(name)].append(name)
        places = {}
        for tensor, names in by_tensor.items():
            by_expert: dict[int, list[str]] = defaultdict(list)
            for name in names:
                by_expert[_split_expert(name)[1]].append(name)
            for expert, fused in by_expert.items():
                # `fused` has the weights whose rows follow one another, in the order of the rows.
                if len(fused) > 1:
                    fused.sort(key=lambda name: position[_split_expert(name)[0]])
                ends = list(accumulate(shapes[name][0] for name in fused))
                for number, (name, end) in enumerate(zip(fused, ends, strict=True)):
                    num_rows, dims = shapes[name][0], len(shapes[name])
                    order = self._order(name, spec, end - num_rows)
                    if self.gate_up_interleaved and len(fused) > 1 and ".experts." in name:
                        order = partial(np.arange, number, ends[-1], len(fused))
                    transposed = dims == 2 and _split_expert(name)[0] in self.transposed
                    places[name] = Place(
                        tensor,
                        first_row=end - num_rows,
                        other_rows=ends[-1] - num_rows,
                        weights=tuple(names),
                        order=order,
                        transposed=transposed,
                        dims=dims,
                        expert=expert,
                        num_experts=self._experts_in_tensor(name, spec),
                    )
        return places

    def _experts_in_tensor(self, canonical: str, spec: ModelSpec) -> int:
        """Return the number of experts in a weight's tensor; 0 if it does not hold all of them."""
        key = _split_expert(canonical)[0]
        if not key.startswith("experts.") or "{e}" in self.layer[key]:
            return 0
        mlp = spec.layers[int(canonical.split(".")[1])].mlp
        return mlp.num_experts if isinstance(mlp, ExpertsSpec) else 0

    def offset(self, canonical: str) -> float:
        """Return the number to add to all elements of a weight."""
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

    def with_names(
        self,
        layer: Mapping[str, str] = MappingProxyType({}),
        /,
        norm_offset: float = 0.0,
        rope_interleaved: bool = False,
        **more: str,
    ) -> TensorNames:
        """Return a copy with other names for some weights of a layer.

        `norm_offset` and `rope_interleaved` are not copied: they have their defaults unless they
        are given.
        """
        return replace(
            self,
            layer={**self.layer, **layer, **more},
            norm_offset=norm_offset,
            rope_interleaved=rope_interleaved,
        )


class SpecVariant(NamedTuple):
    """The model that a config would describe if one boolean field had the other value. Error
    messages name the fields whose variants would fit the weights."""

    field: str
    spec: ModelSpec
    names: TensorNames


# A function, because variants are needed only for error messages.
SpecVariants = Callable[[], Iterable[SpecVariant]]


def _split_expert(canonical: str) -> tuple[str, int]:
    """Return the key of a weight in `TensorNames.layer` and the number of its expert:
    `layers.3.experts.7.gate` → `experts.gate`, 7. The number is 0 for weights without an expert."""
    key = canonical.split(".", 2)[-1]
    found = re.match(r"experts\.(\d+)\.", key)
    return (key, 0) if found is None else (f"experts.{key[found.end() :]}", int(found[1]))


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
    """Return the rows of q, k or v in a tensor with the queries, key and value of each KV head."""
    rows = np.arange(num_kv_heads * (group_size + 2) * head_dim)
    first = {"q": 0, "k": group_size, "v": group_size + 1}[part]
    end = group_size if part == "q" else first + 1
    return rows.reshape(num_kv_heads, group_size + 2, head_dim)[:, first:end].reshape(-1)
