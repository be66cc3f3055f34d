"""Faults: the affected client gets an error, other clients are not harmed, the server recovers.

Servers and engines are separate processes (`test_load.py`).
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest

from tests.instant import (
    Done,
    InstantEngine,
    InstantExecutor,
    build_instant,
    expected_tokens,
)
from tests.server.test_load import (
    MIB,
    PATIENCE_S,
    REPOSITORY,
    Answer,
    Asking,
    Server,
    ask,
    assert_exact,
    get,
    prompt_of,
    run,
    served,
    stream_of,
)
from tests.tiny import same_rounding, tiny_llm
from twostroke import SamplingParams
from twostroke.config import EngineConfig
from twostroke.engine.remote import RemoteEngine
from twostroke.engine.spawn import DEFAULT_BUILDER
from twostroke.errors import EngineError
from twostroke.plan import StepPlan
from twostroke.serve.error_responses import ApiError
from twostroke.serve.generation.service import UnreadBytes

GATE = "TWOSTROKE_TEST_GATE"
BAD_PROMPT, BAD_LATER = 240, 241  # first tokens of prompts on which the executor raises
BAD_AFTER = 5  # tokens, for the second
needs_dev_full = pytest.mark.skipif(not Path("/dev/full").exists(), reason="needs /dev/full")
LIMITS: dict[str, Any] = {"max_num_seqs": 16, "max_num_batched_tokens": 512, "max_model_len": 4096}


# ── engines that break ──────────────────────────────────────────────────────────────────────


def build_behind_a_gate(config: EngineConfig) -> InstantEngine:
    """The first engine starts at once, the next engines when the gate's folder has a file
    "open"."""
    gate = Path(os.environ[GATE])
    try:
        (gate / "first").touch(exist_ok=False)
    except FileExistsError:
        while not (gate / "open").exists():
            time.sleep(0.01)
    return build_instant(config)


class Raising(InstantExecutor):
    def forward(self, plan: StepPlan) -> StepPlan:
        super().forward(plan)
        # A request that waits again has what it wrote computed as a prompt is.
        reached = [(chunk.row, chunk.start + chunk.size) for chunk in plan.prefill]
        reached += [(slot.row, slot.position + 1) for slot in plan.decode]
        for row, end in reached:
            new = self._rows[row].new
            if new.tokens[0] == BAD_PROMPT:
                raise RuntimeError("/opt/secret/kernel.py broke on a prompt")
            if new.tokens[0] == BAD_LATER and end >= new.num_prompt + BAD_AFTER:
                raise RuntimeError("/opt/secret/kernel.py broke on a token")
        return plan


class Numberless(InstantExecutor):
    """An engine with NaN logits from the third token on, for prompts that begin with
    `BAD_PROMPT`."""

    def sample(self, plan: StepPlan, masks: object = None) -> Done:
        done = super().sample(plan, masks)
        places = [(slot.row, slot.position + 1) for slot in plan.decode]
        places += [(c.row, c.start + c.size) for c in plan.prefill if c.last]
        for n, (row, at) in enumerate(places):
            new = self._rows[row].new
            if new.tokens[0] == BAD_PROMPT and at >= new.num_prompt + 2:
                done.result.tokens[n] = -1
        return done


def build_numberless(config: EngineConfig) -> InstantEngine:
    engine = build_instant(config)
    plain = engine.core._executor
    assert isinstance(plain, InstantExecutor)
    engine.core._executor = Numberless(plain._written, plain._delay_s)
    return engine


def build_raising(config: EngineConfig) -> InstantEngine:
    engine = build_instant(config)
    plain = engine.core._executor
    assert isinstance(plain, InstantExecutor)
    engine.core._executor = Raising(plain._written, plain._delay_s)
    return engine


# ── the engine's process is killed ──────────────────────────────────────────────────────────


def test_a_killed_engine_costs_only_the_streams_that_had_begun(
    folder: Path, written: list[int], tmp_path: Path
) -> None:
    builder = "tests.server.engines.test_faults:build_behind_a_gate"
    environment = {GATE: str(tmp_path)}
    limits: dict[str, Any] = {**LIMITS, "max_num_seqs": 5}
    with served(folder, builder, 0.01, environment=environment, **limits) as server:

        async def kill_it() -> None:
            begun = [Asking(server.port, stream_of([60 + n], 4000)) for n in range(4)]
            for asking in begun:
                await asking.send()
                await asking.event()
            # Of an answer in one piece nothing has been told, however much of it is written.
            plain = Asking(server.port, stream_of([99], 150, stream=False))
            await plain.send()
            await until(server, running=5)
            waiting = [Asking(server.port, stream_of(prompt_of(n), 20)) for n in range(8)]
            for asking in waiting:
                await asking.send()
            await until(server, open_streams=13)
            os.kill(server.look()["pid"], signal.SIGKILL)
            for n, asking in enumerate(begun):
                answer = await asking.finish()
                assert (answer.status, answer.done) == (200, True)
                assert answer.error is not None
                assert answer.error["type"] == "server_error"
                told = len(answer.ids)
                assert 1 <= told < 4000
                assert answer.ids == expected_tokens([60 + n], told, written)
            # No engine, until the gate is opened.
            assert get(server.port, "/health") == 503
            refused = await ask(server.port, stream_of([70], 5))
            assert refused.status == 503
            assert get(server.port, "/v1/models") == 200
            (tmp_path / "open").touch()
            for n, asking in enumerate(waiting):
                assert_exact(await asking.finish(), prompt_of(n), 20, written)
            choice = json.loads((await plain.finish()).content)["choices"][0]
            assert choice["token_ids"] == expected_tokens([99], 150, written)
            assert get(server.port, "/health") == 200
            assert_exact(await ask(server.port, stream_of([70], 50)), [70], 50, written)

        run(kill_it())
        server.assert_nothing_left()


@pytest.mark.full
def test_hundreds_wait_and_nobody_reads_when_the_engine_is_killed(
    folder: Path, written: list[int]
) -> None:
    limits: dict[str, Any] = {**LIMITS, "max_num_seqs": 32}
    settings = {"max_unread_bytes": 64 * 1024}
    with served(folder, step_s=0.002, settings=settings, **limits) as server:

        async def kill_it() -> None:
            unread = [
                Asking(server.port, stream_of([60, n], 4000, n=4, logprobs=5), receive_bytes=4096)
                for n in range(8)
            ]
            for asking in unread:
                await asking.send()
                await asking.event()
            with server.engine_held():
                waiting = [Asking(server.port, stream_of(prompt_of(n), 5)) for n in range(300)]
                for asking in waiting:
                    await asking.send()
                await asyncio.to_thread(server.until, lambda seen: seen["open_streams"] >= 300)
                os.kill(server.look()["pid"], signal.SIGKILL)
            for n, asking in enumerate(waiting):
                assert_exact(await asking.finish(), prompt_of(n), 5, written)
            for asking in unread:
                await asking.finish()  # with an error, unless it was complete before the kill

        run(kill_it())
        server.assert_nothing_left()


def test_an_engine_that_is_stopped_turns_health_and_is_replaced(
    folder: Path, written: list[int]
) -> None:
    settings = {"engine_hang_timeout_s": 2}
    with served(folder, step_s=0.01, settings=settings, **LIMITS) as server:

        async def stop_it() -> None:
            begun = Asking(server.port, stream_of([60], 4000))
            await begun.send()
            await begun.event()
            pid = server.look()["pid"]
            os.kill(pid, signal.SIGSTOP)
            answer = await begun.finish()
            assert answer.error is not None
            assert answer.error["type"] == "server_error"
            end = time.monotonic() + PATIENCE_S
            while get(server.port, "/health") != 200:
                assert time.monotonic() < end
                await asyncio.sleep(0.02)
            assert server.look()["pid"] != pid
            assert_exact(await ask(server.port, stream_of([70], 50)), [70], 50, written)

        run(stop_it())
        server.assert_nothing_left()


def test_an_engine_whose_start_takes_too_long_is_killed_and_named(
    folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(GATE, str(tmp_path))
    (tmp_path / "first").touch()  # and the gate is never opened
    config = EngineConfig(model=str(folder), start_timeout_s=2, **LIMITS)
    builder = "tests.server.engines.test_faults:build_behind_a_gate"
    with pytest.raises(EngineError, match=r"start took more than 2 s .*--engine-start-timeout-s"):
        asyncio.run(RemoteEngine.start(config, builder))


@pytest.mark.skipif(sys.platform != "linux", reason="looks into /proc")
def test_an_engine_that_is_stopped_while_it_starts_is_replaced(
    folder: Path, written: list[int], tmp_path: Path
) -> None:
    builder = "tests.server.engines.test_faults:build_behind_a_gate"
    settings, environment = {"engine_hang_timeout_s": 2}, {GATE: str(tmp_path)}
    with served(folder, builder, 0.0, settings, environment, **LIMITS) as server:
        first = server.look()["pid"]
        os.kill(first, signal.SIGKILL)
        second = new_engine(server, {first})
        os.kill(second, signal.SIGSTOP)
        third = new_engine(server, {first, second})
        assert not Path(f"/proc/{second}").exists()
        (tmp_path / "open").touch()
        server.until(lambda seen: seen["pid"] == third)
        assert_exact(run(ask(server.port, stream_of([70], 50))), [70], 50, written)
        server.assert_nothing_left()


def new_engine(server: Server, known: set[int]) -> int:
    """Wait for a new engine process."""
    end = time.monotonic() + PATIENCE_S
    while True:
        for task in Path(f"/proc/{server.process.pid}/task").iterdir():
            with contextlib.suppress(OSError):  # a thread or a process has ended meanwhile
                for pid in map(int, (task / "children").read_text().split()):
                    command = Path(f"/proc/{pid}/cmdline").read_bytes()
                    if b"twostroke.engine.process" in command and pid not in known:
                        return pid
        assert time.monotonic() < end
        time.sleep(0.01)


def test_an_engine_that_cannot_live_ends_the_server_with_the_reason(
    folder: Path, tmp_path: Path
) -> None:
    """Every client gets an answer, and the server's exit status shows the failure."""
    settings = {"engine_restart_limit": 2}
    said = tmp_path / "stderr"
    with (
        open(said, "w") as output,
        served(folder, step_s=0.2, settings=settings, output=output.fileno(), **LIMITS) as server,
    ):

        async def kill_it() -> None:
            asking = Asking(server.port, stream_of([60], 4000, stream=False))
            await asking.send()
            await until(server, running=1)
            os.kill(pid := server.look()["pid"], signal.SIGKILL)
            await asyncio.to_thread(server.until, lambda seen: seen["pid"] not in (0, pid))
            os.kill(server.look()["pid"], signal.SIGKILL)
            assert (await asking.finish()).status == 503

        run(kill_it())
        assert server.process.wait(PATIENCE_S) == 1
    assert "the engine has stopped (it died 2 times in a row" in said.read_text()


# ── nobody reads ────────────────────────────────────────────────────────────────────────────


def test_a_stream_that_is_not_read_is_ended_in_bounded_memory(
    folder: Path, written: list[int]
) -> None:
    settings = {"max_unread_bytes": MIB}
    with served(folder, settings=settings, max_num_seqs=64, max_model_len=32768) as server:

        async def leave_it() -> None:
            await ask(server.port, stream_of([60], 100, n=8, logprobs=5))
            before = server.memory()
            body = stream_of([61], 30_000, n=32, logprobs=20)
            unread = [Asking(server.port, body, receive_bytes=4096) for _ in range(1)]
            for asking in unread:
                await asking.send()
                await asking.event()  # and no more
            # The engine is told to stop though the connection is still there.
            await until(server, running=0, states=0, unread=0)
            assert server.memory() - before < 64 * MIB
            assert_exact(await ask(server.port, stream_of([70], 50)), [70], 50, written)
            answer = await unread[0].finish()
            assert answer.done
            assert answer.error is not None
            assert answer.error["code"] == "slow_reader"
            assert "--max-unread-bytes" in answer.error["message"]
            assert len(answer.ids) < 32 * 30_000

        run(leave_it())
        server.assert_nothing_left()


@pytest.mark.full
def test_many_streams_that_are_not_read_end_and_those_that_read_go_on(
    folder: Path, written: list[int]
) -> None:
    max_bytes = 128 * 1024
    settings = {"max_unread_bytes": max_bytes}
    with served(folder, settings=settings, max_num_seqs=64, max_model_len=32768) as server:

        async def leave_them() -> None:
            await ask(server.port, stream_of([60], 100, n=8, logprobs=5))
            before = server.memory()
            reading = asyncio.create_task(ask(server.port, stream_of([60], 3000)))
            bodies = [stream_of([61, n], 30_000, n=4, logprobs=20) for n in range(12)]
            unread = [Asking(server.port, body, receive_bytes=4096) for body in bodies]
            for asking in unread:
                await asking.send()
                await asking.event()
            most = 0
            while (seen := server.look())["running"]:
                most = max(most, seen["unread"])
                await asyncio.sleep(0.005)
            assert most <= 9 * max_bytes
            assert server.memory() - before < 64 * MIB
            assert_exact(await reading, [60], 3000, written)
            for asking in unread:
                answer = await asking.finish()
                assert answer.error is not None
                assert answer.error["code"] == "slow_reader"

        run(leave_them())
        server.assert_nothing_left()


def test_of_many_whose_streams_wait_the_one_with_most_is_ended() -> None:
    unread = UnreadBytes(100)
    ended: list[int] = []

    class Reader:
        def __init__(self, n: int) -> None:
            self.n = n

        def cancel(self, error: ApiError) -> None:
            ended.append(self.n)
            unread.remove(self)  # type: ignore[arg-type]

    readers: list[Any] = [Reader(n) for n in range(20)]
    for n in range(9):
        unread.add(readers[n], 85 + n % 2)
    assert unread.num_bytes == 9 * 85 + 4
    unread.add(readers[9], 50)
    assert ended == [1]  # one of those with 86, of which there are four
    unread.add(readers[0], 20)
    assert ended == [1, 0]  # its own bound
    unread.add(readers[10], 1_000)  # one output may have any size, if there is room for it
    assert ended == [1, 0, 10]
    assert unread.num_bytes == 7 * 85 + 3 + 50
    for reader in readers:
        unread.remove(reader)
    assert unread.num_bytes == 0


def test_a_connection_that_takes_nothing_is_closed(folder: Path) -> None:
    settings = {"max_unread_bytes": 64 * 1024, "write_timeout_s": 0.5}
    with served(folder, settings=settings, max_num_seqs=64, max_model_len=32768) as server:

        async def leave_it() -> None:
            asking = Asking(server.port, stream_of([61], 30_000, n=8), receive_bytes=4096)
            await asking.send()
            await asking.event()
            await until(server, connections=0, open_streams=0)
            asking.leave(reset=True)

        run(leave_it())
        server.assert_nothing_left()


# ── the model computes no numbers ───────────────────────────────────────────────────────────


def test_logits_that_are_no_numbers_end_their_request_with_the_reason(
    folder: Path, written: list[int]
) -> None:
    builder = "tests.server.engines.test_faults:build_numberless"
    with served(folder, builder, **LIMITS) as server:

        async def beside_another() -> None:
            other = asyncio.create_task(ask(server.port, stream_of([60], 200)))
            whole = await ask(server.port, stream_of([BAD_PROMPT], 50, stream=False, logprobs=2))
            assert whole.status == 500
            error = json.loads(whole.content)["error"]
            assert error["code"] == "broken_logits"
            assert "NaN" in error["message"]
            streamed = await ask(server.port, stream_of([BAD_PROMPT], 50))
            assert streamed.ids == expected_tokens([BAD_PROMPT], 2, written)
            assert streamed.error == error
            assert_exact(await other, [60], 200, written)

        run(beside_another())
        server.assert_nothing_left()


async def until(server: Server, **values: int) -> None:
    await asyncio.to_thread(server.until, lambda seen: values.items() <= seen.items())


# ── memory runs out ─────────────────────────────────────────────────────────────────────────


def test_out_of_kv_every_request_finishes_with_its_tokens(folder: Path) -> None:
    """Together the requests need seven times the cache, so they are preempted and resumed. Their
    tokens equal those of each request alone in a large cache, with the real model."""
    many, count, blocks = 10, 240, 24  # requests that grow to 16 blocks each
    prompts = [prompt_of(n) for n in range(many)]
    params = SamplingParams(temperature=0, max_tokens=count, ignore_eos=True)
    alone = [tuple(one.outputs[0].token_ids) for one in tiny_llm(folder).generate(prompts, params)]
    limits: dict[str, Any] = {"max_num_seqs": many, "num_gpu_blocks_override": blocks}
    with served(folder, DEFAULT_BUILDER, **limits, **same_rounding()) as server:

        async def all_of_them() -> list[Answer]:
            with server.engine_held():
                asked = [Asking(server.port, stream_of(prompt, count)) for prompt in prompts]
                for asking in asked:
                    await asking.send()
                await until(server, open_streams=many)
            return await asyncio.gather(*(asking.finish() for asking in asked))

        answers = run(all_of_them())
        assert [(one.status, one.error, one.done) for one in answers] == [(200, None, True)] * many
        assert [tuple(one.ids) for one in answers] == alone
        assert server.assert_nothing_left()["preempted"] >= 1


def test_a_request_that_can_never_fit_is_told_the_numbers(folder: Path, written: list[int]) -> None:
    with served(folder, num_gpu_blocks_override=8, **LIMITS) as server:

        async def too_much() -> None:
            other = asyncio.create_task(ask(server.port, stream_of([60], 100)))
            for stream in (True, False):
                answer = await ask(server.port, stream_of([61] * 50, 200, stream=stream))
                assert answer.status == 400
                message = json.loads(answer.content)["error"]["message"]
                for number in ("50 prompt tokens", "200 output tokens", "16 KV blocks", "has 8"):
                    assert number in message
            longer = await ask(server.port, stream_of([61] * 5000, 5))
            assert longer.status == 400
            assert "5000" in (text := longer.content.decode())
            assert "4096" in text
            assert_exact(await other, [60], 100, written)

        run(too_much())
        server.assert_nothing_left()


# ── a request breaks the model's code ───────────────────────────────────────────────────────


def test_a_request_that_raises_in_the_engine_harms_only_itself(
    folder: Path, written: list[int]
) -> None:
    builder = "tests.server.engines.test_faults:build_raising"
    with served(folder, builder, 0.002, **LIMITS) as server:

        async def beside_others() -> None:
            pid = server.look()["pid"]
            with server.engine_held():
                good = [Asking(server.port, stream_of(prompt_of(n), 60)) for n in range(12)]
                bad = [
                    Asking(server.port, stream_of([BAD_PROMPT, 60], 60)),
                    Asking(server.port, stream_of([BAD_PROMPT, 61], 60, stream=False)),
                    Asking(server.port, stream_of([BAD_LATER, 60], 60)),
                ]
                for asking in [*bad, *good]:
                    await asking.send()
                await until(server, open_streams=15)
            for n, asking in enumerate(good):
                assert_exact(await asking.finish(), prompt_of(n), 60, written)
            at_once, whole, later = [await asking.finish() for asking in bad]
            assert (at_once.status, whole.status, later.status) == (503, 503, 200)
            assert later.error is not None
            assert later.done
            assert later.ids == expected_tokens([BAD_LATER, 60], len(later.ids), written)
            assert len(later.ids) == BAD_AFTER
            for answer in (at_once.content, whole.content, json.dumps(later.error).encode()):
                assert b"secret" not in answer
            assert server.look()["pid"] == pid  # nobody had to be restarted
            assert_exact(await ask(server.port, stream_of([60], 50)), [60], 50, written)

        run(beside_others())
        server.assert_nothing_left()


# ── no disk ─────────────────────────────────────────────────────────────────────────────────


@needs_dev_full
def test_a_full_disk_for_logs_stops_no_answer(folder: Path, written: list[int]) -> None:
    builder = "tests.server.engines.test_faults:build_raising"
    with open("/dev/full", "w") as full:
        settings = {"access_log": True, "uvicorn_log_level": "debug"}
        with served(folder, builder, 0.0, settings, output=full.fileno(), **LIMITS) as server:
            for n in range(3):
                answer = run(ask(server.port, stream_of(prompt_of(n), 30)))
                assert_exact(answer, prompt_of(n), 30, written)
                assert run(ask(server.port, stream_of([BAD_PROMPT, n], 5))).status == 503  # logged
            os.kill(pid := server.look()["pid"], signal.SIGKILL)
            server.until(
                lambda seen: seen["pid"] not in (0, pid) and get(server.port, "/health") == 200
            )
            assert_exact(run(ask(server.port, stream_of([60], 30))), [60], 30, written)
            server.assert_nothing_left()


@needs_dev_full
def test_an_engine_that_cannot_start_says_why_on_a_full_disk(folder: Path, tmp_path: Path) -> None:
    said = tmp_path / "said"
    script = (
        "import asyncio, pathlib, sys\n"
        "from twostroke.config import EngineConfig\n"
        "from twostroke.engine.remote import RemoteEngine\n"
        "try:\n"
        "    asyncio.run(RemoteEngine.start(EngineConfig(model=sys.argv[1]), 'no.such:builder'))\n"
        "except Exception as error:\n"
        "    pathlib.Path(sys.argv[2]).write_text(str(error))\n"
    )
    command = [sys.executable, "-c", script, str(folder), str(said)]
    with open("/dev/full", "w") as full:
        subprocess.run(command, stdout=full, stderr=full, cwd=REPOSITORY, check=True)
    assert "No module named 'no'" in said.read_text()


@needs_dev_full
def test_the_command_itself_serves_and_ends_well_on_a_full_disk(folder: Path) -> None:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    command = [sys.executable, "-m", "twostroke", "serve", str(folder), "--port", str(port)]
    with open("/dev/full", "w") as full:
        more = ["--enable-log-requests", "--num-gpu-blocks-override", "64"]
        process = subprocess.Popen([*command, *more], stdout=full, stderr=full, cwd=REPOSITORY)
    try:
        end = time.monotonic() + PATIENCE_S
        while True:
            assert process.poll() is None, f"it ended with {process.returncode}"
            assert time.monotonic() < end
            try:
                assert get(port, "/health") == 200
                break
            except (ConnectionError, IndexError):
                time.sleep(0.05)
        answer = run(ask(port, stream_of([60], 20)))
        assert (answer.status, len(answer.ids), answer.done) == (200, 20, True)
        process.send_signal(signal.SIGTERM)
        assert process.wait(PATIENCE_S) == 0
    finally:
        process.kill()
        process.wait()


# ── the end ─────────────────────────────────────────────────────────────────────────────────


def test_sigterm_under_load_finishes_what_runs_and_takes_nothing_new(
    folder: Path, written: list[int]
) -> None:
    limits: dict[str, Any] = {**LIMITS, "max_num_seqs": 32}
    with served(folder, step_s=0.002, settings={"drain_s": PATIENCE_S}, **limits) as server:

        async def stop_it() -> None:
            asked = [Asking(server.port, stream_of(prompt_of(n), 80)) for n in range(64)]
            with server.engine_held():  # some of them will run, and the others still wait
                for asking in asked:
                    await asking.send()
                await until(server, open_streams=64)
            for asking in asked[:32]:
                await asking.event()
            with server.engine_held():
                server.process.send_signal(signal.SIGTERM)
                while get(server.port, "/health") != 503:
                    await asyncio.sleep(0.01)
                refused = await ask(server.port, stream_of([60], 5))
                assert refused.status == 503
                assert b"shutting down" in refused.content
            for n, asking in enumerate(asked):
                assert_exact(await asking.finish(), prompt_of(n), 80, written)

        run(stop_it())
        assert server.process.wait(PATIENCE_S) == 0
