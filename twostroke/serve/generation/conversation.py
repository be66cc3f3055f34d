"""`ConversationGeneration`: a conversation of any API. `AssistantMessage`: its answer."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Sequence
from dataclasses import replace
from typing import TypeVar

import msgspec

from twostroke.request import EngineRequest
from twostroke.serve.error_responses import ApiError
from twostroke.serve.fields.body_fields import Body
from twostroke.serve.fields.protocol import ChatRequest
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


class ConversationGeneration(Generation[R]):
    """A request that is answered with an assistant's message, or with `n` messages.

    A subclass for each API translates the request into OpenAI's chat request (`as_chat`) and writes
    the response from `AssistantMessage`. This class does the work in between."""

    def __init__(self, service: Service, request: R) -> None:
        super().__init__(service, request)
        self.chat = self.as_chat()
        self.fields = self.chat
        self.num_choices = self.chat.n or 1
        self.tools: ToolCalls | None = None
        self.reasoning: Reasoning | None = None

    def drop_server_tools(self, types: Sequence[str]) -> None:
        """Warn that the prompt does not have these types of tools, which the client expects the
        server to run: this server runs no tools."""
        if types:
            message = "tools that this server does not run were left out"
            self.warnings.append(IgnoredParts(message, types))

    @abstractmethod
    def as_chat(self) -> ChatRequest:
        """Return the request in OpenAI's form; raise `ApiError` for unsupported features."""

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
        """Return the prompt's token ids. Called off the event loop."""
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
        """Return whether the tags of calls or of reasoning are special tokens."""
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
        """Return the number of reasoning tokens of a choice; None if reasoning is not parsed."""
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
            "thinking_token_budget: this server does not know the model's reasoning format; start "
            "it with --reasoning-parser",
            param="thinking_token_budget",
        )
    return budget


def requested_tools(
    request: ChatRequest, settings: ServeSettings, chat_template: str | None
) -> ToolCalls | None:
    """Return the tools that the model may call, or None. The template may still show tools."""
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
    """The streamed message of one choice: reasoning, text and tool calls."""

    def __init__(
        self,
        tools: ToolCalls | None,
        parallel: bool = True,
        reasoning: Reasoning | None = None,
        include_reasoning: bool = True,
        counter: ReasoningCounter | None = None,
    ) -> None:
        """`parallel`: include calls after the first one."""
        self._tools = tools
        self._calls = None if tools is None else tools.stream()
        self._parsers: list[Scanner] = [] if self._calls is None else [self._calls]
        # One parser reads all of Harmony's channels.
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
        """The text; None in a message that has only reasoning or tool calls."""
        text = "".join(self._text)
        return text if text or not (self.calls or self._reasoning) else None

    @property
    def reasoning(self) -> str | None:
        """The reasoning; None if there is none or the request excludes it."""
        return "".join(self._reasoning) or None

    @property
    def reasoning_tokens(self) -> int | None:
        """The number of reasoning tokens so far; None if reasoning is not parsed."""
        return None if self._counter is None else self._counter.count

    @property
    def is_plain(self) -> bool:
        """Return whether all further text is content."""
        return all(isinstance(each, ReasoningParser) and each.ended for each in self._parsers)

    def push(self, text: str, token_ids: Sequence[int] = ()) -> list[Delta]:
        """Add text and return the new deltas. Text that may be part of a tag is held back.
        `token_ids`: the tokens of the text, for `reasoning_tokens`."""
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
        """Return the deltas of the text held back: the text has ended."""
        deltas: list[Delta] = []
        for parser in self._parsers:
            deltas = _through(parser, deltas) + parser.flush()
        return self._take(deltas)

    def finish_reason(self, reason: str | None) -> str | None:
        """OpenAI's finish reason: "tool_calls" unless the tool was forced by name."""
        named = self._tools is not None and self._tools.choice.startswith("name:")
        return "tool_calls" if self.calls and reason == "stop" and not named else reason

    def _take(self, deltas: list[Delta]) -> list[Delta]:
        taken: list[Delta] = []
        for delta in deltas:
            if isinstance(delta, ContentDelta):
                self._text.append(delta.text)
            elif isinstance(delta, ReasoningDelta):
                if not self._include_reasoning:
                    continue
                self._reasoning.append(delta.text)
            elif isinstance(delta, ToolCallDelta) and not self._parallel and delta.index:
                continue
            taken.append(delta)
        return taken


def _through(parser: Scanner, deltas: list[Delta]) -> list[Delta]:
    """Pass the content of the deltas through a parser."""
    found: list[Delta] = []
    for delta in deltas:
        found += parser.push(delta.text) if isinstance(delta, ContentDelta) else [delta]
    return found
