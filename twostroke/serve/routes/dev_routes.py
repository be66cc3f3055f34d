"""Routes of vLLM's development mode: prefix cache, sleep, server info. They exist only with
`dev_mode` and always need the API key."""

from __future__ import annotations

import asyncio
import platform
import sys
from dataclasses import asdict

from twostroke import __version__
from twostroke.serve.error_responses import ApiError
from twostroke.serve.generation.service import Service
from twostroke.serve.http.http_request import HttpRequest
from twostroke.serve.http.routing import Route


class DevRoutes:
    def __init__(self, service: Service) -> None:
        self._service = service

    def routes(self) -> list[Route]:
        return [
            Route(
                "POST",
                "/reset_prefix_cache",
                self.reset_prefix_cache,
                "Drop all cached prefixes.",
                acts=True,
            ),
            Route(
                "POST", "/sleep", self.sleep, "End the engine's process until /wake_up.", acts=True
            ),
            Route("POST", "/wake_up", self.wake_up, "Start the engine again.", acts=True),
            Route("GET", "/is_sleeping", self.is_sleeping, "The sleep state of the engine."),
            Route("GET", "/server_info", self.server_info, "The settings of server and engine."),
        ]

    async def reset_prefix_cache(self, http: HttpRequest) -> None:
        self._service.client.reset_prefix_cache()
        await http.respond_json({"success": True})

    async def sleep(self, http: HttpRequest) -> None:
        query = http.query()
        level, mode = query.get("level", "1"), query.get("mode", "abort")
        if level not in ("1", "2"):
            raise ApiError(
                400,
                "level must be 1 or 2, which mean the same here: the engine's process ends",
                param="query.level",
            )
        if mode not in ("abort", "wait"):
            raise ApiError(
                400,
                'mode must be "abort" or "wait": requests cannot be kept, because the engine\'s '
                "process ends",
                param="query.mode",
            )
        client = self._service.client
        # If the client disconnects, `shield` lets the change go to its end.
        await asyncio.shield(asyncio.ensure_future(client.sleep(drain=mode == "wait")))
        info = client.info
        freed = {"weights": info.weight_bytes, "kv_cache": info.kv_bytes}
        await http.respond_json({"status": "sleeping", "level": int(level), "freed_bytes": freed})

    async def wake_up(self, http: HttpRequest) -> None:
        if (tags := http.query().get("tags")) is not None:
            raise ApiError(
                400,
                f"tags: {tags[:100]!r} cannot be woken separately; leave tags out",
                param="query.tags",
            )
        await asyncio.shield(asyncio.ensure_future(self._service.client.wake_up()))
        await http.respond_json({"status": "awake", "tags": None})

    async def is_sleeping(self, http: HttpRequest) -> None:
        await http.respond_json({"is_sleeping": self._service.client.asleep})

    async def server_info(self, http: HttpRequest) -> None:
        settings = asdict(self._service.settings)
        for name in ("api_keys", "admin_api_keys"):
            settings[name] = len(settings[name])  # the number of keys only
        await http.respond_json(
            {
                "version": __version__,
                "engine": asdict(self._service.client.info),
                "server": settings,
                "system": {"python": sys.version, "platform": platform.platform()},
            }
        )
