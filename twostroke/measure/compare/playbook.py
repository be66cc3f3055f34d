"""Common changes to try with `ab`, each with a workload that shows its effect."""

from __future__ import annotations

import os
from collections.abc import Mapping
from typing import Any, NamedTuple

from twostroke.errors import ConfigError, did_you_mean


class Play(NamedTuple):
    """The options of both arms and a workload."""

    a: str  # options of `twostroke serve` in addition to the common options
    b: str
    load: Mapping[str, Any] = {}  # fields of ServeOptions


def _threads() -> str:
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()
    return f"--threads {max(1, (cores or 1) // 2)} --threads-batch {cores or 1}"


# Prompts of mixed length; prompts that share three quarters of their tokens; mostly decode.
MIXED = {"random_input_len": 512, "random_range_ratio": 0.9}
SHARED = {"random_prefix_len": 384, "random_input_len": 128}
DECODE = {"random_input_len": 32, "random_output_len": 64}
PLAYBOOK = {
    "chunk-budget": Play("", "--max-num-batched-tokens 256", MIXED),
    "prefix-caching": Play("--no-enable-prefix-caching", "--enable-prefix-caching", SHARED),
    "throughput-mode": Play("", "--performance-mode throughput", MIXED),
    "int8-weights": Play("", "--quantization int8", DECODE),
    "int4-weights": Play("", "--quantization int4", DECODE),
    "kv-cache-fp16": Play("", "--kv-cache-dtype float16", DECODE),
    "attention-backend": Play("", "--kernels reference"),
    "threads-per-phase": Play("", _threads()),
    "speculative": Play("", "--spec-method suffix,ngram", DECODE),
}


def play(name: str) -> Play:
    if name not in PLAYBOOK:
        raise ConfigError(
            f"--playbook {name!r} does not exist{did_you_mean(name, PLAYBOOK)}; `--playbook list` "
            "prints all entries"
        )
    return PLAYBOOK[name]
