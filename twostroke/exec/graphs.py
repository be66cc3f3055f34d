"""Steps as graphs: a ladder of sizes recorded at start, replayed with new inputs.

A batch between two rungs is padded up to the next; one above the ladder runs without a graph.
Recording goes from the largest down, in one pool of memory, so that the smaller ones fit into what
the largest took. A decode step is one copy of the step buffer and one launch.
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

PIECE_BUFFER_BYTES = 1 << 20  # of step buffer: some 2,000 tokens, and what they change in rows
EMPTY_PLAN = StepPlan(0, (), (), (), (), (), (), PhaseWork(), PhaseWork())

Run = Callable[[], object]
# Work that stops now and then → what replays each stretch of it.
Record = Callable[[Callable[[], Iterator[object]]], list[Run]]


def ladder(max_num_seqs: int, largest: int | None = None) -> list[int]:
    """1, 2, 4, 8, then by eights, from 256 by sixteens: padding costs little, a rung some time."""
    top = max_num_seqs if largest is None else min(largest, max_num_seqs)
    rungs = {1, 2, 4, *range(8, 256, 8), *range(256, top + 1, 16)}
    return sorted({rung for rung in rungs if rung < top} | ({top} if top else set()))


def piece_ladder(budget: int) -> list[int]:
    """Numbers of tokens. Where a step has more, its products take longer than its launches."""
    rungs = [*range(64, 512, 64), *range(512, 1024, 128), *range(1024, 2049, 256)]
    return [rung for rung in rungs if rung < budget + 64]


def _rung(sizes: list[int], count: int) -> int | None:
    at = bisect_left(sizes, count)
    return sizes[at] if at < len(sizes) else None


class DecodeGraphs:
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
        """The rung for a batch; None if it is above the ladder."""
        return _rung(self.sizes, batch)

    def replay(self, step: StepBuffer) -> None:
        size = step.layout.shape.decode_tokens
        self._buffer[: step.layout.num_bytes].copy_(step.data, non_blocking=True)
        self._replays[size]()


def _in_one_piece(program: StepProgram, step: DeviceStep) -> Iterator[object]:
    yield program.run(step)


class PieceGraphs:
    """Steps with prefill: a graph for all that lies between the attention of two layers.

        [ embed … q₀ ] attend [ o₀ … q₁ ] attend … [ … qₙ ] rest of layer n       [ ]: a graph

    What attention launches depends on the chunks, the rest of the last layer on how many tokens are
    sampled, everything else only on the number of tokens, which is padded up to a rung. So the
    device is not kept waiting for a launch per operation.
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
        program = self._program  # a generator: what makes the inputs is recorded, too
        yield from program.decoder.pieces(program.inputs(step), program.pool, work)

    def size_for(self, tokens: int) -> int | None:
        return _rung(self.sizes, tokens)

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
        """What the decoder's `forward` does, on inputs that `send` has put in place."""
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


class RunAgain:
    """Records nothing: a replay runs the same stretch once more. For devices without graphs."""

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
    """One that is being recorded (`torch.cuda.CUDAGraph`)."""

    def capture_end(self) -> None: ...

    def replay(self) -> None: ...


class Stretch:
    """A stretch of a step as it is recorded: a graph, or several with what the host does between
    them. Where ranks talk through the host, they cut it there (`Ranks.cut`):

        [ … down ] sum over the ranks [ norm … ]       [ ]: a graph
    """

    def __init__(self, begin: Callable[[], Graph], ranks: Ranks) -> None:
        self._begin, self._ranks = begin, ranks
        self._runs: list[Run] = []

    def record(self, work: Callable[[], object]) -> Run:
        """What replays it."""
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
        """The graph that was recorded. Collectives inside it are counted when it is replayed."""
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
    """Records on a stream of its own; all that is recorded shares one pool of memory."""

    def __init__(self, device: torch.device, ranks: Ranks = ONE_RANK) -> None:
        self._pool = torch.cuda.graph_pool_handle()
        self._stream = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]
        self._ranks = ranks

    def __call__(self, pieces: Callable[[], Iterator[object]]) -> list[Run]:
        self._stream.wait_stream(torch.cuda.current_stream())
        # A tensor that the collector frees while a graph is being recorded would break it.
        enabled = gc.isenabled()
        gc.disable()
        try:
            with torch.cuda.stream(self._stream):
                count = sum(1 for _ in pieces())  # compiles, and lets libraries set themselves up
                running = pieces()
                runs = [self._capture(running) for _ in range(count)]
        finally:
            if enabled:
                gc.enable()
        torch.cuda.current_stream().wait_stream(self._stream)
        return runs

    def _capture(self, running: Iterator[object]) -> Run:
        """The next stretch."""
        return Stretch(self._begin, self._ranks).record(partial(next, running))

    def _begin(self) -> torch.cuda.CUDAGraph:
        graph = torch.cuda.CUDAGraph()
        graph.capture_begin(pool=self._pool, capture_error_mode="thread_local")
        return graph
