"""`POST /start_profile` and `POST /stop_profile`: a profile of the engine's steps."""

from __future__ import annotations

import msgspec

from twostroke import __version__
from twostroke.serve.generation.service import Service
from twostroke.serve.http.http_request import HttpRequest
from twostroke.serve.http.routing import Route

SCHEMA = 1


def profile_routes(service: Service) -> list[Route]:
    routes = ProfileRoutes(service)
    return [
        Route(
            "POST",
            "/start_profile",
            routes.start,
            "Start a profile of steps.",
            acts=True,
        ),
        Route("POST", "/stop_profile", routes.stop, "Stop the profile and return it.", acts=True),
    ]


class ProfileRoutes:
    def __init__(self, service: Service) -> None:
        self._client = service.client

    async def start(self, http: HttpRequest) -> None:
        await self._client.start_profile()
        await http.respond_json({"status": "profiling"})

    async def stop(self, http: HttpRequest) -> None:
        found = await self._client.stop_profile()
        info = self._client.info
        server = {
            "twostroke": __version__,
            "model": info.model_name,
            "device": info.device,
            "dtype": info.dtype,
            "read_bytes_per_s": info.read_bytes_per_s,
            "ops_per_s": info.ops_per_s,
        }
        head = msgspec.json.encode({"schema_version": SCHEMA, "server": server})
        # Join two JSON objects as text: the engine's object may have megabytes.
        await http.respond(200, b"".join([head[:-1], b",", found[1:]]))
