"""`ab`: two servers, or one server with two settings, under the exact same requests, in pairs."""

from __future__ import annotations

import asyncio
import secrets
import shlex
import socket
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from time import monotonic, sleep
from typing import Any, NamedTuple

from twostroke.errors import ConfigError
from twostroke.measure.bench import ServeBench, ServeOptions
from twostroke.measure.compare import METRICS, Comparison, compare, overall
from twostroke.measure.http import Connections, Endpoint, ServerError
from twostroke.measure.result import environment

START_S = 600.0
# What people try first: the setting as it is by default, and as it might help.
PLAYBOOK = {
    "chunk-budget": ("", "--max-num-batched-tokens 512"),
    "prefix-caching": ("--no-enable-prefix-caching", "--enable-prefix-caching"),
    "throughput-mode": ("", "--performance-mode throughput"),
    "int8-weights": ("", "--quantization int8"),
    "int4-weights": ("", "--quantization int4"),
    "kv-cache-fp16": ("", "--kv-cache-dtype float16"),
    "reference-kernels": ("", "--kernels reference"),
    "threads-per-phase": ("", "--threads 1"),
}


class Figures(NamedTuple):
    """One run of one arm."""

    ttft: float
    tpot: float
    itl_p99: float
    throughput: float
    certified: bool
    problems: tuple[str, ...]


class Trial(NamedTuple):
    a: list[Figures]
    b: list[Figures]
    comparisons: list[Comparison]

    @property
    def verdict(self) -> str:
        return overall(self.comparisons)


def run_ab(
    arms: tuple[str, str],
    options: ServeOptions,
    pairs: int,
    tell: Callable[[int, str, Figures], None] = lambda pair, arm, figures: None,
) -> Trial:
    """`arms`: each a URL, or options of `twostroke serve`. `options`: the workload."""
    if pairs < 2:
        raise ConfigError("--pairs must be at least 2: one pair has no spread to judge by")
    with ExitStack() as stack:
        urls = [stack.enter_context(arm_server(arm)) for arm in arms]
        return asyncio.run(_trial(urls, options, pairs, tell))


async def _trial(
    urls: Sequence[str],
    options: ServeOptions,
    pairs: int,
    tell: Callable[[int, str, Figures], None],
) -> Trial:
    # The same prompts for both, unless one server is both and would know them the second time.
    salt = secrets.token_hex(4)
    salts = [f"{salt} {arm if urls[0] == urls[1] else ''}" for arm in "AB"]
    benches = [
        ServeBench(replace(options, url=url, salt=one))
        for url, one in zip(urls, salts, strict=True)
    ]
    found: tuple[list[Figures], list[Figures]] = ([], [])
    try:
        for bench in benches:
            await bench.connect()
        for pair in range(pairs):
            # A B, then B A: whatever drifts meets both alike.
            for arm in (0, 1) if pair % 2 == 0 else (1, 0):
                benches[arm].options = replace(benches[arm].options, seed=options.seed + pair)
                figures = _figures((await benches[arm].run()).result)
                found[arm].append(figures)
                tell(pair, "AB"[arm], figures)
    finally:
        for bench in benches:
            bench.close()
    return Trial(*found, comparisons=compare_runs(*found))


def compare_runs(a: Sequence[Figures], b: Sequence[Figures]) -> list[Comparison]:
    names = [name for name in METRICS if all(getattr(one, name) > 0 for one in (*a, *b))]
    return [
        compare(
            name, [getattr(one, name) for one in a], [getattr(one, name) for one in b], len(names)
        )
        for name in names
    ]


def _figures(result: dict[str, Any]) -> Figures:
    # A p99 of one run is not judged by itself, so its own requests need not suffice for it.
    problems = tuple(one for one in result["problems"] if "too few" not in one)
    return Figures(
        result["median_ttft_ms"],
        result["median_tpot_ms"],
        result.get("p99_itl_ms", 0.0),
        result["output_throughput"],
        not problems,
        problems,
    )


@contextmanager
def arm_server(arm: str) -> Iterator[str]:
    """The URL of an arm; a server with its options is started for it, and ended after."""
    if arm.startswith(("http://", "https://")):
        yield arm
        return
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    command = [sys.executable, "-m", "twostroke", "serve", "--port", str(port), *shlex.split(arm)]
    with tempfile.TemporaryFile() as log:
        process = subprocess.Popen(command, stdout=log, stderr=subprocess.STDOUT)
        try:
            url = f"http://127.0.0.1:{port}"
            asyncio.run(_ready(url, process))
            yield url
        except ServerError as error:
            log.seek(0)
            said = log.read().decode(errors="replace").strip().splitlines()[-3:]
            raise ServerError(
                f"`twostroke serve {arm}`: {error}" + "".join(f"\n  {line}" for line in said)
            ) from None
        finally:
            process.terminate()
            try:
                process.wait(30)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()


async def _ready(url: str, process: subprocess.Popen[bytes]) -> None:
    connections = Connections(Endpoint(url))
    end = monotonic() + START_S
    try:
        while monotonic() < end:
            if process.poll() is not None:
                raise ServerError(f"it ended with status {process.returncode} while it started")
            try:
                await connections.fetch("/health", timeout_s=5.0)
                return
            except ServerError:
                sleep(0.1)
    finally:
        connections.close()
    raise ServerError(f"it was not ready after {START_S:.0f} s")


def trial_json(trial: Trial, arms: tuple[str, str]) -> dict[str, Any]:
    return {
        "schema_version": 1,
        "a": arms[0] or "defaults",
        "b": arms[1] or "defaults",
        "verdict": trial.verdict,
        "metrics": [one.as_json() for one in trial.comparisons],
        "runs": {"a": [one._asdict() for one in trial.a], "b": [one._asdict() for one in trial.b]},
        "environment": environment(),
    }


def markdown(trial: Trial, arms: tuple[str, str]) -> str:
    """For a pull request."""
    a, b = (arm or "defaults" for arm in arms)
    lines = [
        f"**{trial.verdict}**: B (`{b}`) against A (`{a}`), {len(trial.a)} pairs of runs",
        "",
        "| metric | B / A | 95% interval | detectable | verdict |",
        "|---|---|---|---|---|",
    ]
    lines += [
        f"| {one.metric} | {one.ratio:.3f} | {one.low:.3f} to {one.high:.3f} | "
        f"{one.detectable:.1%} | {one.verdict} |"
        for one in trial.comparisons
    ]
    return "\n".join(lines) + "\n"
