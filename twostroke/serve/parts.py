"""What the answers of all routes are made of: names, token counts, times, logprobs."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import accumulate, chain, islice
from typing import Any

from twostroke.model.tokenizer import Tokenizer
from twostroke.observe.record import Causes
from twostroke.outputs import Logprob, RequestOutput
from twostroke.serve.pieces import Each

Json = dict[str, Any]
Entry = dict[int, Logprob]  # of one position
LEAST_LOGPROB = -9999.0  # JSON has no -inf


@dataclass(slots=True)
class Counts:
    """Tokens read and written for one answer."""

    prompt: int = 0
    cached: int = 0
    completion: int = 0

    def usage(self, details: bool = True) -> Json:
        usage: Json = {
            "prompt_tokens": self.prompt,
            "completion_tokens": self.completion,
            "total_tokens": self.prompt + self.completion,
        }
        if details:
            usage["prompt_tokens_details"] = {"cached_tokens": self.cached}
        return usage


def count(outputs: Sequence[RequestOutput]) -> Counts:
    return Counts(
        sum(len(output.prompt_token_ids) for output in outputs),
        sum(cached_tokens(output) for output in outputs),
        sum(len(completion.token_ids) for output in outputs for completion in output.outputs),
    )


def cached_tokens(output: RequestOutput) -> int:
    """Of the prompt, what was there already. Continuations of one prompt also share what the
    first of them has computed, which is not counted."""
    return min((record.num_cached for record in output.metrics), default=0)


def timings(outputs: Sequence[RequestOutput]) -> Json | None:
    """llama.cpp's object, measured by the engine: prompt is prefill, predicted is decode.

    A token's time is the gap between tokens, so that the first one, which prefill brought, is not
    counted as decoded in no time. Of several continuations: the slowest's times, all's tokens.
    Then the request's own ledger: what it waited for, what the gaps between its tokens are to be
    blamed on (all continuations' together; they add up to `decode_ms` if there is one), and the
    worst of them.
    """
    records = [record for output in outputs for record in output.metrics]
    if not records:
        return None
    cached = sum(map(cached_tokens, outputs))
    prompt_n = sum(len(output.prompt_token_ids) for output in outputs) - cached
    prompt_ms = max(record.prefill_s for record in records) * 1e3
    predicted_n = sum(len(record.token_s) for record in records)
    predicted_ms = max(record.decode_s for record in records) * 1e3
    gaps = predicted_n - len(records)
    worst = max(records, key=lambda record: record.worst_gap_s)
    return {
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


class LogprobWriter:
    """Logprobs as OpenAI's two APIs write them."""

    def __init__(self, tokenizer: Tokenizer | None, top: int, as_ids: bool) -> None:
        self._tokenizer = tokenizer
        self._top = top
        self._as_ids = as_ids

    def chat(self, token_ids: Sequence[int], entries: Iterable[Entry]) -> Iterator[Json]:
        for token, entry in zip(token_ids, entries, strict=True):
            yield {
                **self._token(token, entry[token]),
                "top_logprobs": [self._token(t, one) for t, one in self._best(entry)],
            }

    def completion(
        self, token_ids: Sequence[int], parts: Sequence[Sequence[Entry | None]], offset: int = 0
    ) -> Json:
        """`parts`: the positions, in order. `offset`: how many characters of the text came before.
        A prompt's first token has no logprob."""
        tokens = [self._text(token) for token in token_ids]
        lengths = accumulate(map(len, tokens), initial=offset)
        return {
            "text_offset": list(islice(lengths, len(tokens))),
            "token_logprobs": Each(map(_own, token_ids, chain(*parts))),
            "tokens": tokens,
            "top_logprobs": Each(map(self._top_of, token_ids, chain(*parts))),
        }

    def _top_of(self, token: int, entry: Entry | None) -> dict[str, float] | None:
        if entry is None:
            return None
        shown = [*self._best(entry), (token, entry[token])]
        return {self._text(t): _finite(one.logprob) for t, one in shown}

    def _best(self, entry: Entry) -> list[tuple[int, Logprob]]:
        return [(t, one) for t, one in entry.items() if (one.rank or 0) <= self._top]

    def _token(self, token: int, one: Logprob) -> Json:
        raw = b"" if self._tokenizer is None else self._tokenizer.token_bytes(token)
        return {
            "token": self._text(token),
            "logprob": _finite(one.logprob),
            "bytes": list(raw),
        }

    def _text(self, token: int) -> str:
        if self._as_ids or self._tokenizer is None:
            return f"token_id:{token}"
        return self._tokenizer.token_text(token)


def _own(token: int, entry: Entry | None) -> float | None:
    return None if entry is None else _finite(entry[token].logprob)


def prompt_logprobs(output: RequestOutput) -> Each | None:
    """vLLM's shape: by token id."""
    if output.prompt_logprobs is None:
        return None
    return Each(
        None
        if entry is None
        else {
            str(token): {
                "logprob": _finite(one.logprob),
                "rank": one.rank,
                "decoded_token": one.decoded_token,
            }
            for token, one in entry.items()
        }
        for entry in output.prompt_logprobs
    )


def _finite(value: float) -> float:
    return max(value, LEAST_LOGPROB)
