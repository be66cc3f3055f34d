"""CUDA graphs of steps: a ladder of sizes is captured at start and replayed with new inputs.

A batch between two sizes is padded to the larger size. A batch above the ladder runs without a
graph. The largest size is captured first, in one memory pool that the smaller sizes reuse. A decode
step is one copy of the step buffer and one launch.
"""

from __future__ import annotations

import gc
from bisect import bisect_left
from collections.abc import Callable, Iterable, Iterator
from functools import partial
from typing import Protocol

import torch

from twostroke.exec.program import DeviceStep, StepProgram
from twostroke.exec.rows import NO_WRITES
from twostroke.exec.step_buffer import StepBuffer, decode_layout, fill_decode, fill_step
from twostroke.model.describe.tensor_parallel import ONE_RANK, Comm, Ranks
from twostroke.model.torch.attention import Workspace
from twostroke.plan import PhaseWork, StepPlan

PIECE_BUFFER_BYTES = 1 << 20  # a step buffer of some 2,000 tokens and their writes to rows
EMPTY_PLAN = StepPlan(
    step=0,
    new=(),
    retired=(),
    appended=(),
    dropped=(),
    prefill=(),
    decode=(),
    prefill_work=PhaseWork(),
    decode_work=PhaseWork(),
)

Run = Callable[[], object]
# Captures work that is split into segments. Returns a function that replays each segment.
Record = Callable[[Callable[[], Iterator[object]]], list[Run]]


def ladder(max_num_seqs: int, largest: int | None = None) -> list[int]:
    """Return the captured batch sizes: 1, 2, 4, 8, then in steps of 8, and from 256 in steps of 16.
    Padding costs little time, and the capture of each size takes time."""
    top = max_num_seqs if largest is None else min(largest, max_num_seqs)
    sizes = {1, 2, 4, *range(8, 256, 8), *range(256, top + 1, 16)}
    return sorted({size for size in sizes if size < top} | ({top} if top else set()))


def piece_ladder(budget: int) -> list[int]:
    """Return the captured numbers of tokens for steps with prefill. Larger steps need no graphs,
    because their matmuls take longer than the launches."""
    sizes = [*range(64, 512, 64), *range(512, 1024, 128), *range(1024, 2049, 256)]
    return [size for size in sizes if size < budget + 64]


def _padded_size(sizes: list[int], count: int) -> int | None:
    at = bisect_left(sizes, count)
    return sizes[at] if at < len(sizes) else None


class DecodeGraphs:
    """One graph per batch size for steps that only decode, one token per row."""

    def __init__(self, program: StepProgram, sizes: Iterable[int], record: Record) -> None:
        self.sizes = sorted(sizes)
        rows = program.rows
        largest = decode_layout(self.sizes[-1], rows.num_groups)
        self._buffer = torch.empty(largest.num_bytes, dtype=torch.uint8, device=rows.device)
        self._replays: dict[int, Run] = {}
        for size in reversed(self.sizes):
            padding = fill_decode((), NO_WRITES, rows, size)
            self._buffer[: padding.layout.num_bytes].copy_(padding.data)
            step = program.prepare(padding.layout, self._buffer)
            (self._replays[size],) = record(partial(_in_one_piece, program, step))

    def size_for(self, batch: int) -> int | None:
        """Return the captured size for a batch; None above the ladder."""
        return _padded_size(self.sizes, batch)

    def replay(self, step: StepBuffer) -> None:
        size = step.layout.shape.decode_tokens
        self._buffer[: step.layout.num_bytes].copy_(step.data, non_blocking=True)
        self._replays[size]()


def _in_one_piece(program: StepProgram, step: DeviceStep) -> Iterator[object]:
    yield program.run(step)


class PiecewiseGraphs:
    """Graphs for steps with prefill: one for all operations between the attention of two layers.

        [ embed … q₀ ] attend [ o₀ … q₁ ] attend … [ … qₙ ] rest of layer n       [ ]: a graph

    The launches of attention depend on the chunks, and the rest of the last layer depends on the
    number of sampled tokens. All other operations depend only on the number of tokens, which is
    padded to a captured size. The device therefore does not wait for a launch per operation.
    """

    def __init__(self, program: StepProgram, sizes: Iterable[int], record: Record) -> None:
        self.sizes = sorted(sizes)
        self._program = program
        decoder, rows = program.decoder, program.rows
        self._buffer = torch.empty(PIECE_BUFFER_BYTES, dtype=torch.uint8, device=decoder.device)
        self._work = Workspace(decoder.spec, self.sizes[-1], decoder.dtype, decoder.device)
        self._work.zero()
        self._replays: dict[int, list[Run]] = {}
        for size in reversed(self.sizes):
            padding = fill_step(EMPTY_PLAN, NO_WRITES, rows, size)
            self._buffer[: padding.layout.num_bytes].copy_(padding.data)
            step = program.prepare(padding.layout, self._buffer)
            self._replays[size] = record(partial(self._pieces, step, self._work.first(size)))

    def _pieces(self, step: DeviceStep, work: Workspace) -> Iterator[int]:
        # A generator, so that the preparation of the inputs is captured, too.
        program = self._program
        yield from program.decoder.pieces(program.inputs(step), program.pool, work)

    def size_for(self, tokens: int) -> int | None:
        return _padded_size(self.sizes, tokens)

    def fits(self, step: StepBuffer) -> bool:
        return step.layout.num_bytes <= PIECE_BUFFER_BYTES

    def send(self, step: StepBuffer, keeps_all: bool = False) -> DeviceStep:
        layout = step.layout
        self._buffer[: layout.num_bytes].copy_(step.data, non_blocking=True)
        largest = (step.max_first, step.max_continued)
        return self._program.prepare(
            layout, self._buffer, *largest, step.longest, step.spans, keeps_all
        )

    def forward(self, step: DeviceStep) -> torch.Tensor:
        """Run the decoder's `forward` on the inputs that `send` has copied."""
        program, size = self._program, step.shape.tokens
        decoder, pool, work = program.decoder, program.pool, self._work.first(size)
        # The graphs read the token ids; attention does not.
        inputs = program.inputs(step, step.fields["read_at"])
        attend = decoder.attention(inputs, pool, work)
        *replays, last = self._replays[size]
        for index, replay in enumerate(replays):
            replay()
            attend(index)
        last()
        return decoder.last_layer(inputs, pool, work, attend)


class EagerReplay:
    """A recorder for devices without graphs: a replay runs the segment again."""

    def __call__(self, pieces: Callable[[], Iterator[object]]) -> list[Run]:
        running: list[Iterator[object]] = []

        def start() -> None:
            running[:] = [pieces()]
            next(running[0])

        def go_on() -> None:
            next(running[0])

        count = sum(1 for _ in pieces())
        return [start, *[go_on] * (count - 1)]


class Graph(Protocol):
    """A graph during capture (`torch.cuda.CUDAGraph`)."""

    def capture_end(self) -> None: ...

    def replay(self) -> None: ...


class GraphSegment:
    """A segment of a step during capture: one graph, or several graphs with host work between
    them. Ranks that communicate through the host cut the segment there (`Ranks.cut`):

        [ … down ] sum over the ranks [ norm … ]       [ ]: a graph
    """

    def __init__(self, begin: Callable[[], Graph], ranks: Ranks) -> None:
        self._begin, self._ranks = begin, ranks
        self._runs: list[Run] = []

    def record(self, work: Callable[[], object]) -> Run:
        """Capture `work` and return a function that replays it."""
        ranks, self._graph, self._comm = self._ranks, self._begin(), self._ranks.comm
        ranks.cut = None if ranks.alone else self._cut
        try:
            work()
        finally:
            ranks.cut = None
            self._graph.capture_end()
        self._keep()
        return self._runs[0] if len(self._runs) == 1 else partial(_run_all, self._runs)

    def _cut(self, run: Run) -> None:
        self._graph.capture_end()
        self._keep()
        self._runs.append(run)
        self._graph = self._begin()

    def _keep(self) -> None:
        """Keep the captured graph. Collectives inside the graph are counted at each replay."""
        ranks = self._ranks
        inside, ranks.comm = ranks.comm.since(self._comm), self._comm
        replay = self._graph.replay
        self._runs.append(partial(_counted, ranks, inside, replay) if any(inside) else replay)


def _run_all(runs: Iterable[Run]) -> None:
    for run in runs:
        run()


def _counted(ranks: Ranks, comm: Comm, replay: Run) -> None:
    ranks.comm = ranks.comm.plus(comm)
    replay()


class CudaRecorder:
    """Captures CUDA graphs on a separate stream. All graphs share one memory pool."""

    def __init__(self, device: torch.device, ranks: Ranks = ONE_RANK) -> None:
        self._pool = torch.cuda.graph_pool_handle()
        self._stream = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]
        self._ranks = ranks

    def __call__(self, pieces: Callable[[], Iterator[object]]) -> list[Run]:
        self._stream.wait_stream(torch.cuda.current_stream())
        # A tensor that the garbage collector frees during capture would break the graph.
        enabled = gc.isenabled()
        gc.disable()
        try:
            with torch.cuda.stream(self._stream):
                count = sum(1 for _ in pieces())  # compiles kernels and initialises libraries
                running = pieces()
                runs = [self._capture(running) for _ in range(count)]
        finally:
            if enabled:
                gc.enable()
        torch.cuda.current_stream().wait_stream(self._stream)
        return runs

    def _capture(self, running: Iterator[object]) -> Run:
        """Capture the next segment."""
        return GraphSegment(self._begin, self._ranks).record(partial(next, running))

    def _begin(self) -> torch.cuda.CUDAGraph:
        graph = torch.cuda.CUDAGraph()
        graph.capture_begin(pool=self._pool, capture_error_mode="thread_local")
        return graph
