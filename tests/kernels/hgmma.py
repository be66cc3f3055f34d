"""The machine code of a loop with Hopper's matrix instructions, which run while others do.

An instruction that has its left operand in registers reads these until a wait says that it is done.
Before CUDA 13.3 the assembler may write others there meanwhile, where Triton before 3.7 lets it.
"""

from __future__ import annotations

import re
import subprocess
from pathlib import Path
from typing import Any

from tests.kernels.test_cuda_compiles import CUOBJDUMP

LINE = re.compile(r"/\*([0-9a-f]{4,5})\*/\s+(?:@!?U?P\w+\s+)?(.*?);")
BACK = re.compile(r"BRA\S*\s+(?:\S+,\s*)?0x([0-9a-f]+)")
PRODUCT = re.compile(r"HGMMA\S*\s+R\d+, R(\d+),")
WAIT = re.compile(r"WARPGROUP\.DEPBAR\.LE gsb0, 0x([0-9a-f]+)")
WRITTEN = re.compile(r"(\S+)\s+R(\d+)")
WRITES_NONE = ("HGMMA", "ST", "LDGSTS", "RED", "BAR", "WARP")  # of those whose first is a register


def loop(kernel: Any, folder: Path) -> list[str]:
    """The instructions of the loop that has the most of these."""
    cubin = folder / "kernel.cubin"
    cubin.write_bytes(kernel.asm["cubin"])
    command = [str(CUOBJDUMP), "--dump-sass", str(cubin)]
    code = LINE.findall(subprocess.run(command, capture_output=True, text=True, check=True).stdout)
    place = {int(address, 16): n for n, (address, _) in enumerate(code)}
    loops: list[list[str]] = [[]]
    for n, (address, line) in enumerate(code):
        found = BACK.match(line)
        if found is not None and int(found[1], 16) < int(address, 16):
            loops.append([line for _, line in code[place[int(found[1], 16)] : n + 1]])
    return max(loops, key=lambda lines: sum("HGMMA" in line for line in lines))


def waits(lines: list[str]) -> list[int]:
    """Return the number of instructions that may still run after each wait."""
    return [int(found[1], 16) for found in map(WAIT.match, lines) if found is not None]


def overwritten(lines: list[str]) -> list[str]:
    """Instructions that write where one reads that may still run."""
    groups: list[list[range]] = [[]]  # that are waited for together; the last is not closed
    found = []
    for line in 2 * lines:
        product, wait, written = PRODUCT.match(line), WAIT.match(line), WRITTEN.match(line)
        if product is not None:
            groups[-1].append(range(int(product[1]), int(product[1]) + 4))
            if "gsb0" in line:
                groups.append([])
        elif wait is not None:
            groups = groups[max(0, len(groups) - 1 - int(wait[1], 16)) :]
        elif written is not None and not written[1].startswith(WRITES_NONE):
            first, size = int(written[2]), _registers(written[1])
            running = [registers for group in groups for registers in group]
            if any(first < r.stop and r.start < first + size for r in running):
                found.append(line)
    return found


def _registers(name: str) -> int:
    if ".128" in name or "M88.4" in name:
        return 4
    return 2 if ".64" in name or "WIDE" in name else 1
