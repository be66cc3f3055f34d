"""Makes the `ModelSpec` of a GGUF file from its metadata, without torch. Refuses unsupported models
with an error that names the architecture, setting or tensor.

`ARCHITECTURES` has an entry for each supported architecture: the function that makes the spec, the
tensor names, and the settings and tensors that only some architectures have
(docs/ADDING_A_FAMILY.md). The tensor names are in `gguf_names.py`; functions that several
architectures share are in `gguf_parts.py`.

The metadata does not mention some features: biases, tied embeddings, Llama 3's rope factors. The
tensors of the file say whether a model has them. A tensor that the spec does not use is refused,
because the operation that needs it would be left out.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any, NamedTuple

from twostroke.errors import ModelError
from twostroke.kernels.activations import Activation, ClampedSwiglu
from twostroke.model.describe import gguf_parts as parts
from twostroke.model.describe.gguf_names import (
    CHATGLM_NAMES,
    FUSED_NAMES,
    GLM4_NAMES,
    LLAMA_NAMES,
    NAMES,
    PHI3_NAMES,
    POST_ATTENTION_NAMES,
    falcon_names,
    phi2_names,
)
from twostroke.model.describe.gguf_parts import GGUFSettings
from twostroke.model.describe.spec import (
    EXPERTS,
    LAYERS,
    WIDTH,
    ExpertsSpec,
    LayerSpec,
    MLPSpec,
    ModelSpec,
    QKNorm,
    RopeSpec,
    with_layers,
    with_query_scales,
    without_rope,
)
from twostroke.model.describe.tensor_names import TensorNames
from twostroke.model.fields import REQUIRED, Fields, shown
from twostroke.model.gguf.gguf_file import GGUFFile

# A field of the spec → its metadata key, without the architecture's prefix. If a tensor has a wrong
# shape, the error names the keys of the fields that determine the shape (`check_weights`).
FIELDS = {"num_layers": "block_count", "num_heads": "attention.head_count"}
FIELDS |= {"num_kv_heads": "attention.head_count_kv", "head_dim": "attention.key_length"}
FIELDS |= {"hidden_size": "embedding_length", "intermediate_size": "feed_forward_length"}
FIELDS |= {"vocab_size": "vocab_size", "family": "general.architecture"}
FIELDS |= {"max_context": "context_length"}
FIELDS |= {"num_experts": "expert_count"}
FIELDS |= {"expert_intermediate_size": "expert_feed_forward_length or feed_forward_length"}
FIELDS |= {"shared_intermediate_size": "expert_shared_feed_forward_length"}
FIELDS |= {"q_lora_rank": "attention.q_lora_rank", "kv_lora_rank": "attention.kv_lora_rank"}
FIELDS |= {"nope_dim": "attention.key_length or key_length_mla", "rope_dim": "rope.dimension_count"}
FIELDS |= {"value_dim": "attention.value_length or value_length_mla"}

# ── architectures ───────────────────────────────────────────────────────────────────────────────


def _llama(settings: GGUFSettings) -> ModelSpec:
    """Llama, Mixtral (with experts) and other models with Llama's layers."""
    spec = _plain(settings)
    if not settings.integer(parts.EXPERT_COUNT, 0, EXPERTS[1], default=0):
        return spec
    return with_layers(spec, mlp=parts.experts(settings, "feed_forward_length", normalised=True))


def _mistral3(settings: GGUFSettings) -> ModelSpec:
    """Ministral 3, and Mistral Small 3.1 and 3.2 in later conversions. Ministral 3 multiplies
    queries by a factor that grows with the position. As in llama.cpp, the factor changes after
    every `original_context` positions. The queries of Mistral Small have no factor (beta is 0)."""
    beta = parts.multiplier(settings, parts.TEMPERATURE_SCALE)
    return with_query_scales(_plain(settings), beta, parts.original_context(settings))


def _qwen2_moe(settings: GGUFSettings) -> ModelSpec:
    """Qwen2-MoE. The default width of the shared expert is the width of a dense MLP."""
    experts = parts.experts(settings, normalised=False)
    inner = settings.integer("feed_forward_length", *WIDTH, default=5632)
    width = settings.integer("expert_shared_feed_forward_length", *WIDTH, default=inner)
    shared = replace(experts.expert, intermediate_size=width)
    experts = replace(experts, shared=shared, shared_gate=True)
    return with_layers(_plain(settings), mlp=experts)


def _qwen3_moe(settings: GGUFSettings) -> ModelSpec:
    """Qwen3-MoE. Routing weights are normalised. The metadata does not say so."""
    experts = parts.experts(settings, normalised=True)
    return with_layers(_plain(settings, qk_norm="head"), mlp=experts)


def _olmoe(settings: GGUFSettings) -> ModelSpec:
    experts = parts.experts(settings, "feed_forward_length", normalised=False)
    return with_layers(_plain(settings, qk_norm="full"), mlp=experts)


def _gpt_oss(settings: GGUFSettings) -> ModelSpec:
    """gpt-oss. These properties are not in the metadata: every second layer has a window, experts
    use a clamped SwiGLU, and yarn's range of channels is not rounded (llama.cpp rounds it)."""
    experts = parts.experts(settings, normalised=True)
    expert = replace(experts.expert, activation=ClampedSwiglu(), bias=True)
    rope, max_context = parts.rope(settings, parts.heads(settings)[2])
    attention = parts.attention(settings, replace(rope, truncate=False))
    attention = replace(attention, sinks=True)
    layers = [
        LayerSpec(replace(attention, window=window), replace(experts, expert=expert))
        for window in parts.windows(settings, period=2)
    ]
    return replace(parts.model(settings, layers, max_context), norm_fp32=True)


def _qwen3(settings: GGUFSettings) -> ModelSpec:
    return _plain(settings, qk_norm="head")


def _smollm3(settings: GGUFSettings) -> ModelSpec:
    """SmolLM3. Every fourth layer has no rope. The metadata does not say so."""
    spec = _plain(settings)
    return without_rope(spec, range(3, spec.num_layers, 4))


def _granite(settings: GGUFSettings) -> ModelSpec:
    spec = _plain(settings)
    if not settings.boolean("rope.scaling.finetuned", True):  # false marks a model without rope
        spec = without_rope(spec, range(spec.num_layers))
    # 0 means the default.
    scale = parts.multiplier(settings, parts.ATTENTION_SCALE) or spec.layers[0].attention.scale
    layers = (
        replace(layer, attention=replace(layer.attention, scale=scale)) for layer in spec.layers
    )
    return replace(
        spec,
        layers=tuple(layers),
        embed_scale=parts.multiplier(settings, "embedding_scale") or 1.0,
        residual_scale=parts.multiplier(settings, "residual_scale") or 1.0,
        logit_scale=1 / (parts.multiplier(settings, "logit_scale") or 1.0),
    )


def _granite_moe(settings: GGUFSettings) -> ModelSpec:
    """Granite 3 with experts, and Granite 4.0 without mamba layers, which also has a shared
    expert."""
    experts = parts.experts(settings, "feed_forward_length", normalised=True)
    width = settings.integer("expert_shared_feed_forward_length", 0, WIDTH[1], default=0)
    shared = replace(experts.expert, intermediate_size=width) if width else None
    return with_layers(_granite(settings), mlp=replace(experts, shared=shared))


def _glm4(settings: GGUFSettings) -> ModelSpec:
    if "rope.dimension_sections" in settings:
        expected = "absent in a GLM-4 model without images"
        settings.refuse("rope.dimension_sections", expected)
    return with_layers(_plain(settings), post_norm=True)


def _exaone4(settings: GGUFSettings) -> ModelSpec:
    """EXAONE 4. If any layer has a window, layers without a window have no rope."""
    spec = _plain(settings, qk_norm="head", period=4)
    windows = [layer.attention.window for layer in spec.layers]
    full = [n for n, window in enumerate(windows) if window is None and any(windows)]
    return without_rope(with_layers(spec, pre_norm=False, post_norm=True), full)


def _command_r(settings: GGUFSettings) -> ModelSpec:
    spec = _with_layer_norms(settings, _plain(settings, period=4, eps=parts.LAYER_NORM_EPS))
    scale = parts.multiplier(settings, "logit_scale") or 1.0
    return replace(with_layers(spec, parallel=True), logit_scale=scale, norm_fp32=True)


def _cohere2(settings: GGUFSettings) -> ModelSpec:
    """Command R7B. Layers without a window have no rope."""
    spec = _command_r(settings)
    windows = [layer.attention.window for layer in spec.layers]
    return without_rope(spec, [n for n, window in enumerate(windows) if window is None])


def _stablelm(settings: GGUFSettings) -> ModelSpec:
    """StableLM. Attention and MLP are parallel if layers have no `mlp_norm`. The setting
    `use_parallel_residual` does not tell: it is true in all files."""
    spec = _with_layer_norms(settings, _plain(settings, eps=parts.LAYER_NORM_EPS))
    return with_layers(spec, parallel=not settings.in_any_layer("mlp_norm"))


def _starcoder2(settings: GGUFSettings) -> ModelSpec:
    return _without_gate(settings, "gelu_tanh")


def _gptneox(settings: GGUFSettings) -> ModelSpec:
    """Pythia. The metadata does not name the variant of gelu; Pythia uses the exact gelu."""
    spec = _without_gate(settings, "gelu")
    parallel = settings.boolean("use_parallel_residual", True)
    # If attention and MLP are parallel, each has its own norm (`two_norms`).
    return with_layers(spec, parallel=parallel, two_norms=parallel)


def _gpt2(settings: GGUFSettings) -> ModelSpec:
    spec = _without_gate(settings, "gelu_tanh")
    return replace(without_rope(spec, range(spec.num_layers)), learned_positions=True)


def _phi2(settings: GGUFSettings) -> ModelSpec:
    spec = replace(_without_gate(settings, "gelu_tanh"), head_bias=True)
    return with_layers(spec, parallel=True)


def _falcon(settings: GGUFSettings) -> ModelSpec:
    spec = with_layers(_without_gate(settings, "gelu"), parallel=True)
    return with_layers(spec, two_norms=settings.in_any_layer("mlp_norm"))


def _without_gate(settings: GGUFSettings, activation: Activation) -> ModelSpec:
    """Return a model with LayerNorms and an MLP without a gate."""
    mlp = replace(parts.mlp(settings, activation), gated=False)
    spec = _with_layer_norms(settings, _plain(settings, eps=parts.LAYER_NORM_EPS))
    return with_layers(spec, mlp=mlp)


def _with_layer_norms(settings: GGUFSettings, spec: ModelSpec) -> ModelSpec:
    return replace(spec, norm="layer", norm_bias=settings.has_tensor("final_norm_bias"))


def _plain(
    settings: GGUFSettings, qk_norm: QKNorm = "none", period: int = 0, eps: str = parts.RMS_NORM_EPS
) -> ModelSpec:
    """Return a model with Llama's layers. `period`: see `parts.windows`."""
    rope, max_context = parts.rope(settings, parts.heads(settings)[2])
    attention = parts.attention(settings, rope, qk_norm)
    mlp = parts.mlp(settings)
    windows = parts.windows(settings, period)
    layers = [LayerSpec(replace(attention, window=window), mlp) for window in windows]
    return parts.model(settings, layers, max_context, eps)


def _gemma(settings: GGUFSettings) -> ModelSpec:
    spec = with_layers(_plain(settings), mlp=parts.mlp(settings, "gelu_tanh"))
    return replace(spec, embed_scale=spec.hidden_size**0.5, norm_fp32=True)


def _gemma2(settings: GGUFSettings) -> ModelSpec:
    rope, max_context = parts.rope(settings, parts.heads(settings)[2])
    theta = parts.theta(settings, "rope.freq_base_swa", rope.theta)
    return _gemma_2_or_3(
        settings,
        windows=parts.windows(settings, period=2, default=4096),
        ropes=(replace(rope, theta=theta), rope),
        max_context=max_context,
        layers_of_27b=46,
        logit_softcap=parts.softcap(settings, parts.LOGIT_SOFTCAP, 30.0),
        softcap=parts.softcap(settings, parts.ATTENTION_SOFTCAP, 50.0),
    )


def _gemma3(settings: GGUFSettings) -> ModelSpec:
    parts.theta(settings, default=REQUIRED)  # Gemma 3's theta is not the default of `parts.theta`
    rope, _ = parts.rope(settings, parts.heads(settings)[2])
    sliding = RopeSpec(parts.theta(settings, "rope.freq_base_swa"), rope.dim)
    return _gemma_2_or_3(
        settings,
        windows=parts.windows(settings, period=6),
        ropes=(sliding, rope),
        max_context=parts.context_length(settings),  # the context after rope scaling
        layers_of_27b=62,
        logit_softcap=parts.softcap(settings, parts.LOGIT_SOFTCAP, 0.0),
        qk_norm="head",
    )


def _gemma_2_or_3(
    settings: GGUFSettings,
    windows: tuple[int | None, ...],
    ropes: tuple[RopeSpec, RopeSpec],
    max_context: int,
    layers_of_27b: int,
    logit_softcap: float,
    **attention_fields: Any,
) -> ModelSpec:
    """Return a model of Gemma 2 or 3. `ropes`: the rope of layers with a window, and the rope of
    layers without a window. `attention_fields`: changed fields of `AttentionSpec`."""
    sliding, full = ropes
    attention = replace(parts.attention(settings, full), **attention_fields)
    if len(windows) == layers_of_27b:
        # The metadata has no scale. It is 1/√head_dim except in the largest model, which is
        # recognised by its number of layers, as in llama.cpp.
        hidden: int = settings.integer("embedding_length", *WIDTH)
        attention = replace(attention, scale=(hidden // attention.num_heads) ** -0.5)
    mlp = parts.mlp(settings, "gelu_tanh")
    layers = []
    for window in windows:
        rope = full if window is None else sliding
        layers.append(LayerSpec(replace(attention, rope=rope, window=window), mlp, post_norm=True))
    spec = parts.model(settings, layers, max_context)
    return replace(
        spec, embed_scale=spec.hidden_size**0.5, logit_softcap=logit_softcap, norm_fp32=True
    )


def _phi3(settings: GGUFSettings) -> ModelSpec:
    head_dim = parts.heads(settings)[2]
    if parts.ROPE_FACTORS_LONG in settings.file.tensors:
        rope, max_context = parts.longrope(settings, head_dim), parts.context_length(settings)
    else:
        rope, max_context = parts.rope(settings, head_dim)
    attention, mlp = parts.attention(settings, rope), parts.mlp(settings)
    # A window as long as the context has no effect.
    windows = [None if (w or 0) >= max_context else w for w in parts.windows(settings)]
    layers = [LayerSpec(replace(attention, window=window), mlp) for window in windows]
    return parts.model(settings, layers, max_context)


def _olmo2(settings: GGUFSettings) -> ModelSpec:
    """OLMo 2, and OLMo 3, which has windows. Only layers without a window have rope scaling."""
    rope, max_context = parts.rope(settings, parts.heads(settings)[2])
    full = parts.attention(settings, rope, qk_norm="full")
    mlp, sliding = parts.mlp(settings), RopeSpec(rope.theta, rope.dim)
    layers = []
    for window in parts.windows(settings, period=4):
        attention = full if window is None else replace(full, rope=sliding, window=window)
        layers.append(LayerSpec(attention, mlp, pre_norm=False, post_norm=True))
    spec = parts.model(settings, layers, max_context)
    return replace(spec, norm_fp32=True)


def _deepseek2(settings: GGUFSettings) -> ModelSpec:
    """DeepSeek V2, V2-Lite, V3, R1 and similar models."""
    attention, max_context = parts.latent_attention(settings)
    dense = parts.mlp(settings)
    mlps: list[MLPSpec | ExpertsSpec] = [dense] * parts.num_layers(settings)
    if settings.integer(parts.EXPERT_COUNT, 0, EXPERTS[1], default=0):
        first = settings.integer("leading_dense_block_count", 0, LAYERS[1], default=0)
        mlps[first:] = [parts.deepseek_experts(settings)] * (len(mlps) - first)
    return parts.model(settings, [LayerSpec(attention, mlp) for mlp in mlps], max_context)


def _minicpm3(settings: GGUFSettings) -> ModelSpec:
    """MiniCPM3. The metadata has no factors of embedding, residuals and logits; these values are
    llama.cpp's."""
    attention, max_context = parts.latent_attention(settings)
    layers = [LayerSpec(attention, parts.mlp(settings))] * parts.num_layers(settings)
    spec = parts.model(settings, layers, max_context)
    residual, logits = 1.4 / spec.num_layers**0.5, 256 / spec.hidden_size
    return replace(spec, embed_scale=12.0, residual_scale=residual, logit_scale=logits)


class Architecture(NamedTuple):
    make_spec: Callable[[GGUFSettings], ModelSpec]
    names: TensorNames | Callable[[GGUFFile], TensorNames] = NAMES
    # The settings in `gguf_parts.NEUTRAL_SETTINGS` that `make_spec` reads. In a file of another
    # architecture, a value of these settings that has an effect is refused.
    settings: tuple[str, ...] = ()
    tensors: tuple[str, ...] = ()  # tensors that `make_spec` reads; they are not weights
    copies: tuple[str, ...] = ()  # endings of the names of tensors that repeat weights; ignored


_CAPS = (parts.ATTENTION_SOFTCAP, parts.LOGIT_SOFTCAP)
_SCALES = (parts.ATTENTION_SCALE, "embedding_scale", "residual_scale", "logit_scale")
_EXPERTS = (parts.EXPERT_COUNT,)
_ROPE_FACTORS = (parts.ROPE_FACTORS_LONG, parts.ROPE_FACTORS_SHORT)
_LATENTS = ("attention.kv_lora_rank", parts.YARN_LOG_MULTIPLIER)
_SPLIT = (NAMES.layer["k_b"], NAMES.layer["v_b"])
# SmolLM2, Mistral, Mixtral, Falcon 3, InternLM 3 and Llama 3.x have the architecture "llama".
ARCHITECTURES = {
    "llama": Architecture(_llama, LLAMA_NAMES, _EXPERTS, tensors=(parts.ROPE_FACTORS,)),
    "qwen2moe": Architecture(_qwen2_moe, settings=_EXPERTS, tensors=(parts.ROPE_FACTORS,)),
    "qwen3moe": Architecture(_qwen3_moe, settings=_EXPERTS, tensors=(parts.ROPE_FACTORS,)),
    "olmoe": Architecture(_olmoe, settings=_EXPERTS),
    "qwen2": Architecture(_llama, tensors=(parts.ROPE_FACTORS,)),
    "qwen3": Architecture(_qwen3, tensors=(parts.ROPE_FACTORS,)),
    "mistral3": Architecture(
        _mistral3, LLAMA_NAMES, (parts.TEMPERATURE_SCALE, parts.YARN_LOG_MULTIPLIER)
    ),
    "internlm2": Architecture(_llama, LLAMA_NAMES),
    "smollm3": Architecture(_smollm3, LLAMA_NAMES, tensors=(parts.ROPE_FACTORS,)),
    "granite": Architecture(_granite, LLAMA_NAMES, _SCALES, tensors=(parts.ROPE_FACTORS,)),
    "granitemoe": Architecture(_granite_moe, LLAMA_NAMES, (*_SCALES, *_EXPERTS)),
    "chatglm": Architecture(_llama, CHATGLM_NAMES),
    "glm4": Architecture(_glm4, GLM4_NAMES),
    "command-r": Architecture(_command_r, LLAMA_NAMES, ("logit_scale",)),
    "cohere2": Architecture(_cohere2, LLAMA_NAMES, ("logit_scale",)),
    "stablelm": Architecture(_stablelm, settings=("use_parallel_residual",)),
    "starcoder2": Architecture(_starcoder2),
    "gptneox": Architecture(_gptneox, FUSED_NAMES, ("use_parallel_residual",)),
    "gpt2": Architecture(_gpt2, FUSED_NAMES),
    "phi2": Architecture(_phi2, phi2_names),
    "falcon": Architecture(_falcon, falcon_names),
    "ernie4_5": Architecture(_llama, LLAMA_NAMES),
    "exaone4": Architecture(_exaone4, tensors=(parts.ROPE_FACTORS,)),
    "seed_oss": Architecture(_llama, POST_ATTENTION_NAMES),
    "gpt-oss": Architecture(_gpt_oss, POST_ATTENTION_NAMES, _EXPERTS),
    "gemma": Architecture(_gemma),
    "gemma2": Architecture(_gemma2, settings=_CAPS),
    "gemma3": Architecture(_gemma3, settings=(parts.LOGIT_SOFTCAP,)),
    "olmo2": Architecture(_olmo2),
    "phi3": Architecture(_phi3, PHI3_NAMES, tensors=_ROPE_FACTORS),
    "deepseek2": Architecture(_deepseek2, LLAMA_NAMES, (*_EXPERTS, *_LATENTS), copies=_SPLIT),
    "minicpm3": Architecture(_minicpm3, NAMES, _LATENTS, _ROPE_FACTORS, _SPLIT),
}

# ── reading ─────────────────────────────────────────────────────────────────────────────────────


def spec_from_gguf(file: GGUFFile) -> ModelSpec:
    name = _architecture_name(file)
    architecture = ARCHITECTURES[name]
    settings = GGUFSettings(file, name, names_in_gguf(file))
    settings.refuse_unsupported(architecture.settings)
    spec = architecture.make_spec(settings)
    _refuse_unknown_tensors(file, spec, architecture)
    return spec


def names_in_gguf(file: GGUFFile) -> TensorNames:
    """Return the file's tensor names."""
    names = ARCHITECTURES[_architecture_name(file)].names
    names = names if isinstance(names, TensorNames) else names(file)
    return names.resolve(file.tensors)


def _architecture_name(file: GGUFFile) -> str:
    general = Fields(str(file.path), file.metadata)
    kind = general.string("general.type", "model")
    if kind != "model":
        raise ModelError(
            f"{file.path}: holds a GGUF {shown(kind)}, not a model (general.type). Give the path "
            "of the model itself."
        )
    name = general.value("general.architecture")
    if not isinstance(name, str) or name not in ARCHITECTURES:
        raise ModelError(
            f"{file.path}: the architecture {shown(name)} is not supported. "
            f"Supported: {', '.join(ARCHITECTURES)} (general.architecture)."
        )
    return name


def _refuse_unknown_tensors(file: GGUFFile, spec: ModelSpec, architecture: Architecture) -> None:
    places = names_in_gguf(file).places(spec).values()
    known = {place.tensor for place in places} | set(architecture.tensors)
    copies = architecture.copies
    unknown = [name for name in file.tensors if name not in known and not name.endswith(copies)]
    extra_layers = {f"blk.{n}" for n in range(spec.num_layers, LAYERS[1])}
    extra = {name for name in unknown if ".".join(name.split(".")[:2]) in extra_layers}
    if extra:
        raise ModelError(
            f"{file.path}: {spec.family}.block_count is {spec.num_layers}, but the file has "
            f"{len(extra)} tensors of further layers, such as {shown(min(extra))}. The file is "
            "damaged or was put together from two models; download it again."
        )
    if unknown:
        raise ModelError(
            f"{file.path}: the tensor {shown(unknown[0])} is not part of a {spec.family} model "
            "(general.architecture) in this version of twostroke. The model would compute wrong "
            "results without this tensor. Use another conversion of the model."
        )
