"""`Frontend`: between people and the engine. Text, chats and stop strings on this side, token ids
on the other. It needs no torch and holds no engine: requests go out as `EngineRequest`, updates
come in, and whoever owns both (`client.py`) carries them.

    prompt ─▶ tokenise, validate ─▶ n EngineRequests      (`n > 1` is n requests)
    Update ─▶ detokenise, stop strings ─▶ RequestOutput   (a stop string that hits is an abort)
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from time import monotonic
from typing import Any

from twostroke.engine.stops import StopStrings
from twostroke.errors import RequestError, nearest
from twostroke.model.chat_template import ChatTemplate
from twostroke.model.detokenizer import Detokenizer
from twostroke.model.tokenizer import Tokenizer
from twostroke.observe.record import RequestRecord
from twostroke.outputs import CompletionOutput, Logprob, RequestOutput
from twostroke.plan import TokenLogprobs
from twostroke.request import EngineRequest, FinishReason, SamplingParams
from twostroke.sched.scheduler import Update

Prompt = str | Sequence[int] | Mapping[str, Any]
Message = Mapping[str, Any]


@dataclass(frozen=True, slots=True)
class Limits:
    """What the engine can take, known once it is up."""

    vocab_size: int
    max_model_len: int
    max_logprobs: int


@dataclass(slots=True)
class Writer:
    """One continuation while it is written."""

    output: CompletionOutput
    detokenizer: Detokenizer | None
    stops: StopStrings


@dataclass(slots=True)
class Asked:
    """A user's request: n continuations of one prompt."""

    output: RequestOutput
    params: SamplingParams
    tokenised_s: float
    writers: list[Writer] = field(default_factory=list)


def child_id(request_id: str, index: int, n: int) -> str:
    """The engine's name for one continuation."""
    return request_id if n == 1 else f"{request_id}/{index}"


class Frontend:
    def __init__(
        self,
        tokenizer: Tokenizer | None,
        chat_template: str | None,
        limits: Limits,
        seed: int = 0,
    ) -> None:
        self.tokenizer = tokenizer
        self.limits = limits
        self._template_source = chat_template
        self._template: ChatTemplate | None = None
        self._seed = seed
        self._count = 0
        self._asked: dict[str, Asked] = {}  # by request id
        self._child: dict[str, tuple[str, int]] = {}  # engine request → (request, index)
        self._stopped: dict[str, Asked] = {}  # engine requests to abort: a stop string hit them

    # ── in ──────────────────────────────────────────────────────────────────────────────────

    def render_chat(
        self,
        messages: Sequence[Message],
        add_generation_prompt: bool = True,
        tools: list[dict[str, Any]] | None = None,
        **variables: Any,
    ) -> list[int]:
        """A conversation → token ids, through the model's chat template."""
        tokenizer = self._need_tokenizer("a chat")
        if self._template is None:
            if self._template_source is None:
                raise RequestError(
                    "the model has no chat template; give one (chat_template) or use a plain prompt"
                )
            source, bos, eos = self._template_source, tokenizer.bos_token, tokenizer.eos_token
            self._template = ChatTemplate(source, bos, eos)
        text = self._template.render(messages, add_generation_prompt, tools, **variables)
        return tokenizer.encode(text, add_special_tokens=False)

    def prepare(
        self,
        prompt: Prompt,
        params: SamplingParams,
        request_id: str | None = None,
        priority: int = 0,
    ) -> list[EngineRequest]:
        """Validate and tokenise; nothing is kept yet, so a refusal leaves no trace."""
        received = monotonic()
        if not isinstance(params, SamplingParams):
            raise RequestError(
                f"sampling parameters are given as SamplingParams(…), not {type(params).__name__}"
            )
        if type(priority) is not int:
            raise RequestError(f"priority must be a whole number, not {priority!r}")
        text, ids, salt = self._read_prompt(prompt)
        if params.detokenize and self.tokenizer is None:
            if params.stop:
                raise RequestError(
                    "stop strings need a tokenizer, and none is loaded; use stop_token_ids"
                )
            params = replace(params, detokenize=False)
        self._validate(ids, params)
        request_id = self._free_id(request_id, params.n)
        stop_ids = self._stop_ids(params)
        bad_words = self._bad_words(params)
        self._refuse_nothing_left(params, stop_ids, bad_words)
        requests = []
        for index in range(params.n):
            requests.append(
                EngineRequest(
                    child_id(request_id, index, params.n),
                    ids,
                    params,
                    seed=self._request_seed(params, index),
                    stop_ids=stop_ids,
                    bad_words_ids=bad_words,
                    priority=priority,
                    salt=salt,
                    received_s=received,
                    family=request_id if params.n > 1 else "",
                )
            )
        self._count += 1
        output = RequestOutput(request_id, text, list(ids), [])
        asked = Asked(output, params, monotonic())
        for index, request in enumerate(requests):
            completion = CompletionOutput(index)
            if params.logprobs is not None:
                completion.logprobs, completion.cumulative_logprob = [], 0.0
            output.outputs.append(completion)
            detokenizer = None
            if params.detokenize and self.tokenizer is not None:
                detokenizer = self.tokenizer.detokenizer(params.skip_special_tokens, after=ids)
            stops = StopStrings(tuple(params.stop or ()), params.include_stop_str_in_output)
            asked.writers.append(Writer(completion, detokenizer, stops))
            self._child[request.request_id] = request_id, index
        self._asked[request_id] = asked
        return requests

    def forget(self, request_id: str) -> list[str]:
        """Drop a request that was aborted or refused; the engine requests that were its own."""
        children = self.children(request_id)
        for name in children:
            del self._child[name]
        self._asked.pop(request_id, None)
        return children

    def children(self, request_id: str) -> list[str]:
        """The engine requests of a request that have not ended."""
        asked = self._asked.get(request_id)
        count = 0 if asked is None else asked.params.n
        names = {child_id(request_id, index, count): (request_id, index) for index in range(count)}
        return [name for name, where in names.items() if self._child.get(name) == where]

    def _free_id(self, request_id: str | None, n: int) -> str:
        """A name that nobody has, and whose continuations' names nobody has."""
        if request_id is None:
            number = self._count
            while f"req-{number}" in self._asked:
                number += 1
            request_id = f"req-{number}"
        names = (child_id(request_id, index, n) for index in range(n))
        if request_id in self._asked or any(name in self._child for name in names):
            raise RequestError(f"a request with the id {request_id!r} is already running")
        return request_id

    def _read_prompt(self, given: Prompt) -> tuple[str | None, tuple[int, ...], str]:
        """Text, token ids, or vLLM's dicts of either, with an optional `cache_salt`."""
        prompt: Any = given
        salt = ""
        if isinstance(prompt, Mapping):
            known = ("prompt", "prompt_token_ids", "cache_salt")
            for key in prompt:
                if key not in known:
                    raise RequestError(f"a prompt has no field {key!r}{nearest(str(key), known)}")
            salt = prompt.get("cache_salt") or ""
            if not isinstance(salt, str):
                raise RequestError(f"cache_salt must be a string, not {salt!r}")
            ids = prompt.get("prompt_token_ids")
            prompt = prompt.get("prompt") if ids is None else ids
            if prompt is None:
                raise RequestError("a prompt given as a dict needs 'prompt' or 'prompt_token_ids'")
        if isinstance(prompt, str):
            return prompt, tuple(self._need_tokenizer("a text prompt").encode(prompt)), salt
        if not isinstance(prompt, Sequence) or isinstance(prompt, bytes | bytearray | memoryview):
            raise RequestError(
                f"a prompt is a text or a list of token ids, not {type(prompt).__name__}"
            )
        for n, token in enumerate(prompt):
            if type(token) is not int:
                raise RequestError(
                    f"a prompt is a text or a list of token ids, but entry {n} of this list is "
                    f"{token!r} ({type(token).__name__}), not an int"
                )
        return None, tuple(prompt), salt

    def _validate(self, ids: Sequence[int], params: SamplingParams) -> None:
        limits = self.limits
        if not ids:
            raise RequestError("the prompt is empty; give at least one token")
        worst = max(ids) if min(ids) >= 0 else min(ids)
        if not 0 <= worst < limits.vocab_size:
            raise RequestError(
                f"token id {worst} is out of range: the model's ids go from 0 to "
                f"{limits.vocab_size - 1}"
            )
        if len(ids) >= limits.max_model_len:
            raise RequestError(
                f"the prompt has {len(ids)} tokens, but max_model_len is {limits.max_model_len} "
                "and one must be left to write; shorten the prompt or raise max_model_len"
            )
        if len(ids) + params.min_tokens > limits.max_model_len:
            raise RequestError(
                f"{len(ids)} prompt tokens and min_tokens {params.min_tokens} are more than "
                f"max_model_len {limits.max_model_len}; lower min_tokens or shorten the prompt"
            )
        for name in ("logprobs", "prompt_logprobs"):
            asked = getattr(params, name)
            if asked is not None and asked > limits.vocab_size:
                raise RequestError(
                    f"{name} is {asked}, but the model has only {limits.vocab_size} tokens; lower "
                    "it"
                )
            if asked is not None and asked > limits.max_logprobs:
                raise RequestError(
                    f"{name} is {asked}, but at most {limits.max_logprobs} are given; lower it "
                    "or raise max_logprobs"
                )
        for name in ("logit_bias", "allowed_token_ids", "stop_token_ids"):
            for token in getattr(params, name) or ():
                if token >= limits.vocab_size:
                    raise RequestError(
                        f"{name}: token id {token} is out of range: the model's ids go from 0 to "
                        f"{limits.vocab_size - 1}"
                    )

    def _stop_ids(self, params: SamplingParams) -> frozenset[int]:
        """What ends a continuation. A tokenizer may name more tokens than the model can write."""
        ids = frozenset(params.stop_token_ids or ())
        if self.tokenizer is not None and not params.ignore_eos:
            ids |= {n for n in self.tokenizer.stop_ids if n < self.limits.vocab_size}
        return ids

    def _bad_words(self, params: SamplingParams) -> tuple[tuple[int, ...], ...]:
        """Each word at the start of a text and after a space: most vocabularies tell them apart.

        A word that holds a token the model cannot write needs no ban.
        """
        found: dict[tuple[int, ...], None] = {}
        for word in params.bad_words or ():
            tokenizer = self._need_tokenizer("bad_words")
            for text in (word, " " + word.lstrip()):
                ids = tuple(tokenizer.encode(text, add_special_tokens=False))
                if ids and max(ids) < self.limits.vocab_size:
                    found[ids] = None
        return tuple(found)

    def _refuse_nothing_left(
        self,
        params: SamplingParams,
        stop_ids: frozenset[int],
        bad_words: tuple[tuple[int, ...], ...],
    ) -> None:
        """Of no allowed token, one would be written all the same."""
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

    def _request_seed(self, params: SamplingParams, index: int) -> int:
        """The user's seed, plus the index for n > 1; otherwise the engine's and a counter."""
        if params.seed is not None:
            return (params.seed + index) % 2**64
        return (self._seed * 0x9E3779B97F4A7C15 + self._count * 1024 + index) % 2**64

    def _need_tokenizer(self, what: str) -> Tokenizer:
        if self.tokenizer is None:
            raise RequestError(f"{what} needs a tokenizer, and none is loaded; give token ids")
        return self.tokenizer

    # ── out ─────────────────────────────────────────────────────────────────────────────────

    def take(self, updates: Sequence[Update]) -> tuple[list[RequestOutput], list[str]]:
        """What users are to be told, and the engine requests to abort: stop strings hit them.

        Give what the aborts return to `take` as well, before telling: it completes the metrics.
        """
        told: dict[str, RequestOutput] = {}
        aborts = []
        for update in updates:
            where = self._child.get(update.request_id)
            if where is None:  # ended on this side already
                stopped = self._stopped.pop(update.request_id, None)
                if stopped is not None and update.record is not None:
                    update.record.finish_reason = FinishReason.STOP
                    self._add_record(stopped, update.record)
                continue
            parent, index = where
            asked = self._asked[parent]
            writer = asked.writers[index]
            self._write(asked, writer, update)
            if writer.output.finished:
                del self._child[update.request_id]
                if update.finish_reason is None:
                    aborts.append(update.request_id)
                    self._stopped[update.request_id] = asked
            if update.record is not None:
                self._add_record(asked, update.record)
            told[parent] = asked.output
        for request_id, output in told.items():
            output.finished = all(completion.finished for completion in output.outputs)
            if output.finished:
                del self._asked[request_id]
        return list(told.values()), aborts

    def _add_record(self, asked: Asked, record: RequestRecord) -> None:
        record.tokenised_s = asked.tokenised_s
        output = asked.output
        output.metrics.append(record)
        output.num_cached_tokens = max(output.num_cached_tokens, record.num_cached)

    def _write(self, asked: Asked, writer: Writer, update: Update) -> None:
        output, params = writer.output, asked.params
        output.token_ids.extend(update.tokens)
        if update.logprobs:
            self._add_logprobs(output, update)
        if update.prompt_logprobs is not None:
            asked.output.prompt_logprobs = [None, *map(self._logprobs, update.prompt_logprobs)]
        stopped_by_token = update.finish_reason is FinishReason.STOP
        if writer.detokenizer is not None:
            spoken = update.tokens
            if stopped_by_token and not params.include_stop_str_in_output:
                spoken = spoken[:-1]
            text = writer.detokenizer.push(spoken)
            if update.finish_reason is not None:
                text += writer.detokenizer.flush()
            early = len(output.token_ids) < params.min_tokens
            output.text += text if early else writer.stops.push(text)
            if writer.stops.hit is not None:
                output.finish_reason, output.stop_reason = "stop", writer.stops.hit
                return
        if update.finish_reason is not None:
            output.text += writer.stops.flush()
            output.finish_reason = str(update.finish_reason)
            output.stop_reason = update.stop_reason
            asked.output.error = asked.output.error or update.error

    def _add_logprobs(self, output: CompletionOutput, update: Update) -> None:
        assert output.logprobs is not None
        assert output.cumulative_logprob is not None
        for entry in update.logprobs:
            output.logprobs.append(self._logprobs(entry))
            output.cumulative_logprob += entry.logprobs[0]

    def _logprobs(self, entry: TokenLogprobs) -> dict[int, Logprob]:
        """The best ones in order of rank, and the chosen one, which may be further down."""
        chosen, *best = entry.token_ids
        ranked = {token: rank for rank, token in enumerate(best, 1)} | {chosen: entry.rank}
        values = dict(zip(best, entry.logprobs[1:], strict=True)) | {chosen: entry.logprobs[0]}
        text = self.tokenizer.token_text if self.tokenizer is not None else lambda token: None
        return {t: Logprob(values[t], ranked[t], text(t)) for t in (*best, *{chosen} - set(best))}
