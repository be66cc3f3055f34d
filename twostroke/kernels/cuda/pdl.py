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
def wait_for_previous(PDL: tl.constexpr):
    """Nothing that the launches in front write may be read before."""
    if PDL:
        gdc_launch_dependents()
        gdc_wait()
