"""Split-KV decode attention: each program attends to one split of a context. The last program
that finishes merges the results of all splits.

split 0 ─▶ partial, lse ─┐
split 1 ─▶ partial, lse ─┼─▶ merge ─▶ output
…                       ─┘
"""

from __future__ import annotations

from functools import cache
from typing import NamedTuple

import torch
import triton
import triton.language as tl

# Two programs per multiprocessor (SM) keep enough loads in flight. More programs would balance the
# work better if the sequences have different lengths, but the merge would take the time gained.
PROGRAMS_PER_SM = 2
MAX_SPLITS = 64
INTERPRETED_SMS = 132  # used for CPU tensors and without a GPU; an H200 has 132 SMs


def num_sms(device: torch.device) -> int:
    """Return the number of SMs of the GPU `device`. For `meta`, whose tensors have no memory,
    return the number of SMs of the current GPU. Otherwise return INTERPRETED_SMS."""
    if device.type == "cuda":
        return _num_sms(device.index)
    if device.type == "meta" and torch.cuda.is_available():
        return _num_sms(torch.cuda.current_device())
    return INTERPRETED_SMS


@cache
def _num_sms(index: int | None) -> int:
    return int(torch.cuda.get_device_properties(index).multi_processor_count)


class DecodeScratch(NamedTuple):
    """Memory for the partial results of the splits of one launch. Launches on the same CUDA stream
    may share this memory. B is the number of tokens, H the number of query heads."""

    partial: torch.Tensor  # [B, H, splits, D] fp32: the attention output of each split
    lse: torch.Tensor  # [B, H, splits] fp32: log2 of the softmax denominator of each split
    # [B, H] int32: the number of finished splits for each (row, KV head), zero between launches.
    # Only the first rows · KV heads numbers are used.
    arrived: torch.Tensor


def decode_splits(batch: int, num_kv_heads: int, max_len: int, num_sms: int) -> int:
    """Return the number of splits that gives every SM its PROGRAMS_PER_SM programs, but at most one
    split per 128 positions of the longest context, and at most MAX_SPLITS. Shorter contexts use
    fewer splits, see `DecodeTuning.min_tiles`."""
    wanted = min(PROGRAMS_PER_SM * num_sms // (batch * num_kv_heads), MAX_SPLITS)
    return max(1, min(wanted, -(-max_len // 128)))


def decode_scratch(
    batch: int, num_heads: int, head_dim: int, splits: int, device: torch.device
) -> DecodeScratch:
    """Return the scratch memory. `batch`: the number of tokens, which is rows · queries per row."""
    return DecodeScratch(
        torch.empty(batch, num_heads, splits, head_dim, dtype=torch.float32, device=device),
        torch.empty(batch, num_heads, splits, dtype=torch.float32, device=device),
        torch.zeros(batch, num_heads, dtype=torch.int32, device=device),
    )


@triton.jit
def query_at(
    row,
    kv_head,
    member,
    stride,
    head_stride,
    GROUP: tl.constexpr,
    QUERIES: tl.constexpr,
):
    """Return the offset of each `member` of a query tile in a tensor [rows · QUERIES, H, D]. A
    member is one query head of one token. Member m is head kv_head · GROUP + m % GROUP of token
    row · QUERIES + m // GROUP."""
    if QUERIES == 1:
        offset = row * stride + (kv_head * GROUP + member) * head_stride
    else:
        token = row * QUERIES + member // GROUP
        offset = token * stride + (kv_head * GROUP + member % GROUP) * head_stride
    return offset


@triton.jit
def merge(
    partial,
    lse,
    base,
    splits,
    active,
    out,
    MEMBERS: tl.constexpr,
    BLOCK_MEMBERS: tl.constexpr,
    DIM: tl.constexpr,
    BLOCK_DIM: tl.constexpr,
    MAX_SPLITS: tl.constexpr,
    MERGE: tl.constexpr,
):
    """Merge the partial results of the splits into the rows at the pointers `out`, [BLOCK_MEMBERS].
    The weight of a split is its part of the softmax denominator of the whole context.

    `base`: the offset in `lse` of split 0 of member 0. `active`: the number of splits that have a
    result. MERGE: the number of splits that are loaded at one time. The `lse` of all splits are
    loaded first, so that the maximum is final and partial results are never rescaled. Loads bypass
    the L1 cache, because this cache may hold values of an earlier launch."""
    member = tl.arange(0, BLOCK_MEMBERS)
    channel = tl.arange(0, BLOCK_DIM)
    is_member = member < MEMBERS
    split = tl.arange(0, MAX_SPLITS)
    offsets = base + member[None, :] * splits + split[:, None]
    has_result = is_member[None, :] & (split < active)[:, None]
    all_lse = tl.load(lse + offsets, mask=has_result, other=float("-inf"), cache_modifier=".cg")
    # Start to load the first MERGE results before the maximum and the total are known. Most
    # contexts have no more results.
    some_lse, results = _load_results(
        partial, lse, base, 0, splits, active, MEMBERS, BLOCK_MEMBERS, DIM, BLOCK_DIM, MERGE
    )
    max_lse = tl.where(is_member, tl.max(all_lse, axis=0), 0.0)
    total = tl.sum(tl.exp2(all_lse - max_lse[None, :]), axis=0)
    sums = tl.sum(results * tl.exp2(some_lse - max_lse[None, :])[:, :, None], axis=0)
    for start in range(MERGE, active, MERGE):
        some_lse, results = _load_results(
            partial,
            lse,
            base,
            start,
            splits,
            active,
            MEMBERS,
            BLOCK_MEMBERS,
            DIM,
            BLOCK_DIM,
            MERGE,
        )
        sums += tl.sum(results * tl.exp2(some_lse - max_lse[None, :])[:, :, None], axis=0)
    out_at = out[:, None] + channel[None, :]
    is_out = is_member[:, None] & (channel < DIM)[None, :]
    tl.store(out_at, (sums / total[:, None]).to(out_at.dtype.element_ty), mask=is_out)


@triton.jit
def _load_results(
    partial,
    lse,
    base,
    start,
    splits,
    active,
    MEMBERS: tl.constexpr,
    BLOCK_MEMBERS: tl.constexpr,
    DIM: tl.constexpr,
    BLOCK_DIM: tl.constexpr,
    MERGE: tl.constexpr,
):
    """Load MERGE splits, beginning with split `start`: return their `lse`, [MERGE, BLOCK_MEMBERS],
    and their partial results, [MERGE, BLOCK_MEMBERS, BLOCK_DIM]."""
    member = tl.arange(0, BLOCK_MEMBERS)
    channel = tl.arange(0, BLOCK_DIM)
    split = start + tl.arange(0, MERGE)
    offsets = base + member[None, :] * splits + split[:, None]
    has_result = (member < MEMBERS)[None, :] & (split < active)[:, None]
    loaded = tl.load(lse + offsets, mask=has_result, other=float("-inf"), cache_modifier=".cg")
    mask = has_result[:, :, None] & (channel < DIM)[None, None, :]
    results_at = partial + offsets[:, :, None] * DIM + channel[None, None, :]
    return loaded, tl.load(results_at, mask=mask, other=0.0, cache_modifier=".cg")
