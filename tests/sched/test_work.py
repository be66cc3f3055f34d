"""What a step costs, counted layer by layer."""

from __future__ import annotations

from dataclasses import replace

import pytest

from tests.specs import make_spec
from twostroke.engine.assembly import group_limits
from twostroke.model.describe.cost import cost_model, dense_weight_bytes
from twostroke.model.describe.spec import ModelSpec
from twostroke.plan import PhaseWork
from twostroke.sched.work import AttentionWork


def mixed_spec() -> ModelSpec:
    """Full attention between windows of 16 and 64; the full layers have other heads."""
    spec = make_spec(windows=(16, None, 64, 16, 16, None))
    wide = replace(spec.layers[1].attention, num_heads=8, num_kv_heads=4, head_dim=32)
    layers = [
        replace(layer, attention=wide) if layer.attention.window is None else layer
        for layer in spec.layers
    ]
    return replace(spec, layers=tuple(layers))


SPEC = mixed_spec()
WORK = AttentionWork(group_limits(SPEC, [100] * 3))


@pytest.mark.parametrize("positions", [[0], [15, 16, 63], [200, 3, 70, 1000]])
def test_slots_cost_what_their_layers_cost_together(positions: list[int]) -> None:
    work = PhaseWork(len(positions), len(positions), *WORK.of_slots(positions))
    assert_costs(work, [(position, 1) for position in positions])


@pytest.mark.parametrize("chunk", [(0, 1), (0, 100), (10, 60), (500, 33)])
def test_a_chunk_costs_what_its_layers_cost_together(chunk: tuple[int, int]) -> None:
    work = PhaseWork().with_chunk(chunk[1], WORK.of_chunk(*chunk))
    assert work[:2] == (1, chunk[1])
    assert_costs(work, [chunk])


def assert_costs(work: PhaseWork, spans: list[tuple[int, int]]) -> None:
    flops = num_bytes = 0.0
    for layer in SPEC.layers:
        part = layer.attention
        window = part.window or 10**9
        for start, count in spans:
            seen = [min(position + 1, window) for position in range(start, start + count)]
            flops += 4 * part.q_size * sum(seen)
            num_bytes += 2 * 2 * part.kv_size * (min(start, window - 1) + count)
    written = 2 * SPEC.kv_elements_per_token * work.tokens
    cost = cost_model(SPEC, dense_weight_bytes(SPEC, 2), 2)
    # A mean is rounded down to a whole position.
    attention = work.kv_tokens * cost.flops_per_kv_token
    assert 0 <= flops - attention < cost.flops_per_kv_token
    assert 0 <= num_bytes + written - cost.kv_bytes(work) < cost.kv_bytes_per_token


def test_one_group_is_counted_exactly() -> None:
    work = AttentionWork(group_limits(make_spec(windows=(8, 8)), [10]))
    assert work.of_slots([3, 20]) == (4 + 8, 4 + 8)
    assert work.of_chunk(6, 4) == (7 + 8 + 8 + 8, 6 + 4)


def test_weights_are_read_in_the_format_each_is_kept_in() -> None:
    spec = make_spec(windows=(None,) * 2, tie_embeddings=False)
    sizes = dense_weight_bytes(spec, 2)
    plain = cost_model(spec, sizes, 2)
    mixed = cost_model(spec, sizes | {"layers.1.down": 10.0, "head": 7.0}, 2)
    assert plain.layer_weight_bytes - mixed.layer_weight_bytes == sizes["layers.1.down"] - 10.0
    assert (plain.head_weight_bytes, mixed.head_weight_bytes) == (sizes["head"], 7.0)
