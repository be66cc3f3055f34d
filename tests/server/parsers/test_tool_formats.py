"""Tool calls in each format, and the typical mistakes of models."""

from __future__ import annotations

import json
import random
import re
from typing import Any

import pytest

from tests.server.generation.test_tools import function
from tests.server.parsers.parsing import Said, read, read_however_cut
from tests.tiny import tiny_folder, tiny_llm
from twostroke import LLM, SamplingParams
from twostroke.serve.generation.conversation import AssistantMessage
from twostroke.serve.generation.tools import ToolCalls
from twostroke.serve.parsers import TOOL_PARSERS, choose_parser
from twostroke.serve.parsers.deltas import ContentDelta, ToolCallDelta
from twostroke.serve.parsers.scanner import Scanner, Steps

BOOK = {
    "$defs": {"seat": {"type": "integer"}},
    "type": "object",
    "properties": {
        "city": {"type": "string"},
        "nights": {"type": "integer"},
        "price": {"type": "number"},
        "smoking": {"type": "boolean"},
        "guests": {"type": "array", "items": {"type": "string"}},
        "room": {"type": "object"},
        "seat": {"$ref": "#/$defs/seat"},
        "until": {"anyOf": [{"type": "integer"}, {"type": "null"}]},
        "zip": {"type": ["string", "null"]},
        "size": {"enum": [1, 2]},
    },
}
TOOLS = [function("book", BOOK), function("now")]
Calls = list[tuple[str, str]]

OSLO = '{"city": "Oslo", "nights": 2}'
TRICKY = r'{"city": "a \"}\\ </tool_call> ``` [ARGS] <|call|> {\u00e9", "room": {"a": {"b": [{}]}}}'
DS_ALL, DS_END = "<｜tool▁calls▁begin｜>", "<｜tool▁calls▁end｜>"
DS_ONE, DS_SEP, DS_STOP = "<｜tool▁call▁begin｜>", "<｜tool▁sep｜>", "<｜tool▁call▁end｜>"
K_ALL, K_END = "<|tool_calls_section_begin|>", "<|tool_calls_section_end|>"
K_ONE, K_SEP, K_STOP = "<|tool_call_begin|>", "<|tool_call_argument_begin|>", "<|tool_call_end|>"


def deepseek(name: str, arguments: str) -> str:
    return f"{DS_ONE}function{DS_SEP}{name}\n```json\n{arguments}\n```{DS_STOP}"


def kimi(name: str, arguments: str, n: int = 0) -> str:
    return f"{K_ONE}functions.{name}:{n}{K_SEP}{arguments}{K_STOP}"


def qwen(name: str, **values: str) -> str:
    parts = "".join(f"<parameter={key}>\n{value}\n</parameter>\n" for key, value in values.items())
    return f"<tool_call>\n<function={name}>\n{parts}</function>\n</tool_call>"


def glm(name: str, **values: str) -> str:
    parts = "".join(
        f"<arg_key>{key}</arg_key>\n<arg_value>{value}</arg_value>\n"
        for key, value in values.items()
    )
    return f"<tool_call>{name}\n{parts}</tool_call>"


# parser, what is written, the content and the calls in it
CORPUS: dict[str, tuple[str, str, str, Calls]] = {
    "mistral, a list": (
        "mistral",
        f'[TOOL_CALLS] [{{"name": "book", "arguments": {OSLO}}}, {{"name": "now"}}]',
        "",
        [("book", OSLO), ("now", "{}")],
    ),
    "mistral, text before": (
        "mistral",
        f'Sure [not a tag]. \n[TOOL_CALLS][{{"name": "book", "arguments": {TRICKY}}}]',
        "Sure [not a tag].",
        [("book", TRICKY)],
    ),
    "mistral, named": ("mistral", f"[TOOL_CALLS]book{OSLO}", "", [("book", OSLO)]),
    "mistral, named with tags": (
        "mistral",
        f"[TOOL_CALLS]book[CALL_ID]Ab3dE6gh9[ARGS]{TRICKY}[TOOL_CALLS]now[ARGS]{{}}",
        "",
        [("book", TRICKY), ("now", "{}")],
    ),
    "mistral, unknown tool": (
        "mistral",
        "[TOOL_CALLS]launch[ARGS]{} so",
        "[TOOL_CALLS]launch[ARGS]{} so",
        [],
    ),
    "mistral, cut off": (
        "mistral",
        '[TOOL_CALLS][{"name": "book", "arguments": {"city": "Os',
        "",
        [("book", '{"city": "Os')],
    ),
    "mistral, broken second entry": (
        "mistral",
        f'[TOOL_CALLS][{{"name": "book", "arguments": {OSLO}}}, {{"name": now}}]',
        '{"name": now}]',
        [("book", OSLO)],
    ),
    "mistral, not a list": ("mistral", "[TOOL_CALLS][1, 2]", "[TOOL_CALLS][1, 2]", []),
    "granite": (
        "granite",
        f'<|tool_call|>[{{"name": "book", "arguments": {OSLO}}}, {{"name": "now"}}]',
        "",
        [("book", OSLO), ("now", "{}")],
    ),
    "granite 3.1": (
        "granite",
        f'So:\n<tool_call>[{{"arguments": {TRICKY}, "name": "book"}}]</tool_call>',
        "So:",
        [("book", TRICKY)],
    ),
    "granite, one object": (
        "granite",
        '<|tool_call|>{"name": "now", "arguments": {}}',
        "",
        [("now", "{}")],
    ),
    "granite, unknown tool": (
        "granite",
        '<|tool_call|>[{"name": "launch"}]',
        '<|tool_call|>[{"name": "launch"}]',
        [],
    ),
    "granite, phi's closing tag": (
        "granite",
        '<|tool_call|>{"name": "now", "arguments": {}}<|/tool_call|>',
        "",
        [("now", "{}")],
    ),
    "phi 4 mini": (
        "phi4_mini_json",
        f'Ok, functools: functools[{{"name": "book", "arguments": {TRICKY}}}, {{"name": "now"}}]',
        "Ok, functools:",
        [("book", TRICKY), ("now", "{}")],
    ),
    "phi 4 mini, the module": (
        "phi4_mini_json",
        "from functools import cache",
        "from functools import cache",
        [],
    ),
    "deepseek": (
        "deepseek_v3",
        f"I look.{DS_ALL}{deepseek('book', TRICKY)}\n{deepseek('now', '{}')}{DS_END}",
        "I look.",
        [("book", TRICKY), ("now", "{}")],
    ),
    "deepseek, several lists": (
        "deepseek_v3",
        f"{DS_ALL}{deepseek('now', '{}')}{DS_END}\n{DS_ALL}{deepseek('book', OSLO)}{DS_END}",
        "",
        [("now", "{}"), ("book", OSLO)],
    ),
    "deepseek, no closing tags": (
        "deepseek_v3",
        f"{DS_ALL}{DS_ONE}function{DS_SEP}book\n```json\n{OSLO}\n```",
        "",
        [("book", OSLO)],
    ),
    "deepseek, unknown tool": (
        "deepseek_v3",
        f"{DS_ALL}{deepseek('launch', '{}')}{DS_END}",
        f"{DS_ALL}{deepseek('launch', '{}')}{DS_END}",
        [],
    ),
    "deepseek, cut off in a tag": ("deepseek_v3", f"a {DS_ALL[:9]}", f"a {DS_ALL[:9]}", []),
    "deepseek 3.1": (
        "deepseek_v31",
        f"{DS_ALL}{DS_ONE}book{DS_SEP}{OSLO}{DS_STOP}{DS_ONE}now{DS_SEP}{{}}{DS_STOP}{DS_END}",
        "",
        [("book", OSLO), ("now", "{}")],
    ),
    "kimi": (
        "kimi_k2",
        f"Well. {K_ALL}{kimi('book', TRICKY)}{kimi('now', '{}', 1)}{K_END}",
        "Well.",
        [("book", TRICKY), ("now", "{}")],
    ),
    "kimi, unknown tool": (
        "kimi_k2",
        f"{K_ALL}{kimi('launch', '{}')}{K_END}",
        f"{K_ALL}{kimi('launch', '{}')}{K_END}",
        [],
    ),
    "kimi, no separator": (
        "kimi_k2",
        f"{K_ALL}{K_ONE}functions.now:0 {{}}",
        f"{K_ALL}{K_ONE}functions.now:0 {{}}",
        [],
    ),
    "qwen3 coder": (
        "qwen3_coder",
        "Now:\n"
        + qwen("book", city="Oslo", nights="2", price="9.50", smoking="False", guests='["é", "b"]')
        + "\n"
        + qwen("now"),
        "Now:",
        [
            (
                "book",
                '{"city": "Oslo", "nights": 2, "price": 9.50, "smoking": false, '
                '"guests": ["é", "b"]}',
            ),
            ("now", "{}"),
        ],
    ),
    "qwen3 coder, types by reference, choice and null": (
        "qwen3_coder",
        qwen("book", seat="3", until="null", zip="0150", size="2", other="7", room="{'a': True}"),
        "",
        [
            (
                "book",
                '{"seat": 3, "until": null, "zip": "0150", "size": 2, "other": "7", '
                '"room": {"a": true}}',
            )
        ],
    ),
    "qwen3 coder, values over several lines with tags in them": (
        "qwen3_coder",
        qwen("book", city="a\n<b>\n</function> </tool_call>\n\n", nights="two"),
        "",
        [("book", '{"city": "a\\n<b>\\n</function> </tool_call>\\n\\n", "nights": "two"}')],
    ),
    "qwen3 coder, no outer tag": (
        "qwen3_coder",
        "<function=now>\n</function>",
        "",
        [("now", "{}")],
    ),
    "qwen3 coder, cut off in a value": (
        "qwen3_coder",
        "<tool_call>\n<function=book>\n<parameter=nights>\n2\n</parameter>\n<parameter=city>\nOs",
        "",
        [("book", '{"nights": 2')],
    ),
    "qwen3 coder, unknown tool": (
        "qwen3_coder",
        qwen("launch", a="1"),
        qwen("launch", a="1"),
        [],
    ),
    "qwen3 coder, JSON instead": (
        "qwen3_coder",
        '<tool_call>\n{"name": "now"}\n</tool_call>' + qwen("now"),
        "",
        [("now", "{}"), ("now", "{}")],
    ),
    "glm, JSON instead": (
        "glm45",
        f'<tool_call>\n{{"name": "book", "arguments": {OSLO}}}\n</tool_call>' + glm("now"),
        "",
        [("book", OSLO), ("now", "{}")],
    ),
    "glm": (
        "glm45",
        "Ok " + glm("book", city="Oslo", nights="2", guests='["a"]') + "\n" + glm("now"),
        "Ok",
        [("book", '{"city": "Oslo", "nights": 2, "guests": ["a"]}'), ("now", "{}")],
    ),
    "glm, markup in a value": (
        "glm45",
        glm("book", city='<arg_key> "x" </tool_call>', smoking="true"),
        "",
        [("book", r'{"city": "<arg_key> \"x\" </tool_call>", "smoking": true}')],
    ),
    "glm, unknown tool": ("glm45", glm("launch", a="1"), glm("launch", a="1"), []),
    "glm, no arguments and no line": ("glm45", "<tool_call>now</tool_call>", "", [("now", "{}")]),
    "pythonic": (
        "pythonic",
        "[book(city='Oslo', nights=2, guests=['a', \"b)\"], room={'x': (1, 2)}), now()]",
        "",
        [
            (
                "book",
                '{"city": "Oslo", "nights": 2, "guests": ["a", "b)"], "room": {"x": [1, 2]}}',
            ),
            ("now", "{}"),
        ],
    ),
    "pythonic, llama 4's tags": (
        "pythonic",
        "<|python_start|>[now()]<|python_end|>",
        "",
        [("now", "{}")],
    ),
    "pythonic, JSON's and bare words": (
        "pythonic",
        "[book(smoking=true, until=null, city=Oslo, price=-1.5e3)]",
        "",
        [("book", '{"smoking": true, "until": null, "city": "Oslo", "price": -1500.0}')],
    ),
    "pythonic, escapes": (
        "pythonic",
        r"""[book(city='it\'s \\ \u00e9 "q"')]""",
        "",
        [("book", r'{"city": "it' + "'" + r's \\ é \"q\""}')],
    ),
    "pythonic, unknown tool": ("pythonic", "[launch(a=1)]", "[launch(a=1)]", []),
    "pythonic, a list": ("pythonic", "[1, 2, 3]", "[1, 2, 3]", []),
    "pythonic, text": ("pythonic", "See [now()].", "See [now()].", []),
    "pythonic, cut off": ("pythonic", "[book(nights=2, city='Os", "", [("book", '{"nights": 2')]),
    "harmony, a call": (
        "openai",
        f"<|channel|>commentary to=functions.book <|constrain|>json<|message|>{OSLO}<|call|>",
        "",
        [("book", OSLO)],
    ),
    "harmony, the recipient first": (
        "openai",
        f" to=functions.book<|channel|>commentary json<|message|>{OSLO}",
        "",
        [("book", OSLO)],
    ),
    "harmony, a preamble and two calls": (
        "openai",
        "<|channel|>commentary<|message|>I look.<|end|><|start|>assistant<|channel|>commentary "
        f"to=functions.book<|message|>{OSLO}<|call|>"
        "<|start|>assistant to=functions.now<|channel|>commentary<|message|><|call|>",
        "I look.",
        [("book", OSLO), ("now", "{}")],
    ),
    "harmony, an unknown tool": (
        "openai",
        "<|channel|>commentary to=functions.launch<|message|>{}<|call|>",
        "<|channel|>commentary to=functions.launch<|message|>{}",
        [],
    ),
    "harmony, none": ("openai", "Just < text.", "Just < text.", []),
    "auto, a fenced call": (
        "auto",
        f'Here:\n```json\n{{"name": "book", "arguments": {OSLO}}}\n```\n',
        "Here:",
        [("book", OSLO)],
    ),
    "auto, a fence and tags": (
        "auto",
        '```json\n{"name": "now"}\n```\n<tool_call>{"name": "now"}</tool_call>',
        "",
        [("now", "{}"), ("now", "{}")],
    ),
    "auto, a fence of something else": (
        "auto",
        'So:\n```json\n{"name": "Bob", "arguments": {}}\n```\nok',
        'So:\n```json\n{"name": "Bob", "arguments": {}}\n```\nok',
        [],
    ),
    "auto, a fence of code": (
        "auto",
        "```json\n[1]\n```\n```python\nx\n```",
        "```json\n[1]\n```\n```python\nx\n```",
        [],
    ),
    "kimi, an endless name": (
        "kimi_k2",
        f"{K_ONE}functions.{'x' * 300}{K_ALL}{kimi('now', '{}')}",
        f"{K_ONE}functions.{'x' * 300}",
        [("now", "{}")],
    ),
    "qwen3 coder, an endless name": (
        "qwen3_coder",
        f"<function=no{'<w' * 50}{qwen('now')}> {qwen('now')}",
        f"<function=no{'<w' * 50}>",
        [("now", "{}"), ("now", "{}")],
    ),
    "harmony, an endless header": (
        "openai",
        f"<|channel|>commentary {'to=' * 150}<|channel|>final<|message|>ok",
        f"<|channel|>commentary {'to=' * 150}ok",
        [],
    ),
    "hermes, a fenced call": ("hermes", '```json\n{"name": "now"}\n```', "", [("now", "{}")]),
    "hermes, without tags": (
        "hermes",
        f'{{"name": "book", "arguments": {OSLO}}}',
        "",
        [("book", OSLO)],
    ),
    "hermes, two without tags": (
        "hermes",
        f'Sure.\n  {{"name": "book", "arguments": {TRICKY}}}\n{{"arguments": {{}}, "name": "now"}}',
        "Sure.",
        [("book", TRICKY), ("now", "{}")],
    ),
    "hermes, without tags within a line": (
        "hermes",
        'So {"name": "now", "arguments": {}} is a call',
        'So {"name": "now", "arguments": {}} is a call',
        [],
    ),
    "hermes, other objects": (
        "hermes",
        '{"name": "Bob", "arguments": {}}\n{"age": 5, "name": "now"}\nif (x) {\n  y }\n{',
        '{"name": "Bob", "arguments": {}}\n{"age": 5, "name": "now"}\nif (x) {\n  y }\n{',
        [],
    ),
    "qwen3 coder, without tags": (
        "qwen3_coder",
        f'{{"name": "book", "arguments": {OSLO}}}\n{qwen("now")}',
        "",
        [("book", OSLO), ("now", "{}")],
    ),
    "seed oss": (
        "seed_oss",
        "Well.\n<seed:tool_call>\n<function=book>\n<parameter=city>Oslo</parameter>\n"
        "<parameter=nights>2</parameter>\n</function>\n</seed:tool_call>",
        "Well.",
        [("book", OSLO)],
    ),
    "olmo3": (
        "olmo3",
        "Well.\n<function_calls>\nbook(city='Oslo', nights=2)\nnow()\n</function_calls>",
        "Well.",
        [("book", OSLO), ("now", "{}")],
    ),
    "olmo3, unknown tool": (
        "olmo3",
        "<function_calls>launch()</function_calls>",
        "<function_calls>launch()</function_calls>",
        [],
    ),
    "internlm": (
        "internlm",
        f'Well.<|action_start|><|plugin|>\n{{"name": "book", "parameters": {OSLO}}}<|action_end|>',
        "Well.",
        [("book", OSLO)],
    ),
    "internlm, unknown tool": (
        "internlm",
        '<|action_start|><|plugin|>\n{"name": "launch"}<|action_end|>',
        '<|action_start|><|plugin|>\n{"name": "launch"}<|action_end|>',
        [],
    ),
    "xlam": (
        "xlam",
        f'[{{"name": "book", "arguments": {TRICKY}}}, {{"name": "now", "arguments": {{}}}}]',
        "",
        [("book", TRICKY), ("now", "{}")],
    ),
    "xlam, a fence, tags and no list": (
        "xlam",
        f'Ok:\n```json\n[{{"name": "book", "arguments": {OSLO}}}]\n```\n<tool_call>[{{"name": '
        '"now"}]</tool_call>\n[TOOL_CALLS] {"name": "now"}',
        "Ok:",
        [("book", OSLO), ("now", "{}"), ("now", "{}")],
    ),
    "xlam, tags first": ("xlam", '[TOOL_CALLS][{"name": "now"}]', "", [("now", "{}")]),
    "xlam, no calls": ("xlam", " [1, 2] [TOOL_CALLS]", " [1, 2] [TOOL_CALLS]", []),
    "xlam, unknown tool": (
        "xlam",
        '[{"name": "launch", "arguments": {}}]',
        '[{"name": "launch", "arguments": {}}]',
        [],
    ),
    "minicpm5": (
        "minicpm5",
        'Well.\n<function name="book"><param name="city">a &lt; b</param>\n<param name="nights">2'
        "</param></function>\n<function name='now'></function>",
        "Well.",
        [("book", '{"city": "a < b", "nights": 2}'), ("now", "{}")],
    ),
    "minicpm5, verbatim": (
        "minicpm5",
        '<function name="book"><param name="city"><![CDATA[  &lt; </param>\n]]></param></function>',
        "",
        [("book", '{"city": "  &lt; </param>\\n"}')],
    ),
    "minicpm5, unknown tool": (
        "minicpm5",
        '<function name="launch"></function>',
        '<function name="launch"></function>',
        [],
    ),
    "minicpm5, no quotes": ("minicpm5", "<function name=now>", "<function name=now>", []),
    "minicpm5, cut off": (
        "minicpm5",
        '<function name="book"><param name="nights">2</param><param name="city">Os',
        "",
        [("book", '{"nights": 2')],
    ),
    "functiongemma": (
        "functiongemma",
        "Well.<start_function_call>call:book{city:<escape>a, }b<escape>,nights:2,smoking:true,"
        "guests:[<escape>x: y<escape>,z],room:{a:{b:[1,null]}},zip:<escape>0150<escape>}"
        "<end_function_call><start_function_call>call:now{}<end_function_call>",
        "Well.",
        [
            (
                "book",
                '{"city": "a, }b", "nights": 2, "smoking": true, "guests": ["x: y","z"], '
                '"room": {"a":{"b":[1,null]}}, "zip": "0150"}',
            ),
            ("now", "{}"),
        ],
    ),
    "functiongemma, unknown tool": (
        "functiongemma",
        "<start_function_call>call:launch{}<end_function_call>",
        "<start_function_call>call:launch{}<end_function_call>",
        [],
    ),
    "functiongemma, cut off": (
        "functiongemma",
        "<start_function_call>call:book{nights:2,city:<escape>Os",
        "",
        [("book", '{"nights": 2')],
    ),
    "hermes, nested braces and escapes": (
        "hermes",
        f'<tool_call>{{"name": "book", "arguments": {TRICKY}}}</tool_call>',
        "",
        [("book", TRICKY)],
    ),
}


def message(parser: str) -> AssistantMessage:
    return AssistantMessage(ToolCalls(parser, TOOLS))


@pytest.mark.parametrize("name", CORPUS)
def test_calls_are_found_wherever_the_text_is_cut(name: str) -> None:
    parser, text, content, calls = CORPUS[name]
    assert read_however_cut(lambda: message(parser), text) == Said("", content, calls)
    for _, arguments in calls:
        if "cut off" not in name:
            assert isinstance(json.loads(arguments), dict)


def test_every_format_has_a_corpus() -> None:
    tested = {TOOL_PARSERS[parser] for parser, *_ in CORPUS.values() if parser != "auto"}
    assert tested | {TOOL_PARSERS["llama3_json"]} == set(TOOL_PARSERS.values())


@pytest.mark.parametrize("parser", ["auto", *TOOL_PARSERS])
def test_random_nonsense_is_read_the_same_however_it_is_cut(parser: str) -> None:
    tags = [
        tag for _, text, *_ in CORPUS.values() for tag in re.findall(r"<[^<>]*>|\[[A-Z_]+\]", text)
    ]
    parts = sorted({*tags, "book", "now", "launch", "(", ")", "[", "]", "{", "}", '"', "\\", "\n"})
    parts += ['{"name": "now"', ', "arguments": {', "city", "=", "'", ",", ":", " ", "```json", "1"]
    numbers = random.Random(parser)
    for _ in range(150):
        text = "".join(numbers.choices(parts, k=numbers.randrange(1, 16)))
        whole = read(message(parser), [text])
        assert read(message(parser), list(text)) == whole, text
        if not whole.calls and parser != "openai":
            assert whole.content == text


@pytest.mark.parametrize("parser", ["auto", *TOOL_PARSERS])
def test_what_a_model_repeats_is_not_read_again_and_again(
    parser: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Beginnings of calls without an end, white space, quotes: twice as many, twice the work."""
    looks = 0
    peek = Scanner.peek

    def counted(self: Scanner, ahead: int = 0) -> Steps[str]:
        nonlocal looks
        looks += 1
        return peek(self, ahead)

    monkeypatch.setattr(Scanner, "peek", counted)

    def looks_at(text: str) -> int:
        nonlocal looks
        looks = 0
        read(message(parser), [text])
        return looks

    begins = {
        DS_ALL + DS_ONE + "function" + DS_SEP + "book\n```json\n",
        K_ALL + K_ONE + "functions.book:0" + K_SEP,
        "[TOOL_CALLS]book[ARGS]",
        "<|channel|>commentary to=functions.book<|message|>",
        "<tool_call>\n<function=book>\n<parameter=a>",
        "<tool_call>book\n<arg_key>",
        "[book(a='",
        '<function name="book"><param name="a">',
        "<start_function_call>call:book{a:[",
    }
    for piece in (*begins, '<tool_call>{":', " \n", '{"name": "', '```json{"name":', "<", "[["):
        few, many = looks_at(piece * 100), looks_at(piece * 200)
        assert many <= 2 * few + 100, piece


@pytest.mark.parametrize(
    ("parser", "pieces", "deltas"),
    [
        (
            "mistral",
            ["[TOOL_CA", "LLS]bo", "ok[ARGS]", '{"ci', 'ty": "Oslo"}'],
            [0, 0, 0, 2, 1],
        ),
        (
            "deepseek_v3",
            [DS_ALL, f"{DS_ONE}function{DS_SEP}book\n```json\n", '{"a', '": 1}'],
            [0, 0, 2, 1],
        ),
        ("kimi_k2", [f"{K_ALL}{K_ONE}functions.book:0", f"{K_SEP}", '{"a', '": 1}'], [0, 0, 2, 1]),
        (
            "openai",
            ["<|channel|>commentary to=functions.book", "<|message|>", '{"a', '": 1}'],
            [0, 1, 1, 1],
        ),
        (
            "qwen3_coder",
            [
                "<tool_call>\n<function=book",
                ">",
                "\n<parameter=nights>\n2",
                "\n</parameter>",
                "\n</function>",
            ],
            [0, 1, 0, 1, 1],
        ),
        ("pythonic", ["[book(", "nights=", "2", ",", "city='a'", ")"], [0, 0, 0, 2, 0, 1]),
    ],
)
def test_a_call_is_told_as_early_as_its_format_allows(
    parser: str, pieces: list[str], deltas: list[int]
) -> None:
    said = message(parser)
    assert [len(said.push(piece)) for piece in pieces] == deltas
    assert all(isinstance(delta, ToolCallDelta) for delta in said.flush())


def test_text_is_told_as_it_comes() -> None:
    said = message("mistral")
    assert said.push("Hello [T") == [ContentDelta("Hello")]
    assert said.push("he] ") == [ContentDelta(" [The]")]


def test_ids_are_as_the_model_s_template_wants_them() -> None:
    (call,) = _calls("mistral", f"[TOOL_CALLS]book{OSLO}")
    assert re.fullmatch("[a-zA-Z0-9]{9}", call["id"])
    (call,) = _calls("kimi_k2", f"{K_ALL}{kimi('book', OSLO, 3)}{K_END}")
    assert call["id"] == "functions.book:3"


def _calls(parser: str, text: str) -> list[dict[str, Any]]:
    said = message(parser)
    said.push(text)
    said.flush()
    return [call.to_dict() for call in said.calls]


@pytest.mark.parametrize(
    ("shown", "parser"),
    [
        ("[AVAILABLE_TOOLS] [TOOL_CALLS]", "mistral"),
        ("<｜tool▁calls▁begin｜> ```json", "deepseek_v3"),
        ("<seed:tool_call> <function= <parameter=", "seed_oss"),
        ("<function_calls> <think>", "olmo3"),
        ("<|action_start|> <|plugin|>", "internlm"),
        ('<function name="a"><param name="b">', "minicpm5"),
        ("<start_function_call>call:", "functiongemma"),
        ("<｜tool▁calls▁begin｜>", "deepseek_v31"),
        ("<|tool_calls_section_begin|>", "kimi_k2"),
        ("<tool_call><function=a><parameter=b>", "qwen3_coder"),
        ("<tool_call>{name}<arg_key>", "glm45"),
        ("<|start_of_role|> <|tool_call|>", "granite"),
        ("functools[{", "phi4_mini_json"),
        ("<tool_call>", "hermes"),
        ("[func_name1(params_name1=params_value1)", "pythonic"),
        ("<|start|>assistant<|channel|>final<|message|>", "openai"),
        ("<|start_header_id|>", "llama3_json"),
        ("", "hermes"),
    ],
)
def test_auto_goes_by_what_the_chat_template_shows(shown: str, parser: str) -> None:
    assert choose_parser(shown) == parser


def test_a_schema_that_refers_to_itself_is_looked_at_once() -> None:
    loop: dict[str, Any] = {"$ref": "#/$defs/a"}
    schema = {"$defs": {"a": {"anyOf": [loop] * 64}}, "properties": {"x": loop, "y": 1}}
    said = AssistantMessage(ToolCalls("glm45", [function("f", schema)]))
    assert read(said, [glm("f", x="1", y="2")]).calls == [("f", '{"x": "1", "y": "2"}')]


# Calls that must be made


@pytest.fixture(scope="module")
def llm(tmp_path_factory: pytest.TempPathFactory) -> LLM:
    return tiny_llm(tiny_folder(tmp_path_factory.mktemp("tiny")))


@pytest.mark.parametrize("parser", sorted(TOOL_PARSERS))
def test_a_forced_call_is_written_so_that_its_parser_reads_it(llm: LLM, parser: str) -> None:
    """Forced calls of a format without JSON are in another format."""
    small = {"type": "object", "properties": {"nights": {"enum": [1, 2]}}, "required": ["nights"]}
    closed = small | {"additionalProperties": False}
    calls = ToolCalls(parser, [function("book", closed)], "required")
    asked = SamplingParams(
        temperature=2, seed=1, max_tokens=200, structured_outputs=calls.structured_outputs()
    )
    (output,) = llm.generate("the fox", asked, use_tqdm=False)
    said = AssistantMessage(calls)
    (call,) = read(said, [output.outputs[0].text]).calls
    assert call[0] == "book"
    assert json.loads(call[1])["nights"] in (1, 2)
    assert said.content is None
