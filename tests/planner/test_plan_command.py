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
from twostroke.planner import calibrate, check
from twostroke.planner.kept_checks import Factors

SHEET = ["--model", "llama-3.1-8b", "--hardware", "H100"]
GOAL = ["--engines", "auto", "--ttft-slo-ms", "500"]
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
    server: Running,
    small_calibration: None,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.setenv("TWOSTROKE_CACHE", str(tmp_path / "cache"))
    # The tiny model may write a single token that is no whole character, and the client be late.
    monkeypatch.setattr(check, "problems", lambda *_: [])
    monkeypatch.setattr(check, "step_factors", lambda *_: Factors(1.2, 0.9, 0.05))
    steps = tmp_path / "steps.json"
    load = ["--rate", "20", "--input-len", "10", "--output-len", "8", "--trace-seconds", "2"]
    words = ["--calibrate", server.url, "--save-steps", str(steps), "--ttft-slo-ms", "60000"]
    found = plan(capsys, *load, *words, "--check", server.url)
    info = server.client.info
    shape = found["forecast"]["layout"]
    assert (shape["kv_tokens"], shape["max_num_seqs"]) == (info.kv_tokens, info.max_num_seqs)
    assert "measured steps" in found["step_times"]["source"]
    assert found["step_times"]["outside_ms"] > 0
    assert found["step_times"]["correction"] is None
    rows = {row["figure"]: row for row in found["check"]["rows"]}
    assert {"p50_ttft_ms", "p99_itl_ms", "goodput"} <= rows.keys()
    for row in rows.values():
        assert row["low"] <= row["predicted"] <= row["high"]
        assert row["inside"] == (row["low"] <= row["measured"] <= row["high"])
    words = [*load, "--steps", str(steps), "--ttft-slo-ms", "60000"]
    again = plan(capsys, *words, "--no-kept-checks")
    assert again["forecast"]["figures"] == found["forecast"]["figures"]
    assert found["check"]["kept"]["factors"] == {"prefill": 1.2, "decode": 0.9, "rest": 0.05}
    correction = plan(capsys, *words)["step_times"]["correction"]
    assert correction["checks"] == 1
    assert correction["decode_factor"] < 1.0 < correction["prefill_factor"]
    assert main(["plan", *words]) == 0
    assert "corrected by 1 check, the last on 20" in " ".join(capsys.readouterr().out.split())
    another = plan(capsys, *words, "--max-num-seqs", "3")  # other settings
    assert another["step_times"]["correction"] is None
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
    assert "efficiencies from" in found["step_times"]["source"]
    assert main(["plan", *SHEET, *SYNTHETIC, "--ttft-slo-ms", "500"]) == 0
    assert "1 engine (H100) meets the goals: 100.0%" in capsys.readouterr().out


@pytest.mark.full
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


def test_settings_with_several_values_are_kinds_of_engines(
    capsys: pytest.CaptureFixture[str],
) -> None:
    words = [*SHEET, *SYNTHETIC, "--engines", "auto", "--ttft-slo-ms", "2000"]
    settings = ["-tp", "1", "2", "--weights", "fp8", "fp16", "--kv-cache-dtype", "fp16", "fp8"]
    found = plan(capsys, *words, *settings, "--price-per-hour", "2", "--max-num-seqs", "64")
    assert found["hardware"] == "H100, tp 1, fp8, KV fp16"  # the first of those that cost the least
    assert found["price_per_hour"] == 2.0
    assert found["forecast"]["layout"]["max_num_seqs"] == 64
    fits = [*SYNTHETIC, "--model", "llama-3.1-70b", "--hardware", "H100", "--engines", "auto"]
    found = plan(capsys, *fits, "--ttft-slo-ms", "5000", "-tp", "1", "2", "4")
    assert "tp 1" not in {one["hardware"].partition(", ")[2] for one in found["tried"]}  # no room


@pytest.mark.full
def test_pools_are_searched_beside_engines_for_both_phases(
    capsys: pytest.CaptureFixture[str],
) -> None:
    load = ["--rate", "25", "--input-len", "1500", "--output-len", "20", "--trace-seconds", "3"]
    goals = ["--ttft-slo-ms", "1500", "--itl-slo-ms", "40", "--target", "0.9"]
    found = plan(capsys, *SHEET, *load, *goals, "--engines", "auto", "--pools")
    layouts = {one["layout"] for one in found["tried"]}
    assert any("prefill and" in name for name in layouts)
    met = [one["engines"] for one in found["tried"] if one["met"]["low"] >= 0.9]
    layout = found["forecast"]["layout"]
    assert sum(layout[name] for name in ("engines", "prefill_engines", "decode_engines")) == min(
        met
    )


def test_a_report_has_pictures_of_the_plan(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    report = tmp_path / "plan.html"
    words = [*SHEET, *SYNTHETIC, "--ttft-slo-ms", "500", "--itl-slo-ms", "50"]
    found = plan(capsys, *words, "--html", str(report))
    (curve,) = found["loads"]
    rates = [point["rate"] for point in curve["points"]]
    assert rates == sorted(rates)
    assert curve["points"][0]["p99_ttft_ms"] <= curve["points"][-1]["p99_ttft_ms"] * 1.2
    figures = found["forecast"]["figures"]
    whole = sum(figures[f"mean_{part}_ms"]["expected"] for part in ("queue", "prefill", "decode"))
    assert whole == pytest.approx(figures["mean_e2el_ms"]["expected"], rel=0.05)
    page = report.read_text()
    titles = ("TTFT p99 by load", "engines over time", "Parts of the mean latency", "Latencies")
    for title in titles:
        assert title in page


@pytest.mark.full
def test_speculation_and_offload_hits_are_simulated(
    capsys: pytest.CaptureFixture[str],
) -> None:
    load = ["--rate", "1", "--input-len", "4000", "--output-len", "60", "--trace-seconds", "8"]
    plain = plan(capsys, *SHEET, *load)["forecast"]
    words = ["--speculation-acceptance", "0.8", "--speculation-depth", "6", "--offload-hits", "0.5"]
    found = plan(capsys, *SHEET, *load, *words)["forecast"]
    for name in ("p50_ttft_ms", "p50_tpot_ms"):
        assert found["figures"][name]["expected"] < 0.8 * plain["figures"][name]["expected"]
    assert found["layout"]["speculation"] == {"rate": 0.8, "depth": 6}
    assert main(["plan", *SHEET, *load, *words]) == 0
    said = " ".join(capsys.readouterr().out.split())
    assert "speculation 6 drafted tokens a row, each right with 80%" in said
    assert "offload 50% of each prompt from a tier at 20 GB/s" in said


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
        ([*SYNTHETIC, *SHEET, "-tp", "1", "2"], "need --engines auto"),
        ([*SYNTHETIC, *SHEET, "-tp", "0"], "--tensor-parallel-size must be above 0"),
        ([*SYNTHETIC, *SHEET, "--pools"], "--pools needs --engines auto"),
        (
            [*SYNTHETIC, "--model", "llama-3.1-70b", "--hardware", "L4", "A10G", *GOAL],
            "does not fit on L4.* does not fit on A10G",
        ),
        ([*SYNTHETIC, *SHEET, "--price-per-hour", "1", "2"], "2 prices for 1 kinds"),
        ([*SYNTHETIC, *SHEET, "--target", "99"], "--target 99: give a share"),
        ([*SYNTHETIC, *SHEET, "-tp", "100000"], "tensor-parallel-size 100000: give a number up to"),
        ([*SYNTHETIC, *SHEET, "-tp", "3"], "3 ranks"),
        ([*SYNTHETIC, *SHEET, "--max-num-seqs", "99999999"], "99999999: give a number up to 65536"),
        ([*SHORT, *SHEET, "--prefill-engines", "2000", "--decode-engines", "1"], "up to 1024"),
        ([*SYNTHETIC, *SHEET, "--speculation-acceptance", "1"], "acceptance 1: give a share"),
        ([*SYNTHETIC, *SHEET, "--speculation-depth", "3"], "needs --speculation-acceptance"),
        ([*SYNTHETIC, *SHEET, "--speculation-depth", "99"], "depth 99: give a number up to 64"),
        ([*SYNTHETIC, *SHEET, "--offload-hits", "-0.1"], "--offload-hits -0.1: give a share"),
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
