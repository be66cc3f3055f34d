"""Text ↔ token ids, and what a model's tokenizer files say about a chat.

Reads a model folder's tokenizer.json with the files around it, or the header of a GGUF file.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence
from functools import cached_property
from pathlib import Path
from typing import Any, Final

import tokenizers
from tokenizers import AddedToken

from twostroke.errors import ModelError, RequestError
from twostroke.model.chat_template import choose_template
from twostroke.model.detokenizer import Detokenizer, TokenTable
from twostroke.model.gguf_vocab import vocab_from_gguf

# What ends a turn, a message or a text in the families we know. It counts only where the
# vocabulary has it as a special token: written out of ordinary tokens it is just text.
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
LONG: Final = 4096  # ids; from here on as a batch, which lets other threads run
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
        """`end_ids` are stops besides `eos_id` and the well-known ends of a turn."""
        # A tokenizer.json keeps the settings of its training, which would cut or pad prompts.
        backend.no_truncation()
        backend.no_padding()
        self._backend = backend
        self.bos_id = bos_id
        self.eos_id = eos_id
        self.chat_template = chat_template
        self.vocab_size: int = backend.get_vocab_size(with_added_tokens=True)
        self.stop_ids = frozenset(end_ids) | self._well_known_end_ids()
        if eos_id is not None:
            self.stop_ids |= {eos_id}

    @classmethod
    def from_folder(cls, path: Path) -> Tokenizer:
        return _from_folder(path)

    @classmethod
    def from_gguf(cls, metadata: Mapping[str, Any]) -> Tokenizer:
        vocab = vocab_from_gguf(metadata)
        return cls(vocab.tokenizer, vocab.bos_id, vocab.eos_id, vocab.end_ids, vocab.chat_template)

    @property
    def bos_token(self) -> str:
        """The text of `bos_id`, empty if there is none: what a chat template is given."""
        return self._token(self.bos_id)

    @property
    def eos_token(self) -> str:
        return self._token(self.eos_id)

    def encode(self, text: str, add_special_tokens: bool = True) -> list[int]:
        """Special tokens written in the text become their ids.

        A rendered chat template holds its special tokens already: encode it with
        `add_special_tokens=False`, or it begins twice.
        """
        try:
            # Of the backend's calls this one lets other threads run, and keeps no offsets.
            (found,) = self._backend.encode_batch_fast(
                [text], add_special_tokens=add_special_tokens
            )
        except (TypeError, UnicodeEncodeError):
            if not isinstance(text, str):
                raise
            raise RequestError(
                "the text holds half of a surrogate pair (\\ud800 to \\udfff), which is no "
                "character; send the whole character."
            ) from None
        ids: list[int] = found.ids
        return ids

    def decode(self, ids: Sequence[int], skip_special_tokens: bool = True) -> str:
        if len(ids) <= LONG:
            text: str = self._backend.decode(ids, skip_special_tokens=skip_special_tokens)
        else:
            (text,) = self._backend.decode_batch([ids], skip_special_tokens=skip_special_tokens)
        return text

    def to_json(self) -> str:
        """The whole tokenizer as the text of a tokenizer.json."""
        text: str = self._backend.to_str()
        return text

    def token_text(self, token_id: int) -> str:
        """One token as people read it; part of a character is written as its bytes."""
        raw = self._table.token_bytes(token_id)
        if raw is None:  # a model may have more rows than its vocabulary has tokens
            return f"<token {token_id}>"
        try:
            return raw.decode()
        except UnicodeDecodeError:
            return "bytes:" + "".join(f"\\x{byte:02x}" for byte in raw)

    def token_bytes(self, token_id: int) -> bytes:
        """What one token adds to a text, which need not be whole characters."""
        return self._table.token_bytes(token_id) or b""

    def detokenizer(
        self, skip_special_tokens: bool = True, after: Sequence[int] = ()
    ) -> Detokenizer:
        """A text to be written id by id.

        `after` are the ids that the text continues, as a completion does its prompt: then a
        space before its first word is kept where a text of its own would begin without.
        """
        return self._table.detokenizer(skip_special_tokens, after)

    @cached_property
    def _table(self) -> TokenTable:
        return TokenTable(self._backend)

    def _token(self, token_id: int | None) -> str:
        token = None if token_id is None else self._backend.id_to_token(token_id)
        return token or ""

    def _well_known_end_ids(self) -> frozenset[int]:
        added = self._backend.get_added_tokens_decoder().items()
        return frozenset(n for n, token in added if token.special and token.content in END_TOKENS)


def _from_folder(folder: Path) -> Tokenizer:
    folder = Path(folder)
    backend = _read_backend(folder)
    settings = _read_json(folder / "tokenizer_config.json")
    names = _read_json(folder / "special_tokens_map.json") | settings
    _add_declared_tokens(backend, settings.get("added_tokens_decoder") or {})
    _mark_special_tokens(backend, names)
    configs = [_read_json(folder / name) for name in ("generation_config.json", "config.json")]
    bos_ids = _declared_ids(backend, names, "bos", configs)
    eos_ids = _declared_ids(backend, names, "eos", configs)
    return Tokenizer(
        backend,
        bos_id=bos_ids[0] if bos_ids else None,
        eos_id=eos_ids[0] if eos_ids else None,
        end_ids=[n for config in configs for n in _ids(config.get("eos_token_id"))],
        chat_template=_read_chat_template(folder, settings),
    )


def _read_backend(folder: Path) -> tokenizers.Tokenizer:
    path = folder / "tokenizer.json"
    if not path.is_file():
        raise ModelError(
            f"{folder}: no tokenizer.json there. A folder with another kind of tokenizer (such as "
            "a SentencePiece tokenizer.model) can be converted by saving it with transformers' "
            "AutoTokenizer; or give a folder that has one with --tokenizer FOLDER."
        )
    try:
        return tokenizers.Tokenizer.from_file(str(path))
    except Exception as error:  # tokenizers raises nothing more particular
        raise ModelError(
            f"{path}: cannot be read as a tokenizer ({error}). Fetch the file again, or give "
            "another one with --tokenizer FOLDER."
        ) from None


def _read_json(path: Path) -> dict[str, Any]:
    """The settings in a file, none if there is no such file."""
    try:
        settings = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        return {}
    except (ValueError, OSError) as error:
        raise ModelError(f"{path}: cannot be read as JSON ({error}). Fetch it again.") from None
    if not isinstance(settings, dict):
        raise ModelError(f"{path}: expected a JSON object. Fetch it again.")
    return settings


def _add_declared_tokens(backend: tokenizers.Tokenizer, declared: Mapping[str, Any]) -> None:
    """Tokens that tokenizer_config.json lists by id and tokenizer.json does not."""
    added = backend.get_added_tokens_decoder()
    for token_id in sorted(map(int, declared)):
        entry = declared[str(token_id)]
        content = _content(entry)
        if not content or token_id in added:
            continue
        is_next = backend.token_to_id(content) is None and token_id == backend.get_vocab_size()
        if is_next or backend.token_to_id(content) == token_id:
            flags = {name: bool(entry[name]) for name in ADDED_TOKEN_FLAGS if name in entry}
            backend.add_tokens([AddedToken(content, **flags)])


def _mark_special_tokens(backend: tokenizers.Tokenizer, names: Mapping[str, Any]) -> None:
    """What the settings call special is special, even where tokenizer.json does not say so.

    Tokens without an id are left out: the model has no row for them.
    """
    added = backend.get_added_tokens_decoder()
    for entry in (*map(names.get, NAMED_TOKENS), *(names.get("additional_special_tokens") or ())):
        content = _content(entry)
        token_id = backend.token_to_id(content) if content else None
        if content and token_id is not None and not (token_id in added and added[token_id].special):
            backend.add_tokens([AddedToken(content, normalized=False, special=True)])


def _content(entry: Any) -> str | None:
    """A token is written as its text or as an object that holds the text."""
    content = entry.get("content") if isinstance(entry, dict) else entry
    return content if isinstance(content, str) else None


def _declared_ids(
    backend: tokenizers.Tokenizer,
    names: Mapping[str, Any],
    kind: str,
    configs: Sequence[Mapping[str, Any]],
) -> list[int]:
    """The tokenizer's own word, also if it is null; the model's settings if it says nothing."""
    if f"{kind}_token" in names:
        content = _content(names[f"{kind}_token"])
        token_id = backend.token_to_id(content) if content else None
        return [] if token_id is None else [token_id]
    return [n for config in configs for n in _ids(config.get(f"{kind}_token_id"))]


def _ids(value: Any) -> list[int]:
    values = value if isinstance(value, list) else [value]
    return [n for n in values if isinstance(n, int) and not isinstance(n, bool) and n >= 0]


def _read_chat_template(folder: Path, settings: Mapping[str, Any]) -> str | None:
    path = folder / "chat_template.jinja"
    if path.is_file():
        return path.read_text(encoding="utf-8")
    template = settings.get("chat_template")
    if isinstance(template, list):
        return choose_template({entry["name"]: entry["template"] for entry in template})
    return template if isinstance(template, str) else None
