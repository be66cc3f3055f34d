"""`NativeDecoder`: the decoder in C++ (`native/`), for CPUs.

The decoder receives the fields of `ModelSpec` and the weights by canonical name. Weights keep the
values of the file; only their order is adapted to the CPU. Activations are rounded to int8 blocks
before each matmul with a packed matrix, and attention is computed in fp16 or bfloat16 where the
machine supports it, unless `exact`.
"""

from __future__ import annotations

import math
import os
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict
from typing import Any

import numpy as np
import numpy.typing as npt

from twostroke.errors import ModelError
from twostroke.kernels import cpu
from twostroke.model.describe.rope import query_scales, rope_tables
from twostroke.model.describe.spec import (
    LATENT_EXPANDING,
    AttentionSpec,
    ExpertsSpec,
    MLPSpec,
    ModelSpec,
    input_projections,
)
from twostroke.model.formats.key_scales import key_scales
from twostroke.model.formats.w8a8_weights import require_unquantised
from twostroke.model.gguf.block_types import BlockType
from twostroke.model.gguf.iq_grids import grid_of
from twostroke.model.weights import ALL_ROWS, PackedMatrix, WeightSource, not_finite_error
from twostroke.model.weights.rounding import rounded_blocks

BLOCK = 32  # columns of a matrix that share a scale
DENSE = {BlockType.F32, BlockType.F16, BlockType.BF16}
DTYPES = {"bfloat16": BlockType.BF16, "float16": BlockType.F16}
QUANTIZATION = {"int4": "q4", "int8": "q8"}
ROUNDED = {"q4": BlockType.Q4_1, "q8": BlockType.Q8_0}  # block types of equal precision
ELEMENTS_AT_ONCE = 1 << 22  # elements of a dense matrix that are read at one time

Ints = npt.NDArray[np.int32]
Floats = npt.NDArray[np.float32]
Weights = dict[str, Any]  # canonical name → Matrix or Floats


class Packing:
    """The choice of the matrices that are packed together, and of the format of each."""

    def __init__(
        self,
        spec: ModelSpec,
        source: WeightSource,
        dtype: str,
        quantization: str | None,
        isa: str = "auto",
        importance: Mapping[str, Floats] | None = None,
    ) -> None:
        """`importance`: for matrices that are rounded, the weight of the error of each column."""
        self.spec, self.source, self._isa = spec, source, isa
        self.importance = importance or {}
        self._dense = DTYPES.get(dtype, BlockType.F32)
        self._sizes: dict[str, float] = {}  # format → bytes of an element
        self._quantised = None if quantization is None else QUANTIZATION[quantization]

    def format(self, names: Sequence[str]) -> str:
        """Return one format for all of these matrices: the smallest format that keeps the values of
        the file, or the requested quantization. kv_b is never rounded, because prefill and decode
        use two forms of kv_b, whose rounded values would differ."""
        types = {self.source.stored_type(name) or self._dense for name in names}
        dense, packed = types & DENSE, types - DENSE
        is_kv_b = names[0].rpartition(".")[2] in LATENT_EXPANDING
        rounded = None if is_kv_b else self._quantised
        formats = set()
        if packed:
            formats.add(str(cpu.module().common_format([str(type) for type in packed])))
        if dense:
            formats.add(rounded or self._dense_format(dense))
        return formats.pop() if len(formats) == 1 else "f32"

    def transposed_format(self, name: str) -> str:
        """Return the format of a matrix that is packed transposed, which cannot keep blocks."""
        type = self.source.stored_type(name) or self._dense
        return self._dense_format({type}) if type in DENSE else "f32"

    def _dense_format(self, types: set[BlockType]) -> str:
        """Return f16 where the machine multiplies fp16: there, bfloat16 loses only the last bits of
        weights below 10^-7."""
        type = types.pop() if len(types) == 1 else BlockType.F32
        if type != BlockType.F32 and cpu.module().has_fp16_products(self._isa):
            return "f16"
        return "bf16" if type == BlockType.BF16 else "f32"

    def matrices(self) -> list[list[str]]:
        """Return the names of the matrices, grouped as they are packed together, without the
        routers, which stay in fp32."""
        found = [
            [f"layers.{n}.{name}" for name in names]
            for n, layer in enumerate(self.spec.layers)
            for names in (*_attention_matrices(layer.attention), *_mlp_matrices(layer.mlp))
        ]
        return [*found, ["embed"], *([] if self.spec.tie_embeddings else [["head"]])]

    def require_unquantised(self, quantization: str) -> None:
        """Raise `ConfigError` if a matrix of a layer is quantised in the file already: it would
        keep its format under `quantization`. (Embedding and head may be quantised, as with torch.)
        """
        for names in self.matrices():
            if names[0].startswith("layers."):
                require_unquantised(self.source, names, quantization)

    def weight_bytes(self) -> dict[str, float]:
        """Return the bytes of each matrix in its packed format."""
        shapes = self.spec.weight_shapes()
        sizes: dict[str, float] = {}
        for names in self.matrices():
            each = self._bytes_of(self.format(names))
            sizes |= {name: each * math.prod(shapes[name]) for name in names}
        for n, layer in enumerate(self.spec.layers):
            attention = layer.attention
            if attention.latent is not None:  # the rows of the keys are packed twice
                name = f"layers.{n}." + ("k_b" if attention.latent.split else "kv_b")
                rank = attention.latent.kv_lora_rank
                count = attention.num_heads * attention.nope_dim * rank
                sizes[name] += count * self._bytes_of(self.transposed_format(name))
        routers = [name for name in shapes if name.endswith(".router")]
        return sizes | {name: 4.0 * math.prod(shapes[name]) for name in routers}

    def num_bytes(self) -> int:
        return int(sum(self.weight_bytes().values()))

    def _bytes_of(self, format: str) -> float:
        """Return the bytes of one element, which depend on the instruction set."""
        if format not in self._sizes:
            rows = 64  # a multiple of the lanes of every instruction set
            matrix = cpu.module().Matrix(format, rows, BLOCK, self._isa)
            self._sizes[format] = float(matrix.num_bytes / (rows * BLOCK))
        return self._sizes[format]


class NativeDecoder:
    """The native decoder of one model, with its weights."""

    def __init__(
        self,
        packing: Packing,
        max_len: int,
        threads: int,
        threads_prefill: int,
        isa: str = "auto",
        exact: bool = False,
        scale_keys: bool = False,
    ) -> None:
        """`scale_keys`: scale keys and queries for an int8 KV cache (`key_scales.py`)."""
        self.spec = spec = packing.spec
        self.isa = isa
        self._logits = np.empty((0, spec.vocab_size), np.float32)
        self.model = cpu.module().Model(
            spec=spec_record(spec),
            weights=load_weights(packing, isa, max_len, max(threads, threads_prefill), scale_keys),
            ropes=[
                (*rope_tables(rope, max_len), query_scales(rope, max_len)) for rope in spec.ropes()
            ],
            isa=isa,
            threads=threads,
            threads_prefill=threads_prefill,
            exact=exact,
        )

    def forward(
        self,
        tokens: Ints,
        tables: Sequence[Ints],
        caches: Sequence[Any],
        slots: Ints,
        chunks: Ints,
        which: Ints,
        keep_all: bool = False,
    ) -> Floats:
        """Return the logits of the tokens `which` of a step, in memory that the next step reuses.

        `tables` and `caches` have one entry per KV group. Slots are [n, (row, position, index)];
        a row with drafts has several. Chunks are [n, (row, start, size, index)]. The index is the
        place of the (first) token in the cache, the position its place in the text. `keep_all`:
        keep the hidden states of all tokens, so that `logits` can compute more of them.
        """
        out = self._rows(len(which))
        self.model.forward(tokens, tables, caches, slots, chunks, which, out, keep_all)
        return out

    def logits(self, which: Ints) -> Floats:
        """Return the logits of more tokens of the last step, which was run with `keep_all`."""
        out = self._rows(len(which))
        self.model.logits(which, out)
        return out

    def _rows(self, count: int) -> Floats:
        if count > len(self._logits):
            self._logits = np.empty((count, self.spec.vocab_size), np.float32)
        return self._logits[:count]


def spec_record(spec: ModelSpec) -> dict[str, Any]:
    """Return the specification as the native decoder reads it: the fields of `ModelSpec` with the
    number of each layer's rope table and its place among the KV groups. `native/src/spec.h` lists
    the fields."""
    ropes = spec.ropes()
    places = {
        layer_index: {"kv_group": number, "index_in_group": place}
        for number, group in enumerate(spec.kv_groups())
        for place, layer_index in enumerate(group.layers)
    }
    record = asdict(spec)
    record["layers"] = [fields | places[index] for index, fields in enumerate(record["layers"])]
    for layer, fields in zip(spec.layers, record["layers"], strict=True):
        rope = layer.attention.rope
        fields["attention"]["rope"] = {"table": ropes.index(rope), "dim": rope.dim}
        if isinstance(layer.mlp, ExpertsSpec):
            fields["experts"] = fields.pop("mlp")
    return record


def load_weights(
    packing: Packing, isa: str, max_len: int, threads: int, scale_keys: bool = False
) -> Weights:
    """Return all weights by canonical name. Matrices of one matmul are one weight, like `qkv`."""
    spec, load = packing.spec, _Loader(packing, isa, scale_keys)
    weights: Weights = {"final_norm": load.vector("final_norm")}
    if spec.norm_bias:
        weights["final_norm_bias"] = load.vector("final_norm_bias")
    if spec.learned_positions:
        weights["positions"] = load.vector("positions", max_len)
    with ThreadPoolExecutor(threads) as pool:
        matrices = {"embed": pool.submit(load.matrix, ["embed"])}
        layers = list(pool.map(load.layer, range(spec.num_layers)))
        if not spec.tie_embeddings:
            matrices["head"] = pool.submit(load.matrix, ["head"], spec.head_bias)
    for layer in layers:
        weights |= layer
    return weights | {name: matrix.result() for name, matrix in matrices.items()}


class _Loader:
    """Reads weights from the source and packs them."""

    def __init__(self, packing: Packing, isa: str, scale_keys: bool) -> None:
        self._scale_keys = scale_keys
        self._packing, self._isa, self._native = packing, isa, cpu.module()
        self._shapes = packing.spec.weight_shapes()

    def layer(self, index: int) -> Weights:
        spec, prefix = self._packing.spec, f"layers.{index}."
        layer = spec.layers[index]
        attention, mlp = layer.attention, layer.mlp
        names = layer.weight_shapes(spec.hidden_size, spec.norm_bias)
        vectors = [name for name in names if name.endswith(("_norm", "_norm_bias", "sinks"))]
        weights: Weights = {prefix + name: self.vector(prefix + name) for name in vectors}
        qkv = [prefix + name for name in input_projections(attention)]
        weights[prefix + "qkv"] = self.matrix(qkv, attention.qkv_bias)
        weights[prefix + "o"] = self.matrix([prefix + "o"], attention.output_bias)
        weights |= self._latent(attention, prefix)
        weights |= (
            self._experts(mlp, prefix) if isinstance(mlp, ExpertsSpec) else self._mlp(mlp, prefix)
        )
        if self._scale_keys:
            scales = key_scales(spec, self._packing.source, index)
            weights[prefix + "key_scales"] = scales.ravel()
        return weights

    def _latent(self, attention: AttentionSpec, prefix: str) -> Weights:
        latent = attention.latent
        if latent is None:
            return {}
        heads, nope = attention.num_heads, attention.nope_dim
        if latent.split:
            keys_transposed = self._by_head(prefix + "k_b", heads)
            keys = self._by_head(prefix + "k_b", heads, transposed=True)
            values = self._by_head(prefix + "v_b", heads)
        else:
            name, rows = prefix + "kv_b", slice(nope)
            keys = self._by_head(name, heads, rows)
            keys_transposed = self._by_head(name, heads, rows, transposed=True)
            values = self._by_head(name, heads, slice(nope, None))
        parts = {"keys": keys, "keys_transposed": keys_transposed, "values": values}
        weights: Weights = {f"{prefix}kv_b.{name}": matrix for name, matrix in parts.items()}
        if latent.q_lora_rank:
            weights[prefix + "q_b"] = self.matrix([prefix + "q_b"])
        return weights

    def _by_head(
        self, name: str, heads: int, rows: slice = ALL_ROWS, transposed: bool = False
    ) -> Any:
        """Pack some rows of each head of a weight; with `transposed`, the rows become columns. In
        the packed matrix the rows of each head begin at a multiple of `head_rows`."""
        source = self._packing.source
        weight = self.vector(name)
        floats = weight.reshape(heads, -1, weight.shape[1])[:, rows]
        if transposed:
            return self._packed_heads(self._packing.transposed_format(name), floats.swapaxes(1, 2))
        stored, format = self._blocks_of(name), self._packing.format([name])
        if stored is None or format == "f32":
            made = self._packed_heads(format, floats)
        else:
            blocks = stored.rows.reshape(heads, -1, stored.rows.shape[1])[:, rows]
            made = self._packed_heads(format, floats, stored.type, blocks)
        source.release(name)
        return made

    def _packed_heads(
        self,
        format: str,
        floats: Floats,
        type: BlockType | None = None,
        blocks: npt.NDArray[np.uint8] | None = None,
    ) -> Any:
        """Pack a weight [heads, rows, columns], given as floats or as blocks of a type."""
        heads, rows, cols = floats.shape
        each = -(-rows // self._native.head_rows) * self._native.head_rows
        places = (np.arange(heads)[:, None] * each + np.arange(rows)).astype(np.int32).reshape(-1)
        matrix = self._native.Matrix(format, heads * each, cols, self._isa)
        try:
            if blocks is None or type is None:
                matrix.put_floats(np.ascontiguousarray(floats).reshape(-1, cols), places)
            else:
                lines = np.ascontiguousarray(blocks).reshape(heads * rows, -1)
                matrix.put_blocks(str(type), lines, places, grid_of(type))
        except OverflowError:  # a weight above 255
            return self._packed_heads("f32", floats)
        return matrix

    def _mlp(self, mlp: MLPSpec, prefix: str) -> Weights:
        return {
            prefix + "gate_up": self.matrix([prefix + name for name in mlp.gate_up], mlp.bias),
            prefix + "down": self.matrix([prefix + "down"], mlp.bias),
        }

    def _experts(self, mlp: ExpertsSpec, prefix: str) -> Weights:
        weights: Weights = {prefix + "router": self._router(mlp, prefix)}
        for number in range(mlp.num_experts):
            weights |= self._mlp(mlp.expert, f"{prefix}experts.{number}.")
        if mlp.routing.correction_bias:
            weights[prefix + "router_correction"] = self.vector(prefix + "router_correction")
        if mlp.shared is not None:
            weights |= self._mlp(mlp.shared, prefix + "shared.")
        return weights

    def _router(self, mlp: ExpertsSpec, prefix: str) -> Any:
        """Return the router in fp32, with the gate of the shared expert as its last row."""
        rows, hidden = mlp.num_experts, self._packing.spec.hidden_size
        matrix = self._native.Matrix("f32", rows + int(mlp.shared_gate), hidden, self._isa)
        places = np.arange(rows, dtype=np.int32)
        matrix.put_floats(self.vector(f"{prefix}router"), places)
        if mlp.routing.bias:
            matrix.put_bias(self.vector(f"{prefix}router_bias"), places)
        if mlp.shared_gate:
            gate = self.vector(f"{prefix}shared_gate").reshape(1, -1)
            matrix.put_floats(gate, np.array([rows], np.int32))
        return matrix

    def vector(self, name: str, count: int | None = None) -> Floats:
        """Return a weight as floats, or its first `count` rows."""
        values = np.ascontiguousarray(self._packing.source.floats(name, slice(count)))
        if not np.isfinite(values).all():
            raise not_finite_error(self._packing.source, name)
        return values

    def matrix(self, names: list[str], biased: bool = False) -> Any:
        format = self._packing.format(names)
        try:
            return self._packed(format, names, biased)
        except OverflowError as error:  # a weight above 255
            if format != "f16":
                raise ModelError(
                    f"{self._packing.source.label(names[0])} cannot be packed: {error}. Use "
                    "another conversion of the model."
                ) from None
            return self._packed("f32", names, biased)

    def _packed(self, format: str, names: list[str], biased: bool) -> Any:
        shapes = self._shapes
        rows, cols = sum(shapes[name][0] for name in names), shapes[names[0]][1]
        matrix = self._native.Matrix(format, rows, cols, self._isa)
        interleaved = names[0].endswith(".gate")
        for name, places in _places(names, shapes, interleaved):
            try:
                self._put(matrix, format, name, places)
            except ModelError:
                raise
            except ValueError:  # shapes are checked already, so a value is not finite
                raise not_finite_error(self._packing.source, name) from None
            if biased:
                matrix.put_bias(self.vector(name + "_bias"), places)
        return matrix

    def _blocks_of(self, name: str) -> PackedMatrix | None:
        """Return the blocks of a weight that is quantised in the file."""
        source = self._packing.source
        return None if source.stored_type(name) in {None, *DENSE} else source.packed(name)

    def _put(self, matrix: Any, format: str, name: str, places: Ints) -> None:
        source = self._packing.source
        packed = self._blocks_of(name) if format != "f32" else None
        if packed is not None:
            rows = np.ascontiguousarray(packed.rows)
            matrix.put_blocks(str(packed.type), rows, places, grid_of(packed.type))
        else:
            count = max(1, ELEMENTS_AT_ONCE * len(places) // math.prod(source.shape(name) or ()))
            for first in range(0, len(places), count):
                part = slice(first, first + count)
                self._put_floats(matrix, format, name, part, places[part])
        source.release(name)

    def _put_floats(self, matrix: Any, format: str, name: str, rows: slice, places: Ints) -> None:
        values = np.ascontiguousarray(self._packing.source.floats(name, rows))
        importance, type = self._packing.importance.get(name), ROUNDED.get(format)
        if importance is None or type is None or values.shape[1] % BLOCK:
            matrix.put_floats(values, places)
        else:
            matrix.put_blocks(str(type), rounded_blocks(type, values, importance), places, None)


def _attention_matrices(attention: AttentionSpec) -> list[tuple[str, ...]]:
    """Return the names of the matrices of attention, grouped as they are packed together."""
    if attention.latent is None:
        return [input_projections(attention), ("o",)]
    shapes = attention.weight_shapes(1)
    others = [name for name in shapes if name in ("q_b", *LATENT_EXPANDING, "o")]
    return [input_projections(attention), *((name,) for name in others)]


def _mlp_matrices(mlp: MLPSpec | ExpertsSpec) -> list[list[str]]:
    """Return the names of the matrices of an MLP, grouped as they are packed together."""
    if isinstance(mlp, MLPSpec):
        return [[*mlp.gate_up], ["down"]]
    mlps = {f"experts.{n}.": mlp.expert for n in range(mlp.num_experts)}
    mlps |= {} if mlp.shared is None else {"shared.": mlp.shared}
    pairs = ((prefix, names) for prefix, spec in mlps.items() for names in _mlp_matrices(spec))
    return [[prefix + name for name in names] for prefix, names in pairs]


def _places(
    names: Sequence[str], shapes: dict[str, tuple[int, ...]], interleaved: bool
) -> list[tuple[str, Ints]]:
    """Return the places of the rows of each matrix: one matrix after another, or, for gate and up,
    alternating blocks, so that the same task computes a block of both."""
    if not interleaved:
        ends = np.cumsum([shapes[name][0] for name in names])
        return [
            (name, np.arange(end - shapes[name][0], end, dtype=np.int32))
            for name, end in zip(names, ends, strict=True)
        ]
    rows = np.arange(shapes[names[0]][0])
    unit = rows // BLOCK
    size = np.minimum(BLOCK, len(rows) - unit * BLOCK)  # the last block may be smaller
    first = unit * 2 * BLOCK + rows % BLOCK
    return [(name, (first + n * size).astype(np.int32)) for n, name in enumerate(names)]


def default_threads(engines: int = 1) -> int:
    """Return the threads of each of `engines` engines, by CPU affinity and cgroup CPU limit."""
    allowed = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()
    return max(1, min(allowed or 1, _cgroup_cpus()) // engines)


def _cgroup_cpus() -> int:
    try:
        with open("/sys/fs/cgroup/cpu.max", encoding="ascii") as file:
            quota, period = file.read().split()
        return max(1, round(int(quota) / int(period)))
    except (OSError, ValueError):  # no cgroup, or no limit ("max")
        return 1 << 16
