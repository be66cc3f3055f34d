"""Steps as graphs: a ladder of sizes recorded at start, replayed with new inputs.

A batch between two rungs is padded up to the next; one above the ladder runs without a graph.
Recording goes from the largest down, in one pool of memory, so that the smaller ones fit into what
the largest took. A decode step is one copy of the packed inputs and one launch.
"""

from __future__ import annotations

import gc
from bisect import bisect_left
from collections.abc import Callable, Iterable
from functools import partial

import torch

from twostroke.exec.packed import Packed, decode_layout, pack_decode, pack_step
from twostroke.exec.program import DeviceStep, StepProgram
from twostroke.exec.rows import NOTHING
from twostroke.model.fused import lists_of
from twostroke.plan import PhaseWork, StepPlan

PIECE_BUFFER_BYTES = 1 << 20  # of packed inputs: some 2,000 tokens, and what they change in rows
EMPTY_PLAN = StepPlan(0, (), (), (), (), (), (), PhaseWork(), PhaseWork())

Run = Callable[[], object]
Record = Callable[[Run], Run]  # what to run → what replays it


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
            padding = pack_decode((), NOTHING, rows, size)
            self._buffer[: padding.layout.num_bytes].copy_(padding.buffer)
            longest = rows.max_len, rows.max_len
            step = program.prepare(padding.layout, self._buffer, longest=longest)
            self._replays[size] = record(partial(program.run, step))

    def size_for(self, batch: int) -> int | None:
        """The rung for a batch; None if it is above the ladder."""
        return _rung(self.sizes, batch)

    def replay(self, packed: Packed) -> None:
        size = packed.layout.shape.slots
        self._buffer[: packed.layout.num_bytes].copy_(packed.buffer, non_blocking=True)
        self._replays[size]()


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
        spec, dtype, device = decoder.spec, decoder.dtype, decoder.device
        largest = self.sizes[-1]
        self._buffer = torch.empty(PIECE_BUFFER_BYTES, dtype=torch.uint8, device=device)
        heads = spec.num_heads + 2 * spec.num_kv_heads
        self._qkv = torch.zeros(largest, heads, spec.head_dim, dtype=dtype, device=device)
        self._attended = torch.zeros_like(self._qkv[:, : spec.num_heads])
        self._residual = torch.zeros(largest, spec.hidden_size, dtype=dtype, device=device)
        self._replays: dict[int, list[Run]] = {}
        for size in reversed(self.sizes):
            padding = pack_step(EMPTY_PLAN, NOTHING, rows, size)
            self._buffer[: padding.layout.num_bytes].copy_(padding.buffer)
            step = program.prepare(padding.layout, self._buffer)
            pieces = [partial(self._piece, n, size, step) for n in range(spec.num_layers)]
            self._replays[size] = [record(piece) for piece in pieces]

    def size_for(self, tokens: int) -> int | None:
        return _rung(self.sizes, tokens)

    def fits(self, packed: Packed) -> bool:
        return packed.layout.num_bytes <= PIECE_BUFFER_BYTES

    def send(self, packed: Packed, keeps_all: bool = False) -> DeviceStep:
        layout = packed.layout
        self._buffer[: layout.num_bytes].copy_(packed.buffer, non_blocking=True)
        return self._program.prepare(
            layout, self._buffer, packed.largest, packed.longest, keeps_all
        )

    def forward(self, step: DeviceStep) -> torch.Tensor:
        """What the decoder's `forward` does, on inputs that `send` has put in place."""
        program, size = self._program, step.shape.tokens
        decoder, kv = program.decoder, program.kv
        inputs = program.inputs(step, step.fields["read_at"])
        qkv, attended, residual = (
            part[:size] for part in (self._qkv, self._attended, self._residual)
        )
        attend = decoder.attention(lists_of(inputs, qkv, attended), inputs)
        *replays, last = self._replays[size]
        for index, replay in enumerate(replays):
            replay()
            attend(index, kv[index])
        last()
        return decoder.last_layer(qkv, attended, residual, inputs, attend, kv[-1])

    def _piece(self, index: int, size: int, step: DeviceStep) -> None:
        program, decoder, residual = self._program, self._program.decoder, self._residual[:size]
        inputs = program.inputs(step, step.fields["read_at"])
        if index == 0:
            token_ids = program.rows.cells.index_select(0, step.fields["read_at"])
            residual.copy_(decoder.embed(token_ids))
            normed = decoder.first_norm(residual)
        else:
            normed = decoder.finish(index - 1, self._attended[:size], residual)
        decoder.project(index, normed, inputs, program.kv[index], self._qkv[:size])


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
