"""Token ids of the tiny model that the instant engine writes."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.instant import printable_ids
from twostroke.config import EngineConfig


@pytest.fixture(scope="module")
def written(folder: Path) -> list[int]:
    return printable_ids(EngineConfig(model=str(folder)))
