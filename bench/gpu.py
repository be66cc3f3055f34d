"""Everything there is to measure on a GPU machine, in one run; ends with one JSON line.

    python -m bench.gpu [--quick] [--parts check,nano,…] [--shapes qwen3-0.6b,…] [--json FILE]

Correctness first, then the floors, then the workloads, each beside its floor and vLLM's figure.
Every group of parts is a process of its own (`gpu_parts.py`): one that fails costs only itself.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path
from time import perf_counter, time
from typing import Any

from twostroke.model.cost import CostModel, cost_model
from twostroke.model.hf_config import load_hf_config
from twostroke.plan import PhaseWork

# The card's measured ceilings, and vLLM 0.26.0 on it: same shapes, same workloads (docs).
READ_BYTES_S, FLOPS_S = 3.99e12, 783e12
VLLM: dict[str, dict[str, float]] = {
    "qwen3-0.6b": {
        "prefill 1024": 29.0,
        "prefill 4096": 26.2,
        "decode 1": 2.29,
        "decode 8": 1.68,
        "decode 32": 2.69,
        "decode 128": 5.99,
        "nano": 23_022,
    },
    "llama-3.1-8b": {
        "prefill 1024": 27.2,
        "prefill 4096": 100.8,
        "decode 1": 4.98,
        "decode 8": 5.36,
        "decode 32": 6.22,
        "decode 128": 10.87,
        "nano": 9_536,
    },
}
SHAPES = tuple(VLLM)
LONG = {"max_model_len": 40960, "max_num_batched_tokens": 8192}
PARTS = ("check", "nano", "decode", "prefill", "interference", "mixed", "profile", "start")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--quick", action="store_true", help="under a minute")
    parser.add_argument("--parts", default="", help=f"of {', '.join(PARTS)}")
    parser.add_argument("--shapes", default="", help=f"of {', '.join(SHAPES)}")
    parser.add_argument("--settings", default="{}", help="of every engine, as JSON")
    parser.add_argument("--timeout", type=float, default=300.0, help="seconds, of each process")
    parser.add_argument("--json", help="also write the result here")
    args = parser.parse_args()
    usual = "check,nano,decode,prefill" if args.quick else ",".join(PARTS)
    parts = (args.parts or usual).split(",")
    shapes = (args.shapes or (SHAPES[0] if args.quick else ",".join(SHAPES))).split(",")
    unknown = set(parts) - set(PARTS)
    if unknown:
        parser.error(f"no such part: {', '.join(sorted(unknown))}")
    settings = json.loads(args.settings)
    run = Run(args.quick, args.timeout)
    if "check" in parts:
        run.check()
    floors = {shape: print_floors(shape) for shape in shapes}
    for shape in shapes:
        run.shape(shape, parts, settings)
    if "start" in parts:
        for shape in shapes:
            run.start(shape, settings)
    print_table(run.results, floors)
    line = json.dumps({"bench": "gpu", "quick": args.quick, "floors": floors} | run.results)
    print(line)
    if args.json:
        Path(args.json).write_text(line + "\n")


class Run:
    """Starts the processes and collects what they report."""

    def __init__(self, quick: bool, timeout_s: float) -> None:
        self.results: dict[str, Any] = {}
        self._quick, self._timeout_s = quick, timeout_s

    def check(self) -> None:
        for name in ("kernels_check", "cuda_check"):
            if not Path(f"tests/gpu/{name}.py").exists():
                print(f"tests/gpu/{name}.py is not there: not checked")
                continue
            quick = ["--quick"] if self._quick and name == "cuda_check" else []
            lines = self._start(["-m", f"tests.gpu.{name}", *quick], show=False)
            last = lines[-1] if lines else ""
            self.results[name] = json.loads(last) if last.startswith("{") else last
            print(f"{name}: {last[:2000]}")

    def shape(self, shape: str, parts: list[str], settings: dict[str, Any]) -> None:
        usual = [part for part in ("decode", "prefill", "nano", "profile") if part in parts]
        if "mixed" in parts and shape == SHAPES[0]:
            usual.append("mixed")
        if usual:
            self._parts(shape, usual, settings)
        if "interference" in parts and shape == SHAPES[-1]:
            self._parts(shape, ["interference"], settings | LONG)

    def start(self, shape: str, settings: dict[str, Any]) -> None:
        """Process start to first token, with empty caches and with full ones."""
        found = {}
        with tempfile.TemporaryDirectory() as folder:
            for name in ("cold", "warm"):
                begun = time()
                result = self._parts(shape, ["start"], settings, {"TRITON_CACHE_DIR": folder})
                if "first_token_at" in result:
                    found[name + "_s"] = result["first_token_at"] - begun
        self.results.setdefault(shape, {})["start"] = found

    def _parts(
        self,
        shape: str,
        parts: list[str],
        settings: dict[str, Any],
        env: dict[str, str] | None = None,
    ) -> Any:
        command = ["-m", "bench.gpu_parts", shape, ",".join(parts)]
        command += ["--settings", json.dumps(settings), *(["--quick"] if self._quick else [])]
        result: Any = {}
        for line in self._start(command, env):
            if line.startswith("RESULT "):
                found = json.loads(line.removeprefix("RESULT "))
                result = found["result"]
                self.results.setdefault(shape, {})[found["part"]] = result
        return result

    def _start(
        self, command: list[str], env: dict[str, str] | None = None, show: bool = True
    ) -> list[str]:
        """Lines that a process wrote, shown as they come. Killed by its own alarm if it hangs."""
        begun = perf_counter()
        print(f"── {' '.join(command)}", flush=True)
        process = subprocess.Popen(
            ["timeout", "-k", "5", str(self._timeout_s), sys.executable, "-u", *command],
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            env=os.environ | (env or {}),
        )
        assert process.stdout is not None
        lines = []
        for line in process.stdout:
            lines.append(line.rstrip())
            if show and not line.startswith("RESULT "):
                print(line, end="", flush=True)
        status = process.wait()
        if status and not show:
            print("\n".join(lines[-40:]))
        print(f"── exit {status} after {perf_counter() - begun:.1f} s", flush=True)
        return lines


# ── floors ──────────────────────────────────────────────────────────────────────────────────


def print_floors(shape: str) -> dict[str, float]:
    """Milliseconds below which no step can be, from the spec and the card's ceilings."""
    spec, _ = load_hf_config(Path(f"bench/shapes/{shape}.json"))
    cost = cost_model(spec, 2, 2)
    found = {}
    for size in (1024, 4096):
        work = PhaseWork(1, size, size * (size + 1) // 2, size)
        found[f"prefill {size}"] = floor_ms(cost, work, 1)
    for batch in (1, 8, 32, 128):
        context = batch * (1024 + 64)
        found[f"decode {batch}"] = floor_ms(cost, PhaseWork(batch, batch, context, context), batch)
    print(f"floors of {shape}: " + ", ".join(f"{k} {v:.2f} ms" for k, v in found.items()))
    return found


def floor_ms(cost: CostModel, work: PhaseWork, samples: int) -> float:
    moved = cost.weight_bytes(samples) + cost.kv_bytes(work)
    return 1e3 * max(moved / READ_BYTES_S, cost.flops(work, samples) / FLOPS_S)


def print_table(results: dict[str, Any], floors: dict[str, dict[str, float]]) -> None:
    print(f"{'':34}{'measured':>10}{'floor':>9}{'of floor':>10}{'vLLM':>9}{'vs vLLM':>9}")
    for shape, found in floors.items():
        rows = []
        for part, size, value in (("prefill", "tokens", "ms"), ("decode", "batch", "tpot_ms")):
            measured = results.get(shape, {}).get(part)
            for row in measured if isinstance(measured, list) else ():
                rows.append((f"{part} {row[size]}", row[value]))
        for name, taken in rows:
            peer = VLLM[shape][name]
            print(
                f"{shape + ', ' + name:34}{taken:10.2f}{found[name]:9.2f}"
                f"{found[name] / taken:10.0%}{peer:9.2f}{peer / taken:8.2f}×"
            )
        nano = results.get(shape, {}).get("nano")
        for row in nano if isinstance(nano, list) else ():
            peer = VLLM[shape]["nano"]
            name = f"{shape}, nano, budget {row['budget']}"
            print(f"{name:34}{row['tok_s']:10,.0f}{'':19}{peer:9,.0f}{row['tok_s'] / peer:8.2f}×")


if __name__ == "__main__":
    main()
