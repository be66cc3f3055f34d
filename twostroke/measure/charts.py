"""Plots as SVG text. Colours are CSS variables of the page, so that they follow light and dark."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from html import escape

WIDTH, HEIGHT = 640, 280
LEFT, RIGHT, TOP, BOTTOM = 64, 16, 14, 44
Point = tuple[float, float]


@dataclass(frozen=True)
class Series:
    """Points, joined by a line or drawn as dots. `color`: a CSS variable's name."""

    name: str
    points: Sequence[Point]
    color: str = "prefill"
    dots: bool = False


class Axis:
    def __init__(
        self, low: float, high: float, start: float, end: float, log: bool = False
    ) -> None:
        if log:
            low, high = math.log10(max(low, 1e-12)), math.log10(max(high, 1e-12))
        if high <= low:
            high = low + 1
        self._low, self._high, self._log = low, high, log
        self._start, self._end = start, end

    def at(self, value: float) -> float:
        if self._log:
            value = math.log10(max(value, 1e-12))
        share = (value - self._low) / (self._high - self._low)
        return self._start + min(max(share, -0.05), 1.05) * (self._end - self._start)

    def ticks(self) -> list[float]:
        if self._log:
            first, last = math.ceil(self._low - 1e-9), math.floor(self._high + 1e-9)
            decades = [10.0**n for n in range(first, last + 1)]
            if len(decades) > 2:
                return decades
            marks = [m * 10.0**n for n in range(first - 1, last + 1) for m in (1, 2, 5)]
            inside = (math.log10(mark) for mark in marks)
            return [m for m, x in zip(marks, inside, strict=True) if self._low <= x <= self._high]
        step = nice_step((self._high - self._low) / 5)
        first = math.ceil(self._low / step - 1e-9)
        count = math.floor(self._high / step + 1e-9) - first + 1
        return [(first + n) * step for n in range(count)]


def nice_step(rough: float) -> float:
    power = 10.0 ** math.floor(math.log10(rough))
    return next(m * power for m in (1, 2, 5, 10) if m * power >= rough * 0.999)


def number(value: float) -> str:
    if value == 0:
        return "0"
    size = abs(value)
    for limit, divisor, unit in ((1e12, 1e12, "T"), (1e9, 1e9, "G"), (1e6, 1e6, "M")):
        if size >= limit:
            return f"{value / divisor:g}{unit}"
    if size >= 10_000:
        return f"{value / 1e3:g}k"
    return f"{value:.4g}"


def chart(
    title: str,
    series: Sequence[Series],
    x_label: str,
    y_label: str,
    *,
    x_log: bool = False,
    y_log: bool = False,
    marks: Sequence[tuple[float, str]] = (),
) -> str:
    """A figure. `marks`: vertical lines with words, such as goals and percentiles."""
    points = [point for one in series for point in one.points]
    if not points:
        return ""
    xs = [x for x, _ in points] + [x for x, _ in marks]
    ys = [y for _, y in points]
    x_low = min(xs) if x_log else min(0.0, *xs) if len(xs) > 1 else 0.0
    y_low = min(ys) if y_log else min(0.0, min(ys))
    across = Axis(x_low, max(xs), LEFT, WIDTH - RIGHT, x_log)
    up = Axis(y_low, max(ys), HEIGHT - BOTTOM, TOP, y_log)
    parts = [
        f'<figure><figcaption>{escape(title)}</figcaption><svg viewBox="0 0 {WIDTH} {HEIGHT}" '
        f'role="img" aria-label="{escape(title)}">'
    ]
    for tick in up.ticks():
        y = up.at(tick)
        parts.append(
            f'<line class="grid" x1="{LEFT}" x2="{WIDTH - RIGHT}" y1="{y:.1f}" y2="{y:.1f}"/>'
        )
        parts.append(f'<text class="end" x="{LEFT - 8}" y="{y + 4:.1f}">{number(tick)}</text>')
    for tick in across.ticks():
        x = across.at(tick)
        parts.append(
            f'<text class="mid" x="{x:.1f}" y="{HEIGHT - BOTTOM + 18}">{number(tick)}</text>'
        )
    for one in series:
        places = [(across.at(x), up.at(y)) for x, y in one.points]
        if one.dots:
            radius = 4 if len(places) <= 20 else 2.2
            parts += [
                f'<circle class="{one.color}" cx="{x:.1f}" cy="{y:.1f}" r="{radius}"/>'
                for x, y in places
            ]
        else:
            path = " ".join(f"{x:.1f},{y:.1f}" for x, y in places)
            parts.append(f'<polyline class="{one.color}" points="{path}"/>')
    for x_value, words in marks:
        x = across.at(x_value)
        parts.append(
            f'<line class="mark" x1="{x:.1f}" x2="{x:.1f}" y1="{TOP}" y2="{HEIGHT - BOTTOM}"/>'
        )
        side, shift = ("end", -4) if x > WIDTH / 2 else ("", 4)
        parts.append(
            f'<text class="{side}" x="{x + shift:.1f}" y="{TOP + 11}">{escape(words)}</text>'
        )
    parts.append(
        f'<text class="mid" x="{(LEFT + WIDTH) / 2}" y="{HEIGHT - 8}">{escape(x_label)}</text>'
    )
    parts.append(
        f'<text class="mid" transform="translate(14 {(TOP + HEIGHT - BOTTOM) / 2}) rotate(-90)">'
        f"{escape(y_label)}</text></svg>"
    )
    named = [one for one in series if one.name]
    if len(named) > 1:
        keys = "".join(f'<span class="key {s.color}">{escape(s.name)}</span>' for s in named)
        parts.append(f'<p class="keys">{keys}</p>')
    parts.append("</figure>")
    return "".join(parts)


def cumulative(values: Sequence[float], most: int = 400) -> list[Point]:
    """The share of values that are at most x, in at most `most` points."""
    ordered = sorted(values)
    count = len(ordered)
    kept = (
        range(count)
        if count <= most
        else sorted({round(n * (count - 1) / most) for n in range(most + 1)})
    )
    return [(ordered[n], 100 * (n + 1) / count) for n in kept]


def thinned(points: Sequence[Point], most: int = 2000) -> list[Point]:
    """At most `most` points: the highest of each stretch, so that no spike is lost."""
    if len(points) <= most:
        return list(points)
    size = math.ceil(len(points) / most)
    ordered = sorted(points)
    stretches = (ordered[n : n + size] for n in range(0, len(ordered), size))
    return [max(stretch, key=lambda point: point[1]) for stretch in stretches]
