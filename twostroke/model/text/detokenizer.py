"""Token ids → text, a few at a time.

Whatever pieces `push` hands out, joined with `flush` they are the text that `tokenizers` decodes
from the whole sequence at once; but no step looks back further than the character it is in.

Most vocabularies allow a table from id to what the id contributes:

- byte-level BPE: bytes, which an incremental UTF-8 decoder turns into characters;
- SentencePiece-like: text (`▁` is a space), or one raw byte (`<0xE2>`). `tokenizers` judges a run
  of raw bytes as a whole: text if the run is UTF-8, otherwise one `�` per byte. The run is
  therefore held until it ends.

Any other decoder is asked itself, over a short window of ids; that is exact unless an id changes
the text of those before it, as an invalid byte after valid ones may.
"""

from __future__ import annotations

import codecs
import json
from abc import ABC, abstractmethod
from collections.abc import Sequence
from functools import cached_property
from typing import Any, Final

import tokenizers

SPACE_MARK: Final = "▁"
REPLACEMENT: Final = "\N{REPLACEMENT CHARACTER}"
# Ids kept as context when a decoder is asked for the text of the next one. One is enough to tell
# it that the text has begun; the others are for decoders that look at their neighbours.
WINDOW_CONTEXT: Final = 4
# A character has at most four bytes, so that a longer run of ids without one is not going to
# become valid; emitting it keeps the window short.
WINDOW_MAX_PENDING: Final = 16


class Detokenizer(ABC):
    """One text being written. Made by `Tokenizer.detokenizer`."""

    @abstractmethod
    def push(self, ids: Sequence[int]) -> str:
        """The text that became certain with these ids; never half a character."""

    @abstractmethod
    def flush(self) -> str:
        """What is still held when no more ids will come; an unfinished character becomes `�`."""


class ByteDetokenizer(Detokenizer):
    def __init__(self, pieces: list[bytes]) -> None:
        self._pieces = pieces
        self._decoder = codecs.getincrementaldecoder("utf-8")(errors="replace")

    def push(self, ids: Sequence[int]) -> str:
        pieces, size = self._pieces, len(self._pieces)
        return self._decoder.decode(b"".join([pieces[n] for n in ids if 0 <= n < size]))

    def flush(self) -> str:
        return self._decoder.decode(b"", final=True)


class PieceDetokenizer(Detokenizer):
    """`pieces[id]` is a text, one raw byte (an int), or None for an id that is not shown."""

    def __init__(self, pieces: list[str | int | None], drop_leading_space: bool) -> None:
        self._pieces = pieces
        self._drop_leading_space = drop_leading_space
        self._run = bytearray()

    def push(self, ids: Sequence[int]) -> str:
        pieces, size = self._pieces, len(self._pieces)
        text = ""
        for n in ids:
            piece = pieces[n] if 0 <= n < size else None
            if piece is None:
                continue
            if isinstance(piece, int):
                self._run.append(piece)
                continue
            if self._run:
                text += self._end_run()
            text += piece
        return self._without_leading_space(text)

    def flush(self) -> str:
        return self._without_leading_space(self._end_run())

    def _end_run(self) -> str:
        run = bytes(self._run)
        self._run.clear()
        try:
            return run.decode("utf-8")
        except UnicodeDecodeError:
            return REPLACEMENT * len(run)

    def _without_leading_space(self, text: str) -> str:
        if self._drop_leading_space and text:
            self._drop_leading_space = False
            return text.removeprefix(" ")
        return text


class WindowDetokenizer(Detokenizer):
    """Asks the tokenizer itself: the text of a few ids with the new one, less that without it."""

    def __init__(
        self, tokenizer: tokenizers.Tokenizer, hidden: frozenset[int], after: Sequence[int]
    ) -> None:
        self._tokenizer = tokenizer
        self._hidden = hidden
        # self._ids = [context, whose text was handed out | pending, whose text was not]
        self._ids = [n for n in after if n not in hidden][-WINDOW_CONTEXT:]
        self._num_context = len(self._ids)
        self._context_text = self._decode(self._ids)

    def push(self, ids: Sequence[int]) -> str:
        return "".join([self._push_one(n) for n in ids if n not in self._hidden])

    def _push_one(self, new_id: int) -> str:
        self._ids.append(new_id)
        text = self._decode(self._ids)
        num_pending = len(self._ids) - self._num_context
        if text.endswith(REPLACEMENT) and num_pending < WINDOW_MAX_PENDING:
            return ""
        new_text = self._beyond_context(text)
        self._ids = self._ids[-WINDOW_CONTEXT:]
        self._num_context = len(self._ids)
        self._context_text = self._decode(self._ids)
        return new_text

    def flush(self) -> str:
        text = self._beyond_context(self._decode(self._ids))
        self._num_context = len(self._ids)
        self._context_text += text
        return text

    def _beyond_context(self, text: str) -> str:
        return text[len(self._context_text) :]

    def _decode(self, ids: list[int]) -> str:
        return self._tokenizer.decode(ids, skip_special_tokens=False)


class TokenTable:
    """What every id of one tokenizer contributes to a text; shared by all its detokenizers."""

    def __init__(self, tokenizer: tokenizers.Tokenizer) -> None:
        self._tokenizer = tokenizer
        self._steps = decoder_steps(tokenizer)
        added = tokenizer.get_added_tokens_decoder()
        self.special_ids = frozenset(n for n, token in added.items() if token.special)

    def detokenizer(self, skip_special_tokens: bool, after: Sequence[int]) -> Detokenizer:
        if self.is_byte_level:
            return ByteDetokenizer(self._spoken_bytes if skip_special_tokens else self._bytes)
        if self.is_sentencepiece:
            pieces = self._spoken_pieces if skip_special_tokens else self._pieces
            size = len(pieces)
            begun = any(0 <= n < size and pieces[n] is not None for n in after)
            return PieceDetokenizer(pieces, drop_leading_space=self._strips and not begun)
        hidden = self.special_ids if skip_special_tokens else frozenset()
        return WindowDetokenizer(self._tokenizer, hidden, after)

    def token_bytes(self, token_id: int) -> bytes | None:
        """The bytes of one token in the middle of a text; None for an id without a token."""
        token = self._tokenizer.id_to_token(token_id) if token_id >= 0 else None
        if token is None:
            return None
        if token_id in self.special_ids:
            return token.encode()
        if self.is_byte_level:
            return byte_level_bytes(token)
        return _piece_bytes(sentencepiece_piece(token))

    def all_bytes(self) -> list[bytes]:
        """What every id adds in the middle of a text, empty for an id without a token; of a
        tokenizer for which there is a table."""
        if self.is_byte_level:
            return self._bytes
        assert self.is_sentencepiece
        return [_piece_bytes(piece) for piece in self._pieces]

    @cached_property
    def is_byte_level(self) -> bool:
        return [step["type"] for step in self._steps] == ["ByteLevel"]

    @cached_property
    def is_sentencepiece(self) -> bool:
        """Replace `▁`, bytes, join and, in most, drop one space at the very beginning."""
        mark_to_space = {"type": "Replace", "pattern": {"String": SPACE_MARK}, "content": " "}
        steps = [mark_to_space, {"type": "ByteFallback"}, {"type": "Fuse"}]
        return self._steps[:3] == steps and (self._strips or len(self._steps) == 3)

    @property
    def _strips(self) -> bool:
        return self._steps[3:] == [{"type": "Strip", "content": " ", "start": 1, "stop": 0}]

    @cached_property
    def _bytes(self) -> list[bytes]:
        return [b"" if token is None else byte_level_bytes(token) for token in self._tokens()]

    @cached_property
    def _spoken_bytes(self) -> list[bytes]:
        return [b"" if n in self.special_ids else piece for n, piece in enumerate(self._bytes)]

    @cached_property
    def _pieces(self) -> list[str | int | None]:
        return [None if token is None else sentencepiece_piece(token) for token in self._tokens()]

    @cached_property
    def _spoken_pieces(self) -> list[str | int | None]:
        return [None if n in self.special_ids else piece for n, piece in enumerate(self._pieces)]

    def _tokens(self) -> list[str | None]:
        # The highest id can lie beyond the number of tokens: added tokens may leave gaps.
        size = max(self._tokenizer.get_vocab(with_added_tokens=True).values(), default=-1) + 1
        return [self._tokenizer.id_to_token(n) for n in range(size)]


def decoder_steps(tokenizer: tokenizers.Tokenizer) -> list[dict[str, Any]]:
    """The tokenizer's decoder as tokenizer.json writes it, a sequence unrolled into its steps."""
    if tokenizer.decoder is None:
        return []
    # The pickle state is that JSON; serialising the whole tokenizer would write the vocabulary.
    config = json.loads(tokenizer.decoder.__getstate__())
    return config["decoders"] if config["type"] == "Sequence" else [config]


def _byte_level_alphabet() -> dict[int, int]:
    """Character → byte for byte-level BPE: printable Latin-1 is itself, the rest follows U+0100."""
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = [byte for byte in range(256) if byte not in printable]
    alphabet = {byte: byte for byte in printable}
    alphabet |= {0x100 + position: byte for position, byte in enumerate(others)}
    return alphabet


BYTE_OF_CHARACTER: Final = _byte_level_alphabet()
# For str.translate: to the Latin-1 character of the byte. The unprintable Latin-1 characters are
# not in the alphabet: they go to one that Latin-1 cannot encode.
_TO_LATIN_1: Final = dict.fromkeys(range(256), 65535) | BYTE_OF_CHARACTER


def byte_level_bytes(token: str) -> bytes:
    """The bytes a byte-level token stands for; a token outside the alphabet is text as it is."""
    try:
        return token.translate(_TO_LATIN_1).encode("latin-1")
    except UnicodeEncodeError:
        return token.encode()


def _piece_bytes(piece: str | int | None) -> bytes:
    return bytes([piece]) if isinstance(piece, int) else (piece or "").encode()


def sentencepiece_piece(token: str) -> str | int:
    """The text of a token, or the byte's value for `<0xNN>`."""
    if len(token) == 6 and token.startswith("<0x") and token.endswith(">"):
        try:
            return int(token[3:5], 16)
        except ValueError:
            pass
    return token.replace(SPACE_MARK, " ")
