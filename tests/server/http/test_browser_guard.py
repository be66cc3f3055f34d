"""Requests of foreign web pages are refused."""

from __future__ import annotations

import json
import socket
from collections.abc import Iterator
from typing import Any

import pytest

from tests.server.running import JSON, Running, running
from tests.tiny import tiny_folder, tiny_llm
from twostroke import LLM
from twostroke.errors import ConfigError
from twostroke.serve.settings import ServeSettings

pytestmark = pytest.mark.core  # bounds of security

TEXT = {"prompt": "the", "max_tokens": 2, "temperature": 0}


@pytest.fixture(scope="module")
def llm(tmp_path_factory: pytest.TempPathFactory) -> LLM:
    return tiny_llm(tiny_folder(tmp_path_factory.mktemp("tiny") / "tiny"))


@pytest.fixture(scope="module")
def server(llm: LLM) -> Iterator[Running]:
    with running(llm, dev_mode=True) as server:
        yield server


def status_for(server: Running, host: str, path: str = "/v1/models") -> int:
    return server.ask("GET", path, None, {"Host": host})[0]


def error_of(answer: bytes) -> dict[str, Any]:
    error: dict[str, Any] = json.loads(answer)["error"]
    return error


def test_a_keyless_server_answers_loopback_hosts_alone(server: Running) -> None:
    port = server.port
    for host in ("localhost", "LOCALHOST", "app.localhost", "127.0.0.1", "127.8.9.1", "[::1]"):
        assert status_for(server, host) == 200
        assert status_for(server, f"{host}:{port}") == 200
    for host in ("evil.example", "localhost.evil.example", "127.0.0.1.evil.example", "10.0.0.1",
                 "evil-localhost", "[2001:db8::1]", "2130706433", "x", ""):  # fmt: skip
        assert status_for(server, host) == 403, host
        assert status_for(server, f"{host}:{port}") == 403, host


def test_a_rebound_page_learns_nothing_and_gets_no_completion(server: Running) -> None:
    headers = {**JSON, "Host": "rebound.example:8000"}
    for method, path in (("POST", "/v1/completions"), ("GET", "/dash"), ("GET", "/nothing")):
        body = TEXT if method == "POST" else None
        status, _, answer = server.ask(method, path, body, headers)
        assert status == 403
        error = error_of(answer)
        assert error["code"] == "host_not_allowed"
        assert "'rebound.example:8000'" in error["message"]
        assert "--allowed-hosts" in error["message"]


def test_every_host_header_counts(server: Running) -> None:
    with socket.create_connection(("127.0.0.1", server.port), timeout=30) as connection:
        connection.sendall(
            b"GET /v1/models HTTP/1.1\r\nHost: localhost\r\nHost: evil.example\r\n"
            b"Connection: close\r\n\r\n"
        )
        assert connection.makefile("rb").readline().split()[1] in (b"400", b"403")


def test_a_program_that_names_no_host_is_answered(server: Running) -> None:
    with socket.create_connection(("127.0.0.1", server.port), timeout=30) as connection:
        connection.sendall(b"GET /v1/models HTTP/1.0\r\n\r\n")
        assert connection.makefile("rb").readline().split()[1] == b"200"


@pytest.mark.parametrize(
    "headers",
    [
        {"Origin": "http://evil.example"},
        {"Origin": "null"},
        {"Origin": "http://localhost:3000"},  # another local server's page
        {"Sec-Fetch-Site": "cross-site"},
        {"Sec-Fetch-Site": "same-site"},
    ],
)
def test_pages_of_other_sites_do_not_act(server: Running, headers: dict[str, str]) -> None:
    acting = [route for route in server.app.routes if route.acts]
    assert {"/sleep", "/pools", "/start_profile", "/learn/run"} <= {one.path for one in acting}
    for route in acting:
        for more in ({}, JSON):
            status, _, answer = server.ask(route.method, route.path, b"{}", {**headers, **more})
            assert status == 403, route.path
            assert error_of(answer)["code"] == "origin_not_allowed"
            assert "--allowed-origins" in error_of(answer)["message"]


def test_the_servers_own_page_acts_with_json(server: Running) -> None:
    own = {"Origin": f"http://127.0.0.1:{server.port}", "Sec-Fetch-Site": "same-origin"}
    assert server.ask("POST", "/reset_prefix_cache", b"", own)[0] == 415
    assert server.ask("POST", "/reset_prefix_cache", b"", {**own, **JSON})[0] == 200


def test_curl_acts_without_headers(server: Running) -> None:
    form = {"Content-Type": "application/x-www-form-urlencoded"}  # of `curl -d ''`
    for headers in ({}, form):
        assert server.ask("POST", "/reset_prefix_cache", b"", headers)[0] == 200


def test_named_origins_act(llm: LLM) -> None:
    with running(llm, dev_mode=True, cors_origins=("https://here.example",)) as server:
        for origin, status in (("https://here.example", 200), ("https://there.example", 403)):
            headers = {**JSON, "Origin": origin, "Sec-Fetch-Site": "cross-site"}
            assert server.ask("POST", "/reset_prefix_cache", b"", headers)[0] == status


@pytest.mark.parametrize(
    ("settings", "allowed", "refused"),
    [
        ({"allowed_hosts": ("llm.Example",)}, ["LLM.example:1", "localhost"], ["a.llm.example"]),
        ({"allowed_hosts": ("*.example",)}, ["a.example", "b.a.example"], ["example", "xexample"]),
        ({"allowed_hosts": ("10.0.0.1", "[2001:db8::1]")}, ["10.0.0.1", "[2001:db8::1]:80"], ["x"]),
        ({"allowed_hosts": ("*",)}, ["evil.example"], []),
        ({"host": "0.0.0.0"}, ["10.0.0.1", "[2001:db8::1]", socket.gethostname()], ["x.example"]),
    ],
)
def test_allowed_hosts_and_the_address_widen_it(
    llm: LLM, settings: dict[str, Any], allowed: list[str], refused: list[str]
) -> None:
    with running(llm, **settings) as server:
        assert [status_for(server, host) for host in allowed] == [200] * len(allowed)
        assert [status_for(server, host) for host in refused] == [403] * len(refused)


def test_a_server_with_a_key_answers_any_host_unless_hosts_are_named(llm: LLM) -> None:
    with running(llm, api_keys=("key",)) as server:
        assert status_for(server, "llm.example", "/health") == 200
    with running(llm, api_keys=("key",), allowed_hosts=("llm.example",)) as server:
        assert status_for(server, "llm.example", "/health") == 200
        assert status_for(server, "evil.example", "/health") == 403


@pytest.mark.parametrize("name", ["http://llm.example", "llm.example:80", "a/b", "*.*", ""])
def test_what_is_no_host_name_is_refused(name: str) -> None:
    with pytest.raises(ConfigError, match="allowed_hosts"):
        ServeSettings(allowed_hosts=(name,))
