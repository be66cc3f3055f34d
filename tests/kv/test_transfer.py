"""KV blocks from one real pool to another, and everything that may be wrong with them."""

from __future__ import annotations

import os
import subprocess
import sys
from time import monotonic, sleep

import numpy as np
import pytest

from tests.fakes import groups
from tests.specs import make_spec
from twostroke.kv.cache import KVCache, KVSequence
from twostroke.kv.host_pool import HostPool
from twostroke.kv.prefix import seed_digest
from twostroke.kv.shared_memory import SLOTS, SharedMemory, SharedPools
from twostroke.kv.transfer import (
    Address,
    BlockPairs,
    DamagedError,
    HostBlocks,
    KVTransfer,
    MismatchedError,
    Offer,
    OfferWithdrawnError,
    ReceiverFullError,
    SenderGoneError,
    TruncatedError,
    UnreachableError,
)
from twostroke.kv.transports import TransportConfig, host_transfer

pytestmark = pytest.mark.skipif(not hasattr(os, "memfd_create"), reason="Linux only")
ROOT = seed_digest("salt", "")


def pools(
    num_blocks: int = 8, checked: bool = False, block_size: int = 4, transport="memory", secret=None
):
    """A sender whose blocks are filled with noise, and an empty receiver."""
    spec, rng = make_spec(windows=(8, None, None)), np.random.default_rng(1)
    sender = HostPool(spec, [num_blocks, num_blocks], block_size, shared=True)
    receiver = HostPool(spec, [num_blocks, num_blocks], block_size)
    for data in sender.data:
        data[1:] = rng.integers(0, 1 << 16, data[1:].shape)
    offering = TransportConfig("checked" if checked else "shared", transport, secret=secret)
    sending = host_transfer(sender.blocks(), sender.shared, offering)
    fetches = TransportConfig(transport=transport, timeout_s=20, secret=secret)
    fetching = host_transfer(receiver.blocks(), None, fetches)
    return sender, receiver, sending, fetching


def test_memory_is_made_ready_and_stays_as_it_was(monkeypatch) -> None:
    monkeypatch.setattr("twostroke.kv.transfer.PREPARED_BYTES_PER_CALL", 8192)
    pool = bytearray(os.urandom(20000))
    before = bytes(pool)
    blocks = HostBlocks([memoryview(pool)], [64], 4)
    told = [
        host_transfer(blocks, None, TransportConfig(receives=True)).prepare_memory()
        for _ in range(4)
    ]
    assert told == [True, True, True, False]
    assert pool == before
    assert not host_transfer(blocks, None, TransportConfig()).prepare_memory()  # nothing will come


def fetch(transfer: KVTransfer, offer: Offer, pairs: BlockPairs) -> int:
    """All of it; how many bytes."""
    fetching, until = transfer.fetch(offer, pairs), monotonic() + 60
    while not fetching.advance():
        assert monotonic() < until
        sleep(0.001)
    return fetching.num_bytes


def test_blocks_of_every_group_arrive_as_they_were_sent() -> None:
    sender, receiver, sending, fetching = pools()
    assert len({data[0].nbytes for data in sender.data}) == 2, "groups of different sizes"
    offer = sending.offer([[3, 5, 1], [0, 7, 2]], 12)
    copied = fetch(fetching, offer, [[(0, 2), (1, 8), (2, 1)], [(1, 4), (2, 3)]])
    for source, target in ((3, 2), (5, 8), (1, 1)):
        assert np.array_equal(sender.data[0][source], receiver.data[0][target])
    for source, target in ((7, 4), (2, 3)):
        assert np.array_equal(sender.data[1][source], receiver.data[1][target])
    assert not receiver.data[0][[0, 3, 4, 5, 6, 7]].any(), "no other block was written"
    assert copied == offer.num_bytes == 3 * sender.data[0][0].nbytes + 2 * sender.data[1][0].nbytes


def test_what_the_receiver_has_is_not_fetched() -> None:
    sender, receiver, sending, fetching = pools()
    offer = sending.offer([[3, 5, 1], [4, 7, 2]], 12)
    copied = fetch(fetching, offer, [[(2, 6)], [(2, 6)]])
    assert copied == sender.data[0][0].nbytes + sender.data[1][0].nbytes
    assert np.array_equal(sender.data[1][2], receiver.data[1][6])


def test_an_offer_that_was_released_is_refused_though_its_bytes_are_there() -> None:
    _, _, sending, fetching = pools()
    offer = sending.offer([[3], [4]], 4)
    sending.release(offer.number)
    with pytest.raises(OfferWithdrawnError):
        fetch(fetching, offer, [[(0, 1)], [(0, 1)]])
    again = sending.offer([[3], [4]], 4)
    assert again.number != offer.number
    assert fetch(fetching, again, [[(0, 1)], [(0, 1)]])


def test_a_release_while_blocks_are_copied_is_noticed() -> None:
    _, receiver, sending, _ = pools()
    offer = sending.offer([[3], [4]], 4)

    class Slow(HostBlocks):
        """The offer is released while a block is written."""

        def write(self, *block) -> None:
            sending.release(offer.number)
            super().write(*block)

    blocks = receiver.blocks()
    blocks.__class__ = Slow
    with pytest.raises(OfferWithdrawnError):
        fetch(host_transfer(blocks, None, TransportConfig()), offer, [[(0, 1)], [(0, 1)]])


def test_a_damaged_block_is_noticed_where_checksums_are_sent() -> None:
    sender, _, sending, fetching = pools(checked=True)
    offer = sending.offer([[3], [4]], 4)
    assert fetch(fetching, offer, [[(0, 1)], [(0, 1)]])
    sender.data[1][4].reshape(-1)[-1] ^= 1
    with pytest.raises(DamagedError, match="block 4 of group 1"):
        fetch(fetching, offer, [[(0, 1)], [(0, 1)]])


def test_memory_that_is_too_short_is_refused_before_it_is_read() -> None:
    _, _, sending, fetching = pools()
    offer = sending.offer([[3], [4]], 4)
    beyond = offer._replace(tables=((3,), (4000,)))
    with pytest.raises(TruncatedError, match="block 4000 of group 1"):
        fetch(fetching, beyond, [[(0, 1)], [(0, 1)]])


def test_memory_that_is_no_pool_is_refused(tmp_path) -> None:
    _, _, sending, fetching = pools()
    (tmp_path / "short").write_bytes(b"x" * 10)
    offer = sending.offer([[3], [4]], 4)
    short = offer.addresses[0]._replace(endpoint=str(tmp_path / "short"))
    offer = offer._replace(addresses=(short,))
    with pytest.raises(TruncatedError):
        fetch(fetching, offer, [[(0, 1)], [(0, 1)]])


def test_blocks_of_another_size_are_refused_by_name() -> None:
    _, _, sending, fetching = pools()
    _, _, _, other = pools(block_size=8)
    offer = sending.offer([[3], [4]], 4)
    with pytest.raises(MismatchedError, match="blocks of 4 tokens"):
        other.fetch(offer, [[(0, 1)], [(0, 1)]])
    of_another_type = offer._replace(layout="float32, tokens first")
    with pytest.raises(
        MismatchedError, match=r"the sender offers .*float32.*, but this engine has .*float16"
    ):
        fetching.fetch(of_another_type, [[(0, 1)], [(0, 1)]])


def test_memory_of_another_machine_is_not_tried() -> None:
    _, _, sending, fetching = pools()
    offer = sending.offer([[3], [4]], 4)
    elsewhere = offer.addresses[0]._replace(scope="another machine")
    with pytest.raises(UnreachableError, match="offers memory at /proc/"):
        fetching.fetch(offer._replace(addresses=(elsewhere,)), [[(0, 1)], [(0, 1)]])


SENDER = """
import sys
from twostroke.kv.shared_memory import SharedPools
from twostroke.kv.transfer import HostBlocks
from twostroke.kv.transports import TransportConfig, host_transfer
shared = SharedPools([64 * 9])
shared.pools[0][:] = bytes(range(1, 10)) * 64
sharing = TransportConfig("shared", "TRANSPORT")
transfer = host_transfer(HostBlocks(shared.pools, [64], 4), shared, sharing)
offer = transfer.offer([[2, 3]], 8)
print(repr(tuple(offer)), flush=True)
sys.stdin.read()
"""


def test_another_process_s_blocks_are_fetched_and_outlive_it_once_mapped() -> None:
    with subprocess.Popen(
        [sys.executable, "-c", SENDER.replace("TRANSPORT", "memory")],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    ) as process:
        assert process.stdout is not None
        offer = Offer(*eval(process.stdout.readline(), {"Address": Address}))
        own = memoryview(bytearray(64 * 9))
        blocks = HostBlocks([own], [64], 4)
        mapped, late = (KVTransfer(blocks, [SharedMemory(blocks)]) for _ in range(2))
        assert fetch(mapped, offer, [[(0, 1), (1, 2)]]) == 128
        expected = (bytes(range(1, 10)) * 64)[128:256]
        assert own[64:192].tobytes() == expected
        process.kill()
    own[:] = bytes(len(own))
    assert fetch(mapped, offer, [[(0, 1), (1, 2)]]) == 128
    assert own[64:192].tobytes() == expected
    with pytest.raises(SenderGoneError):
        fetch(late, offer, [[(0, 1), (1, 2)]])


def test_many_offers_stand_at_one_time_and_none_is_left() -> None:
    shared = SharedPools([64])
    numbers = [shared.open_offer() for _ in range(100)]
    assert len(set(numbers)) == shared.num_offers == 100
    for number in numbers:
        shared.close_offer(number)
    assert shared.num_offers == 0


def test_more_offers_than_can_stand_are_refused_to_those_who_fetch() -> None:
    _, _, sending, fetching = pools()
    numbers = [sending.offer([[3], [4]], 4).number for _ in range(SLOTS)]
    late = sending.offer([[3], [4]], 4)
    with pytest.raises(OfferWithdrawnError):
        fetch(fetching, late, [[(0, 1)], [(0, 1)]])
    sending.release(late.number)
    sending.release(numbers[7])
    assert fetch(fetching, sending.offer([[3], [4]], 4), [[(0, 1)], [(0, 1)]])


# Ownership


def test_an_offer_owns_its_blocks_until_it_is_released() -> None:
    cache = KVCache(groups(8), 4)
    seq = KVSequence(ROOT)
    cache.open(seq, cache.match(seq, list(range(10))))
    cache.reserve(seq, 10)
    cache.advance(seq, 10, 0)
    cache.register(seq, list(range(10)))
    cache.commit(0)
    cache.hold(seq, 77)
    cache.audit()
    assert (cache.num_held, cache.usage().used, cache.usage().free) == (1, 12, 20)
    cache.release_held(77)
    cache.audit()
    assert (cache.num_held, cache.usage().cached, cache.usage().used) == (0, 8, 0)


@pytest.mark.parametrize("window", [None, 6])
@pytest.mark.parametrize("cached", [0, 8, 16])
def test_received_blocks_follow_the_cached_prefix_and_leave_out_what_a_window_has_passed(
    window: int | None, cached: int
) -> None:
    cache = KVCache(groups(16, None, window), 4)
    tokens = list(range(19))
    if cached:
        before = KVSequence(ROOT)
        cache.open(before, cache.match(before, tokens[:cached]))
        cache.reserve(before, cached)
        cache.advance(before, cached, 0)
        cache.register(before, tokens)
        cache.commit(0)
        cache.close(before)
    seq = KVSequence(ROOT)
    assert cache.open(seq, cache.match(seq, [*tokens, 99])) == cached
    wanted = cache.receive(seq, 19)
    cache.register(seq, [*tokens, 99])
    cache.audit()
    assert wanted[0] == list(range(cached // 4, 5))
    first = 0 if window is None else (19 - window + 1) // 4  # 3: the window begins at 14
    assert wanted[1] == list(range(max(cached // 4, first), 5))
    assert seq.tables[1][:first] == [0] * first
    assert len(seq.tables[0]) == len(seq.tables[1]) == 5
    assert (seq.num_computed, seq.capacity) == (19, 20)
    cache.commit(1)
    cache.close(seq)
    cache.audit()
    assert cache.is_idle()


def test_a_full_receiver_says_so_and_has_lost_nothing() -> None:
    cache = KVCache(groups(4), 4)
    seq = KVSequence(ROOT)
    cache.open(seq, cache.match(seq, list(range(20))))
    with pytest.raises(ReceiverFullError, match="5 blocks are needed, 4 are free"):
        cache.receive(seq, 19)
    cache.audit()
    assert cache.usage().free == 16
