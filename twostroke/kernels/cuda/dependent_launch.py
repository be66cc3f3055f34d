"""Programmatic dependent launch (PDL): a launch is set up while the previous one still runs.

    linear ──▶│ norm │──▶ linear        with PDL the programs are there already, and wait

With few tokens a step is a chain of hundreds of short launches, and the memory is idle between two
of them. No result depends on the launch mode. A kernel that can wait has a constant `DEPENDENT`,
which `launch.py` sets by the step context.
"""

from __future__ import annotations

import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

CONSTANT = "DEPENDENT"
OPTIONS = {CONSTANT: True, "launch_pdl": True}  # of a dependent launch


@triton.jit
def fetch_to_l2(at, SIZE: tl.constexpr):
    """Fetch the SIZE bytes at each address into the L2 cache, from memory that no earlier launch
    writes: the memory is idle until those launches end. Nothing waits for the fetch."""
    sizes = tl.full(at.shape, SIZE, tl.int32)
    tl.inline_asm_elementwise(
        "cp.async.bulk.prefetch.L2.global [$1], $2; mov.u32 $0, 0;",
        "=r,l,r",
        [at, sizes],
        dtype=tl.int32,
        is_pure=False,
        pack=1,
    )


@triton.jit
def wait_for_previous(DEPENDENT: tl.constexpr):
    """Wait for the launches before this one; nothing that they write may be read before."""
    if DEPENDENT:
        gdc_launch_dependents()
        gdc_wait()
