"""Programmatic dependent launch (PDL): a launch is set up while the previous one still runs.

    linear ──▶│ norm │──▶ linear        with PDL the next programs have started, and wait

With few tokens a step is a chain of hundreds of short launches, and without PDL the memory is idle
between two launches. No result depends on the launch mode. Kernels that support PDL have a constant
`DEPENDENT`, which `launch.py` sets from the step context.
"""

from __future__ import annotations

import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

CONSTANT = "DEPENDENT"
OPTIONS = {CONSTANT: True, "launch_pdl": True}  # of a dependent launch


@triton.jit
def fetch_to_l2(at, SIZE: tl.constexpr):
    """Start to fetch the SIZE bytes at each address into the L2 cache. No earlier launch may write
    these bytes, so a dependent launch can fetch them before it waits."""
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
    """Wait for the earlier launches. Their results must not be read before."""
    if DEPENDENT:
        gdc_launch_dependents()
        gdc_wait()
