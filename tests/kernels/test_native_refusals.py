"""Steps and models that ask the native decoder for what is not there: each is refused with words,
nothing is written, and the next right step is right."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest

from tests.kernels.native_pair import (
    FUZZ_SPECS,
    ISAS,
    MAX_LEN,
    NUM_ROWS,
    Life,
    Pair,
    heads,
    with_indices,
)
from tests.specs import changed, make_spec
from twostroke.kernels import cpu
from twostroke.model.native_decoder import Packing, load_weights, spec_record
from twostroke.model.weights.dummy import DummyWeights

pytestmark = pytest.mark.skipif(
    not cpu.available(), reason="this installation was built without the native kernels"
)

HUGE = 2**31 - 1


def wrong_steps(pair: Pair, random: np.random.Generator) -> list[tuple[str, dict[str, Any]]]:
    """Return wrong arguments of forward, each with the expected refusal."""
    spec, tokens, (first, second) = pair.spec, pair.tokens, pair.tables
    blocks, layers, _, kv, size, dim = pair.caches[1].shape
    row, at = int(random.integers(NUM_ROWS)), int(random.integers(1, 200))

    def altered(array: npt.NDArray[np.int32], where: Any, value: int) -> npt.NDArray[np.int32]:
        array = array.copy()
        array[where] = value
        return array

    def slots(*given: tuple[int, ...]) -> dict[str, Any]:
        return {"slots": with_indices(given, 3)}

    def chunks(*given: tuple[int, ...]) -> dict[str, Any]:
        return {"chunks": with_indices(given, 4)}

    def tables(other: npt.NDArray[np.int32]) -> dict[str, Any]:
        return {"tables": [first, other.copy()]}

    def caches(*shape: int) -> dict[str, Any]:
        return {"caches": [pair.caches[0], np.zeros(shape, np.uint16)]} | slots((row, 0))

    def logits_of(*which: int) -> dict[str, Any]:
        out = np.zeros((len(which), spec.vocab_size), np.float32)
        return {"which": np.array(which, np.int32), "out": out}

    far = int(random.integers(NUM_ROWS, HUGE))
    beyond = int(random.integers(MAX_LEN, HUGE))
    block, offset = at // size, {"tokens": altered(tokens, (row, at), spec.vocab_size)}
    return [
        ("no such row", slots((far, at))),
        ("no such row", slots((row, at), (-1, at))),
        ("no such row", slots((-HUGE - 1, at))),
        ("no such row", chunks((row, 0, at), (NUM_ROWS, 0, at))),
        ("no such row", tables(second[: NUM_ROWS - 1]) | slots((NUM_ROWS - 1, at))),
        ("no such row", {"tokens": tokens[:0].copy()} | slots((row, at))),
        ("no such position", slots((row, beyond))),
        ("no such position", slots((row, -1))),
        ("no such position", slots((row, HUGE))),
        ("no such position", chunks((row, at, MAX_LEN - at + 1))),
        ("no such position", chunks((row, -1, 2))),
        ("no such position", chunks((row, at, HUGE))),
        ("no such position", chunks((row, HUGE, HUGE))),
        ("no such position", {"tokens": tokens[:, :at].copy()} | slots((row, at))),
        ("a chunk is empty", chunks((row, at, 0))),
        ("a chunk is empty", chunks((row, at, 1), (row, at, -HUGE))),
        ("no such cache index", slots((row, at, -1))),
        ("no such cache index", chunks((row, at, 2, -HUGE))),
        ("too short", slots((row, at, beyond))),
        ("too short", chunks((row, at, 3, HUGE))),
        ("too short", tables(second[:, :block]) | slots((row, at))),
        ("too short", tables(second[:, :0]) | chunks((row, 0, at))),
        ("does not exist", tables(altered(second, (row, block), blocks)) | slots((row, at))),
        ("does not exist", tables(altered(second, (row, 0), -1)) | slots((row, at))),
        ("does not exist", tables(altered(second, (row, 0), HUGE)) | chunks((row, at, 3))),
        ("every KV group needs a table", {"tables": [first]} | slots((row, at))),
        ("every KV group needs a table", {"tables": [first, second, second]} | slots((row, at))),
        ("every KV group needs a pool", {"caches": pair.caches[:1]} | slots((row, at))),
        ("shape of this model", {"caches": [pair.caches[0]] * 2} | slots((row, at))),
        ("outside the vocabulary", offset | slots((row, at))),
        ("outside the vocabulary", offset | chunks((row, 0, at + 1))),
        ("outside the vocabulary", {"tokens": altered(tokens, (row, at), -1)} | slots((row, at))),
        ("columns row, position and index", {"slots": np.zeros((2, 2), np.int32)}),
        ("columns row, start, size and index", {"chunks": np.zeros((2, 3), np.int32)}),
        ("shape of this model", caches(blocks, layers + 1, 2, kv, size, dim)),
        ("shape of this model", caches(blocks, layers, 1, kv, size, dim)),
        ("shape of this model", caches(blocks, layers, 2, kv + 1, size, dim)),
        ("shape of this model", caches(blocks, layers, 2, kv, size, dim - 1)),
        ("does not exist", caches(0, layers, 2, kv, size, dim)),
        ("no such token", slots((row, at)) | logits_of(1)),
        ("no such token", slots((row, at)) | logits_of(-1)),
        ("no such token", chunks((row, 0, at)) | logits_of(0, at)),
        ("another shape", slots((row, at)) | logits_of(0) | {"out": np.zeros((1, 3), "f4")}),
        ("another shape", slots((row, at)) | logits_of(0, 0) | {"out": logits_of(0)["out"]}),
    ]


@pytest.mark.parametrize("isa", ISAS)
def test_a_wrong_step_is_refused_and_the_next_right_one_is_right(isa: str) -> None:
    spec = changed(FUZZ_SPECS[1], windows=(11, None, None))
    pair = Pair(spec, isa, block_size=5, threads=(2, 2))
    random = np.random.default_rng(9)
    life = Life(pair, random)
    refused = 0
    for _ in range(12):
        for words, given in wrong_steps(pair, random):
            before = [cache.copy() for cache in pair.caches]
            with pytest.raises(ValueError, match=words):
                forward(pair, **given)
            assert all(map(np.array_equal, pair.caches, before))
            refused += 1
            if refused % 6 == 0:
                assert pair.difference(*life.step()) <= pair.tolerance
    assert refused > 300


def forward(pair: Pair, **given: Any) -> None:
    none: dict[str, Any] = {"slots": with_indices((), 3), "chunks": with_indices((), 4)}
    none["which"], none["out"] = np.zeros(0, np.int32), np.zeros((0, pair.spec.vocab_size), "f4")
    own = {"tokens": pair.tokens, "tables": pair.tables, "caches": pair.caches}
    pair.native.model.forward(**own | none | given)


def test_a_cache_of_blocks_without_positions_is_refused() -> None:
    """A block size of 0 must not be divided by."""
    pair = Pair(FUZZ_SPECS[0])
    blocks, layers, _, kv, _, dim = pair.caches[0].shape
    empty = np.zeros((blocks, layers, 2, kv, 0, dim), np.uint16)
    with pytest.raises(ValueError, match="shape of this model"):
        forward(pair, caches=[empty], slots=np.zeros((1, 3), np.int32))


@pytest.mark.parametrize(
    "wrong",
    [
        {"slots": np.zeros(2, np.int32)},
        {"slots": None},
        {"chunks": [[0, 0, 1, 0]]},
        {"tokens": np.zeros(4, np.int32)},
        {"tables": [np.zeros((1, 1, 1), np.int32)]},
        {"tables": None},
        {"caches": [np.zeros((3, 2), np.uint16)]},
        {"caches": [None]},
        {"caches": None},
    ],
    ids=str,
)
def test_what_is_no_array_of_the_right_kind_is_refused(wrong: dict[str, Any]) -> None:
    pair = Pair(FUZZ_SPECS[0])
    with pytest.raises(TypeError):
        forward(pair, **wrong)
    assert pair.difference((), [(0, 0, 9)]) <= pair.tolerance


@pytest.mark.parametrize("way", ["float16", "int16", "transposed"])
def test_keys_and_values_are_never_stored_in_a_copy_that_nobody_sees(way: str) -> None:
    pair = Pair(FUZZ_SPECS[0])
    (cache,) = pair.caches
    other = {
        "float16": cache.view(np.float16),
        "int16": cache.view(np.int16),
        "transposed": cache.transpose(1, 0, 2, 3, 4, 5).copy().transpose(1, 0, 2, 3, 4, 5),
    }[way]
    with pytest.raises((TypeError, ValueError)):
        forward(pair, caches=[other], chunks=with_indices([(0, 0, 5)], 4))


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
    pair.step((), [(1, 0, 20)], [19])  # nothing is kept
    with pytest.raises(ValueError, match="no such token"):
        pair.native.logits(np.array([0], np.int32))
    for wrong in ([3, 2], [4, 4]):
        with pytest.raises(ValueError, match="not in ascending order"):
            pair.step((), [(2, 0, 20)], wrong)


def test_a_step_without_tokens_does_nothing() -> None:
    pair = Pair(FUZZ_SPECS[0], threads=(2, 2))
    before = pair.caches[0].copy()
    assert pair.step().shape == (0, pair.spec.vocab_size)
    assert np.array_equal(pair.caches[0], before)
    assert pair.difference((), [(0, 0, 9)]) <= pair.tolerance


class Parts:
    """The arguments of a native model of two layers, of which a test changes one."""

    def __init__(self, **spec: Any) -> None:
        plain = make_spec(**heads(2, 2, 4, hidden_size=8, intermediate_size=12, vocab_size=10))
        self.spec = changed(plain, **spec)
        packing = Packing(self.spec, DummyWeights(self.spec), "float32", None)
        self.record = spec_record(self.spec)
        self.weights = load_weights(packing, "auto", 16, 1)
        self.arguments: dict[str, Any] = {"isa": "auto", "exact": True, "ropes": [table(16, 2)]}
        self.arguments |= {"threads": 1, "threads_prefill": 1}

    def build(self, **changes: Any) -> Any:
        given = self.arguments | {"spec": self.record, "weights": self.weights} | changes
        return cpu.module().Model(**given)

    def with_field(self, path: str, value: Any) -> Parts:
        """Set a field of the specification, "layers.0.attention.scale"."""
        fields: Any = self.record
        *parents, last = (int(part) if part.isdigit() else part for part in path.split("."))
        for parent in parents:
            fields = fields[parent]
        fields[last] = value
        return self

    def with_weight(self, name: str, value: Any) -> Parts:
        self.weights[name] = value
        return self


def matrix(rows: int, cols: int) -> Any:
    return cpu.module().Matrix("f32", rows, cols)


def ones(count: int) -> npt.NDArray[np.float32]:
    return np.ones(count, np.float32)


def table(rows: int, cols: int, query_scales: Any = None) -> tuple[Any, Any, Any]:
    angles = np.ones((rows, cols), np.float32)
    return angles, angles, query_scales


def test_consistent_specifications_and_weights_make_a_model() -> None:
    assert Parts().build().num_bytes > 0
    assert Parts().build(ropes=[table(16, 2, ones(16))]).num_bytes > 0
    assert Parts(qk_norm="full", post_norm=True, pre_norm=False).build().num_bytes > 0
    own_groups = Parts().with_field("layers.1.kv_group", 1).with_field("layers.1.index_in_group", 0)
    assert own_groups.build().num_bytes > 0


@pytest.mark.parametrize(
    ("words", "name", "value"),
    [
        (r"qkv has shape \[23, 8\] instead of \[24, 8\]", "layers.0.qkv", lambda: matrix(23, 8)),
        ("o has shape", "layers.1.o", lambda: matrix(8, 9)),
        ("gate_up has shape", "layers.0.gate_up", lambda: matrix(12, 8)),
        ("down has shape", "layers.0.down", lambda: matrix(8, 13)),
        ("down is missing", "layers.0.down", lambda: ones(8)),
        ("attn_norm has 7 elements instead of 8", "layers.0.attn_norm", lambda: ones(7)),
        ("mlp_norm has 9 elements", "layers.0.mlp_norm", lambda: ones(9)),
        ("attn_norm is missing", "layers.0.attn_norm", lambda: matrix(8, 1)),
        ("attn_post_norm belongs to no layer", "layers.0.attn_post_norm", lambda: ones(8)),
        ("q_norm belongs to no layer", "layers.0.q_norm", lambda: ones(4)),
        ("layers.2.qkv belongs to no layer", "layers.2.qkv", lambda: matrix(24, 8)),
        ("key_scales has 4 elements", "layers.0.key_scales", lambda: ones(4)),
        ("embed has shape", "embed", lambda: matrix(11, 8)),
        ("head has shape", "head", lambda: matrix(10, 7)),
        ("final_norm has 7 elements", "final_norm", lambda: ones(7)),
    ],
)
def test_a_weight_of_another_shape_is_refused_by_name(words: str, name: str, value: Any) -> None:
    with pytest.raises(ValueError, match=words):
        Parts().with_weight(name, value()).build()


@pytest.mark.parametrize("name", ["q_norm", "k_norm"])
def test_norms_of_queries_and_keys_have_the_size_that_the_specification_says(name: str) -> None:
    with pytest.raises(ValueError, match=f"{name} has 3 elements instead of 4"):
        Parts(qk_norm="head").with_weight(f"layers.0.{name}", ones(3)).build()
    with pytest.raises(ValueError, match=f"{name} has 4 elements instead of 8"):
        Parts(qk_norm="full").with_weight(f"layers.1.{name}", ones(4)).build()


@pytest.mark.parametrize(
    ("words", "path", "value"),
    [
        ("negative", "layers.0.attention.window", -1),
        ("negative", "layers.0.attention.softcap", -1.0),
        ("negative", "layers.0.attention.scale", 0.0),
        ("multiple of num_kv_heads", "layers.0.attention.num_heads", 3),
        ("multiple of num_kv_heads", "layers.0.attention.num_kv_heads", 0),
        ("multiple of num_kv_heads", "layers.0.attention.head_dim", 0),
        ("no rope table 1", "layers.0.attention.rope.table", 1),
        ("no rope table -1", "layers.0.attention.rope.table", -1),
        ("no such KV group", "layers.0.kv_group", -1),
        ("KV group 0 lacks layers", "layers.0.kv_group", 1),
        ("no such KV group", "layers.0.index_in_group", -1),
        ("no such KV group", "layers.0.index_in_group", 2**31 - 1),
        ("its place in the KV group is taken", "layers.1.index_in_group", 0),
        ("unknown value 'relu'", "layers.0.mlp.activation", "relu"),
        ("unknown value 'both'", "layers.0.attention.qk_norm", "both"),
        ("needs a gate", "layers.0.mlp.activation", ("clamped_swiglu", 1.7, 7.0)),
        ("does not know the field layers.0.attention.sparse", "layers.0.attention.sparse", 1),
        ("negative", "logit_softcap", -1.0),
        ("positive", "vocab_size", 0),
    ],
)
def test_an_inconsistent_specification_is_refused(words: str, path: str, value: Any) -> None:
    parts = Parts(gated=False) if words == "needs a gate" else Parts()
    with pytest.raises(ValueError, match=words):
        parts.with_field(path, value).build()


def test_a_field_that_is_missing_or_of_another_type_is_refused_by_name() -> None:
    parts = Parts()
    del parts.record["layers"][1]["attention"]["scale"]
    with pytest.raises(ValueError, match=r"no field layers\.1\.attention\.scale"):
        parts.build()
    for path, value in (("layers.0.attention.scale", "1"), ("layers.0", None), ("norm", 3)):
        with pytest.raises(TypeError, match=path):
            Parts().with_field(path, value).build()


def test_layers_of_a_kv_group_have_heads_of_one_shape() -> None:
    parts = Parts().with_field("layers.1.attention.num_kv_heads", 1)
    with pytest.raises(ValueError, match="another shape than those of its KV group"):
        parts.with_weight("layers.1.qkv", matrix(16, 8)).build()


def test_rope_tables_and_threads_are_checked() -> None:
    sines = np.ones((15, 2), np.float32)
    wrong: list[tuple[str, dict[str, Any]]] = [
        ("no rope table", {"ropes": []}),
        ("more channels than a head", {"ropes": [table(16, 3)]}),
        ("different shapes", {"ropes": [(table(16, 2)[0], sines, None)]}),
        ("different lengths", {"ropes": [table(16, 2), table(17, 2)]}),
        ("query scales", {"ropes": [table(16, 2, ones(15))]}),
        ("at least one", {"threads": 0}),
        ("at least one", {"threads_prefill": -1}),
    ]
    for words, changes in wrong:
        with pytest.raises(ValueError, match=words):
            Parts().build(**changes)


@pytest.mark.parametrize("nothing", [None, object(), [1.0]], ids=["None", "object", "list"])
def test_a_weight_that_is_neither_matrix_nor_array_is_refused(nothing: Any) -> None:
    for name in ("head", "embed", "layers.0.qkv", "final_norm"):
        with pytest.raises(TypeError, match=name):
            Parts().with_weight(name, nothing).build()


HOSTILE_PARAMS = """
import itertools
import numpy as np
from twostroke import _native

values = [0.0, -1.0, 0.5, 1e-30, 1.0, 3.7, 1e30, -1e30, np.inf, -np.inf, np.nan]
vocab = 40
for place, value, temperature in itertools.product(range(7), values, (0.0, 0.7)):
    params = np.array([[temperature, 0, 0.9, 0, 1, 0, 0]], np.float32)
    params[0, place] = value
    out = np.full(1, -7, np.int32)
    logits = np.random.default_rng(0).normal(size=(1, vocab)).astype(np.float32)
    tokens, where = np.arange(8, dtype=np.int32)[None], np.array([[0, 4, 8]], np.int32)
    _native.sample(logits, tokens, where, params, np.ones((1, 2), np.uint32), out)
    # -1 says that the scaled logits are no numbers, as with a temperature of NaN.
    assert -1 <= out[0] < vocab, (place, value, temperature, out)
print("done")
"""


def test_no_sampling_value_breaks_the_sampler(tmp_path: Path) -> None:
    """In a process of its own, as above: what is wrong there ends the process."""
    command = [sys.executable, "-c", HOSTILE_PARAMS]
    run = subprocess.run(command, capture_output=True, text=True, cwd=tmp_path)
    assert (run.returncode, run.stdout) == (0, "done\n"), run.stderr
