"""`twostroke quality`: measures the quality of a model in several formats."""

from __future__ import annotations

import argparse
import shlex
from pathlib import Path
from typing import TYPE_CHECKING, Any

from twostroke.commands.flags import (
    SERVER_ONLY,
    add_engine_arguments,
    add_model_argument,
    engine_settings,
    resolve_model,
    settings,
)
from twostroke.commands.output import add_result_arguments, check_output, show_result
from twostroke.commands.parser import Parser
from twostroke.config import EngineConfig
from twostroke.errors import ConfigError

if TYPE_CHECKING:
    from twostroke.measure.quality.quality import Setup

DESCRIPTION = (
    "Measure perplexity, KL divergence of next-token distributions and the share of equal most "
    "likely tokens of a model in one or more formats, against a base, on a text that twostroke "
    "includes. The table has a row for MODEL with the given options, and a row for each --try. The "
    "base is MODEL as stored, or --against. Example: twostroke quality MODEL --try '--quantization "
    "int8' --try '--quantization int4' --html quality.html"
)
OPERANDS = " [MODEL]"
# Settings that apply to the base and to every row. Other settings belong to one row.
SHARED = {
    "device",
    "threads",
    "threads_batch",
    "load_format",
    "tokenizer",
    "max_num_batched_tokens",
    "gpu_memory_utilization",
    "kv_cache_memory_bytes",
    "num_gpu_blocks_override",
    "enforce_eager",
}
# Settings without an option: the measurement sets them itself, or they do not affect it.
NOT_HERE = SERVER_ONLY | {"max_model_len", "max_num_seqs", "enable_prefix_caching"}
NOT_HERE |= {"tensor_parallel_size"}


def add_arguments(parser: Parser) -> None:
    parser.command_line_options = ("--try", "--against")
    add = parser.add_argument
    add_model_argument(parser)
    add("--against", metavar="BASE", help="the base: a model, or '[MODEL] OPTIONS'; default: MODEL")
    add(
        "--try",
        dest="tries",
        action="append",
        default=[],
        metavar="LINE",
        help="one more row: '[MODEL] OPTIONS'; may be given several times",
    )
    add(
        "--context",
        type=int,
        default=512,
        metavar="N",
        help="tokens of a text window (default: 512)",
    )
    add("--tokens", type=int, default=8192, metavar="N", help="tokens of the text (default: 8192)")
    add("--text", metavar="FILE", help="another text, in UTF-8")
    add_result_arguments(parser)
    add_engine_arguments(parser, leave_out=NOT_HERE)


def execute(args: argparse.Namespace) -> int:
    resolve_model(args)
    check_output(args.html)
    for name in ("context", "tokens"):
        if getattr(args, name) < 2:
            raise ConfigError(f"--{name} must be at least 2")
    base, others = _setups(args)
    text = _text(args.text)
    from rich.console import Console

    from twostroke.measure.quality.quality import measure_quality
    from twostroke.measure.quality.quality_report import quality_page, show_quality

    console = Console(stderr=True)
    found = measure_quality(
        base,
        others,
        text,
        args.context,
        args.tokens,
        lambda line: console.print(line, highlight=False, markup=False),
    )
    show_result(
        args, found, lambda console: show_quality(console, found), lambda: quality_page(found)
    )
    return 0


def _setups(args: argparse.Namespace) -> tuple[Setup, list[Setup]]:
    """Return the base and the rows. Errors in any of them are reported before the measurement."""
    from twostroke.measure.quality.quality import Setup

    chosen = engine_settings(args)
    shared = {name: value for name, value in chosen.items() if name in SHARED}
    own = {name: value for name, value in chosen.items() if name not in SHARED}
    model = {"model": own["model"]} if "model" in own else {}
    lines = [] if args.against is None else [args.against]
    parsed = [model | _parsed(line) for line in (*lines, *args.tries)]
    first, tries = (parsed[0], parsed[1:]) if lines else (model, parsed)
    rows = [own] if own != first or not (tries or lines) else []
    rows = [row for row in (*rows, *tries) if row != first]
    several = len({row.get("model") for row in (first, *rows)}) > 1
    setups = []
    for row in (first, *rows):
        if settings(args.parser, EngineConfig, shared | row) is None:
            args.parser.finish()
        setups.append(Setup(_name(row, several), shared | row))
    return setups[0], setups[1:]


def _parsed(line: str) -> dict[str, Any]:
    """Return the settings of '[MODEL] OPTIONS'."""
    parser = Parser(prog="twostroke quality", add_help=False)
    add_model_argument(parser)
    add_engine_arguments(parser, leave_out=NOT_HERE | SHARED)
    parser.set_defaults(parser=parser)
    try:
        words = shlex.split(line)
    except ValueError as error:
        raise ConfigError(f"{line!r} is not a list of options: {error}") from None
    args = parser.parse_args(words)
    resolve_model(args)
    parser.finish()
    return engine_settings(args)


def _name(row: dict[str, Any], several: bool) -> str:
    """Return the name of a row: its options, after the model's name if there are several models."""
    words = [Path(row.get("model") or "default model").name] if several else []
    for name, value in row.items():
        if name != "model":
            flag = name.replace("_", "-")
            words.append(flag if value is True else f"{flag} {value}")
    return " ".join(words) or "as the file has it"


def _text(path: str | None) -> str:
    from twostroke.measure.quality.quality import shipped_text

    if path is None:
        return shipped_text()
    try:
        return Path(path).read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        reason = error.strerror if isinstance(error, OSError) else "it is not UTF-8"
        raise ConfigError(f"{path} cannot be read: {reason}") from None
