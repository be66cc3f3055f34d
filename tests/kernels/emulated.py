"""pytest inside an emulated machine: `other_architecture.Machine.pytest` starts it.

    python -m tests.kernels.emulated BUILD LINK [--host-references] [--steps NAMES] [arguments]

The native module comes from the folder BUILD. LINK is the file descriptor of a connection with the
host.
"""

from __future__ import annotations

import itertools
import sys
from multiprocessing.connection import Connection
from pickle import PicklingError
from typing import Any

import pytest

import twostroke


class Plugin:
    """The options of an emulated pytest, which make it faster."""

    def __init__(self, link: Connection) -> None:
        self.link = link

    def pytest_addoption(self, parser: pytest.Parser) -> None:
        parser.addoption(
            "--host-references",
            action="store_true",
            help="the host computes the reference models; no test can look into their caches",
        )
        parser.addoption("--steps", help="run only these of the STEPS of test_native_model.py")
        parser.addoption("--core", help="a test function whose cases are all core")

    def pytest_configure(self, config: pytest.Config) -> None:
        if config.getoption("--host-references"):
            compute_references_on_the_host(self.link)

    @pytest.hookimpl(tryfirst=True)
    def pytest_collection_modifyitems(
        self, config: pytest.Config, items: list[pytest.Function]
    ) -> None:
        for item in items:
            if item.originalname == config.getoption("--core"):
                item.add_marker("core")

    def pytest_collection_finish(self, session: pytest.Session) -> None:
        module, steps = "tests.kernels.test_native_model", session.config.getoption("--steps")
        if steps and module in sys.modules:
            kept = {name: sys.modules[module].STEPS[name] for name in steps.split(",")}
            sys.modules[module].STEPS.clear()
            sys.modules[module].STEPS.update(kept)

    def pytest_runtest_setup(self) -> None:
        self.link.send(None)  # the host forgets the models of the last test


def compute_references_on_the_host(link: Connection) -> None:
    """Replace the reference model by messages to the host. numpy is 100 times slower here."""
    from tests.kernels.reference_model import Reference

    numbers = itertools.count()
    make_here, logits_here = Reference.__init__, Reference.logits

    def make(self: Any, *arguments: Any) -> None:
        self.number = next(numbers)
        try:
            link.send((self.number, type(self), arguments))
        except (AttributeError, PicklingError):  # the weights are of a class inside a test function
            self.number = None
            make_here(self, *arguments)

    def logits(self: Any, *step: Any) -> Any:
        if self.number is None:
            return logits_here(self, *step)
        link.send((self.number, "logits", step))
        return link.recv()

    Reference.__init__ = make  # type: ignore[method-assign]
    Reference.logits = logits  # type: ignore[method-assign]


def main() -> int:
    build, link, *arguments = sys.argv[1:]
    twostroke.__path__.insert(0, build)
    options = ["-o", "addopts=", "-p", "no:cacheprovider"]
    return pytest.main([*options, *arguments], [Plugin(Connection(int(link)))])


if __name__ == "__main__":
    sys.exit(main())
