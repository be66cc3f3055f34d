"""A fake model made of hashes, which notices every wrong block, row or position.

The fake KV pool stores, for each slot, a hash of the prefix that it was computed from. A query
checks that every visible position has the hash of its own prefix. The next token is a function of
the prefix, so that the output of a request is known in advance (`expected_tokens`).
"""

from __future__ import annotations

import random
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import islice

from twostroke.kv.cache import GroupLimits
from twostroke.plan import NewRow, StepPlan, StepResult, TokenLogprobs
from twostroke.request import EngineRequest, SamplingParams

NamedBlocks = dict[tuple[int, int], set[str]]  # (group, block) → the requests of a step that use it
VOCAB = 7  # few tokens: prefixes of different requests coincide often
EOS = 0


def groups(num_blocks: int, *windows: int | None) -> tuple[GroupLimits, ...]:
    """Return a KV group for each window; without windows, one group that keeps all positions."""
    return tuple(GroupLimits(num_blocks, window) for window in windows or (None,))


def extend(prefix: int, token: int) -> int:
    return hash((prefix, token, 0x5EED))


def next_token(prefix: int, seed: int) -> int:
    return hash((prefix, seed, "next")) % (VOCAB * 5) % VOCAB if seed else prefix % VOCAB


def expected_tokens(request: EngineRequest, max_model_len: int) -> list[int]:
    """Return the output of the fake model for a request that runs alone, without chunks."""
    prefix = 0
    for token in request.prompt_token_ids:
        prefix = extend(prefix, token)
    room = max_model_len - len(request.prompt_token_ids)
    limit = min(request.params.max_tokens or room, room)
    written: list[int] = []
    while len(written) < limit:
        token = next_token(prefix, request.seed)
        written.append(token)
        if token in request.stop_ids and len(written) >= request.params.min_tokens:
            break
        prefix = extend(prefix, token)
    return written


@dataclass
class Row:
    tokens: list[int]
    prefixes: list[int]  # prefixes[n]: of tokens[: n + 1]
    new: NewRow
    tables: list[list[int]] = field(default_factory=list)
    # The stretch of positions of each entry of the table, and the number of the next stretch.
    stretches: list[int] = field(default_factory=list)
    num_stretches: int = 0

    def push(self, token: int) -> None:
        self.tokens.append(token)
        self.prefixes.append(extend(self.prefixes[-1] if self.prefixes else 0, token))


class FakeExecutor:
    """Runs plans in order, as a device would; results may be read later."""

    def __init__(
        self,
        block_size: int,
        windows: Sequence[int | None] = (None,),
        budget_blocks: int | None = None,
    ) -> None:
        """`budget_blocks`: the most blocks of a decoding request, with eviction."""
        self.budget_blocks = budget_blocks
        self.block_size = block_size
        self.windows = windows
        self.rows: dict[int, Row] = {}
        self.slots: dict[tuple[int, int, int], int] = {}  # (group, block, offset) → prefix
        self.uncommitted: deque[NamedBlocks] = deque()  # one entry for each step
        self.skew = 0  # an error of positions, for a negative control

    def run(self, plan: StepPlan) -> StepResult:
        for drop in plan.dropped:
            table = self.rows[drop.row].tables[drop.group]
            table[: drop.upto] = [0] * drop.upto
        for row in plan.retired:
            del self.rows[row]
        for new in plan.new:
            assert new.row not in self.rows, f"row {new.row} is taken"
            row = Row([], [], new, [[] for _ in self.windows])
            for token in new.tokens:
                row.push(token)
            self.rows[new.row] = row
        for append in plan.appended:
            row = self.rows[append.row]
            row.tables[append.group].extend(append.blocks)
            if append.group == 0:
                end = row.num_stretches + len(append.blocks)
                row.stretches += range(row.num_stretches, end)
                row.num_stretches = end
        for evict in plan.evicted:
            row = self.rows[evict.row]
            del row.tables[0][evict.start : evict.stop], row.stretches[evict.start : evict.stop]
        for number, position, tokens in plan.written:
            row = self.rows[number]
            del row.tokens[position:], row.prefixes[position:]
            for token in tokens:
                row.push(token)
        drafts = iter(plan.draft_tokens)
        for slot in plan.decode:
            row = self.rows[slot.row]
            assert slot.position == len(row.tokens) - 1, "decode feeds the newest"
            for token in islice(drafts, slot.drafts):
                row.push(token)
        assert next(drafts, None) is None, "a draft has no slot"
        spans = [(slot.row, slot.position, 1 + slot.drafts) for slot in plan.decode]
        spans += [(chunk.row, chunk.start, chunk.size) for chunk in plan.prefill]
        assert len({row for row, _, _ in spans}) == len(spans), "a row is planned twice"
        named: NamedBlocks = {}
        for row, start, size in spans:  # a layer stores everything before it attends
            self._store(self.rows[row], start + self.skew, size, named)
        for row, start, size in spans:
            self._attend(self.rows[row], start, size, named)
        self.uncommitted.append(named)
        tokens: list[int] = []
        counts = []
        for slot in plan.decode:
            tokens += (written := self._verify(self.rows[slot.row], slot.position))
            counts.append(len(written))
        for chunk in plan.prefill:
            if chunk.last:
                row = self.rows[chunk.row]
                tokens.append(self.next_token(row, row.prefixes[-1]))
                counts.append(1)
                row.push(tokens[-1])
        return StepResult(tokens, {}, {}, 0.0, counts=counts if plan.draft_tokens else None)

    def next_token(self, row: Row, prefix: int) -> int:
        return next_token(prefix, row.new.seed)

    def _verify(self, row: Row, position: int) -> list[int]:
        """Return the accepted drafts after `position` and the token after them, which become the
        text of the row."""
        drafts, written = row.tokens[position + 1 :], list[int]()
        for n, prefix in enumerate(row.prefixes[position:]):
            written.append(self.next_token(row, prefix))
            if drafts[n : n + 1] != written[n:]:
                break
        del row.tokens[position + 1 :], row.prefixes[position + 1 :]
        for token in written:
            row.push(token)
        return written

    def committed(self) -> None:
        self.uncommitted.popleft()

    def _store(self, row: Row, start: int, size: int, named: NamedBlocks) -> None:
        for position in range(start, start + size):
            for group, table in enumerate(row.tables):
                number, offset = divmod(position, self.block_size)
                block = table[row.stretches.index(number)]
                assert block != 0, "a write into the null block"
                for step in self.uncommitted:
                    others = step.get((group, block), set()) - {row.new.request_id}
                    assert not others, f"block {block} is still owned by {others} in flight"
                self.slots[group, block, offset] = row.prefixes[position - self.skew]
                named.setdefault((group, block), set()).add(row.new.request_id)

    def visible(self, row: Row, query: int) -> list[int]:
        """Return the stretches that a query sees by definition: each token is computed when it is
        generated, and the oldest stretch after the first is evicted beyond the budget."""
        size, prompt = self.block_size, row.new.num_prompt
        if self.budget_blocks is None or query < prompt:
            return list(range(query // size + 1))
        seen = list(range((prompt - 1) // size + 1))
        for position in range(prompt, query + 1):
            grows = position // size > seen[-1]
            del seen[1 : 1 + max(0, len(seen) + grows - self.budget_blocks)]
            seen += [position // size] * grows
        return seen

    def _attend(self, row: Row, start: int, size: int, named: NamedBlocks) -> None:
        for query in {start, start + size - 1}:
            for group, (table, window) in enumerate(zip(row.tables, self.windows, strict=True)):
                first = 0 if window is None else max(0, query - window + 1)
                entries = {number: entry for entry, number in enumerate(row.stretches)}
                seen = [number for number in row.stretches if number <= query // self.block_size]
                assert seen == self.visible(row, query), f"the query at {query} sees {seen}"
                for position in range(first, query + 1):
                    if position // self.block_size not in entries:
                        continue
                    block = table[entries[position // self.block_size]]
                    held = self.slots.get((group, block, position % self.block_size))
                    assert held == row.prefixes[position], (
                        f"{row.new.request_id}: the query at {query} sees a wrong key at "
                        f"{position} (block {block} of group {group})"
                    )
                    named.setdefault((group, block), set()).add(row.new.request_id)


class FakeDraftRunner(FakeExecutor):
    """Runs the plans of a draft model. Its tokens are those of the fake model, but for one in
    `wrong_every` prefixes; it is never wrong if that is 0."""

    def __init__(
        self, block_size: int, windows: Sequence[int | None] = (None,), wrong_every: int = 0
    ) -> None:
        super().__init__(block_size, windows)
        self.wrong_every = wrong_every
        self.plans: list[StepPlan] = []
        self.token_s = 0.0  # time of each token
        self.failing: list[int] = []  # steps that fail

    def next_token(self, row: Row, prefix: int) -> int:
        wrong = self.wrong_every and hash((prefix, 0xD4AF7)) % self.wrong_every == 0
        return (super().next_token(row, prefix) + bool(wrong)) % VOCAB

    def run(self, plan: StepPlan) -> StepResult:
        self.plans.append(plan)
        if plan.step in self.failing:
            raise RuntimeError("broken")
        result = super().run(plan)
        self.committed()
        logprobs = {n: TokenLogprobs((token,), (-0.1,), 1) for n, token in enumerate(result.tokens)}
        return result._replace(logprobs=logprobs, device_s=self.token_s * plan.num_tokens)

    def reset(self) -> None:
        self.rows.clear()


def fake_request(
    name: str,
    prompt: Sequence[int],
    max_tokens: int | None = 8,
    *,
    seed: int = 0,
    stop: bool = False,
    min_tokens: int = 0,
    **more: object,
) -> EngineRequest:
    params = SamplingParams(max_tokens=max_tokens, min_tokens=min_tokens)
    stop_ids = frozenset({EOS}) if stop else frozenset()
    return EngineRequest(name, tuple(prompt), params, seed, stop_ids, **more)  # type: ignore[arg-type]


def random_prompt(rng: random.Random, longest: int) -> list[int]:
    """Return a random prompt. Many prompts share a prefix."""
    size = rng.randint(1, max(1, longest))
    if rng.random() < 0.5:
        return [(n * n) % VOCAB for n in range(size)]
    return [rng.randrange(VOCAB) for _ in range(size)]
