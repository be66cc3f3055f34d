"""`Router`: which engine a request goes to, and whether another decodes what the first prefilled.

Decided from what the server itself knows: what it has sent to each engine and not had back, which
beginnings of prompts each has computed, and what its steps, fetches and hand-overs took. The same
numbers give the same decision, and every decision says why.

A place costs the seconds that requests wait because of it, all of them together:

    the request's own   prompts queued there  +  what is not cached of its own  +  its decode steps
    the streams there   stand still for its prompt, and have longer steps while it writes

so that a prompt goes where its beginning is cached until the queue there costs more than to compute
it elsewhere. Engines that do both phases are compared by all of it. In pools:

    prefill, hand over  queue and prompt at a prefill engine  +  the hand-over: the time it takes
                        beside the fetch, and the fetch, which the streams there wait for
    prefill at decode   queue and prompt at a decode engine, whose streams stand still meanwhile;
                        a second of theirs counts `GAP_WEIGHT` times
    decode at prefill   where the few tokens that may be written take less than a hand-over

Where a pool has no engine that is up, the other does its work.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from enum import StrEnum
from typing import NamedTuple

from twostroke.observe.record import StepRecord
from twostroke.route.costs import DecodeCosts, PrefillCosts, StepCosts

FIRST_MARK = (
    64  # tokens that the first of a prompt's marks stands for; each other for twice as many
)
MAX_MARKS = 8192  # that are remembered of one engine
NEWEST = 0.1  # weight of the newest value in a moving average
MIN_HAND_OVERS = 8  # before their time is relied on: the first of an engine are slower
OLD_S = 10.0  # that an engine's costs are behind those of others: then they are forgotten
GAP_WEIGHT = 4  # what a second between two tokens counts, against one before the first
# Until steps have been seen: what engines do with them is compared all the same.
FIRST_PREFILL, FIRST_DECODE = PrefillCosts(1e-4, 0.0), DecodeCosts(0.0, 2.5e-5, 0.0)
FIRST_ANSWER = 128.0  # tokens that a request writes


class Role(StrEnum):
    PREFILL = "prefill"
    DECODE = "decode"
    BOTH = "engine"


class Prompt(NamedTuple):
    """What is known of a request before it runs."""

    num_tokens: int
    marks: Sequence[str] = ()  # digests of its first 64, 128, 256, … tokens, with its salt
    session: str = ""  # of which it is the next turn, with its salt
    max_tokens: int | None = None  # that it may still write


class Queued(NamedTuple):
    """What of a prompt an engine has not computed yet, and what that is expected to take."""

    tokens: int = 0
    seconds: float = 0.0


NOTHING = Queued()


@dataclass(slots=True, eq=False)
class EngineState:
    """What is known here of one engine."""

    name: str
    role: Role
    up: bool = True
    queued_tokens: int = 0  # of prompts that it was sent and has not computed
    queued_s: float = 0.0  # that these are expected to take
    queued: int = 0  # requests with such a prompt
    streams: int = 0  # requests that it was sent, have their first token and have not left it
    promised: int = 0  # requests that will come to it, whose prompts are still computed elsewhere
    capacity_tokens: int = 0  # of its KV cache; 0: not known
    token_bytes: float = 0.0  # of keys and values
    bytes_per_s: float = 0.0  # at which it fetches blocks, of late; 0: not known
    positions: int = 0  # cached, that its last decode step attended to
    costs: StepCosts = field(default_factory=StepCosts)
    _marks: OrderedDict[str, int] = field(default_factory=OrderedDict)  # tokens each stands for
    _marked_tokens: int = 0
    _sessions: OrderedDict[str, int] = field(default_factory=OrderedDict)  # their tokens so far

    def num_cached(self, prompt: Prompt) -> int:
        """Tokens of a prompt's beginning that it has computed not long ago; never all of them."""
        marks, known = prompt.marks, self._marks
        most = next((FIRST_MARK << n for n in _last_first(marks) if marks[n] in known), 0)
        # Of a conversation that begins otherwise, the name says nothing.
        if most or not marks:
            most = max(most, self._sessions.get(prompt.session, 0))
        return min(prompt.num_tokens - 1, most)

    def note_prompt(self, prompt: Prompt) -> None:
        """It computes this, and forgets what it computed longest ago: of that the end first."""
        for n in _last_first(prompt.marks):
            mark, tokens = prompt.marks[n], FIRST_MARK << max(0, n - 1)  # beyond the mark before
            if mark not in self._marks:
                self._marks[mark] = tokens
                self._marked_tokens += tokens
            self._marks.move_to_end(mark)
        most = self.capacity_tokens or float("inf")
        while len(self._marks) > MAX_MARKS or self._marked_tokens > most:
            self._marked_tokens -= self._marks.popitem(last=False)[1]
        self.note_session(prompt.session, prompt.num_tokens)

    def note_part(self, prompt: Prompt, num_tokens: int) -> None:
        """It has the first tokens of this."""
        marks = prompt.marks[: (num_tokens // FIRST_MARK).bit_length()]
        self.note_prompt(Prompt(num_tokens, marks))

    def note_session(self, session: str, num_tokens: int) -> None:
        """A conversation has come to so many tokens here."""
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
            self.queued_s = 0.0  # what rounding left

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
        """To fetch the blocks of so many tokens."""
        return num_tokens * self.token_bytes / self.bytes_per_s if self.bytes_per_s else 0.0


class Placement(NamedTuple):
    engine: EngineState
    hand_over: bool  # it only prefills
    queued: Queued  # what it will have to compute
    reason: str


class Seat(NamedTuple):
    """A prompt as it would be in one engine."""

    engine: EngineState
    num_cached: int
    queued: Queued  # the rest of it

    @property
    def first_token_s(self) -> float:
        return self.engine.queued_s + self.queued.seconds


class Router:
    def __init__(self, engines: Sequence[EngineState]) -> None:
        self.engines = engines
        self.hand_over_s = 0.0  # first token → second, less the fetch, of late; 0: not known
        self._hand_overs = 0
        self._hand_over_s = 0.0  # the same, also of too few
        self.answer_tokens = FIRST_ANSWER  # that a request writes, of late

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
        """Where a prompt is to be computed; None if no engine is up."""
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
        seat = min(self._seats(prefill, prompt), key=lambda one: one.first_token_s)
        reason = f"prefilled by {seat.engine.name}: {seat.engine.queued_tokens} tokens before it"
        if seat.num_cached:
            reason += f", {seat.num_cached} of {prompt.num_tokens} cached"
        through = Placement(seat.engine, True, seat.queued, reason)
        if prompt.max_tokens == 1:
            return through._replace(hand_over=False)
        return self._place_directly(through, decode, prompt) or through

    def place_decode(self, prompt: Prompt, chosen: EngineState | None = None) -> Placement | None:
        """Who is to go on with a request that has been prefilled; None: no decode engine is up.
        `chosen`: before, while it was prefilled."""
        self._forget_old_costs()
        decode = self._up(Role.DECODE)
        seats = self._seats([chosen] if chosen in decode else decode, prompt)
        if not seats:
            return None
        writing_s = self._writing_costs(prompt)
        seat = min(seats, key=lambda one: self._hand_over_to_s(one) + writing_s(one.engine))
        name, streams = seat.engine.name, seat.engine.streams
        reason = f"handed over to {name}: {streams} streams there"
        if self.hand_over_s:
            reason = (
                f"handed over to {name}: saves {_ms(seat.queued.seconds * streams)} of gaps of "
                f"{streams} streams there, costs {_ms(self._hand_over_to_s(seat))}"
            )
        return Placement(seat.engine, False, NOTHING, reason)

    def _place_directly(
        self, through: Placement, decode: list[EngineState], prompt: Prompt
    ) -> Placement | None:
        """An engine that does the whole, where that costs less than handing over."""
        known = [one.costs for one in self.engines]
        if not (self.hand_over_s and any(costs.prefill for costs in known)):
            return None
        seats = self._seats(decode, prompt)
        hand_over_s = min(map(self._hand_over_to_s, seats))
        if any(costs.decode for costs in known) and (
            kept := self._decode_at_prefill(through, prompt, hand_over_s)
        ):
            return kept
        return self._prefill_at_decode(through, seats, prompt, hand_over_s)

    def _decode_at_prefill(
        self, through: Placement, prompt: Prompt, hand_over_s: float
    ) -> Placement | None:
        """The prefill engine, where all that may be written delays it by less than that."""
        if prompt.max_tokens is None:
            return None
        engine, more = through.engine, prompt.max_tokens - 1
        costs = engine.costs.decode or self._usual_decode()
        tail_s = more * costs.step_s(1, prompt.num_tokens) * (1 + engine.queued)
        if tail_s > hand_over_s:
            return None
        told = f"{more} tokens take {_ms(tail_s)}, a hand-over {_ms(hand_over_s)}"
        reason = f"{through.reason}, and decoded there: {told}"
        return through._replace(hand_over=False, reason=reason)

    def _prefill_at_decode(
        self, through: Placement, seats: list[Seat], prompt: Prompt, hand_over_s: float
    ) -> Placement | None:
        """A decode engine, where its streams, and this one, wait less for it."""

        def cost_s(one: Seat) -> float:
            gaps_s = one.queued.seconds * max(1, one.engine.streams)  # one may come in any case
            return one.first_token_s + GAP_WEIGHT * gaps_s

        seat = min(seats, key=cost_s)
        through_s = through.engine.queued_s + through.queued.seconds + hand_over_s
        if cost_s(seat) > through_s:
            return None
        tokens, seconds = seat.queued
        reason = (
            f"prefilled by {seat.engine.name} itself: {tokens} of {prompt.num_tokens} tokens hold "
            f"up its {seat.engine.streams} streams for {_ms(seconds)}, and by way of "
            f"{through.engine.name} it takes {_ms(through_s)}"
        )
        return Placement(seat.engine, False, seat.queued, reason)

    def _place_among(self, engines: list[EngineState], prompt: Prompt) -> Placement | None:
        """The engine where all wait the least, of those that do both phases."""
        writing_s = self._writing_costs(prompt)

        def cost_s(one: Seat) -> float:
            held_up_s = one.queued.seconds * one.engine.streams
            return one.first_token_s + held_up_s + writing_s(one.engine)

        seats = self._seats(engines, prompt)
        if not seats:
            return None
        seat = min(seats, key=cost_s)
        engine = seat.engine
        reason = (
            f"{engine.name}: {engine.queued_tokens} tokens before it, {engine.streams} streams, "
            f"{seat.num_cached} of {prompt.num_tokens} tokens cached"
        )
        most = max(seats, key=lambda one: one.num_cached)
        if most.num_cached > seat.num_cached:
            more_s = cost_s(most) - cost_s(seat)
            reason += f" ({most.num_cached} at {most.engine.name}, which costs {_ms(more_s)} more)"
        return Placement(engine, False, seat.queued, reason)

    # ── what they are made from ─────────────────────────────────────────────────────────────

    def _seats(self, engines: list[EngineState], prompt: Prompt) -> list[Seat]:
        usual, num_tokens, seats = self._usual_prefill(), prompt.num_tokens, []
        for one in engines:
            cached = one.num_cached(prompt)
            seconds = (one.costs.prefill or usual).prompt_s(num_tokens, cached)
            seats.append(Seat(one, cached, Queued(num_tokens - cached, seconds)))
        return seats

    def _writing_costs(self, prompt: Prompt) -> Callable[[EngineState], float]:
        """What a request's decode steps take, and what it adds to those of the streams there."""
        usual, length = self._usual_decode(), prompt.num_tokens
        num_tokens = min(prompt.max_tokens or self.answer_tokens, self.answer_tokens)

        def writing_s(engine: EngineState) -> float:
            costs = engine.costs.decode or usual
            streams = engine.streams + engine.promised + engine.queued
            positions = engine.positions if engine.streams else 0
            own_s = costs.step_s(streams + 1, positions + length)
            return num_tokens * (own_s + streams * (costs.stream + costs.position * length))

        return writing_s

    def _hand_over_to_s(self, seat: Seat) -> float:
        """What it takes until a decode engine has a request that another prefilled. Its streams
        wait for the fetch, too."""
        fetch_s = seat.engine.fetch_s(seat.queued.tokens)
        return self.hand_over_s + fetch_s * (1 + seat.engine.streams)

    def _forget_old_costs(self) -> None:
        """Who was slow once and has had nothing to do since, while others had, is tried again."""
        newest_s = max((one.costs.learnt_s for one in self.engines), default=0.0)
        for one in self.engines:
            if 0.0 < one.costs.learnt_s < newest_s - OLD_S:
                one.forget_costs()

    def _usual_prefill(self) -> PrefillCosts:
        """Of an engine that has not shown them: as elsewhere, if possible where it is the phase."""
        costs = (one.costs.prefill for one in self._all_but_last(Role.DECODE))
        return next(filter(None, costs), FIRST_PREFILL)

    def _usual_decode(self) -> DecodeCosts:
        costs = (one.costs.decode for one in self._all_but_last(Role.PREFILL))
        return next(filter(None, costs), FIRST_DECODE)

    def _all_but_last(self, role: Role) -> Iterator[EngineState]:
        """All engines, those of this role last."""
        yield from (one for one in self.engines if one.role is not role)
        yield from (one for one in self.engines if one.role is role)

    def _up(self, role: Role) -> list[EngineState]:
        return [one for one in self.engines if one.up and one.role is role]


def _last_first(marks: Sequence[str]) -> range:
    return range(len(marks) - 1, -1, -1)


def _ms(seconds: float) -> str:
    ms = 1e3 * seconds
    return f"{ms:.1f} ms" if ms < 10 else f"{ms:,.0f} ms"


def moving(average: float, value: float) -> float:
    return value if not average else (1 - NEWEST) * average + NEWEST * value
