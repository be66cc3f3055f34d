"""`AsyncEngine`: many streams from one engine, and all the ways in which a stream can end."""

from __future__ import annotations

import asyncio
import random
import threading
from collections.abc import Callable, Coroutine
from pathlib import Path
from typing import Any

import pytest

from tests.engine_streams import ENDS, end_at_random
from tests.tiny import tiny_folder, tiny_llm
from twostroke import LLM, SamplingParams
from twostroke.engine.in_process import AsyncEngine
from twostroke.errors import EngineError, RequestError
from twostroke.outputs import RequestOutput

LONG = SamplingParams(temperature=0, max_tokens=200, ignore_eos=True)
SHORT = SamplingParams(temperature=0, max_tokens=12, ignore_eos=True)
PATIENCE_S = 240  # a stream that hangs fails its test


@pytest.fixture(scope="module")
def alone(folder: Path) -> LLM:
    """An engine that answers one request at a time: the expected tokens of the streams."""
    return tiny_llm(folder)


def using(
    folder: Path, test: Callable[[AsyncEngine], Coroutine[Any, Any, None]], **settings: Any
) -> None:
    """Run a test with a new engine; assert that no request has left anything behind."""

    async def run() -> None:
        llm = tiny_llm(folder, **settings)
        async with AsyncEngine(llm.engine) as engine:
            await asyncio.wait_for(test(engine), PATIENCE_S)
            await settled(engine)
        assert_nothing_left(engine)

    asyncio.run(run())


async def settled(engine: AsyncEngine) -> None:
    """Wait until the engine has handled every abort in its inbox."""
    core = engine.engine.core
    for _ in range(1000):
        if engine._inbox.empty() and not core.has_work and not engine._outputs:
            return
        await asyncio.sleep(0.005)
    raise AssertionError("requests are still running though nobody listens")


def assert_nothing_left(engine: AsyncEngine) -> None:
    scheduler = engine.engine.core.scheduler
    assert not engine._thread.is_alive()
    assert not engine._outputs
    assert not engine._outputs._running
    scheduler.audit()
    assert not scheduler.has_requests
    assert scheduler.kv.is_idle()


async def collect(
    engine: AsyncEngine, prompt: Any, params: SamplingParams = SHORT, **more: Any
) -> list[RequestOutput]:
    return [output async for output in engine.generate(prompt, params, **more)]


async def last(
    engine: AsyncEngine, prompt: Any, params: SamplingParams = SHORT, **more: Any
) -> RequestOutput:
    return (await collect(engine, prompt, params, **more))[-1]


def prompts(count: int) -> list[list[int]]:
    return [[50 + (7 * n + k) % 200 for k in range(1 + (5 * n) % 40)] for n in range(count)]


# Streams


def test_many_streams_at_once_give_what_each_gives_alone(folder: Path, alone: LLM) -> None:
    async def test(engine: AsyncEngine) -> None:
        asked = prompts(60)
        outputs = await asyncio.gather(*(last(engine, prompt) for prompt in asked))
        for prompt, output in zip(asked, outputs, strict=True):
            (expected,) = alone.generate(prompt, SHORT)
            assert output.outputs[0].token_ids == expected.outputs[0].token_ids
            assert output.outputs[0].text == expected.outputs[0].text
            assert output.finished

    using(folder, test, max_num_seqs=16)


def test_every_kind_of_stream_delivers_the_same_text(folder: Path, alone: LLM) -> None:
    async def test(engine: AsyncEngine) -> None:
        def params(kind: str) -> SamplingParams:
            return SamplingParams(
                temperature=0, max_tokens=12, ignore_eos=True, logprobs=1, output_kind=kind
            )

        expected = alone.generate([5, 6], params("cumulative"))[0].outputs[0]
        cumulative = await collect(engine, [5, 6], params("cumulative"))
        lengths = [len(output.outputs[0].token_ids) for output in cumulative]
        assert lengths == [*range(1, 13)]  # earlier outputs have not grown
        assert [len(output.outputs[0].logprobs or ()) for output in cumulative] == lengths
        assert cumulative[-1].outputs[0].text == expected.text
        delta = await collect(engine, [5, 6], params("delta"))
        pieces = [output.outputs[0] for output in delta]
        assert [len(piece.token_ids) for piece in pieces] == [1] * 12
        assert [len(piece.logprobs or ()) for piece in pieces] == [1] * 12
        assert "".join(piece.text for piece in pieces) == expected.text
        assert [piece.finished for piece in pieces] == [False] * 11 + [True]
        (final,) = await collect(engine, [5, 6], params("final_only"))
        assert final.outputs[0].token_ids == expected.token_ids

    using(folder, test)


def test_several_continuations_stream_side_by_side(folder: Path, alone: LLM) -> None:
    async def test(engine: AsyncEngine) -> None:
        params = SamplingParams(n=3, seed=4, max_tokens=10, output_kind="delta")
        expected = alone.generate([5, 6], params)[0].outputs
        ids: list[list[int]] = [[], [], []]
        async for output in engine.generate([5, 6], params):
            for piece in output.outputs:
                ids[piece.index] += piece.token_ids
        assert ids == [completion.token_ids for completion in expected]

    using(folder, test)


# Ends


def test_abort_closes_the_stream_and_says_so(folder: Path) -> None:
    async def test(engine: AsyncEngine) -> None:
        outputs = []
        async for output in engine.generate([5, 6], LONG, request_id="mine"):
            outputs.append(output)
            if len(outputs) == 3:
                engine.abort("mine")
        assert outputs[-1].finished
        assert outputs[-1].outputs[0].finish_reason == "abort"
        assert 3 <= len(outputs[-1].outputs[0].token_ids) < 200
        assert [record.finish_reason for record in outputs[-1].records] == ["abort"]

    using(folder, test)


def test_abort_before_the_first_token_closes_the_stream(folder: Path) -> None:
    async def test(engine: AsyncEngine) -> None:
        task = asyncio.create_task(last(engine, [5] * 100, LONG, request_id="mine"))
        await asyncio.sleep(0)  # the task has asked
        engine.abort("mine")
        output = await task
        assert output.outputs[0].finish_reason == "abort"

    using(folder, test)


def test_aborting_an_unknown_request_does_nothing(folder: Path) -> None:
    async def test(engine: AsyncEngine) -> None:
        engine.abort("nobody")
        output = await last(engine, [5, 6], request_id="mine")
        engine.abort("mine")
        assert output.outputs[0].finish_reason == "length"
        again = await last(engine, [5, 6], request_id="mine")
        assert again.outputs[0].token_ids == output.outputs[0].token_ids

    using(folder, test)


def test_leaving_the_loop_aborts(folder: Path) -> None:
    async def test(engine: AsyncEngine) -> None:
        async for _ in engine.generate([5, 6], LONG):
            break
        await settled(engine)
        assert engine.engine.core.records.requests[-1].finish_reason == "abort"

    using(folder, test)


def test_closing_an_old_stream_does_not_abort_a_new_request_of_the_same_id(
    folder: Path,
) -> None:
    async def test(engine: AsyncEngine) -> None:
        old = engine.generate([5, 6], SHORT, request_id="mine")
        await anext(old)
        await until(lambda: not engine._outputs)  # it has ended, unread
        new = engine.generate([5, 6], LONG, request_id="mine")
        first = await anext(new)
        await old.aclose()  # type: ignore[attr-defined]
        outputs = [first] + [output async for output in new]
        assert outputs[-1].outputs[0].finish_reason == "length"
        assert len(outputs[-1].outputs[0].token_ids) == 200

    using(folder, test)


async def until(condition: Callable[[], bool]) -> None:
    while not condition():
        await asyncio.sleep(0.001)


def test_cancelling_a_task_aborts_its_request_and_no_other(folder: Path, alone: LLM) -> None:
    async def test(engine: AsyncEngine) -> None:
        doomed = asyncio.create_task(last(engine, [5, 6], LONG))
        other = asyncio.create_task(last(engine, [7, 8], SHORT))
        await asyncio.sleep(0.02)
        doomed.cancel()
        with pytest.raises(asyncio.CancelledError):
            await doomed
        expected = alone.generate([7, 8], SHORT)[0].outputs[0].token_ids
        assert (await other).outputs[0].token_ids == expected
        await settled(engine)

    using(folder, test)


def test_a_refused_request_raises_in_its_own_task(folder: Path, alone: LLM) -> None:
    async def test(engine: AsyncEngine) -> None:
        bad = [[], [300], [5] * 256, None, {"promt": "x"}]
        good = [asyncio.create_task(last(engine, [7, n])) for n in range(60, 65)]
        tasks = [asyncio.create_task(last(engine, prompt)) for prompt in bad]
        for outcome in await asyncio.gather(*tasks, return_exceptions=True):
            assert isinstance(outcome, RequestError)
        for n, task in enumerate(good):
            expected = alone.generate([7, 60 + n], SHORT)[0].outputs[0].token_ids
            assert (await task).outputs[0].token_ids == expected

    using(folder, test)


def test_a_refusal_of_the_scheduler_raises_in_its_own_task(tmp_path: Path) -> None:
    folder = tiny_folder(tmp_path / "tiny", model_type="mistral", sliding_window=128)

    async def test(engine: AsyncEngine) -> None:
        good = asyncio.create_task(last(engine, [5, 6]))
        params = SamplingParams(n=2, max_tokens=100)
        with pytest.raises(RequestError, match="KV blocks of 16 tokens, but the cache has 3"):
            await last(engine, [5] * 40, params)
        assert (await good).outputs[0].finish_reason == "length"

    using(folder, test, num_gpu_blocks_override=3)


def test_an_id_in_use_is_refused_and_its_request_continues(folder: Path) -> None:
    async def test(engine: AsyncEngine) -> None:
        owner = asyncio.create_task(last(engine, [5, 6], LONG, request_id="mine"))
        await asyncio.sleep(0)
        with pytest.raises(RequestError, match="a request with the id 'mine' is already running"):
            await last(engine, [5, 6], request_id="mine")
        assert (await owner).outputs[0].finish_reason == "length"

    using(folder, test)


# The engine's own end


def test_closing_ends_open_streams_with_a_clear_error(folder: Path) -> None:
    async def test() -> None:
        engine = AsyncEngine(tiny_llm(folder).engine)
        tasks = [asyncio.create_task(last(engine, [5, n], LONG)) for n in range(60, 68)]
        await asyncio.sleep(0.02)
        engine.close()
        for outcome in await asyncio.gather(*tasks, return_exceptions=True):
            assert isinstance(outcome, EngineError)
            assert str(outcome) == "the engine has stopped (the engine was closed)"
        assert_nothing_left(engine)
        assert "twostroke-engine" not in {thread.name for thread in threading.enumerate()}

    asyncio.run(asyncio.wait_for(test(), PATIENCE_S))


def test_a_closed_engine_refuses_at_once_and_closes_again(folder: Path) -> None:
    async def test() -> None:
        engine = AsyncEngine(tiny_llm(folder).engine)
        engine.close()
        with pytest.raises(EngineError, match=r"has stopped \(the engine was closed\); start a ne"):
            await last(engine, [5, 6])
        engine.abort("nobody")
        engine.close()
        assert_nothing_left(engine)

    asyncio.run(asyncio.wait_for(test(), PATIENCE_S))


@pytest.mark.parametrize("warm", [False, True], ids=["new", "warm"])
@pytest.mark.parametrize("before", [False, True], ids=["after apply", "before apply"])
def test_a_request_that_breaks_its_steps_ends_alone_and_the_engine_goes_on(
    folder: Path, alone: LLM, monkeypatch: pytest.MonkeyPatch, before: bool, warm: bool
) -> None:
    """It breaks before or after the executor has applied the plan, with rows in use or none."""

    async def test(engine: AsyncEngine) -> None:
        executor = engine.engine.core._executor
        forward, owner = executor.forward, {}

        def poisoned(plan: Any) -> Any:
            owner.update({new.row: new.tokens[:2] for new in plan.new})
            rows = [chunk.row for chunk in plan.prefill] + [slot.row for slot in plan.decode]
            bad = any(owner.get(row) == (5, 61) for row in rows)
            if bad and before:
                raise RuntimeError("out of memory")
            handle = forward(plan)
            if bad:
                raise RuntimeError("out of memory")
            return handle

        if warm:
            await asyncio.gather(*(last(engine, prompt) for prompt in prompts(8)))
        monkeypatch.setattr(executor, "forward", poisoned)
        asked = [[5, n] for n in range(58, 65)]
        running = await asyncio.gather(*(last(engine, prompt, LONG) for prompt in asked))
        for prompt, output in zip(asked, running, strict=True):
            if prompt == [5, 61]:
                assert output.outputs[0].finish_reason == "error"
                assert output.error == (
                    "the engine failed while running a step (RuntimeError: out of memory)"
                )
            else:
                expected = alone.generate(prompt, LONG)[0].outputs[0].token_ids
                assert output.error == ""
                assert output.outputs[0].token_ids == expected

    using(folder, test)


def test_a_step_that_fails_once_costs_no_request_a_token(
    folder: Path, alone: LLM, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def test(engine: AsyncEngine) -> None:
        executor = engine.engine.core._executor
        forward, failed = executor.forward, False

        def fail_once(plan: Any) -> Any:
            nonlocal failed
            if len(plan.decode) == 3 and not failed:
                failed = True
                raise RuntimeError("out of memory")
            return forward(plan)

        monkeypatch.setattr(executor, "forward", fail_once)
        asked = [[5, n] for n in range(60, 63)]
        outputs = await asyncio.gather(*(last(engine, prompt, LONG) for prompt in asked))
        assert failed
        for prompt, output in zip(asked, outputs, strict=True):
            expected = alone.generate(prompt, LONG)[0].outputs[0].token_ids
            assert (output.error, output.outputs[0].token_ids) == ("", expected)

    using(folder, test)


def test_an_engine_that_cannot_continue_ends_every_stream(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def test() -> None:
        engine = AsyncEngine(tiny_llm(folder).engine)

        def fail(*_: object) -> Any:
            raise AssertionError("a bug of ours")

        tasks = [asyncio.create_task(last(engine, [5, n], LONG)) for n in range(60, 63)]
        await asyncio.sleep(0.02)
        monkeypatch.setattr(engine.engine.core.scheduler, "plan", fail)
        for outcome in await asyncio.gather(*tasks, return_exceptions=True):
            assert isinstance(outcome, EngineError)
            assert "the engine has stopped (a bug of ours)" in str(outcome)
        with pytest.raises(EngineError, match="a bug of ours"):
            await last(engine, [5, 6])
        engine.close()
        assert_nothing_left(engine)

    asyncio.run(asyncio.wait_for(test(), PATIENCE_S))


# All of it at once


def test_200_random_ends_leave_nothing_behind(folder: Path, alone: LLM) -> None:
    choose = random.Random(5)

    async def test(engine: AsyncEngine) -> None:
        async def later(n: int) -> str:
            await asyncio.sleep(choose.random() * 0.5)
            temperature = choose.choice([0, 1])
            return await end_at_random(engine, choose, n, 40, 0.5, temperature=temperature)

        ends = await asyncio.gather(*(later(n) for n in range(200)))
        assert set(ends) == ENDS
        await settled(engine)
        expected = alone.generate([50, 51], SHORT)[0].outputs[0].token_ids
        assert (await last(engine, [50, 51])).outputs[0].token_ids == expected

    using(folder, test, num_gpu_blocks_override=24, max_num_seqs=8)
