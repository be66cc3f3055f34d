"""The chat page in a real browser, against a real server: whole conversations."""

from __future__ import annotations

import base64
import json
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.server.browser import ALT, CONTROL, KEY_EVENT, SHIFT, Browser, Page
from tests.server.legible import each_look
from tests.server.pages.chat_page import ANSWERS, WRITTEN, ChatPage, chat_page
from tests.server.running import Running, running
from tests.server.scripted import scripted_llm
from tests.tiny import CHAT_TEMPLATE, tiny_folder, tiny_llm

# A model could write this. None of it may become an element, run, or lead anywhere.
INJECTIONS = [
    "<script>window.hurt=1</script>",
    "<img src=x onerror='window.hurt=1'>",
    "[a](javascript:window.hurt=1)",
    "[b](data:text/html,<script>window.hurt=1</script>)",
    "![c](http://evil.example/pixel.png)",
    "<div><b><svg onload=window.hurt=1></b></div>",
    "<style>body{display:none}</style>",
    "**<iframe src=http://evil.example>**",
    "`</code></pre><img>`",
]
DOT = (  # a PNG of one pixel
    "iVBORw0KGgoAAAANSUhEUgAAAAEAAAABCAYAAAAfFcSJAAAADUlEQVR42mNk+M9QDwADhgGAWjR9awAAAABJRU5ErkJggg=="
)
CODE = "so:\n\n```python\nprint(1 < 2)\n```\n\n- a *b*\n- **c**"


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_folder(tmp_path_factory.mktemp("tiny") / "tiny", max_position_embeddings=2048)


@pytest.fixture(scope="module")
def server(folder: Path) -> Iterator[Running]:
    with running(tiny_llm(folder)) as server:
        yield server


@pytest.fixture
def chat(chrome: Browser, server: Running) -> Iterator[ChatPage]:
    with chat_page(chrome, f"{server.url}/") as chat:
        yield chat
        assert chat.page.errors == []
        own = (server.url, "data:", "blob:", "about:")
        assert [url for url in chat.page.asked if not url.startswith(own)] == []


def test_two_turns_with_a_code_block_survive_a_reload(chat: ChatPage, server: Running) -> None:
    chat.always_answer(CODE)
    first = chat.ask("how?")
    assert "print(1 < 2)" in first
    assert chat.page.value("document.querySelector('pre code').textContent") == "print(1 < 2)"
    assert chat.page.value("document.querySelector('.markdown strong').textContent") == "c"
    chat.page.call("Browser.grantPermissions", permissions=["clipboardReadWrite"])
    chat.click("Copy code")
    chat.page.wait_for(f"{chat.button('Copy code')}.textContent === 'Copied'")
    chat.page.wait_for(f"{chat.button('Copy code')}.textContent === 'Copy'")
    figures = chat.page.value("document.querySelector('.figures').innerText")
    assert all(word in figures for word in ("TTFT", "tok/s", "cached", "tokens"))
    chat.ask("again")
    assert len(chat.messages()) == 4
    told = chat.messages()
    chat.page.wait_for("document.getElementById('context').textContent.includes('left')")
    chat.reload()
    assert chat.messages() == told
    assert chat.page.value("document.getElementById('title').textContent") == "how?"
    server.assert_idle()


@pytest.mark.core
@pytest.mark.parametrize("text", ["\n\n".join(INJECTIONS)])
def test_what_the_model_writes_never_becomes_html(chat: ChatPage, text: str) -> None:
    chat.always_answer(text)
    shown = chat.ask("<b>hello</b><script>window.hurt=1</script>")
    assert chat.messages()[0] == "<b>hello</b><script>window.hurt=1</script>"
    for part in ("<script>window.hurt=1</script>", "onerror=", "<iframe src=", "<svg onload"):
        assert part in shown
    strange = "script,img,iframe,svg,style,object,embed,form form,[onerror],[onload],[style]"
    assert chat.page.value("document.querySelectorAll('.message').length") == 2
    assert chat.page.value(f"document.querySelectorAll('#log :is({strange})').length") == 0
    links = "[...document.querySelectorAll('#log a')].map(one => one.protocol + one.target)"
    assert set(chat.page.value(links)) == {"http:_blank"}, "a link is followed by a click alone"
    assert chat.page.value("window.hurt") is None


@pytest.mark.full
def test_an_answer_is_stopped_asked_again_and_a_question_edited_into_a_branch(
    chat: ChatPage, server: Running
) -> None:
    chat.always_answer(None, ignore_eos=True, max_tokens=1500)
    with server.steps_await_messages(after=60):
        chat.say("a long one")
        chat.page.wait_for(
            "document.querySelector('.message.assistant .content').innerText.length > 20"
        )
        chat.page.press("Escape")
        chat.page.wait_for(f"{WRITTEN}.length === 1")
    assert "You stopped" in chat.page.value("document.querySelector('.assistant').innerText")
    server.assert_idle()
    stopped = chat.answer()
    chat.always_answer("yes")
    assert chat.ask("one") == "yes"
    chat.click("Regenerate")
    chat.page.wait_for("document.querySelector('.assistant .branch')?.innerText.includes('2 of 2')")
    chat.page.wait_for(f"{WRITTEN}.length === 1")
    chat.click("Edit")
    chat.page.wait_for("document.activeElement.tagName === 'TEXTAREA'")
    chat.page.value("document.activeElement.select()")
    chat.page.write("two")
    chat.click("Send as a new branch")
    chat.page.wait_for(f"{WRITTEN}.length === 1")
    assert chat.messages() == ["two", "yes"]
    chat.click("Previous version", ".user")
    assert chat.messages() == ["one", "yes"]
    assert chat.page.value("document.querySelector('.assistant .branch').innerText").count("2") == 2
    # The stopped one is still in the list, as it was.
    chat.page.value("document.querySelectorAll('#conversations button')[1].click()")
    chat.page.wait_for("document.getElementById('title').textContent === 'a long one'")
    assert chat.answer() == stopped


@pytest.mark.full
def test_each_token_tells_its_gap_by_cause_and_its_alternatives(
    chat: ChatPage, server: Running
) -> None:
    chat.always_answer(None, ignore_eos=True, max_tokens=40)
    chat.ask("tokens")
    (record,) = list(server.client.records.requests)[-1:]
    chat.click("Tokens")
    place = "one => [one('.token-view').bottom, one('#log').bottom]"
    box = "name => document.querySelector(name).getBoundingClientRect()"
    bottom, window_bottom = chat.page.value(f"({place})({box})")
    assert bottom <= window_bottom + 1, "the tokens are in view"
    tokens = chat.page.value("document.querySelectorAll('.tokens [role=option]').length")
    assert tokens == len(record.token_s) == 40
    assert record.gap_causes is not None
    assert chat.page.value("document.querySelector('.legend').innerText").startswith("own decode")
    chat.page.value("document.querySelector('.tokens').focus()")
    for n, key in ((1, "ArrowRight"), (39, "End")):
        chat.page.press(key)
        about = chat.page.value("document.querySelector('.about-token').innerText")
        gap_ms = 1e3 * sum(record.gap_causes[6 * (n - 1) : 6 * n])
        assert f"Token {n + 1} of 40" in about
        assert abs(
            _milliseconds(about.split(" after the previous token")[0].split("  ")[-1]) - gap_ms
        ) <= max(0.6, 0.01 * gap_ms)
        assert "own decode" in about
    rows = "document.querySelectorAll('.alternatives tbody tr').length"
    assert chat.page.value(rows) >= 5
    chat.click("Probability")
    assert chat.page.value("document.querySelector('.tokens span').className").startswith("shade-")


def _milliseconds(text: str) -> float:
    """The number at the end of a text such as "… 1.25 s"."""
    number, unit = text.split()[-2:]
    return float(number) * {"ms": 1.0, "s": 1e3}[unit]


@pytest.mark.full
def test_settings_reach_the_request_and_a_new_chat_begins_with_them(
    chat: ChatPage, server: Running
) -> None:
    chat.click("Settings")
    chat.page.wait_for("document.querySelector('dialog[open]') !== null")
    chat.page.value("document.getElementById('set-system').focus()")
    chat.page.write("be brief")
    chat.page.value("document.getElementById('set-max_tokens').focus()")
    chat.page.write("7")
    chat.page.value("document.getElementById('set-tools').value = '{'")
    chat.click("Save")
    said = "document.querySelector('dialog .error').textContent"
    assert chat.page.value(said).startswith("Tools: this is not JSON")
    chat.page.value("document.getElementById('set-tools').value = ''")
    chat.click("Save")
    chat.page.wait_for("document.querySelector('dialog') === null")
    chat.ask("hello")
    (record,) = list(server.client.records.requests)[-1:]
    assert record.max_tokens == 7
    plain = server.post("/tokenize", {"messages": [{"role": "user", "content": "hello"}]})["count"]
    assert record.num_prompt > plain, "the system prompt is before it"
    chat.click("New chat")
    chat.click("Settings")
    assert chat.page.value("document.getElementById('set-max_tokens').value") == "7"
    chat.page.press("Escape")


@pytest.mark.full
def test_a_chat_is_renamed_exported_deleted_and_imported_again(
    chat: ChatPage, tmp_path: Path
) -> None:
    chat.always_answer("kept")
    chat.ask("keep me")
    chat.click("Rename")
    chat.page.value("document.querySelector('dialog input').select()")
    chat.page.write("a name")
    chat.page.press("Enter")
    chat.page.wait_for("document.getElementById('title').textContent === 'a name'")
    folder = {"behavior": "allow", "downloadPath": str(tmp_path)}
    chat.page.call("Browser.setDownloadBehavior", **folder)
    chat.click("Export")
    file = tmp_path / "a-name.json"
    chat.page.wait_for("true")
    _wait_for_file(file)
    exported = json.loads(file.read_text())
    assert exported["format"] == "twostroke-chat"
    chat.click("Delete")
    chat.click("Delete", "dialog")
    chat.page.wait_for("document.querySelector('.empty') !== null")
    assert "a name" not in chat.page.value("document.getElementById('conversations').innerText")
    _choose_file(chat, file)
    chat.page.wait_for("document.getElementById('title').textContent === 'a name'")
    assert chat.messages() == ["keep me", "kept"]
    exported["conversations"][0]["nodes"]["x"] = {"id": "x", "role": "<img>", "parent": None}
    file.write_text(json.dumps(exported))
    _choose_file(chat, file)
    chat.page.wait_for("document.getElementById('notice').textContent.includes('unknown role')")


def _wait_for_file(file: Path) -> None:
    until = time.monotonic() + 60
    while not file.exists() or not file.read_text().endswith("}"):
        assert time.monotonic() < until, "nothing was downloaded"
        time.sleep(0.05)


def _choose_file(chat: ChatPage, file: Path, selector: str = "#file") -> None:
    root = chat.page.call("DOM.getDocument")["root"]["nodeId"]
    node = chat.page.call("DOM.querySelector", nodeId=root, selector=selector)["nodeId"]
    chat.page.call("DOM.setFileInputFiles", files=[str(file)], nodeId=node)


@pytest.mark.full
def test_reasoning_is_folded_and_tool_calls_take_a_result(chrome: Browser, tmp_path: Path) -> None:
    llm, model = scripted_llm(tmp_path / "m", CHAT_TEMPLATE, ["<think>", "</think>"])
    tools = [{"type": "function", "function": {"name": "now", "parameters": {"type": "object"}}}]
    with (
        running(llm, reasoning_parser="qwen3", tool_call_parser="hermes") as server,
        chat_page(chrome, f"{server.url}/") as chat,
    ):
        settings: dict[str, Any] = {"details": False, "tools": json.dumps(tools)}
        stored = json.dumps(json.dumps(settings))
        chat.page.value(f"localStorage.setItem('twostroke-chat-settings', {stored})")
        chat.click("New chat")
        chat.page.wait_for("document.querySelector('.empty') !== null")
        model.write(
            '<think>I look</think>so <tool_call>{"name": "now", "arguments": {}}</tool_call>'
        )
        assert chat.ask("when?").strip() == "so"
        fold = "document.querySelector('.reasoning')"
        assert chat.page.value(f"{fold}.open") is False
        assert chat.page.value(f"{fold}.querySelector('.markdown').textContent") == "I look"
        assert "now" in chat.page.value("document.querySelector('.call').innerText")
        model.write("at noon")
        chat.page.value("document.querySelector('.call textarea').focus()")
        chat.page.write("12:00")
        chat.click("Give the result to the model")
        chat.page.wait_for(f"{WRITTEN}.length === 2")
        assert chat.answer() == "at noon"
        assert chat.page.value("document.querySelector('.call form').hidden") is True
        assert chat.page.value("document.getElementById('attach').hidden") is True
        assert chat.page.errors == []


@pytest.mark.full
def test_with_a_key_the_page_asks_for_it_and_asks_again_if_it_is_wrong(
    chrome: Browser, folder: Path
) -> None:
    with (
        running(tiny_llm(folder), api_keys=("schlüssel",), root_path="/llm") as server,
        chrome.page(f"{server.url}/llm/") as page,
    ):
        page.wait_for("document.activeElement?.id === 'api-key'")
        page.write("wrong")
        page.press("Enter")
        page.wait_for("document.querySelector('dialog .error') !== null")
        page.write("schlüssel")
        page.press("Enter")
        chat = ChatPage(page)
        chat.wait_until_ready()
        assert page.value("document.getElementById('model').textContent") == "tiny"
        chat.always_answer("in")
        assert chat.ask("hello") == "in"
        chat.reload()
        assert chat.messages() == ["hello", "in"]
        assert not any("schl" in url for url in page.asked)


@pytest.mark.full
def test_a_whole_chat_by_keyboard_alone(chat: ChatPage, server: Running) -> None:
    page = chat.page
    written = f"{WRITTEN}.length === 1"
    page.inputs.clear()
    _set_other_fields(page, '{"ignore_eos": true, "max_tokens": 1500}')
    page.tab_to("Skip to the message field", SHIFT)
    page.press("Enter")
    with server.steps_await_messages(after=60):
        page.type("a chat to delete")
        page.press("Enter")
        page.wait_for("document.querySelector('.assistant .content')?.innerText.length > 20")
        page.press("Escape")
        page.wait_for(written)
    assert "You stopped" in page.value("document.querySelector('.assistant').innerText")
    page.press("n", ALT | SHIFT)
    page.wait_for(f"{ANSWERS}.length === 0 && document.activeElement.id === 'text'")
    _set_other_fields(page, '{"structured_outputs": {"choice": ["yes"]}}')
    page.tab_to("Message")
    page.type("one")
    page.press("Enter", SHIFT)
    page.type("line more")
    page.press("Enter")
    page.wait_for(written)
    assert chat.messages() == ["one\nline more", "yes"]
    page.type("two")
    page.press("Enter")
    page.wait_for(f"{WRITTEN}.length === 2")
    assert chat.messages()[2:] == ["two", "yes"]
    page.tab_to("Regenerate", SHIFT)
    page.press("Enter")
    page.wait_for(f"{WRITTEN}.length === 2 && document.querySelector('.branch') !== null")
    page.tab_to("Previous version", SHIFT)
    page.press(" ")
    page.wait_for("document.querySelector('.branch').innerText.includes('1 of 2')")
    page.tab_to("Tokens")
    page.press("Enter")
    page.tab_to("Probability")
    page.press(" ")
    page.tab_to("Tokens of this answer")
    page.press("ArrowRight")
    assert "Token 2 of" in page.value("document.querySelector('.about-token').innerText")
    page.tab_to("Edit", SHIFT)
    page.press("Enter")
    page.press("Escape")
    page.wait_for("document.querySelector('.editor') === null")
    assert page.focused() == "Edit"
    page.tab_to("Message")
    page.press("ArrowUp")
    page.press("End")
    page.type("!")
    page.tab_to("Send as a new branch")
    page.press("Enter")
    page.wait_for(f"{WRITTEN}.length === 2 && !document.querySelector('.editor')")
    assert chat.messages()[2] == "two!"
    page.tab_to("Rename", SHIFT)
    page.press("Enter")
    page.wait_for("document.activeElement.id === 'name'")
    page.type("mine")
    page.press("Enter")
    page.wait_for("document.getElementById('title').textContent === 'mine'")
    page.tab_to("Shortcuts", SHIFT)
    page.press("Enter")
    page.wait_for("document.querySelector('dialog[open]') !== null")
    page.press("Escape")
    page.wait_for("document.querySelector('dialog') === null")
    assert page.focused() == "Shortcuts"
    page.tab_to("a chat to delete", SHIFT)
    page.press("Enter")
    page.wait_for("document.getElementById('title').textContent === 'a chat to delete'")
    page.tab_to("Delete", SHIFT)
    page.press("Enter")
    page.wait_for("document.querySelector('dialog[open]') !== null")
    page.tab_to("Delete")
    page.press("Enter")
    page.wait_for(f"{ANSWERS}.length === 0 && document.activeElement.id === 'text'")
    assert "a chat to delete" not in page.value(
        "document.getElementById('conversations').innerText"
    )
    assert page.inputs == {KEY_EVENT}


def _set_other_fields(page: Page, fields: str) -> None:
    """Write the field for other fields of the request, with keys alone."""
    page.tab_to("Settings", SHIFT)
    page.press("Enter")
    page.wait_for("document.querySelector('dialog[open]') !== null")
    page.tab_to("Tools and other fields")
    if not page.value("document.querySelector('dialog details').open"):
        page.press("Enter")
    page.tab_to("Other fields of the request: a JSON object")
    page.press("a", CONTROL)
    page.type(fields)
    page.tab_to("Save")
    page.press("Enter")
    page.wait_for("document.querySelector('dialog') === null")
    assert page.focused() == "Settings"


@pytest.mark.full
def test_a_lost_server_is_told_and_the_text_stays(chrome: Browser, folder: Path) -> None:
    with running(tiny_llm(folder)) as server, chat_page(chrome, f"{server.url}/") as chat:
        server.server.stop()
        server.thread.join()
        chat.say("hello")
        chat.page.wait_for(
            "document.querySelector('.message .error')?.innerText.includes('does not answer')"
        )
        assert chat.messages()[0] == "hello"


@pytest.mark.full
def test_an_image_is_offered_where_the_model_takes_some_and_sent_with_the_message(
    chat: ChatPage, server: Running, tmp_path: Path
) -> None:
    attach = "document.getElementById('attach')"
    assert chat.page.value(f"{attach}.hidden") is True, "as /props says of the model"
    chat.page.value(f"{attach}.hidden = false")  # as it is with a model that takes images
    image = tmp_path / "dot.png"
    image.write_bytes(base64.b64decode(DOT))
    _choose_file(chat, image, "#image-file")
    chat.page.wait_for("document.querySelector('#images img') !== null")
    chat.say("what is it?")
    error = "document.querySelector('.message .error:not([hidden])')?.textContent ?? ''"
    chat.page.wait_for(f"({error}).includes('image')")
    assert chat.page.value("document.querySelector('.user img').naturalWidth") == 1
    chat.page.errors.clear()  # the browser's own line about status 400


@pytest.mark.full
def test_a_phone_has_the_whole_page_and_a_drawer_of_chats(chat: ChatPage) -> None:
    chat.always_answer("a" * 300)
    chat.ask("wide")
    for width, _ in each_look(chat.page, (320, 390, 768, 1200), 700):
        outside = (
            "[...document.querySelectorAll('button,textarea,.content')]"
            ".filter(one => one.offsetParent"
            f" && !one.closest('#sidebar') && one.getBoundingClientRect().right > {width} + 1)"
            ".map(one => one.outerHTML)"
        )
        assert chat.page.value(outside) == [], width
    chat.page.look(390, 700, "dark")
    chat.page.wait_for("document.getElementById('sidebar').inert")
    chat.click("Conversations")
    chat.page.wait_for("document.activeElement.id === 'new'")
    chat.page.press("Escape")
    assert chat.page.value("document.activeElement.id") == "menu"
    assert chat.page.value("document.getElementById('sidebar').inert")
