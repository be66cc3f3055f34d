"""Charts as SVG text. Colours are CSS classes of the page, which has a light and a dark mode. The
labels of the axes are HTML outside the picture, so that they are readable on a phone."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from html import escape

WIDTH, WIDE, HEIGHT = 640, 1320, 280
LEFT, RIGHT, TOP, BOTTOM = 88, 40, 16, 32
MARK_LINE, MARK_ROWS = 24, 9  # height and number of the text rows of marks
MARK_ROOM, TICK_ROOM = 260, 78  # maximum width of a text on a phone
MAX_TITLED_DOTS = 60  # with more points, a dot has no tooltip
Point = tuple[float, float]


@dataclass(frozen=True)
class Axis:
    """The label of an axis, the unit of its ticks, and its scale."""

    label: str
    unit: str = ""
    log: bool | None = False  # None: logarithmic if the values differ by a factor of 20


@dataclass(frozen=True)
class Series:
    """Points of one colour, with the CSS class `c-{color}`."""

    name: str
    points: Sequence[Point]
    color: str = "prefill"
    style: str = "line"  # line, area, dashes, dots or rings


class Scale:
    """The mapping of values to coordinates of the picture. `unit`: the unit in the tick labels."""

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


def short_number(value: float, unit: str = "") -> str:
    """Format a number for a tick, such as 200 ms, 1.5 s, 40%, 12k or 3T."""
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
    x: Axis,
    y: Axis,
    *,
    marks: Sequence[tuple[float, str]] = (),
    marks_below: bool = False,
    note: str = "",
    wide: bool = False,
) -> str:
    """Return a chart as an HTML figure, or "" without points.

    `marks`: vertical lines with a text, such as goals and percentiles. The texts are at the top or,
    with `marks_below`, at the bottom, where a rising curve leaves space.
    """
    points = [point for one in series for point in one.points]
    if not points:
        return ""
    xs = [value for value, _ in points] + [value for value, _ in marks]
    ys = [value for _, value in points]
    x_log, y_log = _is_log(xs, x.log), _is_log(ys, y.log)
    up = Scale(_low(ys, y_log), max(ys), HEIGHT - BOTTOM, TOP, y_log, y.unit)

    def picture(width: int, css_class: str) -> str:
        across = Scale(_low(xs, x_log), max(xs), LEFT, width - RIGHT, x_log, x.unit)
        drawn = [*_grid(across, up), *(_drawn(one, across, up) for one in series)]
        drawn += _marks(marks, across, marks_below)
        return (
            f'<svg class="{css_class}" viewBox="0 0 {width} {HEIGHT}" role="img" '
            f'aria-label="{escape(title)}">{"".join(drawn)}</svg>'
        )

    # A wide chart has a second, narrow picture, because its letters are too small on a phone.
    pictures = picture(WIDTH, "narrow" if wide else "")
    if wide:
        pictures += picture(WIDE, "broad")
    note_html = f'<span class="note">{escape(note)}</span>' if note else ""
    return (
        f"<figure{' class=wide' if wide else ''}><figcaption><b>{escape(title)}</b>{note_html}"
        f'{_legend(series)}</figcaption><p class="axis">{escape(y.label)}</p>{pictures}'
        f'<p class="axis end">{escape(x.label)}</p></figure>'
    )


def _is_log(values: Sequence[float], wanted: bool | None) -> bool:
    """Return `wanted`, or True if the largest value is 20 times the smallest and none is 0."""
    return wanted if wanted is not None else 0 < 20 * min(values) < max(values)


def _low(values: Sequence[float], log: bool) -> float:
    return min(values) if log else min(0.0, min(values))


def _grid(across: Scale, up: Scale) -> list[str]:
    parts = []
    for tick in up.ticks():
        y = up.at(tick)
        parts.append(
            f'<line class="grid" x1="{across.start}" x2="{across.end}" y1="{y:.1f}" y2="{y:.1f}"/>'
            f'<text class="end" x="{LEFT - 8}" y="{y:.1f}" dy=".35em">{short_number(tick, up.unit)}'
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
            f"{short_number(tick, across.unit)}</text>"
        )
    return parts


def _drawn(one: Series, across: Scale, up: Scale) -> str:
    places = [(across.at(x), up.at(y)) for x, y in one.points]
    if one.style in ("dots", "rings"):
        if len(places) > MAX_TITLED_DOTS:  # one path has a tenth of the bytes of many circles
            path = "".join(f"M{x:.1f} {y:.1f}h0" for x, y in places)
            return f'<path class="dots c-{one.color}" d="{path}"/>'
        circles = (
            f'<circle class="{one.style} c-{one.color}" cx="{x:.1f}" cy="{y:.1f}" r="4"><title>'
            f"{escape(one.name)} {short_number(px, across.unit)}, "
            f"{short_number(py, up.unit)}</title></circle>"
            for (x, y), (px, py) in zip(places, one.points, strict=True)
        )
        return "".join(circles)
    path = " ".join(f"{x:.1f},{y:.1f}" for x, y in places)
    line = f'<polyline class="{one.style} c-{one.color}" points="{path}"/>'
    if one.style == "area" and places:
        bottom = f"{HEIGHT - BOTTOM}"
        corners = f"{places[0][0]:.1f},{bottom} {path} {places[-1][0]:.1f},{bottom}"
        line = f'<polygon class="fill c-{one.color}" points="{corners}"/>{line}'
    return line


def _marks(marks: Sequence[tuple[float, str]], across: Scale, below: bool) -> list[str]:
    """Draw the marks, each with its text on its own row, so that texts do not overlap."""
    parts = []
    for index, (value, words) in enumerate(sorted(marks)):
        x, row = across.at(value), index % MARK_ROWS
        line = HEIGHT - BOTTOM - MARK_LINE * (row + 1) if below else TOP + MARK_LINE * row
        side, shift = ("end", -6) if x > across.end - MARK_ROOM else ("start", 6)
        parts.append(
            f'<line class="mark" x1="{x:.1f}" x2="{x:.1f}" y1="{TOP}" y2="{HEIGHT - BOTTOM}"/>'
            f'<text class="{side} mark-text" x="{x + shift:.1f}" y="{line}" '
            f'dy=".9em">{escape(words)}</text>'
        )
    return parts


def _legend(series: Sequence[Series]) -> str:
    named = [one for one in series if one.name and one.points]
    if len(named) < 2:
        return ""
    keys = (f'<span class="key {s.style} c-{s.color}">{escape(s.name)}</span>' for s in named)
    return f'<span class="keys">{"".join(keys)}</span>'


def cumulative(values: Sequence[float], max_points: int = 400) -> list[Point]:
    """Return the cumulative distribution in percent, as at most `max_points` points."""
    ordered = sorted(values)
    count = len(ordered)
    kept = (
        range(count)
        if count <= max_points
        else sorted({round(n * (count - 1) / max_points) for n in range(max_points + 1)})
    )
    return [(ordered[n], 100 * (n + 1) / count) for n in kept]


def thinned(points: Sequence[Point], max_points: int = 2000) -> list[Point]:
    """Return the highest point of each interval, so that no spike is lost."""
    if len(points) <= max_points:
        return list(points)
    size = math.ceil(len(points) / max_points)
    ordered = sorted(points)
    intervals = (ordered[n : n + size] for n in range(0, len(ordered), size))
    return [max(interval, key=lambda point: point[1]) for interval in intervals]
