"""The kernels of `packed.py`: weights of 4 or 8 bits in groups that share a scale."""

from __future__ import annotations

import triton
import triton.language as tl

from twostroke.kernels.cuda.elementwise import gate_times_up
from twostroke.kernels.cuda.packed_codes import (
    floats_4,
    floats_8,
    group_line,
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

# ── 4 bits ──────────────────────────────────────────────────────────────────────────────────


@triton.jit(do_not_specialize=["num_rows"])
def multiply_tile_4(
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
    BLOCK: tl.constexpr,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
    STEP: tl.constexpr,
    SPLITS: tl.constexpr,
    GATED: tl.constexpr,
    ACTIVATION: tl.constexpr,
    PDL: tl.constexpr,
):
    # The weight is the left operand: its numbers are made in registers, where that one may be, and
    # 64 columns are what the matrix units of Hopper take, with 8 rows or more.
    tile, split = tl.program_id(1), tl.program_id(2)
    row = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    column = tile * COLUMNS + tl.arange(0, COLUMNS)
    # Columns past the end read the last row of the weight again, and are dropped.
    line = tl.minimum(column, N - 1).to(tl.int64)
    WORDS: tl.constexpr = BLOCK // 4
    BLOCKS: tl.constexpr = K // BLOCK
    # Numbers of a block that have one scale, which comes after their product.
    RUN: tl.constexpr = GROUP if GROUP < BLOCK else BLOCK
    # Numbers of one product: a run's where the instructions are Hopper's own (the compiler waits
    # for each product), else those of one nibble, which the others' take without moves.
    PIECE: tl.constexpr = RUN if COLUMNS >= 64 and ROWS >= 16 else WORDS
    EACH: tl.constexpr = (BLOCKS // STEP + SPLITS - 1) // SPLITS * STEP
    HALF: tl.constexpr = N * BLOCKS * WORDS
    at = codes + (line * (BLOCKS * WORDS))[:, None] + tl.arange(0, WORDS)[None, :]
    x_at = x + row[:, None] * K + tl.arange(0, PIECE)[None, :]
    there = (row < num_rows)[:, None]
    sums = tl.zeros([COLUMNS, ROWS], tl.float32)
    others = sums
    begin, end = split * EACH, tl.minimum(BLOCKS, (split + 1) * EACH)
    if PDL:
        AHEAD: tl.constexpr = EACH * WORDS if EACH * WORDS * 2 < FETCHED else FETCHED // 2
        first = codes + line * (BLOCKS * WORDS)
        first += tl.minimum(begin * WORDS, BLOCKS * WORDS - AHEAD)
        fetch_to_l2(first, AHEAD * 2)
        if GATED:
            fetch_to_l2(first + HALF, AHEAD * 2)
    # Scales are asked for a step ahead, as nothing else fetches them.
    group = line * (K // GROUP)
    up_group = group + N * (K // GROUP)
    ahead = tl.minimum(begin, BLOCKS - STEP) * BLOCK
    of_groups = _groups(scale, offset, group, ahead, STEP * BLOCK, RUN, GROUP)
    if GATED:
        of_up = _groups(scale, offset, up_group, ahead, STEP * BLOCK, RUN, GROUP)
    wait_for_previous(PDL)
    for start in tl.range(begin, end, STEP):
        ahead = tl.minimum(start + STEP, BLOCKS - STEP) * BLOCK
        next_groups = _groups(scale, offset, group, ahead, STEP * BLOCK, RUN, GROUP)
        if GATED:
            next_up = _groups(scale, offset, up_group, ahead, STEP * BLOCK, RUN, GROUP)
        for n in tl.static_range(STEP):
            inner = (start + n) * BLOCK
            of_x = ()
            for m in tl.static_range(BLOCK // PIECE):
                piece = tl.load(x_at + inner + m * PIECE, mask=there, other=0.0)
                of_x += (tl.trans(piece),)  # type: ignore[assignment]
            words = tl.load(at + inner // 4, eviction_policy="evict_first")
            zeros = None if zero is None else zero + group + inner // GROUP
            sums = _add_block(
                sums, of_x, words, of_groups, zeros, n, BLOCK // RUN, offset is not None
            )
            if GATED:
                words = tl.load(at + HALF + inner // 4, eviction_policy="evict_first")
                zeros = None if zero is None else zero + up_group + inner // GROUP
                others = _add_block(
                    others, of_x, words, of_up, zeros, n, BLOCK // RUN, offset is not None
                )
        of_groups = next_groups
        if GATED:
            of_up = next_up
    sums, others = tl.trans(sums), tl.trans(others)
    _store(
        sums,
        others,
        row,
        column,
        there,
        tile,
        split,
        out,
        partial,
        arrived,
        N,
        SPLITS,
        GATED,
        ACTIVATION,
    )


@triton.jit
def stream_row_4(
    x,
    codes,
    scale,
    zero,
    offset,
    out,
    N: tl.constexpr,
    K: tl.constexpr,
    GROUP: tl.constexpr,
    BLOCK: tl.constexpr,
    COLUMNS: tl.constexpr,
    PARTS: tl.constexpr,
    GATED: tl.constexpr,
    ACTIVATION: tl.constexpr,
    PDL: tl.constexpr,
):
    # [blocks, columns, words]: 8 words of a block are one thread's, and so are the row's numbers
    # of their nibbles, 8 in each quarter of the block. The next threads have the next blocks, so
    # that the numbers are those of all columns.
    WORDS: tl.constexpr = BLOCK // 4
    LINE: tl.constexpr = K // 4
    GROUPS: tl.constexpr = K // GROUP
    RUNS: tl.constexpr = BLOCK // GROUP if GROUP < BLOCK else 1
    column = tl.program_id(0) * COLUMNS + tl.arange(0, COLUMNS)
    part, word = tl.arange(0, PARTS)[:, None], tl.arange(0, WORDS)[None, None, :]
    # Columns past the end read the last row of the weight again, and are dropped.
    line = tl.minimum(column, N - 1).to(tl.int64)
    at = codes + (line * LINE)[None, :, None] + ((part * WORDS)[:, :, None] + word)
    group = (line * GROUPS)[None, :]
    x_at = x + (part * BLOCK)[:, :, None] + word
    HALF: tl.constexpr = N * LINE
    HALF_GROUPS: tl.constexpr = N * GROUPS
    first = tl.load(at, eviction_policy="evict_first")
    lines = _lines(scale, zero, offset, group + part * BLOCK // GROUP, RUNS)
    if GATED:
        second = tl.load(at + HALF, eviction_policy="evict_first")
        of_up = group + HALF_GROUPS + part * BLOCK // GROUP
        up_lines = _lines(scale, zero, offset, of_up, RUNS)
    if PDL:
        # What no load has asked for.
        STEP: tl.constexpr = PARTS * WORDS
        REST: tl.constexpr = LINE - STEP if LINE - STEP < 1024 else 1024
        if REST > 0:
            rest = codes + line * LINE + STEP
            fetch_to_l2(rest, REST * 2)
            if GATED:
                fetch_to_l2(rest + HALF, REST * 2)
    wait_for_previous(PDL)
    sums = tl.zeros([PARTS, COLUMNS, WORDS], tl.float32)
    others = sums
    for start in tl.range(0, K, PARTS * BLOCK):
        of_x = ()
        for n in tl.static_range(4):
            of_x += (tl.load(x_at + start + n * WORDS).to(tl.float32),)  # type: ignore[assignment]
        # The next codes are on their way while these are multiplied.
        there = start + PARTS * BLOCK < K
        ahead = tl.minimum(start + PARTS * BLOCK, K - PARTS * BLOCK)
        groups = group + (ahead + part * BLOCK) // GROUP
        next_first = tl.load(at + ahead // 4, mask=there, eviction_policy="evict_first")
        next_lines = _lines(scale, zero, offset, groups, RUNS)
        if GATED:
            next_second = tl.load(at + HALF + ahead // 4, mask=there, eviction_policy="evict_first")
            next_up_lines = _lines(scale, zero, offset, groups + HALF_GROUPS, RUNS)
            others = _add_words(others, of_x, second, up_lines, RUNS)
            second, up_lines = next_second, next_up_lines
        sums = _add_words(sums, of_x, first, lines, RUNS)
        first, lines = next_first, next_lines
    result = tl.sum(tl.sum(sums, axis=2), axis=0)
    if GATED:
        other = tl.sum(tl.sum(others, axis=2), axis=0)
        result = gate_times_up(result, other, out.dtype.element_ty, ACTIVATION)
    tl.store(out + column, result.to(out.dtype.element_ty), mask=column < N)


@triton.jit
def _lines(scale, zero, offset, at, RUNS: tl.constexpr):
    """Of each run of blocks: what codes less 8 are multiplied with, then what is added to them
    all, where it is not nothing."""
    factors, terms = (), ()
    for n in tl.static_range(RUNS):
        factor = tl.load(scale + at + n).to(tl.float32)
        factors += (factor[:, :, None],)  # type: ignore[assignment]
        if offset is not None:
            term = tl.load(offset + at + n).to(tl.float32) + 8 * factor
            terms += (term[:, :, None],)  # type: ignore[assignment]
        elif zero is not None:
            term = (8 - tl.load(zero + at + n).to(tl.float32)) * factor
            terms += (term[:, :, None],)  # type: ignore[assignment]
    return factors + terms


@triton.jit
def _add_words(sums, of_x, words, lines, RUNS: tl.constexpr):
    """Products of [blocks, columns, words] with the numbers of each nibble, added to the sums.
    `lines`: by `_lines`."""
    numbers = floats_4(words)
    for m in tl.static_range(RUNS):
        for n in tl.static_range(4 * m // RUNS, 4 * (m + 1) // RUNS):
            small = of_x[n] * (1.0, 1 / 16, 1 / 256, 1 / 4096)[n]
            if n == 4 * m // RUNS:
                product, total = numbers[n] * small, of_x[n]
            else:
                product, total = product + numbers[n] * small, total + of_x[n]
        sums += product * lines[m]
        if len(lines) > RUNS:
            sums += total * lines[RUNS + m]
    return sums


@triton.jit
def _groups(
    scale,
    offset,
    group,
    inner,
    SIZE: tl.constexpr,
    RUN: tl.constexpr,
    GROUP: tl.constexpr,
):
    """The scales of each run of SIZE numbers from `inner` on, then the offsets if they have any."""
    found, others = (), ()
    for n in tl.static_range(SIZE // RUN):
        at = inner // GROUP + n if RUN == GROUP else (inner + n * RUN) // GROUP
        found += (tl.load(scale + group + at),)  # type: ignore[assignment]
        if offset is not None:
            others += (tl.load(offset + group + at),)  # type: ignore[assignment]
    return found + others


@triton.jit
def _add_block(
    sums,
    of_x,
    words,
    of_groups,
    zeros,
    n: tl.constexpr,
    RUNS: tl.constexpr,
    OFFSETS: tl.constexpr,
):
    """The product of a step's block n, [columns, words], with the rows' numbers, added to the sums.
    `of_x`: the numbers of each of its pieces, [numbers, rows]. `zeros`: where its first run's are,
    or None."""
    numbers = whole_4(
        words,
        _zeros(zeros, 0, words),
        _zeros(zeros, RUNS // 4, words),
        _zeros(zeros, RUNS // 2, words),
        _zeros(zeros, 3 * RUNS // 4, words),
        of_x[0].dtype,
    )
    if len(of_x) < 4:
        numbers = (_joined(numbers[0], numbers[1]), _joined(numbers[2], numbers[3]))
    if len(of_x) < 2:
        numbers = (_joined(numbers[0], numbers[1]),)
    EACH: tl.constexpr = len(of_x) // RUNS
    for m in tl.static_range(RUNS):
        product = tl.zeros(sums.shape, tl.float32)
        total = product
        for i in tl.static_range(m * EACH, m * EACH + EACH):
            product = tl.dot(numbers[i], of_x[i], product)
            if OFFSETS:
                # The rows' sums, where the product has its own.
                total = tl.dot(tl.full(numbers[i].shape, 1, numbers[i].dtype), of_x[i], total)
        factor = of_groups[n * RUNS + m].to(tl.float32)
        sums += product * factor[:, None]
        if OFFSETS:
            # Of the codes, 8 was taken.
            offset = of_groups[len(of_groups) // 2 + n * RUNS + m].to(tl.float32) + 8 * factor
            sums += total * offset[:, None]
    return sums


@triton.jit
def _zeros(at, n: tl.constexpr, words):
    """What is taken from codes, shaped like their words."""
    if at is None:
        taken = tl.full(words.shape, 8, tl.float32)
    else:
        taken = tl.broadcast_to(tl.load(at + n).to(tl.float32)[:, None], words.shape)
    return taken


@triton.jit
def _joined(first, second):
    """[columns, numbers] twice → side by side; it stays in registers."""
    both = tl.permute(tl.join(first, second), (0, 2, 1))
    return tl.reshape(both, [first.shape[0], 2 * first.shape[1]])


# ── 8 bits ──────────────────────────────────────────────────────────────────────────────────


@triton.jit
def stream_row_8(
    x,
    codes,
    scale,
    zero,
    offset,
    out,
    N: tl.constexpr,
    K: tl.constexpr,
    GROUP: tl.constexpr,
    COLUMNS: tl.constexpr,
    PARTS: tl.constexpr,
    GATED: tl.constexpr,
    ACTIVATION: tl.constexpr,
    PDL: tl.constexpr,
):
    # [columns, groups, loads of a group, 2 words]: a load's words are one thread's, and so are the
    # rows' numbers, which are 16 bytes.
    LOADS: tl.constexpr = GROUP // 8
    INNER: tl.constexpr = PARTS * GROUP
    WORDS: tl.constexpr = K // 4
    GROUPS: tl.constexpr = K // GROUP
    column = tl.program_id(0) * COLUMNS + tl.arange(0, COLUMNS)
    part = tl.arange(0, PARTS)
    load = tl.arange(0, LOADS)
    # Columns past the end read the last row of the weight again, and are dropped.
    line = tl.minimum(column, N - 1).to(tl.int64)
    place = (part * (GROUP // 4))[:, None] + (load * 2)[None, :]
    place = place[:, :, None] + tl.arange(0, 2)[None, None, :]
    at = codes + (line * WORDS)[:, None, None, None] + place[None, :, :, :]
    scale_at = (line * GROUPS)[:, None] + part[None, :]
    HALF: tl.constexpr = N * WORDS
    HALF_SCALES: tl.constexpr = N * GROUPS
    first = tl.load(at, eviction_policy="evict_first")
    factor, term = group_line(scale, zero, offset, scale_at, 8)
    if GATED:
        second = tl.load(at + HALF, eviction_policy="evict_first")
        up_factor, up_term = group_line(scale, zero, offset, scale_at + HALF_SCALES, 8)
    wait_for_previous(PDL)
    inside = (part * GROUP)[:, None] + (load * 8)[None, :]
    x_at = x + inside[:, :, None] + tl.arange(0, 8)[None, None, :]
    sums = tl.zeros([COLUMNS, PARTS, LOADS], tl.float32)
    others = sums
    for start in tl.range(0, K, INNER):
        of_x = tl.load(x_at + start).to(tl.float32)
        # The next codes are on their way while these are multiplied.
        there = start + INNER < K
        ahead = (start + INNER) // 4
        groups = scale_at + tl.minimum(start + INNER, K - INNER) // GROUP
        next_first = tl.load(at + ahead, mask=there, eviction_policy="evict_first")
        next_factor, next_term = group_line(scale, zero, offset, groups, 8)
        if GATED:
            next_second = tl.load(at + HALF + ahead, mask=there, eviction_policy="evict_first")
            groups += HALF_SCALES
            next_up_factor, next_up_term = group_line(scale, zero, offset, groups, 8)
            others += _of_groups(of_x, second, up_factor, up_term)
            second, up_factor, up_term = next_second, next_up_factor, next_up_term
        sums += _of_groups(of_x, first, factor, term)
        first, factor, term = next_first, next_factor, next_term
    result = tl.sum(tl.sum(sums, axis=2), axis=1)
    if GATED:
        other = tl.sum(tl.sum(others, axis=2), axis=1)
        result = gate_times_up(result, other, out.dtype.element_ty, ACTIVATION)
    tl.store(out + column, result.to(out.dtype.element_ty), mask=column < N)


@triton.jit
def _of_groups(x, words, factor, term):
    """Products of [groups, loads, 8] numbers with [columns, groups, loads, 2] words, added up in
    each load."""
    a, b, c, d = floats_8(words)
    even, odd = tl.split(tl.reshape(x, [x.shape[0], x.shape[1], 2, 2, 2]))
    first, third = tl.split(even)
    second, fourth = tl.split(odd)
    products = first[None, :, :, :] * a + second[None, :, :, :] * b
    products += third[None, :, :, :] * c + fourth[None, :, :, :] * d
    of_x = tl.sum(x, axis=2)
    return tl.sum(products, axis=3) * factor[:, :, None] + of_x[None, :, :] * term[:, :, None]


@triton.jit(do_not_specialize=["num_rows"])
def multiply_tile_8(
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
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
    PARTS: tl.constexpr,
    SPLITS: tl.constexpr,
    WEIGHT_FIRST: tl.constexpr,
    GATED: tl.constexpr,
    ACTIVATION: tl.constexpr,
    PDL: tl.constexpr,
):
    # Numbers are scaled and rounded before they are multiplied.
    tile, split = tl.program_id(1), tl.program_id(2)
    row = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    column = tile * COLUMNS + tl.arange(0, COLUMNS)
    line = tl.minimum(column, N - 1).to(tl.int64)
    GROUPS: tl.constexpr = K // GROUP
    HALF: tl.constexpr = N * K
    HALF_SCALES: tl.constexpr = N * GROUPS
    EACH: tl.constexpr = (GROUPS // PARTS + SPLITS - 1) // SPLITS * PARTS
    inner = tl.arange(0, PARTS * GROUP)
    at = codes + (line * K)[:, None] + inner[None, :]
    x_at = x + row[:, None] * K + inner[None, :]
    scale_at = (line * GROUPS)[:, None] + tl.arange(0, PARTS)[None, :]
    there = (row < num_rows)[:, None]
    if WEIGHT_FIRST:
        sums = tl.zeros([COLUMNS, ROWS], tl.float32)
    else:
        sums = tl.zeros([ROWS, COLUMNS], tl.float32)
    others = sums
    if PDL:
        AHEAD: tl.constexpr = EACH * GROUP if EACH * GROUP < FETCHED else FETCHED
        begin = codes + line * K + tl.minimum(split * EACH * GROUP, K - AHEAD)
        fetch_to_l2(begin, AHEAD)
        if GATED:
            fetch_to_l2(begin + HALF, AHEAD)
    wait_for_previous(PDL)
    for group in tl.range(split * EACH, tl.minimum(GROUPS, (split + 1) * EACH), PARTS):
        place = scale_at + group
        # Asked for first: these loads have nothing that fetches them ahead.
        factor, term = group_line(scale, zero, offset, place, 8)
        if GATED:
            up_factor, up_term = group_line(scale, zero, offset, place + HALF_SCALES, 8)
        of_x = tl.load(x_at + group * GROUP, mask=there, other=0.0)
        first = tl.load(at + group * GROUP, eviction_policy="evict_first")
        sums = _add_scaled(sums, of_x, first, factor, term, WEIGHT_FIRST)
        if GATED:
            second = tl.load(at + HALF + group * GROUP, eviction_policy="evict_first")
            others = _add_scaled(others, of_x, second, up_factor, up_term, WEIGHT_FIRST)
    if WEIGHT_FIRST:
        sums = tl.trans(sums)
        others = tl.trans(others)
    _store(
        sums,
        others,
        row,
        column,
        there,
        tile,
        split,
        out,
        partial,
        arrived,
        N,
        SPLITS,
        GATED,
        ACTIVATION,
    )


@triton.jit
def _add_scaled(sums, x, codes, factor, term, WEIGHT_FIRST: tl.constexpr):
    """The product of [columns, codes] with the rows' numbers, added to the sums. `factor` and
    `term` are the groups', by `group_line`."""
    numbers = scaled_8(codes, _of_codes(factor, codes), _of_codes(term, codes), x.dtype)
    return dot(x, numbers, sums, WEIGHT_FIRST)


@triton.jit
def _of_codes(numbers, codes):
    """[columns, groups] → those of each code of the groups."""
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


# ── both ────────────────────────────────────────────────────────────────────────────────────


@triton.jit
def _store(
    sums,
    others,
    row,
    column,
    there,
    block,
    split,
    out,
    partial,
    arrived,
    N: tl.constexpr,
    SPLITS: tl.constexpr,
    GATED: tl.constexpr,
    ACTIVATION: tl.constexpr,
):
    """[rows, columns], which are the whole sums or a split's."""
    if SPLITS == 1:
        store_tile(sums, others, row, column, there, out, N, GATED, ACTIVATION)
    else:
        ROWS: tl.constexpr = sums.shape[0]
        COLUMNS: tl.constexpr = sums.shape[1]
        tile = tl.arange(0, ROWS)[:, None] * COLUMNS + tl.arange(0, COLUMNS)[None, :]
        AREA: tl.constexpr = ROWS * COLUMNS
        to = partial + block.to(tl.int64) * (SPLITS * AREA) + tile
        if is_last_split(sums, to, arrived, block, split, SPLITS, AREA):
            sums = sum_of_splits(to, arrived, block, SPLITS, AREA)
            store_tile(sums, sums, row, column, there, out, N, GATED, ACTIVATION)


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
    SIZE: tl.constexpr,
):
    # Of 8 bits, a word is a byte with one code.
    PARTS: tl.constexpr = 4 if BITS == 4 else 1
    WORDS: tl.constexpr = BLOCK // PARTS
    row = tl.program_id(0).to(tl.int64)
    word = tl.program_id(1) * SIZE + tl.arange(0, SIZE)
    mask = word < K // PARTS
    found = tl.load(codes + row * (K // PARTS) + word, mask=mask, other=0)
    kind: tl.constexpr = out.dtype.element_ty
    for n in tl.static_range(PARTS):
        inner = word // WORDS * BLOCK + n * WORDS + word % WORDS
        # The groups of words past the end are those of the last.
        place = row * (K // GROUP) + tl.minimum(inner // GROUP, K // GROUP - 1)
        factor, term = group_line(scale, zero, offset, place, BITS)
        code = found if PARTS == 1 else found >> (4 * n) & 15
        tl.store(out + row * K + inner, (code.to(tl.float32) * factor + term).to(kind), mask=mask)
