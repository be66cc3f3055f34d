"""KV blocks on a disk: a conversation that resumes after kill -9, and the cost without hits.

    python -m bench.tiers [--tokens 4096] [--rounds 5] [--folder DIR] [--json FILE]

1. A server with `--kv-disk-cache` computes a conversation and is killed. Its files leave the
   system's cache. The next server gets the conversation again: time to first token beside a server
   that computes it, and the share of the disk's bandwidth, which is that of plain reads of the same
   files by as many threads.
2. Two engines in this process, with and without a tier, compute prompts that nobody has sent
   before, in turns: the ratio of their times, and of their CPU seconds with all copies, which other
   load on the machine disturbs less.
"""

from __future__ import annotations

import argparse
import http.client
import json
import mmap
import os
import queue
import random
import shutil
import signal
import socket
import statistics
import subprocess
import sys
import tempfile
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from time import monotonic, perf_counter, process_time, sleep
from typing import Any

from bench.output import write_result
from twostroke import LLM, SamplingParams
from twostroke.kv.tiers.disk import DIRECT, READERS
from twostroke.kv.tiers.piece_file import aligned

START_S = 300.0
QUIET_S = 2.0  # without a new file, after which the conversation is on the disk
VOCABULARY = 40_000


@contextmanager
def server(*flags: str) -> Iterator[tuple[subprocess.Popen[bytes], int]]:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    line = [sys.executable, "-m", "twostroke", "serve", "--port", str(port), *flags]
    child = subprocess.Popen(line, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    try:
        deadline = monotonic() + START_S
        while True:
            try:
                connection = http.client.HTTPConnection("127.0.0.1", port, timeout=5)
                connection.request("GET", "/health")
                if connection.getresponse().status == 200:
                    break
            except OSError:
                pass
            assert child.poll() is None, "the server has ended"
            assert monotonic() < deadline, "the server does not start"
            sleep(0.2)
        yield child, port
    finally:
        child.send_signal(signal.SIGKILL)
        child.wait()


def ask(port: int, prompt: list[int]) -> dict[str, Any]:
    body = {"prompt": prompt, "max_tokens": 8, "temperature": 0, "ignore_eos": True}
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=START_S)
    head = {"Content-Type": "application/json"}
    connection.request(
        "POST", "/v1/completions", json.dumps(body | {"timings_per_token": True}), head
    )
    answer = json.loads(connection.getresponse().read())
    timings = answer["timings"]
    return {
        "text": answer["choices"][0]["text"],
        "cached": answer["usage"]["prompt_tokens_details"]["cached_tokens"],
        "ttft_ms": timings["queue_ms"] + timings["prefill_ms"],
        "fetch": timings.get("kv_fetch"),
    }


def pieces(folder: Path) -> list[Path]:
    return sorted(folder.glob("*/*.kv"))


def wait_for_files(folder: Path) -> None:
    count, since = -1, monotonic()
    while monotonic() - since < QUIET_S:
        sleep(0.1)
        if len(pieces(folder)) != count:
            count, since = len(pieces(folder)), monotonic()


def leave_the_cache(folder: Path) -> None:
    for path in pieces(folder):
        file = os.open(path, os.O_RDONLY)
        os.fsync(file)
        os.posix_fadvise(file, 0, 0, os.POSIX_FADV_DONTNEED)
        os.close(file)


def plain_reads(folder: Path, names: list[Path], readers: int = READERS) -> float:
    """Return the bytes a second of reading these files by so many threads, and nothing else."""
    leave_the_cache(folder)
    left: queue.SimpleQueue[Path] = queue.SimpleQueue()
    for path in names:
        left.put(path)

    def read() -> None:
        buffer = mmap.mmap(-1, aligned(names[0].stat().st_size))
        while True:
            try:
                path = left.get_nowait()
            except queue.Empty:
                return
            file = os.open(path, os.O_RDONLY | DIRECT)
            os.preadv(file, [buffer], 0)
            os.close(file)

    threads = [threading.Thread(target=read) for _ in range(readers)]
    total, began = sum(path.stat().st_size for path in names), perf_counter()
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return total / (perf_counter() - began)


def resume(folder: Path, tokens: int, rounds: int) -> dict[str, Any]:
    rng = random.Random(1)
    found = []
    for _ in range(rounds):
        shutil.rmtree(folder, ignore_errors=True)
        prompt = [rng.randrange(1000, VOCABULARY) for _ in range(tokens)]
        warm = [rng.randrange(1000, VOCABULARY) for _ in range(600)]
        flag = f"--kv-disk-cache={folder}:4GiB"
        with server(flag) as (_, port):
            ask(port, warm)
            first = ask(port, prompt)
            wait_for_files(folder)
        leave_the_cache(folder)
        names = pieces(folder)
        with server(flag) as (_, port):
            back = ask(port, prompt)
        with server() as (_, port):
            ask(port, warm)
            again = ask(port, prompt)
        assert back["text"] == first["text"] == again["text"], "the answers differ"
        disk = plain_reads(folder, names)
        fetch = back["fetch"]
        rate = fetch["bytes"] / (fetch["ms"] / 1e3)
        found.append(
            {
                "fetched_tokens": fetch["n"],
                "outcome": fetch["outcome"],
                "ttft_fetched_ms": back["ttft_ms"],
                "ttft_computed_ms": again["ttft_ms"],
                "fetch_ms": fetch["ms"],
                "fetch_bytes_per_s": rate,
                "disk_bytes_per_s": disk,
                "share_of_disk": rate / disk,
            }
        )
        print(found[-1], file=sys.stderr)
    median = {
        name: statistics.median(one[name] for one in found)
        for name in found[0]
        if name != "outcome"
    }
    return {"tokens": tokens, "median": median, "rounds": found}


def cost_without_hits(folder: Path, rounds: int, tokens: int = 1024) -> dict[str, Any]:
    """The arms take turns, and each round the other one begins."""
    shutil.rmtree(folder, ignore_errors=True)
    settings: dict[str, Any] = {"kv_cache_memory_bytes": 1 << 30}
    arms = {
        "without": LLM(**settings),
        "with": LLM(kv_disk_cache=f"{folder}:4GiB", **settings),
    }
    rng, params = random.Random(2), SamplingParams(temperature=0, max_tokens=32, ignore_eos=True)
    times: dict[str, list[float]] = {name: [] for name in arms}
    cpu_times: dict[str, list[float]] = {name: [] for name in arms}
    for n in range(rounds + 1):
        prompt = [rng.randrange(1000, VOCABULARY) for _ in range(tokens)]
        for name in list(arms)[:: 1 if n % 2 else -1]:
            began, cpu_began = perf_counter(), process_time()
            arms[name].generate({"prompt_token_ids": prompt}, params)
            took_s = perf_counter() - began
            tiers = arms[name].engine.core.scheduler.kv.tiers
            while tiers is not None and tiers.is_storing:
                tiers.wait(1.0)
                tiers.take_finished()
            if n:
                times[name].append(took_s)
                cpu_times[name].append(process_time() - cpu_began)
    ratios = [one / other for one, other in zip(times["with"], times["without"], strict=True)]
    cpu = [one / other for one, other in zip(cpu_times["with"], cpu_times["without"], strict=True)]
    quartiles = statistics.quantiles(ratios, n=4)
    return {
        "cpu_s_median": {name: statistics.median(some) for name, some in cpu_times.items()},
        "cpu_ratio_median": statistics.median(cpu),
        "rounds": rounds,
        "prompt_tokens": tokens,
        "output_tokens": 32,
        "median_s": {name: statistics.median(some) for name, some in times.items()},
        "ratio_median": statistics.median(ratios),
        "ratio_quartiles": [quartiles[0], quartiles[2]],
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--tokens", type=int, default=4096)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--cost-rounds", type=int, default=30)
    parser.add_argument("--folder", type=Path, help="an empty folder on the disk to measure")
    parser.add_argument("--json", type=Path)
    args = parser.parse_args()
    with tempfile.TemporaryDirectory(dir=args.folder) as folder:
        result: dict[str, Any] = {"load_average": os.getloadavg()}
        if args.rounds:
            result["resume"] = resume(Path(folder) / "kv", args.tokens, args.rounds)
        if args.cost_rounds:
            result["cost_without_hits"] = cost_without_hits(Path(folder) / "kv", args.cost_rounds)
        write_result(result, args.json, indent=1)


if __name__ == "__main__":
    main()
