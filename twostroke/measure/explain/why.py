"""Splits the time of a request into parts, and names the requests that caused each part.

The ledger comes from the server's records (`/records`), so the time of the client and the network
is not included; `outside` in `twostroke phases` has that time.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

from twostroke.errors import RequestError, did_you_mean
from twostroke.measure.report.tables import duration
from twostroke.observe.record import ENGINE_STEPS, steps_between

Record = dict[str, Any]
SHORT_ID = 17  # "chatcmpl-" and 8 digits, which are unique in a server's records
# Part of a request's time → its colour in a report, and True if it precedes the first token.
# Parts that are not listed are the work of other requests.
PARTS = {
    "tokenising": ("host", True),
    "waiting in the queue": ("queue", True),
    "prefill of its own prompt": ("prefill", True),
    "host, during prefill": ("host", True),
    "decode": ("decode", False),
    "prefill of others, between its tokens": ("prefill", False),
    "preemption": ("preemption", False),
    "host, between its tokens": ("host", False),
    "communication of ranks": ("communication", False),
    "draft model": ("drafting", False),
    "after the last token": ("soft", False),
    "not accounted for": ("soft", False),
}


def short(request_id: str) -> str:
    """Return the beginning of a request id, which `--request` accepts."""
    return request_id if len(request_id) <= SHORT_ID + 1 else f"{request_id[:SHORT_ID]}…"


@dataclass(frozen=True)
class Entry:
    """A part of the request's time, with the requests that caused it, the largest first."""

    part: str
    seconds: float
    because: str = ""
    culprits: tuple[str, ...] = ()


@dataclass(frozen=True)
class Gap:
    """The longest wait between two tokens."""

    seconds: float
    token: int  # index of the token after the gap
    step: int
    cause: str
    culprits: tuple[str, ...]


@dataclass(frozen=True)
class RequestLedger:
    """The parts of one request's time. Their sum is the whole time."""

    request_id: str
    total_s: float
    entries: tuple[Entry, ...]
    worst: Gap | None
    prompt_tokens: int
    cached_tokens: int
    output_tokens: int
    finish_reason: str

    @property
    def largest(self) -> Entry:
        return max(self.entries, key=lambda entry: entry.seconds)

    def sentence(self) -> str:
        largest = self.largest
        share = largest.seconds / self.total_s
        text = f"{short(self.request_id)} took {duration(self.total_s)}, {share:.0%} of it "
        text += largest.part
        if largest.culprits:
            text += f" ({', '.join(map(short, largest.culprits[:2]))})"
        text += "."
        if self.worst is not None and self.worst.seconds > 0.05 * self.total_s:
            gap = self.worst
            owner = f" of {short(gap.culprits[0])}" if gap.culprits else ""
            text += (
                f" The worst gap, {duration(gap.seconds)} before token {gap.token}, was {gap.cause}"
                f"{owner} in step {gap.step}."
            )
        return text

    def as_json(self) -> dict[str, Any]:
        return {
            "request_id": self.request_id,
            "total_ms": 1e3 * self.total_s,
            "sentence": self.sentence(),
            "prompt_tokens": self.prompt_tokens,
            "cached_tokens": self.cached_tokens,
            "output_tokens": self.output_tokens,
            "finish_reason": self.finish_reason,
            "entries": [
                {
                    "part": entry.part,
                    "ms": 1e3 * entry.seconds,
                    "share": entry.seconds / self.total_s,
                    "because": entry.because,
                    "culprits": list(entry.culprits),
                }
                for entry in self.entries
            ],
            "worst_gap": None
            if self.worst is None
            else {
                "ms": 1e3 * self.worst.seconds,
                "before_token": self.worst.token,
                "step": self.worst.step,
                "cause": self.worst.cause,
                "culprits": list(self.worst.culprits),
            },
        }


class Explainer:
    """Explains requests from the records of a server's last seconds."""

    def __init__(self, records: Record) -> None:
        self.requests: list[Record] = records["requests"]
        self.steps: dict[int, Record] = {step["step"]: step for step in records["steps"]}
        # By step: the request id and the tokens of each chunk.
        self._prompts: dict[int, list[tuple[str, int]]] = {}
        for request in self.requests:
            for _, step, _, size in request["chunks"]:
                self._prompts.setdefault(step, []).append((request["request_id"], size))

    def find(self, request_id: str) -> Record:
        begins = request_id.rstrip("…")
        found = [one for one in self.requests if one["request_id"].startswith(begins)]
        if len({one["request_id"].rsplit("-", 1)[0] for one in found}) == 1:
            return found[-1]
        known = [request["request_id"] for request in self.requests]
        if found:
            raise RequestError(
                f"{len(found)} request ids begin with {request_id!r}; give a longer prefix"
            )
        raise RequestError(
            f"no request {request_id!r} has ended in this time"
            f"{did_you_mean(request_id, known)}; look further back with --seconds"
        )

    def slowest(self, count: int) -> list[Record]:
        """Return the requests with the longest total time, the slowest first."""
        return sorted(self.requests, key=_total_s, reverse=True)[:count]

    def explain(self, request: Record) -> RequestLedger:
        total = _total_s(request)
        entries = [e for e in self._entries(request, total) if e.seconds > 0.0005 * total]
        rest = total - sum(entry.seconds for entry in entries)
        entries.append(Entry("not accounted for", rest, "rounding, and parts below 0.05%"))
        return RequestLedger(
            request_id=request["request_id"],
            total_s=total,
            entries=tuple(entries),
            worst=self._worst(request),
            prompt_tokens=request["num_prompt"],
            cached_tokens=request["num_cached"],
            output_tokens=len(request["token_s"]),
            finish_reason=str(request["finish_reason"]),
        )

    # ── parts ───────────────────────────────────────────────────────────────────────────────

    def _entries(self, request: Record, total: float) -> Iterable[Entry]:
        received, end = request["received_s"], request["received_s"] + total
        tokenised = request["tokenised_s"] or received
        scheduled = request["scheduled_s"] or end
        first = request["first_token_s"] or end
        yield Entry("tokenising", tokenised - received, "template and tokenizer")
        yield self._queue(request, tokenised, scheduled)
        yield from self._prefill(request, scheduled, first)
        if request["token_s"]:
            yield from self._decode(request)
            last = request["token_s"][-1]
            yield Entry("after the last token", end - last, "detokenizing and sending")

    def _queue(self, request: Record, start: float, end: float) -> Entry:
        steps = [
            s for s in self.steps.values() if start < s["committed_s"] and s["planned_s"] < end
        ]
        ahead = self._others(request, steps)
        because = ""
        if steps:
            running = max(step["running"] for step in steps)
            because = f"behind {running} running requests"
            if ahead:
                because += f" and the prompts of {len(ahead)} other requests"
        return Entry("waiting in the queue", max(0.0, end - start), because, ahead)

    def _prefill(self, request: Record, start: float, end: float) -> Iterable[Entry]:
        """Split the time by the work of its steps: the request's own prompt, the prompts of other
        requests, and streams. The rest of the time belongs to the host."""
        sizes = {step: size for _, step, _, size in request["chunks"]}
        own = prompts = streams = 0.0
        between = [s for s in self.steps.values() if start < s["committed_s"] <= end + 1e-9]
        for step in between:
            tokens, causes = step["prefill"]["tokens"], step["since_s"]
            if step["decode"]["tokens"]:
                streams += causes["decode"]
            if tokens:
                busy = causes["prefill"] if step["decode"]["tokens"] else step["device_s"]
                share = sizes.get(step["step"], 0) / tokens
                own += busy * share
                prompts += busy * (1 - share)
        taken = max(0.0, end - start)
        own = min(own, taken)
        streams = min(streams, taken - own)
        prompts = min(prompts, taken - own - streams)
        words = f"{request['num_prompt'] - request['num_cached']:,} tokens in {len(sizes)} chunks"
        if request["num_cached"]:
            words += f"; {request['num_cached']:,} more were cached"
        yield Entry("prefill of its own prompt", own, words)
        words = "streams that decoded in the same steps"
        yield Entry("streams of others, during prefill", streams, words)
        words = "prompts that were computed in the same time"
        others = self._others(request, between)
        yield Entry("prompts of others, during prefill", prompts, words, others)
        words = "planning, committing, or a process without CPU time"
        yield Entry("host, during prefill", taken - own - streams - prompts, words)

    def _decode(self, request: Record) -> Iterable[Entry]:
        gaps = request["gaps"]
        numbers = request["token_step"]
        # With several engines: the first token of the engine that wrote the last token.
        first = next(n for n in numbers if n // ENGINE_STEPS == numbers[-1] // ENGINE_STEPS)
        spanned = [step for number, step in self.steps.items() if first < number <= numbers[-1]]
        count = len(request["token_s"])
        yield Entry("decode", gaps["decode"], f"{max(0, count - 1):,} tokens after the first")
        yield Entry(
            "prefill of others, between its tokens",
            gaps["prefill"],
            "prompts that shared its steps",
            self._others(request, [step for step in spanned if step["prefill"]["tokens"]]),
        )
        times = len(request["preempted"])
        lost = sum(tokens for _, tokens in request["preempted"])
        words = f"preempted {times} times, {lost:,} tokens computed again"
        yield Entry("preemption", gaps["preemption"], words)
        yield Entry("host, between its tokens", gaps["host"], "the device was idle")
        comm_s = gaps.get("communication", 0.0)  # missing in older servers
        yield Entry(
            "communication of ranks", comm_s, "reductions over the ranks, and waiting for the ranks"
        )
        drafting_s = gaps.get("drafting", 0.0)  # missing in older servers
        yield Entry("draft model", drafting_s, "its steps, before the drafts were verified")

    def _worst(self, request: Record) -> Gap | None:
        times, numbers = request["token_s"], request["token_step"]
        if len(times) < 2:
            return None
        gaps = [after - before for before, after in pairwise(times)]
        at = max(range(len(gaps)), key=gaps.__getitem__)
        causes = request["worst_gap"] or {}
        cause = max(causes, key=causes.__getitem__) if causes else "not known"
        words = {"prefill": "prefill", "host": "the host", "preemption": "preemption"}
        steps = [
            self.steps[n] for n in steps_between(numbers[at], numbers[at + 1]) if n in self.steps
        ]
        culprits = self._others(request, steps) if cause in ("prefill", "preemption") else ()
        step = max(steps, key=lambda one: one["prefill"]["tokens"], default=None)
        number = numbers[at + 1] if step is None else step["step"]
        return Gap(gaps[at], at + 2, number, words.get(cause, cause), culprits)

    def _others(self, request: Record, steps: Sequence[Record]) -> tuple[str, ...]:
        """Return the ids of other requests with prompts in these steps, most tokens first."""
        tokens: Counter[str] = Counter()
        for step in steps:
            for name, size in self._prompts.get(step["step"], ()):
                if name != request["request_id"]:
                    tokens[name] += size
        return tuple(name for name, _ in tokens.most_common(5))


def _total_s(request: Record) -> float:
    return max(request["finished_s"], request["sent_s"]) - request["received_s"]
