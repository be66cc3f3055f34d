"""The one forward of torch's backends: it runs any `ModelSpec` on any set of kernels.

    embed ─▶ [ norm · qkv · rope · store · ATTEND · o · norm? · + · norm · mlp · norm? · + ] × n
          ─▶ norm ─▶ head

The linear layers see one flat run of tokens, decode rows first and then the chunks; attention sees
the two lists. `pieces` stops wherever attention is due, so that what lies between can be recorded
as a CUDA graph; `forward` runs the same pieces with attention in between. A step that only decodes
has one launch for rope, store and attention. What lies between a layer's norm and its output
projection is its `Attention` (`attention.py`, `latent.py`). Steps that only decode have layers of
their own where the phases keep weights in different formats (`phase_formats.py`).

Of a chunk only the last token is sampled, if that: after its keys and values the last layer works
for the tokens that somebody wants, and not for the others. The residual stays in one tensor that
every block adds to. Nothing here looks at a value on the device or copies one to it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from copy import copy
from dataclasses import dataclass, fields, replace
from functools import lru_cache, partial
from typing import Any, NamedTuple

import numpy as np
import torch

from twostroke.kernels.reference import Kernels
from twostroke.kv.pool import KVPool
from twostroke.model.describe.rope import query_scales, rope_tables
from twostroke.model.describe.spec import (
    AttentionSpec,
    ExpertsSpec,
    LatentSpec,
    LayerSpec,
    MLPSpec,
    ModelSpec,
    RopeSpec,
    projections,
)
from twostroke.model.describe.tensor_parallel import (
    ONE_RANK,
    Part,
    Ranks,
    is_summed,
    part_of,
    rank_spec,
    vocab_rows,
)
from twostroke.model.formats.key_scales import Floats, key_scales, query_scales_of_heads
from twostroke.model.formats.linear import (
    Activations,
    DenseLinear,
    Embedding,
    GatheredLinear,
    Linear,
    SplitEmbedding,
    SummedLinear,
    num_rows,
)
from twostroke.model.formats.phase_formats import PhaseFormats
from twostroke.model.formats.quantized_linears import FormattedMatrices
from twostroke.model.formats.registry import Format
from twostroke.model.torch.attention import KV, Attention, HeadsAttention, Rope, Workspace
from twostroke.model.torch.latent import LatentAttention
from twostroke.model.torch.mlp import MLP, DenseMLP, ExpertsMLP
from twostroke.model.torch.step_inputs import DecodeInputs, KeptTokens, StepInputs
from twostroke.model.weights import WeightSource
from twostroke.model.weights.tensors import read_tensor

FEW_TOKENS = 64  # where the time between two launches shows


class Norm(NamedTuple):
    weight: torch.Tensor
    bias: torch.Tensor | None


@dataclass(slots=True)
class Layer:
    spec: LayerSpec
    kind: int  # layers of one kind differ in their weights and their cache alone
    attn_norm: Norm | None
    attn_post_norm: Norm | None
    attention: Attention
    o: Linear
    mlp_norm: Norm | None
    mlp_post_norm: Norm | None
    mlp: MLP


# The names of a product's matrices, and the product.
Observe = Callable[[Sequence[str], Linear], Linear]


class Decoder:
    def __init__(
        self,
        spec: ModelSpec,
        source: WeightSource,
        dtype: torch.dtype,
        device: torch.device,
        max_len: int,
        kernels: Kernels,
        pdl: bool = False,
        weight_dtype: torch.dtype | None = None,
        ranks: Ranks = ONE_RANK,
        formats: Mapping[str, Format] | None = None,
        decode_formats: Mapping[str, Format] | None = None,
        importance: Mapping[str, torch.Tensor] | None = None,
        observe: Observe | None = None,
        scale_keys: bool = False,
    ) -> None:
        """`pdl`: the launches of a small step are set up before the one in front has ended.
        `weight_dtype`: what weights are rounded to before they are held in `dtype`. `ranks`: those
        that share the model of `spec`; `self.spec` is of this one's part. `formats`: those
        of weights that are not kept in `dtype`, as `weight_formats` gives them;
        `decode_formats`: those of steps that only decode, where they are others. `importance`: of
        the inputs of matrices that are rounded here. `observe`: takes the place of each product; a
        layer is then read when a step comes to it. `scale_keys`: channels of keys and queries are
        scaled for a KV cache in int8 (`key_scales.py`)."""
        formats = formats or {}
        self.formats = PhaseFormats(formats, formats if decode_formats is None else decode_formats)
        self.spec, self.ranks = rank_spec(spec, ranks.size), ranks
        self.dtype, self.device, self.kernels = dtype, device, kernels
        self.pdl = pdl
        self._embed_scale = float(torch.tensor(spec.embed_scale, dtype=dtype))
        how = (dtype, device, max_len, kernels, weight_dtype or dtype, ranks, self.formats)
        load = _Loader(spec, source, *how, importance or {}, observe, scale_keys)
        self._layers: Sequence[Layer]
        # Unpacking keeps one core busy at a time, and leaves Python free while it does.
        with ThreadPoolExecutor() as pool:
            embed = pool.submit(load.embedding)
            if observe is None:
                self._layers = list(pool.map(load.layer, range(spec.num_layers)))
                self._decode_layers = [load.in_decode(layer) for layer in self._layers]
            else:
                self._layers = _LayersInTurn(load.layer, spec.num_layers)
            self._embed = embed.result()
        self._positions = load.tensor("positions") if spec.learned_positions else None
        self._final_norm = load.norm("final_norm")
        self._head = load.head(self._embed)

    def to_meta(self) -> Decoder:
        """One layer of each kind and the last, of tensors that have no memory: what it launches is
        the same."""
        other = copy(self)
        kinds = {layer.kind: index for index, layer in enumerate(self._layers)}
        kept = [*kinds.values(), len(self._layers) - 1]
        other.device = torch.device("meta")
        other.spec = replace(self.spec, layers=tuple(self.spec.layers[index] for index in kept))
        other._layers = [_to_meta(self._layers[index]) for index in kept]
        other._decode_layers = [_to_meta(self._decode_layers[index]) for index in kept]
        for name in ("_embed", "_positions", "_final_norm", "_head"):
            setattr(other, name, _to_meta(getattr(self, name)))
        return other

    @property
    def phases_differ(self) -> bool:
        return any(map(self.formats.differ, self.spec.weight_shapes()))

    # ── a step ──────────────────────────────────────────────────────────────────────────────

    def forward(self, inputs: StepInputs, pool: KVPool) -> torch.Tensor:
        """The last hidden states that are wanted, normed: [S, hidden]; of all tokens if the inputs
        name none."""
        decode = inputs.decode
        if decode is not None and decode.queries == 1 and inputs.only_decodes:
            return self._decode(inputs, decode, pool)
        work = Workspace(self.spec, len(inputs.positions), self.dtype, self.device)
        attend = self.attention(inputs, pool, work)
        for index in self.pieces(inputs, pool, work):
            if index + 1 < len(self._layers):
                attend(index)
        return self.last_layer(inputs, pool, work, attend)

    def pieces(self, inputs: StepInputs, pool: KVPool, work: Workspace) -> Iterator[int]:
        """Runs up to the attention of each layer in turn and yields that layer's number: queries
        are in the workspace, keys and values in the cache. It goes on with what attention has left
        in the workspace; after the last number `last_layer` is to be called."""
        layers = self._layers_of(inputs)
        self._embed.rows(inputs.token_ids, work.residual)
        normed: Activations = self._first_norm(work.residual, inputs)
        for index, layer in enumerate(layers):
            self._project(layer, normed, inputs, pool.layers[index], work)
            yield index
            if index + 1 < len(self._layers):
                attended = work.attended(layer.spec.attention)
                normed = self._finish(layers, index, attended, work.residual)

    def attention(self, inputs: StepInputs, pool: KVPool, work: Workspace) -> Callable[[int], None]:
        """`attend(layer number)` of one step: launches are bound at the first layer of a kind."""
        bound: dict[int, Callable[[Attention, KV], None]] = {}

        def attend(index: int) -> None:
            layer, cache = self._layers[index], pool.layers[index]
            if layer.kind not in bound:
                bound[layer.kind] = layer.attention.bind(inputs, cache, work)
            self._attend(bound[layer.kind], layer, cache)

        return attend

    def last_layer(
        self, inputs: StepInputs, pool: KVPool, work: Workspace, attend: Callable[[int], None]
    ) -> torch.Tensor:
        """The last layer from its attention on, for the tokens that are wanted."""
        layers, kept, index = self._layers_of(inputs), inputs.kept, len(self._layers) - 1
        attention = layers[-1].attention
        if kept is None:
            attend(index)
            attended = work.attended(attention.part)
            return _hidden(self._finish(layers, index, attended, work.residual))
        residual = work.residual.index_select(0, kept.tokens)
        if not len(residual):
            return residual
        attended = self._attend_kept(attention, inputs, kept, pool.layers[-1], work)
        return _hidden(self._finish(layers, index, attended, residual))

    def head(self, hidden: torch.Tensor, out: torch.Tensor | None = None) -> torch.Tensor:
        """Logits in the model's dtype, [rows, vocab]."""
        logits = self._head.product(hidden, out=out)
        if self.spec.logit_scale != 1.0:
            logits.mul_(self.spec.logit_scale)
        cap = self.spec.logit_softcap
        return logits.div_(cap).tanh_().mul_(cap) if cap else logits

    # ── parts of a layer ────────────────────────────────────────────────────────────────────

    def _layers_of(self, inputs: StepInputs) -> Sequence[Layer]:
        return self._decode_layers if inputs.only_decodes else self._layers

    def _decode(self, inputs: StepInputs, decode: DecodeInputs, pool: KVPool) -> torch.Tensor:
        residual = self._embed.rows(inputs.token_ids)
        normed: Activations = self._first_norm(residual, inputs)
        pdl, layers = self._pdl(decode.num_tokens), self._decode_layers
        for index, (layer, cache) in enumerate(zip(layers, pool.layers, strict=True)):
            attended = self._decode_attention(layer, normed, inputs, decode, cache, pdl)
            normed = self._finish(layers, index, attended, residual)
        return _hidden(normed)

    # Methods of their own for what a profile tells apart (`exec/torch_profile.py`).

    def _project(
        self, layer: Layer, normed: Activations, inputs: StepInputs, cache: KV, work: Workspace
    ) -> None:
        layer.attention.project(normed, inputs, cache, work, self._pdl(num_rows(normed)))

    def _attend(self, run: Callable[[Attention, KV], None], layer: Layer, cache: KV) -> None:
        run(layer.attention, cache)

    def _attend_kept(
        self,
        attention: Attention,
        inputs: StepInputs,
        kept: KeptTokens,
        cache: KV,
        work: Workspace,
    ) -> torch.Tensor:
        return attention.attend_kept(inputs, kept, cache, work)

    def _decode_attention(
        self,
        layer: Layer,
        normed: Activations,
        inputs: StepInputs,
        decode: DecodeInputs,
        cache: KV,
        pdl: bool,
    ) -> torch.Tensor:
        return layer.attention.decode(normed, inputs, decode, cache, pdl)

    def _first_norm(self, residual: torch.Tensor, inputs: StepInputs) -> torch.Tensor:
        """What the first layer reads of the embedding, which is scaled and placed in place."""
        norm = self._layers[0].attn_norm
        if self._embed_scale != 1.0:
            residual *= self._embed_scale
        if self._positions is not None:
            residual += self._positions.index_select(0, inputs.positions)
        return residual if norm is None else self._norm(residual, norm, self._pdl(len(residual)))

    def _norm(self, x: torch.Tensor, norm: Norm, pdl: bool) -> torch.Tensor:
        eps = self.spec.norm_eps
        if self.spec.norm == "layer":
            return self.kernels.layer_norm(x, *norm, eps)
        return self.kernels.rms_norm(x, norm.weight, eps, pdl=pdl)

    def _finish(
        self,
        layers: Sequence[Layer],
        index: int,
        attended: torch.Tensor,
        residual: torch.Tensor,
    ) -> Activations:
        """The rest of a layer, and the norm that the next begins with."""
        layer, rows = layers[index], len(residual)
        if index + 1 < len(layers):
            following = layers[index + 1]
            next_norm, to = following.attn_norm, following.attention.a8_type(rows)
        else:
            next_norm, to = self._final_norm, None
        normed: Activations
        if layer.spec.parallel:
            # As attention did, from the residual that nothing was added to as yet.
            norm, pdl = layer.mlp_norm or layer.attn_norm, self._pdl(len(residual))
            normed = residual.clone() if norm is None else self._norm(residual, norm, pdl)
            self._attention_output(layer, attended, residual, None, None)
        else:
            for_mlp = layer.mlp.a8_type(rows)
            normed = self._attention_output(layer, attended, residual, layer.mlp_norm, for_mlp)
        return self._mlp(layer, normed, residual, next_norm, to)

    def _attention_output(
        self,
        layer: Layer,
        attended: torch.Tensor,
        residual: torch.Tensor,
        next_norm: Norm | None,
        to: torch.dtype | None,
    ) -> Activations:
        pdl = self._pdl(len(residual))
        out = layer.o.product(attended.flatten(1), pdl=pdl)
        return self._add(out, layer.attn_post_norm, residual, next_norm, to, pdl)

    def _mlp(
        self,
        layer: Layer,
        normed: Activations,
        residual: torch.Tensor,
        next_norm: Norm | None,
        to: torch.dtype | None,
    ) -> Activations:
        pdl = self._pdl(len(residual))
        out = layer.mlp(normed, pdl=pdl)
        return self._add(out, layer.mlp_post_norm, residual, next_norm, to, pdl)

    def _add(
        self,
        out: torch.Tensor,
        post_norm: Norm | None,
        residual: torch.Tensor,
        next_norm: Norm | None,
        to: torch.dtype | None,
        pdl: bool,
    ) -> Activations:
        """Add what attention or MLP returned to the residual: what comes next reads this. `to`:
        what that would quantise it to."""
        if post_norm is not None:
            out = self._norm(out, post_norm, pdl)
        if self.spec.residual_scale != 1.0:
            out *= self.spec.residual_scale
        if next_norm is None:
            return residual.add_(out)
        if self.spec.norm == "layer":
            return self._norm(residual.add_(out), next_norm, pdl)
        eps = self.spec.norm_eps
        return self.kernels.add_rms_norm(out, residual, next_norm.weight, eps, pdl=pdl, to=to)

    def _pdl(self, tokens: int) -> bool:
        return self.pdl and tokens <= FEW_TOKENS


def _hidden(normed: Activations) -> torch.Tensor:
    """What the last norm gave, which nobody quantises."""
    assert isinstance(normed, torch.Tensor)
    return normed


def _to_meta(part: Any) -> Any:
    """A tensor, a format or a layer, without memory."""
    if isinstance(part, torch.Tensor):
        return part.to("meta")
    if isinstance(part, Rope | Norm):
        return type(part)(*map(_to_meta, part))
    if isinstance(part, Layer | HeadsAttention | LatentAttention):
        values = {field.name: _to_meta(getattr(part, field.name)) for field in fields(part)}
        return replace(part, **values)
    return part.to_meta() if hasattr(part, "to_meta") else part


def _rms_norm(ranks: Ranks, x: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
    """Over the heads of all ranks, of which each has as many."""
    wide = x.float()
    mean = ranks.all_reduce(wide.pow(2).mean(-1, keepdim=True)) / ranks.size
    return (weight * (wide * torch.rsqrt(mean + eps)).to(weight.dtype)).to(x.dtype)


class _LayersInTurn(Sequence[Layer]):
    """Layers that are read when they are asked for; the last two are kept."""

    def __init__(self, read: Callable[[int], Layer], count: int) -> None:
        self._read, self._count = lru_cache(maxsize=2)(read), count

    def __len__(self) -> int:
        return self._count

    def __getitem__(self, index: Any) -> Any:
        return self._read(range(self._count)[index])


class _Loader:
    """Reads weights into place, of each this rank's part, matrices that are used together side by
    side."""

    def __init__(
        self,
        spec: ModelSpec,
        source: WeightSource,
        dtype: torch.dtype,
        device: torch.device,
        max_len: int,
        kernels: Kernels,
        weight_dtype: torch.dtype,
        ranks: Ranks,
        formats: PhaseFormats,
        importance: Mapping[str, torch.Tensor],
        observe: Observe | None,
        scale_keys: bool,
    ) -> None:
        self._whole_spec, self._scale_keys = spec, scale_keys
        self._shapes = spec.weight_shapes()
        self._spec = spec = rank_spec(spec, ranks.size)
        self._own_shapes = spec.weight_shapes()
        # A group of one rank has nothing to split, but all that splitting needs.
        nominal = self._own_shapes if ranks.size > 1 or ranks.alone else None
        self._split_shapes = nominal or rank_spec(spec, 2).weight_shapes()
        self._ranks, self._source, self._kernels = ranks, source, kernels
        self._dtype, self._device, self._weight_dtype = dtype, device, weight_dtype
        own = self._own_shapes
        here = (kernels, device, self._part, self._read, importance)
        self._formats, self._observe = formats, observe
        self._formatted = FormattedMatrices(formats.prefill, source, own, *here)
        self._decode_formatted = FormattedMatrices(formats.decode, source, own, *here)
        self._decode_linears: dict[int, Linear] = {}  # by the id of prefill's, where they differ
        groups = enumerate(spec.kv_groups())
        self._group_of = {index: n for n, group in groups for index in group.layers}
        self._kinds = list(dict.fromkeys(spec.layers))  # KV groups follow from the spec
        self._ropes = {rope: self._rope(rope, max_len) for rope in spec.ropes()}

    def _rope(self, rope: RopeSpec, max_len: int) -> Rope:
        cos, sin = (torch.from_numpy(side).to(self._device) for side in rope_tables(rope, max_len))
        scales = query_scales(rope, max_len)
        return Rope(cos, sin, None if scales is None else torch.from_numpy(scales).to(self._device))

    def layer(self, index: int) -> Layer:
        spec, at = self._spec.layers[index], f"layers.{index}."
        part, names = spec.attention, spec.weight_shapes(self._spec.hidden_size)
        norm = partial(self._if_any, self.norm, at, names)
        return Layer(
            spec=spec,
            kind=self._kinds.index(spec),
            attn_norm=norm("attn_norm"),
            attn_post_norm=norm("attn_post_norm"),
            attention=self._attention(part, index, at, names),
            o=self._linear([at + "o"], part.output_bias),
            mlp_norm=norm("mlp_norm"),
            mlp_post_norm=norm("mlp_post_norm"),
            mlp=self._mlp(spec.mlp, at)
            if isinstance(spec.mlp, MLPSpec)
            else self._experts(spec.mlp, at, names),
        )

    def in_decode(self, layer: Layer) -> Layer:
        """The same with the matrices that decode has of its own; all else is shared."""
        return self._in_decode(layer) if self._decode_linears else layer

    def _in_decode(self, part: Any) -> Any:
        if isinstance(part, Layer | HeadsAttention | LatentAttention | DenseMLP | ExpertsMLP):
            names = [field.name for field in fields(part)]
            return replace(part, **{name: self._in_decode(getattr(part, name)) for name in names})
        return self._decode_linears.get(id(part), part)

    def _mlp(self, spec: MLPSpec, at: str, add_up: bool = True) -> DenseMLP:
        """`add_up`: what comes of it is the sum over the ranks."""
        gate_up = self._linear([at + name for name in spec.gate_up], spec.bias)
        down = self._linear([at + "down"], spec.bias, add_up)
        return DenseMLP(spec, gate_up, down, self._kernels)

    def _experts(self, spec: ExpertsSpec, at: str, names: dict[str, Any]) -> ExpertsMLP:
        wide = partial(self._if_any, self._wide, at, names)
        biased, gate_up = spec.expert.bias, spec.expert.gate_up
        first = self._ranks.rank == 0  # the bias of what is added up is added once
        return ExpertsMLP(
            spec,
            spec.routing.rule(),
            self._router(at),
            wide("router_bias"),
            wide("router_correction"),
            self._stacked(spec, at, gate_up),
            self._stacked(spec, at, [f"{name}_bias" for name in gate_up]) if biased else None,
            self._stacked(spec, at, ["down"]),
            self._stacked(spec, at, ["down_bias"]) if biased and first else None,
            None if spec.shared is None else self._mlp(spec.shared, f"{at}shared.", add_up=False),
            wide("shared_gate"),
            self._kernels,
            self._ranks,
        )

    def _stacked(self, spec: ExpertsSpec, at: str, names: Sequence[str]) -> torch.Tensor:
        """These weights of all experts in one tensor; an expert's are in memory a second time only
        while they are put there."""
        each = [f"{at}experts.{{}}.{name}" for name in names]
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
        self, part: AttentionSpec, index: int, at: str, names: dict[str, Any]
    ) -> Attention:
        group, rope, latent = self._group_of[index], self._ropes[part.rope], part.latent
        factors = self._head_factors(index) if self._scale_keys else {}
        rows = None
        if factors and part.qk_norm == "none":
            rows = torch.cat([factors["q"], factors["k"], torch.ones_like(factors["k"])])
        product = self._linear([at + name for name in projections(part)], part.qkv_bias, rows=rows)
        weight = partial(self._if_any, self._norm_weight, at, names)
        if latent is not None:
            return LatentAttention(
                part,
                latent,
                group,
                rope,
                product,
                weight("q_a_norm"),
                self._linear([at + "q_b"], biased=False) if latent.q_lora_rank else None,
                self._norm_weight(at + "kv_a_norm"),
                self._expanding(latent, part.num_heads, at),
                self._kernels,
            )
        norm = self._kernels.rms_norm
        q_norm, k_norm = weight("q_norm"), weight("k_norm")
        if factors and q_norm is not None and k_norm is not None:
            q_norm.mul_(factors["q"][: len(q_norm)])
            k_norm.mul_(factors["k"][: len(k_norm)])
        return HeadsAttention(
            part,
            group,
            rope,
            product,
            q_norm,
            k_norm,
            self._if_any(self._wide, at, names, "sinks"),
            self._spec.norm_eps,
            norm if self._ranks.alone else partial(_rms_norm, self._ranks),
            self._kernels,
        )

    def _head_factors(self, index: int) -> dict[str, torch.Tensor]:
        """What this rank's queries and keys of a layer are multiplied by, [heads · channels] each.
        (A norm over each head has one weight for all heads: the first head's factors are its.)"""
        part, at = self._whole_spec.layers[index].attention, f"layers.{index}."
        scales = key_scales(self._whole_spec, self._source, index)
        queries: Floats = query_scales_of_heads(scales, part)
        whole = {"q": queries, "k": np.reciprocal(scales)}
        return {
            name: torch.from_numpy(values.reshape(-1)[self._part(at + name)[:1]]).to(self._device)
            for name, values in whole.items()
        }

    def _expanding(self, latent: LatentSpec, heads: int, at: str) -> torch.Tensor:
        """kv_b, by head."""
        if not latent.split:
            return torch.unflatten(self.tensor(at + "kv_b"), 0, (heads, -1))
        keys, values = (
            torch.unflatten(self.tensor(at + name), 0, (heads, -1)) for name in ("k_b", "v_b")
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
        """As many rows on every rank; those that the vocabulary does not have are zeros."""
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

    def _router(self, at: str) -> torch.Tensor:
        """A rounding could choose another expert: in the model's dtype only if that changes none
        of its values."""
        exact = self._wide(at + "router")
        narrow = exact.to(self._dtype)
        return narrow if torch.equal(narrow.float(), exact) else exact

    def _norm_weight(self, name: str) -> torch.Tensor:
        return self._wide(name) if self._spec.norm_fp32 else self.tensor(name)

    def _wide(self, name: str) -> torch.Tensor:
        return self.tensor(name, torch.float32)

    def _read(self, name: str, dtype: torch.dtype | None = None) -> torch.Tensor:
        return read_tensor(self._source, name, dtype or self._weight_dtype, self._part(name))

    def _part(self, name: str) -> Part:
        return part_of(self._shapes[name], self._own_shapes[name], self._ranks)

    def _if_any(self, read: Callable[[str], Any], at: str, names: dict[str, Any], name: str) -> Any:
        return read(at + name) if name in names else None

    def _linear(
        self,
        names: list[str],
        biased: bool,
        add_up: bool = True,
        rows: torch.Tensor | None = None,
    ) -> Linear:
        """`rows`: what outputs are multiplied by."""
        summed = is_summed(self._shapes[names[0]], self._split_shapes[names[0]])
        if summed and self._ranks.rank:
            biased = False  # it is added once
        bias = self._merged([name + "_bias" for name in names]) if biased else None
        if bias is not None and rows is not None:
            bias.mul_(rows)
        linear = self._product(self._formatted, names, bias, summed and add_up, rows)
        if any(map(self._formats.differ, names)):
            own = self._product(self._decode_formatted, names, bias, summed and add_up, rows)
            self._decode_linears[id(linear)] = own
        return linear

    def _product(
        self,
        formatted: FormattedMatrices,
        names: list[str],
        bias: torch.Tensor | None,
        add_up: bool,
        rows: torch.Tensor | None,
    ) -> Linear:
        made = formatted.product(names, bias)
        if made is None:
            made = DenseLinear(self._merged(names), bias, self._kernels)
        if rows is not None:
            made.scale_rows(rows)
        linear: Linear = made if self._observe is None else self._observe(names, made)
        return SummedLinear(linear, self._ranks) if add_up else linear

    def _merged(self, names: list[str]) -> torch.Tensor:
        """One tensor of several; a part is in memory a second time only while it is put there."""
        if len(names) == 1:
            return self.tensor(names[0])
        shapes = [self._own_shapes[name] for name in names]
        rows = sum(shape[0] for shape in shapes)
        whole = torch.empty(rows, *shapes[0][1:], dtype=self._dtype, device=self._device)
        places = torch.split(whole, [shape[0] for shape in shapes])
        for name, place in zip(names, places, strict=True):
            place.copy_(self._read(name))
        return whole
