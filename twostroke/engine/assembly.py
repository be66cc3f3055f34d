"""What the backends' builders (`build_native.py`, `build_torch.py`) are asked for and give."""

from __future__ import annotations

from typing import NamedTuple, Protocol

from twostroke.config import EngineConfig
from twostroke.engine.core import EngineCore
from twostroke.exec.grammar import Grammars
from twostroke.exec.memory import MemoryPlan
from twostroke.model.opened import OpenedModel
from twostroke.model.spec import ModelSpec
from twostroke.sched.step import SchedulerConfig


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
    ttft_slo_s, itl_slo_s = config.goals(on_gpu)
    return SchedulerConfig(
        max_num_seqs=config.max_num_seqs,
        max_num_batched_tokens=config.token_budget(on_gpu, memory.max_model_len),
        max_model_len=memory.max_model_len,
        block_size=config.block_size,
        num_blocks=memory.num_blocks,
        windows=tuple(group.window for group in spec.kv_groups()),
        policy=config.scheduling_policy,
        chunked_prefill=config.enable_chunked_prefill,
        prefix_caching=config.enable_prefix_caching,
        ttft_slo_s=ttft_slo_s,
        itl_slo_s=itl_slo_s,
        max_decode_stall=config.decode_stall(),
    )
