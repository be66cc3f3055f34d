"""/learn in a real browser: lessons walked to their answers, pictures compared with the records
they came from, and the exported page without a server."""

from __future__ import annotations

import asyncio
import itertools
import json
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.server.browser import Browser, Page, browser, chromium
from tests.server.running import Running, running
from tests.tiny import tiny_folder, tiny_llm
from twostroke.config import EngineConfig
from twostroke.serve.learn import LearnData
from twostroke.serve.learn_export import exported, recorded

pytestmark = pytest.mark.skipif(chromium() is None, reason="no Chromium is installed")

READY = "document.getElementById('view').dataset.ready"
IDLE = "document.querySelector('[aria-busy=true]') === null"
SHOWN = "[...document.querySelectorAll('%s')].map(one => ({...one.dataset}))"
LAST = "import('/static/learn/source.js').then(one => one.lastRun('%s'))"


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_folder(tmp_path_factory.mktemp("tiny") / "tiny")


@pytest.fixture(scope="module")
def chrome() -> Iterator[Browser]:
    with browser() as one:
        yield one


@pytest.fixture
def server(folder: Path) -> Iterator[Running]:
    with running(tiny_llm(folder), engine=EngineConfig(model=str(folder))) as server:
        yield server


def go(page: Page, place: str) -> None:
    page.value(f"location.hash = '#/{place}'")
    page.wait_for(f"{READY} === '{place}' && {IDLE}")


def run(page: Page, name: str) -> None:
    """Press a button that runs something, and wait for its end."""
    page.value(f"document.querySelector('[data-run={name}]').click()")
    page.wait_for(IDLE)
    problem = page.value("document.querySelector('#view .error:not([hidden])')?.textContent")
    assert problem is None


def last(page: Page, name: str) -> Any:
    """The newest run of an experiment, as the page holds it."""
    given = f"({LAST % name}).then(JSON.stringify)"
    answer = page.call("Runtime.evaluate", expression=given, awaitPromise=True, returnByValue=True)
    return json.loads(answer["result"]["value"])


def answered(page: Page, option: int) -> str:
    page.value(f"document.querySelectorAll('[data-option] input')[{option}].click()")
    run(page, "answer")
    return str(page.value("document.querySelector('[data-question]').dataset.answered"))


def right_option(page: Page) -> int:
    """The option that the page marks as right once a question has been answered."""
    marked = "[...document.querySelectorAll('[data-option]')].findIndex(one => "
    return int(page.value(f"{marked}one.classList.contains('right'))"))


def test_a_lesson_is_walked_to_its_answer_and_the_prompt_is_the_recorded_one(
    chrome: Browser, server: Running
) -> None:
    with chrome.page(f"{server.url}/learn") as page:
        page.wait_for(f"{READY} === 'start'")
        go(page, "lesson/2/1")
        assert answered(page, 0) == "wrong"
        assert right_option(page) == 1
        assert "engine" in page.value("document.body.innerText")
        assert answered(page, 1) == "right"
        page.value("document.querySelector('[data-next]').click()")
        page.wait_for(f"{READY} === 'lesson/2/2'")
        run(page, "run")
        found = last(page, "text")
        (request,) = found["arms"][0]["requests"]
        steps = {one["step"]: one for one in found["arms"][0]["steps"]}
        boxes = page.value(SHOWN % "rect[data-step]")
        records = {one.request_id: one for one in server.client.engine.core.records.requests}
        record = records[request["request_id"]]
        chunks = [step for _, step, _, _ in record.chunks]
        assert [int(box["step"]) for box in boxes] == chunks + list(record.token_step)[1:]
        assert [float(box["seconds"]) for box in boxes] == pytest.approx(
            [steps[int(box["step"])]["device_s"] for box in boxes], abs=0.01
        )
        go(page, "lesson/2/3")
        assert page.value("document.querySelectorAll('[data-option]').length") == 3
        assert answered(page, 1) in ("right", "wrong")
        assert page.errors == []


@pytest.mark.full
@pytest.mark.parametrize("number", range(1, 7))
def test_each_lesson_is_walked_to_its_answers(
    chrome: Browser, server: Running, number: int
) -> None:
    with chrome.page(f"{server.url}/learn#/lesson/{number}/1") as page:
        page.wait_for(f"{READY} === 'lesson/{number}/1'")
        screens = page.value("document.querySelectorAll('.progress li').length")
        questions = 0
        for place in range(1, screens + 1):
            go(page, f"lesson/{number}/{place}")
            if page.value("document.querySelector('[data-question]') !== null"):
                questions += 1
                answered(page, 0)
                assert answered(page, right_option(page)) == "right"
                said = page.value("document.querySelector('[data-agrees]').textContent")
                assert any(one.isdigit() for one in said), "the engine answers with numbers"
        assert questions == 2
        assert page.errors == []


@pytest.mark.full
def test_pictures_show_what_the_records_say(chrome: Browser, server: Running) -> None:
    with chrome.page(f"{server.url}/learn#/company") as page:
        page.wait_for(f"{READY} === 'company'")
        for name in ("stall", "batch", "context", "prefix", "full_cache"):
            run(page, name)
            assert page.value(f"!!document.querySelector('[data-result={name}] .sentence')")
        (arm,) = last(page, "stall")["arms"]
        gaps = page.value(SHOWN % "rect[data-who=you]")
        times = arm["requests"][0]["token_s"]
        measured = [after - before for before, after in itertools.pairwise(times)]
        assert [float(one["seconds"]) for one in gaps] == pytest.approx(measured, abs=0.01)
        (row,) = page.value(SHOWN % "[data-result=stall] tr[data-arm]")
        assert float(row["gap"]) == pytest.approx(max(measured))
        first, second = page.value(SHOWN % "[data-result=prefix] tr[data-cached]")
        requests = last(page, "prefix")["arms"][0]["requests"]
        assert [int(one["cached"]) for one in (first, second)] == [
            one["num_cached"] for one in requests
        ]
        go(page, "roofline")
        assert page.errors == []


@pytest.mark.full
def test_every_view_fits_every_width_in_light_and_dark(chrome: Browser, server: Running) -> None:
    views = ("sliders", "prompt", "roofline", "predict", "company", "quiz", "myths", "lesson/1/1")
    with chrome.page(f"{server.url}/learn") as page:
        page.wait_for(f"{READY} === 'start'")
        for view in views:
            go(page, view)
            for scheme in ("light", "dark"):
                for width in (320, 768, 1280):
                    page.look(width, 900, scheme)
                    time.sleep(0.1)
                    wide = page.value("document.documentElement.scrollWidth")
                    assert wide <= width, (view, width)
        assert page.errors == []


@pytest.mark.full
def test_the_exported_page_needs_no_server(
    chrome: Browser, folder: Path, tmp_path: Path, server: Running
) -> None:
    loop = server.server._loop
    assert loop is not None
    recording = asyncio.run_coroutine_threadsafe(
        recorded(LearnData(server.app.service)), loop
    ).result(120)
    path = tmp_path / "learn.html"
    path.write_bytes(exported(recording))
    assert path.stat().st_size < 2_000_000
    with chrome.page(path.as_uri()) as page:
        page.wait_for(f"{READY} === 'start'")
        go(page, "lesson/4/1")
        assert answered(page, 1) == "right"
        go(page, "prompt")
        run(page, "run")
        page.value("document.querySelectorAll('details').forEach(one => { one.open = true })")
        run(page, "attention")
        assert page.value("document.querySelectorAll('rect[data-query]').length") > 10
        go(page, "predict")
        run(page, "predict")
        assert page.value("document.querySelectorAll('tr[data-row]').length") == 3
        assert page.errors == []
        assert {url for url in page.asked if not url.startswith("data:")} == {path.as_uri()}
