"""`CallParser`: the base of the parsers of tool calls, which find the calls in the model's text.
Arguments in JSON are emitted as the model writes them. Other arguments are converted to JSON one by
one."""

from __future__ import annotations

import json
import secrets
import string
from collections.abc import Callable, Mapping
from typing import Any, ClassVar, Final

from twostroke.serve.parsers.arguments import JsonTypes, as_json
from twostroke.serve.parsers.deltas import ToolCall, ToolCallDelta
from twostroke.serve.parsers.scanner import SPACE, Scanner, Steps

ARGUMENTS: Final = ("arguments", "parameters")  # every format accepts both names
CALL_KEYS: Final = ("name", "id", "type", *ARGUMENTS)  # the allowed keys of a call without tags
FENCE: Final = "```json"
MAX_NAME: Final = 64  # characters
_NAME_CHARS: Final = frozenset(string.ascii_letters + string.digits + "_.-")
_INVALID: Final = object()  # the result of `_loads` for a text that is not JSON

Tools = Mapping[str, Mapping[str, JsonTypes]]  # tool name → argument name → allowed types
MakeId = Callable[[], str]


class CallParser(Scanner):
    """Splits text into content and calls. A call is emitted as soon as its name is known and its
    arguments begin. If the text turns out before this point not to be a call, it is content."""

    special_tokens: ClassVar[bool] = False  # the tags are special tokens, which must not be skipped
    # The text before and after the arguments of a forced call; {name} is replaced.
    forced: ClassVar[tuple[str, str]]
    instead: ClassVar[type[CallParser] | None] = None  # the parser of forced calls

    def __init__(self, tools: Tools, make_id: MakeId | None = None) -> None:
        super().__init__()
        self.calls: list[ToolCall] = []
        self.tools = tools
        self._make_id = make_id or self.new_id
        self._no_content = True  # since the last call
        self._num_arguments = 0

    @staticmethod
    def new_id() -> str:
        return f"call_{secrets.token_hex(12)}"

    def emit_text(self, text: str) -> None:
        self._no_content &= not text
        super().emit_text(text)

    def give_up(self) -> None:
        # White space and separators after the last call belong to the call.
        if self._held is not None and self._ended and self.calls and self._no_content:
            held = self._text[self._held : self._at]
            if held.strip(SPACE) in ("", ";"):
                self._held = None
        super().give_up()

    # ── calls ───────────────────────────────────────────────────────────────────────────────

    def begin_call(self, name: str, arguments: str = "", id: str | None = None) -> None:
        """Emit the beginning of a call. Text after this point cannot become content again."""
        self.drop()
        self._flush_runs()
        call = ToolCall(id or self._make_id(), name, "")
        self._deltas.append(ToolCallDelta(len(self.calls), call.id, call.name))
        self.calls.append(call)
        self._no_content = True
        self._num_arguments = 0
        self.emit_arguments(arguments)

    def emit_arguments(self, text: str) -> None:
        self._emit(self._arguments_delta, text)

    def _arguments_delta(self, text: str) -> ToolCallDelta:
        self.calls[-1].arguments += text
        return ToolCallDelta(len(self.calls) - 1, arguments=text)

    def emit_argument(self, key: str, value_json: str) -> None:
        before = ", " if self._num_arguments else "{"
        self.emit_arguments(f"{before}{json.dumps(key, ensure_ascii=False)}: {value_json}")
        self._num_arguments += 1

    def end_arguments(self) -> None:
        """Emit the closing brace. Called after the last `emit_argument`."""
        self.emit_arguments("}" if self._num_arguments else "{}")

    def typed_argument(self, name: str, key: str, text: str) -> None:
        self.emit_argument(key, as_json(text, self.tools[name].get(key, frozenset())))

    # ── shared by several formats ───────────────────────────────────────────────────────────

    def name(self) -> Steps[str]:
        """Read a name, which may be that of an unknown tool; "" if there is none."""
        name = ""
        while len(name) < MAX_NAME:
            char = yield from self.peek()
            if not char or char not in _NAME_CHARS:
                break
            self._at += 1
            name += char
        return name

    def arguments(self, name: str, id: str | None = None) -> Steps[bool]:
        """Read the JSON object of a call's arguments; False if there is none, or no such tool."""
        if name not in self.tools or (yield from self.peek()) != "{":
            return False
        self.begin_call(name, id=id)
        yield from self.json_value(self.emit_arguments)
        return True

    def next_tag(self, *tags: str) -> Steps[str]:
        """Emit text up to one of the tags, read the tag and return it; "" if the text ends first.

        Also read calls without tags, because models forget the tags in later turns: a JSON object
        at the beginning of a line, or in a ```json fence."""
        while tag := (yield from self.text_until(*tags, FENCE, "{")):
            if tag in tags:
                return tag
            if tag == FENCE:
                found = yield from self.fence()
            elif found := self._begins_line():
                self._at -= len(tag)
                found = yield from self.call_object(CALL_KEYS)
            if not found:
                self.give_up()
        return ""

    def _begins_line(self) -> bool:
        """Return whether only white space precedes the brace in its line, or follows the last
        call."""
        before = self._text[self._held : self._at - 1]
        return self._no_content or "\n" in before

    def call_object(self, keys: tuple[str, ...] = ()) -> Steps[bool]:
        """Read `{"name": …, "arguments": {…}}`, in either order. Return False if the object is no
        call. With `keys`, an object with any other key is no call."""
        if not (yield from self.accept("{")):
            return False
        name, arguments, begun = "", "", False
        while True:
            yield from self.space()
            key = _loads((yield from self.json_value()))
            if not isinstance(key, str) or not (yield from self.accept(":", after=SPACE)):
                return begun
            if keys and key not in keys and not begun:
                return False
            yield from self.space()
            is_arguments = key in ARGUMENTS
            if name and is_arguments and not begun and (yield from self.peek()) == "{":
                self.begin_call(name)
                begun = True
                yield from self.json_value(self.emit_arguments)
            else:
                text = yield from self.json_value()
                value = _loads(text)
                if value is _INVALID:
                    return begun
                if key == "name" and not begun:
                    if name or not isinstance(value, str) or value not in self.tools:
                        return False
                    name = value
                elif is_arguments and not begun and value is not None:
                    arguments = text if isinstance(value, dict) else value
                    if not isinstance(_loads(arguments), dict):  # (it may be JSON in a string)
                        return False
                if name and arguments and not begun:
                    self.begin_call(name, arguments)
                    begun = True
            if (yield from self.accept(",", after=SPACE)):
                continue
            if not (yield from self.accept("}", after=SPACE)):
                return begun
            if name and not begun:
                self.begin_call(name, "{}")
            return bool(name)

    def call_list(self) -> Steps[bool]:
        """Read a list of calls `[{…}, {…}]`. Return False if the first entry is not a call."""
        found = False
        if not (yield from self.accept("[")):
            return False
        while True:
            yield from self.space()
            if found:
                self.hold()
            if not (yield from self.call_object()):
                if found:
                    self.give_up()
                return found
            found = True
            if not (yield from self.accept(",", after=SPACE)):
                break
        yield from self.accept("]", after=SPACE)
        return True

    def json_call(self, end: str) -> Steps[bool]:
        """Read the JSON object of a call, and its closing tag `end`, which some models forget."""
        yield from self.space()
        if not (yield from self.call_object()):
            return False
        yield from self.accept(end, after=SPACE)
        return True

    def fence(self) -> Steps[bool]:
        """Read the call in a ```json fence, and the end of the fence."""
        return (yield from self.json_call("```"))


def _loads(text: Any) -> Any:
    try:
        return json.loads(text)
    except (TypeError, ValueError, RecursionError):
        return _INVALID
