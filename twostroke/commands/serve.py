"""`twostroke serve`: an OpenAI-compatible server, started with the flags of `vllm serve`."""

from __future__ import annotations

import argparse
import contextlib
import ipaddress
import sys
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from dataclasses import replace
from time import monotonic
from typing import TYPE_CHECKING

from twostroke.commands.banner import INDENT, banner
from twostroke.commands.parser import Parser
from twostroke.commands.serve_flags import add_server_arguments
from twostroke.commands.serve_settings import resolve_settings, start_logging
from twostroke.commands.terminal import columns, unbreakable, wrapped
from twostroke.errors import ConfigError

if TYPE_CHECKING:
    from twostroke.config import EngineConfig
    from twostroke.engine.remote import RemoteEngine
    from twostroke.route.on_ray import RayCluster
    from twostroke.route.routed_engine import RoutedEngine

DESCRIPTION = (
    "Serve a model over HTTP with OpenAI's API. The options have the names of `vllm serve`; an "
    "unsupported option is refused with the reason."
)
OPERANDS = " [MODEL]"
COLLECT_ERRORS = True  # report all errors of a command line and its settings at once


def add_arguments(parser: Parser) -> None:
    add_server_arguments(parser)


def execute(args: argparse.Namespace) -> int:
    started_s = monotonic()
    config, settings, args = resolve_settings(args)
    config = replace(
        config,
        hang_timeout_s=settings.engine_hang_timeout_s,
        start_timeout_s=settings.engine_start_timeout_s,
    )
    settings = replace(settings, engine=config)
    start_logging(args, settings)
    from twostroke.engine.spawn import DEFAULT_BUILDER, Spawned, spawn
    from twostroke.model.find.hub import check_path
    from twostroke.serve.http.listening_socket import bind, check_open_files

    check_open_files()
    if config.model is not None:
        check_path(config.model)
    # Bind first: the port may be in use. The engine starts during the imports below.
    listener = bind(settings)
    engines = args.pools.engines(config)
    if settings.autoscale is not None:
        check_autoscale([one.config for one in engines], args.pools.ray is not None)
    spawned: list[Spawned] = []
    cluster: RayCluster | None = None
    if args.pools.ray is None:
        spawned = [spawn(each.config) for each in engines]
    else:
        from twostroke.route.on_ray import RayCluster

        cluster = RayCluster(args.pools.ray, args.pools.ray_timeout_s)
        engines = cluster.adapt(engines)
    from twostroke.engine.remote import RemoteEngine
    from twostroke.serve.server import HttpServer, serve

    limits = settings.engine_hang_timeout_s, settings.engine_restart_limit

    @asynccontextmanager
    async def engine() -> AsyncIterator[RemoteEngine | RoutedEngine]:
        if cluster is None and len(engines) == 1 and settings.autoscale is None:
            async with await RemoteEngine.start(
                config, DEFAULT_BUILDER, spawned[0], *limits
            ) as client:
                yield client
            return
        from twostroke.route.routed_engine import RoutedEngine

        start_arguments = DEFAULT_BUILDER, spawned, *limits, cluster
        async with await RoutedEngine.start(engines, *start_arguments) as router:
            yield router

    def announce(server: HttpServer, client: RemoteEngine | RoutedEngine, url: str) -> None:
        exposed = settings.uds is None and not is_loopback(settings.host)
        ready_s = monotonic() - started_s
        dash = ", /dash shows its metrics" if settings.dash else ""
        address = f"{url}; chat in a browser{dash}" if settings.ui else url
        summary = args.pools.summary
        text = banner(client.info, address, len(settings.api_keys), exposed, ready_s, summary)
        with contextlib.suppress(OSError):  # serve even if the disk of the log is full
            text = wrapped(text.replace(" GiB", unbreakable(" GiB")), columns(sys.stderr), INDENT)
            print(text, file=sys.stderr, flush=True)

    try:
        serve(engine, settings, announce, listener)
    finally:
        for process in spawned:
            process.kill()
        if cluster is not None:
            cluster.close()
    return 0


def check_autoscale(configs: Sequence[EngineConfig], on_ray: bool) -> None:
    """Raise `ConfigError` if there is no goal, or if the first engines would use all memory."""
    if all(one.ttft_slo_ms is None and one.itl_slo_ms is None for one in configs):
        raise ConfigError(
            "--autoscale needs a goal that the engines should meet: give --ttft-slo-ms, "
            "--itl-slo-ms, or both"
        )
    has_fixed_cache = all(
        one.kv_cache_memory_bytes or one.num_gpu_blocks_override for one in configs
    )
    if not on_ray and not has_fixed_cache:
        raise ConfigError(
            "--autoscale needs --kv-cache-memory-bytes, the size of each engine's KV cache: "
            "without it the engines of the start use all memory of this machine"
        )


def is_loopback(host: str) -> bool:
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"
