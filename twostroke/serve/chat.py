"""`POST /v1/chat/completions`."""

from __future__ import annotations

from functools import partial
from typing import Any

from twostroke.engine.intake import Prepared
from twostroke.outputs import CompletionOutput, RequestOutput
from twostroke.serve.calling import Answer, calling
from twostroke.serve.errors import ApiError
from twostroke.serve.exchange import Exchange
from twostroke.serve.feed import Written
from twostroke.serve.params import chat_params
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
from twostroke.serve.protocol import ChatRequest
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
from twostroke.serve.tools import ToolCalls


class Chat:
    def __init__(self, service: Service) -> None:
        self._service = service

    async def __call__(self, exchange: Exchange) -> None:
        service = self._service
        service.admission.check()
        async with service.read(exchange, ChatRequest) as (request, num_bytes):
            service.check_model(request.model)
            service.admission.check(request.n or 1)
            tools = calling(request, service.settings, service.prompts.template_source)
            work = partial(self._prepare, request, tools)
            prepared = await service.prompts.prepared(request, num_bytes, work)
            role = service.settings.response_role
            if request.add_generation_prompt is False:
                role = str(request.messages[-1].get("role"))
        head = service.head("chatcmpl", request.request_id, request.model)
        shape = ChatShape(service, request, head, tools, role)
        writer = ChatEvents(service, shape) if request.stream else None
        async with service.running(exchange, prepared, head.id, writer) as feed:
            if writer is not None:
                await write_stream(exchange, feed, writer)
                return
            outputs = await feed.final()
        await exchange.answer_json(shape.whole(outputs[0], count(outputs)))

    def _prepare(self, request: ChatRequest, tools: ToolCalls | None) -> list[Prepared]:
        service = self._service
        forced = None
        if tools is not None:
            forced = tools.structured_outputs()
            tools.drop_schemas()
        params = chat_params(request, service.client.info, service.settings, forced)
        variables: Json = {}
        if request.reasoning_effort is not None:
            variables["reasoning_effort"] = request.reasoning_effort
        ids = service.prompts.render(request.messages, request, **variables)
        return [service.prompts.prepare(ids, params, request)]


class ChatShape:
    """How this request's answer is written, whole or in chunks."""

    def __init__(
        self,
        service: Service,
        request: ChatRequest,
        head: Head,
        tools: ToolCalls | None,
        role: str,
    ) -> None:
        self.request = request
        self.head = head
        self.tools = tools
        as_ids = bool(request.return_tokens_as_token_ids)
        self._logprobs = LogprobWriter(service.names, request.top_logprobs or 0, as_ids)
        self.role = role

    def whole(self, output: RequestOutput, counts: Counts) -> Json:
        answer = self.head.as_json("chat.completion")
        answer["choices"] = (self._choice(completion) for completion in output.outputs)
        answer["usage"] = counts.usage()
        answer["timings"] = timings([output])
        if self.request.prompt_logprobs is not None:
            answer["prompt_logprobs"] = self._logprobs.prompt(output)
        if self.request.return_token_ids:
            answer["prompt_token_ids"] = output.prompt_token_ids
        return answer

    def answer(self) -> Answer:
        return Answer(self.tools, self.request.parallel_tool_calls is not False)

    def _choice(self, completion: CompletionOutput) -> Json:
        answer = self.answer()
        answer.push(completion.text)
        answer.flush()
        message: Json = {"role": self.role, "content": answer.content, "refusal": None}
        if answer.calls:
            message["tool_calls"] = answer.calls
        choice = {
            "index": completion.index,
            "message": message,
            "logprobs": self._shown_logprobs(completion),
            "finish_reason": answer.finish_reason(completion.finish_reason),
            "stop_reason": completion.stop_reason,
        }
        if self.request.return_token_ids:
            choice["token_ids"] = completion.token_ids
        return choice

    def chunk(self, choices: list[Json], **more: Any) -> Json:
        chunk = self.head.as_json("chat.completion.chunk")
        chunk["choices"] = choices
        return chunk | more

    def delta(
        self, completion: CompletionOutput, delta: Json, finish_reason: str | None = None
    ) -> Json:
        choice = {
            "index": completion.index,
            "delta": delta,
            "logprobs": self._shown_logprobs(completion),
            "finish_reason": finish_reason,
        }
        if finish_reason is not None:
            choice["stop_reason"] = completion.stop_reason
        if self.request.return_token_ids:
            choice["token_ids"] = completion.token_ids
        return choice

    def prompt_logprobs(self, output: RequestOutput) -> Each | None:
        return self._logprobs.prompt(output)

    def _shown_logprobs(self, completion: CompletionOutput) -> Json | None:
        if completion.logprobs is None:
            return None
        return {"content": Each(self._logprobs.chat(completion.logprobs)), "refusal": None}


class ChatEvents:
    """The events of one streamed answer."""

    def __init__(self, service: Service, shape: ChatShape) -> None:
        self._service = service
        self._shape = shape
        self._counts = Counts()
        self._answers: dict[int, Answer] = {}  # choices that have begun
        self._texts: dict[int, TextEvents] = {}
        self._last: RequestOutput | None = None
        request = shape.request
        options = request.stream_options
        self._usage_at_end = bool(options and options.include_usage)
        self._usage_always = self._usage_at_end and bool(options and options.continuous_usage_stats)
        self._plain_text = not (
            self._usage_always or shape.tools or request.return_token_ids or request.logprobs
        )

    def write(self, _: int, output: RequestOutput) -> Written:
        if output.finished:
            self._last = output
        if not output.outputs:
            return self._progress(output)
        if len(output.outputs) == 1:
            return self._write_one(output, output.outputs[0])
        return joined([self._write_one(output, one) for one in output.outputs])

    def _write_one(self, output: RequestOutput, completion: CompletionOutput) -> Written:
        index = completion.index
        self._counts.completion += len(completion.token_ids)
        if completion.finish_reason is None and (text := self._texts.get(index)) is not None:
            return text.write(completion.text)
        begin = b"" if index in self._answers else self._begin(output, completion)
        events = b"".join([event(chunk) for chunk in self._chunks(output, completion)])
        return joined([begin, events])

    def _begin(self, output: RequestOutput, completion: CompletionOutput) -> Written:
        """The first event of a choice says who speaks."""
        shape, index = self._shape, completion.index
        self._answers[index] = shape.answer()
        self._counts.prompt = len(output.prompt_token_ids)
        bare = CompletionOutput(index)
        if self._plain_text:
            self._texts[index] = TextEvents(
                lambda text: event(shape.chunk([shape.delta(bare, {"content": text})]))
            )
        more: Json = {}
        if shape.request.prompt_logprobs is not None and index == 0:
            more["prompt_logprobs"] = shape.prompt_logprobs(output)
        if shape.request.return_token_ids and index == 0:
            more["prompt_token_ids"] = output.prompt_token_ids
        choice = shape.delta(bare, {"role": shape.role, "content": ""})
        first = shape.chunk([choice], **more, **self._running_usage())
        return long_event(first) if "prompt_logprobs" in more else event(first)

    def _chunks(self, output: RequestOutput, completion: CompletionOutput) -> list[Json]:
        """One chunk a token. A tool call may take several, or none yet; the end is the last's."""
        shape, answer = self._shape, self._answers[completion.index]
        deltas = answer.push(completion.text)
        reason = None
        if completion.finish_reason is not None:
            deltas += answer.flush()
            reason = answer.finish_reason(completion.finish_reason)
        elif not deltas and completion.logprobs:
            deltas = [{}]  # the logprobs of a token whose text is held back
        if reason is not None and not deltas:
            deltas = [{"content": ""}] if shape.tools is None else [{}]
        chunks = []
        for n, delta in enumerate(deltas):
            # The ids and logprobs of this token go with the first chunk it makes.
            told = completion if n == 0 else CompletionOutput(completion.index)
            told.stop_reason = completion.stop_reason
            last = n == len(deltas) - 1
            choice = shape.delta(told, delta, reason if last else None)
            more = self._running_usage()
            if last and output.finished and completion is output.outputs[-1]:
                more["timings"] = timings([output])
            chunks.append(shape.chunk([choice], **more))
        return chunks

    def _progress(self, output: RequestOutput) -> bytes:
        if not self._shape.request.return_progress or not output.num_prefilled:
            return b""
        return event(self._shape.chunk([], prompt_progress=progress(output)))

    def _running_usage(self) -> Json:
        return {"usage": self._counts.usage(details=False)} if self._usage_always else {}

    def end(self) -> bytes:
        usage = b""
        if self._last is not None:
            self._counts.prompt = len(self._last.prompt_token_ids)
            self._counts.cached = cached_tokens(self._last)
            if self._usage_at_end:
                times = timings([self._last])
                usage = event(self._shape.chunk([], usage=self._counts.usage(), timings=times))
        return usage + DONE

    def fail(self, error: ApiError) -> bytes:
        return error_event(error) + DONE
