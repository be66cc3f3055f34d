"""The two forms of latent attention are one function: expanded (prefill) and latent (decode)."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch

from tests.equivalence.test_latent_matrix import latent_spec
from twostroke.kernels.records import AttentionRule, DecodeWork, KVView, PrefillWork
from twostroke.kernels.reference import Kernels
from twostroke.kv.host_pool import HostPool
from twostroke.kv.pool import KVPool
from twostroke.model.torch.latent import LatentAttention

BLOCK = 4
LENGTHS = (1, 9, 30)
# Of outputs of about 1, both forms in the type; the largest found are 3.6e-7 and 9.8e-4.
TOLERANCES = {torch.float32: 1e-6, torch.float16: 4e-3}


def made_attention(dtype: torch.dtype, random: torch.Generator) -> LatentAttention:
    spec = latent_spec().layers[0].attention
    assert spec.latent is not None
    rows = spec.nope_dim + spec.value_dim
    kv_b = torch.randn(spec.num_heads, rows, spec.latent.kv_lora_rank, generator=random) / 5
    unused: Any = None  # what makes queries and latents
    return LatentAttention(
        spec=spec,
        latent=spec.latent,
        group=0,
        rule=AttentionRule(spec.scale, spec.window, spec.softcap),
        rope=unused,
        q_and_kv_a=unused,
        q_a_norm=None,
        q_b=None,
        kv_b=kv_b.to(dtype),
        kernels=Kernels(),
    )


def row_tables(lengths: tuple[int, ...]) -> torch.Tensor:
    """Blocks in an order of their own, none twice."""
    each = -(-max(lengths) // BLOCK)
    order = torch.randperm(len(lengths) * each, generator=torch.Generator().manual_seed(1))
    return (1 + order).int().view(len(lengths), each)


@pytest.mark.parametrize("dtype", TOLERANCES, ids=str)
@pytest.mark.parametrize("queries", [1, 3])
def test_decode_in_latent_space_equals_prefill_with_expanded_keys(
    dtype: torch.dtype, queries: int
) -> None:
    """The last tokens of each sequence as decode rows, and as chunks."""
    random = torch.Generator().manual_seed(0)
    attention = made_attention(dtype, random)
    spec, rows = attention.spec, len(LENGTHS)
    lengths = tuple(length + queries - 1 for length in LENGTHS)
    tables = row_tables(lengths)
    pool = KVPool(latent_spec(), [int(tables.max())], BLOCK, dtype, torch.device("cpu"))
    pool.groups[0].normal_(generator=random)
    pool.groups[0][0] = 0
    cache = pool.layers[1]
    q = torch.randn(rows * queries, spec.num_heads, spec.head_dim, generator=random).to(dtype)
    of_row, seen = torch.arange(rows).int(), torch.tensor(lengths).int()
    decode = DecodeWork(of_row, seen, queries, 1, None)
    view = KVView(*cache, tables, of_row)
    cu_tokens = torch.arange(0, rows * queries + 1, queries).int()
    spans = [(length - queries, length) for length in lengths]
    prefill = PrefillWork(of_row, seen - queries, cu_tokens, rows * queries, 0, queries, spans)
    latent, expanded = (q.new_empty(len(q), spec.num_heads, spec.value_dim) for _ in range(2))
    attention.attend_rows(q, view, decode, latent)
    unused = q.new_empty(len(q), cache[0].shape[-1])
    attention.attend_chunks(q, unused, view, prefill, expanded)
    difference = (latent.float() - expanded.float()).abs().max().item()
    assert difference <= TOLERANCES[dtype]
    attention.attend_rows(q * 1.1, view, decode, latent)
    assert (latent.float() - expanded.float()).abs().max().item() > TOLERANCES[dtype]


def test_a_token_takes_one_latent_and_one_rope_key_a_layer() -> None:
    spec, tokens = latent_spec(), 10 * BLOCK
    pool = KVPool(spec, [9], BLOCK, torch.float16, torch.device("cpu"))
    formula = 3 * (24 + 8) * 2  # layers × (kv_lora_rank + qk_rope_head_dim) × bytes
    assert pool.num_bytes / tokens == formula == 2 * spec.kv_elements_per_token
    assert HostPool(spec, [9], BLOCK).data[0].nbytes == pool.num_bytes
    plain = 3 * 4 * (18 + 12) * 2  # layers × heads × (key + value) × bytes
    assert 2 * spec.expanded_kv_elements_per_token == plain
    mixed = latent_spec("mixed")
    pool = KVPool(mixed, [9, 4], BLOCK, torch.float16, torch.device("cpu"))
    assert pool.num_bytes == 2 * BLOCK * (10 * 2 * (24 + 8) + 5 * 2 * 2 * 16)


def test_values_are_the_latents_in_the_memory_of_the_keys() -> None:
    pool = KVPool(latent_spec(), [9], BLOCK, torch.float32, torch.device("cpu"))
    keys, values = pool.layers[2]
    assert (keys.shape, values.shape) == ((10, BLOCK, 1, 32), (10, BLOCK, 1, 24))
    keys[3, 1] = math.pi
    assert torch.equal(values[3, 1], torch.full((1, 24), math.pi))
    assert pool.block(0, 3).shape == (3, 1, BLOCK, 1, 32)
