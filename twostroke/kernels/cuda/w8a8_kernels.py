"""The kernels of `w8a8.py`: products with weights in e4m3 or int8."""

from __future__ import annotations

import triton
import triton.language as tl

from twostroke.kernels.cuda.dependent_launch import fetch_to_l2, wait_for_previous
from twostroke.kernels.cuda.elementwise import gate_times_up, quantised_rows
from twostroke.kernels.cuda.tiles import (
    ASM,
    FETCHED,
    dot,
    is_last_split,
    store_tile,
    sum_of_splits,
)

# ── exact conversions of 8-bit numbers to wider floats ──────────────────────────────────────

# Four numbers of int8. For fp32 and fp16 the sign bit is flipped, which adds 128, and the byte goes
# into the low mantissa bits of a power of two; then the power of two and 128 are subtracted. The
# mantissa of bf16 has only seven bits, so the sign bit selects the subtrahend, 128 or 256.
INT8_F32 = """{
.reg .b32 u;
xor.b32 u, $4, 0x80808080;
prmt.b32 $0, u, 0x4B, 0x4550;
prmt.b32 $1, u, 0x4B, 0x4551;
prmt.b32 $2, u, 0x4B, 0x4552;
prmt.b32 $3, u, 0x4B, 0x4553;
add.rn.f32 $0, $0, 0fCB000080;
add.rn.f32 $1, $1, 0fCB000080;
add.rn.f32 $2, $2, 0fCB000080;
add.rn.f32 $3, $3, 0fCB000080;
}"""
INT8_F16 = """{
.reg .b32 u, a, b, one, off;
xor.b32 u, $2, 0x80808080;
mov.b32 one, 0x3C003C00;
mov.b32 off, 0xE480E480;
prmt.b32 a, u, 0x64, 0x4140;
prmt.b32 b, u, 0x64, 0x4342;
fma.rn.f16x2 $0, a, one, off;
fma.rn.f16x2 $1, b, one, off;
}"""
INT8_BF16 = """{
.reg .b32 a, b, x, y, one;
mov.b32 one, 0x3F803F80;
prmt.b32 a, $2, 0, 0x4140;
prmt.b32 b, $2, 0, 0x4342;
lop3.b32 x, a, 0x007F007F, 0x43004300, 0xEA;
lop3.b32 y, b, 0x007F007F, 0x43004300, 0xEA;
lop3.b32 a, a, 0x00800080, 0xC300C300, 0xEA;
lop3.b32 b, b, 0x00800080, 0xC300C300, 0xEA;
fma.rn.bf16x2 $0, x, one, a;
fma.rn.bf16x2 $1, y, one, b;
}"""
# Four numbers of e4m3, converted through fp16, which represents all of them.
E4M3_F32 = """{
.reg .b16 l, h, a, b, c, d;
.reg .b32 u, v;
mov.b32 {l, h}, $4;
cvt.rn.f16x2.e4m3x2 u, l;
cvt.rn.f16x2.e4m3x2 v, h;
mov.b32 {a, b}, u;
mov.b32 {c, d}, v;
cvt.f32.f16 $0, a;
cvt.f32.f16 $1, b;
cvt.f32.f16 $2, c;
cvt.f32.f16 $3, d;
}"""
_E4M3_F32 = tl.constexpr(E4M3_F32)
_INT8_F32, _INT8_F16 = tl.constexpr(INT8_F32), tl.constexpr(INT8_F16)
_INT8_BF16 = tl.constexpr(INT8_BF16)


@triton.jit
def _converted(values, dtype: tl.constexpr):
    """Convert e4m3 or int8 to `dtype`."""
    if values.dtype == dtype:
        converted = values
    elif values.dtype != tl.int8:
        converted = _e4m3_to_bf16(values) if dtype == tl.bfloat16 else values.to(dtype)
    elif ASM:
        converted = _int8_to(values, dtype)
    else:
        converted = values.to(dtype)
    return converted


@triton.jit
def _int8_to(values, dtype: tl.constexpr):
    if dtype == tl.bfloat16:
        converted = tl.inline_asm_elementwise(
            _INT8_BF16, "=r,=r,r", [values], dtype=tl.bfloat16, is_pure=True, pack=4
        )
    else:
        tl.static_assert(dtype == tl.float16)
        converted = tl.inline_asm_elementwise(
            _INT8_F16, "=r,=r,r", [values], dtype=tl.float16, is_pure=True, pack=4
        )
    return converted


@triton.jit
def _e4m3_to_bf16(values):
    """Convert e4m3 to bf16. The only conversion instruction is to fp16, and from there three more
    instructions are needed, which takes longer than reading the weight. So the bits are moved to
    the positions of bf16, and a product corrects the exponent, whose bias is larger by 120. Two
    numbers are converted at a time."""
    return tl.inline_asm_elementwise(
        """
        {
        .reg .b32 a, b, x, y;
        prmt.b32 a, $2, 0, 0x1404;
        prmt.b32 b, $2, 0, 0x3424;
        and.b32 x, a, 0x7f007f00;
        and.b32 y, b, 0x7f007f00;
        shr.b32 x, x, 4;
        shr.b32 y, y, 4;
        lop3.b32 x, a, 0x80008000, x, 0xea;
        lop3.b32 y, b, 0x80008000, y, 0xea;
        mov.b32 a, 0x7b807b80;
        mov.b32 b, 0x80008000;
        fma.rn.bf16x2 $0, x, a, b;
        fma.rn.bf16x2 $1, y, a, b;
        }
        """,
        "=r,=r,r",
        [values],
        dtype=tl.bfloat16,
        is_pure=True,
        pack=4,
    )


# ── products ────────────────────────────────────────────────────────────────────────────────


@triton.jit
def stream_row(
    x,
    words,
    scale,
    out,
    N: tl.constexpr,
    K: tl.constexpr,
    GROUP: tl.constexpr,
    INT8: tl.constexpr,
    COLUMNS: tl.constexpr,
    INNER: tl.constexpr,
    DEPTH: tl.constexpr,
    GATED: tl.constexpr,
    ACTIVATION: tl.constexpr,
    DEPENDENT: tl.constexpr,
):
    # Tensors are [loads, columns, words of a load]. A thread has all four words of a load, with
    # four numbers each, and the 16 elements of x for them. The compiler assigns the first axis to
    # threads first, so a thread's elements of x serve all columns.
    LINE: tl.constexpr = K // 4
    column = tl.program_id(0) * COLUMNS + tl.arange(0, COLUMNS)
    load = tl.arange(0, INNER // 16)
    # Columns past the end load the last row of the weight instead; their results are not stored.
    line = tl.minimum(column, N - 1).to(tl.int64)
    at = (load * 4)[:, None, None] + tl.arange(0, 4)[None, None, :]
    at = words + (line * LINE)[None, :, None] + at
    x_at = x + (load * 16)[:, None, None] + tl.arange(0, 8)[None, None, :]
    # Each load reads the scale of its group, so that scales and sums have the same layout.
    scale_at = scale + (line * (K // GROUP))[None, :] + (load * 16 // GROUP)[:, None]
    HALF: tl.constexpr = N * LINE
    HALF_SCALES: tl.constexpr = N * (K // GROUP)
    # The loads of DEPTH steps are in flight at any time.
    loaded, up_loaded = (), ()
    for n in tl.static_range(DEPTH):
        loaded += (_words(at, n * INNER, K),)  # type: ignore[assignment]
        if GATED:
            up_loaded += (_words(at + HALF, n * INNER, K),)  # type: ignore[assignment]
    wait_for_previous(DEPENDENT)
    sums = tl.zeros([INNER // 16, COLUMNS], tl.float32)
    up_sums = sums
    for begin in tl.range(0, K, DEPTH * INNER):
        next_loaded, next_up_loaded = (), ()
        for n in tl.static_range(DEPTH):
            here = begin + n * INNER
            first = _split_in_four(tl.load(x_at + here, mask=here < K, other=0.0))
            second = _split_in_four(tl.load(x_at + here + 8, mask=here < K, other=0.0))
            start = here + DEPTH * INNER
            groups = tl.minimum(here, K - INNER) // GROUP
            product = _dot_of_loads(loaded[n], first, second, INT8)
            sums += _scaled(product, scale_at + groups, GROUP < K)
            next_loaded += (_words(at, start, K),)  # type: ignore[assignment]
            if GATED:
                product = _dot_of_loads(up_loaded[n], first, second, INT8)
                up_sums += _scaled(product, scale_at + groups + HALF_SCALES, GROUP < K)
                next_up_loaded += (_words(at + HALF, start, K),)  # type: ignore[assignment]
        loaded, up_loaded = next_loaded, next_up_loaded
    # If a row has one scale, it is applied at the end.
    result = _scaled(tl.sum(sums, axis=0), scale + line, GROUP == K)
    if GATED:
        other = _scaled(tl.sum(up_sums, axis=0), scale + line + HALF_SCALES, GROUP == K)
        result = gate_times_up(result, other, out.dtype.element_ty, ACTIVATION)
    tl.store(out + column, result.to(out.dtype.element_ty), mask=column < N)


@triton.jit
def _words(at, start, K: tl.constexpr):
    """Load the words of the step at `start`; zeros past the end of K."""
    return tl.load(at + start // 4, mask=start < K, other=0, eviction_policy="evict_first")


@triton.jit
def _split_in_four(numbers):
    """Split x, [loads, 1, 8], into the elements for the first bytes of two words, then for their
    second, third and fourth bytes."""
    converted = tl.reshape(numbers.to(tl.float32), [numbers.shape[0], 1, 2, 2, 2])
    even, odd = tl.split(converted)
    first, third = tl.split(even)
    second, fourth = tl.split(odd)
    return first, second, third, fourth


@triton.jit
def _dot_of_loads(words, first, second, INT8: tl.constexpr):
    """Multiply words, [loads, columns, 4], with x, and add up the products of each load."""
    both = tl.reshape(words, [words.shape[0], words.shape[1], 2, 2])
    low, high = tl.split(tl.permute(both, (0, 1, 3, 2)))
    low, high = _floats(low, INT8), _floats(high, INT8)
    found = low[0] * first[0] + high[0] * second[0]
    for n in tl.static_range(1, 4):
        found += low[n] * first[n]
        found += high[n] * second[n]
    return tl.sum(found, axis=2)


@triton.jit
def _floats(words, INT8: tl.constexpr):
    """Convert the four numbers of each word, e4m3 or int8, to fp32."""
    if ASM:
        a, b, c, d = tl.inline_asm_elementwise(
            _INT8_F32 if INT8 else _E4M3_F32,
            "=r,=r,=r,=r,r",
            [words],
            dtype=(tl.float32, tl.float32, tl.float32, tl.float32),
            is_pure=True,
            pack=1,
        )
    else:
        a, b = _lowest_byte(words, INT8), _lowest_byte(words >> 8, INT8)
        c, d = _lowest_byte(words >> 16, INT8), _lowest_byte(words >> 24, INT8)
    return a, b, c, d


@triton.jit
def _lowest_byte(words, INT8: tl.constexpr):
    """Convert the lowest byte of each word to fp32, without assembly."""
    if INT8:
        number = words.to(tl.int8).to(tl.float32)
    else:
        number = words.to(tl.uint8).to(tl.float8e4nv, bitcast=True).to(tl.float32)
    return number


@triton.jit
def _scaled(products, scale_at, APPLY: tl.constexpr):
    if APPLY:
        products *= tl.load(scale_at)
    return products


@triton.jit(do_not_specialize=["num_rows"])
def multiply_tile(
    x,
    x_scale,
    weight,
    scale,
    out,
    partial,
    arrived,
    num_rows,
    N: tl.constexpr,
    K: tl.constexpr,
    GROUP: tl.constexpr,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
    INNER: tl.constexpr,
    SPLITS: tl.constexpr,
    BAND: tl.constexpr,
    WEIGHT_FIRST: tl.constexpr,
    GATED: tl.constexpr,
    ACTIVATION: tl.constexpr,
    DEPENDENT: tl.constexpr,
):
    if BAND == 0:
        block, split, row_block = tl.program_id(0), tl.program_id(2), tl.program_id(1)
    else:
        # With many rows: BAND row tiles of the same columns, then those of the next columns, so
        # that x and the weight of the running programs stay in the L2 cache.
        BLOCKS: tl.constexpr = (N + COLUMNS - 1) // COLUMNS
        first_row = tl.program_id(0) // (BAND * BLOCKS) * BAND
        height = tl.minimum(tl.cdiv(num_rows, ROWS) - first_row, BAND)
        place = tl.program_id(0) % (BAND * BLOCKS)
        block, split, row_block = place // height, 0, first_row + place % height
    row = row_block * ROWS + tl.arange(0, ROWS)
    column = block * COLUMNS + tl.arange(0, COLUMNS)
    inner = tl.arange(0, INNER)
    line = tl.minimum(column, N - 1).to(tl.int64)
    GROUPS: tl.constexpr = K // GROUP
    HALF: tl.constexpr = N * K
    HALF_SCALES: tl.constexpr = N * GROUPS
    EACH: tl.constexpr = (K // INNER + SPLITS - 1) // SPLITS * INNER
    if DEPENDENT:
        AHEAD: tl.constexpr = EACH if EACH < FETCHED else FETCHED
        begin = weight + line * K + tl.minimum(split * EACH, K - AHEAD)
        fetch_to_l2(begin, AHEAD)
        if GATED:
            fetch_to_l2(begin + HALF, AHEAD)
    wait_for_previous(DEPENDENT)
    at = weight + (line * K)[:, None] + inner[None, :]
    if BAND == 0:
        x_at = x + row[:, None] * K + inner[None, :]
    else:
        x_at = x + row.to(tl.int64)[:, None] * K + inner[None, :]
    is_row = (row < num_rows)[:, None]
    SUM: tl.constexpr = tl.int32 if x.dtype.element_ty == tl.int8 else tl.float32
    if WEIGHT_FIRST:
        sums = tl.zeros([COLUMNS, ROWS], SUM)
    else:
        sums = tl.zeros([ROWS, COLUMNS], SUM)
    up_sums = sums
    for start in tl.range(split * EACH, tl.minimum(K, (split + 1) * EACH), INNER):
        part = tl.load(x_at + start, mask=is_row, other=0.0)
        first = tl.load(at + start, eviction_policy="evict_first" if BAND == 0 else "")
        factor_at = scale + line * GROUPS + start // GROUP
        sums = _add_product(sums, part, first, factor_at, GROUPS > 1, WEIGHT_FIRST)
        if GATED:
            second = tl.load(at + HALF + start, eviction_policy="evict_first" if BAND == 0 else "")
            factor_at += HALF_SCALES
            up_sums = _add_product(up_sums, part, second, factor_at, GROUPS > 1, WEIGHT_FIRST)
    if WEIGHT_FIRST:
        sums = tl.trans(sums)
        up_sums = tl.trans(up_sums)
    if SPLITS == 1:
        _finish(
            sums, up_sums, row, column, is_row, x_scale, scale, out, N, GROUPS, GATED, ACTIVATION
        )
    else:
        tile = tl.arange(0, ROWS)[:, None] * COLUMNS + tl.arange(0, COLUMNS)[None, :]
        SIZE: tl.constexpr = ROWS * COLUMNS
        to = partial + block.to(tl.int64) * (SPLITS * SIZE) + tile
        if is_last_split(sums, to, arrived, block, split, SPLITS, SIZE):
            sums = sum_of_splits(to, arrived, block, SPLITS, SIZE)
            _finish(
                sums, sums, row, column, is_row, x_scale, scale, out, N, GROUPS, GATED, ACTIVATION
            )


@triton.jit
def _add_product(sums, x, weight, factor_at, GROUPED: tl.constexpr, WEIGHT_FIRST: tl.constexpr):
    IN_REGISTERS: tl.constexpr = weight.dtype != x.dtype
    weight = _converted(weight, x.dtype)
    if GROUPED:
        factor = tl.load(factor_at)
        if WEIGHT_FIRST:
            sums += tl.dot(weight, tl.trans(x)) * factor[:, None]
        else:
            sums += tl.dot(x, tl.trans(weight)) * factor[None, :]
    else:
        sums = dot(x, weight, sums, WEIGHT_FIRST, IN_REGISTERS)
    return sums


@triton.jit
def _finish(
    sums,
    up_sums,
    row,
    column,
    is_row,
    x_scale,
    scale,
    out,
    N: tl.constexpr,
    GROUPS: tl.constexpr,
    GATED: tl.constexpr,
    ACTIVATION: tl.constexpr,
):
    """Apply scales and activation to a tile [rows, columns], and store it."""
    is_row = is_row & (column < N)[None, :]
    sums = sums.to(tl.float32)
    up_sums = up_sums.to(tl.float32)
    if x_scale is not None:
        of_row = tl.load(x_scale + row[:, None], mask=is_row, other=0.0)
        sums *= of_row
        up_sums *= of_row
    if GROUPS == 1:
        at = scale + tl.minimum(column, N - 1)
        sums *= tl.load(at)[None, :]
        if GATED:
            up_sums *= tl.load(at + N)[None, :]
    store_tile(sums, up_sums, row, column, is_row, out, N, GATED, ACTIVATION)


# ── conversion of rows ──────────────────────────────────────────────────────────────────────


@triton.jit
def dequantise_rows(values, scale, out, K: tl.constexpr, GROUP: tl.constexpr, BLOCK: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    column = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    mask = column < K
    factor = tl.load(scale + row * (K // GROUP) + column // GROUP, mask=mask, other=0.0)
    converted = tl.load(values + row * K + column, mask=mask, other=0.0).to(tl.float32) * factor
    tl.store(out + row * K + column, converted.to(out.dtype.element_ty), mask=mask)


@triton.jit
def quantise_row(
    x,
    values,
    scale,
    stride,
    WIDTH: tl.constexpr,
    BLOCK: tl.constexpr,
    GATED: tl.constexpr,
    ACTIVATION: tl.constexpr,
    MAX_VALUE: tl.constexpr,
    MIN_SCALE: tl.constexpr,
    DEPENDENT: tl.constexpr,
):
    wait_for_previous(DEPENDENT)
    row = tl.program_id(0).to(tl.int64) + tl.arange(0, 1)[:, None]
    column = tl.arange(0, BLOCK)[None, :]
    mask = column < WIDTH
    at = x + row * stride + column
    converted = tl.load(at, mask=mask, other=0.0).to(tl.float32)
    if GATED:
        up = tl.load(at + WIDTH, mask=mask, other=0.0).to(tl.float32)
        dtype: tl.constexpr = x.dtype.element_ty
        converted = gate_times_up(converted, up, dtype, ACTIVATION).to(dtype)
    small, unit = quantised_rows(converted, values.dtype.element_ty, MAX_VALUE, MIN_SCALE)
    tl.store(values + row * WIDTH + column, small, mask=mask)
    tl.store(scale + row, unit)
