"""`NativeDecoder`: the decoder of `decoder.py` in C++ (`native/`), for CPUs.

Weights stay as the file packs them, in an order that the CPU likes: nothing is lost. Activations
are rounded to blocks of 8 bits before each product with a packed matrix, and attention is computed
in halves or bfloat16 where the machine does that, unless `exact`.
"""

from __future__ import annotations

import math
import os
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import numpy as np
import numpy.typing as npt

from twostroke.errors import ModelError
from twostroke.kernels import cpu
from twostroke.model.block_types import BlockType
from twostroke.model.rope import rope_tables
from twostroke.model.spec import ModelSpec
from twostroke.model.weights import WeightSource, not_finite
from twostroke.model.weights.gguf import GGUFWeights

BLOCK = 32  # weights that share a scale
DENSE = {BlockType.F32, BlockType.F16, BlockType.BF16}
QUANTIZATION = {"int4": "q4", "int8": "q8"}
ELEMENTS_AT_ONCE = 1 << 22  # of a matrix that is read as floats

Places = npt.NDArray[np.int32]
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
    ) -> None:
        self.spec, self.source, self._isa = spec, source, isa
        self._dense = self._format_of({"bfloat16": "bf16", "float16": "f16"}.get(dtype, "f32"))
        self._quantised = None if quantization is None else QUANTIZATION[quantization]

    def format(self, names: Sequence[str]) -> str:
        """One for all of them: the smallest that loses nothing of what the file has."""
        if not isinstance(self.source, GGUFWeights):
            return self._quantised or self._dense
        types = {self.source.type(name) for name in names}
        dense, packed = types & DENSE, types - DENSE
        formats = set()
        if packed:
            formats.add(str(cpu.module().common_format([str(type) for type in packed])))
        if dense:
            one = str(*dense).lower() if len(dense) == 1 else "f32"
            formats.add(self._quantised or self._format_of(one))
        return formats.pop() if len(formats) == 1 else "f32"

    def _format_of(self, dense: str) -> str:
        """Of a file's floats. In halves, which some machines multiply, bfloat16 loses nothing but
        the last bits of weights below 10^-7."""
        if dense != "f32" and cpu.module().has_half_products(self._isa):
            return "f16"
        return "bf16" if dense == "bf16" else "f32"

    def matrices(self) -> list[list[str]]:
        layers = range(self.spec.num_layers)
        parts = (("q", "k", "v"), ("o",), ("gate", "up"), ("down",))
        found = [[f"layers.{n}.{name}" for name in names] for n in layers for names in parts]
        return [*found, ["embed"], *([] if self.spec.tie_embeddings else [["head"]])]

    def weight_bytes(self) -> dict[str, float]:
        """Of each matrix, in the format that it is kept in."""
        shapes = self.spec.weight_shapes()
        sizes: dict[str, float] = {}
        for names in self.matrices():
            each = self._bytes_of(self.format(names))
            sizes |= {name: float(each * np.prod(shapes[name])) for name in names}
        return sizes

    def num_bytes(self) -> int:
        return int(sum(self.weight_bytes().values()))

    def _bytes_of(self, format: str) -> float:
        """A weight's, which the instruction set has a say in."""
        rows = 64  # whole groups of every instruction set
        matrix = cpu.module().Matrix(format, rows, BLOCK, self._isa)
        return float(matrix.num_bytes / (rows * BLOCK))


class NativeDecoder:
    def __init__(
        self,
        packing: Packing,
        max_len: int,
        threads: int,
        threads_prefill: int,
        isa: str = "auto",
        exact: bool = False,
    ) -> None:
        self.spec = spec = packing.spec
        self.isa = isa
        self._logits = np.empty((0, spec.vocab_size), np.float32)
        load = _Loader(packing, isa)
        with ThreadPoolExecutor(max(threads, threads_prefill)) as pool:
            embed = pool.submit(load.matrix, ["embed"])
            layers = list(pool.map(load.layer, range(spec.num_layers)))
            head = embed if spec.tie_embeddings else pool.submit(load.matrix, ["head"])
        cos, sin = rope_tables(spec.rope, max_len)
        self.model = cpu.module().Model(
            isa,
            spec.vocab_size,
            spec.hidden_size,
            spec.intermediate_size,
            spec.num_heads,
            spec.num_kv_heads,
            spec.head_dim,
            spec.norm_eps,
            layers,
            embed.result(),
            head.result(),
            load.vector("final_norm"),
            cos,
            sin,
            threads,
            threads_prefill,
            exact,
        )

    def forward(
        self,
        tokens: Places,
        table: Places,
        cache: Any,
        slots: Places,
        chunks: Places,
        which: Places,
        keep_all: bool = False,
    ) -> Floats:
        """A step: slots [n, (row, position)], chunks [n, (row, start, size)]; the logits of its
        tokens `which`, in memory that the next step takes again. `keep_all`: `logits` of others
        may be asked for, so the last layer works for all of them."""
        out = self._rows(len(which))
        self.model.forward(tokens, table, cache, slots, chunks, which, out, keep_all)
        return out

    def logits(self, which: Places) -> Floats:
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

    def __init__(self, packing: Packing, isa: str) -> None:
        self._packing, self._isa, self._native = packing, isa, cpu.module()

    def layer(self, index: int) -> Any:
        spec, at = self._packing.spec, f"layers.{index}."
        none = np.empty(0, np.float32)
        return self._native.Layer(
            self.matrix([at + "q", at + "k", at + "v"], spec.qkv_bias),
            self.matrix([at + "o"], spec.output_bias),
            self.matrix([at + "gate", at + "up"], spec.mlp_bias),
            self.matrix([at + "down"], spec.mlp_bias),
            self.vector(at + "attn_norm"),
            self.vector(at + "mlp_norm"),
            self.vector(at + "q_norm") if spec.qk_norm else none,
            self.vector(at + "k_norm") if spec.qk_norm else none,
            spec.layers[index].attention.window or 0,
        )

    def vector(self, name: str) -> Floats:
        values = np.ascontiguousarray(self._packing.source.floats(name))
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
        shapes = self._packing.spec.weight_shapes()
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

    def _put(self, matrix: Any, format: str, name: str, places: Places) -> None:
        source = self._packing.source
        if format != "f32" and isinstance(source, GGUFWeights) and source.type(name) not in DENSE:
            packed = source.packed(name)
            matrix.put_blocks(str(packed.type), np.ascontiguousarray(packed.rows), places)
        else:
            rows = max(1, ELEMENTS_AT_ONCE * len(places) // math.prod(source.shape(name) or ()))
            for first in range(0, len(places), rows):
                part = slice(first, first + rows)
                matrix.put_floats(np.ascontiguousarray(source.floats(name, part)), places[part])
        source.forget(name)


def _places(
    names: Sequence[str], shapes: dict[str, tuple[int, ...]], in_turn: bool
) -> list[tuple[str, Places]]:
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


def default_threads() -> int:
    """As many as this process may use at one time: its affinity, and its cgroup's share."""
    allowed = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()
    return max(1, min(allowed or 1, _cgroup_cpus()))


def _cgroup_cpus() -> int:
    try:
        with open("/sys/fs/cgroup/cpu.max", encoding="ascii") as file:
            quota, period = file.read().split()
        return max(1, round(int(quota) / int(period)))
    except (OSError, ValueError):  # none, or "max"
        return 1 << 16
