"""Tool calls: what requests may say, what models write, and what is told of it piece by piece."""

from __future__ import annotations

import json
import random
import re
from itertools import count
from pathlib import Path
from typing import Any

import pytest

from tests.tiny import tiny_folder, tiny_llm
from twostroke import LLM, SamplingParams
from twostroke.errors import RequestError
from twostroke.serve.generation.tools import ToolCalls, choose_parser
from twostroke.serve.parsers.deltas import ContentDelta, Delta, ToolCallDelta

WEATHER = {
    "type": "object",
    "properties": {
        "city": {"type": "string", "maxLength": 8},
        "unit": {"enum": ["celsius", "fahrenheit"]},
    },
    "required": ["city"],
    "additionalProperties": False,
}
POINTS = {
    "$defs": {"point": {"type": "integer", "minimum": 0, "maximum": 9}},
    "type": "object",
    "properties": {"at": {"type": "array", "items": {"$ref": "#/$defs/point"}, "maxItems": 3}},
    "required": ["at"],
    "additionalProperties": False,
}


def function(name: str, parameters: Any = None) -> dict[str, Any]:
    described = {"name": name, "description": f"{name} it"}
    if parameters is not None:
        described["parameters"] = parameters
    return {"type": "function", "function": described}


TOOLS = [function("get_weather", WEATHER), function("draw", POINTS), function("now")]
Joined = tuple[str, list[tuple[str, str, str]]]


def joined(deltas: list[Delta]) -> Joined:
    """What a client makes of a stream."""
    content, calls = "", list[list[str]]()
    for delta in deltas:
        if isinstance(delta, ContentDelta):
            assert delta.text
            content += delta.text
        elif delta.id is not None:
            assert delta.index == len(calls)
            assert delta.name is not None
            calls.append([delta.id, delta.name, delta.arguments])
        else:
            assert delta.name is None
            assert delta.index == len(calls) - 1
            calls[-1][2] += delta.arguments
    return content, [(id, name, arguments) for id, name, arguments in calls]


def parse(parser: str, pieces: list[str]) -> Joined:
    numbers = count()
    stream = ToolCalls(parser, TOOLS).stream(lambda: f"call_{next(numbers)}")
    deltas = [delta for piece in pieces for delta in stream.push(piece)] + stream.flush()
    told = joined(deltas)
    assert told[1] == [(call.id, call.name, call.arguments) for call in stream.calls]
    return told


def found(parser: str, text: str) -> tuple[str, list[tuple[str, str]]]:
    content, calls = parse(parser, [text])
    return content, [(name, arguments) for _, name, arguments in calls]


PARIS = '{"city": "Paris", "unit": "celsius"}'
TRICKY = '{"city": "a \\"}\\\\ </tool_call> {"}'

# Written as Hermes 2 Pro, Qwen2.5 and Llama 3.1 write, and as they fail.
WRITTEN: dict[str, tuple[str, str, str, list[tuple[str, str]]]] = {
    "hermes": (
        "hermes",
        f'<tool_call>\n{{"name": "get_weather", "arguments": {PARIS}}}\n</tool_call>',
        "",
        [("get_weather", PARIS)],
    ),
    "hermes, arguments first": (
        "hermes",
        f'<tool_call>\n{{"arguments": {PARIS}, "name": "get_weather"}}\n</tool_call>',
        "",
        [("get_weather", PARIS)],
    ),
    "qwen, content and parallel calls": (
        "hermes",
        "Let me check < both.\n\n"
        f'<tool_call>\n{{"name": "get_weather", "arguments": {PARIS}}}\n</tool_call>\n'
        f'<tool_call>\n{{"name": "draw", "arguments": {{"at": [1, 2]}}}}\n</tool_call>',
        "Let me check < both.",
        [("get_weather", PARIS), ("draw", '{"at": [1, 2]}')],
    ),
    "text after a call": (
        "hermes",
        f'<tool_call>{{"name":"get_weather","arguments":{PARIS}}}</tool_call>\nDone <b>.\n',
        "\nDone <b>.\n",
        [("get_weather", PARIS)],
    ),
    "no closing tag": (
        "hermes",
        f'<tool_call>\n{{"name": "get_weather", "arguments": {PARIS}}} so',
        " so",
        [("get_weather", PARIS)],
    ),
    "no closing tag before the next": (
        "hermes",
        '<tool_call>\n{"name": "now"}\n<tool_call>{"name": "now", "arguments": null}',
        "",
        [("now", "{}"), ("now", "{}")],
    ),
    "braces and tags in strings": (
        "hermes",
        f'<tool_call>\n{{"name": "get_weather", "arguments": {TRICKY}}}\n</tool_call>',
        "",
        [("get_weather", TRICKY)],
    ),
    "arguments in a string": (
        "hermes",
        f'<tool_call>\n{{"name": "get_weather", "arguments": {json.dumps(PARIS)}}}\n</tool_call>',
        "",
        [("get_weather", PARIS)],
    ),
    "cut off in the arguments": (
        "hermes",
        '<tool_call>\n{"name": "get_weather", "arguments": {"city": "Par',
        "",
        [("get_weather", '{"city": "Par')],
    ),
    "cut off before the arguments": (
        "hermes",
        'So:\n<tool_call>\n{"name": "get_wea',
        'So:\n<tool_call>\n{"name": "get_wea',
        [],
    ),
    "an unknown tool": (
        "hermes",
        '<tool_call>\n{"name": "launch", "arguments": {}}\n</tool_call>',
        '<tool_call>\n{"name": "launch", "arguments": {}}\n</tool_call>',
        [],
    ),
    "not JSON, then a call": (
        "hermes",
        '<tool_call>\n{name: draw}\n</tool_call>\n<tool_call>{"name": "now"}</tool_call>',
        "<tool_call>\n{name: draw}\n</tool_call>",
        [("now", "{}")],
    ),
    "a list for arguments": (
        "hermes",
        '<tool_call>{"name": "draw", "arguments": [1]}</tool_call>',
        '<tool_call>{"name": "draw", "arguments": [1]}</tool_call>',
        [],
    ),
    "half a tag at the end": ("hermes", "1 <tool_cal", "1 <tool_cal", []),
    "a tag begun twice": (
        "hermes",
        '<<tool_call><tool_call>{"name": "now"}</tool_call>',
        "<<tool_call>",
        [("now", "{}")],
    ),
    "only text": ("hermes", "  It is < 3, or {not}.\n\n", "  It is < 3, or {not}.\n\n", []),
    "nothing": ("hermes", "", "", []),
    "blank": ("hermes", " \n", " \n", []),
    "llama": (
        "llama3_json",
        f'{{"name": "get_weather", "parameters": {PARIS}}}',
        "",
        [("get_weather", PARIS)],
    ),
    "llama, python tag": (
        "llama3_json",
        f'<|python_tag|>{{"name": "get_weather", "parameters": {PARIS}}}',
        "",
        [("get_weather", PARIS)],
    ),
    "llama, parallel": (
        "llama3_json",
        f'\n{{"name": "get_weather", "parameters": {PARIS}}}; '
        '{"name": "draw", "parameters": {"at": []}}\n',
        "",
        [("get_weather", PARIS), ("draw", '{"at": []}')],
    ),
    "llama, type first": (
        "llama3_json",
        f'{{"type": "function", "name": "get_weather", "parameters": {PARIS}}}',
        "",
        [("get_weather", PARIS)],
    ),
    "llama, text": (
        "llama3_json",
        'The answer is {"name": "now"}.',
        'The answer is {"name": "now"}.',
        [],
    ),
    "llama, other JSON": (
        "llama3_json",
        '{"name": "Bob", "parameters": {}}; {"name": "now"}',
        '{"name": "Bob", "parameters": {}}; {"name": "now"}',
        [],
    ),
    "llama, text after a call": (
        "llama3_json",
        '{"name": "now", "parameters": {}} That was it.',
        " That was it.",
        [("now", "{}")],
    ),
    "llama, a tag and no call": (
        "llama3_json",
        "<|python_tag|>print(1)",
        "<|python_tag|>print(1)",
        [],
    ),
    "llama, cut off": (
        "llama3_json",
        '{"name": "draw", "parameters": {"at": [1,',
        "",
        [("draw", '{"at": [1,')],
    ),
}


@pytest.mark.parametrize("name", WRITTEN)
def test_calls_are_found_in_what_models_write(name: str) -> None:
    parser, text, content, calls = WRITTEN[name]
    assert found(parser, text) == (content, calls)


@pytest.mark.parametrize("name", WRITTEN)
def test_where_the_text_is_cut_makes_no_difference(name: str) -> None:
    parser, text, *_ = WRITTEN[name]
    whole = parse(parser, [text])
    for cut in range(len(text) + 1):
        assert parse(parser, [text[:cut], text[cut:]]) == whole, text[:cut]
    assert parse(parser, list(text)) == whole
    numbers = random.Random(0)
    for _ in range(20):
        cuts = sorted(numbers.randrange(len(text) + 1) for _ in range(4))
        ends = [*cuts, len(text)]
        pieces = [text[a:b] for a, b in zip([0, *cuts], ends, strict=True)]
        assert parse(parser, pieces) == whole


def test_random_nonsense_loses_nothing_and_is_cut_anywhere() -> None:
    parts = [
        "<tool_call>",
        "</tool_call>",
        '{"name": ',
        '"now"',
        ', "arguments": ',
        "{}",
        "}",
        "\n",
    ]
    parts += ["[", '"', "\\", "x", ";", "<|python_tag|>", '"draw"', ", ", ":", "null", " "]
    numbers = random.Random(1)
    for _ in range(1500):
        text = "".join(numbers.choices(parts, k=numbers.randrange(1, 14)))
        for parser in ("hermes", "llama3_json"):
            whole = parse(parser, [text])
            assert parse(parser, list(text)) == whole, text
            if not whole[1]:
                assert whole[0] == text


def test_arguments_are_told_while_they_are_written() -> None:
    stream = ToolCalls("hermes", TOOLS).stream(lambda: "call_1")
    assert stream.push("Hello <tool") == [ContentDelta("Hello")]
    assert stream.push('_call>\n{"name": "get_weather", ') == []
    assert stream.push('"arguments": {"ci') == [
        ToolCallDelta(0, "call_1", "get_weather"),
        ToolCallDelta(0, arguments='{"ci'),
    ]
    (more,) = stream.push('ty": "Oslo"}}\n</tool')
    assert isinstance(more, ToolCallDelta)
    assert more.to_dict() == {"index": 0, "function": {"arguments": 'ty": "Oslo"}'}}
    assert stream.push("_call>") == []
    assert stream.flush() == []
    assert [call.to_dict() for call in stream.calls] == [
        {
            "id": "call_1",
            "type": "function",
            "function": {"name": "get_weather", "arguments": '{"city": "Oslo"}'},
        }
    ]


def test_the_first_piece_of_a_call_is_as_openai_streams_it() -> None:
    stream = ToolCalls("llama3_json", TOOLS).stream()
    first, *_ = stream.push('{"name": "now"}')
    assert isinstance(first, ToolCallDelta)
    assert re.fullmatch("call_[0-9a-f]{24}", first.id or "")
    assert first.to_dict() == {
        "index": 0,
        "id": first.id,
        "type": "function",
        "function": {"name": "now", "arguments": ""},
    }


def test_without_tools_or_with_none_chosen_everything_is_content() -> None:
    text = WRITTEN["hermes"][1]
    for calls in (ToolCalls("hermes", None), ToolCalls("hermes", TOOLS, "none")):
        stream = calls.stream()
        assert joined(stream.push(text) + stream.flush()) == (text, [])
        assert calls.structured_outputs() is None


# The request


@pytest.mark.parametrize(
    ("tools", "choice", "message"),
    [
        ("get_weather", None, "tools must be a list"),
        ([{"type": "function"}], None, "tools[0] must be"),
        ([{"type": "retrieval", "function": {"name": "a"}}], None, "tools[0] must be"),
        ([function("bad name")], None, "1 to 64 letters"),
        ([function("a"), function("a")], None, "two functions named 'a'"),
        ([function("a", [1])], None, "must be a JSON schema"),
        ([function(f"f{n}") for n in range(200)], None, "at most 128"),
        (TOOLS, "always", 'must be "auto"'),
        (TOOLS, ["auto"], 'must be "auto"'),
        (None, "required", "no tools are given"),
        (TOOLS, {"type": "function"}, "tool_choice must be"),
        (TOOLS, {"type": "function", "function": {"name": "get_wether"}}, "'get_weather'?"),
    ],
)
def test_a_bad_request_is_refused(tools: Any, choice: Any, message: str) -> None:
    with pytest.raises(RequestError, match=re.escape(message)):
        ToolCalls("hermes", tools, choice)


def test_an_unknown_parser_is_refused_with_the_names_of_those_there_are() -> None:
    with pytest.raises(
        RequestError, match="auto, hermes, granite4, llama3_json, llama4_json, mistral"
    ):
        ToolCalls("mistrall", TOOLS)


def test_auto_goes_by_the_chat_template() -> None:
    assert choose_parser("… <tool_call></tool_call> …") == "hermes"
    assert choose_parser("<|start_header_id|>ipython … <|python_tag|>") == "llama3_json"
    assert choose_parser(None) == "hermes"
    assert ToolCalls("auto", TOOLS, chat_template="<|start_header_id|>").parser == "llama3_json"


# Calls that must be made


@pytest.fixture(scope="module")
def llm(tmp_path_factory: pytest.TempPathFactory) -> LLM:
    return tiny_llm(tiny_folder(tmp_path_factory.mktemp("tiny")))


def write(llm: LLM, calls: ToolCalls, seed: int) -> list[tuple[str, Any]]:
    params = SamplingParams(
        temperature=4, seed=seed, max_tokens=240, structured_outputs=calls.structured_outputs()
    )
    (output,) = llm.generate("the fox", params, use_tqdm=False)
    assert output.outputs[0].finish_reason == "stop"
    stream = calls.stream()
    content, _ = joined(stream.push(output.outputs[0].text) + stream.flush())
    assert content == ""
    return [(call.name, json.loads(call.arguments)) for call in stream.calls]


@pytest.mark.parametrize("parser", ["hermes", "llama3_json"])
def test_required_makes_even_a_random_model_call_a_tool(llm: LLM, parser: str) -> None:
    calls = ToolCalls(parser, TOOLS, "required")
    names = set()
    for seed in range(8):
        ((name, arguments),) = write(llm, calls, seed)
        names.add(name)
        if name == "get_weather":
            assert isinstance(arguments["city"], str)
            assert arguments.keys() <= {"city", "unit"}
        elif name == "draw":
            assert all(0 <= number <= 9 for number in arguments["at"])
        else:
            assert (name, arguments) == ("now", {})
    assert len(names) > 1


def test_a_named_tool_is_the_one_that_is_called(llm: LLM) -> None:
    choice = {"type": "function", "function": {"name": "draw"}}
    for parser in ("hermes", "llama3_json"):
        calls = ToolCalls(parser, TOOLS, choice)
        assert {name for seed in range(4) for name, _ in write(llm, calls, seed)} == {"draw"}


def test_this_module_needs_no_torch(tmp_path: Path) -> None:
    import subprocess
    import sys

    code = "import sys, twostroke.serve.generation.tools; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0
