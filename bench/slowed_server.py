"""`twostroke serve` with steps that take longer by a given share: a fault of known size.

    BENCH_SLOWDOWN=0.1 python -m bench.slowed_server --port 8000 [options of serve]

The engine's process is the real one; only its executor is wrapped, and spins after each step for
BENCH_SLOWDOWN times as long as the step took.
"""

from __future__ import annotations

import os
import sys
from functools import partial
from time import monotonic
from typing import Any

from twostroke.config import EngineConfig

VARIABLE = "BENCH_SLOWDOWN"


class SlowedExecutor:
    """A CPU executor that spins after each step."""

    def __init__(self, executor: Any, share: float) -> None:
        self._executor, self._share = executor, share
        self._started_s = 0.0

    def __getattr__(self, name: str) -> Any:
        return getattr(self._executor, name)

    def forward(self, plan: Any) -> Any:
        self._started_s = monotonic()
        return self._executor.forward(plan)

    def sample(self, handle: Any, masks: Any = None) -> Any:
        pending = self._executor.sample(handle, masks)
        now = monotonic()
        until = now + self._share * (now - self._started_s)
        while monotonic() < until:
            pass
        return pending


def build(config: EngineConfig) -> Any:
    """Build the slowed engine, in place of the product's engine."""
    from twostroke.engine.build import build_core_engine

    engine = build_core_engine(config)
    engine.core._executor = SlowedExecutor(engine.core._executor, float(os.environ[VARIABLE]))
    return engine


def main() -> int:
    from twostroke.cli import main as twostroke
    from twostroke.engine import spawn

    float(os.environ[VARIABLE])  # fails here rather than in the engine's process
    spawn.spawn = partial(spawn.spawn, builder="bench.slowed_server:build")
    return twostroke(["serve", *sys.argv[1:]])


if __name__ == "__main__":
    sys.exit(main())
