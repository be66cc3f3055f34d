"""An engine on the native kernels of a CPU. Nothing on this path imports torch."""

from __future__ import annotations

from twostroke.config import EngineConfig
from twostroke.engine.assembly import Started, scheduler_config
from twostroke.engine.core import EngineCore
from twostroke.exec.grammar import Grammars
from twostroke.exec.memory import host_memory_bytes, plan_memory
from twostroke.exec.native import NativeExecutor
from twostroke.exec.rows import HostRows
from twostroke.kv.halves import HalfPool
from twostroke.model.cost import cost_model
from twostroke.model.native import NativeDecoder, Packing, default_threads
from twostroke.model.opened import OpenedModel
from twostroke.sched.scheduler import Scheduler
from twostroke.sched.step import SchedulerConfig

KV_WIDTH = 2  # the cache is in halves


def start(config: EngineConfig, model: OpenedModel, device: str, grammars: Grammars) -> Started:
    packing = Packing(model.spec, model.weights, model.dtype, config.quantization, config.isa)
    width = packing.bytes_each()
    total = host_memory_bytes()
    memory = plan_memory(config, model.spec, width, KV_WIDTH, total, on_gpu=False)
    limits = scheduler_config(config, model.spec, memory, on_gpu=False)
    threads = config.threads or default_threads()
    batch = config.threads_batch or threads
    length, isa, exact = memory.max_model_len, config.isa, config.exact
    decoder = NativeDecoder(packing, length, threads, batch, isa, exact)
    return Started(assemble_native(decoder, limits, grammars, width), memory, "float32")


def assemble_native(
    decoder: NativeDecoder, limits: SchedulerConfig, grammars: Grammars | None, width: float
) -> EngineCore:
    """A scheduler, a KV pool and rows of their own around a decoder; `width`: bytes a weight."""
    spec, size = decoder.spec, limits.block_size
    pool = HalfPool(spec, limits.num_blocks, size)
    state = HostRows(limits.max_num_seqs, limits.max_model_len, size, len(limits.windows))
    executor = NativeExecutor(decoder, pool, state)
    return EngineCore(Scheduler(limits), executor, cost_model(spec, width, KV_WIDTH), grammars)
