"""The interference curve as an SVG: what a long prompt does to running streams, by budget.

    python -m bench.gpu --picture FILE SVG

Bars: the worst gap of the streams as a multiple of their steady one. Line: the prompt's time to
first token. Written by hand; its colours follow the reader's light or dark scheme.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from bench.gpu_report import bound_of

WIDTH, HEIGHT = 640, 360
LEFT, RIGHT, TOP, BOTTOM = 64, 64, 64, 56
STYLE = """
  svg { color-scheme: light dark; font: 13px system-ui, sans-serif; }
  .page { fill: #ffffff } .text { fill: #24292f } .faint { fill: #57606a }
  .grid { stroke: #d0d7de } .bar { fill: #0969da }
  .line { stroke: #bc4c00; fill: none; stroke-width: 2 } .dot { fill: #bc4c00 }
  .ttft { fill: #bc4c00 } .title { font-size: 15px; font-weight: 600 }
  @media (prefers-color-scheme: dark) {
    .page { fill: #0d1117 } .text { fill: #e6edf3 } .faint { fill: #9198a1 }
    .grid { stroke: #3d444d } .bar { fill: #4493f8 }
    .line { stroke: #f0883e } .dot, .ttft { fill: #f0883e }
  }
"""


def draw(rows: Sequence[dict[str, Any]]) -> str:
    """`rows`: the `interference` part of a result of `bench.gpu`, one a budget."""
    ordered = sorted(rows, key=lambda row: (not row.get("stall"), row["budget"]))
    most = _round_up(max(row["worst_over_steady"] for row in ordered))
    longest = _round_up(max(row["long_ttft_s"] for row in ordered))
    prompt, steady = ordered[0]["prompt"], ordered[0]["steady_ms"]
    title = f"32 streams decoding at {steady:.1f} ms, a prompt of {prompt:,} tokens arrives"
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {HEIGHT}" role="img">',
        f"<title>{title}</title>",
        f"<style>{STYLE}</style>",
        f'<rect class="page" width="{WIDTH}" height="{HEIGHT}" rx="6"/>',
        _text(LEFT, 26, title, "text title", "start"),
        _text(LEFT, 46, "worst gap, as a multiple of the steady one", "faint", "start"),
        _text(WIDTH - RIGHT, 46, "its time to first token", "ttft", "end"),
        _text(
            WIDTH / 2, HEIGHT - 12, "what bounds a step: the default, or so many tokens", "faint"
        ),
    ]
    for n in range(5):
        y = _y(n / 4)
        parts.append(
            f'<line class="grid" x1="{LEFT}" x2="{WIDTH - RIGHT}" y1="{y:.1f}" y2="{y:.1f}"/>'
        )
        parts.append(_text(LEFT - 8, y + 4, f"{most * n / 4:g}×", "faint", "end"))
        parts.append(_text(WIDTH - RIGHT + 8, y + 4, f"{longest * n / 4:g} s", "ttft", "start"))
    step = (WIDTH - LEFT - RIGHT) / len(ordered)
    points = []
    for n, row in enumerate(ordered):
        x = LEFT + (n + 0.5) * step
        y = _y(row["worst_over_steady"] / most)
        parts.append(
            f'<rect class="bar" x="{x - 30:.1f}" y="{y:.1f}" width="60" '
            f'height="{_y(0) - y:.1f}" rx="3"/>'
        )
        label = f"{row['worst_over_steady']:.1f}× ({row['worst_ms']:.0f} ms)"
        parts.append(_text(x, y - 6, label, "text"))
        parts.append(_text(x, HEIGHT - BOTTOM + 18, bound_of(row), "text"))
        points.append((x, _y(row["long_ttft_s"] / longest), row["long_ttft_s"]))
    path = " ".join(f"{x:.1f},{y:.1f}" for x, y, _ in points)
    parts.append(f'<polyline class="line" points="{path}"/>')
    for x, y, seconds in points:
        parts.append(f'<circle class="dot" cx="{x:.1f}" cy="{y:.1f}" r="4"/>')
        parts.append(_text(x + 38, y + 4, f"{seconds:.2f} s", "ttft", "start"))
    return "\n".join([*parts, "</svg>", ""])


def _y(share: float) -> float:
    return HEIGHT - BOTTOM - share * (HEIGHT - TOP - BOTTOM)


def _text(x: float, y: float, text: str, kind: str, anchor: str = "middle") -> str:
    return f'<text class="{kind}" x="{x:.1f}" y="{y:.1f}" text-anchor="{anchor}">{text}</text>'


def _round_up(value: float) -> float:
    """The next number that is easily cut in four, with room above for a label."""
    unit = 10.0**-3
    while unit * 4 < value * 1.1:
        for factor in (1, 2, 2.5, 5):
            if unit * factor * 4 >= value * 1.1:
                return unit * factor * 4
        unit *= 10
    return unit * 4
