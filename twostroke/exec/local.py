"""`LocalExecutor`: torch's decoder on one device, step by step. The plain one."""

from __future__ import annotations

from dataclasses import dataclass
from time import monotonic

import torch

from twostroke.exec.executor import LOGIT_SLICE, Masks
from twostroke.exec.inputs import build_inputs
from twostroke.exec.sampling import Sampled, as_tensors, sample, to_token_logprobs
from twostroke.exec.tensor_rows import TensorRows
from twostroke.kernels.reference_sampling import token_logprobs
from twostroke.kv.pool import KVPool
from twostroke.model.batch import StepInputs
from twostroke.model.decoder import Decoder
from twostroke.plan import StepPlan, StepResult, TokenLogprobs


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
    def __init__(
        self, decoder: Decoder, pool: KVPool, state: TensorRows, max_in_flight: int
    ) -> None:
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
            allowed = as_tensors(masks, logits.shape[1], state.device)
            sampled = sample(logits, rows, positions, state, allowed)
            state.tokens[rows, positions] = sampled.tokens.clamp(min=0).int()
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
                every = torch.arange(len(logits), device=state.device)
                targets = state.tokens[row, start + 1 : stop + 1]
                parts = token_logprobs(logits, every, targets, count)
                entries += map(to_token_logprobs, zip(*parts, strict=True))
            found[row] = entries
        return found
