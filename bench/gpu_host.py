"""Host time of steps with prefill on a GPU, where there is none.

    python -m bench.gpu_host [SHAPE] [--steps N] [--json FILE]

Plans are packed and launched as the engine does, by the kernels that it has on an H200; but the
tensors have no memory and the launches go nowhere (`tests/kernels/no_gpu.py`). What is left is what
Python, torch and Triton take before the driver: the device waits for at least that. A graph's
replay counts as nothing, a product as making its result. Prints a table, ends with one JSON line.
"""

from __future__ import annotations

import argparse
import json
import platform
import statistics
from collections.abc import Callable, Iterator
from pathlib import Path
from time import perf_counter
from typing import Any, cast

import torch
import triton

from tests.kernels import no_gpu
from twostroke.exec.device_rows import DeviceRows
from twostroke.exec.graphs import PiecewiseGraphs, Run
from twostroke.exec.program import StepProgram
from twostroke.exec.rows import NO_WRITES
from twostroke.exec.start import warm_plan
from twostroke.exec.step_buffer import fill_step
from twostroke.kv.pool import KVPool
from twostroke.model.describe.hf_config import spec_from_hf
from twostroke.model.torch import load_layers as loading
from twostroke.model.torch.decoder import Decoder
from twostroke.model.weights.dummy import DummyWeights

NOWHERE = torch.device("meta")
BF16 = torch.bfloat16
MAX_LEN = 8192
STEPS = {  # slots, chunks
    "mixed: 64 slots, a chunk of 512": (64, [512]),
    "mixed: 64 slots, 512 tokens as 4 chunks": (64, [128] * 4),
    "prefill: 1,024 tokens": (0, [1024]),
    "prefill: 4,096 tokens": (0, [4096]),
    "mixed: 64 slots, a chunk of 4,096": (64, [4096]),
}


def no_weights(source: DummyWeights, name: str, dtype: torch.dtype, _: object) -> torch.Tensor:
    shape = source.shape(name)
    assert shape is not None
    return torch.empty(shape, dtype=dtype, device=NOWHERE)


def only_made(x: torch.Tensor, weight: torch.Tensor | None = None, **_: object) -> torch.Tensor:
    """For what torch does in Python where tensors have no memory."""
    shape = x.shape if weight is None else (x.shape[0], weight.shape[0])
    return torch.empty(shape, dtype=x.dtype, device=NOWHERE)


def only_there(x: torch.Tensor, weight: torch.Tensor, *, out: torch.Tensor) -> torch.Tensor:
    return out


class Bench:
    def __init__(self, shape: str) -> None:
        from twostroke.kernels.cuda.backend import CudaKernels

        self.launches = 0
        no_gpu.install(self._launched)
        setattr(loading, "read_tensor", no_weights)  # noqa: B010 - it is an import of theirs
        torch.nn.functional.linear = cast(Any, only_made)
        torch.empty_like = cast(Any, only_made)
        torch.mm = cast(Any, only_there)
        spec = spec_from_hf(json.loads(Path(f"bench/shapes/{shape}.json").read_text()))
        weights, kernels = DummyWeights(spec), CudaKernels(NOWHERE)
        decoder = Decoder(spec, weights, BF16, NOWHERE, MAX_LEN, kernels, dependent_launch=True)
        self.rows = DeviceRows(256, MAX_LEN, 16, 1, NOWHERE)
        self.program = StepProgram(decoder, KVPool(spec, [4096], 16, BF16, NOWHERE), self.rows)
        self.num_layers = spec.num_layers
        self.pieces = PiecewiseGraphs(self.program, [640, 1024], self._record)

    def _launched(self, *_: object) -> None:
        self.launches += 1

    def _record(self, pieces: Callable[[], Iterator[object]]) -> list[Run]:
        return [_nothing] * self.num_layers

    def step(self, slots: int, chunks: list[int]) -> Callable[[], object]:
        plan = warm_plan(slots, chunks, 1024)
        self.rows.reset()
        self.rows.apply(plan)
        size = self.pieces.size_for(plan.num_tokens)
        buffer = fill_step(plan, NO_WRITES, self.rows, size or 0)

        def run() -> object:
            if size is not None:
                return self.program.run(self.pieces.send(buffer), self.pieces.forward)
            largest = buffer.max_first, buffer.max_continued
            data = buffer.data.to(NOWHERE)
            known = (*largest, buffer.longest, buffer.spans)
            step = self.program.prepare(buffer.layout, data, *known)
            return self.program.run(step)

        return run

    def time(self, slots: int, chunks: list[int], steps: int) -> dict[str, float]:
        run = self.step(slots, chunks)
        run()  # compiles
        run()
        before, times = self.launches, []
        for _ in range(steps):
            start = perf_counter()
            run()
            times.append(perf_counter() - start)
        return {
            "ms": 1e3 * statistics.median(times),
            "least_ms": 1e3 * min(times),
            "launches": (self.launches - before) / steps,
        }


def _nothing() -> None: ...


@torch.inference_mode()
def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("shape", nargs="?", default="qwen3-0.6b")
    parser.add_argument("--steps", type=int, default=30)
    parser.add_argument("--json", help="also write the results there")
    options = parser.parse_args()
    bench, found = Bench(options.shape), {}
    print(f"{'step':42} {'ms':>8} {'least':>8} {'launches':>9} {'µs a layer':>11}")
    for name, (slots, chunks) in STEPS.items():
        row = found[name] = bench.time(slots, chunks, options.steps)
        layer = 1e3 * row["least_ms"] / bench.num_layers
        times = f"{row['ms']:8.2f} {row['least_ms']:8.2f}"
        print(f"{name:42} {times} {row['launches']:9.0f} {layer:11.1f}")
    report = {
        "machine": platform.machine(),
        "triton": triton.__version__,
        "torch": torch.__version__,
        "shape": options.shape,
        "steps": found,
    }
    line = json.dumps(report)
    print(line)
    if options.json:
        Path(options.json).write_text(line + "\n")


if __name__ == "__main__":
    main()
