"""The cost of observing a server: tokens a second with and without observation, in turn.

    python -m bench.observer_cost trace [--cycles 8] [--window 10] [--json FILE]
    python -m bench.observer_cost once
    python -m bench.observer_cost profile
    python -m bench.observer_cost off --without CHECKOUT

The same users load the server for one window in each arm, in the order A B C, C B A, A B C, so that
a drift of the machine affects all arms alike. The ratio of an arm to the arm without observation in
one cycle is one value, and the mean of the values has a t interval at 95%. Tokens are counted per
second, and per second of CPU time of server and command together. Run it on idle cores.

trace: no observation; `twostroke trace` once in the window on the same cores; only fetching the
same records, which is the server's part (--arms 2 leaves this arm out).
once: one user, then a trace of all steps that the idle server keeps: CPU time of server and
command, divided by the CPU time of the cores in the traced time, which is an upper bound.
profile: no observation; a profile that runs for the whole window.
off: this tree against CHECKOUT, whose native decoder does not count its stages (an `end_stage` in
native/src/model.cpp that returns at once, built in place).
Ends with one JSON line; exit status 1 if `trace` or `off` cost 2% or more.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import resource
import sys
import tempfile
from collections.abc import Callable, Coroutine
from contextlib import AbstractAsyncContextManager, ExitStack, nullcontext, suppress
from itertools import count
from pathlib import Path
from time import perf_counter
from typing import Any, NamedTuple

from bench.witness import Json, get_json
from twostroke.measure.compare.arms import serving
from twostroke.measure.compare.paired_comparison import compare
from twostroke.measure.load.definitions import Sample
from twostroke.measure.load.http_client import Connections, Endpoint
from twostroke.measure.load.load_run import gc_disabled
from twostroke.measure.load.result import environment
from twostroke.measure.load.sample_client import COMPLETIONS, OpenAIClient
from twostroke.measure.load.workload import PlannedRequest, PromptGenerator

USERS, PROMPT, OUTPUT = 4, 16, 256
SETTLE_S = 1.0  # before tokens are counted
TRIES = 10
MAX_COST = 0.02
METRICS = ("tokens a second", "tokens a second of processor time")


class ObserverArm(NamedTuple):
    name: str
    url: str
    look: Callable[[str, float], Coroutine[Any, Any, None]]  # the observation in one window
    beside: Callable[[], AbstractAsyncContextManager[None]] = nullcontext  # around the window


async def nothing(url: str, window_s: float) -> None: ...


async def trace(url: str, window_s: float) -> None:
    with tempfile.TemporaryDirectory() as folder:
        words = ["trace", url, "--seconds", f"{window_s:g}", "-o", f"{folder}/timeline.json"]
        process = await asyncio.create_subprocess_exec(
            sys.executable, "-m", "twostroke", *words, stdout=asyncio.subprocess.DEVNULL
        )
        if await process.wait():
            raise SystemExit("twostroke trace failed")


async def fetch(url: str, window_s: float) -> None:
    connections = Connections(Endpoint(url))
    try:
        await connections.fetch(f"/records?seconds={window_s:g}")
    finally:
        connections.close()


async def profile(url: str, window_s: float) -> None:
    connections = Connections(Endpoint(url))
    try:
        await connections.fetch("/start_profile", {})
        try:
            await asyncio.sleep(window_s - 0.1)
        finally:
            await connections.fetch("/stop_profile", {})
    finally:
        connections.close()


class CountingClient(OpenAIClient):
    """A client that records the time of each token, also of answers that are cut off."""

    def __init__(self, connections: Connections) -> None:
        super().__init__(connections, None, COMPLETIONS)
        self.token_s: list[float] = []

    def _take(self, sample: Sample, at_s: float, data: bytes) -> None:
        before = len(sample.content_s)
        super()._take(sample, at_s, data)
        self.token_s += sample.content_s[before:]


def cpu_s() -> float:
    """Return the CPU time of all processes that this process started, including ended commands."""
    ended = resource.getrusage(resource.RUSAGE_CHILDREN)
    own = resource.getrusage(resource.RUSAGE_SELF)
    of_others = tree_cpu_s(os.getpid()) - own.ru_utime - own.ru_stime
    return of_others + ended.ru_utime + ended.ru_stime


def tree_cpu_s(root: int) -> float:
    """Return the CPU time of a process and its running descendants."""
    ticks, parents = {}, {}
    for path in Path("/proc").glob("[0-9]*/stat"):
        with suppress(OSError):
            words = path.read_text().rpartition(")")[2].split()
            pid = int(path.parent.name)
            parents[pid], ticks[pid] = int(words[1]), int(words[11]) + int(words[12])
    found = 0
    for pid, spent in ticks.items():
        above = pid
        while above not in (0, root):
            above = parents.get(above, 0)
        found += spent if above == root else 0
    return found / os.sysconf("SC_CLK_TCK")


async def window(
    arm: ObserverArm, window_s: float, salt: str, num_users: int = USERS
) -> tuple[float, float]:
    """Return tokens a second of one window, and tokens a second of CPU time."""
    async with arm.beside():
        return await _window(arm, window_s, salt, num_users)


async def _window(
    arm: ObserverArm, window_s: float, salt: str, num_users: int
) -> tuple[float, float]:
    connections = Connections(Endpoint(arm.url))
    client, prompts = CountingClient(connections), PromptGenerator(0, salt, as_text=False)

    async def user(number: int) -> None:
        output = OUTPUT * (number + 1) // USERS  # of the first, so that they do not end together
        for turn in count():
            prompt = prompts.unique(1000 * number + turn, PROMPT)
            sample = await client.send(PlannedRequest(0.0, prompt, PROMPT, output), perf_counter())
            if sample.error:
                raise SystemExit(sample.error)
            output = OUTPUT

    with gc_disabled():
        begin = perf_counter() + SETTLE_S
        users = [asyncio.create_task(user(number)) for number in range(num_users)]
        await asyncio.sleep(SETTLE_S)
        spent_s = cpu_s()
        looking = asyncio.create_task(arm.look(arm.url, window_s))
        await asyncio.sleep(begin + window_s - perf_counter())
        await looking
        end, spent_s = perf_counter(), cpu_s() - spent_s
        for task in users:
            task.cancel()
        await asyncio.gather(*users, return_exceptions=True)
    connections.close()
    tokens = sum(begin <= at_s < end for at_s in client.token_s)
    return tokens / (end - begin), tokens / spent_s


async def once(url: str, window_s: float) -> Json:
    """Return the CPU time of a trace of all kept steps, and the server's part of that time."""
    await window(ObserverArm("load", url, nothing), window_s, f"{os.getpid()}", num_users=1)
    await asyncio.sleep(1.0)
    steps = len(get_json(f"{url}/records?seconds=600")["steps"])
    found: Json = {"steps": steps, "cores": os.cpu_count() or 1, "window_s": window_s}
    for name, look in (("server", fetch), ("with_command", trace)):
        spent_s = cpu_s()
        for _ in range(TRIES):
            await look(url, 600.0)
        found[f"{name}_s"] = each_s = (cpu_s() - spent_s) / TRIES
        found[f"{name}_share"] = each_s / (window_s * found["cores"])
    return found


async def measure(
    arms: list[ObserverArm], cycles: int, window_s: float, limit_s: float
) -> list[Json]:
    begun = perf_counter()
    for arm in arms:
        await window(arm, 2.0, f"warm up {arm.name}")
    found: list[Json] = []
    for cycle in range(cycles):
        if perf_counter() - begun + len(arms) * (SETTLE_S + window_s) > limit_s:
            break
        row: Json = {}
        for arm in arms if cycle % 2 == 0 else arms[::-1]:
            row[arm.name] = await window(arm, window_s, f"{os.getpid()} {cycle} {arm.name}")
        found.append(row)
        shown = [f"{name} {row[name][0]:.1f}, {row[name][1]:.1f}" for name in sorted(row)]
        print("  ".join(shown), flush=True)
    return found


def judged(rows: list[Json], names: list[str]) -> list[Json]:
    """Return the change of each arm against the first arm, with its interval."""
    base, *others = names
    found = []
    for name in others:
        for n, metric in enumerate(METRICS):
            one = compare(metric, [r[base][n] for r in rows], [r[name][n] for r in rows], 1)
            change = {"change": one.ratio - 1, "low": one.low - 1, "high": one.high - 1}
            found.append(
                {"arm": name, "against": base, "metric": metric, **change, "cycles": one.pairs}
            )
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("what", choices=("trace", "once", "profile", "off"))
    parser.add_argument("--cycles", type=int, default=100)
    parser.add_argument("--window", type=float, default=10.0, metavar="S")
    parser.add_argument("--limit", type=float, default=270.0, metavar="S", help="for all cycles")
    parser.add_argument("--without", metavar="CHECKOUT")
    parser.add_argument("--arms", type=int, default=3, help="of trace; 2 leaves the fetching out")
    parser.add_argument("--json", help="also write the result here")
    args = parser.parse_args()
    if args.what == "off" and not args.without:
        parser.error("off needs --without CHECKOUT")
    with ExitStack() as stack:
        (url,) = stack.enter_context(serving([""]))
        if args.what == "once":
            result = asyncio.run(once(url, args.window))
            save({"bench": "observer_cost", "what": "once", **result}, args.json)
            return
        if args.what == "trace":
            arms = [
                ObserverArm("nothing", url, nothing),
                ObserverArm("twostroke trace", url, trace),
            ]
            arms += [ObserverArm("records fetched", url, fetch)][: args.arms - 2]
        elif args.what == "profile":
            arms = [ObserverArm("nothing", url, nothing), ObserverArm("profiled", url, profile)]
        else:
            own = os.environ.get("PYTHONPATH", "")
            os.environ["PYTHONPATH"] = args.without
            os.chdir(args.without)
            (other,) = stack.enter_context(serving([""]))
            os.environ["PYTHONPATH"] = own
            arms = [
                ObserverArm("no counters", other, nothing),
                ObserverArm("as it is", url, nothing),
            ]
        rows = asyncio.run(measure(arms, args.cycles, args.window, args.limit))
    found = judged(rows, [arm.name for arm in arms])
    for one in found:
        print(
            f"{one['arm']} against {one['against']}, {one['metric']}: {one['change']:+.2%} "
            f"({one['low']:+.2%} to {one['high']:+.2%}), {one['cycles']} cycles"
        )
    load = {"users": USERS, "prompt": PROMPT, "output": OUTPUT, "window_s": args.window}
    result = {"bench": "observer_cost", "what": args.what}
    save(result | {"load": load, "changes": found, "metrics": METRICS, "rows": rows}, args.json)
    judged_by = [one for one in found if one["metric"] == METRICS[0]]
    if args.what != "profile" and any(one["low"] <= -MAX_COST for one in judged_by):
        raise SystemExit("it costs 2% or more, or more cycles are needed to say that it does not")


def save(result: Json, path: str | None) -> None:
    line = json.dumps({"environment": environment(), **result})
    print(line)
    if path:
        Path(path).write_text(line + "\n")


if __name__ == "__main__":
    main()
