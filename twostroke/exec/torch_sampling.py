"""Sampling with all options of the requests, one request at a time: the reference definition.

    raw logits ─▶ log-probabilities, if requested
        │
        ▼  adjust: grammar · bias · allowed ids · min_tokens · bad words · penalties
        ├─▶ greedy rows: argmax
        └─▶ other rows: ÷ temperature · min-p · top-k · top-p · largest of logit + Gumbel noise

`device_sampling.py` computes the same without a loop over requests and without waiting for the
device. Requests that exceed its tables are adjusted here.
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
from twostroke.kernels.reference_sampling import NEVER, penalise
from twostroke.plan import NewRow, TokenLogprobs

Triple = tuple[torch.Tensor, torch.Tensor, torch.Tensor]


class Rows(Protocol):
    """The row state that sampling reads."""

    rows: dict[int, NewRow]
    tokens: torch.Tensor  # [rows, positions]


@dataclass(frozen=True, slots=True)
class Sampled:
    """Sampled tokens with their log-probabilities."""

    tokens: torch.Tensor  # [S]
    logprobs: dict[int, Triple]  # index → ids, values, rank


def sample(
    logits: torch.Tensor,
    rows: Sequence[int],
    positions: Sequence[int],
    state: Rows,
    masks: Mapping[int, torch.Tensor] | None = None,
) -> Sampled:
    """Sample one token for each row of `logits` [S, V] fp32 (overwritten); -1 where the logits are
    NaN or infinite. `rows` and `positions`: the request's row in `state` and the position of each
    sampled token. `masks`: the tokens that a grammar allows, by index in `logits`."""
    requests, device = [state.rows[row] for row in rows], logits.device
    asked = [i for i, r in enumerate(requests) if r.params.logprobs is not None]
    raw = logits[asked] if asked else None
    adjust(logits, rows, positions, state, masks)
    params = [request.params for request in requests]

    def column(values: Sequence[float], dtype: torch.dtype = torch.float32) -> torch.Tensor:
        return torch.tensor(values, dtype=dtype, device=device)

    seeds = np.array([request.seed % 2**64 for request in requests], np.uint64)
    key0, key1 = (
        torch.from_numpy(key.astype(np.int64)).to(device)
        for key in stream_keys(seeds, np.array(positions, np.int64))
    )
    draw_params = DrawParams(
        temperature=column([0.0 if p.greedy else p.temperature for p in params]),
        top_k=column([p.top_k for p in params], torch.int64),
        top_p=column([p.top_p for p in params]),
        min_p=column([p.min_p for p in params]),
        key0=key0,
        key1=key1,
    )
    tokens = reference_sampling.sample(logits, draw_params)
    if raw is None:
        return Sampled(tokens, {})
    counts = [params[index].logprobs or 0 for index in asked]
    lines = torch.arange(len(asked), device=device)
    found = reference_sampling.token_logprobs(raw, lines, tokens[asked], max(counts))
    results = zip(asked, counts, *found, strict=True)
    return Sampled(
        tokens, {index: (ids[: 1 + n], v[: 1 + n], rank) for index, n, ids, v, rank in results}
    )


def as_tensors(
    masks: Masks | None, vocab_size: int, device: torch.device
) -> dict[int, torch.Tensor]:
    """Return grammar masks as tensors for `sample`."""
    return {
        index: torch.from_numpy(unpack_mask(mask, vocab_size)).to(device)
        for index, mask in (masks or {}).items()
    }


def to_token_logprobs(parts: Triple) -> TokenLogprobs:
    ids, values, rank = parts
    return TokenLogprobs(tuple(ids.tolist()), tuple(values.tolist()), int(rank))


# ── bans, biases and penalties ──────────────────────────────────────────────────────────────


def adjust(
    logits: torch.Tensor,
    rows: Sequence[int],
    positions: Sequence[int],
    state: Rows,
    masks: Mapping[int, torch.Tensor] | None = None,
) -> None:
    """Apply masks, bans, biases and penalties in place."""
    requests = [state.rows[row] for row in rows]
    for index, mask in (masks or {}).items():
        logits[index].masked_fill_(~mask, NEVER)
    _apply_bans(logits, requests, rows, positions, state)
    _apply_penalties(logits, requests, rows, positions, state)


def _apply_bans(
    logits: torch.Tensor,
    requests: Sequence[NewRow],
    rows: Sequence[int],
    positions: Sequence[int],
    state: Rows,
) -> None:
    for index, request in enumerate(requests):
        params = request.params
        row = logits[index]
        if params.logit_bias:
            row[list(params.logit_bias)] += torch.tensor(
                list(params.logit_bias.values()), device=row.device
            )
        if params.allowed_token_ids is not None:
            allowed = torch.zeros_like(row, dtype=torch.bool)
            allowed[list(params.allowed_token_ids)] = True
            row.masked_fill_(~allowed, NEVER)
        written = positions[index] - request.num_prompt
        if written < params.min_tokens and request.stop_ids:
            row[list(request.stop_ids)] = NEVER
        for word in request.bad_words_ids:
            before = len(word) - 1
            if before <= written:
                end = positions[index]
                tail = state.tokens[rows[index], end - before : end]
                same = (tail == torch.tensor(word[:-1], device=tail.device)).all()
                row[word[-1]] = torch.where(same, NEVER, row[word[-1]])


def _apply_penalties(
    logits: torch.Tensor,
    requests: Sequence[NewRow],
    rows: Sequence[int],
    positions: Sequence[int],
    state: Rows,
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
    known = position < column([positions[i] for i in penalised])
    output = known & (position >= column([requests[i].num_prompt for i in penalised]))

    def count(mask: torch.Tensor) -> torch.Tensor:
        counts = torch.zeros(len(penalised), vocab, device=device)
        return counts.scatter_add_(1, history, mask.float())

    params = [requests[i].params for i in penalised]
    seen, written = count(known) > 0, count(output)
    logits[penalised] = penalise(
        logits[penalised],
        seen,
        written,
        column([p.repetition_penalty for p in params]),
        column([p.frequency_penalty for p in params]),
        column([p.presence_penalty for p in params]),
    )
