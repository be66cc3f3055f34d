"""The tokenizer of a model: text ↔ token ids, special tokens, stop tokens and the chat template.

It is read from a model folder's tokenizer.json and the files beside it, or from a GGUF header.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from functools import cached_property, partial
from pathlib import Path
from typing import Any, Final

import tokenizers
from tokenizers import AddedToken

from twostroke.errors import ModelError, RequestError
from twostroke.model.describe.spec import VOCABULARY
from twostroke.model.fields import Fields, read_json, shown
from twostroke.model.text.detokenizer import Detokenizer, TokenTable
from twostroke.model.text.gguf_vocab import MAX_TEMPLATE_CHARS, vocab_from_gguf
from twostroke.model.text.limited_encoder import OWN_USER, LimitedEncoder
from twostroke.model.text.template_source import choose_template
from twostroke.model.text.tokenizer_json import library_error, read_backend
from twostroke.model.text.tokenizer_work import unlimited_chars

# Tokens that end a turn, a message or a text in known families. A token of this list counts only if
# it is a special token of the vocabulary; otherwise it is text.
END_TOKENS: Final = (
    "<|im_end|>",
    "<|eot_id|>",
    "<|eom_id|>",
    "<|end_of_text|>",
    "<|endoftext|>",
    "<|end_of_turn|>",
    "<end_of_turn>",
    "<|end|>",
    "<|eot|>",
    "<EOT>",
)
LONG: Final = 4096  # ids; longer sequences are decoded as a batch, which releases the GIL
MAX_DECODED_CHARS: Final = 1 << 26
NAMED_TOKENS: Final = ("bos_token", "eos_token", "unk_token", "pad_token")
ADDED_TOKEN_FLAGS: Final = ("single_word", "lstrip", "rstrip", "normalized", "special")


class Tokenizer:
    def __init__(
        self,
        backend: tokenizers.Tokenizer,
        bos_id: int | None = None,
        eos_id: int | None = None,
        end_ids: Iterable[int] = (),
        chat_template: str | None = None,
    ) -> None:
        """`end_ids`: stop tokens besides `eos_id` and `END_TOKENS`."""
        # A tokenizer.json keeps training settings, which would truncate or pad prompts.
        backend.no_truncation()
        backend.no_padding()
        self._backend = backend
        self.bos_id = bos_id
        self.eos_id = eos_id
        self.chat_template = chat_template
        self.encoder_limits = OWN_USER  # for texts that another process encodes
        # The length of the texts that this process encodes; None: any length.
        self._unlimited_chars = unlimited_chars(backend)
        self.vocab_size: int = backend.get_vocab_size(with_added_tokens=True)
        self.stop_ids = frozenset(end_ids) | self._well_known_end_ids()
        if eos_id is not None:
            self.stop_ids |= {eos_id}

    @classmethod
    def from_folder(cls, path: Path) -> Tokenizer:
        return _from_folder(path)

    @classmethod
    def from_gguf(cls, metadata: Mapping[str, Any], where: str = "the GGUF header") -> Tokenizer:
        """Return the tokenizer of a GGUF header. `where`: the file, for messages."""
        vocab = vocab_from_gguf(metadata, where)
        return cls(vocab.tokenizer, vocab.bos_id, vocab.eos_id, vocab.end_ids, vocab.chat_template)

    @property
    def bos_token(self) -> str:
        """The text of `bos_id` for a chat template, empty if there is none."""
        return self._token(self.bos_id)

    @property
    def eos_token(self) -> str:
        return self._token(self.eos_id)

    def encode(self, text: str, add_special_tokens: bool = True) -> list[int]:
        """Return the ids of a text. The text of a special token becomes its id.

        A rendered chat template contains its special tokens. Encode it with
        `add_special_tokens=False`; otherwise it gets a second BOS token.
        """
        limit = self._unlimited_chars
        if limit is not None and isinstance(text, str) and len(text) > limit:
            return self._limited_encoder.encode(_without_surrogates(text), add_special_tokens)
        try:
            # No other call of the library releases the GIL and computes no offsets.
            (found,) = self._backend.encode_batch_fast(
                [text], add_special_tokens=add_special_tokens
            )
        except (TypeError, UnicodeEncodeError):
            if not isinstance(text, str):
                raise
            _without_surrogates(text)
            raise
        except BaseException as error:
            problem = library_error(error)
            raise RequestError(
                f"the model's tokenizer cannot read this text ({problem}). Give another tokenizer "
                "with --tokenizer FOLDER."
            ) from None
        ids: list[int] = found.ids
        return ids

    def decode(self, ids: Sequence[int], skip_special_tokens: bool = True) -> str:
        """Return the text of ids. Raises `RequestError` if it would be too long."""
        lengths = self._token_chars
        if len(ids) * max(lengths, default=0) > MAX_DECODED_CHARS:
            num_chars = sum(lengths[n] for n in ids if 0 <= n < len(lengths))
            if num_chars > MAX_DECODED_CHARS:
                raise RequestError(
                    f"the {len(ids):,} tokens have {num_chars:,} characters, and at most "
                    f"{MAX_DECODED_CHARS:,} are decoded at once; send fewer tokens"
                )
        if len(ids) <= LONG:
            text: str = self._backend.decode(ids, skip_special_tokens=skip_special_tokens)
        else:
            (text,) = self._backend.decode_batch([ids], skip_special_tokens=skip_special_tokens)
        return text

    def to_json(self) -> str:
        """Return the tokenizer as the text of a tokenizer.json."""
        text: str = self._backend.to_str()
        return text

    def token_text(self, token_id: int) -> str:
        """Return a readable text of one token. A part of a character is written as bytes."""
        raw = self._table.token_bytes(token_id)
        if raw is None:  # a model may have more embedding rows than its vocabulary has tokens
            return f"<token {token_id}>"
        try:
            return raw.decode()
        except UnicodeDecodeError:
            return "bytes:" + "".join(f"\\x{byte:02x}" for byte in raw)

    def vocabulary_entry(self, token_id: int) -> str:
        """Return the vocabulary entry of a token ("Ġthe"); empty if there is no such token."""
        return self._token(token_id)

    @property
    def special_tokens(self) -> dict[int, str]:
        added = self._backend.get_added_tokens_decoder().items()
        return {token_id: token.content for token_id, token in added if token.special}

    def token_bytes(self, token_id: int) -> bytes:
        """Return the bytes that one token adds to a text. They may be a part of a character."""
        return self._table.token_bytes(token_id) or b""

    def detokenizer(
        self, skip_special_tokens: bool = True, preceding_ids: Sequence[int] = ()
    ) -> Detokenizer:
        """Return a detokenizer for one stream of ids.

        `preceding_ids`: the ids of the text that the stream continues, such as the prompt of a
        completion. The space before the first word is kept after such ids, and dropped without
        them.
        """
        return self._table.detokenizer(skip_special_tokens, preceding_ids)

    def close(self) -> None:
        """End the helper process, if there is one; the next text starts another."""
        if "_limited_encoder" in self.__dict__:
            self._limited_encoder.close()

    @cached_property
    def _limited_encoder(self) -> LimitedEncoder:
        return LimitedEncoder(self._backend, self.encoder_limits)

    @cached_property
    def _token_chars(self) -> list[int]:
        """The length of each token's entry in the vocabulary."""
        ids = self._backend.get_vocab(with_added_tokens=True)
        lengths = [0] * (max(ids.values(), default=-1) + 1)
        for text, token_id in ids.items():
            lengths[token_id] = len(text)
        return lengths

    @cached_property
    def _table(self) -> TokenTable:
        return TokenTable(self._backend)

    def _token(self, token_id: int | None) -> str:
        token = None if token_id is None else self._backend.id_to_token(token_id)
        return token or ""

    def _well_known_end_ids(self) -> frozenset[int]:
        added = self._backend.get_added_tokens_decoder().items()
        return frozenset(n for n, token in added if token.special and token.content in END_TOKENS)


def _without_surrogates(text: str) -> str:
    """Return the text; raise `RequestError` if it cannot be encoded in UTF-8."""
    try:
        text.encode()
    except UnicodeEncodeError:
        raise RequestError(
            "the text holds half of a surrogate pair (\\ud800 to \\udfff), which is no character; "
            "send the whole character."
        ) from None
    return text


def _from_folder(folder: Path) -> Tokenizer:
    folder = Path(folder)
    path = folder / "tokenizer.json"
    if not path.is_file():
        raise ModelError(
            f"{folder}: no tokenizer.json there. A folder with another kind of tokenizer (such as "
            "a SentencePiece tokenizer.model) can be converted by saving it with transformers' "
            "AutoTokenizer; or give a folder that has one with --tokenizer FOLDER."
        )
    backend = read_backend(path)
    settings = _read(folder / "tokenizer_config.json")
    names = _Names(_read(folder / "special_tokens_map.json"), settings)
    _add_declared_tokens(backend, settings.nested("added_tokens_decoder"))
    _mark_special_tokens(backend, names)
    configs = [_read(folder / name) for name in ("generation_config.json", "config.json")]
    bos_ids = _declared_ids(backend, names, "bos", configs)
    eos_ids = _declared_ids(backend, names, "eos", configs)
    return Tokenizer(
        backend,
        bos_id=bos_ids[0] if bos_ids else None,
        eos_id=eos_ids[0] if eos_ids else None,
        end_ids=[n for config in configs for n in _ids(config, "eos_token_id")],
        chat_template=_read_chat_template(folder, settings),
    )


def _read(path: Path) -> Fields:
    """Return the fields of a JSON file, empty if there is no such file."""
    return Fields(str(path), read_json(path, missing_ok=True))


class _Names:
    """The special tokens that tokenizer_config.json names, otherwise special_tokens_map.json."""

    def __init__(self, special_tokens_map: Fields, settings: Fields) -> None:
        self._files = (settings, special_tokens_map)

    def declares(self, name: str) -> bool:
        """Return whether a file has the entry, even as null."""
        return any(name in file or file.is_null(name) for file in self._files)

    def token(self, name: str) -> str | None:
        for file in self._files:
            if name in file or file.is_null(name):
                return _content(file, name, file.value(name))
        return None

    def additional(self) -> list[str]:
        name = "additional_special_tokens"
        for file in self._files:
            if name in file:
                entries = file.items(name, (str, dict), "tokens")
                return [text for entry in entries if (text := _content(file, name, entry))]
        return []


def _content(fields: Fields, name: str, entry: Any) -> str | None:
    """Return the text of a token entry, which is a text or an object with a text."""
    content = entry.get("content") if isinstance(entry, dict) else entry
    if content is not None and not isinstance(content, str):
        fields.refuse(name, "a token: a text, an object with a text as its 'content', or null")
    return content


def _add_declared_tokens(backend: tokenizers.Tokenizer, declared: Fields) -> None:
    """Add the tokens that tokenizer_config.json lists by id and tokenizer.json lacks."""
    added = backend.get_added_tokens_decoder()
    for token_id in sorted(map(partial(_token_id, declared), declared.names())):
        entry = declared.nested(str(token_id))
        content = entry.string("content", "", longest=1 << 14)
        if not content or token_id in added:
            continue
        is_next = backend.token_to_id(content) is None and token_id == backend.get_vocab_size()
        if is_next or backend.token_to_id(content) == token_id:
            flags = {
                name: entry.boolean(name, False) for name in ADDED_TOKEN_FLAGS if name in entry
            }
            backend.add_tokens([AddedToken(content, **flags)])


def _token_id(declared: Fields, name: str) -> int:
    if not (name.isascii() and name.isdigit() and len(name) < 8 and int(name) < VOCABULARY[1]):
        raise ModelError(
            f"{declared.where}: {shown(name)} must be a token id, a whole number from 0 to "
            f"{VOCABULARY[1] - 1}."
        )
    return int(name)


def _mark_special_tokens(backend: tokenizers.Tokenizer, names: _Names) -> None:
    """Mark the tokens that the settings name as special tokens.

    Tokens without an id are ignored: the model has no embedding row for them.
    """
    added = backend.get_added_tokens_decoder()
    for content in (*map(names.token, NAMED_TOKENS), *names.additional()):
        token_id = backend.token_to_id(content) if content else None
        if content and token_id is not None and not (token_id in added and added[token_id].special):
            backend.add_tokens([AddedToken(content, normalized=False, special=True)])


def _declared_ids(
    backend: tokenizers.Tokenizer, names: _Names, kind: str, configs: Sequence[Fields]
) -> list[int]:
    """Return the ids of a named token, from the tokenizer's entry (even if it is null) or, without
    an entry, from the model's configs."""
    if names.declares(f"{kind}_token"):
        content = names.token(f"{kind}_token")
        token_id = backend.token_to_id(content) if content else None
        return [] if token_id is None else [token_id]
    return [n for config in configs for n in _ids(config, f"{kind}_token_id")]


def _ids(config: Fields, name: str) -> list[int]:
    """Return the ids of a field: one id, a list, or none. Negative ids are ignored."""
    value = config.value(name)
    values = value if isinstance(value, list) else [] if value is None else [value]
    if not set(map(type, values)) <= {int} or max(values, default=0) >= VOCABULARY[1]:
        config.refuse(name, f"a token id from 0 to {VOCABULARY[1] - 1}, or a list of them")
    return [n for n in values if n >= 0]


def _read_chat_template(folder: Path, settings: Fields) -> str | None:
    path = folder / "chat_template.jinja"
    if path.is_file():
        try:
            if path.stat().st_size > 4 * MAX_TEMPLATE_CHARS:
                raise ModelError(
                    f"{path}: the chat template has more than {MAX_TEMPLATE_CHARS} "
                    "characters. Give another one with --chat-template FILE."
                )
            return path.read_text(encoding="utf-8")
        except (OSError, UnicodeDecodeError) as error:
            raise ModelError(f"{path}: cannot be read as a text ({error}).") from None
    if not isinstance(settings.value("chat_template"), list):
        template: str | None = settings.string("chat_template", None, longest=MAX_TEMPLATE_CHARS)
        return template
    named = {}
    for entry in settings.items("chat_template", dict, "objects with a name and a template"):
        one = Fields(f"{settings.where}: chat_template", entry)
        name = one.string("name", longest=1024)
        named[name] = one.string("template", longest=MAX_TEMPLATE_CHARS)
    return choose_template(named)
