"""Other tools' result files, restated."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from twostroke.cli import main
from twostroke.errors import ConfigError
from twostroke.measure.compare.imports import import_result

VLLM = {
    "completed": 10,
    "failed": 0,
    "duration": 5.0,
    "request_throughput": 2.0,
    "output_throughput": 64.0,
    **{f"{stat}_ttft_ms": 10.0 for stat in ("mean", "median", "p99")},
    **{f"{stat}_tpot_ms": 10.0 for stat in ("mean", "median", "p99")},
}
SGLANG = {**VLLM, "mean_e2e_latency_ms": 700.0, "median_e2e_latency_ms": 650.0}


def summary(value: float) -> dict[str, Any]:
    percentiles = {"p90": 2 * value, "p95": 3 * value, "p99": 4 * value}
    return {"successful": {"mean": value, "median": value, "percentiles": percentiles}}


GUIDELLM = {
    "benchmarks": [
        {
            "duration": 30.0,
            "metrics": {
                "request_totals": {"successful": 12, "errored": 1},
                "requests_per_second": summary(0.4),
                "output_tokens_per_second": summary(20.0),
                "time_to_first_token_ms": summary(100.0),
                "time_per_output_token_ms": summary(25.0),
                "inter_token_latency_ms": summary(20.0),
                "request_latency": summary(1.5),
            },
        }
    ]
}
AIPERF = {
    "records": {
        "time_to_first_token": {"unit": "ms", "avg": 100.0, "p50": 90.0, "p99": 300.0},
        "inter_token_latency": {"unit": "ms", "avg": 20.0, "p50": 19.0, "p99": 40.0},
        "inter_chunk_latency": {"unit": "ms", "avg": 20.0, "p50": 12.0, "p99": 70.0},
        "request_latency": {"unit": "s", "avg": 1.5, "p50": 1.4, "p99": 3.0},
        "benchmark_duration": {"unit": "sec", "avg": 30.0},
        "request_count": {"avg": 12},
        "request_throughput": {"avg": 0.4},
        "output_token_throughput": {"avg": 20.0},
    }
}


def write(folder: Path, name: str, content: Any) -> str:
    path = folder / name
    path.write_text(json.dumps(content))
    return str(path)


@pytest.mark.parametrize(
    ("content", "tool"),
    [(VLLM, "vllm"), (SGLANG, "sglang"), (GUIDELLM, "guidellm"), (AIPERF, "aiperf")],
)
def test_every_tool_is_known_by_its_file(tmp_path: Path, content: Any, tool: str) -> None:
    found = import_result(write(tmp_path, "r.json", content))
    assert found["tool"] == tool
    assert found["metrics"]["ttft"]["mean"] in (10.0, 100.0)
    assert found["differences"]


def test_guidellms_itl_is_our_tpot_and_its_tpot_is_nobodys(tmp_path: Path) -> None:
    found = import_result(write(tmp_path, "r.json", GUIDELLM))
    assert found["metrics"]["tpot"]["mean"] == 20.0
    assert found["metrics"]["itl"] == {}
    assert found["metrics"]["e2el"]["median"] == 1500.0  # seconds there
    assert found["theirs"]["time_per_output_token_ms"]["mean"] == 25.0
    assert (found["requests"], found["failed"]) == (12, 1)


def test_units_are_read(tmp_path: Path) -> None:
    found = import_result(write(tmp_path, "r.json", AIPERF))
    assert found["metrics"]["e2el"] == {"mean": 1500.0, "median": 1400.0, "p99": 3000.0}
    assert found["duration_s"] == 30.0


def test_aiperfs_gaps_between_chunks_are_our_itl_and_its_itl_our_tpot(tmp_path: Path) -> None:
    found = import_result(write(tmp_path, "r.json", AIPERF))["metrics"]
    assert (found["itl"]["median"], found["tpot"]["median"]) == (12.0, 19.0)


def test_sglang_writes_lines(tmp_path: Path) -> None:
    path = tmp_path / "r.jsonl"
    path.write_text(json.dumps(SGLANG | {"completed": 1}) + "\n" + json.dumps(SGLANG) + "\n")
    found = import_result(str(path))
    assert (found["tool"], found["requests"]) == ("sglang", 10)
    assert found["metrics"]["e2el"]["median"] == 650.0


def test_files_stand_side_by_side(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    files = [write(tmp_path, "a.json", VLLM), write(tmp_path, "b.json", GUIDELLM)]
    assert main(["import", *files]) == 0
    shown = capsys.readouterr().out
    assert "vllm" in shown
    assert "guidellm" in shown
    assert main(["import", *files, "--json"]) == 0
    assert [one["tool"] for one in json.loads(capsys.readouterr().out)] == ["vllm", "guidellm"]


@pytest.mark.parametrize("text", ["", "no JSON", "[]", "{}", '{"benchmarks": []}'])
def test_what_is_no_result_is_refused(tmp_path: Path, text: str) -> None:
    path = tmp_path / "x"
    path.write_text(text)
    with pytest.raises(ConfigError, match="is no result that is known"):
        import_result(str(path))
    with pytest.raises(ConfigError, match="cannot be read"):
        import_result(str(tmp_path / "nothing"))
