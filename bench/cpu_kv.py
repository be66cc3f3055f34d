"""Decode over long contexts with 8-bit KV caches on this CPU, beside fp16 and llama-server's q8_0.

    python -m bench.cpu_kv [--llama BIN_FOLDER] [--model GGUF] [--contexts 2048 8064]
        [--streams 32] [--output 48] [--rounds 3] [--only NAME ...] [--json FILE]

Each server is loaded once and stands still while another is measured; rounds alternate. A context's
prompts, all different, are the same in every round: the first round computes them and is not
counted, the others find them in the servers' caches. Rate: tokens of all streams a second from when
all of them write until the first has ended. Ends with one JSON line.
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
import sys
from pathlib import Path
from time import perf_counter
from typing import Any

from bench.cpu_floors import Work
from bench.cpu_interference import Server, planned
from bench.cpu_workers import summary
from twostroke.measure.client import OpenAIClient

TIMEOUT_S = 3600.0


class LongServer(Server):
    """Measured by many streams at the end of long prompts."""

    def decode(self, context: int, streams: int, output: int) -> float:
        """Tokens a second of all of them."""
        with self.process.awake():
            return asyncio.run(asyncio.wait_for(self._decode(context, streams, output), TIMEOUT_S))

    async def _decode(self, context: int, streams: int, output: int) -> float:
        client: OpenAIClient = self._client()
        start = perf_counter()
        try:
            sent = (
                client.send(planned(context, 7919 * n + context, output), start)
                for n in range(streams)
            )
            samples = await asyncio.gather(*sent)
        finally:
            client.connections.close()
        if wrong := next((one.error for one in samples if not one.ok), ""):
            raise RuntimeError(wrong)
        found = summary(start, [one.content_s for one in samples])
        return found["decode_tokens"] / found["decode_s"]


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
    if args.llama:
        server = [str(Path(args.llama) / "llama-server"), "-m", gguf, "-np", str(args.streams)]
        server += ["-c", str(args.streams * longest), "-fa", "on"]
        found["llama.cpp, q8_0"] = [*server, "-ctk", "q8_0", "-ctv", "q8_0"]
        found["llama.cpp, f16"] = server
    else:
        print("llama is not named (--llama): skipped")
    return {name: command for name, command in found.items() if not args.only or name in args.only}


def measure(args: argparse.Namespace, servers: list[LongServer]) -> dict[str, dict[str, Any]]:
    """Context → server → the rate of each round that counts."""
    rates: dict[str, dict[str, Any]] = {}
    for context in args.contexts:
        found = rates.setdefault(str(context), {server.name: [] for server in servers})
        for turn in range(args.rounds + 1):
            for server in servers[turn % len(servers) :] + servers[: turn % len(servers)]:
                begun = perf_counter()
                try:
                    rate = server.decode(context, args.streams, args.output)
                except (RuntimeError, TimeoutError) as error:
                    print(f"{server.name}, context {context}: {error}", flush=True)
                    continue
                if turn:
                    found[server.name].append(rate)
                what = f"round {turn}" if turn else "prompts computed"
                took = perf_counter() - begun
                print(
                    f"{context} {what}, {server.name}: {rate:,.1f} tok/s ({took:.0f} s)", flush=True
                )
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
    parser.add_argument("--only", nargs="*", help="servers by name")
    parser.add_argument("--json", help="also write the result here")
    args = parser.parse_args()
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(1))  # leave no server behind
    servers: list[LongServer] = []
    try:
        for name, command in commands(args, Work.of(args.model).path).items():
            port = free_port()
            servers.append(LongServer(name, [*command, "--port", str(port)], port, "m", {}))
            print(f"{name} is loaded", flush=True)
        rates = measure(args, servers)
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
            print(f"{name:22} {rate:8,.1f} tok/s, peak memory {peaks[name] / 1e9:.1f} GB")
    out = {"bench": "cpu_kv", "machine": platform.machine(), "cores": os.cpu_count()}
    text = json.dumps({**out, "tok_s": medians, "rounds": rates, "peak_bytes": peaks})
    print(text)
    if args.json:
        Path(args.json).write_text(text + "\n")


if __name__ == "__main__":
    main()
