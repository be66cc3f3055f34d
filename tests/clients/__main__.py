"""Clients of other projects, run against a real server with the default model.

    python -m tests.clients [NAME…] [--url http://HOST:PORT/v1 --model NAME]

Each client is a script NAME_loop.py, whose `main(base_url, model)` raises an error if the client
does not work with the server. Its packages are installed into its own virtual environment in
clients/NAME of the cache folder (`TWOSTROKE_CACHE`, else ~/.cache/twostroke). CI does not run the
clients, because they need package registries.
"""

from __future__ import annotations

import argparse
import os
import re
import subprocess
import sys
import tempfile
import time
import venv
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from twostroke import child_process

HERE = Path(__file__).parent
# The packages of each client, which pip installs; npm for AI SDK.
PACKAGES: dict[str, tuple[str, ...]] = {
    "openai": ("openai", "pydantic"),
    "langchain": ("langchain", "langchain-openai"),
    "ai_sdk": ("ai", "@ai-sdk/openai-compatible", "zod"),
    "instructor": ("instructor",),
    "litellm": ("litellm", "mcp"),
    "llama_index": ("llama-index-core", "llama-index-llms-openai-like"),
    "llm": ("llm",),
    "anthropic": ("anthropic",),
    "ollama": ("ollama",),
    "openai_agents": ("openai-agents",),
    "pydantic_ai": ("pydantic-ai-slim[anthropic,openai]",),
}
START_S, CLIENT_S = 120, 600


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("names", nargs="*", help=f"clients: {', '.join(PACKAGES)}; default: all")
    parser.add_argument("--url", help="the URL of a running server, with /v1")
    parser.add_argument("--model", default="SmolLM2-135M-Instruct")
    args = parser.parse_args()
    if unknown := set(args.names) - set(PACKAGES):
        parser.error(
            f"unknown client {', '.join(sorted(unknown))}; the clients are {', '.join(PACKAGES)}"
        )
    names = args.names or [name for name in PACKAGES if _script(name).exists()]
    failed = []
    with server(args.url) as url:
        for name in names:
            print(f"── {name}", flush=True)
            if not _run(name, url, args.model):
                failed.append(name)
    print(f"{len(names) - len(failed)} of {len(names)} clients work; not: {failed or 'none'}")
    return bool(failed)


@contextmanager
def server(url: str | None = None) -> Iterator[str]:
    """Start a server unless `url` is one. It ends with this process, even if that is killed."""
    if url is not None:
        yield url
        return
    with tempfile.TemporaryFile("w+") as log:
        process = child_process.start("twostroke", "serve", "--port", "0", stdout=log, stderr=log)
        try:
            yield _address(process, log.fileno()) + "/v1"
        finally:
            process.terminate()
            process.wait(60)


def _address(process: subprocess.Popen[bytes], log: int) -> str:
    until = time.monotonic() + START_S
    while time.monotonic() < until and process.poll() is None:
        output = os.pread(log, 1 << 16, 0).decode(errors="replace")
        if found := re.search(r"http://127[\d.]+:\d+", output):
            return found[0]
        time.sleep(0.05)
    raise SystemExit(f"the server did not start: {os.pread(log, 1 << 16, 0).decode()}")


def _run(name: str, url: str, model: str) -> bool:
    folder = _cache() / "clients" / name
    try:
        command = _node(folder, name) if _script(name).suffix == ".mjs" else _python(folder, name)
        subprocess.run([*command, url, model], check=True, timeout=CLIENT_S, cwd=folder)
    except (subprocess.CalledProcessError, subprocess.TimeoutExpired) as error:
        print(f"   {name}: {error}", flush=True)
        return False
    return True


def _python(folder: Path, name: str) -> list[str]:
    python, done = folder / "bin" / "python", folder / "installed"
    packages = "\n".join(PACKAGES[name])
    if not done.exists() or done.read_text() != packages:
        venv.create(folder, with_pip=True, clear=True)
        subprocess.run([python, "-m", "pip", "install", "-q", *PACKAGES[name]], check=True)
        done.write_text(packages)
    call = f"import sys; sys.path.insert(0, {str(HERE)!r}); import {name}_loop as client; "
    return [str(python), "-c", f"{call}client.main(*sys.argv[1:])"]


def _node(folder: Path, name: str) -> list[str]:
    folder.mkdir(parents=True, exist_ok=True)
    if not (folder / "node_modules").exists():
        (folder / "package.json").write_text('{"type": "module"}')
        subprocess.run(["npm", "install", "--silent", *PACKAGES[name]], cwd=folder, check=True)
    script = folder / _script(name).name  # node looks for packages beside the script
    script.write_text(_script(name).read_text())
    return ["node", str(script)]


def _script(name: str) -> Path:
    node = HERE / f"{name}_loop.mjs"
    return node if node.exists() else HERE / f"{name}_loop.py"


def _cache() -> Path:
    named = os.environ.get("TWOSTROKE_CACHE")
    return Path(named) if named else Path.home() / ".cache" / "twostroke"


if __name__ == "__main__":
    sys.exit(main())
