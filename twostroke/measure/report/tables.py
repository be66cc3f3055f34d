"""Results as a terminal shows them: nothing wider than the terminal, no word broken."""

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
    """In a sentence."""
    return f"{seconds:.2f} s" if seconds >= 1 else f"{1e3 * seconds:.1f} ms"


def show_serve(console: Console, found: dict[str, Any], percentiles: Sequence[float]) -> None:
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
            found.get(f"{cell}_{metric}_ms") for cell in cells if not (narrow and cell == "mean")
        ]
        table.add_row(title, *map(milliseconds, values))
    if found.get("search"):
        show_rows(console, SEARCH_HEAD, search_rows(found["search"]))
        console.print()
    console.print(Text(f"{found['model_id']} on {server_name(found['server'])}", style="bold"))
    console.print(
        f"{found['completed']:,} requests in {found['duration']:,.1f} s: "
        f"{found['request_throughput']:,.2f} a second, {found['output_throughput']:,.1f} tokens a "
        f"second written, {found['total_token_throughput']:,.1f} in all",
        highlight=False,
    )
    console.print(table)
    if found["request_goodput"] is not None:
        console.print(
            f"goodput: {found['request_goodput']:,.2f} requests a second met the goals",
            highlight=False,
        )
    if found.get("gap_causes"):
        console.print(Text(f"gaps: {cause_words(found['gap_causes']['seconds'])}"))
    show_problems(console, found)


def server_name(server: dict[str, Any]) -> str:
    return " ".join(filter(None, (server["kind"], server.get("version"))))


def cause_words(seconds: dict[str, float]) -> str:
    """Shares of the time between tokens, the largest first."""
    total = sum(seconds.values()) or 1.0
    order = sorted(seconds, key=lambda cause: -seconds[cause])
    said = [(seconds[cause] / total, CAUSE_NAMES[cause]) for cause in order]
    return ", ".join(f"{share:.0%} {name}" for share, name in said if share >= 0.005)


def search_rows(tried: Sequence[dict[str, Any]]) -> list[list[str]]:
    """The rates of a search, the lowest first."""
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


def show_problems(console: Console, found: dict[str, Any]) -> None:
    if found["certified"]:
        console.print("[green]certified[/green]: client on time, no errors, nothing from a cache")
        return
    console.print(Text("not certified:", style="bold red"))
    for problem in found["problems"]:
        console.print(Padding(Text(f"· {problem}"), (0, 0, 0, 2), expand=False))


def show_imported(console: Console, results: Sequence[dict[str, Any]]) -> None:
    """Files side by side: a column each."""
    table = Table(box=None, pad_edge=False, header_style="bold")
    table.add_column("", no_wrap=True)
    for found in results:
        table.add_column(found["tool"], justify="right", no_wrap=True)
    for metric, title in SHORT.items():
        for name in ("median", "p99"):
            cells = [found["metrics"][metric].get(name) for found in results]
            if any(cell is not None for cell in cells):
                table.add_row(f"{title}, {name}", *map(milliseconds, cells))
    for name, key in (("requests", "requests"), ("failed", "failed")):
        table.add_row(name, *(_number(found[key]) for found in results))
    table.add_row("requests/s", *(_number(found["request_throughput"]) for found in results))
    table.add_row("tokens/s", *(_number(found["output_throughput"]) for found in results))
    console.print(table)
    for found in results:
        for difference in found["differences"]:
            said = Text(f"· {found['tool']}: {difference}")
            console.print(Padding(said, (0, 0, 0, 2), expand=False))


def _number(value: float | None) -> str:
    if value is None:
        return "–"
    return f"{value:,.0f}" if value == int(value) else f"{value:,.2f}"
