"""`DeviceSampler` on reference kernels gives the same tokens as `exec/torch_sampling.py`."""

from __future__ import annotations

from collections.abc import Sequence
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

from tests.exec.test_logits import VOCAB, random_request
from twostroke.exec import torch_sampling
from twostroke.exec.device_sampling import DeviceSampler
from twostroke.exec.rng import stream_keys
from twostroke.exec.token_mask import Mask, mask_of, unpack_mask
from twostroke.kernels import reference_sampling, sampling_table
from twostroke.kernels.records import DrawParams
from twostroke.plan import NewRow
from twostroke.request import SamplingParams

CPU = torch.device("cpu")
MAX_ROWS, MAX_LEN = 8, 256
KERNELS: Any = reference_sampling


class Pair:
    """Requests that write, each token drawn by the definition and by the sampler."""

    def __init__(self, requests: Sequence[NewRow], kernels: Any = KERNELS) -> None:
        self.sampler = DeviceSampler(
            MAX_ROWS, VOCAB, torch.zeros(MAX_ROWS, MAX_LEN, dtype=torch.int32), kernels, CPU
        )
        for part in self.sampler._state[1:]:
            part.fill_(77)  # of whoever had the rows before
        tokens = torch.zeros(MAX_ROWS, MAX_LEN, dtype=torch.int32)
        self.plain = SimpleNamespace(rows={}, tokens=tokens)
        self.written: dict[int, list[int]] = {}
        self.num_special = 0
        for request in requests:
            self.take(request)

    def take(self, new: NewRow) -> None:
        self.plain.rows[new.row] = new
        self.written[new.row] = list(new.tokens)
        for tokens in (self.plain.tokens, self.sampler.tokens):
            tokens[new.row] = 0
            tokens[new.row, : len(new.tokens)] = torch.tensor(new.tokens)
        self.sampler.take(new)

    def preempt(self, row: int) -> None:
        """The row is given up and taken anew with what was written."""
        self.take(self.plain.rows[row]._replace(tokens=tuple(self.written[row])))

    def step(self, rows: Sequence[int], lines: torch.Tensor, masks: dict[int, Mask]) -> None:
        """The samples of these rows, in this order."""
        which, at = np.array(rows), np.array([len(self.written[row]) for row in rows])
        right = torch_sampling.sample(
            lines.float().clone(),
            rows,
            at.tolist(),
            self.plain,
            {n: torch.from_numpy(unpack_mask(mask, VOCAB)) for n, mask in masks.items()},
        ).tokens
        out, special = right.int(), self.sampler.special(which, at)
        for n in sorted(set(range(len(rows))) - set(special.tolist()) - set(masks)):
            line = lines[n : n + 1].float().clone()
            torch_sampling.adjust(line, rows[n : n + 1], at[n : n + 1].tolist(), self.plain)
            assert torch.equal(line[0], lines[n].float()), "a sample that is not plain was missed"
            self.sampler.tokens[rows[n], at[n]] = right[n].clamp(min=0)
        drawn = np.union1d(special, np.array(list(masks), np.int64)).astype(np.int64)
        if len(drawn):
            self.num_special += len(drawn)
            out[drawn] = -7
            self.sampler.advance(self.draw(lines, drawn, which[drawn], at[drawn], masks), out)
        assert out.tolist() == right.tolist()
        for n, row in enumerate(rows):
            token = max(0, int(right[n]))
            self.written[row].append(token)
            self.plain.tokens[row, at[n]] = token
        assert torch.equal(self.plain.tokens, self.sampler.tokens)

    def draw(self, lines: Any, drawn: Any, rows: Any, at: Any, masks: dict[int, Mask]) -> Any:
        requests = [self.plain.rows[row] for row in rows.tolist()]
        params = [request.params for request in requests]
        return self.sampler.draw(
            lines,
            drawn,
            rows,
            at,
            masks,
            DrawParams(
                np.array([0.0 if p.greedy else p.temperature for p in params], np.float32),
                np.array([max(0, p.top_k) for p in params], np.int32),
                np.array([p.top_p for p in params], np.float32),
                np.array([p.min_p for p in params], np.float32),
                *stream_keys(np.array([r.seed for r in requests], np.uint64), at),
            ),
        )


def request(
    row: int = 0, stop_ids: tuple[int, ...] = (), bad_words: Any = (), **params: Any
) -> NewRow:
    settings = SamplingParams(**({"max_tokens": 100} | params))
    tokens = (5, 6, 7, 5)
    words = tuple(map(tuple, bad_words))
    return NewRow(row, f"r{row}", tokens, 4, settings, 99 + row, frozenset(stop_ids), words)


ALONE: list[dict[str, Any]] = [
    {"repetition_penalty": 1.4},
    {"repetition_penalty": 0.6},
    {"frequency_penalty": 1.5},
    {"frequency_penalty": -0.5},
    {"presence_penalty": 2.0},
    {"logit_bias": {3: 4.0, 299: 5.0, 0: -100.0}},
    {"allowed_token_ids": [0, 31, 32, 64, 299]},
    {"min_tokens": 7, "stop_ids": (9, 10, 11)},
    {"bad_words": [(9,), (10, 10), (11, 12, 11)]},
]


@pytest.mark.parametrize("asked", ALONE, ids=lambda asked: " ".join(asked))
@pytest.mark.parametrize("how", [{"temperature": 0}, {"top_k": 9}, {"top_p": 0.8, "min_p": 0.02}])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_each_setting_alone_beside_a_plain_row(
    asked: dict[str, Any], how: dict[str, Any], dtype: torch.dtype
) -> None:
    pair = Pair([request(0, **asked, **how), request(1, **how)])
    random = torch.Generator().manual_seed(0)
    for _ in range(14):
        lines = torch.randn(2, VOCAB, generator=random) * 2
        lines[:, 9:13] += 5  # what is biased, stopped at, bad, or written often
        pair.step([1, 0], lines.to(dtype), {})
    assert pair.num_special == (7 if "min_tokens" in asked else 14)


@pytest.mark.parametrize("seed", range(12))
def test_mixtures_over_many_steps_with_rows_that_change_hands(seed: int) -> None:
    random = np.random.default_rng(seed)
    pair = Pair([random_request(random, row) for row in range(MAX_ROWS)])
    for _ in range(20):
        rows = random.permutation(MAX_ROWS)[: random.integers(1, MAX_ROWS + 1)].tolist()
        lines = torch.from_numpy(random.normal(0, 3, (len(rows), VOCAB)).astype(np.float32))
        masks = {}
        for n in np.flatnonzero(random.random(len(rows)) < 0.2).tolist():
            allowed = pair.plain.rows[rows[n]].params.allowed_token_ids or ()
            masks[n] = mask_of([*random.integers(0, VOCAB, 90).tolist(), *allowed], VOCAB)
        pair.step(rows, lines, masks)
        for row in rows:
            if random.random() < 0.1:
                pair.preempt(row)
            elif random.random() < 0.1:
                pair.take(random_request(random, row))
    assert pair.num_special > 40


def test_what_was_written_before_a_preemption_is_counted_as_written() -> None:
    pair = Pair([request(0, temperature=0, frequency_penalty=2.0, repetition_penalty=1.5)])
    lines = torch.zeros(1, VOCAB)
    lines[0, [20, 21]] = torch.tensor([6.0, 1.5])
    for _ in range(2):
        pair.step([0], lines, {})
    pair.preempt(0)
    counts = pair.sampler._state.counts[0]
    assert counts[20] == 2
    assert counts[5] == sampling_table.IN_PROMPT
    pair.step([0], lines, {})
    assert pair.written[0][4:] == [20, 20, 21]


def test_a_token_written_more_often_than_a_count_can_tell_stays_at_the_most() -> None:
    pair = Pair([request(0, temperature=0, presence_penalty=0.1)])
    pair.sampler._state.counts[0, 20] = sampling_table.MAX_WRITTEN - 1
    lines = torch.zeros(1, VOCAB)
    lines[0, 20] = 9
    for expected in (sampling_table.MAX_WRITTEN, sampling_table.MAX_WRITTEN):
        pair.step([0], lines, {})
        assert pair.sampler._state.counts[0, 20] == expected


LONG: list[dict[str, Any]] = [
    {"logit_bias": {token % VOCAB: 0.1 * (token % 7) for token in range(VOCAB)}},
    {"bad_words": [(*[9] * 3, token) for token in range(VOCAB)]},
    {"bad_words": [(*[9] * (sampling_table.MAX_BAN_PREFIX + 1), 9)]},
    {"min_tokens": 9, "stop_ids": tuple(range(VOCAB - 20))},
]


@pytest.mark.parametrize("asked", LONG, ids=lambda asked: " ".join(asked))
def test_lists_longer_than_a_row_has_places_for(
    asked: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sampling_table, "MAX_BIASES", VOCAB - 1)
    pair = Pair([request(0, temperature=0.9, repetition_penalty=1.2, **asked), request(1)])
    assert list(pair.sampler.rows) == [0]
    random = torch.Generator().manual_seed(1)
    for n in range(20):
        lines = torch.randn(2, VOCAB, generator=random)
        lines[:, 9] += 12
        pair.step([0, 1], lines, {0: mask_of(range(n % 2, VOCAB, 2), VOCAB)})
    pair.take(request(0))
    assert not pair.sampler.rows


@pytest.mark.parametrize("bad", [float("nan"), float("inf")])
def test_broken_logits_give_no_token_and_are_not_counted(bad: float) -> None:
    pair = Pair([request(row, temperature=row, frequency_penalty=1.0) for row in range(2)])
    counts = pair.sampler._state.counts[:2].clone()
    pair.step([0, 1], torch.full((2, VOCAB), bad), {})
    assert torch.equal(pair.sampler._state.counts[:2], counts)


class Launches:
    """Kernels that are counted and compute nothing, so that tensors without memory will do."""

    def __init__(self) -> None:
        self.names: list[str] = []

    def __getattr__(self, name: str) -> Any:
        return lambda *_, **__: self.names.append(name)


def test_nothing_is_asked_of_the_device_and_launches_do_not_grow_with_the_batch() -> None:
    """Whatever asked for a value of a tensor on `meta` would fail."""
    launches: Any = Launches()
    meta = torch.device("meta")
    tokens = torch.zeros(MAX_ROWS, MAX_LEN, dtype=torch.int32, device=meta)
    sampler = DeviceSampler(MAX_ROWS, VOCAB, tokens, launches, meta)
    random = np.random.default_rng(0)
    for row in range(MAX_ROWS):
        sampler.take(random_request(random, row))
    logits, out = torch.empty(MAX_ROWS, VOCAB, device=meta), torch.empty(MAX_ROWS, device=meta)
    for count in (1, MAX_ROWS):
        rows = np.arange(count)
        masks = {int(n): mask_of([n], VOCAB) for n in rows}
        drawn = sampler.draw(logits, rows, rows, rows + 40, masks, DrawParams(*(rows,) * 6))
        sampler.advance(drawn, out)
        sampler.logprobs(logits, rows, out, 5)
        assert launches.names == ["adjust_logits", "sample", "advance_tokens", "token_logprobs"]
        launches.names.clear()


def test_the_comparison_notices_a_penalty_that_is_left_out() -> None:
    """Negative control."""
    pair = Pair([request(0, temperature=0, repetition_penalty=4.0)])
    pair.sampler._penalties[:] = [[1], [0], [0]]
    lines = torch.zeros(1, VOCAB)
    lines[0, [5, 6]] = torch.tensor([4.0, 4.0])
    lines[0, 8] = 2.0
    with pytest.raises(AssertionError):
        pair.step([0], lines, {})
