"""Top-k sampling for a k of at most a few hundred, from gathered candidates.

    largest logit of every part of PART tokens ─▶ threshold that at least k of these logits reach
        ─▶ parts with a token that reaches it ─▶ candidates: all tokens that reach it, at least k
        ─▶ rank of each candidate, and the probability mass above it ─▶ draw

If the largest tokens of k parts reach the threshold, at least k tokens reach it, so no token of the
top k is below it.
"""

from __future__ import annotations

import triton
import triton.language as tl

from twostroke.kernels.cuda.noise import exponential_noise, load_logits, uniform_noise

PART = 128  # tokens
CANDIDATES = 512


@triton.jit
def draw_from_candidates(
    row_logits,
    part_maxima,
    candidate_logits,
    candidate_ids,
    hit_parts,
    inv_temp,
    max_logit,
    min_logit,
    k,
    p,
    key0,
    key1,
    VOCAB: tl.constexpr,
    PARTS: tl.constexpr,
    BLOCK: tl.constexpr,
    PART: tl.constexpr,
    CANDIDATES: tl.constexpr,
):
    """Return the drawn token, or −1 if the candidates are too many. `candidate_logits`,
    `candidate_ids` and `hit_parts` are scratch."""
    threshold, num_hit_parts = _threshold(
        part_maxima, hit_parts, max_logit, k, PARTS, BLOCK, CANDIDATES
    )
    tl.debug_barrier()
    count = 0
    if num_hit_parts <= CANDIDATES:
        count = _gather(
            row_logits,
            candidate_logits,
            candidate_ids,
            hit_parts,
            num_hit_parts,
            inv_temp,
            threshold,
            VOCAB,
            PART,
            CANDIDATES,
        )
    tl.debug_barrier()
    token = -1
    if (count > 0) & (count <= CANDIDATES):
        token = _draw(
            candidate_logits,
            candidate_ids,
            count,
            max_logit,
            min_logit,
            k,
            p,
            key0,
            key1,
            VOCAB,
            CANDIDATES,
        )
    return token


@triton.jit
def _threshold(
    part_maxima,
    hit_parts,
    max_logit,
    k,
    PARTS: tl.constexpr,
    BLOCK: tl.constexpr,
    CANDIDATES: tl.constexpr,
):
    """Return a logit that the largest tokens of k parts or a few more reach, and the number of
    these parts. Their indices go to `hit_parts`."""
    MAX_TURNS: tl.constexpr = 24
    part = tl.arange(0, BLOCK)
    part_max = tl.load(part_maxima + part, mask=part < PARTS, other=float("-inf"))
    low = float("-inf")
    high = max_logit
    distance = 2.0
    turn = 0
    while turn < MAX_TURNS:
        pivot = tl.where(low == float("-inf"), max_logit - distance, low * 0.5 + high * 0.5)
        reached = tl.sum((part_max >= pivot).to(tl.int32), axis=0)
        turn = tl.where((pivot == low) | (pivot == high), MAX_TURNS, turn + 1)
        if reached >= k:
            low = pivot
            turn = tl.where(reached <= k + k // 2 + 16, MAX_TURNS, turn)
        else:
            high = pivot
            distance = distance * 4.0
    # If fewer than k parts have a token above -inf, `low` is -inf, and all these parts are hits.
    is_hit = (part_max >= low) & (part_max > float("-inf"))
    place = tl.cumsum(is_hit.to(tl.int32), axis=0) - 1
    tl.store(hit_parts + place, part, mask=is_hit & (place < CANDIDATES))
    return low, tl.sum(is_hit.to(tl.int32), axis=0)


@triton.jit
def _gather(
    row_logits,
    candidate_logits,
    candidate_ids,
    hit_parts,
    num_hit_parts,
    inv_temp,
    threshold,
    VOCAB: tl.constexpr,
    PART: tl.constexpr,
    CANDIDATES: tl.constexpr,
):
    """Gather the tokens of the hit parts that reach the threshold, and return their number. Tokens
    beyond CANDIDATES are counted but not stored."""
    PARTS_PER_TURN: tl.constexpr = 32
    count = 0
    for start in range(0, num_hit_parts, PARTS_PER_TURN):
        which = start + tl.arange(0, PARTS_PER_TURN)
        # A part beyond the vocabulary masks the loads of its tokens.
        part = tl.load(hit_parts + which, mask=which < num_hit_parts, other=VOCAB // PART + 1)
        token = tl.reshape(
            part[:, None] * PART + tl.arange(0, PART)[None, :],
            [PARTS_PER_TURN * PART],
            can_reorder=False,
        )
        scaled = load_logits(row_logits, token, VOCAB) * inv_temp
        is_candidate = (scaled >= threshold) & (scaled > float("-inf"))
        place = tl.cumsum(is_candidate.to(tl.int32), axis=0) - 1 + count
        inside = is_candidate & (place < CANDIDATES)
        tl.store(candidate_logits + place, scaled, mask=inside)
        tl.store(candidate_ids + place, token, mask=inside)
        count += tl.sum(is_candidate.to(tl.int32), axis=0)
    return count


@triton.jit
def _draw(
    candidate_logits,
    candidate_ids,
    count,
    max_logit,
    min_logit,
    k,
    p,
    key0,
    key1,
    VOCAB: tl.constexpr,
    CANDIDATES: tl.constexpr,
):
    OTHERS_PER_TURN: tl.constexpr = 32
    mine = tl.arange(0, CANDIDATES)
    logit = tl.load(candidate_logits + mine, mask=mine < count, other=float("-inf"))
    token = tl.load(candidate_ids + mine, mask=mine < count, other=VOCAB)
    rank = tl.zeros([CANDIDATES], tl.int32)
    mass_above = tl.zeros([CANDIDATES], tl.float32)
    for start in range(0, count, OTHERS_PER_TURN):
        other = start + tl.arange(0, OTHERS_PER_TURN)
        other_logit = tl.load(candidate_logits + other, mask=other < count, other=float("-inf"))
        other_logit = other_logit[None, :]
        other_token = tl.load(candidate_ids + other, mask=other < count, other=VOCAB)[None, :]
        higher = other_logit > logit[:, None]
        above = higher | ((other_logit == logit[:, None]) & (other_token < token[:, None]))
        rank += tl.sum(above.to(tl.int32), axis=1)
        mass_above += tl.sum(tl.where(above, tl.exp(other_logit - max_logit), 0.0), axis=1)
    within = (mine < count) & (rank < k) & (logit >= min_logit)
    total = tl.sum(tl.where(within, tl.exp(logit - max_logit), 0.0), axis=0)
    mass_limit = tl.where(p < 1, p * total, float("inf"))
    within = within & ((mass_above < mass_limit) | (rank == 0))
    noise = tl.log(exponential_noise(uniform_noise(key0, key1, token)))
    noisy = tl.where(within, logit - noise, float("-inf"))
    best = tl.max(noisy, axis=0)
    found = tl.min(tl.where(within & (noisy == best), token, VOCAB), axis=0)
    return tl.where(found < VOCAB, found, -1)
