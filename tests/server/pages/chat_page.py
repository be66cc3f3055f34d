"""The chat page as its reader uses it, in a real browser."""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from tests.server.browser import Browser, Page

ANSWER_PATIENCE_S = 300  # for some hundred tokens, on a machine with much else to do
READY = "document.documentElement.dataset.ready === 'true'"
ANSWERS = "document.querySelectorAll('.message.assistant')"
WRITTEN = f"[...{ANSWERS}].filter(one => one.ariaBusy === 'false')"


class ChatPage:
    def __init__(self, page: Page) -> None:
        self.page = page

    def wait_until_ready(self) -> None:
        self.page.wait_for(f"document.readyState === 'complete' && {READY}")

    def reload(self) -> None:
        self.page.value("delete document.documentElement.dataset.ready")
        self.page.call("Page.reload")
        self.wait_until_ready()

    def say(self, text: str) -> None:
        self.page.value("document.getElementById('text').focus()")
        self.page.write(text)
        self.page.press("Enter")

    def ask(self, text: str) -> str:
        """The text of the answer, once it is written."""
        before = self.page.value(f"{ANSWERS}.length")
        self.say(text)
        self.page.wait_for(f"{WRITTEN}.length === {before + 1}", ANSWER_PATIENCE_S)
        return self.answer()

    def answer(self, number: int = -1) -> str:
        return self.page.value(f"[...{ANSWERS}].at({number}).querySelector('.content').innerText")

    def messages(self) -> list[str]:
        """What the reader has said and was answered, in order."""
        return self.page.value(
            "[...document.querySelectorAll('.message .content')].map(one => one.innerText)"
        )

    def click(self, name: str, within: str = "body") -> None:
        """The last button of this name or label."""
        self.page.value(f"{self.button(name, within)}.click()")

    def button(self, name: str, within: str = "body") -> str:
        return (
            f"[...document.querySelectorAll({within + ' button'!r})]"
            f".filter(one => [one.textContent, one.ariaLabel].includes({name!r})).at(-1)"
        )

    def always_answer(self, text: str | None, **more: Any) -> None:
        """From the next chat on the model can write nothing but `text`; None: what it likes."""
        fields = more if text is None else {"structured_outputs": {"choice": [text]}, **more}
        settings = {"system": "", "sampling": {}, "tools": "", "more": "", "details": True}
        settings |= {"more": json.dumps(fields) if fields else ""}
        stored = json.dumps(json.dumps(settings))
        self.page.value(f"localStorage.setItem('twostroke-chat-settings', {stored})")
        self.click("New chat")
        self.page.wait_for("document.querySelector('.empty') !== null")


@contextmanager
def chat_page(browser: Browser, url: str) -> Iterator[ChatPage]:
    with browser.page(url) as page:
        page.look(1200, 800, "light")
        chat = ChatPage(page)
        chat.wait_until_ready()
        chat.always_answer(None)  # as if nobody had been here
        yield chat
