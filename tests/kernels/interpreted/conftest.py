"""Tests of this folder run in a process that interprets Triton kernels (`process`).

With `TRITON_INTERPRET=1` in the environment the tests run in pytest's own process, where a debugger
can follow them: `TRITON_INTERPRET=1 python -m pytest --pdb tests/kernels/interpreted`.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch

from tests.kernels.interpreted.mended import INTERPRETED
from tests.kernels.interpreted.process import FOLDER, Interpreter

INTERPRETER = pytest.StashKey[Interpreter]()
LIMIT_S = pytest.StashKey[float]()
INTERRUPTS = (KeyboardInterrupt, pytest.exit.Exception)


@pytest.fixture(autouse=True)
def seeded(request: pytest.FixtureRequest) -> None:
    torch.manual_seed(len(request.node.name))


@pytest.fixture(autouse=True)
def unwritten_memory_is_nan() -> Iterator[None]:
    torch.use_deterministic_algorithms(True, warn_only=True)
    assert torch.empty(1000).isnan().all()
    yield
    torch.use_deterministic_algorithms(False)


def pytest_runtest_protocol(item: pytest.Item, nextitem: pytest.Item | None) -> bool | None:
    """Run the item in the interpreter process, and log the reports from there."""
    if not runs_elsewhere(item):
        return None
    item.ihook.pytest_runtest_logstart(nodeid=item.nodeid, location=item.location)
    for report in [*reports_of(item), *reports_of_teardown(item, nextitem)]:
        item.ihook.pytest_runtest_logreport(report=report)
    item.ihook.pytest_runtest_logfinish(nodeid=item.nodeid, location=item.location)
    return True


@pytest.hookimpl(optionalhook=True)
def pytest_timeout_set_timer(item: pytest.Item, settings: Any) -> bool | None:
    """Give the time limit of pytest-timeout to the interpreter process. A signal of pytest-timeout
    would end all of this pytest."""
    if not runs_elsewhere(item):
        return None
    item.stash[LIMIT_S] = settings.timeout
    return True


def runs_elsewhere(item: pytest.Item) -> bool:
    """True for an item of this folder, where this process does not interpret. pytest calls the
    hooks of this file for the items of all folders."""
    return not INTERPRETED and FOLDER in item.path.parents


def reports_of(item: pytest.Item) -> list[pytest.TestReport]:
    """Reports from the interpreter process, or one report that it failed."""
    config = item.config
    if INTERPRETER not in config.stash:
        config.stash[INTERPRETER] = Interpreter(config)
        config.add_cleanup(config.stash[INTERPRETER].end)
    run, limit_s = config.stash[INTERPRETER].run, item.stash.get(LIMIT_S, None)
    call = pytest.CallInfo.from_call(lambda: run(item.nodeid, limit_s), "call", INTERRUPTS)
    if call.excinfo is not None:
        return [pytest.TestReport.from_item_and_call(item, call)]
    restore = config.hook.pytest_report_from_serializable
    return [restore(config=config, data=data) for data in call.result]


def reports_of_teardown(item: pytest.Item, nextitem: pytest.Item | None) -> list[pytest.TestReport]:
    """Tear down fixtures of packages that `nextitem` is not in: items before `item` made them."""
    teardown = item.session._setupstate.teardown_exact
    call = pytest.CallInfo.from_call(lambda: teardown(nextitem), "teardown", INTERRUPTS)
    return [] if call.excinfo is None else [pytest.TestReport.from_item_and_call(item, call)]
