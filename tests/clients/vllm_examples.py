"""vLLM's examples of offline inference, run with twostroke.

    python -m tests.clients.vllm_examples PATH [--model MODEL] [--only NAME …]

PATH is a checkout of vLLM, its unpacked source distribution, or its examples folder. Two things of
each script are changed: imports of `vllm` become imports of `twostroke`, and the model becomes
MODEL (default: the default model). Each script runs in its own process, and passes if it ends with
status 0. "chat with tools" reads the output of the model as JSON, for which the default model is
too small: without MODEL it runs with a model that generates that call (`reciting_model.py`).
"""

from __future__ import annotations

import argparse
import ast
import json
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from tests.clients.reciting_model import reciting_folder

# The path of each example since vLLM 0.2x and before.
EXAMPLES = {
    "basic": ("basic/offline_inference/basic.py", "offline_inference/basic/basic.py"),
    "generate": ("basic/offline_inference/generate.py", "offline_inference/basic/generate.py"),
    "chat": ("basic/offline_inference/chat.py", "offline_inference/basic/chat.py"),
    "structured outputs": (
        "features/structured_outputs/structured_outputs_offline.py",
        "offline_inference/structured_outputs.py",
    ),
    "prefix caching": (
        "features/automatic_prefix_caching/prefix_caching_offline.py",
        "offline_inference/prefix_caching.py",
    ),
    "automatic prefix caching": (
        "features/automatic_prefix_caching/automatic_prefix_caching_offline.py",
        "offline_inference/automatic_prefix_caching.py",
    ),
    "engine, logprobs": (
        "deployment/llm_engine_example.py",
        "offline_inference/llm_engine_example.py",
    ),
    "chat with tools": (
        "tool_calling/chat_with_tools_offline.py",
        "offline_inference/chat_with_tools.py",
    ),
    "metrics": ("observability/metrics/offline.py", "offline_inference/metrics.py"),
    "reset cache": (
        "features/reset_kv/reset_kv_offline.py",
        "offline_inference/llm_engine_reset_kv.py",
    ),
    "reproducibility": (
        "features/batch_invariance/reproducibility_offline.py",
        "offline_inference/reproducibility.py",
    ),
    "async streaming": (
        "deployment/async_llm_streaming.py",
        "offline_inference/async_llm_streaming.py",
    ),
}
ARGUMENTS = {"chat": ["--chat-template-path", "template_chatml.jinja", "--max-tokens", "32"]}
LIMIT_S = 900
CALL = [
    {
        "name": "get_current_weather",
        "arguments": {"city": "Dallas", "state": "TX", "unit": "fahrenheit"},
    }
]


class OnTwostroke(ast.NodeTransformer):
    """Replaces the imports and the model of a script."""

    def __init__(self, model: str | None) -> None:
        self._model = ast.Constant(model)

    def visit_Import(self, node: ast.Import) -> ast.Import:
        for alias in node.names:
            alias.name = renamed(alias.name)
        return node

    def visit_ImportFrom(self, node: ast.ImportFrom) -> ast.ImportFrom:
        node.module = renamed(node.module or "")
        return node

    def visit_keyword(self, node: ast.keyword) -> ast.keyword:
        if node.arg == "model" and isinstance(node.value, ast.Constant):
            node.value = self._model
        self.generic_visit(node)
        return node

    def visit_Assign(self, node: ast.Assign) -> ast.Assign:
        names = [target.id for target in node.targets if isinstance(target, ast.Name)]
        if "model_name" in names and isinstance(node.value, ast.Constant):
            node.value = self._model
        self.generic_visit(node)
        return node


def renamed(module: str) -> str:
    first, dot, rest = module.partition(".")
    return ("twostroke" if first == "vllm" else first) + dot + rest


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("path", type=Path)
    parser.add_argument("--model")
    parser.add_argument("--only", nargs="+", choices=EXAMPLES, default=list(EXAMPLES))
    args = parser.parse_args()
    root = args.path / "examples" if (args.path / "examples").is_dir() else args.path
    passed = 0
    with tempfile.TemporaryDirectory() as folder:
        for name in args.only:
            model = args.model
            if name == "chat with tools" and model is None:
                model = str(reciting_folder(Path(folder) / "caller", json.dumps(CALL)))
            result = run(name, root.resolve(), model, Path(folder))
            passed += result == "passed"
            print(f"{name}: {result}", flush=True)
    print(f"{passed} of {len(args.only)} passed")
    return 0 if passed == len(args.only) else 1


def run(name: str, root: Path, model: str | None, folder: Path) -> str:
    found = [root / path for path in EXAMPLES[name] if (root / path).is_file()]
    if not found:
        return "not in this version of vLLM"
    tree = OnTwostroke(model).visit(ast.parse(found[0].read_text(encoding="utf-8")))
    script = folder / found[0].name
    script.write_text(ast.unparse(ast.fix_missing_locations(tree)), encoding="utf-8")
    command = [sys.executable, str(script), *ARGUMENTS.get(name, [])]
    began = time.monotonic()
    try:
        done = subprocess.run(command, cwd=root, capture_output=True, text=True, timeout=LIMIT_S)
    except subprocess.TimeoutExpired:
        return f"not finished after {LIMIT_S} s"
    print(done.stdout[-2000:], flush=True)
    if done.returncode == 0:
        return "passed"
    seconds = time.monotonic() - began
    return f"failed after {seconds:.0f} s: {(done.stderr.strip().splitlines() or ['?'])[-1]}"


if __name__ == "__main__":
    sys.exit(main())
