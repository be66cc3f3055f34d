"""`GrammarCheck`: compiles users' grammars first in a process that may crash.

llguidance takes minutes to compile some grammars, and others overflow its stack; the text of a
grammar does not show this. A worker process compiles with the model's tokenizer, like the engine,
and with a smaller stack than the engine's. The processes start with the first request that has a
grammar. They do not import torch.
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
    wall_s=20.0,  # the worker waits while the engine and other programs need all processors
    memory_bytes=32 * 1024**2,
    stack_bytes=4 * 1024**2,  # half the stack of the engine's compiler
    nice=10,  # a tenth of a core while the engine is busy
)
REMEMBERED: Final = 1024  # results, by the digests of grammars


class GrammarCheck:
    """Checks grammars and remembers the results. Thread-safe."""

    def __init__(self, tokenizer_json: str, end_ids: list[int]) -> None:
        setup = json.dumps([tokenizer_json, end_ids]).encode()
        self._pool = SandboxPool("twostroke.engine.grammar_check:checker", setup, WORKERS, LIMITS)
        self._lock = threading.Lock()
        self._found: OrderedDict[bytes, str] = OrderedDict()  # problem or "", by digest

    def check(self, grammar: StructuredOutputs) -> None:
        """Raise `RequestError` if the grammar cannot be used."""
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
        """Return True if the grammar was checked before; raise `RequestError` if it is bad."""
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
            if error.transient:
                raise RequestError(
                    f"structured_outputs: the grammar could not be checked ({error}), because this "
                    "machine is busy; try again"
                ) from None
            return (
                f"structured_outputs: the grammar is too complex ({error}); simplify it: less "
                "nesting, fewer patterns, references and alternatives"
            )

    def close(self) -> None:
        self._pool.close()


def checker(setup: bytes) -> Work:
    """Make the worker's function, which returns the error of a grammar, or nothing."""
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
