"""`serve`: runs an engine's client and an `App` behind uvicorn until shutdown.

    SIGTERM ──▶ /health 503, new requests 503 ──▶ running requests finish, up to drain_s
            ──▶ other requests end with an error ──▶ the sockets close

A second signal skips the wait. If the engine has stopped for good, the server ends with an error,
and its supervisor can restart it.
"""

from __future__ import annotations

import asyncio
import contextlib
import gc
import logging
import signal
import socket
from collections.abc import Callable, Iterator
from contextlib import AbstractAsyncContextManager
from time import monotonic
from typing import Any, TypeVar

import uvicorn

from twostroke.engine.api import EngineClient
from twostroke.errors import EngineError
from twostroke.log_lines import WORK, uvicorn_config
from twostroke.serve.app import App, asgi
from twostroke.serve.http.connection import connection_type
from twostroke.serve.http.http_request import Message, Receive, Send
from twostroke.serve.http.listening_socket import bind, close, url_of
from twostroke.serve.monitor.stats_log import log_stats
from twostroke.serve.routes.pool_advice import autoscale
from twostroke.serve.settings import ServeSettings

Client = TypeVar("Client", bound=EngineClient)
ClientFactory = Callable[[], AbstractAsyncContextManager[Client]]

log = logging.getLogger(WORK)
BACKLOG = 4096
LAST_EVENTS_S = 2  # after draining, to write error events to the streams


class WithoutQuery(logging.Filter):
    """Removes the query from access log lines: some clients send their key in it."""

    def filter(self, record: logging.LogRecord) -> bool:
        if isinstance(record.args, tuple):
            record.args = tuple(
                arg.partition("?")[0] if isinstance(arg, str) else arg for arg in record.args
            )
        return True


class HttpServer(uvicorn.Server):
    """One run of the server. `stop` ends it from any thread."""

    def __init__(self, app: App, settings: ServeSettings) -> None:
        super().__init__(_config(asgi(app), settings))
        access = logging.getLogger("uvicorn.access")
        if not any(isinstance(each, WithoutQuery) for each in access.filters):
            access.addFilter(WithoutQuery())
        self._app = app
        self._drain_s = settings.drain_s
        self._loop: asyncio.AbstractEventLoop | None = None
        self._draining: asyncio.Task[None] | None = None
        self.engine_stop_reason = ""  # empty while the engine runs

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        """Drain on signals instead of ending at once. Only the main thread receives signals."""
        self._loop = asyncio.get_running_loop()
        signals = (signal.SIGTERM, signal.SIGINT)
        with contextlib.ExitStack() as undo:
            with contextlib.suppress(RuntimeError, ValueError, NotImplementedError):
                for number in signals:
                    self._loop.add_signal_handler(number, self._stop)
                    undo.callback(self._loop.remove_signal_handler, number)
            yield

    def stop(self) -> None:
        if self._loop is not None:
            with contextlib.suppress(RuntimeError):  # the loop has ended already
                self._loop.call_soon_threadsafe(self._stop)

    def _stop(self) -> None:
        if self._draining is not None:
            self._drain_s = 0.0
            return
        if running := len(self._app.service.open_streams):
            requests = "1 request" if running == 1 else f"{running} requests"
            log.info(
                "finishing %s, for up to %g s; press Ctrl-C again to stop at once",
                requests,
                self._drain_s,
            )
        self._app.service.admission.draining = True
        self._draining = asyncio.get_running_loop().create_task(self._drain())

    def end_with_engine(self, stop_reason: asyncio.Future[str]) -> None:
        """End the server: the engine has stopped for good."""
        self.engine_stop_reason = stop_reason.result()
        self._app.service.admission.draining = self.should_exit = True

    async def _drain(self) -> None:
        service, started = self._app.service, monotonic()
        while service.open_streams and monotonic() - started < self._drain_s:
            await asyncio.sleep(0.02)
        service.end_streams()
        self.should_exit = True


class MetricsServer(uvicorn.Server):
    """Serves only /metrics of an app, while a batch runs."""

    def __init__(self, app: App, settings: ServeSettings) -> None:
        self._app = app
        super().__init__(_config(self._answer, settings))

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        """Leave signals to the batch."""
        yield

    async def _answer(self, scope: Message, receive: Receive, send: Send) -> None:
        if scope["path"] != "/metrics":  # let the app answer 404
            scope = {**scope, "path": "/nowhere", "raw_path": b"/nowhere"}
        await self._app(scope, receive, send)


def _config(application: Any, settings: ServeSettings) -> uvicorn.Config:
    return uvicorn.Config(
        application,
        interface="asgi3",
        loop="uvloop" if _has_uvloop() else "asyncio",
        http=connection_type(settings),  # type: ignore[arg-type]
        ws="none",
        lifespan="off",
        log_config=uvicorn_config(),
        log_level="info" if settings.access_log else settings.uvicorn_log_level,
        access_log=settings.access_log,
        server_header=False,
        proxy_headers=False,
        timeout_keep_alive=int(settings.keep_alive_s),
        timeout_graceful_shutdown=LAST_EVENTS_S,
        backlog=BACKLOG,
        ssl_certfile=settings.ssl_certfile,
        ssl_keyfile=settings.ssl_keyfile,
    )


async def serve_forever(
    client_factory: ClientFactory[Client],
    settings: ServeSettings,
    on_started: Callable[[HttpServer, Client, str], None] | None = None,
    listener: socket.socket | None = None,
) -> None:
    """Serve until stopped. The address is bound first, so that a port in use is reported before the
    model is loaded. Raises `EngineError` if the engine stops for good."""
    listener = listener or bind(settings)
    try:
        async with client_factory() as client:
            app = App(client, settings)
            server = HttpServer(app, settings)
            listener.listen(BACKLOG)  # before the address is announced
            if on_started is not None:
                on_started(server, client, url_of(listener, settings))
            logging_stats = None
            if settings.log_stats:
                work = log_stats(client, app.service.metrics.totals)
                logging_stats = asyncio.get_running_loop().create_task(work)
            autoscaling = None
            if settings.autoscale is not None:
                work = autoscale(client, settings)
                autoscaling = asyncio.get_running_loop().create_task(work)
            stop_reason: asyncio.Future[str] | None = getattr(client, "stop_reason", None)
            if stop_reason is not None:
                stop_reason.add_done_callback(server.end_with_engine)
            await server.serve(sockets=[listener])
            if stop_reason is not None:
                stop_reason.remove_done_callback(server.end_with_engine)
            if logging_stats is not None:
                logging_stats.cancel()
            if autoscaling is not None:
                autoscaling.cancel()
            await app.close()
            if server.engine_stop_reason:
                raise EngineError(f"the engine has stopped ({server.engine_stop_reason})")
    finally:
        close(listener, settings)


def serve(
    client_factory: ClientFactory[Client],
    settings: ServeSettings,
    on_started: Callable[[HttpServer, Client, str], None] | None = None,
    listener: socket.socket | None = None,
) -> None:
    """Run `serve_forever` in a new event loop, in a process that does nothing else."""

    def started(server: HttpServer, client: Client, url: str) -> None:
        # The objects that exist now live until the end. Without `freeze` the garbage collector
        # would scan them again and again, which is a fifth of the CPU time of a token.
        gc.collect()
        gc.freeze()
        if on_started is not None:
            on_started(server, client, url)

    factory = None
    if _has_uvloop():
        import uvloop

        factory = uvloop.new_event_loop
    with asyncio.Runner(loop_factory=factory) as runner:
        runner.run(serve_forever(client_factory, settings, started, listener))


def _has_uvloop() -> bool:
    try:
        import uvloop  # noqa: F401
    except ImportError:
        return False
    return True
