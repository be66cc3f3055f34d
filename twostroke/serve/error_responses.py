"""Errors as responses: OpenAI's JSON, and nothing of our internals."""

from __future__ import annotations

import logging
import re
from dataclasses import fields
from typing import Any

import msgspec

from twostroke.errors import EngineError, RequestError, shortened
from twostroke.request import SamplingParams

log = logging.getLogger("twostroke.serve")

MAX_MESSAGE_CHARS = 1000
_KINDS = {
    401: "authentication_error",
    403: "permission_error",
    404: "not_found_error",
    408: "timeout_error",
    429: "rate_limit_error",
}
_PARAMS = {field.name for field in fields(SamplingParams)} | {"messages", "tools", "tool_choice"}
_AT = re.compile(r" - at `\$\.?(.*?)`$", re.S)


class ApiError(Exception):
    """An error with its HTTP status, ready to be sent."""

    def __init__(
        self,
        status: int,
        message: str,
        *,
        param: str | None = None,
        code: str | None = None,
        headers: tuple[tuple[bytes, bytes], ...] = (),
    ) -> None:
        self.message = shortened(message, MAX_MESSAGE_CHARS)
        super().__init__(self.message)
        self.status = status
        self.param = None if param is None else shortened(param)
        self.code = code
        self.headers = headers

    @property
    def kind(self) -> str:
        return _KINDS.get(
            self.status, "server_error" if self.status >= 500 else "invalid_request_error"
        )

    def content(self) -> dict[str, Any]:
        """The object under "error"."""
        message = self.message.encode("utf-8", "replace").decode()  # half a surrogate pair is not
        return {"message": message, "type": self.kind, "param": self.param, "code": self.code}

    def body(self) -> bytes:
        return msgspec.json.encode({"error": self.content()})


class ClientGone(Exception):  # noqa: N818
    """The client has closed the connection."""


def retry_after(seconds: int) -> tuple[tuple[bytes, bytes], ...]:
    return ((b"retry-after", str(seconds).encode()),)


def unavailable(message: str) -> ApiError:
    return ApiError(503, message, code="unavailable", headers=retry_after(1))


def as_api_error(error: BaseException) -> ApiError:
    """Any exception → the error its client gets. What is our fault is logged here."""
    if isinstance(error, ApiError):
        return error
    if isinstance(error, RequestError):
        param = error.param or _first_name(str(error))
        return ApiError(400, str(error), param=param, code=error.code)
    if isinstance(error, RecursionError):  # nothing recurses here but along what was sent
        return ApiError(400, "what was sent is nested too deeply")
    if isinstance(error, EngineError):
        log.error("a request was lost: %s", error)
        return unavailable("the engine failed while it worked on this request; try again")
    log.error("a request raised what nobody expected", exc_info=error)
    return ApiError(500, "the server made an error; it has been logged", code="internal_error")


def _first_name(message: str) -> str | None:
    """The parameter that a message begins with, if it begins with one."""
    word = re.match(r"\w*", message)
    name = word.group() if word else ""
    return name if name in _PARAMS else None


def as_refusal(error: Exception) -> ApiError:
    """msgspec's error on a body as a 400."""
    text = shortened(str(error), MAX_MESSAGE_CHARS)  # it may hold a name of megabytes
    if isinstance(error, RecursionError):
        return ApiError(400, "the JSON is nested too deeply", code="invalid_json")
    if not isinstance(error, msgspec.ValidationError):
        return ApiError(400, f"the body is not JSON: {text}", code="invalid_json")
    at = _AT.search(text)
    param = at.group(1) or None if at else None
    message = text[: at.start()] if at else text
    return ApiError(400, f"{param}: {message}" if param else message, param=param)
