"""Tool calls: what a request says of its tools, and the calls in what a model writes. No torch.

    hermes        text<tool_call>\\n{"name": …, "arguments": {…}}\\n</tool_call>, any number of them
    llama3_json   {"name": …, "parameters": {…}}, the whole text; several with ; between

A call is emitted as soon as its name is known and its arguments begin, and then as it is written.
What turns out to be no call before that point is content, as it was written.
"""

from __future__ import annotations

import json
import re
import secrets
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Final

from twostroke.errors import RequestError, nearest
from twostroke.request import StructuredOutputs
from twostroke.serve.deltas import ContentDelta, Delta, ToolCall, ToolCallDelta
from twostroke.structured import JSON_SPACE

PARSERS: Final = ("hermes", "llama3_json")
OPEN, CLOSE, PYTHON_TAG = "<tool_call>", "</tool_call>", "<|python_tag|>"
MAX_TOOLS: Final = 128
NAME: Final = re.compile(r"[a-zA-Z0-9_.-]{1,64}")
SPACE: Final = " \t\r\n"
ARGUMENTS: Final = ("arguments", "parameters")  # either style is understood in both


def choose_parser(chat_template: str | None) -> str:
    """The style in which a chat template shows calls."""
    template = chat_template or ""
    if OPEN not in template and (PYTHON_TAG in template or "<|start_header_id|>" in template):
        return "llama3_json"
    return "hermes"


class ToolCalls:
    """The tools of one request. `parser` is "auto" to go by the chat template."""

    def __init__(
        self, parser: str, tools: Any, tool_choice: Any = None, chat_template: str | None = None
    ) -> None:
        known = ("auto", *PARSERS)
        if parser not in known:
            hint = nearest(parser, known) if isinstance(parser, str) else ""
            raise RequestError(
                f"there is no tool parser {parser!r}{hint or '.'} There are {', '.join(known)}"
            )
        self.parser = choose_parser(chat_template) if parser == "auto" else parser
        self._schemas = _read_tools(tools)
        self.choice = _read_choice(tool_choice, self._schemas)

    @property
    def names(self) -> tuple[str, ...]:
        """The tools that may be called."""
        if self.choice == "none":
            return ()
        forced = self.choice.removeprefix("name:")
        return (forced,) if forced in self._schemas else tuple(self._schemas)

    def structured_outputs(self) -> StructuredOutputs | None:
        """A grammar that makes the model call a tool, where it must."""
        if self.choice in ("auto", "none"):
            return None
        before, after, key = f"{OPEN}\n", f"\n{CLOSE}", "arguments"
        if self.parser == "llama3_json":
            before, after, key = "", "", "parameters"
        calls, rules = [], []
        for n, name in enumerate(self.names):
            head = json.dumps(f'{before}{{"name": {json.dumps(name)}, "{key}": ')
            calls.append(f"{head} arguments_{n} {json.dumps('}' + after)}")
            # The arguments are a schema of their own, so that their references hold.
            settings = {"whitespace_pattern": JSON_SPACE, "coerce_one_of": True}
            schema = self._schemas[name] | {"x-guidance": settings}
            rules.append(f"arguments_{n}: %json {json.dumps(schema)}")
        return StructuredOutputs(grammar="\n".join(["start: " + " | ".join(calls), *rules]))

    def drop_schemas(self) -> None:
        """Keep the names, which is all that is needed to read calls."""
        self._schemas = {name: {} for name in self._schemas}

    def stream(self, make_id: Callable[[], str] | None = None) -> ToolStream:
        return ToolStream(self.parser, self.names, make_id or _new_id)


def _new_id() -> str:
    return f"call_{secrets.token_hex(12)}"


# ── what a request says ─────────────────────────────────────────────────────────────────────────


def _read_tools(tools: Any) -> dict[str, dict[str, Any]]:
    """By name: the schema of its arguments."""
    if tools is None:
        return {}
    if not isinstance(tools, Sequence) or isinstance(tools, str | bytes):
        raise RequestError("tools must be a list of tools")
    if len(tools) > MAX_TOOLS:
        raise RequestError(f"tools has {len(tools)} entries; at most {MAX_TOOLS} are taken")
    schemas: dict[str, dict[str, Any]] = {}
    for n, tool in enumerate(tools):
        function = tool.get("function") if isinstance(tool, Mapping) else None
        if not isinstance(function, Mapping) or tool.get("type") != "function":
            raise RequestError(
                f'tools[{n}] must be {{"type": "function", "function": {{"name": …}}}}'
            )
        name = function.get("name")
        if not isinstance(name, str) or not NAME.fullmatch(name):
            raise RequestError(
                f"tools[{n}].function.name must be 1 to 64 letters, digits, _, . or -"
            )
        if name in schemas:
            raise RequestError(f"tools has two functions named {name!r}; rename one")
        parameters = function.get("parameters")
        if not isinstance(parameters, Mapping | None):
            raise RequestError(f"tools[{n}].function.parameters must be a JSON schema (an object)")
        if not isinstance(function.get("description"), str | None):
            raise RequestError(f"tools[{n}].function.description must be a string")
        schemas[name] = _arguments_schema(parameters)
    return schemas


def _arguments_schema(parameters: Mapping[str, Any] | None) -> dict[str, Any]:
    if not parameters:
        return {"type": "object", "properties": {}, "additionalProperties": False}
    typed = {"type", "$ref", "anyOf", "oneOf", "allOf"} & parameters.keys()
    return dict(parameters) if typed else {"type": "object", **parameters}


def _read_choice(choice: Any, schemas: Mapping[str, Any]) -> str:
    """ "auto", "none", "required", or "name:" and the tool that must be called."""
    if choice is None:
        return "auto" if schemas else "none"
    if isinstance(choice, Mapping):
        function = choice.get("function")
        name = function.get("name") if isinstance(function, Mapping) else None
        if choice.get("type") != "function" or not isinstance(name, str):
            raise RequestError('tool_choice must be {"type": "function", "function": {"name": …}}')
        if name not in schemas:
            raise RequestError(
                f"tool_choice names {name!r}, which is not among the tools{nearest(name, schemas)}"
            )
        return f"name:{name}"
    if choice not in ("auto", "none", "required"):
        raise RequestError(
            'tool_choice must be "auto", "none", "required" or '
            '{"type": "function", "function": {"name": …}}'
        )
    if choice != "none" and not schemas:
        raise RequestError(f'tool_choice is "{choice}", but no tools are given')
    return str(choice)


# ── what a model writes ─────────────────────────────────────────────────────────────────────────


class ToolStream:
    """Text as it comes → content and calls. Where the text is cut makes no difference."""

    def __init__(self, parser: str, names: Sequence[str], make_id: Callable[[], str]) -> None:
        self.calls: list[ToolCall] = []
        self._names = names
        self._make_id = make_id
        self._deltas: list[Delta] = []
        self._held = ""  # may yet turn out to be white space around a call, or a tag
        self._reader: _CallReader | None = None
        self._call_emitted = False  # of the call being read, its name
        self._num_emitted = 0  # characters of its arguments
        self._no_text = True  # since the last call
        self._hermes = parser == "hermes"
        self._read: Callable[[str], None] = self._content if self._hermes else self._start
        if not names:
            self._read = self._emit_text

    def push(self, text: str) -> list[Delta]:
        for char in text:
            self._read(char)
        self._emit_arguments()
        return self._take()

    def flush(self) -> list[Delta]:
        """The text has ended."""
        reader, self._reader = self._reader, None
        if reader is not None and reader.begun is None:
            self._held += reader.raw
        # White space and separators after a last call belong to it.
        if not (self.calls and self._no_text and self._held.strip(SPACE) in ("", ";")):
            self._emit_held()
        self._read = self._emit_text
        return self._take()

    def _take(self) -> list[Delta]:
        deltas, self._deltas = self._deltas, []
        return deltas

    # Each of these takes one character.

    def _content(self, char: str) -> None:
        """Hermes, outside of calls: white space and what may be a tag wait."""
        self._held += char
        rest = self._held.lstrip(SPACE)
        if rest == OPEN:
            self._read = self._inside
        elif not OPEN.startswith(rest):
            # The character may begin a tag or stand before one, although what was held does not.
            self._held = self._held[:-1]
            self._emit_held()
            self._held = char
            if char not in SPACE and char != OPEN[0]:
                self._emit_held()

    def _start(self, char: str) -> None:
        """Llama: where a call may begin."""
        self._held += char
        rest = self._held.lstrip(SPACE + (";" if self.calls else ""))
        if rest in ("{", PYTHON_TAG + "{"):
            self._held = self._held[:-1]
            self._begin(char)
        elif not PYTHON_TAG.startswith(rest) and rest.rstrip(SPACE) != PYTHON_TAG:
            self._emit_held()
            self._read = self._emit_text

    def _inside(self, char: str) -> None:
        """Hermes, after the tag."""
        if char == "{":
            self._begin(char)
        elif char in SPACE:
            self._held += char
        else:
            self._no_call(char)

    def _begin(self, char: str) -> None:
        self._reader, self._call_emitted, self._num_emitted = _CallReader(self._names), False, 0
        self._read = self._call
        self._call(char)

    def _call(self, char: str) -> None:
        reader = self._reader
        assert reader is not None
        good = reader.push(char)
        if reader.begun is not None and not self._call_emitted:
            self._emit_call(reader)
        if not good:
            self._emit_arguments()
            self._reader = None
            if reader.begun is not None:  # the call stands as far as it went
                self._no_call(char)
            else:
                self._no_call(reader.raw + char)
        elif reader.done:
            self._emit_arguments()
            self._reader = None
            self._held = ""
            self._read = self._after if self._hermes else self._start

    def _after(self, char: str) -> None:
        """Hermes, after a call: the closing tag, which some forget."""
        self._held += char
        rest = self._held.lstrip(SPACE)
        if rest == CLOSE:
            self._held = ""
            self._read = self._content
        elif not CLOSE.startswith(rest):
            again, self._held = self._held, ""
            self._read = self._content
            for one in again:
                self._read(one)

    def _no_call(self, rest: str) -> None:
        self._emit_held()
        self._read = self._content if self._hermes else self._emit_text
        for char in rest:
            self._read(char)

    # What comes out.

    def _emit_text(self, text: str) -> None:
        last = self._deltas[-1] if self._deltas else None
        self._no_text &= not text
        if isinstance(last, ContentDelta):
            self._deltas[-1] = ContentDelta(last.text + text)
        elif text:
            self._deltas.append(ContentDelta(text))

    def _emit_held(self) -> None:
        self._emit_text(self._held)
        self._held = ""

    def _emit_call(self, reader: _CallReader) -> None:
        assert reader.begun is not None
        call = ToolCall(self._make_id(), reader.begun, "")
        self._deltas.append(ToolCallDelta(len(self.calls), call.id, call.name))
        self.calls.append(call)
        self._held = ""
        self._call_emitted = self._no_text = True

    def _emit_arguments(self) -> None:
        reader = self._reader
        if reader is None or reader.begun is None:
            return
        new = reader.arguments[self._num_emitted :]
        if new:
            self._num_emitted += len(new)
            self.calls[-1].arguments += new
            self._deltas.append(ToolCallDelta(len(self.calls) - 1, arguments=new))


class _CallReader:
    """One call, `{"name": …, "arguments": {…}}`, character by character.

    `begun` is its name once that is known and the arguments are a good beginning; from then on
    it is a call, whatever follows.
    """

    def __init__(self, names: Sequence[str]) -> None:
        self.raw = ""
        self.begun: str | None = None
        self.arguments = ""
        self.done = False
        self._names = names
        self._name: str | None = None
        self._expect = "{"  # {, key, :, value, inside (a value), or , (or the end)
        self._key = ""
        self._is_key = False  # what is read now
        self._value = ""
        self._depth = 0
        self._in_string = self._escaped = False

    def push(self, char: str) -> bool:
        """False if the character cannot follow; it has not been taken then."""
        good = self._inside(char) if self._expect == "inside" else self._between(char)
        if good:
            self.raw += char
        return good

    def _between(self, char: str) -> bool:
        if char in SPACE:
            return True
        expect = self._expect
        if expect == "{" and char == "{":
            self._expect = "key"
        elif (expect == "key" and char == '"') or (expect == "value" and char not in ",:}]"):
            self._is_key = expect == "key"
            self._expect = "inside"
            self._value, self._depth, self._in_string = "", 0, False
            return self._inside(char)
        elif expect == ":" and char == ":":
            self._expect = "value"
        elif expect == "," and char == ",":
            self._expect = "key"
        elif expect == "," and char == "}":
            return self._finish()
        else:
            return False
        return True

    def _inside(self, char: str) -> bool:
        """In a key or a value."""
        if self._in_string:
            self._in_string = self._escaped or char != '"'
            self._escaped = char == "\\" and not self._escaped
            ended = not self._in_string and not self._depth
        elif char == '"':
            self._in_string, ended = True, False
        elif char in "{[":
            self._depth += 1
            ended = False
        elif char in "}]" and self._depth:
            self._depth -= 1
            ended = not self._depth
        elif not self._depth and (char in SPACE or char in ",}]"):  # after a number or a word
            return self._end_value() and self._between(char)
        else:
            ended = False
        self._value += char
        if self._key in ARGUMENTS and not self._is_key and self._value[0] == "{":
            self.arguments += char
            self._may_begin()
        return self._end_value() if ended else True

    def _end_value(self) -> bool:
        try:
            value = json.loads(self._value)
        except (ValueError, RecursionError):
            # Once arguments are being emitted, whether they are good JSON is the client's to judge.
            value = None
            if self.begun is None:
                return False
        if self._is_key:
            self._key, self._expect = value, ":"
            return isinstance(value, str)
        self._expect = ","
        if self._key == "name":
            if value not in self._names or self._name is not None:
                return self.begun is not None
            self._name = value
            self._may_begin()
        elif self._key in ARGUMENTS and not self.arguments:
            return self._other_arguments(value)
        return True

    def _other_arguments(self, value: Any) -> bool:
        """Not an object: some models write none, or one inside a string."""
        if value is None:
            return True
        try:
            inner = json.loads(value) if isinstance(value, str) else None
        except (ValueError, RecursionError):
            inner = None
        if not isinstance(inner, dict):
            return False
        self.arguments = value
        self._may_begin()
        return True

    def _may_begin(self) -> None:
        if self._name is not None and self.arguments:
            self.begun = self._name

    def _finish(self) -> bool:
        if self._name is None:
            return False
        self.arguments = self.arguments or "{}"
        self._may_begin()
        self.done = True
        return True
