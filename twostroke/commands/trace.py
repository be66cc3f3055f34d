"""`twostroke trace`: the last seconds of a running server as a timeline for Perfetto."""

from __future__ import annotations

import argparse
import asyncio
import json
from pathlib import Path
from typing import Any

from twostroke.commands.bench import add_server_url, api_key
from twostroke.commands.output import check_output
from twostroke.errors import ConfigError

DESCRIPTION = (
    "Write what a running twostroke server did in the last seconds as a timeline that "
    "https://ui.perfetto.dev and chrome://tracing open. Nothing is switched on and nothing slows "
    "down: the server keeps these records always. Requests that still run are in the steps, and "
    "have a track of their own once they have ended. Example: twostroke trace "
    "http://localhost:8000 --seconds 20 -o slow.json"
)
OPERANDS = " URL"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add_server_url(parser)
    parser.add_argument("--seconds", type=float, default=10.0, metavar="S", help="default 10")
    parser.add_argument("-o", "--output", default="timeline.json", metavar="FILE")


def execute(args: argparse.Namespace) -> int:
    check_output(args.output)
    from twostroke.measure.explain.timeline import timeline

    records = asyncio.run(fetch_records(args.url, api_key(args), args.seconds))
    found = timeline(records)
    Path(args.output).write_text(json.dumps(found) + "\n")
    steps, requests = len(records["steps"]), len(records["requests"])
    print(
        f"{steps:,} steps and {requests:,} requests written to {args.output}; open it at "
        "https://ui.perfetto.dev"
    )
    return 0


async def fetch_records(url: str, api_key: str | None, seconds: float) -> Any:
    """What `/records` has of the last seconds; a clear error if it is no server of ours."""
    if not 0 < seconds <= 600:
        raise ConfigError("--seconds: give a number up to 600; older records are not kept")
    from twostroke.measure.load.http_client import Connections, Endpoint, ServerError

    connections = Connections(Endpoint(url, api_key))
    try:
        return await connections.fetch_json(f"/records?seconds={seconds:g}")
    except ServerError as error:
        if error.status == 404:
            raise ServerError(
                f"{url} keeps no step records: it is not a twostroke server (of this version)"
            ) from None
        raise
    finally:
        connections.close()
