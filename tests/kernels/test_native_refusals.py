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
    with_indices,
)
from tests.specs import changed
from twostroke.kernels import cpu

pytestmark = pytest.mark.skipif(
    not cpu.available(), reason="this installation was built without the native kernels"
)

HUGE = 2**31 - 1


def wrong_steps(pair: Pair, random: np.random.Generator) -> list[tuple[str, dict[str, Any]]]:
    """What forward is given, and how its refusal should read."""
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
        ("an empty chunk", chunks((row, at, 0))),
        ("an empty chunk", chunks((row, at, 1), (row, at, -HUGE))),
        ("no such cache index", slots((row, at, -1))),
        ("no such cache index", chunks((row, at, 2, -HUGE))),
        ("too short", slots((row, at, beyond))),
        ("too short", chunks((row, at, 3, HUGE))),
        ("too short", tables(second[:, :block]) | slots((row, at))),
        ("too short", tables(second[:, :0]) | chunks((row, 0, at))),
        ("not there", tables(altered(second, (row, block), blocks)) | slots((row, at))),
        ("not there", tables(altered(second, (row, 0), -1)) | slots((row, at))),
        ("not there", tables(altered(second, (row, 0), HUGE)) | chunks((row, at, 3))),
        ("a table for each KV group", {"tables": [first]} | slots((row, at))),
        ("a table for each KV group", {"tables": [first, second, second]} | slots((row, at))),
        ("a pool for each KV group", {"caches": pair.caches[:1]} | slots((row, at))),
        ("not this model's", {"caches": [pair.caches[0]] * 2} | slots((row, at))),
        ("outside the vocabulary", offset | slots((row, at))),
        ("outside the vocabulary", offset | chunks((row, 0, at + 1))),
        ("outside the vocabulary", {"tokens": altered(tokens, (row, at), -1)} | slots((row, at))),
        ("rows, positions and indices", {"slots": np.zeros((2, 2), np.int32)}),
        ("rows, starts, sizes and indices", {"chunks": np.zeros((2, 3), np.int32)}),
        ("not this model's", caches(blocks, layers + 1, 2, kv, size, dim)),
        ("not this model's", caches(blocks, layers, 1, kv, size, dim)),
        ("not this model's", caches(blocks, layers, 2, kv + 1, size, dim)),
        ("not this model's", caches(blocks, layers, 2, kv, size, dim - 1)),
        ("not there", caches(0, layers, 2, kv, size, dim)),
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
    with pytest.raises(ValueError, match="not this model's"):
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
        with pytest.raises(ValueError, match="out of their order"):
            pair.step((), [(2, 0, 20)], wrong)


def test_a_step_without_tokens_does_nothing() -> None:
    pair = Pair(FUZZ_SPECS[0], threads=(2, 2))
    before = pair.caches[0].copy()
    assert pair.step().shape == (0, pair.spec.vocab_size)
    assert np.array_equal(pair.caches[0], before)
    assert pair.difference((), [(0, 0, 9)]) <= pair.tolerance


def test_parts_that_do_not_fit_each_other_make_no_model() -> None:
    native = cpu.module()
    matrix = lambda rows, cols: native.Matrix("f32", rows, cols)  # noqa: E731
    ones = lambda n: np.ones(n, np.float32)  # noqa: E731
    table = lambda rows, cols: np.ones((rows, cols), np.float32)  # noqa: E731

    def layer(**changes: Any) -> Any:
        parts = {"qkv": (24, 8), "o": (8, 8), "gate_up": (24, 8), "down": (8, 12)}
        given: dict[str, Any] = {n: matrix(*changes.pop(n, shape)) for n, shape in parts.items()}
        given |= {"attn_norm": ones(8), "mlp_norm": ones(8)}
        given |= {"heads": 2, "kv_heads": 2, "dim": 4, "scale": 0.5, "in_group": 0}
        return native.Layer(**given | changes)

    def build(layers: list[Any] | None = None, **changes: Any) -> Any:
        angles = (table(16, 2), table(16, 2), None)
        given: dict[str, Any] = {"embed": matrix(10, 8), "head": matrix(10, 8), "eps": 1e-5}
        given |= {"final_norm": ones(8), "ropes": [angles], "isa": "auto", "exact": True}
        given |= {"threads": 1, "threads_prefill": 1, "layers": layers or [layer()]}
        return native.Model(**given | changes)

    assert build().num_bytes > 0
    assert build(ropes=[(table(16, 2), table(16, 2), ones(16))]).num_bytes > 0
    assert build([layer(), layer(in_group=1)]).num_bytes > 0
    assert build([layer(), layer(group=1)]).num_bytes > 0
    assert build([layer(attn_norm=None, mlp_post_norm=ones(8), q_norm=ones(8), k_norm=ones(8))])
    wrong_layers: list[tuple[str, dict[str, Any]]] = [
        ("qkv", {"qkv": (23, 8)}),
        ("o has another shape", {"o": (8, 9)}),
        ("gate_up", {"gate_up": (12, 8)}),
        ("gate_up", {"down": (8, 13)}),
        ("a norm", {"attn_norm": ones(7)}),
        ("a norm", {"mlp_norm": ones(9)}),
        ("a norm", {"attn_post_norm": ones(4)}),
        ("a norm", {"mlp_post_norm": ones(9)}),
        ("q_norm and k_norm", {"q_norm": ones(4)}),
        ("q_norm and k_norm", {"q_norm": ones(3), "k_norm": ones(3)}),
        ("q_norm and k_norm", {"q_norm": ones(8), "k_norm": ones(4)}),
        ("negative", {"window": -1}),
        ("negative", {"softcap": -1.0}),
        ("negative", {"scale": 0.0}),
        ("whole groups", {"heads": 3}),
        ("whole groups", {"kv_heads": 0}),
        ("whole groups", {"dim": 0}),
        ("no rope table", {"rope": 1}),
        ("no rope table", {"rope": -1}),
        ("KV group", {"group": -1}),
        ("KV group", {"group": 1}),
        ("KV group", {"in_group": -1}),
        ("KV group", {"in_group": 2**31 - 1}),
        ("no activation", {"activation": "relu"}),
    ]
    for words, changes in wrong_layers:
        with pytest.raises(ValueError, match=words):
            build([layer(**changes)])
    fewer_heads = layer(qkv=(16, 8), kv_heads=1, in_group=1)
    wrong: list[tuple[str, dict[str, Any]]] = [
        ("embedding|head", {"embed": matrix(11, 8)}),
        ("the head", {"head": matrix(10, 7)}),
        ("final norm", {"final_norm": ones(7)}),
        ("no rope table", {"ropes": []}),
        ("angles", {"ropes": [(table(16, 3), table(16, 3), None)]}),
        ("angles", {"ropes": [(table(16, 2), table(15, 2), None)]}),
        ("lengths", {"ropes": [(table(n, 2), table(n, 2), None) for n in (16, 17)]}),
        ("scales of queries", {"ropes": [(table(16, 2), table(16, 2), ones(15))]}),
        ("negative", {"logit_softcap": -1.0}),
        ("at least one", {"threads": 0}),
        ("at least one", {"threads_prefill": -1}),
        ("taken", {"layers": [layer(), layer()]}),
        ("another shape than its KV group", {"layers": [layer(), fewer_heads]}),
        ("lacks layers", {"layers": [layer(in_group=1), layer(group=1)]}),
    ]
    for words, changes in wrong:
        with pytest.raises(ValueError, match=words):
            build(**changes)
    for nothing in ({"layers": [object()]}, {"head": None}, {"embed": None}):
        with pytest.raises(TypeError):
            build(**nothing)


def test_a_model_of_no_layer_at_all_is_refused_not_followed(tmp_path: Path) -> None:
    """In a process of its own, which must not die of it.

    It starts in an empty folder: `python -c` looks in the current one first, and a checkout has
    the package's sources but not what the install built.
    """
    code = """
import numpy as np
from twostroke import _native as n
ones, angles = np.ones(8, np.float32), np.ones((16, 2), np.float32)
matrix = n.Matrix("f32", 10, 8)
try:
    parts = dict(layers=[None], embed=matrix, head=matrix, ropes=[(angles, angles, None)])
    rest = dict(final_norm=ones, eps=1e-5, threads=1, threads_prefill=1, exact=True)
    n.Model(isa="auto", **parts, **rest)
except (TypeError, ValueError):
    print("refused")
"""
    command = [sys.executable, "-c", code]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60, cwd=tmp_path)
    assert (done.returncode, done.stdout) == (0, "refused\n"), done.stderr


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
