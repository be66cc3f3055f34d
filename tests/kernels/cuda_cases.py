"""Each Triton kernel against `reference` on random ragged inputs, for any device and dtype.

`test_cuda_interpreted` runs these on a CPU, `tests.gpu.kernels_check` on a GPU. Outputs start as
NaN, and so does all of the cache that no sequence owns: what is read or left unwritten by mistake
shows. A case returns the largest relative error of any row, ‖out − expected‖ / ‖expected‖.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch

from twostroke.exec import sampling
from twostroke.exec.device_sampling import DeviceSampler
from twostroke.exec.rng import stream_key, stream_keys
from twostroke.exec.tensor_rows import TensorRows
from twostroke.exec.token_mask import mask_of
from twostroke.kernels import cuda, reference, reference_sampling
from twostroke.plan import NewRow
from twostroke.request import SamplingParams

# Rounding of the results, of the softmax's weights, and of what goes into the matrix units.
BOUNDS = {torch.float32: 2e-6, torch.float16: 2e-3, torch.bfloat16: 1.2e-2}
NAN = float("nan")


@dataclass(frozen=True)
class Heads:
    """H query heads over K key and value heads of D channels, in pages."""

    num_heads: int
    num_kv_heads: int
    dim: int
    page: int = 16
    window: int | None = None
    softcap: float = 0.0
    interleaved: bool = False  # the layers of a block side by side, so that blocks lie apart

    @property
    def scale(self) -> float:
        return self.dim**-0.5


@dataclass
class Cache:
    """Sequences of the given lengths, in blocks drawn at random; NaN wherever they are not."""

    heads: Heads
    lengths: Sequence[int]
    device: torch.device
    dtype: torch.dtype
    keys: torch.Tensor = field(init=False)
    values: torch.Tensor = field(init=False)
    tables: torch.Tensor = field(init=False)
    rows: list[int] = field(init=False)

    def __post_init__(self) -> None:
        heads = self.heads
        used = [-(-length // heads.page) for length in self.lengths]
        blocks = sum(used) + 3
        inner = (heads.page, heads.num_kv_heads, heads.dim)
        if heads.interleaved:
            pool = torch.full((blocks, 2, 2, *inner), NAN, dtype=self.dtype, device=self.device)
            self.keys, self.values = pool[:, 1, 0], pool[:, 1, 1]
        else:
            pool = torch.full((2, 2, blocks, *inner), NAN, dtype=self.dtype, device=self.device)
            self.keys, self.values = pool[1, 0], pool[1, 1]
        order = (torch.randperm(blocks - 2) + 1).tolist()
        # One table row too many, in another order; past a sequence's end, a block of NaN.
        self.rows = torch.randperm(len(self.lengths) + 1)[: len(self.lengths)].tolist()
        tables = torch.full((len(self.lengths) + 1, max(used) + 2), blocks - 1, dtype=torch.int32)
        for row, count, length in zip(self.rows, used, self.lengths, strict=True):
            mine = [order.pop() for _ in range(count)]
            tables[row, :count] = torch.tensor(mine, dtype=torch.int32)
            for index, block in enumerate(mine):
                size = min(heads.page, length - index * heads.page)
                for cache in (self.keys, self.values):
                    cache[block, :size] = torch.randn(size, *inner[1:]).to(cache)
        self.tables = tables.to(self.device)

    def table(self, sequence: int) -> torch.Tensor:
        return self.tables[self.rows[sequence]].long()


def ints(values: Sequence[int], device: torch.device) -> torch.Tensor:
    return torch.tensor(values, dtype=torch.int32, device=device)


def poisoned(*shape: int, like: torch.Tensor) -> torch.Tensor:
    return torch.full(shape, NAN, dtype=like.dtype, device=like.device)


def worst(out: torch.Tensor, expected: torch.Tensor) -> float:
    """Of the rows, which are the last dimension; NaN if anything is."""
    wide, right = out.double(), expected.double()
    error = (wide - right).norm(dim=-1) / right.norm(dim=-1).clamp(min=1e-30)
    error = torch.where(right.norm(dim=-1) == 0, wide.norm(dim=-1), error)
    return float(error.max()) if not error.isnan().any() else NAN


def expected_attention(
    q: torch.Tensor, cache: Cache, sequence: int, start: int, end: int
) -> torch.Tensor:
    """In fp32, from the values as they are stored."""
    heads, table = cache.heads, cache.table(sequence)
    keys, values, wide = cache.keys, cache.values, q.float()
    if not heads.softcap:
        return reference.prefill_attention(
            wide, keys, values, table, start, heads.scale, heads.window
        )
    k, v = reference.gather(keys, values, table, 0, end, torch.float32)
    group = heads.num_heads // heads.num_kv_heads
    k, v = k.repeat_interleave(group, 1), v.repeat_interleave(group, 1)
    score = torch.einsum("qhd,khd->hqk", wide, k) * heads.scale
    score = torch.tanh(score / heads.softcap) * heads.softcap
    query = torch.arange(start, end, device=q.device).unsqueeze(1)
    key = torch.arange(end, device=q.device).unsqueeze(0)
    visible = key <= query
    if heads.window is not None:
        visible &= key > query - heads.window
    score = score.masked_fill(~visible, float("-inf"))
    return torch.einsum("hqk,khd->qhd", score.softmax(-1), v)


def check_prefill(
    heads: Heads, chunks: Sequence[tuple[int, int]], device: torch.device, dtype: torch.dtype
) -> float:
    """`chunks` are (start, size): what is before a chunk is cached, by a chunk or a prefix hit."""
    cache = Cache(heads, [start + size for start, size in chunks], device, dtype)
    drop_passed(cache, [start for start, _ in chunks])
    ends = torch.tensor([0] + [size for _, size in chunks]).cumsum(0).tolist()
    q = torch.randn(ends[-1], heads.num_heads, heads.dim).to(device, dtype)
    own = poisoned(ends[-1], heads.num_heads + 2 * heads.num_kv_heads, heads.dim, like=q)
    own = own[:, heads.num_heads :]  # only of chunks that start at 0: others must not look there
    for index, (start, size) in enumerate(chunks):
        if start == 0 and size:
            table, to = cache.table(index), own[ends[index] : ends[index + 1]]
            found = reference.gather(cache.keys, cache.values, table, 0, size, dtype)
            to[:] = torch.cat(found, dim=1)
    fresh, later = ([size for start, size in chunks if (start == 0) == kind] for kind in (1, 0))
    largest_of = {"max_fresh": max(fresh, default=0), "max_chunk": max(later, default=0)}
    error = 0.0
    for given in ({"max_chunk": max(size for _, size in chunks)}, {"own": own, **largest_of}):
        out = cuda.prefill_attention(
            q,
            cache.keys,
            cache.values,
            cache.tables,
            ints(cache.rows, device),
            ints([start for start, _ in chunks], device),
            ints(ends, device),
            scale=heads.scale,
            window=heads.window,
            softcap=heads.softcap,
            out=poisoned(*q.shape, like=q),
            **given,
        )
        for index, (start, size) in enumerate(chunks):
            part = slice(ends[index], ends[index + 1])
            right = expected_attention(q[part], cache, index, start, start + size)
            error = largest(error, worst(out[part], right))
    return error


def check_decode(
    heads: Heads, lengths: Sequence[int], splits: int, device: torch.device, dtype: torch.dtype
) -> float:
    """Length 0 is a padding row. Runs twice: the first must leave the scratch as it was."""
    cache = Cache(heads, lengths, device, dtype)
    drop_passed(cache, [length - 1 for length in lengths])
    q = torch.randn(len(lengths), heads.num_heads, heads.dim).to(device, dtype)
    scratch = cuda.decode_scratch(len(lengths), heads.num_heads, heads.dim, splits, device)
    error = 0.0
    for _ in range(2):
        scratch.partial.fill_(NAN)
        scratch.weight.fill_(NAN)
        out = cuda.decode_attention(
            q,
            cache.keys,
            cache.values,
            cache.tables,
            ints(cache.rows, device),
            ints(lengths, device),
            heads.scale,
            heads.window,
            splits,
            scratch,
            softcap=heads.softcap,
            out=poisoned(*q.shape, like=q),
        )
        for index, length in enumerate(lengths):
            right = torch.zeros_like(q[:1], dtype=torch.float32)
            if length:
                right = expected_attention(q[index : index + 1], cache, index, length - 1, length)
            error = largest(error, worst(out[index : index + 1], right))
    return error


def check_rope_decode(
    heads: Heads,
    half: int,
    norm: bool,
    lengths: Sequence[int],
    splits: int,
    device: torch.device,
    dtype: torch.dtype,
) -> float:
    """Each sequence's last position is NaN in the cache, as are all inputs of a padding row. The
    second of two runs stores nothing for the last sequence, which then reads what is there."""
    num, kv, dim, batch = heads.num_heads, heads.num_kv_heads, heads.dim, len(lengths)
    cache = Cache(heads, lengths, device, dtype)
    drop_passed(cache, [length - 1 for length in lengths])
    ends = torch.tensor([max(length - 1, 0) for length in lengths], device=device)
    rows, real = ints(cache.rows, device), ints(lengths, device) > 0
    blocks = cache.tables[rows.long(), ends // heads.page].long()
    slots = torch.where(real, blocks * heads.page + ends % heads.page, -1)
    qkv = torch.randn(batch, (num + 2 * kv) * dim).to(device, dtype)
    angles = torch.rand(max(lengths), half) * 6
    cos, sin = angles.cos().to(device), angles.sin().to(device)
    weights = [torch.randn(dim).to(device, dtype) if norm else None for _ in range(2)]
    made = normed_and_turned(heads, qkv, *weights, cos[ends], sin[ends])
    qkv[~real] = NAN
    caches, page = (cache.keys, cache.values), heads.page
    for cached in caches:
        cached[blocks[real], ends[real] % page] = NAN
    scratch = cuda.decode_scratch(batch, num, dim, splits, device)
    error = 0.0
    for stored in (slots, torch.cat([slots[:-1], torch.full_like(slots[-1:], -1)])):
        before = [cached.clone() for cached in caches]
        scratch.partial.fill_(NAN)
        scratch.weight.fill_(NAN)
        out = cuda.rope_decode_attention(
            qkv,
            *weights,
            1e-6,
            cos,
            sin,
            stored,
            cache.keys,
            cache.values,
            cache.tables,
            rows,
            ints(lengths, device),
            heads.scale,
            heads.window,
            splits,
            scratch,
            softcap=heads.softcap,
            out=poisoned(batch, num, dim, like=qkv),
        )
        there = stored >= 0
        at = (stored[there] // page, stored[there] % page)
        for cached, old, right in zip(caches, before, made[1:], strict=True):
            error = largest(error, worst(cached[at], right[there]))
            kept = cached.clone()
            kept[at] = old[at]
            assert (kept.isnan() == old.isnan()).all()
            assert torch.equal(kept.nan_to_num(), old.nan_to_num())
        for index, length in enumerate(lengths):
            right = torch.zeros(1, num, dim, device=device)
            if length:
                part = made[0][index : index + 1]
                right = expected_attention(part, cache, index, length - 1, length)
            error = largest(error, worst(out[index : index + 1], right))
        for cached in caches:  # for the second run: NaN again, and for the last one something else
            cached[at] = NAN
            cached[blocks[-1], ends[-1] % page] = torch.randn(kv, dim).to(cached)
    return error


def drop_passed(cache: Cache, positions: Sequence[int]) -> None:
    """Blocks that the window of `positions` has passed are given up, and hold NaN."""
    window, page = cache.heads.window, cache.heads.page
    if window is not None and not cache.heads.softcap:
        for row, position in zip(cache.rows, positions, strict=True):
            passed = max(0, position - window + 1) // page
            cache.tables[row, :passed] = cache.keys.shape[0] - 1


def largest(first: float, second: float) -> float:
    """NaN wins."""
    return second if not second <= first else first


# ── norms, activation, rope and store ───────────────────────────────────────────────────────


def check_norms(rows: int, width: int, device: torch.device, dtype: torch.dtype) -> float:
    x, residual = (torch.randn(rows, width).to(device, dtype) for _ in range(2))
    weight = torch.randn(width).to(device, dtype)
    out = cuda.rms_norm(x, weight, 1e-5, out=poisoned(rows, width, like=x))
    error = worst(out, reference.rms_norm(x, weight, 1e-5))
    total = residual + x
    out = cuda.add_rms_norm(x, residual, weight, 1e-5)
    error = largest(error, worst(out, reference.rms_norm(total, weight, 1e-5)))
    assert torch.equal(residual, total)
    heads = torch.randn(rows, 3, 96).to(device, dtype)
    weight = torch.randn(96).to(device, dtype)
    out = cuda.rms_norm(heads, weight, 1e-6)
    return largest(error, worst(out, reference.rms_norm(heads, weight, 1e-6)))


def check_products(
    rows: int, columns: int, inner: int, device: torch.device, dtype: torch.dtype, early: bool
) -> float:
    """The plain one, and the gated pair, which is rounded after each of its steps."""
    x, weight = torch.randn(rows, inner), torch.randn(2 * columns, inner) * inner**-0.5
    x, weight = x.to(device, dtype), weight.to(device, dtype)
    right = x.double() @ weight.double().T
    error = worst(cuda.product(x, weight[:columns], early=early), right[:, :columns])
    gated = cuda.gated_product(x, weight, early=early)
    return largest(error, worst(gated, reference.silu_and_mul(right.to(dtype))))


def check_silu(rows: int, width: int, device: torch.device, dtype: torch.dtype) -> float:
    gate_up = (3 * torch.randn(rows, 2 * width)).to(device, dtype)
    out = cuda.silu_and_mul(gate_up, out=poisoned(rows, width, like=gate_up))
    return worst(out, reference.silu_and_mul(gate_up))


def check_rope_store(
    heads: Heads, half: int, norm: bool, tokens: int, device: torch.device, dtype: torch.dtype
) -> float:
    num, kv, dim = heads.num_heads, heads.num_kv_heads, heads.dim
    cache = Cache(heads, [tokens], device, dtype)
    cache.keys.fill_(NAN)
    cache.values.fill_(NAN)
    clean = cache.keys.shape[0] * heads.page
    slots = torch.randperm(clean)[:tokens]
    slots[tokens // 2] = -1
    slots = slots.to(device)
    positions = torch.randint(0, 500, (tokens,)).to(device)
    angles = torch.rand(500, half) * 6
    cos, sin = angles.cos().to(device), angles.sin().to(device)
    qkv = torch.randn(tokens, (num + 2 * kv) * dim).to(device, dtype)
    weights = [torch.randn(dim).to(device, dtype) if norm else None for _ in range(2)]
    q_norm, k_norm = weights
    where = (positions, slots, cache.keys, cache.values, num, kv)
    q, k, v = normed_and_turned(heads, qkv, q_norm, k_norm, cos[positions], sin[positions])
    into = poisoned(tokens, num + 2 * kv, dim, like=qkv)
    out = cuda.rope_store(qkv, q_norm, k_norm, 1e-6, cos, sin, *where, out=into)
    assert out is into
    error = worst(out, torch.cat([q, k, v], dim=1))
    out = cuda.rope_store(qkv, q_norm, k_norm, 1e-6, cos, sin, *where)
    assert torch.equal(out, into)
    assert out.data_ptr() == qkv.data_ptr()
    stored = slots >= 0
    for cached, right in ((cache.keys, k), (cache.values, v)):
        flat = cached.flatten(0, 1)
        error = largest(error, worst(flat[slots[stored]], right[stored]))
        untouched = torch.ones(clean, dtype=torch.bool, device=device)
        untouched[slots[stored]] = False
        assert flat[untouched].isnan().all()
    return error


def normed_and_turned(
    heads: Heads,
    qkv: torch.Tensor,
    q_norm: torch.Tensor | None,
    k_norm: torch.Tensor | None,
    cos: torch.Tensor,
    sin: torch.Tensor,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """q, k and v of a QKV product, each [T, heads, D]."""
    num, kv = heads.num_heads, heads.num_kv_heads
    q, k, v = qkv.unflatten(1, (-1, heads.dim)).split([num, kv, kv], dim=1)
    if q_norm is not None and k_norm is not None:
        q = reference.rms_norm(q, q_norm, 1e-6)
        k = reference.rms_norm(k, k_norm, 1e-6)
    return reference.rope(q, cos, sin), reference.rope(k, cos, sin), v


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
    """(row, token, expected) wherever the draw is another than `exec/sampling.py` has."""
    logits = (torch.randn(rows, vocab) * spread).to(device, dtype)
    logits[:, 5 : vocab // 7] = float("-inf")
    params = [SETTINGS[row % len(SETTINGS)] for row in range(rows)]
    positions = [3 + row for row in range(rows)]
    state = TensorRows(rows, rows + 8, 16, 1, torch.device("cpu"))
    for row, setting in enumerate(params):
        asked = SamplingParams(**setting)  # type: ignore[arg-type]
        state.rows[row] = NewRow(row, "r", (1, 2, 3), 3, asked, 7919 * row, frozenset(), ())
    right = sampling.sample(logits.float().cpu(), range(rows), positions, state).tokens

    def column(name: str, none: float) -> torch.Tensor:
        return torch.tensor([setting.get(name, none) for setting in params], device=device)

    keys = torch.tensor([stream_key(7919 * row, positions[row]) for row in range(rows)])
    out = cuda.sample(
        logits,
        column("temperature", 1.0).float(),
        column("top_k", 0).int(),
        column("top_p", 1.0).float(),
        column("min_p", 0.0).float(),
        keys[:, 0].contiguous().to(device),
        keys[:, 1].contiguous().to(device),
        out=torch.full((rows,), -1, device=device),
    )
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
    """Whether adjusted logits, tokens and what is kept of them are those of the definition, for
    several steps of rows that each ask for something else."""
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
        limits = (heat, nothing, nothing + 1, nothing, *stream_keys(seeds, at))
        left, right = [], []
        for (sampler, place), found in zip(sides, (left, right), strict=True):
            out = torch.full((count,), -7, dtype=torch.int32, device=place)
            logits = lines.to(place)
            drawn = sampler.draw(logits, which, which, at, masks, *limits)
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
    """Whether ids and ranks are the definition's, and the largest error of a log-probability."""
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
