"""`find_device`: the device that an engine runs on.

torch is imported only if the machine may have a GPU. The import takes seconds and hundreds of
megabytes, the native kernels of a CPU do not need torch, and torch may not be installed.
"""

from __future__ import annotations

import ctypes
import importlib.util
import logging
import os
import sys

from twostroke.config import EngineConfig
from twostroke.environment import hides_gpus
from twostroke.errors import ConfigError

DRIVERS = {"linux": "libcuda.so.1", "win32": "nvcuda.dll"}  # torch finds no GPU without them
AMD = "/dev/kfd"  # torch calls AMD's GPUs "cuda", too

log = logging.getLogger(__name__)


def find_device(config: EngineConfig) -> str:
    """Return the device by torch's name: "cpu", "cuda:0", …"""
    setting = config.device
    if setting == "cpu" or (setting == "auto" and not may_have_gpu()):
        return "cpu"
    if not has_torch():
        if setting != "auto":
            raise ConfigError(
                f"device is {setting!r}, which needs torch and Triton, and torch is not installed: "
                "pip install 'twostroke[gpu]', or use device='cpu'"
            )
        if num_gpus := _count_gpus():
            log.warning(
                "this machine has %s, but torch is not installed; running on the CPU. For the GPU: "
                "pip install 'twostroke[gpu]'",
                "a GPU" if num_gpus == 1 else f"{num_gpus} GPUs",
            )
        return "cpu"
    if _finds_gpu():
        if setting not in ("auto", "cuda"):
            return setting
        return f"cuda:{config.engine_index % _num_gpus()}"
    if setting == "auto":
        return "cpu"
    raise ConfigError("device is 'cuda', but torch finds no GPU; use device='cpu' or 'auto'")


def engines_on_gpu(config: EngineConfig, device: str) -> int:
    """Return the number of engines on this GPU. Engine n uses GPU n modulo the number of GPUs."""
    if config.engines_on_host == 1 or config.device not in ("auto", "cuda"):
        return config.engines_on_host
    number = int(device.partition(":")[2] or 0)
    return len(range(number, config.engines_on_host, _num_gpus()))


def has_torch() -> bool:
    return importlib.util.find_spec("torch") is not None


def may_have_gpu() -> bool:
    """Return False if torch would certainly find no GPU."""
    if hides_gpus() or sys.platform not in DRIVERS:
        return False
    if os.path.exists(AMD):
        return True
    try:
        ctypes.CDLL(DRIVERS[sys.platform])
    except OSError:
        return False
    return True


def _finds_gpu() -> bool:
    import torch

    return torch.cuda.is_available()


def _num_gpus() -> int:
    import torch

    return max(1, torch.cuda.device_count())


def _count_gpus() -> int:
    """Return the number of GPUs that NVIDIA's driver reports; 0 without a driver."""
    try:
        driver = ctypes.CDLL(DRIVERS[sys.platform])
    except (KeyError, OSError):
        return 0
    count = ctypes.c_int(0)
    found = driver.cuInit(0) == 0 and driver.cuDeviceGetCount(ctypes.byref(count)) == 0
    return count.value if found else 0
