"""`GroupRanks`: ranks that talk to each other through torch.distributed: gloo between CPUs, NCCL
between GPUs. Imported only where there are several ranks.

The groups are this engine's own and not torch's default one, so that two engines can be in one
process. All ranks are on this machine, and gloo listens on its loopback address only.
"""

from __future__ import annotations

from collections.abc import Sequence
from datetime import timedelta
from time import monotonic
from typing import Any

import torch
import torch.distributed

from twostroke.model.ranks import Ranks

c10d: Any = torch.distributed  # its stubs lack most of what is used here
# A rank that is gone is noticed when its connection ends; one that still reads its weights is
# waited for.
PATIENCE = timedelta(hours=1)


class GroupRanks(Ranks):
    def __init__(self, rank: int, size: int, meeting_place: str, device: torch.device) -> None:
        """Returns when all ranks have come. `meeting_place`: a file in which they find each other,
        new with every group."""
        super().__init__(rank, size)
        store = c10d.FileStore(meeting_place, size)
        options = c10d.ProcessGroupGloo._Options()
        options._devices = [c10d.ProcessGroupGloo.create_device(hostname="127.0.0.1")]
        options._timeout = PATIENCE
        self._on_host: Any = c10d.ProcessGroupGloo(
            c10d.PrefixStore("gloo", store), rank, size, options
        )
        self._group = self._on_host
        if device.type == "cuda":
            torch.cuda.set_device(device)
            own, options = c10d.PrefixStore("nccl", store), c10d.ProcessGroupNCCL.Options()
            options._timeout = PATIENCE
            self._group = c10d.ProcessGroupNCCL(own, rank, size, options)

    def all_reduce(self, x: torch.Tensor) -> torch.Tensor:
        self._wait(self._group.allreduce([x]))
        return x

    def gather(self, x: torch.Tensor) -> Sequence[torch.Tensor]:
        parts = [torch.empty_like(x) for _ in range(0 if self.rank else self.size)]
        options = c10d.GatherOptions()
        options.rootRank = 0
        self._wait(self._group.gather([parts] if parts else [], [x], options))
        return parts

    def broadcast(self, x: torch.Tensor) -> None:
        if len(x):  # a step may sample nothing
            options = c10d.BroadcastOptions()
            options.rootRank = 0
            self._wait(self._group.broadcast([x], options))

    def _wait(self, work: Any) -> None:
        """On a GPU, the stream waits and not the host, so that nothing can be timed here."""
        began_s = monotonic()
        work.wait()
        if self._group is self._on_host:
            self.comm_s += monotonic() - began_s

    def all_numbers(self, numbers: Sequence[int]) -> list[list[int]]:
        own = torch.tensor(numbers, dtype=torch.int64)
        of_all = [torch.empty_like(own) for _ in range(self.size)]
        self._on_host.allgather([of_all], [own]).wait()
        return [one.tolist() for one in of_all]
