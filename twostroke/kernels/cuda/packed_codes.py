"""Conversion of codes of 4 and 8 bits to floats, in the kernels of `packed.py`.

A GPU has few units for conversion instructions, so the conversions use bit operations: the bits of
a code go into the low mantissa bits of a power of two, which is then subtracted. The functions
`*_asm` return inline assembly; their docstrings describe inputs → outputs.
"""

from __future__ import annotations

import triton
import triton.language as tl

from twostroke.kernels.cuda.tiles import ASM


def floats_asm() -> str:
    """A word of four bytes → four floats 32768 + byte. In 32768 the lowest bit of the second byte
    of the float has the value 1."""
    return "\n".join(f"prmt.b32 ${i}, $4, 0x47, 0x45{i}5;" for i in range(4))


def scaled_asm(kind: str) -> str:
    """A word of four bytes, four factors, four terms → four rounded numbers factor · byte + term.
    `kind`: bf16 or f16."""
    lines = [".reg .b32 f<4>;"]
    for i in range(4):
        lines.append(f"prmt.b32 f{i}, $2, 0x4B, 0x455{i};")
        lines.append(f"add.rn.f32 f{i}, f{i}, 0fCB000000;")
        lines.append(f"fma.rn.f32 f{i}, f{i}, ${3 + i}, ${7 + i};")
    lines += [f"cvt.rn.{kind}x2.f32 ${i}, f{2 * i + 1}, f{2 * i};" for i in range(2)]
    return "{" + "\n".join(lines) + "}"


def _power_and_one(kind: str) -> tuple[str, str]:
    """Return two register values, each with two equal numbers: the power of two whose lowest
    mantissa bit has the value 1 (128 for bf16, 1024 for fp16), and 1."""
    return ("0x43004300", "0x3F803F80") if kind == "bf16" else ("0x64006400", "0x3C003C00")


def whole_asm(kind: str) -> str:
    """Two words of four codes, and for each of the four codes an addend for both words → the two
    words' numbers code + addend of the first codes, then of the second, third and fourth codes."""
    above, one = _power_and_one(kind)
    lines = [".reg .b32 one, w<4>;", f"mov.b32 one, {one};"]
    for i in range(4):
        lines.append(f"shr.u32 w{i}, $4, {4 * i};" if i else "mov.b32 w0, $4;")
        lines.append(f"lop3.b32 w{i}, w{i}, 0x000F000F, {above}, 0xEA;")
        lines.append(f"fma.rn.{kind}x2 ${i}, w{i}, one, ${5 + i};")
    return "{" + "\n".join(lines) + "}"


def number_4_asm(kind: str, n: int) -> str:
    """Two words, addends for their n-th codes, factors and terms → two numbers
    (code + addend) · factor + term; see `whole_asm`."""
    above, one = _power_and_one(kind)
    lines = [".reg .b32 one, w;", f"mov.b32 one, {one};", f"shr.u32 w, $1, {4 * n};"]
    lines.append(f"lop3.b32 w, w, 0x000F000F, {above}, 0xEA;")
    lines.append(f"fma.rn.{kind}x2 w, w, one, $2;")
    lines.append(f"fma.rn.{kind}x2 $0, w, $3, $4;")
    return "{" + "\n".join(lines) + "}"


def floats_4_asm() -> str:
    """Two words of four codes → the two words' floats 2048 + code of the first codes, then
    128 + code of the second, 2048 + code of the third and 128 + code of the fourth codes. Four
    shifts move the codes to bits 12 to 15, which count from 1 in 2048, or to bits 16 to 19, which
    count from 1 in 128."""
    lines = [".reg .b32 w<4>;"]
    for i, (shift, by) in enumerate((("shl", 12), ("shl", 4), ("shr", 4), ("shr", 12))):
        lines.append(f"{shift}.{'b32' if shift == 'shl' else 'u32'} w{i}, $8, {by};")
    for n in range(4):
        above, mask = ((0x45000000, 0xF000), (0x43000000, 0xF0000))[n % 2]
        for word in range(2):
            moved = f"w{2 * word + n // 2}"
            lines.append(f"lop3.b32 ${2 * n + word}, {moved}, {mask:#010x}, {above:#010x}, 0xEA;")
    return "{" + "\n".join(lines) + "}"


def scaled_4_asm(kind: str, terms: bool) -> str:
    """Two numbers, two factors and, if `terms`, two terms → number · factor + term."""
    return f"fma.rn.{kind}x2 $0, $1, $2, $3;" if terms else f"mul.rn.{kind}x2 $0, $1, $2;"


_FLOATS = tl.constexpr(floats_asm())
_SCALED_4_BF16 = tl.constexpr(scaled_4_asm("bf16", False))
_SCALED_4_F16 = tl.constexpr(scaled_4_asm("f16", False))
_TERMED_4_BF16 = tl.constexpr(scaled_4_asm("bf16", True))
_TERMED_4_F16 = tl.constexpr(scaled_4_asm("f16", True))
_FLOATS_4 = tl.constexpr(floats_4_asm())
_SCALED_BF16 = tl.constexpr(scaled_asm("bf16"))
_SCALED_F16 = tl.constexpr(scaled_asm("f16"))
_WHOLE_BF16 = tl.constexpr(whole_asm("bf16"))
_WHOLE_F16 = tl.constexpr(whole_asm("f16"))


@triton.jit
def floats_8(words):
    """Return 32768 + code for each of the four bytes of int32 words."""
    if ASM:
        a, b, c, d = tl.inline_asm_elementwise(
            _FLOATS,
            "=r,=r,=r,=r,r",
            [words],
            dtype=(tl.float32, tl.float32, tl.float32, tl.float32),
            is_pure=True,
            pack=1,
        )
    else:
        a, b = (words & 255).to(tl.float32) + 32768, (words >> 8 & 255).to(tl.float32) + 32768
        c, d = (
            (words >> 16 & 255).to(tl.float32) + 32768,
            (words >> 24 & 255).to(tl.float32) + 32768,
        )
    return a, b, c, d


@triton.jit
def floats_4(words):
    """Return 2048 + code, 128 + code, 2048 + code and 128 + code for the four codes of int16
    words."""
    if ASM:
        a, b, c, d = tl.inline_asm_elementwise(
            _FLOATS_4,
            "=r,=r,=r,=r,=r,=r,=r,=r,r",
            [words],
            dtype=(tl.float32, tl.float32, tl.float32, tl.float32),
            is_pure=True,
            pack=2,
        )
    else:
        a = (words & 15).to(tl.float32) + 2048
        b = (words >> 4 & 15).to(tl.float32) + 128
        c = (words >> 8 & 15).to(tl.float32) + 2048
        d = (words >> 12 & 15).to(tl.float32) + 128
    return a, b, c, d


@triton.jit
def scaled_8(codes, factor, term, kind: tl.constexpr):
    """Return factor · code + term, rounded to `kind`."""
    if ASM:
        if kind == tl.bfloat16:
            numbers = tl.inline_asm_elementwise(
                _SCALED_BF16,
                "=r,=r,r,r,r,r,r,r,r,r,r",
                [codes, factor, term],
                dtype=tl.bfloat16,
                is_pure=True,
                pack=4,
            )
        else:
            numbers = tl.inline_asm_elementwise(
                _SCALED_F16,
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
def scaled_4(numbers, factors, terms):
    """Return numbers · factors + terms, rounded once. `terms` may be None. All have one dtype."""
    kind: tl.constexpr = numbers.dtype
    if not ASM:
        exact = numbers.to(tl.float32) * factors.to(tl.float32)
        if terms is not None:
            exact += terms.to(tl.float32)
        scaled = exact.to(kind)
    elif terms is None:
        scaled = tl.inline_asm_elementwise(
            _SCALED_4_BF16 if kind == tl.bfloat16 else _SCALED_4_F16,
            "=r,r,r",
            [numbers, factors],
            dtype=numbers.dtype,
            is_pure=True,
            pack=2,
        )
    else:
        scaled = tl.inline_asm_elementwise(
            _TERMED_4_BF16 if kind == tl.bfloat16 else _TERMED_4_F16,
            "=r,r,r,r",
            [numbers, factors, terms],
            dtype=numbers.dtype,
            is_pure=True,
            pack=2,
        )
    return scaled


@triton.jit
def whole_4(words, a, b, c, d, kind: tl.constexpr):
    """Return code − zero, which is exact, for each of the four codes of int16 words, as `kind`.
    `a` to `d`: the zeros of the four codes, in the shape of the words."""
    if ASM:
        if kind == tl.bfloat16:
            numbers = tl.inline_asm_elementwise(
                _WHOLE_BF16,
                "=r,=r,=r,=r,r,r,r,r,r",
                [words, _addend(a, kind), _addend(b, kind), _addend(c, kind), _addend(d, kind)],
                dtype=(tl.bfloat16, tl.bfloat16, tl.bfloat16, tl.bfloat16),
                is_pure=True,
                pack=2,
            )
        else:
            numbers = tl.inline_asm_elementwise(
                _WHOLE_F16,
                "=r,=r,=r,=r,r,r,r,r,r",
                [words, _addend(a, kind), _addend(b, kind), _addend(c, kind), _addend(d, kind)],
                dtype=(tl.float16, tl.float16, tl.float16, tl.float16),
                is_pure=True,
                pack=2,
            )
    else:
        numbers = (
            ((words & 15).to(tl.float32) - a).to(kind),
            ((words >> 4 & 15).to(tl.float32) - b).to(kind),
            ((words >> 8 & 15).to(tl.float32) - c).to(kind),
            ((words >> 12 & 15).to(tl.float32) - d).to(kind),
        )
    return numbers


@triton.jit
def _addend(zero, kind: tl.constexpr):
    """Return the addend that subtracts the power of two (`_power_and_one`) and the zero."""
    return (-(128.0 if kind == tl.bfloat16 else 1024.0) - zero).to(kind)


@triton.jit
def group_line(scale, zero, offset, at, BITS: tl.constexpr):
    """Return factor and term of each group: an element is factor · code + term."""
    factor = tl.load(scale + at).to(tl.float32)
    if offset is not None:
        term = tl.load(offset + at).to(tl.float32)
    elif zero is not None:
        term = -factor * tl.load(zero + at).to(tl.float32)
    else:
        term = -factor * (1 << (BITS - 1))
    return factor, term
