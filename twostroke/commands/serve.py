"""`twostroke serve`: an OpenAI-compatible server, started with the flags of `vllm serve`."""

from __future__ import annotations

import argparse
import contextlib
import ipaddress
import sys
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import replace
from time import monotonic
from typing import TYPE_CHECKING

from twostroke.commands.banner import INDENT, banner
from twostroke.commands.parser import Parser
from twostroke.commands.serve_flags import add_server_arguments
from twostroke.commands.serve_settings import resolve_settings, start_logging
from twostroke.commands.terminal import columns, unbreakable, wrapped

if TYPE_CHECKING:
    from twostroke.engine.remote import RemoteEngine
    from twostroke.route.on_ray import RayCluster
    from twostroke.route.routed_engine import RoutedEngine

DESCRIPTION = (
    "Serve a model over HTTP with OpenAI's API. Flags and their names are those of `vllm serve`; "
    "one that twostroke does not have is refused with the reason."
)
OPERANDS = " [MODEL]"
COLLECT_ERRORS = True  # that is wrong with a line and its settings, at once


def add_arguments(parser: Parser) -> None:
    add_server_arguments(parser)


def execute(args: argparse.Namespace) -> int:
    started_s = monotonic()
    config, settings, args = resolve_settings(args)
    settings = replace(settings, engine=config)
    start_logging(args, settings)
    from twostroke.engine.spawn import DEFAULT_BUILDER, Spawned, spawn
    from twostroke.model.find.hub import check_path
    from twostroke.serve.http.listening_socket import bind, check_open_files

    check_open_files()
    if config.model is not None:
        check_path(config.model)
    # A port in use costs no model's loading, and the engine starts while the rest is imported.
    listener = bind(settings)
    engines = args.pools.engines(config)
    spawned: list[Spawned] = []
    cluster: RayCluster | None = None
    if args.pools.ray is None:
        spawned = [spawn(one.config) for one in engines]
    else:
        from twostroke.route.on_ray import RayCluster

        cluster = RayCluster(args.pools.ray, args.pools.ray_timeout_s)
        engines = cluster.placed(engines)
    from twostroke.engine.remote import RemoteEngine
    from twostroke.serve.server import HttpServer, serve

    limits = settings.engine_hang_timeout_s, settings.engine_restart_limit

    @asynccontextmanager
    async def engine() -> AsyncIterator[RemoteEngine | RoutedEngine]:
        if cluster is None and len(engines) == 1:
            async with await RemoteEngine.start(
                config, DEFAULT_BUILDER, spawned[0], *limits
            ) as one:
                yield one
            return
        from twostroke.route.routed_engine import RoutedEngine

        where = DEFAULT_BUILDER, spawned, *limits, cluster
        async with await RoutedEngine.start(engines, *where) as several:
            yield several

    def announce(server: HttpServer, client: RemoteEngine | RoutedEngine, url: str) -> None:
        exposed = settings.uds is None and not is_loopback(settings.host)
        ready_s = monotonic() - started_s
        dash = ", /dash shows it at work" if settings.dash else ""
        where = f"{url}; chat in a browser{dash}" if settings.ui else url
        several = args.pools.summary
        text = banner(client.info, where, len(settings.api_keys), exposed, ready_s, several)
        with contextlib.suppress(OSError):  # a full disk for the log is no reason not to serve
            text = wrapped(text.replace(" GiB", unbreakable(" GiB")), columns(sys.stderr), INDENT)
            print(text, file=sys.stderr, flush=True)

    try:
        serve(engine, settings, announce, listener)
    finally:
        for one in spawned:
            one.kill()
        if cluster is not None:
            cluster.close()
    return 0


def is_loopback(host: str) -> bool:
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"
