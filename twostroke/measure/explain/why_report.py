"""Reports of `twostroke why`, as tables, JSON and an HTML page: the ledger of each request, which
splits the time of the request into parts."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from rich.console import Console
from rich.table import Table
from rich.text import Text

from twostroke.measure.explain.why import PARTS, Entry, RequestLedger, short
from twostroke.measure.load.result import environment
from twostroke.measure.report.html import footer, page, section, stacked, tiles
from twostroke.measure.report.html import ledger as ledger_table
from twostroke.measure.report.tables import milliseconds

DEFINITIONS = {
    "total": "from the arrival of the request at the server to the end of its answer, on the "
    "server's clock, without network and client",
    "own prefill": "of each step that computed the request's prompt, the time multiplied by the "
    "request's share of the tokens in the step",
    "prefill of others": "the time that prompts of other requests added to the steps between the "
    "tokens. It is attributed, not measured: the estimated time of a step with decode alone counts "
    "as decode, and the rest of the step as prefill",
}
MIN_SHOWN_SHARE = 0.005  # smaller parts are left out of the bar


def why_json(ledgers: Sequence[RequestLedger], server: dict[str, Any]) -> dict[str, Any]:
    """Return the ledgers as JSON, with definitions and the environment."""
    return {
        "schema_version": 1,
        "server": server,
        "requests": [ledger.as_json() for ledger in ledgers],
        "definitions": DEFINITIONS,
        "environment": environment(),
    }


def show_why(console: Console, ledgers: Sequence[RequestLedger]) -> None:
    """Print each ledger as a table, the longest part first."""
    for ledger in ledgers:
        console.print(Text(ledger.sentence(), style="bold"))
        table = Table(box=None, pad_edge=False, show_header=False)
        table.add_column()
        for _ in range(2):
            table.add_column(justify="right", no_wrap=True)
        table.add_column(style="dim")
        for entry in _sorted(ledger):
            share = f"{entry.seconds / ledger.total_s:.1%}"
            table.add_row(entry.part, milliseconds(1e3 * entry.seconds), share, _because(entry))
        console.print(table)


def why_page(ledgers: Sequence[RequestLedger], server: dict[str, Any]) -> str:
    """Return the HTML page. The ledger of the slowest request is the first of `ledgers`."""
    slowest = ledgers[0]
    body = [_request_section(ledger) for ledger in ledgers]
    data = why_json(ledgers, server)
    facts = f"{len(ledgers)} finished requests on {server['model']}, {server['device']}"
    total = milliseconds(1e3 * slowest.total_s)
    subject = f"Request {short(slowest.request_id)}: parts of its {total}"
    return page("why", subject, facts, [*body, footer(data)], data)


def _request_section(ledger: RequestLedger) -> str:
    """Return the HTML of one ledger. "queue", "prefill" and "decode" are names of colours."""
    ttft_s = sum(entry.seconds for entry in ledger.entries if _is_before_first_token(entry))
    figures = [
        ("total", milliseconds(1e3 * ledger.total_s), "queue"),
        ("time to the first token", milliseconds(1e3 * ttft_s), "prefill"),
        ("after the first token", milliseconds(1e3 * (ledger.total_s - ttft_s)), "decode"),
        (
            "prompt tokens"
            + (f", {ledger.cached_tokens:,} cached" if ledger.cached_tokens else ""),
            f"{ledger.prompt_tokens:,}",
            "prefill",
        ),
        (
            f"output tokens; finish reason: {ledger.finish_reason}",
            f"{ledger.output_tokens:,}",
            "decode",
        ),
    ]
    parts = [
        (entry.part, max(0.0, entry.seconds / ledger.total_s), _colour(entry))
        for entry in ledger.entries
        if entry.seconds >= MIN_SHOWN_SHARE * ledger.total_s
    ]
    rows = [
        (
            entry.part,
            entry.seconds / ledger.total_s,
            _colour(entry),
            milliseconds(1e3 * entry.seconds),
            _because(entry),
        )
        for entry in _sorted(ledger)
    ]
    return tiles(figures) + section(ledger.sentence(), stacked(parts) + ledger_table(rows))


def _colour(entry: Entry) -> str:
    return PARTS[entry.part][0] if entry.part in PARTS else "preemption"


def _is_before_first_token(entry: Entry) -> bool:
    if entry.part in PARTS:
        return PARTS[entry.part][1]
    return entry.part.endswith("during prefill")


def _sorted(ledger: RequestLedger) -> list[Entry]:
    return sorted(ledger.entries, key=lambda entry: -entry.seconds)


def _because(entry: Entry) -> str:
    """Return the cause of an entry, with up to three of the requests that caused the entry."""
    return entry.because + (
        f": {', '.join(map(short, entry.culprits[:3]))}" if entry.culprits else ""
    )
