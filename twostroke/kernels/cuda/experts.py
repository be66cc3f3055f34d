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

from twostroke.kernels.activations import Activation
from twostroke.kernels.cuda import experts_kernels as kernels
from twostroke.kernels.cuda.launch import Variant
from twostroke.kernels.cuda.sizes import ceil_div, power_of_two
from twostroke.kernels.records import DEFAULT_CONTEXT, ExpertWeights, RoutingRule, StepContext

MAX_STREAMED_PAIRS = 16  # up to this number the pairs are not sorted
MAX_SORT_BLOCK = 4096  # pairs that a program of `sort` loads at one time
UP_COLUMNS, DOWN_COLUMNS = 2, 4  # output columns of a program of `stream_up`, `stream_down`
COMBINE_CHANNELS = 1024  # output channels of a program of `combine`


class Pairs(NamedTuple):
    """The pairs of a token and one of its experts, sorted by expert."""

    order: torch.Tensor  # [pairs], int32: token · experts_per_token + index of the token's expert
    starts: torch.Tensor  # [experts + 1], int32: the first index in `order` of each expert


@dataclass(frozen=True, slots=True)
class ExpertTiling:
    """The tile size and the launch options of `grouped_matmul`."""

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
    """Compute `mix_experts` for few tokens. An expert is read once for each token."""
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
        kernels.route,
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
    return Variant(kernels.sort, E=experts, PAIRS=at_once, num_warps=warps)


@cache
def _stream_up_variant(
    per_token: int, columns: int, inner: int, activation: Activation, gated: bool
) -> Variant:
    return Variant(
        kernels.stream_up,
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
        kernels.stream_down,
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
        kernels.grouped_matmul,
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
    return Variant(
        kernels.combine, N=hidden, PER_TOKEN=per_token, BLOCK=COMBINE_CHANNELS, num_warps=4
    )
