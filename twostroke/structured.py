"""Converts `StructuredOutputs` to a grammar of llguidance. The module does not import torch.

The size of a grammar says nothing about the time and the stack that llguidance needs to compile it,
and llguidance has no limits for them. So a user's grammar is first compiled in a sandbox
(`engine/grammar_check.py`).
"""

from __future__ import annotations

import json
import re
from typing import TYPE_CHECKING, Any, Final

from twostroke.closed_schema import close_objects
from twostroke.errors import RequestError
from twostroke.request import StructuredOutputs

if TYPE_CHECKING:
    from llguidance import LLMatcher, LLTokenizer

MAX_BYTES: Final = 128 * 1024  # of a schema, a regular expression or a grammar
TOO_DEEP: Final = "it is too deeply nested"
PARSED_TOO_DEEP: Final = "recursion limit exceeded"  # an error of llguidance's JSON parser
# The white space that a JSON text may have between its parts: a space, or a new line and up to 12
# spaces. Without a limit small models generate white space without end.
JSON_SPACE: Final = r"\x20|\n\x20{0,12}"
# Finds the starts of schemas and the names of tokens in a Lark grammar. The other alternatives
# skip strings, comments and regular expressions, which may contain similar text.
LARK: Final = re.compile(
    r"(?P<schema>%json\s*(?=\{))|(?P<token><[^<>\s]+>)"
    r'|"(?:[^"\\]|\\.)*"|//[^\n]*|/(?:[^/\\\n]|\\.)+/'
)
# In units of llguidance: 1,000 units of the lexer take 20 to 70 µs, of the parser 50 µs.
LIMITS: Final[dict[str, Any]] = {
    "initial_lexer_fuel": 200_000,
    "step_lexer_fuel": 100_000,
    "step_max_items": 20_000,
    "max_lexer_states": 50_000,
    "max_grammar_size": 200_000,
    "verbose_errors": False,
}


def check_size(outputs: StructuredOutputs) -> None:
    """Raise `RequestError` if a grammar is larger than `MAX_BYTES`."""
    texts = [outputs.json, outputs.regex, outputs.grammar, *(outputs.choice or ())]
    size = sum(len(text.encode(errors="replace")) for text in texts if isinstance(text, str))
    if size > MAX_BYTES:
        raise RequestError(
            f"structured_outputs: {size:,} bytes are more than the {MAX_BYTES:,} allowed; use a "
            "smaller grammar"
        )


def to_grammar(outputs: StructuredOutputs, tokenizer: LLTokenizer) -> str:
    """Return the grammar. Raise `RequestError` if it cannot be parsed. `compile_grammar` finds
    other errors."""
    from llguidance import LLMatcher
    from llguidance.gbnf_to_lark import any_to_lark

    if outputs.regex is not None:
        return str(LLMatcher.grammar_from_regex(outputs.regex))
    if outputs.choice is not None:
        # One lexeme is faster in llguidance than a rule for each choice.
        words = " | ".join(json.dumps(text) for text in outputs.choice)
        return str(LLMatcher.grammar_from_lark(f"start: CHOICE\nCHOICE: {words}"))
    closed = outputs.disable_additional_properties
    try:
        if outputs.grammar is not None:
            lark = _prepare_lark(any_to_lark(outputs.grammar), tokenizer, closed)
            return str(LLMatcher.grammar_from_lark(lark))
        schema: Any = outputs.json or '{"type":"object"}'
        if closed:
            schema = close_objects(json.loads(schema))
        settings: Any = {"whitespace_pattern": JSON_SPACE, "coerce_one_of": True}
        return str(LLMatcher.grammar_from_json_schema(schema, overrides=settings))
    except RecursionError:
        raise _refusal(TOO_DEEP) from None
    except ValueError as error:
        raise _refusal(f"the schema is not JSON: {error}") from None
    except Exception as error:  # the converter to Lark raises plain exceptions
        raise _refusal(str(error)) from None


def _prepare_lark(lark: str, tokenizer: LLTokenizer, closed: bool) -> str:
    """Close the JSON schemas in a grammar, and replace the names of tokens such as `<tool_call>` by
    ids, because llguidance accepts only the names of special tokens."""
    parts, end = [], 0
    while match := LARK.search(lark, end):
        parts.append(lark[end : match.start()])
        text, end = match[0], match.end()
        if match["schema"] and closed:
            schema, end = json.JSONDecoder().raw_decode(lark, end)
            text += json.dumps(close_objects(schema))
        elif match["token"] and len(ids := tokenizer.tokenize_str(text)) == 1:
            text = f"<[{ids[0]}]>"
        parts.append(text)
    return "".join([*parts, lark[end:]])


def compile_grammar(tokenizer: LLTokenizer, outputs: StructuredOutputs) -> LLMatcher:
    return make_matcher(tokenizer, to_grammar(outputs, tokenizer))


def make_matcher(tokenizer: LLTokenizer, grammar: str) -> LLMatcher:
    """Compile a grammar of `to_grammar`. llguidance releases the GIL while it compiles."""
    from llguidance import LLMatcher, LLParserLimits

    limits = LLParserLimits(**LIMITS)
    matcher = LLMatcher(tokenizer, grammar, log_level=0, limits=limits)
    if matcher.is_error():
        raise _refusal(matcher.get_error())
    return matcher


def _refusal(reason: str) -> RequestError:
    reason = (
        TOO_DEEP if PARSED_TOO_DEEP in reason else reason.removesuffix("<non-verbose/>").strip()
    )
    short = reason if len(reason) <= 400 else reason[:400] + "…"
    return RequestError(f"structured_outputs: the grammar cannot be used: {short}")
