"""An engine on torch: the reference kernels on any device, the Triton kernels on a GPU."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from dataclasses import replace
from importlib import import_module
from typing import cast

import torch

from twostroke.config import EngineConfig
from twostroke.engine.assembly import Started, scheduler_config
from twostroke.engine.core import EngineCore
from twostroke.errors import ConfigError
from twostroke.exec.cuda import CudaExecutor
from twostroke.exec.grammar import Grammars
from twostroke.exec.graphs import DecodeGraphs, PieceGraphs, Record, Run, piece_ladder
from twostroke.exec.local import LocalExecutor
from twostroke.exec.memory import MemoryPlan, host_memory_bytes, plan_memory
from twostroke.exec.program import StepProgram
from twostroke.exec.rows import DeviceRows
from twostroke.exec.start import start_executor
from twostroke.exec.tensor_rows import TensorRows
from twostroke.kernels import FusedKernels, reference
from twostroke.kv.pool import KVPool
from twostroke.model.cost import cost_model, dense_weight_bytes
from twostroke.model.decoder import Decoder
from twostroke.model.fused import FusedDecoder
from twostroke.model.opened import OpenedModel
from twostroke.observe.laps import Laps
from twostroke.sched.scheduler import Scheduler
from twostroke.sched.step import SchedulerConfig

log = logging.getLogger(__name__)


def start(config: EngineConfig, model: OpenedModel, device: str, grammars: Grammars) -> Started:
    place = torch.device(device)
    on_gpu = place.type == "cuda"
    dtype = _dtype(config.dtype, model.dtype if on_gpu else "float32")
    name = str(dtype).removeprefix("torch.")
    kv_dtype = _dtype(config.kv_cache_dtype, name)
    total = torch.cuda.mem_get_info(place)[0] if on_gpu else host_memory_bytes()
    weight_bytes = model.spec.num_parameters() * dtype.itemsize
    sizes = (weight_bytes, dtype.itemsize, kv_dtype.itemsize, total)
    memory = plan_memory(config, model.spec, *sizes, on_gpu)
    if on_gpu and config.kernels == "auto":
        core, memory = _start_fused(config, model, place, dtype, kv_dtype, memory, grammars)
        return Started(core, memory, name)
    limits = scheduler_config(config, model.spec, memory, on_gpu)
    length = memory.max_model_len
    decoder = Decoder(model.spec, model.weights, dtype, place, length, reference)
    return Started(assemble(decoder, limits, kv_dtype, grammars=grammars), memory, name)


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
    pool = KVPool(spec, max(group.num_blocks for group in limits.groups), size, kv_dtype, device)
    groups = len(limits.groups)
    state = TensorRows(limits.max_num_seqs, limits.max_model_len, size, groups, device)
    executor = LocalExecutor(decoder, pool, state, max_in_flight)
    weight_bytes = dense_weight_bytes(spec, decoder.dtype.itemsize)
    cost = cost_model(spec, weight_bytes, kv_dtype.itemsize)
    return EngineCore(Scheduler(limits), executor, cost, grammars)


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
    early = torch.cuda.get_device_capability(device) >= (9, 0)  # Hopper is the first that can
    laps, kernels = Laps(), _triton_kernels()
    laps.end("imports")
    decoder = FusedDecoder(spec, model.weights, dtype, device, length, kernels, early)
    laps.end("weights")
    executor, memory = start_executor(config, decoder, kv_dtype, estimate, laps)
    log.info("start: %s", laps)
    log.info("memory: %s", memory.waterfall())
    limits = scheduler_config(config, spec, memory, on_gpu=True)
    cost = cost_model(spec, dense_weight_bytes(spec, dtype.itemsize), kv_dtype.itemsize)
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
    pool = KVPool(spec, max(group.num_blocks for group in limits.groups), size, kv_dtype, device)
    groups = len(limits.groups)
    rows = DeviceRows(limits.max_num_seqs, limits.max_model_len, size, groups, device)
    with torch.inference_mode():
        program = StepProgram(decoder, pool, rows)
        graphs = DecodeGraphs(program, graph_sizes, record) if graph_sizes else None
        tokens = piece_ladder(limits.max_num_batched_tokens) if graph_sizes else ()
        pieces = PieceGraphs(program, tokens, record) if tokens else None
    executor = CudaExecutor(program, graphs, pieces, max_in_flight)
    weight_bytes = dense_weight_bytes(spec, decoder.dtype.itemsize)
    cost = cost_model(spec, weight_bytes, kv_dtype.itemsize)
    return EngineCore(Scheduler(limits), executor, cost, grammars)


def _dtype(asked: str, own: str) -> torch.dtype:
    name = own if asked == "auto" else asked
    dtype = getattr(torch, name, None)
    if not isinstance(dtype, torch.dtype) or not dtype.is_floating_point:
        raise ConfigError(f"the model's dtype {name!r} is not supported; set dtype")
    return dtype
