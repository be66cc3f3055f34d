"""`load_curves`: how the latencies of layouts grow with the load."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from twostroke.measure.load.traces import TraceRequest, scaled
from twostroke.planner.predict import LayoutForecast
from twostroke.planner.search import EngineChoice, SimulatedLayout

SHARES = (0.4, 0.7, 1.0, 1.3, 1.6)  # of the trace's rate
MAX_LAYOUTS = 4
FIGURES = ("p99_ttft_ms", "p99_tpot_ms", "met")
Json = dict[str, Any]
Simulate = Callable[[LayoutForecast, EngineChoice, list[TraceRequest]], LayoutForecast]


def load_curves(
    trace: Sequence[TraceRequest],
    choice: EngineChoice,
    forecast: LayoutForecast,
    tried: Sequence[SimulatedLayout],
    target: float,
    simulate: Simulate,
) -> list[Json]:
    """Return a curve for the chosen layout, and for the best layout of other kinds of engines.
    `simulate`: simulate the layout of a forecast with another trace, without intervals."""
    chosen = {(choice.name, forecast.layout.pooled): (choice, forecast)}
    for one in sorted(tried, key=lambda one: one.price):
        if one.forecast.figures["met"].low >= target:
            chosen.setdefault((one.kind.name, one.forecast.layout.pooled), (one.kind, one.forecast))
    seconds = max(trace[-1].at_s, 1e-9)
    curves = []
    for kind, found in list(chosen.values())[:MAX_LAYOUTS]:
        points = []
        for share in SHARES:
            figures = simulate(found, kind, scaled(list(trace), speed=share)).figures
            point = {name: figures[name].expected for name in FIGURES if name in figures}
            points.append({"rate": share * len(trace) / seconds} | point)
        curves.append({"hardware": kind.name, "layout": found.layout.name, "points": points})
    return curves
