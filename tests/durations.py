"""Durations of the tests, from pytest's reports, as a JSON file.

    python -m pytest -n 4 --dist worksteal --junitxml core.xml
    python -m pytest -n 4 --dist worksteal -m full --junitxml full.xml
    python -m tests.durations "core=core.xml" "rest of full=full.xml" --machine WORDS --date DATE

The file has for each report the numbers of tests, the duration of the run, the 60 slowest tests and
the seconds of each test file. The seconds of a test include its fixtures.
"""

from __future__ import annotations

import argparse
from collections import Counter
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

from bench.output import write_result

NUM_SLOWEST = 60


def summarise(report: Path) -> dict[str, Any]:
    """Return the counts and durations of one report."""
    (suite,) = ElementTree.parse(report).getroot().iter("testsuite")
    seconds = {name_of(case): float(case.get("time", 0)) for case in suite.iter("testcase")}
    by_file: Counter[str] = Counter()
    for name, time in seconds.items():
        by_file[name.partition("::")[0].removeprefix("tests/")] += time
    tests, skipped = int(suite.get("tests", 0)), int(suite.get("skipped", 0))
    failed = int(suite.get("failures", 0)) + int(suite.get("errors", 0))
    slowest = sorted(seconds.items(), key=lambda test: -test[1])[:NUM_SLOWEST]
    return {
        "tests": tests,
        "passed": tests - failed - skipped,
        "failed": failed,
        "skipped": skipped,
        "wall_s": round(float(suite.get("time", 0))),
        "slowest": [[name, round(time, 1)] for name, time in slowest],
        "seconds_by_file": {name: round(time, 1) for name, time in by_file.most_common()},
    }


def name_of(case: ElementTree.Element) -> str:
    """Return the name of a test as pytest prints it, without the class."""
    words = case.get("classname", "").split(".")
    file = next((n for n, word in enumerate(words) if word.startswith("test_")), len(words) - 1)
    return f"{'/'.join(words[: file + 1])}.py::{case.get('name')}"


def main() -> None:
    parser = argparse.ArgumentParser(description="Durations of the tests, from pytest's reports.")
    parser.add_argument("reports", nargs="+", metavar="NAME=FILE", help="name of a run, its report")
    parser.add_argument("--json", type=Path, help="write the result to this file")
    parser.add_argument("--machine", required=True, help="description of the machine")
    parser.add_argument("--date", required=True)
    args = parser.parse_args()
    result: dict[str, Any] = {"machine": args.machine, "date": args.date}
    for report in args.reports:
        name, _, file = report.partition("=")
        result[name] = summarise(Path(file))
    write_result(result, args.json, indent=1)


if __name__ == "__main__":
    main()
