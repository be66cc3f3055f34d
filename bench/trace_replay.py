"""Is a replayed trace the trace? Arrivals, lengths and shared prefixes, checked against the file.

    python -m bench.trace_replay FILE [--seconds 600] [--speed 3] [--shrink 64] [--json FILE]

Starts `twostroke serve`, replays a part of Azure's or Mooncake's trace with `twostroke bench serve`
and compares what the server recorded of each request with the file, which this script reads by
itself: when the request came, how long its prompt and its answer were, and how much of the prompt
the prefix cache had, which for Mooncake's trace the hash ids say. Ends with one JSON line; exit
status 1 if the two differ by more than the bounds.
"""

from __future__ import annotations

import argparse
import csv
import gzip
import json
import shlex
import statistics
import subprocess
import sys
import tempfile
from datetime import datetime
from itertools import pairwise
from pathlib import Path
from typing import Any, NamedTuple

from bench.witness import Json, Witness, largest, request_figures
from twostroke.measure.compare.arms import serving
from twostroke.measure.load.result import environment
from twostroke.measure.load.stats import percentile

HASHED = 512  # tokens of a prompt that one of Mooncake's hash ids stands for
LATE_MS = 50.0  # p99 of how much later than in the file a request reaches the engine
HITS = 0.95  # of the prefixes that the hash ids promise


class Line(NamedTuple):
    """A request of the file, as it stands there."""

    at_s: float
    prompt: int
    output: int
    hash_ids: tuple[int, ...]


def read(path: str, seconds: float) -> list[Line]:
    opened: Any = gzip.open if path.endswith(".gz") else open
    with opened(path, "rt", encoding="utf-8-sig") as file:
        if "csv" in path:
            rows = list(csv.DictReader(file))
            times = [datetime.fromisoformat(row["TIMESTAMP"][:26]).timestamp() for row in rows]
            lengths = [(int(r["ContextTokens"]), int(r["GeneratedTokens"])) for r in rows]
            lines = [Line(at, *pair, ()) for at, pair in zip(times, lengths, strict=True)]
        else:
            entries = [json.loads(text) for text in file]
            lines = [
                Line(
                    entry["timestamp"] / 1e3,
                    entry["input_length"],
                    entry["output_length"],
                    tuple(entry["hash_ids"]),
                )
                for entry in entries
            ]
    first = lines[0].at_s
    return [one._replace(at_s=one.at_s - first) for one in lines if one.at_s - first < seconds]


def shared_tokens(lines: list[Line], shrink: float, block_size: int) -> list[int]:
    """Of each prompt, the tokens that a cache of endless size would have, in blocks of the server's
    size: the longest beginning of equal hash ids in any prompt before it. One token at least is
    left to compute."""
    size = max(1, round(HASHED / shrink))
    known: dict[tuple[int, ...], int] = {}  # hash ids from the beginning → tokens of them seen
    found = []
    for one in lines:
        tokens = max(1, round(one.prompt / shrink))
        ids = one.hash_ids[: -(-tokens // size)]
        beginnings = [ids[: n + 1] for n in range(len(ids))]
        shared = max((known.get(part, 0) for part in beginnings), default=0)
        found.append(min(shared, tokens - 1) // block_size * block_size)
        for n, part in enumerate(beginnings, 1):
            known[part] = max(known.get(part, 0), min(n * size, tokens))
    return found


def replay(url: str, args: argparse.Namespace, folder: Path) -> Json:
    words = ["bench", "serve", "--base-url", url, "--dataset-name", "trace"]
    words += ["--dataset-path", str(Path(args.trace).resolve()), "--save-detailed"]
    words += ["--trace-seconds", f"{args.seconds:g}", "--trace-speed", f"{args.speed:g}"]
    words += ["--trace-shrink", f"{args.shrink:g}", "--metric-percentiles", "90,99"]
    words += ["--result-dir", str(folder), "--result-filename", "replay.json"]
    print(f"$ twostroke {shlex.join(words)}", flush=True)
    done = subprocess.run([sys.executable, "-m", "twostroke", *words], check=False)
    if done.returncode not in (0, 3):
        raise SystemExit(f"bench serve ended with {done.returncode}")
    return dict(json.loads((folder / "replay.json").read_text()))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("trace", help="Azure's CSV or Mooncake's JSON lines, compressed or not")
    parser.add_argument("--seconds", type=float, default=600.0, help="of the trace")
    parser.add_argument("--speed", type=float, default=3.0)
    parser.add_argument("--shrink", type=float, default=64.0)
    parser.add_argument("--block-size", type=int, default=16, help="of the server's KV blocks")
    parser.add_argument("--serve", default="", help="more options of `twostroke serve`")
    parser.add_argument("--json", help="also write the result here")
    args = parser.parse_args()
    lines = read(args.trace, args.seconds)
    options = f"--block-size {args.block_size} {args.serve}".strip()
    with (
        tempfile.TemporaryDirectory() as name,
        serving([options]) as (url,),
        Witness(url, 3.0) as witness,
    ):
        detail = replay(url, args, Path(name))
    found = {
        "bench": "trace_replay",
        "environment": environment(),
        "trace": Path(args.trace).name,
        "seconds": args.seconds,
        "speed": args.speed,
        "shrink": args.shrink,
        "serve": options,
        **compared(lines, detail, witness, args),
    }
    line = json.dumps(found)
    print(line)
    if args.json:
        Path(args.json).write_text(line + "\n")
    if found["out_of_bounds"]:
        raise SystemExit(f"out of bounds: {', '.join(found['out_of_bounds'])}")


def compared(lines: list[Line], detail: Json, witness: Witness, args: argparse.Namespace) -> Json:
    ids = detail["request_ids"]
    records = [witness.requests.get(name) for name in ids]
    pairs = [(one, r) for one, r in zip(lines, records, strict=False) if r is not None]
    due = [one.at_s / args.speed for one in lines]
    asked_late = [1e3 * abs(a - b) for a, b in zip(detail["start_times"], due, strict=False)]
    first = min(record["received_s"] - one.at_s / args.speed for one, record in pairs)
    reached_late = [1e3 * (r["received_s"] - one.at_s / args.speed - first) for one, r in pairs]
    expected = shared_tokens(lines, args.shrink, args.block_size)
    cached = [(e, r["num_cached"]) for e, r in zip(expected, records, strict=False) if r]
    promised, hit = (sum(column) for column in zip(*cached, strict=True))
    prompts = [(max(1, round(one.prompt / args.shrink)), r["num_prompt"]) for one, r in pairs]
    outputs = [(max(1, round(one.output / args.shrink)), len(r["token_s"])) for one, r in pairs]
    found: Json = {
        "requests_in_file": len(lines),
        "requests_sent": len(ids),
        "requests_recorded": len(pairs),
        "failed": detail["failed"],
        "certified": detail["certified"],
        "problems": detail["problems"],
        "duration_s": detail["duration"],
        "prompt_tokens": sum(size for _, size in prompts),
        "prompts_of_other_length": sum(a != b for a, b in prompts),
        "output_tokens": sum(size for _, size in outputs),
        "outputs_of_other_length": sum(a != b for a, b in outputs),
        "due_otherwise_than_file_ms": largest(asked_late),
        "reached_engine_late_ms": {**largest(reached_late), "p99": percentile(reached_late, 99)},
        "gap_cv_file": variation([one.at_s for one, _ in pairs]),
        "gap_cv_engine": variation([r["received_s"] for _, r in pairs]),
        "prefix_tokens_by_hash_ids": promised,
        "prefix_tokens_hit": hit,
        "requests_with_more_hits_than_hash_ids": sum(got > most for most, got in cached),
        "prefix_share_by_hash_ids": promised / sum(size for _, size in prompts),
        "server": request_figures(r for _, r in pairs),
        "client": {
            name: detail[name]
            for name in ("median_ttft_ms", "p99_ttft_ms", "median_tpot_ms", "output_throughput")
        },
    }
    checks = {
        "requests": found["requests_in_file"] == found["requests_sent"] == len(pairs),
        "failures": not found["failed"],
        "prompt lengths": not found["prompts_of_other_length"],
        "output lengths": not found["outputs_of_other_length"],
        "due times": found["due_otherwise_than_file_ms"]["p100"] < 1.0,
        "arrivals": found["reached_engine_late_ms"]["p99"] <= LATE_MS,
        "prefix hits": hit >= HITS * promised,
        "hits beyond the hash ids": not found["requests_with_more_hits_than_hash_ids"],
    }
    found["out_of_bounds"] = [name for name, holds in checks.items() if not holds]
    return found


def variation(times: list[float]) -> float:
    """Of the gaps between arrivals: standard deviation over mean."""
    ordered = sorted(times)
    gaps = [after - before for before, after in pairwise(ordered)]
    return statistics.pstdev(gaps) / statistics.fmean(gaps)


if __name__ == "__main__":
    main()
