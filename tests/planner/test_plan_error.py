"""The exam of the planner's step times: its closed loop, its fit, and its split."""

from __future__ import annotations

import csv
import gzip
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from bench.plan_error.closed_loop import BUDGET, closed_loop
from bench.plan_error.fit import COLUMNS, PRIOR, Loop, fit, fit_coefficients
from bench.plan_error.points import MODELS, TEST, Point, read_points, terms_of
from twostroke.errors import ConfigError
from twostroke.measure.load.traces import TraceRequest
from twostroke.measure.roofline.hardware import find_hardware
from twostroke.plan import PhaseWork
from twostroke.planner.layout import EngineLayout, EngineShape
from twostroke.planner.learned import TERMS
from twostroke.planner.simulate import Simulation, VirtualClock
from twostroke.route.router import Router

POINT = Point("p", "llama-3.1-8b", "h100", "vllm", "bf16", 700, 60, 6, 1, 0.1, 0.01, False)


class OfCoefficients:
    """Step times of given coefficients."""

    def __init__(self, point: Point, theta: Any) -> None:
        self._terms = terms_of(point.model, point.system, point.precision, point.ranks)
        self._theta = theta

    def seconds(self, prefill: PhaseWork, decode: PhaseWork) -> float:
        return float(np.dot(self._terms.of(prefill, decode), self._theta))


class Users(Simulation):
    """A simulation in which each end of a request brings the next one."""

    def __init__(self, point: Point, waves: int, *args: Any) -> None:
        super().__init__(*args)
        self._point, self._number = point, point.users
        self._left = (waves - 1) * point.users

    def _end(self, *args: Any) -> None:
        super()._end(*args)
        if self._left:
            self._left -= 1
            now = self._clock.now
            self._arrivals.appendleft(now)
            one = TraceRequest(now, self._point.prompt, self._point.output)
            self._at(now, self._arrive, self._number, one)
            self._number += 1


@pytest.mark.parametrize("users", [1, 6])
def test_the_closed_loop_has_the_times_of_the_products_scheduler(users: int) -> None:
    point, waves = replace(POINT, users=users), 3
    theta = PRIOR[: len(TERMS)]
    start, gap = (float(terms @ theta) for terms in closed_loop(point, waves))
    clock = VirtualClock()
    shape = EngineShape(200_000, 8192, 64, BUDGET)
    engines = EngineLayout(1, shape).simulated(OfCoefficients(point, theta), 0.0, clock)
    router = Router([one.state for one in engines])
    trace = [TraceRequest(0.0, point.prompt, point.output)] * users
    records = Users(point, waves, clock, engines, router, 512, 0.0).run(trace)
    assert len(records) == waves * users
    gaps = [(one.token_s[-1] - one.token_s[0]) / (len(one.token_s) - 1) for one in records]
    assert np.mean(gaps) == pytest.approx(gap, rel=0.05)  # prompts mix with other slots
    first, later = (
        np.mean([one.ttft_s for one in records if (one.received_s < 1e-6) is is_first])
        for is_first in (True, False)
    )
    assert 0.1 * first + 0.9 * later == pytest.approx(start, rel=0.1)


def made(theta: Any, noise: float = 0.0) -> list[Loop]:
    """Loops whose measured times are those of the coefficients."""
    rng, loops = np.random.default_rng(0), []
    for model in ("llama-3.1-8b", "llama-3.1-70b"):
        for users in (1, 4, 16):
            for prompt in (256, 2048):
                for ranks in (1, 2, 4):
                    point = replace(POINT, model=model, users=users, prompt=prompt, ranks=ranks)
                    start, gap = closed_loop(replace(point, output=20), 2)
                    more = np.concatenate([start, [1.0, users]])
                    ttft_s, tpot_s = float(more @ theta), float(gap @ theta[: len(TERMS)])
                    times = np.array([ttft_s, tpot_s]) * np.exp(noise * rng.normal(size=2))
                    point = replace(point, ttft_s=float(times[0]), tpot_s=float(times[1]))
                    loops.append(Loop(point, start, gap))
    return loops


def test_a_fit_finds_the_coefficients_that_made_the_times() -> None:
    theta = PRIOR * np.array([1.3, 1, 1, 1.2, 1, 1.4, 1, 1.5, 0.7, 1, 1.2, 1.1, 0.8, 1.3])
    loops = made(theta)
    found = fit_coefficients(loops, PRIOR)
    ratios = np.concatenate([one.rows @ found for one in loops])
    assert np.abs(ratios - 1).max() < 0.05
    assert found[COLUMNS.index("weights")] == pytest.approx(
        theta[COLUMNS.index("weights")], rel=0.1
    )


def test_no_efficiency_is_above_one() -> None:
    loops = made(0.2 * PRIOR)  # five times as quick as the data sheet allows
    found = fit_coefficients(loops, PRIOR)
    assert found[: TERMS.index("hop")].min() >= 1.0


def test_held_out_points_do_not_change_the_fit_and_are_predicted() -> None:
    loops = made(1.2 * PRIOR, noise=0.02)
    train, test = loops[::2], loops[1::2]
    fitted = fit(train)
    again = fit(train)
    error = np.abs(np.array([fitted.predict(one) for one in test]) - 1)
    assert np.median(error) < 0.05
    assert all((fitted.predict(one) == again.predict(one)).all() for one in test)


COLUMNS_OF_FILE = [
    *("id", "silicon_data_source", "backend", "model_path", "system", "precision", "mode"),
    *("isl", "osl", "tp_size", "pp_size", "attention_dp_size"),
    *("silicon_ttft_ms", "silicon_tpot_ms"),
]


def written(path: Path, *rows: dict[str, str], columns: list[str] = COLUMNS_OF_FILE) -> str:
    with gzip.open(path, "wt", encoding="utf-8", newline="") as file:
        writer = csv.DictWriter(file, columns, extrasaction="ignore")
        writer.writeheader()
        writer.writerows(rows)
    return str(path)


def test_points_are_read_once_and_without_data_parallelism(tmp_path: Path) -> None:
    row = {
        "id": "a",
        "silicon_data_source": "source_file=2026-04-06.csv; silicon_concurrency=8",
        "backend": "vllm",
        "model_path": "meta-llama/Llama-3.1-70B",
        "system": "h200_sxm",
        "precision": "fp8",
        "mode": "agg",
        "isl": "1024",
        "osl": "512",
        "tp_size": "2",
        "pp_size": "1",
        "attention_dp_size": "1",
        "silicon_ttft_ms": "200",
        "silicon_tpot_ms": "20",
    }
    rows = [row, row | {"id": "again"}, row | {"attention_dp_size": "2"}, row | {"mode": "disagg"}]
    (point,) = read_points(written(tmp_path / "points.csv.gz", *rows))
    assert (point.pair, point.users, point.ranks) == (("llama-3.1-70b", "h200"), 8, 2)
    assert (point.ttft_s, point.tpot_s, point.varied) == (0.2, 0.02, True)
    wrong = written(tmp_path / "wrong.csv.gz", row, columns=COLUMNS_OF_FILE[:5])
    with pytest.raises(ConfigError, match="is not aiconfigurator's silicon sample"):
        read_points(wrong)


def test_held_out_pairs_are_of_models_and_hardware_that_are_known() -> None:
    assert {model for model, _ in TEST} <= set(MODELS.values())
    for _, system in TEST:
        assert find_hardware(system).memory > 0


def test_experts_that_are_split_in_both_ways_are_on_as_many_gpus_as_one_way(
    tmp_path: Path,
) -> None:
    fields = (
        "id silicon_data_source backend model_path system precision mode isl osl tp_size pp_size "
        "attention_dp_size moe_tp_size moe_ep_size silicon_ttft_ms silicon_tpot_ms"
    )
    path = tmp_path / "points.csv.gz"
    with gzip.open(path, "wt") as file:
        print(fields.replace(" ", ","), file=file)
        for ranks, ways in ((64, (8, 8)), (8, (8, 1)), (8, (1, 8)), (4, (2, 2)), (16, (16, 1))):
            row = f"x,concurrency=4,vllm,openai/gpt-oss-120b,h100_sxm,fp4,agg,10,20,{ranks},1,1,"
            print(f"{row}{ways[0]},{ways[1]},{ranks}.5,2.5", file=file)
    assert [one.ranks for one in read_points(str(path))] == [8, 8, 2, 16]  # equal ones once
