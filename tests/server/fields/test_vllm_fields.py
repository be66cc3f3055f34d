"""vLLM's request fields and response headers."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.server.running import JSON, Running, running
from tests.tiny import CHAT_TEMPLATE, MAX_LEN, VOCAB_SIZE, tiny_folder, tiny_llm

CHAT, TEXT = "/v1/chat/completions", "/v1/completions"
HELLO: dict[str, Any] = {
    "messages": [{"role": "user", "content": "the fox"}],
    "max_tokens": 3,
    "temperature": 0,
    "ignore_eos": True,
}
PROMPT: dict[str, Any] = {"prompt": "the fox", "max_tokens": 3, "temperature": 0}


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Running]:
    folder = tiny_folder(tmp_path_factory.mktemp("tiny") / "tiny")
    with running(
        tiny_llm(folder, max_logprobs=-1),
        root_path="/llm/",
        enable_request_id_headers=True,
        enable_tokenizer_info_endpoint=True,
        served_model_names=("org/tiny", "tiny"),
    ) as server:
        yield server


def refused(server: Running, path: str, body: dict[str, Any]) -> dict[str, Any]:
    status, _, content = server.ask("POST", path, body)
    assert status == 400, content
    error: dict[str, Any] = json.loads(content)["error"]
    return error


# ── headers and paths ───────────────────────────────────────────────────────────────────────


def test_a_requests_name_comes_from_its_header_and_goes_back_in_one(server: Running) -> None:
    named = {**JSON, "X-Request-Id": "mine"}
    body = {**HELLO, "request_id": "another"}
    _, headers, content = server.ask("POST", CHAT, body, named)
    assert json.loads(content)["id"] == "chatcmpl-mine"
    assert headers["x-request-id"] == "mine"
    status, headers, _ = server.ask("GET", "/nowhere", headers={"X-Request-Id": "lost"})
    assert (status, headers["x-request-id"]) == (404, "lost")
    _, headers, content = server.ask("POST", CHAT, HELLO)
    assert len(headers["x-request-id"]) == 32
    status, _, _ = server.ask("POST", CHAT, HELLO, {**JSON, "X-Request-Id": "x" * 257})
    assert status == 400


def test_settings_hold_for_every_answer_and_without_them_no_header_is_added(tmp_path: Path) -> None:
    settings = {"force_include_usage": True, "return_tokens_as_token_ids": True}
    with running(tiny_llm(tiny_folder(tmp_path)), **settings) as server:
        (choice,) = server.post(TEXT, {**PROMPT, "logprobs": 0})["choices"]
        assert all(token.startswith("token_id:") for token in choice["logprobs"]["tokens"])
        _, headers, content = server.ask("POST", CHAT, HELLO, {**JSON, "X-Request-Id": "mine"})
        assert "x-request-id" not in headers
        assert json.loads(content)["id"] == "chatcmpl-mine"
        for path, body in ((CHAT, HELLO), (TEXT, PROMPT)):
            events = server.events(path, {**body, "stream": True})[:-1]
            counts = [event["usage"]["completion_tokens"] for event in events]
            assert counts == sorted(counts)
            assert counts[-1] == 3
            assert events[-1]["choices"] == []
        assert server.ask("GET", "/tokenizer_info")[0] == 404
        assert server.ask("POST", "/sleep")[0] == 404


@pytest.mark.parametrize("excluded", [False, True])
def test_tools_that_must_not_be_called_are_shown_unless_the_server_leaves_them_out(
    tmp_path: Path, excluded: bool
) -> None:
    tools = [{"type": "function", "function": {"name": "dog"}}]
    template = "{% for t in tools or [] %}{{ t.function.name }}{% endfor %}fox"
    settings = {"exclude_tools_when_tool_choice_none": excluded}
    with running(tiny_llm(tiny_folder(tmp_path), chat_template=template), **settings) as server:

        def prompt(**given: Any) -> Any:
            return server.post(CHAT, {**HELLO, "return_token_ids": True, **given})

        without = prompt()["prompt_token_ids"]
        auto = prompt(tools=tools)["prompt_token_ids"]
        none = prompt(tools=tools, tool_choice="none")["prompt_token_ids"]
        assert auto != without
        assert none == (without if excluded else auto)


def test_a_template_gets_contents_in_the_format_of_the_server(tmp_path: Path) -> None:
    template = "{{ 'dog' if messages[0].content is string else 'fox' }}"
    settings: Any = {"chat_template_content_format": "openai"}
    with running(tiny_llm(tiny_folder(tmp_path), chat_template=template), **settings) as server:
        chat = server.post("/tokenize", {"messages": [{"role": "user", "content": "the"}]})
        text = server.post("/tokenize", {"prompt": "fox", "add_special_tokens": False})
        assert chat["tokens"] == text["tokens"]


def test_routes_are_there_with_and_without_the_root_path(server: Running) -> None:
    assert server.post("/llm" + TEXT, PROMPT)["choices"] == server.post(TEXT, PROMPT)["choices"]
    assert server.ask("GET", "/llmv1/models")[0] == 404
    described = json.loads(server.ask("GET", "/llm/openapi.json")[2])
    assert described["servers"] == [{"url": "/llm"}]


def test_one_model_is_found_by_a_name_with_a_slash(server: Running) -> None:
    for path in ("/v1/models/org/tiny", "/v1/models/org%2Ftiny", "/v1/models/tiny"):
        status, _, content = server.ask("GET", path)
        assert status == 200
        assert json.loads(content)["root"] == "org/tiny"
    status, _, content = server.ask("GET", "/v1/models/other")
    assert (status, json.loads(content)["error"]["code"]) == (404, "model_not_found")
    assert server.ask("GET", "/v1/models/{model...}")[0] == 404


def test_pages_link_to_what_there_is_and_load_nothing_from_elsewhere(server: Running) -> None:
    for path, says in (("/", 'href="/llm/docs"'), ("/docs", "POST /v1/chat/completions")):
        status, headers, body = server.ask("GET", path)
        page = body.decode()
        assert status == 200
        assert headers["content-type"].startswith("text/html")
        assert says in page
        assert "http://" not in page
        assert "https://" not in page
        assert "<script" not in page
    assert "truncate_prompt_tokens" in page
    assert "list of StopText" not in page


def test_load_counts_the_requests_that_are_answered(server: Running) -> None:
    assert json.loads(server.ask("GET", "/load")[2]) == {"server_load": 0}


def test_a_load_balancer_is_told_the_load_in_the_form_it_asks_for(server: Running) -> None:
    name = "endpoint-load-metrics"
    _, headers, _ = server.ask("POST", TEXT, PROMPT, {**JSON, f"{name}-format": "JSON"})
    form, _, report = headers[name].partition(" ")
    assert form == "JSON"
    figures = json.loads(report)["named_metrics"]
    assert figures["num_requests_waiting"] == 0.0
    assert 0.0 <= figures["kv_cache_usage_perc"] <= 1.0
    body = {**HELLO, "stream": True}
    _, headers, _ = server.ask("POST", CHAT, body, {**JSON, f"{name}-format": "text"})
    assert "named_metrics.num_requests_waiting=0.0" in headers[name]
    assert name not in server.ask("POST", TEXT, PROMPT)[1]


# The range that the description gives a number, and what lies just outside.
@pytest.mark.parametrize(
    ("field", "kind", "step"),
    [
        ("temperature", "number", 0.5),
        ("top_p", "number", 0.5),
        ("min_p", "number", 0.5),
        ("presence_penalty", "number", 0.5),
        ("frequency_penalty", "number", 0.5),
        ("top_k", "integer", 1),
        ("seed", "integer", 1),
        ("n", "integer", 1),
        ("max_tokens", "integer", 1),
        ("min_tokens", "integer", 1),
        ("logprobs", "integer", 1),
        ("prompt_logprobs", "integer", 1),
        ("priority", "integer", 1),
        ("truncate_prompt_tokens", "integer", 1),
    ],
)
def test_the_descriptions_limits_are_the_servers(
    server: Running, field: str, kind: str, step: float
) -> None:
    described = json.loads(server.ask("GET", "/openapi.json")[2])
    properties = described["components"]["schemas"]["CompletionRequest"]["properties"]
    (limits,) = [part for part in properties[field]["anyOf"] if part["type"] == kind]
    least, most = limits.get("minimum"), limits.get("maximum")
    few = {"max_tokens": 1, "ignore_eos": True} | ({"stream": True} if field == "n" else {})
    inside = [value for value in (least, most) if value is not None]
    if field in ("n", "min_tokens", "max_tokens", "truncate_prompt_tokens"):
        inside = [least if field != "truncate_prompt_tokens" else 1]  # the most takes long
    for value in inside:
        status, _, content = server.ask("POST", TEXT, {**PROMPT, **few, field: value})
        assert status == 200, content
    outside = [limits["exclusiveMinimum"]] if least is None else [least - step]
    if field not in ("top_k", "max_tokens"):  # there the most is only what fits into a number
        outside.append(most + step)
    for value in outside:
        refused(server, TEXT, {**PROMPT, **few, field: value})


# ── the tokenizer ───────────────────────────────────────────────────────────────────────────


def test_token_strs_are_written_as_the_vocabulary_has_them(server: Running) -> None:
    answer = server.post("/tokenize", {"prompt": "a fox", "return_token_strs": True})
    assert answer["token_strs"][0] == "<s>"
    assert "Ġ" in "".join(answer["token_strs"])


def test_tokenizer_info_has_the_special_tokens_and_the_template(server: Running) -> None:
    info = json.loads(server.ask("GET", "/tokenizer_info")[2])
    assert (info["bos_token"], info["eos_token"]) == ("<s>", "</s>")
    assert info["chat_template"] == CHAT_TEMPLATE
    assert info["model_max_length"] == MAX_LEN
    assert info["added_tokens_decoder"]["0"]["content"] == "<s>"


def test_a_prompt_is_cut_at_the_side_that_is_asked_for(server: Running) -> None:
    body = {**PROMPT, "prompt": list(range(8)), "return_token_ids": True}
    for side, kept in ((None, [4, 5, 6, 7]), ("left", [4, 5, 6, 7]), ("right", [0, 1, 2, 3])):
        answer = server.post(TEXT, {**body, "truncate_prompt_tokens": 4, "truncation_side": side})
        assert answer["choices"][0]["prompt_token_ids"] == kept
    long = {**PROMPT, "prompt": "the quick fox " * 500, "return_token_ids": True}
    assert refused(server, TEXT, long)["code"] == "context_length_exceeded"
    cut = server.post(TEXT, {**long, "truncate_prompt_tokens": -1, "max_tokens": 1})
    assert len(cut["choices"][0]["prompt_token_ids"]) == MAX_LEN - 1
    chat = {**HELLO, "messages": [{"role": "user", "content": "the quick fox " * 200}]}
    chat |= {"truncate_prompt_tokens": 7, "return_token_ids": True}
    assert len(server.post(CHAT, chat)["prompt_token_ids"]) == 7
    wrong = refused(server, TEXT, {**PROMPT, "truncate_prompt_tokens": MAX_LEN})
    assert wrong["param"] == "truncate_prompt_tokens"


# ── answers ─────────────────────────────────────────────────────────────────────────────────


def test_what_was_not_asked_for_is_null(server: Running) -> None:
    answer = server.post(CHAT, HELLO)
    assert answer["prompt_logprobs"] is None
    assert answer["prompt_token_ids"] is None
    assert answer["choices"][0]["token_ids"] is None
    assert answer["choices"][0]["message"]["reasoning"] is None
    (choice,) = server.post(TEXT, PROMPT)["choices"]
    assert choice["prompt_logprobs"] is None
    assert choice["prompt_token_ids"] is None
    assert choice["token_ids"] is None


def test_stream_options_need_a_stream(server: Running) -> None:
    for path, body in ((CHAT, HELLO), (TEXT, PROMPT)):
        for options in ({}, {"include_usage": True}, {"include_usage": None}):
            error = refused(server, path, {**body, "stream_options": options})
            assert error["param"] == "stream_options"


def test_usage_of_a_chat_begins_at_zero(server: Running) -> None:
    options = {"include_usage": True, "continuous_usage_stats": True}
    events = server.events(CHAT, {**HELLO, "stream": True, "stream_options": options})[:-1]
    counts = [event["usage"]["completion_tokens"] for event in events]
    assert counts == [0, 1, 2, 3, 3]


def test_an_echoed_chat_begins_with_the_last_message(server: Running) -> None:
    said = {"role": "assistant", "content": "a small model"}
    body = {**HELLO, "messages": [*HELLO["messages"], said], "continue_final_message": True}
    body |= {"add_generation_prompt": False}
    plain = server.post(CHAT, body)["choices"][0]["message"]["content"]
    echoed = server.post(CHAT, {**body, "echo": True})["choices"][0]["message"]["content"]
    assert echoed == "a small model" + plain
    events = server.events(CHAT, {**body, "echo": True, "stream": True})[:-1]
    deltas = [event["choices"][0]["delta"].get("content") for event in events]
    assert "".join(deltas) == echoed
    other = server.post(CHAT, {**HELLO, "echo": True})["choices"][0]["message"]["content"]
    assert other == server.post(CHAT, HELLO)["choices"][0]["message"]["content"]


# ── log-probabilities ───────────────────────────────────────────────────────────────────────


def test_the_tokens_own_logprob_comes_first(server: Running) -> None:
    unlikely = {"allowed_token_ids": [42], "return_tokens_as_token_ids": True, "max_tokens": 1}
    chat = server.post(CHAT, {**HELLO, **unlikely, "logprobs": True, "top_logprobs": 3})
    (entry,) = chat["choices"][0]["logprobs"]["content"]
    assert entry["top_logprobs"][0]["token"] == entry["token"] == "token_id:42"
    assert len(entry["top_logprobs"]) == 3
    others = [one["logprob"] for one in entry["top_logprobs"][1:]]
    assert others == sorted(others, reverse=True)
    text = server.post(TEXT, {**PROMPT, **unlikely, "logprobs": 3})["choices"][0]["logprobs"]
    (best,) = text["top_logprobs"]
    assert next(iter(best)) == "token_id:42"
    assert len(best) == 4


def test_named_tokens_take_the_place_of_the_likeliest(server: Running) -> None:
    body = {**HELLO, "logprobs": True, "return_tokens_as_token_ids": True, "max_tokens": 2}
    every = server.post(CHAT, {**body, "top_logprobs": -1})["choices"][0]["logprobs"]["content"]
    asked = {**body, "logprob_token_ids": [5, 200], "top_logprobs": 5}
    named = server.post(CHAT, asked)["choices"][0]["logprobs"]["content"]
    streamed = [
        entry
        for event in server.events(CHAT, {**asked, "stream": True})[:-1]
        for entry in (event["choices"][0]["logprobs"] or {"content": []})["content"]
    ]
    assert streamed == named
    assert len(named) == 2
    for all_of, some in zip(every, named, strict=True):
        values = {one["token"]: one["logprob"] for one in all_of["top_logprobs"]}
        assert len(values) == VOCAB_SIZE
        tokens = [one["token"] for one in some["top_logprobs"]]
        assert tokens == [some["token"], "token_id:5", "token_id:200"]
        for one in some["top_logprobs"]:
            assert one["logprob"] == pytest.approx(values[one["token"]], abs=1e-4)
    error = refused(server, CHAT, {**HELLO, "logprob_token_ids": [5]})
    assert error["param"] == "logprob_token_ids"
    error = refused(server, CHAT, {**asked, "logprob_token_ids": [VOCAB_SIZE]})
    assert "out of range" in error["message"]


def test_minus_one_is_the_whole_vocabulary(server: Running) -> None:
    answer = server.post(CHAT, {**HELLO, "prompt_logprobs": -1})
    first, *others = answer["prompt_logprobs"]
    assert first is None
    assert all(len(one) == VOCAB_SIZE for one in others)
    error = refused(server, TEXT, {**PROMPT, "prompt_logprobs": -2})
    assert error["param"] == "prompt_logprobs"


def test_prompt_logprobs_that_would_fill_the_memory_are_refused(tmp_path: Path) -> None:
    llm = tiny_llm(tiny_folder(tmp_path), max_logprobs=VOCAB_SIZE)
    with running(llm, max_unread_bytes=4096) as server:
        body = {**PROMPT, "prompt": list(range(20)), "prompt_logprobs": -1}
        for stream in (True, False):
            assert (
                "log-probabilities" in refused(server, TEXT, {**body, "stream": stream})["message"]
            )


# ── what is read as vLLM reads it ───────────────────────────────────────────────────────────


def test_numbers_and_booleans_may_be_written_as_texts(server: Running) -> None:
    plain = server.post(TEXT, {**PROMPT, "logprobs": 2, "echo": True})
    as_texts = {"max_tokens": "3", "temperature": "0.0", "logprobs": 2.0, "echo": "true"}
    assert server.post(TEXT, {**PROMPT, **as_texts})["choices"] == plain["choices"]
    # What is a text stays one.
    assert (
        server.post(TEXT, {**PROMPT, "prompt": "7", "echo": True})["choices"][0]["text"][0] == "7"
    )
    for value in ("yes", "", 2, [True]):
        assert refused(server, TEXT, {**PROMPT, "echo": value})["param"] == "echo"
    for value in ("inf", "nan", "1e400", "warm"):
        assert "temperature" in refused(server, TEXT, {**PROMPT, "temperature": value})["message"]


# ── routes over others ──────────────────────────────────────────────────────────────────────


@pytest.mark.parametrize(("path", "body"), [(CHAT, HELLO), (TEXT, PROMPT)], ids=["chat", "text"])
def test_an_invocation_is_answered_as_what_it_is(
    server: Running, path: str, body: dict[str, Any]
) -> None:
    named, asked = server.post(path, body), server.post("/invocations", body)
    assert asked.keys() == named.keys()
    assert (asked["object"], asked["choices"]) == (named["object"], named["choices"])
    assert asked["id"].partition("-")[0] == named["id"].partition("-")[0]
    streamed = {**body, "stream": True}
    events, expected = server.events("/invocations", streamed), server.events(path, streamed)
    assert [one["choices"] for one in events[:-1]] == [one["choices"] for one in expected[:-1]]
    _, headers, _ = server.ask("POST", "/invocations", {**body, "temprature": 1})
    assert "temprature" in headers["x-twostroke-warning"]


def test_an_invocation_of_neither_kind_is_refused(server: Running) -> None:
    assert "neither" in refused(server, "/invocations", {"input": "the fox"})["message"]
    assert server.ask("POST", "/ping", {})[0] == 200


def test_several_conversations_have_one_answer_each(server: Running) -> None:
    texts = ["the fox", "a dog", "the fox"]
    conversations = [[{"role": "user", "content": text}] for text in texts]
    batch = {**HELLO, "logprobs": True, "return_token_ids": True}
    answer = server.post(f"{CHAT}/batch", {**batch, "messages": conversations})
    assert [choice["index"] for choice in answer["choices"]] == [0, 1, 2]
    alone = [server.post(CHAT, {**batch, "messages": one}) for one in conversations]
    for choice, one in zip(answer["choices"], alone, strict=True):
        assert choice["message"] == one["choices"][0]["message"]
        assert choice["token_ids"] == one["choices"][0]["token_ids"]
    for name in ("prompt_tokens", "completion_tokens", "total_tokens"):
        assert answer["usage"][name] == sum(one["usage"][name] for one in alone)


@pytest.mark.parametrize(
    ("given", "param"),
    [
        ({"messages": []}, "messages"),
        ({"messages": HELLO["messages"]}, "messages[0]"),
        ({"messages": [[]]}, "messages"),
        ({"messages": [HELLO["messages"]] * 129}, "n"),
        ({"stream": True}, "stream"),
        ({"n": 2}, "n"),
        ({"prompt_logprobs": 0}, "prompt_logprobs"),
    ],
    ids=str,
)
def test_a_batch_of_conversations_says_what_it_does_not_take(
    server: Running, given: dict[str, Any], param: str
) -> None:
    body = {**HELLO, "messages": [HELLO["messages"]], **given}
    assert refused(server, f"{CHAT}/batch", body)["param"] == param
