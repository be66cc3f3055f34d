"""How a context is split between programs, and how what they found meets again.

split 0 ─▶ partial, weight ─┐
split 1 ─▶ partial, weight ─┤ whoever arrives last merges them all
…                           ┘
"""

from __future__ import annotations

from functools import cache
from typing import NamedTuple

import torch
import triton
import triton.language as tl

# Two programs a multiprocessor keep enough of the context under way; what more of them would even
# out between sequences of different lengths, they lose by meeting at the end.
PROGRAMS_PER_SM = 2
MOST_SPLITS = 64
INTERPRETED_SMS = 132  # an H200's, where there is no device to ask


def num_sms(device: torch.device) -> int:
    """Multiprocessors of the device that will run what is launched with tensors there: for those
    without memory (`meta`), the current one."""
    if device.type == "cuda":
        return _num_sms(device.index)
    if device.type == "meta" and torch.cuda.is_available():
        return _num_sms(torch.cuda.current_device())
    return INTERPRETED_SMS


@cache
def _num_sms(index: int | None) -> int:
    return int(torch.cuda.get_device_properties(index).multi_processor_count)


class DecodeScratch(NamedTuple):
    """Where the splits of one launch meet; launches of one stream may share it."""

    partial: torch.Tensor  # [B, H, splits, D] fp32
    weight: torch.Tensor  # [B, H, splits]: log2 of the softmax's sum
    arrived: torch.Tensor  # [B, K] at least: zero between launches


def decode_splits(batch: int, num_kv_heads: int, max_len: int, num_sms: int) -> int:
    """Programs enough to fill the card, but none with less than 128 positions of the longest
    context. Shorter ones use fewer of the splits, see `Tuning.least`."""
    wanted = min(PROGRAMS_PER_SM * num_sms // (batch * num_kv_heads), MOST_SPLITS)
    return max(1, min(wanted, -(-max_len // 128)))


def decode_scratch(
    batch: int, num_heads: int, head_dim: int, splits: int, device: torch.device
) -> DecodeScratch:
    """For `batch` tokens: rows times queries."""
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
    """Where members of a tile begin in [rows · QUERIES, H, D]: member m is query head m % GROUP of
    the KV head's, of the row's token m // GROUP."""
    if QUERIES == 1:
        at = row * stride + (kv_head * GROUP + member) * head_stride
    else:
        token = row * QUERIES + member // GROUP
        at = token * stride + (kv_head * GROUP + member % GROUP) * head_stride
    return at


@triton.jit
def merge(
    partial,
    weight,
    line,
    splits,
    active,
    to,
    MEMBERS: tl.constexpr,
    BLOCK_MEMBERS: tl.constexpr,
    DIM: tl.constexpr,
    BLOCK_DIM: tl.constexpr,
    MOST_SPLITS: tl.constexpr,
    MERGE: tl.constexpr,
):
    """The splits' results, each by its share of the whole softmax, to the rows that begin at `to`
    [BLOCK_MEMBERS]. The shares come first, of all splits, so that the results need not wait for
    one another. Read past the first-level cache, which may hold what an earlier launch left."""
    member = tl.arange(0, BLOCK_MEMBERS)
    channel = tl.arange(0, BLOCK_DIM)
    valid = member < MEMBERS
    split = tl.arange(0, MOST_SPLITS)
    at = line + member[None, :] * splits + split[:, None]
    there = valid[None, :] & (split < active)[:, None]
    sizes = tl.load(weight + at, mask=there, other=float("-inf"), cache_modifier=".cg")
    # The first results are asked for before the shares are there; most often they are all.
    size, part = _parts(
        partial, weight, line, 0, splits, active, MEMBERS, BLOCK_MEMBERS, DIM, BLOCK_DIM, MERGE
    )
    best = tl.where(valid, tl.max(sizes, axis=0), 0.0)
    total = tl.sum(tl.exp2(sizes - best[None, :]), axis=0)
    sums = tl.sum(part * tl.exp2(size - best[None, :])[:, :, None], axis=0)
    for start in range(MERGE, active, MERGE):
        size, part = _parts(
            partial,
            weight,
            line,
            start,
            splits,
            active,
            MEMBERS,
            BLOCK_MEMBERS,
            DIM,
            BLOCK_DIM,
            MERGE,
        )
        sums += tl.sum(part * tl.exp2(size - best[None, :])[:, :, None], axis=0)
    real = valid[:, None] & (channel < DIM)[None, :]
    to = to[:, None] + channel[None, :]
    tl.store(to, (sums / total[:, None]).to(to.dtype.element_ty), mask=real)


@triton.jit
def _parts(
    partial,
    weight,
    line,
    start,
    splits,
    active,
    MEMBERS: tl.constexpr,
    BLOCK_MEMBERS: tl.constexpr,
    DIM: tl.constexpr,
    BLOCK_DIM: tl.constexpr,
    MERGE: tl.constexpr,
):
    """MERGE splits from `start` on: their weights [MERGE, members] and results [.., .., D]."""
    member = tl.arange(0, BLOCK_MEMBERS)
    channel = tl.arange(0, BLOCK_DIM)
    split = start + tl.arange(0, MERGE)
    at = line + member[None, :] * splits + split[:, None]
    there = (member < MEMBERS)[None, :] & (split < active)[:, None]
    size = tl.load(weight + at, mask=there, other=float("-inf"), cache_modifier=".cg")
    mask = there[:, :, None] & (channel < DIM)[None, None, :]
    from_ = partial + at[:, :, None] * DIM + channel[None, None, :]
    return size, tl.load(from_, mask=mask, other=0.0, cache_modifier=".cg")
