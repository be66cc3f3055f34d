"""`RoutedRequests` sends requests to engines, and moves the requests of an engine that dies.

    place ─▶ Router ─▶ a prefill engine ── first token ─▶ the client
                              │ PREFILLED, with an offer of its blocks
                              ▼
              Router ─▶ a decode engine: fetches the blocks ── the other tokens ─▶ the client
                              │ fetched
                              └─▶ the prefill engine: release

The blocks of a long prompt are sent ahead in parts. While the prefill engine computes the prompt,
it offers the blocks computed so far. The decode engine, which is chosen at the first offer, fetches
these blocks into its prefix cache (`_send_ahead`). Later the request finds the blocks there, and
fetches only the missing ones.

A request is in one engine at a time, and this process has all tokens that were delivered. If an
engine dies, each of its requests continues in another engine from its last token. The other engine
fetches the blocks of the request if they are still offered, or else recomputes them.
Sampling depends on the seed and the position alone, so the tokens are the same. A request ends with
an error only when `MAX_DEATHS` engines have died while they ran the request.
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

MAX_DEATHS = 4  # deaths of engines after which their request fails, because it may be the cause


class RoutedRequests:
    """All requests of the server that have not ended, and the engines that they were sent to.

    A request with n > 1 is sent as n engine requests, its completions. All request ids here are ids
    of engine requests."""

    def __init__(
        self, outputs: OutputProcessor, records: Records, on_ended: Callable[[], None]
    ) -> None:
        """`on_ended`: called when requests may have ended."""
        self.router = Router([])
        self.hand_overs = HandOvers()
        self.members: Sequence[Member] = ()
        self.routed: dict[str, RoutedRequest] = {}  # by request id, until the request ends
        self._outputs, self._records, self._on_ended = outputs, records, on_ended

    def set_members(self, members: Sequence[Member]) -> None:
        self.members = members
        self.router.engines = [member.state for member in members]

    # ── counts ──────────────────────────────────────────────────────────────────────────────

    @property
    def num_unplaced(self) -> int:
        """The number of requests that are in no engine."""
        return sum(routed.member is None for routed in self.routed.values())

    def num_by_member(self) -> Counter[Member | None]:
        """Return the number of requests in each member. None: in no engine."""
        return Counter(routed.member for routed in self.routed.values())

    def num_requests_of(self, member: Member) -> int:
        """Return the number of requests that run in a member or whose blocks the member offers."""
        return sum(
            routed.member is member or (routed.offer is not None and routed.offer.member is member)
            for routed in self.routed.values()
        )

    # ── placing ─────────────────────────────────────────────────────────────────────────────

    def add(self, requests: Sequence[EngineRequest]) -> None:
        """Place the completions of a new request. Raise `RequestError` if they cannot be sent."""
        completions = [RoutedRequest(request) for request in requests]
        self.routed |= {completion.request.request_id: completion for completion in completions}
        self._begin(completions)

    def abort(self, request_ids: Iterable[str]) -> None:
        unplaced = []
        for request_id in request_ids:
            member = self.routed[request_id].member
            if member is None:
                unplaced.append(request_id)
            else:
                member.abort_all([request_id])
        self._end_unplaced(unplaced)

    def forget(self, request_ids: Iterable[str]) -> None:
        """Remove requests without delivering an update, and abort them in their engines."""
        for request_id in request_ids:
            routed = self.routed.pop(request_id)
            if routed.member is not None:
                routed.member.abort_all([request_id])
            self._note_left(routed)
            self.hand_overs.release(routed)

    def place_unplaced_requests(self) -> None:
        """Place all requests that are in no engine. Called when an engine is up again."""
        for routed in list(self.routed.values()):
            if routed.member is None:
                self._continue(routed)

    def move_requests_from(self, member: Member) -> None:
        """Move the requests of a member that is being removed to other engines."""
        for routed in list(self.routed.values()):
            if routed.member is member:
                member.forget(routed.request.request_id)
                self._lose_engine(routed, f"moved: {member.name} was removed")
                self._rescue(routed, "the engine was removed")

    def _begin(self, completions: Sequence[RoutedRequest]) -> None:
        """Send the completions of one request to the engine that will prefill them. If no engine is
        up, the completions stay unplaced."""
        prompt = prompt_of(completions[0].request)
        placement = self.router.place(prompt)
        if placement is None:
            return
        member = self._member(placement.engine)
        requests = [replace(one.request, hand_over=placement.hand_over) for one in completions]
        began_s = monotonic()
        if member.add(requests):
            member.state.note_prompt(prompt)
            for n, completion in enumerate(completions):
                completion.route.append(placement.reason)
                # All completions but the first find the prompt cached, except for its last token.
                queued = Queued(1) if n else placement.queued
                self._note_sent(completion, member, queued, began_s)

    def _note_sent(
        self, routed: RoutedRequest, member: Member, queued: Queued, began_s: float
    ) -> None:
        """Note that a request has been sent to a member. `began_s`: read before `Member.add` was
        called, because the member may start the request before `add` returns."""
        routed.member, routed.queued = member, queued
        num_written = len(self._outputs.written(routed.request.request_id))
        routed.spans.append(EngineSpan(member.name, began_s, num_written))
        if queued.tokens:
            member.state.add_queued(queued)
        else:
            member.state.streams += 1

    def _note_left(self, routed: RoutedRequest) -> None:
        """Note that a request has left the member that had it."""
        if routed.member is not None:
            if routed.queued.tokens:
                routed.member.state.remove_queued(routed.queued)
            else:
                routed.member.state.streams -= 1
        routed.member, routed.queued = None, NOTHING
        self.hand_overs.promise(routed, routed.next_member, promised=False)

    def _continue(self, routed: RoutedRequest) -> None:
        """Place a request that is in no engine. The new engine continues after the last delivered
        token."""
        request, written = routed.request, tuple(self._outputs.written(routed.request.request_id))
        if not written:  # begin again
            self._begin([routed])
            return
        prompt = prompt_of(request, len(written))
        offer, placement = None, None
        if routed.offer is not None:
            next_state = None if routed.next_member is None else routed.next_member.state
            offer, placement = routed.offer.offer, self.router.place_decode(prompt, next_state)
        if placement is not None:
            reason = placement.reason
        else:
            self.hand_overs.release(routed)
            offer, placement = None, self.router.place(prompt)
            if placement is None:
                return
            reason = f"continued after {len(written)} tokens, {placement.reason}"
        resumed = replace(
            request,
            # The log-probabilities of the prompt have been delivered with the first token.
            params=replace(request.params, prompt_logprobs=None),
            progress=False,
            hand_over=placement.hand_over,
            resumed=Resumed(written, routed.last_s, offer),
        )
        member = self._member(placement.engine)
        began_s = monotonic()
        if member.add([resumed]):
            member.state.note_prompt(prompt)
            routed.route.append(reason)
            self._note_sent(routed, member, placement.queued, began_s)

    def _member(self, state: EngineState) -> Member:
        return next(member for member in self.members if member.state is state)

    # ── updates ─────────────────────────────────────────────────────────────────────────────

    def on_updates(self, member: Member, updates: list[Update]) -> None:
        """Handle the updates of a step of `member`.

        An offer without a finish reason has the blocks of a part of the prompt, which are sent
        ahead. An offer with a finish reason ends the prefill: the request is handed over, and its
        listener gets the tokens of the update but no end."""
        now, handed_over, delivered = monotonic(), [], []
        for update in updates:
            if update.record is not None:
                number_steps(update.record, member.step_offset)
            routed = self.routed.get(update.request_id)
            if routed is None:  # `forget` has removed the request
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
        self.abort(request_id for request_id in aborts if request_id in self.routed)

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
        """Deliver updates to the clients, and store the records of requests that end. Return the
        ids of requests to abort."""
        ended = []
        for n, update in enumerate(updates):
            if update.finish_reason is not None and update.request_id in self.routed:
                routed = self.routed.pop(update.request_id)
                self._note_end(routed, len(update.tokens))
                self._note_left(routed)
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
                member.records.notify_listeners(record)
        if ended:
            self._on_ended()
        return aborts

    def _note_end(self, routed: RoutedRequest, num_newest: int) -> None:
        """Report the length of an answer to the router. `num_newest`: the number of tokens in the
        last update."""
        request = routed.request
        num_written = num_newest + len(self._outputs.written(request.request_id))
        self.router.note_answer(num_written)
        if routed.member is not None:  # this turn is in the member's prefix cache
            length = len(request.prompt_token_ids) + num_written
            routed.member.state.note_session(request.session, length)

    def _hand_over(self, member: Member, routed: RoutedRequest, update: Update) -> None:
        """Send a request that `member` has prefilled to a decode engine."""
        assert update.offer is not None
        assert update.record is not None
        record = update.record if routed.record is None else continued(routed.record, update.record)
        routed.record, routed.offer = record, ActiveOffer(member, update.offer)
        routed.handed_over_s = routed.last_s
        self._note_left(routed)
        if self._is_abandoned(update.request_id):
            self._end_unplaced([update.request_id])
        else:
            self._continue(routed)

    def _is_abandoned(self, request_id: str) -> bool:
        """Return whether the client needs no more output of a request."""
        state = self._outputs.state_of(request_id)
        return state.aborted or state.on_output is None or self._outputs.has_ended(request_id)

    def _send_ahead(self, routed: RoutedRequest, active: ActiveOffer) -> None:
        """Send the offer of a part of a prompt to the engine that will continue the request. Choose
        this engine at the first part, or again if the engine is down."""
        request, hand_overs = routed.request, self.hand_overs
        if routed.next_member is None or not routed.next_member.state.up:
            hand_overs.promise(routed, None, promised=False)
            placement = self.router.place_decode(prompt_of(request))
            if placement is not None:
                hand_overs.promise(routed, self._member(placement.engine), promised=True)
                routed.ahead_bytes = 0
        tokens = [*request.prompt_token_ids, *self._outputs.written(request.request_id)]
        hand_overs.send_ahead(routed, active, tokens)

    def on_fetched_ahead(self, member: Member, handle: int, fetched: FetchedOffer) -> None:
        self.hand_overs.on_fetched_ahead(member, handle, fetched)

    def on_fetched(self, member: Member, request_id: str, fetched: FetchedOffer) -> None:
        routed = self.routed.get(request_id)
        if routed is not None:
            self.hand_overs.on_fetched(routed, member, fetched)

    def on_refused(self, member: Member, request_ids: list[str], reason: Exception) -> None:
        if request_ids[0] not in self.routed:
            return
        state = self._outputs.state_of(request_ids[0])
        for request_id in request_ids:
            self._note_left(self.routed[request_id])
        if state.aborted:
            self._end_unplaced(request_ids)
        else:
            self.forget(self._outputs.close(state, reason))
        self._on_ended()

    # ── ends without an engine ──────────────────────────────────────────────────────────────

    def _end_unplaced(self, request_ids: Iterable[str]) -> None:
        """End aborted requests that are in no engine."""
        ends = []
        for request_id in request_ids:
            record = self._ended_record(request_id, FinishReason.ABORT)
            ends.append(Update(request_id, (), finish_reason=FinishReason.ABORT, record=record))
        if ends:
            self._deliver(None, ends)

    def _ended_record(self, request_id: str, reason: FinishReason) -> RequestRecord:
        record = self.routed[request_id].record or self._new_record(request_id)
        record.finished_s, record.finish_reason = monotonic(), reason
        return record

    def _new_record(self, request_id: str) -> RequestRecord:
        request = self.routed[request_id].request
        record = RequestRecord(request_id, len(request.prompt_token_ids), request.received_s)
        record.n, record.family = request.params.n, request.family
        return record

    # ── deaths ──────────────────────────────────────────────────────────────────────────────

    def on_death(self, member: Member, reason: str) -> None:
        """Move the requests of a member that has died to other engines."""
        self.hand_overs.on_death(member)
        for routed in list(self.routed.values()):
            if routed.offer is not None and routed.offer.member is member:
                routed.offer = None  # if a fetch is under way and fails, the engine recomputes
            if routed.member is member:
                routed.num_deaths += 1
                self._lose_engine(routed, f"{member.name} died ({reason})")
                self._rescue(routed, reason)

    def _lose_engine(self, routed: RoutedRequest, why: str) -> None:
        """Note that a request has left an engine that will not send the request's record."""
        self._note_left(routed)
        routed.route.append(why)
        self._keep_times(routed)

    def _rescue(self, routed: RoutedRequest, reason: str) -> None:
        request_id = routed.request.request_id
        if request_id not in self.routed:  # failed together with another completion
            return
        if self._is_abandoned(request_id):
            self._end_unplaced([request_id])
        elif routed.num_deaths >= MAX_DEATHS:
            error = f"{routed.num_deaths} engines died while they ran this request ({reason})"
            self._fail(self._outputs.state_of(request_id), error)
        else:
            self._continue(routed)

    def _keep_times(self, routed: RoutedRequest) -> None:
        """Complete the record of a request with the times known here, because the record of the
        engine is lost."""
        request_id = routed.request.request_id
        record = routed.record = routed.record or self._new_record(request_id)
        missing = len(self._outputs.written(request_id)) - len(record.token_s)
        record.token_s.extend([routed.last_s] * missing)
        record.token_step.extend([-1] * missing)
        if record.token_s and not record.first_token_s:
            record.first_token_s = record.scheduled_s = record.token_s[0]

    def _fail(self, state: RequestState, error: str) -> None:
        records = []
        for request_id in self._outputs.ids_in_engine(state):
            record = self._ended_record(request_id, FinishReason.ERROR)
            record.route = "; ".join(self.routed[request_id].route)
            record.stays = self.routed[request_id].spans
            records.append(record)
        self.forget(self._outputs.close(state, EngineError(error)))
        for record in records:
            self._records.add_request(record)
        self._on_ended()

    def fail_all(self, reason: str) -> None:
        """End every request: no engine will be up again."""
        for state in self._outputs:
            if state.aborted or state.on_output is None or state.output.finished:
                self._end_unplaced(self._outputs.ids_in_engine(state))
            else:
                self._fail(state, f"the engines have stopped ({reason})")
        self._on_ended()


def number_steps(record: RequestRecord, step_offset: int) -> None:
    """Renumber the steps of a record: an engine counts its steps from 0, and `step_offset` is added
    so that step numbers of several engines differ."""
    record.token_step = array("q", [step_offset + step for step in record.token_step])
    record.chunks = [(when, step_offset + step, *rest) for when, step, *rest in record.chunks]  # type: ignore[misc]
