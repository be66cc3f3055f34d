"""`why`: the ledger sums to the whole, and names who took the time."""

from __future__ import annotations

import http.client
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.server.test_load import Server, served
from tests.tiny import tiny_folder
from twostroke.cli import main
from twostroke.errors import RequestError
from twostroke.measure.explain.why import Explainer

STREAM = {"prompt": [60, 61], "max_tokens": 120, "ignore_eos": True, "stream": True}
LONG = {"prompt": [70 + n % 90 for n in range(200)], "max_tokens": 2, "ignore_eos": True}


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    """A stream writes, 10 ms a step; once it has begun a long prompt comes in."""
    folder = tiny_folder(tmp_path_factory.mktemp("tiny") / "tiny")
    with served(folder, step_s=0.01, num_gpu_blocks_override=256) as one:
        stream = http.client.HTTPConnection("127.0.0.1", one.port, timeout=120)
        post(stream, STREAM | {"request_id": "stream"})
        answer = stream.getresponse()
        assert answer.readline().startswith(b"data:")
        other = http.client.HTTPConnection("127.0.0.1", one.port, timeout=120)
        post(other, LONG | {"request_id": "long"})
        assert other.getresponse().status == 200
        while answer.readline():
            pass
        yield one


def post(connection: http.client.HTTPConnection, body: dict[str, Any]) -> None:
    headers = {"Content-Type": "application/json"}
    connection.request("POST", "/v1/completions", json.dumps(body), headers)


def ledgers(server: Server, capsys: pytest.CaptureFixture[str], *words: str) -> list[Any]:
    url = f"http://127.0.0.1:{server.port}"
    assert main(["why", url, "--seconds", "600", "--json", *words]) == 0
    return list(json.loads(capsys.readouterr().out)["requests"])


def test_every_ledger_sums_to_the_whole(server: Server, capsys: pytest.CaptureFixture[str]) -> None:
    found = ledgers(server, capsys, "--slowest", "9")
    assert len(found) == 2
    for one in found:
        assert sum(entry["ms"] for entry in one["entries"]) == pytest.approx(one["total_ms"])
        (rest,) = [e for e in one["entries"] if e["part"] == "not accounted for"]
        assert abs(rest["share"]) < 0.05
        assert all(entry["ms"] >= 0 for entry in one["entries"] if entry is not rest)


def test_who_prefilled_between_a_streams_tokens_is_named(
    server: Server, capsys: pytest.CaptureFixture[str]
) -> None:
    (found,) = ledgers(server, capsys, "--request", "cmpl-stream")
    parts = {entry["part"]: entry for entry in found["entries"]}
    (culprit,) = parts["prefill of others, between its tokens"]["culprits"]
    assert culprit.startswith("cmpl-long")
    assert found["output_tokens"] == 120
    assert parts["decode"]["share"] > 0.3


def test_a_sentence_comes_first(server: Server, capsys: pytest.CaptureFixture[str]) -> None:
    url = f"http://127.0.0.1:{server.port}"
    assert main(["why", url, "--seconds", "600"]) == 0
    assert capsys.readouterr().out.startswith("cmpl-stream")
    assert main(["why", url, "--request", "cmpl-strem"]) == 1
    assert "no request 'cmpl-strem' has ended" in capsys.readouterr().err
    assert main(["why", url, "--seconds", "0"]) == 1


def record(name: str, **changes: Any) -> dict[str, Any]:
    made: dict[str, Any] = {
        "request_id": name,
        "num_prompt": 10,
        "num_cached": 0,
        "received_s": 0.0,
        "tokenised_s": 0.1,
        "queued_s": 0.1,
        "scheduled_s": 1.0,
        "first_token_s": 2.0,
        "finished_s": 5.0,
        "sent_s": 0.0,
        "chunks": [(1.0, 1, 0, 10)],
        "preempted": [],
        "token_s": [2.0, 3.0, 5.0],
        "token_step": [1, 2, 3],
        "finish_reason": "stop",
        "gaps": {"decode": 1.0, "prefill": 1.5, "preemption": 0.0, "host": 0.5},
        "worst_gap": {"decode": 0.4, "prefill": 1.5, "preemption": 0.0, "host": 0.1},
    }
    return made | changes


def step(number: int, planned: float, committed: float, prefill: int, decode: int) -> Any:
    return {
        "step": number,
        "planned_s": planned,
        "committed_s": committed,
        "device_s": committed - planned,
        "host_gap_s": 0.0,
        "running": 2,
        "prefill": {"tokens": prefill},
        "decode": {"tokens": decode},
        "since_s": {"decode": 0.4, "prefill": 0.6, "preemption": 0.0, "host": 0.0},
    }


def test_a_ledger_one_can_check_by_hand() -> None:
    steps = [
        step(0, 0.0, 0.9, 8, 0),
        step(1, 1.0, 2.0, 10, 0),
        step(2, 2.0, 3.0, 0, 1),
        step(3, 3.0, 5.0, 30, 1),
    ]
    before = record("before", chunks=[(0.0, 0, 0, 8)], finished_s=1.0)
    culprit = record("culprit", chunks=[(3.0, 3, 0, 30)], finished_s=6.0)
    asked = record("asked")
    explainer = Explainer({"steps": steps, "requests": [before, asked, culprit]})
    found = explainer.explain(asked)
    parts = {entry.part: entry for entry in found.entries}
    assert found.total_s == 5.0
    assert parts["tokenising"].seconds == pytest.approx(0.1)
    assert parts["waiting in the queue"].seconds == pytest.approx(0.9)
    assert parts["waiting in the queue"].culprits == ("before",)
    assert parts["prefill of its own prompt"].seconds == pytest.approx(1.0)
    assert parts["decode"].seconds == pytest.approx(1.0)
    assert parts["prefill of others, between its tokens"].culprits == ("culprit",)
    assert parts["host, between its tokens"].seconds == pytest.approx(0.5)
    assert sum(entry.seconds for entry in found.entries) == pytest.approx(5.0)
    assert found.worst is not None
    assert (found.worst.seconds, found.worst.token, found.worst.step) == (2.0, 3, 3)
    assert found.sentence() == (
        "asked took 5.00 s, 30% of it prefill of others, between its tokens (culprit). "
        "The worst gap, 2.00 s before token 3, was prefill of culprit in step 3."
    )


def test_the_slowest_come_first(tmp_path: Path) -> None:
    requests = [record(f"r{n}", finished_s=5.0 + n) for n in range(4)]
    explainer = Explainer({"steps": [], "requests": requests})
    assert [one["request_id"] for one in explainer.slowest(2)] == ["r3", "r2"]
    assert explainer.find("r3")["request_id"] == explainer.find("r3…")["request_id"] == "r3"
    with pytest.raises(RequestError, match="4 requests begin with 'r'; give more of it"):
        explainer.find("r")
