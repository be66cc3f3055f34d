"""What the backends' builders (`build_native.py`, `build_torch.py`) are asked for and give."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from typing import NamedTuple, Protocol

from twostroke.config import EngineConfig
from twostroke.engine.core import EngineCore
from twostroke.exec.grammar import Grammars
from twostroke.exec.memory import MemoryPlan
from twostroke.exec.pool_sizing import capacity, concurrent_requests
from twostroke.kv.cache import GroupLimits
from twostroke.model.opened import OpenedModel
from twostroke.model.spec import ModelSpec
from twostroke.sched.step import SchedulerConfig

log = logging.getLogger(__name__)


class Started(NamedTuple):
    """A core that can take requests, and what it took."""

    core: EngineCore
    memory: MemoryPlan
    dtype: str


class Start(Protocol):
    """Plan the memory, load the weights, assemble; in that order."""

    def __call__(
        self, config: EngineConfig, model: OpenedModel, device: str, grammars: Grammars
    ) -> Started: ...


def scheduler_config(
    config: EngineConfig, spec: ModelSpec, memory: MemoryPlan, on_gpu: bool
) -> SchedulerConfig:
    """What the scheduler keeps to; tells how much the cache holds."""
    ttft_slo_s, itl_slo_s = config.goals(on_gpu)
    groups = group_limits(spec, memory.group_blocks)
    length, size = memory.max_model_len, config.block_size
    log.info(
        "KV cache: %s; requests of %s tokens that fit at one time: %s",
        capacity(groups, size),
        f"{length:,}",
        f"{concurrent_requests(groups, length, size):,}",
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
    )


def group_limits(spec: ModelSpec, group_blocks: Sequence[int]) -> tuple[GroupLimits, ...]:
    """The KV groups of a model with so many blocks each."""
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
