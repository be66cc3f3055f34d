"""The page `/learn` in a real browser, with the actions of a reader."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from tests.server.browser import Browser, Page

RUN_PATIENCE_S = 300  # for an experiment that starts engines, on a machine with much else to do
READY = "document.getElementById('view')?.dataset.ready"
IDLE = "document.querySelector('[aria-busy=true]') === null"
OPTIONS = "[...document.querySelectorAll('[data-option]')]"


class LearnPage:
    def __init__(self, page: Page) -> None:
        self.page = page

    def go(self, place: str) -> None:
        """Open a view, such as `roofline` or `lesson/2/1`."""
        self.page.value(f"location.hash = '#/{place}'")
        self.page.wait_for(f"{_is_shown(place)} && {IDLE}")

    def run(self, name: str) -> None:
        """Press a button that runs something, and wait for the end of the run."""
        self.page.value(f"document.querySelector('[data-run={name}]').click()")
        self.page.wait_for(IDLE, RUN_PATIENCE_S)
        problem = self.page.value(
            "document.querySelector('#view .error:not([hidden])')?.textContent"
        )
        assert problem is None, problem

    def last(self, name: str) -> Any:
        """The newest run of an experiment, as the page holds it."""
        module = "import('/static/learn/source.js')"
        return self.page.resolved(f"{module}.then(one => one.lastRun('{name}'))")

    def shown(self, selector: str) -> list[dict[str, str]]:
        """The data attributes of the elements."""
        found = f"[...document.querySelectorAll({selector!r})].map(one => ({{...one.dataset}}))"
        shown: list[dict[str, str]] = self.page.value(found)
        return shown

    def positions(self, selector: str) -> list[list[float]]:
        """The boxes of the elements of a picture, in its units: x, y, width, height."""
        box = "(one => [one.x, one.y, one.width, one.height])"
        found = f"[...document.querySelectorAll({selector!r})].map(one => {box}(one.getBBox()))"
        return [[float(one) for one in place] for place in self.page.value(found)]

    def ticks(self, picture: str, end: str) -> list[tuple[float, float]]:
        """The ticks of an axis of a picture: value and position. `end`: `x` or `y`, the coordinate
        that differs from tick to tick."""
        kind = {"x": "middle", "y": "end"}[end]
        texts = f"[...document.querySelectorAll('{picture} text.tick.{kind}')]"
        found = self.page.value(
            f"{texts}.map(one => [one.textContent, one.{end}.baseVal[0].value])"
        )
        below = {"x": 0, "y": 4}[end]  # the text of a tick stands so far below its line
        return [(_value(text), at - below) for text, at in found if text[0].isdigit()]

    def answered(self, option: int) -> str:
        """Choose an option and ask the engine. Return `right` or `wrong`."""
        self.page.value(f"{OPTIONS}[{option}].querySelector('input').click()")
        self.run("answer")
        return str(self.page.value("document.querySelector('[data-question]').dataset.answered"))

    def right_option(self) -> int:
        """The option that the page marks as right once a question has been answered."""
        return int(self.page.value(f"{OPTIONS}.findIndex(one => one.classList.contains('right'))"))

    def screens(self) -> int:
        """The number of screens of the lesson that is open."""
        return int(self.page.value("document.querySelectorAll('.progress li').length"))

    def is_question(self) -> bool:
        return bool(self.page.value("document.querySelector('[data-question]') !== null"))

    def text(self) -> str:
        """The visible text of the view, without the table of contents."""
        return str(self.page.value("document.getElementById('view').innerText"))


@contextmanager
def learn_page(browser: Browser, url: str, place: str = "") -> Iterator[LearnPage]:
    """`url`: of a server, or of an exported file."""
    with browser.page(f"{url}#/{place}" if place else url) as page:
        learn = LearnPage(page)
        page.wait_for(_is_shown(place))
        yield learn


def _is_shown(place: str) -> str:
    return f"{READY} === '{place.partition('?')[0] or 'start'}'"


def _value(text: str) -> float:
    """The number of a tick, such as `10.0 k` or `200 ms`."""
    number, _, unit = text.partition(" ")
    scales = {"": 1, "k": 1e3, "M": 1e6, "G": 1e9, "T": 1e12, "s": 1, "ms": 1e-3}
    return float(number.replace(",", "")) * scales[unit]
