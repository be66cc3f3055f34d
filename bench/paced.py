"""A server whose model computes nothing, for measuring everything around a model.

    python -m bench.paced PORT STREAMS PACE_MS

Scheduler, KV bookkeeping, the engine's process and HTTP are the real ones. A step takes PACE_MS
(0: no time), and each token's text says when its step ended, in ticks of 0.1 ms of the machine's
monotonic clock modulo one second, such as "@0417": whoever reads it knows how old it is.
"""

from __future__ import annotations

import json
import sys
import tempfile
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import TYPE_CHECKING

from bench.capacity import STAMP, STAMP_TICK_S, STAMP_TICKS
from twostroke.config import EngineConfig
from twostroke.engine.api import EngineInfo
from twostroke.exec.executor import ChunkLogits
from twostroke.kv.cache import GroupLimits
from twostroke.model.describe.cost import CostModel
from twostroke.plan import StepPlan, StepResult
from twostroke.request import SamplingParams
from twostroke.sched.scheduler import Scheduler
from twostroke.sched.step import SchedulerConfig

if TYPE_CHECKING:
    from twostroke.engine.core import EngineCore

MAX_LEN = 4096
PACE_KEY = "bench_pace_ms"  # in the model's config.json, so that the engine's process finds it


def write_model(folder: Path, pace_ms: float) -> None:
    """A description, and a vocabulary with a word for every tick."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers

    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    words = [f"{STAMP.decode()}{tick:04}" for tick in range(STAMP_TICKS)]
    vocab = {word: index for index, word in enumerate([*alphabet, *words])}
    tokenizer = Tokenizer(models.BPE(vocab=vocab, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.save(str(folder / "tokenizer.json"))
    template = "{% for m in messages %}{{ m.content }}\n{% endfor %}"
    (folder / "tokenizer_config.json").write_text(json.dumps({"chat_template": template}))
    config = {
        "model_type": "llama",
        "architectures": ["LlamaForCausalLM"],
        "vocab_size": len(vocab),
        "hidden_size": 32,
        "intermediate_size": 64,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "max_position_embeddings": MAX_LEN,
        "rms_norm_eps": 1e-5,
        "rope_theta": 10000.0,
        "tie_word_embeddings": False,
        "torch_dtype": "float32",
        PACE_KEY: pace_ms,
    }
    (folder / "config.json").write_text(json.dumps(config))


class Paced:
    """An executor that only tells the time."""

    max_in_flight = 1
    on_chunk_logits: ChunkLogits | None = None

    def __init__(self, pace_s: float, first_word: int) -> None:
        self._pace_s = pace_s
        self._first_word = first_word
        self._due_s = 0.0

    def forward(self, plan: StepPlan) -> StepPlan:
        self._due_s = time.monotonic() + self._pace_s
        return plan

    def sample(self, plan: StepPlan, masks: object = None) -> Paced:
        self._count = len(plan.decode) + sum(chunk.last for chunk in plan.prefill)
        return self

    def wait(self) -> StepResult:
        if (left := self._due_s - time.monotonic()) > 0:
            time.sleep(left)
        word = self._first_word + int(time.monotonic() / STAMP_TICK_S) % STAMP_TICKS
        return StepResult([word] * self._count, {}, {}, self._pace_s)

    def reset(self) -> None: ...


class Engine:
    """What the engine's process asks of an engine."""

    def __init__(self, config: EngineConfig) -> None:
        from twostroke.engine.core import EngineCore

        assert config.model is not None
        described = json.loads((Path(config.model) / "config.json").read_text())
        self._vocab_size = described["vocab_size"]
        self._limits = SchedulerConfig(
            max_num_seqs=config.max_num_seqs,
            max_num_batched_tokens=8192,
            max_model_len=MAX_LEN,
            block_size=config.block_size,
            groups=(GroupLimits(config.max_num_seqs * MAX_LEN // config.block_size // 4),),
        )
        executor = Paced(described[PACE_KEY] / 1e3, self._vocab_size - STAMP_TICKS)
        cost = CostModel(1e9, 1e8, 1e5, 1e9, 1e8, 1e5)
        self.core: EngineCore = EngineCore(Scheduler(self._limits), executor, cost)

    def info(self) -> EngineInfo:
        limits = self._limits
        return EngineInfo(
            model_name="instant",
            vocab_size=self._vocab_size,
            max_model_len=limits.max_model_len,
            max_logprobs=0,
            max_num_seqs=limits.max_num_seqs,
            max_num_batched_tokens=limits.max_num_batched_tokens,
            block_size=limits.block_size,
            dtype="none",
            device="none",
            total_bytes=0,
            weight_bytes=0,
            kv_bytes=0,
            kv_tokens=limits.groups[0].num_blocks * limits.block_size,
            load_s=0.0,
            sampling=SamplingParams(),
        )


def main(port: str, streams: str, pace_ms: str) -> None:
    from twostroke.engine.remote import RemoteEngine
    from twostroke.serve.server import serve
    from twostroke.serve.settings import ServeSettings

    with tempfile.TemporaryDirectory() as folder:
        write_model(Path(folder), float(pace_ms))
        config = EngineConfig(model=folder, load_format="dummy", max_num_seqs=int(streams))

        @asynccontextmanager
        async def engine() -> AsyncIterator[RemoteEngine]:
            async with await RemoteEngine.start(config, builder="bench.paced:Engine") as started:
                yield started

        serve(engine, ServeSettings(port=int(port)))


if __name__ == "__main__":
    main(*sys.argv[1:])
