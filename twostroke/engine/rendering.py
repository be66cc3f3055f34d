"""`TemplateRenderer`: renders chat templates in processes with limits on time and memory.

A template is a program that is part of a model or of a request. Jinja's sandbox protects the
machine's files, but does not stop an endless loop or a text of gigabytes. Servers, `LLM`,
`twostroke run` and `twostroke chat` use this module. The main process does not import Jinja.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import astuple, dataclass
from typing import Any, Final

from twostroke.errors import RequestError
from twostroke.model.text.template_source import template_name
from twostroke.sandbox import LimitExceeded, Limits, SandboxPool

# Limits for programs that render the chats of their own user.
OWN_USER: Final = Limits(cpu_s=5.0, wall_s=60.0, memory_bytes=256 * 1024**2)


@dataclass(frozen=True, slots=True)
class Template:
    source: str
    bos_token: str
    eos_token: str
    of_request: bool = False
    content_format: str = "auto"  # see `ChatTemplate`


class TemplateRenderer:
    """Renders templates in worker processes, one template in a worker at a time. Thread-safe."""

    def __init__(self, workers: int = 1, limits: Limits = OWN_USER) -> None:
        work = "twostroke.model.text.chat_template:renderer"
        self._pool = SandboxPool(work, b"", workers, limits)

    def start(self) -> None:
        """Start the processes without waiting. Otherwise the first call of `render` starts them."""
        self._pool.start()

    def render(
        self, template: Template, conversation: bytes, max_chars: int | None
    ) -> tuple[int, str | None]:
        """Return the length of a conversation's text and, unless it is longer than `max_chars`, the
        text. `conversation` is made by `encode_conversation`."""
        head, tail = as_json(astuple(template)), as_json(max_chars)
        name = template_name(template.of_request)
        param = "chat_template" if template.of_request else None
        try:
            answer = self._pool.ask(b"[%b,%b,%b]" % (head, conversation, tail))
        except LimitExceeded as error:
            message = f"{name} cannot be rendered for these messages: {error}"
            raise RequestError(message, param=param) from None
        except RequestError as error:
            if template.of_request and str(error).startswith(name):
                raise RequestError(str(error), param=param) from None
            raise
        num_chars, text = json.loads(answer)
        return num_chars, text

    def close(self) -> None:
        self._pool.close()


def encode_conversation(
    messages: Sequence[Any],
    add_generation_prompt: bool,
    tools: list[dict[str, Any]] | None,
    continue_final_message: bool,
    variables: Mapping[str, Any],
) -> bytes:
    """Encode the arguments of `ChatTemplate.render` for another process."""
    arguments = messages, add_generation_prompt, tools, continue_final_message, variables
    try:
        return as_json(arguments)
    except TypeError as error:
        raise RequestError(
            f"messages, tools and variables of a chat must be JSON: {error}"
        ) from None


def as_json(value: Any) -> bytes:
    try:
        import msgspec  # one of the server's dependencies, several times faster than json

        return msgspec.json.encode(value, enc_hook=_plain)
    except (ImportError, UnicodeEncodeError, OverflowError):  # half a surrogate pair, 2**64
        return json.dumps(value, default=_plain).encode()


def _plain(value: Any) -> Any:
    if isinstance(value, Mapping):
        return dict(value)
    if isinstance(value, Sequence):
        return list(value)
    raise TypeError(f"a {type(value).__name__} is no JSON value")
