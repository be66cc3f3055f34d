"""A mixture of experts writes the same tokens however it is scheduled, on both decoders.

The rule has everything: groups, a correction, a shared expert behind a gate; one layer is dense.
"""

from __future__ import annotations

from dataclasses import replace
from functools import cache

import numpy as np
import pytest
import torch

from tests.equivalence.harness import Written, assert_same, make_core, run, small_spec
from tests.loud import Loud
from tests.support import narrow_isa
from twostroke.kernels import cpu
from twostroke.kernels.reference import Kernels
from twostroke.model.describe.spec import ExpertsSpec, MLPSpec, ModelSpec, RoutingSpec
from twostroke.model.native_decoder import NativeDecoder, Packing
from twostroke.model.torch.decoder import Decoder

RULE = RoutingSpec(3, "sigmoid", True, 1.5, True, True, 4, 2, "top2_sum")
EXPERTS = ExpertsSpec(12, MLPSpec(40, bias=True), RULE, MLPSpec(72), shared_gate=True)
PLAIN = ExpertsSpec(5, MLPSpec(50, "gelu_tanh", gated=False), RoutingSpec(2, normalised=False))
LIMITS = {"max_model_len": 256}
WAYS: list[dict[str, object]] = [
    {"max_num_batched_tokens": 24, "max_num_seqs": 8},
    {"max_num_batched_tokens": 7, "max_num_seqs": 1},
    {"prefix_caching": True},
    {"num_blocks": 14, "max_num_batched_tokens": 64, "lookahead": 0},
]


@cache
def mixed_spec() -> ModelSpec:
    plain = small_spec(windows=(None, 24, None))
    first, second, third = plain.layers
    layers = (replace(first, mlp=EXPERTS), second, replace(third, mlp=PLAIN))
    return replace(plain, layers=layers)


def prompts() -> list[list[int]]:
    random = np.random.default_rng(3)
    return [random.integers(0, 512, size).tolist() for size in (1, 5, 33, 100)]


def alone(decoder: Decoder | NativeDecoder) -> list[Written]:
    return [run(make_core(decoder, **LIMITS), [prompt])[0] for prompt in prompts()]


def reference() -> Decoder:
    spec = mixed_spec()
    return Decoder(spec, Loud(spec), torch.float32, torch.device("cpu"), 256, Kernels())


def native(exact: bool, quantization: str | None = None) -> NativeDecoder:
    spec, isa = mixed_spec(), narrow_isa()
    packing = Packing(spec, Loud(spec), "float32", quantization, isa)
    decoder = NativeDecoder(packing, 256, 2, 2, isa, exact)
    assert packing.num_bytes() <= decoder.model.num_bytes
    return decoder


needs_native = pytest.mark.skipif(
    not cpu.available(), reason="this installation was built without the native kernels"
)


def test_the_reference_writes_the_same_tokens_however_it_is_scheduled() -> None:
    decoder = reference()
    expected = alone(decoder)
    for way in WAYS:
        assert_same(expected, run(make_core(decoder, **LIMITS, **way), prompts()))


@needs_native
@pytest.mark.parametrize("quantization", [None, "int8", "int4"])
def test_native_kernels_give_the_same_bits_however_it_is_scheduled(
    quantization: str | None,
) -> None:
    decoder = native(exact=False, quantization=quantization)
    expected = [one.logprobs for one in alone(decoder)]
    for way in WAYS[:3]:
        got = run(make_core(decoder, **LIMITS, **way), prompts())
        assert [one.logprobs for one in got] == expected, way


@needs_native
def test_native_kernels_give_the_log_probabilities_of_the_reference() -> None:
    """Of the first token that each prompt is followed by: keys and values are fp16 in one."""
    for one, other in zip(alone(native(exact=True)), alone(reference()), strict=True):
        assert one.tokens[0] == other.tokens[0]
        assert one.logprobs[0].logprobs == pytest.approx(other.logprobs[0].logprobs, abs=0.02)
