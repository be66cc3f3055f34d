"""What several test modules share."""

from __future__ import annotations

from functools import cache
from pathlib import Path

import numpy as np
import numpy.typing as npt

from twostroke.kernels import cpu
from twostroke.model.find import hub


@cache
def default_model_path() -> Path:
    """The default model's GGUF file, fetched on the first use on a machine."""
    return hub.resolve(None).path


@cache
def narrow_isa() -> str:
    """Return the best instruction set without matrix units. Matrix units round a step of many
    tokens in another way than a step of few tokens."""
    native = cpu.module()
    return next(isa for isa in native.isas() if native.matrix_unit_min_tokens(isa) == 0)


def round_to_bf16(x: npt.NDArray[np.floating]) -> npt.NDArray[np.float32]:
    """Return the nearest bf16 numbers, as floats. Ties go to the even one."""
    bits = np.ascontiguousarray(x, np.float32).view(np.uint32)
    bits = bits + np.uint32(0x7FFF) + (bits >> np.uint32(16) & np.uint32(1))
    return (bits & np.uint32(0xFFFF0000)).view(np.float32)
