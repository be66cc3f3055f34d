"""`HandOvers`: KV blocks on their way from a prefill engine to a decode engine.

while the prompt is computed    offer of a part ─▶ `send_ahead` ─▶ the decode engine fetches
when the prompt is computed     offer of all    ─▶ RoutedRequest.offer ─▶ sent with the request
fetched, or given up            `on_fetched_ahead`, `on_fetched` ─▶ the prefill engine releases
"""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from dataclasses import replace
from time import monotonic

from twostroke.engine.wire import FetchedOffer
from twostroke.observe.totals import TransferTotals
from twostroke.request import EngineRequest, Resumed, SamplingParams
from twostroke.route.member import ActiveOffer, Member, RoutedRequest
from twostroke.route.router import Prompt

LONG_WAIT_S = 0.02  # a longer wait for room in the decode engine is mentioned in the record

log = logging.getLogger(__name__)


class HandOvers:
    def __init__(self) -> None:
        # Fetches of parts of prompts, by the member that fetches and its handle of the fetch.
        self.ahead: dict[tuple[Member, int], tuple[RoutedRequest, ActiveOffer]] = {}
        self._transfers: dict[tuple[str, str], TransferTotals] = {}  # by sender and receiver

    def transfers(self) -> Mapping[tuple[str, str], TransferTotals]:
        return self._transfers

    def release(self, routed: RoutedRequest) -> None:
        """Release the offer of a request's blocks, if there is one."""
        if routed.offer is not None:
            routed.offer.release()
            routed.offer = None

    def promise(self, routed: RoutedRequest, to: Member | None, *, promised: bool) -> None:
        """Set the engine that will continue a request. `promised`: the request has not been sent
        to that engine yet."""
        for member, change in ((routed.next_member, -routed.promised), (to, promised)):
            if member is not None:
                member.state.promised += change
        routed.next_member, routed.promised = to, promised

    def send_ahead(self, routed: RoutedRequest, active: ActiveOffer, tokens: Sequence[int]) -> None:
        """Have the next engine fetch a part of the prompt. `tokens`: prompt and written tokens."""
        member, offer, handle = routed.next_member, active.offer, None
        if member is not None and offer.num_tokens < len(tokens):
            part = replace(
                routed.request,
                request_id=f"{routed.request.request_id} {offer.number}",
                prompt_token_ids=tokens[: offer.num_tokens],
                params=SamplingParams(),
                prompt=None,
                resumed=Resumed((tokens[offer.num_tokens],), routed.last_s, offer),
            )
            handle = member.fetch_ahead(part)
        if member is None or handle is None:
            active.release()
        else:
            self.ahead[member, handle] = routed, active

    def on_fetched_ahead(self, member: Member, handle: int, fetched: FetchedOffer) -> None:
        routed, active = self.ahead.pop((member, handle))
        active.release()
        if fetched.problem:  # the request fetches the blocks later
            log.info("%s has fetched nothing ahead: %s", member.name, fetched.problem)
            return
        self._count_transfer(active, member, fetched)
        routed.ahead_bytes += fetched.num_bytes
        member.state.note_part(prompt_of(routed.request), active.offer.num_tokens)

    def on_fetched(self, routed: RoutedRequest, member: Member, fetched: FetchedOffer) -> None:
        """Note the end of a fetch. With `fetched.problem`, the member recomputes the blocks."""
        if routed.offer is not None:
            self._count_transfer(routed.offer, member, fetched)
        self.release(routed)
        routed.fetch_s = fetched.seconds
        if fetched.problem:
            log.warning("%s computes a prompt again: %s", member.name, fetched.problem)
            message = f"computed again by {member.name} ({fetched.problem})"
            routed.handed_over_s = 0.0  # this time must not count in the average of hand-overs
        else:
            routed.spans[-1] = routed.spans[-1]._replace(
                fetched_s=monotonic(), fetch_s=fetched.seconds, fetched_bytes=fetched.num_bytes
            )
            message = (
                f"{fetched.num_bytes / 1e6:.1f} MB fetched in {1e3 * fetched.seconds:.1f} ms by "
                f"{fetched.transport}"
            )
            if routed.next_member is member and routed.ahead_bytes:
                message += f", {routed.ahead_bytes / 1e6:.1f} MB before, while it was prefilled"
        if fetched.waited_s > LONG_WAIT_S:
            message += f", after {1e3 * fetched.waited_s:.0f} ms without room there"
        routed.route.append(message)

    def _count_transfer(self, active: ActiveOffer, to: Member, fetched: FetchedOffer) -> None:
        totals = self._transfers.setdefault((active.member.name, to.name), TransferTotals())
        totals.add(fetched.num_bytes, fetched.seconds, bool(fetched.problem))

    def on_death(self, member: Member) -> None:
        """Release the blocks that a member was fetching ahead when it died."""
        for key in [key for key in self.ahead if key[0] is member]:
            _, active = self.ahead.pop(key)
            active.release()

    def remove_totals(self, member: Member) -> None:
        """Drop the totals of a member that has left."""
        for pair in [pair for pair in self._transfers if member.name in pair]:
            del self._transfers[pair]


def prompt_of(request: EngineRequest, num_written: int = 0) -> Prompt:
    """Describe a request to the router. `num_written`: the tokens that have been written."""
    max_tokens = request.params.max_tokens
    return Prompt(
        len(request.prompt_token_ids) + num_written,
        request.prefix_marks,
        request.session,
        None if max_tokens is None else max(1, max_tokens - num_written),
    )
