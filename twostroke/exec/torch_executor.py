"""`TorchExecutor`: steps on any torch device; on a GPU it takes the next plan while the last runs.

forward(n+1): step buffer ─▶ one copy ─▶ a graph (decode only) or launches ─▶ tokens stay there
sample(n+1):  rows that ask for more than temperature, top-k, top-p and min-p are drawn anew;
              tokens set off for the host
wait(n):      the one place where the host waits
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from time import monotonic
from typing import Any, NamedTuple, Protocol

import numpy as np
import torch

from twostroke.exec.device_sampling import Numbers
from twostroke.exec.executor import ChunkLogits, Masks
from twostroke.exec.graphs import DecodeGraphs, PieceGraphs
from twostroke.exec.program import StepProgram
from twostroke.exec.rng import stream_keys
from twostroke.exec.rows import NO_WRITES, Ints, Writes
from twostroke.exec.samples import (
    PromptSlice,
    Samples,
    chunk_slices,
    prompt_slices,
    wants_prompt_logprobs,
)
from twostroke.exec.step_buffer import StepBuffer, fill_decode, fill_step
from twostroke.kernels.records import DrawParams
from twostroke.model.describe.tensor_parallel import Comm
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
    samples: Samples
    hidden: torch.Tensor | None  # of a step with chunks
    start: Mark
    before: Mark | None  # end of the step before
    comm: Comm  # of all steps before


class Ranked(NamedTuple):
    which: Ints  # samples of the step
    counts: Ints  # how many each has asked for
    found: Triple
    pinned: list[Pinned]


class Pinned(NamedTuple):
    """Log-probabilities of the tokens that a request names (`logprob_token_ids`)."""

    sample: int
    token_ids: tuple[int, ...]
    values: torch.Tensor

    def in_place_of_best(self, entry: TokenLogprobs) -> TokenLogprobs:
        ids, values = (entry.token_ids[0], *self.token_ids), self.values.tolist()
        return TokenLogprobs(ids, (entry.logprobs[0], *values), entry.rank)


@dataclass(frozen=True, slots=True)
class InFlight:
    """A step whose results are on their way."""

    tokens: torch.Tensor
    ranked: Ranked | None  # log-probabilities that are asked for
    prompt_logprobs: Mapping[int, list[Triple]]
    before: Mark | None
    start: Mark
    end: Mark
    comm_s: float
    comm_bytes: float

    def wait(self) -> StepResult:
        self.end.synchronize()
        idle_s = None
        if self.before is not None:
            idle_s = max(0.0, 1e-3 * self.before.elapsed_time(self.start))
        logprobs: dict[int, TokenLogprobs] = {}
        if self.ranked is not None:
            which, counts, found, pinned = self.ranked
            logprobs |= zip(which.tolist(), _split(found, counts.tolist()), strict=True)
            for one in pinned:
                logprobs[one.sample] = one.in_place_of_best(logprobs[one.sample])
        return StepResult(
            self.tokens.tolist(),
            logprobs,
            {
                row: [entry for part in parts for entry in _split(part)]
                for row, parts in self.prompt_logprobs.items()
            },
            1e-3 * self.start.elapsed_time(self.end),
            idle_s,
            comm_s=self.comm_s,
            comm_bytes=self.comm_bytes,
        )


class TorchExecutor:
    def __init__(
        self,
        program: StepProgram,
        graphs: DecodeGraphs | None = None,
        pieces: PieceGraphs | None = None,
        max_in_flight: int = 2,
    ) -> None:
        self.max_in_flight = max_in_flight
        self.program, self._graphs, self._pieces = program, graphs, pieces
        self._rows, self._device = program.rows, program.rows.cells.device  # with its number
        self._ranks, self._phases_differ = program.decoder.ranks, program.decoder.phases_differ
        self.on_gpu = self._device.type == "cuda"
        self.on_chunk_logits: ChunkLogits | None = None
        self._end: Mark | None = None  # of the newest step

    @torch.inference_mode()
    def forward(self, plan: StepPlan) -> Forwarded:
        if self.on_gpu:
            torch.cuda.set_device(self._device)  # the engine may turn in a thread of its own
        writes = self._rows.apply(plan)
        for new in plan.new:
            self.program.sampler.take(new)
        before, start, comm = self._end, self._mark(), self._ranks.comm
        hidden, size = None, self._graph_size(plan)
        if self._graphs is not None and size is not None:
            writes = self._fit(writes, size)
            step = fill_decode(plan.decode, writes, self._rows, size)
            start.record()
            self._graphs.replay(step)
        else:
            size = self._piece_size(plan)
            step = fill_step(plan, writes, self._rows, size or 0)
            start.record()
            keeps_all = self.on_chunk_logits is not None
            keeps_all |= wants_prompt_logprobs(plan, self._rows.rows)
            hidden = self._launch(step, size is not None, keeps_all)
        return Forwarded(plan, step.samples, hidden, start, before, comm)

    def _graph_size(self, plan: StepPlan) -> int | None:
        """Of the graph for a step that only decodes, a token a row."""
        rows = len(plan.decode)
        if self._graphs is None or plan.prefill or plan.decode_work.tokens > rows:
            return None
        return self._graphs.size_for(rows)

    def _piece_size(self, plan: StepPlan) -> int | None:
        """Of the graphs for a step with prefill; they do for others that read the same weights."""
        if self._pieces is None or (self._phases_differ and not plan.prefill):
            return None
        return self._pieces.size_for(plan.num_tokens)

    def _fit(self, writes: Writes, size: int) -> Writes:
        """More writes than a graph has places for are done before it."""
        if len(writes.at) <= size * self._rows.num_groups:
            return writes
        at, values = torch.from_numpy(writes.at), torch.from_numpy(writes.values)
        self._rows.cells.scatter_(0, self._send(at), self._send(values))
        return NO_WRITES

    def _launch(self, step: StepBuffer, in_pieces: bool, keeps_all: bool) -> torch.Tensor:
        program, pieces = self.program, self._pieces
        if pieces is not None and in_pieces and pieces.fits(step):
            return program.run(pieces.send(step, keeps_all), pieces.forward)
        buffer = step.data.to(self._device, non_blocking=True)
        largest = step.max_first, step.max_continued
        known = (*largest, step.longest, step.spans)
        return program.run(program.prepare(step.layout, buffer, *known, keeps_all))

    @torch.inference_mode()
    def sample(self, handle: Forwarded, masks: Masks | None = None) -> InFlight:
        samples, program = handle.samples, self.program
        special = program.sampler.special(samples.rows, samples.positions)
        if masks:
            special = np.union1d(special, np.array(list(masks)))
        if len(special):
            self._draw(samples, special, masks or {})
        ranked = self._rank(samples)
        prompts = self._prompt_logprobs(handle)
        if self.on_chunk_logits is not None and handle.hidden is not None:
            for at, stop, first in chunk_slices(handle.plan):
                logits = program.decoder.head(handle.hidden[first : first + stop - at])
                self.on_chunk_logits(at, logits.float().cpu().numpy())
        drawn = program.tokens[: len(samples.rows)]
        self._ranks.broadcast(drawn)
        tokens = drawn.to("cpu", non_blocking=True)
        if not self.on_gpu:
            tokens = tokens.clone()  # the next step will write here
        end = self._end = self._mark()
        end.record()
        comm = self._ranks.comm.since(handle.comm)
        spent = comm.seconds, comm.sent_bytes(self._ranks.size)
        return InFlight(tokens, ranked, prompts, handle.before, handle.start, end, *spent)

    @torch.inference_mode()
    def follow(self, handle: Forwarded) -> None:
        """`sample` on another rank than the first, which draws for all: takes its tokens."""
        for _ in self._prompt_logits(handle):
            pass
        rows, positions, _ = handle.samples
        drawn = self.program.tokens[: len(rows)]
        self._ranks.broadcast(drawn)
        at = torch.from_numpy(self._rows.token_cells(rows, positions))
        self._rows.cells.scatter_(0, self._send(at), drawn.clamp(min=0))

    def run(self, plan: StepPlan) -> None:
        """A step of which nobody wants the tokens, on every rank."""
        handle = self.forward(plan)
        if self._ranks.rank:
            self.follow(handle)
        else:
            self.sample(handle).wait()
        self.reset()

    def reset(self) -> None:
        if self.on_gpu:
            torch.cuda.synchronize(self._device)
        self._rows.reset()
        self._end = None

    # ── what is rare ────────────────────────────────────────────────────────────────────────

    def _draw(self, samples: Samples, which: Ints, masks: Masks) -> None:
        """Draw these samples once more, with all that their requests ask for."""
        program, state = self.program, self._rows
        rows, positions = samples.rows[which], samples.positions[which]
        key0, key1 = stream_keys(state.seed[rows], positions)
        params: DrawParams[Numbers] = DrawParams(
            temperature=state.temperature[rows],
            top_k=state.top_k[rows],
            top_p=state.top_p[rows],
            min_p=state.min_p[rows],
            key0=key0,
            key1=key1,
        )
        drawn = program.sampler.draw(program.logits, which, rows, positions, masks, params)
        program.sampler.advance(drawn, program.tokens)

    def _rank(self, samples: Samples) -> Ranked | None:
        """Log-probabilities of the tokens and of the best ones, where asked for."""
        counts = self._rows.logprobs[samples.rows]
        which = np.flatnonzero(counts >= 0)
        if not len(which):
            return None
        program, counts = self.program, counts[which]
        most = int(counts.max())
        found = program.sampler.logprobs(program.logits, which, program.tokens, most)
        pinned = []
        for n, sample in enumerate(which.tolist()):
            token_ids = self._rows.rows[int(samples.rows[sample])].params.logprob_token_ids
            if token_ids:
                line, own = program.logits[sample].float(), program.tokens[sample].clamp(min=0)
                named = self._send(torch.tensor(token_ids))
                values = line[named] - line[own.long()] + found[1][n, 0]
                at_host = values.to("cpu", non_blocking=True)
                pinned.append(Pinned(sample, tuple(token_ids), at_host))
        return Ranked(which, counts, self._fetch(found), pinned)

    def _prompt_logprobs(self, handle: Forwarded) -> dict[int, list[Triple]]:
        """For each prompt token after the first: how likely the model found it."""
        found: dict[int, list[Triple]] = {}
        for part, logits in self._prompt_logits(handle):
            entries = found.setdefault(part.row, [])
            if logits is not None:
                size = len(logits)
                targets = self._rows.tokens[part.row, part.start + 1 : part.stop + 1]
                best = self.program.sampler.logprobs(
                    logits, np.arange(size), targets, part.num_best
                )
                entries.append(self._fetch(best))
        return found

    def _prompt_logits(
        self, handle: Forwarded
    ) -> Iterator[tuple[PromptSlice, torch.Tensor | None]]:
        """Of the prompt tokens that are judged, a slice at a time; None where a slice is empty."""
        for part in prompt_slices(handle.plan, self._rows.rows):
            size, logits = part.stop - part.start, None
            if size and handle.hidden is not None:
                hidden = handle.hidden[part.first : part.first + size]
                logits = self.program.decoder.head(hidden)
            yield part, logits

    # ── between host and device ─────────────────────────────────────────────────────────────

    def _send(self, tensor: torch.Tensor) -> torch.Tensor:
        if not self.on_gpu:
            return tensor
        return tensor.pin_memory().to(self._device, non_blocking=True)

    def _fetch(self, found: Triple) -> Triple:
        """Set off for the host; there when the step's end has been waited for."""
        ids, values, rank = (part.to("cpu", non_blocking=True) for part in found)
        return ids, values, rank

    def _mark(self) -> Mark:
        if not self.on_gpu:
            return ClockMark()
        return torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]


def _split(found: Triple, counts: Sequence[int] | None = None) -> list[TokenLogprobs]:
    """One entry a line; of the best no more than its count, if counts are given."""
    ids, values, ranks = (part.tolist() for part in found)
    ends = [None] * len(ranks) if counts is None else [1 + count for count in counts]
    return [
        TokenLogprobs(tuple(i[:end]), tuple(v[:end]), rank)
        for i, v, rank, end in zip(ids, values, ranks, ends, strict=True)
    ]
