"""The executor of the native decoder: plans in, tokens out, two or three calls a step."""

from __future__ import annotations

from dataclasses import dataclass
from time import monotonic

import numpy as np
import numpy.typing as npt
import torch

from twostroke.exec.executor import LOGIT_SLICE, Computed, Masks
from twostroke.exec.rng import stream_key
from twostroke.exec.sampling import Sampled, sample, to_token_logprobs, top_logprobs
from twostroke.exec.state import RowState
from twostroke.kernels import cpu
from twostroke.kv.pool import KVPool
from twostroke.model.native import NativeDecoder
from twostroke.plan import NewRow, StepPlan, TokenLogprobs
from twostroke.request import SamplingParams

NO_TOKENS = torch.empty(0, dtype=torch.int64)


@dataclass(frozen=True, slots=True)
class Forwarded:
    plan: StepPlan
    rows: list[int]  # that are sampled from
    positions: list[int]  # where each sampled token will stand
    logits: npt.NDArray[np.float32]
    started_s: float


class NativeExecutor:
    """Steps run when they are given; the decoder keeps the last one's hidden states."""

    max_in_flight = 1

    def __init__(self, decoder: NativeDecoder, pool: KVPool, state: RowState) -> None:
        self._decoder, self._state, self._native = decoder, state, cpu.module()
        self._tokens, (self._table,) = state.tokens.numpy(), [t.numpy() for t in state.tables]
        self._cache = pool.halves()

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
        )
        return Forwarded(plan, rows, positions, logits, started)

    def sample(self, handle: Forwarded, masks: Masks | None = None) -> Computed:
        rows, positions = handle.rows, handle.positions
        sampled = Sampled(NO_TOKENS, {})
        if rows:
            sampled = self._choose(handle.logits, rows, positions, masks)
            self._tokens[rows, positions] = sampled.tokens.numpy()
        prompts = self._prompt_logprobs(handle.plan)
        return Computed(sampled, prompts, monotonic() - handle.started_s)

    def reset(self) -> None:
        self._state.reset()

    def _choose(
        self,
        logits: npt.NDArray[np.float32],
        rows: list[int],
        positions: list[int],
        masks: Masks | None,
    ) -> Sampled:
        requests = [self._state.rows[row] for row in rows]
        if masks or any(map(_is_special, requests, positions)):
            with torch.inference_mode():
                return sample(torch.from_numpy(logits), rows, positions, self._state, masks)
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
        return Sampled(torch.from_numpy(chosen), {})

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
        which = np.arange(start + shift, stop + shift, dtype=np.int32)
        lines = torch.log_softmax(torch.from_numpy(self._decoder.logits(which)), dim=-1)
        targets = self._state.tokens[row, start + 1 : stop + 1].long()
        pairs = zip(lines, targets, strict=True)
        return [to_token_logprobs(top_logprobs(line, token, count)) for line, token in pairs]


def _is_special(request: NewRow, position: int) -> bool:
    """What only `sampling.py` does: it is rare, or looks at all the logits for it."""
    params = request.params
    return (
        params.logprobs is not None
        or bool(params.logit_bias)
        or params.allowed_token_ids is not None
        or bool(request.bad_words_ids)
        or (position - request.num_prompt < params.min_tokens and bool(request.stop_ids))
    )


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
