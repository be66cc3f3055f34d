"""Memory, utilisation and power of the GPU, read from NVIDIA's driver with `pynvml`. The extra
`twostroke[gpu]` installs `pynvml` (package nvidia-ml-py)."""

from __future__ import annotations

import logging
from functools import cache
from typing import Any, NamedTuple

from twostroke.environment import visible_gpu

log = logging.getLogger(__name__)


class GpuFigures(NamedTuple):
    """One reading of the driver's values for one GPU, for all processes together."""

    memory_used_bytes: int
    memory_total_bytes: int
    utilisation: float  # share of the driver's last sample period in which any kernel ran
    power_w: float | None  # None: the GPU does not report its power


def gpu_figures(device: str) -> GpuFigures | None:
    """Return the driver's values for a GPU; None if `pynvml` is not installed, if there is no
    driver, or if the driver returns an error."""
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
        utilisation = nvml.nvmlDeviceGetUtilizationRates(handle).gpu / 100
    except nvml.NVMLError as error:
        log.info("the driver returned an error for GPU %s: %s", gpu, error)
        return None
    try:
        power_w = nvml.nvmlDeviceGetPowerUsage(handle) / 1e3
    except nvml.NVMLError:
        power_w = None
    return GpuFigures(memory.used, memory.total, utilisation, power_w)


@cache
def _nvml() -> Any:
    """Return initialised `pynvml`; None if it is not installed or finds no driver."""
    try:
        import pynvml

        pynvml.nvmlInit()
    except Exception as error:
        log.info("values of the GPU cannot be read: %s", error)
        return None
    return pynvml
