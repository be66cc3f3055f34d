"""Launches that are set up while the one in front still runs.

    product ──▶│ norm │──▶ product        early: the programs are there already, and wait

At few tokens a step is a chain of hundreds of short launches; what lies between two of them is time
in which nothing is read. No result depends on it.
"""

from __future__ import annotations

import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait


def launch_options(early: bool) -> dict[str, bool]:
    return {"EARLY": True, "launch_pdl": True} if early else {"EARLY": False}


@triton.jit
def await_last(EARLY: tl.constexpr):
    """Nothing of the launches in front may be read before."""
    if EARLY:
        gdc_launch_dependents()
        gdc_wait()
