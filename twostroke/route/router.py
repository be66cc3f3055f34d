"""`Router`: chooses the engine of a request, and whether another engine decodes it after prefill.

Decisions use only data that the server has: the requests in each engine, the beginnings of the
prompts that each engine has computed, and the times of steps, fetches and hand-overs. The same data
give the same decision. Every decision has a reason in words.

The cost of an engine is the time that all requests together wait because of the decision:

    this request    prompts queued there  +  the part of its prompt that is not cached
                    +  its decode steps
    streams there   stop for its prompt, and have longer steps while it writes

So a prompt goes to the engine that has its beginning cached, until the queue there costs more than
computing the prompt elsewhere. Engines that do both phases are compared by this cost. With pools,
there are three ways:

    prefill, hand over  queue and prompt at a prefill engine  +  the hand-over: its own time, and
                        the fetch, which the streams of the decode engine wait for
    prefill at decode   queue and prompt at a decode engine  +  the wait of its streams, of which
                        each second counts `GAP_WEIGHT` times
    decode at prefill   if the few tokens that may be written take less time than a hand-over

If no engine of a pool is up, the other pool does its work.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from enum import StrEnum
from typing import NamedTuple

from twostroke.observe.record import StepRecord
from twostroke.request import FIRST_MARK_TOKENS
from twostroke.route.costs import DecodeCosts, PrefillCosts, StepCosts

MAX_MARKS = 8192  # remembered marks (`Prompt.marks`) of one engine
NEWEST = 0.1  # weight of the newest value in a moving average
MIN_HAND_OVERS = 8  # before their average time is used, because the first hand-overs are slower
OLD_S = 10.0  # an engine's costs are dropped if another engine's are newer by this time
GAP_WEIGHT = 4  # weight of a second between two tokens; a second before the first token has 1
# The costs until steps have been seen, so that engines can be compared.
FIRST_PREFILL, FIRST_DECODE = PrefillCosts(1e-4, 0.0), DecodeCosts(0.0, 2.5e-5, 0.0)
FIRST_ANSWER = 128.0  # the expected tokens of an answer until answers have been seen


class Role(StrEnum):
    PREFILL = "prefill"
    DECODE = "decode"
    BOTH = "engine"


class Prompt(NamedTuple):
    """The prompt of a request, as far as the router needs it."""

    num_tokens: int
    marks: Sequence[str] = ()  # digests of the first 64, 128, 256, … tokens, with the salt
    session: str = ""  # digest of the name of its conversation, with the salt
    max_tokens: int | None = None  # of the rest of the answer


class Queued(NamedTuple):
    """The part of a prompt that an engine has not computed yet, and the expected time."""

    tokens: int = 0
    seconds: float = 0.0


NOTHING = Queued()


@dataclass(slots=True, eq=False)
class EngineState:
    """The router's data about one engine."""

    name: str
    role: Role
    up: bool = True
    queued_tokens: int = 0  # prompt tokens that the engine has not computed yet
    queued_s: float = 0.0  # the expected time of these tokens
    queued: int = 0  # requests whose prompts the engine has not computed yet
    streams: int = 0  # requests in the engine that have their first token
    promised: int = 0  # requests that another engine prefills and this engine will decode
    capacity_tokens: int = 0  # of the KV cache; 0: unknown
    token_bytes: float = 0.0  # of a token's keys and values
    bytes_per_s: float = 0.0  # recent speed of fetching blocks; 0: unknown
    positions: int = 0  # cached positions to which the last decode step attended
    costs: StepCosts = field(default_factory=StepCosts)
    _marks: OrderedDict[str, int] = field(default_factory=OrderedDict)  # tokens of each mark
    _marked_tokens: int = 0
    _sessions: OrderedDict[str, int] = field(default_factory=OrderedDict)  # tokens of each session

    def num_cached(self, prompt: Prompt) -> int:
        """Return how many first tokens of a prompt the engine has computed; at most all but one."""
        marks, known = prompt.marks, self._marks
        cached = next((FIRST_MARK_TOKENS << n for n in _last_first(marks) if marks[n] in known), 0)
        # If no mark is known, the conversation begins differently now: the session does not count.
        if cached or not marks:
            cached = max(cached, self._sessions.get(prompt.session, 0))
        return min(prompt.num_tokens - 1, cached)

    def note_prompt(self, prompt: Prompt) -> None:
        """Note a prompt that the engine computes. Drop the oldest prompts, each from its end."""
        for n in _last_first(prompt.marks):
            mark = prompt.marks[n]
            tokens = FIRST_MARK_TOKENS << max(0, n - 1)  # more than the previous mark has
            if mark not in self._marks:
                self._marks[mark] = tokens
                self._marked_tokens += tokens
            self._marks.move_to_end(mark)
        max_tokens = self.capacity_tokens or float("inf")
        while len(self._marks) > MAX_MARKS or self._marked_tokens > max_tokens:
            self._marked_tokens -= self._marks.popitem(last=False)[1]
        self.note_session(prompt.session, prompt.num_tokens)

    def note_part(self, prompt: Prompt, num_tokens: int) -> None:
        """Note that the engine has the first `num_tokens` tokens of a prompt."""
        marks = prompt.marks[: (num_tokens // FIRST_MARK_TOKENS).bit_length()]
        self.note_prompt(Prompt(num_tokens, marks))

    def note_session(self, session: str, num_tokens: int) -> None:
        """Note how many tokens of a conversation the engine has."""
        if session:
            self._sessions[session] = num_tokens
            self._sessions.move_to_end(session)
            if len(self._sessions) > MAX_MARKS:
                self._sessions.popitem(last=False)

    def forget_prompts(self) -> None:
        self._marks.clear()
        self._sessions.clear()
        self._marked_tokens = 0

    def add_queued(self, queued: Queued) -> None:
        self.queued_tokens += queued.tokens
        self.queued_s += queued.seconds
        self.queued += 1

    def remove_queued(self, queued: Queued) -> None:
        self.queued_tokens -= queued.tokens
        self.queued_s -= queued.seconds
        self.queued -= 1
        if not self.queued:
            self.queued_s = 0.0  # remove rounding errors

    def add_step(self, record: StepRecord) -> None:
        if record.decode.rows:
            self.positions = record.decode.kv_tokens
        self.costs.add_step(record)

    def forget_costs(self) -> None:
        self.costs, self.bytes_per_s = StepCosts(), 0.0

    def add_fetch(self, num_bytes: int, seconds: float) -> None:
        if num_bytes and seconds:
            self.bytes_per_s = moving(self.bytes_per_s, num_bytes / seconds)

    def fetch_s(self, num_tokens: int) -> float:
        """Return the expected time to fetch the blocks of `num_tokens` tokens; 0 if unknown."""
        return num_tokens * self.token_bytes / self.bytes_per_s if self.bytes_per_s else 0.0


class Placement(NamedTuple):
    engine: EngineState
    hand_over: bool  # another engine will decode
    queued: Queued  # the part that the engine has to compute
    reason: str


class Candidate(NamedTuple):
    """An engine that might get a prompt, and the prompt's work in this engine."""

    engine: EngineState
    num_cached: int
    queued: Queued  # the rest of the prompt

    @property
    def first_token_s(self) -> float:
        return self.engine.queued_s + self.queued.seconds


class Router:
    def __init__(self, engines: Sequence[EngineState]) -> None:
        self.engines = engines
        # Average time from first to second token without the fetch; 0 until `MIN_HAND_OVERS`.
        self.hand_over_s = 0.0
        self._hand_overs = 0
        self._hand_over_s = 0.0  # the same average, from the first hand-over
        self.answer_tokens = FIRST_ANSWER  # recent length of answers

    def note_hand_over(self, seconds: float, fetch_s: float) -> None:
        self._hand_overs += 1
        weight = max(NEWEST, 1 / self._hand_overs)
        self._hand_over_s += weight * (max(1e-6, seconds - fetch_s) - self._hand_over_s)
        if self._hand_overs >= MIN_HAND_OVERS:
            self.hand_over_s = self._hand_over_s

    def note_answer(self, num_tokens: int) -> None:
        self.answer_tokens = moving(self.answer_tokens, num_tokens)

    # ── decisions ───────────────────────────────────────────────────────────────────────────

    def place(self, prompt: Prompt) -> Placement | None:
        """Choose the engine that computes a prompt; None if no engine is up."""
        self._forget_old_costs()
        prefill, decode, both = (self._up(role) for role in Role)
        if both:
            return self._place_among(both, prompt)
        if not prefill or not decode:
            whole = self._place_among(prefill or decode, prompt)
            if whole is None:
                return None
            missing = Role.DECODE if prefill else Role.PREFILL
            return whole._replace(reason=f"{whole.reason}; no {missing} engine is up")
        best = min(self._candidates(prefill, prompt), key=lambda each: each.first_token_s)
        reason = f"prefilled by {best.engine.name}: {best.engine.queued_tokens} tokens before it"
        if best.num_cached:
            reason += f", {best.num_cached} of {prompt.num_tokens} cached"
        through = Placement(best.engine, True, best.queued, reason)
        if prompt.max_tokens == 1:
            return through._replace(hand_over=False)
        return self._place_directly(through, decode, prompt) or through

    def place_decode(self, prompt: Prompt, chosen: EngineState | None = None) -> Placement | None:
        """Choose the engine that continues a prefilled request; None if no decode engine is up.
        `chosen`: the engine that was chosen during prefill, if there is one."""
        self._forget_old_costs()
        decode = self._up(Role.DECODE)
        candidates = self._candidates([chosen] if chosen in decode else decode, prompt)
        if not candidates:
            return None
        writing_s = self._writing_costs(prompt)
        best = min(candidates, key=lambda each: self._hand_over_to_s(each) + writing_s(each.engine))
        name, streams = best.engine.name, best.engine.streams
        reason = f"handed over to {name}: {streams} streams there"
        if self.hand_over_s:
            reason = (
                f"handed over to {name}: saves {_ms(best.queued.seconds * streams)} of gaps of "
                f"{streams} streams there, costs {_ms(self._hand_over_to_s(best))}"
            )
        return Placement(best.engine, False, NOTHING, reason)

    def _place_directly(
        self, through: Placement, decode: list[EngineState], prompt: Prompt
    ) -> Placement | None:
        """Choose one engine for both phases, if that costs less than the hand-over `through`."""
        known = [engine.costs for engine in self.engines]
        if not (self.hand_over_s and any(costs.prefill for costs in known)):
            return None
        candidates = self._candidates(decode, prompt)
        hand_over_s = min(map(self._hand_over_to_s, candidates))
        if any(costs.decode for costs in known) and (
            kept := self._decode_at_prefill(through, prompt, hand_over_s)
        ):
            return kept
        return self._prefill_at_decode(through, candidates, prompt, hand_over_s)

    def _decode_at_prefill(
        self, through: Placement, prompt: Prompt, hand_over_s: float
    ) -> Placement | None:
        """Choose the prefill engine for both phases, if that is faster than a hand-over."""
        if prompt.max_tokens is None:
            return None
        engine, more = through.engine, prompt.max_tokens - 1
        costs = engine.costs.decode or self._usual_decode()
        tail_s = more * costs.step_s(1, prompt.num_tokens) * (1 + engine.queued)
        if tail_s > hand_over_s:
            return None
        times = f"{more} tokens take {_ms(tail_s)}, a hand-over {_ms(hand_over_s)}"
        reason = f"{through.reason}, and decoded there: {times}"
        return through._replace(hand_over=False, reason=reason)

    def _prefill_at_decode(
        self, through: Placement, candidates: list[Candidate], prompt: Prompt, hand_over_s: float
    ) -> Placement | None:
        """Choose a decode engine for both phases, if its streams and this request then wait less in
        total than with a hand-over."""

        def cost_s(candidate: Candidate) -> float:
            streams = max(1, candidate.engine.streams)  # an idle engine may get a stream
            return candidate.first_token_s + GAP_WEIGHT * candidate.queued.seconds * streams

        best = min(candidates, key=cost_s)
        through_s = through.engine.queued_s + through.queued.seconds + hand_over_s
        if cost_s(best) > through_s:
            return None
        tokens, seconds = best.queued
        reason = (
            f"prefilled by {best.engine.name} itself: {tokens} of {prompt.num_tokens} tokens hold "
            f"up its {best.engine.streams} streams for {_ms(seconds)}, and by way of "
            f"{through.engine.name} it takes {_ms(through_s)}"
        )
        return Placement(best.engine, False, best.queued, reason)

    def _place_among(self, engines: list[EngineState], prompt: Prompt) -> Placement | None:
        """Choose the engine with the shortest total wait, among engines that do both phases."""
        writing_s = self._writing_costs(prompt)

        def cost_s(candidate: Candidate) -> float:
            stopped_s = candidate.queued.seconds * candidate.engine.streams
            return candidate.first_token_s + stopped_s + writing_s(candidate.engine)

        candidates = self._candidates(engines, prompt)
        if not candidates:
            return None
        best = min(candidates, key=cost_s)
        engine = best.engine
        reason = (
            f"{engine.name}: {engine.queued_tokens} tokens before it, {engine.streams} streams, "
            f"{best.num_cached} of {prompt.num_tokens} tokens cached"
        )
        longest = max(candidates, key=lambda each: each.num_cached)
        if longest.num_cached > best.num_cached:
            more_s = cost_s(longest) - cost_s(best)
            name = longest.engine.name
            reason += f" ({longest.num_cached} at {name}, which costs {_ms(more_s)} more)"
        return Placement(engine, False, best.queued, reason)

    # ── costs ───────────────────────────────────────────────────────────────────────────────

    def _candidates(self, engines: list[EngineState], prompt: Prompt) -> list[Candidate]:
        usual, num_tokens, candidates = self._usual_prefill(), prompt.num_tokens, []
        for engine in engines:
            cached = engine.num_cached(prompt)
            seconds = (engine.costs.prefill or usual).prompt_s(num_tokens, cached)
            candidates.append(Candidate(engine, cached, Queued(num_tokens - cached, seconds)))
        return candidates

    def _writing_costs(self, prompt: Prompt) -> Callable[[EngineState], float]:
        """Return a function for the cost of decoding in an engine: the time of the request's steps,
        and the time by which the request makes the steps of the other streams longer."""
        usual, length = self._usual_decode(), prompt.num_tokens
        num_tokens = min(prompt.max_tokens or self.answer_tokens, self.answer_tokens)

        def writing_s(engine: EngineState) -> float:
            costs = engine.costs.decode or usual
            streams = engine.streams + engine.promised + engine.queued
            positions = engine.positions if engine.streams else 0
            own_s = costs.step_s(streams + 1, positions + length)
            return num_tokens * (own_s + streams * (costs.stream + costs.position * length))

        return writing_s

    def _hand_over_to_s(self, to: Candidate) -> float:
        """Return the cost of a hand-over to a decode engine, with the wait of its streams."""
        fetch_s = to.engine.fetch_s(to.queued.tokens)
        return self.hand_over_s + fetch_s * (1 + to.engine.streams)

    def _forget_old_costs(self) -> None:
        """Drop the costs of engines that had no work lately, so that they are tried again."""
        newest_s = max((engine.costs.learnt_s for engine in self.engines), default=0.0)
        for engine in self.engines:
            if 0.0 < engine.costs.learnt_s < newest_s - OLD_S:
                engine.forget_costs()

    def _usual_prefill(self) -> PrefillCosts:
        """Return the costs for an engine whose own costs are unknown: those of another engine,
        preferably of one that prefills."""
        costs = (engine.costs.prefill for engine in self._with_role_last(Role.DECODE))
        return next(filter(None, costs), FIRST_PREFILL)

    def _usual_decode(self) -> DecodeCosts:
        costs = (engine.costs.decode for engine in self._with_role_last(Role.PREFILL))
        return next(filter(None, costs), FIRST_DECODE)

    def _with_role_last(self, role: Role) -> Iterator[EngineState]:
        """Yield all engines, the engines with this role last."""
        yield from (engine for engine in self.engines if engine.role is not role)
        yield from (engine for engine in self.engines if engine.role is role)

    def _up(self, role: Role) -> list[EngineState]:
        return [engine for engine in self.engines if engine.up and engine.role is role]


def _last_first(marks: Sequence[str]) -> range:
    return range(len(marks) - 1, -1, -1)


def _ms(seconds: float) -> str:
    ms = 1e3 * seconds
    return f"{ms:.1f} ms" if ms < 10 else f"{ms:,.0f} ms"


def moving(average: float, value: float) -> float:
    return value if not average else (1 - NEWEST) * average + NEWEST * value
