"""A model that computes nothing: what it writes follows from the prompt and the position alone.

A real scheduler and a real core over an executor that answers at once, so that what a server or a
benchmark measures is everything but the model. `STEP_DELAY` (seconds, in the environment) slows
every step down.

    await RemoteEngine.start(EngineConfig(model=…), builder="tests.instant:build_instant")
"""

from __future__ import annotations

import os
import time
from array import array
from collections.abc import Sequence
from dataclasses import dataclass, replace
from zlib import crc32

from twostroke.config import EngineConfig
from twostroke.engine.api import EngineInfo
from twostroke.engine.core import EngineCore
from twostroke.exec.executor import ChunkLogits
from twostroke.kv.cache import GroupLimits
from twostroke.model.describe.cost import cost_model, dense_weight_bytes
from twostroke.model.load import find_model, open_tokenizer
from twostroke.model.opened import open_model
from twostroke.plan import NewRow, StepPlan, StepResult, TokenLogprobs
from twostroke.request import SamplingParams
from twostroke.sched.scheduler import Scheduler
from twostroke.sched.step import SchedulerConfig

BUILDER = "tests.instant:build_instant"
STEP_DELAY = "TWOSTROKE_INSTANT_STEP_S"


def prompt_hash(prompt: Sequence[int]) -> int:
    return crc32(array("q", prompt).tobytes())


def expected_tokens(prompt: Sequence[int], count: int, written: Sequence[int]) -> list[int]:
    """What is written after a prompt; `written` are the ids of `printable_ids`."""
    start, seed = len(prompt), prompt_hash(prompt)
    return [written[(n * 31 + seed) % len(written)] for n in range(start, start + count)]


def printable_ids(config: EngineConfig) -> list[int]:
    """The tokens of the model's vocabulary that are plain text; they end nothing."""
    text = replace(config, skip_tokenizer_init=False)
    tokenizer = open_tokenizer(text, find_model(config))
    assert tokenizer is not None
    size = open_model(config, find_model(config), "cpu").spec.vocab_size
    texts = {token: tokenizer.token_text(token) for token in range(size)}
    return [
        token
        for token, text in texts.items()
        if text.isascii()
        and text.isprintable()
        and text.strip()
        and token not in tokenizer.stop_ids
    ]


@dataclass
class Row:
    new: NewRow
    seed: int


@dataclass
class Done:
    result: StepResult

    def wait(self) -> StepResult:
        return self.result


class InstantExecutor:
    max_in_flight = 1
    on_chunk_logits: ChunkLogits | None = None

    def __init__(self, written: Sequence[int], delay_s: float) -> None:
        self._written, self._delay_s = written, delay_s
        self._rows: dict[int, Row] = {}

    def forward(self, plan: StepPlan) -> StepPlan:
        for row in plan.retired:
            self._rows.pop(row, None)
        for new in plan.new:
            self._rows[new.row] = Row(new, prompt_hash(new.tokens[: new.num_prompt]))
        if self._delay_s:
            time.sleep(self._delay_s)
        return plan

    def sample(self, plan: StepPlan, masks: object = None) -> Done:
        rows, written, count = self._rows, self._written, len(self._written)
        places = [(rows[slot.row], slot.position + 1) for slot in plan.decode]
        places += [(rows[c.row], c.start + c.size) for c in plan.prefill if c.last]
        tokens = [written[(position * 31 + row.seed) % count] for row, position in places]
        logprobs = {
            n: self._logprobs(token, row.new.params.logprobs)
            for n, ((row, _), token) in enumerate(zip(places, tokens, strict=True))
            if row.new.params.logprobs is not None
        }
        prompts = {}
        for chunk in plan.prefill:
            new = rows[chunk.row].new
            if new.params.prompt_logprobs is not None:
                end = min(chunk.start + chunk.size, new.num_prompt - 1)
                targets = new.tokens[chunk.start + 1 : end + 1]
                prompts[chunk.row] = [
                    self._logprobs(target, new.params.prompt_logprobs) for target in targets
                ]
        return Done(StepResult(tokens, logprobs, prompts, self._delay_s))

    def _logprobs(self, token: int, count: int) -> TokenLogprobs:
        """The token itself and its neighbours, each less likely by one."""
        at = self._written.index(token) if token in self._written else 0
        others = [self._written[(at + n) % len(self._written)] for n in range(1, count)]
        best = ([token] if count else []) + others
        return TokenLogprobs((token, *best), (-0.5, *(-0.5 - n for n in range(count))), 1)

    def reset(self) -> None:
        self._rows.clear()


@dataclass
class InstantEngine:
    core: EngineCore
    name: str
    config: EngineConfig
    vocab_size: int

    def info(self) -> EngineInfo:
        limits = self.core.scheduler.config
        return EngineInfo(
            model_name=self.name,
            vocab_size=self.vocab_size,
            max_model_len=limits.max_model_len,
            max_logprobs=self.config.max_logprobs,
            max_num_seqs=limits.max_num_seqs,
            max_num_batched_tokens=limits.max_num_batched_tokens,
            block_size=limits.block_size,
            dtype="float32",
            device="cpu",
            total_bytes=1 << 30,
            weight_bytes=0,
            kv_bytes=0,
            kv_tokens=limits.groups[0].num_blocks * limits.block_size,
            load_s=0.0,
            sampling=SamplingParams(),
        )


def build_instant(config: EngineConfig) -> InstantEngine:
    files = find_model(config)
    spec = open_model(config, files, "cpu").spec
    max_len = config.max_model_len or spec.max_context
    limits = SchedulerConfig(
        max_num_seqs=config.max_num_seqs,
        max_num_batched_tokens=config.token_budget(True, max_len),
        max_model_len=max_len,
        block_size=config.block_size,
        groups=(GroupLimits(config.num_gpu_blocks_override or (1 << 20) // config.block_size),),
        policy=config.scheduling_policy,
        chunked_prefill=config.enable_chunked_prefill,
        prefix_caching=config.enable_prefix_caching,
    )
    executor = InstantExecutor(printable_ids(config), float(os.environ.get(STEP_DELAY, "0")))
    core = EngineCore(Scheduler(limits), executor, cost_model(spec, dense_weight_bytes(spec, 4), 4))
    return InstantEngine(core, files.name, config, spec.vocab_size)
