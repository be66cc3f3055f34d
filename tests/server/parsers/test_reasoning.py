"""Reasoning: parted from the answer wherever the text is cut, counted, bounded by a budget."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.server.generation.test_tools import function
from tests.server.parsers.parsing import Said, read, read_however_cut
from tests.server.running import Running, running
from tests.server.scripted import Scripted, scripted_llm
from twostroke.errors import ConfigError
from twostroke.serve.generation.conversation import AssistantMessage
from twostroke.serve.generation.tools import ToolCalls
from twostroke.serve.parsers.deltas import ContentDelta, ReasoningDelta
from twostroke.serve.parsers.reasoning import FORMATS, Reasoning, choose_format
from twostroke.serve.settings import ServeSettings

NOW = function("now")
CALL = '<tool_call>{"name": "now", "arguments": {}}</tool_call>'
G_THINK, G_ANSWER = "Here is my thought process:", "Here is my response:"
ANALYSIS, FINAL = "<|channel|>analysis<|message|>", "<|channel|>final<|message|>"

# format, whether the prompt opened it, what is written, reasoning and content
CORPUS: dict[str, tuple[str, bool, str, str, str]] = {
    "opened by the prompt": ("deepseek_r1", True, "I add.\n</think>\n\n4", "I add.", "4"),
    "opened by the model": ("qwen3", False, "<think>\nI add.\n</think>\n\n4", "I add.", "4"),
    "opened by both": ("deepseek_r1", True, "<think>\nI add.</think>4", "I add.", "4"),
    "white space before the tag": ("qwen3", False, "\n <think>a</think>b", "a", "b"),
    "empty": ("qwen3", False, "<think>\n\n</think>\n\nHello", "", "Hello"),
    "no reasoning": ("qwen3", False, "Hello <b>", "", "Hello <b>"),
    "no reasoning, blank": ("qwen3", False, " \n", "", " \n"),
    "nothing": ("qwen3", False, "", "", ""),
    "nothing, opened": ("deepseek_r1", True, "", "", ""),
    "never closed": ("deepseek_r1", True, "I add and add \n", "I add and add", ""),
    "cut off in the end tag": ("deepseek_r1", True, "a </thi", "a </thi", ""),
    "cut off in the start tag": ("qwen3", False, "<thi", "", "<thi"),
    "begun like a tag": ("qwen3", False, "<thinker>", "", "<thinker>"),
    "like an end tag": (
        "deepseek_r1",
        True,
        "a </thing> </ think> </think>b",
        "a </thing> </ think>",
        "b",
    ),
    "an end tag begun twice": ("deepseek_r1", True, "a</</think>b", "a</", "b"),
    "a tag in later text": (
        "qwen3",
        False,
        "It begins with <think> and ends with </think>.",
        "",
        "It begins with <think> and ends with </think>.",
    ),
    "a second block is content": (
        "qwen3",
        False,
        "<think>a</think>b<think>c</think>d",
        "a",
        "b<think>c</think>d",
    ),
    "a tag inside it": ("qwen3", False, "<think>a <think> b</think>c", "a <think> b", "c"),
    "the end tag in code ends it": (
        "deepseek_r1",
        True,
        "`</think>` is a tag</think>x",
        "`",
        "` is a tag</think>x",
    ),
    "code": (
        "qwen3",
        False,
        "<think>```\nx = 1 < 2\n```</think>```\ny\n```",
        "```\nx = 1 < 2\n```",
        "```\ny\n```",
    ),
    "white space within stays": (
        "deepseek_r1",
        True,
        "a\n\n b \n</think>\n c \n",
        "a\n\n b",
        "c \n",
    ),
    "only white space": ("deepseek_r1", True, " \n\n ", "", ""),
    "unicode": ("qwen3", False, "<think>größer 東京 🦊</think>é🦊", "größer 東京 🦊", "é🦊"),
    "JSON": (
        "glm45",
        False,
        '<think>{"a": "</b>"}</think>{"a": "</think>"}',
        '{"a": "</b>"}',
        '{"a": "</think>"}',
    ),
    "a call inside is no call": ("qwen3", False, f"<think>{CALL}</think>ok", CALL, "ok"),
    "budget spent": ("kimi_k2", True, "I was going to</think>So: 4", "I was going to", "So: 4"),
    "deepseek v3": ("deepseek_v3", True, "a</think>b", "a", "b"),
    "mistral": ("mistral", False, "[THINK]a [b] [/c][/THINK]d [THINK]", "a [b] [/c]", "d [THINK]"),
    "mistral, never closed": ("mistral", True, "a [/THIN", "a [/THIN", ""),
    "granite": ("granite", False, f"{G_THINK} Add. {G_ANSWER}\n\n4", "Add.", "4"),
    "granite, short": (
        "granite",
        False,
        "Here's my thought process: a Here's my response: b",
        "a",
        "b",
    ),
    "granite, none": ("granite", False, "Here is my answer", "", "Here is my answer"),
    "harmony": (
        "openai_gptoss",
        False,
        f"{ANALYSIS}I add.<|end|><|start|>assistant{FINAL}4<|return|>",
        "I add.",
        "4",
    ),
    "harmony, several": (
        "openai_gptoss",
        False,
        f"{ANALYSIS}a<|end|><|start|>assistant{ANALYSIS}b<|end|><|start|>assistant{FINAL}c",
        "ab",
        "c",
    ),
    "harmony, cut off": ("openai_gptoss", False, f"{ANALYSIS}I add <|en", "I add <|en", ""),
    "harmony, only final": ("openai_gptoss", False, f"{FINAL}4", "", "4"),
    "harmony, a header cut off": ("openai_gptoss", False, "<|channel|>ana", "", "<|channel|>ana"),
}


def message(
    name: str, is_open: bool, tools: ToolCalls | None = None, **more: Any
) -> AssistantMessage:
    return AssistantMessage(tools, True, Reasoning(FORMATS[name], is_open, False), **more)


@pytest.mark.parametrize("name", CORPUS)
def test_reasoning_is_parted_wherever_the_text_is_cut(name: str) -> None:
    form, is_open, text, reasoning, content = CORPUS[name]
    expected = Said(reasoning, content, [])
    assert read_however_cut(lambda: message(form, is_open), text) == expected


@pytest.mark.parametrize("name", CORPUS)
def test_with_tools_the_reasoning_is_the_same(name: str) -> None:
    """Tool calls inside it are none."""
    form, is_open, text, reasoning, content = CORPUS[name]
    tools = ToolCalls("hermes", [NOW])
    assert read(message(form, is_open, tools), [text]) == Said(reasoning, content, [])


def test_calls_after_the_reasoning_are_calls() -> None:
    text = f"<think>I call {CALL}.\n</think>\n\nOk.\n{CALL}"
    expected = Said(f"I call {CALL}.", "Ok.", [("now", "{}")])
    tools = ToolCalls("hermes", [NOW])
    assert read_however_cut(lambda: message("qwen3", False, tools), text) == expected
    harmony = (
        f"{ANALYSIS}I call <|x|>.<|end|><|start|>assistant<|channel|>commentary "
        'to=functions.now <|constrain|>json<|message|>{"a": "<|y|>"}<|call|>'
    )
    expected = Said("I call <|x|>.", "", [("now", '{"a": "<|y|>"}')])
    tools = ToolCalls("openai", [NOW])
    assert read_however_cut(lambda: message("openai_gptoss", True, tools), harmony) == expected


def test_kimi_s_reasoning_ends_where_its_calls_begin() -> None:
    call = "<|tool_call_begin|>functions.now:0<|tool_call_argument_begin|>{}<|tool_call_end|>"
    text = f"I call <|tool_c.\n<|tool_calls_section_begin|>{call}<|tool_calls_section_end|>"
    tools = ToolCalls("kimi_k2", [NOW])
    expected = Said("I call <|tool_c.", "", [("now", "{}")])
    assert read_however_cut(lambda: message("kimi_k2", True, tools), text) == expected


def test_reasoning_is_told_as_it_comes_and_left_out_where_it_is_not_wanted() -> None:
    said = message("deepseek_r1", True)
    assert said.push("I add ") == [ReasoningDelta("I add")]
    assert said.push("it.</th") == [ReasoningDelta(" it.")]
    assert not said.is_plain
    assert said.push("ink>\n4") == [ContentDelta("4")]
    assert said.is_plain
    quiet = message("deepseek_r1", True, include_reasoning=False)
    assert read(quiet, ["I add</think>4"]) == Said("", "4", [])


@pytest.mark.parametrize(
    ("template", "form"),
    [
        ("… <think>\n", None),
        ("{{ '<think>' }} … {{ '</think>' }}", "qwen3"),
        ("[THINK] … [/THINK]", "mistral"),
        ("Write 'Here is my thought process:' and …", "granite"),
        ("<|start|>assistant<|channel|>final<|message|>", "openai_gptoss"),
        ("plain", None),
        (None, None),
    ],
)
def test_auto_goes_by_what_the_chat_template_shows(template: str | None, form: str | None) -> None:
    assert choose_format(template) == (None if form is None else FORMATS[form])


def test_an_unknown_parser_is_refused() -> None:
    with pytest.raises(ConfigError, match="reasoning_parser"):
        ServeSettings(reasoning_parser="deepseek")
    for name in (None, "auto", "none", *FORMATS):
        assert ServeSettings(reasoning_parser=name).reasoning_parser == name


# The server, over a model that writes what it is told. The template is like Qwen3's: the model
# writes the tag itself, unless the variable `open` has the prompt end with it.

TEMPLATE = (
    "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n"
    "{% if open %}<think>\n{% elif enable_thinking is defined and not enable_thinking %}"
    "<think>\n\n</think>\n\n{% endif %}{% endif %}"
)
ASKED: dict[str, Any] = {"messages": [{"role": "user", "content": "2 + 2?"}]}
OPEN = {"chat_template_kwargs": {"open": True}}
CLOSED = {"chat_template_kwargs": {"enable_thinking": False}}
CHAT = "/v1/chat/completions"


@pytest.fixture(scope="module")
def thinking(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[Running, Scripted]]:
    llm, model = scripted_llm(tmp_path_factory.mktemp("model"), TEMPLATE, ["<think>", "</think>"])
    with running(llm, reasoning_parser="qwen3") as server:
        yield server, model


@pytest.fixture(scope="module")
def bare(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[Running, Scripted]]:
    """Without --reasoning-parser."""
    llm, model = scripted_llm(tmp_path_factory.mktemp("model"), TEMPLATE, ["<think>", "</think>"])
    with running(llm) as server:
        yield server, model


@pytest.fixture
def server(thinking: tuple[Running, Scripted]) -> Running:
    return thinking[0]


@pytest.fixture
def model(thinking: tuple[Running, Scripted]) -> Scripted:
    return thinking[1]


def answer(server: Running, **fields: Any) -> tuple[dict[str, Any], dict[str, Any]]:
    """The message and the usage; a stream must say the same."""
    whole = server.post(CHAT, ASKED | fields)
    (choice,) = whole["choices"]
    said = choice["message"]
    events = server.events(
        CHAT, ASKED | fields | {"stream": True, "stream_options": {"include_usage": True}}
    )
    joined: dict[str, Any] = {
        "content": "",
        "reasoning": "",
        "reasoning_content": "",
        "tool_calls": "",
    }
    reasons = []
    for event in events[:-1]:
        for streamed in event["choices"]:
            for name in ("content", "reasoning", "reasoning_content"):
                joined[name] += streamed["delta"].get(name) or ""
            for call in streamed["delta"].get("tool_calls", ()):
                joined["tool_calls"] += call["function"]["arguments"]
            reasons += [streamed["finish_reason"]] if streamed["finish_reason"] else []
    assert reasons == [choice["finish_reason"]]
    assert joined["content"] == (said["content"] or "")
    assert joined["reasoning"] == joined["reasoning_content"] == (said["reasoning"] or "")
    assert said.get("reasoning") == said.get("reasoning_content")
    calls = [call["function"]["arguments"] for call in said.get("tool_calls", ())]
    assert joined["tool_calls"] == "".join(calls)
    usage = events[-2]["usage"]
    for name in ("completion_tokens", "completion_tokens_details"):
        assert usage.get(name) == whole["usage"].get(name)
    return said, whole["usage"]


def reasoning_tokens(usage: dict[str, Any]) -> int:
    count: int = usage["completion_tokens_details"]["reasoning_tokens"]
    return count


def test_reasoning_is_a_field_of_its_own_and_counted(server: Running, model: Scripted) -> None:
    model.write("<think>the quick fox</think>the dog")
    said, usage = answer(server)
    assert (said["reasoning"], said["content"]) == ("the quick fox", "the dog")
    inside, outside = len(model.encode("the quick fox")), len(model.encode("the dog"))
    assert reasoning_tokens(usage) == inside
    assert usage["completion_tokens"] == inside + outside + 3  # the tags and the end


def test_a_prompt_that_opens_it_or_closes_it_is_heard(server: Running, model: Scripted) -> None:
    model.write("the fox</think>the dog")
    said, usage = answer(server, **OPEN)
    assert (said["reasoning"], said["content"]) == ("the fox", "the dog")
    assert reasoning_tokens(usage) == len(model.encode("the fox"))
    model.write("the dog")
    said, usage = answer(server, **CLOSED)
    assert (said.get("reasoning"), said["content"]) == (None, "the dog")
    assert reasoning_tokens(usage) == 0


def test_without_the_flag_only_a_tag_that_the_prompt_ends_with_counts(
    bare: tuple[Running, Scripted],
) -> None:
    server, model = bare
    model.write("the fox</think>the dog")
    said, usage = answer(server, **OPEN)
    assert (said["reasoning"], said["content"]) == ("the fox", "the dog")
    assert reasoning_tokens(usage) == len(model.encode("the fox"))
    model.write("<think>the fox</think>the dog")
    said, usage = answer(server)
    assert said["content"] == "<think>the fox</think>the dog"
    assert said.get("reasoning") is None
    assert "completion_tokens_details" not in usage


def test_reasoning_can_be_left_out(server: Running, model: Scripted) -> None:
    model.write("<think>the fox</think>the dog")
    said, usage = answer(server, include_reasoning=False)
    assert said.get("reasoning") is None
    assert said["content"] == "the dog"
    assert reasoning_tokens(usage) > 0


def test_an_answer_that_ends_while_it_thinks_has_no_content(
    server: Running, model: Scripted
) -> None:
    model.write("<think>the fox and the dog and the fox and the dog")
    whole = server.post(CHAT, ASKED | {"max_tokens": 4})
    (choice,) = whole["choices"]
    assert choice["finish_reason"] == "length"
    assert choice["message"]["content"] is None
    assert choice["message"]["reasoning"]
    assert reasoning_tokens(whole["usage"]) == 3


@pytest.mark.parametrize("budget", [0, 1, 5])
@pytest.mark.parametrize("opened", [True, False])
def test_the_end_is_forced_when_the_budget_is_spent(
    server: Running, model: Scripted, budget: int, opened: bool
) -> None:
    begin = "" if opened else "<think>"
    model.write(f"{begin}the quick brown fox jumps over the lazy dog</think>so it is")
    more = OPEN if opened else {}
    said, usage = answer(server, thinking_token_budget=budget, **more)
    assert reasoning_tokens(usage) == budget
    assert said["content"] == "so it is"
    assert "the quick brown fox jumps over the lazy dog".startswith(said["reasoning"] or "")


def test_a_budget_that_is_not_spent_forces_nothing(server: Running, model: Scripted) -> None:
    model.write("<think>the fox</think>the dog")
    for budget in (100, -1):
        said, _ = answer(server, thinking_token_budget=budget)
        assert (said["reasoning"], said["content"]) == ("the fox", "the dog")
    assert model.num_masked == 0
    model.write("the dog")  # one that does not think is not made to end it
    said, _ = answer(server, thinking_token_budget=0)
    assert said["content"] == "the dog"
    said, _ = answer(server, thinking_token_budget=0, **CLOSED)
    assert said["content"] == "the dog"
    server.assert_idle()
    assert not server.client.engine.core._grammars.active


def test_a_budget_is_refused_where_nobody_knows_how_the_model_thinks(
    bare: tuple[Running, Scripted],
) -> None:
    status, _, body = bare[0].ask("POST", CHAT, ASKED | {"thinking_token_budget": 3})
    assert (status, json.loads(body)["error"]["param"]) == (400, "thinking_token_budget")
    assert b"--reasoning-parser" in body


def test_a_budget_that_cannot_be_kept_ends_its_request_alone(server: Running) -> None:
    status, _, body = server.ask("POST", CHAT, ASKED | {"thinking_token_budget": -2})
    assert (status, json.loads(body)["error"]["param"]) == (400, "thinking_token_budget")
    fields = {"thinking_token_budget": 1, "allowed_token_ids": [5, 6], **OPEN}
    status, _, body = server.ask("POST", CHAT, ASKED | fields)
    assert status == 400, body
    assert b"end of the reasoning" in body


YES = {"structured_outputs": {"choice": ["yes", "no"]}}


@pytest.mark.parametrize("more", [OPEN, {}, OPEN | {"thinking_token_budget": 2}])
def test_a_grammar_applies_after_the_reasoning(
    server: Running, model: Scripted, more: dict[str, Any]
) -> None:
    begin = "" if more else "<think>"
    model.write(f"{begin}the quick brown fox</think>perhaps")
    said, usage = answer(server, **YES, **more)
    assert said["content"] in ("yes", "no")
    if "thinking_token_budget" in more:
        assert reasoning_tokens(usage) == 2
    else:
        assert said["reasoning"] == "the quick brown fox"


@pytest.mark.parametrize("fields", [{}, CLOSED])
def test_a_grammar_applies_at_once_where_the_model_does_not_think(
    server: Running, model: Scripted, fields: dict[str, Any]
) -> None:
    model.write("the fox</think>perhaps")
    said, _ = answer(server, **YES, **fields)
    assert said["content"] in ("yes", "no")
    assert said.get("reasoning") is None


def test_a_forced_call_comes_after_the_reasoning(server: Running, model: Scripted) -> None:
    for choice in ("required", {"type": "function", "function": {"name": "now"}}):
        model.write("<think>the fox <tool_call></think>perhaps")
        said, _ = answer(server, tools=[NOW], tool_choice=choice)
        assert said["reasoning"] == "the fox <tool_call>"
        (call,) = said["tool_calls"]
        assert (call["function"]["name"], call["function"]["arguments"]) == ("now", "{}")


def test_each_choice_thinks_for_itself(server: Running, model: Scripted) -> None:
    model.write("<think>the fox</think>the dog")
    whole = server.post(CHAT, ASKED | {"n": 2, "thinking_token_budget": 1})
    assert [one["message"]["content"] for one in whole["choices"]] == ["the dog", "the dog"]
    assert reasoning_tokens(whole["usage"]) == 2


def test_the_continued_message_may_be_thinking(server: Running, model: Scripted) -> None:
    model.write("brown fox</think>the dog")
    messages = [*ASKED["messages"], {"role": "assistant", "content": "<think>the quick"}]
    continued = {"continue_final_message": True, "add_generation_prompt": False}
    (choice,) = server.post(CHAT, {"messages": messages, **continued})["choices"]
    assert choice["message"]["reasoning"] == "brown fox"
    assert choice["message"]["content"] == "the dog"


def test_tags_that_are_special_tokens_are_not_skipped(tmp_path: Path) -> None:
    tags = ["[THINK]", "[/THINK]", "[TOOL_CALLS]", "[ARGS]"]
    template = TEMPLATE + "{# [THINK] … [/THINK], [TOOL_CALLS] #}"
    llm, model = scripted_llm(tmp_path, template, tags, special=True)
    with running(llm, reasoning_parser="auto") as server:
        model.write("[THINK]the fox[/THINK]the dog")
        said, usage = answer(server)
        assert (said["reasoning"], said["content"]) == ("the fox", "the dog")
        assert reasoning_tokens(usage) == len(model.encode("the fox"))
        model.write("[THINK]the fox[/THINK][TOOL_CALLS]now[ARGS]{}")
        said, _ = answer(server, tools=[NOW])
        assert (said["reasoning"], said["content"]) == ("the fox", None)
        assert [call["function"]["name"] for call in said["tool_calls"]] == ["now"]
