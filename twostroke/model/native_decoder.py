"""`NativeDecoder`: the decoder of `decoder.py` in C++ (`native/`), for CPUs.

Weights stay as the file packs them, in an order that the CPU likes: nothing is lost. Activations
are rounded to blocks of 8 bits before each product with a packed matrix, and attention is computed
in fp16 or bfloat16 where the machine does that, unless `exact`.
"""

from __future__ import annotations

import math
import os
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
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
    projections,
)
from twostroke.model.formats.key_scales import key_scales
from twostroke.model.formats.w8a8_weights import refuse_quantised
from twostroke.model.gguf.block_types import BlockType
from twostroke.model.gguf.iq_grids import grid_of
from twostroke.model.weights import ALL_ROWS, PackedMatrix, WeightSource, not_finite
from twostroke.model.weights.rounding import rounded_blocks

BLOCK = 32  # weights that share a scale
DENSE = {BlockType.F32, BlockType.F16, BlockType.BF16}
DTYPES = {"bfloat16": BlockType.BF16, "float16": BlockType.F16}
QUANTIZATION = {"int4": "q4", "int8": "q8"}
ROUNDED = {"q4": BlockType.Q4_1, "q8": BlockType.Q8_0}  # what is as these formats are
ELEMENTS_AT_ONCE = 1 << 22  # of a matrix that is read as floats

Ints = npt.NDArray[np.int32]
Floats = npt.NDArray[np.float32]


class Packing:
    """Which matrices are kept side by side, and in which format each is."""

    def __init__(
        self,
        spec: ModelSpec,
        source: WeightSource,
        dtype: str,
        quantization: str | None,
        isa: str = "auto",
        importance: Mapping[str, Floats] | None = None,
    ) -> None:
        """`importance`: what the errors of a matrix's columns count where it is rounded."""
        self.spec, self.source, self._isa = spec, source, isa
        self.importance = importance or {}
        self._dense = DTYPES.get(dtype, BlockType.F32)
        self._sizes: dict[str, float] = {}  # bytes of a weight in each format
        self._quantised = None if quantization is None else QUANTIZATION[quantization]

    def format(self, names: Sequence[str]) -> str:
        """One for all of them: the smallest that loses nothing of what the file has, or the one
        that is asked for. kv_b, of which prefill has one form and decode another, is never rounded:
        the two would differ."""
        types = {self.source.stored_type(name) or self._dense for name in names}
        dense, packed = types & DENSE, types - DENSE
        kept = names[0].rpartition(".")[2] in LATENT_EXPANDING
        rounded = None if kept else self._quantised
        formats = set()
        if packed:
            formats.add(str(cpu.module().common_format([str(type) for type in packed])))
        if dense:
            formats.add(rounded or self._dense_format(dense))
        return formats.pop() if len(formats) == 1 else "f32"

    def transposed_format(self, name: str) -> str:
        """Of a matrix whose columns are to be rows: blocks of a row do not hold them."""
        type = self.source.stored_type(name) or self._dense
        return self._dense_format({type}) if type in DENSE else "f32"

    def _dense_format(self, types: set[BlockType]) -> str:
        """In fp16, which some machines multiply, bfloat16 loses only the last bits of weights
        below 10^-7."""
        type = types.pop() if len(types) == 1 else BlockType.F32
        if type != BlockType.F32 and cpu.module().has_fp16_products(self._isa):
            return "f16"
        return "bf16" if type == BlockType.BF16 else "f32"

    def matrices(self) -> list[list[str]]:
        """All but the routers, which are kept in floats."""
        found = [
            [f"layers.{n}.{name}" for name in names]
            for n, layer in enumerate(self.spec.layers)
            for names in (*_attention_matrices(layer.attention), *_mlp_matrices(layer.mlp))
        ]
        return [*found, ["embed"], *([] if self.spec.tie_embeddings else [["head"]])]

    def refuse_quantised(self, quantization: str) -> None:
        """Raise `ConfigError` if the file has a matrix of a layer in blocks already: `quantization`
        would leave that matrix as it is. (Embedding and head may be in blocks, as for torch.)"""
        for names in self.matrices():
            if names[0].startswith("layers."):
                refuse_quantised(self.source, names, quantization)

    def weight_bytes(self) -> dict[str, float]:
        """Of each matrix, in the format that it is kept in."""
        shapes = self.spec.weight_shapes()
        sizes: dict[str, float] = {}
        for names in self.matrices():
            each = self._bytes_of(self.format(names))
            sizes |= {name: each * math.prod(shapes[name]) for name in names}
        for n, layer in enumerate(self.spec.layers):
            part = layer.attention
            if part.latent is not None:  # its keys' rows once more
                name = f"layers.{n}." + ("k_b" if part.latent.split else "kv_b")
                count = part.num_heads * part.nope_dim * part.latent.kv_lora_rank
                sizes[name] += count * self._bytes_of(self.transposed_format(name))
        routers = [name for name in shapes if name.endswith(".router")]
        return sizes | {name: 4.0 * math.prod(shapes[name]) for name in routers}

    def num_bytes(self) -> int:
        return int(sum(self.weight_bytes().values()))

    def _bytes_of(self, format: str) -> float:
        """A weight's, which the instruction set has a say in."""
        if format not in self._sizes:
            rows = 64  # whole groups of every instruction set
            matrix = cpu.module().Matrix(format, rows, BLOCK, self._isa)
            self._sizes[format] = float(matrix.num_bytes / (rows * BLOCK))
        return self._sizes[format]


class NativeDecoder:
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
        """`scale_keys`: channels of keys and queries are scaled for a KV cache in int8
        (`key_scales.py`)."""
        self.spec = spec = packing.spec
        self.isa = isa
        self._logits = np.empty((0, spec.vocab_size), np.float32)
        load = _Loader(packing, isa, scale_keys)
        with ThreadPoolExecutor(max(threads, threads_prefill)) as pool:
            embed = pool.submit(load.matrix, ["embed"])
            layers = list(pool.map(load.layer, range(spec.num_layers)))
            tied = spec.tie_embeddings
            head = embed if tied else pool.submit(load.matrix, ["head"], spec.head_bias)
        self.model = cpu.module().Model(
            isa=isa,
            layers=layers,
            embed=embed.result(),
            head=head.result(),
            final_norm=load.vector("final_norm"),
            final_norm_bias=load.vector("final_norm_bias") if spec.norm_bias else None,
            positions=load.vector("positions", max_len) if spec.learned_positions else None,
            layer_norms=spec.norm == "layer",
            ropes=[
                (*rope_tables(rope, max_len), query_scales(rope, max_len)) for rope in spec.ropes()
            ],
            eps=spec.norm_eps,
            embed_scale=spec.embed_scale,
            residual_scale=spec.residual_scale,
            logit_scale=spec.logit_scale,
            logit_softcap=spec.logit_softcap,
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
        """The logits of a step's tokens `which`, in memory that the next step reuses.

        `tables` and `caches` have one entry for each KV group. Slots are [n, (row, position,
        index)], several of one row if it has drafts; chunks [n, (row, start, size, index)]. The
        index is the (first) token's place in the cache, the position its place in the text.
        `keep_all`: `logits` of others may be asked for, so the last layer works for all of them.
        """
        out = self._rows(len(which))
        self.model.forward(tokens, tables, caches, slots, chunks, which, out, keep_all)
        return out

    def logits(self, which: Ints) -> Floats:
        """Of more tokens of the last step, which was kept."""
        out = self._rows(len(which))
        self.model.logits(which, out)
        return out

    def _rows(self, count: int) -> Floats:
        if count > len(self._logits):
            self._logits = np.empty((count, self.spec.vocab_size), np.float32)
        return self._logits[:count]


class _Loader:
    """Reads weights and packs them; nothing of it is needed afterwards."""

    def __init__(self, packing: Packing, isa: str, scale_keys: bool) -> None:
        self._scale_keys = scale_keys
        self._packing, self._isa, self._native = packing, isa, cpu.module()
        self._ropes, self._shapes = packing.spec.ropes(), packing.spec.weight_shapes()
        self._places = {  # layer → its KV group, and which layer of it
            layer: (number, place)
            for number, group in enumerate(packing.spec.kv_groups())
            for place, layer in enumerate(group.layers)
        }

    def layer(self, index: int) -> Any:
        spec, at = self._packing.spec, f"layers.{index}."
        layer = spec.layers[index]
        attention, mlp = layer.attention, layer.mlp
        names = layer.weight_shapes(spec.hidden_size, spec.norm_bias)
        vectors = [name for name in names if name.endswith(("_norm", "_norm_bias", "sinks"))]
        group, in_group = self._places[index]
        return self._native.Layer(
            qkv=self.matrix([at + name for name in projections(attention)], attention.qkv_bias),
            latent=self._latent(attention, at),
            o=self.matrix([at + "o"], attention.output_bias),
            **self._experts(mlp, at) if isinstance(mlp, ExpertsSpec) else self._mlp(mlp, at),
            **{name: self.vector(at + name) for name in vectors if "_a_" not in name},
            heads=attention.num_heads,
            kv_heads=attention.num_kv_heads,
            dim=attention.head_dim,
            **self._key_scales(index),
            scale=attention.scale,
            softcap=attention.softcap,
            window=attention.window or 0,
            parallel=layer.parallel,
            rope=self._ropes.index(attention.rope),
            rope_dim=attention.rope.dim,
            group=group,
            in_group=in_group,
        )

    def _key_scales(self, index: int) -> dict[str, Floats]:
        if not self._scale_keys:
            return {}
        return {"key_scales": key_scales(self._packing.spec, self._packing.source, index).ravel()}

    def _latent(self, part: AttentionSpec, at: str) -> Any:
        latent = part.latent
        if latent is None:
            return None
        heads, nope = part.num_heads, part.nope_dim
        if latent.split:
            made = {
                "keys_transposed": self._by_head(at + "k_b", heads),
                "keys": self._by_head(at + "k_b", heads, transposed=True),
                "values": self._by_head(at + "v_b", heads),
            }
        else:
            made = {
                "keys": self._by_head(at + "kv_b", heads, slice(nope)),
                "keys_transposed": self._by_head(at + "kv_b", heads, slice(nope), transposed=True),
                "values": self._by_head(at + "kv_b", heads, slice(nope, None)),
            }
        return self._native.Latent(
            q_b=self.matrix([at + "q_b"]) if latent.q_lora_rank else None,
            **made,
            q_a_norm=self.vector(at + "q_a_norm") if latent.q_lora_rank else None,
            kv_a_norm=self.vector(at + "kv_a_norm"),
            eps=latent.norm_eps,
            value_dim=latent.value_dim,
        )

    def _by_head(
        self, name: str, heads: int, rows: slice = ALL_ROWS, transposed: bool = False
    ) -> Any:
        """Some rows (or columns, `transposed`) of each head of a weight, each head's from a whole
        group of rows on."""
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
        source.forget(name)
        return made

    def _packed_heads(
        self,
        format: str,
        floats: Floats,
        type: BlockType | None = None,
        blocks: npt.NDArray[np.uint8] | None = None,
    ) -> Any:
        """[heads, rows, columns]; `blocks`: the same in blocks of that type."""
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

    def _mlp(self, mlp: MLPSpec, at: str) -> dict[str, Any]:
        return {
            "gate_up": self.matrix([at + name for name in mlp.gate_up], mlp.bias),
            "down": self.matrix([f"{at}down"], mlp.bias),
            **_activation(mlp),
        }

    def _experts(self, mlp: ExpertsSpec, at: str) -> dict[str, Any]:
        """The layer's own MLP is the shared one, if there is any."""
        each = [self._mlp(mlp.expert, f"{at}experts.{n}.") for n in range(mlp.num_experts)]
        experts = self._native.Experts(
            router=self._router(mlp, at),
            gate_up=[one["gate_up"] for one in each],
            down=[one["down"] for one in each],
            correction=self.vector(f"{at}router_correction")
            if mlp.routing.correction_bias
            else None,
            shared_gate=mlp.shared_gate,
            **mlp.routing.rule(),
        )
        shared = {} if mlp.shared is None else self._mlp(mlp.shared, f"{at}shared.")
        return _activation(mlp.expert) | shared | {"experts": experts}

    def _router(self, mlp: ExpertsSpec, at: str) -> Any:
        """In floats, and with the shared expert's gate as its last row."""
        rows, hidden = mlp.num_experts, self._packing.spec.hidden_size
        matrix = self._native.Matrix("f32", rows + int(mlp.shared_gate), hidden, self._isa)
        places = np.arange(rows, dtype=np.int32)
        matrix.put_floats(self.vector(f"{at}router"), places)
        if mlp.routing.bias:
            matrix.put_bias(self.vector(f"{at}router_bias"), places)
        if mlp.shared_gate:
            gate = self.vector(f"{at}shared_gate").reshape(1, -1)
            matrix.put_floats(gate, np.array([rows], np.int32))
        return matrix

    def vector(self, name: str, count: int | None = None) -> Floats:
        """A weight as floats, or the first `count` rows of it."""
        values = np.ascontiguousarray(self._packing.source.floats(name, slice(count)))
        if not np.isfinite(values).all():
            raise not_finite(self._packing.source, name)
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
        in_turn = names[0].endswith(".gate")
        for name, places in _places(names, shapes, in_turn):
            try:
                self._put(matrix, format, name, places)
            except ModelError:
                raise
            except ValueError:  # the shapes have been checked
                raise not_finite(self._packing.source, name) from None
            if biased:
                matrix.put_bias(self.vector(name + "_bias"), places)
        return matrix

    def _blocks_of(self, name: str) -> PackedMatrix | None:
        """Of what the file has in blocks."""
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
        source.forget(name)

    def _put_floats(self, matrix: Any, format: str, name: str, rows: slice, places: Ints) -> None:
        values = np.ascontiguousarray(self._packing.source.floats(name, rows))
        importance, type = self._packing.importance.get(name), ROUNDED.get(format)
        if importance is None or type is None or values.shape[1] % BLOCK:
            matrix.put_floats(values, places)
        else:
            matrix.put_blocks(str(type), rounded_blocks(type, values, importance), places, None)


def _attention_matrices(part: AttentionSpec) -> list[tuple[str, ...]]:
    """Likewise. Of kv_b, keys and values are apart."""
    if part.latent is None:
        return [projections(part), ("o",)]
    others = [name for name in part.weight_shapes(1) if name in ("q_b", *LATENT_EXPANDING, "o")]
    return [projections(part), *((name,) for name in others)]


def _activation(mlp: MLPSpec) -> dict[str, Any]:
    how = mlp.activation
    if isinstance(how, str):
        return {"activation": how, "gated": mlp.gated}
    return {"activation": how.kind, "alpha": how.alpha, "limit": how.limit, "gated": mlp.gated}


def _mlp_matrices(mlp: MLPSpec | ExpertsSpec) -> list[list[str]]:
    """Those that are kept side by side."""
    if isinstance(mlp, MLPSpec):
        return [[*mlp.gate_up], ["down"]]
    found = {f"experts.{n}.": mlp.expert for n in range(mlp.num_experts)}
    found |= {} if mlp.shared is None else {"shared.": mlp.shared}
    return [
        [at + name for name in names] for at, one in found.items() for names in _mlp_matrices(one)
    ]


def _places(
    names: Sequence[str], shapes: dict[str, tuple[int, ...]], in_turn: bool
) -> list[tuple[str, Ints]]:
    """Where each matrix's rows go: one matrix after another, or (gate and up) a block of each in
    turn, so that a block of both is finished at one time."""
    if not in_turn:
        ends = np.cumsum([shapes[name][0] for name in names])
        return [
            (name, np.arange(end - shapes[name][0], end, dtype=np.int32))
            for name, end in zip(names, ends, strict=True)
        ]
    rows = np.arange(shapes[names[0]][0])
    unit = rows // BLOCK
    size = np.minimum(BLOCK, len(rows) - unit * BLOCK)  # the last may be smaller
    first = unit * 2 * BLOCK + rows % BLOCK
    return [(name, (first + n * size).astype(np.int32)) for n, name in enumerate(names)]


def default_threads(engines: int = 1) -> int:
    """As many as each of so many engines may use at one time: affinity, and the cgroup's share."""
    allowed = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()
    return max(1, min(allowed or 1, _cgroup_cpus()) // engines)


def _cgroup_cpus() -> int:
    try:
        with open("/sys/fs/cgroup/cpu.max", encoding="ascii") as file:
            quota, period = file.read().split()
        return max(1, round(int(quota) / int(period)))
    except (OSError, ValueError):  # none, or "max"
        return 1 << 16
