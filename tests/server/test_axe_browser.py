"""Every page, in both themes, as axe-core sees it."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.server.axe import fetch_axe, findings
from tests.server.browser import Browser, browser, chromium
from tests.server.chat_page import chat_page
from tests.server.running import Running, running
from tests.tiny import tiny_folder, tiny_llm

pytestmark = [
    pytest.mark.skipif(chromium() is None, reason="no Chromium is installed"),
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
def chrome() -> Iterator[Browser]:
    with browser() as one:
        yield one


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


@pytest.mark.parametrize("path", ["/dash", "/docs", "/learn"])
def test_the_other_pages(chrome: Browser, server: Running, axe: str, path: str) -> None:
    if server.ask("GET", path, headers={"Accept": "text/html"})[0] == 404:
        pytest.skip(f"there is no {path}")
    with chrome.page(f"{server.url}{path}") as page:
        for theme in THEMES:
            page.look(1200, 800, theme)
            assert findings(page, axe) == [], theme
