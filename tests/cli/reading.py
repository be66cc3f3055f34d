"""A `serve` command line, read in this process as the command reads it."""

from __future__ import annotations

from typing import NamedTuple

from twostroke.cli import make_parser, parse
from twostroke.commands.flags import engine_config
from twostroke.commands.serve_settings import pool_settings, serve_settings, with_file
from twostroke.config import EngineConfig
from twostroke.serve.settings import ServeSettings

PARSER = make_parser()
SERVE = PARSER.parse_args(["serve"]).parser
OPTIONS = SERVE._option_string_actions


class Read(NamedTuple):
    config: EngineConfig | None  # None: a problem was found
    settings: ServeSettings | None
    problems: list[str]
    notice: str


def read(*words: str) -> Read:
    args = parse(["serve", *words], PARSER)
    assert args is not None
    args = with_file(args)
    config, settings = engine_config(args), serve_settings(args)
    pool_settings(args)
    problems, SERVE.problems = SERVE.problems, []
    return Read(config, settings, problems, SERVE.notice())
