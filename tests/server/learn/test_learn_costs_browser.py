"""The costs that `/learn` computes in the browser are those of the cost model in Python, and those
that the engine records."""

from __future__ import annotations

import itertools
import json
from collections.abc import Iterator
from typing import Any

import pytest

from tests.server.browser import Browser
from tests.server.learn.learn_page import LearnPage, learn_page
from tests.server.running import Running, running
from tests.tiny import tiny_llm
from twostroke.measure.roofline.hardware import HARDWARE
from twostroke.measure.roofline.roofline import Floor, Roofline, RooflineSettings
from twostroke.measure.roofline.shapes import find_spec
from twostroke.model.describe.cost import model_figures

# The page's name of a model → the name of its shape in Python.
MODELS = {
    "Llama 3.2 1B": "llama-3.2-1b",
    "Llama 3.1 8B": "llama-3.1-8b",
    "Qwen3 32B": "qwen3-32b",
    "Llama 3.1 70B": "llama-3.1-70b",
}
# The page's names of formats → those of `RooflineSettings`.
WEIGHTS = {"16 bits": "fp16", "8 bits": "int8", "4 bits": "int4"}
KV = {"16 bits": "fp16", "8 bits": "int8"}
LENGTHS = [(1, 16, 1), (512, 512, 1), (4096, 1024, 16), (8192, 32768, 128)]


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Running]:
    with running(tiny_llm(tmp_path_factory.mktemp("tiny") / "tiny")) as server:
        yield server


@pytest.fixture(scope="module")
def learn(chrome: Browser, server: Running) -> Iterator[LearnPage]:
    with learn_page(chrome, f"{server.url}/learn") as learn:
        yield learn
        assert learn.page.errors == []


def in_the_page(learn: LearnPage, expression: str) -> Any:
    """The value of an expression over the module `cost`."""
    module = "import('/static/learn/cost.js')"
    return learn.page.resolved(f"{module}.then(cost => ({expression}))")


def roofline(
    name: str, weights: str, kv: str, lengths: tuple[int, int, int] = LENGTHS[0]
) -> Roofline:
    prompt, context, batch = lengths
    settings = RooflineSettings(prompt, context, batch, weights=WEIGHTS[weights], kv=KV[kv])
    return Roofline(find_spec(MODELS[name]), HARDWARE["H100"], settings)


def test_the_page_offers_the_models_and_formats_that_are_compared_here(learn: LearnPage) -> None:
    offered = in_the_page(learn, "[cost.MODELS, Object.keys(cost.WEIGHTS), Object.keys(cost.KV)]")
    assert offered == [list(MODELS), list(WEIGHTS), list(KV)]


@pytest.mark.parametrize("name", MODELS)
def test_the_figures_of_a_model_are_those_of_its_spec(learn: LearnPage, name: str) -> None:
    spec = find_spec(MODELS[name])
    for weights, kv in itertools.product(WEIGHTS, KV):
        formats = f"cost.WEIGHTS[{weights!r}], cost.KV[{kv!r}]"
        shown = in_the_page(learn, f"cost.figuresOf({name!r}, {formats})")
        expected = model_figures(spec, roofline(name, weights, kv).cost)._asdict()
        # The page leaves out the norms.
        assert shown.pop("parameters") == pytest.approx(expected["parameters"], rel=1e-3)
        assert shown == pytest.approx({field: expected[field] for field in shown}, rel=1e-12)


@pytest.mark.parametrize("name", MODELS)
def test_the_floors_of_both_phases_are_those_of_the_roofline(learn: LearnPage, name: str) -> None:
    for weights, kv, lengths in itertools.product(WEIGHTS, KV, LENGTHS):
        expected = roofline(name, weights, kv, lengths)
        prompt, context, batch = lengths
        machine = {"flops_per_s": expected.rate, "bytes_per_s": expected.bandwidth}
        figures = f"cost.figuresOf({name!r}, cost.WEIGHTS[{weights!r}], cost.KV[{kv!r}])"
        prefill, decode, ridge = in_the_page(
            learn,
            f"[cost.floor(cost.prefillWork({figures}, {prompt}), {json.dumps(machine)}), "
            f"cost.floor(cost.decodeWork({figures}, {context}, {batch}), {json.dumps(machine)}), "
            f"cost.ridge({json.dumps(machine)})]",
        )
        assert prefill == _floor(expected.prefill()), (weights, kv, lengths)
        assert decode == _floor(expected.decode()), (weights, kv, lengths)
        assert ridge == pytest.approx(expected.ridge)


def _floor(floor: Floor) -> dict[str, Any]:
    numbers = {
        "compute": floor.compute_s,
        "memory": floor.memory_s,
        "seconds": floor.floor_s,
        "intensity": floor.intensity,
    }
    close = {name: pytest.approx(value, rel=1e-12) for name, value in numbers.items()}
    return close | {"bound": floor.bound}


def test_the_work_of_a_step_is_what_the_engine_records(learn: LearnPage, server: Running) -> None:
    body = {"experiment": "predict", "prompt_tokens": 100, "output_tokens": 6, "streams": 1}
    steps = server.post("/learn/run", body)["arms"][0]["steps"]
    figures = json.dumps(json.loads(server.ask("GET", "/learn/facts")[2])["figures"])
    (prefill,) = [one["prefill"] for one in steps if one["prefill"]["tokens"]]
    work = in_the_page(learn, f"cost.prefillWork({figures}, 100)")
    assert work["flops"] == pytest.approx(prefill["flops"], rel=1e-12)
    decodes = [one["decode"] for one in steps if one["decode"]["tokens"]]
    assert len(decodes) == 5
    for n, decode in enumerate(decodes, start=101):
        work = in_the_page(learn, f"cost.decodeWork({figures}, {n})")
        assert work["flops"] == pytest.approx(decode["flops"], rel=1e-12)
        assert work["bytes"] == pytest.approx(decode["num_bytes"], rel=1e-12)
