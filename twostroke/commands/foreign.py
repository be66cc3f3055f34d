"""`Foreign`: an option of another server's, known to the parser and absent from its help."""

from __future__ import annotations

import argparse
from collections.abc import Iterable, Sequence
from typing import Any

Parser = argparse.ArgumentParser


class Foreign(argparse.Action):
    def __call__(
        self,
        parser: Parser,
        namespace: argparse.Namespace,
        values: str | Sequence[Any] | None,
        option_string: str | None = None,
    ) -> None:
        self.meet(parser, namespace, str(option_string), str(values))

    def meet(self, parser: Parser, given: argparse.Namespace, flag: str, value: str) -> None:
        """What the option does; nothing, if it asks for what happens anyway."""


def add_hidden(
    parser: Parser, flags: Iterable[str], action: type[argparse.Action], **options: Any
) -> None:
    hidden: dict[str, Any] = {"help": argparse.SUPPRESS, "default": argparse.SUPPRESS}
    for flag in flags:
        parser.add_argument(flag, action=action, dest="foreign", **hidden, **options)
