"""How a measuring command hands over what it found: a table, JSON, and a report in one file."""

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
    parser.add_argument("--html", metavar="FILE", help="a report with plots, in one file")
    parser.add_argument("--json", action="store_true", help="print the result as JSON")


def check_output(*paths: str | None) -> None:
    """Before anything is measured: a file that cannot be written would be told of at the end."""
    for path in filter(None, paths):
        folder = Path(path).absolute().parent
        if Path(path).is_dir() or not folder.is_dir():
            problem = "this is a folder" if Path(path).is_dir() else f"there is no folder {folder}"
            raise ConfigError(f"{path} cannot be written: {problem}")


def tell(
    args: argparse.Namespace,
    found: Any,
    show: Callable[[Console], None],
    page: Callable[[], str],
) -> None:
    """Prints the table or, with --json, the figures; writes --html. Whatever else is said of files
    goes to stderr then, so that stdout is JSON alone."""
    from rich.console import Console

    if args.json:
        print(json.dumps(found))
    else:
        show(Console())
    if args.html:
        write(args, args.html, page(), "report")


def write(args: argparse.Namespace, path: str, text: str, what: str) -> None:
    from rich.console import Console

    try:
        Path(path).write_text(text, encoding="utf-8")
    except OSError as error:
        raise ConfigError(f"{path} cannot be written: {error.strerror}") from None
    Console(stderr=args.json).print(f"{what}: {path}", highlight=False, soft_wrap=True)
