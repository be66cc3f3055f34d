"""The fit of step coefficients, and of what remains, to measured points.

1. Coefficients of the step terms: all points together, then each serving software, then each family
   of models of it. Each fit is drawn towards the one before. An efficiency is at most 1.
2. What remains is a factor: a sum (of logarithms) of effects of the software, the system, the
   model, the precision and the load, each drawn towards none.

Both fits weigh a point by the inverse of its error, so that a few unusual points do not decide.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np

from bench.plan_error.closed_loop import Vector
from bench.plan_error.points import Point
from twostroke.planner.learned import TERMS

COLUMNS = (
    *TERMS,
    "request",
    "user",
)  # seconds of a request, and of each user, before its first token
NUM_RATES = TERMS.index("hop")  # the terms that a data sheet gives; the others are latencies
PRIOR = np.array([1.8, 1.8, 2, 1.25, 1.25, 1.25, 1.5, 5e-6, 1e-5, 1e-5, 1e-4, 1e-3, 0.02, 1e-3])
DRAWN = 1e-4  # weight of the earlier fit, relative to the points
EFFECTS_DRAWN = 30.0  # points
PASSES = 6
MIN_ERROR = 0.05  # a smaller error of a point is noise


@dataclass
class Loop:
    """A point with the terms of its TTFT and TPOT."""

    point: Point
    start: Vector
    gap: Vector

    @cached_property
    def rows(self) -> np.ndarray[Any, Any]:
        """The terms over the measured times: their product with the coefficients should be 1."""
        start = np.concatenate([self.start, [1.0, float(self.point.users)]])
        gap = np.concatenate([self.gap, [0.0, 0.0]])
        return np.array([start / self.point.ttft_s, gap / self.point.tpot_s])


def fit_coefficients(loops: Sequence[Loop], prior: Vector) -> Vector:
    matrix = np.concatenate([one.rows for one in loops])
    weights, found = np.ones(len(matrix)), prior
    for _ in range(PASSES):
        found = _drawn_least_squares(matrix, weights, prior)
        ratio = matrix @ found
        error = np.abs(np.log(np.maximum(ratio, 1e-3)))
        weights = 1 / np.maximum(error, MIN_ERROR) / np.maximum(ratio, 0.2)
    return found


def _drawn_least_squares(matrix: Any, weights: Vector, prior: Vector) -> Vector:
    """Minimise the weighted square error within the lower bounds. Coefficients that fall below
    their bounds are fixed there, and the others are solved again."""
    scaled, drawn = matrix * prior, DRAWN * weights.sum()
    squares = scaled.T @ (weights[:, None] * scaled) + drawn * np.eye(len(prior))
    target = scaled.T @ weights + drawn
    low = np.zeros(len(prior))
    low[:NUM_RATES] = np.minimum(1.0 / prior[:NUM_RATES], 1.0)
    found, free = low.copy(), np.ones(len(prior), bool)
    while free.any():
        rest = target[free] - squares[np.ix_(free, ~free)] @ low[~free]
        found[free] = np.linalg.solve(squares[np.ix_(free, free)], rest)
        below = free & (found < low)
        if not below.any():
            break
        found[below], free[below] = low[below], False
    return found * prior


Key = tuple[str, ...]


def effects_of(point: Point) -> dict[Key, float]:
    """Return the effects that apply to a point, with their strengths."""
    generation = "hopper" if point.system.startswith("h") else "blackwell"
    backend, family, precision = point.backend, point.family, point.precision
    named = (
        ("backend", backend),
        ("generation", generation),
        ("system", point.system),
        ("model", point.model),
        ("family", family),
        ("precision", precision),
        ("backend, generation", backend, generation),
        ("backend, model", backend, point.model),
        ("backend, family", backend, family),
        ("backend, precision", backend, precision),
        ("backend, family, generation", backend, family, generation),
        ("backend, family, precision", backend, family, precision),
        ("family, generation", family, generation),
        ("precision, generation", precision, generation),
    )
    users = np.log2(point.users) - 4
    slopes = {
        "users": users,
        "users squared": users * users / 4,
        "ranks": np.log2(point.ranks) - 1.5,
        "prompt": np.log2(point.prompt) - 11,
        "output": np.log2(point.output) - 10.5,
    }
    found: dict[Key, float] = dict.fromkeys(named, 1.0)
    for name, value in slopes.items():
        for of in ((), (backend,), (backend, family), (generation,), (point.model,)):
            found[name, *of] = float(value)
    return found


@dataclass
class Fit:
    """A fit to some points, which predicts TTFT and TPOT of others."""

    coefficients: dict[Key, Vector]  # of (), (backend,), (backend, family)
    effects: dict[Key, Vector]  # logarithms of the factors of TTFT and TPOT

    def predict(self, loop: Loop) -> Vector:
        """Return predicted / measured."""
        total = self.effects[()].copy()
        for key, strength in effects_of(loop.point).items():
            total += strength * self.effects.get(key, np.zeros(2))
        return self.of_terms(loop) * np.exp(total)

    def of_terms(self, loop: Loop) -> Vector:
        key: Key = (loop.point.backend, loop.point.family)
        while key not in self.coefficients:
            key = key[:-1]
        found: Vector = loop.rows @ self.coefficients[key]
        return found


def fit(loops: Sequence[Loop]) -> Fit:
    found = Fit({(): fit_coefficients(loops, PRIOR)}, {})
    for depth in (1, 2):
        groups: dict[Key, list[Loop]] = defaultdict(list)
        for one in loops:
            groups[(one.point.backend, one.point.family)[:depth]].append(one)
        for key, group in groups.items():
            prior = np.maximum(found.coefficients[key[:-1]], 1e-2 * PRIOR)
            found.coefficients[key] = fit_coefficients(group, prior)
    found.effects = _fit_effects(found, loops)
    return found


def _fit_effects(found: Fit, loops: Sequence[Loop]) -> dict[Key, Vector]:
    applied = [effects_of(one.point) for one in loops]
    names: list[Key] = [*sorted({key for one in applied for key in one}), ()]
    at = {name: n for n, name in enumerate(names)}
    matrix = np.zeros((len(loops), len(names)))
    matrix[:, at[()]] = 1.0
    for row, one in zip(matrix, applied, strict=True):
        for key, strength in one.items():
            row[at[key]] = strength
    rest = -np.log([found.of_terms(one) for one in loops])
    drawn = EFFECTS_DRAWN * np.eye(len(names))
    drawn[at[()], at[()]] = 1e-6
    effects = np.zeros((len(names), 2))
    for figure in (0, 1):
        weights = np.ones(len(loops))
        for _ in range(PASSES):
            squares = matrix.T @ (weights[:, None] * matrix) + drawn
            effects[:, figure] = np.linalg.solve(squares, matrix.T @ (weights * rest[:, figure]))
            error = np.abs(rest[:, figure] - matrix @ effects[:, figure])
            weights = 0.1 / np.maximum(error, 0.1)
    return {name: effects[n] for name, n in at.items()}
