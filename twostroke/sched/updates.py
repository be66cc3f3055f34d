"""The scheduler's reports: `Update` for one request, `CommitResult` for one committed step."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import NamedTuple

from twostroke.kv.transfer import Offer
from twostroke.observe.record import RequestRecord
from twostroke.plan import TokenLogprobs
from twostroke.request import FinishReason
from twostroke.sched.scheduled_request import ScheduledRequest


class Update(NamedTuple):
    """News of one request: new tokens, its end, or both."""

    request_id: str
    tokens: tuple[int, ...]
    logprobs: tuple[TokenLogprobs, ...] = ()
    finish_reason: FinishReason | None = None
    stop_reason: int | None = None
    prompt_logprobs: tuple[TokenLogprobs, ...] | None = None  # with the first token
    record: RequestRecord | None = None  # with the end
    error: str = ""
    progress: int = 0  # prompt tokens computed so far, during prefill
    impossible: bool = False  # the request itself caused the error: no engine can run it
    # KV blocks for the engine that continues the request. With a finish reason: all blocks.
    # Without: the blocks of the prompt that are computed so far.
    offer: Offer | None = None


@dataclass(slots=True)
class CommitResult:
    """The updates of a committed step, and its tokens counted by the gap before each of them.

    Metrics and records are made from the counts. Nearly all tokens are `regular`: their stream also
    got a token from the step before. The other tokens are passed to `add_irregular`.
    """

    updates: list[Update] = field(default_factory=list)
    regular: int = 0
    # Streams that skipped a step or were recomputed; True: the stream had a decode slot.
    late: list[tuple[RequestRecord, bool]] = field(default_factory=list)
    first: list[RequestRecord] = field(default_factory=list)  # streams that begin with this step
    drafted: int = 0  # tokens after the first token of their stream in this step
    # Streams from another engine with their first token here, and the time of the token before it.
    resumed: list[tuple[RequestRecord, float]] = field(default_factory=list)

    def add_irregular(self, request: ScheduledRequest, step: int, has_slot: bool) -> None:
        """Count a token that is about to be appended to `request.record`."""
        record = request.record
        if record.token_step:
            if record.token_step[-1] == step:
                self.drafted += 1
            else:
                self.late.append((record, has_slot))
        elif request.engine_request.resumed is None:
            self.first.append(record)
        else:
            self.resumed.append((record, request.engine_request.resumed.last_s))

    @property
    def num_irregular(self) -> int:
        return len(self.late) + len(self.first) + len(self.resumed) + self.drafted


def join_drafted(updates: list[Update]) -> list[Update]:
    """Join consecutive updates of the same request into one update."""
    joined: list[Update] = []
    for update in updates:
        last = joined[-1] if joined else None
        if last is None or last.request_id != update.request_id:
            joined.append(update)
        else:
            joined[-1] = update._replace(
                tokens=last.tokens + update.tokens,
                logprobs=last.logprobs + update.logprobs,
                prompt_logprobs=last.prompt_logprobs,
            )
    return joined
