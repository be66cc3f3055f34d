"""The process of a rank other than the first: `python -m twostroke.engine.rank`, started by
`rank_processes.py`.

The process reads its part of the weights, then runs the plans that arrive on its stdin. It has no
scheduler and no tokenizer, and ends when its stdin is closed.
"""

from __future__ import annotations

import contextlib
import faulthandler
import json
import os
import queue
import signal
import sys
import threading
import traceback
from collections.abc import Callable, Iterator
from functools import partial
from time import sleep
from typing import Any, BinaryIO

from twostroke import log_lines
from twostroke.config import EngineConfig
from twostroke.engine.rank_processes import HEARTBEAT_S, IMPORTING, read_frame
from twostroke.engine.wire import pack_error


def main() -> int:
    if hasattr(signal, "SIGUSR1"):  # sent by the first rank if a step does not end
        faulthandler.register(signal.SIGUSR1)
    for name in (signal.SIGINT, signal.SIGTERM):  # only the first rank ends this process
        signal.signal(name, signal.SIG_IGN)
    log_lines.configure()
    with contextlib.suppress(BrokenPipeError), os.fdopen(os.dup(1), "w") as out:
        os.dup2(2, 1)  # prints must not reach the first rank

        lock = threading.Lock()

        def send(message: Any) -> None:
            with lock:
                out.write(json.dumps(message) + "\n")
                out.flush()

        send({"stage": IMPORTING})
        threading.Thread(target=_beat, args=(send,), name="twostroke-heart", daemon=True).start()
        try:
            _run(sys.stdin.buffer, send)
        except Exception as error:
            kind, message = pack_error(error)
            if not kind:
                traceback.print_exc()
            send([kind, message])
    sys.stderr.flush()
    os._exit(1)  # at once, so that the other ranks notice


def _run(stdin: BinaryIO, send: Callable[[Any], None]) -> None:
    first = read_frame(stdin)
    if not first:
        raise SystemExit("no settings on stdin; this process is started by twostroke itself")
    settings, rank, store_path = json.loads(first)
    frames: queue.SimpleQueue[bytes] = queue.SimpleQueue()
    threading.Thread(target=_read_frames, args=(stdin, frames), daemon=True).start()
    from twostroke.engine.build_torch import join_ranks, run_rank  # imports torch

    config = EngineConfig(**settings)
    send({"stage": "joining the other ranks"})
    send("ready")
    ranks = join_ranks(config, rank, store_path)
    send({"stage": "loading its part of the model"})
    run_rank(config, ranks, _frames_of(frames), started=partial(send, {"stage": ""}))


def _beat(send: Callable[[Any], None]) -> None:
    with contextlib.suppress(OSError):  # the first rank has ended
        while True:
            send("beat")
            sleep(HEARTBEAT_S)


def _read_frames(stdin: BinaryIO, frames: queue.SimpleQueue[bytes]) -> None:
    while frame := read_frame(stdin):
        frames.put(frame)
    os._exit(0)  # even in the middle of a step: the other ranks end, too


def _frames_of(frames: queue.SimpleQueue[bytes]) -> Iterator[bytes]:
    while True:
        yield frames.get()


if __name__ == "__main__":
    sys.exit(main())
