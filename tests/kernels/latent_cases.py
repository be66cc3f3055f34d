"""The Triton kernels of latent attention against plain ones in float64, for any device and dtype.

`test_cuda_latent` runs these on a CPU, `tests.gpu.latent_check` on a GPU. As in `cuda_cases`, what
no sequence owns is NaN, and a case returns the largest relative error of any row.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from tests.kernels import definitions
from tests.kernels.cuda_cases import (
    NAN,
    Cache,
    Heads,
    decode_work,
    drop_passed,
    largest,
    poisoned,
    prefill_work,
    random_angles,
    worst,
)
from twostroke.kernels import cuda
from twostroke.kernels.cuda import latent, latent_prefill
from twostroke.kernels.records import DEFAULT_CONTEXT, AttentionRule, Rope, StepContext


@dataclass(frozen=True)
class Sizes:
    """The sizes of a layer with latents."""

    num_heads: int
    rank: int
    rope: int
    nope: int
    value: int
    page: int = 16
    window: int | None = None
    softcap: float = 0.0
    kv_dtype: torch.dtype | None = None

    @property
    def width(self) -> int:
        return self.rank + self.rope

    @property
    def scale(self) -> float:
        return 1.1 * (self.nope + self.rope) ** -0.5

    @property
    def rule(self) -> AttentionRule:
        return AttentionRule(self.scale, self.window, self.softcap)

    def cache(self, lengths: Sequence[int], device: torch.device, dtype: torch.dtype) -> Cache:
        """One vector a token: the values of `Cache` are not looked at."""
        heads = Heads(
            self.num_heads, 1, self.width, self.page, self.window, self.softcap, self.kv_dtype
        )
        return Cache(heads, lengths, device, dtype)


V2_LITE = Sizes(16, 512, 64, 128, 128)
V3 = Sizes(128, 512, 64, 128, 128)


def expected(
    q: torch.Tensor, keys: torch.Tensor, values: torch.Tensor, start: int, sizes: Sizes
) -> torch.Tensor:
    """[n, H, D] against keys [entries, H, D] and values of the first entries, in float64; the
    first query is entry `start`."""
    scores = torch.einsum("qhd,khd->hqk", q.double(), keys.double()) * sizes.scale
    if sizes.softcap:
        scores = sizes.softcap * torch.tanh(scores / sizes.softcap)
    query = torch.arange(start, start + len(q), device=q.device).unsqueeze(1)
    key = torch.arange(len(keys), device=q.device).unsqueeze(0)
    seen = key <= query
    if sizes.window is not None:
        seen &= key > query - sizes.window
    scores = scores.masked_fill(~seen, float("-inf"))
    return torch.einsum("hqk,khv->qhv", scores.softmax(-1), values.double())


def check_decode(
    sizes: Sizes,
    lengths: Sequence[int],
    splits: int,
    device: torch.device,
    dtype: torch.dtype,
    queries: int = 1,
    tuned: latent.LatentDecodeTuning | None = None,
    context: StepContext = DEFAULT_CONTEXT,
) -> float:
    cache = sizes.cache(lengths, device, dtype)
    drop_passed(cache, [length - queries for length in lengths])
    tokens, heads, rank = len(lengths) * queries, sizes.num_heads, sizes.rank
    q = torch.randn(tokens, heads, rank).to(device, dtype)
    # The queries with rope are the last channels of something wider.
    q_rope = torch.randn(tokens, heads, sizes.nope + sizes.rope).to(device, dtype)
    q_rope = q_rope[..., sizes.nope :]
    scratch = cuda.decode_scratch(tokens, heads, rank, splits, device)
    scratch.partial.fill_(NAN)
    scratch.lse.fill_(NAN)
    work = decode_work(cache, lengths, splits, scratch, queries)
    out = poisoned(tokens, heads, rank, like=q)
    latent.latent_decode_attention(
        q, q_rope, cache.view(), sizes.rule, work, context, out=out, tuned=tuned
    )
    error, whole = 0.0, torch.cat([q, q_rope], dim=-1)
    for index, length in enumerate(lengths):
        part = slice(index * queries, (index + 1) * queries)
        right = torch.zeros(queries, heads, rank, device=device, dtype=torch.float64)
        if length:
            seen = definitions.gather(cache.keys, cache.table(index), 0, length, dtype)
            if sizes.window is not None:
                seen[: max(0, length - queries - sizes.window + 1)] = 0
            keys = seen.expand(-1, heads, -1)
            right = expected(whole[part], keys, keys[..., :rank], length - queries, sizes)
        error = largest(error, worst(out[part], right))
    return error


def check_prefill(
    sizes: Sizes,
    chunks: Sequence[tuple[int, int]],
    device: torch.device,
    dtype: torch.dtype,
    tuned: latent_prefill.LatentPrefillTuning | None = None,
) -> float:
    """`chunks` are (start, size)."""
    cache = sizes.cache([start + size for start, size in chunks], device, dtype)
    drop_passed(cache, [start for start, _ in chunks])
    ends = torch.tensor([0] + [size for _, size in chunks]).cumsum(0).tolist()
    heads, rank, rope = sizes.num_heads, sizes.rank, sizes.rope
    q = torch.randn(ends[-1], heads, sizes.nope + rope).to(device, dtype)
    kv_b = (torch.randn(heads, sizes.nope + sizes.value, rank) * rank**-0.5).to(device, dtype)
    chunk_kv = poisoned(ends[-1], sizes.width + 8, like=q)[:, 8:]
    for index, (start, size) in enumerate(chunks):
        if start == 0 and sizes.kv_dtype is None:
            seen = definitions.gather(cache.keys, cache.table(index), 0, size, dtype)
            chunk_kv[ends[index] : ends[index + 1]] = seen[:, 0]
    out, work = poisoned(ends[-1], heads, sizes.value, like=q), prefill_work(cache, chunks)
    latent_prefill.latent_prefill_attention(
        q, kv_b, cache.view(), sizes.rule, work, out=out, chunk_kv=chunk_kv, tuned=tuned
    )
    error = 0.0
    for index, (start, size) in enumerate(chunks):
        part = slice(ends[index], ends[index + 1])
        seen = definitions.gather(cache.keys, cache.table(index), 0, start + size, dtype)[:, 0]
        if sizes.window is not None:
            seen[: max(0, start - sizes.window + 1)] = 0
        made = torch.einsum("er,hdr->ehd", seen[:, :rank].double(), kv_b.double()).to(dtype)
        rope_keys = seen[:, None, rank:].expand(-1, heads, -1)
        keys = torch.cat([made[..., : sizes.nope], rope_keys], dim=-1)
        right = expected(q[part], keys, made[..., sizes.nope :], start, sizes)
        error = largest(error, worst(out[part], right))
    return error


def check_rope_store(
    sizes: Sizes, tokens: int, norm: torch.dtype, device: torch.device, dtype: torch.dtype
) -> float:
    """To another place than the product's, then in place; one token is not stored."""
    heads, rank, half = sizes.num_heads, sizes.rank, sizes.rope // 2
    error = 0.0
    for in_place in (False, True):
        cache = sizes.cache([tokens], device, dtype)
        cache.keys.fill_(NAN)
        clean = cache.keys.shape[0] * sizes.page
        slots = torch.randperm(clean)[:tokens]
        slots[tokens // 2] = -1
        slots = slots.to(device)
        positions, cos, sin = random_angles(tokens, half, device)
        q = torch.randn(tokens, heads, sizes.nope + sizes.rope).to(device, dtype)
        projected = torch.randn(tokens, sizes.width + 24).to(device, dtype)[:, 24:]
        weight = torch.randn(rank).to(device, norm)
        kv = projected if in_place else poisoned(tokens, sizes.width, like=q)
        angles = cos[positions], sin[positions]
        turned = definitions.rope(projected[:, None, rank:], *angles).squeeze(1)
        right = torch.cat([definitions.rms_norm(projected[:, :rank], weight, 1e-6), turned], dim=-1)
        nope, with_rope = q[..., : sizes.nope].clone(), q[..., sizes.nope :]
        with_rope = definitions.rope(with_rope, *angles)
        rope_of_layer = Rope(cos, sin, k_norm=weight, norm_eps=1e-6)
        view = cache.view(slots)
        latent.latent_rope_store(q, projected, rope_of_layer, positions, view, out=kv)
        assert torch.equal(q[..., : sizes.nope], nope)
        error = largest(error, worst(q[..., sizes.nope :], with_rope))
        for part in (slice(0, rank), slice(rank, None)):
            error = largest(error, worst(kv[:, part], right[:, part]))
        flat, stored = cache.keys.flatten(0, 1)[:, 0], slots >= 0
        error = largest(error, worst(flat[slots[stored]], right[stored].to(flat.dtype)))
        untouched = torch.ones(clean, dtype=torch.bool, device=device)
        untouched[slots[stored]] = False
        assert flat[untouched].isnan().all()
    return error
