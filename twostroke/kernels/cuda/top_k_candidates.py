"""Top-k candidates: where top-k keeps at most a few hundred, they are gathered and looked at alone.

    largest of every PART tokens ─▶ a value that k of them reach ─▶ the parts that reach it
        ─▶ the tokens that reach it, at least k ─▶ rank of each, and the mass above it ─▶ draw

At least k tokens reach a value that the largest of k parts reach, so that no kept one is below.
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
    parts,
    kept,
    ids,
    hits,
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
    """Return the drawn token, or −1 if the candidates are too many. `kept`, `ids` and `hits` are
    scratch."""
    reached, num_hits = _threshold(parts, hits, max_logit, k, PARTS, BLOCK, CANDIDATES)
    tl.debug_barrier()
    count = 0
    if num_hits <= CANDIDATES:
        count = _gather(
            row_logits, kept, ids, hits, num_hits, inv_temp, reached, VOCAB, PART, CANDIDATES
        )
    tl.debug_barrier()
    token = -1
    if (count > 0) & (count <= CANDIDATES):
        token = _draw(kept, ids, count, max_logit, min_logit, k, p, key0, key1, VOCAB, CANDIDATES)
    return token


@triton.jit
def _threshold(
    parts, hits, max_logit, k, PARTS: tl.constexpr, BLOCK: tl.constexpr, CANDIDATES: tl.constexpr
):
    """Return a value that the largest tokens of k parts or a few more reach; the numbers of these
    parts go to `hits`."""
    MAX_TURNS: tl.constexpr = 24
    part = tl.arange(0, BLOCK)
    part_max = tl.load(parts + part, mask=part < PARTS, other=float("-inf"))
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
    # Where fewer than k parts hold anything at all, all that hold something.
    there = (part_max >= low) & (part_max > float("-inf"))
    place = tl.cumsum(there.to(tl.int32), axis=0) - 1
    tl.store(hits + place, part, mask=there & (place < CANDIDATES))
    return low, tl.sum(there.to(tl.int32), axis=0)


@triton.jit
def _gather(
    row_logits,
    kept,
    ids,
    hits,
    num_hits,
    inv_temp,
    reached,
    VOCAB: tl.constexpr,
    PART: tl.constexpr,
    CANDIDATES: tl.constexpr,
):
    """Gather the tokens of the hit parts that reach the value, and return their number: those past
    CANDIDATES are only counted."""
    TOGETHER: tl.constexpr = 32
    count = 0
    for start in range(0, num_hits, TOGETHER):
        which = start + tl.arange(0, TOGETHER)
        part = tl.load(hits + which, mask=which < num_hits, other=VOCAB // PART + 1)
        token = tl.reshape(
            part[:, None] * PART + tl.arange(0, PART)[None, :], [TOGETHER * PART], can_reorder=False
        )
        scaled = load_logits(row_logits, token, VOCAB) * inv_temp
        there = (scaled >= reached) & (scaled > float("-inf"))
        place = tl.cumsum(there.to(tl.int32), axis=0) - 1 + count
        inside = there & (place < CANDIDATES)
        tl.store(kept + place, scaled, mask=inside)
        tl.store(ids + place, token, mask=inside)
        count += tl.sum(there.to(tl.int32), axis=0)
    return count


@triton.jit
def _draw(
    kept,
    ids,
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
    TOGETHER: tl.constexpr = 32
    mine = tl.arange(0, CANDIDATES)
    value = tl.load(kept + mine, mask=mine < count, other=float("-inf"))
    token = tl.load(ids + mine, mask=mine < count, other=VOCAB)
    rank = tl.zeros([CANDIDATES], tl.int32)
    before = tl.zeros([CANDIDATES], tl.float32)
    for start in range(0, count, TOGETHER):
        other = start + tl.arange(0, TOGETHER)
        theirs = tl.load(kept + other, mask=other < count, other=float("-inf"))[None, :]
        name = tl.load(ids + other, mask=other < count, other=VOCAB)[None, :]
        higher = theirs > value[:, None]
        above = higher | ((theirs == value[:, None]) & (name < token[:, None]))
        rank += tl.sum(above.to(tl.int32), axis=1)
        before += tl.sum(tl.where(above, tl.exp(theirs - max_logit), 0.0), axis=1)
    within = (mine < count) & (rank < k) & (value >= min_logit)
    total = tl.sum(tl.where(within, tl.exp(value - max_logit), 0.0), axis=0)
    mass_limit = tl.where(p < 1, p * total, float("inf"))
    within = within & ((before < mass_limit) | (rank == 0))
    noise = tl.log(exponential_noise(uniform_noise(key0, key1, token)))
    noisy = tl.where(within, value - noise, float("-inf"))
    best = tl.max(noisy, axis=0)
    found = tl.min(tl.where(within & (noisy == best), token, VOCAB), axis=0)
    return tl.where(found < VOCAB, found, -1)
