"""Hugging Face folders: one file, shards, and what may be wrong with them."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import save_file
from transformers import LlamaConfig, LlamaForCausalLM, Qwen3Config, Qwen3ForCausalLM

from tests.specs import make_spec
from twostroke.errors import ModelError
from twostroke.model.describe.hf_config import load_hf_config
from twostroke.model.describe.hf_names import LLAMA_NAMES
from twostroke.model.describe.spec import ModelSpec, RopeSpec
from twostroke.model.weights import check_weights
from twostroke.model.weights.safetensors import INDEX, SafetensorsWeights
from twostroke.model.weights.tensors import read_tensor

SPEC = make_spec(
    family="llama",
    vocab_size=40,
    hidden_size=32,
    intermediate_size=48,
    num_heads=4,
    num_kv_heads=2,
    head_dim=8,
    windows=(None,) * 2,
    rope=RopeSpec(theta=10000.0, dim=8),
    norm_eps=1e-5,
    max_context=64,
)


def random_tensors(spec: ModelSpec = SPEC) -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(0)
    return {
        LLAMA_NAMES.tensor(name): torch.randn(shape, generator=generator)
        for name, shape in spec.weight_shapes().items()
    }


def write_shards(folder: Path, tensors: dict[str, torch.Tensor]) -> None:
    """Two shards, every other tensor in each, and their index."""
    names = [f"model-0000{n}-of-00002.safetensors" for n in (1, 2)]
    stored = {name: names[n % 2] for n, name in enumerate(tensors)}
    for file in names:
        part = {name: tensors[name] for name, holder in stored.items() if holder == file}
        save_file(part, folder / file)
    (folder / INDEX).write_text(json.dumps({"metadata": {}, "weight_map": stored}))


def assert_reads(source: SafetensorsWeights, tensors: dict[str, torch.Tensor]) -> None:
    check_weights(SPEC, source, "here")
    for name in SPEC.weight_shapes():
        assert torch.equal(
            read_tensor(source, name, torch.float32), tensors[LLAMA_NAMES.tensor(name)]
        )


def test_a_single_file_is_read(tmp_path: Path) -> None:
    tensors = random_tensors()
    save_file(tensors, tmp_path / "model.safetensors")
    assert_reads(SafetensorsWeights(tmp_path, SPEC), tensors)


def test_shards_are_read_through_their_index(tmp_path: Path) -> None:
    tensors = random_tensors()
    write_shards(tmp_path, tensors)
    assert_reads(SafetensorsWeights(tmp_path, SPEC), tensors)


def test_a_single_file_of_another_name_is_read(tmp_path: Path) -> None:
    tensors = random_tensors()
    save_file(tensors, tmp_path / "weights.safetensors")
    assert_reads(SafetensorsWeights(tmp_path, SPEC), tensors)


def test_names_without_the_model_prefix_are_read(tmp_path: Path) -> None:
    tensors = random_tensors()
    bare = {name.removeprefix("model."): tensor for name, tensor in tensors.items()}
    save_file(bare, tmp_path / "model.safetensors")
    assert_reads(SafetensorsWeights(tmp_path, SPEC), tensors)


@pytest.mark.parametrize("family", ["llama", "qwen3"])
def test_a_folder_saved_by_transformers_is_read(tmp_path: Path, family: str) -> None:
    sizes = {"vocab_size": 40, "hidden_size": 32, "intermediate_size": 48}
    sizes |= {"num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2}
    sizes |= {"head_dim": 8, "max_position_embeddings": 64}
    if family == "llama":
        model = LlamaForCausalLM(LlamaConfig(**sizes, attention_bias=True, mlp_bias=True))
    else:
        model = Qwen3ForCausalLM(Qwen3Config(**sizes, tie_word_embeddings=True))
    model.save_pretrained(tmp_path, max_shard_size="10KB" if family == "llama" else "1GB")
    spec, _ = load_hf_config(tmp_path)
    source = SafetensorsWeights(tmp_path, spec)
    check_weights(spec, source, str(tmp_path))
    parameters = dict(model.named_parameters())
    assert len(parameters) == len(spec.weight_shapes())
    for name in spec.weight_shapes():
        assert torch.equal(
            read_tensor(source, name, torch.float32), parameters[LLAMA_NAMES.tensor(name)]
        )


def test_weights_come_in_the_dtype_asked_for_and_own_their_memory(tmp_path: Path) -> None:
    tensors = random_tensors()
    save_file(tensors, tmp_path / "model.safetensors")
    source = SafetensorsWeights(tmp_path, SPEC)
    expected = tensors["model.norm.weight"]
    assert torch.equal(
        read_tensor(source, "final_norm", torch.bfloat16), expected.to(torch.bfloat16)
    )
    read_tensor(source, "final_norm", torch.float32).zero_()
    assert torch.equal(read_tensor(source, "final_norm", torch.float32), expected)


def test_a_stored_head_is_left_alone_where_the_spec_ties_it(tmp_path: Path) -> None:
    save_file(random_tensors(), tmp_path / "model.safetensors")
    spec = replace(SPEC, tie_embeddings=True)
    check_weights(spec, SafetensorsWeights(tmp_path, spec), "here")


def test_a_weight_the_file_lacks_has_no_shape_and_cannot_be_read(tmp_path: Path) -> None:
    tensors = random_tensors()
    del tensors["model.layers.1.mlp.up_proj.weight"]
    write_shards(tmp_path, tensors)
    source = SafetensorsWeights(tmp_path, SPEC)
    assert source.shape("layers.1.up") is None
    message = r"index\.json: lists no tensor 'model\.layers\.1\.mlp\.up_proj\.weight'"
    with pytest.raises(ModelError, match=message):
        read_tensor(source, "layers.1.up", torch.float32)


def test_a_folder_without_weights_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ModelError, match=r"no \*\.safetensors there"):
        SafetensorsWeights(tmp_path, SPEC)


def test_shards_without_an_index_are_refused(tmp_path: Path) -> None:
    write_shards(tmp_path, random_tensors())
    (tmp_path / INDEX).unlink()
    with pytest.raises(ModelError, match=rf"2 \*\.safetensors but no {INDEX}"):
        SafetensorsWeights(tmp_path, SPEC)


def test_a_missing_shard_is_named(tmp_path: Path) -> None:
    write_shards(tmp_path, random_tensors())
    (tmp_path / "model-00002-of-00002.safetensors").unlink()
    with pytest.raises(ModelError, match=r"model-00002-of-00002\.safetensors: this shard is named"):
        SafetensorsWeights(tmp_path, SPEC)


@pytest.mark.parametrize(
    ("index", "message"),
    [
        ("{", "cannot be read as JSON"),
        ("[]", "expected a JSON object"),
        ('{"weight_map": {"a": 1}}', "has no 'weight_map'"),
        ('{"weight_map": {"a": "../a.safetensors"}}', "is not the name of a file in its folder"),
    ],
)
def test_a_damaged_index_is_refused(tmp_path: Path, index: str, message: str) -> None:
    (tmp_path / INDEX).write_text(index)
    with pytest.raises(ModelError, match=rf"index\.json: .*{message}"):
        SafetensorsWeights(tmp_path, SPEC)


def test_an_index_that_names_the_wrong_shard_is_refused(tmp_path: Path) -> None:
    write_shards(tmp_path, random_tensors())
    index = json.loads((tmp_path / INDEX).read_text())
    index["weight_map"]["model.embed_tokens.weight"] = "model-00002-of-00002.safetensors"
    (tmp_path / INDEX).write_text(json.dumps(index))
    source = SafetensorsWeights(tmp_path, SPEC)
    with pytest.raises(ModelError, match=r"does not hold the tensor 'model\.embed_tokens\.weight'"):
        source.shape("embed")


@pytest.mark.parametrize("length", [0, 4, 100, -1])
def test_a_truncated_file_is_refused(tmp_path: Path, length: int) -> None:
    path = tmp_path / "model.safetensors"
    save_file(random_tensors(), path)
    path.write_bytes(path.read_bytes()[:length])
    with pytest.raises(ModelError, match=r"model\.safetensors: cannot be read.*download it again"):
        SafetensorsWeights(tmp_path, SPEC)


def test_a_corrupt_header_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "model.safetensors"
    save_file(random_tensors(), path)
    content = bytearray(path.read_bytes())
    content[8:12] = b"\xff\xff\xff\xff"
    path.write_bytes(content)
    with pytest.raises(ModelError, match="cannot be read as safetensors"):
        SafetensorsWeights(tmp_path, SPEC)


def test_whole_numbers_instead_of_floats_are_refused(tmp_path: Path) -> None:
    tensors = random_tensors()
    tensors["model.layers.0.self_attn.q_proj.weight"] = torch.zeros(32, 32, dtype=torch.int32)
    save_file(tensors, tmp_path / "model.safetensors")
    source = SafetensorsWeights(tmp_path, SPEC)
    with pytest.raises(ModelError, match=r"q_proj\.weight' is of type I32, expected one of F64"):
        read_tensor(source, "layers.0.q", torch.float32)


def test_a_tensor_the_description_does_not_know_is_refused(tmp_path: Path) -> None:
    tensors = random_tensors()
    tensors["model.layers.0.self_attn.rotary_emb.inv_freq"] = torch.ones(4)
    tensors["model.layers.2.mlp.up_proj.weight"] = torch.ones(4)  # beyond the layers we run
    tensors["model.layers.1.self_attn.o_proj.bias"] = torch.zeros(32)  # adds nothing
    save_file(tensors, tmp_path / "model.safetensors")
    SafetensorsWeights(tmp_path, SPEC)
    tensors["model.layers.0.self_attn.q_proj.bias"] = torch.ones(32)
    save_file(tensors, tmp_path / "model.safetensors")
    with pytest.raises(ModelError, match=r"q_proj\.bias' has no place in the model"):
        SafetensorsWeights(tmp_path, SPEC)


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.float16, torch.bfloat16])
def test_floats_are_what_torch_reads(tmp_path: Path, dtype: torch.dtype) -> None:
    tensors = {name: tensor.to(dtype) for name, tensor in random_tensors().items()}
    save_file(tensors, tmp_path / "model.safetensors")
    source = SafetensorsWeights(tmp_path, SPEC)
    for name in SPEC.weight_shapes():
        expected = tensors[LLAMA_NAMES.tensor(name)].float().numpy()
        np.testing.assert_array_equal(source.floats(name), expected)
        np.testing.assert_array_equal(source.floats(name, slice(2, 5)), expected[2:5])
        np.testing.assert_array_equal(source.floats(name, slice(5, 999)), expected[5:])
        assert torch.equal(read_tensor(source, name, dtype), tensors[LLAMA_NAMES.tensor(name)])
        source.release(name)  # and can be read again
        np.testing.assert_array_equal(source.floats(name), expected)


@pytest.mark.parametrize("padding", range(8))
def test_tensors_may_begin_at_any_byte(tmp_path: Path, padding: int) -> None:
    """A header of any length is sound, even one that leaves no tensor where a CPU likes it."""
    tensors = random_tensors()
    path = tmp_path / "model.safetensors"
    save_file(tensors, path)
    content = path.read_bytes()
    end = 8 + int.from_bytes(content[:8], "little")
    length = (end - 8 + padding).to_bytes(8, "little")
    path.write_bytes(length + content[8:end] + b" " * padding + content[end:])
    source = SafetensorsWeights(tmp_path, SPEC)
    expected = tensors["model.embed_tokens.weight"]
    np.testing.assert_array_equal(source.floats("embed"), expected.numpy())
    assert torch.equal(read_tensor(source, "embed", torch.float32), expected)
