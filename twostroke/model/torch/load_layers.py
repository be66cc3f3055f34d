"""`LayerLoader`: reads this rank's part of a model's weights into the layers of the decoder."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, fields, replace
from functools import lru_cache, partial
from typing import Any, NamedTuple

import numpy as np
import torch

from twostroke.kernels.records import AttentionRule, ExpertWeights, Rope, RoutingRule
from twostroke.kernels.reference import Kernels
from twostroke.model.describe.rope import query_scales, rope_tables
from twostroke.model.describe.spec import (
    AttentionSpec,
    ExpertsSpec,
    LatentSpec,
    LayerSpec,
    MLPSpec,
    ModelSpec,
    RopeSpec,
    input_projections,
)
from twostroke.model.describe.tensor_parallel import (
    Part,
    Ranks,
    is_summed,
    part_of,
    rank_spec,
    vocab_rows,
)
from twostroke.model.formats.key_scales import Floats, key_scales, query_scales_of_heads
from twostroke.model.formats.linear import (
    DenseLinear,
    Embedding,
    GatheredLinear,
    Linear,
    SplitEmbedding,
    SummedLinear,
)
from twostroke.model.formats.phase_formats import PhaseFormats
from twostroke.model.formats.quantized_linears import QuantizedLinears
from twostroke.model.formats.weight_formats import Format
from twostroke.model.torch.attention import Attention, HeadsAttention
from twostroke.model.torch.latent import LatentAttention
from twostroke.model.torch.meta import fields_to_meta, to_meta
from twostroke.model.torch.mlp import MLP, DenseMLP, ExpertsMLP
from twostroke.model.weights import WeightSource
from twostroke.model.weights.tensors import read_tensor

# Takes the names of a linear layer's matrices and the layer, and returns the layer to run instead.
Observe = Callable[[Sequence[str], Linear], Linear]


class Norm(NamedTuple):
    weight: torch.Tensor
    bias: torch.Tensor | None

    def to_meta(self) -> Norm:
        return Norm(to_meta(self.weight), to_meta(self.bias))


@dataclass(slots=True)
class Layer:
    spec: LayerSpec
    kind: int  # layers of one kind differ only in their weights and their cache
    attn_norm: Norm | None
    attn_post_norm: Norm | None
    attention: Attention
    o: Linear
    mlp_norm: Norm | None
    mlp_post_norm: Norm | None
    mlp: MLP

    def to_meta(self) -> Layer:
        return fields_to_meta(self)


@dataclass(frozen=True, slots=True)
class LoadOptions:
    """The formats and dtypes of loaded weights."""

    # Formats of weights that are not stored in the model's dtype, from `weight_formats`
    formats: Mapping[str, Format] = field(default_factory=dict)
    decode_formats: Mapping[str, Format] | None = None  # of decode-only steps, if they differ
    weight_dtype: torch.dtype | None = None  # weights are rounded to this type first
    # Importance of the inputs of matrices that are rounded at load
    importance: Mapping[str, torch.Tensor] = field(default_factory=dict)
    # Replaces each linear layer. With it, a layer is read only when a step needs it.
    observe: Observe | None = None
    scale_keys: bool = False  # scale channels of keys and queries, for a KV cache in int8


class ModelRuntime(NamedTuple):
    """The device, dtype and kernels that a model runs with."""

    dtype: torch.dtype
    device: torch.device
    max_len: int
    kernels: Kernels
    ranks: Ranks


def _rms_norm(ranks: Ranks, x: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
    """Norm over the heads of all ranks; each rank has the same number of heads."""
    x_fp32 = x.float()
    mean = ranks.all_reduce(x_fp32.pow(2).mean(-1, keepdim=True)) / ranks.size
    return (weight * (x_fp32 * torch.rsqrt(mean + eps)).to(weight.dtype)).to(x.dtype)


class LazyLayers(Sequence[Layer]):
    """Layers that are read on access; the last two stay in memory."""

    def __init__(self, read: Callable[[int], Layer], count: int) -> None:
        self._read, self._count = lru_cache(maxsize=2)(read), count

    def __len__(self) -> int:
        return self._count

    def __getitem__(self, index: Any) -> Any:
        return self._read(range(self._count)[index])


class LayerLoader:
    """Reads this rank's part of all weights. Matrices of one matmul are read into one tensor."""

    def __init__(
        self,
        spec: ModelSpec,
        source: WeightSource,
        options: LoadOptions,
        formats: PhaseFormats,
        runtime: ModelRuntime,
    ) -> None:
        dtype, device, max_len, kernels, ranks = runtime
        self._whole_spec, self._scale_keys = spec, options.scale_keys
        self._shapes = spec.weight_shapes()
        self._spec = spec = rank_spec(spec, ranks.size)
        self._own_shapes = spec.weight_shapes()
        # The shapes that show which matrices are split. A process group of one rank splits none,
        # but still runs the collectives, so its shapes are those of two ranks.
        nominal = self._own_shapes if ranks.size > 1 or ranks.alone else None
        self._split_shapes = nominal or rank_spec(spec, 2).weight_shapes()
        self._ranks, self._source, self._kernels = ranks, source, kernels
        self._dtype, self._device = dtype, device
        self._weight_dtype = options.weight_dtype or dtype
        own = self._own_shapes
        shared = (kernels, device, self._part, self._read, options.importance)
        self._formats, self._observe = formats, options.observe
        self._quantized = QuantizedLinears(formats.prefill, source, own, *shared)
        self._decode_quantized = QuantizedLinears(formats.decode, source, own, *shared)
        # id of a linear layer of prefill → the linear layer of decode, if they differ
        self._decode_linears: dict[int, Linear] = {}
        groups = enumerate(spec.kv_groups())
        self._group_of = {index: n for n, group in groups for index in group.layers}
        self._kinds = list(dict.fromkeys(spec.layers))  # equal specs are in the same KV group
        self._ropes = {rope: self._rope(rope, max_len) for rope in spec.ropes()}  # without norms

    def _rope(self, rope: RopeSpec, max_len: int) -> Rope:
        cos, sin = (torch.from_numpy(side).to(self._device) for side in rope_tables(rope, max_len))
        scales = query_scales(rope, max_len)
        return Rope(cos, sin, None if scales is None else torch.from_numpy(scales).to(self._device))

    def layer(self, index: int) -> Layer:
        spec, prefix = self._spec.layers[index], f"layers.{index}."
        names = spec.weight_shapes(self._spec.hidden_size)
        norm = partial(self._if_present, self.norm, prefix, names)
        return Layer(
            spec=spec,
            kind=self._kinds.index(spec),
            attn_norm=norm("attn_norm"),
            attn_post_norm=norm("attn_post_norm"),
            attention=self._attention(spec.attention, index, prefix, names),
            o=self._linear([prefix + "o"], spec.attention.output_bias),
            mlp_norm=norm("mlp_norm"),
            mlp_post_norm=norm("mlp_post_norm"),
            mlp=self._mlp(spec.mlp, prefix)
            if isinstance(spec.mlp, MLPSpec)
            else self._experts(spec.mlp, prefix, names),
        )

    def in_decode(self, layer: Layer) -> Layer:
        """Return the layer with the matrices of decode steps; all other weights are shared."""
        return self._in_decode(layer) if self._decode_linears else layer

    def _in_decode(self, part: Any) -> Any:
        if isinstance(part, Layer | HeadsAttention | LatentAttention | DenseMLP | ExpertsMLP):
            names = [field.name for field in fields(part)]
            return replace(part, **{name: self._in_decode(getattr(part, name)) for name in names})
        return self._decode_linears.get(id(part), part)

    def _mlp(self, spec: MLPSpec, prefix: str, add_up: bool = True) -> DenseMLP:
        """Read an MLP. `add_up`: sum its output over the ranks."""
        gate_up = self._linear([prefix + name for name in spec.gate_up], spec.bias)
        down = self._linear([prefix + "down"], spec.bias, add_up)
        return DenseMLP(spec, gate_up, down, self._kernels)

    def _experts(self, spec: ExpertsSpec, prefix: str, names: dict[str, Any]) -> ExpertsMLP:
        read_fp32 = partial(self._if_present, self._fp32, prefix, names)
        biased, gate_up = spec.expert.bias, spec.expert.gate_up
        first = self._ranks.rank == 0  # only the first rank adds the bias to the sum of the ranks
        gate_up_biases = [f"{name}_bias" for name in gate_up]
        stacked = ExpertWeights(
            self._stacked(spec, prefix, gate_up),
            self._stacked(spec, prefix, gate_up_biases) if biased else None,
            self._stacked(spec, prefix, ["down"]),
            self._stacked(spec, prefix, ["down_bias"]) if biased and first else None,
            spec.expert.activation,
            spec.expert.gated,
        )
        return ExpertsMLP(
            rule=RoutingRule(**spec.routing.rule()),
            router=self._router(prefix),
            router_bias=read_fp32("router_bias"),
            correction=read_fp32("router_correction"),
            stacked=stacked,
            shared=None
            if spec.shared is None
            else self._mlp(spec.shared, f"{prefix}shared.", False),
            shared_gate=read_fp32("shared_gate"),
            kernels=self._kernels,
            ranks=self._ranks,
        )

    def _stacked(self, spec: ExpertsSpec, prefix: str, names: Sequence[str]) -> torch.Tensor:
        """Read these weights of all experts into one tensor. The weights of an expert are in memory
        a second time only while they are copied."""
        each = [f"{prefix}experts.{{}}.{name}" for name in names]
        shapes = [self._own_shapes[name.format(0)] for name in each]
        rows, rest = [shape[0] for shape in shapes], shapes[0][1:]
        whole = torch.empty(
            spec.num_experts, sum(rows), *rest, dtype=self._dtype, device=self._device
        )
        for expert in range(spec.num_experts):
            for name, place in zip(each, torch.split(whole[expert], rows), strict=True):
                place.copy_(self._read(name.format(expert)))
        return whole

    def _attention(
        self, spec: AttentionSpec, index: int, prefix: str, names: dict[str, Any]
    ) -> Attention:
        group, rope, latent = self._group_of[index], self._ropes[spec.rope], spec.latent
        factors = self._head_factors(index) if self._scale_keys else {}
        rows = None
        if factors and spec.qk_norm == "none":
            rows = torch.cat([factors["q"], factors["k"], torch.ones_like(factors["k"])])
        qkv = self._linear(
            [prefix + name for name in input_projections(spec)], spec.qkv_bias, rows=rows
        )
        weight = partial(self._if_present, self._norm_weight, prefix, names)
        sinks = self._if_present(self._fp32, prefix, names, "sinks")
        rule = AttentionRule(**spec.rule(), sinks=sinks)
        if latent is not None:
            norm = self._norm_weight(prefix + "kv_a_norm")
            return LatentAttention(
                spec=spec,
                latent=latent,
                group=group,
                rule=rule,
                rope=replace(rope, k_norm=norm, norm_eps=latent.norm_eps),
                q_and_kv_a=qkv,
                q_a_norm=weight("q_a_norm"),
                q_b=self._linear([prefix + "q_b"], biased=False) if latent.q_lora_rank else None,
                kv_b=self._expanding(latent, spec.num_heads, prefix),
                kernels=self._kernels,
            )
        q_norm, k_norm = weight("q_norm"), weight("k_norm")
        if factors and q_norm is not None and k_norm is not None:
            q_norm.mul_(factors["q"][: len(q_norm)])
            k_norm.mul_(factors["k"][: len(k_norm)])
        rope, norms = replace(rope, norm_eps=self._spec.norm_eps), (q_norm, k_norm)
        if spec.qk_norm == "head":
            rope, norms = replace(rope, q_norm=q_norm, k_norm=k_norm), (None, None)
        alone = self._ranks.alone
        return HeadsAttention(
            spec=spec,
            group=group,
            rule=rule,
            rope=rope,
            qkv=qkv,
            q_norm=norms[0],
            k_norm=norms[1],
            norm_all_heads=self._kernels.rms_norm if alone else partial(_rms_norm, self._ranks),
            kernels=self._kernels,
        )

    def _head_factors(self, index: int) -> dict[str, torch.Tensor]:
        """Return the factors of this rank's queries and keys of a layer, [heads · channels] each.
        (A norm over each head has one weight for all heads: it gets the first head's factors.)"""
        spec, prefix = self._whole_spec.layers[index].attention, f"layers.{index}."
        scales = key_scales(self._whole_spec, self._source, index)
        queries: Floats = query_scales_of_heads(scales, spec)
        whole = {"q": queries, "k": np.reciprocal(scales)}
        own = {
            name: each.reshape(-1)[self._part(prefix + name)[:1]] for name, each in whole.items()
        }
        return {name: torch.from_numpy(each).to(self._device) for name, each in own.items()}

    def _expanding(self, latent: LatentSpec, heads: int, prefix: str) -> torch.Tensor:
        """Read kv_b, by head."""
        if not latent.split:
            return torch.unflatten(self.tensor(prefix + "kv_b"), 0, (heads, -1))
        keys, values = (
            torch.unflatten(self.tensor(prefix + name), 0, (heads, -1)) for name in ("k_b", "v_b")
        )
        return torch.cat([keys.transpose(1, 2), values], dim=1)

    def embedding(self) -> Embedding:
        ranks = self._ranks
        if ranks.alone:
            return Embedding(self.tensor("embed"))
        first = vocab_rows(self._spec.vocab_size, ranks).start
        return SplitEmbedding(self._vocab_part("embed"), first, ranks)

    def head(self, embedding: Embedding) -> Linear:
        ranks, tied = self._ranks, self._spec.tie_embeddings
        if ranks.alone:
            weight = embedding.weight if tied else self.tensor("head")
            bias = self.tensor("head_bias") if self._spec.head_bias else None
            return DenseLinear(weight, bias, self._kernels)
        weight = embedding.weight if tied else self._vocab_part("head")
        bias = self._vocab_part("head_bias") if self._spec.head_bias else None
        part = DenseLinear(weight, bias, self._kernels)
        return GatheredLinear(part, self._spec.vocab_size, ranks)

    def _vocab_part(self, name: str) -> torch.Tensor:
        """Read this rank's rows of a matrix with a row for each token id. Every rank has the same
        number of rows; rows after the end of the vocabulary are zeros."""
        vocab, *width = self._shapes[name]
        rows = vocab_rows(vocab, self._ranks)
        places = -(-vocab // self._ranks.size)
        part = torch.zeros(places, *width, dtype=self._dtype, device=self._device)
        if rows.stop > rows.start:
            read = read_tensor(self._source, name, self._weight_dtype, (rows,))
            part[: rows.stop - rows.start].copy_(read)
        return part

    def tensor(self, name: str, dtype: torch.dtype | None = None) -> torch.Tensor:
        return self._read(name, dtype).to(self._device, dtype or self._dtype)

    def norm(self, name: str) -> Norm:
        bias = self._norm_weight(f"{name}_bias") if self._spec.norm_bias else None
        return Norm(self._norm_weight(name), bias)

    def _router(self, prefix: str) -> torch.Tensor:
        """Read a router. Rounding could change the choice of experts, so the router is in the
        model's dtype only if that changes none of its values."""
        exact = self._fp32(prefix + "router")
        narrow = exact.to(self._dtype)
        return narrow if torch.equal(narrow.float(), exact) else exact

    def _norm_weight(self, name: str) -> torch.Tensor:
        return self._fp32(name) if self._spec.norm_fp32 else self.tensor(name)

    def _fp32(self, name: str) -> torch.Tensor:
        return self.tensor(name, torch.float32)

    def _read(self, name: str, dtype: torch.dtype | None = None) -> torch.Tensor:
        return read_tensor(self._source, name, dtype or self._weight_dtype, self._part(name))

    def _part(self, name: str) -> Part:
        return part_of(self._shapes[name], self._own_shapes[name], self._ranks)

    def _if_present(
        self, read: Callable[[str], Any], prefix: str, names: dict[str, Any], name: str
    ) -> Any:
        return read(prefix + name) if name in names else None

    def _linear(
        self,
        names: list[str],
        biased: bool,
        add_up: bool = True,
        rows: torch.Tensor | None = None,
    ) -> Linear:
        """Read a linear layer of matrices one below another. `rows`: a factor for each output."""
        summed = is_summed(self._shapes[names[0]], self._split_shapes[names[0]])
        if summed and self._ranks.rank:
            biased = False  # the first rank adds the bias
        bias = self._merged([name + "_bias" for name in names]) if biased else None
        if bias is not None and rows is not None:
            bias.mul_(rows)
        linear = self._product(self._quantized, names, bias, summed and add_up, rows)
        if any(map(self._formats.differ, names)):
            own = self._product(self._decode_quantized, names, bias, summed and add_up, rows)
            self._decode_linears[id(linear)] = own
        return linear

    def _product(
        self,
        quantized: QuantizedLinears,
        names: list[str],
        bias: torch.Tensor | None,
        add_up: bool,
        rows: torch.Tensor | None,
    ) -> Linear:
        made = quantized.product(names, bias)
        if made is None:
            made = DenseLinear(self._merged(names), bias, self._kernels)
        if rows is not None:
            made.scale_rows(rows)
        linear: Linear = made if self._observe is None else self._observe(names, made)
        return SummedLinear(linear, self._ranks) if add_up else linear

    def _merged(self, names: list[str]) -> torch.Tensor:
        """Read several weights into one tensor. Only one of them is in memory twice at a time."""
        if len(names) == 1:
            return self.tensor(names[0])
        shapes = [self._own_shapes[name] for name in names]
        rows = sum(shape[0] for shape in shapes)
        whole = torch.empty(rows, *shapes[0][1:], dtype=self._dtype, device=self._device)
        places = torch.split(whole, [shape[0] for shape in shapes])
        for name, place in zip(names, places, strict=True):
            place.copy_(self._read(name))
        return whole
