"""`Frontend`: between people and the engine. Text and stop strings on this side, token ids on the
other. It needs no torch and holds no engine: requests go out as `EngineRequest`, updates come in,
and whoever owns both (`client.py`) carries them.

    prompt ─▶ `Intake`: tokenise, validate ─▶ n EngineRequests   (`n > 1` is n requests)
    Update ─▶ detokenise, stop strings ─▶ RequestOutput          (a stop string's hit is an abort)
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from twostroke.engine.intake import Intake, Prepared
from twostroke.engine.stops import StopStrings
from twostroke.errors import RequestError
from twostroke.model.detokenizer import Detokenizer
from twostroke.observe.record import RequestRecord
from twostroke.outputs import CompletionOutput, Logprobs, RequestOutput
from twostroke.request import EngineRequest, FinishReason, SamplingParams
from twostroke.sched.scheduler import Update


@dataclass(slots=True)
class Writer:
    """One continuation while it is written."""

    output: CompletionOutput
    detokenizer: Detokenizer | None
    stops: StopStrings


@dataclass(slots=True)
class Asked:
    """A user's request: n continuations of one prompt."""

    output: RequestOutput
    params: SamplingParams
    tokenised_s: float


def child_id(request_id: str, index: int, n: int) -> str:
    """The engine's name for one continuation."""
    return request_id if n == 1 else f"{request_id}/{index}"


class Frontend:
    def __init__(self, intake: Intake, seed: int = 0) -> None:
        self.intake = intake
        self.tokenizer = intake.tokenizer
        self._text = None if intake.tokenizer is None else intake.tokenizer.token_text
        self._seed = seed
        self._count = 0
        self._asked: dict[str, Asked] = {}  # by request id
        self._child: dict[str, tuple[Asked, Writer]] = {}  # by engine request
        self._stopped: dict[str, Asked] = {}  # engine requests to abort: a stop string hit them

    def warm(self) -> None:
        """Make the tokenizer's table now, not on the first request's time."""
        if self.tokenizer is not None:
            self.tokenizer.detokenizer()

    # ── in ──────────────────────────────────────────────────────────────────────────────────

    def enter(
        self, prepared: Prepared, request_id: str | None = None
    ) -> tuple[str, list[EngineRequest]]:
        """Take a request on: its name, and what the engine is to be sent for it."""
        params = prepared.params
        request_id = self._free_id(request_id, params.n)
        output = RequestOutput(request_id, prepared.text, list(prepared.ids), [])
        asked = Asked(output, params, prepared.tokenised_s)
        # What the model thinks of the prompt is the same for all: the first is asked.
        others = params if params.prompt_logprobs is None else replace(params, prompt_logprobs=None)
        requests = []
        for index in range(params.n):
            request = EngineRequest(
                child_id(request_id, index, params.n),
                prepared.ids,
                others if index else params,
                seed=self._request_seed(params, index),
                stop_ids=prepared.stop_ids,
                bad_words_ids=prepared.bad_words_ids,
                priority=prepared.priority,
                salt=prepared.salt,
                received_s=prepared.received_s,
                progress=prepared.progress,
                family=request_id if params.n > 1 else "",
            )
            requests.append(request)
            writer = self._writer(index, prepared)
            output.outputs.append(writer.output)
            self._child[request.request_id] = asked, writer
        self._asked[request_id] = asked
        self._count += 1
        return request_id, requests

    def _writer(self, index: int, prepared: Prepared) -> Writer:
        params = prepared.params
        completion = CompletionOutput(index)
        if params.logprobs is not None:
            completion.logprobs, completion.cumulative_logprob = Logprobs(self._text), 0.0
        detokenizer = None
        if params.detokenize and self.tokenizer is not None:
            skip = params.skip_special_tokens
            detokenizer = self.tokenizer.detokenizer(skip, after=prepared.ids)
        stops = StopStrings(tuple(params.stop or ()), params.include_stop_str_in_output)
        return Writer(completion, detokenizer, stops)

    def forget(self, request_id: str) -> list[str]:
        """Drop a request that was aborted or refused; the engine requests that were its own."""
        children = self.children(request_id)
        for name in children:
            del self._child[name]
        self._asked.pop(request_id, None)
        return children

    def children(self, request_id: str) -> list[str]:
        """The engine requests of a request that have not ended."""
        asked = self._asked.get(request_id)
        count = 0 if asked is None else asked.params.n
        names = [child_id(request_id, index, count) for index in range(count)]
        return [name for name in names if self._child.get(name, (None,))[0] is asked]

    def _free_id(self, request_id: str | None, n: int) -> str:
        """A name that nobody has, and whose continuations' names nobody has."""
        if request_id is None:
            number = self._count
            while f"req-{number}" in self._asked:
                number += 1
            request_id = f"req-{number}"
        names = (child_id(request_id, index, n) for index in range(n))
        if request_id in self._asked or any(name in self._child for name in names):
            raise RequestError(f"a request with the id {request_id!r} is already running")
        return request_id

    def _request_seed(self, params: SamplingParams, index: int) -> int:
        """The user's seed, plus the index for n > 1; otherwise the engine's and a counter."""
        if params.seed is not None:
            return (params.seed + index) % 2**64
        return (self._seed * 0x9E3779B97F4A7C15 + self._count * 1024 + index) % 2**64

    # ── out ─────────────────────────────────────────────────────────────────────────────────

    def take(self, updates: Sequence[Update]) -> tuple[list[RequestOutput], list[str]]:
        """What users are to be told, and the engine requests to abort: stop strings hit them.

        Give what the aborts return to `take` as well, before telling: it completes the metrics.
        """
        told: dict[str, RequestOutput] = {}
        aborts = []
        for update in updates:
            where = self._child.get(update.request_id)
            if where is None:  # ended on this side already
                stopped = self._stopped.pop(update.request_id, None)
                if stopped is not None and update.record is not None:
                    update.record.finish_reason = FinishReason.STOP
                    self._add_record(stopped, update.record)
                continue
            asked, writer = where
            output = asked.output
            self._write(asked, writer, update)
            if writer.output.finish_reason is not None:
                del self._child[update.request_id]
                if update.finish_reason is None:
                    aborts.append(update.request_id)
                    self._stopped[update.request_id] = asked
                output.finished = all(one.finished for one in output.outputs)
                if output.finished:
                    del self._asked[output.request_id]
            if update.record is not None:
                self._add_record(asked, update.record)
            told[output.request_id] = output
        return list(told.values()), aborts

    def _add_record(self, asked: Asked, record: RequestRecord) -> None:
        record.tokenised_s = asked.tokenised_s
        output = asked.output
        output.metrics.append(record)
        output.num_cached_tokens = max(output.num_cached_tokens, record.num_cached)

    def _write(self, asked: Asked, writer: Writer, update: Update) -> None:
        output, params = writer.output, asked.params
        output.token_ids.extend(update.tokens)
        if update.progress:
            asked.output.num_prefilled = max(asked.output.num_prefilled, update.progress)
        if update.logprobs:
            self._add_logprobs(output, update)
        if update.prompt_logprobs is not None:
            of_prompt = asked.output.prompt_logprobs = Logprobs(self._text)
            for entry in (None, *update.prompt_logprobs):
                of_prompt.add(entry)
        stopped_by_token = update.finish_reason is FinishReason.STOP
        if writer.detokenizer is not None:
            spoken = update.tokens
            if stopped_by_token and not params.include_stop_str_in_output:
                spoken = spoken[:-1]
            text = writer.detokenizer.push(spoken)
            if update.finish_reason is not None:
                text += writer.detokenizer.flush()
            early = len(output.token_ids) < params.min_tokens
            output.text += text if early else writer.stops.push(text)
            if writer.stops.hit is not None:
                output.finish_reason, output.stop_reason = "stop", writer.stops.hit
                return
        if update.finish_reason is not None:
            output.text += writer.stops.flush()
            output.finish_reason = str(update.finish_reason)
            output.stop_reason = update.stop_reason
            if update.error and not asked.output.error:
                asked.output.error, asked.output.impossible = update.error, update.impossible

    def _add_logprobs(self, output: CompletionOutput, update: Update) -> None:
        assert output.logprobs is not None
        assert output.cumulative_logprob is not None
        for entry in update.logprobs:
            output.logprobs.add(entry)
            output.cumulative_logprob += entry.logprobs[0]
