"""Model files whose values are wrong: each is refused at once, and the message names the field.

One of each kind, by value; `bench/fuzz_models.py` makes them by the thousand.
"""

from __future__ import annotations

import json
import logging
import math
import struct
from base64 import b64encode
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest
import torch
from safetensors.numpy import load_file, save_file
from safetensors.torch import load_file as load_tensors
from safetensors.torch import save_file as save_tensors

from tests.model.gguf.gguf_files import (
    SCALES_AT,
    SPEC,
    add_sizes,
    packed_rows,
    put_scales,
    random_weights,
    save,
    setting,
    write_model,
)
from tests.model.text.vocabularies import sentencepiece_metadata
from tests.specs import changed
from tests.tiny import CONFIG, tiny_folder, tiny_llm, write_json
from twostroke import LLM, SamplingParams
from twostroke.config import EngineConfig
from twostroke.errors import ModelError, RequestError
from twostroke.exec.memory import plan_memory
from twostroke.model.describe.gguf_config import spec_from_gguf
from twostroke.model.describe.gguf_names import NAMES as GGUF_NAMES
from twostroke.model.describe.hf_config import spec_from_hf
from twostroke.model.describe.hf_names import LLAMA_NAMES
from twostroke.model.gguf.block_types import BlockType
from twostroke.model.gguf.gguf_file import GGUFFile
from twostroke.model.text.tokenizer import Tokenizer
from twostroke.model.weights.gguf import GGUFWeights
from twostroke.model.weights.tensors import read_tensor

pytestmark = pytest.mark.core  # bounds of security

NAN, INF = float("nan"), float("inf")


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return tiny_folder(tmp_path / "tiny")


def refusal(path: Path, **settings: Any) -> str:
    with pytest.raises(ModelError) as caught:
        LLM(str(path), **settings)
    return str(caught.value)


def change_json(path: Path, **entries: Any) -> None:
    content = json.loads(path.read_text()) if path.exists() else {}
    write_json(path, content | entries)


# Configs


@pytest.mark.parametrize(
    ("entries", "says"),
    [
        ({"rms_norm_eps": None}, "has no rms_norm_eps, which must be a number from 1e-20 to 1"),
        ({"rms_norm_eps": -1}, "rms_norm_eps must be a number from 1e-20 to 1, not -1"),
        ({"rms_norm_eps": NAN}, "rms_norm_eps must be a number from 1e-20 to 1, not nan"),
        ({"rms_norm_eps": True}, "rms_norm_eps must be a number from 1e-20 to 1, not True"),
        ({"rope_theta": -1}, "rope_theta must be a number above 1 and at most 1e+15, not -1"),
        ({"rope_theta": NAN}, "rope_theta must be a number above 1 and at most 1e+15, not nan"),
        ({"rope_theta": "1e4"}, "rope_theta must be a number above 1 and at most 1e+15, not '1e4'"),
        ({"rope_parameters": 1}, "rope_parameters must be an object, not 1"),
        ({"rope_scaling": {"rope_type": "yarn", "factor": INF}}, "factor must be a number from 1"),
        (
            {"rope_scaling": {"type": "linear", "factor": 1e6}},
            "factor must be such that the context stays within 16777216 tokens",
        ),
        (
            {"rope_scaling": {"rope_type": "llama3", "low_freq_factor": 4, "high_freq_factor": 4}},
            "high_freq_factor must be a number above 4",
        ),
        ({"partial_rotary_factor": 0.1}, "partial_rotary_factor 0.1 must be an even number"),
        ({"num_hidden_layers": 2**60}, "num_hidden_layers must be a whole number from 1 to 1024"),
        ({"num_hidden_layers": "2"}, "num_hidden_layers must be a whole number from 1 to 1024"),
        ({"num_hidden_layers": True}, "num_hidden_layers must be a whole number from 1 to 1024"),
        ({"max_position_embeddings": 2**31}, "max_position_embeddings must be a whole number from"),
        ({"vocab_size": 0}, "vocab_size must be a whole number from 1 to 4194304, not 0"),
        ({"hidden_size": 1.5}, "hidden_size must be a whole number from 1 to 1048576, not 1.5"),
        ({"tie_word_embeddings": "no"}, "tie_word_embeddings must be true or false, not 'no'"),
        ({"model_type": ["llama"]}, "the architecture ['llama'] is not supported"),
        ({"torch_dtype": {"a": 1}}, "torch_dtype must be one of bfloat16, float16"),
        ({"hidden_size": "x" * 10**6}, "not 'xxxxxxxxxxxxxxxxxxxxxxxxxxx...xxxxx"),
        ({"eos_token_id": "x"}, "eos_token_id must be a token id from 0 to 4194303, or a list"),
        ({"eos_token_id": 2**70}, "eos_token_id must be a token id from 0 to 4194303, or a list"),
    ],
)
def test_a_config_names_the_field_that_is_wrong(
    folder: Path, entries: dict[str, Any], says: str
) -> None:
    change_json(folder / "config.json", **entries)
    message = refusal(folder)
    assert message.startswith(f"{folder / 'config.json'}: ")
    assert says in message
    assert len(message) < 600


FALCON = {"model_type": "falcon", "new_decoder_architecture": True, "num_kv_heads": 2}
NEOX = {"model_type": "gpt_neox", "num_key_value_heads": 4}
STABLELM = {"model_type": "stablelm", "partial_rotary_factor": 0.25, "use_parallel_residual": True}
SEED_OSS = {"model_type": "seed_oss", "head_dim": 8, "attention_out_bias": True}
GEMMA3 = {"model_type": "gemma3", "text_config": CONFIG | {"head_dim": 8, "attention_bias": True}}


@pytest.mark.parametrize(
    ("family", "entry", "says"),
    [
        (FALCON, {"num_kv_heads": 3}, "num_attention_heads 4 is not a multiple of num_kv_heads 3"),
        (NEOX, {"rotary_pct": 1e-30}, "head_dim 8 × rotary_pct 1e-30 must be an even number"),
        # The weights show it: with the other value they would be those of the model.
        (FALCON, {"num_ln_in_parallel_attn": 1}, "(see model_type, num_ln_in_parallel_attn)"),
        (FALCON, {"new_decoder_architecture": None}, "(see model_type, new_decoder_architecture)"),
        (SEED_OSS, {"attention_out_bias": None}, "(see model_type, attention_out_bias)"),
        (STABLELM, {"use_parallel_residual": None}, "hidden_size, use_parallel_residual)"),
        (GEMMA3, {"text_config": CONFIG | {"head_dim": 8}}, "(see model_type, text_config.attent"),
    ],
)
def test_a_field_is_called_what_its_family_calls_it(
    tmp_path: Path, family: dict[str, Any], entry: dict[str, Any], says: str
) -> None:
    folder = tiny_folder(tmp_path / "tiny", **family)
    change_json(folder / "config.json", **entry)
    assert says in refusal(folder)


@pytest.mark.parametrize("window", [True, -1, 2**40, "4"])
def test_windows_are_checked_where_a_family_has_them(window: Any) -> None:
    config = CONFIG | {"model_type": "mistral", "sliding_window": window}
    with pytest.raises(ModelError, match="sliding_window must be a whole number from 1"):
        spec_from_hf(config)


def test_sound_edges_are_not_refused() -> None:
    """A negative control."""
    spec = spec_from_hf(CONFIG | {"rms_norm_eps": 1e-12, "rope_theta": 5e8, "head_dim": None})
    assert (spec.norm_eps, spec.ropes()[0].theta, spec.layers[0].attention.head_dim) == (
        1e-12,
        5e8,
        8,
    )
    spec = spec_from_hf(CONFIG | {"max_position_embeddings": 2**24, "num_hidden_layers": 1024})
    assert (spec.max_context, spec.num_layers) == (2**24, 1024)
    assert spec_from_hf({k: v for k, v in CONFIG.items() if k != "rms_norm_eps"}).norm_eps == 1e-6


@pytest.mark.parametrize(
    ("key", "value", "says"),
    [
        ("attention.layer_norm_rms_epsilon", -1.0, "must be a number from 1e-20 to 1, not -1.0"),
        ("attention.layer_norm_rms_epsilon", NAN, "must be a number from 1e-20 to 1, not nan"),
        ("rope.freq_base", NAN, "must be a number above 1 and at most 1e.15, not nan"),
        ("rope.freq_base", True, "must be a number above 1 and at most 1e.15, not True"),
        ("rope.scaling.type", 5, "must be a text of at most"),
        ("context_length", 2**31, "must be a whole number from 2 to 16777216, not 2147483648"),
        ("embedding_length", 3, "3 is not a multiple of llama.attention.head_count 4 and no"),
        ("attention.sliding_window", "x", "must be a whole number from 0 to 16777216, not 'x'"),
    ],
)
def test_metadata_names_the_field_that_is_wrong(
    tmp_path: Path, key: str, value: Any, says: str
) -> None:
    file = write_model(tmp_path / "m.gguf", edit=setting(key, value))
    with pytest.raises(ModelError, match=rf"m\.gguf: .*({says})") as caught:
        spec_from_gguf(file)
    assert f"llama.{key} " in str(caught.value)


@pytest.mark.parametrize("name", ["config.json", "generation_config.json", "tokenizer_config.json"])
@pytest.mark.parametrize(
    ("content", "says"),
    [
        (b"[1]", "expected a JSON object"),
        (b"\xff", "cannot be read as JSON"),
        (b'{"a":' * 100_000 + b"1" + b"}" * 100_000, "nested too deeply"),
        (b"9" * 5000, "cannot be read as JSON"),
    ],
)
def test_files_that_are_no_json_objects_are_named(
    folder: Path, name: str, content: bytes, says: str
) -> None:
    (folder / name).write_bytes(content)
    message = refusal(folder)
    assert f"{folder / name}: " in message
    assert says in message


def test_recommended_sampling_that_is_none_is_refused(folder: Path) -> None:
    for entries in ({"temperature": "hot"}, {"top_p": NAN}, {"top_k": [1]}, {"do_sample": 1}):
        path = folder / "generation_config.json"
        write_json(path, entries)
        message = refusal(folder)
        assert message.startswith(f"{path}: {next(iter(entries))} must be")
    write_json(path, {"temperature": 0.5, "min_p": None})
    assert tiny_llm(folder).engine.sampling.temperature == 0.5


# Context


def test_a_long_context_does_not_take_the_memory_of_a_tiny_model() -> None:
    """4 GiB of cache hold millions of its tokens; the tables of as many positions are bounded."""
    spec = spec_from_hf(CONFIG | {"max_position_embeddings": 2**24})
    sizes = (4 * spec.num_parameters(), 4, 2, 16 << 30)
    plan = plan_memory(EngineConfig(max_num_seqs=64), spec, *sizes, on_gpu=False)
    each = 4 * 8 + 64 * (4 + 4 / 16)  # angles; a token and a part of a table in each row
    assert plan.max_model_len == int((16 << 30) / 32 / each)
    assert plan.shortened
    config = EngineConfig(max_num_seqs=64, max_model_len=2**22)
    asked = plan_memory(config, spec, *sizes, on_gpu=False)
    assert asked.max_model_len == 2**22


# Tokenizers


def change_tokenizer(folder: Path, **parts: Any) -> None:
    change_json(folder / "tokenizer.json", **parts)


def replacing(pattern: dict[str, str], text: str) -> dict[str, Any]:
    return {"type": "Replace", "pattern": pattern, "content": text}


def token(token_id: Any, content: Any) -> dict[str, Any]:
    flags = dict.fromkeys(("single_word", "lstrip", "rstrip", "normalized"), False)
    return {"id": token_id, "content": content, "special": True, **flags}


@pytest.mark.parametrize(
    ("parts", "says"),
    [
        ({"added_tokens": [token(10**9, "<x>")]}, "added_tokens: id must be a whole number from 0"),
        (
            {"added_tokens": [token(10**6, "<x>")]},
            "added_tokens: has the id 1000000, but there are",
        ),
        (
            {"added_tokens": [token(0, "<s>"), token(0, "<x>")]},
            "added_tokens: content must be '<s>', the text that added_tokens has, not '<x>'",
        ),
        (
            {"added_tokens": [token(0, "<s>"), token(1, "<s>")]},
            "added_tokens: id must be 0, the id that added_tokens gives to the same text, not 1",
        ),
        ({"added_tokens": [token("x", "<x>")]}, "added_tokens: id must be a whole number"),
        ({"added_tokens": {}}, "added_tokens must be a list of objects"),
        ({"model": {"type": "BPE", "vocab": {"a": 10**8}, "merges": []}}, "vocab: has the id"),
        (
            {"model": {"type": "BPE", "vocab": {"a": 0}, "merges": [["b", "c"]]}},
            "the section model is invalid",
        ),
        ({"model": 5}, "model must be an object, not 5"),
        ({"normalizer": {"type": "Nothing"}}, "the section normalizer is invalid"),
        (
            {"normalizer": replacing({"String": "a"}, "a" * 10**6)},
            "normalizer: content must be a text of at most 64 characters",
        ),
        (
            {
                "normalizer": {
                    "type": "Sequence",
                    "normalizers": [replacing({"String": "a"}, "aa")] * 40,
                }
            },
            "normalizer: makes more than 64 times its length",
        ),
        (
            {
                "normalizer": {
                    "type": "Sequence",
                    "normalizers": [replacing({"Regex": ""}, "é")] * 40,
                }
            },
            "normalizer: makes more than 64 times its length",
        ),
        (
            {"decoder": {"type": "Sequence", "decoders": [replacing({"String": "a"}, "aa")] * 40}},
            "decoder: makes more than 64 times its length",
        ),
        (  # letters that no probe holds: 64 times as many of the next at each step
            {
                "normalizer": {
                    "type": "Sequence",
                    "normalizers": [
                        replacing({"Regex": f"[{a}-{a}]"}, b * 64)
                        for a, b in ("qr", "rs", "st", "tu")
                    ],
                }
            },
            "normalizer: makes more than 64 times its length of some texts (up to 16,777,216",
        ),
        (
            {
                "normalizer": {
                    "type": "Precompiled",
                    "precompiled_charsmap": b64encode(bytes(4) + b"r" * 65 + b"\0").decode(),
                }
            },
            "normalizer: makes more than 64 times its length of some texts (up to 65",
        ),
        (
            {"normalizer": replacing({"Regex": "q(?=.{9})"}, "r")},
            "pattern: Regex must be a pattern without lookarounds, back-references and repeated",
        ),
        (
            {"normalizer": replacing({"Regex": "(q|q)+z"}, "r")},
            "pattern: Regex must be a pattern without lookarounds, back-references and repeated",
        ),
        (
            {"normalizer": replacing({"Regex": "q*q*q*q*z"}, "r")},
            "pattern: Regex must be a pattern without lookarounds, back-references and repeated",
        ),
        (
            {"normalizer": replacing({"Regex": "(q|q)" * 30 + "z"}, "r")},
            "pattern: Regex must be a pattern without lookarounds, back-references and repeated",
        ),
        (
            {"normalizer": replacing({"Regex": "q?" * 30 + "z"}, "r")},
            "pattern: Regex must be a pattern without lookarounds, back-references and repeated",
        ),
        (
            {"normalizer": {"type": "Sequence", "normalizers": [{"type": "NFC"}] * 65}},
            "normalizer: has more than 64 steps",
        ),
    ],
)
def test_a_tokenizer_json_names_the_part_that_is_wrong(
    folder: Path, parts: dict[str, Any], says: str
) -> None:
    change_tokenizer(folder, **parts)
    with pytest.raises(ModelError) as caught:
        Tokenizer.from_folder(folder)
    assert str(caught.value).startswith(f"{folder / 'tokenizer.json'}: ")
    assert says in str(caught.value)


def test_usual_normalizers_are_read(folder: Path) -> None:
    """A negative control: what Llama 2, Gemma and T5 do to a text."""
    steps = [{"type": "Prepend", "prepend": "▁"}, replacing({"String": " "}, "▁")]
    steps += [
        {"type": "NFKC"},
        replacing({"Regex": " {2,}"}, " "),
        replacing({"String": "``"}, '"'),
        *(replacing({"Regex": f"\\r\\n|{x}|[^\\W\\w]"}, "\n") for x in "abcdefghijkl"),
        replacing({"Regex": r"\s+|\)+|(?:\p{Zs}|\x{3000})"}, " "),
    ]
    change_tokenizer(folder, normalizer={"type": "Sequence", "normalizers": steps})
    assert Tokenizer.from_folder(folder).encode("a dog") != []


@pytest.mark.parametrize(
    ("file", "entries", "says"),
    [
        ("tokenizer_config.json", {"added_tokens_decoder": {"x": {}}}, "'x' must be a token id"),
        ("tokenizer_config.json", {"added_tokens_decoder": [1]}, "added_tokens_decoder must be an"),
        ("tokenizer_config.json", {"added_tokens_decoder": {"5": "x"}}, "5 must be an object"),
        ("tokenizer_config.json", {"eos_token": 5}, "eos_token must be a token: a text, an object"),
        ("tokenizer_config.json", {"additional_special_tokens": 1}, "must be a list of tokens"),
        ("tokenizer_config.json", {"chat_template": 5}, "chat_template must be a text"),
        ("tokenizer_config.json", {"chat_template": "x" * 2**21}, "chat_template must be a text"),
        ("tokenizer_config.json", {"chat_template": [{"name": 1}]}, "name must be a text"),
        ("tokenizer_config.json", {"chat_template": [{"name": "a"}]}, "has no template"),
        ("special_tokens_map.json", {"pad_token": [1]}, "pad_token must be a token"),
    ],
)
def test_what_is_said_about_a_tokenizer_is_checked(
    folder: Path, file: str, entries: dict[str, Any], says: str
) -> None:
    change_json(folder / file, **entries)
    with pytest.raises(ModelError) as caught:
        Tokenizer.from_folder(folder)
    assert str(caught.value).startswith(str(folder / file))
    assert says in str(caught.value)


@pytest.mark.parametrize(
    ("change", "says"),
    [
        ({"bos_token_id": "x"}, "bos_token_id must be a whole number from 0 to 599, not 'x'"),
        ({"bos_token_id": True}, "bos_token_id must be a whole number from 0 to 599, not True"),
        ({"tokens": 5}, "tokens must be a list of texts, not 5"),
        ({"tokens": ["a" * 200_000]}, "token 0 of tokenizer.ggml.tokens has 200000 characters"),
        ({"tokens": ["a" * 1000] * 10_000}, "tokenizer.ggml.tokens has 10000000 characters in all"),
        ({"token_type": ["x"] * 600}, "token_type must be a list of int values"),
        ({"scores": [NAN] * 600}, "scores must be a list of finite numbers"),
        ({"add_bos_token": "no"}, "add_bos_token must be true or false, not 'no'"),
    ],
)
def test_a_vocabulary_in_a_header_names_the_field(change: dict[str, Any], says: str) -> None:
    metadata = sentencepiece_metadata() | {f"tokenizer.ggml.{k}": v for k, v in change.items()}
    with pytest.raises(ModelError) as caught:
        Tokenizer.from_gguf(metadata, "m.gguf")
    assert str(caught.value).startswith("m.gguf: ")
    assert says in str(caught.value)


def test_a_text_the_tokenizer_cannot_read_harms_only_its_request(folder: Path) -> None:
    model = {"type": "WordLevel", "vocab": {"a": 0, "b": 1}, "unk_token": "<none>"}
    change_tokenizer(folder, model=model, post_processor=None, added_tokens=[], pre_tokenizer=None)
    llm = tiny_llm(folder)
    with pytest.raises(RequestError, match="the model's tokenizer cannot read this text"):
        llm.generate("c")
    assert len(llm.generate([[1]], SamplingParams(max_tokens=1))) == 1


# GGUF headers


def header(*values: bytes) -> bytes:
    pairs = [struct.pack("<Q", 1) + bytes([97 + n]) + value for n, value in enumerate(values)]
    return b"GGUF" + struct.pack("<IQQ", 3, 0, len(pairs)) + b"".join(pairs)


@pytest.mark.parametrize(
    ("data", "says"),
    [
        (
            header(struct.pack("<IIQ", 9, 9, 10**5) + struct.pack("<IQ", 4, 0) * 10**5),
            "announces 100000 arrays of 'a'; the limit is 4096",
        ),
        (
            header(struct.pack("<IIQ", 9, 0, 2**23 + 1) + bytes(2**23 + 1)),
            "announces 8388609 values of 'a'; the limit is 8388608",
        ),
        (
            header(*[struct.pack("<IIQ", 9, 0, 2**22) + bytes(2**22)] * 3),
            "announces 4194304 values of 'c'; the limit is 0",
        ),
        (
            b"GGUF" + struct.pack("<IQQ", 3, 0, 10**5) + bytes(13 * 10**5),
            "announces 100000 metadata entries; the limit is 65536",
        ),
        (
            b"GGUF" + struct.pack("<IQQQ", 3, 0, 1, 2000) + b"x" * 3000,
            "a metadata key has 2000 bytes, expected at most 1024",
        ),
    ],
)
def test_a_header_of_too_many_things_is_refused(tmp_path: Path, data: bytes, says: str) -> None:
    path = tmp_path / "m.gguf"
    path.write_bytes(data)
    with pytest.raises(ModelError) as caught:
        GGUFFile.open(path)
    assert says in str(caught.value)


# Weights


@pytest.mark.parametrize("kernels", ["auto", "reference"])
@pytest.mark.parametrize("dtype", ["float32", "float16", "bfloat16"])
@pytest.mark.parametrize("value", [NAN, INF, -INF])
def test_a_weight_that_is_no_number_is_found_by_name(
    folder: Path, kernels: str, dtype: str, value: float
) -> None:
    path = folder / "model.safetensors"
    found = load_tensors(path).items()
    tensors = {name: tensor.to(getattr(torch, dtype)) for name, tensor in found}
    change_json(folder / "config.json", torch_dtype=dtype)
    save_tensors(tensors, path)
    assert len(LLM(str(folder), kernels=kernels).generate([[5]])) == 1
    for name in ("model.layers.1.mlp.up_proj.weight", "model.norm.weight", "lm_head.weight"):
        spoilt = tensors[name].clone()
        spoilt.view(-1)[-1] = value
        save_tensors(tensors | {name: spoilt}, path)
        says = refusal(folder, kernels=kernels)
        assert says.startswith(f"{path}: the tensor '{name}' holds NaN or infinity.")


def test_a_bias_that_is_no_number_is_found_by_name(tmp_path: Path) -> None:
    folder = tiny_folder(tmp_path / "tiny", attention_bias=True)
    path, name = folder / "model.safetensors", "model.layers.0.self_attn.k_proj.bias"
    tensors = load_file(path)
    tensors[name][3] = NAN
    save_file(tensors, path)
    assert f"the tensor '{name}' holds NaN or infinity" in refusal(folder)


@pytest.mark.parametrize("kind", [kind for kind in BlockType if kind != BlockType.F32])
def test_a_block_whose_scale_is_no_number_is_found_by_name(tmp_path: Path, kind: BlockType) -> None:
    """In native kernels and in torch's: each block type at each of its scales."""
    spec = changed(SPEC, hidden_size=256, intermediate_size=256, num_heads=16, num_kv_heads=2)
    rows = packed_rows(kind, 256, 256)
    places = {"Q4_1": (0, 2), "Q5_1": (0, 2)} | SCALES_AT
    number = b"\x80\x7f" if kind == BlockType.BF16 else b"\x00\x7c"  # an infinity
    for place in (None, *places.get(kind, (0,))):
        blocks = rows.copy()
        if place is not None and kind == BlockType.MXFP4:
            blocks[7, place] = 255
        elif place is not None and kind == BlockType.IQ1_M:
            put_scales(blocks[7:8], kind, place, np.array([np.inf]))
        elif place is not None:
            blocks[7, place : place + 2] = list(number)
        path = tmp_path / f"{place}.gguf"
        _write_with(path, spec, "layers.1.up", kind, blocks)
        if place is None:
            assert len(LLM(str(path), skip_tokenizer_init=True).generate([[5]])) == 1
            continue
        says = refusal(path, skip_tokenizer_init=True)
        assert says.startswith(f"{path}: the tensor 'blk.1.ffn_up.weight' holds NaN or infinity.")
        with pytest.raises(ModelError, match=r"'blk\.1\.ffn_up\.weight' holds NaN or infinity"):
            read_tensor(GGUFWeights(GGUFFile.open(path), spec), "layers.1.up", torch.float32)


def _write_with(path: Path, spec: Any, name: str, kind: BlockType, blocks: np.ndarray) -> None:
    writer = gguf.GGUFWriter(path, "llama")
    add_sizes(writer, spec)
    for other, values in random_weights(spec).items():
        if other == name:
            writer.add_tensor(
                GGUF_NAMES.tensor(name), blocks, raw_dtype=gguf.GGMLQuantizationType[kind]
            )
        else:
            writer.add_tensor(GGUF_NAMES.tensor(other), values * np.float32(0.1))
    save(writer)


def test_a_weight_that_the_dtype_does_not_hold_is_told_apart(folder: Path) -> None:
    path, name = folder / "model.safetensors", "model.layers.0.mlp.up_proj.weight"
    tensors = load_file(path)
    tensors[name][0, 0] = 1e6
    save_file(tensors, path)
    says = refusal(folder, kernels="reference", dtype="float16")
    assert says == (
        f"{path}: the tensor '{name}' holds a number that torch.float16 cannot represent; "
        "set another dtype."
    )


# Tensors nobody uses


def test_a_config_of_fewer_layers_than_there_are_warns_once(
    folder: Path, caplog: pytest.LogCaptureFixture
) -> None:
    change_json(folder / "config.json", num_hidden_layers=1)
    with caplog.at_level(logging.WARNING):
        tiny_llm(folder)
    path = folder / "model.safetensors"
    layers, unused = (record.getMessage() for record in caplog.records)
    assert layers == (
        f"{path}: config.json says num_hidden_layers = 1, but there are tensors of 2 layers"
    )
    assert unused.startswith(f"{path}: 9 tensors are not used: 'model.layers.1.input_layernorm")
    assert unused.endswith(" and 6 more")


def test_tensors_that_nobody_uses_are_told_but_for_the_harmless(
    folder: Path, caplog: pytest.LogCaptureFixture
) -> None:
    path = folder / "model.safetensors"
    tensors = load_file(path)
    one = np.ones(1, np.float32)
    save_file(tensors | {"model.layers.0.self_attn.rotary_emb.inv_freq": one}, path)
    with caplog.at_level(logging.WARNING):
        tiny_llm(folder)
        assert caplog.records == []
        save_file(tensors | {"visual.a": one, "visual.b": one}, path)
        tiny_llm(folder)
    (record,) = caplog.records
    assert record.getMessage() == f"{path}: 2 tensors are not used: 'visual.a', 'visual.b'"


def test_every_weight_names_the_fields_it_is_shaped_by() -> None:
    config = CONFIG | {"model_type": "qwen3", "attention_bias": True, "mlp_bias": True}
    spec = spec_from_hf(config)
    layer = spec.layers[0]
    parts = (layer.attention, layer.mlp, spec)
    for name, shape in spec.weight_shapes().items():
        fields = [field for field in spec.shaped_by(name) if field != "num_layers"]
        sizes = [next((getattr(p, f) for p in parts if hasattr(p, f)), None) for f in fields]
        whole = [size for size in sizes if type(size) is int]
        assert math.prod(shape) == math.prod(whole), name
        assert LLAMA_NAMES.tensor(name)
