"""API keys: without a key, no route acts or returns information."""

from __future__ import annotations

import json
import logging
import socket
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import msgspec
import pytest

from tests.server.http.raw_http import head, wait_until
from tests.server.running import JSON, PATIENCE_S, Running, running
from tests.tiny import tiny_llm
from twostroke.engine.core import EngineCore
from twostroke.request import EngineRequest
from twostroke.serve.fields.protocol import ErrorAnswer

pytestmark = pytest.mark.core  # bounds of security

KEYS = ("first-key", "zweiter-schlüssel")
# Pages and their files hold no data: what they show they ask of routes that need the key.
PAGES = {"/dash", "/learn", "/static/shared/base.css"}
OPEN = {"/health", "/v1/health", "/ping", *PAGES}


@pytest.fixture(scope="module")
def server(folder: Path) -> Iterator[Running]:
    with running(tiny_llm(folder), api_keys=KEYS) as server:
        yield server


def test_every_route_but_health_is_closed_without_a_key(server: Running) -> None:
    assert len(server.app.routes) >= 12
    for route in server.app.routes:
        body = b"{}" if route.method == "POST" else None
        wrong = ("", "Bearer", "Bearer ", "Bearer wrong", "first-key", "Basic first-key")
        for given in (None, *wrong):
            headers = JSON if given is None else {**JSON, "Authorization": given}
            path = route.path.replace("{file...}", "shared/base.css")
            status, names, answer = server.ask(route.method, path, body, headers)
            if path in OPEN:
                assert status == 200
                continue
            assert status == 401, (route.path, given, answer)
            error = msgspec.json.decode(answer, type=route.error)  # in the form of its API
            assert "a valid API key is needed" in str(error)
            if route.error is ErrorAnswer:
                assert json.loads(answer)["error"]["code"] == "invalid_api_key"
            assert names["www-authenticate"] == "Bearer"


@pytest.mark.parametrize("key", KEYS)
def test_every_route_is_open_with_one_of_the_keys(server: Running, key: str) -> None:
    for route in server.app.routes:
        body = b"{}" if route.method == "POST" else None
        for name, value in (
            ("Authorization", f"Bearer {key}".encode().decode("latin-1")),
            ("X-Api-Key", key.encode()),
        ):
            status = server.ask(route.method, route.path, body, {**JSON, name: value})[0]
            if route.acts:  # for an admin key alone, where there are several keys
                assert status == 403
                continue
            assert status in (200, 400, 501) or (status == 404 and "{" in route.path)


def test_without_a_key_one_does_not_learn_which_routes_there_are(server: Running) -> None:
    for method, path in (("GET", "/nothing"), ("GET", "/v1/completions"), ("PUT", "/tokenize")):
        assert server.ask(method, path)[0] == 401


def test_health_and_metrics_open_and_close_by_settings(folder: Path) -> None:
    settings = {"open_health": False, "open_metrics": True}
    with running(tiny_llm(folder), api_keys=KEYS, **settings) as server:
        assert server.ask("GET", "/health")[0] == 401
        assert server.ask("GET", "/ping")[0] == 401
        assert server.ask("GET", "/metrics")[0] == 200
        assert server.ask("GET", "/version")[0] == 401


HERE, THERE = "https://here.example", "https://there.example"
PREFLIGHT = {"Origin": HERE, "Access-Control-Request-Method": "POST"}
ALLOW = "access-control-allow-origin"


def test_pages_of_other_sites_may_ask_only_where_they_are_named(folder: Path) -> None:
    with running(tiny_llm(folder)) as server:
        assert ALLOW not in server.ask("OPTIONS", "/v1/models", None, PREFLIGHT)[1]
    with running(tiny_llm(folder), cors_origins=(HERE,)) as server:
        asked = {**PREFLIGHT, "Access-Control-Request-Headers": "authorization, x-own"}
        status, headers, body = server.ask("OPTIONS", "/v1/models", None, asked)
        assert (status, body, headers[ALLOW]) == (200, b"OK", HERE)
        assert headers["access-control-allow-methods"] == "GET, POST, DELETE"
        assert headers["access-control-allow-headers"] == "authorization, x-own"
        status, headers, body = server.ask(
            "OPTIONS", "/v1/models", None, {**PREFLIGHT, "Origin": THERE}
        )
        assert (status, body) == (400, b"Disallowed CORS origin")
        assert ALLOW not in headers
        put = {**PREFLIGHT, "Access-Control-Request-Method": "PUT"}
        put["Access-Control-Request-Private-Network"] = "true"
        status, _, body = server.ask("OPTIONS", "/v1/models", None, put)
        assert (status, body) == (400, b"Disallowed CORS method, private-network")
        headers = server.ask("GET", "/v1/models", None, {"Origin": HERE})[1]
        assert (headers[ALLOW], headers["vary"]) == (HERE, "Origin")
        headers = server.ask("GET", "/v1/models", None, {"Origin": THERE})[1]
        assert ALLOW not in headers
        assert headers["vary"] == "Origin"
        assert server.ask("GET", "/", None, {"Origin": HERE})[1]["vary"] == "accept, Origin"


def test_an_asterisk_lets_the_pages_of_every_site_ask(folder: Path) -> None:
    with running(tiny_llm(folder), cors_origins=("*",)) as server:
        assert server.ask("OPTIONS", "/v1/models", None, PREFLIGHT)[1][ALLOW] == "*"
        assert server.ask("GET", "/v1/models", None, {"Origin": THERE})[1][ALLOW] == "*"
        assert ALLOW not in server.ask("GET", "/v1/models")[1]


def cached(server: Running, key: str, **more: object) -> int:
    """Return the number of cached prompt tokens in the answer to a client."""
    headers = {**JSON, "X-Api-Key": key.encode()}
    body = {"prompt": list(range(4, 104)), "max_tokens": 1, **more}
    status, _, answer = server.ask("POST", "/v1/completions", body, headers)  # type: ignore[arg-type]
    assert status == 200, answer
    return int(json.loads(answer)["usage"]["prompt_tokens_details"]["cached_tokens"])


def test_one_key_does_not_learn_what_another_has_sent(folder: Path) -> None:
    with running(tiny_llm(folder), api_keys=KEYS) as server:
        assert cached(server, KEYS[0]) == 0
        assert cached(server, KEYS[0]) > 0
        assert cached(server, KEYS[1]) == 0
        assert cached(server, KEYS[1]) > 0
        assert cached(server, KEYS[1], cache_salt="mine") == 0  # its own salt parts it further
        assert cached(server, KEYS[0], cache_salt="mine") == 0
        assert cached(server, KEYS[1], cache_salt="mine") > 0


ADMIN = "the-admins"


@pytest.fixture(scope="module")
def with_admin(folder: Path) -> Iterator[Running]:
    with running(tiny_llm(folder), api_keys=KEYS, admin_api_keys=(ADMIN,)) as server:
        yield server


def get(server: Running, path: str, key: str | None) -> Any:
    headers = {} if key is None else {"X-Api-Key": key.encode()}
    status, _, answer = server.ask("GET", path, None, headers)  # type: ignore[arg-type]
    assert status == 200, answer
    return json.loads(answer)


@pytest.mark.parametrize(
    ("keys", "admin_keys", "given", "statuses"),
    [
        ((), (), None, (200, 200)),
        (KEYS[:1], (), KEYS[0], (200, 200)),
        (KEYS, (), KEYS[0], (403, 403)),
        (KEYS[:1], (ADMIN,), KEYS[0], (403, 403)),
        (KEYS, (ADMIN,), ADMIN, (200, 200)),
        ((), (ADMIN,), None, (403, 403)),
        ((), (ADMIN,), ADMIN, (200, 200)),
    ],
)
def test_who_may_act_on_the_server(
    folder: Path,
    keys: tuple[str, ...],
    admin_keys: tuple[str, ...],
    given: str | None,
    statuses: tuple[int, int],
) -> None:
    headers = JSON if given is None else {**JSON, "X-Api-Key": given.encode()}
    with running(tiny_llm(folder), api_keys=keys, admin_api_keys=admin_keys) as server:
        for path, status in zip(("/start_profile", "/stop_profile"), statuses, strict=True):
            got, _, answer = server.ask("POST", path, b"{}", headers)  # type: ignore[arg-type]
            assert got == status
            if status == 403:
                assert json.loads(answer)["error"]["code"] == "admin_key_needed"
        assert server.ask("GET", "/v1/models", None, headers)[0] == 200  # type: ignore[arg-type]


def test_a_key_sees_its_own_requests_and_an_admin_key_all(with_admin: Running) -> None:
    for key in KEYS:
        headers = {**JSON, "X-Api-Key": key.encode(), "X-Request-Id": f"of-{KEYS.index(key)}"}
        body = {"prompt": [4, 5, 6], "max_tokens": 3, "n": 2}
        assert with_admin.ask("POST", "/v1/completions", body, headers)[0] == 200  # type: ignore[arg-type]
    wait_until(lambda: len(get(with_admin, "/records?seconds=600", ADMIN)["requests"]) == 4)
    for key, owners in ((KEYS[0], {0}), (KEYS[1], {1}), (ADMIN, {0, 1})):
        records = get(with_admin, "/records?seconds=600", key)
        assert {one["owner"] for one in records["requests"]} == owners
        assert any(step["chunks"] or step["first"] for step in records["steps"]) == (key == ADMIN)
        shown = [one["id"] for one in get(with_admin, "/dash/feed", key)["slowest"]]
        assert {int(name.split("of-")[1][0]) for name in shown} == owners


def test_a_key_sees_its_own_slots(with_admin: Running) -> None:
    def working(key: str) -> int:
        return sum(slot["is_processing"] for slot in get(with_admin, "/slots", key))

    step = with_admin.client.engine.core.step
    goes_on = threading.Event()

    def held() -> Any:
        result = step()
        goes_on.wait(PATIENCE_S)
        return result

    try:
        with socket.create_connection(("127.0.0.1", with_admin.port), PATIENCE_S) as connection:
            body = json.dumps({"prompt": [4], "max_tokens": 50, "ignore_eos": True, "stream": True})
            lines = b"Content-Length: %d" % len(body), b"X-Api-Key: " + KEYS[0].encode()
            with_admin.client.engine.core.step = held  # type: ignore[method-assign]
            connection.sendall(head("/v1/completions", *lines, key=None) + body.encode())
            wait_until(lambda: working(ADMIN) == 1)
            assert (working(KEYS[0]), working(KEYS[1])) == (1, 0)
    finally:
        with_admin.client.engine.core.step = step  # type: ignore[method-assign]
        goes_on.set()


def test_keys_share_cached_prefixes_where_they_may(folder: Path) -> None:
    with running(tiny_llm(folder), api_keys=KEYS, prefix_cache_sharing=True) as server:
        assert cached(server, KEYS[0]) == 0
        assert cached(server, KEYS[1]) > 0


def test_a_key_in_the_query_is_not_logged(folder: Path, caplog: pytest.LogCaptureFixture) -> None:
    access = logging.getLogger("uvicorn.access")
    with running(tiny_llm(folder), access_log=True) as server:
        access.addHandler(caplog.handler)
        try:
            server.ask("GET", "/v1/models?api_key=secret-key")
        finally:
            access.removeHandler(caplog.handler)
    assert "/v1/models" in caplog.text
    assert "secret-key" not in caplog.text
    assert "?" not in caplog.text


@pytest.mark.parametrize(("allowed", "priority"), [(True, 7), (False, 0)])
def test_the_priorities_of_requests_can_be_ignored(
    folder: Path, monkeypatch: pytest.MonkeyPatch, allowed: bool, priority: int
) -> None:
    seen = []
    add = EngineCore.add

    def noting(core: EngineCore, request: EngineRequest) -> None:
        seen.append(request.priority)
        add(core, request)

    monkeypatch.setattr(EngineCore, "add", noting)
    with running(tiny_llm(folder), client_priority=allowed) as server:
        server.post("/v1/completions", {"prompt": [4], "max_tokens": 1, "priority": 7})
    assert seen == [priority]
