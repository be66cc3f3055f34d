"""The dashboard in a real browser."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from tests.server.browser import Browser, Page

LIVE = "document.getElementById('state').dataset.state === 'live'"


@contextmanager
def dash_page(browser: Browser, url: str) -> Iterator[Page]:
    """`url`: of a server. The page has its first figures."""
    with browser.page(f"{url}/dash") as page:
        page.wait_for(LIVE)
        yield page
