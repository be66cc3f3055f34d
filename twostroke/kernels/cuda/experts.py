"""Mixtures of experts: a token's experts, its pairs sorted by expert, and products with the experts
in use.

    route      logits ─▶ each token's experts, best first, and their weights
    by_expert  the pairs of a token and an expert of it, expert by expert: a stable counting sort
    gated      tiles of one expert's pairs × its gate and up, to the activation's end
    down       the same with its down, each pair back to its token's place
    combine    the weighted sum of a token's pairs, best expert first

One or two tokens (`stream_experts`) need no tiles and no sorting: a program computes a few columns
of a pair's gate and up, or of a token's output, and reads the weights once.

No value is read from the device. The number of tiles is known on the device alone: the grid has the
largest possible number of programs, a program finds its expert by counting tiles, and a program
without a tile ends at once. The weights of experts without tokens are not read.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache
from typing import NamedTuple

import torch
import triton
import triton.language as tl

from twostroke.kernels.activations import Activation
from twostroke.kernels.cuda.dependent_launch import wait_for_previous
from twostroke.kernels.cuda.elementwise import activated, gate_times_up
from twostroke.kernels.cuda.launch import Variant
from twostroke.kernels.cuda.sizes import ceil_div, power_of_two
from twostroke.kernels.records import DEFAULT_CONTEXT, ExpertWeights, RoutingRule, StepContext

MAX_STREAMED = 16  # pairs that are not sorted: each reads its own weights
SORTED_AT_ONCE = 4096  # pairs
UP_COLUMNS, DOWN_COLUMNS = 2, 4  # of a program that streams
COMBINED = 1024  # channels of a program


class Pairs(NamedTuple):
    """The pairs of a token and one of its experts, sorted by expert."""

    order: torch.Tensor  # [pairs], int32: token · experts_per_token + which of its experts
    starts: torch.Tensor  # [experts + 1], int32: where each expert's begin


@dataclass(frozen=True, slots=True)
class ExpertTiling:
    rows: int  # pairs
    columns: int
    inner: int
    num_warps: int
    num_stages: int


def tiling(pairs: int, experts: int, inner: int, gated: bool) -> ExpertTiling:
    """Choose the tiling of the product with one expert, whose inner size is `inner`. With few pairs
    an expert the weight is read once; with many pairs the tiles have the matrix units' own size.
    Measured by `tests.gpu.experts_check` on an H200."""
    each = pairs / min(pairs, experts)
    if each <= 12:
        tuned = ExpertTiling(16, 32, 256, 4, 3) if gated else ExpertTiling(16, 64, 128, 4, 3)
    elif each <= 32:
        tuned = ExpertTiling(32, 64, 128, 4, 3)
    elif each <= 96:
        tuned = ExpertTiling(64, 64 if gated else 128, 64, 4, 4)
    elif gated:
        tuned = ExpertTiling(128, 128, 64, 8, 4 if each <= 160 else 3)
    else:
        tuned = ExpertTiling(128, 256, 64, 8, 3)
    return ExpertTiling(
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
    rule: RoutingRule,
    context: StepContext = DEFAULT_CONTEXT,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Choose the experts of each token by the router's logits [T, experts]. Returns their numbers
    (int32), best first and the lower number first among equals, and their weights (fp32). `bias`
    is added to the logits, `correction` to the scores for the choice alone. A NaN comes last: every
    number returned is that of an expert."""
    tokens, experts = logits.shape
    each = rule.experts_per_token
    assert logits.stride(1) == 1
    chosen = torch.empty(tokens, each, dtype=torch.int32, device=logits.device)
    weights = torch.empty(tokens, each, dtype=torch.float32, device=logits.device)
    variant = _route_variant(experts, rule)
    tensors = (logits, bias, correction, chosen, weights)
    variant((tokens,), tensors, (float(rule.scale),), (logits.stride(0),), context)
    return chosen, weights


def by_expert(chosen: torch.Tensor, experts: int, context: StepContext = DEFAULT_CONTEXT) -> Pairs:
    """Sort the pairs of `chosen`, [T, experts_per_token] in int32, by expert."""
    pairs = chosen.numel()
    order = torch.empty(pairs, dtype=torch.int32, device=chosen.device)
    starts = torch.empty(experts + 1, dtype=torch.int32, device=chosen.device)
    variant = _sort_variant(experts, min(power_of_two(pairs), SORTED_AT_ONCE))
    variant((experts,), (chosen, order, starts), (pairs,), context=context)
    return Pairs(order, starts)


def gated_experts(
    x: torch.Tensor,
    pairs: Pairs,
    experts_per_token: int,
    stacked: ExpertWeights,
    context: StepContext = DEFAULT_CONTEXT,
) -> torch.Tensor:
    """Return the activated gate times up of each pair, [pairs, inner], in the order of `pairs`."""
    gate_up, gated = stacked.gate_up, stacked.gated
    width = gate_up.shape[1] // (2 if gated else 1)
    out = torch.empty(len(pairs.order), width, dtype=x.dtype, device=x.device)
    part = _Part(gate_up, stacked.gate_up_bias, stacked.activation, gated, by_token=True)
    _grouped(x, pairs, experts_per_token, part, out, context)
    return out


def experts_down(
    inner: torch.Tensor,
    pairs: Pairs,
    weights: torch.Tensor,
    stacked: ExpertWeights,
    context: StepContext = DEFAULT_CONTEXT,
) -> torch.Tensor:
    """Return [T, hidden]: the products with `down` times the weights [T, experts_per_token], added
    up in fp32, best expert first."""
    tokens, each = weights.shape
    hidden = stacked.down.shape[1]
    products = torch.empty(tokens * each, hidden, dtype=inner.dtype, device=inner.device)
    part = _Part(stacked.down, stacked.down_bias, "", gated=False, by_token=False)
    _grouped(inner, pairs, each, part, products, context)
    out = torch.empty(tokens, hidden, dtype=inner.dtype, device=inner.device)
    grid = (tokens, ceil_div(hidden, COMBINED))
    _combine_variant(hidden, each)(grid, (products, weights, out), context=context)
    return out


def mix_experts(
    x: torch.Tensor,
    chosen: torch.Tensor,
    weights: torch.Tensor,
    stacked: ExpertWeights,
    context: StepContext = DEFAULT_CONTEXT,
) -> torch.Tensor:
    """Return Σ weight · mlp(x) over each token's experts: [T, hidden]."""
    x, chosen = x.contiguous(), chosen.int()
    if chosen.numel() <= MAX_STREAMED:
        return stream_experts(x, chosen, weights, stacked, context)
    pairs = by_expert(chosen, len(stacked.down), context)
    inner = gated_experts(x, pairs, chosen.shape[1], stacked, context)
    return experts_down(inner, pairs, weights, stacked, context)


def stream_experts(
    x: torch.Tensor,
    chosen: torch.Tensor,
    weights: torch.Tensor,
    stacked: ExpertWeights,
    context: StepContext = DEFAULT_CONTEXT,
) -> torch.Tensor:
    """`mix_experts` of few tokens: an expert that two tokens share is read twice."""
    (tokens, each), (_, hidden, width) = chosen.shape, stacked.down.shape
    inner = torch.empty(tokens * each, width, dtype=x.dtype, device=x.device)
    grid = (tokens * each * ceil_div(width, UP_COLUMNS),)
    variant = _stream_up_variant(each, width, hidden, stacked.activation, stacked.gated)
    variant(grid, (x, chosen, stacked.gate_up, stacked.gate_up_bias, inner), context=context)
    out = torch.empty(tokens, hidden, dtype=x.dtype, device=x.device)
    grid = (tokens * ceil_div(hidden, DOWN_COLUMNS),)
    variant = _stream_down_variant(each, hidden, width)
    down = (stacked.down, stacked.down_bias)
    variant(grid, (inner, chosen, weights, *down, out), context=context)
    return out


class _Part(NamedTuple):
    """One of the two products of an expert: gate and up, or down."""

    weight: torch.Tensor  # [experts, out, in]
    bias: torch.Tensor | None
    activation: Activation | str
    gated: bool
    by_token: bool  # the input has a row for each token, not for each pair


def _grouped(
    x: torch.Tensor,
    pairs: Pairs,
    experts_per_token: int,
    part: _Part,
    out: torch.Tensor,
    context: StepContext,
) -> None:
    weight = part.weight
    count, (experts, _, inner), columns = len(pairs.order), weight.shape, out.shape[1]
    assert x.is_contiguous()
    assert weight.is_contiguous()
    tuned = tiling(count, experts, inner, part.gated)
    # Every expert in use has at most one tile that is not full.
    tiles = count // tuned.rows + min(experts, count)
    grid = (tiles * ceil_div(columns, tuned.columns),)
    sizes = _ExpertSizes(experts, experts_per_token, columns, inner)
    how = (part.activation, part.gated, part.by_token, x.dtype == torch.float32)
    variant = _grouped_variant(sizes, tuned, *how)
    variant(grid, (x, pairs.order, pairs.starts, weight, part.bias, out), context=context)


# ── variants ────────────────────────────────────────────────────────────────────────────────────


@cache
def _route_variant(experts: int, rule: RoutingRule) -> Variant:
    each, grouped = rule.experts_per_token, rule.groups_used < rule.num_groups
    groups, used = (rule.num_groups, rule.groups_used) if grouped else (1, 1)
    assert 0 < each <= experts // groups * used
    assert experts % groups == 0
    return Variant(
        _route,
        E=experts,
        BLOCK=power_of_two(experts),
        EACH=each,
        BLOCK_EACH=power_of_two(each),
        SIGMOID=rule.scoring == "sigmoid",
        NORMALISED=rule.normalised,
        GROUPS=groups,
        BLOCK_GROUPS=power_of_two(groups),
        USED=used,
        TOP2=rule.group_score == "top2_sum",
        num_warps=1,
    )


@cache
def _sort_variant(experts: int, at_once: int) -> Variant:
    warps = 4 if at_once <= 1024 else 8
    return Variant(_sort, E=experts, PAIRS=at_once, num_warps=warps)


@cache
def _stream_up_variant(
    each: int, columns: int, inner: int, activation: Activation, gated: bool
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
    )


@cache
def _stream_down_variant(each: int, columns: int, inner: int) -> Variant:
    return Variant(
        _stream_down,
        EACH=each,
        N=columns,
        K=inner,
        COLUMNS=DOWN_COLUMNS,
        INNER=min(256, power_of_two(inner)),
        num_warps=4,
    )


class _ExpertSizes(NamedTuple):
    experts: int
    each: int  # experts of a token
    columns: int
    inner: int


@cache
def _grouped_variant(
    sizes: _ExpertSizes,
    tuned: ExpertTiling,
    activation: Activation | str,
    gated: bool,
    by_token: bool,
    exact: bool,
) -> Variant:
    return Variant(
        _grouped_product,
        E=sizes.experts,
        BLOCK=power_of_two(sizes.experts),
        EACH=sizes.each,
        N=sizes.columns,
        K=sizes.inner,
        ROWS=tuned.rows,
        COLUMNS=tuned.columns,
        INNER=tuned.inner,
        GATED=gated,
        ACTIVATION=activation,
        BY_TOKEN=by_token,
        PRECISION="ieee" if exact else "tf32",  # of fp32; narrower types have no other
        num_warps=tuned.num_warps,
        num_stages=2 if exact else tuned.num_stages,
    )


@cache
def _combine_variant(hidden: int, each: int) -> Variant:
    return Variant(_combine, N=hidden, EACH=each, BLOCK=COMBINED, num_warps=4)


# ── kernels ─────────────────────────────────────────────────────────────────────────────────────


@triton.jit
def _first_of_best(values, number, left, NONE: tl.constexpr):
    """Return the lowest number whose value is the largest among those in `left`."""
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
    DEPENDENT: tl.constexpr,
):
    token = tl.program_id(0).to(tl.int64)
    expert = tl.arange(0, BLOCK)
    left = expert < E
    wait_for_previous(DEPENDENT)
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
    DEPENDENT: tl.constexpr,
):
    """A program sorts the pairs of one expert: they come after those of the experts before it."""
    expert = tl.program_id(0)
    pair = tl.arange(0, PAIRS)
    wait_for_previous(DEPENDENT)
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
    DEPENDENT: tl.constexpr,
):
    PARTS: tl.constexpr = (N + COLUMNS - 1) // COLUMNS
    HALF: tl.constexpr = N * K
    pair = tl.program_id(0) // PARTS
    column = tl.program_id(0) % PARTS * COLUMNS + tl.arange(0, COLUMNS)
    inner = tl.arange(0, INNER)
    wait_for_previous(DEPENDENT)
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
    DEPENDENT: tl.constexpr,
):
    """Multiply with `down`; the outputs of a token's experts are added up as their weights are
    read."""
    PARTS: tl.constexpr = (N + COLUMNS - 1) // COLUMNS
    token = tl.program_id(0) // PARTS
    column = tl.program_id(0) % PARTS * COLUMNS + tl.arange(0, COLUMNS)
    inner = tl.arange(0, INNER)
    mask = column < N
    line = tl.minimum(column, N - 1)[:, None] * K + inner[None, :]
    wait_for_previous(DEPENDENT)
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
    DEPENDENT: tl.constexpr,
):
    """The product of sorted pairs with their experts' weights. BY_TOKEN: x has a row for each
    token, and the result has one for each pair, in sorted order. Otherwise x has a row for each
    sorted pair, and the result has the pairs of a token side by side."""
    PARTS: tl.constexpr = (N + COLUMNS - 1) // COLUMNS
    tile = tl.program_id(0) // PARTS
    column = tl.program_id(0) % PARTS * COLUMNS + tl.arange(0, COLUMNS)
    number = tl.arange(0, BLOCK)
    wait_for_previous(DEPENDENT)
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
    DEPENDENT: tl.constexpr,
):
    token = tl.program_id(0).to(tl.int64)
    column = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    mask = column < N
    wait_for_previous(DEPENDENT)
    sums = tl.zeros([BLOCK], tl.float32)
    for number in tl.static_range(EACH):
        pair = token * EACH + number
        part = tl.load(parts + pair * N + column, mask=mask, other=0.0).to(tl.float32)
        sums += part * tl.load(weights + pair)
    tl.store(out + token * N + column, sums.to(out.dtype.element_ty), mask=mask)
