"""Answers of many choices and log-probabilities: written in pieces, the same JSON, kept packed."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import msgspec
import pytest

from tests.server.running import Running, running
from tests.tiny import tiny_folder, tiny_llm
from twostroke.outputs import CompletionOutput as Completion
from twostroke.outputs import Deltas, Logprob, Logprobs, RequestOutput
from twostroke.plan import TokenLogprobs
from twostroke.serve.sse import CHUNK_BYTES, LazyList, encode_json, iter_json

TEXT, CHAT, RESPONSES = "/v1/completions", "/v1/chat/completions", "/v1/responses"
MANY: dict[str, Any] = {"prompt": [60, 61, 62], "ignore_eos": True, "seed": 1, "temperature": 1.0}


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Running]:
    folder: Path = tiny_folder(tmp_path_factory.mktemp("tiny"))
    llm = tiny_llm(folder, max_num_seqs=64, max_num_batched_tokens=64)
    with running(llm, max_unread_bytes=1024 * 1024, max_choices=2048) as one:
        yield one


def test_pieces_are_the_encoding_and_none_is_much_too_long() -> None:
    def value(lazily: bool) -> Any:
        texts = [f"text {n}" for n in range(5000)]
        choices = [{"index": n, "list": LazyList(texts) if lazily else texts} for n in range(3)]
        objects = (choice for choice in choices) if lazily else choices
        return {"a": 1, "none": None, "choices": objects, "list": choices, "é": {}, "empty": []}

    pieces = list(iter_json(value(True), b"data: ", b"\n\n"))
    assert b"".join(pieces) == b"data: " + msgspec.json.encode(value(False)) + b"\n\n"
    assert len(pieces) > 20
    assert max(map(len, pieces)) < 2 * CHUNK_BYTES
    assert encode_json(value(True)) == msgspec.json.encode(value(False))
    assert b"".join(iter_json({"x": LazyList(())})) == b'{"x":[]}'


def test_packed_logprobs_are_dicts_when_looked_at() -> None:
    packed = Logprobs(lambda token: f"<{token}>")
    packed.add(None)
    packed.add(TokenLogprobs((7, 5, 6), (-3.0, -0.5, -1.0), 9))
    packed.add(TokenLogprobs((5, 5, 6), (-0.5, -0.5, -0.5), 1))
    first = {5: Logprob(-0.5, 1, "<5>"), 6: Logprob(-1.0, 2, "<6>"), 7: Logprob(-3.0, 9, "<7>")}
    second = {5: Logprob(-0.5, 1, "<5>"), 6: Logprob(-0.5, 2, "<6>")}
    assert packed == [None, first, second]
    assert list(packed[1]) == [5, 6, 7]
    assert (packed[-1], packed[1:]) == (second, [first, second])
    with pytest.raises(IndexError):
        packed[3]
    more = Logprobs()
    more.extend(packed)
    more.extend(packed)
    assert [entry is None for entry in more] == [True, False, False] * 2
    assert list(more[4]) == [5, 6, 7]


def test_a_stream_of_deltas_keeps_no_logprobs_it_has_told() -> None:
    entry = TokenLogprobs((7,), (-3.0,), 9)
    written = Completion(0, logprobs=Logprobs())
    output, deltas = RequestOutput("r", None, [1], [written]), Deltas()
    assert written.logprobs is not None
    for _ in range(3):
        written.token_ids.append(7)
        written.logprobs.add(entry)
        (told,) = deltas.take(output).outputs
        assert told.token_ids == [7]
        assert told.logprobs == [{7: Logprob(-3.0, 9)}]
        assert len(written.logprobs) == 0


def test_an_answer_of_many_megabytes_is_sent_while_it_is_made(server: Running) -> None:
    asked = {**MANY, "n": 32, "max_tokens": 60, "logprobs": 20, "prompt_logprobs": 3}
    status, headers, content = server.ask("POST", TEXT, asked)
    assert status == 200
    assert len(content) > 1024**2
    assert "content-length" not in headers
    answer = json.loads(content)
    assert [choice["index"] for choice in answer["choices"]] == list(range(32))
    for choice in answer["choices"]:
        told = choice["logprobs"]
        assert len(told["tokens"]) == len(told["top_logprobs"]) == len(told["text_offset"]) == 60
        assert all(20 <= len(best) <= 21 for best in told["top_logprobs"])
        values = zip(told["tokens"], told["token_logprobs"], told["top_logprobs"], strict=True)
        assert all(best[token] == value for token, value, best in values)
        assert len(choice["prompt_logprobs"]) == 3
    streamed: dict[int, list[float]] = {n: [] for n in range(32)}
    events = server.events(TEXT, {**asked, "stream": True})
    for event in events[:-1]:
        for choice in event["choices"]:
            streamed[choice["index"]] += (choice["logprobs"] or {}).get("token_logprobs", [])
    whole = {c["index"]: c["logprobs"]["token_logprobs"] for c in answer["choices"]}
    assert streamed == {n: pytest.approx(values, abs=1e-4) for n, values in whole.items()}


def test_a_prompts_logprobs_are_told_once_for_all_choices_and_in_pieces(server: Running) -> None:
    prompt = [60 + n % 100 for n in range(200)]  # several chunks
    asked = {"prompt": prompt, "max_tokens": 2, "prompt_logprobs": 20, "n": 3, "temperature": 1.0}
    answer = server.post(TEXT, asked)
    one, *others = [choice["prompt_logprobs"] for choice in answer["choices"]]
    assert len(one) == 200
    assert one[0] is None
    assert all(str(token) in entry for token, entry in zip(prompt[1:], one[1:], strict=True))
    assert others == [one, one]
    events = server.events(TEXT, {**asked, "stream": True})
    told = [
        c["prompt_logprobs"] for e in events[:-1] for c in e["choices"] if "prompt_logprobs" in c
    ]
    assert [len(entries) for entries in told] == [200] * 3
    chat = {"messages": [{"role": "user", "content": "hi"}], "max_tokens": 2, "prompt_logprobs": 2}
    shown = server.post(CHAT, chat)["prompt_logprobs"]
    first = server.events(CHAT, {**chat, "stream": True})[0]
    assert first["prompt_logprobs"] == shown
    assert first["choices"][0]["delta"]["role"] == "assistant"


def test_the_end_of_a_response_repeats_its_logprobs(server: Running) -> None:
    more = {"top_logprobs": 3, "include": ["message.output_text.logprobs"]}
    asked = {"input": "hi", "max_output_tokens": 20, "stream": True, "temperature": 0, **more}
    _, _, content = server.ask("POST", RESPONSES, asked)
    events = [
        json.loads(line.removeprefix("data: "))
        for line in content.decode().split("\n")
        if line.startswith("data: ")
    ]
    assert [event["sequence_number"] for event in events] == list(range(len(events)))
    deltas = [one for e in events if e["type"].endswith("text.delta") for one in e["logprobs"]]
    assert len(deltas) == 20
    done = next(e for e in events if e["type"] == "response.output_text.done")
    assert done["logprobs"] == deltas
    item = events[-1]["response"]["output"][0]
    assert item["content"][0]["logprobs"] == deltas
    assert {len(one["top_logprobs"]) for one in deltas} == {3}


def test_what_would_be_too_much_is_refused_with_the_way_out(server: Running) -> None:
    status, _, content = server.ask("POST", TEXT, {**MANY, "prompt": [[60]] * 64, "n": 64})
    assert (status, json.loads(content)["error"]["param"]) == (400, "n")
    assert b"--max-choices" in content
    asked = {**MANY, "prompt": [[60, n] for n in range(64)], "n": 32, "logprobs": 20}
    status, _, content = server.ask("POST", TEXT, {**asked, "max_tokens": 200})
    assert status == 400
    assert b"stream it" in content
