"""A conversation, whichever API it came by: its request in OpenAI's form, and the assistant's
message as it is written."""

from __future__ import annotations

from abc import abstractmethod
from typing import TypeVar

import msgspec

from twostroke.request import EngineRequest
from twostroke.serve.deltas import ContentDelta, Delta, ReasoningDelta, ToolCall, ToolCallDelta
from twostroke.serve.errors import ApiError
from twostroke.serve.generate import Generation
from twostroke.serve.params import chat_params
from twostroke.serve.protocol import Body, ChatRequest
from twostroke.serve.response_fields import Json
from twostroke.serve.service import Service
from twostroke.serve.settings import ServeSettings
from twostroke.serve.tools import ToolCalls

R = TypeVar("R", bound=Body)


class Conversation(Generation[R]):
    """A request that is answered by an assistant's message (`n` of them).

    An API says how its request reads as a chat request (`as_chat`) and writes its answer from
    `AssistantMessage`s; all between is done here."""

    def __init__(self, service: Service, request: R) -> None:
        super().__init__(service, request)
        self.chat = self.as_chat()
        self.fields = self.chat
        self.num_choices = self.chat.n or 1
        self.tools: ToolCalls | None = None

    @abstractmethod
    def as_chat(self) -> ChatRequest:
        """The request in OpenAI's form; what cannot be expressed in it is refused."""

    def prepare(self) -> list[EngineRequest]:
        service, chat = self.service, self.chat
        template = service.client.input_processor.chat_template
        self.tools = requested_tools(chat, service.settings, template)
        forced = None
        if self.tools is not None:
            forced = self.tools.structured_outputs()
            self.tools.drop_schemas()
        params = chat_params(chat, service.client.info, service.settings, forced)
        variables: Json = {}
        if chat.reasoning_effort is not None:
            variables["reasoning_effort"] = chat.reasoning_effort
        ids = service.prompts.render(chat.messages, chat, **variables)
        return [service.prompts.prepare(ids, params, chat)]

    def new_message(self) -> AssistantMessage:
        return AssistantMessage(self.tools, self.chat.parallel_tool_calls is not False)


def requested_tools(
    request: ChatRequest, settings: ServeSettings, chat_template: str | None
) -> ToolCalls | None:
    """The tools that the model may call; None if there are none to call. The template shows them to
    the model all the same."""
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


class AssistantMessage:
    """The message of one choice as it is written: reasoning, text and tool calls."""

    def __init__(self, tools: ToolCalls | None, parallel: bool = True) -> None:
        """`parallel`: whether calls after the first are given."""
        self._tools = tools
        self._stream = None if tools is None else tools.stream()
        self._parallel = parallel
        self._text: list[str] = []
        self._reasoning: list[str] = []

    @property
    def calls(self) -> list[ToolCall]:
        if self._stream is None:
            return []
        return self._stream.calls if self._parallel else self._stream.calls[:1]

    @property
    def content(self) -> str | None:
        """None in a message that has only tool calls."""
        text = "".join(self._text)
        return text if text or not self.calls else None

    @property
    def reasoning(self) -> str | None:
        """None where the model did not think aloud."""
        return "".join(self._reasoning) or None

    def push(self, text: str) -> list[Delta]:
        """What is new. Text that may become a tool call is held back."""
        if self._stream is None:
            self._text.append(text)
            return [ContentDelta(text)]
        return self._take(self._stream.push(text))

    def flush(self) -> list[Delta]:
        """What was held back: the text has ended."""
        return [] if self._stream is None else self._take(self._stream.flush())

    def finish_reason(self, reason: str | None) -> str | None:
        """As OpenAI has it: "tool_calls" unless the tool was forced by name."""
        named = self._tools is not None and self._tools.choice.startswith("name:")
        return "tool_calls" if self.calls and reason == "stop" and not named else reason

    def _take(self, deltas: list[Delta]) -> list[Delta]:
        given: list[Delta] = []
        for delta in deltas:
            if isinstance(delta, ContentDelta):
                self._text.append(delta.text)
            elif isinstance(delta, ReasoningDelta):
                self._reasoning.append(delta.text)
            elif isinstance(delta, ToolCallDelta) and not self._parallel and delta.index:
                continue
            given.append(delta)
        return given
