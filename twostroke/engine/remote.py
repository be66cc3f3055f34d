"""`RemoteEngine`: an engine in a process of its own, so that the engine's loop and the HTTP side
never wait for each other's Python. No torch on this side.

    InputProcessor, OutputProcessor    here
    EngineCore                         there (`process.py`), behind a `Child`

When that process dies, or hangs and is killed, another is started. A request of which nothing has
been delivered is sent to the new one; one that has begun ends with an `EngineError`. After
several deaths in a row the engine has stopped for good: `lost` says why.

To `sleep` is to end the process on purpose, which frees all its memory; to `wake_up` is to start
another.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections import deque
from collections.abc import Iterable
from dataclasses import replace
from time import monotonic

import msgspec

from twostroke.config import EngineConfig
from twostroke.engine.api import EngineClient, EngineInfo, EngineLoad
from twostroke.engine.child import Child
from twostroke.engine.input_processor import InputProcessor, ModelLimits
from twostroke.engine.output_processor import OnError, OnOutput, OutputProcessor, RequestState
from twostroke.engine.spawn import DEFAULT_BUILDER, Spawned, spawn
from twostroke.engine.wire import (
    Abort,
    Add,
    Audit,
    Audited,
    FromEngine,
    Profiled,
    Refused,
    ResetPrefixes,
    StartProfile,
    Step,
    StopProfile,
    encode,
    unpack_error,
    unpack_step,
)
from twostroke.errors import EngineError, RequestError
from twostroke.kv.cache import KVUsage
from twostroke.model.load import chat_template_source, find_model, open_tokenizer
from twostroke.model.tokenizer import Tokenizer
from twostroke.observe.record import Records, RequestRecord
from twostroke.request import EngineRequest, FinishReason

MAX_ATTEMPTS = 4  # engines that one request may be sent to: it may be what kills them
MAX_QUICK_DEATHS = 6  # in a row, each within STEADY_S of its start
STEADY_S = 30.0
HANG_TIMEOUT_S = 30.0  # of silence; a thread of the engine's sends a `wire.Heartbeat`
# A step hangs when it takes so many times as long: the time-out, or the longest of the last steps.
HANGING_STEP, LONGEST_STEPS, RECENT_STEPS = 10, 20, 256
FIRST_BACKOFF_S, LONGEST_BACKOFF_S = 0.1, 5.0
STOP_PATIENCE_S = 10.0  # for a step that runs to be finished

log = logging.getLogger(__name__)


class RemoteEngine(EngineClient):
    """Start with `await RemoteEngine.start(config)`; use as `async with`, or `await close()`.
    Everything else is called in the event loop that started it."""

    def __init__(
        self,
        config: EngineConfig,
        builder: str,
        child: Child,
        input_processor: InputProcessor,
        info: EngineInfo,
        load: EngineLoad,
        hang_timeout_s: float,
        restart_limit: int,
    ) -> None:
        self.info = info
        self.input_processor = input_processor
        self._config, self._builder = config, builder
        self._child = child
        self._outputs = OutputProcessor(input_processor.tokenizer, config.seed)
        self._load = load
        self.records = Records()  # as the engine keeps them; they outlive it
        self.num_restarts = 0
        self._up = True
        self._lost: str = ""  # why there will be no engine any more
        self.lost: asyncio.Future[str] = asyncio.get_running_loop().create_future()  # the same
        self._hang_timeout_s, self._restart_limit = hang_timeout_s, restart_limit
        self._step_s: deque[float] = deque([0.0], RECENT_STEPS)  # what the last steps took
        self._next = 0  # handle
        self._handles: dict[str, int] = {}  # engine request → handle, while the engine has it
        self._names: dict[int, str] = {}  # and back
        self._audits: list[asyncio.Future[str]] = []
        self._profiles: list[asyncio.Future[bytes]] = []  # in the order of their answers
        self._some_ended = asyncio.Event()  # a request may have ended
        self._supervisors: list[asyncio.Task[None]] = []
        self._sleep_lock = asyncio.Lock()
        self._wanted = asyncio.Event()  # the engine is to run; cleared while it is to sleep
        self._wanted.set()
        self._settled = asyncio.Event()  # it runs, or never will again
        self._settled.set()

    # ── life ────────────────────────────────────────────────────────────────────────────────

    @classmethod
    async def start(
        cls,
        config: EngineConfig,
        builder: str = DEFAULT_BUILDER,
        spawned: Spawned | None = None,
        hang_timeout_s: float = HANG_TIMEOUT_S,
        restart_limit: int = MAX_QUICK_DEATHS,
    ) -> RemoteEngine:
        """`spawned`: the process, if it has been started already, with the same arguments.
        `hang_timeout_s`: an engine that is silent for so long is killed; 0: never.
        `restart_limit`: deaths in a row, soon after the start, that end it for good."""
        reading = asyncio.create_task(asyncio.to_thread(_open_text, config))
        child = Child(spawned or spawn(config, builder))
        starting = asyncio.create_task(child.start())
        try:
            (tokenizer, template), ready = await asyncio.gather(reading, starting)
        except BaseException:
            starting.cancel()
            await asyncio.wait((starting,))
            await child.kill()
            raise
        inputs = InputProcessor(tokenizer, template, _limits(ready.info))
        limits = hang_timeout_s, restart_limit
        engine = cls(config, builder, child, inputs, ready.info, ready.load, *limits)
        child.on_message = engine._on_message
        engine._supervisors.append(asyncio.create_task(engine._supervise()))
        if hang_timeout_s:
            engine._supervisors.append(asyncio.create_task(engine._watch()))
        return engine

    async def __aenter__(self) -> RemoteEngine:
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.close()

    async def close(self, drain: bool = False) -> None:
        """End the engine's process. Open requests are waited for (`drain`), or end with an
        `EngineError`."""
        if drain:
            await self.drain()
        for task in self._supervisors:
            task.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                await task
        self._give_up("the engine was closed")
        await self._child.stop(STOP_PATIENCE_S)

    async def drain(self, timeout_s: float | None = None) -> bool:
        """Wait until no request is left; False if some are, after so long."""
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(timeout_s):
                while self._outputs:
                    self._some_ended.clear()
                    await self._some_ended.wait()
        return not self._outputs

    async def sleep(self, drain: bool = False) -> None:
        async with self._sleep_lock:
            if self.asleep or self._lost:
                return
            self.asleep = True  # the server admits nothing from here on
            self._wanted.clear()
            if not drain:
                for state in list(self._outputs):
                    self.abort(state.request_id)
            await self.drain(None if drain else STOP_PATIENCE_S)
            await self._child.stop(STOP_PATIENCE_S)
            while self._up:  # until `_supervise` has seen it
                await asyncio.sleep(0)

    async def wake_up(self) -> None:
        async with self._sleep_lock:
            if not self.asleep:
                return
            self.asleep = False
            self._wanted.set()
            await self._settled.wait()
        if self._lost:
            raise EngineError(f"the engine could not be started again ({self._lost})")

    async def start_profile(self) -> None:
        await self._profile(StartProfile())

    async def stop_profile(self) -> bytes:
        return await self._profile(StopProfile())

    async def _profile(self, message: StartProfile | StopProfile) -> bytes:
        if not self._up:
            raise EngineError("the engine is not running")
        answer: asyncio.Future[bytes] = asyncio.get_running_loop().create_future()
        self._profiles.append(answer)
        self._child.send(message)
        return await answer

    def reset_prefix_cache(self) -> None:
        if self._up:  # the next engine has nothing cached
            self._child.send(ResetPrefixes())

    @property
    def healthy(self) -> bool:
        return self._up

    @property
    def pid(self) -> int:
        """Of the engine's process; another after a restart."""
        return self._child.pid

    def load(self) -> EngineLoad:
        return self._load

    async def audit(self) -> None:
        """Have the engine check its own bookkeeping; raises `EngineError` if it is wrong."""
        answer: asyncio.Future[str] = asyncio.get_running_loop().create_future()
        self._audits.append(answer)
        self._child.send(Audit())
        problem = await answer
        if problem:
            raise EngineError(f"the engine's books are wrong: {problem}")

    # ── requests ────────────────────────────────────────────────────────────────────────────

    def submit(
        self,
        request: EngineRequest,
        on_output: OnOutput,
        on_error: OnError,
        request_id: str | None = None,
    ) -> RequestState:
        if self._lost:
            raise EngineError(f"the engine has stopped ({self._lost}); start a new one")
        state, requests = self._outputs.add(request, request_id, on_output, on_error)
        try:
            self._send(state, requests)
        except (ValueError, OverflowError, msgspec.MsgspecError) as error:
            self._outputs.close(state)
            raise RequestError(f"the request cannot be sent to the engine: {error}") from None
        return state

    def leave(self, state: RequestState) -> None:
        if state in self._outputs:
            state.on_output = state.on_error = None
            self.abort(state.request_id)

    def abort(self, request_id: str) -> None:
        state = self._outputs.get(request_id)
        if state is None or state.aborted:
            return
        state.aborted = True
        if self._up:
            self._abort(self._outputs.in_engine(state))
        else:
            self._outputs.lose(state)
            self._some_ended.set()

    def _send(self, state: RequestState, requests: list[EngineRequest]) -> None:
        first = self._next
        others = [replace(request, prompt_token_ids=()) for request in requests[1:]]
        message = encode(Add(first, [requests[0], *others]))
        if not self._up:
            return  # the next engine is sent it
        self._next += len(requests)
        for handle, request in enumerate(requests, first):
            self._handles[request.request_id] = handle
            self._names[handle] = request.request_id
        self._child.send_encoded(message)
        state.attempts += 1

    def _abort(self, names: list[str]) -> None:
        handles = [self._handles[name] for name in names if name in self._handles]
        if handles:
            self._child.send(Abort(handles))

    # ── messages of the engine ────────────────────────────────────────────────────────────────

    def _on_message(self, message: FromEngine) -> None:
        if not self._up:
            return  # of an engine that has been given up
        match message:
            case Step():
                self._take(message)
            case Refused():
                self._refused(message)
            case Audited():
                self._audits.pop(0).set_result(message.problem)
            case Profiled():
                self._profiled(message)

    def _profiled(self, message: Profiled) -> None:
        answer = self._profiles.pop(0)
        if answer.done():  # whoever asked has left
            return
        if message.problem:
            reason = unpack_error(message.kind, message.problem, "profiling failed")
            answer.set_exception(reason)
        else:
            answer.set_result(message.data)

    def _take(self, step: Step) -> None:
        self._load = step.load
        updates = unpack_step(step, self._names)
        for full in step.full:
            if full.finish_reason is not None and full.handle in self._names:
                del self._handles[self._names.pop(full.handle)]
        for record in step.steps:
            self.records.add_step(record)
            self._step_s.append(record.committed_s - record.planned_s)
        _, aborts = self._outputs.process(updates)
        if aborts:
            self._abort(aborts)
        if step.full:
            self._note_ends(update.record for update in updates if update.record is not None)
            self._some_ended.set()

    def _note_ends(self, ended: Iterable[RequestRecord]) -> None:
        for record in ended:
            self.records.requests.append(record)
            self.records.tell_request(record)

    def _refused(self, message: Refused) -> None:
        state = self._outputs.of(self._names[message.first])
        for name in self._outputs.in_engine(state):
            del self._names[self._handles.pop(name)]
        reason = unpack_error(message.kind, message.message, "the engine failed on this request")
        if state.aborted:
            self._outputs.lose(state)
        else:
            self._outputs.close(state, reason)
        self._some_ended.set()

    # ── death and restart ───────────────────────────────────────────────────────────────────

    async def _supervise(self) -> None:
        try:
            deaths = 0
            while deaths < self._restart_limit:
                await self._child.wait()
                lived_s, reason = monotonic() - self._child.ready_s, self._child.how_it_ended()
                if self._wanted.is_set():
                    log.warning("the engine died (%s); starting another", reason)
                    self._died(reason)
                    deaths = 1 if lived_s > STEADY_S else deaths + 1
                else:
                    self._died("it was put to sleep")
                    await self._wanted.wait()
                    deaths = 0
                while not self._up and deaths < self._restart_limit:
                    try:
                        await self._restart(deaths)
                    except Exception as error:
                        reason = str(error)
                        log.warning("the engine could not be started again: %s", reason)
                        deaths += 1
            reason = (
                f"it died {deaths} times in a row soon after its start; the last time, {reason}"
            )
        except Exception as error:
            log.exception("watching over the engine failed")
            reason = f"{type(error).__name__}: {error}"
        self._give_up(reason)

    async def _watch(self) -> None:
        """End an engine that hangs; what follows is what follows any death."""
        timeout_s, slept_from = self._hang_timeout_s, monotonic()
        while True:
            await asyncio.sleep(min(1.0, timeout_s / 4))
            now, child = monotonic(), self._child
            overslept, slept_from = now - slept_from > timeout_s / 2, now
            if (
                not self._up or overslept
            ):  # this process was stopped itself, and has missed messages
                child.heard_s, child.step_s = now, 0.0
                continue
            longest_s = max(HANGING_STEP * timeout_s, LONGEST_STEPS * max(self._step_s))
            if now - child.heard_s > timeout_s:
                child.end(f"its process was silent for {now - child.heard_s:.0f} s and was killed")
            elif child.step_s > longest_s:
                child.end(f"a step took more than {child.step_s:.0f} s, so its process was killed")

    def _died(self, reason: str) -> None:
        self._forget_engine()
        for state in self._outputs:
            if self._outputs.lose(state):
                continue
            if state.started:
                text = "the engine died while this was being written"
                self._lose(state, f"{text} ({reason}); ask again")
            elif state.attempts >= MAX_ATTEMPTS:
                text = f"the engine died {state.attempts} times while this request was in it"
                self._lose(state, f"{text} ({reason})")
        self._some_ended.set()

    def _lose(self, state: RequestState, reason: str) -> None:
        """End a request whose record went with the engine."""
        request, now = state.request, monotonic()
        num_prompt = len(request.prompt_token_ids)
        for name in self._outputs.close(state, EngineError(reason)):
            record = RequestRecord(name, num_prompt, request.received_s, finished_s=now)
            record.finish_reason = FinishReason.ERROR
            record.n, record.family = request.params.n, state.request_id
            self._note_ends([record])

    def _forget_engine(self) -> None:
        self._up = False
        self._settled.clear()
        self._handles.clear()
        self._names.clear()
        for answer in self._audits:
            answer.cancel()
        self._audits.clear()
        for profile in self._profiles:
            if not profile.done():
                profile.set_exception(EngineError("the engine ended while it was profiled"))
        self._profiles.clear()
        kv = self._load.kv
        self._load = EngineLoad(len(self._outputs), 0, KVUsage(kv.reserved, 0, 0, 0, kv.reserved))

    async def _restart(self, deaths: int) -> None:
        await self._child.kill()
        if deaths > 1:
            backoff_s = FIRST_BACKOFF_S * 2.0 ** (deaths - 2)
            await asyncio.sleep(min(LONGEST_BACKOFF_S, backoff_s))
        self._child = Child(spawn(self._config, self._builder))
        self._child.on_message = self._on_message
        ready = await self._child.start()
        self.info, self._load, self._up = ready.info, ready.load, True
        self._settled.set()
        if deaths:
            self.num_restarts += 1
        self.input_processor.limits = _limits(ready.info)
        for state in self._outputs:
            self._send(state, self._outputs.restart(state))

    def _give_up(self, reason: str) -> None:
        self._lost = self._lost or reason
        if not self.lost.done():
            self.lost.set_result(self._lost)
        self._forget_engine()
        for state in self._outputs:
            if not self._outputs.lose(state):
                self._outputs.close(state, EngineError(f"the engine has stopped ({self._lost})"))
        self._some_ended.set()
        self._settled.set()


def _limits(info: EngineInfo) -> ModelLimits:
    return ModelLimits(info.vocab_size, info.max_model_len, info.max_logprobs)


def _open_text(config: EngineConfig) -> tuple[Tokenizer | None, str | None]:
    """The tokenizer with its tables made, and the chat template."""
    if config.skip_tokenizer_init:
        return None, None
    tokenizer = open_tokenizer(config, find_model(config))
    if tokenizer is None:
        return None, None
    tokenizer.detokenizer()
    return tokenizer, chat_template_source(config, tokenizer)
