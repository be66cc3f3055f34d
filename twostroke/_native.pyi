"""native/src/module.cpp, for type checkers. Arrays are C-contiguous."""

from collections.abc import Sequence

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

class Latent:
    def __init__(
        self,
        *,
        q_b: Matrix | None = None,
        keys: Matrix,
        values: Matrix,
        keys_transposed: Matrix,
        q_a_norm: _Floats | None = None,
        kv_a_norm: _Floats,
        eps: float,
        value_dim: int,
    ) -> None: ...

class Layer:
    def __init__(
        self,
        *,
        qkv: Matrix,
        o: Matrix,
        latent: Latent | None = None,
        gate_up: Matrix,
        down: Matrix,
        heads: int,
        kv_heads: int,
        dim: int,
        scale: float,
        softcap: float = 0.0,
        window: int = 0,
        activation: str = "silu",
        alpha: float = 1.0,
        limit: float = 0.0,
        gated: bool = True,
        parallel: bool = False,
        attn_norm: _Floats | None = None,
        mlp_norm: _Floats | None = None,
        attn_post_norm: _Floats | None = None,
        mlp_post_norm: _Floats | None = None,
        attn_norm_bias: _Floats | None = None,
        mlp_norm_bias: _Floats | None = None,
        attn_post_norm_bias: _Floats | None = None,
        mlp_post_norm_bias: _Floats | None = None,
        q_norm: _Floats | None = None,
        k_norm: _Floats | None = None,
        key_scales: _Floats | None = None,
        sinks: _Floats | None = None,
        rope: int = 0,
        rope_dim: int = 0,
        group: int = 0,
        in_group: int,
    ) -> None: ...

class Model:
    def __init__(
        self,
        *,
        isa: str,
        layers: Sequence[Layer],
        embed: Matrix,
        head: Matrix,
        final_norm: _Floats,
        ropes: Sequence[tuple[_Floats, _Floats, _Floats | None]],
        eps: float,
        embed_scale: float = 1.0,
        residual_scale: float = 1.0,
        logit_scale: float = 1.0,
        logit_softcap: float = 0.0,
        layer_norms: bool = False,
        final_norm_bias: _Floats | None = None,
        positions: _Floats | None = None,
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
