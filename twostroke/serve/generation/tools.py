"""`ToolCalls`: the `tools` and `tool_choice` of a request, as a parser and a grammar."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from typing import Any, Final

from twostroke.errors import RequestError, did_you_mean
from twostroke.request import StructuredOutputs
from twostroke.serve.parsers import TOOL_PARSERS, choose_parser
from twostroke.serve.parsers.arguments import argument_types
from twostroke.serve.parsers.calls import CallParser, MakeId
from twostroke.structured import JSON_SPACE

PARSERS: Final = tuple(TOOL_PARSERS)
MAX_TOOLS: Final = 128
NAME: Final = re.compile(r"[a-zA-Z0-9_.-]{1,64}")


class ToolCalls:
    """The tools of one request. `parser`: a parser's name, or "auto" for the chat template's
    format."""

    def __init__(
        self, parser: str, tools: Any, tool_choice: Any = None, chat_template: str | None = None
    ) -> None:
        known = ("auto", *PARSERS)
        if parser not in known:
            hint = did_you_mean(parser, known) if isinstance(parser, str) else ""
            raise RequestError(
                f"there is no tool parser {parser!r}{hint or '.'} There are {', '.join(known)}"
            )
        self.parser = choose_parser(chat_template) if parser == "auto" else parser
        self._schemas = _read_tools(tools)
        self.choice = _read_choice(tool_choice, self._schemas)
        self._types = {name: argument_types(schema) for name, schema in self._schemas.items()}

    @property
    def names(self) -> tuple[str, ...]:
        """The names of the tools that the model may call."""
        if self.choice == "none":
            return ()
        forced = self.choice.removeprefix("name:")
        return (forced,) if forced in self._schemas else tuple(self._schemas)

    @property
    def format(self) -> type[CallParser]:
        """The parser class for the calls."""
        form = TOOL_PARSERS[self.parser]
        forced = self.choice not in ("auto", "none")
        return form.instead if forced and form.instead is not None else form

    def structured_outputs(self) -> StructuredOutputs | None:
        """Return a grammar that forces a tool call, or None if no call is required."""
        if self.choice in ("auto", "none"):
            return None
        before, after = self.format.forced
        calls, rules = [], []
        for n, name in enumerate(self.names):
            head = json.dumps(before.format(name=name), ensure_ascii=False)
            calls.append(f"{head} arguments_{n} {json.dumps(after, ensure_ascii=False)}")
            # The arguments have a schema of their own, so that its references resolve.
            settings = {"whitespace_pattern": JSON_SPACE, "coerce_one_of": True}
            schema = self._schemas[name] | {"x-guidance": settings}
            rules.append(f"arguments_{n}: %json {json.dumps(schema)}")
        return StructuredOutputs(grammar="\n".join(["start: " + " | ".join(calls), *rules]))

    def drop_schemas(self) -> None:
        """Drop the schemas. The parser needs only the names and the argument types."""
        self._schemas = {name: {} for name in self._schemas}

    def stream(self, make_id: MakeId | None = None) -> CallParser:
        """Return a parser for one streamed text."""
        types = {name: self._types[name] for name in self.names}
        return self.format(types, make_id)


# ── reading a request ──────────────────────────────────────────────────────────────────────────


def _read_tools(tools: Any) -> dict[str, dict[str, Any]]:
    """Return the schema of the arguments for each tool name."""
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
    """Return "auto", "none", "required", or "name:" and the tool that must be called."""
    if choice is None:
        return "auto" if schemas else "none"
    if isinstance(choice, Mapping):
        function = choice.get("function")
        name = function.get("name") if isinstance(function, Mapping) else None
        if choice.get("type") != "function" or not isinstance(name, str):
            raise RequestError('tool_choice must be {"type": "function", "function": {"name": …}}')
        if name not in schemas:
            hint = did_you_mean(name, schemas)
            raise RequestError(f"tool_choice names {name!r}, which is not among the tools{hint}")
        return f"name:{name}"
    if choice not in ("auto", "none", "required"):
        raise RequestError(
            'tool_choice must be "auto", "none", "required" or '
            '{"type": "function", "function": {"name": …}}'
        )
    if choice != "none" and not schemas:
        raise RequestError(f'tool_choice is "{choice}", but no tools are given')
    return str(choice)
