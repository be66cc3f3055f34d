"""`SamplingParams`: the parameters that a user sets. `EngineRequest`: a validated request."""

from __future__ import annotations

import enum
import json as json_text
import math
from collections.abc import Sequence
from dataclasses import dataclass
from operator import index
from typing import Any

from twostroke.errors import RequestError
from twostroke.kv.transfer import Offer
from twostroke.strict import StrictSettings

MAX_SEED = 2**63 - 1
MAX_PRIORITY = 1000  # priorities go from -1000 to 1000
FIRST_MARK_TOKENS = 64  # tokens of the first prefix mark; each next mark has twice as many
GREEDY_BELOW = 1e-5  # temperatures under this are greedy: the division would overflow


@dataclass(frozen=True, kw_only=True)
class StructuredOutputs(StrictSettings):
    """The required form of a text: exactly one of the first five. The names are vLLM's."""

    error = RequestError

    json: str | dict[str, Any] | None = None  # a JSON schema; stored as a text
    regex: str | None = None  # the whole text matches
    choice: Sequence[str] | None = None
    grammar: str | None = None  # Lark or GBNF
    json_object: bool = False  # any JSON object
    # Objects have only the properties that the schema lists, unless the schema itself sets
    # `additionalProperties`.
    disable_additional_properties: bool = True

    def __post_init__(self) -> None:
        kinds = ("json", "regex", "choice", "grammar", "json_object")
        present = [name for name in kinds if getattr(self, name) not in (None, False)]
        if len(present) != 1:
            raise RequestError(
                f"structured_outputs takes exactly one of {', '.join(kinds)}; "
                f"{' and '.join(present) or 'none'} was given"
            )
        if isinstance(self.json, dict):
            try:
                text = json_text.dumps(self.json, ensure_ascii=False, separators=(",", ":"))
            except (TypeError, ValueError, RecursionError) as error:
                raise RequestError(
                    f"structured_outputs: the schema cannot be written as JSON ({error})"
                ) from None
            object.__setattr__(self, "json", text)
        for name in ("json", "regex", "grammar"):
            if not isinstance(getattr(self, name), str | None):
                or_dict = " or a dict" if name == "json" else ""
                raise RequestError(f"structured_outputs: {name} must be a string{or_dict}")
        if self.choice is not None:
            choices = () if isinstance(self.choice, str) else tuple(self.choice)
            if not choices or not all(isinstance(text, str) and text for text in choices):
                raise RequestError("structured_outputs: choice must be a list of non-empty strings")
            object.__setattr__(self, "choice", choices)
        object.__setattr__(self, "json_object", bool(self.json_object))
        self._check_bools("disable_additional_properties")


class RequestOutputKind(enum.StrEnum):
    """The content of the outputs of a stream: all so far, the new part, or only the end."""

    CUMULATIVE = "cumulative"
    DELTA = "delta"
    FINAL_ONLY = "final_only"


@dataclass(kw_only=True)
class SamplingParams(StrictSettings):
    """Parameters of generation. The names are vLLM's.

    The constructor checks all values. They may be changed until the parameters are given to an
    engine, which takes a checked copy (`clone`)."""

    error = RequestError

    n: int = 1
    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0  # 0 or -1: all
    min_p: float = 0.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    repetition_penalty: float = 1.0
    seed: int | None = None
    stop: str | Sequence[str] | None = None
    stop_token_ids: Sequence[int] | None = None
    ignore_eos: bool = False
    max_tokens: int | None = 16  # None: until max_model_len
    min_tokens: int = 0
    logprobs: int | None = None  # number of most likely tokens that are returned; -1: all
    prompt_logprobs: int | None = None
    logprob_token_ids: Sequence[int] | None = None  # these tokens instead of the most likely
    logit_bias: dict[int, float] | None = None
    allowed_token_ids: Sequence[int] | None = None
    bad_words: Sequence[str] | None = None
    detokenize: bool = True
    skip_special_tokens: bool = True
    spaces_between_special_tokens: bool = True
    include_stop_str_in_output: bool = False
    output_kind: str = RequestOutputKind.CUMULATIVE  # for streams
    structured_outputs: StructuredOutputs | None = None  # or a dict of its fields

    def __post_init__(self) -> None:
        self._check_int("n", 1, 1024)
        self._check_number("temperature", 0.0, 1e4, "a number from 0 (greedy) to 10000")
        self._check_number("top_p", 0.0, 1.0, "a number above 0 and at most 1")
        if self.top_p == 0:
            self._refuse("top_p", "a number above 0 and at most 1")
        self._check_int("top_k", -1)
        self._check_number("min_p", 0.0, 1.0, "a number from 0 to 1")
        self._check_number("presence_penalty", -2.0, 2.0, "a number from -2 to 2")
        self._check_number("frequency_penalty", -2.0, 2.0, "a number from -2 to 2")
        self._check_number("repetition_penalty", 1e-6, 1e6, "a number above 0 (1 means none)")
        self._check_int("seed", -MAX_SEED - 1, MAX_SEED, optional=True)
        self._check_int("max_tokens", 1, optional=True)
        self._check_int("min_tokens", 0)
        if self.max_tokens is not None and self.min_tokens > self.max_tokens:
            raise RequestError(
                f"min_tokens {self.min_tokens} is above max_tokens {self.max_tokens}; "
                "lower the first or raise the second"
            )
        self._check_bools(
            "ignore_eos",
            "detokenize",
            "skip_special_tokens",
            "spaces_between_special_tokens",
            "include_stop_str_in_output",
        )
        self._check_choice("output_kind", tuple(kind.value for kind in RequestOutputKind))
        self._check_int("logprobs", -1, optional=True)
        self._check_int("prompt_logprobs", -1, optional=True)
        self._check_lists()
        if self.logprob_token_ids and self.logprobs is None:
            self.logprobs = 0
        structured: Any = self.structured_outputs
        if isinstance(structured, dict):
            self.structured_outputs = StructuredOutputs(**structured)
        if not isinstance(self.structured_outputs, StructuredOutputs | None):
            self._refuse("structured_outputs", "StructuredOutputs(…), a dict of its fields or None")

    def clone(self) -> SamplingParams:
        """Return a copy, checked like a new object."""
        # Not with `replace`, which takes three times as long.
        other = object.__new__(type(self))
        other.__dict__.update(self.__dict__)
        other.__post_init__()
        return other

    def _check_lists(self) -> None:
        stops = (self.stop,) if isinstance(self.stop, str) else self._listed("stop")
        if not all(isinstance(s, str) and s for s in stops):
            self._refuse("stop", "a non-empty string or a list of them")
        if stops and not self.detokenize:
            raise RequestError(
                "stop strings need the text: set detokenize=True or use stop_token_ids"
            )
        words = self._listed("bad_words")
        if isinstance(self.bad_words, str) or not all(isinstance(w, str) and w for w in words):
            self._refuse("bad_words", "a list of non-empty strings")
        self.stop, self.bad_words = stops, words
        for name in ("stop_token_ids", "allowed_token_ids", "logprob_token_ids"):
            ids = self._listed(name)
            if not all(type(token) is int and token >= 0 for token in ids):
                self._refuse(name, "a list of token ids")
            if name == "allowed_token_ids" and self.allowed_token_ids is not None and not ids:
                self._refuse(name, "a list of at least one token id, or None")
            if getattr(self, name) is not None:
                setattr(self, name, ids)
        if self.logit_bias is not None:
            try:
                bias = {_token_id(k): float(v) for k, v in self.logit_bias.items()}
            except (TypeError, ValueError, AttributeError):
                bias = {-1: math.nan}
            if not all(k >= 0 and -100.0 <= v <= 100.0 for k, v in bias.items()):
                self._refuse("logit_bias", "a dict of token id → number from -100 to 100")
            self.logit_bias = bias

    def _listed(self, name: str) -> tuple[Any, ...]:
        try:
            return tuple(getattr(self, name) or ())
        except TypeError:
            return (None,)  # refused, because no list may contain None

    @property
    def greedy(self) -> bool:
        return self.temperature < GREEDY_BELOW

    @property
    def penalised(self) -> bool:
        """Return whether earlier tokens change the logits."""
        return bool(
            self.presence_penalty or self.frequency_penalty or self.repetition_penalty != 1.0
        )


def _token_id(key: Any) -> int:
    """Read a key of `logit_bias`: a string in JSON. Fractions are refused, not rounded."""
    return int(key) if isinstance(key, str) else index(key)


@dataclass(frozen=True, slots=True)
class Thinking:
    """The texts that start and end a model's reasoning, by which the engine finds it. A budget
    limits the reasoning. A grammar applies after the reasoning."""

    starts: tuple[bytes, ...]  # each of these starts it at the beginning of the output
    ends: tuple[bytes, ...]
    start_ids: tuple[int, ...] = ()  # tokens that start it, allowed before a grammar's text
    forced_ids: tuple[int, ...] = ()  # tokens that end it when the budget is used up
    is_open: bool = False  # the prompt has started the reasoning
    budget: int | None = None  # maximum number of tokens


@dataclass(frozen=True, slots=True)
class Resumed:
    """The state of a request that another engine has begun and this engine continues."""

    tokens: tuple[int, ...]  # written and delivered so far
    last_s: float  # time of the last token, on the monotonic clock
    offer: Offer | None = None  # offers its KV blocks; None: they are recomputed


@dataclass(frozen=True, slots=True)
class EngineRequest:
    """A valid request (`engine/input_processor.py`) with its prompt as token ids.

    The input processor makes one object for all `n` completions, without an id. The engine gets a
    copy for each completion, with id and seed, without the text (`engine/output_processor.py`).
    """

    request_id: str
    prompt_token_ids: Sequence[int]
    params: SamplingParams
    seed: int
    stop_ids: frozenset[int] = frozenset()  # end of text, end of turn, stop_token_ids
    bad_words_ids: tuple[tuple[int, ...], ...] = ()
    priority: int = 0  # lower runs first, under scheduling_policy="priority"
    salt: str = ""  # only requests with the same salt share cached prefixes
    received_s: float = 0.0  # on the monotonic clock
    progress: bool = False  # report after each chunk how much of the prompt has been computed
    gap_causes: bool = False  # record the causes of each gap between two of its tokens
    family: str = ""  # common name of the completions of an `n > 1` request: they share blocks
    prompt: str | None = None  # the text, if one was given
    tokenised_s: float = 0.0  # when the prompt had become token ids
    thinking: Thinking | None = None  # None: the engine does not follow reasoning
    prefix_marks: tuple[str, ...] = ()  # digests of the first 64, 128, 256, … tokens
    session: str = ""  # digest of the client's id of the conversation
    hand_over: bool = False  # end as PREFILLED after the next token, with an offer of its blocks
    resumed: Resumed | None = None
    owner: int | None = None  # the number of its API key
    prediction: tuple[int, ...] = ()  # the output that the client expects, used as drafts


class FinishReason(enum.StrEnum):
    STOP = "stop"
    LENGTH = "length"
    ABORT = "abort"
    ERROR = "error"
    PREFILLED = "prefilled"  # another engine continues the request; users never see this
