"""`RequestClient`: the common part of all engine clients, which submits and aborts requests."""

from __future__ import annotations

from abc import abstractmethod
from contextlib import AbstractContextManager, nullcontext
from typing import Any

from twostroke.engine.api import EngineClient
from twostroke.engine.output_processor import OnError, OnOutput, OutputProcessor, RequestState
from twostroke.errors import EngineError, RequestError
from twostroke.request import EngineRequest


class RequestClient(EngineClient):
    """Submits, leaves and aborts requests, whose state is a `RequestState`. Subclasses send engine
    requests to their engines (`_send`, `_abort`) and receive the updates."""

    _outputs: OutputProcessor
    # Guards `_outputs`, if a thread besides the event loop uses it.
    _lock: AbstractContextManager[Any] = nullcontext()

    def submit(
        self,
        request: EngineRequest,
        on_output: OnOutput,
        on_error: OnError,
        request_id: str | None = None,
    ) -> RequestState:
        with self._lock:
            if reason := self._why_stopped():
                raise EngineError(f"the engine has stopped ({reason}); start a new one")
            state, requests = self._outputs.add(request, request_id, on_output, on_error)
            try:
                self._send(state, requests)
            except RequestError:
                self._drop(state)
                raise
        return state

    def leave(self, state: RequestState) -> None:
        with self._lock:
            if state in self._outputs:  # otherwise another request may have the id by now
                state.on_output = state.on_error = None
                self._abort_once(state)

    def abort(self, request_id: str) -> None:
        """End a request; its last output has the finish_reason "abort"."""
        with self._lock:
            state = self._outputs.get(request_id)
            if state is not None:
                self._abort_once(state)

    def _abort_once(self, state: RequestState) -> None:
        if not state.aborted:
            state.aborted = True
            self._abort(state)

    @abstractmethod
    def _why_stopped(self) -> str:
        """Return why no request can run any more; "" if requests can run."""

    @abstractmethod
    def _send(self, state: RequestState, requests: list[EngineRequest]) -> None:
        """Send the completions of a new request to an engine. Raise `RequestError` if they cannot
        be sent."""

    @abstractmethod
    def _abort(self, state: RequestState) -> None:
        """Make the engine end a request. Called once for a request at most."""

    def _drop(self, state: RequestState) -> None:
        """Drop a request that was not sent."""
        self._outputs.close(state)
