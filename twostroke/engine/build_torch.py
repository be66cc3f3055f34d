"""An engine on torch: the reference kernels on any device, the Triton kernels on a GPU."""

from __future__ import annotations

import contextlib
import logging
import math
import os
import tempfile
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import torch

from twostroke.config import EngineConfig
from twostroke.draft.interface import DraftModel
from twostroke.draft.speculator import MAX_STEP_DRAFTS
from twostroke.engine.assembly import Started, scheduler_config, transport_config
from twostroke.engine.core import EngineCore
from twostroke.engine.device import engines_on_gpu, find_device
from twostroke.engine.draft_model import (
    ModelNeeds,
    draft_config,
    draft_limits,
    make_drafter,
    open_draft_model,
    plan_memories,
)
from twostroke.engine.open_tiers import OpenTiers, tiers_of
from twostroke.environment import visible_gpu
from twostroke.errors import ConfigError, ModelError
from twostroke.exec.device_rows import DeviceRows
from twostroke.exec.executor import Executor
from twostroke.exec.grammar import Grammars
from twostroke.exec.graphs import DecodeGraphs, EagerReplay, PiecewiseGraphs, Record, piece_ladder
from twostroke.exec.memory import MemoryPlan, gib, host_memory_bytes, plan_memory
from twostroke.exec.program import StepProgram
from twostroke.exec.ranks_executor import RanksExecutor, agree_on_memory, follow
from twostroke.exec.start import free_share, start_executor, time_prefill
from twostroke.exec.torch_executor import TorchExecutor
from twostroke.exec.torch_profile import KernelProfile, name_ranges
from twostroke.kernels.kv_dtypes import FP8_MAX
from twostroke.kernels.reference import Kernels
from twostroke.kv.pool import KVPool
from twostroke.kv.transports import NOT_OFFERED, TransportConfig
from twostroke.model.describe.cost import CostModel, cost_model
from twostroke.model.describe.spec import ModelSpec
from twostroke.model.describe.tensor_parallel import (
    ONE_RANK,
    Ranks,
    check_ranks,
    rank_parameters,
    rank_spec,
)
from twostroke.model.find.hub import find_model
from twostroke.model.formats.calibration import calibration_windows
from twostroke.model.formats.phase_formats import PhaseFormats, phase_formats
from twostroke.model.formats.weight_formats import Format, weight_bytes
from twostroke.model.load import OpenedModel, open_model
from twostroke.model.native_decoder import default_threads
from twostroke.model.torch.decoder import Decoder
from twostroke.model.torch.importance import Importance, measure_importance
from twostroke.model.torch.load_layers import LoadOptions
from twostroke.observe.startup_timer import StartupTimer
from twostroke.sched.model_drafter import Vocabularies
from twostroke.sched.scheduler import Scheduler
from twostroke.sched.step import SchedulerConfig

log = logging.getLogger(__name__)

FP8_CAPABILITY = (8, 9)  # the first compute capability with e4m3 instructions
KV_TYPES = {
    "fp8_e4m3": torch.float8_e4m3fn,
    "fp8_e5m2": torch.float8_e5m2,
    "int8": torch.int8,
}


class Built(NamedTuple):
    """The executor of a rank, its memory plan and its dtypes, and the same of a draft model."""

    executor: TorchExecutor
    memory: MemoryPlan
    dtype: torch.dtype
    kv_dtype: torch.dtype
    draft: TorchExecutor | None = None
    draft_memory: MemoryPlan | None = None


def start(config: EngineConfig, model: OpenedModel, device: str, grammars: Grammars) -> Started:
    """Plan the memory, load the weights and start the core, in all ranks."""
    size, spec = config.tensor_parallel_size, model.spec
    if size == 1:
        with gpu_turn(config, device):
            draft = None
            if not (device.startswith("cuda") and config.kernels == "auto"):
                draft = open_draft_model(config, model, device)
            built = build_executor(config, model, device, draft=draft)
        executor: Executor[Any] = built.executor
    else:
        # Imported here: only several ranks need it and its imports.
        from twostroke.engine.rank_processes import RankProcesses

        check_ranks(spec, size)
        check_gpus(config, device)
        others = RankProcesses(replace(config, model=str(model.files.path), revision=None))
        with others.starting():
            others.wait_for_all()
            ranks = join_ranks(config, 0, others.store_path, others.check)
            built = build_executor(config, model, rank_device(config, device, 0), ranks)
            ranks.all_gather_numbers([0])  # wait for all ranks
        executor = RanksExecutor(built.executor, others)
    on_gpu = torch.device(device).type == "cuda"
    own_spec = built.executor.program.decoder.spec
    limits = scheduler_config(config, own_spec, built.memory, on_gpu)
    if limits.speculation is not None and executor.max_in_flight > 1:
        # A step is launched before the tokens of the step before it are known.
        log.warning(
            "speculative_config has no effect on a GPU yet: the engine drafts on CPUs, and with "
            "kernels='reference'"
        )
        limits = replace(limits, speculation=None)
    # The cost model describes the work of all ranks together.
    kv_itemsize = built.memory.sizing.token_bytes / own_spec.kv_elements_per_token
    cost = decoder_cost(spec, built.executor.program.decoder, kv_itemsize)
    transfer, sharing = None, transport_config(config)
    if size == 1 and not sharing.alone:
        transfer = built.executor.program.pool.transfer(sharing)
        if config.engines_on_host > 1:
            transfer.warm()
    drafter = None
    if built.draft is not None and built.draft_memory is not None:
        draft_spec = built.draft.program.decoder.spec
        of_draft = draft_limits(limits, draft_spec, built.draft_memory)
        vocabularies = Vocabularies(spec.vocab_size, draft_spec.vocab_size)
        drafter = make_drafter(built.draft, of_draft, limits, vocabularies)
    open_tiers = tiers_of(config, model, on_gpu)
    tiers = None
    if open_tiers is not None:
        tiers = open_tiers(built.executor.program.pool.blocks(), limits, own_spec)
    scheduler = Scheduler(limits, transfer=transfer, tiers=tiers, draft_model=drafter)
    if tiers is not None and on_gpu and config.kernels == "auto":
        for step in time_prefill(built.executor, limits.max_num_batched_tokens):
            scheduler.pacer.note_start_step(*step)
    profile = partial(KernelProfile, built.executor, scheduler)
    core = EngineCore(scheduler, executor, cost, grammars, profile)
    if on_gpu and config.nvtx:
        name_ranges(built.executor, scheduler, torch.cuda.nvtx.range)
    return Started(core, built.memory, str(built.dtype).removeprefix("torch."))


@contextlib.contextmanager
def gpu_turn(config: EngineConfig, device: str) -> Iterator[None]:
    """Wait until no other engine starts on this GPU, because a start measures the free memory."""
    if config.engines_on_host == 1 or not device.startswith("cuda"):
        yield
        return
    import fcntl  # not on Windows

    number = torch.device(device).index or 0
    folder = Path(tempfile.gettempdir())
    with (folder / f"twostroke-gpu{visible_gpu(number)}-{os.getuid()}.lock").open("w") as file:
        fcntl.flock(file, fcntl.LOCK_EX)  # also released if this process is killed
        yield


# ── ranks ───────────────────────────────────────────────────────────────────────────────────


def have_own_gpus(config: EngineConfig, device: str) -> bool:
    """Return whether each rank has its own GPU. All ranks share a GPU that the config names."""
    return device.startswith("cuda") and not config.device.startswith("cuda:")


def rank_device(config: EngineConfig, device: str, rank: int) -> str:
    return f"cuda:{rank}" if have_own_gpus(config, device) else device


def check_gpus(config: EngineConfig, device: str) -> None:
    size, gpus = config.tensor_parallel_size, torch.cuda.device_count()
    if have_own_gpus(config, device) and gpus < size:
        raise ConfigError(
            f"tensor_parallel_size is {size}, but torch finds {gpus} GPUs, and each rank needs "
            "one; lower it (device='cuda:0' puts all ranks on that one GPU, to try them out: it is "
            "slower than one rank)"
        )


def join_ranks(
    config: EngineConfig,
    rank: int,
    store_path: str,
    check: Callable[[], None] = lambda: None,
) -> Ranks:
    """Join the other ranks of an engine, which run in other processes. `check` is called during the
    wait, and raises if a rank has ended."""
    from twostroke.exec.collectives import join_group

    found = find_device(config)
    device, own = torch.device(rank_device(config, found, rank)), have_own_gpus(config, found)
    return join_group(rank, config.tensor_parallel_size, store_path, device, own, check)


def run_rank(
    config: EngineConfig,
    ranks: Ranks,
    plans: Iterable[bytes],
    started: Callable[[], None] = lambda: None,
) -> None:
    """Run the plans on a rank other than the first. Call `started` before the first plan."""
    device = rank_device(config, find_device(config), ranks.rank)
    model = open_model(config, find_model(config), device)
    executor = build_executor(config, model, device, ranks).executor
    ranks.all_gather_numbers([0])
    started()
    follow(executor, plans)


# ── an executor ─────────────────────────────────────────────────────────────────────────────


@dataclass(frozen=True, slots=True)
class RankPlan:
    """The dtypes, weight formats and memory of a rank, chosen before its weights are loaded."""

    device: torch.device
    ranks: Ranks
    dtype: torch.dtype  # of activations
    weight_dtype: torch.dtype
    kv_dtype: torch.dtype
    formats: PhaseFormats
    triton: bool  # use the Triton kernels; False: the reference kernels
    weight_bytes: int
    memory: MemoryPlan
    draft_memory: MemoryPlan | None = None


def build_executor(
    config: EngineConfig,
    model: OpenedModel,
    device: str,
    ranks: Ranks = ONE_RANK,
    draft: OpenedModel | None = None,
) -> Built:
    """Plan the memory of a rank, load its part of the weights, and start its executor. With the
    reference kernels, also start the executor of a draft model."""
    config, plan = plan_rank(config, model, device, ranks, draft)
    memory, drafting = plan.memory, None
    try:
        importance: Importance = {}
        if config.calibration is not None:
            windows = calibration_windows(config, model, memory.max_model_len)
            where = (plan.dtype, plan.device, memory.max_model_len, plan.weight_dtype, ranks)
            importance = measure_importance(model.spec, model.weights, windows, *where)
        if plan.triton:
            executor, memory = _start_on_gpu(config, model, plan, importance)
        else:
            executor = _start_reference(config, model, plan, importance)
            settings = draft_config(config)
            if draft is not None and settings is not None and plan.draft_memory is not None:
                formats = phase_formats(draft.spec, draft.weights, settings, keep_gguf_blocks=False)
                draft_plan = replace(plan, formats=formats, memory=plan.draft_memory)
                drafting = _start_reference(settings, draft, draft_plan, {})
    except (MemoryError, torch.OutOfMemoryError, RuntimeError) as error:
        if ranks.size == 1 or not _is_out_of_memory(error):
            raise
        raise ModelError(
            f"rank {ranks.rank} of {ranks.size} ran out of memory at the start, for "
            f"{gib(plan.weight_bytes)} of weights and {gib(memory.kv_bytes)} of KV cache "
            f"({error}); take a smaller model, lower kv_cache_memory_bytes, or raise "
            "tensor_parallel_size"
        ) from None
    return Built(executor, memory, plan.dtype, plan.kv_dtype, drafting, plan.draft_memory)


def plan_rank(
    config: EngineConfig,
    model: OpenedModel,
    device: str,
    ranks: Ranks,
    draft: OpenedModel | None = None,
) -> tuple[EngineConfig, RankPlan]:
    """Choose the dtypes and plan the memory. If several engines share the GPU, the returned config
    has this engine's share of `gpu_memory_utilization`."""
    place, size = torch.device(device), ranks.size
    on_gpu = place.type == "cuda"
    weight_dtype = _dtype(config.dtype, model.dtype if on_gpu else "float32")
    dtype = weight_dtype if on_gpu else torch.float32
    if dtype != weight_dtype and ranks.rank == 0:
        # Few CPUs have instructions for narrower types. Without them torch's matrix products take
        # a hundred times as long.
        log.warning(
            "dtype=%s: weights are rounded to it, and a CPU computes in float32", config.dtype
        )
    kv_dtype = KV_TYPES.get(config.kv_cache_dtype)
    if kv_dtype is None:
        kv_dtype = _dtype(config.kv_cache_dtype, str(dtype).removeprefix("torch."))
    # Without GPUs, all ranks and engines share the CPU.
    num_sharers = size * config.engines_on_host
    total = free_share(place, ranks) if on_gpu else host_memory_bytes() // num_sharers
    triton = on_gpu and config.kernels == "auto"
    formats = phase_formats(model.spec, model.weights, config, keep_gguf_blocks=triton)
    held_bytes = rank_weight_bytes(model.spec, size, dtype.itemsize, formats.prefill)
    if config.phases_differ:
        own = formats.own_bytes(rank_spec(model.spec, size).weight_shapes(), dtype.itemsize)
        held_bytes += own[1]
        message = phase_sizes(config, *own, held_bytes, total)
        if ranks.rank == 0:
            log.info(message)
    num_engines = engines_on_gpu(config, device) if on_gpu else 1
    estimated, others_bytes = config, 0
    if num_engines > 1:
        whole = torch.cuda.mem_get_info(place)[1]
        share = config.gpu_memory_utilization / num_engines
        log.info(
            "%s is shared by %d engines: this engine takes %.3f of its memory "
            "(gpu_memory_utilization %g, divided)",
            device,
            num_engines,
            share,
            config.gpu_memory_utilization,
        )
        config = replace(config, gpu_memory_utilization=share)
        estimated = replace(config, gpu_memory_utilization=min(1.0, share * whole / total))
        others_bytes = whole - total
    sizes = (held_bytes, dtype.itemsize, kv_dtype.itemsize, total)
    draft_memory, own_config = None, draft_config(config)
    if draft is not None and own_config is not None:
        of_draft = phase_formats(
            draft.spec, draft.weights, own_config, keep_gguf_blocks=False
        ).prefill
        draft_bytes = rank_weight_bytes(draft.spec, 1, dtype.itemsize, of_draft)
        memory, draft_memory = plan_memories(
            estimated,
            ModelNeeds(model.spec, held_bytes),
            ModelNeeds(draft.spec, draft_bytes),
            *sizes[1:],
        )
    else:
        memory = plan_memory(estimated, rank_spec(model.spec, size), *sizes, on_gpu)
    if num_engines > 1:
        memory = replace(memory, others_bytes=others_bytes)
    memory = agree_on_memory(memory, ranks)
    if num_sharers > 1 and not on_gpu:
        threads = config.threads or default_threads(config.engines_on_host)
        torch.set_num_threads(max(1, threads // size))
    return config, RankPlan(
        device=place,
        ranks=ranks,
        dtype=dtype,
        weight_dtype=weight_dtype,
        kv_dtype=kv_dtype,
        formats=formats,
        triton=triton,
        weight_bytes=held_bytes,
        memory=memory,
        draft_memory=draft_memory,
    )


def _start_reference(
    config: EngineConfig, model: OpenedModel, plan: RankPlan, importance: Importance
) -> TorchExecutor:
    """Load the weights for the reference kernels, on any device."""
    memory = plan.memory
    decoder = Decoder(
        model.spec,
        model.weights,
        plan.dtype,
        plan.device,
        memory.max_model_len,
        Kernels(),
        LoadOptions(
            plan.formats.prefill,
            plan.formats.decode,
            weight_dtype=plan.weight_dtype,
            importance=importance,
            scale_keys=plan.kv_dtype == torch.int8,
        ),
        ranks=plan.ranks,
    )
    shape = ExecutorShape(
        group_blocks=memory.group_blocks,
        max_num_seqs=config.max_num_seqs,
        max_model_len=memory.max_model_len,
        block_size=config.block_size,
        max_num_batched_tokens=config.token_budget(
            plan.device.type == "cuda", memory.max_model_len
        ),
        kv_dtype=plan.kv_dtype,
        max_drafts=0 if config.speculative_config is None else MAX_STEP_DRAFTS,
    )
    return make_executor(decoder, shape, shared=config.kv_sharing != "none")


def _start_on_gpu(
    config: EngineConfig, model: OpenedModel, plan: RankPlan, importance: Importance
) -> tuple[TorchExecutor, MemoryPlan]:
    """Load the weights for the Triton kernels. The KV cache gets the memory that is free after
    that, as measured."""
    device, ranks, estimate = plan.device, plan.ranks, plan.memory
    capability = torch.cuda.get_device_capability(device)
    if any(format.needs_fp8 for format in plan.formats.all()):
        check_fp8(capability)
    check_fp8_cache(plan.kv_dtype, capability)
    device_bytes = torch.cuda.mem_get_info(device)[1] // ranks.ranks_per_device
    estimate = replace(estimate, device_bytes=device_bytes)
    # Hopper has programmatic dependent launch (PDL). It is untested with collectives in between.
    dependent = capability >= (9, 0) and ranks.alone
    timer, kernels = StartupTimer(), _triton_kernels(device)
    timer.end("imports")
    decoder = Decoder(
        model.spec,
        model.weights,
        plan.dtype,
        device,
        estimate.max_model_len,
        kernels,
        LoadOptions(
            plan.formats.prefill,
            plan.formats.decode,
            importance=importance,
            scale_keys=plan.kv_dtype == torch.int8,
        ),
        ranks=ranks,
        dependent_launch=dependent,
    )
    timer.end("weights")
    executor, memory = start_executor(config, decoder, plan.kv_dtype, estimate, timer)
    log.info("start: %s", timer)
    log.info("memory: %s", memory.waterfall())
    return executor, memory


def rank_weight_bytes(
    spec: ModelSpec, size: int, itemsize: int, formats: Mapping[str, Format]
) -> int:
    """Return an upper bound of the weight bytes of a rank."""
    shapes = rank_spec(spec, size).weight_shapes()
    saved = (
        itemsize * math.prod(shapes[name]) - format.num_bytes(shapes[name])
        for name, format in formats.items()
    )
    return rank_parameters(spec, size) * itemsize - sum(saved)


def phase_sizes(
    config: EngineConfig, prefill_bytes: int, decode_bytes: int, held_bytes: int, total: int
) -> str:
    """Describe the bytes of two weight formats; raise `ModelError` if memory is too small."""
    message = (
        f"weights: prefill {config.prefill_quantization} {gib(prefill_bytes)} + decode "
        f"{config.decode_quantization} {gib(decode_bytes)} + shared by both "
        f"{gib(held_bytes - prefill_bytes - decode_bytes)} = {gib(held_bytes)}"
    )
    if held_bytes > total:
        raise ModelError(
            f"{message}, but the memory has {gib(total)}; give one quantization for both phases, "
            "or use a pool of engines for each phase (prefill_engines, decode_engines), so that "
            "each engine keeps only the weights of its phase"
        )
    return message


def decoder_cost(spec: ModelSpec, decoder: Decoder, kv_itemsize: float) -> CostModel:
    """Make the cost model. `spec`: of the whole model, if the decoder is one of several ranks."""
    itemsize = decoder.dtype.itemsize
    with_prefill, decode_only = (
        cost_model(spec, weight_bytes(spec, itemsize, formats), kv_itemsize)
        for formats in decoder.formats
    )
    return replace(with_prefill, decode_only=decode_only if decoder.phases_differ else None)


class ExecutorShape(NamedTuple):
    """The sizes of an executor's rows and KV pool."""

    group_blocks: Sequence[int]  # of each KV group
    max_num_seqs: int
    max_model_len: int
    block_size: int
    max_num_batched_tokens: int
    kv_dtype: torch.dtype
    max_drafts: int = 0  # drafted tokens in a step

    @classmethod
    def of_limits(cls, limits: SchedulerConfig, kv_dtype: torch.dtype) -> ExecutorShape:
        return cls(
            group_blocks=[group.num_blocks for group in limits.groups],
            max_num_seqs=limits.max_num_seqs,
            max_model_len=limits.max_model_len,
            block_size=limits.block_size,
            max_num_batched_tokens=limits.max_num_batched_tokens,
            kv_dtype=kv_dtype,
            max_drafts=0 if limits.speculation is None else MAX_STEP_DRAFTS,
        )


def make_executor(
    decoder: Decoder,
    shape: ExecutorShape,
    max_in_flight: int = 1,
    graph_sizes: Sequence[int] = (),
    record: Record | None = None,
    shared: bool = False,
) -> TorchExecutor:
    """Make an executor of a decoder, with a KV pool and rows. `graph_sizes`: the decode batches
    that run as graphs, which `record` captures. `shared`: other processes can fetch blocks."""
    device, num_groups = decoder.device, len(shape.group_blocks)
    pool = KVPool(
        decoder.spec, shape.group_blocks, shape.block_size, shape.kv_dtype, device, shared
    )
    rows = DeviceRows(shape.max_num_seqs, shape.max_model_len, shape.block_size, num_groups, device)
    graphs = pieces = None
    with torch.inference_mode():
        max_samples = shape.max_num_seqs + shape.max_drafts
        program = StepProgram(decoder, pool, rows, max_samples=max_samples)
        if graph_sizes:
            record = record or EagerReplay()
            graphs = DecodeGraphs(program, graph_sizes, record)
            pieces = PiecewiseGraphs(program, piece_ladder(shape.max_num_batched_tokens), record)
    return TorchExecutor(program, graphs, pieces, max_in_flight)


def assemble(
    decoder: Decoder,
    limits: SchedulerConfig,
    kv_dtype: torch.dtype,
    max_in_flight: int = 1,
    grammars: Grammars | None = None,
    graph_sizes: Sequence[int] = (),
    record: Record | None = None,
    sharing: TransportConfig = NOT_OFFERED,
    draft_model: DraftModel | None = None,
    open_tiers: OpenTiers | None = None,
) -> EngineCore:
    """Make a core around a decoder, without an `EngineConfig`."""
    executor = make_executor(
        decoder,
        ExecutorShape.of_limits(limits, kv_dtype),
        max_in_flight,
        graph_sizes=graph_sizes,
        record=record,
        shared=sharing.offered,
    )
    transfer = executor.program.pool.transfer(sharing)
    spec, tiers = decoder.spec, None
    if open_tiers is not None:
        tiers = open_tiers(executor.program.pool.blocks(), limits, spec)
    scheduler = Scheduler(limits, transfer=transfer, tiers=tiers, draft_model=draft_model)
    cost = decoder_cost(spec, decoder, kv_dtype.itemsize)
    profile = partial(KernelProfile, executor, scheduler)
    return EngineCore(scheduler, executor, cost, grammars, profile)


def check_fp8(capability: tuple[int, int]) -> None:
    if capability < FP8_CAPABILITY:
        raise ConfigError(
            f"fp8 weights need a GPU of compute capability {FP8_CAPABILITY[0]}.{FP8_CAPABILITY[1]} "
            f"(Ada, Hopper) or later, and this one has {capability[0]}.{capability[1]}; use "
            "the model's unquantised weights with quantization='int8', which takes as little "
            "memory, or set kernels='reference', which is slow"
        )


def _triton_kernels(device: torch.device) -> Kernels:
    """Make the Triton kernels. Imports them here, because Triton is installed only for GPUs."""
    try:
        from twostroke.kernels.cuda.backend import CudaKernels
    except ImportError as error:
        raise ConfigError(
            f"the kernels of a GPU need Triton, which cannot be loaded ({error}); install it, or "
            "use kernels='reference'"
        ) from None
    return CudaKernels(device)


def check_fp8_cache(kv_dtype: torch.dtype, capability: tuple[int, int]) -> None:
    if kv_dtype in FP8_MAX and capability < FP8_CAPABILITY:
        raise ConfigError(
            "an fp8 KV cache needs a GPU of compute capability "
            f"{FP8_CAPABILITY[0]}.{FP8_CAPABILITY[1]} (Ada, Hopper) or later, and this one has "
            f"{capability[0]}.{capability[1]}; kv_cache_dtype='int8' takes as little memory and "
            "runs on every GPU"
        )


def _dtype(setting: str, default: str) -> torch.dtype:
    name = default if setting == "auto" else setting
    dtype = getattr(torch, name, None)
    if not isinstance(dtype, torch.dtype) or not dtype.is_floating_point:
        raise ConfigError(f"the model's dtype {name!r} is not supported; set dtype")
    return dtype


def _is_out_of_memory(error: BaseException) -> bool:
    """Return whether memory is too small. On a CPU, torch raises a RuntimeError for that."""
    known = isinstance(error, MemoryError | torch.OutOfMemoryError)
    return known or "can't allocate memory" in str(error)
