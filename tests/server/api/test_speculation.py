"""Speculative decoding over HTTP: predicted outputs, usage, timings, metrics."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

import pytest

from tests.server.running import Running, running
from tests.tiny import tiny_folder, tiny_llm
from twostroke import LLM
from twostroke.v1.metrics.reader import Counter, Vector

ASK: dict[str, Any] = {
    "messages": [{"role": "user", "content": "the quick brown fox"}],
    "temperature": 0,
    "max_tokens": 40,
    "ignore_eos": True,
}
CONFIG = {"method": "ngram", "enable_adaptive_verification": False}


@pytest.fixture(scope="module")
def llms(tmp_path_factory: pytest.TempPathFactory) -> tuple[LLM, LLM]:
    folder = tiny_folder(tmp_path_factory.mktemp("tiny") / "tiny")
    return tiny_llm(folder), tiny_llm(folder, speculative_config=CONFIG)


@pytest.fixture(scope="module")
def server(llms: tuple[LLM, LLM]) -> Iterator[Running]:
    with running(llms[1]) as one:
        yield one


@pytest.fixture(scope="module")
def expected(llms: tuple[LLM, LLM]) -> dict[str, Any]:
    with running(llms[0]) as plain:
        predicted = {"prediction": {"type": "content", "content": "a"}}
        answer: dict[str, Any] = plain.post("/v1/chat/completions", {**ASK, **predicted})
    assert "completion_tokens_details" not in answer["usage"]
    assert "draft_n" not in answer["timings"]
    return answer


@pytest.mark.parametrize("parts", [False, True])
def test_a_right_prediction_is_counted_in_the_usage(
    server: Running, expected: dict[str, Any], parts: bool
) -> None:
    text = expected["choices"][0]["message"]["content"]
    content: Any = [{"type": "text", "text": text}] if parts else text
    body = {**ASK, "prediction": {"type": "content", "content": content}}
    answer = server.post("/v1/chat/completions", body)
    assert answer["choices"][0]["message"]["content"] == text
    usage, timings = answer["usage"], answer["timings"]
    assert usage["completion_tokens"] == 40
    details = usage["completion_tokens_details"]
    assert details["accepted_prediction_tokens"] >= 10
    assert details["rejected_prediction_tokens"] >= 0
    assert timings["draft_n"] >= timings["draft_n_accepted"] >= 10
    *_, last, done = server.events(
        "/v1/chat/completions",
        {**body, "stream": True, "stream_options": {"include_usage": True}},
    )
    assert done == "[DONE]"
    assert last["usage"]["completion_tokens_details"]["accepted_prediction_tokens"] >= 10


def test_a_stream_with_drafts_has_the_same_text(server: Running, expected: dict[str, Any]) -> None:
    text = expected["choices"][0]["message"]["content"]
    body = {**ASK, "prediction": {"type": "content", "content": text}, "stream": True}
    events = server.events("/v1/chat/completions", body)[:-1]
    deltas = [event["choices"][0]["delta"] for event in events if event["choices"]]
    assert "".join(delta.get("content") or "" for delta in deltas) == text
    assert len(deltas) < 30, "several tokens came in one event"


def test_a_bad_prediction_is_refused(server: Running) -> None:
    body = {**ASK, "prediction": {"type": "content"}}
    status, _, content = server.ask("POST", "/v1/chat/completions", body)
    assert status == 400
    assert b"content" in content


def test_drafts_are_in_the_metrics_under_vllms_names(
    server: Running, expected: dict[str, Any], llms: tuple[LLM, LLM]
) -> None:
    text = expected["choices"][0]["message"]["content"]
    server.post("/v1/chat/completions", {**ASK, "prediction": {"content": text}})
    lines = server.ask("GET", "/metrics")[2].decode().splitlines()
    values = {
        line.split("{")[0]: float(line.rsplit(" ", 1)[1])
        for line in lines
        if line.startswith("vllm:spec_decode") and "_per_pos" not in line
    }
    drafts, tokens, accepted = (
        values[f"vllm:spec_decode_num_{name}_total"]
        for name in ("drafts", "draft_tokens", "accepted_tokens")
    )
    assert 0 < drafts <= tokens
    assert 0 < accepted <= tokens
    places = [
        float(line.rsplit(" ", 1)[1])
        for line in lines
        if line.startswith("vllm:spec_decode_num_accepted_tokens_per_pos_total{")
    ]
    assert sum(places) == accepted
    assert sorted(places, reverse=True) == places
    assert json.loads(server.ask("GET", "/slots")[2])[0]["speculative"] is True
    records = [one for one in llms[1].engine.core.records.steps if one.drafts is not None]
    assert sum(one.drafts.tokens for one in records if one.drafts) == tokens


def test_the_library_has_the_same_metrics(llms: tuple[LLM, LLM]) -> None:
    llm = llms[1]
    llm.generate(["a b a b a b a b a b"], use_tqdm=False)
    found = {one.name: one for one in llm.get_metrics()}
    per_place = found["vllm:spec_decode_num_accepted_tokens_per_pos"]
    accepted = found["vllm:spec_decode_num_accepted_tokens"]
    assert isinstance(per_place, Vector)
    assert isinstance(accepted, Counter)
    assert sum(per_place.values) == accepted.value
