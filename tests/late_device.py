"""A device whose streams run their work late, and in any order that a GPU allows.

Work waits in its stream until somebody waits for it. Then work of other streams may run before it,
in turns that a seed chooses. So code that relies on an order that it has not asked for reads or
writes wrong blocks.
"""

from __future__ import annotations

import contextlib
import random
import threading
from collections import deque
from collections.abc import Callable, Iterator

import pytest
import torch

from twostroke.kv.tiers import host


class LateDevice:
    def __init__(self, seed: int) -> None:
        self.rng, self.lock = random.Random(seed), threading.RLock()
        self.streams: list[LateStream] = []
        self.current = threading.local()
        self.steps = self.stream()  # of the engine

    def stream(self, *_: object) -> LateStream:
        self.streams.append(LateStream(self))
        return self.streams[-1]

    @contextlib.contextmanager
    def on(self, stream: LateStream) -> Iterator[None]:
        before, self.current.stream = getattr(self.current, "stream", None), stream
        yield
        self.current.stream = before

    def copy(self, targets: list[torch.Tensor], sources: list[torch.Tensor]) -> None:
        """Queue copies on the current stream, like `host.launch_copies`."""
        for target, source in zip(targets, sources, strict=True):
            self.current.stream.add(lambda target=target, source=source: target.copy_(source))

    def run_until(self, stream: LateStream, count: int) -> None:
        """Run the first `count` pieces of work of a stream, and in between work of others."""
        with self.lock:
            while stream.num_done < count:
                self.rng.choice([stream, *(one for one in self.streams if one.work)]).run_one()


class LateStream:
    def __init__(self, device: LateDevice) -> None:
        self.device, self.num_added, self.num_done = device, 0, 0
        self.work: deque[Callable[[], object]] = deque()

    def add(self, work: Callable[[], object]) -> None:
        with self.device.lock:
            self.work.append(work)
            self.num_added += 1

    def run_one(self) -> None:
        with torch.inference_mode():
            self.work.popleft()()
        self.num_done += 1

    def synchronize(self) -> None:
        self.record_event().synchronize()

    def record_event(self) -> LateEvent:
        return LateEvent(self, self.num_added)


class LateEvent:
    def __init__(self, stream: LateStream, count: int) -> None:
        self.stream, self.count = stream, count

    def synchronize(self) -> None:
        self.stream.device.run_until(self.stream, self.count)


def late_device(monkeypatch: pytest.MonkeyPatch, seed: int) -> LateDevice:
    """Have host tiers copy on a device of this kind."""
    device = LateDevice(seed)
    monkeypatch.setattr(host, "stream_of", device.stream)
    monkeypatch.setattr(host, "on_stream", device.on)
    monkeypatch.setattr(host, "launch_copies", device.copy)
    return device
