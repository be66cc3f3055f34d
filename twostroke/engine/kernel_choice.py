"""`is_native`: the choice between the native kernels of a CPU and torch.

With the native kernels torch is not imported and need not be installed.
"""

from __future__ import annotations

import logging

from twostroke.config import EngineConfig
from twostroke.engine.device import has_torch
from twostroke.errors import ConfigError
from twostroke.kernels import cpu

log = logging.getLogger(__name__)

NATIVE_KV = ("auto", "float16", "int8")  # types of the KV cache that the native kernels support
GET_TORCH = "pip install 'twostroke[reference]'"
NO_KERNELS = "this installation has no native kernels (they could not be built when it was made)"
GET_KERNELS = "install a C++ compiler, then twostroke again (`pip install -v .` says what is wrong)"


def is_native(config: EngineConfig, device: str) -> bool:
    """Return whether the native kernels run the model. Raise `ConfigError` if no kernels can."""
    other_kv = config.kv_cache_dtype not in NATIVE_KV
    if device == "cpu" and config.kernels != "reference" and "fp8" in config.kv_cache_dtype:
        raise ConfigError(
            f"kv_cache_dtype={config.kv_cache_dtype!r} is for GPUs: no CPU's instructions read "
            "fp8; use kv_cache_dtype='int8', which takes as little memory"
        )
    if config.kernels == "native" and device != "cpu":
        raise ConfigError("kernels is 'native', which is for CPUs; use kernels='auto'")
    if config.kernels == "native" and not cpu.available():
        raise ConfigError(
            f"kernels is 'native', but {NO_KERNELS}; {GET_KERNELS}, or use kernels='auto'"
        )
    if config.kernels == "native" and other_kv:
        raise ConfigError(
            f"the native kernels have no kv_cache_dtype={config.kv_cache_dtype!r}; leave it at "
            "'auto', or use kernels='reference'"
        )
    fp8 = config.quantization == "fp8"
    if config.kernels == "native" and fp8:
        raise ConfigError(
            "the native kernels have no quantization='fp8'; use int8, or kernels='reference'"
        )
    native = device == "cpu" and cpu.available() and not other_kv and not fp8
    native = native and config.kernels != "reference"
    if config.phases_differ and (native or config.kernels == "native"):
        raise ConfigError(
            f"prefill_quantization is {config.prefill_quantization!r} and decode_quantization "
            f"{config.decode_quantization!r}, but the native kernels of a CPU keep weights once, "
            "for both phases; use quantization, or kernels='reference', which is slow on a CPU"
        )
    if not native and not has_torch():
        raise ConfigError(_needs_torch(config, other_kv))
    if native and config.tensor_parallel_size > 1:
        raise ConfigError(
            f"tensor_parallel_size is {config.tensor_parallel_size}, but the native kernels of a "
            "CPU run in one process, which uses all its cores; leave it out, or use "
            "kernels='reference' for ranks that compute with torch, which is slow on a CPU"
        )
    if native and config.dtype in ("float16", "bfloat16"):
        log.warning(
            "dtype=%s changes nothing: the kernels of a CPU keep weights as their files have them "
            "and add up in float32",
            config.dtype,
        )
    if other_kv and config.kernels == "auto" and device == "cpu" and cpu.available():
        log.warning(
            "kv_cache_dtype=%s: computed with torch, which is slow on a CPU; the native kernels "
            "have float16, which 'auto' is",
            config.kv_cache_dtype,
        )
    if config.kernels == "auto" and device == "cpu" and not cpu.available():
        log.warning("running on torch's CPU paths, which are slow: %s; %s", NO_KERNELS, GET_KERNELS)
    if fp8 and config.kernels == "auto" and device == "cpu" and cpu.available():
        log.warning(
            "quantization=fp8: computed with torch, which is slow on a CPU; the native kernels "
            "have int8 and int4"
        )
    if native and config.isa != "auto" and config.isa not in cpu.module().isas():
        raise ConfigError(
            f"this machine does not support isa {config.isa!r}; use one of "
            f"{', '.join(cpu.module().isas())}"
        )
    return native


def _needs_torch(config: EngineConfig, other_kv: bool) -> str:
    """Return why torch is needed, and how to install it."""
    get_torch = GET_TORCH
    if config.kernels == "reference":
        return (
            "kernels is 'reference', which computes with torch, and torch is not installed: "
            f"{get_torch}, or leave kernels at 'auto'"
        )
    if other_kv and cpu.available():
        return (
            f"kv_cache_dtype={config.kv_cache_dtype!r} on a CPU is computed with torch, and torch "
            f"is not installed: {get_torch}, or leave kv_cache_dtype at 'auto'"
        )
    return (
        f"there is nothing to compute with: {NO_KERNELS}, and torch is not installed; "
        f"{GET_KERNELS}, or compute with torch, slowly: {get_torch}"
    )
