"""Coding agents, run against a real server with a scripted model: three turns each.

    python -m tests.clients.coding_agents [claude codex opencode aider]

Each agent gets one request, calls its shell tool twice, and prints the last text of the model.
aider, which calls no tools, gets three requests to write a file. The programs must be on PATH: `npm
install -g @anthropic-ai/claude-code @openai/codex opencode-ai`, `pip install aider-chat`. They run
with their default configuration in an empty folder, with their own home folder.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Final

from tests.clients.scripted_server import LAST_TEXT
from twostroke import child_process

START_S, AGENT_S = 120, 300
ASK: Final = "Write one.txt, and copy it to two.txt."

Environment = dict[str, str]


def main() -> int:
    names = sys.argv[1:] or list(AGENTS)
    failed = []
    with server() as url:
        for name in names:
            with tempfile.TemporaryDirectory() as folder:
                work = Path(folder) / "work"
                work.mkdir()
                home = {"HOME": folder, "XDG_CONFIG_HOME": "", "XDG_DATA_HOME": ""}
                home["PWD"] = str(work)  # opencode takes its project folder from PWD
                try:
                    AGENTS[name](url, work, {**os.environ, **home})
                    print(f"{name}: works", flush=True)
                except Exception as error:
                    failed.append(name)
                    print(f"{name}: {error}", flush=True)
    return bool(failed)


@contextmanager
def server() -> Iterator[str]:
    """Start the scripted server. It ends with this process, even if that is killed."""
    process = child_process.start("tests.clients.scripted_server", stdout=subprocess.PIPE)
    try:
        assert process.stdout is not None
        yield process.stdout.readline().decode().strip()
    finally:
        process.terminate()
        process.wait()


def claude(url: str, work: Path, env: Environment) -> None:
    env |= {"ANTHROPIC_BASE_URL": url, "ANTHROPIC_API_KEY": "none", "ANTHROPIC_MODEL": "scripted"}
    env |= {"ANTHROPIC_DEFAULT_HAIKU_MODEL": "scripted"}
    env |= {"CLAUDE_CODE_DISABLE_NONESSENTIAL_TRAFFIC": "1"}
    _check(work, _run(["claude", "-p", ASK, "--allowedTools", "Bash"], work, env))


def codex(url: str, work: Path, env: Environment) -> None:
    folder = Path(env["HOME"]) / ".codex"
    folder.mkdir()
    (folder / "config.toml").write_text(
        'model = "scripted"\nmodel_provider = "local"\n\n[model_providers.local]\n'
        f'name = "local"\nbase_url = "{url}/v1"\nwire_api = "responses"\n'
    )
    trusted = ["--skip-git-repo-check", "--dangerously-bypass-approvals-and-sandbox"]
    _check(work, _run(["codex", "exec", *trusted, ASK], work, env))


def opencode(url: str, work: Path, env: Environment) -> None:
    provider = {
        "npm": "@ai-sdk/openai-compatible",
        "options": {"baseURL": f"{url}/v1", "apiKey": "none"},
        "models": {"scripted": {}},
    }
    (work / "opencode.json").write_text(json.dumps({"provider": {"local": provider}}))
    _check(work, _run(["opencode", "run", "-m", "local/scripted", ASK], work, env))


def aider(url: str, work: Path, env: Environment) -> None:
    env |= {"OPENAI_API_BASE": f"{url}/v1", "OPENAI_API_KEY": "none"}
    quiet = ["--yes-always", "--no-git", "--no-check-update", "--no-show-model-warnings"]
    quiet += ["--analytics-disable", "--edit-format", "whole", "--model", "openai/scripted"]
    for word in ("one", "two", "three"):
        _run(["aider", *quiet, "--message", f"Please write {word} into {word}.txt"], work, env)
        assert (work / f"{word}.txt").read_text().strip() == word


def _run(command: list[str], work: Path, env: Environment) -> str:
    done = subprocess.run(
        command,
        cwd=work,
        env=env,
        timeout=AGENT_S,
        text=True,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
    )
    if done.returncode:
        raise RuntimeError(f"exit status {done.returncode}: {done.stdout[-1500:]}")
    return done.stdout


def _check(work: Path, output: str) -> None:
    two = work / "two.txt"
    if not two.exists() or two.read_text() != "one\n":
        raise RuntimeError(f"two.txt is not written: {output[-1500:]}")
    if LAST_TEXT not in output:
        raise RuntimeError(f"the last text is missing: {output[-1500:]}")


AGENTS: Final[dict[str, Callable[[str, Path, Environment], None]]] = {
    "claude": claude,
    "codex": codex,
    "opencode": opencode,
    "aider": aider,
}

if __name__ == "__main__":
    sys.exit(main())
