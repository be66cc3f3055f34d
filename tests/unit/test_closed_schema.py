"""Objects of a JSON schema are closed, and one that could be written before still can be."""

from __future__ import annotations

import json
import random
from itertools import permutations
from typing import Any

import pytest
from llguidance import LLTokenizer

from tests.tiny import EOS_ID, tokenizer_json
from twostroke.closed_schema import close_objects
from twostroke.errors import RequestError
from twostroke.model.text.grammar_tokenizer import make_tokenizer
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


def taken(tokenizer: LLTokenizer, values: list[Any], **asked: Any) -> list[bool]:
    """Which of the values can be written."""
    compiled, found = compile_grammar(tokenizer, StructuredOutputs(**asked)), []
    for value in values:
        matcher, ids = compiled.deep_copy(), tokenizer.tokenize_str(json.dumps(value))
        found.append(matcher.try_consume_tokens(ids) == len(ids) and matcher.is_accepting())
    return found


@pytest.mark.parametrize("name", CASES)
def test_an_object_has_the_names_that_are_given_and_no_others(
    tokenizer: LLTokenizer, name: str
) -> None:
    schema, good, only_open = CASES[name]
    before = json.dumps(schema)
    values = [*good, *only_open]
    assert taken(tokenizer, values, json=schema) == [value in good for value in values]
    assert all(taken(tokenizer, values, json=schema, disable_additional_properties=False))
    close_objects(schema)
    assert json.dumps(schema) == before


def any_schema(pick: random.Random, depth: int, targets: list[str]) -> dict[str, Any]:
    """Of an object with the names a, b and c, in parts."""
    names = pick.sample("abc", pick.randrange(3))
    schema: dict[str, Any] = {"type": "object", "properties": dict.fromkeys(names, NUMBER)}
    if names and pick.random() < 0.6:
        schema["required"] = names[:1]
    if pick.random() < 0.2:
        schema = {"required": ["a"]}
    for key in pick.sample(["allOf", "anyOf", "oneOf"], pick.randrange(3) if depth else 0):
        parts = range(pick.randrange(1, 4))
        schema[key] = [any_schema(pick, depth - 1, targets) for _ in parts]
    if targets and pick.random() < 0.4:
        schema["$ref"] = f"#/$defs/{pick.choice(targets)}"
    return schema


def test_closing_leaves_something_to_write(tokenizer: LLTokenizer) -> None:
    pick = random.Random(0)
    objects = [dict.fromkeys(names, 1) for n in range(4) for names in permutations("abc", n)]
    num_taken = 0
    for _ in range(60):
        schema = any_schema(pick, 2, ["X", "Y"])
        schema["$defs"] = {"X": any_schema(pick, 1, []), "Y": any_schema(pick, 1, ["X"])}
        try:
            opened = taken(tokenizer, objects, json=schema, disable_additional_properties=False)
        except RequestError:
            continue  # nothing could be written before
        *closed, unknown = taken(tokenizer, [*objects, {"z": 1}], json=schema)
        assert any(closed) or not any(opened), schema
        assert not unknown, schema
        num_taken += any(closed)
    assert num_taken > 30


def test_schemas_in_a_grammar_are_closed_as_well(tokenizer: LLTokenizer) -> None:
    text = '"%json {" | /%json \\{/'  # are none
    grammar = f"start: value | {text}\nvalue: %json {json.dumps(A)} // %json {{}}\n"
    for closed in (True, False):
        asked = {"grammar": grammar, "disable_additional_properties": closed}
        assert taken(tokenizer, [{"a": 1}, {"a": 1, "c": 2}], **asked) == [True, not closed]


@pytest.mark.parametrize(
    "schema",
    [
        True,
        {"$ref": "#"},
        {"$ref": "https://example.org/a"},
        {"$ref": "#/$defs/none"},
        {"$ref": 3},
        {"allOf": 3, "anyOf": {}, "properties": [], "required": "a"},
    ],
)
def test_an_invalid_schema_is_left_to_the_compiler(schema: Any) -> None:
    assert close_objects(schema) == schema


def test_a_schema_that_refers_to_itself_is_closed_and_ends() -> None:
    closed = close_objects({"allOf": [{"$ref": "#"}, A]})
    assert closed["properties"] == {"a": True}
    assert closed["additionalProperties"] is False
    (copy,) = closed["$defs"].values()
    assert "additionalProperties" not in copy


@pytest.mark.parametrize("closed", [True, False])
def test_a_schema_that_is_nested_too_deeply_is_refused(
    tokenizer: LLTokenizer, closed: bool
) -> None:
    """By Python's stack where objects are closed, by the parser of llguidance elsewhere."""
    schema: dict[str, Any] = {}
    for _ in range(300):
        schema = {"properties": {"a": schema}}
    with pytest.raises(RequestError, match="too deeply nested"):
        taken(tokenizer, [], json=schema, disable_additional_properties=closed)
