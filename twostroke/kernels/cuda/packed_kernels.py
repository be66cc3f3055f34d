"""The kernels of `packed.py`: weights of 4 or 8 bits in groups that share a scale."""

from __future__ import annotations

import triton
import triton.language as tl

from twostroke.kernels.cuda.elementwise import gate_times_up
from twostroke.kernels.cuda.packed_codes import (
    STEPS_4,
    floats_4,
    floats_8,
    group_line,
    scaled_4,
    scaled_8,
    whole_4,
)
from twostroke.kernels.cuda.pdl import fetch_to_l2, wait_for_previous
from twostroke.kernels.cuda.tiles import (
    FETCHED,
    dot,
    is_last_split,
    store_tile,
    sum_of_splits,
)


@triton.jit
def stream_row(
    x,
    codes,
    scale,
    zero,
    offset,
    out,
    N: tl.constexpr,
    K: tl.constexpr,
    GROUP: tl.constexpr,
    BITS: tl.constexpr,
    COLUMNS: tl.constexpr,
    PARTS: tl.constexpr,
    GATED: tl.constexpr,
    ACTIVATION: tl.constexpr,
    PDL: tl.constexpr,
):
    # [columns, groups, loads of a group, 2 words]: a load's words are one thread's, and so are the
    # rows' numbers, which are 16 bytes.
    SIZE: tl.constexpr = GROUP * BITS // 8
    LOADS: tl.constexpr = SIZE // 8
    INNER: tl.constexpr = PARTS * GROUP
    WORDS: tl.constexpr = K * BITS // 32
    GROUPS: tl.constexpr = K // GROUP
    column = tl.program_id(0) * COLUMNS + tl.arange(0, COLUMNS)
    part = tl.arange(0, PARTS)
    load = tl.arange(0, LOADS)
    # Columns past the end read the last row of the weight again, and are dropped.
    line = tl.minimum(column, N - 1).to(tl.int64)
    place = (part * (SIZE // 4))[:, None] + (load * 2)[None, :]
    place = place[:, :, None] + tl.arange(0, 2)[None, None, :]
    at = codes + (line * WORDS)[:, None, None, None] + place[None, :, :, :]
    scale_at = (line * GROUPS)[:, None] + part[None, :]
    HALF: tl.constexpr = N * WORDS
    HALF_SCALES: tl.constexpr = N * GROUPS
    first = tl.load(at, eviction_policy="evict_first")
    factor, term = group_line(scale, zero, offset, scale_at, BITS, True)
    if GATED:
        second = tl.load(at + HALF, eviction_policy="evict_first")
        up_factor, up_term = group_line(scale, zero, offset, scale_at + HALF_SCALES, BITS, True)
    wait_for_previous(PDL)
    inside = (part * GROUP)[:, None] + (load * 8)[None, :]
    x_at = x + inside[:, :, None] + tl.arange(0, 8)[None, None, :]
    sums = tl.zeros([COLUMNS, PARTS, LOADS], tl.float32)
    others = sums
    for start in tl.range(0, K, INNER):
        of_x = tl.load(x_at + start).to(tl.float32)
        rest = of_x
        if BITS == 4:
            rest = tl.load(x_at + start + GROUP // 2).to(tl.float32)
        # The next codes are on their way while these are multiplied.
        there = start + INNER < K
        ahead = (start + INNER) * BITS // 32
        groups = scale_at + tl.minimum(start + INNER, K - INNER) // GROUP
        next_first = tl.load(at + ahead, mask=there, eviction_policy="evict_first")
        next_factor, next_term = group_line(scale, zero, offset, groups, BITS, True)
        if GATED:
            next_second = tl.load(at + HALF + ahead, mask=there, eviction_policy="evict_first")
            groups += HALF_SCALES
            next_up_factor, next_up_term = group_line(scale, zero, offset, groups, BITS, True)
            others += _of_groups(of_x, rest, second, up_factor, up_term, BITS)
            second, up_factor, up_term = next_second, next_up_factor, next_up_term
        sums += _of_groups(of_x, rest, first, factor, term, BITS)
        first, factor, term = next_first, next_factor, next_term
    result = tl.sum(tl.sum(sums, axis=2), axis=1)
    if GATED:
        other = tl.sum(tl.sum(others, axis=2), axis=1)
        result = gate_times_up(result, other, out.dtype.element_ty, ACTIVATION)
    tl.store(out + column, result.to(out.dtype.element_ty), mask=column < N)


@triton.jit
def _of_groups(x, rest, words, factor, term, BITS: tl.constexpr):
    """Products of [groups, loads, 8] numbers with [columns, groups, loads, 2] words, added up in
    each load. `rest`: the numbers of the high nibbles."""
    if BITS == 4:
        a, b, c, d, e, f, g, h = floats_4(words)
        products = _four(x, a, b, c, d) + _four(rest, e, f, g, h)
        of_x = tl.sum(x + rest, axis=2)
        term -= factor * STEPS_4
        factor *= STEPS_4
    else:
        a, b, c, d = floats_8(words)
        products = _four(x, a, b, c, d)
        of_x = tl.sum(x, axis=2)
    return tl.sum(products, axis=3) * factor[:, :, None] + of_x[None, :, :] * term[:, :, None]


@triton.jit
def _four(x, a, b, c, d):
    """[groups, loads, 8] numbers, four to a word, times those of the words' four bytes."""
    even, odd = tl.split(tl.reshape(x, [x.shape[0], x.shape[1], 2, 2, 2]))
    first, third = tl.split(even)
    second, fourth = tl.split(odd)
    products = first[None, :, :, :] * a + second[None, :, :, :] * b
    return products + third[None, :, :, :] * c + fourth[None, :, :, :] * d


@triton.jit(do_not_specialize=["num_rows"])
def multiply_tile(
    x,
    codes,
    scale,
    zero,
    offset,
    out,
    partial,
    arrived,
    num_rows,
    N: tl.constexpr,
    K: tl.constexpr,
    GROUP: tl.constexpr,
    BITS: tl.constexpr,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
    PARTS: tl.constexpr,
    SPLITS: tl.constexpr,
    SCALE_FIRST: tl.constexpr,
    WEIGHT_FIRST: tl.constexpr,
    GATED: tl.constexpr,
    ACTIVATION: tl.constexpr,
    PDL: tl.constexpr,
):
    block, split = tl.program_id(1), tl.program_id(2)
    row = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    column = block * COLUMNS + tl.arange(0, COLUMNS)
    line = tl.minimum(column, N - 1).to(tl.int64)
    SIZE: tl.constexpr = GROUP * BITS // 8
    BYTES: tl.constexpr = K * BITS // 8
    GROUPS: tl.constexpr = K // GROUP
    HALF: tl.constexpr = N * BYTES
    HALF_SCALES: tl.constexpr = N * GROUPS
    EACH: tl.constexpr = (GROUPS // PARTS + SPLITS - 1) // SPLITS * PARTS
    # Groups whose numbers are multiplied by one product.
    AT_ONCE: tl.constexpr = PARTS if SCALE_FIRST else 1
    at = codes + (line * BYTES)[:, None] + tl.arange(0, AT_ONCE * SIZE)[None, :]
    byte = tl.arange(0, AT_ONCE * SIZE)
    inner = byte // SIZE * GROUP + byte % SIZE
    x_at = x + row[:, None] * K + inner[None, :]
    scale_at = (line * GROUPS)[:, None] + tl.arange(0, AT_ONCE)[None, :]
    there = (row < num_rows)[:, None]
    if WEIGHT_FIRST:
        sums = tl.zeros([COLUMNS, ROWS], tl.float32)
    else:
        sums = tl.zeros([ROWS, COLUMNS], tl.float32)
    others = sums
    if PDL:
        AHEAD: tl.constexpr = EACH * SIZE if EACH * SIZE < FETCHED else FETCHED
        begin = codes + line * BYTES + tl.minimum(split * EACH * SIZE, BYTES - AHEAD)
        fetch_to_l2(begin, AHEAD)
        if GATED:
            fetch_to_l2(begin + HALF, AHEAD)
    wait_for_previous(PDL)
    for start in tl.range(split * EACH, tl.minimum(GROUPS, (split + 1) * EACH), PARTS):
        for n in tl.static_range(0, PARTS, AT_ONCE):
            group = start + n
            place = scale_at + group
            # Asked for first: these loads have nothing that fetches them ahead.
            factor, term = group_line(scale, zero, offset, place, BITS, SCALE_FIRST)
            if GATED:
                up_factor, up_term = group_line(
                    scale, zero, offset, place + HALF_SCALES, BITS, SCALE_FIRST
                )
            of_x = tl.load(x_at + group * GROUP, mask=there, other=0.0)
            rest = of_x
            if BITS == 4:
                rest = tl.load(x_at + group * GROUP + GROUP // 2, mask=there, other=0.0)
            first = tl.load(at + group * SIZE, eviction_policy="evict_first")
            sums = _add_product(
                sums, of_x, rest, first, factor, term, BITS, SCALE_FIRST, WEIGHT_FIRST
            )
            if GATED:
                second = tl.load(at + HALF + group * SIZE, eviction_policy="evict_first")
                others = _add_product(
                    others, of_x, rest, second, up_factor, up_term, BITS, SCALE_FIRST, WEIGHT_FIRST
                )
    if WEIGHT_FIRST:
        sums = tl.trans(sums)
        others = tl.trans(others)
    if SPLITS == 1:
        store_tile(sums, others, row, column, there, out, N, GATED, ACTIVATION)
    else:
        tile = tl.arange(0, ROWS)[:, None] * COLUMNS + tl.arange(0, COLUMNS)[None, :]
        AREA: tl.constexpr = ROWS * COLUMNS
        to = partial + block.to(tl.int64) * (SPLITS * AREA) + tile
        if is_last_split(sums, to, arrived, block, split, SPLITS, AREA):
            sums = sum_of_splits(to, arrived, block, SPLITS, AREA)
            store_tile(sums, sums, row, column, there, out, N, GATED, ACTIVATION)


@triton.jit
def _add_product(
    sums,
    x,
    rest,
    codes,
    factor,
    term,
    BITS: tl.constexpr,
    SCALE_FIRST: tl.constexpr,
    WEIGHT_FIRST: tl.constexpr,
):
    """The product of [columns, bytes] with the rows' numbers, added to the sums. `rest`: the
    numbers of the high nibbles; `factor` and `term` are the groups', by `_line`."""
    if SCALE_FIRST:
        if BITS == 4:
            term = _of_bytes(term - factor * STEPS_4, codes)
            factor = _of_bytes(factor * STEPS_4, codes)
            low, high = scaled_4(codes, factor, term, x.dtype)
            sums = dot(x, low, sums, WEIGHT_FIRST)
            sums = dot(rest, high, sums, WEIGHT_FIRST)
        else:
            factor = _of_bytes(factor, codes)
            numbers = scaled_8(codes, factor, _of_bytes(term, codes), x.dtype)
            sums = dot(x, numbers, sums, WEIGHT_FIRST)
    else:
        tl.static_assert(BITS == 4)
        low, high = whole_4(codes, tl.broadcast_to(term, codes.shape), x.dtype)
        product = dot(x, low, tl.zeros(sums.shape, tl.float32), WEIGHT_FIRST)
        product = dot(rest, high, product, WEIGHT_FIRST)
        sums += product * (factor if WEIGHT_FIRST else tl.trans(factor))
    return sums


@triton.jit
def _of_bytes(numbers, codes):
    """[columns, groups] → those of each byte of the groups."""
    if numbers.shape[1] == 1:
        wide = tl.broadcast_to(numbers, codes.shape)
    else:
        shape: tl.constexpr = [
            codes.shape[0],
            numbers.shape[1],
            codes.shape[1] // numbers.shape[1],
        ]
        wide = tl.reshape(tl.broadcast_to(numbers[:, :, None], shape), codes.shape)
    return wide


@triton.jit
def dequantise_rows(
    codes,
    scale,
    zero,
    offset,
    out,
    K: tl.constexpr,
    GROUP: tl.constexpr,
    BITS: tl.constexpr,
    BLOCK: tl.constexpr,
):
    SIZE: tl.constexpr = GROUP * BITS // 8
    BYTES: tl.constexpr = K * BITS // 8
    row = tl.program_id(0).to(tl.int64)
    byte = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    mask = byte < BYTES
    # The groups of bytes past the end are those of the last.
    place = row * (K // GROUP) + tl.minimum(byte // SIZE, K // GROUP - 1)
    factor, term = group_line(scale, zero, offset, place, BITS, True)
    found = tl.load(codes + row * BYTES + byte, mask=mask, other=0)
    to = out + row * K + byte // SIZE * GROUP + byte % SIZE
    kind: tl.constexpr = out.dtype.element_ty
    if BITS == 4:
        tl.store(to, ((found & 15).to(tl.float32) * factor + term).to(kind), mask=mask)
        high = (found >> 4).to(tl.float32) * factor + term
        tl.store(to + GROUP // 2, high.to(kind), mask=mask)
    else:
        tl.store(to, (found.to(tl.float32) * factor + term).to(kind), mask=mask)
