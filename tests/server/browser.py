"""A real browser, driven over Chrome's DevTools protocol; nothing but a Chromium is needed.

with browser() as one, one.page(url) as page:
    page.value("document.title")
"""

from __future__ import annotations

import asyncio
import base64
import itertools
import shutil
import subprocess
import tempfile
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import aiohttp

PATIENCE_S = 240
NAMES = ("chromium", "chromium-browser", "google-chrome", "chrome")
FLAGS = ("--headless=new", "--no-sandbox", "--disable-gpu", "--disable-dev-shm-usage")
KEYS = {
    "Tab": 9,
    "Enter": 13,
    "Escape": 27,
    " ": 32,
    "PageDown": 34,
    "End": 35,
    "Home": 36,
    "ArrowLeft": 37,
    "ArrowUp": 38,
    "ArrowRight": 39,
    "ArrowDown": 40,
}
ALT, CONTROL, SHIFT = 1, 2, 8  # as the DevTools protocol counts modifiers
KEY_EVENT = "Input.dispatchKeyEvent"


def chromium() -> str | None:
    return next(filter(None, map(shutil.which, NAMES)), None)


class Page:
    """`asked`: the requested addresses; `errors`: the page's errors; `inputs`: the kinds of input
    that the page was given, as the DevTools protocol names them."""

    def __init__(self, port: int) -> None:
        self.asked: list[str] = []
        self.errors: list[str] = []
        self.inputs: set[str] = set()
        self._numbers = itertools.count(1)
        self._answers: dict[int, asyncio.Future[Any]] = {}
        self._loop = asyncio.new_event_loop()
        self._socket: aiohttp.ClientWebSocketResponse | None = None
        self._done = asyncio.Event()
        started = threading.Event()
        self._thread = threading.Thread(
            target=self._loop.run_until_complete, args=(self._run(port, started),), daemon=True
        )
        self._thread.start()
        assert started.wait(PATIENCE_S)
        for domain in ("Page", "Runtime", "Network", "Log"):
            self.call(f"{domain}.enable")

    async def _run(self, port: int, started: threading.Event) -> None:
        async with aiohttp.ClientSession() as session:
            address = f"http://127.0.0.1:{port}/json/new?about:blank"
            async with session.put(address) as answer:
                target = await answer.json()
            async with session.ws_connect(target["webSocketDebuggerUrl"], max_msg_size=0) as socket:
                self._socket = socket
                reading = asyncio.create_task(self._read(socket))
                started.set()
                await self._done.wait()
                reading.cancel()
            await (await session.get(f"http://127.0.0.1:{port}/json/close/{target['id']}")).read()

    async def _read(self, socket: aiohttp.ClientWebSocketResponse) -> None:
        async for message in socket:
            said = message.json()
            if "id" in said:
                self._answers.pop(said["id"]).set_result(said)
                continue
            told = said["params"]
            match said["method"]:
                case "Network.requestWillBeSent":
                    self.asked.append(told["request"]["url"])
                case "Runtime.exceptionThrown":
                    self.errors.append(str(told["exceptionDetails"]))
                case "Runtime.consoleAPICalled" if told["type"] in ("error", "warning"):
                    self.errors.append(str(told["args"]))
                case "Log.entryAdded" if told["entry"]["level"] in ("error", "warning"):
                    self.errors.append(told["entry"]["text"])

    def call(self, method: str, **params: Any) -> Any:
        if method.startswith("Input."):
            self.inputs.add(method)
        said = asyncio.run_coroutine_threadsafe(self._call(method, params), self._loop)
        answer = said.result(PATIENCE_S)
        assert "error" not in answer, answer
        return answer["result"]

    async def _call(self, method: str, params: dict[str, Any]) -> Any:
        number = next(self._numbers)
        self._answers[number] = self._loop.create_future()
        assert self._socket is not None
        await self._socket.send_json({"id": number, "method": method, "params": params})
        return await self._answers[number]

    def close(self) -> None:
        self._loop.call_soon_threadsafe(self._done.set)
        self._thread.join(PATIENCE_S)

    def value(self, script: str, **how: Any) -> Any:
        given = self.call("Runtime.evaluate", expression=script, returnByValue=True, **how)
        assert "exceptionDetails" not in given, given
        return given["result"].get("value")

    def resolved(self, script: str) -> Any:
        """Evaluate an expression and return the value of its promise."""
        return self.value(script, awaitPromise=True)

    def wait_for(self, script: str, patience_s: float = PATIENCE_S) -> None:
        until = time.monotonic() + patience_s
        while not self.value(script):
            assert time.monotonic() < until, f"still not: {script}"
            time.sleep(0.05)

    def write(self, text: str) -> None:
        """Insert text into the focused element at once, as a paste does."""
        self.call("Input.insertText", text=text)

    def type(self, text: str) -> None:
        """Press the key of each character."""
        for character in text:
            self.press(character)

    def press(self, key: str, modifiers: int = 0) -> None:
        """Press and release a key: one of `KEYS`, or the key of a character."""
        number = KEYS.get(key) or (ord(key.upper()) if key.isalnum() else 0)
        text = "\r" if key == "Enter" else key if len(key) == 1 and not modifiers else None
        code = f"Key{key.upper()}" if len(key) == 1 and key.isalpha() else key
        for kind in ("keyDown", "keyUp"):
            self.call(
                KEY_EVENT,
                type=kind,
                key=key,
                code=code,
                windowsVirtualKeyCode=number,
                modifiers=modifiers,
                **({"text": text} if text and kind == "keyDown" else {}),
            )

    def focused(self) -> str:
        """The name of the element that has the focus."""
        label = "one.ariaLabel || one.labels?.[0]?.textContent"
        name = f"(one => {label} || one.textContent || one.id)(document.activeElement)"
        return str(self.value(name))

    def tab_to(self, name: str, modifiers: int = 0) -> None:
        """Press Tab until the element of this name has the focus."""
        passed = []
        for _ in range(80):
            self.press("Tab", modifiers)
            passed.append(self.focused())
            if passed[-1] == name:
                return
        raise AssertionError(f"Tab never comes to {name!r}, but to {passed}")

    def look(self, width: int, height: int, scheme: str) -> None:
        size = {"width": width, "height": height, "deviceScaleFactor": 1, "mobile": width < 600}
        self.call("Emulation.setDeviceMetricsOverride", **size)
        feature = {"name": "prefers-color-scheme", "value": scheme}
        self.call("Emulation.setEmulatedMedia", features=[feature])

    def picture(self, path: Path, whole: bool = True) -> None:
        """Write a PNG of the whole page, or of the visible part."""
        self.call("Emulation.setScrollbarsHidden", hidden=True)
        shot = self.call("Page.captureScreenshot", format="png", captureBeyondViewport=whole)
        path.write_bytes(base64.b64decode(shot["data"]))


class Browser:
    def __init__(self, port: int, pid: int) -> None:
        self._port, self.pid = port, pid

    @contextmanager
    def page(self, url: str) -> Iterator[Page]:
        page = Page(self._port)
        try:
            page.call("Page.navigate", url=url)
            page.wait_for(f"location.href === {url!r} && document.readyState === 'complete'")
            yield page
        finally:
            page.close()


@contextmanager
def browser() -> Iterator[Browser]:
    found = chromium()
    assert found is not None
    with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as folder:
        command = [found, *FLAGS, "--remote-debugging-port=0", f"--user-data-dir={folder}"]
        child = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
        try:
            listens_at, until = Path(folder) / "DevToolsActivePort", time.monotonic() + PATIENCE_S
            while not listens_at.exists() or not listens_at.read_text():
                assert time.monotonic() < until, "the browser did not start"
                time.sleep(0.05)
            yield Browser(int(listens_at.read_text().split()[0]), child.pid)
        finally:
            child.terminate()
            child.wait(PATIENCE_S)
