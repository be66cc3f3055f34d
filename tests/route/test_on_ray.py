"""Engines as actors of a real Ray cluster of two nodes, both on this machine: they answer as one
engine alone, pools grow and shrink under load, and whichever actor is killed at whatever stage, Ray
starts it again and every request ends once, with the tokens of a run that nothing disturbed."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import sys
import time
from collections.abc import Iterator
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest

from tests.cli.test_serve import started
from tests.server.engines.test_routed_engine import assert_nothing_left, last, until
from tests.tiny import tiny_llm
from twostroke import SamplingParams, __version__
from twostroke.config import EngineConfig
from twostroke.engine.child import Child
from twostroke.errors import ConfigError, EngineError, TwostrokeError
from twostroke.kernels import cpu
from twostroke.observe.record import RequestRecord, StepRecord
from twostroke.route.member import Member, RoutedRequest
from twostroke.route.pool_settings import PooledEngine, PoolSettings
from twostroke.route.routed_engine import RoutedEngine
from twostroke.route.routed_requests import RoutedRequests
from twostroke.route.router import Role

needs_ray = pytest.mark.skipif(
    find_spec("ray") is None or not cpu.available() or not hasattr(os, "memfd_create"),
    reason="needs ray (pip install 'twostroke[cluster]') and native kernels on Linux",
)
PATIENCE_S = 540
CORES = 4  # that each node says it has
STAGES = ("before prefill", "in prefill", "in transfer", "in decode")
KINDS = (Role.PREFILL, Role.DECODE)
REQUESTS_A_ROUND = 20  # eight rounds with a death, two in which a pool changes: 200 in all
PARAMS = (
    SamplingParams(temperature=0, max_tokens=40, ignore_eos=True),
    SamplingParams(temperature=0.9, seed=5, max_tokens=40, ignore_eos=True),
)


@pytest.fixture(scope="module")
def address(monkeypatch_module: pytest.MonkeyPatch) -> Iterator[str]:
    """Return the address of a cluster with nodes at two loopback addresses."""
    from ray.cluster_utils import Cluster

    head = {"node_ip_address": "127.0.0.2", "include_dashboard": False}
    small = {"num_cpus": CORES, "object_store_memory": 80 << 20}
    cluster = Cluster(initialize_head=True, connect=False, head_node_args=head | small)
    cluster.add_node(node_ip_address="127.0.0.3", **small)
    yield cluster.address
    cluster.shutdown()


@pytest.fixture(scope="module")
def monkeypatch_module() -> Iterator[pytest.MonkeyPatch]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("RAY_USAGE_STATS_ENABLED", "0")
        # Workers find modules where this process does.
        patch.setenv("PYTHONPATH", os.pathsep.join(entry or os.getcwd() for entry in sys.path))
        yield patch


# Answers, pools and deaths


def prompts(round_number: int) -> list[list[int]]:
    """Prompts with different beginnings, so that none is cached, and several chunks each."""
    return [
        [
            4 + (29 * round_number + 7 * n) % 290,
            *(5 + (11 * n + 13 * k * k) % 280 for k in range(60)),
        ]
        for n in range(REQUESTS_A_ROUND)
    ]


class KillAtStage:
    """Kills the process of one member, once, when a request is at a stage."""

    def __init__(self, engine: RoutedEngine, stage: str, kind: Role) -> None:
        self.killed = ""
        self._engine, self._stage, self._kind = engine, stage, kind
        for member in engine.members:
            member.records.listeners.append(self)

    def stop(self) -> None:
        for member in self._engine.members:
            member.records.listeners.remove(self)

    def at(self, stage: str, member: Member | None = None) -> None:
        """Called when a request is at a stage; `member`: the engine that has it."""
        if self.killed or stage != self._stage:
            return
        if member is None or member.state.role is not self._kind:
            member = next(one for one in self._engine.members if one.state.role is self._kind)
        self.killed = member.name
        os.kill(member.pid, signal.SIGKILL)

    def add_step(self, record: StepRecord) -> None:
        if record.prefill.tokens and any(
            one.queued.tokens for one in self._engine.requests.routed.values()
        ):
            self.at("in prefill")
        if record.decode.tokens:
            self.at("in decode")

    def add_request(self, record: RequestRecord) -> None: ...


async def ask_all(engine: RoutedEngine, round_number: int, answers: dict[str, Any]) -> None:
    """Send requests, half greedy and half seeded; store the answers by request id."""

    async def ask(n: int, prompt: list[int]) -> None:
        name = f"{round_number}/{n}"
        output = await last(engine, prompt, PARAMS[n % 2], request_id=name)
        assert name not in answers, "it ended twice"
        answers[name] = output

    await asyncio.gather(*(ask(n, prompt) for n, prompt in enumerate(prompts(round_number))))


@pytest.mark.full
@needs_ray
def test_200_requests_survive_every_death_and_change_of_the_pools(
    address: str, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from twostroke.route.on_ray import RayCluster

    answers: dict[str, Any] = {}
    deaths: list[dict[str, str]] = []
    killers: list[KillAtStage] = []
    hand_over = RoutedRequests._hand_over

    def watched(self: RoutedRequests, member: Member, routed: RoutedRequest, update: Any) -> None:
        hand_over(self, member, routed, update)
        if killers and routed.member is not None:
            killer = killers[-1]
            killer.at("in transfer", member if killer._kind is Role.PREFILL else routed.member)

    monkeypatch.setattr(RoutedRequests, "_hand_over", watched)

    async def test(cluster: RayCluster) -> None:
        settings = PoolSettings(
            prefill_engines=1,
            decode_engines=2,
            prefill_config={"max_num_batched_tokens": 32},  # a prompt is two chunks
            kv_transport="sockets",  # as between machines
            kv_transfer_checksums=True,
        )
        config = EngineConfig(
            model=str(folder), max_num_seqs=32, num_gpu_blocks_override=512, exact=True, threads=1
        )
        engines = cluster.adapt(settings.engines(config))
        async with await RoutedEngine.start(
            engines, restart_limit=1000, placement=cluster
        ) as engine:
            # The tiny model's prompts are short: none would be handed over for long.
            engine.requests.router._place_directly = lambda *_: None  # type: ignore[method-assign]
            for number, (stage, kind) in enumerate((s, k) for s in STAGES for k in KINDS):
                killer, restarts = KillAtStage(engine, stage, kind), engine.num_restarts
                killers.append(killer)
                asking = asyncio.create_task(ask_all(engine, number, answers))
                await asyncio.sleep(0)
                await asyncio.sleep(0)
                killer.at("before prefill")
                await asking
                killers.clear()
                killer.stop()
                assert killer.killed.startswith(kind), f"nothing was killed {stage}"
                await until(lambda restarts=restarts: engine.num_restarts == restarts + 1)
                deaths.append({"stage": stage, "killed": killer.killed})
            for number, counts in (
                (8, {"prefill": 2, "decode": 3}),
                (9, {"prefill": 1, "decode": 1}),
            ):
                asking = asyncio.create_task(ask_all(engine, number, answers))
                await until(lambda: engine.load().running > 3)
                await engine.scale(counts, drain_timeout_s=0)
                await asking
                assert engine.pools().counts == counts
            await assert_nothing_left(engine)  # audits all engines

    cluster = RayCluster(address)
    try:
        asyncio.run(asyncio.wait_for(test(cluster), PATIENCE_S))
    finally:
        cluster.close()
    assert len(answers) == 10 * REQUESTS_A_ROUND == 200
    alone = tiny_llm(folder, exact=True)
    for number in range(10):
        for n, prompt in enumerate(prompts(number)):
            (expected,) = alone.generate([prompt], PARAMS[n % 2])
            output = answers[f"{number}/{n}"]
            assert output.outputs[0].token_ids == expected.outputs[0].token_ids
            assert len(output.records[0].token_s) == 40
    routes = [output.records[0].route for output in answers.values()]
    outcome = {
        "requests": len(answers),
        "ended_once_with_the_tokens_of_an_undisturbed_run": len(answers),
        "deaths": deaths,
        "requests_that_lost_an_engine": sum("died" in route for route in routes),
        "requests_moved_from_an_engine_that_left": sum("was removed" in one for one in routes),
        "transfers_computed_again": sum("computed again" in route for route in routes),
        "audits": "clean on all engines",
    }
    if where := os.environ.get("TWOSTROKE_RAY_RESULT"):
        Path(where).write_text(json.dumps(outcome, indent=1) + "\n")
    assert outcome["requests_that_lost_an_engine"] >= 4
    assert outcome["requests_moved_from_an_engine_that_left"] >= 1


@needs_ray
def test_serve_answers_over_a_cluster_and_its_pools_change(address: str, folder: Path) -> None:
    prompt = [50 + (7 * n * n) % 200 for n in range(120)]
    params = SamplingParams(temperature=0, max_tokens=30, ignore_eos=True)
    (expected,) = tiny_llm(folder, exact=True).generate([prompt], params)
    body = {"prompt": prompt, "temperature": 0, "max_tokens": 30, "ignore_eos": True}
    options = ["--num-gpu-blocks-override", "256", "--max-num-seqs", "8", "--exact"]
    pools = ["--prefill-engines", "1", "--decode-engines", "1", "--threads", "1", "--ray", address]
    with started("twostroke", "serve", str(folder), *options, *pools) as server:
        for counts in ({}, {"decode": 2}, {"decode": 1}):
            if counts:
                status, content = server.ask("/pools", counts)
                assert status == 200, content
                assert json.loads(content)["decode"] == counts["decode"]
            status, content = server.ask("/v1/completions", body)
            assert status == 200, content
            assert json.loads(content)["choices"][0]["text"] == expected.outputs[0].text
        status, said = server.terminate()
        assert status == 0, said
        assert "engines   1 prefill, 1 decode, on Ray" in said


# A start that stands still


@pytest.mark.full
@needs_ray
def test_an_actor_that_is_stopped_at_its_start_is_given_up_and_ended(
    address: str, folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from tests.route.stopped_actor import StoppedActor
    from twostroke.route import on_ray

    note = tmp_path / "pid"
    cluster = on_ray.RayCluster(address, builder=str(note))
    monkeypatch.setattr(on_ray, "EngineActor", StoppedActor)
    config = EngineConfig(model=str(folder), num_gpu_blocks_override=64, threads=1)

    async def start() -> None:
        launcher = cluster.launcher(PooledEngine("decode-0", Role.DECODE, config))
        child = Child(launcher.launch(), hang_timeout_s=2)
        try:
            starting = asyncio.create_task(child.start())
            await until(note.exists)
            monkeypatch.setattr(on_ray, "ACTOR_START_S", 0.0)  # from here on it is late
            await starting
        finally:
            await child.kill_and_close()
            await launcher.close()

    try:
        with pytest.raises(EngineError, match="Ray actor of decode-0 has not started within"):
            asyncio.run(start())
        pid, end = int(note.read_text()), time.monotonic() + PATIENCE_S
        while (stat := Path(f"/proc/{pid}/stat")).exists() and " Z " not in stat.read_text():
            assert time.monotonic() < end, "its process was left behind"
            time.sleep(0.05)
    finally:
        cluster.close()


# What cannot be


@pytest.mark.full
@needs_ray
def test_impossible_demands_on_a_cluster_are_refused(
    address: str, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from twostroke.route import on_ray

    config = EngineConfig(model=str(folder), num_gpu_blocks_override=64)
    cluster = on_ray.RayCluster(address, placement_timeout_s=1)

    async def start(engine: PooledEngine) -> None:
        launcher = cluster.launcher(engine)
        child = Child(launcher.launch())
        try:
            await child.start()
        finally:
            await child.kill_and_close()
            await launcher.close()

    def refusal(config: EngineConfig) -> str:
        with pytest.raises(TwostrokeError) as refused:
            asyncio.run(start(PooledEngine("decode-0", Role.DECODE, config)))
        return str(refused.value)

    try:
        many = PoolSettings(data_parallel_size=9).engines(config)
        with pytest.raises(ConfigError, match="9 engines need at least one CPU each, and the"):
            cluster.adapt(many)
        several = cluster.adapt(PoolSettings(data_parallel_size=3).engines(config))
        assert [one.config.threads for one in several] == [2, 2, 2]
        assert [one.config.engines_on_host for one in several] == [2, 2, 2]
        text = refusal(EngineConfig(model=str(folder), threads=CORES + 1))
        assert "no room for decode-0 within 1 s: the engine needs 5 CPU on one node" in text
        wanting = PoolSettings(
            prefill_engines=1, decode_engines=1, ray=address, decode_resources={"fast_memory": 1}
        ).engines(EngineConfig(model=str(folder), threads=1))[1]
        with pytest.raises(EngineError, match="needs 1 CPU and 1 fast_memory on one node, and"):
            asyncio.run(start(wanting))
        with monkeypatch.context() as other:
            other.setattr(on_ray, "__version__", "0.0.1")
            text = refusal(EngineConfig(model=str(folder), threads=1))
        assert f"decode-0 runs twostroke {__version__}, but the server runs 0.0.1" in text
        text = refusal(EngineConfig(model="/nowhere", threads=1))
        assert "decode-0 on node 127.0.0." in text
        assert "/nowhere" in text
    finally:
        cluster.close()


@needs_ray
@pytest.mark.parametrize(
    ("address", "says"),
    [
        ("ray://127.0.0.2:10001", "is an address for Ray Client"),
        ("127.0.0.2", "expected HOST:PORT"),
        ("127.0.0.2:1", "no connection to this address"),
    ],
)
def test_an_address_without_a_cluster_is_refused(address: str, says: str) -> None:
    from twostroke.route.on_ray import RayCluster

    with pytest.raises(ConfigError, match=says):
        RayCluster(address)


def test_without_ray_the_error_says_how_to_install_ray(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "ray", None)
    monkeypatch.delitem(sys.modules, "twostroke.route.on_ray", raising=False)
    with pytest.raises(ConfigError, match=r"pip install 'twostroke\[cluster\]'"):
        import twostroke.route.on_ray  # noqa: F401
