"""`vocab_from_gguf`: reads the tokenizer in a GGUF header. Unsupported kinds are refused."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final

import tokenizers
from tokenizers import AddedToken, decoders, models, normalizers, processors

from twostroke.errors import ModelError, did_you_mean
from twostroke.model.fields import Fields, shown
from twostroke.model.text.detokenizer import SPACE_MARK
from twostroke.model.text.pre_tokenizers import PRE_TOKENIZERS, pre_tokenizer_of
from twostroke.model.text.template_source import choose_template

NORMAL, UNKNOWN, CONTROL, USER_DEFINED = 1, 2, 3, 4  # token_type; 5 is unused, 6 a byte
ADVICE: Final = (
    "Give a tokenizer.json of the model instead: --tokenizer FOLDER, or use another GGUF."
)

# Tokens of known models have 7 characters on average and at most a few hundred (runs of spaces).
# The time to find all splits of a SentencePiece token grows with the square of its length.
MAX_TOKEN_CHARS: Final = 1024
MAX_VOCAB_CHARS: Final = 1 << 23  # of all tokens together
MAX_TEMPLATE_CHARS: Final = 1 << 20


@dataclass(frozen=True)
class GGUFVocab:
    tokenizer: tokenizers.Tokenizer
    bos_id: int | None
    eos_id: int | None
    end_ids: frozenset[int]  # tokens that end a text, a turn or a message
    chat_template: str | None


def vocab_from_gguf(metadata: Mapping[str, Any], where: str = "the GGUF header") -> GGUFVocab:
    """Return the vocabulary of a GGUF header. `where`: the file, for messages."""
    header = _VocabHeader(metadata, where)
    tokenizer = _sentencepiece_bpe(header) if header.is_sentencepiece else _byte_level_bpe(header)
    _add_tokens(tokenizer, header)
    _add_bos_and_eos(tokenizer, header)
    return GGUFVocab(
        tokenizer=tokenizer,
        bos_id=header.bos_id,
        eos_id=header.eos_id,
        end_ids=header.end_ids,
        chat_template=_chat_template(metadata, where),
    )


class _VocabHeader(Fields):
    """The `tokenizer.ggml.*` keys, checked."""

    def __init__(self, metadata: Mapping[str, Any], where: str) -> None:
        super().__init__(where, metadata, prefix="tokenizer.ggml.")
        kind = self.value("model")
        if kind not in ("gpt2", "llama"):
            raise ModelError(
                f"{where}: holds a vocabulary of the kind {shown(kind)} (tokenizer.ggml.model), "
                f"which is not supported. Supported: 'gpt2', 'llama'. {ADVICE}"
            )
        self.is_sentencepiece = kind == "llama"
        self.adds_space = self.is_sentencepiece and self.boolean("add_space_prefix", True)
        self.tokens: list[str] = self.items("tokens", str, "texts")
        if not self.tokens:
            raise ModelError(f"{where}: has no tokenizer.ggml.tokens. {ADVICE}")
        self._check_lengths()
        self.types: list[int] = self.array("token_type", int, [NORMAL] * len(self.tokens))
        # SentencePiece models begin with <unk> <s> </s>, and their headers may omit these ids.
        usual = (1, 2) if self.is_sentencepiece else (None, None)
        self.bos_id = self.token_id("bos_token_id", usual[0])
        self.eos_id = self.token_id("eos_token_id", usual[1])
        ends = (self.eos_id, self.token_id("eot_token_id"), self.token_id("eom_token_id"))
        self.end_ids = frozenset(n for n in ends if n is not None)

    def array(self, name: str, kind: type, default: list[Any] | None = None) -> list[Any]:
        """Return a list with one value per token."""
        values = self.items(name, kind, f"{kind.__name__} values, one for each token")
        if name not in self and default is not None:
            return default
        if len(values) != len(self.tokens):
            found = str(len(values)) if name in self else "none"
            raise ModelError(
                f"{self.where}: has {len(self.tokens)} tokenizer.ggml.tokens, so it must have the "
                f"same number of values in tokenizer.ggml.{name}; it has {found}. {ADVICE}"
            )
        return values

    def token_id(self, name: str, default: int | None = None) -> int | None:
        if name not in self:
            return default if default is not None and default < len(self.tokens) else None
        token_id: int = self.integer(name, 0, len(self.tokens) - 1)
        return token_id

    def _check_lengths(self) -> None:
        lengths = [len(token) for token in self.tokens]
        longest, total = max(lengths), sum(lengths)
        if longest > MAX_TOKEN_CHARS:
            raise ModelError(
                f"{self.where}: token {lengths.index(longest)} of tokenizer.ggml.tokens has "
                f"{longest} characters; the limit is {MAX_TOKEN_CHARS}. {ADVICE}"
            )
        if total > MAX_VOCAB_CHARS:
            raise ModelError(
                f"{self.where}: tokenizer.ggml.tokens has {total} characters in all; the limit is "
                f"{MAX_VOCAB_CHARS}. {ADVICE}"
            )

    def vocab(self) -> dict[str, int]:
        """Return token → id. The first id of a repeated token counts."""
        vocab: dict[str, int] = {}
        for token_id, token in enumerate(self.tokens):
            vocab.setdefault(token, token_id)
        return vocab


def _byte_level_bpe(header: _VocabHeader) -> tokenizers.Tokenizer:
    named = header.string("pre", "default", longest=64)
    kind = PRE_TOKENIZERS.get(named)
    if kind is None:
        known = ", ".join(sorted(PRE_TOKENIZERS))
        hint = did_you_mean(named, PRE_TOKENIZERS) or "."
        raise ModelError(
            f"{header.where}: names the pre-tokenizer {named!r} (tokenizer.ggml.pre), which is "
            f"not supported{hint} Supported: {known}. {ADVICE}"
        )
    tokenizer = _bpe(header, _merges(header), ignore_merges=kind.ignore_merges)
    if kind.nfc:
        tokenizer.normalizer = normalizers.NFC()
    tokenizer.pre_tokenizer = pre_tokenizer_of(kind)
    tokenizer.decoder = decoders.ByteLevel()
    return tokenizer


def _merges(header: _VocabHeader) -> list[tuple[str, str]]:
    cut = (merge.partition(" ") for merge in header.items("merges", str, "texts"))
    pairs = [(left, right) for left, _, right in cut]
    if not pairs or not all(right for _, right in pairs):
        raise ModelError(
            f"{header.where}: tokenizer.ggml.merges should list the merges of the byte-level "
            f"vocabulary, each as two tokens separated by a space. {ADVICE}"
        )
    return pairs


def _sentencepiece_bpe(header: _VocabHeader) -> tokenizers.Tokenizer:
    unknown_id = header.token_id("unknown_token_id", 0)
    scores = header.array("scores", float)
    if not all(map(math.isfinite, scores)):
        header.refuse("scores", "a list of finite numbers")
    tokenizer = _bpe(
        header,
        merges_from_scores(header.tokens, header.types, scores, header.adds_space),
        unk_token=None if unknown_id is None else header.tokens[unknown_id],
        fuse_unk=True,
        byte_fallback=True,
    )
    # Each text segment between special tokens gets its own leading space.
    marks = [normalizers.Prepend(SPACE_MARK)] if header.adds_space else []
    tokenizer.normalizer = normalizers.Sequence([*marks, normalizers.Replace(" ", SPACE_MARK)])
    steps = [decoders.Replace(SPACE_MARK, " "), decoders.ByteFallback(), decoders.Fuse()]
    if header.adds_space:
        steps.append(decoders.Strip(" ", 1, 0))
    tokenizer.decoder = decoders.Sequence(steps)
    return tokenizer


def merges_from_scores(
    tokens: Sequence[str], types: Sequence[int], scores: Sequence[float], adds_space: bool
) -> list[tuple[str, str]]:
    """Return the merges of a SentencePiece vocabulary, which has scores instead of merges.

    SentencePiece joins the two neighbours whose union has the best score. So every way to split a
    piece into two pieces is a merge, ranked by the score of the whole. With `adds_space`,
    user-defined tokens that contain a space are merged too: see `_add_tokens`.
    """
    mergeable = {
        token: token_id
        for token_id, token in enumerate(tokens)
        if types[token_id] == NORMAL or (adds_space and _has_space_mark(token, types[token_id]))
    }
    ranked = [
        (-float(scores[whole_id]), whole_id, mergeable[left], mergeable[right])
        for whole, whole_id in mergeable.items()
        for cut in range(1, len(whole))
        if (left := whole[:cut]) in mergeable and (right := whole[cut:]) in mergeable
    ]
    return [(tokens[left], tokens[right]) for _, _, left, right in sorted(ranked)]


def _has_space_mark(token: str, kind: int) -> bool:
    """Return whether a token is user-defined and contains a space of the normalised text."""
    return kind == USER_DEFINED and SPACE_MARK in token


def _bpe(
    header: _VocabHeader, merges: list[tuple[str, str]], **settings: Any
) -> tokenizers.Tokenizer:
    try:
        return tokenizers.Tokenizer(models.BPE(vocab=header.vocab(), merges=merges, **settings))
    except Exception as error:  # tokenizers raises no narrower class
        raise ModelError(
            f"{header.where}: tokenizer.ggml.tokens and tokenizer.ggml.merges do not fit together "
            f"({error}). {ADVICE}"
        ) from None


def _add_tokens(tokenizer: tokenizers.Tokenizer, header: _VocabHeader) -> None:
    """Add control and user-defined tokens, which are matched in a text before merges.

    SentencePiece matches user-defined tokens in the normalised text, where a space is `▁`. The
    `tokenizers` library normalises such a token like a text: if the vocabulary adds a space before
    each text, the library would also add a space before the token. With such a vocabulary,
    user-defined tokens are matched in the raw text, and tokens with `▁` are made by merges instead.
    """
    in_normalised = header.is_sentencepiece and not header.adds_space
    # An end token is a control token, even if its token_type says normal. Other tokens have the
    # type of their token_type: a header may name an ordinary character as its padding token.
    added = []
    for token_id, token in enumerate(header.tokens):
        kind = header.types[token_id]
        special = kind in (UNKNOWN, CONTROL) or token_id in header.end_ids
        merged = header.is_sentencepiece and header.adds_space and _has_space_mark(token, kind)
        matched = special or (kind == USER_DEFINED and not merged)
        if token and matched:
            normalized = in_normalised and not special
            added.append(AddedToken(token, normalized=normalized, special=special))
    tokenizer.add_tokens(added)


def _add_bos_and_eos(tokenizer: tokenizers.Tokenizer, header: _VocabHeader) -> None:
    kind = PRE_TOKENIZERS.get(header.string("pre", "default", longest=64))
    adds_bos = header.is_sentencepiece or (kind is not None and kind.adds_bos)
    bos_id = header.bos_id if header.boolean("add_bos_token", adds_bos) else None
    eos_id = header.eos_id if header.boolean("add_eos_token", False) else None
    around = [(header.tokens[n], n) for n in (bos_id, eos_id) if n is not None]
    if around:
        bos = "" if bos_id is None else header.tokens[bos_id]
        eos = "" if eos_id is None else header.tokens[eos_id]
        single = [part for part in (bos, "$A", eos) if part]
        pair = single + [part for part in (bos and f"{bos}:1", "$B:1", eos and f"{eos}:1") if part]
        try:
            tokenizer.post_processor = processors.TemplateProcessing(
                single=single, pair=pair, special_tokens=sorted(set(around))
            )
        except Exception as error:  # tokenizers raises no narrower class
            raise ModelError(
                f"{header.where}: the tokens of tokenizer.ggml.bos_token_id and eos_token_id "
                f"cannot be put around a prompt ({error}). {ADVICE}"
            ) from None


def _chat_template(metadata: Mapping[str, Any], where: str) -> str | None:
    fields, key = Fields(where, metadata), "tokenizer.chat_template"
    named = {
        name.removeprefix(f"{key}."): fields.string(name, longest=MAX_TEMPLATE_CHARS)
        for name in metadata
        if name.startswith(f"{key}.")
    }
    if key in metadata:
        named["default"] = fields.string(key, longest=MAX_TEMPLATE_CHARS)
    return choose_template(named)
