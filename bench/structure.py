"""Counts of how the source code is built, to compare one tree with another.

    python -m bench.structure [--tree PATH] [--json] [--list NAME] [--static]

The static counts come from the source files. `chat_files` and `step_files` come from runs of a
tiny model on the CPU: every Python file of `twostroke/` in which a function is called during one
streamed chat request (HTTP process and engine process), or during one decode step of one row
(`LLMEngine.step`). `chat_calls` and `step_calls` have the functions. `--tree` names another
checkout, for example `git worktree add --detach /tmp/before COMMIT` with the native module copied
into it. `--static` leaves the runs out, `--list NAME` prints the entries behind one count.
"""

from __future__ import annotations

import argparse
import ast
import json
import os
import subprocess
import sys
import tempfile
import time
from collections import Counter, defaultdict
from collections.abc import Iterator
from http.client import HTTPConnection
from pathlib import Path
from typing import Any

MAX_POSITIONAL = 8
TITLES = ("What", "Of", "Where", "How", "Whether", "Which", "Who", "Whose", "That", "If")
FUNCTIONS = (ast.FunctionDef, ast.AsyncFunctionDef)
DOCUMENTED = (ast.Module, ast.ClassDef, *FUNCTIONS)
SOURCES = (".py", ".cpp", ".h", ".cu", ".js", ".css", ".html")
NUM_STEPS = 32
PATIENCE_S = 120.0

Entries = dict[str, list[str]]

# Installed as `sitecustomize` in every process of the traced server. A profile function for all
# threads notes the functions that are called while the file "on" exists.
HOOK = """
import atexit, os, sys, threading, time

folder, package = {folder!r}, {package!r}
calls, recording = set(), False

def profile(frame, event, arg):
    if recording and event == "call":
        calls.add((frame.f_code.co_filename, frame.f_code.co_qualname))

def watch():
    global recording
    while True:
        time.sleep(0.02)
        on = os.path.exists(os.path.join(folder, "on"))
        if on != recording:
            recording = on
            if on:
                calls.clear()
            found = sorted(f"{{name}}:{{function}}" for name, function in list(calls)
                           if name.startswith(package))
            state = "recording" if on else "calls"
            with open(os.path.join(folder, f"{{os.getpid()}}.{{state}}"), "w") as out:
                out.write("\\n".join(found))

threading.Thread(target=watch, daemon=True).start()
threading.setprofile(profile)
sys.setprofile(profile)
"""


# ── static counts ───────────────────────────────────────────────────────────────────────────────


def python_files(tree: Path) -> list[Path]:
    return sorted((tree / "twostroke").rglob("*.py"))


def static_entries(tree: Path) -> Entries:
    """Return the entries of each static count, as texts with the place."""
    found: Entries = defaultdict(list)
    base_names: dict[str, list[str]] = defaultdict(list)
    class_names: dict[str, list[str]] = defaultdict(list)
    parameters: list[tuple[int, str]] = []
    for path in python_files(tree):
        name = str(path.relative_to(tree))
        text = path.read_text(encoding="utf-8")
        if path.name not in ("__init__.py", "__main__.py"):
            base_names[path.name].append(name)
        lines = [n for n, line in enumerate(text.splitlines(), 1) if "pdl" in line]
        found["pdl_lines"] += [f"{name}:{n}" for n in lines]
        found["pdl_files"] += [name] if lines else []
        module = ast.parse(text)
        for statement in module.body:
            if isinstance(statement, ast.ClassDef):
                class_names[statement.name].append(name)
        for node in outside_kernels(module):
            if isinstance(node, FUNCTIONS):
                parameters.append((num_parameters(node), f"{name}:{node.lineno} {node.name}"))
            if isinstance(node, ast.Call) and len(node.args) > MAX_POSITIONAL:
                called = ast.unparse(node.func)
                found["long_calls"].append(f"{name}:{node.lineno} {called} {len(node.args)}")
            if isinstance(node, DOCUMENTED):
                docstring = ast.get_docstring(node) or ""
                title = docstring.split(maxsplit=1)[0] if docstring else ""
                if title in TITLES:
                    line = getattr(node, "lineno", 1)
                    found[f"docstrings_{title}"].append(f"{name}:{line} {docstring[:60]!r}")
    parameters.sort(reverse=True)
    found["parameters"] = [f"{count} {place}" for count, place in parameters[:40]]
    for key, names in (("repeated_base_names", base_names), ("repeated_class_names", class_names)):
        found[key] = [f"{one}: {' '.join(at)}" for one, at in sorted(names.items()) if len(at) > 1]
    return found


def outside_kernels(node: ast.AST) -> Iterator[ast.AST]:
    """All nodes except functions that Triton compiles."""
    if isinstance(node, FUNCTIONS) and any(
        "jit" in ast.unparse(one) for one in node.decorator_list
    ):
        return
    yield node
    for child in ast.iter_child_nodes(node):
        yield from outside_kernels(child)


def num_parameters(function: ast.FunctionDef | ast.AsyncFunctionDef) -> int:
    """The number of parameters without `self` and `cls`."""
    arguments = function.args
    names = [one.arg for one in (*arguments.posonlyargs, *arguments.args, *arguments.kwonlyargs)]
    return len(names) - (names[:1] in (["self"], ["cls"]))


def lines_per_folder(tree: Path) -> dict[str, int]:
    """Lines of source of each folder of the product; `twostroke` is the package's own modules."""
    lines: Counter[str] = Counter()
    for top in ("twostroke", "native"):
        for path in (tree / top).rglob("*"):
            if path.is_file() and path.suffix in SOURCES:
                parts = path.relative_to(tree).parts
                folder = top if top == "native" or len(parts) == 2 else "/".join(parts[:2])
                with path.open("rb") as source:
                    lines[folder] += sum(1 for _ in source)
    return dict(sorted(lines.items()))


# ── runs ────────────────────────────────────────────────────────────────────────────────────────


def environment(tree: Path, *before: str) -> dict[str, str]:
    return os.environ | {"PYTHONPATH": os.pathsep.join([*before, str(tree)])}


def tiny_model(tree: Path, folder: Path) -> None:
    code = "import sys, pathlib; from tests.tiny import tiny_folder; "
    code += "tiny_folder(pathlib.Path(sys.argv[1]))"
    words = [sys.executable, "-P", "-c", code, str(folder)]
    subprocess.run(words, env=environment(tree), check=True)


def chat_calls(tree: Path, model: Path, folder: Path) -> list[str]:
    """The functions that one streamed chat request calls, in the HTTP and the engine process, each
    as `FILE:FUNCTION`."""
    hook = HOOK.format(folder=str(folder), package=str(tree / "twostroke") + os.sep)
    (folder / "sitecustomize.py").write_text(hook)
    port, on = 18000 + os.getpid() % 10000, folder / "on"
    words = [sys.executable, "-P", "-m", "twostroke", "serve", str(model), "--port", str(port)]
    server = subprocess.Popen(words, env=environment(tree, str(folder)))
    try:
        until(lambda: answers(port))
        stream_chat(port)  # the first request of a server starts threads and fills caches
        on.touch()
        until(lambda: len(list(folder.glob("*.recording"))) >= 2)
        stream_chat(port)
        on.unlink()
        until(lambda: len(list(folder.glob("*.calls"))) >= 2)
        time.sleep(0.2)
    finally:
        server.terminate()
        server.wait(PATIENCE_S)
    names: set[str] = set()
    for path in folder.glob("*.calls"):
        names.update(path.read_text().splitlines())
    return sorted(name.removeprefix(f"{tree}{os.sep}") for name in names)


def answers(port: int) -> bool:
    connection = HTTPConnection("127.0.0.1", port, timeout=10)
    try:
        connection.request("GET", "/health")
        return connection.getresponse().status == 200
    except OSError:
        return False
    finally:
        connection.close()


def stream_chat(port: int) -> None:
    body = {"messages": [{"role": "user", "content": "Hello"}], "stream": True, "max_tokens": 16}
    connection = HTTPConnection("127.0.0.1", port, timeout=60)
    headers = {"Content-Type": "application/json"}
    connection.request("POST", "/v1/chat/completions", json.dumps(body), headers)
    content = connection.getresponse().read()
    connection.close()
    assert content.endswith(b"data: [DONE]\n\n"), content


def until(holds: Any) -> None:
    end = time.monotonic() + PATIENCE_S
    while not holds():
        if time.monotonic() > end:
            raise TimeoutError("the traced server did not answer in time")
        time.sleep(0.05)


def run_steps(model: str) -> None:
    """Print the Python calls of decode steps of one row, by file and function, as JSON. Runs in a
    process that imports the package of the tree."""
    import twostroke

    package = str(Path(twostroke.__file__).parent) + os.sep
    from twostroke.config import EngineConfig
    from twostroke.llm_engine import LLMEngine

    engine = LLMEngine(EngineConfig(model=model, max_num_seqs=4))
    params = twostroke.SamplingParams(max_tokens=200, temperature=0.0, ignore_eos=True)
    engine.add_request("0", "a b c", params)
    for _ in range(40):  # past the prompt, and past the steps that fill caches
        engine.step()
    calls: Counter[str] = Counter()

    def profile(frame: Any, event: str, arg: Any) -> None:
        code = frame.f_code
        if event == "call" and code.co_filename.startswith(package):
            calls[f"{code.co_filename.removeprefix(package)}:{code.co_qualname}"] += 1

    sys.setprofile(profile)
    for _ in range(NUM_STEPS):
        engine.step()
    sys.setprofile(None)
    assert engine.has_unfinished_requests()
    print(json.dumps(calls))


def step_calls(tree: Path, model: Path) -> dict[str, float]:
    """The Python calls of a decode step by file and function, the mean of `NUM_STEPS` steps."""
    words = [sys.executable, "-P", os.path.abspath(__file__), "--run-steps", str(model)]
    done = subprocess.run(
        words, env=environment(tree), check=True, stdout=subprocess.PIPE, text=True
    )
    calls: dict[str, int] = json.loads(done.stdout.splitlines()[-1])
    return {name: count / NUM_STEPS for name, count in calls.items()}


# ── the report ──────────────────────────────────────────────────────────────────────────────────


def count_all(tree: Path, runs: bool) -> tuple[dict[str, Any], Entries]:
    entries = static_entries(tree)
    counts: dict[str, Any] = {
        "largest_parameter_list": int(entries["parameters"][0].split()[0]),
        "calls_with_nine_positional_arguments": len(entries["long_calls"]),
        "lines_with_pdl": len(entries["pdl_lines"]),
        "files_with_pdl": len(entries["pdl_files"]),
        "repeated_base_names": len(entries["repeated_base_names"]),
        "repeated_class_names": len(entries["repeated_class_names"]),
        "docstring_titles": {title: len(entries[f"docstrings_{title}"]) for title in TITLES},
    }
    if runs:
        with tempfile.TemporaryDirectory() as name:
            model, folder = Path(name) / "tiny", Path(name) / "trace"
            folder.mkdir()
            tiny_model(tree, model)
            entries["chat_calls"] = chat_calls(tree, model, folder)
            calls = step_calls(tree, model)
        entries["chat_files"] = sorted({one.partition(":")[0] for one in entries["chat_calls"]})
        entries["step_files"] = sorted({one.partition(":")[0] for one in calls})
        ordered = sorted(calls.items(), key=lambda pair: -pair[1])
        entries["step_calls"] = [f"{count:6.2f} {one}" for one, count in ordered]
        counts["files_of_a_streamed_chat"] = len(entries["chat_files"])
        counts["files_of_a_decode_step"] = len(entries["step_files"])
        counts["python_calls_of_a_decode_step"] = round(sum(calls.values()), 1)
    lines = lines_per_folder(tree)
    counts["lines"] = {"total": sum(lines.values()), **lines}
    return counts, entries


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else "")
    parser.add_argument("--tree", type=Path, default=Path(__file__).parents[1])
    parser.add_argument("--json", action="store_true")
    parser.add_argument("--static", action="store_true")
    parser.add_argument("--list", metavar="NAME")
    parser.add_argument("--run-steps", metavar="MODEL", help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.run_steps:
        run_steps(args.run_steps)
        return
    counts, entries = count_all(args.tree.resolve(), not args.static)
    if args.list:
        if args.list not in entries:
            parser.error(f"--list takes one of {', '.join(sorted(entries))}")
        print("\n".join(entries[args.list]))
    elif args.json:
        print(json.dumps(counts, indent=1))
    else:
        for name, count in counts.items():
            values = count if isinstance(count, dict) else {"": count}
            for key, value in values.items():
                print(f"{value:8}  {name.replace('_', ' ')} {key}".rstrip())


if __name__ == "__main__":
    main()
