"""GGUF files with latent attention → the spec, and what is refused."""

from __future__ import annotations

import math
from dataclasses import replace
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest

from tests.model.describe.test_family_mappings import edits, of
from tests.model.gguf.gguf_files import SPEC, Edit, extra_tensor, write_model
from tests.specs import changed
from twostroke.errors import ModelError
from twostroke.model.describe.gguf_config import spec_from_gguf
from twostroke.model.describe.spec import (
    AttentionSpec,
    ExpertsSpec,
    LatentSpec,
    MLPSpec,
    ModelSpec,
    RopeSpec,
    RoutingSpec,
    with_layers,
)
from twostroke.model.weights import check_weights
from twostroke.model.weights.gguf import GGUFWeights

LATENT = LatentSpec(kv_lora_rank=24, q_lora_rank=20, value_dim=12)
PART = AttentionSpec(4, 4, 18, RopeSpec(10000.0, 8), 18**-0.5, latent=LATENT)
LENGTHS = {"attention__key_length": 18, "attention__value_length": 12}
SIZES: dict[str, Any] = {"attention__kv_lora_rank": 24, "rope__dimension_count": 8}
LORA = {"attention__q_lora_rank": 20}
# As files have it whose kv_b is in two parts.
SPLIT = {"attention__key_length": 32, "attention__value_length": 24}
SPLIT |= {"attention__key_length_mla": 18, "attention__value_length_mla": 12}
YARN = {"rope__scaling__type": "yarn", "rope__scaling__factor": 4.0}
YARN |= {"rope__scaling__original_context_length": 32}
MOE = {"expert_count": 8, "expert_used_count": 3, "expert_feed_forward_length": 40}
MOE |= {"expert_shared_count": 2, "leading_dense_block_count": 1}
GROUPS = {"expert_group_count": 4, "expert_group_used_count": 2}

DENSE = with_layers(changed(SPEC, family="deepseek2"), attention=PART)
ROUTING = RoutingSpec(3, "sigmoid", True, 2.5, False, True, 4, 2, "top2_sum")
V3 = ExpertsSpec(8, MLPSpec(40), ROUTING, MLPSpec(80))
GREEDY = RoutingSpec(3, normalised=False)


def with_part(spec: ModelSpec, **changes: Any) -> ModelSpec:
    return with_layers(spec, attention=replace(spec.layers[0].attention, **changes))


def with_experts(experts: ExpertsSpec) -> ModelSpec:
    dense, other = DENSE.layers
    return replace(DENSE, layers=(dense, replace(other, mlp=experts)))


def deepseek2(**values: Any) -> Edit:
    return of("deepseek2", **SIZES | LENGTHS | LORA | values)


MINICPM3 = replace(
    replace(DENSE, family="minicpm3"),
    embed_scale=12.0,
    residual_scale=1.4 / 2**0.5,
    logit_scale=256 / 64,
)
SHARPENED = RopeSpec(10000.0, 8, "yarn", 4.0, 32)
SCALE = 18**-0.5 * (1 + 0.07 * math.log(4)) ** 2


@pytest.mark.parametrize(
    ("spec", "edit"),
    [
        (DENSE, deepseek2()),
        (with_part(DENSE, latent=replace(LATENT, split=True)), deepseek2(**SPLIT)),
        (
            with_part(DENSE, latent=replace(LATENT, q_lora_rank=0)),
            of("deepseek2", **SIZES | LENGTHS),
        ),
        (
            with_experts(V3),
            deepseek2(**MOE, **GROUPS, expert_weights_norm=True, expert_weights_scale=2.5),
        ),
        (
            with_experts(ExpertsSpec(8, MLPSpec(40), GREEDY, MLPSpec(80))),
            deepseek2(**MOE, expert_gating_func=1),
        ),
        (
            with_experts(ExpertsSpec(8, MLPSpec(40), replace(GREEDY, num_groups=4, groups_used=2))),
            deepseek2(**MOE | {"expert_shared_count": 0}, **GROUPS),
        ),
        (
            with_part(replace(DENSE, max_context=128), rope=SHARPENED, scale=SCALE),
            deepseek2(**YARN, rope__scaling__yarn_log_multiplier=0.07),
        ),
        (
            with_part(MINICPM3, latent=replace(LATENT, value_dim=16)),  # of which files say nothing
            of("minicpm3", attention__key_length=18, **SIZES | LORA),
        ),
    ],
)
def test_a_file_is_read_back(spec: ModelSpec, edit: Edit, tmp_path: Path) -> None:
    file = write_model(tmp_path / "m.gguf", spec, edit)
    found = spec_from_gguf(file)
    scales = [one.layers[0].attention.scale for one in (spec, found)]
    assert scales[0] == pytest.approx(scales[1], rel=1e-6)  # of a float32 in the file
    assert with_part(found, scale=1.0) == with_part(spec, scale=1.0)
    check_weights(spec, GGUFWeights(file, spec), "here")


def test_longrope_is_read_from_its_two_tensors(tmp_path: Path) -> None:
    factors = {"rope_factors_long.weight": 2.0, "rope_factors_short.weight": 1.0}
    given = [extra_tensor(name, np.full(4, x, np.float32)) for name, x in factors.items()]
    spec = with_part(MINICPM3, latent=replace(LATENT, value_dim=16))
    edit = of("minicpm3", attention__key_length=18, **SIZES | LORA)
    rope = spec_from_gguf(write_model(tmp_path / "m.gguf", spec, edits(edit, *given))).ropes()[0]
    assert (rope.kind, rope.dim, rope.freq_factors, rope.short_factors) == (
        "longrope",
        8,
        (2.0,) * 4,
        (1.0,) * 4,
    )


def test_of_a_file_that_has_kv_b_twice_the_whole_one_is_read(tmp_path: Path) -> None:
    def halves(writer: gguf.GGUFWriter) -> None:
        for n in range(2):
            writer.add_tensor(f"blk.{n}.attn_k_b.weight", np.zeros((4, 24, 10), np.float32))
            writer.add_tensor(f"blk.{n}.attn_v_b.weight", np.zeros((4, 12, 24), np.float32))

    file = write_model(tmp_path / "m.gguf", DENSE, edits(deepseek2(**SPLIT), halves))
    assert spec_from_gguf(file) == DENSE


@pytest.mark.parametrize(
    ("edit", "says"),
    [
        (deepseek2(attention__kv_lora_rank=0), "attention.kv_lora_rank"),
        (deepseek2(rope__dimension_count=18), "rope.dimension_count"),
        (deepseek2(**MOE, **GROUPS | {"expert_group_count": 3}), "expert_group_count"),
        (deepseek2(**MOE, **GROUPS | {"expert_group_used_count": 1}), "expert_group_used_count"),
        (deepseek2(**MOE | {"expert_used_count": 9}), "expert_used_count"),
        (deepseek2(attention__temperature_scale=0.1), "attention.temperature_scale"),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_wrong_metadata_is_refused_by_name(edit: Edit, says: str, tmp_path: Path) -> None:
    with pytest.raises(ModelError, match=rf"m\.gguf: .*{says}"):
        spec_from_gguf(write_model(tmp_path / "m.gguf", DENSE, edit))


def test_latents_of_other_architectures_are_refused(tmp_path: Path) -> None:
    edit = of("llama", attention__kv_lora_rank=24)
    with pytest.raises(ModelError, match=r"llama\.attention\.kv_lora_rank"):
        spec_from_gguf(write_model(tmp_path / "m.gguf", SPEC, edit))


def test_a_shape_that_does_not_fit_names_what_decides_it(tmp_path: Path) -> None:
    file = write_model(tmp_path / "m.gguf", DENSE, deepseek2(attention__key_length=20))
    spec = spec_from_gguf(file)
    with pytest.raises(ModelError, match=r"'layers\.0\.q_b' has shape \(72, 20\).*\(80, 20\)"):
        check_weights(spec, GGUFWeights(file, spec), "here")
