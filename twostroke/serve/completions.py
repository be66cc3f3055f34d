"""`POST /v1/completions`: one prompt or several, each continued n times."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import Any

from twostroke.engine.intake import Prepared
from twostroke.outputs import CompletionOutput, Logprobs, RequestOutput
from twostroke.serve.errors import ApiError
from twostroke.serve.exchange import Exchange
from twostroke.serve.feed import Written
from twostroke.serve.params import completion_params
from twostroke.serve.parts import (
    Counts,
    Json,
    LogprobWriter,
    cached_tokens,
    count,
    progress,
    timings,
)
from twostroke.serve.pieces import Each
from twostroke.serve.prompts import each_prompt
from twostroke.serve.protocol import CompletionRequest
from twostroke.serve.service import Head, Service
from twostroke.serve.stream import (
    DONE,
    TextEvents,
    error_event,
    event,
    joined,
    long_event,
    write_stream,
)


class Completions:
    def __init__(self, service: Service) -> None:
        self._service = service

    async def __call__(self, exchange: Exchange) -> None:
        service = self._service
        service.admission.check()
        async with service.read(exchange, CompletionRequest) as (request, num_bytes):
            service.check_model(request.model)
            prompts = each_prompt(request.prompt)
            service.admission.check(len(prompts) * (request.n or 1))
            work = partial(self._prepare, request, prompts)
            prepared = await service.prompts.prepared(request, num_bytes, work)
        head = service.head("cmpl", request.request_id, request.model)
        shape = CompletionShape(service, request, head)
        writer = CompletionEvents(service, shape) if request.stream else None
        async with service.running(exchange, prepared, head.id, writer) as feed:
            if writer is not None:
                await write_stream(exchange, feed, writer)
                return
            outputs = await feed.final()
        counts = count(outputs)
        if shape.nothing_written:
            counts.completion = 0
        await exchange.answer_json(shape.whole(outputs, counts))

    def _prepare(
        self, request: CompletionRequest, prompts: Sequence[str | list[int]]
    ) -> list[Prepared]:
        service = self._service
        params = completion_params(request, service.client.info, service.settings)
        prepared = []
        for prompt in prompts:
            if isinstance(prompt, str) and request.add_special_tokens is False:
                prompt = service.prompts.encode(prompt, add_special_tokens=False)
            prepared.append(service.prompts.prepare(prompt, params, request))
        return prepared


class CompletionShape:
    """How this request's answer is written, whole or in chunks."""

    def __init__(self, service: Service, request: CompletionRequest, head: Head) -> None:
        self.request = request
        self.head = head
        self.echo = bool(request.echo)
        self.nothing_written = self.echo and request.max_tokens == 0
        self._tokenizer = service.tokenizer
        as_ids = bool(request.return_tokens_as_token_ids)
        self._logprobs = LogprobWriter(service.names, request.logprobs or 0, as_ids)

    def index(self, prompt_index: int, completion: CompletionOutput) -> int:
        return prompt_index * (self.request.n or 1) + completion.index

    def whole(self, outputs: Sequence[RequestOutput], counts: Counts) -> Json:
        answer = self.head.as_json("text_completion")
        answer["choices"] = (
            self._choice(number, output, completion)
            for number, output in enumerate(outputs)
            for completion in output.outputs
        )
        answer["usage"] = counts.usage()
        answer["timings"] = timings(outputs)
        return answer

    def _choice(self, number: int, output: RequestOutput, completion: CompletionOutput) -> Json:
        prompt = self.prompt_text(output) if self.echo else ""
        text = "" if self.nothing_written else completion.text
        ids = [] if self.nothing_written else completion.token_ids
        parts = [] if self.nothing_written else [completion.logprobs]
        if self.echo and self.request.logprobs is not None:
            ids = [*output.prompt_token_ids, *ids]
            parts = [output.prompt_logprobs, *parts]
        choice = self.choice(
            self.index(number, completion),
            prompt + text,
            None if self.request.logprobs is None else self._logprobs.completion(ids, parts),
            completion.finish_reason,
            completion.stop_reason,
        )
        if self.request.prompt_logprobs is not None:
            choice["prompt_logprobs"] = self._logprobs.prompt(output)
        if self.request.return_token_ids:
            choice["prompt_token_ids"] = output.prompt_token_ids
            choice["token_ids"] = completion.token_ids
        return choice

    def prompt_text(self, output: RequestOutput) -> str:
        if output.prompt is not None or self._tokenizer is None:
            return output.prompt or ""
        return self._tokenizer.decode(output.prompt_token_ids, skip_special_tokens=False)

    def logprobs(self, completion: CompletionOutput, offset: int) -> Json | None:
        if completion.logprobs is None:
            return None
        return self._logprobs.completion(completion.token_ids, [completion.logprobs], offset)

    def shown_prompt(self, output: RequestOutput) -> Each | None:
        return self._logprobs.prompt(output)

    def prompt_logprobs(self, output: RequestOutput) -> Json | None:
        if self.request.logprobs is None:
            return None
        entries = output.prompt_logprobs
        if entries is None:  # a prompt of one token
            entries = Logprobs()
            entries.add(None)
        return self._logprobs.completion(output.prompt_token_ids, [entries])

    def choice(
        self,
        index: int,
        text: str,
        logprobs: Json | None = None,
        finish_reason: str | None = None,
        stop_reason: int | str | None = None,
    ) -> Json:
        return {
            "index": index,
            "text": text,
            "logprobs": logprobs,
            "finish_reason": finish_reason,
            "stop_reason": stop_reason,
        }

    def chunk(self, choices: list[Json], **more: Any) -> Json:
        chunk = self.head.as_json("text_completion")
        chunk["choices"] = choices
        return chunk | more


class CompletionEvents:
    """The events of one streamed answer."""

    def __init__(self, service: Service, shape: CompletionShape) -> None:
        self._service = service
        self._shape = shape
        self._counts = Counts()
        self._ends: list[RequestOutput] = []
        self._texts: dict[int, TextEvents] = {}
        self._offsets: dict[int, int] = {}  # choices that have begun: characters told
        request = shape.request
        options = request.stream_options
        self._usage_at_end = bool(options and options.include_usage)
        self._usage_always = self._usage_at_end and bool(options and options.continuous_usage_stats)
        self._plain_text = not (
            self._usage_always
            or shape.nothing_written
            or request.return_token_ids
            or request.logprobs is not None
        )
        self._prompts_counted: set[int] = set()

    def write(self, prompt_index: int, output: RequestOutput) -> Written:
        if output.finished:
            self._ends.append(output)
        if not output.outputs:
            return self._progress(output)
        parts: list[Written] = []
        for completion in output.outputs:
            if not self._shape.nothing_written:
                self._counts.completion += len(completion.token_ids)
            index = self._shape.index(prompt_index, completion)
            text = self._texts.get(index)
            if text is not None and completion.finish_reason is None:
                parts.append(text.write(completion.text))
            else:
                parts.append(self._write_plain(prompt_index, index, output, completion))
        return joined(parts)

    def _write_plain(
        self, prompt_index: int, index: int, output: RequestOutput, completion: CompletionOutput
    ) -> Written:
        shape = self._shape
        begin: Written = b""
        if index not in self._offsets:
            begin = self._begin(prompt_index, index, output)
        if shape.nothing_written:
            completion = CompletionOutput(completion.index, finish_reason=completion.finish_reason)
        choice = shape.choice(
            index,
            completion.text,
            shape.logprobs(completion, self._offsets[index]),
            completion.finish_reason,
            completion.stop_reason,
        )
        self._offsets[index] += len(completion.text)
        if shape.request.return_token_ids:
            choice["token_ids"] = completion.token_ids
        more = self._running_usage()
        if output.finished and completion.index == output.outputs[-1].index:
            more["timings"] = timings([output])
        return joined([begin, event(shape.chunk([choice], **more))])

    def _begin(self, prompt_index: int, index: int, output: RequestOutput) -> Written:
        """A choice's echo, and what is told of its prompt once."""
        shape = self._shape
        self._offsets[index] = 0
        if prompt_index not in self._prompts_counted:
            self._prompts_counted.add(prompt_index)
            self._counts.prompt += len(output.prompt_token_ids)
        if self._plain_text:
            self._texts[index] = TextEvents(
                lambda text: event(shape.chunk([shape.choice(index, text)]))
            )
        request = shape.request
        if not (shape.echo or request.return_token_ids or request.prompt_logprobs is not None):
            return b""
        prompt = shape.prompt_text(output) if shape.echo else ""
        logprobs = shape.prompt_logprobs(output) if shape.echo else None
        self._offsets[index] = len(prompt)
        choice = shape.choice(index, prompt, logprobs)
        if request.prompt_logprobs is not None:
            choice["prompt_logprobs"] = shape.shown_prompt(output)
        if request.return_token_ids:
            choice["prompt_token_ids"] = output.prompt_token_ids
            choice["token_ids"] = []
        return long_event(shape.chunk([choice], **self._running_usage()))

    def _progress(self, output: RequestOutput) -> bytes:
        if not self._shape.request.return_progress or not output.num_prefilled:
            return b""
        return event(self._shape.chunk([], prompt_progress=progress(output)))

    def _running_usage(self) -> Json:
        return {"usage": self._counts.usage(details=False)} if self._usage_always else {}

    def end(self) -> bytes:
        self._counts.cached = sum(map(cached_tokens, self._ends))
        if not self._usage_at_end:
            return DONE
        times = timings(self._ends)
        return event(self._shape.chunk([], usage=self._counts.usage(), timings=times)) + DONE

    def fail(self, error: ApiError) -> bytes:
        return error_event(error) + DONE
