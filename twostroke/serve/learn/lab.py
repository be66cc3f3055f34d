"""`Lab`: the experiments of `/learn`. Each one is a real run whose picture comes from its records.

    experiment ─▶ arms (an engine each) × script (requests, some sent when another has written)
               ─▶ the records of those requests, and of the steps that they took part in

An arm without overrides runs on the server's engine, beside whatever else runs there. An arm with
overrides has an engine of its own, with these settings, which ends with the experiment; a server
starts one only with `learn_engines`. One experiment runs at a time, with the requests of its script
alone, for `MAX_RUN_S` at the most.
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
from twostroke.request import SamplingParams
from twostroke.serve.error_responses import ApiError, retry_after
from twostroke.serve.fields.response_fields import Json
from twostroke.serve.generation.service import Service
from twostroke.serve.routes.record_routes import request_json, step_json

MAX_RUN_S = 180.0
MAX_PROMPT, MAX_OUTPUT, MAX_STREAMS = 2048, 128, 16
OF_REQUESTS = ("chunks", "first", "late")
CANDIDATES = 20  # tokens whose log-probability is told, at each position
# Prompt length and streams, one group after the other. The last groups have one stream each: part
# of the step-time model follows the newest steps.
CALIBRATION = (
    *((16, 1), (512, 1), (64, 4), (1024, 1), (192, 2), (384, 1)),
    *((96, 1), (1536, 1), (32, 8), (256, 1), (768, 1), (48, 1)),
)
WARM_UP = ((64, 1), (384, 1), (128, 1), (256, 1))


class Ask(NamedTuple):
    """A request of a script. `after`: (another request, tokens): sent when that one has written
    so many."""

    name: str
    tokens: Sequence[int]
    max_tokens: int
    after: tuple[int, int] | None = None
    shares: str = ""  # requests with the same word may share cached prefixes


@dataclass(frozen=True, slots=True)
class Arm:
    name: str
    overrides: dict[str, Any] = field(default_factory=dict)  # of `EngineConfig`
    pools: bool = False  # an engine for each phase, with half of the cores each
    warm: bool = False  # run a few requests first, so that the pacer knows this engine's steps


@dataclass(frozen=True, slots=True)
class Experiment:
    arms: tuple[Arm, ...]
    script: Sequence[Ask]
    params: dict[str, Any] = field(default_factory=dict)  # of `SamplingParams`


def filler(count: int, first: int, vocab_size: int) -> list[int]:
    """Token ids that no other call begins with the same: what they say does not matter."""
    return [5 + (first * 7919 + n * 104729) % max(1, vocab_size - 5) for n in range(count)]


class Lab:
    """The one place that runs experiments, one at a time."""

    def __init__(self, service: Service) -> None:
        self._service = service
        self._running = False
        self._count = 0  # of prompts made, so that none begins like another

    # ── the experiments ─────────────────────────────────────────────────────────────────────

    def prompt(self, count: int) -> list[int]:
        self._count += 1
        return filler(count, self._count, self._service.client.info.vocab_size)

    def text(self, tokens: Sequence[int], max_tokens: int, params: dict[str, Any]) -> Experiment:
        """The reader's own prompt. The same prompt finds its blocks cached the second time."""
        ask = Ask("you", tokens, max_tokens, shares="text")
        return Experiment((Arm("this server"),), [ask], {"logprobs": CANDIDATES, **params})

    def predict(self, prompt: int, output: int, streams: int, rounds: int) -> Experiment:
        """`rounds`: how often the streams run, one round after the other."""
        return Experiment((Arm("this server"),), self._asks(((prompt, streams),) * rounds, output))

    def calibration(self) -> Experiment:
        """Steps of many sizes, from which the step-time model learns what this machine takes."""
        asks = self._asks(self._short_enough(CALIBRATION), 12)
        return Experiment((Arm("this server"),), asks)

    def _asks(self, groups: Sequence[tuple[int, int]], output: int) -> list[Ask]:
        """Groups of a prompt length and a number of streams, one group after the other."""
        asks: list[Ask] = []
        for size, streams in groups:
            after = (len(asks) - 1, output) if asks else None
            asks += [Ask(str(size), self.prompt(size), output, after) for _ in range(streams)]
        return asks

    def _short_enough(self, groups: Sequence[tuple[int, int]]) -> list[tuple[int, int]]:
        """The groups, with prompts that this engine has room for."""
        return [(min(size, self._longest()), streams) for size, streams in groups]

    def stall(self) -> Experiment:
        """Somebody reads an answer when a long prompt arrives."""
        long = min(1500, self._longest())
        script = [
            Ask("you", self.prompt(32), 80),
            Ask("visitor", self.prompt(long), 8, after=(0, 24)),
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
        return Experiment(self._possible(arms), script)

    def prefix(self) -> Experiment:
        prompt = self.prompt(min(768, self._longest()))
        salt = uuid4().hex
        return Experiment(
            (Arm("this server"),),
            [
                Ask("first", prompt, 8, shares=salt),
                Ask("second", prompt, 8, after=(0, 8), shares=salt),
            ],
        )

    def full_cache(self) -> Experiment:
        """Four streams that end up with more tokens than the cache has room for: more than the
        scheduler keeps free for their growth (`SchedulerConfig.lookahead`)."""
        output = max(1, min(200, self._service.client.info.max_model_len - 40))
        script = [Ask(f"stream {n + 1}", self.prompt(32), output) for n in range(4)]
        small = {"num_gpu_blocks_override": 44, "max_model_len": 256, "max_num_seqs": 8}
        large = {**small, "num_gpu_blocks_override": 256}
        return Experiment(
            self._possible((Arm("44 blocks", small), Arm("256 blocks", large))), script
        )

    def batch(self) -> Experiment:
        """Decoding alone, then in company of 2, 4, 8 and 16."""
        groups = [(16, streams) for streams in (1, 2, 4, 8, 16)]
        return Experiment((Arm("this server"),), self._asks(groups, 24))

    def context(self) -> Experiment:
        """One stream behind prompts that get longer: what decode reads of the cache."""
        groups = self._short_enough([(size, 1) for size in (16, 256, 512, 1024, 1792)])
        return Experiment((Arm("this server"),), self._asks(groups, 16))

    def _longest(self) -> int:
        info = self._service.client.info
        return max(1, min(MAX_PROMPT, info.max_model_len - MAX_OUTPUT, info.kv_tokens // 2))

    def _possible(self, arms: tuple[Arm, ...]) -> tuple[Arm, ...]:
        if self.has_engines:
            return arms
        return (Arm("this server"),)

    @property
    def has_engines(self) -> bool:
        settings = self._service.settings
        return settings.learn_engines and settings.engine is not None

    # ── running ─────────────────────────────────────────────────────────────────────────────

    async def run(self, experiment: Experiment) -> Json:
        """The arms one after the other. Raises `ApiError` 429 while another experiment runs."""
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

    async def _arm(self, arm: Arm, experiment: Experiment) -> Json:
        async with self._engine(arm) as client:
            if arm.warm:
                asks = self._asks(self._short_enough(WARM_UP), 8)
                await self._script(client, asks, {})
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
                "steps": [_without_requests(step_json(one)) for one in steps],
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
        self, client: EngineClient, script: Sequence[Ask], params: dict[str, Any]
    ) -> list[_Run]:
        """Run all requests, and leave none behind."""
        admission = self._service.admission
        with admission.enter(min(len(script), MAX_STREAMS, admission.max_choices)):
            runs = [_Run(ask) for ask in script]
            play = _Play(client, runs, params)
            try:
                play.start()
                await play.done
            finally:
                play.leave()
        return runs


class _Run:
    """One request of a script while it runs."""

    def __init__(self, ask: Ask) -> None:
        self.ask, self.request_id = ask, f"learn-{uuid4().hex[:12]}"
        self.state: Any = None
        self.written: list[int] = []
        self.candidates: list[Json] = []
        self.text = ""
        self.finished = False

    def as_json(self) -> Json:
        return {
            "name": self.ask.name,
            "output_tokens": self.written,
            "candidates": self.candidates,
            "text": self.text,
        }

    def hear(self, output: RequestOutput) -> None:
        (one,) = output.outputs
        self.text, self.written, self.finished = one.text, list(one.token_ids), output.finished
        if output.finished and one.logprobs is not None:
            self.candidates = [_candidates(entry) for entry in one.logprobs.plain()]


def _without_requests(step: Json) -> Json:
    """Without the fields that tell of single requests, which may be other clients'."""
    return {name: value for name, value in step.items() if name not in OF_REQUESTS}


def _candidates(entry: Any) -> Json:
    (chosen, *ids), (own, *values) = entry.token_ids, entry.logprobs
    return {
        "chosen": chosen,
        "logprob": round(own, 4),
        "ids": ids,
        "logprobs": [round(value, 4) for value in values],
    }


class _Play:
    """A script that runs: sends each request when it is due."""

    def __init__(self, client: EngineClient, runs: list[_Run], params: dict[str, Any]) -> None:
        self._client, self._runs, self._params = client, runs, params
        self._salt = uuid4().hex
        self.done: asyncio.Future[None] = asyncio.get_running_loop().create_future()

    def start(self) -> None:
        for run in self._runs:
            if run.ask.after is None:
                self._send(run)

    def _send(self, run: _Run) -> None:
        ask = run.ask
        params = {"temperature": 0.0, "ignore_eos": True, **self._params}
        request = self._client.input_processor.process(
            {"prompt_token_ids": list(ask.tokens), "cache_salt": ask.shares or run.request_id},
            SamplingParams(max_tokens=ask.max_tokens, **params),
        )
        run.state = self._client.submit(request, self._hearing(run), self._fail, run.request_id)

    def _hearing(self, run: _Run) -> Callable[[RequestOutput], None]:
        def hear(output: RequestOutput) -> None:
            run.hear(output)
            try:
                self._go_on()
            except (RequestError, EngineError) as error:
                self._fail(error)

        return hear

    def _go_on(self) -> None:
        for run in self._runs:
            after = run.ask.after
            if run.state is None and after is not None:
                other = self._runs[after[0]]
                if len(other.written) >= after[1] or other.finished:
                    self._send(run)
        if all(run.finished for run in self._runs) and not self.done.done():
            self.done.set_result(None)

    def _fail(self, error: Exception) -> None:
        if not self.done.done():
            self.done.set_exception(error)

    def leave(self) -> None:
        for run in self._runs:
            if run.state is not None and not run.finished:
                self._client.leave(run.state)


async def _records_of(client: EngineClient, runs: Sequence[_Run]) -> list[RequestRecord]:
    """The records of requests that have ended: each comes with, or right after, the last output."""
    wanted = {run.request_id for run in runs}
    for _ in range(200):
        found = {one.request_id: one for one in list(client.records.requests)}
        if wanted <= found.keys():
            return [found[run.request_id] for run in runs]
        await asyncio.sleep(0.01)
    raise ApiError(503, "the records of the experiment are gone; the server has too much to do")


def _steps_of(client: EngineClient, records: Sequence[RequestRecord]) -> list[StepRecord]:
    """The steps from the first to the last that these requests had a part in."""
    numbers = {step for record in records for _, step, _, _ in record.chunks}
    numbers.update(step for record in records for step in record.token_step)
    steps = list(client.records.steps)
    own = [one for one in steps if one.step in numbers]
    begin_s = min((one.planned_s for one in own), default=0.0)
    end_s = max((one.committed_s for one in own), default=0.0)
    return [one for one in steps if begin_s <= one.planned_s and one.committed_s <= end_s]
