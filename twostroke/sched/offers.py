"""`OfferedBlocks`: KV blocks of this engine that other engines may fetch.

    prompt computed in part     offer_part ─▶ Offer ─▶ the decode engine fetches ─▶ release
    prompt computed             offer_all  ─▶ Offer ─▶ the decode engine fetches ─▶ release

An offer owns its blocks until it is released, so the blocks outlive their request.
"""

from __future__ import annotations

from twostroke.kv.cache import KVCache
from twostroke.kv.transfer import KVTransfer, Offer
from twostroke.sched.scheduled_request import ScheduledRequest
from twostroke.sched.step import SchedulerConfig

# A part of a prompt is offered when at least MIN_PART_TOKENS tokens, and 1/PART_SHARE of the tokens
# already offered, are new: the receiver is sent the prompt's token ids with each part.
MIN_PART_TOKENS, PART_SHARE = 256, 8


class OfferedBlocks:
    def __init__(self, config: SchedulerConfig, kv: KVCache, transfer: KVTransfer | None) -> None:
        """`transfer`: None if this engine shares no blocks."""
        self._config, self._kv, self.transfer = config, kv, transfer
        self._parts: dict[int, ScheduledRequest] = {}  # by the number of the offer

    @property
    def enabled(self) -> bool:
        return self.transfer is not None and self.transfer.can_offer

    @property
    def layout(self) -> str:
        """The layout of a KV block: the same in all engines that exchange blocks."""
        return "" if self.transfer is None else self.transfer.layout

    def offer_all(self, request: ScheduledRequest) -> Offer:
        """Offer every block of a request; the offer takes the blocks over from the request."""
        assert self.transfer is not None
        offer = self.transfer.offer(request.kv.tables, request.kv.num_computed)
        self._kv.hold(request.kv, offer.number)
        return offer

    def offer_part(self, request: ScheduledRequest, num_tokens: int) -> Offer | None:
        """Offer the full blocks of the first `num_tokens` of a prompt. None: too few blocks are
        new, the last part has not been fetched, or the blocks cannot be used as a prefix."""
        full = num_tokens // self._config.block_size * self._config.block_size
        min_new = max(MIN_PART_TOKENS, request.num_offered // PART_SHARE)
        if request.part_is_open or full < request.num_offered + min_new:
            return None
        # A preempted request has other blocks now than in the step that has just run.
        if not self._config.prefix_caching or request.record.preempted:
            return None
        tables = self._kv.part(request.kv, full)
        if tables is None:
            return None
        assert self.transfer is not None
        offer = self.transfer.offer(tables, full)
        self._kv.hold_part(tables, offer.number)
        self._parts[offer.number] = request
        request.num_offered, request.part_is_open = full, True
        return offer

    def release(self, number: int) -> None:
        """Free the blocks of an offer that was fetched or is not needed. A number that is not
        known, from an engine that ran before this one, is ignored."""
        assert self.transfer is not None
        self.transfer.release(number)
        self._kv.release_held(number)
        if number in self._parts:
            self._parts.pop(number).part_is_open = False

    def release_memory_of_ended_engines(self) -> None:
        """Unmap memory that engines shared with this engine and that have ended since."""
        if self.transfer is not None:
            self.transfer.tidy()

    def dropped(self) -> dict[str, int]:
        """Return how many messages of other engines were dropped, by reason."""
        return {} if self.transfer is None else self.transfer.dropped()

    def prepare_memory(self) -> bool:
        """Touch some of the memory that fetched blocks will be written to. True: there is more."""
        return self.transfer is not None and self.transfer.prepare_memory()
