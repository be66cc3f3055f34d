"""Sampling against its definition: distributions, filters, penalties, and independence of batch."""

from __future__ import annotations

import math
from collections import Counter

import pytest
import torch

from twostroke.exec.device_rows import DeviceRows
from twostroke.exec.rng import stream_key
from twostroke.exec.torch_sampling import sample
from twostroke.kernels import reference_sampling
from twostroke.kernels.reference_sampling import gumbel
from twostroke.plan import NewRow
from twostroke.request import SamplingParams

VOCAB = 50


def state_with(*requests: NewRow, tokens: tuple[int, ...] = (1, 2, 3)) -> DeviceRows:
    state = DeviceRows(max(8, len(requests)), 64, 16, 1, torch.device("cpu"))
    for row, request in enumerate(requests):
        state.rows[row] = request._replace(row=row)
        state.tokens[row, : len(tokens)] = torch.tensor(tokens)
    return state


def asked(seed: int = 0, prompt: tuple[int, ...] = (1, 2, 3), **params: object) -> NewRow:
    stop_ids = params.pop("stop_ids", frozenset())
    bad_words = params.pop("bad_words_ids", ())
    settings = SamplingParams(**params)  # type: ignore[arg-type]
    return NewRow(0, "r", prompt, len(prompt), settings, seed, stop_ids, bad_words)  # type: ignore[arg-type]


def draw(logits: torch.Tensor, request: NewRow, count: int) -> Counter[int]:
    """Tokens drawn at `count` different positions from the same logits."""
    state = state_with(*[request] * 500)
    found: Counter[int] = Counter()
    for at in range(0, count, 500):
        rows, positions = range(500), range(at + 3, at + 503)
        found.update(sample(logits.repeat(500, 1), rows, positions, state).tokens.tolist())
    return found


def assert_drawn_from(probs: torch.Tensor, found: Counter[int]) -> None:
    """A chi-square test at a level that a right sampler misses once in a million."""
    total = sum(found.values())
    kept = {n: p for n, p in enumerate(probs.tolist()) if p > 0}
    assert set(found) <= set(kept), "a token was drawn that has no probability"
    likely = {n: p for n, p in kept.items() if p * total >= 5}
    statistic = sum((found[n] - p * total) ** 2 / (p * total) for n, p in likely.items())
    freedom = max(1, len(likely) - 1)
    # Wilson and Hilferty: a chi-square's cube root is nearly normal.
    z = ((statistic / freedom) ** (1 / 3) - (1 - 2 / (9 * freedom))) / math.sqrt(2 / (9 * freedom))
    assert z < 5, f"chi-square {statistic:.1f} with {freedom} degrees of freedom"


@pytest.fixture
def logits() -> torch.Tensor:
    return torch.randn(VOCAB, generator=torch.Generator().manual_seed(3)) * 2


def test_temperature_draws_from_the_softmax(logits: torch.Tensor) -> None:
    found = draw(logits, asked(temperature=0.8), 20_000)
    assert_drawn_from(torch.softmax(logits / 0.8, 0), found)


def test_the_check_itself_notices_a_wrong_temperature(logits: torch.Tensor) -> None:
    found = draw(logits, asked(temperature=0.8), 20_000)
    with pytest.raises(AssertionError, match="chi-square"):
        assert_drawn_from(torch.softmax(logits / 0.9, 0), found)


def filtered(logits: torch.Tensor, keep: torch.Tensor) -> torch.Tensor:
    return torch.softmax(logits.masked_fill(~keep, -math.inf), 0)


def test_top_k_keeps_the_k_best(logits: torch.Tensor) -> None:
    keep = torch.zeros(VOCAB, dtype=torch.bool)
    keep[logits.topk(5).indices] = True
    found = draw(logits, asked(top_k=5), 10_000)
    assert_drawn_from(filtered(logits, keep), found)


def top_p_mask(logits: torch.Tensor, p: float) -> torch.Tensor:
    """By a full sort, as the textbook has it."""
    ordered, ids = torch.softmax(logits, 0).sort(descending=True)
    keep = torch.zeros(len(logits), dtype=torch.bool)
    keep[ids[ordered.cumsum(0) - ordered < p]] = True
    return keep


@pytest.mark.parametrize("p", [1e-6, 0.3, 0.9, 0.999])
@pytest.mark.parametrize("candidates", [1024, 4])
def test_top_p_keeps_the_smallest_set_that_reaches_p(
    p: float, candidates: int, logits: torch.Tensor, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With few candidates the set reaches past them, and everything has to be looked at."""
    monkeypatch.setattr(reference_sampling, "CANDIDATES", candidates)
    found = draw(logits, asked(top_p=p), 4_000)
    assert_drawn_from(filtered(logits, top_p_mask(logits, p)), found)


def test_top_k_and_top_p_together_apply_in_that_order(logits: torch.Tensor) -> None:
    best = torch.full_like(logits, -math.inf)
    ids = logits.topk(8).indices
    best[ids] = logits[ids]
    found = draw(logits, asked(top_k=8, top_p=0.7), 10_000)
    assert_drawn_from(filtered(best, top_p_mask(best, 0.7)), found)


def test_min_p_drops_what_is_far_below_the_best(logits: torch.Tensor) -> None:
    probs = torch.softmax(logits, 0)
    found = draw(logits, asked(min_p=0.1), 10_000)
    assert_drawn_from(filtered(logits, probs >= 0.1 * probs.max()), found)


def test_the_same_seed_draws_the_same_whatever_else_is_in_the_batch() -> None:
    generator = torch.Generator().manual_seed(0)
    logits = torch.randn(8, VOCAB, generator=generator)
    mine = asked(seed=7, temperature=1.0, top_p=0.95)
    others = [
        asked(temperature=0),
        asked(seed=1, top_k=3),
        asked(seed=2),
        asked(seed=3, top_k=40, top_p=0.5, min_p=0.02),
    ]
    alone = sample(logits[:1].clone(), [0], [11], state_with(mine)).tokens[0]
    for place in range(5):
        batch = [*others[:place], mine, *others[place:]]
        lines = [torch.randn(VOCAB, generator=generator) for _ in batch]
        lines[place] = logits[0]
        tokens = sample(torch.stack(lines), range(5), [11] * 5, state_with(*batch)).tokens
        assert tokens[place] == alone


def test_another_seed_or_position_draws_something_else(logits: torch.Tensor) -> None:
    flat = torch.zeros(1, VOCAB)
    drawn = set()
    for seed in range(8):
        for position in range(3, 9):
            state = state_with(asked(seed=seed))
            drawn.add(int(sample(flat.clone(), [0], [position], state).tokens[0]))
    assert len(drawn) > 20


def test_gumbel_noise_has_the_right_mean_and_no_pattern_over_positions() -> None:
    keys = torch.tensor([stream_key(5, position) for position in range(400)])
    noise = gumbel(keys, torch.arange(400).unsqueeze(0))
    assert torch.isfinite(noise).all()
    assert abs(noise.mean() - 0.5772) < 0.01
    assert abs(noise.var() - math.pi**2 / 6) < 0.02
    both = torch.corrcoef(torch.stack([noise[:-1].flatten(), noise[1:].flatten()]))
    assert abs(both[0, 1]) < 0.01


def test_penalties_follow_their_formulas(logits: torch.Tensor) -> None:
    """Prompt 1 2 3, written 4 4 5."""
    tokens = (1, 2, 3, 4, 4, 5)
    request = asked(
        temperature=0,
        repetition_penalty=1.3,
        presence_penalty=0.4,
        frequency_penalty=0.2,
        logprobs=0,
    )
    state = state_with(request, tokens=tokens)
    line = logits.clone().unsqueeze(0)
    sample(line, [0], [6], state)
    expected = logits.clone()
    for token in {1, 2, 3, 4, 5}:
        expected[token] = expected[token] / 1.3 if expected[token] > 0 else expected[token] * 1.3
    expected[4] -= 0.4 + 2 * 0.2
    expected[5] -= 0.4 + 0.2
    torch.testing.assert_close(line[0], expected)


def test_a_biased_token_wins_and_a_forbidden_one_never_does(logits: torch.Tensor) -> None:
    best, worst = int(logits.argmax()), int(logits.argmin())
    request = asked(temperature=0, logit_bias={worst: 100.0})
    assert sample(logits.clone()[None], [0], [3], state_with(request)).tokens[0] == worst
    request = asked(temperature=0, allowed_token_ids=[worst])
    assert sample(logits.clone()[None], [0], [3], state_with(request)).tokens[0] == worst
    request = asked(temperature=0, min_tokens=2, stop_ids=frozenset({best}))
    assert sample(logits.clone()[None], [0], [4], state_with(request)).tokens[0] != best
    assert sample(logits.clone()[None], [0], [5], state_with(request)).tokens[0] == best


def test_a_bad_word_is_forbidden_only_where_it_would_be_completed(logits: torch.Tensor) -> None:
    best = int(logits.argmax())
    request = asked(temperature=0, bad_words_ids=((4, 5, best),))
    completed = state_with(request, tokens=(1, 2, 3, 4, 5))
    assert sample(logits.clone()[None], [0], [5], completed).tokens[0] != best
    other = state_with(request, tokens=(1, 2, 3, 5, 4))
    assert sample(logits.clone()[None], [0], [5], other).tokens[0] == best
    in_prompt = state_with(asked(temperature=0, prompt=(4, 5), bad_words_ids=((4, 5, best),)))
    assert sample(logits.clone()[None], [0], [2], in_prompt).tokens[0] == best


def test_a_mask_leaves_only_what_it_allows(logits: torch.Tensor) -> None:
    allowed = torch.zeros(VOCAB, dtype=torch.bool)
    allowed[[7, 9]] = True
    masks = {1: allowed}
    requests = [asked(temperature=0), asked(temperature=0)]
    lines = logits.repeat(2, 1)
    tokens = sample(lines, [0, 1], [3, 3], state_with(*requests), masks).tokens.tolist()
    assert tokens == [int(logits.argmax()), 7 if logits[7] > logits[9] else 9]


def test_logprobs_are_of_the_raw_logits_and_rank_the_chosen_token(logits: torch.Tensor) -> None:
    third = int(logits.topk(3).indices[2])
    request = asked(temperature=0, logprobs=2, logit_bias={third: 50.0})
    found = sample(logits.clone()[None], [0], [3], state_with(request)).logprobs[0]
    ids, values, rank = found
    raw = torch.log_softmax(logits, 0)
    assert ids.tolist() == [third, *logits.topk(2).indices.tolist()]
    torch.testing.assert_close(values, raw[ids])
    assert rank == 3
