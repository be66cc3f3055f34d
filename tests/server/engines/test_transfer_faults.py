"""Faults in KV transfers between engine processes: every request ends once, with the tokens of an
undisturbed run, and its record has the cause."""

from __future__ import annotations

import asyncio
import os
import signal
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from tests.server.engines.faulty_transfer import BUILDER, FAULT_FILE
from tests.server.engines.test_routed_engine import Running, by_name, last, until
from tests.tiny import tiny_llm
from twostroke import LLM, SamplingParams
from twostroke.kernels import cpu
from twostroke.outputs import RequestOutput
from twostroke.route.pool_settings import PoolSettings
from twostroke.route.routed_engine import RoutedEngine

pytestmark = pytest.mark.skipif(
    not cpu.available() or not hasattr(os, "memfd_create"), reason="native kernels on Linux only"
)
WAYS = {
    "greedy": SamplingParams(temperature=0, max_tokens=20, ignore_eos=True),
    "seeded": SamplingParams(temperature=0.9, seed=7, max_tokens=20, ignore_eos=True),
}
TIMEOUT_S, DELAY_S = 1.5, 3.0  # a sender that is later is given up


@pytest.fixture(scope="module")
def alone(folder: Path) -> LLM:
    return tiny_llm(folder, exact=True)


class Faulty(Running):
    """A prefill engine with faults on request, and a decode engine."""

    def __init__(self, folder: Path, file: Path, transport: str) -> None:
        self._file, self.transport = file, transport
        self.tell("none")
        settings = PoolSettings(
            prefill_engines=1,
            decode_engines=1,
            kv_transfer_checksums=True,
            kv_transfer_timeout_s=TIMEOUT_S,
            kv_transport=transport,
        )
        os.environ[FAULT_FILE] = str(file)  # for those, too, that are started again
        super().__init__(folder, settings, BUILDER)

    def close(self) -> None:
        super().close()
        del os.environ[FAULT_FILE]

    def tell(self, fault: str, value: float = 0.0) -> None:
        new = self._file.with_suffix(".new")
        new.write_text(f"{fault} {value}")
        new.replace(self._file)  # whole or not at all: it is read at any moment


@pytest.fixture(scope="module", params=["sockets", "memory"])
def engines(
    request: pytest.FixtureRequest, folder: Path, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Faulty]:
    running = Faulty(folder, tmp_path_factory.mktemp("fault") / "fault", request.param)
    yield running
    running.close()


EXPECTED: dict[str, Callable[[str], bool]] = {
    "truncated": lambda route: "computed again by decode-0 (TruncatedError: " in route,
    "corrupted": lambda route: "computed again by decode-0 (DamagedError: " in route,
    "delayed": lambda route: "computed again by decode-0 (StalledError: " in route,
    # Every block says which it is: nothing has to be computed again.
    "reordered": lambda route: "MB fetched in" in route and "again" not in route,
}


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("fault", EXPECTED)
def test_whatever_goes_wrong_on_the_way_the_tokens_are_the_same(
    fault: str, way: str, engines: Faulty, alone: LLM
) -> None:
    if engines.transport == "memory" and fault in ("delayed", "reordered"):
        pytest.skip("the receiver itself copies from shared memory, in its own order and time")
    params = WAYS[way]
    asked = [[50 + (11 * n + k) % 200 for k in range(30 + 9 * n)] for n in range(5)]
    expected = alone.generate(asked, params)

    async def test(engine: RoutedEngine) -> None:
        engine.reset_prefix_cache()
        engines.tell(fault, DELAY_S)
        try:
            outputs = await asyncio.gather(*(last(engine, prompt, params) for prompt in asked))
        finally:
            engines.tell("none")
        for output, right in zip(outputs, expected, strict=True):
            assert_same(output, right)
            assert EXPECTED[fault](output.records[0].route), output.records[0].route
        # What is not disturbed any more is fetched again.
        engine.reset_prefix_cache()
        async with asyncio.timeout(60):
            while "computed again" in (route := (await last(engine, asked[0])).records[0].route):
                await asyncio.sleep(0.1)  # the sender still sleeps
        assert "MB fetched in" in route

    engines.run(test)


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("victim", ["prefill-0", "decode-0"])
def test_an_engine_that_dies_while_blocks_are_on_their_way_costs_no_token(
    victim: str, way: str, engines: Faulty, alone: LLM
) -> None:
    if engines.transport == "memory":
        pytest.skip("in tests/server/engines/test_routed_engine.py")
    params = WAYS[way]
    asked = [[70 + (13 * n + k) % 150 for k in range(40 + n)] for n in range(4)]
    expected = alone.generate(asked, params)

    async def test(engine: RoutedEngine) -> None:
        engine.reset_prefix_cache()
        restarts = engine.num_restarts
        engines.tell("delayed", DELAY_S)
        try:
            tasks = [asyncio.create_task(last(engine, prompt, params)) for prompt in asked]
            await until(lambda: any(one.offer for one in engine.requests.routed.values()))
            os.kill(by_name(engine, victim).pid, signal.SIGKILL)
            await until(lambda: engine.num_restarts > restarts or all(t.done() for t in tasks))
        finally:
            engines.tell("none")
        outputs = await asyncio.gather(*tasks)
        for output, right in zip(outputs, expected, strict=True):
            assert output.outputs[0].token_ids == right.outputs[0].token_ids
            assert len(output.records) == 1
        routes = [output.records[0].route for output in outputs]
        told = "(SenderGoneError: " if victim == "prefill-0" else "decode-0 died"
        assert any(told in route for route in routes), routes
        await until(lambda: engine.num_restarts > restarts)

    engines.run(test)


def assert_same(output: RequestOutput, expected: RequestOutput) -> None:
    assert output.outputs[0].token_ids == expected.outputs[0].token_ids
    assert output.outputs[0].text == expected.outputs[0].text
    (record,) = output.records
    assert len(record.token_s) == len(output.outputs[0].token_ids)
    assert record.finish_reason == "length"


def test_requests_wait_for_room_in_a_full_receiver_and_say_so(folder: Path, alone: LLM) -> None:
    """The cache holds two of the prompts at a time."""
    settings = PoolSettings(
        prefill_engines=1,
        decode_engines=1,
        decode_config={"num_gpu_blocks_override": 16, "max_num_seqs": 2},
        kv_transport="sockets",
    )
    running = Running(folder, settings)
    params = SamplingParams(temperature=0, max_tokens=150, ignore_eos=True)
    asked = [[60 + n] * 40 for n in range(5)]
    expected = alone.generate(asked, params)

    async def test(engine: RoutedEngine) -> None:
        # The receiver stands still until every prompt has been prefilled and offered.
        receiver = by_name(engine, "decode-0").pid
        os.kill(receiver, signal.SIGSTOP)
        try:
            tasks = [asyncio.create_task(last(engine, prompt, params)) for prompt in asked]
            routed = engine.requests.routed
            await until(lambda: sum(one.offer is not None for one in routed.values()) == len(asked))
        finally:
            os.kill(receiver, signal.SIGCONT)
        outputs = await asyncio.gather(*tasks)
        for output, right in zip(outputs, expected, strict=True):
            assert_same(output, right)
        routes = [output.records[0].route for output in outputs]
        assert all("MB fetched in" in route for route in routes)
        assert sum("ms without room there" in route for route in routes) >= 2, routes

    try:
        running.run(test)
    finally:
        running.close()
