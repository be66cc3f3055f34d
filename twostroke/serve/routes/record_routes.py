"""`GET /records`: the step and request records of the last seconds, for tools."""

from __future__ import annotations

from time import monotonic, time
from typing import Any
from urllib.parse import parse_qs

import msgspec

from twostroke.config import EngineConfig
from twostroke.observe.machine import MachineReader
from twostroke.observe.record import RequestRecord, StepRecord
from twostroke.serve.error_responses import ApiError
from twostroke.serve.generation.prompts import ThreadPool
from twostroke.serve.generation.service import Service
from twostroke.serve.http.http_request import HttpRequest
from twostroke.serve.http.routing import Route

MAX_SECONDS = 600.0  # the ring buffers may hold less
NOT_SENT = ("slots",)  # fields of a step that only the engine uses


def record_routes(service: Service) -> list[Route]:
    return [Route("GET", "/records", RecordRoute(service), "Records of recent steps and requests.")]


class RecordRoute:
    def __init__(self, service: Service) -> None:
        self._records = service.client.records
        self._info = service.client.info
        self._pacing = pacing_of(service.settings.engine, self._info.device != "cpu")
        self._thread = ThreadPool("requests for records", 1, 4)
        self._machine = MachineReader(self._info.device.startswith("cuda"))

    async def __call__(self, http: HttpRequest) -> None:
        seconds = _seconds(http)
        since = monotonic() - seconds
        # These lists are copies, because the ring buffers change while a thread encodes them.
        steps = [step for step in self._records.steps if step.committed_s >= since]
        requests = [record for record in self._records.requests if record.finished_s >= since]
        if not http.is_admin:
            # Remove the fields about single requests, whose owners are not known here.
            steps = [step._replace(chunks=(), first=(), late=()) for step in steps]
            requests = [record for record in requests if http.may_see(record)]
        await http.respond(200, await self._thread.run(lambda: self._encode(steps, requests)))

    def _encode(self, steps: list[StepRecord], requests: list[RequestRecord]) -> bytes:
        info = self._info
        return msgspec.json.encode(
            {
                "schema_version": 1,
                "now_s": monotonic(),
                "unix_s": time(),
                "model": info.model_name,
                "device": info.device,
                "kv_tokens": info.kv_tokens,
                "kv_bytes": info.kv_bytes,
                "block_size": info.block_size,
                "max_num_seqs": info.max_num_seqs,
                "max_num_batched_tokens": info.max_num_batched_tokens,
                "max_model_len": info.max_model_len,
                "kv_groups": [group._asdict() for group in info.kv_groups],
                "pacing": self._pacing,
                "weights": info.weights or info.dtype,
                "weight_bytes": info.weight_bytes,
                "isa": info.isa,
                "isas": info.isas,
                "machine": self._machine.read().as_json(),
                "steps": [step_json(record) for record in steps],
                "requests": [request_json(record) for record in requests],
            }
        )


def pacing_of(config: EngineConfig | None, on_gpu: bool) -> dict[str, Any] | None:
    """Return the scheduler's settings, for simulations; None if they are unknown."""
    if config is None:
        return None
    ttft_s, itl_s = config.goals(on_gpu)
    return {
        "ttft_slo_s": ttft_s,
        "itl_slo_s": itl_s,
        "max_decode_stall": config.decode_stall(),
        "prefix_caching": config.enable_prefix_caching,
    }


def step_json(record: StepRecord) -> dict[str, Any]:
    found = record._asdict()
    for name in NOT_SENT:
        del found[name]
    for name in ("prefill", "decode", "kv", "since_s"):
        found[name] = found[name]._asdict()
    found["late"] = [gap._asdict() for gap in record.late]
    found["first"] = [first._asdict() for first in record.first]
    found["chunks"] = [chunk._asdict() for chunk in record.chunks]
    return found


def request_json(record: RequestRecord) -> dict[str, Any]:
    found = {name: getattr(record, name) for name in record.__slots__}
    found["token_s"], found["token_step"] = record.token_s.tolist(), record.token_step.tolist()
    found["gaps"] = record.gaps._asdict()
    del found["gap_causes"]  # these are only in the answer of the request
    found["stays"] = [stay._asdict() for stay in record.stays]
    found["worst_gap"] = None if record.worst_gap is None else record.worst_gap._asdict()
    return found


def _seconds(http: HttpRequest) -> float:
    query = parse_qs(http.scope.get("query_string", b"").decode("latin-1"))
    text = query.get("seconds", ["10"])[-1]
    try:
        seconds = float(text)
    except ValueError:
        seconds = -1.0
    if not 0 < seconds <= MAX_SECONDS:
        raise ApiError(400, f"seconds is a number up to {MAX_SECONDS:g}", param="seconds")
    return seconds
