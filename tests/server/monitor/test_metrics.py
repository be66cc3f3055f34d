"""`/metrics` agrees with the engine's records, beginning before the first request."""

from __future__ import annotations

import asyncio
import json
import os
import re
import signal
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import yaml
from prometheus_client.parser import text_string_to_metric_families

from tests.instant import BUILDER
from tests.server.running import Running, running
from tests.tiny import tiny_llm
from twostroke.config import EngineConfig
from twostroke.engine.remote import RemoteEngine
from twostroke.kernels import cpu
from twostroke.observe.totals import (
    CAUSES,
    FIRST_BUCKETS,
    GAP_BUCKETS,
    PHASES,
    REASONS,
    REQUEST_BUCKETS,
    token_buckets,
)
from twostroke.request import SamplingParams
from twostroke.serve.monitor.gpu import gpu_figures
from twostroke.serve.monitor.metrics import ServerMetrics, gpu_families

MONITORING = Path(__file__).parents[3] / "deploy" / "monitoring"
TEXT = "/v1/completions"
NOT_ZERO = {
    "vllm:cache_config_info",
    "twostroke:engine_up",
    "twostroke:kv_cache_reserved_tokens",
}
PATIENCE_S = 240
# vLLM's own, with the labels it gives them besides model_name and engine.
VLLM = {
    "num_requests_running": "",
    "num_requests_waiting": "",
    "num_requests_waiting_by_reason": "reason",
    "kv_cache_usage_perc": "",
    "engine_sleep_state": "sleep_state",
    "prefix_cache_queries_total": "",
    "prefix_cache_hits_total": "",
    "num_preemptions_total": "",
    "prompt_tokens_total": "",
    "prompt_tokens_by_source_total": "source",
    "prompt_tokens_cached_total": "",
    "generation_tokens_total": "",
    "request_success_total": "finished_reason",
    "iteration_tokens_total_bucket": "le",
    "time_to_first_token_seconds_bucket": "le",
    "inter_token_latency_seconds_bucket": "le",
    "time_per_output_token_seconds_bucket": "le",
    "request_time_per_output_token_seconds_bucket": "le",
    "e2e_request_latency_seconds_bucket": "le",
    "request_queue_time_seconds_bucket": "le",
    "request_inference_time_seconds_bucket": "le",
    "request_prefill_time_seconds_bucket": "le",
    "request_decode_time_seconds_bucket": "le",
    "request_prompt_tokens_bucket": "le",
    "request_prefill_kv_computed_tokens_bucket": "le",
    "request_generation_tokens_bucket": "le",
    "request_max_num_generation_tokens_bucket": "le",
    "request_params_n_bucket": "le",
    "request_num_preemptions_bucket": "le",
    "request_params_max_tokens_bucket": "le",
}

Samples = dict[tuple[str, frozenset[tuple[str, str]]], float]


@pytest.fixture
def server(folder: Path) -> Iterator[Running]:
    with running(tiny_llm(folder), served_model_names=("small",)) as one:
        yield one


def parse(text: str) -> Samples:
    return {
        (sample.name, frozenset(sample.labels.items())): sample.value
        for family in text_string_to_metric_families(text)
        for sample in family.samples
        if not sample.name.endswith("_created")
    }


def scrape(server: Running) -> Samples:
    return parse(server.ask("GET", "/metrics")[2].decode())


def value(samples: Samples, series: str, **labels: str) -> float:
    """The only sample of that name with these labels, ignoring other labels."""
    found = [
        v
        for (name, has), v in samples.items()
        if name == series and labels.items() <= dict(has).items()
    ]
    assert len(found) == 1, (series, labels, found)
    return found[0]


def ask(server: Running, **more: Any) -> dict[str, Any]:
    body = {"prompt": "the quick brown fox", "max_tokens": 8, "ignore_eos": True, "temperature": 0}
    return server.post(TEXT, body | more)


def test_every_series_is_there_before_the_first_request_and_at_zero(server: Running) -> None:
    before = scrape(server)
    for (name, labels), amount in before.items():
        awake = ("sleep_state", "awake") in labels
        free = ("state", "free") in labels
        if name not in NOT_ZERO and not awake and not free and not name.startswith("http_"):
            assert amount == 0, (name, labels)
    ask(server)
    ask(server, n=2, stop=["e"])
    status, _, _ = server.ask("POST", TEXT, {"prompt": [5] * 10, "temperature": -1})
    assert status == 400
    after = scrape(server)
    assert {key for key in after if key[0] != "http_requests_total"} == {
        key for key in before if key[0] != "http_requests_total"
    }
    for reason in REASONS:
        assert ("finished_reason", reason) in {pair for _, labels in before for pair in labels}


def test_vllms_series_have_vllms_names_and_labels(server: Running) -> None:
    samples = scrape(server)
    for name, label in VLLM.items():
        found = [dict(labels) for of, labels in samples if of == f"vllm:{name}"]
        assert found, name
        wanted = {"model_name", "engine", label} - {""}
        assert all(labels.keys() == wanted for labels in found), name
        assert all(labels["model_name"] == "small" and labels["engine"] == "0" for labels in found)
    config = next(dict(labels) for name, labels in samples if name == "vllm:cache_config_info")
    assert config == {
        "engine": "0",
        "block_size": "16",
        "num_gpu_blocks": "256",
        "kv_cache_size_tokens": "4096",
        "kv_cache_max_concurrency": "16.00",
    }


def test_buckets_begin_at_a_millisecond_or_less_and_grow() -> None:
    for buckets in (GAP_BUCKETS, FIRST_BUCKETS, REQUEST_BUCKETS):
        assert buckets[0] <= 0.001
        assert list(buckets) == sorted(set(buckets))
    assert token_buckets(256) == (1, 2, 5, 10, 20, 50, 100, 200)


def test_counts_and_times_are_those_of_the_answers(server: Running) -> None:
    answers = [ask(server), ask(server, max_tokens=5), ask(server, n=2)]
    samples = scrape(server)
    usage = [answer["usage"] for answer in answers]
    written = sum(one["completion_tokens"] for one in usage)
    read = usage[0]["prompt_tokens"] * 4  # the last one was read once for each of its two
    assert value(samples, "vllm:generation_tokens_total") == written == 29
    assert value(samples, "vllm:prompt_tokens_total") == read
    hits = value(samples, "vllm:prefix_cache_hits_total")
    assert value(samples, "vllm:prompt_tokens_by_source_total", source="local_cache_hit") == hits
    assert value(samples, "vllm:request_success_total", finished_reason="length") == 4
    assert value(samples, "vllm:request_success_total", finished_reason="abort") == 0
    for name in ("queue", "prefill", "decode", "inference"):
        assert value(samples, f"vllm:request_{name}_time_seconds_count") == 4
    assert value(samples, "vllm:request_params_n_count") == 3
    assert value(samples, "vllm:request_params_n_sum") == 4
    assert value(samples, "vllm:request_max_num_generation_tokens_sum") == 8 + 5 + 8
    assert value(samples, "vllm:request_params_max_tokens_sum") == 8 + 5 + 8 + 8
    assert value(samples, "vllm:time_to_first_token_seconds_count") == 4
    assert value(samples, "vllm:inter_token_latency_seconds_count") == written - 4
    told = [answer["timings"] for answer in answers]
    gaps = sum(sum(times["gaps_ms"].values()) for times in told) / 1e3
    assert value(samples, "vllm:inter_token_latency_seconds_sum") == pytest.approx(gaps)
    assert value(samples, "vllm:request_decode_time_seconds_sum") == pytest.approx(gaps)
    for cause in CAUSES:
        blamed = sum(times["gaps_ms"][cause] for times in told) / 1e3
        assert value(samples, "twostroke:gap_seconds_total", cause=cause) == pytest.approx(blamed)
    steps = list(server.client.engine.core.records.steps)
    for phase in PHASES:
        work = [getattr(step, phase) for step in steps]
        series = "twostroke:phase_{}_total"
        for name, of in (("tokens", "tokens"), ("flops", "flops"), ("bytes", "num_bytes")):
            summed = sum(getattr(one, of) for one in work)
            assert value(samples, series.format(name), phase=phase) == pytest.approx(summed)


def test_a_stop_string_is_no_abort(server: Running) -> None:
    text = ask(server, max_tokens=40)["choices"][0]["text"]
    stop = text[len(text) // 2 : len(text) // 2 + 2]
    assert ask(server, max_tokens=40, stop=[stop])["choices"][0]["finish_reason"] == "stop"

    def counted() -> bool:
        return value(scrape(server), "vllm:request_success_total", finished_reason="stop") == 1

    wait_for(counted)
    assert value(scrape(server), "vllm:request_success_total", finished_reason="abort") == 0


def wait_for(condition: Callable[[], bool]) -> None:
    for _ in range(1000):
        if condition():
            return
    raise AssertionError("waited in vain")


def test_the_kv_cache_is_as_the_audit_finds_it(server: Running) -> None:
    for n in range(5):
        ask(server, prompt=[4 + (n * 37 + k) % 200 for k in range(40 + 10 * n)])
    server.assert_idle()  # which audits
    samples, usage = scrape(server), server.client.engine.core.scheduler.kv.usage()
    states = {"used", "fragmented", "cached", "free"}
    told = {s: value(samples, "twostroke:kv_cache_tokens", state=s) for s in states}
    assert told == {state: getattr(usage, state) for state in states}
    assert usage.cached > 0
    reserved = value(samples, "twostroke:kv_cache_reserved_tokens")
    assert reserved == usage.reserved == sum(told.values()) == 256 * 16
    assert value(samples, "vllm:kv_cache_usage_perc") == 0


def test_clients_cannot_make_series(server: Running) -> None:
    ask(server)
    server.ask("GET", "/nowhere")
    server.ask("POST", TEXT, {"prompt": "x", "model": "none"})
    before = scrape(server).keys()
    for n in range(10):
        ask(server, request_id=f"mine-{n}", cache_salt=f"salt-{n}", user=f"user-{n}")
        server.ask("GET", f"/nowhere/{n}")
        server.ask("POST", TEXT, {"prompt": "x", "model": f"none-{n}"})
    assert scrape(server).keys() == before


def series_in(expression: str) -> set[str]:
    return set(re.findall(r"\b(?:vllm|twostroke):\w+", expression))


def test_what_dashboard_and_alerts_ask_for_is_there(server: Running) -> None:
    dashboard = json.loads((MONITORING / "grafana.json").read_text())
    rows = [panel["title"] for panel in dashboard["panels"] if panel["type"] == "row"]
    assert rows == ["START", "STREAM"]
    asked = [t["expr"] for panel in dashboard["panels"] for t in panel.get("targets", ())]
    asked += [one["query"] for one in dashboard["templating"]["list"]]
    alerts = yaml.safe_load((MONITORING / "alerts.yml").read_text())
    rules = [rule for group in alerts["groups"] for rule in group["rules"]]
    asked += [rule["expr"] for rule in rules]
    assert len({rule["alert"] for rule in rules}) == len(rules) >= 5
    config = yaml.safe_load((MONITORING / "prometheus.yml").read_text())
    assert config["rule_files"] == ["alerts.yml"]
    assert {job["job_name"] for job in config["scrape_configs"]} == {"twostroke"}
    names = {name for name, _ in scrape(server)}
    wanted = {series for expression in asked for series in series_in(expression)}
    assert len(wanted) > 15
    assert wanted <= names


def test_ceilings_are_told_if_they_were_measured(folder: Path) -> None:
    with running(tiny_llm(folder, measure_ceilings=True)) as server:
        samples = scrape(server)
    info = server.client.info
    assert value(samples, "twostroke:ceiling_bytes_per_second") == info.read_bytes_per_s > 0
    if cpu.available():
        assert value(samples, "twostroke:ceiling_ops_per_second") == info.ops_per_s > 0


def test_the_gpu_is_told_of_where_its_driver_answers(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[int | str] = []
    nvml = SimpleNamespace(
        NVMLError=OSError,
        nvmlDeviceGetHandleByIndex=asked.append,
        nvmlDeviceGetMemoryInfo=lambda handle: SimpleNamespace(used=3, total=4),
        nvmlDeviceGetUtilizationRates=lambda handle: SimpleNamespace(gpu=75),
        nvmlDeviceGetPowerUsage=lambda handle: 412_500,
        nvmlDeviceGetHandleByUUID=asked.append,
    )
    monkeypatch.setattr("twostroke.serve.monitor.gpu._nvml", lambda: nvml)
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    told = {f.name: f.samples[0] for f in gpu_families("cuda:2")}
    assert asked == [2]
    assert told["twostroke:gpu_power_watts"].value == 412.5
    assert told["twostroke:gpu_utilisation"].value == 0.75
    assert told["twostroke:gpu_memory_used_bytes"].labels == {"gpu": "2"}
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "3,GPU-1f,7")
    assert gpu_figures("cuda:1") == gpu_figures("cuda") == (3, 4, 0.75, 412.5)
    assert asked == [2, "GPU-1f", 3], "by the driver's number or name, not by CUDA's"
    monkeypatch.setattr("twostroke.serve.monitor.gpu._nvml", lambda: None)
    assert not list(gpu_families("cuda:2"))


def test_an_engine_started_again_goes_on_counting(folder: Path) -> None:
    config = EngineConfig(model=str(folder), max_num_seqs=8, max_model_len=4096)
    params = SamplingParams(max_tokens=6, ignore_eos=True)

    async def test() -> None:
        async with await RemoteEngine.start(config, builder=BUILDER) as engine:
            metrics = ServerMetrics(engine, "m")

            async def answer(count: int, params: SamplingParams = params) -> None:
                async for output in engine.generate([5] * 20, params):
                    count -= bool(output.outputs[0].token_ids)
                    if not count:
                        return

            await answer(-1)
            assert sum(step.num_written for step in engine.records.steps) == 6
            assert [record.finish_reason for record in engine.records.requests] == ["length"]
            assert parse(metrics.text().decode())
            endless = SamplingParams(max_tokens=4000, ignore_eos=True, output_kind="delta")
            lost = asyncio.create_task(answer(-1, endless))
            while metrics.totals.generation_tokens < 10:
                await asyncio.sleep(0.001)
            os.kill(engine.pid, signal.SIGKILL)
            with pytest.raises(Exception, match="engine died"):
                await lost
            samples = parse(metrics.text().decode())
            assert value(samples, "twostroke:engine_up") == 0
            assert value(samples, "vllm:request_success_total", finished_reason="error") == 1
            before = metrics.totals.generation_tokens
            await answer(-1)
            samples = parse(metrics.text().decode())
            assert value(samples, "vllm:generation_tokens_total") == before + 6
            assert value(samples, "vllm:request_success_total", finished_reason="length") == 2
            assert value(samples, "twostroke:engine_restarts_total") == 1
            assert value(samples, "twostroke:engine_up") == 1

    asyncio.run(asyncio.wait_for(test(), PATIENCE_S))
