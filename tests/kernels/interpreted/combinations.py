"""Parameters of tests: combinations of sizes and types."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest


def crossed(first: Sequence[Any], second: Sequence[Any], most: int) -> list[Any]:
    """Parameters: each of `first` with each of `second`, tuples joined.

    Each of `first` has `most` combinations that are not marked long: other columns of `second` for
    each. All other combinations are marked long.
    """
    found = []
    for row, left in enumerate(first):
        for column, right in enumerate(second):
            each = [value if isinstance(value, tuple) else (value,) for value in (left, right)]
            long = (row + column) % len(second) >= most
            found.append(pytest.param(*each[0], *each[1], marks=pytest.mark.long if long else ()))
    return found
