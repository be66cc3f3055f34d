"""Traces, received by a collector over OpenTelemetry's protocol on a real socket."""

from __future__ import annotations

import argparse
import http.client
import json
import os
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest

from tests.cli.test_serve import started
from tests.server.running import JSON, Running, running
from tests.tiny import tiny_llm
from twostroke.commands.parser import Parser
from twostroke.commands.serve_settings import serve_settings
from twostroke.kernels import cpu

service = pytest.importorskip("opentelemetry.proto.collector.trace.v1.trace_service_pb2")
PATIENCE_S = 240
TRACE, PARENT = "0af7651916cd43dd8448eb211c80319c", "b7ad6b7169203331"
BODY = {"prompt": "the quick brown fox", "max_tokens": 12, "ignore_eos": True, "temperature": 0}
TEXT = "/v1/completions"
CAUSES = ("decode", "prefill", "preemption", "host", "communication", "drafting")


class Collector:
    """A collector that decodes spans, with an optional delay."""

    def __init__(self) -> None:
        self.spans: list[Any] = []
        self.resources: list[Any] = []

    def take(self, request: Any) -> None:
        for resource in request.resource_spans:
            self.resources.append(_plain(resource.resource.attributes))
            for scope in resource.scope_spans:
                self.spans += scope.spans

    def wait(self, count: int = 1) -> list[Any]:
        until = time.monotonic() + PATIENCE_S
        while len(self.spans) < count:
            assert time.monotonic() < until, "no span came"
            time.sleep(0.02)
        assert len(self.spans) == count
        return self.spans


def _plain(attributes: Any) -> dict[str, Any]:
    found = {}
    for pair in attributes:
        kind = pair.value.WhichOneof("value")
        value = getattr(pair.value, kind)
        found[pair.key] = [v.string_value for v in value.values] if kind == "array_value" else value
    return found


@pytest.fixture(autouse=True)
def soon(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OTEL_BSP_SCHEDULE_DELAY", "20")
    for name in ("TRACES_ENDPOINT", "ENDPOINT", "TRACES_PROTOCOL", "PROTOCOL"):
        monkeypatch.delenv(f"OTEL_EXPORTER_OTLP_{name}", raising=False)


@contextmanager
def http_collector() -> Iterator[tuple[Collector, str]]:
    collector = Collector()

    class Handler(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            assert self.path == "/v1/traces"
            request = service.ExportTraceServiceRequest()
            request.ParseFromString(self.rfile.read(int(self.headers["content-length"])))
            collector.take(request)
            self.send_response(200)
            self.end_headers()

        def log_message(self, *_: object) -> None:
            pass

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    try:
        yield collector, f"http://127.0.0.1:{server.server_port}/v1/traces"
    finally:
        server.shutdown()
        server.server_close()


@pytest.mark.skipif(
    not cpu.available() or not hasattr(os, "memfd_create"), reason="native kernels on Linux only"
)
def test_a_request_of_two_engines_is_one_trace(folder: Path) -> None:
    pools = ["--prefill-engines", "1", "--decode-engines", "1", "--num-gpu-blocks-override", "64"]
    with (
        http_collector() as (collector, endpoint),
        started(
            "twostroke", "serve", str(folder), *pools, "--otlp-traces-endpoint", endpoint
        ) as server,
    ):
        assert server.ask(TEXT, BODY)[0] == 200
        spans = {span.name: span for span in collector.wait(4)}
        assert server.terminate()[0] == 0
    whole = spans.pop("llm_request")
    assert sorted(spans) == ["engine decode-0", "engine prefill-0", "kv_fetch"]
    for span in spans.values():
        assert (span.trace_id, span.parent_span_id) == (whole.trace_id, whole.span_id)
        assert whole.start_time_unix_nano <= span.start_time_unix_nano
        assert span.start_time_unix_nano <= span.end_time_unix_nano <= whole.end_time_unix_nano
    first, second, fetch = (
        spans[name] for name in ("engine prefill-0", "engine decode-0", "kv_fetch")
    )
    assert first.end_time_unix_nano == second.start_time_unix_nano == fetch.start_time_unix_nano
    told = _plain(fetch.attributes)
    assert told["twostroke.engine"] == "decode-0"
    assert told["twostroke.fetch.bytes"] > 0
    assert "handed over to decode-0" in _plain(whole.attributes)["twostroke.route"]


def asked(server: Running, body: Any, **headers: str) -> dict[str, Any]:
    status, _, answer = server.ask("POST", TEXT, body, {**JSON, **headers})
    assert status == 200, answer
    return json.loads(answer)


def test_a_request_is_one_span_with_vllms_attributes_and_our_causes(folder: Path) -> None:
    with (
        http_collector() as (collector, endpoint),
        running(tiny_llm(folder), otlp_traces_endpoint=endpoint) as server,
    ):
        began = time.time_ns()
        parent = {"traceparent": f"00-{TRACE}-{PARENT}-01", "tracestate": "vendor=here"}
        answer = asked(server, BODY, **parent)
        (span,) = collector.wait()
        ended = time.time_ns()
        (record,) = server.client.records.requests
    assert (span.name, span.kind) == ("llm_request", span.SPAN_KIND_SERVER)
    assert (span.trace_id.hex(), span.parent_span_id.hex()) == (TRACE, PARENT)
    assert span.trace_state == "vendor=here"
    assert began <= span.start_time_unix_nano < span.end_time_unix_nano <= ended
    assert [event.name for event in span.events] == ["scheduled", "first_token"]
    told = _plain(span.attributes)
    usage = answer["usage"]
    assert told["gen_ai.request.id"] == answer["id"]
    assert told["gen_ai.response.model"] == answer["model"]
    assert told["gen_ai.usage.prompt_tokens"] == usage["prompt_tokens"]
    assert told["gen_ai.usage.completion_tokens"] == usage["completion_tokens"] == 12
    assert told["gen_ai.request.max_tokens"] == 12
    assert told["gen_ai.request.temperature"] == 0.0
    assert told["gen_ai.request.top_p"] == 1.0
    assert told["gen_ai.request.n"] == told["gen_ai.usage.num_sequences"] == 1
    assert told["gen_ai.response.finish_reasons"] == ["length"]
    latency = {
        "time_in_queue": record.queue_s,
        "time_to_first_token": record.ttft_s,
        "time_in_model_prefill": record.prefill_s,
        "time_in_model_decode": record.decode_s,
        "time_in_model_inference": record.prefill_s + record.decode_s,
        "e2e": record.finished_s - record.received_s,
    }
    for name, seconds in latency.items():
        assert told[f"gen_ai.latency.{name}"] == pytest.approx(seconds)
    gaps = [told[f"twostroke.gaps.{cause}"] for cause in CAUSES]
    assert sum(gaps) == pytest.approx(record.decode_s)
    worst = sum(told[f"twostroke.worst_gap.{cause}"] for cause in CAUSES)
    assert worst == pytest.approx(told["twostroke.worst_gap"])
    assert worst > 0
    assert "fox" not in str(span), "no text is in a span"
    assert collector.resources[0]["service.name"] == "twostroke"


def test_continuations_share_a_span_and_prompts_do_not(folder: Path) -> None:
    with (
        http_collector() as (collector, endpoint),
        running(tiny_llm(folder), otlp_traces_endpoint=endpoint) as server,
    ):
        asked(server, {**BODY, "n": 3})
        (span,) = collector.wait()
        told = _plain(span.attributes)
        assert told["gen_ai.usage.completion_tokens"] == 36
        assert told["gen_ai.usage.num_sequences"] == told["gen_ai.request.n"] == 3
        assert told["gen_ai.response.finish_reasons"] == ["length"] * 3
        asked(server, {**BODY, "prompt": ["one", "two"]}, traceparent=f"00-{TRACE}-{PARENT}-01")
        _, first, second = collector.wait(3)
        assert first.trace_id == second.trace_id == bytes.fromhex(TRACE)


@pytest.mark.parametrize("given", ["", "00-zz-1-01", f"00-{'0' * 32}-{PARENT}-01", "x" * 2000])
def test_a_traceparent_that_is_none_begins_a_trace(folder: Path, given: str) -> None:
    with (
        http_collector() as (collector, endpoint),
        running(tiny_llm(folder), otlp_traces_endpoint=endpoint) as server,
    ):
        asked(server, BODY, traceparent=given)
        (span,) = collector.wait()
        assert span.parent_span_id == b""
        assert any(span.trace_id)


def test_one_that_is_left_is_told_as_aborted(folder: Path) -> None:
    with (
        http_collector() as (collector, endpoint),
        running(tiny_llm(folder), otlp_traces_endpoint=endpoint) as server,
    ):
        connection = http.client.HTTPConnection("127.0.0.1", server.port)
        body = json.dumps({**BODY, "max_tokens": 230, "stream": True})
        connection.request("POST", TEXT, body, JSON)
        connection.getresponse().readline()
        connection.sock.close()
        connection.close()
        (span,) = collector.wait()
        assert _plain(span.attributes)["gen_ai.response.finish_reasons"] == ["abort"]
        refused, _, _ = server.ask("POST", TEXT, {"prompt": [5] * 9999})
        assert refused == 400
        assert len(server.app.service.tracing._traced) == 0  # type: ignore[union-attr]


def test_without_a_collector_requests_are_answered_and_the_end_is_soon(folder: Path) -> None:
    dead = "http://127.0.0.1:9/v1/traces"
    with running(tiny_llm(folder), otlp_traces_endpoint=dead) as server:
        for _ in range(5):
            asked(server, BODY)


def test_grpc_is_spoken_where_nothing_else_is_said(folder: Path) -> None:
    grpc = pytest.importorskip("grpc")
    from opentelemetry.proto.collector.trace.v1 import trace_service_pb2_grpc as stubs

    collector = Collector()

    class Servicer(stubs.TraceServiceServicer):  # type: ignore[misc]
        def Export(self, request: Any, context: Any) -> Any:  # noqa: N802
            collector.take(request)
            return service.ExportTraceServiceResponse()

    receiver = grpc.server(ThreadPoolExecutor(2))
    stubs.add_TraceServiceServicer_to_server(Servicer(), receiver)
    port = receiver.add_insecure_port("127.0.0.1:0")
    receiver.start()
    try:
        with running(tiny_llm(folder), otlp_traces_endpoint=f"http://127.0.0.1:{port}") as server:
            asked(server, BODY)
            (span,) = collector.wait()
            assert span.name == "llm_request"
    finally:
        receiver.stop(0)


def without_sdk(name: str) -> None:
    if name.startswith("opentelemetry"):
        raise ModuleNotFoundError(name)


def test_the_flag_without_the_packages_says_what_to_install(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    resolve: Callable[..., Any] = serve_settings
    parser = Parser()
    here = argparse.Namespace(otlp_traces_endpoint="grpc://collector:4317", parser=parser)
    nothing = argparse.Namespace(parser=parser)
    assert resolve(here).otlp_traces_endpoint == "grpc://collector:4317"
    monkeypatch.setenv("OTEL_EXPORTER_OTLP_ENDPOINT", "http://collector:4318")
    assert resolve(nothing).otlp_traces_endpoint == ""
    monkeypatch.setattr("twostroke.serve.monitor.tracing.find_spec", without_sdk)
    assert resolve(here) is None
    assert "pip install 'twostroke[otel]'" in parser.problems[0]
    assert resolve(nothing).otlp_traces_endpoint is None
    assert "traces are not exported" in capsys.readouterr().err
