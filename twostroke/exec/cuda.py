"""`CudaExecutor`: takes the next plan while the device works on the last.

    forward(n+1): pack ─▶ one copy ─▶ a graph (decode only) or launches ─▶ tokens stay there
    sample(n+1):  rows that ask for more than temperature, top-k, top-p and min-p are drawn anew;
                  tokens set off for the host
    wait(n):      the one place where the host waits

The device is whatever the decoder's kernels run on; tests give it a CPU.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from time import monotonic
from typing import Any, NamedTuple, Protocol

import numpy as np
import torch

from twostroke.exec.executor import LOGIT_SLICE, Masks
from twostroke.exec.graphs import DecodeGraphs, PieceGraphs
from twostroke.exec.packed import Packed, pack_decode, pack_step
from twostroke.exec.program import StepProgram
from twostroke.exec.rng import stream_keys
from twostroke.exec.rows import NOTHING, Ints, Writes
from twostroke.plan import StepPlan, StepResult, TokenLogprobs

Triple = tuple[torch.Tensor, torch.Tensor, torch.Tensor]


class Mark(Protocol):
    """A moment in the device's work: `torch.cuda.Event`, or the clock where there is none."""

    def record(self) -> None: ...

    def synchronize(self) -> None: ...

    def elapsed_time(self, end: Any) -> float: ...


class ClockMark:
    def record(self) -> None:
        self.at_s = monotonic()

    def synchronize(self) -> None: ...

    def elapsed_time(self, end: ClockMark) -> float:
        return 1e3 * (end.at_s - self.at_s)


@dataclass(frozen=True, slots=True)
class Forwarded:
    plan: StepPlan
    packed: Packed
    hidden: torch.Tensor | None  # of a step with chunks
    start: Mark
    before: Mark | None  # end of the step before


class Ranked(NamedTuple):
    which: Ints  # samples of the step
    counts: Ints  # how many each has asked for
    found: Triple


@dataclass(frozen=True, slots=True)
class Flying:
    """A step whose results are on their way."""

    tokens: torch.Tensor
    ranked: Ranked | None  # log-probabilities that are asked for
    prompt_logprobs: Mapping[int, list[Triple]]
    before: Mark | None
    start: Mark
    end: Mark

    def wait(self) -> StepResult:
        self.end.synchronize()
        idle_s = None
        if self.before is not None:
            idle_s = max(0.0, 1e-3 * self.before.elapsed_time(self.start))
        logprobs: dict[int, TokenLogprobs] = {}
        if self.ranked is not None:
            which, counts, found = self.ranked
            logprobs |= zip(which.tolist(), _split(found, counts.tolist()), strict=True)
        return StepResult(
            self.tokens.tolist(),
            logprobs,
            {
                row: [entry for part in parts for entry in _split(part)]
                for row, parts in self.prompt_logprobs.items()
            },
            1e-3 * self.start.elapsed_time(self.end),
            idle_s,
        )


class CudaExecutor:
    def __init__(
        self,
        program: StepProgram,
        graphs: DecodeGraphs | None,
        pieces: PieceGraphs | None = None,
        max_in_flight: int = 2,
        nvtx: bool = False,
    ) -> None:
        self.max_in_flight = max_in_flight
        self._program, self._graphs, self._pieces, self._nvtx = program, graphs, pieces, nvtx
        self._rows, self._device = program.rows, program.rows.cells.device  # with its number
        self._on_gpu = self._device.type == "cuda"
        self._end: Mark | None = None  # of the newest step

    @torch.inference_mode()
    def forward(self, plan: StepPlan) -> Forwarded:
        if self._on_gpu:
            torch.cuda.set_device(self._device)  # the engine may turn in a thread of its own
        if self._nvtx:
            prefill, decode = plan.prefill_work.tokens, plan.decode_work.tokens
            _push(f"step {plan.step}: prefill {prefill}, decode {decode}")
        writes = self._rows.apply(plan)
        for new in plan.new:
            self._program.sampler.take(new)
        before, start = self._end, self._mark()
        graphs, hidden = self._graphs, None
        size = graphs.size_for(len(plan.decode)) if graphs and not plan.prefill else None
        if graphs is not None and size is not None:
            writes = self._fit(writes, size)
            packed = pack_decode(plan.decode, writes, self._rows, size)
            start.record()
            graphs.replay(packed)
        else:
            size = self._pieces.size_for(plan.num_tokens) if self._pieces else None
            packed = pack_step(plan, writes, self._rows, size or 0)
            start.record()
            hidden = self._launch(packed, size is not None, self._wants_prompts(plan))
        return Forwarded(plan, packed, hidden, start, before)

    def _fit(self, writes: Writes, size: int) -> Writes:
        """More writes than a graph has places for are done before it."""
        if len(writes.at) <= size * self._rows.num_groups:
            return writes
        at, values = torch.from_numpy(writes.at), torch.from_numpy(writes.values)
        self._rows.cells.scatter_(0, self._send(at), self._send(values))
        return NOTHING

    def _launch(self, packed: Packed, in_pieces: bool, keeps_all: bool) -> torch.Tensor:
        program, pieces = self._program, self._pieces
        if pieces is not None and in_pieces and pieces.fits(packed):
            return program.run(pieces.send(packed, keeps_all), pieces.forward)
        buffer = packed.buffer.to(self._device, non_blocking=True)
        layout, largest, longest = packed.layout, packed.largest, packed.longest
        return program.run(program.prepare(layout, buffer, largest, longest, keeps_all))

    def _wants_prompts(self, plan: StepPlan) -> bool:
        """Whether anybody asks for what the model thinks of a prompt's tokens."""
        rows = (self._rows.rows[chunk.row] for chunk in plan.prefill)
        return any(row.params.prompt_logprobs is not None for row in rows)

    @torch.inference_mode()
    def sample(self, handle: Forwarded, masks: Masks | None = None) -> Flying:
        packed, program = handle.packed, self._program
        special = program.sampler.special(packed.rows, packed.positions)
        if masks:
            special = np.union1d(special, np.array(list(masks)))
        if len(special):
            self._draw(packed, special, masks or {})
        ranked = self._rank(packed)
        prompts = self._prompt_logprobs(handle)
        tokens = program.tokens[: len(packed.rows)].to("cpu", non_blocking=True)
        if not self._on_gpu:
            tokens = tokens.clone()  # the next step will write here
        end = self._end = self._mark()
        end.record()
        if self._nvtx:
            _pop()
        return Flying(tokens, ranked, prompts, handle.before, handle.start, end)

    def reset(self) -> None:
        if self._on_gpu:
            torch.cuda.synchronize(self._device)
        self._rows.reset()
        self._end = None

    # ── what is rare ────────────────────────────────────────────────────────────────────────

    def _draw(self, packed: Packed, which: Ints, masks: Masks) -> None:
        """Draw these samples once more, with all that their requests ask for."""
        program, state = self._program, self._rows
        rows, positions = packed.rows[which], packed.positions[which]
        drawn = program.sampler.draw(
            program.logits,
            which,
            rows,
            positions,
            masks,
            state.temperature[rows],
            state.top_k[rows],
            state.top_p[rows],
            state.min_p[rows],
            *stream_keys(state.seed[rows], positions),
        )
        program.sampler.advance(drawn, program.tokens)

    def _rank(self, packed: Packed) -> Ranked | None:
        """Log-probabilities of the tokens and of the best ones, where asked for."""
        counts = self._rows.logprobs[packed.rows]
        which = np.flatnonzero(counts >= 0)
        if not len(which):
            return None
        program, counts = self._program, counts[which]
        most = int(counts.max())
        found = program.sampler.logprobs(program.logits, which, program.tokens, most)
        return Ranked(which, counts, self._fetch(found))

    def _prompt_logprobs(self, handle: Forwarded) -> dict[int, list[Triple]]:
        """For each prompt token after the first: how likely the model found it."""
        found: dict[int, list[Triple]] = {}
        first = len(handle.plan.decode)
        for chunk in handle.plan.prefill:
            request = self._rows.rows[chunk.row]
            count = request.params.prompt_logprobs
            if count is not None and handle.hidden is not None:
                end = min(chunk.start + chunk.size, request.num_prompt - 1)
                hidden = handle.hidden[first : first + end - chunk.start]
                targets = self._rows.tokens[chunk.row, chunk.start + 1 : end + 1]
                found[chunk.row] = self._logprobs_of(hidden, targets, count)
            first += chunk.size
        return found

    def _logprobs_of(self, hidden: torch.Tensor, targets: torch.Tensor, count: int) -> list[Triple]:
        parts = []
        for at in range(0, hidden.shape[0], LOGIT_SLICE):
            part = slice(at, at + LOGIT_SLICE)
            logits = self._program.decoder.head(hidden[part])
            found = self._program.sampler.logprobs(
                logits, np.arange(len(logits)), targets[part], count
            )
            parts.append(self._fetch(found))
        return parts

    # ── between host and device ─────────────────────────────────────────────────────────────

    def _send(self, tensor: torch.Tensor) -> torch.Tensor:
        if not self._on_gpu:
            return tensor
        return tensor.pin_memory().to(self._device, non_blocking=True)

    def _fetch(self, found: Triple) -> Triple:
        """Set off for the host; there when the step's end has been waited for."""
        ids, values, rank = (part.to("cpu", non_blocking=True) for part in found)
        return ids, values, rank

    def _mark(self) -> Mark:
        if not self._on_gpu:
            return ClockMark()
        return torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]


def _push(name: str) -> None:
    torch.cuda.nvtx.range_push(name)  # type: ignore[no-untyped-call]


def _pop() -> None:
    torch.cuda.nvtx.range_pop()  # type: ignore[no-untyped-call]


def _split(found: Triple, counts: Sequence[int] | None = None) -> list[TokenLogprobs]:
    """One entry a line; of the best no more than its count, if counts are given."""
    ids, values, ranks = (part.tolist() for part in found)
    ends = [None] * len(ranks) if counts is None else [1 + count for count in counts]
    return [
        TokenLogprobs(tuple(i[:end]), tuple(v[:end]), rank)
        for i, v, rank, end in zip(ids, values, ranks, ends, strict=True)
    ]
