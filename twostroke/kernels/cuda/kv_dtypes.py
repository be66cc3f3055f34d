"""Keys and values with 8-bit dtypes in kernels: see `kernels/kv_dtypes.py` for what is stored.

A kernel is compiled for the type of the cache that its pointers have; for the other types nothing
of this is left in it.
"""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def largest_of(x):
    """Return the largest magnitude of each row, [rows, 1]."""
    return tl.max(tl.abs(x), axis=1, keep_dims=True)


@triton.jit
def quantised(x, largest, to: tl.constexpr):
    """Return fp32 numbers as elements of the cache. `largest`: the largest magnitude of each row,
    for int8."""
    if to == tl.int8:
        # From 1.5 · 2²³ on fp32 has no fractions: added and taken away again it rounds to even.
        scaled = x * (127.0 / tl.maximum(largest, 1e-30))
        made = ((scaled + 12582912.0) - 12582912.0).to(tl.int8)
    else:
        end: tl.constexpr = 57344.0 if to == tl.float8e5 else 448.0
        made = tl.minimum(tl.maximum(x, -end), end).to(to)
    return made


@triton.jit
def dequantised(elements, largest):
    """Return the numbers that cached elements stand for, in fp32."""
    made = elements.to(tl.float32)
    if elements.dtype == tl.int8:
        made = made * (largest / 127.0)
    return made


@triton.jit
def scale_at(block, head, slot, num_heads, DIM: tl.constexpr, PAGE: tl.constexpr):
    """Return the address of the scale of a head and slot. `block`: the address of the block's keys
    or values."""
    offset = (PAGE * num_heads * DIM + 15) // 16 * 16
    return (block + offset + (head * PAGE + slot) * 4).to(tl.pointer_type(tl.float32))


@triton.jit
def operand_of(query, cache):
    """Return queries in the type of their product with cached elements. For 8-bit caches that is
    fp16: it has all their values, and the conversion to fp16 takes fewer instructions than to
    bf16."""
    if cache.dtype.element_ty.primitive_bitwidth == 8 and query.dtype == tl.bfloat16:
        wide = query.to(tl.float32)
        query = tl.minimum(tl.maximum(wide, -65504.0), 65504.0).to(tl.float16)
    return query


@triton.jit
def to_operand(elements, to: tl.constexpr, ASM: tl.constexpr):
    """Return elements of keys in the type of the queries. `ASM`: the kernel is not interpreted."""
    if ASM and elements.dtype == tl.int8:
        # 1024 + (x + 128) in fp16 is the byte, its sign turned, beside 0x64.
        elements = tl.inline_asm_elementwise(
            """
            {
            .reg .b32 x, y, less;
            mov.b32 less, 0x64806480;
            xor.b32 x, $2, 0x80808080;
            prmt.b32 y, x, 0x64646464, 0x4342;
            prmt.b32 x, x, 0x64646464, 0x4140;
            sub.rn.f16x2 $0, x, less;
            sub.rn.f16x2 $1, y, less;
            }
            """,
            "=r,=r,r",
            [elements],
            dtype=tl.float16,
            is_pure=True,
            pack=4,
        )
    else:
        elements = elements.to(to)
    return elements


@triton.jit
def pair_to_operands(pairs, kind: tl.constexpr, ASM: tl.constexpr):
    """Convert pairs of neighbouring elements of type `kind`, each pair an int16, to two tiles in
    fp16: the even and the odd elements. Without `ASM` e4m3 comes out as 2⁻⁸ of its value: see
    `pair_unit`."""
    if ASM:
        if kind == tl.float8e4nv:
            even, odd = tl.inline_asm_elementwise(
                """
                {
                .reg .b16 a, b;
                .reg .b32 x, y;
                mov.b32 {a, b}, $2;
                cvt.rn.f16x2.e4m3x2 x, a;
                cvt.rn.f16x2.e4m3x2 y, b;
                prmt.b32 $0, x, y, 0x5410;
                prmt.b32 $1, x, y, 0x7632;
                }
                """,
                "=r,=r,r",
                [pairs],
                dtype=(tl.float16, tl.float16),
                is_pure=True,
                pack=2,
            )
        elif kind == tl.float8e5:
            even, odd = tl.inline_asm_elementwise(
                """
                prmt.b32 $0, $2, 0, 0x2404;
                prmt.b32 $1, $2, 0, 0x3414;
                """,
                "=&r,=r,r",
                [pairs],
                dtype=(tl.float16, tl.float16),
                is_pure=True,
                pack=2,
            )
        else:
            even, odd = tl.inline_asm_elementwise(
                """
                {
                .reg .b32 x, y, less;
                mov.b32 less, 0x64806480;
                xor.b32 x, $2, 0x80808080;
                prmt.b32 y, x, 0x64646464, 0x4341;
                prmt.b32 x, x, 0x64646464, 0x4240;
                sub.rn.f16x2 $0, x, less;
                sub.rn.f16x2 $1, y, less;
                }
                """,
                "=r,=r,r",
                [pairs],
                dtype=(tl.float16, tl.float16),
                is_pure=True,
                pack=2,
            )
    else:
        # The byte to the upper half; below it comes nothing.
        even, odd = (pairs.to(tl.int32) << 8) & 0xFF00, pairs.to(tl.int32) & 0xFF00
        if kind == tl.int8:
            even, odd = (even ^ 0x8000) >> 8 | 0x6400, (odd ^ 0x8000) >> 8 | 0x6400
        elif kind == tl.float8e4nv:
            even = (even & 0x8000) | ((even & 0x7F00) >> 1)
            odd = (odd & 0x8000) | ((odd & 0x7F00) >> 1)
        even = even.to(tl.int16).to(tl.float16, bitcast=True)
        odd = odd.to(tl.int16).to(tl.float16, bitcast=True)
        if kind == tl.int8:
            even, odd = even - 1152.0, odd - 1152.0
    return even, odd


@triton.jit
def pair_unit(kind: tl.constexpr, ASM: tl.constexpr):
    """Return the factor for sums of products with `pair_to_operands`."""
    unit: tl.constexpr = 256.0 if kind == tl.float8e4nv and not ASM else 1.0
    return unit
