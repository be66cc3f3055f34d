"""What the parts of `gpu_tiers.py` share: sizes, settings, and how figures are told."""

from __future__ import annotations

import contextlib
import json
import statistics
import traceback
from collections.abc import Callable, Sequence
from time import monotonic, sleep
from typing import Any

import torch

from twostroke import LLM
from twostroke.config import GIB
from twostroke.exec.memory import available_memory_bytes

MIB = 1 << 20
BLOCK_BYTES = (2 * MIB, MIB, MIB // 4)  # the first are those of an 8B in bf16
GROWTH_S = 40.0  # that the machine may take to give us its memory


def tell(name: str, figures: Any) -> None:
    print("RESULT " + json.dumps({name: figures}), flush=True)


def each(name: str, work: Callable[[], Any]) -> None:
    """Run one measurement; if it fails the others follow."""
    try:
        tell(name, work())
    except Exception as error:
        traceback.print_exc()
        tell(name, {"error": f"{type(error).__name__}: {error}"[:800]})


class Sizes:
    def __init__(self, device: str, quick: bool) -> None:
        self.device, self.quick = torch.device(device), quick
        self.copied = 64 * MIB if quick else 2 * GIB
        self.conversation, self.count = (500, 6) if quick else (16_000, 24)
        self.pool_bytes = 2 * MIB if quick else 16 * GIB
        self.host_bytes = 80 * MIB if quick else int(49.5 * GIB)
        self.long = 800 if quick else 32_000
        self.rounds = 2 if quick else 12
        self.prompts, self.prompt, self.written = (2, 200, 8) if quick else (8, 4096, 64)


def settings(shape: str, sizes: Sizes, **more: Any) -> dict[str, Any]:
    given: dict[str, Any] = {
        "load_format": "dummy",
        "device": sizes.device.type,
        "max_num_seqs": 64,
        "max_model_len": sizes.conversation + 600,
        "max_num_batched_tokens": 8192,
        "kv_cache_memory_bytes": sizes.pool_bytes,
    }
    if sizes.device.type == "cpu":
        given |= {"kernels": "reference", "dtype": "float32"}
    return given | more


def grown_memory(wanted: int) -> dict[str, float]:
    """Some virtual machines get their memory as they use it: use it once, a part at a time."""
    before, start = available_memory_bytes(), monotonic()
    while available_memory_bytes() < wanted and monotonic() - start < GROWTH_S:
        parts: list[torch.Tensor] = []
        with contextlib.suppress(RuntimeError, MemoryError):
            while available_memory_bytes() > 3 * GIB and len(parts) * GIB < wanted:
                parts.append(torch.ones(GIB, dtype=torch.uint8))
        sleep(0.2)
        del parts
    return {"before": before, "available": available_memory_bytes(), "s": monotonic() - start}


def wait_for_stores(llm: LLM) -> None:
    tiers = llm.engine.core.scheduler.kv.tiers
    while tiers is not None and tiers.is_storing:
        tiers.wait(0.1)
        tiers.take_finished()


def spread(seconds: Sequence[float]) -> dict[str, float]:
    """Milliseconds."""
    if not seconds:
        return {}
    names = {"median": statistics.median(seconds), "least": min(seconds), "most": max(seconds)}
    return {name: round(1e3 * value, 3) for name, value in names.items()}
