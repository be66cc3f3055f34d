"""Products with weights of 4 or 8 bits; `kernels/packed.py` says what they stand for.

    one row     of 8 bits: the codes go past once and are added up in fp32, group by group
    few rows    tiles of codes become the activations' type in registers, whole numbers, which none
                of them loses; a group's scale comes after its product
    more rows   numbers are scaled in registers and rounded before the matrix units have them, so
                that sums stay where they are from group to group
    many        the weight is dequantised as a whole, and the library multiplies

Codes become floats without conversions, which a GPU has few units for: their bits go below those of
a power of two. Where a matrix has fewer tiles than the card has room for, several programs share
the columns of a tile, as in `fp8.py`.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache

import torch
import torch.nn.functional as F
import triton
import triton.language as tl

from twostroke.kernels.activations import Activation
from twostroke.kernels.cuda.elementwise import act_and_mul, gate_times_up
from twostroke.kernels.cuda.launch import Variant
from twostroke.kernels.cuda.packed_tiles import TILES
from twostroke.kernels.cuda.pdl import fetch_to_l2, launch_options, wait_for_previous
from twostroke.kernels.cuda.sizes import ceil_div, power_of_two
from twostroke.kernels.packed import ARRIVALS_COLUMNS, PackedWeight

MOST_TILED = 128  # rows whose products have tiles here, where no table says otherwise
PROGRAMS = 512  # of a matrix whose K is split
NARROW = 4096  # columns of a matrix that is cut into narrower tiles, for as many programs
LEAST_STEPS = 4  # of a program's part of K
DEQUANTISED = 1024  # bytes of a program
# Bytes of each column that are on their way before a tile's launch waits.
FETCHED = tl.constexpr(512)
ASM = tl.constexpr(not triton.knobs.runtime.interpret)  # else the same in plain operations


@dataclass(frozen=True, slots=True)
class Streaming:
    columns: int  # of a program
    groups: int  # of K, at one time
    num_warps: int


@dataclass(frozen=True, slots=True)
class Tiling:
    rows: int
    columns: int  # of each half, if gated
    groups: int  # of K, at one time
    splits: int  # of K
    scale_first: bool  # numbers are scaled and rounded before they are multiplied
    weight_first: bool  # the weight is the left operand: the matrix units take 64 of its rows
    num_warps: int
    num_stages: int


def table_key(rows: int, weight: PackedWeight, gated: bool) -> str:
    kind = "zeros" if weight.zero is not None else "offsets" if weight.offset is not None else ""
    format = f"{weight.bits} {weight.group} {kind}".strip()
    shape = "×".join(map(str, weight.shape))
    block = rows if rows == 1 else max(16, power_of_two(rows))
    return f"{format}, {shape}{' gated' if gated else ''}, {block}"


def choice(rows: int, weight: PackedWeight, gated: bool) -> Streaming | Tiling | None:
    """How a product is computed; None: by the library, of a weight that is dequantised."""
    known = TILES.get(table_key(rows, weight, gated))
    if known is not None:
        return Streaming(*known) if len(known) == 3 else _tiling_of(*known) if known else None
    tiles = tiling(rows, weight, gated)
    # Of 4 bits, the matrix units' tiles take fewer instructions a number, even of one row.
    if rows == 1 and (weight.bits == 8 or tiles is None):
        return streaming(weight, gated) or tiles
    return tiles


def _tiling_of(*known: int) -> Tiling:
    rows, columns, groups, splits, scale_first, weight_first, warps, stages = known
    sizes = (rows, columns, groups, splits)
    return Tiling(*sizes, bool(scale_first), bool(weight_first), warps, stages)


def streaming(weight: PackedWeight, gated: bool) -> Streaming | None:
    """Of one row; None where nothing here divides K."""
    of_a_group, groups = weight.group * weight.bits // 8, weight.scale.shape[1]
    if of_a_group % 16:
        return None
    ways = ((1, 512, 1),) if gated else ((4, 1024, 2), (4, 512, 2))
    for columns, size, warps in (*ways, (8, 256, 4), (8, 128, 4)):
        count = size // of_a_group
        if count and groups % count == 0:
            return Streaming(columns, count, warps)
    return Streaming(8, 1, 2)


def tiling(rows: int, weight: PackedWeight, gated: bool) -> Tiling | None:
    """Of few rows; None where the library is taken."""
    if rows > MOST_TILED or weight.group not in (16, 32, 64, 128):
        return None
    groups = weight.scale.shape[1]
    block = min(128, max(16, power_of_two(rows)))
    scale_first = block >= 128 or not can_scale_last(weight)
    wanted = (256 if block <= 32 and not (gated and block > 16) else 128) // weight.group
    count = next(n for n in (16, 8, 4, 2, 1) if n <= wanted and groups % n == 0)
    if count * weight.group * weight.bits // 8 < 16:
        return None
    tile = 32 if block == 16 and not gated and weight.shape[0] <= NARROW else 64
    splits = 1
    if not gated and rows <= block:
        most = min(PROGRAMS // ceil_div(weight.shape[0], tile), groups // count // LEAST_STEPS)
        splits = 1 << max(0, most.bit_length() - 1)
    stages = 3 if block == 128 or gated else 4
    return Tiling(block, tile, count, splits, scale_first, block >= 64, 4, stages)


def can_scale_last(weight: PackedWeight) -> bool:
    """Whether groups are long enough, and their numbers whole before they are scaled."""
    return weight.bits == 4 and weight.offset is None and weight.group >= 64


# ── calls ───────────────────────────────────────────────────────────────────────────────────


def packed_product(
    x: torch.Tensor, weight: PackedWeight, *, pdl: bool = False, out: torch.Tensor | None = None
) -> torch.Tensor:
    """x @ what the weight stands for, transposed; to `out`, contiguous, if it is given."""
    if _is_plain(x):
        tuned = choice(x.shape[0], weight, gated=False)
        if tuned is not None:
            return run(x, weight, tuned, None, pdl, out)
    return library_product(x, weight, out)


def packed_gated_product(
    x: torch.Tensor, weight: PackedWeight, activation: Activation, *, pdl: bool = False
) -> torch.Tensor:
    """activation(x @ first half of the weight) · (x @ second half), rounded as by `act_and_mul`."""
    if _is_plain(x):
        tuned = choice(x.shape[0], weight, gated=True)
        if tuned is not None:
            return run(x, weight, tuned, activation, pdl)
    return act_and_mul(library_product(x, weight), activation, pdl=pdl)


def library_product(
    x: torch.Tensor, weight: PackedWeight, out: torch.Tensor | None = None
) -> torch.Tensor:
    whole = dequantise(weight, x.dtype)
    return F.linear(x, whole) if out is None else torch.mm(x, whole.t(), out=out)


def run(
    x: torch.Tensor,
    weight: PackedWeight,
    tuned: Streaming | Tiling,
    activation: Activation | None,
    pdl: bool,
    out: torch.Tensor | None = None,
) -> torch.Tensor:
    """The product, or with an activation the gated one."""
    if isinstance(tuned, Streaming):
        return stream(x, weight, tuned, activation, pdl, out)
    return tiled(x, weight, tuned, activation, pdl, out)


def dequantise(weight: PackedWeight, dtype: torch.dtype) -> torch.Tensor:
    """What the weight stands for, whole."""
    columns, inner = weight.shape
    out = torch.empty(columns, inner, dtype=dtype, device=weight.codes.device)
    # Rows along the grid's x: its y ends at 65,535.
    grid = (columns, ceil_div(weight.codes.shape[1], DEQUANTISED))
    variant = _dequantise_variant(inner, weight.group, weight.bits)
    variant(grid, (weight.codes, weight.scale, weight.zero, weight.offset, out), (), ())
    return out


@cache
def _dequantise_variant(inner: int, group: int, bits: int) -> Variant:
    return Variant(_dequantise, K=inner, GROUP=group, BITS=bits, BLOCK=DEQUANTISED, num_warps=4)


def _is_plain(x: torch.Tensor) -> bool:
    return x.is_contiguous() and x.dtype.itemsize == 2


def stream(
    x: torch.Tensor,
    weight: PackedWeight,
    tuned: Streaming,
    activation: Activation | None,
    pdl: bool,
    out: torch.Tensor | None = None,
) -> torch.Tensor:
    """The product of one row, or with an activation the gated one."""
    columns, inner = weight.shape
    columns = columns if activation is None else columns // 2
    if out is None:
        out = torch.empty(1, columns, dtype=x.dtype, device=x.device)
    variant = _stream_variant(columns, inner, weight.group, weight.bits, tuned, activation, pdl)
    grid = (ceil_div(columns, tuned.columns),)
    words = weight.codes.view(torch.int32)
    variant(grid, (x, words, weight.scale, weight.zero, weight.offset, out), (), ())
    return out


@cache
def _stream_variant(
    columns: int,
    inner: int,
    group: int,
    bits: int,
    tuned: Streaming,
    activation: Activation | None,
    pdl: bool,
) -> Variant:
    return Variant(
        _stream,
        N=columns,
        K=inner,
        GROUP=group,
        BITS=bits,
        COLUMNS=tuned.columns,
        PARTS=tuned.groups,
        GATED=activation is not None,
        ACTIVATION=activation or "",
        num_warps=tuned.num_warps,
        num_stages=1,
        **launch_options(pdl),
    )


def tiled(
    x: torch.Tensor,
    weight: PackedWeight,
    tuned: Tiling,
    activation: Activation | None,
    pdl: bool,
    out: torch.Tensor | None = None,
) -> torch.Tensor:
    """The product, or with an activation the gated one."""
    rows, inner = x.shape
    columns = weight.shape[0] if activation is None else weight.shape[0] // 2
    if out is None:
        out = torch.empty(rows, columns, dtype=x.dtype, device=x.device)
    # Tiles of the same columns are neighbours: the second finds the weight in the L2.
    grid = (ceil_div(rows, tuned.rows), ceil_div(columns, tuned.columns), tuned.splits)
    partial = arrived = None
    if tuned.splits > 1:
        assert grid[0] == 1
        assert tuned.columns >= ARRIVALS_COLUMNS
        size = grid[1] * tuned.splits * tuned.rows * tuned.columns
        partial = torch.empty(size, dtype=torch.float32, device=x.device)
        arrived = weight.arrived
    variant = _tiled_variant(columns, inner, weight.group, weight.bits, tuned, activation, pdl)
    of_weight = (weight.codes, weight.scale, weight.zero, weight.offset)
    variant(grid, (x, *of_weight, out, partial, arrived), (rows,), ())
    return out


@cache
def _tiled_variant(
    columns: int,
    inner: int,
    group: int,
    bits: int,
    tuned: Tiling,
    activation: Activation | None,
    pdl: bool,
) -> Variant:
    return Variant(
        _tiled,
        N=columns,
        K=inner,
        GROUP=group,
        BITS=bits,
        ROWS=tuned.rows,
        COLUMNS=tuned.columns,
        PARTS=tuned.groups,
        SPLITS=tuned.splits,
        SCALE_FIRST=tuned.scale_first,
        WEIGHT_FIRST=tuned.weight_first,
        GATED=activation is not None,
        ACTIVATION=activation or "",
        num_warps=tuned.num_warps,
        num_stages=tuned.num_stages,
        **launch_options(pdl),
    )


# ── codes to numbers ────────────────────────────────────────────────────────────────────────

# Of four bytes: a nibble each with a 1 above it, and those become bits 16 to 23 of a float below
# 0x3F: 1 + code / 128. Of 8 bits, the lowest byte of a float below 0x4B: 2^23 + code.
_NIBBLES = """
.reg .b32 t, h;
shr.u32 h, {0}, 4;
lop3.b32 t, {0}, 0x0F0F0F0F, 0x80808080, 0xEA;
lop3.b32 h, h, 0x0F0F0F0F, 0x80808080, 0xEA;
"""


def _floats_asm(bits: int) -> str:
    if bits == 8:
        lines = [f"prmt.b32 ${i}, $4, 0x4B, 0x455{i};" for i in range(4)]
        lines += [f"add.rn.f32 ${i}, ${i}, 0fCB000000;" for i in range(4)]
        return "\n".join(lines)
    lines = [f"prmt.b32 ${i}, t, 0x3F, 0x4{i}55;" for i in range(4)]
    lines += [f"prmt.b32 ${4 + i}, h, 0x3F, 0x4{i}55;" for i in range(4)]
    return "{" + _NIBBLES.format("$8") + "\n".join(lines) + "}"


def _scaled_asm(bits: int, kind: str) -> str:
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


def _whole_asm(kind: str) -> str:
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


_FLOATS_4 = tl.constexpr(_floats_asm(4))
_FLOATS_8 = tl.constexpr(_floats_asm(8))
_SCALED_4_BF16 = tl.constexpr(_scaled_asm(4, "bf16"))
_SCALED_4_F16 = tl.constexpr(_scaled_asm(4, "f16"))
_SCALED_8_BF16 = tl.constexpr(_scaled_asm(8, "bf16"))
_SCALED_8_F16 = tl.constexpr(_scaled_asm(8, "f16"))
_WHOLE_BF16 = tl.constexpr(_whole_asm("bf16"))
_WHOLE_F16 = tl.constexpr(_whole_asm("f16"))
# Of a float's 1, what a code of 4 bits counts.
STEPS_4 = tl.constexpr(128.0)


@triton.jit
def _floats_4(words):
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
def _floats_8(words):
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
def _scaled_4(codes, factor, term, kind: tl.constexpr):
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
def _scaled_8(codes, factor, term, kind: tl.constexpr):
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
def _whole_4(codes, zero, kind: tl.constexpr):
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
def _line(scale, zero, offset, at, BITS: tl.constexpr, SCALED: tl.constexpr):
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


# ── kernels ─────────────────────────────────────────────────────────────────────────────────


@triton.jit
def _stream(
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
    factor, term = _line(scale, zero, offset, scale_at, BITS, True)
    if GATED:
        second = tl.load(at + HALF, eviction_policy="evict_first")
        up_factor, up_term = _line(scale, zero, offset, scale_at + HALF_SCALES, BITS, True)
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
        next_factor, next_term = _line(scale, zero, offset, groups, BITS, True)
        if GATED:
            next_second = tl.load(at + HALF + ahead, mask=there, eviction_policy="evict_first")
            groups += HALF_SCALES
            next_up_factor, next_up_term = _line(scale, zero, offset, groups, BITS, True)
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
        a, b, c, d, e, f, g, h = _floats_4(words)
        products = _four(x, a, b, c, d) + _four(rest, e, f, g, h)
        of_x = tl.sum(x + rest, axis=2)
        term -= factor * STEPS_4
        factor *= STEPS_4
    else:
        a, b, c, d = _floats_8(words)
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
def _tiled(
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
            factor, term = _line(scale, zero, offset, place, BITS, SCALE_FIRST)
            if GATED:
                up_factor, up_term = _line(
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
        _finish(sums, others, row, column, there, out, N, GATED, ACTIVATION)
    else:
        tile = tl.arange(0, ROWS)[:, None] * COLUMNS + tl.arange(0, COLUMNS)[None, :]
        AREA: tl.constexpr = ROWS * COLUMNS
        to = partial + block.to(tl.int64) * (SPLITS * AREA) + tile
        tl.store(to + split * AREA, sums)
        # All threads' stores before the count that publishes them.
        tl.debug_barrier()
        if tl.atomic_add(arrived + block, 1, sem="acq_rel") == SPLITS - 1:
            tl.store(arrived + block, 0)
            sums = tl.load(to)
            for other in tl.range(1, SPLITS):
                sums += tl.load(to + other * AREA)
            _finish(sums, sums, row, column, there, out, N, GATED, ACTIVATION)


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
            low, high = _scaled_4(codes, factor, term, x.dtype)
            sums = _dot(x, low, sums, WEIGHT_FIRST)
            sums = _dot(rest, high, sums, WEIGHT_FIRST)
        else:
            factor = _of_bytes(factor, codes)
            numbers = _scaled_8(codes, factor, _of_bytes(term, codes), x.dtype)
            sums = _dot(x, numbers, sums, WEIGHT_FIRST)
    else:
        tl.static_assert(BITS == 4)
        low, high = _whole_4(codes, tl.broadcast_to(term, codes.shape), x.dtype)
        product = _dot(x, low, tl.zeros(sums.shape, tl.float32), WEIGHT_FIRST)
        product = _dot(rest, high, product, WEIGHT_FIRST)
        sums += product * (factor if WEIGHT_FIRST else tl.trans(factor))
    return sums


@triton.jit
def _dot(x, weight, sums, WEIGHT_FIRST: tl.constexpr):
    if WEIGHT_FIRST:
        sums = tl.dot(weight, tl.trans(x), sums)
    else:
        sums = tl.dot(x, tl.trans(weight), sums)
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
def _finish(
    sums,
    others,
    row,
    column,
    there,
    out,
    N: tl.constexpr,
    GATED: tl.constexpr,
    ACTIVATION: tl.constexpr,
):
    """[rows, columns]: activated, and stored."""
    if GATED:
        sums = gate_times_up(sums, others, out.dtype.element_ty, ACTIVATION)
    to = out + row.to(tl.int64)[:, None] * N + column[None, :]
    tl.store(to, sums.to(out.dtype.element_ty), mask=there & (column < N)[None, :])


@triton.jit
def _dequantise(
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
    factor, term = _line(scale, zero, offset, place, BITS, True)
    found = tl.load(codes + row * BYTES + byte, mask=mask, other=0)
    to = out + row * K + byte // SIZE * GROUP + byte % SIZE
    kind: tl.constexpr = out.dtype.element_ty
    if BITS == 4:
        tl.store(to, ((found & 15).to(tl.float32) * factor + term).to(kind), mask=mask)
        high = (found >> 4).to(tl.float32) * factor + term
        tl.store(to + GROUP // 2, high.to(kind), mask=mask)
    else:
        tl.store(to, (found.to(tl.float32) * factor + term).to(kind), mask=mask)
