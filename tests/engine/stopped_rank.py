"""A rank that stops itself (SIGSTOP) at the stage STOP_AT of its start
(`python -m tests.engine.stopped_rank`)."""

from __future__ import annotations

import os
import signal
import sys
from collections.abc import Callable
from typing import Any

from twostroke.engine import rank


def after_a_stop(function: Callable[..., Any]) -> Callable[..., Any]:
    def stop(*args: Any, **named: Any) -> Any:
        os.kill(os.getpid(), signal.SIGSTOP)
        return function(*args, **named)

    return stop


if __name__ == "__main__":
    match os.environ["STOP_AT"]:
        case "importing":
            rank.read_frame = after_a_stop(rank.read_frame)
        case "joining":
            from twostroke.engine import build_torch

            build_torch.join_ranks = after_a_stop(build_torch.join_ranks)
        case "loading":
            from twostroke.model.torch import load_layers

            load_layers.read_tensor = after_a_stop(load_layers.read_tensor)
    sys.exit(rank.main())
