"""The splits of a context: several programs attend to a part each, and the results are merged.

split 0 ─▶ partial, weight ─┐
split 1 ─▶ partial, weight ─┤ the last program to arrive merges them all
…                           ┘
"""

from __future__ import annotations

from functools import cache
from typing import NamedTuple

import torch
import triton
import triton.language as tl

# Two programs a multiprocessor keep enough loads in flight. More programs would even out sequences
# of different lengths, but would lose as much time in the merge.
PROGRAMS_PER_SM = 2
MAX_SPLITS = 64
INTERPRETED_SMS = 132  # an H200's, where there is no device to ask


def num_sms(device: torch.device) -> int:
    """Return the number of multiprocessors of the device that runs launches with tensors on
    `device`; for tensors without memory (`meta`) that of the current device."""
    if device.type == "cuda":
        return _num_sms(device.index)
    if device.type == "meta" and torch.cuda.is_available():
        return _num_sms(torch.cuda.current_device())
    return INTERPRETED_SMS


@cache
def _num_sms(index: int | None) -> int:
    return int(torch.cuda.get_device_properties(index).multi_processor_count)


class DecodeScratch(NamedTuple):
    """Memory where the splits of one launch meet; launches of one stream may share it."""

    partial: torch.Tensor  # [B, H, splits, D] fp32
    weight: torch.Tensor  # [B, H, splits]: log2 of the softmax's sum
    arrived: torch.Tensor  # [B, K] at least: zero between launches


def decode_splits(batch: int, num_kv_heads: int, max_len: int, num_sms: int) -> int:
    """Return enough splits to fill the card with programs, but none with less than 128 positions of
    the longest context. Shorter contexts use fewer of the splits, see `DecodeTuning.min_tiles`."""
    wanted = min(PROGRAMS_PER_SM * num_sms // (batch * num_kv_heads), MAX_SPLITS)
    return max(1, min(wanted, -(-max_len // 128)))


def decode_scratch(
    batch: int, num_heads: int, head_dim: int, splits: int, device: torch.device
) -> DecodeScratch:
    """Return the scratch for `batch` tokens: rows times queries."""
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
    """Return the offsets where members of a tile begin in [rows · QUERIES, H, D]: member m is query
    head m % GROUP of the KV head's, of the row's token m // GROUP."""
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
    MAX_SPLITS: tl.constexpr,
    MERGE: tl.constexpr,
):
    """Merge the splits' results, each weighted by its share of the whole softmax, into the rows
    that begin at `to`, [BLOCK_MEMBERS]. The weights of all splits are read first, so that the
    results need not wait for one another. Loads bypass the first-level cache, which may hold what
    an earlier launch left."""
    member = tl.arange(0, BLOCK_MEMBERS)
    channel = tl.arange(0, BLOCK_DIM)
    valid = member < MEMBERS
    split = tl.arange(0, MAX_SPLITS)
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
    """Load MERGE splits from `start` on: their weights [MERGE, members] and results [.., .., D]."""
    member = tl.arange(0, BLOCK_MEMBERS)
    channel = tl.arange(0, BLOCK_DIM)
    split = start + tl.arange(0, MERGE)
    at = line + member[None, :] * splits + split[:, None]
    there = (member < MEMBERS)[None, :] & (split < active)[:, None]
    size = tl.load(weight + at, mask=there, other=float("-inf"), cache_modifier=".cg")
    mask = there[:, :, None] & (channel < DIM)[None, None, :]
    from_ = partial + at[:, :, None] * DIM + channel[None, None, :]
    return size, tl.load(from_, mask=mask, other=0.0, cache_modifier=".cg")
