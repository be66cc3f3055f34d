"""Reports of a verdict: a terminal report and an HTML file."""

from __future__ import annotations

from html import escape

from rich.console import Console
from rich.table import Table
from rich.text import Text

from twostroke.measure.doctor.verdict import (
    CAUSES,
    HEALTHY,
    NOT_ENOUGH,
    ProposedExperiment,
    Verdict,
    headline,
)
from twostroke.measure.report.html import page, table


def show(console: Console, verdict: Verdict) -> None:
    style = {HEALTHY: "bold green", NOT_ENOUGH: "bold yellow"}.get(verdict.verdict, "bold red")
    console.print(Text(headline(verdict), style=style))
    console.print(Text(_evidence(verdict), style="dim"))
    for number, cause in enumerate(verdict.causes):
        console.print()
        console.print(Text(f"{cause.cause} ({cause.confidence:.0%} sure)", style="bold"))
        description = () if number == 0 else (CAUSES[cause.cause],)  # the headline has the first
        for sentence in (*description, *cause.evidence):
            console.print(Text(f"  {sentence}"))
    if verdict.ledger:
        console.print()
        rows = Table(box=None, pad_edge=False, header_style="bold")
        rows.add_column("where the time went")
        rows.add_column("share", justify="right", no_wrap=True)
        for part, share in _ledger(verdict):
            rows.add_row(part, f"{share:.1%}")
        console.print(rows)
    for note in verdict.notes:
        console.print(Text(note))
    if verdict.experiment is not None:
        console.print()
        console.print(Text(f"Try next: {_experiment(verdict.experiment)}", style="bold"))
        console.print(Text(f"  {verdict.experiment.why}"))


def _evidence(verdict: Verdict) -> str:
    server = verdict.server
    who = " ".join(filter(None, (server.get("kind"), server.get("version")))) or "the server"
    requests = f"{verdict.requests:,} request{'s' * (verdict.requests != 1)}"
    return f"{who}, {requests} in {verdict.seconds:.0f} s; evidence: {verdict.evidence_level}"


def _ledger(verdict: Verdict) -> list[tuple[str, float]]:
    """Return the shares of the ledger, with shares below 0.5% summed in one line."""
    rows = [(part, share) for part, share in verdict.ledger.items() if abs(share) >= 0.005]
    rest = 1.0 - sum(share for _, share in rows)
    return [*rows, ("all else", rest)] if abs(rest) >= 0.0005 else rows


def _experiment(one: ProposedExperiment) -> str:
    change = 1 - one.predicted_ratio
    return f"{one.options}  ({one.metric.upper()} should fall by {change:.0%})"


def verdict_page(verdict: Verdict) -> str:
    body: list[str] = []
    for cause in verdict.causes:
        sentences = "".join(f"<li>{escape(one)}</li>" for one in cause.evidence)
        body.append(
            f"<h2>{escape(CAUSES[cause.cause])}</h2>"
            f'<p class="dim">{cause.cause}, {cause.confidence:.0%} sure</p><ul>{sentences}</ul>'
        )
    if verdict.ledger:
        rows = [(part, f"{share:.1%}") for part, share in _ledger(verdict)]
        body += ["<h2>Where the time went</h2>", table(["part", "share"], rows)]
    body += [f"<p>{escape(note)}</p>" for note in verdict.notes]
    if verdict.experiment is not None:
        body.append(
            f"<h2>Try next</h2><p><code>{escape(_experiment(verdict.experiment))}</code></p>"
            f"<p>{escape(verdict.experiment.why)}</p>"
        )
    unknown = [(name, why) for name, why in verdict.not_examined.items()]
    body += ["<h2>Not examined</h2>", table(["cause", "why"], unknown)]
    return page("doctor", headline(verdict), _evidence(verdict), body, verdict.as_json())
