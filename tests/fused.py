"""The fused kernels over the reference ones: what the CUDA executor runs on where there is no GPU.

A module with the functions of `kernels.FusedKernels`, in plain torch; and the definition that the
Triton kernels equal.
"""

from __future__ import annotations

from itertools import pairwise

import torch

from twostroke.kernels import reference
from twostroke.kernels.reference_sampling import (
    adjust_logits,
    advance_tokens,
    sample,
    token_logprobs,
)

__all__ = ["adjust_logits", "advance_tokens", "sample", "token_logprobs"]  # and all below


def rms_norm(x, weight, eps, out=None, early=False):  # type: ignore[no-untyped-def]
    return _into(out, reference.rms_norm(x, weight, eps))


def add_rms_norm(x, residual, weight, eps, early=False):  # type: ignore[no-untyped-def]
    residual += x
    return reference.rms_norm(residual, weight, eps)


def silu_and_mul(gate_up, out=None, early=False):  # type: ignore[no-untyped-def]
    return _into(out, reference.silu_and_mul(gate_up))


def rope_store(  # type: ignore[no-untyped-def]
    qkv,
    q_norm,
    k_norm,
    eps,
    cos,
    sin,
    positions,
    slots,
    keys,
    values,
    num_heads,
    num_kv_heads,
    out=None,
    early=False,
):
    heads = qkv.unflatten(1, (num_heads + 2 * num_kv_heads, -1))
    q, k, v = heads.split([num_heads, num_kv_heads, num_kv_heads], dim=1)
    if q_norm is not None:
        q = reference.rms_norm(q, q_norm, eps)
    if k_norm is not None:
        k = reference.rms_norm(k, k_norm, eps)
    q = reference.rope(q, cos[positions], sin[positions])
    k = reference.rope(k, cos[positions], sin[positions])
    real = slots >= 0
    reference.store_kv(k[real], v[real], keys, values, slots[real])
    return _into(heads if out is None else out, torch.cat([q, k, v], dim=1))


def product(x, weight, early=False, out=None):  # type: ignore[no-untyped-def]
    return _into(out, x @ weight.T)


def gated_product(x, weight, early=False):  # type: ignore[no-untyped-def]
    return reference.silu_and_mul(x @ weight.T)


def prefill_attention(  # type: ignore[no-untyped-def]
    q,
    keys,
    values,
    tables,
    chunk_rows,
    chunk_starts,
    cu_tokens,
    max_chunk,
    scale,
    window,
    softcap=0.0,
    out=None,
    own=None,
    max_fresh=0,
):
    assert softcap == 0.0
    ends, starts = cu_tokens.tolist(), chunk_starts.tolist()
    assert ends[-1] == q.shape[0]
    sizes = [end - first for first, end in pairwise(ends)]
    fresh, later = (
        [n for n, at in zip(sizes, starts, strict=True) if (at == 0) == k] for k in (1, 0)
    )
    assert own is not None
    assert (max_fresh, max_chunk) == (max(fresh, default=0), max(later, default=0))
    out = torch.empty_like(q) if out is None else out
    for n, (row, start) in enumerate(zip(chunk_rows.tolist(), chunk_starts.tolist(), strict=True)):
        part = slice(ends[n], ends[n + 1])
        # Those who read them there must find what is cached, if the row has any blocks.
        if start == 0 and tables[row].any():
            cached = reference.gather(keys, values, tables[row].long(), 0, sizes[n], q.dtype)
            assert torch.equal(own[part].to(keys.dtype).to(q.dtype), torch.cat(cached, dim=1))
        out[part] = reference.prefill_attention(
            q[part], keys, values, tables[row], start, scale, window
        )
    return out


def decode_attention(  # type: ignore[no-untyped-def]
    q,
    keys,
    values,
    tables,
    rows,
    lengths,
    scale,
    window,
    splits,
    scratch,
    softcap=0.0,
    out=None,
    early=False,
):
    assert softcap == 0.0
    assert scratch == (q.shape[0], splits)
    out = torch.empty_like(q) if out is None else out
    real = lengths > 0
    out[~real] = 0
    if real.any():
        known = lengths[real].long()
        out[real] = reference.decode_attention(
            q[real], keys, values, tables[rows[real]], known, int(known.max()), scale, window
        )
    return out


def bind_decode_attention(q, keys, values, *where, out):  # type: ignore[no-untyped-def]
    return lambda keys, values: decode_attention(q, keys, values, *where, out=out)


def bind_prefill_attention(q, keys, values, *where, **how):  # type: ignore[no-untyped-def]
    return lambda keys, values: prefill_attention(q, keys, values, *where, **how)


def rope_decode_attention(  # type: ignore[no-untyped-def]
    qkv,
    q_norm,
    k_norm,
    eps,
    cos,
    sin,
    slots,
    keys,
    values,
    tables,
    rows,
    lengths,
    scale,
    window,
    splits,
    scratch,
    softcap=0.0,
    out=None,
    early=False,
):
    num_kv_heads, dim = keys.shape[2:]
    num_heads = qkv.shape[1] // dim - 2 * num_kv_heads
    positions = (lengths - 1).clamp(min=0)
    where = (positions, slots, keys, values, num_heads, num_kv_heads)
    q = rope_store(qkv, q_norm, k_norm, eps, cos, sin, *where)[:, :num_heads]
    how = (scale, window, splits, scratch, softcap, out, early)
    return decode_attention(q, keys, values, tables, rows, lengths, *how)


def compile_ahead(run, of):  # type: ignore[no-untyped-def]
    """Nothing to compile; and what is here needs the values."""


def decode_splits(batch, num_kv_heads, max_len):  # type: ignore[no-untyped-def]
    return max(1, min(64 // (batch * num_kv_heads), max_len // 256))


def decode_scratch(batch, num_heads, head_dim, splits, device):  # type: ignore[no-untyped-def]
    return batch, splits


def _into(out, result):  # type: ignore[no-untyped-def]
    return result if out is None else out.copy_(result)
