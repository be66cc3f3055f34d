"""`python -m tests.gpu` with checks that stand in for those of a GPU."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from time import monotonic
from typing import Any

import pytest

from tests.gpu import __main__ as gpu
from tests.gpu.__main__ import Check, Result, all_checks, chosen, may_start, run

PASSES = """
import json, os, pathlib
assert os.environ["PYTHONFAULTHANDLER"] == "1"
pathlib.Path(os.environ["OUT"], "kernels.json").write_text('{"us": 3}')
print(json.dumps({"check": "this"}))
print("3 passed, 0 failed")
"""
FAILS = """
print("FAILED  a product: error 1.0")
print("2 passed, 1 failed")
raise SystemExit(1)
"""
HANGS = """
import pathlib, subprocess, sys
def waits_for_its_child(code, folder):
    child = subprocess.Popen([sys.executable, "-c", code, folder])
    pathlib.Path(folder, "child").write_text(str(child.pid))
    child.wait()
waits_for_its_child(*sys.argv[1:])
"""
CHILD = """
import pathlib, sys, time
def waits_for_ever(folder):
    while not pathlib.Path(folder, "child").exists():
        time.sleep(0.01)
    pathlib.Path(folder, "ready").touch()
    time.sleep(3600)
waits_for_ever(sys.argv[1])
"""


def fake(name: str, code: str, *args: str) -> Check:
    return Check(name, ("-c", code, *args), 3000.0)


def test_one_passes_one_fails_and_one_that_hangs_is_ended_with_its_stacks(tmp_path: Path) -> None:
    def clock() -> float:
        """An hour later once all hang that are to hang, and whatever else is over."""
        over = len(json.loads(found.read_text())["checks"]) if found.exists() else 0
        return monotonic() + 3600 * (over >= 2 and (tmp_path / "ready").exists())

    found = tmp_path / "gpu_checks.json"
    hangs = fake("hangs", HANGS, CHILD, str(tmp_path))
    checks = [hangs, fake("passes", PASSES), fake("fails", FAILS)]
    results = {one.name: one for one in run(checks, tmp_path, 3, 7200.0, clock)}
    outcomes = {name: (one.outcome, one.passed, one.failed) for name, one in results.items()}
    assert outcomes == {
        "passes": ("passed", 3, 0),
        "fails": ("failed", 2, 1),
        "hangs": ("ended", None, None),
    }
    assert results["passes"].figures == {"kernels": {"us": 3}, "printed": {"check": "this"}}
    assert results["fails"].exit_status == 1
    assert "FAILED  a product: error 1.0" in results["fails"].last_lines
    stacks = (tmp_path / "gpu_checks.txt").read_text()
    assert "in waits_for_its_child" in stacks
    assert "in waits_for_ever" in stacks, "of the processes that it has started, too"
    child = Path("/proc", (tmp_path / "child").read_text(), "stat")
    assert not child.exists() or child.read_text().rpartition(")")[2].split()[0] == "Z"
    told = json.loads(found.read_text())
    assert told["bad"] == 2
    assert {one["name"] for one in told["checks"]} == set(results)


def test_what_does_not_fit_the_time_is_not_run(tmp_path: Path) -> None:
    (result,) = run([fake("late", PASSES)], tmp_path, 1, 5.0)
    assert (result.outcome, result.why) == ("not run", "no time left of 5 s")


def test_what_is_alone_waits_for_the_others_and_they_for_it() -> None:
    shared, alone = Check("a", (), 1.0), Check("b", (), 1.0, alone=True)
    assert may_start(shared, [shared], 2)
    assert not may_start(shared, [shared, shared], 2)
    assert not may_start(alone, [shared], 2)
    assert not may_start(shared, [alone], 2)
    assert may_start(alone, [], 2)


def test_checks_are_chosen_by_name_or_by_a_part_of_it() -> None:
    def names(*given: str) -> list[str]:
        return [check.name for check in chosen(all_checks(), *given)]

    assert names("families", "") == [f"families-{n}" for n in range(1, 5)]
    assert names("kv", "times") == ["kv"]
    assert not any(name.endswith("times") for name in names("", "times"))
    with pytest.raises(SystemExit, match="no check is called kvs; there are cuda, "):
        names("kvs", "")


def test_every_check_there_is_runs() -> None:
    files = {path.stem for path in Path(gpu.__file__).parent.glob("*_check.py")}
    files -= {path for path in files if path.startswith("test_")}
    assert {check.command[1].removeprefix("tests.gpu.") for check in all_checks()} == files


def test_a_bad_check_is_a_bad_exit_status(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def found(*_: Any) -> list[Result]:
        return [Result("a", "python a", "passed", passed=3, failed=0), bad]

    bad = Result("b", "python b", "failed", "exit status 1", last_lines=["it was like this"])
    monkeypatch.setattr(gpu, "run", found)
    monkeypatch.setattr(sys, "argv", ["gpu", "--out", str(tmp_path)])
    monkeypatch.setattr(gpu.signal, "signal", lambda *_: None)
    assert gpu.main() == 1
    said = capsys.readouterr().out
    assert "it was like this" in said
    assert "1 checks passed, 1 did not" in said
