"""The inputs of one step in one buffer, which is copied to the device at once.

    [ positions · slots · cells to read and write · random keys │ rows · lengths · chunks │ … ]
      int64                                                       int32                     fp32

A `Layout` defines the offset of each field. The host fills the buffer through numpy views, and the
device reads it through tensor views. A graph is captured with the views of one layout, so smaller
batches are padded to the batch size of that layout.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt
import torch

from twostroke.exec.device_rows import DeviceRows
from twostroke.exec.rng import stream_keys
from twostroke.exec.rows import Ints, Writes
from twostroke.exec.samples import Samples, decode_tokens, samples_of
from twostroke.plan import Slot, StepPlan

Arrays = dict[str, npt.NDArray[Any]]
Spans = Sequence[tuple[int, int]]  # start and end of each chunk in the cache
TORCH = {"q": torch.int64, "i": torch.int32, "f": torch.float32}


class Shape(NamedTuple):
    """The sizes of a step."""

    tokens: int  # padding included
    decode_tokens: int
    queries: int  # tokens of each decode row
    chunks: int
    chunk_tokens: int
    samples: int
    writes: int
    groups: int


class Layout:
    def __init__(self, shape: Shape) -> None:
        self.shape = shape
        tokens, chunks, samples = shape.tokens, shape.chunks, shape.samples
        groups = range(shape.groups)
        # The fields of tokens are first, so that their offsets depend only on the number of tokens.
        fields = [("positions", "q", tokens), ("read_at", "q", tokens)]
        fields += [(f"slots{group}", "q", tokens) for group in groups]
        fields += [(name, "q", samples) for name in ("write_at", "sampled", "key0", "key1")]
        fields += [("writes_at", "q", shape.writes), ("writes", "i", shape.writes)]
        # Each sample as a decode row with one query; the samples of the decode rows are first.
        fields += [("rows", "i", samples)]
        fields += [(f"lengths{group}", "i", samples) for group in groups]
        fields += [("chunk_rows", "i", chunks), ("cu_tokens", "i", chunks + 1)]
        fields += [(f"chunk_starts{group}", "i", chunks) for group in groups]
        fields += [("top_k", "i", samples)]
        fields += [(name, "f", samples) for name in ("temperature", "top_p", "min_p")]
        self._fields: list[tuple[str, str, int, int]] = []
        at = 0
        for name, code, count in fields:
            self._fields.append((name, code, count, at))
            at += -(-count * (8 if code == "q" else 4) // 16) * 16  # aligned for vector loads
        self.num_bytes = at

    def host(self, buffer: torch.Tensor) -> Arrays:
        data = buffer.numpy()
        return {name: np.ndarray(n, code, data, at) for name, code, n, at in self._fields}

    def device(self, buffer: torch.Tensor) -> dict[str, torch.Tensor]:
        views = {}
        for name, code, count, at in self._fields:
            dtype = TORCH[code]
            views[name] = buffer[at : at + count * dtype.itemsize].view(dtype)
        return views


@lru_cache(maxsize=1024)
def decode_layout(batch: int, groups: int) -> Layout:
    """Return the layout of a step that only decodes, one token per row. It has room for one new
    block in each group and row."""
    return Layout(Shape(batch, batch, 1, 0, 0, batch, batch * groups, groups))


class Longest(NamedTuple):
    """The length of the longest context, in cache entries."""

    decode: int  # of the decode rows
    samples: int  # of all samples


class StepBuffer(NamedTuple):
    layout: Layout
    data: torch.Tensor  # bytes on the host, pinned if there is a GPU
    samples: Samples
    max_first: int  # tokens of the largest chunk at position 0
    max_continued: int  # tokens of the largest other chunk
    longest: list[Longest]  # per KV group
    spans: list[Spans]  # per KV group


def fill_decode(slots: Sequence[Slot], writes: Writes, rows: DeviceRows, batch: int) -> StepBuffer:
    """Fill the buffer with decode rows of one token, padded to `batch`. The writes must fit."""
    layout, decode = decode_layout(batch, rows.num_groups), decode_tokens(slots)
    samples = samples_of(decode, ())
    data = _allocate(layout, rows.device)
    to = layout.host(data)
    _put_tokens(to, rows, decode.rows, decode.positions)
    longest = _put_samples(to, rows, samples, len(slots))
    to["cu_tokens"][:] = 0
    _put_writes(to, rows, writes)
    return StepBuffer(layout, data, samples, 0, 0, longest, [()] * rows.num_groups)


def fill_step(plan: StepPlan, writes: Writes, rows: DeviceRows, padded: int = 0) -> StepBuffer:
    """Fill the buffer of any step: decode rows first, then the chunks. `padded`: minimum number of
    tokens, reached by padding."""
    decode, chunks = decode_tokens(plan.decode), plan.prefill
    samples = samples_of(decode, chunks)
    table = np.array([chunk[:3] for chunk in chunks], np.int64).reshape(-1, 3)
    chunk_rows, starts, sizes = table.T
    ends = np.cumsum(sizes)
    total = int(ends[-1]) if chunks else 0
    # position = index among the tokens of all chunks + shift of the token's chunk
    shift = np.repeat(starts - (ends - sizes), sizes)
    token_rows = np.concatenate([decode.rows, np.repeat(chunk_rows, sizes)])
    positions = np.concatenate([decode.positions, np.arange(total) + shift])
    count = len(decode.rows)
    shape = Shape(
        max(count + total, padded),
        count,
        decode.queries or 1,  # if rows have different numbers of tokens, each token is a row
        len(chunks),
        total,
        len(samples.rows),
        len(writes.at),
        rows.num_groups,
    )
    layout = Layout(shape)
    data = _allocate(layout, rows.device)
    to = layout.host(data)
    _put_tokens(to, rows, token_rows, positions)
    longest = _put_samples(to, rows, samples, count)
    to["chunk_rows"][:] = chunk_rows
    to["cu_tokens"][0], to["cu_tokens"][1:] = 0, ends
    spans: list[Spans] = []
    for group in range(rows.num_groups):
        at = to[f"chunk_starts{group}"]
        at[:] = rows.indices(group, chunk_rows, starts)
        spans.append(list(zip(at.tolist(), (at + sizes).tolist(), strict=True)))
    _put_writes(to, rows, writes)
    first = starts == 0
    largest = int(sizes[first].max(initial=0)), int(sizes[~first].max(initial=0))
    return StepBuffer(layout, data, samples, *largest, longest, spans)


def _allocate(layout: Layout, device: torch.device) -> torch.Tensor:
    """Return pinned memory. Torch reuses a pinned buffer only after its copies have run."""
    return torch.empty(layout.num_bytes, dtype=torch.uint8, pin_memory=device.type == "cuda")


def _put_tokens(to: Arrays, state: DeviceRows, rows: Ints, positions: Ints) -> None:
    count = len(rows)
    to["positions"][:count], to["positions"][count:] = positions, 0
    to["read_at"][:count] = state.token_cells(rows, positions)
    to["read_at"][count:] = state.spare
    for group in range(state.num_groups):
        place = to[f"slots{group}"]
        place[:count] = state.slots(group, rows, state.indices(group, rows, positions))
        place[count:] = -1


def _put_samples(to: Arrays, state: DeviceRows, samples: Samples, decoding: int) -> list[Longest]:
    """Fill the fields of the samples. The first `decoding` samples belong to decode rows."""
    rows, positions, count = samples.rows, samples.positions, len(samples.rows)
    to["rows"][:count], to["rows"][count:] = rows, 0
    to["sampled"][:count], to["sampled"][count:] = samples.tokens, 0
    longest = []
    for group in range(state.num_groups):
        place, lengths = to[f"lengths{group}"], state.indices(group, rows, positions)
        place[:count], place[count:] = lengths, 0
        longest_of_all = of_decode = int(lengths.max(initial=0))
        if decoding < count:
            of_decode = int(lengths[:decoding].max(initial=0))
        longest.append(Longest(of_decode, longest_of_all))
    to["write_at"][:count] = state.token_cells(rows, positions)
    to["write_at"][count:] = state.spare
    key0, key1 = stream_keys(state.seed[rows], positions)
    to["key0"][:count], to["key1"][:count] = key0, key1
    for name in ("temperature", "top_k", "top_p", "min_p"):
        to[name][:count] = getattr(state, name)[rows]
    for name in ("key0", "key1", "temperature", "top_k", "min_p"):
        to[name][count:] = 0
    to["top_p"][count:] = 1
    return longest


def _put_writes(to: Arrays, state: DeviceRows, writes: Writes) -> None:
    count = len(writes.at)
    to["writes_at"][:count], to["writes_at"][count:] = writes.at, state.spare
    to["writes"][:count], to["writes"][count:] = writes.values, 0
