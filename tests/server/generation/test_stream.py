"""Server-sent events byte by byte; the fast encoding equals the plain encoding."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.server.running import Running, running
from tests.tiny import tiny_llm
from twostroke.serve.api.openai.completions import CompletionStreamWriter
from twostroke.serve.fields.response_json import TextEventTemplate, event

CHAT = "/v1/chat/completions"
TEXT = "/v1/completions"
HELLO: dict[str, Any] = {
    "messages": [{"role": "user", "content": "the fox"}],
    "temperature": 0,
    "max_tokens": 8,
    "ignore_eos": True,
}
PROMPT: dict[str, Any] = {
    "prompt": "the fox",
    "temperature": 0,
    "max_tokens": 8,
    "ignore_eos": True,
}


@pytest.fixture(scope="module")
def server(folder: Path) -> Iterator[Running]:
    with running(tiny_llm(folder, max_num_batched_tokens=32, max_num_seqs=8)) as server:
        yield server


@pytest.mark.parametrize(
    "text",
    ["", "plain", 'quo"te \\ back', "\n\r\t\x00\x1f\x7f", "größer 東京 🙂", "\u2028data: x\n\n"],
)
def test_the_fast_encoding_is_the_plain_one(text: str) -> None:
    def plain(text: str) -> bytes:
        return event({"id": 'a "strange" id', "choices": [{"delta": {"content": text}, "n": 1}]})

    assert TextEventTemplate(plain).encode(text) == plain(text)


def test_an_event_is_one_line_of_json_between_data_and_an_empty_line(server: Running) -> None:
    _, headers, content = server.ask("POST", CHAT, {**HELLO, "stream": True})
    assert headers["content-type"] == "text/event-stream; charset=utf-8"
    assert headers["cache-control"] == "no-cache"
    assert content.endswith(b"\n\ndata: [DONE]\n\n")
    lines = content.split(b"\n")
    assert all(line == b"" for line in lines[1::2])
    for line in lines[0:-3:2]:
        assert line.startswith(b'data: {"id":"chatcmpl-')
        json.loads(line.removeprefix(b"data: "))
    assert len(lines[0:-3:2]) == 1 + 8  # who speaks, and one event a token


@pytest.mark.parametrize(("path", "body"), [(CHAT, HELLO), (TEXT, PROMPT)])
def test_fast_and_plain_streams_tell_the_same(
    server: Running, path: str, body: dict[str, Any]
) -> None:
    """`return_token_ids` takes the plain path, and adds only the ids."""
    fast = server.events(path, {**body, "stream": True, "request_id": "same"})
    plain = server.events(
        path, {**body, "stream": True, "request_id": "same", "return_token_ids": True}
    )
    ids = []
    if path == TEXT:  # the ids of the prompt come in an event of their own
        assert plain.pop(0)["choices"][0]["prompt_token_ids"]
    for chunk in plain[:-1]:
        ids += chunk["choices"][0].pop("token_ids")
        chunk.pop("prompt_token_ids", None)
    assert len(ids) == 8
    assert [_timeless(chunk) for chunk in fast] == [_timeless(chunk) for chunk in plain]


def _timeless(chunk: Any) -> Any:
    if isinstance(chunk, str):
        return chunk
    return {key: value for key, value in chunk.items() if key not in ("created", "timings")}


def test_the_last_event_has_llama_cpps_timings(server: Running) -> None:
    *_, last, done = server.events(CHAT, {**HELLO, "stream": True})
    assert done == "[DONE]"
    times = last["timings"]
    assert list(times)[:9] == [
        "cache_n",
        "prompt_n",
        "prompt_ms",
        "prompt_per_token_ms",
        "prompt_per_second",
        "predicted_n",
        "predicted_ms",
        "predicted_per_token_ms",
        "predicted_per_second",
    ]
    assert times["predicted_n"] == 8
    assert times["predicted_per_token_ms"] == pytest.approx(times["predicted_ms"] / 7)
    assert times["prompt_ms"] > 0
    assert times["decode_ms"] == times["predicted_ms"]
    assert sum(times["gaps_ms"].values()) == pytest.approx(times["decode_ms"])
    assert sum(times["worst_gap_causes_ms"].values()) == pytest.approx(times["worst_gap_ms"])
    assert 0 < times["worst_gap_ms"] <= times["decode_ms"]
    assert times["queue_ms"] >= 0
    assert times["preemptions"] == times["kv_evicted_tokens"] == 0
    whole = server.post(CHAT, HELLO)
    read = whole["timings"]["prompt_n"] + whole["timings"]["cache_n"]
    assert read == whole["usage"]["prompt_tokens"]


@pytest.mark.parametrize(("path", "asked"), [(CHAT, HELLO), (TEXT, PROMPT)])
def test_a_request_that_asks_gets_the_causes_of_each_gap(
    server: Running, path: str, asked: dict[str, Any]
) -> None:
    asked = {**asked, "max_tokens": 8, "ignore_eos": True, "return_token_gaps": True}
    *_, last, _ = server.events(path, {**asked, "stream": True})
    for times in (last["timings"], server.post(path, asked)["timings"]):
        gaps = times["token_gaps_ms"]
        assert len(gaps) == times["predicted_n"] - 1 == 7
        for cause, told in zip(times["gaps_ms"].values(), zip(*gaps, strict=True), strict=True):
            assert sum(told) == pytest.approx(cause, abs=0.01)
    several = server.post(path, {**asked, "n": 2})
    assert several["timings"]["token_gaps_ms"] is None
    assert "token_gaps_ms" not in server.post(path, {**asked, "return_token_gaps": None})["timings"]


def test_a_long_prompt_tells_how_far_it_is(server: Running) -> None:
    asked = {**PROMPT, "prompt": list(range(4, 104)), "stream": True, "return_progress": True}
    told = [
        one["prompt_progress"] for one in server.events(TEXT, asked) if "prompt_progress" in one
    ]
    assert [one["processed"] for one in told] == [32, 64, 96]
    assert {one["total"] for one in told} == {100}


def test_prompt_logprobs_and_token_ids_on_request(server: Running) -> None:
    asked = {**PROMPT, "prompt_logprobs": 1, "return_token_ids": True}
    (choice,) = server.post(TEXT, asked)["choices"]
    assert choice["prompt_logprobs"][0] is None
    assert len(choice["prompt_logprobs"]) == len(choice["prompt_token_ids"])
    assert len(choice["token_ids"]) == 8
    answer = server.post(CHAT, {**HELLO, "prompt_logprobs": 1, "return_token_ids": True})
    assert len(answer["prompt_logprobs"]) == len(answer["prompt_token_ids"])
    named = server.post(TEXT, {**PROMPT, "logprobs": 1, "return_tokens_as_token_ids": True})
    tokens = named["choices"][0]["logprobs"]["tokens"]
    assert tokens == [f"token_id:{token}" for token in choice["token_ids"]]


def test_a_message_is_continued_where_it_ends(server: Running) -> None:
    messages = [*HELLO["messages"], {"role": "assistant", "content": "the dog"}]
    shown = {"messages": messages, "add_generation_prompt": False, "continue_final_message": True}
    ids = server.post("/tokenize", shown)["tokens"]
    text = server.post("/detokenize", {"tokens": ids})["prompt"]
    assert text == "<|im_start|>user\nthe fox<|im_end|>\n<|im_start|>assistant\nthe dog"
    refused = server.ask("POST", CHAT, {**HELLO, **shown, "add_generation_prompt": True})
    assert refused[0] == 400
    continued = server.post(CHAT, {**HELLO, **shown})
    assert continued["choices"][0]["message"]["role"] == "assistant"
    assert continued["usage"]["prompt_tokens"] == len(ids)


def test_a_request_may_bring_its_own_template_where_that_is_trusted(folder: Path) -> None:
    with running(tiny_llm(folder), trust_request_chat_template=True) as server:
        asked = {"messages": HELLO["messages"], "chat_template": "{{ messages[0].content }}!"}
        ids = server.post("/tokenize", asked)["tokens"]
        assert server.post("/detokenize", {"tokens": ids})["prompt"] == "the fox!"
        broken = {**asked, "chat_template": "{% for %}"}
        assert server.ask("POST", "/tokenize", broken)[0] == 400


def test_requests_with_different_salts_share_no_prefix(server: Running) -> None:
    long = {**PROMPT, "prompt": [7, 9] * 40, "cache_salt": "mine"}

    def cached(asked: dict[str, Any]) -> int:
        details: dict[str, int] = server.post(TEXT, asked)["usage"]["prompt_tokens_details"]
        return details["cached_tokens"]

    assert cached(long) == 0
    assert cached(long) > 0
    assert cached({**long, "cache_salt": "yours"}) == 0


def test_a_stream_in_which_nothing_is_written_ends_as_one(
    server: Running, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(CompletionStreamWriter, "write", lambda *_: b"")
    assert server.events(TEXT, {**PROMPT, "stream": True}) == ["[DONE]"]


def test_the_description_names_every_route_and_the_fields_of_its_body(server: Running) -> None:
    status, _, body = server.ask("GET", "/openapi.json")
    assert status == 200
    described = json.loads(body)
    assert described["openapi"].startswith("3.1")
    for route in server.app.routes:
        methods = described["paths"].get(route.path.replace("...}", "}"), {})
        assert (route.method.lower() in methods) == route.supported
    assert "/v1/embeddings" not in described["paths"]
    fields = described["components"]["schemas"]["ChatRequest"]["properties"]
    assert {"messages", "temperature", "top_k", "tools", "response_format"} <= set(fields)


def test_metrics_count_what_was_answered(folder: Path) -> None:
    with running(tiny_llm(folder), served_model_names=("small",)) as server:
        server.post(TEXT, PROMPT)
        server.events(CHAT, {**HELLO, "stream": True})
        server.ask("GET", "/nowhere")
        text = server.ask("GET", "/metrics")[2].decode()
    for line in (
        'vllm:generation_tokens_total{engine="0",model_name="small"} 16.0',
        'vllm:request_success_total{engine="0",finished_reason="length",model_name="small"} 2.0',
        'vllm:num_requests_running{engine="0",model_name="small"} 0.0',
        'http_requests_total{handler="/v1/completions",status="200"} 1.0',
        'http_requests_total{handler="unknown",status="404"} 1.0',
    ):
        assert line in text
    assert "vllm:kv_cache_usage_perc" in text
