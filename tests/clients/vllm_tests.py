"""vLLM's tests of its server (tests/entrypoints of its repository), run against `twostroke serve`.

    python -m tests.clients.vllm_tests PATH [WORD…] [--json FILE] [--page docs/COMPATIBILITY.md]

PATH is a checkout of vLLM or its unpacked source archive; WORDs select test modules by a part of
their path. README.md lists further dependencies. Only vLLM's test modules are imported: `vllm_shim`
replaces the rest of vLLM.

The server of a module starts with the flags of the fixture, and with twostroke's default model
under the name that the test uses. A test counts as

    passed      it passes
    different   the server's answer differs from the expected answer
    missing     the server refuses a route, field or flag that it does not have

Other outcomes do not count:

    cannot run  the test needs a package, a device or a model that is missing
    internal    the test checks vLLM's Python code without a server
    skipped     by a condition of the test

With `--json` the outcomes of each module are stored: the same command continues after an
interruption, and repeats modules that ran with other code. `--page` writes the tables of the page;
`vllm_reasons.py` has the reasons why tests do not pass.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import re
import signal
import subprocess
import sys
import tempfile
import threading
import time
import zlib
from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

from tests.clients.vllm_reasons import CANNOT_RUN, write_page
from twostroke import __version__
from twostroke.config import EngineConfig
from twostroke.model.find.hub import find_model
from twostroke.model.find.packaged import DEFAULT_MODEL
from twostroke.model.text.model_text import chat_template_source, open_tokenizer

HERE = Path(__file__).parent
REPOSITORY = HERE.parents[1]
TESTS = Path("tests/entrypoints")
MODULE_S, TEST_S = 600, 120
COUNTED = ("passed", "different", "missing")
QUIET = ("passed", "internal", "skipped")
# Code of a module that starts a server or gets one from a conftest.py.
STARTS_A_SERVER = re.compile(
    r"Remote\w*Server\(|\bserver\(|-m\W+vllm|def test_\w+\([^)]*(server|client)"
)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("path", type=Path)
    parser.add_argument("words", nargs="*")
    parser.add_argument("--json", type=Path, help="keep every outcome here, and go on from it")
    parser.add_argument("--again", action="store_true", help="run what is in the file, too")
    parser.add_argument("--for-s", type=float, help="begin no module after so many seconds")
    parser.add_argument("--patience", type=float, default=1, help="for a slow machine: limits × N")
    parser.add_argument("--jobs", type=int, default=1, help="modules at a time")
    parser.add_argument("--page", type=Path, help="write the tables of this page")
    args = parser.parse_args()
    modules = [
        module
        for module in _modules(args.path)
        if not args.words or any(word in module for word in args.words)
    ]
    result = Result(args.json, args.path)
    begun_s = time.monotonic()
    modules = [module for module in modules if args.again or not result.has(module)]
    with tempfile.TemporaryDirectory() as folder:
        _write_tokenizer(Path(folder))

        def run(module: str) -> bool:
            """Return False if the time is up."""
            start_s = time.monotonic()
            if args.for_s is not None and start_s - begun_s > args.for_s:
                return False
            tests = _outcomes(args.path.resolve(), module, Path(folder), args.patience)
            result.add(module, tests, round(time.monotonic() - start_s))
            _tell(module, tests)
            return True

        with ThreadPoolExecutor(args.jobs) as pool:
            if not all(list(pool.map(run, modules))):
                print("not all modules were run; the same command goes on")
    result.write()
    counts = result.counts()
    print(", ".join(f"{counts[name]} {name}" for name in COUNTED))
    print("besides:", {name: count for name, count in counts.items() if name not in COUNTED})
    if args.page is not None:
        done = result.data["modules"]
        not_run = [module for module in _modules(args.path) if module not in done]
        for test in write_page(args.page, result.data, not_run):
            print(f"no reason is known for {test}")
    return 0


class Result:
    """The outcomes of each module, stored in a file with `--json`."""

    def __init__(self, file: Path | None, path: Path) -> None:
        self._file, self._code, self._lock = file, _code(), threading.Lock()
        about = path / "PKG-INFO"  # in a source archive
        found = re.search(r"^Version: (\S+)", about.read_text(), re.M) if about.exists() else None
        self.data: dict[str, Any] = {
            "vllm": found[1] if found else "a checkout",
            "model": DEFAULT_MODEL.name,
            "counts": {},
            "modules": {},
        }
        if file is not None and file.exists():
            last = json.loads(file.read_text())
            if last.get("vllm") == self.data["vllm"]:  # tests of another version say nothing here
                self.data["modules"] = last["modules"]

    def has(self, module: str) -> bool:
        return self.data["modules"].get(module, {}).get("code") == self._code

    def add(self, module: str, tests: dict[str, list[str]], took_s: int) -> None:
        with self._lock:
            self.data["modules"][module] = {"code": self._code, "took_s": took_s, "tests": tests}
            self.write()

    def write(self) -> None:
        self.data["modules"] = dict(sorted(self.data["modules"].items()))
        self.data["counts"] = dict(sorted(self.counts().items()))
        if self._file is not None:
            self._file.write_text(json.dumps(self.data, indent=1, ensure_ascii=False) + "\n")

    def counts(self) -> Counter[str]:
        modules = self.data["modules"].values()
        return Counter(one[0] for module in modules for one in module["tests"].values())


def _tell(module: str, tests: dict[str, list[str]]) -> None:
    print(f"{module}: {dict(Counter(outcome for outcome, _ in tests.values()))}", flush=True)
    for name, (outcome, said) in tests.items():
        if outcome not in QUIET:
            print(f"    {outcome:9} {name}: {said[:220]}", flush=True)


def _code() -> str:
    """Return an identifier of the tested code."""
    git = ["git", "-C", str(REPOSITORY)]
    names = ["HEAD:twostroke", "HEAD:tests/clients/vllm_shim"]
    trees = subprocess.run([*git, "rev-parse", *names], capture_output=True, text=True)
    if trees.returncode:
        return __version__
    places = [name.partition(":")[2] for name in names]
    changes = subprocess.run([*git, "diff", "HEAD", "--", *places], capture_output=True, text=True)
    changed = f"+{zlib.crc32(changes.stdout.encode()):08x}" if changes.stdout else ""
    return "+".join(tree[:12] for tree in trees.stdout.split()) + changed


def _modules(path: Path) -> list[str]:
    """Return the test modules that start a server."""
    files = sorted((path / TESTS).rglob("test_*.py"))
    return [
        str(file.relative_to(path / TESTS))
        for file in files
        if STARTS_A_SERVER.search(file.read_text())
    ]


def _outcomes(path: Path, module: str, folder: Path, patience: float) -> dict[str, list[str]]:
    """Return the outcome of each test, with the message of a test that did not pass."""
    for pattern, reason in CANNOT_RUN.items():
        if re.search(pattern, module):
            return {"": ["cannot run", reason]}
    file = folder / module.replace("/", "-")
    file.write_text("")
    env = {
        **os.environ,
        "PYTHONPATH": os.pathsep.join((str(HERE / "vllm_shim"), str(path))),
        "TWOSTROKE_REPOSITORY": str(REPOSITORY),
        "TWOSTROKE_TOKENIZER": str(folder),
        "TWOSTROKE_OUTCOMES": str(file),
        "TWOSTROKE_VERSION": __version__,
        "TWOSTROKE_PATIENCE": str(patience),
    }
    # pytest ends with this process, and the servers end with pytest, also by SIGKILL.
    ends_with_us = [str(REPOSITORY / "twostroke" / "child_process.py"), str(os.getpid())]
    command = [sys.executable, "-P", *ends_with_us, "pytest", "-q", "-p", "twostroke_vllm_shim"]
    command += [str(TESTS / module), "--confcutdir", str(TESTS), "-c", os.devnull]
    command += ["--rootdir", str(path), "-o", "asyncio_mode=auto", "-p", "no:cacheprovider"]
    command += ["--timeout", str(TEST_S * patience)]
    output, ended = _run_in_group(command, env, path, MODULE_S * patience)
    if not ended:
        print(f"{module}: not finished within {MODULE_S * patience:.0f} s")
    elif not file.read_text():
        print(output[-2000:])
    lines = [json.loads(line) for line in file.read_text().splitlines()]
    return {one["test"].partition("::")[2]: [one["outcome"], one["said"]] for one in lines}


def _run_in_group(
    command: list[str], env: dict[str, str], cwd: Path, limit_s: float
) -> tuple[str, bool]:
    """Return a command's output, and whether the command ended in time. All processes of its group
    are killed, because a test that fails or hangs does not stop its servers."""
    with tempfile.TemporaryFile("w+") as log:  # a server that still runs would keep a pipe open
        process = subprocess.Popen(
            command, env=env, cwd=cwd, stdout=log, stderr=log, start_new_session=True
        )
        try:
            process.wait(limit_s)
            ended = True
        except subprocess.TimeoutExpired:
            ended = False
        finally:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
            process.wait()
        log.seek(0)
        return log.read(), ended


def _write_tokenizer(folder: Path) -> None:
    """Write the default model's tokenizer in the format of transformers."""
    config = EngineConfig()
    tokenizer = open_tokenizer(config, find_model(config))
    assert tokenizer is not None
    (folder / "tokenizer.json").write_text(tokenizer.to_json())
    settings = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "bos_token": tokenizer.bos_token,
        "eos_token": tokenizer.eos_token,
        "chat_template": chat_template_source(config, tokenizer),
        "clean_up_tokenization_spaces": False,
    }
    (folder / "tokenizer_config.json").write_text(json.dumps(settings))


if __name__ == "__main__":
    sys.exit(main())
