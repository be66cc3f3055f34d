"""Run the doctor's exam and count how many injected faults the doctor finds.

    python -m bench.doctor_exam [--cases one-seat,idle] [--jobs 7 --cpus-per-job 2] [--json FILE]

Exit status: 0 if at least 95% of the answers are right and no healthy control got a fault, else 4.
"""

from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table
from rich.text import Text

from bench.doctor_exam.exam import find_cases, result_json, run_exam
from twostroke.errors import TwostrokeError

NOT_PASSED = 4


def main(words: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    add = parser.add_argument
    add("--cases", metavar="NAMES", help="names separated by commas; `list` prints all of them")
    add("--model", help="the model of the servers; default: the default of `twostroke serve`")
    add("--repeats", type=_count, default=3, metavar="N", help="runs of each case; default 3")
    add("--jobs", type=_count, default=1, metavar="N", help="cases at one time; default 1")
    add("--cpus-per-job", type=_count, default=2, metavar="N", help="default 2")
    add("--json", nargs="?", const="-", metavar="FILE", help="write the result as JSON")
    args = parser.parse_args(words)
    try:
        return _run(args)
    except TwostrokeError as error:
        print(f"error: {error}", file=sys.stderr)
        return 1


def _count(text: str) -> int:
    value = int(text)
    if value < 1:
        raise argparse.ArgumentTypeError("must be at least 1")
    return value


def _run(args: argparse.Namespace) -> int:
    cases = find_cases(args.cases)
    if args.cases == "list":
        for case in cases:
            print(f"{case.name:22} {case.expected or 'healthy':26} {case.description}")
        return 0

    def tell(number: int, total: int, name: str, answer: str) -> None:
        print(f"{number} of {total}: {name}: {answer}", file=sys.stderr, flush=True)

    answers = run_exam(cases, args.model, args.repeats, args.jobs, args.cpus_per_job, tell)
    result = result_json(answers)
    if args.json:
        text = json.dumps(result, indent=1)
        if args.json == "-":
            print(text)
        else:
            Path(args.json).write_text(text + "\n", encoding="utf-8")
    if args.json != "-":
        show_result(Console(), result)
    return 0 if result["passed"] else NOT_PASSED


def show_result(console: Console, result: dict[str, Any]) -> None:
    """Print one line for each case, and the confusion matrix."""
    rows = Table(box=None, pad_edge=False, header_style="bold")
    rows.add_column("injected", no_wrap=True)
    rows.add_column("right", justify="right", no_wrap=True)
    rows.add_column("wrong answers")
    for case in result["cases"]:
        wrong = ", ".join(f"{name} ({n})" for name, n in case["wrong"].items())
        rows.add_row(case["name"], f"{case['right']} of {case['runs']}", wrong)
    console.print(rows)
    console.print()
    matrix = Table(box=None, pad_edge=False, header_style="bold")
    matrix.add_column("injected \\ answered")
    names = result["said"]
    for number in range(1, len(names) + 1):
        matrix.add_column(str(number), justify="right", no_wrap=True)
    for number, name in enumerate(names, 1):
        counts = result["matrix"].get(name, {})
        matrix.add_row(f"{number} {name}", *(str(counts.get(one) or "·") for one in names))
    console.print(matrix)
    style = "bold green" if result["passed"] else "bold red"
    console.print(
        Text(
            f"{result['right']} of {result['runs']} right ({result['accuracy']:.0%}); "
            f"{result['false_alarms']} false alarms in {result['controls']} healthy controls",
            style=style,
        )
    )


if __name__ == "__main__":
    sys.exit(main())
