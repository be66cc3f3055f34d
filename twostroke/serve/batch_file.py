"""`twostroke run-batch`: answers a file of requests with an `App`, without a socket.

    in   {"custom_id": "1", "method": "POST", "url": "/v1/chat/completions", "body": {…}}
    out  {"id": …, "custom_id": "1", "response": {"status_code": 200, "body": {…}}, "error": null}

The format is that of OpenAI and vLLM. Results are in the order of the lines. The result of an
invalid line, or of a refused request, has an error.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Iterator
from typing import Any, BinaryIO, NamedTuple
from uuid import uuid4

import msgspec

from twostroke.errors import EngineError, shown
from twostroke.serve.app import App
from twostroke.serve.error_responses import ApiError, as_api_error, as_decode_error
from twostroke.serve.http.http_request import Message

URLS = ("/v1/chat/completions", "/v1/completions")
# Lines are started before earlier lines are answered, so that the engine's steps are full and a
# long answer does not delay the following lines.
LINES_PER_SEQ = 4  # lines in progress for each of the engine's `max_num_seqs`
MAX_HELD_BYTES = 64 * 1024**2  # of all lines in progress
LINE_OVERHEAD_BYTES = 64 * 1024  # of a line without its body
RETRY_S = 0.5  # after 429: too many large bodies are being read


class Line(msgspec.Struct):
    custom_id: str
    url: str
    body: msgspec.Raw
    method: str = "POST"


class Stream(msgspec.Struct):
    """The field of a body that is checked before the route reads the body."""

    stream: bool | None = None


class Counts(NamedTuple):
    answered: int
    failed: int


async def answer_file(
    app: App, source: BinaryIO, target: BinaryIO, max_inflight: int | None = None
) -> Counts:
    """Answer all lines, at most `max_inflight` at a time.

    Raises `EngineError` if the engine stops; `target` has the answers so far."""
    client = app.service.client
    max_lines = max_inflight or LINES_PER_SEQ * client.info.max_num_seqs
    answered = failed = held_bytes = 0
    window: deque[tuple[int, asyncio.Task[tuple[bytes, bool]]]] = deque()

    async def write_first() -> None:
        nonlocal answered, failed, held_bytes
        size, task = window.popleft()
        result, good = await task
        target.write(result + b"\n")
        target.flush()
        held_bytes -= size
        answered, failed = answered + good, failed + (not good)
        if not client.healthy:
            raise EngineError("the engine has stopped; the remaining lines have no answer")

    try:
        for number, line in _lines(source, app.service.bodies.max_bytes + LINE_OVERHEAD_BYTES):
            while window and (
                window[0][1].done()
                or len(window) >= max_lines
                or held_bytes + len(line or b"") > MAX_HELD_BYTES
            ):
                await write_first()
            task = asyncio.ensure_future(_answer(app, number, line))
            window.append((len(line or b""), task))
            held_bytes += len(line or b"")
            await asyncio.sleep(0)  # let the request begin
        while window:
            await write_first()
    finally:
        for _, task in window:
            task.cancel()
        await asyncio.gather(*(task for _, task in window), return_exceptions=True)
    return Counts(answered, failed)


def _lines(source: BinaryIO, max_bytes: int) -> Iterator[tuple[int, bytes | None]]:
    """Yield lines with numbers from 1; None for a line that is too long. Empty lines are
    skipped."""
    number = 0
    while line := source.readline(max_bytes + 1):
        number += 1
        if len(line) > max_bytes and not line.endswith(b"\n"):
            while (rest := source.readline(max_bytes)) and not rest.endswith(b"\n"):
                pass
            yield number, None
        elif line.strip():
            yield number, line


async def _answer(app: App, number: int, line: bytes | None) -> tuple[bytes, bool]:
    """Return the result of a line as JSON, and whether the request succeeded."""
    custom_id: str | None = None
    try:
        request = _read(app, line)
        custom_id = request.custom_id
        _check(request)
    except ApiError as error:
        content = error.content()
        content["message"] = f"line {number}: {content['message']}"
        return _result(custom_id, None, content), False
    status, body = await _ask(app, request)
    while status == 429:  # other lines of the file use the memory
        await asyncio.sleep(RETRY_S)
        status, body = await _ask(app, request)
    answer = {"status_code": status, "request_id": f"batch-{uuid4().hex}", "body": body}
    return _result(custom_id, answer, None if status == 200 else body), status == 200


def _read(app: App, line: bytes | None) -> Line:
    if line is None:
        limit = app.service.bodies.max_bytes
        raise ApiError(413, f"the body has more than {limit} bytes; raise --max-body-bytes")
    try:
        return msgspec.json.decode(line, type=Line)
    except (msgspec.DecodeError, RecursionError, UnicodeDecodeError) as error:
        refusal = as_decode_error(error)
        # The message is about a body, but the error is in the line.
        refusal.message = refusal.message.replace("the body is", "it is")
        raise refusal from None


def _check(request: Line) -> None:
    if request.method.upper() != "POST":
        raise ApiError(400, f"method is POST, not {shown(request.method)}", param="method")
    if request.url not in URLS:
        raise ApiError(
            400, f"url is one of {', '.join(URLS)}, not {shown(request.url)}", param="url"
        )
    try:
        streamed = msgspec.json.decode(request.body, type=Stream, strict=False).stream
    except (msgspec.DecodeError, RecursionError, UnicodeDecodeError):
        return  # the route reports the error
    if streamed:
        raise ApiError(400, "stream: answers of a batch come whole; leave it out", param="stream")


async def _ask(app: App, request: Line) -> tuple[int, msgspec.Raw]:
    """Return status and body of the response."""
    body = bytes(request.body)
    status, parts = 0, []
    unread = True

    async def receive() -> Message:
        nonlocal unread
        if unread:
            unread = False
            return {"type": "http.request", "body": body, "more_body": False}
        await asyncio.get_running_loop().create_future()  # there is no client to disconnect
        raise AssertionError

    async def send(message: Message) -> None:
        nonlocal status
        if message["type"] == "http.response.start":
            status = message["status"]
        else:
            parts.append(message["body"])

    headers = [(b"content-type", b"application/json"), (b"content-length", b"%d" % len(body))]
    scope: Message = {"type": "http", "method": "POST", "path": request.url, "headers": headers}
    try:
        await app(scope, receive, send)
    except Exception as error:  # after the response had begun
        return 500, msgspec.Raw(as_api_error(error).body())
    return status, msgspec.Raw(b"".join(parts))


def _result(custom_id: str | None, response: Any, error: Any) -> bytes:
    answer_id = f"twostroke-{uuid4().hex}"
    result = {"id": answer_id, "custom_id": custom_id, "response": response, "error": error}
    return msgspec.json.encode(result)
