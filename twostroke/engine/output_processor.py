"""`OutputProcessor`: from accepted requests to `RequestOutput`s. Text and stop strings on this
side, token ids on the engine's. It holds no engine and keeps no lock: whoever owns both
(`client.py`, `remote.py`) carries requests there and updates back. No torch.

    add(EngineRequest) ─▶ RequestState, n EngineRequests to send      (`n > 1` is n requests)
    process(updates)   ─▶ detokenise, stop strings ─▶ RequestOutput   (a stop string is an abort)
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace

from twostroke.errors import RequestError
from twostroke.model.text.detokenizer import Detokenizer
from twostroke.model.text.tokenizer import Tokenizer
from twostroke.observe.record import RequestRecord
from twostroke.outputs import CompletionOutput, Deltas, Logprobs, RequestOutput, snapshot
from twostroke.request import EngineRequest, FinishReason, SamplingParams
from twostroke.sched.updates import Update

OnOutput = Callable[[RequestOutput], None]
OnError = Callable[[Exception], None]

log = logging.getLogger(__name__)


class StopStrings:
    """Stop strings over streamed text: no text is released that may be the start of one.

    The stop string that is complete first wins; of those complete at the same character, the
    longest. So it does not matter in which pieces the text arrives.
    """

    def __init__(self, stops: Sequence[str], include: bool) -> None:
        self._stops = tuple(stops)
        self._include = include
        self._longest = max((len(stop) for stop in stops), default=0)
        self._held = ""
        self.hit: str | None = None

    def push(self, text: str) -> str:
        """The text that can be released now; empty after a hit."""
        if not self._stops:
            return text
        if self.hit is not None:
            return ""
        text = self._held + text
        found = [(text.find(stop), stop) for stop in self._stops if stop in text]
        if found:
            at, self.hit = min(found, key=lambda hit: (hit[0] + len(hit[1]), hit[0]))
            self._held = ""
            return text[: at + len(self.hit)] if self._include else text[:at]
        keep = self._possible_start(text)
        self._held = text[len(text) - keep :]
        return text[: len(text) - keep]

    def flush(self) -> str:
        held, self._held = self._held, ""
        return held

    def _possible_start(self, text: str) -> int:
        """How many characters at the end may begin a stop string."""
        for size in range(min(self._longest - 1, len(text)), 0, -1):
            tail = text[-size:]
            if any(stop.startswith(tail) for stop in self._stops):
                return size
        return 0


@dataclass(slots=True)
class CompletionState:
    """One of a request's n continuations while it is written."""

    engine_id: str  # the engine's name for it
    output: CompletionOutput
    detokenizer: Detokenizer | None
    stops: StopStrings


@dataclass(slots=True, eq=False)
class RequestState:
    """A request from its acceptance until the engine has reported the end of every part of it."""

    request_id: str
    request: EngineRequest  # as accepted; the engine gets one like it for each continuation
    on_output: OnOutput | None  # None: nobody listens
    on_error: OnError | None
    output: RequestOutput = field(init=False)  # grows
    completions: list[CompletionState] = field(default_factory=list)
    num_in_engine: int = 0  # continuations whose end the engine has not reported
    deltas: Deltas = field(default_factory=Deltas)
    started: bool = False  # some of what was written has been delivered
    aborted: bool = False  # the engine has been asked to end it
    attempts: int = 0  # engines it has been sent to


class OutputProcessor:
    """The requests of one engine. A request's id is taken from `add` until its state is dropped:
    when the last output has been delivered, or by `close`."""

    def __init__(self, tokenizer: Tokenizer | None, seed: int = 0) -> None:
        self._tokenizer = tokenizer
        self._token_text = None if tokenizer is None else tokenizer.token_text
        self._seed = seed
        self._count = 0
        self._states: dict[str, RequestState] = {}  # by request id
        # By engine request, while the engine has it:
        self._running: dict[str, tuple[RequestState, CompletionState]] = {}

    def warm(self) -> None:
        """Make the tokenizer's table now, not on the first request's time."""
        if self._tokenizer is not None:
            self._tokenizer.detokenizer()

    def __len__(self) -> int:
        return len(self._states)

    def __iter__(self) -> Iterator[RequestState]:
        return iter(list(self._states.values()))

    def __contains__(self, state: RequestState) -> bool:
        return self._states.get(state.request_id) is state

    def get(self, request_id: str) -> RequestState | None:
        return self._states.get(request_id)

    def of(self, engine_id: str) -> RequestState:
        """The state that an engine request belongs to, while the engine has it."""
        return self._running[engine_id][0]

    def written(self, engine_id: str) -> list[int]:
        """The tokens of an engine request that have been taken in so far."""
        return self._running[engine_id][1].output.token_ids

    def has_ended(self, engine_id: str) -> bool:
        """Whether all of an engine request has been written, as far as its listener is concerned: a
        stop string may have ended it."""
        return self._running[engine_id][1].output.finish_reason is not None

    # ── in ──────────────────────────────────────────────────────────────────────────────────

    def add(
        self,
        request: EngineRequest,
        request_id: str | None = None,
        on_output: OnOutput | None = None,
        on_error: OnError | None = None,
    ) -> tuple[RequestState, list[EngineRequest]]:
        """Take a request on: its state, and what the engine is to be sent for it."""
        request_id = self._free_id(request_id, request.params.n)
        state = RequestState(request_id, request, on_output, on_error)
        self._states[request_id] = state
        return state, self.restart(state)

    def restart(self, state: RequestState) -> list[EngineRequest]:
        """Begin a request anew, for an engine that has not seen it; what that is to be sent."""
        self._forget_engine(state)
        request, request_id, params = state.request, state.request_id, state.request.params
        ids = request.prompt_token_ids
        state.output = RequestOutput(request_id, request.prompt, list(ids), [])
        state.completions = []
        # The prompt's log-probabilities are the same for all continuations: the first has them.
        others = params if params.prompt_logprobs is None else replace(params, prompt_logprobs=None)
        sent = []
        for index in range(params.n):
            engine_id = _engine_id(request_id, index, params.n)
            completion = self._new_completion(engine_id, index, request)
            state.completions.append(completion)
            state.output.outputs.append(completion.output)
            self._running[engine_id] = state, completion
            sent.append(
                replace(
                    request,
                    request_id=engine_id,
                    prompt=None,
                    params=others if index else params,
                    seed=self._request_seed(params, index),
                    family=request_id if params.n > 1 else "",
                )
            )
        state.num_in_engine = params.n
        self._count += 1
        return sent

    def _new_completion(
        self, engine_id: str, index: int, request: EngineRequest
    ) -> CompletionState:
        params = request.params
        output = CompletionOutput(index)
        if params.logprobs is not None:
            named = bool(params.logprob_token_ids)
            output.logprobs, output.cumulative_logprob = Logprobs(self._token_text, named), 0.0
        detokenizer = None
        if params.detokenize and self._tokenizer is not None:
            skip = params.skip_special_tokens
            detokenizer = self._tokenizer.detokenizer(skip, after=request.prompt_token_ids)
        stops = StopStrings(tuple(params.stop or ()), params.include_stop_str_in_output)
        return CompletionState(engine_id, output, detokenizer, stops)

    def _free_id(self, request_id: str | None, n: int) -> str:
        """An id that nobody has, and whose continuations' names nobody has."""
        if request_id is None:
            number = self._count
            while f"req-{number}" in self._states:
                number += 1
            request_id = f"req-{number}"
        names = (_engine_id(request_id, index, n) for index in range(n))
        if request_id in self._states or any(name in self._running for name in names):
            raise RequestError(f"a request with the id {request_id!r} is already running")
        return request_id

    def _request_seed(self, params: SamplingParams, index: int) -> int:
        """The user's seed, plus the index for n > 1; otherwise the engine's and a counter."""
        if params.seed is not None:
            return (params.seed + index) % 2**64
        return (self._seed * 0x9E3779B97F4A7C15 + self._count * 1024 + index) % 2**64

    # ── out ─────────────────────────────────────────────────────────────────────────────────

    def process(self, updates: Sequence[Update]) -> tuple[list[RequestOutput], list[str]]:
        """Deliver what has become known. Returns the outputs that changed, and the engine requests
        to abort: those that a stop string ended, and those whose listener failed.

        Give what the aborts return to `process` as well: the last output of a request is delivered
        once the engine has reported every end, so that its metrics are complete.
        """
        changed: dict[str, RequestState] = {}
        aborts = []
        for update in updates:
            found = self._running.get(update.request_id)
            if found is None:  # a request that has been closed
                continue
            state, completion = found
            ended = update.finish_reason is not None
            if completion.output.finish_reason is None:
                changed[state.request_id] = state
                self._write(state.output, state.request.params, completion, update)
                if completion.output.finish_reason is not None:
                    outputs = state.output.outputs
                    state.output.finished = all(output.finished for output in outputs)
                    if not ended:
                        aborts.append(update.request_id)
            elif not ended:
                continue  # tokens that were on their way when a stop string was found
            else:
                if update.record is not None:
                    update.record.finish_reason = FinishReason.STOP
                if state.output.finished:
                    changed[state.request_id] = state
            if ended:
                del self._running[update.request_id]
                state.num_in_engine -= 1
                if update.record is not None:
                    self._add_record(state, update.record)
        for state in changed.values():
            if not self._deliver(state):
                aborts += [one.engine_id for one in state.completions if not one.output.finished]
        return [state.output for state in changed.values()], aborts

    def _add_record(self, state: RequestState, record: RequestRecord) -> None:
        record.tokenised_s = state.request.tokenised_s
        record.prefix_marks = state.request.prefix_marks
        record.owner = state.request.owner
        output = state.output
        output.records.append(record)
        output.num_cached_tokens = max(output.num_cached_tokens, record.num_cached)

    def _write(
        self,
        request_output: RequestOutput,
        params: SamplingParams,
        completion: CompletionState,
        update: Update,
    ) -> None:
        output, detokenizer, stops = completion.output, completion.detokenizer, completion.stops
        output.token_ids.extend(update.tokens)
        if update.progress:
            request_output.num_prefilled = max(request_output.num_prefilled, update.progress)
        if update.logprobs:
            self._add_logprobs(output, update)
        if update.prompt_logprobs is not None:
            of_prompt = request_output.prompt_logprobs = Logprobs(self._token_text)
            for entry in (None, *update.prompt_logprobs):
                of_prompt.add(entry)
        if detokenizer is not None:
            tokens = update.tokens
            stopped_by_token = update.finish_reason is FinishReason.STOP
            if stopped_by_token and not params.include_stop_str_in_output:
                tokens = tokens[:-1]
            text = detokenizer.push(tokens)
            if update.finish_reason is not None:
                text += detokenizer.flush()
            early = len(output.token_ids) < params.min_tokens
            output.text += text if early else stops.push(text)
            if stops.hit is not None:
                output.finish_reason, output.stop_reason = "stop", stops.hit
                return
        if update.finish_reason is not None:
            output.text += stops.flush()
            output.finish_reason = str(update.finish_reason)
            output.stop_reason = update.stop_reason
            if update.error and not request_output.error:
                request_output.error = update.error
                request_output.impossible = update.impossible

    def _add_logprobs(self, output: CompletionOutput, update: Update) -> None:
        assert output.logprobs is not None
        assert output.cumulative_logprob is not None
        for entry in update.logprobs:
            output.logprobs.add(entry)
            output.cumulative_logprob += entry.logprobs[0]

    # ── to those who listen ─────────────────────────────────────────────────────────────────

    def _deliver(self, state: RequestState) -> bool:
        """Give the listener its output, in the kind it asked for; False if it failed."""
        output, params = state.output, state.request.params
        if output.finished:
            if state.num_in_engine:
                return True  # a stop string ended it; its records are still to come
            self._states.pop(state.request_id, None)
        if state.on_output is None:
            return True
        if not output.finished:
            written = state.started or any(c.token_ids or c.finish_reason for c in output.outputs)
            if written and params.prompt_logprobs is not None and output.prompt_logprobs is None:
                return True  # one of several continuations computes them; they come first
            if params.output_kind == "final_only":
                return True
            state.started = state.started or written
        delta = params.output_kind == "delta"
        try:
            state.on_output(state.deltas.take(output) if delta else snapshot(output))
        except Exception:
            log.exception("a listener failed on the output of %s", state.request_id)
            state.on_output = state.on_error = None
            return False
        return True

    def close(self, state: RequestState, reason: Exception | None = None) -> list[str]:
        """Drop a request, with the reason for its listener if there is one; the engine requests of
        it that the engine may still have."""
        if state not in self:
            return []
        left = self._forget_engine(state)
        del self._states[state.request_id]
        on_error, state.on_output, state.on_error = state.on_error, None, None
        if reason is not None and on_error is not None:
            try:
                on_error(reason)
            except Exception:
                log.exception("a listener failed on the error of %s", state.request_id)
        return left

    def lose(self, state: RequestState) -> bool:
        """The engine is gone: end a request that waited only for its end. False if for more."""
        if not (state.output.finished or state.aborted or state.on_output is None):
            return False
        left = self.in_engine(state)
        self.process([Update(name, (), finish_reason=FinishReason.ABORT) for name in left])
        return True

    def in_engine(self, state: RequestState) -> list[str]:
        """The engine requests of it whose end the engine has not reported."""
        names = [completion.engine_id for completion in state.completions]
        return [name for name in names if self._running.get(name, (None,))[0] is state]

    def _forget_engine(self, state: RequestState) -> list[str]:
        left = self.in_engine(state)
        for name in left:
            del self._running[name]
        state.num_in_engine = 0
        return left


def _engine_id(request_id: str, index: int, n: int) -> str:
    """The engine's name for one continuation."""
    return request_id if n == 1 else f"{request_id}/{index}"
