"""`ModelSpec`: a decoder-only transformer as data, with the properties derived from it.

    layer       x += post_norm(attention(pre_norm(x)));  x += post_norm(mlp(pre_norm(x)))
                parallel: x += attention(pre_norm(x)) + mlp(pre_norm(x))
    attention   q, k, v → q/k norm → rope → softmax(softcap(scale · q kᵀ)) v → output projection
                queries may have a factor that depends on their position, after rope
                sinks: the softmax has one more score per head, without a value
                latent: k and v are made from a vector that all heads share; only it is cached
    mlp         down(activation(gate x) · up x), or down(activation(up x)); see `ClampedSwiglu`
    experts     Σ weight · mlp(x) over the experts that a router chooses for the token, + shared mlp

The loader, the decoders, the memory plan, the cost model and the planner read the same spec. A new
model family is a mapping to it (`hf_families.py`, `gguf_config.py`), and new code only where its
mathematics is new. No torch here.
"""

from __future__ import annotations

import math
from collections.abc import Collection
from dataclasses import asdict, dataclass, replace
from typing import Any, Final, Literal

from twostroke.kernels.activations import Activation
from twostroke.kv.block_layout import side_bytes

RopeKind = Literal["none", "linear", "dynamic", "llama3", "yarn", "factors", "longrope", "identity"]
QKNorm = Literal["none", "head", "full"]  # RMSNorm of q and k over each head, or over all heads
Norm = Literal["rms", "layer"]  # "layer": minus the mean, divided by the standard deviation
Scoring = Literal["softmax", "sigmoid"]
GroupScore = Literal["max", "top2_sum"]  # of the scores of a group's experts

# Bounds of all known models, lowest and highest. A number outside is refused when it is read.
LAYERS: Final = (1, 1024)
VOCABULARY: Final = (1, 1 << 22)
WIDTH: Final = (1, 1 << 20)  # hidden size, and intermediate size of an MLP
HEADS: Final = (1, 1 << 12)
HEAD_DIM: Final = (1, 1 << 12)
LATENT_RANK: Final = (1, 1 << 14)
EXPERTS: Final = (1, 1 << 10)  # of a layer
CONTEXT: Final = (2, 1 << 24)  # tokens: at least one of prompt and one of output
NORM_EPS: Final = (1e-20, 1.0)
ROPE_THETA_MAX: Final = 1e15  # and above 1
ROPE_FACTOR: Final = (1.0, 1e6)
SOFTCAP_MAX: Final = 1e6
MULTIPLIER_MAX: Final = 1e6  # of embeddings, scores, residuals and logits; and above 0


@dataclass(frozen=True, slots=True)
class RopeSpec:
    """Rotary embedding of the first `dim` channels of a head, in pairs (i, i + dim/2)."""

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
    # "longrope": replaces freq_factors if max_model_len is at most original_context
    short_factors: tuple[float, ...] = ()
    # A query at position p is multiplied by 1 + query_beta · log(1 + ⌊p / query_span⌋) after rope:
    # the first query_span queries by 1, the next by 1 + query_beta · log 2. Not with latents.
    query_beta: float = 0.0  # 0: no factor
    query_span: int = 0


# The rope of a layer without rope: angles of 0 for the fewest channels that kernels accept.
NO_ROPE: Final = RopeSpec(1.0, 2, "identity")


def yarn_attention_factor(factor: float, mscale: float = 1.0) -> float:
    """Return YaRN's recommended factor of attention for a context extended by `factor`."""
    return 1.0 if factor <= 1 else 0.1 * mscale * math.log(factor) + 1.0


@dataclass(frozen=True, slots=True)
class LatentSpec:
    """Multi-head latent attention (MLA): the projections of keys and values, and the cached vector.

        x ─ kv_a ─▶ [ latent: kv_lora_rank │ rope key: rope.dim ]        one of each for all heads
        latent ─ norm ─ kv_b ─▶ of each head [ key without rope │ value ]
        x ─ q_a ─▶ norm ─ q_b ─▶ of each head [ query without rope │ query with rope ]

    The cache holds the normed latent and the rotated rope key. Prefill computes attention in the
    expanded form, with the keys and values above. Decode computes it in the space of the latents: a
    head's query is multiplied by its rows of kv_b, q · (W latent) = (qᵀ W) · latent. So the latent
    is the key and the value of all heads, and kv_b expands the value once per query and not once
    per position.
    """

    kv_lora_rank: int
    q_lora_rank: int  # 0: queries are projected from x directly
    value_dim: int  # of a head
    norm_eps: float = 1e-6  # of the norms of both latents, independent of the other norms
    # kv_b is stored as two weights: k_b for keys, transposed for each head, and v_b for values.
    split: bool = False


@dataclass(frozen=True, slots=True)
class AttentionSpec:
    """The attention of a layer: heads that share keys and values in groups.

    `window`: a query sees itself and window − 1 positions before it. `scale` multiplies the scores,
    `softcap` limits them to ±softcap. With `latent`, the last `rope.dim` channels of a head have
    rope.
    """

    num_heads: int
    num_kv_heads: int
    head_dim: int
    rope: RopeSpec
    scale: float
    window: int | None = None
    softcap: float = 0.0  # 0: none
    qk_norm: QKNorm = "none"
    qkv_bias: bool = False
    output_bias: bool = False
    sinks: bool = False  # each head has a learned score without a key
    latent: LatentSpec | None = None

    def __post_init__(self) -> None:
        # No kernel of latent attention multiplies queries.
        assert self.latent is None or not self.rope.query_beta

    def rule(self) -> dict[str, Any]:
        """Return the fields of `kernels.records.AttentionRule` that are not weights."""
        return {name: getattr(self, name) for name in ("scale", "window", "softcap")}

    @property
    def q_size(self) -> int:
        return self.num_heads * self.head_dim

    @property
    def kv_size(self) -> int:
        return self.num_kv_heads * self.head_dim

    @property
    def group_size(self) -> int:
        """Query heads that share one key and value head."""
        return self.num_heads // self.num_kv_heads

    @property
    def value_dim(self) -> int:
        return self.head_dim if self.latent is None else self.latent.value_dim

    @property
    def output_size(self) -> int:
        """Channels of attention's output, before the output projection."""
        return self.num_heads * self.value_dim

    @property
    def nope_dim(self) -> int:
        """Channels without rope in a head of a latent layer."""
        return self.head_dim - self.rope.dim

    @property
    def cached_shape(self) -> tuple[int, int, int]:
        """Heads of a cached token, their channels, and the channels of the latent."""
        if self.latent is None:
            return self.num_kv_heads, self.head_dim, 0
        return 1, self.latent.kv_lora_rank + self.rope.dim, self.latent.kv_lora_rank

    @property
    def prefill_channels(self) -> int:
        """Channels that one query of all heads multiplies for one cached token: keys and values."""
        return self.q_size + self.output_size

    @property
    def decode_channels(self) -> int:
        """`prefill_channels` in the form that decode computes."""
        if self.latent is None:
            return self.prefill_channels
        return self.num_heads * (2 * self.latent.kv_lora_rank + self.rope.dim)

    def weight_shapes(self, hidden_size: int) -> dict[str, tuple[int, ...]]:
        """Return the shapes of matrices, (out, in), and of the norms of latents."""
        h, q, kv, latent = hidden_size, self.q_size, self.kv_size, self.latent
        if latent is None:
            return {"q": (q, h), "k": (kv, h), "v": (kv, h), "o": (h, q)}
        rank, q_rank = latent.kv_lora_rank, latent.q_lora_rank
        shapes: dict[str, tuple[int, ...]] = {"q": (q, h)}
        if q_rank:
            shapes = {"q_a": (q_rank, h), "q_a_norm": (q_rank,), "q_b": (q, q_rank)}
        expanded = self.num_heads * (self.nope_dim + self.value_dim)
        shapes |= {"kv_a": (rank + self.rope.dim, h), "kv_a_norm": (rank,)}
        if latent.split:
            shapes |= {"k_b": (self.num_heads * rank, self.nope_dim)}
            shapes |= {"v_b": (self.output_size, rank)}
        else:
            shapes |= {"kv_b": (expanded, rank)}
        return shapes | {"o": (h, self.output_size)}


LATENT_EXPANDING: Final = ("kv_b", "k_b", "v_b")  # the projections from a latent to keys and values


def input_projections(spec: AttentionSpec) -> tuple[str, ...]:
    """Return the matrices of attention that read the hidden state."""
    if spec.latent is None:
        return "q", "k", "v"
    return "q_a" if spec.latent.q_lora_rank else "q", "kv_a"


@dataclass(frozen=True, slots=True)
class MLPSpec:
    intermediate_size: int
    activation: Activation = "silu"
    bias: bool = False
    gated: bool = True

    @property
    def width(self) -> int:
        """Channels of a token between the up and the down projection."""
        return self.intermediate_size

    @property
    def gate_up(self) -> tuple[str, ...]:
        """The matrices that are multiplied in one matmul."""
        return ("gate", "up") if self.gated else ("up",)

    def weight_shapes(self, hidden_size: int) -> dict[str, tuple[int, ...]]:
        h, i = hidden_size, self.intermediate_size
        shapes: dict[str, tuple[int, ...]] = {"gate": (i, h)} if self.gated else {}
        shapes |= {"up": (i, h), "down": (h, i)}
        if self.bias:
            shapes |= {f"{name}_bias": shape[:1] for name, shape in shapes.items()}
        return shapes


@dataclass(frozen=True, slots=True)
class RoutingSpec:
    """The routing rule: the choice of a token's experts, and the weights of their outputs.

    Scores are the softmax or the sigmoid of the router's output. The `experts_per_token` experts
    with the highest score + correction bias are chosen; with groups, only from the `groups_used`
    best groups. An expert's weight is its score, divided by the sum of the chosen scores
    (`normalised`), times `scale`. A softmax over the chosen experts equals a normalised softmax
    over all.
    """

    experts_per_token: int
    scoring: Scoring = "softmax"
    normalised: bool = True
    scale: float = 1.0
    bias: bool = False  # of the router's matrix
    correction_bias: bool = False
    num_groups: int = 1
    groups_used: int = 1
    group_score: GroupScore = "max"

    def rule(self) -> dict[str, Any]:
        """Return the fields of `kernels.records.RoutingRule`: all but those about weights."""
        found = asdict(self)
        del found["bias"], found["correction_bias"]
        return found


@dataclass(frozen=True, slots=True)
class ExpertsSpec:
    """A mixture of experts instead of an MLP.

    Each token uses a few of `num_experts` MLPs and, if there is one, the `shared` MLP. With
    `shared_gate` the shared output is multiplied by the sigmoid of a projection.
    """

    num_experts: int
    expert: MLPSpec
    routing: RoutingSpec
    shared: MLPSpec | None = None
    shared_gate: bool = False

    @property
    def width(self) -> int:
        """Channels of a token between up and down projection, in all its experts."""
        chosen = self.routing.experts_per_token * self.expert.intermediate_size
        return chosen + (0 if self.shared is None else self.shared.intermediate_size)

    def weight_shapes(self, hidden_size: int) -> dict[str, tuple[int, ...]]:
        """Return the shapes. Each expert has its own weights (`experts.7.gate`), even if a file
        stacks them."""
        shapes: dict[str, tuple[int, ...]] = {"router": (self.num_experts, hidden_size)}
        shapes |= {"router_bias": (self.num_experts,)} if self.routing.bias else {}
        shapes |= {"router_correction": (self.num_experts,)} if self.routing.correction_bias else {}
        each = self.expert.weight_shapes(hidden_size)
        for number in range(self.num_experts):
            shapes |= {f"experts.{number}.{name}": shape for name, shape in each.items()}
        if self.shared is not None:
            own = self.shared.weight_shapes(hidden_size)
            shapes |= {f"shared.{name}": shape for name, shape in own.items()}
        return shapes | ({"shared_gate": (hidden_size,)} if self.shared_gate else {})

    def experts_in_use(self, tokens: float) -> float:
        """Return the number of distinct experts of `tokens` tokens, if all are equally likely."""
        missed = 1 - self.routing.experts_per_token / self.num_experts
        return float(self.num_experts * (1 - missed**tokens))


@dataclass(frozen=True, slots=True)
class LayerSpec:
    """A layer. Norms are before attention and MLP, after them (before the residual), or both.
    `parallel`: the MLP reads the input of attention, through the same norm or (`two_norms`) its
    own.
    """

    attention: AttentionSpec
    mlp: MLPSpec | ExpertsSpec
    pre_norm: bool = True
    post_norm: bool = False
    parallel: bool = False
    two_norms: bool = False

    def weight_shapes(
        self, hidden_size: int, norm_bias: bool = False
    ) -> dict[str, tuple[int, ...]]:
        h = hidden_size
        q, kv, head_dim = self.attention.q_size, self.attention.kv_size, self.attention.head_dim
        shapes = self.attention.weight_shapes(h) | self.mlp.weight_shapes(h)
        norms = ["attn_norm"] if self.pre_norm else []
        norms += ["mlp_norm"] if self.pre_norm and (self.two_norms or not self.parallel) else []
        norms += ["attn_post_norm", "mlp_post_norm"] if self.post_norm else []
        shapes |= dict.fromkeys(norms, (h,))
        if norm_bias:
            shapes |= {f"{norm}_bias": (h,) for norm in norms}
        if self.attention.qkv_bias:
            shapes |= {"q_bias": (q,), "k_bias": (kv,), "v_bias": (kv,)}
        if self.attention.output_bias:
            shapes |= {"o_bias": (h,)}
        if self.attention.sinks:
            shapes |= {"sinks": (self.attention.num_heads,)}
        if self.attention.qk_norm == "head":
            shapes |= {"q_norm": (head_dim,), "k_norm": (head_dim,)}
        if self.attention.qk_norm == "full":
            shapes |= {"q_norm": (q,), "k_norm": (kv,)}
        return shapes


@dataclass(frozen=True, slots=True)
class KVGroup:
    """Layers whose cached keys and values have one shape and one window. They share block tables
    and a pool, and a block holds the tokens of all these layers.

        heads     a token caches `num_kv_heads` keys and as many values, of `head_dim` channels
        latent    a token caches one vector of `head_dim` channels: all are the key, and the first
                  `latent_dim` are the latent, which is also the value
    """

    layers: tuple[int, ...]
    window: int | None
    num_kv_heads: int
    head_dim: int
    latent_dim: int = 0  # 0: keys and values of heads

    @property
    def block_shape(self) -> tuple[int, int, int]:
        """A token's shape in a layer: keys and values (2) or one vector (1), heads, channels."""
        return 1 if self.latent_dim else 2, self.num_kv_heads, self.head_dim

    @property
    def elements_per_token(self) -> int:
        """Cached elements per token in all layers of the group."""
        return math.prod(self.block_shape) * len(self.layers)

    def block_bytes(self, block_size: int, itemsize: int, scaled: bool = False) -> int:
        """Return the bytes of a block in all layers. `scaled`: int8, a scale per head and token."""
        sides, heads, channels = self.block_shape
        return len(self.layers) * sides * side_bytes(block_size, heads, channels, itemsize, scaled)


@dataclass(frozen=True, slots=True)
class ModelSpec:
    family: str  # for messages; no code depends on it
    vocab_size: int
    hidden_size: int
    layers: tuple[LayerSpec, ...]
    norm_eps: float
    max_context: int  # longest sequence of the model, rope scaling included
    tie_embeddings: bool = False
    head_bias: bool = False
    learned_positions: bool = False  # an embedding per position, added to the token's
    embed_scale: float = 1.0
    residual_scale: float = 1.0  # of the outputs of attention and MLP
    logit_scale: float = 1.0  # before the softcap
    logit_softcap: float = 0.0  # 0: none
    norm: Norm = "rms"
    norm_bias: bool = False
    # Norms multiply by their weight in fp32 before rounding, and their weights are stored in fp32.
    norm_fp32: bool = False

    @property
    def num_layers(self) -> int:
        return len(self.layers)

    @property
    def kv_elements_per_token(self) -> int:
        """Cached elements per token in all layers."""
        return sum(group.elements_per_token for group in self.kv_groups())

    @property
    def has_latents(self) -> bool:
        return any(layer.attention.latent is not None for layer in self.layers)

    @property
    def has_experts(self) -> bool:
        return any(isinstance(layer.mlp, ExpertsSpec) for layer in self.layers)

    @property
    def expanded_kv_elements_per_token(self) -> int:
        """Elements per token if every layer cached keys and values of heads instead of latents."""
        specs = [layer.attention for layer in self.layers]
        return sum(spec.num_kv_heads * (spec.head_dim + spec.value_dim) for spec in specs)

    def kv_groups(self) -> tuple[KVGroup, ...]:
        """Return the KV groups in the order of their first layers."""
        groups: dict[tuple[int | None, int, int, int], list[int]] = {}
        for index, layer in enumerate(self.layers):
            spec = layer.attention
            groups.setdefault((spec.window, *spec.cached_shape), []).append(index)
        return tuple(KVGroup(tuple(layers), *shape) for shape, layers in groups.items())

    def ropes(self) -> tuple[RopeSpec, ...]:
        """Return the distinct ropes in the order of their first layers."""
        return tuple(dict.fromkeys(layer.attention.rope for layer in self.layers))

    def weight_shapes(self) -> dict[str, tuple[int, ...]]:
        """Return canonical name → shape of every weight, matrices as (out, in)."""
        shapes: dict[str, tuple[int, ...]] = {"embed": (self.vocab_size, self.hidden_size)}
        if self.learned_positions:
            shapes["positions"] = (self.max_context, self.hidden_size)
        for n, layer in enumerate(self.layers):
            parts = layer.weight_shapes(self.hidden_size, self.norm_bias)
            shapes |= {f"layers.{n}.{name}": shape for name, shape in parts.items()}
        shapes["final_norm"] = (self.hidden_size,)
        if self.norm_bias:
            shapes["final_norm_bias"] = (self.hidden_size,)
        if not self.tie_embeddings:
            shapes["head"] = (self.vocab_size, self.hidden_size)
        if self.head_bias:
            shapes["head_bias"] = (self.vocab_size,)
        return shapes

    def shaped_by(self, name: str) -> tuple[str, ...]:
        """Return the fields of the spec that decide whether a weight exists, and its shape."""
        part = name.rpartition(".")[2]
        fields = ("num_layers",) if name.startswith("layers.") else ()
        if ".experts." in name or ".shared." in name:
            width = "shared_intermediate_size" if ".shared." in name else "expert_intermediate_size"
            return (*fields, "num_experts", width, "hidden_size")
        if part.endswith("norm_bias"):
            return (*fields, "family", "hidden_size")
        return (*fields, *_SHAPED_BY[part])

    def num_parameters(self) -> int:
        return sum(math.prod(shape) for shape in self.weight_shapes().values())

    def num_active_parameters(self) -> int:
        """Return the parameters that one token uses: only the chosen experts of each layer."""
        idle = 0
        for layer in self.layers:
            if isinstance(layer.mlp, ExpertsSpec):
                each = layer.mlp.expert.weight_shapes(self.hidden_size).values()
                unused = layer.mlp.num_experts - layer.mlp.routing.experts_per_token
                idle += unused * sum(math.prod(shape) for shape in each)
        return self.num_parameters() - idle


def with_layers(spec: ModelSpec, **changes: Any) -> ModelSpec:
    """Return the model with these fields changed in every layer."""
    return replace(spec, layers=tuple(replace(layer, **changes) for layer in spec.layers))


def without_rope(spec: ModelSpec, layers: Collection[int]) -> ModelSpec:
    """Return the model with these layers without rope."""

    def changed(layer: LayerSpec) -> LayerSpec:
        return replace(layer, attention=replace(layer.attention, rope=NO_ROPE))

    kept = enumerate(spec.layers)
    return replace(spec, layers=tuple(changed(one) if n in layers else one for n, one in kept))


def with_query_scales(spec: ModelSpec, beta: float, span: int) -> ModelSpec:
    """Return the model with `RopeSpec`'s query factors in every layer, if `beta` is not 0."""

    def scaled(layer: LayerSpec) -> LayerSpec:
        rope = replace(layer.attention.rope, query_beta=beta, query_span=span)
        return replace(layer, attention=replace(layer.attention, rope=rope))

    return replace(spec, layers=tuple(map(scaled, spec.layers))) if beta else spec


_SHAPED_BY: Final = {
    "embed": ("vocab_size", "hidden_size"),
    "head": ("vocab_size", "hidden_size", "tie_embeddings"),
    "head_bias": ("vocab_size",),
    "positions": ("max_context", "hidden_size"),
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
    "sinks": ("num_heads",),
    "gate_bias": ("mlp_bias", "intermediate_size"),
    "up_bias": ("mlp_bias", "intermediate_size"),
    "down_bias": ("mlp_bias", "hidden_size"),
    "router": ("num_experts", "hidden_size"),
    "router_bias": ("family", "num_experts"),
    "router_correction": ("family", "num_experts"),
    "shared_gate": ("family", "hidden_size"),
    "q_norm": ("family", "qk_norm", "head_dim"),
    "k_norm": ("family", "qk_norm", "head_dim"),
    "q_a": ("q_lora_rank", "hidden_size"),
    "q_a_norm": ("q_lora_rank",),
    "q_b": ("num_heads", "nope_dim", "rope_dim", "q_lora_rank"),
    "kv_a": ("kv_lora_rank", "rope_dim", "hidden_size"),
    "kv_a_norm": ("kv_lora_rank",),
    "kv_b": ("num_heads", "nope_dim", "value_dim", "kv_lora_rank"),
    "k_b": ("num_heads", "nope_dim", "kv_lora_rank"),
    "v_b": ("num_heads", "value_dim", "kv_lora_rank"),
} | dict.fromkeys(
    ("attn_norm", "attn_post_norm", "mlp_norm", "mlp_post_norm", "final_norm"), ("hidden_size",)
)
