"""A real server on a real socket, in a thread, over an engine in this process."""

from __future__ import annotations

import asyncio
import http.client
import itertools
import json
import socket
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import pytest

from twostroke import LLM
from twostroke.engine.in_process import AsyncEngine
from twostroke.sched.updates import Update
from twostroke.serve.app import App
from twostroke.serve.server import ClientFactory, HttpServer, serve_forever
from twostroke.serve.settings import ServeSettings

PATIENCE_S = 240
JSON = {"Content-Type": "application/json"}


@dataclass
class Running:
    server: HttpServer
    client: AsyncEngine
    url: str
    thread: threading.Thread

    @property
    def app(self) -> App:
        return self.server._app

    @property
    def port(self) -> int:
        return int(self.url.rpartition(":")[2])

    def ask(
        self,
        method: str,
        path: str,
        body: Any = None,
        headers: dict[str, str] | None = None,
    ) -> tuple[int, dict[str, str], bytes]:
        """Send a request; return status, headers (lower case) and body. Non-bytes are sent as
        JSON."""
        connection = http.client.HTTPConnection("127.0.0.1", self.port, timeout=PATIENCE_S)
        try:
            if body is not None and not isinstance(body, bytes):
                body = json.dumps(body).encode()
            default = JSON if method == "POST" else {}
            connection.request(method, path, body, default if headers is None else headers)
            answer = connection.getresponse()
            names = {name.lower(): value for name, value in answer.getheaders()}
            return answer.status, names, answer.read()
        finally:
            connection.close()

    def post(self, path: str, body: Any) -> dict[str, Any]:
        status, _, content = self.ask("POST", path, body)
        assert status == 200, content
        return json.loads(content)

    def events(self, path: str, body: Any) -> list[Any]:
        """The data of every event of a stream; the last one is "[DONE]"."""
        status, headers, content = self.ask("POST", path, body)
        assert status == 200, content
        assert headers["content-type"].startswith("text/event-stream")
        assert content.endswith(b"\n\n")
        events = []
        for part in content.decode().split("\n\n")[:-1]:
            assert part.startswith("data: ")
            data = part.removeprefix("data: ")
            events.append(data if data == "[DONE]" else json.loads(data))
        return events

    @contextmanager
    def steps_await_messages(self, after: int) -> Iterator[None]:
        """Let the engine run `after` steps; each later step awaits a message to the engine. So a
        client that ends a stream does so before the stream has ended, on any machine."""
        inbox, core = self.client._inbox, self.client.engine.core
        run_step, steps = core.step, itertools.count()

        def step() -> list[Update]:
            until = time.monotonic() + PATIENCE_S
            if next(steps) >= after:
                while inbox.empty():
                    assert time.monotonic() < until, "the engine got no message"
                    time.sleep(0.005)
            return run_step()

        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(core, "step", step)
            yield

    def assert_idle(self) -> None:
        """The engine has nothing left of any request, and every block is accounted for."""
        core = self.client.engine.core
        until = time.monotonic() + PATIENCE_S
        while core.has_work or self.app.service.open_streams or self.app.service.admission.num_open:
            assert time.monotonic() < until, "requests still run without a client"
            time.sleep(0.005)
        core.scheduler.audit()
        assert not core.scheduler.has_requests
        assert core.scheduler.kv.is_idle()


LoopFactory = Callable[[], asyncio.AbstractEventLoop]


@contextmanager
def running(
    llm: LLM,
    loop_factory: LoopFactory | None = None,
    listener: socket.socket | None = None,
    **settings: Any,
) -> Iterator[Running]:
    """Run a server; check at the end that the engine has nothing left of any request."""
    with serving(lambda: AsyncEngine(llm.engine), loop_factory, listener, **settings) as one:
        yield one
        if one.thread.is_alive():
            one.assert_idle()


@contextmanager
def serving(
    client_factory: ClientFactory[Any],
    loop_factory: LoopFactory | None = None,
    listener: socket.socket | None = None,
    **settings: Any,
) -> Iterator[Running]:
    """Run a server over any engine client."""
    started = threading.Event()
    found: dict[str, Any] = {}

    def run() -> None:
        def note(server: HttpServer, client: Any, url: str) -> None:
            found.update(server=server, client=client, url=url)
            started.set()

        options = ServeSettings(**{"port": 0, "drain_s": 5.0, "max_choices": 128, **settings})
        try:
            with asyncio.Runner(loop_factory=loop_factory) as runner:
                runner.run(serve_forever(client_factory, options, note, listener))
        except BaseException as error:
            found["error"] = error
            started.set()

    thread = threading.Thread(target=run, name="http", daemon=True)
    thread.start()
    assert started.wait(PATIENCE_S)
    if "error" in found:
        raise found["error"]
    server = found["server"]
    while not server.started:
        time.sleep(0.002)
    try:
        yield Running(server, found["client"], found["url"], thread)
    finally:
        server.stop()
        thread.join(PATIENCE_S)
        assert not thread.is_alive(), "the server did not end"
