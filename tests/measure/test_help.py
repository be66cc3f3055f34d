"""Help of the measuring commands, and what they take to start: an example each, and no torch."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from tests.server.running import running
from tests.tiny import tiny_folder, tiny_llm
from twostroke.cli import main

COMMANDS = ["bench serve", "bench latency", "bench throughput", "phases", "roofline", "trace"]
COMMANDS += ["profile", "why", "ab", "import", "quality"]
ROOT = Path(__file__).parents[2]
# All of them in one process, in which importing torch fails.
RUN = """
import sys
sys.modules["torch"] = None
import twostroke.measure.load.workload as workload
workload.FIRST_ID, workload.LAST_ID = 10, 299
from twostroke.cli import main
url, model, out = sys.argv[1:]
sizes = ["--model", model, "--device", "cpu", "--num-gpu-blocks-override", "64"]
sizes += ["--input-len", "8", "--output-len", "4"]
small = ["--num-prompts", "2", "--random-input-len", "8", "--random-output-len", "4"]
page = ["--html", f"{out}/page.html"]
for words in (
    ["bench", "serve", "--base-url", url, *small, *page, "--save-result", "--result-dir", out,
     "--result-filename", "r.json"],
    ["phases", url, "--prompt-tokens", "8", "--output-tokens", "4", *page],
    ["why", url, *page],
    ["trace", url, "-o", f"{out}/t.json"],
    ["profile", url, "--seconds", "0.1", *page],
    ["roofline", "qwen3-0.6b", "--hardware", "A100", "--server", url, *page],
    ["ab", "--aa", "--a", url, "--pairs", "2", *small],
    ["import", f"{out}/r.json"],
    *([["bench", "latency", *sizes, "--num-iters", "1", "--batch-size", "1", *page],
       ["bench", "throughput", *sizes, "--num-prompts", "2", *page],
       ["quality", model, "--tokens", "40", "--context", "20", "--quantization", "int8", *page],
      ] if model else []),
):
    status = main(words)
    assert status in (0, 3, 4, 5), (words, status)
print("all ran")
"""


@pytest.mark.parametrize("command", COMMANDS)
def test_help_has_an_example(command: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        main([*command.split(), "--help"])
    assert ended.value.code == 0
    said = " ".join(capsys.readouterr().out.split())
    assert f"Example: twostroke {command} " in said


def test_none_of_them_imports_torch(tmp_path: Path) -> None:
    from twostroke.kernels import cpu

    folder = tiny_folder(tmp_path / "tiny")
    with running(tiny_llm(folder)) as server:
        model = str(folder) if cpu.available() else ""  # without a server, an engine runs in it
        child = subprocess.run(
            [sys.executable, "-c", RUN, server.url, model, str(tmp_path)],
            cwd=ROOT,
            capture_output=True,
            text=True,
            timeout=120,
        )
    assert child.stdout.endswith("all ran\n"), child.stdout + child.stderr


def test_help_reads_only_what_it_shows() -> None:
    """`twostroke --help` is there at once: it reads neither a command nor what a server needs."""
    script = "import sys; from twostroke.cli import main\ntry: main(['--help'])\nexcept SystemExit:"
    script += " pass\nprint(sorted(name for name in sys.modules if name.startswith('twostroke.')))"
    child = subprocess.run(
        [sys.executable, "-c", script], cwd=ROOT, capture_output=True, text=True, timeout=60
    )
    read = child.stdout.splitlines()[-1]
    assert "twostroke.commands.parser" in read
    for name in ("commands.bench", "commands.serve", "config", "measure", "serve", "engine"):
        assert f"'twostroke.{name}" not in read
