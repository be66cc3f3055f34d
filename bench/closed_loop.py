"""From a symptom to a measured gain: a fault, the doctor's verdict, and its experiment, tried.

    python -m bench.closed_loop [--model M] [--cases one-seat,…] [--json FILE] [--markdown FILE]

For each case of the doctor's exam: a server with the fault, under its load; the verdict of a
doctor who sees nothing but the address; `twostroke ab --from-doctor` with that verdict, the
server's faulty options as A, and a load of the same kind. FILE is written after each case.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import shlex
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

from bench.doctor_exam.cases import CASES

CASE_S = 240.0
# Three streams, and three prompts of 1,500 tokens while they write: more than one gap in 100.
STARVED = [(0, 32, 120), (50, 32, 120), (100, 32, 120)]
STARVED += [(300, 1500, 2), (800, 1500, 2), (1300, 1500, 2)]
LOADS = {
    "one-seat": "--max-concurrency 6 --num-prompts 12 --input-len 32 --output-len 32",
    "no-prefix-caching": "--max-concurrency 2 --num-prompts 12 --random-prefix-len 1024 "
    "--input-len 36 --output-len 8",
    "starved-by-budget": "--trace {trace}",
}


def run_case(name: str, args: argparse.Namespace, folder: Path) -> dict[str, Any]:
    model = [args.model] if args.model else []
    case = CASES[name]
    examined = subprocess.run(
        [sys.executable, "-m", "bench.doctor_exam.exam", name, *model],
        capture_output=True,
        timeout=CASE_S,
        check=False,
    )
    verdict = json.loads(examined.stdout)
    path, trace = folder / f"{name}.json", folder / "trace.jsonl"
    path.write_text(json.dumps(verdict))
    names = ("timestamp", "input_length", "output_length")
    due: list[dict[str, Any]] = [
        dict(zip(names, one, strict=True)) | {"hash_ids": []} for one in STARVED
    ]
    trace.write_text("".join(json.dumps(one) + "\n" for one in due))
    row: dict[str, Any] = {"case": name, "what": case.description, "verdict": verdict}
    if verdict["experiment"] is None:
        return row | {"error": "the doctor proposed no experiment"}
    faulty = shlex.join([*model, *case.serve])
    words = shlex.split(LOADS[name].replace("{trace}", str(trace)))
    command = [sys.executable, "-m", "twostroke", "ab", "--json", "--from-doctor", str(path)]
    tried = subprocess.run(
        [*command, "--a", faulty, "--pairs", str(args.pairs), "--pilot", "0", *words],
        capture_output=True,
        timeout=CASE_S,
        check=False,
    )
    try:
        found = json.loads(tried.stdout)
    except ValueError:
        return row | {"error": tried.stderr.decode(errors="replace")[-500:]}
    return row | {"status": tried.returncode, "ab": found, "load": LOADS[name]}


def table(rows: list[dict[str, Any]]) -> str:
    lines = [
        "| fault | doctor says | it proposes | predicted | measured | interval | |",
        "|---|---|---|---|---|---|---|",
    ]
    for row in rows:
        verdict = row["verdict"]
        cause = verdict["causes"][0]["cause"] if verdict["causes"] else ""
        says = f"{verdict['verdict']}: {cause}" if cause else verdict["verdict"]
        if "ab" not in row:
            lines.append(f"| {row['what']} | {says} | | | | | {row['error']} |")
            continue
        prediction = row["ab"]["prediction"]
        change = " ".join(
            flag if value is True else f"{flag} {value}"
            for flag, value in verdict["experiment"]["setting"].items()
        )
        measured, metric = prediction["measured"], prediction["metric"]
        lines.append(
            f"| {row['what']} | {says} | `{change}` | {metric} × "
            f"{prediction['predicted_ratio']:.2f} | × {measured['ratio']:.2f} | "
            f"{measured['low']:.2f} to {measured['high']:.2f} | {prediction['verdict']} |"
        )
    return "\n".join(lines) + "\n"


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--model")
    parser.add_argument("--cases", default=",".join(LOADS))
    parser.add_argument("--pairs", type=int, default=6)
    parser.add_argument("--json", metavar="FILE")
    parser.add_argument("--markdown", metavar="FILE")
    args = parser.parse_args()
    rows: list[dict[str, Any]] = []
    with tempfile.TemporaryDirectory() as folder:
        for name in args.cases.split(","):
            rows.append(run_case(name, args, Path(folder)))
            result = {
                "machine": {"architecture": platform.machine(), "cores": os.cpu_count()},
                "model": Path(args.model).name if args.model else "default",
                "pairs": args.pairs,
                "cases": rows,
            }
            if args.json:
                Path(args.json).write_text(json.dumps(result))
            if args.markdown:
                Path(args.markdown).write_text(table(rows))
    print(table(rows), end="")
    confirmed = [row.get("ab", {}).get("prediction", {}).get("verdict") for row in rows]
    return 0 if all(one == "CONFIRMED" for one in confirmed) else 1


if __name__ == "__main__":
    sys.exit(main())
