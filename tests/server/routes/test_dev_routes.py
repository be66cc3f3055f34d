"""The routes that put the engine to sleep and empty its prefix cache."""

from __future__ import annotations

import json
import os
import threading
import time
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest

from tests.instant import BUILDER
from tests.server.running import PATIENCE_S, Running, serving
from tests.tiny import tiny_folder
from twostroke.config import EngineConfig
from twostroke.engine.remote import RemoteEngine

TEXT = "/v1/completions"
PROMPT: dict[str, Any] = {"prompt": "the quick brown fox " * 8, "max_tokens": 3}


@pytest.fixture
def server(tmp_path: Path) -> Iterator[Running]:
    config = EngineConfig(model=str(tiny_folder(tmp_path)), num_gpu_blocks_override=256)

    @asynccontextmanager
    async def engine() -> AsyncIterator[RemoteEngine]:
        async with await RemoteEngine.start(config, BUILDER) as remote:
            yield remote

    with serving(engine, dev_mode=True, api_keys=("secret",)) as server:
        yield server


def ask(server: Running, method: str, path: str, body: Any = None) -> tuple[int, Any]:
    headers = {"Content-Type": "application/json", "Authorization": "Bearer secret"}
    status, _, content = server.ask(method, path, body, headers)
    return status, json.loads(content)


def cached(server: Running) -> int:
    status, answer = ask(server, "POST", TEXT, PROMPT)
    assert status == 200
    count: int = answer["usage"]["prompt_tokens_details"]["cached_tokens"]
    return count


def test_after_a_reset_no_prefix_is_found(server: Running) -> None:
    assert cached(server) == 0
    assert cached(server) > 0
    assert ask(server, "POST", "/reset_prefix_cache") == (200, {"success": True})
    assert cached(server) == 0
    assert cached(server) > 0


def test_an_engine_that_sleeps_has_no_process_and_takes_no_requests(server: Running) -> None:
    pid = server.client.pid  # type: ignore[attr-defined]
    before = ask(server, "POST", TEXT, PROMPT)[1]["choices"]
    status, answer = ask(server, "POST", "/sleep?level=1")
    assert (status, answer["status"], answer["level"]) == (200, "sleeping", 1)
    with pytest.raises(ProcessLookupError):
        os.kill(pid, 0)
    assert ask(server, "GET", "/is_sleeping") == (200, {"is_sleeping": True})
    assert ask(server, "GET", "/health") == (200, {"status": "sleeping"})
    status, answer = ask(server, "POST", TEXT, PROMPT)
    assert status == 503
    assert "/wake_up" in answer["error"]["message"]
    assert ask(server, "POST", "/wake_up") == (200, {"status": "awake", "tags": None})
    assert ask(server, "GET", "/is_sleeping") == (200, {"is_sleeping": False})
    assert ask(server, "POST", TEXT, PROMPT)[1]["choices"] == before
    assert server.client.num_restarts == 0  # those count deaths


def test_requests_under_way_are_aborted_or_waited_for(
    server: Running, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TWOSTROKE_INSTANT_STEP_S", "0.02")  # of the engine that is started next
    for mode, expected in (("abort", 503), ("wait", 200)):
        assert ask(server, "POST", "/sleep")[0] == 200
        assert ask(server, "POST", "/wake_up")[0] == 200
        answers: list[Any] = []
        body = {**PROMPT, "max_tokens": 100, "ignore_eos": True}
        asking = threading.Thread(
            target=lambda body=body, to=answers: to.append(ask(server, "POST", TEXT, body))
        )
        asking.start()
        until = time.monotonic() + PATIENCE_S
        while server.client.load().running == 0:
            assert time.monotonic() < until
            time.sleep(0.005)
        assert ask(server, "POST", f"/sleep?mode={mode}")[0] == 200
        asking.join(PATIENCE_S)
        ((status, answer),) = answers
        assert status == expected
        assert status == 503 or answer["usage"]["completion_tokens"] == 100
        assert ask(server, "POST", "/wake_up")[0] == 200


def test_what_cannot_be_done_is_refused(server: Running) -> None:
    for path in ("/sleep?level=0", "/sleep?mode=keep", "/wake_up?tags=weights"):
        status, answer = ask(server, "POST", path)
        assert status == 400
        assert answer["error"]["param"] == f"query.{path.partition('?')[2].partition('=')[0]}"


def test_nothing_of_it_without_the_key_and_no_key_is_told(server: Running) -> None:
    for method, path in (
        ("POST", "/sleep"),
        ("POST", "/wake_up"),
        ("POST", "/reset_prefix_cache"),
        ("GET", "/server_info"),
    ):
        assert server.ask(method, path)[0] == 401
    status, answer = ask(server, "GET", "/server_info")
    assert status == 200
    assert answer["server"]["api_keys"] == 1
    assert "secret" not in json.dumps(answer)
    assert answer["engine"]["max_model_len"] == 256
