"""Can `twostroke ab` be believed? Its own verdicts, many times over, where the truth is known.

    python -m bench.ab_study --model M --reps 40 --jobs 7 --cpus-per-job 2 --json FILE

Two studies on real servers, in turn. `aa`: a server against another of the same options, where
every WIN or LOSS is false; at most 5% may be. `slow`: against one whose every step takes 10% longer
(bench/slowed_server.py), which is to be found in at least 90%. A repetition is the command itself
with both servers started anew, on --cpus-per-job cores of its own; the engine has one thread, so
that the client has a core. Repetitions that no longer fit into --budget-s are left out and counted.
FILE is written after each one. Exit status: 0 both goals met, 1 not met, 3 repetitions left out.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import platform
import shlex
import signal
import statistics
import subprocess
import sys
import tempfile
from collections import Counter
from functools import partial
from pathlib import Path
from time import monotonic, sleep
from typing import Any

from bench.slowed_server import VARIABLE
from twostroke.measure.compare.paired_comparison import METRICS, pairs_needed

KINDS = ("aa", "slow")
FALSE_SHARE, FOUND_SHARE = 0.05, 0.9
END_S = 15.0


class Repetition:
    """One `twostroke ab`, running on cores of its own."""

    def __init__(
        self, kind: str, number: int, cores: list[int], command: list[str], folder: Path
    ) -> None:
        self.kind, self.number, self.cores = kind, number, cores
        self.began_s = monotonic()
        self._out, self._errors = folder / f"{kind}{number}.json", folder / f"{kind}{number}.txt"
        with self._out.open("wb") as out, self._errors.open("wb") as errors:
            self.process = subprocess.Popen(
                command,
                stdout=out,
                stderr=errors,
                start_new_session=True,
                preexec_fn=partial(os.sched_setaffinity, 0, cores),
            )

    def result(self) -> dict[str, Any]:
        """Of a repetition that has ended."""
        row: dict[str, Any] = {"kind": self.kind, "number": self.number, "cores": self.cores}
        row["seconds"] = round(monotonic() - self.began_s, 1)
        row["status"] = self.process.returncode
        try:
            found = json.loads(self._out.read_bytes())
        except ValueError:
            row["error"] = self._errors.read_text(errors="replace")[-500:]
            return row
        return row | {key: found[key] for key in ("verdict", "metrics", "pilot", "runs")}

    def end(self) -> None:
        """As Ctrl-C does: the servers end with it."""
        self.process.send_signal(signal.SIGINT)
        try:
            self.process.wait(END_S)
        except subprocess.TimeoutExpired:
            os.killpg(self.process.pid, signal.SIGKILL)
            self.process.wait()


def command_of(kind: str, number: int, args: argparse.Namespace) -> list[str]:
    serve = shlex.join([*([args.model] if args.model else []), "--threads", "1"])
    words = [sys.executable, "-m", "twostroke", "ab", "--json", "--a", serve]
    if kind == "aa":
        words.append("--aa")
    else:
        slow = [f"{VARIABLE}={args.slowdown}", sys.executable, "-m", "bench.slowed_server"]
        words += ["--b", f"env {shlex.join(slow)} {serve} --port {{port}}"]
    return [
        *words,
        *("--pairs", str(args.pairs), "--pilot", str(args.pilot), "--seed", str(1000 * number)),
        *("--num-prompts", str(args.num_prompts), "--input-len", str(args.input_len)),
        *("--output-len", str(args.output_len), "--max-concurrency", str(args.max_concurrency)),
    ]


def run(args: argparse.Namespace, folder: Path) -> list[dict[str, Any]]:
    allowed, size = sorted(os.sched_getaffinity(0)), args.cpus_per_job
    free = [allowed[at : at + size] for at in range(0, len(allowed) - size + 1, size)][: args.jobs]
    if not free:
        raise SystemExit(f"--cpus-per-job {size}: there are {len(allowed)} cores")
    todo = [(kind, number) for number in range(args.reps) for kind in KINDS]
    todo.reverse()
    running: list[Repetition] = []
    rows: list[dict[str, Any]] = []
    end_s, longest_s = monotonic() + args.budget_s, 0.0
    try:
        while running or (todo and monotonic() + longest_s < end_s):
            while todo and free and monotonic() + longest_s < end_s:
                kind, number = todo.pop()
                command = command_of(kind, number, args)
                running.append(Repetition(kind, number, free.pop(), command, folder))
            for one in [one for one in running if one.process.poll() is not None]:
                running.remove(one)
                free.append(one.cores)
                rows.append(one.result())
                longest_s = max(longest_s, rows[-1]["seconds"])
                said = rows[-1].get("verdict") or rows[-1]["error"]
                print(f"{one.kind} {one.number}: {said} ({rows[-1]['seconds']} s)", flush=True)
                write(args, rows)
            if monotonic() > end_s:
                break
            sleep(0.05)
    finally:
        for one in running:
            one.end()
    return rows


def summary(rows: list[dict[str, Any]], pairs: int) -> dict[str, Any]:
    found: dict[str, Any] = {}
    for kind in KINDS:
        mine = [row for row in rows if row["kind"] == kind and "verdict" in row]
        verdicts = Counter(row["verdict"] for row in mine)
        if kind == "aa":
            counted, goal = verdicts["WIN"] + verdicts["LOSS"] + verdicts["MIXED"], FALSE_SHARE
        else:
            counted, goal = verdicts["LOSS"], FOUND_SHARE
        share = counted / len(mine) if mine else math.nan
        found[kind] = {
            "repetitions": len(mine),
            "errors": sum(row["kind"] == kind and "error" in row for row in rows),
            "verdicts": dict(verdicts),
            "false_share" if kind == "aa" else "found_share": share if mine else None,
            "goal": goal,
            "met": share <= goal if kind == "aa" else share >= goal,
            "metrics": {name: of_metric(mine, name, pairs) for name in METRICS},
        }
    return found


def of_metric(rows: list[dict[str, Any]], name: str, pairs: int) -> dict[str, Any]:
    """Spreads are standard deviations of logarithms of ratios. `between` above `by_pairs`: two
    processes of one program differ by more than their runs do."""
    told = [one for row in rows for one in row["metrics"] if one["metric"] == name]
    if len(told) < 2:
        return {}
    logs = [
        [
            math.log(b[name] / a[name])
            for a, b in zip(row["runs"]["a"], row["runs"]["b"], strict=True)
        ]
        for row in rows
    ]
    said = [row["pilot"]["detectable"][name] for row in rows if row["pilot"]]
    within = math.sqrt(statistics.fmean(statistics.variance(one) for one in logs))
    return {
        "ratio": math.exp(statistics.fmean(math.log(one["ratio"]) for one in told)),
        "verdicts": dict(Counter(one["verdict"] for one in told)),
        "spread_of_a_pair": within,
        "by_pairs": within / math.sqrt(pairs),
        "between": statistics.stdev(math.log(one["ratio"]) for one in told),
        "pairs_for_10_percent": pairs_needed(within, 0.1, len(METRICS)),
        "median_detectable": statistics.median(one["detectable"] for one in told),
        "median_detectable_by_pilot": statistics.median(said) if said else None,
    }


def write(args: argparse.Namespace, rows: list[dict[str, Any]]) -> dict[str, Any]:
    said = {key: value for key, value in vars(args).items() if key != "json"}
    said["model"] = Path(args.model).name if args.model else "default"
    result = {
        "study": said,
        "machine": {
            "architecture": platform.machine(),
            "cores": os.cpu_count(),
            "python": platform.python_version(),
        },
        "summary": summary(rows, args.pairs),
        "repetitions": rows,
    }
    if args.json:
        part = Path(f"{args.json}.part")
        part.write_text(json.dumps(result))
        part.replace(args.json)
    return result


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    add = parser.add_argument
    add("--model", help="a path; default: twostroke's own default")
    add("--reps", type=int, default=40, help="of each study")
    add("--jobs", type=int, default=1)
    add("--cpus-per-job", type=int, default=2)
    add("--budget-s", type=float, default=340.0)
    add("--slowdown", type=float, default=0.1)
    add("--pairs", type=int, default=8)
    add("--pilot", type=int, default=2)
    add("--num-prompts", type=int, default=6)
    add("--input-len", type=int, default=24)
    add("--output-len", type=int, default=12)
    add("--max-concurrency", type=int, default=3)
    add("--json", metavar="FILE")
    args = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        rows = run(args, Path(folder))
    found = write(args, rows)["summary"]
    for kind, one in found.items():
        share = one["false_share" if kind == "aa" else "found_share"]
        word = "false" if kind == "aa" else "found"
        told = "none" if share is None else f"{share:.1%} {word}"
        print(f"{kind}: {one['repetitions']} repetitions, {told}, {one['verdicts']}")
        for name, figures in one["metrics"].items():
            if figures:
                print(
                    f"  {name:10} × {figures['ratio']:.3f}, spread of a pair "
                    f"{figures['spread_of_a_pair']:.1%}, {args.pairs} pairs find "
                    f"{figures['median_detectable']:.1%}; processes {figures['between']:.1%} "
                    f"for {figures['by_pairs']:.1%} by their pairs; {figures['verdicts']}"
                )
    if len(rows) < 2 * args.reps or any(one["errors"] for one in found.values()):
        print(f"{2 * args.reps - len(rows)} repetitions left out")
        return 3
    return 0 if all(one["met"] for one in found.values()) else 1


if __name__ == "__main__":
    sys.exit(main())
