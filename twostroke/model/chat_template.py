"""Messages → the text a model was trained to answer, by the model's own Jinja template.

A template is a program that came with somebody's weights. It runs in Jinja's immutable sandbox
(no attributes with underscores, no imports, no changes to what it is given), its loops draw on a
budget, and its numbers and its output have a bound.
"""

from __future__ import annotations

import functools
import itertools
import json
import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence, Sized
from datetime import datetime
from typing import Any, Final, NoReturn

import jinja2
from jinja2 import nodes
from jinja2.exceptions import SecurityError
from jinja2.ext import Extension
from jinja2.parser import Parser
from jinja2.runtime import Context
from jinja2.sandbox import ImmutableSandboxedEnvironment
from jinja2.visitor import NodeTransformer

from twostroke.errors import ModelError, RequestError

MAX_LOOP_ITEMS: Final = 1_000_000  # over all loops of one rendering
MAX_REPEATS: Final = 100_000  # of a text or a list; also the largest width of a text
MAX_CHARS: Final = 64 * 1024 * 1024  # of the output and of every text on the way to it
MAX_NUMBER_BITS: Final = 1024
SIZED_FILTERS: Final = ("batch", "center", "indent", "slice", "wordwrap")

_BUDGET: Final = "_loop_budget"


class ChatTemplate:
    def __init__(self, source: str, bos_token: str, eos_token: str) -> None:
        self._tokens = {"bos_token": bos_token, "eos_token": eos_token}
        try:
            environment = _Environment()
            program = environment.parse(source)
            self._template = environment.from_string(_Guards().visit(program))
        except jinja2.TemplateSyntaxError as error:
            raise ModelError(
                f"the model's chat template has an error in line {error.lineno}: {error.message}. "
                "Give a corrected one with --chat-template FILE."
            ) from None
        except RecursionError:
            raise ModelError(
                "the model's chat template is nested too deeply to be read. "
                "Give another one with --chat-template FILE."
            ) from None

    def render(
        self,
        messages: Sequence[Mapping[str, Any]],
        add_generation_prompt: bool = True,
        tools: list[dict[str, Any]] | None = None,
        **kwargs: Any,
    ) -> str:
        """`kwargs` are further variables of the template, such as `enable_thinking`."""
        variables: dict[str, Any] = {
            "messages": check_messages(messages),
            "tools": tools,
            "documents": None,
            "add_generation_prompt": add_generation_prompt,
            **self._tokens,
        }
        taken = sorted((variables.keys() - {"documents"} | {_BUDGET}) & kwargs.keys())
        if taken:
            raise RequestError(
                f"{', '.join(taken)}: set by the server; a chat template's extra variables need "
                "other names."
            )
        variables |= {**kwargs, _BUDGET: _Budget()}
        try:
            return "".join(_bounded(self._template.generate(variables)))
        except _RaisedByTemplate as error:
            raise RequestError(
                f"the model's chat template refuses these messages: {error}"
            ) from None
        except SecurityError as error:
            raise RequestError(
                f"the model's chat template does what templates may not ({error}). "
                "Give another one with --chat-template FILE."
            ) from None
        except Exception as error:  # the template's code is not ours: anything can come out of it
            raise RequestError(
                f"the model's chat template fails on these messages ({type(error).__name__}: "
                f"{error}). Check their roles and their order, and that the template knows tools "
                "if there are any."
            ) from None


def choose_template(named: Mapping[str, str]) -> str | None:
    """Of a model's named templates the 'default' one, else the first by name."""
    if not named:
        return None
    return named["default"] if "default" in named else named[min(named)]


def check_messages(messages: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """The messages as templates read them: content as text, arguments of tool calls as objects."""
    if not isinstance(messages, Sequence) or isinstance(messages, str):
        raise RequestError("messages: expected a list of messages, each with a role and a content.")
    if not messages:
        raise RequestError("messages: the list is empty; at least one message is needed.")
    return [_check_message(message, f"messages[{n}]") for n, message in enumerate(messages)]


def _check_message(message: Mapping[str, Any], where: str) -> dict[str, Any]:
    if not isinstance(message, Mapping):
        raise RequestError(f"{where}: expected an object with a role and a content.")
    role = message.get("role")
    if not isinstance(role, str) or not role:
        raise RequestError(
            f"{where}: the role is {'missing' if role is None else f'{role!r}'}; expected a text "
            "such as 'system', 'user' or 'assistant'."
        )
    checked = {**message, "content": _text(message.get("content"), where)}
    if checked["content"] is None and not message.get("tool_calls"):
        raise RequestError(f"{where}: the content is missing; expected a text.")
    if message.get("tool_calls"):
        checked["tool_calls"] = _tool_calls(message["tool_calls"], where)
    return checked


def _text(content: Any, where: str) -> str | None:
    if content is None or isinstance(content, str):
        return content
    if not isinstance(content, Sequence):
        raise RequestError(
            f"{where}.content: expected a text or a list of parts, not {type(content).__name__}."
        )
    return "\n".join([_part_text(part, f"{where}.content[{n}]") for n, part in enumerate(content)])


def _part_text(part: Any, where: str) -> str:
    if isinstance(part, str):
        return part
    kind = part.get("type") if isinstance(part, Mapping) else None
    if kind != "text":
        raise RequestError(
            f"{where}: parts of the type {kind!r} are not supported; this model reads text only, "
            "given as {'type': 'text', 'text': ...}."
        )
    if not isinstance(part.get("text"), str):
        raise RequestError(f"{where}: a part of the type 'text' needs its text in 'text'.")
    return str(part["text"])


def _tool_calls(calls: Any, where: str) -> list[dict[str, Any]]:
    """The API sends a call's arguments as JSON in a string; templates write them out themselves."""
    if not isinstance(calls, Sequence) or not all(isinstance(call, Mapping) for call in calls):
        raise RequestError(f"{where}.tool_calls: expected a list of calls.")
    read = []
    for call in calls:
        function = call.get("function")
        if isinstance(function, Mapping) and isinstance(function.get("arguments"), str):
            try:
                arguments = json.loads(function["arguments"] or "{}")
            except ValueError:
                arguments = function["arguments"]  # as a model wrote it, perhaps cut short
            call = {**call, "function": {**function, "arguments": arguments}}
        read.append(dict(call))
    return read


class _RaisedByTemplate(jinja2.TemplateError):
    """`raise_exception(message)` in a template: its way to refuse what it was given."""


class _Budget:
    """How many loop items one rendering may still visit."""

    def __init__(self) -> None:
        self._left = MAX_LOOP_ITEMS

    def _charge(self, items: Any) -> Any:
        if isinstance(items, Iterator):  # a filter's lazy result
            items = list(itertools.islice(items, self._left + 1))
        if isinstance(items, Sized):
            self._left -= len(items)
        if self._left < 0:
            raise SecurityError(f"loops over more than {MAX_LOOP_ITEMS} items")
        return items


class _GenerationTag(Extension):
    """`{% generation %}` marks what a model wrote, for training; here it only shows its body."""

    tags = {"generation"}  # noqa: RUF012

    def parse(self, parser: Parser) -> nodes.Node:
        line = next(parser.stream).lineno
        body = parser.parse_statements(("name:endgeneration",), drop_needle=True)
        return nodes.Scope(body, lineno=line)


class _Guards(NodeTransformer):
    """Sends the items of every loop, and every `a ~ b`, through a filter of ours."""

    def visit_For(self, node: nodes.For) -> nodes.Node:  # noqa: N802
        self.generic_visit(node)
        node.iter = self._filter(node.iter, "_charge")
        return node

    def visit_Concat(self, node: nodes.Concat) -> nodes.Node:  # noqa: N802
        self.generic_visit(node)
        return self._filter(nodes.List(node.nodes, lineno=node.lineno), "_concat")

    def _filter(self, value: Any, name: str) -> nodes.Filter:
        return nodes.Filter(value, name, [], [], None, None, lineno=value.lineno)


def _join(texts: Iterable[str]) -> str:
    texts = list(texts)
    _refuse_length(sum(map(len, texts)))
    return "".join(texts)


class _Environment(ImmutableSandboxedEnvironment):
    intercepted_binops = frozenset(["+", "*", "**", "%"])
    concat = staticmethod(_join)  # joins what a macro or a block wrote

    def __init__(self) -> None:
        super().__init__(
            trim_blocks=True,
            lstrip_blocks=True,
            extensions=[_GenerationTag, "jinja2.ext.loopcontrols"],
        )
        del self.globals["lipsum"]
        self.globals |= {"raise_exception": _raise_exception, "strftime_now": _strftime_now}
        self.filters |= {name: _small_numbers(self.filters[name]) for name in SIZED_FILTERS}
        self.filters |= {"tojson": _to_json, "_charge": _charge, "_concat": _concat}

    def call_binop(self, context: Context, operator: str, left: Any, right: Any) -> Any:
        if operator == "+" and isinstance(left, Sequence) and isinstance(right, Sequence):
            _refuse_length(len(left) + len(right))
        elif isinstance(left, int) and isinstance(right, int):
            bits = left.bit_length() * right if operator == "**" else left.bit_length()
            if bits + right.bit_length() > MAX_NUMBER_BITS:
                raise SecurityError(f"a number of more than {MAX_NUMBER_BITS} bits")
        elif operator == "%" and isinstance(left, str):
            _refuse_wide_format(left, right if isinstance(right, tuple) else (right,))
        elif operator == "*":
            for times, what in ((left, right), (right, left)):
                if isinstance(times, int) and isinstance(what, Sequence):
                    _refuse_size(times * len(what))
        return super().call_binop(context, operator, left, right)

    def wrap_str_format(self, value: Any) -> Callable[..., str] | None:
        run = super().wrap_str_format(value)
        if run is None:
            return None

        def checked(*args: Any, **kwargs: Any) -> str:
            _refuse_wide_format(value.__self__, (*args, *kwargs.values()))
            return run(*args, **kwargs)

        return checked

    def call(*args: Any, **kwargs: Any) -> Any:
        # (self, context, callee, ...): without names, so that a template's keywords may have them.
        if isinstance(getattr(args[2], "__self__", None), str):  # such as 'x'.ljust
            _refuse_large_numbers(args[3:], kwargs)
        return ImmutableSandboxedEnvironment.call(*args, **kwargs)


def _small_numbers(run: Callable[..., Any]) -> Callable[..., Any]:
    """The filter without huge widths; `wraps` keeps the marks that Jinja reads."""

    @functools.wraps(run)
    def checked(*args: Any, **kwargs: Any) -> Any:
        _refuse_large_numbers(args[1:], kwargs)
        return run(*args, **kwargs)

    return checked


def _refuse_large_numbers(args: Sequence[Any], kwargs: Mapping[str, Any]) -> None:
    for value in (*args, *kwargs.values()):
        if isinstance(value, int):
            _refuse_size(value)


def _refuse_size(size: int) -> None:
    if size > MAX_REPEATS:
        raise SecurityError(f"a size of {size}, where {MAX_REPEATS} is allowed")


def _refuse_wide_format(form: str, values: Sequence[Any]) -> None:
    """A width may be written in the format, or be given as a value where the format takes one."""
    widths = [int(digits) for digits in re.findall(r"\d+", form)]
    if "*" in form or re.search(r"{[^{}]*{", form):
        widths += [value for value in values if isinstance(value, int)]
    _refuse_size(max(widths, default=0))


def _refuse_length(num_chars: int) -> None:
    if num_chars > MAX_CHARS:
        raise SecurityError(f"writes more than {MAX_CHARS} characters")


def _concat(values: Sequence[Any]) -> str:
    return _join(map(str, values))


@jinja2.pass_context
def _charge(context: Context, items: Any) -> Any:
    # The parent holds what we passed in; a template's own variables cannot take its place.
    return context.parent[_BUDGET]._charge(items)


def _raise_exception(message: str) -> NoReturn:
    raise _RaisedByTemplate(message)


def _strftime_now(form: str) -> str:
    return datetime.now().strftime(form)


def _to_json(
    value: Any,
    ensure_ascii: bool = False,
    indent: int | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    """Jinja's own escapes `<` and the like for HTML; a model should read what was meant."""
    return json.dumps(
        value,
        ensure_ascii=ensure_ascii,
        indent=indent,
        separators=separators,
        sort_keys=sort_keys,
    )


def _bounded(parts: Iterable[str]) -> Iterable[str]:
    num_chars = 0
    for part in parts:
        num_chars += len(part)
        _refuse_length(num_chars)
        yield part
