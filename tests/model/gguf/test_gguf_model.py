"""GGUF models: the description read from the header, and the weights behind it."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import gguf
import numpy as np
import pytest
import torch

from tests.model.gguf.gguf_files import (
    SPEC,
    Edit,
    extra_tensor,
    packed_rows,
    random_weights,
    save,
    setting,
    write_model,
)
from tests.specs import changed
from twostroke.errors import ModelError
from twostroke.model.describe.gguf_config import spec_from_gguf
from twostroke.model.describe.gguf_names import NAMES
from twostroke.model.describe.spec import ModelSpec, RopeSpec, yarn_attention_factor
from twostroke.model.describe.tensor_names import halves_from_interleaved
from twostroke.model.gguf.block_types import BlockType
from twostroke.model.gguf.dequant import dequantize
from twostroke.model.gguf.gguf_file import GGUFFile
from twostroke.model.weights import check_weights
from twostroke.model.weights.gguf import GGUFWeights
from twostroke.model.weights.tensors import read_tensor

# Metadata → ModelSpec


@pytest.mark.parametrize(
    "spec",
    [
        SPEC,
        changed(SPEC, tie_embeddings=True),
        changed(SPEC, qkv_bias=True, output_bias=True, mlp_bias=True),
        changed(SPEC, family="qwen2", qkv_bias=True),
        changed(SPEC, family="qwen3", qk_norm="head"),
    ],
)
def test_the_spec_is_read_back(tmp_path: Path, spec: ModelSpec) -> None:
    file = write_model(tmp_path / "m.gguf", spec)
    assert spec_from_gguf(file) == spec
    check_weights(spec, GGUFWeights(file, spec), str(file.path))


def test_the_head_size_is_the_key_length_where_it_is_given(tmp_path: Path) -> None:
    spec = changed(SPEC, head_dim=32, rope=RopeSpec(10000.0, 32))
    file = write_model(tmp_path / "m.gguf", spec, setting("attention.key_length", 32))
    assert spec_from_gguf(file) == spec


def test_head_counts_given_per_layer_are_accepted_where_they_agree(tmp_path: Path) -> None:
    file = write_model(tmp_path / "m.gguf", edit=setting("attention.head_count_kv", [2, 2]))
    assert spec_from_gguf(file) == SPEC


def windows_of(spec: ModelSpec) -> list[int | None]:
    return [layer.attention.window for layer in spec.layers]


def test_a_window_holds_for_all_layers_or_for_those_of_the_pattern(tmp_path: Path) -> None:
    def edit(writer: gguf.GGUFWriter) -> None:
        setting("attention.sliding_window", 32)(writer)
        setting("attention.sliding_window_pattern", [True, False])(writer)

    alike = write_model(tmp_path / "a.gguf", edit=setting("attention.sliding_window", 32))
    mixed = write_model(tmp_path / "b.gguf", edit=edit)
    assert windows_of(spec_from_gguf(alike)) == [32, 32]
    assert windows_of(spec_from_gguf(mixed)) == [32, None]


def test_llama_3_rope_factors_come_from_their_tensor(tmp_path: Path) -> None:
    factors = np.linspace(1, 8, 8, dtype=np.float32)
    file = write_model(tmp_path / "m.gguf", edit=extra_tensor("rope_freqs.weight", factors))
    rope = RopeSpec(10000.0, 16, "factors", freq_factors=tuple(factors.tolist()))
    assert spec_from_gguf(file) == changed(SPEC, rope=rope)


def test_linear_rope_scaling_stretches_the_context(tmp_path: Path) -> None:
    spec = spec_from_gguf(write_model(tmp_path / "m.gguf", edit=setting("rope.scale_linear", 2.0)))
    assert spec.ropes() == (RopeSpec(10000.0, 16, "linear", 2.0, original_context=128),)
    assert spec.max_context == 256


def test_yarn_is_read_with_its_settings(tmp_path: Path) -> None:
    def edit(writer: gguf.GGUFWriter) -> None:
        setting("rope.freq_base", 1e6)(writer)
        setting("rope.scaling.type", "yarn")(writer)
        setting("rope.scaling.factor", 4.0)(writer)
        setting("rope.scaling.original_context_length", 64)(writer)
        setting("rope.scaling.attn_factor", 0.5)(writer)
        setting("rope.scaling.yarn_beta_fast", 16.0)(writer)

    spec = spec_from_gguf(write_model(tmp_path / "m.gguf", edit=edit))
    sharpened = 0.5 * yarn_attention_factor(4.0)
    rope = RopeSpec(1e6, 16, "yarn", 4.0, 64, beta_fast=16.0, attention_factor=sharpened)
    assert spec.ropes() == (rope,)
    assert spec.max_context == 256


ONE = np.ones(1, np.float32)


@pytest.mark.parametrize(
    ("edit", "message"),
    [
        (setting("expert_count", 8), "llama.expert_count is 8, but there is no llama.expert_used"),
        (setting("attn_logit_softcapping", 30.0), "attn_logit_softcapping = 30.0 is not supported"),
        (setting("attention.causal", False), "attention.causal = False is not supported"),
        (setting("attention.value_length", 8), "key_length 16, attention.value_length 8"),
        (setting("attention.head_count", [4, 2]), "head_count differs from layer to layer"),
        (setting("attention.head_count_kv", 3), "head_count 4 is not a multiple of"),
        (
            setting("attention.head_count", 0),
            "head_count must be a whole number from 1 to 4096, not 0",
        ),
        (setting("embedding_length", "x"), "embedding_length must be a whole number from 1"),
        (setting("rope.scaling.type", "longrope"), "'longrope' .llama.rope.scaling.type. is not"),
        (
            setting("rope.dimension_count", 18),
            "at most the head size 16 .attention.key_length., not 18",
        ),
        (setting("rope.freq_base", 0.0), "rope.freq_base must be a number above 1"),
        (setting("block_count", 10**9), "block_count must be a whole number from 1 to 1024"),
        (setting("block_count", 1000), "announces 1000 layers .llama.block_count."),
        (
            setting("block_count", 1),
            "llama.block_count is 1, but the file has 9 tensors of further",
        ),
        (setting("type", "adapter", "general"), "holds a GGUF 'adapter', not a model"),
        (extra_tensor("blk.0.attn_sub_norm.weight", ONE), "'blk.0.attn_sub_norm.weight' is not"),
        (extra_tensor("blk.1.ffn_up_exps.weight", ONE), "'blk.1.ffn_up_exps.weight' is not"),
        (extra_tensor("blk.1.attn_q_norm.weight", ONE), "'blk.1.attn_q_norm.weight' is not"),
        (extra_tensor("rope_freqs.weight", ONE), "must hold 8 numbers above 0"),
    ],
)
def test_what_cannot_be_run_is_refused_by_name(tmp_path: Path, edit: Edit, message: str) -> None:
    file = write_model(tmp_path / "m.gguf", edit=edit)
    with pytest.raises(ModelError, match=message):
        spec_from_gguf(file)


def test_another_architecture_is_refused_beside_the_supported(tmp_path: Path) -> None:
    file = write_model(tmp_path / "m.gguf", changed(SPEC, family="mamba"))
    with pytest.raises(ModelError, match=r"'mamba' is not supported. Supported: llama, qwen2"):
        spec_from_gguf(file)


def test_missing_metadata_is_named(tmp_path: Path) -> None:
    def edit(writer: gguf.GGUFWriter) -> None:
        del writer.kv_data[0]["llama.context_length"]

    with pytest.raises(ModelError, match=r"has no llama\.context_length"):
        spec_from_gguf(write_model(tmp_path / "m.gguf", edit=edit))


def test_a_bias_in_one_layer_only_shows_as_missing_in_the_others(tmp_path: Path) -> None:
    bias = extra_tensor("blk.1.attn_q.bias", np.zeros(64, np.float32))
    file = write_model(tmp_path / "m.gguf", edit=bias)
    spec = spec_from_gguf(file)
    with pytest.raises(ModelError, match=r"the weight 'layers\.0\.q_bias' is missing"):
        check_weights(spec, GGUFWeights(file, spec), str(file.path))


# Weights


def interleaved_from_halves(values: np.ndarray, num_heads: int) -> np.ndarray:
    """Reorder q and k as the conversion to the llama architecture: channel i of each head's second
    half comes to stand right after channel i of its first."""
    heads = values.reshape(num_heads, 2, values.shape[0] // num_heads // 2, *values.shape[1:])
    return np.ascontiguousarray(heads.swapaxes(1, 2)).reshape(values.shape)


def as_converted(spec: ModelSpec, name: str, values: np.ndarray) -> np.ndarray:
    part = name.rpartition(".")[2]
    if part in ("q", "q_bias"):
        return interleaved_from_halves(values, spec.layers[0].attention.num_heads)
    if part in ("k", "k_bias"):
        return interleaved_from_halves(values, spec.layers[0].attention.num_kv_heads)
    return values


def test_the_reordering_of_q_and_k_is_undone_for_llama_only(tmp_path: Path) -> None:
    spec = changed(SPEC, qkv_bias=True)
    original = random_weights(spec)
    writer = gguf.GGUFWriter(tmp_path / "llama.gguf", "llama")
    for name, values in original.items():
        writer.add_tensor(NAMES.tensor(name), as_converted(spec, name, values))
    save(writer)
    llama = GGUFWeights(GGUFFile.open(tmp_path / "llama.gguf"), spec)
    qwen = GGUFWeights(write_model(tmp_path / "qwen.gguf", replace(spec, family="qwen2")), spec)
    for name, values in original.items():
        for source in (llama, qwen):
            np.testing.assert_array_equal(read_tensor(source, name, torch.float32).numpy(), values)


def test_channels_beyond_the_rotated_ones_stay_where_they_are() -> None:
    assert halves_from_interleaved(1, 8, 4).tolist() == [0, 2, 1, 3, 4, 5, 6, 7]
    assert halves_from_interleaved(2, 4, 4).tolist() == [0, 2, 1, 3, 4, 6, 5, 7]


def test_packed_rows_are_reordered_as_the_dense_ones_are(tmp_path: Path) -> None:
    spec = changed(SPEC, hidden_size=256, head_dim=64, rope=RopeSpec(10000.0, 64))
    packed = packed_rows(BlockType.Q4_K, spec.layers[0].attention.q_size, 256)
    writer = gguf.GGUFWriter(tmp_path / "m.gguf", "llama")
    writer.add_tensor("blk.0.attn_q.weight", packed, raw_dtype=gguf.GGMLQuantizationType.Q4_K)
    save(writer)
    source = GGUFWeights(GGUFFile.open(tmp_path / "m.gguf"), spec)

    matrix = source.packed("layers.0.q")
    dense = read_tensor(source, "layers.0.q", torch.float32).numpy()

    assert (matrix.type, matrix.shape) == (BlockType.Q4_K, (256, 256))
    np.testing.assert_array_equal(dequantize(matrix.rows, matrix.type, matrix.shape), dense)
    np.testing.assert_array_equal(
        interleaved_from_halves(matrix.rows, spec.layers[0].attention.num_heads), packed
    )


def test_weights_come_in_the_dtype_asked_for_and_own_their_memory(tmp_path: Path) -> None:
    source = GGUFWeights(write_model(tmp_path / "m.gguf"), SPEC)
    expected = torch.from_numpy(random_weights(SPEC)["layers.1.down"])
    weight = read_tensor(source, "layers.1.down", torch.bfloat16)
    assert torch.equal(weight, expected.to(torch.bfloat16))
    weight.zero_()
    assert torch.equal(read_tensor(source, "layers.1.down", torch.float32), expected)


def test_a_weight_the_file_lacks_has_no_shape_and_cannot_be_read(tmp_path: Path) -> None:
    source = GGUFWeights(write_model(tmp_path / "m.gguf"), SPEC)
    assert source.shape("layers.0.q_bias") is None
    with pytest.raises(ModelError, match=r"the tensor 'blk\.0\.attn_q\.bias' is missing"):
        read_tensor(source, "layers.0.q_bias", torch.float32)


def test_some_rows_are_the_rows_of_the_whole(tmp_path: Path) -> None:
    writer_spec = changed(SPEC, qkv_bias=True)
    original = random_weights(writer_spec)
    writer = gguf.GGUFWriter(tmp_path / "llama.gguf", "llama")
    for name, values in original.items():
        writer.add_tensor(NAMES.tensor(name), as_converted(writer_spec, name, values))
    save(writer)
    source = GGUFWeights(GGUFFile.open(tmp_path / "llama.gguf"), writer_spec)
    for name, values in original.items():
        np.testing.assert_array_equal(source.floats(name), values)
        for rows in (slice(0, 1), slice(3, 7), slice(5, None)):
            np.testing.assert_array_equal(source.floats(name, rows), values[rows])
