"""`RequestOutput` and its parts: the results for users, with vLLM's names."""

from __future__ import annotations

from array import array
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from itertools import count, repeat
from time import monotonic, time
from typing import Any, NamedTuple

from twostroke.observe.record import RequestRecord
from twostroke.plan import TokenLogprobs


class Logprob(NamedTuple):
    logprob: float
    rank: int | None = None  # 1 is the most likely
    decoded_token: str | None = None


class Logprobs(Sequence[Any]):
    """A sequence with a `dict[int, Logprob]` for each position: the most likely tokens in order of
    rank, and the sampled token, whose rank may be lower. The first position of a prompt is None.

    An output with many completions may have a million entries, so entries are stored in arrays, in
    8 bytes each instead of some 150. A dict is made when it is read.
    """

    __slots__ = ("_ends", "_ids", "_named", "_ranks", "_text", "_values")

    def __init__(
        self, text: Callable[[int], str | None] | None = None, named: bool = False
    ) -> None:
        """`text`: returns the text of a token. `named`: the entries are the tokens of
        `logprob_token_ids`, whose ranks are unknown, instead of the most likely tokens."""
        self._text = text
        self._named = named
        self._ids, self._values = array("i"), array("f")  # the sampled token of a position first
        self._ends, self._ranks = array("q"), array("i")  # one entry a position

    def add(self, entry: TokenLogprobs | None) -> None:
        if entry is not None:
            self._ids.extend(entry.token_ids)
            self._values.extend(entry.logprobs)
        self._ends.append(len(self._ids))
        self._ranks.append(0 if entry is None else entry.rank)

    def extend(self, others: Logprobs) -> None:
        before = len(self._ids)
        self._ids.extend(others._ids)
        self._values.extend(others._values)
        self._ends.extend(before + end for end in others._ends)
        self._ranks.extend(others._ranks)

    def take(self) -> Logprobs:
        """Move all entries to a new object."""
        taken = Logprobs(self._text, self._named)
        for name in ("_ids", "_values", "_ends", "_ranks"):
            full = getattr(self, name)
            setattr(taken, name, full)
            setattr(self, name, array(full.typecode))
        return taken

    def copy(self) -> Logprobs:
        """Return a copy that does not grow."""
        same = Logprobs(self._text, self._named)
        same._ids, same._values = self._ids[:], self._values[:]
        same._ends, same._ranks = self._ends[:], self._ranks[:]
        return same

    def plain(self) -> Iterator[TokenLogprobs | None]:
        """Iterate over the entries as they were added, which is faster than making dicts."""
        begin = 0
        for end, rank in zip(self._ends, self._ranks, strict=True):
            ids, values = self._ids[begin:end], self._values[begin:end]
            yield TokenLogprobs(tuple(ids), tuple(values), rank) if ids else None
            begin = end

    def __len__(self) -> int:
        return len(self._ends)

    def __getitem__(self, which: Any) -> Any:
        if isinstance(which, slice):
            return [self[n] for n in range(*which.indices(len(self)))]
        at = which + len(self) if which < 0 else which
        if not 0 <= at < len(self):
            raise IndexError("position out of range")
        begin, end = self._ends[at - 1] if at else 0, self._ends[at]
        if begin == end:
            return None
        (chosen, *best), (own, *values) = self._ids[begin:end], self._values[begin:end]
        text = self._text or (lambda _: None)
        ranks = repeat(None) if self._named else count(1)
        entry = {
            token: Logprob(value, rank, text(token))
            for token, value, rank in zip(best, values, ranks, strict=False)
        }
        entry[chosen] = Logprob(own, self._ranks[at], text(chosen))
        return entry

    def __eq__(self, other: object) -> bool:
        return list(self) == (list(other) if isinstance(other, Sequence) else other)

    def __repr__(self) -> str:
        return repr(list(self))


@dataclass(slots=True)
class CompletionOutput:
    """One completion. In a "delta" stream, text and ids are the new part."""

    index: int
    text: str = ""
    token_ids: list[int] = field(default_factory=list)
    cumulative_logprob: float | None = None
    logprobs: Logprobs | None = None
    finish_reason: str | None = None  # stop, length, abort, error
    stop_reason: int | str | None = None  # the stop string or stop token that ended it

    @property
    def finished(self) -> bool:
        return self.finish_reason is not None


@dataclass(frozen=True, slots=True)
class RequestMetrics:
    """The times of a request in seconds, with vLLM's names. Names in `_ts` are times of the
    monotonic clock, `arrival_time` is Unix time. 0: it has not happened."""

    num_generation_tokens: int  # of all completions
    arrival_time: float
    received_ts: float
    queued_ts: float
    scheduled_ts: float
    first_token_ts: float  # the earliest of all completions
    last_token_ts: float
    tpot_s: float  # mean over the completions with more than one token

    @classmethod
    def of(cls, records: Sequence[RequestRecord]) -> RequestMetrics:
        begun = [record for record in records if record.token_s] or records
        first = min(begun, key=lambda record: record.first_token_s)
        tpots = [record.tpot_s for record in records if len(record.token_s) > 1]
        return cls(
            num_generation_tokens=sum(len(record.token_s) for record in records),
            arrival_time=time() - (monotonic() - first.received_s),
            received_ts=first.received_s,
            queued_ts=first.queued_s,
            scheduled_ts=first.scheduled_s,
            first_token_ts=first.first_token_s,
            last_token_ts=max(record.token_s[-1] if record.token_s else 0.0 for record in records),
            tpot_s=sum(tpots) / len(tpots) if tpots else 0.0,
        )

    @property
    def ttft_s(self) -> float:
        return max(0.0, self.first_token_ts - self.received_ts)

    first_token_latency = ttft_s  # vLLM's name


@dataclass(slots=True)
class RequestOutput:
    request_id: str
    prompt: str | None
    prompt_token_ids: list[int]
    outputs: list[CompletionOutput]
    finished: bool = False
    prompt_logprobs: Logprobs | None = None  # the first entry is None
    num_cached_tokens: int = 0
    # A record for each completion that has ended, with the time of every token:
    records: list[RequestRecord] = field(default_factory=list, repr=False)
    num_prefilled: int = 0  # prompt tokens computed so far, if progress was requested
    error: str = ""  # why the engine could not complete the request
    impossible: bool = False  # the request itself caused the error: no engine can run it

    @property
    def metrics(self) -> RequestMetrics | None:
        """The times of the request; None while no completion has ended."""
        return RequestMetrics.of(self.records) if self.records else None


class Deltas:
    """Makes deltas of the growing output of one request. Log-probabilities are moved out of the
    output, not copied."""

    def __init__(self) -> None:
        # By index of the completion: token ids and characters delivered; -1: its end was delivered.
        self._sent: dict[int, tuple[int, int]] = {}

    def take(self, output: RequestOutput) -> RequestOutput:
        """Return the part of the output that is new since the last call."""
        fresh = []
        for completion in output.outputs:
            ids, chars = self._sent.get(completion.index, (0, 0))
            if ids < 0:
                continue
            token_ids, text = completion.token_ids[ids:], completion.text[chars:]
            if token_ids or text or completion.finish_reason is not None:
                logprobs = completion.logprobs
                # Positional, not `replace`: this runs once for every token of every stream.
                fresh.append(
                    CompletionOutput(
                        completion.index,
                        text,
                        token_ids,
                        completion.cumulative_logprob,
                        None if logprobs is None else logprobs.take(),
                        completion.finish_reason,
                        completion.stop_reason,
                    )
                )
            ended = completion.finish_reason is not None
            self._sent[completion.index] = (
                (-1, -1) if ended else (ids + len(token_ids), chars + len(text))
            )
        return RequestOutput(
            output.request_id,
            output.prompt,
            output.prompt_token_ids,
            fresh,
            finished=output.finished,
            prompt_logprobs=output.prompt_logprobs,
            num_cached_tokens=output.num_cached_tokens,
            records=list(output.records),
            num_prefilled=output.num_prefilled,
            error=output.error,
            impossible=output.impossible,
        )


def snapshot(output: RequestOutput) -> RequestOutput:
    """Return a copy that does not grow."""
    outputs = []
    for completion in output.outputs:
        logprobs = completion.logprobs
        outputs.append(
            replace(
                completion,
                token_ids=list(completion.token_ids),
                logprobs=None if logprobs is None else logprobs.copy(),
            )
        )
    return replace(output, outputs=outputs, records=list(output.records))
