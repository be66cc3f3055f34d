"""The workloads a GPU is measured by, the same for every engine: `gpu_parts.py` runs them on
twostroke, `peers/vllm_gpu.py` on vLLM. Nothing here needs torch.

Dummy weights in bf16, prefix caching off, temperature 0.6, wall clock of `LLM.generate`:

  - prefill N: one prompt of N tokens, one token written; the median of nine.
  - TPOT at batch B: (time for 129 tokens − time for 1) / 128, prompts of 1,024; median of three.
  - nano-vLLM's workload: 256 requests of 100 to 1,024 tokens in and out, all sent at once; tokens
    written a second.
"""

from __future__ import annotations

import random
from itertools import count

MAX_MODEL_LEN = 8192
TEMPERATURE = 0.6
PREFILL_SIZES = (1024, 4096)
PREFILL_RUNS = 9
LONG_SIZES = (16_384, 32_768, 65_536)
RETURN_SIZES = (32_000, 128_000)  # tokens of a prompt that returns, with all but its end cached
BATCHES = (1, 8, 32, 128)
DECODE_PROMPT, DECODE_TOKENS, DECODE_RUNS = 1024, 129, 3
NANO_IN, NANO_OUT = 142_827, 133_966
SHAPES = "bench/shapes"


class Prompts:
    """Random prompts, none twice."""

    def __init__(self) -> None:
        self._seeds = count(1)

    def __call__(self, size: int) -> list[int]:
        chosen = random.Random(next(self._seeds))
        return [chosen.randint(0, 10000) for _ in range(size)]


def nano_workload() -> tuple[list[list[int]], list[int]]:
    """Prompts, and how much to write after each. All prompts are drawn before all lengths."""
    chosen = random.Random(0)
    prompts = [
        [chosen.randint(0, 10000) for _ in range(chosen.randint(100, 1024))] for _ in range(256)
    ]
    outputs = [chosen.randint(100, 1024) for _ in range(256)]
    assert (sum(map(len, prompts)), sum(outputs)) == (NANO_IN, NANO_OUT)
    return prompts, outputs
