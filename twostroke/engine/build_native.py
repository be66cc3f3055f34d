"""An engine on the native kernels of a CPU. Only calibration imports torch."""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial

from twostroke.config import EngineConfig
from twostroke.draft.interface import DraftModel
from twostroke.engine.assembly import Started, scheduler_config, transport_config
from twostroke.engine.core import EngineCore
from twostroke.engine.device import has_torch
from twostroke.engine.draft_model import (
    ModelNeeds,
    draft_limits,
    make_drafter,
    open_draft_model,
    plan_memories,
)
from twostroke.engine.open_tiers import OpenTiers, tiers_of
from twostroke.errors import ConfigError
from twostroke.exec.grammar import Grammars
from twostroke.exec.memory import host_memory_bytes, plan_memory
from twostroke.exec.native_executor import NativeExecutor
from twostroke.exec.rows import HostRows
from twostroke.exec.stage_profile import StageProfile
from twostroke.kv.host_pool import HostPool
from twostroke.kv.transports import NOT_OFFERED, TransportConfig, host_transfer
from twostroke.model.describe.cost import cost_model
from twostroke.model.formats.calibration import calibration_windows
from twostroke.model.load import OpenedModel
from twostroke.model.native_decoder import Floats, NativeDecoder, Packing, default_threads
from twostroke.sched.model_drafter import ModelDrafter, Vocabularies
from twostroke.sched.scheduler import Scheduler
from twostroke.sched.step import SchedulerConfig


def start(config: EngineConfig, model: OpenedModel, device: str, grammars: Grammars) -> Started:
    """Plan the memory, load the weights and start the core."""
    int8 = config.kv_cache_dtype == "int8"
    packing = Packing(model.spec, model.weights, model.dtype, config.quantization, config.isa)
    if config.quantization is not None:
        packing.require_unquantised(config.quantization)
    draft = open_draft_model(config, model, device)
    total_bytes = host_memory_bytes() // config.engines_on_host
    sizes = (4, 1 if int8 else 2, total_bytes)
    if draft is None:
        memory = plan_memory(config, model.spec, packing.num_bytes(), *sizes, on_gpu=False)
    else:
        draft_packing = Packing(draft.spec, draft.weights, draft.dtype, None, config.isa)
        needs = ModelNeeds(model.spec, packing.num_bytes())
        draft_needs = ModelNeeds(draft.spec, draft_packing.num_bytes())
        memory, draft_memory = plan_memories(config, needs, draft_needs, *sizes)
    limits = scheduler_config(config, model.spec, memory, on_gpu=False, native=True)
    threads = config.threads or default_threads(config.engines_on_host)
    threads_batch = config.threads_batch or threads
    length, isa, exact = memory.max_model_len, config.isa, config.exact
    if config.calibration is not None:
        packing.importance = _importance(config, model, length)
    decoder = NativeDecoder(packing, length, threads, threads_batch, isa, exact, int8)
    sharing = transport_config(config)
    drafter = None
    if draft is not None:
        length = draft_memory.max_model_len
        drafting = NativeDecoder(draft_packing, length, threads, threads_batch, isa, exact, int8)
        of_draft = draft_limits(limits, draft.spec, draft_memory)
        drafter = native_drafter(drafting, of_draft, limits, model.spec.vocab_size, int8)
    sizes_of_weights = packing.weight_bytes()
    tiers = tiers_of(config, model, on_gpu=False)
    core = assemble_native(
        decoder, limits, grammars, sizes_of_weights, sharing, int8, drafter, tiers
    )
    return Started(core, memory, "float32")


def _importance(config: EngineConfig, model: OpenedModel, max_len: int) -> dict[str, Floats]:
    """Measure the importance of the weights' inputs for calibration, with torch."""
    if not has_torch():
        raise ConfigError(
            "calibration runs the unquantised model with torch, and torch is not installed: "
            "pip install 'twostroke[reference]', or leave calibration out"
        )
    import torch

    from twostroke.model.torch.importance import measure_importance

    windows = calibration_windows(config, model, max_len)
    where = (torch.float32, torch.device("cpu"), max_len)
    found = measure_importance(model.spec, model.weights, windows, *where)
    return {name: counts.numpy() for name, counts in found.items()}


def native_drafter(
    decoder: NativeDecoder,
    draft_limits: SchedulerConfig,
    limits: SchedulerConfig,
    vocab_size: int,
    int8: bool = False,
) -> ModelDrafter:
    """Make a drafter of the decoder of a draft model. `limits` and `vocab_size` are the model's."""
    groups, size = draft_limits.groups, draft_limits.block_size
    pool = HostPool(decoder.spec, [group.num_blocks for group in groups], size, False, int8)
    state = HostRows(draft_limits.max_num_seqs, draft_limits.max_model_len, size, len(groups))
    vocabularies = Vocabularies(vocab_size, decoder.spec.vocab_size)
    return make_drafter(NativeExecutor(decoder, pool, state), draft_limits, limits, vocabularies)


def assemble_native(
    decoder: NativeDecoder,
    limits: SchedulerConfig,
    grammars: Grammars | None,
    weight_bytes: Mapping[str, float],
    sharing: TransportConfig = NOT_OFFERED,
    int8: bool = False,
    draft_model: DraftModel | None = None,
    open_tiers: OpenTiers | None = None,
) -> EngineCore:
    """Make a core of a decoder, with a KV pool in fp16 or int8."""
    spec, size = decoder.spec, limits.block_size
    num_blocks = [group.num_blocks for group in limits.groups]
    pool = HostPool(spec, num_blocks, size, sharing.offered, int8)
    transfer = None if sharing.alone else host_transfer(pool.blocks(), pool.shared, sharing)
    tiers = None if open_tiers is None else open_tiers(pool.blocks(), limits, spec)
    scheduler = Scheduler(limits, transfer=transfer, tiers=tiers, draft_model=draft_model)
    state = HostRows(limits.max_num_seqs, limits.max_model_len, size, len(limits.groups))
    attention_shares = limits.eviction is not None and limits.eviction.segment_blocks > 0
    executor = NativeExecutor(decoder, pool, state, attention_shares)
    token_bytes = sum(group.block_bytes(size, 1 if int8 else 2, int8) for group in spec.kv_groups())
    cost = cost_model(spec, weight_bytes, token_bytes / size / spec.kv_elements_per_token)
    profile = partial(StageProfile, executor, cost)
    return EngineCore(scheduler, executor, cost, grammars, profile)
