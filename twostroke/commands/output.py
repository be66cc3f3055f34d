"""The output of measuring commands: a table, JSON, and a report in one HTML file."""

from __future__ import annotations

import argparse
import json
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

from twostroke.errors import ConfigError

if TYPE_CHECKING:
    from rich.console import Console


def add_result_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--html", metavar="FILE", help="write a report with plots to one HTML file")
    parser.add_argument("--json", action="store_true", help="print the result as JSON")


def check_output(*paths: str | None) -> None:
    """Raise `ConfigError` if a file cannot be written, before the measurement."""
    for path in filter(None, paths):
        folder = Path(path).absolute().parent
        if Path(path).is_dir() or not folder.is_dir():
            problem = "this is a folder" if Path(path).is_dir() else f"there is no folder {folder}"
            raise ConfigError(f"{path} cannot be written: {problem}")


def show_result(
    args: argparse.Namespace,
    found: Any,
    show: Callable[[Console], None],
    page: Callable[[], str],
) -> None:
    """Print the table or, with --json, the figures, and write --html. With --json messages go to
    stderr, so that stdout has only JSON."""
    from rich.console import Console

    if args.json:
        print(json.dumps(found))
    else:
        show(Console())
    if args.html:
        write_file(args, args.html, page(), "report")


def write_file(args: argparse.Namespace, path: str, text: str, label: str) -> None:
    """Write a file and print its path with a label."""
    from rich.console import Console

    try:
        Path(path).write_text(text, encoding="utf-8")
    except OSError as error:
        raise ConfigError(f"{path} cannot be written: {error.strerror}") from None
    Console(stderr=args.json).print(f"{label}: {path}", highlight=False, soft_wrap=True)
