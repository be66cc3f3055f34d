"""`LimitedEncoder`: encodes texts in a process with limits on time and memory.

It is used with tokenizers whose work may grow faster than the length of the text
(`tokenizer_work.py`). The process starts with the first text that needs it.
"""

from __future__ import annotations

from array import array
from typing import Final

import tokenizers

from twostroke.errors import RequestError
from twostroke.model.text.tokenizer_json import library_error
from twostroke.sandbox import LimitExceeded, Limits, SandboxPool, Work

# For a program with one user.
OWN_USER: Final = Limits(cpu_s=10.0, wall_s=60.0, memory_bytes=1024**3)
# For a server: lower limits and a low priority, because other clients share the machine.
SERVER: Final = Limits(cpu_s=2.0, wall_s=60.0, memory_bytes=48 * 1024**2, nice=10)
# More ids for a text are refused, because they take memory of the program.
IDS_PER_CHAR, MIN_IDS_LIMIT = 4, 1 << 16
IDS: Final = "I"  # the type of the array of ids in an answer


class LimitedEncoder:
    """Thread-safe; one text is encoded at a time."""

    def __init__(self, backend: tokenizers.Tokenizer, limits: Limits) -> None:
        setup = backend.to_str().encode()
        self._pool = SandboxPool("twostroke.model.text.limited_encoder:encoder", setup, 1, limits)

    def encode(self, text: str, add_special_tokens: bool) -> list[int]:
        """Return the ids of a text. Raises `RequestError` if the work exceeds the limits."""
        try:
            answer = self._pool.ask(bytes([add_special_tokens]) + text.encode())
        except LimitExceeded as error:
            raise RequestError(
                f"the model's tokenizer cannot read this text: {error}. Its steps are unusual; "
                "send a shorter text, or give another tokenizer with --tokenizer FOLDER."
            ) from None
        return array(IDS, answer).tolist()

    def close(self) -> None:
        self._pool.close()


def encoder(setup: bytes) -> Work:
    """Return the function that a worker runs for each request."""
    backend = tokenizers.Tokenizer.from_str(setup.decode())
    backend.no_truncation()
    backend.no_padding()

    def encode(request: bytes) -> bytes:
        if not request:
            return b""
        try:
            text = request[1:].decode()
            ids = backend.encode(text, add_special_tokens=bool(request[0])).ids
        except BaseException as error:
            problem = library_error(error)
            raise RequestError(
                f"the model's tokenizer cannot read this text ({problem}). Give another tokenizer "
                "with --tokenizer FOLDER."
            ) from None
        if len(ids) > max(MIN_IDS_LIMIT, IDS_PER_CHAR * len(text)):
            raise RequestError(
                f"the model's tokenizer makes {len(ids)} tokens of {len(text)} characters, which "
                "is refused. Give another tokenizer with --tokenizer FOLDER."
            )
        return array(IDS, ids).tobytes()

    return encode
