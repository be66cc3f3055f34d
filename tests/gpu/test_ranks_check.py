"""What `ranks_check` does on a GPU, done on the CPU: the script stays right."""

from __future__ import annotations

from pathlib import Path

import torch

from tests.equivalence.harness import small_spec
from tests.gpu import ranks_check
from twostroke.exec.collectives import GlooRanks


def test_a_group_of_one_writes_the_same_and_its_bytes_are_those_of_the_formula(
    tmp_path: Path,
) -> None:
    cpu = torch.device("cpu")
    ranks = GlooRanks(0, 1, str(tmp_path / "store"), cpu, staged=True)
    spec = small_spec(qk_norm="full", tie_embeddings=True, vocab_size=511)
    found = list(ranks_check.compare_with_no_group(spec, torch.float32, cpu, ranks))
    assert len(found) == 2
    assert "bytes in collectives, as the formula says" in found[1]
