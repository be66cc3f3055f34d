"""Random weights: the same for the same seed and name, and shaped like a model's."""

from __future__ import annotations

import pytest
import torch

from tests.specs import make_spec
from twostroke.errors import ModelError
from twostroke.model.describe.spec import RopeSpec
from twostroke.model.weights import check_weights
from twostroke.model.weights.dummy import TILE, DummyWeights
from twostroke.model.weights.tensors import read_tensor

SPEC = make_spec(
    family="qwen2",
    vocab_size=4096,
    hidden_size=512,
    intermediate_size=1024,
    num_heads=8,
    num_kv_heads=4,
    head_dim=64,
    windows=(None,) * 2,
    rope=RopeSpec(theta=10000.0, dim=64),
    norm_eps=1e-6,
    max_context=512,
    qkv_bias=True,
    qk_norm="head",
)


def test_every_weight_of_the_spec_is_there_in_its_shape() -> None:
    source = DummyWeights(SPEC, seed=0)
    check_weights(SPEC, source, "dummy")
    for name, shape in SPEC.weight_shapes().items():
        weight = read_tensor(source, name, torch.bfloat16)
        assert tuple(weight.shape) == shape
        assert weight.dtype == torch.bfloat16


def test_values_do_not_depend_on_the_order_of_reading() -> None:
    names = list(SPEC.weight_shapes())
    forward, backward = DummyWeights(SPEC, seed=3), DummyWeights(SPEC, seed=3)
    first = {name: read_tensor(forward, name, torch.float32) for name in names}
    second = {name: read_tensor(backward, name, torch.float32) for name in reversed(names)}
    assert all(torch.equal(first[name], second[name]) for name in names)


def test_values_depend_on_the_seed_and_on_the_name() -> None:
    weight = read_tensor(DummyWeights(SPEC, seed=0), "layers.0.q", torch.float32)
    assert not torch.equal(
        weight, read_tensor(DummyWeights(SPEC, seed=1), "layers.0.q", torch.float32)
    )
    assert not torch.equal(
        weight, read_tensor(DummyWeights(SPEC, seed=0), "layers.1.q", torch.float32)
    )


def test_a_narrower_dtype_holds_the_same_weights_rounded() -> None:
    source = DummyWeights(SPEC, seed=0)
    wide, narrow = (
        read_tensor(source, "layers.0.up", dtype) for dtype in (torch.float32, torch.bfloat16)
    )
    assert torch.equal(wide.to(torch.bfloat16), narrow)


def test_weights_are_spread_like_those_of_a_model() -> None:
    source = DummyWeights(SPEC, seed=0)
    matrix = read_tensor(source, "layers.0.gate", torch.float32)
    assert matrix.mean().item() == pytest.approx(0, abs=1e-3)
    assert matrix.std().item() == pytest.approx(0.02, rel=0.01)
    for name in ("attn_norm", "mlp_norm", "q_norm", "k_norm"):
        norm = read_tensor(source, f"layers.1.{name}", torch.float32)
        assert (norm - 1).abs().max() < 0.1
    norm = read_tensor(source, "final_norm", torch.float32)
    assert norm.mean().item() == pytest.approx(1, abs=0.01)
    assert read_tensor(source, "layers.0.q_bias", torch.float32).abs().max() < 0.1


def test_no_two_rows_are_the_same_in_a_matrix_larger_than_what_is_drawn() -> None:
    weight = read_tensor(DummyWeights(SPEC, seed=0), "embed", torch.float32)
    assert weight.numel() > TILE
    assert len(torch.unique(weight[:, :8], dim=0)) == SPEC.vocab_size


def test_weights_are_made_on_the_device_asked_for() -> None:
    weight = read_tensor(DummyWeights(SPEC, seed=0, device="cpu"), "embed", torch.float16)
    assert weight.device.type == "cpu"


def test_an_unknown_weight_is_refused_with_the_nearest_name() -> None:
    source = DummyWeights(SPEC, seed=0)
    assert source.shape("final_nrm") is None
    with pytest.raises(ModelError, match="no weight 'final_nrm'; did you mean 'final_norm'"):
        read_tensor(source, "final_nrm", torch.float32)


def test_some_rows_are_the_rows_of_the_whole() -> None:
    source = DummyWeights(SPEC, seed=0)
    whole = source.floats("embed")
    assert whole.size > TILE
    for rows in (slice(0, 7), slice(2000, 2100), slice(4090, None)):
        assert (source.floats("embed", rows) == whole[rows]).all()
    assert torch.equal(read_tensor(source, "embed", torch.float32), torch.from_numpy(whole))
