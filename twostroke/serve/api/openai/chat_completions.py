"""`POST /v1/chat/completions`: writes the response as JSON or as events."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from twostroke.outputs import CompletionOutput, RequestOutput
from twostroke.request import EngineRequest
from twostroke.serve.fields.protocol import ChatRequest
from twostroke.serve.fields.response_json import (
    Encoded,
    Json,
    LazyList,
    LogprobWriter,
    TextEventTemplate,
    concat,
    count_tokens,
    event,
    long_event,
    request_metrics,
    timings,
)
from twostroke.serve.generation.conversation import AssistantMessage, ConversationGeneration
from twostroke.serve.generation.generate import ChunkWriter
from twostroke.serve.generation.service import Service
from twostroke.serve.parsers.deltas import ContentDelta, Delta, ReasoningDelta


class ChatGeneration(ConversationGeneration[ChatRequest]):
    request_type = ChatRequest
    id_prefix = "chatcmpl"

    def __init__(self, service: Service, request: ChatRequest) -> None:
        super().__init__(service, request)
        self.role = service.settings.response_role
        self.echoed = ""  # the last message, repeated in the answer (`echo`)
        as_ids = service.shows_token_ids(request)
        top = -1 if request.logprob_token_ids else request.top_logprobs or 0
        self._logprobs = LogprobWriter(service.token_names, top, as_ids)

    def as_chat(self) -> ChatRequest:
        return self.request

    def prepare(self) -> list[EngineRequest]:
        if self.request.add_generation_prompt is False and self.request.messages:
            self.role = str(self.request.messages[-1].get("role"))
        if self.request.echo and self.request.messages:
            self.echoed = _text_of(self.request.messages[-1], self.role)
        requests = super().prepare()
        if self.request.prediction is None or not self.service.client.info.speculative:
            return requests
        prediction = self.service.prompts.encode_prediction(self.request.prediction.text)
        return [replace(each, prediction=prediction) for each in requests]

    def stream_writer(self) -> ChatStreamWriter:
        return ChatStreamWriter(self)

    def full_response(self, outputs: Sequence[RequestOutput]) -> Json:
        (output,) = outputs
        response = self.head.as_json("chat.completion")
        response["choices"] = (self.choice(completion) for completion in output.outputs)
        counts = count_tokens(outputs)
        for completion in output.outputs:
            counts.add_reasoning(self.reasoning_tokens(completion.token_ids))
        response["usage"] = counts.usage()
        response["timings"] = timings(outputs, bool(self.request.return_token_gaps))
        if self.service.settings.enable_per_request_metrics:
            response["metrics"] = request_metrics(outputs)
        # As in vLLM, these fields are present (null) even if they were not requested.
        with_logprobs = self.request.prompt_logprobs is not None
        with_ids = self.request.return_token_ids
        response["prompt_logprobs"] = self._logprobs.prompt(output) if with_logprobs else None
        response["prompt_token_ids"] = output.prompt_token_ids if with_ids else None
        return response

    def choice(self, completion: CompletionOutput) -> Json:
        parsed = self.new_message()
        parsed.push(completion.text)
        parsed.flush()
        content = self.echoed + (parsed.content or "") if self.echoed else parsed.content
        message: Json = {"role": self.role, "content": content, "refusal": None, "reasoning": None}
        if parsed.reasoning is not None:
            message |= _reasoning_json(parsed.reasoning)
        if parsed.calls:
            message["tool_calls"] = [call.to_dict() for call in parsed.calls]
        choice = {
            "index": completion.index,
            "message": message,
            "logprobs": self._logprobs_json(completion),
            "finish_reason": parsed.finish_reason(completion.finish_reason),
            "stop_reason": completion.stop_reason,
        }
        choice["token_ids"] = completion.token_ids if self.request.return_token_ids else None
        return choice

    def delta(
        self, completion: CompletionOutput, delta: Json, finish_reason: str | None = None
    ) -> Json:
        choice = {
            "index": completion.index,
            "delta": delta,
            "logprobs": self._logprobs_json(completion),
            "finish_reason": finish_reason,
        }
        if finish_reason is not None:
            choice["stop_reason"] = completion.stop_reason
        if self.request.return_token_ids:
            choice["token_ids"] = completion.token_ids
        return choice

    def prompt_logprobs(self, output: RequestOutput) -> LazyList | None:
        return self._logprobs.prompt(output)

    def _logprobs_json(self, completion: CompletionOutput) -> Json | None:
        if completion.logprobs is None:
            return None
        return {"content": LazyList(self._logprobs.chat(completion.logprobs)), "refusal": None}


class ChatStreamWriter(ChunkWriter[ChatGeneration]):
    chunk_object = "chat.completion.chunk"

    def __init__(self, generation: ChatGeneration) -> None:
        request = generation.request
        super().__init__(generation, request.stream_options)
        # By the index of the choice:
        self._messages: dict[int, AssistantMessage] = {}  # of choices that have begun
        self._templates: dict[int, TextEventTemplate] = {}  # of choices with only content to come
        self._plain_text = not (
            self.usage_always or generation.tools or request.return_token_ids or request.logprobs
        )

    def write(self, _: int, output: RequestOutput) -> Encoded:
        if output.finished:
            self.finished.append(output)
        if not output.outputs:
            return self.progress_event(output)
        if len(output.outputs) == 1:
            return self._write_choice(output, output.outputs[0])
        return concat([self._write_choice(output, completion) for completion in output.outputs])

    def _write_choice(self, output: RequestOutput, completion: CompletionOutput) -> Encoded:
        index, num_tokens = completion.index, len(completion.token_ids)
        template = self._templates.get(index)
        if completion.finish_reason is None and template is not None:
            self.counts.completion += num_tokens
            return template.encode(completion.text)
        begin = b"" if index in self._messages else self._begin(output, completion)
        self.counts.completion += num_tokens
        chunks = self._chunks(output, completion)
        if self.generation.request.return_token_gaps and output.finished:
            return concat([begin, *map(long_event, chunks)])
        events = b"".join(map(event, chunks))
        if self._plain_text and self._messages[index].is_plain:
            self._templates[index] = self._text_template(index)
        return concat([begin, events])

    def _begin(self, output: RequestOutput, completion: CompletionOutput) -> Encoded:
        """Write the first event of a choice, with the role."""
        generation, index = self.generation, completion.index
        self._messages[index] = generation.new_message()
        self.counts.prompt = len(output.prompt_token_ids)
        empty = CompletionOutput(index)
        more: Json = {}
        if generation.request.prompt_logprobs is not None and index == 0:
            more["prompt_logprobs"] = generation.prompt_logprobs(output)
        if generation.request.return_token_ids and index == 0:
            more["prompt_token_ids"] = output.prompt_token_ids
        choice = generation.delta(empty, {"role": generation.role, "content": ""})
        first = self.chunk([choice], **more, **self.running_usage())
        begin = long_event(first) if "prompt_logprobs" in more else event(first)
        if not generation.echoed:
            return begin
        echo = generation.delta(empty, {"content": generation.echoed})
        return concat([begin, event(self.chunk([echo], **self.running_usage()))])

    def _text_template(self, index: int) -> TextEventTemplate:
        empty, generation = CompletionOutput(index), self.generation
        return TextEventTemplate(
            lambda text: event(self.chunk([generation.delta(empty, {"content": text})]))
        )

    def _chunks(self, output: RequestOutput, completion: CompletionOutput) -> list[Json]:
        """Return the chunks of an output: usually one; with tools or reasoning any number. The last
        chunk of a choice has the finish reason."""
        generation, message = self.generation, self._messages[completion.index]
        deltas = [_as_json(delta) for delta in message.push(completion.text, completion.token_ids)]
        reason = None
        if completion.finish_reason is not None:
            deltas += [_as_json(delta) for delta in message.flush()]
            reason = message.finish_reason(completion.finish_reason)
            self.counts.add_reasoning(message.reasoning_tokens)
        elif not deltas and (completion.logprobs or generation.request.return_token_ids):
            deltas = [{}]  # the token has no text yet, but its id or log-probability is sent
        if reason is not None and not deltas:
            deltas = [{}] if generation.tools or generation.reasoning else [{"content": ""}]
        chunks = []
        for n, delta in enumerate(deltas):
            # The first chunk of a token has its ids and logprobs.
            shown = completion if n == 0 else CompletionOutput(completion.index)
            shown.stop_reason = completion.stop_reason
            last = n == len(deltas) - 1
            choice = generation.delta(shown, delta, reason if last else None)
            more = self.running_usage()
            if last and output.finished and completion is output.outputs[-1]:
                more["timings"] = timings([output], bool(generation.request.return_token_gaps))
            chunks.append(self.chunk([choice], **more))
        return chunks


def _text_of(message: Json, role: str) -> str:
    """Return the text of a message; "" if it has another role."""
    content = message.get("content") if message.get("role") == role else None
    if isinstance(content, list):
        content = "".join(part.get("text") or "" for part in content if isinstance(part, dict))
    return content if isinstance(content, str) else ""


def _as_json(delta: Delta) -> Json:
    """Return the `delta` of a chunk."""
    if isinstance(delta, ContentDelta):
        return {"content": delta.text}
    if isinstance(delta, ReasoningDelta):
        return _reasoning_json(delta.text)
    return {"tool_calls": [delta.to_dict()]}


def _reasoning_json(text: str) -> Json:
    """Return reasoning under two names: vLLM's, and that of DeepSeek, llama.cpp and older vLLM."""
    return {"reasoning": text, "reasoning_content": text}
