"""`--enable-per-request-metrics`: vLLM's `metrics` in answers; `--reasoning-effort-map`."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from tests.server.running import running
from tests.tiny import tiny_llm
from twostroke import LLM
from twostroke.serve.generation.conversation import ConversationGeneration
from twostroke.serve.settings import ServeSettings

BODY: dict[str, Any] = {"prompt": [5, 6, 7], "max_tokens": 4, "ignore_eos": True}
FIELDS = {
    "time_to_first_token_ms",
    "generation_time_ms",
    "queue_time_ms",
    "mean_itl_ms",
    "tokens_per_second",
    "speculative_decoding",
}


@pytest.fixture(scope="module")
def llm(tmp_path_factory: pytest.TempPathFactory) -> LLM:
    return tiny_llm(tmp_path_factory.mktemp("tiny"))


def test_answers_have_metrics_where_the_server_is_told_to(llm: LLM) -> None:
    usage = {"stream": True, "stream_options": {"include_usage": True}}
    with running(llm, enable_per_request_metrics=True) as server:
        whole = server.post("/v1/completions", BODY)
        metrics, times = whole["metrics"], whole["timings"]
        assert metrics.keys() == FIELDS
        assert metrics["generation_time_ms"] == pytest.approx(times["decode_ms"])
        assert metrics["time_to_first_token_ms"] == pytest.approx(times["prefill_ms"])
        assert metrics["mean_itl_ms"] == pytest.approx(times["decode_ms"] / 3)
        total_ms = times["prefill_ms"] + times["decode_ms"]
        assert metrics["tokens_per_second"] == pytest.approx(4e3 / total_ms)
        *_, last, done = server.events("/v1/completions", {**BODY, **usage})
        assert done == "[DONE]"
        assert last["metrics"].keys() == FIELDS - {"speculative_decoding"}
        *_, last, done = server.events("/v1/completions", {**BODY, **usage, "max_tokens": 1})
        assert last["metrics"].keys() == FIELDS - {"speculative_decoding", "mean_itl_ms"}
        *_, last, done = server.events("/v1/completions", {**BODY, **usage, "n": 2})
        assert "metrics" not in last
        several = server.post("/v1/completions", {**BODY, "n": 2})
        assert several["metrics"] is None, "the times of several texts belong to no one text"
    with running(llm) as server:
        assert "metrics" not in server.post("/v1/completions", BODY)
        assert "metrics" not in server.events("/v1/completions", {**BODY, **usage})[-2]


def test_the_template_gets_the_effort_that_the_map_names() -> None:
    class Prompts:
        def render(self, messages: Any, chat: Any, **variables: Any) -> Any:
            return variables

    class Service:
        settings = ServeSettings(reasoning_effort_map={"xhigh": "high"})
        prompts = Prompts()

    class Chat:
        messages: Any = ()
        reasoning_effort = "xhigh"

    conversation: Any = SimpleNamespace(service=Service(), chat=Chat())
    assert ConversationGeneration.render(conversation) == {"reasoning_effort": "high"}
    Chat.reasoning_effort = "low"
    assert ConversationGeneration.render(conversation) == {"reasoning_effort": "low"}
