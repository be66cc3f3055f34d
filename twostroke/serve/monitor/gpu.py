"""What NVIDIA's driver says of the GPU, through `pynvml` (the package nvidia-ml-py, in `[gpu]`)."""

from __future__ import annotations

import logging
from functools import cache
from typing import Any, NamedTuple

from twostroke.environment import visible_gpu

log = logging.getLogger(__name__)


class GpuFigures(NamedTuple):
    memory_used_bytes: int  # by all processes
    memory_total_bytes: int
    utilisation: float  # share of time in which any kernel ran
    power_w: float | None  # None: the board does not say


def gpu_figures(device: str) -> GpuFigures | None:
    """None if there is no `pynvml`, no driver, or no answer from it."""
    nvml = _nvml()
    if nvml is None:
        return None
    gpu = visible_gpu(int(device.partition(":")[2] or 0))
    try:
        if isinstance(gpu, int):
            handle = nvml.nvmlDeviceGetHandleByIndex(gpu)
        else:
            handle = nvml.nvmlDeviceGetHandleByUUID(gpu)
        memory = nvml.nvmlDeviceGetMemoryInfo(handle)
        busy = nvml.nvmlDeviceGetUtilizationRates(handle).gpu / 100
    except nvml.NVMLError as error:
        log.info("the driver does not answer for GPU %s: %s", gpu, error)
        return None
    try:
        power_w = nvml.nvmlDeviceGetPowerUsage(handle) / 1e3
    except nvml.NVMLError:
        power_w = None
    return GpuFigures(memory.used, memory.total, busy, power_w)


@cache
def _nvml() -> Any:
    """`pynvml`, initialised; None if it is not installed or finds no driver."""
    try:
        import pynvml

        pynvml.nvmlInit()
    except Exception as error:
        log.info("no figures of the GPU: %s", error)
        return None
    return pynvml
