"""The few PTX instructions of the kernels' inline assembly, on plain numbers: what the
interpreter passes over is held to what it stands for without a GPU."""

from __future__ import annotations

import re
import struct
from collections.abc import Sequence

import torch

WORD = 0xFFFFFFFF


def to_bits(value: float) -> int:
    found: int = struct.unpack("<I", struct.pack("<f", value))[0]
    return found


def to_float(bits: int) -> float:
    found: float = struct.unpack("<f", struct.pack("<I", bits & WORD))[0]
    return found


def halves(bits: int, kind: str) -> list[float]:
    """Two numbers of 16 bits in a word, the lower first."""
    dtype = torch.bfloat16 if kind == "bf16" else torch.float16
    pair = torch.tensor([bits & 0xFFFF, bits >> 16 & 0xFFFF], dtype=torch.int32).to(torch.int16)
    return [float(one) for one in pair.view(dtype)]


def word(low: float, high: float, kind: str) -> int:
    """Rounded to nearest."""
    dtype = torch.bfloat16 if kind == "bf16" else torch.float16
    pair = torch.tensor([low, high], dtype=torch.float64).to(torch.float32).to(dtype)
    first, second = (int(one) & 0xFFFF for one in pair.view(torch.int16))
    return first | second << 16


def run(source: str, outputs: int, inputs: Sequence[int]) -> list[int]:
    """The output registers, $0 and on, of a block whose inputs are the registers after them."""
    registers = {f"${outputs + n}": bits for n, bits in enumerate(inputs)}

    def read(name: str) -> int:
        if name.startswith("0f"):
            return int(name[2:], 16)
        return registers[name] if name in registers else int(name, 0)

    for line in re.split(r"[;{}]", source):
        operation, _, rest = line.strip().partition(" ")
        if not operation or operation == ".reg":
            continue
        to, *names = (part.strip() for part in rest.split(","))
        values = [read(name) for name in names]
        registers[to] = _result(operation, values) & WORD
    return [registers[f"${n}"] for n in range(outputs)]


def _result(operation: str, v: list[int]) -> int:
    name, *kinds = operation.split(".")
    if name == "mov":
        return v[0]
    if name == "shr":
        return v[0] >> v[1]
    if name == "shl":
        return v[0] << v[1] & 0xFFFFFFFF
    if name == "and":
        return v[0] & v[1]
    if name == "xor":
        return v[0] ^ v[1]
    if name == "lop3":
        assert v[3] == 0xEA
        return v[0] & v[1] | v[2]
    if name == "prmt":
        both = v[0] | v[1] << 32
        picked = ((both >> 8 * (v[2] >> 4 * n & 15)) & 255 for n in range(4))
        return sum(byte << 8 * n for n, byte in enumerate(picked))
    if operation == "add.rn.f32":
        return to_bits(to_float(v[0]) + to_float(v[1]))
    if operation == "fma.rn.f32":
        return to_bits(to_float(v[0]) * to_float(v[1]) + to_float(v[2]))
    kind = kinds[1].removesuffix("x2")
    if name == "cvt":  # the first operand becomes the upper half
        return word(to_float(v[1]), to_float(v[0]), kind)
    assert name == "fma"
    a, b, c = (halves(bits, kind) for bits in v)
    low, high = (x * y + z for x, y, z in zip(a, b, c, strict=True))
    return word(low, high, kind)
