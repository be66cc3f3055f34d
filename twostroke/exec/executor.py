"""The seam between planning and computing: `forward(plan)`, then `sample(handle, masks)`.

Two calls, so that grammar masks can be made while the forward runs. A synchronous executor has
finished when `sample` returns; an asynchronous one when `Pending.wait` does, and may be given
`max_in_flight` plans before the first is waited for.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from time import monotonic
from typing import Protocol, TypeVar

import torch

from twostroke.exec.inputs import build_inputs
from twostroke.exec.sampling import Sampled, sample, to_token_logprobs, top_logprobs
from twostroke.exec.state import RowState
from twostroke.kv.pool import KVPool
from twostroke.model.batch import StepInputs
from twostroke.model.decoder import Decoder
from twostroke.plan import StepPlan, StepResult, TokenLogprobs

LOGIT_SLICE = 64  # positions whose logits exist at one time while prompt log-probabilities are made

Handle = TypeVar("Handle")
Masks = Mapping[int, torch.Tensor]


class Pending(Protocol):
    def wait(self) -> StepResult: ...


class Executor(Protocol[Handle]):
    max_in_flight: int

    def forward(self, plan: StepPlan) -> Handle: ...

    def sample(self, handle: Handle, masks: Masks | None = None) -> Pending: ...

    def reset(self) -> None:
        """A step has failed and every row has been given up: start from no rows."""
        ...


@dataclass(frozen=True, slots=True)
class Forwarded:
    plan: StepPlan
    inputs: StepInputs
    hidden: torch.Tensor
    started_s: float


@dataclass(frozen=True, slots=True)
class Computed:
    sampled: Sampled
    prompt_logprobs: dict[int, list[TokenLogprobs]]
    device_s: float

    def wait(self) -> StepResult:
        logprobs = {i: to_token_logprobs(p) for i, p in self.sampled.logprobs.items()}
        return StepResult(
            self.sampled.tokens.tolist(), logprobs, self.prompt_logprobs, self.device_s
        )


class LocalExecutor:
    """Runs a decoder on one device, step by step."""

    def __init__(self, decoder: Decoder, pool: KVPool, state: RowState, max_in_flight: int) -> None:
        self.max_in_flight = max_in_flight
        self._decoder, self._pool, self._state = decoder, pool, state

    @torch.inference_mode()
    def forward(self, plan: StepPlan) -> Forwarded:
        started = monotonic()
        self._state.apply(plan)
        inputs = build_inputs(plan, self._state)
        return Forwarded(plan, inputs, self._decoder.forward(inputs, self._pool), started)

    @torch.inference_mode()
    def sample(self, handle: Forwarded, masks: Masks | None = None) -> Computed:
        inputs, state = handle.inputs, self._state
        rows, positions = inputs.sampled_rows, inputs.sampled_positions
        if rows:
            logits = self._decoder.head(handle.hidden[inputs.sampled])
            sampled = sample(logits, rows, positions, state, masks)
            state.tokens[rows, positions] = sampled.tokens.int()
        else:
            sampled = Sampled(torch.empty(0, dtype=torch.int64), {})
        prompts = self._prompt_logprobs(handle)
        return Computed(sampled, prompts, monotonic() - handle.started_s)

    def reset(self) -> None:
        self._state.reset()

    def _prompt_logprobs(self, handle: Forwarded) -> dict[int, list[TokenLogprobs]]:
        """For each prompt token after the first: how likely the model found it."""
        state, found = self._state, {}
        for planned, chunk in zip(handle.plan.prefill, handle.inputs.prefill, strict=True):
            row = planned.row
            count = state.rows[row].params.prompt_logprobs
            if count is None:
                continue
            entries: list[TokenLogprobs] = []
            end = min(chunk.start + chunk.size, state.rows[row].num_prompt - 1)
            for start in range(chunk.start, end, LOGIT_SLICE):
                stop = min(start + LOGIT_SLICE, end)
                at = chunk.first - chunk.start
                logits = self._decoder.head(handle.hidden[at + start : at + stop])
                logprobs = torch.log_softmax(logits, dim=-1)
                targets = state.tokens[row, start + 1 : stop + 1].long()
                for line, token in zip(logprobs, targets, strict=True):
                    entries.append(to_token_logprobs(top_logprobs(line, token, count)))
            found[row] = entries
        return found
