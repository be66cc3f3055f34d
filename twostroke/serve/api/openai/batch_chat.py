"""vLLM's `/v1/chat/completions/batch`, several conversations in one request, and SageMaker's
`/invocations`, which accepts chat and completion requests."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import msgspec

from twostroke.outputs import RequestOutput
from twostroke.request import EngineRequest
from twostroke.serve.api.openai.chat_completions import ChatGeneration
from twostroke.serve.api.openai.completions import CompletionGeneration
from twostroke.serve.error_responses import ApiError
from twostroke.serve.fields.protocol import (
    UNSUPPORTED_IN_BATCH,
    BatchChatRequest,
    ChatRequest,
    InvocationRequest,
)
from twostroke.serve.fields.response_json import Json, ResponseHead, count_tokens, timings
from twostroke.serve.generation.generate import GenerateRoute, Generation, StreamWriter
from twostroke.serve.generation.service import Service
from twostroke.serve.http.http_request import HttpRequest


class BatchChatGeneration(Generation[BatchChatRequest]):
    """Several chats in one request. The answer has one choice for each conversation, in order."""

    request_type = BatchChatRequest
    id_prefix = "chatcmpl"

    def __init__(self, service: Service, request: BatchChatRequest) -> None:
        super().__init__(service, request)
        named = [(name, getattr(request, name)) for name in UNSUPPORTED_IN_BATCH]
        unsupported = [name for name, value in named if not (value is None or value is False)]
        if (request.n or 1) > 1:
            unsupported.append("n above 1")
        if unsupported:
            raise ApiError(
                400,
                f"{' and '.join(unsupported)}: not supported in a batch; send each conversation to "
                "/v1/chat/completions",
                param=unsupported[0].split()[0],
            )
        if not request.messages:
            raise ApiError(400, "messages is empty; send conversations", param="messages")
        self.num_choices = len(request.messages)
        self._chats: list[ChatGeneration] = []

    def prepare(self) -> list[EngineRequest]:
        self._chats = [
            ChatGeneration(self.service, msgspec.structs.replace(self.request, messages=messages))
            for messages in self.request.messages
        ]
        return [request for chat in self._chats for request in chat.prepare()]

    def begin(self, head: ResponseHead, requests: Sequence[EngineRequest]) -> None:
        super().begin(head, requests)
        for chat in self._chats:
            chat.request.drop_large_fields()

    def stream_writer(self) -> StreamWriter:
        raise NotImplementedError  # `stream` is refused

    def full_response(self, outputs: Sequence[RequestOutput]) -> Json:
        response = self.head.as_json("chat.completion")
        counts = count_tokens(outputs)
        choices = []
        for index, (chat, output) in enumerate(zip(self._chats, outputs, strict=True)):
            (completion,) = output.outputs
            counts.add_reasoning(chat.reasoning_tokens(completion.token_ids))
            choices.append(chat.choice(completion) | {"index": index})
        response["choices"] = choices
        response["usage"] = counts.usage()
        response["timings"] = timings(outputs)
        return response


class InvocationsRoute(GenerateRoute):
    """The handler of SageMaker's route, for chat and for completion requests."""

    def __init__(self, service: Service) -> None:
        super().__init__(service, ChatGeneration)
        self._request_type = InvocationRequest

    def new_generation(self, http: HttpRequest, request: Any) -> Generation[Any]:
        is_chat = isinstance(request, ChatRequest)
        return (ChatGeneration if is_chat else CompletionGeneration)(self._service, request)
