"""Settings that are derived from other settings."""

from __future__ import annotations

import dataclasses
import json
from typing import Any

import pytest

from twostroke.config import EngineConfig
from twostroke.errors import ConfigError


@pytest.mark.parametrize(
    ("mode", "rows", "budgets", "goals"),
    [
        ("interactivity", 128, (8192, 512), ((1.0, 0.05), (4.0, 0.1))),
        ("balanced", 256, (8192, 512), ((None, None), (None, None))),
        ("throughput", 512, (16384, 1024), ((None, None), (None, None))),
    ],
)
def test_a_performance_mode_sets_what_is_not_given(
    mode: str,
    rows: int,
    budgets: tuple[int, int],
    goals: tuple[tuple[float | None, float | None], ...],
) -> None:
    config = EngineConfig(performance_mode=mode)
    assert config.max_num_seqs == rows
    assert (config.token_budget(True, 4096), config.token_budget(False, 4096)) == budgets
    assert (config.goals(True), config.goals(False)) == goals


def test_a_setting_overrides_the_performance_mode() -> None:
    config = EngineConfig(
        performance_mode="interactivity",
        max_num_seqs=7,
        max_num_batched_tokens=99,
        itl_slo_ms=30,
    )
    assert config.max_num_seqs == 7
    assert config.token_budget(True, 4096) == 99
    assert config.goals(True) == (1.0, 0.03)


def test_goals_alone_need_no_mode() -> None:
    assert EngineConfig(ttft_slo_ms=250).goals(True) == (0.25, None)
    assert EngineConfig(itl_slo_ms=20).goals(False) == (None, 0.02)


def test_a_mode_leaves_out_the_goal_that_needs_chunks_where_there_are_none() -> None:
    config = EngineConfig(performance_mode="interactivity", enable_chunked_prefill=False)
    assert config.goals(True) == (1.0, None)


@pytest.mark.parametrize(
    ("given", "stall"),
    [
        ({}, 8.0),
        ({"performance_mode": "throughput"}, None),
        ({"performance_mode": "throughput", "max_decode_stall": 3}, 3),
        ({"max_decode_stall": 0}, None),
        ({"enable_chunked_prefill": False}, None),
    ],
)
def test_by_default_a_stream_waits_for_at_most_eight_steady_gaps(
    given: dict[str, Any], stall: float | None
) -> None:
    assert EngineConfig(**given).decode_stall() == stall


def test_requests_at_one_time_are_no_more_than_a_step_has_tokens_for() -> None:
    assert EngineConfig(max_num_batched_tokens=32).max_num_seqs == 32


@pytest.mark.parametrize(
    ("given", "says"),
    [
        ({"temperature": -1}, "override_generation_config: temperature"),
        ({"top_k": "many"}, "override_generation_config: top_k"),
        ({"max_tokens": 5}, "a dict of temperature, top_p, top_k, min_p, repetition_penalty, "),
        ([0.5], "override_generation_config must be a dict of temperature"),
    ],
)
def test_sampling_that_cannot_be_is_refused_at_the_start(given: Any, says: str) -> None:
    with pytest.raises(ConfigError) as refused:
        EngineConfig(override_generation_config=given)
    assert says in str(refused.value)


def test_settings_sent_to_another_process_stay_the_same() -> None:
    for config in (
        EngineConfig(),
        EngineConfig(performance_mode="throughput"),
        EngineConfig(override_generation_config={"temperature": 0.5, "top_k": 7}),
        EngineConfig(performance_mode="interactivity", ttft_slo_ms=1.5),
    ):
        sent = json.dumps(dataclasses.asdict(config))
        assert EngineConfig(**json.loads(sent)) == config
