"""Of all tests: how the workers of pytest-xdist share the cores and the files."""

from __future__ import annotations

import os

import pytest

# Were each worker to start a thread for every core, OpenMP's threads would wait for one another
# spinning: a step of one row took ten times as long. Before numpy and torch are imported, and for
# the processes that tests start, too.
if workers := os.environ.get("PYTEST_XDIST_WORKER_COUNT"):
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()
    os.environ.setdefault("OMP_NUM_THREADS", str(max(1, (cores or 1) // int(workers))))


def pytest_configure(config: pytest.Config) -> None:
    """xdist would begin with the files of the most tests; the longest have few."""
    if hasattr(config.option, "loadscopereorder"):
        config.option.loadscopereorder = False


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Files with a test that is marked slow come first: no worker begins one at the end, while
    the others have nothing left to do."""
    slow = {item.path for item in items if item.get_closest_marker("slow")}
    items.sort(key=lambda item: item.path not in slow)
