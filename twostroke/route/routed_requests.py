"""`RoutedRequests`: places requests in engines, and continues them elsewhere when an engine dies.

    place ─▶ Router ─▶ a prefill engine ── first token ─▶ the client
                              │ PREFILLED, with an offer of its blocks
                              ▼
              Router ─▶ a decode engine: fetches the blocks ── the other tokens ─▶ the client
                              │ fetched
                              └─▶ the prefill engine: release

The decode engine for a long prompt is chosen, and fetches, while the prefill engine still computes:
each time that the blocks so far are offered (`_send_ahead`). They are in its prefix cache when the
request comes. If they are not, the request fetches them then.

A request is in one engine at a time, and all tokens that were delivered are known here. So if an
engine dies, at any stage, its requests continue in another engine from their last token: with their
blocks, if they are still offered, or recomputed. Sampling depends on the seed and the position
alone, so the tokens are the same. A request ends with an error only when `MAX_ATTEMPTS` engines
have died while they had it.
"""

from __future__ import annotations

from array import array
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace
from time import monotonic

from twostroke.engine.output_processor import OutputProcessor, RequestState
from twostroke.engine.wire import FetchedOffer
from twostroke.errors import EngineError
from twostroke.observe.record import EngineSpan, Records, RequestRecord, continued
from twostroke.request import EngineRequest, FinishReason, Resumed
from twostroke.route.hand_over import HandOvers, prompt_of
from twostroke.route.member import ActiveOffer, Member, RoutedRequest
from twostroke.route.router import NOTHING, EngineState, Queued, Router
from twostroke.sched.updates import Update

MAX_ATTEMPTS = 4  # engines that may die with one request: it may be what kills them


class RoutedRequests:
    def __init__(
        self, outputs: OutputProcessor, records: Records, on_ended: Callable[[], None]
    ) -> None:
        """`on_ended`: called when requests may have ended."""
        self.router = Router([])
        self.hand_overs = HandOvers()
        self.members: Sequence[Member] = ()
        self.routed: dict[str, RoutedRequest] = {}  # by engine request, until its end
        self._outputs, self._records, self._on_ended = outputs, records, on_ended

    def set_members(self, members: Sequence[Member]) -> None:
        self.members = members
        self.router.engines = [member.state for member in members]

    # ── counts ──────────────────────────────────────────────────────────────────────────────

    @property
    def num_unplaced(self) -> int:
        return sum(routed.member is None for routed in self.routed.values())

    def per_member(self) -> Counter[Member | None]:
        return Counter(routed.member for routed in self.routed.values())

    def num_in(self, member: Member) -> int:
        """Requests that a member has, and requests whose blocks it offers."""
        return sum(
            routed.member is member or (routed.offer is not None and routed.offer.member is member)
            for routed in self.routed.values()
        )

    # ── placing ─────────────────────────────────────────────────────────────────────────────

    def add(self, requests: Sequence[EngineRequest]) -> None:
        """Place the continuations of a new request. Raises `RequestError` if they cannot be
        sent."""
        routed = [RoutedRequest(one) for one in requests]
        self.routed |= {one.request.request_id: one for one in routed}
        self._begin(routed)

    def abort(self, names: Iterable[str]) -> None:
        unplaced = []
        for name in names:
            member = self.routed[name].member
            if member is None:
                unplaced.append(name)
            else:
                member.abort_all([name])
        self._end_unplaced(unplaced)

    def forget(self, names: Iterable[str]) -> None:
        """Drop requests without an update; an engine that has one must end it."""
        for name in names:
            routed = self.routed.pop(name)
            if routed.member is not None:
                routed.member.abort_all([name])
            self._take_out(routed)
            self.hand_overs.release(routed)

    def place_unplaced(self) -> None:
        """Place the requests that no engine has: an engine is up again."""
        for routed in list(self.routed.values()):
            if routed.member is None:
                self._continue(routed)

    def move_all(self, member: Member) -> None:
        """Continue the requests of a member that leaves in other engines."""
        for routed in list(self.routed.values()):
            if routed.member is member:
                member.forget(routed.request.request_id)
                self._lose_engine(routed, f"moved from {member.name}, which leaves")
                self._rescue(routed, "it left")

    def _begin(self, routed: Sequence[RoutedRequest]) -> None:
        """Send the continuations of one request to the engine that will prefill them."""
        prompt = prompt_of(routed[0].request)
        placement = self.router.place(prompt)
        if placement is None:
            return  # they are placed when an engine is up
        member = self._member(placement.engine)
        requests = [replace(one.request, hand_over=placement.hand_over) for one in routed]
        began_s = monotonic()
        if member.add(requests):
            member.state.note_prompt(prompt)
            for n, one in enumerate(routed):
                one.route.append(placement.reason)
                # The siblings find the prompt in the cache, but for its last token.
                self._put_in(one, member, Queued(1) if n else placement.queued, began_s)

    def _put_in(
        self, routed: RoutedRequest, member: Member, queued: Queued, began_s: float
    ) -> None:
        """Note that a request has been sent to a member. `began_s`: the time before it was sent;
        the member may know of it before `add` returns."""
        routed.member, routed.queued = member, queued
        num_written = len(self._outputs.written(routed.request.request_id))
        routed.spans.append(EngineSpan(member.name, began_s, num_written))
        if queued.tokens:
            member.state.add_queued(queued)
        else:
            member.state.streams += 1

    def _take_out(self, routed: RoutedRequest) -> None:
        """Note that a request has left the member that had it."""
        if routed.member is not None:
            if routed.queued.tokens:
                routed.member.state.remove_queued(routed.queued)
            else:
                routed.member.state.streams -= 1
        routed.member, routed.queued = None, NOTHING
        self.hand_overs.promise(routed, routed.next_member, False)

    def _continue(self, routed: RoutedRequest) -> None:
        """Place a request that no engine has, from its last token on."""
        request, written = routed.request, tuple(self._outputs.written(routed.request.request_id))
        if not written:
            self._begin([routed])
            return
        prompt = prompt_of(request, len(written))
        offer, target = None, None
        if routed.offer is not None:
            chosen = None if routed.next_member is None else routed.next_member.state
            offer, target = routed.offer.offer, self.router.place_decode(prompt, chosen)
        if target is not None:
            reason = target.reason
        else:
            self.hand_overs.release(routed)
            offer, target = None, self.router.place(prompt)
            if target is None:
                return
            reason = f"goes on after {len(written)} tokens, {target.reason}"
        resumed = replace(
            request,
            params=replace(request.params, prompt_logprobs=None),  # these have been delivered
            progress=False,
            hand_over=target.hand_over,
            resumed=Resumed(written, routed.last_s, offer),
        )
        member = self._member(target.engine)
        began_s = monotonic()
        if member.add([resumed]):
            member.state.note_prompt(prompt)
            routed.route.append(reason)
            self._put_in(routed, member, target.queued, began_s)

    def _member(self, state: EngineState) -> Member:
        return next(member for member in self.members if member.state is state)

    # ── updates ─────────────────────────────────────────────────────────────────────────────

    def on_updates(self, member: Member, updates: list[Update]) -> None:
        now, handed_over, delivered = monotonic(), [], []
        for update in updates:
            if update.record is not None:
                number_steps(update.record, member.first_step)
            routed = self.routed.get(update.request_id)
            if routed is None:  # it was dropped here
                if update.offer is not None:
                    member.release(update.offer.number)
                delivered.append(update)
                continue
            if update.tokens:
                self._note_tokens(routed, now)
            if update.offer is not None and update.finish_reason is None:
                self._send_ahead(routed, ActiveOffer(member, update.offer))
            elif update.offer is not None:
                handed_over.append((routed, update))
                delivered.append(update._replace(finish_reason=None, record=None, offer=None))
            else:
                delivered.append(update)
        aborts = self._deliver(member, delivered)
        for routed, update in handed_over:
            self._hand_over(member, routed, update)
        self.abort(name for name in aborts if name in self.routed)

    def _note_tokens(self, routed: RoutedRequest, now: float) -> None:
        routed.last_s = now
        if routed.queued.tokens:
            assert routed.member is not None
            routed.member.state.remove_queued(routed.queued)
            routed.member.state.streams += 1
            routed.queued = NOTHING
        if routed.handed_over_s:
            self.router.note_hand_over(now - routed.handed_over_s, routed.fetch_s)
            routed.handed_over_s = 0.0

    def _deliver(self, member: Member | None, updates: list[Update]) -> list[str]:
        """Give updates to their listeners, and keep the records of requests that end. Return the
        engine requests to abort."""
        ended = []
        for n, update in enumerate(updates):
            if update.finish_reason is not None and update.request_id in self.routed:
                routed = self.routed.pop(update.request_id)
                self._note_end(routed, len(update.tokens))
                self._take_out(routed)
                self.hand_overs.release(routed)
                record = update.record
                if record is not None:
                    if routed.record is not None and routed.record is not record:
                        record = continued(routed.record, record)
                    record.route, record.stays = "; ".join(routed.route), routed.spans
                    updates[n] = update._replace(record=record)
                    ended.append(record)
        _, aborts = self._outputs.process(updates)
        for record in ended:
            self._records.add_request(record)
            if member is not None:
                member.records.tell_request(record)
        if ended:
            self._on_ended()
        return aborts

    def _note_end(self, routed: RoutedRequest, num_newest: int) -> None:
        """Tell the router about an answer. `num_newest`: tokens that came with the end."""
        request = routed.request
        num_written = num_newest + len(self._outputs.written(request.request_id))
        self.router.note_answer(num_written)
        if routed.member is not None:  # the next turn finds this turn cached there
            length = len(request.prompt_token_ids) + num_written
            routed.member.state.note_session(request.session, length)

    def _hand_over(self, member: Member, routed: RoutedRequest, update: Update) -> None:
        """Continue a request that `member` has prefilled in another engine."""
        assert update.offer is not None
        assert update.record is not None
        record = update.record if routed.record is None else continued(routed.record, update.record)
        routed.record, routed.offer = record, ActiveOffer(member, update.offer)
        routed.handed_over_s = routed.last_s
        self._take_out(routed)
        if self._is_abandoned(update.request_id):
            self._end_unplaced([update.request_id])
        else:
            self._continue(routed)

    def _is_abandoned(self, name: str) -> bool:
        """Return whether nobody needs more output of an engine request."""
        state = self._outputs.of(name)
        return state.aborted or state.on_output is None or self._outputs.has_ended(name)

    def _send_ahead(self, routed: RoutedRequest, active: ActiveOffer) -> None:
        """Send a part of a prompt to the engine that will continue the request; choose the engine
        first, if that has not been done."""
        request, hand_overs = routed.request, self.hand_overs
        if routed.next_member is None or not routed.next_member.state.up:
            hand_overs.promise(routed, None, False)
            target = self.router.place_decode(prompt_of(request))
            if target is not None:
                hand_overs.promise(routed, self._member(target.engine), True)
                routed.ahead_bytes = 0
        tokens = [*request.prompt_token_ids, *self._outputs.written(request.request_id)]
        hand_overs.send_ahead(routed, active, tokens)

    def on_fetched_ahead(self, member: Member, handle: int, fetched: FetchedOffer) -> None:
        self.hand_overs.on_fetched_ahead(member, handle, fetched)

    def on_fetched(self, member: Member, name: str, fetched: FetchedOffer) -> None:
        routed = self.routed.get(name)
        if routed is not None:
            self.hand_overs.on_fetched(routed, member, fetched)

    def on_refused(self, member: Member, names: list[str], reason: Exception) -> None:
        if names[0] not in self.routed:
            return
        state = self._outputs.of(names[0])
        for name in names:
            self._take_out(self.routed[name])
        if state.aborted:
            self._end_unplaced(names)
        else:
            self.forget(self._outputs.close(state, reason))
        self._on_ended()

    # ── ends without an engine ──────────────────────────────────────────────────────────────

    def _end_unplaced(self, names: Iterable[str]) -> None:
        """End aborted requests that no engine has."""
        ends = []
        for name in names:
            record = self._ended_record(name, FinishReason.ABORT)
            ends.append(Update(name, (), finish_reason=FinishReason.ABORT, record=record))
        if ends:
            self._deliver(None, ends)

    def _ended_record(self, name: str, reason: FinishReason) -> RequestRecord:
        record = self.routed[name].record or self._new_record(name)
        record.finished_s, record.finish_reason = monotonic(), reason
        return record

    def _new_record(self, name: str) -> RequestRecord:
        request = self.routed[name].request
        record = RequestRecord(name, len(request.prompt_token_ids), request.received_s)
        record.n, record.family = request.params.n, request.family
        return record

    # ── deaths ──────────────────────────────────────────────────────────────────────────────

    def on_death(self, member: Member, reason: str) -> None:
        """Continue the requests of a member that has died in other engines."""
        self.hand_overs.on_death(member)
        for routed in list(self.routed.values()):
            if routed.offer is not None and routed.offer.member is member:
                routed.offer = None  # its next engine may still fetch it, or computes it again
            if routed.member is member:
                routed.attempts += 1
                self._lose_engine(routed, f"{member.name} died ({reason})")
                self._rescue(routed, reason)

    def _lose_engine(self, routed: RoutedRequest, why: str) -> None:
        """Take a request out of an engine that will not report its record."""
        self._take_out(routed)
        routed.route.append(why)
        self._keep_times(routed)

    def _rescue(self, routed: RoutedRequest, reason: str) -> None:
        name = routed.request.request_id
        if name not in self.routed:  # it was lost with a sibling
            return
        if self._is_abandoned(name):
            self._end_unplaced([name])
        elif routed.attempts >= MAX_ATTEMPTS:
            error = f"{routed.attempts} engines died while this request was in them ({reason})"
            self._fail(self._outputs.of(name), error)
        else:
            self._continue(routed)

    def _keep_times(self, routed: RoutedRequest) -> None:
        """Make a record from the times known here, in place of the lost record."""
        name = routed.request.request_id
        record = routed.record = routed.record or self._new_record(name)
        missing = len(self._outputs.written(name)) - len(record.token_s)
        record.token_s.extend([routed.last_s] * missing)
        record.token_step.extend([-1] * missing)
        if record.token_s and not record.first_token_s:
            record.first_token_s = record.scheduled_s = record.token_s[0]

    def _fail(self, state: RequestState, error: str) -> None:
        records = []
        for name in self._outputs.in_engine(state):
            record = self._ended_record(name, FinishReason.ERROR)
            record.route = "; ".join(self.routed[name].route)
            record.stays = self.routed[name].spans
            records.append(record)
        self.forget(self._outputs.close(state, EngineError(error)))
        for record in records:
            self._records.add_request(record)
        self._on_ended()

    def fail_all(self, reason: str) -> None:
        """End every request: no engine will be up again."""
        for state in self._outputs:
            if state.aborted or state.on_output is None or state.output.finished:
                self._end_unplaced(self._outputs.in_engine(state))
            else:
                self._fail(state, f"the engines have stopped ({reason})")
        self._on_ended()


def number_steps(record: RequestRecord, first_step: int) -> None:
    """Renumber the steps of a record: an engine counts its steps from 0, and `first_step` is added
    so that step numbers of several engines differ."""
    record.token_step = array("q", [first_step + step for step in record.token_step])
    record.chunks = [(when, first_step + step, *rest) for when, step, *rest in record.chunks]  # type: ignore[misc]
