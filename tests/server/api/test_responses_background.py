"""Background responses, and their state after the death of an engine."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import openai
import pytest

from tests.server.test_load import PATIENCE_S, Server, served

LIMITS: Any = {"max_num_seqs": 16, "max_num_batched_tokens": 512, "max_model_len": 4096}
SHORT: Any = {"model": "tiny", "input": "the fox", "max_output_tokens": 12}
LONG: Any = {**SHORT, "max_output_tokens": 4000}  # 40 s at least: it does not end meanwhile


@pytest.fixture(scope="module")
def server(folder: Path) -> Iterator[Server]:
    with served(folder, step_s=0.01, **LIMITS) as server:
        yield server


@pytest.fixture(scope="module")
def client(server: Server) -> Iterator[openai.OpenAI]:
    with client_of(server) as client:
        yield client


@pytest.fixture(autouse=True)
def nothing_left(server: Server, client: openai.OpenAI) -> Iterator[None]:
    yield
    server.until(lambda seen: not (seen["open_streams"] or seen["states"] or seen["open"]))


def client_of(server: Server) -> openai.OpenAI:
    url = f"http://127.0.0.1:{server.port}/v1"
    return openai.OpenAI(base_url=url, api_key="none", max_retries=0)


def until(client: openai.OpenAI, name: str, *statuses: str) -> Any:
    end = time.monotonic() + PATIENCE_S
    while (answer := client.responses.retrieve(name)).status not in statuses:
        assert time.monotonic() < end, f"it is {answer.status}"
        time.sleep(0.01)
    return answer


def test_a_background_response_is_queued_runs_and_ends_as_any_other(
    server: Server, client: openai.OpenAI
) -> None:
    with server.engine_held():
        queued = client.responses.create(background=True, **LONG)
        assert (queued.status, queued.background, queued.output) == ("queued", True, [])
        assert client.responses.retrieve(queued.id).status == "queued"
        with pytest.raises(openai.BadRequestError, match="is queued"):
            client.responses.create(previous_response_id=queued.id, **SHORT)
    assert until(client, queued.id, "in_progress").usage is None
    client.responses.delete(queued.id)  # which also ends it
    with pytest.raises(openai.NotFoundError):
        client.responses.retrieve(queued.id)

    asked = client.responses.create(background=True, **SHORT)
    done = until(client, asked.id, "incomplete")
    whole = client.responses.create(**SHORT)
    assert done.output_text == whole.output_text != ""
    assert done.usage
    assert done.usage.output_tokens == 12
    assert done.incomplete_details
    more = client.responses.create(previous_response_id=asked.id, **SHORT)
    assert more.usage
    assert more.usage.input_tokens > done.usage.total_tokens


def test_a_cancelled_response_stops_and_keeps_what_was_written(client: openai.OpenAI) -> None:
    asked = client.responses.create(background=True, **LONG)
    until(client, asked.id, "in_progress")
    cancelled = client.responses.cancel(asked.id)
    assert cancelled.status == "cancelled"
    assert cancelled.output_text
    assert cancelled.output[0].status == "incomplete"
    assert client.responses.cancel(asked.id).to_dict() == cancelled.to_dict()
    assert client.responses.retrieve(asked.id).to_dict() == cancelled.to_dict()
    whole = client.responses.create(**SHORT)
    with pytest.raises(openai.BadRequestError, match="background can be cancelled"):
        client.responses.cancel(whole.id)
    with pytest.raises(openai.BadRequestError, match="both background and stream"):
        client.responses.retrieve(asked.id, stream=True)


def test_a_background_stream_goes_on_without_its_client_and_is_followed_again(
    client: openai.OpenAI,
) -> None:
    ask: Any = {**SHORT, "max_output_tokens": 60}
    stream = client.responses.create(background=True, stream=True, **ask)
    begin = [next(stream) for _ in range(5)]
    stream.close()
    assert [event.type for event in begin[:3]] == [
        "response.created",
        "response.queued",
        "response.in_progress",
    ]
    created: Any = begin[0]
    name = created.response.id
    rest = list(client.responses.retrieve(name, stream=True, starting_after=4))
    events = begin + rest
    assert [event.sequence_number for event in events] == list(range(len(events)))
    last: Any = events[-1]
    assert last.type == "response.incomplete"
    deltas = [e.delta for e in events if e.type == "response.output_text.delta"]
    assert "".join(deltas) == last.response.output_text
    assert last.response.output_text == client.responses.create(**ask).output_text
    # All of it once more, now that it has ended.
    again = list(client.responses.retrieve(name, stream=True))
    assert [e.to_dict() for e in again] == [e.to_dict() for e in events]
    assert client.responses.retrieve(name).to_dict() == last.response.to_dict()


def test_whoever_follows_a_cancelled_stream_is_told(client: openai.OpenAI) -> None:
    stream = client.responses.create(background=True, stream=True, **LONG)
    first: Any = next(stream)
    client.responses.cancel(first.response.id)
    last: Any = list(stream)[-1]
    assert last.type == "response.cancelled"
    assert last.response["status"] == "cancelled"  # an event that the client does not know


def test_stored_answers_outlive_an_engine_and_begun_ones_fail_with_the_reason(
    server: Server, client: openai.OpenAI
) -> None:
    kept = client.responses.create(**SHORT)
    begun = client.responses.create(background=True, **LONG)
    stream = client.responses.create(background=True, stream=True, **LONG)
    first: Any = next(stream)
    for name in (begun.id, first.response.id):
        until(client, name, "in_progress")
    with server.engine_held():
        waits = client.responses.create(background=True, **SHORT)
        os.kill(server.look()["pid"], signal.SIGKILL)
        failed = until(client, begun.id, "failed")
    assert failed.error
    assert failed.error.code == "server_error"
    assert "engine failed" in failed.error.message
    assert failed.output_text  # as far as it came
    error, last = list(stream)[-2:]
    assert (error.type, last.type) == ("error", "response.failed")
    # Of the other nothing had been written: the next engine does it.
    assert until(client, waits.id, "incomplete").output_text == kept.output_text
    assert client.responses.retrieve(kept.id).to_dict() == kept.to_dict()
    assert client.responses.create(previous_response_id=kept.id, **SHORT).output_text
