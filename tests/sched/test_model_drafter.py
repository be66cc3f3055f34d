"""A draft model over the scheduler, both models made of hashes."""

from __future__ import annotations

import pytest

from tests.fakes import FakeDraftRunner, expected_tokens, fake_request, groups
from tests.sched.test_scheduler import Bench
from twostroke.draft.speculation_config import SpeculationConfig
from twostroke.plan import StepPlan
from twostroke.sched.model_drafter import MAX_FAILURES, ModelDrafter, Vocabularies
from twostroke.sched.scheduler import Scheduler

SAME = Vocabularies(7, 7)
FIXED = SpeculationConfig(methods=("draft_model",), max_depth=4, adaptive=False)


class Drafting(Bench):
    """A scheduler whose drafts come from a model that is wrong after one in `wrong_every`
    prefixes."""

    def __init__(
        self,
        wrong_every: int = 0,
        speculation: SpeculationConfig = FIXED,
        draft_blocks: int = 64,
        vocabularies: Vocabularies = SAME,
        min_prob: float = 0.0,
        **settings: object,
    ) -> None:
        super().__init__(speculation=speculation, **settings)
        self.runner = FakeDraftRunner(self.config.block_size, (None,), wrong_every)
        limits = Bench(**{"groups": groups(draft_blocks), **settings}).config
        self.drafter = ModelDrafter(limits, self.runner, vocabularies, min_prob)
        self.scheduler = Scheduler(self.config, draft_model=self.drafter)

    def assert_written(self, name: str, prompt: list[int], max_tokens: int) -> None:
        assert self.written[name] == expected_tokens(fake_request(name, prompt, max_tokens), 64)


def depths(plans: list[StepPlan]) -> list[list[int]]:
    return [[slot.drafts for slot in plan.decode] for plan in plans]


def shapes(plans: list[StepPlan]) -> list[tuple[list[int], list[tuple[int, int]]]]:
    """The positions of the slots, and start and size of the chunks."""
    return [([s.position for s in p.decode], [(c.start, c.size) for c in p.prefill]) for p in plans]


def test_drafts_that_are_right_are_accepted_and_the_text_is_followed_in_chunks() -> None:
    bench = Drafting()
    bench.add("a", [1, 2, 3], 11)
    assert depths(bench.run()) == [[], [4], [4]]
    bench.assert_written("a", [1, 2, 3], 11)
    assert shapes(bench.runner.plans) == [
        ([], [(0, 4)]),  # the prompt and the first token, then a step for each drafted token
        ([4], []),
        ([5], []),
        ([6], []),
        ([], [(7, 2)]),  # the last draft and the token after it
        ([9], []),
        ([10], []),
        ([11], []),
    ]


@pytest.mark.parametrize("wrong_every", [1, 2, 3, 5])
def test_a_wrong_draft_is_overwritten_and_changes_no_token(wrong_every: int) -> None:
    bench = Drafting(wrong_every)
    bench.add("a", [4, 2], 30)
    bench.run()
    bench.assert_written("a", [4, 2], 30)
    starts = [write.position for plan in bench.runner.plans for write in plan.written]
    assert len(starts) > 3, "no draft was rejected"


def test_rejected_tokens_are_no_prefix_of_later_requests() -> None:
    bench = Drafting(3)
    for n in range(8):
        prompt = [n % 3, 1, 2]
        bench.add(f"r{n}", prompt, 30)
        bench.run()
        bench.assert_written(f"r{n}", prompt, 30)
    longer = [1, 1, 2, *bench.written["r1"]]
    bench.add("longer", longer, 4)
    bench.run()
    *_, last = [plan for plan in bench.runner.plans if plan.new]
    assert last.prefill[0].start >= 24, "the text of an earlier request is cached"


def test_a_long_prompt_is_computed_in_chunks_before_the_first_draft() -> None:
    bench = Drafting(max_num_batched_tokens=8)
    prompt = [n % 5 for n in range(30)]
    bench.add("a", prompt, 20)
    plans = bench.run()
    bench.assert_written("a", prompt, 20)
    assert all(plan.num_tokens <= 8 for plan in bench.runner.plans)
    assert [size for _, size in shapes(bench.runner.plans)[0][1]] == [8]
    decoding = [one for one in depths(plans) if one]
    assert decoding[:3] == [[0], [0], [0]]
    assert [4] in decoding


def test_a_request_gives_back_its_row_and_its_blocks_when_it_ends() -> None:
    bench = Drafting(2)
    for n in range(4):
        bench.add(f"r{n}", [n, 1], 20)
    for _ in range(3):
        bench.step()
    assert not bench.drafter.kv.is_idle()
    bench.scheduler.abort("r1")
    bench.scheduler.audit()
    bench.run()
    assert bench.drafter.kv.is_idle()
    assert len(bench.drafter._rows) == bench.config.max_num_seqs


def test_a_preempted_request_keeps_nothing_in_the_draft_model() -> None:
    bench = Drafting(2, groups=groups(17), lookahead=0)
    for n in range(4):
        bench.add(f"r{n}", [1, 2, 3, n], 20)
    held = []
    while bench.scheduler.has_requests:
        bench.step()
        waiting = bench.scheduler.num_waiting
        held.append(waiting + len(bench.drafter._followed) - len(bench.scheduler._requests))
        rows = bench.config.max_num_seqs - len(bench.drafter._rows)
        assert rows <= bench.scheduler.num_running
    assert bench.preempted
    for n in range(4):
        bench.assert_written(f"r{n}", [1, 2, 3, n], 20)


def test_a_full_draft_cache_leaves_rows_without_drafts() -> None:
    bench = Drafting(draft_blocks=6)
    for n in range(4):
        bench.add(f"r{n}", [n, 1, 2], 30)
    plans = bench.run()
    for n in range(4):
        bench.assert_written(f"r{n}", [n, 1, 2], 30)
    assert any(len(set(one)) > 1 for one in depths(plans))


def test_a_draft_model_with_fewer_tokens_drafts_only_texts_that_it_knows() -> None:
    bench = Drafting(vocabularies=Vocabularies(7, 6))
    bench.add("known", [1, 2, 3], 3)
    bench.add("unknown", [1, 6, 3], 12)
    bench.run()
    bench.assert_written("unknown", [1, 6, 3], 12)
    names = {new.request_id for plan in bench.runner.plans for new in plan.new}
    assert names <= {"known"}


def test_a_draft_ends_before_a_token_of_low_probability() -> None:
    bench = Drafting(min_prob=0.95)  # the fake model gives every token 0.905
    bench.add("a", [1, 2, 3], 12)
    assert not any(map(sum, depths(bench.run())))


def test_a_failing_draft_model_is_left_out_and_the_text_goes_on() -> None:
    bench = Drafting()
    bench.runner.failing = list(range(2, 400))
    bench.add("a", [1, 2, 3], 40)
    plans = bench.run()
    bench.assert_written("a", [1, 2, 3], 40)
    assert len(bench.runner.plans) == 2 + MAX_FAILURES
    assert sum(map(sum, depths(plans[-4:]))) == 0
    assert bench.drafter.kv.is_idle()


def test_a_step_that_fails_once_starts_the_draft_model_again() -> None:
    bench = Drafting()
    bench.runner.failing = [3]
    bench.add("a", [1, 2, 3], 40)
    plans = bench.run()
    bench.assert_written("a", [1, 2, 3], 40)
    assert depths(plans)[-2] == [4]


def test_a_wrong_row_of_the_draft_model_is_noticed() -> None:
    """Negative control: without the writes of replaced tokens its rows are not the text."""
    bench = Drafting(2)
    run = bench.runner.run
    bench.runner.run = lambda plan: run(plan._replace(written=()))  # type: ignore[method-assign]
    bench.drafter._fail = _raise  # type: ignore[method-assign]
    bench.add("a", [4, 2], 30)
    with pytest.raises(AssertionError, match=r"decode feeds the newest|sees a wrong key"):
        bench.run()


def _raise(error: Exception) -> None:
    raise error
