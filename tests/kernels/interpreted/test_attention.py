"""Attention by interpreted Triton kernels, against `definitions`."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch

pytest.importorskip("triton")

from tests.kernels import cuda_cases as cases
from tests.kernels import definitions
from tests.kernels.cuda_cases import BOUNDS, Heads
from tests.kernels.interpreted.combinations import crossed
from twostroke.kernels.cuda import prefill
from twostroke.kernels.records import AttentionRule, DecodeWork, KVView, PrefillWork, Rope

CPU = torch.device("cpu")
HALF, SINGLE = torch.float16, torch.float32
KV_8_BIT = [torch.float8_e4m3fn, torch.float8_e5m2, torch.int8]
# The type of the model, and the type of the weights that norm queries and keys.
TYPES_AND_NORMS = [(HALF, None), (SINGLE, None), (SINGLE, SINGLE), (HALF, HALF), (HALF, SINGLE)]


@pytest.mark.parametrize("dtype", [HALF, SINGLE])
@pytest.mark.parametrize(
    ("heads", "chunks"),
    [
        (Heads(4, 1, 64), [(0, 1), (0, 31), (0, 33), (5, 40)]),  # first and continued chunks
        (Heads(3, 1, 80, 32), [(0, 128), (127, 2), (128, 1)]),  # three heads: ragged tiles
        (Heads(2, 2, 96), [(63, 65), (64, 64)]),  # each head alone; a prefix hit
        (Heads(8, 1, 128, 32), [(0, 17), (200, 16)]),
        (Heads(2, 1, 256), [(0, 33), (30, 40)]),
        (Heads(4, 2, 64), [(100, 30)]),
    ],
)
def test_prefill_attention_equals_the_definition(
    heads: Heads, chunks: list[tuple[int, int]], dtype: torch.dtype
) -> None:
    assert cases.check_prefill(heads, chunks, CPU, dtype) < BOUNDS[dtype]


@pytest.mark.parametrize(
    ("window", "softcap", "dim"),
    [
        (1, 0.0, 64),
        (20, 0.0, 64),
        (128, 0.0, 64),
        (150, 0.0, 64),
        (None, 2.0, 64),
        (40, 2.0, 64),
        (40, 2.0, 256),
    ],
)
def test_prefill_attention_with_a_window_and_a_softcap(
    window: int | None, softcap: float, dim: int
) -> None:
    heads = Heads(4, 2, dim, window=window, softcap=softcap)
    error = cases.check_prefill(heads, [(0, 70), (250, 40), (127, 1)], CPU, SINGLE)
    assert error < BOUNDS[SINGLE]


@pytest.mark.parametrize(
    ("heads", "chunks"),
    [
        (Heads(4, 1, 64), [(300, 20)]),
        (Heads(4, 2, 80, 32), [(0, 33), (300, 20), (40, 7), (257, 1)]),  # contexts of all lengths
        (Heads(4, 1, 64, window=150, sinks=True), [(300, 40)]),
        (Heads(4, 1, 64, 32, window=200, softcap=2.0), [(400, 90)]),  # rows without keys in a split
        (Heads(2, 1, 64, kv_dtype=torch.int8), [(300, 20), (200, 3)]),
    ],
)
def test_the_context_of_a_short_chunk_is_split_between_programs(
    heads: Heads, chunks: list[tuple[int, int]], monkeypatch: pytest.MonkeyPatch
) -> None:
    counts, count = [], prefill.num_splits
    monkeypatch.setattr(prefill, "MIN_SPLIT_KEYS", 64)
    monkeypatch.setattr(
        prefill, "num_splits", lambda *args: counts.append(count(*args)) or counts[-1]
    )
    bound = BOUNDS[SINGLE] if heads.kv_dtype is None else heads.bound(SINGLE)
    assert cases.check_prefill(heads, chunks, CPU, SINGLE) < bound
    assert max(counts) >= 2


@pytest.mark.parametrize("dtype", [HALF, SINGLE])
@pytest.mark.parametrize(
    ("heads", "lengths", "splits"),
    [
        (Heads(4, 1, 64), [1, 0, 63, 64, 65, 129], 1),
        (Heads(4, 1, 64), [1, 0, 63, 64, 65, 129], 2),
        (Heads(3, 1, 80, 32), [129, 0, 16, 17], 3),
        (Heads(2, 2, 96), [127, 128], 2),
        (Heads(8, 1, 128, 32), [200], 1),
        (Heads(8, 1, 128), [1300], 30),  # more splits than are merged at one time
        (Heads(7, 1, 256), [31, 33], 2),
    ],
)
def test_decode_attention_equals_the_definition(
    heads: Heads, lengths: list[int], splits: int, dtype: torch.dtype
) -> None:
    assert cases.check_decode(heads, lengths, splits, CPU, dtype) < BOUNDS[dtype]


@pytest.mark.parametrize(
    ("window", "softcap", "dim", "splits"),
    crossed(
        [
            (1, 0.0, 64),
            (20, 0.0, 64),
            (64, 0.0, 64),
            (None, 2.0, 64),
            (40, 2.0, 64),
            (40, 2.0, 256),
        ],
        [1, 4],
        most=1,
    ),
)
def test_decode_attention_with_a_window_and_a_softcap(
    window: int | None, softcap: float, dim: int, splits: int
) -> None:
    heads = Heads(4, 2, dim, window=window, softcap=softcap)
    lengths = [1, 21, 0, 64, 130]
    assert cases.check_decode(heads, lengths, splits, CPU, SINGLE) < BOUNDS[SINGLE]


@pytest.mark.parametrize(
    ("window", "softcap", "queries", "splits"),
    crossed(
        [(None, 0.0), (1, 0.0), (3, 0.0), (20, 0.0), (64, 0.0), (None, 2.0), (40, 2.0)],
        [(2, 1), (5, 4), (2, 4), (5, 1)],
        most=2,
    ),
)
def test_decode_attention_of_several_queries_a_row(
    window: int | None, softcap: float, queries: int, splits: int
) -> None:
    """At both edges of tiles, and where only some of the queries reach the next one."""
    heads = Heads(3, 1, 64, window=window, softcap=softcap)
    lengths = [queries, 0, 64, 66, 129, 260]
    error = cases.check_decode(heads, lengths, splits, CPU, SINGLE, queries)
    assert error < BOUNDS[SINGLE]


@pytest.mark.parametrize("queries", [2, 5])
def test_decode_attention_of_several_queries_in_fp16(queries: int) -> None:
    for heads in (Heads(8, 1, 128), Heads(4, 2, 256, window=33)):
        error = cases.check_decode(heads, [300, 5], 9, CPU, HALF, queries)
        assert error < BOUNDS[HALF]


@pytest.mark.parametrize(
    ("heads", "half", "lengths", "splits", "dtype", "norm"),
    crossed(
        [
            (Heads(4, 1, 64), 32, [1, 2, 0, 15, 16, 17, 63, 64, 65, 66], 1),
            (Heads(4, 1, 64), 32, [0, 1, 128, 129, 130, 257, 258], 3),  # a split begins with it
            (Heads(3, 1, 80, 32), 40, [129, 0, 16, 17, 193], 2),
            (Heads(2, 2, 96), 24, [127, 128, 1], 2),  # half of the channels rotate
            (Heads(4, 2, 64), 1, [65, 2], 1),  # two, as where a layer has no rope
            (Heads(8, 1, 128, 32), 64, [200, 33, 32], 1),
            (Heads(8, 1, 128), 16, [1300, 5], 30),
            (Heads(7, 1, 256), 128, [31, 32, 33, 34, 129], 2),
        ],
        TYPES_AND_NORMS,
        most=2,
    ),
)
def test_rope_store_and_decode_attention_in_one_equal_the_definition(
    heads: Heads,
    half: int,
    lengths: list[int],
    splits: int,
    norm: torch.dtype | None,
    dtype: torch.dtype,
) -> None:
    error = cases.check_rope_decode(heads, half, norm, lengths, splits, CPU, dtype)
    assert error < max(BOUNDS[dtype], BOUNDS[norm or dtype])


@pytest.mark.parametrize(
    ("window", "softcap", "splits"),
    crossed([(1, 0.0), (2, 0.0), (20, 0.0), (64, 0.0), (None, 2.0), (40, 2.0)], [1, 4], most=1),
)
def test_rope_store_and_decode_attention_with_a_window_and_a_softcap(
    window: int | None, softcap: float, splits: int
) -> None:
    heads = Heads(4, 2, 64, window=window, softcap=softcap)
    lengths = [1, 21, 0, 64, 65, 66, 130, 193]
    error = cases.check_rope_decode(heads, 32, SINGLE, lengths, splits, CPU, SINGLE)
    assert error < BOUNDS[SINGLE]


@pytest.mark.parametrize(
    ("window", "softcap", "dim", "dtype"),
    crossed([(None, 0.0, 64), (40, 2.0, 80)], [HALF, SINGLE], most=1),
)
def test_attention_with_sinks(
    window: int | None, softcap: float, dim: int, dtype: torch.dtype
) -> None:
    heads = Heads(6, 2, dim, window=window, softcap=softcap, sinks=True)
    lengths, bound = [1, 0, 130], BOUNDS[dtype]
    assert cases.check_prefill(heads, [(0, 30), (50, 9)], CPU, dtype) < bound
    for splits in (1, 2):
        assert cases.check_decode(heads, lengths, splits, CPU, dtype) < bound
    assert cases.check_rope_decode(heads, dim // 2, None, lengths, 2, CPU, dtype) < bound
    assert cases.check_decode(heads, [3, 130], 2, CPU, dtype, 3) < bound


def test_a_sink_that_is_left_out_or_another_heads_is_noticed() -> None:
    heads = Heads(6, 2, 64, sinks=True)
    given = heads.sinks_on(CPU)
    assert given is not None
    for wrong in (None, given.roll(1)):
        values = iter([given, wrong] * 4)
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(Heads, "sinks_on", lambda self, device, values=values: next(values))
            assert cases.check_decode(heads, [130], 2, CPU, SINGLE) > 0.01


@pytest.mark.parametrize(
    ("heads", "half", "dtype", "norm"),
    crossed(
        [
            (Heads(4, 1, 64, scaled=True), 32),
            (Heads(6, 2, 80, scaled=True, window=40), 20),  # half of the channels rotate
            (Heads(4, 2, 32, scaled=True, kv_dtype=torch.int8), 16),
        ],
        TYPES_AND_NORMS,
        most=2,
    ),
)
def test_queries_are_multiplied_by_the_scale_of_their_position(
    heads: Heads, half: int, norm: torch.dtype | None, dtype: torch.dtype
) -> None:
    bound = max(BOUNDS[dtype], BOUNDS[norm or dtype])
    assert cases.check_rope_decode(heads, half, norm, [1, 0, 65, 130], 2, CPU, dtype) < bound
    bound = max(bound, heads.bound(dtype))
    assert cases.check_rope_store(heads, half, norm, 5, CPU, dtype) < bound


def test_scales_of_queries_that_are_left_out_are_noticed() -> None:
    def no_scales(cuda_call: Any) -> Any:
        return lambda qkv, rope, *args, **how: cuda_call(
            qkv, replace(rope, query_scales=None), *args, **how
        )

    heads = Heads(4, 1, 64, scaled=True)
    with pytest.MonkeyPatch.context() as patch:
        for name in ("rope_store", "rope_decode_attention"):
            patch.setattr(cases.cuda, name, no_scales(getattr(cases.cuda, name)))
        assert cases.check_rope_store(heads, 32, None, 5, CPU, SINGLE) > 0.01
        assert cases.check_rope_decode(heads, 32, None, [65, 2], 2, CPU, SINGLE) > 0.01


@pytest.mark.parametrize(
    ("dtype", "kv_dtype", "dim"),
    crossed([(SINGLE, HALF), (HALF, SINGLE)], [64, 96], most=1),
)
def test_a_cache_of_another_type_than_the_model(
    dtype: torch.dtype, kv_dtype: torch.dtype, dim: int
) -> None:
    """Rounded to the cache's type when it is stored, to the queries' when it is read."""
    heads = Heads(4, 2, dim, kv_dtype=kv_dtype)
    bound, lengths = heads.bound(dtype), [1, 0, 65, 130]
    # What is read needs no more rounding than the model's own type has.
    assert cases.check_prefill(heads, [(0, 70), (50, 40)], CPU, dtype) < BOUNDS[dtype]
    assert cases.check_decode(heads, lengths, 2, CPU, dtype) < BOUNDS[dtype]
    assert cases.check_decode(heads, [2, 64, 67], 2, CPU, dtype, 2) < BOUNDS[dtype]
    assert cases.check_rope_decode(heads, dim // 2, None, lengths, 2, CPU, dtype) < bound
    assert cases.check_rope_store(heads, dim // 2, None, 5, CPU, dtype) < bound


@pytest.mark.parametrize(
    ("dtype", "heads", "kv_dtype"),
    crossed(
        [
            (SINGLE, Heads(6, 2, 32)),
            (HALF, Heads(4, 1, 80, 5, window=40)),
            (HALF, Heads(4, 2, 32, softcap=2.0, sinks=True)),
        ],
        KV_8_BIT,
        most=2,
    ),
)
def test_an_8_bit_cache(kv_dtype: torch.dtype, dtype: torch.dtype, heads: Heads) -> None:
    """Odd pages and head sizes, windows, softcaps, sinks."""
    heads, bound, lengths = replace(heads, kv_dtype=kv_dtype), BOUNDS[dtype], [1, 0, 65, 130]
    assert cases.check_prefill(heads, [(0, 33), (50, 20)], CPU, dtype) < bound
    assert cases.check_decode(heads, [2, 67], 2, CPU, dtype, 2) < bound
    for norm in (None, dtype):
        rope = (heads.dim // 4, norm)
        assert cases.check_rope_decode(heads, *rope, lengths, 2, CPU, dtype) < bound
        stored = heads.bound(dtype)
        assert cases.check_rope_store(heads, *rope, 5, CPU, dtype) < stored


def test_blocks_that_lie_beyond_two_to_the_31_elements() -> None:
    """A pool of 2 ** 31 elements and more, of which only the pages that are used exist."""
    page, kv, dim, stride = 16, 1, 64, (1 << 30) + 4096
    flat = torch.from_numpy(np.empty(3 * stride, np.float16))
    keys, values = (
        flat[at:].as_strided((3, page, kv, dim), (stride, kv * dim, dim, 1))
        for at in (0, page * dim)
    )
    length, table = 32, torch.tensor([[1, 2]], dtype=torch.int32)
    heads = Heads(4, kv, dim)
    qkv = torch.randn(length, (4 + 2 * kv) * dim).half()
    cos = sin = torch.ones(length, dim // 2)
    index = torch.arange(length)
    slots, one = index + page, torch.zeros(1, dtype=torch.int32)
    rope = Rope(cos, sin)
    view = KVView(keys, values, table, slots)
    made = cases.cuda.rope_store(qkv, rope, index, view)
    assert torch.equal(keys[2], made[page:, 4:5])
    assert torch.equal(values[2], made[page:, 5:])
    rule, lengths = AttentionRule(heads.scale), torch.tensor([length], dtype=torch.int32)
    q, how = made[:, :4], (table[0].long(), 0, heads.scale, None, 0.0)
    right = definitions.attention(q, keys, values, *how)
    out = cases.poisoned(length, 4, dim, like=qkv)
    ends = torch.tensor([0, length], dtype=torch.int32)
    chunk = PrefillWork(one, one, ends, length, length, 0, [(0, length)])
    cases.cuda.prefill_attention(q, view, rule, chunk, out=out, chunk_kv=None)
    assert cases.worst(out, right) < BOUNDS[HALF]
    work = DecodeWork(one, lengths, 1, 1, cases.cuda.decode_scratch(1, 4, dim, 1, CPU))
    last = cases.poisoned(1, 4, dim, like=qkv)
    cases.cuda.decode_attention(made[-1:, :4], view, rule, work, out=last)
    assert cases.worst(last, right[-1:]) < BOUNDS[HALF]
    new, at_end = torch.randn(1, (4 + 2 * kv) * dim).half(), replace(view, slots=slots[-1:])
    cases.cuda.rope_decode_attention(new, rope, index[-1:], at_end, rule, work, out=last)
    assert torch.equal(values[2, -1], new.view(6, dim)[5:])


@pytest.mark.parametrize(
    ("heads", "half", "dtype", "norm"),
    crossed(
        [
            (Heads(16, 8, 128), 64),
            (Heads(9, 3, 80, 32), 40),
            (Heads(4, 4, 96), 24),  # half of the channels rotate
            (Heads(4, 2, 64), 1),  # two, as where a layer has no rope
            (Heads(10, 1, 256), 32),
        ],
        TYPES_AND_NORMS,
        most=2,
    ),
)
def test_rope_and_store_equal_the_definition(
    heads: Heads, half: int, norm: torch.dtype | None, dtype: torch.dtype
) -> None:
    error = cases.check_rope_store(heads, half, norm, 5, CPU, dtype)
    assert error < max(BOUNDS[dtype], BOUNDS[norm or dtype])


def test_a_position_too_few_is_noticed() -> None:
    """The checks can fail: by what one key of fifty adds, and by NaN."""
    right = cases.expected_attention

    def short(q: torch.Tensor, cache: cases.Cache, sequence: int, start: int) -> torch.Tensor:
        return right(q, cache, sequence, start - 1)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(cases, "expected_attention", short)
        assert cases.check_decode(Heads(4, 1, 64), [50], 2, CPU, SINGLE) > 0.01
        assert cases.check_decode(Heads(4, 1, 64), [50], 2, CPU, SINGLE, 2) > 0.01
        error = cases.check_rope_decode(Heads(4, 1, 64), 32, SINGLE, [50, 9], 2, CPU, SINGLE)
        assert error > 0.01
    nan = torch.tensor([[1.0, float("nan")]])
    assert not cases.worst(nan, torch.ones(1, 2)) < 1
