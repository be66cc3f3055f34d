"""`SpeculationConfig`: the settings of speculative decoding, from vLLM's `speculative_config`."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, NoReturn

from twostroke.errors import ConfigError, did_you_mean, shown

DEFAULT_METHODS = ("ngram", "suffix")
DRAFT_MODEL = "draft_model"
METHODS = (*DEFAULT_METHODS, DRAFT_MODEL)
MAX_DEPTH = 64  # maximum of `num_speculative_tokens`
# Methods of vLLM and llama-server that are refused. Most read the hidden states of the model.
UNSUPPORTED_METHODS = (
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
DRAFT_MODEL_KEYS = ("model", "draft_tensor_parallel_size", "draft_model_min_token_prob")
# vLLM's keys of a draft model that are refused.
UNSUPPORTED_DRAFT_MODEL_KEYS = ("max_model_len", "quantization", "kv_cache_dtype", "revision")
NGRAM_KEYS = ("prompt_lookup_max", "prompt_lookup_min")
SUFFIX_KEYS = (
    "suffix_decoding_max_tree_depth",
    "suffix_decoding_max_cached_requests",
    "suffix_decoding_max_spec_factor",
    "suffix_decoding_min_token_prob",
)
KEYS = (
    "method",
    "num_speculative_tokens",
    "min_speculative_tokens",
    *NGRAM_KEYS,
    *SUFFIX_KEYS,
    *DRAFT_MODEL_KEYS,
    "rejection_sample_method",
    "enable_adaptive_verification",
)
NAME = "speculative_config"


@dataclass(frozen=True, slots=True)
class SpeculationConfig:
    """Validated settings. The defaults are those of an empty `speculative_config`."""

    methods: tuple[str, ...] = DEFAULT_METHODS
    max_depth: int = 12  # maximum number of drafted tokens of a row in a step
    min_depth: int = 1  # shorter drafts are not verified
    ngram_max: int = 5  # maximum length of the n-gram that an n-gram draft follows
    ngram_min: int = 3  # minimum length of this n-gram
    suffix_depth: int = 24  # maximum number of matched tokens of a suffix draft
    suffix_requests: int = 10_000  # maximum number of ended requests that are searched
    suffix_factor: float = 1.0  # maximum number of drafted tokens per matched token
    suffix_min_prob: float = 0.1  # minimum probability of a suffix draft, estimated from counts
    draft_model: str | None = None  # a path or a Hugging Face id
    draft_model_min_prob: float = 0.0  # a draft of the draft model ends before a less likely token
    adaptive: bool = True  # False: verify as many drafted tokens of each row as a drafter offers


def read_speculative_config(settings: Mapping[str, Any]) -> SpeculationConfig:
    """Read and check the settings; raise `ConfigError` for an unknown key or a bad value."""
    draft_model = settings.get("model")
    methods = _methods(settings.get("method"), draft_model is not None)
    for key in settings:
        if key in UNSUPPORTED_DRAFT_MODEL_KEYS:
            raise ConfigError(
                f"{NAME}: {key} cannot be set for the draft model: its weights keep the format of "
                "their file, and the engine's other settings apply to both models; leave "
                f"{key} out"
            )
        if key == "draft_sample_method":
            raise ConfigError(
                f"{NAME}: {key} is not needed: the draft model uses the sampling parameters of "
                f"each request; leave {key} out"
            )
        if key in DRAFT_MODEL_KEYS and DRAFT_MODEL not in methods:
            raise ConfigError(
                f"{NAME}: {key} belongs to a draft model, and the method is {','.join(methods)}; "
                f"leave {key} out, or add {DRAFT_MODEL} to the methods"
            )
        if key == "num_speculative_tokens_per_batch_size":
            raise ConfigError(
                f"{NAME}: {key} is not needed: in each step the engine chooses the number of "
                f"drafted tokens of each row, from the measured cost of a step; leave {key} out"
            )
        if key not in KEYS:
            raise ConfigError(f"{NAME} has no key {shown(key)}{did_you_mean(str(key), KEYS)}")
    max_depth = _integer(settings, "num_speculative_tokens", 1, MAX_DEPTH, 12)
    min_depth = _integer(settings, "min_speculative_tokens", 0, MAX_DEPTH, 1)
    if min_depth > max_depth:
        raise ConfigError(
            f"{NAME}: min_speculative_tokens {min_depth} is above num_speculative_tokens "
            f"{max_depth}"
        )
    ngram_min = _integer(settings, "prompt_lookup_min", 1, 64, 3)
    ngram_max = _integer(settings, "prompt_lookup_max", 1, 64, 5)
    max_is_set, min_is_set = (settings.get(key) is not None for key in NGRAM_KEYS)
    if max_is_set != min_is_set:  # one key sets both lengths, as in vLLM
        ngram_min = ngram_max = ngram_max if max_is_set else ngram_min
    if ngram_min > ngram_max:
        raise ConfigError(
            f"{NAME}: prompt_lookup_min {ngram_min} is above prompt_lookup_max {ngram_max}"
        )
    if DRAFT_MODEL in methods and (not isinstance(draft_model, str) or not draft_model):
        _refuse("model", draft_model, "the path or the Hugging Face id of the draft model")
    ranks = settings.get("draft_tensor_parallel_size")
    if ranks is not None and (type(ranks) is not int or ranks != 1):
        raise ConfigError(
            f"{NAME}: draft_tensor_parallel_size is {shown(ranks)}, but a draft model runs in one "
            "process; leave it out"
        )
    rejection = settings.get("rejection_sample_method")
    if rejection not in (None, "standard", "strict"):
        raise ConfigError(
            f"{NAME}: rejection_sample_method is {shown(rejection)}, but drafts never change the "
            "distribution of the tokens; leave it out, or give 'standard' or 'strict'"
        )
    adaptive = settings.get("enable_adaptive_verification")
    if adaptive is not None and type(adaptive) is not bool:
        _refuse("enable_adaptive_verification", adaptive, "true or false")
    return SpeculationConfig(
        methods=methods,
        max_depth=max_depth,
        min_depth=max(1, min_depth),
        ngram_max=ngram_max,
        ngram_min=ngram_min,
        suffix_depth=_integer(settings, "suffix_decoding_max_tree_depth", 2, 256, 24),
        suffix_requests=_integer(settings, "suffix_decoding_max_cached_requests", 0, 10**6, 10_000),
        suffix_factor=_number(settings, "suffix_decoding_max_spec_factor", 0.1, 64.0, 1.0),
        suffix_min_prob=_number(settings, "suffix_decoding_min_token_prob", 0.0, 1.0, 0.1),
        draft_model=draft_model if DRAFT_MODEL in methods else None,
        draft_model_min_prob=_number(settings, "draft_model_min_token_prob", 0.0, 1.0, 0.0),
        adaptive=adaptive is not False,
    )


def _methods(value: Any, has_draft_model: bool) -> tuple[str, ...]:
    """Read one method, several methods separated by commas, or a list of methods. Without a method,
    a draft model is the only drafter."""
    if value is None:
        return (DRAFT_MODEL,) if has_draft_model else DEFAULT_METHODS
    names = value.split(",") if isinstance(value, str) else value
    expected = f"{', '.join(DEFAULT_METHODS)} or {DRAFT_MODEL}"
    if not isinstance(names, list | tuple) or not names:
        _refuse("method", value, expected)
    found = []
    for name in names:
        name = name.strip() if isinstance(name, str) else name
        if name in UNSUPPORTED_METHODS or str(name).endswith("_mtp"):
            raise ConfigError(
                f"{NAME}: the method {name!r} is not supported yet; the methods are "
                f"{', '.join(DEFAULT_METHODS)} and {DRAFT_MODEL}"
            )
        if name not in METHODS:
            _refuse("method", name, expected)
        found.append(name)
    return tuple(dict.fromkeys(found))


def _integer(settings: Mapping[str, Any], key: str, low: int, high: int, default: int) -> int:
    value = settings.get(key)
    value = default if value is None else value
    if type(value) is not int or not low <= value <= high:
        _refuse(key, value, f"a whole number from {low} to {high}")
    return int(value)


def _number(
    settings: Mapping[str, Any], key: str, low: float, high: float, default: float
) -> float:
    value = settings.get(key)
    value = default if value is None else value
    if type(value) not in (int, float) or not low <= value <= high:
        _refuse(key, value, f"a number from {low:g} to {high:g}")
    return float(value)


def _refuse(key: str, value: Any, expected: str) -> NoReturn:
    raise ConfigError(f"{NAME}: {key} must be {expected}, not {shown(value)}")
