"""`RanksExecutor`: several ranks in lock-step on the same plans.

    rank 0   encode(plan) ─▶ forward ──────────▶ sample ─▶ tokens ─▶ the scheduler
                 │              ┊ collectives ┊      │ broadcast
    rank n       └────────────▶ forward ──────────▶ follow: the tokens go to the rows

Each rank keeps all rows and its part of every block. Only the first rank samples, and tells the
others the tokens: whatever is rounded differently somewhere, the texts cannot part. What a step
that failed has left in the other ranks is not known, so there is no going on from it: the engine
ends, and whoever started it starts all ranks anew.
"""

from __future__ import annotations

import logging
import sys
from collections.abc import Callable, Iterable
from dataclasses import replace
from functools import cache
from typing import Protocol

from twostroke.errors import EngineError
from twostroke.exec.executor import ChunkLogits, Masks
from twostroke.exec.memory import MemoryPlan
from twostroke.exec.torch_executor import Forwarded, InFlight, TorchExecutor
from twostroke.model.describe.tensor_parallel import Ranks
from twostroke.plan import StepPlan

log = logging.getLogger(__name__)


@cache
def _msgpack() -> tuple[Callable[[StepPlan], bytes], Callable[[bytes], StepPlan]]:
    import msgspec  # which one rank does without

    return msgspec.msgpack.Encoder().encode, msgspec.msgpack.Decoder(StepPlan).decode


def encode_plan(plan: StepPlan) -> bytes:
    return _msgpack()[0](plan)


def decode_plan(data: bytes) -> StepPlan:
    return _msgpack()[1](data)


class Followers(Protocol):
    """The other ranks, as the first one sees them."""

    def send(self, data: bytes) -> None:
        """To all of them, in order."""
        ...

    def failure(self) -> str:
        """Which of them has ended, and why; "" if none has, after a moment's wait."""
        ...


class RanksExecutor:
    def __init__(self, own: TorchExecutor, followers: Followers) -> None:
        self.max_in_flight = own.max_in_flight
        self._own, self._followers = own, followers
        self.on_chunk_logits: ChunkLogits | None = None

    def forward(self, plan: StepPlan) -> Forwarded:
        self._followers.send(encode_plan(plan))
        return self._own.forward(plan)

    def sample(self, handle: Forwarded, masks: Masks | None = None) -> InFlight:
        return self._own.sample(handle, masks)

    def reset(self) -> None:
        error = sys.exc_info()[1]
        reason = self._followers.failure() or f"a step failed on rank 0 ({error!r})"
        raise EngineError(f"{reason}; the ranks share every step, so all of them end") from error


def follow(executor: TorchExecutor, plans: Iterable[bytes]) -> None:
    """What another rank than the first does, until there are no more plans."""
    for plan in plans:
        executor.follow(executor.forward(decode_plan(plan)))


def agree_on_memory(plan: MemoryPlan, ranks: Ranks) -> MemoryPlan:
    """The plan that every rank has room for; the first tells which of them decided."""
    if ranks.size == 1:
        return plan
    offers = ranks.all_numbers([plan.max_model_len, *plan.group_blocks])
    length, *blocks = (min(numbers) for numbers in zip(*offers, strict=True))
    if ranks.rank == 0:
        smallest = min(range(ranks.size), key=lambda rank: offers[rank][1:])
        least, most = sum(blocks), max(sum(one[1:]) for one in offers)
        if least < most:
            log.warning(
                "rank %d has the least memory for the KV cache: %s blocks, where another has room "
                "for %s",
                smallest,
                f"{least:,}",
                f"{most:,}",
            )
        else:
            log.info("KV cache: %s blocks on each of %d ranks", f"{least:,}", ranks.size)
    shortened = plan.shortened or length < plan.max_model_len
    return replace(plan, max_model_len=length, group_blocks=tuple(blocks), shortened=shortened)
