"""`FailureLog`: a log line for each failed request and each warning, with status, route, request id
and reason. The log has no text of the client: a message is cut before its first quotation.
"""

from __future__ import annotations

import logging
import re

from twostroke.errors import shortened
from twostroke.log_lines import WORK, RateLimitedLog
from twostroke.serve.error_responses import ApiError
from twostroke.serve.http.http_request import HttpRequest

# The beginning of a message: an optional field name with a colon, then the text up to the first
# quotation mark, bracket or further colon. An apostrophe is no quotation mark.
_OWN_TEXT = re.compile(r"""(?:[\w.\[\]-]+:\ )?(?:[^:'"\[{(]|(?<=\w)'(?=\w)|:(?!\ ))*""", re.X)


class FailureLog:
    def __init__(self) -> None:
        self._log = RateLimitedLog(WORK)

    def add(self, http: HttpRequest, path: str, error: ApiError) -> None:
        """`path`: the path of the route, not of the request: the client must not choose it."""
        level = logging.ERROR if error.status >= 500 else logging.INFO
        self._add(level, error.status, http, path, reason(error))

    def warn(self, http: HttpRequest, path: str, warning: str) -> None:
        self._add(logging.WARNING, http.status, http, path, warning)

    def _add(self, level: int, status: int, http: HttpRequest, path: str, why: str) -> None:
        request = _request_id(http)
        self._log.log(level, "%d %s %s, request %s: %s", status, http.method, path, request, why)


def reason(error: ApiError) -> str:
    why = _without_quotations(error.message)
    return f"{error.code}: {why}" if error.code else why


def _without_quotations(message: str) -> str:
    match = _OWN_TEXT.match(message)
    own_text = match[0].strip() if match else ""
    return own_text + ("" if own_text == message.strip() else " …")


def _request_id(http: HttpRequest) -> str:
    sent = http.header(b"x-request-id") or b""
    return http.response_id or shortened(re.sub(rb"[^!-~]", b"?", sent).decode()) or "-"
