"""A gpt-oss in MXFP4, as it is published, gives the log-probabilities of its weights unpacked.

Blocks and scales are random; transformers unpacks them, and runs what comes of it.
"""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import GptOssConfig, PreTrainedModel
from transformers.integrations.mxfp4 import convert_moe_packed_tensors

from tests.equivalence import test_families as families
from tests.equivalence.rows import (
    SPREAD,
    TOLERANCE,
    largest_difference,
    open_ours,
    random_model,
)
from twostroke.errors import ModelError
from twostroke.exec.native import NativeExecutor
from twostroke.kernels import cpu
from twostroke.model.describe.hf_config import load_hf_config, names_in_hf
from twostroke.model.gguf.block_types import BlockType
from twostroke.model.weights import check_weights
from twostroke.model.weights.safetensors import SafetensorsWeights

CONFIG = families.GPT_OSS | {"num_hidden_layers": 2}
FIRST = "model.layers.0.mlp.experts.gate_up_proj_"


@pytest.fixture(scope="module")
def theirs() -> PreTrainedModel:
    """Its experts' weights are numbers that MXFP4 has: see `folder`."""
    return random_model(GptOssConfig(**families.SIZES | CONFIG))


@pytest.fixture(scope="module")
def folder(theirs: PreTrainedModel, tmp_path_factory: pytest.TempPathFactory) -> Path:
    path, random = tmp_path_factory.mktemp("mxfp4"), torch.Generator().manual_seed(3)
    theirs.save_pretrained(path)
    config = json.loads((path / "config.json").read_text())
    config["quantization_config"] = {"quant_method": "mxfp4"}
    (path / "config.json").write_text(json.dumps(config))
    tensors = load_file(path / "model.safetensors")
    for layer, module in enumerate(theirs.model.layers):
        for name in ("gate_up_proj", "down_proj"):
            at = f"model.layers.{layer}.mlp.experts.{name}"
            experts, width, rows = tensors.pop(at).shape
            shape = experts, rows, width // 32
            blocks = torch.randint(256, (*shape, 16), generator=random, dtype=torch.uint8)
            # Codes are spread by about 3: most weights are as large as those of other models.
            size = round(torch.tensor(SPREAD / width**0.5 / 3).log2().item())
            scales = 127 + size + torch.randint(-1, 2, shape, generator=random)
            tensors |= {f"{at}_blocks": blocks, f"{at}_scales": scales.to(torch.uint8)}
            values = convert_moe_packed_tensors(blocks, scales, dtype=torch.float32)
            getattr(module.mlp.experts, name).data.copy_(values)
    save_file(tensors, path / "model.safetensors")
    return path


def test_blocks_and_scales_give_the_log_probabilities_of_what_they_unpack_to(
    folder: Path, theirs: PreTrainedModel
) -> None:
    for steps in (families.ONE_STEP, families.CHUNKS):
        assert largest_difference(families.write(folder, **steps), theirs) <= TOLERANCE


@pytest.mark.skipif(not cpu.available(), reason="built without the native kernels")
def test_experts_stay_packed_in_the_native_decoder(folder: Path, theirs: PreTrainedModel) -> None:
    exact = families.write(folder, **families.CHUNKS, kernels="native", exact=True)
    assert largest_difference(exact, theirs) <= families.NATIVE_TOLERANCE
    llm = open_ours(folder, families.VOCAB, kernels="native")
    executor = llm.engine.core._executor
    assert isinstance(executor, NativeExecutor)
    spec = executor._decoder.spec
    shapes = {n: shape for n, shape in spec.weight_shapes().items() if len(shape) == 2}
    expected = sum(
        shape[0] * shape[1] * (20 / 32 if ".experts." in name else 4)
        for name, shape in shapes.items()
        if not name.endswith(".router")
    )
    routers = sum(4 * shape[0] * shape[1] for n, shape in shapes.items() if n.endswith(".router"))
    # Rows stand side by side in vectors, which a router of few experts does not fill.
    assert 1 <= executor._decoder.model.num_bytes / (expected + routers) < 1.05


def test_some_rows_of_an_expert_are_read_alone(folder: Path, theirs: PreTrainedModel) -> None:
    spec, config = load_hf_config(folder)
    source = SafetensorsWeights(folder, spec, names_in_hf(config))
    check_weights(spec, source, "here")
    name = "layers.1.experts.2.up"
    assert source.stored_type(name) == BlockType.MXFP4
    whole = theirs.model.layers[1].mlp.experts.gate_up_proj[2].T[1::2]
    assert torch.equal(torch.from_numpy(source.floats(name)), whole)
    assert torch.equal(torch.from_numpy(source.floats(name, slice(3, 5))), whole[3:5])


@pytest.mark.parametrize(
    ("changes", "says"),
    [
        ({"scales": None}, f"lists no tensor '{FIRST}scales', the scales of '{FIRST}blocks'"),
        ({"scales": torch.ones(4, 192, 3, dtype=torch.uint8)}, r"U8 \(4, 192, 2, 16\) and U8 \(4,"),
        ({"scales": torch.ones(4, 192, 2)}, r"and F32 \(4, 192, 2\); expected are blocks of 16"),
        ({"blocks": None, "scales": None}, "'layers.0.experts.0.gate' is missing"),
        (
            {
                "blocks": torch.ones(4, 190, 2, 16, dtype=torch.uint8),
                "scales": torch.ones(4, 190, 2, dtype=torch.uint8),
            },
            r"'layers.0.experts.0.gate' has shape \(94, 64\)",
        ),
        (
            {
                "blocks": torch.ones(3, 192, 2, 16, dtype=torch.uint8),
                "scales": torch.ones(3, 192, 2, dtype=torch.uint8),
            },
            r"'layers.0.experts.0.gate' has shape \(3, 192, 64\)",
        ),
        ({"scales": torch.full((4, 192, 2), 255, dtype=torch.uint8)}, "holds NaN or infinity"),
    ],
    ids=["none", "other_blocks", "floats", "no_blocks", "few_rows", "few_experts", "nan"],
)
def test_what_does_not_fit_is_refused_by_name(
    folder: Path, tmp_path: Path, changes: dict[str, torch.Tensor | None], says: str
) -> None:
    tensors = load_file(folder / "model.safetensors")
    for part, values in changes.items():
        tensors.pop(FIRST + part)
        if values is not None:
            tensors[FIRST + part] = values
    (tmp_path / "config.json").write_text((folder / "config.json").read_text())
    save_file(tensors, tmp_path / "model.safetensors")
    for kernels in ("reference", "native") if cpu.available() else ("reference",):
        with pytest.raises(ModelError, match=says):
            open_ours(tmp_path, families.VOCAB, kernels=kernels)
