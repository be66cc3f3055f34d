"""The loop of an engine process, run in this process over real sockets."""

from __future__ import annotations

import os
from collections.abc import Iterator
from dataclasses import replace
from itertools import count
from pathlib import Path

import pytest
import zmq

from tests.engine.test_hand_over import PROMPT, request
from tests.support import narrow_isa
from tests.tiny import tiny_folder, tiny_llm
from twostroke.engine import process
from twostroke.engine.core import EngineCore
from twostroke.engine.process import EngineServer, HeartbeatThread
from twostroke.engine.wire import Release, encode
from twostroke.kernels import cpu

pytestmark = pytest.mark.skipif(
    not cpu.available() or not hasattr(os, "memfd_create"), reason="native kernels on Linux only"
)


@pytest.fixture
def sockets() -> Iterator[dict[str, zmq.Socket[bytes]]]:
    """The two ends of the inbox, the outbox, and an outbox for the heartbeats."""
    context = zmq.Context()
    pairs = {"inbox": zmq.PULL, "to_engine": zmq.PUSH, "outbox": zmq.PUSH, "parent": zmq.PULL}
    found = {name: context.socket(kind) for name, kind in pairs.items()}
    found["beats"] = context.socket(zmq.PUSH)
    for listener, connector in (("inbox", "to_engine"), ("parent", "outbox")):
        found[listener].bind(f"inproc://{listener}")
        found[connector].connect(f"inproc://{listener}")
    found["beats"].connect("inproc://parent")
    yield found
    context.destroy(linger=0)


def stalled_core(folder: Path) -> tuple[EngineCore, int]:
    """An engine whose cache is held by an offer, which the next request needs. Also returns the
    number of the offer."""
    core = tiny_llm(
        folder,
        kernels="native",
        isa=narrow_isa(),
        kv_sharing="shared",
        engines_on_host=2,
        num_gpu_blocks_override=5,
        max_model_len=72,
        enable_prefix_caching=False,
    ).engine.core
    numbers = []
    for name in ("first", "second"):
        core.add(replace(request(name, PROMPT), hand_over=True))
    while not core.is_stalled:
        numbers += [update.offer.number for update in core.step() if update.offer is not None]
    (number,) = numbers
    return core, number


def test_a_stalled_engine_hears_that_its_blocks_are_free_however_busy_the_machine_is(
    tmp_path: Path, sockets: dict[str, zmq.Socket[bytes]], monkeypatch: pytest.MonkeyPatch
) -> None:
    """On a busy machine the time for messages is always up when the engine looks at the clock."""
    core, number = stalled_core(tiny_folder(tmp_path / "tiny"))
    heart = HeartbeatThread(sockets["beats"])
    server = EngineServer(core, heart, sockets["inbox"], sockets["outbox"])
    clock = count()
    monkeypatch.setattr(process, "monotonic", lambda: float(next(clock)))
    sockets["to_engine"].send(encode(Release([number])))
    assert server._take_messages()
    assert not core.scheduler.kv.num_held
    offered = []
    while core.has_work:
        offered += [update.offer for update in core.step() if update.offer is not None]
    assert len(offered) == 1, "the second request runs"
    heart.stop()
