"""The official `openai` client against a real socket: what its users do must work unchanged."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import openai
import pytest
from openai.types.chat import ChatCompletion, ChatCompletionChunk

from tests.server.running import Running, running
from tests.support import default_model_path
from tests.tiny import tiny_llm
from twostroke import LLM

HELLO: Any = [{"role": "user", "content": "the quick fox"}]
GREEDY: Any = {"temperature": 0, "max_tokens": 12, "extra_body": {"ignore_eos": True}}


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Running]:
    llm = tiny_llm(tmp_path_factory.mktemp("tiny") / "tiny")
    with running(llm, served_model_names=("tiny", "also-tiny")) as server:
        yield server


@pytest.fixture(scope="module")
def client(server: Running) -> openai.OpenAI:
    return openai.OpenAI(base_url=f"{server.url}/v1", api_key="none", max_retries=0)


def test_a_chat_is_answered_with_every_field_the_client_knows(client: openai.OpenAI) -> None:
    answer = client.chat.completions.create(model="tiny", messages=HELLO, **GREEDY)
    assert isinstance(answer, ChatCompletion)
    assert answer.object == "chat.completion"
    assert answer.id.startswith("chatcmpl-")
    assert answer.model == "tiny"
    assert answer.system_fingerprint
    (choice,) = answer.choices
    assert choice.message.role == "assistant"
    assert choice.message.content
    assert choice.finish_reason == "length"
    assert answer.usage
    assert answer.usage.completion_tokens == 12
    assert answer.usage.total_tokens == answer.usage.prompt_tokens + 12
    assert answer.usage.prompt_tokens_details
    ChatCompletion.model_validate(answer.model_dump(), strict=True)


def test_a_streamed_chat_says_the_same_in_one_event_a_token(client: openai.OpenAI) -> None:
    whole = client.chat.completions.create(model="tiny", messages=HELLO, **GREEDY)
    chunks = list(
        client.chat.completions.create(
            model="tiny",
            messages=HELLO,
            stream=True,
            stream_options={"include_usage": True},
            **GREEDY,
        )
    )
    assert all(isinstance(chunk, ChatCompletionChunk) for chunk in chunks)
    first, *middle, last = chunks
    assert first.choices[0].delta.role == "assistant"
    assert len(middle) == 12
    assert "".join(c.choices[0].delta.content or "" for c in middle) == (
        whole.choices[0].message.content
    )
    assert [c.choices[0].finish_reason for c in middle] == [None] * 11 + ["length"]
    assert last.choices == []
    assert last.usage
    assert whole.usage
    assert last.usage.completion_tokens == whole.usage.completion_tokens
    assert last.usage.prompt_tokens == whole.usage.prompt_tokens
    assert len({chunk.id for chunk in chunks}) == 1


def test_a_repeated_prompt_counts_as_cached(client: openai.OpenAI) -> None:
    ask: Any = {"model": "tiny", "prompt": "the lazy dog " * 12, "max_tokens": 1}
    client.completions.create(**ask)
    usage = client.completions.create(**ask).usage
    assert usage
    assert usage.prompt_tokens_details
    assert usage.prompt_tokens_details.cached_tokens
    assert usage.prompt_tokens_details.cached_tokens % 16 == 0
    assert usage.prompt_tokens_details.cached_tokens < usage.prompt_tokens


def test_usage_in_every_chunk_on_request(client: openai.OpenAI) -> None:
    options: Any = {"include_usage": True, "continuous_usage_stats": True}
    chunks = list(
        client.chat.completions.create(
            model="tiny", messages=HELLO, stream=True, stream_options=options, **GREEDY
        )
    )
    counted = [chunk.usage.completion_tokens for chunk in chunks if chunk.usage]
    assert len(counted) == len(chunks)
    assert counted[-1] == 12
    assert counted == sorted(counted)


def test_completions_of_several_prompts_n_times_each(client: openai.OpenAI) -> None:
    answer = client.completions.create(
        model="tiny", prompt=["the quick", "a small"], n=2, seed=5, max_tokens=6
    )
    assert [choice.index for choice in answer.choices] == [0, 1, 2, 3]
    texts: dict[int, str] = dict.fromkeys(range(4), "")
    for chunk in client.completions.create(
        model="tiny", prompt=["the quick", "a small"], n=2, seed=5, max_tokens=6, stream=True
    ):
        for choice in chunk.choices:
            texts[choice.index] += choice.text
    assert [texts[n] for n in range(4)] == [choice.text for choice in answer.choices]
    assert len(set(texts.values())) == 4


def test_n_chats_stream_beside_each_other(client: openai.OpenAI) -> None:
    texts = ["", ""]
    ends = []
    for chunk in client.chat.completions.create(
        model="tiny", messages=HELLO, n=2, seed=3, max_tokens=8, stream=True
    ):
        choice = chunk.choices[0]
        texts[choice.index] += choice.delta.content or ""
        if choice.finish_reason:
            ends.append(choice.index)
    whole = client.chat.completions.create(model="tiny", messages=HELLO, n=2, seed=3, max_tokens=8)
    assert texts == [choice.message.content for choice in whole.choices]
    assert sorted(ends) == [0, 1]


def test_a_seed_makes_an_answer_repeat(client: openai.OpenAI) -> None:
    def ask(seed: int) -> str | None:
        answer = client.chat.completions.create(
            model="tiny", messages=HELLO, seed=seed, temperature=1.5, max_tokens=16
        )
        return answer.choices[0].message.content

    assert ask(7) == ask(7) != ask(8)


def test_chat_logprobs_have_bytes_and_alternatives(client: openai.OpenAI) -> None:
    answer = client.chat.completions.create(
        model="tiny", messages=HELLO, logprobs=True, top_logprobs=3, **GREEDY
    )
    logprobs = answer.choices[0].logprobs
    assert logprobs
    assert logprobs.content
    assert len(logprobs.content) == 12
    for token in logprobs.content:
        assert token.bytes
        assert len(token.top_logprobs) == 3
        assert token.logprob == token.top_logprobs[0].logprob <= 0  # greedy takes the best


def test_completion_logprobs_of_prompt_and_text(client: openai.OpenAI) -> None:
    answer = client.completions.create(
        model="tiny", prompt="the quick", echo=True, logprobs=2, temperature=0, max_tokens=3
    )
    logprobs = answer.choices[0].logprobs
    assert answer.choices[0].text.startswith("the quick")
    assert logprobs
    assert logprobs.tokens
    assert logprobs.token_logprobs
    assert logprobs.top_logprobs
    assert logprobs.token_logprobs[0] is None
    assert answer.usage
    assert len(logprobs.tokens) == len(logprobs.top_logprobs) == answer.usage.total_tokens
    scored = client.completions.create(
        model="tiny", prompt="the quick", echo=True, logprobs=2, temperature=0, max_tokens=0
    )
    assert scored.choices[0].text == "the quick"
    assert scored.choices[0].logprobs
    count = answer.usage.prompt_tokens
    assert scored.choices[0].logprobs.token_logprobs == logprobs.token_logprobs[:count]


def test_a_stop_string_ends_the_text_before_it(client: openai.OpenAI) -> None:
    whole = client.completions.create(model="tiny", prompt="a reader", **GREEDY)
    text = whole.choices[0].text
    stop = text[len(text) // 2 :][:2]
    cut = client.completions.create(model="tiny", prompt="a reader", stop=[stop], **GREEDY)
    assert cut.choices[0].text == text[: text.index(stop)]
    assert cut.choices[0].finish_reason == "stop"


def test_the_models_are_listed(client: openai.OpenAI) -> None:
    assert [model.id for model in client.models.list()] == ["tiny", "also-tiny"]


def test_errors_are_the_clients_own_exceptions(client: openai.OpenAI) -> None:
    with pytest.raises(openai.NotFoundError) as missing:
        client.chat.completions.create(model="gpt-9", messages=HELLO)
    assert missing.value.code == "model_not_found"
    with pytest.raises(openai.BadRequestError, match="temperature must be"):
        client.chat.completions.create(model="tiny", messages=HELLO, temperature=-1)
    with pytest.raises(openai.BadRequestError, match="use_beam_search is not supported"):
        client.completions.create(model="tiny", prompt="a", extra_body={"use_beam_search": True})
    with pytest.raises(openai.BadRequestError, match="at most 255 tokens are read") as long:
        client.completions.create(model="tiny", prompt=[5] * 300)
    assert long.value.code == "context_length_exceeded"
    with pytest.raises(openai.InternalServerError, match="embeddings are not supported"):
        client.embeddings.create(model="tiny", input="a")


def test_responses_whole_and_streamed(client: openai.OpenAI) -> None:
    ask: Any = {"model": "tiny", "input": "the fox", "temperature": 0, "max_output_tokens": 6}
    answer = client.responses.create(instructions="be brief", **ask)
    assert answer.output_text
    assert answer.status == "incomplete"
    assert answer.incomplete_details
    assert answer.incomplete_details.reason == "max_output_tokens"
    assert answer.usage
    assert answer.usage.output_tokens == 6
    events = list(client.responses.create(instructions="be brief", stream=True, **ask))
    assert [event.sequence_number for event in events] == list(range(len(events)))
    kinds = [event.type for event in events]
    assert kinds[:4] == [
        "response.created",
        "response.in_progress",
        "response.output_item.added",
        "response.content_part.added",
    ]
    deltas = [event.delta for event in events if event.type == "response.output_text.delta"]
    assert "".join(deltas) == answer.output_text
    last = events[-1]
    assert last.type == "response.incomplete"
    assert last.response.output_text == answer.output_text
    spoken: Any = [{"role": "user", "content": [{"type": "input_text", "text": "the fox"}]}]
    same = client.responses.create(instructions="be brief", **{**ask, "input": spoken})
    assert same.output_text == answer.output_text


def test_the_default_model_answers_a_question() -> None:
    llm = LLM(str(default_model_path()), max_model_len=512)
    with running(llm) as server:
        client = openai.OpenAI(base_url=f"{server.url}/v1", api_key="none", max_retries=0)
        model = client.models.list().data[0].id
        asked: Any = [{"role": "user", "content": "What is the capital of France? One word."}]
        answer = client.chat.completions.create(
            model=model, messages=asked, temperature=0, max_tokens=12
        )
        assert "Paris" in (answer.choices[0].message.content or "")
        text = "".join(
            chunk.choices[0].delta.content or ""
            for chunk in client.chat.completions.create(
                model=model, messages=asked, temperature=0, max_tokens=12, stream=True
            )
        )
        assert text == answer.choices[0].message.content


def test_the_server_names_its_models_after_the_folder(tmp_path: Path) -> None:
    with running(tiny_llm(tmp_path / "small-one")) as server:
        (model,) = openai.OpenAI(base_url=f"{server.url}/v1", api_key="x").models.list().data
        assert model.id == "small-one"
