"""Reports of `why`: one ledger for each request, as a table and an HTML page."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from rich.console import Console
from rich.table import Table
from rich.text import Text

from twostroke.measure.explain.why import PARTS, Entry, RequestLedger, short
from twostroke.measure.load.result import environment
from twostroke.measure.report.html import footer, ledger, page, section, stacked, tiles
from twostroke.measure.report.tables import milliseconds

DEFINITIONS = {
    "total": "from the arrival of the request at the server to the end of its answer, on the "
    "server's clock, without network and client",
    "own prefill": "the request's share of the tokens in each step that computed its prompt",
    "prefill of others": "the time that prompts of other requests added to the steps between the "
    "tokens: decode has the time that its slots take alone, prefill the rest (attributed, not "
    "measured)",
}


def why_json(ledgers: Sequence[RequestLedger], server: dict[str, Any]) -> dict[str, Any]:
    return {
        "schema_version": 1,
        "server": server,
        "requests": [one.as_json() for one in ledgers],
        "definitions": DEFINITIONS,
        "environment": environment(),
    }


def show_why(console: Console, ledgers: Sequence[RequestLedger]) -> None:
    for one in ledgers:
        console.print(Text(one.sentence(), style="bold"))
        table = Table(box=None, pad_edge=False, show_header=False)
        table.add_column()
        for _ in range(2):
            table.add_column(justify="right", no_wrap=True)
        table.add_column(style="dim")
        for entry in _sorted(one):
            share = f"{entry.seconds / one.total_s:.1%}"
            table.add_row(entry.part, milliseconds(1e3 * entry.seconds), share, _because(entry))
        console.print(table)


def why_page(ledgers: Sequence[RequestLedger], server: dict[str, Any]) -> str:
    slowest = ledgers[0]
    body = [_request(one) for one in ledgers]
    data = why_json(ledgers, server)
    facts = f"{len(ledgers)} of the requests that ended on {server['model']}, {server['device']}"
    subject = f"Where {milliseconds(1e3 * slowest.total_s)} of {short(slowest.request_id)} went"
    return page("why", subject, facts, [*body, footer(data)], data)


def _request(one: RequestLedger) -> str:
    first = sum(entry.seconds for entry in one.entries if _look(entry)[1])
    figures = [
        ("total", milliseconds(1e3 * one.total_s), "queue"),
        ("time to the first token", milliseconds(1e3 * first), "prefill"),
        ("after the first token", milliseconds(1e3 * (one.total_s - first)), "decode"),
        (
            "prompt tokens" + (f", {one.cached_tokens:,} cached" if one.cached_tokens else ""),
            f"{one.prompt_tokens:,}",
            "prefill",
        ),
        (f"output tokens; finish reason: {one.finish_reason}", f"{one.output_tokens:,}", "decode"),
    ]
    parts = [
        (entry.part, max(0.0, entry.seconds / one.total_s), _look(entry)[0])
        for entry in one.entries
        if entry.seconds >= 0.005 * one.total_s
    ]
    rows = [
        (
            entry.part,
            entry.seconds / one.total_s,
            _look(entry)[0],
            milliseconds(1e3 * entry.seconds),
            _because(entry),
        )
        for entry in _sorted(one)
    ]
    return tiles(figures) + section(one.sentence(), stacked(parts) + ledger(rows))


def _look(entry: Entry) -> tuple[str, bool]:
    return PARTS.get(entry.part, ("preemption", entry.part.endswith("during prefill")))


def _sorted(one: RequestLedger) -> list[Entry]:
    return sorted(one.entries, key=lambda entry: -entry.seconds)


def _because(entry: Entry) -> str:
    return entry.because + (
        f": {', '.join(map(short, entry.culprits[:3]))}" if entry.culprits else ""
    )
