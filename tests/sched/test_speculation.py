"""The scheduler with drafters, over a model made of hashes."""

from __future__ import annotations

import pytest

from tests.fakes import expected_tokens, fake_request, groups
from tests.sched.test_scheduler import Bench
from twostroke.draft.speculation_config import SpeculationConfig
from twostroke.plan import StepPlan

FIXED = SpeculationConfig(max_depth=4, ngram_min=1, suffix_factor=8.0, adaptive=False)


class Drafting(Bench):
    def __init__(self, speculation: SpeculationConfig = FIXED, **settings: object) -> None:
        super().__init__(speculation=speculation, **settings)

    def add_predicted(
        self, name: str, prompt: list[int], max_tokens: int, *, wrong: int | None = None
    ) -> None:
        """Add a request with its output as the prediction. `wrong`: a place with another token."""
        tokens = expected_tokens(fake_request(name, prompt, max_tokens), 64)
        if wrong is not None:
            tokens[wrong] = (tokens[wrong] + 1) % 7
        self.add(name, prompt, max_tokens, prediction=tuple(tokens))

    def assert_written(self, name: str, prompt: list[int], max_tokens: int) -> None:
        expected = expected_tokens(fake_request(name, prompt, max_tokens), 64)
        assert self.written[name] == expected


def depths(plans: list[StepPlan]) -> list[list[int]]:
    return [[slot.drafts for slot in plan.decode] for plan in plans]


def test_a_right_prediction_is_accepted_in_whole() -> None:
    bench = Drafting()
    bench.add_predicted("a", [1, 2, 3], 11)
    plans = bench.run()
    bench.assert_written("a", [1, 2, 3], 11)
    # The prompt's step writes a token, two steps write five each: no draft exceeds max_tokens.
    assert depths(plans) == [[], [4], [4]]


def test_a_draft_leaves_room_for_the_token_after_it() -> None:
    bench = Drafting()
    bench.add_predicted("a", [1, 2, 3], 4)
    assert depths(bench.run()) == [[], [2]]
    bench.assert_written("a", [1, 2, 3], 4)


@pytest.mark.parametrize("wrong", range(1, 8))
def test_a_wrong_prediction_changes_no_token(wrong: int) -> None:
    bench = Drafting()
    bench.add_predicted("a", [4, 2], 9, wrong=wrong)
    plans = bench.run()
    bench.assert_written("a", [4, 2], 9)
    assert sum(map(sum, depths(plans))) > 0


def test_the_work_of_a_step_counts_drafted_tokens() -> None:
    bench = Drafting()
    bench.add_predicted("a", [1, 2, 3], 11)
    bench.step()
    plan = bench.step()
    assert plan.decode_work.rows == 1
    assert plan.decode_work.tokens == plan.num_tokens == 5
    # Positions 3 to 7: each attends to itself and all before; the last one reads them all.
    assert plan.decode_work.kv_tokens == 4 + 5 + 6 + 7 + 8
    assert plan.decode_work.kv_reads == 8


def test_drafts_stay_within_the_budget_of_a_step() -> None:
    bench = Drafting(max_num_batched_tokens=6, max_num_seqs=4)
    for n in range(4):
        bench.add_predicted(f"r{n}", [n, 2], 12)
    for plan in bench.run():
        assert plan.num_tokens <= 6
    for n in range(4):
        bench.assert_written(f"r{n}", [n, 2], 12)


def test_a_draft_preempts_no_request() -> None:
    """Blocks for four requests without drafts, and one more: drafts take only what is free."""
    prompt, most = [1, 2, 3], 12

    def preempted(speculation: SpeculationConfig | None) -> int:
        bench = Drafting(speculation, groups=groups(17), lookahead=0, prefix_caching=False)  # type: ignore[arg-type]
        for n in range(4):
            bench.add_predicted(f"r{n}", [*prompt, n], most)
        plans = bench.run()
        for n in range(4):
            bench.assert_written(f"r{n}", [*prompt, n], most)
        assert speculation is None or any(map(sum, depths(plans)))
        return bench.preempted

    assert preempted(FIXED) <= preempted(None)


def test_rejected_tokens_are_no_prefix_of_later_requests() -> None:
    """After a run with many rejections every cached block is that of its tokens: the executor
    fails on a wrong one."""
    bench = Drafting(SpeculationConfig(max_depth=8, ngram_min=1, adaptive=False))
    for n in range(12):
        bench.add(f"r{n}", [n % 3, 1, 2], 30)
        bench.run()
        bench.assert_written(f"r{n}", [n % 3, 1, 2], 30)
    written = bench.written["r0"]
    longer = [0, 1, 2, *written]
    bench.add("again", longer, 3)
    first = bench.step()
    assert first.prefill[0].start >= 28, "the text of the first request is cached"
    bench.run()
    bench.assert_written("again", longer, 3)


def test_a_step_ahead_of_the_commit_has_no_drafts() -> None:
    bench = Drafting()
    bench.add_predicted("a", [1, 2, 3], 12)
    bench.step()
    ahead = [bench.scheduler.plan(), bench.scheduler.plan()]
    assert [step.plan.decode[0].drafts for step in ahead if step] == [4, 0]


def test_time_is_learnt_before_the_first_adaptive_draft_and_decides_on_it() -> None:
    """Drafted tokens are dear: some are tried until the model knows, then none."""

    def run(token_s: float) -> list[int]:
        bench = Drafting(SpeculationConfig(max_depth=4, methods=("ngram",), ngram_min=1))
        bench.add_predicted("a", [1, 2, 3], 60)
        verified = []
        while bench.scheduler.has_requests:
            step = bench.scheduler.plan()
            assert step is not None
            drafts = step.plan.decode_work.tokens - step.plan.decode_work.rows
            verified.append(drafts)
            result = bench.executor.run(step.plan)._replace(device_s=0.01 + token_s * drafts)
            for update in bench.scheduler.commit(result).updates:
                bench.written["a"] += update.tokens
            bench.executor.committed()
            bench.scheduler.audit()
        bench.assert_written("a", [1, 2, 3], 60)
        return verified

    free, dear = run(0.0), run(0.05)
    assert free[:4] == [0, 0, 0, 0], "three steps are measured first"
    assert set(free[4:-1]) == {4}
    assert sum(dear[-20:]) <= 4
    assert sum(map(bool, dear)) <= 8
