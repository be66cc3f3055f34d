"""The settings of speculative decoding: vLLM's keys, and clear errors."""

from __future__ import annotations

from typing import Any

import pytest

from twostroke.config import EngineConfig
from twostroke.draft.speculation_config import MAX_DEPTH, read_speculative_config
from twostroke.errors import ConfigError


def test_vllm_settings_of_both_methods_are_read() -> None:
    ngram = read_speculative_config(
        {
            "method": "ngram",
            "num_speculative_tokens": 5,
            "prompt_lookup_max": 4,
            "prompt_lookup_min": 2,
        }
    )
    assert (ngram.methods, ngram.max_depth, ngram.ngram_max, ngram.ngram_min) == (
        ("ngram",),
        5,
        4,
        2,
    )
    suffix = read_speculative_config(
        {
            "method": "suffix",
            "num_speculative_tokens": 32,
            "suffix_decoding_max_tree_depth": 64,
            "suffix_decoding_max_cached_requests": 100,
            "suffix_decoding_max_spec_factor": 2,
            "suffix_decoding_min_token_prob": 0.2,
            "rejection_sample_method": "standard",
        }
    )
    assert (suffix.methods, suffix.max_depth, suffix.suffix_depth) == (("suffix",), 32, 64)
    assert (suffix.suffix_requests, suffix.suffix_factor) == (100, 2.0)
    assert suffix.suffix_min_prob == 0.2


def test_one_of_the_lengths_of_an_ngram_sets_both() -> None:
    found = read_speculative_config({"prompt_lookup_max": 7})
    assert (found.ngram_min, found.ngram_max) == (7, 7)
    assert read_speculative_config({"prompt_lookup_min": 2}).ngram_max == 2


@pytest.mark.parametrize("method", ["suffix,ngram", ["suffix", "ngram"], None])
def test_several_methods_may_be_active(method: Any) -> None:
    assert set(read_speculative_config({"method": method}).methods) == {"suffix", "ngram"}


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"method": "eagle3", "model": "m"}, "'eagle3' is not supported yet"),
        ({"method": "qwen3_next_mtp"}, "'qwen3_next_mtp' is not supported yet"),
        ({"method": "ngram", "model": "m"}, "model belongs to a draft model"),
        ({"method": "draft_model"}, "model must be the path or the Hugging Face id"),
        ({"model": ""}, "model must be the path"),
        ({"model": "m", "draft_tensor_parallel_size": 2}, "a draft model runs in one process"),
        ({"model": "m", "quantization": "int8"}, "its weights keep the format of their file"),
        (
            {"model": "m", "draft_sample_method": "greedy"},
            "uses the sampling parameters of each request",
        ),
        ({"model": "m", "draft_model_min_token_prob": 2}, "a number from 0 to 1"),
        (
            {"method": "eagle3"},
            "'eagle3' is not supported yet; the methods are ngram, suffix and draft_model",
        ),
        ({"method": "mtp"}, "'mtp' is not supported yet"),
        ({"method": "ngrm"}, "method must be ngram, suffix or draft_model, not 'ngrm'"),
        ({"method": []}, "method must be ngram, suffix or draft_model"),
        ({"num_speculative_tokens": 0}, f"a whole number from 1 to {MAX_DEPTH}, not 0"),
        ({"num_speculative_tokens": 1000}, f"a whole number from 1 to {MAX_DEPTH}, not 1000"),
        ({"num_speculative_tokens": 2.5}, "a whole number"),
        ({"num_speculative_tokens": True}, "a whole number"),
        ({"min_speculative_tokens": 9, "num_speculative_tokens": 4}, "is above"),
        ({"prompt_lookup_min": 6, "prompt_lookup_max": 4}, "prompt_lookup_min 6 is above"),
        ({"prompt_lookup_min": 100}, "prompt_lookup_min must be a whole number from 1 to 64"),
        ({"prompt_lookup_max": 100}, "prompt_lookup_max must be a whole number from 1 to 64"),
        ({"num_speculativ_tokens": 4}, "no key 'num_speculativ_tokens'"),
        (
            {"rejection_sample_method": "synthetic"},
            "drafts never change the distribution of the tokens",
        ),
        ({"num_speculative_tokens_per_batch_size": [[1, 4, 3]]}, "is not needed"),
        ({"enable_adaptive_verification": 1}, "must be true or false"),
        ({"suffix_decoding_min_token_prob": 1.5}, "a number from 0 to 1"),
    ],
)
def test_a_bad_setting_is_refused_by_name(given: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match="speculative_config") as error:
        EngineConfig(speculative_config=given)
    assert message in str(error.value)


def test_a_model_alone_drafts_alone_and_with_methods_beside_them() -> None:
    alone = read_speculative_config({"model": "m", "num_speculative_tokens": 4})
    assert (alone.methods, alone.draft_model, alone.max_depth) == (("draft_model",), "m", 4)
    given = {"method": "draft_model,suffix", "model": "m", "draft_model_min_token_prob": 0.5}
    both = read_speculative_config(given | {"draft_tensor_parallel_size": 1})
    assert both.methods == ("draft_model", "suffix")
    assert both.draft_model_min_prob == 0.5


def test_eviction_and_drafts_exclude_each_other() -> None:
    with pytest.raises(ConfigError, match="exclude each other"):
        EngineConfig(speculative_config={"method": "ngram"}, kv_eviction="sinks")


def test_drafting_is_off_by_default() -> None:
    assert EngineConfig().speculation() is None
