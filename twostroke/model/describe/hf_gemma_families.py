"""Gemma 1 to 3: from a Hugging Face config to a `ModelSpec`. `hf_families.py` has the entries."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

from twostroke.kernels.activations import Activation
from twostroke.model.describe import hf_parts as parts
from twostroke.model.describe.hf_plain import plain
from twostroke.model.describe.spec import LAYERS, LayerSpec, ModelSpec, RopeSpec
from twostroke.model.fields import Fields

GEMMA_DEFAULTS = {"num_key_value_heads": 16, "head_dim": 256}
GELU_TANH: Mapping[str, Activation] = {"gelu_pytorch_tanh": "gelu_tanh"}


def gemma(fields: Fields) -> ModelSpec:
    """Gemma 1 and CodeGemma: Llama with a scaled embedding, gelu and norms that multiply by 1 + w.

    The first releases say `hidden_act: gelu` and mean the tanh approximation.
    """
    parts.refuse_if_given(fields, "use_bidirectional_attention")
    name = "hidden_act" if fields.value("hidden_activation") is None else "hidden_activation"
    gelu = parts.activation(fields, name, {**GELU_TANH, "gelu": "gelu_tanh"})
    mlp = parts.mlp(fields, gelu)
    spec = plain(fields.with_defaults(GEMMA_DEFAULTS), "gemma", tied=True, mlp=mlp)
    return replace(spec, embed_scale=spec.hidden_size**0.5, norm_fp32=True)


def gemma2(fields: Fields) -> ModelSpec:
    """Gemma 2: windows in every other layer; softcaps on scores and logits."""
    rope, max_context = parts.rope(fields, parts.heads(fields)[2])
    return _gemma_2_or_3(
        fields,
        "gemma2",
        kinds=parts.layer_types(fields, parts.one_full_in(2, parts.num_layers(fields))),
        ropes={parts.SLIDING: rope, parts.FULL: rope},
        max_context=max_context,
        logit_softcap=parts.softcap(fields, "final_logit_softcapping", 30.0),
        softcap=parts.softcap(fields, "attn_logit_softcapping", 50.0),
    )


# The defaults of Gemma 3's own code. Configs of models with images contain only differences.
GEMMA3_DEFAULTS = {"vocab_size": 262208, "num_attention_heads": 8, "num_key_value_heads": 4}
GEMMA3_DEFAULTS |= {"head_dim": 256, "max_position_embeddings": 131072}


def gemma3_text(fields: Fields) -> ModelSpec:
    """Gemma 3: windows and another rope in five of six layers; norms on q and k; no softcaps."""
    fields = fields.with_defaults(GEMMA3_DEFAULTS)
    parts.refuse_if_given(fields, "attn_logit_softcapping")
    period = fields.integer("sliding_window_pattern", 1, LAYERS[1], default=6)
    return _gemma_2_or_3(
        fields,
        "gemma3_text",
        kinds=parts.layer_types(fields, parts.one_full_in(period, parts.num_layers(fields))),
        ropes=_gemma3_ropes(fields),
        max_context=parts.context_length(fields),  # includes the rope scaling
        logit_softcap=parts.softcap(fields, "final_logit_softcapping", 0.0),
        qk_norm="head",
    )


def _gemma3_ropes(fields: Fields) -> dict[str, RopeSpec]:
    theta_sliding = parts.theta(fields, "rope_local_base_freq", 10000.0)
    theta_full = parts.theta(fields, "rope_theta", 1000000.0)
    return parts.two_ropes(fields, theta_sliding, theta_full)[0]


def gemma3(fields: Fields) -> ModelSpec:
    return gemma3_text(parts.text_part(fields, "one without images is 'gemma3_text'"))


def _gemma_2_or_3(
    fields: Fields,
    family: str,
    kinds: Sequence[str],
    ropes: Mapping[str, RopeSpec],
    max_context: int,
    logit_softcap: float,
    **different: Any,
) -> ModelSpec:
    """Return a model of Gemma 2 or 3. `different`: fields of the attention."""
    parts.refuse_if_given(fields, "use_bidirectional_attention")
    scalar = fields.number("query_pre_attn_scalar", above=0.0, high=1e9, default=256.0)
    attention = replace(parts.attention(fields, ropes[parts.FULL]), scale=scalar**-0.5, **different)
    window = parts.window(fields, default=4096)
    by_kind = {
        parts.FULL: attention,
        parts.SLIDING: replace(attention, rope=ropes[parts.SLIDING], window=window),
    }
    gelu = parts.activation(fields, "hidden_activation", GELU_TANH)
    mlp = parts.mlp(fields, gelu)
    layers = [LayerSpec(by_kind[kind], mlp, post_norm=True) for kind in kinds]
    spec = parts.model(fields, family, layers, max_context, tied=True)
    return replace(
        spec, embed_scale=spec.hidden_size**0.5, logit_softcap=logit_softcap, norm_fp32=True
    )
