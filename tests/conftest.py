"""Of all tests: how many threads the mathematical libraries of a process may start."""

from __future__ import annotations

import os

# Workers share the cores. Were each to start a thread for every core, threads would wait for one
# another spinning: a step of one row took ten times as long. Before numpy and torch are imported,
# and for the processes that tests start, too.
if workers := os.environ.get("PYTEST_XDIST_WORKER_COUNT"):
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()
    os.environ.setdefault("OMP_NUM_THREADS", str(max(1, (cores or 1) // int(workers))))
