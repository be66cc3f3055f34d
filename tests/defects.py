"""Inserts defects into the package, one at a time, and checks that the tests notice them.

    python -m tests.defects [--tier core] [NAME …]

Each defect is a replacement in a copy of the repository. The tests of the folders where the defect
should show run first, and the rest of the tier after them if those pass. A run ends at the first
test that fails: that test has caught the defect. The exit status is 1 if a defect was not caught.
"""

from __future__ import annotations

import argparse
import re
import shutil
import subprocess
import sys
import tempfile
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).parents[1]
TIERS = {"core": "core", "full": "core or full"}


@dataclass(frozen=True)
class Defect:
    name: str
    file: str
    right: str
    wrong: str
    folders: tuple[str, ...]  # of the tests


DEFECTS = [
    Defect(
        "a shared block is freed while one request still owns it",
        "kv/blocks.py",
        "if left:",
        "if left > 1:",
        ("kv", "sched", "property"),
    ),
    Defect(
        "a chunk that ends one token early counts as the last chunk",
        "sched/step.py",
        "last = start + count == len(request.tokens)",
        "last = start + count >= len(request.tokens) - 1",
        ("sched", "property", "equivalence"),
    ),
    Defect(
        "offsets of Q4_K lose their upper bits",
        "model/gguf/dequant.py",
        "offset = np.concatenate([second & 63, (third >> 4) | (second >> 6 << 4)], axis=1)",
        "offset = np.concatenate([second & 63, third >> 4], axis=1)",
        ("model", "kernels"),
    ),
    Defect(
        "a head that arrives in pieces has no limit",
        "serve/http/connection.py",
        "            if self._head_bytes > self.max_head_bytes:",
        "            if self._head_bytes > 2**40:",
        ("server",),
    ),
    Defect(
        "the streamed deltas of a tool call have no arguments",
        "serve/parsers/calls.py",
        "return ToolCallDelta(len(self.calls) - 1, arguments=text)",
        'return ToolCallDelta(len(self.calls) - 1, arguments="")',
        ("server",),
    ),
    Defect(
        "a metric has another name",
        "serve/monitor/prometheus.py",
        '"time_to_first_token_seconds": (',
        '"first_token_seconds": (',
        ("server", "measure"),
    ),
    Defect(
        "a stop string that two tokens write is not found",
        "engine/output_processor.py",
        "longest = min(self._longest - 1, len(text))",
        "longest = min(self._longest - 2, len(text))",
        ("engine",),
    ),
    Defect(
        "requests of different cache salts share blocks",
        "kv/prefix.py",
        "for part in parts:",
        "for part in parts[:0]:",
        ("kv", "sched", "engine", "server"),
    ),
    Defect(
        "a window is one token too long",
        "kernels/reference.py",
        "seen & (key > query - window)",
        "seen & (key >= query - window)",
        ("kernels", "equivalence"),
    ),
    Defect(
        "a stream ends without [DONE]",
        "serve/generation/generate.py",
        "        if not self.usage_at_end:\n            return DONE",
        '        if not self.usage_at_end:\n            return b""',
        ("server",),
    ),
    Defect(
        "a request without a key passes",
        "serve/http/routing.py",
        "        if self._num_keys and http.key_number is None:",
        "        if self._num_keys and http.key_number is None and _sent_key(http):",
        ("server",),
    ),
    Defect(
        "the GPU's decode attention leaves out the newest key",
        "kernels/cuda/decode.py",
        "            inside = position < length\n",
        "            inside = position < length - 1\n",
        ("kernels",),
    ),
    Defect(
        "top-p keeps one candidate less",
        "kernels/reference_sampling.py",
        "keep = within_k & (before < p)",
        "keep = within_k & (before + share < p)",
        ("exec", "kernels"),
    ),
    Defect(
        "an aborted request keeps its place",
        "sched/scheduler.py",
        "        if not waited:\n            self._remove_inactive()",
        "        if waited:\n            self._remove_inactive()",
        ("sched", "property", "engine"),
    ),
]


def copy_with(defect: Defect, to: Path) -> None:
    for name in ("twostroke", "tests", "bench", "native", "docs", "deploy"):
        shutil.copytree(ROOT / name, to / name, ignore=shutil.ignore_patterns("__pycache__"))
    for path in ROOT.iterdir():
        if path.is_file():
            shutil.copy(path, to)
    file = to / "twostroke" / defect.file
    text = file.read_text()
    assert text.count(defect.right) == 1, f"{defect.file} no longer has: {defect.right}"
    file.write_text(text.replace(defect.right, defect.wrong))


def first_failure(folder: Path, tier: str, *paths: str) -> str | None:
    """Return the id of the test that failed first."""
    command = [sys.executable, "-m", "pytest", "-x", "-n", "2", "--dist", "worksteal"]
    command += ["-p", "no:cacheprovider", "-rfE", "--tb=no", "-m", TIERS[tier], *paths]
    done = subprocess.run(command, cwd=folder, capture_output=True, text=True)
    failed = re.search(r"^(?:FAILED|ERROR) (\S+)", done.stdout, re.MULTILINE)
    assert done.returncode in (0, 1, 2), done.stdout[-2000:] + done.stderr[-2000:]
    return failed.group(1) if failed else None


def caught_by(defect: Defect, tier: str) -> str | None:
    with tempfile.TemporaryDirectory() as place:
        copy_with(defect, Path(place))
        near = [f"tests/{folder}" for folder in defect.folders]
        return first_failure(Path(place), tier, *near) or first_failure(Path(place), tier)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--tier", choices=TIERS, default="core")
    parser.add_argument("names", nargs="*", help="parts of the names of defects; default: all")
    args = parser.parse_args()
    chosen = [d for d in DEFECTS if not args.names or any(n in d.name for n in args.names)]
    missed = 0
    for defect in chosen:
        test = caught_by(defect, args.tier)
        missed += test is None
        print(f"{defect.name}: {f'caught by {test}' if test else 'NOT CAUGHT'}", flush=True)
    print(f"{len(chosen) - missed} of {len(chosen)} defects caught by the {args.tier} tier")
    sys.exit(missed > 0)


if __name__ == "__main__":
    main()
