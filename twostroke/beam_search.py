"""Beam search over an engine that gives log-probabilities: each step is a batch of requests for one
token, whose prompts the prefix cache knows but for their last tokens."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from twostroke.errors import RequestError
from twostroke.outputs import Logprob, RequestOutput
from twostroke.request import SamplingParams
from twostroke.strict import StrictSettings

# One request for one token each → an output each.
Run = Callable[[list[Any], SamplingParams], list[RequestOutput]]


@dataclass(kw_only=True)
class BeamSearchParams(StrictSettings):
    """How to search. The names are vLLM's.

    Beams are ranked by their log-probability / length ** length_penalty, where the prompt's tokens
    count and the one that ends a text does not.
    """

    error = RequestError

    beam_width: int
    max_tokens: int
    ignore_eos: bool = False
    temperature: float = 0.0  # taken for vLLM's sake: the search is by the model's probabilities
    length_penalty: float = 1.0
    include_stop_str_in_output: bool = False

    def __post_init__(self) -> None:
        self._check_int("beam_width", 1, 1024)
        self._check_int("max_tokens", 1)
        self._check_bools("ignore_eos", "include_stop_str_in_output")
        self._check_number("temperature", 0.0, 1e4, "a number from 0 to 10000")
        self._check_number("length_penalty", -100.0, 100.0, "a number from -100 to 100")


@dataclass
class BeamSearchSequence:
    tokens: list[int]  # the prompt's, too
    logprobs: list[dict[int, Logprob]] = field(default_factory=list, repr=False)
    cum_logprob: float = 0.0
    text: str | None = None  # the prompt's, too
    finish_reason: str | None = None
    stop_reason: int | str | None = None


@dataclass
class BeamSearchOutput:
    """The best sequences, the best first; `beam_width` of them."""

    sequences: list[BeamSearchSequence]


class _Search:
    """The search from one prompt."""

    def __init__(
        self,
        prompt_ids: Sequence[int],
        params: BeamSearchParams,
        end_ids: frozenset[int],
        room: int,
    ) -> None:
        self.live = [BeamSearchSequence(list(prompt_ids))]
        self._ended: list[BeamSearchSequence] = []
        self._params, self._end_ids = params, frozenset() if params.ignore_eos else end_ids
        self._left = min(params.max_tokens, room)

    def extend(self, outputs: Sequence[RequestOutput]) -> None:
        """One token more, with what the engine wrote after each live beam."""
        self._left -= 1
        candidates = []
        for beam, output in zip(self.live, outputs, strict=True):
            logprobs = output.outputs[0].logprobs
            assert logprobs is not None
            (best,) = logprobs
            for token, entry in best.items():
                longer = replace(
                    beam,
                    tokens=[*beam.tokens, token],
                    logprobs=[*beam.logprobs, best],
                    cum_logprob=beam.cum_logprob + entry.logprob,
                )
                if token not in self._end_ids:
                    candidates.append(longer)
                    continue
                if not self._params.include_stop_str_in_output:
                    longer.tokens = beam.tokens
                self._ended.append(replace(longer, finish_reason="stop", stop_reason=token))
        candidates.sort(key=self._score, reverse=True)
        self.live = candidates[: self._params.beam_width]
        if self._left == 0:
            self._ended += [replace(beam, finish_reason="length") for beam in self.live]
            self.live = []

    def best(self) -> list[BeamSearchSequence]:
        return sorted(self._ended, key=self._score, reverse=True)[: self._params.beam_width]

    def _score(self, beam: BeamSearchSequence) -> float:
        ends = beam.tokens[-1] in self._end_ids
        length = max(1, len(beam.tokens) - ends)
        return float(beam.cum_logprob / length**self._params.length_penalty)


def beam_search(
    prompts: Sequence[tuple[Sequence[int], str]],
    params: BeamSearchParams,
    end_ids: frozenset[int],
    max_model_len: int,
    run: Run,
) -> list[list[BeamSearchSequence]]:
    """The best sequences after each prompt, given as token ids and cache salt."""
    searches = [_Search(ids, params, end_ids, max_model_len - len(ids)) for ids, _ in prompts]
    # No more than beam_width of a beam's candidates can end, so twice as many always leave enough.
    one_token = SamplingParams(
        temperature=0.0,
        max_tokens=1,
        logprobs=2 * params.beam_width,
        ignore_eos=True,
        detokenize=False,
    )
    while any(search.live for search in searches):
        asked = [
            {"prompt_token_ids": beam.tokens, "cache_salt": salt}
            for search, (_, salt) in zip(searches, prompts, strict=True)
            for beam in search.live
        ]
        outputs = iter(run(asked, one_token))
        for search in searches:
            if search.live:
                search.extend([next(outputs) for _ in search.live])
    return [search.best() for search in searches]
