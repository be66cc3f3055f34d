"""A file of requests, answered as the server answers them."""

from __future__ import annotations

import asyncio
import io
import json
import re
from pathlib import Path
from typing import Any

import pytest

from tests.server.running import running
from tests.tiny import tiny_llm
from twostroke import LLM
from twostroke.engine.in_process import AsyncEngine
from twostroke.serve import batch_file as batch
from twostroke.serve.app import App
from twostroke.serve.http.listening_socket import bind
from twostroke.serve.server import MetricsServer
from twostroke.serve.settings import ServeSettings

URL = "/v1/completions"


@pytest.fixture(scope="module")
def llm(tmp_path_factory: pytest.TempPathFactory) -> LLM:
    return tiny_llm(tmp_path_factory.mktemp("tiny"))


def body(n: int, **more: Any) -> dict[str, Any]:
    return {"prompt": [5, 6, 7 + n % 100], "max_tokens": 3 + n % 5, "temperature": 0, **more}


def line(n: int, **more: Any) -> bytes:
    return json.dumps(
        {"custom_id": str(n), "method": "POST", "url": URL, "body": body(n)} | more
    ).encode()


def answers(llm: LLM, source: Any, **settings: Any) -> tuple[batch.Counts, list[dict[str, Any]]]:
    async def run() -> tuple[batch.Counts, bytes]:
        target = io.BytesIO()
        async with AsyncEngine(llm.engine) as client:
            app = App(client, ServeSettings(**settings))
            try:
                counts = await batch.answer_file(app, source, target)
            finally:
                await app.close()
        return counts, target.getvalue()

    counts, written = asyncio.run(run())
    return counts, [json.loads(one) for one in written.splitlines()]


def test_every_line_has_the_servers_answer_in_its_place(llm: LLM) -> None:
    source = io.BytesIO(b"\n".join(line(n) for n in range(40)))
    counts, results = answers(llm, source)
    assert counts == (40, 0)
    assert [one["custom_id"] for one in results] == [str(n) for n in range(40)]
    assert len({one["id"] for one in results}) == 40
    with running(llm) as server:
        for n in (0, 7, 39):
            answer = server.post(URL, body(n))
            response = results[n]["response"]
            assert results[n]["error"] is None
            assert response["status_code"] == 200
            assert response["body"]["choices"] == answer["choices"]
            assert response["body"]["usage"]["completion_tokens"] == 3 + n % 5


def test_a_broken_line_harms_only_itself(llm: LLM) -> None:
    lines = [
        line(0),
        b"{not json",
        b"",
        line(3, url="/v1/embeddings"),
        line(4, method="GET"),
        line(5, body=body(5, use_beam_search=True)),
        line(6, body=body(6, stream="True")),
        line(7, custom_id=7),
        line(8, body=7),
        b'"' + b"x" * 200_000 + b'"',
        line(10, body=body(10, model="other")),
        b'{"custom_id": "11", "url": "/v1/completions"}',
        line(12),
    ]
    counts, results = answers(llm, io.BytesIO(b"\r\n".join(lines) + b"\n"), max_body_bytes=2048)
    assert counts == (2, 10)
    assert [one["custom_id"] for one in results] == [
        *("0", None, "3", "4", "5", "6", None, "8", None, "10", None, "12")
    ]
    said = [(one["error"] or {}).get("message", "") for one in results]
    for at, number, why in (
        (1, 2, "it is not JSON"),
        (2, 4, "url is one of /v1/chat/completions, /v1/completions"),
        (3, 5, "method is POST"),
        (5, 7, "stream: answers of a batch come whole"),
        (6, 8, "custom_id: Expected `str`, got `int`"),
        (8, 10, "the body has more than 2048 bytes"),
        (10, 12, "Object missing required field `body`"),
    ):
        assert said[at].startswith(f"line {number}: {why}"), said[at]
        assert results[at]["response"] is None
    refused = results[4]
    assert refused["response"]["status_code"] == 400
    assert "use_beam_search is not supported" in refused["error"]["error"]["message"]
    assert refused["response"]["body"] == refused["error"]
    assert results[9]["response"]["status_code"] == 404


class Counted(io.BytesIO):
    """Records the read position at each written answer."""

    def __init__(self, data: bytes) -> None:
        super().__init__(data)
        self.lines = 0

    def readline(self, size: int | None = -1) -> bytes:
        self.lines += 1
        return super().readline(-1 if size is None else size)


def test_lines_are_read_as_they_are_worked_on(llm: LLM, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(batch, "MAX_HELD_BYTES", 20 * len(line(100)))
    source = Counted(b"\n".join(line(n) for n in range(100, 300)))
    ahead = []
    write = batch._result

    def counted(custom_id: str, *rest: Any) -> bytes:
        ahead.append(source.lines - (int(custom_id) - 100))
        return write(custom_id, *rest)

    monkeypatch.setattr(batch, "_result", counted)
    counts, _ = answers(llm, source)
    assert counts == (200, 0)
    assert max(ahead) <= 22, "no more lines than fit are in memory"


def test_no_more_lines_are_worked_on_than_are_allowed(llm: LLM) -> None:
    async def run() -> batch.Counts:
        async with AsyncEngine(llm.engine) as client:
            app = App(client, ServeSettings())
            source = io.BytesIO(b"\n".join(line(n) for n in range(9)))
            try:
                return await batch.answer_file(app, source, io.BytesIO(), max_inflight=1)
            finally:
                await app.close()

    assert asyncio.run(run()) == (9, 0)


def test_the_metrics_of_a_batch_are_served_and_nothing_else(llm: LLM) -> None:
    """`run-batch --enable-metrics`."""

    async def run() -> tuple[str, str, str]:
        async with AsyncEngine(llm.engine) as client:
            settings = ServeSettings(port=0)
            app, listener = App(client, settings), bind(settings)
            server = MetricsServer(app, settings)
            task = asyncio.get_running_loop().create_task(server.serve(sockets=[listener]))
            port = listener.getsockname()[1]
            source = io.BytesIO(b"\n".join(line(n) for n in range(5)))
            await batch.answer_file(app, source, io.BytesIO())
            found = [await asked(port, path) for path in ("/metrics", "/v1/models", "/dash")]
            server.should_exit = True
            await task
            await app.close()
            return found[0], found[1], found[2]

    metrics, models, dash = asyncio.run(run())
    assert metrics.startswith("HTTP/1.1 200")
    assert re.search(r'vllm:request_success_total\{.*finished_reason="length".*\} [5-9]', metrics)
    assert models.startswith("HTTP/1.1 404")
    assert dash.startswith("HTTP/1.1 404")


async def asked(port: int, path: str) -> str:
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    head = f"GET {path} HTTP/1.1\r\nHost: 127.0.0.1\r\nConnection: close\r\n\r\n"
    writer.write(head.encode())
    answer = await reader.read()
    writer.close()
    return answer.decode()


def test_a_stopped_engine_ends_the_run(llm: LLM, tmp_path: Path) -> None:
    other = tiny_llm(tmp_path)

    def step() -> Any:
        raise RuntimeError("no more")

    other.engine.core.step = step  # type: ignore[method-assign]
    with pytest.raises(batch.EngineError, match="the remaining lines have no answer"):
        answers(other, io.BytesIO(b"\n".join(line(n) for n in range(4))))
