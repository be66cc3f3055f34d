"""`RemoteEngine`: an engine in a process of its own, so that the engine's loop and the HTTP side
never wait for each other's Python. No torch on this side.

    InputProcessor, OutputProcessor    here
    EngineCore                         there (`process.py`), watched over (`supervised.py`)

When that process dies, or hangs and is killed, another is started. A request of which nothing has
been delivered is sent to the new one; one that has begun ends with an `EngineError`. After
several deaths in a row the engine has stopped for good: `lost` says why.

To `sleep` is to end the process on purpose, which frees all its memory; to `wake_up` is to start
another.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Iterable
from time import monotonic

import msgspec

from twostroke.config import EngineConfig
from twostroke.engine.api import EngineClient, EngineInfo
from twostroke.engine.child import Child
from twostroke.engine.input_processor import InputProcessor, ModelLimits
from twostroke.engine.output_processor import OnError, OnOutput, OutputProcessor, RequestState
from twostroke.engine.spawn import DEFAULT_BUILDER, LocalLauncher, Spawned
from twostroke.engine.supervised import (
    HANG_TIMEOUT_S,
    MAX_QUICK_DEATHS,
    STOP_PATIENCE_S,
    SupervisedEngine,
)
from twostroke.engine.wire import Ready
from twostroke.errors import EngineError, RequestError
from twostroke.model.load import chat_template_source, find_model, open_tokenizer
from twostroke.model.text.tokenizer import Tokenizer
from twostroke.observe.record import RequestRecord
from twostroke.request import EngineRequest, FinishReason
from twostroke.sched.updates import Update

MAX_ATTEMPTS = 4  # engines that one request may be sent to: it may be what kills them


class RemoteEngine(SupervisedEngine, EngineClient):
    """Start with `await RemoteEngine.start(config)`; use as `async with`, or `await close()`.
    Everything else is called in the event loop that started it."""

    def __init__(
        self,
        launcher: LocalLauncher,
        child: Child,
        ready: Ready,
        input_processor: InputProcessor,
        seed: int,
        hang_timeout_s: float,
        restart_limit: int,
    ) -> None:
        super().__init__(launcher, child, ready, hang_timeout_s, restart_limit)
        self.input_processor = input_processor
        self._outputs = OutputProcessor(input_processor.tokenizer, seed)
        # Why there will be no engine any more, once that is so:
        self.lost: asyncio.Future[str] = asyncio.get_running_loop().create_future()
        self._some_ended = asyncio.Event()  # a request may have ended
        self._sleep_lock = asyncio.Lock()

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
        reading = asyncio.create_task(asyncio.to_thread(open_text, config))
        launcher = LocalLauncher(config, builder, spawned)
        child = Child(launcher.launch(), hang_timeout_s)
        starting = asyncio.create_task(child.start())
        try:
            (tokenizer, template), ready = await asyncio.gather(reading, starting)
        except BaseException:
            starting.cancel()
            await asyncio.wait((starting,))
            await child.kill()
            raise
        inputs = InputProcessor(tokenizer, template, limits_of(ready.info))
        limits = hang_timeout_s, restart_limit
        engine = cls(launcher, child, ready, inputs, config.seed, *limits)
        engine.watch()
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
        await self.stop()

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
            self.abort_all(self._outputs.in_engine(state))
        else:
            self._outputs.lose(state)
            self._some_ended.set()

    def _send(self, state: RequestState, requests: list[EngineRequest]) -> None:
        if self.add(requests):  # else the next engine is sent it
            state.attempts += 1

    # ── what the engine says ────────────────────────────────────────────────────────────────

    @property
    def num_open(self) -> int:
        return len(self._outputs)

    def on_updates(self, updates: list[Update]) -> None:
        _, aborts = self._outputs.process(updates)
        if aborts:
            self.abort_all(aborts)
        ended = [update.record for update in updates if update.record is not None]
        if ended:
            self._note_ends(ended)
            self._some_ended.set()

    def _note_ends(self, ended: Iterable[RequestRecord]) -> None:
        for record in ended:
            self.records.requests.append(record)
            self.records.tell_request(record)

    def on_refused(self, names: list[str], reason: Exception) -> None:
        state = self._outputs.of(names[0])
        if state.aborted:
            self._outputs.lose(state)
        else:
            self._outputs.close(state, reason)
        self._some_ended.set()

    def on_death(self, reason: str) -> None:
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
            record.owner = request.owner
            self._note_ends([record])

    def on_restart(self) -> None:
        self.input_processor.limits = limits_of(self.info)
        for state in self._outputs:
            self._send(state, self._outputs.restart(state))

    def on_end(self, reason: str) -> None:
        if not self.lost.done():
            self.lost.set_result(reason)
        for state in self._outputs:
            if not self._outputs.lose(state):
                self._outputs.close(state, EngineError(f"the engine has stopped ({reason})"))
        self._some_ended.set()


def limits_of(info: EngineInfo) -> ModelLimits:
    return ModelLimits(info.vocab_size, info.max_model_len, info.max_logprobs)


def open_text(config: EngineConfig) -> tuple[Tokenizer | None, str | None]:
    """The tokenizer with its tables made, and the chat template."""
    if config.skip_tokenizer_init:
        return None, None
    tokenizer = open_tokenizer(config, find_model(config))
    if tokenizer is None:
        return None, None
    tokenizer.detokenizer()
    return tokenizer, chat_template_source(config, tokenizer)
