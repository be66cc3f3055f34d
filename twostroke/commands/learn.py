"""`twostroke learn`: opens the page `/learn` of a local server, or writes the page to a file with
recorded data."""

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
    "prompt step by step, and experiments. The server accepts connections of this machine only."
)
OPERANDS = " [MODEL]"
COLLECT_ERRORS = True


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add_model_argument(parser)
    absent = argparse.SUPPRESS
    parser.add_argument("--port", type=int, default=0, metavar="N", help="(default: a free port)")
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
        help="run every experiment once, write the page with the data to this file, and exit",
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
    spawned = spawn(config)  # the engine starts during the imports below
    from twostroke.engine.remote import RemoteEngine
    from twostroke.serve.server import serve

    def announce(_: HttpServer, client: RemoteEngine, url: str) -> None:
        ready_s = monotonic() - started_s
        print_status(f"{client.info.model_name} is ready after {ready_s:.1f} s: {url}/learn")
        print_status("Press Ctrl-C to end the server.")
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

    print_status("Running every experiment once…")
    async with await RemoteEngine.start(config) as client:
        service = Service(client, settings)
        await service.ceilings_probe.measure()
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
    print_status(f"{path}: {len(page) / 1e6:.2f} MB; open it in any browser")


def print_status(text: str) -> None:
    print(text, file=sys.stderr, flush=True)
