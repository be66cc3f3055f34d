"""Triton's cache, for the tests that compile kernels."""

from __future__ import annotations

import os
from pathlib import Path

import pytest


@pytest.fixture(scope="session")
def triton_cache(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """One folder for all tests and workers of a run. Triton names its files by their content."""
    base = tmp_path_factory.getbasetemp()
    if "PYTEST_XDIST_WORKER" in os.environ:  # each worker has a folder below the run's folder
        base = base.parent
    return base / "triton_cache"
