"""Users' grammars are compiled here first, in a process that may crash.

Some grammars take llguidance minutes, some overflow its stack, and their text does not show it. A
worker (`sandbox.py`) compiles with the model's own tokenizer, as the engine will, and with less
stack than the engine has. The processes are started with the first request that has a grammar. No
torch.
"""

from __future__ import annotations

import json
import threading
from collections import OrderedDict
from dataclasses import asdict
from hashlib import sha256
from typing import Final

from twostroke.errors import RequestError
from twostroke.model.text.grammar_tokenizer import make_tokenizer
from twostroke.request import StructuredOutputs
from twostroke.sandbox import LimitExceeded, Limits, SandboxPool, Work
from twostroke.structured import check_size, compile_grammar

WORKERS: Final = 2
LIMITS: Final = Limits(
    cpu_s=0.25,  # the schemas of real programs take 1 to 5 ms
    wall_s=10.0,
    memory_bytes=32 * 1024**2,
    stack_bytes=4 * 1024**2,  # half of what the engine compiles with
    idle=True,  # streams go on meanwhile
)
REMEMBERED: Final = 1024  # grammars, by their digests, with what was wrong with them


class GrammarCheck:
    """Checks grammars, and remembers what was wrong with them. Thread-safe."""

    def __init__(self, tokenizer_json: str, end_ids: list[int]) -> None:
        setup = json.dumps([tokenizer_json, end_ids]).encode()
        self._pool = SandboxPool("twostroke.engine.grammar_check:checker", setup, WORKERS, LIMITS)
        self._lock = threading.Lock()
        self._found: OrderedDict[bytes, str] = OrderedDict()  # what is wrong with it, if anything

    def check(self, grammar: StructuredOutputs) -> None:
        """Raises `RequestError` if the grammar cannot be used."""
        if not self.known(grammar):
            request = json.dumps(asdict(grammar)).encode()
            problem = self._ask(request)
            with self._lock:
                self._found[sha256(request).digest()] = problem
                if len(self._found) > REMEMBERED:
                    self._found.popitem(last=False)
            if problem:
                raise RequestError(problem)

    def known(self, grammar: StructuredOutputs) -> bool:
        """Whether it was checked before and is good. Raises `RequestError` if it is bad."""
        check_size(grammar)
        digest = sha256(json.dumps(asdict(grammar)).encode()).digest()
        with self._lock:
            problem = self._found.get(digest)
            if problem is not None:
                self._found.move_to_end(digest)
        if problem:
            raise RequestError(problem)
        return problem is not None

    def _ask(self, request: bytes) -> str:
        try:
            return self._pool.ask(request).decode()
        except LimitExceeded as error:
            problem = (
                f"structured_outputs: the grammar is too complex ({error}); simplify it: less "
                "nesting, fewer patterns, references and alternatives"
            )
            if error.transient:
                raise RequestError(problem) from None
            return problem

    def close(self) -> None:
        self._pool.close()


def checker(setup: bytes) -> Work:
    """In the worker: a grammar → its error, or nothing."""
    tokenizer = make_tokenizer(*json.loads(setup))

    def check(request: bytes) -> bytes:
        try:
            fields = json.loads(request) if request else {"json_object": True}
            matcher = compile_grammar(tokenizer, StructuredOutputs(**fields))
            matcher.compute_bitmask()
            return str(matcher.get_error()).encode()
        except (RequestError, UnicodeError) as error:
            return str(error).encode(errors="replace")

    return check
