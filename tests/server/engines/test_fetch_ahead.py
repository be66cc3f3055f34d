"""Blocks of long prompts that travel between real engines, each a process, while the rest is still
computed: the tokens are those of one engine alone, whichever engine dies meanwhile."""

from __future__ import annotations

import asyncio
import os
import signal
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.server.engines.test_routed_engine import Running, last, until
from tests.tiny import tiny_folder, tiny_llm
from twostroke import LLM, SamplingParams
from twostroke.kernels import cpu
from twostroke.kv import nixl
from twostroke.route.member import ActiveOffer, Member, RoutedRequest
from twostroke.route.pool_settings import PoolSettings
from twostroke.route.routed_engine import RoutedEngine

pytestmark = pytest.mark.skipif(
    not cpu.available() or not hasattr(os, "memfd_create"), reason="native kernels on Linux only"
)
PARAMS = SamplingParams(temperature=0.9, seed=7, max_tokens=20, ignore_eos=True)
PROMPTS = [[50 + (n + 7 * k * k) % 200 for k in range(700 + n)] for n in range(8)]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_folder(tmp_path_factory.mktemp("tiny"), max_position_embeddings=1024)


@pytest.fixture(scope="module")
def expected(folder: Path) -> list[list[int]]:
    alone: LLM = tiny_llm(folder, exact=True, num_gpu_blocks_override=512)
    return [list(output.outputs[0].token_ids) for output in alone.generate(PROMPTS, PARAMS)]


NIXL = pytest.mark.skipif(nixl.installed() is None, reason="NIXL is not installed")


@pytest.fixture(scope="module", params=["memory", "sockets", pytest.param("nixl", marks=NIXL)])
def pools(request: pytest.FixtureRequest, folder: Path) -> Iterator[Running]:
    settings = PoolSettings(
        prefill_engines=1,
        decode_engines=2,
        kv_transfer_checksums=True,
        kv_transport=request.param,
        prefill_config={"max_num_batched_tokens": 64, "performance_mode": "throughput"},
    )
    running = Running(folder, settings)
    yield running
    running.close()


def test_a_long_prompts_blocks_are_sent_while_it_is_prefilled(
    pools: Running, expected: list[list[int]], monkeypatch: pytest.MonkeyPatch
) -> None:
    hand_over = RoutedEngine._hand_over

    def when_all_is_there(
        self: RoutedEngine, member: Member, placed: RoutedRequest, update: Any
    ) -> None:
        """The tiny model's last chunk would take less than the blocks before it."""
        if any(one is placed for one, _ in self._ahead.values()):
            loop = asyncio.get_running_loop()
            loop.call_later(0.001, when_all_is_there, self, member, placed, update)
        else:
            hand_over(self, member, placed, update)

    monkeypatch.setattr(RoutedEngine, "_hand_over", when_all_is_there)

    async def test(engine: RoutedEngine) -> None:
        outputs = await asyncio.gather(*(last(engine, prompt, PARAMS) for prompt in PROMPTS))
        assert [list(output.outputs[0].token_ids) for output in outputs] == expected
        routes = [output.records[0].route for output in outputs]
        assert all("MB before, while it was prefilled" in route for route in routes), routes
        assert not any("computed again" in route for route in routes), routes

    pools.run(test)


def test_one_that_leaves_while_its_blocks_are_sent_leaves_nothing(
    pools: Running, monkeypatch: pytest.MonkeyPatch
) -> None:
    send_ahead, tasks = RoutedEngine._send_ahead, list[asyncio.Task[Any]]()

    def send_and_leave(self: RoutedEngine, placed: RoutedRequest, standing: ActiveOffer) -> None:
        send_ahead(self, placed, standing)
        if self._ahead:
            tasks[0].cancel()

    monkeypatch.setattr(RoutedEngine, "_send_ahead", send_and_leave)

    async def test(engine: RoutedEngine) -> None:
        engine.reset_prefix_cache()
        tasks.append(asyncio.create_task(last(engine, PROMPTS[0], PARAMS)))
        with pytest.raises(asyncio.CancelledError):
            await tasks[0]

    pools.run(test)


@pytest.mark.parametrize("who", ["sends", "fetches"])
def test_an_engine_that_dies_while_blocks_are_sent_ahead(
    pools: Running, who: str, expected: list[list[int]], monkeypatch: pytest.MonkeyPatch
) -> None:
    killed: list[Member] = []
    send_ahead = RoutedEngine._send_ahead

    def send_and_kill(self: RoutedEngine, placed: RoutedRequest, standing: ActiveOffer) -> None:
        send_ahead(self, placed, standing)
        if self._ahead and not killed:
            ((member, _), (_, offered)) = next(iter(self._ahead.items()))
            killed.append(offered.member if who == "sends" else member)
            os.kill(killed[0].pid, signal.SIGKILL)

    monkeypatch.setattr(RoutedEngine, "_send_ahead", send_and_kill)

    async def test(engine: RoutedEngine) -> None:
        engine.reset_prefix_cache()
        restarts = engine.num_restarts
        outputs = await asyncio.gather(*(last(engine, prompt, PARAMS) for prompt in PROMPTS))
        assert [list(output.outputs[0].token_ids) for output in outputs] == expected
        assert killed
        await until(lambda: engine.num_restarts == restarts + 1)

    pools.run(test)
