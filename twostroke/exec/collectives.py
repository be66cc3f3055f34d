"""Ranks that talk to each other through torch.distributed. Imported only where there are several.

    GlooRanks   through the hosts: ranks on CPUs, and several ranks on one GPU, which NCCL refuses.
                No graph can hold such a collective: it is a cut of the graph that is recorded
    NcclRanks   a GPU each; graphs hold the collectives

The groups are this engine's own and not torch's default one, so that two engines can be in one
process. All ranks are on this machine, and gloo listens on its loopback address only.
"""

from __future__ import annotations

import ctypes
import logging
from bisect import bisect_left
from collections.abc import Callable, Sequence
from datetime import timedelta
from functools import partial
from pathlib import Path
from time import monotonic
from typing import Any

import torch
import torch.distributed

from twostroke.exec.nccl_log import logging_to, read_paths
from twostroke.model.describe.tensor_parallel import Comm, Ranks

log = logging.getLogger(__name__)

c10d: Any = torch.distributed  # its stubs lack most of what is used here
# A rank that is gone is noticed when its connection ends; these are for one that stands still.
JOIN_PATIENCE = timedelta(minutes=2)  # to meet, and to connect: all have started
START_PATIENCE = timedelta(hours=1)  # where all come together while one still reads its weights
STEP_PATIENCE = timedelta(minutes=10)  # of a step's collective, which takes milliseconds
TIMED_BYTES = (1 << 12, 1 << 16, 1 << 20, 1 << 23, 1 << 26)  # all-reduces that are timed at start
TIMED_ROUNDS = 20


def join_group(rank: int, size: int, meeting_place: str, device: torch.device, own: bool) -> Ranks:
    """Returns when all ranks have come. `meeting_place`: a file in which they find each other, new
    with every group. `own`: whether a GPU is this rank's alone, and not shared by all of them."""
    kind = NcclRanks if device.type == "cuda" and own else GlooRanks
    return kind(rank, size, meeting_place, device)


class GroupRanks(Ranks):
    def __init__(self, rank: int, size: int, meeting_place: str, device: torch.device) -> None:
        super().__init__(rank, size)
        self.alone = False
        self._device, self._store = device, c10d.FileStore(meeting_place, size)
        self._store.set(f"rank {rank}", "here")
        self._store.wait([f"rank {one}" for one in range(size)], JOIN_PATIENCE)
        options = c10d.ProcessGroupGloo._Options()
        options._devices = [c10d.ProcessGroupGloo.create_device(hostname="127.0.0.1")]
        options._timeout = JOIN_PATIENCE
        store = c10d.PrefixStore("gloo", self._store)
        self._gloo: Any = c10d.ProcessGroupGloo(store, rank, size, options)

    def all_numbers(self, numbers: Sequence[int]) -> list[list[int]]:
        own = torch.tensor(numbers, dtype=torch.int64)
        of_all = [torch.empty_like(own) for _ in range(self.size)]
        options = c10d.distributed_c10d.AllgatherOptions()
        options.timeout = START_PATIENCE
        self._finish("numbers of all", lambda: self._gloo.allgather([of_all], [own], options))
        return [one.tolist() for one in of_all]

    def _finish(self, what: str, start: Callable[[], Any]) -> None:
        """Start a collective and wait for its end; raises which one it was, on which rank."""
        try:
            start().wait()
        except RuntimeError as error:
            reason = str(error).partition("\n")[0]
            raise RuntimeError(f"rank {self.rank} of {self.size}, {what}: {reason}") from error


class GlooRanks(GroupRanks):
    """What a GPU has goes through a buffer at a fixed address: that is what a cut of a graph reads
    and writes, and the graphs on both sides of it."""

    def __init__(
        self,
        rank: int,
        size: int,
        meeting_place: str,
        device: torch.device,
        staged: bool | None = None,
    ) -> None:
        """`staged`: whether to use such a buffer; by default only on a GPU."""
        super().__init__(rank, size, meeting_place, device)
        on_gpu = device.type == "cuda"
        self.per_device = size if on_gpu else 1
        self._staged = on_gpu if staged is None else staged
        self._stage = torch.empty(0, dtype=torch.uint8)
        self._host = torch.empty(0, dtype=torch.uint8)

    def all_reduce(self, x: torch.Tensor) -> torch.Tensor:
        if x.is_meta:
            return x
        stage, host = self._places(x, 1)
        if self._staged:
            stage[0].copy_(x)
        self._do("all-reduce", stage, host, partial(self._reduce, host[0]), 2)
        return x.copy_(stage[0]) if self._staged else x

    def _reduce(self, x: torch.Tensor) -> Any:
        options = c10d.AllreduceOptions()
        options.timeout = STEP_PATIENCE
        return self._gloo.allreduce([x], options)

    def gather(self, x: torch.Tensor) -> Sequence[torch.Tensor]:
        stage, host = self._places(x, 1 if self.rank else self.size)
        if self._staged:
            stage[0].copy_(x)
        self._do("gather", stage, host, partial(self._gather, host), 1)
        return [] if self.rank else list(stage)

    def _gather(self, places: torch.Tensor) -> Any:
        options = c10d.GatherOptions()
        options.rootRank, options.timeout = 0, STEP_PATIENCE
        return self._gloo.gather([] if self.rank else [list(places)], [places[0]], options)

    def broadcast(self, x: torch.Tensor) -> None:
        if len(x):  # a step may sample nothing
            stage, host = self._places(x, 1)
            if self._staged:
                stage[0].copy_(x)
            self._do("broadcast", stage, host, partial(self._broadcast, host[0]), 1)
            if self._staged:
                x.copy_(stage[0])

    def _broadcast(self, x: torch.Tensor) -> Any:
        options = c10d.BroadcastOptions()
        options.rootRank, options.timeout = 0, STEP_PATIENCE
        return self._gloo.broadcast([x], options)

    # ── through the host ────────────────────────────────────────────────────────────────────

    def _places(self, x: torch.Tensor, count: int) -> tuple[torch.Tensor, torch.Tensor]:
        """[count, …] like `x` on its device and on the host, the same memory on a CPU."""
        shape = (count, *x.shape)
        if not self._staged:
            places = x.unsqueeze(0)
            if count > 1:
                places = torch.empty(shape, dtype=x.dtype)
                places[0].copy_(x)
            return places, places
        size = count * x.numel() * x.element_size()
        if size > len(self._stage):  # graphs that were recorded keep the one before
            pinned = self._device.type == "cuda"
            self._stage = torch.empty(size, dtype=torch.uint8, device=self._device)
            self._host = torch.empty(size, dtype=torch.uint8, pin_memory=pinned)
        stage, host = (one[:size].view(x.dtype).view(shape) for one in (self._stage, self._host))
        return stage, host

    def _do(
        self,
        what: str,
        stage: torch.Tensor,
        host: torch.Tensor,
        start: Callable[[], Any],
        weight: int,
    ) -> None:
        """Now, or at every replay of what is being recorded."""
        num_bytes = host[0].numel() * host.element_size()
        told = f"{what} of {num_bytes:,} bytes"
        run = partial(self._run, told, stage, host, start, weight * num_bytes)
        if self.cut is None:
            run()
        else:
            self.cut(run)

    def _run(
        self,
        what: str,
        stage: torch.Tensor,
        host: torch.Tensor,
        start: Callable[[], Any],
        ring_bytes: int,
    ) -> None:
        if self._staged:
            host.copy_(stage, non_blocking=True)
            if stage.is_cuda:
                torch.cuda.current_stream(self._device).synchronize()
        began_s = monotonic()
        self._finish(what, start)
        self.comm = self.comm.plus(Comm(monotonic() - began_s, ring_bytes))
        if self._staged:
            stage.copy_(host, non_blocking=True)


class NcclRanks(GroupRanks):
    """Collectives are launched as kernels are, and the host does not wait: how long they take is
    measured once, at the start, and told by their size."""

    def __init__(self, rank: int, size: int, meeting_place: str, device: torch.device) -> None:
        super().__init__(rank, size, meeting_place, device)
        torch.cuda.set_device(device)
        options = c10d.ProcessGroupNCCL.Options()
        options._timeout = STEP_PATIENCE
        store = c10d.PrefixStore("nccl", self._store)
        self.num_recorded = 0  # collectives that graphs hold
        self._times_s = [0.0] * len(TIMED_BYTES)
        log_of = f"{meeting_place}.nccl.{{}}".format
        with logging_to(log_of(rank)):
            self._nccl: Any = c10d.ProcessGroupNCCL(store, rank, size, options)
            # It ends with the process, and never before: its destructor would wait for the graphs
            # that hold its collectives, and whoever drops the last reference with it.
            ctypes.pythonapi.Py_IncRef(ctypes.py_object(self._nccl))
            self._times_s = self._measure()
        self.all_numbers([0])  # until all have written their logs
        if rank == 0 and size > 1:
            self._tell_paths([Path(log_of(one)) for one in range(size)])

    def _tell_paths(self, logs: Sequence[Path]) -> None:
        """How the ranks talk, with a warning where that is slow."""
        sent = Comm(0.0, 2 * TIMED_BYTES[-1]).sent_bytes(self.size)
        rate = sent / max(self._times_s[-1], 1e-9) / 1e9
        log.info(
            "an all-reduce of %d MiB among %d ranks: %.2f ms, %.0f GB/s sent by each; of %d KiB: "
            "%.0f µs",
            TIMED_BYTES[-1] >> 20,
            self.size,
            1e3 * self._times_s[-1],
            rate,
            TIMED_BYTES[1] >> 10,
            1e6 * self._times_s[1],
        )
        texts = [one.read_text(errors="replace") for one in logs if one.exists()]
        paths = read_paths("\n".join(texts))
        if paths is not None:
            log.info("%s", paths)
            for warning in paths.warnings():
                log.warning("%s", warning)

    def all_reduce(self, x: torch.Tensor) -> torch.Tensor:
        if x.is_meta:
            return x
        options = c10d.AllreduceOptions()
        options.asyncOp = False  # on the stream that computes
        _wait(self._nccl.allreduce([x], options))
        self._count(x, 2)
        return x

    def gather(self, x: torch.Tensor) -> Sequence[torch.Tensor]:
        parts = [torch.empty_like(x) for _ in range(0 if self.rank else self.size)]
        options = c10d.GatherOptions()
        options.rootRank, options.asyncOp = 0, False
        _wait(self._nccl.gather([parts] if parts else [], [x], options))
        self._count(x, 1)
        return parts

    def broadcast(self, x: torch.Tensor) -> None:
        if len(x):  # a step may sample nothing
            options = c10d.BroadcastOptions()
            options.rootRank, options.asyncOp = 0, False
            _wait(self._nccl.broadcast([x], options))
            self._count(x, 1)

    def _count(self, x: torch.Tensor, weight: int) -> None:
        """What a graph holds is counted while it is recorded, and by the recorder at replays."""
        self.num_recorded += self.cut is not None
        num_bytes = x.numel() * x.element_size()
        seconds = self.expected_s(num_bytes) * weight / 2
        self.comm = self.comm.plus(Comm(seconds, weight * num_bytes))

    def expected_s(self, num_bytes: int) -> float:
        """Of an all-reduce, between the sizes that were timed."""
        return interpolated(TIMED_BYTES, self._times_s, num_bytes)

    def _measure(self) -> list[float]:
        """All ranks at one time: the first of them connects them, which takes a while."""
        buffer = torch.zeros(TIMED_BYTES[-1], dtype=torch.uint8, device=self._device)
        times = []
        for size in (TIMED_BYTES[0], *TIMED_BYTES):
            part = buffer[:size].view(torch.bfloat16)
            begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))  # type: ignore[no-untyped-call]
            self.all_reduce(part)
            begin.record()
            for _ in range(TIMED_ROUNDS):
                self.all_reduce(part)
            end.record()
            end.synchronize()
            times.append(1e-3 * begin.elapsed_time(end) / TIMED_ROUNDS)
        self.comm = Comm()
        return times[1:]


def _wait(work: Any) -> None:
    if work is not None:  # the stream waits, not the host
        work.wait()


def interpolated(sizes: Sequence[int], times: Sequence[float], size: int) -> float:
    """On straight lines between the points; beyond the last at its rate, before the first as long
    as the first."""
    at = bisect_left(sizes, size)
    if at == 0:
        return times[0]
    if at == len(sizes):
        return times[-1] * size / sizes[-1]
    share = (size - sizes[at - 1]) / (sizes[at] - sizes[at - 1])
    return times[at - 1] + share * (times[at] - times[at - 1])
