"""Options of other servers that the parser of `serve` accepts or refuses by name. The help does not
show them.

A table maps a reason to flags. A flag is written `--flag` (a switch), `--flag=` (with a value),
`--flag=?` (with an optional value) or `--flag=+` (with several values). There are four tables:

    REFUSED     twostroke does not have the feature: an error with the reason and an alternative
    RESTRICTED  accepted with the values that describe what twostroke does, otherwise refused
    IGNORED     the option does not change answers: accepted without effect
    REDUNDANT   twostroke works that way without the option: accepted without effect

The log names every option that is accepted without effect, with the reason.
"""

from __future__ import annotations

import argparse
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, NamedTuple

from twostroke.commands.parser import Parser
from twostroke.errors import shortened

DROPPED = "current versions of vLLM do not have it either"
ARITY: dict[str, Any] = {"": 0, "=": None, "=?": "?", "=+": "+"}


class TableEntry(NamedTuple):
    reason: str
    nargs: Any


Table = dict[str, TableEntry]
Restrictions = Mapping[str, tuple[tuple[str, ...], str]]  # flags → (accepted values, reason)


def table(flags_of_reason: Mapping[str, str]) -> Table:
    found: Table = {}
    for reason, flags in flags_of_reason.items():
        for word in flags.split():
            flag, equals, more = word.partition("=")
            found[flag] = TableEntry(reason, ARITY[equals + more])
    return found


def negations(refused: Table, ignored: Table) -> Table:
    """Return a table with `--no-x` for every switch `--x`, as redundant options."""
    found: Table = {}
    for flags, reason in ((refused, "it is off"), (ignored, None)):
        for flag, option in flags.items():
            if option.nargs == 0 and flag.startswith("--") and not flag.startswith("--no-"):
                found[f"--no-{flag[2:]}"] = TableEntry(reason or option.reason, 0)
    return found


class ForeignOption(argparse.Action):
    """An option of another server. `apply` applies it to the arguments or reports an error."""

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

    def apply(self, parser: Parser, args: argparse.Namespace, flag: str, value: str) -> None:
        raise NotImplementedError


class RefusedOption(ForeignOption):
    """An option whose use is an error."""

    is_refused = True  # never suggested for an unknown option

    def __init__(self, *args: Any, reason: str, **options: Any) -> None:
        super().__init__(*args, **options)
        self.reason = reason

    def apply(self, parser: Parser, args: argparse.Namespace, flag: str, value: str) -> None:
        parser.problem(f"{flag}: {self.reason}")


class IgnoredOption(ForeignOption):
    """An option that is accepted without effect."""

    def __init__(self, *args: Any, reason: str, **options: Any) -> None:
        super().__init__(*args, **options)
        self.reason = reason

    def apply(self, parser: Parser, args: argparse.Namespace, flag: str, value: str) -> None:
        parser.note_without_effect(flag, self.reason)


class RestrictedOption(ForeignOption):
    """An option that accepts only the values that describe what twostroke does."""

    def __init__(self, *args: Any, allowed: tuple[str, ...], reason: str, **options: Any) -> None:
        super().__init__(*args, **options)
        self.allowed, self.reason = allowed, reason

    def apply(self, parser: Parser, args: argparse.Namespace, flag: str, value: str) -> None:
        if value.lower() in self.allowed:
            parser.note_without_effect(flag, self.reason)
            return
        allowed = " or ".join(self.allowed)
        parser.problem(f"{flag} {shortened(value)}: only {allowed} is supported: {self.reason}")


def add_hidden(
    parser: Parser, flags: Iterable[str], action: type[argparse.Action], **options: Any
) -> None:
    """Add options that the help does not show, except options that the parser has already."""
    hidden: dict[str, Any] = {"help": argparse.SUPPRESS, "default": argparse.SUPPRESS}
    for flag in set(flags) - parser._option_string_actions.keys():
        parser.add_argument(flag, action=action, dest="foreign", **hidden, **options)


class ForeignTables(NamedTuple):
    """The tables of the options of other servers."""

    refused: Table
    ignored: Table  # with the redundant options
    restricted: Restrictions
    dropped: frozenset[str]  # flags that current versions of the other server do not have


def add_tables(parser: Parser, tables: ForeignTables) -> None:
    for flag, option in tables.refused.items():
        reason = option.reason + (f" ({DROPPED})" if flag in tables.dropped else "")
        # Any number of values, so that the error is about the flag and not about a value.
        add_hidden(parser, [flag], RefusedOption, nargs="*", reason=reason)
    for flag, option in tables.ignored.items():
        reason = DROPPED if flag in tables.dropped else option.reason
        add_hidden(parser, [flag], IgnoredOption, nargs=option.nargs, reason=reason)
    for flags, (allowed, reason) in tables.restricted.items():
        add_hidden(parser, flags.split(), RestrictedOption, allowed=allowed, reason=reason)


SPECULATION_TYPES: dict[str, type[str] | type[int] | type[float]] = {
    "method": str,
    "model": str,
    "draft_model_min_token_prob": float,
}


def add_speculation(
    parser: Parser, args: argparse.Namespace, key: str, flag: str, value: str
) -> None:
    """Set one key of --speculative-config. All keys but those of `SPECULATION_TYPES` are whole
    numbers."""
    read = SPECULATION_TYPES.get(key, int)
    try:
        setting: str | int | float = read(value)
    except ValueError:
        expected = "a whole number" if read is int else "a number"
        parser.problem(f"{flag} {value}: expected {expected}")
        return
    args.speculative_config = {**(getattr(args, "speculative_config", None) or {}), key: setting}
