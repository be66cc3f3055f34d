"""Triton decides at its import whether it interprets: tests of interpreted kernels run in a pytest
of their own, which a test of the same file starts."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"
ROOT = Path(__file__).parents[2]


def run_interpreted(file: str) -> None:
    command = [sys.executable, "-m", "pytest", "-x", "-p", "no:cacheprovider", file]
    env = {**os.environ, "TRITON_INTERPRET": "1", "PYTHONWARNINGS": "ignore"}
    child = subprocess.run(command, cwd=ROOT, env=env, capture_output=True, text=True)
    assert child.returncode == 0, child.stdout[-4000:] + child.stderr[-2000:]
