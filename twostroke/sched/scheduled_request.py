"""`ScheduledRequest`: the running state of one request, and the legal changes of its phase:

    WAITING ──admit──▶ PREFILL ──last chunk planned──▶ DECODE ──▶ FINISHED
       │  ▲               │                            ▲ │           ▲
       │  └─── preempt ───┴────────────────────────────┼─┘           │
       └──── its blocks came from another engine ──────┘             │
    any state ──abort, error─────────────────────────────────────────┘

A preempted request keeps its tokens and waits again; its prompt is then all of its tokens. So
preemption needs no fourth state.
"""

from __future__ import annotations

import enum
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from twostroke.kv.cache import KVSequence
from twostroke.kv.transfer import Offer
from twostroke.observe.record import RequestRecord
from twostroke.request import EngineRequest, FinishReason


class Phase(enum.Enum):
    WAITING = "waiting"
    PREFILL = "prefill"
    DECODE = "decode"
    FINISHED = "finished"


LEGAL = {
    Phase.WAITING: {Phase.PREFILL, Phase.DECODE, Phase.FINISHED},
    Phase.PREFILL: {Phase.DECODE, Phase.WAITING, Phase.FINISHED},
    Phase.DECODE: {Phase.WAITING, Phase.FINISHED},
    Phase.FINISHED: set(),
}


@dataclass(slots=True, eq=False)
class ScheduledRequest:
    """A request inside the scheduler, which owns it.

    tokens     [ prompt ........... | committed output ]
    computed   [ ............. kv.num_computed )             planned, launched or done
    pending                                            [ )   sampled in flight, not committed
    """

    engine_request: EngineRequest
    # (aged priority, arrival): the smallest is admitted first, the largest is preempted first
    order: tuple[float, int]
    max_outputs: int  # the smaller of max_tokens and the room that max_model_len leaves
    tokens: list[int]
    kv: KVSequence
    record: RequestRecord
    phase: Phase = Phase.WAITING
    row: int = -1
    pending: int = 0  # tokens sampled by steps in flight
    remaining: int = 0  # output tokens that may still be planned
    finish_reason: FinishReason | None = None
    stop_reason: int | None = None
    offer: Offer | None = None  # of its blocks, if another engine continues the request
    num_offered: int = 0  # prompt tokens whose blocks were offered before the prompt was computed
    part_is_open: bool = False  # the newest offer of a part of the prompt is not released yet
    fetch_failed: bool = False  # the fetch from tiers failed: the request computes its tokens
    prompt_logprobs: list[Any] = field(default_factory=list)
    # Evicted table entries by the position before which they were evicted, and the attention shares
    # of the segments that are left (`kv/eviction.py`). Kept when the request is preempted.
    evictions: dict[int, list[range]] = field(default_factory=dict)
    scores: list[float] = field(default_factory=list)
    request_id: str = ""
    num_prompt: int = 0
    max_length: int = 0  # prompt and output together
    stop_ids: frozenset[int] = frozenset()
    start_by_s: float = 0.0  # the latest start of its prefill that meets ttft_slo_s, if that is set

    def __post_init__(self) -> None:
        self.request_id = self.engine_request.request_id
        self.num_prompt = len(self.engine_request.prompt_token_ids)
        self.remaining = self.max_outputs - self.num_outputs
        if self.engine_request.hand_over:
            self.remaining = 1
        self.max_length = len(self.tokens) + self.remaining
        self.stop_ids = self.engine_request.stop_ids

    def plan_sample(self) -> None:
        """Count the token that the step being planned will sample."""
        self.pending += 1
        self.remaining -= 1

    def note_eviction(self, evicted: list[range]) -> None:
        """Record the table entries that are evicted before the next token is computed."""
        self.evictions[self.kv.num_computed] = evicted
        for entries in evicted:
            segment = entries.start // len(entries)
            del self.scores[segment : segment + 1]

    def add_shares(self, shares: Sequence[float]) -> None:
        """Add the attention of the newest token to each segment of the cache."""
        self.scores += [0.0] * (len(shares) - len(self.scores))
        self.scores = [score + share for score, share in zip(self.scores, shares, strict=False)]

    @property
    def salt(self) -> str:
        return self.engine_request.salt

    @property
    def prediction(self) -> Sequence[int]:
        return self.engine_request.prediction

    @property
    def num_outputs(self) -> int:
        return len(self.tokens) - self.num_prompt

    @property
    def num_to_prefill(self) -> int:
        return len(self.tokens) - self.kv.num_computed

    def set_phase(self, phase: Phase) -> None:
        if phase not in LEGAL[self.phase]:
            raise AssertionError(f"{self.request_id}: {self.phase} → {phase} is not a legal step")
        self.phase = phase
