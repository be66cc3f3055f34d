"""Programmatic dependent launch (PDL): a launch is set up while the one in front still runs.

    product ──▶│ norm │──▶ product        with PDL the programs are there already, and wait

At few tokens a step is a chain of hundreds of short launches; what lies between two of them is time
in which nothing is read. No result depends on it.
"""

from __future__ import annotations

import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait


def launch_options(pdl: bool) -> dict[str, bool]:
    return {"PDL": True, "launch_pdl": True} if pdl else {"PDL": False}


@triton.jit
def fetch_to_l2(at, SIZE: tl.constexpr):
    """Have the SIZE bytes at each address fetched, of memory that no launch in front writes: while
    they run, the memory is idle. Nothing waits for it."""
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
def wait_for_previous(PDL: tl.constexpr):
    """Nothing that the launches in front write may be read before."""
    if PDL:
        gdc_launch_dependents()
        gdc_wait()
