"""The doctor's exam: faults that are known because they were injected, and healthy controls.

Each case is a server of its own with its flags, its load and perhaps a fault. The doctor is run as
anybody runs it and sees nothing but the server's address. Several cases run at one time, each
pinned to processors of its own.

    python -m twostroke.measure.doctor.exam NAME [MODEL]      one case; its verdict, as JSON
"""

from __future__ import annotations

import asyncio
import json
import os
import secrets
import signal
import socket
import subprocess
import sys
import tempfile
from collections import Counter
from collections.abc import AsyncIterator, Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import AsyncExitStack, asynccontextmanager, suppress
from pathlib import Path
from queue import SimpleQueue
from time import perf_counter
from typing import Any, NamedTuple

from twostroke.errors import ConfigError, nearest
from twostroke.measure.doctor.exam_cases import CASES, Case, Load
from twostroke.measure.doctor.slow_link import slow_link
from twostroke.measure.doctor.verdict import HEALTHY, NOT_ENOUGH
from twostroke.measure.load.http_client import Connections, Endpoint, ServerError
from twostroke.measure.load.result import environment
from twostroke.measure.load.sample_client import CHAT, COMPLETIONS, OpenAIClient
from twostroke.measure.load.workload import Planned, Prompts

KILL_S = 4.0  # after the doctor has begun, where the engine is to die
CASE_S = 120.0  # then a case has failed
FAILED = "failed"


def find_cases(names: str | None) -> list[Case]:
    if names is None or names == "list":
        return list(CASES.values())
    for name in names.split(","):
        if name not in CASES:
            raise ConfigError(
                f"there is no case {name!r}{nearest(name, CASES)}; `--cases list` shows them"
            )
    return [CASES[name] for name in names.split(",")]


# ── all of it ───────────────────────────────────────────────────────────────────────────────────


class Answer(NamedTuple):
    case: Case
    said: str  # the first cause, or healthy, not_enough_evidence, failed
    verdict: dict[str, Any]
    seconds: float

    @property
    def right(self) -> bool:
        return self.said == (self.case.expected or HEALTHY)


def run_exam(
    cases: Sequence[Case],
    model: str | None,
    repeats: int,
    jobs: int,
    cpus_per_job: int,
    tell: Callable[[int, int, str, str], None],
) -> list[Answer]:
    """Every case `repeats` times, `jobs` at one time."""
    allowed = sorted(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else []
    if jobs > 1 and jobs * cpus_per_job > len(allowed):
        raise ConfigError(
            f"--jobs {jobs} with {cpus_per_job} processors each need {jobs * cpus_per_job}, and "
            f"there are {len(allowed)}; lower --jobs or --cpus-per-job"
        )
    free: SimpleQueue[list[int]] = SimpleQueue()
    for job in range(jobs):
        free.put(allowed[job * cpus_per_job : (job + 1) * cpus_per_job])
    planned = [case for _ in range(repeats) for case in cases]
    done: list[Answer] = []

    def run(case: Case) -> None:
        cpus = free.get()
        try:
            answer = _run_pinned(case, model, cpus)
        finally:
            free.put(cpus)
        done.append(answer)
        mark = "right" if answer.right else "WRONG"
        tell(len(done), len(planned), case.name, f"{answer.said}, {mark}, {answer.seconds:.0f} s")

    with ThreadPoolExecutor(jobs) as pool:
        list(pool.map(run, planned))
    return done


def _run_pinned(case: Case, model: str | None, cpus: list[int]) -> Answer:
    command = [sys.executable, "-m", __spec__.name, case.name, *([model] if model else [])]
    started = perf_counter()
    process = subprocess.Popen(
        command,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        start_new_session=True,
        preexec_fn=lambda: os.sched_setaffinity(0, cpus) if cpus else None,
    )
    try:
        out, err = process.communicate(timeout=CASE_S)
    except subprocess.TimeoutExpired:
        os.killpg(process.pid, signal.SIGKILL)
        out, err = process.communicate()
    try:
        verdict = json.loads(out)
    except ValueError:
        return Answer(case, FAILED, {"error": err.decode()[-2000:]}, perf_counter() - started)
    return Answer(case, _said(verdict), verdict, perf_counter() - started)


def _said(verdict: dict[str, Any]) -> str:
    if verdict["verdict"] in (HEALTHY, NOT_ENOUGH) or not verdict["causes"]:
        return str(verdict["verdict"])
    return str(verdict["causes"][0]["cause"])


def result_json(answers: Sequence[Answer]) -> dict[str, Any]:
    matrix: dict[str, Counter[str]] = {}
    cases: dict[str, list[Answer]] = {}
    for one in answers:
        matrix.setdefault(one.case.expected or HEALTHY, Counter())[one.said] += 1
        cases.setdefault(one.case.name, []).append(one)
    controls = [one for one in answers if not one.case.expected]
    false_alarms = sum(one.said not in (HEALTHY, NOT_ENOUGH, FAILED) for one in controls)
    right = sum(one.right for one in answers)
    accuracy = right / len(answers) if answers else 0.0
    return {
        "schema": 1,
        "runs": len(answers),
        "right": right,
        "accuracy": accuracy,
        "controls": len(controls),
        "false_alarms": false_alarms,
        "passed": accuracy >= 0.9 and not false_alarms,
        "said": sorted({one.said for one in answers} | set(matrix)),
        "matrix": {name: dict(counts) for name, counts in sorted(matrix.items())},
        "cases": [
            {
                "name": name,
                "expected": runs[0].case.expected or HEALTHY,
                "what": runs[0].case.what,
                "runs": len(runs),
                "right": sum(one.right for one in runs),
                "wrong": dict(Counter(one.said for one in runs if not one.right)),
            }
            for name, runs in cases.items()
        ],
        "answers": [
            {"case": one.case.name, "said": one.said, "case_s": one.seconds} | one.verdict
            for one in answers
        ],
        "environment": environment(),
    }


# ── one case ────────────────────────────────────────────────────────────────────────────────────


async def run_case(case: Case, model: str | None, watch_s: float | None = None) -> dict[str, Any]:
    """The verdict of a doctor who sees nothing but the address."""
    async with AsyncExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory()))
        port = _free_port()
        server = await stack.enter_async_context(_server(case, model, port, folder))
        seen_port = port
        if case.link:
            seen_port = await stack.enter_async_context(slow_link(port, *case.link))
        url = f"http://127.0.0.1:{seen_port}"
        if not case.cold:
            await _ready(f"http://127.0.0.1:{port}", server)
        load = asyncio.create_task(_load(case.loads, url))
        try:
            await asyncio.sleep(0.0 if case.cold else case.warm_s)
            if case.kills_engine:
                asyncio.get_running_loop().call_later(KILL_S, _kill_engine, server.pid)
            return await _doctor(url, watch_s or case.watch_s)
        finally:
            load.cancel()
            with suppress(asyncio.CancelledError):
                await load


async def _doctor(url: str, watch_s: float) -> dict[str, Any]:
    words = ("doctor", url, "--for", f"{watch_s:g}", "--wait", "60", "--json")
    process = await asyncio.create_subprocess_exec(
        sys.executable,
        "-m",
        "twostroke",
        *words,
        stdout=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.PIPE,
    )
    out, err = await process.communicate()
    try:
        found: dict[str, Any] = json.loads(out)
    except ValueError:
        raise ServerError(f"the doctor failed: {err.decode()[-1000:]}") from None
    return found


@asynccontextmanager
async def _server(
    case: Case, model: str | None, port: int, folder: Path
) -> AsyncIterator[asyncio.subprocess.Process]:
    words = ["serve", *([model] if model else []), "--port", str(port), *case.serve]
    if case.template:
        path = folder / "template.jinja"
        path.write_text(case.template, encoding="utf-8")
        words += ["--chat-template", str(path)]
    start = (
        ["twostroke.measure.doctor.faulty_server", *case.faults] if case.faults else ["twostroke"]
    )
    with (folder / "log").open("wb") as log:
        process = await asyncio.create_subprocess_exec(
            sys.executable, "-m", *start, *words, stdout=log, stderr=log
        )
    try:
        yield process
    except ServerError as error:
        said = (folder / "log").read_text(errors="replace").strip()[-500:]
        raise ServerError(f"{error}\n{said}") from None
    finally:
        with suppress(ProcessLookupError):
            process.terminate()
            process.send_signal(signal.SIGTERM)  # the second one: do not wait for answers
        try:
            await asyncio.wait_for(process.wait(), 10.0)
        except TimeoutError:
            with suppress(ProcessLookupError):
                process.kill()
            await process.wait()


async def _ready(url: str, server: asyncio.subprocess.Process) -> None:
    connections = Connections(Endpoint(url))
    end = perf_counter() + 60.0
    try:
        while perf_counter() < end:
            if server.returncode is not None:
                raise ServerError(f"the server ended with {server.returncode} while it started")
            try:
                await connections.fetch("/health", timeout_s=5.0)
                return
            except ServerError:
                await asyncio.sleep(0.05)
    finally:
        connections.close()
    raise ServerError("the server was not ready after 60 s")


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def _kill_engine(server_pid: int) -> None:
    """End the engine's process, the server's child, as the kernel would for want of memory."""
    children = Path(f"/proc/{server_pid}/task/{server_pid}/children").read_text().split()
    for child in children:
        with suppress(OSError):
            if b"twostroke.engine.process" in Path(f"/proc/{child}/cmdline").read_bytes():
                os.kill(int(child), signal.SIGKILL)


# ── load ────────────────────────────────────────────────────────────────────────────────────────


async def _load(loads: Sequence[Load], url: str) -> None:
    async with asyncio.TaskGroup() as tasks:
        for load in loads:
            for number in range(load.users):
                tasks.create_task(_user(load, number, url))


async def _user(load: Load, number: int, url: str) -> None:
    """Sends the next request when the last is answered, for as long as the case lasts."""
    connections = Connections(Endpoint(url))
    client = OpenAIClient(connections, None, CHAT if load.chat else COMPLETIONS)
    own = Prompts(number, secrets.token_hex(4), as_text=load.chat)
    await asyncio.sleep(number * load.stagger_s)
    try:
        sent = 0
        while True:
            prompts = own
            if load.prefix:  # the same for all users, or one of several in turn
                prompts = Prompts(sent % load.prefixes, "shared", as_text=load.chat)
            name = 10_000 * number + sent
            prompt = prompts.unique(name, load.prompt, load.prefix)
            sample = await client.send(
                Planned(0.0, prompt, load.prompt, load.output), perf_counter()
            )
            sent += 1
            await asyncio.sleep(load.pause_s if sample.ok else max(0.1, load.pause_s))
    finally:
        connections.close()


if __name__ == "__main__":
    name, *rest = sys.argv[1:]
    print(json.dumps(asyncio.run(run_case(CASES[name], rest[0] if rest else None))))
