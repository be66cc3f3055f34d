"""Chats are written as transformers writes them, and a template gets no further than text."""

from __future__ import annotations

from collections.abc import Iterator
from datetime import datetime
from typing import Any, Final, cast

import pytest
import tokenizers
from tokenizers import models
from transformers import PreTrainedTokenizerFast

from bench import chat_templates
from tests.model.text.template_styles import HERMES, STYLES
from twostroke.engine.input_processor import InputProcessor, ModelLimits
from twostroke.engine.rendering import Template, TemplateRenderer, encode_conversation
from twostroke.errors import ModelError, RequestError
from twostroke.model.text.chat_messages import read_messages
from twostroke.model.text.chat_template import ChatTemplate
from twostroke.model.text.template_source import NAMED_TEMPLATES, choose_template
from twostroke.model.text.tokenizer import Tokenizer
from twostroke.sandbox import Limits

CHATML = """\
{% for message in messages %}
    {% if loop.first and message.role != 'system' %}
{{ '<|im_start|>system\\nYou help.<|im_end|>\\n' }}
    {%- endif %}
{{ '<|im_start|>' + message['role'] + '\\n' + message['content'] | trim + '<|im_end|>' + '\\n' }}
{%- endfor %}
{%- if add_generation_prompt %}
{{ '<|im_start|>assistant\\n' }}
{%- endif %}
"""
WITH_TOOLS = """\
{{- bos_token }}
{%- set ns = namespace(turns=0, last='') %}
{%- if tools %}
    {{- 'Tools:\\n' }}
    {%- for tool in tools %}
        {{- tool | tojson(indent=2) + '\\n' }}
    {%- endfor %}
{%- endif %}
{%- for message in messages %}
    {%- set ns.turns = ns.turns + 1 %}
    {%- if message.role == 'skip' %}{% continue %}{% endif %}
    {%- if message.tool_calls is defined and message.tool_calls %}
        {%- for call in message.tool_calls %}
            {{- '[' + call.function.name + ' ' + (call.function.arguments | tojson) + ']' }}
        {%- endfor %}
    {%- else %}
        {{- message.role ~ ': ' }}{% generation %}{{ message.content }}{% endgeneration %}
    {%- endif %}
    {{- eos_token if not loop.last else '' }}
{%- endfor %}
{%- for n in range(ns.turns) if n is odd %}{{ n }}{{ loop.length }},{% endfor %}
{%- for key, value in (extra or {}) | dictsort %}{{ key }}={{ value }};{% endfor %}
{%- for name in messages | map(attribute='role') %}{{ name }}{{ loop.revindex }}{% endfor %}
"""
RECURSIVE_MACRO = (
    "{% macro f(n) %}{% if n %}{{ f(n-1) }}{{ f(n-1) }}{% endif %}{% endmacro %}{{ f(60) }}"
)
DOUBLING = (
    "{%% macro twice(x) %%}{{ x }}{{ x }}{%% endmacro %%}{%% set ns = namespace(x='x') %%}"
    "{%% for n in range(64) %%}{%% set ns.x = %s %%}{%% endfor %%}"
)
REFERENCE = chat_templates.Reference()
USER = {"role": "user", "content": "Hi <b>&</b> 'you'"}
CONVERSATION = [
    {"role": "system", "content": "Be brief."},
    USER,
    {"role": "assistant", "content": "Grüße 😀 "},
    {"role": "skip", "content": "unseen"},
    {"role": "user", "content": "And\n\nnow?"},
]
TOOL = {
    "type": "function",
    "function": {"name": "weather", "description": "<where>", "parameters": {"city": "text"}},
}


def render(source: str, messages: Any = (USER,), **kwargs: Any) -> str:
    return ChatTemplate(source, "<s>", "</s>").render(list(messages), **kwargs)


@pytest.fixture(scope="module")
def renderer() -> Iterator[TemplateRenderer]:
    renderer = TemplateRenderer(1, Limits(cpu_s=0.5, wall_s=20, memory_bytes=64 * 1024**2))
    yield renderer
    renderer.close()


def rendered(
    renderer: TemplateRenderer, source: str, max_chars: int | None = 1000, **variables: Any
) -> tuple[int, str | None]:
    conversation = encode_conversation([USER], True, None, False, variables)
    return renderer.render(Template(source, "<s>", "</s>"), conversation, max_chars)


def reference(source: str, messages: list[dict[str, Any]], **kwargs: Any) -> str:
    backend = tokenizers.Tokenizer(models.WordLevel({"<s>": 0, "</s>": 1}, unk_token="<s>"))
    theirs = PreTrainedTokenizerFast(tokenizer_object=backend, bos_token="<s>", eos_token="</s>")
    text = theirs.apply_chat_template(messages, chat_template=source, tokenize=False, **kwargs)
    assert isinstance(text, str)
    return text


@pytest.mark.parametrize("source", [CHATML, WITH_TOOLS], ids=["chatml", "tools"])
@pytest.mark.parametrize("add_generation_prompt", [True, False])
@pytest.mark.parametrize("messages", [[USER], CONVERSATION], ids=["one", "many"])
@pytest.mark.parametrize(
    "kwargs",
    [{}, {"tools": [TOOL]}, {"extra": {"b": 1, "a": True}}],
    ids=["plain", "tool", "extra"],
)
def test_chats_are_written_as_transformers_writes_them(
    source: str, add_generation_prompt: bool, messages: list[dict[str, Any]], kwargs: dict[str, Any]
) -> None:
    settings = {"add_generation_prompt": add_generation_prompt, **kwargs}
    assert render(source, messages, **settings) == reference(source, messages, **settings)


def test_the_arguments_of_a_tool_call_are_read_from_their_string() -> None:
    def chat(arguments: Any) -> list[dict[str, Any]]:
        call = {"type": "function", "function": {"name": "weather", "arguments": arguments}}
        return [USER, {"role": "assistant", "content": None, "tool_calls": [call]}]

    expected = reference(WITH_TOOLS, chat({"city": "Köln"}))
    assert '[weather {"city": "Köln"}]' in expected
    assert render(WITH_TOOLS, chat('{"city": "Köln"}')) == expected
    assert '[weather "{\\"ci"]' in render(WITH_TOOLS, chat('{"ci'))  # cut short: left as it is
    assert "[weather {}]" in render(WITH_TOOLS, chat(""))


@pytest.mark.parametrize("style", STYLES)
@pytest.mark.parametrize("last", chat_templates.LAST)
def test_the_last_message_is_continued_as_transformers_continues_it(style: str, last: str) -> None:
    assert chat_templates.continues(REFERENCE, STYLES[style], last) == "same"


def test_white_space_at_the_end_of_the_last_message_is_kept() -> None:
    def ends(last: str) -> str:
        messages = [{"role": "user", "content": "a"}, {"role": "assistant", "content": last}]
        settings = {"add_generation_prompt": False, "continue_final_message": True}
        return render(HERMES, messages, **settings).rpartition("assistant\n")[2]

    assert [ends(last) for last in ("a", "", "So: ", "\n a\n\n")] == ["a", "", "So: ", "\n a\n\n"]


def test_a_last_message_that_is_not_shown_is_not_continued() -> None:
    hides = "{% for m in messages if m.role == 'user' %}{{ m.content }}{% endfor %}"
    messages = [USER, {"role": "assistant", "content": "So"}]
    for source in (hides, "{{ messages[-1].content[:3] }}"):
        with pytest.raises(RequestError, match="does not show the last message's content"):
            render(source, messages, continue_final_message=True)


NO_CALLS = {
    "chatml, trimmed",
    "turns of user and model",
    "one system message, ahead of the first question",
    "a word before every message",
}


@pytest.mark.parametrize("style", STYLES)
def test_the_second_turn_of_an_agent_is_given_in_the_shape_the_template_wants(style: str) -> None:
    found = chat_templates.second_turn(REFERENCE, STYLES[style])
    assert found == ("no calls in this template" if style in NO_CALLS else "same")


@pytest.mark.parametrize("style", STYLES)
def test_a_developers_message_is_shown_or_refused(style: str) -> None:
    refusing = {"instructions in brackets, strict order", "turns of user and model"}
    assert chat_templates.developer(STYLES[style]) == ("refused" if style in refusing else "shown")


def test_a_developers_message_becomes_the_system_message_where_there_can_be_one_only() -> None:
    one = STYLES["one system message, ahead of the first question"]
    messages = [
        {"role": "system", "content": "Be kind."},
        {"role": "developer", "content": "Be brief."},
        {"role": "user", "content": "Hello"},
    ]
    assert render(one, messages, add_generation_prompt=False) == (
        "### Instruction:\nBe kind.\n\nBe brief.\n\nHello\n\n"
    )
    with pytest.raises(RequestError, match="send them as 'system' or 'user' messages"):
        render(STYLES["turns of user and model"], messages)


def test_json_is_not_escaped_for_html() -> None:
    assert render("{{ messages[0].content | tojson }}") == "\"Hi <b>&</b> 'you'\""


def test_a_template_can_ask_for_the_date() -> None:
    assert render("{{ strftime_now('%Y') }}") == str(datetime.now().year)


def test_content_parts_become_text() -> None:
    parts = [{"type": "text", "text": "one"}, {"type": "input_text", "text": "two"}]
    given = [{"role": "user", "content": parts}]
    assert render("{{ messages[0].content }}", given) == "one\ntwo"
    assert given[0]["content"] is parts  # the caller's messages stay as they are
    assert render(STYLES["contents in parts"], given) == "<|user|>onetwo<|end|>"
    result = [*given, {"role": "tool", "content": parts}]
    assert render(STYLES["contents in parts"], result).endswith("<|tool|>one\ntwo<|end|>")


@pytest.mark.parametrize(
    ("content_format", "of_parts", "of_text"),
    [
        ("auto", "[one][two]", "one"),  # this template reads both
        ("string", "one\ntwo", "one"),
        ("openai", "[one][two]", "[one]"),
    ],
)
def test_the_content_format_decides_between_texts_and_parts(
    renderer: TemplateRenderer, content_format: str, of_parts: str, of_text: str
) -> None:
    source = (
        "{% set c = messages[0].content %}{% if c is string %}{{ c }}"
        "{% else %}{% for part in c %}[{{ part.text }}]{% endfor %}{% endif %}"
    )
    template = Template(source, "", "", content_format=content_format)

    def text(content: Any) -> str | None:
        messages = [{"role": "user", "content": content}]
        conversation = encode_conversation(messages, True, None, False, {})
        return renderer.render(template, conversation, None)[1]

    assert text([{"type": "text", "text": text} for text in ("one", "two")]) == of_parts
    assert text("one") == of_text


def test_a_template_is_given_the_fields_of_parts_that_it_asks_for() -> None:
    """As translators ask for languages: such a template fails on any other content."""
    source = (
        "{% for m in messages %}{% for p in m.content %}"
        "{% if not p.source_lang_code %}{{ raise_exception('which language?') }}{% endif %}"
        "[{{ p.source_lang_code }}] {{ p.text }}{% endfor %}{% endfor %}"
    )
    part = {"type": "text", "text": "one", "source_lang_code": "en", "cache_control": None}
    assert render(source, [{"role": "user", "content": [part]}]) == "[en] one"
    with pytest.raises(RequestError, match="which language"):
        render(source, [{"role": "user", "content": "one"}])
    # One that knows no parts gets a text, whatever else they have.
    assert render("{{ messages[0].content }}", [{"role": "user", "content": [part]}]) == "one"


@pytest.mark.parametrize(
    ("message", "read"),
    [
        ({"role": "assistant", "content": None}, {"role": "assistant", "content": ""}),
        (
            {"role": "tool", "tool_call_id": "1"},
            {"role": "tool", "tool_call_id": "1", "content": ""},
        ),
        (
            {"role": "assistant", "content": None, "refusal": "No.", "audio": None},
            {"role": "assistant", "content": "No.", "refusal": "No."},
        ),
        (
            {"role": "assistant", "content": [{"type": "refusal", "refusal": "No."}]},
            {"role": "assistant", "content": [{"type": "text", "text": "No."}]},
        ),
        (
            {"role": "assistant", "content": "4", "tool_calls": [], "reasoning": "2 + 2"},
            {"role": "assistant", "content": "4"}
            | dict.fromkeys(("reasoning", "reasoning_content", "thinking"), "2 + 2"),
        ),
    ],
)
def test_what_clients_leave_empty_is_empty(message: dict[str, Any], read: dict[str, Any]) -> None:
    assert read_messages([message]) == [read]


@pytest.mark.parametrize(
    ("messages", "says"),
    [
        ([], "the list is empty"),
        ("Hi", "expected a list of messages"),
        (["Hi"], r"messages\[0\]: expected an object"),
        ([{"content": "Hi"}], r"messages\[0\]: the role is missing"),
        ([USER, {"role": 3, "content": "Hi"}], r"messages\[1\]: the role is 3"),
        ([{"role": "user"}], r"messages\[0\]: the content is missing"),
        ([{"role": "user", "content": 5}], r"messages\[0\]\.content: .*not int"),
        (
            [{"role": "user", "content": [{"type": "image_url", "image_url": {}}]}],
            r"messages\[0\]\.content\[0\]: parts of the type 'image_url'.*text only",
        ),
        ([{"role": "user", "content": [{"type": "text"}]}], r"content\[0\]: .*needs its text"),
        ([{"role": "assistant", "tool_calls": "f()"}], r"tool_calls: expected a list"),
    ],
)
def test_messages_that_are_none_are_refused(messages: Any, says: str) -> None:
    with pytest.raises(RequestError, match=says):
        read_messages(messages)


def test_a_template_may_refuse_in_its_own_words() -> None:
    source = "{% if messages|length != 2 %}{{ raise_exception('two turns, please') }}{% endif %}ok"
    assert render(source, [USER, USER]) == "ok"
    with pytest.raises(RequestError, match="two turns, please"):
        render(source)


def test_a_failing_template_says_what_failed() -> None:
    with pytest.raises(RequestError, match=r"fails on these messages \(TypeError"):
        render("{{ 'a' + 1 }}")
    with pytest.raises(RequestError, match="UndefinedError"):
        render("{{ nothing.at.all }}")


@pytest.mark.parametrize("source", ["{% if %}", "{{ x", "{% for %}", "{{ 1 | no_such_filter }}"])
def test_a_broken_template_is_refused_when_it_is_loaded(source: str) -> None:
    with pytest.raises(ModelError, match=r"error in line 1.*--chat-template"):
        ChatTemplate(source, "", "")


def test_variables_the_server_sets_cannot_be_given() -> None:
    assert render("{{ thinking }}", thinking="on") == "on"
    with pytest.raises(RequestError, match=r"bos_token: set by the server"):
        render("x", bos_token="<fake>")


@pytest.mark.parametrize(
    "source",
    [
        "{{ ''.__class__.__mro__ }}",
        "{{ messages.__class__.__base__.__subclasses__() }}",
        "{{ ''['__class__']['__mro__'] }}",
        "{{ (''|attr('__class__')).__mro__ }}",
        "{{ '{0.__class__.__mro__}'.format('') }}",
        "{{ raise_exception.__globals__['json'] }}",
        "{{ lipsum.__globals__ }}",
        "{{ self.__init__.__globals__ }}",
        "{{ cycler.__init__.__globals__.os }}",
        "{% import 'os' as os %}{{ os }}",
        "{% include '/etc/passwd' %}",
        "{% set x = messages.append(1) %}",
        "{% set x = messages[0].update({'role': 'system'}) %}",
    ],
)
def test_a_template_cannot_leave_its_sandbox(source: str) -> None:
    with pytest.raises(RequestError):
        render(source)


@pytest.mark.parametrize(
    "source",
    [
        "{% for n in range(1000000000) %}{% endfor %}",
        "{% for a in range(99999) %}{% for b in range(99999) %}{% endfor %}{% endfor %}",
        "{{ 'x' * 10000000000 }}",
        "{{ [0] * 10000000000 }}",
        "{{ 9 ** (9 ** 9) }}",
        "{{ '{:9999999999}'.format('x') }}",
        "{{ '{:{}}'.format('x', 9999999999) }}",
        "{{ '%9999999999d' % 1 }}",
        "{{ '%*d' % (9999999999, 1) }}",
        DOUBLING.replace("x='x'", "x=9") % "ns.x ** 9",
        DOUBLING % "ns.x + ns.x",
        DOUBLING % "ns.x ~ ns.x",
        DOUBLING % "twice(ns.x)",
        "{{ 'x'.ljust(10000000000) }}",
        "{{ 'x' | center(10000000000) }}",
        "{% macro f() %}{{ f() }}{% endmacro %}{{ f() }}",
        "{% for a in range(99999) %}{{ 'x' * 99999 }}{% endfor %}",
        "{{ range(99999)|map('string')|join('x'*99999)|length }}",
        RECURSIVE_MACRO,
        "{{ ('x' * 99999)|replace('x', 'y' * 99999)|length }}",
        "{{ [1]|tojson(indent=10**9)|length }}",
        "{{ ('\t' * 99999).expandtabs(99999)|length }}",
        "{{ " + "(" * 50000 + "1" + ")" * 50000 + " }}",
    ],
)
def test_a_template_cannot_take_the_machine(renderer: TemplateRenderer, source: str) -> None:
    with pytest.raises(RequestError):  # without limits: after hours, or gigabytes
        rendered(renderer, source)
    assert rendered(renderer, "{{ messages[0].role }}") == (4, "user")


def test_a_text_too_long_to_be_wanted_is_only_measured(renderer: TemplateRenderer) -> None:
    source = "{{ 'x' * times }}"
    assert rendered(renderer, source, 50, times=50) == (50, "x" * 50)
    assert rendered(renderer, source, 49, times=50) == (50, None)
    assert rendered(renderer, source, None, times=50) == (50, "x" * 50)


def test_large_numbers_that_are_no_sizes_are_fine() -> None:
    source = "{% macro f(n) %}{{ n }}{% endmacro %}{{ f(when) }} {{ none | default(when, true) }}"
    assert render(source, when=1_700_000_000) == "1700000000 1700000000"
    assert render("{{ '-' * 20 }}{{ 2 ** 10 }}") == "-" * 20 + "1024"
    assert render("{{ '%05d %s' % (7, when) }} {{ '{:>3}'.format(when) }}", when=10**9) == (
        "00007 1000000000 1000000000"
    )


def test_of_several_templates_the_default_is_chosen() -> None:
    assert choose_template({}) is None
    assert choose_template({"tool_use": "t", "rag": "r"}) == "r"
    assert choose_template({"tool_use": "t", "default": "d"}) == "d"


@pytest.mark.parametrize(
    ("bomb", "says"),
    [
        ("{{ range(99999)|map('string')|join('x'*99999)|length }}", "too much memory"),
        (RECURSIVE_MACRO, "longer than 0.5 s of CPU time"),
    ],
)
def test_a_template_cannot_take_the_program_that_uses_it(
    renderer: TemplateRenderer, bomb: str, says: str
) -> None:
    limits = ModelLimits(10, 10, 0)
    inputs = InputProcessor(cast(Tokenizer, Silent()), bomb, limits, renderer)
    with pytest.raises(RequestError, match=f"the model's chat template .*{says}"):
        inputs.render_chat([USER])
    with pytest.raises(RequestError, match=f"the request's chat template .*{says}"):
        inputs.chat_text([USER], run=inputs.template_runner(bomb))
    text = inputs.chat_text([USER], run=inputs.template_runner("{{ messages[0].role }}"))
    assert text == "user"


def test_what_is_no_json_is_refused_by_name() -> None:
    inputs = InputProcessor(cast(Tokenizer, Silent()), "x", ModelLimits(10, 10, 0))
    with pytest.raises(RequestError, match="a object is no JSON value"):
        inputs.chat_text([USER], variables={"when": object()})


class Silent:
    """A tokenizer that is never asked."""

    bos_token = eos_token = ""
    vocab_size = 1


# The prompts of `NAMED_CHAT` by name, with <s> and </s> as the model's begin and end.
NAMED_CHAT: Final = [
    {"role": "system", "content": "S"},
    {"role": "user", "content": "U"},
    {"role": "assistant", "content": " A"},
    {"role": "user", "content": "V"},
]
LLAMA2 = "<s>[INST] <<SYS>>\nS\n<</SYS>>\n\nU [/INST] A</s>"
COMMAND_R = "<|START_OF_TURN_TOKEN|>"
COMMAND_R_END = "<|END_OF_TURN_TOKEN|>"
BAILING = (
    "<role>SYSTEM</role>S<role>HUMAN</role>U<role>ASSISTANT</role> A<role>HUMAN</role>V"
    "<role>ASSISTANT</role>"
)
EXAONE = (
    "[|system|]S[|endofturn|]\n[|user|]U\n[|assistant|]A[|endofturn|]\n[|user|]V\n[|assistant|]"
)
NO_FUNCTIONS = "available functions<|role_sep|>[]<|message_sep|>"
NAMED_PROMPTS: Final = {
    "bailing": BAILING,
    "bailing-think": f"{BAILING}<think>",
    "chatglm3": "[gMASK]sop<|system|>\n S<|user|>\n U<|assistant|>\n  A<|user|>\n V<|assistant|>",
    "chatglm4": "[gMASK]<sop><|system|>\nS<|user|>\nU<|assistant|>\n A<|user|>\nV<|assistant|>\n",
    "chatml": "<|im_start|>system\nS<|im_end|>\n<|im_start|>user\nU<|im_end|>\n"
    "<|im_start|>assistant\n A<|im_end|>\n<|im_start|>user\nV<|im_end|>\n<|im_start|>assistant\n",
    "command-r": f"<s>{COMMAND_R}<|SYSTEM_TOKEN|>S{COMMAND_R_END}"
    f"{COMMAND_R}<|USER_TOKEN|>U{COMMAND_R_END}{COMMAND_R}<|CHATBOT_TOKEN|>A{COMMAND_R_END}"
    f"{COMMAND_R}<|USER_TOKEN|>V{COMMAND_R_END}{COMMAND_R}<|CHATBOT_TOKEN|>",
    "deepseek": "<s>S### Instruction:\nU\n### Response:\n A\n<|EOT|>\n### Instruction:\nV\n"
    "### Response:\n",
    "deepseek2": "<s>S\n\nUser: U\n\nAssistant:  A</s>User: V\n\nAssistant:",
    "deepseek3": "<s>S\n\n<｜User｜>U<｜Assistant｜> A</s><｜User｜>V<｜Assistant｜>",
    "exaone3": EXAONE,
    "exaone4": EXAONE,
    "falcon3": "<|system|>\nS\n<|user|>\nU\n<|assistant|>\n A\n<|user|>\nV\n<|assistant|>\n",
    "gemma": "<s><start_of_turn>user\nS<end_of_turn>\n<start_of_turn>user\nU<end_of_turn>\n"
    "<start_of_turn>model\n A<end_of_turn>\n<start_of_turn>user\nV<end_of_turn>\n"
    "<start_of_turn>model\n",
    "gigachat": f"<s>S<|message_sep|>user<|role_sep|>U<|message_sep|>{NO_FUNCTIONS}"
    f"assistant<|role_sep|> A<|message_sep|>user<|role_sep|>V<|message_sep|>{NO_FUNCTIONS}"
    "assistant<|role_sep|>",
    "glmedge": "<|system|>\nS<|user|>\nU<|assistant|>\n A<|user|>\nV<|assistant|>",
    "granite": "<|start_of_role|>system<|end_of_role|>S<|end_of_text|>\n"
    "<|start_of_role|>user<|end_of_role|>U<|end_of_text|>\n"
    "<|start_of_role|>assistant<|end_of_role|> A<|end_of_text|>\n"
    "<|start_of_role|>user<|end_of_role|>V<|end_of_text|>\n"
    "<|start_of_role|>assistant<|end_of_role|>",
    "grok-2": "System: S<|separator|>\n\nHuman: U<|separator|>\n\nAssistant:  A<|separator|>\n\n"
    "Human: V<|separator|>\n\nAssistant:",
    "hunyuan-dense": "<s>S<｜hy_place▁holder▁no▁3｜><｜hy_User｜>U<｜hy_Assistant｜> A"
    "<｜hy_place▁holder▁no▁2｜><｜hy_User｜>V<｜hy_Assistant｜>",
    "hunyuan-moe": "<|startoftext|>S<|extra_4|><|startoftext|>U<|extra_0|> A<|eos|>"
    "<|startoftext|>V<|extra_0|>",
    "kimi-k2": "<|im_system|>system<|im_middle|>S<|im_end|><|im_user|>user<|im_middle|>U<|im_end|>"
    "<|im_assistant|>assistant<|im_middle|> A<|im_end|><|im_user|>user<|im_middle|>V<|im_end|>"
    "<|im_assistant|>assistant<|im_middle|>",
    "llama2": "<s>[INST] S\nU [/INST] A</s>[INST] V [/INST]",
    "llama2-sys": LLAMA2 + "[INST] V [/INST]",
    "llama2-sys-bos": LLAMA2 + "<s>[INST] V [/INST]",
    "llama2-sys-strip": LLAMA2.replace(" A", "A") + "[INST] V [/INST]",
    "llama3": "<s><|start_header_id|>system<|end_header_id|>\n\nS<|eot_id|>"
    "<|start_header_id|>user<|end_header_id|>\n\nU<|eot_id|>"
    "<|start_header_id|>assistant<|end_header_id|>\n\n A<|eot_id|>"
    "<|start_header_id|>user<|end_header_id|>\n\nV<|eot_id|>"
    "<|start_header_id|>assistant<|end_header_id|>\n\n",
    "llama4": "<s><|header_start|>system<|header_end|>\n\nS<|eot|>"
    "<|header_start|>user<|header_end|>\n\nU<|eot|>"
    "<|header_start|>assistant<|header_end|>\n\nA<|eot|>"
    "<|header_start|>user<|header_end|>\n\nV<|eot|>"
    "<|header_start|>assistant<|header_end|>\n\n",
    "megrez": "<|role_start|>system<|role_end|>S<|turn_end|>"
    "<|role_start|>user<|role_end|>U<|turn_end|>"
    "<|role_start|>assistant<|role_end|> A<|turn_end|><|role_start|>user<|role_end|>V<|turn_end|>"
    "<|role_start|>assistant<|role_end|>",
    "minicpm": "<s>S<用户>U<AI>A<用户>V<AI>",
    "mistral-v1": "<s> [INST] S\n\nU [/INST]  A</s> [INST] V [/INST]",
    "mistral-v3": "<s>[INST] S\n\nU[/INST] A</s>[INST] V[/INST]",
    "mistral-v3-tekken": "<s>[INST]S\n\nU[/INST] A</s>[INST]V[/INST]",
    "mistral-v7": "<s>[SYSTEM_PROMPT] S[/SYSTEM_PROMPT][INST] U[/INST]  A</s>[INST] V[/INST]",
    "mistral-v7-tekken": "<s>[SYSTEM_PROMPT]S[/SYSTEM_PROMPT][INST]U[/INST] A</s>[INST]V[/INST]",
    "monarch": "<s>system\nS</s>\n<s>user\nU</s>\n<s>assistant\n A</s>\n<s>user\nV</s>\n"
    "<s>assistant\n",
    "openchat": "<s>S<|end_of_turn|>GPT4 Correct User: U<|end_of_turn|>"
    "GPT4 Correct Assistant:  A<|end_of_turn|>GPT4 Correct User: V<|end_of_turn|>"
    "GPT4 Correct Assistant:",
    "orion": "<s>Human: S\n\nU\n\nAssistant: </s> A</s>Human: V\n\nAssistant: </s>",
    "phi3": "<s><|system|>\nS<|end|>\n<|user|>\nU<|end|>\n<|assistant|>\n A<|end|>\n"
    "<|user|>\nV<|end|>\n<|assistant|>\n",
    "phi4": "<|im_start|>system<|im_sep|>S<|im_end|><|im_start|>user<|im_sep|>U<|im_end|>"
    "<|im_start|>assistant<|im_sep|> A<|im_end|><|im_start|>user<|im_sep|>V<|im_end|>"
    "<|im_start|>assistant<|im_sep|>",
    "rwkv-world": "System: S\n\nUser: U\n\nAssistant: A\n\nUser: V\n\nAssistant:",
    "seed_oss": "<seed:bos>system\nS<seed:eos><seed:bos>user\nU<seed:eos>"
    "<seed:bos>assistant\n A<seed:eos><seed:bos>user\nV<seed:eos><seed:bos>assistant\n",
    "smolvlm": "<|im_start|>S\n\nUser: U<end_of_utterance>\nAssistant:  A<end_of_utterance>\n"
    "User: V<end_of_utterance>\nAssistant:",
    "vicuna": "<s>S\n\nUSER: U\nASSISTANT:  A</s>\nUSER: V\nASSISTANT:",
    "vicuna-orca": "<s>SYSTEM: S\nUSER: U\nASSISTANT:  A</s>\nUSER: V\nASSISTANT:",
    "yandex": "<s>S\n\n Пользователь: U\n\n Ассистент:  A\n\n Пользователь: V\n\n Ассистент:[SEP]",
    "zephyr": "<s><|system|>\nS</s>\n<|user|>\nU</s>\n<|assistant|>\n A</s>\n<|user|>\nV</s>\n"
    "<|assistant|>\n",
}


@pytest.mark.parametrize("name", NAMED_TEMPLATES)
def test_a_template_is_known_by_its_name(name: str) -> None:
    template = ChatTemplate(NAMED_TEMPLATES[name], "<s>", "</s>")
    assert template.render(NAMED_CHAT) == NAMED_PROMPTS[name]


def test_the_result_of_a_tool_has_a_turn_of_its_own() -> None:
    chat = [*NAMED_CHAT, {"role": "tool", "content": "T"}]
    for name, turn in (
        ("exaone4", "[|tool|]T[|endofturn|]"),
        ("kimi-k2", "<|im_system|>tool<|im_middle|>T<|im_end|>"),
    ):
        assert turn in ChatTemplate(NAMED_TEMPLATES[name], "<s>", "</s>").render(chat)
