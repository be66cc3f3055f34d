"""OpenTelemetry: one span for each request, made from the request's records after its end. With
several engines it has a child span for the time in each engine, and for each fetch of KV blocks.

    GenerateRoute ──▶ begin(name, headers, params)          the client's trace context
    Records         ──▶ add_request(record) ──▶ span ──▶ the SDK's queue ──▶ its own thread ──▶ OTLP

Names of spans and attributes are those of vLLM and SGLang. Attributes that exist only here begin
with `twostroke.`. Spans contain no text of requests. The queue is bounded and drops spans if the
collector is slow or absent, so that requests are not delayed.
"""

from __future__ import annotations

import asyncio
import logging
import threading
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from importlib.util import find_spec
from time import monotonic, time_ns
from typing import Any

from twostroke import __version__, environment
from twostroke.errors import ConfigError
from twostroke.observe.record import Causes, RequestRecord, StepRecord
from twostroke.request import FinishReason, SamplingParams
from twostroke.serve.http.http_request import HttpRequest

SPAN = "llm_request"
HEADERS = ("traceparent", "tracestate")  # W3C's
FORGET_S = 60.0  # time after the response in which a record may arrive; a refused request has none
CLOSE_TIMEOUT_S = 3.0
PROTOCOLS = ("grpc", "http/protobuf")
INSTALL = "pip install 'twostroke[otel]'"

log = logging.getLogger(__name__)


@dataclass(slots=True)
class TracedRequest:
    request_id: str  # as in the response
    params: SamplingParams
    carrier: dict[str, str]
    records: list[RequestRecord] = field(default_factory=list)  # of ended continuations


class Tracing:
    """A listener of the records, which writes spans. `endpoint`: "" to use OTEL_EXPORTER_OTLP_*."""

    def __init__(self, endpoint: str, model: str) -> None:
        self._model = model
        self._traced: dict[str, TracedRequest] = {}  # by the engine's request id
        self._provider, self._sdk = _provider(endpoint)
        self._tracer = self._provider.get_tracer("twostroke", __version__)
        self._propagator = self._sdk.propagator()

    def begin(
        self,
        names: Sequence[str],
        request_id: str,
        http: HttpRequest,
        params: Sequence[SamplingParams],
    ) -> None:
        """Trace a request. `names`: the engine's request ids, one for each prompt. `params`: one
        for each id. `request_id`: the id in the response."""
        found = {header: http.header(header.encode()) for header in HEADERS}
        carrier = {header: text.decode("latin-1") for header, text in found.items() if text}
        for name, prompt_params in zip(names, params, strict=True):
            self._traced[name] = TracedRequest(request_id, prompt_params, carrier)

    def end(self, names: Sequence[str]) -> None:
        """Forget a request `FORGET_S` after the end of its response."""
        for name in names:
            if name in self._traced:
                asyncio.get_running_loop().call_later(FORGET_S, self._traced.pop, name, None)

    def add_step(self, record: StepRecord) -> None:
        pass

    def add_request(self, record: RequestRecord) -> None:
        name = record.family or record.request_id
        traced = self._traced.get(name)
        if traced is None:
            return
        traced.records.append(record)
        if len(traced.records) < record.n:
            return
        self._traced.pop(name, None)
        try:
            self._write(traced)
        except Exception:
            log.exception("a span could not be written")

    def _write(self, traced: TracedRequest) -> None:
        sdk, records = self._sdk, traced.records
        clock = time_ns() - int(monotonic() * 1e9)  # from the monotonic clock to Unix time

        def at(seconds: float) -> int:
            return clock + int(seconds * 1e9)

        span = self._tracer.start_span(
            SPAN,
            context=self._propagator.extract(traced.carrier),
            kind=sdk.SpanKind.SERVER,
            attributes=dict(attributes(traced, self._model)),
            start_time=at(min(record.received_s for record in records)),
        )
        for name, seconds in _events(records):
            span.add_event(name, timestamp=at(seconds))
        for name, began_s, ended_s, more in _engine_spans(records):
            child = self._tracer.start_span(
                name, sdk.set_span_in_context(span), attributes=more, start_time=at(began_s)
            )
            child.end(at(ended_s))
        if any(record.finish_reason == FinishReason.ERROR for record in records):
            span.set_status(sdk.StatusCode.ERROR)
        span.end(at(max(record.finished_s for record in records)))

    async def close(self) -> None:
        """Send remaining spans, for at most `CLOSE_TIMEOUT_S`."""
        thread = threading.Thread(target=self._provider.shutdown, daemon=True)
        thread.start()
        await asyncio.to_thread(thread.join, CLOSE_TIMEOUT_S)


def attributes(traced: TracedRequest, model: str) -> Iterator[tuple[str, Any]]:
    """Yield the attributes of a span. With several continuations: the earliest beginning, the
    latest end, and sums of counts."""
    records, params = traced.records, traced.params
    begun = [record for record in records if record.token_s]
    received_s = min(record.received_s for record in records)
    yield "gen_ai.request.id", traced.request_id
    yield "gen_ai.response.model", model
    yield "gen_ai.request.temperature", float(params.temperature)
    yield "gen_ai.request.top_p", float(params.top_p)
    yield "gen_ai.request.top_k", params.top_k
    yield "gen_ai.request.n", params.n
    if params.max_tokens is not None:
        yield "gen_ai.request.max_tokens", params.max_tokens
    yield "gen_ai.response.finish_reasons", [str(record.finish_reason) for record in records]
    yield "gen_ai.usage.num_sequences", len(records)
    yield "gen_ai.usage.prompt_tokens", records[0].num_prompt
    yield "gen_ai.usage.cached_tokens", min(record.num_cached for record in records)
    yield "gen_ai.usage.completion_tokens", sum(len(record.token_s) for record in records)
    yield "gen_ai.latency.e2e", max(record.finished_s for record in records) - received_s
    scheduled = [record.scheduled_s for record in records if record.scheduled_s]
    if scheduled:
        yield "gen_ai.latency.time_in_queue", min(scheduled) - received_s
    if begun:
        first_s = min(record.first_token_s for record in begun)
        last_s = max(record.token_s[-1] for record in begun)
        yield "gen_ai.latency.time_to_first_token", first_s - received_s
        yield "gen_ai.latency.time_in_model_prefill", first_s - min(scheduled)
        yield "gen_ai.latency.time_in_model_decode", last_s - first_s
        yield "gen_ai.latency.time_in_model_inference", last_s - min(scheduled)
    if records[0].route:
        yield "twostroke.route", records[0].route
    yield "twostroke.preemptions", sum(len(record.preempted) for record in records)
    gaps = Causes(*map(sum, zip(*(record.gaps for record in records), strict=True)))
    yield from _causes("twostroke.gaps", gaps)
    worst = max(records, key=lambda record: record.worst_gap_s)
    yield "twostroke.worst_gap", worst.worst_gap_s
    if worst.worst_gap is not None:
        yield from _causes("twostroke.worst_gap", worst.worst_gap)


def _causes(prefix: str, causes: Causes) -> Iterator[tuple[str, float]]:
    for cause, seconds in causes._asdict().items():
        yield f"{prefix}.{cause}", seconds


def _events(records: Sequence[RequestRecord]) -> Iterator[tuple[str, float]]:
    for record in records:
        if record.scheduled_s:
            yield "scheduled", record.scheduled_s
        if record.token_s:
            yield "first_token", record.first_token_s
        for seconds, _ in record.preempted:
            yield "preempted", seconds


def _engine_spans(
    records: Sequence[RequestRecord],
) -> Iterator[tuple[str, float, float, dict[str, Any]]]:
    """Yield the child spans: name, begin, end, attributes. With one engine there are none."""
    for record in records:
        ends = [*(span.began_s for span in record.stays[1:]), record.finished_s]
        for span, ended_s in zip(record.stays, ends, strict=False):
            engine = {"twostroke.engine": span.engine}
            yield f"engine {span.engine}", span.began_s, ended_s, engine
            if span.fetched_s:
                more: dict[str, Any] = {"twostroke.fetch.bytes": span.fetched_bytes, **engine}
                more["twostroke.fetch.seconds"] = span.fetch_s
                # The message about a fetch may arrive after the record of the request's end.
                yield "kv_fetch", span.began_s, min(span.fetched_s, ended_s), more


# ── the SDK, which may not be installed ─────────────────────────────────────────────────────────


@dataclass(frozen=True, slots=True)
class Sdk:
    SpanKind: Any
    StatusCode: Any
    propagator: Any
    set_span_in_context: Any


def missing() -> str:
    """Return an error message if a package for traces is missing, else ""."""
    for name in (
        "opentelemetry.sdk.trace",
        "opentelemetry.exporter.otlp.proto.grpc",
        "opentelemetry.exporter.otlp.proto.http",
    ):
        try:
            if find_spec(name) is not None:
                continue
        except ImportError:
            pass
        return f"traces need {name}, which is not installed; get it with: {INSTALL}"
    return ""


def _provider(endpoint: str) -> tuple[Any, Sdk]:
    if problem := missing():
        raise ConfigError(problem)
    from opentelemetry.sdk.resources import SERVICE_NAME, Resource
    from opentelemetry.sdk.trace import TracerProvider
    from opentelemetry.sdk.trace.export import BatchSpanProcessor
    from opentelemetry.trace import SpanKind, StatusCode, set_span_in_context
    from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator

    resource = Resource.create()
    if str(resource.attributes[SERVICE_NAME]).startswith("unknown_service"):
        resource = resource.merge(Resource({SERVICE_NAME: "twostroke"}))
    provider = TracerProvider(resource=resource, shutdown_on_exit=False)
    provider.add_span_processor(BatchSpanProcessor(_exporter(_protocol(endpoint), endpoint)))
    return provider, Sdk(SpanKind, StatusCode, TraceContextTextMapPropagator, set_span_in_context)


def _protocol(endpoint: str) -> str:
    """Return the protocol: from OpenTelemetry's variables, else from the address, else gRPC as in
    vLLM."""
    if chosen := environment.otlp_protocol():
        name, protocol = chosen
        if protocol not in PROTOCOLS:
            raise ConfigError(f"{name} is {protocol!r}; {' and '.join(PROTOCOLS)} are supported")
        return protocol
    return "http/protobuf" if endpoint.rstrip("/").endswith("/v1/traces") else "grpc"


def _exporter(protocol: str, endpoint: str) -> Any:
    where = {"endpoint": endpoint} if endpoint else {}
    if protocol == "grpc":
        from opentelemetry.exporter.otlp.proto.grpc.trace_exporter import OTLPSpanExporter

        return OTLPSpanExporter(**where)
    from opentelemetry.exporter.otlp.proto.http import trace_exporter

    return trace_exporter.OTLPSpanExporter(**where)
