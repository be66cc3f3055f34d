"""Settings → a running engine: find, check, plan memory, load, assemble; in that order, so that
what cannot work is refused before memory is taken."""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import cache, cached_property, partial
from importlib import import_module
from time import monotonic
from typing import TYPE_CHECKING, cast

import torch

from twostroke.config import EngineConfig
from twostroke.engine.api import EngineInfo
from twostroke.engine.core import EngineCore
from twostroke.errors import ConfigError
from twostroke.exec.cuda import CudaExecutor
from twostroke.exec.executor import LocalExecutor
from twostroke.exec.grammar import Grammars
from twostroke.exec.graphs import DecodeGraphs, PieceGraphs, Record, Run, piece_ladder
from twostroke.exec.memory import MemoryPlan, host_memory_bytes, plan_memory
from twostroke.exec.native import NativeExecutor
from twostroke.exec.program import StepProgram
from twostroke.exec.rows import DeviceRows
from twostroke.exec.start import start_executor
from twostroke.exec.state import RowState
from twostroke.kernels import FusedKernels, cpu, reference
from twostroke.kv.pool import KVPool
from twostroke.model.cost import cost_model
from twostroke.model.decoder import Decoder
from twostroke.model.fused import FusedDecoder, Overlap
from twostroke.model.load import (
    OpenedModel,
    chat_template_source,
    find_model,
    open_model,
    open_tokenizer,
    recommended_sampling,
)
from twostroke.model.native import NativeDecoder, Packing, default_threads
from twostroke.model.spec import ModelSpec
from twostroke.observe.ceilings import Ceilings, measure_ceilings
from twostroke.request import SamplingParams
from twostroke.sched.scheduler import Scheduler
from twostroke.sched.step import SchedulerConfig

if TYPE_CHECKING:
    from twostroke.engine.frontend import Frontend
    from twostroke.model.tokenizer import Tokenizer


log = logging.getLogger(__name__)


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

    @cached_property
    def frontend(self) -> Frontend:
        # Imported here: an engine that does not speak need not load what reads and writes text.
        from twostroke.engine.frontend import Frontend
        from twostroke.engine.intake import Intake, Limits

        tokenizer, info = self.tokenizer(), self.info()
        template = None if tokenizer is None else chat_template_source(self.config, tokenizer)
        limits = Limits(info.vocab_size, info.max_model_len, info.max_logprobs)
        return Frontend(Intake(tokenizer, template, limits), self.config.seed)

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
            device=self.device,
            total_bytes=memory.total_bytes,
            weight_bytes=memory.weight_bytes,
            kv_bytes=memory.kv_bytes,
            kv_tokens=memory.num_blocks * limits.block_size,
            load_s=self.load_s,
            sampling=self.sampling,
            state_bytes=memory.state_bytes,
            activation_bytes=memory.activation_bytes,
            graph_bytes=memory.graph_bytes,
            **self._ceilings()._asdict(),
        )

    def _ceilings(self) -> Ceilings:
        if not self.config.measure_ceilings or self.device != "cpu":
            return Ceilings()
        return measure_ceilings(self.config.threads or default_threads())


def build_engine(config: EngineConfig) -> Engine:
    """An engine that reads and writes text."""
    return _build(config, speaks=True)


def build_silent_engine(config: EngineConfig) -> Engine:
    """An engine for a process that sees token ids alone; those who speak have the tokenizer."""
    return _build(config, speaks=False)


def _build(config: EngineConfig, speaks: bool) -> Engine:
    started = monotonic()
    device = _device(config)
    on_gpu = device.type == "cuda"
    files = find_model(config)
    model = open_model(config, files, str(device))
    tokenizer = cache(partial(open_tokenizer, config, files))
    if speaks:
        tokenizer()  # a bad one is refused before memory is taken
    native = _is_native(config, device)
    dtype = _dtype(config.dtype, model.dtype if on_gpu else "float32")
    own = "float16" if native else str(dtype).removeprefix("torch.")
    kv_dtype = _dtype(config.kv_cache_dtype, own)
    total = torch.cuda.mem_get_info(device)[0] if on_gpu else host_memory_bytes()
    packing = Packing(model.spec, model.weights, model.dtype, config.quantization, config.isa)
    width = packing.bytes_each() if native else dtype.itemsize
    memory = plan_memory(config, model.spec, width, kv_dtype.itemsize, total, on_gpu)
    limits = _scheduler_config(config, model.spec, memory, on_gpu)
    grammars = Grammars(tokenizer, model.spec.vocab_size, device)
    if native:
        threads = config.threads or default_threads()
        batch = config.threads_batch or threads
        length, isa, exact = memory.max_model_len, config.isa, config.exact
        decoder = NativeDecoder(packing, length, threads, batch, isa, exact)
        core = assemble_native(decoder, limits, grammars, width)
    elif on_gpu and config.kernels == "auto":
        core, memory = _start_fused(config, model, device, dtype, kv_dtype, memory, grammars)
    else:
        length = memory.max_model_len
        plain = Decoder(model.spec, model.weights, dtype, device, length, reference)
        core = assemble(plain, limits, kv_dtype, grammars=grammars)
    sampling = SamplingParams(**recommended_sampling(files))
    return Engine(
        config,
        files.name,
        model.spec,
        memory,
        core,
        tokenizer,
        sampling,
        str(device),
        str(dtype).removeprefix("torch."),
        monotonic() - started,
    )


def _run_again(run: Run) -> Run:
    """The plain record: a replay runs the same once more."""
    return run


def assemble(
    decoder: Decoder,
    limits: SchedulerConfig,
    kv_dtype: torch.dtype,
    max_in_flight: int = 1,
    grammars: Grammars | None = None,
) -> EngineCore:
    """A scheduler, a KV pool and rows of their own around a decoder."""
    spec, device, size = decoder.spec, decoder.device, limits.block_size
    pool = KVPool(spec, limits.num_blocks, size, kv_dtype, device)
    groups = len(limits.windows)
    state = RowState(limits.max_num_seqs, limits.max_model_len, size, groups, device)
    executor = LocalExecutor(decoder, pool, state, max_in_flight)
    cost = cost_model(spec, decoder.dtype.itemsize, kv_dtype.itemsize)
    return EngineCore(Scheduler(limits), executor, cost, grammars)


def assemble_native(
    decoder: NativeDecoder, limits: SchedulerConfig, grammars: Grammars | None, width: float
) -> EngineCore:
    """`assemble` for the native decoder, whose cache is in halves."""
    spec, device, size = decoder.spec, decoder.device, limits.block_size
    pool = KVPool(spec, limits.num_blocks, size, torch.float16, device)
    state = RowState(limits.max_num_seqs, limits.max_model_len, size, len(limits.windows), device)
    executor = NativeExecutor(decoder, pool, state)
    return EngineCore(Scheduler(limits), executor, cost_model(spec, width, 2), grammars)


def _start_fused(
    config: EngineConfig,
    model: OpenedModel,
    device: torch.device,
    dtype: torch.dtype,
    kv_dtype: torch.dtype,
    estimate: MemoryPlan,
    grammars: Grammars,
) -> tuple[EngineCore, MemoryPlan]:
    """The Triton kernels, on a GPU whose memory is measured before the rest goes to the cache."""
    spec, length = model.spec, estimate.max_model_len
    estimate = replace(estimate, device_bytes=torch.cuda.mem_get_info(device)[1])
    overlap = Overlap(config.early_launch, config.read_ahead_bytes, config.few_rows_kernel)
    kernels = _triton_kernels()
    decoder = FusedDecoder(spec, model.weights, dtype, device, length, kernels, overlap)
    executor, memory = start_executor(config, decoder, kv_dtype, estimate)
    log.info("memory: %s", memory.waterfall())
    limits = _scheduler_config(config, spec, memory, on_gpu=True)
    cost = cost_model(spec, dtype.itemsize, kv_dtype.itemsize)
    return EngineCore(Scheduler(limits), executor, cost, grammars), memory


def _triton_kernels() -> FusedKernels:
    """Imported here: Triton is there only where there is a GPU."""
    try:
        return cast(FusedKernels, import_module("twostroke.kernels.cuda"))
    except ImportError as error:
        raise ConfigError(
            f"the kernels of a GPU need Triton, which cannot be loaded ({error}); install it, or "
            "use kernels='reference'"
        ) from None


def assemble_fused(
    decoder: FusedDecoder,
    limits: SchedulerConfig,
    kv_dtype: torch.dtype,
    graph_sizes: Sequence[int] = (),
    record: Record = _run_again,
    max_in_flight: int = 2,
    grammars: Grammars | None = None,
) -> EngineCore:
    """`assemble` for fused kernels, on a device that runs behind the host."""
    spec, device, size = decoder.spec, decoder.device, limits.block_size
    pool = KVPool(spec, limits.num_blocks, size, kv_dtype, device)
    groups = len(limits.windows)
    rows = DeviceRows(limits.max_num_seqs, limits.max_model_len, size, groups, device)
    with torch.inference_mode():
        program = StepProgram(decoder, pool, rows)
        graphs = DecodeGraphs(program, graph_sizes, record) if graph_sizes else None
        tokens = piece_ladder(limits.max_num_batched_tokens) if graph_sizes else ()
        pieces = PieceGraphs(program, tokens, record) if tokens else None
    executor = CudaExecutor(program, graphs, pieces, max_in_flight)
    cost = cost_model(spec, decoder.dtype.itemsize, kv_dtype.itemsize)
    return EngineCore(Scheduler(limits), executor, cost, grammars)


def _is_native(config: EngineConfig, device: torch.device) -> bool:
    """The native kernels, unless they cannot do what is asked for."""
    wishes = {
        "dtype": config.dtype in ("auto", "float32"),
        "kv_cache_dtype": config.kv_cache_dtype in ("auto", "float16"),
    }
    unmet = [name for name, met in wishes.items() if not met]
    if config.kernels == "native" and device.type != "cpu":
        raise ConfigError("kernels is 'native', which is for CPUs; use kernels='auto'")
    if config.kernels == "native" and not cpu.available():
        raise ConfigError(
            "kernels is 'native', but this installation has none (no compiler was found when it "
            "was made); install a C++ compiler and install twostroke again, or use kernels='auto'"
        )
    if config.kernels == "native" and unmet:
        raise ConfigError(
            f"the native kernels have no {unmet[0]}={getattr(config, unmet[0])!r}; leave it at "
            "'auto', or use kernels='reference'"
        )
    if config.kernels == "auto" and device.type == "cpu" and not cpu.available():
        log.warning(
            "running on torch's CPU paths, which are slow: this installation has no native kernels "
            "(no C++ compiler was found when it was made; install one, then twostroke again)"
        )
    native = device.type == "cpu" and cpu.available() and not unmet
    native = native and config.kernels != "reference"
    if config.quantization is not None and not native:
        raise ConfigError(
            "quantization needs the native kernels of a CPU; leave it out, or see kernels, device "
            "and dtype"
        )
    if native and config.isa != "auto" and config.isa not in cpu.module().isas():
        raise ConfigError(
            f"isa {config.isa!r} is not what this machine has; it has "
            f"{', '.join(cpu.module().isas())}"
        )
    return native


def _scheduler_config(
    config: EngineConfig, spec: ModelSpec, memory: MemoryPlan, on_gpu: bool
) -> SchedulerConfig:
    return SchedulerConfig(
        max_num_seqs=config.max_num_seqs,
        max_num_batched_tokens=config.token_budget(on_gpu, memory.max_model_len),
        max_model_len=memory.max_model_len,
        block_size=config.block_size,
        num_blocks=memory.num_blocks,
        windows=tuple(group.window for group in spec.kv_groups()),
        policy=config.scheduling_policy,
        chunked_prefill=config.enable_chunked_prefill,
        prefix_caching=config.enable_prefix_caching,
    )


def _device(config: EngineConfig) -> torch.device:
    if config.device == "auto":
        return torch.device("cuda:0" if torch.cuda.is_available() else "cpu")
    if config.device.startswith("cuda") and not torch.cuda.is_available():
        raise ConfigError("device is 'cuda', but torch finds no GPU; use device='cpu' or 'auto'")
    return torch.device("cuda:0" if config.device == "cuda" else config.device)


def _dtype(asked: str, own: str) -> torch.dtype:
    name = own if asked == "auto" else asked
    dtype = getattr(torch, name, None)
    if not isinstance(dtype, torch.dtype) or not dtype.is_floating_point:
        raise ConfigError(f"the model's dtype {name!r} is not supported; set dtype")
    return dtype
