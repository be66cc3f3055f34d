"""Binds the listening socket. This happens before the HTTP server is imported, so this module
imports only the settings of `serve`."""

from __future__ import annotations

import contextlib
import errno
import os
import socket
import stat

from twostroke.errors import ConfigError
from twostroke.serve.settings import ServeSettings

MIN_OPEN_FILES = 64  # with a lower limit, too few files are left for connections


def check_open_files() -> None:
    """Raise `ConfigError` if this process may open too few files for a server."""
    with contextlib.suppress(ImportError):
        import resource  # not available on every system

        limit = resource.getrlimit(resource.RLIMIT_NOFILE)[0]
        if 0 <= limit < MIN_OPEN_FILES:
            raise ConfigError(
                f"this process may open {limit} files, and a server needs at least "
                f"{MIN_OPEN_FILES}; raise the limit, for example with 'ulimit -n 4096'"
            )


def bind(settings: ServeSettings) -> socket.socket:
    try:
        if settings.uds is not None:
            return _bind_unix(settings.uds)
        family = socket.AF_INET6 if ":" in settings.host else socket.AF_INET
        listener = socket.socket(family, socket.SOCK_STREAM)
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listener.bind((settings.host, settings.port))
    except OSError as error:
        where = settings.uds or f"{settings.host}:{settings.port}"
        raise ConfigError(
            f"cannot listen on {where} ({error.strerror}); choose another host, port or uds"
        ) from None
    return listener


def _bind_unix(path: str) -> socket.socket:
    """Bind a Unix socket. Replace a socket file on which no server listens."""
    if os.path.exists(path) and stat.S_ISSOCK(os.stat(path).st_mode):
        with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as probe:
            if probe.connect_ex(path) == 0:
                raise OSError(errno.EADDRINUSE, "another server listens on it")
        os.unlink(path)
    listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    listener.bind(path)
    return listener


def url_of(listener: socket.socket, settings: ServeSettings) -> str:
    if settings.uds is not None:
        return f"unix:{settings.uds}"
    host, port = listener.getsockname()[:2]
    shown = f"[{host}]" if ":" in host else host
    return f"{'https' if settings.ssl_certfile else 'http'}://{shown}:{port}"


def close(listener: socket.socket, settings: ServeSettings) -> None:
    """Close the socket and remove its file."""
    listener.close()
    if settings.uds is not None:
        with contextlib.suppress(FileNotFoundError):
            os.unlink(settings.uds)
