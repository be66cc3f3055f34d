"""`NativeExecutor`: runs plans on the native decoder. This module imports no torch.

A step has one native call for the forward and one for sampling. Log-probabilities, the logits of
prompt tokens and attention shares need further calls.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from time import monotonic

import numpy as np
import numpy.typing as npt

from twostroke.exec.executor import ChunkLogits, Masks
from twostroke.exec.logits import BanTable
from twostroke.exec.rng import stream_key
from twostroke.exec.rows import HostRows, Ints
from twostroke.exec.samples import (
    LOGIT_SLICE,
    chunk_slices,
    decode_tokens,
    keep_accepted,
    prompt_slices,
    samples_of,
    wants_prompt_logprobs,
)
from twostroke.kernels import cpu
from twostroke.kv.host_pool import HostPool
from twostroke.model.native_decoder import NativeDecoder
from twostroke.plan import StepPlan, StepResult, TokenLogprobs

NO_CHUNKS = np.empty((0, 4), np.int32)


@dataclass(frozen=True, slots=True)
class NativeForwardHandle:
    """A step whose forward has run: the logits of its samples."""

    plan: StepPlan
    rows: Ints  # the row of each sample
    positions: Ints  # the position of each sampled token
    logits: npt.NDArray[np.float32]
    started_s: float


@dataclass(frozen=True, slots=True)
class FinishedStep:
    """The result of a finished step. `wait` returns immediately."""

    result: StepResult

    def wait(self) -> StepResult:
        return self.result


class NativeExecutor:
    """A synchronous executor. `sample` may compute the logits of more tokens of the last step, so
    a step must be sampled before the next forward."""

    max_in_flight = 1

    def __init__(
        self,
        decoder: NativeDecoder,
        pool: HostPool,
        state: HostRows,
        attention_shares: bool = False,
    ) -> None:
        """`attention_shares`: each result has `StepResult.shares`, for KV eviction."""
        self._decoder, self._state, self._native = decoder, state, cpu.module()
        self._tokens, self._tables, self._caches = state.tokens, state.tables, pool.data
        self.on_chunk_logits: ChunkLogits | None = None  # see `Executor`
        self._attention_shares = attention_shares
        if attention_shares:
            decoder.model.keep_shares()
        self._bans = BanTable()
        self._inputs_s = 0.0  # time spent on the decoder's inputs, summed over all steps

    def forward(self, plan: StepPlan) -> NativeForwardHandle:
        started = monotonic()
        self._state.apply(plan)
        self._bans.forget(plan.retired)
        decode, chunks = decode_tokens(plan.decode), plan.prefill
        samples = samples_of(decode, chunks)
        chunk_inputs, keep_all = NO_CHUNKS, False
        if chunks:  # row, position of the first token, number of tokens
            chunk_inputs = self._with_index(*np.array([c[:3] for c in chunks], np.int64).T)
            keep_all = self.on_chunk_logits is not None  # keep the hidden states of all tokens
            keep_all |= wants_prompt_logprobs(plan, self._state.rows)
        decode_inputs = self._with_index(decode.rows, decode.positions)
        token_indices = samples.tokens.astype(np.int32)  # the tokens of the step that are sampled
        inputs = decode_inputs, chunk_inputs, token_indices, keep_all
        self._inputs_s += monotonic() - started
        logits = self._decoder.forward(self._tokens, self._tables, self._caches, *inputs)
        return NativeForwardHandle(plan, samples.rows, samples.positions, logits, started)

    def _with_index(self, rows: Ints, positions: Ints, *more: Ints) -> npt.NDArray[np.int32]:
        """Return an array with the columns row, position, `more`, and cache index. All KV groups
        have the same cache index: only models with one group evict entries."""
        indices = self._state.indices(0, rows, positions)
        return np.stack([rows, positions, *more, indices], axis=1).astype(np.int32)

    def sample(self, handle: NativeForwardHandle, masks: Masks | None = None) -> FinishedStep:
        logits, rows, positions = handle.logits, handle.rows, handle.positions
        num_best = self._state.logprobs[rows]  # -1: no log-probabilities
        any_logprobs = num_best.max(initial=-1) >= 0
        # Sampling overwrites the logits. If log-probabilities are requested, the samples are
        # processed in slices, and the original logits of each slice are copied.
        size = LOGIT_SLICE if any_logprobs else max(1, len(rows))
        tokens: list[int] = []
        logprobs: dict[int, TokenLogprobs] = {}
        for start in range(0, len(rows), size):
            batch = slice(start, start + size)
            with_logprobs = np.flatnonzero(num_best[batch] >= 0).tolist() if any_logprobs else []
            original = logits[batch][with_logprobs] if with_logprobs else None
            self._ban(logits[batch], rows[batch], positions[batch], start, masks or {})
            drawn = self._draw(logits[batch], rows[batch], positions[batch])
            tokens += drawn
            if original is not None:
                num_top = num_best[batch][with_logprobs].tolist()
                own = [max(0, drawn[n]) for n in with_logprobs]
                entries = self._top_logprobs(original, own, num_top)
                for n, sample_logits, entry in zip(with_logprobs, original, entries, strict=True):
                    token_ids = self._state.rows[int(rows[start + n])].params.logprob_token_ids
                    if token_ids:
                        entry = _requested_logprobs(sample_logits, entry, token_ids)
                    logprobs[start + n] = entry
        prompts = self._prompt_logprobs(handle.plan) if handle.plan.prefill else {}
        if self.on_chunk_logits is not None:
            for start, stop, first_token in chunk_slices(handle.plan):
                token_indices = first_token + np.arange(stop - start, dtype=np.int32)
                self.on_chunk_logits(start, self._decoder.logits(token_indices))
        tokens_per_slot = None
        kept = keep_accepted(handle.plan, tokens)
        if kept is not None:
            tokens_per_slot = kept.counts
            tokens, logprobs = kept.of(tokens, logprobs)
        device_s = monotonic() - handle.started_s
        shares = self._decoder.model.shares().tolist() if self._attention_shares else ()
        return FinishedStep(
            StepResult(tokens, logprobs, prompts, device_s, counts=tokens_per_slot, shares=shares)
        )

    def stage_seconds(self) -> dict[str, float]:
        """Return the seconds of each stage of `forward`, summed over all steps."""
        return {"inputs": self._inputs_s, **self._decoder.model.stage_seconds}

    def reset(self) -> None:
        self._state.reset()
        self._bans.clear()

    def _top_logprobs(
        self, logits: npt.NDArray[np.float32], tokens: list[int], num_top: list[int]
    ) -> list[TokenLogprobs]:
        """Return for each row of logits the log-probabilities of its token and of the `num_top`
        most probable tokens."""
        rows, width = len(tokens), 1 + max(num_top)
        ids, ranks = np.empty((rows, width), np.int32), np.empty(rows, np.int32)
        values = np.empty((rows, width), np.float32)
        own = np.array(tokens, np.int32)
        decoder = self._decoder
        self._native.top_logprobs(logits, own, ids, values, ranks, decoder.isa, decoder.model)
        columns = zip(ids.tolist(), values.tolist(), ranks.tolist(), num_top, strict=True)
        return [
            TokenLogprobs(tuple(row_ids[: 1 + n]), tuple(row_values[: 1 + n]), rank)
            for row_ids, row_values, rank, n in columns
        ]

    def _ban(
        self,
        logits: npt.NDArray[np.float32],
        rows: Ints,
        positions: Ints,
        first_sample: int,
        masks: Masks,
    ) -> None:
        """Apply masks, bans and biases to the logits of some samples of the step, beginning with
        the sample `first_sample`."""
        has_bans = positions < self._state.plain_from[rows]
        if not masks and not has_bans.any():
            return
        for n, (row, at) in enumerate(zip(rows.tolist(), positions.tolist(), strict=True)):
            mask = masks.get(first_sample + n)
            if has_bans[n] or mask is not None:
                request = self._state.rows[row]
                bans = self._bans.bans_of(row, request, logits.shape[1])
                bans.apply(logits[n], request, at, self._tokens[row], mask)

    def _draw(self, logits: npt.NDArray[np.float32], rows: Ints, positions: Ints) -> list[int]:
        """Sample a token from each row of logits, and write the tokens to the rows of their
        requests. Return the tokens; a token is -1 if its logits were NaN or infinite. The logits
        are overwritten."""
        state = self._state
        params, keys = state.sampling[rows], np.zeros((len(rows), 2), np.uint32)
        for n in params[:, 0].nonzero()[0]:  # the samples with a temperature above 0
            keys[n] = stream_key(int(state.seed[rows[n]]), int(positions[n]))
        places = np.stack([rows, state.num_prompt[rows], positions], axis=1)
        chosen = np.empty(len(rows), np.int32)
        self._native.sample(
            logits,
            self._tokens,
            places.astype(np.int32),
            params,
            keys,
            chosen,
            self._decoder.isa,
            self._decoder.model,
        )
        self._tokens[rows, positions] = np.maximum(chosen, 0)
        tokens: list[int] = chosen.tolist()
        return tokens

    def _prompt_logprobs(self, plan: StepPlan) -> dict[int, list[TokenLogprobs]]:
        """Return the log-probability of each prompt token after the first."""
        found: dict[int, list[TokenLogprobs]] = {}
        for row, num_best, start, stop, first_token in prompt_slices(plan, self._state.rows):
            entries, size = found.setdefault(row, []), stop - start
            if size:
                logits = self._decoder.logits(first_token + np.arange(size, dtype=np.int32))
                next_tokens = self._tokens[row, start + 1 : stop + 1].tolist()
                entries += self._top_logprobs(logits, next_tokens, [num_best] * size)
        return found


def _requested_logprobs(
    logits: npt.NDArray[np.float32], entry: TokenLogprobs, token_ids: Sequence[int]
) -> TokenLogprobs:
    """Return `entry` with the log-probabilities of `token_ids` instead of the most probable
    tokens. The first token of an entry is the sampled token."""
    own, own_logprob = entry.token_ids[0], entry.logprobs[0]
    values = logits[list(token_ids)] - logits[own] + own_logprob
    return TokenLogprobs((own, *token_ids), (own_logprob, *values.tolist()), entry.rank)
