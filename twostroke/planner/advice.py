"""`advise`: finds the fewest engines that would have met the goals in a server's last minutes.

The simulation gets the requests and the step times of the server's own records. It runs in a
separate process (`python -m twostroke.planner.advice`, JSON from stdin to stdout), so that it
delays no stream of the server.
"""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Callable, Sequence
from statistics import fmean
from typing import Any

from twostroke.errors import ConfigError, TwostrokeError
from twostroke.measure.load.definitions import Goals
from twostroke.measure.load.traces import TraceRequest
from twostroke.planner.engine import Link
from twostroke.planner.layout import EngineLayout, shape_of_server
from twostroke.planner.predict import LayoutForecast, predict
from twostroke.planner.search import fewest
from twostroke.planner.steptimes import measured_model
from twostroke.request import FIRST_MARK_TOKENS

MIN_REQUESTS = 5
MAX_REQUESTS = 2000  # the newest
LINK_BYTES_PER_S = 10e9  # between pools, until blocks have been copied
NICE = 10  # niceness of the process: on busy cores it gets a tenth of a stream's time
Json = dict[str, Any]


def advise(asked: Json) -> Json:
    """Return the advice.

    `asked`: `records` as in `/records`, with `requests` as [received_s, prompt tokens, output
    tokens or null for an open request, prefix marks]; `counts` of the engines now; `max_engines` of
    a pool; `goals` in seconds; `target`; and `bytes_per_s` between pools.
    """
    records, counts, limit = asked["records"], asked["counts"], int(asked["max_engines"])
    goals = Goals(ttft_s=asked["goals"].get("ttft_s"), tpot_s=asked["goals"].get("tpot_s"))
    trace = trace_of(asked["requests"])
    model = measured_model(records, "this server's records")
    shape = shape_of_server(records, "this server")
    link = Link(shape.token_bytes, asked.get("bytes_per_s") or LINK_BYTES_PER_S)
    forecasts: dict[tuple[int, ...], LayoutForecast] = {}

    def forecast(*sizes: int) -> LayoutForecast:
        if sizes not in forecasts:
            layout = EngineLayout(sizes[0], shape)
            if len(sizes) == 2:
                layout = EngineLayout(0, shape, *sizes, link)
            forecasts[sizes] = predict(trace, layout, model, goals, FIRST_MARK_TOKENS)
        return forecasts[sizes]

    def met(*sizes: int) -> bool:
        return forecast(*sizes).figures["met"].low >= asked["target"]

    names = list(counts)
    now = tuple(counts[name] for name in names)
    advised = _smallest(len(names), limit, met)
    enough = advised is not None
    if advised is None:
        advised = (limit,) * len(names)
    seconds = max(trace[-1].at_s, 1e-9)
    return {
        "counts": dict(zip(names, now, strict=True)),
        "advice": dict(zip(names, advised, strict=True)),
        "why": _reason(forecast(*now), forecast(*advised), enough, asked["target"]),
        "meets_goals": enough,
        "requests": len(trace),
        "seconds": seconds,
        "requests_per_s": len(trace) / seconds,
        "forecast_now": _figures(forecast(*now)),
        "forecast": _figures(forecast(*advised)),
        "step_times": model.as_json(),
    }


def trace_of(requests: Sequence[Sequence[Any]]) -> list[TraceRequest]:
    """Return the requests as a trace. An open request is expected to write as many tokens as the
    ended ones did. Prompts with the same prefix marks share their first blocks."""
    outputs = [one[2] for one in requests if one[2]]
    if len(outputs) < MIN_REQUESTS:
        raise ConfigError(
            f"{len(outputs)} requests have ended in this time; an advice needs at least "
            f"{MIN_REQUESTS}"
        )
    usual = max(1, round(fmean(outputs)))
    rows = sorted(requests, key=lambda one: float(one[0]))[-MAX_REQUESTS:]
    begun = rows[0][0]
    numbers: dict[tuple[str, int], int] = {}
    return [
        TraceRequest(at_s - begun, prompt, output or usual, _blocks(marks, numbers))
        for at_s, prompt, output, marks in rows
    ]


def _blocks(marks: Sequence[str], numbers: dict[tuple[str, int], int]) -> tuple[int, ...]:
    """Return the numbers of the blocks of the marked tokens: block n is named by the first mark
    that covers it."""
    blocks: list[int] = []
    covered = 1
    for mark in marks:
        while len(blocks) < covered:
            blocks.append(numbers.setdefault((mark, len(blocks)), len(numbers)))
        covered *= 2
    return tuple(blocks)


def _smallest(pools: int, limit: int, met: Callable[..., bool]) -> tuple[int, ...] | None:
    """Return the fewest engines of each pool that meet the goals; None: `limit` engines do not."""

    def attempt(*others: int) -> Callable[[int], tuple[int, ...] | None]:
        return lambda count: (*others, count) if met(*others, count) else None

    if pools == 1:
        return fewest(attempt(), limit)
    first = fewest(lambda count: (count,) if met(count, limit) else None, limit)
    return None if first is None else fewest(attempt(*first), limit)


def _figures(forecast: LayoutForecast) -> Json:
    kept = ("met", "p99_ttft_ms", "p99_tpot_ms", "p99_itl_ms")
    return {
        name: one._asdict()
        for name, one in forecast.figures.items()
        if name in kept or name.endswith("_utilisation")
    }


def _reason(now: LayoutForecast, advised: LayoutForecast, enough: bool, target: float) -> str:
    met = now.figures["met"]
    message = (
        f"{now.layout.name} meet the goals for {met.expected:.1%} of the last requests "
        f"({met.low:.1%} to {met.high:.1%}), with a target of {target:.1%}"
    )
    if advised.layout.name == now.layout.name:
        return message if enough else f"{message}; more engines are not allowed"
    found = advised.figures["met"]
    verdict = "are enough" if enough else "are the most that are allowed, and not enough"
    return f"{message}; {advised.layout.name} {verdict}: {found.expected:.1%}"


def main() -> None:
    if hasattr(os, "nice"):
        os.nice(NICE)
    try:
        found = advise(json.load(sys.stdin))
    except TwostrokeError as error:
        found = {"error": str(error)}
    print(json.dumps(found))


if __name__ == "__main__":
    main()
