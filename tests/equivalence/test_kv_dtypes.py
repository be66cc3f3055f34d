"""The matrix with 8-bit KV caches: however a request is scheduled, it writes the same tokens.

Attention sees what is stored, and that is all it sees, so that chunks, prefix hits and preemption
change nothing but the order of sums: 2.6e-6 were found over the matrix. What that moves past the
middle between two 8-bit values moves by a whole step of the type; τ leaves room for some of those.
The native kernels may round attention of prefill and of decode differently. The tokens that a
preempted request had written are prefilled when it resumes: there the arithmetic is exact.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache

import pytest
import torch

from tests.equivalence.harness import LEAST_COMPARED, Written, make_core, run, small_spec
from tests.equivalence.test_window_matrix import mixed_spec
from tests.loud import Loud
from tests.support import narrow_isa
from twostroke.kernels import cpu
from twostroke.kernels.reference import Kernels
from twostroke.model.native_decoder import NativeDecoder, Packing
from twostroke.model.torch.decoder import Decoder

E4M3, E5M2, INT8 = torch.float8_e4m3fn, torch.float8_e5m2, torch.int8
TAU = 0.002
PROMPTS = [[(7 * n * n + 3 * n + size) % 512 for n in range(size)] for size in (5, 40, 90, 150)]
PROMPTS.append([*PROMPTS[-1][:140], 3, 1, 4])
OUTPUT = 16
WAYS = {
    "chunked": {"max_num_batched_tokens": 7, "max_num_seqs": 1},
    "mixed": {"max_num_batched_tokens": 24, "max_num_seqs": 8},
    "prefix hit": {"prefix_caching": True},
    "preempted": {"num_blocks": 22, "max_num_batched_tokens": 64, "lookahead": 0},
}


@cache
def decoder(name: str) -> Decoder | NativeDecoder:
    spec = mixed_spec("two groups") if name == "two groups" else small_spec(qk_norm="head")
    if name.startswith("native"):
        packing = Packing(spec, Loud(spec), "float32", None, narrow_isa())
        return NativeDecoder(packing, 1024, 1, 1, narrow_isa(), exact=name == "native, exact")
    return Decoder(spec, Loud(spec), torch.float32, torch.device("cpu"), 1024, Kernels())


@cache
def alone(name: str, kind: torch.dtype) -> list[Written]:
    core = make_core(decoder(name), kv_dtype=kind)
    return [run(core, [prompt], OUTPUT)[0] for prompt in PROMPTS]


def assert_same(expected: Sequence[Written], got: Sequence[Written], tau: float) -> None:
    """Until two really differ, which they may where the two best lay closer together than τ."""
    moved, compared, total = [0.0], 0, sum(len(one.tokens) for one in expected)
    for one, other in zip(expected, got, strict=True):
        for step, (token, its) in enumerate(zip(one.tokens, other.tokens, strict=True)):
            if token != its:
                assert one.gap(step) < tau, f"differs at a gap of {one.gap(step)}"
                break
            pair = (run.logprobs[step].logprobs[0] for run in (one, other))
            moved.append(abs(next(pair) - next(pair)))
            compared += 1
    assert max(moved) < tau / 2, f"moved by {max(moved)}"
    assert compared >= LEAST_COMPARED * total, f"only {compared} of {total} steps compared"


def written(name: str, kind: torch.dtype, way: str) -> list[Written]:
    core = make_core(decoder(name), kv_dtype=kind, **WAYS[way])
    got = run(core, PROMPTS, OUTPUT)
    if way == "prefix hit":
        got = run(core, PROMPTS, OUTPUT)
        assert max(one.num_cached for one in got) >= 128
    if way == "preempted":
        assert sum(one.num_preempted for one in got) > 0
    return got


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("kind", [E4M3, E5M2, INT8], ids=str)
def test_every_way_writes_the_same_tokens(kind: torch.dtype, way: str) -> None:
    assert_same(alone("two groups", kind), written("two groups", kind, way), TAU)


@pytest.mark.skipif(not cpu.available(), reason="built without the native kernels")
@pytest.mark.parametrize("way", WAYS)
def test_so_do_the_native_kernels(way: str) -> None:
    name = "native, exact" if way == "preempted" else "native"
    assert_same(alone(name, INT8), written(name, INT8, way), TAU)


@pytest.mark.parametrize("kind", [E4M3, INT8], ids=str)
def test_what_was_not_rounded_when_it_was_seen_is_noticed(kind: torch.dtype) -> None:
    """Negative control: a cache in fp32 is what a prompt would see that does not read back."""
    core = make_core(decoder("two groups"))
    other = [run(core, [prompt], OUTPUT)[0] for prompt in PROMPTS]
    with pytest.raises(AssertionError, match=r"differs at|moved by"):
        assert_same(alone("two groups", kind), other, TAU)
