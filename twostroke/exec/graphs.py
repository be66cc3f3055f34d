"""Decode steps as graphs: a ladder of batch sizes recorded at start, replayed with new inputs.

A batch between two rungs is padded up to the next; one above the ladder runs without a graph.
Recording goes from the largest down, in one pool of memory, so that the smaller ones fit into what
the largest took. A replay is one copy of the packed inputs and one launch.
"""

from __future__ import annotations

import gc
from bisect import bisect_left
from collections.abc import Callable, Iterable
from functools import partial

import torch

from twostroke.exec.packed import Packed, decode_layout, pack_decode
from twostroke.exec.program import StepProgram
from twostroke.exec.rows import NOTHING

Run = Callable[[], object]
Record = Callable[[Run], Run]  # what to run → what replays it


def ladder(max_num_seqs: int, largest: int | None = None) -> list[int]:
    """1, 2, 4, 8, then by eights, from 256 by sixteens: padding costs little, a rung some time."""
    top = max_num_seqs if largest is None else min(largest, max_num_seqs)
    rungs = {1, 2, 4, *range(8, 256, 8), *range(256, top + 1, 16)}
    return sorted({rung for rung in rungs if rung < top} | ({top} if top else set()))


class DecodeGraphs:
    def __init__(self, program: StepProgram, sizes: Iterable[int], record: Record) -> None:
        self.sizes = sorted(sizes)
        rows = program.rows
        largest = decode_layout(self.sizes[-1], rows.num_groups)
        self._buffer = torch.empty(largest.num_bytes, dtype=torch.uint8, device=rows.device)
        self._replays: dict[int, Run] = {}
        for size in reversed(self.sizes):
            padding = pack_decode((), NOTHING, rows, size)
            self._buffer[: padding.layout.num_bytes].copy_(padding.buffer)
            step = program.prepare(padding.layout, self._buffer, 0, rows.max_len)
            self._replays[size] = record(partial(program.run, step))

    def size_for(self, batch: int) -> int | None:
        """The rung for a batch; None if it is above the ladder."""
        at = bisect_left(self.sizes, batch)
        return self.sizes[at] if at < len(self.sizes) else None

    def replay(self, packed: Packed) -> None:
        size = packed.layout.shape.slots
        self._buffer[: packed.layout.num_bytes].copy_(packed.buffer, non_blocking=True)
        self._replays[size]()


class CudaRecorder:
    """Records on a stream of its own; all that is recorded shares one pool of memory."""

    def __init__(self, device: torch.device) -> None:
        self._pool = torch.cuda.graph_pool_handle()
        self._stream = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]

    def __call__(self, run: Run) -> Run:
        graph = torch.cuda.CUDAGraph()
        self._stream.wait_stream(torch.cuda.current_stream())
        # A tensor that the collector frees while a graph is being recorded would break it.
        enabled = gc.isenabled()
        gc.disable()
        try:
            with torch.cuda.stream(self._stream):
                run()  # compiles, and lets libraries set themselves up, which no graph may hold
                graph.capture_begin(pool=self._pool, capture_error_mode="thread_local")
                try:
                    run()
                finally:
                    graph.capture_end()
        finally:
            if enabled:
                gc.enable()
        torch.cuda.current_stream().wait_stream(self._stream)
        return graph.replay
