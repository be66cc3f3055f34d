"""`bench serve` against a server with known delays: its figures and its refusals."""

from __future__ import annotations

import asyncio
import json
import time
from pathlib import Path
from typing import Any

import pytest

from tests.measure.paced_server import PacedServer, paced_server
from twostroke.cli import main
from twostroke.measure.load.bench import BenchOutcome, ServeBench, ServeOptions
from twostroke.measure.load.definitions import Goals
from twostroke.measure.load.http_client import ClientConnection, Endpoint


def bench(server: PacedServer, **options: Any) -> BenchOutcome:
    given: dict[str, Any] = {"random_input_len": 8, "random_output_len": 3, "num_prompts": 20}
    given |= {"metric_percentiles": (90.0,)} | options

    async def work() -> BenchOutcome:
        one = ServeBench(ServeOptions(url=server.url, **given))
        try:
            await one.connect()
            return await one.run()
        finally:
            one.close()

    return asyncio.run(work())


def test_figures_are_the_servers(tmp_path: Path) -> None:
    with paced_server(ttft_s=0.05, itl_s=0.02) as server:
        outcome = bench(server, num_prompts=40, request_rate=50.0, random_output_len=5)
    found = outcome.result
    assert found["completed"] == 40
    assert found["total_input_tokens"] == 320
    assert found["total_output_tokens"] == 200
    # The server waits at least so long; how much longer is the machine's affair.
    assert found["median_ttft_ms"] >= 50
    assert found["median_itl_ms"] >= 20
    assert found["median_tpot_ms"] >= 20
    assert found["median_e2el_ms"] >= 130
    for sample in outcome.run.samples:
        assert sample.e2el_s == pytest.approx(sample.ttft_s + sum(sample.itls_s))
    assert len({tuple(body["prompt"]) for body in server.bodies}) == 41  # with the warm-up
    assert all(body["ignore_eos"] and body["stream"] for body in server.bodies)


def test_a_stall_shows_in_every_request_that_was_due_in_it() -> None:
    """Nothing is answered from the 10th of 40 requests to the 30th. The requests that were due in
    between are sent all the same, and each waited for the stall's end. A client that sends the next
    request when the last one is answered would never end the stall."""
    warm_ups = 1
    with paced_server(stall=range(warm_ups + 10, warm_ups + 30)) as server:
        outcome = bench(server, num_prompts=40, request_rate=10.0, num_warmups=warm_ups)
    samples = sorted(outcome.run.samples, key=lambda sample: sample.scheduled_s)
    waits = [server.stall_ended_s - sample.scheduled_s for sample in samples[14:24]]
    for sample, wait in zip(samples[14:24], waits, strict=True):
        assert sample.ttft_s >= wait - 0.01
    # The fifth largest of 40 values is below their 90th percentile.
    assert outcome.result["p90_ttft_ms"] >= 1000 * (sorted(waits)[-5] - 0.01)


def test_with_a_limit_waiting_in_the_client_counts() -> None:
    with paced_server(ttft_s=0.1) as server:
        found = bench(server, num_prompts=6, request_rate=1000.0, max_concurrency=1).run
    last = max(found.samples, key=lambda sample: sample.sent_s)
    assert last.ttft_s >= 0.55  # five before it, and itself


def test_a_closed_loop_has_so_many_users() -> None:
    with paced_server(ttft_s=0.05) as server:
        outcome = bench(server, num_prompts=12, max_concurrency=3)
    assert outcome.result["max_concurrent_requests"] == 3
    assert max(sample.lag_s for sample in outcome.run.samples) < 0.05  # due when a user is free


def test_a_client_without_time_is_noticed() -> None:
    """A loop that is blocked cannot say when a token came."""

    async def work() -> BenchOutcome:
        one = ServeBench(ServeOptions(url=server.url, **given))
        await one.connect()
        loop = asyncio.get_running_loop()

        def block() -> None:
            time.sleep(0.2)
            loop.call_later(0.01, block)

        loop.call_later(0.05, block)
        return await one.run()

    given: dict[str, Any] = {"random_input_len": 8, "random_output_len": 5, "num_prompts": 30}
    given |= {"metric_percentiles": (50.0,), "request_rate": 30.0}
    with paced_server(itl_s=0.01) as server:
        found = asyncio.run(work()).result
    assert not found["certified"]
    assert any("the client was late" in problem for problem in found["problems"])


def test_a_request_is_cancelled_even_as_a_piece_of_its_answer_comes() -> None:
    async def work(url: str) -> bool:
        connection = await ClientConnection.open(Endpoint(url))
        body = json.dumps({"prompt": [1], "max_tokens": 1}).encode()
        pieces = connection.request("POST", "/v1/completions", body, timeout_s=60.0)
        waiting = asyncio.ensure_future(anext(pieces))
        while connection._waiter is None:
            await asyncio.sleep(0)
        connection._wake()
        waiting.cancel()
        await asyncio.wait({waiting}, timeout=10)
        connection.close()
        return waiting.cancelled()

    with paced_server(ttft_s=60.0) as server:
        assert asyncio.run(work(server.url))


def test_a_cache_that_answers_is_noticed() -> None:
    with paced_server(cached=8) as server:
        found = bench(server).result
    assert any("the prefix cache answered" in problem for problem in found["problems"])


@pytest.mark.full
def test_the_highest_rate_within_goals_is_found() -> None:
    """A server that answers four requests at a time in 0.05 s each carries 80 a second."""
    from twostroke.measure.load.bench import search_rate

    async def work() -> Any:
        options = ServeOptions(
            url=server.url,
            num_prompts=40,
            random_input_len=4,
            random_output_len=1,
            request_rate=20.0,
            max_concurrency=4,
            goals=Goals(ttft_s=0.175),
        )
        one = ServeBench(options)
        await one.connect()
        return await search_rate(one, 0.9)

    with paced_server(ttft_s=0.05) as server:
        best, tried = asyncio.run(work())
    assert len(tried) >= 3
    assert not all(row["met"] for row in tried)
    assert 5.0 <= best.result["request_rate"] <= 160.0


def test_the_command_saves_reports_and_says_if_it_is_certified(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    page = tmp_path / "report.html"
    words = ["bench", "serve", "--num-prompts", "40", "--random-input-len", "4"]
    words += ["--random-output-len", "4", "--metric-percentiles", "50", "--html", str(page)]
    words += ["--save-result", "--result-dir", str(tmp_path), "--result-filename", "r.json"]
    with paced_server(ttft_s=0.01, itl_s=0.01) as server:
        status = main([*words, "--base-url", server.url, "--max-concurrency", "4"])
    assert status in (0, 3)  # 3: this machine was too busy for the client
    saved = json.loads((tmp_path / "r.json").read_text())
    assert saved["completed"] == 40
    assert saved["certified"] == (status == 0)
    html = page.read_text()
    assert html.count("<figure") == 6
    assert "http://" not in html.replace(server.url, "")  # nothing is loaded from anywhere
    assert "paced" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("words", "status", "says"),
    [
        (["--request-rate", "0"], 1, "--request-rate 0: give requests a second"),
        (["--goodput", "ttf:200"], 1, "give ttft, tpot or e2el in ms"),
        (["--dataset-name", "trace"], 1, "needs --dataset-path FILE"),
        (["--find-rate"], 1, "--find-rate needs goals"),
        (["--num-prompts", "0"], 1, "--num-prompts must be at least 1"),
        (["--extra-body", "x"], 1, "give a JSON object"),
        (["--metric-percentiles", "200"], 1, "numbers between 0 and 100"),
    ],
)
def test_wrong_options_say_what_to_give(
    words: list[str], status: int, says: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with paced_server() as server:
        assert main(["bench", "serve", "--base-url", server.url, *words]) == status
    assert says in capsys.readouterr().err


@pytest.mark.parametrize(
    ("settings", "words", "says"),
    [
        ({"key": "right"}, ["--api-key", "wrong"], "answered 401: a valid API key is needed; give"),
        ({"content": False}, [], "the server streamed no content"),
        ({}, ["--endpoint", "/v1/nothing"], "answered 404: there is no /v1/nothing"),
    ],
)
def test_a_server_that_does_not_do_it_is_named(
    settings: dict[str, Any], words: list[str], says: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with paced_server(**settings) as server:
        assert main(["bench", "serve", "--base-url", server.url, *words]) == 1
    assert says in capsys.readouterr().err


@pytest.mark.parametrize("command", [["bench", "serve", "--base-url"], ["phases"], ["trace"]])
def test_nobody_there_is_said(command: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    assert main([*command, "http://127.0.0.1:9"]) == 1
    assert "no server answers at http://127.0.0.1:9 (Connection refused)" in capsys.readouterr().err
    assert main([*command, "ftp://x"]) == 1
    assert "is not an address" in capsys.readouterr().err
