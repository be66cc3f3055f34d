"""`twostroke serve` with an injected fault, for the doctor's exam.

    python -m bench.doctor_exam.faulty_server tokenizer_s=0.3 serve MODEL --port 8001

tokenizer_s   seconds that are added to the tokenisation of each text
plan_s        seconds that the engine's host sleeps before a step
plan_every    number of steps between two such sleeps; default 1
isa           instruction set of the native kernels
"""

from __future__ import annotations

import os
import runpy
import sys
import time
from dataclasses import replace
from functools import wraps
from typing import Any

from twostroke.config import EngineConfig

FAULTS = ("tokenizer_s", "plan_s", "plan_every", "isa")
VARIABLE = "TWOSTROKE_EXAM_"  # environment variables that carry the faults to the engine


def build(config: EngineConfig) -> Any:
    """Build an engine with a slow host or slow kernels. `engine/process.py` calls this function."""
    from twostroke.engine.build import build_core_engine

    engine = build_core_engine(replace(config, isa=os.environ.get(f"{VARIABLE}ISA", config.isa)))
    scheduler: Any = engine.core.scheduler
    plan, calls = scheduler.plan, 0
    pause_s = float(os.environ.get(f"{VARIABLE}PLAN_S", "0"))
    every = int(os.environ.get(f"{VARIABLE}PLAN_EVERY", "1"))

    def slow_plan(*args: Any) -> Any:
        nonlocal calls
        calls += 1
        if pause_s and calls % every == 0:
            time.sleep(pause_s)
        return plan(*args)

    scheduler.plan = slow_plan
    return engine


def main(words: list[str]) -> None:
    while words and "=" in words[0]:
        name, _, value = words.pop(0).partition("=")
        if name not in FAULTS:
            raise SystemExit(f"unknown fault {name!r}; choose one of {', '.join(FAULTS)}")
        os.environ[VARIABLE + name.upper()] = value
    if {f"{VARIABLE}PLAN_S", f"{VARIABLE}ISA"} & os.environ.keys():
        from twostroke.engine import spawn

        start, own = spawn.spawn, f"{__spec__.name}:build"
        spawn.spawn = lambda config, builder="": start(config, own)
    if pause := os.environ.get(f"{VARIABLE}TOKENIZER_S"):
        from twostroke.model.text.tokenizer import Tokenizer

        encode = Tokenizer.encode

        @wraps(encode)
        def slow_encode(self: Tokenizer, *args: Any, **kwargs: Any) -> list[int]:
            time.sleep(float(pause))
            return encode(self, *args, **kwargs)

        Tokenizer.encode = slow_encode  # type: ignore[method-assign]
    sys.argv = ["twostroke", *words]
    runpy.run_module("twostroke", run_name="__main__")


if __name__ == "__main__":
    main(sys.argv[1:])
