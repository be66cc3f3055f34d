"""Mixtures of experts: a token's experts, its pairs sorted by expert, and products with the experts
in use.

    route      logits ─▶ each token's experts, best first, and their weights
    by_expert  the pairs of a token and an expert of it, expert by expert: a stable counting sort
    gated      tiles of one expert's pairs × its gate and up, to the activation's end
    down       the same with its down, each pair back to its token's place
    combine    the weighted sum of a token's pairs, best expert first

A token or two (`stream_experts`) need no tiles and no order: a program has a few columns of a
pair's gate and up, or of a token's output, and the weights go past it once.

Nothing asks the device for a value. How many tiles there are is known there alone: the grid is what
there could be at the most, a program finds its expert by counting tiles, and those that are left
over end at once. Experts that no token goes to are not read.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache
from typing import NamedTuple

import torch
import triton
import triton.language as tl

from twostroke.kernels.activations import Activation
from twostroke.kernels.cuda.elementwise import activated, gate_times_up
from twostroke.kernels.cuda.launch import Variant
from twostroke.kernels.cuda.pdl import launch_options, wait_for_previous
from twostroke.kernels.cuda.sizes import ceil_div, power_of_two

MOST_STREAMED = 16  # pairs that share no weights: each reads its own
SORTED_AT_ONCE = 4096  # pairs
UP_COLUMNS, DOWN_COLUMNS = 2, 4  # of a program that streams
COMBINED = 1024  # channels of a program


class Pairs(NamedTuple):
    """Those of a token and an expert of it, expert by expert."""

    order: torch.Tensor  # [pairs], int32: token · experts_per_token + which of its experts
    starts: torch.Tensor  # [experts + 1], int32: where each expert's begin


@dataclass(frozen=True, slots=True)
class Tiling:
    rows: int  # pairs
    columns: int
    inner: int
    num_warps: int
    num_stages: int


def tiling(pairs: int, experts: int, inner: int, gated: bool) -> Tiling:
    """`inner` of a product with one expert. Few pairs an expert: its weight goes past once. Many:
    the matrix units' own size. By `tests.gpu.experts_check` on an H200."""
    each = pairs / min(pairs, experts)
    if each <= 12:
        tuned = Tiling(16, 32, 256, 4, 3) if gated else Tiling(16, 64, 128, 4, 3)
    elif each <= 32:
        tuned = Tiling(32, 64, 128, 4, 3)
    elif each <= 96:
        tuned = Tiling(64, 64 if gated else 128, 64, 4, 4)
    elif gated:
        tuned = Tiling(128, 128, 64, 8, 4 if each <= 160 else 3)
    else:
        tuned = Tiling(128, 256, 64, 8, 3)
    return Tiling(
        tuned.rows,
        tuned.columns,
        min(tuned.inner, max(16, power_of_two(inner))),
        tuned.num_warps,
        tuned.num_stages,
    )


# ── calls ───────────────────────────────────────────────────────────────────────────────────────


def route(
    logits: torch.Tensor,
    bias: torch.Tensor | None,
    correction: torch.Tensor | None,
    experts_per_token: int,
    scoring: str,
    normalised: bool,
    scale: float,
    num_groups: int,
    groups_used: int,
    group_score: str,
    *,
    pdl: bool = False,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Of a router's product [T, experts]: each token's experts (int32), best first and of equals
    the lower one, and their weights (fp32). `bias` is added to the product, `correction` to the
    scores for the choice alone. What is NaN comes last: no other number leaves here than that of
    an expert."""
    tokens, experts = logits.shape
    assert logits.stride(1) == 1
    chosen = torch.empty(tokens, experts_per_token, dtype=torch.int32, device=logits.device)
    weights = torch.empty(tokens, experts_per_token, dtype=torch.float32, device=logits.device)
    groups = (num_groups, groups_used) if groups_used < num_groups else (1, 1)
    variant = _route_variant(
        experts, experts_per_token, scoring, normalised, *groups, group_score, pdl
    )
    tensors = (logits, bias, correction, chosen, weights)
    variant((tokens,), tensors, (float(scale),), (logits.stride(0),))
    return chosen, weights


def by_expert(chosen: torch.Tensor, experts: int, *, pdl: bool = False) -> Pairs:
    """`chosen`: [T, experts_per_token], int32."""
    pairs = chosen.numel()
    order = torch.empty(pairs, dtype=torch.int32, device=chosen.device)
    starts = torch.empty(experts + 1, dtype=torch.int32, device=chosen.device)
    at_once = min(power_of_two(pairs), SORTED_AT_ONCE)
    _sort_variant(experts, at_once, pdl)((experts,), (chosen, order, starts), (pairs,), ())
    return Pairs(order, starts)


def gated_experts(
    x: torch.Tensor,
    pairs: Pairs,
    experts_per_token: int,
    gate_up: torch.Tensor,
    bias: torch.Tensor | None,
    activation: Activation,
    gated: bool,
    *,
    pdl: bool = False,
) -> torch.Tensor:
    """[pairs, inner], in the order of `pairs`: the activation of each pair's gate times its up.
    gate_up: [experts, 2 · inner, hidden], gates first; without a gate [experts, inner, hidden]."""
    width = gate_up.shape[1] // (2 if gated else 1)
    out = torch.empty(len(pairs.order), width, dtype=x.dtype, device=x.device)
    _grouped(x, pairs, experts_per_token, gate_up, bias, out, activation, gated, True, pdl)
    return out


def experts_down(
    inner: torch.Tensor,
    pairs: Pairs,
    weights: torch.Tensor,
    down: torch.Tensor,
    bias: torch.Tensor | None,
    *,
    pdl: bool = False,
) -> torch.Tensor:
    """[T, hidden]: the products with `down` [experts, hidden, inner], times the weights
    [T, experts_per_token], added up in fp32, best expert first."""
    tokens, each = weights.shape
    hidden = down.shape[1]
    parts = torch.empty(tokens * each, hidden, dtype=inner.dtype, device=inner.device)
    _grouped(inner, pairs, each, down, bias, parts, "", False, False, pdl)
    out = torch.empty(tokens, hidden, dtype=inner.dtype, device=inner.device)
    grid = (tokens, ceil_div(hidden, COMBINED))
    _combine_variant(hidden, each, pdl)(grid, (parts, weights, out), (), ())
    return out


def mix_experts(
    x: torch.Tensor,
    chosen: torch.Tensor,
    weights: torch.Tensor,
    gate_up: torch.Tensor,
    gate_up_bias: torch.Tensor | None,
    down: torch.Tensor,
    down_bias: torch.Tensor | None,
    activation: Activation,
    gated: bool,
    *,
    pdl: bool = False,
) -> torch.Tensor:
    """Σ weight · mlp(x) over each token's experts: [T, hidden]. Weights are stacked,
    [experts, out, in]."""
    each, count = chosen.shape[1], len(down)
    how = (activation, gated)
    if chosen.numel() <= MOST_STREAMED:
        biased = (gate_up, gate_up_bias, down, down_bias)
        return stream_experts(x.contiguous(), chosen.int(), weights, *biased, *how, pdl=pdl)
    pairs = by_expert(chosen.int(), count, pdl=pdl)
    inner = gated_experts(x.contiguous(), pairs, each, gate_up, gate_up_bias, *how, pdl=pdl)
    return experts_down(inner, pairs, weights, down, down_bias, pdl=pdl)


def stream_experts(
    x: torch.Tensor,
    chosen: torch.Tensor,
    weights: torch.Tensor,
    gate_up: torch.Tensor,
    gate_up_bias: torch.Tensor | None,
    down: torch.Tensor,
    down_bias: torch.Tensor | None,
    activation: str,
    gated: bool,
    *,
    pdl: bool = False,
) -> torch.Tensor:
    """`mix_experts` of few tokens: what two of them share is read twice."""
    (tokens, each), (_, hidden, width) = chosen.shape, down.shape
    inner = torch.empty(tokens * each, width, dtype=x.dtype, device=x.device)
    grid = (tokens * each * ceil_div(width, UP_COLUMNS),)
    variant = _stream_up_variant(each, width, hidden, activation, gated, pdl)
    variant(grid, (x, chosen, gate_up, gate_up_bias, inner), (), ())
    out = torch.empty(tokens, hidden, dtype=x.dtype, device=x.device)
    grid = (tokens * ceil_div(hidden, DOWN_COLUMNS),)
    variant = _stream_down_variant(each, hidden, width, pdl)
    variant(grid, (inner, chosen, weights, down, down_bias, out), (), ())
    return out


def _grouped(
    x: torch.Tensor,
    pairs: Pairs,
    experts_per_token: int,
    weight: torch.Tensor,
    bias: torch.Tensor | None,
    out: torch.Tensor,
    activation: Activation | str,
    gated: bool,
    by_token: bool,
    pdl: bool,
) -> None:
    count, (experts, _, inner), columns = len(pairs.order), weight.shape, out.shape[1]
    assert x.is_contiguous()
    assert weight.is_contiguous()
    tuned = tiling(count, experts, inner, gated)
    # Every expert in use has at most one tile that is not full.
    tiles = count // tuned.rows + min(experts, count)
    grid = (tiles * ceil_div(columns, tuned.columns),)
    exact = x.dtype == torch.float32
    key = (experts, experts_per_token, columns, inner, tuned, activation, gated, by_token, exact)
    variant = _grouped_variant(*key, pdl)
    variant(grid, (x, pairs.order, pairs.starts, weight, bias, out), (), ())


# ── variants ────────────────────────────────────────────────────────────────────────────────────


@cache
def _route_variant(
    experts: int,
    each: int,
    scoring: str,
    normalised: bool,
    num_groups: int,
    groups_used: int,
    group_score: str,
    pdl: bool,
) -> Variant:
    assert 0 < each <= experts // num_groups * groups_used
    assert experts % num_groups == 0
    return Variant(
        _route,
        E=experts,
        BLOCK=power_of_two(experts),
        EACH=each,
        BLOCK_EACH=power_of_two(each),
        SIGMOID=scoring == "sigmoid",
        NORMALISED=normalised,
        GROUPS=num_groups,
        BLOCK_GROUPS=power_of_two(num_groups),
        USED=groups_used,
        TOP2=group_score == "top2_sum",
        num_warps=1,
        **launch_options(pdl),
    )


@cache
def _sort_variant(experts: int, at_once: int, pdl: bool) -> Variant:
    warps = 4 if at_once <= 1024 else 8
    return Variant(_sort, E=experts, PAIRS=at_once, num_warps=warps, **launch_options(pdl))


@cache
def _stream_up_variant(
    each: int, columns: int, inner: int, activation: str, gated: bool, pdl: bool
) -> Variant:
    return Variant(
        _stream_up,
        EACH=each,
        N=columns,
        K=inner,
        COLUMNS=UP_COLUMNS,
        INNER=min(1024, power_of_two(inner)),
        GATED=gated,
        ACTIVATION=activation,
        num_warps=4,
        **launch_options(pdl),
    )


@cache
def _stream_down_variant(each: int, columns: int, inner: int, pdl: bool) -> Variant:
    return Variant(
        _stream_down,
        EACH=each,
        N=columns,
        K=inner,
        COLUMNS=DOWN_COLUMNS,
        INNER=min(256, power_of_two(inner)),
        num_warps=4,
        **launch_options(pdl),
    )


@cache
def _grouped_variant(
    experts: int,
    each: int,
    columns: int,
    inner: int,
    tuned: Tiling,
    activation: Activation | str,
    gated: bool,
    by_token: bool,
    exact: bool,
    pdl: bool,
) -> Variant:
    return Variant(
        _grouped_product,
        E=experts,
        BLOCK=power_of_two(experts),
        EACH=each,
        N=columns,
        K=inner,
        ROWS=tuned.rows,
        COLUMNS=tuned.columns,
        INNER=tuned.inner,
        GATED=gated,
        ACTIVATION=activation,
        BY_TOKEN=by_token,
        PRECISION="ieee" if exact else "tf32",  # of fp32; narrower types have no other
        num_warps=tuned.num_warps,
        num_stages=2 if exact else tuned.num_stages,
        **launch_options(pdl),
    )


@cache
def _combine_variant(hidden: int, each: int, pdl: bool) -> Variant:
    return Variant(
        _combine, N=hidden, EACH=each, BLOCK=COMBINED, num_warps=4, **launch_options(pdl)
    )


# ── kernels ─────────────────────────────────────────────────────────────────────────────────────


@triton.jit
def _first_of_best(values, number, left, NONE: tl.constexpr):
    """The lowest number whose value is the largest of those that are left."""
    best = tl.max(tl.where(left, values, float("-inf")), axis=0)
    return tl.min(tl.where(left & (values == best), number, NONE), axis=0)


@triton.jit(do_not_specialize=["scale"])
def _route(
    logits,
    bias,
    correction,
    chosen,
    weights,
    scale,
    stride,
    E: tl.constexpr,
    BLOCK: tl.constexpr,
    EACH: tl.constexpr,
    BLOCK_EACH: tl.constexpr,
    SIGMOID: tl.constexpr,
    NORMALISED: tl.constexpr,
    GROUPS: tl.constexpr,
    BLOCK_GROUPS: tl.constexpr,
    USED: tl.constexpr,
    TOP2: tl.constexpr,
    PDL: tl.constexpr,
):
    token = tl.program_id(0).to(tl.int64)
    expert = tl.arange(0, BLOCK)
    left = expert < E
    wait_for_previous(PDL)
    at = logits + token * stride + expert
    logit = tl.load(at, mask=left, other=float("-inf")).to(tl.float32)
    if bias is not None:
        logit += tl.load(bias + expert, mask=left, other=0.0).to(tl.float32)
    if SIGMOID:
        score = 1.0 / (1.0 + tl.exp(-logit))
    else:
        score = tl.exp(logit - tl.max(logit, axis=0))
        score = score / tl.sum(score, axis=0)
    ranked = score
    if correction is not None:
        ranked += tl.load(correction + expert, mask=left, other=0.0).to(tl.float32)
    ranked = tl.where(ranked == ranked, ranked, float("-inf"))
    if USED < GROUPS:
        SIZE: tl.constexpr = E // GROUPS
        group = tl.arange(0, BLOCK_GROUPS)
        total = tl.full([BLOCK_GROUPS], float("-inf"), tl.float32)
        for number in tl.static_range(GROUPS):
            inside = left & (expert // SIZE == number)
            best = tl.max(tl.where(inside, ranked, float("-inf")), axis=0)
            if TOP2:
                first = _first_of_best(ranked, expert, inside, BLOCK)
                inside = inside & (expert != first)
                best += tl.max(tl.where(inside, ranked, float("-inf")), axis=0)
            total = tl.where(group == number, best, total)
        free = group < GROUPS
        used = expert < 0
        for _ in tl.static_range(USED):
            winner = _first_of_best(total, group, free, BLOCK_GROUPS)
            used = used | (expert // SIZE == winner)
            free = free & (group != winner)
        left = left & used
    place = tl.arange(0, BLOCK_EACH)
    ids = tl.zeros([BLOCK_EACH], tl.int32)
    found = tl.zeros([BLOCK_EACH], tl.float32)
    for number in tl.static_range(EACH):
        one = _first_of_best(ranked, expert, left, BLOCK)
        left = left & (expert != one)
        value = tl.sum(tl.where(expert == one, score, 0.0), axis=0)
        ids = tl.where(place == number, one, ids)
        found = tl.where(place == number, value, found)
    if NORMALISED:
        found = found / tl.maximum(tl.sum(found, axis=0), 1e-20)
    there = place < EACH
    tl.store(chosen + token * EACH + place, ids, mask=there)
    tl.store(weights + token * EACH + place, found * scale, mask=there)


@triton.jit(do_not_specialize=["num_pairs"])
def _sort(
    chosen,
    order,
    starts,
    num_pairs,
    E: tl.constexpr,
    PAIRS: tl.constexpr,
    PDL: tl.constexpr,
):
    """A program has an expert: its pairs come after those of the experts before it."""
    expert = tl.program_id(0)
    pair = tl.arange(0, PAIRS)
    wait_for_previous(PDL)
    before = tl.zeros([PAIRS], tl.int32)
    for start in range(0, num_pairs, PAIRS):
        theirs = tl.load(chosen + start + pair, mask=start + pair < num_pairs, other=E)
        before += (theirs < expert).to(tl.int32)
    free = tl.sum(before, axis=0)
    tl.store(starts + expert, free)
    if expert == E - 1:
        tl.store(starts + E, num_pairs)
    for start in range(0, num_pairs, PAIRS):
        theirs = tl.load(chosen + start + pair, mask=start + pair < num_pairs, other=E)
        mine = theirs == expert
        ahead = tl.cumsum(mine.to(tl.int32), axis=0)
        tl.store(order + free + ahead - 1, start + pair, mask=mine)
        free += tl.sum(mine.to(tl.int32), axis=0)


@triton.jit
def _stream_up(
    x,
    chosen,
    weight,
    bias,
    out,
    EACH: tl.constexpr,
    N: tl.constexpr,
    K: tl.constexpr,
    COLUMNS: tl.constexpr,
    INNER: tl.constexpr,
    GATED: tl.constexpr,
    ACTIVATION: tl.constexpr,
    PDL: tl.constexpr,
):
    PARTS: tl.constexpr = (N + COLUMNS - 1) // COLUMNS
    HALF: tl.constexpr = N * K
    pair = tl.program_id(0) // PARTS
    column = tl.program_id(0) % PARTS * COLUMNS + tl.arange(0, COLUMNS)
    inner = tl.arange(0, INNER)
    wait_for_previous(PDL)
    expert = tl.load(chosen + pair).to(tl.int64)
    # Columns past the end read the last row of the weight again, and are dropped.
    own = weight + expert * (2 * HALF if GATED else HALF)
    at = own + tl.minimum(column, N - 1)[:, None] * K + inner[None, :]
    x_at = x + (pair // EACH).to(tl.int64) * K + inner
    sums = tl.zeros([COLUMNS, INNER], tl.float32)
    ups = tl.zeros([COLUMNS, INNER], tl.float32)
    for start in tl.static_range(0, K, INNER):
        if start + INNER <= K:
            of_x = tl.load(x_at + start).to(tl.float32)[None, :]
            sums += of_x * tl.load(at + start, eviction_policy="evict_first").to(tl.float32)
            if GATED:
                up = tl.load(at + HALF + start, eviction_policy="evict_first")
                ups += of_x * up.to(tl.float32)
        else:
            inside = start + inner < K
            of_x = tl.load(x_at + start, mask=inside, other=0.0).to(tl.float32)[None, :]
            sums += of_x * tl.load(at + start, mask=inside[None, :], other=0.0).to(tl.float32)
            if GATED:
                up = tl.load(at + HALF + start, mask=inside[None, :], other=0.0)
                ups += of_x * up.to(tl.float32)
    gate = tl.sum(sums, axis=1)
    up = tl.sum(ups, axis=1)
    mask = column < N
    if bias is not None:
        bias_at = bias + expert * (2 * N if GATED else N) + column
        gate += tl.load(bias_at, mask=mask, other=0.0).to(tl.float32)
        if GATED:
            up += tl.load(bias_at + N, mask=mask, other=0.0).to(tl.float32)
    kind: tl.constexpr = out.dtype.element_ty
    if GATED:
        gate = gate_times_up(gate, up, kind, ACTIVATION)
    else:
        gate = activated(gate.to(kind).to(tl.float32), ACTIVATION)
    tl.store(out + pair * N + column, gate.to(kind), mask=mask)


@triton.jit
def _stream_down(
    x,
    chosen,
    weights,
    weight,
    bias,
    out,
    EACH: tl.constexpr,
    N: tl.constexpr,
    K: tl.constexpr,
    COLUMNS: tl.constexpr,
    INNER: tl.constexpr,
    PDL: tl.constexpr,
):
    """A token's experts are added up as they are read."""
    PARTS: tl.constexpr = (N + COLUMNS - 1) // COLUMNS
    token = tl.program_id(0) // PARTS
    column = tl.program_id(0) % PARTS * COLUMNS + tl.arange(0, COLUMNS)
    inner = tl.arange(0, INNER)
    mask = column < N
    line = tl.minimum(column, N - 1)[:, None] * K + inner[None, :]
    wait_for_previous(PDL)
    sums = tl.zeros([COLUMNS, INNER], tl.float32)
    biases = tl.zeros([COLUMNS], tl.float32)
    for number in tl.static_range(EACH):
        pair = token * EACH + number
        expert = tl.load(chosen + pair).to(tl.int64)
        share = tl.load(weights + pair)
        own = weight + expert * (N * K) + line
        for start in tl.static_range(0, K, INNER):
            if start + INNER <= K:
                of_x = tl.load(x + pair * K + start + inner).to(tl.float32)
                part = tl.load(own + start, eviction_policy="evict_first")
            else:
                inside = start + inner < K
                of_x = tl.load(x + pair * K + start + inner, mask=inside, other=0.0).to(tl.float32)
                part = tl.load(own + start, mask=inside[None, :], other=0.0)
            sums += (of_x * share)[None, :] * part.to(tl.float32)
        if bias is not None:
            added = tl.load(bias + expert * N + column, mask=mask, other=0.0)
            biases += share * added.to(tl.float32)
    total = tl.sum(sums, axis=1) + biases
    tl.store(out + token * N + column, total.to(out.dtype.element_ty), mask=mask)


@triton.jit
def _grouped_product(
    x,
    order,
    starts,
    weight,
    bias,
    out,
    E: tl.constexpr,
    BLOCK: tl.constexpr,
    EACH: tl.constexpr,
    N: tl.constexpr,
    K: tl.constexpr,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
    INNER: tl.constexpr,
    GATED: tl.constexpr,
    ACTIVATION: tl.constexpr,
    BY_TOKEN: tl.constexpr,
    PRECISION: tl.constexpr,
    PDL: tl.constexpr,
):
    """BY_TOKEN: x has a row for each token, and the result one for each pair in their order;
    otherwise x has those, and the result the pairs of a token side by side."""
    PARTS: tl.constexpr = (N + COLUMNS - 1) // COLUMNS
    tile = tl.program_id(0) // PARTS
    column = tl.program_id(0) % PARTS * COLUMNS + tl.arange(0, COLUMNS)
    number = tl.arange(0, BLOCK)
    wait_for_previous(PDL)
    first = tl.load(starts + number, mask=number < E, other=0)
    end = tl.load(starts + number + 1, mask=number < E, other=0)
    tiles = (end - first + ROWS - 1) // ROWS
    until = tl.cumsum(tiles, axis=0)
    expert = tl.sum((until <= tile).to(tl.int32), axis=0)
    if expert >= BLOCK:
        return
    mine = number == expert
    skipped = tl.sum(tl.where(mine, until - tiles, 0), axis=0)
    start = tl.sum(tl.where(mine, first, 0), axis=0) + (tile - skipped) * ROWS
    stop = tl.sum(tl.where(mine, end, 0), axis=0)

    place = start + tl.arange(0, ROWS)
    there = place < stop
    pair = tl.load(order + place, mask=there, other=0)
    line = (pair // EACH if BY_TOKEN else place).to(tl.int64)
    to = (place if BY_TOKEN else pair).to(tl.int64)
    inner = tl.arange(0, INNER)
    HALF: tl.constexpr = N * K
    # Columns past the end read the last row of the weight again, and are dropped.
    own = weight + expert.to(tl.int64) * (2 * HALF if GATED else HALF)
    at = own + tl.minimum(column, N - 1)[:, None] * K + inner[None, :]
    x_at = x + line[:, None] * K + inner[None, :]
    sums = tl.zeros([ROWS, COLUMNS], tl.float32)
    ups = tl.zeros([ROWS, COLUMNS], tl.float32)
    for begin in tl.range(0, K, INNER):
        if K % INNER == 0:
            part = tl.load(x_at + begin, mask=there[:, None], other=0.0)
            gate = tl.load(at + begin)
        else:
            inside = (begin + inner < K)[None, :]
            part = tl.load(x_at + begin, mask=there[:, None] & inside, other=0.0)
            gate = tl.load(at + begin, mask=inside, other=0.0)
        sums = tl.dot(part, tl.trans(gate), sums, input_precision=PRECISION)
        if GATED:
            if K % INNER == 0:
                up = tl.load(at + HALF + begin)
            else:
                up = tl.load(at + HALF + begin, mask=inside, other=0.0)
            ups = tl.dot(part, tl.trans(up), ups, input_precision=PRECISION)
    if bias is not None:
        bias_at = bias + expert * (2 * N if GATED else N) + column
        sums += tl.load(bias_at, mask=column < N, other=0.0).to(tl.float32)[None, :]
        if GATED:
            ups += tl.load(bias_at + N, mask=column < N, other=0.0).to(tl.float32)[None, :]
    kind: tl.constexpr = out.dtype.element_ty
    if GATED:
        sums = gate_times_up(sums, ups, kind, ACTIVATION)
    elif ACTIVATION != "":
        sums = activated(sums.to(kind).to(tl.float32), ACTIVATION)
    mask = there[:, None] & (column < N)[None, :]
    tl.store(out + to[:, None] * N + column[None, :], sums.to(kind), mask=mask)


@triton.jit
def _combine(
    parts,
    weights,
    out,
    N: tl.constexpr,
    EACH: tl.constexpr,
    BLOCK: tl.constexpr,
    PDL: tl.constexpr,
):
    token = tl.program_id(0).to(tl.int64)
    column = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    mask = column < N
    wait_for_previous(PDL)
    sums = tl.zeros([BLOCK], tl.float32)
    for number in tl.static_range(EACH):
        pair = token * EACH + number
        part = tl.load(parts + pair * N + column, mask=mask, other=0.0).to(tl.float32)
        sums += part * tl.load(weights + pair)
    tl.store(out + token * N + column, sums.to(out.dtype.element_ty), mask=mask)
