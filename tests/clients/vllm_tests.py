"""vLLM's own tests of its OpenAI-compatible server, run against ours.

    python -m tests.clients.vllm_tests PATH [WORD…] [--json FILE]

PATH is a checkout of vLLM or its unpacked source archive; WORDs choose test modules by a part of
their path. Needs, besides the test dependencies: pytest-asyncio, pytest-timeout, requests, httpx,
jsonschema, regex, anthropic, fastapi, schemathesis. Nothing of vLLM is imported, only its test
modules: `vllm_shim` stands in for the rest.

Each module's server is started with the flags that its fixture gives, with our default model under
the name that the test uses. A test counts as

    passed      it passes
    different   the server answers otherwise than the test expects
    missing     the server has no such route, field or flag, and says so
    internal    it tests vLLM's Python code and asks no server (not counted)
    skipped     by its own condition (not counted)
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
from collections import Counter
from pathlib import Path

from twostroke import __version__
from twostroke.config import EngineConfig
from twostroke.model.load import chat_template_source, find_model, open_tokenizer

HERE = Path(__file__).parent
FOLDERS = ("openai", "serve", "anthropic")  # of tests/entrypoints: what a server of texts has
MODULE_S, TEST_S = 900, 180
COUNTED = ("passed", "different", "missing")


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("path", type=Path)
    parser.add_argument("words", nargs="*")
    parser.add_argument("--json", type=Path, help="keep every outcome here; others' stay in it")
    args = parser.parse_args()
    modules = [
        module for module in _modules(args.path) if not args.words or _named(module, args.words)
    ]
    outcomes = _kept(args.json, modules)
    with tempfile.TemporaryDirectory() as folder:
        _write_tokenizer(Path(folder))
        for module in modules:
            found = _run(args.path.resolve(), module, Path(folder))
            outcomes += found
            counts = Counter(one["outcome"] for one in found)
            print(f"{module}: {dict(counts)}", flush=True)
            for one in found:
                if one["outcome"] not in ("passed", "internal", "skipped"):
                    name = one["test"].rpartition("::")[2]
                    print(f"    {one['outcome']:9} {name}: {one['reason'][:220]}", flush=True)
            if args.json is not None:
                _write(args.json, outcomes)
    counts = Counter(one["outcome"] for one in outcomes)
    print(", ".join(f"{counts[name]} {name}" for name in COUNTED))
    others = {name: count for name, count in counts.items() if name not in COUNTED}
    print(f"not counted: {others}")
    return 0


def _kept(file: Path | None, modules: list[str]) -> list[dict[str, str]]:
    """The outcomes of an earlier run, but for the modules that are run now."""
    if file is None or not file.exists():
        return []
    tests: list[dict[str, str]] = json.loads(file.read_text())["tests"]
    return [one for one in tests if one["test"].partition("::")[0] not in modules]


def _write(file: Path, outcomes: list[dict[str, str]]) -> None:
    counts = dict(sorted(Counter(one["outcome"] for one in outcomes).items()))
    tests = sorted(outcomes, key=lambda one: one["test"])
    file.write_text(json.dumps({"counts": counts, "tests": tests}, indent=1) + "\n")


def _modules(path: Path) -> list[str]:
    """Those that start a server."""
    root = path / "tests" / "entrypoints"
    found = [file for folder in FOLDERS for file in sorted((root / folder).rglob("test_*.py"))]
    return [
        str(file.relative_to(path))
        for file in found
        if any(word in file.read_text() for word in ("RemoteOpenAIServer(", "server:", "(server"))
    ]


def _named(module: str, words: list[str]) -> bool:
    return any(word in module for word in words)


def _run(path: Path, module: str, folder: Path) -> list[dict[str, str]]:
    outcomes = folder / "outcomes"
    outcomes.write_text("")
    env = {
        **os.environ,
        "PYTHONPATH": str(HERE / "vllm_shim"),
        "TWOSTROKE_REPOSITORY": str(HERE.parents[1]),
        "TWOSTROKE_TOKENIZER": str(folder),
        "TWOSTROKE_OUTCOMES": str(outcomes),
        "TWOSTROKE_VERSION": __version__,
        "VLLM_SERVER_DEV_MODE": "1",
    }
    command = [sys.executable, "-m", "pytest", "-q", "-p", "twostroke_vllm_shim", module]
    command += ["--confcutdir", "tests/entrypoints", "-c", os.devnull, "--rootdir", str(path)]
    command += ["-o", "asyncio_mode=auto", "--timeout", str(TEST_S), "-p", "no:cacheprovider"]
    try:
        done = subprocess.run(
            command, env=env, cwd=path, timeout=MODULE_S, capture_output=True, text=True
        )
        if not outcomes.read_text():
            print(done.stdout[-1500:], done.stderr[-500:], sep="\n")
    except subprocess.TimeoutExpired:
        print(f"{module}: not finished within {MODULE_S} s")
    return [json.loads(line) for line in outcomes.read_text().splitlines()]


def _write_tokenizer(folder: Path) -> None:
    """The default model's tokenizer as transformers reads one."""
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
