"""The native kernels of the other architecture, Arm or x86: compiled on this machine, run by QEMU.

    python -m tests.kernels.other_architecture [pytest arguments]

Without arguments the command runs `test_other_architecture.py`. With arguments an emulated pytest
of the other architecture runs with them.
"""

from __future__ import annotations

import functools
import os
import subprocess
import sys
import threading
from contextlib import suppress
from dataclasses import dataclass
from multiprocessing import Pipe
from multiprocessing.connection import Connection
from pathlib import Path

from tests.kernels.cross_build import (
    ARM,
    CACHE,
    OTHER,
    ROOT,
    TEST_WHEELS,
    X86,
    Architecture,
    build,
    python_of,
    require_tools,
    sysroot,
    wheels,
)
from tests.kernels.reference_model import Reference


@dataclass(frozen=True)
class Cpu:
    """A CPU that QEMU emulates, and the best instruction set that it must have."""

    architecture: Architecture
    name: str
    isa: str

    def __str__(self) -> str:
        return f"{self.architecture.machine}-{self.name}"


SMALL_ARM = Cpu(ARM, "cortex-a53", "portable")  # without fp16 arithmetic and dot products
CPUS = (Cpu(X86, "max", "avx2") if OTHER is X86 else Cpu(ARM, "neoverse-n1", "neon"), SMALL_ARM)


class Machine:
    """A CPU of QEMU, with the build for its architecture."""

    def __init__(self, cpu: Cpu) -> None:
        require_tools()
        self.cpu, self.build = cpu, build(cpu.architecture)
        self.emulator: list[str | Path] = [cpu.architecture.emulator, "-cpu", cpu.name]
        self.python, paths = Path(sys.executable), [self.build]
        if cpu.architecture is OTHER:
            self.emulator += ["-L", sysroot()]
            self.python = python_of(sysroot())
            paths.append(wheels(*TEST_WHEELS))
        kept = {name: os.environ[name] for name in ("HOME", "PATH", "TMPDIR") if name in os.environ}
        self.environment = kept | {
            "LC_ALL": "C.UTF-8",
            "OPENBLAS_NUM_THREADS": "1",
            "PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1",
            "PYTHONPATH": os.pathsep.join(map(str, paths)),
            "PYTHONPYCACHEPREFIX": str(CACHE / "pycache"),
        }

    def run(self, *command: str | Path) -> subprocess.CompletedProcess[str]:
        return subprocess.run(
            [*self.emulator, *command],
            env=self.environment,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )

    @functools.cached_property
    def isas(self) -> list[str]:
        """The instruction sets that the module finds on the CPU, the best first."""
        done = self.run(self.python, "-c", "import _native; print(*_native.isas())")
        assert done.returncode == 0, done.stdout
        return done.stdout.split()

    def kernels_check(self) -> subprocess.CompletedProcess[str]:
        return self.run(self.build / "kernels_check")

    def pytest(self, *arguments: str | Path) -> int:
        """Return the exit status of an emulated pytest. `emulated.py` has its own options."""
        here, there = Pipe()
        command = [*self.emulator, self.python, "-m", "tests.kernels.emulated"]
        command += [str(self.build), str(there.fileno()), *arguments]
        process = subprocess.Popen(
            command, cwd=ROOT, env=self.environment, pass_fds=(there.fileno(),)
        )
        there.close()
        threading.Thread(target=_serve_references, args=(here,), daemon=True).start()
        try:
            return process.wait()
        finally:
            process.kill()


def _serve_references(link: Connection) -> None:
    """Make the reference models of an emulated pytest, and compute their logits."""
    models: dict[int, Reference] = {}
    with suppress(EOFError), link:
        while True:
            match link.recv():
                case None:
                    models.clear()
                case number, "logits", step:
                    link.send(models[number].logits(*step))
                case number, kind, arguments:
                    models[number] = kind(*arguments)


def main() -> int:
    import pytest

    if sys.argv[1:]:
        return Machine(CPUS[0]).pytest(*sys.argv[1:])
    this_test = Path(__file__).with_name("test_other_architecture.py")
    return pytest.main(["-o", "addopts=", "-v", "-rs", "--durations=0", str(this_test)])


if __name__ == "__main__":
    sys.exit(main())
