"""native/src/module.cpp, for type checkers. Arrays are C-contiguous."""

import numpy as np
import numpy.typing as npt

_Bytes = npt.NDArray[np.uint8]
_Floats = npt.NDArray[np.float32]
_Halves = npt.NDArray[np.uint16]
_Ints = npt.NDArray[np.int32]
_Keys = npt.NDArray[np.uint32]

def dot_rate(isa: str, threads: int) -> float: ...
def isas() -> list[str]: ...
def wide_from(isa: str) -> int: ...
def lanes(isa: str) -> int: ...
def sample(
    logits: _Floats,
    tokens: _Ints,
    where: _Ints,
    wishes: _Floats,
    keys: _Keys,
    out: _Ints,
    isa: str = "auto",
) -> None: ...

class Matrix:
    def __init__(self, format: str, rows: int, cols: int, isa: str = "auto") -> None: ...
    @property
    def num_bytes(self) -> int: ...
    def put_blocks(
        self, type: str, data: _Bytes, place: _Ints, grid: npt.NDArray[np.int8] | None = None
    ) -> None: ...
    def put_floats(self, data: _Floats, place: _Ints) -> None: ...
    def put_bias(self, data: _Floats, place: _Ints) -> None: ...
    def rows(self, out: _Floats, isa: str = "auto") -> None: ...
    def multiply(
        self, x: _Floats, out: _Floats, isa: str = "auto", exact: bool = False
    ) -> None: ...

class Layer:
    def __init__(
        self,
        qkv: Matrix,
        o: Matrix,
        gate_up: Matrix,
        down: Matrix,
        attn_norm: _Floats,
        mlp_norm: _Floats,
        q_norm: _Floats,
        k_norm: _Floats,
        window: int,
    ) -> None: ...

class Model:
    def __init__(
        self,
        isa: str,
        vocab: int,
        hidden: int,
        inner: int,
        heads: int,
        kv_heads: int,
        dim: int,
        eps: float,
        layers: list[Layer],
        embed: Matrix,
        head: Matrix,
        final_norm: _Floats,
        cos: _Floats,
        sin: _Floats,
        threads: int,
        threads_prefill: int,
        exact: bool,
    ) -> None: ...
    @property
    def num_bytes(self) -> int: ...
    @property
    def spent(self) -> dict[str, float]: ...
    def forward(
        self,
        tokens: _Ints,
        tables: _Ints,
        cache: _Halves,
        slots: _Ints,
        chunks: _Ints,
        which: _Ints,
        out: _Floats,
    ) -> None: ...
    def logits(self, which: _Ints, out: _Floats) -> None: ...
