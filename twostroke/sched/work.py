"""`AttentionWork`: the cached positions that a step attends to and reads, over all KV groups."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence

from twostroke.kv.cache import GroupLimits


class AttentionWork:
    """Makes the counts of `PhaseWork`: means over the layers, because windows make layers differ.

    Attending to a position costs FLOPs, so each layer is weighted by its query channels. Reading a
    position costs bytes, so each layer is weighted by the keys and values of a position.
    """

    def __init__(self, groups: Sequence[GroupLimits]) -> None:
        attended: Counter[int | None] = Counter()
        read: Counter[int | None] = Counter()
        for group in groups:
            attended[group.window] += group.query_channels
            read[group.window] += group.kv_elements
        self._weights = [(window, attended[window], read[window]) for window in attended]
        self._attended, self._read = attended.total(), read.total()
        self._no_window = list(attended) == [None]

    def of_slots(self, positions: Sequence[int]) -> tuple[int, int]:
        """Return the positions attended to and read by one token at each of `positions`."""
        if self._no_window:  # the usual case, every step
            visible = sum(positions) + len(positions)
            return visible, visible
        return self._means([(n := _seen(positions, window), n) for window, _, _ in self._weights])

    def of_chunk(self, start: int, count: int) -> tuple[int, int]:
        """Return the positions that tokens [start, start + count) attend to, summed, and read."""
        counts = []
        for window, _, _ in self._weights:
            before = start if window is None else min(start, window - 1)
            counts.append((visible_positions(start, count, window), before + count))
        return self._means(counts)

    def _means(self, counts: list[tuple[int, int]]) -> tuple[int, int]:
        if len(counts) == 1:
            return counts[0]
        attended = read = 0
        for (of_attended, of_read), (_, weight, read_weight) in zip(
            counts, self._weights, strict=True
        ):
            attended += of_attended * weight
            read += of_read * read_weight
        return attended // self._attended, read // self._read


def visible_positions(start: int, count: int, window: int | None) -> int:
    """Return the sum of the positions that the queries [start, start + count) attend to."""
    full = count * start + count * (count + 1) // 2
    if window is None or start + count <= window:
        return full
    growing = max(0, min(count, window - start))  # queries that still see everything
    return growing * start + growing * (growing + 1) // 2 + (count - growing) * window


def _seen(positions: Sequence[int], window: int | None) -> int:
    if window is None:
        return sum(positions) + len(positions)
    return sum(min(position + 1, window) for position in positions)
