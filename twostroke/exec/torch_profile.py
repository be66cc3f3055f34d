"""Profiles of torch steps: named ranges, and the kernels inside each range.

The ranges are NVTX ranges for Nsight (`--nvtx`) or ranges of torch's profiler for `twostroke
profile`. Wrappers around methods open the ranges (`MethodWrappers`), so that an engine without a
profile has no overhead. A decode step that is a CUDA graph is one launch, so its kernels have no
further range.
"""

from __future__ import annotations

import json
import re
import tempfile
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from pathlib import Path
from time import monotonic
from typing import Any, NamedTuple

import torch
from torch.profiler import ProfilerActivity, record_function

from twostroke.exec.stage_profile import PHASES, UNACCOUNTED, MethodWrappers, PhaseSums, phase_of
from twostroke.exec.torch_executor import TorchExecutor
from twostroke.observe.record import RequestRecord, StepRecord
from twostroke.plan import StepPlan

PARTS = {  # method of the decoder → part of a layer
    "_project": "attention",
    "_attend": "attention",
    "_attend_kept": "attention",
    "_decode_attention": "attention",
    "_attention_output": "attention",
    "_mlp": "mlp",
    "head": "head",
}
SAMPLING, OTHER, GRAPH, BETWEEN = "sampling", "other", "graph", "between_kernels"
STAGES = {*PARTS.values(), SAMPLING}
STEP = re.compile(r"(?:prefill|decode|mixed) step (\d+)")
DEVICE_WORK = {"kernel", "gpu_memcpy", "gpu_memset"}
LAUNCHES = {"cuda_runtime", "cuda_driver"}
MAX_KERNELS = 40  # reported per phase, longest first
MAX_EVENTS = 100_000  # in the timeline

OpenRange = Callable[[str], AbstractContextManager[Any]]


def name_ranges(executor: TorchExecutor, scheduler: Any, open_range: OpenRange) -> MethodWrappers:
    """Open ranges around plan, step, sampling, and the attention and MLP of every layer."""
    wrappers = MethodWrappers()

    def wrap_in_range(owner: Any, method: str, name_of: Callable[..., str]) -> None:
        def wrapper_of(function: Any) -> Any:
            def run(*args: Any, **kwargs: Any) -> Any:
                with open_range(name_of(*args)):
                    return function(*args, **kwargs)

            return run

        wrappers.wrap(owner, method, wrapper_of)

    wrap_in_range(scheduler, "plan", lambda *_: "plan")
    wrap_in_range(executor, "forward", step_name)
    wrap_in_range(executor, "sample", lambda handle, *_: f"{SAMPLING} of {step_name(handle.plan)}")
    wrap_in_range(executor.program, "_sample", lambda *_: SAMPLING)
    for method, part in PARTS.items():
        wrap_in_range(executor.program.decoder, method, lambda *_, part=part: part)
    return wrappers


def step_name(plan: StepPlan) -> str:
    prefill, decode = plan.prefill_work.tokens, plan.decode_work.tokens
    return f"{phase_of(prefill, decode)} step {plan.step}: prefill {prefill}, decode {decode}"


class KernelProfile:
    """A profile with torch's profiler. The stages of a phase add up to its device time."""

    max_steps = 128  # each has hundreds of kernels, kept in memory until the end

    def __init__(self, executor: TorchExecutor, scheduler: Any) -> None:
        self._wrappers = name_ranges(executor, scheduler, record_function)
        self._records: dict[int, StepRecord] = {}
        self._host_s: dict[str, dict[str, float]] = {}
        self._on_gpu = executor.on_gpu
        device = [ProfilerActivity.CUDA] if self._on_gpu else []
        self._profiler = torch.profiler.profile(activities=[ProfilerActivity.CPU, *device])
        self._profiler.start()

    @property
    def num_steps(self) -> int:
        return len(self._records)

    def add_step(self, record: StepRecord) -> None:
        now = monotonic()
        self._records[record.step] = record
        phase = phase_of(record.prefill.tokens, record.decode.tokens)
        host = self._host_s.setdefault(phase, {"plan": 0.0, "commit": 0.0, "device_idle": 0.0})
        host["plan"] += record.launched_s - record.planned_s
        host["commit"] += now - record.committed_s
        host["device_idle"] += record.host_gap_s

    def add_request(self, record: RequestRecord) -> None: ...

    def end(self) -> None:
        self._wrappers.remove()
        if self._on_gpu:
            torch.cuda.synchronize()
        self._profiler.stop()

    def result(self) -> dict[str, Any]:
        with tempfile.TemporaryDirectory() as folder:
            path = Path(folder) / "trace.json"
            self._profiler.export_chrome_trace(str(path))
            events = json.loads(path.read_bytes())["traceEvents"]
        events = [event for event in events if event.get("ph") == "X"]
        works = [one for one in kernels(events) if one.step in self._records]
        seen = {one.step for one in works}  # steps launched during the profile
        sums: dict[str, PhaseSums] = {}
        found: dict[str, dict[tuple[str, str], list[float]]] = {}
        for number, record in self._records.items():
            if number in seen:
                phase = phase_of(record.prefill.tokens, record.decode.tokens)
                part = sums.setdefault(phase, PhaseSums())
                part.add(record, record.device_s, record.host_gap_s)
        between = between_kernels(works) if self._on_gpu else {}
        for number, seconds in between.items():
            record = self._records[number]
            phase = phase_of(record.prefill.tokens, record.decode.tokens)
            sums[phase].add_stage(BETWEEN, seconds)
        for one in works:
            record = self._records[one.step]
            phase = phase_of(record.prefill.tokens, record.decode.tokens)
            sums[phase].add_stage(one.stage, one.seconds)
            calls = found.setdefault(phase, {}).setdefault((one.name, one.stage), [0, 0.0])
            calls[0] += 1
            calls[1] += one.seconds
        profiles = {}
        for phase in (name for name in PHASES if name in sums):
            part = sums[phase]
            part.add_stage(UNACCOUNTED, part.step_s - sum(part.stage_s.values()))
            longest = sorted(found[phase].items(), key=lambda item: -item[1][1])[:MAX_KERNELS]
            profiles[phase] = part.as_json() | {
                "host_s": self._host_s[phase],
                "kernels": [
                    {"name": name[:200], "stage": stage, "calls": int(calls), "seconds": seconds}
                    for (name, stage), (calls, seconds) in longest
                ],
            }
        kept = ("name", "cat", "ph", "ts", "dur", "pid", "tid")
        shown = [{key: event[key] for key in kept} for event in events if event["cat"] != "Trace"]
        shown.sort(key=lambda event: event["ts"])
        return {"kind": "kernels", "phases": profiles, "events": shown[:MAX_EVENTS]}


class KernelRun(NamedTuple):
    name: str
    step: int
    stage: str
    seconds: float
    began_s: float


def between_kernels(works: list[KernelRun]) -> dict[int, float]:
    """Return for each step the time between its first and its last kernel in which no kernel runs;
    negative if kernels overlap."""
    by_step: dict[int, list[KernelRun]] = {}
    for one in works:
        by_step.setdefault(one.step, []).append(one)
    return {
        step: max(one.began_s + one.seconds for one in mine)
        - min(one.began_s for one in mine)
        - sum(one.seconds for one in mine)
        for step, mine in by_step.items()
    }


def kernels(events: list[dict[str, Any]]) -> Iterator[KernelRun]:
    """Yield the kernels, with the step and the range in which they were launched. Without a GPU,
    yield torch operations instead, each with its own time without nested operations."""
    on_gpu = any(event["cat"] in DEVICE_WORK for event in events)
    launched: dict[Any, tuple[int, str]] = {}
    host = [e for e in events if e["cat"] in LAUNCHES | {"user_annotation", "cpu_op"}]
    for thread in {event["tid"] for event in host}:
        mine = [event for event in host if event["tid"] == thread]
        mine.sort(key=lambda event: (event["ts"], -event["dur"]))
        yield from _read_thread(mine, launched, on_gpu)
    for event in events:
        if event["cat"] in DEVICE_WORK:
            step, stage = launched.get(event["args"].get("correlation"), (-1, ""))
            seconds, began_s = 1e-6 * event["dur"], 1e-6 * event["ts"]
            yield KernelRun(event["name"], step, stage, seconds, began_s)


def _read_thread(
    events: list[dict[str, Any]], launched: dict[Any, tuple[int, str]], on_gpu: bool
) -> Iterator[KernelRun]:
    """Process the events of one thread in order. Write step and stage of each launch to
    `launched`; without a GPU, yield the operations."""
    open_events: list[dict[str, Any]] = []
    own_us: list[float] = []
    for event in [*events, {"ts": float("inf"), "dur": 0.0, "cat": "", "name": ""}]:
        while open_events and open_events[-1]["ts"] + open_events[-1]["dur"] <= event["ts"]:
            done, spent = open_events.pop(), own_us.pop()
            if done["cat"] == "cpu_op" and not on_gpu:
                place = _step_and_stage(open_events)
                yield KernelRun(done["name"], *place, 1e-6 * spent, 1e-6 * done["ts"])
        if event["cat"] == "cpu_op" and open_events and open_events[-1]["cat"] == "cpu_op":
            own_us[-1] -= event["dur"]
        if event["cat"] in LAUNCHES:
            step, stage = _step_and_stage(open_events)
            is_graph = "GraphLaunch" in event["name"]
            launched[event["args"].get("correlation")] = step, GRAPH if is_graph else stage
        else:
            open_events.append(event)
            own_us.append(event["dur"])


def _step_and_stage(open_events: list[dict[str, Any]]) -> tuple[int, str]:
    """Return the step that is open here, and its innermost range."""
    step, stage = -1, OTHER
    for event in open_events:
        if event["cat"] == "user_annotation":
            if found := STEP.search(event["name"]):
                step = int(found.group(1))
            first = event["name"].partition(" ")[0]
            stage = first if first in STAGES else stage
    return step, stage
