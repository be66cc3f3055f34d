"""Reports as self-contained HTML files without scripts, for light and dark mode, desktop and phone.
Colours and shapes are those of the dashboard (`dash.html`)."""

from __future__ import annotations

import json
from collections.abc import Sequence
from html import escape
from typing import Any

from twostroke.measure.report.charts import short_number

STYLE = """
:root{color-scheme:light dark;--bg:light-dark(#f4f4f1,#0e1115);--card:light-dark(#fff,#161a20);
--line:light-dark(#e2e1db,#272d36);--ink:light-dark(#1b1d20,#e9ebee);
--soft:light-dark(#5c6067,#9aa3ae);--trough:light-dark(#ecebe6,#22272f);
--prefill:light-dark(#cc7900,#f0a92e);--decode:light-dark(#0b74c4,#3f9fe8);
--preemption:light-dark(#b0397f,#e07ab5);--host:light-dark(#80838a,#858d98);
--good:light-dark(#007a5a,#2fbf97);--queue:light-dark(#55585e,#c3c8cf);
--bad:light-dark(#9c2a00,#ff9a6b);--bad-bg:light-dark(#fff0e8,#33201a)}
*{box-sizing:border-box;margin:0}
body{background:var(--bg);color:var(--ink);padding:18px 20px 40px;min-width:300px;
font:14px/1.5 system-ui,-apple-system,"Segoe UI",Roboto,"Helvetica Neue",Arial,sans-serif;
font-variant-numeric:tabular-nums;overflow-wrap:break-word}
body>*{max-width:1320px;margin:0 auto 12px}
h1{font-size:22px;font-weight:650;letter-spacing:-.01em;line-height:1.25;overflow-wrap:anywhere}
h2{font-size:14px;font-weight:650;margin-bottom:8px}
h2 span,.soft,.note,.axis,.keys{font-weight:400;color:var(--soft)}
.brand{display:flex;align-items:center;gap:7px;margin-bottom:8px;color:var(--soft);font-weight:600}
.brand svg{width:18px;height:18px}
section,figure{background:var(--card);border:1px solid var(--line);border-radius:11px;
padding:14px 16px;min-width:0}
.verdict{border-radius:9px;padding:8px 14px;border:1px solid;color:var(--good);
background:var(--card)}
.verdict.bad{color:var(--bad);background:var(--bad-bg)}.verdict ul{padding-left:20px}
.tiles{display:grid;grid-template-columns:repeat(auto-fit,minmax(158px,1fr));gap:12px}
.tile{background:var(--card);border:1px solid var(--line);border-left:5px solid var(--c);
border-radius:11px;padding:10px 14px;color:var(--soft);font-size:12px;min-width:0}
.tile b{display:block;color:var(--ink);font-size:21px;font-weight:600;letter-spacing:-.015em;
line-height:1.3;overflow-wrap:anywhere}
.plots{display:grid;grid-template-columns:repeat(2,minmax(0,1fr));gap:12px}
.plots .wide,.plots>:only-child{grid-column:1/-1}
figcaption{display:flex;flex-wrap:wrap;align-items:baseline;gap:2px 10px;margin-bottom:2px}
figcaption b{font-weight:650}.note,.axis,.keys{font-size:12px}.axis.end{text-align:right}
.keys{display:flex;flex-wrap:wrap;gap:2px 14px;margin-left:auto}
.key{display:inline-flex;align-items:center;gap:6px}
.key::before{content:"";width:11px;height:11px;border-radius:3px;background:var(--c)}
.key.dots::before,.key.rings::before{border-radius:50%}
.key.rings::before{background:none;border:3px solid var(--c)}
.key.line::before,.key.dashes::before{width:16px;height:0;border-radius:0;background:none;
border-top:2px solid var(--c)}.key.dashes::before{border-top-style:dashed}
svg{width:100%;height:auto;display:block}
svg text{fill:var(--soft);font:13px system-ui,sans-serif}svg .mark-text{fill:var(--ink);
paint-order:stroke;stroke:var(--card);stroke-width:5px;stroke-linejoin:round}.narrow{display:none}
text.end{text-anchor:end}text.mid{text-anchor:middle}
.grid{stroke:var(--line)}.mark{stroke:var(--soft);stroke-dasharray:4 4}
polyline{fill:none;stroke:var(--c);stroke-width:2.2;stroke-linejoin:round}
polyline.dashes{stroke-dasharray:6 5}.fill{fill:var(--c);opacity:.16}
path.dots{fill:none;stroke:var(--c);stroke-width:5;stroke-linecap:round}
circle.dots{fill:var(--c)}circle.rings{fill:var(--card);stroke:var(--c);stroke-width:3.5}
.c-prefill{--c:var(--prefill)}.c-decode{--c:var(--decode)}.c-preemption{--c:var(--preemption)}
.c-host{--c:var(--host)}.c-communication{--c:var(--good)}.c-drafting{--c:var(--soft)}.c-good{--c:var(--good)}.c-bad{--c:var(--bad)}.c-queue{--c:var(--queue)}
.c-soft{--c:var(--soft)}
.wide-table{overflow-x:auto}table{border-collapse:collapse;width:100%}
td,th{padding:6px 0 6px 16px;text-align:right;white-space:nowrap}
th{font-weight:400;color:var(--soft);font-size:12px}td{border-top:1px solid var(--line)}
td:first-child,th:first-child{padding-left:0}td:first-child,th:first-child,.left{text-align:left}
.bar{display:flex;height:22px;border-radius:5px;overflow:hidden;background:var(--trough)}
.bar+.keys{margin:6px 0 4px}
.bar i{background:var(--c);min-width:0;box-shadow:inset -1px 0 var(--card)}
.ledger>div{display:grid;grid-template-columns:minmax(150px,24%) minmax(60px,1fr) 76px 60px;
grid-template-areas:"name bar took share" "why why why why";gap:0 14px;align-items:center;
padding:5px 0}.ledger b{font-weight:400;text-align:right;white-space:nowrap}
.ledger .bar{height:11px;grid-area:bar}.ledger .took{grid-area:took}.ledger .share{grid-area:share}
.ledger em{grid-area:why;font-style:normal;color:var(--soft);font-size:12px;overflow-wrap:anywhere}
dl{display:grid;grid-template-columns:max-content minmax(0,1fr);gap:4px 18px}
dt{color:var(--soft)}dd{min-width:0;overflow-wrap:anywhere}section ul{padding-left:20px}
details summary{cursor:pointer;font-weight:650}details[open] summary{margin-bottom:8px}
@media(max-width:760px){body{padding:12px 12px 24px}.plots{grid-template-columns:minmax(0,1fr)}
.broad{display:none}.narrow{display:block}svg text{font-size:20px}
.keys{margin-left:0;width:100%}.tiles{grid-template-columns:1fr 1fr}
td,th{padding-left:11px}td:first-child{white-space:normal;min-width:84px}
dl{grid-template-columns:minmax(0,1fr)}dd{margin-bottom:6px}
.ledger>div{grid-template-columns:minmax(0,1fr) 76px 60px;gap:3px 10px;
grid-template-areas:"name took share" "bar bar bar" "why why why"}}
"""
LOGO = (
    '<svg viewBox="0 0 16 16" aria-hidden="true"><path d="M2 14 6 2h3.2L5.2 14z" '
    'fill="var(--prefill)"/><path d="M7.6 14l4-12h3.2l-4 12z" fill="var(--decode)"/></svg>'
)


def page(command: str, subject: str, facts: str, body: Sequence[str], data: dict[str, Any]) -> str:
    """Return a report as an HTML file.

    `command`: the command that made the report. `facts`: the line below the subject. `data`: the
    figures as JSON for programs.
    """
    kept = json.dumps(data).replace("</", "<\\/")
    return (
        '<!doctype html><html lang="en"><head><meta charset="utf-8">'
        '<meta name="viewport" content="width=device-width,initial-scale=1">'
        '<link rel="icon" href="data:,">'
        f"<title>{escape(subject)} · twostroke {escape(command)}</title><style>{STYLE}</style>"
        f'</head><body><header><p class="brand">{LOGO}twostroke {escape(command)}</p>'
        f'<h1>{escape(subject)}</h1><p class="soft">{escape(facts)}</p></header>'
        + "".join(body)
        + f'<script type="application/json" id="result">{kept}</script></body></html>\n'
    )


def section(title: str, content: str, note: str = "") -> str:
    note_html = f" <span>{escape(note)}</span>" if note else ""
    return f"<section><h2>{escape(title)}{note_html}</h2>{content}</section>"


def plots(figures: Sequence[str]) -> str:
    return f'<div class="plots">{"".join(figures)}</div>' if any(figures) else ""


def table(head: Sequence[str], rows: Sequence[Sequence[str]], text_column: int = 0) -> str:
    """Return a table. `text_column` is aligned left, and the columns of numbers right."""

    def line(tag: str, cells: Sequence[str]) -> str:
        html = (
            f"<{tag}{' class=left' if index == text_column else ''}>{escape(cell)}</{tag}>"
            for index, cell in enumerate(cells)
        )
        return f"<tr>{''.join(html)}</tr>"

    lines = "".join(line("td", row) for row in rows)
    return f'<div class="wide-table"><table>{line("th", head)}{lines}</table></div>'


def tiles(figures: Sequence[tuple[str, str] | tuple[str, str, str]]) -> str:
    """Return tiles of a name, a value and optionally a colour."""
    cells = []
    for name, value, *color in figures:
        shade = f" c-{color[0]}" if color else ""
        cells.append(f'<div class="tile{shade}"><b>{escape(value)}</b>{escape(name)}</div>')
    return f'<div class="tiles">{"".join(cells)}</div>'


def bullets(lines: Sequence[str]) -> str:
    return f"<ul>{''.join(f'<li>{escape(line)}</li>' for line in lines)}</ul>"


def stacked(parts: Sequence[tuple[str, float, str]]) -> str:
    """Return one stacked bar with a legend, from the name, share and colour of each part."""
    cells = "".join(
        f'<i class="c-{color}" style="width:{100 * share:.2f}%" title="{escape(name)}"></i>'
        for name, share, color in parts
    )
    keys = "".join(
        f'<span class="key c-{color}">{escape(name)} {share:.0%}</span>'
        for name, share, color in parts
    )
    return f'<div class="bar">{cells}</div><p class="keys">{keys}</p>'


def ledger(rows: Sequence[tuple[str, float, str, str, str]]) -> str:
    """Return rows of a bar each, from the name, share, colour, time and reason of each row."""
    cells = []
    for name, share, color, took, why in rows:
        width = f"{100 * max(0.0, min(1.0, share)):.2f}%"
        cells.append(
            f'<div><span>{escape(name)}</span><div class="bar"><i class="c-{color}" '
            f'style="width:{width}"></i></div><b class="took">{escape(took)}</b>'
            f'<b class="share">{share:.1%}</b>'
            + (f"<em>{escape(why)}</em></div>" if why else "</div>")
        )
    return f'<div class="ledger">{"".join(cells)}</div>'


def footer(result: dict[str, Any]) -> str:
    """Return the end of every report: the definitions and the environment."""
    terms = _terms(result["definitions"])
    environment = dict(result["environment"])
    for name, value in (result.get("server") or {}).items():
        environment[f"server, {name}"] = value
    return (
        f"<section><details open><summary>Definitions</summary>{terms}</details>"
        f"</section><section><h2>Environment</h2>{_terms(environment)}</section>"
    )


def _terms(pairs: dict[str, Any]) -> str:
    items = []
    for name, value in pairs.items():
        if isinstance(value, float):
            shown = short_number(value)
        else:
            shown = "–" if value is None else str(value)
        items.append(f"<dt>{escape(str(name))}</dt><dd>{escape(shown)}</dd>")
    return f"<dl>{''.join(items)}</dl>"


def certificate(result: dict[str, Any]) -> str:
    if result["certified"]:
        return (
            '<p class="verdict">Certified: client on time, no errors, no unexpected cache hits.</p>'
        )
    return f'<div class="verdict bad"><b>Not certified</b>{bullets(result["problems"])}</div>'
