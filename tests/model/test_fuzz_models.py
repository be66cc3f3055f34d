"""A sample of the mutated model files of `bench/fuzz_models.py`: each loads, or is refused with a
clear message. The fuzzer's own judgement has tests, too."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from bench.fuzz_model_files import GGUF_NAME, Mutation
from bench.fuzz_models import problem_of

ROOT = Path(__file__).parents[2]


@pytest.mark.full
@pytest.mark.skipif(sys.platform != "linux", reason="it forks, and bounds memory as Linux does")
def test_no_model_file_ends_in_a_traceback(tmp_path: Path) -> None:
    """In a process of its own, since it forks: this one has threads."""
    result = tmp_path / "result.json"
    words = ["-m", "bench.fuzz_models", "--seed", "3", "--sample", "150", "--json", str(result)]
    run = subprocess.run([sys.executable, *words], cwd=ROOT, capture_output=True, text=True)
    report = json.loads(result.read_text())
    assert report["failures"] == [], run.stdout
    assert run.returncode == 0
    assert report["files"] == 150
    assert report["ends"]["refused"] > 75
    assert report["ends"]["loaded"] > 7


def nothing() -> dict[str, bytes]:
    return {}


MUTATION = Mutation("metadata", "x", GGUF_NAME, ("context_length",), nothing)
NAMED = "folder/model.gguf: llama.context_length must be a whole number"


@pytest.mark.parametrize(
    ("mutation", "end", "says", "problem"),
    [
        (MUTATION, "loaded", "", ""),
        (MUTATION, "refused", NAMED, ""),
        (MUTATION, "refused", "llama.context_length must be", "does not name model.gguf"),
        (MUTATION, "refused", "folder/model.gguf: no", "names none of context_length"),
        (MUTATION, "traceback", NAMED, "traceback"),
        (MUTATION, "hang", "", "hang"),
        (MUTATION, "memory", "", "memory"),
        (MUTATION, "nonsense", "", "nonsense"),
        (MUTATION, "died", "", "died"),
        (Mutation("x", "x", "", (), nothing, must_fail=True), "loaded", "", "must not load"),
    ],
)
def test_what_is_wrong_is_seen(mutation: Mutation, end: str, says: str, problem: str) -> None:
    found = problem_of(mutation, {"end": end, "says": says})
    assert problem in found
    assert bool(problem) == bool(found)
