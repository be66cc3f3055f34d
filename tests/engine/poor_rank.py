"""A rank that has no memory for its weights (`python -m tests.engine.poor_rank`)."""

from __future__ import annotations

import sys
from typing import NoReturn

from twostroke.engine import rank
from twostroke.model.torch import load_layers


def read_tensor(*_: object) -> NoReturn:
    raise MemoryError("no memory for this weight")


if __name__ == "__main__":
    load_layers.read_tensor = read_tensor
    sys.exit(rank.main())
