"""`FailureLog`: a line of log for each request that fails: status, route, request id, reason.

Never what the client has sent: a message's quotations are left out.
"""

from __future__ import annotations

import logging
import re

from twostroke.errors import shortened
from twostroke.log_lines import WORK, LimitedLog
from twostroke.serve.errors import ApiError
from twostroke.serve.http import HttpRequest

# A message up to its first quotation, bracket or explanation; it may begin with a field's name.
_OURS = re.compile(r"""(?:[\w.\[\]-]+:\ )?(?:[^:'"\[{(]|(?<=\w)'(?=\w)|:(?!\ ))*""", re.X)


class FailureLog:
    def __init__(self) -> None:
        self._log = LimitedLog(WORK)

    def add(self, http: HttpRequest, path: str, error: ApiError) -> None:
        """`path` is the route's, not the client's to choose."""
        self._log.log(
            logging.ERROR if error.status >= 500 else logging.INFO,
            "%d %s %s, request %s: %s",
            error.status,
            http.method,
            path,
            _request_id(http),
            reason(error),
        )


def reason(error: ApiError) -> str:
    match = _OURS.match(error.message)
    ours = match[0].strip() if match else ""
    cut = "" if ours == error.message.strip() else " …"
    return f"{error.code}: {ours}{cut}" if error.code else ours + cut


def _request_id(http: HttpRequest) -> str:
    given = http.header(b"x-request-id") or b""
    return http.response_id or shortened(re.sub(rb"[^!-~]", b"?", given).decode()) or "-"
