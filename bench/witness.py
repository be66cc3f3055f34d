"""The records of a server, gathered while a load runs."""

from __future__ import annotations

import json
import threading
from collections.abc import Iterable
from itertools import pairwise
from typing import Any
from urllib.request import Request, urlopen

from twostroke.measure.load.stats import percentile, summary_statistics

Json = dict[str, Any]
PERCENTILES = (45.0, 55.0, 90.0, 99.0)


def get_json(url: str) -> Any:
    with urlopen(url, timeout=60) as answer:
        return json.loads(answer.read())


def post_json(url: str, body: Any) -> Any:
    request = Request(url, json.dumps(body).encode(), {"Content-Type": "application/json"})
    with urlopen(request, timeout=600) as answer:
        return json.loads(answer.read())


class Witness:
    """The step and request records of a period. A server keeps its last 2,048 steps, possibly only
    ten seconds, so the records are fetched every few seconds.
    """

    def __init__(self, url: str, every_s: float = 4.0) -> None:
        self._url, self._every_s = url, every_s
        self._steps: dict[int, Json] = {}
        self._requests: dict[str, Json] = {}
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._watch, daemon=True)

    def __enter__(self) -> Witness:
        self._begun_s = float(get_json(f"{self._url}/records?seconds=0.001")["now_s"])
        self._thread.start()
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        self._stop.set()
        self._thread.join()
        if kind is None:
            self._take()

    @property
    def steps(self) -> list[Json]:
        return [self._steps[number] for number in sorted(self._steps)]

    @property
    def requests(self) -> dict[str, Json]:
        """Return the request records by the id of the answer."""
        return self._requests

    def _watch(self) -> None:
        while not self._stop.wait(self._every_s):
            self._take()

    def _take(self) -> None:
        found = get_json(f"{self._url}/records?seconds={3 * self._every_s:g}")
        for step in found["steps"]:
            if step["planned_s"] >= self._begun_s:
                self._steps[step["step"]] = step
        for one in found["requests"]:
            if one["received_s"] >= self._begun_s:
                self._requests[one["request_id"].rsplit("-", 1)[0]] = one


def request_figures(requests: Iterable[Json]) -> Json:
    """Return the figures of `bench serve` by the engine's clock."""
    found = [one for one in requests if one["token_s"]]
    values = {
        "ttft": [one["first_token_s"] - one["received_s"] for one in found],
        "tpot": [tpot_s(one) for one in found if len(one["token_s"]) > 1],
        "itl": [gap for one in found for gap in gaps_s(one)],
        "e2el": [one["token_s"][-1] - one["received_s"] for one in found],
    }
    first = min(one["received_s"] for one in found)
    last = max(one["token_s"][-1] for one in found)
    tokens = sum(len(one["token_s"]) for one in found)
    figures: Json = {"requests": len(found), "output_tokens": tokens}
    figures["output_throughput"] = tokens / (last - first)
    figures["request_throughput"] = len(found) / (last - first)
    figures["metrics"] = {
        name: {key: 1e3 * value for key, value in summary_statistics(seconds, PERCENTILES).items()}
        for name, seconds in values.items()
    }
    return figures


def tpot_s(request: Json) -> float:
    times = request["token_s"]
    return float(times[-1] - times[0]) / (len(times) - 1)


def gaps_s(request: Json) -> list[float]:
    times = request["token_s"]
    return [after - before for before, after in pairwise(times)]


def largest(values: Iterable[float]) -> Json:
    """Return minimum, median, 90th percentile and maximum."""
    found = list(values)
    return {f"p{share:g}": percentile(found, share) for share in (0, 50, 90, 100)}
