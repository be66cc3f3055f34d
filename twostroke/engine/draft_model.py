"""The draft model of an engine: its files, its vocabulary, its share of the memory, its limits.

A user sets only the name of the draft model. It runs on the device of the model, with the same
threads, KV cache type and kernels.
"""

from __future__ import annotations

import logging
from dataclasses import replace
from typing import Any, NamedTuple

from twostroke.config import EngineConfig
from twostroke.engine.assembly import group_limits
from twostroke.errors import ConfigError, ModelError
from twostroke.exec.executor import Executor
from twostroke.exec.memory import MemoryPlan, gib, plan_memory
from twostroke.exec.pool_sizing import pool_sizing
from twostroke.model.describe.spec import ModelSpec
from twostroke.model.find.hub import find_model
from twostroke.model.load import OpenedModel, open_model
from twostroke.model.text.model_text import open_tokenizer
from twostroke.plan import StepPlan, StepResult
from twostroke.sched.model_drafter import ModelDrafter, Vocabularies
from twostroke.sched.step import SchedulerConfig

log = logging.getLogger(__name__)

SETTING = "speculative_config"
PADDING = "[PAD"  # begins the names of a GGUF file's unused tokens


class DraftRunner:
    """Runs the steps of a draft model one at a time."""

    def __init__(self, executor: Executor[Any]) -> None:
        self._executor = executor

    def run(self, plan: StepPlan) -> StepResult:
        executor = self._executor
        return executor.sample(executor.forward(plan)).wait()

    def reset(self) -> None:
        self._executor.reset()


def draft_config(config: EngineConfig) -> EngineConfig | None:
    """Return the settings of the draft model; None without a draft model."""
    speculation = config.speculation()
    if speculation is None or speculation.draft_model is None:
        return None
    return replace(
        config,
        model=speculation.draft_model,
        tokenizer=None,
        revision=None,
        load_format="dummy" if config.load_format == "dummy" else "auto",
        hf_overrides=None,
        quantization=None,
        prefill_quantization=None,
        decode_quantization=None,
        calibration=None,
        speculative_config=None,
    )


def open_draft_model(config: EngineConfig, model: OpenedModel, device: str) -> OpenedModel | None:
    """Open the draft model without reading its weights. Check that it has the same vocabulary."""
    settings = draft_config(config)
    if settings is None:
        return None
    try:
        draft = open_model(settings, find_model(settings), device)
    except (ConfigError, ModelError) as error:
        raise type(error)(f"{SETTING}, the draft model: {error}") from None
    _check_vocabulary(config, model, settings, draft)
    return draft


def _check_vocabulary(
    config: EngineConfig, model: OpenedModel, draft_settings: EngineConfig, draft: OpenedModel
) -> None:
    """Refuse a draft model in which a token id means another token. The sizes of the vocabularies
    may differ, because vocabularies may be padded."""
    tokenizer = open_tokenizer(config, model.files)
    draft_tokenizer = open_tokenizer(draft_settings, draft.files)
    if tokenizer is None or draft_tokenizer is None:
        log.warning("the vocabularies of the model and the draft model are not compared")
        return
    for token in range(min(tokenizer.vocab_size, draft_tokenizer.vocab_size)):
        ours, theirs = tokenizer.vocabulary_entry(token), draft_tokenizer.vocabulary_entry(token)
        unused = not ours or not theirs or (ours[:4] == theirs[:4] == PADDING)
        if ours != theirs and not unused:
            raise ConfigError(
                f"{SETTING}: the draft model {draft.files.name} has another vocabulary than "
                f"{model.files.name}: token {token} is {theirs!r} there and {ours!r} here; give a "
                "draft model with the same tokenizer, a smaller model of the same family"
            )


class ModelNeeds(NamedTuple):
    spec: ModelSpec
    weight_bytes: int


def plan_memories(
    config: EngineConfig,
    model: ModelNeeds,
    draft: ModelNeeds,
    itemsize: int,
    kv_itemsize: int,
    total_bytes: int,
) -> tuple[MemoryPlan, MemoryPlan]:
    """Return the memory plans of the model and of the draft model. Both KV caches have room for the
    same number of tokens. A cache size that the user sets is the size of the model's cache.
    Otherwise both caches share the memory that the model's cache would take without a draft model.
    `itemsize`, `kv_itemsize`: bytes per element."""
    weights = model.weight_bytes + draft.weight_bytes
    if model.weight_bytes <= total_bytes < weights:
        raise ModelError(
            f"the weights need {gib(model.weight_bytes)} and those of the draft model "
            f"{gib(draft.weight_bytes)}, but {gib(total_bytes)} are available; take a smaller "
            f"draft model, or leave it out of {SETTING}"
        )
    sizes = (model.weight_bytes, itemsize, kv_itemsize, total_bytes - draft.weight_bytes)
    memory = plan_memory(config, model.spec, *sizes, on_gpu=False)
    length = min(memory.max_model_len, draft.spec.max_context)
    sizing = pool_sizing(config, draft.spec, kv_itemsize, length, on_gpu=False)
    if config.num_gpu_blocks_override is None and config.kv_cache_memory_bytes is None:
        share = memory.sizing.token_bytes / (memory.sizing.token_bytes + sizing.token_bytes)
        part = max(memory.sizing.min_bytes, int(memory.kv_bytes * share))
        limited = replace(config, kv_cache_memory_bytes=part)
        memory = plan_memory(limited, model.spec, *sizes, on_gpu=False)
        length = min(length, memory.max_model_len)
    blocks = sizing.with_main(memory.group_blocks[memory.sizing.main])
    plan = MemoryPlan(total_bytes, draft.weight_bytes, sizing, blocks, length, False)
    needed = weights + memory.kv_bytes + plan.kv_bytes
    if needed > total_bytes:
        raise ConfigError(
            f"the weights ({gib(model.weight_bytes)}) and the KV cache ({gib(memory.kv_bytes)}) "
            f"need more than the {gib(total_bytes)} that are available, with those of the draft "
            f"model ({gib(draft.weight_bytes)} and {gib(plan.kv_bytes)}); lower "
            f"kv_cache_memory_bytes, or leave the draft model out of {SETTING}"
        )
    log.info(
        "draft model: weights %s, KV cache %s for the same %s tokens",
        gib(draft.weight_bytes),
        gib(plan.kv_bytes),
        f"{memory.group_blocks[memory.sizing.main] * config.block_size:,}",
    )
    draft_bytes = plan.weight_bytes + plan.kv_bytes
    return replace(memory, total_bytes=total_bytes, draft_bytes=draft_bytes), plan


def draft_limits(limits: SchedulerConfig, spec: ModelSpec, memory: MemoryPlan) -> SchedulerConfig:
    """Return the limits of the draft model's steps. `limits`: of the model's steps."""
    return replace(
        limits,
        max_model_len=memory.max_model_len,
        groups=group_limits(spec, memory.group_blocks),
        receives_requests=False,
        speculation=None,
    )


def make_drafter(
    executor: Executor[Any],
    draft_limits: SchedulerConfig,
    limits: SchedulerConfig,
    vocabularies: Vocabularies,
) -> ModelDrafter:
    """Make a drafter of the executor of a draft model. `limits`: of the model's steps."""
    assert limits.speculation is not None
    runner, min_prob = DraftRunner(executor), limits.speculation.draft_model_min_prob
    return ModelDrafter(draft_limits, runner, vocabularies, min_prob)
