"""The timeline is in the trace-event format, and says what the records say."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.server.running import Running, running
from tests.tiny import tiny_llm
from twostroke.cli import main
from twostroke.measure.explain.phases import Phases
from twostroke.measure.explain.timeline import timeline

NEEDED = {  # of the trace-event format, by kind of event
    "X": {"name", "pid", "tid", "ts", "dur"},
    "C": {"name", "pid", "ts", "args"},
    "M": {"name", "pid", "args"},
    "i": {"name", "pid", "tid", "ts", "s"},
    "s": {"name", "cat", "id", "pid", "tid", "ts"},
    "f": {"name", "cat", "id", "pid", "tid", "ts", "bp"},
}


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Running]:
    with running(tiny_llm(tmp_path_factory.mktemp("tiny") / "tiny")) as one:
        for n in range(4):
            one.post(
                "/v1/completions", {"prompt": [40 + n] * 20, "max_tokens": 6, "ignore_eos": True}
            )
        yield one


def records(server: Running) -> Any:
    status, _, body = server.ask("GET", "/records?seconds=600")
    assert status == 200
    return json.loads(body)


def test_records_are_what_the_engine_kept(server: Running) -> None:
    found = records(server)
    assert len(found["requests"]) == 4
    for request in found["requests"]:
        assert request["num_prompt"] == 20
        assert len(request["token_s"]) == len(request["token_step"]) == 6
    assert sum(step["prefill"]["tokens"] for step in found["steps"]) == 80
    assert sum(step["decode"]["tokens"] for step in found["steps"]) == 20
    assert server.ask("GET", "/records?seconds=x")[0] == 400
    assert server.ask("GET", "/records?seconds=601")[0] == 400


def test_every_event_is_one_of_the_format(server: Running) -> None:
    found = timeline(records(server))
    flows: dict[int, list[dict[str, Any]]] = {}
    for event in found["traceEvents"]:
        assert NEEDED[event["ph"]] <= event.keys(), event
        assert event.get("ts", 0.0) >= 0.0
        assert event.get("dur", 0.0) >= 0.0
        if event["ph"] in "sf":
            flows.setdefault(event["id"], []).append(event)
        if event["ph"] == "C":
            assert all(isinstance(value, int | float) for value in event["args"].values())
    assert json.loads(json.dumps(found)) == found
    assert len(flows) == 24  # each of four requests by one chunk and five decode steps
    for begin, end in flows.values():
        assert (begin["ph"], end["ph"]) == ("s", "f")
        assert begin["ts"] <= end["ts"]
    counters = {event["name"] for event in found["traceEvents"] if event["ph"] == "C"}
    assert counters == {"tokens in a step", "requests", "KV tokens"}


def test_slices_lie_where_the_steps_did(server: Running) -> None:
    known = records(server)
    found = timeline(known)
    slices = [event for event in found["traceEvents"] if event["ph"] == "X"]
    decode = [event for event in slices if event["pid"] == 1 and event["tid"] == 3]
    assert sum(event["args"]["tokens"] for event in decode) == 20
    phases = [event["name"] for event in slices if event["pid"] == 2]
    assert phases.count("prefill") == phases.count("decode") == 4
    begin = found["otherData"]["begin_s"]
    last = known["steps"][-1]
    ends = [event["ts"] + event["dur"] for event in decode]
    assert max(ends) == pytest.approx(1e6 * (last["committed_s"] - begin), abs=1.0)


def test_the_command_writes_a_file(
    server: Running, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "timeline.json"
    assert main(["trace", server.url, "--seconds", "600", "-o", str(path)]) == 0
    assert json.loads(path.read_text())["traceEvents"]
    assert "ui.perfetto.dev" in capsys.readouterr().out
    assert main(["trace", server.url, "--seconds", "0"]) == 1


def test_phases_of_a_real_server_have_all_the_evidence(
    server: Running, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    # Random ids as large vocabularies have them are not in this one's 300.
    monkeypatch.setattr("twostroke.measure.load.workload.FIRST_ID", 10)
    monkeypatch.setattr("twostroke.measure.load.workload.LAST_ID", 299)
    words = ["phases", server.url, "--prompt-tokens", "64", "--output-tokens", "8", "--json"]
    assert main(words) == 0
    found = json.loads(capsys.readouterr().out)
    assert found["evidence"] == "step records"
    assert found["verdict"] in ("slow to start", "slow to stream")
    assert found["prompt_tokens"] == 64
    assert found["output_tokens"] == 8
    parts = found["queue_ms"] + found["prefill_ms"] + found["outside_ms"]
    assert parts == pytest.approx(found["ttft_ms"], abs=0.01)
    assert found["kv"]["reserved"] == 4096
    assert main(words[:-1]) == 0
    assert "evidence: step records (level 4 of 4)" in capsys.readouterr().out


def test_the_client_and_the_engine_agree(server: Running, monkeypatch: pytest.MonkeyPatch) -> None:
    """TTFT and TPOT of `bench serve` beside those of the request records: the client's are
    longer by HTTP's part, never shorter."""
    import asyncio

    from twostroke.measure.load.bench import ServeBench, ServeOptions

    monkeypatch.setattr("twostroke.measure.load.workload.FIRST_ID", 10)
    monkeypatch.setattr("twostroke.measure.load.workload.LAST_ID", 299)

    async def work() -> Any:
        options = ServeOptions(
            url=server.url,
            num_prompts=8,
            random_input_len=30,
            random_output_len=10,
            max_concurrency=2,
            metric_percentiles=(50.0,),
        )
        one = ServeBench(options)
        await one.connect()
        return await one.run()

    outcome = asyncio.run(work())
    known = records(server)["requests"][-8:]
    assert outcome.result["total_output_tokens"] == 80
    assert sum(len(one["token_s"]) for one in known) == 80
    theirs = sorted(one["first_token_s"] - one["received_s"] for one in known)
    ours = sorted(sample.ttft_s for sample in outcome.run.samples)
    for client_s, engine_s in zip(ours, theirs, strict=True):
        assert client_s >= engine_s
    assert outcome.result["server_says"]["output_tokens"] == 80


def test_the_verdict_is_where_the_time_went() -> None:
    from twostroke.measure.load.definitions import Sample

    server = {"kind": "unknown", "url": ""}
    start = Phases([Sample(0.0, 0.0, [3.0, 3.5, 4.0], 4.0, 100, 3)], server, "m")
    assert start.sentence().startswith("Slow to start: 75% of 4.00 s passed before the first token")
    stream = Phases([Sample(0.0, 0.0, [1.0, 2.5, 4.0], 4.0, 100, 3)], server, "m")
    assert (
        stream.sentence()
        == "Slow to stream: 75% of 4.00 s went into the later tokens, 1.50 s a token."
    )
