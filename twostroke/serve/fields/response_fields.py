"""Fields that the responses of all routes share: head, usage, timings, logprobs."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import lru_cache
from itertools import accumulate, chain, islice
from math import isnan
from typing import Any

import msgspec

from twostroke.model.text.tokenizer import Tokenizer
from twostroke.observe.record import Causes
from twostroke.outputs import Logprobs, RequestOutput
from twostroke.plan import TokenLogprobs
from twostroke.serve.sse import LazyList, encode_json

Json = dict[str, Any]
LEAST_LOGPROB = -9999.0  # JSON has no -inf
TOKENS_KEPT = 16384


@dataclass(frozen=True, slots=True)
class ResponseHead:
    """The fields that every chunk of a response repeats."""

    id: str
    created: int
    model: str
    system_fingerprint: str

    def as_json(self, kind: str) -> Json:
        return {
            "id": self.id,
            "object": kind,
            "created": self.created,
            "model": self.model,
            "system_fingerprint": self.system_fingerprint,
            "service_tier": None,
        }


@dataclass(slots=True)
class TokenCounts:
    """Tokens read and written for one response."""

    prompt: int = 0
    cached: int = 0
    completion: int = 0
    reasoning: int | None = None  # of the completion's; None: it is not parted from the answer

    def usage(self, details: bool = True) -> Json:
        usage: Json = {
            "prompt_tokens": self.prompt,
            "completion_tokens": self.completion,
            "total_tokens": self.prompt + self.completion,
        }
        if details:
            usage["prompt_tokens_details"] = {"cached_tokens": self.cached}
            if self.reasoning is not None:
                usage["completion_tokens_details"] = {"reasoning_tokens": self.reasoning}
        return usage

    def add_reasoning(self, tokens: int | None) -> None:
        if tokens is not None:
            self.reasoning = (self.reasoning or 0) + tokens


def count_tokens(outputs: Sequence[RequestOutput]) -> TokenCounts:
    return TokenCounts(
        sum(len(output.prompt_token_ids) for output in outputs),
        sum(cached_tokens(output) for output in outputs),
        sum(len(completion.token_ids) for output in outputs for completion in output.outputs),
    )


def cached_tokens(output: RequestOutput) -> int:
    """Prompt tokens found in the prefix cache. What continuations of one prompt share because the
    first of them has computed it is not counted."""
    return min((record.num_cached for record in output.records), default=0)


def timings(outputs: Sequence[RequestOutput], each_gap: bool = False) -> Json | None:
    """llama.cpp's object, measured by the engine: prompt is prefill, predicted is decode.

    A token's time is the gap between tokens, so that the first one, which prefill brought, is not
    counted as decoded in no time. Of several continuations: the slowest's times, all's tokens.
    Then ours: the time in the queue, the gaps between tokens by cause (summed over continuations;
    with one they add up to `decode_ms`), the worst gap, preemptions, and
    tokens that left the KV cache. `each_gap`: the causes of each gap, too.
    """
    records = [record for output in outputs for record in output.records]
    if not records:
        return None
    cached = sum(map(cached_tokens, outputs))
    prompt_n = sum(len(output.prompt_token_ids) for output in outputs) - cached
    prompt_ms = max(record.prefill_s for record in records) * 1e3
    predicted_n = sum(len(record.token_s) for record in records)
    predicted_ms = max(record.decode_s for record in records) * 1e3
    gaps = predicted_n - len(records)
    worst = max(records, key=lambda record: record.worst_gap_s)
    found = {
        "cache_n": cached,
        "prompt_n": prompt_n,
        "prompt_ms": prompt_ms,
        "prompt_per_token_ms": _ratio(prompt_ms, prompt_n),
        "prompt_per_second": _ratio(prompt_n * 1e3, prompt_ms),
        "predicted_n": predicted_n,
        "predicted_ms": predicted_ms,
        "predicted_per_token_ms": _ratio(predicted_ms, gaps),
        "predicted_per_second": _ratio(gaps * 1e3, predicted_ms),
        "queue_ms": max(record.queue_s for record in records) * 1e3,
        "prefill_ms": prompt_ms,
        "decode_ms": predicted_ms,
        "gaps_ms": _in_ms(Causes(*map(sum, zip(*[r.gaps for r in records], strict=True)))),
        "worst_gap_ms": worst.worst_gap_s * 1e3,
        "worst_gap_causes_ms": None if worst.worst_gap is None else _in_ms(worst.worst_gap),
        "preemptions": sum(len(record.preempted) for record in records),
        "kv_evicted_tokens": sum(record.kv_evicted_tokens for record in records),
    }
    if each_gap:
        one = records[0].gap_causes if len(records) == 1 else None
        found["token_gaps_ms"] = None if one is None else LazyList(_gaps_in_ms(one))
    return found


def _gaps_in_ms(causes: Sequence[float]) -> Iterator[list[float] | None]:
    """Five numbers a gap, or None for a gap that is too long ago."""
    for at in range(0, len(causes), 5):
        gap = causes[at : at + 5]
        yield None if isnan(gap[0]) else [round(1e3 * seconds, 3) for seconds in gap]


def request_metrics(outputs: Sequence[RequestOutput]) -> Json | None:
    """Return vLLM's `metrics` of an answer with `--enable-per-request-metrics`: the times of one
    text, and None for an answer of several, which share no times."""
    records = [record for output in outputs for record in output.records]
    if len(records) != 1:
        return None
    (record,) = records
    tokens = len(record.token_s)
    inference_s = record.prefill_s + record.decode_s
    return {
        "time_to_first_token_ms": record.prefill_s * 1e3 if tokens else None,
        "generation_time_ms": record.decode_s * 1e3 if tokens else None,
        "queue_time_ms": (record.scheduled_s - record.queued_s) * 1e3,
        "mean_itl_ms": record.tpot_s * 1e3 if tokens > 1 else None,
        "tokens_per_second": tokens / inference_s if tokens and inference_s > 0 else None,
        "speculative_decoding": None,
    }


def _in_ms(causes: Causes) -> Json:
    return {cause: seconds * 1e3 for cause, seconds in causes._asdict().items()}


def _ratio(amount: float, per: float) -> float:
    return amount / per if per > 0 else 0.0


def progress(output: RequestOutput) -> Json:
    """llama.cpp's `prompt_progress`: how much of the prompt is in the cache by now."""
    return {
        "total": len(output.prompt_token_ids),
        "cache": output.num_cached_tokens,
        "processed": output.num_prefilled,
    }


class TokenNames:
    """How tokens are shown beside their log-probabilities, with a cache: an answer may need twenty
    for each of its tokens."""

    def __init__(self, tokenizer: Tokenizer | None) -> None:
        self._tokenizer = tokenizer
        self.text = lru_cache(TOKENS_KEPT)(self._text)
        self.json_around = lru_cache(TOKENS_KEPT)(self._json_around)

    def _text(self, token: int, as_id: bool = False) -> str:
        if as_id or self._tokenizer is None:
            return f"token_id:{token}"
        return self._tokenizer.token_text(token)

    def _json_around(self, token: int, as_id: bool) -> tuple[bytes, bytes]:
        """The JSON before and after the log-probability in a token's object."""
        raw = b"" if self._tokenizer is None else self._tokenizer.token_bytes(token)
        text = encode_json(self.text(token, as_id))
        return b'{"token":%b,"logprob":' % text, b',"bytes":%b}' % encode_json(list(raw))


class LogprobWriter:
    """Logprobs as OpenAI's two APIs write them."""

    def __init__(self, names: TokenNames, top: int, as_ids: bool) -> None:
        """`top`: how many a chat's `top_logprobs` has, the chosen one among them; -1: all."""
        self._names = names
        self._top = None if top < 0 else top
        self._as_ids = as_ids

    def chat(self, entries: Logprobs) -> Iterator[msgspec.Raw]:
        """One encoded object a token: with the twenty best of each, plain objects are too slow."""
        for entry in entries.plain():
            assert entry is not None
            listed = islice(_own_first(entry).items(), self._top)
            best = b",".join([self._token(token, value) for token, value in listed])
            own = self._token(entry.token_ids[0], entry.logprobs[0])
            yield msgspec.Raw(b'%b,"top_logprobs":[%b]}' % (own[:-1], best))

    def completion(
        self, token_ids: Sequence[int], parts: Sequence[Logprobs | None], offset: int = 0
    ) -> Json:
        """`parts`: the prompt's and the text's logprobs, in order; None is left out. `offset`: how
        many characters of the text came before. A prompt's first token has no logprob."""
        tokens = [self._text(token) for token in token_ids]
        lengths = accumulate(map(len, tokens), initial=offset)

        def entries() -> Iterator[TokenLogprobs | None]:
            return chain.from_iterable(part.plain() for part in parts if part is not None)

        return {
            "text_offset": list(islice(lengths, len(tokens))),
            "token_logprobs": LazyList(
                None if e is None else _finite(e.logprobs[0]) for e in entries()
            ),
            "tokens": tokens,
            "top_logprobs": LazyList(map(self._best_by_text, entries())),
        }

    def _best_by_text(self, entry: TokenLogprobs | None) -> dict[str, float] | None:
        if entry is None:
            return None
        return {self._text(token): _finite(value) for token, value in _own_first(entry).items()}

    def _token(self, token: int, value: float) -> bytes:
        before, after = self._names.json_around(token, self._as_ids)
        return b"%b%b%b" % (before, repr(_finite(value)).encode(), after)

    def _text(self, token: int) -> str:
        return self._names.text(token, self._as_ids)

    def prompt(self, output: RequestOutput) -> LazyList | None:
        """vLLM's shape: by token id."""
        entries = output.prompt_logprobs
        if entries is None:
            return None
        return LazyList(None if e is None else self._by_id(e) for e in entries.plain())

    def _by_id(self, entry: TokenLogprobs) -> Json:
        (chosen, *ids), (own, *values) = entry.token_ids, entry.logprobs
        ranked = [(chosen, own, entry.rank), *zip(ids, values, range(1, len(ids) + 1), strict=True)]
        return {
            str(token): {
                "logprob": _finite(value),
                "rank": rank,
                "decoded_token": self._names.text(token),
            }
            for token, value, rank in ranked
        }


def _own_first(entry: TokenLogprobs) -> dict[int, float]:
    """The chosen token's log-probability, then the others', as vLLM orders them."""
    return dict(zip(entry.token_ids, entry.logprobs, strict=True))


def _finite(value: float) -> float:
    return max(value, LEAST_LOGPROB)
