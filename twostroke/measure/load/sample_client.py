"""A client that streams one request from a server and returns a `Sample`."""

from __future__ import annotations

import json
from contextlib import aclosing
from time import perf_counter
from typing import Any

from twostroke.measure.load.definitions import Sample
from twostroke.measure.load.http_client import Connections, ServerError
from twostroke.measure.load.workload import PlannedRequest

COMPLETIONS, CHAT = "/v1/completions", "/v1/chat/completions"
OTHER_ROUTES = "bench serve --backend openai-chat, phases --chat"
IDLE_TIMEOUT_S = 600.0  # between two pieces of an answer


class OpenAIClient:
    """A client of one route of a server, which records when tokens arrive."""

    def __init__(
        self,
        connections: Connections,
        model: str | None,
        route: str = COMPLETIONS,
        extra: dict[str, Any] | None = None,
        ignore_eos: bool = True,
        keep_text: bool = False,
    ) -> None:
        self.connections = connections
        self.model, self.route = model, route
        self._extra = dict(extra or {})
        self._ignore_eos, self._keep_text = ignore_eos, keep_text

    def body(self, planned: PlannedRequest) -> dict[str, Any]:
        body: dict[str, Any] = {"stream": True, "stream_options": {"include_usage": True}}
        if self.model is not None:
            body["model"] = self.model
        if planned.output_tokens is not None:
            body["max_tokens"] = planned.output_tokens
            if self._ignore_eos:
                body["ignore_eos"] = True
        if self.route == CHAT:
            text = planned.prompt
            is_text = isinstance(text, str)
            body["messages"] = [{"role": "user", "content": text}] if is_text else text
        else:
            body["prompt"] = planned.prompt
        return body | self._extra | (planned.extra or {})

    async def send(
        self, planned: PlannedRequest, scheduled_s: float, into: Sample | None = None
    ) -> Sample:
        """Send a request and return its sample. An error of the server is in the sample.

        `into`: a sample to fill while the answer arrives, for a caller that reads the sample before
        the end or cancels the request.
        """
        sample = into or Sample(scheduled_s)
        body = json.dumps(self.body(planned)).encode()
        sample.sent_s = perf_counter()
        try:
            await self._read(sample, body)
        except ServerError as error:
            sample.error, sample.status = str(error), error.status
        sample.ended_s = perf_counter()
        if not sample.error and not sample.content_s:
            sample.error = (
                f"the server streamed no content; try another route ({OTHER_ROUTES}) or model"
            )
        sample.prompt_tokens = sample.prompt_tokens or planned.prompt_tokens
        sample.output_tokens = sample.output_tokens or len(sample.content_s)
        return sample

    async def _read(self, sample: Sample, body: bytes) -> None:
        left = b""
        stream = self.connections.stream("POST", self.route, body, IDLE_TIMEOUT_S)
        async with aclosing(stream) as pieces:
            async for at_s, data in pieces:
                *lines, left = (left + data).split(b"\n")
                for line in lines:
                    if line.startswith(b"data:"):
                        self._take(sample, at_s, line[5:].strip())

    def _take(self, sample: Sample, at_s: float, data: bytes) -> None:
        if data == b"[DONE]":
            return
        try:
            event = json.loads(data)
        except ValueError:
            raise ServerError("the server streamed an event that is not JSON") from None
        if error := event.get("error"):
            message = error.get("message", error) if isinstance(error, dict) else error
            raise ServerError(f"the stream ended with an error: {message}")
        sample.request_id = sample.request_id or str(event.get("id") or "")
        if isinstance(event.get("timings"), dict):
            sample.timings = event["timings"]
        if usage := event.get("usage"):
            sample.prompt_tokens = usage.get("prompt_tokens") or sample.prompt_tokens
            sample.output_tokens = usage.get("completion_tokens") or sample.output_tokens
            details = usage.get("prompt_tokens_details")
            if details and details.get("cached_tokens") is not None:
                sample.cached_tokens = details["cached_tokens"]
        for choice in event.get("choices") or ():
            text = _content(choice)
            if text:
                sample.content_s.append(at_s)
                if self._keep_text:
                    sample.text += text
            sample.finish_reason = choice.get("finish_reason") or sample.finish_reason


def _content(choice: dict[str, Any]) -> str:
    """Return the content of a choice: text, reasoning, or a part of a tool call."""
    if "text" in choice:
        return choice["text"] or ""
    delta = choice.get("delta") or {}
    text = delta.get("content") or delta.get("reasoning") or delta.get("reasoning_content")
    if not text and delta.get("tool_calls"):
        text = json.dumps(delta["tool_calls"])
    return text or ""


async def send_first(client: OpenAIClient, planned: PlannedRequest) -> Sample:
    """Send a first request, and raise `ServerError` with a hint if the request fails."""
    sample = await client.send(planned, perf_counter())
    if sample.ok:
        return sample
    hint = ""
    if sample.status == 404:
        known = await known_models(client.connections)
        if known and client.model not in known:
            hint = "; choose a model of the server with --model"
            if not any(name in sample.error for name in known):
                hint += f": {', '.join(known[:8])}"
    message = sample.error.rstrip(".") if hint else sample.error
    raise ServerError(f"a first request to {client.route} failed: {message}{hint}")


async def known_models(connections: Connections) -> list[str]:
    """Return the names of the server's models, or nothing without /v1/models."""
    try:
        listed = await connections.fetch_json("/v1/models")
        return [str(one["id"]) for one in listed["data"]]
    except (ServerError, KeyError, TypeError):
        return []


async def first_model(connections: Connections) -> dict[str, Any]:
    """Return the first model of /v1/models. Raise `ServerError` if there is none."""
    try:
        listed = await connections.fetch_json("/v1/models")
        models = listed["data"]
    except ServerError as error:
        if error.status == 404:
            raise ServerError(
                f"{connections.endpoint.url} has no /v1/models, so it does not look like an "
                "OpenAI-compatible server; if it is one, name the model with --model"
            ) from None
        raise
    except (KeyError, TypeError):
        raise ServerError("the answer of /v1/models is not in OpenAI's format") from None
    if not models:
        raise ServerError("the server has no model loaded")
    return dict(models[0])
