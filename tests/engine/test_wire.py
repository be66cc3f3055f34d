"""Messages from the server to the engine's process."""

from __future__ import annotations

from dataclasses import replace

import pytest

from tests.tiny import tiny_llm
from twostroke.engine.output_processor import OutputProcessor
from twostroke.engine.wire import Add, decode_to_engine, encode, pack_add, unpack_add
from twostroke.request import EngineRequest, Resumed, SamplingParams, StructuredOutputs


@pytest.fixture(scope="module")
def outputs(tmp_path_factory: pytest.TempPathFactory) -> OutputProcessor:
    return tiny_llm(tmp_path_factory.mktemp("tiny")).engine.output_processor


def over_the_wire(requests: list[EngineRequest]) -> list[EngineRequest]:
    add = decode_to_engine(encode(pack_add(7, requests)))
    assert isinstance(add, Add)
    assert add.first == 7
    return unpack_add(add)


@pytest.mark.parametrize("n", [1, 3])
@pytest.mark.parametrize("prompt_logprobs", [None, 2])
def test_the_continuations_of_a_request_arrive_as_they_were_sent(
    outputs: OutputProcessor, n: int, prompt_logprobs: int | None
) -> None:
    params = SamplingParams(
        n=n, seed=5, stop=("a", "b"), logit_bias={3: -1.5}, allowed_token_ids=[3, 4, 5],
        prompt_logprobs=prompt_logprobs, structured_outputs=StructuredOutputs(choice=["a", "b"]),
    )  # fmt: skip
    asked = EngineRequest("", [4, 5, 6], params, 0, frozenset({2}), ((3,), (4, 5)), salt="s",
                          received_s=1.5, gap_causes=True, session="x", owner=2)  # fmt: skip
    sent = outputs.add(asked)[1]
    resumed = [
        replace(one, resumed=Resumed(tuple(range(number)), 2.5), hand_over=True)
        for number, one in enumerate(sent)
    ]
    assert len(sent) == n
    for requests in (sent, resumed):
        assert over_the_wire(requests) == requests


def test_long_lists_of_a_request_are_sent_and_checked_once(outputs: OutputProcessor) -> None:
    """The engine's loop decodes the message while all streams wait."""
    params = SamplingParams(n=16, allowed_token_ids=list(range(20_000)))
    words = tuple((n, n + 1, n + 2) for n in range(2_000))
    sent = outputs.add(EngineRequest("", (4,) * 1000, params, 0, bad_words_ids=words))[1]
    alone, together = (len(encode(pack_add(0, some))) for some in (sent[:1], sent))
    assert together - alone < 15 * 100
    got = over_the_wire(sent)
    assert len({id(one.params) for one in got}) == 1
    assert len({id(one.bad_words_ids) for one in got}) == 1
