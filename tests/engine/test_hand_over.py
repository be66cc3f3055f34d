"""A request that one engine prefills and another decodes writes the same tokens as in one engine.

Two real engines in this process, blocks fetched from one real pool into the other."""

from __future__ import annotations

import os
import random
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

import pytest

from tests.equivalence.harness import small_spec
from tests.loud import Loud
from tests.support import narrow_isa
from tests.tiny import EOS_ID, tiny_folder, tiny_llm
from twostroke import SamplingParams
from twostroke.engine.assembly import group_limits
from twostroke.engine.build_native import assemble_native
from twostroke.engine.core import EngineCore
from twostroke.errors import RequestError
from twostroke.kernels import cpu
from twostroke.kv.transfer import KVTransfer, Offer
from twostroke.kv.transports import TransportConfig
from twostroke.model.describe.cost import dense_weight_bytes
from twostroke.model.native_decoder import NativeDecoder, Packing
from twostroke.plan import TokenLogprobs
from twostroke.request import EngineRequest, FinishReason, Resumed, StructuredOutputs, Thinking
from twostroke.sched import offers as sched_offers
from twostroke.sched import received
from twostroke.sched.received import FetchResult
from twostroke.sched.step import SchedulerConfig
from twostroke.sched.updates import Update

pytestmark = pytest.mark.skipif(
    not cpu.available() or not hasattr(os, "memfd_create"), reason="native kernels on Linux only"
)
PROMPT = tuple(50 + (7 * n * n) % 200 for n in range(45))  # two blocks of 16, and a part of one
NEVER = (b"\xff\xfe",)


class Engines(NamedTuple):
    alone: EngineCore
    sender: EngineCore
    receiver: EngineCore


@pytest.fixture(scope="module")
def engines(tmp_path_factory: pytest.TempPathFactory) -> Engines:
    folder: Path = tiny_folder(tmp_path_factory.mktemp("tiny"))
    settings: dict[str, Any] = {"max_num_seqs": 8, "kernels": "native", "isa": narrow_isa()}
    settings["engines_on_host"] = 2  # a single engine fetches nothing
    ways = ("none", "checked", "none")
    return Engines(*(tiny_llm(folder, kv_sharing=way, **settings).engine.core for way in ways))


@pytest.fixture(autouse=True)
def nothing_left(request: pytest.FixtureRequest) -> Iterator[None]:
    yield
    if "engines" in request.fixturenames:
        assert_nothing_left(*request.getfixturevalue("engines"))


def assert_nothing_left(*cores: EngineCore) -> None:
    for core in cores:
        core.scheduler.audit()
        assert not core.has_work
        assert core.scheduler.kv.is_idle()
        assert not core.scheduler.kv.num_held
        core.reset_prefix_cache()


class Written:
    """The updates of one request, from any engine."""

    def __init__(self) -> None:
        self.tokens: list[int] = []
        self.logprobs: list[TokenLogprobs] = []
        self.prompt_logprobs: tuple[TokenLogprobs, ...] | None = None
        self.finish: FinishReason | None = None
        self.offer: Offer | None = None
        self.num_chunks = 0
        self.num_cached = 0


def run(core: EngineCore, *requests: EngineRequest) -> list[Written]:
    written = {request.request_id: Written() for request in requests}
    for request in requests:
        core.add(request)
    while core.has_work:
        for update in core.step():
            assert not update.error, update.error
            one = written[update.request_id]
            assert one.finish is None, "told after its end"
            one.tokens += update.tokens
            one.logprobs += update.logprobs
            one.prompt_logprobs = update.prompt_logprobs or one.prompt_logprobs
            one.finish, one.offer = update.finish_reason, update.offer
            if update.record is not None:
                one.num_chunks, one.num_cached = len(update.record.chunks), update.record.num_cached
        core.scheduler.audit()
    return list(written.values())


def resumed(given: EngineRequest, so_far: Written, offer: Offer | None) -> EngineRequest:
    params = replace(given.params, prompt_logprobs=None)
    return replace(given, params=params, resumed=Resumed(tuple(so_far.tokens), 1.0, offer))


def hand_over(
    sender: EngineCore, receiver: EngineCore, *requests: EngineRequest
) -> tuple[list[Written], list[FetchResult]]:
    """Prefill each request in one engine, then decode all in the other."""
    begun = run(sender, *(replace(request, hand_over=True) for request in requests))
    going = [
        resumed(request, one, one.offer)
        for request, one in zip(requests, begun, strict=True)
        if one.finish is FinishReason.PREFILLED
    ]
    ended = iter(run(receiver, *going))
    for one in begun:
        if one.finish is FinishReason.PREFILLED:
            assert len(one.tokens) == 1
            rest = next(ended)
            assert one.offer is not None
            sender.release_offers([one.offer.number])
            one.tokens += rest.tokens
            one.logprobs += rest.logprobs
            one.finish, one.num_chunks = rest.finish, rest.num_chunks
            assert rest.prompt_logprobs is None
    return begun, receiver.scheduler.received.take_fetched()


def request(name: str = "r", prompt: tuple[int, ...] = PROMPT, **params: Any) -> EngineRequest:
    params = {"temperature": 0, "max_tokens": 24, "ignore_eos": True, "logprobs": 3} | params
    return EngineRequest(name, prompt, SamplingParams(**params), seed=params.get("seed") or 0)


def choice(**more: Any) -> EngineRequest:
    asked = StructuredOutputs(regex=r"[a-z]{3}[0-9]{4} (yes|no)")
    given = request(structured_outputs=asked, ignore_eos=False, **more)
    return replace(given, stop_ids=frozenset({EOS_ID}))


REQUESTS = {
    "greedy": request(),
    "seeded": request(temperature=0.9, seed=11, top_k=40, top_p=0.95, min_p=0.01),
    "penalties": request(
        temperature=0.7, seed=3, frequency_penalty=0.8, presence_penalty=0.4, repetition_penalty=1.3
    ),
    "bans": request(min_tokens=9, logit_bias={60: 5.0, 61: -100.0}, bad_words=None),
    "prompt_logprobs": request(prompt_logprobs=2),
    "grammar": choice(temperature=0.9, seed=5),
    "reasoning": replace(
        request(max_tokens=40),
        thinking=Thinking(NEVER, NEVER, forced_ids=(40, 41), is_open=True, budget=7),
    ),
    "a_full_block": request(prompt=PROMPT[:32]),
    "one_token": request(prompt=PROMPT[:1]),
}


@pytest.mark.parametrize("way", REQUESTS)
def test_a_hand_over_does_not_change_a_single_bit(way: str, engines: Engines) -> None:
    given = REQUESTS[way]
    (alone,) = run(engines.alone, given)
    (got,), (fetched,) = hand_over(engines.sender, engines.receiver, given)
    assert got.tokens == alone.tokens
    assert len(got.tokens) > 4
    assert got.logprobs == alone.logprobs, "to the bit"
    assert got.prompt_logprobs == alone.prompt_logprobs
    assert got.finish == alone.finish
    assert got.num_chunks == 0, "the receiver has prefilled nothing"
    assert not fetched.problem
    assert fetched.num_bytes > 0


def test_many_at_once_share_steps_and_prefixes(engines: Engines) -> None:
    prompts = [PROMPT[: 20 + 3 * n] for n in range(6)]
    requests = [request(f"r{n}", one, seed=n, temperature=0.8) for n, one in enumerate(prompts)]
    alone = run(engines.alone, *requests)
    got, fetched = hand_over(engines.sender, engines.receiver, *requests)
    assert [one.tokens for one in got] == [one.tokens for one in alone]
    assert [one.logprobs for one in got] == [one.logprobs for one in alone]
    assert not any(one.problem for one in fetched)
    # The first block, which all have in common, was sent once, each tail every time.
    block = max(one.num_bytes for one in fetched) // 2
    assert [one.num_bytes // block for one in fetched] == [2, 1, 1, 1, 1, 1]


def test_blocks_in_the_receivers_cache_are_not_fetched(engines: Engines) -> None:
    (alone,) = run(engines.alone, request())
    run(engines.receiver, request("before", PROMPT[:33], max_tokens=2))
    (got,), (fetched,) = hand_over(engines.sender, engines.receiver, request())
    assert got.tokens == alone.tokens
    engines.receiver.reset_prefix_cache()
    _, (all_of_it,) = hand_over(engines.sender, engines.receiver, request())
    assert fetched.num_bytes * 3 == all_of_it.num_bytes, "one block of three"


def test_an_answer_of_one_token_is_not_handed_over(engines: Engines) -> None:
    (one,) = run(engines.sender, replace(request(max_tokens=1), hand_over=True))
    assert (one.finish, one.offer, len(one.tokens)) == (FinishReason.LENGTH, None, 1)


def test_a_grammar_that_ends_with_the_first_token_ends_there(engines: Engines) -> None:
    asked = StructuredOutputs(choice=["a"])
    given = request(structured_outputs=asked, ignore_eos=False)
    given = replace(given, hand_over=True, stop_ids=frozenset({EOS_ID}))
    (one,) = run(engines.sender, given)
    assert (one.finish, one.offer) == (FinishReason.STOP, None)


def damage(transfer: KVTransfer, offer: Offer) -> None:
    size = offer.block_bytes[0]
    block = bytearray(transfer._blocks.read(0, offer.tables[0][1]))
    block[size // 2] ^= 0xFF
    transfer._blocks.write(0, offer.tables[0][1], block)


def withdraw(transfer: KVTransfer, offer: Offer) -> None:
    transfer.release(offer.number)


def at(offer: Offer, path: str) -> Offer:
    return offer._replace(addresses=(offer.addresses[0]._replace(endpoint=path),))


FAULTS: dict[str, tuple[Callable[[KVTransfer, Offer], None], Callable[[Offer], Offer]]] = {
    "DamagedError": (damage, lambda offer: offer),
    "OfferWithdrawnError": (withdraw, lambda offer: offer),
    "TruncatedError": (lambda *_: None, lambda o: o._replace(tables=((1, 2, 10_000),))),
    "SenderGoneError": (lambda *_: None, lambda o: at(o, "/proc/0/fd/0")),
    "MismatchedError": (lambda *_: None, lambda o: o._replace(block_size=32)),
    "UnreachableError": (lambda *_: None, lambda o: o._replace(addresses=())),
    "TransferError": (lambda *_: None, lambda o: o._replace(num_tokens=7)),
}


@pytest.mark.parametrize("name", FAULTS)
def test_blocks_of_a_failed_transfer_are_recomputed_and_the_reason_is_reported(
    name: str, engines: Engines
) -> None:
    given = request(temperature=0.9, seed=8)
    (alone,) = run(engines.alone, given)
    (begun,) = run(engines.sender, replace(given, hand_over=True))
    assert begun.offer is not None
    harm, changed = FAULTS[name]
    transfer = engines.sender.scheduler.offers.transfer
    assert transfer is not None
    harm(transfer, begun.offer)
    (rest,) = run(engines.receiver, resumed(given, begun, changed(begun.offer)))
    engines.sender.release_offers([begun.offer.number])
    assert begun.tokens + rest.tokens == alone.tokens
    (fetched,) = engines.receiver.scheduler.received.take_fetched()
    assert fetched.problem.startswith(name)
    assert rest.num_chunks == 1, "prefilled here"


def test_a_request_continues_from_any_token_without_its_blocks(engines: Engines) -> None:
    """As after the death of its engine: the delivered tokens are part of the prompt now."""
    given = replace(REQUESTS["penalties"], params=replace(REQUESTS["penalties"].params, seed=7))
    (alone,) = run(engines.alone, given)
    for count in (1, 5, 23):
        so_far = Written()
        so_far.tokens = alone.tokens[:count]
        (rest,) = run(engines.receiver, resumed(given, so_far, None))
        assert so_far.tokens + rest.tokens == alone.tokens
        assert rest.finish == FinishReason.LENGTH


def test_a_request_that_was_resumed_is_handed_over_after_its_next_token(engines: Engines) -> None:
    (alone,) = run(engines.alone, request())
    so_far = Written()
    so_far.tokens = alone.tokens[:5]
    again = resumed(request(), so_far, None)
    (begun,) = run(engines.sender, replace(again, hand_over=True))
    assert begun.finish is FinishReason.PREFILLED
    assert begun.tokens == alone.tokens[5:6]
    so_far.tokens += begun.tokens
    (rest,) = run(engines.receiver, resumed(request(), so_far, begun.offer))
    assert begun.offer is not None
    engines.sender.release_offers([begun.offer.number])
    assert so_far.tokens + rest.tokens == alone.tokens
    assert not engines.receiver.scheduler.received.take_fetched()[0].problem


def test_a_request_that_waits_for_its_blocks_can_be_aborted(engines: Engines) -> None:
    (begun,) = run(engines.sender, replace(request(), hand_over=True))
    engines.receiver.add(resumed(request(), begun, begun.offer))
    assert engines.receiver.num_waiting == 1
    end = engines.receiver.abort("r")
    assert end is not None
    assert end.finish_reason is FinishReason.ABORT
    assert not engines.receiver.scheduler.received.take_fetched()
    assert begun.offer is not None
    engines.sender.release_offers([begun.offer.number])


def test_only_a_shared_cache_can_be_handed_over(engines: Engines) -> None:
    with pytest.raises(RequestError, match="its KV cache is not shared"):
        engines.receiver.add(replace(request(), hand_over=True))


# KV groups, windows, small pools


def core_of(decoder: NativeDecoder, num_blocks: int, sharing: str, **more: Any) -> EngineCore:
    each = [num_blocks] * len(decoder.spec.kv_groups())
    settings = {"max_num_seqs": 8, "max_num_batched_tokens": 64, "max_model_len": 256} | more
    groups = group_limits(decoder.spec, each)
    limits = SchedulerConfig(block_size=8, groups=groups, **settings)
    weights = dense_weight_bytes(decoder.spec, 1)
    return assemble_native(decoder, limits, None, weights, TransportConfig(sharing))


@pytest.fixture(scope="module")
def windowed() -> NativeDecoder:
    spec, isa = small_spec(windows=(24, None, 40)), narrow_isa()
    return NativeDecoder(Packing(spec, Loud(spec), "float32", None, isa), 256, 1, 1, isa)


@pytest.mark.parametrize("prefix_caching", [True, False])
def test_three_kv_groups_of_which_two_have_windows(
    windowed: NativeDecoder, prefix_caching: bool
) -> None:
    more = {"prefix_caching": prefix_caching}
    alone, sender, receiver = (
        core_of(windowed, 64, way, **more) for way in ("none", "shared", "none")
    )
    requests = [request(f"r{n}", PROMPT[: 9 * n], max_tokens=30) for n in range(1, 6)]
    expected = run(alone, *requests)
    got, fetched = hand_over(sender, receiver, *requests)
    assert [one.tokens for one in got] == [one.tokens for one in expected]
    assert [one.logprobs for one in got] == [one.logprobs for one in expected]
    assert not any(one.problem for one in fetched)
    assert_nothing_left(alone, sender, receiver)


def test_a_full_receiver_lets_requests_wait_and_a_full_sender_waits_for_it(
    windowed: NativeDecoder,
) -> None:
    """Pools that hold two requests: everything waits its turn and ends as it should."""
    alone = core_of(windowed, 64, "none")
    sender, receiver = core_of(windowed, 16, "shared"), core_of(windowed, 18, "none")
    requests = [request(f"r{n}", PROMPT[n:], max_tokens=20) for n in range(7)]
    expected = run(alone, *requests)
    got: dict[str, list[int]] = {one.request_id: [] for one in requests}
    offers: dict[str, int] = {}
    by_name = {one.request_id: one for one in requests}
    most_waiting = stalled = 0
    for one in requests:
        sender.add(replace(one, hand_over=True))
    while sender.has_work or receiver.has_work:
        for update in sender.step():
            got[update.request_id] += update.tokens
            if update.offer is not None:
                offers[update.request_id] = update.offer.number
                so_far = Written()
                so_far.tokens = list(update.tokens)
                receiver.add(resumed(by_name[update.request_id], so_far, update.offer))
        stalled += sender.is_stalled
        most_waiting = max(most_waiting, receiver.num_waiting)
        for update in receiver.step() if receiver.has_work else ():
            got[update.request_id] += update.tokens
        for one in receiver.scheduler.received.take_fetched():
            assert not one.problem
            sender.release_offers([offers.pop(one.request_id)])
        sender.scheduler.audit()
        receiver.scheduler.audit()
    assert list(got.values()) == [one.tokens for one in expected]
    assert most_waiting > 0, "the receiver was full"
    assert stalled > 0, "so was the sender"
    assert_nothing_left(alone, sender, receiver)


def test_while_others_write_blocks_are_copied_some_with_each_step(
    windowed: NativeDecoder, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One block a step: the stream that writes has a token in every step of the transfer."""
    monkeypatch.setattr(received, "FETCH_BYTES", 1)
    alone, sender, receiver = (core_of(windowed, 64, way) for way in ("none", "shared", "none"))
    writes, long = request("w", PROMPT[:5], max_tokens=60), request("l", PROMPT)
    expected = run(alone, writes, long)
    (begun,) = run(sender, replace(long, hand_over=True))
    assert begun.offer is not None
    for ends_early in (True, False):
        receiver.add(writes)
        receiver.step()
        receiver.add(resumed(long, begun, begun.offer))
        got: dict[str, list[int]] = {"w": [], "l": list(begun.tokens)}
        during, fetched = 0, []
        while not fetched:
            updates = receiver.step()
            receiver.scheduler.audit()
            fetched = receiver.scheduler.received.take_fetched()
            assert updates[0].request_id == "w", "it writes on"
            for update in updates:
                got[update.request_id] += update.tokens
            during += not fetched
            if ends_early and during == 3:  # in the midst of the transfer
                assert receiver.abort("l") is not None
                break
        if ends_early:
            receiver.abort("w")
            assert not fetched
            assert_nothing_left(receiver)
            continue
        assert during >= 6, "as many as there are blocks of the group that keeps all"
        assert not fetched[0].problem
        for update in iter_updates(receiver):
            got[update.request_id] += update.tokens
        assert got["l"] == expected[1].tokens
        assert got["w"] == expected[0].tokens[-len(got["w"]) :]
    sender.release_offers([begun.offer.number])
    assert_nothing_left(alone, sender, receiver)


def iter_updates(core: EngineCore) -> Iterator[Update]:
    while core.has_work:
        yield from core.step()
        core.scheduler.audit()


# While the prompt is still computed

LONG = tuple(30 + (11 * n * n + 5 * n) % 220 for n in range(150))


@pytest.fixture
def ahead(windowed: NativeDecoder, monkeypatch: pytest.MonkeyPatch) -> Engines:
    """Chunks of 16 tokens, each of which is offered."""
    monkeypatch.setattr(sched_offers, "MIN_PART_TOKENS", 16)
    monkeypatch.setattr(sched_offers, "PART_SHARE", 1000)
    small: dict[str, Any] = {"max_num_batched_tokens": 16}
    return Engines(*(core_of(windowed, 64, way, **small) for way in ("none", "checked", "none")))


def part_of(given: EngineRequest, offer: Offer) -> EngineRequest:
    """The computed part of a prompt, for `fetch_ahead`."""
    tokens, end = given.prompt_token_ids, offer.num_tokens
    name, more = f"{given.request_id} {offer.number}", Resumed((tokens[end],), 1.0, offer)
    return replace(given, request_id=name, prompt_token_ids=tokens[:end], resumed=more)


def chunks_of(
    core: EngineCore, given: EngineRequest, written: Written, release: bool = True
) -> Iterator[Offer]:
    """Prefill; what is offered before the last chunk is computed."""
    core.add(replace(given, hand_over=True))
    while core.has_work:
        for update in core.step():
            assert not update.error, update.error
            written.tokens += update.tokens
            written.logprobs += update.logprobs
            written.finish = update.finish_reason
            if update.finish_reason is not None:
                written.offer = update.offer
            elif update.offer is not None:
                yield update.offer
                if release:
                    core.release_offers([update.offer.number])
        core.scheduler.audit()


def finish(engines: Engines, given: EngineRequest, begun: Written) -> list[FetchResult]:
    assert begun.offer is not None
    (rest,) = run(engines.receiver, resumed(given, begun, begun.offer))
    engines.sender.release_offers([begun.offer.number])
    begun.tokens += rest.tokens
    begun.logprobs += rest.logprobs
    begun.num_chunks, begun.num_cached = rest.num_chunks, rest.num_cached
    return engines.receiver.scheduler.received.take_fetched()


def idle(core: EngineCore) -> None:
    while core.has_work:
        assert not core.step()
        core.scheduler.audit()


def test_blocks_fetched_ahead_are_there_when_the_request_comes(ahead: Engines) -> None:
    given = request(prompt=LONG, temperature=0.8, seed=4)
    (alone,) = run(ahead.alone, given)
    whole, begun = Written(), Written()
    assert list(chunks_of(ahead.sender, given, whole))
    (without,) = finish(ahead, given, whole)
    assert_nothing_left(*ahead)  # and no prefix is cached
    ends, before = [], []
    for offer in chunks_of(ahead.sender, given, begun):
        ahead.receiver.fetch_ahead(part_of(given, offer))
        assert not ahead.receiver.num_waiting
        idle(ahead.receiver)
        before += ahead.receiver.scheduler.received.take_fetched()
        ends.append(offer.num_tokens)
    (last,) = finish(ahead, given, begun)
    assert ends == list(range(16, len(LONG), 16))
    assert all(one.ahead and not one.problem and one.num_bytes for one in before)
    assert not last.ahead
    assert not last.problem
    assert last.num_bytes < without.num_bytes / 4, "the last chunk's alone"
    assert begun.num_cached == ends[-1]
    assert begun.num_chunks == 0, "the receiver has prefilled nothing"
    for got in (whole, begun):
        assert got.tokens == alone.tokens
        assert got.logprobs == alone.logprobs, "to the bit"
    assert_nothing_left(*ahead)


def test_no_more_is_offered_until_the_last_has_been_fetched(ahead: Engines) -> None:
    begun = Written()
    (first,) = chunks_of(ahead.sender, request(prompt=LONG), begun, release=False)
    assert begun.offer is not None
    for offer, left in ((first, 1), (begun.offer, 0)):
        ahead.sender.release_offers([offer.number])
        assert ahead.sender.scheduler.kv.num_held == left
        ahead.sender.scheduler.audit()
    assert_nothing_left(*ahead)


def test_nothing_is_offered_ahead_without_a_prefix_cache(
    windowed: NativeDecoder, ahead: Engines
) -> None:
    small: dict[str, Any] = {"max_num_batched_tokens": 16, "prefix_caching": False}
    sender = core_of(windowed, 64, "shared", **small)
    begun = Written()
    assert not list(chunks_of(sender, request(prompt=LONG), begun))
    assert begun.offer is not None


@pytest.mark.parametrize("fault", ["withdrawn", "damaged", "full", "forgotten", "other salt"])
def test_what_goes_wrong_ahead_costs_time_alone(
    fault: str, ahead: Engines, windowed: NativeDecoder
) -> None:
    given = request(prompt=LONG, temperature=0.9, seed=8)
    (alone,) = run(ahead.alone, given)
    if fault == "full":  # of whose pool a stream needs the most
        small: dict[str, Any] = {"max_num_batched_tokens": 16}
        ahead = ahead._replace(receiver=core_of(windowed, 24, "none", **small))
        ahead.receiver.add(request("writes", LONG[::-1][:120], max_tokens=60))
        ahead.receiver.step()
    problems, begun, transfer = [], Written(), ahead.sender.scheduler.offers.transfer
    assert transfer is not None
    for offer in chunks_of(ahead.sender, given, begun):
        if fault == "withdrawn":
            transfer.release(offer.number)
        wrong = offer._replace(checksums=((1,) * 20,) * 3)
        part = part_of(given, wrong if fault == "damaged" else offer)
        ahead.receiver.fetch_ahead(replace(part, salt="x") if fault == "other salt" else part)
        if fault == "forgotten":
            ahead.receiver.reset_prefix_cache()
        while not (fetched := ahead.receiver.scheduler.received.take_fetched()):
            ahead.receiver.step()
        problems += [one.problem for one in fetched]
    ahead.receiver.abort("writes")
    (last,) = finish(ahead, given, begun)
    assert begun.tokens == alone.tokens
    names = {"withdrawn": "OfferWithdrawnError", "damaged": "DamagedError"}
    expected = names.get(
        fault, "" if fault == "other salt" else "TransferError: the prefix cache was reset"
    )
    expected = "ReceiverFullError" if fault == "full" else expected
    assert problems
    assert all(one.startswith(expected) and bool(one) == bool(expected) for one in problems)
    assert begun.num_cached == 0
    assert not last.problem
    assert_nothing_left(*ahead)


def test_requests_that_wait_for_blocks_come_before_fetches_ahead(
    ahead: Engines, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One block a step beside a stream: the request that has come later is there first."""
    long, late, begun = request("long", LONG), request("late", PROMPT[::-1]), Written()
    assert list(chunks_of(ahead.sender, late, begun))
    assert begun.offer is not None
    offer = next(chunks_of(ahead.sender, long, Written(), release=False))
    monkeypatch.setattr(received, "FETCH_BYTES", 1)
    ahead.receiver.add(request("writes", PROMPT[:3], max_tokens=100))
    ahead.receiver.step()
    ahead.receiver.fetch_ahead(part_of(long, offer))
    ahead.receiver.step()
    ahead.receiver.add(resumed(late, begun, begun.offer))
    fetched: list[FetchResult] = []
    while len(fetched) < 2:
        assert ahead.receiver.step(), "the stream writes on"
        ahead.receiver.scheduler.audit()
        fetched += ahead.receiver.scheduler.received.take_fetched()
    assert [one.ahead for one in fetched] == [False, True]
    assert not any(one.problem for one in fetched)
    for name in ("writes", "late"):
        ahead.receiver.abort(name)
    assert ahead.sender.abort("long") is not None
    ahead.sender.release_offers([begun.offer.number, offer.number])
    assert_nothing_left(*ahead)


@pytest.mark.parametrize("seed", range(4))
def test_random_lives_in_two_small_engines(
    seed: int, windowed: NativeDecoder, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Prompts that share beginnings, aborts, blocks that are late: all that was not aborted writes
    what it writes in an engine of its own, and nothing is left."""
    monkeypatch.setattr(sched_offers, "MIN_PART_TOKENS", 16)
    monkeypatch.setattr(received, "FETCH_BYTES", 4096)
    chance = random.Random(seed)
    small: dict[str, Any] = {"max_num_batched_tokens": 24}
    alone = core_of(windowed, 64, "none")
    sender, receiver = core_of(windowed, 40, "checked", **small), core_of(windowed, 40, "none")
    requests = {}
    for n in range(24):
        beginning = LONG[: 8 * chance.randrange(16)] if chance.random() < 0.6 else ()
        prompt = (*beginning, *(chance.randrange(20, 250) for _ in range(chance.randrange(1, 60))))
        params = {"max_tokens": chance.randrange(2, 30), "temperature": 0.9, "seed": n}
        requests[f"r{n}"] = request(f"r{n}", prompt, **params)
    got: dict[str, list[int]] = {name: [] for name in requests}
    offers: dict[str, int] = {}  # that stand, by who fetches
    late: list[EngineRequest] = []  # to be told to the receiver
    waiting, aborted = list(requests.values()), set()
    num_ahead = 0
    while waiting or late or sender.has_work or receiver.has_work:
        if waiting and chance.random() < 0.4:
            sender.add(replace(waiting.pop(), hand_over=True))
        for update in sender.step() if sender.has_work else ():
            name, offer = update.request_id, update.offer
            got[name] += update.tokens
            if offer is not None and update.finish_reason is None:
                late.append(part_of(requests[name], offer))
                offers[late[-1].request_id] = offer.number
            elif offer is not None:
                so_far = Written()
                so_far.tokens = list(update.tokens)
                late.append(resumed(requests[name], so_far, offer))
                offers[name] = offer.number
        while late and chance.random() < 0.5:
            one = late.pop(chance.randrange(len(late)))
            if one.request_id in requests:
                receiver.add(one)
            else:
                receiver.fetch_ahead(one)
        for update in receiver.step() if receiver.has_work else ():
            got[update.request_id] += update.tokens
        for fetched in receiver.scheduler.received.take_fetched():
            num_ahead += fetched.ahead and not fetched.problem
            sender.release_offers([offers.pop(fetched.request_id)])
        if chance.random() < 0.02:
            name = chance.choice(list(requests))
            for core in (sender, receiver):
                if core.abort(name) is not None:
                    aborted.add(name)
                    if core is receiver and name in offers:
                        sender.release_offers([offers.pop(name)])
        if chance.random() < 0.01:
            receiver.reset_prefix_cache()
        sender.scheduler.audit()
        receiver.scheduler.audit()
    expected = run(alone, *requests.values())
    for (name, tokens), one in zip(got.items(), expected, strict=True):
        assert name in aborted or tokens == one.tokens
    assert num_ahead
    assert len(aborted) < 12
    assert not offers
    assert_nothing_left(alone, sender, receiver)
