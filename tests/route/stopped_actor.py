"""An actor that stops its process (SIGSTOP) while Ray makes it. Its builder is the path of a file
for the number of the process."""

from __future__ import annotations

import os
import signal
from pathlib import Path
from typing import Any

from twostroke.route.on_ray import EngineActor


class StoppedActor(EngineActor):
    def __init__(self, name: str, config: dict[str, Any], builder: str, version: str) -> None:
        super().__init__(name, config, builder, version)
        Path(f"{builder}.new").write_text(str(os.getpid()))
        os.rename(f"{builder}.new", builder)
        os.kill(os.getpid(), signal.SIGSTOP)
