"""A driver for a machine without a GPU: Triton compiles for an H200, and launches go nowhere.

All of Triton's own way to a launch is there, up to the C function that would call the driver:
`launched` is called instead of that one, with what it would be given.
"""

from __future__ import annotations

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

from triton.backends.compiler import GPUTarget
from triton.backends.nvidia import driver as nvidia
from triton.runtime import driver

Launched = Callable[..., object]


class NoGPU:
    def __init__(self, launched: Launched) -> None:
        self.launched = launched
        self.utils = SimpleNamespace(
            load_binary=lambda name, *_: (name, abs(hash(name)), 0, 0, 1024),
            get_device_properties=lambda _: {"max_shared_mem": 227 << 10},
            fill_tma_descriptor=_descriptor,
            fill_tma_descriptor_tiled=_descriptor,
            launch=_launch_of_newer,
            build_signature_metadata=tuple,
        )

    def get_current_target(self) -> Any:
        return GPUTarget("cuda", 90, 32)

    def get_current_device(self) -> int:
        return 0

    def get_current_stream(self, _: int) -> int:
        return 0

    def launcher_cls(self, source: Any, metadata: Any) -> Any:
        return nvidia.CudaLauncher(source, metadata)


def _descriptor(*given: object) -> tuple[str, ...]:
    return ("descriptor", *map(str, given))


def _launch_of_newer(*args: Any) -> None:
    """Triton 3.7 and later: one function for all kernels. Given on as Triton 3.6 has it, where each
    kernel has a function of its own."""
    before, metadata, scratch, _, _, own = args[:7], args[7:11], args[11:13], *args[13:16]
    driver.active.launched(*before, *scratch, *metadata, *own)


def install(launched: Launched, setattr: Callable[..., None] = setattr) -> None:
    """`setattr`: one that can be undone, if it is to be."""
    if hasattr(nvidia, "make_launcher"):  # before Triton 3.7
        # What Triton compiles it keeps for as long as the process runs: it asks who is there now.
        module = SimpleNamespace(launch=lambda *args: driver.active.launched(*args))
        setattr(nvidia, "compile_module_from_src", lambda **_: module)
    if hasattr(nvidia, "PyKernelArg"):  # of a module in C
        setattr(nvidia, "PyKernelArg", dict)
    setattr(nvidia, "library_dirs", list)
    setattr(driver, "_active", NoGPU(launched))
