"""Parsers for formats whose arguments are JSON, which is emitted as the model writes it.

    hermes          text<tool_call>\\n{"name": …, "arguments": {…}}\\n</tool_call>, any number
    llama3_json     {"name": …, "parameters": {…}}, the whole text; several calls separated by ;
    mistral         text[TOOL_CALLS][{"name": …, "arguments": {…}}, …], and since 2025
                    text[TOOL_CALLS]name[ARGS]{…}, with [CALL_ID]… before [ARGS], or without [ARGS]
    granite         text<|tool_call|>[{"name": …, "arguments": {…}}, …], with <tool_call> as well
    internlm        text<|action_start|><|plugin|>\\n{"name": …, "parameters": {…}}<|action_end|>
    phi4_mini_json  text functools[{"name": …, "arguments": {…}}, …]
    deepseek_v3     <｜tool▁calls▁begin｜><｜tool▁call▁begin｜>function<｜tool▁sep｜>name\\n```json
                    \\n{…}\\n```<｜tool▁call▁end｜>…<｜tool▁calls▁end｜>
    deepseek_v31    the same with name<｜tool▁sep｜>{…} between the tags of a call
    xlam            [{"name": …, "arguments": {…}}, …], the whole text, or in <tool_call>, or in a
                    fence, or after [TOOL_CALLS]
    kimi_k2         <|tool_calls_section_begin|><|tool_call_begin|>functions.name:0
                    <|tool_call_argument_begin|>{…}<|tool_call_end|>…<|tool_calls_section_end|>

Missing closing tags are accepted.
"""

from __future__ import annotations

import secrets
import string
from abc import abstractmethod
from typing import ClassVar

from twostroke.serve.parsers.calls import FENCE, CallParser
from twostroke.serve.parsers.scanner import SPACE, Steps


class Hermes(CallParser):
    forced = ('<tool_call>\n{{"name": "{name}", "arguments": ', "}\n</tool_call>")

    def read(self) -> Steps[None]:
        while (yield from self.next_tag("<tool_call>")):
            if not (yield from self.json_call("</tool_call>")):
                self.give_up()


class Llama(CallParser):
    forced = ('{{"name": "{name}", "parameters": ', "}")

    def read(self) -> Steps[None]:
        while True:
            self.hold()
            yield from self.space(SPACE + ";" if self.calls else SPACE)
            if (yield from self.accept(FENCE)):
                found = yield from self.fence()
            else:
                if (yield from self.accept("<|python_tag|>", "<|python_start|>")):
                    yield from self.space()
                found = yield from self.call_object()
            if not found:
                return


class Mistral(CallParser):
    special_tokens = True
    forced = ('[TOOL_CALLS][{{"name": "{name}", "arguments": ', "}]")

    @staticmethod
    def new_id() -> str:
        """Nine letters and digits: Mistral's templates accept no other ids."""
        return "".join(secrets.choice(string.ascii_letters + string.digits) for _ in range(9))

    def read(self) -> Steps[None]:
        while (yield from self.next_tag("[TOOL_CALLS]")):
            yield from self.space()
            if (yield from self.peek()) == "[":
                found = yield from self.call_list()
            else:
                found = yield from self._named_call()
            if not found:
                self.give_up()

    def _named_call(self) -> Steps[bool]:
        name = yield from self.name()
        if (yield from self.accept("[CALL_ID]")):
            yield from self.name()
        yield from self.accept("[ARGS]")
        yield from self.space()
        return (yield from self.arguments(name))


class Granite(CallParser):
    special_tokens = True
    forced = ('<|tool_call|>[{{"name": "{name}", "arguments": ', "}]")

    def read(self) -> Steps[None]:
        while (yield from self.next_tag("<|tool_call|>", "<tool_call>")):
            yield from self.space()
            is_object = (yield from self.peek()) == "{"
            if (yield from (self.call_object() if is_object else self.call_list())):
                yield from self.accept("</tool_call>", "<|/tool_call|>", after=SPACE)
            else:
                self.give_up()


class InternLm(CallParser):
    special_tokens = True
    forced = ('<|action_start|><|plugin|>\n{{"name": "{name}", "parameters": ', "}<|action_end|>")

    def read(self) -> Steps[None]:
        while (yield from self.next_tag("<|action_start|>")):
            yield from self.accept("<|plugin|>", after=SPACE)
            if not (yield from self.json_call("<|action_end|>")):
                self.give_up()


class Phi4Mini(CallParser):
    forced = ('functools[{{"name": "{name}", "arguments": ', "}]")

    def read(self) -> Steps[None]:
        while (yield from self.next_tag("functools")):
            yield from self.space()
            if not (yield from self.call_list()):
                self.give_up()


class Xlam(CallParser):
    forced = ('[{{"name": "{name}", "arguments": ', "}]")

    def read(self) -> Steps[None]:
        self.hold()
        yield from self.space()
        is_list = (yield from self.peek()) == "[" and (yield from self.peek(1)) != "T"
        if not (is_list and (yield from self.call_list())):
            self.give_up()
        while (yield from self.next_tag("[TOOL_CALLS]", "<tool_call>")):
            if not (yield from self._calls("</tool_call>")):
                self.give_up()

    def fence(self) -> Steps[bool]:
        return (yield from self._calls("```"))

    def _calls(self, end: str) -> Steps[bool]:
        yield from self.space()
        if (yield from self.peek()) != "[":
            return (yield from self.json_call(end))
        found = yield from self.call_list()
        if found:
            yield from self.accept(end, after=SPACE)
        return found


class TaggedCalls(CallParser):
    """Calls with tags around each call, and around the section of all calls."""

    begin: ClassVar[str]
    all_begin: ClassVar[str]
    all_end: ClassVar[str]

    def read(self) -> Steps[None]:
        while tag := (yield from self.next_tag(self.all_begin, self.begin)):
            if tag == self.all_begin:
                yield from self.accept(self.begin, after=SPACE)
            if (yield from self._call()):
                yield from self.accept(self.all_end, after=SPACE)
            else:
                self.give_up()

    @abstractmethod
    def _call(self) -> Steps[bool]:
        """Read the text after `begin`. Return whether it was a call."""


class DeepSeek(TaggedCalls):
    special_tokens = True
    begin, end = "<｜tool▁call▁begin｜>", "<｜tool▁call▁end｜>"
    all_begin, all_end = "<｜tool▁calls▁begin｜>", "<｜tool▁calls▁end｜>"
    separator = "<｜tool▁sep｜>"
    forced = (
        f"{all_begin}{begin}function{separator}{{name}}\n```json\n",
        f"\n```{end}{all_end}",
    )

    def _call(self) -> Steps[bool]:
        name = yield from self.name()
        if not (yield from self.accept(self.separator)):
            return False
        name = (yield from self.name()) or name  # the name or a type precedes the separator
        yield from self.accept("```json", after=SPACE)
        yield from self.space()
        if not (yield from self.arguments(name)):
            return False
        yield from self.accept("```", after=SPACE)
        yield from self.accept(self.end, after=SPACE)
        return True


class DeepSeekV31(DeepSeek):
    forced = (
        f"{DeepSeek.all_begin}{DeepSeek.begin}{{name}}{DeepSeek.separator}",
        f"{DeepSeek.end}{DeepSeek.all_end}",
    )


class KimiK2(TaggedCalls):
    special_tokens = True
    begin, end = "<|tool_call_begin|>", "<|tool_call_end|>"
    all_begin, all_end = "<|tool_calls_section_begin|>", "<|tool_calls_section_end|>"
    separator = "<|tool_call_argument_begin|>"
    forced = (f"{all_begin}{begin}functions.{{name}}:0{separator}", f"{end}{all_end}")

    def _call(self) -> Steps[bool]:
        # The id of a call contains the tool's name: functions.name:0
        id, tag = yield from self.until(self.separator, max_chars=128)
        if not tag:
            return False
        id = id.strip(SPACE)
        yield from self.space()
        if not (yield from self.arguments(id.partition(".")[2].rpartition(":")[0], id)):
            return False
        yield from self.accept(self.end, after=SPACE)
        return True
