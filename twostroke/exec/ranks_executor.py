"""`RanksExecutor`: several ranks that run the same plans in lock-step.

    rank 0   encode(plan) ─▶ forward ──────────▶ sample ─▶ tokens ─▶ the scheduler
                 │              ┊ collectives ┊      │ broadcast
    rank n       └────────────▶ forward ──────────▶ follow: the tokens go to the rows

Each rank has all rows and its shard of every block. Rank 0 samples and broadcasts the tokens, so
that rounding differences between ranks cannot make their texts diverge. After a failed step the
state of the other ranks is unknown: the engine ends, and its supervisor restarts all ranks.
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
from twostroke.exec.torch_executor import ForwardHandle, InFlight, TorchExecutor
from twostroke.model.describe.tensor_parallel import Ranks
from twostroke.plan import StepPlan

log = logging.getLogger(__name__)


@cache
def _msgpack() -> tuple[Callable[[StepPlan], bytes], Callable[[bytes], StepPlan]]:
    import msgspec  # not needed with one rank

    return msgspec.msgpack.Encoder().encode, msgspec.msgpack.Decoder(StepPlan).decode


def encode_plan(plan: StepPlan) -> bytes:
    return _msgpack()[0](plan)


def decode_plan(data: bytes) -> StepPlan:
    return _msgpack()[1](data)


class Followers(Protocol):
    """Rank 0's connection to the other ranks."""

    def send(self, data: bytes) -> None:
        """Send `data` to all ranks, in order."""
        ...

    def failure(self) -> str:
        """Return which rank has ended and why. Wait a moment; return "" if none has ended."""
        ...


class RanksExecutor:
    """The executor of rank 0, which sends each plan to the other ranks."""

    def __init__(self, own: TorchExecutor, followers: Followers) -> None:
        self.max_in_flight = own.max_in_flight
        self._own, self._followers = own, followers
        self.on_chunk_logits: ChunkLogits | None = None

    def forward(self, plan: StepPlan) -> ForwardHandle:
        self._followers.send(encode_plan(plan))
        return self._own.forward(plan)

    def sample(self, handle: ForwardHandle, masks: Masks | None = None) -> InFlight:
        return self._own.sample(handle, masks)

    def reset(self) -> None:
        error = sys.exc_info()[1]
        reason = self._followers.failure() or f"a step failed on rank 0 ({error!r})"
        raise EngineError(f"{reason}; the ranks share every step, so all of them end") from error


def follow(executor: TorchExecutor, plans: Iterable[bytes]) -> None:
    """Run the plans on a rank other than 0, until there are no more plans."""
    for plan in plans:
        executor.follow(executor.forward(decode_plan(plan)))


def agree_on_memory(plan: MemoryPlan, ranks: Ranks) -> MemoryPlan:
    """Return the memory plan that fits every rank. Rank 0 logs which rank has the least memory."""
    if ranks.size == 1:
        return plan
    offers = ranks.all_gather_numbers([plan.max_model_len, *plan.group_blocks])
    length, *blocks = (min(numbers) for numbers in zip(*offers, strict=True))
    if ranks.rank == 0:
        smallest = min(range(ranks.size), key=lambda rank: offers[rank][1:])
        min_blocks, max_blocks = sum(blocks), max(sum(offer[1:]) for offer in offers)
        if min_blocks < max_blocks:
            log.warning(
                "rank %d has the least memory for the KV cache: %s blocks, where another has room "
                "for %s",
                smallest,
                f"{min_blocks:,}",
                f"{max_blocks:,}",
            )
        else:
            log.info("KV cache: %s blocks on each of %d ranks", f"{min_blocks:,}", ranks.size)
    shortened = plan.shortened or length < plan.max_model_len
    return replace(plan, max_model_len=length, group_blocks=tuple(blocks), shortened=shortened)
