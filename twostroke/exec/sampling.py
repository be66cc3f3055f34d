"""Logits → tokens, vectorised over the batch, on the device.

    raw logits ─▶ log-probabilities, where asked for
        │
        ▼  bans and biases · penalties                  only rows that have any
        ├─▶ greedy rows: argmax
        └─▶ the others: ÷ temperature · min-p · top-k · top-p · largest of logit + Gumbel noise

The vocabulary is never sorted as a whole unless a top-p reaches past `CANDIDATES` tokens.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol

import torch

from twostroke.exec.executor import Masks
from twostroke.exec.rng import MASK, stream_key
from twostroke.plan import NewRow, TokenLogprobs

CANDIDATES = 1024
NEVER = float("-inf")


class Rows(Protocol):
    """What sampling asks of the rows that persist."""

    rows: dict[int, NewRow]
    tokens: torch.Tensor  # [rows, positions]


@dataclass(frozen=True, slots=True)
class Sampled:
    tokens: torch.Tensor  # [S]
    logprobs: dict[
        int, tuple[torch.Tensor, torch.Tensor, torch.Tensor]
    ]  # index → ids, values, rank


def sample(
    logits: torch.Tensor,
    rows: Sequence[int],
    positions: Sequence[int],
    state: Rows,
    masks: Mapping[int, torch.Tensor] | None = None,
) -> Sampled:
    """One token for each row of `logits` [S, V] fp32 (overwritten); -1 where they are NaN or
    infinite. `positions` are where the tokens will stand; `masks` are the tokens a grammar allows,
    by index into the rows."""
    requests = [state.rows[row] for row in rows]
    asked = [i for i, r in enumerate(requests) if r.params.logprobs is not None]
    raw = torch.log_softmax(logits[asked], dim=-1) if asked else None
    for index, mask in (masks or {}).items():
        logits[index].masked_fill_(~mask, NEVER)
    _apply_bans(logits, requests, rows, positions, state)
    _apply_penalties(logits, requests, rows, positions, state)
    drawn = [i for i, r in enumerate(requests) if not r.params.greedy]
    if len(drawn) == len(requests):
        tokens = _draw(logits, requests, positions)
    else:
        tokens = logits.argmax(dim=-1)
        if drawn:
            chosen = [requests[i] for i in drawn], [positions[i] for i in drawn]
            tokens[drawn] = _draw(logits[drawn], *chosen)
    # NaN is larger than any number to torch, so that it is chosen where there is one.
    tokens = torch.where(logits.gather(1, tokens.unsqueeze(1)).squeeze(1) < -NEVER, tokens, -1)
    logprobs = {}
    for n, index in enumerate(asked):
        assert raw is not None
        count = requests[index].params.logprobs
        logprobs[index] = top_logprobs(raw[n], tokens[index], count or 0)
    return Sampled(tokens, logprobs)


def as_tensors(masks: Masks | None, device: torch.device) -> dict[int, torch.Tensor]:
    """What grammars allow, where `sample` can use it."""
    return {n: torch.from_numpy(mask).to(device) for n, mask in (masks or {}).items()}


def top_logprobs(
    logprobs: torch.Tensor, token: torch.Tensor, count: int
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """The token's own log-probability, then the `count` best: ids, values, rank of the token."""
    own = logprobs[token]
    rank = (logprobs > own).sum() + 1
    best = torch.topk(logprobs, count)
    ids = torch.cat([token.view(1), best.indices])
    return ids, torch.cat([own.view(1), best.values]), rank


def top_logprobs_each(
    logprobs: torch.Tensor, tokens: torch.Tensor, count: int
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """`top_logprobs` of many at once: [S, V] and [S] → [S, 1 + count], the same, and [S]."""
    chosen = tokens.long().unsqueeze(1)
    own = logprobs.gather(1, chosen)
    rank = (logprobs > own).sum(1) + 1
    best = torch.topk(logprobs, count)
    return torch.cat([chosen, best.indices], 1), torch.cat([own, best.values], 1), rank


def to_token_logprobs(
    parts: tuple[torch.Tensor, torch.Tensor, torch.Tensor],
) -> TokenLogprobs:
    ids, values, rank = parts
    return TokenLogprobs(tuple(ids.tolist()), tuple(values.tolist()), int(rank))


# ── what a request forbids or favours ───────────────────────────────────────────────────────


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
    which = [i for i, r in enumerate(requests) if r.params.penalised]
    if not which:
        return
    device, vocab = logits.device, logits.shape[-1]

    def column(values: Sequence[float]) -> torch.Tensor:
        return torch.tensor(values, device=device).unsqueeze(1)

    longest = max(positions[i] for i in which)
    history = state.tokens[[rows[i] for i in which], :longest].long()
    position = torch.arange(longest, device=device)
    known = position < column([positions[i] for i in which])
    output = known & (position >= column([requests[i].num_prompt for i in which]))

    def count(mask: torch.Tensor) -> torch.Tensor:
        counts = torch.zeros(len(which), vocab, device=device)
        return counts.scatter_add_(1, history, mask.float())

    params = [requests[i].params for i in which]
    seen, written = count(known) > 0, count(output)
    part = logits[which]
    repetition = column([p.repetition_penalty for p in params])
    part = torch.where(seen, torch.where(part > 0, part / repetition, part * repetition), part)
    part -= written * column([p.frequency_penalty for p in params])
    part -= (written > 0) * column([p.presence_penalty for p in params])
    logits[which] = part


# ── drawing ─────────────────────────────────────────────────────────────────────────────────


def _draw(
    logits: torch.Tensor, requests: Sequence[NewRow], positions: Sequence[int]
) -> torch.Tensor:
    device = logits.device
    params = [r.params for r in requests]
    keys = torch.tensor(
        [stream_key(r.seed, p) for r, p in zip(requests, positions, strict=True)], device=device
    )
    temperature = torch.tensor([p.temperature for p in params], device=device).unsqueeze(1)
    scaled = logits / temperature
    if any(p.min_p > 0 for p in params):
        least = torch.tensor([p.min_p for p in params], device=device).log().unsqueeze(1)
        scaled.masked_fill_(scaled < scaled.amax(1, keepdim=True) + least, NEVER)
    vocab = logits.shape[-1]
    bounded = [i for i, p in enumerate(params) if 0 < p.top_k < vocab or p.top_p < 1]
    if not bounded:
        return _largest(scaled, torch.arange(vocab, device=device).unsqueeze(0), keys)
    top_k = [p.top_k if 0 < p.top_k < vocab else vocab for p in params]
    top_p = [p.top_p for p in params]
    tokens = torch.empty(len(params), dtype=torch.int64, device=device)
    free = sorted(set(range(len(params))) - set(bounded))
    if free:
        every = torch.arange(vocab, device=device).unsqueeze(0)
        tokens[free] = _largest(scaled[free], every, keys[free])
    tokens[bounded] = _draw_bounded(
        scaled[bounded], keys[bounded], [top_k[i] for i in bounded], [top_p[i] for i in bounded]
    )
    return tokens


def _draw_bounded(
    scaled: torch.Tensor, keys: torch.Tensor, top_k: list[int], top_p: list[float]
) -> torch.Tensor:
    """Top-k, then top-p of what it leaves: from the best candidates, if they reach far enough."""
    device, vocab = scaled.device, scaled.shape[-1]
    k = torch.tensor(top_k, device=device).unsqueeze(1)
    p = torch.tensor(top_p, device=device).unsqueeze(1)
    most = min(max(top_k), vocab)
    size = min(most, CANDIDATES)
    everything = torch.logsumexp(scaled, dim=1, keepdim=True)
    while True:
        values, ids = torch.topk(scaled, size, dim=1)
        within_k = torch.arange(size, device=device) < k
        values = values.masked_fill(~within_k, NEVER)
        limited = torch.logsumexp(values, dim=1, keepdim=True)
        total = torch.where(k <= size, limited, everything)
        share = torch.exp(values - total)
        before = share.cumsum(1) - share
        keep = within_k & (before < p)
        keep[:, 0] = True
        # Enough when every row either ends by its k or has its p inside the candidates.
        enough = (k <= size) | (share.sum(1, keepdim=True) >= p)
        if size >= most or bool(enough.all()):
            return _largest(values.masked_fill(~keep, NEVER), ids, keys)
        size = most


def _largest(scores: torch.Tensor, ids: torch.Tensor, keys: torch.Tensor) -> torch.Tensor:
    best = (scores + gumbel(keys, ids)).argmax(dim=1, keepdim=True)
    return ids.expand_as(scores).gather(1, best).squeeze(1)


def gumbel(keys: torch.Tensor, token_ids: torch.Tensor) -> torch.Tensor:
    """Gumbel noise for [rows, 2] keys and token ids that broadcast to [rows, n], in fp32.

    The largest of logit + noise is a draw from softmax(logits), for any subset of tokens.
    """
    bits = _mix(token_ids.long() ^ keys[:, :1])
    bits = _mix((bits + keys[:, 1:]) & MASK)
    uniform = (bits.float() + 0.5) * 2.0**-32
    # −log1p(−u) keeps its precision where u is small, which is where the winners come from.
    return -torch.log(-torch.log1p(-uniform.clamp(max=1 - 2.0**-24)))


def _mix(x: torch.Tensor) -> torch.Tensor:
    """`rng.mix` of many at once."""
    x = ((x ^ (x >> 16)) * 0x7FEB352D) & MASK
    x = ((x ^ (x >> 15)) * 0x846CA68B) & MASK
    return x ^ (x >> 16)
