"""Answers to requests that are invalid, too large, too many, or abandoned."""

from __future__ import annotations

import http.client
import json
import logging
import shutil
import socket
import ssl
import struct
import subprocess
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.server.running import JSON, PATIENCE_S, Running, running
from tests.tiny import MAX_LEN, tiny_llm
from twostroke.engine.core import EngineCore
from twostroke.errors import ConfigError
from twostroke.log_lines import WORK

pytestmark = pytest.mark.core  # bounds of security

CHAT = "/v1/chat/completions"
TEXT = "/v1/completions"
HELLO: dict[str, Any] = {"messages": [{"role": "user", "content": "the fox"}], "max_tokens": 4}
LONG: dict[str, Any] = {"prompt": "the", "max_tokens": 240, "ignore_eos": True, "temperature": 0}


@pytest.fixture(scope="module")
def server(folder: Path) -> Iterator[Running]:
    with running(tiny_llm(folder)) as server:
        yield server


def refusal(answer: tuple[int, dict[str, str], bytes], status: int) -> dict[str, Any]:
    """Return the error of an answer; check OpenAI's format, without internals of the server."""
    got, headers, body = answer
    assert got == status, body
    assert headers["content-type"] == "application/json"
    content = json.loads(body)
    assert list(content) == ["error"]
    error: dict[str, Any] = content["error"]
    assert set(error) == {"message", "type", "param", "code"}
    assert error["message"]
    for secret in ("Traceback", "File ", ".py", "/work", "/opt", "/tmp"):
        assert secret not in error["message"]
    return error


# ── wrong ───────────────────────────────────────────────────────────────────────────────────


@pytest.mark.parametrize(
    ("path", "body", "says", "param"),
    [
        (CHAT, {}, "messages", None),
        (CHAT, {"messages": []}, "empty", "messages"),
        (CHAT, {"messages": [{"role": "user"}]}, "content is missing", None),
        (CHAT, {"messages": "hi"}, "Expected `array`", "messages"),
        (CHAT, {**HELLO, "max_tokens": "five"}, "Expected `int | null`", "max_tokens"),
        (CHAT, {**HELLO, "max_tokens": 0}, "max_tokens must be", "max_tokens"),
        (CHAT, {**HELLO, "temperature": "nan"}, "temperature must be", "temperature"),
        (CHAT, {**HELLO, "n": 0}, "n must be", "n"),
        (CHAT, {**HELLO, "top_logprobs": 2}, "needs logprobs", "top_logprobs"),
        (CHAT, {**HELLO, "logprobs": True, "top_logprobs": 21}, "at most 20", None),
        (CHAT, {**HELLO, "functions": [{"name": "f"}]}, "use tools", "functions"),
        (CHAT, {**HELLO, "modalities": ["audio"]}, "modalities", "modalities"),
        (CHAT, {**HELLO, "chat_template": "{{ 1 }}"}, "--trust-request", "chat_template"),
        (CHAT, {**HELLO, "tool_choice": "required"}, "no tools are given", "tool_choice"),
        (CHAT, {**HELLO, "stop": ["x"] * 65}, "length <= 64", "stop"),
        (CHAT, {**HELLO, "repeat_penalty": "much"}, "repeat_penalty", "repeat_penalty"),
        (TEXT, {}, "prompt", None),
        (TEXT, {"prompt": []}, "empty", "prompt"),
        (TEXT, {"prompt": ["a", 3]}, "mixture", None),
        (TEXT, {"prompt": [999]}, "out of vocabulary", None),
        (TEXT, {"prompt": "a", "best_of": 3}, "best_of", "best_of"),
        (TEXT, {"prompt": "a", "suffix": "b"}, "suffix", "suffix"),
        (TEXT, {"prompt": "a", "seed": 2**80}, "seed must be", None),
        (TEXT, {"prompt": "a", "logit_bias": {"x": 1}}, "logit_bias", None),
        (TEXT, {"prompt": "a", "logit_bias": {"1": 500}}, "logit_bias", None),
        ("/v1/responses", {"input": "a", "previous_response_id": "r"}, "not stored", None),
        ("/v1/responses", {"input": [{"type": "item_reference"}]}, "item_reference", None),
        (
            "/v1/responses",
            {"input": "a", "tools": [{"type": "web"}], "tool_choice": {"type": "web"}},
            "runs no tools",
            "tool_choice",
        ),
        ("/tokenize", {}, "either prompt or messages", None),
        ("/detokenize", {"tokens": [-1]}, "0 to 299", "tokens"),
    ],
)
def test_a_wrong_request_is_told_what_is_wrong(
    server: Running, path: str, body: Any, says: str, param: str | None
) -> None:
    error = refusal(server.ask("POST", path, body), 400)
    assert says in error["message"]
    assert error["type"] == "invalid_request_error"
    if param is not None:
        assert error["param"] == param


@pytest.mark.parametrize(
    "body",
    [b"", b"{", b"nothing", b"[]", b'{"prompt": "\\ud800"}', b"\xff\xfe", b"[" * 100_000],
)
def test_a_body_that_is_not_json_is_refused(server: Running, body: bytes) -> None:
    refusal(server.ask("POST", TEXT, body), 400)


def test_only_json_is_read(server: Running) -> None:
    body = json.dumps({"prompt": "a"}).encode()
    for headers in (
        {},
        {"Content-Type": "text/plain"},
        {"Content-Type": "application/x-www-form-urlencoded"},
        {**JSON, "Content-Encoding": "gzip"},
    ):
        refusal(server.ask("POST", TEXT, body, headers), 415)
    accepted = {"Content-Type": "Application/JSON; charset=utf-8"}
    assert server.ask("POST", TEXT, body, accepted)[0] == 200


def test_what_is_not_there_is_404_and_the_wrong_method_405(server: Running) -> None:
    assert refusal(server.ask("GET", "/v1/nothing"), 404)["code"] == "not_found"
    unknown = refusal(server.ask("POST", CHAT, {**HELLO, "model": "gpt-9"}), 404)
    assert (unknown["code"], unknown["param"]) == ("model_not_found", "model")
    status, headers, body = server.ask("GET", CHAT)
    refusal((status, headers, body), 405)
    assert headers["allow"] == "POST"
    refusal(server.ask("DELETE", "/health"), 405)


def test_embeddings_are_refused_clearly(server: Running) -> None:
    error = refusal(server.ask("POST", "/v1/embeddings", {"input": "a", "model": "tiny"}), 501)
    assert "embeddings" in error["message"]


def test_harmless_fields_are_read_and_nulls_mean_nothing(server: Running) -> None:
    harmless = {"user": "me", "store": True, "metadata": {"a": "b"}, "service_tier": "auto"}
    nulls = dict.fromkeys(("temperature", "stop", "tools", "logit_bias", "stream_options", "n"))
    server.post(CHAT, {**HELLO, **harmless, **nulls, "parallel_tool_calls": True})


def test_what_nobody_expected_is_a_500_without_our_insides(
    server: Running, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(*_: Any) -> None:
        raise KeyError("/opt/secret/path.py")

    monkeypatch.setattr(server.app.service.prompts, "prepare", fail)
    error = refusal(server.ask("POST", TEXT, {"prompt": "a"}), 500)
    assert error["type"] == "server_error"
    assert "secret" not in error["message"]


# ── too large ───────────────────────────────────────────────────────────────────────────────


def test_a_long_prompt_is_refused_before_it_is_tokenised(
    server: Running, monkeypatch: pytest.MonkeyPatch
) -> None:
    for prompt in ([5] * MAX_LEN, "a " * MAX_LEN):  # ids, and a text short enough to be tokenised
        error = refusal(server.ask("POST", TEXT, {"prompt": prompt}), 400)
        assert error["code"] == "context_length_exceeded"
        assert f"at most {MAX_LEN - 1} tokens are read" in error["message"]
    tokenizer = server.app.service.tokenizer
    assert tokenizer is not None
    encoded: list[str] = []
    monkeypatch.setattr(tokenizer, "encode", lambda text, *_: encoded.append(text))
    error = refusal(server.ask("POST", TEXT, {"prompt": "the " * 100_000}), 400)
    assert error["code"] == "context_length_exceeded"
    assert encoded == []


def test_a_large_body_is_refused_while_it_arrives(folder: Path) -> None:
    with running(tiny_llm(folder), max_body_bytes=2048) as server:
        refusal(server.ask("POST", TEXT, {"prompt": "a" * 4000}), 413)
        with socket.create_connection(("127.0.0.1", server.port), timeout=PATIENCE_S) as sender:
            head = f"POST {TEXT} HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\n"
            sender.sendall(head.encode() + b"Transfer-Encoding: chunked\r\n\r\n")
            sender.sendall(b"800\r\n" + b"a" * 2048 + b"\r\n800\r\n" + b"a" * 2048 + b"\r\n")
            assert b" 413 " in read_all(sender).splitlines()[0]  # and the rest was never sent


def test_a_refusal_reaches_a_client_that_is_still_sending(folder: Path) -> None:
    with running(tiny_llm(folder), api_keys=("key",), max_body_bytes=2048) as server:
        keyed = {**JSON, "Authorization": "Bearer key"}
        for _ in range(20):
            refusal(server.ask("POST", TEXT, b"a" * 500_000), 401)
            refusal(server.ask("POST", TEXT, b"a" * 3_000_000, keyed), 413)


def test_large_headers_are_refused_whether_they_end_or_not(folder: Path) -> None:
    with running(tiny_llm(folder), max_header_bytes=4096) as server:
        refusal(server.ask("GET", "/health", headers={"X-Large": "a" * 5000}), 431)
        refusal(server.ask("GET", "/health?" + "a" * 5000), 431)
        with socket.create_connection(("127.0.0.1", server.port), timeout=PATIENCE_S) as sender:
            sender.sendall(b"GET /health HTTP/1.1\r\nX-Endless: ")
            for _ in range(9):
                sender.sendall(b"a" * 512)
                time.sleep(0.001)
            assert b" 431 " in read_all(sender).splitlines()[0]
        assert server.ask("GET", "/health")[0] == 200


def test_a_head_or_a_body_that_never_comes_times_out(folder: Path) -> None:
    with running(tiny_llm(folder), head_timeout_s=0.2, body_timeout_s=0.2) as server:
        for sent in (
            b"GET /health HT",
            f"POST {TEXT} HTTP/1.1\r\nHost: localhost\r\nContent-Length: 9\r\n"
            "Content-Type: application/json\r\n\r\n{".encode(),
        ):
            with socket.create_connection(("127.0.0.1", server.port), PATIENCE_S) as sender:
                sender.sendall(sent)
                assert b" 408 " in read_all(sender).splitlines()[0]


def test_what_is_not_http_is_told_so(server: Running) -> None:
    with socket.create_connection(("127.0.0.1", server.port), timeout=PATIENCE_S) as sender:
        sender.sendall(b"\x16\x03\x01 hello\r\n\r\n")
        answer = read_all(sender)
    assert b" 400 " in answer.splitlines()[0]
    assert json.loads(answer.partition(b"\r\n\r\n")[2])["error"]["type"] == "invalid_request_error"


def test_an_answer_is_cut_at_the_servers_own_limit(folder: Path) -> None:
    with running(tiny_llm(folder), max_output_tokens=5, max_prompt_tokens=20) as server:
        answer = server.post(TEXT, LONG)
        assert answer["usage"]["completion_tokens"] == 5
        refusal(server.ask("POST", TEXT, {"prompt": [5] * 21}), 400)


# ── too many ────────────────────────────────────────────────────────────────────────────────


def test_a_full_queue_is_answered_429_and_those_in_it_are_served(folder: Path) -> None:
    with running(tiny_llm(folder, max_num_seqs=1), max_queue=2) as server:
        answers: list[int] = []

        def ask() -> None:
            answers.append(server.ask("POST", TEXT, LONG)[0])

        threads = [threading.Thread(target=ask) for _ in range(3)]
        for thread in threads:
            thread.start()
        while server.app.service.admission.num_open < 3:
            time.sleep(0.001)
        status, headers, body = server.ask("POST", TEXT, LONG)
        error = refusal((status, headers, body), 429)
        counted = (
            b'vllm:admission_rejections_total{model_name="tiny",reason="max_num_queued_reqs"} 1.0'
        )
        assert counted in server.ask("GET", "/metrics")[2]
        assert error["code"] == "queue_full"
        assert int(headers["retry-after"]) >= 1
        for thread in threads:
            thread.join(PATIENCE_S)
        assert answers == [200, 200, 200]
        refusal(server.ask("POST", TEXT, {**LONG, "n": 4}), 400)  # it would never fit


# ── left alone ──────────────────────────────────────────────────────────────────────────────


@pytest.fixture
def slow_steps(monkeypatch: pytest.MonkeyPatch) -> None:
    """A request takes seconds, so that it cannot end during a test."""
    step = EngineCore.step

    def slow(core: EngineCore) -> Any:
        time.sleep(0.02)
        return step(core)

    monkeypatch.setattr(EngineCore, "step", slow)


@pytest.mark.usefixtures("slow_steps")
@pytest.mark.parametrize("stream", [True, False])
@pytest.mark.parametrize("n", [1, 3])
def test_a_client_that_leaves_ends_its_request(folder: Path, stream: bool, n: int) -> None:
    with running(tiny_llm(folder)) as server:
        body = json.dumps({**LONG, "stream": stream, "n": n}).encode()
        sender = socket.create_connection(("127.0.0.1", server.port), timeout=PATIENCE_S)
        head = f"POST {TEXT} HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\n"
        sender.sendall(f"{head}Content-Length: {len(body)}\r\n\r\n".encode() + body)
        scheduler = server.client.engine.core.scheduler
        while scheduler.num_running < n:
            time.sleep(0.005)
        if stream:
            assert sender.recv(10)
        reset = struct.pack("ii", 1, 0)
        sender.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, reset)
        sender.close()
        server.assert_idle()
        (ended,) = {one.finish_reason for one in server.client.records.requests}
        assert ended == "abort"


@pytest.mark.usefixtures("slow_steps")
def test_a_stopping_server_finishes_what_runs_and_takes_nothing_new(
    folder: Path, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO, logger=WORK)
    with running(tiny_llm(folder), drain_s=20.0) as server:
        found: dict[str, Any] = {}

        def ask() -> None:
            found["events"] = server.events(TEXT, {**LONG, "max_tokens": 30, "stream": True})

        thread = threading.Thread(target=ask)
        thread.start()
        while not server.client.engine.core.scheduler.num_running:
            time.sleep(0.005)
        server.server.stop()
        while not server.app.service.admission.draining:
            time.sleep(0.001)
        status, _, body = server.ask("GET", "/health")
        assert (status, json.loads(body)) == (503, {"status": "shutting down"})
        assert [record.getMessage() for record in caplog.records] == [
            "finishing 1 request, for up to 20 s; press Ctrl-C again to stop at once"
        ], "a probe of a server that ends is no failure"
        status, headers, body = server.ask("POST", TEXT, LONG)
        refusal((status, headers, body), 503)
        assert "retry-after" in headers
        thread.join(PATIENCE_S)
        assert found["events"][-1] == "[DONE]"
        assert len(found["events"]) == 31
        server.thread.join(PATIENCE_S)
        assert not server.thread.is_alive()


@pytest.mark.usefixtures("slow_steps")
def test_what_does_not_finish_in_time_ends_with_an_error_event(folder: Path) -> None:
    with running(tiny_llm(folder), drain_s=0.2) as server:
        threading.Timer(0.3, server.server.stop).start()
        *tokens, error, done = server.events(TEXT, {**LONG, "stream": True})
        assert tokens
        assert error["error"]["type"] == "server_error"
        assert "stopped" in error["error"]["message"]
        assert done == "[DONE]"
        server.thread.join(PATIENCE_S)
        assert not server.thread.is_alive()
    assert not server.client.engine.core.scheduler.has_requests
    server.client.engine.core.scheduler.audit()


def test_an_engine_that_fails_ends_the_stream_with_an_error_event(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with running(tiny_llm(folder)) as server:
        executor = server.client.engine.core._executor
        forward, steps = executor.forward, iter(range(1000))

        def fail(plan: Any) -> Any:
            if next(steps) >= 5:
                raise RuntimeError("/opt/secret/kernel.py broke")
            return forward(plan)

        monkeypatch.setattr(executor, "forward", fail)
        *tokens, error, done = server.events(TEXT, {**LONG, "stream": True})
        assert len(tokens) == 5
        assert "secret" not in json.dumps(error)
        assert error["error"]["code"] == "unavailable"
        assert done == "[DONE]"
        refusal(server.ask("POST", TEXT, LONG), 503)
        monkeypatch.setattr(executor, "forward", forward)
        server.post(TEXT, {"prompt": "the"})
        assert server.ask("GET", "/health")[0] == 200


def read_all(connection: socket.socket) -> bytes:
    parts = []
    try:
        while part := connection.recv(65536):
            parts.append(part)
    except ConnectionResetError:
        pass
    return b"".join(parts)


# ── other sockets ───────────────────────────────────────────────────────────────────────────


def test_a_unix_socket_is_listened_on_and_taken_away(folder: Path, tmp_path: Path) -> None:
    path = tmp_path / "server.sock"
    path.touch()
    with (
        pytest.raises(ConfigError, match="cannot listen"),
        running(tiny_llm(folder), uds=str(path)),
    ):
        pass
    path.unlink()
    with running(tiny_llm(folder), uds=str(path)):
        with socket.socket(socket.AF_UNIX) as sender:
            sender.connect(str(path))
            sender.sendall(b"GET /health HTTP/1.1\r\nHost: localhost\r\nConnection: close\r\n\r\n")
            assert b" 200 " in read_all(sender).splitlines()[0]
        with (
            pytest.raises(ConfigError, match="another server"),
            running(tiny_llm(folder), uds=str(path)),
        ):
            pass
    assert not path.exists()


@pytest.mark.skipif(shutil.which("openssl") is None, reason="needs openssl to make a certificate")
def test_a_certificate_makes_it_https(folder: Path, tmp_path: Path) -> None:
    key, certificate = str(tmp_path / "key.pem"), str(tmp_path / "cert.pem")
    made = ["openssl", "req", "-x509", "-newkey", "rsa:2048", "-nodes", "-subj", "/CN=localhost"]
    command = [*made, "-days", "1", "-keyout", key, "-out", certificate]
    subprocess.run(command, check=True, capture_output=True)
    with running(tiny_llm(folder), ssl_certfile=certificate, ssl_keyfile=key) as server:
        assert server.url.startswith("https://")
        context = ssl.create_default_context(cafile=certificate)
        context.check_hostname = False
        connection = http.client.HTTPSConnection("127.0.0.1", server.port, context=context)
        connection.request("GET", "/health")
        assert connection.getresponse().status == 200
        connection.close()
