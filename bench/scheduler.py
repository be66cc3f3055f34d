"""Host time of scheduling and KV bookkeeping, without a model.

    python bench/scheduler.py [--json FILE]

Fills an engine's scheduler with running and waiting requests and times plan + commit for steps
that decode everything that runs; then the same with requests that end and are replaced, so that
admission, prefill and block turnover are in it. Prints a table, ends with one JSON line.
"""

from __future__ import annotations

import argparse
import json
import platform
import statistics
from time import perf_counter
from typing import Any

from twostroke.engine.core import EngineCore
from twostroke.exec.executor import ChunkLogits
from twostroke.kv.cache import GroupLimits
from twostroke.measure.load.stats import percentile
from twostroke.model.describe.cost import CostModel
from twostroke.plan import StepPlan, StepResult
from twostroke.request import EngineRequest, SamplingParams
from twostroke.sched.scheduler import Scheduler
from twostroke.sched.step import SchedulerConfig

PROMPT = 512
STEPS = 300


def request(name: str, output: int, offset: int) -> EngineRequest:
    prompt = [(offset * 7919 + n) % 30000 for n in range(PROMPT)]
    return EngineRequest(name, prompt, SamplingParams(max_tokens=output), seed=0)


def scheduler_with(running: int, waiting: int, output: int) -> Scheduler:
    config = SchedulerConfig(
        max_num_seqs=running,
        max_num_batched_tokens=8192,
        max_model_len=8192,
        block_size=16,
        groups=(GroupLimits(running * 80),),
    )
    scheduler = Scheduler(config)
    for n in range(running + waiting):
        # Outputs of different lengths, so that requests end one by one.
        scheduler.add(request(f"r{n}", output if output > 4000 else output + n % output, n))
    while scheduler.num_waiting > waiting:
        step = scheduler.plan()
        assert step is not None
        scheduler.commit(result_of(step.plan))
    return scheduler


def result_of(plan: StepPlan) -> StepResult:
    samples = len(plan.decode) + sum(chunk.last for chunk in plan.prefill)
    return StepResult([1] * samples, {}, {}, 0.0)


def time_steps(scheduler: Scheduler, steps: int) -> list[float]:
    times = []
    for _ in range(steps):
        start = perf_counter()
        step = scheduler.plan()
        planned = perf_counter() - start
        if step is None:
            break
        result = result_of(step.plan)
        start = perf_counter()
        scheduler.commit(result)
        times.append(planned + perf_counter() - start)
    return times


def measure(running: int, waiting: int, output: int) -> dict[str, float]:
    times = time_steps(scheduler_with(running, waiting, output), STEPS)
    return {
        "running": running,
        "waiting": waiting,
        "median_ms": 1e3 * statistics.median(times),
        "p99_ms": 1e3 * percentile(times, 99),
    }


class Instant:
    """An executor that computes nothing."""

    max_in_flight = 1
    on_chunk_logits: ChunkLogits | None = None

    def forward(self, plan: StepPlan) -> StepPlan:
        return plan

    def sample(self, plan: StepPlan, masks: object = None) -> Instant:
        self._result = result_of(plan)
        return self

    def wait(self) -> StepResult:
        return self._result

    def reset(self) -> None: ...


def time_records(running: int) -> float:
    """Seconds a step spends on its `StepRecord`, measured inside a turning loop."""
    cost = CostModel(1e9, 1e8, 1e5, 1e9, 1e8, 1e5)
    core = EngineCore(scheduler_with(running, 0, 5000), Instant(), cost)
    record, times = core.recorder.add, []

    def timed(*args: Any) -> None:
        start = perf_counter()
        record(*args)
        times.append(perf_counter() - start)

    core.recorder.add = timed  # type: ignore[method-assign, assignment]
    for _ in range(STEPS):
        core.step()
    return statistics.median(times)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--json", help="also write the result here")
    args = parser.parse_args()
    results: dict[str, list[dict[str, float]]] = {"decode only": [], "with turnover": []}
    for name, output in (("decode only", 5000), ("with turnover", 200)):
        print(f"{name}: host time a step (plan + commit)")
        for running in (10, 64, 256, 1000):
            row = measure(running, 10_000, output)
            results[name].append(row)
            print(
                f"  {running:5} running, 10,000 waiting   median {row['median_ms']:.3f} ms   "
                f"p99 {row['p99_ms']:.3f} ms   {1e3 * row['median_ms'] / running:.2f} µs a request"
            )
    record_us = {str(running): 1e6 * time_records(running) for running in (10, 256, 1000)}
    for rows, taken in record_us.items():
        print(f"one StepRecord with {rows} running: {taken:.1f} µs")
    line = json.dumps(
        {
            "bench": "scheduler",
            "machine": platform.machine(),
            "python": platform.python_version(),
            "results": results,
            "step_record_us": record_us,
        }
    )
    print(line)
    if args.json:
        with open(args.json, "w") as file:
            file.write(line + "\n")


if __name__ == "__main__":
    main()
