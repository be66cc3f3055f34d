"""A model whose tool tags are tokens of their own, as Qwen's are: forced calls, and what follows.

The tiny model's weights are random: whatever is valid, the grammar made.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from tokenizers import AddedToken, Tokenizer

from tests.model.text.template_styles import HERMES
from tests.server.running import Running, running
from tests.tiny import BOS, EOS, VOCAB_SIZE, tiny_folder, tiny_llm, write_json
from twostroke import LLM, SamplingParams
from twostroke.request import StructuredOutputs

OPEN, CLOSE, SPECIAL = "<tool_call>", "</tool_call>", "<|python_tag|>"
OPEN_ID, CLOSE_ID, SPECIAL_ID = range(VOCAB_SIZE, VOCAB_SIZE + 3)
CHAT = "/v1/chat/completions"
HELLO: list[dict[str, Any]] = [{"role": "user", "content": "the quick fox"}]
COLOURS = ["red", "green", OPEN]


def tool(name: str) -> dict[str, Any]:
    parameters = {
        "type": "object",
        "properties": {"colour": {"enum": COLOURS}},
        "required": ["colour"],
    }
    return {"type": "function", "function": {"name": name, "parameters": parameters}}


TOOLS = [tool("paint"), tool("wash")]
PAINT = {"type": "function", "function": {"name": "paint"}}


def folder_with_tool_tokens(path: Path) -> Path:
    tiny_folder(path, vocab_size=VOCAB_SIZE + 3, max_position_embeddings=1024)
    tokenizer = Tokenizer.from_file(str(path / "tokenizer.json"))
    tokenizer.add_tokens([AddedToken(tag, normalized=False) for tag in (OPEN, CLOSE)])
    tokenizer.add_tokens([AddedToken(SPECIAL, normalized=False, special=True)])
    tokenizer.save(str(path / "tokenizer.json"))
    names = {"bos_token": BOS, "eos_token": EOS, "chat_template": HERMES}
    write_json(path / "tokenizer_config.json", names)
    return path


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return folder_with_tool_tokens(tmp_path_factory.mktemp("tools"))


@pytest.fixture(scope="module")
def llm(folder: Path) -> LLM:
    return tiny_llm(folder)


@pytest.fixture(scope="module")
def server(folder: Path) -> Iterator[Running]:
    with running(tiny_llm(folder)) as server:
        yield server


def ask(server: Running, **more: Any) -> dict[str, Any]:
    body = {"messages": HELLO, "max_tokens": 150, "seed": 4, "temperature": 1.5, **more}
    return server.post(CHAT, body)


def write(llm: LLM, seed: int = 0, temperature: float = 1.5, **asked: Any) -> Any:
    params = SamplingParams(
        temperature=temperature,
        seed=seed,
        max_tokens=200,
        structured_outputs=StructuredOutputs(**asked),
    )
    (output,) = llm.generate("the quick brown fox", params, use_tqdm=False)
    return output.outputs[0]


# ── forced calls ────────────────────────────────────────────────────────────────────────────────


@pytest.mark.parametrize("choice", ["required", PAINT], ids=["required", "named"])
def test_a_forced_call_is_written_with_the_tags_own_tokens(server: Running, choice: Any) -> None:
    for seed in range(3):
        asked = {"tools": TOOLS, "tool_choice": choice, "seed": seed, "return_token_ids": True}
        (said,) = ask(server, **asked)["choices"]
        (call,) = said["message"]["tool_calls"]
        assert call["function"]["name"] in (["paint"] if choice == PAINT else ["paint", "wash"])
        assert json.loads(call["function"]["arguments"])["colour"] in COLOURS
        assert said["message"]["content"] is None
        assert (said["token_ids"][0], said["token_ids"][-1]) == (OPEN_ID, CLOSE_ID)


@pytest.mark.parametrize("choice", ["required", PAINT], ids=["required", "named"])
def test_a_forced_call_is_the_same_streamed(server: Running, choice: Any) -> None:
    asked = {"tools": TOOLS, "tool_choice": choice}
    (whole,) = ask(server, **asked)["choices"][0]["message"]["tool_calls"]
    body = {"messages": HELLO, "max_tokens": 150, "seed": 4, "temperature": 1.5, "stream": True}
    function = {"name": "", "arguments": ""}
    for event in server.events(CHAT, {**body, **asked})[:-1]:
        for one in event["choices"]:
            for call in one["delta"].get("tool_calls", ()):
                for key, part in call["function"].items():
                    function[key] += part
    assert function == whole["function"]


@pytest.mark.parametrize("tag", [OPEN, SPECIAL], ids=["added", "special"])
def test_a_tag_in_a_schemas_text_is_text(server: Running, tag: str) -> None:
    schema = {
        "type": "object",
        "properties": {"tag": {"const": f"a {tag}b"}, "free": {"type": "string", "maxLength": 9}},
        "required": ["tag", "free"],
    }
    form = {"type": "json_schema", "json_schema": {"name": "it", "schema": schema}}
    for tools in ({}, {"tools": TOOLS}):
        (said,) = ask(server, response_format=form, **tools)["choices"]
        assert said["finish_reason"] == "stop"
        assert json.loads(said["message"]["content"])["tag"] == f"a {tag}b"
        assert "tool_calls" not in said["message"]


def test_a_choice_and_an_expression_may_hold_a_tag(llm: LLM) -> None:
    choices = [f"{OPEN}yes{CLOSE}", f"no {CLOSE}", "maybe"]
    written = [write(llm, seed, choice=choices).text for seed in range(12)]
    assert set(written) == set(choices)
    for seed in range(4):
        pattern = rf"({OPEN}\n[a-c]{{2,5}}\n{CLOSE}){{1,2}}"
        output = write(llm, seed, regex=pattern)
        assert re.fullmatch(pattern, output.text), output.text
    only = write(llm, regex=f"{OPEN}a")  # where there is no choice it is the tokenizer's
    assert (only.text, only.token_ids[0]) == (f"{OPEN}a", OPEN_ID)


@pytest.mark.parametrize(
    "grammar",
    [
        f'start: "{OPEN}" /[a-c]+/ "{CLOSE}"',
        f"start: {OPEN} /[a-c]+/ {CLOSE} // {OPEN}",
        f"start: <[{OPEN_ID}]> /[a-c]+/ <[{CLOSE_ID}]>",
        f'root ::= "{OPEN}" [a-c]+ "{CLOSE}"',
    ],
    ids=["text", "token", "id", "gbnf"],
)
def test_a_grammar_may_hold_a_tag_as_text_or_as_a_token(llm: LLM, grammar: str) -> None:
    output = write(llm, grammar=grammar)
    assert re.fullmatch(f"{OPEN}[a-c]+{CLOSE}", output.text)
    assert output.token_ids[0] == OPEN_ID


def test_the_text_of_a_special_token_is_written_with_others(llm: LLM) -> None:
    """It would be missing from the answer, where special tokens are not shown."""
    for asked in ({"choice": [f"{SPECIAL}x"]}, {"regex": re.escape(SPECIAL) + "x"}):
        output = write(llm, **asked)
        assert output.text == f"{SPECIAL}x"
        assert SPECIAL_ID not in output.token_ids
    output = write(llm, grammar=f'start: {SPECIAL} "x"')
    assert (output.text, output.token_ids[0]) == ("x", SPECIAL_ID)


# ── closed objects ──────────────────────────────────────────────────────────────────────────────


def test_objects_are_closed_unless_the_request_opens_them(server: Running) -> None:
    schema = {"type": "object", "properties": {"a": {"const": 1}}}
    comma = server.post("/tokenize", {"prompt": '{"a":1,', "add_special_tokens": False})["tokens"]
    form = {"type": "json_schema", "json_schema": {"name": "it", "schema": schema}}

    def names(**more: Any) -> set[str]:
        """The model is made to go on wherever it may."""
        bias = {str(token): 50 for token in comma}
        (said,) = ask(server, logit_bias=bias, max_tokens=60, **more)["choices"]
        return set(re.findall(r'"([^"]*)" ?:', said["message"]["content"]))

    open_it = {"disable_additional_properties": False}
    assert names(response_format=form) <= {"a"}
    assert names(structured_outputs={"json": schema}) <= {"a"}
    assert names(structured_outputs={"json": schema, **open_it}) - {"a"}
    assert names(response_format=form, structured_outputs=open_it) - {"a"}


def test_a_server_may_leave_objects_open(folder: Path) -> None:
    schema = {"type": "object", "properties": {}, "minProperties": 1}
    body = {"messages": HELLO, "max_tokens": 40}
    with running(tiny_llm(folder), disable_additional_properties=False) as server:
        assert ask(server, structured_outputs={"json": schema})["choices"][0]["message"]["content"]
        asked = {"json": schema, "disable_additional_properties": True}
        status, _, content = server.ask("POST", CHAT, {**body, "structured_outputs": asked})
        assert status == 400
        assert b"structured_outputs" in content
        assert (
            "content"
            in ask(server, structured_outputs={"disable_additional_properties": True})["choices"][
                0
            ]["message"]
        )


# ── an agent's loop ─────────────────────────────────────────────────────────────────────────────


def conversation(**message: Any) -> list[dict[str, Any]]:
    function = {"name": "paint", "arguments": '{"colour": "red"}'}
    calls = [{"id": "call_1", "type": "function", "function": function}]
    said = {"role": "assistant", "content": None, "tool_calls": calls, "refusal": None, **message}
    parts = [{"type": "text", "text": "it is"}, {"type": "text", "text": "red now"}]
    return [*HELLO, said, {"role": "tool", "tool_call_id": "call_1", "content": parts}]


EXPECTED = (
    "<|im_start|>user\nthe quick fox<|im_end|>\n"
    '<|im_start|>assistant\n<tool_call>\n{"name": "paint", "arguments": {"colour": "red"}}\n'
    "</tool_call><|im_end|>\n"
    "<|im_start|>user\n<tool_response>\nit is\nred now\n</tool_response><|im_end|>\n"
    "<|im_start|>assistant\n"
)


def test_the_second_turn_of_an_agents_loop_is_read(server: Running) -> None:
    for messages in (conversation(), conversation(content="")):
        ids = server.post("/tokenize", {"messages": messages})["tokens"]
        assert server.post("/detokenize", {"tokens": ids})["prompt"] == EXPECTED
        answer = ask(server, messages=messages, max_tokens=3, return_token_ids=True)
        assert answer["prompt_token_ids"] == ids


def test_a_call_goes_back_as_it_came(server: Running) -> None:
    asked = {"tools": TOOLS, "tool_choice": "required"}
    message = ask(server, **asked)["choices"][0]["message"]
    result = {"role": "tool", "tool_call_id": message["tool_calls"][0]["id"], "content": "done"}
    messages = [*HELLO, message, result]
    assert ask(server, messages=messages, tools=TOOLS, max_tokens=3)["choices"][0]["message"]


def test_in_the_program_messages_are_read_in_the_same_way(llm: LLM) -> None:
    greedy = SamplingParams(temperature=0, max_tokens=3)
    (output,) = llm.chat(conversation(), greedy, use_tqdm=False)
    tokenizer = llm.get_tokenizer()
    assert tokenizer.decode(output.prompt_token_ids, skip_special_tokens=False) == EXPECTED
    last = {"role": "assistant", "content": "it is  "}
    (output,) = llm.chat(
        [*HELLO, last],
        greedy,
        use_tqdm=False,
        continue_final_message=True,
        add_generation_prompt=False,
    )
    text = tokenizer.decode(output.prompt_token_ids, skip_special_tokens=False)
    assert text.endswith("<|im_start|>assistant\nit is  ")


def test_the_last_message_is_continued_where_it_ends(server: Running) -> None:
    messages = [*HELLO, {"role": "assistant", "content": "fox \n "}]
    asked = {"continue_final_message": True, "add_generation_prompt": False}
    ids = server.post("/tokenize", {"messages": messages, **asked})["tokens"]
    text = server.post("/detokenize", {"tokens": ids})["prompt"]
    assert text == "<|im_start|>user\nthe quick fox<|im_end|>\n<|im_start|>assistant\nfox \n "
