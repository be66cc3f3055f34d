"""`BrowserGuard`: keeps web pages of other sites away from a server that a browser can reach.

    DNS rebinding   a page's own name is made to resolve to this machine: the Host header is foreign
    cross-site      a page sends a request to this address: the Origin header is foreign

A server without a key is open to every local program, and a browser runs pages of the whole web.
"""

from __future__ import annotations

import socket
from ipaddress import IPv4Address, IPv6Address, ip_address
from urllib.parse import urlsplit

from twostroke.serve.error_responses import ApiError
from twostroke.serve.http.bodies import is_json
from twostroke.serve.http.http_request import HttpRequest
from twostroke.serve.settings import ServeSettings

WILDCARD = "*"


class BrowserGuard:
    def __init__(self, settings: ServeSettings) -> None:
        self._origins = settings.cors_origins
        hosts = settings.allowed_hosts
        has_own_rule = bool(settings.api_keys) or settings.uds is not None
        self._any_host = WILDCARD in hosts or (has_own_rule and not hosts)
        self._suffixes = tuple(name[1:] for name in hosts if name.startswith("*."))
        self._hosts = {name.strip("[]") for name in hosts}
        listens_at = _address(settings.host)
        # A page with an address instead of a name cannot be rebound: its origin is that address.
        self._any_address = listens_at is not None and listens_at.is_unspecified
        self._hosts.add(
            socket.gethostname().lower() if self._any_address else settings.host.lower()
        )

    def check_host(self, http: HttpRequest) -> None:
        """Refuse a request whose Host header names another server. Browsers always send one."""
        if self._any_host:
            return
        for name, value in http.scope["headers"]:
            if name == b"host" and not self._is_allowed(value.decode("latin-1")):
                raise ApiError(
                    403,
                    f"this server does not answer to the host {value.decode('latin-1')[:200]!r}, "
                    "only to this machine's; start it with --allowed-hosts NAME to allow a name, "
                    "or with --api-key",
                    code="host_not_allowed",
                )

    def check_page(self, http: HttpRequest) -> None:
        """Refuse a request that acts on the server if a page of another site has sent it.

        A page of the server's own must declare JSON, which makes a browser ask first where the
        page is another site's after all. Programs other than browsers name no origin."""
        origin, site = http.header(b"origin"), http.header(b"sec-fetch-site")
        if origin is None and site is None:
            return
        if self._is_foreign(http, origin, site):
            named = "another site" if origin is None else origin.decode("latin-1")[:200]
            raise ApiError(
                403,
                f"a page of {named} may not do this; start the server with --allowed-origins "
                "ORIGIN to allow one",
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
    """The name or the address of a Host header, without its port: "[::1]:8000" → "::1"."""
    header = header.strip().lower()
    if header.startswith("["):
        return header[1:].partition("]")[0]
    return header.partition(":")[0].removesuffix(".")


def _address(name: str) -> IPv4Address | IPv6Address | None:
    try:
        return ip_address(name)
    except ValueError:
        return None
