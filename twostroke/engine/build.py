"""Settings → a running engine: find, check, plan memory, load, assemble; in that order, so that
what cannot work is refused before memory is taken.

The backend is chosen here (`_is_native`), and with it whether torch is imported: it is not for the
native kernels, and need not be installed.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import cache, cached_property, partial
from time import monotonic
from typing import TYPE_CHECKING

from twostroke.config import KV_8_BIT, EngineConfig
from twostroke.engine.api import EngineInfo
from twostroke.engine.assembly import Start
from twostroke.engine.core import EngineCore
from twostroke.engine.device import find_device, has_torch
from twostroke.errors import ConfigError
from twostroke.exec.grammar import Grammars
from twostroke.exec.memory import MemoryPlan
from twostroke.kernels import cpu
from twostroke.model.describe.cost import model_figures
from twostroke.model.describe.spec import ModelSpec
from twostroke.model.formats.phase_formats import phase_formats
from twostroke.model.load import (
    chat_template_source,
    find_model,
    open_tokenizer,
    recommended_sampling,
)
from twostroke.model.native_decoder import default_threads
from twostroke.model.opened import OpenedModel, open_model
from twostroke.observe.ceilings import Ceilings, measure_ceilings
from twostroke.request import SamplingParams

if TYPE_CHECKING:
    from twostroke.engine.input_processor import InputProcessor
    from twostroke.engine.output_processor import OutputProcessor
    from twostroke.engine.rendering import TemplateRenderer
    from twostroke.model.text.tokenizer import Tokenizer


log = logging.getLogger(__name__)

NATIVE_KV = ("auto", "float16", "int8")  # types of the cache that the native kernels have
DENSE = ("float32", "float16", "bfloat16", "f32", "f16", "bf16")
GET_TORCH = "pip install 'twostroke[reference]'"
NO_KERNELS = "this installation has no native kernels (they could not be built when it was made)"
GET_KERNELS = "install a C++ compiler, then twostroke again (`pip install -v .` says what is wrong)"


@dataclass(frozen=True)
class Engine:
    """An engine and what there is to know about it."""

    config: EngineConfig
    model_name: str
    spec: ModelSpec
    memory: MemoryPlan
    core: EngineCore
    tokenizer: Callable[[], Tokenizer | None]  # opened when first asked for
    sampling: SamplingParams  # what the model's makers recommend
    device: str
    dtype: str
    load_s: float
    weights: str  # what they are kept in
    file_format: str  # "gguf" or "safetensors"
    renderer: TemplateRenderer | None = None  # of chat templates; None: made with the first chat

    # Imported here: the engine's own process need not load what reads and writes text.

    @cached_property
    def input_processor(self) -> InputProcessor:
        from twostroke.engine.input_processor import InputProcessor, ModelLimits

        tokenizer, info = self.tokenizer(), self.info()
        template = None if tokenizer is None else chat_template_source(self.config, tokenizer)
        limits = ModelLimits(info.vocab_size, info.max_model_len, info.max_logprobs)
        return InputProcessor(tokenizer, template, limits, self.renderer)

    @cached_property
    def output_processor(self) -> OutputProcessor:
        from twostroke.engine.output_processor import OutputProcessor

        return OutputProcessor(self.tokenizer(), self.config.seed)

    def info(self) -> EngineInfo:
        limits, memory = self.core.scheduler.config, self.memory
        return EngineInfo(
            model_name=self.model_name,
            vocab_size=self.spec.vocab_size,
            max_model_len=memory.max_model_len,
            max_logprobs=self.config.max_logprobs,
            max_num_seqs=limits.max_num_seqs,
            max_num_batched_tokens=limits.max_num_batched_tokens,
            block_size=limits.block_size,
            dtype=self.dtype,
            weights=self.weights,
            device=self.device,
            total_bytes=memory.total_bytes,
            weight_bytes=memory.weight_bytes,
            kv_bytes=memory.kv_bytes,
            kv_tokens=sum(memory.group_blocks) * limits.block_size,
            kv_groups=limits.groups,
            load_s=self.load_s,
            sampling=self.sampling,
            state_bytes=memory.state_bytes,
            activation_bytes=memory.activation_bytes,
            graph_bytes=memory.graph_bytes,
            threads=self._threads() if self.device == "cpu" else 0,
            family=self.spec.family,
            num_parameters=self.spec.num_parameters(),
            file_format=self.file_format,
            kv_layout=self.core.scheduler.offers.layout,
            figures=model_figures(self.spec, self.core.cost),
            **self._ceilings()._asdict(),
        )

    def _ceilings(self) -> Ceilings:
        if not self.config.measure_ceilings:
            return Ceilings()
        if self.device != "cpu":
            import torch

            from twostroke.observe.gpu_ceilings import measure_gpu_ceilings

            of_one = measure_gpu_ceilings(torch.device(self.device), getattr(torch, self.dtype))
            return Ceilings(*(self.config.tensor_parallel_size * rate for rate in of_one))
        return measure_ceilings(self._threads())

    def _threads(self) -> int:
        return self.config.threads or default_threads(self.config.engines_on_host)


def build_engine(config: EngineConfig, renderer: TemplateRenderer | None = None) -> Engine:
    """An engine that reads and writes text. `renderer`: of chat templates, if it has been started
    already."""
    return replace(_build(config, with_text=True), renderer=renderer)


def build_core_engine(config: EngineConfig) -> Engine:
    """An engine for a process that sees token ids only; the tokenizer is in the HTTP process."""
    return _build(config, with_text=False)


def _build(config: EngineConfig, with_text: bool) -> Engine:
    started = monotonic()
    device = find_device(config)
    native = _is_native(config, device)
    files = find_model(config)
    model = open_model(config, files, device)
    _check_several(config)
    _check_cache(config, model.spec)
    if model.spec.has_experts:
        log.info(
            "parameters: %s, of which a token goes through %s",
            f"{model.spec.num_parameters():,}",
            f"{model.spec.num_active_parameters():,}",
        )
    opened = partial(open_tokenizer, config, files)
    tokenizer = cache(opened) if with_text else opened
    if with_text:
        tokenizer()  # a bad one is refused before memory is taken
    grammars = Grammars(tokenizer, model.spec.vocab_size)
    core, memory, dtype = _backend(native)(config, model, device, grammars)
    return Engine(
        config,
        files.name,
        model.spec,
        memory,
        core,
        tokenizer,
        SamplingParams(**recommended_sampling(config, files)),
        device,
        dtype,
        monotonic() - started,
        _kept_in(model, config, native, device, dtype),
        "gguf" if files.kind == "gguf" else "safetensors",
    )


def _check_several(config: EngineConfig) -> None:
    """Whether this can be one of several engines."""
    several = config.engines_on_host > 1 or config.kv_sharing != "none"
    if several and config.tensor_parallel_size > 1:
        raise ConfigError(
            f"tensor_parallel_size is {config.tensor_parallel_size}, and there are several "
            "engines: KV blocks travel between engines of one rank each as yet; leave it out, or "
            "leave out --prefill-engines, --decode-engines and --data-parallel-size"
        )


def _check_cache(config: EngineConfig, spec: ModelSpec) -> None:
    if config.kv_cache_dtype in KV_8_BIT and spec.has_latents:
        raise ConfigError(
            f"kv_cache_dtype={config.kv_cache_dtype!r} is for keys and values of heads, and this "
            "model caches latents (MLA), which are small as they are; leave it at 'auto'"
        )


def _kept_in(
    model: OpenedModel, config: EngineConfig, native: bool, device: str, dtype: str
) -> str:
    """The weights' type, and the file's if that is another."""
    stored = model.stored_as()
    asked, triton = config.quantization, device.startswith("cuda") and config.kernels == "auto"
    quantized = any(kind in stored for kind in ("fp8", "int4", "int8"))
    if native:
        kept = asked if stored.lower() in DENSE else model.dtype if quantized else stored
    elif config.phases_differ:
        phases = ("prefill", "decode")
        kept = " + ".join(f"{one} {config.for_phase(one).quantization or dtype}" for one in phases)
    elif any(phase_formats(model.spec, model.weights, config, blocks=triton)):
        kept = stored if quantized or asked is None else asked
    else:
        kept = dtype
    return kept if kept == stored else f"{kept}, from {stored}" if kept else stored


def _backend(native: bool) -> Start:
    """Imported here: one of them needs torch, and the other should not pay for it."""
    if native:
        from twostroke.engine import build_native

        return build_native.start
    from twostroke.engine import build_torch

    return build_torch.start


def _is_native(config: EngineConfig, device: str) -> bool:
    """The native kernels, unless they cannot do what is asked for."""
    kv_unmet = config.kv_cache_dtype not in NATIVE_KV
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
    if config.kernels == "native" and kv_unmet:
        raise ConfigError(
            f"the native kernels have no kv_cache_dtype={config.kv_cache_dtype!r}; leave it at "
            "'auto', or use kernels='reference'"
        )
    fp8 = config.quantization == "fp8"
    if config.kernels == "native" and fp8:
        raise ConfigError(
            "the native kernels have no quantization='fp8'; use int8, or kernels='reference'"
        )
    native = device == "cpu" and cpu.available() and not kv_unmet and not fp8
    native = native and config.kernels != "reference"
    if config.phases_differ and (native or config.kernels == "native"):
        raise ConfigError(
            f"prefill_quantization is {config.prefill_quantization!r} and decode_quantization "
            f"{config.decode_quantization!r}, but the native kernels of a CPU keep weights once, "
            "for both phases; use quantization, or kernels='reference', which is slow on a CPU"
        )
    if not native and not has_torch():
        raise ConfigError(_needs_torch(config, kv_unmet))
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
    if kv_unmet and config.kernels == "auto" and device == "cpu" and cpu.available():
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
            f"isa {config.isa!r} is not what this machine has; it has "
            f"{', '.join(cpu.module().isas())}"
        )
    return native


def _needs_torch(config: EngineConfig, kv_unmet: bool) -> str:
    """Why this cannot run without torch, and what to do."""
    get_torch = GET_TORCH
    if config.kernels == "reference":
        return (
            "kernels is 'reference', which computes with torch, and torch is not installed: "
            f"{get_torch}, or leave kernels at 'auto'"
        )
    if kv_unmet and cpu.available():
        return (
            f"kv_cache_dtype={config.kv_cache_dtype!r} on a CPU is computed with torch, and torch "
            f"is not installed: {get_torch}, or leave kv_cache_dtype at 'auto'"
        )
    return (
        f"there is nothing to compute with: {NO_KERNELS}, and torch is not installed; "
        f"{GET_KERNELS}, or compute with torch, slowly: {get_torch}"
    )
