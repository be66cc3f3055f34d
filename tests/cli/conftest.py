"""Downloads the default model before the tests, so that no output has a line about the download."""

from __future__ import annotations

import pytest

from tests.support import default_model_path


@pytest.fixture(autouse=True, scope="session")
def _default_model() -> None:
    default_model_path()
