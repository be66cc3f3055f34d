"""Prefixes on a disk through a real server: they survive its death, and requests say so."""

from __future__ import annotations

import http.client
import json
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from tests.server.test_default_model import free_port, wait_until_healthy
from tests.tiny import tiny_folder
from twostroke.kernels import cpu

PATIENCE_S = 240
pytestmark = pytest.mark.skipif(not cpu.available(), reason="built without the native kernels")


@contextmanager
def server(tmp_path: Path, *flags: str) -> Iterator[int]:
    """A server that is killed at the end."""
    port, log = free_port(), tmp_path / "log"
    line = [sys.executable, "-m", "twostroke", "serve", "--port", str(port)]
    line += [f"--kv-disk-cache={tmp_path / 'kv'}:1GiB", *flags]
    with log.open("w") as file:
        child = subprocess.Popen(line, stderr=file, stdout=file)
    try:
        wait_until_healthy(port, child, log)
        yield port
    finally:
        child.send_signal(signal.SIGKILL)
        child.wait()


def ask(port: int, method: str, path: str, body: Any = None) -> bytes:
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=PATIENCE_S)
    head = {"Content-Type": "application/json"}
    connection.request(method, path, None if body is None else json.dumps(body), head)
    answer = connection.getresponse()
    content = answer.read()
    assert answer.status == 200, content
    return content


def complete(port: int, prompt: list[int]) -> dict[str, Any]:
    body = {"prompt": prompt, "max_tokens": 8, "temperature": 0, "ignore_eos": True}
    answer: dict[str, Any] = json.loads(ask(port, "POST", "/v1/completions", body))
    return answer


def metric(port: int, name: str) -> float:
    lines = ask(port, "GET", "/metrics").decode().splitlines()
    (value,) = [float(line.split()[-1]) for line in lines if line.startswith(f"{name}{{")]
    return value


def check_restart(tmp_path: Path, num_tokens: int, *flags: str) -> None:
    prompt = [10 + (7 * n * n) % 200 for n in range(num_tokens)]
    written = "vllm:kv_offload_tiering_write_bytes_total"
    with server(tmp_path, *flags) as port:
        first = complete(port, prompt)
        assert "kv_fetch" not in first["timings"]
        while not metric(port, written):  # a step takes note of what was written
            complete(port, prompt[:3])
    with server(tmp_path, *flags) as port:
        again = complete(port, prompt)
        assert again["choices"][0]["text"] == first["choices"][0]["text"]
        fetch = again["timings"]["kv_fetch"]
        assert (fetch["outcome"], fetch["tiers"]) == ("fetched", "disk")
        assert again["usage"]["prompt_tokens_details"]["cached_tokens"] == fetch["n"] >= 64
        assert metric(port, "vllm:external_prefix_cache_hits_total") == fetch["n"]
        assert metric(port, "vllm:external_prefix_cache_queries_total") == num_tokens
        assert metric(port, "vllm:prefix_cache_hits_total") == 0


def test_a_prompt_is_fetched_after_the_death_of_the_server(tmp_path: Path) -> None:
    folder = tiny_folder(tmp_path / "tiny")
    check_restart(tmp_path, 70, str(folder), "--num-gpu-blocks-override", "256")


@pytest.mark.full  # the same with the default model
def test_a_prompt_of_the_default_model_too(tmp_path: Path) -> None:
    check_restart(tmp_path, 600, "--max-model-len", "1024")


@pytest.mark.parametrize(
    ("flag", "message"),
    [
        ("--kv-disk-cache=/dev/null/kv", "cannot be used"),
        ("--kv-disk-cache=/tmp:-3G", "is not a size"),
        ("--kv-disk-cache=/tmp/kv:9999999G", "lower the size"),
        ("--kv-offloading-size=-1", "GiB of host memory"),
        ("--cache-ram=-2", "expected MiB"),
        ('--kv-transfer-config={"kv_connector": "LMCacheConnectorV1"}', "OffloadingConnector"),
    ],
)
def test_wrong_settings_end_the_start_with_a_message(
    flag: str, message: str, tmp_path: Path
) -> None:
    folder = tiny_folder(tmp_path / "tiny")
    line = [sys.executable, "-m", "twostroke", "serve", str(folder), "--port=0", flag]
    ended = subprocess.run(line, capture_output=True, text=True, timeout=PATIENCE_S, check=False)
    assert ended.returncode != 0
    assert message in ended.stderr
    assert "Traceback" not in ended.stderr
