"""A model's tokenizer for llguidance: the bytes of every token, and the tokens of a text.

llguidance can read a tokenizer.json itself. But then it treats every added token that looks like
`<tag>` as special, although the tokenizer finds this token in ordinary text. So no output could
match a grammar with the tag in a literal. Here only tokens with the flag `special` in
tokenizer.json are special. An added token without the flag (Qwen's `<tool_call>`) is text. If a
grammar requires the text of a special token, ordinary tokens write this text, because special
tokens are removed from the answer. This module does not import torch.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, Final

import tokenizers
from tokenizers import models

from twostroke.errors import RequestError
from twostroke.model.text.detokenizer import TokenTable
from twostroke.model.text.tokenizer_work import unlimited_chars

if TYPE_CHECKING:
    from llguidance import LLTokenizer

# Settings that stop a tokenizer from adding a space before a text: the text of a grammar may be in
# the middle of an answer.
NO_SPACE_BEFORE: Final = {"prepend_scheme": "never", "add_prefix_space": False}


class GrammarTokenizer:
    """The tokenizer interface that `LLTokenizer` requires.

    llguidance calls the tokenizer with the GIL, while llguidance holds a lock that the matchers of
    one grammar share. So two threads must not use these matchers.
    """

    is_tokenizer_wrapper = True
    bos_token_id = None

    def __init__(self, tokenizer_json: str, end_ids: list[int]) -> None:
        self._backend = tokenizers.Tokenizer.from_str(tokenizer_json)
        _put_no_space_before(self._backend)
        self._backend.encode_special_tokens = True
        table = TokenTable(self._backend)
        if not (table.is_byte_level or table.is_sentencepiece):
            raise RequestError(
                "structured_outputs cannot be used with this model's tokenizer: what a token adds "
                "to a text depends on its neighbours"
            )
        self.tokens = table.all_bytes()
        self.special_token_ids = sorted(table.special_ids | set(end_ids))
        self.eos_token_id = [*end_ids, *self.special_token_ids, 0][0]
        self._unlimited_chars = unlimited_chars(self._backend)
        self.longest_first: Callable[[str], list[int]] | None = None  # set by `make_tokenizer`

    def __call__(self, text: str) -> list[int]:
        """Return the tokens of a text. If a normaliser changes the text, or the tokenizer may take
        long for it, return the longest matching tokens one after another instead."""
        limit = self._unlimited_chars
        if self.longest_first is not None and limit is not None and len(text) > limit:
            return self.longest_first(text)
        ids: list[int] = self._backend.encode(text, add_special_tokens=False).ids
        same = b"".join([self.tokens[n] for n in ids]) == text.encode()
        return ids if same or self.longest_first is None else self.longest_first(text)


def make_tokenizer(tokenizer_json: str, end_ids: list[int]) -> LLTokenizer:
    """Return the tokenizer for `compile_grammar`. `end_ids`: tokens that end the answer."""
    from llguidance import LLTokenizer

    ours: Any = GrammarTokenizer(tokenizer_json, end_ids)
    try:
        tokenizer = LLTokenizer(ours, eos_token=end_ids or None)
        ours.longest_first = tokenizer.greedy_tokenize
        return tokenizer
    except Exception as error:  # llguidance raises no narrower class
        raise RequestError(
            f"structured_outputs cannot be used with this model's tokenizer ({error})"
        ) from None


def _put_no_space_before(backend: tokenizers.Tokenizer) -> None:
    """Change the settings that add a space. They are read from and written to the JSON of a
    tokenizer without a vocabulary, which is small."""
    steps = {"normalizer": backend.normalizer, "pre_tokenizer": backend.pre_tokenizer}
    bare = json.loads(tokenizers.Tokenizer(models.BPE()).to_str())
    for name, step in steps.items():
        bare[name] = _step_without_space(step and json.loads(step.__getstate__()))
    changed = tokenizers.Tokenizer.from_str(json.dumps(bare))
    backend.normalizer, backend.pre_tokenizer = changed.normalizer, changed.pre_tokenizer


def _step_without_space(step: Any) -> Any:
    if not isinstance(step, dict) or step.get("type") == "Prepend":
        return None
    step = {name: NO_SPACE_BEFORE.get(name, value) for name, value in step.items()}
    for name in ("normalizers", "pretokenizers"):
        if name in step:
            step[name] = [one for one in map(_step_without_space, step[name]) if one is not None]
    return step
