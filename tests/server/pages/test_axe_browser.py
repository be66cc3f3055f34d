"""Every page, in both themes, as axe-core sees it."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.server.browser import Browser
from tests.server.learn.learn_page import learn_page
from tests.server.pages.axe import fetch_axe, findings
from tests.server.pages.chat_page import chat_page
from tests.server.running import Running, running
from tests.tiny import tiny_folder, tiny_llm
from twostroke.config import EngineConfig
from twostroke.observe.ceilings import Ceilings
from twostroke.serve.monitor.ceilings_probe import Roof

pytestmark = [
    pytest.mark.full,
    pytest.mark.network,
]

TEXT = (
    "# A heading\n\nwith [a link](https://example.org) and `code`\n\n```python\nprint(1)\n```\n\n"
    "| a | b |\n|---|--:|\n| 1 | 2 |\n\n> said\n\n- [x] done\n- open\n"
)
THEMES = ("light", "dark")


@pytest.fixture(scope="module")
def axe(tmp_path_factory: pytest.TempPathFactory) -> str:
    return fetch_axe(tmp_path_factory.mktemp("axe"))


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Running]:
    path = tmp_path_factory.mktemp("tiny") / "tiny"
    with running(tiny_llm(tiny_folder(path, max_position_embeddings=2048))) as server:
        yield server


@pytest.mark.parametrize("width", [1200, 390])
def test_the_chat_in_each_of_its_states(
    chrome: Browser, server: Running, axe: str, width: int
) -> None:
    with chat_page(chrome, f"{server.url}/") as chat:
        page = chat.page

        def check(state: str) -> None:
            for theme in THEMES:
                page.look(width, 800, theme)
                assert findings(page, axe) == [], (state, theme)

        check("empty")
        chat.always_answer(TEXT)
        chat.ask("hello")
        chat.click("Regenerate")
        page.wait_for("document.querySelector('.branch') !== null")
        page.wait_for("document.querySelector('[aria-busy=true]') === null")
        chat.click("Tokens")
        check("answered")
        chat.click("Probability")
        check("probability")
        page.value("document.getElementById('settings').click()")
        page.value("document.querySelector('dialog details').open = true")
        check("settings")
        page.press("Escape")
        chat.click("Edit")
        check("editing")


@pytest.mark.parametrize("width", [1200, 390])
def test_every_view_of_learn(
    chrome: Browser, folder: Path, axe: str, width: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(Roof, "ceilings", Ceilings(2e10, 4e11))  # the sliders need some
    with (
        running(tiny_llm(folder), engine=EngineConfig(model=str(folder))) as server,
        learn_page(chrome, f"{server.url}/learn") as learn,
    ):

        def check(state: str) -> None:
            for theme in THEMES:
                learn.page.look(width, 800, theme)
                assert findings(learn.page, axe) == [], (state, theme)

        check("start")
        learn.go("company")
        for name in ("stall", "batch", "context", "prefix", "full_cache"):
            learn.run(name)
        check("company")
        learn.go("prompt")
        learn.run("run")
        learn.page.value("document.querySelectorAll('details').forEach(one => { one.open = true })")
        learn.run("attention")
        check("prompt")
        learn.go("predict")
        learn.run("predict")
        check("predict")
        for view in ("sliders", "roofline"):
            learn.go(view)
            check(view)
        for view in ("quiz", "lesson/1/1", "lesson/6/1"):
            learn.go(view)
            check(f"{view}, not answered")
            learn.answered(0)
            check(f"{view}, answered")
        learn.go("myths")
        learn.run("settle")
        check("myths")


@pytest.mark.parametrize("path", ["/dash", "/docs"])
def test_the_other_pages(chrome: Browser, server: Running, axe: str, path: str) -> None:
    if server.ask("GET", path, headers={"Accept": "text/html"})[0] == 404:
        pytest.skip(f"there is no {path}")
    with chrome.page(f"{server.url}{path}") as page:
        for theme in THEMES:
            page.look(1200, 800, theme)
            assert findings(page, axe) == [], theme
