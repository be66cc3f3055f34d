"""A rank that ends where the ranks meet (`python -m tests.engine.lost_rank`)."""

from __future__ import annotations

import os
import sys
from typing import NoReturn

from twostroke.engine import build_torch, rank


def join_ranks(*_: object) -> NoReturn:
    os._exit(7)


if __name__ == "__main__":
    build_torch.join_ranks = join_ranks
    sys.exit(rank.main())
