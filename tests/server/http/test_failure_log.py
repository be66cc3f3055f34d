"""Requests that fail are logged: status, route, request id and reason, nothing of their text."""

from __future__ import annotations

import http.client
import json
import logging
import logging.config
import threading
from collections.abc import Iterator
from itertools import count
from time import monotonic, sleep
from typing import Any

import pytest

from tests.server.running import JSON, PATIENCE_S, Running, running
from tests.tiny import tiny_llm
from twostroke import log_lines
from twostroke.log_lines import MAX_LINES_PER_S
from twostroke.serve.error_responses import ApiError
from twostroke.serve.http.failure_log import reason

ROUTE = "/v1/completions"


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Running]:
    with running(tiny_llm(tmp_path_factory.mktemp("tiny"))) as one:
        yield one


@pytest.fixture
def logged(caplog: pytest.LogCaptureFixture) -> pytest.LogCaptureFixture:
    caplog.set_level(logging.INFO, log_lines.WORK)
    return caplog


def test_a_failed_request_is_one_line(server: Running, logged: pytest.LogCaptureFixture) -> None:
    headers = {**JSON, "X-Request-Id": "mine-7é"}
    body = {"prompt": "a secret text", "temperature": "the secret"}
    assert server.ask("POST", ROUTE, body, headers)[0] == 400
    assert server.ask("POST", ROUTE, {"prompt": [1], "lora_path": "secret"})[0] == 400
    assert server.ask("GET", "/secret")[0] == 404
    assert server.ask("POST", ROUTE, {"prompt": [5] * 100_000})[0] == 400
    assert server.ask("GET", "/health")[0] == 200
    lines = [record.getMessage() for record in logged.records]
    assert lines[:3] == [
        f"400 POST {ROUTE}, request mine-7?: temperature: Expected `float | null`, got `str`",
        f"400 POST {ROUTE}, request -: lora_path is not supported; leave it out",
        "404 GET unknown, request -: not_found: there is no …",
    ]
    assert len(lines) == 4
    assert "context_length_exceeded" in lines[3]
    assert "secret" not in "".join(lines)
    assert {record.levelname for record in logged.records} == {"INFO"}


def test_a_warning_is_one_line_without_the_fields_name(
    server: Running, logged: pytest.LogCaptureFixture
) -> None:
    assert server.ask("POST", ROUTE, {"prompt": [1], "max_tokens": 1, "secret": 1})[0] == 200
    until = monotonic() + PATIENCE_S
    while not (lines := [one for one in logged.records if one.levelname == "WARNING"]):
        assert monotonic() < until  # the line is written after the response is sent
        sleep(0.005)
    (line,) = lines
    assert line.getMessage().startswith(f"200 POST {ROUTE}, request cmpl-")
    assert line.getMessage().endswith(": unknown fields were ignored")


def test_a_stream_that_fails_later_is_logged_too(
    server: Running, logged: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    core, going_on, steps = server.client.engine.core, threading.Event(), count()
    step = core.step

    def held() -> Any:
        if next(steps) > 4:
            going_on.wait(PATIENCE_S)
        return step()

    monkeypatch.setattr(core, "step", held)
    connection = http.client.HTTPConnection("127.0.0.1", server.port, timeout=PATIENCE_S)
    try:
        body = {"prompt": [5, 6], "max_tokens": 100, "ignore_eos": True, "stream": True}
        connection.request("POST", ROUTE, json.dumps(body).encode(), JSON)
        answer = connection.getresponse()
        assert answer.readline().startswith(b"data: ")
        assert server.server._loop is not None
        server.server._loop.call_soon_threadsafe(server.app.service.end_streams)
        assert b"the server was stopped" in answer.read()
    finally:
        going_on.set()
        connection.close()
    until = monotonic() + PATIENCE_S
    while not logged.records and monotonic() < until:
        sleep(0.005)
    (record,) = logged.records
    assert record.levelname == "ERROR"
    assert record.getMessage().startswith(f"503 POST {ROUTE}, request cmpl-")
    assert record.getMessage().endswith(
        ": unavailable: the server was stopped before the answer was finished"
    )


def test_many_failures_do_not_fill_the_log(
    server: Running, logged: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    now = [monotonic() + 100]
    monkeypatch.setattr("twostroke.log_lines.monotonic", lambda: now[0])
    for _ in range(MAX_LINES_PER_S + 5):
        server.ask("GET", "/x")
    assert len(logged.records) == MAX_LINES_PER_S
    now[0] += 1
    server.ask("GET", "/x")
    assert len(logged.records) == MAX_LINES_PER_S + 1
    assert "(5 lines before it were dropped)" in logged.records[-1].getMessage()


def test_warnings_of_the_http_library_do_not_fill_the_log(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Only the lines of the access log, which the operator has asked for, have no limit."""
    now = [monotonic() + 100]
    monkeypatch.setattr("twostroke.log_lines.monotonic", lambda: now[0])
    logging.config.dictConfig(log_lines.uvicorn_config())
    for _ in range(MAX_LINES_PER_S + 5):
        logging.getLogger("uvicorn.error").warning("an invalid %s", "request")
    now[0] += 1
    logging.getLogger("uvicorn.error").warning("an invalid %s", "request")
    lines = capsys.readouterr().err.splitlines()
    assert len(lines) == MAX_LINES_PER_S + 1
    assert lines[-1].endswith("an invalid request (5 lines before it were dropped)")


@pytest.mark.parametrize(
    ("message", "said"),
    [
        (
            "the body has more than 10 bytes; send less",
            "the body has more than 10 bytes; send less",
        ),
        ("the body's JSON weighs 5", "the body's JSON weighs 5"),
        ("n: 200 texts are asked for (prompts times n)", "n: 200 texts are asked for …"),
        (
            "the chat template refuses these messages: SECRET",
            "the chat template refuses these messages …",
        ),
        ("stop must be a string, not ['SECRET']", "stop must be a string, not …"),
        ("the model 'SECRET' does not exist", "the model …"),
    ],
)
def test_quotations_are_left_out(message: str, said: str) -> None:
    assert reason(ApiError(400, message)) == said


def test_lines_have_level_and_time() -> None:
    formatter = logging.Formatter(log_lines.FORMAT, log_lines.DATE)
    record = logging.makeLogRecord({"levelname": "INFO", "msg": "hello", "created": 0})
    assert formatter.format(record)[:7] in ("INFO 01", "INFO 12")
    assert formatter.format(record).endswith(":00 hello")
