"""The calls of `fuzz.py`: made from a server's OpenAPI description, and mutated.

A call follows from (seed, index) alone.
"""

from __future__ import annotations

import copy
import json
import re
from collections.abc import Iterable, Iterator
from random import Random
from typing import Any, NamedTuple

BODY_BYTES = 1 << 20  # the server's limit, small so that too large bodies are cheap to send


class Call(NamedTuple):
    number: int
    kind: str
    route: str  # name in the counts
    data: bytes
    due: bool = True  # valid HTTP, so an answer must arrive
    leave_after: int | None = None  # bytes of the answer; None: read to the end


GOOD: dict[str, dict[str, Any]] = {
    "/v1/chat/completions": {"messages": [{"role": "user", "content": "hi"}], "max_tokens": 3},
    "/v1/chat/completions/batch": {
        "messages": [[{"role": "user", "content": "hi"}]],
        "max_tokens": 3,
    },
    "/invocations": {"messages": [{"role": "user", "content": "hi"}], "max_tokens": 3},
    "/v1/completions": {"prompt": "hi", "max_tokens": 3},
    "/v1/responses": {"input": "hi", "max_output_tokens": 3},
    "/v1/responses/input_tokens": {"input": "hi"},
    "/v1/embeddings": {"input": "hi"},
    "/tokenize": {"prompt": "hi"},
    "/detokenize": {"tokens": [4, 5]},
    "/pools": {"data_parallel_size": 1},
    "/v1/messages": {"messages": [{"role": "user", "content": "hi"}], "max_tokens": 3},
    "/v1/messages/count_tokens": {"messages": [{"role": "user", "content": "hi"}]},
    "/api/chat": {
        "messages": [{"role": "user", "content": "hi"}],
        "options": {"num_predict": 3},
    },
    "/api/generate": {"prompt": "hi", "options": {"num_predict": 3}},
    "/api/show": {"model": "tiny:latest"},
    "/completion": {"prompt": "hi", "n_predict": 3},
    "/completions": {"prompt": "hi", "n_predict": 3},
    "/infill": {"input_prefix": "a", "input_suffix": "b", "n_predict": 3},
    "/apply-template": {"messages": [{"role": "user", "content": "hi"}]},
    "/learn/predict": {"prompt_tokens": 20, "output_tokens": 3, "streams": 1},
    "/learn/run": {"experiment": "predict", "prompt_tokens": 20, "output_tokens": 3, "streams": 1},
    "/learn/attention": {"tokens": [4, 5, 6], "layer": 0, "head": 0},
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
ITEMS: list[Any] = [
    {"role": "user", "content": [{"type": "input_text", "text": "hi"}]},
    {"type": "reasoning", "id": "rs_1", "summary": [], "content": None},
    {"type": "function_call", "call_id": "1", "name": "f", "arguments": "{}"},
    {"type": "function_call_output", "call_id": "1", "output": "3"},
    {"type": "message", "role": "assistant", "content": [{"type": "output_text", "text": "ok"}]},
]
# Values that get further than the door: right in type, and as a user might send them.
USUAL: dict[str, list[Any]] = {
    "messages": MESSAGES, "prompt": ["hi", "a small model", [4, 5, 6], ["a", "b"], [[4], [5]]],
    "input": ["hi", [{"role": "user", "content": "hi"}], ITEMS], "model": [None], "tools": [[TOOL],
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
    "modalities": [["text"]], "truncation": ["disabled", "auto"], "suffix": [None], "audio": [None],
    "prediction": [None], "functions": [None], "function_call": [None], "conversation": [None],
    "web_search_options": [None], "previous_response_id": [None], "background": [False, True],
    "max_tool_calls": [None, 2], "context_management": [None], "stream_options": [
        {"include_usage": True}, {"continuous_usage_stats": True, "include_usage": True}],
    "n_predict": [0, 1, 3, 20, -1], "n_cmpl": [1, 2], "n_probs": [0, 2], "grammar": [
        'root ::= "a" | "b"', ""], "json_schema": [{"type": "integer"}, {}],
    "repeat_last_n": [-1, 0], "repeat_penalty": [1, 1.2],
    "options": [{"num_predict": 3}, {"temperature": 0, "seed": 3}],
    "format": ["", "json", {"type": "integer"}], "think": [True, False, "high"], "template": [None],
    "context": [None], "images": [None], "typical_p": [1], "mirostat": [0], "top_n_sigma": [-1],
    "dry_multiplier": [0], "xtc_probability": [0], "dynatemp_range": [0], "adaptive_target": [-1],
    "min_keep": [0], "n_cache_reuse": [0], "post_sampling_probs": [False], "lora": [[]],
    "samplers": [["top_k"], []], "stop_sequences": [["e"], []],
    "mcp_servers": [None, []], "container": [None], "compaction": [None], "thread": [None],
    "system": ["be brief"],
    "thinking": [{"type": "enabled", "budget_tokens": 5}, {"type": "disabled"}],
    "response_fields": [["content"], []],
}  # fmt: skip
# Routes with other meanings of the same field names.
USUAL_OF: dict[str, dict[str, list[Any]]] = {
    path: {
        "tools": [None, [{"name": "f", "input_schema": {"type": "object"}}]],
        "tool_choice": [{"type": "auto"}, {"type": "any"}, {"type": "tool", "name": "f"}],
        "messages": [
            [{"role": "user", "content": "hi"}],
            [{"role": "user", "content": [{"type": "text", "text": "größer"}]},
             {"role": "assistant", "content": "an"}],
            [{"role": "user", "content": "f?"},
             {"role": "assistant", "content": [
                 {"type": "tool_use", "id": "1", "name": "f", "input": {"a": 1}}]},
             {"role": "user", "content": [{"type": "tool_result", "tool_use_id": "1"}]}],
        ],
    }
    for path in ("/v1/messages", "/v1/messages/count_tokens")
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
    "grammar": list(GRAMMARS), "json_schema": list(SCHEMAS), "format": ["x", *SCHEMAS],
    "output_format": [{"type": "json_schema", "schema": one} for one in SCHEMAS],
    "output_config": [{"effort": "\ud800"}, {"format": {"type": "json_schema", "schema": {}}}],
    "system": ["\ud800", "x" * 100_000, [{"type": "text", "text": "a"}] * 500, [{"type": "image"}]],
    "stop_sequences": [[""], ["x"] * 65, ["\ud800"]], "think": ["\ud800", "", True, 3],
    "thinking": [{"type": "enabled", "budget_tokens": 2**64}, {"type": "x"}],
    "options": [
        {"num_predict": 0}, {"num_predict": 2**64}, {"seed": 2**63}, {"stop": [""]},
        {"mirostat": 1}, {"temperature": -1}, {"temperature": 1e308}, {"top_k": -(2**63)},
        {"repeat_penalty": 0}, {"repeat_last_n": 5, "repeat_penalty": 2}, {"num_ctx": 10**30},
        {"x": 1}, {"top_p": 0}],
    "suffix": ["", "b", "x" * 100_000], "raw": [True], "context": [[1], [-1], [2**64]],
    "input_prefix": ["", "\ud800", "x" * 100_000], "input_suffix": ["", "\x00"],
    "input_extra": [[{"text": "a"}] * 500, [{"text": "\ud800", "filename": "../x"}]],
    "n_predict": [0, -1, -2, 2**31, 2**64, 10**40], "n_cmpl": [0, -1, 128, 129, 2**64],
    "n_probs": [-1, 20, 21, 10**9], "response_fields": [["//"], ["a/b/c"] * 64, ["\ud800"]],
    "mirostat_tau": [1e308], "images": [["x"], "x"], "keep_alive": [0, "5m", {"a": []}],
}  # fmt: skip


class Maker:
    """A generator of calls from (seed, index)."""

    def __init__(self, described: dict[str, Any], seed: int) -> None:
        self._described, self._seed = described, seed
        self._routes = [
            (method.upper(), path, operation)
            for path, methods in described["paths"].items()
            for method, operation in methods.items()
        ]
        # Most calls go to routes that read a body.
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
        if (
            random.random() < 0.08
        ):  # disconnect while sending, before the answer, or in the middle of it
            if random.random() < 0.4:
                data, leave_after = data[: random.randrange(len(data))], 0
            else:
                leave_after = random.choice([0, 1, 200, 700, 3000])
        return Call(index, kind, route, data, leave_after=leave_after)

    # ── bodies ────────────────────────────────────────────────────────────────────────────────────

    def _content(self, random: Random, kind: str, path: str, operation: dict[str, Any]) -> Any:
        if "requestBody" not in operation:
            return random.choice([None, None, *NASTY]) if kind != "valid" else None
        schema = operation["requestBody"]["content"]["application/json"]["schema"]
        if kind == "hostile":
            return self._hostile(random, path, schema)
        content = self._from_schema(random, schema, 0, usual={**USUAL, **USUAL_OF.get(path, {})})
        if kind == "mutated":
            content = copy.deepcopy(content)  # the tables stay as they are
            for _ in range(random.choice([1, 1, 2, 4])):
                content = mutated(random, content)
        return content

    def _hostile(self, random: Random, path: str, schema: Any) -> Any:
        """Return a valid request with one to three hostile values of the right type."""
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
        if isinstance(schema, bool):  # `true`: any value; `false`: no more items
            return {}
        while "$ref" in schema:
            name = schema["$ref"].rpartition("/")[2]
            schema = self._described["components"]["schemas"][name]
        return schema

    def _from_schema(
        self,
        random: Random,
        schema: Any,
        depth: int,
        name: str = "",
        usual: dict[str, list[Any]] = USUAL,
    ) -> Any:
        """Return a value that the schema allows. Known fields mostly get a usual value."""
        if name in usual and random.random() < 0.85:
            return random.choice(usual[name])
        schema = self._resolved(schema)
        if "anyOf" in schema:
            return self._from_schema(random, random.choice(schema["anyOf"]), depth, "", usual)
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
                    key: self._from_schema(random, value, depth + 1, key, usual)
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
            case "array" if "prefixItems" in schema:
                items = schema["prefixItems"]
                return [self._from_schema(random, item, depth + 1) for item in items]
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

    # ── HTTP ──────────────────────────────────────────────────────────────────────────────────────

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
NO_HTTP: list[tuple[bytes, ...]] = [  # the parser may accept or refuse these
    (b"Content-Length: -1",), (b"Content-Length: 5",), (b"Content-Length: 99999999999999999999",),
    (b"Transfer-Encoding: gzip",),
    (b"Transfer-Encoding: chunked",), (b"no colon",), (b"X: \x00",), (b": x",), (b" X: folded",),
    (b"X y: z",), (b"Content-Length: 1e3",),
]  # fmt: skip
HEADERS += NO_HTTP


def no_http(body: bytes) -> list[bytes]:
    head = b"POST /v1/completions HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\n"
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
            b"GET /health HTTP/1.1\r\nHost: localhost\r\n\r\n" * 50,
        request("POST", "/v1/completions", body, b"Content-Type: application/json") * 3,
            b"\xff" * 300, b"GET / HTTP/1.1\r\nX: \r\n y\r\n\r\n",
    ]  # fmt: skip


def dump(content: Any) -> bytes:
    """Encode as JSON with escaped half surrogates. "<deep 900>" stands for 900 nested objects,
    which our own parser would refuse."""
    text = json.dumps(content).encode()
    return DEEP.sub(lambda found: nested(int(found[1]), key="properties").encode(), text)


def request(method: str, path: str, body: bytes, *headers: bytes, chunked: Any = None) -> bytes:
    """Return an HTTP request. `chunked`: a `Random` that splits the body into chunks."""
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
    """Return a copy with one inner value replaced, removed, doubled, renamed or wrapped."""
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
