"""`OutputProcessor` turns the updates of an engine into `RequestOutput`s.

The engine knows only token ids. The output processor detokenises them and searches for stop
strings. Its client (`request_client.py`) sends the requests to the engine, passes the updates of
the engine to the output processor, and holds a lock if several threads use it.

    add(EngineRequest) ─▶ RequestState, and an EngineRequest for each of the n completions
    process(updates)   ─▶ detokenise, stop strings ─▶ RequestOutput, and requests to abort
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

MAX_HELD_TRIED = 64  # comparisons for a piece of text, besides one for each of its characters


class StopStrings:
    """Finds stop strings in streamed text. Text that may begin a stop string is held back.

    If the text contains several stop strings, the stop string that ends first counts. If several
    end at the same character, the longest counts. So the result does not depend on the pieces in
    which the text arrives.

    All streams wait while a piece is searched, so the number of comparisons is limited. Because of
    the limit, some text may be held back longer than necessary.
    """

    def __init__(self, stops: Sequence[str], include: bool) -> None:
        self._stops = tuple(stops)
        self._include = include
        self._longest = max((len(stop) for stop in stops), default=0)
        self._held = ""
        self.found: str | None = None  # the stop string that has ended the text

    def push(self, text: str) -> str:
        """Add text. Return the text that can be delivered now, which is empty after a stop
        string."""
        if not self._stops:
            return text
        if self.found is not None:
            return ""
        max_tried = len(text) + MAX_HELD_TRIED
        text = self._held + text
        hits = [(text.find(stop), stop) for stop in self._stops if stop in text]
        if hits:
            at, self.found = min(hits, key=lambda hit: (hit[0] + len(hit[1]), hit[0]))
            self._held = ""
            return text[: at + len(self.found)] if self._include else text[:at]
        num_held = self._num_held_back(text, max_tried)
        self._held = text[len(text) - num_held :]
        return text[: len(text) - num_held]

    def flush(self) -> str:
        """Return the text that was held back, at the end of the text."""
        held, self._held = self._held, ""
        return held

    def _num_held_back(self, text: str, max_tried: int) -> int:
        """Return the number of characters at the end that may begin a stop string. At most
        `max_tried` beginnings are compared."""
        longest = min(self._longest - 1, len(text))
        shortest = max(0, longest - max_tried)
        for size in range(longest, shortest, -1):
            tail = text[-size:]
            if any(stop.startswith(tail) for stop in self._stops):
                return size
        return shortest


@dataclass(slots=True)
class CompletionState:
    """The state of one of the n completions of a request. Each completion is an engine request."""

    engine_request_id: str
    output: CompletionOutput
    detokenizer: Detokenizer | None
    stops: StopStrings


@dataclass(slots=True, eq=False)
class RequestState:
    """A request from its acceptance until the engine has ended all its completions."""

    request_id: str
    request: EngineRequest  # as accepted; the engine gets a copy for each completion
    on_output: OnOutput | None  # called with each output; None: the output is not needed
    on_error: OnError | None
    output: RequestOutput = field(init=False)  # the output so far
    completions: list[CompletionState] = field(default_factory=list)
    num_in_engine: int = 0  # completions whose end the engine has not reported
    deltas: Deltas = field(default_factory=Deltas)
    started: bool = False  # a part of the output has been delivered
    aborted: bool = False  # the engine has been asked to end the request
    attempts: int = 0  # number of engine processes that the request was sent to


class OutputProcessor:
    """The requests of one client. A request id is in use from `add` until the delivery of the last
    output, or until `close`."""

    def __init__(self, tokenizer: Tokenizer | None, seed: int = 0) -> None:
        self._tokenizer = tokenizer
        self._token_text = None if tokenizer is None else tokenizer.token_text
        self._seed = seed
        self._count = 0
        self._states: dict[str, RequestState] = {}  # by request id
        # By engine request id, until the engine has reported the end:
        self._running: dict[str, tuple[RequestState, CompletionState]] = {}

    def warm(self) -> None:
        """Create the token table of the detokenizer, so that the first request does not have to
        wait for the table."""
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

    def state_of(self, engine_request_id: str) -> RequestState:
        """Return the state of the request that an engine request belongs to."""
        return self._running[engine_request_id][0]

    def written(self, engine_request_id: str) -> list[int]:
        """Return the tokens of an engine request so far."""
        return self._running[engine_request_id][1].output.token_ids

    def has_ended(self, engine_request_id: str) -> bool:
        """Return whether the output of an engine request is complete. A stop string may complete
        it while the engine still computes the request."""
        return self._running[engine_request_id][1].output.finish_reason is not None

    # ── requests ────────────────────────────────────────────────────────────────────────────

    def add(
        self,
        request: EngineRequest,
        request_id: str | None = None,
        on_output: OnOutput | None = None,
        on_error: OnError | None = None,
    ) -> tuple[RequestState, list[EngineRequest]]:
        """Accept a request; return its state and the engine requests to send."""
        request_id = self._free_id(request_id, request.params.n)
        state = RequestState(request_id, request, on_output, on_error)
        self._states[request_id] = state
        return state, self.restart(state)

    def restart(self, state: RequestState) -> list[EngineRequest]:
        """Reset a request to an empty output, at its start or for a new engine process. Return the
        engine requests to send."""
        self._forget_engine_requests(state)
        request, request_id, params = state.request, state.request_id, state.request.params
        ids = request.prompt_token_ids
        state.output = RequestOutput(request_id, request.prompt, list(ids), [])
        state.completions = []
        # The log-probabilities of the prompt are computed once, for the first completion.
        other_params = params
        if params.prompt_logprobs is not None:
            other_params = replace(params, prompt_logprobs=None)
        sent = []
        for index in range(params.n):
            engine_request_id = _engine_request_id(request_id, index, params.n)
            completion = self._new_completion(engine_request_id, index, request)
            state.completions.append(completion)
            state.output.outputs.append(completion.output)
            self._running[engine_request_id] = state, completion
            sent.append(
                replace(
                    request,
                    request_id=engine_request_id,
                    prompt=None,
                    params=other_params if index else params,
                    seed=self._request_seed(params, index),
                    family=request_id if params.n > 1 else "",
                )
            )
        state.num_in_engine = params.n
        self._count += 1
        return sent

    def _new_completion(
        self, engine_request_id: str, index: int, request: EngineRequest
    ) -> CompletionState:
        params = request.params
        output = CompletionOutput(index)
        if params.logprobs is not None:
            output.logprobs = Logprobs(self._token_text, named=bool(params.logprob_token_ids))
            output.cumulative_logprob = 0.0
        detokenizer = None
        if params.detokenize and self._tokenizer is not None:
            skip = params.skip_special_tokens
            detokenizer = self._tokenizer.detokenizer(skip, preceding_ids=request.prompt_token_ids)
        stops = StopStrings(tuple(params.stop or ()), params.include_stop_str_in_output)
        return CompletionState(engine_request_id, output, detokenizer, stops)

    def _free_id(self, request_id: str | None, n: int) -> str:
        """Return the given id, or a new one if `request_id` is None. Raise `RequestError` if the id
        or one of its engine request ids is in use."""
        if request_id is None:
            number = self._count
            while f"req-{number}" in self._states:
                number += 1
            request_id = f"req-{number}"
        names = (_engine_request_id(request_id, index, n) for index in range(n))
        if request_id in self._states or any(name in self._running for name in names):
            raise RequestError(f"a request with the id {request_id!r} is already running")
        return request_id

    def _request_seed(self, params: SamplingParams, index: int) -> int:
        """Return the request's seed plus the index of the completion. If the request has no seed,
        return a seed from the engine's seed and the number of earlier requests."""
        if params.seed is not None:
            return (params.seed + index) % 2**64
        # 2**64 divided by the golden ratio: different engine seeds give sequences far apart.
        return (self._seed * 0x9E3779B97F4A7C15 + self._count * 1024 + index) % 2**64

    # ── updates ─────────────────────────────────────────────────────────────────────────────

    def process(self, updates: Sequence[Update]) -> tuple[list[RequestOutput], list[str]]:
        """Deliver updates to the clients. Return the outputs that changed, and the ids of engine
        requests to abort: a stop string was found, or `on_output` raised an exception.

        The client must also pass the final updates of the aborted requests to `process`. The last
        output of a request is delivered when the engine has reported the end of all its
        completions, because the records with the metrics come with these ends.
        """
        changed: dict[str, RequestState] = {}
        aborts = []
        for update in updates:
            running = self._running.get(update.request_id)
            if running is None:  # `close` has removed the request
                continue
            state, completion = running
            ended = update.finish_reason is not None
            if completion.output.finish_reason is None:
                changed[state.request_id] = state
                for one in _by_token(update) if state.request.params.stop else (update,):
                    self._write(state.output, state.request.params, completion, one)
                    if completion.output.finish_reason is not None:
                        break
                if completion.output.finish_reason is not None:
                    outputs = state.output.outputs
                    state.output.finished = all(output.finished for output in outputs)
                    if not ended:
                        aborts.append(update.request_id)
            elif not ended:
                continue  # the engine sent these tokens before it received the abort
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
                aborts += [c.engine_request_id for c in state.completions if not c.output.finished]
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
        """Add the tokens of an update to the output, and set the finish reason at the end."""
        output, detokenizer, stops = completion.output, completion.detokenizer, completion.stops
        output.token_ids.extend(update.tokens)
        if update.progress:
            request_output.num_prefilled = max(request_output.num_prefilled, update.progress)
        if update.logprobs:
            self._add_logprobs(output, update)
        if update.prompt_logprobs is not None:
            prompt_logprobs = request_output.prompt_logprobs = Logprobs(self._token_text)
            for entry in (None, *update.prompt_logprobs):
                prompt_logprobs.add(entry)
        if detokenizer is not None:
            tokens = update.tokens
            stopped_by_token = update.finish_reason is FinishReason.STOP
            if stopped_by_token and not params.include_stop_str_in_output:
                tokens = tokens[:-1]
            text = detokenizer.push(tokens)
            if update.finish_reason is not None:
                text += detokenizer.flush()
            below_minimum = len(output.token_ids) < params.min_tokens
            output.text += text if below_minimum else stops.push(text)
            if stops.found is not None:
                output.finish_reason, output.stop_reason = "stop", stops.found
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

    # ── listeners ───────────────────────────────────────────────────────────────────────────

    def _deliver(self, state: RequestState) -> bool:
        """Call `on_output` if there is new output for it, in the form of `params.output_kind`.
        Return False if `on_output` raised an exception."""
        output, params = state.output, state.request.params
        if output.finished:
            if state.num_in_engine:
                return True  # a stop string ended the output; wait for the engine's records
            self._states.pop(state.request_id, None)
        if state.on_output is None:
            return True
        if not output.finished:
            written = state.started or any(c.token_ids or c.finish_reason for c in output.outputs)
            if written and params.prompt_logprobs is not None and output.prompt_logprobs is None:
                return True  # wait: the log-probabilities of the prompt are delivered first
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
        """Remove a request, and call its `on_error` with `reason` if that is given. Return the ids
        of its engine requests that may still be in the engine."""
        if state not in self:
            return []
        left = self._forget_engine_requests(state)
        del self._states[state.request_id]
        on_error, state.on_output, state.on_error = state.on_error, None, None
        if reason is not None and on_error is not None:
            try:
                on_error(reason)
            except Exception:
                log.exception("a listener failed on the error of %s", state.request_id)
        return left

    def end_if_unneeded(self, state: RequestState) -> bool:
        """Handle a request whose engine has died. If the output is complete, the request was
        aborted, or `on_output` is None, end the request. Otherwise return False: the request is
        still needed."""
        if not (state.output.finished or state.aborted or state.on_output is None):
            return False
        ids = self.ids_in_engine(state)
        self.process([Update(one, (), finish_reason=FinishReason.ABORT) for one in ids])
        return True

    def ids_in_engine(self, state: RequestState) -> list[str]:
        """Return the ids of the engine requests whose end the engine has not reported."""
        ids = [completion.engine_request_id for completion in state.completions]
        return [one for one in ids if self._running.get(one, (None,))[0] is state]

    def _forget_engine_requests(self, state: RequestState) -> list[str]:
        ids = self.ids_in_engine(state)
        for engine_request_id in ids:
            del self._running[engine_request_id]
        state.num_in_engine = 0
        return ids


def _engine_request_id(request_id: str, index: int, n: int) -> str:
    """Return the id of the engine request for one completion."""
    return request_id if n == 1 else f"{request_id}/{index}"


def _by_token(update: Update) -> Iterator[Update]:
    """Split an update into one update for each token, so that a stop string ends the output at its
    token. Only the last of these updates has the finish reason."""
    count, entries = len(update.tokens), update.logprobs
    for n in range(max(1, count)):
        one = update._replace(tokens=update.tokens[n : n + 1], logprobs=entries[n : n + 1])
        if n:
            one = one._replace(prompt_logprobs=None)
        if n < count - 1:
            one = one._replace(finish_reason=None, stop_reason=None, record=None, offer=None)
        yield one
