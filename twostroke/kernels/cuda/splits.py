"""How a context is split between programs, and how what they found meets again.

split 0 ─▶ partial, weight ─┐
split 1 ─▶ partial, weight ─┤ whoever arrives last merges them all
…                           ┘
"""

from __future__ import annotations

from typing import NamedTuple

import torch
import triton
import triton.language as tl

# Two programs a multiprocessor keep enough of the context under way; what more of them would even
# out between sequences of different lengths, they lose by meeting at the end.
PROGRAMS = 132 * 2
MOST_SPLITS = 64
MERGE = 16  # splits that are merged at one time


class DecodeScratch(NamedTuple):
    """Where the splits of one launch meet; launches of one stream may share it."""

    partial: torch.Tensor  # [B, H, splits, D] fp32
    weight: torch.Tensor  # [B, H, splits]: log2 of the softmax's sum
    arrived: torch.Tensor  # [B, K] at least: zero between launches


def decode_splits(batch: int, num_kv_heads: int, max_len: int) -> int:
    """Programs enough to fill the card, but none with less than 128 positions of the longest
    context. Shorter ones use fewer of the splits, see `Tuning.least`."""
    wanted = min(PROGRAMS // (batch * num_kv_heads), MOST_SPLITS)
    return max(1, min(wanted, -(-max_len // 128)))


def decode_scratch(
    batch: int, num_heads: int, head_dim: int, splits: int, device: torch.device
) -> DecodeScratch:
    return DecodeScratch(
        torch.empty(batch, num_heads, splits, head_dim, dtype=torch.float32, device=device),
        torch.empty(batch, num_heads, splits, dtype=torch.float32, device=device),
        torch.zeros(batch, num_heads, dtype=torch.int32, device=device),
    )


@triton.jit
def merge(
    partial,
    weight,
    line,
    splits,
    active,
    to,
    to_stride,
    GROUP: tl.constexpr,
    GROUP_BLOCK: tl.constexpr,
    DIM: tl.constexpr,
    BLOCK_DIM: tl.constexpr,
    MOST_SPLITS: tl.constexpr,
    MERGE: tl.constexpr,
):
    """The splits' results, each by its share of the whole softmax. The shares come first, of all
    splits, so that the results need not wait for one another. Read past the first-level cache,
    which may hold what an earlier launch left there."""
    member = tl.arange(0, GROUP_BLOCK)
    channel = tl.arange(0, BLOCK_DIM)
    valid = member < GROUP
    split = tl.arange(0, MOST_SPLITS)
    at = line + member[None, :] * splits + split[:, None]
    there = valid[None, :] & (split < active)[:, None]
    sizes = tl.load(weight + at, mask=there, other=float("-inf"), cache_modifier=".cg")
    # The first results are asked for before the shares are there; most often they are all.
    size, part = _parts(
        partial, weight, line, 0, splits, active, GROUP, GROUP_BLOCK, DIM, BLOCK_DIM, MERGE
    )
    best = tl.where(valid, tl.max(sizes, axis=0), 0.0)
    total = tl.sum(tl.exp2(sizes - best[None, :]), axis=0)
    sums = tl.sum(part * tl.exp2(size - best[None, :])[:, :, None], axis=0)
    for start in range(MERGE, active, MERGE):
        size, part = _parts(
            partial, weight, line, start, splits, active, GROUP, GROUP_BLOCK, DIM, BLOCK_DIM, MERGE
        )
        sums += tl.sum(part * tl.exp2(size - best[None, :])[:, :, None], axis=0)
    real = valid[:, None] & (channel < DIM)[None, :]
    to = to + member[:, None] * to_stride + channel[None, :]
    tl.store(to, (sums / total[:, None]).to(to.dtype.element_ty), mask=real)


@triton.jit
def _parts(
    partial,
    weight,
    line,
    start,
    splits,
    active,
    GROUP: tl.constexpr,
    GROUP_BLOCK: tl.constexpr,
    DIM: tl.constexpr,
    BLOCK_DIM: tl.constexpr,
    MERGE: tl.constexpr,
):
    """MERGE splits from `start` on: their weights [MERGE, group] and results [.., .., D]."""
    member = tl.arange(0, GROUP_BLOCK)
    channel = tl.arange(0, BLOCK_DIM)
    split = start + tl.arange(0, MERGE)
    at = line + member[None, :] * splits + split[:, None]
    there = (member < GROUP)[None, :] & (split < active)[:, None]
    size = tl.load(weight + at, mask=there, other=float("-inf"), cache_modifier=".cg")
    mask = there[:, :, None] & (channel < DIM)[None, None, :]
    from_ = partial + at[:, :, None] * DIM + channel[None, None, :]
    return size, tl.load(from_, mask=mask, other=0.0, cache_modifier=".cg")
