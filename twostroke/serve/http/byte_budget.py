"""`ByteBudget`: memory that all bodies share, and which bodies lose theirs when it is scarce.

A body that finds too little left waits in turn. Meanwhile room is made for it:

    1. The slowest body that has arrived at less than `slow_rate` loses what it holds (408).
    2. The slowest body of the share that holds most does (429), if that share holds more than the
       waiting body's share would. Shares are those of keys; within a key, those of addresses.
    3. The newest body does (429), if all bodies that hold some memory wait for more.
    4. Otherwise a body that has waited for too long is refused (429).
"""

from __future__ import annotations

import asyncio
from collections import Counter
from time import monotonic
from typing import NamedTuple

from twostroke.serve.error_responses import ApiError, retry_after

MAX_WAIT_S = 5.0  # for memory that others hold, since some of it was last given back
MOST_WAITS = 6  # how many times `MAX_WAIT_S` a body waits in all
MAX_WAITING = 32
TICK_S = 0.5  # between two looks at which bodies have become slow
SLOW_AFTER_S = 2.0  # of a body's life; before, its rate says little


class Sender(NamedTuple):
    key: int | None = None  # the number of its API key
    address: str = ""

    @property
    def shares(self) -> tuple[tuple[int | None, str | None], ...]:
        """The shares that its bodies count in, from the widest."""
        return (self.key, None), (self.key, self.address)


class ByteBudget:
    def __init__(self, total: int, slow_rate: float = 0.0) -> None:
        """`slow_rate`, in bytes a second: slower bodies lose their memory to others."""
        self.total = self.left = total
        self._slow_rate = slow_rate
        self._given_back_s = 0.0  # when that was, the last time
        self._holding: dict[Reservation, None] = {}  # oldest first
        self._held: Counter[tuple[int | None, str | None]] = Counter()  # bytes, by share
        self._waiting: dict[Reservation, Turn] = {}  # oldest first

    def add(self, holder: Reservation, amount: int) -> None:
        """Count `amount` bytes, which may be negative."""
        self.left -= amount
        holder.num_bytes += amount
        for share in holder.sender.shares:
            self._held[share] += amount
            if not self._held[share]:
                del self._held[share]
        if holder.num_bytes:
            self._holding[holder] = None
        else:
            self._holding.pop(holder, None)

    async def take(self, holder: Reservation, amount: int) -> None:
        if amount <= self.left and not self._waiting:
            self.add(holder, amount)
            return
        if len(self._waiting) >= MAX_WAITING:
            self._displace(holder)
        self._waiting[holder] = turn = Turn(amount, asyncio.get_running_loop().create_future())
        started = monotonic()
        try:
            self._settle()
            while not turn.granted.done():
                since = min(max(started, self._given_back_s), started + MOST_WAITS * MAX_WAIT_S)
                left = since + MAX_WAIT_S - monotonic()
                if left <= 0:
                    raise no_memory()
                await asyncio.wait({turn.granted}, timeout=min(left, TICK_S))
                self._settle()
            if (refusal := turn.granted.result()) is not None:
                raise refusal
        finally:
            self._waiting.pop(holder, None)
            self._settle()

    def give_back(self, holder: Reservation) -> None:
        if holder.num_bytes:
            self.add(holder, -holder.num_bytes)
            self._given_back_s = monotonic()
        self._settle()

    def _settle(self) -> None:
        """Grant what there is room for, the shares that hold least first; make room for more."""
        while self._waiting:
            holder = min(self._waiting, key=self._order)
            amount, granted = self._waiting[holder]
            if amount > self.left:
                self._make_room(holder, amount)
                return
            del self._waiting[holder]
            self.add(holder, amount)
            granted.set_result(None)

    def _order(self, holder: Reservation) -> tuple[int, ...]:
        return tuple(self._held[share] for share in holder.sender.shares)

    def _make_room(self, asking: Reservation, amount: int) -> None:
        coming = sum(holder.num_bytes for holder in self._holding if holder.refused)
        while self.left + coming < amount and (loser := self._loser(asking, amount)):
            coming += loser.num_bytes
            if (turn := self._waiting.pop(loser, None)) is not None:
                turn.granted.set_result(loser.refused)

    def _loser(self, asking: Reservation, amount: int) -> Reservation | None:
        """The body that loses its memory to the one that is `asking`, told so."""
        others = [one for one in self._holding if one is not asking and one.can_lose(self._waiting)]
        slowest = min(others, key=Reservation.rate, default=None)
        if slowest is not None and slowest.rate() < self._slow_rate:
            slowest.refuse(too_slow())
            return slowest
        for level, own in enumerate(asking.sender.shares):
            share_of = {one: one.sender.shares[level] for one in others}
            largest = max(share_of.values(), key=self._held.__getitem__, default=own)
            if self._held[largest] > self._held[own] + amount:
                of_largest = (one for one, share in share_of.items() if share == largest)
                slowest = min(of_largest, key=Reservation.rate)
                slowest.refuse(no_memory())
                return slowest
            others = [one for one, share in share_of.items() if share == own]
        return self._newest_of_a_deadlock(asking)

    def _newest_of_a_deadlock(self, asking: Reservation) -> Reservation | None:
        """Refuse the newest waiting body if every body that holds memory waits for more."""
        if any(one not in self._waiting and one.refused is None for one in self._holding):
            return None
        losers = [one for one in self._waiting if one in self._holding and one is not asking]
        if not losers:
            return None
        losers[-1].refuse(no_memory())
        return losers[-1]

    def _displace(self, asking: Reservation) -> None:
        """Refuse the newest waiting body of the share that waits most, or else the asking one."""
        for level, own in enumerate(asking.sender.shares):
            counts = Counter(holder.sender.shares[level] for holder in self._waiting)
            (share, count), *_ = counts.most_common(1)
            if count > counts[own] + 1:
                loser = [one for one in self._waiting if one.sender.shares[level] == share][-1]
                self._waiting.pop(loser).granted.set_result(no_memory())
                return
        raise no_memory()


class Turn(NamedTuple):
    amount: int
    granted: asyncio.Future[ApiError | None]  # or why it is not


class Reservation:
    """The bytes that one body has taken of a budget."""

    def __init__(self, budget: ByteBudget, sender: Sender | None = None) -> None:
        self.sender = sender or Sender()
        self.num_bytes = 0
        self.refused: ApiError | None = None  # why it has lost its memory
        self.receiving: asyncio.Timeout | None = None  # around the wait for more of the body
        self._budget = budget
        self._since_s = monotonic()  # when it began, later by the time it has waited for memory
        self._waits_since_s: float | None = None

    async def grow(self, to: int) -> None:
        amount = min(to, self._budget.total) - self.num_bytes
        self._waits_since_s = began = monotonic()
        try:
            await self._budget.take(self, amount)
        finally:
            self._waits_since_s = None
            self._since_s += monotonic() - began

    def give_back(self) -> None:
        self._budget.give_back(self)

    def rate(self) -> float:
        """Bytes a second; a body that has only begun is not slow."""
        now = monotonic() if self._waits_since_s is None else self._waits_since_s
        age_s = now - self._since_s
        return self.num_bytes / age_s if age_s > SLOW_AFTER_S else float("inf")

    def can_lose(self, waiting: dict[Reservation, Turn]) -> bool:
        """Whether it can still be refused: it waits for more of its body, or for memory."""
        receiving = self.receiving is not None and not self.receiving.expired()
        return self.refused is None and (receiving or self in waiting)

    def refuse(self, error: ApiError) -> None:
        self.refused = error
        if self.receiving is not None:
            self.receiving.reschedule(asyncio.get_running_loop().time())


def no_memory() -> ApiError:
    message = "too many large requests are being read; try again in a moment"
    return ApiError(429, message, code="too_many_bytes", headers=retry_after(1))


def too_slow() -> ApiError:
    return ApiError(
        408,
        "the body arrives slowly, and other requests need the memory that it takes; send faster",
    )
