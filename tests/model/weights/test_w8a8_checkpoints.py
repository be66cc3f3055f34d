"""Folders whose weights are in fp8 or int8, in the layouts of their formats: they run as their
dequantised twins do, and are refused where they are not what they say.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest
import torch

from tests.engine.test_native_settings import write_quantised
from tests.model.weights.quantised_folders import (
    DYNAMIC,
    FEW,
    OTHER_PLACES,
    REFERENCE,
    SAME,
    assert_config_is_refused,
    assert_native_kernels_take_it_dequantised,
    change,
    compressed,
    folder_and_twin,
    gap,
    logprobs,
    opened,
    refusal,
    two_kinds,
)
from tests.tiny import CONFIG, tiny_folder, tiny_llm, write_json
from twostroke.config import EngineConfig
from twostroke.engine.build_torch import check_fp8
from twostroke.errors import ConfigError, ModelError
from twostroke.model.describe.gguf_config import spec_from_gguf
from twostroke.model.describe.hf_config import load_hf_config
from twostroke.model.formats.linear import WEIGHT_ONLY_ROWS
from twostroke.model.formats.w8a8_weights import W8Format, is_weight_only, w8_formats
from twostroke.model.gguf.gguf_file import GGUFFile
from twostroke.model.weights.gguf import GGUFWeights
from twostroke.model.weights.tensors import read_tensor, read_w8
from twostroke.model.weights.w8a8_checkpoints import E4M3_VALUES

E4M3 = torch.float8_e4m3fn
STATIC = {"dynamic": False, "num_bits": 8, "strategy": "tensor", "symmetric": True, "type": "int"}
INT_DYNAMIC = DYNAMIC | {"type": "int"}


def int8(strategy: str, activations: Any = INT_DYNAMIC, **weights: Any) -> dict[str, Any]:
    """As llm-compressor writes W8A8."""
    said = compressed(strategy, activations, **{"type": "int", **weights})
    return said | {"format": "int-quantized"}


def plain(**more: Any) -> dict[str, Any]:
    return {"quant_method": "fp8", "activation_scheme": "dynamic", "fmt": "e4m3", **more}


# Name: quantization_config, the rows and columns that share a scale (0: all), its name and shape.
LAYOUTS: dict[str, tuple[dict[str, Any], tuple[int, int], str, str]] = {
    "compressed, a channel": (compressed("channel"), (1, 0), "_scale", "column"),
    "compressed, a tensor": (compressed("tensor"), (0, 0), "_scale", "one"),
    "compressed, blocks": (
        compressed("block", block_structure=[16, 32]),
        (16, 32),
        "_scale",
        "matrix",
    ),
    "compressed, weights alone": (compressed("channel", None), (1, 0), "_scale", "column"),
    "fp8, a tensor": (plain(), (0, 0), "_scale", "none"),
    "fp8, static activations": (
        plain(activation_scheme="static"),
        (0, 0),
        "_scale",
        "none",
    ),
    "fp8, static activations as Ministral 3 has them": (
        plain(activation_scheme="static"),
        (0, 0),
        "_scale_inv",
        "none",
    ),
    "fp8, blocks": (plain(weight_block_size=[16, 16]), (16, 16), "_scale_inv", "matrix"),
    "int8, a channel": (int8("channel"), (1, 0), "_scale", "column"),
    "int8, a tensor": (int8("tensor", STATIC), (0, 0), "_scale", "one"),
    "int8, weights alone": (int8("channel", None), (1, 0), "_scale", "column"),
}


def type_of(layout: str) -> str:
    return "int8" if layout.startswith("int8") else "fp8"


def quantise(
    weight: torch.Tensor, shared: tuple[int, int], layout: str
) -> tuple[torch.Tensor, torch.Tensor]:
    """The values and the scales, a matrix of them."""
    rows, columns = (given or size for given, size in zip(shared, weight.shape, strict=True))
    height, width = (-(-n // m) for n, m in zip(weight.shape, (rows, columns), strict=True))
    scale = torch.empty(height, width)
    dtype, most = (torch.int8, 127) if type_of(layout) == "int8" else (E4M3, 448)
    values = torch.empty(weight.shape, dtype=dtype)
    for i in range(height):
        for j in range(width):
            at = (slice(i * rows, (i + 1) * rows), slice(j * columns, (j + 1) * columns))
            scale[i, j] = weight[at].abs().max() / most
            given = weight[at] / scale[i, j]
            values[at] = (given.round() if dtype == torch.int8 else given).to(dtype)
    return values, scale


def folder_of(path: Path, layout: str, left: str = "lm_head", **config: Any) -> tuple[Path, Path]:
    """In a layout, and its dequantised twin."""
    said, shared, ending, kind = LAYOUTS[layout]

    def stored(name: str, weight: torch.Tensor) -> tuple[dict[str, torch.Tensor], torch.Tensor]:
        values, scale = quantise(weight, shared, layout)
        rows, columns = weight.shape
        wide = scale.repeat_interleave(shared[0] or rows, 0)[:rows]
        wide = wide.repeat_interleave(shared[1] or columns, 1)[:, :columns]
        dims = {"one": (1,), "none": ()}.get(kind, scale.shape)
        tensors = {name: values, name + ending: scale.reshape(dims).contiguous()}
        if "Ministral" in layout:
            tensors[name.replace("weight", "activation_scale")] = torch.tensor(0.1)
        elif "static" in layout or layout == "int8, a tensor":
            tensors[name.replace("weight", "input_scale")] = torch.tensor(0.1)
            tensors[name.replace("weight", "input_zero_point")] = torch.zeros(1, dtype=torch.int8)
        return tensors, values.float() * wide

    return folder_and_twin(path, said, stored, left, **config)


def test_the_values_of_e4m3_are_torchs() -> None:
    there = torch.arange(256, dtype=torch.uint8).view(E4M3).float()
    known = ~there.isnan()
    assert int(known.sum()) == 254
    assert np.array_equal(E4M3_VALUES[known.numpy()], there[known].numpy())


@pytest.fixture
def as_they_are(monkeypatch: pytest.MonkeyPatch) -> None:
    """Activations of a few tokens: products then differ from the twin's by nothing."""
    monkeypatch.setitem(WEIGHT_ONLY_ROWS, E4M3, len(FEW))


@pytest.mark.usefixtures("as_they_are")
@pytest.mark.parametrize("layout", LAYOUTS)
def test_a_folder_of_8_bits_runs_as_its_dequantised_twin(tmp_path: Path, layout: str) -> None:
    folder, twin = folder_of(tmp_path, layout)
    ours, dense = opened(folder), opened(twin)
    spec = load_hf_config(folder)[0]
    kept = w8_formats(spec, ours, None)
    assert len(kept) == 7 * 2
    columns = LAYOUTS[layout][1][1]
    assert kept["layers.0.q"] == W8Format(type_of(layout), 32 // columns if columns else 1)
    for name in spec.weight_shapes():
        assert np.array_equal(ours.floats(name), dense.floats(name))
    assert is_weight_only(ours) == ("alone" in layout)
    assert gap(folder, twin).max() < SAME


def test_more_tokens_are_quantised_unless_the_folder_says_otherwise(tmp_path: Path) -> None:
    many = list(range(5, 65))

    def gap_of(layout: str) -> float:
        return float(gap(*folder_of(tmp_path / layout, layout), many).max())

    in_fp8, in_int8 = gap_of("compressed, a channel"), gap_of("int8, a channel")
    assert 1e-4 < in_int8 < in_fp8 < 1.0
    for layout in ("compressed, weights alone", "fp8, blocks", "int8, weights alone"):
        assert gap_of(layout) < SAME


def test_one_token_of_fp8_is_not_quantised(tmp_path: Path) -> None:
    found = [
        float(gap(*folder_of(tmp_path / str(count), "compressed, a channel"), FEW[:count]).max())
        for count in (1, 2)
    ]
    assert found[0] < SAME < 1e-4 < found[1]


@pytest.mark.usefixtures("as_they_are")
@pytest.mark.parametrize("more", OTHER_PLACES, ids=str)
def test_other_places_of_the_rows(tmp_path: Path, more: dict[str, Any]) -> None:
    for layout in ("compressed, blocks", "fp8, a tensor", "int8, a channel"):
        folder, twin = folder_of(tmp_path / layout, layout, **more)
        assert gap(folder, twin).max() < SAME
        assert len(w8_formats(load_hf_config(folder)[0], opened(folder), None)) == 14


@pytest.mark.parametrize("layout", ["fp8, blocks", "int8, a channel"])
def test_the_native_kernels_take_it_dequantised(tmp_path: Path, layout: str) -> None:
    told = f"float32, from float32 + {type_of(layout)}"
    assert_native_kernels_take_it_dequantised(*folder_of(tmp_path, layout), told)


def test_a_product_of_which_one_matrix_is_not_quantised_is_dense(tmp_path: Path) -> None:
    folder, twin = folder_of(tmp_path, "int8, a channel", left="k_proj")
    kept = w8_formats(load_hf_config(folder)[0], opened(folder), "int8")
    assert {name.split(".")[2] for name in kept} == {"o", "gate", "up", "down"}
    assert gap(folder, twin).max() < SAME


def test_a_part_of_a_matrix_has_its_part_of_the_scales(tmp_path: Path) -> None:
    folder, _ = folder_of(tmp_path / "blocks", "compressed, blocks")
    source, name = opened(folder), "layers.0.down"
    whole = source.floats(name)
    for part in ((slice(3, 20),), (slice(0, 32), slice(32, 64)), (slice(5, 6), slice(0, 32))):
        found = read_w8(source, name, part)
        assert found is not None
        values, scales = (each.float() for each in found)
        assert scales.shape == (len(values), values.shape[1] // 32)
        wide = values * scales.repeat_interleave(32, dim=1)
        assert torch.equal(wide, torch.from_numpy(whole[part].copy()))
        assert torch.equal(read_tensor(source, name, torch.float32, part), wide)
    with pytest.raises(ModelError, match="blocks of 32 columns, which the ranks would cut"):
        source.w8(name, (slice(0, 4), slice(16, 48)))
    source = opened(folder_of(tmp_path / "int8", "int8, a channel")[0])
    for part in ((slice(3, 20),), (slice(5, 9), slice(16, 48))):  # a rank's rows, or its columns
        found = read_w8(source, name, part)
        assert found is not None
        assert found[0].dtype == torch.int8
        wide = found[0].float() * found[1]
        assert torch.equal(wide, torch.from_numpy(source.floats(name)[part].copy()))


# ── --quantization fp8, int8 ────────────────────────────────────────────────────────────────


@pytest.mark.parametrize("type", ["fp8", "int8"])
def test_dense_weights_are_quantised_when_they_are_loaded(tmp_path: Path, type: str) -> None:
    folder = tiny_folder(tmp_path)
    plain_llm = tiny_llm(folder, **REFERENCE)
    llm = tiny_llm(folder, quantization=type, **REFERENCE)
    matrices = 2 * (32 * 32 * 2 + 16 * 32 * 2 + 3 * 32 * 64)
    scales = 4 * 2 * (32 + 2 * 16 + 32 + 2 * 64 + 32)
    saved = plain_llm.engine.memory.weight_bytes - llm.engine.memory.weight_bytes
    assert saved == 3 * matrices - scales
    assert llm.engine.info().weights == f"{type}, from float32"
    layer = llm.engine.core._executor.program.decoder._layers[0]
    assert layer.mlp.down.num_bytes == 64 * 32 + 4 * 32
    cost = llm.engine.core.cost
    assert cost.layer_weight_bytes == matrices + scales
    assert cost.head_weight_bytes == 4 * 300 * 32
    rounded = logprobs(folder, FEW, quantization=type, **REFERENCE)
    apart = np.abs(rounded - logprobs(folder, FEW, **REFERENCE)).mean()
    assert (1e-3 if type == "fp8" else 1e-4) < apart < (0.3 if type == "fp8" else 0.05)


@pytest.mark.parametrize("layout", ["fp8, blocks", "int8, a channel"])
def test_a_folder_that_is_quantised_so_stays_as_it_is(tmp_path: Path, layout: str) -> None:
    folder, twin = folder_of(tmp_path, layout)
    ours = logprobs(folder, FEW, quantization=type_of(layout), **REFERENCE)
    assert np.abs(ours - logprobs(twin, FEW, **REFERENCE)).max() < SAME
    told = f"float32 + {type_of(layout)}"
    assert tiny_llm(folder, **REFERENCE).engine.info().weights == told


# ── what is refused ─────────────────────────────────────────────────────────────────────────


@pytest.mark.parametrize(
    ("said", "named"),
    [
        ({"quant_method": "hqq", "bits": 4}, "'hqq'"),
        ({"bits": 8}, "None"),
        ("fp8", "quantization_config must be an object"),
        (plain(fmt="e5m2"), "fmt = 'e5m2'"),
        (plain(activation_scheme="sometimes"), "activation_scheme must be one of dynamic, static"),
        (plain(weight_block_size=[128]), "weight_block_size must be two of"),
        (plain(weight_block_size=[128, 100]), "weight_block_size must be two of"),
        (compressed("group"), "strategy = 'group'"),
        (compressed("channel", num_bits=4), "num_bits = 4"),
        (compressed("channel", type="int"), "with type 'int'"),
        (compressed("channel", symmetric=False), "symmetric = False"),
        (compressed("channel", DYNAMIC | {"num_bits": 4}), "num_bits = 4"),
        (compressed("block"), "block_structure must be two of"),
        (compressed("channel") | {"format": "nvfp4-pack-quantized"}, "format must be one of"),
        (compressed("channel") | {"sparsity_config": {"format": "2:4"}}, "sparsity_config"),
        (compressed("channel") | {"config_groups": {}}, "0 kinds of quantisation"),
        (two_kinds(compressed("channel"), compressed("channel", None)), "2 kinds of quantisation"),
        (two_kinds(int8("channel"), int8("channel", None)), "2 kinds of quantisation"),
        (int8("group"), "strategy = 'group'"),
        (int8("block", block_structure=[128, 128]), "strategy = 'block'"),
        (int8("channel", num_bits=4), "num_bits = 4"),
        (int8("channel", type="float"), "with type 'float'"),
        (int8("channel", symmetric=False), "symmetric = False"),
        (int8("channel", dynamic=True), "dynamic = True"),
        (int8("channel", INT_DYNAMIC | {"symmetric": False}), "symmetric = False"),
        (int8("channel", INT_DYNAMIC | {"strategy": "group"}), "strategy = 'group'"),
        (int8("channel", DYNAMIC), "with type 'float'; supported with such weights: int of 8"),
    ],
    ids=str,
)
def test_what_a_config_says_that_we_do_not_do_is_refused(
    tmp_path: Path, said: Any, named: str
) -> None:
    assert_config_is_refused(tmp_path, said, named)


def test_experts_of_8_bits_are_refused(tmp_path: Path) -> None:
    config = CONFIG | {"model_type": "mixtral", "num_local_experts": 4, "num_experts_per_tok": 2}
    for type, said in (("fp8", plain()), ("int8", int8("channel"))):
        write_json(tmp_path / "config.json", config | {"quantization_config": said})
        with pytest.raises(ModelError, match=f"experts in {type}"):
            load_hf_config(tmp_path)


def test_experts_are_not_quantised_as_yet(tmp_path: Path) -> None:
    more = {"model_type": "mixtral", "num_local_experts": 4, "num_experts_per_tok": 2}
    folder = tiny_folder(tmp_path, **more)
    for type in ("fp8", "int8"):
        said = refusal(folder, quantization=type)
        assert f"'{type}', which does not support experts yet" in said


def test_scales_that_are_missing_or_do_not_fit_are_named(tmp_path: Path) -> None:
    down = "model.layers.1.mlp.down_proj.weight"
    folder, _ = folder_of(tmp_path / "a", "compressed, a channel")
    change(folder, lambda tensors: tensors.pop(down + "_scale"))
    said = refusal(folder)
    assert f"'{down}' is in fp8, and its scales are missing ('{down}_scale'" in said
    folder, _ = folder_of(tmp_path / "b", "fp8, blocks")
    change(folder, lambda tensors: tensors.update({down + "_scale_inv": torch.ones(2, 3)}))
    assert "has shape (2, 3), but a matrix of (32, 64)" in refusal(folder)
    assert "ask for (2, 4)" in refusal(folder)
    folder, _ = folder_of(tmp_path / "c", "compressed, a channel")
    change(folder, lambda tensors: tensors.update({down + "_scale": torch.ones(31, 1)}))
    assert "ask for (32, 1) or ()" in refusal(folder)
    change(folder, lambda tensors: tensors.update({down + "_scale": torch.ones(32, 1).int()}))
    assert "is of type I32, expected one of F32, F16, BF16" in refusal(folder)
    change(folder, lambda tensors: tensors.update({down + "_scale": torch.full((32, 1), np.inf)}))
    assert "holds NaN or infinity" in refusal(folder)


def test_zero_points_that_are_not_zero_are_refused(tmp_path: Path) -> None:
    folder, _ = folder_of(tmp_path, "int8, a channel")
    name = "model.layers.1.mlp.down_proj.weight_zero_point"
    change(folder, lambda tensors: tensors.update({name: torch.zeros(32, 1, dtype=torch.int8)}))
    assert tiny_llm(folder, **REFERENCE).engine.info().weights == "float32 + int8"
    change(folder, lambda tensors: tensors[name][7].fill_(1))
    assert f"'{name}' has no place in the model" in refusal(folder)


def test_numbers_that_are_none_are_refused(tmp_path: Path) -> None:
    folder, _ = folder_of(tmp_path, "compressed, a channel")
    name = "model.layers.0.self_attn.q_proj.weight"
    change(folder, lambda tensors: tensors[name].view(torch.uint8)[3, 4].fill_(0xFF))
    assert f"'{name}' holds NaN" in refusal(folder)


def test_blocks_that_do_not_divide_the_columns_are_refused(tmp_path: Path) -> None:
    folder, _ = folder_of(tmp_path, "compressed, blocks", intermediate_size=48)
    assert "blocks of 32 columns, but the 48 columns of its matrix" in refusal(folder)


def test_fp8_tensors_of_a_folder_that_does_not_say_so_are_refused(tmp_path: Path) -> None:
    folder, _ = folder_of(tmp_path, "compressed, a channel")
    write_json(folder / "config.json", CONFIG)
    assert "weight_scale' has no place in the model" in refusal(folder)


def test_blocks_of_a_gguf_file_are_not_rounded_once_more(tmp_path: Path) -> None:
    write_quantised(tmp_path / "model.gguf", gguf.GGMLQuantizationType.Q8_0)
    file = GGUFFile.open(tmp_path / "model.gguf")
    spec = spec_from_gguf(file)
    with pytest.raises(ConfigError, match=r"is quantised already \(Q8_0\); leave quantization out"):
        w8_formats(spec, GGUFWeights(file, spec), "int8")
    assert w8_formats(spec, GGUFWeights(file, spec), None) == {}


def test_a_gpu_without_fp8_is_refused_with_what_to_do() -> None:
    offered = r"and this one has 8\.0; use .* quantization='int8', which takes as little memory"
    with pytest.raises(ConfigError, match=offered):
        check_fp8((8, 0))
    assert EngineConfig(model="m", quantization="int8").quantization == "int8"
    assert W8Format("fp8").needs_fp8
    assert not W8Format("int8").needs_fp8
    check_fp8((8, 9))
    check_fp8((9, 0))


def test_a_folder_of_8_bits_is_not_rounded_once_more(tmp_path: Path) -> None:
    for layout, other in (("compressed, a channel", "int8"), ("int8, a channel", "fp8")):
        folder, _ = folder_of(tmp_path / other, layout)
        assert f"quantised already ({type_of(layout)})" in refusal(folder, quantization=other)
