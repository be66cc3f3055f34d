"""Calls that nobody would make, by the thousand: none of them may break, hang or hurt the server.

    python bench/fuzz.py [--calls 5000] [--seed 0] [--engine instant|tiny] [--json FILE]
    python bench/fuzz.py --seed 0 --only 1234            # make one call again, and show it

A real server on real sockets, its engine in a process of its own: one that computes nothing
(`instant`) or a tiny random model (`tiny`, which also follows grammars). Every route of the
server's own `/openapi.json` is called with bodies made from its schema, such bodies spoilt,
hostile values that fit their types, bytes that are no JSON, and HTTP that is no HTTP; streaming
and not, and some clients leave early. A call follows from (seed, index) alone; several run at
once, so that what one does to another shows.

What is a failure: a 5xx (but 501 from a route that says so, and 503 with Retry-After, which are
counted), any other server's error inside a stream, an engine that dies, no answer where one is
due, none within 30 s, an error not in OpenAI's shape, a path or a traceback in an answer, an engine
that is not idle or whose books are wrong at the end. Each is printed with the bytes that caused
it. Exit code 1 if there are any. Ends with one JSON line.
"""

from __future__ import annotations

import sys

if __name__ == "__main__":  # not bench/: `http` is in the library too
    sys.path[0] = __file__.rpartition("/bench/")[0] or "."

import argparse
import asyncio
import contextlib
import copy
import json
import platform
import re
import socket
import tempfile
import threading
import time
from collections import Counter
from collections.abc import AsyncIterator, Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from random import Random
from typing import Any, NamedTuple

from tests.instant import BUILDER
from tests.tiny import tiny_folder
from twostroke.config import EngineConfig
from twostroke.engine.process import DEFAULT_BUILDER
from twostroke.engine.remote import RemoteEngine
from twostroke.serve.run import HttpServer, serve_forever
from twostroke.serve.settings import ServeSettings

HANG_S = 30.0
WORKERS = 6
BODY_BYTES = 1 << 20  # the server's limit here, so that what is too large costs little to send
LIMITS: dict[str, Any] = {
    "port": 0,
    "drain_s": 5.0,
    "max_body_bytes": BODY_BYTES,
    "max_queue": 512,
    "head_timeout_s": 2.0,
    "body_timeout_s": 2.0,
    "trust_request_chat_template": True,
}

# ── what is sent ────────────────────────────────────────────────────────────────────────────────


class Call(NamedTuple):
    index: int
    kind: str
    route: str  # as the counts name it
    data: bytes
    due: bool = True  # it is HTTP: an answer has to come
    leave_after: int | None = None  # bytes of the answer; None: it is read to its end


GOOD: dict[str, dict[str, Any]] = {
    "/v1/chat/completions": {"messages": [{"role": "user", "content": "hi"}], "max_tokens": 3},
    "/v1/completions": {"prompt": "hi", "max_tokens": 3},
    "/v1/responses": {"input": "hi", "max_output_tokens": 3},
    "/v1/embeddings": {"input": "hi"},
    "/tokenize": {"prompt": "hi"},
    "/detokenize": {"tokens": [4, 5]},
}
TOOL = {"type": "function", "function": {"name": "f", "parameters": {"type": "object"}}}
MESSAGES: list[Any] = [
    [{"role": "user", "content": "hi"}],
    [{"role": "system", "content": "be brief"}, {"role": "user", "content": "größer 東京 🙂"}],
    [{"role": "user", "content": [{"type": "text", "text": "hi"}]}],
    [{"role": "user", "content": "f?"}, {"role": "assistant", "tool_calls": [
        {"id": "1", "type": "function", "function": {"name": "f", "arguments": "{}"}}]},
     {"role": "tool", "tool_call_id": "1", "content": "3"}],
]  # fmt: skip
# Values that get further than the door: right in type, and as a user might send them.
USUAL: dict[str, list[Any]] = {
    "messages": MESSAGES, "prompt": ["hi", "a small model", [4, 5, 6], ["a", "b"], [[4], [5]]],
    "input": ["hi", [{"role": "user", "content": "hi"}]], "model": [None], "tools": [[TOOL],
    None],
    "tokens": [[4, 5], []], "n": [1, 2, 3], "max_tokens": [1, 3, 20], "best_of": [None],
    "max_completion_tokens": [2, 5], "max_output_tokens": [1, 4], "stream": [True, False],
    "temperature": [0, 0.7, 2], "top_p": [0.1, 1], "top_k": [-1, 0, 5], "min_p": [0, 0.3],
    "repetition_penalty": [1, 1.2], "presence_penalty": [-1, 0, 2], "seed": [0, 1, -5, 2**62],
    "frequency_penalty": [0, 1.5], "stop": ["e", ["x", "yz"], None], "stop_token_ids": [[7], []],
    "min_tokens": [0, 1], "logit_bias": [{"5": 1.5}, {}], "allowed_token_ids": [[4, 5, 6]],
    "bad_words": [["dog"]], "prompt_logprobs": [0, 2], "priority": [0, -3], "top_logprobs": [0,
    3],
    "request_id": ["r1"], "cache_salt": ["s"], "chat_template": [None, "{{ messages[0].role }}"],
    "chat_template_kwargs": [{"x": 1}], "documents": [[{"title": "t", "text": "x"}]],
    "tool_choice": ["none", "auto", "required", {"type": "function", "function": {"name": "f"}}],
    "response_format": [{"type": "text"}, {"type": "json_object"}],
    "structured_outputs": [{"choice": ["a", "b"]}, {"regex": "[ab]{1,3}"}, {"json_object": True}],
    "text": [{"format": {"type": "text"}}], "include": [["message.output_text.logprobs"]],
    "modalities": [["text"]], "truncation": ["disabled"], "suffix": [None], "audio": [None],
    "prediction": [None], "functions": [None], "function_call": [None], "conversation": [None],
    "web_search_options": [None], "previous_response_id": [None], "background": [False],
    "max_tool_calls": [None], "context_management": [None], "stream_options": [
        {"include_usage": True}, {"continuous_usage_stats": True, "include_usage": True}],
}  # fmt: skip


def nested(depth: int, closed: bool = True, key: str = "") -> str:
    if key:
        return f'{{"{key}":' * depth + "1" + "}" * depth * closed
    return "[" * depth + "]" * depth * closed


def deep(depth: int) -> dict[str, Any]:
    value: Any = {"type": "string"}
    for _ in range(depth):
        value = {"properties": {"a": value}}
    return value


DEPTHS = (5, 60, 200, 450, 700, 900, 950, 990, 1100)
DEEP = re.compile(rb'"<deep (\d+)>"')
REGEXES = (
    "(a|b)*", "(a+)+$", "((a{0,99}){0,99}){0,99}", "[a-z]{1,100000}", "(?=x)y", "(?<n>x)\\k<n>",
    "(" * 500 + ")" * 500, "(" * 9, "[", "*", "\\", "a{9,3}", "\\p{L}+", "[^\\x00-\\x{10FFFF}]",
    "",
    ".*" * 200 + "x", "(?i)" + "(a|aa)" * 200, "\\u{110000}", "\x00", "\\d{400}(x|y)\\w{400}",
)  # fmt: skip
GRAMMARS = (
    "start: start", "start: a\na: b\nb: a", "start: start start | \"a\"", "root ::= root", "",
    "start:",
    "root ::= \"a\" root | \"b\"", "start: /(/", "start: /((a{0,99}){0,99}){0,99}/", "%import x",
    "\n".join(f"r{n}: r{n + 1} r{n + 1}" for n in range(60)) + '\nr60: "a"\nstart: r0', "\x00",
    "start: " + "(" * 3000 + '"a"' + ")" * 3000, "root ::= " + "(" * 800 + '"a"' + ")" * 800,
    "start: " + " | ".join(f'"w{n}"' for n in range(3000)), "%llguidance {}\nstart: @x",
    "start: %json {\"type\":\"object\"}", "start: %regex {", "start: <[0-99999999]>",
)  # fmt: skip
SCHEMAS: tuple[Any, ...] = (
    {"$ref": "#"}, {"$ref": "#/$defs/a", "$defs": {"a": {"$ref": "#/$defs/a"}}},
    {"type": "nothing"},
    {"$ref": "http://127.0.0.1:1/x.json"}, {"$ref": "file:///etc/passwd"},
    {"pattern": "((a{0,99}){99}){99}"},
    {"type": "string", "maxLength": 10**9}, {"type": "array", "minItems": 10**7}, {"enum": []},
    {"type": "integer", "minimum": 10**30, "maximum": -1}, {"type": "number",
    "multipleOf": 1e-300},
    {"anyOf": [{"type": "string"}] * 500},
    {"allOf": [{"anyOf": [{"const": n} for n in range(20)]}] * 8},
    {"type": "object", "properties": {f"p{n}": {"type": "string"} for n in range(300)}},
    {"not": {}},
    {"type": "object", "required": ["x"], "properties": {}, "additionalProperties": False},
    {"enum": [str(n) * 10 for n in range(2000)]}, {"type": ["string", 3]}, {"properties": 3}, {},
    {"patternProperties": {"(": {}}}, {"format": "no-such"}, {"type": "string",
    "format": "date-time"},
    *(deep(depth) for depth in (20, 200, 400)), {"items": "<deep 50>"}, {"items": "<deep 900>"},
)  # fmt: skip
NUMBERS = (
    0, -1, 1, 2, 0.5, -0.5, 1e-300, 1e308, -1e308, 2**31, 2**32, 2**53, 2**63 - 1, 2**63, 2**64,
    -(2**63), -(2**63) - 1, 10**40, 1024, 1025, 4095, 10**9,
)  # fmt: skip
STRINGS = (
    "", "a", "\x00", "\ud800", "x\udfff", "🙂" * 50, "x" * 5000, "<|im_end|>", "</s>", "\u2028",
    "{{",
    "{% raw %}", "../../etc/passwd", "%s%n", "'; --", "auto", "none", "required", "json_object",
    "\r\n\r\n",
)  # fmt: skip
OBJECTS: list[Any] = [
    {}, {"": {}}, {"a": 1}, {"type": "text"}, {"type": "function"}, {"type": "json_schema"}, [],
    [[]],
    [None], [{}], [[[[]]]], [0], [-1], [10**20], ["a", 1], {"role": "user"}, {"__class__": {}},
    [True],
]  # fmt: skip
NASTY: list[Any] = [None, True, False, *NUMBERS, *STRINGS, *OBJECTS]
HOSTILE: dict[str, list[Any]] = {
    "structured_outputs": [
        *({"regex": one} for one in REGEXES), *({"grammar": one} for one in GRAMMARS),
        *({"json": one} for one in SCHEMAS), {"json": "{"}, {"json": "3"}, {"json": "null"}, {},
        {"json": nested(900)}, {"choice": []}, {"choice": [""]}, {"choice": ["\ud800"]},
        {"choice": ["x" * 100] * 2000}, {"choice": [f"{n}" for n in range(9000)]},
        {"regex": "a", "choice": ["a"]}, {"json_object": False}, {"regex": "a" * 200_000},
    ],
    "response_format": [
        *({"type": "json_schema", "json_schema": {"name": "x",
        "schema": one}} for one in SCHEMAS),
        {"type": "json_schema"}, {"type": "json_schema", "json_schema": {}}, {"type": "xml"},
    ],
    "text": [{"format": {"type": "json_schema", "schema": one}} for one in SCHEMAS],
    "tools": [
        [TOOL] * 200, [], [{"type": "function", "function": {"name": ""}}],
        *([{"type": "function", "function": {"name": "f\ud800\n\"",
        "parameters": one}}] for one in SCHEMAS),
    ],
    "tool_choice": ["required", "x", {}, {"type": "function"}, {"type": "function",
    "function": {"name": "g"}}],
    "n": [0, 2, 64, 1024, 1025, 10**9, -1], "best_of": [2, 10**9], "stop": [
        "", [], [""], ["x"] * 64, ["x"] * 65, "x" * 100_000, [str(n) for n in range(64)],
        ["\ud800"], ["\ufffd"]],
    "max_tokens": [0, -1, 1, 4096, 2**31, 2**63, 10**40], "max_completion_tokens": [0, 2**64],
    "max_output_tokens": [0, 2**63], "min_tokens": [2, 3, 4, 10**9, 2**63], "logit_bias": [
        {"5": 101}, {"5": -100}, {"-1": 0}, {"x": 1}, {"1e3": 1}, {"٣": 1}, {" 5 ": 1},
        {"5_0": 1}, {"9" * 5000: 1},
        {str(n): 1.0 for n in range(300)}, {str(n): 1.0 for n in range(2000)}, {str(2**64): 1},
        {"299": 1e-320}],
    "stop_token_ids": [[-1], [300], [2**40], [2**64], list(range(300)), list(range(2000))],
    "allowed_token_ids": [[], [299], [300], [-1], [2**64], list(range(300)), [0] * 5000],
    "bad_words": [[""], ["x"] * 1024, ["x" * 5000], [" "], ["\ud800"],
    [str(n) for n in range(1000)]],
    "prompt": ["", [], [[]], [""], "x" * 3000, "x" * 100_000, "東" * 30_000, [4] * 255, [4] * 5000,
    [-1], [300], [2**63],
               ["hi"] * 500, ["hi"] * 5000, [[4], "a"], [[4], 5], "\x00", "\ud800", "<s>" * 50,
               " " * 3000],
    "messages": [[], [{}], [{"role": 3}], [{"role": "user"}], [{"role": "x", "content": None}],
    [{"content": "hi"}],
                 [{"role": "user", "content": [{"type": "image_url"}]}], [{"role": "user",
                 "content": [[]]}],
                 [{"role": "user", "content": {"a": 1}}], [{"role": "user",
                 "content": "x" * 100_000}],
                 [{"role": "user", "content": "hi"}] * 1000, [{"role": "assistant",
                 "tool_calls": 3}],
                 [{"role": "assistant", "tool_calls": [{"function": {"arguments": "{"}}]}],
                 [{"role": "tool", "content": "x"}], [{"role": "user", "content": "hi",
                 "name": {"a": []}}],
                 [{"role": "\ud800", "content": "\ud800"}], [{"role": ["user"],
                 "content": ["hi"]}]],
    "input": ["", [], [{}], [{"type": "message"}], [{"type": "reasoning"}], [{"role": "user",
    "content": 3}],
              [{"role": "user", "content": [{"type": "input_text"}]}], [{"type": "item_reference",
              "id": "x"}]],
    "tokens": [[-1], [300], [2**31], [2**64], [4] * 50_000, [0, 1, 2, 3]],
    "reasoning": [{"effort": []}, {"x": 1}],
    "chat_template": ["{{", "{% for %}", "{{ x.y.z }}", "{{ ''.__class__ }}", "{{ messages }}",
    "{{ 1/0 }}", "{{ 'a' * 10**6 }}",
                      "{% include '/etc/passwd' %}", "{{ raise_exception('no') }}",
                      "{{ [].x() }}", "{{ 10**10**3 }}",
                      "{{ messages|tojson }}", "{% macro a() %}{{ a() }}{% endmacro %}{{ a() }}",
                      "{{ range(10**9)|list }}"],
    "chat_template_kwargs": [{"messages": 3}, {"tools": 3}, {"x" * 5000: 1}, {"": 1}, {"self": 1},
    {"add_generation_prompt": []},
                             {"bos_token": {}}, {"messages": [], "raise_exception": 3},
                             {"1 x": 2}, {"template": 1}],
    "documents": [[], [{}], [{"a": {"b": [1]}}] * 100], "metadata": [{"a": "x" * 5000},
    {"\ud800": 1}],
    "request_id": ["", "\x00", "x" * 256, "x" * 257, "\r\nset-cookie: x", "\ud800", "🙂", "same"],
    "priority": [2**31, 2**63, -(2**63), 10**30],
    "seed": [2**63 - 1, 2**63, -(2**63), 10**40], "top_logprobs": [1, 20, 21, 10**9, -1],
    "logprobs": [True, 1, 20, 21, 10**9, -1],
    "prompt_logprobs": [0, 20, 21, 10**9, -1], "include": [["x"], []], "model": ["", "x" * 5000,
    "\ud800", "../x"],
    "cache_salt": ["", "\ud800", "x" * 10_000], "echo": [True], "stream": [True],
    "continue_final_message": [True],
    "add_generation_prompt": [True, False], "return_token_ids": [True],
    "return_tokens_as_token_ids": [True], "return_progress": [True],
    "return_token_strs": [True], "reasoning_effort": ["high", "x"], "modalities": [["audio"], []],
}  # fmt: skip


class Maker:
    """(seed, index) → a call."""

    def __init__(self, described: dict[str, Any], seed: int) -> None:
        self._described, self._seed = described, seed
        self._routes = [
            (method.upper(), path, operation)
            for path, methods in described["paths"].items()
            for method, operation in methods.items()
        ]
        # What tells is simple: most calls go to what reads a body.
        self._weights = [6 if "requestBody" in operation else 1 for _, _, operation in self._routes]

    def make(self, index: int) -> Call:
        random = Random(f"{self._seed}:{index}")
        method, path, operation = random.choices(self._routes, self._weights)[0]
        route = f"{method} {path}"
        kinds = {"valid": 24, "mutated": 18, "hostile": 30, "bytes": 12, "http": 16}
        kind = random.choices(list(kinds), list(kinds.values()))[0]
        if kind == "http":
            return self._http(random, index, method, path)
        if kind == "bytes":
            body = self._spoilt_bytes(random, path)
        else:
            content = self._content(random, kind, path, operation)
            body = dump(content) if content is not None else b""
        data = request(
            method, path, body, *self._headers(random), chunked=random.random() < 0.1 and random
        )
        leave_after = None
        if random.random() < 0.08:  # while it sends, before the answer, or in its middle
            if random.random() < 0.4:
                data, leave_after = data[: random.randrange(len(data))], 0
            else:
                leave_after = random.choice([0, 1, 200, 700, 3000])
        return Call(index, kind, route, data, leave_after=leave_after)

    # ── bodies ──────────────────────────────────────────────────────────────────────────────

    def _content(self, random: Random, kind: str, path: str, operation: dict[str, Any]) -> Any:
        if "requestBody" not in operation:
            return random.choice([None, None, *NASTY]) if kind != "valid" else None
        schema = operation["requestBody"]["content"]["application/json"]["schema"]
        if kind == "hostile":
            return self._hostile(random, path, schema)
        content = self._from_schema(random, schema, 0)
        if kind == "mutated":
            content = copy.deepcopy(content)  # the tables stay as they are
            for _ in range(random.choice([1, 1, 2, 4])):
                content = mutated(random, content)
        return content

    def _hostile(self, random: Random, path: str, schema: Any) -> Any:
        """A good request but for one to three values, which are of their field's type."""
        content = copy.deepcopy(GOOD[path])
        names = [name for name in self._resolved(schema)["properties"] if name in HOSTILE]
        for name in random.sample(names, min(len(names), random.choice([1, 1, 2, 3]))):
            content[name] = random.choice(HOSTILE[name])
        if random.random() < 0.3:
            content["stream"] = True
        if random.random() < 0.1:
            where = random.choice(
                ["metadata", "chat_template_kwargs", "tools", "messages", "moderation"]
            )
            content[where] = f"<deep {random.choice(DEPTHS)}>"
            if where == "tools":
                tool = {"name": "f", "parameters": content[where]}
                content[where] = [{"type": "function", "function": tool}]
            elif where == "messages":
                content[where] = [{"role": "user", "content": "hi", "tool_calls": [content[where]]}]
        return content

    def _resolved(self, schema: Any) -> Any:
        while "$ref" in schema:
            name = schema["$ref"].rpartition("/")[2]
            schema = self._described["components"]["schemas"][name]
        return schema

    def _from_schema(self, random: Random, schema: Any, depth: int, name: str = "") -> Any:
        """Something the schema allows. Fields with a meaning mostly get a usual value."""
        if name in USUAL and random.random() < 0.85:
            return random.choice(USUAL[name])
        schema = self._resolved(schema)
        if "anyOf" in schema:
            return self._from_schema(random, random.choice(schema["anyOf"]), depth)
        if "enum" in schema:
            return random.choice(schema["enum"])
        match schema.get("type"):
            case "object" if "properties" in schema:
                required = set(schema.get("required", ()))
                share = random.choice([0.0, 0.05, 0.15])
                chosen = {
                    key: value
                    for key, value in schema["properties"].items()
                    if key in required or random.random() < share
                }
                return {
                    key: self._from_schema(random, value, depth + 1, key)
                    for key, value in chosen.items()
                }
            case "object":
                inner = schema.get("additionalProperties")
                inner = inner if isinstance(inner, dict) else {}
                return {
                    random.choice(["a", "5", "role", "x y"]): self._from_schema(
                        random, inner, depth + 1
                    )
                    for _ in range(random.choice([0, 1, 2]))
                }
            case "array":
                count = random.choice([0, 1, 2, 3]) if depth < 5 else 0
                return [
                    self._from_schema(random, schema.get("items", {}), depth + 1)
                    for _ in range(count)
                ]
            case "string":
                return random.choice(["", "a", "text", "the quick fox", "東京 🙂", "x" * 300])
            case "integer":
                return random.choice([0, 1, 2, 5, 17, -1, 1000, 2**31])
            case "number":
                return random.choice([0, 0.5, 1, 1.5, -0.1, 1e6, 1e-7])
            case "boolean":
                return random.random() < 0.5
            case "null":
                return None
        return random.choice([None, 1, "a", [], {}, [1, "b"], {"type": "text"}])

    def _spoilt_bytes(self, random: Random, path: str) -> bytes:
        good = dump({**GOOD.get(path, {"a": 1}), "stream": random.random() < 0.5})
        literal = random.choice(
            ["NaN", "Infinity", "-Infinity", "1e999", "-1e999", "9" * 5000, "1" * 400 + ".5",
            "1e-9999",
             "0x10", "01", "+1", ".5", "1.", "truE", "undefined", '"\\ud800"', '"\\ud83d\\u0041"',
             '"\\x"',
             '"\t"', "'a'", '"a', "{", "]", "/*x*/1", "1 2", nested(100_000), nested(100_000,
             False),
             nested(60_000, key="a"), nested(40_000, False, "a"), nested(random.choice(DEPTHS))]
        )  # fmt: skip
        name = random.choice(["temperature", "max_tokens", "stop", "prompt", "messages",
            "metadata", "n", "tools",
                              "seed", "logit_bias", "structured_outputs", "moderation",
                              "x"])  # fmt: skip
        match random.randrange(9):
            case 0:
                return good[: random.randrange(len(good))]
            case 1 | 2 | 3:
                return b'{"%b":%b,' % (name.encode(), literal.encode()) + good[1:]
            case 4:  # the same key, twice and more
                twice = b'"max_tokens":%d,"prompt":[4],"messages":[],' % random.choice(
                    [0, 2, 10**30]
                )
                return b"{" + twice * random.choice([1, 2, 500]) + good[1:]
            case 5:
                spoilt = bytearray(good)
                for _ in range(random.choice([1, 2, 8])):
                    spoilt[random.randrange(len(spoilt))] = random.randrange(256)
                return bytes(spoilt)
            case 6:
                return literal.encode()
            case 7:
                return random.choice(
                    [b"", b" ", b"\x00", b"\xff\xfe{}", b"\xef\xbb\xbf" + good, good + b"x",
                    good.decode().encode("utf-16"),
                     good + b" " * BODY_BYTES, b"[" + b"1," * 200_000 + b"1]", good.replace(b"hi",
                         b"\xff\xc0\x80"),
                     b'{"prompt":"' + b"x" * (BODY_BYTES - 100) + b'"}', random.randbytes(300)]
                )  # fmt: skip
        many = b",".join(b'"k%d":%d' % (n, n) for n in range(random.choice([100, 20_000])))
        return b"{" + many + b"," + good[1:]

    # ── HTTP ────────────────────────────────────────────────────────────────────────────────

    def _headers(self, random: Random) -> tuple[bytes, ...]:
        if random.random() < 0.93:
            return (b"Content-Type: application/json",)
        kind = random.choice(
            [b"text/plain", b"", b"application/json; charset=utf-16", b"APPLICATION/JSON",
            b"\xff", b"application/xml",
             b"multipart/form-data", b"application/x-www-form-urlencoded",
             b"application/json, text/plain"]
        )  # fmt: skip
        return (b"Content-Type: " + kind,)

    def _http(self, random: Random, index: int, method: str, path: str) -> Call:
        body = dump(GOOD[path]) if path in GOOD else b""
        plain = (b"Content-Type: application/json",)
        due = True
        match random.randrange(6):
            case 0:
                odd = [
                    "PUT",
                    "DELETE",
                    "PATCH",
                    "OPTIONS",
                    "TRACE",
                    "HEAD",
                    "PROPFIND",
                    "CONNECT",
                    "get",
                    "FOO",
                    "GET",
                    "POST",
                ]
                method = random.choice(odd)
                due = method not in ("get", "FOO", "CONNECT")
                data = request(method, path, body, *plain)
            case 1:
                odd = ["/", "/v1", "/v1//models", path + "/", path + "?a=%zz&b[]=1",
                    path + "?" + "x" * 9000, "/../../etc/passwd",
                       "/%00", "/%ff%fe", "*", "http://127.0.0.1/health", "//health",
                       "/" + "a" * 70_000, "/\u00e9".encode().decode("latin-1"),
                       "/v1/models/../../health", "/%2e%2e/", path.upper(), path + "#x",
                       "/v1/models/x", "?", ""]  # fmt: skip
                path = random.choice(odd)
                due = path[:1] == "/" and path.isascii()
                data = request(method, path, body, *plain)
            case 2 | 3:
                extra = random.choice(HEADERS)
                due = extra not in NO_HTTP
                data = request(method, path, body, *plain, *extra)
            case 4:
                data = request(method, path, body, *plain, chunked=random)
            case _:
                data, due = random.choice(no_http(body)), False
        return Call(index, "http", "odd HTTP", data, due)


HEADERS: list[tuple[bytes, ...]] = [
    (b"X: " + b"y" * 20_000,), (b"X: " + b"y" * 100_000,),
    tuple(b"X%d: y" % n for n in range(3000)),
    (b"Authorization: Bearer \xff\xfe",), (b"Authorization: " + b"x" * 5000,),
    (b"Expect: 100-continue",),
    (b"Content-Encoding: gzip",), (b"Accept-Encoding: br;q=9",), (b"Accept: application/xml",),
    (b"Range: bytes=0-1",),
    (b"Upgrade: websocket", b"Connection: Upgrade", b"Sec-WebSocket-Key: eA==",
    b"Sec-WebSocket-Version: 13"),
    (b"Upgrade: h2c", b"Connection: Upgrade, HTTP2-Settings",
    b"HTTP2-Settings: AAMAAABkAAQAAP__"),
    (b"Connection: close",), (b"Host: other",), (b"X-Forwarded-For: 1.2.3.4",), (b"Origin: null",
    ), (b"Cookie: " + b"a=b;" * 500,),
    (b"Content-Type: text/html",), (b"X-Request-Id: \xc3\xa9",), (b"X-Empty:",),
]  # fmt: skip
NO_HTTP: list[tuple[bytes, ...]] = [  # of these the parser may think what it likes
    (b"Content-Length: -1",), (b"Content-Length: 5",), (b"Content-Length: 99999999999999999999",),
    (b"Transfer-Encoding: gzip",),
    (b"Transfer-Encoding: chunked",), (b"no colon",), (b"X: \x00",), (b": x",), (b" X: folded",),
    (b"X y: z",), (b"Content-Length: 1e3",),
]  # fmt: skip
HEADERS += NO_HTTP


def no_http(body: bytes) -> list[bytes]:
    head = b"POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\n"
    return [
        b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03" + bytes(500),
        b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n", b"\r\n\r\n", b"\x00" * 100,
        b"GET /health HTTP/1.0\r\n\r\n", b"GET /health\r\n\r\n", b"GET /health HTTP/9.9\r\n\r\n",
        b"GET /health HTTP/1.1\n\n",
        b"GET  /health  HTTP/1.1\r\n\r\n", b"GET /health HTTP/1.1\r\nHost: x", head,
        head + b"Content-Length: 500\r\n\r\n" + body,
        head + b"Transfer-Encoding: chunked\r\n\r\nzz\r\n",
            head + b"Transfer-Encoding: chunked\r\n\r\nffffffffffffffffff\r\nx",
        head + b"Transfer-Encoding: chunked\r\n\r\n5\r\nab",
            head + b"Transfer-Encoding: chunked\r\n\r\n-1\r\n\r\n", b"A" * 100_000,
        head + b"Transfer-Encoding: chunked\r\nContent-Length: 3\r\n\r\n0\r\n\r\n",
            b"GET /health HTTP/1.1\r\nHost: x\r\n\r\n" * 50,
        request("POST", "/v1/completions", body, b"Content-Type: application/json") * 3,
            b"\xff" * 300, b"GET / HTTP/1.1\r\nX: \r\n y\r\n\r\n",
    ]  # fmt: skip


def dump(content: Any) -> bytes:
    """As JSON; half surrogates are escaped. "<deep 900>" stands for what our own parser would not
    take: 900 objects, one in the other."""
    text = json.dumps(content).encode()
    return DEEP.sub(lambda found: nested(int(found[1]), key="properties").encode(), text)


def request(method: str, path: str, body: bytes, *headers: bytes, chunked: Any = None) -> bytes:
    """One HTTP request. `chunked`: a `Random` that cuts the body into pieces."""
    line = f"{method} {path} HTTP/1.1\r\nHost: 127.0.0.1\r\n".encode("latin-1")
    lines = b"".join(header + b"\r\n" for header in headers)
    if not chunked:
        length = b"Content-Length: %d\r\n\r\n" % len(body) if body or method == "POST" else b"\r\n"
        return line + lines + length + body
    pieces, at = [], 0
    while at < len(body):
        size = min(
            chunked.choice([1, 3, 100, 65_536]) if len(body) < 5000 else 65_536, len(body) - at
        )
        extension = chunked.choice([b"", b"", b";a=b", b";x"])
        pieces.append(b"%x%b\r\n%b\r\n" % (size, extension, body[at : at + size]))
        at += size
    end = chunked.choice([b"0\r\n\r\n", b"0\r\nX-Trailer: y\r\n\r\n", b"000\r\n\r\n"])
    return line + lines + b"Transfer-Encoding: chunked\r\n\r\n" + b"".join(pieces) + end


def mutated(random: Random, content: Any) -> Any:
    """With one value, somewhere inside, replaced, removed, doubled, renamed or wrapped."""
    places = list(_places(content, 0))
    if not places:
        return copy.deepcopy(random.choice(NASTY))
    holder, key = random.choice(places)
    match random.randrange(6):
        case 0 | 1 | 2:
            holder[key] = copy.deepcopy(random.choice(NASTY))
        case 3:
            del holder[key]
        case 4:
            holder[key] = random.choice([[holder[key]], {"a": holder[key]}, [holder[key]] * 3])
        case 5 if isinstance(holder, dict):
            holder[key[:-1] if random.random() < 0.5 else key + "s"] = holder.pop(key)
    return content


def _places(content: Any, depth: int) -> Iterator[tuple[Any, Any]]:
    if depth > 20:
        return
    if isinstance(content, dict):
        keys: Iterable[Any] = list(content)
    elif isinstance(content, list):
        keys = range(len(content))
    else:
        return
    for key in keys:
        yield content, key
        yield from _places(content[key], depth + 1)


# ── what comes back ─────────────────────────────────────────────────────────────────────────────


@dataclass
class Answer:
    status: int = 0  # 0: none came
    headers: dict[str, str] = field(default_factory=dict)
    body: bytes = b""
    whole: bool = False
    hung: bool = False


def send(port: int, call: Call) -> Answer:
    until = time.monotonic() + HANG_S
    with socket.create_connection(("127.0.0.1", port), timeout=HANG_S) as connection:
        with contextlib.suppress(OSError):  # it may be refused before all of it is out
            connection.sendall(call.data)
        got = b""
        answer = Answer()
        while not answer.whole and (call.leave_after is None or len(got) < call.leave_after):
            connection.settimeout(max(0.001, until - time.monotonic()))
            try:
                data = connection.recv(1 << 16)
            except TimeoutError:
                answer.hung = True
                break
            except OSError:
                data = b""
            got += data
            answer = parse(got, not data, call.data.startswith(b"HEAD "))
            if not data:
                break
        return answer


def parse(got: bytes, closed: bool, no_body: bool) -> Answer:
    head, found, rest = got.partition(b"\r\n\r\n")
    if found and head.startswith(b"HTTP/1.1 100"):
        head, found, rest = rest.partition(b"\r\n\r\n")
    line, *lines = head.decode("latin-1").split("\r\n")
    match = re.match(r"HTTP/1\.[01] (\d{3})", line)
    if not found or match is None:
        return Answer(body=got)
    pairs = (one.partition(":") for one in lines)
    headers = {name.lower(): value.strip() for name, _, value in pairs}
    answer = Answer(int(match[1]), headers, rest)
    if no_body:
        answer.body, answer.whole = b"", True
    elif "content-length" in headers:
        answer.whole = len(rest) >= int(headers["content-length"])
        answer.body = rest[: int(headers["content-length"])]
    elif headers.get("transfer-encoding") == "chunked":
        answer.body, answer.whole = _unchunked(rest)
    else:
        answer.whole = closed
    return answer


def _unchunked(rest: bytes) -> tuple[bytes, bool]:
    body, at = [], 0
    while (end := rest.find(b"\r\n", at)) >= 0:
        size = int(rest[at:end], 16)
        if not size:
            return b"".join(body), True
        body.append(rest[end + 2 : end + 2 + size])
        at = end + 2 + size + 2
    return b"".join(body), False


# ── whether it is right ─────────────────────────────────────────────────────────────────────────

INSIDES = re.compile(
    rb"Traceback|File \\?\"|/(?:work|opt|usr|home|tmp|root|var|proc)/[\w./-]+|site-packages"
    rb"|\b[\w/]+\.(?:py|rs)\b(?::\d+)?|0x[0-9a-f]{8,}|panicked at"
)


def problem_of(call: Call, answer: Answer) -> str:
    """What is wrong with an answer; empty: nothing."""
    if answer.hung:
        return f"no answer within {HANG_S:g} s"
    if call.leave_after is not None and not answer.whole:
        return ""
    if not answer.status:
        return "no answer" if call.due else ""
    if answer.status >= 500 and not _documented(call, answer):
        return f"status {answer.status}"
    if not answer.whole:
        return "the answer breaks off"
    for found in INSIDES.finditer(answer.body):
        if found.group() not in call.data and b"openapi" not in call.data[:40]:
            return f"the answer tells of our insides: {found.group()!r}"
    if call.data.startswith(b"HEAD "):
        return ""
    try:
        return _wrong_shape(call, answer)
    except (ValueError, KeyError, TypeError) as error:
        return f"the answer cannot be read: {error!r}"


def _documented(call: Call, answer: Answer) -> bool:
    if answer.status == 503:
        return "retry-after" in answer.headers
    return answer.status == 501 and b"/v1/embeddings" in call.data[:40]


def _wrong_shape(call: Call, answer: Answer) -> str:
    kind = answer.headers.get("content-type", "")
    if answer.status >= 400:
        if not kind.startswith("application/json"):
            return f"an error as {kind!r}"
        return _wrong_error(_json(answer.body))
    if kind.startswith("text/event-stream"):
        return _wrong_stream(answer.body)
    if kind.startswith("application/json"):
        _json(answer.body)
        return ""
    return "" if b"/metrics" in call.data[:40] else f"an answer as {kind!r}"


def _wrong_error(content: Any) -> str:
    error = content["error"]
    texts = isinstance(error["message"], str) and isinstance(error["type"], str)
    names = isinstance(error["param"], str | None) and isinstance(error["code"], str | int | None)
    right = set(content) == {"error"} and texts and names and error["message"]
    return "" if right else f"not an error in OpenAI's shape: {str(content)[:300]}"


ENDS = (b"completed", b"incomplete", b"failed")


def _wrong_stream(body: bytes) -> str:
    """Every event is JSON, none tells of a server's error, and the last one says that it is."""
    data = [line[6:] for line in body.split(b"\n") if line.startswith(b"data: ")]
    last = b""
    for last in data:
        if last == b"[DONE]":
            continue
        event = _json(last)
        if event.get("error"):
            wrong = _wrong_error({"error": event["error"]})
            if wrong or event["error"]["code"] != "unavailable":
                return wrong or f"an error in the stream: {event['error']['message']}"
        if event.get("type") == "response.failed":
            message = event["response"]["error"]["message"]
            if not message.startswith("the engine failed"):  # as a 503 would say
                return f"an error in the stream: {message}"
    ends = (b"[DONE]", *(b'{"type":"response.%b"' % end for end in ENDS))
    return "" if last.startswith(ends) else f"the stream ends with {last[:100]!r}"


def _json(body: bytes) -> Any:
    def refuse(name: str) -> None:
        raise ValueError(f"{name} in JSON")

    return json.loads(body, parse_constant=refuse)


# ── a run ───────────────────────────────────────────────────────────────────────────────────────


@dataclass
class Server:
    port: int
    http: HttpServer
    engine: RemoteEngine
    loop: asyncio.AbstractEventLoop
    first_pid: int

    def described(self) -> dict[str, Any]:
        call = Call(-1, "", "", request("GET", "/openapi.json", b""))
        return _json(send(self.port, call).body)

    def leftovers(self) -> str:
        """What is still there when nobody asks any more; empty: nothing, and right books."""
        service, until = self.http._app.service, time.monotonic() + HANG_S
        while service.num_feeds or service.admission.num_open or len(self.engine._streams):
            if time.monotonic() > until:
                return f"{service.num_feeds} feeds, {service.admission.num_open} sequences open"
            time.sleep(0.01)
        try:
            asyncio.run_coroutine_threadsafe(self.engine.audit(), self.loop).result(HANG_S)
        except Exception as error:
            return f"audit: {error!r}"
        if self.engine.pid != self.first_pid:
            return "the engine died, and another was started"
        load = self.engine.load()
        counts = (load.waiting, load.running, load.kv.used, load.kv.fragmented)
        if any(counts):
            return f"waiting, running, KV used and fragmented: {counts}"
        status = send(self.port, Call(-1, "", "", request("GET", "/health", b""))).status
        return "" if status == 200 else f"/health says {status}"


@contextlib.contextmanager
def serving(folder: Path, engine: str) -> Iterator[Server]:
    builder = BUILDER if engine == "instant" else DEFAULT_BUILDER
    config = EngineConfig(
        model=str(tiny_folder(folder)), max_num_seqs=64, num_gpu_blocks_override=1024
    )
    started = threading.Event()
    found: dict[str, Any] = {}

    @contextlib.asynccontextmanager
    async def client() -> AsyncIterator[RemoteEngine]:
        async with await RemoteEngine.start(config, builder) as remote:
            yield remote

    def note(http: HttpServer, remote: RemoteEngine, url: str) -> None:
        port = int(url.rpartition(":")[2])
        found["server"] = Server(port, http, remote, asyncio.get_running_loop(), remote.pid)
        started.set()

    def run() -> None:
        try:
            asyncio.run(serve_forever(client, ServeSettings(**LIMITS), note))
        except BaseException as error:
            found["error"] = error
            started.set()

    thread = threading.Thread(target=run, name="http", daemon=True)
    thread.start()
    started.wait()
    if "error" in found:
        raise found["error"]
    server: Server = found["server"]
    while not server.http.started:
        time.sleep(0.002)
    try:
        yield server
    finally:
        server.http.stop()
        thread.join(HANG_S)


def fuzz(server: Server, seed: int, indices: Iterable[int], show: bool = False) -> dict[str, Any]:
    """Make the calls; the counts, and the failures, each printed as it is found."""
    maker = Maker(server.described(), seed)
    lock = threading.Lock()
    statuses: dict[str, Counter[str]] = {}
    kinds: Counter[str] = Counter()
    failures: list[dict[str, Any]] = []
    slowest = {"wall_s": 0.0, "index": -1}
    began = time.monotonic()

    def one(index: int) -> None:
        call = maker.make(index)
        at = time.monotonic()
        answer = send(server.port, call)
        wall_s = time.monotonic() - at
        problem = problem_of(call, answer)
        left = call.leave_after is not None and not answer.whole
        told = "left" if left else str(answer.status or "closed")
        with lock:
            statuses.setdefault(call.route, Counter())[told] += 1
            kinds[call.kind] += 1
            if wall_s > slowest["wall_s"]:
                about = {"kind": call.kind, "route": call.route, "status": told}
                slowest.update(wall_s=round(wall_s, 3), index=index, **about)
            if problem:
                failures.append({"index": index, "route": call.route, "problem": problem})
            if problem or show:
                print(f"seed {seed}, call {index} ({call.kind}, {call.route}): {problem or told}")
                print(f"    sent {call.data[:1500]!r}, {len(call.data):,} bytes in all")
                print(f"    got  {answer.status} {answer.body[:600]!r}", flush=True)

    with ThreadPoolExecutor(WORKERS) as pool:
        for done in [pool.submit(one, index) for index in indices]:
            done.result()
    leftovers = server.leftovers()
    if leftovers:
        failures.append({"index": -1, "route": "", "problem": f"at the end: {leftovers}"})
        print(failures[-1]["problem"])
    total: Counter[str] = sum(statuses.values(), Counter())
    return {
        "calls": sum(total.values()),
        "seed": seed,
        "failures": sorted(failures, key=lambda failure: failure["index"])[:50],
        "num_failures": len(failures),
        "statuses": dict(sorted(total.items())),
        "kinds": dict(kinds),
        "routes": {
            route: dict(sorted(counts.items())) for route, counts in sorted(statuses.items())
        },
        "slowest": slowest,
        "wall_s": round(time.monotonic() - began, 1),
    }


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--calls", type=int, default=5000)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--engine", choices=("instant", "tiny"), default="instant")
    parser.add_argument("--only", type=int, metavar="INDEX", help="make this call alone")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the result there too")
    args = parser.parse_args()
    indices = range(args.calls) if args.only is None else [args.only]
    with tempfile.TemporaryDirectory() as folder, serving(Path(folder), args.engine) as server:
        result = fuzz(server, args.seed, indices, show=args.only is not None)
    result = {"bench": "fuzz", "engine": args.engine, "machine": platform.machine(), **result}
    for route, counts in result["routes"].items():
        print(f"{route:28} " + "  ".join(f"{name}: {count}" for name, count in counts.items()))
    if args.json is not None:
        args.json.write_text(json.dumps(result, indent=1) + "\n", encoding="utf-8")
    print(json.dumps(result))
    return 1 if result["num_failures"] else 0


if __name__ == "__main__":
    sys.exit(main())
