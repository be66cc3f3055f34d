"""A plan → the inputs of one step, packed in one buffer that reaches the device as one copy.

    [ positions · slots · where tokens are read and written · keys │ rows · lengths · chunks │ … ]
      int64                                                          int32                    fp32

A `Layout` says where each field lies; the host fills it through numpy, the device reads it through
views. A graph is recorded over the views of one layout, so its batch is padded up to that.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache
from itertools import chain
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt
import torch

from twostroke.exec.rng import stream_keys
from twostroke.exec.rows import DeviceRows, Ints, Writes
from twostroke.plan import Slot, StepPlan

Arrays = dict[str, npt.NDArray[Any]]
TORCH = {"q": torch.int64, "i": torch.int32, "f": torch.float32}


class Shape(NamedTuple):
    """How many of each there are in a step."""

    tokens: int  # padding included
    slots: int
    chunks: int
    chunk_tokens: int
    samples: int
    writes: int
    groups: int


class Layout:
    def __init__(self, shape: Shape) -> None:
        self.shape = shape
        tokens, _, chunks, _, samples, writes, groups = shape
        # Those of the tokens first: where they lie depends on how many there are, and no more.
        fields = [("positions", "q", tokens), ("read_at", "q", tokens)]
        fields += [(f"slots{group}", "q", tokens) for group in range(groups)]
        fields += [(name, "q", samples) for name in ("write_at", "sampled", "key0", "key1")]
        fields += [("writes_at", "q", writes), ("writes", "i", writes)]
        fields += [("rows", "i", samples), ("lengths", "i", samples)]  # decode slots are first
        fields += [("chunk_rows", "i", chunks), ("chunk_starts", "i", chunks)]
        fields += [("cu_tokens", "i", chunks + 1), ("top_k", "i", samples)]
        fields += [(name, "f", samples) for name in ("temperature", "top_p", "min_p")]
        self._fields: list[tuple[str, str, int, int]] = []
        at = 0
        for name, kind, count in fields:
            self._fields.append((name, kind, count, at))
            at += -(-count * (8 if kind == "q" else 4) // 16) * 16  # vector loads want them aligned
        self.num_bytes = at

    def host(self, buffer: torch.Tensor) -> Arrays:
        data = buffer.numpy()
        return {name: np.ndarray(n, kind, data, at) for name, kind, n, at in self._fields}

    def device(self, buffer: torch.Tensor) -> dict[str, torch.Tensor]:
        views = {}
        for name, kind, count, at in self._fields:
            dtype = TORCH[kind]
            views[name] = buffer[at : at + count * dtype.itemsize].view(dtype)
        return views


@lru_cache(maxsize=1024)
def decode_layout(batch: int, groups: int) -> Layout:
    """Of a step that decodes only. Each row may be given a block in each group."""
    return Layout(Shape(batch, batch, 0, 0, batch, batch * groups, groups))


class Packed(NamedTuple):
    layout: Layout
    buffer: torch.Tensor  # bytes on the host, pinned where there is a GPU
    rows: Ints  # [S]: rows that are sampled
    positions: Ints  # [S]: where each sampled token will stand
    largest: tuple[int, int]  # chunks: of those that begin their sequence, and of the others
    longest: tuple[int, int]  # cached positions of a decode slot, and of all that is sampled


def pack_decode(slots: Sequence[Slot], writes: Writes, rows: DeviceRows, batch: int) -> Packed:
    """Decode slots alone, padded up to `batch`. Writes must not be more than the layout takes."""
    layout, count = decode_layout(batch, rows.num_groups), len(slots)
    which, positions = _columns(slots)
    buffer = _buffer(layout, rows.device)
    to = layout.host(buffer)
    to["positions"][:count], to["positions"][count:] = positions, 0
    at = rows.token_cells(which, positions)
    to["read_at"][:count], to["read_at"][count:] = at, rows.spare
    for group in range(rows.num_groups):
        place = to[f"slots{group}"]
        place[:count], place[count:] = rows.slots(group, which, positions), -1
    to["rows"][:count], to["rows"][count:] = which, 0
    to["lengths"][:count], to["lengths"][count:] = positions + 1, 0
    to["sampled"][:] = 0  # all of them, in order: nobody reads it
    to["cu_tokens"][:] = 0
    _put_samples(to, rows, which, positions + 1)
    _put_writes(to, rows, writes)
    longest = int(positions.max(initial=-1)) + 1
    return Packed(layout, buffer, which, positions + 1, (0, 0), (longest, longest))


def pack_step(plan: StepPlan, writes: Writes, rows: DeviceRows, padded: int = 0) -> Packed:
    """Any step: decode slots first, then the chunks; tokens padded up to a number if one is
    given."""
    count, chunks = len(plan.decode), plan.prefill
    which, positions = _columns(plan.decode)
    table = np.array([chunk[:3] for chunk in chunks], np.int64).reshape(-1, 3)
    chunk_rows, starts, sizes = table.T
    ends = np.cumsum(sizes)
    total = int(ends[-1]) if chunks else 0
    last = np.array([chunk.last for chunk in chunks], bool)
    sampled_rows = np.concatenate([which, chunk_rows[last]])
    targets = np.concatenate([positions + 1, (starts + sizes)[last]])
    # A token's position: its place among the chunks' tokens, less where its chunk begins there.
    shift = np.repeat(starts - (ends - sizes), sizes)
    token_rows = np.concatenate([which, np.repeat(chunk_rows, sizes)])
    token_positions = np.concatenate([positions, np.arange(total) + shift])
    tokens = count + total
    layout = Layout(
        Shape(
            max(tokens, padded),
            count,
            len(chunks),
            total,
            len(targets),
            len(writes.at),
            rows.num_groups,
        )
    )
    buffer = _buffer(layout, rows.device)
    to = layout.host(buffer)
    to["positions"][:tokens], to["positions"][tokens:] = token_positions, 0
    at = rows.token_cells(token_rows, token_positions)
    to["read_at"][:tokens], to["read_at"][tokens:] = at, rows.spare
    for group in range(rows.num_groups):
        place = to[f"slots{group}"]
        place[:tokens], place[tokens:] = rows.slots(group, token_rows, token_positions), -1
    to["rows"][:], to["lengths"][:] = sampled_rows, targets
    to["chunk_rows"][:], to["chunk_starts"][:] = chunk_rows, starts
    to["cu_tokens"][0], to["cu_tokens"][1:] = 0, ends
    to["sampled"][:count] = np.arange(count)
    to["sampled"][count:] = (count + ends - 1)[last]
    _put_samples(to, rows, sampled_rows, targets)
    _put_writes(to, rows, writes)
    fresh = starts == 0
    largest = int(sizes[fresh].max(initial=0)), int(sizes[~fresh].max(initial=0))
    longest = int(positions.max(initial=-1)) + 1, int(targets.max(initial=0))
    return Packed(layout, buffer, sampled_rows, targets, largest, longest)


def _columns(slots: Sequence[Slot]) -> tuple[Ints, Ints]:
    """Rows and positions."""
    flat = np.fromiter(chain.from_iterable(slots), np.int64, 3 * len(slots)).reshape(-1, 3)
    return flat[:, 0], flat[:, 1]


def _buffer(layout: Layout, device: torch.device) -> torch.Tensor:
    """Torch's own pool of pinned memory hands a buffer out again only after its copy has run."""
    return torch.empty(layout.num_bytes, dtype=torch.uint8, pin_memory=device.type == "cuda")


def _put_samples(to: Arrays, rows: DeviceRows, which: Ints, positions: Ints) -> None:
    count = len(which)
    to["write_at"][:count] = rows.token_cells(which, positions)
    to["write_at"][count:] = rows.spare
    key0, key1 = stream_keys(rows.seed[which], positions)
    to["key0"][:count], to["key1"][:count] = key0, key1
    for name in ("temperature", "top_k", "top_p", "min_p"):
        to[name][:count] = getattr(rows, name)[which]
    for name in ("key0", "key1", "temperature", "top_k", "min_p"):
        to[name][count:] = 0
    to["top_p"][count:] = 1


def _put_writes(to: Arrays, rows: DeviceRows, writes: Writes) -> None:
    count = len(writes.at)
    to["writes_at"][:count], to["writes_at"][count:] = writes.at, rows.spare
    to["writes"][:count], to["writes"][count:] = writes.values, 0
