"""Ollama's API: `/api/chat` and `/api/generate`, streamed as lines of JSON, and routes that return
information. Routes that pull or change models answer 501."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Sequence
from datetime import UTC, datetime
from functools import partial
from hashlib import sha256
from typing import Any, ClassVar, Self, TypeVar

from twostroke import __version__
from twostroke.outputs import CompletionOutput, Logprobs, RequestOutput
from twostroke.request import EngineRequest
from twostroke.serve.api.anthropic.messages import parsed_arguments
from twostroke.serve.api.ollama.ollama_request import (
    OllamaChatRequest,
    OllamaGenerateRequest,
    OllamaRequest,
    as_chat,
    chat_messages,
    refuse_images,
    served_name,
)
from twostroke.serve.error_responses import ApiError
from twostroke.serve.fields.body_fields import Body, Name
from twostroke.serve.fields.protocol import ChatRequest, ErrorBody
from twostroke.serve.fields.response_json import (
    Json,
    LazyList,
    LogprobWriter,
    ResponseHead,
    count_tokens,
    encode_json,
    timings,
)
from twostroke.serve.generation.conversation import ConversationGeneration
from twostroke.serve.generation.generate import GenerateRoute
from twostroke.serve.generation.infill import infill_prompt, infill_tokens
from twostroke.serve.generation.params import chat_params
from twostroke.serve.generation.service import Service
from twostroke.serve.http.http_request import NDJSON, HttpRequest
from twostroke.serve.http.routing import Route
from twostroke.serve.parsers.deltas import (
    ContentDelta,
    Delta,
    ReasoningDelta,
    ToolCall,
    ToolCallDelta,
)

API_VERSION = "0.12.0"  # of Ollama; some clients require a recent version
LATEST = ":latest"
NS_PER_MS = 1e6
DTYPES = {"float32": "F32", "float16": "F16", "bfloat16": "BF16"}  # as Ollama names them

R = TypeVar("R", bound=OllamaRequest)


class OllamaError(ErrorBody):
    error: str

    @classmethod
    def from_error(cls, error: ApiError) -> Self:
        return cls(error.content()["message"])


class ShowRequest(Body, kw_only=True):
    REQUIRES_JSON_CONTENT_TYPE: ClassVar[bool] = False

    model: Name | None = None
    name: Name | None = None  # the older name of `model`
    verbose: bool | None = None


def ollama_routes(service: Service) -> list[Route]:
    route = partial(Route, error=OllamaError, stream_type="application/x-ndjson")
    info = OllamaInfoRoutes(service)
    chat = GenerateRoute(service, OllamaChat)
    generate = GenerateRoute(service, OllamaGenerate)
    refused = [
        ("POST", "/api/pull", "models cannot be pulled; start the server with another model"),
        ("POST", "/api/push", "models cannot be pushed"),
        ("POST", "/api/create", "models cannot be created; start the server with another model"),
        ("POST", "/api/copy", "models cannot be copied; --served-model-name gives more names"),
        ("DELETE", "/api/delete", "models cannot be deleted"),
        ("POST", "/api/embed", "this server generates text; embeddings are not supported"),
        ("POST", "/api/embeddings", "this server generates text; embeddings are not supported"),
    ]
    return [
        route("POST", "/api/chat", chat, "Answer a conversation (Ollama).", OllamaChatRequest),
        route("POST", "/api/generate", generate, "Continue text (Ollama).", OllamaGenerateRequest),
        route("GET", "/api/tags", info.tags, "The models of this server (Ollama)."),
        route("POST", "/api/show", info.show, "A model's properties (Ollama).", ShowRequest),
        route("GET", "/api/ps", info.running, "The loaded models (Ollama)."),
        route("GET", "/api/version", info.version, "The version of Ollama's API."),
        *(
            route(method, path, partial(_refuse, reason), "Always 501.", supported=False)
            for method, path, reason in refused
        ),
    ]


async def _refuse(reason: str, http: HttpRequest) -> None:
    raise ApiError(501, reason, code="not_implemented")


# ── information ────────────────────────────────────────────────────────────────────────────────


class OllamaInfoRoutes:
    def __init__(self, service: Service) -> None:
        self._service = service
        self._started = _timestamp(service.started)

    async def version(self, http: HttpRequest) -> None:
        await http.respond_json({"version": API_VERSION, "server": f"twostroke {__version__}"})

    async def tags(self, http: HttpRequest) -> None:
        models = [self._model(name) for name in self._service.models]
        await http.respond_json({"models": models})

    async def running(self, http: HttpRequest) -> None:
        info = self._service.client.info
        on_gpu = info.device.startswith("cuda")
        more = {
            "expires_at": "9999-12-31T23:59:59Z",  # the model is never unloaded
            "size_vram": info.weight_bytes + info.kv_bytes if on_gpu else 0,
            "context_length": info.max_model_len,
        }
        models = [{**self._model(name), **more} for name in self._service.models]
        await http.respond_json({"models": models})

    async def show(self, http: HttpRequest) -> None:
        service = self._service
        async with service.read(http, ShowRequest) as (request, _):
            name = served_name(request.model or request.name, service.models)
            service.check_model(name)
        info = service.client.info
        sampling = {"temperature": info.sampling.temperature, "top_p": info.sampling.top_p}
        answer = {
            "modelfile": "",
            "license": "",
            "parameters": "\n".join(f"{key} {value}" for key, value in sampling.items()),
            "template": service.client.input_processor.chat_template or "",
            "details": self._details(),
            "model_info": {
                "general.architecture": info.family,
                "general.basename": info.model_name,
                "general.parameter_count": info.num_parameters,
                f"{info.family}.context_length": info.max_model_len,
                f"{info.family}.vocab_size": info.vocab_size,
            },
            "capabilities": self._capabilities(),
            "modified_at": self._started,
        }
        await http.respond_json(answer)

    def _capabilities(self) -> list[str]:
        template = self._service.client.input_processor.chat_template or ""
        capabilities = {
            "completion": True,
            "tools": "tools" in template,
            "thinking": "enable_thinking" in template or "<think>" in template,
            "insert": infill_tokens(self._service.tokenizer) is not None,
        }
        return [name for name, available in capabilities.items() if available]

    def _model(self, name: str) -> Json:
        shown = name if ":" in name else name + LATEST
        return {
            "name": shown,
            "model": shown,
            "modified_at": self._started,
            "size": self._service.client.info.weight_bytes,
            "digest": sha256(self._service.fingerprint.encode()).hexdigest(),
            "details": self._details(),
        }

    def _details(self) -> Json:
        info = self._service.client.info
        dtype = info.weights or info.dtype
        return {
            "parent_model": "",
            "format": info.file_format,
            "family": info.family,
            "families": [info.family],
            "parameter_size": _in_millions(info.num_parameters),
            "quantization_level": DTYPES.get(dtype, dtype),
        }


def _in_millions(num_parameters: int) -> str:
    """Format a number of parameters as Ollama does: "134.52M", "7.6B"."""
    if num_parameters >= 10**9:
        return f"{num_parameters / 1e9:.1f}B"
    return f"{num_parameters / 1e6:.2f}M"


def _timestamp(seconds: float | None = None) -> str:
    moment = datetime.now(UTC) if seconds is None else datetime.fromtimestamp(seconds, UTC)
    return moment.isoformat().replace("+00:00", "Z")


# ── answers ─────────────────────────────────────────────────────────────────────────────────────


class OllamaGeneration(ConversationGeneration[R]):
    """The base of both routes. The last line of a response has counts and durations."""

    id_prefix = "ollama"
    stream_headers = NDJSON

    def __init__(self, service: Service, request: R) -> None:
        super().__init__(service, request)
        self._logprobs = LogprobWriter(service.token_names, request.top_logprobs or 0, False)
        if self.is_empty:
            self.chat.stream = False

    @property
    @abstractmethod
    def is_empty(self) -> bool:
        """Whether the request has no prompt. Clients send such requests to load the model."""

    @abstractmethod
    def part(self, content: str, thinking: str = "", calls: Sequence[ToolCall] = ()) -> Json:
        """Return the fields of a line for a part of the text."""

    def as_chat(self) -> ChatRequest:
        return as_chat(self.request, self.service.models)

    def begin(self, head: ResponseHead, requests: Sequence[EngineRequest]) -> None:
        super().begin(head, requests)
        self._model = self.request.model or head.model

    def line(self, part: Json, logprobs: Logprobs | None = None, **end: Any) -> Json:
        line: Json = {"model": self._model, "created_at": _timestamp(), **part}
        if logprobs is not None:
            line["logprobs"] = LazyList(self._logprobs.chat(logprobs))
        return {**line, "done": bool(end), **end}

    def stream_writer(self) -> OllamaStreamWriter:
        return OllamaStreamWriter(self)

    def full_response(self, outputs: Sequence[RequestOutput]) -> Json:
        if not outputs:
            return self.line(self.part(""), done_reason="load")
        completion = outputs[0].outputs[0]
        message = self.new_message()
        message.push(completion.text)
        message.flush()
        part = self.part(message.content or "", message.reasoning or "", message.calls)
        num_tokens = count_tokens(outputs).completion
        return self.line(part, completion.logprobs, **self.end(outputs[0], num_tokens))

    def end(self, output: RequestOutput, num_tokens: int) -> Json:
        reason = output.outputs[0].finish_reason
        times = timings([output]) or {}
        queue_ms, prefill_ms, decode_ms = (
            times.get(name, 0.0) for name in ("queue_ms", "prefill_ms", "decode_ms")
        )
        return {
            "done_reason": "length" if reason == "length" else "stop",
            "total_duration": int((queue_ms + prefill_ms + decode_ms) * NS_PER_MS),
            "load_duration": 0,
            "prompt_eval_count": len(output.prompt_token_ids),
            "prompt_eval_duration": int(prefill_ms * NS_PER_MS),
            "eval_count": num_tokens,
            "eval_duration": int(decode_ms * NS_PER_MS),
        }


class OllamaChat(OllamaGeneration[OllamaChatRequest]):
    request_type = OllamaChatRequest

    @property
    def is_empty(self) -> bool:
        return not self.request.messages

    def prepare(self) -> list[EngineRequest]:
        if not self.request.messages:
            return []
        self.chat.messages = chat_messages(self.request.messages)
        self.chat.tools = self.request.tools
        return super().prepare()

    def part(self, content: str, thinking: str = "", calls: Sequence[ToolCall] = ()) -> Json:
        message: Json = {"role": "assistant", "content": content}
        if thinking:
            message["thinking"] = thinking
        if calls:
            message["tool_calls"] = [_call(call) for call in calls]
        return {"message": message}


def _call(call: ToolCall) -> Json:
    function = {"name": call.name, "arguments": parsed_arguments(call.arguments)}
    return {"id": call.id, "function": function}


class OllamaGenerate(OllamaGeneration[OllamaGenerateRequest]):
    request_type = OllamaGenerateRequest

    def __init__(self, service: Service, request: OllamaGenerateRequest) -> None:
        super().__init__(service, request)
        refuse_images(request.images, "images")

    @property
    def is_empty(self) -> bool:
        return not (self.request.prompt or self.request.suffix)

    def prepare(self) -> list[EngineRequest]:
        service, request = self.service, self.request
        if self.is_empty:
            return []
        prompt = request.prompt or ""
        if not request.raw and not request.suffix:
            if request.system:
                self.chat.messages.append({"role": "system", "content": request.system})
            self.chat.messages.append({"role": "user", "content": prompt})
            return super().prepare()
        params = chat_params(self.chat, service.client.info, service.settings)
        full_prompt: str | list[int] = prompt
        if request.suffix:
            full_prompt = infill_prompt(service.prompts, service.tokenizer, prompt, request.suffix)
        return [service.prompts.prepare(full_prompt, params, self.chat)]

    def part(self, content: str, thinking: str = "", calls: Sequence[ToolCall] = ()) -> Json:
        return {"response": content, **({"thinking": thinking} if thinking else {})}


class OllamaStreamWriter:
    """Writes a line of JSON for each part of the text. A tool call is written when complete."""

    def __init__(self, generation: OllamaGeneration[Any]) -> None:
        self._generation = generation
        self._message = generation.new_message()
        self._num_calls = 0  # calls that were written
        self._in_call = False  # True while the last call is incomplete
        self._num_tokens = 0
        self._last: RequestOutput | None = None

    def write(self, _: int, output: RequestOutput) -> bytes:
        return b"".join([self._write_choice(output, completion) for completion in output.outputs])

    def _write_choice(self, output: RequestOutput, completion: CompletionOutput) -> bytes:
        self._num_tokens += len(completion.token_ids)
        deltas = self._message.push(completion.text)
        if completion.finish_reason is not None:
            self._last = output
            deltas += self._message.flush()
        content = "".join([delta.text for delta in deltas if isinstance(delta, ContentDelta)])
        thinking = "".join([delta.text for delta in deltas if isinstance(delta, ReasoningDelta)])
        calls = self._complete_calls(deltas, completion.finish_reason is not None)
        if not (content or thinking or calls or completion.logprobs):
            return b""
        part = self._generation.part(content, thinking, calls)
        return self._encoded(self._generation.line(part, completion.logprobs))

    def _complete_calls(self, deltas: Sequence[Delta], ended: bool) -> list[ToolCall]:
        if deltas:
            self._in_call = isinstance(deltas[-1], ToolCallDelta)
        calls = self._message.calls
        complete = len(calls) - (self._in_call and not ended)
        new, self._num_calls = calls[self._num_calls : complete], max(self._num_calls, complete)
        return new

    def end(self) -> bytes:
        generation, last = self._generation, self._last
        assert last is not None
        end = generation.end(last, self._num_tokens)
        return self._encoded(generation.line(generation.part(""), **end))

    def fail(self, error: ApiError) -> bytes:
        return self._encoded(OllamaError.from_error(error))

    def _encoded(self, line: Any) -> bytes:
        return encode_json(line) + b"\n"
