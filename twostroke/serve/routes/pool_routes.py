"""`GET /pools` and `POST /pools`: show and change the number of engines."""

from __future__ import annotations

from dataclasses import asdict

from twostroke.errors import ConfigError, EngineError
from twostroke.serve.error_responses import ApiError
from twostroke.serve.fields.protocol import PoolsRequest
from twostroke.serve.fields.response_json import Json
from twostroke.serve.generation.service import Service
from twostroke.serve.http.http_request import HttpRequest
from twostroke.serve.http.routing import Route

MAX_DRAIN_S = 24 * 3600.0


def pool_routes(service: Service) -> list[Route]:
    routes = PoolRoutes(service)
    return [
        Route("GET", "/pools", routes.show, "The engines and their pools."),
        Route(
            "POST", "/pools", routes.scale, "Change the number of engines.", PoolsRequest, acts=True
        ),
    ]


class PoolRoutes:
    def __init__(self, service: Service) -> None:
        self._service, self._client = service, service.client

    async def show(self, http: HttpRequest) -> None:
        await http.respond_json(self._status())

    async def scale(self, http: HttpRequest) -> None:
        """Change the pools and answer when it is done, even if the client has disconnected."""
        async with self._service.read(http, PoolsRequest) as (request, _):
            requested = {
                "prefill": request.prefill_engines,
                "decode": request.decode_engines,
                "data_parallel_size": request.data_parallel_size,
            }
            counts = {name: count for name, count in requested.items() if count is not None}
            drain_timeout_s = request.drain_timeout
        if not counts:
            raise ApiError(400, "send prefill, decode or data_parallel_size: a number of engines")
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
                "the pools are being changed already; GET /pools shows when the change has ended",
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
