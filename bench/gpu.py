"""Everything there is to measure on a GPU machine, in one run; ends with one JSON line.

    python -m bench.gpu [--quick] [--parts check,nano,…] [--shapes qwen3-0.6b,…] [--json FILE]
    python -m bench.gpu --final --json FILE     the ledger's figures in under four minutes
    python -m bench.gpu --table FILE … [--into docs/PERFORMANCE.md]
                                                a result as the ledger's tables (`gpu_report.py`)
    python -m bench.gpu --picture FILE SVG      the interference curve (`gpu_picture.py`)

Correctness first, then the floors, then the workloads, each beside its floor and vLLM's figure.
Every group of parts is a process of its own (`gpu_parts.py`): one that fails costs only itself, and
the file is written anew after every part, so that a stop loses nothing.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Sequence
from datetime import UTC, datetime
from pathlib import Path
from time import perf_counter, time
from typing import Any

from bench.gpu_picture import draw
from bench.gpu_report import LARGE, SHAPES, SMALL, floors_of, put_into, read, tables

LONG = {"max_model_len": 40960, "max_num_batched_tokens": 8192}
LONG_CACHED = {
    "max_model_len": 131072,
    "max_num_batched_tokens": 16384,
    "enable_prefix_caching": True,
}
PARTS = ("check", "nano", "decode", "prefill", "long", "interference", "mixed", "profile", "start")
LEAST_S = 20.0  # a process that has less left is not started
FINAL_S = 260.0


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--quick", action="store_true", help="under a minute")
    parser.add_argument("--final", action="store_true", help="what the ledger needs, in order")
    parser.add_argument("--parts", default="", help=f"of {', '.join(PARTS)}")
    parser.add_argument("--shapes", default="", help=f"of {', '.join(SHAPES)}")
    parser.add_argument("--budgets", default="", help="of nano: tokens in a step")
    parser.add_argument("--settings", default="{}", help="of every engine, as JSON")
    parser.add_argument("--timeout", type=float, default=300.0, help="seconds, of each process")
    parser.add_argument("--deadline", type=float, help=f"seconds in all ({FINAL_S:.0f} if --final)")
    parser.add_argument("--json", help="also write the result here")
    parser.add_argument("--table", nargs="+", metavar="FILE", help="show results, measure nothing")
    parser.add_argument("--into", metavar="FILE", help="put the tables into this page")
    parser.add_argument("--picture", nargs=2, metavar=("FILE", "SVG"), help="draw, measure nothing")
    args = parser.parse_args()
    if args.table:
        shown = tables(read(args.table))
        if args.into:
            put_into(Path(args.into), shown)
        else:
            print(shown)
        return
    if args.picture:
        found, svg = args.picture
        Path(svg).write_text(draw(read([found])[LARGE]["interference"]))
        return
    usual = "check,nano,decode,prefill" if args.quick else ",".join(PARTS)
    parts = (args.parts or usual).split(",")
    shapes = (args.shapes or (SMALL if args.quick else ",".join(SHAPES))).split(",")
    unknown = set(parts) - set(PARTS)
    if unknown:
        parser.error(f"no such part: {', '.join(sorted(unknown))}")
    deadline = args.deadline or (FINAL_S if args.final else None)
    settings = json.loads(args.settings)
    run = Run(args.quick, args.timeout, deadline, args.json, args.budgets, settings)
    run.results["settings"] = settings
    run.results["floors"] = {
        shape: floors_of(shape, settings) for shape in (SHAPES[:2] if args.final else shapes)
    }
    for shape, found in run.results["floors"].items():
        print(f"floors of {shape}: " + ", ".join(f"{k} {v:.2f} ms" for k, v in found.items()))
    if args.final:
        run.final()
    else:
        if "check" in parts:
            run.check()
        for shape in shapes:
            run.shape(shape, parts)
        if "start" in parts:
            for shape in shapes:
                run.start(shape)
    run.save()
    try:
        print(tables(run.results))
    finally:
        print(json.dumps(run.results))


class Run:
    """Starts the processes and collects what they report."""

    def __init__(
        self,
        quick: bool,
        timeout_s: float,
        deadline_s: float | None,
        file: str | None,
        budgets: str,
        settings: dict[str, Any],
    ) -> None:
        today = datetime.now(UTC).date().isoformat()
        self.results: dict[str, Any] = {"bench": "gpu", "quick": quick, "date": today}
        self._quick, self._timeout_s, self._file = quick, timeout_s, file
        self._end = None if deadline_s is None else perf_counter() + deadline_s
        self._budgets, self._settings = budgets, settings

    def save(self) -> None:
        """Whole or not at all, whenever we are stopped."""
        if self._file:
            new = Path(self._file + ".new")
            new.write_text(json.dumps(self.results) + "\n")
            new.replace(self._file)

    # ── what to run ─────────────────────────────────────────────────────────────────────────

    def final(self) -> None:
        """In order of importance. The first process starts on empty caches, the others on what
        it left there."""
        self._budgets = self._budgets or "16384,8192,4096,2048"
        with tempfile.TemporaryDirectory() as folder:
            caches = {"TRITON_CACHE_DIR": folder}
            self._timeout_s = 180  # about twice what it should take, so that one that hangs …
            first = ["start", "prefill", "decode", "nano", "profile"]  # warm cards prefill slower
            self._parts(LARGE, first, {}, caches, "cold")
            self._timeout_s = 70  # … leaves time for the others
            self._budgets = self._budgets.split(",")[0]
            self._parts(SMALL, ["nano", "mixed", "decode", "prefill", "profile"], {}, caches)
            self._parts(LARGE, ["interference"], LONG, caches)
            self._parts(LARGE, ["start"], {}, caches, "warm")

    def check(self) -> None:
        for name in ("kernels_check", "cuda_check"):
            if not Path(f"tests/gpu/{name}.py").exists():
                print(f"tests/gpu/{name}.py is not there: not checked")
                continue
            quick = ["--quick"] if self._quick and name == "cuda_check" else []
            lines = list(self._start(["-m", f"tests.gpu.{name}", *quick], show=False))
            found = [line for line in lines if line.startswith("{")]
            last = (found or lines or [""])[-1]
            self.results[name] = json.loads(last) if found else last
            print(f"{name}: {last[:2000]}")

    def shape(self, shape: str, parts: Sequence[str]) -> None:
        usual = [part for part in ("decode", "prefill", "nano", "profile") if part in parts]
        if "mixed" in parts and shape == SMALL:
            usual.append("mixed")
        if usual:
            self._parts(shape, usual, {})
        if "interference" in parts and shape == LARGE:
            self._parts(shape, ["interference"], LONG)
        if "long" in parts and shape == LARGE:
            self._parts(shape, ["long"], LONG_CACHED)

    def start(self, shape: str) -> None:
        """Process start to first token, with empty caches and with full ones."""
        with tempfile.TemporaryDirectory() as folder:
            for name in ("cold", "warm"):
                self._parts(shape, ["start"], {}, {"TRITON_CACHE_DIR": folder}, name)

    # ── how it runs ─────────────────────────────────────────────────────────────────────────

    def _parts(
        self,
        shape: str,
        parts: Sequence[str],
        settings: dict[str, Any],
        env: dict[str, str] | None = None,
        start: str = "start",
    ) -> None:
        """`start`: what this process's own start is called."""
        command = ["-m", "bench.gpu_parts", shape, ",".join(parts)]
        command += ["--settings", json.dumps(self._settings | settings)]
        command += ["--quick"] if self._quick else []
        command += ["--budgets", self._budgets] if self._budgets else []
        begun, into = time(), self.results.setdefault(shape, {})
        for line in self._start(command, env):
            if not line.startswith("RESULT "):
                continue
            found = json.loads(line.removeprefix("RESULT "))
            part, result = found["part"], found["result"]
            if part == "start":
                result = into.get(part, {}) | {
                    f"{start}_s": result["first_token_at"] - begun,
                    f"{start}_imports_s": result["imported_at"] - begun,
                    f"{start}_ready_s": result["ready_s"],
                }
            into[part] = result
            self.save()

    def _start(
        self, command: list[str], env: dict[str, str] | None = None, show: bool = True
    ) -> Iterator[str]:
        """Lines that a process writes, as they come. Ended by its own alarm if it hangs."""
        begun, limit = perf_counter(), self._timeout_s
        if self._end is not None:
            limit = min(limit, self._end - begun)
            if limit < LEAST_S:
                print(f"── {' '.join(command)}: no time is left", flush=True)
                return
        print(f"── {' '.join(command)}", flush=True)
        process = subprocess.Popen(
            ["timeout", "-k", "5", str(limit), sys.executable, "-u", *command],
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
            yield line.rstrip()
        status = process.wait()
        if status and not show:
            print("\n".join(lines[-40:]))
        print(f"── exit {status} after {perf_counter() - begun:.1f} s", flush=True)


if __name__ == "__main__":
    main()
