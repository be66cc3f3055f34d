"""The advice of a refused request names the limit that refused it."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from twostroke.serve.error_responses import ApiError
from twostroke.serve.generation.service import Admission


def admission(max_queue: int, max_choices: int) -> Admission:
    client: Any = SimpleNamespace(
        info=SimpleNamespace(device="cpu", max_num_seqs=2), asleep=False, healthy=True
    )
    return Admission(client, max_queue, max_choices)


@pytest.mark.parametrize(
    ("max_queue", "max_choices", "most", "flag"),
    [(100, 16, 16, "--max-choices"), (6, 16, 8, "--max-queue"), (14, 16, 16, "--max-queue")],
)
def test_too_many_choices_are_told_the_limit_to_raise(
    max_queue: int, max_choices: int, most: int, flag: str
) -> None:
    with pytest.raises(ApiError, match=f"at most {most} are allowed; .* or raise {flag}"):
        admission(max_queue, max_choices).check(17)
