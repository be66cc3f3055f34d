"""KV blocks by the real NIXL, here over what UCX finds on one machine, and what may go wrong."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator
from time import monotonic, sleep
from typing import Any

import numpy as np
import pytest

from tests.kv.test_transfer import SENDER, fetch, pools
from twostroke.errors import ConfigError
from twostroke.kv import nixl
from twostroke.kv.host_pool import HostPool
from twostroke.kv.nixl import Nixl
from twostroke.kv.transfer import (
    Address,
    DamagedError,
    Fetch,
    HostBlocks,
    KVTransfer,
    Offer,
    OfferWithdrawnError,
    SenderGoneError,
    TransferError,
    TruncatedError,
    UnreachableError,
)
from twostroke.kv.transports import TransportConfig, host_transfer

needs_nixl = pytest.mark.skipif(
    nixl.installed() is None or not hasattr(os, "memfd_create"), reason="NIXL is not installed"
)
ALL = [[(0, 1), (1, 2), (2, 3)], [(0, 4), (1, 5), (2, 6)]]
Made = tuple[HostPool, HostPool, KVTransfer, KVTransfer]


@pytest.fixture(scope="module")
def made() -> Made:
    sender, receiver, sending, fetching = pools(transport="nixl", checked=True)
    return sender, receiver, sending, fetching


@pytest.fixture
def offer(made: Made) -> Iterator[Offer]:
    _, receiver, sending, fetching = made
    for data in receiver.data:
        data[:] = 0
    offer = sending.offer([[3, 5, 1], [4, 7, 2]], 12)
    yield offer
    sending.release(offer.number)
    (transport,) = fetching._transports
    assert isinstance(transport, Nixl)
    assert len(transport._free) == nixl.COPIES, "a copy has not given back its place"


@needs_nixl
def test_blocks_of_every_group_arrive_as_they_were_sent(made: Made, offer: Offer) -> None:
    sender, receiver, _, fetching = made
    assert [one.transport for one in offer.addresses] == ["nixl"]
    assert fetch(fetching, offer, ALL) == offer.num_bytes
    for group, sources in enumerate(([3, 5, 1], [4, 7, 2])):
        targets = [target for _, target in ALL[group]]
        assert np.array_equal(sender.data[group][sources], receiver.data[group][targets])
    assert not receiver.data[0][[0, 4, 5, 6, 7, 8]].any(), "no other block was written"
    assert fetch(fetching, offer, [[(2, 8)], []]) == sender.data[0][0].nbytes
    assert fetch(fetching, offer, [[], []]) == 0


@needs_nixl
def test_a_few_blocks_with_each_step(made: Made, offer: Offer) -> None:
    sender, receiver, _, fetching = made
    copying, turns, until = fetching.fetch(offer, ALL), 0, monotonic() + 60
    while not copying.advance(1):
        assert copying.num_bytes <= (turns + 1) * max(offer.block_bytes), "a block a turn"
        turns += 1
        assert monotonic() < until
        sleep(0.001)
    assert turns >= 5
    assert copying.num_bytes == offer.num_bytes
    assert np.array_equal(sender.data[1][2], receiver.data[1][6])


@needs_nixl
def test_what_was_released_is_not_taken_for_the_real_thing(made: Made) -> None:
    _, _, sending, fetching = made
    before, during = (sending.offer([[3, 5, 1], [4, 7, 2]], 12) for _ in range(2))
    sending.release(before.number)
    with pytest.raises(OfferWithdrawnError):
        fetch(fetching, before, ALL)
    copying = fetching.fetch(during, ALL)
    while not copying.num_bytes:
        copying.advance(1)
    sending.release(during.number)
    with pytest.raises(OfferWithdrawnError):
        end(copying)


@needs_nixl
def test_one_that_is_given_up_is_not_written_any_more(made: Made, offer: Offer) -> None:
    _, receiver, _, fetching = made
    copying = fetching.fetch(offer, ALL)
    while not copying.num_bytes:
        copying.advance(1)
    copying.abandon()
    receiver.data[0][:] = 0
    sleep(0.05)
    assert not receiver.data[0].any()


@needs_nixl
def test_damaged_and_truncated_blocks_have_a_name(made: Made, offer: Offer) -> None:
    *_, fetching = made
    with pytest.raises(DamagedError):
        fetch(fetching, offer._replace(checksums=((1, 2, 3), (4, 5, 6))), ALL)
    with pytest.raises(TruncatedError, match="block 900 of group 0"):
        fetch(fetching, offer._replace(tables=((900, 1, 2), (1, 2, 3))), ALL)


@needs_nixl
def test_more_than_can_be_on_their_way_are_refused(made: Made, offer: Offer) -> None:
    *_, fetching = made
    copying = [fetching.fetch(offer, ALL) for _ in range(nixl.COPIES)]
    with pytest.raises(TransferError, match="fetches are in progress already"):
        fetching.fetch(offer, ALL)
    for one in copying:
        one.abandon()


@needs_nixl
def test_what_is_no_address_of_nixl_s_is_unreachable(made: Made, offer: Offer) -> None:
    *_, fetching = made
    reach = nixl._decode(offer.addresses[0].data)
    broken = nixl._encode(nixl.Reach(b"nothing", reach.pools, reach.slots))
    address = offer.addresses[0]._replace(endpoint="another", data=broken)
    with pytest.raises(UnreachableError, match="NIXL does not reach the sender"):
        fetching.fetch(offer._replace(addresses=(address,)), ALL)


def end(copying: Fetch) -> None:
    while not copying.advance():
        sleep(0.001)


def fetch_until_it_fails(fetching: KVTransfer, offer: Offer) -> None:
    """Fetch until the broken connection is noticed, which is soon but not at once."""
    for _ in range(100):
        fetch(fetching, offer, [[(0, 1), (1, 2)]])
        sleep(0.05)


@needs_nixl
def test_another_process_s_blocks_are_fetched_until_it_dies() -> None:
    with subprocess.Popen(
        [sys.executable, "-c", SENDER.replace("TRANSPORT", "nixl")],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    ) as process:
        assert process.stdout is not None
        names: dict[str, Any] = {"Address": Address}
        offer = Offer(*eval(process.stdout.readline(), names))
        own = memoryview(bytearray(64 * 9))
        fetching = host_transfer(
            HostBlocks([own], [64], 4), None, TransportConfig(transport="nixl", timeout_s=20)
        )
        for _ in range(2):
            assert fetch(fetching, offer, [[(0, 1), (1, 2)]]) == 128
            assert own[64:192].tobytes() == (bytes(range(1, 10)) * 64)[128:256]
        process.kill()
        process.wait()
        with pytest.raises((SenderGoneError, UnreachableError)):
            fetch_until_it_fails(fetching, offer)


def test_without_the_package_it_is_refused_with_what_to_do(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(nixl, "PACKAGES", ("no_such_package",))
    blocks = HostBlocks([memoryview(bytearray(64 * 9))], [64], 4)
    with pytest.raises(ConfigError, match=r"pip install 'twostroke\[nixl\]'"):
        host_transfer(blocks, None, TransportConfig(transport="nixl"))


@pytest.mark.parametrize("card", [True, False])
def test_by_itself_it_is_used_where_there_is_a_card_for_it(
    card: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The other transports remain if NIXL then fails."""
    monkeypatch.setattr(nixl, "has_rdma", lambda: card)
    monkeypatch.setattr(nixl, "installed", lambda: "no_such_package")
    tried: list[bool] = []

    class Broken:
        def __init__(self, *_: Any) -> None:
            tried.append(True)
            raise ConfigError("no card answers")

    monkeypatch.setattr(nixl, "Nixl", Broken)
    blocks = HostBlocks([memoryview(bytearray(64 * 9))], [64], 4)
    transfer = host_transfer(blocks, None, TransportConfig(host="127.0.0.1"))
    assert [transport.name for transport in transfer._transports] == ["memory", "sockets"]
    assert bool(tried) == card
