"""vLLM's argument parser, which accepts `_` and `-` in options."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from typing import Any


class FlexibleArgumentParser(argparse.ArgumentParser):
    """A parser that reads `--max_model_len` as `--max-model-len`."""

    def parse_known_args(  # type: ignore[override]
        self, args: Sequence[str] | None = None, namespace: Any = None
    ) -> tuple[Any, list[str]]:
        words = list(sys.argv[1:] if args is None else args)
        return super().parse_known_args([_dashed(word) for word in words], namespace)


def _dashed(word: str) -> str:
    if not word.startswith("--"):
        return word
    option, equals, value = word.partition("=")
    return option.replace("_", "-") + equals + value
