"""`Lab`: the experiments of `/learn`. An experiment runs requests in an engine, and the page draws
their records.

    experiment = arms (the engines to compare) × script (the requests that every arm runs)
    result     = the records of these requests and of their steps, for each arm

An arm without overrides runs on the server's engine, together with the requests of other clients.
An arm with overrides has an engine of its own, which ends with the experiment; it needs the setting
`learn_engines`. One experiment runs at a time, for at most `MAX_RUN_S`.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field, replace
from typing import Any, NamedTuple
from uuid import uuid4

from twostroke.engine.api import EngineClient
from twostroke.errors import EngineError, RequestError
from twostroke.observe.record import RequestRecord, StepRecord
from twostroke.outputs import RequestOutput
from twostroke.request import EngineRequest, SamplingParams
from twostroke.serve.error_responses import ApiError, retry_after
from twostroke.serve.fields.response_json import Json
from twostroke.serve.generation.service import Service
from twostroke.serve.routes.record_routes import request_json, step_json

MAX_RUN_S = 180.0
MAX_PROMPT, MAX_OUTPUT, MAX_STREAMS = 2048, 128, 16
PER_REQUEST_FIELDS = ("chunks", "first", "late")
CANDIDATES = 20  # tokens with a log-probability, at each position
# Groups of (prompt length, number of streams), run one after the other. A forecast ignores the
# first step of an engine. The next steps are long, so that other work of a new engine has little
# weight. The last groups have one stream each, because the step-time model follows new steps. Short
# prompts are repeated, because a stall of the machine is long compared with their steps.
CALIBRATION = (
    *((512, 1), (1024, 1), (64, 4), (16, 1), (192, 2), (384, 1), (96, 1)),
    *((1536, 1), (32, 8), (256, 1), (24, 1), (768, 1), (48, 1), (128, 1), (32, 1), (64, 1)),
    *((20, 1), (96, 1), (40, 1)),
)
EXAMPLE_TEXT = (  # the prompt that the page proposes
    "Once upon a time there was a small robot that read whole books in a moment. When it had to "
    "tell what it had read, it spoke slowly, one word after the other, and before each word it "
    "went through everything that it knew. One day a child asked the robot to"
)
WARM_UP = ((64, 1), (384, 1), (128, 1), (256, 1))  # groups, as in `CALIBRATION`


class ScriptedRequest(NamedTuple):
    """A request of a script. `after`: (index of another request, number of tokens): the request is
    sent when the other request has written this number of tokens."""

    name: str
    tokens: Sequence[int]
    max_tokens: int
    after: tuple[int, int] | None = None
    prefix_scope: str = ""  # requests with the same scope may share cached prefixes


@dataclass(frozen=True, slots=True)
class Arm:
    name: str
    overrides: dict[str, Any] = field(default_factory=dict)  # of `EngineConfig`
    pools: bool = False  # one engine for each phase, each with half of the cores
    warm: bool = False  # run a few requests first, because the first steps of an engine are slow


@dataclass(frozen=True, slots=True)
class LabExperiment:
    arms: tuple[Arm, ...]
    script: Sequence[ScriptedRequest]
    params: dict[str, Any] = field(default_factory=dict)  # of `SamplingParams`


def filler(count: int, first: int, vocab_size: int) -> list[int]:
    """Return arbitrary token ids. Calls with another `first` return another first token."""
    return [5 + (first * 7919 + n * 104729) % max(1, vocab_size - 5) for n in range(count)]


class Lab:
    """Runs experiments, one at a time."""

    def __init__(self, service: Service) -> None:
        self._service = service
        self._running = False
        self._count = 0  # number of prompts, so that no two prompts share a prefix

    # ── the experiments ─────────────────────────────────────────────────────────────────────

    def prompt(self, count: int) -> list[int]:
        self._count += 1
        return filler(count, self._count, self._service.client.info.vocab_size)

    def text(self, tokens: Sequence[int], max_tokens: int, params: dict[str, Any]) -> LabExperiment:
        """A prompt of the reader. A second run of the same prompt finds its blocks cached."""
        request = ScriptedRequest("you", tokens, max_tokens, prefix_scope="text")
        return LabExperiment((Arm("this server"),), [request], {"logprobs": CANDIDATES, **params})

    def predict(self, prompt: int, output: int, streams: int, rounds: int) -> LabExperiment:
        """Streams to compare with a forecast. They run `rounds` times, one after the other."""
        return LabExperiment(
            (Arm("this server"),), self._requests(((prompt, streams),) * rounds, output)
        )

    def calibration(self) -> LabExperiment:
        """Steps of many sizes, from which the step-time model learns the speed of this machine."""
        requests = self._requests(self._short_enough(CALIBRATION), 12)
        return LabExperiment((Arm("this server"),), requests)

    def _requests(self, groups: Sequence[tuple[int, int]], output: int) -> list[ScriptedRequest]:
        """Return requests for groups (`CALIBRATION`); a group waits for the end of the previous."""
        requests: list[ScriptedRequest] = []
        for size, streams in groups:
            after = (len(requests) - 1, output) if requests else None
            requests += [
                ScriptedRequest(str(size), self.prompt(size), output, after) for _ in range(streams)
            ]
        return requests

    def _short_enough(self, groups: Sequence[tuple[int, int]]) -> list[tuple[int, int]]:
        """Return the groups, with prompts shortened to fit this engine."""
        return [(min(size, self._longest()), streams) for size, streams in groups]

    def stall(self) -> LabExperiment:
        """A long prompt arrives while another request is decoding."""
        long = min(1500, self._longest())
        script = [
            ScriptedRequest("you", self.prompt(32), 80),
            ScriptedRequest("visitor", self.prompt(long), 8, after=(0, 24)),
        ]
        room = {"max_model_len": long + 64, "max_num_seqs": 8, "num_gpu_blocks_override": 256}
        arms: tuple[Arm, ...] = (
            Arm("one piece", {**room, "enable_chunked_prefill": False}, warm=True),
            Arm(
                "chunks of 128",
                {**room, "max_num_batched_tokens": 128, "max_decode_stall": 0},
                warm=True,
            ),
            Arm("a goal of 50 ms", {**room, "itl_slo_ms": 50.0}, warm=True),
        )
        if self._service.client.info.threads:  # on a CPU: a GPU has no room for two engines
            arms += (Arm("two pools", room, pools=True, warm=True),)
        return LabExperiment(self._allowed_arms(arms), script)

    def prefix(self) -> LabExperiment:
        """The same prompt twice: the second request finds its blocks cached."""
        prompt = self.prompt(min(768, self._longest()))
        salt = uuid4().hex
        return LabExperiment(
            (Arm("this server"),),
            [
                ScriptedRequest("first", prompt, 8, prefix_scope=salt),
                ScriptedRequest("second", prompt, 8, after=(0, 8), prefix_scope=salt),
            ],
        )

    def full_cache(self) -> LabExperiment:
        """Four streams that in the end need more tokens than the cache holds. They also grow by
        more tokens than the scheduler keeps free (`SchedulerConfig.lookahead`)."""
        longest = self._service.client.info.max_model_len
        output = max(1, min(200, longest - 40))
        script = [ScriptedRequest(f"stream {n + 1}", self.prompt(32), output) for n in range(4)]
        small = {
            "num_gpu_blocks_override": 44,
            "max_model_len": min(448, longest),
            "max_num_seqs": 8,
        }
        large = {**small, "num_gpu_blocks_override": 256}
        return LabExperiment(
            self._allowed_arms(
                (Arm("44 blocks", small, warm=True), Arm("256 blocks", large, warm=True))
            ),
            script,
        )

    def batch(self) -> LabExperiment:
        """Decoding with 1, 2, 4, 8 and 16 streams."""
        groups = [(16, streams) for streams in (1, 2, 4, 8, 16)]
        return LabExperiment((Arm("this server"),), self._requests(groups, 24))

    def context(self) -> LabExperiment:
        """One stream with prompts of growing length: decode reads more of the cache each time."""
        groups = self._short_enough([(size, 1) for size in (16, 256, 512, 1024, 1792)])
        return LabExperiment((Arm("this server"),), self._requests(groups, 16))

    def _longest(self) -> int:
        info = self._service.client.info
        return max(1, min(MAX_PROMPT, info.max_model_len - MAX_OUTPUT, info.kv_tokens // 2))

    def _allowed_arms(self, arms: tuple[Arm, ...]) -> tuple[Arm, ...]:
        if self.has_engines:
            return arms
        return (Arm("this server"),)

    @property
    def has_engines(self) -> bool:
        settings = self._service.settings
        return settings.learn_engines and settings.engine is not None

    # ── running ─────────────────────────────────────────────────────────────────────────────

    async def run(self, experiment: LabExperiment) -> Json:
        """Run the arms one after the other. Raise `ApiError` 429 while another experiment runs."""
        if self._running:
            raise ApiError(
                429,
                "an experiment is running already; wait until it has ended",
                code="experiment_running",
                headers=retry_after(5),
            )
        self._running = True
        try:
            async with asyncio.timeout(MAX_RUN_S):
                return {"arms": [await self._arm(arm, experiment) for arm in experiment.arms]}
        except TimeoutError:
            raise ApiError(
                503,
                f"the experiment took longer than {MAX_RUN_S:g} s and was ended; try again when "
                "the server has less to do",
                code="experiment_timeout",
            ) from None
        finally:
            self._running = False

    async def _arm(self, arm: Arm, experiment: LabExperiment) -> Json:
        async with self._engine(arm) as client:
            if arm.warm:
                requests = self._requests(self._short_enough(WARM_UP), 8)
                await self._script(client, requests, {})
            runs = await self._script(client, experiment.script, experiment.params)
            records = await _records_of(client, runs)
            steps = _steps_of(client, records)
            info = client.info
            return {
                "name": arm.name,
                "settings": arm.overrides,
                "block_size": info.block_size,
                "kv_tokens": info.kv_tokens,
                "max_num_batched_tokens": info.max_num_batched_tokens,
                "requests": [
                    {**request_json(record), **run.as_json()}
                    for record, run in zip(records, runs, strict=True)
                ],
                "steps": [_without_requests(step_json(step)) for step in steps],
            }

    @asynccontextmanager
    async def _engine(self, arm: Arm) -> AsyncIterator[EngineClient]:
        service = self._service
        if not arm.overrides:
            yield service.client
            return
        from twostroke.engine.remote import RemoteEngine
        from twostroke.route.pool_settings import PoolSettings
        from twostroke.route.routed_engine import RoutedEngine

        assert service.settings.engine is not None
        config = replace(
            service.settings.engine, **{"max_num_batched_tokens": None, **arm.overrides}
        )
        if arm.pools:
            engines = PoolSettings(prefill_engines=1, decode_engines=1).engines(config)
            async with await RoutedEngine.start(engines) as routed:
                yield routed
        else:
            async with await RemoteEngine.start(config) as client:
                yield client

    async def _script(
        self, client: EngineClient, script: Sequence[ScriptedRequest], params: dict[str, Any]
    ) -> list[_RunningRequest]:
        """Run all requests of the script; abort them if the experiment ends early."""
        admission = self._service.admission
        with admission.enter(min(len(script), MAX_STREAMS, admission.max_choices)):
            runs = [_RunningRequest(request) for request in script]
            running = _RunningScript(client, runs, params)
            try:
                running.start()
                await running.done
            finally:
                running.abort()
        return runs


class _RunningRequest:
    """A request of a script while it runs."""

    def __init__(self, request: ScriptedRequest) -> None:
        self.request, self.request_id = request, f"learn-{uuid4().hex[:12]}"
        self.state: Any = None
        self.written: list[int] = []
        self.candidates: list[Json] = []
        self.text = ""
        self.finished = False

    def as_json(self) -> Json:
        return {
            "name": self.request.name,
            "output_tokens": self.written,
            "candidates": self.candidates,
            "text": self.text,
        }

    def on_output(self, output: RequestOutput) -> None:
        (completion,) = output.outputs
        self.text, self.written = completion.text, list(completion.token_ids)
        self.finished = output.finished
        if output.finished and completion.logprobs is not None:
            self.candidates = [_candidates(entry) for entry in completion.logprobs.plain()]


def _without_requests(step: Json) -> Json:
    """Remove the fields of a step about single requests, which may be those of other clients."""
    return {name: value for name, value in step.items() if name not in PER_REQUEST_FIELDS}


def _candidates(entry: Any) -> Json:
    (sampled, *ids), (logprob, *values) = entry.token_ids, entry.logprobs
    return {
        "chosen": sampled,
        "logprob": round(logprob, 4),
        "ids": ids,
        "logprobs": [round(value, 4) for value in values],
    }


class _RunningScript:
    """A running script. It sends each request when the request is due."""

    def __init__(
        self, client: EngineClient, runs: list[_RunningRequest], params: dict[str, Any]
    ) -> None:
        self._client, self._runs, self._params = client, runs, params
        self.done: asyncio.Future[None] = asyncio.get_running_loop().create_future()

    def start(self) -> None:
        self._send([run for run in self._runs if run.request.after is None])

    def _send(self, due: Sequence[_RunningRequest]) -> None:
        with self._client.together():
            for run in due:
                run.state = self._client.submit(
                    self._request(run), self._listener(run), self._fail, run.request_id
                )

    def _request(self, run: _RunningRequest) -> EngineRequest:
        scripted = run.request
        params = {"temperature": 0.0, "ignore_eos": True, **self._params}
        return self._client.input_processor.process(
            {
                "prompt_token_ids": list(scripted.tokens),
                "cache_salt": scripted.prefix_scope or run.request_id,
            },
            SamplingParams(max_tokens=scripted.max_tokens, **params),
        )

    def _listener(self, run: _RunningRequest) -> Callable[[RequestOutput], None]:
        def on_output(output: RequestOutput) -> None:
            run.on_output(output)
            try:
                self._send_due()
            except (RequestError, EngineError) as error:
                self._fail(error)

        return on_output

    def _send_due(self) -> None:
        self._send([run for run in self._runs if run.state is None and self._is_due(run)])
        if all(run.finished for run in self._runs) and not self.done.done():
            self.done.set_result(None)

    def _is_due(self, run: _RunningRequest) -> bool:
        assert run.request.after is not None
        index, num_tokens = run.request.after
        other = self._runs[index]
        return len(other.written) >= num_tokens or other.finished

    def _fail(self, error: Exception) -> None:
        if not self.done.done():
            self.done.set_exception(error)

    def abort(self) -> None:
        for run in self._runs:
            if run.state is not None and not run.finished:
                self._client.leave(run.state)


async def _records_of(client: EngineClient, runs: Sequence[_RunningRequest]) -> list[RequestRecord]:
    """Wait for the records of ended requests, which arrive with the last output or soon after."""
    wanted = {run.request_id for run in runs}
    for _ in range(200):
        found = {record.request_id: record for record in list(client.records.requests)}
        if wanted <= found.keys():
            return [found[run.request_id] for run in runs]
        await asyncio.sleep(0.01)
    raise ApiError(503, "the records of the experiment were overwritten; the server is too busy")


def _steps_of(client: EngineClient, records: Sequence[RequestRecord]) -> list[StepRecord]:
    """Return all steps from the first to the last step of these requests."""
    numbers = {number for record in records for _, number, _, _ in record.chunks}
    numbers.update(number for record in records for number in record.token_step)
    steps = list(client.records.steps)
    of_requests = [step for step in steps if step.step in numbers]
    begin_s = min((step.planned_s for step in of_requests), default=0.0)
    end_s = max((step.committed_s for step in of_requests), default=0.0)
    return [step for step in steps if begin_s <= step.planned_s and step.committed_s <= end_s]
