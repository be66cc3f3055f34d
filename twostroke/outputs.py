"""What a user gets back, under the names vLLM users know."""

from __future__ import annotations

from dataclasses import dataclass, field, replace

from twostroke.observe.record import RequestRecord


@dataclass(frozen=True, slots=True)
class Logprob:
    logprob: float
    rank: int | None = None  # 1 is the most likely
    decoded_token: str | None = None


@dataclass(slots=True)
class CompletionOutput:
    """One continuation. In a stream of kind "delta", text and ids are what is new."""

    index: int
    text: str = ""
    token_ids: list[int] = field(default_factory=list)
    cumulative_logprob: float | None = None
    logprobs: list[dict[int, Logprob]] | None = None
    finish_reason: str | None = None  # stop, length, abort, error
    stop_reason: int | str | None = None  # the stop string or stop token that ended it

    @property
    def finished(self) -> bool:
        return self.finish_reason is not None


@dataclass(slots=True)
class RequestOutput:
    request_id: str
    prompt: str | None
    prompt_token_ids: list[int]
    outputs: list[CompletionOutput]
    finished: bool = False
    prompt_logprobs: list[dict[int, Logprob] | None] | None = None  # the first entry is None
    num_cached_tokens: int = 0
    metrics: list[RequestRecord] = field(default_factory=list)  # one per finished continuation
    num_prefilled: int = 0  # prompt tokens computed so far, where progress was asked for
    error: str = ""  # why the engine gave it up, if it did
    impossible: bool = False  # because it asks what cannot be


class Deltas:
    """Turns the growing output of one request into what is new since the last look."""

    def __init__(self) -> None:
        self._sent: dict[int, tuple[int, int]] = {}  # continuation → token ids, characters

    def take(self, output: RequestOutput) -> RequestOutput:
        fresh = []
        for completion in output.outputs:
            ids, chars = self._sent.get(completion.index, (0, 0))
            if ids < 0:  # its end has been told
                continue
            token_ids, text = completion.token_ids[ids:], completion.text[chars:]
            if token_ids or text or completion.finish_reason is not None:
                logprobs = completion.logprobs
                # Constructors, not `replace`: this runs once for every token of every stream.
                fresh.append(
                    CompletionOutput(
                        completion.index,
                        text,
                        token_ids,
                        completion.cumulative_logprob,
                        None if logprobs is None else logprobs[ids:],
                        completion.finish_reason,
                        completion.stop_reason,
                    )
                )
            ended = completion.finish_reason is not None
            self._sent[completion.index] = (
                (-1, -1) if ended else (ids + len(token_ids), chars + len(text))
            )
        return RequestOutput(
            output.request_id,
            output.prompt,
            output.prompt_token_ids,
            fresh,
            output.finished,
            output.prompt_logprobs,
            output.num_cached_tokens,
            list(output.metrics),
            output.num_prefilled,
            output.error,
            output.impossible,
        )


def snapshot(output: RequestOutput) -> RequestOutput:
    """A copy that no longer grows."""
    outputs = []
    for completion in output.outputs:
        logprobs = completion.logprobs
        outputs.append(
            replace(
                completion,
                token_ids=list(completion.token_ids),
                logprobs=None if logprobs is None else list(logprobs),
            )
        )
    return replace(output, outputs=outputs, metrics=list(output.metrics))
