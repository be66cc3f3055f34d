"""Ranks in processes of their own, as they run for real: they answer, die, are started again."""

from __future__ import annotations

import contextlib
import os
import signal
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from tests.server import running
from tests.server.running import Running, serving
from tests.tiny import tiny_llm
from twostroke import LLM, SamplingParams
from twostroke.config import EngineConfig
from twostroke.distributed import cleanup_dist_env_and_memory
from twostroke.engine import rank_processes
from twostroke.engine.rank_processes import RankProcess, RankProcesses
from twostroke.engine.remote import RemoteEngine
from twostroke.errors import EngineError, ModelError

PATIENCE_S = 240
GREEDY = SamplingParams(temperature=0, max_tokens=12, ignore_eos=True)
PROMPTS = ["the quick brown fox", "a small model writes", "größer"]
RANKS: dict[str, Any] = {"kernels": "reference", "tensor_parallel_size": 2}


@pytest.fixture(scope="module")
def expected(folder: Path) -> list[list[int]]:
    return written(tiny_llm(folder, kernels="reference"))


def written(llm: LLM) -> list[list[int]]:
    return [list(output.outputs[0].token_ids) for output in llm.generate(PROMPTS, GREEDY)]


def other_rank(llm: LLM) -> RankProcess:
    (rank,) = llm.engine.core._executor._followers.ranks  # type: ignore[attr-defined]
    return rank


def state(pid: int) -> tuple[str, int]:
    """Return the state and the parent of a process; the state is "Z" once it has ended."""
    try:
        stat = Path(f"/proc/{pid}/stat").read_text(encoding="ascii", errors="replace")
    except OSError:
        return "Z", 0
    letter, parent, *_ = stat.rpartition(")")[2].split()
    return letter, int(parent)


def children(pid: int) -> list[int]:
    """Return the processes of all ranks but the first."""
    found = []
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit() and state(int(entry.name))[1] == pid:
            with contextlib.suppress(OSError):
                if b"twostroke.engine.rank" in (entry / "cmdline").read_bytes():
                    found.append(int(entry.name))
    return found


def test_a_library_has_ranks_that_write_the_same_and_a_killed_one_is_named(
    folder: Path, expected: list[list[int]]
) -> None:
    llm = tiny_llm(folder, **RANKS)
    assert written(llm) == expected
    assert all(step.comm_s > 0 for step in llm.engine.core.records.steps)
    rank = other_rank(llm)
    rank._process.kill()
    with pytest.raises(EngineError, match=r"^rank 1 was ended by signal 9.*all of them end$"):
        written(llm)


def test_ranks_end_with_the_engine_that_started_them(folder: Path) -> None:
    llm = tiny_llm(folder, **RANKS)
    process = other_rank(llm)._process
    assert process.poll() is None
    del llm
    cleanup_dist_env_and_memory()
    assert process.wait(PATIENCE_S) == 0


def test_a_rank_without_memory_is_named_with_what_to_do(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    poor = partial(RankProcesses, module="tests.engine.poor_rank")
    monkeypatch.setattr(rank_processes, "RankProcesses", poor)
    with pytest.raises(ModelError) as refused:
        tiny_llm(folder, **RANKS)
    says = str(refused.value)
    assert "rank 1 of 2 ran out of memory at the start" in says
    assert "no memory for this weight" in says
    assert "lower kv_cache_memory_bytes, or raise tensor_parallel_size" in says


def test_a_rank_that_ends_where_the_ranks_meet_is_named(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    lost = partial(RankProcesses, module="tests.engine.lost_rank")
    monkeypatch.setattr(rank_processes, "RankProcesses", lost)
    with pytest.raises(EngineError, match="rank 1 ended with exit code 7"):
        tiny_llm(folder, **RANKS)


def test_a_rank_that_ends_before_the_meeting_is_named(folder: Path) -> None:
    config = EngineConfig(model=str(folder), **RANKS)
    others = RankProcesses(config, module="twostroke.engine.no_such_rank")
    with pytest.raises(EngineError, match="rank 1 ended with exit code 1"), others.starting():
        others.wait_for_all()


def test_a_rank_that_does_not_come_is_named(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(rank_processes, "JOIN_TIMEOUT_S", 0.0)
    others = RankProcesses(EngineConfig(model=str(folder), **RANKS))
    with pytest.raises(EngineError, match="rank 1 was not ready within 0 s"), others.starting():
        others.wait_for_all()


@pytest.mark.skipif(not Path("/proc").exists(), reason="a stopped process is found in /proc")
@pytest.mark.parametrize(
    ("stage", "says"),
    [
        ("importing", "while importing its modules"),
        ("joining", "while joining the other ranks"),
        ("loading", "while loading its part of the model"),
    ],
)
def test_a_rank_that_is_stopped_at_its_start_is_killed_and_named(
    folder: Path, monkeypatch: pytest.MonkeyPatch, stage: str, says: str
) -> None:
    started: list[RankProcesses] = []

    class Ranks(RankProcesses):
        def __init__(self, config: EngineConfig) -> None:
            super().__init__(config, module="tests.engine.stopped_rank")
            started.append(self)

    monkeypatch.setenv("STOP_AT", stage)
    monkeypatch.setattr(rank_processes, "RankProcesses", Ranks)
    with pytest.raises(EngineError, match=f"rank 1 was stopped and sent nothing .* {says}, so"):
        tiny_llm(folder, hang_timeout_s=1, **RANKS)
    ((rank,),) = (others.ranks for others in started)
    assert rank._process.returncode == -signal.SIGKILL


@pytest.mark.skipif(not Path("/proc").exists(), reason="a stopped process is found in /proc")
def test_a_rank_that_is_stopped_later_is_killed_and_named(folder: Path) -> None:
    llm = tiny_llm(folder, **RANKS)
    rank = other_rank(llm)
    until = time.monotonic() + PATIENCE_S
    while rank.stage:  # the first rank may be ready first
        assert time.monotonic() < until
        time.sleep(0.01)
    rank._process.send_signal(signal.SIGSTOP)
    while not rank.has_ended:
        assert time.monotonic() < until
        rank.last_message_s -= 3600  # its last heartbeats may still be on their way
        time.sleep(0.01)
    with pytest.raises(EngineError, match=r"^rank 1 .*sent nothing for .* while running steps, so"):
        written(llm)


# ── a server ────────────────────────────────────────────────────────────────────────────────


def ask(server: Running) -> str:
    body = {"prompt": PROMPTS[0], "max_tokens": 8, "temperature": 0, "ignore_eos": True}
    return server.post("/v1/completions", body)["choices"][0]["text"]


@pytest.mark.full
@pytest.mark.skipif(not Path("/proc").exists(), reason="finds the ranks in /proc")
def test_a_server_answers_with_ranks_and_again_after_one_was_killed(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(running, "PATIENCE_S", PATIENCE_S)  # torch is imported by each rank
    config = EngineConfig(model=str(folder), num_gpu_blocks_override=256, **RANKS)

    @asynccontextmanager
    async def engine() -> AsyncIterator[RemoteEngine]:
        async with await RemoteEngine.start(config) as remote:
            yield remote

    with serving(engine) as server:
        first = ask(server)
        assert len(first) > 0
        remote: Any = server.client
        (rank,) = children(remote.pid)
        os.kill(rank, signal.SIGKILL)
        assert ask(server) == first, "it was sent to the new engine"
        assert remote.num_restarts == 1
        _, _, metrics = server.ask("GET", "/metrics")
        line = next(
            line
            for line in metrics.decode().splitlines()
            if line.startswith("twostroke:collective_seconds_total")
        )
        assert float(line.split()[-1]) > 0
        (rank,) = children(remote.pid)
    until = time.monotonic() + PATIENCE_S
    while state(rank)[0] != "Z":
        assert time.monotonic() < until, "the rank outlived its server"
        time.sleep(0.01)
