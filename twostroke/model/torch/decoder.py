"""`Decoder`: the forward pass of the torch backends. It runs any `ModelSpec` on any set of kernels.

    embed ─▶ [ norm · qkv · rope · store · ATTEND · o · norm? · + · norm · mlp · norm? · + ] × n
          ─▶ norm ─▶ head

The linear layers get one flat run of tokens, decode rows first and then the chunks; attention gets
decode rows and chunks as two lists. `pieces` stops before the attention of each layer, so that the
parts between can be recorded as CUDA graphs; `forward` runs the same parts with attention between
them. A step that only decodes has one launch for rope, store and attention. The computation from a
layer's norm to its output projection is its `Attention` (`attention.py`, `latent.py`). If the
phases have different weight formats, steps that only decode use another list of layers
(`phase_formats.py`).

At most the last token of a chunk is sampled. So the last layer computes keys and values of all
tokens, and the rest only for the kept tokens. The residual stays in one tensor that attention and
MLP add to. This module reads no values from the device and copies none to it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from copy import copy
from dataclasses import replace
from typing import NamedTuple

import torch

from twostroke.kernels.records import DEFAULT_CONTEXT, StepContext
from twostroke.kernels.reference import Kernels
from twostroke.kv.pool import KVPool
from twostroke.model.describe.spec import ModelSpec
from twostroke.model.describe.tensor_parallel import ONE_RANK, Ranks, rank_spec
from twostroke.model.formats.linear import Activations
from twostroke.model.formats.phase_formats import PhaseFormats
from twostroke.model.torch.attention import Attention, Workspace
from twostroke.model.torch.load_layers import (
    Layer,
    LayerLoader,
    LazyLayers,
    LoadOptions,
    ModelRuntime,
    Norm,
)
from twostroke.model.torch.meta import to_meta
from twostroke.model.torch.step_inputs import KV, KeptTokens, StepInputs
from twostroke.model.weights import WeightSource

FEW_TOKENS = 64  # in steps of at most this size, the time between two launches matters


class Decoder:
    def __init__(
        self,
        spec: ModelSpec,
        source: WeightSource,
        dtype: torch.dtype,
        device: torch.device,
        max_len: int,
        kernels: Kernels,
        options: LoadOptions = LoadOptions(),  # noqa: B008 - frozen
        *,
        ranks: Ranks = ONE_RANK,
        dependent_launch: bool = False,
    ) -> None:
        """`ranks`: the ranks that share the model of `spec`; `self.spec` describes this rank's
        part. `dependent_launch`: in small steps, each launch is set up before the previous launch
        has ended (`StepContext`)."""
        formats = options.formats
        decode_formats = formats if options.decode_formats is None else options.decode_formats
        self.formats = PhaseFormats(formats, decode_formats)
        self.spec, self.ranks = rank_spec(spec, ranks.size), ranks
        self.dtype, self.device, self.kernels = dtype, device, kernels
        self.dependent_launch = dependent_launch
        self._dependent_context = StepContext(dependent_launch=dependent_launch)
        self._embed_scale = float(torch.tensor(spec.embed_scale, dtype=dtype))
        runtime = ModelRuntime(dtype, device, max_len, kernels, ranks)
        load = LayerLoader(spec, source, options, self.formats, runtime)
        self._layers: Sequence[Layer]
        # Threads, because reading a weight uses one core and mostly runs without the GIL.
        with ThreadPoolExecutor() as pool:
            embed = pool.submit(load.embedding)
            if options.observe is None:
                self._layers = list(pool.map(load.layer, range(spec.num_layers)))
                self._decode_layers = [load.in_decode(layer) for layer in self._layers]
            else:
                self._layers = LazyLayers(load.layer, spec.num_layers)
            self._embed = embed.result()
        self._positions = load.tensor("positions") if spec.learned_positions else None
        self._final_norm = load.norm("final_norm")
        self._head = load.head(self._embed)

    def to_meta(self) -> Decoder:
        """Return a decoder with the same kernel launches and without memory: one layer of each
        kind, and the last layer."""
        other = copy(self)
        kinds = {layer.kind: index for index, layer in enumerate(self._layers)}
        kept = [*kinds.values(), len(self._layers) - 1]
        other.device = torch.device("meta")
        other.spec = replace(self.spec, layers=tuple(self.spec.layers[index] for index in kept))
        other._layers = [to_meta(self._layers[index]) for index in kept]
        other._decode_layers = [to_meta(self._decode_layers[index]) for index in kept]
        for name in ("_embed", "_positions", "_final_norm", "_head"):
            setattr(other, name, to_meta(getattr(self, name)))
        return other

    @property
    def phases_differ(self) -> bool:
        return any(map(self.formats.differ, self.spec.weight_shapes()))

    # ── a step ──────────────────────────────────────────────────────────────────────────────

    def forward(self, inputs: StepInputs, pool: KVPool) -> torch.Tensor:
        """Return the last hidden states of the kept tokens after the final norm, [S, hidden]; of
        all tokens if `inputs.kept` is None."""
        if inputs.only_decodes and inputs.decode[0].queries == 1:
            return self._decode(inputs, pool)
        work = Workspace(self.spec, len(inputs.positions), self.dtype, self.device)
        attend = self.attention(inputs, pool, work)
        for index in self.pieces(inputs, pool, work):
            if index + 1 < len(self._layers):
                attend(index)
        return self.last_layer(inputs, pool, work, attend)

    def pieces(self, inputs: StepInputs, pool: KVPool, work: Workspace) -> Iterator[int]:
        """Run up to the attention of each layer in turn, and yield the layer's number: queries are
        in the workspace, keys and values in the cache. The generator continues with the output of
        attention in the workspace. After the last number, call `last_layer`."""
        layers, context = self._layers_of(inputs), self._context(len(work.residual))
        self._embed.rows(inputs.token_ids, work.residual)
        normed: Activations = self._first_norm(work.residual, inputs, context)
        for index, layer in enumerate(layers):
            self._project(layer, normed, inputs, pool.layers[index], work, context)
            yield index
            if index + 1 < len(self._layers):
                attended = work.attended(layer.spec.attention)
                normed = self._finish(layers, index, attended, work.residual, context)

    def attention(self, inputs: StepInputs, pool: KVPool, work: Workspace) -> Callable[[int], None]:
        """Return `attend(layer number)` for one step, which binds launches once for each kind."""
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
        """Run the last layer from its attention on, for the kept tokens."""
        layers, kept, index = self._layers_of(inputs), inputs.kept, len(self._layers) - 1
        attention, residual = layers[-1].attention, work.residual
        if kept is None:
            attend(index)
            attended = work.attended(attention.spec)
        else:
            residual = residual.index_select(0, kept.tokens)
            if not len(residual):
                return residual
            attended = self._attend_kept(attention, inputs, kept, pool.layers[-1], work)
        context = self._context(len(residual))
        return _hidden(self._finish(layers, index, attended, residual, context))

    def head(self, hidden: torch.Tensor, out: torch.Tensor | None = None) -> torch.Tensor:
        """Return logits in the model's dtype, [rows, vocab]."""
        logits = self._head.product(hidden, out=out)
        if self.spec.logit_scale != 1.0:
            logits.mul_(self.spec.logit_scale)
        cap = self.spec.logit_softcap
        return logits.div_(cap).tanh_().mul_(cap) if cap else logits

    # ── parts of a layer ────────────────────────────────────────────────────────────────────

    def _layers_of(self, inputs: StepInputs) -> Sequence[Layer]:
        return self._decode_layers if inputs.only_decodes else self._layers

    def _decode(self, inputs: StepInputs, pool: KVPool) -> torch.Tensor:
        residual = self._embed.rows(inputs.token_ids)
        layers, context = self._decode_layers, self._context(len(residual))
        normed: Activations = self._first_norm(residual, inputs, context)
        for index, (layer, cache) in enumerate(zip(layers, pool.layers, strict=True)):
            attended = self._decode_attention(layer, normed, inputs, cache, context)
            normed = self._finish(layers, index, attended, residual, context)
        return _hidden(normed)

    # A profile measures each of these methods separately (`exec/torch_profile.py`).

    def _project(
        self,
        layer: Layer,
        normed: Activations,
        inputs: StepInputs,
        cache: KV,
        work: Workspace,
        context: StepContext,
    ) -> None:
        layer.attention.project(normed, inputs, cache, work, context)

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
        cache: KV,
        context: StepContext,
    ) -> torch.Tensor:
        return layer.attention.decode(normed, inputs, cache, context)

    def _first_norm(
        self, residual: torch.Tensor, inputs: StepInputs, context: StepContext
    ) -> torch.Tensor:
        """Scale the embeddings and add the positions, in place. Return the first layer's input."""
        norm = self._layers[0].attn_norm
        if self._embed_scale != 1.0:
            residual *= self._embed_scale
        if self._positions is not None:
            residual += self._positions.index_select(0, inputs.positions)
        return residual if norm is None else self._norm(residual, norm, context)

    def _norm(self, x: torch.Tensor, norm: Norm, context: StepContext) -> torch.Tensor:
        eps = self.spec.norm_eps
        if self.spec.norm == "layer":
            return self.kernels.layer_norm(x, *norm, eps)
        return self.kernels.rms_norm(x, norm.weight, eps, context)

    def _finish(
        self,
        layers: Sequence[Layer],
        index: int,
        attended: torch.Tensor,
        residual: torch.Tensor,
        context: StepContext,
    ) -> Activations:
        """Run the rest of a layer after attention, and the first norm of the next layer."""
        layer, rows = layers[index], len(residual)
        if index + 1 < len(layers):
            following = layers[index + 1]
            after = _Next(following.attn_norm, following.attention.quantised_dtype(rows))
        else:
            after = _Next(self._final_norm, None)
        normed: Activations
        if layer.spec.parallel:
            # The MLP reads the same residual as attention, before anything is added to it.
            norm = layer.mlp_norm or layer.attn_norm
            normed = residual.clone() if norm is None else self._norm(residual, norm, context)
            self._attention_output(layer, attended, residual, _Next(None, None), context)
        else:
            mlp = _Next(layer.mlp_norm, layer.mlp.quantised_dtype(rows))
            normed = self._attention_output(layer, attended, residual, mlp, context)
        return self._mlp(layer, normed, residual, after, context)

    def _attention_output(
        self,
        layer: Layer,
        attended: torch.Tensor,
        residual: torch.Tensor,
        after: _Next,
        context: StepContext,
    ) -> Activations:
        out = layer.o.product(attended.flatten(1), context)
        return self._add(out, layer.attn_post_norm, residual, after, context)

    def _mlp(
        self,
        layer: Layer,
        normed: Activations,
        residual: torch.Tensor,
        after: _Next,
        context: StepContext,
    ) -> Activations:
        out = layer.mlp(normed, context)
        return self._add(out, layer.mlp_post_norm, residual, after, context)

    def _add(
        self,
        out: torch.Tensor,
        post_norm: Norm | None,
        residual: torch.Tensor,
        after: _Next,
        context: StepContext,
    ) -> Activations:
        """Add the output of attention or MLP to the residual, and return the next input."""
        if post_norm is not None:
            out = self._norm(out, post_norm, context)
        if self.spec.residual_scale != 1.0:
            out *= self.spec.residual_scale
        if after.norm is None:
            return residual.add_(out)
        if self.spec.norm == "layer":
            return self._norm(residual.add_(out), after.norm, context)
        weight, eps = after.norm.weight, self.spec.norm_eps
        return self.kernels.add_rms_norm(
            out, residual, weight, eps, context, to=after.quantised_dtype
        )

    def _context(self, tokens: int) -> StepContext:
        return self._dependent_context if tokens <= FEW_TOKENS else DEFAULT_CONTEXT


class _Next(NamedTuple):
    """The norm that reads the residual next."""

    norm: Norm | None  # None: the residual is read without a norm
    quantised_dtype: torch.dtype | None  # to which the norm's output is quantised


def _hidden(normed: Activations) -> torch.Tensor:
    """Return the output of the last norm, which is never quantised."""
    assert isinstance(normed, torch.Tensor)
    return normed
