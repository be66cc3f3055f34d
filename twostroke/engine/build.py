"""`build_engine` makes a running engine from settings.

    find ─▶ describe ─▶ check ─▶ plan memory ─▶ load ─▶ start

In this order, settings that cannot work are refused before memory is allocated. The first three
stages are in `_build`, the others in the `start` of a backend (`build_native.py`,
`build_torch.py`).
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import cache, cached_property, partial
from time import monotonic
from typing import TYPE_CHECKING, Any

from twostroke.config import KV_8_BIT, EngineConfig
from twostroke.engine.api import EngineInfo
from twostroke.engine.assembly import Start
from twostroke.engine.core import EngineCore
from twostroke.engine.device import find_device
from twostroke.engine.kernel_choice import is_native
from twostroke.errors import ConfigError
from twostroke.exec.grammar import Grammars
from twostroke.exec.memory import MemoryPlan
from twostroke.kernels import cpu
from twostroke.model.describe.cost import model_figures
from twostroke.model.describe.spec import ModelSpec
from twostroke.model.find.hub import find_model
from twostroke.model.formats.phase_formats import phase_formats
from twostroke.model.load import OpenedModel, open_model
from twostroke.model.native_decoder import default_threads
from twostroke.model.text.model_text import (
    chat_template_source,
    open_tokenizer,
    recommended_sampling,
)
from twostroke.observe.ceilings import Ceilings, measure_ceilings
from twostroke.request import SamplingParams

if TYPE_CHECKING:
    from twostroke.engine.input_processor import InputProcessor
    from twostroke.engine.output_processor import OutputProcessor
    from twostroke.engine.rendering import TemplateRenderer
    from twostroke.model.text.tokenizer import Tokenizer


log = logging.getLogger(__name__)

UNQUANTISED = ("float32", "float16", "bfloat16", "f32", "f16", "bf16")


@dataclass(frozen=True)
class Engine:
    """An engine and its properties."""

    config: EngineConfig
    model_name: str
    spec: ModelSpec
    memory: MemoryPlan
    core: EngineCore
    tokenizer: Callable[[], Tokenizer | None]  # opened by the first call
    sampling: SamplingParams  # the recommendation of the model's makers
    device: str
    dtype: str
    load_s: float
    weights: str  # type of the weights in memory
    file_format: str  # "gguf" or "safetensors"
    native: bool  # runs on the native kernels of a CPU, not on torch
    renderer: TemplateRenderer | None = None  # None: created with the first chat

    # These properties import text processing, which the engine's own process does not need.

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
            draft_bytes=memory.draft_bytes,
            threads=self._threads() if self.device == "cpu" else 0,
            family=self.spec.family,
            num_parameters=self.spec.num_parameters(),
            file_format=self.file_format,
            kv_layout=self.core.scheduler.offers.layout,
            figures=model_figures(self.spec, self.core.cost),
            **self._instruction_sets(),
            speculative=self.core.scheduler.speculator is not None,
            **self._ceilings()._asdict(),
        )

    def _instruction_sets(self) -> dict[str, Any]:
        """Return the instruction set of the native kernels, and those that this CPU has."""
        if self.device != "cpu" or not cpu.available():
            return {}
        isas = tuple(cpu.module().isas())
        if not self.native:
            return {"isas": isas}
        return {"isas": isas, "isa": isas[0] if self.config.isa == "auto" else self.config.isa}

    def _ceilings(self) -> Ceilings:
        if not self.config.measure_ceilings:
            return Ceilings()
        if self.device != "cpu":
            import torch

            from twostroke.observe.gpu_ceilings import measure_gpu_ceilings

            gpu = measure_gpu_ceilings(torch.device(self.device), getattr(torch, self.dtype))
            return Ceilings(*(self.config.tensor_parallel_size * rate for rate in gpu))
        return measure_ceilings(self._threads())

    def _threads(self) -> int:
        return self.config.threads or default_threads(self.config.engines_on_host)


def build_engine(config: EngineConfig, renderer: TemplateRenderer | None = None) -> Engine:
    """Build an engine that reads and writes text. `renderer`: a renderer of chat templates that is
    already running."""
    return replace(_build(config, with_text=True), renderer=renderer)


def build_core_engine(config: EngineConfig) -> Engine:
    """Build an engine that reads and writes token ids only: the HTTP process has the tokenizer."""
    return _build(config, with_text=False)


def _build(config: EngineConfig, with_text: bool) -> Engine:
    began_s = monotonic()
    # 1. Find the device, the kernels and the model's files.
    device = find_device(config)
    native = is_native(config, device)
    files = find_model(config)
    # 2. Describe the model: read its spec, and open its weights without reading them.
    model = open_model(config, files, device)
    # 3. Check that the model supports the settings, and that the tokenizer can be read.
    _check_several(config)
    _check_cache(config, model.spec)
    _log_experts(model.spec)
    opener = partial(open_tokenizer, config, files)
    tokenizer = cache(opener) if with_text else opener
    if with_text:
        tokenizer()
    # 4., 5., 6. Plan the memory, load the weights, start the core.
    start = _start_of_backend(native)
    core, memory, dtype = start(config, model, device, Grammars(tokenizer, model.spec.vocab_size))
    return Engine(
        config=config,
        model_name=files.name,
        spec=model.spec,
        memory=memory,
        core=core,
        tokenizer=tokenizer,
        sampling=SamplingParams(**recommended_sampling(config, files)),
        device=device,
        dtype=dtype,
        load_s=monotonic() - began_s,
        weights=_weight_types(model, config, native, device, dtype),
        file_format="gguf" if files.kind == "gguf" else "safetensors",
        native=native,
    )


def _start_of_backend(native: bool) -> Start:
    """Return the `start` of the backend. Imports only that backend, because the native one must not
    import torch."""
    if native:
        from twostroke.engine import build_native

        return build_native.start
    from twostroke.engine import build_torch

    return build_torch.start


def _log_experts(spec: ModelSpec) -> None:
    if spec.has_experts:
        log.info(
            "parameters: %s, of which a token uses %s",
            f"{spec.num_parameters():,}",
            f"{spec.num_active_parameters():,}",
        )


def _check_several(config: EngineConfig) -> None:
    """Refuse tensor parallelism in one of several engines."""
    several = config.engines_on_host > 1 or config.kv_sharing != "none"
    if several and config.tensor_parallel_size > 1:
        raise ConfigError(
            f"tensor_parallel_size is {config.tensor_parallel_size}, and there are several "
            "engines, which need one rank each, because KV blocks cannot be sent between engines "
            "of several ranks; leave it out, or leave out --prefill-engines, --decode-engines and "
            "--data-parallel-size"
        )


def _check_cache(config: EngineConfig, spec: ModelSpec) -> None:
    if config.kv_cache_dtype in KV_8_BIT and spec.has_latents:
        raise ConfigError(
            f"kv_cache_dtype={config.kv_cache_dtype!r} is for keys and values of heads, and this "
            "model caches latents (MLA), which are small as they are; leave it at 'auto'"
        )


def _weight_types(
    model: OpenedModel, config: EngineConfig, native: bool, device: str, dtype: str
) -> str:
    """Return the type of the weights in memory, and their type in the file if it differs."""
    stored = model.stored_as()
    quantization, triton = config.quantization, False
    if device.startswith("cuda"):
        triton = config.kernels == "auto"
    quantized = any(name in stored for name in ("fp8", "int4", "int8"))
    if native:
        if stored.lower() in UNQUANTISED:
            kept = quantization
        else:
            kept = model.dtype if quantized else stored
    elif config.phases_differ:
        phases = ("prefill", "decode")
        kept = " + ".join(f"{one} {config.for_phase(one).quantization or dtype}" for one in phases)
    elif any(phase_formats(model.spec, model.weights, config, keep_gguf_blocks=triton)):
        kept = stored if quantized or quantization is None else quantization
    else:
        kept = dtype
    return kept if kept == stored else f"{kept}, from {stored}" if kept else stored
