"""Reports as one HTML file each: no script, nothing loaded, readable in light and dark."""

from __future__ import annotations

import json
from collections.abc import Sequence
from html import escape
from typing import TYPE_CHECKING, Any

from twostroke.measure.charts import Series, chart, cumulative, thinned
from twostroke.measure.result import values_ms
from twostroke.measure.tables import NAMES, milliseconds

if TYPE_CHECKING:
    from twostroke.measure.bench import Outcome

STYLE = """
:root{color-scheme:light dark;--ink:#1b2330;--dim:#5d6b7e;--paper:#fff;--card:#f5f7fa;
--line:#dde3ea;--prefill:#2563eb;--decode:#d9480f;--good:#15803d;--bad:#b91c1c}
@media(prefers-color-scheme:dark){:root{--ink:#e6ebf2;--dim:#93a1b5;--paper:#0f141b;
--card:#171e28;--line:#2a3442;--prefill:#6ea2ff;--decode:#ff9b61;--good:#4ade80;--bad:#f87171}}
*{box-sizing:border-box}body{margin:0 auto;max-width:1360px;padding:24px 20px 60px;
background:var(--paper);color:var(--ink);font:15px/1.5 system-ui,sans-serif}
h1{font-size:22px;margin:0 0 2px}h2{font-size:16px;margin:28px 0 8px}p{margin:4px 0}
.dim{color:var(--dim)}.good{color:var(--good)}.bad{color:var(--bad)}
.tiles{display:grid;grid-template-columns:repeat(auto-fit,minmax(150px,1fr));gap:10px;margin:16px 0}
.tile{background:var(--card);border:1px solid var(--line);border-radius:8px;padding:10px 14px}
.tile b{display:block;font-size:22px;font-weight:600;font-variant-numeric:tabular-nums}
.plots{display:grid;grid-template-columns:repeat(auto-fit,minmax(min(460px,100%),1fr));gap:14px}
figure{margin:0;background:var(--card);border:1px solid var(--line);border-radius:8px;padding:12px}
figcaption{font-weight:600;margin-bottom:4px}svg{width:100%;height:auto;display:block}
svg text{fill:var(--dim);font:12px system-ui,sans-serif}
.end{text-anchor:end}.mid{text-anchor:middle}
.grid{stroke:var(--line)}.mark{stroke:var(--dim);stroke-dasharray:4 4}
polyline{fill:none;stroke-width:2;stroke-linejoin:round}polyline.prefill{stroke:var(--prefill)}
polyline.decode{stroke:var(--decode)}circle.prefill{fill:var(--prefill)}
circle.decode{fill:var(--decode)}circle.good{fill:var(--good)}circle.bad{fill:var(--bad)}
polyline.good{stroke:var(--good)}polyline.dim{stroke:var(--dim);stroke-dasharray:5 4}
.keys{display:flex;gap:16px;flex-wrap:wrap;color:var(--dim);font-size:13px}
.key::before{content:"";display:inline-block;width:10px;height:10px;border-radius:2px;
margin-right:6px;background:currentColor}.key.prefill::before{color:var(--prefill)}
.key.decode::before{color:var(--decode)}.key.good::before{color:var(--good)}
.key.bad::before{color:var(--bad)}.wide{overflow-x:auto}
table{border-collapse:collapse;font-variant-numeric:tabular-nums}td,th{padding:5px 14px 5px 0;
text-align:right;border-bottom:1px solid var(--line);white-space:nowrap}
td:first-child,th:first-child{text-align:left}dt{font-weight:600;margin-top:8px}dd{margin:0}
pre{background:var(--card);border:1px solid var(--line);border-radius:8px;padding:12px;
overflow:auto;font-size:12px}summary{cursor:pointer}
"""


def page(title: str, body: Sequence[str], data: dict[str, Any]) -> str:
    """`data`: the figures themselves, kept in the file for programs."""
    kept = json.dumps(data).replace("</", "<\\/")
    return (
        '<!doctype html><html lang="en"><head><meta charset="utf-8">'
        '<meta name="viewport" content="width=device-width,initial-scale=1">'
        '<link rel="icon" href="data:,">'
        f"<title>{escape(title)}</title><style>{STYLE}</style></head><body>"
        + "".join(body)
        + f'<script type="application/json" id="result">{kept}</script></body></html>\n'
    )


def table(head: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    top = "".join(f"<th>{escape(cell)}</th>" for cell in head)
    lines = "".join(
        "<tr>" + "".join(f"<td>{escape(cell)}</td>" for cell in row) + "</tr>" for row in rows
    )
    return f'<div class="wide"><table><tr>{top}</tr>{lines}</table></div>'


def tiles(pairs: Sequence[tuple[str, str]]) -> str:
    cells = (f'<div class="tile"><b>{escape(v)}</b>{escape(name)}</div>' for name, v in pairs)
    return f'<div class="tiles">{"".join(cells)}</div>'


def definitions(found: dict[str, Any]) -> str:
    terms = "".join(
        f"<dt>{escape(name)}</dt><dd>{escape(text)}</dd>"
        for name, text in found["definitions"].items()
    )
    said = json.dumps({"environment": found["environment"], "server": found["server"]}, indent=1)
    return (
        f"<h2>What the figures mean</h2><dl>{terms}</dl>"
        f"<h2>Where they were taken</h2><pre>{escape(said)}</pre>"
    )


def verdict(found: dict[str, Any]) -> str:
    if found["certified"]:
        return '<p class="good">Certified: client on time, no errors, nothing from a cache.</p>'
    reasons = "".join(f"<li>{escape(problem)}</li>" for problem in found["problems"])
    return f'<p class="bad"><b>Not certified:</b></p><ul class="bad">{reasons}</ul>'


def serve_page(outcome: Outcome) -> str:
    """The report of `bench serve`."""
    found, run = outcome.result, outcome.run
    values = values_ms(run.samples)
    shares = [
        key.split("_")[0] for key in found if key.startswith("p") and key.endswith("_ttft_ms")
    ]
    columns = ["mean", "median", *shares]
    rows = [
        [title, *(milliseconds(found[f"{column}_{metric}_ms"]) for column in columns)]
        for metric, title in NAMES.items()
    ]
    last = shares[-1] if shares else "median"
    figures = [
        ("requests a second", f"{found['request_throughput']:,.2f}"),
        ("tokens written a second", f"{found['output_throughput']:,.1f}"),
        (f"TTFT, {last}", milliseconds(found[f"{last}_ttft_ms"])),
        (f"TPOT, {last}", milliseconds(found[f"{last}_tpot_ms"])),
    ]
    if found["request_goodput"] is not None:
        figures.append(("goodput, requests a second", f"{found['request_goodput']:,.2f}"))
    marks = [(found["median_ttft_ms"], "median"), (found[f"{last}_ttft_ms"], last)]
    gap_marks = [(found["median_itl_ms"], "median"), (found[f"{last}_itl_ms"], last)]
    due = [
        (sample.scheduled_s - run.started_s, 1e3 * sample.ttft_s)
        for sample in run.samples
        if sample.ok
    ]
    gaps = [
        (at - run.started_s, 1e3 * gap)
        for sample in run.samples
        for at, gap in zip(sample.content_s[1:], sample.itls_s, strict=True)
    ]
    plots = [
        chart(
            "TTFT: share of requests",
            [Series("", cumulative(values["ttft"]))],
            "ms",
            "% of requests at most this",
            marks=marks,
        ),
        chart(
            "ITL: share of gaps between tokens",
            [Series("", cumulative(values["itl"]), "decode")],
            "ms",
            "% of gaps at most this",
            marks=gap_marks,
        )
        if values["itl"]
        else "",
        chart(
            "TTFT by when the request was due",
            [Series("", thinned(due), dots=True)],
            "seconds after the start",
            "ms",
        ),
        chart(
            "Gaps between tokens over time",
            [Series("", thinned(gaps), "decode", dots=True)],
            "seconds after the start",
            "ms",
        ),
    ]
    if found.get("search"):
        tried = sorted((row["request_rate"], row["goodput"] or 0.0) for row in found["search"])
        met = [(r["request_rate"], r["goodput"]) for r in found["search"] if r["met"]]
        offered = [(rate, rate) for rate, _ in tried]
        plots.append(
            chart(
                "Goodput by request rate",
                [
                    Series("goodput", tried),
                    Series("goals met", met, "good", dots=True),
                    Series("offered", offered, "dim"),
                ],
                "requests a second sent",
                "requests a second within the goals",
            )
        )
    server = found["server"]
    who = " ".join(filter(None, (server["kind"], server.get("version"))))
    body = [
        f"<h1>{escape(str(found['model_id']))} on {escape(who)}</h1>",
        f'<p class="dim">{found["completed"]:,} requests in {found["duration"]:,.1f} s, '
        f"{found['total_input_tokens']:,} tokens in, {found['total_output_tokens']:,} out, "
        f"{escape(found['date'])}</p>",
        verdict(found),
        tiles(figures),
        table(["", *columns], rows),
        "<h2>Over the run</h2>",
        f'<div class="plots">{"".join(plots)}</div>',
        definitions(found),
    ]
    return page(f"twostroke bench: {found['model_id']}", body, found)
