"""Where tool calls meet the chat route: which tools a request may call, and what one continuation
says in text and in calls."""

from __future__ import annotations

import msgspec

from twostroke.serve.errors import ApiError
from twostroke.serve.parts import Json
from twostroke.serve.protocol import ChatRequest
from twostroke.serve.settings import ServeSettings
from twostroke.serve.tools import ContentDelta, Delta, ToolCalls


def calling(
    request: ChatRequest, settings: ServeSettings, chat_template: str | None
) -> ToolCalls | None:
    """None if nothing is to be called. The tools are still shown to the model then."""
    if not request.tools and request.tool_choice in (None, "none", "auto"):
        return None
    parser = settings.tool_call_parser or "auto"
    tools = msgspec.to_builtins(request.tools or [])
    calls = ToolCalls(parser, tools, request.tool_choice, chat_template)
    if calls.choice == "auto" and not settings.enable_auto_tool_choice:
        raise ApiError(
            400,
            'tool_choice "auto" is switched off here; use "required", "none" or name a tool',
            param="tool_choice",
        )
    return None if calls.choice == "none" else calls


class Answer:
    """What one continuation has said so far."""

    def __init__(self, tools: ToolCalls | None, parallel: bool = True) -> None:
        self._tools = tools
        self._stream = None if tools is None else tools.stream()
        self._parallel = parallel
        self._text: list[str] = []

    @property
    def calls(self) -> list[Json]:
        if self._stream is None:
            return []
        calls = self._stream.calls if self._parallel else self._stream.calls[:1]
        return [call.to_dict() for call in calls]

    @property
    def content(self) -> str | None:
        """A message that only calls has none."""
        text = "".join(self._text)
        return text if text or not self.calls else None

    def push(self, text: str) -> list[Json]:
        """What is new, as deltas of a message. Of text that may yet become a call: nothing."""
        if self._stream is None:
            self._text.append(text)
            return [{"content": text}]
        return self._take(self._stream.push(text))

    def flush(self) -> list[Json]:
        return [] if self._stream is None else self._take(self._stream.flush())

    def finish_reason(self, reason: str | None) -> str | None:
        """As OpenAI has it: a call that was asked for by name is no reason of its own."""
        named = self._tools is not None and self._tools.choice.startswith("name:")
        return "tool_calls" if self.calls and reason == "stop" and not named else reason

    def _take(self, deltas: list[Delta]) -> list[Json]:
        told: list[Json] = []
        for delta in deltas:
            if isinstance(delta, ContentDelta):
                self._text.append(delta.text)
                told.append({"content": delta.text})
            elif self._parallel or delta.index == 0:
                told.append({"tool_calls": [delta.to_dict()]})
        return told
