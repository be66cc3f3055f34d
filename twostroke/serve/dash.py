"""`/dash`: one page that needs nothing but this server, and the feed it reads.

The page holds no data, so it is anybody's; the feed wants the key, as `/metrics` does. A page that
is looked at asks twice a second, any other not at all. However many look on, `MOST_A_SECOND`
answers are made; who comes too often is told to wait, and nobody else notices.
"""

from __future__ import annotations

import base64
import re
from hashlib import sha256
from importlib.resources import files
from time import monotonic
from urllib.parse import parse_qs

from twostroke.serve.board import SLOW_BY, WINDOWS, Board
from twostroke.serve.errors import ApiError, retry_after
from twostroke.serve.exchange import JSON, Exchange, Headers
from twostroke.serve.service import Service

MOST_A_SECOND = 20.0
NEVER_KEPT = (b"cache-control", b"no-store")


class Dash:
    def __init__(self, service: Service) -> None:
        self._service = service
        self._board = Board(service.client, service.metrics.totals)
        self._page = files("twostroke.serve").joinpath("dash.html").read_bytes()
        self._headers = page_headers(self._page.decode())
        self._answers, self._told_s = MOST_A_SECOND, 0.0  # left to give, and when that was known

    async def page(self, exchange: Exchange) -> None:
        await exchange.answer(200, self._page, self._headers)

    async def feed(self, exchange: Exchange) -> None:
        since, window, slow_by = _asked(exchange)
        self._pace()
        told = self._board.tell(self._service.models[0], since, window, slow_by)
        told["server"]["draining"] = self._service.admission.draining
        await exchange.answer_json(told, (*JSON, NEVER_KEPT))

    def _pace(self) -> None:
        now = monotonic()
        left = self._answers + (now - self._told_s) * MOST_A_SECOND
        self._answers, self._told_s = min(left, MOST_A_SECOND), now
        if self._answers < 1.0:
            message = "too many look at the dashboard; ask less often"
            raise ApiError(429, message, code="too_many_watchers", headers=retry_after(2))
        self._answers -= 1.0


def page_headers(page: str) -> Headers:
    """Nothing but the page's own script and style runs, and it can speak to nobody but us."""
    script, style = (_hash_of(tag, page) for tag in ("script", "style"))
    policy = (
        f"default-src 'none'; script-src {script}; style-src {style}; connect-src 'self'; "
        "img-src data:; base-uri 'none'; form-action 'none'; frame-ancestors 'none'"
    )
    return (
        (b"content-type", b"text/html; charset=utf-8"),
        (b"content-security-policy", policy.encode()),
        (b"x-content-type-options", b"nosniff"),
        (b"referrer-policy", b"no-referrer"),
        NEVER_KEPT,
    )


def _hash_of(tag: str, page: str) -> str:
    (text,) = re.findall(f"<{tag}>(.*?)</{tag}>", page, re.DOTALL)
    return f"'sha256-{base64.b64encode(sha256(text.encode()).digest()).decode()}'"


def _asked(exchange: Exchange) -> tuple[int, str, str]:
    asked = parse_qs(exchange.scope.get("query_string", b"").decode("latin-1"))
    since = asked.get("since", ["0"])[-1]
    window, slow_by = asked.get("window", ["60"])[-1], asked.get("slow", ["total"])[-1]
    if not (since.isascii() and since.isdigit() and len(since) < 16):
        raise ApiError(400, "since is the num_steps of the last answer", param="since")
    for name, value, known in (("window", window, WINDOWS), ("slow", slow_by, SLOW_BY)):
        if value not in known:
            raise ApiError(400, f"{name} is one of {', '.join(known)}", param=name)
    return int(since), window, slow_by
