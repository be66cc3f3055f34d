"""The default model is in the cache before a command runs: no output has a line about its fetch."""

from __future__ import annotations

import pytest

from tests.support import default_model_path


@pytest.fixture(autouse=True, scope="session")
def _default_model() -> None:
    default_model_path()
