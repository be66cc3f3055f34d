"""What the driver says of the GPU, if `pynvml` is there to ask it."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from functools import cache
from typing import Any

from prometheus_client.core import GaugeMetricFamily, Metric

log = logging.getLogger(__name__)


@cache
def _nvml() -> Any:
    """The library, ready to be asked; None if there is none."""
    try:
        import pynvml

        pynvml.nvmlInit()
    except Exception as error:
        log.info("no figures of the GPU in /metrics: %s", error)
        return None
    return pynvml


def gpu_families(device: str) -> Iterator[Metric]:
    nvml = _nvml()
    if nvml is None:
        return
    index = int(device.partition(":")[2] or 0)
    try:
        handle = nvml.nvmlDeviceGetHandleByIndex(index)
        memory = nvml.nvmlDeviceGetMemoryInfo(handle)
        busy = nvml.nvmlDeviceGetUtilizationRates(handle).gpu / 100
    except nvml.NVMLError as error:
        log.info("the driver does not answer for GPU %d: %s", index, error)
        return
    for name, text, value in (
        ("memory_used_bytes", "Memory in use, by all processes.", memory.used),
        ("memory_total_bytes", "Memory there is.", memory.total),
        (
            "utilisation",
            "Share of time in which any kernel ran; not how much of it was used.",
            busy,
        ),
    ):
        family = GaugeMetricFamily(f"twostroke:gpu_{name}", text, labels=["gpu"])
        family.add_metric([str(index)], value)
        yield family
