"""Who may ask, and how many may wait."""

from __future__ import annotations

import hmac
import os
from collections.abc import Iterator
from contextlib import contextmanager
from hashlib import sha256

from twostroke.engine.api import EngineClient
from twostroke.serve.bounds import head_too_large
from twostroke.serve.errors import ApiError, retry_after, unavailable
from twostroke.serve.exchange import Exchange

MAX_CHOICES, CHOICES_PER_CORE = 128, 8


class Keys:
    """API keys, compared in a time that tells nothing: digests, all of them, every time."""

    def __init__(self, keys: tuple[str, ...]) -> None:
        self._digests = [sha256(key.encode()).digest() for key in keys]

    def check(self, exchange: Exchange) -> None:
        """Notes which key it was (`exchange.key_number`)."""
        if not self._digests:
            return
        given = sha256(_given_key(exchange)).digest()
        matches = [hmac.compare_digest(given, digest) for digest in self._digests]
        if not any(matches):
            raise ApiError(
                401,
                "a valid API key is needed, as 'Authorization: Bearer KEY'",
                code="invalid_api_key",
                headers=((b"www-authenticate", b"Bearer"),),
            )
        exchange.key_number = matches.index(True)


def _given_key(exchange: Exchange) -> bytes:
    scheme, _, key = (exchange.header(b"authorization") or b"").partition(b" ")
    if scheme.lower() == b"bearer":
        return key.strip()
    return exchange.header(b"x-api-key") or b""


def check_head(exchange: Exchange, max_bytes: int) -> None:
    """A head that came in one piece has not been measured on the wire."""
    scope = exchange.scope
    num_bytes = len(scope.get("raw_path") or b"") + len(scope.get("query_string") or b"")
    num_bytes += sum(len(name) + len(value) + 4 for name, value in scope["headers"])
    if num_bytes > max_bytes:
        raise head_too_large(max_bytes)


class Admission:
    """Counts the sequences this server has open, so that they cannot pile up without bound."""

    def __init__(self, client: EngineClient, max_queue: int, max_choices: int | None) -> None:
        self._client = client
        self._max_queue = max_queue
        # They are written side by side, so all streams wait for all of them in every step.
        on_gpu = client.info.device.startswith("cuda")
        most = MAX_CHOICES if on_gpu else min(MAX_CHOICES, CHOICES_PER_CORE * (os.cpu_count() or 1))
        self._max_choices = max_choices or most
        self.num_open = 0
        self.draining = False

    def check(self, count: int = 1) -> None:
        """Refuse early, before a prompt is read, what would be refused later."""
        if self.draining:
            raise unavailable("the server is shutting down; ask another one")
        if not self._client.healthy:
            raise unavailable("the engine is not running; try again in a moment")
        # The engine's own word may be a moment old, and memory may hold fewer than
        # max_num_seqs: so both counts are looked at.
        limit = self._client.info.max_num_seqs + self._max_queue
        most = min(limit, self._max_choices)
        if count > most:
            raise ApiError(
                400,
                f"n: {count} texts are asked for at once (prompts times n), and at most {most} may "
                "be; send several requests, or raise --max-choices",
                param="n",
            )
        waiting = self._client.load().waiting
        if self.num_open + count > limit or (waiting and waiting + count > self._max_queue):
            raise ApiError(
                429,
                f"{waiting} requests are waiting, and at most {self._max_queue} may; try again "
                "in a moment",
                code="queue_full",
                headers=retry_after(1),
            )

    @contextmanager
    def enter(self, count: int) -> Iterator[None]:
        self.check(count)
        self.num_open += count
        try:
            yield
        finally:
            self.num_open -= count
