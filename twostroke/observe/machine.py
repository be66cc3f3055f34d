"""`MachineReader`: counters of the machine that a server runs on, for `/records` and the doctor.

Times and counts only grow, and the doctor compares two readings. A counter that the machine does
not have is None. The server's processes are one process and its descendants.
"""

from __future__ import annotations

import os
import subprocess
from contextlib import suppress
from pathlib import Path
from time import monotonic
from typing import Any, NamedTuple

PROC, SYS = Path("/proc"), Path("/sys")
TICK_S = 1.0 / os.sysconf("SC_CLK_TCK") if hasattr(os, "sysconf") else 0.01
GPU_QUERY_S = 2.0  # seconds that an answer of nvidia-smi stays valid
GPU_TIMEOUT_S = 3.0
# Reasons of a lower clock that are faults: neither idle, nor a limit that the user has set.
GPU_THROTTLES = {0x8: "hardware slowdown", 0x20: "heat", 0x40: "heat", 0x80: "the power brake"}


class MachineReading(NamedTuple):
    at_s: float
    cpus: int  # CPUs that the server may use
    own_s: float  # CPU time of the server's processes
    own_wait_s: float | None  # time in which their threads were ready and had no CPU
    busy_s: float | None  # CPU time of all programs on these CPUs
    steal_s: float | None  # time that the hypervisor gave to other machines
    quota_cpus: float | None  # CPUs that the cgroup allows; None: all
    throttled_s: float | None  # time in which the quota was used up
    pressure_s: float | None  # time in which any program waited for a CPU
    swapped_bytes: int  # memory of the server that is in swap
    major_faults: int  # pages of the server that were read from disk
    cpu_mhz: float | None  # mean of the CPUs now
    max_mhz: float | None
    heat_throttles: int | None  # times that a CPU was slowed down because of heat
    gpus: int  # in the machine
    gpu_throttles: tuple[str, ...] = ()  # reasons of a lower clock now
    gpu_others: int = 0  # other processes that compute on the GPUs
    memory_bytes: int = 0  # resident memory of the server

    def as_json(self) -> dict[str, Any]:
        return self._asdict()


class MachineReader:
    """Reads the counters. Takes some milliseconds, and with a GPU up to `GPU_TIMEOUT_S`."""

    def __init__(
        self, on_gpu: bool, pid: int | None = None, proc: Path = PROC, sys: Path = SYS
    ) -> None:
        """`pid`: the server's process; by default this one."""
        self._on_gpu, self._proc, self._sys = on_gpu, proc, sys
        self._pid = os.getpid() if pid is None else pid
        self._gpu: tuple[float, tuple[str, ...], int] = (-GPU_QUERY_S, (), 0)

    def read(self) -> MachineReading:
        cpus = _cpus(self._pid)
        pids = self._process_tree(self._pid)
        own_s, waits_s, swapped, faults, resident = 0.0, [], 0, 0, 0
        for pid in pids:
            with suppress(OSError, ValueError, IndexError):
                fields = self._stat(pid)
                own_s += (int(fields[11]) + int(fields[12])) * TICK_S
                faults += int(fields[9])
                status = self._fields(self._proc / str(pid) / "status")
                swapped += 1024 * int(status.get("VmSwap", "0").split()[0])
                resident += 1024 * int(status.get("VmRSS", "0").split()[0])
                waits_s.append(self._wait_s(pid))
        busy_s, steal_s = self._cpu_times(cpus)
        quota_cpus, throttled_s = self._quota()
        cpu_mhz, max_mhz = self._clocks(cpus)
        throttles, others = self._gpu_state(pids) if self._on_gpu else ((), 0)
        known = [one for one in waits_s if one is not None]
        return MachineReading(
            at_s=monotonic(),
            cpus=len(cpus),
            own_s=own_s,
            own_wait_s=sum(known) if known else None,
            busy_s=busy_s,
            steal_s=steal_s,
            quota_cpus=quota_cpus,
            throttled_s=throttled_s,
            pressure_s=self._pressure(),
            swapped_bytes=swapped,
            major_faults=faults,
            cpu_mhz=cpu_mhz,
            max_mhz=max_mhz,
            heat_throttles=self._heat_throttles(cpus),
            gpus=len(list((self._proc / "driver/nvidia/gpus").glob("*"))),
            gpu_throttles=throttles,
            gpu_others=others,
            memory_bytes=resident,
        )

    # ── processes ───────────────────────────────────────────────────────────────────────────

    def _process_tree(self, pid: int) -> list[int]:
        """Return a process and its descendants."""
        found = [pid]
        for one in found:
            with suppress(OSError, ValueError):
                for task in (self._proc / str(one) / "task").iterdir():
                    found += map(int, (task / "children").read_text().split())
        return found

    def _stat(self, pid: int) -> list[str]:
        """Return the fields of `/proc/PID/stat` after the name."""
        return (self._proc / str(pid) / "stat").read_text().rpartition(")")[2].split()

    def _wait_s(self, pid: int) -> float | None:
        total_ns, seen = 0, False
        for task in (self._proc / str(pid) / "task").iterdir():
            with suppress(OSError, ValueError, IndexError):
                total_ns += int((task / "schedstat").read_text().split()[1])
                seen = True
        return total_ns / 1e9 if seen else None

    # ── the machine ─────────────────────────────────────────────────────────────────────────

    def _cpu_times(self, cpus: set[int]) -> tuple[float | None, float | None]:
        busy = steal = 0
        seen = False
        with suppress(OSError, ValueError):
            for line in (self._proc / "stat").read_text().splitlines():
                name, *values = line.split()
                if name.startswith("cpu") and name[3:].isdecimal() and int(name[3:]) in cpus:
                    user, nice, system, _, _, irq, softirq, stolen = map(int, values[:8])
                    busy += user + nice + system + irq + softirq
                    steal, seen = steal + stolen, True
        return (busy * TICK_S, steal * TICK_S) if seen else (None, None)

    def _pressure(self) -> float | None:
        with suppress(OSError, ValueError, IndexError):
            some = (self._proc / "pressure/cpu").read_text().splitlines()[0]
            return int(some.rpartition("total=")[2]) / 1e6
        return None

    def _quota(self) -> tuple[float | None, float | None]:
        """Return the CPU quota and the throttled time of the cgroup, of version 2 or 1."""
        for folder, stat, unit in self._cgroups():
            quota = None
            with suppress(OSError, ValueError):
                limit, period = (folder / "cpu.max").read_text().split()
                quota = None if limit == "max" else int(limit) / int(period)
            with suppress(OSError, ValueError):
                limit_us = int((folder / "cpu.cfs_quota_us").read_text())
                period_us = int((folder / "cpu.cfs_period_us").read_text())
                quota = None if limit_us < 0 else limit_us / period_us
            fields = self._fields(folder / "cpu.stat", " ")
            if stat in fields:
                return quota, int(fields[stat]) / unit
        return None, None

    def _cgroups(self) -> list[tuple[Path, str, float]]:
        """Return the folders that may have the quota, and for each the field of the throttled time
        and the field's units per second."""
        found = []
        with suppress(OSError):
            for line in (self._proc / str(self._pid) / "cgroup").read_text().splitlines():
                _, controllers, path = line.split(":", 2)
                if not controllers:
                    found.append(
                        (self._sys / "fs/cgroup" / path.lstrip("/"), "throttled_usec", 1e6)
                    )
                elif "cpu" in controllers.split(","):
                    folder = self._sys / "fs/cgroup/cpu" / path.lstrip("/")
                    found.append((folder, "throttled_time", 1e9))
        found.append((self._sys / "fs/cgroup", "throttled_usec", 1e6))
        return found

    def _clocks(self, cpus: set[int]) -> tuple[float | None, float | None]:
        now, maxima = [], []
        for cpu in cpus:
            folder = self._sys / f"devices/system/cpu/cpu{cpu}/cpufreq"
            with suppress(OSError, ValueError):
                now.append(int((folder / "scaling_cur_freq").read_text()) / 1e3)
                maxima.append(int((folder / "cpuinfo_max_freq").read_text()) / 1e3)
        if not now or len(now) != len(maxima):
            return None, None
        return sum(now) / len(now), sum(maxima) / len(maxima)

    def _heat_throttles(self, cpus: set[int]) -> int | None:
        counts = []
        for cpu in cpus:
            path = self._sys / f"devices/system/cpu/cpu{cpu}/thermal_throttle/core_throttle_count"
            with suppress(OSError, ValueError):
                counts.append(int(path.read_text()))
        return sum(counts) if counts else None

    def _gpu_state(self, own: list[int]) -> tuple[tuple[str, ...], int]:
        """Return why clocks are lowered, and how many other processes compute on the GPUs."""
        at_s, reasons, others = self._gpu
        if monotonic() - at_s < GPU_QUERY_S:
            return reasons, others
        masks = _nvidia_smi("--query-gpu=clocks_throttle_reasons.active")
        pids = _nvidia_smi("--query-compute-apps=pid")
        found: dict[str, None] = {}
        for mask in masks:
            with suppress(ValueError):
                bits = int(mask, 16)
                found |= {name: None for bit, name in GPU_THROTTLES.items() if bits & bit}
        others = sum(pid.isdecimal() and int(pid) not in own for pid in pids)
        self._gpu = (monotonic(), tuple(found), others)
        return tuple(found), others

    @staticmethod
    def _fields(path: Path, separator: str = ":") -> dict[str, str]:
        """Return the contents of a file with a name and a value on each line."""
        with suppress(OSError):
            pairs = (line.partition(separator) for line in path.read_text().splitlines())
            return {name.strip(): value.strip() for name, _, value in pairs}
        return {}


def listening_process(port: int, proc: Path = PROC) -> int | None:
    """Return the process that listens on a TCP port of this machine, if this user can see it."""
    sockets = set()
    for name in ("net/tcp", "net/tcp6"):
        with suppress(OSError, ValueError, IndexError):
            for line in (proc / name).read_text().splitlines()[1:]:
                fields = line.split()
                if fields[3] == "0A" and int(fields[1].rpartition(":")[2], 16) == port:
                    sockets.add(f"socket:[{fields[9]}]")
    for folder in proc.glob("[0-9]*"):
        with suppress(OSError):
            for link in (folder / "fd").iterdir():
                if sockets and os.readlink(link) in sockets:
                    return int(folder.name)
    return None


def _cpus(pid: int) -> set[int]:
    if hasattr(os, "sched_getaffinity"):
        with suppress(OSError):
            return set(os.sched_getaffinity(pid))
    return set(range(os.cpu_count() or 1))


def _nvidia_smi(query: str) -> list[str]:
    words = ("nvidia-smi", query, "--format=csv,noheader")
    with suppress(OSError, subprocess.SubprocessError):
        done = subprocess.run(words, capture_output=True, timeout=GPU_TIMEOUT_S, check=True)
        return [line.strip() for line in done.stdout.decode().splitlines() if line.strip()]
    return []
