"""`ModelSpec`: one description of a decoder-only transformer, and everything derived from it.

The loader, the decoder, the memory plan, the cost model and the planner read the same spec. A new
model family is a mapping to it (`hf_config.py`, `gguf_config.py`), and new code only where its
mathematics is new. No torch here.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Final, Literal

RopeKind = Literal["none", "linear", "dynamic", "llama3", "yarn", "factors"]

# What every model is well within, lowest and highest: a wrong number is refused where it is read.
LAYERS: Final = (1, 1024)
VOCABULARY: Final = (1, 1 << 22)
WIDTH: Final = (1, 1 << 20)  # of the hidden state, and of the layer between up and down
HEADS: Final = (1, 1 << 12)
HEAD_DIM: Final = (1, 1 << 12)
CONTEXT: Final = (2, 1 << 24)  # tokens: one to read and one to write
NORM_EPS: Final = (1e-20, 1.0)
ROPE_THETA_MAX: Final = 1e15  # and above 1
ROPE_FACTOR: Final = (1.0, 1e6)


@dataclass(frozen=True, slots=True)
class RopeSpec:
    """Rotary embedding over the first `dim` channels of a head, halves paired (i, i + dim/2)."""

    theta: float
    dim: int
    kind: RopeKind = "none"
    factor: float = 1.0
    original_context: int = 0
    low_freq_factor: float = 1.0  # llama3
    high_freq_factor: float = 4.0
    beta_fast: float = 32.0  # yarn
    beta_slow: float = 1.0
    truncate: bool = True
    attention_factor: float = 1.0  # multiplies cos and sin
    freq_factors: tuple[float, ...] = ()  # "factors": frequency i is divided by freq_factors[i]


def yarn_attention_factor(factor: float, mscale: float = 1.0) -> float:
    """YaRN's recommended sharpening of attention for a context stretched by `factor`."""
    return 1.0 if factor <= 1 else 0.1 * mscale * math.log(factor) + 1.0


@dataclass(frozen=True, slots=True)
class LayerSpec:
    """What may differ from layer to layer. `window`: a query sees itself and window − 1 before."""

    window: int | None = None


@dataclass(frozen=True, slots=True)
class KVGroup:
    """Layers whose keys and values live and die together, so that they share block tables."""

    layers: tuple[int, ...]
    window: int | None


@dataclass(frozen=True, slots=True)
class ModelSpec:
    family: str  # "llama", "mistral", "qwen2", "qwen3": for people, no code asks
    vocab_size: int
    hidden_size: int
    intermediate_size: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    layers: tuple[LayerSpec, ...]
    rope: RopeSpec
    norm_eps: float
    max_context: int  # longest sequence the model was made for, rope scaling included
    tie_embeddings: bool = False
    qkv_bias: bool = False
    output_bias: bool = False
    mlp_bias: bool = False
    qk_norm: bool = False  # RMSNorm over each head of q and k, before rope

    @property
    def num_layers(self) -> int:
        return len(self.layers)

    @property
    def q_size(self) -> int:
        return self.num_heads * self.head_dim

    @property
    def kv_size(self) -> int:
        return self.num_kv_heads * self.head_dim

    @property
    def kv_elements_per_token(self) -> int:
        """Elements of key and value that one token leaves in all layers."""
        return 2 * self.kv_size * self.num_layers

    def kv_groups(self) -> tuple[KVGroup, ...]:
        """A window frees blocks only when every layer of the group has it."""
        windows = {layer.window for layer in self.layers}
        window = windows.pop() if len(windows) == 1 else None
        return (KVGroup(tuple(range(self.num_layers)), window),)

    def weight_shapes(self) -> dict[str, tuple[int, ...]]:
        """Every weight of the model under its canonical name, matrices as (out, in)."""
        h, i = self.hidden_size, self.intermediate_size
        shapes: dict[str, tuple[int, ...]] = {"embed": (self.vocab_size, h)}
        for n in range(self.num_layers):
            layer: dict[str, tuple[int, ...]] = {
                "attn_norm": (h,),
                "q": (self.q_size, h),
                "k": (self.kv_size, h),
                "v": (self.kv_size, h),
                "o": (h, self.q_size),
                "mlp_norm": (h,),
                "gate": (i, h),
                "up": (i, h),
                "down": (h, i),
            }
            if self.qkv_bias:
                layer |= {"q_bias": (self.q_size,), "k_bias": (self.kv_size,)}
                layer |= {"v_bias": (self.kv_size,)}
            if self.output_bias:
                layer |= {"o_bias": (h,)}
            if self.mlp_bias:
                layer |= {"gate_bias": (i,), "up_bias": (i,), "down_bias": (h,)}
            if self.qk_norm:
                layer |= {"q_norm": (self.head_dim,), "k_norm": (self.head_dim,)}
            shapes |= {f"layers.{n}.{name}": shape for name, shape in layer.items()}
        shapes["final_norm"] = (h,)
        if not self.tie_embeddings:
            shapes["head"] = (self.vocab_size, h)
        return shapes

    def shaped_by(self, name: str) -> tuple[str, ...]:
        """The fields of this spec that decide whether there is a weight, and its shape."""
        part = name.rpartition(".")[2]
        fields = ("num_layers",) if name.startswith("layers.") else ()
        return (*fields, *_SHAPED_BY[part])

    def num_parameters(self) -> int:
        return sum(math.prod(shape) for shape in self.weight_shapes().values())


_SHAPED_BY: Final = {
    "embed": ("vocab_size", "hidden_size"),
    "head": ("vocab_size", "hidden_size", "tie_embeddings"),
    "q": ("num_heads", "head_dim", "hidden_size"),
    "k": ("num_kv_heads", "head_dim", "hidden_size"),
    "v": ("num_kv_heads", "head_dim", "hidden_size"),
    "o": ("hidden_size", "num_heads", "head_dim"),
    "gate": ("intermediate_size", "hidden_size"),
    "up": ("intermediate_size", "hidden_size"),
    "down": ("hidden_size", "intermediate_size"),
    "q_bias": ("family", "qkv_bias", "num_heads", "head_dim"),
    "k_bias": ("family", "qkv_bias", "num_kv_heads", "head_dim"),
    "v_bias": ("family", "qkv_bias", "num_kv_heads", "head_dim"),
    "o_bias": ("family", "output_bias", "hidden_size"),
    "gate_bias": ("mlp_bias", "intermediate_size"),
    "up_bias": ("mlp_bias", "intermediate_size"),
    "down_bias": ("mlp_bias", "hidden_size"),
    "q_norm": ("family", "qk_norm", "head_dim"),
    "k_norm": ("family", "qk_norm", "head_dim"),
} | dict.fromkeys(("attn_norm", "mlp_norm", "final_norm"), ("hidden_size",))
