"""`Forecast` on a simulated machine with known costs."""

from __future__ import annotations

from collections.abc import Sequence

import pytest

from twostroke.kv.usage import KVUsage
from twostroke.observe.forecast import Forecast, Workload
from twostroke.observe.record import Causes, PhaseRecord, Records, RequestRecord, StepRecord
from twostroke.sched.work import visible_positions
from twostroke.serve.learn.lab import CALIBRATION

EMPTY = PhaseRecord(0, 0, 0, 0.0, 0.0)
BUDGET = 512
START_S, HOST_S = 0.002, 0.0005
SETTINGS = [(32, 32, 1), (256, 64, 1), (768, 32, 1), (1536, 16, 1), (64, 32, 4), (128, 32, 2)]


class Machine:
    """An engine whose step times follow from its tokens, without noise."""

    def __init__(self) -> None:
        self.records = Records()
        self._now_s = 100.0
        self._stall_at = -1

    def stall_in(self, steps: int) -> None:
        """The step after so many takes a second longer."""
        self._stall_at = len(self.records.steps) + steps

    def run(self, load: Workload) -> tuple[float, float]:
        """Return the mean TTFT and TPOT."""
        requests = [
            RequestRecord(str(n), load.prompt_tokens, self._now_s) for n in range(load.streams)
        ]
        computed = [0] * load.streams
        self._now_s += START_S
        while any(len(one.token_s) < load.output_tokens for one in requests):
            self._step(load, requests, computed)
        for one in requests:
            one.first_token_s = one.token_s[0]
            self.records.requests.append(one)
        gaps = load.output_tokens - 1
        ttft_s = sum(one.ttft_s for one in requests) / load.streams
        return ttft_s, sum(one.token_s[-1] - one.token_s[0] for one in requests) / (
            load.streams * gaps
        )

    def _step(self, load: Workload, requests: Sequence[RequestRecord], computed: list[int]) -> None:
        number, budget = len(self.records.steps), BUDGET
        writing = [one for one in requests if 0 < len(one.token_s) < load.output_tokens]
        reads = sum(load.prompt_tokens + len(one.token_s) for one in writing)
        budget -= len(writing)
        rows, tokens, attended = 0, 0, 0
        ended = list(writing)
        for n, one in enumerate(requests):
            size = min(budget, load.prompt_tokens - computed[n])
            if size > 0:
                rows, tokens, budget = rows + 1, tokens + size, budget - size
                attended += visible_positions(computed[n], size, None)
                one.chunks.append((self._now_s, number, computed[n], size))
                computed[n] += size
                if computed[n] == load.prompt_tokens:
                    ended.append(one)
        took_s = 0.010 + 0.0012 * len(writing) + 3e-6 * reads
        if tokens:
            took_s = 0.006 + 0.00045 * (tokens + len(writing)) + 3e-8 * attended + 3e-6 * reads
        took_s += 1.0 if number == self._stall_at else 0.0
        begun_s = self._now_s + HOST_S * bool(writing)
        self._now_s = begun_s + took_s
        slots = len(writing)
        self.records.steps.append(
            StepRecord(
                *(number, begun_s, begun_s, self._now_s, took_s, 0.0),
                PhaseRecord(rows, tokens, attended, 0.0, 0.0) if rows else EMPTY,
                PhaseRecord(slots, slots, reads, 0.0, 0.0) if slots else EMPTY,
                *((), (), 0, 0, 0, KVUsage(0, 0, 0, 0, 0)),
                since_s=Causes(host=HOST_S),
                regular=slots,
            )
        )
        for one in ended:
            one.token_s.append(self._now_s)
            one.token_step.append(number)


def calibrated(machine: Machine) -> Forecast:
    for size, streams in CALIBRATION:
        machine.run(Workload(size, 12, streams))
    return Forecast(machine.records, BUDGET)


def test_after_calibration_the_forecast_matches_every_setting() -> None:
    machine = Machine()
    forecast = calibrated(machine)
    for setting in SETTINGS:
        load = Workload(*setting)
        expected = forecast.predict(load)
        assert expected is not None
        ttft_s, tpot_s = machine.run(load)
        assert expected.tpot_s == pytest.approx(tpot_s, rel=0.05), setting
        assert expected.ttft_s == pytest.approx(ttft_s, rel=0.05), setting


def test_a_stall_of_the_machine_does_not_count() -> None:
    machine = Machine()
    machine.stall_in(40)
    expected = calibrated(machine).predict(Workload(256, 32))
    assert expected is not None
    ttft_s, tpot_s = machine.run(Workload(256, 32))
    assert expected.ttft_s == pytest.approx(ttft_s, rel=0.1)
    assert expected.tpot_s == pytest.approx(tpot_s, rel=0.1)


def test_the_first_step_of_an_engine_does_not_count() -> None:
    machine = Machine()
    machine.stall_in(0)
    expected = calibrated(machine).predict(Workload(32, 32))
    assert expected is not None
    ttft_s, _ = machine.run(Workload(32, 32))
    assert expected.ttft_s == pytest.approx(ttft_s, rel=0.05)


def test_steps_of_other_requests_do_not_count_as_the_start_of_a_request() -> None:
    machine = Machine()
    forecast = calibrated(machine)
    for _ in range(3):
        machine.run(Workload(512, 4, 8))
    expected = forecast.predict(Workload(256, 32))
    assert expected is not None
    assert expected.start_s == pytest.approx(START_S, abs=HOST_S)


def test_there_is_no_forecast_before_steps_of_both_phases_have_run() -> None:
    machine = Machine()
    assert Forecast(machine.records, BUDGET).predict(Workload(8, 8)) is None
    machine.run(Workload(8, 8))
    assert Forecast(machine.records, BUDGET).predict(Workload(8, 8)) is None
