"""The two tiers of the tests, and the threads of pytest-xdist's workers."""

from __future__ import annotations

import os
from collections import defaultdict
from collections.abc import Iterator
from dataclasses import replace
from importlib.util import find_spec

import pytest

# A worker that starts a thread for every core makes OpenMP's threads spin for one another: a step
# of one row takes ten times as long. The variable must be set before numpy and torch are imported,
# and holds for the processes that tests start.
if workers := os.environ.get("PYTEST_XDIST_WORKER_COUNT"):
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()
    os.environ.setdefault("OMP_NUM_THREADS", str(max(1, (cores or 1) // int(workers))))

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


@pytest.fixture(scope="session", autouse=True)
def patient_grammar_checks() -> Iterator[None]:
    """Grammar checks run when a core is idle, which it may not be for a while beside other tests.
    The limit on their CPU time stays."""
    with pytest.MonkeyPatch.context() as patch:
        if find_spec("llguidance"):
            from twostroke.engine import grammar_check

            patch.setattr(grammar_check, "LIMITS", replace(grammar_check.LIMITS, wall_s=300.0))
        yield
