"""The executor of the native decoder: plans in, tokens out, two or three calls a step. No torch."""

from __future__ import annotations

from dataclasses import dataclass
from time import monotonic

import numpy as np
import numpy.typing as npt

from twostroke.exec.executor import LOGIT_SLICE, Masks
from twostroke.exec.logits import apply_bans, is_plain
from twostroke.exec.rng import stream_key
from twostroke.exec.rows import HostRows
from twostroke.kernels import cpu
from twostroke.kv.halves import HalfPool
from twostroke.model.native import NativeDecoder
from twostroke.plan import NewRow, StepPlan, StepResult, TokenLogprobs
from twostroke.request import SamplingParams


@dataclass(frozen=True, slots=True)
class Forwarded:
    plan: StepPlan
    rows: list[int]  # that are sampled from
    positions: list[int]  # where each sampled token will stand
    logits: npt.NDArray[np.float32]
    started_s: float


@dataclass(frozen=True, slots=True)
class Computed:
    result: StepResult

    def wait(self) -> StepResult:
        return self.result


class NativeExecutor:
    """Steps run when they are given; the decoder keeps the last one's hidden states."""

    max_in_flight = 1

    def __init__(self, decoder: NativeDecoder, pool: HalfPool, state: HostRows) -> None:
        self._decoder, self._state, self._native = decoder, state, cpu.module()
        self._tokens, (self._table,) = state.tokens, state.tables
        self._cache = pool.data

    def forward(self, plan: StepPlan) -> Forwarded:
        started = monotonic()
        self._state.apply(plan)
        rows = [slot.row for slot in plan.decode]
        positions = [slot.position + 1 for slot in plan.decode]
        which, at = list(range(len(rows))), len(rows)
        for chunk in plan.prefill:
            at += chunk.size
            if chunk.last:
                which.append(at - 1)
                rows.append(chunk.row)
                positions.append(chunk.start + chunk.size)
        logits = self._decoder.forward(
            self._tokens,
            self._table,
            self._cache,
            np.array([slot[:2] for slot in plan.decode], np.int32).reshape(-1, 2),
            np.array([chunk[:3] for chunk in plan.prefill], np.int32).reshape(-1, 3),
            np.array(which, np.int32),
            keep_all=any(self._wants_prompt(chunk.row) for chunk in plan.prefill),
        )
        return Forwarded(plan, rows, positions, logits, started)

    def _wants_prompt(self, row: int) -> bool:
        return self._state.rows[row].params.prompt_logprobs is not None

    def sample(self, handle: Forwarded, masks: Masks | None = None) -> Computed:
        logits, rows, positions = handle.logits, handle.rows, handle.positions
        requests = [self._state.rows[row] for row in rows]
        asked = any(request.params.logprobs is not None for request in requests)
        # Drawing overwrites the logits that log-probabilities are of: these are kept, some at a
        # time, where they are asked for.
        size = LOGIT_SLICE if asked else max(1, len(rows))
        tokens: list[int] = []
        logprobs: dict[int, TokenLogprobs] = {}
        for start in range(0, len(rows), size):
            part = slice(start, start + size)
            some = requests[part]
            asking = [n for n, one in enumerate(some) if one.params.logprobs is not None]
            raw = logits[part][asking] if asking else None
            self._forbid(logits[part], rows[part], some, positions[part], start, masks or {})
            drawn = self._draw(logits[part], rows[part], some, positions[part])
            tokens += drawn
            if raw is not None:
                counts = [some[n].params.logprobs or 0 for n in asking]
                found = self._top_logprobs(raw, [max(0, drawn[n]) for n in asking], counts)
                logprobs.update(zip([start + n for n in asking], found, strict=True))
        prompts = self._prompt_logprobs(handle.plan)
        device_s = monotonic() - handle.started_s
        return Computed(StepResult(tokens, logprobs, prompts, device_s))

    def reset(self) -> None:
        self._state.reset()

    def _top_logprobs(
        self, logits: npt.NDArray[np.float32], tokens: list[int], counts: list[int]
    ) -> list[TokenLogprobs]:
        """For each row of logits its token's log-probability, then the best ones in order."""
        rows, width = len(tokens), 1 + max(counts)
        ids, ranks = np.empty((rows, width), np.int32), np.empty(rows, np.int32)
        values = np.empty((rows, width), np.float32)
        given = np.array(tokens, np.int32)
        self._native.top_logprobs(logits, given, ids, values, ranks, self._decoder.isa)
        each = zip(ids.tolist(), values.tolist(), ranks.tolist(), counts, strict=True)
        return [TokenLogprobs(tuple(i[: 1 + n]), tuple(v[: 1 + n]), rank) for i, v, rank, n in each]

    def _forbid(
        self,
        logits: npt.NDArray[np.float32],
        rows: list[int],
        requests: list[NewRow],
        positions: list[int],
        first: int,
        masks: Masks,
    ) -> None:
        """`first`: which of the step's samples these begin with."""
        for n, (row, request, at) in enumerate(zip(rows, requests, positions, strict=True)):
            if first + n in masks or not is_plain(request, at):
                apply_bans(logits[n], request, at, self._tokens[row], masks.get(first + n))

    def _draw(
        self,
        logits: npt.NDArray[np.float32],
        rows: list[int],
        requests: list[NewRow],
        positions: list[int],
    ) -> list[int]:
        """The tokens, which are also written to the rows; -1 where the logits are NaN or infinite.
        The logits are overwritten."""
        where = [
            (row, r.num_prompt, at) for row, r, at in zip(rows, requests, positions, strict=True)
        ]
        wishes = np.array([_wishes(r.params) for r in requests], np.float32)
        keys = [stream_key(r.seed, at) for r, at in zip(requests, positions, strict=True)]
        chosen = np.empty(len(rows), np.int32)
        self._native.sample(
            logits,
            self._tokens,
            np.array(where, np.int32),
            wishes,
            np.array(keys, np.uint32),
            chosen,
            self._decoder.isa,
        )
        self._tokens[rows, positions] = np.maximum(chosen, 0)
        tokens: list[int] = chosen.tolist()
        return tokens

    def _prompt_logprobs(self, plan: StepPlan) -> dict[int, list[TokenLogprobs]]:
        """For each prompt token after the first: how likely the model found it."""
        found: dict[int, list[TokenLogprobs]] = {}
        first = len(plan.decode)
        for chunk in plan.prefill:
            request = self._state.rows[chunk.row]
            count = request.params.prompt_logprobs
            if count is not None:
                end = min(chunk.start + chunk.size, request.num_prompt - 1)
                found[chunk.row] = [
                    entry
                    for start in range(chunk.start, end, LOGIT_SLICE)
                    for entry in self._logprobs_of(
                        chunk.row, first - chunk.start, start, min(start + LOGIT_SLICE, end), count
                    )
                ]
            first += chunk.size
        return found

    def _logprobs_of(
        self, row: int, shift: int, start: int, stop: int, count: int
    ) -> list[TokenLogprobs]:
        """Of positions [start, stop) of a row, which are tokens `shift` further in the step."""
        lines = self._decoder.logits(np.arange(start + shift, stop + shift, dtype=np.int32))
        targets = self._tokens[row, start + 1 : stop + 1].tolist()
        return self._top_logprobs(lines, targets, [count] * len(targets))


def _wishes(params: SamplingParams) -> tuple[float, ...]:
    return (
        0.0 if params.greedy else params.temperature,
        params.top_k,
        params.top_p,
        params.min_p,
        params.repetition_penalty,
        params.frequency_penalty,
        params.presence_penalty,
    )
