"""Fit the planner's step times on some measured pairs of model and system, and test them on others.

    python -m bench.plan_error POINTS.csv.gz [--requests REQUESTS.jsonl.gz] [--peer PEER.json]
                               [--ship] [--json RESULTS.json]

POINTS is aiconfigurator's silicon sample (`points.py` names the split). REQUESTS are
LLMServingSim's requests of real vLLM servers. PEER has aiconfigurator-core's predictions of the
same points (`bench/peers/aiconfigurator_rows.py`). `--ship` writes
`twostroke/planner/learned.json`. Takes some two minutes.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from bench.output import write_result
from bench.plan_error.closed_loop import Vector, closed_loop
from bench.plan_error.fit import COLUMNS, PRIOR, Loop, fit, fit_coefficients
from bench.plan_error.points import FIGURES, TEST, read_points, roofline_of
from bench.plan_error.requests import request_rows
from twostroke.errors import TwostrokeError
from twostroke.planner.learned import TABLE, TERMS
from twostroke.planner.steptimes import RooflineSteps

COVERAGE = 0.9  # of the intervals, on held-out pairs of the fit
Json = dict[str, Any]


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("points")
    parser.add_argument("--requests", help="LLMServingSim's measured requests")
    parser.add_argument("--peer", type=Path, help="predictions of aiconfigurator-core")
    parser.add_argument("--ship", action="store_true", help=f"write {TABLE.name}")
    parser.add_argument("--json", type=Path)
    args = parser.parse_args()
    try:
        _run(args)
    except TwostrokeError as error:
        sys.exit(f"error: {error}")


def _run(args: argparse.Namespace) -> None:
    loops = [Loop(point, *closed_loop(point)) for point in read_points(args.points)]
    train = [one for one in loops if one.point.pair not in TEST]
    test = [one for one in loops if one.point.pair in TEST]
    print(f"{len(train)} points to fit, {len(test)} to test", flush=True)
    band = _band(_left_out(train, lambda one: one.point.pair, lambda fitted: fit(fitted).predict))
    fitted = fit(train)
    ours = np.array([fitted.predict(one) for one in test])
    plain = np.array([_plain(one) for one in test])
    result: Json = {
        "split": {"test": sorted(map(list, TEST)), "fit": len(train), "tested": len(test)},
        "interval": [list(one) for one in band],
        "rows": [_row("ours", ours, band), _row("plain roofline", plain)],
        "pairs": _pairs(test, ours),
    }
    if args.peer is not None:
        found = json.loads(args.peer.read_text())
        given = [n for n, one in enumerate(test) if isinstance(found.get(one.point.name), list)]
        peer = np.array(
            [
                np.array(found[test[n].point.name]) / 1e3 / np.array(test[n].point.measured)
                for n in given
            ]
        )
        result["rows_of_peer"] = [
            _row("aiconfigurator-core", peer),
            _row("ours", ours[given], band),
            _row("plain roofline", plain[given]),
        ]
    table = learned_table(loops)
    if args.ship:
        TABLE.write_text(json.dumps(table, indent=1) + "\n", encoding="utf-8")
    result["shipped"] = {name: table[name] for name in ("error", "error_elsewhere", "points")}
    if args.requests is not None:
        result["requests"] = request_rows(args.requests, learned_table(train))
    _show(result)
    write_result(result, args.json, indent=1)


def _plain(loop: Loop) -> Vector:
    """Return predicted / measured of the data sheet's rates with one assumed efficiency each."""
    point = loop.point
    steps = RooflineSteps(roofline_of(point.model, point.system, point.precision, point.ranks))
    plain = np.zeros(len(COLUMNS))
    compute, memory = steps.efficiencies
    for name in ("linear", "experts", "attention"):
        plain[TERMS.index(name)] = 1 / compute
    for name in ("weights", "expert_weights", "kv"):
        plain[TERMS.index(name)] = 1 / memory
    plain[TERMS.index("network")] = 1.0
    found: Vector = loop.rows @ plain
    return found


# ── intervals ─────────────────────────────────────────────────────────────────────────────────────


def _left_out(
    loops: Sequence[Loop],
    group: Callable[[Loop], Any],
    fitted: Callable[[list[Loop]], Callable[[Loop], Vector]],
) -> np.ndarray[Any, Any]:
    """Predict each group from the other groups. Return predicted / measured."""
    found = []
    for name in sorted({group(one) for one in loops}):
        predict = fitted([one for one in loops if group(one) != name])
        found += [predict(one) for one in loops if group(one) == name]
    return np.array(found)


def _band(ratios: np.ndarray[Any, Any]) -> list[tuple[float, float]]:
    """Return the factors from a prediction to both ends of its interval, for each figure."""
    low, high = (1 - COVERAGE) / 2, (1 + COVERAGE) / 2
    return [
        (float(np.quantile(1 / one, low)), float(np.quantile(1 / one, high))) for one in ratios.T
    ]


# ── the table of the package ──────────────────────────────────────────────────────────────────────


def learned_table(loops: Sequence[Loop]) -> Json:
    """Return the coefficients for an engine of which nothing was measured: all software together,
    for each family of models. The errors come from left-out pairs and systems."""
    found = _pooled(loops)

    def error(group: Callable[[Loop], Any]) -> float:
        ratios = _left_out(
            loops, group, lambda fitted: lambda one: _of_pooled(_pooled(fitted), one)
        )
        return float(np.quantile(np.abs(1 / ratios[:, 1] - 1), COVERAGE))

    of_pairs = error(lambda one: one.point.pair)
    return {
        "points": len(loops),
        "systems": sorted({one.point.system for one in loops}),
        "error": of_pairs,
        "error_elsewhere": max(of_pairs, error(lambda one: one.point.system)),
        "coefficients": {
            name: {
                column: float(f"{value:.4g}")
                for column, value in zip(COLUMNS, values, strict=True)
                if column != "user"
            }
            for name, values in found.items()
        },
    }


def _pooled(loops: Sequence[Loop]) -> dict[str, Vector]:
    found = {"": fit_coefficients(loops, PRIOR)}
    for family in sorted({one.point.family for one in loops}):
        of_family = [one for one in loops if one.point.family == family]
        found[family] = fit_coefficients(of_family, np.maximum(found[""], 1e-2 * PRIOR))
    return found


def _of_pooled(found: dict[str, Vector], loop: Loop) -> Vector:
    ratios: Vector = loop.rows @ found.get(loop.point.family, found[""])
    return ratios


# ── the report ────────────────────────────────────────────────────────────────────────────────────


def _row(name: str, ratios: np.ndarray[Any, Any], band: Sequence[tuple[float, float]] = ()) -> Json:
    row: Json = {"name": name, "points": len(ratios)}
    for n, figure in enumerate(FIGURES):
        error = np.abs(ratios[:, n] - 1)
        row[figure] = {"median": float(np.median(error)), "mean": float(error.mean())}
        if band:
            low, high = band[n]
            inside = (1 / ratios[:, n] >= low) & (1 / ratios[:, n] <= high)
            row[figure]["coverage"] = float(inside.mean())
    return row


def _pairs(loops: Sequence[Loop], ratios: np.ndarray[Any, Any]) -> list[Json]:
    found = []
    for pair in sorted(TEST):
        at = [n for n, one in enumerate(loops) if one.point.pair == pair]
        if at:
            found.append({"model": pair[0], "system": pair[1]} | _row("ours", ratios[at]))
    return found


def _show(result: Json) -> None:
    for title in ("rows", "rows_of_peer", "pairs", "requests"):
        for row in result.get(title, ()):
            name = " ".join(str(row[key]) for key in ("name", "model", "system") if key in row)
            cells = [f"{title:12} {name:44} {row['points']:5}"]
            for figure in FIGURES:
                one = row[figure]
                inside = f", {one['coverage']:.0%} inside" if "coverage" in one else ""
                cells.append(f"{figure} {one['median']:.1%} (mean {one['mean']:.1%}{inside})")
            print("  ".join(cells))
    shipped = result["shipped"]
    print(f"shipped: ±{shipped['error']:.0%}, on other systems ±{shipped['error_elsewhere']:.0%}")


if __name__ == "__main__":
    main()
