"""Every family, variant and block type gives the reference's log-probabilities natively, too.

That the reference gives those of transformers is in `test_families.py` and `test_gguf_families.py`,
whose models these are. Both keep keys and values as halves here.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from gguf import GGMLQuantizationType as Type
from transformers import DeepseekV2Config, DeepseekV3Config

from tests.equivalence import test_families as families
from tests.equivalence import test_gguf_families as gguf_families
from tests.equivalence.rows import Written, random_model, random_prompts, write_with_ours
from twostroke import LLM
from twostroke.exec.native import NativeExecutor
from twostroke.kernels import cpu
from twostroke.model.load import find_model
from twostroke.model.native_decoder import Packing
from twostroke.model.opened import open_model

pytestmark = pytest.mark.skipif(
    not cpu.available(), reason="this installation was built without the native kernels"
)

# On log-probabilities: twice the largest difference found, 8.8e-3 (AVX2; 3.0e-3 on Arm). Sums are
# taken in another order, and a key or a value that this moves past the middle between two halves
# moves by one part in 2048.
TOLERANCE = 1.8e-2
# What a variant is about changes some log-probability by this, or its test would show nothing.
VISIBLE = 0.2

# The same with activations of 8 bits, on the prompt: twice the largest found.
ROUNDED = 0.8

NATIVE = {"kernels": "native", "exact": True, "threads": 2}
REFERENCE = {"kernels": "reference", "kv_cache_dtype": "float16"}


def largest_difference(ours: list[Written], reference: list[Written]) -> float:
    """Up to the first token that differs, which it may where two are as good."""
    largest, compared = 0.0, 0
    for one, other in zip(ours, reference, strict=True):
        pairs = zip(one.tokens, other.tokens, strict=True)
        same = next((n for n, (a, b) in enumerate(pairs) if a != b), len(one.rows))
        assert same >= len(one.prompt)
        largest = max(largest, (one.rows[:same] - other.rows[:same]).abs().max().item())
        compared += same
    assert compared >= 0.9 * sum(len(one.rows) for one in ours)
    return largest


def largest_prompt_difference(ours: list[Written], reference: list[Written]) -> float:
    pairs = zip(ours, reference, strict=True)
    return max(
        (one.rows[: len(one.prompt) - 1] - other.rows[: len(one.prompt) - 1]).abs().max().item()
        for one, other in pairs
    )


def write(path: Path, module: Any, **settings: Any) -> list[Written]:
    prompts = random_prompts(module.PROMPT_LENGTHS, module.VOCAB)
    return write_with_ours(path, prompts, module.MAX_TOKENS, module.VOCAB, **settings)


@pytest.mark.parametrize("variant", families.VARIANTS, ids=lambda variant: variant.name)
def test_every_variant_gives_the_log_probabilities_of_the_reference(
    variant: families.Variant, tmp_path: Path
) -> None:
    model = random_model(variant.described())
    model.save_pretrained(tmp_path)
    expected = write(tmp_path, families, **REFERENCE, **families.ONE_STEP)
    for steps in (families.ONE_STEP, families.CHUNKS):
        assert largest_difference(write(tmp_path, families, **NATIVE, **steps), expected) <= (
            TOLERANCE
        )


@pytest.mark.parametrize("name", ["deepseek_v2_lite", "deepseek_v3", "minicpm3"])
def test_a_cached_prefix_of_latents_gives_the_log_probabilities_of_transformers(
    name: str, tmp_path: Path
) -> None:
    (variant,) = (variant for variant in families.VARIANTS if variant.name == name)
    theirs = random_model(variant.described())
    theirs.save_pretrained(tmp_path)
    found = families.cached_prefix_difference(tmp_path, theirs, block_size=4, **NATIVE)
    assert found <= families.NATIVE_TOLERANCE


KINDS = [("llama", type) for type in gguf_families.BLOCK_TYPES]
OTHERS = ("qwen2", "qwen3", "gemma2", "gemma3", "olmo2", "phi3")
KINDS += [(family, type) for family in OTHERS for type in (Type.Q4_0, Type.Q8_0)]
KINDS += [(family, Type.Q4_0) for family in gguf_families.NEW]
KINDS += [
    ("llama", type) for type in (Type.IQ4_NL, Type.IQ4_XS, Type.MXFP4, Type.IQ2_S, Type.IQ1_S)
]


@pytest.mark.parametrize(("family", "type"), KINDS, ids=str)
def test_every_block_type_gives_the_log_probabilities_of_the_reference(
    family: str, type: Type, tmp_path: Path
) -> None:
    path = tmp_path / "model.gguf"
    gguf_families.write_gguf(path, random_model(gguf_families.FAMILIES[family]), type)
    steps = gguf_families.CHUNKS
    expected = write(path, gguf_families, **REFERENCE, **steps)
    got = write(path, gguf_families, **NATIVE, **steps)
    assert largest_difference(got, expected) <= TOLERANCE


# As llama.cpp makes them: values, some of what leads out of the MLP, and the head in finer types.
Q4_K_M = {
    "blk.0.attn_v.weight": Type.Q6_K,
    "blk.0.ffn_down.weight": Type.Q6_K,
    "output.weight": Type.Q6_K,
}
MIXTURES = {
    "q4_k_m": (Type.Q4_K, Q4_K_M),
    "q5_k_m": (Type.Q5_K, Q4_K_M),
    "q3_k_m": (
        Type.Q3_K,
        {
            "blk.0.attn_v.weight": Type.Q5_K,
            "blk.1.attn_v.weight": Type.Q4_K,
            "blk.0.attn_output.weight": Type.Q4_K,
            "blk.1.ffn_down.weight": Type.Q5_K,
            "output.weight": Type.Q6_K,
        },
    ),
    "q2_k": (Type.Q2_K, {f"blk.{n}.attn_v.weight": Type.Q3_K for n in range(2)}),
    "iq4_xs": (Type.IQ4_XS, {"blk.0.attn_v.weight": Type.Q5_K, "output.weight": Type.Q6_K}),
    "iq2_s": (
        Type.IQ2_S,
        {
            "blk.0.attn_q.weight": Type.IQ2_XXS,
            "blk.0.attn_v.weight": Type.Q4_K,
            "blk.1.ffn_gate.weight": Type.IQ3_XXS,
            "blk.1.ffn_down.weight": Type.IQ3_S,
        },
    ),
    "plain": (
        Type.Q4_0,
        {
            "blk.0.attn_k.weight": Type.Q8_0,
            "blk.0.ffn_up.weight": Type.Q5_1,
            "blk.1.attn_v.weight": Type.Q6_K,
            "blk.1.ffn_gate.weight": Type.Q4_1,
        },
    ),
    "one_matrix_in_floats": (Type.Q4_K, {"blk.0.attn_v.weight": Type.F16}),
}


@pytest.mark.parametrize("name", MIXTURES)
def test_parts_of_different_types_give_the_log_probabilities_of_the_reference(
    name: str, tmp_path: Path
) -> None:
    path = tmp_path / "model.gguf"
    type, others = MIXTURES[name]
    gguf_families.write_gguf(
        path, random_model(gguf_families.FAMILIES["llama"]), type, others=others
    )
    steps = gguf_families.CHUNKS
    expected = write(path, gguf_families, **REFERENCE, **steps)
    got = write(path, gguf_families, **NATIVE, **steps)
    assert largest_difference(got, expected) <= TOLERANCE
    rounded = write(path, gguf_families, **NATIVE | {"exact": False}, **steps)
    assert TOLERANCE < largest_prompt_difference(rounded, expected) <= ROUNDED


# What makes keys and values of latents. MLPs are dense here: a router that rounding moves past the
# middle between two experts chooses the other.
DENSE = gguf_families.DEEPSEEK | {"first_k_dense_replace": 2}
V3 = DeepseekV3Config(**DENSE, rope_parameters=gguf_families.MSCALE)
LITE = DeepseekV2Config(**DENSE | {"q_lora_rank": None}, topk_method="greedy")
MINICPM3 = gguf_families.FAMILIES["minicpm3"]
EXPANDING = {
    "in_two_types": (V3, {"attn_k_b": Type.Q8_0, "attn_v_b": Type.Q5_1}),
    "halves_and_floats": (V3, {"attn_k_b": Type.F16, "attn_v_b": Type.F32}),
    "whole": (LITE, {"attn_kv_b": Type.Q8_0}),
    "in_bfloat16": (MINICPM3, {"attn_kv_b": Type.BF16}),
}


@pytest.mark.parametrize("name", EXPANDING)
def test_what_expands_latents_may_be_of_any_type(name: str, tmp_path: Path) -> None:
    config, types = EXPANDING[name]
    path = tmp_path / "model.gguf"
    others = {f"blk.{n}.{part}.weight": type for part, type in types.items() for n in range(2)}
    gguf_families.write_gguf(path, random_model(config), Type.Q4_0, others=others)
    steps = gguf_families.CHUNKS
    expected = write(path, gguf_families, **REFERENCE, **steps)
    got = write(path, gguf_families, **NATIVE, **steps)
    assert largest_difference(got, expected) <= TOLERANCE
    rounded = write(path, gguf_families, **NATIVE | {"exact": False}, **steps)
    assert TOLERANCE < largest_prompt_difference(rounded, expected) <= ROUNDED


# Bytes of 32 weights. (Where halves are slow to read, 4-bit types have floats: 24.)
PACKED_BYTES = {Type.Q4_0: 20, Type.Q4_1: 20, Type.Q4_K: 24, Type.Q5_0: 34, Type.Q8_0: 34}
PACKED_BYTES |= {Type.Q5_1: 40, Type.Q5_K: 40, Type.Q3_K: 40, Type.Q6_K: 40, Type.Q2_K: 48}
PACKED_BYTES |= dict.fromkeys(gguf_families.LATER_TYPES, 20)
PACKED_BYTES |= dict.fromkeys((Type.IQ2_XS, Type.IQ2_S, Type.IQ1_M), 24)


@pytest.mark.parametrize("type", PACKED_BYTES, ids=lambda type: type.name)
def test_every_packed_type_stays_packed_in_memory(type: Type, tmp_path: Path) -> None:
    path = tmp_path / "model.gguf"
    gguf_families.write_gguf(path, random_model(gguf_families.FAMILIES["llama"]), type)
    planned, held, weights = memory_of(path)
    expected = PACKED_BYTES[type] / 32 * weights
    floats_for_halves = 24 / 32 * weights if type in (Type.Q4_0, Type.Q4_1) else expected
    assert held in (expected, floats_for_halves)
    assert planned == pytest.approx(held, abs=1)


def test_a_mixture_takes_the_memory_of_the_smallest_format_that_holds_its_parts(
    tmp_path: Path,
) -> None:
    path = tmp_path / "model.gguf"
    type, others = MIXTURES["q4_k_m"]
    gguf_families.write_gguf(
        path, random_model(gguf_families.FAMILIES["llama"]), type, others=others
    )
    planned, held, weights = memory_of(path)
    vocab, hidden, inner = gguf_families.VOCAB, 256, 512
    merged, down = 2 * hidden * hidden, hidden * inner  # q, k and v of the first layer
    in_q6_k = down + vocab * hidden
    expected = (24 * (weights - merged - in_q6_k) + 48 * merged + 40 * in_q6_k) / 32
    assert held == expected
    assert planned == pytest.approx(held, abs=1)


def memory_of(path: Path) -> tuple[int, int, int]:
    """Bytes of the matrices as planned and as held, and how many weights they have."""
    llm = LLM(str(path), skip_tokenizer_init=True, device="cpu", num_gpu_blocks_override=8)
    executor = llm.engine.core._executor
    assert isinstance(executor, NativeExecutor)
    config = llm.engine.config
    opened = open_model(config, find_model(config), "cpu")
    packing = Packing(opened.spec, opened.weights, opened.dtype, None)
    shapes = opened.spec.weight_shapes().values()
    weights = sum(shape[0] * shape[1] for shape in shapes if len(shape) == 2)
    return packing.num_bytes(), executor._decoder.model.num_bytes, weights


@pytest.mark.parametrize("variant", gguf_families.VARIANTS, ids=lambda variant: variant.name)
def test_what_a_file_says_of_its_model_is_what_runs(
    variant: gguf_families.Variant, tmp_path: Path
) -> None:
    path = tmp_path / "model.gguf"
    config = variant.family(**gguf_families.SIZES | variant.config)
    gguf_families.write_gguf(path, random_model(config), Type.Q8_0, variant.edit)
    steps = gguf_families.CHUNKS
    expected = write(path, gguf_families, **REFERENCE, **steps)
    got = write(path, gguf_families, **NATIVE, **steps)
    assert largest_difference(got, expected) <= TOLERANCE


def test_another_variant_is_told_apart(tmp_path: Path) -> None:
    """Negative control: a window of one position more."""
    (variant,) = (one for one in families.VARIANTS if one.name == "mistral_window")
    model = random_model(variant.described())
    model.save_pretrained(tmp_path / "right")
    model.config.sliding_window += 1
    model.save_pretrained(tmp_path / "wrong")
    steps = families.ONE_STEP
    expected = write(tmp_path / "right", families, **REFERENCE, **steps)
    got = write(tmp_path / "wrong", families, **NATIVE, **steps)
    rows = [(one.rows, other.rows) for one, other in zip(got, expected, strict=True)]
    prompt = families.PROMPT_LENGTHS[-1]
    assert (rows[-1][0][:prompt] - rows[-1][1][:prompt]).abs().max() > VISIBLE
