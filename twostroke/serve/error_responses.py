"""Exceptions as HTTP error responses, in the JSON format of OpenAI. An unexpected exception is
logged, and the client does not get its text."""

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
_ERROR_TYPES = {  # by status; other statuses: see `error_type`
    401: "authentication_error",
    403: "permission_error",
    404: "not_found_error",
    408: "timeout_error",
    429: "rate_limit_error",
}
# The parameters that an error message may begin with.
_PARAMETERS = {field.name for field in fields(SamplingParams)} | {
    "messages",
    "tools",
    "tool_choice",
}
# msgspec ends a message with the path of the invalid field: " - at `$.messages[0].role`".
_JSON_PATH = re.compile(r" - at `\$\.?(.*?)`$", re.S)


class ApiError(Exception):
    """An error with its HTTP status."""

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
    def error_type(self) -> str:
        return _ERROR_TYPES.get(
            self.status, "server_error" if self.status >= 500 else "invalid_request_error"
        )

    def content(self) -> dict[str, Any]:
        """The object under "error"."""
        # UTF-8 cannot encode lone surrogates, which are replaced.
        message = self.message.encode("utf-8", "replace").decode()
        return {"message": message, "type": self.error_type, "param": self.param, "code": self.code}

    def body(self) -> bytes:
        return msgspec.json.encode({"error": self.content()})


class ClientGone(Exception):  # noqa: N818
    """The client has closed the connection."""


def retry_after(seconds: int) -> tuple[tuple[bytes, bytes], ...]:
    return ((b"retry-after", str(seconds).encode()),)


def unavailable(message: str) -> ApiError:
    return ApiError(503, message, code="unavailable", headers=retry_after(1))


def as_api_error(error: BaseException) -> ApiError:
    """Convert an exception to the error for the client. Log the exceptions that are not the
    client's fault."""
    if isinstance(error, ApiError):
        return error
    if isinstance(error, RequestError):
        param = error.param or _leading_parameter(str(error))
        return ApiError(400, str(error), param=param, code=error.code)
    if isinstance(error, RecursionError):  # only nested input causes deep recursion
        return ApiError(400, "the request is nested too deeply")
    if isinstance(error, EngineError):
        log.error("the engine failed during a request: %s", error)
        return unavailable("the engine failed while it worked on this request; try again")
    log.error("unexpected exception in a request", exc_info=error)
    return ApiError(500, "internal server error; it has been logged", code="internal_error")


def _leading_parameter(message: str) -> str | None:
    """Return the parameter name at the beginning of a message, if there is one."""
    word = re.match(r"\w*", message)
    name = word.group() if word else ""
    return name if name in _PARAMETERS else None


def as_decode_error(error: Exception) -> ApiError:
    """Convert an exception of msgspec, from decoding a request's body, to an error with status
    400."""
    text = shortened(str(error), MAX_MESSAGE_CHARS)  # an invalid name in the text may be long
    if isinstance(error, RecursionError):
        return ApiError(400, "the JSON is nested too deeply", code="invalid_json")
    if not isinstance(error, msgspec.ValidationError):
        return ApiError(400, f"the body is not JSON: {text}", code="invalid_json")
    path = _JSON_PATH.search(text)
    param = path.group(1) or None if path else None
    message = text[: path.start()] if path else text
    return ApiError(400, f"{param}: {message}" if param else message, param=param)
