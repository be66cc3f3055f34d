"""Blocks of one pool to places in another, in one launch."""

from __future__ import annotations

import torch
import triton
import triton.language as tl

TILE = 4096  # words of 8 bytes
PROGRAMS = 264  # two on each multiprocessor of an H200; enough for its memory, however many blocks


@triton.jit(do_not_specialize=["num_pairs"])
def _copy(source, target, pairs, num_pairs, num_words, TILE: tl.constexpr):
    """`pairs`: block there, block here; `num_words` of a block."""
    tiles = tl.cdiv(num_words, TILE)
    for item in range(tl.program_id(0), num_pairs * tiles, tl.num_programs(0)):
        pair, tile = item // tiles, item % tiles
        there = tl.load(pairs + 2 * pair)
        here = tl.load(pairs + 2 * pair + 1)
        at = tile * TILE + tl.arange(0, TILE)
        words = tl.load(source + there * num_words + at, mask=at < num_words)
        tl.store(target + here * num_words + at, words, mask=at < num_words)


def copy_blocks(source: torch.Tensor, target: torch.Tensor, pairs: torch.Tensor) -> None:
    """Copy rows of `source` to rows of `target`, both [blocks, words] of int64. `pairs`: int64, row
    of the target and row of the source."""
    num_pairs, num_words = len(pairs), source.shape[1]
    items = num_pairs * triton.cdiv(num_words, TILE)
    grid = (min(items, PROGRAMS),)
    _copy[grid](source, target, pairs, num_pairs, num_words, TILE=TILE, num_warps=8)
