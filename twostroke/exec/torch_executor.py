"""`TorchExecutor`: runs steps on any torch device. A GPU runs one step while the next is launched.

forward(n+1): step buffer ─▶ one copy ─▶ a graph (decode only) or launches ─▶ tokens stay there
sample(n+1):  rows with options other than temperature, top-k, top-p and min-p are sampled again;
              the copy of the tokens to the host starts
wait(n):      the only place where the host waits
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from time import monotonic
from typing import Any, NamedTuple, Protocol

import numpy as np
import torch

from twostroke.exec.device_sampling import Drawn, Numbers
from twostroke.exec.executor import ChunkLogits, Masks
from twostroke.exec.graphs import DecodeGraphs, PiecewiseGraphs
from twostroke.exec.program import StepProgram
from twostroke.exec.rng import stream_keys
from twostroke.exec.rows import NO_WRITES, Ints, Writes
from twostroke.exec.samples import (
    PromptSlice,
    Samples,
    chunk_slices,
    draft_cells,
    keep_accepted,
    prompt_slices,
    wants_prompt_logprobs,
)
from twostroke.exec.step_buffer import StepBuffer, fill_decode, fill_step
from twostroke.kernels.records import DrawParams
from twostroke.model.describe.tensor_parallel import Comm
from twostroke.plan import StepPlan, StepResult, TokenLogprobs

LogprobTensors = tuple[torch.Tensor, torch.Tensor, torch.Tensor]


class DeviceEvent(Protocol):
    """A point in the work of a device: `torch.cuda.Event`, or the host's clock."""

    def record(self) -> None: ...

    def synchronize(self) -> None: ...

    def elapsed_time(self, end: Any) -> float: ...


class ClockEvent:
    """A `DeviceEvent` for devices without events, which reads the host's clock."""

    def record(self) -> None:
        self.at_s = monotonic()

    def synchronize(self) -> None: ...

    def elapsed_time(self, end: ClockEvent) -> float:
        return 1e3 * (end.at_s - self.at_s)


@dataclass(frozen=True, slots=True)
class ForwardHandle:
    """A step whose forward has been launched."""

    plan: StepPlan
    samples: Samples
    hidden: torch.Tensor | None  # hidden states of a step with chunks
    start: DeviceEvent
    before: DeviceEvent | None  # end of the previous step
    comm: Comm  # communication of all previous steps


class TopLogprobs(NamedTuple):
    """Log-probabilities of sampled tokens and of the best tokens."""

    which: Ints  # samples of the step
    counts: Ints  # requested number of best tokens of each sample
    best: LogprobTensors
    requested: list[RequestedLogprobs]


class RequestedLogprobs(NamedTuple):
    """Log-probabilities of the tokens in a request's `logprob_token_ids`."""

    sample: int
    token_ids: tuple[int, ...]
    values: torch.Tensor

    def in_place_of_best(self, entry: TokenLogprobs) -> TokenLogprobs:
        ids, values = (entry.token_ids[0], *self.token_ids), self.values.tolist()
        return TokenLogprobs(ids, (entry.logprobs[0], *values), entry.rank)


@dataclass(frozen=True, slots=True)
class InFlight:
    """A step whose results are being copied to the host."""

    tokens: torch.Tensor
    top_logprobs: TopLogprobs | None
    prompt_logprobs: Mapping[int, list[LogprobTensors]]
    before: DeviceEvent | None
    start: DeviceEvent
    end: DeviceEvent
    comm_s: float
    comm_bytes: float
    plan: StepPlan

    def wait(self) -> StepResult:
        self.end.synchronize()
        idle_s = None
        if self.before is not None:
            idle_s = max(0.0, 1e-3 * self.before.elapsed_time(self.start))
        logprobs: dict[int, TokenLogprobs] = {}
        if self.top_logprobs is not None:
            which, num_best, best, requested = self.top_logprobs
            logprobs |= zip(which.tolist(), _split(best, num_best.tolist()), strict=True)
            for entry in requested:
                logprobs[entry.sample] = entry.in_place_of_best(logprobs[entry.sample])
        tokens: list[int] = self.tokens.tolist()
        counts: list[int] | None = None
        kept = keep_accepted(self.plan, tokens)
        if kept is not None:
            counts = kept.counts
            tokens, logprobs = kept.of(tokens, logprobs)
        return StepResult(
            tokens,
            logprobs,
            {
                row: [entry for part in parts for entry in _split(part)]
                for row, parts in self.prompt_logprobs.items()
            },
            1e-3 * self.start.elapsed_time(self.end),
            idle_s,
            counts,
            comm_s=self.comm_s,
            comm_bytes=self.comm_bytes,
        )


class TorchExecutor:
    """An executor of one rank; asynchronous on a GPU."""

    def __init__(
        self,
        program: StepProgram,
        graphs: DecodeGraphs | None = None,
        pieces: PiecewiseGraphs | None = None,
        max_in_flight: int = 2,
    ) -> None:
        self.max_in_flight = max_in_flight
        self.program, self._graphs, self._pieces = program, graphs, pieces
        self._rows, self._device = program.rows, program.rows.cells.device  # with device index
        self._ranks, self._phases_differ = program.decoder.ranks, program.decoder.phases_differ
        self.on_gpu = self._device.type == "cuda"
        self.on_chunk_logits: ChunkLogits | None = None
        self._end: DeviceEvent | None = None  # end of the newest step

    @torch.inference_mode()
    def forward(self, plan: StepPlan) -> ForwardHandle:
        if self.on_gpu:
            torch.cuda.set_device(self._device)  # the engine loop may run in another thread
        writes = self._rows.apply(plan)
        for new in plan.new:
            self.program.sampler.take(new)
        for write in plan.written:
            self.program.sampler.rewrite(write.row)
        before, start, comm = self._end, self._new_event(), self._ranks.comm
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
        return ForwardHandle(plan, step.samples, hidden, start, before, comm)

    def _graph_size(self, plan: StepPlan) -> int | None:
        """Return the graph size of a step that only decodes, one token per row."""
        rows = len(plan.decode)
        if self._graphs is None or plan.prefill or plan.decode_work.tokens > rows:
            return None
        return self._graphs.size_for(rows)

    def _piece_size(self, plan: StepPlan) -> int | None:
        """Return the graph size of a step with prefill, or of a decode step with the same
        weights."""
        if self._pieces is None or (self._phases_differ and not plan.prefill):
            return None
        return self._pieces.size_for(plan.num_tokens)

    def _fit(self, writes: Writes, size: int) -> Writes:
        """Return the writes for the graph of this size. Writes that exceed its capacity are applied
        here, before the graph runs."""
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
    def sample(self, handle: ForwardHandle, masks: Masks | None = None) -> InFlight:
        samples, program = handle.samples, self.program
        special = program.sampler.special(samples.rows, samples.positions)
        if masks:
            special = np.union1d(special, np.array(list(masks)))
        if len(special):
            self._draw(samples, special, masks or {}, handle.plan)
        top_logprobs = self._top_logprobs(samples)
        prompts = self._prompt_logprobs(handle)
        if self.on_chunk_logits is not None and handle.hidden is not None:
            for at, stop, first in chunk_slices(handle.plan):
                logits = program.decoder.head(handle.hidden[first : first + stop - at])
                self.on_chunk_logits(at, logits.float().cpu().numpy())
        drawn = program.tokens[: len(samples.rows)]
        self._ranks.broadcast(drawn)
        tokens = drawn.to("cpu", non_blocking=True)
        if not self.on_gpu:
            tokens = tokens.clone()  # the next step overwrites `drawn`
        end = self._end = self._new_event()
        end.record()
        comm = self._ranks.comm.since(handle.comm)
        spent = comm.seconds, comm.sent_bytes(self._ranks.size)
        return InFlight(
            tokens, top_logprobs, prompts, handle.before, handle.start, end, *spent, handle.plan
        )

    @torch.inference_mode()
    def follow(self, handle: ForwardHandle) -> None:
        """On a rank other than 0: receive the tokens that rank 0 has sampled."""
        for _ in self._prompt_logits(handle):
            pass
        rows, positions, _ = handle.samples
        drawn = self.program.tokens[: len(rows)]
        self._ranks.broadcast(drawn)
        at = torch.from_numpy(self._rows.token_cells(rows, positions))
        self._rows.cells.scatter_(0, self._send(at), drawn.clamp(min=0))

    def run(self, plan: StepPlan) -> None:
        """Run a step on every rank and discard its tokens."""
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

    # ── rare options ────────────────────────────────────────────────────────────────────────

    def _draw(self, samples: Samples, which: Ints, masks: Masks, plan: StepPlan) -> None:
        """Sample again with all options of the requests."""
        program, state = self.program, self._rows
        rows, positions = samples.rows[which], samples.positions[which]
        drafted = {slot.row for slot in plan.decode if slot.drafts}
        if drafted:  # the first samples were written over the drafts
            self._write_drafts(plan)
        key0, key1 = stream_keys(state.seed[rows], positions)
        params: DrawParams[Numbers] = DrawParams(
            temperature=state.temperature[rows],
            top_k=state.top_k[rows],
            top_p=state.top_p[rows],
            min_p=state.min_p[rows],
            key0=key0,
            key1=key1,
        )
        drawn = program.sampler.draw(program.logits, which, rows, positions, masks, params, drafted)
        if drafted:
            drawn = self._accepted(drawn, which, plan, len(samples.rows))
        program.sampler.advance(drawn, program.tokens)

    def _write_drafts(self, plan: StepPlan) -> None:
        rows, positions, tokens = draft_cells(plan)
        at = torch.from_numpy(self._rows.token_cells(rows, positions))
        self._rows.cells.scatter_(0, self._send(at), self._send(torch.from_numpy(tokens)))

    def _accepted(self, drawn: Drawn, which: Ints, plan: StepPlan, count: int) -> Drawn:
        """Write the drawn tokens to the step's tokens, verify the drafts, and return the drawn
        samples that become text. Only these are counted for penalties."""
        tokens = self.program.tokens[:count]
        tokens[self._send(torch.from_numpy(which))] = drawn.tokens
        kept = keep_accepted(plan, tokens.tolist())
        assert kept is not None
        lines = self._send(torch.from_numpy(np.flatnonzero(np.isin(which, kept.samples))))
        return Drawn(drawn.samples[:, lines].contiguous(), drawn.tokens[lines])

    def _top_logprobs(self, samples: Samples) -> TopLogprobs | None:
        """Compute the requested log-probabilities."""
        counts = self._rows.logprobs[samples.rows]
        which = np.flatnonzero(counts >= 0)
        if not len(which):
            return None
        program, counts = self.program, counts[which]
        max_count = int(counts.max())
        best = program.sampler.logprobs(program.logits, which, program.tokens, max_count)
        requested = []
        for n, sample in enumerate(which.tolist()):
            token_ids = self._rows.rows[int(samples.rows[sample])].params.logprob_token_ids
            if token_ids:
                line, own = program.logits[sample].float(), program.tokens[sample].clamp(min=0)
                token_columns = self._send(torch.tensor(token_ids))
                values = line[token_columns] - line[own.long()] + best[1][n, 0]
                at_host = values.to("cpu", non_blocking=True)
                requested.append(RequestedLogprobs(sample, tuple(token_ids), at_host))
        return TopLogprobs(which, counts, self._fetch(best), requested)

    def _prompt_logprobs(self, handle: ForwardHandle) -> dict[int, list[LogprobTensors]]:
        """Compute the log-probability of each prompt token after the first."""
        found: dict[int, list[LogprobTensors]] = {}
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
        self, handle: ForwardHandle
    ) -> Iterator[tuple[PromptSlice, torch.Tensor | None]]:
        """Yield the logits for prompt log-probabilities in slices; None for an empty slice."""
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

    def _fetch(self, found: LogprobTensors) -> LogprobTensors:
        """Start copies to the host. They are complete when the step has been waited for."""
        ids, values, rank = (part.to("cpu", non_blocking=True) for part in found)
        return ids, values, rank

    def _new_event(self) -> DeviceEvent:
        if not self.on_gpu:
            return ClockEvent()
        return torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]


def _split(found: LogprobTensors, counts: Sequence[int] | None = None) -> list[TokenLogprobs]:
    """Return one entry per line, with at most `counts` best tokens."""
    ids, values, ranks = (part.tolist() for part in found)
    ends = [None] * len(ranks) if counts is None else [1 + count for count in counts]
    return [
        TokenLogprobs(tuple(i[:end]), tuple(v[:end]), rank)
        for i, v, rank, end in zip(ids, values, ranks, ends, strict=True)
    ]
