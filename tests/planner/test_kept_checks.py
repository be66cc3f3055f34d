"""Kept checks find known factors of step times, and narrow the interval as far as they agree."""

from __future__ import annotations

import json
import math
import random
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from tests.planner.test_simulation import SHAPE, Linear
from twostroke.errors import ConfigError
from twostroke.measure.load.definitions import Goals
from twostroke.measure.load.traces import synthetic
from twostroke.planner.kept_checks import (
    MAX_OF_SERVER,
    Factors,
    KeptChecks,
    corrected,
    scaled,
    step_factors,
)
from twostroke.planner.layout import EngineLayout
from twostroke.planner.predict import predict
from twostroke.planner.steptimes import MIN_DRIFT, StepModel

SHEET = StepModel(Linear(), "a data sheet", drift=0.44, step_error=0.0, host_s=0.0)
LAYOUT = EngineLayout(1, SHAPE)
LOAD = synthetic(6.0, 3.0, 150, 12, seed=4)
SERVER = {"model": "m", "hardware": "h"}


def figures(model: StepModel, seed: int = 0) -> dict[str, float]:
    found = predict(LOAD, LAYOUT, model, Goals(), seed=seed, interval=False).figures
    return {name: one.expected for name, one in found.items()}


def checks_of(factors: list[tuple[float, float]], rest: float = 0.0) -> list[dict[str, Any]]:
    return [
        {"server": SERVER, "date": f"2026-11-{n:02}", "prefill": one, "decode": other, "rest": rest}
        for n, (one, other) in enumerate(factors, 1)
    ]


@pytest.mark.parametrize(
    "truth",
    [
        pytest.param((1.3, 0.8), marks=pytest.mark.full),
        pytest.param((1.0, 1.0), marks=pytest.mark.long),
        pytest.param((0.7, 1.5), marks=pytest.mark.long),
    ],
)
def test_a_check_finds_how_much_longer_steps_really_take(truth: tuple[float, float]) -> None:
    measured = figures(scaled(SHEET, Factors(*truth)))
    found = step_factors(SHEET, measured, figures)
    assert found.prefill == pytest.approx(truth[0], rel=0.05)
    assert found.decode == pytest.approx(truth[1], rel=0.05)
    assert found.rest < 0.03


@pytest.mark.long
def test_noise_that_no_factor_explains_is_told() -> None:
    measured = figures(scaled(SHEET, Factors(1.2, 1.2)))
    measured["p90_ttft_ms"] *= 2
    found = step_factors(SHEET, measured, figures)
    assert 0.1 < found.rest < 0.2  # log(2) of one figure in five


@pytest.mark.long
def test_the_next_prediction_of_the_same_servers_is_right_and_narrower(tmp_path: Path) -> None:
    truth = scaled(replace(SHEET, drift=0.0), Factors(1.35, 0.8))
    noisy = replace(truth, decode_ratios=(0.95, 1.05), prefill_ratios=(0.95, 1.05))
    kept = KeptChecks(tmp_path / "cache" / "checks.json")
    for number in range(3):
        model = corrected(SHEET, kept.of(SERVER))
        base = model if model.correction is None else model.correction.base
        assert base is SHEET
        measured = figures(noisy, seed=100 + number)
        kept.keep(SERVER, step_factors(base, measured, figures), len(LOAD), f"2026-11-0{number}")
    before = predict(LOAD, LAYOUT, SHEET, Goals()).figures
    after = predict(LOAD, LAYOUT, corrected(SHEET, kept.of(SERVER)), Goals()).figures
    real = figures(noisy, seed=7)
    for name in ("p50_ttft_ms", "p50_tpot_ms", "p50_e2el_ms"):
        assert after[name].contains(real[name])
        assert after[name].expected == pytest.approx(real[name], rel=0.08)
        width, wide = (one[name].high - one[name].low for one in (after, before))
        assert width < 0.5 * wide
    found = corrected(SHEET, kept.of(SERVER)).as_json()["correction"]
    assert (found["checks"], found["last"]) == (3, "2026-11-02")


def test_one_check_is_drawn_towards_the_step_times_by_their_error() -> None:
    sheet, measured = (replace(SHEET, drift=drift) for drift in (0.44, 0.03))
    checks = checks_of([(2.0, 2.0)])
    for model, low, high in ((sheet, 1.85, 2.0), (measured, 1.0, 1.15)):
        correction = corrected(model, checks).correction
        assert correction is not None
        assert low < correction.prefill < high


def test_checks_that_disagree_widen_the_interval() -> None:
    agree = corrected(SHEET, checks_of([(1.2, 1.2), (1.22, 1.18), (1.19, 1.21)]))
    differ = corrected(SHEET, checks_of([(0.7, 1.2), (1.6, 1.2), (1.2, 1.2)]))
    unexplained = corrected(SHEET, checks_of([(1.2, 1.2)] * 3, rest=0.2))
    assert MIN_DRIFT <= agree.drift < 0.12
    assert differ.drift > 0.5
    assert unexplained.drift > 0.3


def test_nine_of_ten_true_factors_lie_in_the_interval() -> None:
    """The truth: servers whose factors scatter as a data sheet's error says, and runs of them."""
    rng, inside = random.Random(1), 0
    own, spread = math.log1p(SHEET.drift) / 1.645, 0.05
    for _ in range(400):
        server = rng.gauss(0.0, own)
        runs = [math.exp(rng.gauss(server, spread)) for _ in range(4)]
        model = corrected(SHEET, checks_of([(one, one) for one in runs[:3]]))
        assert model.correction is not None
        ratio = runs[3] / model.correction.prefill
        inside += 1 / (1 + model.drift) <= ratio <= 1 + model.drift
    assert 0.85 < inside / 400 < 0.97


def test_checks_of_other_servers_do_not_count_and_old_ones_are_dropped(tmp_path: Path) -> None:
    kept = KeptChecks(tmp_path / "checks.json")
    other = SERVER | {"model": "another"}
    kept.keep(other, Factors(2.0, 2.0), 10, "2026-01-01")
    for n in range(MAX_OF_SERVER + 5):
        kept.keep(SERVER, Factors(1.0 + n / 100, 1.0), 10, "2026-01-02")
    found = kept.of(SERVER)
    assert len(found) == MAX_OF_SERVER
    assert found[-1]["prefill"] == pytest.approx(1.0 + (MAX_OF_SERVER + 4) / 100)
    assert len(kept.of(other)) == 1
    assert corrected(SHEET, kept.of(SERVER | {"model": "a third"})) is SHEET


@pytest.mark.parametrize(
    "text",
    [
        "",
        "[]",
        '{"checks": 7}',
        '{"checks": [{"server": {"model": "m", "hardware": "h"}}]}',
        '{"checks": [{"server": {"model": "m", "hardware": "h"}, "prefill": -1, "decode": 1, '
        '"rest": 0}]}',
    ],
)
def test_a_damaged_file_has_no_checks_and_is_replaced(text: str, tmp_path: Path) -> None:
    path = tmp_path / "checks.json"
    path.write_text(text)
    kept = KeptChecks(path)
    assert kept.of(SERVER) == []
    kept.keep(SERVER, Factors(1.1, 1.2, 0.01), 10, "2026-01-02")
    assert [one["decode"] for one in kept.of(SERVER)] == [1.2]
    assert json.loads(path.read_text())["schema_version"] == 1


def test_a_server_that_is_not_the_planned_one_is_not_kept(tmp_path: Path) -> None:
    kept = KeptChecks(tmp_path / "checks.json")
    with pytest.raises(ConfigError, match=r"decode took 9 times .* the server that was planned\?"):
        kept.keep(SERVER, Factors(1.0, 9.0), 10, "2026-01-02")
    assert kept.of(SERVER) == []
    (tmp_path / "file").write_text("")
    with pytest.raises(ConfigError, match="cannot be written"):
        KeptChecks(tmp_path / "file" / "checks.json").keep(SERVER, Factors(1, 1), 1, "2026-01-02")
