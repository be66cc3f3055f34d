"""`read`: reads a `serve` command line like the command, in the test's process. `heavy_imports`:
lists the heavy modules that a command line imports."""

from __future__ import annotations

import subprocess
import sys
from typing import NamedTuple

from twostroke.cli import make_parser, parse
from twostroke.commands.flags import engine_config
from twostroke.commands.serve_plan import apply_plan
from twostroke.commands.serve_settings import pool_settings, serve_settings, with_file
from twostroke.config import EngineConfig
from twostroke.serve.settings import ServeSettings

PARSER = make_parser()
SERVE = PARSER.parse_args(["serve"]).parser
OPTIONS = SERVE._option_string_actions


HEAVY = (
    *("torch", "numpy", "rich", "tokenizers", "jinja2", "safetensors"),
    *("starlette", "uvicorn", "zmq", "yaml"),
)


class Read(NamedTuple):
    config: EngineConfig | None  # None: an error was found
    settings: ServeSettings | None
    problems: list[str]
    notice: str


def read(*words: str) -> Read:
    args = parse(["serve", *words], PARSER)
    assert args is not None
    args = with_file(args)
    apply_plan(args)
    config, settings = engine_config(args), serve_settings(args)
    pool_settings(args)
    problems, SERVE.problems = SERVE.problems, []
    return Read(config, settings, problems, SERVE.notice())


def heavy_imports(words: list[str], also: str = "") -> list[str]:
    """Run a command line in a new process, and return the heavy modules that it imported. `also`: a
    statement to run first."""
    code = (
        f"import sys\n{also}\nfrom twostroke.cli import main\n"
        f"try: main({words!r})\nexcept SystemExit: pass\n"
        f"print('loaded:', *(name for name in {HEAVY!r} if name in sys.modules))"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    return done.stdout.splitlines()[-1].removeprefix("loaded:").split()
