"""Runs `reference_check`, a script for GPUs, on the CPU, so that the script stays right."""

from __future__ import annotations

import json
from pathlib import Path

import torch

from tests.gpu.reference_check import SPECS, check_matrix, start


def test_every_way_to_schedule_equals_the_cpu_reference() -> None:
    assert len(check_matrix(torch.device("cpu"))) == 5 * len(SPECS)


def test_a_shape_without_weights_starts_and_writes(tmp_path: Path) -> None:
    """A config alone, smaller than the real one it is made from."""
    shape = json.loads(Path("bench/shapes/qwen3-0.6b.json").read_text())
    shape |= {"num_hidden_layers": 2, "hidden_size": 128, "intermediate_size": 256}
    shape |= {"vocab_size": 1000, "num_attention_heads": 4, "num_key_value_heads": 2}
    path = tmp_path / "small.json"
    path.write_text(json.dumps(shape))
    result = start(str(path), "cpu", "float32")
    assert result["kv_bytes"] > 0
    assert result["tpot_s"] > 0
