"""Detokenizers: convert token ids to text incrementally.

The texts of all `push` calls, joined with the text of `flush`, equal the text that `tokenizers`
decodes from the whole sequence. There are three detokenizers:

- `ByteDetokenizer`, for byte-level BPE: a table maps each id to bytes, and an incremental UTF-8
  decoder turns the bytes into characters.
- `PieceDetokenizer`, for SentencePiece-like vocabularies: a table maps each id to a text (`▁` is a
  space) or to one raw byte (`<0xE2>`). `tokenizers` decodes a run of raw bytes as a whole: to text
  if the run is valid UTF-8, otherwise to one `�` per byte. So a run is held until it ends.
- `WindowDetokenizer`, for all other vocabularies: calls `tokenizers` to decode the last few ids.
  The result is exact unless an id changes the text of earlier ids, as an invalid byte after valid
  bytes may.
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
# Number of earlier ids that are decoded with a new id. Decoders need at least one, to see that
# the new id does not begin the text. Some decoders need more, because the text of an id depends on
# its neighbours.
WINDOW_CONTEXT: Final = 4
# Number of ids after which an incomplete character is returned as `�`, to keep the window short. A
# character has at most four bytes, so after 16 ids the character is certainly invalid.
WINDOW_MAX_PENDING: Final = 16


class Detokenizer(ABC):
    """Converts the ids of one stream to text. Made by `Tokenizer.detokenizer`."""

    @abstractmethod
    def push(self, ids: Sequence[int]) -> str:
        """Add ids. Return the text that is now certain, in whole characters."""

    @abstractmethod
    def flush(self) -> str:
        """End the stream. Return the text still held; an unfinished character becomes `�`."""


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
    """A detokenizer for SentencePiece-like vocabularies.

    `pieces[id]` is a text, one raw byte (an int), or None for a hidden id.
    """

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
    """A detokenizer for any decoder: decodes the last few ids with and without the new id, and
    returns the difference."""

    def __init__(
        self,
        tokenizer: tokenizers.Tokenizer,
        hidden: frozenset[int],
        preceding_ids: Sequence[int],
    ) -> None:
        self._tokenizer = tokenizer
        self._hidden = hidden
        # [context ids, whose text has been returned | pending ids, whose text has not]
        self._ids = [n for n in preceding_ids if n not in hidden][-WINDOW_CONTEXT:]
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
    """The texts of all ids of a tokenizer. All detokenizers of the tokenizer share the table."""

    def __init__(self, tokenizer: tokenizers.Tokenizer) -> None:
        self._tokenizer = tokenizer
        self._steps = decoder_steps(tokenizer)
        added = tokenizer.get_added_tokens_decoder()
        self.special_ids = frozenset(n for n, token in added.items() if token.special)

    def detokenizer(self, skip_special_tokens: bool, preceding_ids: Sequence[int]) -> Detokenizer:
        """Return a detokenizer. `preceding_ids`: see `Tokenizer.detokenizer`."""
        if self.is_byte_level:
            return ByteDetokenizer(self._visible_bytes if skip_special_tokens else self._bytes)
        if self.is_sentencepiece:
            pieces = self._visible_pieces if skip_special_tokens else self._pieces
            size = len(pieces)
            has_begun = any(0 <= n < size and pieces[n] is not None for n in preceding_ids)
            return PieceDetokenizer(pieces, drop_leading_space=self._strips and not has_begun)
        hidden = self.special_ids if skip_special_tokens else frozenset()
        return WindowDetokenizer(self._tokenizer, hidden, preceding_ids)

    def token_bytes(self, token_id: int) -> bytes | None:
        """Return the bytes of one token, with its leading space; None for an id without a token."""
        token = self._tokenizer.id_to_token(token_id) if token_id >= 0 else None
        if token is None:
            return None
        if token_id in self.special_ids:
            return token.encode()
        if self.is_byte_level:
            return byte_level_bytes(token)
        return _piece_bytes(sentencepiece_piece(token))

    def all_bytes(self) -> list[bytes]:
        """Return the bytes of every id, with leading spaces; empty for an id without a token.

        Only for byte-level and SentencePiece-like tokenizers.
        """
        if self.is_byte_level:
            return self._bytes
        assert self.is_sentencepiece
        return [_piece_bytes(piece) for piece in self._pieces]

    @cached_property
    def is_byte_level(self) -> bool:
        return [step["type"] for step in self._steps] == ["ByteLevel"]

    @cached_property
    def is_sentencepiece(self) -> bool:
        """Return whether the decoder has the steps of a SentencePiece decoder."""
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
    def _visible_bytes(self) -> list[bytes]:
        return [b"" if n in self.special_ids else piece for n, piece in enumerate(self._bytes)]

    @cached_property
    def _pieces(self) -> list[str | int | None]:
        return [None if token is None else sentencepiece_piece(token) for token in self._tokens()]

    @cached_property
    def _visible_pieces(self) -> list[str | int | None]:
        return [None if n in self.special_ids else piece for n, piece in enumerate(self._pieces)]

    def _tokens(self) -> list[str | None]:
        # The highest id may exceed the number of tokens, because added tokens may leave gaps.
        size = max(self._tokenizer.get_vocab(with_added_tokens=True).values(), default=-1) + 1
        return [self._tokenizer.id_to_token(n) for n in range(size)]


def decoder_steps(tokenizer: tokenizers.Tokenizer) -> list[dict[str, Any]]:
    """Return the decoder's steps as in tokenizer.json: the members of a "Sequence", or the decoder
    itself as the only step."""
    if tokenizer.decoder is None:
        return []
    # The pickle state of a decoder is its JSON (a tokenizer's JSON also has the vocabulary).
    config = json.loads(tokenizer.decoder.__getstate__())
    return config["decoders"] if config["type"] == "Sequence" else [config]


def _byte_level_alphabet() -> dict[int, int]:
    """Return the map from character to byte of byte-level BPE. Bytes that are printable Latin-1
    characters have these characters; the other bytes have characters from U+0100 on."""
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = [byte for byte in range(256) if byte not in printable]
    alphabet = {byte: byte for byte in printable}
    alphabet |= {0x100 + position: byte for position, byte in enumerate(others)}
    return alphabet


BYTE_OF_CHARACTER: Final = _byte_level_alphabet()
# For str.translate: character → the Latin-1 character of its byte. Unprintable Latin-1 characters
# are not in the alphabet and map to a character that Latin-1 cannot encode.
_TO_LATIN_1: Final = dict.fromkeys(range(256), 65535) | BYTE_OF_CHARACTER


def byte_level_bytes(token: str) -> bytes:
    """Return the bytes of a byte-level token. A token outside the alphabet is plain text."""
    try:
        return token.translate(_TO_LATIN_1).encode("latin-1")
    except UnicodeEncodeError:
        return token.encode()


def _piece_bytes(piece: str | int | None) -> bytes:
    return bytes([piece]) if isinstance(piece, int) else (piece or "").encode()


def sentencepiece_piece(token: str) -> str | int:
    """Return the text of a token, or the byte value of `<0xNN>`."""
    if len(token) == 6 and token.startswith("<0x") and token.endswith(">"):
        try:
            return int(token[3:5], 16)
        except ValueError:
            pass
    return token.replace(SPACE_MARK, " ")
