"""`SpeculationConfig`: the settings of speculative decoding, from vLLM's `speculative_config`."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, NoReturn

from twostroke.errors import ConfigError, did_you_mean, shown

METHODS = ("ngram", "suffix")  # the default
DRAFT_MODEL = "draft_model"
ALL_METHODS = (*METHODS, DRAFT_MODEL)
MAX_DEPTH = 64  # of `num_speculative_tokens`
# Methods of vLLM and llama-server that are refused: most read the hidden states of the model.
NOT_YET = (
    "ngram_gpu",
    "eagle",
    "eagle3",
    "mtp",
    "medusa",
    "mlp_speculator",
    "dflash",
    "dspark",
    "draft-eagle3",
    "draft-mtp",
)
OF_DRAFT_MODEL = ("model", "draft_tensor_parallel_size", "draft_model_min_token_prob")
# vLLM's settings of a draft model that cannot be set here.
NOT_SETTABLE = ("max_model_len", "quantization", "kv_cache_dtype", "revision")
OF_NGRAM = ("prompt_lookup_max", "prompt_lookup_min")
OF_SUFFIX = (
    "suffix_decoding_max_tree_depth",
    "suffix_decoding_max_cached_requests",
    "suffix_decoding_max_spec_factor",
    "suffix_decoding_min_token_prob",
)
KNOWN = (
    "method",
    "num_speculative_tokens",
    "min_speculative_tokens",
    *OF_NGRAM,
    *OF_SUFFIX,
    *OF_DRAFT_MODEL,
    "rejection_sample_method",
    "enable_adaptive_verification",
)
NAME = "speculative_config"


@dataclass(frozen=True, slots=True)
class SpeculationConfig:
    """Validated settings. The defaults are those of an empty `speculative_config`."""

    methods: tuple[str, ...] = METHODS
    max_depth: int = 12  # drafted tokens of a row in a step
    min_depth: int = 1  # shorter drafts are not verified
    ngram_max: int = 5  # tokens that must be equal before an n-gram draft
    ngram_min: int = 3
    suffix_depth: int = 24  # longest match of a suffix draft
    suffix_requests: int = 10_000  # ended requests that are searched
    suffix_factor: float = 1.0  # drafted tokens for each matched token
    suffix_min_prob: float = 0.1  # of the whole draft, by the frequencies
    model: str | None = None  # the draft model: a path or a Hugging Face id
    model_min_prob: float = 0.0  # a draft of the model ends before a less likely token
    adaptive: bool = True  # False: every row gets as many drafted tokens as a drafter offers


def read_speculative_config(given: Mapping[str, Any]) -> SpeculationConfig:
    """Read and check the settings; raise `ConfigError` for an unknown key or a bad value."""
    methods = _methods(given.get("method"), given.get("model"))
    for key in given:
        if key in NOT_SETTABLE:
            raise ConfigError(
                f"{NAME}: {key} cannot be set for the draft model, which is kept as its file has "
                "it; leave it out"
            )
        if key == "draft_sample_method":
            raise ConfigError(
                f"{NAME}: {key} is not needed: the draft model samples as the request does; leave "
                "it out"
            )
        if key in OF_DRAFT_MODEL and DRAFT_MODEL not in methods:
            raise ConfigError(
                f"{NAME}: {key} belongs to a draft model, and the method is {','.join(methods)}; "
                f"leave {key} out, or add {DRAFT_MODEL} to the methods"
            )
        if key == "num_speculative_tokens_per_batch_size":
            raise ConfigError(
                f"{NAME}: {key} is not needed: the engine chooses the depth of each row in each "
                "step, from the measured cost of a step; leave it out"
            )
        if key not in KNOWN:
            raise ConfigError(f"{NAME} has no key {shown(key)}{did_you_mean(str(key), KNOWN)}")
    max_depth = _whole(given, "num_speculative_tokens", 1, MAX_DEPTH, 12)
    min_depth = _whole(given, "min_speculative_tokens", 0, MAX_DEPTH, 1)
    if min_depth > max_depth:
        raise ConfigError(
            f"{NAME}: min_speculative_tokens {min_depth} is above num_speculative_tokens "
            f"{max_depth}"
        )
    # If only one of the two is given, it sets both, as in vLLM.
    longest, shortest = given.get("prompt_lookup_max"), given.get("prompt_lookup_min")
    defaults = (5, 3) if longest is None and shortest is None else (shortest, longest)
    ngram_max = _whole(given, "prompt_lookup_max", 1, 64, defaults[0])
    ngram_min = _whole(given, "prompt_lookup_min", 1, 64, defaults[1])
    if ngram_min > ngram_max:
        raise ConfigError(
            f"{NAME}: prompt_lookup_min {ngram_min} is above prompt_lookup_max {ngram_max}"
        )
    model = given.get("model")
    if DRAFT_MODEL in methods and (not isinstance(model, str) or not model):
        _refuse("model", model, "the path or the Hugging Face id of the draft model")
    ranks = given.get("draft_tensor_parallel_size")
    if ranks is not None and (type(ranks) is not int or ranks != 1):
        raise ConfigError(
            f"{NAME}: draft_tensor_parallel_size is {shown(ranks)}, but a draft model runs in one "
            "process; leave it out"
        )
    rejection = given.get("rejection_sample_method")
    if rejection not in (None, "standard", "strict"):
        raise ConfigError(
            f"{NAME}: rejection_sample_method is {shown(rejection)}, but samples always keep the "
            "distribution of the model: leave it out, or give 'standard'"
        )
    adaptive = given.get("enable_adaptive_verification")
    if adaptive is not None and type(adaptive) is not bool:
        _refuse("enable_adaptive_verification", adaptive, "true or false")
    return SpeculationConfig(
        methods=methods,
        max_depth=max_depth,
        min_depth=max(1, min_depth),
        ngram_max=ngram_max,
        ngram_min=ngram_min,
        suffix_depth=_whole(given, "suffix_decoding_max_tree_depth", 2, 256, 24),
        suffix_requests=_whole(given, "suffix_decoding_max_cached_requests", 0, 10**6, 10_000),
        suffix_factor=_number(given, "suffix_decoding_max_spec_factor", 0.1, 64.0, 1.0),
        suffix_min_prob=_number(given, "suffix_decoding_min_token_prob", 0.0, 1.0, 0.1),
        model=model if DRAFT_MODEL in methods else None,
        model_min_prob=_number(given, "draft_model_min_token_prob", 0.0, 1.0, 0.0),
        adaptive=adaptive is not False,
    )


def _methods(value: Any, model: Any) -> tuple[str, ...]:
    """Read one method, several separated by commas, or a list. With `model` and without a method,
    the draft model is the only drafter."""
    if value is None:
        return METHODS if model is None else (DRAFT_MODEL,)
    names = value.split(",") if isinstance(value, str) else value
    expected = f"{', '.join(METHODS)} or {DRAFT_MODEL}"
    if not isinstance(names, list | tuple) or not names:
        _refuse("method", value, expected)
    found = []
    for name in names:
        name = name.strip() if isinstance(name, str) else name
        if name in NOT_YET or str(name).endswith("_mtp"):
            raise ConfigError(
                f"{NAME}: the method {name!r} is not supported yet; the methods are "
                f"{', '.join(METHODS)} and {DRAFT_MODEL}"
            )
        if name not in ALL_METHODS:
            _refuse("method", name, expected)
        found.append(name)
    return tuple(dict.fromkeys(found))


def _whole(given: Mapping[str, Any], key: str, low: int, high: int, default: Any) -> int:
    value = given.get(key)
    value = default if value is None else value
    if type(value) is not int or not low <= value <= high:
        _refuse(key, value, f"a whole number from {low} to {high}")
    return int(value)


def _number(given: Mapping[str, Any], key: str, low: float, high: float, default: float) -> float:
    value = given.get(key)
    value = default if value is None else value
    if type(value) not in (int, float) or not low <= value <= high:
        _refuse(key, value, f"a number from {low:g} to {high:g}")
    return float(value)


def _refuse(key: str, value: Any, expected: str) -> NoReturn:
    raise ConfigError(f"{NAME}: {key} must be {expected}, not {shown(value)}")
