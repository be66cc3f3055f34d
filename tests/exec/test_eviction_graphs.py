"""Eviction in graphs and with steps planned ahead: `tests/gpu/eviction_check.py` on a CPU."""

from __future__ import annotations

import pytest
import torch

from tests.gpu.eviction_check import check


@pytest.mark.parametrize("way", ["chunked and mixed", "preempted"])
def test_tables_close_up_between_steps_in_flight(way: str) -> None:
    check("qwen3", way, torch.device("cpu"))
