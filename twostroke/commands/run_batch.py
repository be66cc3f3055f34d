"""`twostroke run-batch`: answers the requests of a file, like `vllm run-batch`."""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import logging
import os
import socket
import sys
from collections.abc import Iterator
from dataclasses import replace
from time import monotonic
from typing import TYPE_CHECKING, BinaryIO

from twostroke.commands.foreign import ForeignOption, IgnoredOption, add_hidden
from twostroke.commands.parser import Parser
from twostroke.commands.serve_flags import add_server_arguments
from twostroke.commands.serve_settings import resolve_settings, start_logging
from twostroke.errors import ConfigError
from twostroke.log_lines import WORK

if TYPE_CHECKING:
    from twostroke.engine.build import Engine
    from twostroke.serve.batch_file import Counts
    from twostroke.serve.settings import ServeSettings

DESCRIPTION = (
    "Answer the requests of a file, which has one JSON object on each line in the format of "
    "OpenAI's batches, and write the answers to another file, in the same order. The options of "
    "`serve` also work here."
)
OPERANDS = " [MODEL]"
log = logging.getLogger(WORK)
COLLECT_ERRORS = True


def add_arguments(parser: Parser) -> None:
    files = parser.add_argument_group("files")
    files.add_argument("-i", "--input-file", metavar="FILE", help="requests, one on each line")
    files.add_argument("-o", "--output-file", metavar="FILE", help="answers, in the same order")
    add_server_arguments(parser)
    add_hidden(
        parser,
        ["--output-tmp-dir"],
        IgnoredOption,
        reason="answers are written directly to the output file",
    )
    files.add_argument(
        "--enable-metrics",
        action="store_true",
        help="serve Prometheus metrics at --host and --port until the file is answered",
    )
    files.add_argument(
        "--max-inflight",
        type=int,
        metavar="N",
        help="number of lines to read beyond the first line without an answer (default: 4 times "
        "--max-num-seqs)",
    )
    add_hidden(parser, ["--url"], _MetricsHost)


class _MetricsHost(ForeignOption):
    """`--url`, vLLM's earlier name for `--host`."""

    def apply(self, parser: Parser, args: argparse.Namespace, flag: str, value: str) -> None:
        args.host = value


def execute(args: argparse.Namespace) -> int:
    for name in ("input_file", "output_file"):
        value, flag = getattr(args, name), "--" + name.replace("_", "-")
        if value is None:
            args.parser.problem(f"{flag} is missing")
        elif value.startswith(("http://", "https://")):
            args.parser.problem(f"{flag} {value}: give the path of a local file")
    if args.max_inflight is not None and args.max_inflight < 1:
        args.parser.problem(f"--max-inflight must be at least 1, not {args.max_inflight}")
    source, target = args.input_file, args.output_file
    config, settings, args = resolve_settings(args)
    if args.pools.num_engines > 1 or args.pools.ray is not None:
        raise ConfigError("run-batch has one engine; leave out the options for several engines")
    start_logging(args, settings)
    if not (hasattr(args, "performance_mode") or hasattr(args, "max_decode_stall")):
        config = replace(config, max_decode_stall=0)  # no client reads a stream
    listener = None
    if args.enable_metrics:
        from twostroke.serve.http.listening_socket import bind

        listener = bind(settings)  # before the model is loaded: the port may be in use
    with _files(source, target) as (requests, answers):
        from twostroke.engine.build import build_engine

        engine, started_s = build_engine(config), monotonic()
        settings = replace(settings, api_keys=())  # no client sends a key
        work = _answer(engine, settings, requests, answers, listener, args.max_inflight)
        counts = asyncio.run(work)
    seconds = monotonic() - started_s
    print(
        f"{counts.answered} answered, {counts.failed} failed, in {seconds:.1f} s: {target}",
        file=sys.stderr,
    )
    return 0


async def _answer(
    engine: Engine,
    settings: ServeSettings,
    requests: BinaryIO,
    answers: BinaryIO,
    listener: socket.socket | None,
    max_inflight: int | None,
) -> Counts:
    from twostroke.engine.in_process import AsyncEngine
    from twostroke.serve.app import App
    from twostroke.serve.batch_file import answer_file
    from twostroke.serve.http.listening_socket import url_of
    from twostroke.serve.monitor.stats_log import log_stats
    from twostroke.serve.server import MetricsServer

    async with AsyncEngine(engine) as client:
        app = App(client, settings)
        loop, tasks = asyncio.get_running_loop(), []
        if settings.log_stats:
            tasks.append(loop.create_task(log_stats(client, app.service.metrics.totals)))
        metrics = None
        if listener is not None:
            listener.listen()  # before the address is announced
            metrics = MetricsServer(app, settings)
            tasks.append(loop.create_task(metrics.serve(sockets=[listener])))
            log.info("the metrics of this batch are at %s/metrics", url_of(listener, settings))
        try:
            return await answer_file(app, requests, answers, max_inflight)
        finally:
            if metrics is not None:
                metrics.should_exit = True
                await tasks.pop()
            for task in tasks:
                task.cancel()
            await app.close()


@contextlib.contextmanager
def _files(source: str, target: str) -> Iterator[tuple[BinaryIO, BinaryIO]]:
    """Open both files, before a model is loaded."""
    with contextlib.ExitStack() as opened:
        try:
            requests = opened.enter_context(open(source, "rb"))
            if os.path.exists(target) and os.path.samefile(source, target):
                raise ConfigError(f"--output-file {target} is the input file; give another file")
            answers = opened.enter_context(open(target, "wb"))
        except OSError as error:
            raise ConfigError(f"{error.filename}: {error.strerror}") from None
        yield requests, answers
