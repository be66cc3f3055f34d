"""`ModelSpec`: a decoder-only transformer as data, and everything derived from it.

    layer       x += post_norm(attention(pre_norm(x)));  x += post_norm(mlp(pre_norm(x)))
                parallel: x += attention(pre_norm(x)) + mlp(pre_norm(x))
    attention   q, k, v → q/k norm → rope → softmax(softcap(scale · q kᵀ)) v → output projection
                queries may be multiplied by a number of their position, after rope
                with a sink, one score more in the softmax, which has no value
                latent: k and v are made from a vector that all heads share, and only it is cached
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
from twostroke.kv.layout import side_bytes

RopeKind = Literal["none", "linear", "dynamic", "llama3", "yarn", "factors", "longrope", "still"]
QKNorm = Literal["none", "head", "full"]  # RMSNorm of q and k over each head, or over all heads
Norm = Literal["rms", "layer"]  # "layer": less the mean, divided by the standard deviation
Scoring = Literal["softmax", "sigmoid"]
GroupScore = Literal["max", "top2_sum"]  # of the scores of a group's experts

# What every model is well within, lowest and highest: a wrong number is refused where it is read.
LAYERS: Final = (1, 1024)
VOCABULARY: Final = (1, 1 << 22)
WIDTH: Final = (1, 1 << 20)  # of the hidden state, and of the layer between up and down
HEADS: Final = (1, 1 << 12)
HEAD_DIM: Final = (1, 1 << 12)
LATENT_RANK: Final = (1, 1 << 14)
EXPERTS: Final = (1, 1 << 10)  # of a layer
CONTEXT: Final = (2, 1 << 24)  # tokens: one to read and one to write
NORM_EPS: Final = (1e-20, 1.0)
ROPE_THETA_MAX: Final = 1e15  # and above 1
ROPE_FACTOR: Final = (1.0, 1e6)
SOFTCAP_MAX: Final = 1e6
MULTIPLIER_MAX: Final = 1e6  # of embeddings, scores, residuals and logits; and above 0


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
    # "longrope": these for an engine whose max_model_len is within original_context, else the above
    short_factors: tuple[float, ...] = ()
    # Queries at position p are multiplied by 1 + query_beta · log(1 + ⌊p / query_span⌋) after rope:
    # the first query_span ones by 1, the next as many by 1 + query_beta · log 2. Not with latents.
    query_beta: float = 0.0  # 0: by nothing
    query_span: int = 0


# Of a layer without rope: all angles are 0, of as few channels as kernels take.
NO_ROPE: Final = RopeSpec(1.0, 2, "still")


def yarn_attention_factor(factor: float, mscale: float = 1.0) -> float:
    """YaRN's recommended sharpening of attention for a context stretched by `factor`."""
    return 1.0 if factor <= 1 else 0.1 * mscale * math.log(factor) + 1.0


@dataclass(frozen=True, slots=True)
class LatentSpec:
    """Multi-head latent attention (MLA): how keys and values are made, and what is cached of them.

        x ─ kv_a ─▶ [ latent: kv_lora_rank │ rope key: rope.dim ]        one of each for all heads
        latent ─ norm ─ kv_b ─▶ of each head [ key without rope │ value ]
        x ─ q_a ─▶ norm ─ q_b ─▶ of each head [ query without rope │ query with rope ]

    The cache holds the latent, normed, and the rope key, turned. Prefill computes attention in the
    expanded form, with the keys and values above. Decode does it in the latents' space: a head's
    query goes through its rows of kv_b, q · (W latent) = (qᵀ W) · latent, so that the latent is the
    key of all heads, and their value, which kv_b expands once a query and not once a position.
    """

    kv_lora_rank: int
    q_lora_rank: int  # 0: queries are made from x directly
    value_dim: int  # of a head
    norm_eps: float = 1e-6  # of the norms of the two latents, whatever the other norms have
    # kv_b comes as two weights: its keys' part, each head's transposed (k_b), and its values'.
    split: bool = False


@dataclass(frozen=True, slots=True)
class AttentionSpec:
    """Heads that share keys and values in groups. `window`: a query sees itself and window − 1
    positions before it. `scale` multiplies the scores, `softcap` bends them towards ±softcap.
    `latent`: the heads as above, of which the last `rope.dim` channels are those with rope."""

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
    sinks: bool = False  # each head has a learned score that no key has
    latent: LatentSpec | None = None

    def __post_init__(self) -> None:
        # No kernel of latent attention multiplies queries.
        assert self.latent is None or not self.rope.query_beta

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
        """What attention leaves for the output projection."""
        return self.num_heads * self.value_dim

    @property
    def nope_dim(self) -> int:
        """Channels of a latent layer's head that have no rope."""
        return self.head_dim - self.rope.dim

    @property
    def cached(self) -> tuple[int, int, int]:
        """Heads of a cached token, their channels, and how many of those are a latent."""
        if self.latent is None:
            return self.num_kv_heads, self.head_dim, 0
        return 1, self.latent.kv_lora_rank + self.rope.dim, self.latent.kv_lora_rank

    @property
    def prefill_channels(self) -> int:
        """Multiplications of one query, all heads, with one cached token's keys and values."""
        return self.q_size + self.output_size

    @property
    def decode_channels(self) -> int:
        """The same in the form that decode computes."""
        if self.latent is None:
            return self.prefill_channels
        return self.num_heads * (2 * self.latent.kv_lora_rank + self.rope.dim)

    def weight_shapes(self, hidden_size: int) -> dict[str, tuple[int, ...]]:
        """Matrices as (out, in), and norms over all of a latent."""
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


LATENT_EXPANDING: Final = ("kv_b", "k_b", "v_b")  # what makes keys and values of a latent


def projections(part: AttentionSpec) -> tuple[str, ...]:
    """The matrices of attention that read the hidden state."""
    if part.latent is None:
        return "q", "k", "v"
    return "q_a" if part.latent.q_lora_rank else "q", "kv_a"


@dataclass(frozen=True, slots=True)
class MLPSpec:
    intermediate_size: int
    activation: Activation = "silu"
    bias: bool = False
    gated: bool = True

    @property
    def width(self) -> int:
        """Of what one token has between the two products."""
        return self.intermediate_size

    @property
    def gate_up(self) -> tuple[str, ...]:
        """The matrices that are one product."""
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
    """How a router chooses the experts of a token, and what it multiplies their outputs by.

    Scores are the softmax or the sigmoid of the router's product. The `experts_per_token` best are
    chosen by score + correction bias; with groups, out of the `groups_used` best groups alone. An
    expert's weight is its score, divided by the sum of the chosen ones (`normalised`), times
    `scale`. A softmax over the chosen experts alone is the same as a normalised one over all.
    """

    experts_per_token: int
    scoring: Scoring = "softmax"
    normalised: bool = True
    scale: float = 1.0
    bias: bool = False  # of the router's product
    correction_bias: bool = False
    num_groups: int = 1
    groups_used: int = 1
    group_score: GroupScore = "max"

    def rule(self) -> dict[str, Any]:
        """All but which weights there are: what `Kernels.route` is told."""
        found = asdict(self)
        del found["bias"], found["correction_bias"]
        return found


@dataclass(frozen=True, slots=True)
class ExpertsSpec:
    """A mixture of experts in the place of an MLP: of `num_experts` MLPs each token goes through a
    few, and through the `shared` one besides (times the sigmoid of a product, if `shared_gate`)."""

    num_experts: int
    expert: MLPSpec
    routing: RoutingSpec
    shared: MLPSpec | None = None
    shared_gate: bool = False

    @property
    def width(self) -> int:
        """Of what one token has between the two products, in all experts that it goes through."""
        chosen = self.routing.experts_per_token * self.expert.intermediate_size
        return chosen + (0 if self.shared is None else self.shared.intermediate_size)

    def weight_shapes(self, hidden_size: int) -> dict[str, tuple[int, ...]]:
        """An expert's matrices are weights of their own, `experts.7.gate`, however a file keeps
        them."""
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
        """How many different ones so many tokens are expected to choose, all being as likely."""
        missed = 1 - self.routing.experts_per_token / self.num_experts
        return float(self.num_experts * (1 - missed**tokens))


@dataclass(frozen=True, slots=True)
class LayerSpec:
    """One layer. Norms sit before attention and MLP, after them (before the residual), or both.
    `parallel`: the MLP reads what attention reads, through the same norm or (`two_norms`) its own.
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
    """Layers whose cached keys and values have one shape and live equally long: they share block
    tables and a pool, and a block holds the tokens of all of them.

        heads     a token leaves `num_kv_heads` keys and as many values, of `head_dim` channels
        latent    it leaves one vector of `head_dim` channels: the first `latent_dim` are the latent
                  and the value, all of them the key
    """

    layers: tuple[int, ...]
    window: int | None
    num_kv_heads: int
    head_dim: int
    latent_dim: int = 0  # 0: keys and values of heads

    @property
    def block_shape(self) -> tuple[int, int, int]:
        """Of a token in a layer: keys and values or one vector, heads, channels."""
        return 1 if self.latent_dim else 2, self.num_kv_heads, self.head_dim

    @property
    def elements_per_token(self) -> int:
        """Of all that is cached, in all layers of the group."""
        return math.prod(self.block_shape) * len(self.layers)

    def block_bytes(self, block_size: int, itemsize: int, scaled: bool = False) -> int:
        """Of a block, all its layers. `scaled`: of int8, with a scale a head and token."""
        sides, heads, channels = self.block_shape
        return len(self.layers) * sides * side_bytes(block_size, heads, channels, itemsize, scaled)


@dataclass(frozen=True, slots=True)
class ModelSpec:
    family: str  # for people: no code asks
    vocab_size: int
    hidden_size: int
    layers: tuple[LayerSpec, ...]
    norm_eps: float
    max_context: int  # longest sequence the model was made for, rope scaling included
    tie_embeddings: bool = False
    head_bias: bool = False
    learned_positions: bool = False  # an embedding for each of max_context, added to the token's
    embed_scale: float = 1.0
    residual_scale: float = 1.0  # of what attention and MLP add to the residual
    logit_scale: float = 1.0  # before the softcap
    logit_softcap: float = 0.0  # 0: none
    norm: Norm = "rms"
    norm_bias: bool = False
    # Norms multiply by their weight in fp32 and round after, and the weights are kept in fp32.
    norm_fp32: bool = False

    @property
    def num_layers(self) -> int:
        return len(self.layers)

    @property
    def kv_elements_per_token(self) -> int:
        """Elements that one token leaves in the cache, in all layers."""
        return sum(group.elements_per_token for group in self.kv_groups())

    @property
    def has_latents(self) -> bool:
        return any(layer.attention.latent is not None for layer in self.layers)

    @property
    def has_experts(self) -> bool:
        return any(isinstance(layer.mlp, ExpertsSpec) for layer in self.layers)

    @property
    def expanded_kv_elements_per_token(self) -> int:
        """The same if every layer cached the keys and values of its heads, none a latent."""
        parts = [layer.attention for layer in self.layers]
        return sum(part.num_kv_heads * (part.head_dim + part.value_dim) for part in parts)

    def kv_groups(self) -> tuple[KVGroup, ...]:
        """In the order of their first layers."""
        found: dict[tuple[int | None, int, int, int], list[int]] = {}
        for index, layer in enumerate(self.layers):
            part = layer.attention
            found.setdefault((part.window, *part.cached), []).append(index)
        return tuple(KVGroup(tuple(layers), *kind) for kind, layers in found.items())

    def ropes(self) -> tuple[RopeSpec, ...]:
        """The different ones, in the order of their first layers."""
        return tuple(dict.fromkeys(layer.attention.rope for layer in self.layers))

    def weight_shapes(self) -> dict[str, tuple[int, ...]]:
        """Every weight of the model under its canonical name, matrices as (out, in)."""
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
        """The fields of this spec that decide whether there is a weight, and its shape."""
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
        """Those that one token meets: of each layer's experts only as many as it goes through."""
        idle = 0
        for layer in self.layers:
            if isinstance(layer.mlp, ExpertsSpec):
                each = layer.mlp.expert.weight_shapes(self.hidden_size).values()
                unused = layer.mlp.num_experts - layer.mlp.routing.experts_per_token
                idle += unused * sum(math.prod(shape) for shape in each)
        return self.num_parameters() - idle


def with_layers(spec: ModelSpec, **changes: Any) -> ModelSpec:
    """The same with other values in every layer."""
    return replace(spec, layers=tuple(replace(layer, **changes) for layer in spec.layers))


def without_rope(spec: ModelSpec, layers: Collection[int]) -> ModelSpec:
    """The same, with these layers without rope."""
    still = (replace(one, attention=replace(one.attention, rope=NO_ROPE)) for one in spec.layers)
    pairs = enumerate(zip(spec.layers, still, strict=True))
    return replace(spec, layers=tuple(pair[n in layers] for n, pair in pairs))


def with_query_scales(spec: ModelSpec, beta: float, span: int) -> ModelSpec:
    """The same, with the queries of every layer multiplied as `RopeSpec` says, if at all."""

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
