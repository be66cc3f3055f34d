"""Folders whose weights have 4 or 8 bits, in the layouts of GPTQ, AWQ and compressed-tensors: they
run as their dequantised twins do, and are refused where they are not what they say.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file

from tests.model.weights.quantised_folders import (
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
from twostroke.errors import ModelError
from twostroke.kernels.packed import dequantised, pack
from twostroke.model.describe.hf_config import load_hf_config
from twostroke.model.formats.weight_formats import packed_formats
from twostroke.model.weights.packed_format import PackedFormat
from twostroke.model.weights.tensors import read_packed, read_tensor

AWQ_ORDER = [0, 2, 4, 6, 1, 3, 5, 7]


def packed_ints(**weights: Any) -> dict[str, Any]:
    """As llm-compressor writes it."""
    given = {"strategy": "group", "type": "int", "num_bits": 4, "group_size": 16, **weights}
    said = compressed(given.pop("strategy"), None, **given)
    return said | {"format": "pack-quantized"}


# Name: quantization_config, bits, numbers of a group (0: all of a row), whether it has zeros.
LAYOUTS: dict[str, tuple[dict[str, Any], int, int, bool]] = {
    "gptq": (
        {"quant_method": "gptq", "bits": 4, "group_size": 32, "sym": True, "desc_act": False},
        4,
        32,
        False,
    ),
    "gptq, zeros": (
        {"quant_method": "gptq", "bits": 4, "group_size": 16, "sym": False},
        4,
        16,
        True,
    ),
    "gptq, version 2": (
        {
            "quant_method": "gptq",
            "bits": 4,
            "group_size": 16,
            "sym": False,
            "checkpoint_format": "gptq_v2",
        },
        4,
        16,
        True,
    ),
    "gptq, 8 bits": ({"quant_method": "gptq", "bits": 8, "group_size": -1}, 8, 0, False),
    "awq": (
        {"quant_method": "awq", "bits": 4, "group_size": 16, "zero_point": True, "version": "gemm"},
        4,
        16,
        True,
    ),
    "compressed": (packed_ints(), 4, 16, False),
    "compressed, zeros": (packed_ints(symmetric=False), 4, 16, True),
    "compressed, a channel": (packed_ints(strategy="channel", group_size=None), 4, 0, False),
    "compressed, 8 bits": (packed_ints(num_bits=8, group_size=32), 8, 32, False),
}


def words(codes: torch.Tensor, bits: int, order: list[int] | None = None) -> torch.Tensor:
    """[n, m] → [n, m · bits / 32] int32, the first of each word lowest."""
    each = 32 // bits
    grouped = codes.long().view(len(codes), -1, each)
    grouped = grouped if order is None else grouped[:, :, order]
    shifted = grouped << torch.arange(0, 32, bits)
    whole = shifted.sum(2)
    return torch.where(whole >= 1 << 31, whole - (1 << 32), whole).to(torch.int32)


def quantise(
    weight: torch.Tensor, bits: int, group: int, zeros: bool
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Codes [out, in], scales and zeros [out, groups]; scales are such as fp16 has."""
    most, middle = (1 << bits) - 1, 1 << (bits - 1)
    grouped = weight.view(len(weight), -1, group or weight.shape[1])
    low, high = grouped.amin(2), grouped.amax(2)
    if zeros:
        scale = ((high - low) / most).half().float()
        zero = (-low / scale).round().clamp(0, most)
    else:
        scale = (grouped.abs().amax(2) / (middle - 1)).half().float()
        zero = torch.full_like(scale, middle)
    codes = (grouped / scale[:, :, None] + zero[:, :, None]).round().clamp(0, most)
    return codes.flatten(1), scale, zero


def tensors_of(
    stem: str, layout: str, codes: torch.Tensor, scale: torch.Tensor, zero: torch.Tensor
) -> dict[str, torch.Tensor]:
    said, bits, _, zeros = LAYOUTS[layout]
    method = said["quant_method"]
    if method == "gptq":
        stored = zero if "version 2" in layout else zero - 1
        group = codes.shape[1] // scale.shape[1]
        return {
            f"{stem}.qweight": words(codes, bits).t().contiguous(),
            f"{stem}.scales": scale.t().half().contiguous(),
            f"{stem}.qzeros": words(stored.t() % (1 << bits), bits),
            f"{stem}.g_idx": (torch.arange(codes.shape[1]) // group).int(),
        }
    if method == "awq":
        return {
            f"{stem}.qweight": words(codes.t(), bits, AWQ_ORDER),
            f"{stem}.scales": scale.t().half().contiguous(),
            f"{stem}.qzeros": words(zero.t(), bits, AWQ_ORDER),
        }
    found = {
        f"{stem}.weight_packed": words(codes, bits),
        f"{stem}.weight_scale": scale,
        f"{stem}.weight_shape": torch.tensor(codes.shape),
    }
    if zeros:
        found[f"{stem}.weight_zero_point"] = words(zero.t(), bits).t().contiguous()
    return found


def packed_folder(path: Path, layout: str, left: str = "lm_head", **more: Any) -> tuple[Path, Path]:
    """In a layout, and its dequantised twin."""
    said, bits, group, zeros = LAYOUTS[layout]

    def stored(name: str, weight: torch.Tensor) -> tuple[dict[str, torch.Tensor], torch.Tensor]:
        codes, scale, zero = quantise(weight, bits, group, zeros)
        wide = codes.view(*scale.shape, -1) - zero[:, :, None]
        tensors = tensors_of(name.removesuffix(".weight"), layout, codes, scale, zero)
        return tensors, (wide * scale[:, :, None]).view(codes.shape)

    return folder_and_twin(path, said, stored, left, **more)


@pytest.mark.parametrize("layout", LAYOUTS)
def test_a_packed_folder_runs_as_its_dequantised_twin(tmp_path: Path, layout: str) -> None:
    folder, twin = packed_folder(tmp_path, layout)
    ours, dense = opened(folder), opened(twin)
    spec = load_hf_config(folder)[0]
    _, bits, group, zeros = LAYOUTS[layout]
    kept = packed_formats(spec, ours, None)
    assert set(kept.values()) == {PackedFormat(bits, group or 32, zeros)} or not group
    assert len(kept) == 7 * 2
    for name in spec.weight_shapes():
        assert np.array_equal(ours.floats(name), dense.floats(name))
        if name in kept:
            codes = read_packed(ours, name)
            assert codes is not None
            assert np.array_equal(dequantised(pack(codes), torch.float32), dense.floats(name))
    assert gap(folder, twin).max() < SAME


def test_memory_and_cost_count_what_is_kept(tmp_path: Path) -> None:
    folder, twin = packed_folder(tmp_path, "awq")
    llm, dense = (tiny_llm(path, **REFERENCE) for path in (folder, twin))
    matrices = 2 * (32 * 32 * 2 + 16 * 32 * 2 + 3 * 32 * 64)
    saved = dense.engine.memory.weight_bytes - llm.engine.memory.weight_bytes
    assert saved == 4 * matrices - matrices // 2 - matrices // 16 * 3
    assert llm.engine.core.cost.layer_weight_bytes == matrices // 2 + matrices // 16 * 3
    layer = llm.engine.core._executor.program.decoder._layers[0]
    assert layer.mlp.down.num_bytes == 64 * 32 // 2 + 32 * 4 * 3
    assert llm.engine.info().weights == "float32 + int4"


@pytest.mark.parametrize("more", OTHER_PLACES, ids=str)
def test_other_places_of_the_rows(tmp_path: Path, more: dict[str, Any]) -> None:
    for layout in ("gptq, zeros", "awq", "compressed"):
        folder, twin = packed_folder(tmp_path / layout, layout, **more)
        assert gap(folder, twin).max() < SAME
        assert len(packed_formats(load_hf_config(folder)[0], opened(folder), None)) == 14


def test_the_native_kernels_take_it_dequantised(tmp_path: Path) -> None:
    told = "float32, from float32 + int4"
    assert_native_kernels_take_it_dequantised(*packed_folder(tmp_path, "awq"), told)


def test_a_product_of_which_one_matrix_is_dense_is_dense(tmp_path: Path) -> None:
    folder, twin = packed_folder(tmp_path, "gptq", left="k_proj")
    kept = packed_formats(load_hf_config(folder)[0], opened(folder), None)
    assert {name.split(".")[2] for name in kept} == {"o", "gate", "up", "down"}
    assert gap(folder, twin).max() < SAME


def test_a_part_of_a_matrix_has_its_part_of_the_scales(tmp_path: Path) -> None:
    folder, _ = packed_folder(tmp_path, "gptq, zeros")
    source, name = opened(folder), "layers.0.down"
    whole = source.floats(name)
    for part in ((slice(3, 20),), (slice(0, 32), slice(32, 64)), (slice(5, 6), slice(16, 48))):
        found = read_packed(source, name, part)
        assert found is not None
        values = dequantised(pack(found), torch.float32)
        assert torch.equal(values, torch.from_numpy(whole[part].copy()))
        assert torch.equal(read_tensor(source, name, torch.float32, part), values)
    with pytest.raises(ModelError, match="groups of 16 columns, which the ranks would cut"):
        source.codes(name, (slice(0, 4), slice(8, 40)))


def test_groups_that_are_not_of_neighbours_are_dequantised(tmp_path: Path) -> None:
    """`desc_act`: each input says which group it is in."""
    folder, twin = packed_folder(tmp_path, "gptq")
    name = "model.layers.0.mlp.down_proj"
    order = torch.randperm(64, generator=torch.Generator().manual_seed(1)) // 32
    change(folder, lambda tensors: tensors.update({f"{name}.g_idx": order.int()}))
    ours, plain = opened(folder), opened(twin)
    spec = load_hf_config(folder)[0]
    assert "layers.0.down" not in packed_formats(spec, ours, None)
    found, other = ours.floats("layers.0.down"), plain.floats("layers.0.down")
    tensors = load_file(folder / "model.safetensors")
    scale = tensors[f"{name}.scales"].float().numpy()  # [groups, out]
    codes = other.reshape(32, 2, 32) / scale.T[:, :, None]
    assert np.allclose(found, codes.reshape(32, 64) * scale[order.numpy()].T, atol=1e-6)


# ── --quantization int4 ─────────────────────────────────────────────────────────────────────


def test_dense_weights_are_rounded_when_they_are_loaded(tmp_path: Path) -> None:
    folder = tiny_folder(tmp_path)
    llm = tiny_llm(folder, quantization="int4", **REFERENCE)
    assert llm.engine.info().weights == "int4, from float32"
    layer = llm.engine.core._executor.program.decoder._layers[0]
    assert layer.mlp.down.num_bytes == 32 * (64 // 2 + 2)  # one group of 64 a row
    assert layer.o.num_bytes == 32 * (32 // 2 + 2)
    how = {**REFERENCE, "quantization": "int4"}
    gap = np.abs(logprobs(folder, FEW, **how) - logprobs(folder, FEW, **REFERENCE))
    assert 1e-3 < gap.mean() < 1.0


# ── what is refused ─────────────────────────────────────────────────────────────────────────

GPTQ = LAYOUTS["gptq"][0]
AWQ = LAYOUTS["awq"][0]


@pytest.mark.parametrize(
    ("said", "named"),
    [
        (GPTQ | {"bits": 3}, "bits = 3"),
        (GPTQ | {"bits": None}, "bits = None"),
        (GPTQ | {"group_size": 0}, "group_size must be"),
        (GPTQ | {"group_size": None}, "has no group_size"),
        (GPTQ | {"checkpoint_format": "marlin"}, "checkpoint_format must be one of gptq, gptq_v2"),
        (AWQ | {"version": "gemv"}, "version = 'gemv'"),
        (AWQ | {"bits": 8}, "bits = 8"),
        (packed_ints(num_bits=3), "num_bits = 3"),
        (packed_ints(type="float"), "type = 'float'"),
        (packed_ints(strategy="tensor"), "strategy = 'tensor'"),
        (packed_ints() | {"config_groups": {}}, "0 kinds of quantisation"),
        (two_kinds(packed_ints(), packed_ints(num_bits=8)), "2 kinds of quantisation"),
        (packed_ints() | {"sparsity_config": {"format": "2:4"}}, "sparsity_config"),
        ({"quant_method": "bitsandbytes", "load_in_4bit": True}, "'bitsandbytes'"),
    ],
    ids=str,
)
def test_what_a_config_says_that_we_do_not_do_is_refused(
    tmp_path: Path, said: Any, named: str
) -> None:
    assert_config_is_refused(tmp_path, said, named)


def test_experts_of_4_bits_are_refused(tmp_path: Path) -> None:
    more = {"model_type": "mixtral", "num_local_experts": 4, "num_experts_per_tok": 2}
    write_json(tmp_path / "config.json", CONFIG | more | {"quantization_config": AWQ})
    with pytest.raises(ModelError, match="experts in int4"):
        load_hf_config(tmp_path)
    folder = tiny_folder(tmp_path / "dense", **more)
    assert "'int4', which does not support experts yet" in refusal(folder, quantization="int4")


@pytest.mark.parametrize("layout", ["gptq, zeros", "compressed, zeros"])
def test_tensors_that_are_missing_or_do_not_fit_are_named(tmp_path: Path, layout: str) -> None:
    folder, _ = packed_folder(tmp_path, layout)
    down = "model.layers.1.mlp.down_proj"
    gptq = layout.startswith("gptq")
    scales = f"{down}.scales" if gptq else f"{down}.weight_scale"
    zeros = f"{down}.qzeros" if gptq else f"{down}.weight_zero_point"
    codes = f"{down}.qweight" if gptq else f"{down}.weight_packed"
    kept = load_file(folder / "model.safetensors")

    def said_of(edit: Any) -> str:
        save_file(kept, folder / "model.safetensors")
        change(folder, edit)
        return refusal(folder)

    said = said_of(lambda tensors: tensors.pop(scales))
    assert f"'{codes}' is in int4, and its scales are missing" in said
    assert "its zeros are missing" in said_of(lambda tensors: tensors.pop(zeros))
    said = said_of(lambda tensors: tensors.update({scales: torch.ones(3, 5)}))
    assert f"'{scales}' is F32 (3, 5), but codes of (32, 64)" in said
    assert "groups of 16" in said
    said = said_of(lambda tensors: tensors.update({scales: tensors[scales].int()}))
    assert "of F32 or F16 or BF16" in said
    said = said_of(lambda tensors: tensors[scales].view(-1)[3:4].fill_(np.inf))
    assert f"'{scales}' holds NaN or infinity" in said
    said = said_of(lambda tensors: tensors.update({codes: tensors[codes].float()}))
    assert "expected are codes in a matrix of I32" in said
    said = said_of(lambda tensors: tensors.pop(codes))
    assert "layers.1.down' is missing" in said
    said = said_of(lambda tensors: tensors.update({f"{down}.qscales": torch.ones(2)}))
    assert "has no place in the model" in said


def test_a_config_of_another_group_size_is_refused(tmp_path: Path) -> None:
    folder, _ = packed_folder(tmp_path, "gptq")
    other = GPTQ | {"group_size": 16}
    write_json(folder / "config.json", CONFIG | {"quantization_config": other})
    assert "groups of 16) ask for" in refusal(folder)
    other = GPTQ | {"group_size": 48}
    write_json(folder / "config.json", CONFIG | {"quantization_config": other})
    assert "which groups of 48 (quantization_config) do not divide" in refusal(folder)


def test_a_folder_that_is_packed_is_not_rounded_once_more(tmp_path: Path) -> None:
    folder, _ = packed_folder(tmp_path, "awq")
    for asked in ("int8", "fp8"):
        said = refusal(folder, quantization=asked, kernels="auto")
        assert f"quantization is '{asked}', but" in said
        assert "is quantised already (int4); leave quantization out" in said
    assert tiny_llm(folder, quantization="int4", **REFERENCE).engine.info().weights == (
        "float32 + int4"
    )


def test_tensors_of_another_format_than_the_config_says_are_refused(tmp_path: Path) -> None:
    folder, _ = packed_folder(tmp_path, "awq")
    write_json(folder / "config.json", CONFIG | {"quantization_config": packed_ints()})
    assert "has no place in the model" in refusal(folder)
    write_json(folder / "config.json", CONFIG)
    assert "has no place in the model" in refusal(folder)
