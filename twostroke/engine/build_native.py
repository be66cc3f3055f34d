"""An engine on the native kernels of a CPU. Nothing on this path imports torch."""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial

from twostroke.config import EngineConfig
from twostroke.engine.assembly import Started, scheduler_config
from twostroke.engine.core import EngineCore
from twostroke.exec.grammar import Grammars
from twostroke.exec.memory import host_memory_bytes, plan_memory
from twostroke.exec.native import NativeExecutor
from twostroke.exec.profile import StageProfile
from twostroke.exec.rows import HostRows
from twostroke.kv.host_pool import HostPool
from twostroke.model.cost import cost_model
from twostroke.model.native import NativeDecoder, Packing, default_threads
from twostroke.model.opened import OpenedModel
from twostroke.sched.scheduler import Scheduler
from twostroke.sched.step import SchedulerConfig

KV_ITEMSIZE = 2  # the cache is in fp16


def start(config: EngineConfig, model: OpenedModel, device: str, grammars: Grammars) -> Started:
    packing = Packing(model.spec, model.weights, model.dtype, config.quantization, config.isa)
    total_bytes = host_memory_bytes() // config.engines_on_host
    memory = plan_memory(
        config, model.spec, packing.num_bytes(), 4, KV_ITEMSIZE, total_bytes, on_gpu=False
    )
    limits = scheduler_config(config, model.spec, memory, on_gpu=False)
    threads = config.threads or default_threads(config.engines_on_host)
    batch = config.threads_batch or threads
    length, isa, exact = memory.max_model_len, config.isa, config.exact
    decoder = NativeDecoder(packing, length, threads, batch, isa, exact)
    sharing = config.kv_sharing
    core = assemble_native(decoder, limits, grammars, packing.weight_bytes(), sharing)
    return Started(core, memory, "float32")


def assemble_native(
    decoder: NativeDecoder,
    limits: SchedulerConfig,
    grammars: Grammars | None,
    weight_bytes: Mapping[str, float],
    kv_sharing: str = "none",
) -> EngineCore:
    """A scheduler, a KV pool and rows of their own around a decoder."""
    spec, size = decoder.spec, limits.block_size
    num_blocks = [group.num_blocks for group in limits.groups]
    pool = HostPool(spec, num_blocks, size, shared=kv_sharing != "none")
    scheduler = Scheduler(limits, transfer=pool.transfer(kv_sharing == "checked"))
    state = HostRows(limits.max_num_seqs, limits.max_model_len, size, len(limits.groups))
    executor = NativeExecutor(decoder, pool, state)
    cost = cost_model(spec, weight_bytes, KV_ITEMSIZE)
    profile = partial(StageProfile, executor, cost)
    return EngineCore(scheduler, executor, cost, grammars, profile)
