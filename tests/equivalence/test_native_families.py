"""Every family, variant and block type gives the reference's log-probabilities natively, too.

That the reference gives those of transformers is in `test_families.py` and `test_gguf_families.py`,
whose models these are. Both keep keys and values as halves here.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from gguf import GGMLQuantizationType as Type

from tests.equivalence import test_families as families
from tests.equivalence import test_gguf_families as gguf_families
from tests.equivalence.rows import Written, random_model, random_prompts, write_with_ours
from twostroke.kernels import cpu

pytestmark = pytest.mark.skipif(
    not cpu.available(), reason="this installation was built without the native kernels"
)

# On log-probabilities: twice the largest difference found, 3.0e-3. Sums are taken in another order,
# and a key or a value that this moves past the middle between two halves moves by one part in 2048.
TOLERANCE = 6e-3
# What a variant is about changes some log-probability by this, or its test would show nothing.
VISIBLE = 0.2

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


KINDS = [("llama", type) for type in gguf_families.BLOCK_TYPES]
KINDS += [(family, type) for family in ("qwen2", "qwen3") for type in (Type.Q4_0, Type.Q8_0)]


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
