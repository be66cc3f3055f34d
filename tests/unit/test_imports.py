"""Imports run one way, between folders and between files.

`ORDER` lists every folder of the package, and every module that lies in the package itself, in
`model/` or in `serve/`, from the lowest to the highest. A folder imports only folders below its
own. A few modules are listed apart from their folder, with the reason. An unlisted module fails the
test. Nor do imports go round in a circle between files.

What counts is what the source says: every `import` of a `twostroke` module, at the top, inside a
function (that only delays it) or under TYPE_CHECKING (a reader follows it all the same).
"""

from __future__ import annotations

import ast
from graphlib import CycleError, TopologicalSorter
from pathlib import Path
from typing import NamedTuple

import pytest

ROOT = Path(__file__).parents[2]

# From the lowest to the highest; an entry on one line with others is below those to its right.
ORDER = [
    line.strip()
    for line in """
    __version__, errors, strict, closed_schema, child_process, sandbox, owned_folder, log_lines
    environment
    network_auth, connection_watch
    kv.usage, kv.prefix, kv.transfer, kv.tiers, kv
    draft.speculation_config
    request, structured, config, plan
    observe.startup_timer, observe.record
    outputs, vllm_settings
    _native, kernels, kernels.cuda
    model, model.fields, model.find, model.gguf, model.describe
    kv.host_pool, kv.pinned_memory, kv.device_memory, kv.tiers.host, kv.pool
    model.text, model.weights, model.load, model.formats, model.torch
    model.native_decoder, model.attention_maps
    draft
    sched, observe, exec
    engine, route
    serve, serve.error_responses, serve.parsers, serve.fields, serve.settings
    serve.http, serve.monitor
    v1, v1.metrics, beam_search, llm_tokenizer, llm, llm_engine, v1.engine
    measure, measure.report, measure.load, measure.explain, measure.roofline, measure.doctor
    measure.compare, measure.quality
    planner
    serve.generation
    serve.api, serve.api.openai, serve.api.anthropic, serve.api.ollama, serve.api.llama_server
    serve.api.responses
    serve.routes, serve.dashboard, serve.learn, serve.pages, serve.app, serve.batch_file
    serve.server
    utils, distributed, inputs, lora, multimodal, pooling_params, sampling_params
    commands, cli, __main__
    engine.arg_utils, entrypoints, entrypoints.openai
    """.replace("\n", ",").split(",")
    if line.strip()
]

# Modules that are listed apart from their folder:
# observe.record, observe.startup_timer   records that the scheduler and the executor fill
# draft.speculation_config   settings that `config` validates
# kv.usage, kv.prefix, kv.transfer   the terms in which `kv.tiers` is written
# kv.pool, kv.host_pool, kv.pinned_memory, kv.device_memory, kv.tiers.host   memory on a device or
#   sized by a model
# engine.arg_utils   vLLM's name for the options of the command line
# __version__, _native   a constant of the package, and the compiled module
RANK = {f"twostroke.{name}": rank for rank, name in enumerate(ORDER)}
RANK["twostroke"] = len(RANK)  # what users import: lazily, all of it
LOOSE = ("twostroke", "twostroke.model", "twostroke.serve")  # whose own modules are listed each


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
            names = [one if one in modules or one in RANK else str(node.module) for one in inner]
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


def listed(module: str, folders: set[str]) -> str:
    """The entry of `ORDER` that a module belongs to: its own, or that of its folder."""
    if module in RANK and module not in folders:
        return module
    folder = module if module in folders else module.rpartition(".")[0]
    known = folder in RANK and (folder not in LOOSE or module in folders)
    assert known, f"{module} is not listed"
    return folder


def sources() -> dict[str, Path]:
    paths = {module_of(path): path for path in (ROOT / "twostroke").rglob("*.py")}
    assert len(paths) > 100
    return paths


def folders_of(paths: dict[str, Path]) -> set[str]:
    return {module for module, path in paths.items() if path.name == "__init__.py"}


def all_imports() -> list[Import]:
    paths = sources()
    found = []
    for module, path in paths.items():
        found += imports_of(path.read_text(encoding="utf-8"), module, set(paths))
    return found


def upwards(imports: list[Import], folders: set[str]) -> list[Import]:
    found = []
    for one in imports:
        importer, imported = (listed(name, folders) for name in one[:2])
        if importer != imported and RANK[imported] > RANK[importer]:
            found.append(one)
    return found


def test_imports_run_one_way_between_folders() -> None:
    wrong = upwards(all_imports(), folders_of(sources()))
    assert not wrong, "\n".join(map(str, wrong))


def test_every_entry_exists_and_every_module_is_listed() -> None:
    paths = sources()
    entries = {listed(module, folders_of(paths)) for module in paths}
    assert set(RANK) - entries == {"twostroke._native", "twostroke.__version__"}


def test_an_unlisted_module_is_found() -> None:
    folders = {"twostroke", "twostroke.serve", "twostroke.serve.http"}
    assert listed("twostroke.serve.http.anything", folders) == "twostroke.serve.http"
    for unlisted in ("twostroke.stray", "twostroke.serve.stray", "twostroke.strays.one"):
        with pytest.raises(AssertionError, match="is not listed"):
            listed(unlisted, folders)


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
    assert not (circle := circle_in(all_imports())), circle
    circular = [
        Import("twostroke.a", "twostroke.b", "load"),
        Import("twostroke.b", "twostroke.a", "call"),
    ]
    assert circle_in(circular)


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
    folders = {"twostroke", "twostroke.serve", "twostroke.engine"}
    assert upwards([found], folders) == [found]


@pytest.mark.parametrize(
    ("importer", "imported"),
    [
        ("sched.scheduler", "exec.executor"),
        ("kv.cache", "kv.pool"),
        ("model.describe.spec", "model.weights.gguf"),
        ("serve.http.bodies", "serve.generation.service"),
        ("serve.api.openai.completions", "serve.api.ollama.ollama_request"),
    ],
)
def test_an_import_between_folders_against_the_order_is_found(importer: str, imported: str) -> None:
    found = Import(f"twostroke.{importer}", f"twostroke.{imported}", "load")
    back = Import(found.imported, found.importer, "load")
    assert upwards([found, back], folders_of(sources())) == [found]
