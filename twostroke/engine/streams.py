"""What every engine that serves asyncio tasks has in common: its open streams. No torch.

`Streams` stands between the front end and those who listen: it gives each listener its outputs in
the kind it asked for. `StreamingEngine` makes the async iterator of the callbacks.
"""

from __future__ import annotations

import asyncio
import logging
from abc import ABC, abstractmethod
from collections.abc import AsyncIterator, Callable, Iterator
from dataclasses import dataclass, field

from twostroke.engine.frontend import Frontend
from twostroke.engine.intake import Intake, Prepared, Prompt
from twostroke.errors import RequestError
from twostroke.outputs import Deltas, RequestOutput, snapshot
from twostroke.request import EngineRequest, FinishReason, SamplingParams
from twostroke.sched.scheduler import Update

OnOutput = Callable[[RequestOutput], None]
OnError = Callable[[Exception], None]

log = logging.getLogger(__name__)


@dataclass(slots=True, eq=False)
class Stream:
    """One request and who listens to it."""

    request_id: str
    prepared: Prepared
    on_output: OnOutput | None  # None: nobody listens any more
    on_error: OnError | None
    kind: str
    children: list[str]  # the engine requests it became
    deltas: Deltas = field(default_factory=Deltas)
    started: bool = False  # some of what was written has been told
    aborted: bool = False  # the engine has been asked to end it
    attempts: int = 0  # engines it has been sent to
    owed: int = 0  # of its continuations that a stop string ended, the records still to come
    held: RequestOutput | None = None  # its last output, until those records are there


class Streams:
    """The open streams of one engine. It calls nobody but the listeners and keeps no lock.

    A name is taken from `open` until the engine has said the last word on it.
    """

    def __init__(self, frontend: Frontend) -> None:
        self._frontend = frontend
        self._open: dict[str, Stream] = {}
        self._of: dict[str, Stream] = {}  # engine request → its stream, while the engine has it
        self._hit: set[str] = set()  # of those, the ones that a stop string has ended here

    def __len__(self) -> int:
        return len(self._open)

    def __iter__(self) -> Iterator[Stream]:
        return iter(list(self._open.values()))

    def __contains__(self, stream: Stream) -> bool:
        return self._open.get(stream.request_id) is stream

    def get(self, request_id: str) -> Stream | None:
        return self._open.get(request_id)

    def of(self, child: str) -> Stream:
        """Whose an engine request is, while the engine has it."""
        return self._of[child]

    def open(
        self,
        prepared: Prepared,
        on_output: OnOutput,
        on_error: OnError,
        request_id: str | None = None,
    ) -> tuple[Stream, list[EngineRequest]]:
        """Take a request on: its stream, and what the engine is to be sent for it."""
        name, requests = self._enter(prepared, request_id)
        children = [request.request_id for request in requests]
        kind = prepared.params.output_kind
        stream = Stream(name, prepared, on_output, on_error, kind, children)
        self._open[name] = stream
        self._of.update(dict.fromkeys(children, stream))
        return stream, requests

    def _enter(self, prepared: Prepared, request_id: str | None) -> tuple[str, list[EngineRequest]]:
        while True:
            name, requests = self._frontend.enter(prepared, request_id)
            names = (request.request_id for request in requests)
            if name not in self._open and not any(child in self._of for child in names):
                return name, requests
            self._frontend.forget(name)  # ended here, but not yet in the engine
            if request_id is not None:
                raise RequestError(f"a request with the id {name!r} is already running")

    def reopen(self, stream: Stream) -> list[EngineRequest]:
        """Begin again a stream to which nothing has been told, for another engine."""
        self._let_go(stream)
        _, requests = self._frontend.enter(stream.prepared, stream.request_id)
        self._of.update(dict.fromkeys(stream.children, stream))
        return requests

    def close(self, stream: Stream, reason: Exception | None = None) -> list[str]:
        """End a stream, with the reason if there is one; what the engine may still have of it."""
        if stream not in self:
            return []
        left = self._left(stream)
        self._let_go(stream)
        del self._open[stream.request_id]
        on_error, stream.on_output, stream.on_error = stream.on_error, None, None
        if reason is not None and on_error is not None:
            try:
                on_error(reason)
            except Exception:
                log.exception("a listener failed on the error of %s", stream.request_id)
        return left

    def _let_go(self, stream: Stream) -> None:
        self._frontend.forget(stream.request_id)
        ghosts = [name for name in stream.children if name in self._hit]
        if ghosts:  # the front end still waits for their records
            self._frontend.take([Update(name, ()) for name in ghosts])
            self._hit.difference_update(ghosts)
        for name in self._left(stream):
            del self._of[name]
        stream.owed = 0

    def lose(self, stream: Stream) -> bool:
        """The engine is gone: end a stream that waited only for its end. False if for more."""
        if stream.held is None and not stream.aborted and stream.on_output is not None:
            return False
        left = self._left(stream)
        self.take([Update(name, (), finish_reason=FinishReason.ABORT) for name in left])
        return True

    def _left(self, stream: Stream) -> list[str]:
        """What the engine still has of it."""
        return [name for name in stream.children if self._of.get(name) is stream]

    def take(self, updates: list[Update]) -> list[str]:
        """Tell the listeners what has become known; the engine requests to abort.

        The last output of a request that a stop string ended waits for what those aborts give.
        """
        if self._hit:  # tokens that were on their way when a stop string was found
            updates = [u for u in updates if u.request_id not in self._hit or u.finish_reason]
        outputs, aborts = self._frontend.take(updates)
        for name in aborts:
            self._hit.add(name)
            self._of[name].owed += 1
        for output in outputs:
            stream = self._open.get(output.request_id)
            if stream is not None and not self._tell(stream, output):
                aborts += [name for name in self._left(stream) if name not in self._hit]
        for update in updates:
            if update.finish_reason is not None:
                self._ended(update.request_id)
        return aborts

    def _ended(self, child: str) -> None:
        """The engine has said its last word on one of its requests."""
        stream = self._of.pop(child, None)
        if stream is None or child not in self._hit:
            return
        self._hit.remove(child)
        stream.owed -= 1
        if stream.held is not None and not stream.owed:
            self._last(stream, stream.held)

    def _tell(self, stream: Stream, output: RequestOutput) -> bool:
        """False if the listener failed, and is not listened for any more."""
        if output.finished:
            if stream.owed:
                stream.held = output
                return True
            return self._last(stream, output)
        written = stream.started or any(c.token_ids or c.finish_reason for c in output.outputs)
        asked = stream.prepared.params.prompt_logprobs is not None
        if written and asked and output.prompt_logprobs is None:
            return True  # one of several continuations computes them; nobody is told before
        if written and stream.kind != "final_only":
            stream.started = True
        if stream.kind == "delta":
            return self._call(stream, stream.deltas.take(output))
        if stream.kind == "cumulative":
            return self._call(stream, snapshot(output))
        return True

    def _last(self, stream: Stream, output: RequestOutput) -> bool:
        self._open.pop(stream.request_id, None)
        delta = stream.kind == "delta"
        return self._call(stream, stream.deltas.take(output) if delta else snapshot(output))

    def _call(self, stream: Stream, output: RequestOutput) -> bool:
        if stream.on_output is None:
            return True
        try:
            stream.on_output(output)
        except Exception:
            log.exception("a listener failed on the output of %s", stream.request_id)
            stream.on_output = stream.on_error = None
            return False
        return True


class StreamingEngine(ABC):
    """An engine that tells outputs to callbacks, and the async iterator made of them."""

    intake: Intake

    @abstractmethod
    def open(
        self, prepared: Prepared, on_output: OnOutput, on_error: OnError, request_id: str | None
    ) -> Stream: ...

    @abstractmethod
    def leave(self, stream: Stream) -> None:
        """Listen no more: a request that has not ended is aborted."""

    def submit(
        self,
        prepared: Prepared,
        on_output: OnOutput,
        on_error: OnError,
        request_id: str | None = None,
    ) -> str:
        """Run a request; its outputs, or the one error that ends it, are given to the callbacks in
        the event loop, with no task between. Returns its id, by which `abort` ends it."""
        return self.open(prepared, on_output, on_error, request_id).request_id

    def generate(
        self,
        prompt: Prompt,
        params: SamplingParams,
        request_id: str | None = None,
        priority: int = 0,
    ) -> AsyncIterator[RequestOutput]:
        """`stream`, from a prompt that has not been read yet; a refusal is raised at once."""
        return self.stream(self.intake.prepare(prompt, params, priority), request_id)

    async def stream(
        self, prepared: Prepared, request_id: str | None = None
    ) -> AsyncIterator[RequestOutput]:
        outputs: asyncio.Queue[RequestOutput | Exception] = asyncio.Queue()
        stream = self.open(prepared, outputs.put_nowait, outputs.put_nowait, request_id)
        finished = False
        try:
            while not finished:
                output = await outputs.get()
                if isinstance(output, Exception):
                    raise output
                finished = output.finished
                yield output
        finally:
            self.leave(stream)
