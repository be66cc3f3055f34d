"""What goals for latency do to the schedule, on this machine's CPU.

    python -m bench.slo [--model M] [--json FILE] [--only interference|goodput]

Interference: four streams write, a prompt of 4,000 tokens arrives; in the modes `throughput` (no
bound on gaps) and `balanced` (the default), and with three goals for the gap. Worst gap and the
share of gaps within the goal, both from the prompt's arrival to its first token; the prompt's TTFT;
how far the step-time model was off.

Goodput: a bursty minute (`slo_load.py`) replayed against fixed budgets, those modes and the goals,
on one engine each, in alternation, the same arrivals. The lengths are those of the trace divided by
--shrink, and the rate such that prompts and tokens take --load of this machine's time, as measured
first. A request counts if its first token came within --ttft-ms and its tokens within --itl-ms: on
average ("tpot", as vLLM's benchmark has it), or every one of them ("gaps").

Everything runs in this process, over the engine's loop, with arrivals by the wall clock.
Ends with one JSON line.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import statistics
from itertools import count
from time import monotonic, sleep
from typing import Any

from bench.slo_load import Arrival, mean_lengths, minute
from twostroke import LLM
from twostroke.measure.load.definitions import Goals, Sample, engine_sample
from twostroke.measure.load.result import values_ms
from twostroke.measure.load.stats import percentile
from twostroke.observe.record import RequestRecord, StepRecord
from twostroke.request import EngineRequest, SamplingParams

STREAMS, PROMPT, LONG = 4, 128, 4000
STEADY_S = 2.0
MODES = ("throughput", "balanced")
GOALS_MS = (40.0, 80.0, 160.0)
BUDGETS = (256, 512, 2048)
KV_BYTES = 1 << 29
HALF_S = 30.0


class Machine:
    """One engine, turned by hand."""

    _names = count()

    def __init__(self, model: str | None, **settings: Any) -> None:
        settings = {"kv_cache_memory_bytes": KV_BYTES, "max_num_seqs": 64} | settings
        llm = LLM(model, enable_prefix_caching=False, device="cpu", **settings)
        self.core = llm.engine.core
        self.warm_up()

    def warm_up(self) -> None:
        """Prompts and streams of several sizes, so that neither memory nor model is cold."""
        for prompt, output in ((8, 24), (64, 24), (300, 24), (700, 4)):
            self.add(prompt, output)
            for _ in range(4):
                self.core.step()
        while self.core.has_work:
            self.core.step()

    def add(self, prompt: int, output: int) -> str:
        number = next(self._names)
        ids = [(number * 977 + n * 31) % 40000 + 100 for n in range(prompt)]
        params = SamplingParams(temperature=0, max_tokens=output, ignore_eos=True)
        name = f"r{number}"
        self.core.add(EngineRequest(name, ids, params, seed=0, received_s=monotonic()))
        return name

    def steps_since(self, start_s: float) -> list[StepRecord]:
        return [step for step in self.core.records.steps if step.planned_s >= start_s]


def off(steps: list[StepRecord]) -> dict[str, float]:
    """How far the predictions of these steps were off, relative to what they took."""
    errors = [abs(s.predicted_s - s.device_s) / s.device_s for s in steps if s.predicted_s]
    if len(errors) < 10:
        return {"median": 0.0, "p90": 0.0}
    return {"median": statistics.median(errors), "p90": percentile(errors, 90)}


# ── interference ────────────────────────────────────────────────────────────────────────────


def interfere(machine: Machine, case: str, goal_ms: float | None) -> dict[str, Any]:
    core = machine.core
    streams = [machine.add(PROMPT, 4000) for _ in range(STREAMS)]
    writing: set[str] = set()
    until = 0.0
    while len(writing) < STREAMS or monotonic() < until:
        before = len(writing)
        writing |= {update.request_id for update in core.step() if update.tokens}
        if before < STREAMS:
            until = monotonic() + STEADY_S
    sent = monotonic()
    long = machine.add(LONG, 2)
    ended: dict[str, RequestRecord] = {}
    while long not in ended:
        for update in core.step():
            if update.record is not None:
                ended[update.request_id] = update.record
    end = ended[long].first_token_s
    for name in streams:
        left = core.abort(name)
        assert left is not None
        assert left.record is not None
        ended[name] = left.record
    while core.has_work:
        core.step()
    steady, gaps = [], []
    for name in streams:
        times = ended[name].token_s
        for (gap, _, _), after in zip(ended[name].gap_steps(), times[1:], strict=True):
            if after <= sent:
                steady.append(gap)
            elif after <= end:
                gaps.append(gap)
    steps = [step for step in machine.steps_since(sent) if step.committed_s <= end + 0.001]
    return {
        "name": case,
        "goal_ms": goal_ms,
        "steady_gap_ms": 1e3 * statistics.median(steady),
        "worst_gap_ms": 1e3 * max(gaps),
        "p99_gap_ms": 1e3 * percentile(gaps, 99),
        "within": sum(1e3 * gap <= goal_ms for gap in gaps) / len(gaps) if goal_ms else None,
        "ttft_s": end - sent,
        "steps": len(steps),
        "off": off([step for step in steps if step.prefill.tokens]),
    }


def interference(args: argparse.Namespace) -> list[dict[str, Any]]:
    cases = [(mode, None, {"performance_mode": mode}) for mode in MODES]
    cases += [(f"goal {goal:.0f} ms", goal, {"itl_slo_ms": goal}) for goal in args.goals]
    machines = [Machine(args.model, **given) for _, _, given in cases]
    print(f"{STREAMS} streams write, a prompt of {LONG:,} tokens arrives")
    done = []
    for _ in range(args.repeat):
        for machine, (name, goal, _) in zip(machines, cases, strict=True):
            row = interfere(machine, name, goal)
            done.append(row)
            kept = f", {row['within']:.1%} within" if goal else ""
            print(
                f"  {name:14} gap {row['steady_gap_ms']:.0f} ms before, worst "
                f"{row['worst_gap_ms']:.0f}, p99 {row['p99_gap_ms']:.0f}{kept}; TTFT "
                f"{row['ttft_s']:.1f} s; model off by {row['off']['median']:.1%} (p90 "
                f"{row['off']['p90']:.1%})",
                flush=True,
            )
    return done


# ── goodput ─────────────────────────────────────────────────────────────────────────────────


def replay(machine: Machine, arrivals: list[Arrival]) -> tuple[list[RequestRecord], float]:
    """All requests to their ends; how long that took."""
    core, start, names = machine.core, monotonic(), set()
    left = list(reversed(arrivals))
    ended: list[RequestRecord] = []
    while left or core.has_work:
        while left and start + left[-1].at_s <= monotonic():
            one = left.pop()
            names.add(machine.add(one.input, one.output))
        if core.has_work:
            ended += [update.record for update in core.step() if update.record is not None]
        elif left:
            sleep(max(0.0, start + left[-1].at_s - monotonic()))
    assert {record.request_id for record in ended} == names
    return ended, monotonic() - start


def rate_for(machine: Machine, load: float, shrink: float) -> tuple[float, dict[str, float]]:
    """Requests a second that take `load` of the machine's time, from what it does here."""
    prompt, output = mean_lengths(shrink)
    core, prefill, decode = machine.core, [], []
    for _ in range(3):
        start = monotonic()
        for _ in range(4):
            machine.add(round(prompt), 1)
        while core.has_work:
            core.step()
        prefill.append((monotonic() - start) / 4)
        for _ in range(4):
            machine.add(8, 20)
        core.step()
        start, steps = monotonic(), 0
        while core.has_work:
            core.step()
            steps += 1
        decode.append((monotonic() - start) / steps / 4)
    prompt_s, token_s = statistics.median(prefill), statistics.median(decode)
    rate = load / (prompt_s + output * token_s)
    return rate, {"input": prompt, "output": output, "prompt_s": prompt_s, "token_s": token_s}


def judge(samples: list[Sample], ttft_ms: float, itl_ms: float) -> dict[str, int]:
    first, tpot = Goals(ttft_ms / 1e3), Goals(ttft_ms / 1e3, itl_ms / 1e3)
    gaps = [one for one in samples if all(1e3 * gap <= itl_ms for gap in one.itls_s)]
    return {
        "requests": len(samples),
        "first": sum(map(first.met, samples)),
        "tpot": sum(map(tpot.met, samples)),
        "gaps": sum(map(first.met, gaps)),
    }


def goodput(args: argparse.Namespace) -> dict[str, Any]:
    settings: dict[str, dict[str, Any]] = {
        f"budget {budget}": {"max_num_batched_tokens": budget} for budget in BUDGETS
    }
    settings |= {mode: {"performance_mode": mode} for mode in MODES}
    settings["goals"] = {"ttft_slo_ms": args.ttft_ms, "itl_slo_ms": args.itl_ms}
    machines = {name: Machine(args.model, **given) for name, given in settings.items()}
    rate, measured = rate_for(machines["budget 512"], args.load, args.shrink)
    print(
        f"{rate:.2f} requests a second, {measured['input']:.0f} tokens in and "
        f"{measured['output']:.0f} out on average; goals: first token {args.ttft_ms:.0f} ms, then "
        f"{args.itl_ms:.0f} ms"
    )
    found: dict[str, list[dict[str, Any]]] = {name: [] for name in machines}
    for half in range(args.halves):
        arrivals = minute(args.seed + half, rate, args.half_s, args.shrink)
        order = list(machines) if half % 2 == 0 else list(reversed(machines))
        for name in order:
            start = monotonic()
            records, took = replay(machines[name], arrivals)
            row: dict[str, Any] = {"half": half, "took_s": took}
            samples = list(map(engine_sample, records))
            values = values_ms(samples)
            row |= judge(samples, args.ttft_ms, args.itl_ms)
            row["ttft_ms"], row["gap_ms"] = quantiles(values["ttft"]), quantiles(values["itl"])
            row["off"] = off(machines[name].steps_since(start))
            found[name].append(row)
            print(f"  half {half + 1}, {name:14} {words(row)}", flush=True)
    seconds = args.halves * args.half_s
    totals = {
        name: {key: sum(row[key] for row in rows) / seconds for key in ("tpot", "gaps")}
        for name, rows in found.items()
    }
    for name, total in totals.items():
        print(f"  {name:14} goodput {total['tpot']:.2f}/s by tpot, {total['gaps']:.2f}/s by gaps")
    return {"rate": rate, "measured": measured, "halves": found, "goodput": totals}


def quantiles(values: list[float]) -> dict[str, float]:
    return {f"p{share}": percentile(values, share) for share in (50, 90, 99)} | {"max": max(values)}


def words(row: dict[str, Any]) -> str:
    ttft, gap = row["ttft_ms"], row["gap_ms"]
    return (
        f"{row['requests']} requests: {row['first']} first in time, {row['tpot']} also by tpot, "
        f"{row['gaps']} by gaps; TTFT p50 {ttft['p50']:.0f} p90 {ttft['p90']:.0f}, gaps p50 "
        f"{gap['p50']:.0f} p99 {gap['p99']:.0f} max {gap['max']:.0f} ms; off by "
        f"{row['off']['median']:.1%} (p90 {row['off']['p90']:.1%})"
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--model", help="(default: the default model)")
    parser.add_argument("--json", help="also write the result here")
    parser.add_argument("--only", choices=("interference", "goodput"))
    parser.add_argument("--goals", type=float, nargs="*", default=GOALS_MS, metavar="MS")
    parser.add_argument("--repeat", type=int, default=1, help="of the interference")
    parser.add_argument("--ttft-ms", type=float, default=2000.0)
    parser.add_argument("--itl-ms", type=float, default=100.0)
    parser.add_argument("--load", type=float, default=0.7, help="share of the machine's time")
    parser.add_argument("--shrink", type=float, default=8.0, help="of the trace's lengths")
    parser.add_argument("--halves", type=int, default=2, help="of the minute")
    parser.add_argument("--half-s", type=float, default=HALF_S)
    parser.add_argument("--seed", type=int, default=1)
    args = parser.parse_args()
    result: dict[str, Any] = {
        "bench": "slo",
        "machine": platform.machine(),
        "cores": os.cpu_count(),
        "settings": {k: v for k, v in vars(args).items() if k not in ("json", "model")},
    }
    if args.only != "goodput":
        result["interference"] = interference(args)
    if args.only != "interference":
        result["goodput"] = goodput(args)
    line = json.dumps(result)
    print(line)
    if args.json:
        with open(args.json, "w") as file:
            file.write(line + "\n")


if __name__ == "__main__":
    main()
