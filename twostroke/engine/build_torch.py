"""An engine on torch: the reference kernels on any device, the Triton kernels on a GPU."""

from __future__ import annotations

import logging
import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import Any, NamedTuple

import torch

from twostroke.config import EngineConfig
from twostroke.engine.assembly import Started, scheduler_config
from twostroke.engine.core import EngineCore
from twostroke.engine.device import find_device
from twostroke.errors import ConfigError, ModelError
from twostroke.exec.device_rows import DeviceRows
from twostroke.exec.executor import Executor
from twostroke.exec.grammar import Grammars
from twostroke.exec.graphs import DecodeGraphs, PieceGraphs, Record, RunAgain, piece_ladder
from twostroke.exec.memory import MemoryPlan, gib, host_memory_bytes, plan_memory
from twostroke.exec.program import StepProgram
from twostroke.exec.ranks import RanksExecutor, agree_on_memory, follow
from twostroke.exec.start import start_executor
from twostroke.exec.torch_executor import TorchExecutor
from twostroke.exec.torch_profile import KernelProfile, name_ranges
from twostroke.kernels.reference import Kernels
from twostroke.kv.pool import KVPool
from twostroke.model.cost import cost_model
from twostroke.model.decoder import Decoder
from twostroke.model.fp8 import fp8_bytes, fp8_matrices, weight_bytes
from twostroke.model.load import find_model
from twostroke.model.native import default_threads
from twostroke.model.opened import OpenedModel, open_model
from twostroke.model.ranks import ONE_RANK, Ranks, check_ranks, rank_parameters, rank_spec
from twostroke.model.spec import ModelSpec
from twostroke.observe.startup_timer import StartupTimer
from twostroke.sched.scheduler import Scheduler
from twostroke.sched.step import SchedulerConfig

log = logging.getLogger(__name__)

FP8_CAPABILITY = (8, 9)  # the first whose instructions know e4m3


class Built(NamedTuple):
    """An executor of a rank, and what it was made for."""

    executor: TorchExecutor
    memory: MemoryPlan
    dtype: torch.dtype
    kv_dtype: torch.dtype


def start(config: EngineConfig, model: OpenedModel, device: str, grammars: Grammars) -> Started:
    size, spec = config.tensor_parallel_size, model.spec
    if size == 1:
        built = build_executor(config, model, device)
        executor: Executor[Any] = built.executor
    else:
        # Imported here: only several ranks need it, and what it needs.
        from twostroke.engine.rank_processes import RankProcesses

        check_ranks(spec, size)
        check_gpus(device, size)
        others = RankProcesses(replace(config, model=str(model.files.path), revision=None))
        with others.starting():
            others.wait_for_all()
            ranks = join_ranks(config, 0, others.meeting_place)
            built = build_executor(config, model, rank_device(device, 0), ranks)
            ranks.all_numbers([0])  # until all have come so far
        executor = RanksExecutor(built.executor, others)
    on_gpu = torch.device(device).type == "cuda"
    limits = scheduler_config(config, built.executor.program.decoder.spec, built.memory, on_gpu)
    # A step's work is that of all ranks.
    sizes = weight_bytes(spec, built.dtype.itemsize, built.executor.program.decoder.fp8)
    cost = cost_model(spec, sizes, built.kv_dtype.itemsize)
    scheduler = Scheduler(limits)
    profile = partial(KernelProfile, built.executor, scheduler)
    core = EngineCore(scheduler, executor, cost, grammars, profile)
    if on_gpu and config.nvtx:
        name_ranges(built.executor, scheduler, torch.cuda.nvtx.range)
    return Started(core, built.memory, str(built.dtype).removeprefix("torch."))


# ── ranks ───────────────────────────────────────────────────────────────────────────────────


def rank_device(device: str, rank: int) -> str:
    return f"cuda:{rank}" if device.startswith("cuda") else device


def check_gpus(device: str, size: int) -> None:
    if device.startswith("cuda") and torch.cuda.device_count() < size:
        raise ConfigError(
            f"tensor_parallel_size is {size}, but torch finds {torch.cuda.device_count()} GPUs, "
            "and each rank needs one; lower it"
        )


def join_ranks(config: EngineConfig, rank: int, meeting_place: str) -> Ranks:
    """Wait for the other ranks of an engine, in whatever processes they are."""
    from twostroke.exec.collectives import GroupRanks

    size, device = config.tensor_parallel_size, rank_device(find_device(config), rank)
    return GroupRanks(rank, size, meeting_place, torch.device(device))


def run_rank(config: EngineConfig, ranks: Ranks, plans: Iterable[bytes]) -> None:
    """Be a rank other than the first, until the plans end."""
    device = rank_device(find_device(config), ranks.rank)
    model = open_model(config, find_model(config), device)
    executor = build_executor(config, model, device, ranks).executor
    ranks.all_numbers([0])
    follow(executor, plans)


# ── an executor ─────────────────────────────────────────────────────────────────────────────


def build_executor(
    config: EngineConfig, model: OpenedModel, device: str, ranks: Ranks = ONE_RANK
) -> Built:
    """Plan the memory of a rank, load its part of the weights, put them together."""
    place, size = torch.device(device), ranks.size
    on_gpu = place.type == "cuda"
    weight_dtype = _dtype(config.dtype, model.dtype if on_gpu else "float32")
    dtype = weight_dtype if on_gpu else torch.float32
    if dtype != weight_dtype and ranks.rank == 0:
        # Few CPUs have units for narrower types, and torch's products without them take a hundred
        # times as long.
        log.warning(
            "dtype=%s: weights are rounded to it, and a CPU computes in float32", config.dtype
        )
    kv_dtype = _dtype(config.kv_cache_dtype, str(dtype).removeprefix("torch."))
    # Ranks on CPUs are on the same one.
    total = torch.cuda.mem_get_info(place)[0] if on_gpu else host_memory_bytes() // size
    fp8 = fp8_matrices(model.spec, model.weights, config.quantization)
    held_bytes = rank_weight_bytes(model.spec, size, dtype.itemsize, fp8)
    sizes = (held_bytes, dtype.itemsize, kv_dtype.itemsize, total)
    memory = plan_memory(config, rank_spec(model.spec, size), *sizes, on_gpu)
    memory = agree_on_memory(memory, ranks)
    if size > 1 and not on_gpu:
        torch.set_num_threads(max(1, (config.threads or default_threads()) // size))
    try:
        if on_gpu and config.kernels == "auto":
            how = (dtype, kv_dtype, memory, ranks, fp8)
            executor, memory = _start_on_gpu(config, model, place, *how)
            return Built(executor, memory, dtype, kv_dtype)
        length = memory.max_model_len
        decoder = Decoder(
            model.spec,
            model.weights,
            dtype,
            place,
            length,
            Kernels(),
            weight_dtype=weight_dtype,
            ranks=ranks,
            fp8=fp8,
        )
        budget = config.token_budget(on_gpu, length)
        rows = (config.max_num_seqs, length, config.block_size, budget)
        executor = make_executor(decoder, memory.group_blocks, *rows, kv_dtype)
        return Built(executor, memory, dtype, kv_dtype)
    except (MemoryError, torch.OutOfMemoryError, RuntimeError) as error:
        if size == 1 or not _is_out_of_memory(error):
            raise
        raise ModelError(
            f"rank {ranks.rank} of {size} ran out of memory at the start, for {gib(held_bytes)} "
            f"of weights and {gib(memory.kv_bytes)} of KV cache ({error}); take a smaller model, "
            "lower kv_cache_memory_bytes, or raise tensor_parallel_size"
        ) from None


def rank_weight_bytes(spec: ModelSpec, size: int, itemsize: int, fp8: Mapping[str, int]) -> int:
    """What a rank holds at most."""
    shapes = rank_spec(spec, size).weight_shapes()
    saved = (
        itemsize * math.prod(shapes[name]) - fp8_bytes(shapes[name], scales)
        for name, scales in fp8.items()
    )
    return rank_parameters(spec, size) * itemsize - sum(saved)


def make_executor(
    decoder: Decoder,
    group_blocks: Sequence[int],
    max_num_seqs: int,
    max_model_len: int,
    block_size: int,
    budget: int,
    kv_dtype: torch.dtype,
    max_in_flight: int = 1,
    graph_sizes: Sequence[int] = (),
    record: Record | None = None,
) -> TorchExecutor:
    """A KV pool and rows of their own around a decoder. `graph_sizes`: batches that decode in
    graphs, made by `record`."""
    spec, device = decoder.spec, decoder.device
    pool = KVPool(spec, group_blocks, block_size, kv_dtype, device)
    rows = DeviceRows(max_num_seqs, max_model_len, block_size, len(group_blocks), device)
    graphs = pieces = None
    with torch.inference_mode():
        program = StepProgram(decoder, pool, rows)
        if graph_sizes:
            record = record or RunAgain()
            graphs = DecodeGraphs(program, graph_sizes, record)
            pieces = PieceGraphs(program, piece_ladder(budget), record)
    return TorchExecutor(program, graphs, pieces, max_in_flight)


def assemble(
    decoder: Decoder,
    limits: SchedulerConfig,
    kv_dtype: torch.dtype,
    max_in_flight: int = 1,
    grammars: Grammars | None = None,
    graph_sizes: Sequence[int] = (),
    record: Record | None = None,
) -> EngineCore:
    """A scheduler and an executor around a decoder: an engine without a config."""
    executor = make_executor(
        decoder,
        [group.num_blocks for group in limits.groups],
        limits.max_num_seqs,
        limits.max_model_len,
        limits.block_size,
        limits.max_num_batched_tokens,
        kv_dtype,
        max_in_flight,
        graph_sizes,
        record,
    )
    spec, scheduler = decoder.spec, Scheduler(limits)
    sizes = weight_bytes(spec, decoder.dtype.itemsize, decoder.fp8)
    cost = cost_model(spec, sizes, kv_dtype.itemsize)
    profile = partial(KernelProfile, executor, scheduler)
    return EngineCore(scheduler, executor, cost, grammars, profile)


def _start_on_gpu(
    config: EngineConfig,
    model: OpenedModel,
    device: torch.device,
    dtype: torch.dtype,
    kv_dtype: torch.dtype,
    estimate: MemoryPlan,
    ranks: Ranks,
    fp8: Mapping[str, int],
) -> tuple[TorchExecutor, MemoryPlan]:
    """The Triton kernels, on a GPU whose memory is measured before the rest goes to the cache."""
    if fp8:
        check_fp8(torch.cuda.get_device_capability(device))
        raise ConfigError(
            "the GPU kernels of fp8 weights have not been checked on a card as yet; leave "
            "quantization out and use the model's unquantised weights, or set kernels='reference'"
        )
    estimate = replace(estimate, device_bytes=torch.cuda.mem_get_info(device)[1])
    pdl = torch.cuda.get_device_capability(device) >= (9, 0)  # Hopper is the first that can
    if ranks.size > 1:
        # Launches that overlap, and graphs, are not tried with collectives between them.
        config, pdl = replace(config, enforce_eager=True), False
    timer, kernels = StartupTimer(), _triton_kernels(device)
    timer.end("imports")
    how = (dtype, device, estimate.max_model_len, kernels, pdl)
    decoder = Decoder(model.spec, model.weights, *how, ranks=ranks, fp8=fp8)
    timer.end("weights")
    executor, memory = start_executor(config, decoder, kv_dtype, estimate, timer)
    log.info("start: %s", timer)
    log.info("memory: %s", memory.waterfall())
    return executor, memory


def check_fp8(capability: tuple[int, int]) -> None:
    if capability < FP8_CAPABILITY:
        raise ConfigError(
            f"fp8 weights need a GPU of compute capability {FP8_CAPABILITY[0]}.{FP8_CAPABILITY[1]} "
            f"(Ada, Hopper) or later, and this one has {capability[0]}.{capability[1]}; leave "
            "quantization out and use the model's unquantised weights, or set kernels='reference', "
            "which is slow"
        )


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


def _is_out_of_memory(error: BaseException) -> bool:
    """torch says it of a CPU's memory in a RuntimeError."""
    known = isinstance(error, MemoryError | torch.OutOfMemoryError)
    return known or "can't allocate memory" in str(error)
