"""Step times with learned efficiencies: the terms, the table of the package, and the interval."""

from __future__ import annotations

import pytest

from twostroke.measure.roofline.hardware import find_hardware
from twostroke.measure.roofline.roofline import Roofline, RooflineSettings
from twostroke.measure.roofline.shapes import find_spec
from twostroke.plan import NO_WORK, PhaseWork
from twostroke.planner.learned import TERMS, StepTerms, learned_model, learned_table


def roofline(hardware: str = "H100", model: str = "llama-3.1-8b", **settings: object) -> Roofline:
    return Roofline(find_spec(model), find_hardware(hardware), RooflineSettings(**settings))  # type: ignore[arg-type]


def test_terms_are_the_parts_of_the_roofline() -> None:
    found = roofline()
    decode = dict(
        zip(TERMS, StepTerms(found).of(NO_WORK, PhaseWork(4, 4, 4000, 4000)), strict=True)
    )
    memory_s = decode["weights"] + decode["kv"]
    # The same bytes as the roofline counts for four streams of 1,000 positions, one new one each.
    weights = found.cost.weight_bytes(4, 4) / found.bandwidth
    assert memory_s == pytest.approx(weights + 4004 * found.kv_bytes_per_token / found.bandwidth)
    compute_s = decode["linear"] + decode["attention"]
    flops = found.cost.decode_flops(PhaseWork(4, 4, 4000, 4000))
    assert compute_s == pytest.approx(flops / found.rate)
    assert (decode["network"], decode["hop"], decode["expert_weights"]) == (0.0, 0.0, 0.0)
    assert (decode["layer"], decode["step"], decode["prefill_layer"]) == (32.0, 1.0, 0.0)


def test_ranks_share_the_work_and_pay_for_the_network() -> None:
    work = PhaseWork(1, 512, 512 * 513 // 2, 512)
    one, four = (
        dict(zip(TERMS, StepTerms(roofline(tensor_parallel=n)).of(work, NO_WORK), strict=True))
        for n in (1, 4)
    )
    assert four["linear"] == pytest.approx(one["linear"] / 4)
    assert four["weights"] == pytest.approx(one["weights"] / 4)
    assert four["network"] > 0
    assert (one["hop"], four["hop"]) == (0.0, 64.0)


def test_experts_are_read_as_often_as_tokens_choose_them() -> None:
    found = StepTerms(roofline(model="bench/shapes/qwen3-30b-a3b.json"))
    one, many = (
        dict(zip(TERMS, found.of(NO_WORK, PhaseWork(n, n, n, n)), strict=True)) for n in (1, 64)
    )
    assert many["experts"] == pytest.approx(64 * one["experts"])
    assert 8 * one["expert_weights"] < many["expert_weights"] < 64 * one["expert_weights"]
    assert found.family == "experts"


def test_learned_times_lie_above_the_data_sheets_floor() -> None:
    table = learned_table()
    assert {"", "dense", "experts", "latents"} <= table["coefficients"].keys()
    found = roofline()
    model = learned_model(found)
    decode = model.cost.seconds(NO_WORK, PhaseWork(1, 1, 1024, 1024))
    assert found.decode(1).floor_s < decode < 4 * found.decode(1).floor_s
    tokens = 2048
    prefill = model.cost.seconds(PhaseWork(1, tokens, tokens * (tokens + 1) // 2, tokens), NO_WORK)
    assert found.prefill(tokens).floor_s < prefill < 4 * found.prefill(tokens).floor_s


def test_the_interval_is_the_error_on_held_out_pairs() -> None:
    table = learned_table()
    assert 0 < table["error"] < 0.9
    known, other = (learned_model(roofline(name)) for name in ("H200", "A100"))
    assert known.drift == table["error"]
    assert other.drift == max(table["error_elsewhere"], table["error"])
    assert "not this one" in other.source
    assert "not this one" not in known.source


def test_decode_reads_its_own_weights() -> None:
    both = learned_model(roofline(decode_weights="int8")).cost
    alone = learned_model(roofline()).cost
    decode, prefill = PhaseWork(1, 1, 512, 512), PhaseWork(1, 256, 256 * 257 // 2, 256)
    assert both.seconds(NO_WORK, decode) < 0.75 * alone.seconds(NO_WORK, decode)
    assert both.seconds(prefill, NO_WORK) == alone.seconds(prefill, NO_WORK)
