"""Simulated hits in an offload tier: parts of prompts that are fetched instead of computed."""

from __future__ import annotations

from typing import NamedTuple

from twostroke.kv.cache import KVSequence
from twostroke.kv.transfer import ReceiverFullError
from twostroke.request import EngineRequest
from twostroke.sched.scheduler import Scheduler
from twostroke.sched.step import prefix_seed

GBYTES_PER_S = 20.0  # between host memory and a GPU, unless given


class OffloadHits(NamedTuple):
    """The share of each prompt that the tier has, and the rate of its link."""

    share: float
    bytes_per_s: float


class OffloadTier:
    """The tier of one engine. Its link carries one prompt after the other. A prompt waits for its
    tokens before it is queued; the prefix cache has them from then on."""

    def __init__(self, hits: OffloadHits, token_bytes: float, scheduler: Scheduler) -> None:
        self._hits, self._token_bytes, self._scheduler = hits, token_bytes, scheduler
        self._free_s = 0.0  # end of the last copy

    def fetch_end_s(self, request: EngineRequest, now: float) -> float:
        """Return when the tokens that the prefix cache does not have will have been copied."""
        kv, tokens = self._scheduler.kv, request.prompt_token_ids
        tables = kv.match(self._sequence(request), tokens)
        cached = min(len(table) for table in tables) * kv.block_size
        missing = self._num_tokens(request) - cached
        if missing <= 0:
            return now
        self._free_s = max(self._free_s, now) + missing * self._token_bytes / self._hits.bytes_per_s
        return self._free_s

    def store(self, request: EngineRequest) -> None:
        """Put the fetched tokens into the prefix cache. Without free blocks they are computed."""
        kv, count = self._scheduler.kv, self._num_tokens(request)
        tokens, seq = request.prompt_token_ids[: count + 1], self._sequence(request)
        kv.open(seq, kv.match(seq, tokens))
        if seq.num_computed < count:
            try:
                kv.receive(seq, count)
            except ReceiverFullError:
                kv.close(seq)
                return
            kv.received(seq)
            kv.register(seq, tokens)
        kv.close(seq)

    def _num_tokens(self, request: EngineRequest) -> int:
        """Return the tokens of a prompt that the tier has: full blocks, and not all tokens."""
        size, prompt = self._scheduler.kv.block_size, len(request.prompt_token_ids)
        return min(int(self._hits.share * prompt), prompt - 1) // size * size

    def _sequence(self, request: EngineRequest) -> KVSequence:
        return KVSequence(prefix_seed(self._scheduler.config, request))
