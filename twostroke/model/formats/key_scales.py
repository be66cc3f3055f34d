"""Scales between the channels of keys and queries, for KV caches in int8.

The keys of a head and token share one scale in int8, so the largest channel sets the rounding step
of every channel. A key bias makes some channels a hundred times larger than the others, which are
then rounded to a few steps. The score of a query and a key stays the same if a channel of the key
is divided by a number and the same channel of the query is multiplied by it:

    q · k = Σ (q_i · s_i) · (k_i / s_i)

Rope rotates channels i and i + dim/2 as a pair, so both have the same s. The cache has k / s.

    native   queries and keys are multiplied in fp32, between rope and the cache
    torch    rows of the weights, biases and norms are multiplied when they are loaded

The size of a channel follows from the weights alone. If keys have a norm, its weight is the size.
Otherwise a key is a constant (its bias, and the projection of the norm's bias) plus a weighted sum
of normalised inputs. The size of the sum is taken as `DEVIATIONS` times its standard deviation.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from twostroke.model.describe.spec import AttentionSpec, ModelSpec
from twostroke.model.weights import WeightSource

Floats = npt.NDArray[np.float32]

DEVIATIONS = 3.0
MAX_SCALE = 2.0**10  # the smallest scale is 1 / MAX_SCALE


def key_scales(spec: ModelSpec, source: WeightSource, layer: int) -> Floats:
    """Return the divisors of a layer's keys, which multiply its queries, [KV heads, channels]."""
    sizes = _pair_sizes(_channel_sizes(spec, source, layer), spec.layers[layer].attention)
    typical = np.median(sizes, axis=1, keepdims=True)
    ratio = np.maximum(sizes, 1e-30) / np.maximum(typical, 1e-30)
    return ratio.clip(1 / MAX_SCALE, MAX_SCALE).astype(np.float32)


def query_scales_of_heads(scales: Floats, spec: AttentionSpec) -> Floats:
    """Return the scales for each query head, [heads, channels]: those of its KV head."""
    repeated: Floats = scales.repeat(spec.num_heads // spec.num_kv_heads, axis=0)
    return repeated


def _channel_sizes(
    spec: ModelSpec, source: WeightSource, layer: int
) -> tuple[npt.NDArray[np.float64], npt.NDArray[np.float64]]:
    """Return the constant and the deviation of each key channel, [KV heads, channels] each."""
    layer_spec, at = spec.layers[layer], f"layers.{layer}."
    attention = layer_spec.attention
    shape = (attention.num_kv_heads, attention.head_dim)
    if attention.qk_norm != "none":
        weight = source.floats(f"{at}k_norm").astype(np.float64)
        weight_shape = shape if attention.qk_norm == "full" else (1, attention.head_dim)
        deviation = np.broadcast_to(np.abs(weight).reshape(weight_shape), shape)
        return np.zeros(shape), deviation
    names = layer_spec.weight_shapes(spec.hidden_size, spec.norm_bias)
    matrix = source.floats(f"{at}k").astype(np.float64)
    constant = np.zeros(len(matrix))
    if "k_bias" in names:
        constant += source.floats(f"{at}k_bias")
    if "attn_norm_bias" in names:
        constant += matrix @ source.floats(f"{at}attn_norm_bias").astype(np.float64)
    if "attn_norm" in names:
        matrix *= source.floats(f"{at}attn_norm")
    deviation = np.sqrt(np.square(matrix).sum(axis=1))
    return constant.reshape(shape), deviation.reshape(shape)


def _pair_sizes(
    sizes: tuple[npt.NDArray[np.float64], npt.NDArray[np.float64]], spec: AttentionSpec
) -> npt.NDArray[np.float64]:
    """Estimate the largest absolute value of each channel, the same for both of a rope pair."""
    constant, deviation = sizes
    half = spec.rope.dim // 2
    largest = np.abs(constant) + DEVIATIONS * deviation
    if half:
        first, second = slice(0, half), slice(half, 2 * half)
        both = np.hypot(constant[:, first], constant[:, second])
        # The mean square of both channels, because rotation mixes them.
        spread = np.hypot(deviation[:, first], deviation[:, second]) / np.sqrt(2)
        largest[:, first] = largest[:, second] = both + DEVIATIONS * spread
    return largest
