"""The native decoder against the reference, step by step, over caches in fp16.

Both are given the same tokens, tables, slots and chunks, and every token's logits are compared.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any, ClassVar

import numpy as np
import pytest

from tests.kernels.native_pair import (
    FUZZ_SPECS,
    ISAS,
    TWO,
    Life,
    Pair,
    Step,
    heads,
)
from tests.kernels.reference_model import NUM_ROWS, Reference
from tests.loud import Loud
from tests.specs import changed
from tests.specs import make_spec as small_spec
from tests.support import narrow_isa
from twostroke.kernels import cpu
from twostroke.model.describe.spec import (
    NO_ROPE,
    AttentionSpec,
    LayerSpec,
    MLPSpec,
    ModelSpec,
    RopeSpec,
)
from twostroke.model.weights import ALL_ROWS, Floats

pytestmark = pytest.mark.skipif(
    not cpu.available(), reason="this installation was built without the native kernels"
)

# Every phase alone and with the other; contexts below and above the sizes at which work is split.
STEPS: dict[str, list[Step]] = {
    "one shot": [((), [(0, 0, 90)]), ((), [(1, 0, 1)]), ((), [(2, 0, 17)])],
    "chunks": [((), [(0, 0, 5)]), ((), [(0, 5, 16)]), ((), [(0, 21, 60)]), ((), [(0, 81, 1)])],
    "several chunks": [((), [(3, 0, 9), (1, 0, 33), (2, 0, 2)]), ((), [(1, 33, 40), (2, 2, 7)])],
    "decode": [((), [(0, 0, 62)]), *[([(0, 62 + n)], ()) for n in range(8)]],
    "decode several": [
        ((), [(0, 0, 70), (1, 0, 3), (2, 0, 140), (4, 0, 20), (5, 0, 64)]),
        ([(0, 70), (1, 3), (2, 140), (4, 20), (5, 64)], ()),
        ([(5, 65), (2, 141)], ()),
    ],
    "mixed": [
        ((), [(0, 0, 30), (1, 0, 100)]),
        ([(0, 30), (1, 100)], [(2, 0, 25)]),
        ([(1, 101)], [(2, 25, 50), (3, 0, 4)]),
        ([(0, 31), (2, 75), (1, 102), (3, 4)], [(4, 0, 1)]),
    ],
    "long": [((), [(0, 0, 150)]), ((), [(0, 150, 150)]), ([(0, 300)], ()), ([(0, 301)], ())],
}


def largest_difference(pair: Pair) -> float:
    return max(pair.difference(*step) for steps in STEPS.values() for step in steps)


# Within the steps queries have up to ten scales, which are far from 1 at the end.
SCALED = RopeSpec(1e4, 16, query_beta=0.8, query_span=32)
SPECS: dict[str, dict[str, Any]] = {
    "plain": {},
    "tied": {"tie_embeddings": True},
    "biases": {"qkv_bias": True, "output_bias": True, "mlp_bias": True},
    "qkv_bias_alone": {"qkv_bias": True},
    "qk_norm": {"qk_norm": "head"},
    "window_1": {"windows": (1,) * 2},
    "window_9": {"windows": (9,) * 2},
    "window_64": {"windows": (64,) * 2},
    "window_100": {"windows": (100,) * 2, "qk_norm": "head"},
    "some_windows": {"windows": (None, 24, 70)},
    "softcap": {"softcap": 1.5},
    "softcap_and_window": {"softcap": 0.7, "windows": (24,) * 2, "scale": 0.5},
    "gelu_tanh": {"activation": "gelu_tanh"},
    "gelu_tanh_inner_50": {"activation": "gelu_tanh", "intermediate_size": 50},
    "gelu": {"activation": "gelu"},
    "gelu_inner_50_without_a_gate": {"activation": "gelu", "gated": False, "intermediate_size": 50},
    "sinks": {"sinks": True},
    "sinks_and_some_windows": {"sinks": True, "windows": (24, None, 100), "softcap": 2.0},
    "sinks_head_dim_20": heads(6, 2, 20, sinks=True),
    "learned_positions": {"learned_positions": True, "rope": NO_ROPE},
    "head_bias": {"head_bias": True, "vocab_size": 301},
    "post_norm": {"post_norm": True},
    "post_norm_alone": {"pre_norm": False, "post_norm": True},
    "layer_norm": {"norm": "layer"},
    "layer_norm_bias": {"norm": "layer", "norm_bias": True},
    "layer_post_norm": {"norm": "layer", "norm_bias": True, "post_norm": True},
    "parallel": {"parallel": True},
    "parallel_two_norms": {"parallel": True, "two_norms": True, "norm": "layer"},
    "parallel_layer_norm": {"parallel": True, "norm": "layer", "residual_scale": 0.3},
    "no_gate": {"gated": False, "mlp_bias": True, "activation": "gelu_tanh"},
    "no_gate_inner_50": {"gated": False, "intermediate_size": 50},
    "residual_scale": {"residual_scale": 0.4},
    "residual_scale_after_norms": {"residual_scale": 0.4, "post_norm": True},
    "logit_scale": {"logit_scale": 0.3},
    "logit_scale_and_softcap": {"logit_scale": 0.3, "logit_softcap": 2.0},
    "no_rope": {"rope": NO_ROPE},
    "no_norm": {"pre_norm": False, "windows": TWO},
    "full_qk_norm": {"qk_norm": "full"},
    "full_qk_norm_of_one_head": heads(1, 1, 16, qk_norm="full"),
    "full_qk_norm_one_kv_head": heads(4, 1, 16, qk_norm="full"),
    "other_scale": {"scale": 0.15},
    "embed_scale": {"embed_scale": 8.0},
    "logit_softcap": {"logit_softcap": 2.0, "vocab_size": 301},
    "rope_over_half_the_head": {"rope": RopeSpec(1e4, 8)},
    "rope_yarn": {"rope": RopeSpec(1e4, 16, "yarn", 4.0, 32, attention_factor=1.2)},
    "scaled_queries": {"rope": SCALED},
    "scaled_queries_normed": {
        "rope": replace(SCALED, dim=8),
        "qk_norm": "head",
        "windows": (99,) * 2,
    },
    "scaled_queries_head_dim_20": heads(3, 1, 20, rope=replace(SCALED, dim=20)),
    "head_dim_32": heads(4, 2, 32),
    "head_dim_64": heads(2, 1, 64),
    "head_dim_80": heads(2, 2, 80),
    "head_dim_96": heads(2, 1, 96, qk_norm="head"),
    "head_dim_128": heads(2, 1, 128),
    "head_dim_20": heads(3, 1, 20),
    "head_dim_6": heads(4, 2, 6, rope=RopeSpec(1e4, 6)),
    **{f"groups_of_{n}": heads(2 * n, 2, 16) for n in range(1, 9)},
    "group_of_13": heads(13, 1, 16),
    **{f"inner_{n}": {"intermediate_size": n, "windows": TWO} for n in (1, 31, 33, 50, 95, 100)},
    "inner_50_biased": {"intermediate_size": 50, "mlp_bias": True, "windows": TWO},
    "hidden_72": {"hidden_size": 72, "windows": TWO},
    "hidden_50_vocabulary_301": {"hidden_size": 50, "vocab_size": 301, "windows": TWO},
}


GLOBAL = AttentionSpec(4, 2, 16, RopeSpec(1e6, 16, "linear", 8.0), 0.3)
LOCAL = replace(GLOBAL, rope=RopeSpec(1e4, 16), window=24)
GELU = MLPSpec(128, "gelu_tanh")


def of_layers(*layers: LayerSpec, **given: Any) -> ModelSpec:
    return ModelSpec("test", 96, 64, layers, 1e-5, 1024, **given)


# Layers that differ from each other, and all the rules of a family at once.
MIXED: dict[str, ModelSpec] = {
    "two_ropes": of_layers(*(LayerSpec(part, MLPSpec(96)) for part in (LOCAL, GLOBAL, LOCAL))),
    "three_kv_groups": of_layers(
        LayerSpec(GLOBAL, MLPSpec(96)),
        LayerSpec(AttentionSpec(4, 1, 32, RopeSpec(1e4, 32), 0.2, 20), MLPSpec(50)),
        LayerSpec(AttentionSpec(6, 3, 8, RopeSpec(1e4, 8), 0.5), MLPSpec(128)),
        LayerSpec(GLOBAL, MLPSpec(64)),
        LayerSpec(AttentionSpec(8, 1, 32, RopeSpec(1e4, 16), 0.2, 20), MLPSpec(32)),
    ),
    "as_gemma_2": of_layers(
        *(
            LayerSpec(replace(part, softcap=2.0), GELU, post_norm=True)
            for part in (LOCAL, GLOBAL, LOCAL)
        ),
        tie_embeddings=True,
        embed_scale=8.0,
        logit_softcap=3.0,
    ),
    "as_gemma_3": of_layers(
        *(
            LayerSpec(replace(part, qk_norm="head"), GELU, post_norm=True)
            for part in (LOCAL, LOCAL, GLOBAL)
        ),
        tie_embeddings=True,
        embed_scale=8.0,
    ),
    "as_olmo_2": of_layers(
        *(
            LayerSpec(replace(GLOBAL, qk_norm="full"), MLPSpec(96), pre_norm=False, post_norm=True)
            for _ in range(2)
        )
    ),
}


def spec_of(name: str) -> ModelSpec:
    return MIXED[name] if name in MIXED else small_spec(**SPECS[name])


NAMES = [*SPECS, *MIXED]


@pytest.mark.parametrize("isa", ISAS)
@pytest.mark.parametrize("name", NAMES)
def test_every_kind_of_model_gives_the_logits_of_the_reference(name: str, isa: str) -> None:
    assert_exact(Pair(spec_of(name), isa))


@pytest.mark.parametrize("isa", ISAS)
@pytest.mark.parametrize("block_size", [1, 7, 16, 32])
@pytest.mark.parametrize("window", [None, 24])
def test_every_block_size_gives_the_logits_of_the_reference(
    window: int | None, block_size: int, isa: str
) -> None:
    spec = small_spec(windows=(window,) * 2)
    assert_exact(Pair(spec, isa, block_size=block_size))


def assert_exact(pair: Pair) -> None:
    assert largest_difference(pair) <= pair.tolerance


def assert_near_the_reference(pair: Pair) -> None:
    """The mean error of every step stays within the bound of the instruction set's rounding."""
    for steps in STEPS.values():
        for step in steps:
            got, expected = pair.step(*step), pair.expected(*step)
            assert np.abs(got - expected).mean() <= pair.rounding_error(*step, expected)
            assert np.corrcoef(got.ravel(), expected.ravel())[0, 1] > 0.99


@pytest.mark.parametrize("isa", ISAS)
@pytest.mark.parametrize("name", NAMES)
def test_what_need_not_be_exact_stays_near_the_reference(name: str, isa: str) -> None:
    assert_near_the_reference(Pair(spec_of(name), isa, exact=False))


class Scaled(Loud):
    """Some of the matrices larger or smaller than others."""

    factors: ClassVar[dict[str, float]] = {}

    def floats(self, name: str, rows: slice = ALL_ROWS) -> Floats:
        factor = self.factors.get(name.rpartition(".")[2], 1.0)
        return super().floats(name, rows) * np.float32(factor)


class LargeValues(Scaled):
    factors: ClassVar = {"v": 3000.0}


class LargeKeys(Scaled):
    factors: ClassVar = {"q": 1 / 3000, "k": 3000.0}


@pytest.mark.parametrize("isa", ISAS)
@pytest.mark.parametrize("kind", [LargeValues, LargeKeys])
@pytest.mark.parametrize("name", ["head_dim_64", "window_9"])
def test_numbers_near_the_end_of_fp16_come_out_as_others(
    name: str, kind: type[Scaled], isa: str
) -> None:
    spec = spec_of(name)
    pair = Pair(spec, isa, exact=False, source=kind(spec))
    assert_near_the_reference(pair)
    largest = np.abs(pair.caches[0].view(np.float16)).max()
    assert 10_000 < largest < np.inf


def test_the_ways_to_compute_a_text_give_the_same_logits() -> None:
    """One shot, in chunks, and token by token, each in a row of its own."""
    pair = Pair(spec_of("some_windows"))
    pair.tokens[1:4] = pair.tokens[0]
    whole = pair.step((), [(0, 0, 200)])
    chunks = [pair.step((), [(1, start, 8)]) for start in range(0, 200, 8)]
    one_by_one = [pair.step([(2, n)]) for n in range(200)]
    assert np.abs(np.concatenate(chunks) - whole).max() <= pair.tolerance
    assert np.abs(np.concatenate(one_by_one) - whole).max() <= pair.tolerance


@pytest.mark.parametrize(
    "isa", [isa for isa in ISAS if not cpu.module().matrix_unit_min_tokens(isa)]
)
@pytest.mark.parametrize("name", ["window_9", "some_windows"])
def test_chunks_of_any_size_give_the_same_bits_over_a_window(name: str, isa: str) -> None:
    pair = Pair(spec_of(name), isa, exact=False)
    pair.tokens[1:] = pair.tokens[0]
    whole = pair.step((), [(0, 0, 200)])
    for size in (2, 7, 27, 64, 100):
        starts = range(0, 200, size)
        chunks = [pair.step((), [(1, at, min(size, 200 - at))]) for at in starts]
        assert np.array_equal(np.concatenate(chunks), whole), size


@pytest.mark.parametrize("isa", ISAS)
@pytest.mark.parametrize("threads", [(1, 1), (2, 3)])
@pytest.mark.parametrize("name", NAMES)
def test_tokens_that_are_wanted_alone_have_the_logits_of_the_reference(
    name: str, threads: tuple[int, int], isa: str
) -> None:
    """Their last layer is worked out without the others; what those store there is for later."""
    pair = Pair(spec_of(name), isa, threads=threads)
    steps: list[tuple[Any, Any, list[int]]] = [
        ((), [(0, 0, 40), (1, 0, 7), (2, 0, 90)], [39, 46]),
        ([(0, 40), (1, 7)], [(2, 90, 100), (3, 0, 1)], [0, 1, 102]),
        ([(0, 41)], [(1, 8, 5)], []),
        ([(0, 42), (3, 1)], [(1, 13, 3), (2, 190, 10)], [0, 1, 14]),
        ((), [(4, 0, 33)], [0, 5, 6, 7, 20, 21, 32]),
        ([(0, 43), (1, 16), (2, 200), (3, 2), (4, 33)], (), [0, 1, 2, 3, 4]),
    ]
    for slots, chunks, which in steps:
        got, expected = pair.step(slots, chunks, which), pair.expected(slots, chunks)[which]
        assert got.shape == expected.shape
        assert np.abs(got - expected).max(initial=0) <= pair.tolerance


@pytest.mark.parametrize("exact", [True, False], ids=["exact", "rounded"])
def test_a_token_that_is_wanted_has_the_same_bits_whoever_is_with_it(exact: bool) -> None:
    pair = Pair(spec_of("some_windows"), narrow_isa(), exact=exact)
    pair.step((), [(3, 0, 100)])
    alone = [pair.step((), [(0, 0, 40)], [39]), pair.step([(3, 100)])]
    together = pair.step([(3, 100)], [(0, 0, 40), (1, 0, 7), (2, 0, 90)], [0, 40, 47])
    assert np.array_equal(together[0], alone[1][0])
    assert np.array_equal(together[1], alone[0][0])


@pytest.mark.parametrize("exact", [True, False], ids=["exact", "rounded"])
@pytest.mark.parametrize("name", ["plain", "biases", "inner_50", "groups_of_5", "head_dim_20"])
def test_a_prompt_has_the_same_logits_to_the_bit_whoever_is_with_it(name: str, exact: bool) -> None:
    pair = Pair(spec_of(name), narrow_isa(), exact=exact)
    alone = [pair.step((), [(0, 0, 40)]), pair.step((), [(1, 0, 7)]), pair.step((), [(2, 0, 90)])]
    together = pair.step((), [(0, 0, 40), (1, 0, 7), (2, 0, 90)])
    assert np.array_equal(np.concatenate(alone), together)


# Sinks


class LargeSinks(Scaled):
    """A different sink for each head, from far below the scores to far above."""

    factors: ClassVar = {"sinks": 200.0}


@pytest.mark.parametrize("isa", ISAS)
@pytest.mark.parametrize("exact", [True, False], ids=["exact", "rounded"])
def test_each_head_has_its_own_sink_however_its_context_is_split(exact: bool, isa: str) -> None:
    model = small_spec(sinks=True, windows=(24, None, 100))
    source = LargeSinks(model)
    assert np.ptp(source.floats("layers.0.sinks")) > 5
    pair = Pair(model, isa, source=source, exact=exact, threads=(2, 3))
    if exact:
        assert_exact(pair)
    else:
        assert_near_the_reference(pair)
    pair.reference = Reference(changed(model, sinks=False), source)
    assert largest_difference(pair) > 5 * pair.tolerance


# Scales of queries


@pytest.mark.parametrize("isa", ISAS)
def test_scales_of_queries_that_are_left_out_or_one_position_late_are_noticed(isa: str) -> None:
    spec = spec_of("scaled_queries")
    for wrong in (replace(SCALED, query_beta=0.0), replace(SCALED, query_span=33)):
        pair = Pair(spec, isa)
        pair.reference = Reference(changed(spec, rope=wrong), Loud(spec))
        assert largest_difference(pair) > 5 * pair.tolerance


# Indices and positions


def test_tokens_after_an_eviction_have_an_index_below_their_position() -> None:
    """Blocks of the middle go: what follows moves forward in the cache, and keeps its angles."""
    for name in ("plain", "some_windows", "three_kv_groups", "as_gemma_3"):
        for isa in ISAS:
            pair = Pair(spec_of(name), isa, threads=(2, 2))
            assert pair.difference((), [(0, 0, 150), (1, 0, 40)]) <= pair.tolerance
            pair.evict(0, 2, 5)  # 48 tokens of 150
            steps: list[Step] = [
                ([(0, 150, 102)], ()),
                ([(0, 151, 103), (1, 40)], [(2, 0, 9)]),
                ((), [(0, 152, 30, 104)]),
                ([(1, 41)], [(0, 182, 7, 134)]),
                ([(0, 189, 141), (0, 190, 142), (0, 191, 143)], ()),
            ]
            for step in steps:
                assert pair.difference(*step) <= pair.tolerance, (name, isa, step)


def test_an_index_taken_for_a_position_is_told_apart() -> None:
    pair = Pair(spec_of("plain"))
    pair.difference((), [(0, 0, 150)])
    pair.evict(0, 2, 5)
    got, expected = pair.step([(0, 150, 102)]), pair.expected([(0, 102, 102)])
    assert np.abs(got - expected).max() > 5 * pair.tolerance


@pytest.mark.parametrize("isa", ISAS)
@pytest.mark.parametrize("threads", [(1, 1), (2, 3)])
@pytest.mark.parametrize("name", ["plain", "some_windows", "three_kv_groups", "full_qk_norm"])
def test_several_tokens_of_a_decode_row_see_each_other(
    name: str, threads: tuple[int, int], isa: str
) -> None:
    """A token and its drafts, in steps of few slots and of so many that each is a task."""
    pair = Pair(spec_of(name), isa, threads=threads)
    pair.tokens[1:] = pair.tokens[0]
    pair.step((), [(row, 0, 62) for row in range(NUM_ROWS)])
    pair.expected((), [(row, 0, 62) for row in range(NUM_ROWS)])
    drafts = [(0, 62 + n) for n in range(5)]
    few = pair.step(drafts)
    assert np.abs(few - pair.expected(drafts)).max() <= pair.tolerance
    many = [(row, 62 + n) for row in (1, 2, 3) for n in range(5)]
    assert pair.difference(many) <= pair.tolerance
    assert pair.difference([*many, (4, 62)], [(5, 62, 20)]) <= pair.tolerance
    one_by_one = np.concatenate([pair.step([(4, 62 + n)]) for n in range(5)])
    assert np.abs(one_by_one - few).max() <= pair.tolerance


# Threads

TEAMS = [(1, 1), (2, 2), (3, 3), (1, 3), (3, 1), (2, 5)]


@pytest.mark.parametrize("isa", ISAS)
@pytest.mark.parametrize("exact", [True, False], ids=["exact", "rounded"])
@pytest.mark.parametrize("name", ["biases", "some_windows", "inner_50", "as_gemma_2", "as_olmo_2"])
def test_any_number_of_threads_gives_the_same_bits(name: str, exact: bool, isa: str) -> None:
    """Contexts of at most 64 positions; longer ones are split between members, see below."""
    steps: list[Step] = [
        ((), [(0, 0, 62), (1, 0, 5)]),
        ([(0, 62), (1, 5)], [(2, 0, 200), (3, 0, 1)]),
        ([(0, 63), (1, 6), (3, 1)], ()),
        ([(3, 2)], ()),
    ]
    pairs = [Pair(spec_of(name), isa, threads=team, exact=exact) for team in TEAMS]
    for step in steps:
        first, *others = (pair.step(*step) for pair in pairs)
        for team, other in zip(TEAMS[1:], others, strict=True):
            assert np.array_equal(first, other), (team, step)


def test_threads_that_split_a_long_context_change_no_logit_by_more_than_rounding() -> None:
    pairs = [Pair(small_spec(), threads=team) for team in TEAMS]
    for step in [*STEPS["long"], *STEPS["decode several"]]:
        first, *others = (pair.step(*step) for pair in pairs)
        for other in others:
            assert np.abs(first - other).max() <= pairs[0].tolerance


def test_teams_of_many_models_come_and_go() -> None:
    expected = Pair(small_spec()).step((), [(0, 0, 20)])
    for _ in range(20):
        pair = Pair(small_spec(), threads=(2, 4))
        assert np.array_equal(pair.step((), [(0, 0, 20)]), expected)


@pytest.mark.parametrize("rounds", [500, pytest.param(10_000, marks=pytest.mark.full)])
def test_steps_of_few_and_of_many_threads_in_turn_all_finish(rounds: int) -> None:
    """Threads that a step leaves out wait for the step that needs them."""
    spec = small_spec(windows=(None,), hidden_size=32, intermediate_size=32, vocab_size=32)
    pair = Pair(spec, threads=(1, 3))
    prompt, token = pair.step((), [(0, 0, 3)]), pair.step([(0, 3)])
    for _ in range(rounds):
        assert np.array_equal(pair.step((), [(0, 0, 3)]), prompt)
        assert np.array_equal(pair.step([(0, 3)]), token)


# Negative controls


@dataclass(frozen=True)
class Mistake:
    name: str
    spec: dict[str, Any]


MISTAKES = [
    Mistake("window", {"windows": (25,) * 3}),
    Mistake("theta", {"rope": RopeSpec(9e3, 16), "windows": (24,) * 3}),
    Mistake("eps", {"norm_eps": 1e-2, "windows": (24,) * 3}),
    Mistake("softcap", {"softcap": 1.5, "windows": (24,) * 3}),
    Mistake("scale", {"scale": 0.3, "windows": (24,) * 3}),
    Mistake("activation", {"activation": "gelu_tanh", "windows": (24,) * 3}),
    Mistake("sinks", {"sinks": True, "windows": (24,) * 3}),
    Mistake("learned_positions", {"learned_positions": True, "windows": (24,) * 3}),
    Mistake("embed_scale", {"embed_scale": 8.0, "windows": (24,) * 3}),
    Mistake("logit_softcap", {"logit_softcap": 4.0, "windows": (24,) * 3}),
    Mistake("post_norm", {"post_norm": True, "windows": (24,) * 3}),
    Mistake("full_qk_norm", {"qk_norm": "full", "windows": (24,) * 3}),
]


@pytest.mark.parametrize("mistake", MISTAKES, ids=lambda mistake: mistake.name)
def test_a_model_that_differs_in_one_thing_is_told_apart(mistake: Mistake) -> None:
    pair, other = Pair(small_spec(windows=(24,) * 3)), Pair(small_spec(**mistake.spec))
    pair.reference = other.reference
    assert largest_difference(pair) > 5 * pair.tolerance


def test_a_wrong_block_in_a_table_is_told_apart() -> None:
    pair = Pair(small_spec())
    pair.step((), [(0, 0, 60)])
    expected = pair.step([(0, 60)])
    (table,) = pair.tables
    table[0, 1] = table[1, 1]
    assert np.abs(pair.step([(0, 60)]) - expected).max() > 5 * pair.tolerance


# Random steps


@pytest.mark.parametrize("isa", ISAS)
@pytest.mark.parametrize("number", range(len(FUZZ_SPECS)))
@pytest.mark.parametrize("block_size", [1, 5, 16])
def test_random_steps_give_the_logits_of_the_reference(
    block_size: int, number: int, isa: str
) -> None:
    seed = 100 * number + block_size
    pair = Pair(FUZZ_SPECS[number], isa, block_size=block_size, threads=(2, 3), seed=seed)
    life = Life(pair, np.random.default_rng(seed))
    for _ in range(40):
        assert pair.difference(*life.step()) <= pair.tolerance
