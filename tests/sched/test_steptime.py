"""The step-time model against machines whose step times are known."""

from __future__ import annotations

import math
import random
from collections.abc import Callable

import pytest

from tests.specs import make_spec
from twostroke.model.describe.cost import ring_bytes
from twostroke.plan import PhaseWork
from twostroke.sched.steptime import StepTimes

Machine = Callable[[PhaseWork, PhaseWork], float]
NOTHING = PhaseWork()


def a_cpu(prefill: PhaseWork, decode: PhaseWork) -> float:
    """Pays for every token."""
    if not prefill.tokens:
        return 8e-3 + 1.7e-3 * decode.rows + 4e-7 * decode.kv_reads
    tokens = prefill.tokens + decode.tokens
    return 9e-3 + 1.75e-3 * tokens + 2.2e-6 * prefill.kv_tokens + 4e-7 * decode.kv_reads


def a_gpu(prefill: PhaseWork, decode: PhaseWork) -> float:
    """Reads its weights in 4.2 ms, whatever comes with them for free."""
    if not prefill.tokens:
        return 4.2e-3 + 1e-5 * decode.rows + 4e-8 * decode.kv_reads
    tokens = prefill.tokens + decode.tokens
    attention = 4e-9 * prefill.kv_tokens + 4e-8 * decode.kv_reads
    return 1e-3 + max(4.2e-3, 2.6e-5 * tokens) + attention


SPEC = make_spec(hidden_size=4096, windows=(None,) * 32, vocab_size=128256)


def two_gpus(prefill: PhaseWork, decode: PhaseWork) -> float:
    """Half the work, and what they send each other over PCIe."""
    tokens, samples = prefill.tokens + decode.tokens, decode.rows + prefill.rows
    sent = ring_bytes(SPEC, 2, 2, tokens, samples, samples) / 2
    begun = 2 + 2 * SPEC.num_layers
    return a_gpu(prefill, decode) / 2 + begun * 1e-5 + sent / 30e9


def chunk(start: int, size: int) -> PhaseWork:
    return PhaseWork(1, size, size * start + size * (size + 1) // 2, start + size)


def slots(rows: int, length: int) -> PhaseWork:
    return PhaseWork(rows, rows, rows * length, rows * length)


class Life:
    """Steps of all kinds, one after the other, on a machine with noise."""

    def __init__(self, machine: Machine, sizes: list[int], noise: float = 0.1) -> None:
        self.times = StepTimes()
        self.machine, self.sizes, self.noise = machine, sizes, noise
        self.errors: list[float] = []  # against the machine without its noise
        self._rng = random.Random(1)
        self._start = 0

    def go(self, steps: int, slower: float = 1.0, stalls: float = 0.0) -> None:
        rng, decode = self._rng, slots(4, 500)
        for step in range(steps):
            if step % 50 == 0:
                decode = slots(rng.randint(1, 16), rng.randint(100, 2000))
            prefill = NOTHING
            if step // 25 % 2:
                size = rng.choice(self.sizes)
                self._start = (self._start + size) % 4000
                prefill = chunk(self._start, size)
            true = slower * self.machine(prefill, decode)
            expected = self.times.predict(prefill, decode)
            if expected is not None:
                assert expected >= 0.0
                self.errors.append(abs(expected - true) / true)
            took = true * rng.lognormvariate(0.0, self.noise)
            took *= rng.choice([5.0, 20.0]) if rng.random() < stalls else 1.0
            self.times.add(prefill, decode, took)

    def recent(self, share: float, steps: int = 500) -> float:
        """The error that `share` of the last steps stay below."""
        return sorted(self.errors[-steps:])[int(share * steps) - 1]


MACHINES = [
    (a_cpu, [16, 32, 48]),
    (a_cpu, [16, 64, 256, 512]),
    (a_gpu, [16, 64, 256, 512, 2048]),
    (a_gpu, [512]),
    (two_gpus, [16, 64, 256, 512, 2048]),
]


@pytest.mark.parametrize(("machine", "sizes"), MACHINES)
def test_times_are_foreseen_within_a_few_percent(machine: Machine, sizes: list[int]) -> None:
    life = Life(machine, sizes)
    life.go(2000)
    assert life.recent(0.5) < 0.03
    assert life.recent(0.9) < 0.09
    # What it says of itself: the noise is 8 % on average, and it cannot foresee that.
    assert 0.04 < life.times.error < 0.16


def test_the_costs_of_a_machine_are_found() -> None:
    life = Life(a_cpu, [16, 64, 256, 512], noise=0.02)
    life.go(3000)
    times = life.times
    for prefill, decode in [
        (chunk(0, 1), slots(1, 100)),
        (chunk(4000, 8), slots(4, 500)),
        (chunk(0, 1024), NOTHING),
        (NOTHING, slots(16, 2000)),
    ]:
        true = a_cpu(prefill, decode)
        assert times.predict(prefill, decode) == pytest.approx(true, rel=0.1)


def test_few_tokens_are_nearly_free_on_a_gpu_and_many_are_not() -> None:
    life = Life(a_gpu, [16, 64, 256, 512, 2048])
    life.go(3000)
    one, some, many = (life.times.predict(chunk(0, n), slots(4, 500)) for n in (1, 100, 2048))
    assert one is not None
    assert some is not None
    assert many is not None
    assert some < 1.25 * one
    assert many > 7 * one


def test_stalls_do_not_spoil_it() -> None:
    life = Life(a_cpu, [16, 64, 256])
    life.go(1000)
    life.go(1000, stalls=0.02)
    assert life.recent(0.5) < 0.06
    assert life.recent(0.9) < 0.15


def test_a_machine_that_becomes_slower_is_followed() -> None:
    life = Life(a_cpu, [16, 64, 256])
    life.go(1000)
    life.go(60, slower=2.0)
    assert life.recent(0.9, 20) < 0.3
    life.go(1000, slower=2.0)
    assert life.recent(0.9) < 0.12
    life.go(1000)
    assert life.recent(0.9) < 0.12


def test_nothing_is_said_before_enough_was_seen() -> None:
    times = StepTimes()
    decode = slots(4, 100)
    assert times.predict(chunk(0, 16), decode) is None
    assert times.decode_only(decode) is None
    for _ in range(3):
        times.add(NOTHING, decode, 0.02)
    assert times.decode_only(decode) == pytest.approx(0.02)
    assert times.predict(NOTHING, decode) == pytest.approx(0.02)
    assert times.predict(chunk(0, 16), decode) is None


def test_prompts_of_one_size_are_charged_to_their_tokens() -> None:
    """Nothing is known of smaller ones: the guess must not be that they cost as much."""
    times = StepTimes()
    for _ in range(10):
        times.add(chunk(0, 512), NOTHING, 1.0)
    small = times.predict(chunk(0, 16), NOTHING)
    assert small is not None
    assert small < 0.1


def test_more_work_never_takes_less() -> None:
    for machine, sizes in MACHINES:
        life = Life(machine, sizes, noise=0.3)
        life.go(500)
        decode = slots(4, 500)
        found = [life.times.predict(chunk(100, size), decode) or 0.0 for size in range(1, 3000, 7)]
        assert found == sorted(found)
        alone = life.times.decode_only(decode)
        assert alone is not None
        assert found[0] >= alone > 0.0


def test_a_million_steps_later_it_is_as_good() -> None:
    """The sums stay bounded, and a long time of one kind of step leaves the others known."""
    life = Life(a_cpu, [16, 64, 256])
    life.go(2000)
    costs = life.times._decode
    for _ in range(30_000):  # the sums are divided by their weight twice
        life.times.add(NOTHING, slots(4, 500), a_cpu(NOTHING, slots(4, 500)))
    assert all(math.isfinite(each) for row in costs._products for each in row)
    assert max(max(row) for row in costs._products) < 1e16
    true = a_cpu(NOTHING, slots(4, 500))
    assert life.times.decode_only(slots(4, 500)) == pytest.approx(true, rel=0.01)
    life.go(500)
    assert life.recent(0.9) < 0.12


def test_times_that_are_none_are_ignored() -> None:
    times = StepTimes()
    for wrong in (0.0, -1.0, math.inf, math.nan):
        times.add(NOTHING, slots(4, 100), wrong)
    assert times.decode_only(slots(4, 100)) is None
    assert times.error == 0.0
