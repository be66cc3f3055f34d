"""Encodes responses as JSON and server-sent events, and makes the fields that all routes share:
head, usage, timings and log-probabilities.

Small values are encoded at once. Long values are encoded in chunks, so that the event loop can do
other work in between.
"""

from __future__ import annotations

import secrets
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import lru_cache
from itertools import accumulate, chain, islice
from math import isnan
from types import GeneratorType
from typing import Any, cast

import msgspec

from twostroke.model.text.tokenizer import Tokenizer
from twostroke.observe.record import NO_TIME, Causes, RequestRecord
from twostroke.outputs import Logprobs, RequestOutput
from twostroke.plan import TokenLogprobs
from twostroke.serve.error_responses import ApiError

CHUNK_BYTES = 16 * 1024  # takes about a millisecond to encode
DONE = b"data: [DONE]\n\n"

Encoded = bytes | Iterator[bytes]  # an iterator for long values


class LazyList:
    """A JSON list whose items are made when they are encoded."""

    __slots__ = ("items",)

    def __init__(self, items: Iterable[Any]) -> None:
        self.items = items


def _listed(value: Any) -> Any:
    if isinstance(value, LazyList):
        return list(value.items)
    if isinstance(value, GeneratorType):
        return list(value)
    raise NotImplementedError(f"{type(value).__name__} cannot be encoded as JSON")


encode_json = msgspec.json.Encoder(enc_hook=_listed).encode


def iter_json(value: Any, before: bytes = b"", after: bytes = b"") -> Iterator[bytes]:
    """Encode a value in chunks of about `CHUNK_BYTES`: objects field by field, lists of objects and
    generators item by item. An item of a `LazyList` must be small."""
    chunk = bytearray(before)
    for token in _tokens(value):
        chunk += token
        if len(chunk) >= CHUNK_BYTES:
            yield bytes(chunk)
            chunk.clear()
    yield bytes(chunk) + after


def _tokens(value: Any) -> Iterator[bytes]:
    if isinstance(value, dict):
        opening = b"{"
        for name, field in value.items():
            yield opening + encode_json(str(name)) + b":"
            yield from _tokens(field)
            opening = b","
        yield b"}" if value else b"{}"
    elif isinstance(value, LazyList):
        yield from _list((encode_json(item),) for item in value.items)
    elif isinstance(value, GeneratorType) or _has_objects(value):
        yield from _list(map(_tokens, value))
    else:
        yield encode_json(value)


def _has_objects(value: Any) -> bool:
    return isinstance(value, list) and bool(value) and isinstance(value[0], dict)


def _list(items: Iterable[Iterable[bytes]]) -> Iterator[bytes]:
    opening = b"["
    for item in items:
        yield opening
        yield from item
        opening = b","
    yield b"]" if opening == b"," else b"[]"


# ── events ──────────────────────────────────────────────────────────────────────────────────────


def event(content: Any, name: str | None = None) -> bytes:
    data = b"data: " + encode_json(content) + b"\n\n"
    return data if name is None else f"event: {name}\n".encode() + data


def long_event(content: Any, name: str | None = None) -> Iterator[bytes]:
    """Encode an event in chunks."""
    begin = b"" if name is None else f"event: {name}\n".encode()
    return iter_json(content, begin + b"data: ", b"\n\n")


def error_event(error: ApiError) -> bytes:
    return event({"error": error.content()})


def concat(events: Sequence[Encoded]) -> Encoded:
    if all(isinstance(each, bytes) for each in events):
        return b"".join(cast(Sequence[bytes], events))
    return chain.from_iterable((each,) if isinstance(each, bytes) else each for each in events)


class TextEventTemplate:
    """Encodes events that differ only in a text. `encode(text)` returns the same bytes as
    `encode_event(text)`, but is faster: the bytes around the text are encoded only once."""

    __slots__ = ("_after", "_before")

    def __init__(self, encode_event: Callable[[str], bytes]) -> None:
        mark = secrets.token_hex(16)
        self._before, self._after = encode_event(mark).split(f'"{mark}"'.encode())

    def encode(self, text: str) -> bytes:
        return self._before + encode_json(text) + self._after


# ── fields ──────────────────────────────────────────────────────────────────────────────────────


Json = dict[str, Any]
MIN_LOGPROB = -9999.0  # JSON has no -inf
MAX_CACHED_TOKENS = 16384  # in a cache of `TokenNames`


@dataclass(frozen=True, slots=True)
class ResponseHead:
    """The fields at the head of every chunk of a response."""

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
    """The number of tokens in the prompt and in the completion of one response."""

    prompt: int = 0
    cached: int = 0
    completion: int = 0
    reasoning: int | None = None  # of the completion; None: reasoning is not parsed
    # Accepted and rejected tokens of a predicted output; None: no token was verified.
    predicted: tuple[int, int] | None = None

    def usage(self, details: bool = True) -> Json:
        usage: Json = {
            "prompt_tokens": self.prompt,
            "completion_tokens": self.completion,
            "total_tokens": self.prompt + self.completion,
        }
        if details:
            usage["prompt_tokens_details"] = {"cached_tokens": self.cached}
            of_completion: Json = {}
            if self.reasoning is not None:
                of_completion["reasoning_tokens"] = self.reasoning
            if self.predicted is not None:
                accepted, rejected = self.predicted
                of_completion["accepted_prediction_tokens"] = accepted
                of_completion["rejected_prediction_tokens"] = rejected
            if of_completion:
                usage["completion_tokens_details"] = of_completion
        return usage

    def add_reasoning(self, tokens: int | None) -> None:
        if tokens is not None:
            self.reasoning = (self.reasoning or 0) + tokens


def count_tokens(outputs: Sequence[RequestOutput]) -> TokenCounts:
    return TokenCounts(
        sum(len(output.prompt_token_ids) for output in outputs),
        sum(cached_tokens(output) for output in outputs),
        sum(len(completion.token_ids) for output in outputs for completion in output.outputs),
        predicted=predicted_tokens(outputs),
    )


def predicted_tokens(outputs: Sequence[RequestOutput]) -> tuple[int, int] | None:
    """Return the accepted and the rejected tokens of predicted outputs; None: none verified."""
    records = [record for output in outputs for record in output.records if record.predicted]
    if not records:
        return None
    accepted = sum(record.predicted_accepted for record in records)
    return accepted, sum(record.predicted for record in records) - accepted


def cached_tokens(output: RequestOutput) -> int:
    """Return the number of prompt tokens found in the prefix cache when the request began. (Later
    continuations of the request also find the tokens that its first continuation has computed.)"""
    return min((record.num_cached for record in output.records), default=0)


def timings(outputs: Sequence[RequestOutput], each_gap: bool = False) -> Json | None:
    """Return llama.cpp's `timings`, measured by the engine: `prompt_…` is prefill, `predicted_…` is
    decode. If there are several continuations, times are those of the slowest one, and tokens are
    summed.

    `predicted_per_token_ms` is the mean gap between tokens, so it does not include the first token,
    which prefill computes. Further fields: the queue time, the gaps between tokens by cause (summed
    over continuations; for one continuation the causes add up to `decode_ms`), the worst gap,
    preemptions, and tokens evicted from the KV cache. `each_gap`: add the causes of each gap.
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
    found |= _tier_fetches(records)
    if drafted := sum(record.drafted for record in records):
        found["draft_n"] = drafted
        found["draft_n_accepted"] = sum(record.accepted for record in records)
    if each_gap:
        causes = records[0].gap_causes if len(records) == 1 else None
        found["token_gaps_ms"] = None if causes is None else LazyList(_gaps_in_ms(causes))
    return found


def _tier_fetches(records: Sequence[RequestRecord]) -> Json:
    """Return the field `kv_fetch`: the longest fetch of a prefix from the tiers below the KV cache,
    with its measured and expected times; {} if there was none."""
    fetches = [record.tier_fetch for record in records if record.tier_fetch is not None]
    if not fetches:
        return {}
    longest = max(fetches, key=lambda fetch: fetch.seconds)
    return {
        "kv_fetch": {
            "outcome": longest.outcome,
            "tiers": longest.tiers,
            "n": longest.tokens,
            "bytes": longest.num_bytes,
            "ms": longest.seconds * 1e3,
            "expected_ms": longest.fetch_expected_s * 1e3,
            "compute_expected_ms": longest.compute_expected_s * 1e3,
        }
    }


def _gaps_in_ms(causes: Sequence[float]) -> Iterator[list[float] | None]:
    """Yield the six causes of each gap, or None for a gap whose causes were dropped."""
    for at in range(0, len(causes), len(NO_TIME)):
        gap = causes[at : at + len(NO_TIME)]
        yield None if isnan(gap[0]) else [round(1e3 * seconds, 3) for seconds in gap]


def request_metrics(outputs: Sequence[RequestOutput]) -> Json | None:
    """Return vLLM's `metrics` (`--enable-per-request-metrics`); None with several choices."""
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
    """Return llama.cpp's `prompt_progress`: the number of prompt tokens in the KV cache."""
    return {
        "total": len(output.prompt_token_ids),
        "cache": output.num_cached_tokens,
        "processed": output.num_prefilled,
    }


class TokenNames:
    """The texts of tokens, cached: log-probabilities may need twenty texts for each token."""

    def __init__(self, tokenizer: Tokenizer | None) -> None:
        self._tokenizer = tokenizer
        self.text = lru_cache(MAX_CACHED_TOKENS)(self._text)
        self.json_around = lru_cache(MAX_CACHED_TOKENS)(self._json_around)

    def _text(self, token: int, as_id: bool = False) -> str:
        if as_id or self._tokenizer is None:
            return f"token_id:{token}"
        return self._tokenizer.token_text(token)

    def _json_around(self, token: int, as_id: bool) -> tuple[bytes, bytes]:
        """Return the JSON before and after the log-probability in the object of a token."""
        raw = b"" if self._tokenizer is None else self._tokenizer.token_bytes(token)
        text = encode_json(self.text(token, as_id))
        return b'{"token":%b,"logprob":' % text, b',"bytes":%b}' % encode_json(list(raw))


class LogprobWriter:
    """Encodes log-probabilities in the formats of OpenAI's chat and completion APIs."""

    def __init__(self, names: TokenNames, top: int, as_ids: bool) -> None:
        """`top`: the length of `top_logprobs` in a chat, including the sampled token; -1: all."""
        self._names = names
        self._top = None if top < 0 else top
        self._as_ids = as_ids

    def chat(self, entries: Logprobs) -> Iterator[msgspec.Raw]:
        """Yield one encoded object for each token. (Encoding dicts would be too slow.)"""
        for entry in entries.plain():
            assert entry is not None
            listed = islice(_sampled_first(entry).items(), self._top)
            top = b",".join([self._token(token, value) for token, value in listed])
            sampled = self._token(entry.token_ids[0], entry.logprobs[0])
            yield msgspec.Raw(b'%b,"top_logprobs":[%b]}' % (sampled[:-1], top))

    def completion(
        self, token_ids: Sequence[int], parts: Sequence[Logprobs | None], offset: int = 0
    ) -> Json:
        """Return the `logprobs` of a completion. `parts`: the log-probabilities of prompt and
        completion, in order; None is skipped. `offset`: the number of characters before the first
        token. The first token of a prompt has no log-probability."""
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
            "top_logprobs": LazyList(map(self._top_by_text, entries())),
        }

    def _top_by_text(self, entry: TokenLogprobs | None) -> dict[str, float] | None:
        if entry is None:
            return None
        return {self._text(token): _finite(value) for token, value in _sampled_first(entry).items()}

    def _token(self, token: int, value: float) -> bytes:
        before, after = self._names.json_around(token, self._as_ids)
        return b"%b%b%b" % (before, repr(_finite(value)).encode(), after)

    def _text(self, token: int) -> str:
        return self._names.text(token, self._as_ids)

    def prompt(self, output: RequestOutput) -> LazyList | None:
        """Return prompt log-probabilities in vLLM's format, by token id."""
        entries = output.prompt_logprobs
        if entries is None:
            return None
        return LazyList(None if e is None else self._by_id(e) for e in entries.plain())

    def _by_id(self, entry: TokenLogprobs) -> Json:
        (sampled, *ids), (logprob, *values) = entry.token_ids, entry.logprobs
        ranks = range(1, len(ids) + 1)
        ranked = [(sampled, logprob, entry.rank), *zip(ids, values, ranks, strict=True)]
        return {
            str(token): {
                "logprob": _finite(value),
                "rank": rank,
                "decoded_token": self._names.text(token),
            }
            for token, value, rank in ranked
        }


def _sampled_first(entry: TokenLogprobs) -> dict[int, float]:
    """Return log-probabilities by token: the sampled token first, as in vLLM."""
    return dict(zip(entry.token_ids, entry.logprobs, strict=True))


def _finite(value: float) -> float:
    return max(value, MIN_LOGPROB)
