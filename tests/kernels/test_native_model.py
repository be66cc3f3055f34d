"""The native decoder against the reference, step by step, over the same cache of halves.

Both are given the same tokens, tables, slots and chunks, and every token's logits are compared.
Then steps that ask for what is not there: each is refused, and the next one is right.
"""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
import torch

from tests.equivalence.harness import Loud, narrow_isa, small_spec
from twostroke.exec.inputs import build_inputs
from twostroke.exec.tensor_rows import TensorRows
from twostroke.kernels import cpu, reference
from twostroke.kv.halves import HalfPool
from twostroke.kv.pool import KVPool
from twostroke.model.decoder import Decoder
from twostroke.model.native import NativeDecoder, Packing
from twostroke.model.spec import LayerSpec, ModelSpec, RopeSpec
from twostroke.plan import Chunk, PhaseWork, Slot, StepPlan

pytestmark = pytest.mark.skipif(
    not cpu.available(), reason="this installation was built without the native kernels"
)

ISAS = cpu.module().isas() if cpu.available() else []
CPU = torch.device("cpu")
MAX_LEN = 320
NUM_ROWS = 6

# On logits, whose standard deviation is about 1.5: twice the largest difference found, 3.8e-3. Sums
# are taken in another order, and a key or a value that this moves past the middle between two
# halves moves by one part in 2048.
TOLERANCE = 8e-3

Logits = npt.NDArray[np.float32]
Step = tuple[Sequence[tuple[int, int]], Sequence[tuple[int, int, int]]]  # slots, chunks


class Pair:
    """The native decoder and the reference, each with a cache of its own."""

    def __init__(
        self,
        spec: ModelSpec,
        isa: str = "auto",
        *,
        block_size: int = 16,
        threads: tuple[int, int] = (1, 1),
        exact: bool = True,
        seed: int = 0,
    ) -> None:
        self.spec, source = spec, Loud(spec)
        packing = Packing(spec, source, "float32", None)
        self.native = NativeDecoder(packing, MAX_LEN, *threads, isa, exact)
        self.reference = Decoder(spec, source, torch.float32, CPU, MAX_LEN, reference)
        per_row = -(-MAX_LEN // block_size)
        self.num_blocks = NUM_ROWS * per_row
        self.cache = HalfPool(spec, self.num_blocks, block_size).data
        self.pool = KVPool(spec, self.num_blocks, block_size, torch.float16, CPU)
        self.state = TensorRows(NUM_ROWS, MAX_LEN, block_size, 1, CPU)
        random = np.random.default_rng(seed)
        self.tokens, self.tables = self.state.tokens.numpy(), self.state.tables[0].numpy()
        self.tokens[:] = random.integers(0, spec.vocab_size, self.tokens.shape)
        # Every row has blocks of its own, in no order.
        self.tables[:] = 1 + random.permutation(self.num_blocks).reshape(self.tables.shape)

    def step(self, slots: Any = (), chunks: Any = ()) -> Logits:
        """Logits of every token of the step, by the native decoder."""
        count = len(slots) + sum(size for _, _, size in chunks)
        logits = self.native.forward(
            self.tokens,
            self.tables,
            self.cache,
            np.array(slots, np.int32).reshape(-1, 2),
            np.array(chunks, np.int32).reshape(-1, 3),
            np.arange(count, dtype=np.int32),
        )
        return logits.copy()

    @torch.inference_mode()
    def expected(self, slots: Any = (), chunks: Any = ()) -> Logits:
        work = PhaseWork()
        prefill = tuple(Chunk(*chunk, False) for chunk in chunks)
        decode = tuple(Slot(*slot) for slot in slots)
        plan = StepPlan(0, (), (), (), (), prefill, decode, work, work)
        inputs = build_inputs(plan, self.state)
        return self.reference.head(self.reference.forward(inputs, self.pool)).numpy()

    def difference(self, slots: Any = (), chunks: Any = ()) -> float:
        got, expected = self.step(slots, chunks), self.expected(slots, chunks)
        assert np.isfinite(got).all()
        return float(np.abs(got - expected).max())


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


def heads(num_heads: int, num_kv_heads: int, head_dim: int, **more: Any) -> dict[str, Any]:
    rope = RopeSpec(1e4, head_dim)
    common = {"num_heads": num_heads, "num_kv_heads": num_kv_heads, "head_dim": head_dim}
    return common | {"rope": rope, "layers": (LayerSpec(),) * 2} | more


TWO = (LayerSpec(),) * 2
SPECS: dict[str, dict[str, Any]] = {
    "plain": {},
    "tied": {"tie_embeddings": True},
    "biases": {"qkv_bias": True, "output_bias": True, "mlp_bias": True},
    "qkv_bias_alone": {"qkv_bias": True},
    "qk_norm": {"qk_norm": True},
    "window_1": {"layers": (LayerSpec(1),) * 2},
    "window_9": {"layers": (LayerSpec(9),) * 2},
    "window_64": {"layers": (LayerSpec(64),) * 2},
    "window_100": {"layers": (LayerSpec(100),) * 2, "qk_norm": True},
    "some_windows": {"layers": (LayerSpec(), LayerSpec(24), LayerSpec(70))},
    "rope_over_half_the_head": {"rope": RopeSpec(1e4, 8)},
    "rope_yarn": {"rope": RopeSpec(1e4, 16, "yarn", 4.0, 32, attention_factor=1.2)},
    "head_dim_32": heads(4, 2, 32),
    "head_dim_64": heads(2, 1, 64),
    "head_dim_80": heads(2, 2, 80),
    "head_dim_96": heads(2, 1, 96, qk_norm=True),
    "head_dim_128": heads(2, 1, 128),
    "head_dim_20": heads(3, 1, 20),
    "head_dim_6": heads(4, 2, 6, rope=RopeSpec(1e4, 6)),
    **{f"groups_of_{n}": heads(2 * n, 2, 16) for n in range(1, 9)},
    "group_of_13": heads(13, 1, 16),
    **{f"inner_{n}": {"intermediate_size": n, "layers": TWO} for n in (1, 31, 33, 50, 95, 100)},
    "inner_50_biased": {"intermediate_size": 50, "mlp_bias": True, "layers": TWO},
    "hidden_72": {"hidden_size": 72, "layers": TWO},
    "hidden_50_vocabulary_301": {"hidden_size": 50, "vocab_size": 301, "layers": TWO},
}


@pytest.mark.parametrize("isa", ISAS)
@pytest.mark.parametrize("name", SPECS)
def test_every_kind_of_model_gives_the_logits_of_the_reference(name: str, isa: str) -> None:
    assert largest_difference(Pair(small_spec(**SPECS[name]), isa)) <= TOLERANCE


@pytest.mark.parametrize("isa", ISAS)
@pytest.mark.parametrize("block_size", [1, 7, 16, 32])
@pytest.mark.parametrize("window", [None, 24])
def test_every_block_size_gives_the_logits_of_the_reference(
    window: int | None, block_size: int, isa: str
) -> None:
    spec = small_spec(layers=(LayerSpec(window),) * 2)
    assert largest_difference(Pair(spec, isa, block_size=block_size)) <= TOLERANCE


@pytest.mark.parametrize("isa", ISAS)
@pytest.mark.parametrize("name", ["plain", "biases", "window_9", "groups_of_3", "inner_50"])
def test_rounded_activations_stay_near_the_reference(name: str, isa: str) -> None:
    """8 bits an activation: a logit moves by a few hundredths of their standard deviation."""
    pair = Pair(small_spec(**SPECS[name]), isa, exact=False)
    for steps in STEPS.values():
        for step in steps:
            got, expected = pair.step(*step), pair.expected(*step)
            assert np.abs(got - expected).mean() < 0.1 * expected.std()
            assert np.corrcoef(got.ravel(), expected.ravel())[0, 1] > 0.99


def test_the_ways_to_compute_a_text_give_the_same_logits() -> None:
    """One shot, in chunks, and token by token, each in a row of its own."""
    pair = Pair(small_spec(**SPECS["some_windows"]))
    pair.tokens[1:4] = pair.tokens[0]
    whole = pair.step((), [(0, 0, 200)])
    chunks = [pair.step((), [(1, start, 8)]) for start in range(0, 200, 8)]
    one_by_one = [pair.step([(2, n)]) for n in range(200)]
    assert np.abs(np.concatenate(chunks) - whole).max() <= TOLERANCE
    assert np.abs(np.concatenate(one_by_one) - whole).max() <= TOLERANCE


@pytest.mark.parametrize("exact", [True, False], ids=["exact", "rounded"])
@pytest.mark.parametrize("name", ["plain", "biases", "inner_50", "groups_of_5", "head_dim_20"])
def test_a_prompt_has_the_same_logits_to_the_bit_whoever_is_with_it(name: str, exact: bool) -> None:
    pair = Pair(small_spec(**SPECS[name]), narrow_isa(), exact=exact)
    alone = [pair.step((), [(0, 0, 40)]), pair.step((), [(1, 0, 7)]), pair.step((), [(2, 0, 90)])]
    together = pair.step((), [(0, 0, 40), (1, 0, 7), (2, 0, 90)])
    assert np.array_equal(np.concatenate(alone), together)


# Threads

TEAMS = [(1, 1), (2, 2), (3, 3), (1, 3), (3, 1), (2, 5)]


@pytest.mark.parametrize("isa", ISAS)
@pytest.mark.parametrize("exact", [True, False], ids=["exact", "rounded"])
@pytest.mark.parametrize("name", ["biases", "some_windows", "inner_50", "head_dim_20"])
def test_any_number_of_threads_gives_the_same_bits(name: str, exact: bool, isa: str) -> None:
    """Contexts of at most 64 positions; longer ones are split between members, see below."""
    steps: list[Step] = [
        ((), [(0, 0, 62), (1, 0, 5)]),
        ([(0, 62), (1, 5)], [(2, 0, 200), (3, 0, 1)]),
        ([(0, 63), (1, 6), (3, 1)], ()),
        ([(3, 2)], ()),
    ]
    pairs = [Pair(small_spec(**SPECS[name]), isa, threads=team, exact=exact) for team in TEAMS]
    for step in steps:
        first, *others = (pair.step(*step) for pair in pairs)
        for team, other in zip(TEAMS[1:], others, strict=True):
            assert np.array_equal(first, other), (team, step)


def test_threads_that_split_a_long_context_change_no_logit_by_more_than_rounding() -> None:
    pairs = [Pair(small_spec(), threads=team) for team in TEAMS]
    for step in [*STEPS["long"], *STEPS["decode several"]]:
        first, *others = (pair.step(*step) for pair in pairs)
        for other in others:
            assert np.abs(first - other).max() <= TOLERANCE


def test_teams_of_many_models_come_and_go() -> None:
    expected = Pair(small_spec()).step((), [(0, 0, 20)])
    for _ in range(20):
        pair = Pair(small_spec(), threads=(2, 4))
        assert np.array_equal(pair.step((), [(0, 0, 20)]), expected)


def test_steps_of_few_and_of_many_threads_in_turn_all_finish() -> None:
    """Members that a step leaves out wait for the one that needs them, ten thousand times."""
    spec = small_spec(layers=(LayerSpec(),), hidden_size=32, intermediate_size=32, vocab_size=32)
    pair = Pair(spec, threads=(1, 3))
    prompt, token = pair.step((), [(0, 0, 3)]), pair.step([(0, 3)])
    for _ in range(10_000):
        assert np.array_equal(pair.step((), [(0, 0, 3)]), prompt)
        assert np.array_equal(pair.step([(0, 3)]), token)


# Negative controls


@dataclass(frozen=True)
class Mistake:
    name: str
    spec: dict[str, Any]


MISTAKES = [
    Mistake("window", {"layers": (LayerSpec(25),) * 3}),
    Mistake("theta", {"rope": RopeSpec(9e3, 16), "layers": (LayerSpec(24),) * 3}),
    Mistake("eps", {"norm_eps": 1e-2, "layers": (LayerSpec(24),) * 3}),
]


@pytest.mark.parametrize("mistake", MISTAKES, ids=lambda mistake: mistake.name)
def test_a_model_that_differs_in_one_thing_is_told_apart(mistake: Mistake) -> None:
    pair, other = Pair(small_spec(layers=(LayerSpec(24),) * 3)), Pair(small_spec(**mistake.spec))
    pair.reference = other.reference
    assert largest_difference(pair) > 5 * TOLERANCE


def test_a_wrong_block_in_a_table_is_told_apart() -> None:
    pair = Pair(small_spec())
    pair.step((), [(0, 0, 60)])
    expected = pair.step([(0, 60)])
    pair.tables[0, 1] = pair.tables[1, 1]
    assert np.abs(pair.step([(0, 60)]) - expected).max() > 5 * TOLERANCE


# Random steps, right and wrong

FUZZ_SPECS = [
    small_spec(layers=TWO, vocab_size=64),
    small_spec(layers=(LayerSpec(11), LayerSpec()), vocab_size=64, intermediate_size=50),
    small_spec(**heads(6, 2, 24, vocab_size=64, qk_norm=True)),
]


class Life:
    """Rows that grow by random steps, in blocks that may be shared where nothing is written."""

    def __init__(self, pair: Pair, random: np.random.Generator) -> None:
        self.pair, self.random = pair, random
        self.lengths = [0] * NUM_ROWS

    def step(self) -> Step:
        slots, chunks = [], []
        rows = self.random.permutation(NUM_ROWS)[: self.random.integers(1, NUM_ROWS + 1)]
        for row in map(int, rows):
            done = self.lengths[row]
            if done > 250:
                done = self.lengths[row] = 0
            if done and self.random.random() < 0.6:
                slots.append((row, done))
                self.lengths[row] += 1
            else:
                size = int(self.random.choice([1, 2, 3, 8, 15, 16, 17, 40]))
                chunks.append((row, done, size))
                self.lengths[row] += size
        return slots, chunks


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
        assert pair.difference(*life.step()) <= TOLERANCE


HUGE = 2**31 - 1


def wrong_steps(pair: Pair, random: np.random.Generator) -> list[tuple[str, dict[str, Any]]]:
    """What forward is given, and how its refusal should read."""
    spec, tokens, tables = pair.spec, pair.tokens, pair.tables
    cache = pair.cache
    layers, _, blocks, size, kv, dim = cache.shape
    row, at = int(random.integers(NUM_ROWS)), int(random.integers(1, 200))

    def changed(array: npt.NDArray[np.int32], where: Any, value: int) -> npt.NDArray[np.int32]:
        array = array.copy()
        array[where] = value
        return array

    def slots(*given: tuple[int, ...]) -> dict[str, Any]:
        return {"slots": np.array(given, np.int32)}

    def chunks(*given: tuple[int, ...]) -> dict[str, Any]:
        return {"chunks": np.array(given, np.int32)}

    def caches(*shape: int) -> dict[str, Any]:
        return {"cache": np.zeros(shape, np.uint16)} | slots((row, 0))

    def logits_of(*which: int) -> dict[str, Any]:
        out = np.zeros((len(which), spec.vocab_size), np.float32)
        return {"which": np.array(which, np.int32), "out": out}

    far = int(random.integers(NUM_ROWS, HUGE))
    beyond = int(random.integers(MAX_LEN, HUGE))
    block, offset = at // size, {"tokens": changed(tokens, (row, at), spec.vocab_size)}
    return [
        ("no such row", slots((far, at))),
        ("no such row", slots((row, at), (-1, at))),
        ("no such row", slots((-HUGE - 1, at))),
        ("no such row", chunks((row, 0, at), (NUM_ROWS, 0, at))),
        ("no such row", {"tables": tables[: NUM_ROWS - 1].copy()} | slots((NUM_ROWS - 1, at))),
        ("no such row", {"tokens": tokens[:0].copy()} | slots((row, at))),
        ("no such position", slots((row, beyond))),
        ("no such position", slots((row, -1))),
        ("no such position", slots((row, HUGE))),
        ("no such position", chunks((row, at, MAX_LEN - at + 1))),
        ("no such position", chunks((row, -1, 2))),
        ("no such position", chunks((row, at, HUGE))),
        ("no such position", chunks((row, HUGE, HUGE))),
        ("no such position", {"tokens": tokens[:, :at].copy()} | slots((row, at))),
        ("an empty chunk", chunks((row, at, 0))),
        ("an empty chunk", chunks((row, at, 1), (row, at, -HUGE))),
        ("too short", {"tables": tables[:, :block].copy()} | slots((row, at))),
        ("too short", {"tables": tables[:, :0].copy()} | chunks((row, 0, at))),
        ("not there", {"tables": changed(tables, (row, block), blocks)} | slots((row, at))),
        ("not there", {"tables": changed(tables, (row, 0), -1)} | slots((row, at))),
        ("not there", {"tables": changed(tables, (row, 0), HUGE)} | chunks((row, at, 3))),
        ("outside the vocabulary", offset | slots((row, at))),
        ("outside the vocabulary", offset | chunks((row, 0, at + 1))),
        ("outside the vocabulary", {"tokens": changed(tokens, (row, at), -1)} | slots((row, at))),
        ("rows and positions", {"slots": np.zeros((2, 3), np.int32)}),
        ("rows, starts and sizes", {"chunks": np.zeros((2, 2), np.int32)}),
        ("not this model's", caches(layers + 1, 2, blocks, size, kv, dim)),
        ("not this model's", caches(layers, 1, blocks, size, kv, dim)),
        ("not this model's", caches(layers, 2, blocks, size, kv + 1, dim)),
        ("not this model's", caches(layers, 2, blocks, size, kv, dim - 1)),
        ("not there", caches(layers, 2, 0, size, kv, dim)),
        ("no such token", slots((row, at)) | logits_of(1)),
        ("no such token", slots((row, at)) | logits_of(-1)),
        ("no such token", chunks((row, 0, at)) | logits_of(0, at)),
        ("another shape", slots((row, at)) | logits_of(0) | {"out": np.zeros((1, 3), "f4")}),
        ("another shape", slots((row, at)) | logits_of(0, 0) | {"out": logits_of(0)["out"]}),
    ]


@pytest.mark.parametrize("isa", ISAS)
def test_a_wrong_step_is_refused_and_the_next_right_one_is_right(isa: str) -> None:
    pair = Pair(FUZZ_SPECS[1], isa, block_size=5, threads=(2, 2))
    random = np.random.default_rng(9)
    life = Life(pair, random)
    refused = 0
    for _ in range(12):
        for words, given in wrong_steps(pair, random):
            before = pair.cache.copy()
            with pytest.raises(ValueError, match=words):
                forward(pair, **given)
            assert np.array_equal(pair.cache, before)
            refused += 1
            if refused % 6 == 0:
                assert pair.difference(*life.step()) <= TOLERANCE
    assert refused > 300


def forward(pair: Pair, **given: Any) -> None:
    none = {"slots": np.zeros((0, 2), np.int32), "chunks": np.zeros((0, 3), np.int32)}
    none["which"], none["out"] = np.zeros(0, np.int32), np.zeros((0, pair.spec.vocab_size), "f4")
    own = {"tokens": pair.tokens, "tables": pair.tables, "cache": pair.cache}
    pair.native.model.forward(**own | none | given)


def test_a_cache_of_blocks_without_positions_is_refused() -> None:
    """A block size of 0 must not be divided by."""
    pair = Pair(FUZZ_SPECS[0])
    layers, _, blocks, _, kv, dim = pair.cache.shape
    empty = np.zeros((layers, 2, blocks, 0, kv, dim), np.uint16)
    with pytest.raises(ValueError, match="not this model's"):
        forward(pair, cache=empty, slots=np.zeros((1, 2), np.int32))


@pytest.mark.parametrize(
    "wrong",
    [
        {"slots": np.zeros(2, np.int32)},
        {"slots": None},
        {"chunks": [[0, 0, 1]]},
        {"tokens": np.zeros(4, np.int32)},
        {"tables": np.zeros((1, 1, 1), np.int32)},
        {"cache": np.zeros((3, 2), np.uint16)},
        {"cache": None},
    ],
    ids=str,
)
def test_what_is_no_array_of_the_right_kind_is_refused(wrong: dict[str, Any]) -> None:
    pair = Pair(FUZZ_SPECS[0])
    with pytest.raises(TypeError):
        forward(pair, **wrong)
    assert pair.difference((), [(0, 0, 9)]) <= TOLERANCE


@pytest.mark.parametrize("way", ["float16", "int16", "transposed"])
def test_keys_and_values_are_never_stored_in_a_copy_that_nobody_sees(way: str) -> None:
    pair = Pair(FUZZ_SPECS[0])
    cache = pair.cache
    other = {
        "float16": cache.view(np.float16),
        "int16": cache.view(np.int16),
        "transposed": cache.transpose(1, 0, 2, 3, 4, 5).copy().transpose(1, 0, 2, 3, 4, 5),
    }[way]
    with pytest.raises(TypeError):
        forward(pair, cache=other, chunks=np.array([[0, 0, 5]], np.int32))


def test_logits_are_given_of_tokens_of_the_last_step_alone() -> None:
    pair = Pair(FUZZ_SPECS[0])
    vocab = pair.spec.vocab_size
    with pytest.raises(ValueError, match="no such token"):
        pair.native.logits(np.array([0], np.int32))
    whole = pair.step((), [(0, 0, 20)])
    for wrong in ([20], [-1], [3, HUGE]):
        with pytest.raises(ValueError, match="no such token"):
            pair.native.logits(np.array(wrong, np.int32))
    for shape in ((1, vocab), (2, vocab - 1)):
        out = np.zeros(shape, np.float32)
        with pytest.raises(ValueError, match="another shape"):
            pair.native.model.logits(np.array([0, 1], np.int32), out)
    some = np.array([7, 7, 0, 19], np.int32)
    assert np.array_equal(pair.native.logits(some), whole[some])
    assert np.array_equal(pair.native.logits(some[:1]), whole[some[:1]])
    assert pair.native.logits(np.array([], np.int32)).shape == (0, vocab)
    pair.step([(0, 20)])
    with pytest.raises(ValueError, match="no such token"):
        pair.native.logits(np.array([1], np.int32))


def test_a_step_without_tokens_does_nothing() -> None:
    pair = Pair(FUZZ_SPECS[0], threads=(2, 2))
    before = pair.cache.copy()
    assert pair.step().shape == (0, pair.spec.vocab_size)
    assert np.array_equal(pair.cache, before)
    assert pair.difference((), [(0, 0, 9)]) <= TOLERANCE


def test_parts_that_do_not_fit_each_other_make_no_model() -> None:
    native = cpu.module()
    matrix = lambda rows, cols: native.Matrix("f32", rows, cols)  # noqa: E731
    ones = lambda n: np.ones(n, np.float32)  # noqa: E731
    none = np.empty(0, np.float32)

    def build(**changes: Any) -> Any:
        parts = {"qkv": (24, 8), "o": (8, 8), "gate_up": (24, 8), "down": (8, 12)}
        parts = {name: matrix(*changes.get(name, shape)) for name, shape in parts.items()}
        norms = {"attn_norm": 8, "mlp_norm": 8}
        vectors = {name: ones(changes.get(name, size)) for name, size in norms.items()}
        heads_normed = {name: changes.get(name, none) for name in ("q_norm", "k_norm")}
        layer = native.Layer(**parts, **vectors, **heads_normed, window=changes.get("window", 0))
        angles = changes.get("angles", (16, 2))
        return native.Model(
            isa="auto",
            vocab=10,
            hidden=8,
            inner=12,
            heads=changes.get("heads", 2),
            kv_heads=changes.get("kv_heads", 2),
            dim=4,
            eps=1e-5,
            layers=changes.get("layers", [layer]),
            embed=matrix(*changes.get("embed", (10, 8))),
            head=matrix(*changes.get("head", (10, 8))),
            final_norm=ones(changes.get("final_norm", 8)),
            cos=np.ones(angles, np.float32),
            sin=np.ones(changes.get("sin", angles), np.float32),
            threads=changes.get("threads", 1),
            threads_prefill=changes.get("threads_prefill", 1),
            exact=True,
        )

    assert build().num_bytes > 0
    wrong: list[dict[str, Any]] = [
        {"qkv": (23, 8)},
        {"o": (8, 9)},
        {"gate_up": (12, 8)},
        {"down": (8, 13)},
        {"attn_norm": 7},
        {"mlp_norm": 9},
        {"q_norm": ones(4)},
        {"q_norm": ones(3), "k_norm": ones(3)},
        {"embed": (11, 8)},
        {"head": (10, 7)},
        {"final_norm": 7},
        {"window": -1},
        {"heads": 3},
        {"kv_heads": 0},
        {"angles": (16, 3)},
        {"sin": (15, 2)},
        {"threads": 0},
        {"threads_prefill": -1},
    ]
    for changes in wrong:
        with pytest.raises(ValueError, match=r"fit|groups|angles|at least one"):
            build(**changes)
    with pytest.raises(TypeError):
        build(layers=[object()])


def test_a_model_of_no_layer_at_all_is_refused_not_followed(tmp_path: Path) -> None:
    """In a process of its own, which must not die of it.

    It starts in an empty folder: `python -c` looks in the current one first, and a checkout has
    the package's sources but not what the install built.
    """
    code = """
import numpy as np
from twostroke import _native as n
ones, angles, matrix = np.ones(8, np.float32), np.ones((16, 2), np.float32), n.Matrix("f32", 10, 8)
try:
    parts = ([None], matrix, matrix, ones, angles, angles)
    n.Model("auto", 10, 8, 12, 2, 2, 4, 1e-5, *parts, 1, 1, True)
except (TypeError, ValueError):
    print("refused")
"""
    command = [sys.executable, "-c", code]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60, cwd=tmp_path)
    assert (done.returncode, done.stdout) == (0, "refused\n"), done.stderr
