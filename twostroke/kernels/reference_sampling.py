"""The sampling kernels in plain torch, on any device. They define the results of the fast kernels.

raw logits ─▶ adjust_logits ─▶ sample ─▶ advance_tokens ─▶ the row's next step
    └────────▶ token_logprobs
"""

from __future__ import annotations

from dataclasses import fields

import torch

from twostroke.kernels import sampling_table
from twostroke.kernels.records import DrawParams
from twostroke.kernels.sampling_table import SamplingState

NEG_INF = float("-inf")
CANDIDATES = 1024  # tokens that top-p sorts first; it sorts more only if it needs them
UINT32 = 0xFFFFFFFF


# ── masks, biases, bans and penalties ───────────────────────────────────────────────────────


def adjust_logits(
    logits: torch.Tensor,
    samples: torch.Tensor,
    state: SamplingState,
    masks: torch.Tensor,
    out: torch.Tensor,
) -> torch.Tensor:
    """Apply masks, biases, bans and penalties to the logits [S, V] of the `samples`, and write them
    to `out`, [samples, V] in fp32. `masks`: [M, ⌈V / 32⌉] int32; MASK is a sample's row."""
    vocab, numbers = logits.shape[1], samples.view(torch.float32)
    sample, row, position, mask, flags = (field.long() for field in samples[:5])
    out.copy_(logits[sample])
    lists = state.lists[row]
    listed = torch.arange(sampling_table.MAX_BIASES, device=out.device)
    at = (listed < samples[sampling_table.NUM_BIASES].unsqueeze(1)).nonzero(as_tuple=True)
    tokens = lists[:, : sampling_table.MAX_BIASES][at].long()
    out[at[0], tokens] += lists.view(torch.float32)[:, sampling_table.BIAS_VALUES :][at]
    masked, limited = mask >= 0, (flags & sampling_table.ALLOWED_IDS) > 0
    out[masked] = out[masked].masked_fill(~unpack_bits(masks[mask[masked]], vocab), NEG_INF)
    allowed = unpack_bits(state.allowed[row[limited]], vocab)
    out[limited] = out[limited].masked_fill(~allowed, NEG_INF)
    _ban(out, samples[sampling_table.NUM_BANS], lists, state.tokens[row], position)
    penalised = (flags & sampling_table.PENALISED) > 0
    if penalised.any():
        counts = state.counts[row[penalised]].int()
        rates = numbers[
            sampling_table.REPETITION : sampling_table.TEMPERATURE, penalised
        ].unsqueeze(2)
        out[penalised] = penalise(
            out[penalised], counts != 0, counts & sampling_table.MAX_WRITTEN, *rates
        )
    return out


def penalise(
    logits: torch.Tensor,
    seen: torch.Tensor,
    written: torch.Tensor,
    repetition: torch.Tensor,
    frequency: torch.Tensor,
    presence: torch.Tensor,
) -> torch.Tensor:
    """Apply penalties. `seen`: whether each token is in the prompt or the output; `written`: the
    number of times that each token is in the output."""
    scaled = torch.where(logits > 0, logits / repetition, logits * repetition)
    return torch.where(seen, scaled, logits) - written * frequency - (written > 0) * presence


def _ban(
    out: torch.Tensor,
    num_bans: torch.Tensor,
    lists: torch.Tensor,
    tokens: torch.Tensor,
    position: torch.Tensor,
) -> None:
    fields = lists[:, sampling_table.BAN_TOKEN :].view(len(lists), -1, sampling_table.MAX_BANS)
    token, first, until, length = fields[:, :4].unbind(1)
    now = position.unsqueeze(1)
    listed = torch.arange(sampling_table.MAX_BANS, device=out.device)
    banned = (listed < num_bans.unsqueeze(1)) & (first <= now) & (now < until)
    for n, prefix in enumerate(fields[:, 4:].unbind(1)):
        before = tokens.gather(1, (now - length + n).clamp(0, tokens.shape[1] - 1))
        banned &= (n >= length) | (before == prefix)
    at = banned.nonzero(as_tuple=True)
    out[at[0], token[at].long()] = NEG_INF


def unpack_bits(words: torch.Tensor, count: int) -> torch.Tensor:
    """Return the first bits of each line of int32 words, lowest first: [lines, count] of bool."""
    bits = (words.unsqueeze(-1) >> torch.arange(32, device=words.device)) & 1
    return bits.flatten(1)[:, :count].bool()


def advance_tokens(
    samples: torch.Tensor, drawn: torch.Tensor, state: SamplingState, out: torch.Tensor
) -> None:
    """Write the final tokens to `out`, by sample, and to the rows' tokens and counts."""
    sample, row, position, _, flags = (field.long() for field in samples[:5])
    out[sample] = drawn.to(out.dtype)
    token = drawn.clamp(min=0)  # -1 is not a token that a model can read
    state.tokens[row, position] = token.int()
    counted = ((flags & sampling_table.PENALISED) > 0) & (drawn >= 0)
    row, token = row[counted], token[counted].long()
    count = state.counts[row, token]
    grown = (count & sampling_table.MAX_WRITTEN) < sampling_table.MAX_WRITTEN
    state.counts[row, token] = count + grown.to(count.dtype)


# ── drawing ─────────────────────────────────────────────────────────────────────────────────


def sample(
    logits: torch.Tensor,
    params: DrawParams[torch.Tensor],
    *,
    out: torch.Tensor | None = None,
    cells: torch.Tensor | None = None,
    write_at: torch.Tensor | None = None,
) -> torch.Tensor:
    """Draw a token for each row of [B, V]; -1 where the largest logit is NaN or infinite. The
    tokens also go to `cells[write_at]`, if that is given: 0 for -1."""
    wide = logits.float()
    tokens = wide.argmax(dim=-1)
    drawn = params.temperature > 0
    if drawn.all():
        tokens = _draw(wide, params)
    elif drawn.any():
        some = (getattr(params, field.name)[drawn] for field in fields(params))
        tokens[drawn] = _draw(wide[drawn], DrawParams(*some))
    tokens = torch.where(wide.amax(dim=-1) < torch.inf, tokens, -1)  # NaN is the largest to torch
    if cells is not None and write_at is not None:
        cells.scatter_(0, write_at, tokens.clamp(min=0).to(cells.dtype))
    return tokens if out is None else out.copy_(tokens)


def _draw(logits: torch.Tensor, params: DrawParams[torch.Tensor]) -> torch.Tensor:
    """Apply temperature, min-p, top-k, top-p, then draw the token of the largest logit + noise."""
    vocab, device = logits.shape[-1], logits.device
    keys = torch.stack([params.key0.long() & UINT32, params.key1.long() & UINT32], dim=1)
    scaled = logits / params.temperature.unsqueeze(1)
    top_k, top_p, min_p = params.top_k, params.top_p, params.min_p
    if (min_p > 0).any():
        smallest = scaled.amax(1, keepdim=True) + min_p.log().unsqueeze(1)
        scaled.masked_fill_(scaled < smallest, NEG_INF)
    top_k = torch.where((top_k > 0) & (top_k < vocab), top_k, vocab)
    bounded = (top_k < vocab) | (top_p < 1)
    every = torch.arange(vocab, device=device).unsqueeze(0)
    if not bounded.any():
        return _largest(scaled, every, keys)
    tokens = torch.empty(len(scaled), dtype=torch.int64, device=device)
    tokens[~bounded] = _largest(scaled[~bounded], every, keys[~bounded])
    tokens[bounded] = _draw_bounded(
        scaled[bounded], keys[bounded], top_k[bounded].unsqueeze(1), top_p[bounded].unsqueeze(1)
    )
    return tokens


def _draw_bounded(
    scaled: torch.Tensor, keys: torch.Tensor, k: torch.Tensor, p: torch.Tensor
) -> torch.Tensor:
    """Apply top-k, then top-p among the tokens that top-k keeps. Only the best `CANDIDATES` tokens
    are sorted, if they contain all tokens that are kept."""
    device = scaled.device
    max_k = int(k.max())
    size = min(max_k, CANDIDATES)
    everything = torch.logsumexp(scaled, dim=1, keepdim=True)
    while True:
        values, ids = torch.topk(scaled, size, dim=1)
        within_k = torch.arange(size, device=device) < k
        values = values.masked_fill(~within_k, NEG_INF)
        limited = torch.logsumexp(values, dim=1, keepdim=True)
        total = torch.where(k <= size, limited, everything)
        share = torch.exp(values - total)
        before = share.cumsum(1) - share
        keep = within_k & (before < p)
        keep[:, 0] = True
        # Enough if in every row the candidates contain the top k, or their sum reaches p.
        enough = (k <= size) | (share.sum(1, keepdim=True) >= p)
        if size >= max_k or bool(enough.all()):
            return _largest(values.masked_fill(~keep, NEG_INF), ids, keys)
        size = max_k


def _largest(scores: torch.Tensor, ids: torch.Tensor, keys: torch.Tensor) -> torch.Tensor:
    best = (scores + gumbel(keys, ids)).argmax(dim=1, keepdim=True)
    return ids.expand_as(scores).gather(1, best).squeeze(1)


def gumbel(keys: torch.Tensor, token_ids: torch.Tensor) -> torch.Tensor:
    """Return Gumbel noise for [rows, 2] keys and token ids that broadcast to [rows, n], in fp32.

    The largest of logit + noise is a draw from softmax(logits), for any subset of tokens."""
    bits = _mix(token_ids.long() ^ keys[:, :1])
    bits = _mix((bits + keys[:, 1:]) & UINT32)
    uniform = (bits.float() + 0.5) * 2.0**-32
    # −log1p(−u) is precise for small u, which are the u of the drawn tokens.
    return -torch.log(-torch.log1p(-uniform.clamp(max=1 - 2.0**-24)))


def _mix(x: torch.Tensor) -> torch.Tensor:
    """The function `mix` of `exec/rng.py`, for tensors."""
    x = ((x ^ (x >> 16)) * 0x7FEB352D) & UINT32
    x = ((x ^ (x >> 15)) * 0x846CA68B) & UINT32
    return x ^ (x >> 16)


# ── log-probabilities ───────────────────────────────────────────────────────────────────────


def token_logprobs(
    logits: torch.Tensor, which: torch.Tensor, tokens: torch.Tensor, count: int
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Return log-probabilities for the rows `which` of logits [S, V], whose chosen tokens are
    tokens[which]: the ids of the chosen token and of the `count` best tokens, [n, 1 + count], their
    log-probabilities, and the rank of the chosen token, [n], from 1. Arbitrary for a token -1."""
    logprobs = logits[which].float().log_softmax(dim=-1)
    chosen = tokens[which].long().clamp(min=0).unsqueeze(1)
    own = logprobs.gather(1, chosen)
    rank = (logprobs > own).sum(1) + 1
    best = torch.topk(logprobs, count)
    ids = torch.cat([chosen, best.indices], 1)
    return ids, torch.cat([own, best.values], 1), rank
