"""Imports run one way: cli, commands, serve, llm → engine → sched → exec → model → kernels.

Every module has a layer, and imports only from its own or a lower one. What counts is what the
source says: every `import` of a `twostroke` module, at the top, inside a function (that only delays
it) or under TYPE_CHECKING (a reader follows it all the same). Nor do imports go round in a circle,
by the same count. Exceptions are listed with their reasons; one that is none any more fails, too.
"""

from __future__ import annotations

import ast
from graphlib import CycleError, TopologicalSorter
from pathlib import Path
from typing import NamedTuple

import pytest

ROOT = Path(__file__).parents[2]

# The longest prefix of a module's name decides. Higher numbers may import lower ones.
LAYERS = {
    "twostroke": 9,  # what users import: lazily, all of it
    "twostroke.__main__": 9,
    "twostroke.entrypoints": 9,
    "twostroke.cli": 9,
    "twostroke.commands": 8,
    "twostroke.serve": 7,
    "twostroke.llm": 7,
    "twostroke.planner": 7,  # simulates engines; no part of a server knows it
    "twostroke.measure": 7,  # talks to servers; of the engine it knows model shapes and ceilings
    "twostroke.llm_engine": 7,
    "twostroke.llm_tokenizer": 7,
    "twostroke.beam_search": 7,
    "twostroke.v1": 7,
    "twostroke.route": 6,
    "twostroke.engine": 6,
    "twostroke.engine.arg_utils": 9,  # has the command line's options
    "twostroke.observe": 5,  # what explains a run to the engine and the server
    "twostroke.sched": 4,
    "twostroke.exec": 3,
    "twostroke.kv.pool": 2,  # tensors, sized by the model's spec
    "twostroke.kv.host_pool": 2,
    "twostroke.kv.device_memory": 2,  # tensors, copied by a kernel
    "twostroke.model": 2,
    "twostroke.kernels": 1,
    "twostroke._native": 1,
    # Leaves: plain data, limits and errors. They import one another only.
    "twostroke.kv": 0,  # block bookkeeping
    "twostroke.observe.record": 0,
    "twostroke.observe.startup_timer": 0,
    "twostroke.child_process": 0,
    "twostroke.closed_schema": 0,
    "twostroke.config": 0,
    "twostroke.environment": 0,
    "twostroke.errors": 0,
    "twostroke.log_lines": 0,
    "twostroke.network_auth": 0,
    "twostroke.outputs": 0,
    "twostroke.owned_folder": 0,
    "twostroke.plan": 0,
    "twostroke.request": 0,
    "twostroke.sandbox": 0,
    "twostroke.strict": 0,
    "twostroke.structured": 0,
    "twostroke.vllm_settings": 0,
    "twostroke.__version__": 0,  # a constant of the package
}

# (importer, imported): why it runs against the arrow
UPWARD: dict[tuple[str, str], str] = {}

# (importer, imported): why it closes a circle.
CIRCULAR: dict[tuple[str, str], str] = {}


class Import(NamedTuple):
    importer: str
    imported: str
    when: str  # "load", "call" (inside a function) or "types" (under TYPE_CHECKING)


def module_of(path: Path) -> str:
    name = ".".join(path.relative_to(ROOT).with_suffix("").parts)
    return name.removesuffix(".__init__")


def imports_of(source: str, importer: str, modules: set[str]) -> list[Import]:
    found = []

    def visit(node: ast.AST, when: str) -> None:
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.Lambda):
            when = "call"
        names = []
        if isinstance(node, ast.Import):
            names = [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            assert not node.level, f"{importer}: imports are absolute here"
            inner = [f"{node.module}.{alias.name}" for alias in node.names]
            names = [one if one in modules or one in LAYERS else str(node.module) for one in inner]
        for name in dict.fromkeys(names):
            if name.partition(".")[0] == "twostroke":
                found.append(Import(importer, name, when))
        if isinstance(node, ast.If) and "TYPE_CHECKING" in ast.unparse(node.test):
            for child in node.body:
                visit(child, "types")
            for child in node.orelse:
                visit(child, when)
            return
        for child in ast.iter_child_nodes(node):
            visit(child, when)

    visit(ast.parse(source), "load")
    return found


def layer_of(module: str) -> int:
    while module not in LAYERS:
        module = module.rpartition(".")[0]
    return LAYERS[module]


def all_imports() -> list[Import]:
    paths = {module_of(path): path for path in (ROOT / "twostroke").rglob("*.py")}
    assert len(paths) > 100
    found = []
    for module, path in paths.items():
        found += imports_of(path.read_text(encoding="utf-8"), module, set(paths))
    return found


def against_the_arrow(imports: list[Import]) -> list[Import]:
    return [one for one in imports if layer_of(one.imported) > layer_of(one.importer)]


def test_imports_run_one_way() -> None:
    wrong = against_the_arrow(all_imports())
    unexpected = [one for one in wrong if one[:2] not in UPWARD]
    assert not unexpected, "\n".join(map(str, unexpected))
    unused = set(UPWARD) - {one[:2] for one in wrong}
    assert not unused, f"exceptions that are none any more: {unused}"


def circle_in(imports: list[Import]) -> list[str]:
    graph: dict[str, set[str]] = {}
    for one in imports:
        if one.importer != "twostroke":  # which imports on first use what users ask it for
            graph.setdefault(one.importer, set()).add(one.imported)
    try:
        TopologicalSorter(graph).prepare()
    except CycleError as error:
        return list(error.args[1])
    return []


def test_no_import_goes_round_in_a_circle() -> None:
    imports = all_imports()
    assert not (circle := circle_in([one for one in imports if one[:2] not in CIRCULAR])), circle
    for exception in CIRCULAR:
        others = set(CIRCULAR) - {exception}
        assert circle_in([one for one in imports if one[:2] not in others]), exception
        assert {one.when for one in imports if one[:2] == exception} == {"types"}


@pytest.mark.parametrize(
    ("source", "when"),
    [
        ("from twostroke.serve.app import App", "load"),
        ("from twostroke.serve import app", "load"),
        ("import twostroke.serve.app", "load"),
        ("def f():\n    from twostroke.serve.app import App", "call"),
        ("if TYPE_CHECKING:\n    from twostroke.serve.app import App", "types"),
        ("try:\n    from twostroke.serve.app import App\nexcept ImportError: ...", "load"),
    ],
)
def test_an_import_upwards_is_found_wherever_it_stands(source: str, when: str) -> None:
    modules = {"twostroke.serve", "twostroke.serve.app"}
    (found,) = imports_of(source, "twostroke.engine.core", modules)
    assert found == ("twostroke.engine.core", "twostroke.serve.app", when)
    assert against_the_arrow([found]) == [found]
