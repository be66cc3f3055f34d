"""llama-server's own routes: `/completion`, `/infill`, `/apply-template`, `/props`, `/slots`."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Iterator, Sequence
from dataclasses import replace
from functools import partial
from typing import Any, TypeVar
from uuid import uuid4

from twostroke import __version__
from twostroke.outputs import CompletionOutput, Logprobs, RequestOutput
from twostroke.request import EngineRequest, SamplingParams
from twostroke.serve.api.llama_server.llama_server_request import (
    ApplyTemplateRequest,
    InfillRequest,
    LlamaCompletionRequest,
    LlamaRequest,
    as_completion,
)
from twostroke.serve.api.openai.chat_completions import ChatGeneration
from twostroke.serve.error_responses import ApiError
from twostroke.serve.fields.foreign_fields import LLAMA_OFF
from twostroke.serve.fields.protocol import ChatRequest
from twostroke.serve.fields.response_json import (
    MIN_LOGPROB,
    Json,
    LazyList,
    ResponseHead,
    error_event,
    event,
    progress,
    timings,
)
from twostroke.serve.generation.generate import GenerateRoute, Generation
from twostroke.serve.generation.infill import infill_prompt
from twostroke.serve.generation.params import completion_params
from twostroke.serve.generation.prompts import split_prompts
from twostroke.serve.generation.service import Service
from twostroke.serve.http.http_request import HttpRequest
from twostroke.serve.http.routing import Route

R = TypeVar("R", bound=LlamaRequest)


def llama_server_routes(service: Service) -> list[Route]:
    complete = GenerateRoute(service, LlamaCompletion)
    infill = GenerateRoute(service, Infill)
    summary = "Continue a text (llama-server)."
    return [
        Route("POST", "/completion", complete, summary, LlamaCompletionRequest),
        Route("POST", "/completions", complete, "The same as /completion.", LlamaCompletionRequest),
        Route("POST", "/infill", infill, "Fill in the middle (llama-server).", InfillRequest),
        Route(
            "POST",
            "/apply-template",
            partial(_apply_template, service),
            "Return the prompt of a conversation (llama-server).",
            ApplyTemplateRequest,
        ),
        Route("GET", "/props", partial(_props, service), "Settings (llama-server)."),
        Route("GET", "/slots", partial(_slots, service), "Busy and idle slots (llama-server)."),
    ]


# ── information ────────────────────────────────────────────────────────────────────────────────


async def _apply_template(service: Service, http: HttpRequest) -> None:
    def render(chat: ChatRequest) -> str:
        ids = ChatGeneration(service, chat).render()
        assert service.tokenizer is not None  # `render` needs one
        return service.tokenizer.decode(ids, skip_special_tokens=False)

    async with service.read(http, ApplyTemplateRequest) as (request, num_bytes):
        service.check_model(request.model)
        text = await service.prompts.off_loop(request, num_bytes, partial(render, request))
    await http.respond_json({"prompt": text})


async def _props(service: Service, http: HttpRequest) -> None:
    info, tokenizer = service.client.info, service.tokenizer
    settings = generation_settings(info.sampling, LlamaRequest())
    answer = {
        "default_generation_settings": {"params": settings, "n_ctx": info.max_model_len},
        "total_slots": info.max_num_seqs,
        "model_alias": service.models[0],
        "model_path": service.models[0],
        "model_ftype": info.dtype,
        "modalities": {"vision": False, "video": False, "audio": False},
        "endpoint_slots": True,
        "endpoint_props": False,
        "endpoint_metrics": True,
        "chat_template": service.client.input_processor.chat_template or "",
        "bos_token": "" if tokenizer is None else tokenizer.bos_token,
        "eos_token": "" if tokenizer is None else tokenizer.eos_token,
        "build_info": f"twostroke {__version__}",
        "is_sleeping": False,
    }
    await http.respond_json(answer)


async def _slots(service: Service, http: HttpRequest) -> None:
    """Send one slot for each sequence that can run. The number of busy slots is the number of
    running sequences that this client may see."""
    info, running = service.client.info, service.num_running(http)
    slot = {"n_ctx": info.max_model_len, "speculative": info.speculative}
    slots = [{"id": n, **slot, "is_processing": n < running} for n in range(info.max_num_seqs)]
    await http.respond_json(slots)


def generation_settings(params: SamplingParams, request: LlamaRequest) -> Json:
    """Return the sampling parameters with llama.cpp's names. Unsupported samplers are off."""
    n_predict = -1 if request.n_predict is None else request.n_predict
    off = {name: values[0] for name, values in LLAMA_OFF.items()}
    return {
        **off,
        "seed": -1 if params.seed is None else params.seed,
        "temperature": params.temperature,
        "top_k": params.top_k,
        "top_p": params.top_p,
        "min_p": params.min_p,
        "repeat_last_n": -1,
        "repeat_penalty": params.repetition_penalty,
        "presence_penalty": params.presence_penalty,
        "frequency_penalty": params.frequency_penalty,
        "stop": params.stop or [],
        "max_tokens": n_predict,
        "n_predict": n_predict,
        "n_keep": 0,
        "ignore_eos": params.ignore_eos,
        "stream": bool(request.stream),
        "n_probs": request.n_probs or 0,
    }


# ── answers ─────────────────────────────────────────────────────────────────────────────────────


class LlamaGeneration(Generation[R]):
    """The base of both routes. With several prompts, or `n_cmpl`, the answer is a list."""

    id_prefix = "cmpl"

    def __init__(self, service: Service, request: R) -> None:
        super().__init__(service, request)
        self.fields = self.completion = as_completion(request, service.client.info.max_model_len)
        if request.cache_prompt is False:
            self.fields.cache_salt = uuid4().hex  # a unique salt: no cached prefix is found
        self.only_prompt = request.n_predict == 0
        self.n = request.n_cmpl or 1
        self.num_choices = self.n

    @abstractmethod
    def prompts(self) -> Sequence[str | list[int]]:
        """Return the prompts. Called off the event loop."""

    def prepare(self) -> list[EngineRequest]:
        service = self.service
        params = completion_params(self.completion, service.client.info, service.settings)
        requests = [
            service.prompts.prepare(prompt, params, self.completion) for prompt in self.prompts()
        ]
        return [self._with_text(request) for request in requests]

    def _with_text(self, request: EngineRequest) -> EngineRequest:
        """Add the text of the prompt, which the answer repeats."""
        if request.prompt is not None or (tokenizer := self.service.tokenizer) is None:
            return request
        ids = request.prompt_token_ids
        return replace(request, prompt=tokenizer.decode(ids, skip_special_tokens=False))

    def begin(self, head: ResponseHead, requests: Sequence[EngineRequest]) -> None:
        super().begin(head, requests)
        self._params = requests[0].params

    def stream_writer(self) -> LlamaStreamWriter:
        return LlamaStreamWriter(self)

    def full_response(self, outputs: Sequence[RequestOutput]) -> Json | list[Json]:
        results = []
        for number, output in enumerate(outputs):
            for choice in output.outputs:
                text = "" if self.only_prompt else choice.text
                ids = choice.token_ids if self.request.return_tokens else []
                result = self.result(number, output, choice, len(choice.token_ids), "\n" in text)
                result |= {"content": text, "tokens": ids, **self.probabilities(choice.logprobs)}
                results.append(self.selected(result))
        return results if len(results) > 1 else results[0]

    def index(self, number: int, completion: CompletionOutput) -> int:
        return number * self.n + completion.index

    def result(
        self,
        number: int,
        output: RequestOutput,
        completion: CompletionOutput,
        num_tokens: int,
        has_new_line: bool,
    ) -> Json:
        """Return the answer without its text. `num_tokens`: the length of the whole text."""
        num_tokens = 0 if self.only_prompt else num_tokens
        num_prompt = len(output.prompt_token_ids)
        reason, stop = completion.finish_reason, completion.stop_reason
        word = stop if isinstance(stop, str) else ""
        limit = self._params.max_tokens
        full = reason == "length" and limit is not None and num_tokens < limit
        return {
            "index": self.index(number, completion),
            "content": "",
            "tokens": [],
            "id_slot": -1,
            "stop": True,
            "model": self.head.model,
            "tokens_predicted": num_tokens,
            "tokens_evaluated": num_prompt,
            "generation_settings": generation_settings(self._params, self.request),
            "prompt": output.prompt or "",
            "has_new_line": has_new_line,
            "truncated": full and not self.only_prompt,
            "stop_type": "limit" if reason == "length" else "word" if word else "eos",
            "stopping_word": word,
            "tokens_cached": num_prompt + max(num_tokens - 1, 0),
            "timings": timings([output]),
        }

    def probabilities(self, entries: Logprobs | None) -> Json:
        if entries is None:
            return {}
        return {"completion_probabilities": LazyList(self._probabilities(entries))}

    def _probabilities(self, entries: Logprobs) -> Iterator[Json]:
        names, tokenizer = self.service.token_names, self.service.tokenizer

        def shown(token: int, value: float) -> Json:
            raw = b"" if tokenizer is None else tokenizer.token_bytes(token)
            about = {"id": token, "token": names.text(token), "bytes": list(raw)}
            return {**about, "logprob": max(value, MIN_LOGPROB)}

        for entry in entries.plain():
            assert entry is not None
            sampled, *top = map(shown, entry.token_ids, entry.logprobs)
            yield {**sampled, "top_logprobs": top[: self.completion.logprobs]}

    def selected(self, result: Json) -> Json:
        """Return only the fields in `response_fields`, if given. "a/b" is the field b of a."""
        names = self.request.response_fields
        if not names:
            return result
        found: Json = {}
        for name in names:
            value: Any = result
            for word in name.split("/"):
                value = value.get(word) if isinstance(value, dict) else None
            if value is not None:
                found[name] = value
        return found


class LlamaCompletion(LlamaGeneration[LlamaCompletionRequest]):
    request_type = LlamaCompletionRequest

    def __init__(self, service: Service, request: LlamaCompletionRequest) -> None:
        super().__init__(service, request)
        prompt, self._mixed = request.prompt, False
        if isinstance(prompt, list) and {int, str} == set(map(type, prompt)):
            self._mixed = True
        else:
            self._prompts = split_prompts(prompt)
            self.num_choices = len(self._prompts) * self.n

    def prompts(self) -> Sequence[str | list[int]]:
        if self._mixed:
            return [self.service.prompts.encode_parts(self.request.prompt, True)]  # type: ignore[arg-type]
        prompts, self._prompts = self._prompts, []
        return prompts


class Infill(LlamaGeneration[InfillRequest]):
    request_type = InfillRequest

    def prompts(self) -> Sequence[str | list[int]]:
        request, service = self.request, self.service
        files = [(file.filename, file.text) for file in request.input_extra or ()]
        parts = request.input_prefix, request.input_suffix, request.prompt or ""
        return [infill_prompt(service.prompts, service.tokenizer, *parts, tuple(files))]


class LlamaStreamWriter:
    """Writes an event for each part of a text, and a last event with the other fields."""

    def __init__(self, generation: LlamaGeneration[Any]) -> None:
        self._generation = generation
        self._num_tokens: dict[int, int] = {}
        self._has_new_line: set[int] = set()

    def write(self, prompt_index: int, output: RequestOutput) -> bytes:
        if not output.outputs and output.num_prefilled and self._generation.fields.return_progress:
            first = self._chunk(prompt_index * self._generation.n, output, 0)
            return event({**first, "prompt_progress": progress(output)})
        return b"".join([self._choice(prompt_index, output, choice) for choice in output.outputs])

    def _chunk(self, index: int, output: RequestOutput, num_tokens: int) -> Json:
        return {
            "index": index,
            "content": "",
            "tokens": [],
            "stop": False,
            "id_slot": -1,
            "tokens_predicted": num_tokens,
            "tokens_evaluated": len(output.prompt_token_ids),
        }

    def _choice(self, number: int, output: RequestOutput, completion: CompletionOutput) -> bytes:
        generation = self._generation
        index = generation.index(number, completion)
        num_tokens = self._num_tokens.get(index, 0) + len(completion.token_ids)
        self._num_tokens[index] = num_tokens
        if "\n" in completion.text:
            self._has_new_line.add(index)
        events = b""
        if not generation.only_prompt and (completion.text or completion.token_ids):
            chunk = self._chunk(index, output, num_tokens)
            chunk |= {"content": completion.text, "tokens": completion.token_ids}
            events = event({**chunk, **generation.probabilities(completion.logprobs)})
        if completion.finish_reason is not None:
            new_line = index in self._has_new_line
            result = generation.result(number, output, completion, num_tokens, new_line)
            events += event(generation.selected(result))
        return events

    def end(self) -> bytes:
        return b""

    def fail(self, error: ApiError) -> bytes:
        return error_event(error)
