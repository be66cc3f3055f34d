"""Each Triton kernel against `definitions` on random ragged inputs, for any device and dtype.

`tests/kernels/interpreted` runs these on a CPU, `tests.gpu.kernels_check` on a GPU. Outputs start
as NaN, and so does all of the cache that no sequence owns: what is read or left unwritten by
mistake shows. A case returns the largest relative error of any row, ‖out − expected‖ / ‖expected‖.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import product
from typing import Any

import numpy as np
import torch

from tests.kernels import definitions
from twostroke.exec import torch_sampling
from twostroke.exec.device_rows import DeviceRows
from twostroke.exec.device_sampling import DeviceSampler
from twostroke.exec.rng import stream_key, stream_keys
from twostroke.exec.token_mask import mask_of
from twostroke.kernels import cuda, kv_dtypes, reference_sampling
from twostroke.kernels.activations import Activation
from twostroke.kernels.records import (
    AttentionRule,
    DecodeWork,
    DrawParams,
    KVView,
    PrefillWork,
    Rope,
    StepContext,
)
from twostroke.kv.block_layout import side_bytes
from twostroke.plan import NewRow
from twostroke.request import SamplingParams

# Rounding of the results, of the softmax's weights, and of what goes into the matrix units.
BOUNDS = {torch.float32: 2e-6, torch.float16: 2e-3, torch.bfloat16: 1.2e-2}
# What is stored where it is rounded the other way: some of a row's numbers, by a step of the type.
STORED = {torch.int8: 1e-2, torch.float8_e4m3fn: 4e-2, torch.float8_e5m2: 8e-2}
NAN = float("nan")
LAYERS, LAYER = 3, 1  # of the pool, and the one that is used
ANGLES = 500  # positions that can be rotated


@dataclass(frozen=True)
class Heads:
    """H query heads over K key and value heads of D channels, in pages."""

    num_heads: int
    num_kv_heads: int
    dim: int
    page: int = 16
    window: int | None = None
    softcap: float = 0.0
    kv_dtype: torch.dtype | None = None  # of the cache, if it is another than the model's
    sinks: bool = False
    scaled: bool = False  # queries, by a number of their position

    @property
    def scale(self) -> float:
        return 1.1 * self.dim**-0.5

    def sinks_on(self, device: torch.device) -> torch.Tensor | None:
        """From far below all scores to above them, where fp16 still has what is left of values."""
        if not self.sinks:
            return None
        return torch.linspace(-20, 5, self.num_heads).roll(1).to(device)

    def rule_on(self, device: torch.device) -> AttentionRule:
        return AttentionRule(self.scale, self.window, self.softcap, sinks=self.sinks_on(device))

    def scales_on(self, positions: torch.Tensor) -> torch.Tensor | None:
        """Return the scales of queries; NaN at all other positions."""
        if not self.scaled:
            return None
        scales = torch.full((ANGLES,), NAN, device=positions.device)
        scales[positions] = (1 + torch.rand(len(positions))).to(positions.device)
        return scales

    def bound(self, dtype: torch.dtype) -> float:
        """Return the bound of the error. Stored values may round the other way."""
        return max(BOUNDS[dtype], (BOUNDS | STORED)[self.kv_dtype or dtype])


@dataclass
class Cache:
    """Sequences of the given lengths, in blocks drawn at random; NaN wherever they are not. Keys
    and values are views of one layer of a block-major pool."""

    heads: Heads
    lengths: Sequence[int]
    device: torch.device
    dtype: torch.dtype
    keys: torch.Tensor = field(init=False)
    values: torch.Tensor = field(init=False)
    tables: torch.Tensor = field(init=False)
    rows: list[int] = field(init=False)

    def __post_init__(self) -> None:
        heads, dtype = self.heads, self.heads.kv_dtype or self.dtype
        used = [-(-length // heads.page) for length in self.lengths]
        blocks = sum(used) + 3
        inner = (heads.page, heads.num_kv_heads, heads.dim)
        if dtype == torch.int8:
            size = side_bytes(*inner, 1, scaled=True)
            pool = torch.full((blocks, LAYERS, 2, size), 99, dtype=dtype, device=self.device)
            parts = pool[..., : math.prod(inner)].unflatten(-1, inner)
        else:
            parts = torch.empty((blocks, LAYERS, 2, *inner), dtype=dtype, device=self.device)
        self.keys, self.values = parts[:, LAYER, 0], parts[:, LAYER, 1]
        for layer, side in product(range(LAYERS), range(2)):
            poison(parts[:, layer, side])
        order = (torch.randperm(blocks - 2) + 1).tolist()
        # One table row too many, in another order; past a sequence's end, a block of NaN.
        self.rows = torch.randperm(len(self.lengths) + 1)[: len(self.lengths)].tolist()
        tables = torch.full((len(self.lengths) + 1, max(used) + 2), blocks - 1, dtype=torch.int32)
        for row, count, length in zip(self.rows, used, self.lengths, strict=True):
            mine = [order.pop() for _ in range(count)]
            tables[row, :count] = torch.tensor(mine, dtype=torch.int32)
            for index, block in enumerate(mine):
                size = min(heads.page, length - index * heads.page)
                slots = block * heads.page + torch.arange(size, device=self.device)
                for cache in (self.keys, self.values):
                    new = torch.randn(size, *inner[1:]).to(self.device)
                    kv_dtypes.store(cache, slots, new)
        self.tables = tables.to(self.device)

    def view(self, slots: torch.Tensor | None = None) -> KVView:
        """`slots`: where new entries go; by default there are no new entries."""
        nowhere = torch.empty(0, dtype=torch.int64, device=self.device)
        return KVView(self.keys, self.values, self.tables, nowhere if slots is None else slots)

    def table(self, sequence: int) -> torch.Tensor:
        return self.tables[self.rows[sequence]].long()


def poison(cache: torch.Tensor, at: Any = slice(None)) -> None:
    """NaN, of int8 in the scales."""
    if cache.dtype == torch.int8:
        kv_dtypes.scales_of(cache)[at] = NAN
    elif cache.dtype.itemsize == 1:
        cache.view(torch.uint8)[at] = 0x7F  # NaN in both types
    else:
        cache[at] = NAN


def seen(cache: torch.Tensor) -> torch.Tensor:
    """Return the values that the whole cache represents."""
    if cache.dtype.itemsize > 1:
        return cache.clone()
    return kv_dtypes.load(cache, torch.arange(len(cache), device=cache.device), torch.float32)


def ints(values: Sequence[int], device: torch.device) -> torch.Tensor:
    return torch.tensor(values, dtype=torch.int32, device=device)


def poisoned(*shape: int, like: torch.Tensor) -> torch.Tensor:
    return torch.full(shape, NAN, dtype=like.dtype, device=like.device)


def worst(out: torch.Tensor, expected: torch.Tensor) -> float:
    """Return the largest relative error of the rows (last dimension); NaN if any value is NaN."""
    wide, right = out.double(), expected.double()
    error = (wide - right).norm(dim=-1) / right.norm(dim=-1).clamp(min=1e-30)
    error = torch.where(right.norm(dim=-1) == 0, wide.norm(dim=-1), error)
    return float(error.max()) if not error.isnan().any() else NAN


def largest(first: float, second: float) -> float:
    """NaN wins."""
    return second if not second <= first else first


# ── attention ───────────────────────────────────────────────────────────────────────────────


def expected_attention(q: torch.Tensor, cache: Cache, sequence: int, start: int) -> torch.Tensor:
    heads, table = cache.heads, cache.table(sequence)
    how = (start, heads.scale, heads.window, heads.softcap, heads.sinks_on(q.device))
    return definitions.attention(q, cache.keys, cache.values, table, *how)


def check_prefill(
    heads: Heads, chunks: Sequence[tuple[int, int]], device: torch.device, dtype: torch.dtype
) -> float:
    """`chunks` are (start, size): what is before a chunk is cached, by a chunk or a prefix hit."""
    cache = Cache(heads, [start + size for start, size in chunks], device, dtype)
    drop_passed(cache, [start for start, _ in chunks])
    ends = torch.tensor([0] + [size for _, size in chunks]).cumsum(0).tolist()
    q = torch.randn(ends[-1], heads.num_heads, heads.dim).to(device, dtype)
    chunk_kv = poisoned(ends[-1], heads.num_heads + 2 * heads.num_kv_heads, heads.dim, like=q)
    chunk_kv = chunk_kv[:, heads.num_heads :]  # only of first chunks: others must not look there
    for index, (start, size) in enumerate(chunks):
        if start == 0 and size and (heads.kv_dtype is None or heads.kv_dtype.itemsize == 1):
            table, to = cache.table(index), chunk_kv[ends[index] : ends[index + 1]]
            both = (cache.keys, cache.values)
            found = [definitions.gather(each, table, 0, size, dtype) for each in both]
            to[:] = torch.cat(found, dim=1)
    work = prefill_work(cache, chunks)
    error = 0.0
    for given in (None, chunk_kv):
        rule, out = heads.rule_on(device), poisoned(*q.shape, like=q)
        cuda.prefill_attention(q, cache.view(), rule, work, out=out, chunk_kv=given)
        for index, (start, _) in enumerate(chunks):
            part = slice(ends[index], ends[index + 1])
            right = expected_attention(q[part], cache, index, start)
            error = largest(error, worst(out[part], right))
    return error


def prefill_work(cache: Cache, chunks: Sequence[tuple[int, int]]) -> PrefillWork:
    """`chunks` are (start, size), one for each sequence of the cache."""
    starts, sizes = [start for start, _ in chunks], [size for _, size in chunks]
    ends = torch.tensor([0, *sizes]).cumsum(0).tolist()
    first, continued = (
        max((size for start, size in chunks if (start == 0) == is_first), default=0)
        for is_first in (True, False)
    )
    return PrefillWork(
        ints(cache.rows, cache.device),
        ints(starts, cache.device),
        ints(ends, cache.device),
        ends[-1],
        first,
        continued,
        [(start, start + size) for start, size in chunks],
    )


def decode_work(
    cache: Cache, lengths: Sequence[int], splits: int, scratch: Any, queries: int = 1
) -> DecodeWork:
    rows, seen = ints(cache.rows, cache.device), ints(lengths, cache.device)
    return DecodeWork(rows, seen, queries, splits, scratch)


def check_decode(
    heads: Heads,
    lengths: Sequence[int],
    splits: int,
    device: torch.device,
    dtype: torch.dtype,
    queries: int = 1,
) -> float:
    """Length 0 is a padding row. Runs twice: the first must leave the scratch as it was."""
    cache = Cache(heads, lengths, device, dtype)
    drop_passed(cache, [length - queries for length in lengths])
    tokens = len(lengths) * queries
    q = torch.randn(tokens, heads.num_heads, heads.dim).to(device, dtype)
    scratch = cuda.decode_scratch(tokens, heads.num_heads, heads.dim, splits, device)
    work, error = decode_work(cache, lengths, splits, scratch, queries), 0.0
    for _ in range(2):
        scratch.partial.fill_(NAN)
        scratch.lse.fill_(NAN)
        rule, out = heads.rule_on(device), poisoned(*q.shape, like=q)
        cuda.decode_attention(q, cache.view(), rule, work, out=out)
        for index, length in enumerate(lengths):
            part = slice(index * queries, (index + 1) * queries)
            right = torch.zeros_like(q[part], dtype=torch.float32)
            if length:
                right = expected_attention(q[part], cache, index, length - queries)
            error = largest(error, worst(out[part], right))
    return error


def check_rope_decode(
    heads: Heads,
    half: int,
    norm: torch.dtype | None,
    lengths: Sequence[int],
    splits: int,
    device: torch.device,
    dtype: torch.dtype,
) -> float:
    """Positions have nothing to do with lengths, and other angles are NaN, as is each sequence's
    last entry in the cache and all inputs of a padding row. The second of two runs stores nothing
    for the last sequence, which then reads what is there. `norm`: its weights' type."""
    num, kv, dim, batch = heads.num_heads, heads.num_kv_heads, heads.dim, len(lengths)
    cache = Cache(heads, lengths, device, dtype)
    drop_passed(cache, [length - 1 for length in lengths])
    ends = torch.tensor([max(length - 1, 0) for length in lengths], device=device)
    real = ints(lengths, device) > 0
    blocks = cache.tables[cache.rows, ends // heads.page].long()
    slots = torch.where(real, blocks * heads.page + ends % heads.page, -1)
    qkv = torch.randn(batch, (num + 2 * kv) * dim).to(device, dtype)
    positions, cos, sin = random_angles(batch, half, device)
    weights = random_norms(dim, norm, device)
    scales = heads.scales_on(positions)
    made = normed_and_rotated(heads, qkv, *weights, cos, sin, scales, positions)
    qkv[~real] = NAN
    positions[~real] = -(1 << 40)
    caches, page = (cache.keys, cache.values), heads.page
    for cached in caches:
        poison(cached, (blocks[real], ends[real] % page))
    scratch = cuda.decode_scratch(batch, num, dim, splits, device)
    work = decode_work(cache, lengths, splits, scratch)
    rope = Rope(cos, sin, scales, *weights, 1e-6)
    error = stored_error = 0.0
    for stored in (slots, torch.cat([slots[:-1], torch.full_like(slots[-1:], -1)])):
        before = [seen(cached) for cached in caches]
        scratch.partial.fill_(NAN)
        scratch.lse.fill_(NAN)
        out, rule = poisoned(batch, num, dim, like=qkv), heads.rule_on(device)
        view = cache.view(stored)
        cuda.rope_decode_attention(qkv, rope, positions, view, rule, work, out=out)
        there = stored >= 0
        at = (stored[there] // page, stored[there] % page)
        for cached, old, right in zip(caches, before, made[1:], strict=True):
            kept = seen(cached)
            as_stored = kv_dtypes.as_stored(right[there], cached.dtype)
            stored_error = largest(stored_error, worst(kept[at], as_stored))
            kept[at] = old[at]
            assert (kept.isnan() == old.isnan()).all()
            assert torch.equal(kept.nan_to_num(), old.nan_to_num())
        for index, length in enumerate(lengths):
            right = torch.zeros(1, num, dim, device=device)
            if length:
                right = expected_attention(made[0][index : index + 1], cache, index, length - 1)
            error = largest(error, worst(out[index : index + 1], right))
        last = blocks[-1:] * page + ends[-1:] % page
        for cached in caches:  # for the second run: NaN again, and for the last one something else
            poison(cached, at)
            kv_dtypes.store(cached, last, torch.randn(1, kv, dim).to(device))
    assert stored_error < heads.bound(dtype), stored_error
    return error


def drop_passed(cache: Cache, positions: Sequence[int]) -> None:
    """Blocks that the window of `positions` has passed are given up, and hold NaN."""
    window, page = cache.heads.window, cache.heads.page
    if window is not None:
        for row, position in zip(cache.rows, positions, strict=True):
            passed = max(0, position - window + 1) // page
            cache.tables[row, :passed] = cache.keys.shape[0] - 1


# ── norms, activation, rope and store ───────────────────────────────────────────────────────


def check_norms(
    rows: int, width: int, device: torch.device, dtype: torch.dtype, norm: torch.dtype
) -> float:
    """`norm`: the type of the weights."""
    x, residual = (torch.randn(rows, width).to(device, dtype) for _ in range(2))
    weight = torch.randn(width).to(device, norm)
    out = cuda.rms_norm(x, weight, 1e-5)
    assert out.dtype == dtype
    error = worst(out, definitions.rms_norm(x, weight, 1e-5))
    total = residual + x
    out = cuda.add_rms_norm(x, residual, weight, 1e-5)
    error = largest(error, worst(out, definitions.rms_norm(total, weight, 1e-5)))
    assert torch.equal(residual, total)
    wide = torch.randn(rows, width + 8).to(device, dtype)[:, 8:]
    error = largest(
        error,
        worst(cuda.rms_norm(wide, weight, 1e-5), definitions.rms_norm(wide, weight, 1e-5)),
    )
    heads = torch.randn(rows, 3, 96).to(device, dtype)
    weight = torch.randn(96).to(device, norm)
    out = cuda.rms_norm(heads, weight, 1e-6)
    return largest(error, worst(out, definitions.rms_norm(heads, weight, 1e-6)))


def check_products(
    rows: int,
    columns: int,
    inner: int,
    device: torch.device,
    dtype: torch.dtype,
    activation: Activation,
    context: StepContext,
) -> float:
    """The plain one, and the gated pair, which is rounded after each of its steps."""
    x, weight = torch.randn(rows, inner), torch.randn(2 * columns, inner) * inner**-0.5
    x, weight = x.to(device, dtype), weight.to(device, dtype)
    right = x.double() @ weight.double().T
    error = worst(cuda.product(x, weight[:columns], context=context), right[:, :columns])
    out = poisoned(rows, columns, like=x)
    assert cuda.product(x, weight[:columns], context=context, out=out) is out
    error = largest(error, worst(out, right[:, :columns]))
    gated = cuda.gated_product(x, weight, activation, context=context)
    return largest(error, worst(gated, definitions.act_and_mul(right.to(dtype), activation)))


def check_act_and_mul(
    rows: int, width: int, device: torch.device, dtype: torch.dtype, activation: Activation
) -> float:
    gate_up = (3 * torch.randn(rows, 2 * width)).to(device, dtype)
    out = cuda.act_and_mul(gate_up, activation)
    return worst(out, definitions.act_and_mul(gate_up, activation))


def check_rope_store(
    heads: Heads,
    half: int,
    norm: torch.dtype | None,
    tokens: int,
    device: torch.device,
    dtype: torch.dtype,
) -> float:
    num, kv, dim = heads.num_heads, heads.num_kv_heads, heads.dim
    cache = Cache(heads, [tokens], device, dtype)
    poison(cache.keys)
    poison(cache.values)
    clean = cache.keys.shape[0] * heads.page
    slots = torch.randperm(clean)[:tokens]
    slots[tokens // 2] = -1
    slots = slots.to(device)
    positions, cos, sin = random_angles(tokens, half, device)
    qkv = torch.randn(tokens, (num + 2 * kv) * dim).to(device, dtype)
    weights = random_norms(dim, norm, device)
    scales = heads.scales_on(positions)
    q, k, v = normed_and_rotated(heads, qkv, *weights, cos, sin, scales, positions)
    v = v.clone()
    rope = Rope(cos, sin, scales, *weights, 1e-6)
    out = cuda.rope_store(qkv, rope, positions, cache.view(slots))
    assert out.data_ptr() == qkv.data_ptr()
    kind = cache.keys.dtype
    in_row = [kv_dtypes.as_stored(x, kind) if kind.itemsize == 1 else x for x in (k, v)]
    error = worst(out, torch.cat([q, *in_row], dim=1))
    stored = slots >= 0
    for cached, right in ((cache.keys, k), (cache.values, v)):
        flat = seen(cached).flatten(0, 1)
        as_stored = kv_dtypes.as_stored(right[stored], kind)
        error = largest(error, worst(flat[slots[stored]], as_stored))
        untouched = torch.ones(clean, dtype=torch.bool, device=device)
        untouched[slots[stored]] = False
        assert flat[untouched].isnan().all()
    return error


def random_angles(
    tokens: int, half: int, device: torch.device
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Positions, and `cos` and `sin` that are NaN at all others."""
    positions = torch.randint(0, ANGLES, (tokens,))
    angles = torch.full((ANGLES, half), NAN)
    angles[positions] = torch.rand(tokens, half) * 6
    return positions.to(device), angles.cos().to(device), angles.sin().to(device)


def random_norms(
    dim: int, norm: torch.dtype | None, device: torch.device
) -> tuple[torch.Tensor | None, torch.Tensor | None]:
    """Return norm weights of queries and of keys."""
    if norm is None:
        return None, None
    return torch.randn(dim).to(device, norm), torch.randn(dim).to(device, norm)


def normed_and_rotated(
    heads: Heads,
    qkv: torch.Tensor,
    q_norm: torch.Tensor | None,
    k_norm: torch.Tensor | None,
    cos: torch.Tensor,
    sin: torch.Tensor,
    scales: torch.Tensor | None,
    positions: torch.Tensor,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """q, k and v of a QKV product, each [T, heads, D]."""
    num, kv = heads.num_heads, heads.num_kv_heads
    q, k, v = qkv.unflatten(1, (-1, heads.dim)).split([num, kv, kv], dim=1)
    if q_norm is not None and k_norm is not None:
        q = definitions.rms_norm(q, q_norm, 1e-6)
        k = definitions.rms_norm(k, k_norm, 1e-6)
    q, k = (definitions.rope(part, cos[positions], sin[positions]) for part in (q, k))
    if scales is not None:
        q = (q.float() * scales[positions].to(q.dtype).float()[:, None, None]).to(q.dtype)
    return q, k, v


# ── sampling ────────────────────────────────────────────────────────────────────────────────

SETTINGS: list[dict[str, float | int]] = [
    {"temperature": 0.0},
    {"temperature": 1.0},
    {"temperature": 0.6},
    {"temperature": 0.8, "top_k": 1},
    {"temperature": 1.2, "top_k": 20},
    {"temperature": 0.7, "top_p": 0.9},
    {"temperature": 1.0, "top_p": 1e-6},
    {"temperature": 0.9, "min_p": 0.1},
    {"temperature": 0.6, "top_k": 20, "top_p": 0.95},
    {"temperature": 1.5, "top_k": 50, "min_p": 0.05},
    {"temperature": 1.5, "top_p": 0.8, "min_p": 0.02},
    {"temperature": 1.3, "top_k": 40, "top_p": 0.7, "min_p": 0.01},
]


def check_sample(
    rows: int, vocab: int, spread: float, device: torch.device, dtype: torch.dtype
) -> list[tuple[int, int, int]]:
    """(row, token, expected) wherever the draw is another than `exec/torch_sampling.py` has."""
    logits = (torch.randn(rows, vocab) * spread).to(device, dtype)
    logits[:, 5 : vocab // 7] = float("-inf")
    params = [SETTINGS[row % len(SETTINGS)] for row in range(rows)]
    positions = [3 + row for row in range(rows)]
    state = DeviceRows(rows, rows + 8, 16, 1, torch.device("cpu"))
    for row, setting in enumerate(params):
        asked = SamplingParams(**setting)  # type: ignore[arg-type]
        state.rows[row] = NewRow(row, "r", (1, 2, 3), 3, asked, 7919 * row, frozenset(), ())
    right = torch_sampling.sample(logits.float().cpu(), range(rows), positions, state).tokens

    def column(name: str, none: float) -> torch.Tensor:
        return torch.tensor([setting.get(name, none) for setting in params], device=device)

    keys = torch.tensor([stream_key(7919 * row, positions[row]) for row in range(rows)])
    by = DrawParams(
        temperature=column("temperature", 1.0).float(),
        top_k=column("top_k", 0).int(),
        top_p=column("top_p", 1.0).float(),
        min_p=column("min_p", 0.0).float(),
        key0=keys[:, 0].contiguous().to(device),
        key1=keys[:, 1].contiguous().to(device),
    )
    out = cuda.sample(logits, by, out=torch.full((rows,), -1, device=device))
    found = zip(out.tolist(), right.tolist(), strict=True)
    return [(row, token, other) for row, (token, other) in enumerate(found) if token != other]


# ── what requests forbid or favour, and log-probabilities ───────────────────────────────────

VARIED: list[dict[str, Any]] = [
    {"repetition_penalty": 1.3},
    {"frequency_penalty": 0.4},
    {"presence_penalty": -0.7},
    {"logit_bias": {3: 5.0, 250: -3.25, 0: 100.0}},
    {"allowed_token_ids": [0, 31, 32, 63, 250]},
    {"min_tokens": 9, "stop_ids": (4, 250, 5)},
    {"bad_words": ((7,), (8, 9), (1, 2, 3), (2, 3), (*range(13),))},
    {"repetition_penalty": 0.8, "logit_bias": {8: 4.0, 9: -4.0}, "frequency_penalty": 1.1},
    {"logit_bias": {8: 4.0, 7: 6.0}, "bad_words": ((7,),), "allowed_token_ids": [7, 8, 9]},
]


def varied_rows(count: int, vocab: int) -> list[NewRow]:
    """A prompt 1 2 3 with 8 9 8 1 2 written after it; each row asks for something else."""
    found = []
    for row in range(count):
        asked = dict(VARIED[row % len(VARIED)])
        stops, words = frozenset(asked.pop("stop_ids", ())), asked.pop("bad_words", ())
        params = SamplingParams(max_tokens=64, temperature=0.7 * (row % 3), **asked)
        tokens = (1, 2, 3, vocab - 1, 8, 9, 8, 1, 2)
        found.append(NewRow(row, f"r{row}", tokens, 4, params, 31 * row, stops, words))
    return found


def check_adjust(
    count: int, vocab: int, device: torch.device, dtype: torch.dtype
) -> tuple[bool, bool, bool]:
    """Return whether adjusted logits, tokens and stored counts equal the definition's, in several
    steps of rows with different sampling parameters."""
    requests, same = varied_rows(count, vocab), [True] * 3
    sides = []
    for kernels, place in ((cuda, device), (reference_sampling, torch.device("cpu"))):
        tokens = torch.zeros(count, 33, dtype=torch.int32, device=place)
        sampler = DeviceSampler(count, vocab, tokens, kernels, place)
        for part in sampler._state[1:]:
            part.fill_(77)  # of whoever had the rows before
        for new in requests:
            tokens[new.row, : len(new.tokens)] = torch.tensor(new.tokens)
            sampler.take(new)
        sides.append((sampler, place))
    which = np.arange(count)[::-1].copy()
    masks = {1: mask_of(range(0, vocab, 3), vocab), 4: mask_of(range(32), vocab)}
    seeds = np.array([requests[row].seed for row in which], np.uint64)
    heat = np.array([requests[row].params.temperature for row in which], np.float32)
    nothing = np.zeros(count, np.float32)
    for position in range(len(requests[0].tokens), len(requests[0].tokens) + 3):
        lines = (torch.randn(count, vocab) * 3).to(dtype)
        at = np.full(count, position)
        by = DrawParams(heat, nothing, nothing + 1, nothing, *stream_keys(seeds, at))
        left, right = [], []
        for (sampler, place), found in zip(sides, (left, right), strict=True):
            out = torch.full((count,), -7, dtype=torch.int32, device=place)
            logits = lines.to(place)
            drawn = sampler.draw(logits, which, which, at, masks, by)
            adjusted = torch.empty(count, vocab, device=place)
            bits = torch.from_numpy(np.stack(list(masks.values())).view(np.int32)).to(place)
            sampler._kernels.adjust_logits(logits, drawn.samples, sampler._state, bits, adjusted)
            sampler.advance(drawn, out)
            penalised = [new.row for new in requests if new.params.penalised]
            kept = sampler.tokens.cpu(), sampler._state.counts[penalised].cpu()
            found += [adjusted.cpu(), out.cpu(), *kept]
        equal = [torch.equal(a, b) for a, b in zip(left, right, strict=True)]
        same = [a and b for a, b in zip(same, (*equal[:2], equal[2] and equal[3]), strict=True)]
    return same[0], same[1], same[2]


def check_logprobs(
    vocab: int, count: int, device: torch.device, dtype: torch.dtype
) -> tuple[bool, float]:
    """Return whether ids and ranks equal the definition's, and the largest error of a logprob."""
    logits = torch.randn(6, vocab, dtype=torch.float64)
    logits = (logits.argsort(1).argsort(1) / vocab * 9 - 4).to(dtype)  # no two alike, in fp32
    logits[2, 5 : vocab // 2] = float("-inf")
    tokens = logits.argmax(1).int()
    tokens[3], tokens[4] = vocab - 1, 0
    which = torch.tensor([4, 0, 2, 3], dtype=torch.int32)
    right = reference_sampling.token_logprobs(logits, which, tokens, count)
    given = [each.to(device) for each in (logits, which, tokens)]
    ids, values, ranks = (part.cpu() for part in cuda.token_logprobs(*given, count))
    same = torch.equal(ids.long(), right[0]) and torch.equal(ranks.long(), right[2])
    return same, float((values - right[1]).abs().max())
