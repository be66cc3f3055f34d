"""The definitions of the kernels in plain torch. Triton kernels must equal them."""

from __future__ import annotations

import torch
import torch.nn.functional as F

from twostroke.kernels import kv_dtypes
from twostroke.kernels.activations import Activation, ClampedSwiglu
from twostroke.kernels.records import StepContext

DEPENDENT = StepContext(dependent_launch=True)


def rms_norm(x: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
    wide = x.float()
    normed = wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + eps)
    return (normed.to(weight.dtype) * weight).to(x.dtype)


def act_and_mul(gate_up: torch.Tensor, activation: Activation) -> torch.Tensor:
    gate, up = gate_up.chunk(2, dim=-1)
    if isinstance(activation, ClampedSwiglu):
        gate = gate.double().clamp(max=activation.limit)
        up = up.double().clamp(-activation.limit, activation.limit)
        return (gate * torch.sigmoid(activation.alpha * gate) * (up + 1)).to(gate_up.dtype)
    if activation == "silu":
        return F.silu(gate) * up
    return F.gelu(gate, approximate="tanh" if activation == "gelu_tanh" else "none") * up


def rope(x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
    """Rotate [T, heads, D] by [T, dim / 2] angles; channels past dim pass through."""
    half = cos.shape[-1]
    cos, sin = cos.unsqueeze(1), sin.unsqueeze(1)
    first, second = x[..., :half].float(), x[..., half : 2 * half].float()
    rotated = [first * cos - second * sin, second * cos + first * sin]
    return torch.cat([*(part.to(x.dtype) for part in rotated), x[..., 2 * half :]], dim=-1)


def gather(
    cache: torch.Tensor, table: torch.Tensor, first: int, end: int, dtype: torch.dtype
) -> torch.Tensor:
    """Cache entries [first, end) of a sequence: [entries, K, D]."""
    index, page = torch.arange(first, end, device=cache.device), cache.shape[1]
    at = table[index // page], index % page
    if cache.dtype == torch.int8:
        return cache[at].float() * kv_dtypes.scales_of(cache)[at].unsqueeze(-1)
    if cache.dtype.itemsize == 1:  # fp8, of which torch has few operations
        return cache.view(torch.uint8)[at].view(cache.dtype).to(dtype)
    return cache[at].to(dtype)


def attention(
    q: torch.Tensor,
    keys: torch.Tensor,
    values: torch.Tensor,
    table: torch.Tensor,
    start: int,
    scale: float,
    window: int | None,
    softcap: float,
    sinks: torch.Tensor | None = None,
) -> torch.Tensor:
    """[n, H, D], at cache indices from `start` on, against all of the sequence up to each; in fp32,
    from what is cached, rounded to the queries' type unless it is int8. `sinks`: [H], a column more
    of scores, of which the values are zero."""
    end = start + q.shape[0]
    first = 0 if window is None else max(0, start - window + 1)
    k, v = (gather(cache, table, first, end, q.dtype).float() for cache in (keys, values))
    group = q.shape[1] // k.shape[1]
    k, v = k.repeat_interleave(group, 1), v.repeat_interleave(group, 1)
    score = torch.einsum("qhd,khd->hqk", q.float(), k) * scale
    if softcap:
        score = softcap * torch.tanh(score / softcap)
    query = torch.arange(start, end, device=q.device).unsqueeze(1)
    key = torch.arange(first, end, device=q.device).unsqueeze(0)
    visible = key <= query
    if window is not None:
        visible &= key > query - window
    score = score.masked_fill(~visible, float("-inf"))
    if sinks is not None:
        score = torch.cat([score, sinks.view(-1, 1, 1).expand(-1, len(q), 1)], dim=-1)
        v = torch.cat([v, torch.zeros_like(v[:1])])
    return torch.einsum("hqk,khd->qhd", score.softmax(-1), v)
