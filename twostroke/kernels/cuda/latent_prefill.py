"""Prefill attention of layers with latents (MLA): latents are expanded to keys and values.

    first chunks      latents of the step ────────────────────────▶ kv_b ─▶ keys, values ─▶ attend
    continued chunks  tables[row] ─▶ pages ─▶ contiguous latents ─▶ kv_b ─▶ keys, values ─▶ attend

Keys and values of all heads are 50 times as large as the latents, so only some heads are expanded
at a time, into a buffer of fixed size (`EXPANDED_BYTES`). A head's key has two parts: the product
with kv_b, and the rope key, which all heads share. The score is the sum of two products.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache

import torch
import triton
import triton.language as tl

from twostroke.kernels.cuda.launch import Variant
from twostroke.kernels.cuda.scores import capped, unit_of
from twostroke.kernels.cuda.sizes import ceil_div, power_of_two
from twostroke.kernels.records import AttentionRule, KVView, PrefillWork

EXPANDED_BYTES = 512 << 20  # of keys and values at one time; more if one head needs more
GATHERED = 16  # cached vectors that one program gathers


@dataclass(frozen=True, slots=True)
class LatentPrefillTuning:
    queries: int
    keys: int
    num_warps: int
    num_stages: int


def tuning(itemsize: int) -> LatentPrefillTuning:
    if itemsize == 4:
        return LatentPrefillTuning(32, 16, 4, 2)
    return LatentPrefillTuning(128, 64, 8, 3)


def latent_prefill_attention(
    q: torch.Tensor,
    kv_b: torch.Tensor,
    kv: KVView,
    rule: AttentionRule,
    work: PrefillWork,
    *,
    out: torch.Tensor,
    chunk_kv: torch.Tensor,
    tuned: LatentPrefillTuning | None = None,
) -> torch.Tensor:
    """Write the attention of all chunks to `out`, [T, H, value]: see
    `Kernels.latent_prefill_attention`. First chunks read `chunk_kv` if the cache has the same
    dtype. All other chunks read the cache, one chunk after another."""
    heads, head_channels, rank = kv_b.shape
    keys, value, width = kv.keys, out.shape[2], kv.keys.shape[3]
    assert q.stride(2) == out.stride(2) == keys.stride(3) == chunk_kv.stride(1) == 1
    tuned = tuned or tuning(q.itemsize)
    # The size does not depend on the chunks, so the measurement at start is valid for all steps.
    longest = kv.tables.shape[1] * keys.shape[1]
    max_size = max(longest, len(q)) * head_channels  # elements of one head
    buffer_size = max(max_size, min(EXPANDED_BYTES // q.itemsize, max_size * heads))
    expanded = torch.empty(buffer_size, dtype=q.dtype, device=q.device)
    gathered = torch.empty(longest, width, dtype=q.dtype, device=q.device)

    def attend(entries: torch.Tensor, which: slice, longest_chunk: int, is_first: bool) -> None:
        """Compute the attention of the chunks `which` to the latents and rope keys `entries`,
        [entries, R + rope]."""
        starts, ends = work.starts[which], work.cu_tokens[which.start : which.stop + 1]
        features = (rule.window is not None, rule.softcap > 0, is_first)
        variant = _variant(head_channels - value, width - rank, value, tuned, *features)
        fit = max(1, buffer_size // (len(entries) * head_channels))
        # A power of two, so that few different strides occur.
        each = heads if fit >= heads else 1 << (fit.bit_length() - 1)
        for head in range(0, heads, each):
            some = slice(head, min(head + each, heads))
            weight = kv_b[some].flatten(0, 1)
            kv_heads = expanded[: len(entries) * len(weight)].view(len(entries), -1)
            torch.mm(entries[:, :rank], weight.t(), out=kv_heads)
            grid = (ceil_div(longest_chunk, tuned.queries), some.stop - head, len(starts))
            variant(
                grid,
                (q[:, some], kv_heads, entries[:, rank:], starts, ends, out[:, some]),
                (rule.window or 0,),
                (
                    float(rule.scale),
                    float(rule.softcap),
                    *q.stride()[:2],
                    *out.stride()[:2],
                    kv_heads.stride(0),
                    entries.stride(0),
                ),
            )

    has_own = chunk_kv.dtype == keys.dtype
    if work.max_first and has_own:
        attend(chunk_kv, slice(0, len(work.spans)), work.max_first, True)
    for index, (start, end) in enumerate(work.spans):
        if start or not has_own:
            one = slice(index, index + 1)
            _gather(kv, work.rows[one], gathered[:end])
            attend(gathered[:end], one, end - start, False)
    return out


def _gather(kv: KVView, row: torch.Tensor, entries: torch.Tensor) -> None:
    """Copy the first cached vectors of a sequence to `entries`, which is contiguous."""
    (count, width), keys = entries.shape, kv.keys
    _gather_variant(width, keys.shape[1])(
        (ceil_div(count, GATHERED),),
        (keys, kv.tables, row, entries),
        (count,),
        (kv.tables.stride(0), *keys.stride()[:2]),
    )


@cache
def _gather_variant(width: int, page: int) -> Variant:
    block = power_of_two(width)
    return Variant(_gather_entries, WIDTH=width, BLOCK=block, PAGE=page, EACH=GATHERED, num_warps=4)


@cache
def _variant(
    nope: int,
    rope: int,
    value: int,
    tuned: LatentPrefillTuning,
    has_window: bool,
    has_softcap: bool,
    is_first: bool,
) -> Variant:
    return Variant(
        _expanded_prefill,
        NOPE=nope,
        BLOCK_NOPE=max(16, power_of_two(nope)),
        ROPE=rope,
        BLOCK_ROPE=max(16, power_of_two(rope)),
        VALUE=value,
        BLOCK_VALUE=max(16, power_of_two(value)),
        QUERIES=tuned.queries,
        KEYS=tuned.keys,
        WINDOW=has_window,
        SOFTCAP=has_softcap,
        IS_FIRST=is_first,
        num_warps=tuned.num_warps,
        num_stages=tuned.num_stages,
    )


@triton.jit(do_not_specialize=["count"], do_not_specialize_on_alignment=["row"])
def _gather_entries(
    keys,
    tables,
    row,
    entries,
    count,
    table_stride,
    block_stride,
    slot_stride,
    WIDTH: tl.constexpr,
    BLOCK: tl.constexpr,
    PAGE: tl.constexpr,
    EACH: tl.constexpr,
):
    table = tables + tl.load(row).to(tl.int64) * table_stride
    entry = tl.program_id(0) * EACH + tl.arange(0, EACH)
    channel = tl.arange(0, BLOCK)[None, :]
    page = tl.load(table + entry // PAGE, mask=entry < count, other=0).to(tl.int64)
    at = (page * block_stride + (entry % PAGE) * slot_stride)[:, None] + channel
    mask = (entry < count)[:, None] & (channel < WIDTH)
    x = tl.load(keys + at, mask=mask, other=0.0)
    to = entries + entry.to(tl.int64)[:, None] * WIDTH + channel
    tl.store(to, x.to(entries.dtype.element_ty), mask=mask)


@triton.jit(
    do_not_specialize=["window"],
    do_not_specialize_on_alignment=["chunk_starts", "cu_tokens"],
)
def _expanded_prefill(
    q,
    expanded,
    rope_keys,
    chunk_starts,
    cu_tokens,
    out,
    window,
    scale,
    softcap,
    q_stride,
    q_head_stride,
    out_stride,
    out_head_stride,
    expanded_stride,
    entry_stride,
    NOPE: tl.constexpr,
    BLOCK_NOPE: tl.constexpr,
    ROPE: tl.constexpr,
    BLOCK_ROPE: tl.constexpr,
    VALUE: tl.constexpr,
    BLOCK_VALUE: tl.constexpr,
    QUERIES: tl.constexpr,
    KEYS: tl.constexpr,
    WINDOW: tl.constexpr,
    SOFTCAP: tl.constexpr,
    IS_FIRST: tl.constexpr,
):
    """A program computes the attention of one query tile of one head and chunk. With IS_FIRST the
    entries are the tokens of all chunks; otherwise they are the context of one chunk, from 0."""
    # The last tiles see the most keys, so they start first, and short tiles fill the gaps.
    tile = tl.num_programs(0) - 1 - tl.program_id(0)
    head, chunk = tl.program_id(1), tl.program_id(2)
    first_token = tl.load(cu_tokens + chunk).to(tl.int32)
    size = tl.load(cu_tokens + chunk + 1).to(tl.int32) - first_token
    start = tl.load(chunk_starts + chunk).to(tl.int32)
    is_own = start == 0 or not IS_FIRST
    if is_own and tile * QUERIES < size:
        row = tl.arange(0, QUERIES)
        token = tile * QUERIES + row
        line = (first_token + token).to(tl.int64)
        is_token = (token < size)[:, None]
        nope, rope = tl.arange(0, BLOCK_NOPE)[None, :], tl.arange(0, BLOCK_ROPE)[None, :]
        value_channel = tl.arange(0, BLOCK_VALUE)[None, :]
        q_at = q + line[:, None] * q_stride + head * q_head_stride
        query = tl.load(q_at + nope, mask=is_token & (nope < NOPE), other=0.0)
        query_rope = tl.load(q_at + NOPE + rope, mask=is_token & (rope < ROPE), other=0.0)
        position = start + token

        first_query = start + tile * QUERIES
        end = start + tl.minimum(size, (tile + 1) * QUERIES)
        begin = 0
        open_end = (first_query + 1) // KEYS * KEYS  # every query sees all keys before this
        if WINDOW:
            begin = tl.maximum(first_query - window + 1, 0) // KEYS * KEYS
            open_end = begin
        expanded += head * (NOPE + VALUE)
        if IS_FIRST:
            expanded += first_token.to(tl.int64) * expanded_stride
            rope_keys += first_token.to(tl.int64) * entry_stride
        max_score = tl.full([QUERIES], float("-inf"), tl.float32)
        total = tl.zeros([QUERIES], tl.float32)
        sums = tl.zeros([QUERIES, BLOCK_VALUE], tl.float32)
        for part in tl.static_range(1 if WINDOW else 0, 2):
            max_score, total, sums = _update_softmax(
                max_score,
                total,
                sums,
                begin if part == 0 else open_end,
                open_end if part == 0 else end,
                query,
                query_rope,
                position,
                first_query,
                end,
                window,
                expanded,
                rope_keys,
                scale,
                softcap,
                expanded_stride,
                entry_stride,
                NOPE,
                BLOCK_NOPE,
                ROPE,
                BLOCK_ROPE,
                VALUE,
                BLOCK_VALUE,
                KEYS,
                part == 1,
                WINDOW,
                SOFTCAP,
            )
        out_at = out + line[:, None] * out_stride + head * out_head_stride + value_channel
        result = (sums / total[:, None]).to(out.dtype.element_ty)
        tl.store(out_at, result, mask=is_token & (value_channel < VALUE))


@triton.jit
def _update_softmax(
    max_score,
    total,
    sums,
    begin,
    stop,
    query,
    query_rope,
    position,
    first_query,
    end,
    window,
    expanded,
    rope_keys,
    scale,
    softcap,
    expanded_stride,
    entry_stride,
    NOPE: tl.constexpr,
    BLOCK_NOPE: tl.constexpr,
    ROPE: tl.constexpr,
    BLOCK_ROPE: tl.constexpr,
    VALUE: tl.constexpr,
    BLOCK_VALUE: tl.constexpr,
    KEYS: tl.constexpr,
    MASKED: tl.constexpr,
    WINDOW: tl.constexpr,
    SOFTCAP: tl.constexpr,
):
    """Update the online softmax with the entries [begin, stop). `begin` is a multiple of KEYS."""
    nope, rope = tl.arange(0, BLOCK_NOPE)[None, :], tl.arange(0, BLOCK_ROPE)[None, :]
    value_channel = tl.arange(0, BLOCK_VALUE)[None, :]
    unit = unit_of(scale, SOFTCAP)
    for at in tl.range(begin, stop, KEYS):
        cached = at + tl.arange(0, KEYS)
        # Entries that no query sees are loaded as 0, because 0 · NaN would be NaN.
        is_seen = cached < end
        if WINDOW:
            is_seen = is_seen & (cached > first_query - window)
        is_seen = is_seen[:, None]
        key_at = expanded + cached.to(tl.int64)[:, None] * expanded_stride
        rope_at = rope_keys + cached.to(tl.int64)[:, None] * entry_stride
        key = _load(key_at + nope, nope < NOPE, is_seen, NOPE != BLOCK_NOPE, MASKED)
        rope_key = _load(rope_at + rope, rope < ROPE, is_seen, ROPE != BLOCK_ROPE, MASKED)
        value_at = key_at + NOPE + value_channel
        is_value = value_channel < VALUE
        value = _load(value_at, is_value, is_seen, VALUE != BLOCK_VALUE, MASKED)
        score = tl.dot(query, tl.trans(key), input_precision="tf32x3")
        score = tl.dot(query_rope, tl.trans(rope_key), score, input_precision="tf32x3")
        score = capped(score, scale, softcap, SOFTCAP)
        if MASKED:
            visible = cached[None, :] <= position[:, None]
            if WINDOW:
                visible = visible & (cached[None, :] > position[:, None] - window)
            score = tl.where(visible, score, float("-inf"))
        new_max = tl.maximum(max_score, tl.max(score, axis=1) * unit)
        finite_max = new_max
        if WINDOW:  # a query may see no entry of the first tiles
            finite_max = tl.where(new_max == float("-inf"), 0.0, new_max)
        weight = tl.exp2(score * unit - finite_max[:, None])
        rescale = tl.exp2(max_score - finite_max)
        total = total * rescale + tl.sum(weight, axis=1)
        sums = sums * rescale[:, None]
        sums = tl.dot(weight.to(value.dtype), value, sums, input_precision="tf32x3")
        max_score = new_max
    return max_score, total, sums


@triton.jit
def _load(at, inside, is_seen, RAGGED: tl.constexpr, MASKED: tl.constexpr):
    if MASKED:
        x = tl.load(at, mask=inside & is_seen, other=0.0)
    elif RAGGED:
        x = tl.load(at, mask=inside, other=0.0)
    else:
        x = tl.load(at)
    return x
