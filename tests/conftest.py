"""The two tiers of the tests, the cores of pytest-xdist's workers, a tiny model's folder and the
browser."""

from __future__ import annotations

import os
from collections import defaultdict
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

if TYPE_CHECKING:
    from tests.server.browser import Browser

# Each worker of pytest-xdist, with the processes that its tests start, has its share of the cores.
# Were a worker's engines and libraries to start a thread for every core, the threads of all workers
# would spin for one another: a step of one row takes ten times as long.
if (workers := os.environ.get("PYTEST_XDIST_WORKER_COUNT")) and hasattr(os, "sched_setaffinity"):
    cores = sorted(os.sched_getaffinity(0))
    share = max(1, len(cores) // int(workers))
    first = share * int(os.environ["PYTEST_XDIST_WORKER"].removeprefix("gw")) % len(cores)
    os.sched_setaffinity(0, cores[first : first + share])

# Parameters whose values are backends. Core runs every backend.
BACKENDS = ("isa", "kernels")


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Give every test one of the markers core, full and long. `pyproject.toml` states the rule."""
    cases: dict[tuple[str, ...], list[pytest.Item]] = defaultdict(list)
    chosen = {function_of(item) for item in items if item.get_closest_marker("core")}
    for item in items:
        if not any(item.get_closest_marker(tier) for tier in ("core", "full", "long")):
            cases[function_of(item), *backends_of(item)].append(item)
    for (function, *_), of_backend in cases.items():
        ends = () if function in chosen else (of_backend[0], of_backend[-1])
        for item in of_backend:
            item.add_marker("core" if item in ends else "full")


def function_of(item: pytest.Item) -> str:
    return item.nodeid.partition("[")[0]


def backends_of(item: pytest.Item) -> list[str]:
    params = item.callspec.params if hasattr(item, "callspec") else {}
    return [str(params.get(name)) for name in BACKENDS]


@pytest.fixture(scope="module")
def chrome() -> Iterator[Browser]:
    """A Chromium. A test that needs one is skipped where none is installed."""
    from tests.server.browser import browser, chromium

    if chromium() is None:
        pytest.skip("no Chromium is installed")
    with browser() as one:
        yield one


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of a tiny model, shared by the tests of a module."""
    from tests.tiny import tiny_folder

    return tiny_folder(tmp_path_factory.mktemp("tiny") / "tiny")
