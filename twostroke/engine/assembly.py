"""Code that both backends' builders share (`build_native.py`, `build_torch.py`): their interface,
and the settings of the scheduler, the transports and the eviction."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from typing import NamedTuple, Protocol

from twostroke.config import KV_8_BIT, EngineConfig
from twostroke.engine.core import EngineCore
from twostroke.errors import ConfigError
from twostroke.exec.grammar import Grammars
from twostroke.exec.memory import MemoryPlan
from twostroke.exec.pool_sizing import capacity, concurrent_requests
from twostroke.kv.cache import GroupLimits
from twostroke.kv.eviction import SEGMENT_TOKENS, Eviction
from twostroke.kv.transports import TransportConfig
from twostroke.model.describe.spec import ModelSpec
from twostroke.model.load import OpenedModel
from twostroke.sched.step import SchedulerConfig

log = logging.getLogger(__name__)


class Started(NamedTuple):
    """A core that can run requests, its memory plan and its dtype."""

    core: EngineCore
    memory: MemoryPlan
    dtype: str


class Start(Protocol):
    """The `start` function of a backend: plans the memory, loads the weights, starts the core."""

    def __call__(
        self, config: EngineConfig, model: OpenedModel, device: str, grammars: Grammars
    ) -> Started: ...


def scheduler_config(
    config: EngineConfig, spec: ModelSpec, memory: MemoryPlan, on_gpu: bool, native: bool = False
) -> SchedulerConfig:
    """Make the limits of the scheduler, and log the capacity of the KV cache."""
    ttft_slo_s, itl_slo_s = config.goals(on_gpu)
    groups = group_limits(spec, memory.group_blocks)
    length, size = memory.max_model_len, config.block_size
    if config.kv_cache_dtype in KV_8_BIT:
        plain = sum(group.block_bytes(size, 2) for group in spec.kv_groups())
        log.info(
            "KV cache: %s, %s bytes a token; in 16 bits it would hold %.2f times fewer tokens",
            config.kv_cache_dtype,
            f"{memory.sizing.token_bytes:,.0f}",
            plain / sum(memory.sizing.block_bytes),
        )
    num_kept = length if config.kv_eviction is None else min(length, config.kv_eviction_budget)
    log.info(
        "KV cache: %s; requests of %s tokens that fit at one time: %s",
        capacity(groups, size),
        f"{num_kept:,}",
        f"{concurrent_requests(groups, num_kept, size):,}",
    )
    if spec.has_latents:
        held, plain = spec.kv_elements_per_token, spec.expanded_kv_elements_per_token
        itemsize = memory.sizing.block_bytes[0] / size / spec.kv_groups()[0].elements_per_token
        log.info(
            "KV cache: latents, %s bytes a token; keys and values of all heads would take %s",
            f"{held * itemsize:,.0f}",
            f"{plain * itemsize:,.0f}",
        )
    return SchedulerConfig(
        max_num_seqs=config.max_num_seqs,
        max_num_batched_tokens=config.token_budget(on_gpu, memory.max_model_len),
        max_model_len=memory.max_model_len,
        block_size=config.block_size,
        groups=groups,
        policy=config.scheduling_policy,
        chunked_prefill=config.enable_chunked_prefill,
        prefix_caching=config.enable_prefix_caching,
        ttft_slo_s=ttft_slo_s,
        itl_slo_s=itl_slo_s,
        max_decode_stall=config.decode_stall(),
        receives_requests=config.kv_receives,
        eviction=eviction(config, spec, groups, native),
        speculation=config.speculation(),
    )


def transport_config(config: EngineConfig) -> TransportConfig:
    """Return the settings for the transfer of KV blocks between this engine and other engines."""
    alone = config.engines_on_host == 1 and config.kv_sharing == "none" and config.kv_host is None
    return TransportConfig(
        config.kv_sharing,
        config.kv_transport,
        config.kv_host,
        config.kv_transfer_timeout_s,
        alone=alone,
        receives=config.kv_receives,
        secret=config.engine_secret,
    )


def eviction(
    config: EngineConfig, spec: ModelSpec, groups: Sequence[GroupLimits], native: bool
) -> Eviction | None:
    """Return the eviction policy. Raise `ConfigError` if the model or cache rules it out."""
    if config.kv_eviction is None:
        return None
    if [group.window for group in groups] != [None]:
        raise ConfigError(
            "kv_eviction is for models whose layers all have the same KV heads and see every "
            f"position; this model has {len(groups)} KV groups, of windows "
            f"{', '.join(str(group.window or 'none') for group in groups)}; leave it out"
        )
    budget = config.kv_eviction_budget // config.block_size
    if budget > groups[0].num_blocks:
        raise ConfigError(
            f"kv_eviction_budget {config.kv_eviction_budget} is more than the KV cache holds, "
            f"{groups[0].num_blocks * config.block_size} tokens; lower it, or enlarge the cache "
            "(kv_cache_memory_bytes)"
        )
    if config.kv_eviction == "sinks":
        return Eviction(budget)
    if not native or spec.has_latents:
        raise ConfigError(
            "kv_eviction heavy-hitters needs attention weights, which only the native kernels of "
            "a CPU report, for models without latents; use kv_eviction='sinks'"
        )
    return Eviction(budget, SEGMENT_TOKENS // config.block_size)


def group_limits(spec: ModelSpec, group_blocks: Sequence[int]) -> tuple[GroupLimits, ...]:
    """Return the limits of a model's KV groups. `group_blocks`: the number of blocks of each."""
    layers = spec.layers
    return tuple(
        GroupLimits(
            num_blocks,
            group.window,
            query_channels=sum(layers[index].attention.prefill_channels for index in group.layers),
            kv_elements=group.elements_per_token,
        )
        for group, num_blocks in zip(spec.kv_groups(), group_blocks, strict=True)
    )
