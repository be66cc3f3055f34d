"""Triton kernels for mixtures of experts. A pair is a token with one of its experts.

    route          choose the experts of each token, best first, and their weights
    by_expert      sort the pairs by expert (stable counting sort)
    gated_experts  multiply tiles of an expert's pairs with gate and up, and apply the activation
    experts_down   multiply tiles with down, write the rows in the order of the tokens, and add up
                   the weighted rows of each token, best expert first

With at most `MAX_STREAMED_PAIRS` pairs, `stream_experts` uses no tiles and no sorting: a program
computes a few columns of gate and up of one pair, or a few columns of the output of one token.

The host reads no value from the device, so it does not know the number of tiles. The grid has the
largest possible number of programs. A program finds its expert by counting the tiles of the experts
before, and ends at once if there is no tile for it. The weights of experts without tokens are not
read.
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

MAX_STREAMED_PAIRS = 16  # up to this number the pairs are not sorted
MAX_SORT_BLOCK = 4096  # pairs that a program of `_sort` loads at one time
UP_COLUMNS, DOWN_COLUMNS = 2, 4  # output columns of a program of `_stream_up`, `_stream_down`
COMBINE_CHANNELS = 1024  # output channels of a program of `_combine`


class Pairs(NamedTuple):
    """The pairs of a token and one of its experts, sorted by expert."""

    order: torch.Tensor  # [pairs], int32: token · experts_per_token + index of the token's expert
    starts: torch.Tensor  # [experts + 1], int32: the first index in `order` of each expert


@dataclass(frozen=True, slots=True)
class ExpertTiling:
    """The tile size and the launch options of `_grouped_matmul_kernel`."""

    rows: int  # a row is a pair
    columns: int
    inner: int
    num_warps: int
    num_stages: int


def tiling(pairs: int, experts: int, inner: int, gated: bool) -> ExpertTiling:
    """Choose the tiling of the matrix product with the weights of an expert. `inner`: the size of
    the summed dimension. With few pairs for each expert, one row of tiles has all pairs, so the
    weight is read once. With many pairs, the tiles have the full size of the matrix units. The
    sizes were measured with `tests.gpu.experts_check` on an H200."""
    pairs_per_expert = pairs / min(pairs, experts)
    if pairs_per_expert <= 12:
        tuned = ExpertTiling(16, 32, 256, 4, 3) if gated else ExpertTiling(16, 64, 128, 4, 3)
    elif pairs_per_expert <= 32:
        tuned = ExpertTiling(32, 64, 128, 4, 3)
    elif pairs_per_expert <= 96:
        tuned = ExpertTiling(64, 64 if gated else 128, 64, 4, 4)
    elif gated:
        tuned = ExpertTiling(128, 128, 64, 8, 4 if pairs_per_expert <= 160 else 3)
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
    """Choose the experts of each token by the router's logits [T, experts]. Return the numbers of
    the experts (int32), best first, and their weights (fp32). Of experts with equal scores, the one
    with the lower number is first. `bias` is added to the logits. `correction` is added to the
    scores for the choice, but not to the weights. A NaN score counts as the lowest score, so that
    all returned numbers are valid."""
    tokens, experts = logits.shape
    per_token = rule.experts_per_token
    assert logits.stride(1) == 1
    chosen = torch.empty(tokens, per_token, dtype=torch.int32, device=logits.device)
    weights = torch.empty(tokens, per_token, dtype=torch.float32, device=logits.device)
    variant = _route_variant(experts, rule)
    tensors = (logits, bias, correction, chosen, weights)
    variant((tokens,), tensors, (float(rule.scale),), (logits.stride(0),), context)
    return chosen, weights


def by_expert(chosen: torch.Tensor, experts: int, context: StepContext = DEFAULT_CONTEXT) -> Pairs:
    """Sort the pairs of `chosen`, [T, experts_per_token] in int32, by expert."""
    pairs = chosen.numel()
    order = torch.empty(pairs, dtype=torch.int32, device=chosen.device)
    starts = torch.empty(experts + 1, dtype=torch.int32, device=chosen.device)
    variant = _sort_variant(experts, min(power_of_two(pairs), MAX_SORT_BLOCK))
    variant((experts,), (chosen, order, starts), (pairs,), context=context)
    return Pairs(order, starts)


def gated_experts(
    x: torch.Tensor,
    pairs: Pairs,
    experts_per_token: int,
    stacked: ExpertWeights,
    context: StepContext = DEFAULT_CONTEXT,
) -> torch.Tensor:
    """Return activation(gate) · up for each pair, [pairs, inner], in the order of `pairs`.
    `stacked`: the weights of all experts."""
    gate_up, gated = stacked.gate_up, stacked.gated
    width = gate_up.shape[1] // (2 if gated else 1)
    out = torch.empty(len(pairs.order), width, dtype=x.dtype, device=x.device)
    matmul = _Matmul(gate_up, stacked.gate_up_bias, stacked.activation, gated, by_token=True)
    _grouped_matmul(x, pairs, experts_per_token, matmul, out, context)
    return out


def experts_down(
    inner: torch.Tensor,
    pairs: Pairs,
    weights: torch.Tensor,
    stacked: ExpertWeights,
    context: StepContext = DEFAULT_CONTEXT,
) -> torch.Tensor:
    """Multiply each pair with `down` of its expert. Return the sums of the rows of each token,
    weighted by `weights` [T, experts_per_token]: [T, hidden], added up in fp32, best expert
    first."""
    tokens, per_token = weights.shape
    hidden = stacked.down.shape[1]
    products = torch.empty(tokens * per_token, hidden, dtype=inner.dtype, device=inner.device)
    matmul = _Matmul(stacked.down, stacked.down_bias, "", gated=False, by_token=False)
    _grouped_matmul(inner, pairs, per_token, matmul, products, context)
    out = torch.empty(tokens, hidden, dtype=inner.dtype, device=inner.device)
    grid = (tokens, ceil_div(hidden, COMBINE_CHANNELS))
    _combine_variant(hidden, per_token)(grid, (products, weights, out), context=context)
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
    if chosen.numel() <= MAX_STREAMED_PAIRS:
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
    """Compute `mix_experts` for few tokens. The weights of an expert are read once for each of its
    tokens."""
    (tokens, per_token), (_, hidden, width) = chosen.shape, stacked.down.shape
    inner = torch.empty(tokens * per_token, width, dtype=x.dtype, device=x.device)
    grid = (tokens * per_token * ceil_div(width, UP_COLUMNS),)
    variant = _stream_up_variant(per_token, width, hidden, stacked.activation, stacked.gated)
    variant(grid, (x, chosen, stacked.gate_up, stacked.gate_up_bias, inner), context=context)
    out = torch.empty(tokens, hidden, dtype=x.dtype, device=x.device)
    grid = (tokens * ceil_div(hidden, DOWN_COLUMNS),)
    variant = _stream_down_variant(per_token, hidden, width)
    down = (stacked.down, stacked.down_bias)
    variant(grid, (inner, chosen, weights, *down, out), context=context)
    return out


class _Matmul(NamedTuple):
    """One of the two matrix products of an expert: with gate and up, or with down."""

    weight: torch.Tensor  # [experts, out, in]
    bias: torch.Tensor | None
    activation: Activation | str
    gated: bool
    by_token: bool  # the input has a row for each token, not for each pair


def _grouped_matmul(
    x: torch.Tensor,
    pairs: Pairs,
    experts_per_token: int,
    matmul: _Matmul,
    out: torch.Tensor,
    context: StepContext,
) -> None:
    """Multiply the pairs with the weights of their experts, and write the result to `out`."""
    weight = matmul.weight
    count, (experts, _, inner), columns = len(pairs.order), weight.shape, out.shape[1]
    assert x.is_contiguous()
    assert weight.is_contiguous()
    tuned = tiling(count, experts, inner, matmul.gated)
    # Every expert in use has at most one tile that is not full.
    tiles = count // tuned.rows + min(experts, count)
    grid = (tiles * ceil_div(columns, tuned.columns),)
    sizes = _ExpertSizes(experts, experts_per_token, columns, inner)
    is_fp32 = x.dtype == torch.float32
    variant = _grouped_matmul_variant(
        sizes, tuned, matmul.activation, matmul.gated, matmul.by_token, is_fp32
    )
    variant(grid, (x, pairs.order, pairs.starts, weight, matmul.bias, out), context=context)


# ── variants ────────────────────────────────────────────────────────────────────────────────────


@cache
def _route_variant(experts: int, rule: RoutingRule) -> Variant:
    per_token, grouped = rule.experts_per_token, rule.groups_used < rule.num_groups
    groups, used = (rule.num_groups, rule.groups_used) if grouped else (1, 1)
    assert 0 < per_token <= experts // groups * used
    assert experts % groups == 0
    return Variant(
        _route,
        E=experts,
        BLOCK=power_of_two(experts),
        PER_TOKEN=per_token,
        BLOCK_PER_TOKEN=power_of_two(per_token),
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
    per_token: int, columns: int, inner: int, activation: Activation, gated: bool
) -> Variant:
    return Variant(
        _stream_up,
        PER_TOKEN=per_token,
        N=columns,
        K=inner,
        COLUMNS=UP_COLUMNS,
        INNER=min(1024, power_of_two(inner)),
        GATED=gated,
        ACTIVATION=activation,
        num_warps=4,
    )


@cache
def _stream_down_variant(per_token: int, columns: int, inner: int) -> Variant:
    return Variant(
        _stream_down,
        PER_TOKEN=per_token,
        N=columns,
        K=inner,
        COLUMNS=DOWN_COLUMNS,
        INNER=min(256, power_of_two(inner)),
        num_warps=4,
    )


class _ExpertSizes(NamedTuple):
    experts: int
    per_token: int  # experts of a token
    columns: int
    inner: int


@cache
def _grouped_matmul_variant(
    sizes: _ExpertSizes,
    tuned: ExpertTiling,
    activation: Activation | str,
    gated: bool,
    by_token: bool,
    is_fp32: bool,
) -> Variant:
    return Variant(
        _grouped_matmul_kernel,
        E=sizes.experts,
        BLOCK=power_of_two(sizes.experts),
        PER_TOKEN=sizes.per_token,
        N=sizes.columns,
        K=sizes.inner,
        ROWS=tuned.rows,
        COLUMNS=tuned.columns,
        INNER=tuned.inner,
        GATED=gated,
        ACTIVATION=activation,
        BY_TOKEN=by_token,
        PRECISION="ieee" if is_fp32 else "tf32",  # has an effect on fp32 inputs only
        num_warps=tuned.num_warps,
        num_stages=2 if is_fp32 else tuned.num_stages,
    )


@cache
def _combine_variant(hidden: int, per_token: int) -> Variant:
    return Variant(_combine, N=hidden, PER_TOKEN=per_token, BLOCK=COMBINE_CHANNELS, num_warps=4)


# ── kernels ─────────────────────────────────────────────────────────────────────────────────────


@triton.jit
def _first_of_best(values, number, candidates, NONE: tl.constexpr):
    """Return the lowest number of the candidates with the largest value. `candidates`: a mask."""
    best = tl.max(tl.where(candidates, values, float("-inf")), axis=0)
    return tl.min(tl.where(candidates & (values == best), number, NONE), axis=0)


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
    PER_TOKEN: tl.constexpr,
    BLOCK_PER_TOKEN: tl.constexpr,
    SIGMOID: tl.constexpr,
    NORMALISED: tl.constexpr,
    GROUPS: tl.constexpr,
    BLOCK_GROUPS: tl.constexpr,
    USED: tl.constexpr,
    TOP2: tl.constexpr,
    DEPENDENT: tl.constexpr,
):
    """A program chooses the experts of one token."""
    token = tl.program_id(0).to(tl.int64)
    expert = tl.arange(0, BLOCK)
    candidates = expert < E
    wait_for_previous(DEPENDENT)
    at = logits + token * stride + expert
    logit = tl.load(at, mask=candidates, other=float("-inf")).to(tl.float32)
    if bias is not None:
        logit += tl.load(bias + expert, mask=candidates, other=0.0).to(tl.float32)
    if SIGMOID:
        score = 1.0 / (1.0 + tl.exp(-logit))
    else:
        score = tl.exp(logit - tl.max(logit, axis=0))
        score = score / tl.sum(score, axis=0)
    ranked = score
    if correction is not None:
        ranked += tl.load(correction + expert, mask=candidates, other=0.0).to(tl.float32)
    ranked = tl.where(ranked == ranked, ranked, float("-inf"))
    if USED < GROUPS:
        SIZE: tl.constexpr = E // GROUPS
        group = tl.arange(0, BLOCK_GROUPS)
        total = tl.full([BLOCK_GROUPS], float("-inf"), tl.float32)
        for number in tl.static_range(GROUPS):
            inside = candidates & (expert // SIZE == number)
            best = tl.max(tl.where(inside, ranked, float("-inf")), axis=0)
            if TOP2:
                first = _first_of_best(ranked, expert, inside, BLOCK)
                inside = inside & (expert != first)
                best += tl.max(tl.where(inside, ranked, float("-inf")), axis=0)
            total = tl.where(group == number, best, total)
        candidate_groups = group < GROUPS
        in_used_group = expert < 0  # False for all experts
        for _ in tl.static_range(USED):
            winner = _first_of_best(total, group, candidate_groups, BLOCK_GROUPS)
            in_used_group = in_used_group | (expert // SIZE == winner)
            candidate_groups = candidate_groups & (group != winner)
        candidates = candidates & in_used_group
    place = tl.arange(0, BLOCK_PER_TOKEN)
    ids = tl.zeros([BLOCK_PER_TOKEN], tl.int32)
    values = tl.zeros([BLOCK_PER_TOKEN], tl.float32)
    for number in tl.static_range(PER_TOKEN):
        winner = _first_of_best(ranked, expert, candidates, BLOCK)
        candidates = candidates & (expert != winner)
        value = tl.sum(tl.where(expert == winner, score, 0.0), axis=0)
        ids = tl.where(place == number, winner, ids)
        values = tl.where(place == number, value, values)
    if NORMALISED:
        values = values / tl.maximum(tl.sum(values, axis=0), 1e-20)
    is_valid = place < PER_TOKEN
    tl.store(chosen + token * PER_TOKEN + place, ids, mask=is_valid)
    tl.store(weights + token * PER_TOKEN + place, values * scale, mask=is_valid)


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
    """A program writes the pairs of one expert, after the pairs of all experts with lower
    numbers."""
    expert = tl.program_id(0)
    pair = tl.arange(0, PAIRS)
    wait_for_previous(DEPENDENT)
    before = tl.zeros([PAIRS], tl.int32)
    for start in range(0, num_pairs, PAIRS):
        experts = tl.load(chosen + start + pair, mask=start + pair < num_pairs, other=E)
        before += (experts < expert).to(tl.int32)
    next_index = tl.sum(before, axis=0)
    tl.store(starts + expert, next_index)
    if expert == E - 1:
        tl.store(starts + E, num_pairs)
    for start in range(0, num_pairs, PAIRS):
        experts = tl.load(chosen + start + pair, mask=start + pair < num_pairs, other=E)
        is_own = experts == expert
        rank = tl.cumsum(is_own.to(tl.int32), axis=0)
        tl.store(order + next_index + rank - 1, start + pair, mask=is_own)
        next_index += tl.sum(is_own.to(tl.int32), axis=0)


@triton.jit
def _stream_up(
    x,
    chosen,
    weight,
    bias,
    out,
    PER_TOKEN: tl.constexpr,
    N: tl.constexpr,
    K: tl.constexpr,
    COLUMNS: tl.constexpr,
    INNER: tl.constexpr,
    GATED: tl.constexpr,
    ACTIVATION: tl.constexpr,
    DEPENDENT: tl.constexpr,
):
    """A program computes COLUMNS columns of activation(gate) · up of one pair."""
    COLUMN_BLOCKS: tl.constexpr = (N + COLUMNS - 1) // COLUMNS
    MATRIX_SIZE: tl.constexpr = N * K  # of gate, and of up
    pair = tl.program_id(0) // COLUMN_BLOCKS
    column = tl.program_id(0) % COLUMN_BLOCKS * COLUMNS + tl.arange(0, COLUMNS)
    inner = tl.arange(0, INNER)
    wait_for_previous(DEPENDENT)
    expert = tl.load(chosen + pair).to(tl.int64)
    # Columns past the end load the last row of the weight instead; their results are not stored.
    expert_weight = weight + expert * (2 * MATRIX_SIZE if GATED else MATRIX_SIZE)
    at = expert_weight + tl.minimum(column, N - 1)[:, None] * K + inner[None, :]
    x_at = x + (pair // PER_TOKEN).to(tl.int64) * K + inner
    sums = tl.zeros([COLUMNS, INNER], tl.float32)
    ups = tl.zeros([COLUMNS, INNER], tl.float32)
    for start in tl.static_range(0, K, INNER):
        if start + INNER <= K:
            x_tile = tl.load(x_at + start).to(tl.float32)[None, :]
            sums += x_tile * tl.load(at + start, eviction_policy="evict_first").to(tl.float32)
            if GATED:
                up = tl.load(at + MATRIX_SIZE + start, eviction_policy="evict_first")
                ups += x_tile * up.to(tl.float32)
        else:
            inside = start + inner < K
            x_tile = tl.load(x_at + start, mask=inside, other=0.0).to(tl.float32)[None, :]
            sums += x_tile * tl.load(at + start, mask=inside[None, :], other=0.0).to(tl.float32)
            if GATED:
                up = tl.load(at + MATRIX_SIZE + start, mask=inside[None, :], other=0.0)
                ups += x_tile * up.to(tl.float32)
    gate = tl.sum(sums, axis=1)
    up = tl.sum(ups, axis=1)
    mask = column < N
    if bias is not None:
        bias_at = bias + expert * (2 * N if GATED else N) + column
        gate += tl.load(bias_at, mask=mask, other=0.0).to(tl.float32)
        if GATED:
            up += tl.load(bias_at + N, mask=mask, other=0.0).to(tl.float32)
    dtype: tl.constexpr = out.dtype.element_ty
    if GATED:
        result = gate_times_up(gate, up, dtype, ACTIVATION)
    else:
        result = activated(gate.to(dtype).to(tl.float32), ACTIVATION)
    tl.store(out + pair * N + column, result.to(dtype), mask=mask)


@triton.jit
def _stream_down(
    x,
    chosen,
    weights,
    weight,
    bias,
    out,
    PER_TOKEN: tl.constexpr,
    N: tl.constexpr,
    K: tl.constexpr,
    COLUMNS: tl.constexpr,
    INNER: tl.constexpr,
    DEPENDENT: tl.constexpr,
):
    """A program computes COLUMNS output columns of one token: it multiplies with `down` of each of
    the token's experts, and adds up the weighted results."""
    COLUMN_BLOCKS: tl.constexpr = (N + COLUMNS - 1) // COLUMNS
    token = tl.program_id(0) // COLUMN_BLOCKS
    column = tl.program_id(0) % COLUMN_BLOCKS * COLUMNS + tl.arange(0, COLUMNS)
    inner = tl.arange(0, INNER)
    mask = column < N
    line = tl.minimum(column, N - 1)[:, None] * K + inner[None, :]
    wait_for_previous(DEPENDENT)
    sums = tl.zeros([COLUMNS, INNER], tl.float32)
    biases = tl.zeros([COLUMNS], tl.float32)
    for number in tl.static_range(PER_TOKEN):
        pair = token * PER_TOKEN + number
        expert = tl.load(chosen + pair).to(tl.int64)
        pair_weight = tl.load(weights + pair)
        expert_weight = weight + expert * (N * K) + line
        for start in tl.static_range(0, K, INNER):
            if start + INNER <= K:
                x_tile = tl.load(x + pair * K + start + inner).to(tl.float32)
                down_tile = tl.load(expert_weight + start, eviction_policy="evict_first")
            else:
                inside = start + inner < K
                x_tile = tl.load(x + pair * K + start + inner, mask=inside, other=0.0).to(
                    tl.float32
                )
                down_tile = tl.load(expert_weight + start, mask=inside[None, :], other=0.0)
            sums += (x_tile * pair_weight)[None, :] * down_tile.to(tl.float32)
        if bias is not None:
            added = tl.load(bias + expert * N + column, mask=mask, other=0.0)
            biases += pair_weight * added.to(tl.float32)
    total = tl.sum(sums, axis=1) + biases
    tl.store(out + token * N + column, total.to(out.dtype.element_ty), mask=mask)


@triton.jit
def _grouped_matmul_kernel(
    x,
    order,
    starts,
    weight,
    bias,
    out,
    E: tl.constexpr,
    BLOCK: tl.constexpr,
    PER_TOKEN: tl.constexpr,
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
    """A program multiplies one tile of sorted pairs with the weights of their expert.

    BY_TOKEN: x has one row for each token, and `out` one row for each pair in sorted order.
    Otherwise x has one row for each pair in sorted order, and in `out` the rows of a token's pairs
    are adjacent."""
    COLUMN_BLOCKS: tl.constexpr = (N + COLUMNS - 1) // COLUMNS
    tile = tl.program_id(0) // COLUMN_BLOCKS
    column = tl.program_id(0) % COLUMN_BLOCKS * COLUMNS + tl.arange(0, COLUMNS)
    number = tl.arange(0, BLOCK)
    wait_for_previous(DEPENDENT)
    first = tl.load(starts + number, mask=number < E, other=0)
    end = tl.load(starts + number + 1, mask=number < E, other=0)
    tiles = (end - first + ROWS - 1) // ROWS
    tiles_end = tl.cumsum(tiles, axis=0)
    expert = tl.sum((tiles_end <= tile).to(tl.int32), axis=0)
    if expert >= BLOCK:
        return
    is_own = number == expert
    first_tile = tl.sum(tl.where(is_own, tiles_end - tiles, 0), axis=0)
    start = tl.sum(tl.where(is_own, first, 0), axis=0) + (tile - first_tile) * ROWS
    stop = tl.sum(tl.where(is_own, end, 0), axis=0)

    place = start + tl.arange(0, ROWS)
    is_valid = place < stop
    pair = tl.load(order + place, mask=is_valid, other=0)
    x_row = (pair // PER_TOKEN if BY_TOKEN else place).to(tl.int64)
    out_row = (place if BY_TOKEN else pair).to(tl.int64)
    inner = tl.arange(0, INNER)
    MATRIX_SIZE: tl.constexpr = N * K
    # Columns past the end load the last row of the weight instead; their results are not stored.
    expert_weight = weight + expert.to(tl.int64) * (2 * MATRIX_SIZE if GATED else MATRIX_SIZE)
    at = expert_weight + tl.minimum(column, N - 1)[:, None] * K + inner[None, :]
    x_at = x + x_row[:, None] * K + inner[None, :]
    sums = tl.zeros([ROWS, COLUMNS], tl.float32)
    ups = tl.zeros([ROWS, COLUMNS], tl.float32)
    for begin in tl.range(0, K, INNER):
        if K % INNER == 0:
            x_tile = tl.load(x_at + begin, mask=is_valid[:, None], other=0.0)
            gate = tl.load(at + begin)
        else:
            inside = (begin + inner < K)[None, :]
            x_tile = tl.load(x_at + begin, mask=is_valid[:, None] & inside, other=0.0)
            gate = tl.load(at + begin, mask=inside, other=0.0)
        sums = tl.dot(x_tile, tl.trans(gate), sums, input_precision=PRECISION)
        if GATED:
            if K % INNER == 0:
                up = tl.load(at + MATRIX_SIZE + begin)
            else:
                up = tl.load(at + MATRIX_SIZE + begin, mask=inside, other=0.0)
            ups = tl.dot(x_tile, tl.trans(up), ups, input_precision=PRECISION)
    if bias is not None:
        bias_at = bias + expert * (2 * N if GATED else N) + column
        sums += tl.load(bias_at, mask=column < N, other=0.0).to(tl.float32)[None, :]
        if GATED:
            ups += tl.load(bias_at + N, mask=column < N, other=0.0).to(tl.float32)[None, :]
    dtype: tl.constexpr = out.dtype.element_ty
    if GATED:
        sums = gate_times_up(sums, ups, dtype, ACTIVATION)
    elif ACTIVATION != "":
        sums = activated(sums.to(dtype).to(tl.float32), ACTIVATION)
    mask = is_valid[:, None] & (column < N)[None, :]
    tl.store(out + out_row[:, None] * N + column[None, :], sums.to(dtype), mask=mask)


@triton.jit
def _combine(
    rows,
    weights,
    out,
    N: tl.constexpr,
    PER_TOKEN: tl.constexpr,
    BLOCK: tl.constexpr,
    DEPENDENT: tl.constexpr,
):
    """A program adds up BLOCK channels of the weighted rows of one token's pairs."""
    token = tl.program_id(0).to(tl.int64)
    column = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    mask = column < N
    wait_for_previous(DEPENDENT)
    sums = tl.zeros([BLOCK], tl.float32)
    for number in tl.static_range(PER_TOKEN):
        pair = token * PER_TOKEN + number
        row = tl.load(rows + pair * N + column, mask=mask, other=0.0).to(tl.float32)
        sums += row * tl.load(weights + pair)
    tl.store(out + token * N + column, sums.to(out.dtype.element_ty), mask=mask)
