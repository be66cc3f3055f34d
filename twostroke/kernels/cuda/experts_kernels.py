"""The kernels of `experts.py`: mixtures of experts."""

from __future__ import annotations

import triton
import triton.language as tl

from twostroke.kernels.cuda.dependent_launch import wait_for_previous
from twostroke.kernels.cuda.elementwise import activated, gate_times_up


@triton.jit
def _first_of_best(values, number, candidates, NONE: tl.constexpr):
    """Return the lowest number of the candidates with the largest value. `candidates`: a mask."""
    best = tl.max(tl.where(candidates, values, float("-inf")), axis=0)
    return tl.min(tl.where(candidates & (values == best), number, NONE), axis=0)


@triton.jit(do_not_specialize=["scale"])
def route(
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
def sort(
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
def stream_up(
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
def stream_down(
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
def grouped_matmul(
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
def combine(
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
