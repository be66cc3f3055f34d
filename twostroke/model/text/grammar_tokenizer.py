"""A model's tokenizer as llguidance wants it: the bytes of every token, and a text's tokens.

llguidance can read a tokenizer.json by itself, but then takes every added token that looks like
`<tag>` for one that no text holds, while its tokenizer finds just that token in a text: a grammar
with the tag in a literal could not be followed. What tokenizer.json calls special is the
difference that counts. An added token that is not special (Qwen's `<tool_call>`) is text like any
other token, and the one the tokenizer would choose for that text. A special one is not: where a
grammar asks for its text, that is written with ordinary tokens, or it would be missing from the
answer. No torch.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, Final

import tokenizers
from tokenizers import models

from twostroke.errors import RequestError
from twostroke.model.text.detokenizer import TokenTable

if TYPE_CHECKING:
    from llguidance import LLTokenizer

# Settings by which a tokenizer puts a space before a text; what a grammar asks for is the middle
# of one.
NO_SPACE_BEFORE: Final = {"prepend_scheme": "never", "add_prefix_space": False}


class GrammarTokenizer:
    """What `LLTokenizer` asks of a tokenizer that is not its own.

    llguidance calls it, with the GIL, while it holds the lock that the matchers of one grammar
    share: two threads must not use them.
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
        self.longest_first: Callable[[str], list[int]] | None = None  # llguidance's

    def __call__(self, text: str) -> list[int]:
        """The tokens that the tokenizer would choose for a text, unless a normaliser has changed it
        before: then the longest that fit, one after the other."""
        ids: list[int] = self._backend.encode(text, add_special_tokens=False).ids
        same = b"".join([self.tokens[n] for n in ids]) == text.encode()
        return ids if same or self.longest_first is None else self.longest_first(text)


def make_tokenizer(tokenizer_json: str, end_ids: list[int]) -> LLTokenizer:
    """For `compile_grammar`. `end_ids` may end a text wherever the grammar allows that."""
    from llguidance import LLTokenizer

    ours: Any = GrammarTokenizer(tokenizer_json, end_ids)
    try:
        tokenizer = LLTokenizer(ours, eos_token=end_ids or None)
        ours.longest_first = tokenizer.greedy_tokenize
        return tokenizer
    except Exception as error:  # llguidance raises nothing more particular
        raise RequestError(
            f"structured_outputs cannot be used with this model's tokenizer ({error})"
        ) from None


def _put_no_space_before(backend: tokenizers.Tokenizer) -> None:
    """Read back from a tokenizer without a vocabulary, which takes no time to write and parse."""
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
