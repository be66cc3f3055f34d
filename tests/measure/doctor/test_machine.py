"""Causes in the server's machine: the counters, the rules, and controls that have no fault."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest

from tests.measure.doctor.test_diagnosis import BEGUN_S, STEP_S, first_cause, request, seen, step
from twostroke.measure.doctor.diagnosis import diagnose
from twostroke.measure.doctor.machine_causes import slowed_ratios
from twostroke.measure.doctor.watch import Observations
from twostroke.observe.machine import MachineReader, listening_process

# Ten seconds on two CPUs; the server computed for 6 s and others hardly.
BEFORE: dict[str, Any] = {
    "at_s": 100.0,
    "cpus": 2,
    "own_s": 50.0,
    "own_wait_s": 2.0,
    "busy_s": 80.0,
    "steal_s": 1.0,
    "quota_cpus": None,
    "throttled_s": 0.0,
    "pressure_s": 5.0,
    "swapped_bytes": 0,
    "major_faults": 10,
    "cpu_mhz": 2900.0,
    "max_mhz": 3000.0,
    "heat_throttles": 3,
    "gpus": 0,
    "gpu_throttles": [],
    "gpu_others": 0,
    "memory_bytes": 500_000_000,
}
AFTER = BEFORE | {
    "at_s": 110.0,
    "own_s": 56.0,
    "own_wait_s": 2.3,
    "busy_s": 87.0,
    "pressure_s": 5.5,
}
LIMITS = {"kv_tokens": 1000, "block_size": 10, "device": "cpu", "max_num_seqs": 4}


def machine(limits: dict[str, Any] | None = None, **changes: Any) -> Observations:
    """A server that only computes for its requests, on a machine with these counters."""
    steps = [step(n, 20) for n in range(1, 21)] + [step(n) for n in range(21, 100)]
    requests = [request(n, 0, 0, 20, 60) for n in range(4)]
    before = BEFORE | {name: changes[name] for name in ("gpu_throttles",) if name in changes}
    more = {"machine_before": before, "machine_after": AFTER | changes}
    return seen(steps, requests, limits=LIMITS | (limits or {}), **more)


def test_a_machine_without_a_fault_is_healthy() -> None:
    assert diagnose(machine()).verdict == "healthy"


@pytest.mark.parametrize(
    ("changes", "cause", "says"),
    [
        (
            {"busy_s": 99.0, "own_wait_s": 14.0},
            "cpu_taken",
            "other programs used 65% of the 2 CPUs",
        ),
        ({"steal_s": 9.0}, "cpu_taken", "the hypervisor gave 40% of the CPUs"),
        (
            {"throttled_s": 5.0, "quota_cpus": 0.5},
            "cpu_taken",
            "quota of 0.5 CPUs was used up in 50%",
        ),
        ({"cpu_mhz": 1200.0, "busy_s": 98.0}, "clock_throttled", "at 1,200 of 3,000 MHz"),
        ({"heat_throttles": 9}, "clock_throttled", "6 times because of heat"),
        ({"swapped_bytes": 400_000_000}, "memory_swapped", "0.40 GB of the server's memory"),
        ({"major_faults": 5010}, "memory_swapped", "500 pages a second"),
        ({"gpus": 1}, "gpu_unused", "the model runs on the CPU"),
    ],
)
def test_each_fault_is_found_with_its_evidence(
    changes: dict[str, Any], cause: str, says: str
) -> None:
    found = diagnose(machine(**changes))
    assert (first_cause(found), found.verdict) == (cause, "both")
    assert any(says in sentence for sentence in found.causes[0].evidence), found.causes[0].evidence


@pytest.mark.parametrize(
    "changes",
    [
        {"busy_s": 99.0},  # others compute, and the server does not wait for them
        {"own_wait_s": 14.0},  # the server's own threads wait for one another
        {"cpu_mhz": 1200.0},  # a low clock of idle CPUs
        {"steal_s": 1.5},
        {"throttled_s": 0.2, "quota_cpus": 1.5},
        {"swapped_bytes": 1_000_000},
        {"own_wait_s": None, "busy_s": None, "steal_s": None, "pressure_s": None},
    ],
)
def test_counters_that_slow_nothing_are_no_fault(changes: dict[str, Any]) -> None:
    assert diagnose(machine(**changes)).verdict == "healthy"


@pytest.mark.parametrize(
    ("limits", "cause"),
    [
        ({"isa": "portable", "isas": ["avx512", "avx2", "portable"]}, "slow_kernels"),
        ({"isa": "", "isas": ["avx512", "avx2", "portable"]}, "slow_kernels"),
        ({"isa": "avx512", "isas": ["avx512", "avx2", "portable"]}, "healthy"),
        ({"isa": "", "isas": []}, "healthy"),  # no native kernels are installed
    ],
)
def test_kernels_of_a_lower_instruction_set_are_found(limits: dict[str, Any], cause: str) -> None:
    assert first_cause(diagnose(machine(limits))) == cause


def test_a_gpu_that_others_use_and_a_hot_gpu_are_found() -> None:
    gpu = {"device": "cuda:0"}
    assert first_cause(diagnose(machine(gpu, gpu_others=2))) == "gpu_shared"
    found = diagnose(machine(gpu, gpu_throttles=["heat"]))
    assert first_cause(found) == "clock_throttled"
    assert diagnose(machine(gpu)).verdict == "healthy"


@pytest.mark.parametrize(
    ("weights", "gap_s", "cause"),
    [
        ("bfloat16", 0.2, "dense_weights"),
        ("bfloat16", 0.02, "healthy"),
        ("Q4_1", 0.2, "healthy"),
        ("int8, from bfloat16", 0.2, "healthy"),
    ],
)
def test_dense_weights_are_named_where_streams_are_slow(
    weights: str, gap_s: float, cause: str
) -> None:
    slower = {"since_s": {"decode": gap_s, "prefill": 0.0, "preemption": 0.0, "host": 0.0}}
    observed = machine({"weights": weights, "weight_bytes": 2_000_000_000})
    assert observed.steps is not None
    observed.steps = [one | slower if one["regular"] else one for one in observed.steps]
    assert first_cause(diagnose(observed)) == cause


def timed(number: int, took_s: float, moved: float = 1e9) -> dict[str, Any]:
    work = {"rows": 1, "tokens": 1, "num_bytes": moved}
    return step(number, device_s=took_s, decode=work)


def test_steps_are_compared_with_the_servers_own_best() -> None:
    quick = [timed(n, 0.01) for n in range(100)]
    slow = [timed(n, 0.025) for n in range(100, 160)]
    since_s = BEGUN_S + 100 * STEP_S
    ratios = slowed_ratios([*quick, *slow], since_s)
    assert ratios == pytest.approx([2.5] * 60)
    requests = [request(n, 100, 100, 110, 40) for n in range(4)]
    found = diagnose(seen([*quick, *slow], requests, since_s=since_s))
    assert first_cause(found) == "slow_computing"
    assert "2.5 times as long" in found.causes[0].evidence[0]
    # Longer contexts take longer, and are no fault.
    longer = [timed(n, 0.025, 2.5e9) for n in range(100, 160)]
    assert diagnose(seen([*quick, *longer], requests, since_s=since_s)).verdict == "healthy"


# ── the counters ────────────────────────────────────────────────────────────────────────────────


@pytest.mark.skipif(sys.platform != "linux", reason="the counters are Linux's")
def test_the_reader_counts_the_time_of_a_process_and_its_children() -> None:
    child = subprocess.Popen([sys.executable, "-c", "while True: pass"])
    try:
        reader = MachineReader(on_gpu=False)
        before = reader.read()
        while reader.read().own_s < before.own_s + 0.1:
            time.sleep(0.02)
        after = reader.read()
    finally:
        child.kill()
        child.wait()
    assert after.busy_s is not None
    assert before.busy_s is not None
    assert after.busy_s > before.busy_s
    assert after.cpus >= 1
    assert after.memory_bytes > 0


def test_counters_are_read_from_both_versions_of_cgroups(tmp_path: Path) -> None:
    proc, sys_folder = tmp_path / "proc", tmp_path / "sys"
    (proc / "7").mkdir(parents=True)
    (proc / "7/cgroup").write_text("0::/app\n")
    group = sys_folder / "fs/cgroup/app"
    group.mkdir(parents=True)
    (group / "cpu.max").write_text("50000 100000\n")
    (group / "cpu.stat").write_text("usage_usec 9\nthrottled_usec 2500000\n")
    found = MachineReader(False, 7, proc, sys_folder).read()
    assert (found.quota_cpus, found.throttled_s) == (0.5, 2.5)
    (proc / "7/cgroup").write_text("3:cpu,cpuacct:/app\n")
    old = sys_folder / "fs/cgroup/cpu/app"
    old.mkdir(parents=True)
    (old / "cpu.cfs_quota_us").write_text("150000\n")
    (old / "cpu.cfs_period_us").write_text("100000\n")
    (old / "cpu.stat").write_text("nr_throttled 3\nthrottled_time 4000000000\n")
    found = MachineReader(False, 7, proc, sys_folder).read()
    assert (found.quota_cpus, found.throttled_s) == (1.5, 4.0)
    assert (found.busy_s, found.own_wait_s, found.pressure_s) == (None, None, None)


@pytest.mark.skipif(sys.platform != "linux", reason="sockets are found in /proc")
def test_the_process_that_listens_on_a_port_is_found() -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:
        assert listening_process(server.getsockname()[1]) == os.getpid()
    assert listening_process(1) is None
