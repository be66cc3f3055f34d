"""With a key configured, nothing acts or tells without it."""

from __future__ import annotations

import json
import logging
from collections.abc import Iterator
from pathlib import Path

import msgspec
import pytest

from tests.server.running import JSON, Running, running
from tests.tiny import tiny_folder, tiny_llm
from twostroke.engine.core import EngineCore
from twostroke.request import EngineRequest
from twostroke.serve.protocol import ErrorAnswer

pytestmark = pytest.mark.core  # bounds of security

KEYS = ("first-key", "zweiter-schlüssel")
# Pages and their files hold no data: what they show they ask of routes that need the key.
PAGES = {"/dash", "/static/shared/base.css"}
OPEN = {"/health", "/v1/health", "/ping", *PAGES}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_folder(tmp_path_factory.mktemp("tiny") / "tiny")


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


def test_pages_of_other_sites_may_ask_only_where_they_are_named(folder: Path) -> None:
    asks = {"Origin": "https://here.example", "Access-Control-Request-Method": "POST"}
    with running(tiny_llm(folder)) as server:
        assert (
            "access-control-allow-origin" not in server.ask("OPTIONS", "/v1/models", None, asks)[1]
        )
    with running(tiny_llm(folder), cors_origins=("https://here.example",)) as server:
        status, headers, _ = server.ask("OPTIONS", "/v1/models", None, asks)
        assert (status, headers["access-control-allow-origin"]) == (200, "https://here.example")
        other = {**asks, "Origin": "https://there.example"}
        assert (
            "access-control-allow-origin" not in server.ask("OPTIONS", "/v1/models", None, other)[1]
        )


def cached(server: Running, key: str, **more: object) -> int:
    """Of a prompt that was sent before, as its sender is told."""
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
