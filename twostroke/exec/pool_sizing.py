"""`PoolSizing`: the division of the memory of a KV cache among the pools of its groups.

    a group that keeps all positions   the memory that other groups leave
    a group with a window              as many sequences as other groups: with sequences of
                                       `reference_len` tokens all pools run out together

The reference is min(max_model_len, 4 × the largest window): for shorter sequences the groups that
keep all positions run out later than those with a window, for longer ones earlier. A pool with a
window holds at least one sequence with a chunk as long as a step, and never more than all
sequences' windows and one step's tokens.
"""

from __future__ import annotations

from dataclasses import dataclass

from twostroke.config import EngineConfig
from twostroke.kv.cache import GroupLimits, blocks_held
from twostroke.model.describe.spec import ModelSpec

REFERENCE_WINDOWS = 4


@dataclass(frozen=True, slots=True)
class PoolSizing:
    """Blocks and bytes of the groups. Every tuple has one entry per group."""

    block_size: int
    windows: tuple[int | None, ...]
    block_bytes: tuple[int, ...]
    held: tuple[int, ...]  # blocks of a sequence of the reference length
    min_blocks: tuple[int, ...]  # of pools with a window
    max_blocks: tuple[int, ...]  # of pools with a window

    @property
    def all_slide(self) -> bool:
        """True if all groups have a window."""
        return None not in self.windows

    @property
    def main(self) -> int:
        """The group whose blocks num_gpu_blocks_override counts: the first group that keeps all
        positions, or the first group if all have windows."""
        return 0 if self.all_slide else self.windows.index(None)

    @property
    def min_bytes(self) -> int:
        return self.num_bytes(self._blocks(1))

    @property
    def token_bytes(self) -> float:
        """Bytes of one token in all groups, including scales."""
        return sum(self.block_bytes) / self.block_size

    def num_bytes(self, blocks: tuple[int, ...]) -> int:
        """Return the bytes of pools with these blocks and a null block each."""
        return sum((n + 1) * size for n, size in zip(blocks, self.block_bytes, strict=True))

    def with_main(self, num_blocks: int) -> tuple[int, ...]:
        """Return the blocks of each group if the main group has `num_blocks`."""
        blocks = list(self._blocks(num_blocks))
        blocks[self.main] = num_blocks
        return tuple(blocks)

    def within(self, kv_bytes: int) -> tuple[int, ...]:
        """Return the largest pools that fit. The caller has checked `min_bytes`."""
        fits, too_many = 1, kv_bytes // self.block_bytes[self.main] + 1
        while too_many - fits > 1:
            middle = (fits + too_many) // 2
            if self.num_bytes(self._blocks(middle)) <= kv_bytes:
                fits = middle
            else:
                too_many = middle
        return self._blocks(fits)

    def main_within(self, kv_bytes: int) -> int:
        return 0 if kv_bytes < self.min_bytes else self.within(kv_bytes)[self.main]

    def _blocks(self, num_main: int) -> tuple[int, ...]:
        """Return the blocks for as many sequences as fit `num_main` blocks of the main group."""
        blocks = []
        for group, window in enumerate(self.windows):
            if window is None:
                blocks.append(num_main)
            else:
                fair = -(-num_main * self.held[group] // self.held[self.main])
                blocks.append(min(max(fair, self.min_blocks[group]), self.max_blocks[group]))
        return tuple(blocks)


def pool_sizing(
    config: EngineConfig, spec: ModelSpec, kv_itemsize: int, max_len: int, on_gpu: bool
) -> PoolSizing:
    size, groups = config.block_size, spec.kv_groups()
    windows = tuple(group.window for group in groups)
    sliding = [window for window in windows if window is not None]
    reference_len = min([max_len, *([REFERENCE_WINDOWS * max(sliding)] if sliding else [])])
    chunk = config.token_budget(on_gpu, max_len) if sliding else 1
    return PoolSizing(
        size,
        windows,
        tuple(group.block_bytes(size, kv_itemsize, config.kv_scaled) for group in groups),
        held=tuple(blocks_held(reference_len, window, 1, size) for window in windows),
        min_blocks=tuple(blocks_held(max_len, window, chunk, size) for window in windows),
        max_blocks=tuple(
            config.max_num_seqs * (-(-(window or 0) // size) + 1) + -(-chunk // size)
            for window in windows
        ),
    )


def concurrent_requests(groups: tuple[GroupLimits, ...], num_tokens: int, block_size: int) -> int:
    """Return how many requests of this length fit the cache at one time."""
    return min(
        group.num_blocks // blocks_held(num_tokens, group.window, 1, block_size) for group in groups
    )


def capacity(groups: tuple[GroupLimits, ...], block_size: int) -> str:
    """Return the capacity of each pool in tokens, as text."""
    if len(groups) == 1:
        return f"{groups[0].num_blocks * block_size:,} tokens"
    parts = [
        f"{group.num_blocks * block_size:,} "
        + ("of all positions" if group.window is None else f"in windows of {group.window:,}")
        for group in groups
    ]
    return f"{' + '.join(parts)} tokens"
