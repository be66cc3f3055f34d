"""`GET /pools` and `POST /pools`: how many engines there are, and to have more or fewer."""

from __future__ import annotations

from dataclasses import asdict

from twostroke.errors import ConfigError, EngineError
from twostroke.serve.error_responses import ApiError
from twostroke.serve.fields.protocol import PoolsRequest
from twostroke.serve.fields.response_fields import Json
from twostroke.serve.generation.service import Service
from twostroke.serve.http.http_request import HttpRequest
from twostroke.serve.http.routing import Route

MAX_DRAIN_S = 24 * 3600.0


def pool_routes(service: Service) -> list[Route]:
    routes = PoolRoutes(service)
    return [
        Route("GET", "/pools", routes.show, "The engines there are."),
        Route(
            "POST", "/pools", routes.scale, "Have more or fewer engines.", PoolsRequest, acts=True
        ),
    ]


class PoolRoutes:
    def __init__(self, service: Service) -> None:
        self._service, self._client = service, service.client

    async def show(self, http: HttpRequest) -> None:
        await http.respond_json(self._status())

    async def scale(self, http: HttpRequest) -> None:
        """Answers when it is done. A client that leaves before changes nothing of it."""
        async with self._service.read(http, PoolsRequest) as (asked, _):
            given = {
                "prefill": asked.prefill_engines,
                "decode": asked.decode_engines,
                "data_parallel_size": asked.data_parallel_size,
            }
            counts = {name: count for name, count in given.items() if count is not None}
            drain_timeout_s = asked.drain_timeout
        if not counts:
            raise ApiError(400, "give prefill, decode or data_parallel_size: how many engines")
        if not 0 <= drain_timeout_s <= MAX_DRAIN_S:
            raise ApiError(
                400,
                f"drain_timeout must be from 0 to {MAX_DRAIN_S:.0f} seconds, not "
                f"{drain_timeout_s:g}",
                param="drain_timeout",
            )
        if self._client.pools().scaling:
            raise ApiError(
                409,
                "the pools are being changed already; GET /pools tells when that has ended",
                code="scaling",
            )
        try:
            await self._client.scale(counts, drain_timeout_s)
        except (ConfigError, EngineError) as error:
            raise ApiError(503, f"the pools are as they were: {error}", code="no_room") from None
        await http.respond_json(self._status())

    def _status(self) -> Json:
        status = self._client.pools()
        engines = [asdict(engine) for engine in status.engines]
        return {**status.counts, "scaling": status.scaling, "engines": engines}
