"""Calibration: load for a running server, so that its records have steps of many sizes.

Users in a closed loop, 1 to `USERS[-1]` of them, each level for its share of the time. Prompts are
of all lengths up to the trace's longest, so that chunks, contexts and batches of every size occur,
alone and together.
"""

from __future__ import annotations

import asyncio
import math
import random
import secrets
from collections.abc import Callable
from time import perf_counter
from typing import Any

from twostroke.errors import ConfigError
from twostroke.measure.load.definitions import Sample
from twostroke.measure.load.http_client import Connections, Endpoint, ServerError
from twostroke.measure.load.sample_client import OpenAIClient, first_model, send_first
from twostroke.measure.load.workload import Planned, Prompts

USERS = (1, 2, 4, 8, 16, 32)
SECONDS = 60.0
MIN_PROMPT, MIN_OUTPUT, MAX_OUTPUT = 16, 4, 32
MIN_ANSWERS = 6  # of a level, however slow the server is
LOOK_S = 0.2  # how often answers are counted
MAX_RECORDS_S = 600.0  # that a server is asked for

Json = dict[str, Any]


async def fetch_records(connections: Connections, seconds: float) -> Json:
    """Return the records of a twostroke server's last seconds."""
    seconds = min(MAX_RECORDS_S, max(1.0, seconds))
    try:
        found = await connections.fetch_json(f"/records?seconds={seconds:g}")
    except ServerError as error:
        if error.status == 404:
            raise ServerError(
                f"{connections.endpoint.url} keeps no step records: it is not a twostroke server "
                "(of this version)"
            ) from None
        raise
    return dict(found)


async def calibrate(
    url: str,
    api_key: str | None,
    longest: int,
    seconds: float,
    tell: Callable[[int], None] = lambda users: None,
) -> Json:
    """Load the server, and return its records of that time as `/records` has them, with
    `outside_s`: the part of TTFT that a client sees and the engine does not."""
    connections = Connections(Endpoint(url, api_key))
    try:
        model = str((await first_model(connections))["id"])
        load = CalibrationLoad(OpenAIClient(connections, model), longest)
        await send_first(load.client, load.next_request())
        found = await fetch_records(connections, 1.0)
        limit = min(found["kv_tokens"] // 2, found.get("max_model_len") or longest) - MAX_OUTPUT
        load.longest = max(MIN_PROMPT, min(longest, limit))
        steps: dict[int, Json] = {}
        requests: dict[str, Json] = {}
        for users in [one for one in USERS if one <= found["max_num_seqs"]]:
            tell(users)
            began = perf_counter()
            await load.run(users, seconds / len(USERS))
            found = await fetch_records(connections, perf_counter() - began + 1.0)
            steps |= {one["step"]: one for one in found["steps"]}
            requests |= {one["request_id"]: one for one in found["requests"]}
        if not steps:
            raise ConfigError(f"{url} has run no steps while it was calibrated")
        found["steps"], found["requests"] = list(steps.values()), list(requests.values())
        found["outside_s"] = _outside_s(load.samples, requests)
        return found
    finally:
        connections.close()


class CalibrationLoad:
    """Requests of all lengths, no two of which begin alike."""

    def __init__(self, client: OpenAIClient, longest: int) -> None:
        self.client, self.longest = client, longest
        self.samples: list[Sample] = []
        self._rng = random.Random(0)
        self._prompts = Prompts(0, f"calibration {secrets.token_hex(4)}", as_text=False)
        self._count = 0

    def next_request(self) -> Planned:
        self._count += 1
        low, high = math.log(MIN_PROMPT), math.log(max(MIN_PROMPT, self.longest))
        length = round(math.exp(self._rng.uniform(low, high)))
        output = self._rng.randint(MIN_OUTPUT, MAX_OUTPUT)
        return Planned(0.0, self._prompts.unique(self._count, length), length, output)

    async def run(self, users: int, seconds: float) -> None:
        """Send from so many users for this time, and until some answers have come; those that are
        not whole then are broken off."""

        async def user() -> None:
            while True:
                sample = await self.client.send(self.next_request(), perf_counter())
                if sample.error:
                    raise ServerError(f"a request of the calibration failed: {sample.error}")
                self.samples.append(sample)

        wanted, end_s = len(self.samples) + MIN_ANSWERS, perf_counter() + seconds
        tasks = [asyncio.create_task(user()) for _ in range(users)]
        try:
            while perf_counter() < end_s or len(self.samples) < wanted:
                failed, _ = await asyncio.wait(tasks, timeout=LOOK_S)
                for task in failed:
                    task.result()
        finally:
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)


def _outside_s(samples: list[Sample], requests: dict[str, Json]) -> float:
    """Return the median of what the client's TTFT has beyond the engine's."""
    by_answer = {name.rpartition("-")[0]: record for name, record in requests.items()}
    rests = []
    for sample in samples:
        record = by_answer.get(sample.request_id)
        if record is not None and sample.ok and record["first_token_s"]:
            engine_s = record["first_token_s"] - record["received_s"]
            rests.append(sample.ttft_s - engine_s)
    rests.sort()
    return max(0.0, rests[len(rests) // 2]) if rests else 0.0
