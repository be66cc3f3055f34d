"""The reference's attention with sinks, against a plain softmax with a column more."""

from __future__ import annotations

from dataclasses import fields

import pytest
import torch

from tests.kernels import definitions
from tests.specs import make_spec
from twostroke.kernels.records import AttentionRule, DecodeWork, KVView, PrefillWork
from twostroke.kernels.reference import Kernels

HEADS, KV_HEADS, DIM, PAGE, SCALE = 6, 2, 8, 4, 0.4
SINKS = torch.tensor([-30.0, -1.0, 0.0, 1.0, 3.0, 30.0])


def test_a_specification_gives_every_field_of_the_rule_but_the_weights() -> None:
    rule = make_spec(softcap=30.0, windows=(7,)).layers[0].attention.rule()
    assert rule == {"scale": 0.25, "window": 7, "softcap": 30.0}
    assert rule.keys() == {field.name for field in fields(AttentionRule)} - {"sinks"}


@pytest.mark.parametrize("softcap", [0.0, 2.0])
@pytest.mark.parametrize("window", [None, 5])
def test_a_sink_is_a_column_more_of_the_softmax(window: int | None, softcap: float) -> None:
    torch.manual_seed(0)
    keys, values = torch.randn(2, 12, PAGE, KV_HEADS, DIM)
    tables = (torch.randperm(10) + 1).view(2, 5).int()
    how = (SCALE, window, softcap)

    def expected(q: torch.Tensor, row: int, start: int) -> torch.Tensor:
        return definitions.attention(q, keys, values, tables[row].long(), start, *how, SINKS)

    q = torch.randn(11, HEADS, DIM)
    chunks = {"rows": [0, 1], "starts": [0, 9], "ends": [0, 7, 11]}
    where = (torch.tensor(one, dtype=torch.int32) for one in chunks.values())
    view, rule = KVView(keys, values, tables, torch.empty(0)), AttentionRule(*how, sinks=SINKS)
    work = PrefillWork(*where, 11, 7, 4, [(0, 7), (9, 13)])
    out, chunk_kv = torch.empty_like(q), torch.empty(11, 2 * KV_HEADS, DIM)
    Kernels().prefill_attention(q, view, rule, work, out=out, chunk_kv=chunk_kv)
    right = torch.cat([expected(q[:7], 0, 0), expected(q[7:], 1, 9)])
    torch.testing.assert_close(out, right, atol=1e-6, rtol=0)
    without = definitions.attention(q[:7], keys, values, tables[0].long(), 0, *how)
    assert (out[:7] - without).abs().amax(dim=(0, 2))[1:].min() > 0.1

    q = torch.randn(3, HEADS, DIM)
    lengths = torch.tensor([1, 0, 19], dtype=torch.int32)  # the second is padding
    rows = torch.tensor([0, 0, 1], dtype=torch.int32)
    decode = DecodeWork(rows, lengths, 1, 1, None)
    out = Kernels().decode_attention(q, view, rule, decode, out=torch.empty_like(q))
    right = torch.cat([expected(q[:1], 0, 0), torch.zeros(1, HEADS, DIM), expected(q[2:], 1, 18)])
    torch.testing.assert_close(out, right, atol=1e-6, rtol=0)
