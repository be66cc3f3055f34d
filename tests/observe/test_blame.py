"""Gaps between tokens by cause: the parts add up, and each cause is found."""

from __future__ import annotations

import random
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import pytest

from tests.fakes import FakeExecutor, fake_request, groups, random_prompt
from tests.tiny import tiny_llm
from twostroke import LLM
from twostroke.engine.core import EngineCore
from twostroke.model.describe.cost import CostModel
from twostroke.observe.record import Causes, RequestRecord, StepRecord
from twostroke.observe.totals import CAUSES, Totals
from twostroke.plan import StepPlan, StepResult
from twostroke.request import EngineRequest, SamplingParams
from twostroke.sched.scheduler import Scheduler
from twostroke.sched.step import SchedulerConfig

STALL_S = 0.05


def request(name: str, prompt: int, output: int, offset: int = 0) -> EngineRequest:
    tokens = [4 + (offset * 31 + n * 7) % 290 for n in range(prompt)]
    params = SamplingParams(max_tokens=output, temperature=0.0)
    return EngineRequest(name, tokens, params, seed=1, gap_causes=True)


def run(core: EngineCore, stall_at: int = -1) -> dict[str, RequestRecord]:
    """Run until no request is left; `stall_at`: the step after which the host sleeps."""
    records: dict[str, RequestRecord] = {}
    count = 0
    while core.has_work:
        for update in core.step():
            if update.record is not None:
                records[update.request_id] = update.record
                core.records.notify_listeners(update.record)
        count += 1
        if count == stall_at:
            time.sleep(STALL_S)
    core.scheduler.audit()
    return records


def total(gaps: list[Causes]) -> Causes:
    return Causes(*map(sum, zip(*gaps, strict=True)))


def gaps_of(steps: Iterator[StepRecord] | list[StepRecord]) -> list[Causes]:
    return [gap for s in steps for gap in [*[s.since_s] * s.regular, *s.late]]


def assert_adds_up(core: EngineCore, records: dict[str, RequestRecord]) -> None:
    """Assert that steps and requests have the same gaps, and that the parts of each add up."""
    told = gaps_of(list(core.records.steps))
    measured = [gap for r in records.values() for gap, _, _ in r.gap_steps()]
    assert len(told) == len(measured)
    assert sorted(g.total_s for g in told) == pytest.approx(sorted(measured), rel=1e-6, abs=1e-9)
    assert all(min(gap) >= 0 for gap in told)
    by_step, by_request = total(told), total([r.gaps for r in records.values()])
    assert by_request == pytest.approx(by_step, rel=1e-6, abs=1e-9)
    for record in records.values():
        assert record.gaps.total_s == pytest.approx(record.decode_s, rel=1e-6, abs=1e-9)
        if len(record.token_s) > 1:
            assert record.worst_gap_s == max(gap for gap, _, _ in record.gap_steps())
            assert record.worst_gap is not None
            assert record.worst_gap.total_s == pytest.approx(record.worst_gap_s, rel=1e-6)
            assert_each_gap(record)


def assert_each_gap(record: RequestRecord) -> None:
    """Assert that the causes of each gap add up to it, and all gaps to the request's sums."""
    assert record.gap_causes is not None
    gaps = [Causes(*record.gap_causes[at : at + 6]) for at in range(0, len(record.gap_causes), 6)]
    measured = [gap for gap, _, _ in record.gap_steps()]
    assert [gap.total_s for gap in gaps] == pytest.approx(measured, rel=1e-5, abs=1e-8)
    assert total(gaps) == pytest.approx(record.gaps, rel=1e-5, abs=1e-8)


@pytest.fixture
def llm(tmp_path: Path) -> LLM:
    return tiny_llm(tmp_path / "model", max_num_batched_tokens=64, max_num_seqs=8)


def test_gaps_of_a_single_stream_are_its_own_work_and_the_host(llm: LLM) -> None:
    core = llm.engine.core
    core.add(request("a", 8, 12))
    records = run(core)
    assert_adds_up(core, records)
    gaps = records["a"].gaps
    assert gaps.prefill == gaps.preemption == 0
    assert gaps.decode > 0
    assert gaps.host > 0


def test_a_prompt_that_shares_steps_causes_the_rest_of_their_time(llm: LLM) -> None:
    core = llm.engine.core
    core.add(request("writes", 8, 40))
    for _ in range(8):  # alone for a while: what its steps take is known
        core.step()
    core.add(request("long", 200, 2, offset=3))
    records = run(core)
    assert_adds_up(core, records)
    mixed = [step for step in core.records.steps if step.prefill.rows and step.decode.rows]
    assert len(mixed) >= 3
    assert records["writes"].gaps.prefill == pytest.approx(
        sum(s.since_s.prefill for s in mixed if s.regular)
    )
    assert records["writes"].gaps.prefill > 0
    assert records["long"].gaps.prefill == 0
    assert records["writes"].gaps.preemption == 0


def test_a_stall_of_the_host_counts_as_host_time(llm: LLM) -> None:
    core = llm.engine.core
    for name in "ab":
        core.add(request(name, 8, 20))
    records = run(core, stall_at=10)
    assert_adds_up(core, records)
    stalled = [gap for gap in gaps_of(list(core.records.steps)) if gap.host >= STALL_S]
    assert len(stalled) >= 2
    stall_s = max(gap.total_s for gap in stalled)
    for record in records.values():
        assert record.worst_gap is not None
        assert record.gaps.host >= STALL_S
        # The worst, unless the machine held up a step for longer.
        assert record.worst_gap.host >= STALL_S or record.worst_gap_s > stall_s


def test_the_gap_of_a_preempted_stream_counts_as_preemption(tmp_path: Path) -> None:
    llm = tiny_llm(
        tmp_path / "model",
        max_num_batched_tokens=64,
        max_num_seqs=8,
        block_size=4,
        num_gpu_blocks_override=30,
        max_model_len=100,
        enable_prefix_caching=False,
    )
    core = llm.engine.core
    totals = Totals(100)
    core.records.listeners.append(totals)
    core.scheduler._prefill.has_room = lambda *_: True  # type: ignore[method-assign]
    for n in range(4):
        core.add(request(f"r{n}", 10, 60, offset=n))
    records = run(core, stall_at=40)
    assert_adds_up(core, records)
    preempted = {name for name, record in records.items() if record.preempted}
    assert preempted
    assert len(preempted) < 4, "the first in order is never sent back"
    for name, record in records.items():
        assert (record.gaps.preemption > 0) == (name in preempted)
    assert totals.preemptions == sum(len(record.preempted) for record in records.values())
    lost = sum(tokens for record in records.values() for _, tokens in record.preempted)
    assert totals.recomputed_tokens == lost  # without a prefix cache all of it
    worst = max(records.values(), key=lambda record: record.worst_gap_s)
    assert worst.worst_gap is not None
    assert worst.worst_gap.preemption > 0
    late = [gap for step in core.records.steps for gap in step.late]
    assert sum(gap.host for gap in late) >= STALL_S, "a stall while it was out is the host's"


class Talking:
    """Steps whose executor spends a share of their time in collectives."""

    def __init__(self, executor: Any, share: float) -> None:
        self.max_in_flight, self.forward = executor.max_in_flight, executor.forward
        self.reset, self._sample, self._share = executor.reset, executor.sample, share

    def sample(self, handle: Any, masks: Any = None) -> Talked:
        return Talked(self._sample(handle, masks), self._share)


class Talked(NamedTuple):
    pending: Any
    share: float

    def wait(self) -> StepResult:
        result: StepResult = self.pending.wait()
        return result._replace(comm_s=self.share * result.device_s, comm_bytes=1000 * self.share)


@pytest.mark.parametrize("share", [0.0, 0.25, 1.0])
def test_the_whole_mixture_adds_up_in_the_totals(tmp_path: Path, share: float) -> None:
    """`share`: the share of every step that ranks spend in collectives."""
    llm = tiny_llm(
        tmp_path / "model",
        max_num_batched_tokens=48,
        max_num_seqs=6,
        block_size=4,
        num_gpu_blocks_override=60,
        max_model_len=150,
    )
    core = llm.engine.core
    core._executor = Talking(core._executor, share)
    totals = Totals(150)
    core.records.listeners.append(totals)
    core.scheduler._prefill.has_room = lambda *_: True  # type: ignore[method-assign]
    for n in range(12):
        core.add(request(f"r{n}", 10 + 9 * n, 30 + 2 * n, offset=n))
    for _ in range(6):
        core.step()
    core.abort("r1")
    records = run(core, stall_at=30) | {r.request_id: r for r in core.records.requests}
    assert_adds_up(core, records)
    measured = sum(gap for record in records.values() for gap, _, _ in record.gap_steps())
    assert sum(totals.cause_s.values()) == pytest.approx(measured, rel=1e-6)
    assert totals.gap_s.sum == pytest.approx(measured, rel=1e-6)
    for cause in CAUSES:
        assert totals.part_s[cause].sum == pytest.approx(totals.cause_s[cause], rel=1e-6)
        none = {0.0: ("communication",), 1.0: ("decode", "prefill")}.get(share, ())
        assert (totals.cause_s[cause] > 0) == (cause not in (*none, "drafting"))
    written = sum(len(record.token_s) for record in records.values())
    assert totals.generation_tokens == written
    begun = sum(bool(record.token_s) for record in records.values())
    assert totals.ttft_s.count == begun
    assert totals.gap_s.count == written - begun
    busy = sum(step.device_s for step in core.records.steps)
    assert totals.prefill.device_s + totals.decode.device_s == pytest.approx(busy)
    assert totals.prefill.comm_s + totals.decode.comm_s == pytest.approx(share * busy)
    sent = 1000 * share * len(core.records.steps)
    assert totals.prefill.comm_bytes + totals.decode.comm_bytes == pytest.approx(sent)
    regular = [step for step in core.records.steps if step.regular]
    for step in regular:
        on_device = sum(step.since_s) - step.since_s.host
        assert step.since_s.communication == pytest.approx(share * on_device, abs=1e-9)


def test_a_failed_step_costs_its_streams_no_second_of_the_ledger(llm: LLM) -> None:
    core = llm.engine.core
    for n in range(3):
        core.add(request(f"r{n}", 8, 20, offset=n))
    for _ in range(5):
        core.step()
    sample, broken = core._executor.sample, [True]

    def fails_once(handle: StepPlan, masks: object = None) -> StepResult:
        if broken and broken.pop():
            raise RuntimeError("as ordered")
        return sample(handle, masks)

    core._executor.sample = fails_once  # type: ignore[method-assign]
    records = run(core)
    assert_adds_up(core, records)
    assert all(record.gaps.preemption > 0 for record in records.values())


class TwoInFlight:
    """The model of hashes as a device that takes a second step while the first one runs."""

    max_in_flight = 2

    def __init__(self, block_size: int) -> None:
        self._model = FakeExecutor(block_size)

    def forward(self, plan: StepPlan) -> StepResult:
        return self._model.run(plan)._replace(device_s=1e-5)

    def sample(self, result: StepResult, masks: object = None) -> Landing:
        return Landing(result, self._model)


class Landing(NamedTuple):
    result: StepResult
    model: FakeExecutor

    def wait(self) -> StepResult:
        self.model.committed()
        return self.result


@pytest.mark.parametrize("seed", range(20))
def test_gaps_add_up_with_two_steps_in_flight_and_too_few_blocks(seed: int) -> None:
    rng = random.Random(seed)
    limits = SchedulerConfig(
        max_num_seqs=6,
        max_num_batched_tokens=16,
        max_model_len=48,
        block_size=4,
        groups=groups(rng.randint(14, 24)),
        prefix_caching=seed % 2 == 0,
        lookahead=4,
    )
    cost = CostModel(1e9, 1e8, 1e5, 1e9, 1e8, 1e5)
    core = EngineCore(Scheduler(limits), TwoInFlight(4), cost)
    for n in range(12):
        core.add(
            fake_request(
                f"r{n}", random_prompt(rng, 20), rng.randint(1, 25), stop=True, gap_causes=True
            )
        )
    for _ in range(rng.randint(0, 10)):
        core.step()
    core.abort(f"r{rng.randrange(12)}")
    records = run(core) | {record.request_id: record for record in core.records.requests}
    assert_adds_up(core, records)
    steps = list(core.records.steps)
    written = sum(len(record.token_s) for record in records.values())
    assert sum(step.num_written for step in steps) == written
    sent_back = {name for name, record in records.items() if record.preempted}
    if not any(step.late for step in steps):
        assert not any(len(records[name].token_s) > 1 for name in sent_back)
