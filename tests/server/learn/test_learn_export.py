"""The page `/learn` as a file with recorded data: below 2 MB, and it works without a server."""

from __future__ import annotations

import asyncio
import subprocess
import sys
from pathlib import Path

import pytest

from tests.server.browser import Browser
from tests.server.learn.learn_page import learn_page
from tests.server.running import running
from tests.tiny import tiny_llm
from twostroke.config import EngineConfig
from twostroke.serve.learn.learn_export import exported, recorded
from twostroke.serve.learn.learn_routes import LearnData

MAX_BYTES = 2_000_000
EXPERIMENTS = ("stall", "batch", "context", "prefix", "full_cache")


def assert_works_alone(chrome: Browser, path: Path) -> None:
    """Walk through the lessons and the tools of an exported page."""
    assert path.stat().st_size < MAX_BYTES
    with learn_page(chrome, path.as_uri()) as learn:
        for number in range(1, 7):
            learn.go(f"lesson/{number}/1")
            learn.answered(0)
            assert learn.answered(learn.right_option()) == "right", number
        learn.go("prompt")
        learn.run("run")
        learn.page.value("document.querySelectorAll('details').forEach(one => { one.open = true })")
        learn.run("attention")
        assert len(learn.shown("rect[data-query]")) > 10
        learn.go("predict")
        learn.run("predict")
        assert len(learn.shown("tr[data-row]")) == 3
        learn.go("company")
        for name in EXPERIMENTS:
            learn.run(name)
            assert learn.shown(f"[data-result={name}] .sentence")
        assert learn.page.errors == []
        asked = {url for url in learn.page.asked if not url.startswith("data:")}
        assert asked == {path.as_uri()}


@pytest.mark.full
def test_the_exported_page_needs_no_server(chrome: Browser, folder: Path, tmp_path: Path) -> None:
    path = tmp_path / "learn.html"
    with running(tiny_llm(folder), engine=EngineConfig(model=str(folder))) as server:
        loop = server.server._loop
        assert loop is not None
        made = recorded(LearnData(server.app.service))
        recording = asyncio.run_coroutine_threadsafe(made, loop).result(120)
        path.write_bytes(exported(recording))
    assert_works_alone(chrome, path)


@pytest.mark.long
@pytest.mark.timeout(1800)
def test_the_command_exports_the_default_model(chrome: Browser, tmp_path: Path) -> None:
    path = tmp_path / "learn.html"
    command = [sys.executable, "-m", "twostroke", "learn", "--export", str(path)]
    subprocess.run(command, check=True)
    assert_works_alone(chrome, path)
