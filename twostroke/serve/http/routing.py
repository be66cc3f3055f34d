"""Finds the route of a request, and checks whether the client may call it.

    RouteTable     path and method → `Route`
    ApiKeys        checks the API key of a request
    BrowserGuard   refuses requests that web pages of other sites make
    Cors           tells browsers which other sites may call the server (`--allowed-origins`)

A server without a key is open to every program of the machine. One such program is the browser,
which runs pages of foreign sites. `BrowserGuard` detects two attacks by these pages:

    DNS rebinding   the site's name resolves to this machine: the Host header is foreign
    cross-site      the page sends a request to this machine: the Origin header is foreign
"""

from __future__ import annotations

import hmac
import socket
from collections.abc import Awaitable, Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from hashlib import sha256
from ipaddress import IPv4Address, IPv6Address, ip_address
from urllib.parse import urlsplit

import msgspec

from twostroke.serve.error_responses import ApiError
from twostroke.serve.fields.protocol import ErrorAnswer, ErrorBody
from twostroke.serve.http.bodies import is_json
from twostroke.serve.http.http_request import Headers, HttpRequest, Message, Receive, Send
from twostroke.serve.settings import ServeSettings


@dataclass(frozen=True, slots=True)
class Route:
    """One method of one path, with its handler.

    A path may have a parameter, which matches one word: "/v1/responses/{response_id}/cancel". At
    the end of a path, "{model...}" matches several words with slashes. The handler finds the value
    in `http.path_params`."""

    method: str
    path: str
    handler: Callable[[HttpRequest], Awaitable[None]]
    summary: str
    body: type[msgspec.Struct] | None = None
    open: bool = False  # needs no API key
    acts: bool = False  # changes the server or its engines for all clients; needs an admin key
    error: type[ErrorBody] = ErrorAnswer  # the JSON of this route's errors
    stream_type: str = "text/event-stream"  # the Content-Type of a streamed answer
    supported: bool = True  # False: the route always answers 501, and is not in /openapi.json


class RouteTable:
    def __init__(self, routes: Sequence[Route]) -> None:
        self._by_path: dict[str, dict[str, Route]] = {}
        for route in routes:
            self._by_path.setdefault(route.path, {})[route.method] = route
        self._patterns = [path.split("/") for path in self._by_path if "{" in path]

    def __iter__(self) -> Iterator[str]:
        return iter(self._by_path)

    def find(self, http: HttpRequest) -> Route | ApiError:
        """Return the route and set `http.path_params`, or return the error of an unknown path."""
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
            last = len(pattern) - 1
            parts = words
            if pattern[last].endswith("...}"):
                parts = [*words[:last], "/".join(words[last:])]
            if len(parts) != len(pattern):
                continue
            pairs = list(zip(pattern, parts, strict=True))
            if all(expected == part or (expected[:1] == "{" and part) for expected, part in pairs):
                http.path_params = {
                    expected.strip("{.}"): part for expected, part in pairs if expected[:1] == "{"
                }
                return self._by_path["/".join(pattern)]
        return None


# ── who may call a route ────────────────────────────────────────────────────────────────────────


class ApiKeys:
    """Checks the API key of a request. The digests of all keys are compared, in constant time.

    An admin key is an API key too. The numbers of admin keys follow those of the other keys."""

    def __init__(self, settings: ServeSettings) -> None:
        keys, admin_keys = settings.api_keys, settings.admin_api_keys
        self._digests = [sha256(key.encode()).digest() for key in (*keys, *admin_keys)]
        self._num_keys = len(keys)
        self._all_are_admins = not admin_keys and len(keys) < 2

    def check(self, http: HttpRequest) -> None:
        """Set `http.key_number` and `http.is_admin`. Raise 401 if the request needs a key."""
        sent = sha256(_sent_key(http)).digest()
        matches = [hmac.compare_digest(sent, digest) for digest in self._digests]
        http.key_number = matches.index(True) if any(matches) else None
        http.is_admin = self._all_are_admins or any(matches[self._num_keys :])
        if self._num_keys and http.key_number is None:
            raise ApiError(
                401,
                "a valid API key is needed; send it as 'Authorization: Bearer KEY'",
                code="invalid_api_key",
                headers=((b"www-authenticate", b"Bearer"),),
            )

    def check_admin(self, http: HttpRequest) -> None:
        """Raise 403 if the request changes the server and has no admin key."""
        if not http.is_admin:
            raise ApiError(
                403,
                "this route needs an admin key; send it as 'Authorization: Bearer KEY' (the server "
                "is started with --admin-api-key KEY)",
                code="admin_key_needed",
            )


def _sent_key(http: HttpRequest) -> bytes:
    scheme, _, key = (http.header(b"authorization") or b"").partition(b" ")
    if scheme.lower() == b"bearer":
        return key.strip()
    return http.header(b"x-api-key") or b""


WILDCARD = "*"
Application = Callable[[Message, Receive, Send], Awaitable[None]]  # ASGI


class BrowserGuard:
    def __init__(self, settings: ServeSettings) -> None:
        self._origins = settings.cors_origins
        hosts = settings.allowed_hosts
        # With a key, or on a Unix socket, a foreign page cannot call the server anyway.
        is_protected = bool(settings.api_keys) or settings.uds is not None
        self._any_host = WILDCARD in hosts or (is_protected and not hosts)
        self._suffixes = tuple(name[1:] for name in hosts if name.startswith("*."))
        self._hosts = {name.strip("[]") for name in hosts}
        listens_at = _address(settings.host)
        # If the Host header is an IP address, no name was resolved, so there is no DNS rebinding.
        self._any_address = listens_at is not None and listens_at.is_unspecified
        self._hosts.add(
            socket.gethostname().lower() if self._any_address else settings.host.lower()
        )

    def check_host(self, http: HttpRequest) -> None:
        """Refuse a request whose Host header names another server. A request without this header
        is allowed, because browsers always send it."""
        if self._any_host:
            return
        for name, value in http.scope["headers"]:
            if name == b"host" and not self._is_allowed(value.decode("latin-1")):
                raise ApiError(
                    403,
                    f"this server does not answer to the host {value.decode('latin-1')[:200]!r}, "
                    "only to the names of this machine; start it with --allowed-hosts NAME to "
                    "allow another name, or with --api-key",
                    code="host_not_allowed",
                )

    def check_page(self, http: HttpRequest) -> None:
        """Refuse a request that changes the server if a page of another site has sent it.

        Pages of this server must send `Content-Type: application/json`, because a browser does not
        let pages of other sites send this header without a preflight request. Programs other than
        browsers send neither Origin nor Sec-Fetch-Site."""
        origin, site = http.header(b"origin"), http.header(b"sec-fetch-site")
        if origin is None and site is None:
            return
        if self._is_foreign(http, origin, site):
            named = "another site" if origin is None else origin.decode("latin-1")[:200]
            raise ApiError(
                403,
                f"a page of {named} may not call this route; start the server with "
                "--allowed-origins ORIGIN to allow an origin",
                code="origin_not_allowed",
            )
        if not is_json(http):
            raise ApiError(415, "a page must send the header 'Content-Type: application/json'")

    def _is_allowed(self, header: str) -> bool:
        name = _host_name(header)
        if name in self._hosts or name.endswith(self._suffixes):
            return True
        if (address := _address(name)) is not None:
            return self._any_address or address.is_loopback
        return name == "localhost" or name.endswith(".localhost")

    def _is_foreign(self, http: HttpRequest, origin: bytes | None, site: bytes | None) -> bool:
        if origin is None:
            return site not in (b"same-origin", b"none")
        text = origin.decode("latin-1")
        if text in self._origins or WILDCARD in self._origins:
            return False
        host = http.header(b"host") or b""
        return not host or urlsplit(text).netloc.lower() != host.decode("latin-1").lower()


def _host_name(header: str) -> str:
    """Return the name or address of a Host header without the port: "[::1]:8000" → "::1"."""
    header = header.strip().lower()
    if header.startswith("["):
        return header[1:].partition("]")[0]
    return header.partition(":")[0].removesuffix(".")


def _address(name: str) -> IPv4Address | IPv6Address | None:
    try:
        return ip_address(name)
    except ValueError:
        return None


# ── CORS ────────────────────────────────────────────────────────────────────────────────────────

CORS_METHODS = ("GET", "POST", "DELETE")
CORS_MAX_AGE_S = 600
_PREFLIGHT_VARY = (
    b"Origin, Access-Control-Request-Method, Access-Control-Request-Headers, "
    b"Access-Control-Request-Private-Network"
)
_ALLOW_ORIGIN = b"access-control-allow-origin"


class Cors:
    """An ASGI application with CORS headers. Pages of the allowed origins may call every route with
    any headers, except that a public site may not call a server in a private network."""

    def __init__(self, app: Application, origins: Sequence[str]) -> None:
        self._app = app
        self._origins = {origin.encode("latin-1") for origin in origins}
        self._any_origin = WILDCARD in origins

    async def __call__(self, scope: Message, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        sent = dict(reversed(scope["headers"]))  # the first header of each name
        origin = sent.get(b"origin")
        method = sent.get(b"access-control-request-method")
        if origin is not None and method is not None and scope["method"] == "OPTIONS":
            await self._answer_preflight(send, origin, method, sent)
            return

        async def send_with_headers(message: Message) -> None:
            if message["type"] == "http.response.start":
                headers = self._add_headers(message.get("headers", ()), origin)
                message = {**message, "headers": headers}
            await send(message)

        await self._app(scope, receive, send_with_headers)

    def _add_headers(self, headers: Iterable[tuple[bytes, bytes]], origin: bytes | None) -> Headers:
        """Return the headers of a response, with Access-Control-Allow-Origin and Vary added."""
        headers = tuple(headers)
        if origin is not None and self._any_origin:
            headers = (*headers, (_ALLOW_ORIGIN, b"*"))
        elif origin in self._origins:
            headers = (*headers, (_ALLOW_ORIGIN, origin))
        varies = [value for name, value in headers if name == b"vary"]
        others = tuple(pair for pair in headers if pair[0] != b"vary")
        return (*others, (b"vary", b", ".join([*varies, b"Origin"])))

    async def _answer_preflight(
        self, send: Send, origin: bytes, method: bytes, sent: Mapping[bytes, bytes]
    ) -> None:
        """Answer a preflight request, by which a browser asks whether a page may make a request."""
        headers = [
            (b"vary", _PREFLIGHT_VARY),
            (b"access-control-allow-methods", ", ".join(CORS_METHODS).encode()),
            (b"access-control-max-age", str(CORS_MAX_AGE_S).encode()),
        ]
        refused = []
        if self._any_origin or origin in self._origins:
            headers.append((_ALLOW_ORIGIN, b"*" if self._any_origin else origin))
        else:
            refused.append("origin")
        if method.decode("latin-1") not in CORS_METHODS:
            refused.append("method")
        if (names := sent.get(b"access-control-request-headers")) is not None:
            headers.append((b"access-control-allow-headers", names))
        if b"access-control-request-private-network" in sent:
            refused.append("private-network")
        body = f"Disallowed CORS {', '.join(refused)}" if refused else "OK"
        headers += [
            (b"content-length", str(len(body)).encode()),
            (b"content-type", b"text/plain; charset=utf-8"),
        ]
        status = 400 if refused else 200
        await send({"type": "http.response.start", "status": status, "headers": headers})
        await send({"type": "http.response.body", "body": body.encode(), "more_body": False})
