"""Start of a CUDA executor: measure memory, size the KV pool, capture the graphs.

    weights ─▶ rows ─▶ kernels ─▶ largest steps, for their memory ─▶ a graph or two, for theirs
                                             │
                           KV pool: the rest ▼ under gpu_memory_utilization ─▶ all graphs
                                                                   ─▶ the largest step once more

Memory is measured with ordinary plans, run by the executor on a pool of one block. Before that, the
plans and the graphs run on tensors without memory, which compiles their kernels, so that nothing
compiles while requests run. At the end the largest step runs again: the allocator then has all the
memory that it needs.
"""

from __future__ import annotations

import gc
from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import partial
from itertools import islice, pairwise

import torch

from twostroke.config import EngineConfig
from twostroke.errors import ConfigError
from twostroke.exec.device_rows import DeviceRows
from twostroke.exec.graphs import (
    CudaRecorder,
    DecodeGraphs,
    PiecewiseGraphs,
    Run,
    ladder,
    piece_ladder,
)
from twostroke.exec.memory import MemoryPlan, cache_setting, fit_length, gib
from twostroke.exec.program import StepProgram
from twostroke.exec.ranks_executor import agree_on_memory
from twostroke.exec.torch_executor import TorchExecutor
from twostroke.kv.pool import KVPool
from twostroke.model.describe.tensor_parallel import Ranks
from twostroke.model.torch.decoder import Decoder
from twostroke.observe.startup_timer import StartupTimer
from twostroke.plan import Chunk, NewRow, PhaseWork, Slot, StepPlan
from twostroke.request import SamplingParams

DRAWN = SamplingParams(temperature=0.6)
# The sampling options with the largest memory: they read the history and sort.
COSTLY = SamplingParams(temperature=0.6, top_p=0.9, repetition_penalty=1.1)
TIMED_CHUNK = 2048  # tokens of the steps that `time_prefill` measures


def start_executor(
    config: EngineConfig,
    decoder: Decoder,
    kv_dtype: torch.dtype,
    estimate: MemoryPlan,
    timer: StartupTimer | None = None,
) -> tuple[TorchExecutor, MemoryPlan]:
    """Return the executor and its memory plan. `estimate`: the plan made before loading, from the
    memory that was free."""
    timer = timer or StartupTimer()
    spec, device, size = decoder.spec, decoder.device, config.block_size
    groups, max_len = len(spec.kv_groups()), estimate.max_model_len
    budget = config.token_budget(True, max_len)
    torch.cuda.set_device(device)
    with torch.inference_mode():
        rows = DeviceRows(config.max_num_seqs, max_len, size, groups, device)
        compile_kernels(decoder, kv_dtype, rows, budget, graph_sizes(config))
        decoder.ranks.all_gather_numbers([0])  # later waits for another rank are short
        timer.end("kernels")
        trial = StepProgram(decoder, KVPool(spec, [0] * groups, size, kv_dtype, device), rows)
        activations = _measure_steps(TorchExecutor(trial, None), budget, rows)
        sizes = graph_sizes(config)
        graphs_bytes = _measure_graphs(trial, sizes, piece_ladder(budget)) if sizes else 0
        sampler = trial.sampler  # the sampler keeps its memory, which counts as used
        del trial
        free = _free_bytes(device, decoder.ranks)
        timer.end("measuring")
        plan = fit_pool(config, estimate, free, activations, graphs_bytes)
        plan = agree_on_memory(fit_length(plan, config, spec), decoder.ranks)
        try:
            shared = config.kv_sharing != "none"
            pool = KVPool(spec, plan.group_blocks, size, kv_dtype, device, shared)
            program = StepProgram(decoder, pool, rows, sampler)
            graphs = pieces = None
            if sizes:
                record = CudaRecorder(device, decoder.ranks)
                graphs = DecodeGraphs(program, sizes, record)
                pieces = PiecewiseGraphs(program, piece_ladder(budget), record)
            _release_memory(device)
            timer.end("graphs")
            executor = TorchExecutor(program, graphs, pieces)
            for step in islice(warm_plans(rows.max_rows, budget, max_len), 1):
                executor.run(step)
            timer.end("largest step")
        except torch.OutOfMemoryError:
            raise ConfigError(_no_room(config, plan, device)) from None
    gc.freeze()  # existing objects stay; the garbage collector skips them
    return executor, plan


def graph_sizes(config: EngineConfig) -> list[int]:
    if config.enforce_eager:
        return []
    max_rows, sizes = config.max_num_seqs, config.cudagraph_capture_sizes
    if sizes is not None:
        return sorted({min(size, max_rows) for size in sizes})
    return ladder(max_rows, config.max_cudagraph_capture_size)


# ── compiling ───────────────────────────────────────────────────────────────────────────────


def compile_kernels(
    decoder: Decoder, kv_dtype: torch.dtype, rows: DeviceRows, budget: int, sizes: list[int]
) -> None:
    """Compile all kernels of steps and graphs, on tensors without memory (meta)."""
    meta_decoder, size = decoder.to_meta(), rows.block_size
    device, groups = meta_decoder.device, rows.num_groups
    meta_rows = DeviceRows(rows.max_rows, rows.max_len, size, groups, device)
    pool = KVPool(meta_decoder.spec, [0] * groups, size, kv_dtype, device)
    program = StepProgram(meta_decoder, pool, meta_rows)
    executor = TorchExecutor(program, None)

    def run() -> None:
        max_len = meta_rows.max_len
        for plan in (
            *warm_plans(meta_rows.max_rows, budget, max_len),
            *long_plans(budget, max_len),
        ):
            executor.forward(plan)
            executor.reset()
        program.sampler.warm(program.logits, program.tokens)
        if sizes:
            DecodeGraphs(program, sizes, _run_once)
            PiecewiseGraphs(program, piece_ladder(budget), _run_once)

    key = (
        decoder.spec,
        decoder.dtype,
        decoder.formats,
        kv_dtype,
        decoder.dependent_launch,
        size,
        groups,
    )
    rank = decoder.ranks.rank  # only rank 0 samples
    decoder.kernels.compile_ahead(run, (*key, rank, rows.max_rows, rows.max_len, budget, sizes))


def _run_once(pieces: Callable[[], Iterator[object]]) -> list[Run]:
    return [lambda: None for _ in pieces()]


# ── measuring ───────────────────────────────────────────────────────────────────────────────


def warm_plans(max_rows: int, budget: int, max_len: int) -> Iterator[StepPlan]:
    """Yield the largest step of each kind, then small steps of shapes with their own kernels."""
    chunks = min(max_rows, -(-budget // (max_len - 1)))
    slots = min(max_rows - chunks, budget - chunks)
    size = min((budget - slots) // chunks, max_len - 1)
    yield warm_plan(slots, [size] * chunks, max_len)
    yield warm_plan(0, [min(budget // chunks, max_len - 1)] * chunks, max_len)
    yield warm_plan(min(max_rows, budget), [], max_len, COSTLY)
    small = [(0, [1], max_len), (1, [17], max_len), (2, [1, 16], max_len)]
    small += [(1, [], max_len), (1, [], 17), (1, [1], 17)]  # a split context, and unsplit contexts
    for few_slots, few, longest in small:
        if few_slots + len(few) <= max_rows and few_slots + sum(few) <= budget and max_len > 17:
            yield warm_plan(few_slots, few, longest)
    if max_len > 2:
        yield warm_plan(0, [1], max_len, start=max_len - 2)


def long_plans(budget: int, max_len: int) -> Iterator[StepPlan]:
    """Yield steps of one chunk as long as can be, that begins a sequence or continues one: long
    chunks may have their own kernels."""
    yield warm_plan(0, [min(budget, max_len - 1)], max_len)
    if max_len > 2:
        yield warm_plan(0, [min(budget, max_len - 2)], max_len, start=1)


def warm_plan(
    slots: int, chunks: list[int], longest: int, params: SamplingParams = DRAWN, start: int = 0
) -> StepPlan:
    """Return a plan whose rows have no blocks: they read the null block and store nothing. One slot
    has the longest context, which determines the split of attention. `start`: of every chunk."""
    rows = slots + len(chunks)
    new = [NewRow(row, "", (0,), 1, params, row, frozenset(), ()) for row in range(rows)]
    decode = [Slot(row, 1 if row else longest - 2) for row in range(slots)]
    prefill = [Chunk(slots + n, start, size, True) for n, size in enumerate(chunks)]
    return StepPlan(
        step=0,
        new=tuple(new),
        retired=(),
        appended=(),
        dropped=(),
        prefill=tuple(prefill),
        decode=tuple(decode),
        prefill_work=PhaseWork(len(chunks), sum(chunks)),
        decode_work=PhaseWork(slots, slots),
    )


def time_prefill(executor: TorchExecutor, budget: int) -> Iterator[tuple[int, int, float]]:
    """Yield the first position, the tokens and the seconds of a few steps with one chunk: enough to
    tell the cost of a token from the cost of its context."""
    rows = executor.program.rows
    size = min(budget, TIMED_CHUNK, rows.max_len - 1)
    chunks = [(0, size), (0, -(-size // 2)), (rows.max_len - 1 - size, size)]
    for number, (start, count) in enumerate([chunks[0], *chunks]):
        plan = warm_plan(0, [count], rows.max_len, start=start)
        seconds = executor.sample(executor.forward(plan)).wait().device_s
        executor.reset()
        if number:  # the first step of a size may load kernels
            yield start, count, seconds


def _measure_steps(executor: TorchExecutor, budget: int, rows: DeviceRows) -> int:
    """Return the additional bytes of the largest steps."""
    _release_memory(rows.device)
    before = torch.cuda.memory_reserved(rows.device)
    torch.cuda.reset_peak_memory_stats(rows.device)
    for plan in warm_plans(rows.max_rows, budget, rows.max_len):
        try:
            executor.run(plan)
        except torch.OutOfMemoryError:
            raise ConfigError(
                f"a step of {plan.num_tokens} tokens does not fit the memory that the weights "
                f"leave; set max_num_batched_tokens to at most {plan.num_tokens // 2} or "
                f"max_num_seqs to at most {max(1, rows.max_rows // 2)}"
            ) from None
    return torch.cuda.max_memory_reserved(rows.device) - before


def _measure_graphs(program: StepProgram, sizes: list[int], tokens: list[int]) -> int:
    """Return the bytes of all graphs, estimated from the largest graph and a second graph."""
    device, ranks = program.rows.cells.device, program.decoder.ranks
    free = [_free_bytes(device, ranks)]
    record = CudaRecorder(device, ranks)
    kept: list[object] = []
    for make in (
        partial(DecodeGraphs, program, sizes[-1:]),
        partial(DecodeGraphs, program, sizes[:1]),
        partial(PiecewiseGraphs, program, tokens[-1:]),
        partial(PiecewiseGraphs, program, tokens[:1]),
    ):
        kept.append(make(record))
        torch.cuda.synchronize(device)
        free.append(free_share(device, ranks))
    took = [max(0, before - after) for before, after in pairwise(free)]
    kept.clear()
    return took[0] + (len(sizes) - 1) * took[1] + took[2] + (len(tokens) - 1) * took[3]


def _free_bytes(device: torch.device, ranks: Ranks) -> int:
    """Return the free bytes after unused memory has been released."""
    _release_memory(device)
    return free_share(device, ranks)


def _release_memory(device: torch.device) -> None:
    gc.collect()
    torch.cuda.synchronize(device)
    torch.cuda.empty_cache()


def free_share(device: torch.device, ranks: Ranks) -> int:
    """Return this rank's share of the free memory of its GPU. Ranks that share a GPU measure at the
    same moment, between two barriers."""
    if ranks.ranks_per_device == 1:
        return torch.cuda.mem_get_info(device)[0]
    torch.cuda.synchronize(device)  # includes the memory of the CUDA context
    ranks.all_gather_numbers([0])
    free = torch.cuda.mem_get_info(device)[0] // ranks.ranks_per_device
    return min(numbers[0] for numbers in ranks.all_gather_numbers([free]))


def _no_room(config: EngineConfig, plan: MemoryPlan, device: torch.device) -> str:
    """Return the message for memory that ran out although the plan was measured."""
    share = config.gpu_memory_utilization
    lower = max(0.01, share - 0.05)
    setting = f"gpu_memory_utilization from {share} to {lower:.2f}"
    if config.num_gpu_blocks_override is not None:
        setting = f"num_gpu_blocks_override to {config.num_gpu_blocks_override * 9 // 10}"
    elif config.kv_cache_memory_bytes is not None:
        setting = f"kv_cache_memory_bytes to {config.kv_cache_memory_bytes * 9 // 10}"
    return (
        f"the GPU ran out of memory while the KV cache and the graphs were made as planned "
        f"({plan.waterfall()}); {gib(torch.cuda.mem_get_info(device)[0])} are free now. If another "
        f"process uses the GPU, end that process; otherwise lower {setting}"
    )


# ── sizing ──────────────────────────────────────────────────────────────────────────────────


def fit_pool(
    config: EngineConfig, estimate: MemoryPlan, free: int, activations: int, graphs: int
) -> MemoryPlan:
    """Return the plan with the measured sizes. `free`: bytes free with weights and rows loaded,
    before steps and graphs."""
    share, total, sizing = config.gpu_memory_utilization, estimate.device_bytes, estimate.sizing
    plan = replace(
        estimate,
        activation_bytes=activations,
        graph_bytes=graphs,
        state_bytes=max(0, estimate.total_bytes - free - estimate.weight_bytes),
    )
    max_bytes = free - activations - graphs
    wanted = max_bytes - int(total * (1 - share)) + estimate.others_bytes
    if config.num_gpu_blocks_override is not None:
        wanted = sizing.num_bytes(sizing.with_main(config.num_gpu_blocks_override))
    elif config.kv_cache_memory_bytes is not None:
        wanted = config.kv_cache_memory_bytes
    if wanted > max_bytes:
        setting = cache_setting(config, sizing, max_bytes, "at most ")
        raise ConfigError(
            f"a KV cache of {gib(wanted)} does not fit the {gib(max(0, max_bytes))} that the rest "
            f"leaves ({plan.waterfall()}); set {setting}"
        )
    if config.num_gpu_blocks_override is not None:
        return replace(plan, group_blocks=sizing.with_main(config.num_gpu_blocks_override))
    if wanted < sizing.min_bytes:
        min_share = min(1.0, 1 - (max_bytes - sizing.min_bytes) / total)
        raise ConfigError(
            f"nothing is left for the KV cache ({plan.waterfall()}); raise "
            f"gpu_memory_utilization from {share} to at least {min_share:.2f}, or lower "
            "max_num_batched_tokens or max_num_seqs"
        )
    return replace(plan, group_blocks=sizing.within(wanted))
