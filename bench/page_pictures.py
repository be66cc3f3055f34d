"""Screenshots of the pages, made with the default model on this machine.

    python -m bench.page_pictures chat FOLDER
    python -m bench.page_pictures learn FOLDER
    python -m bench.page_pictures dash FOLDER
    python -m bench.page_pictures lessons FOLDER

chat, learn, dash: a PNG of every view of the page, in light, dark and narrow.
lessons: the six lessons as a reader meets them, each a text file and a PNG for every screen. Ideas
have been run, and questions are not answered; the engine's answers are in FOLDER/answers.

They need Chromium and the tests' folder.
"""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from itertools import count
from pathlib import Path
from threading import Event, Thread

from bench.witness import get_json, post_json
from tests.server.browser import Page, browser
from tests.server.dashboard.dash_page import dash_page
from tests.server.learn.learn_page import LearnPage, learn_page
from tests.server.pages.chat_page import ANSWERS, ChatPage, chat_page
from twostroke.measure.compare.arms import serving

LESSONS = 6
MEASURED_S = 120.0  # until the server has measured its machine
LEARN = f"{sys.executable} -m twostroke learn --no-browser --port {{port}}"
KEY = "a-key"
POOLS = "--prefill-engines 1 --decode-engines 1"
CLIENTS = 5
BUSY = "Number(document.getElementById('total-requests').dataset.value) >= 12"
LOOKS = {"light": (1200, 800, "light"), "dark": (1200, 800, "dark"), "phone": (390, 844, "dark")}
QUESTION = "Explain in two short sentences why a long prompt is slow to start."
CODE = "Write a Python function that adds two numbers, as a code block, and say what it does."
ABOUT = """Six lessons about how a language model's server answers, in order. Each lesson has a
question before, ideas with a run of the engine, and a question after. Read lesson-N.md with the
pictures lesson-N-S.png (S is the number of the screen), then answer both questions with an option
and a sentence, and say what was confusing or wrong.
"""


@contextmanager
def measured_server() -> Iterator[str]:
    """Start `twostroke learn`, and yield its URL after the calibration."""
    with serving([LEARN]) as (url,):
        until = time.monotonic() + MEASURED_S
        while get_json(f"{url}/learn/facts")["ops_per_s"] is None and time.monotonic() < until:
            time.sleep(1.0)
        yield url


# ── lessons ───────────────────────────────────────────────────────────────────────────────────────


def lessons(folder: Path) -> None:
    (folder / "answers").mkdir(parents=True, exist_ok=True)
    (folder / "README.md").write_text(ABOUT)
    with (
        measured_server() as url,
        browser() as chrome,
        learn_page(chrome, f"{url}/learn") as learn,
    ):
        learn.page.look(1000, 900, "light")
        for number in range(1, LESSONS + 1):
            lesson(learn, number, folder)
            print(f"lesson {number}", flush=True)
    (folder / "READY").write_text("")


def lesson(learn: LearnPage, number: int, folder: Path) -> None:
    learn.go(f"lesson/{number}/1")
    texts, answers = [], []
    for screen in range(1, learn.screens() + 1):
        learn.go(f"lesson/{number}/{screen}")
        name = f"lesson-{number}-{screen}"
        if not learn.is_question():
            run_idea(learn)
        learn.page.picture(folder / f"{name}.png")
        texts.append(f"## Screen {screen} ({name}.png)\n\n{learn.text()}\n")
        if learn.is_question():
            learn.answered(0)
            learn.answered(learn.right_option())
            learn.page.picture(folder / "answers" / f"{name}.png")
            answers.append(f"## Screen {screen}\n\n{learn.text()}\n")
    (folder / f"lesson-{number}.md").write_text("\n".join(texts))
    (folder / "answers" / f"lesson-{number}.md").write_text("\n".join(answers))


def run_idea(learn: LearnPage) -> None:
    """Press all buttons on the screen of an idea."""
    if learn.shown("[data-view=prompt]"):
        run_prompt(learn)
    elif learn.shown("[data-view=predict]"):
        learn.run("calibration")
        learn.run("predict")
    else:
        for one in learn.shown("[data-run]"):
            learn.run(one["run"])


def run_prompt(learn: LearnPage) -> None:
    """Run the prompt twice, so that the second run finds its blocks, and open the panels."""
    for _ in range(2):
        learn.run("run")
    learn.page.value("document.querySelectorAll('details').forEach(one => { one.open = true })")
    learn.run("attention")


# ── views ─────────────────────────────────────────────────────────────────────────────────────────


def take(page: Page, folder: Path, name: str, whole: bool = False) -> None:
    """Take a screenshot. `whole`: the whole page instead of the window."""
    for look, (width, height, scheme) in LOOKS.items():
        page.look(width, height, scheme)
        page.value("new Promise(done => requestAnimationFrame(() => requestAnimationFrame(done)))")
        page.picture(folder / f"{name}-{look}.png", whole)
    page.look(*LOOKS["light"])


def chat_views(folder: Path) -> None:
    with browser() as chrome, serving(["", f"--api-key {KEY}"]) as (url, with_key):
        with chat_page(chrome, f"{url}/") as chat:
            conversation(chat, folder)
        with chrome.page(f"{with_key}/") as page:
            page.wait_for("document.querySelector('dialog[open]') !== null")
            take(page, folder, "chat-key")


def conversation(chat: ChatPage, folder: Path) -> None:
    page = chat.page
    take(page, folder, "chat-empty")
    chat.ask(QUESTION)
    chat.ask(CODE)
    take(page, folder, "chat-conversation")
    chat.click("Tokens")
    page.value(f"[...{ANSWERS}].at(-1).querySelector('.token')?.focus()")
    take(page, folder, "chat-gaps")
    chat.click("Probability")
    take(page, folder, "chat-probability")
    for name in ("settings", "keys"):
        page.value(f"document.getElementById('{name}').click()")
        take(page, folder, f"chat-{name}")
        page.press("Escape")
    page.look(*LOOKS["phone"])
    page.value("document.getElementById('menu').click()")
    page.picture(folder / "chat-drawer-phone.png", whole=False)


def learn_views(folder: Path) -> None:
    with (
        measured_server() as url,
        browser() as chrome,
        learn_page(chrome, f"{url}/learn") as learn,
    ):
        page = learn.page
        take(page, folder, "learn-start", whole=True)
        for view in ("prompt", "roofline", "predict", "company"):
            learn.go(view)
            run_idea(learn)
            take(page, folder, f"learn-{view}", whole=True)
        for number in range(1, LESSONS + 1):
            learn.go(f"lesson/{number}/1")
            take(page, folder, f"learn-lesson-{number}", whole=True)
            learn.answered(0)
            take(page, folder, f"learn-lesson-{number}-answered", whole=True)
        for view, button in (("quiz", "answer"), ("myths", "settle")):
            learn.go(view)
            page.value("document.querySelector('[data-option] input')?.click()")
            learn.run(button)
            take(page, folder, f"learn-{view}", whole=True)


# ── dashboard ─────────────────────────────────────────────────────────────────────────────────────


def dash_views(folder: Path) -> None:
    with browser() as chrome:
        with serving([""]) as (url,), dash_page(chrome, url) as page:
            take(page, folder, "dash-idle", whole=True)
            with load(url):
                page.wait_for(BUSY)
                take(page, folder, "dash", whole=True)
            page.value("document.querySelectorAll('details').forEach(one => { one.open = true })")
            page.value("document.getElementById('steps').focus()")
            page.press("ArrowLeft")
            take(page, folder, "dash-step", whole=True)
        with serving([POOLS]) as (url,), dash_page(chrome, url) as page, load(url):
            page.wait_for(BUSY)
            take(page, folder, "dash-pools", whole=True)


@contextmanager
def load(url: str) -> Iterator[None]:
    """Clients that talk with the server: long and short prompts, some of them known."""
    ended = Event()

    def client(number: int) -> None:
        talk: list[dict[str, str]] = []
        for turn in count():
            if ended.is_set():
                return
            words = "the sea, the wind and the ships " * (2 + 10 * ((number + turn) % 4))
            talk = [*talk[-4:], {"role": "user", "content": f"{number}: tell me about {words}"}]
            body = {"messages": talk, "max_tokens": 24 + 12 * number, "stream": False}
            text = post_json(f"{url}/v1/chat/completions", body)["choices"][0]["message"]["content"]
            talk.append({"role": "assistant", "content": text})

    threads = [Thread(target=client, args=(number,), daemon=True) for number in range(CLIENTS)]
    for thread in threads:
        thread.start()
    try:
        yield
    finally:
        ended.set()
        for thread in threads:
            thread.join()


COMMANDS = {"chat": chat_views, "learn": learn_views, "dash": dash_views, "lessons": lessons}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("what", choices=tuple(COMMANDS))
    parser.add_argument("folder", type=Path)
    args = parser.parse_args()
    args.folder.mkdir(parents=True, exist_ok=True)
    COMMANDS[args.what](args.folder)


if __name__ == "__main__":
    main()
