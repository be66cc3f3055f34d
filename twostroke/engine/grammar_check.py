"""Grammars that users send are compiled here first, in a process that may die of them.

    GrammarCheck ──▶ its process: compile, within limits ──▶ "" or what is wrong with it

Some grammars take llguidance minutes, some overflow its stack, and neither can be told from their
text. The process compiles with the model's own tokenizer, as the engine will, and with less stack
than the engine has. If it dies, the grammar is refused and the next one gets a new process. It is
started with the first request that has a grammar. No torch.
"""

from __future__ import annotations

import contextlib
import json
import signal
import subprocess
import sys
import threading
import weakref
from collections import OrderedDict
from dataclasses import asdict
from pathlib import Path
from typing import IO, Final

from twostroke.errors import EngineError, RequestError
from twostroke.request import StructuredOutputs
from twostroke.structured import check_size, compile_grammar, make_tokenizer

CPU_S: Final = 0.25  # for one grammar; the schemas of real programs take 1 to 5 ms
MEMORY_BYTES: Final = 1024**3  # address space of the process
STACK_BYTES: Final = 4 * 1024**2  # half of what a thread of the engine has
REMEMBERED: Final = 256  # grammars found good


class GrammarCheck:
    """Several threads may use one."""

    def __init__(self, tokenizer_json: str, end_ids: list[int]) -> None:
        self._hello = json.dumps([tokenizer_json, end_ids])
        self._lock = threading.Lock()
        self._good: OrderedDict[StructuredOutputs, None] = OrderedDict()
        self._child: _Child | None = None

    def check(self, asked: StructuredOutputs) -> None:
        """Raises `RequestError` if the grammar cannot be used."""
        check_size(asked)
        with self._lock:
            if asked in self._good:
                self._good.move_to_end(asked)
                return
            if self._child is None:
                child = _Child()
                problem = child.ask(self._hello)
                if problem is None:
                    raise EngineError("the process that checks grammars could not start")
                if problem:
                    raise RequestError(problem)
                self._child = child
            problem = self._child.ask(json.dumps(asdict(asked)))
            if problem is None:
                reason, self._child = self._child.cause_of_death(), None
                raise RequestError(
                    f"structured_outputs: the grammar is too complex ({reason}); simplify it: "
                    "less nesting, fewer patterns, references and alternatives"
                )
            if problem:
                raise RequestError(problem)
            self._good[asked] = None
            if len(self._good) > REMEMBERED:
                self._good.popitem(last=False)


class _Child:
    def __init__(self) -> None:
        self._process = subprocess.Popen(
            [sys.executable, "-m", "twostroke.engine.grammar_check"],
            cwd=Path(__file__).parents[2],  # where the package is found, installed or not
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
        )
        weakref.finalize(self, _end, self._process)

    def ask(self, line: str) -> str | None:
        """The answer, empty if all is well; None if the process died of it."""
        stdin, stdout = self._process.stdin, self._process.stdout
        assert stdin is not None
        assert stdout is not None
        try:
            stdin.write(line.encode() + b"\n")
            stdin.flush()
            answer = stdout.readline()
        except OSError:
            return None
        return str(json.loads(answer)) if answer.endswith(b"\n") else None

    def cause_of_death(self) -> str:
        status = self._process.wait()
        if status == -signal.SIGPROF:
            return f"it takes longer than {CPU_S} s to compile"
        return "it takes too much memory or nests too deeply"


def _end(process: subprocess.Popen[bytes]) -> None:
    for pipe in (process.stdin, process.stdout):
        if pipe is not None:
            with contextlib.suppress(OSError):
                pipe.close()
    process.kill()
    process.wait()


# ── in the process ──────────────────────────────────────────────────────────────────────────────


def main() -> None:
    import resource  # which not every system has

    signal.signal(signal.SIGINT, signal.SIG_IGN)  # meant for the program that asked
    resource.setrlimit(resource.RLIMIT_AS, (MEMORY_BYTES, MEMORY_BYTES))
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    threading.stack_size(STACK_BYTES)
    worker = threading.Thread(target=_serve, args=(sys.stdin.buffer, sys.stdout.buffer))
    worker.start()
    worker.join()


def _serve(requests: IO[bytes], answers: IO[bytes]) -> None:
    def answer(text: str) -> None:
        answers.write(json.dumps(text).encode() + b"\n")
        answers.flush()

    try:
        tokenizer = make_tokenizer(*json.loads(requests.readline()))
    except RequestError as error:
        return answer(str(error))
    answer("")
    for line in requests:
        # The signal ends the process wherever it is: nobody handles it.
        signal.setitimer(signal.ITIMER_PROF, CPU_S)
        try:
            matcher = compile_grammar(tokenizer, StructuredOutputs(**json.loads(line)))
            matcher.compute_bitmask()
            problem = matcher.get_error()
        except (RequestError, UnicodeError) as error:
            problem = str(error)
        signal.setitimer(signal.ITIMER_PROF, 0)
        answer(problem)
    return None


if __name__ == "__main__":
    main()
