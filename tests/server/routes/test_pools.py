"""`twostroke serve` with several engines in real processes: flags, HTTP, /metrics, a death."""

from __future__ import annotations

import json
import os
import re
import sys
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

from tests.cli.test_serve import Server, started
from tests.tiny import tiny_llm
from twostroke import SamplingParams
from twostroke.cli import main
from twostroke.kernels import cpu
from twostroke.measure.explain.timeline import REQUESTS, timeline

pytestmark = pytest.mark.skipif(
    not cpu.available() or not hasattr(os, "memfd_create"), reason="native kernels on Linux only"
)
PROMPT = [50 + (7 * n * n) % 200 for n in range(120)]


def complete(server: Server, prompt: list[int], **more: Any) -> dict[str, Any]:
    body = {"prompt": prompt, "max_tokens": 40, "temperature": 0, "ignore_eos": True} | more
    status, content = server.ask("/v1/completions", body)
    assert status == 200, content
    return json.loads(content)


def series(server: Server) -> dict[str, float]:
    """Every sample of /metrics by its name and labels."""
    status, content = server.ask("/metrics")
    assert status == 200
    text = content.decode()
    lines = [line for line in text.splitlines() if line and not line.startswith("#")]
    names = [line.rpartition(" ")[0] for line in lines]
    assert len(set(names)) == len(names), "a series is there twice"
    families = re.findall(r"^# TYPE (\S+)", text, re.MULTILINE)
    assert len(set(families)) == len(families), "a family is there twice"
    return {line.rpartition(" ")[0]: float(line.rpartition(" ")[2]) for line in lines}


def of_engine(found: dict[str, float], name: str, engine: str, more: str = "") -> float:
    labels = f'engine="{engine}"'
    (value,) = (
        v for k, v in found.items() if k.startswith(name + "{") and labels in k and more in k
    )
    return value


def assert_one_trace_of_two_engines(records: dict[str, Any], request: dict[str, Any]) -> None:
    first, second = request["stays"]
    assert (first["engine"], first["num_written"], first["fetched_s"]) == ("prefill-0", 0, 0.0)
    assert (second["engine"], second["num_written"]) == ("decode-0", 1)
    assert request["received_s"] <= first["began_s"] < second["began_s"] < second["fetched_s"]
    assert second["fetched_s"] < request["finished_s"]
    assert second["fetched_bytes"] > 0
    # Each token is of a step that is told, of the engine that the stays say.
    engine_of = {step["step"]: step["engine"] for step in records["steps"]}
    assert len(engine_of) == len(records["steps"])
    wrote = [engine_of[number] for number in request["token_step"]]
    assert wrote == ["prefill-0"] + ["decode-0"] * 39
    events = timeline(records)["traceEvents"]
    names = {one["pid"]: one["args"]["name"] for one in events if one["name"] == "process_name"}
    assert sorted(names.values()) == ["decode-0", "prefill-0", "requests"]
    served = [names[one["pid"]] for one in events if one["ph"] == "f"]
    assert (served.count("prefill-0"), served.count("decode-0")) == (1, 39)
    spans = [one["name"] for one in events if one["ph"] == "X" and one["pid"] == REQUESTS]
    assert "prefill-0 → decode-0" in spans


def test_two_pools_answer_as_one_engine_and_are_told_apart_in_the_metrics(folder: Path) -> None:
    expected = (
        tiny_llm(folder)
        .generate([PROMPT], SamplingParams(temperature=0, max_tokens=40, ignore_eos=True))[0]
        .outputs[0]
    )
    options = ["--num-gpu-blocks-override", "256", "--max-num-seqs", "8", "--dtype", "float32"]
    pools = ["--prefill-engines", "1", "--decode-engines", "1", "--kv-transfer-checksums"]
    own = ["--decode-config", '{"max_num_seqs": 4}']
    with started("twostroke", "serve", str(folder), *options, *pools, *own) as server:
        assert complete(server, PROMPT)["choices"][0]["text"] == expected.text
        found = series(server)
        assert (
            of_engine(found, "twostroke:phase_tokens_total", "prefill-0", 'phase="prefill"') >= 120
        )
        assert of_engine(found, "twostroke:phase_tokens_total", "prefill-0", 'phase="decode"') == 0
        assert of_engine(found, "twostroke:phase_tokens_total", "decode-0", 'phase="prefill"') == 0
        assert of_engine(found, "twostroke:phase_tokens_total", "decode-0", 'phase="decode"') == 39
        assert of_engine(found, "vllm:time_to_first_token_seconds_count", "prefill-0") == 1
        assert of_engine(found, "vllm:time_to_first_token_seconds_count", "decode-0") == 0
        assert of_engine(found, "vllm:inter_token_latency_seconds_count", "decode-0") == 39
        done = 'finished_reason="length"'
        assert of_engine(found, "vllm:request_success_total", "decode-0", done) == 1
        assert of_engine(found, "vllm:request_success_total", "prefill-0", done) == 0
        outcomes = [
            of_engine(found, "twostroke:kv_transfers_total", "decode-0", f'outcome="{name}"')
            for name in ("fetched", "failed")
        ]
        assert outcomes == [1, 0]
        assert of_engine(found, "twostroke:kv_transfer_bytes_total", "decode-0") > 0
        status, content = server.ask("/records?seconds=600")
        assert status == 200
        records = json.loads(content)
        (request,) = records["requests"]
        assert "prefilled by prefill-0" in request["route"]
        assert "handed over to decode-0" in request["route"]
        assert_one_trace_of_two_engines(records, request)
        running = [key for key in found if key.startswith("vllm:num_requests_running{")]
        assert [re.findall(r'(?:engine|phase)="(\w+)', key) for key in running] == [
            ["prefill", "prefill"],
            ["decode", "decode"],
        ]
        assert server.ask("/health")[0] == 200
        status, content = server.ask("/dash/feed")
        assert status == 200
        feed = json.loads(content)
        assert [(one["name"], one["phase"]) for one in feed["engines"]] == [
            ("prefill-0", "prefill"),
            ("decode-0", "decode"),
        ]
        (way,) = feed["transfers"]
        assert (way["sender"], way["receiver"]) == ("prefill-0", "decode-0")
        assert (way["fetched"], way["failed"]) == (1, 0)
        assert way["bytes"] == of_engine(found, "twostroke:kv_transfer_bytes_total", "decode-0")
        assert {row[-1] for row in feed["steps"]} == {"prefill-0", "decode-0"}
        status, said = server.terminate()
        assert status == 0
        assert "engines   1 prefill, 1 decode" in said


def pools_of(server: Server) -> dict[str, Any]:
    status, content = server.ask("/pools")
    assert status == 200, content
    return json.loads(content)


def scaled(server: Server, **body: Any) -> dict[str, Any]:
    status, content = server.ask("/pools", body)
    assert status == 200, content
    return json.loads(content)


def names(pools: dict[str, Any]) -> list[str]:
    return [engine["name"] for engine in pools["engines"]]


@pytest.mark.full  # more rounds
def test_pools_grow_and_shrink_under_load_and_no_request_is_lost(folder: Path) -> None:
    """Three rounds of other sizes while ten requests at a time are written, greedy and seeded."""
    params = [
        {"temperature": 0, "max_tokens": 100},
        {"temperature": 0.9, "seed": 5, "max_tokens": 100},
    ]
    asked = [[50 + (11 * n + k) % 200 for k in range(20 + n)] for n in range(10)]
    alone = tiny_llm(folder, exact=True)
    expected = [
        [
            one.outputs[0].text
            for one in alone.generate(asked, SamplingParams(ignore_eos=True, **given))
        ]
        for given in params
    ]
    options = ["--num-gpu-blocks-override", "256", "--max-num-seqs", "16", "--exact"]
    pools = ["--prefill-engines", "1", "--decode-engines", "1"]
    with (
        started("twostroke", "serve", str(folder), *options, *pools) as server,
        ThreadPoolExecutor(10) as clients,
    ):
        first = pools_of(server)
        assert {name: first[name] for name in ("prefill", "decode", "scaling")} == {
            "prefill": 1,
            "decode": 1,
            "scaling": False,
        }
        assert [engine["state"] for engine in first["engines"]] == ["up", "up"]
        stop = threading.Event()

        def ask_again_and_again(n: int) -> int:
            count = 0
            while not stop.is_set() or count < 2:
                given = params[(n + count) % 2]
                text = complete(server, asked[n], **given)["choices"][0]["text"]
                assert text == expected[(n + count) % 2][n]
                count += 1
            return count

        answers = [clients.submit(ask_again_and_again, n) for n in range(10)]
        try:
            grown = scaled(server, prefill=2, decode=3)
            assert names(grown) == ["prefill-0", "decode-0", "prefill-1", "decode-1", "decode-2"]
            # Nothing is waited for: all that is in the engines that leave is moved.
            shrunk = scaled(server, decode=1, drain_timeout=0)
            assert names(shrunk) == ["prefill-0", "decode-0", "prefill-1"]
            assert (shrunk["prefill"], shrunk["decode"]) == (2, 1)
            back = scaled(server, prefill=1, decode=2)
            assert names(back) == ["prefill-0", "decode-0", "decode-1"]
        finally:
            stop.set()
        assert sum(answer.result() for answer in answers) >= 20
        left = pools_of(server)
        assert [engine["requests"] for engine in left["engines"]] == [0, 0, 0]
        assert [engine["restarts"] for engine in left["engines"]] == [0, 0, 0]
        found = series(server)
        served = {re.search(r'engine="(.*?)"', key)[1] for key in found if 'engine="' in key}
        assert served == {"prefill-0", "decode-0", "decode-1"}
        status, said = server.terminate()
        assert status == 0
        assert "died" not in said


def test_what_pools_cannot_do_is_refused_and_changes_nothing(folder: Path) -> None:
    options = ["--max-num-seqs", "4", "--max-model-len", "64", "--api-key", "sesame"]
    key = "sesame"
    with started("twostroke", "serve", str(folder), *options, "-dp", "2") as server:
        for body, says in (
            ({}, "send prefill, decode or data_parallel_size"),
            ({"prefill": 1}, "prefill: there is no such pool here, only data_parallel_size"),
            ({"data_parallel_size": 0}, "must be from 1 to 64, not 0"),
            ({"data_parallel_size": 65}, "must be from 1 to 64, not 65"),
            ({"data_parallel_size": 1, "drain_timeout": -1}, "drain_timeout must be from 0"),
            ({"data_parallel_size": 3}, "start the server with --kv-cache-memory-bytes"),
            ({"decoed": 1}, "unknown field 'decoed'"),
        ):
            status, content = server.ask("/pools", body, key)
            assert (status, says in json.loads(content)["error"]["message"]) == (400, True), content
        assert server.ask("/pools", {"data_parallel_size": 1})[0] == 401
        assert server.ask("/pools")[0] == 401
        status, content = server.ask("/pools", {"data_parallel_size": 1}, key)
        assert status == 200, content
        assert names(json.loads(content)) == ["engine-0"]


def test_a_session_is_named_by_a_field_or_a_header(folder: Path) -> None:
    body = {"prompt": PROMPT, "max_tokens": 40, "ignore_eos": True}
    longer = body | {"prompt": [*PROMPT, *([7] * 80)], "max_tokens": 2}
    copies = ["--data-parallel-size", "2", "--num-gpu-blocks-override", "256"]
    with started("twostroke", "serve", str(folder), *copies) as server:
        complete(server, PROMPT, prompt_cache_key="mine")
        assert server.ask("/v1/completions", longer, session="mine")[0] == 200
        assert server.ask("/v1/completions", longer | {"prompt_cache_key": "new"})[0] == 200
        found = json.loads(server.ask("/records?seconds=600")[1])["requests"]
        assert server.terminate()[0] == 0
    # The first turn had 120 + 40 tokens. Of what no session says, the digests of 64 and 128 know.
    cached = [re.findall(r"(\d+) of \d+ tokens cached", one["route"])[0] for one in found]
    assert cached == ["0", "160", "128"]


def test_a_server_asks_the_planner_and_grows_as_it_advises(folder: Path) -> None:
    """No engine meets the goal, so that the planner advises the most engines that are allowed."""
    options = ["--num-gpu-blocks-override", "256", "--max-num-seqs", "8", "--ttft-slo-ms", "0.1"]
    scaling = ["--autoscale", "1:2", "--autoscale-interval-s", "1"]
    with started("twostroke", "serve", str(folder), *options, *scaling) as server:
        status, content = server.ask("/pools/advice")
        assert status == 400
        assert "requests have ended in this time" in content.decode()
        for n in range(30):
            complete(server, [*PROMPT, 50 + n], max_tokens=8)
        status, content = server.ask("/pools/advice?ttft_slo_ms=1e9&max_engines=4", timeout_s=240)
        assert status == 200, content
        advice = json.loads(content)
        assert advice["advice"] == {"data_parallel_size": 1}
        assert advice["requests"] == 30
        assert "measured steps" in advice["step_times"]["source"]
        for words in ("seconds=0", "target=2", "max_engines=x", "ttft_slo_ms=-1"):
            assert server.ask(f"/pools/advice?{words}")[0] == 400
        until = time.monotonic() + 240
        while json.loads(server.ask("/pools")[1])["data_parallel_size"] != 2:
            assert time.monotonic() < until
            time.sleep(0.1)
        complete(server, PROMPT)
        status, said = server.terminate()
        assert status == 0
        assert "autoscale: data_parallel_size 1 → 2" in said
        assert "are the most that are allowed" in said


@pytest.mark.parametrize(
    ("words", "says"),
    [
        (["--autoscale", "3:1"], "--autoscale 3:1: give two numbers from 1 to 64"),
        (["--autoscale", "1:2"], "--autoscale needs a goal"),
        (["--autoscale", "1:2", "--ttft-slo-ms", "9"], "--autoscale needs --kv-cache-memory-bytes"),
    ],
)
def test_autoscaling_without_what_it_needs_is_refused(
    words: list[str], says: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as ended:
        sys.exit(main(["serve", "model", *words]))
    assert ended.value.code
    assert says in " ".join(capsys.readouterr().err.split())
