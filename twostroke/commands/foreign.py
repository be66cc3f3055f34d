"""Options of other servers, known to `serve`'s parser and absent from its help.

A table has a reason for each group of flags, written as `--flag` (a switch), `--flag=` (with a
value), `--flag=?` (perhaps with one) or `--flag=+` (with several). What happens to a flag:

    REFUSED   it asks for what is not done here: a problem, with the reason and what to do
    ONLY      as REFUSED, but for some values, which ask for what happens anyway
    NOTED     it asks for a way of doing that changes no answer: taken without effect
    ANYWAY    it asks for what happens anyway: taken without effect

The log names every option that is taken without effect, with the reason.
"""

from __future__ import annotations

import argparse
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, NamedTuple

from twostroke.commands.parser import Parser
from twostroke.errors import shortened

DROPPED = "vLLM has dropped it, too"
ARITY: dict[str, Any] = {"": 0, "=": None, "=?": "?", "=+": "+"}


class Option(NamedTuple):
    reason: str
    nargs: Any


Table = dict[str, Option]
Only = Mapping[str, tuple[tuple[str, ...], str]]  # flags: (values that are taken, why no other)


def table(by_reason: Mapping[str, str]) -> Table:
    found: Table = {}
    for reason, flags in by_reason.items():
        for word in flags.split():
            flag, equals, more = word.partition("=")
            found[flag] = Option(reason, ARITY[equals + more])
    return found


def negations(refused: Table, noted: Table) -> Table:
    """Return `--no-x` for every switch `--x`: it asks for what happens anyway."""
    found: Table = {}
    for flags, reason in ((refused, "it is off"), (noted, None)):
        for flag, option in flags.items():
            if option.nargs == 0 and flag.startswith("--") and not flag.startswith("--no-"):
                found[f"--no-{flag[2:]}"] = Option(reason or option.reason, 0)
    return found


class Foreign(argparse.Action):
    """An option of another server; `apply` does what it asks for, or says why not."""

    def __call__(
        self,
        parser: argparse.ArgumentParser,
        namespace: argparse.Namespace,
        values: str | Sequence[Any] | None,
        option_string: str | None = None,
    ) -> None:
        assert isinstance(parser, Parser)
        value = values if isinstance(values, str) else " ".join(map(str, values or ()))
        self.apply(parser, namespace, str(option_string), value)

    def apply(self, parser: Parser, given: argparse.Namespace, flag: str, value: str) -> None:
        raise NotImplementedError


class Refuse(Foreign):
    unwanted = True  # no misspelling is taken for it

    def __init__(self, *args: Any, reason: str, **options: Any) -> None:
        super().__init__(*args, **options)
        self.reason = reason

    def apply(self, parser: Parser, given: argparse.Namespace, flag: str, value: str) -> None:
        parser.problem(f"{flag}: {self.reason}")


class Note(Foreign):
    """An option that is taken without effect."""

    def __init__(self, *args: Any, reason: str, **options: Any) -> None:
        super().__init__(*args, **options)
        self.reason = reason

    def apply(self, parser: Parser, given: argparse.Namespace, flag: str, value: str) -> None:
        parser.note_without_effect(flag, self.reason)


class TakeOnly(Foreign):
    """An option of which only the values are taken that ask for what happens anyway."""

    def __init__(self, *args: Any, allowed: tuple[str, ...], reason: str, **options: Any) -> None:
        super().__init__(*args, **options)
        self.allowed, self.reason = allowed, reason

    def apply(self, parser: Parser, given: argparse.Namespace, flag: str, value: str) -> None:
        if value.lower() in self.allowed:
            parser.note_without_effect(flag, self.reason)
            return
        only = " or ".join(self.allowed)
        parser.problem(f"{flag} {shortened(value)}: only {only} is taken: {self.reason}")


def add_hidden(
    parser: Parser, flags: Iterable[str], action: type[argparse.Action], **options: Any
) -> None:
    """Those that the parser has already are left as they are."""
    hidden: dict[str, Any] = {"help": argparse.SUPPRESS, "default": argparse.SUPPRESS}
    for flag in set(flags) - parser._option_string_actions.keys():
        parser.add_argument(flag, action=action, dest="foreign", **hidden, **options)


def add_tables(
    parser: Parser, refused: Table, noted: Table, anyway: Table, only: Only, dropped: Iterable[str]
) -> None:
    """`dropped`: flags that the server they come from does not have any more."""
    ends = dict.fromkeys(dropped, f" ({DROPPED})")
    for flag, option in refused.items():
        # Whatever follows, the flag is what the message must be about.
        reason = option.reason + ends.get(flag, "")
        add_hidden(parser, [flag], Refuse, nargs="*", reason=reason)
    for flag, option in {**noted, **anyway}.items():
        reason = DROPPED if flag in ends else option.reason
        add_hidden(parser, [flag], Note, nargs=option.nargs, reason=reason)
    for flags, (allowed, reason) in only.items():
        add_hidden(parser, flags.split(), TakeOnly, allowed=allowed, reason=reason)
