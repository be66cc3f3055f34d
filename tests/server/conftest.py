"""The folder of a tiny model, shared by the tests of a module."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.tiny import tiny_folder


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_folder(tmp_path_factory.mktemp("tiny") / "tiny")
