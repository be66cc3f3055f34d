"""Experts by interpreted Triton kernels, against a plain loop."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F

pytest.importorskip("triton")

from tests.kernels import definitions
from tests.kernels.cuda_cases import BOUNDS, worst
from twostroke.kernels.activations import Activation, ClampedSwiglu
from twostroke.kernels.cuda import experts as cuda
from twostroke.kernels.cuda.backend import CudaKernels
from twostroke.kernels.records import ExpertWeights, RoutingRule, StepContext

HALF, SINGLE = torch.float16, torch.float32


def plain_mlps(
    x: torch.Tensor,
    chosen: torch.Tensor,
    weights: torch.Tensor,
    stacked: ExpertWeights,
) -> torch.Tensor:
    """A token and an expert at a time, in float64."""

    def wide(tensor: torch.Tensor | None, expert: int) -> torch.Tensor | None:
        return None if tensor is None else tensor[expert].double()

    out = torch.zeros(x.shape, dtype=torch.float64)
    for token, (ids, shares) in enumerate(zip(chosen.tolist(), weights.double(), strict=True)):
        for expert, share in zip(ids, shares, strict=True):
            row = x[token].double()
            bias = wide(stacked.gate_up_bias, expert)
            inner = F.linear(row, stacked.gate_up[expert].double(), bias)
            both = inner if stacked.gated else torch.cat([inner, torch.ones_like(inner)])
            middle = definitions.act_and_mul(both, stacked.activation)
            part = F.linear(middle, stacked.down[expert].double(), wide(stacked.down_bias, expert))
            out[token] += share * part
    return out


def check_experts(
    chosen: torch.Tensor,
    experts: int,
    dtype: torch.dtype,
    hidden: int = 32,
    inner: int = 24,
    activation: Activation = "silu",
    gated: bool = True,
    biased: bool = False,
) -> float:
    tokens = len(chosen)
    x = torch.randn(tokens, hidden).to(dtype)
    rows = 2 * inner if gated else inner
    gate_up = (torch.randn(experts, rows, hidden) * hidden**-0.5).to(dtype)
    down = (torch.randn(experts, hidden, inner) * inner**-0.5).to(dtype)
    biases = [torch.randn(experts, n).to(dtype) if biased else None for n in (rows, hidden)]
    weights = torch.rand(chosen.shape)
    stacked = ExpertWeights(gate_up, biases[0], down, biases[1], activation, gated)
    out = cuda.mix_experts(x, chosen, weights, stacked)
    assert out.dtype == dtype
    return worst(out, plain_mlps(x, chosen, weights, stacked))


def draws(tokens: int, each: int, experts: int) -> torch.Tensor:
    return torch.rand(tokens, experts).topk(each).indices.int()


@pytest.mark.parametrize("dtype", [HALF, SINGLE])
@pytest.mark.parametrize(
    ("tokens", "each", "experts"),
    [
        (1, 1, 4),
        (1, 4, 60),
        (3, 2, 8),
        (17, 2, 60),
        (17, 3, 8),
        (200, 2, 16),
        (100, 2, 4),
        (200, 2, 4),
    ],
)
def test_the_sum_of_the_experts_is_that_of_a_plain_loop(
    tokens: int, each: int, experts: int, dtype: torch.dtype
) -> None:
    chosen = draws(tokens, each, experts)
    assert check_experts(chosen, experts, dtype) < BOUNDS[dtype]


def test_these_sizes_have_every_tiling() -> None:
    sizes = [(34, 60), (51, 8), (400, 16), (200, 4), (400, 4), (400, 2)]
    found = [[cuda.tiling(*size, 64, gated) for size in sizes] for gated in (True, False)]
    assert [one.rows for one in found[0]] == [16, 16, 32, 64, 128, 128]
    assert [one.columns for one in found[0]] == [32, 32, 64, 64, 128, 128]
    assert [one.columns for one in found[1]] == [64, 64, 64, 128, 256, 256]


@pytest.mark.parametrize(
    "how",
    [
        {"hidden": 72, "inner": 40},
        {"hidden": 300, "inner": 33},
        {"activation": "gelu_tanh"},
        {"gated": False, "activation": "gelu_tanh"},
        {"biased": True},
        {"biased": True, "activation": ClampedSwiglu(limit=0.5)},
        {"biased": True, "gated": False},
    ],
)
@pytest.mark.parametrize("tokens", [2, 9, 100])
def test_sizes_that_no_tile_divides_biases_and_no_gate(tokens: int, how: dict[str, Any]) -> None:
    assert check_experts(draws(tokens, 2, 5), 5, SINGLE, **how) < BOUNDS[SINGLE]


@pytest.mark.parametrize("tokens", [1, 150])
def test_all_tokens_on_the_same_experts(tokens: int) -> None:
    chosen = torch.tensor([[6, 2]] * tokens, dtype=torch.int32)
    assert check_experts(chosen, 9, SINGLE) < BOUNDS[SINGLE]


def test_an_expert_in_anothers_place_is_noticed() -> None:
    right = cuda.by_expert

    def wrong(chosen: torch.Tensor, experts: int, context: StepContext) -> cuda.Pairs:
        return right((chosen + 1) % experts, experts, context)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(cuda, "by_expert", wrong)
        assert check_experts(draws(9, 2, 8), 8, SINGLE) > 0.1


@pytest.mark.parametrize(
    ("tokens", "each", "experts"), [(1, 1, 1), (1, 8, 128), (33, 8, 60), (300, 8, 60)]
)
def test_pairs_are_sorted_by_expert_and_keep_their_order(
    tokens: int, each: int, experts: int
) -> None:
    chosen = draws(tokens, each, experts)
    order, starts = cuda.by_expert(chosen, experts)
    ids = chosen.flatten()
    assert order.tolist() == ids.sort(stable=True).indices.tolist()
    counts = torch.bincount(ids, minlength=experts)
    assert starts.tolist() == [0, *counts.cumsum(0).tolist()]


PLAIN: dict[str, Any] = {"scoring": "softmax", "normalised": False, "scale": 1.0}
PLAIN |= {"num_groups": 1, "groups_used": 1, "group_score": "max"}
GROUPS = {"num_groups": 4, "groups_used": 2}
RULES = {
    "softmax": PLAIN,
    "softmax_normalised": PLAIN | {"normalised": True},
    "softmax_groups": PLAIN | GROUPS | {"scale": 16.0},
    "sigmoid": PLAIN | {"scoring": "sigmoid", "normalised": True},
    "sigmoid_groups": PLAIN
    | GROUPS
    | {"scoring": "sigmoid", "normalised": True, "scale": 2.5, "group_score": "top2_sum"},
}


def plain_route(
    logits: torch.Tensor, correction: torch.Tensor | None, each: int, rule: dict[str, Any]
) -> tuple[torch.Tensor, torch.Tensor]:
    wide = logits.float()
    scores = wide.sigmoid() if rule["scoring"] == "sigmoid" else wide.softmax(-1)
    ranked = scores if correction is None else scores + correction
    if rule["groups_used"] < rule["num_groups"]:
        grouped = torch.unflatten(ranked, -1, (rule["num_groups"], -1))
        best = 2 if rule["group_score"] == "top2_sum" else 1
        totals = grouped.sort(-1, descending=True).values[..., :best].sum(-1)
        used = totals.sort(dim=-1, descending=True, stable=True).indices[:, : rule["groups_used"]]
        kept = torch.zeros_like(totals, dtype=torch.bool).scatter(-1, used, True)
        ranked = grouped.masked_fill(~kept[..., None], float("-inf")).flatten(1)
    chosen = ranked.sort(dim=-1, descending=True, stable=True).indices[:, :each]
    weights = scores.gather(-1, chosen)
    if rule["normalised"]:
        weights = weights / weights.sum(-1, keepdim=True)
    return chosen, weights * rule["scale"]


@pytest.mark.parametrize("rule", RULES.values(), ids=RULES)
@pytest.mark.parametrize("corrected", [False, True])
@pytest.mark.parametrize(("experts", "each"), [(8, 2), (60, 4), (512, 11)])
def test_every_rule_chooses_what_plain_torch_chooses(
    experts: int, each: int, corrected: bool, rule: dict[str, Any]
) -> None:
    dtype = HALF if corrected else SINGLE
    logits = (2 * torch.randn(3, experts + 3)).to(dtype)[:, :experts]
    correction = torch.randn(experts) * 0.3 if corrected else None
    chosen, weights = cuda.route(logits, None, correction, RoutingRule(each, **rule))
    ids, right = plain_route(logits, correction, each, rule)
    assert chosen.tolist() == ids.tolist()
    assert torch.allclose(weights, right, rtol=2e-6, atol=0)


def test_a_normalised_softmax_is_that_of_the_chosen_and_a_bias_is_added() -> None:
    logits, bias = torch.randn(7, 20), torch.randn(20)
    chosen, weights = cuda.route(logits, bias, None, RoutingRule(3, **PLAIN | {"normalised": True}))
    right = (logits + bias).topk(3)
    assert chosen.tolist() == right.indices.tolist()
    assert torch.allclose(weights, right.values.softmax(-1), rtol=2e-6, atol=0)


@pytest.mark.parametrize(("hidden", "dtype"), [(32, SINGLE), (32, HALF), (512, HALF)])
def test_the_backend_routes_by_a_product_in_fp32(hidden: int, dtype: torch.dtype) -> None:
    kernels = CudaKernels(torch.device("cpu"))
    x, router = torch.randn(3, hidden).half(), (torch.randn(6, hidden) / 9).to(dtype)
    chosen, weights = kernels.route(x, router, None, None, RoutingRule(2, **PLAIN))
    ids, right = plain_route(F.linear(x.float(), router.float()), None, 2, PLAIN)
    assert chosen.tolist() == ids.tolist()
    assert torch.allclose(weights, right, rtol=1e-5, atol=0)


def test_the_backend_adds_the_chosen_up() -> None:
    kernels = CudaKernels(torch.device("cpu"))
    x, chosen, weights = torch.randn(3, 32).half(), draws(3, 2, 6), torch.rand(3, 2)
    mlps = [torch.randn(shape).half() / 6 for shape in ((6, 32, 32), (6, 32, 16))]
    given = (x, chosen, weights, ExpertWeights(mlps[0], None, mlps[1], None, "silu", True))
    assert worst(kernels.experts(*given), plain_mlps(*given)) < BOUNDS[HALF]


@pytest.mark.parametrize("rule", ["softmax", "sigmoid_groups"])
def test_equal_scores_go_to_the_lower_expert_and_nan_to_some_expert(rule: str) -> None:
    logits = torch.zeros(3, 12)
    logits[1] = float("nan")
    logits[2, 5] = float("nan")
    chosen, weights = cuda.route(logits, None, None, RoutingRule(4, **RULES[rule]))
    assert chosen[0].tolist() == [0, 1, 2, 3]
    assert [sorted(set(row)) for row in chosen.tolist()] == [sorted(r) for r in chosen.tolist()]
    assert ((chosen >= 0) & (chosen < 12)).all()
    assert not weights[0].isnan().any()
