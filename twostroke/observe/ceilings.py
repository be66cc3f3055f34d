"""`measure_ceilings` measures the maximum rates of a CPU. Metrics compare the rates of steps with
them. `python -m twostroke.observe.ceilings THREADS` prints the rates as JSON.
"""

from __future__ import annotations

import contextlib
import json
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from time import perf_counter
from typing import NamedTuple

BUFFER_BYTES = 256 << 20  # more than any cache holds
TRIES = 5


class Ceilings(NamedTuple):
    """Maximum rates; 0: unknown."""

    read_bytes_per_s: float = 0.0
    ops_per_s: float = 0.0  # integer multiplications on registers, an upper bound for any matmul


def measure_ceilings(threads: int) -> Ceilings:
    """Measure the rates. This uses the whole CPU for about a second."""
    from twostroke.kernels import cpu

    rate = float(cpu.module().dot_rate("auto", threads)) if cpu.available() else 0.0
    return Ceilings(_read_rate(threads), rate)


def _read_rate(threads: int) -> float:
    import numpy as np

    parts = np.array_split(np.ones(BUFFER_BYTES // 8), threads)
    best = 0.0
    with ThreadPoolExecutor(threads) as pool:
        for _ in range(TRIES):
            start = perf_counter()
            list(pool.map(np.sum, parts))
            best = max(best, BUFFER_BYTES / (perf_counter() - start))
    return best


def main() -> None:
    with contextlib.suppress(OSError):  # Linux kills this process first if memory is short
        Path("/proc/self/oom_score_adj").write_text("1000", encoding="ascii")
    print(json.dumps(measure_ceilings(int(sys.argv[1]))._asdict()))


if __name__ == "__main__":
    main()
