"""Objects of a JSON schema are closed, and one that could be written before still can be."""

from __future__ import annotations

import json
from typing import Any

import pytest
from llguidance import LLTokenizer

from tests.tiny import EOS_ID, tokenizer_json
from twostroke.closed_schema import close_objects
from twostroke.errors import RequestError
from twostroke.model.grammar_tokenizer import make_tokenizer
from twostroke.request import StructuredOutputs
from twostroke.structured import compile_grammar

NUMBER = {"type": "integer"}
A = {"type": "object", "properties": {"a": NUMBER}, "required": ["a"]}
B = {"type": "object", "properties": {"b": NUMBER}, "required": ["b"]}
DEFS = {"$defs": {"A": A, "B": B}}
REF_A, REF_B = {"$ref": "#/$defs/A"}, {"$ref": "#/$defs/B"}
TREE = {
    "type": "object",
    "properties": {"next": {"anyOf": [{"$ref": "#/$defs/Tree"}, {"type": "null"}]}},
    "required": ["next"],
}
# A schema, what it takes, and what it takes only while it is open.
CASES: dict[str, tuple[Any, list[Any], list[Any]]] = {
    "properties": (A, [{"a": 1}], [{"a": 1, "c": 2}]),
    "nested": (
        {"type": "object", "properties": {"x": A, "l": {"type": "array", "items": B}}},
        [{"x": {"a": 1}, "l": [{"b": 1}]}, {}],
        [{"x": {"a": 1, "c": 2}}, {"l": [{"b": 1, "c": 2}]}, {"c": 1}],
    ),
    "no properties": ({"type": "object", "properties": {}}, [{}], [{"c": 1}]),
    "any object": ({"type": "object"}, [{}, {"c": 1}], []),
    "said to be open": (
        {**A, "additionalProperties": {"type": "boolean"}},
        [{"a": 1}, {"a": 1, "c": True}],
        [],
    ),
    "a required name without a schema": (
        {**A, "required": ["a", "z"]},
        [{"a": 1, "z": [0]}],
        [{"a": 1, "z": 0, "c": 2}],
    ),
    "patterns": (
        {**A, "patternProperties": {"^x": NUMBER}},
        [{"a": 1}, {"a": 1, "x1": 2}],
        [{"a": 1, "y": 2}],
    ),
    "all of": ({"allOf": [A, B]}, [{"a": 1, "b": 2}], [{"a": 1, "b": 2, "c": 3}]),
    "all of, one with patterns": (
        {"allOf": [A, {"patternProperties": {"^x": NUMBER}}]},
        [{"a": 1, "x": 2}],
        [{"a": 1, "c": 2}],
    ),
    "all of, one said to be open": (
        {"allOf": [{**A, "additionalProperties": True}, B]},
        [{"a": 1, "b": 2, "c": 3}],
        [],
    ),
    "a base by reference": (
        {**DEFS, "allOf": [REF_A, B]},
        [{"a": 1, "b": 2}],
        [{"a": 1, "b": 2, "c": 3}],
    ),
    "a base beside the reference": (
        {**DEFS, **REF_A, "properties": {"b": NUMBER}},
        [{"a": 1, "b": 2}],
        [{"a": 1, "b": 2, "c": 3}],
    ),
    "a reference with a title": (
        {**DEFS, "allOf": [REF_A], "title": "A"},
        [{"a": 1}],
        [{"a": 1, "c": 2}],
    ),
    "any of": ({"anyOf": [A, B]}, [{"a": 1}, {"b": 1}], [{"a": 1, "b": 2}]),
    "any of references, or null": (
        {**DEFS, "anyOf": [REF_A, REF_B, {"type": "null"}]},
        [{"a": 1}, {"b": 1}, None],
        [{"b": 1, "c": 2}],
    ),
    "common names beside alternatives": (
        {**DEFS, "type": "object", "properties": {"k": NUMBER}, "oneOf": [REF_A, REF_B]},
        [{"k": 1, "a": 2}, {"k": 1, "b": 2}, {"b": 2}],
        [{"k": 1, "a": 2, "b": 3}, {"k": 1, "a": 2, "c": 3}],
    ),
    "alternatives that only require": (
        {
            "type": "object",
            "properties": {"a": NUMBER, "b": NUMBER},
            "anyOf": [{"required": ["a"]}, {"required": ["b"]}],
        },
        [{"a": 1}, {"b": 1}, {"a": 1, "b": 2}],
        [{"a": 1, "c": 2}],
    ),
    "a schema within itself": (
        {"$defs": {"Tree": TREE}, "$ref": "#/$defs/Tree"},
        [{"next": {"next": None}}],
        [{"next": {"next": None, "c": 1}}, {"next": None, "c": 1}],
    ),
}


@pytest.fixture(scope="module")
def tokenizer() -> LLTokenizer:
    return make_tokenizer(tokenizer_json(), [EOS_ID])


def takes(tokenizer: LLTokenizer, value: Any, **asked: Any) -> bool:
    matcher = compile_grammar(tokenizer, StructuredOutputs(**asked))
    ids = tokenizer.tokenize_str(json.dumps(value))
    return matcher.try_consume_tokens(ids) == len(ids) and matcher.is_accepting()


@pytest.mark.parametrize("name", CASES)
def test_an_object_has_the_names_that_are_given_and_no_others(
    tokenizer: LLTokenizer, name: str
) -> None:
    schema, good, only_open = CASES[name]
    before = json.dumps(schema)
    for value in (*good, *only_open):
        assert takes(tokenizer, value, json=schema) is (value in good), value
        assert takes(tokenizer, value, json=schema, disable_additional_properties=False), value
    close_objects(schema)
    assert json.dumps(schema) == before


def test_schemas_in_a_grammar_are_closed_as_well(tokenizer: LLTokenizer) -> None:
    text = '"%json {" | /%json \\{/'  # are none
    grammar = f"start: value | {text}\nvalue: %json {json.dumps(A)} // %json {{}}\n"
    for closed in (True, False):
        asked = {"grammar": grammar, "disable_additional_properties": closed}
        assert takes(tokenizer, {"a": 1}, **asked)
        assert takes(tokenizer, {"a": 1, "c": 2}, **asked) is not closed


@pytest.mark.parametrize(
    "schema",
    [
        True,
        {"$ref": "#"},
        {"$ref": "https://example.org/a"},
        {"$ref": "#/$defs/none"},
        {"$ref": 3},
        {"allOf": 3, "anyOf": {}, "properties": [], "required": "a"},
        {"allOf": [{"$ref": "#"}, A]},
    ],
)
def test_what_is_no_good_schema_is_left_to_the_compiler(schema: Any) -> None:
    close_objects(schema)


def test_a_schema_that_is_nested_too_deeply_is_refused(tokenizer: LLTokenizer) -> None:
    schema: dict[str, Any] = {}
    for _ in range(300):
        schema = {"properties": {"a": schema}}
    with pytest.raises(RequestError, match="too deeply nested"):
        takes(tokenizer, {}, json=schema)
