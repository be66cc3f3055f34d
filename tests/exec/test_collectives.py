"""Counts of collectives, graphs that are cut at collectives, and ranks that share a GPU."""

from __future__ import annotations

import logging
import os
import threading
from collections.abc import Sequence
from datetime import timedelta
from pathlib import Path
from time import monotonic
from typing import Any

import pytest
import torch
import torch.distributed

from twostroke.config import EngineConfig
from twostroke.engine.build_torch import check_gpus, rank_device
from twostroke.errors import ConfigError
from twostroke.exec import collectives
from twostroke.exec.collectives import GlooRanks, NcclRanks, interpolated
from twostroke.exec.graphs import GraphSegment
from twostroke.exec.start import free_share
from twostroke.model.describe.tensor_parallel import Comm, Ranks

GPU = torch.device("cuda:0")
c10d: Any = torch.distributed


class Noted:
    """A graph that notes what is done with it."""

    def __init__(self, notes: list[str]) -> None:
        self._notes = notes
        notes.append("begin")

    def capture_end(self) -> None:
        self._notes.append("end")

    def replay(self) -> None:
        self._notes.append("replay")


class Talking(Ranks):
    """One of two; `inside`: a graph can hold what it says."""

    def __init__(self, inside: bool) -> None:
        super().__init__(0, 2)
        self._inside = inside
        self.said = 0

    def all_reduce(self, x: torch.Tensor) -> torch.Tensor:
        if self._inside or self.cut is None:
            self._say()
        else:
            self.cut(self._say)
        return x

    def _say(self) -> None:
        self.said += 1
        self.comm = self.comm.plus(Comm(0.5, 100))


def recorded(ranks: Talking) -> tuple[list[str], object]:
    notes: list[str] = []

    def work() -> None:
        ranks.all_reduce(torch.zeros(1))
        ranks.all_reduce(torch.zeros(1))

    return notes, GraphSegment(lambda: Noted(notes), ranks).record(work)


def test_collectives_that_no_graph_can_hold_run_between_graphs_at_every_replay() -> None:
    ranks = Talking(inside=False)
    notes, replay = recorded(ranks)
    assert notes == ["begin", "end"] * 3
    assert (ranks.said, ranks.comm, ranks.cut) == (0, Comm(), None)
    notes.clear()
    for _ in range(2):
        replay()  # type: ignore[operator]
    assert notes == ["replay"] * 6
    assert (ranks.said, ranks.comm) == (4, Comm(2.0, 400))


def test_collectives_inside_a_graph_are_counted_when_it_is_replayed() -> None:
    ranks = Talking(inside=True)
    notes, replay = recorded(ranks)
    assert notes == ["begin", "end"]
    assert ranks.comm == Comm(), "nothing has run"
    for _ in range(3):
        replay()  # type: ignore[operator]
    assert ranks.said == 2, "the host says nothing at replays"
    assert ranks.comm == Comm(3.0, 600)
    assert ranks.comm.sent_bytes(2) == 300


def test_one_rank_alone_replays_the_graph_itself() -> None:
    notes: list[str] = []
    replay = GraphSegment(lambda: Noted(notes), Ranks()).record(lambda: None)
    assert replay.__func__ is Noted.replay  # type: ignore[attr-defined]


def test_a_failure_while_recording_ends_the_recording() -> None:
    ranks, notes = Talking(inside=False), []  # type: ignore[var-annotated]

    def work() -> None:
        raise ValueError("no such kernel")

    with pytest.raises(ValueError, match="no such kernel"):
        GraphSegment(lambda: Noted(notes), ranks).record(work)
    assert notes == ["begin", "end"]
    assert ranks.cut is None


def test_times_between_those_measured() -> None:
    sizes, times = (100, 200, 400), (1.0, 2.0, 6.0)
    found = [interpolated(sizes, times, size) for size in (1, 100, 150, 300, 400, 800)]
    assert found == [1.0, 1.0, 1.5, 4.0, 6.0, 12.0]


# ── devices ─────────────────────────────────────────────────────────────────────────────────


def test_each_rank_has_a_gpu_unless_one_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    apart = EngineConfig(tensor_parallel_size=2)
    with pytest.raises(ConfigError, match=r"torch finds 1 GPUs.*device='cuda:0' puts all ranks"):
        check_gpus(apart, "cuda:0")
    assert [rank_device(apart, "cuda:0", rank) for rank in range(2)] == ["cuda:0", "cuda:1"]
    together = EngineConfig(tensor_parallel_size=2, device="cuda:3")
    check_gpus(together, "cuda:3")
    assert [rank_device(together, "cuda:3", rank) for rank in range(2)] == ["cuda:3", "cuda:3"]
    check_gpus(apart, "cpu")
    assert rank_device(apart, "cpu", 1) == "cpu"


class Sharing(Ranks):
    """The first of four ranks on one GPU. Another rank has seen less free memory."""

    ranks_per_device = 4

    def __init__(self) -> None:
        super().__init__(1, 4)
        self.met = 0

    def all_gather_numbers(self, numbers: Sequence[int]) -> list[list[int]]:
        self.met += 1
        return [[n - 7 for n in numbers], list(numbers)]


def test_ranks_on_one_gpu_look_at_its_memory_together_and_share_it(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda device: (4000, 8000))
    monkeypatch.setattr(torch.cuda, "synchronize", lambda device: None)
    ranks = Sharing()
    assert free_share(GPU, ranks) == 1000 - 7
    assert ranks.met == 2, "before any looks, and before any goes on"
    assert free_share(GPU, Ranks(0, 2)) == 4000, "a GPU each"


# ── a rank that does not come ───────────────────────────────────────────────────────────────


def test_a_collective_that_the_others_do_not_come_to_ends_with_its_name(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(collectives, "STEP_TIMEOUT", timedelta(milliseconds=20))
    joined: list[GlooRanks] = []

    def join(rank: int) -> None:
        joined.append(GlooRanks(rank, 2, str(tmp_path / "store"), torch.device("cpu")))

    thread = threading.Thread(target=join, args=(1,))
    thread.start()
    join(0)
    thread.join(120)
    first = min(joined, key=lambda one: one.rank)
    with pytest.raises(RuntimeError, match=r"^rank 0 of 2, all-reduce of 16 bytes: .*Timed out"):
        first.all_reduce(torch.zeros(4))


# ── NCCL's side, with gloo in its place ─────────────────────────────────────────────────────


class Clock:
    def __init__(self, enable_timing: bool) -> None:
        assert enable_timing

    def record(self) -> None:
        self._at_s = monotonic()

    def synchronize(self) -> None: ...

    def elapsed_time(self, end: Clock) -> float:
        return 1e3 * (end._at_s - self._at_s)


class GlooAsNccl:
    Options = type("Options", (), {})

    def __init__(self, store: Any, rank: int, size: int, options: Any) -> None:
        Path(os.environ["NCCL_DEBUG_FILE"]).write_text(
            f"host:1:2 [{rank}] NCCL INFO Channel 00 : {rank}[0] -> {1 - rank}[1] via SHM/direct\n"
        )
        options = c10d.ProcessGroupGloo._Options()
        options._devices = [c10d.ProcessGroupGloo.create_device(hostname="127.0.0.1")]
        group = c10d.ProcessGroupGloo(store, rank, size, options)
        self.allreduce, self.gather, self.broadcast = group.allreduce, group.gather, group.broadcast


class C10dWithNccl:
    ProcessGroupNCCL = GlooAsNccl

    def __getattr__(self, name: str) -> Any:
        return getattr(c10d, name)


def test_ranks_with_a_gpu_each_count_what_they_send_and_tell_how(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """One thread after another is started: the environment that asks for the log is of a process,
    and so are ranks."""
    monkeypatch.delenv("NCCL_DEBUG", raising=False)
    monkeypatch.setattr(collectives, "c10d", C10dWithNccl())
    monkeypatch.setattr(collectives, "TIMED_BYTES", (1 << 10, 1 << 16, 1 << 20))
    monkeypatch.setattr(torch.cuda, "set_device", lambda device: None)
    monkeypatch.setattr(torch.cuda, "Event", Clock)
    found: dict[int, Any] = {}

    def be(rank: int) -> None:
        ranks = NcclRanks(rank, 2, str(tmp_path / "store"), torch.device("cpu"))
        summed = ranks.all_reduce(torch.full((4,), rank + 1.0))
        parts = ranks.gather(torch.full((2,), float(rank)))
        token = torch.tensor([rank + 5])
        ranks.broadcast(token)
        ranks.broadcast(token[:0])
        told = [part.tolist() for part in parts]
        found[rank] = summed.tolist(), told, token.tolist(), ranks.comm

    threads = [threading.Thread(target=be, args=(rank,)) for rank in range(2)]
    with caplog.at_level(logging.INFO):
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(120)
    (summed, parts, token, comm), other = found[0], found[1]
    assert summed == other[0] == [3.0] * 4
    assert parts == [[0.0, 0.0], [1.0, 1.0]]
    assert other[1] == []
    assert token == other[2] == [5]
    assert comm.ring_bytes == other[3].ring_bytes == 2 * 16 + 8 + 8
    assert comm.seconds > 0
    assert "an all-reduce of 1 MiB among 2 ranks" in caplog.text
    assert "ranks 0 and 1 talk through the host's memory" in caplog.text
