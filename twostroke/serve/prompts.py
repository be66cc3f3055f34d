"""A request's prompt → `Prepared`. All of it happens off the event loop, so that streams go on.

    text (2 threads): render the model's template (in a process), tokenise, validate
    long (1 thread): the same for large bodies, which take memory, one after the other
    foreign (1 thread): the same with a template that the request brings
    grammars (2 threads): compile a grammar that is not known yet (in a process)

A kind of work waits for its own kind only, and what would wait too long is refused with 429.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from functools import cached_property, partial
from typing import Any, Final, TypeVar

import msgspec

from twostroke.engine.grammar_check import WORKERS as GRAMMAR_WORKERS
from twostroke.engine.intake import Intake, Prepared
from twostroke.errors import RequestError
from twostroke.limited import LimitedPool, Limits, OverLimit
from twostroke.model.chat_template import check_messages, template_name
from twostroke.request import SamplingParams
from twostroke.serve.errors import ApiError
from twostroke.serve.pools import Pool
from twostroke.serve.protocol import Generating, Templated
from twostroke.serve.settings import ServeSettings

# What `ChatTemplate.render` is called with: no request may give these names to its variables.
TAKEN = ("self", "messages", "add_generation_prompt", "tools")
TEXT_THREADS: Final = 2
MAX_GRAMMARS_WAITING: Final = 16  # requests with a grammar that is not known yet
MAX_FOREIGN_WAITING: Final = 8  # requests with a chat template of their own
RENDERING: Final = Limits(cpu_s=1.0, wall_s=10.0, memory_bytes=64 * 1024**2, nice=10)
FOREIGN_RENDERING: Final = Limits(cpu_s=0.5, wall_s=5.0, memory_bytes=32 * 1024**2, nice=10)
CHARS_PER_TOKEN: Final = 8  # a text with more of them is unusual
MAX_CHARS_PER_TOKEN: Final = 32  # no text is read that has more of them for each token it may have
MIN_CHARS: Final = 64 * 1024
PIECE_CHARS: Final = 16 * 1024
T = TypeVar("T")


class Prompts:
    def __init__(self, intake: Intake, settings: ServeSettings) -> None:
        self._intake = intake
        self._settings = settings
        limits = intake.limits
        self.max_tokens = min(settings.max_prompt_tokens or 2**62, limits.max_model_len - 1)
        self._long_bytes = CHARS_PER_TOKEN * self.max_tokens
        self.max_chars = max(MIN_CHARS, MAX_CHARS_PER_TOKEN * self.max_tokens)
        self._text = Pool("requests", TEXT_THREADS, settings.max_queue)
        self._long = Pool("large requests", 1, settings.max_queue)
        self._foreign = Pool("requests with a chat template of their own", 1, MAX_FOREIGN_WAITING)
        self._grammars = Pool("requests with new grammars", GRAMMAR_WORKERS, MAX_GRAMMARS_WAITING)
        if intake.tokenizer is not None and self.template_source is not None:
            self._renderer.start()

    def close(self) -> None:
        for pool in (self._text, self._long, self._foreign, self._grammars):
            pool.close()
        for name in ("_renderer", "_foreign_renderer"):
            if name in self.__dict__:
                getattr(self, name).close()
        self._intake.close()

    # ── where the work is done ──────────────────────────────────────────────────────────────

    async def off_loop(self, request: Any, num_bytes: int, work: Callable[[], T]) -> T:
        if getattr(request, "chat_template", None) is not None:
            return await self._foreign.run(work)
        return await (self._long if num_bytes > self._long_bytes else self._text).run(work)

    async def prepared(
        self, request: Generating, num_bytes: int, work: Callable[[], list[Prepared]]
    ) -> list[Prepared]:
        """What `work` prepares, with its grammar checked. `num_bytes`: of the request's body."""

        def prepare() -> tuple[list[Prepared], Callable[[], None] | None]:
            prepared = work()
            asked = prepared[0].params.structured_outputs
            if asked is None or self._intake.grammars.known(asked):
                return prepared, None
            return prepared, partial(self._intake.grammars.check, asked)

        prepared, check = await self.off_loop(request, num_bytes, prepare)
        if check is not None:
            await self._grammars.run(check)
        return prepared

    # ── what may be asked ───────────────────────────────────────────────────────────────────

    def prepare(
        self, prompt: str | Sequence[int], params: SamplingParams, request: Generating
    ) -> Prepared:
        self.refuse_long(prompt)
        given = {
            "prompt" if isinstance(prompt, str) else "prompt_token_ids": prompt,
            "cache_salt": request.cache_salt,
        }
        progress = bool(request.return_progress and request.stream)
        prepared = self._intake.prepare(
            given, params, request.priority or 0, progress, check_grammar=False
        )
        self.refuse_long(prepared.ids)
        return prepared

    def encode(self, text: str, add_special_tokens: bool) -> list[int]:
        self.refuse_long(text)
        return self._tokenizer.encode(text, add_special_tokens)

    def refuse_long(self, prompt: str | Sequence[int]) -> None:
        """Before a long text is tokenised as a whole, which takes 100 bytes of memory a character
        and 260 a token."""
        least = len(prompt)
        if isinstance(prompt, str):
            if len(prompt) > self.max_chars:
                raise self._too_long(f"{len(prompt)} characters")
            least = 0
            if len(prompt) > CHARS_PER_TOKEN * self.max_tokens:
                least = self._least_tokens(prompt)
        if least > self.max_tokens:
            raise self._too_long(f"{'at least ' if isinstance(prompt, str) else ''}{least} tokens")

    def _least_tokens(self, text: str) -> int:
        """Counted in pieces until they are too many. Where a text is cut changes a few of its
        tokens, not half of them."""
        count = 0
        for start in range(0, len(text), PIECE_CHARS):
            count += len(self._tokenizer.encode(text[start : start + PIECE_CHARS], False))
            if count > 2 * self.max_tokens:
                break
        return count // 2

    def _too_long(self, size: str) -> ApiError:
        return ApiError(
            400,
            f"the prompt has {size}, and at most {self.max_tokens} tokens are read "
            f"(max_model_len is {self._intake.limits.max_model_len}); shorten it",
            param="prompt",
            code="context_length_exceeded",
        )

    # ── conversations ───────────────────────────────────────────────────────────────────────

    def render(
        self, messages: list[dict[str, Any]], request: Templated, **variables: Any
    ) -> list[int]:
        """A conversation → token ids, by the model's template or by one the request brings."""
        renderer = self._renderer_for(request.chat_template)
        generate = request.add_generation_prompt
        continued = bool(request.continue_final_message)
        if continued and generate:
            raise ApiError(
                400,
                "continue_final_message and add_generation_prompt exclude each other",
                param="continue_final_message",
            )
        tools = None
        if request.tools:
            tools = [_without_none(msgspec.to_builtins(tool)) for tool in request.tools]
        if request.documents is not None:
            variables["documents"] = request.documents
        variables = {
            **self._settings.chat_template_kwargs,
            **variables,
            **(request.chat_template_kwargs or {}),
        }
        if taken := [name for name in TAKEN if name in variables]:
            raise ApiError(
                400,
                f"chat_template_kwargs: {' and '.join(taken)} cannot be set there; other names can",
                param="chat_template_kwargs",
            )
        add_prompt = not continued and generate is not False
        given = (request.chat_template, messages, add_prompt, tools, variables, self.max_chars)
        text = self._rendered(renderer, given)
        if continued:
            text = _cut_after(text, check_messages(messages)[-1]["content"])
        return self.encode(text, bool(request.add_special_tokens))

    def _rendered(self, renderer: LimitedPool, given: tuple[Any, ...]) -> str:
        if len(given[1]) > self.max_tokens:  # none is shorter than a token
            raise self._too_long(f"{len(given[1])} messages")
        try:
            payload = msgspec.json.encode(given)
        except UnicodeEncodeError:  # half a surrogate pair, which the tokenizer will name
            payload = json.dumps(given).encode()
        if len(payload) > 2 * self.max_chars + 1024**2:
            raise self._too_long(f"{len(payload)} bytes with its messages and tools")
        of_request = given[0] is not None
        name, param = template_name(of_request), "chat_template" if of_request else None
        try:
            num_chars, text = json.loads(renderer.ask(payload))
        except OverLimit as error:
            message = f"{name} cannot be rendered for these messages: {error}"
            raise ApiError(400, message, param=param) from None
        except RequestError as error:
            if of_request and str(error).startswith(name):
                raise ApiError(400, str(error), param=param) from None
            raise
        if text is None:
            raise self._too_long(f"{num_chars} characters")
        return str(text)

    def _renderer_for(self, own: str | None) -> LimitedPool:
        if own is None:
            if self.template_source is None:
                raise ApiError(
                    400,
                    "the model has no chat template; use /v1/completions",
                    code="no_chat_template",
                )
            return self._renderer
        if not self._settings.trust_request_chat_template:
            raise ApiError(
                400,
                "chat_template: this server uses the model's own; start it with "
                "trust_request_chat_template to allow others",
                param="chat_template",
            )
        return self._foreign_renderer

    @property
    def template_source(self) -> str | None:
        return self._intake.template_source

    @cached_property
    def _renderer(self) -> LimitedPool:
        return self._render_pool(TEXT_THREADS + 1, RENDERING)

    @cached_property
    def _foreign_renderer(self) -> LimitedPool:
        return self._render_pool(1, FOREIGN_RENDERING)

    def _render_pool(self, workers: int, limits: Limits) -> LimitedPool:
        tokenizer = self._tokenizer
        hello = json.dumps([self.template_source, tokenizer.bos_token, tokenizer.eos_token])
        return LimitedPool(
            "twostroke.model.chat_template:renderer", hello.encode(), workers, limits
        )

    @property
    def _tokenizer(self) -> Any:
        tokenizer = self._intake.tokenizer
        if tokenizer is None:
            raise ApiError(400, "no tokenizer is loaded; send token ids to /v1/completions")
        return tokenizer


def _without_none(value: Any) -> Any:
    """Templates ask whether a field is there, so one that was not given must not be."""
    if isinstance(value, dict):
        return {key: _without_none(one) for key, one in value.items() if one is not None}
    return value


def _cut_after(text: str, content: str | None) -> str:
    """The conversation up to the end of its last message, which the model goes on writing."""
    wanted = (content or "").strip()
    start = text.rfind(wanted) if wanted else -1
    if start < 0:
        raise ApiError(
            400,
            "continue_final_message: the chat template does not show the last message's content",
            param="continue_final_message",
        )
    return text[: start + len(wanted)]


def each_prompt(prompt: str | list[Any]) -> list[str | list[int]]:
    """`/v1/completions` takes a text, token ids, or a list of either."""
    if isinstance(prompt, str):
        return [prompt]
    if not prompt:
        raise ApiError(400, "the prompt is empty; give at least one token", param="prompt")
    kinds = {type(one) for one in prompt}
    if len(kinds) > 1:
        raise ApiError(400, "prompt: give texts, token ids or lists of them, not a mixture")
    return [prompt] if kinds == {int} else list(prompt)
