"""Attacks of one client: their effect on the stream of another client and on the server's memory.

    python -m bench.hostile [--only NAME ...] [--skip NAME ...] [--json FILE] [--list]

Each attack (`hostile_http.py`, `hostile_connections.py`, `hostile_engines.py`) meets a fresh
`twostroke serve` on the default model with default flags, or with the flags of the attack. One
victim stream decodes all the time. The gaps between its tokens are measured for two quiet seconds;
then the attack runs in a separate process until it has its answers, and one second longer. A line
has the increase of the victim's worst gap over the quiet median (bound: 100 ms), the growth of the
peak memory of each process of the server (bound: 64 MiB), the growth that is left after the attack
(bound: 32 MiB, within 20 s), and the answers of the attacker. An attack with many requests is
compared with the same number of plain requests. The KV cache is reserved at the start, so touched
pages of it are no growth.

An attack during which other programs took more than `MAX_OTHERS` of a core is run again, up to
`TRIES` times, and the run with the smallest share counts: on a shared machine a neighbour can be
worse than any attack. `others_cores` is that share.

The body of an attack is made before the measurement; sending the body still takes CPU time from the
server, so on a small machine the gaps are upper bounds. Exit code 1 if a bound is broken.
"""

from __future__ import annotations

import argparse
import contextlib
import http.client
import json
import multiprocessing
import os
import platform
import resource
import signal
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Callable
from dataclasses import dataclass, field
from multiprocessing.connection import Connection
from pathlib import Path
from time import perf_counter, sleep
from typing import Any

from bench.hostile_watch import (
    ATTACK_S,
    MIB,
    Memory,
    Victim,
    children,
    engine_pid,
    kv_bytes,
    others_cpu_s,
)

QUIET_S, AFTER_S = 2.0, 1.0
START_S = 60.0
MAX_GAP_MS, MAX_GROWTH_MIB = 100.0, 64.0
MAX_LEFT_MIB, SETTLE_S = 32.0, 20.0
MAX_OTHERS, TRIES = 0.03, 2
CONTEXT = multiprocessing.get_context("fork")


@dataclass(frozen=True)
class AttackTarget:
    """The server as an attack sees it."""

    port: int
    pid: int  # of the HTTP process
    folder: Path  # for files of the attack
    log: Path  # the server's output


Fire = Callable[[], str]


@dataclass(frozen=True)
class Attack:
    name: str
    prepare: Callable[
        [AttackTarget], Fire
    ]  # makes the bodies; the returned function sends the bodies and describes the answers
    flags: Callable[[Path], list[str]] = field(default=lambda folder: [])
    environment: dict[str, str] = field(default_factory=dict)  # of the server, besides ours
    victim: bool = True  # False: the attack is on the engine itself, and every stream ends
    victim_key: str | None = None  # API key of the victim
    open_files: int | None = None  # the server's limit of file descriptors
    control: str = ""  # name of a harmless attack to compare the victim's gap with
    max_gap_ms: float = MAX_GAP_MS
    max_growth_mib: float = MAX_GROWTH_MIB
    max_left_mib: float = MAX_LEFT_MIB


class AttackedServer:
    def __init__(self, attack: Attack, port: int, folder: Path) -> None:
        command = [sys.executable, "-m", "twostroke", "serve", "--port", str(port)]
        self.log = folder / "server.log"
        limit = attack.open_files

        def confine() -> None:
            if limit is not None:
                resource.setrlimit(resource.RLIMIT_NOFILE, (limit, limit))

        with self.log.open("wb") as log:
            self.process = subprocess.Popen(
                [*command, *attack.flags(folder)],
                stdout=log,
                stderr=log,
                start_new_session=True,
                preexec_fn=confine,
                env=os.environ | attack.environment,
            )
        until = perf_counter() + START_S
        while True:
            try:
                connection = http.client.HTTPConnection("127.0.0.1", port, timeout=5)
                connection.request("GET", "/health")
                if connection.getresponse().status == 200:
                    break
            except OSError:
                if self.process.poll() is not None or perf_counter() > until:
                    self.close()
                    raise SystemExit(self.log.read_text(errors="replace")[-2000:]) from None
                sleep(0.05)
            finally:
                connection.close()

    def close(self) -> float:
        """Stop the server, and return the seconds after SIGTERM, or -1 after a SIGKILL."""
        if self.process.poll() is not None:
            return 0.0
        start = perf_counter()
        self.process.terminate()
        try:
            self.process.wait(40)
            return perf_counter() - start
        except subprocess.TimeoutExpired:
            return -1.0
        finally:
            for pid in [*children(self.process.pid), self.process.pid]:
                with contextlib.suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGKILL)
            self.process.wait()


def _attacker(attack: Attack, target: AttackTarget, pipe: Connection) -> None:
    fire = attack.prepare(target)
    pipe.send("ready")
    pipe.recv()
    try:
        pipe.send(fire())
    except Exception as error:
        pipe.send(f"FAILED {type(error).__name__}: {error}")


def run_quietly(attack: Attack, port: int, control_ms: float) -> dict[str, Any]:
    """Run up to `TRIES` times, and return the run with the least disturbance by other programs."""
    rows: list[dict[str, Any]] = []
    while len(rows) < TRIES and not (rows and rows[-1]["others_cores"] <= MAX_OTHERS):
        rows.append(run(attack, port, control_ms))
    return min(rows, key=lambda row: row["others_cores"])


def run(attack: Attack, port: int, control_ms: float) -> dict[str, Any]:
    """`control_ms`: the victim's worst gap under the attack's control."""
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        server = AttackedServer(attack, port, folder)
        try:
            target = AttackTarget(port, server.process.pid, folder, server.log)
            row = _measure(attack, target, control_ms)
        finally:
            ended_s = server.close()
        row["ended_s"] = round(ended_s, 2)
        if ended_s < 0:
            row["broken"].append("SIGTERM did not end the server")
        return row


def _measure(attack: Attack, target: AttackTarget, control_ms: float) -> dict[str, Any]:
    from bench.hostile_http import warm_up

    ours, theirs = CONTEXT.Pipe()
    child = CONTEXT.Process(target=_attacker, args=(attack, target, theirs), daemon=True)
    child.start()
    warm_up(target)  # start everything that the server starts once before the measurement
    ours.recv()
    victim = Victim(target.port, attack.victim_key) if attack.victim else None
    memory = Memory(target.pid)
    while victim is not None and len(victim.times) < 20:
        sleep(0.05)
    begun = perf_counter()
    sleep(QUIET_S)
    before = memory.restart()
    kv_before = kv_bytes(engine_pid(target.pid))
    others_s = others_cpu_s()
    fired = perf_counter()
    ours.send("go")
    said = ours.recv() if ours.poll(ATTACK_S) else f"FAILED no end within {ATTACK_S:.0f} s"
    took_s = perf_counter() - fired
    sleep(AFTER_S)
    end = perf_counter()
    peak = dict(memory.peak)
    row: dict[str, Any] = {"attack": attack.name, "outcome": said, "took_s": round(took_s, 2)}
    row["others_cores"] = round((others_cpu_s() - others_s) / (end - fired), 2)
    kv_growth = max(0, kv_bytes(engine_pid(target.pid)) - kv_before)
    peak["engine"] -= kv_growth
    growth = {name: (peak[name] - before[name]) / MIB for name in before}
    row["growth_mib"] = {name: round(value, 1) for name, value in growth.items()}
    broken = [f"{name} grew by {mib:.0f} MiB" for name, mib in growth.items()
              if mib > attack.max_growth_mib]  # fmt: skip
    if victim is not None:
        quiet_ms = 1e3 * statistics.median(victim.gaps(begun, fired))
        worst_ms = 1e3 * max(victim.gaps(fired, end))
        victim.end()
        row |= {"quiet_gap_ms": round(quiet_ms, 1), "worst_gap_ms": round(worst_ms, 1)}
        base_ms = max(quiet_ms, control_ms)
        if worst_ms - base_ms > attack.max_gap_ms:
            broken.append(f"the victim waited {worst_ms:.0f} ms")
        broken += [f"the victim's stream failed: {victim.errors[0]}"] if victim.errors else []
    if said.startswith("FAILED"):
        broken.append(said)
    child.kill()
    left = _left_mib(memory, before, kv_before, target, attack.max_left_mib)
    row["left_mib"] = {name: round(value, 1) for name, value in left.items()}
    broken += [f"{name} has kept {mib:.0f} MiB" for name, mib in left.items()
               if mib > attack.max_left_mib]  # fmt: skip
    row["broken"] = broken
    return row


def _left_mib(
    memory: Memory, before: dict[str, int], kv_before: int, target: AttackTarget, bound_mib: float
) -> dict[str, float]:
    """Return the growth as soon as each process is below the bound, or after `SETTLE_S`."""
    until = perf_counter() + SETTLE_S
    while True:
        now = memory.restart()
        now["engine"] -= max(0, kv_bytes(engine_pid(target.pid)) - kv_before)
        left = {name: (now[name] - before[name]) / MIB for name in before}
        if max(left.values()) <= bound_mib or perf_counter() > until:
            memory.end()
            return left
        sleep(0.2)


def words(row: dict[str, Any]) -> str:
    grew = row["growth_mib"]
    gap = (
        f"{row['quiet_gap_ms']:5.1f} → {row['worst_gap_ms']:7.1f} ms"
        if "worst_gap_ms" in row
        else ""
    )
    sizes = " ".join(f"{grew[name]:+6.1f}" for name in ("http", "engine", "helpers"))
    left = " ".join(f"{row['left_mib'][name]:+6.1f}" for name in ("http", "engine", "helpers"))
    verdict = "BROKEN" if row["broken"] else "ok"
    others = f"{row['others_cores']:4.2f}"
    figures = f"{gap:22} {sizes} MiB, left {left}  {others}"
    return f"{row['attack']:26} {figures} {verdict:6} {row['outcome'][:90]}"


def all_attacks() -> list[Attack]:
    from bench.hostile_connections import CONNECTION_ATTACKS
    from bench.hostile_engines import ENGINE_ATTACKS
    from bench.hostile_http import HTTP_ATTACKS

    return HTTP_ATTACKS + CONNECTION_ATTACKS + ENGINE_ATTACKS


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--only", nargs="+", metavar="NAME", help="attacks whose name has this")
    parser.add_argument("--skip", nargs="+", metavar="NAME", default=[], help="not these")
    parser.add_argument("--json", help="keep the rows here, beside those of other attacks")
    parser.add_argument("--port", type=int, default=8960)
    parser.add_argument("--list", action="store_true", help="the names, and no more")
    args = parser.parse_args()
    chosen = [
        a for a in all_attacks() if not args.only or any(part in a.name for part in args.only)
    ]
    chosen = [a for a in chosen if not any(part in a.name for part in args.skip)]
    if args.list:
        print("\n".join(attack.name for attack in chosen))
        return
    print(f"{'attack':26} victim: quiet → worst   growth: http engine helpers, left, others' cores")
    rows: dict[str, dict[str, Any]] = {}
    if args.json and Path(args.json).exists():
        rows = {row["attack"]: row for row in json.loads(Path(args.json).read_text())["attacks"]}
    for number, attack in enumerate(chosen):
        control_ms = rows.get(attack.control, {}).get("worst_gap_ms", 0.0)
        rows[attack.name] = row = run_quietly(attack, args.port + number % 20, control_ms)
        print(words(row), flush=True)
        if args.json:
            Path(args.json).write_text(as_json(rows))
    sys.exit(any(rows[attack.name]["broken"] for attack in chosen))


def as_json(rows: dict[str, dict[str, Any]]) -> str:
    result = {
        "bench": "hostile",
        "machine": platform.machine(),
        "cores": os.cpu_count(),
        "bounds": {"gap_ms": MAX_GAP_MS, "growth_mib": MAX_GROWTH_MIB, "left_mib": MAX_LEFT_MIB},
        "attacks": [rows[attack.name] for attack in all_attacks() if attack.name in rows],
    }
    return json.dumps(result) + "\n"


if __name__ == "__main__":
    main()
