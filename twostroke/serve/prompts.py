"""A request's prompt → `Prepared`. Long ones are read in a thread, so that streams go on."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Callable, Sequence
from functools import cached_property
from typing import Any, TypeVar

import msgspec

from twostroke.engine.intake import Intake, Prepared
from twostroke.errors import ModelError
from twostroke.model.chat_template import ChatTemplate, check_messages
from twostroke.request import SamplingParams
from twostroke.serve.errors import ApiError
from twostroke.serve.protocol import Generating, Templated
from twostroke.serve.settings import ServeSettings

# What `ChatTemplate.render` is called with: no request may give these names to its variables.
TAKEN = ("self", "messages", "add_generation_prompt", "tools")
INLINE_BYTES = 8 * 1024  # a body of this size is tokenised within about a millisecond
T = TypeVar("T")


def work_of(request: Generating, num_bytes: int) -> int:
    """How much there is to read. A grammar is more work than its size tells."""
    plain = request.structured_outputs is None and not any(
        getattr(request, name, None) for name in ("response_format", "text", "tools")
    )
    return num_bytes if plain else num_bytes + INLINE_BYTES


async def off_loop(num_bytes: int, work: Callable[[], T]) -> T:
    """Run `work` here if the body it is about is short, in a thread otherwise."""
    return work() if num_bytes <= INLINE_BYTES else await asyncio.to_thread(work)


class Prompts:
    def __init__(self, intake: Intake, settings: ServeSettings) -> None:
        self._intake = intake
        self._settings = settings
        limits = intake.limits
        self.max_tokens = min(settings.max_prompt_tokens or 2**62, limits.max_model_len - 1)

    def warm(self) -> None:
        """Compile the model's template now: a request need not wait for it, nor for files that it
        imports. What is wrong with one is told to those who ask for a chat."""
        with contextlib.suppress(ApiError, ModelError):
            _ = self._model_template

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
        prepared = self._intake.prepare(given, params, request.priority or 0, progress)
        self.refuse_long(prepared.ids)
        return prepared

    def encode(self, text: str, add_special_tokens: bool) -> list[int]:
        self.refuse_long(text)
        return self._tokenizer.encode(text, add_special_tokens)

    def refuse_long(self, prompt: str | Sequence[int]) -> None:
        if isinstance(prompt, str):
            # No tokenizer makes fewer tokens than this, so a huge text is not even tokenised.
            least = len(prompt) // 8
            if least > self.max_tokens:
                least = len(prompt) // self._longest_token
            if least <= self.max_tokens:
                least = self._least_by_start(prompt)
        else:
            least = len(prompt)
        if least > self.max_tokens:
            raise self._too_long(f"at least {least}" if isinstance(prompt, str) else f"{least}")

    def _too_long(self, count: str) -> ApiError:
        return ApiError(
            400,
            f"the prompt has {count} tokens, and at most {self.max_tokens} are read "
            f"(max_model_len is {self._intake.limits.max_model_len}); shorten it",
            param="prompt",
            code="context_length_exceeded",
        )

    def _least_by_start(self, text: str) -> int:
        """Tokens that a long text has at least: one far too long is not tokenised to its end."""
        size = 8 * self.max_tokens
        while size < len(text):
            count = len(self._tokenizer.encode(text[:size], False))
            if count > 2 * self.max_tokens:  # a margin for what the cut itself changes
                return count // 2
            size *= 2
        return 0

    # ── conversations ───────────────────────────────────────────────────────────────────────

    def render(
        self, messages: list[dict[str, Any]], request: Templated, **variables: Any
    ) -> list[int]:
        """A conversation → token ids, by the model's template or by one the request brings."""
        self._refuse_long_chat(messages)
        template = self._template(request.chat_template)
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
        text = template.render(messages, add_prompt, tools, **variables)
        if continued:
            text = _cut_after(text, check_messages(messages)[-1]["content"])
        return self.encode(text, bool(request.add_special_tokens))

    def _refuse_long_chat(self, messages: list[dict[str, Any]]) -> None:
        """Before a template works on it. It writes at least a token about each message."""
        if len(messages) > self.max_tokens:
            raise self._too_long(f"at least {len(messages)}")
        num_chars = 0
        for message in messages:
            content = message.get("content")
            parts = content if isinstance(content, list) else (content,)
            texts = (part.get("text") if isinstance(part, dict) else part for part in parts)
            num_chars += sum(len(text) for text in texts if isinstance(text, str))
        if num_chars > 8 * self.max_tokens and num_chars > self._longest_token * self.max_tokens:
            raise self._too_long(f"at least {num_chars // self._longest_token}")

    def _template(self, own: str | None) -> ChatTemplate:
        if own is None:
            return self._model_template
        if not self._settings.trust_request_chat_template:
            raise ApiError(
                400,
                "chat_template: this server uses the model's own; start it with "
                "trust_request_chat_template to allow others",
                param="chat_template",
            )
        try:
            return self._compile(own)
        except ModelError as error:
            raise ApiError(400, str(error), param="chat_template") from None

    @property
    def template_source(self) -> str | None:
        return self._intake.template_source

    @cached_property
    def _model_template(self) -> ChatTemplate:
        source = self.template_source
        if source is None:
            raise ApiError(
                400, "the model has no chat template; use /v1/completions", code="no_chat_template"
            )
        return self._compile(source)

    def _compile(self, source: str) -> ChatTemplate:
        return ChatTemplate(source, self._tokenizer.bos_token, self._tokenizer.eos_token)

    @property
    def _tokenizer(self) -> Any:
        tokenizer = self._intake.tokenizer
        if tokenizer is None:
            raise ApiError(400, "no tokenizer is loaded; send token ids to /v1/completions")
        return tokenizer

    @cached_property
    def _longest_token(self) -> int:
        """In bytes, of which a character has at least one."""
        sizes = map(len, map(self._tokenizer.token_bytes, range(self._tokenizer.vocab_size)))
        return max(1, *sizes)


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
