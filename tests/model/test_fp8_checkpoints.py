"""Folders whose weights are in fp8, in the layouts of their formats: they run as their dequantised
twins do, and are refused where they are not what they say.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file

from tests.engine.test_native_settings import write_quantised
from tests.tiny import CONFIG, tiny_folder, tiny_llm, write_json
from twostroke import SamplingParams
from twostroke.engine.build_torch import check_fp8
from twostroke.errors import ConfigError, ModelError
from twostroke.model.fp8 import fp8_matrices, is_weight_only
from twostroke.model.gguf import GGUFFile
from twostroke.model.gguf_config import spec_from_gguf
from twostroke.model.hf_config import load_hf_config, names_in_hf
from twostroke.model.hf_fp8 import fp8_config
from twostroke.model.weights.fp8 import E4M3_VALUES
from twostroke.model.weights.gguf import GGUFWeights
from twostroke.model.weights.safetensors import SafetensorsWeights
from twostroke.model.weights.tensors import read_fp8, read_tensor

E4M3 = torch.float8_e4m3fn
REFERENCE = {"device": "cpu", "kernels": "reference"}
FEW = [5, 6, 7, 8, 9, 10, 11, 12]  # tokens whose activations stay as they are

DYNAMIC = {"dynamic": True, "num_bits": 8, "strategy": "token", "symmetric": True, "type": "float"}


def compressed(strategy: str, activations: Any = DYNAMIC, **weights: Any) -> dict[str, Any]:
    """As llm-compressor writes it."""
    kind = {"num_bits": 8, "type": "float", "symmetric": True, "dynamic": False}
    kind |= {"strategy": strategy, "group_size": None, "block_structure": None, **weights}
    group = {"weights": kind, "input_activations": activations, "output_activations": None}
    return {
        "quant_method": "compressed-tensors",
        "format": "float-quantized",
        "config_groups": {"group_0": {"targets": ["Linear"], **group}},
        "ignore": ["lm_head"],
        "kv_cache_scheme": None,
        "sparsity_config": {},
        "quantization_status": "compressed",
    }


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
    "fp8, blocks": (plain(weight_block_size=[16, 16]), (16, 16), "_scale_inv", "matrix"),
}


def quantise(weight: torch.Tensor, shared: tuple[int, int]) -> tuple[torch.Tensor, torch.Tensor]:
    """The values and the scales, a matrix of them."""
    rows, columns = (given or size for given, size in zip(shared, weight.shape, strict=True))
    height, width = (-(-n // m) for n, m in zip(weight.shape, (rows, columns), strict=True))
    scale = torch.empty(height, width)
    values = torch.empty(weight.shape, dtype=E4M3)
    for i in range(height):
        for j in range(width):
            at = (slice(i * rows, (i + 1) * rows), slice(j * columns, (j + 1) * columns))
            scale[i, j] = weight[at].abs().max() / 448
            values[at] = (weight[at] / scale[i, j]).to(E4M3)
    return values, scale


def fp8_folder(path: Path, layout: str, left: str = "lm_head", **config: Any) -> tuple[Path, Path]:
    """A folder in a layout, and its dequantised twin. `left`: which matrices are not quantised."""
    said, shared, ending, kind = LAYOUTS[layout]
    twin = tiny_folder(path / "twin", **config)
    folder = tiny_folder(path / "fp8", **config, quantization_config=said)
    tensors = load_file(twin / "model.safetensors")
    dense = {}
    for name in [n for n in tensors if n.endswith("proj.weight") and left not in n]:
        values, scale = quantise(tensors[name], shared)
        rows, columns = tensors[name].shape
        wide = scale.repeat_interleave(shared[0] or rows, 0)[:rows]
        wide = wide.repeat_interleave(shared[1] or columns, 1)[:, :columns]
        dense[name] = values.float() * wide
        tensors[name] = values
        dims = {"one": (1,), "none": ()}.get(kind, scale.shape)
        tensors[name + ending] = scale.reshape(dims).contiguous()
        if said.get("activation_scheme") == "static":
            tensors[name.replace("weight", "input_scale")] = torch.tensor(0.1)
    save_file(tensors, folder / "model.safetensors")
    whole = load_file(twin / "model.safetensors")
    save_file(whole | dense, twin / "model.safetensors")
    return folder, twin


def opened(folder: Path) -> SafetensorsWeights:
    spec, settings = load_hf_config(folder)
    return SafetensorsWeights(
        folder, spec, names_in_hf(settings), fp8_config(settings, "config.json")
    )


def logprobs(folder: Path, prompt: list[int], **settings: Any) -> np.ndarray:
    llm = tiny_llm(folder, **settings)
    params = SamplingParams(max_tokens=4, temperature=0, logprobs=5, prompt_logprobs=5)
    output = llm.generate([prompt], params)[0]
    rows = [*output.prompt_logprobs[1:], *output.outputs[0].logprobs]
    return np.array([sorted((p.logprob for p in row.values()), reverse=True)[:5] for row in rows])


def refusal(folder: Path, **settings: Any) -> str:
    with pytest.raises((ModelError, ConfigError)) as caught:
        tiny_llm(folder, **REFERENCE, **settings)
    return str(caught.value)


def change(folder: Path, edit: Any) -> None:
    tensors = load_file(folder / "model.safetensors")
    edit(tensors)
    save_file(tensors, folder / "model.safetensors")


def test_the_values_of_e4m3_are_torchs() -> None:
    there = torch.arange(256, dtype=torch.uint8).view(E4M3).float()
    known = ~there.isnan()
    assert int(known.sum()) == 254
    assert np.array_equal(E4M3_VALUES[known.numpy()], there[known].numpy())


@pytest.mark.parametrize("layout", LAYOUTS)
def test_a_folder_in_fp8_runs_as_its_dequantised_twin(tmp_path: Path, layout: str) -> None:
    folder, twin = fp8_folder(tmp_path, layout)
    ours, dense = opened(folder), opened(twin)
    spec = load_hf_config(folder)[0]
    kept = fp8_matrices(spec, ours, None)
    assert len(kept) == 7 * 2
    columns = LAYOUTS[layout][1][1]
    assert kept["layers.0.q"] == (32 // columns if columns else 1)
    for name in spec.weight_shapes():
        assert np.array_equal(ours.floats(name), dense.floats(name))
    assert is_weight_only(ours) == ("alone" in layout)
    ours_logprobs, its = logprobs(folder, FEW, **REFERENCE), logprobs(twin, FEW, **REFERENCE)
    assert np.abs(ours_logprobs - its).max() < 2e-5


def test_more_tokens_are_quantised_unless_the_folder_says_otherwise(tmp_path: Path) -> None:
    many = list(range(5, 65))
    gaps = {}
    for layout in ("compressed, a channel", "compressed, weights alone", "fp8, blocks"):
        folder, twin = fp8_folder(tmp_path / layout, layout)
        gap = np.abs(logprobs(folder, many, **REFERENCE) - logprobs(twin, many, **REFERENCE))
        gaps[layout] = gap.max()
    assert 1e-3 < gaps.pop("compressed, a channel") < 1.0
    assert max(gaps.values()) < 2e-5


@pytest.mark.parametrize("model_type", ["qwen2", "phi3", "glm"])
def test_other_places_of_the_rows(tmp_path: Path, model_type: str) -> None:
    """Biases; several weights in one tensor; rows that are put in another order."""
    more: dict[str, Any] = {"model_type": model_type}
    if model_type == "glm":
        more |= {"head_dim": 8, "attention_bias": True, "partial_rotary_factor": 0.5}
    for layout in ("compressed, a channel", "compressed, blocks", "fp8, a tensor"):
        folder, twin = fp8_folder(tmp_path / layout, layout, **more)
        ours, its = logprobs(folder, FEW, **REFERENCE), logprobs(twin, FEW, **REFERENCE)
        assert np.abs(ours - its).max() < 2e-5
        assert len(fp8_matrices(load_hf_config(folder)[0], opened(folder), None)) == 14


def test_the_native_kernels_take_it_dequantised(tmp_path: Path) -> None:
    folder, twin = fp8_folder(tmp_path, "fp8, blocks")
    ours, its = (logprobs(path, FEW, device="cpu", exact=True) for path in (folder, twin))
    assert np.abs(ours - its).max() < 2e-5
    assert tiny_llm(folder, device="cpu").engine.info().weights == "float32, from float32 + fp8"


def test_a_product_of_which_one_matrix_is_not_in_fp8_is_dense(tmp_path: Path) -> None:
    folder, twin = fp8_folder(tmp_path, "compressed, a channel", left="k_proj")
    kept = fp8_matrices(load_hf_config(folder)[0], opened(folder), "fp8")
    assert {name.split(".")[2] for name in kept} == {"o", "gate", "up", "down"}
    ours, its = logprobs(folder, FEW, **REFERENCE), logprobs(twin, FEW, **REFERENCE)
    assert np.abs(ours - its).max() < 2e-5


def test_a_part_of_a_matrix_has_its_part_of_the_scales(tmp_path: Path) -> None:
    folder, _ = fp8_folder(tmp_path, "compressed, blocks")
    source, name = opened(folder), "layers.0.down"
    whole = source.floats(name)
    for part in ((slice(3, 20),), (slice(0, 32), slice(32, 64)), (slice(5, 6), slice(0, 32))):
        found = read_fp8(source, name, part)
        assert found is not None
        values, scales = (each.float() for each in found)
        assert scales.shape == (len(values), values.shape[1] // 32)
        wide = values * scales.repeat_interleave(32, dim=1)
        assert torch.equal(wide, torch.from_numpy(whole[part].copy()))
        assert torch.equal(read_tensor(source, name, torch.float32, part), wide)
    with pytest.raises(ModelError, match="blocks of 32 columns, which the ranks would cut"):
        source.fp8(name, (slice(0, 4), slice(16, 48)))


# ── --quantization fp8 ──────────────────────────────────────────────────────────────────────


def test_dense_weights_are_quantised_when_they_are_loaded(tmp_path: Path) -> None:
    folder = tiny_folder(tmp_path)
    plain_llm = tiny_llm(folder, **REFERENCE)
    llm = tiny_llm(folder, quantization="fp8", **REFERENCE)
    matrices = 2 * (32 * 32 * 2 + 16 * 32 * 2 + 3 * 32 * 64)
    scales = 4 * 2 * (32 + 2 * 16 + 32 + 2 * 64 + 32)
    saved = plain_llm.engine.memory.weight_bytes - llm.engine.memory.weight_bytes
    assert saved == 3 * matrices - scales
    assert llm.engine.info().weights == "fp8, from float32"
    layer = llm.engine.core._executor.program.decoder._layers[0]
    assert layer.mlp.down.num_bytes == 64 * 32 + 4 * 32
    cost = llm.engine.core._cost
    assert cost.layer_weight_bytes == matrices + scales
    assert cost.head_weight_bytes == 4 * 300 * 32
    gap = np.abs(
        logprobs(folder, FEW, quantization="fp8", **REFERENCE) - logprobs(folder, FEW, **REFERENCE)
    )
    assert 1e-3 < gap.mean() < 0.3


def test_a_folder_in_fp8_stays_as_it_is(tmp_path: Path) -> None:
    folder, twin = fp8_folder(tmp_path, "fp8, blocks")
    ours = logprobs(folder, FEW, quantization="fp8", **REFERENCE)
    assert np.abs(ours - logprobs(twin, FEW, **REFERENCE)).max() < 2e-5
    assert tiny_llm(folder, **REFERENCE).engine.info().weights == "float32 + fp8"


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
        (
            compressed("channel")
            | {
                "config_groups": {
                    **compressed("channel")["config_groups"],
                    "group_1": compressed("channel", None)["config_groups"]["group_0"],
                }
            },
            "2 kinds of quantisation",
        ),
    ],
    ids=str,
)
def test_what_a_config_says_that_we_do_not_do_is_refused(
    tmp_path: Path, said: Any, named: str
) -> None:
    write_json(tmp_path / "config.json", CONFIG | {"quantization_config": said})
    with pytest.raises(ModelError) as caught:
        load_hf_config(tmp_path)
    assert named in str(caught.value)
    assert "quantization_config" in str(caught.value)


def test_experts_in_fp8_are_refused(tmp_path: Path) -> None:
    config = CONFIG | {"model_type": "mixtral", "num_local_experts": 4, "num_experts_per_tok": 2}
    write_json(tmp_path / "config.json", config | {"quantization_config": plain()})
    with pytest.raises(ModelError, match="experts in fp8"):
        load_hf_config(tmp_path)


def test_experts_are_not_quantised_as_yet(tmp_path: Path) -> None:
    more = {"model_type": "mixtral", "num_local_experts": 4, "num_experts_per_tok": 2}
    folder = tiny_folder(tmp_path, **more)
    assert "'fp8', which does not quantise experts as yet" in refusal(folder, quantization="fp8")


def test_scales_that_are_missing_or_do_not_fit_are_named(tmp_path: Path) -> None:
    down = "model.layers.1.mlp.down_proj.weight"
    folder, _ = fp8_folder(tmp_path / "a", "compressed, a channel")
    change(folder, lambda tensors: tensors.pop(down + "_scale"))
    said = refusal(folder)
    assert f"'{down}' is in fp8, and its scales are missing ('{down}_scale'" in said
    folder, _ = fp8_folder(tmp_path / "b", "fp8, blocks")
    change(folder, lambda tensors: tensors.update({down + "_scale_inv": torch.ones(2, 3)}))
    assert "has shape (2, 3), but a matrix of (32, 64)" in refusal(folder)
    assert "ask for (2, 4)" in refusal(folder)
    folder, _ = fp8_folder(tmp_path / "c", "compressed, a channel")
    change(folder, lambda tensors: tensors.update({down + "_scale": torch.ones(31, 1)}))
    assert "ask for (32, 1) or ()" in refusal(folder)
    change(folder, lambda tensors: tensors.update({down + "_scale": torch.ones(32, 1).int()}))
    assert "is of type I32, expected one of F32, F16, BF16" in refusal(folder)
    change(folder, lambda tensors: tensors.update({down + "_scale": torch.full((32, 1), np.inf)}))
    assert "holds NaN or infinity" in refusal(folder)


def test_numbers_that_are_none_are_refused(tmp_path: Path) -> None:
    folder, _ = fp8_folder(tmp_path, "compressed, a channel")
    name = "model.layers.0.self_attn.q_proj.weight"
    change(folder, lambda tensors: tensors[name].view(torch.uint8)[3, 4].fill_(0xFF))
    assert f"'{name}' holds NaN" in refusal(folder)


def test_blocks_that_do_not_divide_the_columns_are_refused(tmp_path: Path) -> None:
    folder, _ = fp8_folder(tmp_path, "compressed, blocks", intermediate_size=48)
    assert "blocks of 32 columns, which do not divide the 48" in refusal(folder)


def test_fp8_tensors_of_a_folder_that_does_not_say_so_are_refused(tmp_path: Path) -> None:
    folder, _ = fp8_folder(tmp_path, "compressed, a channel")
    write_json(folder / "config.json", CONFIG)
    assert "weight_scale' has no place in the model" in refusal(folder)


def test_blocks_of_a_gguf_file_are_not_rounded_once_more(tmp_path: Path) -> None:
    write_quantised(tmp_path / "model.gguf", gguf.GGMLQuantizationType.Q8_0)
    file = GGUFFile.open(tmp_path / "model.gguf")
    spec = spec_from_gguf(file)
    with pytest.raises(ConfigError, match=r"is quantised already \(Q8_0\); leave quantization out"):
        fp8_matrices(spec, GGUFWeights(file, spec), "fp8")
    assert fp8_matrices(spec, GGUFWeights(file, spec), None) == {}


def test_a_gpu_without_fp8_is_refused_with_what_to_do() -> None:
    with pytest.raises(ConfigError, match=r"and this one has 8\.0; leave quantization out"):
        check_fp8((8, 0))
    check_fp8((8, 9))
    check_fp8((9, 0))


def test_a_folder_in_fp8_is_not_rounded_once_more(tmp_path: Path) -> None:
    folder, _ = fp8_folder(tmp_path, "compressed, a channel")
    with pytest.raises(ConfigError, match="quantised already"):
        tiny_llm(folder, device="cpu", quantization="int8")
