"""Decode over long contexts with 8-bit KV caches on this CPU, beside fp16 and llama-server's q8_0.

    python -m bench.cpu_kv [--llama BIN_FOLDER] [--model GGUF] [--contexts 2048 8064]
        [--streams 32] [--output 48] [--rounds 3] [--shared] [--only NAME ...] [--json FILE]

Each server is loaded once and stands still while another is measured; rounds alternate. A context's
prompts, all different, are the same in every round: the first round computes them and is not
counted, the others find them in the servers' caches. Rate: tokens of all streams a second from when
all of them write until the first has ended. Ends with one JSON line.

--shared: all streams go on with one prompt, which is computed once and found in its cache by the
others; llama.cpp's are then those of `llama-batched-bench -pps`, a process each round. For contexts
that many streams would take hours to read.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import platform
import signal
import socket
import statistics
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from time import perf_counter
from typing import Any

from bench.cpu_floors import Work
from bench.cpu_interference import Server, planned
from bench.cpu_workers import summary
from twostroke.measure.load.sample_client import OpenAIClient

TIMEOUT_S = 3600.0


class LongServer(Server):
    """Measured by many streams at the end of long prompts."""

    shared = False

    def decode(self, context: int, streams: int, output: int) -> float:
        """Tokens a second of all of them."""
        with self.process.awake():
            return asyncio.run(asyncio.wait_for(self._decode(context, streams, output), TIMEOUT_S))

    async def _decode(self, context: int, streams: int, output: int) -> float:
        client: OpenAIClient = self._client()
        start = perf_counter()
        try:
            if self.shared:
                await client.send(planned(context, context, 1), start)
            seeds = (context + (0 if self.shared else 7919 * n) for n in range(streams))
            sent = (client.send(planned(context, seed, output), start) for seed in seeds)
            samples = await asyncio.gather(*sent)
        finally:
            client.connections.close()
        if wrong := next((one.error for one in samples if not one.ok), ""):
            raise RuntimeError(wrong)
        found = summary(start, [one.content_s for one in samples])
        return found["decode_tokens"] / found["decode_s"]


class BatchedBench:
    """llama.cpp's own tool, whose streams share their prompt; it computes that in every round."""

    def __init__(self, name: str, command: list[str]) -> None:
        self.name, self._command = name, command

    def decode(self, context: int, streams: int, output: int) -> float:
        sizes = {"-npp": context, "-ntg": output, "-npl": streams}
        sizes["-c"] = context + streams * (output + 1) + 256
        given = [text for name, value in sizes.items() for text in (name, str(value))]
        command = [*self._command, *given, "-pps", "-kvu", "--output-format", "jsonl"]
        ran = subprocess.run(command, capture_output=True, text=True, check=False)
        lines = [line for line in ran.stdout.splitlines() if line.startswith("{")]
        if ran.returncode or not lines:
            raise RuntimeError(ran.stderr[-500:])
        return float(json.loads(lines[-1])["speed_tg"])


def free_port() -> int:
    with socket.socket() as one:
        one.bind(("127.0.0.1", 0))
        port: int = one.getsockname()[1]
        return port


def commands(args: argparse.Namespace, gguf: str) -> dict[str, list[str]]:
    """Without a port."""
    longest = max(args.contexts) + args.output + 16
    ours = [sys.executable, "-c", "from twostroke.cli import main; main()", "serve", gguf]
    ours += ["--served-model-name", "m", "--max-num-seqs", str(args.streams)]
    ours += ["--num-gpu-blocks-override", str(args.streams * -(-longest // 16) + 64)]
    found = {
        f"twostroke, {kind}": [*ours, "--kv-cache-dtype", kind] for kind in ("float16", "int8")
    }
    if args.llama and args.shared:
        tool = [str(Path(args.llama) / "llama-batched-bench"), "-m", gguf, "-fa", "on"]
        found["llama.cpp, q8_0"] = [*tool, "-ctk", "q8_0", "-ctv", "q8_0"]
        found["llama.cpp, f16"] = tool
    elif args.llama:
        server = [str(Path(args.llama) / "llama-server"), "-m", gguf, "-np", str(args.streams)]
        server += ["-c", str(args.streams * longest), "-fa", "on"]
        found["llama.cpp, q8_0"] = [*server, "-ctk", "q8_0", "-ctv", "q8_0"]
        found["llama.cpp, f16"] = server
    else:
        print("llama is not named (--llama): skipped")
    return {name: command for name, command in found.items() if not args.only or name in args.only}


def measure(
    args: argparse.Namespace, servers: Sequence[LongServer | BatchedBench]
) -> dict[str, dict[str, Any]]:
    """Context → server → the rate of each round that counts."""
    rates: dict[str, dict[str, Any]] = {}
    for context in args.contexts:
        found = rates.setdefault(str(context), {server.name: [] for server in servers})
        for turn in range(args.rounds + 1):
            for server in [*servers[turn % len(servers) :], *servers[: turn % len(servers)]]:
                if not turn and isinstance(server, BatchedBench):
                    continue
                begun = perf_counter()
                try:
                    rate = server.decode(context, args.streams, args.output)
                except (RuntimeError, TimeoutError) as error:
                    print(f"{server.name}, context {context}: {error}", flush=True)
                    continue
                if turn:
                    found[server.name].append(rate)
                what = f"round {turn}" if turn else "prompts computed"
                told = f"{rate:,.1f} tok/s " if turn else ""
                took = perf_counter() - begun
                print(f"{context} {what}, {server.name}: {told}({took:.0f} s)", flush=True)
    return rates


def main() -> None:
    assert __doc__ is not None
    about = argparse.RawDescriptionHelpFormatter
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=about)
    parser.add_argument("--llama", default=os.environ.get("LLAMA_CPP_BIN"))
    parser.add_argument("--model", help="a GGUF file instead of the default model")
    parser.add_argument("--contexts", type=int, nargs="*", default=[2048, 8064])
    parser.add_argument("--streams", type=int, default=32)
    parser.add_argument("--output", type=int, default=48)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--shared", action="store_true", help="one prompt for all streams")
    parser.add_argument("--only", nargs="*", help="servers by name")
    parser.add_argument("--json", help="also write the result here")
    args = parser.parse_args()
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(1))  # leave no server behind
    LongServer.shared = args.shared
    servers: list[LongServer] = []
    tools: list[BatchedBench] = []
    try:
        for name, command in commands(args, Work.of(args.model).path).items():
            if "llama-batched-bench" in command[0]:
                tools.append(BatchedBench(name, command))
                continue
            port = free_port()
            servers.append(LongServer(name, [*command, "--port", str(port)], port, "m", {}))
            print(f"{name} is loaded", flush=True)
        rates = measure(args, [*servers, *tools])
        peaks = {server.name: server.process.peak_bytes() for server in servers}
    finally:
        for server in servers:
            server.process.close()
    medians = {
        context: {name: statistics.median(each) for name, each in found.items() if each}
        for context, found in rates.items()
    }
    for context, found in medians.items():
        print(f"\ncontext {context}, {args.streams} streams; medians")
        for name, rate in found.items():
            peak = f", peak memory {peaks[name] / 1e9:.1f} GB" if name in peaks else ""
            print(f"{name:22} {rate:8,.1f} tok/s{peak}")
    out: dict[str, Any] = {
        "bench": "cpu_kv",
        "shared": args.shared,
        "machine": platform.machine(),
        "cores": os.cpu_count(),
    }
    text = json.dumps({**out, "tok_s": medians, "rounds": rates, "peak_bytes": peaks})
    print(text)
    if args.json:
        Path(args.json).write_text(text + "\n")


if __name__ == "__main__":
    main()
