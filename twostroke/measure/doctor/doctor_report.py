"""A verdict, and an exam's result, for people: in a terminal and as one HTML file."""

from __future__ import annotations

from html import escape

from rich.console import Console
from rich.table import Table
from rich.text import Text

from twostroke.measure.doctor.verdict import (
    CAUSES,
    HEALTHY,
    NOT_ENOUGH,
    Experiment,
    Verdict,
    headline,
)
from twostroke.measure.report.html import page, table


def show(console: Console, found: Verdict) -> None:
    style = {HEALTHY: "bold green", NOT_ENOUGH: "bold yellow"}.get(found.verdict, "bold red")
    console.print(Text(headline(found), style=style))
    console.print(Text(_evidence(found), style="dim"))
    for number, cause in enumerate(found.causes):
        console.print()
        console.print(Text(f"{cause.cause} ({cause.confidence:.0%} sure)", style="bold"))
        told = () if number == 0 else (CAUSES[cause.cause],)  # the headline has the first
        for sentence in (*told, *cause.evidence):
            console.print(Text(f"  {sentence}"))
    if found.ledger:
        console.print()
        rows = Table(box=None, pad_edge=False, header_style="bold")
        rows.add_column("where the time went")
        rows.add_column("share", justify="right", no_wrap=True)
        for part, share in _ledger(found):
            rows.add_row(part, f"{share:.1%}")
        console.print(rows)
    for note in found.notes:
        console.print(Text(note))
    if found.experiment is not None:
        console.print()
        console.print(Text(f"Try next: {_experiment(found.experiment)}", style="bold"))
        console.print(Text(f"  {found.experiment.why}"))


def _evidence(found: Verdict) -> str:
    server = found.server
    who = " ".join(filter(None, (server.get("kind"), server.get("version")))) or "the server"
    requests = f"{found.requests:,} request{'s' * (found.requests != 1)}"
    return f"{who}, {requests} in {found.seconds:.0f} s; evidence: {found.evidence_level}"


def _ledger(found: Verdict) -> list[tuple[str, float]]:
    """What is too little to be read is one line, so that the lines still sum to the whole."""
    rows = [(part, share) for part, share in found.ledger.items() if abs(share) >= 0.005]
    rest = 1.0 - sum(share for _, share in rows)
    return [*rows, ("all else", rest)] if abs(rest) >= 0.0005 else rows


def _experiment(one: Experiment) -> str:
    change = 1 - one.predicted_ratio
    return f"{one.options}  ({one.metric.upper()} should fall by {change:.0%})"


def verdict_page(found: Verdict) -> str:
    body: list[str] = []
    for cause in found.causes:
        sentences = "".join(f"<li>{escape(one)}</li>" for one in cause.evidence)
        body.append(
            f"<h2>{escape(CAUSES[cause.cause])}</h2>"
            f'<p class="dim">{cause.cause}, {cause.confidence:.0%} sure</p><ul>{sentences}</ul>'
        )
    if found.ledger:
        rows = [(part, f"{share:.1%}") for part, share in _ledger(found)]
        body += ["<h2>Where the time went</h2>", table(["part", "share"], rows)]
    body += [f"<p>{escape(note)}</p>" for note in found.notes]
    if found.experiment is not None:
        body.append(
            f"<h2>Try next</h2><p><code>{escape(_experiment(found.experiment))}</code></p>"
            f"<p>{escape(found.experiment.why)}</p>"
        )
    unknown = [(name, why) for name, why in found.not_examined.items()]
    body += ["<h2>Not examined</h2>", table(["cause", "why"], unknown)]
    return page("doctor", headline(found), _evidence(found), body, found.as_json())
