"""`/dash/feed`: the same numbers as `/metrics`, each step once, and no more work than allowed."""

from __future__ import annotations

import asyncio
import json
import re
from collections.abc import Iterator
from itertools import pairwise
from pathlib import Path
from time import monotonic, sleep
from types import SimpleNamespace
from typing import Any

import pytest

from tests.server.monitor.test_metrics import scrape, value
from tests.server.running import Running, running
from tests.tiny import tiny_llm
from twostroke.kernels import cpu
from twostroke.serve.dashboard.dash import MAX_ANSWERS_PER_S, SLOWEST, STEPS, page_headers
from twostroke.serve.monitor.ceilings_probe import IDLE_S, CeilingsProbe

CAUSES = ("decode", "prefill", "preemption", "host", "communication", "drafting")


@pytest.fixture
def server(folder: Path) -> Iterator[Running]:
    with running(tiny_llm(folder)) as server:
        yield server


def feed(server: Running, since: int = 0, **asked: str) -> Any:
    query = "&".join(f"{name}={text}" for name, text in {"since": since, **asked}.items())
    status, headers, body = server.ask("GET", f"/dash/feed?{query}")
    assert status == 200, body
    assert headers["cache-control"] == "no-store"
    return json.loads(body)


def write(server: Running, prompt: str, count: int) -> None:
    body = {"prompt": prompt, "max_tokens": count, "ignore_eos": True, "temperature": 0}
    server.post("/v1/completions", body)


def test_before_the_first_request_there_is_nothing_and_it_says_so(server: Running) -> None:
    told = feed(server)
    assert told["steps"] == told["series"] == told["slowest"] == []
    assert told["num_steps"] == 0
    assert told["window"]["gap"] == {"count": 0, "p50": None, "p95": None, "p99": None}
    assert told["kv"]["free"] == told["kv"]["reserved"]
    assert (told["roof"]["flops"], told["roof"]["bytes"]) == (None, None)
    assert (told["server"]["up"], told["server"]["draining"]) == (True, False)


def test_its_figures_are_those_of_metrics_and_of_the_books(server: Running) -> None:
    for n in range(5):
        write(server, f"the quick brown fox {n}", 20 + n)
    server.assert_idle()
    told, said = feed(server, window="all"), scrape(server)
    window, totals = told["window"], told["totals"]
    assert totals["prompt_tokens"] == value(said, "vllm:prompt_tokens_total") > 0
    assert totals["generation_tokens"] == value(said, "vllm:generation_tokens_total") == 110
    assert window["cached_tokens"] == value(said, "vllm:prefix_cache_hits_total")
    for reason, count in totals["requests"].items():
        ended = value(said, "vllm:request_success_total", finished_reason=reason)
        assert count == window[f"ended_{reason}"] == ended
    assert window["gap"]["count"] == value(said, "vllm:inter_token_latency_seconds_count") == 105
    assert window["first"]["count"] == value(said, "vllm:time_to_first_token_seconds_count") == 5
    for cause in CAUSES:
        seconds = value(said, "twostroke:gap_seconds_total", cause=cause)
        assert window[f"gap_{cause}_s"] == pytest.approx(seconds)
    for phase in ("prefill", "decode"):
        for ours, theirs in (("tokens", "tokens"), ("flops", "flops"), ("bytes", "bytes")):
            total = value(said, f"twostroke:phase_{theirs}_total", phase=phase)
            assert window[f"{phase}_{ours}"] == pytest.approx(total)
    assert told["kv"] == server.client.engine.core.scheduler.kv.usage()._asdict()
    for state in ("used", "fragmented", "cached", "free"):
        assert told["kv"][state] == value(said, "twostroke:kv_cache_tokens", state=state)


def test_each_step_is_told_once_and_its_parts_are_its_time(server: Running) -> None:
    write(server, "a small model", 12)
    first = feed(server)
    assert len(first["steps"]) == first["num_steps"] == 12
    write(server, "writes what it likes", 7)
    second = feed(server, since=first["num_steps"])
    assert len(second["steps"]) == 7
    assert feed(server, since=second["num_steps"])["steps"] == []
    assert len(feed(server, since=10**9)["steps"]) == 19, "another server's number begins anew"
    steps = [
        dict(zip(first["step_fields"], row, strict=True))
        for row in first["steps"] + second["steps"]
    ]
    prefills = [n for n, step in enumerate(steps) if step["prefill_rows"]]
    assert prefills == [0, 12]
    assert all(step["decode"] > 0 and step["decode_rows"] == 1 for step in steps[1:12])
    assert sum(step["written"] for step in steps) == 19
    for before, step in pairwise(steps[:12]):
        took_ms = 1e3 * (step["ended_s"] - before["ended_s"])
        assert step["decode"] + step["prefill"] + step["host"] == pytest.approx(took_ms, abs=0.3)
    assert steps[12]["idle"] > 0, "between two requests the engine was idle, which is no gap"
    write(server, "long", 200)
    write(server, "longer", 220)
    assert len(feed(server)["steps"]) == STEPS


def test_the_slowest_requests_are_told_with_their_ledger(server: Running) -> None:
    for count in (5, 40, 3, 20, 7, 9, 2, 4, 6, 8):
        write(server, "the dog sleeps", count)
    server.assert_idle()
    slowest = feed(server, slow="total")["slowest"]
    assert len(slowest) == SLOWEST
    totals = [one["total"] for one in slowest]
    assert totals == sorted(totals, reverse=True)
    gaps = feed(server, slow="gap")["slowest"]
    assert [one["worst_gap"] for one in gaps] == sorted(g["worst_gap"] for g in gaps)[::-1]
    longest = next(one for one in slowest if one["written"] == 40)
    whole = longest["queue"] + longest["prefill"] + longest["decode"]
    (record,) = [one for one in server.client.records.requests if len(one.token_s) == 40]
    written_ms, ended_ms = (
        1e3 * (at_s - record.received_s) for at_s in (record.token_s[-1], record.finished_s)
    )
    assert whole == pytest.approx(written_ms, abs=0.01)
    assert longest["total"] == pytest.approx(ended_ms, abs=0.01)
    assert sum(longest["causes"].values()) == pytest.approx(longest["worst_gap"], abs=0.01)
    assert longest["reason"] == "length"
    assert not any("dog" in str(one) for one in slowest), "no text is told"


def test_refusals_and_failures_are_counted_by_kind(folder: Path) -> None:
    with running(tiny_llm(folder), max_queue=0) as server:
        server.app.service.admission.num_open += 10**6  # as if so many were open
        assert server.ask("POST", "/v1/completions", {"prompt": "x"})[0] == 429
        server.app.service.admission.num_open -= 10**6
        assert server.ask("POST", "/v1/completions", b"{")[0] == 400
        assert server.ask("GET", "/nowhere")[0] == 404
        assert server.ask("POST", "/v1/embeddings", {})[0] == 501
        for window in ("10", "60", "600", "3600", "all"):
            told = feed(server, window=window)["window"]
            counts = [told[f"answered_{kind}"] for kind in ("429", "4xx", "5xx")]
            assert counts == [1, 2, 1], window
        server.ask("GET", "/dash/feed?since=x")
        assert feed(server)["window"]["answered_4xx"] == 2, "the page's own are not counted"


def test_the_curves_say_when_how_much_and_how_fast(server: Running) -> None:
    write(server, "the quick brown fox", 30)
    told = feed(server, window="all")
    assert told["series_s"] == 60.0, "no longer than the server is up, and a minute at least"
    began_s, ended_s, prefill, written, *load, ended, errors = told["series"][-1][:9]
    quantiles = told["series"][-1][9:]
    running, waiting, kv_share = load
    assert (running, waiting) == (1, 0)
    assert 0 < kv_share < 1
    assert ended > 0
    assert errors == 0
    assert 0 <= ended_s <= began_s < 60
    assert prefill >= 0
    assert written > 0
    assert all(p50 <= p95 for p50, p95 in zip(quantiles[::2], quantiles[1::2], strict=True) if p50)
    assert told["server"]["weights"]
    assert told["server"]["weight_bytes"] == server.client.info.weight_bytes
    assert told["gpu"] is None


@pytest.mark.skipif(not cpu.available(), reason="this installation has no native kernels")
def test_the_weights_are_named_by_what_they_are_kept_as(folder: Path) -> None:
    assert tiny_llm(folder).engine.info().weights == "float32"
    assert tiny_llm(folder, quantization="int8").engine.info().weights == "int8, from float32"


def test_the_roof_is_measured_while_the_engine_is_idle_and_somebody_looks(
    server: Running, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert feed(server)["roof"]["idle_s"] == IDLE_S
    monkeypatch.setattr("twostroke.serve.monitor.ceilings_probe.IDLE_S", 0.0)
    until = monotonic() + 60
    while not (roof := feed(server)["roof"])["bytes"]:
        assert monotonic() < until
        sleep(0.2)
    assert roof["idle_s"] is None
    assert (roof["flops"] is not None) == cpu.available()


def test_work_ends_the_measurement_and_the_next_idle_time_begins_another() -> None:
    """A request that arrives ends the measuring process."""
    client = SimpleNamespace(info=SimpleNamespace(read_bytes_per_s=0.0, ops_per_s=0.0, threads=1))
    client.load = lambda: SimpleNamespace(running=1, waiting=0)

    async def test() -> None:
        roof = CeilingsProbe(client)  # type: ignore[arg-type]
        for _ in range(2):
            roof.measure_if_idle(0.0)
            assert roof._task is None, "not idle for long enough"
            roof.measure_if_idle(IDLE_S)
            assert roof._task is not None
            await asyncio.wait_for(roof._task, 60)
            assert not any(roof.ceilings)
            assert roof.is_pending
        client.info.threads = 0  # a GPU's is measured at the start or not at all
        assert not roof.is_pending

    asyncio.run(test())


@pytest.mark.parametrize(
    "query", ["since=-1", "since=x", "window=5", "slow=me", "since=" + "9" * 40]
)
def test_what_it_does_not_know_is_refused(server: Running, query: str) -> None:
    status, _, body = server.ask("GET", f"/dash/feed?{query}")
    assert status == 400
    assert json.loads(body)["error"]["param"] == query.partition("=")[0]


def test_who_asks_too_often_is_told_to_wait(
    server: Running, monkeypatch: pytest.MonkeyPatch
) -> None:
    now = monotonic()
    monkeypatch.setattr("twostroke.serve.dashboard.dash.monotonic", lambda: now)
    most = int(MAX_ANSWERS_PER_S)
    answers = [server.ask("GET", "/dash/feed") for _ in range(2 * most)]
    refused = [headers for status, headers, _ in answers if status == 429]
    assert [status for status, _, _ in answers] == [200] * most + [429] * most
    now += 0.5
    assert [server.ask("GET", "/dash/feed")[0] for _ in range(most)].count(200) == most // 2
    assert all(headers["retry-after"] == "2" for headers in refused)
    assert server.ask("GET", "/health")[0] == 200


def test_the_page_is_whole_and_may_speak_to_nobody_else(server: Running) -> None:
    status, headers, page = server.ask("GET", "/dash")
    text = page.decode()
    assert status == 200
    policy = headers["content-security-policy"]
    assert "default-src 'none'" in policy
    assert "unsafe" not in policy
    assert re.findall(r"(?:src|href)=[\"'](?!data:)([^\"']*)", text) == ["./", "metrics"]
    assert not re.findall(r"https?://(?!www\.w3\.org/2000/svg)", text)
    changed = dict(page_headers(text.replace('"use strict";', '"use strict"; ')))
    assert changed[b"content-security-policy"].decode() != policy, "a changed script is another"


def test_the_feed_wants_the_key_and_the_page_does_not(folder: Path) -> None:
    with running(tiny_llm(folder), api_keys=("sesame",), open_metrics=True) as server:
        assert server.ask("GET", "/dash")[0] == 200
        assert server.ask("GET", "/dash/feed")[0] == 401
        assert server.ask("GET", "/dash/feed", headers={"Authorization": "Bearer sesame"})[0] == 200


def test_it_can_be_left_out(folder: Path) -> None:
    with running(tiny_llm(folder), dash=False) as server:
        assert server.ask("GET", "/dash")[0] == server.ask("GET", "/dash/feed")[0] == 404
