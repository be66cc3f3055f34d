"""`ModelDrafter`: drafts with a second, smaller model, which has its own executor and KV cache.

    text       [ .......... n tokens .......... ]             the request's verified tokens
    own        [ .......... n tokens .......... | d1 d2 d3 ]  the drafter's copy, and its last draft
    computed   [ ................... )                        in the draft model's KV cache

Before it drafts, the drafter compares its tokens with the text: the first token that differs and
all tokens after it are replaced, and their cache entries are computed again. The tokens that the
cache lacks are computed in chunks, and the sample after the last of them is the first drafted
token. Each further drafted token takes one decode step, shared by all rows that still draft. The
samples have the parameters and the random numbers of the request: if both models agree on the
distribution, they draw the same token.

A request takes a row and blocks when the model first computes tokens of it, and gives them back
when it is paused or ends. Steps run one at a time.
"""

from __future__ import annotations

import logging
from collections.abc import Hashable, Sequence
from dataclasses import dataclass, field, replace
from itertools import islice
from math import exp
from typing import NamedTuple, Protocol

from twostroke.draft.interface import DraftOffer, DraftRow, Text
from twostroke.kv.cache import KVCache, KVSequence, table_length
from twostroke.observe.record import RequestRecord
from twostroke.plan import NO_WORK, PhaseWork, StepPlan, StepResult, TokenWrite
from twostroke.request import EngineRequest
from twostroke.sched.scheduled_request import ScheduledRequest
from twostroke.sched.step import SchedulerConfig, StepBuilder, prefix_seed
from twostroke.sched.steptime import StepTimes
from twostroke.sched.work import AttentionWork

log = logging.getLogger(__name__)

NAME = "draft_model"
MAX_PLACE = 5  # drafted tokens after this place share its survival rate
CONFIDENCE = (0.3, 0.5, 0.7, 0.85, 0.95)  # bounds between the buckets of a token's probability
PRIORS = (0.2, 0.4, 0.6, 0.75, 0.85, 0.95)  # of the buckets
MIN_CHUNK = 8  # smallest chunk of a backlog, in tokens, even if it exceeds the time limit
MAX_FAILURES = 3  # failed steps after which the model drafts no more


class PlanRunner(Protocol):
    """An executor that runs one plan at a time."""

    def run(self, plan: StepPlan) -> StepResult: ...

    def reset(self) -> None:
        """Forget all rows."""
        ...


class Vocabularies(NamedTuple):
    """The sizes of the two models' vocabularies, which may be padded differently."""

    target: int
    draft: int


@dataclass(slots=True, eq=False)
class DraftedText:
    """One request in the draft model."""

    text: Text
    request: ScheduledRequest  # the draft model's own: its tokens, row and KV sequence
    verified: int = 0  # leading tokens that are text
    on_device: int = 0  # leading tokens that the executor's row has
    usable: bool = True  # the draft model's vocabulary has all tokens of the text
    offer: DraftOffer = field(default=DraftOffer(NAME, (), (), ()))

    @property
    def greedy(self) -> bool:
        return self.request.engine_request.params.greedy


class ModelDrafter:
    name = NAME

    def __init__(
        self,
        config: SchedulerConfig,
        runner: PlanRunner,
        vocabularies: Vocabularies,
        min_prob: float = 0.0,
    ) -> None:
        """`config`: the limits of the draft model. `min_prob`: a draft ends before a token that the
        draft model gives a lower probability."""
        self.times = StepTimes()
        self.kv = KVCache(
            config.groups,
            config.block_size,
            keep_cached=config.prefix_caching,
            max_chunk=config.max_num_batched_tokens,
        )
        self._config, self._runner, self._vocabularies = config, runner, vocabularies
        self._min_prob = min_prob
        self._work = AttentionWork(config.groups)
        self._rows = list(range(config.max_num_seqs - 1, -1, -1))
        self._retired: list[int] = []
        self._followed: dict[str, DraftedText] = {}
        self._num_steps = 0
        self._spent_s = 0.0
        self._failures = 0

    # ── requests ────────────────────────────────────────────────────────────────────────────

    def open(self, text: Text) -> DraftedText | None:
        engine_request = text.engine_request
        if not self._has_named_tokens(engine_request):
            return None
        params = engine_request.params.clone()
        # The probability of each drafted token is asked for as its log-probability.
        params.logprobs, params.prompt_logprobs, params.logprob_token_ids = 0, None, None
        request = ScheduledRequest(
            replace(engine_request, params=params, hand_over=False),
            order=(0.0, 0),
            max_outputs=self._config.max_model_len,
            tokens=[],
            kv=KVSequence(prefix_seed(self._config, engine_request)),
            record=RequestRecord(engine_request.request_id, text.num_prompt, 0.0),
        )
        state = self._followed[engine_request.request_id] = DraftedText(text, request)
        return state

    def _has_named_tokens(self, request: EngineRequest) -> bool:
        """Return whether the draft model has all tokens that the request's settings name."""
        params, size = request.params, self._vocabularies.draft
        if size >= self._vocabularies.target:
            return True
        named = {*request.stop_ids, *(params.logit_bias or ()), *(params.allowed_token_ids or ())}
        named.update(*request.bad_words_ids)
        return max(named, default=0) < size

    def close(self, text: Text) -> None:
        state = self._followed.pop(text.engine_request.request_id, None)
        if state is not None:
            self._release(state)

    def pause(self, text: Text) -> None:
        state = self._followed.get(text.engine_request.request_id)
        if state is not None:
            self._release(state)

    def reset_prefixes(self) -> None:
        self.kv.reset_prefixes()

    def _release(self, state: DraftedText) -> None:
        request = state.request
        if request.row >= 0:
            self.kv.close(request.kv)
            self._rows.append(request.row)
            self._retired.append(request.row)
            request.row, state.on_device = -1, 0

    # ── expectations ────────────────────────────────────────────────────────────────────────

    def backlog(self, state: DraftedText) -> int | None:
        if self._failures >= MAX_FAILURES or not self._follow(state):
            return None
        return state.request.num_to_prefill

    def known_keys(self, state: DraftedText, count: int) -> tuple[Hashable, ...]:
        return tuple((NAME, state.greedy, min(n, MAX_PLACE)) for n in range(count))

    def step_s(self, states: Sequence[DraftedText]) -> float:
        rows = len(states)
        read = self._work.of_slots([len(state.request.tokens) for state in states])
        return self.times.decode_only(PhaseWork(rows, rows, *read)) or 0.0

    def catch_up_s(self, state: DraftedText) -> float:
        return self._chunk_s(state, state.request.num_to_prefill)

    def _chunk_s(self, state: DraftedText, count: int) -> float:
        work = PhaseWork(1, count, *self._work.of_chunk(state.request.kv.num_computed, count))
        return self.times.predict(work, NO_WORK) or 0.0

    def max_chunk(self, state: DraftedText, limit_s: float) -> int:
        size = min(state.request.num_to_prefill, self._config.max_num_batched_tokens)
        while size > MIN_CHUNK and self._chunk_s(state, size) > limit_s:
            size = max(MIN_CHUNK, size // 2)
        return size

    def take_seconds(self) -> float:
        spent_s, self._spent_s = self._spent_s, 0.0
        return spent_s

    # ── drafting ────────────────────────────────────────────────────────────────────────────

    def catch_up(self, states: Sequence[tuple[DraftedText, int]]) -> None:
        followed = [(state, count) for state, count in states if self._follow(state)]
        self._run([(one, min(count, one.request.num_to_prefill - 1)) for one, count in followed])

    def propose(self, rows: Sequence[DraftRow]) -> list[DraftOffer | None]:
        """Draft tokens for each row. A row whose backlog does not fit into a step gets no offer."""
        drafting = []
        for row in rows:
            state: DraftedText = row.state
            if row.max_tokens > 0 and self._follow(state):
                state.offer = DraftOffer(NAME, (), (), ())
                drafting.append(row)
        wanted = [(row.state, row.state.request.num_to_prefill) for row in drafting]
        while wanted:
            sampled = self._run(wanted)
            drafting = [
                row for row in drafting if row.state in sampled and self._extend(row, sampled)
            ]
            wanted = [(row.state, 1) for row in drafting]
        return [row.state.offer if row.state.offer.tokens else None for row in rows]

    def _follow(self, state: DraftedText) -> bool:
        """Replace the drafter's tokens that differ from the text. Return whether it can draft."""
        request, text = state.request, state.text.tokens
        own, seq = request.tokens, request.kv
        same = state.verified
        while same < min(len(own), len(text)) and own[same] == text[same]:
            same += 1
        if same < len(own):
            del own[same:]
            state.on_device = min(state.on_device, same)
        own += islice(text, same, None)
        state.offer = DraftOffer(NAME, (), (), ())
        size = self._vocabularies.draft
        if size < self._vocabularies.target:
            state.usable &= all(token < size for token in islice(own, state.verified, None))
        state.verified = len(own)
        # The newest token is computed in any case: the first drafted token is sampled after it.
        rejected = seq.num_computed - min(same, len(own) - 1)
        if rejected > 0:
            self.kv.rewind(seq, rejected)
        if request.row >= 0 and seq.num_computed >= seq.register_at:
            self.kv.register(seq, own)
        return state.usable and len(own) < self._config.max_model_len

    def _extend(self, row: DraftRow, sampled: dict[DraftedText, tuple[int, float]]) -> bool:
        """Add the sampled token to the draft of a row. Return whether the draft continues."""
        state: DraftedText = row.state
        token, prob = sampled[state]
        offer, request, count = state.offer, state.request, len(state.offer.tokens)
        if not 0 <= token < self._vocabularies.target or prob < self._min_prob:
            return False
        bucket = sum(prob >= bound for bound in CONFIDENCE)
        place = (NAME, state.greedy, min(count, MAX_PLACE), bucket)
        state.offer = DraftOffer(
            NAME,
            (*offer.tokens, token),
            (*offer.keys, place),
            (*offer.priors, PRIORS[bucket]),
            self.known_keys(state, count + 1),
        )
        request.tokens.append(token)
        state.on_device = len(request.tokens)  # the executor has written it to the row
        return (
            count + 1 < row.max_tokens
            and token not in request.stop_ids
            and len(request.tokens) < self._config.max_model_len
            and (row.goes_on is None or row.goes_on(state.offer))
        )

    # ── steps ───────────────────────────────────────────────────────────────────────────────

    def _run(
        self, wanted: Sequence[tuple[DraftedText, int]]
    ) -> dict[DraftedText, tuple[int, float]]:
        """Compute the next tokens of each row, as far as budget and blocks allow. Return the sample
        and its probability for each row whose tokens are then all computed."""
        budget = self._config.max_num_batched_tokens
        builder = StepBuilder(self._num_steps, budget, self._work, 0.0)
        written: list[TokenWrite] = []
        slots: list[DraftedText] = []
        chunks: list[tuple[DraftedText, int]] = []
        for state, count in wanted:
            count = self._take_blocks(builder, state, min(count, budget), written)
            budget -= count
            if count == 1 == state.request.num_to_prefill:
                slots.append(state)
            elif count:
                chunks.append((state, count))
        if not slots and not chunks:
            return {}
        sequences = [state.request.kv for state in slots]
        builder.add_slots([state.request for state in slots], sequences)
        self.kv.advance_each(sequences, builder.step)
        for state, count in chunks:
            builder.add_chunk(state.request, count)
            self.kv.advance(state.request.kv, count, builder.step)
        plan = builder.build(tuple(self._retired))._replace(written=tuple(written))
        self._retired.clear()
        self._num_steps += 1
        try:
            result = self._runner.run(plan)
        except Exception as error:
            self._fail(error)
            return {}
        self.kv.commit(plan.step)
        self.times.add(plan.prefill_work, plan.decode_work, result.device_s)
        self._spent_s += result.device_s
        sampling = slots + [state for state, _ in chunks if not state.request.num_to_prefill]
        drawn = zip(sampling, result.tokens, strict=True)
        return {
            state: (token, exp(min(0.0, result.logprobs[n].logprobs[0])) if token >= 0 else 0.0)
            for n, (state, token) in enumerate(drawn)
        }

    def _take_blocks(
        self, builder: StepBuilder, state: DraftedText, count: int, written: list[TokenWrite]
    ) -> int:
        """Prepare a row to compute its next tokens. Return how many: fewer than `count` if blocks
        are short, or if a new row has a cached prefix; 0 if there is no block or no free row."""
        request, kv = state.request, self.kv
        seq, is_new = request.kv, request.row < 0
        if is_new:
            if not self._rows or not count:
                return 0
            kv.open(seq, kv.match(seq, request.tokens))
            count = min(count, request.num_to_prefill)
        count = min(count, seq.capacity + kv.tokens_available - seq.num_computed)
        if count <= 0:
            if is_new:
                kv.close(seq)
            return 0
        if not is_new and state.verified == len(request.tokens):  # a draft may yet be rejected
            builder.add_drops(request, kv.drop_outside_windows(seq))
        grown = kv.reserve(seq, seq.num_computed + count)
        assert grown is not None, "a chunk is larger than the free blocks"
        if is_new:
            request.row = self._rows.pop()
            builder.add_row(request)
            builder.add_blocks(request, table_length(seq.tables))
        else:
            builder.add_blocks(request, grown)
            if state.on_device < len(request.tokens):
                replaced = tuple(request.tokens[state.on_device :])
                written.append(TokenWrite(request.row, state.on_device, replaced))
        state.on_device = len(request.tokens)
        return count

    def _fail(self, error: Exception) -> None:
        """Release all rows and drop all cached blocks after a failed step."""
        self._failures += 1
        reason = f"{type(error).__name__}: {error}"
        last = "; it drafts no more" if self._failures >= MAX_FAILURES else ""
        log.error("the draft model failed while running a step (%s)%s", reason, last)
        for state in self._followed.values():
            self._release(state)
        self._retired.clear()
        self.kv.commit(self._num_steps)
        self.kv.reset_prefixes()
        self._runner.reset()

    # ── audit ───────────────────────────────────────────────────────────────────────────────

    def audit(self) -> None:
        self.kv.audit()
        states = self._followed.values()
        rows = [state.request.row for state in states if state.request.row >= 0]
        expected = list(range(self._config.max_num_seqs))
        assert sorted(rows + self._rows) == expected, "a row of the draft model leaked"
        for state in states:
            assert state.request.row >= 0 or not state.request.kv.tables, "blocks without a row"
            assert state.request.kv.num_computed <= len(state.request.tokens)
        if not self._followed:
            assert self.kv.is_idle(), "blocks of the draft model are owned by no request"
