"""Ranks as threads of this process, over real gloo groups: many models run on the same ones."""

from __future__ import annotations

import queue
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from tests.equivalence.op_graphs import OpRecorder, RecordedKernels
from twostroke.engine.assembly import group_limits
from twostroke.engine.build_torch import make_executor
from twostroke.engine.core import EngineCore
from twostroke.exec.collectives import GlooRanks
from twostroke.exec.graphs import ladder
from twostroke.exec.ranks import RanksExecutor, follow
from twostroke.exec.torch_executor import TorchExecutor
from twostroke.kernels.reference import Kernels
from twostroke.model.describe.cost import cost_model, dense_weight_bytes
from twostroke.model.describe.spec import ModelSpec
from twostroke.model.describe.tensor_parallel import ONE_RANK, Ranks
from twostroke.model.torch.decoder import Decoder
from twostroke.model.weights import WeightSource
from twostroke.sched.scheduler import Scheduler
from twostroke.sched.step import SchedulerConfig

PATIENCE_S = 240
MAX_LEN, BLOCK_SIZE, NUM_BLOCKS = 256, 16, 64

Work = Callable[[Ranks], object]


class RankThreads:
    """`size` ranks, of which this thread is the first. `run` has all of them do the same."""

    def __init__(self, size: int, folder: Path, staged: bool = False) -> None:
        """`staged`: what they exchange goes through buffers, as that of GPUs does."""
        self.size, self._staged = size, staged
        self._store = str(folder / f"store{size}")
        self._inboxes: list[queue.SimpleQueue[Work | None]] = [
            queue.SimpleQueue() for _ in range(size - 1)
        ]
        self._done: queue.SimpleQueue[BaseException | None] = queue.SimpleQueue()
        self._threads = [
            threading.Thread(target=self._be, args=(n, inbox), daemon=True)
            for n, inbox in enumerate(self._inboxes, 1)
        ]
        for thread in self._threads:
            thread.start()
        self.own = self._join(0)

    def _join(self, rank: int) -> Ranks:
        if self.size == 1 and not self._staged:
            return ONE_RANK
        return GlooRanks(rank, self.size, self._store, torch.device("cpu"), self._staged)

    def _be(self, rank: int, inbox: queue.SimpleQueue[Work | None]) -> None:
        ranks = self._join(rank)
        while (work := inbox.get()) is not None:
            try:
                work(ranks)
                self._done.put(None)
            except BaseException as error:
                self._done.put(error)

    def run(self, work: Callable[[Ranks], Any]) -> Any:
        """What the first rank returns; each of the others does its part meanwhile."""
        for inbox in self._inboxes:
            inbox.put(work)
        found = work(self.own)
        for _ in self._inboxes:
            error = self._done.get(timeout=PATIENCE_S)
            if error is not None:
                raise error
        return found

    def close(self) -> None:
        for inbox in self._inboxes:
            inbox.put(None)
        for thread in self._threads:
            thread.join(PATIENCE_S)
            assert not thread.is_alive()


class Queues:
    """`Followers` that are threads."""

    def __init__(self, size: int) -> None:
        self.of: list[queue.SimpleQueue[bytes]] = [queue.SimpleQueue() for _ in range(size - 1)]

    def send(self, data: bytes) -> None:
        for one in self.of:
            one.put(data)

    def failure(self) -> str:
        return ""


def run_model(
    threads: RankThreads,
    spec: ModelSpec,
    weights: WeightSource,
    use: Callable[[EngineCore], Any],
    graphs: bool = False,
    **limits: object,
) -> Any:
    """`use` of an engine whose ranks are these threads. `graphs`: steps are recorded, and cut."""
    queues = Queues(threads.size)

    def work(ranks: Ranks) -> Any:
        executor = _executor(spec, weights, ranks, graphs, **limits)
        if ranks.rank:
            follow(executor, iter(queues.of[ranks.rank - 1].get, b""))
            return None
        config = _limits(executor.program.decoder.spec, **limits)
        scheduler = Scheduler(config)
        cost = cost_model(spec, dense_weight_bytes(spec, 4), 4)
        core = EngineCore(scheduler, RanksExecutor(executor, queues), cost)
        try:
            return use(core)
        finally:
            queues.send(b"")

    return threads.run(work)


def _limits(spec: ModelSpec, **given: object) -> SchedulerConfig:
    settings: dict[str, object] = {
        "max_num_seqs": 16,
        "max_num_batched_tokens": 64,
        "max_model_len": MAX_LEN,
        "block_size": BLOCK_SIZE,
        "prefix_caching": False,
    }
    blocks = [given.pop("num_blocks", NUM_BLOCKS)] * len(spec.kv_groups())
    settings["groups"] = group_limits(spec, blocks)  # type: ignore[arg-type]
    return SchedulerConfig(**(settings | given))  # type: ignore[arg-type]


def _executor(
    spec: ModelSpec, weights: WeightSource, ranks: Ranks, graphs: bool, **limits: object
) -> TorchExecutor:
    cpu, kernels = torch.device("cpu"), RecordedKernels() if graphs else Kernels()
    decoder = Decoder(spec, weights, torch.float32, cpu, MAX_LEN, kernels, ranks=ranks)
    config = _limits(decoder.spec, **limits)
    return make_executor(
        decoder,
        [group.num_blocks for group in config.groups],
        config.max_num_seqs,
        config.max_model_len,
        config.block_size,
        config.max_num_batched_tokens,
        torch.float32,
        1,
        ladder(config.max_num_seqs) if graphs else (),
        OpRecorder(kernels, ranks) if isinstance(kernels, RecordedKernels) else None,
    )
