"""Plots as SVG text. Colours are classes of the page, so that they follow light and dark; what an
axis shows is told in HTML around the picture, where it stays readable on a phone."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from html import escape

WIDTH, WIDE, HEIGHT = 640, 1320, 280
LEFT, RIGHT, TOP, BOTTOM = 88, 40, 16, 32
MARK_LINE, MARK_ROWS = 24, 9  # lines of words of marks
MARK_ROOM, TICK_ROOM = 260, 78  # what words take at most, on a phone
MANY = 60  # points, from which on a dot says no more what it is
Point = tuple[float, float]


@dataclass(frozen=True)
class Series:
    """Points of one colour (a class `c-…` of the page). `kind`: line, area, dashes, dots, rings."""

    name: str
    points: Sequence[Point]
    color: str = "prefill"
    kind: str = "line"


class Axis:
    """Values to places on the picture. `unit`: of the values, said at every tick."""

    def __init__(
        self,
        low: float,
        high: float,
        start: float,
        end: float,
        log: bool = False,
        unit: str = "",
    ) -> None:
        if log:
            low, high = math.log10(max(low, 1e-12)), math.log10(max(high, 1e-12))
        if high <= low:
            high = low + 1
        self._low, self._high, self._log = low, high, log
        self.start, self.end = start, end
        self.unit = unit

    def at(self, value: float) -> float:
        if self._log:
            value = math.log10(max(value, 1e-12))
        share = (value - self._low) / (self._high - self._low)
        return self.start + min(max(share, -0.05), 1.05) * (self.end - self.start)

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


def number(value: float, unit: str = "") -> str:
    """As short as a tick must be: 200 ms, 1.5 s, 40%, 12k, 3T."""
    if unit == "ms":
        big = abs(value) >= 1000
        return f"{value / 1e3:.4g} s" if big else f"{value:.4g} ms"
    if unit:
        return f"{value:.4g}{unit}"
    size = abs(value)
    for limit, suffix in ((1e12, "T"), (1e9, "G"), (1e6, "M"), (1e4, "k")):
        if size >= limit:
            divisor = 1e3 if suffix == "k" else limit
            return f"{value / divisor:.4g}{suffix}"
    return f"{value:.4g}"


def chart(
    title: str,
    series: Sequence[Series],
    x_label: str,
    y_label: str,
    *,
    x_unit: str = "",
    y_unit: str = "",
    x_log: bool | None = False,
    y_log: bool | None = False,
    marks: Sequence[tuple[float, str]] = (),
    marks_below: bool = False,
    note: str = "",
    wide: bool = False,
) -> str:
    """A figure; "" without points. `marks`: vertical lines with words, such as goals and
    percentiles; their words stand at the top or, with `marks_below`, where a curve that rises is
    not. `x_log`, `y_log` None: where values differ a lot."""
    points = [point for one in series for point in one.points]
    if not points:
        return ""
    xs = [x for x, _ in points] + [x for x, _ in marks]
    ys = [y for _, y in points]
    x_log, y_log = _is_log(xs, x_log), _is_log(ys, y_log)
    up = Axis(_low(ys, y_log), max(ys), HEIGHT - BOTTOM, TOP, y_log, y_unit)

    def picture(width: int, kind: str) -> str:
        across = Axis(_low(xs, x_log), max(xs), LEFT, width - RIGHT, x_log, x_unit)
        drawn = [*_grid(across, up), *(_drawn(one, across, up) for one in series)]
        drawn += _marks(marks, across, marks_below)
        return (
            f'<svg class="{kind}" viewBox="0 0 {width} {HEIGHT}" role="img" '
            f'aria-label="{escape(title)}">{"".join(drawn)}</svg>'
        )

    # A picture that is as wide as the page would have tiny letters on a phone: it is there twice.
    pictures = picture(WIDTH, "narrow" if wide else "")
    if wide:
        pictures += picture(WIDE, "broad")
    said = f'<span class="note">{escape(note)}</span>' if note else ""
    return (
        f"<figure{' class=wide' if wide else ''}><figcaption><b>{escape(title)}</b>{said}"
        f'{_legend(series)}</figcaption><p class="axis">{escape(y_label)}</p>{pictures}'
        f'<p class="axis end">{escape(x_label)}</p></figure>'
    )


def _is_log(values: Sequence[float], wanted: bool | None) -> bool:
    """Of its own accord where the largest is 20 times the smallest, and none is 0."""
    return wanted if wanted is not None else 0 < 20 * min(values) < max(values)


def _low(values: Sequence[float], log: bool) -> float:
    return min(values) if log else min(0.0, min(values))


def _grid(across: Axis, up: Axis) -> list[str]:
    parts = []
    for tick in up.ticks():
        y = up.at(tick)
        parts.append(
            f'<line class="grid" x1="{across.start}" x2="{across.end}" y1="{y:.1f}" y2="{y:.1f}"/>'
            f'<text class="end" x="{LEFT - 8}" y="{y:.1f}" dy=".35em">{number(tick, up.unit)}'
            "</text>"
        )
    last = -math.inf
    for tick in across.ticks():
        x = across.at(tick)
        if x - last < TICK_ROOM:
            continue
        last = x
        parts.append(
            f'<text class="mid" x="{x:.1f}" y="{HEIGHT - BOTTOM + 8}" dy=".8em">'
            f"{number(tick, across.unit)}</text>"
        )
    return parts


def _drawn(one: Series, across: Axis, up: Axis) -> str:
    places = [(across.at(x), up.at(y)) for x, y in one.points]
    if one.kind in ("dots", "rings"):
        if len(places) > MANY:  # one path is a tenth of as many circles
            path = "".join(f"M{x:.1f} {y:.1f}h0" for x, y in places)
            return f'<path class="dots c-{one.color}" d="{path}"/>'
        circles = (
            f'<circle class="{one.kind} c-{one.color}" cx="{x:.1f}" cy="{y:.1f}" r="4"><title>'
            f"{escape(one.name)} {number(px, across.unit)}, {number(py, up.unit)}</title></circle>"
            for (x, y), (px, py) in zip(places, one.points, strict=True)
        )
        return "".join(circles)
    path = " ".join(f"{x:.1f},{y:.1f}" for x, y in places)
    line = f'<polyline class="{one.kind} c-{one.color}" points="{path}"/>'
    if one.kind == "area" and places:
        bottom = f"{HEIGHT - BOTTOM}"
        corners = f"{places[0][0]:.1f},{bottom} {path} {places[-1][0]:.1f},{bottom}"
        line = f'<polygon class="fill c-{one.color}" points="{corners}"/>{line}'
    return line


def _marks(marks: Sequence[tuple[float, str]], across: Axis, below: bool) -> list[str]:
    """Each has a line of words of its own, so that none is over another's."""
    parts = []
    for number, (value, words) in enumerate(sorted(marks)):
        x, row = across.at(value), number % MARK_ROWS
        line = HEIGHT - BOTTOM - MARK_LINE * (row + 1) if below else TOP + MARK_LINE * row
        side, shift = ("end", -6) if x > across.end - MARK_ROOM else ("start", 6)
        parts.append(
            f'<line class="mark" x1="{x:.1f}" x2="{x:.1f}" y1="{TOP}" y2="{HEIGHT - BOTTOM}"/>'
            f'<text class="{side} said" x="{x + shift:.1f}" y="{line}" '
            f'dy=".9em">{escape(words)}</text>'
        )
    return parts


def _legend(series: Sequence[Series]) -> str:
    named = [one for one in series if one.name and one.points]
    if len(named) < 2:
        return ""
    keys = (f'<span class="key {s.kind} c-{s.color}">{escape(s.name)}</span>' for s in named)
    return f'<span class="keys">{"".join(keys)}</span>'


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
