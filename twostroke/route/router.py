"""`Router`: which engine a request goes to, and whether another decodes what the first prefilled.

Decided from what the server itself knows: what it has sent to each engine and not had back, which
beginnings of prompts each has computed, and what its steps and hand-overs took. The same numbers
give the same decision, and every decision says why.

In pools, a request is prefilled by the prefill engine that will have computed it first (prompt
tokens queued there, and those of the prompt that are not cached there), and handed over to the
decode engine with the fewest streams. It is prefilled by a decode engine itself where that holds up
the streams there for less time than a hand-over takes: short prompts, and those whose beginning is
cached there. Where a pool has no engine that is up, the other does its work.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass, field
from enum import StrEnum
from typing import NamedTuple

from twostroke.observe.record import StepRecord

FIRST_MARK = (
    64  # tokens that the first of a prompt's marks stands for; each other for twice as many
)
MAX_MARKS = 8192  # that are remembered of one engine
STREAM_TOKENS = 64  # prompt tokens that a stream weighs as much as, where engines do both phases
NEWEST = 0.1  # weight of the newest value in a moving average


class Role(StrEnum):
    PREFILL = "prefill"
    DECODE = "decode"
    BOTH = "engine"


@dataclass(slots=True, eq=False)
class EngineState:
    """What is known here of one engine."""

    name: str
    role: Role
    up: bool = True
    queued_tokens: int = 0  # of prompts that it was sent and has not computed
    streams: int = 0  # requests that it was sent and that have not left it
    prefill_s: float = 0.0  # of a prompt token, in its last steps; 0: not known
    _marks: OrderedDict[str, None] = field(default_factory=OrderedDict)

    def num_cached(self, marks: Sequence[str]) -> int:
        """Tokens of a prompt's beginning that it has computed not long ago."""
        for n in range(len(marks) - 1, -1, -1):
            if marks[n] in self._marks:
                return FIRST_MARK << n
        return 0

    def note_prompt(self, marks: Sequence[str]) -> None:
        for mark in marks:
            self._marks[mark] = None
            self._marks.move_to_end(mark)
        while len(self._marks) > MAX_MARKS:
            self._marks.popitem(last=False)

    def forget_prompts(self) -> None:
        self._marks.clear()

    def add_step(self, record: StepRecord) -> None:
        """Learn from a step what a prompt token takes."""
        tokens = record.prefill.tokens
        if tokens:
            took_s = max(0.0, record.device_s - record.since_s.decode) / tokens
            self.prefill_s = moving(self.prefill_s, took_s)


class Placement(NamedTuple):
    engine: EngineState
    hand_over: bool  # it only prefills
    uncached: int  # prompt tokens that it will have to compute
    reason: str


class Router:
    def __init__(self, engines: Sequence[EngineState]) -> None:
        self.engines = engines
        self.hand_over_s = 0.0  # first token → second, of late; 0: not known

    def note_hand_over(self, seconds: float) -> None:
        self.hand_over_s = moving(self.hand_over_s, seconds)

    def place(
        self, num_tokens: int, marks: Sequence[str], one_token: bool = False
    ) -> Placement | None:
        """Where a prompt of so many tokens is to be computed; None if no engine is up.
        `one_token`: it writes no more than that."""
        prefill, decode, both = (self._up(role) for role in Role)
        if both:
            return self._place_among(both, num_tokens, marks)
        if not prefill or not decode:
            whole = self._place_among(prefill or decode, num_tokens, marks)
            if whole is None:
                return None
            missing = Role.DECODE if prefill else Role.PREFILL
            return whole._replace(reason=f"{whole.reason}; no {missing} engine is up")
        if not one_token and (direct := self._place_directly(decode, num_tokens, marks)):
            return direct
        engine = min(prefill, key=lambda one: one.queued_tokens + uncached(one, num_tokens, marks))
        left = uncached(engine, num_tokens, marks)
        reason = f"prefilled by {engine.name}: {engine.queued_tokens} tokens before it"
        if left < num_tokens:
            reason += f", {num_tokens - left} of {num_tokens} cached"
        return Placement(engine, not one_token, left, reason)

    def place_decode(self) -> EngineState | None:
        """Who is to go on with a request that has been prefilled; None: no decode engine is up."""
        return min(self._up(Role.DECODE), key=lambda one: one.streams, default=None)

    def _place_directly(
        self, decode: list[EngineState], num_tokens: int, marks: Sequence[str]
    ) -> Placement | None:
        """A decode engine that does the whole, where that costs less than handing over."""
        if not self.hand_over_s:
            return None

        def held_up_s(one: EngineState) -> float:
            """What its streams wait for the prompt, together."""
            prompt_s = one.prefill_s * (one.queued_tokens + uncached(one, num_tokens, marks))
            return prompt_s * max(1, one.streams) if one.prefill_s else float("inf")

        engine = min(decode, key=held_up_s)
        cost_s, left = held_up_s(engine), uncached(engine, num_tokens, marks)
        if cost_s > self.hand_over_s:
            return None
        return Placement(
            engine,
            False,
            left,
            f"prefilled by {engine.name} itself: {left} tokens hold up its {engine.streams} "
            f"streams for {1e3 * cost_s:.1f} ms, and a hand-over takes "
            f"{1e3 * self.hand_over_s:.1f} ms",
        )

    def _place_among(
        self, engines: list[EngineState], num_tokens: int, marks: Sequence[str]
    ) -> Placement | None:
        """The engine that is least busy, what is cached there counted."""

        def busy(one: EngineState) -> int:
            streams = STREAM_TOKENS * one.streams
            return one.queued_tokens + streams + uncached(one, num_tokens, marks)

        if not engines:
            return None
        engine = min(engines, key=busy)
        left = uncached(engine, num_tokens, marks)
        reason = (
            f"{engine.name}: {engine.queued_tokens} tokens before it, {engine.streams} streams, "
            f"{num_tokens - left} of {num_tokens} tokens cached"
        )
        return Placement(engine, False, left, reason)

    def _up(self, role: Role) -> list[EngineState]:
        return [one for one in self.engines if one.up and one.role is role]


def uncached(engine: EngineState, num_tokens: int, marks: Sequence[str]) -> int:
    return num_tokens - min(num_tokens - 1, engine.num_cached(marks))


def moving(average: float, value: float) -> float:
    return value if not average else (1 - NEWEST) * average + NEWEST * value
