"""What the work needs and what this CPU can do: the floors of bench/cpu.py."""

from __future__ import annotations

from dataclasses import dataclass
from math import prod
from time import perf_counter
from typing import Any

import torch

from twostroke.config import EngineConfig
from twostroke.kernels import cpu
from twostroke.model.gguf.gguf_file import GGUFFile
from twostroke.model.load import find_model
from twostroke.model.native_decoder import default_threads
from twostroke.model.opened import open_model

KV_ELEMENT_BYTES = 2  # of the floor: half precision, whatever an engine keeps


@dataclass(frozen=True)
class Work:
    """A GGUF model's bytes and operations."""

    path: str
    weight_bytes: int  # packed, as the file has them
    flops_per_token: float  # in the layers
    flops_per_sample: float  # in the head
    flops_per_kv_token: float  # of one query with one key and value, all layers
    kv_bytes_per_token: float

    @classmethod
    def of(cls, model: str | None) -> Work:
        settings = EngineConfig(model=model)
        files = find_model(settings)
        if files.kind != "gguf":
            raise SystemExit("bench/cpu.py compares engines on a GGUF file")
        spec = open_model(settings, files, "cpu").spec
        shapes = spec.weight_shapes()
        layers = sum(prod(s) for name, s in shapes.items() if "layers." in name and len(s) == 2)
        file = GGUFFile.open(files.path)
        return cls(
            path=str(files.path),
            weight_bytes=sum(tensor.num_bytes for tensor in file.tensors.values()),
            flops_per_token=2.0 * layers,
            flops_per_sample=2.0 * spec.vocab_size * spec.hidden_size,
            flops_per_kv_token=4.0 * sum(layer.attention.q_size for layer in spec.layers),
            kv_bytes_per_token=KV_ELEMENT_BYTES * spec.kv_elements_per_token,
        )


@dataclass(frozen=True)
class Ceilings:
    read_bytes_per_s: float
    fp32_per_s: float
    bf16_per_s: float | None  # where the CPU has it
    fp16_per_s: float | None
    int8_per_s: float | None

    @property
    def best_per_s(self) -> float:
        return max(self.fp32_per_s, self.bf16_per_s or 0.0, self.int8_per_s or 0.0)

    def best_of(self, other: Ceilings) -> Ceilings:
        best: dict[str, Any] = {}
        for name, mine in vars(self).items():
            theirs = getattr(other, name)
            best[name] = None if mine is None or theirs is None else max(mine, theirs)
        return Ceilings(**best)


def measure_ceilings(weight_bytes: int) -> Ceilings:
    bf16 = matrix_rate(torch.bfloat16) if has_bf16() else None
    fp32 = matrix_rate(torch.float32)
    return Ceilings(read_rate(weight_bytes), fp32, bf16, fp16_rate(), int8_rate())


def read_rate(num_bytes: int) -> float:
    """All threads over one buffer, the best of 20."""
    buffer = torch.ones(num_bytes // 4, dtype=torch.float32)
    return num_bytes / _least(buffer.sum, 20)


def matrix_rate(dtype: torch.dtype) -> float:
    a, b = torch.randn(1536, 1536).to(dtype), torch.randn(1536, 1536).to(dtype)
    return 2 * 1536**3 / _least(lambda: torch.mm(a, b), 8)


def has_bf16() -> bool:
    return bool(torch.ops.mkldnn._is_mkldnn_bf16_supported()) and _flag("bf16", "avx512_bf16")


def int8_rate() -> float | None:
    """Operations a second of the CPU's own int8 products, on registers: no product is faster,
    but for matrix units (AMX), whose rate is the bf16 product's."""
    if not cpu.available():
        return None
    return cpu.module().dot_rate("auto", default_threads()) or None


def fp16_rate() -> float | None:
    """The same of fp16, which attention is computed in on Arm."""
    if not cpu.available():
        return None
    return cpu.module().fp16_rate("auto", default_threads()) or None


def _flag(*names: str) -> bool:
    """Whether the CPU says that it has one of these."""
    try:
        with open("/proc/cpuinfo") as file:
            lines = [line for line in file if line.lower().startswith(("flags", "features"))]
    except OSError:
        return False
    return bool(lines) and any(name in lines[0].split() for name in names)


def _least(call: object, count: int) -> float:
    assert callable(call)
    times = []
    for _ in range(count):
        start = perf_counter()
        call()
        times.append(perf_counter() - start)
    return min(times)


def floor_tokens_per_s(
    work: Work, ceilings: Ceilings, streams: int, prompt: int, output: int
) -> float:
    """Tokens a second if nothing cost but arithmetic at the best rate, or reading if that is more.

    Products with weights may be in 8 bits; attention is in floating point. `output` of 1: prefill
    of the prompts. Otherwise decode in the middle of the output.
    """
    floating = max(ceilings.fp32_per_s, ceilings.bf16_per_s or 0.0, ceilings.fp16_per_s or 0.0)
    if output == 1:
        flops = prompt * work.flops_per_token + work.flops_per_sample
        attended = prompt * (prompt + 1) / 2 * work.flops_per_kv_token
        computed = flops / ceilings.best_per_s + attended / floating
        return prompt / max(computed, work.weight_bytes / ceilings.read_bytes_per_s)
    context = streams * (prompt + output / 2)
    flops = streams * (work.flops_per_token + work.flops_per_sample)
    computed = flops / ceilings.best_per_s + context * work.flops_per_kv_token / floating
    read = work.weight_bytes + context * work.kv_bytes_per_token
    return streams / max(computed, read / ceilings.read_bytes_per_s)


def describe(ceilings: Ceilings) -> str:
    def rate(value: float | None) -> str:
        return "not measured" if value is None else f"{value / 1e9:,.0f} G/s"

    return (
        f"ceilings, {torch.get_num_threads()} threads: reading the weights' size "
        f"{ceilings.read_bytes_per_s / 1e9:.1f} GB/s; products fp32 {rate(ceilings.fp32_per_s)}, "
        f"bf16 {rate(ceilings.bf16_per_s)}, fp16 {rate(ceilings.fp16_per_s)}, "
        f"int8 {rate(ceilings.int8_per_s)}"
    )
