"""Parsers for formats whose arguments are texts without a type. The tool's schema has the types.

    qwen3_coder  <tool_call>\\n<function=name>\\n<parameter=key>\\nvalue\\n</parameter>\\n
                 </function>\\n</tool_call>, any number of them
    seed_oss     the same between <seed:tool_call> and </seed:tool_call>
    glm45        <tool_call>name\\n<arg_key>key</arg_key>\\n<arg_value>value</arg_value>\\n
                 </tool_call>, any number of them
    pythonic     [name(key=value, …), …], the whole text; values are Python literals
    olmo3        text<function_calls>\\nname(key=value, …)\\n…\\n</function_calls>
    minicpm5     <function name="name"><param name="key">value</param></function>, any number of
                 them; a value may be in <![CDATA[ ]]>
    functiongemma  <start_function_call>call:name{key:<escape>value<escape>,…}<end_function_call>,
                 any number of them; numbers, lists and objects are not escaped

An argument is emitted when it is complete. JSON between the tags of a call is also accepted.
"""

from __future__ import annotations

import json
from typing import ClassVar
from xml.sax.saxutils import unescape

from twostroke.serve.parsers.arguments import JsonTypes, as_json, python_as_json
from twostroke.serve.parsers.calls import MAX_NAME, CallParser
from twostroke.serve.parsers.json_formats import Hermes, Llama
from twostroke.serve.parsers.scanner import SPACE, Steps

MAX_KEY = 256  # characters
_UNESCAPED = frozenset({"integer", "boolean", "null"})  # types of a value without <escape>


class Qwen3Coder(CallParser):
    instead = Hermes
    begin, end = "<tool_call>", "</tool_call>"

    def read(self) -> Steps[None]:
        while tag := (yield from self.next_tag(self.begin, "<function=")):
            if tag == self.begin:
                tag = yield from self.accept("<function=", after=SPACE)
            if not (yield from (self._call() if tag else self.json_call(self.end))):
                self.give_up()

    def _call(self) -> Steps[bool]:
        name, tag = yield from self.until(">", max_chars=MAX_NAME)
        if not tag or name not in self.tools:
            return False
        self.begin_call(name)
        while (yield from self.accept("<parameter=", after=SPACE)):
            key, tag = yield from self.until(">", max_chars=MAX_KEY)
            if not tag:
                return True
            value, tag = yield from self.until("</parameter>")
            if tag:
                self.typed_argument(name, key, value.removeprefix("\n").removesuffix("\n"))
        # If the text was cut off, the arguments stay incomplete.
        if (yield from self.accept("</function>", after=SPACE)):
            self.end_arguments()
        yield from self.accept(self.end, after=SPACE)
        return True


class SeedOss(Qwen3Coder):
    begin, end = "<seed:tool_call>", "</seed:tool_call>"


class Glm45(CallParser):
    instead = Hermes

    def read(self) -> Steps[None]:
        while (yield from self.next_tag("<tool_call>")):
            yield from self.space()
            if (yield from self.peek()) == "{":
                found = yield from self.json_call("</tool_call>")
            else:
                found = yield from self._call((yield from self.name()))
            if not found:
                self.give_up()

    def _call(self, name: str) -> Steps[bool]:
        tag = yield from self.accept("<arg_key>", "</tool_call>", after=SPACE)
        if not tag or name not in self.tools:
            return False
        self.begin_call(name)
        while tag == "<arg_key>":
            key, tag = yield from self.until("</arg_key>", max_chars=MAX_KEY)
            if tag and (yield from self.accept("<arg_value>", after=SPACE)):
                value, tag = yield from self.until("</arg_value>")
                if tag:
                    self.typed_argument(name, key.strip(SPACE), value)
            tag = yield from self.accept("<arg_key>", "</tool_call>", after=SPACE)
        if tag:
            self.end_arguments()
        return True


class Pythonic(CallParser):
    instead: ClassVar[type[CallParser] | None] = Llama

    def read(self) -> Steps[None]:
        self.hold()
        yield from self.space()
        if (yield from self.accept("<|python_start|>")):
            yield from self.space()
        if not (yield from self.accept("[")):
            return
        while (yield from self._call()):
            if not (yield from self.accept(",", after=SPACE)):
                yield from self.accept("]", after=SPACE)
                yield from self.accept("<|python_end|>", after=SPACE)
                return
            self.hold()

    def _call(self) -> Steps[bool]:
        yield from self.space()
        name = yield from self.name()
        if name not in self.tools or not (yield from self.accept("(")):
            return False
        begun = False
        while not (yield from self.accept(")", after=SPACE)):
            yield from self.space()
            key = yield from self.name()
            if not key or not (yield from self.accept("=", after=SPACE)):
                return begun
            value, ended = yield from self._value()
            if not ended:
                return begun
            if not begun:
                self.begin_call(name)
                begun = True
            self.emit_argument(key, self._as_json(name, key, value.strip(SPACE)))
            yield from self.accept(",", after=SPACE)
        if not begun:
            self.begin_call(name)
        self.end_arguments()
        return True

    def _value(self) -> Steps[tuple[str, bool]]:
        """Read the source of a value up to the next comma or bracket; return if it is complete."""
        parts: list[str] = []
        depth, quote = 0, ""
        while char := (yield from self.peek()):
            if quote and char == "\\":
                if not (yield from self.peek(1)):
                    break
                char = self._text[self._at : self._at + 2]
            elif char == quote:
                quote = ""
            elif not quote and char in "\"'":
                quote = char
            elif not quote and char in "([{":
                depth += 1
            elif not quote and char in ")]},":
                if depth == 0:
                    return "".join(parts), True
                depth -= char != ","
            self._at += len(char)
            parts.append(char)
        return "".join(parts), False

    def _as_json(self, name: str, key: str, source: str) -> str:
        literal = python_as_json(source)
        if literal is not None:
            return literal
        return as_json(source, self.tools[name].get(key, frozenset({"boolean", "null"})))


class Olmo3(Pythonic):
    instead = Hermes

    def read(self) -> Steps[None]:
        while (yield from self.next_tag("<function_calls>")):
            while (yield from self._call()):
                yield from self.space()
                self.hold()
            if not (yield from self.accept("</function_calls>", after=SPACE)):
                self.give_up()


class MiniCpm5(CallParser):
    instead = Hermes

    def read(self) -> Steps[None]:
        while (yield from self.next_tag("<function name=")):
            name = yield from self._quoted()
            if name not in self.tools:
                self.give_up()
                continue
            self.begin_call(name)
            while (yield from self.accept("<param name=", after=SPACE)):
                key = yield from self._quoted()
                value = yield from self._value()
                if value is None:
                    return
                self.typed_argument(name, key, value)
            # If the text was cut off, the arguments stay incomplete.
            if (yield from self.accept("</function>", after=SPACE)):
                self.end_arguments()

    def _quoted(self) -> Steps[str]:
        """Read the quoted name at the end of a tag, and the end of the tag; "" if there is none."""
        quote = yield from self.accept('"', "'")
        name, tag = yield from self.until(f"{quote}>", max_chars=MAX_KEY)
        return name if quote and tag else ""

    def _value(self) -> Steps[str | None]:
        """Read the text of an argument and its closing tag; None if the text ends first."""
        is_data = yield from self.accept("<![CDATA[", after=SPACE)
        value, tag = yield from self.until("]]>" if is_data else "</param>")
        if not tag:
            return None
        if is_data:
            yield from self.accept("</param>", after=SPACE)
            return value
        return unescape(value.strip(SPACE), {"&quot;": '"', "&apos;": "'"})


class FunctionGemma(CallParser):
    special_tokens = True
    instead = Hermes

    def read(self) -> Steps[None]:
        while (yield from self.next_tag("<start_function_call>")):
            if not (yield from self._call()):
                self.give_up()

    def _call(self) -> Steps[bool]:
        yield from self.accept("call:", after=SPACE)
        name = yield from self.name()
        if name not in self.tools or not (yield from self.accept("{")):
            return False
        self.begin_call(name)
        while not (yield from self.accept("}", after=SPACE)):
            key, tag = yield from self.until(":", max_chars=MAX_KEY)
            value = yield from self._value(self.tools[name].get(key.strip(SPACE), frozenset()))
            if not tag or not value:
                return True  # cut off: the arguments stay incomplete
            self.emit_argument(key.strip(SPACE), value)
            yield from self.accept(",", after=SPACE)
        self.end_arguments()
        yield from self.accept("<end_function_call>", after=SPACE)
        return True

    def _value(self, types: JsonTypes) -> Steps[str]:
        """Read a value and return it as JSON; "" if the text ends first."""
        parts: list[str] = []
        depth = 0
        while (char := (yield from self.peek())) and (depth or char not in ",}"):
            if (yield from self.accept("<escape>")):
                text, tag = yield from self.until("<escape>")
                if not tag:
                    return ""
                parts.append(
                    json.dumps(text, ensure_ascii=False) if depth else as_json(text, types)
                )
            elif char in "[]{}," or (char == ":" and depth):
                self._at += 1
                depth += (char in "[{") - (char in "]}")
                parts.append(char)
            else:
                word = (yield from self._word("[]{},:" if depth else ",}")).strip(SPACE)
                is_key = depth > 0 and (yield from self.peek()) == ":"
                if word and is_key:
                    parts.append(json.dumps(word, ensure_ascii=False))
                elif word:
                    parts.append(python_as_json(word) or as_json(word, types | _UNESCAPED))
        return "".join(parts) if char else ""

    def _word(self, ends: str) -> Steps[str]:
        """Read at least one character, up to one of `ends` or an escaped text."""
        word = ""
        while (char := (yield from self.peek())) and char not in ends and (char != "<" or not word):
            self._at += 1
            word += char
        return word
