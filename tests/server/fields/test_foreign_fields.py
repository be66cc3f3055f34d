"""Fields of other servers: translated, ignored, refused, or unknown."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.server.running import Running, running
from tests.tiny import tiny_folder, tiny_llm
from twostroke.serve.api.anthropic.messages_request import MessagesRequest, as_chat
from twostroke.serve.error_responses import ApiError
from twostroke.serve.fields.body_fields import Body, decode_body
from twostroke.serve.fields.protocol import ChatRequest, CompletionRequest, ResponsesRequest

CHAT, TEXT, RESPONSES = "/v1/chat/completions", "/v1/completions", "/v1/responses"
LLAMA, MESSAGES, OLLAMA = "/completion", "/v1/messages", "/api/chat"
HELLO = [{"role": "user", "content": "the fox"}]
BODIES: dict[str, dict[str, Any]] = {
    CHAT: {"messages": HELLO, "max_tokens": 2},
    TEXT: {"prompt": "the fox", "max_tokens": 2},
    RESPONSES: {"input": "the fox", "max_output_tokens": 2},
    LLAMA: {"prompt": "the fox", "n_predict": 2},
    MESSAGES: {"messages": HELLO, "max_tokens": 2},
    OLLAMA: {"messages": HELLO, "stream": False, "options": {"num_predict": 2}},
}
WARNING = "x-twostroke-warning"
NEUTRAL: dict[str, Any] = {
    "use_beam_search": False, "length_penalty": 1.0, "logits_processors": [], "typical_p": 1.0,
    "mirostat": 0, "mirostat_tau": 5.0, "dry_multiplier": 0, "xtc_probability": 0.0, "lora": [],
    "top_n_sigma": -1, "min_keep": 0, "id_slot": -1, "timings_per_token": True, "n_keep": 0,
    "samplers": ["top_k", "top_p", "min_p", "temperature", "penalties"], "repeat_last_n": 64,
    "cache_prompt": True, "repeat_penalty": 1.0, "return_hidden_states": False, "top_a": 0,
    "guided_decoding_backend": "xgrammar", "mm_processor_kwargs": {}, "transforms": [],
    "safe_prompt": False, "kv_transfer_params": None, "vllm_xargs": {}, "lora_path": None,
}  # fmt: skip
CHAT_NEUTRAL: dict[str, Any] = {
    **NEUTRAL, "functions": [], "function_call": "auto", "modalities": ["text"], "audio": None,
    "enable_thinking": False,
    "reasoning": {"effort": "low", "exclude": True}, "thinking": {"type": "disabled"},
    "reasoning_format": "auto", "separate_reasoning": True, "stream_reasoning": True,
    "parse_tool_calls": True, "n_probs": 0, "best_of": 1,
}  # fmt: skip


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Running]:
    with running(tiny_llm(tiny_folder(tmp_path_factory.mktemp("tiny") / "tiny"))) as one:
        yield one


def read(kind: type[Body], **fields: Any) -> Any:
    request, unknown = decode_body(json.dumps(fields).encode(), kind)
    assert unknown == []
    return request


def chat(**fields: Any) -> Any:
    return read(ChatRequest, messages=HELLO, **fields)


@pytest.mark.parametrize(("path", "fields"), [(CHAT, CHAT_NEUTRAL), (TEXT, NEUTRAL)])
def test_fields_that_change_nothing_are_taken(
    server: Running, path: str, fields: dict[str, Any]
) -> None:
    status, headers, content = server.ask("POST", path, BODIES[path] | fields)
    assert status == 200, content
    assert WARNING not in headers


@pytest.mark.core
@pytest.mark.parametrize("path", BODIES)
def test_an_unknown_field_is_ignored_with_a_warning(server: Running, path: str) -> None:
    body = BODIES[path] | {"temprature": 1, "größe\n": {"a": [1]}}
    status, headers, content = server.ask("POST", path, body)
    assert status == 200, content
    assert headers[WARNING] == (r"unknown fields were ignored: 'temprature', 'gr\xf6\xdfe\n'")


def test_a_warning_is_short_and_comes_with_streams_and_objects_within(server: Running) -> None:
    many = {f"field{n}": n for n in range(1000)} | {"x" * 5000: 1}
    body = BODIES[CHAT] | {"stream": True, "stream_options": {"usage": 1}} | many
    status, headers, content = server.ask("POST", CHAT, body)
    assert status == 200
    assert content.endswith(b"data: [DONE]\n\n")
    assert "'stream_options.usage'" in headers[WARNING]
    assert headers[WARNING].endswith("and 994 more")
    assert len(headers[WARNING]) < 1000


def test_strict_fields_refuse_what_is_unknown_and_take_what_is_known(tmp_path: Path) -> None:
    with running(tiny_llm(tiny_folder(tmp_path)), strict_fields=True) as server:
        for path, body in BODIES.items():
            status, _, content = server.ask("POST", path, body | {"temprature": 1})
            assert (status, b"unknown field 'temprature'" in content) == (400, True)
        _, _, content = server.ask("POST", CHAT, BODIES[CHAT] | {"temprature": 1})
        error = json.loads(content)["error"]
        assert "did you mean 'temperature'" in error["message"]
        assert (error["param"], error["code"]) == ("temprature", "unknown_field")
        nested = BODIES[CHAT] | {"stream": True, "stream_options": {"usage": 1}}
        assert b"stream_options.usage" in server.ask("POST", CHAT, nested)[2]
        assert server.ask("POST", CHAT, BODIES[CHAT] | CHAT_NEUTRAL)[0] == 200
        schema = json.loads(server.ask("GET", "/openapi.json")[2])["components"]["schemas"]
        assert schema["ChatRequest"]["additionalProperties"] is False


@pytest.mark.core
@pytest.mark.parametrize(
    ("path", "field", "value"),
    [
        (CHAT, "use_beam_search", True),
        (CHAT, "mirostat", 2),
        (CHAT, "lora", [{"id": 0, "scale": 1}]),
        (CHAT, "functions", [{"name": "f"}]),
        (CHAT, "modalities", ["audio"]),
        (CHAT, "web_search_options", {"a": 1}),
        (CHAT, "logits_processors", ["a.b"]),
        (CHAT, "guided_json", 5),
        (CHAT, "repeat_last_n", "far"),
        (TEXT, "suffix", "b"),
        (TEXT, "prompt_embeds", "AAAA"),
        (TEXT, "dry_multiplier", 0.8),
        (RESPONSES, "conversation", "conv_1"),
        (RESPONSES, "n", 2),
        (MESSAGES, "mcp_servers", [{"name": "a"}]),
        (OLLAMA, "options", {"mirostat": 2}),
    ],
)
def test_a_field_that_would_change_the_answer_is_refused(
    server: Running, path: str, field: str, value: Any
) -> None:
    status, _, content = server.ask("POST", path, BODIES[path] | {field: value})
    assert status == 400
    assert field.removeprefix("options").encode() in content


def test_llama_servers_fields_have_an_effect_on_openais_routes(server: Running) -> None:
    body = {"prompt": "the fox", "temperature": 0, "ignore_eos": True}
    answer = server.post(TEXT, {**body, "n_predict": 3, "n_probs": 2})
    assert answer["usage"]["completion_tokens"] == 3
    assert len(answer["choices"][0]["logprobs"]["top_logprobs"][0]) == 2
    long = {"prompt": list(range(4, 104)), "max_tokens": 1}
    server.post(TEXT, long)
    assert server.post(TEXT, long)["timings"]["cache_n"] > 0
    assert server.post(TEXT, {**long, "cache_prompt": False})["timings"]["cache_n"] == 0
    yes: dict[str, Any] = {"grammar": 'root ::= "yes"'}
    assert (
        server.post(CHAT, {"messages": HELLO, **yes})["choices"][0]["message"]["content"] == "yes"
    )
    assert server.post(LLAMA, {"prompt": "a", **yes})["content"] == "yes"
    forced = {"guided_choice": ["maybe"]}
    message = server.post(MESSAGES, {"messages": HELLO, "max_tokens": 20, **forced})
    assert message["content"][0]["text"] == "maybe"


def test_a_field_is_read_as_ours_and_ours_counts() -> None:
    asked = chat(n_predict=-1, repeat_penalty="1.5", random_seed=7, rid="mine")
    assert (asked.max_tokens, asked.repetition_penalty) == (None, 1.5)
    assert (asked.seed, asked.request_id) == (7, "mine")
    assert chat(repeat_penalty=1.5, repetition_penalty=1.1).repetition_penalty == 1.1
    assert chat(repeat_penalty=1.5, repeat_last_n=0).repetition_penalty == 1.0
    with pytest.raises(ApiError, match="repeat_last_n"):
        chat(repetition_penalty=1.5, repeat_last_n=64)
    assert chat(samplers=["top_k"], temperature=0.3, top_k=5).temperature == 1.0
    assert read(CompletionRequest, prompt="a", n_predict=-1).max_tokens == 2**31 - 1
    open_it = {"disable_additional_properties": False}
    schema = {"type": "object"}
    structured = chat(json_schema=schema, structured_outputs=open_it).structured_outputs
    assert (structured.json, structured.disable_additional_properties) == (schema, False)
    assert chat(grammar="").structured_outputs is None


def test_thinking_in_the_words_of_each_server() -> None:
    on, off = ({"enable_thinking": one, "thinking": one} for one in (True, False))
    assert chat(enable_thinking=False).chat_template_kwargs == off
    assert chat(thinking=True).chat_template_kwargs == on
    own = {"enable_thinking": True}
    assert chat(thinking=False, chat_template_kwargs=own).chat_template_kwargs == off | own
    asked = chat(thinking={"type": "enabled", "budget_tokens": 9})
    assert (asked.chat_template_kwargs, asked.thinking_token_budget) == (on, 9)
    asked = chat(reasoning={"effort": "high", "max_tokens": 5, "exclude": True})
    assert (asked.reasoning_effort, asked.thinking_token_budget) == ("high", 5)
    assert asked.include_reasoning is False
    assert chat(reasoning=False).chat_template_kwargs == off
    assert chat(separate_reasoning=False).reasoning_format == "none"
    asked = read(ResponsesRequest, input="a", reasoning_effort="low", thinking={"type": "disabled"})
    assert (asked.reasoning.effort, asked.chat_template_kwargs) == ("low", off)


def test_anthropics_route_takes_the_engines_fields() -> None:
    more = {
        "seed": 3,
        "min_p": 0.1,
        "guided_regex": "a+",
        "cache_salt": "s",
        "enable_thinking": True,
    }
    request = as_chat(read(MessagesRequest, messages=HELLO, max_tokens=5, **more))
    assert (request.seed, request.min_p, request.cache_salt) == (3, 0.1, "s")
    assert request.structured_outputs is not None
    assert request.structured_outputs.regex == "a+"
    assert request.chat_template_kwargs == {"enable_thinking": True, "thinking": True}


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize(
    ("path", "own"),
    [
        (RESPONSES, {"type": "function", "name": "now"}),
        (MESSAGES, {"name": "now", "input_schema": {"type": "object"}}),
    ],
)
def test_tools_that_only_the_makers_server_runs_are_left_out_with_a_warning(
    server: Running, path: str, own: dict[str, Any], stream: bool
) -> None:
    types = ["web_search", "file_search", "code_interpreter", "mcp", "image_generation"]
    foreign = [{"type": one, "name": one} for one in types]
    for tools in ([*foreign, own], foreign):
        body = BODIES[path] | {"tools": tools, "stream": stream}
        status, headers, content = server.ask("POST", path, body)
        assert status == 200, content
        assert headers[WARNING].startswith("tools that this server does not run were left out: ")
        assert all(f"'{one}'" in headers[WARNING] for one in types)
        if path == RESPONSES and not stream:
            shown = [one["type"] for one in json.loads(content)["tools"]]
            assert shown == ["function"] * (own in tools)


def test_the_description_has_the_fields_and_allows_others(server: Running) -> None:
    schemas = json.loads(server.ask("GET", "/openapi.json")[2])["components"]["schemas"]
    chats = schemas["ChatRequest"]
    assert chats["properties"]["repeat_penalty"]["anyOf"][0]["type"] == "number"
    assert 0.0 in chats["properties"]["dry_multiplier"]["enum"]
    assert "additionalProperties" not in chats
    assert "num_ctx" in schemas["Options"]["properties"]
    assert schemas["PoolsRequest"]["additionalProperties"] is False
