"""`PromptProcessor`: makes an `EngineRequest` from the prompt of a request. The work runs in
threads, so that it does not delay streams:

    text (2 threads): render the model's template (in a process), tokenise, validate
    large (1 thread): the same for large bodies, one at a time to limit memory
    own templates (1 thread): the same for requests with a chat template of their own
    grammars (2 threads): compile a new grammar (in a process)

Each kind of work has its own queue. If a queue is full, the request is refused with 429. Work for a
request whose client has disconnected is not started.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import queue
import threading
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from hashlib import blake2b
from itertools import islice, takewhile
from time import monotonic
from typing import Any, Final, TypeVar

import msgspec

from twostroke.engine.grammar_check import WORKERS as GRAMMAR_WORKERS
from twostroke.engine.input_processor import CHARS_PER_TOKEN, InputProcessor
from twostroke.engine.rendering import TemplateRenderer
from twostroke.model.text.tokenizer import Tokenizer
from twostroke.request import EngineRequest, SamplingParams
from twostroke.sandbox import Limits
from twostroke.serve.error_responses import ApiError, retry_after
from twostroke.serve.fields.protocol import GenerateRequest, TemplatedRequest
from twostroke.serve.settings import ServeSettings

# Arguments of `ChatTemplate.render`, which chat_template_kwargs must not set.
RESERVED = ("self", "messages", "add_generation_prompt", "tools", "continue_final_message")
TEXT_THREADS: Final = 2
MAX_GRAMMARS_WAITING: Final = 16  # requests with a new grammar
MAX_BAD_WORD_TOKENS: Final = 16_384  # of one request
MAX_TEMPLATES_WAITING: Final = 8  # requests with a chat template of their own
RENDERING: Final = Limits(cpu_s=1.0, wall_s=10.0, memory_bytes=64 * 1024**2, nice=10)
OWN_TEMPLATE_RENDERING: Final = Limits(cpu_s=0.5, wall_s=5.0, memory_bytes=32 * 1024**2, nice=10)
T = TypeVar("T")


@dataclass(slots=True)
class Job:
    work: Callable[[], Any] | None  # None: the request has ended
    loop: asyncio.AbstractEventLoop
    result: asyncio.Future[Any]


class PromptProcessor:
    """Makes `EngineRequest` objects from prompts, off the event loop."""

    def __init__(self, input_processor: InputProcessor, settings: ServeSettings) -> None:
        self._input = input_processor
        self._settings = settings
        longest = input_processor.limits.max_model_len - 1
        self.max_tokens = min(settings.max_prompt_tokens or longest, longest)
        self._large_bytes = CHARS_PER_TOKEN * self.max_tokens
        self._max_chars = input_processor.max_chars(self.max_tokens)
        self._text = ThreadPool("requests", TEXT_THREADS, settings.max_queue)
        self._large = ThreadPool("large requests", 1, settings.max_queue)
        name = "requests with a chat template of their own"
        self._own_templates = ThreadPool(name, 1, MAX_TEMPLATES_WAITING)
        name = "requests with new grammars"
        self._grammars = ThreadPool(name, GRAMMAR_WORKERS, MAX_GRAMMARS_WAITING)
        self._renderer = TemplateRenderer(TEXT_THREADS + 1, RENDERING)
        self._own_template_renderer = TemplateRenderer(1, OWN_TEMPLATE_RENDERING)
        if input_processor.tokenizer is not None and input_processor.chat_template is not None:
            self._renderer.start()

    def close(self) -> None:
        for pool in (self._text, self._large, self._own_templates, self._grammars):
            pool.close()
        self._renderer.close()
        self._own_template_renderer.close()
        self._input.close()

    # ── in a thread ─────────────────────────────────────────────────────────────────────────

    async def off_loop(self, request: Any, num_bytes: int, work: Callable[[], T]) -> T:
        """Run `work` in a thread and return its result. `num_bytes`: the size of the request's
        body."""
        if getattr(request, "chat_template", None) is not None:
            return await self._own_templates.run(work)
        return await (self._large if num_bytes > self._large_bytes else self._text).run(work)

    async def prepare_off_loop(
        self, request: GenerateRequest, num_bytes: int, work: Callable[[], list[EngineRequest]]
    ) -> list[EngineRequest]:
        """Run `work` in a thread, check the grammar of its requests, and return the requests. They
        count as received now, so that their queue time includes template and tokenizer."""
        received_s, session = monotonic(), _session(request)

        def prepare() -> tuple[list[EngineRequest], Callable[[], None] | None]:
            requests = [replace(each, received_s=received_s, session=session) for each in work()]
            grammar = requests[0].params.structured_outputs if requests else None
            if grammar is None or self._input.grammars.known(grammar):
                return requests, None
            return requests, partial(self._input.grammars.check, grammar)

        requests, check = await self.off_loop(request, num_bytes, prepare)
        if check is not None:
            await self._grammars.run(check)
        return requests

    # ── the work ────────────────────────────────────────────────────────────────────────────

    def prepare(
        self, prompt: str | Sequence[int], params: SamplingParams, request: GenerateRequest
    ) -> EngineRequest:
        if request.truncate_prompt_tokens is not None:
            prompt = self._truncated(prompt, request)
        fields = {
            "prompt" if isinstance(prompt, str) else "prompt_token_ids": prompt,
            "cache_salt": request.cache_salt,
        }
        engine_request = self._input.process(
            fields,
            params,
            request.priority or 0,
            bool(request.return_progress and request.stream),
            gap_causes=bool(request.return_token_gaps) and params.n == 1,
            check_params=False,  # `params` was made for this request
            check_grammar=False,
            max_prompt_tokens=self.max_tokens,
        )
        if sum(map(len, engine_request.bad_words_ids)) > MAX_BAD_WORD_TOKENS:
            raise ApiError(
                400,
                f"bad_words have more than {MAX_BAD_WORD_TOKENS} tokens together (each word is "
                "banned with and without a space before it); give fewer or shorter words",
                param="bad_words",
            )
        return engine_request

    def encode_prediction(self, text: str) -> tuple[int, ...]:
        """Return the tokens of a predicted output, at most as many as an answer may have."""
        tokens = self.tokenizer.encode(text[: self._max_chars], add_special_tokens=False)
        known = takewhile(lambda token: token < self._input.limits.vocab_size, tokens)
        return tuple(islice(known, self.max_tokens))

    def _truncated(self, prompt: str | Sequence[int], request: GenerateRequest) -> Sequence[int]:
        """Cut the prompt to `truncate_prompt_tokens` tokens, at the side `truncation_side`."""
        count, from_left = request.truncate_prompt_tokens or 0, request.truncation_side != "right"
        if count > self.max_tokens:
            raise ApiError(
                400,
                f"truncate_prompt_tokens is {count}, and at most {self.max_tokens} tokens are read",
                param="truncate_prompt_tokens",
            )
        count = self.max_tokens if count < 0 else count
        if isinstance(prompt, str):
            limit = self._max_chars  # do not tokenise text that will be cut off
            prompt = self.tokenizer.encode(prompt[-limit:] if from_left else prompt[:limit])
        return prompt[max(0, len(prompt) - count) :] if from_left else prompt[:count]

    def encode(self, text: str, add_special_tokens: bool) -> list[int]:
        tokenizer = self.tokenizer
        self._input.check_length(text, self.max_tokens)
        return tokenizer.encode(text, add_special_tokens)

    def encode_parts(self, parts: Iterable[int | str], add_special_tokens: bool) -> list[int]:
        """Encode token ids and texts as one prompt. Refuse a prompt as soon as it is too long."""
        ids: list[int] = []
        for n, part in enumerate(parts):
            if isinstance(part, int):
                ids.append(part)
            elif part or n == 0:
                ids += self.encode(part, add_special_tokens and n == 0)
            self._input.check_length(ids, self.max_tokens)
        return ids

    def render(
        self, messages: list[dict[str, Any]], request: TemplatedRequest, **variables: Any
    ) -> list[int]:
        """Render a conversation with the template of the model or of the request; return token
        ids."""
        of_request = request.chat_template is not None
        self._check_template(of_request)
        generate = request.add_generation_prompt
        continued = bool(request.continue_final_message)
        if continued and generate:
            raise ApiError(
                400,
                "continue_final_message and add_generation_prompt exclude each other",
                param="continue_final_message",
            )
        truncated = getattr(request, "truncate_prompt_tokens", None) is not None
        tools = None
        unwanted = getattr(request, "tool_choice", None) == "none"
        if request.tools and not (unwanted and self._settings.exclude_tools_when_tool_choice_none):
            tools = [_without_none(msgspec.to_builtins(tool)) for tool in request.tools]
        if request.documents is not None:
            variables["documents"] = request.documents
        variables = {
            **self._settings.chat_template_kwargs,
            **variables,
            **(request.chat_template_kwargs or {}),
        }
        if reserved := [name for name in RESERVED if name in variables]:
            raise ApiError(
                400,
                f"chat_template_kwargs cannot set {' and '.join(reserved)}; remove these names",
                param="chat_template_kwargs",
            )
        run = partial(
            self._input.run_template,
            self._own_template_renderer if of_request else self._renderer,
            self._input.template(
                request.chat_template, self._settings.chat_template_content_format
            ),
            self.max_tokens,
        )
        return self._input.render_chat(
            messages,
            not continued and generate is not False,
            tools,
            variables=variables,
            continue_final_message=continued,
            add_special_tokens=bool(request.add_special_tokens),
            run=run,
            max_prompt_tokens=None if truncated else self.max_tokens,
        )

    def _check_template(self, of_request: bool) -> None:
        """Refuse a template of the request unless the server allows it, and a model without one."""
        if of_request and not self._settings.trust_request_chat_template:
            raise ApiError(
                400,
                "chat_template: this server accepts no templates in requests; start it with "
                "--trust-request-chat-template to allow them",
                param="chat_template",
            )
        if not of_request and self._input.chat_template is None:
            raise ApiError(
                400,
                "the model has no chat template; use /v1/completions",
                code="no_chat_template",
            )

    @property
    def tokenizer(self) -> Tokenizer:
        tokenizer = self._input.tokenizer
        if tokenizer is None:
            raise ApiError(400, "no tokenizer is loaded; send token ids to /v1/completions")
        return tokenizer


def _without_none(value: Any) -> Any:
    """Remove fields that are None: templates test whether a field is defined."""
    if isinstance(value, dict):
        return {key: _without_none(one) for key, one in value.items() if one is not None}
    return value


def split_prompts(prompt: str | list[Any]) -> list[str | list[int]]:
    """Return the prompts of a completion request: a text, token ids, or a list of either."""
    if isinstance(prompt, str):
        return [prompt]
    if not prompt:
        raise ApiError(400, "the prompt is empty; give at least one token", param="prompt")
    kinds = {type(each) for each in prompt}
    if int in kinds and len(kinds) > 1:
        raise ApiError(400, "prompt: give texts, token ids or lists of them, not a mixture")
    return [prompt] if kinds == {int} else list(prompt)


class ThreadPool:
    """Daemon threads for one kind of work, with a bounded queue. A thread that hangs does not block
    the end of the server."""

    def __init__(self, name: str, threads: int, max_waiting: int) -> None:
        """`name`: the name of the work in error messages."""
        self._name = name
        self._num_threads = threads
        self._max_waiting = max_waiting
        self._jobs: queue.SimpleQueue[Job | None] = queue.SimpleQueue()
        self._num_open = 0
        self._started = False

    async def run(self, work: Callable[[], T]) -> T:
        """Run `work` in a thread and return its result. Raise 429 if the queue is full."""
        if self._num_open >= self._num_threads + self._max_waiting:
            raise ApiError(
                429,
                f"{self._max_waiting} {self._name} are waiting, and no more may; try again in a "
                "moment",
                code="queue_full",
                headers=retry_after(1),
            )
        if not self._started:
            self._started = True
            for n in range(self._num_threads):
                name = f"{self._name} {n}"
                threading.Thread(target=self._work, name=name, daemon=True).start()
        loop = asyncio.get_running_loop()
        result: asyncio.Future[T] = loop.create_future()
        job = Job(work, loop, result)
        self._num_open += 1
        self._jobs.put(job)
        try:
            return await result
        finally:
            self._num_open -= 1
            job.work = None  # an abandoned job must not keep its request

    def close(self) -> None:
        """End the threads after their current work."""
        for _ in range(self._num_threads):
            self._jobs.put(None)

    def _work(self) -> None:
        while (job := self._jobs.get()) is not None:
            work, loop, result = job.work, job.loop, job.result
            if work is None:
                continue
            value, error = None, None
            try:
                value = work()
            except BaseException as raised:
                error = raised
            with contextlib.suppress(RuntimeError):  # the event loop has ended
                loop.call_soon_threadsafe(_resolve, result, value, error)
            del job, work, loop, result, value, error  # free them while waiting for the next job


def _resolve(result: asyncio.Future[T], value: T, error: BaseException | None) -> None:
    if result.cancelled():
        return
    if error is not None:
        result.set_exception(error)
    else:
        result.set_result(value)


def _session(request: GenerateRequest) -> str:
    """Return a name of the conversation. It depends on the cache salt, so tenants share no name."""
    if not request.prompt_cache_key:
        return ""
    text = json.dumps([request.cache_salt, request.prompt_cache_key])
    return blake2b(text.encode(), digest_size=8).hexdigest()
