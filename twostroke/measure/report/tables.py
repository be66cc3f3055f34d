"""Results as tables for a terminal, no wider than the terminal."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

from rich.console import Console
from rich.padding import Padding
from rich.table import Table
from rich.text import Text

NAMES = {
    "ttft": "TTFT, to the first token",
    "tpot": "TPOT, per output token",
    "itl": "ITL, between tokens",
    "e2el": "end to end",
}
CAUSE_NAMES = {
    "decode": "decode",
    "prefill": "prefill of others",
    "preemption": "preemption",
    "host": "host",
    "communication": "communication of ranks",
    "drafting": "draft model",
    "outside": "outside the engine",
}
SEARCH_HEAD = ("requests a second", "goals met by", "goodput", "TTFT, median", "TPOT, median", "")
SHORT = {"ttft": "TTFT", "tpot": "TPOT", "itl": "ITL", "e2el": "end to end"}


def milliseconds(value: float | None) -> str:
    if value is None or not math.isfinite(value):
        return "–"
    if value >= 10_000:
        return f"{value / 1e3:,.1f} s"
    return f"{value:,.0f} ms" if value >= 100 else f"{value:.2f} ms"


def duration(seconds: float) -> str:
    """Format a duration for a sentence."""
    return f"{seconds:.2f} s" if seconds >= 1 else f"{1e3 * seconds:.1f} ms"


def show_serve(console: Console, result: dict[str, Any], percentiles: Sequence[float]) -> None:
    narrow = console.width < 70
    table = Table(box=None, pad_edge=False, header_style="bold", show_edge=False)
    table.add_column("", no_wrap=True)
    for name in ("mean", "median", *(f"p{share:g}" for share in percentiles)):
        if narrow and name == "mean":
            continue
        table.add_column(name, justify="right", no_wrap=True)
    for metric, title in (SHORT if narrow else NAMES).items():
        cells = ["mean", "median", *(f"p{share:g}" for share in percentiles)]
        values = [
            result.get(f"{cell}_{metric}_ms") for cell in cells if not (narrow and cell == "mean")
        ]
        table.add_row(title, *map(milliseconds, values))
    if result.get("search"):
        show_rows(console, SEARCH_HEAD, search_rows(result["search"]))
        console.print()
    console.print(Text(f"{result['model_id']} on {server_name(result['server'])}", style="bold"))
    console.print(
        f"{result['completed']:,} requests in {result['duration']:,.1f} s: "
        f"{result['request_throughput']:,.2f} a second, {result['output_throughput']:,.1f} output "
        f"tokens a second, {result['total_token_throughput']:,.1f} tokens a second in total",
        highlight=False,
    )
    console.print(table)
    if result["request_goodput"] is not None:
        console.print(
            f"goodput: {result['request_goodput']:,.2f} requests a second met the goals",
            highlight=False,
        )
    if result.get("gap_causes"):
        console.print(Text(f"gaps: {cause_words(result['gap_causes']['seconds'])}"))
    show_problems(console, result)


def server_name(server: dict[str, Any]) -> str:
    return " ".join(filter(None, (server["kind"], server.get("version"))))


def cause_words(seconds: dict[str, float]) -> str:
    """Return the shares of the time between tokens as a text, the largest first."""
    total = sum(seconds.values()) or 1.0
    order = sorted(seconds, key=lambda cause: -seconds[cause])
    shares = [(seconds[cause] / total, CAUSE_NAMES[cause]) for cause in order]
    return ", ".join(f"{share:.0%} {name}" for share, name in shares if share >= 0.005)


def search_rows(tried: Sequence[dict[str, Any]]) -> list[list[str]]:
    """Return a row for each rate that a search tried, the lowest rate first."""
    return [
        [
            f"{row['request_rate']:,.2f}",
            f"{row['share']:.0%}",
            f"{row['goodput'] or 0.0:,.2f}",
            milliseconds(row["median_ttft_ms"]),
            milliseconds(row["median_tpot_ms"]),
            "met" if row["met"] else "not met",
        ]
        for row in sorted(tried, key=lambda row: row["request_rate"])
    ]


def show_rows(console: Console, head: Sequence[str], rows: Sequence[Sequence[str]]) -> None:
    table = Table(box=None, pad_edge=False, header_style="bold")
    for number, name in enumerate(head):
        table.add_column(name, justify="right" if number else "left", no_wrap=bool(number))
    for row in rows:
        table.add_row(*map(Text, row))
    console.print(table)


def show_problems(console: Console, result: dict[str, Any]) -> None:
    if result["certified"]:
        console.print(
            "[green]certified[/green]: client on time, no errors, no unexpected cache hits"
        )
        return
    console.print(Text("not certified:", style="bold red"))
    for problem in result["problems"]:
        console.print(Padding(Text(f"· {problem}"), (0, 0, 0, 2), expand=False))


def show_imported(console: Console, results: Sequence[dict[str, Any]]) -> None:
    """Print one column for each imported file."""
    table = Table(box=None, pad_edge=False, header_style="bold")
    table.add_column("", no_wrap=True)
    for result in results:
        table.add_column(result["tool"], justify="right", no_wrap=True)
    for metric, title in SHORT.items():
        for name in ("median", "p99"):
            cells = [result["metrics"][metric].get(name) for result in results]
            if any(cell is not None for cell in cells):
                table.add_row(f"{title}, {name}", *map(milliseconds, cells))
    for name, key in (("requests", "requests"), ("failed", "failed")):
        table.add_row(name, *(_number(result[key]) for result in results))
    table.add_row("requests/s", *(_number(result["request_throughput"]) for result in results))
    table.add_row("tokens/s", *(_number(result["output_throughput"]) for result in results))
    console.print(table)
    for result in results:
        for difference in result["differences"]:
            line = Text(f"· {result['tool']}: {difference}")
            console.print(Padding(line, (0, 0, 0, 2), expand=False))


def _number(value: float | None) -> str:
    if value is None:
        return "–"
    return f"{value:,.0f}" if value == int(value) else f"{value:,.2f}"
