"""GGUF blocks that stay packed on a GPU: their values, and a model that mixes types."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest
import torch

from tests.model.gguf.gguf_files import SPEC, add_sizes, packed_rows, random_weights, save
from twostroke import LLM, SamplingParams
from twostroke.engine import build_torch
from twostroke.errors import ModelError
from twostroke.kernels.packed import dequantised, pack
from twostroke.model.describe.gguf_config import spec_from_gguf
from twostroke.model.describe.gguf_names import NAMES
from twostroke.model.formats.linear import PackedLinear, StackedLinear
from twostroke.model.formats.phase_formats import phase_formats
from twostroke.model.formats.weight_formats import packed_formats
from twostroke.model.gguf.block_types import BlockType
from twostroke.model.gguf.dequant import GROUPED
from twostroke.model.gguf.gguf_file import GGUFFile
from twostroke.model.weights.gguf import GGUFWeights
from twostroke.model.weights.packed_blocks import BLOCK_FORMATS
from twostroke.model.weights.tensors import read_packed

# K-quants have blocks of 256 columns.
WIDE = dataclasses.replace(
    SPEC,
    hidden_size=256,
    layers=tuple(
        dataclasses.replace(layer, mlp=dataclasses.replace(layer.mlp, intermediate_size=512))
        for layer in SPEC.layers
    ),
)
WIDE = dataclasses.replace(
    WIDE,
    layers=tuple(
        dataclasses.replace(
            layer, attention=dataclasses.replace(layer.attention, num_heads=16, num_kv_heads=8)
        )
        for layer in WIDE.layers
    ),
)
# Of a Q4_K_M file: values and half of the down projections have more bits than the rest.
MIXTURE = {"v": BlockType.Q6_K, "down": BlockType.Q6_K}


def write(path: Path, usual: BlockType, others: dict[str, BlockType]) -> GGUFFile:
    writer = gguf.GGUFWriter(path, WIDE.family)
    add_sizes(writer, WIDE)
    for name, values in random_weights(WIDE).items():
        part = name.split(".")[-1]
        type = others.get(part, usual)
        if values.ndim == 1 or not name.startswith("layers."):
            writer.add_tensor(NAMES.tensor(name), values)
            continue
        raw = packed_rows(type, *values.shape)
        writer.add_tensor(NAMES.tensor(name), raw, raw_dtype=gguf.GGMLQuantizationType[type])
    save(writer)
    return GGUFFile.open(path)


def source_of(file: GGUFFile) -> GGUFWeights:
    return GGUFWeights(file, spec_from_gguf(file))


def test_every_type_of_groups_has_a_format() -> None:
    assert set(BLOCK_FORMATS) == set(GROUPED)


@pytest.mark.parametrize("block_type", list(BLOCK_FORMATS))
def test_packed_blocks_have_the_values_of_the_file(tmp_path: Path, block_type: BlockType) -> None:
    source = source_of(write(tmp_path / "m.gguf", block_type, {}))
    for name in ("layers.0.q", "layers.1.down"):
        found, values = read_packed(source, name), source.floats(name)
        assert found is not None
        assert (found.bits, found.codes.shape) == (BLOCK_FORMATS[block_type].bits, values.shape)
        exact = dequantised(
            pack(found)._replace(scale=found.scale, offset=found.offset), torch.float32
        )
        assert np.array_equal(exact, values)
        # Scales of sub-blocks in fp16: 2^-11 of the row's largest.
        weight = pack(found)
        given = dequantised(weight, torch.float32).numpy()
        if block_type in (BlockType.Q4_0, BlockType.Q4_1, BlockType.Q8_0, BlockType.IQ4_NL):
            assert weight.scale.dtype == torch.float16
            assert np.array_equal(given, values)
        assert np.abs(given - values).max() <= 2.0**-10 * np.abs(values).max()
        assert weight.num_bytes <= BLOCK_FORMATS[block_type].num_bytes(values.shape)


def test_a_part_of_a_matrix_is_the_part_of_its_values(tmp_path: Path) -> None:
    source = source_of(write(tmp_path / "m.gguf", BlockType.Q4_K, {}))
    values = source.floats("layers.0.down")
    found = read_packed(source, "layers.0.down", (slice(8, 24), slice(256, 512)))
    assert found is not None
    given = dequantised(pack(found), torch.float32).numpy()
    assert np.abs(given - values[8:24, 256:]).max() <= 2.0**-10 * np.abs(values).max()
    with pytest.raises(ModelError, match=r"blocks of 256 columns \(Q4_K\), which the ranks would"):
        read_packed(source, "layers.0.down", (slice(8, 24), slice(128, 512)))


def test_scales_that_fp16_has_not_stay_in_fp32(tmp_path: Path) -> None:
    source = source_of(write(tmp_path / "m.gguf", BlockType.Q6_K, {}))
    found = read_packed(source, "layers.0.q")
    assert found is not None
    large = pack(found._replace(scale=found.scale * 2.0**20))
    assert large.scale.dtype == torch.float32


def test_other_types_are_left_dense(tmp_path: Path) -> None:
    file = write(tmp_path / "m.gguf", BlockType.Q4_K, {"gate": BlockType.Q2_K, "o": BlockType.Q3_K})
    spec = spec_from_gguf(file)
    assert packed_formats(spec, source_of(file), None) == {}
    kept = packed_formats(spec, source_of(file), None, keep_gguf_blocks=True)
    assert {name.split(".")[-1] for name in kept} == {"q", "k", "v", "down"}


def test_a_mixture_runs_packed_as_it_does_dense(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write(tmp_path / "m.gguf", BlockType.Q4_K, MIXTURE)
    params = SamplingParams(max_tokens=6, temperature=0, logprobs=3)
    settings: dict[str, Any] = {"model": str(tmp_path / "m.gguf"), "skip_tokenizer_init": True}
    settings |= {"device": "cpu", "kernels": "reference", "max_model_len": 64}

    def run() -> tuple[LLM, Any]:
        llm = LLM(**settings)
        return llm, llm.generate([{"prompt_token_ids": [5, 6, 7, 8, 9]}], params)[0].outputs[0]

    dense_llm, dense = run()
    monkeypatch.setattr(
        build_torch,
        "phase_formats",
        lambda *args, keep_gguf_blocks: phase_formats(*args, keep_gguf_blocks=True),
    )
    llm, packed = run()
    layer = llm.engine.core._executor.program.decoder._layers[0]
    assert isinstance(layer.attention.qkv, StackedLinear)
    assert isinstance(layer.mlp.down, PackedLinear)
    assert llm.engine.memory.weight_bytes < dense_llm.engine.memory.weight_bytes
    assert packed.token_ids == dense.token_ids
    for ours, its in zip(packed.logprobs, dense.logprobs, strict=True):
        gaps = [abs(ours[token].logprob - its[token].logprob) for token in its if token in ours]
        assert max(gaps) < 0.1  # of weights fifty times those of a model
