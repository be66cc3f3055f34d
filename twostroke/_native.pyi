"""Type stubs of the native module (`native/src/module.cpp`). All arrays are C-contiguous."""

from collections.abc import Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

_Bytes = npt.NDArray[np.uint8]
_Floats = npt.NDArray[np.float32]
_Cache = npt.NDArray[np.uint16] | npt.NDArray[np.int8]
_Ints = npt.NDArray[np.int32]
_Keys = npt.NDArray[np.uint32]

def common_format(types: Sequence[str]) -> str: ...
def dot_rate(isa: str, threads: int) -> float: ...
def fp16_rate(isa: str, threads: int) -> float: ...

head_rows: int

def has_fp16_products(isa: str) -> bool: ...
def isas() -> list[str]: ...
def lanes(isa: str) -> int: ...
def matrix_unit_min_tokens(isa: str) -> int: ...
def sample(
    logits: _Floats,
    tokens: _Ints,
    where: _Ints,
    params: _Floats,
    keys: _Keys,
    out: _Ints,
    isa: str = "auto",
    model: Model | None = None,
) -> None: ...
def top_logprobs(
    logits: _Floats,
    tokens: _Ints,
    ids: _Ints,
    values: _Floats,
    ranks: _Ints,
    isa: str = "auto",
    model: Model | None = None,
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
        self,
        x: _Floats,
        out: _Floats,
        isa: str = "auto",
        exact: bool = False,
        with_residual: bool = False,
    ) -> None: ...

class Model:
    def __init__(
        self,
        *,
        spec: dict[str, Any],
        weights: dict[str, Matrix | _Floats],
        ropes: Sequence[tuple[_Floats, _Floats, _Floats | None]],
        isa: str,
        threads: int,
        threads_prefill: int,
        exact: bool,
    ) -> None: ...
    @property
    def num_bytes(self) -> int: ...
    @property
    def stage_seconds(self) -> dict[str, float]: ...
    def forward(
        self,
        tokens: _Ints,
        tables: Sequence[_Ints],
        caches: Sequence[_Cache],
        slots: _Ints,
        chunks: _Ints,
        which: _Ints,
        out: _Floats,
        keep_all: bool = False,
    ) -> None: ...
    def keep_shares(self) -> None: ...
    def shares(self) -> _Floats: ...
    def logits(self, which: _Ints, out: _Floats) -> None: ...
