"""A kernel that copies KV blocks between two pools, in one launch."""

from __future__ import annotations

import torch
import triton
import triton.language as tl

TILE = 4096  # words of 8 bytes
PROGRAMS = 264  # two for each multiprocessor of an H200: enough for its memory bandwidth


@triton.jit(do_not_specialize=["num_pairs"])
def _copy(source, target, pairs, num_pairs, num_words, TILE: tl.constexpr):
    """`pairs`: the block of the source and the block of the target. `num_words`: words of a
    block."""
    tiles = tl.cdiv(num_words, TILE)
    for item in range(tl.program_id(0), num_pairs * tiles, tl.num_programs(0)):
        pair, tile = item // tiles, item % tiles
        source_block = tl.load(pairs + 2 * pair)
        target_block = tl.load(pairs + 2 * pair + 1)
        at = tile * TILE + tl.arange(0, TILE)
        words = tl.load(source + source_block * num_words + at, mask=at < num_words)
        tl.store(target + target_block * num_words + at, words, mask=at < num_words)


def copy_blocks(source: torch.Tensor, target: torch.Tensor, pairs: torch.Tensor) -> None:
    """Copy rows of `source` to rows of `target`, both [blocks, words] of int64. `pairs`: int64, row
    of the target and row of the source."""
    num_pairs, num_words = len(pairs), source.shape[1]
    items = num_pairs * triton.cdiv(num_words, TILE)
    grid = (min(items, PROGRAMS),)
    _copy[grid](source, target, pairs, num_pairs, num_words, TILE=TILE, num_warps=8)
