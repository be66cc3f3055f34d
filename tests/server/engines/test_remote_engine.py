"""`RemoteEngine`: an engine in another process, and all ways in which streams and engine may
end."""

from __future__ import annotations

import asyncio
import dataclasses
import os
import random
import signal
import subprocess
import sys
import tempfile
import time
from array import array
from collections.abc import Callable, Coroutine, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import zmq

from tests.engine_streams import ENDS, MANY_SETTINGS, end_at_random
from tests.instant import BUILDER, STEP_DELAY, expected_tokens
from tests.tiny import same_rounding, tiny_llm
from twostroke import LLM, SamplingParams
from twostroke.config import EngineConfig
from twostroke.engine import child, remote, supervised
from twostroke.engine.api import EngineClient, EngineLoad
from twostroke.engine.in_process import AsyncEngine
from twostroke.engine.remote import RemoteEngine
from twostroke.engine.wire import Add, Step, decode_from_engine, encode, pack_step, unpack_step
from twostroke.errors import ConfigError, EngineError, ModelError, RequestError
from twostroke.kv.usage import KVUsage
from twostroke.observe.record import Causes, FirstToken, PhaseRecord, RequestRecord, StepRecord
from twostroke.outputs import RequestOutput
from twostroke.owned_folder import OwnedFolder
from twostroke.plan import Chunk, Slot, TokenLogprobs
from twostroke.request import EngineRequest, FinishReason
from twostroke.sched.updates import Update
from twostroke.serve.monitor.prometheus import Families

LONG = SamplingParams(temperature=0, max_tokens=200, ignore_eos=True)
SHORT = SamplingParams(temperature=0, max_tokens=12, ignore_eos=True)
PATIENCE_S = 240  # what hangs fails its test
REPOSITORY = Path(__file__).parents[3]
CLIENTS: tuple[type[EngineClient], ...] = (RemoteEngine, AsyncEngine)  # for the type checker


@pytest.fixture(scope="module")
def alone(folder: Path) -> LLM:
    """The expected answers: one request at a time, in this process."""
    return tiny_llm(folder)


class Running:
    """An engine with its event loop, for several tests."""

    def __init__(self, config: EngineConfig, **more: Any) -> None:
        self.runner = asyncio.Runner()
        self.engine = self.runner.run(RemoteEngine.start(config, **more))

    def run(self, test: Callable[[RemoteEngine], Coroutine[Any, Any, None]]) -> None:
        """Check at the end that neither side has anything left of any request."""

        async def run() -> None:
            await asyncio.wait_for(test(self.engine), PATIENCE_S)
            await assert_nothing_left(self.engine)

        self.runner.run(run())

    def close(self) -> None:
        self.runner.run(self.engine.close())
        self.runner.close()


@pytest.fixture(scope="module")
def tiny(folder: Path) -> Iterator[Running]:
    running = Running(tiny_config(folder))
    yield running
    running.close()


@pytest.fixture(scope="module")
def instant(folder: Path) -> Iterator[Running]:
    running = Running(instant_config(folder), builder=BUILDER)
    yield running
    running.close()


def tiny_config(folder: Path, **more: Any) -> EngineConfig:
    settings: dict[str, Any] = {"max_num_seqs": 16, "num_gpu_blocks_override": 256} | more
    return EngineConfig(model=str(folder), **same_rounding() | settings)


def instant_config(folder: Path, **more: Any) -> EngineConfig:
    settings: dict[str, Any] = {"max_num_seqs": 64, "max_num_batched_tokens": 512} | more
    return EngineConfig(model=str(folder), max_model_len=4096, **settings)


async def assert_nothing_left(engine: RemoteEngine) -> None:
    assert await engine.drain(PATIENCE_S)
    await engine.audit()
    assert not engine._outputs._states
    assert not engine._outputs._running
    assert not engine._names
    assert not engine._handles
    load = engine.load()
    assert (load.waiting, load.running, load.kv.used, load.kv.fragmented) == (0, 0, 0, 0)


async def collect(
    engine: RemoteEngine, prompt: Any, params: SamplingParams = SHORT, **more: Any
) -> list[RequestOutput]:
    return [output async for output in engine.generate(prompt, params, **more)]


async def last(
    engine: RemoteEngine, prompt: Any, params: SamplingParams = SHORT, **more: Any
) -> RequestOutput:
    return (await collect(engine, prompt, params, **more))[-1]


async def until(condition: Callable[[], Any]) -> None:
    async with asyncio.timeout(PATIENCE_S):
        while not condition():
            await asyncio.sleep(0.002)


def prompts(count: int) -> list[list[int]]:
    return [[50 + (7 * n + k) % 200 for k in range(1 + (5 * n) % 40)] for n in range(count)]


# Messages


def test_a_step_crosses_the_wire_unchanged() -> None:
    gap = Causes(0.5, 0.25, 0.125, 0.125)
    record = RequestRecord("c", 3, 0.5, chunks=[(1.0, 2, 0, 3)], finish_reason="stop")
    record.gaps, record.worst_gap_s, record.worst_gap = gap, gap.total_s, gap
    record.gap_causes = array("f", gap)
    record.token_s.extend([1.5, 2.5])
    record.token_step.extend([2, 2**40])
    logprobs = (TokenLogprobs((5, 6), (-0.5, float("-inf")), 1),)
    updates = [
        Update("a", (7,)),
        Update("b", (), progress=16),
        Update("c", (8, 9), logprobs, FinishReason.STOP, 9, logprobs, record, "why"),
        Update("gone", (1,)),
    ]
    handles = {"a": 0, "b": 70_000, "c": 2**33, "gone": 4}
    names = {handle: name for name, handle in handles.items() if name != "gone"}
    load = EngineLoad(1, 2, KVUsage(15, 1, 2, 4, 8))
    work = PhaseRecord(1, 2, 3, 4e9, 5e6)
    chunks, slots = (Chunk(3, 0, 16, False),), (Slot(0, 7), Slot(1, 9))
    ran = StepRecord(
        5, 0.1, 0.2, 0.3, 0.1, 0.0, work, work, chunks, slots, 1, 2, 0, load.kv,
        4, gap, 1, (gap,), (FirstToken(0.5, 3, 0),), 0.125,
    )  # fmt: skip
    step = decode_from_engine(encode(pack_step(updates, handles, load, [ran])))
    assert isinstance(step, Step)
    assert step.load == load
    assert step.steps == [ran]
    assert isinstance(step.steps[0].slots[1], Slot)
    got = {update.request_id: update for update in unpack_step(step, names)}
    assert got.keys() == {"a", "b", "c"}
    assert [got[name]._replace(record=None) for name in "abc"] == [
        update._replace(record=None) for update in updates[:3]
    ]
    back = got["c"].record
    assert back is not None
    assert dataclasses.asdict(back) == dataclasses.asdict(record)


# Streams


def test_many_streams_give_what_each_gives_alone(tiny: Running, alone: LLM) -> None:
    async def test(engine: RemoteEngine) -> None:
        asked = prompts(40)
        outputs = await asyncio.gather(*(last(engine, prompt) for prompt in asked))
        for output, expected in zip(outputs, alone.generate(asked, SHORT), strict=True):
            assert output.finished
            assert output.outputs[0].token_ids == expected.outputs[0].token_ids
            assert output.outputs[0].text == expected.outputs[0].text
            assert output.outputs[0].finish_reason == "length"

    tiny.run(test)


def test_all_that_a_request_may_ask_for_crosses_over(tiny: Running, alone: LLM) -> None:
    async def test(engine: RemoteEngine) -> None:
        (expected,) = alone.generate("the quick brown fox", MANY_SETTINGS)
        output = await last(engine, "the quick brown fox", MANY_SETTINGS)
        assert output.prompt == expected.prompt
        assert output.prompt_logprobs == expected.prompt_logprobs
        assert output.outputs == expected.outputs
        assert len(output.records) == 3
        for record in output.records:
            times = [record.received_s, record.queued_s, record.scheduled_s, *record.token_s]
            assert times == sorted(times)
            assert len(record.token_s) == len(record.token_step) > 0
            assert record.chunks
            assert record.finish_reason in ("stop", "length")

    tiny.run(test)


def test_a_stop_string_ends_the_request_here_and_there(tiny: Running, alone: LLM) -> None:
    async def test(engine: RemoteEngine) -> None:
        text = alone.generate([5, 6], LONG)[0].outputs[0].text
        stop = text[20:23]
        for n in (1, 2):
            params = SamplingParams(
                n=n, temperature=0, max_tokens=200, stop=stop, ignore_eos=True, output_kind="delta"
            )
            (expected,) = alone.generate([5, 6], params)
            outputs = await collect(engine, [5, 6], params)
            texts = [""] * n
            for output in outputs:
                for piece in output.outputs:
                    texts[piece.index] += piece.text
            assert texts == [completion.text for completion in expected.outputs]
            ends = [piece for output in outputs for piece in output.outputs if piece.finished]
            assert [(end.finish_reason, end.stop_reason) for end in ends] == [("stop", stop)] * n
            assert [record.finish_reason for record in outputs[-1].records] == ["stop"] * n

    tiny.run(test)


def test_prefill_progress_is_told(instant: Running) -> None:
    async def test(engine: RemoteEngine) -> None:
        request = engine.input_processor.process([61] * 1600, SHORT, progress=True)
        outputs = [output async for output in engine.stream(request)]
        assert [output.num_prefilled for output in outputs[:4]] == [512, 1024, 1536, 1536]
        assert [len(output.outputs[0].token_ids) for output in outputs] == [0, 0, *range(13)]

    instant.run(test)


def test_callbacks_are_called_without_a_task(instant: Running, written: list[int]) -> None:
    async def test(engine: RemoteEngine) -> None:
        delta = SamplingParams(max_tokens=50, ignore_eos=True, output_kind="delta")
        ids: dict[str, list[int]] = {}
        ended = asyncio.Event()

        def on_output(output: RequestOutput) -> None:
            ids[output.request_id] += output.outputs[0].token_ids
            if output.finished and all(len(one) == 50 for one in ids.values()):
                ended.set()

        asked = {}
        for prompt in prompts(100):
            request = engine.input_processor.process(prompt, delta)
            name = engine.submit(request, on_output, pytest.fail).request_id
            asked[name], ids[name] = prompt, []
        tasks = len(asyncio.all_tasks())
        await ended.wait()
        assert len(asyncio.all_tasks()) <= tasks
        for name, prompt in asked.items():
            assert ids[name] == expected_tokens(prompt, 50, written)

    instant.run(test)


def test_a_callback_that_fails_ends_its_own_request_only(
    instant: Running, written: list[int], caplog: pytest.LogCaptureFixture
) -> None:
    async def test(engine: RemoteEngine) -> None:
        def fail(output: RequestOutput) -> None:
            raise RuntimeError("the client has gone")

        other = asyncio.create_task(last(engine, [60, 61], LONG))
        request = engine.input_processor.process([62], LONG)
        name = engine.submit(request, fail, pytest.fail).request_id
        assert (await other).outputs[0].token_ids == expected_tokens([60, 61], 200, written)
        assert f"a listener failed on the output of {name}" in caplog.text

    instant.run(test)


# Ends


def test_abort_closes_the_stream_and_says_so(instant: Running) -> None:
    async def test(engine: RemoteEngine) -> None:
        endless = SamplingParams(max_tokens=4000, ignore_eos=True)
        outputs = []
        async for output in engine.generate([60, 61], endless, request_id="mine"):
            outputs.append(output)
            if len(outputs) == 3:
                engine.abort("mine")
        assert outputs[-1].outputs[0].finish_reason == "abort"
        assert 3 <= len(outputs[-1].outputs[0].token_ids) < 4000
        assert [record.finish_reason for record in outputs[-1].records] == ["abort"]
        engine.abort("mine")
        engine.abort("nobody")

    instant.run(test)


def test_an_abort_before_the_first_token_closes_the_stream(instant: Running) -> None:
    async def test(engine: RemoteEngine) -> None:
        task = asyncio.create_task(last(engine, [60] * 100, LONG, request_id="mine"))
        await asyncio.sleep(0)
        engine.abort("mine")
        assert (await task).outputs[0].finish_reason == "abort"

    instant.run(test)


def test_leaving_and_cancelling_abort_and_harm_no_other(
    instant: Running, written: list[int]
) -> None:
    async def test(engine: RemoteEngine) -> None:
        endless = SamplingParams(max_tokens=4000, ignore_eos=True)
        other = asyncio.create_task(last(engine, [60, 61], LONG))
        doomed = asyncio.create_task(last(engine, [62], endless))
        stream = engine.generate([63], endless)
        async for _ in stream:
            break
        await stream.aclose()  # type: ignore[attr-defined]
        doomed.cancel()
        with pytest.raises(asyncio.CancelledError):
            await doomed
        assert (await other).outputs[0].token_ids == expected_tokens([60, 61], 200, written)

    instant.run(test)


def test_a_name_may_be_used_again_when_its_stream_has_ended(instant: Running) -> None:
    async def test(engine: RemoteEngine) -> None:
        for _ in range(20):
            task = asyncio.create_task(last(engine, [60], LONG, request_id="mine"))
            await asyncio.sleep(0)
            with pytest.raises(RequestError, match="'mine' is already running"):
                await last(engine, [61], request_id="mine")
            engine.abort("mine")
            await task

    instant.run(test)


def test_refused_requests_harm_no_other(folder: Path, written: list[int]) -> None:
    async def test() -> None:
        config = instant_config(folder, num_gpu_blocks_override=8)
        async with await RemoteEngine.start(config, BUILDER) as engine:
            good = [asyncio.create_task(last(engine, [60, n])) for n in range(60, 70)]
            bad = [[], [300], [60] * 4096, None, {"promt": "x"}]
            tasks = [asyncio.create_task(last(engine, prompt)) for prompt in bad]
            for outcome in await asyncio.gather(*tasks, return_exceptions=True):
                assert isinstance(outcome, RequestError)
            for n in (1, 3):  # what only the scheduler can refuse
                with pytest.raises(RequestError, match="but the cache has 8"):
                    await last(engine, [60] * 100, SamplingParams(n=n, max_tokens=100))
            with pytest.raises(RequestError, match="priority must be a whole number from -1000"):
                await last(engine, [60], priority=2**70)
            with pytest.raises(RequestError, match="cannot be sent to the engine"):
                await last(engine, [60], request_id="\ud800")
            for n, task in enumerate(good):
                expected = expected_tokens([60, 60 + n], 12, written)
                assert (await task).outputs[0].token_ids == expected
            await assert_nothing_left(engine)

    asyncio.run(asyncio.wait_for(test(), PATIENCE_S))


def test_2000_random_ends_leave_nothing_behind(instant: Running, written: list[int]) -> None:
    choose = random.Random(5)

    async def one(engine: RemoteEngine, n: int) -> str:
        await asyncio.sleep(choose.random() * 3)
        return await end_at_random(engine, choose, n, max_tokens=60)

    async def test(engine: RemoteEngine) -> None:
        ends = await asyncio.gather(*(one(engine, n) for n in range(2000)))
        assert set(ends) == ENDS
        output = await last(engine, [50, 51])
        assert output.outputs[0].token_ids == expected_tokens([50, 51], 12, written)

    instant.run(test)


# The engine's own end


def test_messages_that_cannot_be_read_are_dropped(instant: Running, written: list[int]) -> None:
    long = EngineRequest("a", (5,) * 100_000, SamplingParams(), seed=0)
    bad = [b"", b"\xc1", b"\x91" * 50_000, encode(["add", "\x00"]), encode(Add(1 << 30, long, []))]

    async def run(engine: RemoteEngine) -> None:
        running, pid = engine._child, engine.pid
        context: zmq.Context[Any] = zmq.Context()
        stranger = context.socket(zmq.PUSH)
        stranger.connect(running._inbox.get_string(zmq.LAST_ENDPOINT))
        for message in bad[:4]:
            running.send_encoded(message)
            stranger.send(message)
        stranger.send_multipart(bad[:4])
        running.send_encoded(bad[4])
        await until(lambda: running.dropped["unreadable"] == 8)
        context.destroy(linger=0)
        output = await last(engine, written[:5])
        assert output.outputs[0].finish_reason is not None
        assert engine.pid == pid
        assert engine.dropped == {"unreadable": 12, "endless": 0}, "8 here, 4 in the engine"
        families = Families("tiny")._own_now(engine, engine.load())  # type: ignore[arg-type]
        found = {family.name: family for family in families}["twostroke:dropped_messages"]
        counts = {one.labels["reason"]: one.value for one in found.samples}
        assert counts == {"unreadable": 12, "wrong_key": 0, "endless": 0}

    instant.run(run)


def test_a_killed_engine_is_replaced_and_only_begun_streams_are_lost(
    folder: Path, written: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Three times: four streams have begun, other requests wait or are not streamed."""
    monkeypatch.setenv(STEP_DELAY, "0.01")

    async def test() -> None:
        config = instant_config(folder, max_num_seqs=4)
        async with await RemoteEngine.start(config, BUILDER) as engine:
            for turn in range(3):
                assert engine.healthy
                pid, seen = engine.pid, [0] * 4

                async def read(n: int, seen: list[int]) -> None:
                    async for _ in engine.generate([60, n + 60], LONG):
                        seen[n] += 1

                begun = [asyncio.create_task(read(n, seen)) for n in range(4)]
                await until(lambda seen=seen: all(seen))  # type: ignore[misc]
                final = SamplingParams(max_tokens=12, ignore_eos=True, output_kind="final_only")
                waiting = [asyncio.create_task(last(engine, [n])) for n in range(60, 70)]
                waiting += [asyncio.create_task(last(engine, [n], final)) for n in range(70, 80)]
                aborted = asyncio.create_task(last(engine, [90], request_id="mine"))
                left = asyncio.create_task(last(engine, [91]))
                await asyncio.sleep(0.02)
                os.kill(pid, signal.SIGKILL)
                engine.abort("mine")
                left.cancel()
                for outcome in await asyncio.gather(*begun, return_exceptions=True):
                    assert isinstance(outcome, EngineError)
                    assert "the engine died while it was writing this answer (its" in str(outcome)
                    assert "signal 9" in str(outcome)
                assert not engine.healthy
                late = asyncio.create_task(last(engine, [92]))  # asked while there is none
                outputs = await asyncio.gather(*waiting, late)
                for n, output in zip([*range(60, 80), 92], outputs, strict=True):
                    expected = expected_tokens([n], 12, written)
                    assert output.outputs[0].token_ids == expected, turn
                assert (await aborted).outputs[0].finish_reason == "abort"
                assert engine.healthy
                assert engine.pid != pid
                await assert_nothing_left(engine)

    asyncio.run(asyncio.wait_for(test(), PATIENCE_S))


def test_an_engine_that_dies_again_and_again_is_given_up(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(STEP_DELAY, "0.01")

    async def test() -> None:
        config = instant_config(folder)
        async with await RemoteEngine.start(config, BUILDER, restart_limit=2) as engine:
            final = SamplingParams(max_tokens=4000, ignore_eos=True, output_kind="final_only")
            task = asyncio.create_task(last(engine, [60], final))
            await asyncio.sleep(0.05)
            for _ in range(2):
                await until(lambda: engine.healthy)
                os.kill(engine.pid, signal.SIGKILL)
                await until(lambda: not engine.healthy)
            with pytest.raises(EngineError, match="died 2 times in a row soon after its start"):
                await task
            with pytest.raises(EngineError, match="has stopped"):
                await last(engine, [60])
            assert not engine.healthy
            assert "died 2 times" in await engine.stop_reason

    asyncio.run(asyncio.wait_for(test(), PATIENCE_S))


def test_an_engine_that_hangs_is_killed_and_replaced(
    folder: Path, written: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(STEP_DELAY, "0.01")

    async def test() -> None:
        config = instant_config(folder, max_num_seqs=1)
        async with await RemoteEngine.start(config, BUILDER, hang_timeout_s=2) as engine:
            pid = engine.pid
            os.kill(pid, signal.SIGSTOP)  # it has nothing to do
            await until(lambda: not engine.healthy)
            assert gone(pid)
            await until(lambda: engine.healthy)
            begun = engine.generate([60], LONG)
            await anext(begun)
            waiting = asyncio.create_task(last(engine, [61]))
            await asyncio.sleep(0.05)
            os.kill(engine.pid, signal.SIGSTOP)
            with pytest.raises(EngineError, match=r"sent no message for . s, so it was killed"):
                async for _ in begun:
                    pass
            assert (await waiting).outputs[0].token_ids == expected_tokens([61], 12, written)
            assert engine.num_restarts == 2
            await assert_nothing_left(engine)

    asyncio.run(asyncio.wait_for(test(), PATIENCE_S))


def test_requests_that_arrive_together_are_in_one_step(instant: Running) -> None:
    async def test(engine: RemoteEngine) -> None:
        outputs: list[list[RequestOutput]] = [[] for _ in range(16)]
        loop, failed = asyncio.get_running_loop(), list[Exception]()
        ended: asyncio.Future[None] = loop.create_future()

        def on_output(index: int, output: RequestOutput) -> None:
            outputs[index].append(output)
            if all(one and one[-1].finished for one in outputs) and not ended.done():
                ended.set_result(None)

        with engine.together():
            for index in range(len(outputs)):
                request = engine.input_processor.process([60 + index], LONG)
                engine.submit(request, partial(on_output, index), failed.append, f"{index}")
        await ended
        first_steps = {one.token_step[0] for one in list(engine.records.requests)[-len(outputs) :]}
        assert not failed
        assert len(first_steps) == 1

    instant.run(test)


@pytest.mark.full
def test_a_long_step_and_an_engine_that_is_not_watched_are_left_alone(
    folder: Path, written: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    async def long_step() -> None:
        monkeypatch.setenv(STEP_DELAY, "4")
        async with await RemoteEngine.start(config, BUILDER, hang_timeout_s=3) as engine:
            one = SamplingParams(temperature=0, max_tokens=1, ignore_eos=True)
            assert (await last(engine, [60], one)).outputs[0].token_ids
            assert engine.num_restarts == 0

    async def not_watched() -> None:
        monkeypatch.setenv(STEP_DELAY, "0")
        async with await RemoteEngine.start(config, BUILDER, hang_timeout_s=0) as engine:
            engine._child.last_message_s -= 1e6
            os.kill(engine.pid, signal.SIGSTOP)
            task = asyncio.create_task(last(engine, [60]))
            await asyncio.sleep(0.3)  # a watch with a time-out of 0 would look at once
            assert engine.healthy
            os.kill(engine.pid, signal.SIGCONT)
            assert (await task).outputs[0].token_ids == expected_tokens([60], 12, written)
            assert engine.num_restarts == 0

    config = instant_config(folder)
    for test in (long_step, not_watched):
        asyncio.run(asyncio.wait_for(test(), PATIENCE_S))


def test_a_step_that_does_not_end_is_ended(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(supervised, "TIMEOUTS_OF_STEP", 1)
    monkeypatch.setattr(remote, "MAX_ATTEMPTS", 1)
    monkeypatch.setenv(STEP_DELAY, "1000")

    async def test() -> None:
        config = instant_config(folder)
        async with await RemoteEngine.start(config, BUILDER, hang_timeout_s=2) as engine:
            with pytest.raises(EngineError, match=r"a step took more than . s, so its process"):
                await last(engine, [60])

    asyncio.run(asyncio.wait_for(test(), PATIENCE_S))


class Clock:
    """The monotonic clock, and the seconds by which a test puts it forward."""

    def __init__(self) -> None:
        self.ahead_s = 0.0

    def __call__(self) -> float:
        return time.monotonic() + self.ahead_s


def test_a_server_that_was_stopped_itself_kills_no_engine(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As after the sleep of a laptop: the server has missed messages of a working engine."""
    clock = Clock()
    for module in (supervised, child):
        monkeypatch.setattr(module, "monotonic", clock)

    async def test() -> None:
        config = instant_config(folder)
        async with await RemoteEngine.start(config, BUILDER, hang_timeout_s=20) as engine:
            for _ in range(2):
                os.kill(engine.pid, signal.SIGSTOP)  # no message resets the clock instead
                await asyncio.sleep(0.1)  # messages under way arrive
                last_message_s = engine._child.last_message_s
                clock.ahead_s += 30
                await until(lambda before=last_message_s: engine._child.last_message_s > before)
                os.kill(engine.pid, signal.SIGCONT)
            assert (await last(engine, [60])).finished
            assert engine.num_restarts == 0

    asyncio.run(asyncio.wait_for(test(), PATIENCE_S))


def test_a_request_that_may_be_what_kills_engines_is_not_sent_for_ever(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(remote, "MAX_ATTEMPTS", 1)
    monkeypatch.setenv(STEP_DELAY, "0.5")

    async def test() -> None:
        async with await RemoteEngine.start(instant_config(folder), BUILDER) as engine:
            task = asyncio.create_task(last(engine, [60]))
            await asyncio.sleep(0.1)
            os.kill(engine.pid, signal.SIGKILL)
            with pytest.raises(EngineError, match="died 1 times while this request was in it"):
                await task

    asyncio.run(asyncio.wait_for(test(), PATIENCE_S))


def test_closing_ends_open_streams_and_leaves_no_process_and_no_file(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def test() -> None:
        engine = await RemoteEngine.start(tiny_config(folder))
        (sockets,) = Path(place).iterdir()
        assert sockets.stat().st_mode & 0o777 == 0o700
        pid = engine.pid
        tasks = [asyncio.create_task(last(engine, [60, n], LONG)) for n in range(60, 68)]
        await asyncio.sleep(0.05)
        await engine.close()
        for outcome in await asyncio.gather(*tasks, return_exceptions=True):
            assert isinstance(outcome, EngineError)
            assert str(outcome) == "the engine has stopped (the engine was closed)"
        with pytest.raises(EngineError, match="the engine was closed"):
            await last(engine, [60])
        assert gone(pid)
        assert not sockets.exists()
        assert not engine.healthy
        await engine.close()

    with tempfile.TemporaryDirectory() as place:  # short, as names of sockets must be
        monkeypatch.setattr(tempfile, "tempdir", place)
        asyncio.run(asyncio.wait_for(test(), PATIENCE_S))


def test_draining_lets_streams_finish(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(STEP_DELAY, "0.01")

    async def test() -> None:
        engine = await RemoteEngine.start(instant_config(folder), BUILDER)
        task = asyncio.create_task(last(engine, [60], LONG))
        await asyncio.sleep(0)
        assert not await engine.drain(0.1)
        await engine.close(drain=True)
        assert (await task).outputs[0].finish_reason == "length"

    asyncio.run(asyncio.wait_for(test(), PATIENCE_S))


def test_a_start_that_fails_says_why_and_leaves_nothing(
    folder: Path, tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch
) -> None:
    sockets = tmp_path_factory.mktemp("t")
    monkeypatch.setattr(tempfile, "tempdir", str(sockets))

    async def start(config: EngineConfig, builder: str = remote.DEFAULT_BUILDER) -> None:
        await (await RemoteEngine.start(config, builder)).close()

    with pytest.raises(ModelError, match="no such file or folder: /nowhere"):
        asyncio.run(start(EngineConfig(model="/nowhere")))
    with pytest.raises(ConfigError, match="max_model_len"):  # only the engine can know
        asyncio.run(start(tiny_config(folder, max_model_len=100_000)))
    with pytest.raises(ModelError, match="no such file"):  # only this side can know
        asyncio.run(start(tiny_config(folder, tokenizer="/nowhere/at/all")))
    with pytest.raises(EngineError, match=r"could not start \(ModuleNotFoundError: .*nothing"):
        asyncio.run(start(tiny_config(folder), "nothing.of.that:kind"))
    assert not list(sockets.glob("twostroke-*"))


HELPER = """
import asyncio, sys
from twostroke.config import EngineConfig
from twostroke.engine.remote import RemoteEngine

async def main():
    config = EngineConfig(model=sys.argv[1])
    engine = await RemoteEngine.start(config, "tests.instant:build_instant")
    async for output in engine.generate("the quick", engine.info.sampling):
        pass
    assert output.finished
    print(engine.pid, engine._child._process.folder.path, "torch" in sys.modules, flush=True)
    await asyncio.sleep(60)

asyncio.run(main())
"""


def test_a_parent_without_torch_takes_its_engine_along_when_it_is_killed(folder: Path) -> None:
    helper = subprocess.Popen(
        [sys.executable, "-c", HELPER, str(folder)], stdout=subprocess.PIPE, cwd=REPOSITORY
    )
    assert helper.stdout is not None
    pid, sockets, torch = helper.stdout.readline().decode().split()
    assert torch == "False"
    assert not gone(int(pid))
    helper.kill()
    helper.communicate()
    deadline = time.monotonic() + 10
    while not gone(int(pid)):
        assert time.monotonic() < deadline, "the engine outlives its parent"
        time.sleep(0.02)
    OwnedFolder(parent=os.path.dirname(sockets)).remove()  # as the next server's start makes one
    assert not os.path.exists(sockets)


def gone(pid: int) -> bool:
    """Return whether a process has ended; it may be a zombie."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()[0] == "Z"
    except FileNotFoundError:
        return True


def test_signals_meant_for_the_parent_leave_the_engine_alone(
    instant: Running, written: list[int]
) -> None:
    async def test(engine: RemoteEngine) -> None:
        pid = engine.pid
        for name in (signal.SIGINT, signal.SIGTERM):
            os.kill(pid, name)
        output = await last(engine, [60, 61], LONG)
        assert output.outputs[0].token_ids == expected_tokens([60, 61], 200, written)
        assert engine.pid == pid

    instant.run(test)
