"""Requests handed over between engines on torch, their blocks copied on the device: here a CPU,
whose memory both ends map, by the code that copies on a GPU."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch

from tests.engine.test_hand_over import (
    PROMPT,
    assert_nothing_left,
    hand_over,
    request,
    resumed,
    run,
)
from tests.equivalence.harness import small_spec
from tests.loud import Loud
from tests.specs import make_spec
from tests.tiny import tiny_llm
from twostroke.engine.assembly import group_limits
from twostroke.engine.build_torch import assemble
from twostroke.engine.core import EngineCore
from twostroke.exec.graphs import EagerReplay
from twostroke.kernels.reference import Kernels
from twostroke.kv import nixl
from twostroke.kv.device_memory import DeviceBlocks, DeviceMemory, staged_copy
from twostroke.kv.pool import KVPool
from twostroke.kv.transfer import (
    Address,
    DamagedError,
    KVTransfer,
    Offer,
    OfferWithdrawnError,
    SenderGoneError,
    TruncatedError,
    UnreachableError,
)
from twostroke.kv.transports import TransportConfig
from twostroke.model.torch.decoder import Decoder
from twostroke.sched.step import SchedulerConfig

pytestmark = pytest.mark.skipif(not hasattr(os, "memfd_create"), reason="Linux only")
CPU = torch.device("cpu")
NIXL = pytest.mark.skipif(nixl.installed() is None, reason="NIXL is not installed")
WAYS = ("device", "memory", "sockets", pytest.param("nixl", marks=NIXL))


@pytest.fixture(scope="module")
def alone(folder: Path) -> EngineCore:
    return core(folder)


def core(folder: Path, sharing: str = "none", transport: str = "auto") -> EngineCore:
    llm = tiny_llm(
        folder,
        kernels="reference",
        device="cpu",
        max_num_seqs=8,
        kv_sharing=sharing,
        engines_on_host=2,  # one alone could fetch nothing
        kv_transport=transport,
    )
    return llm.engine.core


@pytest.fixture(scope="module", params=WAYS)
def engines(
    request: pytest.FixtureRequest, folder: Path
) -> Iterator[tuple[EngineCore, EngineCore, str]]:
    made = core(folder, "checked", request.param), core(folder, "none", request.param)
    yield (*made, request.param)
    for one in made:
        assert one.scheduler.offers.transfer is not None
        one.scheduler.offers.transfer.close()


@pytest.mark.parametrize("seed", [None, 11])
def test_a_hand_over_does_not_change_a_single_bit(
    seed: int | None, engines: tuple[EngineCore, EngineCore, str], alone: EngineCore
) -> None:
    sender, receiver, way = engines
    given = [
        request(f"r{n}", PROMPT[: 20 + 8 * n], temperature=0 if seed is None else 0.9, seed=seed)
        for n in range(4)
    ]
    expected = run(alone, *given)
    got, fetched = hand_over(sender, receiver, *given)
    assert [one.tokens for one in got] == [one.tokens for one in expected]
    if way not in (
        "sockets",
        "nixl",
    ):  # there they go on when their blocks have come, not all in one step
        assert [one.logprobs for one in got] == [one.logprobs for one in expected]
    assert [one.num_chunks for one in got] == [0] * 4, "the receiver has prefilled nothing"
    assert not any(one.problem for one in fetched)
    assert all(one.num_bytes for one in fetched)
    assert_nothing_left(sender, receiver, alone)


def test_a_damaged_block_is_computed_again(
    engines: tuple[EngineCore, EngineCore, str], alone: EngineCore
) -> None:
    sender, receiver, _ = engines
    (expected,) = run(alone, request())
    (begun,) = run(sender, replace(request(), hand_over=True))
    assert begun.offer is not None
    assert sender.scheduler.offers.transfer is not None
    blocks = sender.scheduler.offers.transfer._blocks
    data = bytearray(blocks.read(0, begun.offer.tables[0][1]))
    data[7] ^= 1
    blocks.write(0, begun.offer.tables[0][1], data)
    (rest,) = run(receiver, resumed(request(), begun, begun.offer))
    sender.release_offers([begun.offer.number])
    assert begun.tokens + rest.tokens == expected.tokens
    (fetched,) = receiver.scheduler.received.take_fetched()
    assert fetched.problem.startswith("DamagedError")
    assert_nothing_left(sender, receiver, alone)


# Steps run while blocks are on their way


class Later:
    """An event of a slow device: reached after a few queries."""

    def __init__(self) -> None:
        self.left, self.waited = 3, False

    def query(self) -> bool:
        self.left -= 1
        return self.left < 0

    def synchronize(self) -> None:
        self.waited = True


@pytest.fixture
def slow(monkeypatch: pytest.MonkeyPatch) -> list[Later]:
    marks: list[Later] = []

    def event(self: DeviceMemory) -> Later:
        marks.append(Later())
        return marks[-1]

    monkeypatch.setattr(DeviceMemory, "event", event)
    return marks


def graphed(sharing: str) -> EngineCore:
    """As on a GPU: two steps in flight, decode in graphs, windows."""
    spec = small_spec(windows=(24, None))
    decoder = Decoder(spec, Loud(spec), torch.float32, CPU, 256, Kernels())
    limits = SchedulerConfig(
        max_num_seqs=8,
        max_num_batched_tokens=64,
        max_model_len=256,
        block_size=8,
        groups=group_limits(spec, [64, 64]),
    )
    graphs = {"graph_sizes": [1, 2, 4, 8], "record": EagerReplay()}
    return assemble(
        decoder, limits, torch.float32, 2, sharing=TransportConfig(sharing, "device"), **graphs
    )


def test_streams_go_on_while_blocks_arrive_and_tokens_are_the_same(slow: list[Later]) -> None:
    alone, sender, receiver = (graphed(way) for way in ("none", "shared", "none"))
    given = [request(f"r{n}", PROMPT[: 9 * n], max_tokens=30, logprobs=None) for n in range(1, 6)]
    expected = run(alone, *given)
    begun = run(sender, *(replace(one, hand_over=True) for one in given[1:]))
    receiver.add(given[0])  # writes there from its prompt on
    got = {one.request_id: list[int]() for one in given}
    for one, first in zip(given[1:], begun, strict=True):
        got[one.request_id] += first.tokens
        receiver.add(resumed(one, first, first.offer))
    beside = 0  # tokens of the stream that was there, while blocks were on their way
    while receiver.has_work:
        for update in receiver.step():
            got[update.request_id] += update.tokens
            on_way = receiver.scheduler.kv.num_receiving
            beside += bool(on_way and update.request_id == "r1")
        receiver.scheduler.audit()
    assert list(got.values()) == [one.tokens for one in expected]
    assert beside > 0
    assert not any(one.problem for one in receiver.scheduler.received.take_fetched())
    assert slow
    assert not any(mark.waited for mark in slow), "nobody waits for the device"
    for first in begun:
        assert first.offer is not None
        sender.release_offers([first.offer.number])
    assert_nothing_left(alone, sender, receiver)


def test_an_abort_during_a_fetch_waits_for_the_device(slow: list[Later]) -> None:
    """Otherwise a copy could be written to blocks that another request has by then."""
    sender, receiver = graphed("shared"), graphed("none")
    (begun,) = run(sender, replace(request(), hand_over=True))
    assert begun.offer is not None
    receiver.add(resumed(request(), begun, begun.offer))
    receiver.step()
    assert receiver.scheduler.kv.num_receiving == 1
    assert receiver.awaits_fetch
    end = receiver.abort("r")
    assert end is not None
    assert [mark.waited for mark in slow] == [True]
    sender.release_offers([begun.offer.number])
    assert_nothing_left(sender, receiver)


# Blocks


class Pools:
    """A sender with random blocks and an empty receiver, with two KV groups each."""

    def __init__(self, dtype: torch.dtype = torch.bfloat16, checked: bool = False) -> None:
        spec = make_spec(windows=(8, None, None))
        self.sender = KVPool(spec, [8, 8], 4, dtype, CPU, shared=True)
        self.receiver = KVPool(spec, [6, 6], 4, dtype, CPU)
        rng = np.random.default_rng(1)
        for data in self.sender.groups:
            raw = data.view(torch.uint8)
            raw[1:] = torch.from_numpy(rng.integers(0, 256, raw[1:].shape, dtype=np.uint8))
        how = "checked" if checked else "shared"
        self.sending = self.sender.transfer(TransportConfig(how, "device"))
        self.fetching = self.receiver.transfer(TransportConfig(transport="device"))

    def offer(self) -> Offer:
        return self.sending.offer([[3, 5, 8], [4, 7, 2]], 12)


ALL = [[(0, 1), (1, 6), (2, 2)], [(0, 4), (1, 5), (2, 3)]]


def fetch_all(transfer: KVTransfer, offer: Offer, most: int | None = None) -> int:
    fetch, turns = transfer.fetch(offer, ALL), 1
    while not fetch.advance(most):
        turns += 1
    return turns


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32, torch.uint8])
def test_blocks_arrive_bit_by_bit_and_no_other_is_written(dtype: torch.dtype) -> None:
    pools = Pools(dtype)
    offer = pools.offer()
    assert [address.transport for address in offer.addresses] == ["device"]
    assert fetch_all(pools.fetching, offer) == 1
    for group, places in enumerate(ALL):
        table, sent, got = offer.tables[group], pools.sender.groups, pools.receiver.groups
        for entry, target in places:
            there = sent[group][table[entry]].contiguous().view(torch.uint8)
            assert torch.equal(there, got[group][target].contiguous().view(torch.uint8))
        others = [n for n in range(7) if n not in [target for _, target in places]]
        assert not got[group][others].view(torch.uint8).any()


def test_while_streams_write_a_part_of_the_copy_is_launched_with_each_step(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    pools = Pools()
    offer = pools.offer()
    monkeypatch.setattr("twostroke.kv.device_memory.LAUNCHED_BYTES", max(offer.block_bytes))
    assert fetch_all(pools.fetching, offer, most=1) >= 4
    assert torch.equal(
        pools.sender.groups[1][2].view(torch.int16), pools.receiver.groups[1][3].view(torch.int16)
    )


def test_transfer_errors_have_their_own_classes() -> None:
    pools = Pools(checked=True)
    offer = pools.offer()
    beyond = offer._replace(tables=((3, 5, 800), (4, 7, 2)))
    with pytest.raises(TruncatedError, match="group 0 has 9 blocks, and block 800"):
        pools.fetching.fetch(beyond, ALL)
    pools.sender.groups[0][5].view(torch.uint8).view(-1)[3] ^= 1
    with pytest.raises(DamagedError, match="block 5 of group 0"):
        fetch_all(pools.fetching, offer)
    pools.sending.release(offer.number)
    with pytest.raises(OfferWithdrawnError):
        fetch_all(pools.fetching, offer)


def test_memory_that_cannot_be_opened_is_fetched_over_sockets(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """As on systems that forbid CUDA IPC."""

    def forbidden(*what: object) -> torch.Tensor:
        raise RuntimeError("CUDA error: operation not supported")

    monkeypatch.setattr("twostroke.kv.device_memory._open", forbidden)
    pools = Pools()
    sending = pools.sender.transfer(TransportConfig("shared", host="127.0.0.1"))
    fetching = pools.receiver.transfer(TransportConfig())
    offer = sending.offer([[3, 5, 8], [4, 7, 2]], 12)
    assert [one.transport for one in offer.addresses] == ["device", "memory", "sockets"]
    offer = offer._replace(addresses=(offer.addresses[0], offer.addresses[2]))
    for _ in range(2):
        fetch = fetching.fetch(offer, ALL)
        assert fetch.transport == "sockets"
        while not fetch.advance():
            pass
    assert caplog.text.count("cannot be mapped: CUDA error: operation not supported") == 1
    got, sent = pools.receiver.groups[1][3], pools.sender.groups[1][2]
    assert torch.equal(got.view(torch.int16), sent.view(torch.int16))
    with pytest.raises(UnreachableError, match="memory cannot be mapped"):
        fetching.fetch(offer._replace(addresses=offer.addresses[:1]), ALL)
    fetching.close()
    sending.close()


def test_a_release_while_blocks_are_copied_is_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    pools = Pools()
    offer = pools.offer()
    (transport,) = pools.fetching._transports
    assert isinstance(transport, DeviceMemory)
    launch = transport.launch

    def late(*what: object) -> torch.Tensor:
        pools.sending.release(offer.number)
        return launch(*what)  # type: ignore[arg-type]

    monkeypatch.setattr(transport, "launch", late)
    with pytest.raises(OfferWithdrawnError):
        fetch_all(pools.fetching, offer)


SENDER = """
import sys
import torch
from tests.engine.test_device_transfer import Pools
pools = Pools()
print(repr(tuple(pools.offer())), flush=True)
sys.stdin.read()
"""


def test_memory_of_an_ended_process_is_released() -> None:
    receiver = Pools()
    (transport,) = receiver.fetching._transports
    assert isinstance(transport, DeviceMemory)
    with subprocess.Popen(
        [sys.executable, "-c", SENDER], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    ) as process:
        assert process.stdout is not None
        offer = Offer(*eval(process.stdout.readline(), {"Address": Address}))
        fetch_all(receiver.fetching, offer)
        same = Pools()  # as full of noise as the other process's
        fetch_all(same.fetching, same.offer())
        for group in (0, 1):
            mine, others = same.receiver.groups[group], receiver.receiver.groups[group]
            assert torch.equal(mine.view(torch.int16), others.view(torch.int16))
        assert len(transport._opened) == 1
        process.kill()
    with pytest.raises(SenderGoneError):
        fetch_all(receiver.fetching, offer)
    assert not transport._opened
    receiver.fetching.tidy()


def test_blocks_of_an_odd_size_are_copied_in_narrower_words() -> None:
    data = torch.arange(5 * 6, dtype=torch.uint8).view(5, 1, 1, 2, 3)
    blocks = DeviceBlocks([data], 2)
    assert blocks.words[0].dtype == torch.int16
    assert blocks.read(0, 2) == bytes(range(12, 18))
    blocks.write(0, 1, b"abcdef")
    assert data[1].view(-1).tolist() == list(b"abcdef")
    with torch.inference_mode():
        staged_copy(blocks.words[0], blocks.words[0], torch.tensor([[2, 4]]))
    assert data[4].view(-1).tolist() == list(range(12, 18))
