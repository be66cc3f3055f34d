"""Codes of 4 and 8 bits as numbers, in the kernels of `packed.py`.

Codes become floats without conversions, which a GPU has few units for: their bits go below those of
a power of two.
"""

from __future__ import annotations

import triton
import triton.language as tl

from twostroke.kernels.cuda.tiles import ASM

# Of four bytes: a nibble each with a 1 above it, and those become bits 16 to 23 of a float below
# 0x3F: 1 + code / 128. Of 8 bits, the lowest byte of a float below 0x4B: 2^23 + code.
_NIBBLES = """
.reg .b32 t, h;
shr.u32 h, {0}, 4;
lop3.b32 t, {0}, 0x0F0F0F0F, 0x80808080, 0xEA;
lop3.b32 h, h, 0x0F0F0F0F, 0x80808080, 0xEA;
"""


def floats_asm(bits: int) -> str:
    if bits == 8:
        lines = [f"prmt.b32 ${i}, $4, 0x4B, 0x455{i};" for i in range(4)]
        lines += [f"add.rn.f32 ${i}, ${i}, 0fCB000000;" for i in range(4)]
        return "\n".join(lines)
    lines = [f"prmt.b32 ${i}, t, 0x3F, 0x4{i}55;" for i in range(4)]
    lines += [f"prmt.b32 ${4 + i}, h, 0x3F, 0x4{i}55;" for i in range(4)]
    return "{" + _NIBBLES.format("$8") + "\n".join(lines) + "}"


def scaled_asm(bits: int, kind: str) -> str:
    """Four bytes, four factors, four terms → rounded numbers; `kind`: bf16 or f16."""
    count, half = (8, 4) if bits == 4 else (4, 2)
    code, factor, term = half, half + 1, half + 5
    head = _NIBBLES.format(f"${code}") if bits == 4 else "\n"
    lines = [f".reg .b32 f<{count}>;"]
    for i in range(count):
        if bits == 4:
            lines.append(f"prmt.b32 f{i}, {'t' if i < 4 else 'h'}, 0x3F, 0x4{i % 4}55;")
        else:
            lines.append(f"prmt.b32 f{i}, ${code}, 0x4B, 0x455{i};")
            lines.append(f"add.rn.f32 f{i}, f{i}, 0fCB000000;")
        lines.append(f"fma.rn.f32 f{i}, f{i}, ${factor + i % 4}, ${term + i % 4};")
    lines += [f"cvt.rn.{kind}x2.f32 ${i}, f{2 * i + 1}, f{2 * i};" for i in range(half)]
    return "{" + head + "\n".join(lines) + "}"


def whole_asm(kind: str) -> str:
    """Four bytes of nibbles, and what is taken from each number: the two halves' whole numbers."""
    above, one = ("0x43", "0x3F803F80") if kind == "bf16" else ("0x64", "0x3C003C00")
    lines = [
        ".reg .b32 t, h, one, a<4>;",
        f"mov.b32 one, {one};",
        "shr.u32 h, $4, 4;",
        "and.b32 t, $4, 0x0F0F0F0F;",
        "and.b32 h, h, 0x0F0F0F0F;",
    ]
    for i, (of, at) in enumerate((("t", "0x4140"), ("t", "0x4342")) * 2):
        lines.append(f"prmt.b32 a{i}, {of if i < 2 else 'h'}, {above}, {at};")
    lines += [f"fma.rn.{kind}x2 ${i}, a{i}, one, ${5 + i % 2};" for i in range(4)]
    return "{" + "\n".join(lines) + "}"


_FLOATS_4 = tl.constexpr(floats_asm(4))
_FLOATS_8 = tl.constexpr(floats_asm(8))
_SCALED_4_BF16 = tl.constexpr(scaled_asm(4, "bf16"))
_SCALED_4_F16 = tl.constexpr(scaled_asm(4, "f16"))
_SCALED_8_BF16 = tl.constexpr(scaled_asm(8, "bf16"))
_SCALED_8_F16 = tl.constexpr(scaled_asm(8, "f16"))
_WHOLE_BF16 = tl.constexpr(whole_asm("bf16"))
_WHOLE_F16 = tl.constexpr(whole_asm("f16"))
# Of a float's 1, what a code of 4 bits counts.
STEPS_4 = tl.constexpr(128.0)


@triton.jit
def floats_4(words):
    """Of words of four bytes: 1 + code / 128 of each byte's low nibble, then of its high one."""
    if ASM:
        a, b, c, d, e, f, g, h = tl.inline_asm_elementwise(
            _FLOATS_4,
            "=r,=r,=r,=r,=r,=r,=r,=r,r",
            [words],
            dtype=(
                tl.float32,
                tl.float32,
                tl.float32,
                tl.float32,
                tl.float32,
                tl.float32,
                tl.float32,
                tl.float32,
            ),
            is_pure=True,
            pack=1,
        )
    else:
        a, e = _one_plus(words), _one_plus(words >> 4)
        b, f = _one_plus(words >> 8), _one_plus(words >> 12)
        c, g = _one_plus(words >> 16), _one_plus(words >> 20)
        d, h = _one_plus(words >> 24), _one_plus(words >> 28)
    return a, b, c, d, e, f, g, h


@triton.jit
def _one_plus(words):
    return (words & 15).to(tl.float32) / STEPS_4 + 1


@triton.jit
def floats_8(words):
    """The code of each byte of words of four."""
    if ASM:
        a, b, c, d = tl.inline_asm_elementwise(
            _FLOATS_8,
            "=r,=r,=r,=r,r",
            [words],
            dtype=(tl.float32, tl.float32, tl.float32, tl.float32),
            is_pure=True,
            pack=1,
        )
    else:
        a, b = (words & 255).to(tl.float32), (words >> 8 & 255).to(tl.float32)
        c, d = (words >> 16 & 255).to(tl.float32), (words >> 24 & 255).to(tl.float32)
    return a, b, c, d


@triton.jit
def scaled_4(codes, factor, term, kind: tl.constexpr):
    """factor · (1 + code / 128) + term, of the low and of the high nibbles, as `kind`."""
    if ASM:
        if kind == tl.bfloat16:
            low, high = tl.inline_asm_elementwise(
                _SCALED_4_BF16,
                "=r,=r,=r,=r,r,r,r,r,r,r,r,r,r",
                [codes, factor, term],
                dtype=(tl.bfloat16, tl.bfloat16),
                is_pure=True,
                pack=4,
            )
        else:
            low, high = tl.inline_asm_elementwise(
                _SCALED_4_F16,
                "=r,=r,=r,=r,r,r,r,r,r,r,r,r,r",
                [codes, factor, term],
                dtype=(tl.float16, tl.float16),
                is_pure=True,
                pack=4,
            )
    else:
        low = (factor * _one_plus(codes) + term).to(kind)
        high = (factor * _one_plus(codes >> 4) + term).to(kind)
    return low, high


@triton.jit
def scaled_8(codes, factor, term, kind: tl.constexpr):
    """factor · code + term, as `kind`."""
    if ASM:
        if kind == tl.bfloat16:
            numbers = tl.inline_asm_elementwise(
                _SCALED_8_BF16,
                "=r,=r,r,r,r,r,r,r,r,r,r",
                [codes, factor, term],
                dtype=tl.bfloat16,
                is_pure=True,
                pack=4,
            )
        else:
            numbers = tl.inline_asm_elementwise(
                _SCALED_8_F16,
                "=r,=r,r,r,r,r,r,r,r,r,r",
                [codes, factor, term],
                dtype=tl.float16,
                is_pure=True,
                pack=4,
            )
    else:
        numbers = (factor * codes.to(tl.float32) + term).to(kind)
    return numbers


@triton.jit
def whole_4(codes, zero, kind: tl.constexpr):
    """code − zero, of the low and of the high nibbles, as `kind`, exactly."""
    if ASM:
        # A power of two is in the codes' place of the mantissa.
        if kind == tl.bfloat16:
            low, high = tl.inline_asm_elementwise(
                _WHOLE_BF16,
                "=r,=r,=r,=r,r,r,r",
                [codes, (-128.0 - zero).to(kind)],
                dtype=(tl.bfloat16, tl.bfloat16),
                is_pure=True,
                pack=4,
            )
        else:
            low, high = tl.inline_asm_elementwise(
                _WHOLE_F16,
                "=r,=r,=r,=r,r,r,r",
                [codes, (-1024.0 - zero).to(kind)],
                dtype=(tl.float16, tl.float16),
                is_pure=True,
                pack=4,
            )
    else:
        low = ((codes & 15).to(tl.float32) - zero).to(kind)
        high = ((codes >> 4).to(tl.float32) - zero).to(kind)
    return low, high


@triton.jit
def group_line(scale, zero, offset, at, BITS: tl.constexpr, SCALED: tl.constexpr):
    """What groups' codes are multiplied with, and what is added then; if not SCALED, what is taken
    from the codes before."""
    factor = tl.load(scale + at).to(tl.float32)
    if zero is not None:
        term = tl.load(zero + at).to(tl.float32)
    else:
        term = tl.full(factor.shape, 1 << (BITS - 1), tl.float32)
    if offset is not None:
        tl.static_assert(SCALED)
        term = tl.load(offset + at).to(tl.float32)
    elif SCALED:
        term *= -factor
    return factor, term
