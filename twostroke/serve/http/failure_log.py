"""`FailureLog`: a line of log for each request that fails, and for each warning that an answer has:
status, route, request id, reason.

Never what the client has sent: a message's quotations are left out.
"""

from __future__ import annotations

import logging
import re

from twostroke.errors import shortened
from twostroke.log_lines import WORK, RateLimitedLog
from twostroke.serve.error_responses import ApiError
from twostroke.serve.http.http_request import HttpRequest

# A message up to its first quotation, bracket or explanation; it may begin with a field's name.
_OURS = re.compile(r"""(?:[\w.\[\]-]+:\ )?(?:[^:'"\[{(]|(?<=\w)'(?=\w)|:(?!\ ))*""", re.X)


class FailureLog:
    def __init__(self) -> None:
        self._log = RateLimitedLog(WORK)

    def add(self, http: HttpRequest, path: str, error: ApiError) -> None:
        """`path` is the route's, not the client's to choose."""
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
    match = _OURS.match(message)
    ours = match[0].strip() if match else ""
    return ours + ("" if ours == message.strip() else " …")


def _request_id(http: HttpRequest) -> str:
    given = http.header(b"x-request-id") or b""
    return http.response_id or shortened(re.sub(rb"[^!-~]", b"?", given).decode()) or "-"
