"""Position and cache index are two numbers, and a decode row may carry several tokens."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from tests.equivalence.harness import small_spec
from tests.equivalence.test_window_matrix import MIXES, mixed_spec
from tests.loud import Loud
from tests.rig import Rig, put
from twostroke.kernels import reference
from twostroke.kernels.records import DEFAULT_CONTEXT, AttentionRule
from twostroke.kernels.reference import Kernels
from twostroke.model.describe.spec import ModelSpec
from twostroke.model.torch.decoder import Decoder
from twostroke.plan import BlockEvict, Chunk, Slot

CPU = torch.device("cpu")
BLOCK = 8
TEXT = [(7 * n * n + 3 * n) % 512 for n in range(80)]


def make_rig(spec: ModelSpec, kernels: Kernels | None = None) -> Rig:
    decoder = Decoder(spec, Loud(spec), torch.float32, CPU, 128, kernels or Kernels())
    return Rig(decoder, [TEXT] * 3, BLOCK)


def one_by_one(spec: ModelSpec, first: int, count: int) -> Tensor:
    """The definition: each token alone."""
    rig = make_rig(spec)
    rig.step(prefill=(Chunk(0, 0, first, False),))
    return torch.cat([rig.step(decode=(Slot(0, first + n),)) for n in range(count)])


@pytest.mark.parametrize("name", MIXES)
def test_several_tokens_of_a_row_have_the_logits_of_one_after_another(name: str) -> None:
    spec = mixed_spec(name)
    rig = make_rig(spec)
    for row in range(3):
        rig.step(prefill=(Chunk(row, 0, 40 + row, False),))
    alike = rig.step(decode=(Slot(0, 40, 2), Slot(1, 41, 2)))
    torch.testing.assert_close(alike[:3], one_by_one(spec, 40, 3), atol=1e-4, rtol=0)
    torch.testing.assert_close(alike[3:], one_by_one(spec, 41, 3), atol=1e-4, rtol=0)
    # Different numbers of tokens, beside one token and a chunk.
    mixed = rig.step(
        decode=(Slot(0, 43, 3), Slot(1, 44), Slot(2, 42, 1)), prefill=(Chunk(2, 44, 9, True),)
    )
    torch.testing.assert_close(mixed[:4], one_by_one(spec, 43, 4), atol=1e-4, rtol=0)
    torch.testing.assert_close(mixed[4:5], one_by_one(spec, 44, 1), atol=1e-4, rtol=0)
    torch.testing.assert_close(mixed[5:7], one_by_one(spec, 42, 2), atol=1e-4, rtol=0)
    torch.testing.assert_close(mixed[7:], one_by_one(spec, 52, 1), atol=1e-4, rtol=0)


class HidesEntries(Kernels):
    """Decode attention that does not see some entries of the cache: what a hole means."""

    hidden: range = range(0)

    def decode_attention(self, q, kv, rule, work, context=DEFAULT_CONTEXT, *, out):  # type: ignore[no-untyped-def, override]
        rows, lengths = work.rows.tolist(), work.lengths.tolist()
        for n, (row, length) in enumerate(zip(rows, lengths, strict=True)):
            both, table = (kv.keys, kv.values), kv.tables[row]
            k, v = (reference.gather(x, table, 0, length, q.dtype) for x in both)
            seen = [n for n in range(length) if n not in self.hidden]
            everything = torch.ones(1, len(seen), dtype=torch.bool)
            plain = AttentionRule(rule.scale)
            out[n] = reference.attention(q[n : n + 1], k[seen], v[seen], everything, plain)
        return out


def test_a_table_with_a_hole_is_attended_to_without_what_was_there() -> None:
    """The second and third of five blocks are evicted: later tokens keep their positions, and lie
    two blocks earlier in the cache."""
    spec, hidden = small_spec(), range(BLOCK, 3 * BLOCK)
    kernels = HidesEntries()
    expected_rig, rig = make_rig(spec, kernels), make_rig(spec)
    for each in (expected_rig, rig):
        each.step(prefill=(Chunk(0, 0, 37, False), Chunk(1, 0, 20, False)))
    put(rig.rows, rig.plan(evicted=(BlockEvict(0, 1, 3),)))
    kernels.hidden = hidden
    expected = [expected_rig.step(decode=(Slot(0, 37 + n),)) for n in range(6)]
    got = [rig.step(decode=(Slot(0, 37 + n), Slot(1, 20 + n)))[:1] for n in range(6)]
    torch.testing.assert_close(torch.cat(got), torch.cat(expected), atol=1e-4, rtol=0)
    # A chunk after the hole sees the same.
    later = [expected_rig.step(decode=(Slot(0, 43 + n),)) for n in range(11)]
    chunk = rig.step(prefill=(Chunk(0, 43, 11, True),))
    torch.testing.assert_close(chunk, later[-1], atol=1e-4, rtol=0)
    # Negative control: with the hole in sight the logits are others.
    kernels.hidden = range(0)
    other = expected_rig.step(decode=(Slot(0, 54),))
    assert not torch.allclose(rig.step(decode=(Slot(0, 54),)), other, atol=1e-2)


def test_a_block_of_a_group_is_one_piece_of_memory() -> None:
    spec = mixed_spec("three groups")
    rig = make_rig(spec)
    rig.step(prefill=(Chunk(0, 0, BLOCK, False),))
    for group, kind in enumerate(spec.kv_groups()):
        block = rig.pool.block(group, int(rig.rows.tables[group][0, 0]))
        assert block.is_contiguous()
        assert block.shape == (len(kind.layers), 2, BLOCK, kind.num_kv_heads, kind.head_dim)
        assert block.any(dim=-1).all()
        first, _ = rig.pool.layers[kind.layers[0]]
        assert torch.equal(first[int(rig.rows.tables[group][0, 0])], block[0, 0])
