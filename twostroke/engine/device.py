"""Which device an engine runs on. torch is asked only where there may be a GPU: importing it takes
seconds and hundreds of megabytes, which the native kernels of a CPU have no other use for."""

from __future__ import annotations

import ctypes
import os
import sys

from twostroke.config import EngineConfig, hides_gpus
from twostroke.errors import ConfigError

DRIVERS = {"linux": "libcuda.so.1", "win32": "nvcuda.dll"}  # torch finds no GPU without
AMD = "/dev/kfd"  # torch for AMD's devices calls them "cuda", too


def find_device(config: EngineConfig) -> str:
    """As torch names it: "cpu", "cuda:0", …"""
    asked = config.device
    if asked == "cpu" or (asked == "auto" and not may_have_gpu()):
        return "cpu"
    if _finds_gpu():
        return "cuda:0" if asked in ("auto", "cuda") else asked
    if asked == "auto":
        return "cpu"
    raise ConfigError("device is 'cuda', but torch finds no GPU; use device='cpu' or 'auto'")


def may_have_gpu() -> bool:
    """False only where torch would find none either."""
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
