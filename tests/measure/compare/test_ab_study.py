"""The study of `ab`'s verdicts: what it counts, and that its fault is of the size it says."""

from __future__ import annotations

import argparse
import json
from itertools import count
from pathlib import Path
from typing import Any

import pytest

from bench import ab_study, slowed_server
from bench.ab_study import command_of, summary
from twostroke.measure.compare.ab import Figures, compare_runs


def row(kind: str, verdict: str, slower: float) -> dict[str, Any]:
    a = [Figures(10.0 + n, 5.0, 6.0, 100.0) for n in range(4)]
    b = [Figures(one.ttft, 5.0 * slower, 6.0, 100.0 / slower) for one in a]
    metrics = [one.as_json() for one in compare_runs(a, b)]
    runs = {"a": [one._asdict() for one in a], "b": [one._asdict() for one in b]}
    return {"kind": kind, "verdict": verdict, "metrics": metrics, "runs": runs, "pilot": None}


def test_false_verdicts_and_found_faults_are_counted() -> None:
    rows = [row("aa", "TIE", 1.0) for _ in range(18)] + [row("aa", "WIN", 1.0)]
    rows += [row("aa", "MIXED", 1.0), {"kind": "aa", "error": "killed"}]
    rows += [row("slow", "LOSS", 1.1) for _ in range(9)] + [row("slow", "MIXED", 1.1)]
    found = summary(rows, pairs=4)
    assert (found["aa"]["false_share"], found["aa"]["met"], found["aa"]["errors"]) == (
        0.1,
        False,
        1,
    )
    assert (found["slow"]["found_share"], found["slow"]["met"]) == (0.9, True)
    assert found["slow"]["metrics"]["tpot"]["ratio"] == pytest.approx(1.1)
    assert found["slow"]["metrics"]["ttft"]["ratio"] == pytest.approx(1.0)
    json.dumps(found)


def test_a_repetition_is_the_command_itself() -> None:
    args = argparse.Namespace(model="m.gguf", slowdown=0.1, pairs=4, pilot=2, num_prompts=6)
    args.input_len, args.output_len, args.max_concurrency = 24, 12, 3
    same, slow = (command_of(kind, 3, args) for kind in ab_study.KINDS)
    assert same[same.index("--a") + 1] == "m.gguf --threads 1"
    assert "--aa" in same
    arm = slow[slow.index("--b") + 1]
    assert arm.startswith("env BENCH_SLOWDOWN=0.1 ")
    assert arm.endswith("bench.slowed_server m.gguf --threads 1 --port {port}")


def test_a_step_takes_longer_by_the_share_given(monkeypatch: pytest.MonkeyPatch) -> None:
    clock = count()  # each look at it takes a second
    monkeypatch.setattr(slowed_server, "monotonic", lambda: float(next(clock)))

    class Executor:
        max_in_flight = 1

        def forward(self, plan: str) -> str:
            for _ in range(9):
                next(clock)
            return plan

        def sample(self, handle: str, masks: None) -> str:
            return f"{handle} sampled"

    slowed = slowed_server.SlowedExecutor(Executor(), 0.5)
    assert slowed.sample(slowed.forward("step")) == "step sampled"
    assert next(clock) == 16  # from 0 to 10 it computed, and until 15 it waited
    assert slowed.max_in_flight == 1


def test_results_are_written_as_they_come(tmp_path: Path) -> None:
    args = argparse.Namespace(json=str(tmp_path / "out.json"), model=None, pairs=4)
    ab_study.write(args, [row("aa", "TIE", 1.0)])
    written = json.loads((tmp_path / "out.json").read_text())
    assert written["summary"]["aa"]["repetitions"] == 1
    assert written["study"] == {"model": "default", "pairs": 4}
