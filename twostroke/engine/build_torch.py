"""An engine on torch: the reference kernels on any device, the Triton kernels on a GPU."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from dataclasses import replace
from functools import partial

import torch

from twostroke.config import EngineConfig
from twostroke.engine.assembly import Started, scheduler_config
from twostroke.engine.core import EngineCore
from twostroke.errors import ConfigError
from twostroke.exec.device_rows import DeviceRows
from twostroke.exec.grammar import Grammars
from twostroke.exec.graphs import DecodeGraphs, PieceGraphs, Record, RunAgain, piece_ladder
from twostroke.exec.memory import MemoryPlan, host_memory_bytes, plan_memory
from twostroke.exec.program import StepProgram
from twostroke.exec.start import start_executor
from twostroke.exec.torch_executor import TorchExecutor
from twostroke.exec.torch_profile import KernelProfile, name_ranges
from twostroke.kernels.reference import Kernels
from twostroke.kv.pool import KVPool
from twostroke.model.cost import CostModel, cost_model, dense_weight_bytes
from twostroke.model.decoder import Decoder
from twostroke.model.opened import OpenedModel
from twostroke.model.spec import ExpertsSpec
from twostroke.observe.startup_timer import StartupTimer
from twostroke.sched.scheduler import Scheduler
from twostroke.sched.step import SchedulerConfig

log = logging.getLogger(__name__)


def start(config: EngineConfig, model: OpenedModel, device: str, grammars: Grammars) -> Started:
    place = torch.device(device)
    on_gpu = place.type == "cuda"
    weight_dtype = _dtype(config.dtype, model.dtype if on_gpu else "float32")
    dtype = weight_dtype if on_gpu else torch.float32
    if dtype != weight_dtype:
        # Few CPUs have units for narrower types, and torch's products without them take a hundred
        # times as long.
        log.warning(
            "dtype=%s: weights are rounded to it, and a CPU computes in float32", config.dtype
        )
    name = str(dtype).removeprefix("torch.")
    kv_dtype = _dtype(config.kv_cache_dtype, name)
    total = torch.cuda.mem_get_info(place)[0] if on_gpu else host_memory_bytes()
    weight_bytes = model.spec.num_parameters() * dtype.itemsize
    sizes = (weight_bytes, dtype.itemsize, kv_dtype.itemsize, total)
    memory = plan_memory(config, model.spec, *sizes, on_gpu)
    if on_gpu and config.kernels == "auto":
        core, memory = _start_on_gpu(config, model, place, dtype, kv_dtype, memory, grammars)
        return Started(core, memory, name)
    limits = scheduler_config(config, model.spec, memory, on_gpu)
    length = memory.max_model_len
    decoder = Decoder(
        model.spec, model.weights, dtype, place, length, Kernels(), weight_dtype=weight_dtype
    )
    return Started(assemble(decoder, limits, kv_dtype, grammars=grammars), memory, name)


def assemble(
    decoder: Decoder,
    limits: SchedulerConfig,
    kv_dtype: torch.dtype,
    max_in_flight: int = 1,
    grammars: Grammars | None = None,
    graph_sizes: Sequence[int] = (),
    record: Record | None = None,
) -> EngineCore:
    """A scheduler, a KV pool and rows of their own around a decoder. `graph_sizes`: batches that
    decode in graphs, made by `record`."""
    spec, device, size = decoder.spec, decoder.device, limits.block_size
    blocks = [group.num_blocks for group in limits.groups]
    pool = KVPool(spec, blocks, size, kv_dtype, device)
    rows = DeviceRows(limits.max_num_seqs, limits.max_model_len, size, len(blocks), device)
    graphs = pieces = None
    with torch.inference_mode():
        program = StepProgram(decoder, pool, rows)
        if graph_sizes:
            record = record or RunAgain()
            graphs = DecodeGraphs(program, graph_sizes, record)
            pieces = PieceGraphs(program, piece_ladder(limits.max_num_batched_tokens), record)
    executor = TorchExecutor(program, graphs, pieces, max_in_flight)
    weight_bytes = dense_weight_bytes(spec, decoder.dtype.itemsize)
    cost = cost_model(spec, weight_bytes, kv_dtype.itemsize)
    return _core(Scheduler(limits), executor, cost, grammars)


def _start_on_gpu(
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
    pdl = torch.cuda.get_device_capability(device) >= (9, 0)  # Hopper is the first that can
    timer, kernels = StartupTimer(), _triton_kernels(device)
    mixed = any(isinstance(layer.mlp, ExpertsSpec) for layer in spec.layers)
    if mixed and type(kernels).experts is Kernels.experts:
        raise ConfigError(
            "the kernels of a GPU have no mixtures of experts as yet; set kernels='reference'"
        )
    timer.end("imports")
    decoder = Decoder(spec, model.weights, dtype, device, length, kernels, pdl)
    timer.end("weights")
    executor, memory = start_executor(config, decoder, kv_dtype, estimate, timer)
    log.info("start: %s", timer)
    log.info("memory: %s", memory.waterfall())
    limits = scheduler_config(config, spec, memory, on_gpu=True)
    cost = cost_model(spec, dense_weight_bytes(spec, dtype.itemsize), kv_dtype.itemsize)
    core = _core(Scheduler(limits), executor, cost, grammars)
    if config.nvtx:
        name_ranges(executor, core.scheduler, torch.cuda.nvtx.range)
    return core, memory


def _core(
    scheduler: Scheduler, executor: TorchExecutor, cost: CostModel, grammars: Grammars | None
) -> EngineCore:
    profile = partial(KernelProfile, executor, scheduler)
    return EngineCore(scheduler, executor, cost, grammars, profile)


def _triton_kernels(device: torch.device) -> Kernels:
    """Imported here: Triton is there only where there is a GPU."""
    try:
        from twostroke.kernels.cuda.backend import CudaKernels
    except ImportError as error:
        raise ConfigError(
            f"the kernels of a GPU need Triton, which cannot be loaded ({error}); install it, or "
            "use kernels='reference'"
        ) from None
    return CudaKernels(device)


def _dtype(asked: str, own: str) -> torch.dtype:
    name = own if asked == "auto" else asked
    dtype = getattr(torch, name, None)
    if not isinstance(dtype, torch.dtype) or not dtype.is_floating_point:
        raise ConfigError(f"the model's dtype {name!r} is not supported; set dtype")
    return dtype
