"""Model specs for tests: a dense model whose layers are alike, told by what is different in it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import fields, replace
from typing import Any

from twostroke.model.describe.spec import AttentionSpec, LayerSpec, MLPSpec, ModelSpec, RopeSpec

ATTENTION = {field.name for field in fields(AttentionSpec)}
MLP = {"intermediate_size": "intermediate_size", "activation": "activation", "mlp_bias": "bias"}
MLP |= {"gated": "gated"}
LAYER = {"pre_norm", "post_norm", "parallel", "two_norms"}


def make_spec(**given: Any) -> ModelSpec:
    """`windows`: one for each layer (None: all positions are visible). Everything else is a field
    of `ModelSpec`, `LayerSpec`, `AttentionSpec` or `MLPSpec` (its bias: `mlp_bias`)."""
    head_dim = given.get("head_dim", 16)
    heads = given.get("num_heads", 4), given.get("num_kv_heads", 2), head_dim
    layer = LayerSpec(AttentionSpec(*heads, RopeSpec(1e4, head_dim), head_dim**-0.5), MLPSpec(128))
    plain = ModelSpec("test", 512, 64, (layer,) * 3, 1e-5, 1024)
    return changed(plain, **given)


def changed(spec: ModelSpec, **given: Any) -> ModelSpec:
    """The same with other values, in every layer."""
    windows: Sequence[int | None] | None = given.pop("windows", None)
    if "head_dim" in given:
        given = {"scale": given["head_dim"] ** -0.5} | given
    attention = {name: given.pop(name) for name in ATTENTION & given.keys()}
    mlp = {MLP[name]: given.pop(name) for name in MLP.keys() & given.keys()}
    where = {name: given.pop(name) for name in LAYER & given.keys()}
    layers = [
        replace(
            layer,
            attention=replace(layer.attention, **attention),
            mlp=replace(layer.mlp, **mlp),
            **where,
        )
        for layer in spec.layers
    ]
    if windows is not None:
        layers = [
            replace(layers[0], attention=replace(layers[0].attention, window=window))
            for window in windows
        ]
    return replace(spec, layers=tuple(layers), **given)
