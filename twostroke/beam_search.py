"""Beam search with an engine that returns log-probabilities. Each step of the search is a batch of
requests for one token. The engine reads most of each prompt from its prefix cache."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from twostroke.errors import RequestError
from twostroke.outputs import Logprob, RequestOutput
from twostroke.request import SamplingParams
from twostroke.strict import StrictSettings

# Runs requests for one token each, and returns an output for each.
RunRequests = Callable[[list[Any], SamplingParams], list[RequestOutput]]


@dataclass(kw_only=True)
class BeamSearchParams(StrictSettings):
    """The parameters of a beam search, with vLLM's names.

    Beams are ranked by log-probability / length ** length_penalty. The length includes the prompt's
    tokens but not the token that ends a text.
    """

    error = RequestError

    beam_width: int
    max_tokens: int
    ignore_eos: bool = False
    temperature: float = 0.0  # has no effect: the search uses the model's probabilities
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
    tokens: list[int]  # with the prompt's tokens
    logprobs: list[dict[int, Logprob]] = field(default_factory=list, repr=False)
    cum_logprob: float = 0.0
    text: str | None = None  # with the prompt
    finish_reason: str | None = None
    stop_reason: int | str | None = None


@dataclass
class BeamSearchOutput:
    """The `beam_width` best sequences, the best first."""

    sequences: list[BeamSearchSequence]


class _Search:
    """The search for the continuations of one prompt."""

    def __init__(
        self,
        prompt_ids: Sequence[int],
        params: BeamSearchParams,
        end_ids: frozenset[int],
        max_new_tokens: int,
    ) -> None:
        self.live = [BeamSearchSequence(list(prompt_ids))]
        self._ended: list[BeamSearchSequence] = []
        self._params, self._end_ids = params, frozenset() if params.ignore_eos else end_ids
        self._num_left = min(params.max_tokens, max_new_tokens)

    def extend(self, outputs: Sequence[RequestOutput]) -> None:
        """Extend the live beams by a token. `outputs` has one output for each live beam."""
        self._num_left -= 1
        candidates = []
        for beam, output in zip(self.live, outputs, strict=True):
            logprobs = output.outputs[0].logprobs
            assert logprobs is not None
            (entries,) = logprobs
            for token, entry in entries.items():
                longer = replace(
                    beam,
                    tokens=[*beam.tokens, token],
                    logprobs=[*beam.logprobs, entries],
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
        if self._num_left == 0:
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
    run: RunRequests,
) -> list[list[BeamSearchSequence]]:
    """Return the best sequences for each prompt. A prompt is its token ids and its cache salt."""
    searches = [_Search(ids, params, end_ids, max_model_len - len(ids)) for ids, _ in prompts]
    # As in vLLM, each beam has 2 * beam_width candidates, so that enough candidates remain if some
    # of them end the text.
    one_token = SamplingParams(
        temperature=0.0,
        max_tokens=1,
        logprobs=2 * params.beam_width,
        ignore_eos=True,
        detokenize=False,
    )
    while any(search.live for search in searches):
        requests = [
            {"prompt_token_ids": beam.tokens, "cache_salt": salt}
            for search, (_, salt) in zip(searches, prompts, strict=True)
            for beam in search.live
        ]
        outputs = iter(run(requests, one_token))
        for search in searches:
            if search.live:
                search.extend([next(outputs) for _ in search.live])
    return [search.best() for search in searches]
