"""`Grammars`: the tokens that requests with a grammar or a reasoning budget may write next. The
engine loop owns this object.

    add ─▶ (a thread compiles it) ─▶ take_compiled
        ─▶ held ─▶ (a step is planned without held requests) ─▶ samples(plan) ─▶ masks
        ─▶ (the step is sampled) ─▶ advance with the committed token ─▶ …
        ─▶ drop

A matcher knows only the committed tokens of its request. Rows, preemption and failed steps do not
affect it. Nothing is imported or built before the first request that needs a grammar. A grammar
applies to the text after the reasoning (`thinking.py`).
"""

from __future__ import annotations

import contextlib
import queue
import threading
from collections import OrderedDict
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field
from time import thread_time
from typing import TYPE_CHECKING, Final, NamedTuple

from twostroke.errors import RequestError
from twostroke.exec.samples import decode_tokens, samples_of
from twostroke.exec.thinking import ThinkingState
from twostroke.exec.token_mask import Mask, mask_from_bytes, mask_of
from twostroke.plan import StepPlan
from twostroke.request import EngineRequest, StructuredOutputs
from twostroke.sandbox import run_when_idle

if TYPE_CHECKING:
    from llguidance import LLMatcher, LLTokenizer

    from twostroke.model.text.tokenizer import Tokenizer

COMPILED: Final = 32  # compiled grammars kept for later requests
# A mask of an ordinary grammar takes some 0.05 ms of CPU time, and the whole step waits for it. An
# ambiguous grammar takes longer with every token.
SLOW_S: Final = 0.05
# The CPU time of all masks of a step. A request whose mask does not fit waits for a later step. A
# request whose masks alone exceed the budget, token after token, is ended.
STEP_BUDGET_S: Final = 0.01
AVERAGED_TOKENS: Final = 16  # the mask time of a request is averaged over these tokens
# The expected time of a mask if no mask of its grammar has been timed. The budget has room for four
# such masks. The first timed masks replace this value for all requests with that grammar.
UNTIMED_S: Final = STEP_BUDGET_S / 4
STACK_BYTES: Final = 8 * 1024**2
TOKENS_AHEAD: Final = 32  # above the tokens of one request in all steps in flight


@dataclass(slots=True)
class _MaskTime:
    """The moving average of the CPU time of masks."""

    seconds: float = 0.0
    num_masks: int = 0

    def add(self, seconds: float) -> None:
        self.num_masks += 1
        weight = 1 / min(self.num_masks, AVERAGED_TOKENS)
        self.seconds += weight * (seconds - self.seconds)


class _Compiled(NamedTuple):
    """A compiled grammar."""

    matcher: LLMatcher
    first_mask: bytes | None  # mask of the first token, if the grammar is usable
    mask_time: _MaskTime  # of all requests with this grammar


class End(NamedTuple):
    """The end of a request whose grammar is complete or has failed."""

    error: str = ""


@dataclass(slots=True)
class _Follower:
    """The state of one request with a grammar or a reasoning budget."""

    requested: StructuredOutputs | None
    matcher: LLMatcher | None  # None: no grammar
    thinking: ThinkingState | None
    ends: Mask  # tokens that may end the text where the grammar allows it
    never: Mask  # end tokens that the request ignores
    first_mask: bytes | None  # set until the first token is committed
    grammar_time: _MaskTime  # of all requests with this grammar
    mask_time: _MaskTime = field(default_factory=_MaskTime)
    sampled: bool = False  # a step samples the first token, whose mask is `first_mask`
    slow: bool = False
    turn: int = 0  # the last step whose budget included the mask

    @property
    def may_have_mask(self) -> bool:
        """Return whether one of the next samples may have a mask."""
        left = self.thinking.left if self.thinking is not None else None
        return self.matcher is not None or (left is not None and left <= TOKENS_AHEAD)

    @property
    def expected_s(self) -> float:
        """Return the expected CPU time of the next mask."""
        if self.matcher is None or not self.sampled:
            return 0.0
        for time in (self.mask_time, self.grammar_time):
            if time.num_masks:
                return time.seconds
        return UNTIMED_S


class Grammars:
    """All requests with a grammar or a reasoning budget."""

    def __init__(self, tokenizer: Callable[[], Tokenizer | None], vocab_size: int) -> None:
        """`tokenizer`: returns the tokenizer; called for the first grammar."""
        self._source = tokenizer
        self._vocab_size = vocab_size  # of the model; the tokenizer's may differ
        self._text: Tokenizer | None = None  # set when the thread has read it
        self._tokenizer: LLTokenizer | None = None  # used by the thread only, like the next field
        self._end_ids: list[int] = []
        self._compiled: OrderedDict[StructuredOutputs, _Compiled] = OrderedDict()
        self._followers: dict[str, _Follower] = {}
        self.active = False  # whether there are such requests
        self._rows: dict[int, str] = {}  # rows of requests with a grammar
        # Requests that wait for a grammar to be compiled, or (None) for the tokenizer.
        self._waiting: dict[StructuredOutputs | None, list[EngineRequest]] = {}
        self._to_compile: queue.SimpleQueue[StructuredOutputs | None] = queue.SimpleQueue()
        self._done: queue.SimpleQueue[tuple[StructuredOutputs | None, _Compiled | str | None]]
        self._done = queue.SimpleQueue()
        self._compiler: threading.Thread | None = None
        self._turn = 0

    def add(self, request: EngineRequest) -> bool:
        """Add a request with a grammar or a reasoning budget. Return whether the request is ready;
        if not, `take_compiled` returns it later."""
        requested, thinking = request.params.structured_outputs, request.thinking
        if thinking is not None:
            ids = (*thinking.start_ids, *thinking.forced_ids)
            if max(ids, default=0) >= self._vocab_size:
                raise RequestError("the model cannot write the tags of its reasoning")
        if requested is None and self._text is not None:
            self._follow(request, None)
            return True
        if requested is not None and requested in self._compiled:
            self._compiled.move_to_end(requested)
            self._follow(request, self._compiled[requested])
            return True
        if requested in self._waiting:
            self._waiting[requested].append(request)
            return False
        self._waiting[requested] = [request]
        self._compile_later(requested)
        return False

    def warm(self) -> None:
        """Read the tokenizer now, in the thread. llguidance holds the GIL for 0.4 s, so the first
        grammar would delay all running requests."""
        self._compile_later(None)

    def _compile_later(self, requested: StructuredOutputs | None) -> None:
        if self._compiler is None:
            self._compiler = _start_thread(self._compile_all)
        self._to_compile.put(requested)

    def take_compiled(self, timeout_s: float) -> list[tuple[str, str]]:
        """Return the requests whose grammars are compiled, each with its error or ""."""
        ready = []
        with contextlib.suppress(queue.Empty):
            while True:
                requested, compiled = self._done.get(timeout_s > 0, timeout_s)
                timeout_s = 0.0
                problem = compiled if isinstance(compiled, str) else ""
                if requested is not None and isinstance(compiled, _Compiled):
                    self._compiled[requested] = compiled
                    if len(self._compiled) > COMPILED:
                        self._compiled.popitem(last=False)
                for request in self._waiting.pop(requested, ()):
                    if not isinstance(compiled, str):
                        self._follow(request, compiled)
                    ready.append((request.request_id, problem))
        return ready

    def _follow(self, request: EngineRequest, compiled: _Compiled | None) -> None:
        requested = request.params.structured_outputs
        if not self._followers:
            self._rows.clear()  # rows may have changed owners while no request had a grammar
        never = set(self._end_ids) - request.stop_ids if request.params.ignore_eos else ()
        thinking = None
        if request.thinking is not None:
            assert self._text is not None
            token_bytes = self._text.token_bytes
            thinking = ThinkingState(request.thinking, token_bytes, compiled is not None)
        self.active = True
        self._followers[request.request_id] = _Follower(
            requested,
            None if compiled is None else compiled.matcher.deep_copy(),
            thinking,
            mask_of(sorted(request.stop_ids), self._vocab_size),
            mask_of(sorted(never), self._vocab_size),
            None if compiled is None else compiled.first_mask,
            _MaskTime() if compiled is None else compiled.mask_time,
        )
        if request.resumed is not None:  # tokens that another engine wrote with the same grammar
            self.advance(request.request_id, request.resumed.tokens, ended=False)

    def _compile_all(self) -> None:
        """Compile in a thread. llguidance takes up to 0.25 s for a grammar, without the GIL."""
        while True:
            requested = self._to_compile.get()
            try:
                if requested is None:
                    self._load_text()
                    self._done.put((None, None))
                    with contextlib.suppress(Exception):  # the first grammar reports the error
                        self._load_tokenizer()
                else:
                    self._done.put((requested, self._compile(requested)))
            except RequestError as error:
                self._done.put((requested, str(error)))
            except Exception as error:  # requests must not wait forever
                self._done.put((requested, f"the grammar could not be compiled ({error})"))

    def _compile(self, requested: StructuredOutputs) -> _Compiled:
        from twostroke.structured import make_matcher, to_grammar

        tokenizer = self._load_tokenizer()
        grammar = to_grammar(requested, tokenizer)

        def compiled() -> _Compiled:
            matcher = make_matcher(tokenizer, grammar)
            first = matcher.deep_copy()
            mask = first.compute_bitmask()  # the lexer caches its states for the first token
            return _Compiled(matcher, None if first.is_error() else mask, _MaskTime())

        # Only this part runs at idle priority. Python code holds the GIL: at idle priority the
        # engine loop would wait for the GIL while other processes keep the CPUs busy.
        return _when_idle(compiled)

    def _load_tokenizer(self) -> LLTokenizer:
        from twostroke.model.text.grammar_tokenizer import make_tokenizer

        if self._tokenizer is None:
            text = self._load_text()
            self._end_ids = sorted(n for n in text.stop_ids if n < self._vocab_size)
            self._tokenizer = make_tokenizer(text.to_json(), self._end_ids)
        return self._tokenizer

    def _load_text(self) -> Tokenizer:
        if self._text is None:
            text = self._source()
            if text is None:
                raise RequestError("structured outputs need a tokenizer, and none is loaded")
            text.token_bytes(0)  # builds the table
            self._text = text
        return self._text

    def drop(self, request_id: str) -> None:
        self._followers.pop(request_id, None)
        self.active = bool(self._followers)

    def samples(self, plan: StepPlan) -> dict[int, str]:
        """Return the samples of this step that may have a mask: index → request. Must be called for
        every plan, in order, while any request has a grammar or a reasoning budget."""
        rows, followers = self._rows, self._followers
        for row in plan.retired:
            rows.pop(row, None)
        for new in plan.new:
            rows.pop(new.row, None)
            if new.request_id in followers:
                rows[new.row] = new.request_id
        sampled = samples_of(decode_tokens(plan.decode), plan.prefill).rows.tolist()
        wanted = ((index, rows.get(row, "")) for index, row in enumerate(sampled))
        masked = {
            index: name
            for index, name in wanted
            if name in followers and followers[name].may_have_mask
        }
        for name in masked.values():
            followers[name].sampled = True
        return masked

    def held(self) -> frozenset[str]:
        """Return the requests that wait a step, because the masks of all would take longer than
        `STEP_BUDGET_S`. Those that have waited longest come first, and one is always served."""
        followers = self._followers
        if sum(follower.expected_s for follower in followers.values()) <= STEP_BUDGET_S:
            return frozenset()
        self._turn += 1
        held, total_s = set(), 0.0
        for name in sorted(followers, key=lambda name: followers[name].turn):
            follower = followers[name]
            if total_s and total_s + follower.expected_s > STEP_BUDGET_S:
                held.add(name)
            else:
                total_s += follower.expected_s
                follower.turn = self._turn
        return frozenset(held)

    def allows_drafts(self, request_id: str) -> bool:
        """Return whether a request may have drafts: not while its reasoning is followed, nor before
        the first token of its grammar."""
        follower = self._followers.get(request_id)
        if follower is None:
            return True
        matcher, thinking = follower.matcher, follower.thinking
        if matcher is None or (thinking is not None and not thinking.over):
            return False
        return follower.first_mask is None and not matcher.is_error()

    def limit_drafts(self, request_id: str, drafts: Sequence[int]) -> int:
        """Return how many of these drafted tokens may be verified. The grammar allows them, and
        does not end with them."""
        follower = self._followers.get(request_id)
        if follower is None:
            return len(drafts)
        matcher = follower.matcher
        if matcher is None or not self.allows_drafts(request_id):
            return 0
        expected_s = sum(one.expected_s for one in self._followers.values())
        affordable = int(STEP_BUDGET_S / max(expected_s, 1e-6)) - 1
        count = 0
        for token in drafts[: max(0, affordable)]:
            if token in self._end_ids or not matcher.try_consume_tokens([token]):
                break
            count += 1
            if matcher.is_stopped():
                break
        stopped = matcher.is_stopped()
        if count:
            matcher.rollback(count)
        return count - stopped

    def masks(self, samples: Mapping[int, str], plan: StepPlan | None = None) -> dict[int, Mask]:
        """Return the masks of `samples`, after all earlier tokens are committed. Requests that have
        ended or may write any token have no mask. `plan`: of the step, if it may have drafts: the
        samples after drafted tokens have the masks of the grammar after them."""
        masks = {}
        drafts = _drafts_of(plan) if plan is not None and plan.draft_tokens else {}
        for index, name in samples.items():
            follower = self._followers.get(name)
            if follower is None:
                continue
            before = drafts.get(index, ())
            if before and follower.matcher is not None:
                follower.matcher.try_consume_tokens(list(before))
            mask = self._mask(follower)
            if before and follower.matcher is not None:
                follower.matcher.rollback(len(before))
            if mask is not None:
                masks[index] = mask
        return masks

    def _mask(self, follower: _Follower) -> Mask | None:
        thinking, matcher = follower.thinking, follower.matcher
        if thinking is not None and thinking.forced is not None:
            return mask_of([thinking.forced], self._vocab_size)
        if matcher is None or (thinking is not None and thinking.inside):
            return None
        allowed = self._grammar_mask(follower, matcher)
        if thinking is not None and not thinking.over:
            allowed |= mask_of(thinking.start_ids, self._vocab_size)
        return allowed

    def _grammar_mask(self, follower: _Follower, matcher: LLMatcher) -> Mask:
        started = thread_time()
        bits = follower.first_mask
        allowed = mask_from_bytes(bits or matcher.compute_bitmask(), self._vocab_size)
        if matcher.is_accepting():
            allowed |= follower.ends
            allowed &= ~follower.never
            if not allowed.any():  # only the empty text matches
                allowed |= follower.never
        took_s = thread_time() - started
        follower.slow |= took_s > SLOW_S
        if bits is None:
            follower.mask_time.add(took_s)
            follower.grammar_time.add(took_s)
        return allowed

    def advance(self, request_id: str, tokens: Sequence[int], ended: bool) -> End | None:
        """Advance by committed tokens. `ended`: the request has ended. Return the end of the
        grammar, if the tokens complete or violate the grammar."""
        follower = self._followers.get(request_id)
        if follower is None:
            return None
        matcher, thinking = follower.matcher, follower.thinking
        if thinking is not None and not thinking.over:
            tokens = thinking.advance(tokens)
            if thinking.refused and not ended:
                return End(
                    "the end of the reasoning could not be written when its budget was spent: "
                    "allowed_token_ids or bad_words forbid it"
                )
            if thinking.over and matcher is None:
                self.drop(request_id)
        if matcher is None or not tokens:
            return None
        had_first_mask, follower.first_mask = follower.first_mask is not None, None
        started = thread_time()
        taken = 0 if ended or matcher.is_error() else matcher.try_consume_tokens(list(tokens))
        if had_first_mask and not taken and not ended:
            # A matcher notices its failure only when a mask is computed.
            matcher.compute_bitmask()
            taken = matcher.try_consume_tokens(list(tokens))
        if matcher.is_error():
            # Copies share the lexer's cache and its size limit.
            assert follower.requested is not None
            self._compiled.pop(follower.requested, None)
            return End(f"the grammar became too complex to follow ({_reason(matcher)})")
        if ended:  # the last token may be outside the grammar
            return None
        if taken < len(tokens):
            return End(
                "no token that the grammar allows could be written: allowed_token_ids, bad_words "
                "or min_tokens forbid them all"
            )
        if matcher.is_stopped():
            return End()
        if follower.slow or thread_time() - started > SLOW_S:
            return End(f"the grammar takes longer than {SLOW_S} s of CPU time for one token")
        mask_time = follower.mask_time
        if mask_time.num_masks >= AVERAGED_TOKENS and mask_time.seconds > STEP_BUDGET_S:
            return End(
                f"the grammar takes {1e3 * mask_time.seconds:.0f} ms of CPU time a token, and at "
                f"most {1e3 * STEP_BUDGET_S:.0f} ms a step may go to grammars; simplify it: fewer "
                "alternatives, patterns and repetitions"
            )
        return None


def _drafts_of(plan: StepPlan) -> dict[int, tuple[int, ...]]:
    """Return for each sample that follows drafts the drafted tokens before it."""
    found = {}
    first = draft = 0
    for slot in plan.decode:
        tokens = plan.draft_tokens[draft : draft + slot.drafts]
        for n in range(1, slot.drafts + 1):
            found[first + n] = tokens[:n]
        first += 1 + slot.drafts
        draft += slot.drafts
    return found


def _start_thread(work: Callable[[], None]) -> threading.Thread:
    """Start a thread with twice the stack size that grammars are checked with."""
    before = threading.stack_size(STACK_BYTES)
    try:
        thread = threading.Thread(target=work, name="grammars", daemon=True)
        thread.start()
    finally:
        threading.stack_size(before)
    return thread


def _when_idle(work: Callable[[], _Compiled]) -> _Compiled:
    """Return the result of `work`, run in a thread of idle priority."""
    done: Future[_Compiled] = Future()

    def run() -> None:
        run_when_idle()
        try:
            done.set_result(work())
        except BaseException as error:
            done.set_exception(error)

    _start_thread(run)
    return done.result()


def _reason(matcher: LLMatcher) -> str:
    return str(matcher.get_error()).removesuffix("<non-verbose/>").strip()[:200]
