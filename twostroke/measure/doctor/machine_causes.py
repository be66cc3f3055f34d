"""Causes that lie in the server's machine: processor time, clocks, memory, kernels, formats.

The evidence is two readings of the machine's counters (`machine` in `/records`), at the start and
at the end of the watch, and the speed of the server's steps compared with its earlier steps. So a
machine that is always slow has none of these causes.
"""

from __future__ import annotations

import statistics
from collections import defaultdict
from collections.abc import Iterator, Sequence
from typing import NamedTuple

from twostroke.measure.doctor.account import Part, TimeAccount
from twostroke.measure.doctor.watch import Observations
from twostroke.measure.explain.why import Record
from twostroke.measure.report.tables import duration

# Thresholds. Shares:
WAIT_SHARE = 0.3  # of the time in which the server's threads could run, spent without a CPU
OTHERS_SHARE = 0.3  # of the CPUs, used by other programs
STEAL_SHARE = 0.1  # of the CPUs, given to other machines by the hypervisor
QUOTA_SHARE = 0.1  # of the watch, with a used-up quota
CLOCK_SHARE = 0.6  # of the maximum clock rate: lower rates count if the CPUs are busy
BUSY_SHARE = 0.5  # of the CPUs: less busy CPUs may lower their clocks to save energy
SWAPPED_SHARE = 0.05  # of the server's memory
FAULTS_PER_S = 100.0  # pages read from disk
SLOWED = 1.8  # the time of steps, divided by the best time of such steps
BEST_SHARE = 0.1  # the best time is this quantile of the times of steps with as many streams
MIN_STEPS = 20  # fewer steps are not compared
DENSE_GAP_S = 0.1  # between two tokens
DENSE = ("float32", "float16", "bfloat16", "f32", "f16", "bf16")


class MachineFinding(NamedTuple):
    """A cause in the machine, before its confidence is known."""

    cause: str
    share: float
    min_share: float
    evidence: tuple[str, ...]


def machine_findings(observed: Observations, account: TimeAccount) -> Iterator[MachineFinding]:
    if not account.requests:
        return  # there were no requests, so no time was lost
    before, after = observed.machine_before, observed.machine_after
    found = []
    if before and after and after["at_s"] > before["at_s"]:
        found += [*_processor_time(before, after), *_clocks(before, after), *_memory(before, after)]
    found += [*_kernels(observed), *_formats(observed, account)]
    if not found:
        found += _slowed(observed)
    yield from found


def _processor_time(before: Record, after: Record) -> Iterator[MachineFinding]:
    seconds = after["at_s"] - before["at_s"]
    capacity_s = max(1, after["cpus"]) * seconds
    own_s = after["own_s"] - before["own_s"]
    evidence, shares = [], []
    waited_s, busy_s = _grown(before, after, "own_wait_s"), _grown(before, after, "busy_s")
    if waited_s is not None and busy_s is not None and own_s > 0:
        waited = waited_s / (waited_s + own_s)
        others = max(0.0, busy_s - own_s) / capacity_s
        if waited >= WAIT_SHARE and others >= OTHERS_SHARE:
            evidence.append(
                f"other programs used {others:.0%} of the {after['cpus']} CPUs; the server's "
                f"threads were ready for {duration(waited_s + own_s)} and waited for a CPU in "
                f"{waited:.0%} of it"
            )
            shares.append(waited)
    steal_s = _grown(before, after, "steal_s")
    if steal_s is not None and steal_s / capacity_s >= STEAL_SHARE:
        shares.append(steal_s / capacity_s)
        evidence.append(f"the hypervisor gave {shares[-1]:.0%} of the CPUs to other machines")
    throttled_s = _grown(before, after, "throttled_s")
    if throttled_s is not None and throttled_s / seconds >= QUOTA_SHARE:
        shares.append(min(1.0, throttled_s / seconds))
        quota = after["quota_cpus"]
        allowed = "" if quota is None else f" of {quota:g} CPUs"
        evidence.append(f"the cgroup's quota{allowed} was used up in {shares[-1]:.0%} of the time")
    if evidence:
        pressure_s = _grown(before, after, "pressure_s")
        if pressure_s is not None:
            evidence.append(
                f"some program of the machine waited for a CPU in {pressure_s / seconds:.0%} of "
                "the time (/proc/pressure/cpu)"
            )
        yield MachineFinding("cpu_taken", max(shares), QUOTA_SHARE, tuple(evidence))


def _clocks(before: Record, after: Record) -> Iterator[MachineFinding]:
    evidence = []
    if after["gpu_throttles"] and before["gpu_throttles"]:
        reasons = ", ".join(after["gpu_throttles"])
        evidence.append(f"the GPU lowers its clock because of {reasons}")
    throttles = _grown(before, after, "heat_throttles")
    if throttles:
        evidence.append(f"a CPU was slowed down {throttles:.0f} times because of heat")
    seconds = after["at_s"] - before["at_s"]
    busy_s = _grown(before, after, "busy_s") or 0.0
    busy = busy_s / (max(1, after["cpus"]) * seconds)
    now, maximum = after["cpu_mhz"], after["max_mhz"]
    if now and maximum and busy >= BUSY_SHARE and now < CLOCK_SHARE * maximum:
        clocks = f"{now:,.0f} of {maximum:,.0f} MHz"
        evidence.append(f"the CPUs run at {clocks}, and are {busy:.0%} busy")
    if evidence:
        yield MachineFinding("clock_throttled", 0.5, 0.25, tuple(evidence))


def _memory(before: Record, after: Record) -> Iterator[MachineFinding]:
    seconds = after["at_s"] - before["at_s"]
    swapped, kept = after["swapped_bytes"], after["memory_bytes"]
    faults_per_s = (after["major_faults"] - before["major_faults"]) / seconds
    share = swapped / (swapped + kept) if swapped else 0.0
    evidence = []
    if share >= SWAPPED_SHARE:
        evidence.append(
            f"{swapped / 1e9:,.2f} GB of the server's memory are in swap ({share:.0%} of it)"
        )
    if faults_per_s >= FAULTS_PER_S:
        evidence.append(f"the server read {faults_per_s:,.0f} pages a second from disk")
    if evidence:
        yield MachineFinding("memory_swapped", max(share, 0.5), SWAPPED_SHARE, tuple(evidence))


def _kernels(observed: Observations) -> Iterator[MachineFinding]:
    limits, machine = observed.limits, observed.machine_after or {}
    device = str(limits.get("device", ""))
    if device.startswith("cuda") and machine.get("gpu_others"):
        message = f"{machine['gpu_others']} other processes compute on the GPU"
        yield MachineFinding("gpu_shared", 0.5, 0.4, (message,))
    if not device.startswith("cpu"):
        return
    if machine.get("gpus"):
        message = f"the machine has {machine['gpus']} GPUs, and the model runs on the CPU"
        yield MachineFinding("gpu_unused", 1.0, 0.5, (message, "start with --device cuda"))
        return
    isa, isas = limits.get("isa"), limits.get("isas") or ()
    if isas and isa != isas[0]:
        used = f"the kernels of {isa!r} run" if isa else "the reference kernels run"
        message = f"{used}, and this CPU has {', '.join(isas)}"
        setting = "leave isa at 'auto'" if isa else "leave out --kernels"
        yield MachineFinding("slow_kernels", 1.0, 0.5, (message, setting))


def _formats(observed: Observations, account: TimeAccount) -> Iterator[MachineFinding]:
    weights = str(observed.limits.get("weights", "")).partition(",")[0].lower()
    on_cpu = str(observed.limits.get("device", "")).startswith("cpu")
    if on_cpu and weights in DENSE and account.gap_s >= DENSE_GAP_S:
        share = account.stream_share(Part.DECODE)
        size = observed.limits.get("weight_bytes", 0) / 1e9
        message = (
            f"decode reads {size:,.1f} GB of {weights} weights for each token "
            f"({duration(account.gap_s)}); 8-bit weights take half of it, 4-bit weights a quarter"
        )
        if share >= 0.5:
            yield MachineFinding("dense_weights", share, 0.5, (message,))


def _slowed(observed: Observations) -> Iterator[MachineFinding]:
    """Compare the steps of the watch with the server's best steps with as many streams."""
    ratios = slowed_ratios(observed.steps or (), observed.since_s)
    if len(ratios) >= MIN_STEPS:
        ratio = statistics.median(ratios)
        if ratio >= SLOWED:
            message = (
                f"decode steps take {ratio:.1f} times as long as equal steps in the server's best "
                "time of the last minutes"
            )
            yield MachineFinding("slow_computing", 1 - 1 / ratio, 1 - 1 / SLOWED, (message,))


def slowed_ratios(steps: Sequence[Record], since_s: float) -> list[float]:
    """Return the time of each decode step of the watch, divided by the best time of steps with as
    many streams. Times are per byte that a step reads, because bytes grow with the contexts."""
    times: dict[int, list[tuple[float, float]]] = defaultdict(list)
    for step in steps:
        moved = step["decode"].get("num_bytes", 0.0)
        if moved and not step["prefill"]["tokens"] and step["device_s"] > 0:
            times[step["decode"]["rows"]].append((step["device_s"] / moved, step["committed_s"]))
    ratios = []
    for found in times.values():
        if len(found) < MIN_STEPS:
            continue
        best = sorted(one for one, _ in found)[int(BEST_SHARE * len(found))]
        ratios += [one / best for one, at_s in found if at_s >= since_s]
    return ratios


def _grown(before: Record, after: Record, name: str) -> float | None:
    if before.get(name) is None or after.get(name) is None:
        return None
    return max(0.0, float(after[name]) - float(before[name]))
