"""Runs `tiers_check`, a script for GPUs, on the CPU, so that the script stays right."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import pytest
import torch

from tests.gpu import tiers_check as check
from twostroke.kv.tiers import host
from twostroke.kv.tiers.tier import Load

CPU = torch.device("cpu")


def test_blocks_come_back_bit_by_bit_and_nothing_is_written_afterwards() -> None:
    check.check_blocks(CPU, 1, (1 << 14,))
    check.check_blocks(CPU, 3, (1 << 11, 264))
    check.check_given_up(CPU, 1 << 14)


@pytest.mark.parametrize("place", check.PLACES)
@pytest.mark.parametrize("case", check.CASES, ids=str)
def test_a_prefix_that_came_back_gives_the_tokens_of_one_that_stayed(
    case: tuple[str, torch.dtype, torch.dtype], place: str, tmp_path: Path
) -> None:
    found = check.check_model(*case, place, CPU, tmp_path)
    assert place.split()[0] in found


@pytest.mark.parametrize("place", ["host", "disk"])
@pytest.mark.full  # the property is in core for random lives, and for a disk in tests/equivalence
def test_a_small_pool_evicts_and_preempts(place: str, tmp_path: Path) -> None:
    assert "preempted" in check.check_small_pool(place, CPU, tmp_path)


def test_a_damaged_and_a_vanished_file_are_computed_again(tmp_path: Path) -> None:
    assert "fetches failed" in check.check_damage(CPU, tmp_path)


def test_exchanged_blocks_make_the_check_fail(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """Negative control."""
    launch = host._Arena._launch

    def exchanged(self: host._Arena, loads: Sequence[Load]) -> None:
        turned = [load._replace(slot=other.slot) for load, other in zip(loads, loads[::-1])]  # noqa: B905
        launch(self, turned)

    monkeypatch.setattr(host._Arena, "_launch", exchanged)
    with pytest.raises(AssertionError, match="prompt"):
        check.check_model("heads", torch.float32, torch.float32, "host", CPU, tmp_path)
