"""Several engine processes behind one client: every request ends once, with the result of a single
engine."""

from __future__ import annotations

import asyncio
import os
import random
import signal
import time
from collections.abc import Callable, Coroutine, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from tests.engine_streams import MANY_SETTINGS
from tests.tiny import tiny_llm
from twostroke import LLM, SamplingParams
from twostroke.config import EngineConfig
from twostroke.engine.api import EngineClient
from twostroke.engine.spawn import DEFAULT_BUILDER
from twostroke.errors import ConfigError, EngineError, ModelError, RequestError
from twostroke.kernels import cpu
from twostroke.kv.transfer import Offer
from twostroke.outputs import RequestOutput
from twostroke.route import routed_requests
from twostroke.route.member import Member, RoutedRequest
from twostroke.route.pool_settings import PoolSettings
from twostroke.route.routed_engine import RoutedEngine
from twostroke.route.routed_requests import RoutedRequests
from twostroke.route.router import Role

pytestmark = pytest.mark.skipif(
    not cpu.available() or not hasattr(os, "memfd_create"), reason="native kernels on Linux only"
)
PATIENCE_S = 240  # what hangs fails its test
SHORT = SamplingParams(temperature=0, max_tokens=12, ignore_eos=True)
LONG = SamplingParams(temperature=0, max_tokens=150, ignore_eos=True)
CLIENTS: tuple[type[EngineClient], ...] = (RoutedEngine,)  # for the type checker


@pytest.fixture(scope="module")
def alone(folder: Path) -> LLM:
    """The expected answers: one request at a time, in this process."""
    return tiny_llm(folder, exact=True)


class Running:
    """Engines with their event loop, for several tests."""

    def __init__(
        self, folder: Path, settings: PoolSettings, builder: str = DEFAULT_BUILDER, **more: Any
    ) -> None:
        # `exact`: what one engine computes by decode and the next by prefill is the same but for
        # the order in which attention adds up.
        config = EngineConfig(
            model=str(folder), max_num_seqs=16, num_gpu_blocks_override=256, exact=True, **more
        )
        self.runner = asyncio.Runner()
        self.engine = self.runner.run(
            RoutedEngine.start(settings.engines(config), builder, restart_limit=1000)
        )
        # The tiny model's prompts are short: none would be handed over for long.
        self.engine.requests.router._place_directly = lambda *_: None  # type: ignore[method-assign]

    def run(self, test: Callable[[RoutedEngine], Coroutine[Any, Any, None]]) -> None:
        """Check at the end that no side has anything left of any request."""

        async def run() -> None:
            await asyncio.wait_for(test(self.engine), PATIENCE_S)
            await assert_nothing_left(self.engine)

        self.runner.run(run())

    def close(self) -> None:
        self.runner.run(self.engine.close())
        self.runner.close()


async def assert_nothing_left(engine: RoutedEngine) -> None:
    assert await engine.drain(PATIENCE_S)
    await until(lambda: all(member.healthy for member in engine.members))
    await until(lambda: not engine.requests.hand_overs.ahead)
    await engine.audit()
    await engine.audit()  # behind whatever releases were sent meanwhile
    assert not engine.requests.routed
    assert not engine._outputs._states
    assert not engine._outputs._running
    for member in engine.members:
        assert not member._names
        assert not member._handles
        state = member.state
        assert (state.streams, state.promised, state.queued_tokens) == (0, 0, 0)
        load = member.load()
        assert (load.waiting, load.running, load.kv.fragmented) == (0, 0, 0)
        await until(lambda member=member: member.load().kv.used == 0)


async def until(condition: Callable[[], Any]) -> None:
    async with asyncio.timeout(PATIENCE_S):
        while not condition():
            await asyncio.sleep(0.002)


@pytest.fixture(scope="module")
def pools(folder: Path) -> Iterator[Running]:
    settings = PoolSettings(prefill_engines=1, decode_engines=2, kv_transfer_checksums=True)
    running = Running(folder, settings)
    yield running
    running.close()


@pytest.fixture(scope="module")
def copies(folder: Path) -> Iterator[Running]:
    running = Running(folder, PoolSettings(data_parallel_size=2))
    yield running
    running.close()


async def last(
    engine: RoutedEngine, prompt: Any, params: SamplingParams = SHORT, **more: Any
) -> RequestOutput:
    outputs = [output async for output in engine.generate(prompt, params, **more)]
    assert [output.finished for output in outputs] == [False] * (len(outputs) - 1) + [True]
    return outputs[-1]


def prompts(count: int) -> list[list[int]]:
    return [[50 + (7 * n + k) % 200 for k in range(1 + (5 * n) % 60)] for n in range(count)]


def by_name(engine: RoutedEngine, name: str) -> Member:
    return next(member for member in engine.members if member.name == name)


# Streams


def test_what_one_engine_prefilled_another_decodes(pools: Running, alone: LLM) -> None:
    async def test(engine: RoutedEngine) -> None:
        asked = prompts(24)
        outputs = await asyncio.gather(*(last(engine, prompt) for prompt in asked))
        for output, expected in zip(outputs, alone.generate(asked, SHORT), strict=True):
            assert output.outputs[0].token_ids == expected.outputs[0].token_ids
            assert output.outputs[0].text == expected.outputs[0].text
            (record,) = output.records
            assert len(record.token_s) == len(record.token_step) == 12
            times = [record.received_s, record.queued_s, record.scheduled_s, *record.token_s]
            assert times == sorted(times)
            assert record.finish_reason == "length"
            assert record.gaps.total_s == pytest.approx(record.token_s[-1] - record.token_s[0])
        routes = [output.records[0].route for output in outputs]
        assert any("handed over to decode-0" in route for route in routes)
        assert any("handed over to decode-1" in route for route in routes)
        assert all("MB fetched in" in route for route in routes if "handed over" in route)

    pools.run(test)


def test_the_time_in_an_engine_begins_before_the_engine_knows_of_it(
    pools: Running, monkeypatch: pytest.MonkeyPatch
) -> None:
    add = Member.add

    def interrupted(self: Member, requests: Any) -> bool:
        added = add(self, requests)
        time.sleep(0.05)  # long enough for the engine to run steps with the request
        return added

    monkeypatch.setattr(Member, "add", interrupted)

    async def test(engine: RoutedEngine) -> None:
        (record,) = (await last(engine, prompts(4)[3])).records
        first, second = record.stays
        assert record.received_s <= first.began_s <= record.scheduled_s
        assert record.token_s[0] <= second.began_s <= record.token_s[1]

    pools.run(test)


def test_all_that_a_request_may_ask_for_crosses_over(pools: Running, alone: LLM) -> None:
    async def test(engine: RoutedEngine) -> None:
        (expected,) = alone.generate("the quick brown fox", MANY_SETTINGS)
        output = await last(engine, "the quick brown fox", MANY_SETTINGS)
        assert output.prompt_logprobs == expected.prompt_logprobs
        assert output.outputs == expected.outputs
        assert len(output.records) == 3

    pools.run(test)


def test_a_stop_string_in_the_first_token_ends_it_before_it_is_handed_over(
    pools: Running, alone: LLM
) -> None:
    async def test(engine: RoutedEngine) -> None:
        text = alone.generate([5, 6], LONG)[0].outputs[0].text
        for stop in (text[:1], text[20:23]):
            params = SamplingParams(temperature=0, max_tokens=150, stop=stop, ignore_eos=True)
            (expected,) = alone.generate([5, 6], params)
            output = await last(engine, [5, 6], params)
            assert output.outputs[0].text == expected.outputs[0].text
            assert output.outputs[0].stop_reason == stop
            assert [record.finish_reason for record in output.records] == ["stop"]

    pools.run(test)


def test_requests_end_when_nobody_listens_any_more(pools: Running) -> None:
    async def test(engine: RoutedEngine) -> None:
        async def leave(n: int, after: int) -> None:
            stream = engine.generate([60 + n] * (5 + n), LONG)
            async for output in stream:
                if len(output.outputs[0].token_ids) >= after:
                    break
            await stream.aclose()

        await asyncio.gather(*(leave(n, after=1 + n % 3) for n in range(12)))
        state = engine.submit(
            engine.input_processor.process([7, 8, 9], LONG), lambda _: None, lambda _: None, "gone"
        )
        engine.leave(state)

    pools.run(test)


def test_one_token_needs_no_second_engine(pools: Running) -> None:
    async def test(engine: RoutedEngine) -> None:
        one = SamplingParams(temperature=0, max_tokens=1, ignore_eos=True)
        (record,) = (await last(engine, [5, 6, 7], one)).records
        assert record.route == "prefilled by prefill-0: 0 tokens before it"

    pools.run(test)


def test_a_request_that_cannot_be_is_refused(pools: Running) -> None:
    async def test(engine: RoutedEngine) -> None:
        with pytest.raises(RequestError, match="max_model_len"):
            await last(engine, [5] * 400)
        running = asyncio.create_task(last(engine, [60], LONG, request_id="same"))
        await until(lambda: engine.requests.routed)
        with pytest.raises(RequestError, match="already running"):
            await last(engine, [60], LONG, request_id="same")
        await running

    pools.run(test)


def test_copies_share_the_work_and_a_prefix_finds_its_engine(copies: Running, alone: LLM) -> None:
    async def test(engine: RoutedEngine) -> None:
        asked = prompts(16)
        outputs = await asyncio.gather(*(last(engine, prompt) for prompt in asked))
        for output, expected in zip(outputs, alone.generate(asked, SHORT), strict=True):
            assert output.outputs[0].token_ids == expected.outputs[0].token_ids
        engines = [output.records[0].route.partition(":")[0] for output in outputs]
        assert min(engines.count("engine-0"), engines.count("engine-1")) >= 5, engines
        beginning = [99] * 130
        first = (await last(engine, [*beginning, 1])).records[0].route
        for n in range(2, 5):
            again = (await last(engine, [*beginning, n])).records[0].route
            assert again.partition(":")[0] == first.partition(":")[0]
            assert "128 of 131 tokens cached" in again

    copies.run(test)


def test_a_session_finds_its_last_turn_and_another_tenant_does_not(copies: Running) -> None:
    async def test(engine: RoutedEngine) -> None:
        async def turn(prompt: list[int], salt: str = "") -> tuple[list[int], str]:
            given = {"prompt_token_ids": prompt, "cache_salt": salt}
            request = replace(engine.input_processor.process(given, SHORT), session=f"mine {salt}")
            *_, end = [output async for output in engine.stream(request)]
            return prompt + list(end.outputs[0].token_ids), end.records[0].route

        first, route = await turn([77] * 70)
        where = route.partition(":")[0]
        for _ in range(3):
            first, route = await turn([*first, 5])
            assert route.partition(":")[0] == where
            assert f"{len(first) - 13} of {len(first) - 12} tokens cached" in route
        _, route = await turn(first, "other")
        assert f"0 of {len(first)} tokens cached" in route

    copies.run(test)


# Deaths

STAGES = ("before prefill", "after prefill", "in transfer", "in decode")


@pytest.mark.parametrize("seed", [None, 5])
@pytest.mark.parametrize("stage", STAGES)
def test_an_engine_that_dies_at_any_stage_costs_no_request_and_no_token(
    stage: str, seed: int | None, pools: Running, alone: LLM, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Kill the engine of a request at that stage, while ten other requests run."""
    params = SamplingParams(
        temperature=0 if seed is None else 0.9, seed=seed, max_tokens=150, ignore_eos=True
    )

    killed = []
    hand_over = RoutedRequests._hand_over

    def kill_in_between(
        self: RoutedRequests, member: Member, routed: RoutedRequest, update: Any
    ) -> None:
        hand_over(self, member, routed, update)
        if not killed and stage in ("after prefill", "in transfer"):
            assert routed.member is not None
            killed.append(member if stage == "after prefill" else routed.member)
            os.kill(killed[0].pid, signal.SIGKILL)

    monkeypatch.setattr(RoutedRequests, "_hand_over", kill_in_between)

    async def test(engine: RoutedEngine) -> None:
        restarts = engine.num_restarts
        asked = [[50 + (11 * n + k) % 200 for k in range(30 + n)] for n in range(11)]
        tasks = [asyncio.create_task(last(engine, prompt, params)) for prompt in asked]
        if stage == "before prefill":
            await asyncio.sleep(0)
            os.kill(by_name(engine, "prefill-0").pid, signal.SIGKILL)
        elif stage == "in decode":
            await until(lambda: engine.load().running > 3)
            busy = max(engine.members[1:], key=lambda member: member.state.streams)
            os.kill(busy.pid, signal.SIGKILL)
        outputs = await asyncio.gather(*tasks)
        for output, expected in zip(outputs, alone.generate(asked, params), strict=True):
            assert output.outputs[0].token_ids == expected.outputs[0].token_ids
            assert output.outputs[0].text == expected.outputs[0].text
            assert len(output.records[0].token_s) == 150
        await until(lambda: engine.num_restarts == restarts + 1)

    pools.run(test)


def test_many_deaths_under_load_and_every_request_ends_once(pools: Running, alone: LLM) -> None:
    async def test(engine: RoutedEngine) -> None:
        chance = random.Random(3)
        asked = prompts(60)
        expected = alone.generate(asked, SHORT)
        ended: list[int] = []

        async def ask(n: int) -> None:
            await asyncio.sleep(chance.random() * 2)
            output = await last(engine, asked[n])
            assert output.outputs[0].token_ids == expected[n].outputs[0].token_ids
            ended.append(n)

        async def kill() -> None:
            for _ in range(3):
                await asyncio.sleep(0.4)
                alive = [member for member in engine.members if member.healthy]
                if len(alive) == len(engine.members):
                    os.kill(chance.choice(alive).pid, signal.SIGKILL)

        await asyncio.gather(kill(), *(ask(n) for n in range(len(asked))))
        assert sorted(ended) == list(range(60))

    pools.run(test)


def test_with_no_decode_engine_up_the_other_pool_does_it_all(pools: Running, alone: LLM) -> None:
    async def test(engine: RoutedEngine) -> None:
        for member in engine.members[1:]:
            os.kill(member.pid, signal.SIGKILL)
        await until(lambda: not any(member.healthy for member in engine.members[1:]))
        (expected,) = alone.generate([[5, 6, 7]], SHORT)
        output = await last(engine, [5, 6, 7])
        assert output.outputs[0].token_ids == expected.outputs[0].token_ids
        assert "prefill-0" in output.records[0].route

    pools.run(test)


def test_a_request_that_may_be_what_kills_engines_is_not_sent_for_ever(
    pools: Running, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(routed_requests, "MAX_DEATHS", 1)

    async def test(engine: RoutedEngine) -> None:
        for member in engine.members:  # so that it has not left the one that is killed
            os.kill(member.pid, signal.SIGSTOP)
        task = asyncio.create_task(last(engine, [60], LONG))
        await until(lambda: engine.requests.routed)
        (routed,) = engine.requests.routed.values()
        assert routed.member is not None
        os.kill(routed.member.pid, signal.SIGKILL)
        for member in engine.members:
            if member is not routed.member:
                os.kill(member.pid, signal.SIGCONT)
        with pytest.raises(EngineError, match="1 engines died while they ran this request"):
            await task

    pools.run(test)


# Pools that grow and shrink


def test_what_is_in_an_engine_that_leaves_ends_there_or_goes_on_elsewhere(
    pools: Running, alone: LLM
) -> None:
    async def test(engine: RoutedEngine) -> None:
        asked = [[50 + (11 * n + k) % 200 for k in range(30 + n)] for n in range(8)]
        expected = alone.generate(asked, LONG)
        for drain_timeout_s, moves in ((0.0, True), (PATIENCE_S, False)):
            for member in engine.members:  # what they took before does not choose between them
                member.state.forget_costs()
            tasks = [asyncio.create_task(last(engine, prompt, LONG)) for prompt in asked]
            leaving = by_name(engine, "decode-1")
            await until(lambda leaving=leaving: leaving.state.streams > 0)
            await engine.scale({"decode": 1}, drain_timeout_s)
            assert [member.name for member in engine.members] == ["prefill-0", "decode-0"]
            outputs = await asyncio.gather(*tasks)
            for output, one in zip(outputs, expected, strict=True):
                assert output.outputs[0].token_ids == one.outputs[0].token_ids
                assert len(output.records[0].token_s) == 150
            routes = [output.records[0].route for output in outputs]
            assert any("moved: decode-1 was removed" in one for one in routes) is moves
            await engine.scale({"decode": 2}, 0)
        assert engine.num_restarts == sum(member.num_restarts for member in engine.members)

    pools.run(test)


def test_a_growth_that_fails_leaves_the_pools_as_they_were(pools: Running) -> None:
    async def test(engine: RoutedEngine) -> None:
        first = engine._scaling._first
        wrong = first[Role.DECODE]._replace(
            config=EngineConfig(model="/nowhere", num_gpu_blocks_override=8)
        )
        engine._scaling._first = first | {Role.DECODE: wrong}
        before = engine.pools()
        try:
            with pytest.raises(ModelError, match="nowhere"):
                await engine.scale({"prefill": 2, "decode": 3}, 0)
        finally:
            engine._scaling._first = first
        assert engine.pools() == before

    pools.run(test)


# Transfers that fail


def test_a_damaged_transfer_is_computed_again_and_told(
    pools: Running, alone: LLM, monkeypatch: pytest.MonkeyPatch
) -> None:
    hand_over = RoutedRequests._hand_over

    def damaged(self: RoutedRequests, member: Member, routed: RoutedRequest, update: Any) -> None:
        offer: Offer = update.offer
        wrong = tuple(tuple(one ^ 1 for one in sums) for sums in offer.checksums)
        hand_over(self, member, routed, update._replace(offer=offer._replace(checksums=wrong)))

    monkeypatch.setattr(RoutedRequests, "_hand_over", damaged)

    async def test(engine: RoutedEngine) -> None:
        engine.reset_prefix_cache()
        asked = [[61 + n] * 40 for n in range(4)]
        outputs = await asyncio.gather(*(last(engine, prompt) for prompt in asked))
        for output, expected in zip(outputs, alone.generate(asked, SHORT), strict=True):
            assert output.outputs[0].token_ids == expected.outputs[0].token_ids
            assert "computed again by decode-" in output.records[0].route
            assert "DamagedError" in output.records[0].route

    pools.run(test)


# Ends


def test_closing_ends_open_streams_with_an_error(folder: Path) -> None:
    async def test() -> None:
        settings = PoolSettings(data_parallel_size=2)
        config = EngineConfig(model=str(folder), num_gpu_blocks_override=64)
        engine = await RoutedEngine.start(settings.engines(config))
        tasks = [asyncio.create_task(last(engine, [60 + n], LONG)) for n in range(4)]
        await asyncio.sleep(0.01)
        await engine.close()
        for outcome in await asyncio.gather(*tasks, return_exceptions=True):
            assert isinstance(outcome, EngineError)
        with pytest.raises(EngineError, match="has stopped"):
            await last(engine, [60])
        assert not engine.healthy

    asyncio.run(asyncio.wait_for(test(), PATIENCE_S))


# Settings


def test_pools_that_keep_different_blocks_are_refused_by_name(folder: Path) -> None:
    """Engines on machines that compute differently; `PoolSettings` gives all engines equal
    settings."""
    settings = PoolSettings(prefill_engines=1, decode_engines=1)
    config = EngineConfig(model=str(folder), num_gpu_blocks_override=64)
    prefill, decode = settings.engines(config)
    decode = decode._replace(config=replace(decode.config, block_size=32))
    expected = "between prefill-0 and decode-0: one keeps blocks of 16 tokens and 2048 bytes"
    with pytest.raises(ConfigError, match=expected):
        asyncio.run(asyncio.wait_for(RoutedEngine.start([prefill, decode]), PATIENCE_S))


def test_engines_have_what_their_phase_wants() -> None:
    settings = PoolSettings(
        prefill_engines=1, decode_engines=2, prefill_config={"threads": 3, "max_num_seqs": 4}
    )
    engines = settings.engines(EngineConfig(threads=1))
    assert [(one.name, one.role) for one in engines] == [
        ("prefill-0", Role.PREFILL),
        ("decode-0", Role.DECODE),
        ("decode-1", Role.DECODE),
    ]
    assert [one.config.threads for one in engines] == [3, 1, 1]
    assert [one.config.kv_sharing for one in engines] == ["shared", "none", "none"]
    assert {one.config.engines_on_host for one in engines} == {3}
    assert [one.config.engine_index for one in engines] == [0, 1, 2]
    (single,) = PoolSettings().engines(EngineConfig())
    assert single.config == EngineConfig()


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"prefill_engines": 1}, "prefill_engines is given, and decode_engines is not"),
        ({"decode_engines": 1}, "decode_engines is given, and prefill_engines is not"),
        (
            {"prefill_engines": 1, "decode_engines": 1, "data_parallel_size": 2},
            "both say how many engines",
        ),
        ({"prefill_config": {"threads": 1}}, "prefill_config is for pools"),
        (
            {"prefill_engines": 1, "decode_engines": 1, "decode_config": {"block_size": 32}},
            "decode_config: 'block_size' is the same for all engines",
        ),
        ({"data_parallel_size": 0}, "data_parallel_size must be"),
        ({"decode_resources": {"decode": 1}}, "says which nodes of a Ray cluster a pool is for"),
        (
            {
                "prefill_engines": 1,
                "decode_engines": 1,
                "ray": "auto",
                "decode_resources": {"a": 0},
            },
            "decode_resources must be a dict of numbers above 0",
        ),
        ({"ray": ""}, "ray must be an address"),
        ({"ray_timeout_s": 0}, "ray_timeout_s must be seconds"),
        ({"kv_transport": "tcp"}, "kv_transport must be one of auto, memory, device, nixl, socket"),
        ({"kv_transport": "rdma"}, "kv_transport 'rdma' is not supported; for RDMA use .*'nixl'"),
        ({"kv_transfer_timeout_s": 0}, "kv_transfer_timeout_s must be seconds from 0.01 to 600"),
    ],
)
def test_settings_that_contradict_each_other_are_refused(
    given: dict[str, Any], message: str
) -> None:
    with pytest.raises(ConfigError, match=message):
        PoolSettings(**given)
