"""The doctor's exam: servers with injected faults, and healthy controls.

Each case starts one server with its flags, its load and perhaps a fault, and then runs
`twostroke doctor` on the server's address. Several cases can run at one time, each pinned to its
own processors.

    python -m bench.doctor_exam.exam NAME [MODEL]      run one case and print its verdict as JSON
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

from bench.doctor_exam.cases import CASES, Case, UserLoad
from bench.doctor_exam.slow_link import slow_link
from twostroke.errors import ConfigError, did_you_mean
from twostroke.measure.doctor.verdict import HEALTHY, NOT_ENOUGH
from twostroke.measure.load.http_client import Connections, Endpoint, ServerError
from twostroke.measure.load.result import environment
from twostroke.measure.load.sample_client import CHAT, COMPLETIONS, OpenAIClient
from twostroke.measure.load.workload import PlannedRequest, PromptGenerator

KILL_S = 4.0  # seconds after the doctor starts, when `kills_engine` ends the engine
CASE_S = 120.0  # time limit of a case
FAILED = "failed"


def find_cases(names: str | None) -> list[Case]:
    if names is None or names == "list":
        return list(CASES.values())
    for name in names.split(","):
        if name not in CASES:
            raise ConfigError(
                f"there is no case {name!r}{did_you_mean(name, CASES)}; `--cases list` shows them"
            )
    return [CASES[name] for name in names.split(",")]


# ── the whole exam ────────────────────────────────────────────────────────────────────────────────


class CaseResult(NamedTuple):
    """The doctor's answer to one run of a case."""

    case: Case
    answer: str  # the first cause, or healthy, not_enough_evidence, failed
    verdict: dict[str, Any]
    seconds: float

    @property
    def right(self) -> bool:
        return self.answer == (self.case.expected or HEALTHY)


def run_exam(
    cases: Sequence[Case],
    model: str | None,
    repeats: int,
    jobs: int,
    cpus_per_job: int,
    tell: Callable[[int, int, str, str], None],
) -> list[CaseResult]:
    """Run every case `repeats` times, `jobs` cases at one time."""
    allowed = sorted(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else []
    if jobs > 1 and jobs * cpus_per_job > len(allowed):
        raise ConfigError(
            f"--jobs {jobs} with {cpus_per_job} processors each need {jobs * cpus_per_job} "
            f"processors, but this process may use {len(allowed)}; lower --jobs or --cpus-per-job"
        )
    free: SimpleQueue[list[int]] = SimpleQueue()
    for job in range(jobs):
        free.put(allowed[job * cpus_per_job : (job + 1) * cpus_per_job])
    planned = [case for _ in range(repeats) for case in cases]
    done: list[CaseResult] = []

    def run(case: Case) -> None:
        cpus = free.get()
        try:
            result = _run_pinned(case, model, cpus)
        finally:
            free.put(cpus)
        done.append(result)
        mark = "right" if result.right else "WRONG"
        tell(len(done), len(planned), case.name, f"{result.answer}, {mark}, {result.seconds:.0f} s")

    with ThreadPoolExecutor(jobs) as pool:
        list(pool.map(run, planned))
    return done


def _run_pinned(case: Case, model: str | None, cpus: list[int]) -> CaseResult:
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
        return CaseResult(case, FAILED, {"error": err.decode()[-2000:]}, perf_counter() - started)
    return CaseResult(case, _answer(verdict), verdict, perf_counter() - started)


def _answer(verdict: dict[str, Any]) -> str:
    if verdict["verdict"] in (HEALTHY, NOT_ENOUGH) or not verdict["causes"]:
        return str(verdict["verdict"])
    return str(verdict["causes"][0]["cause"])


def result_json(answers: Sequence[CaseResult]) -> dict[str, Any]:
    matrix: dict[str, Counter[str]] = {}
    cases: dict[str, list[CaseResult]] = {}
    for one in answers:
        matrix.setdefault(one.case.expected or HEALTHY, Counter())[one.answer] += 1
        cases.setdefault(one.case.name, []).append(one)
    controls = [one for one in answers if not one.case.expected]
    false_alarms = sum(one.answer not in (HEALTHY, NOT_ENOUGH, FAILED) for one in controls)
    right = sum(one.right for one in answers)
    accuracy = right / len(answers) if answers else 0.0
    return {
        "schema": 1,
        "runs": len(answers),
        "right": right,
        "accuracy": accuracy,
        "controls": len(controls),
        "false_alarms": false_alarms,
        "passed": accuracy >= 0.95 and not false_alarms,
        "said": sorted({one.answer for one in answers} | set(matrix)),
        "matrix": {name: dict(counts) for name, counts in sorted(matrix.items())},
        "cases": [
            {
                "name": name,
                "expected": runs[0].case.expected or HEALTHY,
                "what": runs[0].case.description,
                "runs": len(runs),
                "right": sum(one.right for one in runs),
                "wrong": dict(Counter(one.answer for one in runs if not one.right)),
            }
            for name, runs in cases.items()
        ],
        "answers": [
            {"case": one.case.name, "said": one.answer, "case_s": one.seconds} | one.verdict
            for one in answers
        ],
        "environment": environment(),
    }


# ── one case ──────────────────────────────────────────────────────────────────────────────────────


async def run_case(case: Case, model: str | None, watch_s: float | None = None) -> dict[str, Any]:
    """Return the verdict of `twostroke doctor`, which knows only the server's address."""
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
            await stack.enter_async_context(_neighbours(case))
            await asyncio.sleep(0.0 if case.cold else case.warm_s)
            if case.kills_engine:
                asyncio.get_running_loop().call_later(KILL_S, _kill_engine, server.pid)
            return await _doctor(url, watch_s or case.watch_s)
        finally:
            load.cancel()
            with suppress(asyncio.CancelledError):
                await load


async def _doctor(url: str, watch_s: float) -> dict[str, Any]:
    command = ("doctor", url, "--for", f"{watch_s:g}", "--wait", "60", "--json")
    process = await asyncio.create_subprocess_exec(
        sys.executable,
        "-m",
        "twostroke",
        *command,
        stdout=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.PIPE,
    )
    out, err = await process.communicate()
    try:
        verdict: dict[str, Any] = json.loads(out)
    except ValueError:
        raise ServerError(f"the doctor failed: {err.decode()[-1000:]}") from None
    return verdict


@asynccontextmanager
async def _server(
    case: Case, model: str | None, port: int, folder: Path
) -> AsyncIterator[asyncio.subprocess.Process]:
    command = ["serve", *([model] if model else []), "--port", str(port), *case.serve]
    if case.template:
        path = folder / "template.jinja"
        path.write_text(case.template, encoding="utf-8")
        command += ["--chat-template", str(path)]
    start = ["bench.doctor_exam.faulty_server", *case.faults] if case.faults else ["twostroke"]
    with (folder / "log").open("wb") as log:
        process = await asyncio.create_subprocess_exec(
            sys.executable, "-m", *start, *command, stdout=log, stderr=log
        )
    try:
        yield process
    except ServerError as error:
        log_end = (folder / "log").read_text(errors="replace").strip()[-500:]
        raise ServerError(f"{error}\n{log_end}") from None
    finally:
        with suppress(ProcessLookupError):
            process.terminate()
            process.send_signal(signal.SIGTERM)  # a second SIGTERM ends open requests, too
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
                raise ServerError(f"the server exited with {server.returncode} while it started")
            try:
                await connections.fetch("/health", timeout_s=5.0)
                return
            except ServerError:
                await asyncio.sleep(0.05)
    finally:
        connections.close()
    raise ServerError("the server was not ready after 60 s")


@asynccontextmanager
async def _neighbours(case: Case) -> AsyncIterator[None]:
    """Run busy processes on the processors of this process."""
    words = (sys.executable, "-c", "while True: pass")
    processes = [subprocess.Popen(words) for _ in range(case.neighbours)]
    try:
        for process in processes:
            if case.neighbour_policy is not None:
                os.sched_setscheduler(process.pid, case.neighbour_policy, os.sched_param(0))
        yield
    finally:
        for process in processes:
            process.kill()
            process.wait()


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def _kill_engine(server_pid: int) -> None:
    """Kill the engine process, a child of the server, as the kernel's OOM killer would."""
    children = Path(f"/proc/{server_pid}/task/{server_pid}/children").read_text().split()
    for child in children:
        with suppress(OSError):
            if b"twostroke.engine.process" in Path(f"/proc/{child}/cmdline").read_bytes():
                os.kill(int(child), signal.SIGKILL)


# ── load ──────────────────────────────────────────────────────────────────────────────────────────


async def _load(loads: Sequence[UserLoad], url: str) -> None:
    async with asyncio.TaskGroup() as tasks:
        for load in loads:
            for number in range(load.users):
                tasks.create_task(_user(load, number, url))


async def _user(load: UserLoad, number: int, url: str) -> None:
    """Send one request after the other until the task is cancelled."""
    connections = Connections(Endpoint(url))
    client = OpenAIClient(connections, None, CHAT if load.chat else COMPLETIONS)
    own = PromptGenerator(number, secrets.token_hex(4), as_text=load.chat)
    await asyncio.sleep(number * load.stagger_s)
    try:
        sent = 0
        while True:
            prompts = own
            if load.prefix:  # the shared prefixes in turn
                prompts = PromptGenerator(sent % load.prefixes, "shared", as_text=load.chat)
            name = 10_000 * number + sent
            prompt = prompts.unique(name, load.prompt, load.prefix)
            sample = await client.send(
                PlannedRequest(0.0, prompt, load.prompt, load.output), perf_counter()
            )
            sent += 1
            await asyncio.sleep(load.pause_s if sample.ok else max(0.1, load.pause_s))
    finally:
        connections.close()


if __name__ == "__main__":
    name, *rest = sys.argv[1:]
    print(json.dumps(asyncio.run(run_case(CASES[name], rest[0] if rest else None))))
