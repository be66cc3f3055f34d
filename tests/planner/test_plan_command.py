"""`twostroke plan` as a user runs it: against a server, from a data sheet, and refused."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.server.running import Running, running
from tests.tiny import tiny_llm
from twostroke.cli import main
from twostroke.measure.load import workload
from twostroke.planner import calibrate

SHEET = ["--model", "llama-3.1-8b", "--hardware", "H100"]
SYNTHETIC = ["--rate", "4", "--input-len", "200", "--output-len", "10", "--trace-seconds", "10"]
SHORT = [*SYNTHETIC, "--trace-seconds", "1"]


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Running]:
    with running(tiny_llm(tmp_path_factory.mktemp("tiny"), block_size=4)) as one:
        yield one


@pytest.fixture
def small_calibration(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(workload, "FIRST_ID", 10)
    monkeypatch.setattr(workload, "LAST_ID", 255)
    monkeypatch.setattr(calibrate, "USERS", (1, 2, 4))
    monkeypatch.setattr(calibrate, "SECONDS", 2.0)


def plan(capsys: pytest.CaptureFixture[str], *words: str) -> Any:
    assert main(["plan", "--json", *words]) == 0
    return json.loads(capsys.readouterr().out)


def test_a_server_is_calibrated_predicted_and_checked(
    server: Running, small_calibration: None, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    steps = tmp_path / "steps.json"
    load = ["--rate", "20", "--input-len", "10", "--output-len", "8", "--trace-seconds", "2"]
    words = ["--calibrate", server.url, "--save-steps", str(steps), "--ttft-slo-ms", "60000"]
    found = plan(capsys, *load, *words, "--check", server.url)
    info = server.client.info
    shape = found["forecast"]["layout"]
    assert (shape["kv_tokens"], shape["max_num_seqs"]) == (info.kv_tokens, info.max_num_seqs)
    assert "measured steps" in found["step_times"]["source"]
    assert found["step_times"]["outside_ms"] > 0
    assert found["check"]["problems"] == [] or "late" in found["check"]["problems"][0]
    rows = {row["figure"]: row for row in found["check"]["rows"]}
    assert {"p50_ttft_ms", "p99_itl_ms", "goodput"} <= rows.keys()
    for row in rows.values():
        assert row["low"] <= row["predicted"] <= row["high"]
        assert row["inside"] == (row["low"] <= row["measured"] <= row["high"])
    again = plan(capsys, *load, "--steps", str(steps), "--ttft-slo-ms", "60000")
    assert again["forecast"]["figures"] == found["forecast"]["figures"]
    # The server's own requests are a trace.
    replayed = plan(capsys, "--trace", str(steps), "--steps", str(steps))
    assert replayed["trace"]["requests"] > 5


def test_records_describe_the_engine_that_a_simulation_needs(server: Running) -> None:
    found = json.loads(server.ask("GET", "/records?seconds=1")[2])
    info = server.client.info
    assert found["max_model_len"] == info.max_model_len
    assert [one["num_blocks"] for one in found["kv_groups"]] == [
        one.num_blocks for one in info.kv_groups
    ]
    assert found["pacing"] is None or found["pacing"]["prefix_caching"] in (True, False)


def test_a_data_sheet_gives_figures_with_intervals(capsys: pytest.CaptureFixture[str]) -> None:
    found = plan(capsys, *SHEET, *SYNTHETIC, "--ttft-slo-ms", "500", "--itl-slo-ms", "50")
    ttft = found["forecast"]["figures"]["p50_ttft_ms"]
    assert 0 < ttft["low"] < ttft["expected"] < ttft["high"]
    assert "60% (FLOPs)" in found["step_times"]["source"]
    assert main(["plan", *SHEET, *SYNTHETIC, "--ttft-slo-ms", "500"]) == 0
    assert "1 engine (H100) meets the goals: 100.0%" in capsys.readouterr().out


def test_the_cheapest_of_two_kinds_of_hardware_is_found(
    capsys: pytest.CaptureFixture[str],
) -> None:
    load = ["--rate", "20", "--input-len", "1000", "--output-len", "4", "--trace-seconds", "4"]
    goals = ["--ttft-slo-ms", "2000", "--engines", "auto", "--target", "0.9"]
    words = [*load, *goals, "--model", "llama-3.1-8b", "--hardware", "H100", "L40S"]
    found = plan(capsys, *words, "--price-per-hour", "3", "1")
    counts = {
        name: [one["engines"] for one in found["tried"] if one["hardware"] == name]
        for name in ("H100", "L40S")
    }
    assert max(counts["L40S"]) > max(counts["H100"])  # slower, and cheaper
    met = {one["price_per_hour"] for one in found["tried"] if one["met"]["low"] >= 0.9}
    assert found["price_per_hour"] == min(met)
    assert main(["plan", *words, "--price-per-hour", "3", "1"]) == 0
    assert "an hour, meets the goals" in " ".join(capsys.readouterr().out.split())


def test_pools_are_told_one_by_one(capsys: pytest.CaptureFixture[str]) -> None:
    words = [*SHEET, *SYNTHETIC, "--prefill-engines", "1", "--decode-engines", "2"]
    found = plan(capsys, *words)
    assert found["forecast"]["layout"]["name"] == "1 prefill and 2 decode engines"
    assert found["forecast"]["figures"]["decode_utilisation"]["expected"] > 0
    assert main(["plan", *words]) == 0
    out = capsys.readouterr().out
    assert "prefill     in use" in out
    assert "decode      in use" in out


@pytest.mark.parametrize(
    ("words", "says"),
    [
        ([], "no requests"),
        (SYNTHETIC, "no step times"),
        ([*SYNTHETIC, "--model", "llama-3.1-8b", "--hardware", "H1000"], "H1000.*H100"),
        ([*SYNTHETIC, "--model", "llama-3.1-70b", "--hardware", "L4"], "does not fit on L4"),
        ([*SHEET, "--rate", "1", "--input-len", "99999999", "--output-len", "1"], "longer than an"),
        ([*SYNTHETIC, *SHEET, "--engines", "0"], "--engines 0: give a number"),
        ([*SYNTHETIC, *SHEET, "--prefill-engines", "1"], "need each other"),
        ([*SYNTHETIC, *SHEET, "--engines", "auto"], "--engines auto needs a goal"),
        (
            [*SHORT, *SHEET, "--engines", "auto", "--itl-slo-ms", "0.1"],
            "no number of engines up to 64 meets the goals",
        ),
        ([*SYNTHETIC, *SHEET, "A100"], "need --engines auto"),
        ([*SYNTHETIC, *SHEET, "--price-per-hour", "1", "2"], "2 prices for 1 kinds"),
        ([*SYNTHETIC, *SHEET, "--target", "99"], "--target 99: give a share"),
        ([*SYNTHETIC, "--steps", "nowhere.json"], "nowhere.json cannot be read"),
        ([*SYNTHETIC, "--steps", "http://localhost:9"], "no server answers"),
    ],
)
def test_a_plan_that_cannot_be_made_says_why(
    words: list[str], says: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["plan", *words]) == 1
    said = " ".join(capsys.readouterr().err.split())
    assert re.search(says, said), said
