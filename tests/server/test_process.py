"""A real server: HTTP process and engine process, ended by a signal."""

from __future__ import annotations

import http.client
import json
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

PATIENCE_S = 240
SCRIPT = """
import sys
from contextlib import asynccontextmanager
from twostroke.config import EngineConfig
from twostroke.engine.remote import RemoteEngine
from twostroke.serve.server import serve
from twostroke.serve.settings import ServeSettings

@asynccontextmanager
async def engine():
    config = EngineConfig(model=sys.argv[1], num_gpu_blocks_override=256)
    async with await RemoteEngine.start(config) as remote:
        yield remote

settings = ServeSettings(port=0, drain_s=float(sys.argv[2]))
serve(engine, settings, lambda server, client, url: print(url, flush=True))
print("torch" in sys.modules, flush=True)
"""
LONG = {"prompt": "the", "max_tokens": 200, "ignore_eos": True, "temperature": 0, "stream": True}


@contextmanager
def process(folder: Path, drain_s: float) -> Iterator[tuple[subprocess.Popen[str], int]]:
    command = [sys.executable, "-c", SCRIPT, str(folder), str(drain_s)]
    child = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
    try:
        assert child.stdout is not None
        port = int(child.stdout.readline().rpartition(":")[2])
        yield child, port
    finally:
        child.kill()
        child.wait()


def post(port: int, body: object) -> http.client.HTTPResponse:
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=PATIENCE_S)
    headers = {"Content-Type": "application/json"}
    connection.request("POST", "/v1/completions", json.dumps(body), headers)
    return connection.getresponse()


def test_sigterm_lets_a_stream_finish_and_no_torch_was_needed(folder: Path) -> None:
    with process(folder, drain_s=30) as (child, port):
        answer = post(port, LONG)
        assert answer.status == 200
        assert answer.readline().startswith(b"data: {")
        child.send_signal(signal.SIGTERM)
        rest = answer.read()
        assert rest.endswith(b"data: [DONE]\n\n")
        assert rest.count(b"data: {") == 199
        assert b'"error"' not in rest
        assert child.wait(PATIENCE_S) == 0
        assert child.stdout is not None
        assert child.stdout.read().strip() == "False"


def test_a_second_signal_ends_at_once_with_an_error_event(folder: Path) -> None:
    with process(folder, drain_s=30) as (child, port):
        answers = [post(port, LONG) for _ in range(16)]
        for answer in answers:
            assert answer.readline().startswith(b"data: {")
        child.send_signal(signal.SIGTERM)
        time.sleep(0.05)
        child.send_signal(signal.SIGINT)
        rests = [answer.read() for answer in answers]
        assert all(rest.endswith(b"data: [DONE]\n\n") for rest in rests)
        assert child.wait(PATIENCE_S) == 0


def test_a_port_in_use_is_told_before_a_model_is_loaded(folder: Path) -> None:
    with process(folder, drain_s=0) as (_, port):
        script = SCRIPT.replace("port=0", f"port={port}")
        command = [sys.executable, "-c", script, str(folder / "no-such-model"), "0"]
        second = subprocess.run(command, capture_output=True, text=True, check=False)
        assert second.returncode
        assert f"cannot listen on 127.0.0.1:{port}" in second.stderr
