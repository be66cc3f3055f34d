"""All checks that need a GPU, each in a process of its own.

    python -m tests.gpu [--out DIR] [--only A,B] [--skip A,B] [--jobs 6] [--limit-s 560] [--list]

Checks that time nothing share the card, `--jobs` at a time; those that time something or look at
the card's memory run alone, after them. `--only` and `--skip` take names (`--list` has them) or
parts of names between dashes: `families` is all four of them, `times` everything that is timed.

Every check has a limit, and so have all together: what has not begun by then is not run. One that
outlasts its limit is ended with all its processes, after each has written down what its threads
were doing. Exits with 1 if a check failed, was ended or was not run.

    DIR/gpu_checks.json    name, command, how many passed and failed, seconds, exit status, the last
                           lines of those that failed, and the figures that a check leaves
    DIR/gpu_checks.txt     all outputs, one after another; DIR/outputs/NAME.txt while it runs
"""

from __future__ import annotations

import argparse
import json
import os
import re
import shlex
import signal
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass, field
from pathlib import Path
from time import monotonic, sleep
from typing import Any, TextIO

ROOT = Path(__file__).parents[2]
FAMILY_PARTS = 4
KERNEL_PARTS = 3
OWN_MARGIN_S = 15.0  # a check's own limit comes before the one that it is ended by
END_S = 5.0  # from one signal to the next, for processes that are ended
LEAST_S = 10.0  # with less time left, nothing is begun
POLL_S = 0.02
LAST_LINES = 40
STACKS_S = 5.0  # that a process may take to write its stacks before the next is asked
COUNTS = re.compile(r"^(\d+) passed, (\d+) failed", re.MULTILINE)
ENVIRONMENT = {"PYTHONFAULTHANDLER": "1", "PYTHONUNBUFFERED": "1"}  # stacks on SIGABRT


@dataclass(frozen=True)
class Check:
    name: str
    command: tuple[str, ...]  # what the interpreter is given
    limit_s: float
    alone: bool = False


@dataclass
class Result:
    name: str
    command: str
    outcome: str  # passed, failed, ended, not run
    why: str = ""
    passed: int | None = None  # as it has printed them last
    failed: int | None = None
    seconds: float = 0.0
    exit_status: int | None = None
    last_lines: list[str] = field(default_factory=list)
    figures: dict[str, Any] = field(default_factory=dict)


def all_checks() -> list[Check]:
    """The longest first, of those that share the card."""

    def check(
        name: str, limit_s: float, *options: str, file: str = "", alone: bool = False
    ) -> Check:
        own_limit = ("--limit-s", f"{limit_s - OWN_MARGIN_S:.0f}")
        command = ("-m", f"tests.gpu.{file or name}_check", *options, *own_limit)
        return Check(name, command, limit_s, alone)

    def times(file: str, limit_s: float) -> Check:
        return check(f"{file}-times", limit_s, "--no-checks", file=file, alone=True)

    return [
        check("cuda", 270),
        *(
            check(f"families-{n}", 270, "--part", f"{n}/{FAMILY_PARTS}", file="families")
            for n in range(1, FAMILY_PARTS + 1)
        ),
        *(
            check(
                f"kernels-{n}", 240, "--no-times", "--part", f"{n}/{KERNEL_PARTS}", file="kernels"
            )
            for n in range(1, KERNEL_PARTS + 1)
        ),
        check("kv", 150, "--no-times"),
        check("latent", 180, "--no-times"),
        check("packed", 300, "--no-times"),
        check("tiers", 240),
        check("eviction", 150),
        check("formats", 120, "--no-times"),
        check("formats-int8", 120, "--type", "int8", "--no-times", file="formats"),
        check("reference", 120),
        check("experts", 90, "--no-times"),
        check("gguf", 90),
        check("ranks", 300, alone=True),  # looks at the card's memory, and so does the next
        check("transfer", 180, alone=True),
        times("kernels", 150),
        times("packed", 100),
        times("kv", 100),
        times("formats", 120),
        times("latent", 100),
        times("experts", 60),
    ]


def chosen(checks: Sequence[Check], only: str, skip: str) -> list[Check]:
    def is_named(check: Check, words: set[str]) -> bool:
        return check.name in words or bool(words.intersection(check.name.split("-")))

    wanted, unwanted = (set(filter(None, given.split(","))) for given in (only, skip))
    known = {part for check in checks for part in (check.name, *check.name.split("-"))}
    if unknown := (wanted | unwanted) - known:
        names = ", ".join(check.name for check in checks)
        raise SystemExit(f"no check is called {', '.join(sorted(unknown))}; there are {names}")
    found = [check for check in checks if not wanted or is_named(check, wanted)]
    return [check for check in found if not is_named(check, unwanted)]


# ── processes ───────────────────────────────────────────────────────────────────────────────


def group_members(group: int) -> list[int]:
    """The processes of a group that have not ended."""
    found = []
    for folder in Path("/proc").glob("[0-9]*"):
        with suppress(OSError, ValueError, IndexError):
            state, _, of = (folder / "stat").read_text().rpartition(")")[2].split()[:3]
            if int(of) == group and state != "Z":
                found.append(int(folder.name))
    return sorted(found)


def waits_of(process: int) -> Iterator[str]:
    """Yield what each thread waits for in the kernel, if the kernel shows it."""
    for task in sorted(Path(f"/proc/{process}/task").glob("*")):
        with suppress(OSError):
            name = (task / "comm").read_text().strip()
            state = (task / "stat").read_text().rpartition(")")[2].split()[0]
            yield f"  thread {task.name} {name}: {state} {(task / 'wchan').read_text()}"


class Running:
    """A check's process, the leader of a group that all it starts belong to."""

    def __init__(self, check: Check, out: Path, now_s: float, until_s: float) -> None:
        self.check, self._begun_s = check, now_s
        self.next_s = min(now_s + check.limit_s, until_s)  # when the next signal is due
        self._limit_s = self.next_s - now_s
        self._signals = iter((signal.SIGABRT, signal.SIGKILL))
        self.was_ended = False
        self.output = out / "outputs" / f"{check.name}.txt"
        self._figures = out / "figures" / check.name
        for folder in (self.output.parent, self._figures):
            folder.mkdir(parents=True, exist_ok=True)
        self.output.unlink(missing_ok=True)
        with self.output.open("ab") as file:
            self._process = subprocess.Popen(
                [sys.executable, *check.command],
                stdin=subprocess.DEVNULL,
                stdout=file,
                stderr=subprocess.STDOUT,
                cwd=ROOT,
                env=os.environ | ENVIRONMENT | {"OUT": str(self._figures)},
                start_new_session=True,
            )

    @property
    def has_ended(self) -> bool:
        """The others of its group, too, if it was ended: they write their stacks."""
        ended = self._process.poll() is not None
        return ended and not (self.was_ended and group_members(self._process.pid))

    def end(self, now_s: float) -> bool:
        """The next signal; whether there is one."""
        number = next(self._signals, None)
        if number is None:
            return False
        members = group_members(self._process.pid)
        with self.output.open("a") as file:
            file.write(f"\n*** {self.check.name}: no end after {self._limit_s:.0f} s\n")
            for member in members:
                file.writelines(f"{line}\n" for line in (f"process {member}", *waits_of(member)))
        self.was_ended, self.next_s = True, now_s + END_S
        for member in members if number == signal.SIGABRT else ():
            with suppress(ProcessLookupError, PermissionError):
                os.kill(member, number)
            self._await_end(member)
        self.signal(number)
        return True

    def _await_end(self, member: int) -> None:
        """One after another: stacks that are written at the same time are of no use."""
        until_s = monotonic() + STACKS_S
        while monotonic() < until_s and member in group_members(self._process.pid):
            sleep(0.01)

    def signal(self, number: int) -> None:
        with suppress(ProcessLookupError, PermissionError):
            os.killpg(self._process.pid, number)

    def result(self, now_s: float) -> Result:
        self.signal(signal.SIGKILL)  # what it has left behind
        check, status = self.check, self._process.poll()
        text = self.output.read_text(errors="replace")
        found = Result(check.name, command_of(check), "passed", exit_status=status)
        found.seconds = round(now_s - self._begun_s, 1)
        if counts := COUNTS.findall(text):
            found.passed, found.failed = map(int, counts[-1])
        for file in sorted(self._figures.glob("*.json")):
            with suppress(ValueError):
                found.figures[file.stem] = json.loads(file.read_text())
        for line in reversed(text.splitlines()):
            if line.startswith("{"):
                with suppress(ValueError):
                    found.figures["printed"] = json.loads(line)
                break
        if self.was_ended:
            found.outcome, found.why = "ended", f"no end after {self._limit_s:.0f} s"
        elif status != 0:
            found.outcome, found.why = "failed", f"exit status {status}"
        elif found.failed:
            found.outcome, found.why = "failed", f"{found.failed} failed"
        elif found.passed == 0:
            found.outcome, found.why = "failed", "nothing was checked"
        if found.outcome != "passed":
            found.last_lines = text.splitlines()[-LAST_LINES:]
        return found


def command_of(check: Check) -> str:
    return shlex.join(["python", *check.command])


# ── all of them ─────────────────────────────────────────────────────────────────────────────


def run(
    checks: Iterable[Check],
    out: Path,
    jobs: int,
    limit_s: float,
    clock: Callable[[], float] = monotonic,
    to: TextIO = sys.stdout,
) -> list[Result]:
    """The results, in the order in which they came; `gpu_checks.json` always has those so far."""
    waiting = sorted(checks, key=lambda check: check.alone)
    begun_s, total = clock(), len(waiting)
    until_s = begun_s + limit_s - 2 * END_S
    running: list[Running] = []
    results: list[Result] = []

    def note(result: Result) -> None:
        results.append(result)
        save(results, out, clock() - begun_s)
        print(f"[{len(results)}/{total}] {line_of(result)}", file=to, flush=True)

    try:
        while waiting or running:
            now_s = clock()
            while waiting and may_start(waiting[0], [one.check for one in running], jobs):
                check = waiting.pop(0)
                if until_s - now_s < LEAST_S:
                    why = f"no time left of {limit_s:.0f} s"
                    note(Result(check.name, command_of(check), "not run", why))
                else:
                    running.append(Running(check, out, now_s, until_s))
            for one in list(running):
                if one.has_ended or (now_s >= one.next_s and not one.end(now_s)):
                    running.remove(one)
                    note(one.result(now_s))
            if running:
                sleep(POLL_S)
    finally:
        for one in running:
            one.signal(signal.SIGKILL)
    return results


def may_start(check: Check, running: Sequence[Check], jobs: int) -> bool:
    if check.alone:
        return not running
    return len(running) < jobs and not any(one.alone for one in running)


def save(results: Sequence[Result], out: Path, seconds: float) -> None:
    """Whole or not at all, whenever we are stopped."""
    bad = sum(result.outcome != "passed" for result in results)
    told = {"check": "gpu", "seconds": round(seconds, 1), "bad": bad}
    told["checks"] = [asdict(result) for result in results]
    new = out / "gpu_checks.new"
    new.write_text(json.dumps(told, indent=1) + "\n")
    new.replace(out / "gpu_checks.json")
    with (out / "gpu_checks.txt").open("w") as joined:
        for result in results:
            joined.write(f"\n══ {line_of(result)}\n   {result.command}\n")
            output = out / "outputs" / f"{result.name}.txt"
            if result.outcome != "not run" and output.exists():
                joined.write(output.read_text(errors="replace"))


def line_of(result: Result) -> str:
    counts = "-" if result.passed is None else f"{result.passed} passed, {result.failed} failed"
    told = f"{result.outcome:8}{result.name:16}{counts:24}{result.seconds:7.1f} s"
    return f"{told}  {result.why}".rstrip()


def main() -> int:
    parser = argparse.ArgumentParser(
        prog="python -m tests.gpu",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    default = Path(tempfile.gettempdir(), "twostroke-gpu")
    parser.add_argument("--out", type=Path, default=default, help=f"a folder; {default}")
    parser.add_argument("--only", default="", help="names, with commas between them")
    parser.add_argument("--skip", default="", help="likewise")
    parser.add_argument("--jobs", type=int, default=6, help="checks at a time; 6")
    parser.add_argument("--limit-s", type=float, default=560.0, help="of all together; 560")
    parser.add_argument("--list", action="store_true", help="say what there is, and run nothing")
    args = parser.parse_args()
    checks = chosen(all_checks(), args.only, args.skip)
    if args.jobs < 1:
        parser.error(f"--jobs is {args.jobs}, but at least 1 is needed")
    if args.list:
        for check in checks:
            how = "alone" if check.alone else ""
            print(f"{check.name:16}{check.limit_s:5.0f} s  {how:7}{command_of(check)}")
        return 0
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(1))  # `run` ends what it has started
    args.out.mkdir(parents=True, exist_ok=True)
    begun_s = monotonic()
    results = run(checks, args.out, args.jobs, args.limit_s)
    bad = [result for result in results if result.outcome != "passed"]
    for result in bad:
        print(f"\n══ {line_of(result)}", *result.last_lines, sep="\n")
    print(f"\n{'':8}{'check':16}{'':24}{'time':>9}")
    for result in results:
        print(line_of(result))
    told = f"{len(results) - len(bad)} checks passed, {len(bad)} did not"
    print(f"{told}, {monotonic() - begun_s:.0f} s; {args.out / 'gpu_checks.json'}")
    return 1 if bad else 0


if __name__ == "__main__":
    sys.exit(main())
