"""Where tool calls meet the chat route: which tools a request may call, and what a model's text
says when tools are in play."""

from __future__ import annotations

from typing import Any, Protocol

from twostroke.serve.errors import ApiError
from twostroke.serve.parts import Json
from twostroke.serve.protocol import ChatRequest
from twostroke.serve.settings import ServeSettings


class Calling(Protocol):
    """The tools of one request."""

    def structured_outputs(self) -> Any:
        """What makes the model call one, or None if it is free not to."""
        ...

    def stream(self) -> Any: ...


def calling(request: ChatRequest, settings: ServeSettings) -> Calling | None:
    """None if the request's tools, if it has any, are not to be called."""
    choice = request.tool_choice
    if not request.tools:
        if choice not in (None, "none", "auto"):
            raise ApiError(400, "tool_choice needs tools to choose from", param="tool_choice")
        return None
    if choice == "none":
        return None
    raise ApiError(400, "tools are not supported yet", param="tools")


class Answer:
    """What one continuation has said so far: text, and calls of tools."""

    def __init__(self, tools: Calling | None) -> None:
        self._stream = None if tools is None else tools.stream()
        self._text: list[str] = []
        self.calls: list[Json] = []

    @property
    def content(self) -> str | None:
        text = "".join(self._text)
        return None if self.calls and not text else text

    def push(self, text: str) -> list[Json]:
        """What is new, as deltas of a message."""
        if self._stream is None:
            self._text.append(text)
            return [{"content": text}]
        return [self._take(delta) for delta in self._stream.push(text)]

    def flush(self) -> list[Json]:
        return [] if self._stream is None else [self._take(one) for one in self._stream.flush()]

    def finish_reason(self, reason: str | None) -> str | None:
        return "tool_calls" if self.calls and reason == "stop" else reason

    def _take(self, delta: Any) -> Json:
        raise NotImplementedError
