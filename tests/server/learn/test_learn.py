"""The routes of /learn: experiments act only on requests of their own, and their results equal the
records."""

from __future__ import annotations

import json
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.server.running import Running, running
from tests.tiny import MAX_LEN, tiny_llm
from twostroke.config import EngineConfig
from twostroke.kernels import cpu
from twostroke.sched.updates import Update

RUN = "/learn/run"


@pytest.fixture
def server(folder: Path) -> Iterator[Running]:
    with running(tiny_llm(folder), engine=EngineConfig(model=str(folder))) as server:
        yield server


def facts(server: Running) -> dict[str, Any]:
    status, _, body = server.ask("GET", "/learn/facts")
    assert status == 200
    found: dict[str, Any] = json.loads(body)
    return found


def refused(server: Running, path: str, body: Any, status: int) -> str:
    given, _, content = server.ask("POST", path, body)
    assert given == status, content
    return str(json.loads(content)["error"]["message"])


def test_the_facts_are_the_engines(server: Running) -> None:
    found = facts(server)
    core = server.client.engine.core
    assert found["figures"]["flops_per_token"] == core.cost.flops_per_token
    assert found["figures"]["kv_bytes_per_token"] == core.cost.kv_bytes_per_token
    assert found["figures"]["layers"] == 2
    assert found["kv"]["reserved"] == found["kv_tokens"]
    assert not found["own_engines"]
    assert found["limits"]["prompt_tokens"] == MAX_LEN - 128
    assert found["limits"]["text_tokens"] == min(1536, MAX_LEN - 32)


def test_a_run_tells_what_the_records_say(server: Running) -> None:
    text = "the quick brown fox jumps over the lazy dog and the dog sleeps " * 2
    body = {"experiment": "text", "text": text, "max_tokens": 6}
    first, second = (server.post(RUN, body) for _ in range(2))
    records = {one.request_id: one for one in server.client.engine.core.records.requests}
    for run in (first, second):
        (request,) = run["arms"][0]["requests"]
        record = records[request["request_id"]]
        assert request["token_s"] == list(record.token_s)
        assert request["num_prompt"] == len(run["tokens"])
        assert "".join(one["text"] for one in run["tokens"]).endswith("sleeps ")
        steps = {one["step"]: one for one in run["arms"][0]["steps"]}
        assert set(request["token_step"]) <= steps.keys()
        assert len(request["candidates"]) == len(request["output_tokens"])
        best = request["candidates"][0]
        assert best["ids"][0] == best["chosen"] == request["output_tokens"][0]
        assert str(best["ids"][3]) in run["vocabulary"]
    assert first["arms"][0]["requests"][0]["num_cached"] == 0
    assert second["arms"][0]["requests"][0]["num_cached"] > 0
    outputs = [run["arms"][0]["requests"][0]["output_tokens"] for run in (first, second)]
    assert outputs[0] == outputs[1]


@pytest.mark.parametrize("experiment", ["batch", "context", "prefix", "full_cache", "stall"])
def test_an_experiment_ends_and_leaves_nothing_behind(
    server: Running, experiment: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    if experiment == "stall":  # a visitor comes while a stream decodes, which must last
        core = server.client.engine.core
        run_step = core.step

        def slow_step() -> list[Update]:
            time.sleep(0.02)
            return run_step()

        monkeypatch.setattr(core, "step", slow_step)
    found = server.post(RUN, {"experiment": experiment})
    assert [arm["name"] for arm in found["arms"]] == ["this server"]
    requests = found["arms"][0]["requests"]
    assert all(one["finish_reason"] == "length" for one in requests)
    if experiment == "batch":
        rows = {one["decode"]["rows"] for one in found["arms"][0]["steps"]}
        assert {1, 2, 4, 8, 16} <= rows
    if experiment == "prefix":
        assert requests[1]["num_cached"] > 0 == requests[0]["num_cached"]
    if experiment == "stall":
        you, visitor = requests
        assert visitor["received_s"] >= you["token_s"][23]
        assert visitor["received_s"] < you["token_s"][-1]
    server.assert_idle()


def test_a_forecast_needs_steps_and_then_plays_the_schedule(server: Running) -> None:
    settings = {"prompt_tokens": 100, "output_tokens": 10, "streams": 2}
    assert server.post("/learn/predict", settings) == {"prediction": None}
    server.post(RUN, {"experiment": "calibration"})
    found = server.post("/learn/predict", settings)["prediction"]
    assert found["kv_tokens"] == 2 * 109
    assert found["steps"][0]["prefill_tokens"] == 200
    assert [one["decode_rows"] for one in found["steps"]] == [0] + [2] * 9
    times = [one["seconds"] for one in found["steps"]]
    assert found["total_s"] == pytest.approx(found["start_s"] + sum(times) + 9 * found["host_s"])
    assert found["ttft_s"] == pytest.approx(found["start_s"] + times[0])


def test_one_experiment_runs_at_a_time_and_a_client_that_leaves_ends_nothing_else(
    server: Running,
) -> None:
    answers: list[int] = []

    def ask() -> None:
        answers.append(server.ask("POST", RUN, {"experiment": "calibration"})[0])

    threads = [threading.Thread(target=ask) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert set(answers) <= {200, 429}
    assert 200 in answers
    assert server.post(RUN, {"experiment": "prefix"})["experiment"] == "prefix"


def test_attention_is_the_chosen_heads(server: Running) -> None:
    found = server.post("/learn/attention", {"tokens": [5, 6, 7, 8], "layer": 1, "head": 3})
    assert found["heads"] == [4, 4]
    assert [len(row) for row in found["rows"]] == [1, 2, 3, 4]
    assert all(sum(row) == pytest.approx(1, abs=1e-3) for row in found["rows"])
    other = server.post("/learn/attention", {"tokens": [5, 6, 7, 8], "layer": 1, "head": 2})
    assert other["rows"] != found["rows"]


def test_what_cannot_run_is_refused_with_its_reason(server: Running) -> None:
    attention = "/learn/attention"
    assert "layers" not in refused(server, RUN, {"experiment": "everything"}, 400)
    assert "tokens" in refused(server, RUN, {"experiment": "text", "text": "fox " * 300}, 400)
    assert "0 to 1" in refused(server, attention, {"tokens": [5], "layer": 2}, 400)
    assert "0 to 3" in refused(server, attention, {"tokens": [5], "head": 4}, 400)
    assert "0 to 299" in refused(server, attention, {"tokens": [300]}, 400)
    refused(server, attention, {"tokens": [5] * 65}, 400)
    refused(server, RUN, {"experiment": "predict", "streams": 17}, 400)
    refused(server, RUN, {"experiment": "predict", "prompt_tokens": 2048}, 400)
    assert server.post(RUN, {"experiment": "prefix"})["arms"]


def test_the_key_is_needed(folder: Path) -> None:
    with running(tiny_llm(folder), api_keys=("sesame",)) as server:
        assert server.ask("GET", "/learn")[0] == 200
        assert server.ask("GET", "/learn/facts")[0] == 401
        for path in (RUN, "/learn/predict", "/learn/attention"):
            assert server.ask("POST", path, {})[0] == 401


def test_without_pages_there_are_no_routes_for_them(folder: Path) -> None:
    with running(tiny_llm(folder), ui=False) as server:
        assert server.ask("POST", RUN, {"experiment": "prefix"})[0] == 404
        assert server.ask("GET", "/learn")[0] == 404


@pytest.mark.full
@pytest.mark.skipif(not cpu.available(), reason="needs the native kernels")
def test_arms_with_other_settings_have_engines_of_their_own(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("tests.server.running.PATIENCE_S", 240)  # engines start, one by one
    config = EngineConfig(model=str(folder))
    with running(tiny_llm(folder), engine=config, learn_engines=True) as server:
        before = len(server.client.engine.core.records.requests)
        found = server.post(RUN, {"experiment": "full_cache"})
        small, large = found["arms"]
        assert small["kv_tokens"] == 44 * 16
        assert any(one["preempted"] for one in small["requests"])
        assert not any(one["preempted"] for one in large["requests"])
        texts = [[one["output_tokens"] for one in arm["requests"]] for arm in (small, large)]
        assert texts[0] == texts[1], "a preempted stream goes on as if nothing had happened"
        assert len(server.client.engine.core.records.requests) == before
        assert facts(server)["own_engines"]
