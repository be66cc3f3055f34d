"""`RemoteEngine`: an engine in a separate process, so that the engine's loop and the HTTP server
do not share a Python interpreter. This process does not import torch.

    this process     InputProcessor, OutputProcessor
    engine process   EngineCore (`process.py`), supervised (`supervised.py`)

If the engine process dies, or hangs and is killed, another is started. A request without delivered
output is sent to the new process. A request with delivered output ends with an `EngineError`. After
several deaths in a row no process is started, and `stop_reason` has the reason.

`sleep` ends the process, which frees all its memory; `wake_up` starts another process.
"""

from __future__ import annotations

import asyncio
from contextlib import AbstractContextManager
from time import monotonic

from twostroke.config import EngineConfig
from twostroke.engine.api import EngineInfo
from twostroke.engine.child import Child
from twostroke.engine.input_processor import InputProcessor, ModelLimits
from twostroke.engine.output_processor import RequestState
from twostroke.engine.process_client import ProcessClient
from twostroke.engine.spawn import DEFAULT_BUILDER, LocalLauncher, Spawned
from twostroke.engine.supervised import (
    HANG_TIMEOUT_S,
    MAX_QUICK_DEATHS,
    STOP_PATIENCE_S,
    SupervisedEngine,
)
from twostroke.engine.wire import Ready
from twostroke.errors import EngineError
from twostroke.model.find.hub import find_model
from twostroke.model.text.limited_encoder import SERVER
from twostroke.model.text.model_text import chat_template_source, open_tokenizer
from twostroke.model.text.tokenizer import Tokenizer
from twostroke.observe.record import RequestRecord
from twostroke.request import EngineRequest, FinishReason
from twostroke.sched.updates import Update

MAX_ATTEMPTS = 4  # engine processes for one request, because the request may be what kills them


class RemoteEngine(SupervisedEngine, ProcessClient):
    """An engine in a child process. Create it with `await RemoteEngine.start(config)`; end it with
    `async with` or `await close()`. Call all other methods in the event loop that started it."""

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
        SupervisedEngine.__init__(self, launcher, child, ready, hang_timeout_s, restart_limit)
        ProcessClient.__init__(self, input_processor, seed)
        self._sleep_lock = asyncio.Lock()

    # ── start and stop ──────────────────────────────────────────────────────────────────────

    @classmethod
    async def start(
        cls,
        config: EngineConfig,
        builder: str = DEFAULT_BUILDER,
        spawned: Spawned | None = None,
        hang_timeout_s: float = HANG_TIMEOUT_S,
        restart_limit: int = MAX_QUICK_DEATHS,
    ) -> RemoteEngine:
        """Start the process, or take over `spawned`, a process with the same arguments.
        `hang_timeout_s`: a process that is silent for this time is killed; 0: never.
        `restart_limit`: after this many deaths in a row, each soon after a start, the engine is not
        started again."""
        reading = asyncio.create_task(asyncio.to_thread(open_tokenizer_and_template, config))
        launcher = LocalLauncher(config, builder, spawned)
        child = Child(launcher.launch(), hang_timeout_s)
        starting = asyncio.create_task(child.start())
        try:
            (tokenizer, template), ready = await asyncio.gather(reading, starting)
            inputs = InputProcessor(tokenizer, template, limits_of(ready.info))
        except BaseException:
            starting.cancel()
            await asyncio.wait((starting,))
            await child.kill_and_close()
            raise
        engine = cls(
            launcher,
            child,
            ready,
            input_processor=inputs,
            seed=config.seed,
            hang_timeout_s=hang_timeout_s,
            restart_limit=restart_limit,
        )
        engine.watch()
        return engine

    async def _end_processes(self) -> None:
        await self.stop()

    async def sleep(self, drain: bool = False) -> None:
        async with self._sleep_lock:
            if self.asleep or self._lost:
                return
            self.asleep = True  # from now on the server admits no requests
            self._wanted.clear()
            if not drain:
                for state in list(self._outputs):
                    self.abort(state.request_id)
            await self.drain(None if drain else STOP_PATIENCE_S)
            await self._child.stop(STOP_PATIENCE_S)
            while self._up:  # until `_supervise` has noticed the end of the process
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

    def _abort(self, state: RequestState) -> None:
        if self._up:
            self.abort_all(self._outputs.ids_in_engine(state))
        else:
            self._outputs.end_if_unneeded(state)
            self._request_ended.set()

    def _send(self, state: RequestState, requests: list[EngineRequest]) -> None:
        if self.add(requests):  # otherwise the request is sent to the next process
            state.attempts += 1

    def together(self) -> AbstractContextManager[None]:
        return self.adding_together()

    # ── events of the engine ────────────────────────────────────────────────────────────────

    @property
    def num_open(self) -> int:
        return len(self._outputs)

    def on_updates(self, updates: list[Update]) -> None:
        _, aborts = self._outputs.process(updates)
        if aborts:
            self.abort_all(aborts)
        for update in updates:
            if update.record is not None:
                self.records.add_request(update.record)
                self._request_ended.set()

    def on_refused(self, names: list[str], reason: Exception) -> None:
        state = self._outputs.state_of(names[0])
        if state.aborted:
            self._outputs.end_if_unneeded(state)
        else:
            self._outputs.close(state, reason)
        self._request_ended.set()

    def on_death(self, reason: str) -> None:
        for state in self._outputs:
            if self._outputs.end_if_unneeded(state):
                continue
            if state.started:
                text = "the engine died while it was writing this answer"
                self._fail(state, f"{text} ({reason}); send the request again")
            elif state.attempts >= MAX_ATTEMPTS:
                text = f"the engine died {state.attempts} times while this request was in it"
                self._fail(state, f"{text} ({reason})")
        self._request_ended.set()

    def _fail(self, state: RequestState, reason: str) -> None:
        """End a request whose record was lost with the engine."""
        request, now = state.request, monotonic()
        num_prompt = len(request.prompt_token_ids)
        for name in self._outputs.close(state, EngineError(reason)):
            record = RequestRecord(name, num_prompt, request.received_s, finished_s=now)
            record.finish_reason = FinishReason.ERROR
            record.n, record.family = request.params.n, state.request_id
            record.owner = request.owner
            self.records.add_request(record)

    def on_restart(self) -> None:
        self.input_processor.limits = limits_of(self.info)
        for state in self._outputs:
            self._send(state, self._outputs.restart(state))

    def on_end(self, reason: str) -> None:
        if not self.stop_reason.done():
            self.stop_reason.set_result(reason)
        for state in self._outputs:
            if not self._outputs.end_if_unneeded(state):
                self._outputs.close(state, EngineError(f"the engine has stopped ({reason})"))
        self._request_ended.set()


def limits_of(info: EngineInfo) -> ModelLimits:
    return ModelLimits(info.vocab_size, info.max_model_len, info.max_logprobs)


def open_tokenizer_and_template(config: EngineConfig) -> tuple[Tokenizer | None, str | None]:
    """Open the tokenizer and build the table of its detokenizer. Return the tokenizer and the chat
    template."""
    if config.skip_tokenizer_init:
        return None, None
    tokenizer = open_tokenizer(config, find_model(config))
    if tokenizer is None:
        return None, None
    tokenizer.encoder_limits = SERVER
    tokenizer.detokenizer()  # builds the table, which the tokenizer keeps
    return tokenizer, chat_template_source(config, tokenizer)
