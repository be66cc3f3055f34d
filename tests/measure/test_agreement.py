"""The measuring tools agree with the server's records of the same requests. Tool and server share
one clock here, so the order of events can be checked, and no figure depends on speed."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from bench.trace_replay import read, shared_tokens
from tests.server.running import Running, running
from tests.tiny import tiny_llm
from twostroke.measure.explain.phases import measure_phases
from twostroke.measure.load import workload
from twostroke.measure.load.bench import BenchOutcome, ServeBench, ServeOptions
from twostroke.observe.record import RequestRecord

BLOCK = 4


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Running]:
    folder = tmp_path_factory.mktemp("tiny")
    with running(tiny_llm(folder, kernels="reference", block_size=BLOCK)) as one:
        yield one


@pytest.fixture(autouse=True)
def ids_of_a_small_vocabulary(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(workload, "FIRST_ID", 10)
    monkeypatch.setattr(workload, "LAST_ID", 255)


def bench(server: Running, **options: Any) -> BenchOutcome:
    given = {"random_input_len": 20, "random_output_len": 6, "num_prompts": 12}

    async def work() -> BenchOutcome:
        one = ServeBench(ServeOptions(url=server.url, **(given | options)))
        try:
            await one.connect()
            return await one.run()
        finally:
            one.close()

    return asyncio.run(work())


def records(server: Running) -> dict[str, RequestRecord]:
    """The records of the requests, by the ids of the answers."""
    found = server.client.engine.core.records.requests
    return {one.request_id.rsplit("-", 1)[0]: one for one in found}


@pytest.mark.parametrize("load", [{"max_concurrency": 3}, {"request_rate": 50.0}])
def test_a_request_is_the_one_that_the_server_recorded(
    server: Running, load: dict[str, Any]
) -> None:
    outcome = bench(server, **load)
    known = records(server)
    for sample in outcome.run.samples:
        record = known[sample.request_id]
        assert sample.scheduled_s <= sample.sent_s <= record.received_s
        assert record.first_token_s <= sample.content_s[0]
        # An event cannot come before its token was there, nor one more than there are tokens.
        assert len(sample.content_s) <= len(record.token_s) == sample.output_tokens == 6
        for written_s, seen_s in zip(record.token_s, sample.content_s, strict=False):
            assert written_s <= seen_s
        assert sample.content_s[-1] <= sample.ended_s
        # The last token may have no text of its own.
        assert record.token_s[-1] <= sample.ended_s
        assert sample.prompt_tokens == record.num_prompt == 20
        assert sample.cached_tokens == record.num_cached
        # The client's figures are never below the recorded figures.
        assert sample.ttft_s >= record.ttft_s
        last_s = record.token_s[len(sample.content_s) - 1]
        assert sample.e2el_s >= last_s - record.received_s
        assert sample.tpot_s == pytest.approx(sum(sample.itls_s) / 5)


def test_throughput_counts_the_tokens_that_the_steps_wrote(server: Running) -> None:
    core = server.client.engine.core
    first = core.records.steps[-1].step if core.records.steps else -1
    outcome = bench(server, max_concurrency=4)
    steps = [one for one in core.records.steps if one.step > first]
    known = [records(server)[sample.request_id] for sample in outcome.run.samples]
    found = outcome.result
    tokens = sum(len(record.token_s) for record in known)
    assert found["total_output_tokens"] == tokens == found["server_says"]["output_tokens"] == 72
    assert sum(step.num_written for step in steps) == tokens + 6  # and the warm-up's
    began = min(record.received_s for record in known)
    assert found["output_throughput"] <= tokens / (max(r.token_s[-1] for r in known) - began)
    assert found["total_input_tokens"] == 240 == found["server_says"]["prompt_tokens"]


TRACE = [
    {"timestamp": 1000, "input_length": 1200, "output_length": 50, "hash_ids": [1, 2, 3]},
    {"timestamp": 1010, "input_length": 1100, "output_length": 60, "hash_ids": [1, 2, 4]},
    {"timestamp": 1010, "input_length": 1200, "output_length": 10, "hash_ids": [1, 2, 3]},
    {"timestamp": 1040, "input_length": 700, "output_length": 10, "hash_ids": [1, 5]},
    {"timestamp": 1090, "input_length": 2048, "output_length": 4, "hash_ids": [6, 7, 8, 9]},
    {"timestamp": 1100, "input_length": 2500, "output_length": 4, "hash_ids": [6, 7, 8, 9, 10]},
]


def test_a_replayed_trace_arrives_as_the_file_says(server: Running, tmp_path: Path) -> None:
    path = tmp_path / "trace.jsonl"
    path.write_text("\n".join(map(json.dumps, TRACE)) + "\n")
    shrink = 64.0  # 512 tokens of the file are two of the server's blocks
    options = {"dataset_name": "trace", "dataset_path": str(path), "trace_shrink": shrink}
    # One at a time, so that each finds in the cache what came before it.
    outcome = bench(server, **options, trace_speed=2.0, max_concurrency=1)
    samples, known = outcome.run.samples, records(server)
    got = [known[sample.request_id] for sample in samples]
    lines = read(str(path), 600.0)
    due = [sample.scheduled_s - outcome.run.started_s for sample in samples]
    assert due == pytest.approx([one.at_s / 2 for one in lines])
    assert due == pytest.approx([0.0, 0.005, 0.005, 0.02, 0.045, 0.05])
    assert [record.num_prompt for record in got] == [19, 17, 19, 11, 32, 39]
    assert [len(record.token_s) for record in got] == [1, 1, 1, 1, 1, 1]
    expected = shared_tokens(lines, shrink, BLOCK)
    assert expected == [0, 16, 16, 8, 0, 32]
    assert [record.num_cached for record in got] == expected


def test_phases_counts_the_steps_of_its_own_requests(server: Running) -> None:
    bench(server)  # others, a moment before
    found = asyncio.run(measure_phases(server.url, prompt_tokens=24, output_tokens=8, repeat=2))
    assert found.evidence == "step records"
    assert (found.steps["prefill_steps"], found.steps["decode_steps"]) == (2, 14)
