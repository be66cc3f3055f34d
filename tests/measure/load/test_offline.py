"""`bench latency` and `bench throughput` on a tiny model."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tests.tiny import tiny_folder
from twostroke.cli import main


@pytest.fixture(autouse=True)
def small_vocabulary(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("twostroke.measure.load.workload.FIRST_ID", 10)
    monkeypatch.setattr("twostroke.measure.load.workload.LAST_ID", 299)


def test_latency_and_throughput_count_what_was_written(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    model = ["--model", str(tiny_folder(tmp_path / "tiny")), "--device", "cpu"]
    sizes = ["--input-len", "16", "--output-len", "4", "--num-gpu-blocks-override", "64"]
    words = ["bench", "latency", *model, *sizes, "--batch-size", "3", "--num-iters", "2"]
    assert main([*words, "--num-iters-warmup", "1", "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert len(found["latencies"]) == 2
    assert found["avg_latency"] == pytest.approx(sum(found["latencies"]) / 2)
    saved = tmp_path / "r.json"
    words = ["bench", "throughput", *model, *sizes, "--num-prompts", "5"]
    assert main([*words, "--output-json", str(saved)]) == 0
    assert "requests a second" in capsys.readouterr().out
    found = json.loads(saved.read_text())
    assert (found["num_requests"], found["total_output_tokens"]) == (5, 20)
    assert found["total_num_tokens"] == 100
    assert main(["bench", "latency", *model, "--batch-size", "0"]) == 1
