"""The kernels of `packed.py`: products with weights of 4 or 8 bits.

A word has four codes: an int16 with codes of 4 bits, or (one row) an int32 with codes of 8 bits. A
run is a sequence of codes of one block that share a scale: a whole block, or a group if groups are
shorter than blocks. RUNS is the number of runs in a block. Columns of the output are rows of the
weight.
"""

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
    # Tensors are [loads of a block, blocks, columns, words of a load]. A thread has all words of a
    # load, and the elements of x for their codes, 8 of which are adjacent. The compiler assigns the
    # first axes to threads first, so a thread's elements of x serve all columns.
    EACH: tl.constexpr = 8 if BITS == 4 else 2
    LOADS: tl.constexpr = BLOCK // (4 * EACH)
    LINE: tl.constexpr = K // 4
    GROUPS: tl.constexpr = K // GROUP
    RUNS: tl.constexpr = BLOCK // GROUP if GROUP < BLOCK else 1
    STEP: tl.constexpr = PARTS * BLOCK
    column = tl.program_id(0) * COLUMNS + tl.arange(0, COLUMNS)
    part, load = tl.arange(0, PARTS), tl.arange(0, LOADS)
    # Columns past the end load the last row of the weight instead; their results are not stored.
    line = tl.minimum(column, N - 1).to(tl.int64)
    word = (load * EACH)[:, None, None, None] + tl.arange(0, EACH)[None, None, None, :]
    at = (part * (BLOCK // 4))[None, :, None, None] + word
    at = codes + (line * LINE)[None, None, :, None] + at
    x_offset = (load * 8)[:, None, None, None] + tl.arange(0, 8)[None, None, None, :]
    x_at = x + (part * BLOCK)[None, :, None, None] + x_offset
    # Each load reads its block's scales, so that scales and sums have the same layout.
    group = tl.zeros([LOADS, 1, 1], tl.int64) + (line * GROUPS)[None, None, :]
    HALF: tl.constexpr = N * LINE
    HALF_GROUPS: tl.constexpr = N * GROUPS
    # The loads of DEPTH steps are in flight at any time.
    loaded, up_loaded = (), ()
    for n in tl.static_range(DEPTH):
        start, groups = n * STEP, _group_indices(n * STEP, part, K - STEP, BLOCK, GROUP)
        found = _load_step(at, scale, zero, offset, group + groups, start, K, RUNS)
        loaded += (found,)  # type: ignore[assignment]
        if GATED:
            groups += HALF_GROUPS
            found = _load_step(at + HALF, scale, zero, offset, group + groups, start, K, RUNS)
            up_loaded += (found,)  # type: ignore[assignment]
    wait_for_previous(DEPENDENT)
    sums = tl.zeros([LOADS, PARTS, COLUMNS], tl.float32)
    others = sums
    for begin in tl.range(0, K, DEPTH * STEP):
        next_loaded, next_up_loaded = (), ()
        for n in tl.static_range(DEPTH):
            here = begin + n * STEP
            x_parts = _load_x(x_at, here, K, BITS, BLOCK)
            sums = _add_step(sums, x_parts, loaded[n], offset is not None, BITS, RUNS)
            if GATED:
                others = _add_step(others, x_parts, up_loaded[n], offset is not None, BITS, RUNS)
            start = here + DEPTH * STEP
            groups = _group_indices(start, part, K - STEP, BLOCK, GROUP)
            found = _load_step(at, scale, zero, offset, group + groups, start, K, RUNS)
            next_loaded += (found,)  # type: ignore[assignment]
            if GATED:
                groups += HALF_GROUPS
                found = _load_step(at + HALF, scale, zero, offset, group + groups, start, K, RUNS)
                next_up_loaded += (found,)  # type: ignore[assignment]
        loaded, up_loaded = next_loaded, next_up_loaded
    result = tl.sum(tl.sum(sums, axis=0), axis=0)
    if GATED:
        other = tl.sum(tl.sum(others, axis=0), axis=0)
        result = gate_times_up(result, other, out.dtype.element_ty, ACTIVATION)
    tl.store(out + column, result.to(out.dtype.element_ty), mask=column < N)


@triton.jit
def _group_indices(start, part, LAST: tl.constexpr, BLOCK: tl.constexpr, GROUP: tl.constexpr):
    """Return the group of the first code of each block of the step, [1, blocks, 1]."""
    groups = (tl.minimum(start, LAST) + part * BLOCK) // GROUP
    # Prevents vector loads of the scales, which would put them in other threads than the codes.
    return tl.max_contiguous(groups[None, :, None], [1, 1, 1])


@triton.jit
def _load_step(at, scale, zero, offset, groups, start, K: tl.constexpr, RUNS: tl.constexpr):
    """Load the codes of the step at `start`, their scales, and their zeros or offsets. Past the end
    of K the values are arbitrary, and `_load_x` returns 0."""
    words = tl.load(at + start // 4, mask=start < K, other=0, eviction_policy="evict_first")
    if RUNS > 1:
        groups = groups[:, :, :, None] + tl.arange(0, RUNS)[None, None, None, :]
    found = (words, tl.load(scale + groups))
    if offset is not None:
        found += (tl.load(offset + groups),)  # type: ignore[assignment]
    elif zero is not None:
        found += (tl.load(zero + groups),)  # type: ignore[assignment]
    return found


@triton.jit
def _load_x(x_at, here, K: tl.constexpr, BITS: tl.constexpr, BLOCK: tl.constexpr):
    """Load the elements of x for the first, second, third and fourth codes of the words, each
    [loads, blocks, 1, words]."""
    if BITS == 4:
        found = ()
        for n in tl.static_range(4):
            numbers = tl.load(x_at + here + n * (BLOCK // 4), mask=here < K, other=0.0)
            found += (numbers.to(tl.float32),)  # type: ignore[assignment]
    else:
        numbers = tl.load(x_at + here, mask=here < K, other=0.0).to(tl.float32)
        shape: tl.constexpr = [x_at.shape[0], x_at.shape[1], 1, 2, 2, 2]
        found = _split_in_four(tl.reshape(numbers, shape))
    return found


@triton.jit
def _add_step(sums, x_parts, data, OFFSETS: tl.constexpr, BITS: tl.constexpr, RUNS: tl.constexpr):
    """Add the products of the codes of a step with x to the sums. `x_parts`: by `_load_x`.
    `data`: by `_load_step`."""
    numbers = floats_4(data[0]) if BITS == 4 else floats_8(data[0])
    factors = data[1].to(tl.float32)
    if OFFSETS:
        terms = data[2].to(tl.float32)
    elif len(data) > 2:
        terms = -factors * data[2].to(tl.float32)
    else:
        terms = -(1 << (BITS - 1)) * factors
    factors, terms = _split_runs(factors, RUNS), _split_runs(terms, RUNS)
    # `floats_4` and `floats_8` return code + ABOVE.
    ABOVE: tl.constexpr = (2048.0, 128.0) if BITS == 4 else (32768.0, 32768.0)
    for m in tl.static_range(RUNS):
        for n in tl.static_range(4 * m // RUNS, 4 * (m + 1) // RUNS):
            product, total = numbers[n] * x_parts[n], tl.sum(x_parts[n], axis=3)
            if n == 4 * m // RUNS:
                products, totals, above_sums = product, total, ABOVE[n % 2] * total
            else:
                products, totals = products + product, totals + total
                above_sums += ABOVE[n % 2] * total
        sums += (tl.sum(products, axis=3) - above_sums) * factors[m] + totals * terms[m]
    return sums


@triton.jit
def _split_runs(numbers, RUNS: tl.constexpr):
    """Split […, runs] into one tensor for each run; a single run is returned as it is."""
    if RUNS == 1:
        found = (numbers,)
    elif RUNS == 2:
        found = tl.split(numbers)
    else:
        shape: tl.constexpr = [numbers.shape[0], numbers.shape[1], numbers.shape[2], 2, 2]
        found = _split_in_four(tl.reshape(numbers, shape))
    return found


@triton.jit
def _split_in_four(numbers):
    """Split […, 2, 2] into four tensors."""
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
    # The weight is the left operand, because only the left operand may be in registers, where the
    # kernel converts the codes. Hopper's tensor cores take 64 columns and at least 8 rows. If
    # GATED, the tile has the columns of gate, then those of up.
    tile, split = tl.program_id(1), tl.program_id(2)
    row = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    column = tile * COLUMNS + tl.arange(0, COLUMNS)
    LINES: tl.constexpr = 2 * COLUMNS if GATED else COLUMNS
    number = tl.arange(0, LINES)
    # Columns past the end load the last row of the weight instead; their results are not stored.
    line = tl.minimum(tile * COLUMNS + number % COLUMNS, N - 1) + number // COLUMNS * N
    line = line.to(tl.int64)
    WORDS: tl.constexpr = BLOCK // 4
    BLOCKS: tl.constexpr = K // BLOCK
    # Codes of a run.
    RUN: tl.constexpr = GROUP if GROUP < BLOCK else BLOCK
    RUNS: tl.constexpr = BLOCK // RUN
    # Elements of K of one product: with Hopper's instructions as many as possible, because the
    # compiler waits for each product; otherwise those of one nibble, which need no moves.
    HOPPER: tl.constexpr = LINES >= 64 and ROWS >= 16
    PIECE: tl.constexpr = BLOCK if SCALED else RUN if HOPPER else WORDS
    EACH: tl.constexpr = (BLOCKS // STEP + SPLITS - 1) // SPLITS * STEP
    at = codes + (line * (BLOCKS * WORDS))[:, None] + tl.arange(0, WORDS)[None, :]
    x_at = x + row[:, None] * K + tl.arange(0, PIECE)[None, :]
    is_row = (row < num_rows)[:, None]
    sums = tl.zeros([LINES, ROWS], tl.float32)
    begin, end = split * EACH, tl.minimum(BLOCKS, (split + 1) * EACH)
    if DEPENDENT:
        AHEAD: tl.constexpr = EACH * WORDS if EACH * WORDS * 2 < FETCHED else FETCHED // 2
        first = codes + line * (BLOCKS * WORDS)
        fetch_to_l2(first + tl.minimum(begin * WORDS, BLOCKS * WORDS - AHEAD), AHEAD * 2)
    # Scales are loaded one step ahead, because no other load prefetches them.
    group = line * (K // GROUP)
    ahead = tl.minimum(begin, BLOCKS - STEP) * BLOCK
    of_groups = _groups(scale, offset, group, ahead, STEP, BLOCK, GROUP, SCALED)
    wait_for_previous(DEPENDENT)
    for start in tl.range(begin, end, STEP):
        ahead = tl.minimum(start + STEP, BLOCKS - STEP) * BLOCK
        next_groups = _groups(scale, offset, group, ahead, STEP, BLOCK, GROUP, SCALED)
        for n in tl.static_range(STEP):
            inner = (start + n) * BLOCK
            x_parts = ()
            for m in tl.static_range(BLOCK // PIECE):
                piece = tl.load(x_at + inner + m * PIECE, mask=is_row, other=0.0)
                x_parts += (tl.trans(piece),)  # type: ignore[assignment]
            words = tl.load(at + inner // 4, eviction_policy="evict_first")
            zeros = None if zero is None else zero + group + inner // GROUP
            if SCALED:
                numbers = _subtract_zeros(words, zeros, RUNS, x.dtype.element_ty)
                numbers = _scaled(numbers, of_groups, n, STEP)
                sums = tl.dot(numbers, x_parts[0], sums)  # type: ignore[misc]
            else:
                sums = _add_block(sums, x_parts, words, of_groups, zeros, n, RUNS)
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
        is_row,
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
    """Load the scales of STEP blocks from `inner` on, one tensor [columns] for each run. If codes
    are scaled before the product, and blocks have several runs or offsets: one tensor
    [columns, runs] for each block, then the same for the offsets."""
    RUNS: tl.constexpr = BLOCK // GROUP if GROUP < BLOCK else 1
    found, others = (), ()
    for n in tl.static_range(STEP):
        at = group + (inner + n * BLOCK) // GROUP
        if SCALED and (RUNS > 1 or offset is not None):
            groups = at[:, None] + tl.arange(0, RUNS)[None, :]
            found += (tl.load(scale + groups),)  # type: ignore[assignment]
            if offset is not None:
                others += (tl.load(offset + groups),)  # type: ignore[assignment]
        else:
            for m in tl.static_range(RUNS):
                found += (tl.load(scale + at + m),)  # type: ignore[assignment]
    return found + others


@triton.jit
def _add_block(sums, x_parts, words, of_groups, zeros, n: tl.constexpr, RUNS: tl.constexpr):
    """Add the product of block n of a step, [columns, words], with x to the sums, with the scale of
    each run. `x_parts`: the elements of x for each piece of the block, [elements, rows]. `zeros`:
    the addresses of the zeros of the first run, or None."""
    numbers = _join(_subtract_zeros(words, zeros, RUNS, x_parts[0].dtype), len(x_parts))
    EACH: tl.constexpr = len(x_parts) // RUNS
    for m in tl.static_range(RUNS):
        product = tl.zeros(sums.shape, tl.float32)
        for i in tl.static_range(m * EACH, m * EACH + EACH):
            product = tl.dot(numbers[i], x_parts[i], product)
        sums += product * of_groups[n * RUNS + m].to(tl.float32)[:, None]
    return sums


@triton.jit
def _scaled(numbers, of_groups, n: tl.constexpr, STEP: tl.constexpr):
    """Return the scaled elements of block n of a step, [columns, elements]. `numbers`: code − 8 for
    each of the four nibbles, [columns, words]."""
    factor, terms = of_groups[n].to(tl.float32), None
    dtype: tl.constexpr = numbers[0].dtype
    if len(factor.shape) == 1:
        factors = tl.broadcast_to(factor.to(dtype)[:, None], numbers[0].shape)
        scaled = ()
        for m in tl.static_range(4):
            scaled += (scaled_4(numbers[m], factors, None),)  # type: ignore[assignment]
        block = _join(scaled, 1)[0]
    else:
        block = _join(numbers, 1)[0]
        if len(of_groups) > STEP:
            term = of_groups[STEP + n].to(tl.float32) + 8 * factor
            terms = _per_code(term.to(dtype), block)
        block = scaled_4(block, _per_code(factor.to(dtype), block), terms)
    return block


@triton.jit
def _subtract_zeros(words, zeros, RUNS: tl.constexpr, dtype: tl.constexpr):
    """Return code − zero for each of the four nibbles, [columns, words]."""
    return whole_4(
        words,
        _load_zeros(zeros, 0, words),
        _load_zeros(zeros, RUNS // 4, words),
        _load_zeros(zeros, RUNS // 2, words),
        _load_zeros(zeros, 3 * RUNS // 4, words),
        dtype,
    )


@triton.jit
def _join(numbers, COUNT: tl.constexpr):
    """Concatenate the four nibbles' tensors along the columns of the block into COUNT tensors."""
    if COUNT < 4:
        numbers = (
            _join_pair(numbers[0], numbers[1]),
            _join_pair(numbers[2], numbers[3]),
        )
    if COUNT < 2:
        numbers = (_join_pair(numbers[0], numbers[1]),)
    return numbers


@triton.jit
def _load_zeros(at, n: tl.constexpr, words):
    """Return the zeros that are subtracted from codes, in the shape of the codes' words."""
    if at is None:
        taken = tl.full(words.shape, 8, tl.float32)
    else:
        taken = tl.broadcast_to(tl.load(at + n).to(tl.float32)[:, None], words.shape)
    return taken


@triton.jit
def _join_pair(first, second):
    """Concatenate two tensors [columns, n] to [columns, 2n], without moves between threads."""
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
    # Codes are scaled and rounded before the product.
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
    is_row = (row < num_rows)[:, None]
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
        # The scales are loaded first, because no other load prefetches them.
        factor, term = group_line(scale, zero, offset, place, 8)
        if GATED:
            up_factor, up_term = group_line(scale, zero, offset, place + HALF_SCALES, 8)
        x_parts = tl.load(x_at + group * GROUP, mask=is_row, other=0.0)
        first = tl.load(at + group * GROUP, eviction_policy="evict_first")
        sums = _add_scaled(sums, x_parts, first, factor, term, WEIGHT_FIRST)
        if GATED:
            second = tl.load(at + HALF + group * GROUP, eviction_policy="evict_first")
            others = _add_scaled(others, x_parts, second, up_factor, up_term, WEIGHT_FIRST)
    if WEIGHT_FIRST:
        sums = tl.trans(sums)
        others = tl.trans(others)
    _store(
        sums,
        others,
        row,
        column,
        is_row,
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
    """Add the product of the codes, [columns, codes], with x to the sums. `factor` and `term`: by
    `group_line`."""
    numbers = scaled_8(codes, _per_code(factor, codes), _per_code(term, codes), x.dtype)
    return dot(x, numbers, sums, WEIGHT_FIRST, True)


@triton.jit
def _per_code(numbers, codes):
    """Repeat [columns, groups] for each code of the groups."""
    if numbers.shape[1] == 1:
        repeated = tl.broadcast_to(numbers, codes.shape)
    else:
        shape: tl.constexpr = [
            codes.shape[0],
            numbers.shape[1],
            codes.shape[1] // numbers.shape[1],
        ]
        repeated = tl.reshape(tl.broadcast_to(numbers[:, :, None], shape), codes.shape)
    return repeated


# ── both ────────────────────────────────────────────────────────────────────────────────────


@triton.jit
def _store(
    sums,
    others,
    row,
    column,
    is_row,
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
    """Store a tile [rows, columns]. With SPLITS > 1 the sums are those of one split."""
    if SPLITS == 1:
        store_tile(sums, others, row, column, is_row, out, N, GATED, ACTIVATION)
    else:
        ROWS: tl.constexpr = sums.shape[0]
        COLUMNS: tl.constexpr = sums.shape[1]
        tile = tl.arange(0, ROWS)[:, None] * COLUMNS + tl.arange(0, COLUMNS)[None, :]
        AREA: tl.constexpr = ROWS * COLUMNS
        to = partial + block.to(tl.int64) * (SPLITS * AREA) + tile
        if is_last_split(sums, to, arrived, block, split, SPLITS, AREA):
            sums = sum_of_splits(to, arrived, block, SPLITS, AREA)
            store_tile(sums, sums, row, column, is_row, out, N, GATED, ACTIVATION)


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
    # With 8 bits, a word here is a byte with one code.
    PARTS: tl.constexpr = 4 if BITS == 4 else 1
    WORDS: tl.constexpr = BLOCK // PARTS
    row = tl.program_id(0).to(tl.int64)
    word = tl.program_id(1) * SIZE + tl.arange(0, SIZE)
    mask = word < K // PARTS
    found = tl.load(codes + row * (K // PARTS) + word, mask=mask, other=0)
    dtype: tl.constexpr = out.dtype.element_ty
    for n in tl.static_range(PARTS):
        inner = word // WORDS * BLOCK + n * WORDS + word % WORDS
        # Words past the end load the scale of the last group.
        place = row * (K // GROUP) + tl.minimum(inner // GROUP, K // GROUP - 1)
        factor, term = group_line(scale, zero, offset, place, BITS)
        code = found if PARTS == 1 else found >> (4 * n) & 15
        tl.store(out + row * K + inner, (code.to(tl.float32) * factor + term).to(dtype), mask=mask)
