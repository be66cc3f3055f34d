"""`twostroke learn`: a server for this machine with the page `/learn` open in a browser, or that
page as a file with recorded data."""

from __future__ import annotations

import argparse
import asyncio
import sys
import webbrowser
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from time import monotonic
from typing import TYPE_CHECKING

from twostroke.commands.flags import add_model_argument, require_engine_config, resolve_model
from twostroke.errors import ConfigError, EngineError

if TYPE_CHECKING:
    from twostroke.config import EngineConfig
    from twostroke.engine.remote import RemoteEngine
    from twostroke.serve.server import HttpServer
    from twostroke.serve.settings import ServeSettings

DESCRIPTION = (
    "Open a page that explains prefill and decode with a real engine: six lessons, your own "
    "prompt step by step, and experiments. It starts a server for this machine alone."
)
OPERANDS = " [MODEL]"
COLLECT_ERRORS = True


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add_model_argument(parser)
    absent = argparse.SUPPRESS
    parser.add_argument(
        "--port", type=int, default=0, metavar="N", help="(default: one that is free)"
    )
    parser.add_argument(
        "--browser",
        action=argparse.BooleanOptionalAction,
        default=True,
        help="open the page (default: yes)",
    )
    parser.add_argument(
        "--export",
        metavar="FILE",
        default=absent,
        help="run every experiment once, write the page with its data to this file, and end",
    )


def execute(args: argparse.Namespace) -> int:
    resolve_model(args)
    config = require_engine_config(args)
    from twostroke.serve.settings import ServeSettings

    settings = ServeSettings(
        port=args.port, engine=config, learn_engines=True, log_stats=False, drain_s=1.0
    )
    if hasattr(args, "export"):
        asyncio.run(_export(config, settings, Path(args.export)))
    else:
        _serve(config, settings, args.browser)
    return 0


def _serve(config: EngineConfig, settings: ServeSettings, browser: bool) -> None:
    started_s = monotonic()
    from twostroke.engine.spawn import DEFAULT_BUILDER, spawn
    from twostroke.serve.http.listening_socket import bind

    listener = bind(settings)
    spawned = spawn(config)  # it starts while the rest is imported
    from twostroke.engine.remote import RemoteEngine
    from twostroke.serve.server import serve

    def announce(_: HttpServer, client: RemoteEngine, url: str) -> None:
        ready_s = monotonic() - started_s
        say(f"{client.info.model_name} is ready after {ready_s:.1f} s: {url}/learn")
        say("Ctrl-C ends it.")
        if browser:
            webbrowser.open(f"{url}/learn")

    @asynccontextmanager
    async def engine() -> AsyncIterator[RemoteEngine]:
        async with await RemoteEngine.start(config, DEFAULT_BUILDER, spawned) as client:
            yield client

    try:
        serve(engine, settings, announce, listener)
    finally:
        spawned.kill()


async def _export(config: EngineConfig, settings: ServeSettings, path: Path) -> None:
    from twostroke.engine.remote import RemoteEngine
    from twostroke.serve.error_responses import ApiError
    from twostroke.serve.generation.service import Service
    from twostroke.serve.learn.learn_export import exported, recorded
    from twostroke.serve.learn.learn_routes import LearnData

    say("Running every experiment once…")
    async with await RemoteEngine.start(config) as client:
        service = Service(client, settings)
        await service.roof.measure()
        try:
            page = exported(await recorded(LearnData(service)))
        except ApiError as error:
            raise EngineError(error.message) from None
        finally:
            service.prompts.close()
    try:
        path.write_bytes(page)
    except OSError as error:
        raise ConfigError(
            f"--export {path}: {error.strerror}; name a file that can be written"
        ) from None
    say(f"{path}: {len(page) / 1e6:.2f} MB; open it in any browser")


def say(text: str) -> None:
    print(text, file=sys.stderr, flush=True)
