"""`RequestClient`: submits, leaves and aborts requests, the same in every engine client."""

from __future__ import annotations

from abc import abstractmethod
from contextlib import AbstractContextManager, nullcontext
from typing import Any

from twostroke.engine.api import EngineClient
from twostroke.engine.output_processor import OnError, OnOutput, OutputProcessor, RequestState
from twostroke.errors import EngineError, RequestError
from twostroke.request import EngineRequest


class RequestClient(EngineClient):
    """The part of a client that knows requests by their `RequestState`. Subclasses carry engine
    requests to their engines (`_send`, `_abort`) and updates back."""

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
            if state in self._outputs:  # by now the id may be another request's
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
        """The reason why no request can run any more; "": requests can run."""

    @abstractmethod
    def _send(self, state: RequestState, requests: list[EngineRequest]) -> None:
        """Send the continuations of a new request to an engine. Raises `RequestError` if they
        cannot be sent."""

    @abstractmethod
    def _abort(self, state: RequestState) -> None:
        """Have the engine end a request; called once for each request."""

    def _drop(self, state: RequestState) -> None:
        """Drop a request that was not sent."""
        self._outputs.close(state)
