"""The kernels in plain torch: short, obviously right, and the definition of every other one.

Shapes: T tokens in a step, H query heads in groups that share one of K key/value heads, D channels
a head. The paged cache of one layer is `keys` and `values`, each [blocks, block_size, K, D]; a
table row lists the blocks of one sequence in order of position; block 0 is null and all zero.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F

GATHER_TOKENS = 1 << 16  # cached positions that decode attention gathers at one time


def rms_norm(x: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
    """Over the last dimension, in fp32 inside."""
    wide = x.float()
    scale = torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + eps)
    return weight * (wide * scale).to(x.dtype)


def rope(x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
    """Rotate [T, heads, D] by [T, dim / 2] angles; channels past dim pass through."""
    half = cos.shape[-1]
    cos, sin = cos.unsqueeze(1), sin.unsqueeze(1)
    first, second = x[..., :half].float(), x[..., half : 2 * half].float()
    rotated = [first * cos - second * sin, second * cos + first * sin]
    return torch.cat([*(part.to(x.dtype) for part in rotated), x[..., 2 * half :]], dim=-1)


def silu_and_mul(gate_up: torch.Tensor) -> torch.Tensor:
    gate, up = gate_up.chunk(2, dim=-1)
    return F.silu(gate) * up


def store_kv(
    k: torch.Tensor,
    v: torch.Tensor,
    keys: torch.Tensor,
    values: torch.Tensor,
    slots: torch.Tensor,
) -> None:
    """Put [T, K, D] at flat positions of the cache: slot = block · block_size + offset."""
    keys.view(-1, *keys.shape[2:])[slots] = k.to(keys.dtype)
    values.view(-1, *values.shape[2:])[slots] = v.to(values.dtype)


def prefill_attention(
    q: torch.Tensor,
    keys: torch.Tensor,
    values: torch.Tensor,
    table: torch.Tensor,
    start: int,
    scale: float,
    window: int | None,
) -> torch.Tensor:
    """One chunk: queries [start, start + n) of a sequence against all of it that is cached."""
    end = start + q.shape[0]
    first = 0 if window is None else max(0, start - window + 1)
    k, v = gather(keys, values, table, first, end, q.dtype)
    query = torch.arange(start, end, device=q.device).unsqueeze(1)
    key = torch.arange(first, end, device=q.device).unsqueeze(0)
    visible = key <= query
    if window is not None:
        visible &= key > query - window
    out = F.scaled_dot_product_attention(
        q.transpose(0, 1).unsqueeze(0),
        k.transpose(0, 1).unsqueeze(0),
        v.transpose(0, 1).unsqueeze(0),
        attn_mask=visible,
        scale=scale,
        enable_gqa=True,
    )
    return out.squeeze(0).transpose(0, 1)


def gather(
    keys: torch.Tensor,
    values: torch.Tensor,
    table: torch.Tensor,
    first: int,
    end: int,
    dtype: torch.dtype,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Cached positions [first, end) of a sequence, as [positions, K, D]."""
    size = keys.shape[1]
    blocks = table[first // size : -(-end // size)]
    skip = first % size
    pair = []
    for cache in (keys, values):
        flat = cache[blocks].flatten(0, 1)
        pair.append(flat[skip : skip + end - first].to(dtype))
    return pair[0], pair[1]


def decode_attention(
    q: torch.Tensor,
    keys: torch.Tensor,
    values: torch.Tensor,
    tables: torch.Tensor,
    lengths: torch.Tensor,
    longest: int,
    scale: float,
    window: int | None,
) -> torch.Tensor:
    """One query a sequence, [B, H, D], against its `lengths` cached positions.

    Sequences are padded to the longest; slices bound what is gathered at one time.
    """
    size = keys.shape[1]
    blocks = -(-longest // size)
    rows = max(1, GATHER_TOKENS // (blocks * size))
    position = torch.arange(blocks * size, device=q.device)
    out = torch.empty_like(q)
    for at in range(0, q.shape[0], rows):
        part = slice(at, at + rows)
        table = tables[part, :blocks]
        length = lengths[part].unsqueeze(1)
        visible = position < length
        if window is not None:
            visible &= position >= length - window
        k = keys[table].flatten(1, 2).to(q.dtype)
        v = values[table].flatten(1, 2).to(q.dtype)
        out[part] = F.scaled_dot_product_attention(
            q[part].unsqueeze(2),
            k.transpose(1, 2),
            v.transpose(1, 2),
            attn_mask=visible[:, None, None, :],
            scale=scale,
            enable_gqa=True,
        ).squeeze(2)
    return out
