"""`twostroke trace`: writes the last seconds of a running server as a timeline for Perfetto."""

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
    "Write the last seconds of a running twostroke server as a timeline for "
    "https://ui.perfetto.dev and chrome://tracing. The server always keeps these records, so that "
    "a trace does not slow it down. Running requests appear in the steps, and have their own track "
    "after they have ended. Example: twostroke trace "
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
    """Return the `/records` of the last seconds. Raises an error if the server is not twostroke."""
    if not 0 < seconds <= 600:
        raise ConfigError("--seconds must be above 0 and at most 600: older records are not kept")
    from twostroke.measure.load.http_client import Connections, Endpoint, ServerError

    connections = Connections(Endpoint(url, api_key))
    try:
        return await connections.fetch_json(f"/records?seconds={seconds:g}")
    except ServerError as error:
        if error.status == 404:
            raise ServerError(
                f"{url} has no step records: the server is not twostroke, or has another version"
            ) from None
        raise
    finally:
        connections.close()
