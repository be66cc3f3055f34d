"""A conversation, whichever API it came by: its request in OpenAI's form, and the assistant's
message as it is written."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Sequence
from dataclasses import replace
from typing import TypeVar

import msgspec

from twostroke.request import EngineRequest
from twostroke.serve.error_responses import ApiError
from twostroke.serve.fields.protocol import Body, ChatRequest
from twostroke.serve.generation.generate import Generation
from twostroke.serve.generation.params import chat_params
from twostroke.serve.generation.service import Service
from twostroke.serve.generation.tools import ToolCalls
from twostroke.serve.http.http_request import IgnoredParts
from twostroke.serve.parsers.deltas import (
    ContentDelta,
    Delta,
    ReasoningDelta,
    ToolCall,
    ToolCallDelta,
)
from twostroke.serve.parsers.harmony import Harmony
from twostroke.serve.parsers.reasoning import (
    Reasoning,
    ReasoningCounter,
    ReasoningParser,
    requested_reasoning,
)
from twostroke.serve.parsers.scanner import Scanner
from twostroke.serve.settings import ServeSettings

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
        self.reasoning: Reasoning | None = None

    def drop_server_tools(self, types: Sequence[str]) -> None:
        """Warn of tools that the client wants the server to run, by their types: none is run
        here, and the model is not shown them."""
        if types:
            message = "tools that this server does not run were left out"
            self.warnings.append(IgnoredParts(message, types))

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
        ids = self.render()
        self.reasoning = self._requested_reasoning(ids)
        if self._tags_are_special():
            params = replace(params, skip_special_tokens=False)
        request = service.prompts.prepare(ids, params, chat)
        budget = _thinking_budget(chat, self.reasoning)
        if self.reasoning is None or (budget is None and params.structured_outputs is None):
            return [request]
        tokenizer = service.prompts.tokenizer
        thinking = self.reasoning.for_engine(tokenizer, budget, forced is not None)
        return [replace(request, thinking=thinking)]

    def render(self) -> list[int]:
        """The prompt's token ids. Called off the event loop."""
        chat, variables = self.chat, {}
        if (effort := chat.reasoning_effort) is not None:
            efforts = self.service.settings.reasoning_effort_map
            variables["reasoning_effort"] = efforts.get(effort, effort)
        return self.service.prompts.render(chat.messages, chat, **variables)

    def _requested_reasoning(self, prompt: Sequence[int]) -> Reasoning | None:
        service = self.service
        template = self.chat.chat_template or service.client.input_processor.chat_template
        parser = service.settings.reasoning_parser
        if self.chat.reasoning_format == "none":
            parser = "none"
        continued = bool(self.chat.continue_final_message)
        return requested_reasoning(parser, template, service.prompts.tokenizer, prompt, continued)

    def _tags_are_special(self) -> bool:
        """Whether what calls and reasoning are known by would be skipped with special tokens."""
        if self.tools is not None and self.tools.format.special_tokens:
            return True
        tokenizer = self.service.prompts.tokenizer
        return self.reasoning is not None and self.reasoning.form.has_special_tokens(tokenizer)

    def new_message(self) -> AssistantMessage:
        include = self.chat.include_reasoning is not False
        parallel = self.chat.parallel_tool_calls is not False
        counter = self._reasoning_counter()
        return AssistantMessage(self.tools, parallel, self.reasoning, include, counter)

    def reasoning_tokens(self, token_ids: Sequence[int]) -> int | None:
        """How many of a whole choice's tokens are reasoning; None where it is not parted."""
        counter = self._reasoning_counter()
        if counter is None:
            return None
        counter.push(token_ids)
        return counter.count

    def _reasoning_counter(self) -> ReasoningCounter | None:
        if self.reasoning is None:
            return None
        return ReasoningCounter(self.reasoning, self.service.prompts.tokenizer)


def _thinking_budget(chat: ChatRequest, reasoning: Reasoning | None) -> int | None:
    budget = chat.thinking_token_budget
    if budget is None or budget == -1:
        return None
    if budget < -1:
        raise ApiError(
            400,
            f"thinking_token_budget must be a number of tokens, or -1 for no limit, not {budget}",
            param="thinking_token_budget",
        )
    if reasoning is None:
        raise ApiError(
            400,
            "thinking_token_budget: this server does not know how the model thinks; start it with "
            "--reasoning-parser",
            param="thinking_token_budget",
        )
    return budget


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

    def __init__(
        self,
        tools: ToolCalls | None,
        parallel: bool = True,
        reasoning: Reasoning | None = None,
        include_reasoning: bool = True,
        counter: ReasoningCounter | None = None,
    ) -> None:
        """`parallel`: whether calls after the first are given."""
        self._tools = tools
        self._calls = None if tools is None else tools.stream()
        self._parsers: list[Scanner] = [] if self._calls is None else [self._calls]
        # Harmony's channels are read by one parser, whatever is on them.
        if reasoning is not None and not isinstance(self._calls, Harmony):
            self._parsers.insert(0, reasoning.parser())
        self._parallel = parallel
        self._include_reasoning = include_reasoning
        self._counter = counter
        self._text: list[str] = []
        self._reasoning: list[str] = []

    @property
    def calls(self) -> list[ToolCall]:
        if self._calls is None:
            return []
        return self._calls.calls if self._parallel else self._calls.calls[:1]

    @property
    def content(self) -> str | None:
        """None in a message that has only reasoning or tool calls."""
        text = "".join(self._text)
        return text if text or not (self.calls or self._reasoning) else None

    @property
    def reasoning(self) -> str | None:
        """None where the model did not think aloud, or nobody wants to know."""
        return "".join(self._reasoning) or None

    @property
    def reasoning_tokens(self) -> int | None:
        """Of the tokens that were pushed; None where reasoning is not parted from the answer."""
        return None if self._counter is None else self._counter.count

    @property
    def is_plain(self) -> bool:
        """All that comes is content, as it comes."""
        return all(isinstance(one, ReasoningParser) and one.ended for one in self._parsers)

    def push(self, text: str, token_ids: Sequence[int] = ()) -> list[Delta]:
        """What is new. Text that may become something else is held back. `token_ids`: those that
        came with it, for `reasoning_tokens`."""
        if self._counter is not None:
            self._counter.push(token_ids)
        if not self._parsers:
            self._text.append(text)
            return [ContentDelta(text)]
        deltas: list[Delta] = [ContentDelta(text)]
        for parser in self._parsers:
            deltas = _through(parser, deltas)
        return self._take(deltas)

    def flush(self) -> list[Delta]:
        """What was held back: the text has ended."""
        deltas: list[Delta] = []
        for parser in self._parsers:
            deltas = _through(parser, deltas) + parser.flush()
        return self._take(deltas)

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
                if not self._include_reasoning:
                    continue
                self._reasoning.append(delta.text)
            elif isinstance(delta, ToolCallDelta) and not self._parallel and delta.index:
                continue
            given.append(delta)
        return given


def _through(parser: Scanner, deltas: list[Delta]) -> list[Delta]:
    """The deltas, with what a parser finds in the content among them."""
    found: list[Delta] = []
    for delta in deltas:
        found += parser.push(delta.text) if isinstance(delta, ContentDelta) else [delta]
    return found
