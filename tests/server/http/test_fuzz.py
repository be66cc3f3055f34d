"""Malformed calls: none of them may break, hang or harm the server. `bench/fuzz.py` makes thousands
of calls, this test some hundreds."""

from __future__ import annotations

from pathlib import Path

import pytest

from bench.fuzz import Call, HttpAnswer, fuzz, problem_of, serving

pytestmark = pytest.mark.core  # bounds of security

OPENAI_ERROR = b'{"error":{"message":"no","type":"x","param":null,"code":null}}'
JSON = {"content-type": "application/json"}
CALL = Call(0, "valid", "POST /v1/completions", b"POST /v1/completions HTTP/1.1")


@pytest.mark.parametrize(("engine", "calls"), [("instant", 300), ("tiny", 150)])
def test_no_call_breaks_the_server(tmp_path: Path, engine: str, calls: int) -> None:
    with serving(tmp_path / "tiny", engine) as server:
        result = fuzz(server, seed=3, indices=range(calls))
    assert result["failures"] == []
    assert result["calls"] == calls
    assert result["statuses"]["200"] > calls / 10
    assert result["statuses"]["400"] > calls / 10


@pytest.mark.parametrize(
    ("answer", "problem"),
    [
        (HttpAnswer(400, JSON, OPENAI_ERROR, True), ""),
        (HttpAnswer(500, JSON, OPENAI_ERROR, True), "status 500"),
        (HttpAnswer(501, JSON, OPENAI_ERROR, True), "status 501"),
        (HttpAnswer(503, JSON, OPENAI_ERROR, True), "status 503"),
        (HttpAnswer(400, JSON, b'{"detail":"no"}', True), "cannot be read"),
        (HttpAnswer(400, {"content-type": "text/plain"}, b"no", True), "an error as"),
        (HttpAnswer(400, JSON, OPENAI_ERROR.replace(b"no", b"/usr/lib/x.py"), True), "our insides"),
        (HttpAnswer(200, JSON, b'{"a":NaN}', True), "NaN in JSON"),
        (
            HttpAnswer(200, {"content-type": "text/event-stream"}, b"data: {}\n\n", True),
            "ends with",
        ),
        (HttpAnswer(200, JSON, b"{}", False), "breaks off"),
        (HttpAnswer(hung=True), "no answer in time"),
        (HttpAnswer(), "no answer"),
    ],
)
def test_the_fuzzer_sees_what_is_wrong(answer: HttpAnswer, problem: str) -> None:
    found = problem_of(CALL, answer)
    assert problem in found
    assert bool(problem) == bool(found)
