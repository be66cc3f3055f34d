"""Ranks that communicate through torch.distributed. Imported only with several ranks.

    GlooRanks   through the host: ranks on CPUs, or several ranks on one GPU, which NCCL refuses.
                A CUDA graph cannot contain such a collective, so the capture is cut there
    NcclRanks   one GPU per rank; CUDA graphs contain the collectives

Each engine has its own process group instead of torch's default group, so that one process can run
two engines. All ranks are on this machine, and gloo listens on the loopback address only.
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

from twostroke.errors import EngineError
from twostroke.exec.nccl_log import logging_to, read_paths
from twostroke.model.describe.tensor_parallel import Comm, Ranks

log = logging.getLogger(__name__)

c10d: Any = torch.distributed  # the stubs lack most of the functions used here
# Timeouts for a rank that hangs. If a rank dies, the others notice because its connection closes.
JOIN_TIMEOUT = timedelta(minutes=2)  # to meet and connect, after all ranks have started
MEET_CHECK = timedelta(seconds=1)  # how often a rank that waits for others checks that they run
START_TIMEOUT = timedelta(hours=1)  # for collectives while another rank may load weights
STEP_TIMEOUT = timedelta(minutes=10)  # for a collective of a step, which takes milliseconds
TIMED_BYTES = (1 << 12, 1 << 16, 1 << 20, 1 << 23, 1 << 26)  # all-reduces timed at start
TIMED_ROUNDS = 20


def join_group(
    rank: int,
    size: int,
    store_path: str,
    device: torch.device,
    own: bool,
    check: Callable[[], None] = lambda: None,
) -> Ranks:
    """Join the group of ranks; return when all ranks have joined. `store_path`: a new file for
    the rendezvous. `own`: this rank has a GPU of its own. `check`: called while this rank waits for
    the others; raises if one of them has ended."""
    kind = NcclRanks if device.type == "cuda" and own else GlooRanks
    return kind(rank, size, store_path, device, check=check)


def _meet(store: Any, rank: int, size: int, check: Callable[[], None]) -> None:
    """Wait until all ranks have written to the store."""
    store.set(f"rank {rank}", "here")
    until = monotonic() + JOIN_TIMEOUT.total_seconds()
    for other in range(size):
        while True:
            check()
            try:
                store.wait([f"rank {other}"], MEET_CHECK)
                break
            except RuntimeError:  # not there yet
                if monotonic() < until:
                    continue
            raise EngineError(
                f"rank {other} has not met rank {rank} within {JOIN_TIMEOUT.total_seconds():.0f} s "
                "of its start; start again when the machine is less busy"
            )


class GroupRanks(Ranks):
    def __init__(
        self,
        rank: int,
        size: int,
        store_path: str,
        device: torch.device,
        check: Callable[[], None] = lambda: None,
    ) -> None:
        super().__init__(rank, size)
        self.alone = False
        self._device, self._store = device, c10d.FileStore(store_path, size)
        _meet(self._store, rank, size, check)
        options = c10d.ProcessGroupGloo._Options()
        options._devices = [c10d.ProcessGroupGloo.create_device(hostname="127.0.0.1")]
        options._timeout = JOIN_TIMEOUT
        store = c10d.PrefixStore("gloo", self._store)
        self._gloo: Any = c10d.ProcessGroupGloo(store, rank, size, options)

    def all_gather_numbers(self, numbers: Sequence[int]) -> list[list[int]]:
        own = torch.tensor(numbers, dtype=torch.int64)
        of_all = [torch.empty_like(own) for _ in range(self.size)]
        options = c10d.distributed_c10d.AllgatherOptions()
        options.timeout = START_TIMEOUT
        self._finish(
            "all-gather of numbers", lambda: self._gloo.allgather([of_all], [own], options)
        )
        return [one.tolist() for one in of_all]

    def _finish(self, what: str, start: Callable[[], Any]) -> None:
        """Run a collective to its end. An error names the collective and the rank."""
        try:
            start().wait()
        except RuntimeError as error:
            reason = str(error).partition("\n")[0]
            raise RuntimeError(f"rank {self.rank} of {self.size}, {what}: {reason}") from error


class GlooRanks(GroupRanks):
    """Ranks that communicate with gloo. GPU tensors are copied to a device buffer at a fixed
    address, which the CUDA graphs before and after a cut use, and from there to a host buffer."""

    def __init__(
        self,
        rank: int,
        size: int,
        store_path: str,
        device: torch.device,
        staged: bool | None = None,
        check: Callable[[], None] = lambda: None,
    ) -> None:
        """`staged`: use these buffers; by default only on a GPU."""
        super().__init__(rank, size, store_path, device, check)
        on_gpu = device.type == "cuda"
        self.ranks_per_device = size if on_gpu else 1
        self._staged = on_gpu if staged is None else staged
        self._stage = torch.empty(0, dtype=torch.uint8)
        self._host = torch.empty(0, dtype=torch.uint8)

    def all_reduce(self, x: torch.Tensor) -> torch.Tensor:
        if x.is_meta:
            return x
        stage, host = self._buffers(x, 1)
        if self._staged:
            stage[0].copy_(x)
        self._run_or_record("all-reduce", stage, host, partial(self._reduce, host[0]), 2)
        return x.copy_(stage[0]) if self._staged else x

    def _reduce(self, x: torch.Tensor) -> Any:
        options = c10d.AllreduceOptions()
        options.timeout = STEP_TIMEOUT
        return self._gloo.allreduce([x], options)

    def gather(self, x: torch.Tensor) -> Sequence[torch.Tensor]:
        stage, host = self._buffers(x, 1 if self.rank else self.size)
        if self._staged:
            stage[0].copy_(x)
        self._run_or_record("gather", stage, host, partial(self._gather, host), 1)
        return [] if self.rank else list(stage)

    def _gather(self, buffers: torch.Tensor) -> Any:
        options = c10d.GatherOptions()
        options.rootRank, options.timeout = 0, STEP_TIMEOUT
        return self._gloo.gather([] if self.rank else [list(buffers)], [buffers[0]], options)

    def broadcast(self, x: torch.Tensor) -> None:
        if len(x):  # a step may sample nothing
            stage, host = self._buffers(x, 1)
            if self._staged:
                stage[0].copy_(x)
            self._run_or_record("broadcast", stage, host, partial(self._broadcast, host[0]), 1)
            if self._staged:
                x.copy_(stage[0])

    def _broadcast(self, x: torch.Tensor) -> Any:
        options = c10d.BroadcastOptions()
        options.rootRank, options.timeout = 0, STEP_TIMEOUT
        return self._gloo.broadcast([x], options)

    # ── through the host ────────────────────────────────────────────────────────────────────

    def _buffers(self, x: torch.Tensor, count: int) -> tuple[torch.Tensor, torch.Tensor]:
        """Return buffers [count, …] for tensors like `x`, on its device and on the host. Without
        staging both are the same tensor."""
        shape = (count, *x.shape)
        if not self._staged:
            buffers = x.unsqueeze(0)
            if count > 1:
                buffers = torch.empty(shape, dtype=x.dtype)
                buffers[0].copy_(x)
            return buffers, buffers
        size = count * x.numel() * x.element_size()
        if size > len(self._stage):  # captured graphs hold the previous buffer
            pinned = self._device.type == "cuda"
            self._stage = torch.empty(size, dtype=torch.uint8, device=self._device)
            self._host = torch.empty(size, dtype=torch.uint8, pin_memory=pinned)
        stage, host = (one[:size].view(x.dtype).view(shape) for one in (self._stage, self._host))
        return stage, host

    def _run_or_record(
        self,
        what: str,
        stage: torch.Tensor,
        host: torch.Tensor,
        start: Callable[[], Any],
        ring_passes: int,
    ) -> None:
        """Run a collective now, or at every replay of the graph that is being captured.
        `ring_passes`: how often each byte goes around the ring (`Comm.ring_bytes`)."""
        num_bytes = host[0].numel() * host.element_size()
        label = f"{what} of {num_bytes:,} bytes"
        run = partial(self._run, label, stage, host, start, ring_passes * num_bytes)
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
    """Ranks that communicate with NCCL. Collectives are launched like kernels, without waiting:
    their time is measured once at start and estimated from their size."""

    def __init__(
        self,
        rank: int,
        size: int,
        store_path: str,
        device: torch.device,
        check: Callable[[], None] = lambda: None,
    ) -> None:
        super().__init__(rank, size, store_path, device, check)
        torch.cuda.set_device(device)
        options = c10d.ProcessGroupNCCL.Options()
        options._timeout = STEP_TIMEOUT
        store = c10d.PrefixStore("nccl", self._store)
        self.num_recorded = 0  # collectives in captured graphs
        self._times_s = [0.0] * len(TIMED_BYTES)
        log_of = f"{store_path}.nccl.{{}}".format
        with logging_to(log_of(rank)):
            self._nccl: Any = c10d.ProcessGroupNCCL(store, rank, size, options)
            # The group is kept until the process ends. Its destructor would wait for the graphs
            # that contain its collectives, and would block the thread that drops the last
            # reference.
            ctypes.pythonapi.Py_IncRef(ctypes.py_object(self._nccl))
            self._times_s = self._measure()
        self.all_gather_numbers([0])  # wait until all ranks have written their logs
        if rank == 0 and size > 1:
            self._log_paths([Path(log_of(one)) for one in range(size)])

    def _log_paths(self, logs: Sequence[Path]) -> None:
        """Log the paths between the ranks, with a warning for each slow path."""
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
        options.asyncOp = False  # on the compute stream
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

    def _count(self, x: torch.Tensor, ring_passes: int) -> None:
        """Add a collective to `comm`. During capture (when `cut` is set) `exec/graphs.py` records
        the amount, and adds it at every replay."""
        self.num_recorded += self.cut is not None
        num_bytes = x.numel() * x.element_size()
        seconds = self.expected_s(num_bytes) * ring_passes / 2
        self.comm = self.comm.plus(Comm(seconds, ring_passes * num_bytes))

    def expected_s(self, num_bytes: int) -> float:
        """Return the expected time of an all-reduce, interpolated between the timed sizes."""
        return interpolated(TIMED_BYTES, self._times_s, num_bytes)

    def _measure(self) -> list[float]:
        """Time all-reduces on all ranks. The first all-reduce connects the ranks, which is slow."""
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
    if work is not None:
        work.wait()  # makes the stream wait, not the host


def interpolated(sizes: Sequence[int], times: Sequence[float], size: int) -> float:
    """Interpolate linearly between `sizes`. Below the smallest size, return its time; above the
    largest, extrapolate with its bytes per second."""
    at = bisect_left(sizes, size)
    if at == 0:
        return times[0]
    if at == len(sizes):
        return times[-1] * size / sizes[-1]
    share = (size - sizes[at - 1]) / (sizes[at] - sizes[at - 1])
    return times[at - 1] + share * (times[at] - times[at - 1])
