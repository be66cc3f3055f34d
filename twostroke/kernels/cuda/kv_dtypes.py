"""Keys and values with 8-bit dtypes in Triton kernels. `kernels/kv_dtypes.py` defines the formats.

A kernel is compiled for the dtype of its cache pointers. For 16-bit and 32-bit caches these
functions compile to nothing.
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
    """Quantise fp32 numbers to cache elements. `largest`: absmax of each row, for int8."""
    if to == tl.int8:
        # fp32 has no fractions above 1.5 · 2²³, so adding and subtracting it rounds half to even.
        scaled = x * (127.0 / tl.maximum(largest, 1e-30))
        made = ((scaled + 12582912.0) - 12582912.0).to(tl.int8)
    else:
        end: tl.constexpr = 57344.0 if to == tl.float8e5 else 448.0
        made = tl.minimum(tl.maximum(x, -end), end).to(to)
    return made


@triton.jit
def dequantised(elements, largest):
    """Dequantise cache elements to fp32."""
    made = elements.to(tl.float32)
    if elements.dtype == tl.int8:
        made = made * (largest / 127.0)
    return made


@triton.jit
def scale_at(block, head, slot, num_heads, DIM: tl.constexpr, PAGE: tl.constexpr):
    """Return the address of the scale of a head and slot. `block`: the address of the keys, or of
    the values, of the block."""
    offset = (PAGE * num_heads * DIM + 15) // 16 * 16
    return (block + offset + (head * PAGE + slot) * 4).to(tl.pointer_type(tl.float32))


@triton.jit
def operand_of(query, cache):
    """Convert queries to the dtype of their product with cache elements. For 8-bit caches this is
    fp16: it represents all 8-bit values, and the conversion to fp16 takes fewer instructions than
    to bf16."""
    if cache.dtype.element_ty.primitive_bitwidth == 8 and query.dtype == tl.bfloat16:
        wide = query.to(tl.float32)
        query = tl.minimum(tl.maximum(wide, -65504.0), 65504.0).to(tl.float16)
    return query


@triton.jit
def to_operand(elements, to: tl.constexpr, ASM: tl.constexpr):
    """Convert key elements to the dtype of the queries. `ASM`: the kernel is not interpreted."""
    if ASM and elements.dtype == tl.int8:
        # The fp16 number 1024 + (x + 128) has the high byte 0x64 and the low byte x ^ 0x80.
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
def pair_to_operands(pairs, dtype: tl.constexpr, ASM: tl.constexpr):
    """Convert pairs of neighbouring elements of dtype `dtype`, each pair an int16, to two fp16
    tiles: the even and the odd elements. Without `ASM`, e4m3 elements become 2⁻⁸ times their value;
    see `pair_unit`."""
    if ASM:
        if dtype == tl.float8e4nv:
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
        elif dtype == tl.float8e5:
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
        # Move each byte to the high half of an int16; the low half is 0.
        even, odd = (pairs.to(tl.int32) << 8) & 0xFF00, pairs.to(tl.int32) & 0xFF00
        if dtype == tl.int8:
            even, odd = (even ^ 0x8000) >> 8 | 0x6400, (odd ^ 0x8000) >> 8 | 0x6400
        elif dtype == tl.float8e4nv:
            even = (even & 0x8000) | ((even & 0x7F00) >> 1)
            odd = (odd & 0x8000) | ((odd & 0x7F00) >> 1)
        even = even.to(tl.int16).to(tl.float16, bitcast=True)
        odd = odd.to(tl.int16).to(tl.float16, bitcast=True)
        if dtype == tl.int8:
            even, odd = even - 1152.0, odd - 1152.0
    return even, odd


@triton.jit
def pair_unit(dtype: tl.constexpr, ASM: tl.constexpr):
    """Return the factor that corrects sums of products with the results of `pair_to_operands`."""
    unit: tl.constexpr = 256.0 if dtype == tl.float8e4nv and not ASM else 1.0
    return unit
