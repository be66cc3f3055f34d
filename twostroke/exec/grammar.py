"""`Grammars`: which tokens each request may write next that has a grammar or a budget for its
reasoning. Owned by the engine's loop.

    add ─▶ (a thread compiles it) ─▶ take_compiled
        ─▶ held ─▶ (a step is planned without those) ─▶ samples(plan) ─▶ masks
        ─▶ (the step is sampled) ─▶ advance with the committed token ─▶ …
        ─▶ drop

A matcher knows the committed tokens of its request and nothing else, so that it neither knows nor
minds rows, preemption or a step that failed. Nothing is imported or built before the first request
that needs it. A grammar applies to what comes after the reasoning (`thinking.py`).
"""

from __future__ import annotations

import contextlib
import queue
import threading
from collections import OrderedDict
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future
from dataclasses import dataclass
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

COMPILED: Final = 32  # grammars kept for the next request that has the same
# A token of an ordinary grammar takes some 0.05 ms of CPU time, and everybody waits for it. An
# ambiguous one takes longer with every token.
SLOW_S: Final = 0.05
# The CPU time of all masks of a step. A request whose mask does not fit waits for a later step; one
# that takes more by itself, token after token, is ended.
STEP_BUDGET_S: Final = 0.01
PATIENCE_TOKENS: Final = 16  # over so many tokens the time of a request's masks is averaged
STACK_BYTES: Final = 8 * 1024**2
TOKENS_AHEAD: Final = 32  # more than steps in flight can write for one request


class _Compiled(NamedTuple):
    matcher: LLMatcher
    first_mask: bytes | None  # of every text's first token, if the grammar can be followed so far


class End(NamedTuple):
    """A request can write no more: its grammar is complete, or has failed."""

    error: str = ""


@dataclass(slots=True)
class _Follower:
    asked: StructuredOutputs | None
    matcher: LLMatcher | None  # None: no grammar
    thinking: ThinkingState | None
    ends: Mask  # what may end the text where the grammar allows it
    never: Mask  # ends of text that the request ignores
    first_mask: bytes | None  # until the first token is committed
    slow: bool = False
    mask_s: float = 0.0  # a moving average of the CPU time of a mask
    num_masks: int = 0
    turn: int = 0  # the last step for which its mask was within the budget

    @property
    def may_have_mask(self) -> bool:
        """At the next few samples."""
        left = self.thinking.left if self.thinking is not None else None
        return self.matcher is not None or (left is not None and left <= TOKENS_AHEAD)


class Grammars:
    def __init__(self, tokenizer: Callable[[], Tokenizer | None], vocab_size: int) -> None:
        """`tokenizer` is asked for when the first grammar comes."""
        self._source = tokenizer
        self._vocab_size = vocab_size  # the model's, which may differ from the tokenizer's
        self._text: Tokenizer | None = None  # once the thread has read it
        self._tokenizer: LLTokenizer | None = None  # the thread's, as is the next
        self._end_ids: list[int] = []
        self._compiled: OrderedDict[StructuredOutputs, _Compiled] = OrderedDict()
        self._followers: dict[str, _Follower] = {}
        self._rows: dict[int, str] = {}  # rows taken by requests that have a grammar
        # For a grammar to be compiled; None: for the tokenizer to be read.
        self._waiting: dict[StructuredOutputs | None, list[EngineRequest]] = {}
        self._to_compile: queue.SimpleQueue[StructuredOutputs | None] = queue.SimpleQueue()
        self._done: queue.SimpleQueue[tuple[StructuredOutputs | None, _Compiled | str | None]]
        self._done = queue.SimpleQueue()
        self._compiler: threading.Thread | None = None
        self._turn = 0

    @property
    def active(self) -> bool:
        return bool(self._followers)

    def add(self, given: EngineRequest) -> bool:
        """A request with a grammar or a budget has come. Whether it is ready, or else to be had
        from `take_compiled` when it is."""
        asked, thinking = given.params.structured_outputs, given.thinking
        if thinking is not None:
            ids = (*thinking.start_ids, *thinking.forced_ids)
            if max(ids, default=0) >= self._vocab_size:
                raise RequestError("the model cannot write the tags of its reasoning")
        if asked is None and self._text is not None:
            self._follow(given, None)
            return True
        if asked is not None and asked in self._compiled:
            self._compiled.move_to_end(asked)
            self._follow(given, self._compiled[asked])
            return True
        if asked in self._waiting:
            self._waiting[asked].append(given)
            return False
        self._waiting[asked] = [given]
        self._compile_later(asked)
        return False

    def warm(self) -> None:
        """Have the tokenizer read now, in the thread: llguidance lets nobody else run meanwhile
        (0.4 s), so that the first grammar would hold up whoever writes."""
        self._compile_later(None)

    def _compile_later(self, asked: StructuredOutputs | None) -> None:
        if self._compiler is None:
            self._compiler = _start_thread(self._compile_all)
        self._to_compile.put(asked)

    def take_compiled(self, timeout_s: float) -> list[tuple[str, str]]:
        """The requests whose grammars are ready by now, with what was wrong with them."""
        ready = []
        with contextlib.suppress(queue.Empty):
            while True:
                asked, compiled = self._done.get(timeout_s > 0, timeout_s)
                timeout_s = 0.0
                problem = compiled if isinstance(compiled, str) else ""
                if asked is not None and isinstance(compiled, _Compiled):
                    self._compiled[asked] = compiled
                    if len(self._compiled) > COMPILED:
                        self._compiled.popitem(last=False)
                for given in self._waiting.pop(asked, ()):
                    if not isinstance(compiled, str):
                        self._follow(given, compiled)
                    ready.append((given.request_id, problem))
        return ready

    def _follow(self, given: EngineRequest, compiled: _Compiled | None) -> None:
        asked = given.params.structured_outputs
        if not self._followers:
            self._rows.clear()  # they may have changed hands while nobody looked
        never = set(self._end_ids) - given.stop_ids if given.params.ignore_eos else ()
        thinking = None
        if given.thinking is not None:
            assert self._text is not None
            token_bytes = self._text.token_bytes
            thinking = ThinkingState(given.thinking, token_bytes, compiled is not None)
        self._followers[given.request_id] = _Follower(
            asked,
            None if compiled is None else compiled.matcher.deep_copy(),
            thinking,
            mask_of(sorted(given.stop_ids), self._vocab_size),
            mask_of(sorted(never), self._vocab_size),
            None if compiled is None else compiled.first_mask,
        )
        if given.resumed is not None:  # another engine has written these by the same grammar
            self.advance(given.request_id, given.resumed.tokens, ended=False)

    def _compile_all(self) -> None:
        """In a thread: llguidance takes up to 0.25 s for a grammar, and lets others run."""
        while True:
            asked = self._to_compile.get()
            try:
                if asked is None:
                    self._load_text()
                    self._done.put((None, None))
                    with contextlib.suppress(Exception):  # the first grammar will tell
                        self._load_tokenizer()
                else:
                    self._done.put((asked, self._compile(asked)))
            except RequestError as error:
                self._done.put((asked, str(error)))
            except Exception as error:  # no request that waits for it may wait for ever
                self._done.put((asked, f"the grammar could not be compiled ({error})"))

    def _compile(self, asked: StructuredOutputs) -> _Compiled:
        from twostroke.structured import make_matcher, to_grammar

        tokenizer = self._load_tokenizer()
        grammar = to_grammar(asked, tokenizer)

        def compiled() -> _Compiled:
            matcher = make_matcher(tokenizer, grammar)
            first = matcher.deep_copy()
            mask = first.compute_bitmask()  # the lexer learns what it needs for the first token
            return _Compiled(matcher, None if first.is_error() else mask)

        # Only this much waits for an idle processor. What is Python holds the interpreter, and
        # the loop would wait for it as long as others keep the processors busy.
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
            text.token_bytes(0)  # makes its table
            self._text = text
        return self._text

    def drop(self, request_id: str) -> None:
        self._followers.pop(request_id, None)

    def samples(self, plan: StepPlan) -> dict[int, str]:
        """The samples of this step that may have a mask: index → request. To be called for every
        plan, in order, while there is a request that has a grammar or a budget."""
        rows, followers = self._rows, self._followers
        for row in plan.retired:
            rows.pop(row, None)
        for new in plan.new:
            rows.pop(new.row, None)
            if new.request_id in followers:
                rows[new.row] = new.request_id
        sampled = samples_of(decode_tokens(plan.decode), plan.prefill).rows.tolist()
        wanted = ((index, rows.get(row, "")) for index, row in enumerate(sampled))
        return {
            index: name
            for index, name in wanted
            if name in followers and followers[name].may_have_mask
        }

    def held(self) -> frozenset[str]:
        """Return the requests that wait a step, because the masks of all would take longer than
        `STEP_BUDGET_S`. Those that have waited longest come first, and one is always served."""
        followers = self._followers
        if sum(follower.mask_s for follower in followers.values()) <= STEP_BUDGET_S:
            return frozenset()
        self._turn += 1
        held, total_s = set(), 0.0
        for name in sorted(followers, key=lambda name: followers[name].turn):
            follower = followers[name]
            if total_s and total_s + follower.mask_s > STEP_BUDGET_S:
                held.add(name)
            else:
                total_s += follower.mask_s
                follower.turn = self._turn
        return frozenset(held)

    def masks(self, samples: Mapping[int, str]) -> dict[int, Mask]:
        """What may be written there, once all tokens before are committed. None for a request that
        they have ended, or that may write anything."""
        masks = {}
        for index, name in samples.items():
            follower = self._followers.get(name)
            mask = None if follower is None else self._mask(follower)
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
            if not allowed.any():  # the empty text and no other
                allowed |= follower.never
        took_s = thread_time() - started
        follower.slow |= took_s > SLOW_S
        if bits is None:
            follower.num_masks += 1
            weight = 1 / min(follower.num_masks, PATIENCE_TOKENS)
            follower.mask_s += weight * (took_s - follower.mask_s)
        return allowed

    def advance(self, request_id: str, tokens: Sequence[int], ended: bool) -> End | None:
        """Tokens were committed. `ended`: the request ended with them. The end, if that is one."""
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
            # A matcher finds out that it has failed only with a mask of its own.
            matcher.compute_bitmask()
            taken = matcher.try_consume_tokens(list(tokens))
        if matcher.is_error():
            # Copies share what the lexer has learnt, and with it the limit on that.
            assert follower.asked is not None
            self._compiled.pop(follower.asked, None)
            return End(f"the grammar became too complex to follow ({_reason(matcher)})")
        if ended:  # by a token that need not be the grammar's
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
        if follower.num_masks >= PATIENCE_TOKENS and follower.mask_s > STEP_BUDGET_S:
            return End(
                f"the grammar takes {1e3 * follower.mask_s:.0f} ms of CPU time a token, and at "
                f"most {1e3 * STEP_BUDGET_S:.0f} ms a step may go to grammars; simplify it: fewer "
                "alternatives, patterns and repetitions"
            )
        return None


def _start_thread(work: Callable[[], None]) -> threading.Thread:
    """With twice the stack that grammars are checked with."""
    before = threading.stack_size(STACK_BYTES)
    try:
        thread = threading.Thread(target=work, name="grammars", daemon=True)
        thread.start()
    finally:
        threading.stack_size(before)
    return thread


def _when_idle(work: Callable[[], _Compiled]) -> _Compiled:
    """What `work` returns or raises, in a thread that gives way to all others."""
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
