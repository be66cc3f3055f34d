"""`Route` and `Router`: which handler a path has."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Iterator, Sequence
from dataclasses import dataclass

import msgspec

from twostroke.serve.error_responses import ApiError
from twostroke.serve.fields.protocol import ErrorAnswer, ErrorBody
from twostroke.serve.http.http_request import HttpRequest


@dataclass(frozen=True, slots=True)
class Route:
    """`path` may end in one parameter, "/v1/responses/{response_id}", or have it before a last
    word, "/v1/responses/{response_id}/cancel": the handler finds it in `http.path_params`.
    "/v1/models/{model...}": all that follows, with its slashes."""

    method: str
    path: str
    handler: Callable[[HttpRequest], Awaitable[None]]
    summary: str
    body: type[msgspec.Struct] | None = None
    open: bool = False  # answers without a key
    acts: bool = False  # changes the server or its engines, for every client
    error: type[ErrorBody] = ErrorAnswer  # how this route's errors are written
    stream_type: str = "text/event-stream"  # of an answer that is streamed
    supported: bool = True  # False: it is there to say that it is not, and is not described


class Router:
    def __init__(self, routes: Sequence[Route]) -> None:
        self._by_path: dict[str, dict[str, Route]] = {}
        for route in routes:
            self._by_path.setdefault(route.path, {})[route.method] = route
        self._patterns = [path.split("/") for path in self._by_path if "{" in path]

    def __iter__(self) -> Iterator[str]:
        return iter(self._by_path)

    def find(self, http: HttpRequest) -> Route | ApiError:
        """The route, with the path's parameters in the request; or how it is refused."""
        methods = None if "{" in http.path else self._by_path.get(http.path)
        methods = methods or self._by_pattern(http)
        if methods is None:
            return ApiError(404, f"there is no {http.path[:200]!r} here", code="not_found")
        method = "GET" if http.method == "HEAD" else http.method
        if method not in methods:
            allow = ((b"allow", ", ".join(methods).encode()),)
            return ApiError(405, f"{http.path} takes {' and '.join(methods)}", headers=allow)
        return methods[method]

    def _by_pattern(self, http: HttpRequest) -> dict[str, Route] | None:
        words = http.path.split("/")
        for pattern in self._patterns:
            rest = len(pattern) - 1
            given = words
            if pattern[rest].endswith("...}"):
                given = [*words[:rest], "/".join(words[rest:])]
            if len(given) != len(pattern):
                continue
            pairs = list(zip(pattern, given, strict=True))
            if all(known == word or (known[:1] == "{" and word) for known, word in pairs):
                params = {known.strip("{.}"): word for known, word in pairs if known[:1] == "{"}
                http.path_params = params
                return self._by_path["/".join(pattern)]
        return None
