"""`NativeExecutor`: runs plans on the native decoder, with two or three native calls per step.

This module imports no torch.
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
    """A synchronous executor. The decoder keeps the hidden states of the last step."""

    max_in_flight = 1

    def __init__(
        self,
        decoder: NativeDecoder,
        pool: HostPool,
        state: HostRows,
        attention_shares: bool = False,
    ) -> None:
        """`attention_shares`: results include the attention shares of segments of the cache."""
        self._decoder, self._state, self._native = decoder, state, cpu.module()
        self._tokens, self._tables, self._caches = state.tokens, state.tables, pool.data
        self.on_chunk_logits: ChunkLogits | None = None
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
        spans, every_logit = NO_CHUNKS, False
        if chunks:  # row, position of the first token, number of tokens
            spans = self._with_index(*np.array([c[:3] for c in chunks], np.int64).T)
            every_logit = self.on_chunk_logits is not None
            every_logit |= wants_prompt_logprobs(plan, self._state.rows)
        slots = self._with_index(decode.rows, decode.positions)
        inputs = slots, spans, samples.tokens.astype(np.int32), every_logit
        self._inputs_s += monotonic() - started
        logits = self._decoder.forward(self._tokens, self._tables, self._caches, *inputs)
        return NativeForwardHandle(plan, samples.rows, samples.positions, logits, started)

    def _with_index(self, rows: Ints, positions: Ints, *more: Ints) -> npt.NDArray[np.int32]:
        """Return [n, (row, position, …, cache index)]. The index is the same in every KV group."""
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
            part = slice(start, start + size)
            with_logprobs = np.flatnonzero(num_best[part] >= 0).tolist() if any_logprobs else []
            raw = logits[part][with_logprobs] if with_logprobs else None
            self._ban(logits[part], rows[part], positions[part], start, masks or {})
            drawn = self._draw(logits[part], rows[part], positions[part])
            tokens += drawn
            if raw is not None:
                counts = num_best[part][with_logprobs].tolist()
                found = self._top_logprobs(raw, [max(0, drawn[n]) for n in with_logprobs], counts)
                for n, lines, entry in zip(with_logprobs, raw, found, strict=True):
                    token_ids = self._state.rows[int(rows[start + n])].params.logprob_token_ids
                    if token_ids:
                        entry = _requested_logprobs(lines, entry, token_ids)
                    logprobs[start + n] = entry
        prompts = self._prompt_logprobs(handle.plan) if handle.plan.prefill else {}
        if self.on_chunk_logits is not None:
            for start, stop, first in chunk_slices(handle.plan):
                lines = self._decoder.logits(first + np.arange(stop - start, dtype=np.int32))
                self.on_chunk_logits(start, lines)
        counts = None
        kept = keep_accepted(handle.plan, tokens)
        if kept is not None:
            counts = kept.counts
            tokens, logprobs = kept.of(tokens, logprobs)
        device_s = monotonic() - handle.started_s
        shares = self._decoder.model.shares().tolist() if self._attention_shares else ()
        return FinishedStep(
            StepResult(tokens, logprobs, prompts, device_s, counts=counts, shares=shares)
        )

    def stage_seconds(self) -> dict[str, float]:
        """Return the seconds of each stage of `forward`, summed over all steps."""
        return {"inputs": self._inputs_s, **self._decoder.model.stage_seconds}

    def reset(self) -> None:
        self._state.reset()
        self._bans.clear()

    def _top_logprobs(
        self, logits: npt.NDArray[np.float32], tokens: list[int], counts: list[int]
    ) -> list[TokenLogprobs]:
        """Return for each row of logits the log-probabilities of its token and the best tokens."""
        rows, width = len(tokens), 1 + max(counts)
        ids, ranks = np.empty((rows, width), np.int32), np.empty(rows, np.int32)
        values = np.empty((rows, width), np.float32)
        own = np.array(tokens, np.int32)
        decoder = self._decoder
        self._native.top_logprobs(logits, own, ids, values, ranks, decoder.isa, decoder.model)
        each = zip(ids.tolist(), values.tolist(), ranks.tolist(), counts, strict=True)
        return [TokenLogprobs(tuple(i[: 1 + n]), tuple(v[: 1 + n]), rank) for i, v, rank, n in each]

    def _ban(
        self,
        logits: npt.NDArray[np.float32],
        rows: Ints,
        positions: Ints,
        first: int,
        masks: Masks,
    ) -> None:
        """Apply masks, bans and biases. `first`: the index of the first sample in the step."""
        banned = positions < self._state.plain_from[rows]
        if not masks and not banned.any():
            return
        for n, (row, at) in enumerate(zip(rows.tolist(), positions.tolist(), strict=True)):
            if banned[n] or first + n in masks:
                request = self._state.rows[row]
                bans = self._bans.bans_of(row, request, logits.shape[1])
                bans.apply(logits[n], request, at, self._tokens[row], masks.get(first + n))

    def _draw(self, logits: npt.NDArray[np.float32], rows: Ints, positions: Ints) -> list[int]:
        """Return the sampled tokens, -1 where the logits are NaN or infinite. Write the tokens to
        the rows. The logits are overwritten."""
        state = self._state
        params, keys = state.sampling[rows], np.zeros((len(rows), 2), np.uint32)
        for n in params[:, 0].nonzero()[0]:  # not those with temperature 0
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
        for part in prompt_slices(plan, self._state.rows):
            entries, size = found.setdefault(part.row, []), part.stop - part.start
            if size:
                lines = self._decoder.logits(part.first + np.arange(size, dtype=np.int32))
                targets = self._tokens[part.row, part.start + 1 : part.stop + 1].tolist()
                entries += self._top_logprobs(lines, targets, [part.num_best] * size)
        return found


def _requested_logprobs(
    logits: npt.NDArray[np.float32], entry: TokenLogprobs, token_ids: Sequence[int]
) -> TokenLogprobs:
    """Return the entry of the sampled token with `token_ids` in place of the best tokens."""
    own, own_logprob = entry.token_ids[0], entry.logprobs[0]
    values = logits[list(token_ids)] - logits[own] + own_logprob
    return TokenLogprobs((own, *token_ids), (own_logprob, *values.tolist()), entry.rank)
