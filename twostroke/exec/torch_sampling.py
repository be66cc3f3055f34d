"""The reference for sampling with all options of a request. It loops over the requests.

    raw logits ─▶ log-probabilities, if requested
        │
        ▼  adjust: grammar ─▶ bias ─▶ allowed ids ─▶ min_tokens ─▶ bad words ─▶ penalties
        ├─▶ greedy rows: argmax
        └─▶ other rows: temperature ─▶ min-p ─▶ top-k ─▶ top-p ─▶ argmax(logit + Gumbel noise)

`device_sampling.py` computes the same tokens without a loop over requests and without waiting for
the device. If a request has more biases or bans than `kernels/sampling_table.py` has places for,
`device_sampling.py` calls `adjust` of this module for the request.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol

import numpy as np
import torch

from twostroke.exec.executor import Masks
from twostroke.exec.rng import stream_keys
from twostroke.exec.token_mask import unpack_mask
from twostroke.kernels import reference_sampling
from twostroke.kernels.records import DrawParams
from twostroke.kernels.reference_sampling import NEG_INF, penalise
from twostroke.plan import NewRow, TokenLogprobs

# Token ids (the sampled token, then the best tokens), their log-probabilities, and the rank of the
# sampled token.
LogprobTensors = tuple[torch.Tensor, torch.Tensor, torch.Tensor]


class SamplerState(Protocol):
    """The part of the executor's state that sampling reads. Each running request has a row."""

    @property
    def rows(self) -> dict[int, NewRow]:
        """The request of each row, by row number."""

    @property
    def tokens(self) -> torch.Tensor:
        """[rows, positions]: the prompt and the sampled tokens of each row."""


@dataclass(frozen=True, slots=True)
class Sampled:
    """Sampled tokens with their log-probabilities."""

    tokens: torch.Tensor  # [S]
    logprobs: dict[int, LogprobTensors]  # by index in `tokens`


def sample(
    logits: torch.Tensor,
    rows: Sequence[int],
    positions: Sequence[int],
    state: SamplerState,
    masks: Mapping[int, torch.Tensor] | None = None,
) -> Sampled:
    """Sample one token from each line of `logits`, [S, V] in fp32, and overwrite `logits`. A token
    is -1 if a logit of the line is NaN or +inf; -inf marks a banned token. `rows[i]`: the row in
    `state` of the request that line i belongs to. `positions[i]`: the position of the token that is
    sampled from line i. `masks[i]`: the tokens that the grammar allows for line i."""
    requests, device = [state.rows[row] for row in rows], logits.device
    with_logprobs = [i for i, r in enumerate(requests) if r.params.logprobs is not None]
    raw_logits = logits[with_logprobs] if with_logprobs else None
    adjust(logits, rows, positions, state, masks)
    params = [request.params for request in requests]

    def vector(values: Sequence[float], dtype: torch.dtype = torch.float32) -> torch.Tensor:
        return torch.tensor(values, dtype=dtype, device=device)

    seeds = np.array([request.seed % 2**64 for request in requests], np.uint64)
    key0, key1 = (
        torch.from_numpy(key.astype(np.int64)).to(device)
        for key in stream_keys(seeds, np.array(positions, np.int64))
    )
    draw_params = DrawParams(
        temperature=vector([0.0 if p.greedy else p.temperature for p in params]),
        top_k=vector([p.top_k for p in params], torch.int64),
        top_p=vector([p.top_p for p in params]),
        min_p=vector([p.min_p for p in params]),
        key0=key0,
        key1=key1,
    )
    tokens = reference_sampling.sample(logits, draw_params)
    if raw_logits is None:
        return Sampled(tokens, {})
    counts = [params[index].logprobs or 0 for index in with_logprobs]
    raw_lines = torch.arange(len(with_logprobs), device=device)
    ids, values, ranks = reference_sampling.token_logprobs(
        raw_logits, raw_lines, tokens[with_logprobs], max(counts)
    )
    logprobs: dict[int, LogprobTensors] = {}
    for n, (index, count) in enumerate(zip(with_logprobs, counts, strict=True)):
        logprobs[index] = ids[n, : 1 + count], values[n, : 1 + count], ranks[n]
    return Sampled(tokens, logprobs)


def mask_tensors(
    masks: Masks | None, vocab_size: int, device: torch.device
) -> dict[int, torch.Tensor]:
    """Return grammar masks as boolean tensors, for `sample`."""
    return {
        index: torch.from_numpy(unpack_mask(mask, vocab_size)).to(device)
        for index, mask in (masks or {}).items()
    }


def to_token_logprobs(tensors: LogprobTensors) -> TokenLogprobs:
    """Copy the log-probabilities of one token to the host."""
    ids, values, rank = tensors
    return TokenLogprobs(tuple(ids.tolist()), tuple(values.tolist()), int(rank))


# ── bans, biases and penalties ──────────────────────────────────────────────────────────────


def adjust(
    logits: torch.Tensor,
    rows: Sequence[int],
    positions: Sequence[int],
    state: SamplerState,
    masks: Mapping[int, torch.Tensor] | None = None,
) -> None:
    """Apply masks, bans, biases and penalties in place."""
    requests = [state.rows[row] for row in rows]
    for index, mask in (masks or {}).items():
        logits[index].masked_fill_(~mask, NEG_INF)
    _apply_biases_and_bans(logits, requests, rows, positions, state)
    _apply_penalties(logits, requests, rows, positions, state)


def _apply_biases_and_bans(
    logits: torch.Tensor,
    requests: Sequence[NewRow],
    rows: Sequence[int],
    positions: Sequence[int],
    state: SamplerState,
) -> None:
    for index, request in enumerate(requests):
        params = request.params
        line = logits[index]
        if params.logit_bias:
            line[list(params.logit_bias)] += torch.tensor(
                list(params.logit_bias.values()), device=line.device
            )
        if params.allowed_token_ids is not None:
            allowed = torch.zeros_like(line, dtype=torch.bool)
            allowed[list(params.allowed_token_ids)] = True
            line.masked_fill_(~allowed, NEG_INF)
        num_output = positions[index] - request.num_prompt
        if num_output < params.min_tokens and request.stop_ids:
            line[list(request.stop_ids)] = NEG_INF
        for *first_ids, last_id in request.bad_words_ids:
            # Ban the last token if the output ends in the other tokens. The prompt does not count.
            if len(first_ids) <= num_output:
                end = positions[index]
                newest_ids = state.tokens[rows[index], end - len(first_ids) : end]
                matches = (newest_ids == torch.tensor(first_ids, device=newest_ids.device)).all()
                line[last_id] = torch.where(matches, NEG_INF, line[last_id])


def _apply_penalties(
    logits: torch.Tensor,
    requests: Sequence[NewRow],
    rows: Sequence[int],
    positions: Sequence[int],
    state: SamplerState,
) -> None:
    penalised = [i for i, r in enumerate(requests) if r.params.penalised]
    if not penalised:
        return
    device, vocab = logits.device, logits.shape[-1]

    def column(values: Sequence[float]) -> torch.Tensor:
        return torch.tensor(values, device=device).unsqueeze(1)

    longest = max(positions[i] for i in penalised)
    history = state.tokens[[rows[i] for i in penalised], :longest].long()
    position = torch.arange(longest, device=device)
    in_sequence = position < column([positions[i] for i in penalised])
    in_output = in_sequence & (position >= column([requests[i].num_prompt for i in penalised]))

    def count(mask: torch.Tensor) -> torch.Tensor:
        """Count each token of the vocabulary at the positions of a mask."""
        counts = torch.zeros(len(penalised), vocab, device=device)
        return counts.scatter_add_(1, history, mask.float())

    params = [requests[i].params for i in penalised]
    logits[penalised] = penalise(
        logits[penalised],
        count(in_sequence) > 0,
        count(in_output),
        column([p.repetition_penalty for p in params]),
        column([p.frequency_penalty for p in params]),
        column([p.presence_penalty for p in params]),
    )
