"""Step times fitted to records, and computed from a data sheet."""

from __future__ import annotations

import random
from typing import Any

import pytest

from twostroke.errors import ConfigError
from twostroke.measure.roofline.hardware import find_hardware
from twostroke.measure.roofline.roofline import Roofline, RooflineSettings
from twostroke.measure.roofline.shapes import find_spec
from twostroke.plan import PhaseWork
from twostroke.planner.steptimes import MIN_DRIFT, NoisyCost, measured_model, roofline_model

HOST_S = 0.002


def seconds_of(tokens: int, rows: int, positions: int) -> float:
    """A machine that a server could have run on."""
    if tokens:
        return 0.004 + 2e-4 * tokens + 3e-4 * rows
    return 0.003 + 4e-4 * rows + 2e-8 * positions


def records(count: int = 400, noise: float = 0.05, mixed: float = 0.4) -> dict[str, Any]:
    rng = random.Random(5)
    steps = []
    for _ in range(count):
        rows = rng.choice((1, 2, 4, 8, 16))
        tokens = rng.randint(16, 512) if rng.random() < mixed else 0
        positions = rows * rng.randint(50, 500)
        took_s = seconds_of(tokens, rows, positions) * rng.uniform(1 - noise, 1 + noise)
        steps.append(
            {
                "device_s": took_s,
                "prefill": {
                    "rows": int(tokens > 0),
                    "tokens": tokens,
                    "kv_tokens": tokens * tokens // 2,
                },
                "decode": {"rows": rows, "tokens": rows, "kv_tokens": positions},
                "since_s": {"host": HOST_S},
                "regular": rows,
            }
        )
    requests = [{"received_s": 1.0, "queued_s": 1.003 + n / 1e3} for n in range(20)]
    return {"steps": steps, "requests": requests, "outside_s": 0.001}


def test_measured_steps_are_learnt_with_their_error() -> None:
    model = measured_model(records(), "a test")
    for tokens, rows, positions in ((0, 4, 1000), (0, 16, 4000), (300, 4, 1000), (100, 8, 2000)):
        prefill = PhaseWork(int(tokens > 0), tokens, tokens * tokens // 2, tokens)
        decode = PhaseWork(rows, rows, positions, positions)
        wanted = seconds_of(tokens, rows, positions)
        assert model.cost.seconds(prefill, decode) == pytest.approx(wanted, rel=0.08)
    assert 0.01 < model.step_error < 0.08
    assert MIN_DRIFT <= model.drift < 0.06
    assert model.host_s == pytest.approx(HOST_S)
    assert model.start_s == pytest.approx(0.008)
    assert model.client_s == 0.001
    assert "400 measured steps" in model.source


def test_simulated_steps_scatter_as_the_measured_ones_did() -> None:
    model = measured_model(records(noise=0.2), "a test")
    decode = PhaseWork(4, 4, 1000, 1000)
    expected = model.cost.seconds(PhaseWork(), decode)
    noisy = NoisyCost(model, seed=1)
    drawn = [noisy.seconds(PhaseWork(), decode) / expected for _ in range(2000)]
    assert sum(drawn) / len(drawn) == pytest.approx(1.0, abs=0.02)
    assert 0.7 < min(drawn) < 0.9
    assert 1.1 < max(drawn) < 1.4


def test_work_beyond_the_largest_measured_step_is_counted_as_outside() -> None:
    model = measured_model(records(), "a test")
    cost = NoisyCost(model)
    cost.seconds(PhaseWork(), PhaseWork(16, 16, 4000, 4000))
    assert cost.beyond_measured_s == 0.0
    taken = cost.seconds(PhaseWork(), PhaseWork(64, 64, 4000, 4000))
    assert cost.beyond_measured_s == taken


@pytest.mark.parametrize(
    ("found", "says"),
    [
        ({}, "has no step records .*missing: 'steps'"),
        ({"steps": [{}], "requests": []}, "has no step records .*missing: 'device_s'"),
        (records(30), "at least 50 are needed"),
        (records(100, mixed=0.0), "0 steps with prefill and 100 without"),
    ],
)
def test_records_that_say_too_little_are_refused(found: dict[str, Any], says: str) -> None:
    with pytest.raises(ConfigError, match=says):
        measured_model(found, "a test")


def test_a_data_sheet_gives_the_rooflines_estimate() -> None:
    roofline = Roofline(
        find_spec("llama-3.1-8b"), find_hardware("H100"), RooflineSettings(context=1024, batch=1)
    )
    cost = roofline_model(roofline).cost
    decode = cost.seconds(PhaseWork(), PhaseWork(1, 1, 1024, 1024))
    assert decode == pytest.approx(roofline.decode(1).estimate_s, rel=0.01)
    tokens = 2048
    attended = tokens * (tokens + 1) // 2
    prefill = cost.seconds(PhaseWork(1, tokens, attended, tokens), PhaseWork())
    assert prefill == pytest.approx(roofline.prefill(tokens).estimate_s, rel=0.01)
