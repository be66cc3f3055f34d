"""`InputProcessor` makes an `EngineRequest` from a user's prompt and parameters: it renders chats,
tokenises and validates.

Where a request is checked:

  SamplingParams     by its constructor; `process` checks a copy, because a program may have changed
                     the original. A server's requests are constructed once and not copied.
  length             `check_length`, for a text also before it is tokenised
  model and engine   `process`: vocabulary, log-probabilities, stop strings, grammar
  schedule           `Scheduler.check`: room in the context and in the KV cache

An engine in another process checks the messages that it gets: decoding a message constructs
`SamplingParams` again (`wire.py`), and `Scheduler.check` checks every request.

An `InputProcessor` stores nothing about requests, so several threads may use it. This module does
not import torch.
"""

from __future__ import annotations

import logging
import os
from array import array
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property, partial
from hashlib import blake2b
from time import monotonic
from typing import Any, Final

from twostroke.engine.grammar_check import GrammarCheck
from twostroke.engine.rendering import Template, TemplateRenderer, encode_conversation
from twostroke.errors import RequestError, did_you_mean, shown
from twostroke.model.text.tokenizer import Tokenizer
from twostroke.request import FIRST_MARK_TOKENS, MAX_PRIORITY, EngineRequest, SamplingParams

log = logging.getLogger(__name__)
# Limits of texts by their characters for each allowed token (`check_length`):
CHARS_PER_TOKEN: Final = 8  # the tokens of longer texts are counted in pieces first
MAX_CHARS_PER_TOKEN: Final = 32  # longer texts are refused before they are tokenised
MIN_CHARS_LIMIT: Final = 64 * 1024  # texts up to this length are not refused by their characters
COUNTED_CHARS: Final = 16 * 1024  # size of a piece

Prompt = str | Sequence[int] | Mapping[str, Any]
Message = Mapping[str, Any]
# (messages, add_generation_prompt, tools, continue_final_message, variables) → text
TemplateRunner = Callable[
    [Sequence[Message], bool, list[dict[str, Any]] | None, bool, dict[str, Any]], str
]


@dataclass(frozen=True, slots=True)
class ModelLimits:
    """Limits of the model and the engine, known once the engine is up."""

    vocab_size: int
    max_model_len: int
    max_logprobs: int


class InputProcessor:
    def __init__(
        self,
        tokenizer: Tokenizer | None,
        chat_template: str | None,
        limits: ModelLimits,
        renderer: TemplateRenderer | None = None,
    ) -> None:
        """`renderer`: renders chats for which no `run` is given. Its process starts when it renders
        the first chat."""
        self.tokenizer = tokenizer
        self.limits = limits
        self.chat_template = chat_template
        self._renderer = renderer or TemplateRenderer()
        self._mark_key = os.urandom(16)
        if tokenizer is not None and tokenizer.vocab_size > limits.vocab_size:
            log.warning(
                "the tokenizer has %d tokens, but the model only %d: prompts with tokens that the "
                "model lacks are refused",
                tokenizer.vocab_size,
                limits.vocab_size,
            )

    # ── chats ───────────────────────────────────────────────────────────────────────────────

    def render_chat(
        self,
        messages: Sequence[Message],
        add_generation_prompt: bool = True,
        tools: list[dict[str, Any]] | None = None,
        *,
        variables: Mapping[str, Any] | None = None,
        continue_final_message: bool = False,
        add_special_tokens: bool = False,
        run: TemplateRunner | None = None,
        max_prompt_tokens: int | None = None,
    ) -> list[int]:
        """Render a conversation as token ids. `run`: a renderer with another template or other
        limits; None: the model's own template."""
        tokenizer = self._need_tokenizer("a chat")
        text = self.chat_text(
            messages,
            add_generation_prompt,
            tools,
            variables=variables,
            continue_final_message=continue_final_message,
            run=run,
        )
        self.check_length(text, max_prompt_tokens)
        return tokenizer.encode(text, add_special_tokens=add_special_tokens)

    def chat_text(
        self,
        messages: Sequence[Message],
        add_generation_prompt: bool = True,
        tools: list[dict[str, Any]] | None = None,
        *,
        variables: Mapping[str, Any] | None = None,
        continue_final_message: bool = False,
        run: TemplateRunner | None = None,
    ) -> str:
        """Render a conversation as text; `run` as for `render_chat`."""
        render = run or self.template_runner()
        arguments = messages, add_generation_prompt, tools, continue_final_message
        return render(*arguments, dict(variables or {}))

    def run_template(
        self,
        renderer: TemplateRenderer,
        template: Template,
        max_prompt_tokens: int | None,
        messages: Sequence[Message],
        add_generation_prompt: bool,
        tools: list[dict[str, Any]] | None,
        continued: bool,
        variables: dict[str, Any],
    ) -> str:
        """Render a conversation in a process whose time and memory are limited.

        `max_prompt_tokens`: a server's limit, as for `check_length`."""
        limit = max_prompt_tokens
        if limit is not None and len(messages) > limit:  # no message is shorter than a token
            raise self.too_long(f"{len(messages)} messages", limit)
        conversation = encode_conversation(
            messages, add_generation_prompt, tools, continued, variables
        )
        max_chars = None if limit is None else self.max_chars(limit)
        # Escapes in the JSON and the tools need more room than the text.
        if limit is not None and len(conversation) > 2 * self.max_chars(limit) + 1024**2:
            size = f"{len(conversation)} bytes with its messages and tools"
            raise self.too_long(size, limit)
        num_chars, text = renderer.render(template, conversation, max_chars)
        if text is None:  # only with a limit
            raise self.too_long(f"{num_chars} characters", limit or 0)
        return text

    def template_runner(
        self, source: str | None = None, content_format: str = "auto"
    ) -> TemplateRunner:
        """Return a renderer of the model's own template, or of the template `source`."""
        template = self.template(source, content_format)
        return partial(self.run_template, self._renderer, template, None)

    def template(self, of_request: str | None = None, content_format: str = "auto") -> Template:
        """Return the model's own template, or the template of a request."""
        tokenizer = self._need_tokenizer("a chat")
        source = self.chat_template if of_request is None else of_request
        if source is None:
            raise RequestError(
                "the model has no chat template; give one (chat_template) or use a plain prompt"
            )
        names = tokenizer.bos_token, tokenizer.eos_token
        return Template(source, *names, of_request is not None, content_format)

    # ── prompts ─────────────────────────────────────────────────────────────────────────────

    def process(
        self,
        prompt: Prompt,
        params: SamplingParams,
        priority: int = 0,
        progress: bool = False,
        *,
        gap_causes: bool = False,
        check_params: bool = True,
        check_grammar: bool = True,
        max_prompt_tokens: int | None = None,
    ) -> EngineRequest:
        """Make an engine request; raise `RequestError` if it cannot be run.

        `progress`: report after each chunk how much of the prompt has been computed.
        `gap_causes`: record the causes of each gap between two tokens.
        `check_params`: False if the caller has constructed `params` for this request and has not
        changed them since.
        `check_grammar`: False if the caller checks the grammar (`grammars.check`).
        `max_prompt_tokens`: a server's limit, see `check_length`."""
        received_s = monotonic()
        if not isinstance(params, SamplingParams):
            raise RequestError(
                f"sampling parameters are given as SamplingParams(…), not {type(params).__name__}"
            )
        if check_params:
            params = params.clone()
        if type(priority) is not int or abs(priority) > MAX_PRIORITY:
            bounds = f"from {-MAX_PRIORITY} to {MAX_PRIORITY}"
            raise RequestError(f"priority must be a whole number {bounds}, not {shown(priority)}")
        text, ids, salt = self._read_prompt(prompt, max_prompt_tokens)
        if params.detokenize and self.tokenizer is None:
            if params.stop:
                raise RequestError(
                    "stop strings need a tokenizer, and none is loaded; use stop_token_ids"
                )
            params = replace(params, detokenize=False)
        params = self._whole_vocabulary(params)
        self._check_tokens(ids, params)
        stop_ids, bad_words = self._stop_ids(params), self._bad_words(params)
        self._check_allowed_tokens(params, stop_ids, bad_words)
        if params.structured_outputs is not None and check_grammar:
            self.grammars.check(params.structured_outputs)
        return EngineRequest(
            request_id="",
            prompt_token_ids=ids,
            params=params,
            seed=0,
            stop_ids=stop_ids,
            bad_words_ids=bad_words,
            priority=priority,
            salt=salt,
            received_s=received_s,
            progress=progress,
            gap_causes=gap_causes,
            prompt=text,
            tokenised_s=monotonic(),
            prefix_marks=self._prefix_marks(ids, salt),
        )

    def _prefix_marks(self, ids: Sequence[int], salt: str) -> tuple[str, ...]:
        """Return digests of the prompt's first 64, 128, 256, … tokens. Their key is random, so that
        a reader of the digests cannot test which prompt they belong to."""
        digest = blake2b(salt.encode(), digest_size=8, key=self._mark_key)
        packed, marks, start, end = array("i", ids), [], 0, FIRST_MARK_TOKENS
        while end <= len(packed):
            digest.update(packed[start:end].tobytes())
            marks.append(digest.hexdigest())
            start, end = end, 2 * end
        return tuple(marks)

    def max_chars(self, max_prompt_tokens: int) -> int:
        """Return the number of characters above which a text is refused without tokenising it."""
        return max(MIN_CHARS_LIMIT, MAX_CHARS_PER_TOKEN * max_prompt_tokens)

    def check_length(
        self, prompt: str | Sequence[int], max_prompt_tokens: int | None = None
    ) -> None:
        """Raise `RequestError` if a prompt is too long.

        `max_prompt_tokens`: a server's limit, below max_model_len. With this limit, texts are
        measured before they are tokenised, because tokenising takes 100 bytes of memory for each
        character and 260 bytes for each token."""
        if max_prompt_tokens is None:
            if not isinstance(prompt, str) and len(prompt) >= self.limits.max_model_len:
                raise RequestError(
                    f"the prompt has {len(prompt)} tokens, but max_model_len is "
                    f"{self.limits.max_model_len} and the answer needs at least one; shorten the "
                    "prompt or raise max_model_len"
                )
        elif not isinstance(prompt, str):
            if len(prompt) > max_prompt_tokens:
                raise self.too_long(f"{len(prompt)} tokens", max_prompt_tokens)
        elif len(prompt) > self.max_chars(max_prompt_tokens):
            raise self.too_long(f"{len(prompt)} characters", max_prompt_tokens)
        elif len(prompt) > CHARS_PER_TOKEN * max_prompt_tokens:
            min_tokens = self._min_tokens(prompt, max_prompt_tokens)
            if min_tokens > max_prompt_tokens:
                raise self.too_long(f"at least {min_tokens} tokens", max_prompt_tokens)

    def too_long(self, size: str, max_prompt_tokens: int) -> RequestError:
        return RequestError(
            f"the prompt has {size}, and at most {max_prompt_tokens} tokens are read "
            f"(max_model_len is {self.limits.max_model_len}); shorten it",
            param="prompt",
            code="context_length_exceeded",
        )

    def _min_tokens(self, text: str, max_prompt_tokens: int) -> int:
        """Return a lower bound of the number of tokens of a text: half the tokens of its pieces.
        Cutting a text into pieces changes only a few tokens. Counting stops when the bound exceeds
        `max_prompt_tokens`."""
        tokenizer, count = self._need_tokenizer("a text prompt"), 0
        for start in range(0, len(text), COUNTED_CHARS):
            count += len(tokenizer.encode(text[start : start + COUNTED_CHARS], False))
            if count > 2 * max_prompt_tokens:
                break
        return count // 2

    def _read_prompt(
        self, user_prompt: Prompt, max_prompt_tokens: int | None
    ) -> tuple[str | None, tuple[int, ...], str]:
        """Return the text, token ids and salt of a prompt. A prompt is a text, a list of token ids,
        or vLLM's dict of either with an optional `cache_salt`. Also checks the length."""
        prompt: Any = user_prompt
        salt, text = "", None  # a prompt of token ids may come with its text
        if isinstance(prompt, Mapping):
            known = ("prompt", "prompt_token_ids", "cache_salt")
            for key in prompt:
                if key not in known:
                    hint = did_you_mean(str(key), known)
                    raise RequestError(f"a prompt has no field {shown(key)}{hint}")
            salt = prompt.get("cache_salt") or ""
            if not isinstance(salt, str):
                raise RequestError(f"cache_salt must be a string, not {shown(salt)}")
            ids, text = prompt.get("prompt_token_ids"), prompt.get("prompt")
            prompt = text if ids is None else ids
            if prompt is None:
                raise RequestError("a prompt given as a dict needs 'prompt' or 'prompt_token_ids'")
            if not isinstance(text, str | None):
                raise RequestError(f"a prompt's text must be a string, not {shown(text)}")
        if isinstance(prompt, str):
            self.check_length(prompt, max_prompt_tokens)  # before it is tokenised
            ids = tuple(self._need_tokenizer("a text prompt").encode(prompt))
            self.check_length(ids, max_prompt_tokens)
            return prompt, ids, salt
        if not isinstance(prompt, Sequence) or isinstance(prompt, bytes | bytearray | memoryview):
            raise RequestError(
                f"a prompt is a text or a list of token ids, not {type(prompt).__name__}"
            )
        self.check_length(prompt, max_prompt_tokens)
        ids = tuple(prompt)
        if not set(map(type, ids)) <= {int}:
            n, token = next((n, token) for n, token in enumerate(ids) if type(token) is not int)
            raise RequestError(
                f"a prompt is a text or a list of token ids, but entry {n} of this list is "
                f"{shown(token)} ({type(token).__name__}), not an int"
            )
        return text, ids, salt

    def _check_tokens(self, ids: Sequence[int], params: SamplingParams) -> None:
        """Raise `RequestError` if the model does not have the tokens of a request, or if too many
        log-probabilities are requested."""
        limits = self.limits
        if not ids:
            raise RequestError("the prompt is empty; give at least one token")
        worst = max(ids) if min(ids) >= 0 else min(ids)
        if not 0 <= worst < limits.vocab_size:
            raise RequestError(
                f"token id {worst} is out of vocabulary: the model's ids go from 0 to "
                f"{limits.vocab_size - 1}"
            )
        if len(ids) + params.min_tokens > limits.max_model_len:
            raise RequestError(
                f"{len(ids)} prompt tokens and min_tokens {params.min_tokens} are more than "
                f"max_model_len {limits.max_model_len}; lower min_tokens or shorten the prompt"
            )
        for name in ("logprobs", "prompt_logprobs"):
            number = getattr(params, name)
            if number is not None and number > limits.vocab_size:
                raise RequestError(
                    f"{name} is {number}, but the model has only {limits.vocab_size} tokens; lower "
                    "it"
                )
            self._check_logprobs(name, f"is {number}", number or 0)
        num_ids = len(params.logprob_token_ids or ())
        self._check_logprobs("logprob_token_ids", f"has {num_ids} ids", num_ids)
        if len(params.allowed_token_ids or ()) > limits.vocab_size:
            raise RequestError(
                f"allowed_token_ids has {len(params.allowed_token_ids or ())} ids, but the model "
                f"has only {limits.vocab_size}; list each id once"
            )
        for name in ("logit_bias", "allowed_token_ids", "stop_token_ids", "logprob_token_ids"):
            for token in getattr(params, name) or ():
                if token >= limits.vocab_size:
                    raise RequestError(
                        f"{name}: token id {token} is out of range: the model's ids go from 0 to "
                        f"{limits.vocab_size - 1} (its vocabulary has {limits.vocab_size} tokens)"
                    )

    def _whole_vocabulary(self, params: SamplingParams) -> SamplingParams:
        """Replace `logprobs` and `prompt_logprobs` of -1 by the size of the vocabulary."""
        sizes: dict[str, Any] = {
            name: self.limits.vocab_size
            for name in ("logprobs", "prompt_logprobs")
            if getattr(params, name) == -1
        }
        return replace(params, **sizes) if sizes else params

    def _check_logprobs(self, name: str, description: str, number: int) -> None:
        limit = self.limits.max_logprobs
        if number > limit >= 0:
            raise RequestError(
                f"{name} {description}, but at most {limit} are allowed; lower it or raise "
                "max_logprobs",
                param=name,
            )

    def _stop_ids(self, params: SamplingParams) -> frozenset[int]:
        """Return the token ids that end a completion, without tokens that the model lacks."""
        ids = frozenset(params.stop_token_ids or ())
        if self.tokenizer is not None and not params.ignore_eos:
            ids |= {n for n in self.tokenizer.stop_ids if n < self.limits.vocab_size}
        return ids

    def _bad_words(self, params: SamplingParams) -> tuple[tuple[int, ...], ...]:
        """Return the token ids of each word, at the start of a text and after a space, because most
        vocabularies have different tokens for the two. Words with tokens that the model lacks are
        left out."""
        found: dict[tuple[int, ...], None] = {}
        for word in params.bad_words or ():
            tokenizer = self._need_tokenizer("bad_words")
            for text in (word, " " + word.lstrip()):
                ids = tuple(tokenizer.encode(text, add_special_tokens=False))
                if ids and max(ids) < self.limits.vocab_size:
                    found[ids] = None
        return tuple(found)

    def _check_allowed_tokens(
        self,
        params: SamplingParams,
        stop_ids: frozenset[int],
        bad_words: tuple[tuple[int, ...], ...],
    ) -> None:
        """Raise `RequestError` if every allowed token is banned."""
        if params.allowed_token_ids is None:
            return
        left = set(params.allowed_token_ids) - {word[0] for word in bad_words if len(word) == 1}
        if params.min_tokens:
            left -= stop_ids
        if not left:
            raise RequestError(
                "bad_words and min_tokens (which bans the tokens that end a text) leave none of "
                "allowed_token_ids; allow another token"
            )

    @cached_property
    def grammars(self) -> GrammarCheck:
        """The checker of grammars, which compiles them in a limited process. A new grammar takes
        some milliseconds, and 0.25 s of CPU time at most. The first one also waits for the start of
        the process (0.5 s)."""
        tokenizer = self._need_tokenizer("structured_outputs")
        end_ids = sorted(n for n in tokenizer.stop_ids if n < self.limits.vocab_size)
        return GrammarCheck(tokenizer.to_json(), end_ids)

    def close(self) -> None:
        """End the helper processes. The next chat or grammar starts them again."""
        self._renderer.close()
        if "grammars" in self.__dict__:
            self.grammars.close()
        if self.tokenizer is not None:
            self.tokenizer.close()

    def _need_tokenizer(self, what: str) -> Tokenizer:
        if self.tokenizer is None:
            raise RequestError(f"{what} needs a tokenizer, and none is loaded; give token ids")
        return self.tokenizer
