"""Runs `ranks_check`, a script for GPUs, on the CPU, so that the script stays right."""

from __future__ import annotations

import shutil
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from tests.equivalence.harness import small_spec
from tests.gpu import ranks_check
from twostroke.exec.collectives import GlooRanks


def test_a_group_of_one_writes_the_same_and_its_bytes_are_those_of_the_formula(
    tmp_path: Path,
) -> None:
    cpu = torch.device("cpu")
    ranks = GlooRanks(0, 1, str(tmp_path / "store"), cpu, staged=True)
    spec = small_spec(qk_norm="full", tie_embeddings=True, vocab_size=511)
    found = list(ranks_check.compare_with_no_group(spec, torch.float32, cpu, ranks))
    assert len(found) == 2
    assert "bytes in collectives, as the formula says" in found[1]


STALLS = """
import time
def stalls_for_ever():
    print("ready", flush=True)
    time.sleep(3600)
stalls_for_ever()
"""


def test_a_part_that_does_not_end_is_ended_and_each_rank_says_where_it_was(
    monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    other = subprocess.Popen(
        [sys.executable, "-X", "faulthandler", "-c", STALLS], stdout=subprocess.PIPE
    )
    assert other.stdout is not None
    assert other.stdout.readline() == b"ready\n"
    monkeypatch.setattr(ranks_check, "OTHERS", [other])
    monkeypatch.setattr(shutil, "which", lambda name: None)  # no debugger

    def waits_for_the_other() -> Iterator[str]:
        yield "begun"
        other.wait(300)
        raise RuntimeError("the connection has ended")

    checks = ranks_check.Checks()
    checks.each("two ranks", waits_for_the_other, limit_s=0.1)
    assert list(checks.passed) == ["two ranks: begun"]
    assert checks.failed == {"two ranks": "RuntimeError: the connection has ended"}
    assert other.returncode == -signal.SIGABRT
    said = capfd.readouterr().err
    assert "two ranks: no end after 0 s; what each rank is doing:" in said
    assert f"process {other.pid}" in said
    assert "in stalls_for_ever" in said
    other.stdout.close()
