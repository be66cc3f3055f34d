"""`measure_gpu_ceilings` measures the maximum rates of a GPU. Metrics compare the rates of steps
with them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from twostroke.observe.ceilings import TRIES, Ceilings

READ_BYTES = 1 << 30  # more than any cache holds
WIDTH = 8192  # of square matrices, large enough for the matrix units' full rate

Timer = Callable[[Callable[[], object]], float]  # seconds on the device


def measure_gpu_ceilings(device: torch.device, dtype: torch.dtype) -> Ceilings:
    """Measure the rates in about 0.1 s."""
    free = torch.cuda.mem_get_info(device)[0]
    with torch.cuda.device(device), torch.inference_mode():
        found = best_rates(device, dtype, min(READ_BYTES, free // 4), WIDTH, _seconds)
        torch.cuda.empty_cache()
    return found


def best_rates(
    device: torch.device, dtype: torch.dtype, read_bytes: int, width: int, seconds: Timer
) -> Ceilings:
    buffer = torch.ones(read_bytes // 4, device=device)
    read_s = min(seconds(buffer.sum) for _ in range(TRIES))
    del buffer
    left, right = (torch.randn(width, width, device=device).to(dtype) for _ in range(2))
    product_s = min(seconds(lambda: left @ right) for _ in range(TRIES))
    return Ceilings(read_bytes / read_s, 2 * width**3 / product_s)


def _seconds(run: Callable[[], object]) -> float:
    event: Any = torch.cuda.Event
    before, after = event(enable_timing=True), event(enable_timing=True)
    before.record()
    run()
    after.record()
    after.synchronize()
    return float(before.elapsed_time(after)) / 1e3
