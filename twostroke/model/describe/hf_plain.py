"""`plain`: a model like Llama, from a Hugging Face config."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from twostroke.model.describe import hf_parts as parts
from twostroke.model.describe.spec import ExpertsSpec, LayerSpec, MLPSpec, ModelSpec
from twostroke.model.fields import Fields


def plain(
    fields: Fields,
    family: str,
    windows: Sequence[int | None] | None = None,
    theta: float = 10000.0,
    tied: bool = False,
    eps: float = 1e-6,
    eps_name: str = "rms_norm_eps",
    mlp: MLPSpec | ExpertsSpec | None = None,
    **different: Any,
) -> ModelSpec:
    """Return a model like Llama. `different`: fields of the attention.

    `windows`: the window of each layer. `theta`, `tied` and `eps` are defaults.
    """
    parts.refuse_if_given(fields, "attn_logit_softcapping", "final_logit_softcapping")
    rope, max_context = parts.rope(fields, parts.heads(fields)[2], theta)
    attention = replace(parts.attention(fields, rope), **different)
    if mlp is None:
        mlp = parts.mlp(fields, parts.activation(fields), fields.boolean("mlp_bias", False))
    count = parts.num_layers(fields)
    layers = [LayerSpec(replace(attention, window=n), mlp) for n in windows or (None,) * count]
    return parts.model(fields, family, layers, max_context, tied, eps, eps_name)
