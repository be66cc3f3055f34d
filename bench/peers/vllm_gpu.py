"""vLLM on the workloads of `gpu_workloads.py`; the ledger's vLLM column.

    python -m bench.peers.vllm_gpu [--shapes qwen3-0.6b,llama-3.1-8b] [--json FILE]

Run it in an environment with vLLM (used: 0.26.0) on an idle GPU. Settings are vLLM's defaults
(compiled, CUDA graphs, its own attention and token budget) except for the definitions: dummy
weights in bf16, max_model_len 8,192, prefix caching off, no tokenizer. `ready_s` is the time of
`LLM(…)`, without imports. The file is written after every part. Ends with one JSON line.
"""

from __future__ import annotations

import argparse
import json
import shutil
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from datetime import UTC, datetime
from pathlib import Path
from time import perf_counter
from typing import Any

from bench.gpu_workloads import (
    BATCHES,
    DECODE_PROMPT,
    DECODE_RUNS,
    DECODE_TOKENS,
    MAX_MODEL_LEN,
    NANO_OUT,
    PREFILL_RUNS,
    PREFILL_SIZES,
    SHAPES,
    TEMPERATURE,
    Prompts,
    nano_workload,
)


class Vllm:
    def __init__(self, shape: str) -> None:
        import torch
        from vllm import LLM, SamplingParams

        self._params = SamplingParams
        self._wait = torch.cuda.synchronize
        self._prompts = Prompts()
        with tempfile.TemporaryDirectory() as folder:
            shutil.copy(f"{SHAPES}/{shape}.json", Path(folder) / "config.json")
            start = perf_counter()
            self.llm = LLM(
                folder,
                load_format="dummy",
                dtype="bfloat16",
                max_model_len=MAX_MODEL_LEN,
                enable_prefix_caching=False,
                skip_tokenizer_init=True,
            )
            self._wait()
            self.ready_s = perf_counter() - start
        self._write([self._prompts(40)] * 2, 4)

    def _write(self, prompts: Sequence[list[int]], outputs: int | Sequence[int]) -> float:
        """Return the seconds of one `generate`."""
        counts = [outputs] * len(prompts) if isinstance(outputs, int) else outputs
        params = [
            self._params(temperature=TEMPERATURE, ignore_eos=True, max_tokens=n, detokenize=False)
            for n in counts
        ]
        given = [{"prompt_token_ids": prompt} for prompt in prompts]
        self._wait()
        start = perf_counter()
        written = self.llm.generate(given, params, use_tqdm=False)
        taken = perf_counter() - start
        assert [len(one.outputs[0].token_ids) for one in written] == list(counts)
        return taken

    def prefill(self) -> list[dict[str, Any]]:
        found = []
        for size in PREFILL_SIZES:
            self._write([self._prompts(size)], 1)
            walls = [1e3 * self._write([self._prompts(size)], 1) for _ in range(PREFILL_RUNS)]
            found.append({"tokens": size, "ms": statistics.median(walls), "walls_ms": walls})
        return found

    def decode(self) -> list[dict[str, Any]]:
        found = []
        for batch in BATCHES:
            times = []
            for _ in range(DECODE_RUNS):
                prompts = [self._prompts(DECODE_PROMPT) for _ in range(batch)]
                one = self._write(prompts, 1)
                taken = self._write(prompts, DECODE_TOKENS) - one
                times.append(1e3 * taken / (DECODE_TOKENS - 1))
            found.append({"batch": batch, "tpot_ms": statistics.median(times), "runs_ms": times})
        return found

    def nano(self) -> list[dict[str, Any]]:
        prompts, outputs = nano_workload()
        self._write([self._prompts(100)] * 256, 8)
        taken = self._write(prompts, outputs)
        return [{"seconds": taken, "tok_s": NANO_OUT / taken}]


def measure(shape: str) -> None:
    """Measure one shape in a separate process, and print a line for each part."""
    bench = Vllm(shape)
    print("RESULT " + json.dumps({"part": "start", "result": {"ready_s": bench.ready_s}}))
    for part in ("prefill", "decode", "nano"):
        print("RESULT " + json.dumps({"part": part, "result": getattr(bench, part)()}), flush=True)


def environment() -> dict[str, Any]:
    import torch
    import vllm

    return {
        "bench": "peers.vllm_gpu",
        "date": datetime.now(UTC).date().isoformat(),
        "vllm": vllm.__version__,
        "torch": torch.__version__,
        "gpu": torch.cuda.get_device_name(),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--shapes", default="qwen3-0.6b,llama-3.1-8b")
    parser.add_argument("--json", help="also write the result here")
    parser.add_argument("--one", help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.one:
        measure(args.one)
        return
    results: dict[str, Any] = {}
    for shape in args.shapes.split(","):
        command = [sys.executable, "-u", "-m", "bench.peers.vllm_gpu", "--one", shape]
        with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
            assert process.stdout is not None
            for line in process.stdout:
                if not line.startswith("RESULT "):
                    continue
                found = json.loads(line.removeprefix("RESULT "))
                results.setdefault(shape, {})[found["part"]] = found["result"]
                print(shape, found, flush=True)
                if args.json:
                    Path(args.json).write_text(json.dumps(results) + "\n")
    results |= environment()
    print(json.dumps(results))
    if args.json:
        Path(args.json).write_text(json.dumps(results) + "\n")


if __name__ == "__main__":
    main()
