"""The kernels of `packed.py`: weights of 4 or 8 bits in groups that share a scale."""

from __future__ import annotations

import triton
import triton.language as tl

from twostroke.kernels.cuda.dependent_launch import fetch_to_l2, wait_for_previous
from twostroke.kernels.cuda.elementwise import gate_times_up
from twostroke.kernels.cuda.packed_codes import (
    floats_4,
    floats_8,
    group_line,
    scaled_4,
    scaled_8,
    whole_4,
)
from twostroke.kernels.cuda.tiles import (
    FETCHED,
    dot,
    is_last_split,
    store_tile,
    sum_of_splits,
)

# ── one row ─────────────────────────────────────────────────────────────────────────────────


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
    BLOCK: tl.constexpr,
    COLUMNS: tl.constexpr,
    PARTS: tl.constexpr,
    DEPTH: tl.constexpr,
    GATED: tl.constexpr,
    ACTIVATION: tl.constexpr,
    DEPENDENT: tl.constexpr,
):
    # [loads of a block, blocks, columns, words]: a load's words are one thread's, four codes each,
    # and so are the row's numbers of these codes, 8 of them neighbours. The next threads have the
    # next loads and blocks, as the compiler gives the first axes to threads first, so that the
    # numbers are those of all columns.
    EACH: tl.constexpr = 8 if BITS == 4 else 2
    LOADS: tl.constexpr = BLOCK // (4 * EACH)
    LINE: tl.constexpr = K // 4
    GROUPS: tl.constexpr = K // GROUP
    RUNS: tl.constexpr = BLOCK // GROUP if GROUP < BLOCK else 1
    STEP: tl.constexpr = PARTS * BLOCK
    column = tl.program_id(0) * COLUMNS + tl.arange(0, COLUMNS)
    part, load = tl.arange(0, PARTS), tl.arange(0, LOADS)
    # Columns past the end read the last row of the weight again, and are dropped.
    line = tl.minimum(column, N - 1).to(tl.int64)
    word = (load * EACH)[:, None, None, None] + tl.arange(0, EACH)[None, None, None, :]
    at = (part * (BLOCK // 4))[None, :, None, None] + word
    at = codes + (line * LINE)[None, None, :, None] + at
    near = (load * 8)[:, None, None, None] + tl.arange(0, 8)[None, None, None, :]
    x_at = x + (part * BLOCK)[None, :, None, None] + near
    # Each load's own scales, though they are those of its block: so they are where the sums are.
    group = tl.zeros([LOADS, 1, 1], tl.int64) + (line * GROUPS)[None, None, :]
    HALF: tl.constexpr = N * LINE
    HALF_GROUPS: tl.constexpr = N * GROUPS
    # DEPTH steps are on their way at any time.
    held, up_held = (), ()
    for n in tl.static_range(DEPTH):
        start, places = n * STEP, _places(n * STEP, part, K - STEP, BLOCK, GROUP)
        found = _asked(at, scale, zero, offset, group + places, start, K, RUNS)
        held += (found,)  # type: ignore[assignment]
        if GATED:
            places += HALF_GROUPS
            found = _asked(at + HALF, scale, zero, offset, group + places, start, K, RUNS)
            up_held += (found,)  # type: ignore[assignment]
    wait_for_previous(DEPENDENT)
    sums = tl.zeros([LOADS, PARTS, COLUMNS], tl.float32)
    others = sums
    for begin in tl.range(0, K, DEPTH * STEP):
        fresh, up_fresh = (), ()
        for n in tl.static_range(DEPTH):
            here = begin + n * STEP
            of_x = _numbers_of_row(x_at, here, K, BITS, BLOCK)
            sums = _add_step(sums, of_x, held[n], offset is not None, BITS, RUNS)
            if GATED:
                others = _add_step(others, of_x, up_held[n], offset is not None, BITS, RUNS)
            start = here + DEPTH * STEP
            places = _places(start, part, K - STEP, BLOCK, GROUP)
            found = _asked(at, scale, zero, offset, group + places, start, K, RUNS)
            fresh += (found,)  # type: ignore[assignment]
            if GATED:
                places += HALF_GROUPS
                found = _asked(at + HALF, scale, zero, offset, group + places, start, K, RUNS)
                up_fresh += (found,)  # type: ignore[assignment]
        held, up_held = fresh, up_fresh
    result = tl.sum(tl.sum(sums, axis=0), axis=0)
    if GATED:
        other = tl.sum(tl.sum(others, axis=0), axis=0)
        result = gate_times_up(result, other, out.dtype.element_ty, ACTIVATION)
    tl.store(out + column, result.to(out.dtype.element_ty), mask=column < N)


@triton.jit
def _places(start, part, LAST: tl.constexpr, BLOCK: tl.constexpr, GROUP: tl.constexpr):
    """The groups that the step's blocks begin with, [1, blocks, 1]."""
    places = (tl.minimum(start, LAST) + part * BLOCK) // GROUP
    # Not loaded as neighbours, which would be in other threads than the codes.
    return tl.max_contiguous(places[None, :, None], [1, 1, 1])


@triton.jit
def _asked(at, scale, zero, offset, places, start, K: tl.constexpr, RUNS: tl.constexpr):
    """Load the codes of the step from `start` on, their groups' scales, and zeros or offsets. Past
    the end of K these are arbitrary; they are multiplied by 0."""
    words = tl.load(at + start // 4, mask=start < K, other=0, eviction_policy="evict_first")
    if RUNS > 1:
        places = places[:, :, :, None] + tl.arange(0, RUNS)[None, None, None, :]
    found = (words, tl.load(scale + places))
    if offset is not None:
        found += (tl.load(offset + places),)  # type: ignore[assignment]
    elif zero is not None:
        found += (tl.load(zero + places),)  # type: ignore[assignment]
    return found


@triton.jit
def _numbers_of_row(x_at, here, K: tl.constexpr, BITS: tl.constexpr, BLOCK: tl.constexpr):
    """Load the row's numbers for the words' first codes, [loads, blocks, 1, words], and for their
    second, third and fourth codes."""
    if BITS == 4:
        found = ()
        for n in tl.static_range(4):
            numbers = tl.load(x_at + here + n * (BLOCK // 4), mask=here < K, other=0.0)
            found += (numbers.to(tl.float32),)  # type: ignore[assignment]
    else:
        numbers = tl.load(x_at + here, mask=here < K, other=0.0).to(tl.float32)
        shape: tl.constexpr = [x_at.shape[0], x_at.shape[1], 1, 2, 2, 2]
        found = _fourths(tl.reshape(numbers, shape))
    return found


@triton.jit
def _add_step(sums, of_x, asked, OFFSETS: tl.constexpr, BITS: tl.constexpr, RUNS: tl.constexpr):
    """Products of [loads, blocks, columns, words] with the numbers of each of a word's codes, added
    to the sums. `asked`: by `_asked`."""
    numbers = floats_4(asked[0]) if BITS == 4 else floats_8(asked[0])
    factors = asked[1].to(tl.float32)
    if OFFSETS:
        terms = asked[2].to(tl.float32)
    elif len(asked) > 2:
        terms = -factors * asked[2].to(tl.float32)
    else:
        terms = -(1 << (BITS - 1)) * factors
    factors, terms = _of_runs(factors, RUNS), _of_runs(terms, RUNS)
    # What the floats have above their codes.
    ABOVE: tl.constexpr = (2048.0, 128.0) if BITS == 4 else (32768.0, 32768.0)
    for m in tl.static_range(RUNS):
        for n in tl.static_range(4 * m // RUNS, 4 * (m + 1) // RUNS):
            product, total = numbers[n] * of_x[n], tl.sum(of_x[n], axis=3)
            if n == 4 * m // RUNS:
                products, totals, lifted = product, total, ABOVE[n % 2] * total
            else:
                products, totals = products + product, totals + total
                lifted += ABOVE[n % 2] * total
        sums += (tl.sum(products, axis=3) - lifted) * factors[m] + totals * terms[m]
    return sums


@triton.jit
def _of_runs(numbers, RUNS: tl.constexpr):
    """Split […, runs] into one tensor for each run; a single run is returned as it is."""
    if RUNS == 1:
        found = (numbers,)
    elif RUNS == 2:
        found = tl.split(numbers)
    else:
        shape: tl.constexpr = [numbers.shape[0], numbers.shape[1], numbers.shape[2], 2, 2]
        found = _fourths(tl.reshape(numbers, shape))
    return found


@triton.jit
def _fourths(numbers):
    """[…, 2, 2] → each of the four."""
    even, odd = tl.split(numbers)
    first, third = tl.split(even)
    second, fourth = tl.split(odd)
    return first, second, third, fourth


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
    SCALED: tl.constexpr,
    GATED: tl.constexpr,
    ACTIVATION: tl.constexpr,
    DEPENDENT: tl.constexpr,
):
    # The weight is the left operand: its numbers are made in registers, where that one may be, and
    # 64 columns are what the matrix units of Hopper take, with 8 rows or more. A gated pair's
    # columns are one tile, the gate's before the up's.
    tile, split = tl.program_id(1), tl.program_id(2)
    row = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    column = tile * COLUMNS + tl.arange(0, COLUMNS)
    LINES: tl.constexpr = 2 * COLUMNS if GATED else COLUMNS
    number = tl.arange(0, LINES)
    # Columns past the end read the last row of the weight again, and are dropped.
    line = tl.minimum(tile * COLUMNS + number % COLUMNS, N - 1) + number // COLUMNS * N
    line = line.to(tl.int64)
    WORDS: tl.constexpr = BLOCK // 4
    BLOCKS: tl.constexpr = K // BLOCK
    # Numbers of a block that have one scale.
    RUN: tl.constexpr = GROUP if GROUP < BLOCK else BLOCK
    RUNS: tl.constexpr = BLOCK // RUN
    # Numbers of one product: as many as there may be where the instructions are Hopper's own (the
    # compiler waits for each product), else those of one nibble, which the others' take without
    # moves.
    HOPPER: tl.constexpr = LINES >= 64 and ROWS >= 16
    PIECE: tl.constexpr = BLOCK if SCALED else RUN if HOPPER else WORDS
    EACH: tl.constexpr = (BLOCKS // STEP + SPLITS - 1) // SPLITS * STEP
    at = codes + (line * (BLOCKS * WORDS))[:, None] + tl.arange(0, WORDS)[None, :]
    x_at = x + row[:, None] * K + tl.arange(0, PIECE)[None, :]
    there = (row < num_rows)[:, None]
    sums = tl.zeros([LINES, ROWS], tl.float32)
    begin, end = split * EACH, tl.minimum(BLOCKS, (split + 1) * EACH)
    if DEPENDENT:
        AHEAD: tl.constexpr = EACH * WORDS if EACH * WORDS * 2 < FETCHED else FETCHED // 2
        first = codes + line * (BLOCKS * WORDS)
        fetch_to_l2(first + tl.minimum(begin * WORDS, BLOCKS * WORDS - AHEAD), AHEAD * 2)
    # Scales are asked for a step ahead, as nothing else fetches them.
    group = line * (K // GROUP)
    ahead = tl.minimum(begin, BLOCKS - STEP) * BLOCK
    of_groups = _groups(scale, offset, group, ahead, STEP, BLOCK, GROUP, SCALED)
    wait_for_previous(DEPENDENT)
    for start in tl.range(begin, end, STEP):
        ahead = tl.minimum(start + STEP, BLOCKS - STEP) * BLOCK
        next_groups = _groups(scale, offset, group, ahead, STEP, BLOCK, GROUP, SCALED)
        for n in tl.static_range(STEP):
            inner = (start + n) * BLOCK
            of_x = ()
            for m in tl.static_range(BLOCK // PIECE):
                piece = tl.load(x_at + inner + m * PIECE, mask=there, other=0.0)
                of_x += (tl.trans(piece),)  # type: ignore[assignment]
            words = tl.load(at + inner // 4, eviction_policy="evict_first")
            zeros = None if zero is None else zero + group + inner // GROUP
            if SCALED:
                numbers = _whole(words, zeros, RUNS, x.dtype.element_ty)
                numbers = _scaled(numbers, of_groups, n, STEP)
                sums = tl.dot(numbers, of_x[0], sums)  # type: ignore[misc]
            else:
                sums = _add_block(sums, of_x, words, of_groups, zeros, n, RUNS)
        of_groups = next_groups
    if GATED:
        both = tl.permute(tl.reshape(sums, [2, COLUMNS, ROWS]), (2, 1, 0))
        sums, others = tl.split(both)
    else:
        sums = tl.trans(sums)
        others = sums
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
def _groups(
    scale,
    offset,
    group,
    inner,
    STEP: tl.constexpr,
    BLOCK: tl.constexpr,
    GROUP: tl.constexpr,
    SCALED: tl.constexpr,
):
    """The scales of each run of STEP blocks from `inner` on; or where numbers are scaled first and
    blocks have several, or offsets, all of each block, [columns, runs], and then the offsets."""
    RUNS: tl.constexpr = BLOCK // GROUP if GROUP < BLOCK else 1
    found, others = (), ()
    for n in tl.static_range(STEP):
        at = group + (inner + n * BLOCK) // GROUP
        if SCALED and (RUNS > 1 or offset is not None):
            places = at[:, None] + tl.arange(0, RUNS)[None, :]
            found += (tl.load(scale + places),)  # type: ignore[assignment]
            if offset is not None:
                others += (tl.load(offset + places),)  # type: ignore[assignment]
        else:
            for m in tl.static_range(RUNS):
                found += (tl.load(scale + at + m),)  # type: ignore[assignment]
    return found + others


@triton.jit
def _add_block(sums, of_x, words, of_groups, zeros, n: tl.constexpr, RUNS: tl.constexpr):
    """The product of a step's block n, [columns, words], with the rows' numbers, added to the sums,
    each run's scaled. `of_x`: the numbers of each of its pieces, [numbers, rows]. `zeros`: where
    its first run's are, or None."""
    numbers = _pieces(_whole(words, zeros, RUNS, of_x[0].dtype), len(of_x))
    EACH: tl.constexpr = len(of_x) // RUNS
    for m in tl.static_range(RUNS):
        product = tl.zeros(sums.shape, tl.float32)
        for i in tl.static_range(m * EACH, m * EACH + EACH):
            product = tl.dot(numbers[i], of_x[i], product)
        sums += product * of_groups[n * RUNS + m].to(tl.float32)[:, None]
    return sums


@triton.jit
def _scaled(numbers, of_groups, n: tl.constexpr, STEP: tl.constexpr):
    """A step's block n, of each nibble [columns, numbers], of which 8 was taken → all of it side by
    side, times its groups' scales."""
    factor, terms = of_groups[n].to(tl.float32), None
    kind: tl.constexpr = numbers[0].dtype
    if len(factor.shape) == 1:
        factors = tl.broadcast_to(factor.to(kind)[:, None], numbers[0].shape)
        scaled = ()
        for m in tl.static_range(4):
            scaled += (scaled_4(numbers[m], factors, None),)  # type: ignore[assignment]
        block = _pieces(scaled, 1)[0]
    else:
        block = _pieces(numbers, 1)[0]
        if len(of_groups) > STEP:
            term = of_groups[STEP + n].to(tl.float32) + 8 * factor
            terms = _of_codes(term.to(kind), block)
        block = scaled_4(block, _of_codes(factor.to(kind), block), terms)
    return block


@triton.jit
def _whole(words, zeros, RUNS: tl.constexpr, kind: tl.constexpr):
    """code − zero of each nibble."""
    return whole_4(
        words,
        _zeros(zeros, 0, words),
        _zeros(zeros, RUNS // 4, words),
        _zeros(zeros, RUNS // 2, words),
        _zeros(zeros, 3 * RUNS // 4, words),
        kind,
    )


@triton.jit
def _pieces(numbers, COUNT: tl.constexpr):
    """Join the four nibbles into `n` tensors, side by side."""
    if COUNT < 4:
        numbers = (_joined(numbers[0], numbers[1]), _joined(numbers[2], numbers[3]))
    if COUNT < 2:
        numbers = (_joined(numbers[0], numbers[1]),)
    return numbers


@triton.jit
def _zeros(at, n: tl.constexpr, words):
    """Return the zeros that are subtracted from codes, in the shape of the codes' words."""
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
    DEPENDENT: tl.constexpr,
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
    if DEPENDENT:
        AHEAD: tl.constexpr = EACH * GROUP if EACH * GROUP < FETCHED else FETCHED
        begin = codes + line * K + tl.minimum(split * EACH * GROUP, K - AHEAD)
        fetch_to_l2(begin, AHEAD)
        if GATED:
            fetch_to_l2(begin + HALF, AHEAD)
    wait_for_previous(DEPENDENT)
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
    return dot(x, numbers, sums, WEIGHT_FIRST, True)


@triton.jit
def _of_codes(numbers, codes):
    """Repeat [columns, groups] for each code of the groups."""
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
    """Store [rows, columns], which are the whole sums or those of a split."""
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
