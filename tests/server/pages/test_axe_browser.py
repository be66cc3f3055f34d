"""Every page, in both themes, as axe-core sees it."""

from __future__ import annotations

import json
import os
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.cli.test_serve import started
from tests.server.browser import Browser
from tests.server.dashboard.dash_page import dash_page
from tests.server.learn.learn_page import learn_page
from tests.server.pages.axe import AxeCheck, fetch_axe
from tests.server.pages.chat_page import chat_page
from tests.server.running import Running, running
from tests.server.scripted import scripted_llm
from tests.tiny import CHAT_TEMPLATE, tiny_folder, tiny_llm
from twostroke.config import EngineConfig
from twostroke.kernels import cpu
from twostroke.observe.ceilings import Ceilings
from twostroke.serve.monitor.ceilings_probe import CeilingsProbe

pytestmark = pytest.mark.network

TEXT = (
    "# A heading\n\nwith [a link](https://example.org) and `code`\n\n```python\nprint(1)\n```\n\n"
    "| a | b |\n|---|--:|\n| 1 | 2 |\n\n> said\n\n- [x] done\n- open\n"
)
WIDTHS = pytest.mark.parametrize(
    "width",
    [pytest.param(1200, marks=pytest.mark.full), pytest.param(390, marks=pytest.mark.long)],
)
OPEN_ALL = "document.querySelectorAll('details').forEach(one => { one.open = true })"


@pytest.fixture(scope="module")
def axe(tmp_path_factory: pytest.TempPathFactory) -> str:
    return fetch_axe(tmp_path_factory.mktemp("axe"))


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Running]:
    """A server with measured ceilings, which the sliders of `/learn` need."""
    path = tmp_path_factory.mktemp("tiny") / "tiny"
    llm = tiny_llm(tiny_folder(path, max_position_embeddings=2048))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(CeilingsProbe, "ceilings", Ceilings(2e10, 4e11))
        with running(llm, engine=EngineConfig(model=str(path))) as server:
            yield server


# ── the chat ──────────────────────────────────────────────────────────────────────────────────────


@WIDTHS
def test_the_chat_in_each_of_its_states(
    chrome: Browser, server: Running, axe: str, width: int
) -> None:
    with chat_page(chrome, f"{server.url}/") as chat:
        page, check = chat.page, AxeCheck(chat.page, axe, width)
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
        for name in ("settings", "keys", "rename", "delete"):
            page.value(f"document.getElementById('{name}').click()")
            page.wait_for("document.querySelector('dialog[open]') !== null")
            page.value(OPEN_ALL)
            check(name)
            page.press("Escape")
            page.wait_for("document.querySelector('dialog') === null")
        chat.click("Edit")
        check("editing")
        if width < 760:
            page.value("document.getElementById('menu').click()")
            check("drawer")


@pytest.mark.full
def test_the_chat_with_reasoning_a_tool_call_and_an_error(
    chrome: Browser, axe: str, tmp_path: Path
) -> None:
    llm, model = scripted_llm(tmp_path / "m", CHAT_TEMPLATE, ["<think>", "</think>"])
    tools = [{"type": "function", "function": {"name": "now", "parameters": {"type": "object"}}}]
    settings = json.dumps(json.dumps({"details": False, "tools": json.dumps(tools)}))
    parsers = {"reasoning_parser": "qwen3", "tool_call_parser": "hermes"}
    with running(llm, **parsers) as server, chat_page(chrome, f"{server.url}/") as chat:
        page, check = chat.page, AxeCheck(chat.page, axe, 1200)
        page.value(f"localStorage.setItem('twostroke-chat-settings', {settings})")
        chat.click("New chat")
        page.wait_for("document.querySelector('.empty') !== null")
        model.write(
            '<think>I look</think>so <tool_call>{"name": "now", "arguments": {}}</tool_call>'
        )
        chat.ask("when?")
        page.value(OPEN_ALL)
        check("a tool call")
        server.server.stop()
        server.thread.join()
        chat.click("Edit")
        chat.click("Send as a new branch")
        page.wait_for("document.querySelector('.message .error:not([hidden])') !== null")
        check("no server")


# ── /learn ────────────────────────────────────────────────────────────────────────────────────────


@WIDTHS
def test_every_tool_of_learn(chrome: Browser, server: Running, axe: str, width: int) -> None:
    with learn_page(chrome, f"{server.url}/learn") as learn:
        check = AxeCheck(learn.page, axe, width)
        check("start")
        learn.go("company")
        check("company, nothing has run")
        for name in ("stall", "batch", "context", "prefix", "full_cache"):
            learn.run(name)
        check("company")
        learn.go("prompt")
        learn.run("run")
        learn.page.value(OPEN_ALL)
        learn.run("attention")
        check("prompt")
        learn.go("predict")
        learn.run("predict")
        check("predict")
        for view in ("sliders", "roofline"):
            learn.go(view)
            learn.page.value(OPEN_ALL)
            check(view)
        learn.go("quiz")
        learn.answered(0)
        check("quiz")
        learn.go("myths")
        learn.run("settle")
        check("myths")


@pytest.mark.full
@pytest.mark.parametrize("number", range(1, 7))
def test_every_screen_of_a_lesson(chrome: Browser, server: Running, axe: str, number: int) -> None:
    with learn_page(chrome, f"{server.url}/learn", f"lesson/{number}/1") as learn:
        check = AxeCheck(learn.page, axe, 1200)
        for screen in range(1, learn.screens() + 1):
            learn.go(f"lesson/{number}/{screen}")
            if learn.is_question():
                check(f"screen {screen}, not answered")
                learn.answered(0)
            else:
                for one in learn.shown("[data-run]"):
                    learn.run(one["run"])
            check(f"screen {screen}")


@pytest.mark.full
def test_an_experiment_that_is_refused(chrome: Browser, server: Running, axe: str) -> None:
    with learn_page(chrome, f"{server.url}/learn", "prompt") as learn:
        learn.page.value("document.querySelector('textarea').value = 'fox '.repeat(600)")
        learn.page.value("document.querySelector('[data-run=run]').click()")
        learn.page.wait_for("document.querySelector('#view .error:not([hidden])') !== null")
        AxeCheck(learn.page, axe, 1200)("refused")


# ── the others ────────────────────────────────────────────────────────────────────────────────────


@WIDTHS
def test_the_dashboard_in_each_of_its_states(
    chrome: Browser, folder: Path, axe: str, width: int
) -> None:
    with (
        running(tiny_llm(folder)) as server,
        dash_page(chrome, server.url) as page,
    ):
        check = AxeCheck(page, axe, width)
        check("no request yet")
        for n in range(4):
            body = {"prompt": [5, 6, 7] * (n + 4), "max_tokens": 8, "ignore_eos": True}
            server.post("/v1/completions", body)
        page.wait_for("state.steps.length > 20 && state.feed.slowest.length === 4")
        page.value("document.getElementById('steps').focus()")
        page.press("ArrowLeft")
        page.value(OPEN_ALL)
        check("a step is chosen")
        page.value("document.getElementById('pause').click()")
        check("paused")


@pytest.mark.full
@pytest.mark.skipif(
    not cpu.available() or not hasattr(os, "memfd_create"), reason="native kernels on Linux only"
)
def test_the_dashboard_with_pools(chrome: Browser, folder: Path, axe: str) -> None:
    pools = ["--prefill-engines", "1", "--decode-engines", "1", "--num-gpu-blocks-override", "64"]
    with started("twostroke", "serve", str(folder), *pools) as server:
        body = {"prompt": [5, 6, 7] * 20, "max_tokens": 8, "ignore_eos": True}
        assert server.ask("/v1/completions", body)[0] == 200
        with dash_page(chrome, f"http://127.0.0.1:{server.port}") as page:
            page.wait_for("!document.getElementById('transfers-box').hidden")
            AxeCheck(page, axe, 1200)("pools")


@pytest.mark.full
@pytest.mark.parametrize(
    ("path", "asked"),
    [
        ("/", "document.activeElement?.id === 'api-key'"),
        ("/learn", "document.activeElement?.id === 'api-key'"),
        ("/dash", "document.activeElement?.id === 'key-text'"),
    ],
)
def test_each_page_that_asks_for_a_key(
    chrome: Browser, folder: Path, axe: str, path: str, asked: str
) -> None:
    with (
        running(tiny_llm(folder), api_keys=("sesame",)) as server,
        chrome.page(f"{server.url}{path}") as page,
    ):
        page.wait_for(asked)
        AxeCheck(page, axe, 1200)("key")


@pytest.mark.full
def test_the_list_of_routes(chrome: Browser, server: Running, axe: str) -> None:
    with chrome.page(f"{server.url}/docs") as page:
        AxeCheck(page, axe, 1200)("docs")
