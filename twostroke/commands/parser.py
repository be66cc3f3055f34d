"""`Parser`: a command's options, read so that everything wrong with a line is told at once."""

from __future__ import annotations

import argparse
import re
import sys
import textwrap
from collections.abc import Iterable, Mapping, Sequence
from difflib import get_close_matches
from shutil import get_terminal_size
from types import MappingProxyType
from typing import Any, NoReturn

from twostroke.commands.terminal import LEAST_COLUMNS, columns, wrapped
from twostroke.errors import MAX_SHOWN_CHARS, shortened

NUMBER = re.compile(r"-\d+$|-\d*\.\d+$")
NARROW_COLUMNS = 60  # below, an option's help stands under it
KINDS = {int: "a whole number", float: "a number"}


class Help(argparse.HelpFormatter):
    """Help that fits the terminal: no word is broken, and a switch's two forms are one word."""

    def __init__(self, prog: str) -> None:
        width = max(LEAST_COLUMNS, get_terminal_size().columns) - 2
        self._narrow = width < NARROW_COLUMNS
        super().__init__(prog, max_help_position=6 if self._narrow else 24, width=width)

    def add_usage(self, usage: Any, actions: Any, groups: Any, prefix: Any = None) -> None:
        if usage is not None:
            usage = wrapped(f"usage: {usage}", self._width, " " * 7).removeprefix("usage: ")
        super().add_usage(usage, actions, groups, prefix)

    def _format_action_invocation(self, action: argparse.Action) -> str:
        if isinstance(action, argparse.BooleanOptionalAction):
            return f"--[no-]{action.option_strings[0].removeprefix('--')}"
        return super()._format_action_invocation(action)

    def _split_lines(self, text: str, width: int) -> list[str]:
        return textwrap.wrap(text, width, break_long_words=False, break_on_hyphens=False)

    def _fill_text(self, text: str, width: int, indent: str) -> str:
        """An example stands on lines of its own, so that it can be copied."""
        said, example, command = text.partition(" Example: ")
        lines = self._split_lines(said, width - len(indent))
        if example:
            lines += ["", *self._split_lines(f"Example: {command}", width - len(indent))]
        return "\n".join(indent + line for line in lines)


class Parser(argparse.ArgumentParser):
    """A parser that collects problems for `finish` if `tells_all`, and else stops at the first;
    remarks on options that are taken are collected for the log (`notice`)."""

    tells_all = False
    lines: tuple[str, ...] = ()  # options whose values are lines of options
    usual: tuple[str, ...] = ()  # the options that help shows; none: it shows all
    other_groups: Mapping[str, str] = MappingProxyType({})  # other servers' names of groups → ours

    def __init__(self, **options: Any) -> None:
        super().__init__(**{"allow_abbrev": False, "formatter_class": Help, **options})
        self.problems: list[str] = []
        self.notes: dict[str, str] = {}  # flags, and a remark on each
        self.without_effect: dict[str, list[str]] = {}  # a reason, and the flags it holds for

    def format_help(self) -> str:
        if not self.usual:
            return super().format_help()
        shown = [self._option_string_actions[flag] for flag in self.usual]
        groups = [name for group in self._action_groups if (name := self._shown(group))]
        ends = (
            f"`{self.prog} --help=all` shows all options, `--help=GROUP` those of a group "
            f"({', '.join(groups)}), `--help=WORD` those with the word in their name."
        )
        return self._help_of("usual options", shown, ends)

    def help_about(self, word: str) -> str:
        """Return the help of all options, of a group, or of the options with a word in their
        names."""
        wanted = word.strip().lower().replace("_", "-")
        if wanted == "all":
            return super().format_help()
        wanted = self.other_groups.get(wanted, wanted)
        for group in self._action_groups:
            if self._shown(group) == wanted:
                return self._help_of(str(group.title), group._group_actions)
        found = [
            action
            for action in self._actions
            if action.help != argparse.SUPPRESS
            and any(wanted in flag for flag in action.option_strings)
        ]
        if not found:
            return f"no group or option matches {shortened(word)}; try `{self.prog} --help`\n"
        return self._help_of(f"options with {wanted!r} in their names", found)

    def _shown(self, group: argparse._ArgumentGroup) -> str:
        """Return the name of a group with options, as `--help=GROUP` takes it."""
        flags = any(action.option_strings for action in group._group_actions)
        return str(group.title).partition(" (")[0].partition(",")[0] if flags else ""

    def _help_of(self, title: str, actions: Iterable[argparse.Action], ends: str = "") -> str:
        formatter = self._get_formatter()
        formatter.add_usage(self.usage, self._actions, self._mutually_exclusive_groups)
        formatter.add_text(self.description)
        formatter.start_section(title)
        formatter.add_arguments(actions)
        formatter.end_section()
        formatter.add_text(ends or None)
        return formatter.format_help()

    def problem(self, message: str) -> None:
        if message not in self.problems:
            self.problems.append(message)

    def note(self, flag: str, remark: str) -> None:
        self.notes[flag] = remark

    def note_without_effect(self, flag: str, reason: str) -> None:
        flags = self.without_effect.setdefault(reason, [])
        if flag not in flags:
            flags.append(flag)

    def notice(self) -> str:
        """Return one line about all notes and forget them; empty if there are none."""
        groups = [f"{', '.join(flags)} ({why})" for why, flags in self.without_effect.items()]
        found = [f"{flag}: {remark}" for flag, remark in self.notes.items()]
        if groups:
            found.insert(0, f"options without effect: {', '.join(groups)}")
        self.notes, self.without_effect = {}, {}
        return "; ".join(found)

    def finish(self) -> None:
        """Ends the program with status 2 if anything is wrong."""
        problems, self.problems = self.problems, []
        if not problems:
            return
        self.notes, self.without_effect = {}, {}
        width = columns(sys.stderr)
        if len(problems) == 1:
            text = wrapped(f"twostroke: error: {problems[0]}", width, "  ")
        else:
            head = f"twostroke: error: {len(problems)} things in this line cannot be taken:"
            lines = [wrapped(f"  {problem}", width, "    ") for problem in problems]
            text = "\n".join([wrapped(head, width, "  "), *lines])
        self.exit(2, f"{text}\nTry `{self.prog} --help`.\n")

    def error(self, message: str) -> NoReturn:
        """For what makes it useless to read on."""
        self.problem(message)
        self.finish()
        raise AssertionError("unreachable")

    def without_unknown(self, words: Sequence[str]) -> list[str]:
        """The words less the options that there are not, each of which is a problem."""
        kept: list[str] = []
        value_of_unknown = False
        for at, word in enumerate(words):
            if word == "--":
                return [*kept, *words[at:]]
            if not word.startswith("-") or word == "-" or NUMBER.match(word):
                if not value_of_unknown:
                    kept.append(word)
                value_of_unknown = False
                continue
            flag, equals, _ = word.partition("=")
            # `-O3` and `-c4096`, but no other word: argparse would ask which of several is meant.
            joined = not word[2:].isalpha() and word[:2] in self._option_string_actions
            joined = joined and not word.startswith("--")
            value_of_unknown = False
            if flag in self._option_string_actions or joined:
                kept.append(word)
                continue
            self.problem(f"{shortened(flag)}: there is no such option{self.nearest(flag)}")
            value_of_unknown = not equals
        return kept

    def nearest(self, flag: str) -> str:
        """`; did you mean --x?`, of the options in the help before the others."""
        shown: list[str] = []
        hidden: list[str] = []
        for option, action in self._option_string_actions.items():
            if getattr(action, "unwanted", False):
                continue
            (hidden if action.help == argparse.SUPPRESS else shown).append(option)
        found = nearest_flag(flag, shown) or nearest_flag(flag, hidden)
        return f"; did you mean {found}?" if found else ""

    # ── argparse calls these where it would end the program at the first mistake ────────────

    def _match_argument(self, action: argparse.Action, arg_strings_pattern: str) -> int:
        try:
            return super()._match_argument(action, arg_strings_pattern)
        except argparse.ArgumentError:
            if not self.tells_all:
                raise
            self.problem(f"{_flag(action)}: a value is missing")
            return 0

    def _get_values(self, action: argparse.Action, arg_strings: list[str]) -> Any:
        missing = action.option_strings and not arg_strings and action.nargs in (None, "+")
        if self.tells_all and missing:
            return argparse.SUPPRESS  # which `_match_argument` has told of
        try:
            return super()._get_values(action, arg_strings)
        except argparse.ArgumentError as error:
            if not self.tells_all:
                raise
            given = shortened(" ".join(arg_strings))
            self.problem(f"{_flag(action)} {given}: {_reason(action, error)}")
            return argparse.SUPPRESS


def nearest_flag(flag: str, known: Iterable[str]) -> str | None:
    """What a misspelt flag was meant to be: one that begins like it, or differs by few letters."""
    known = list(known)
    if len(flag) > MAX_SHOWN_CHARS:
        return None
    begun = [one for one in known if one.startswith(flag)] if len(flag) > 4 else []
    if len(begun) == 1:
        return begun[0]
    distances = {one: _distance(flag, one) for one in known}
    best = min(distances, key=lambda one: distances[one], default=None)
    if best is not None and distances[best] <= max(1, len(_stem(flag)) // 4):
        return best
    stems = {_stem(one): one for one in known}
    near = get_close_matches(_stem(flag), stems, n=1, cutoff=0.75)
    return stems[near[0]] if near else None


def _stem(flag: str) -> str:
    """Return the part of a flag's name that tells it from other switches."""
    return re.sub(r"^-+(no-)?((enable|disable)-)?", "", flag)


def _distance(one: str, other: str) -> int:
    """Letters added, left out, changed, or swapped with the next."""
    before: list[int] = []
    row = list(range(len(other) + 1))
    for i, a in enumerate(one, 1):
        before, last, row = row, before, [i]
        for j, b in enumerate(other, 1):
            cost = min(before[j] + 1, row[j - 1] + 1, before[j - 1] + (a != b))
            if i > 1 and j > 1 and a == other[j - 2] and one[i - 2] == b:
                cost = min(cost, last[j - 2] + 1)
            row.append(cost)
    return row[-1]


def _flag(action: argparse.Action) -> str:
    """Its longest name."""
    return max(action.option_strings, key=len, default=str(action.metavar or action.dest))


def _reason(action: argparse.Action, error: argparse.ArgumentError) -> str:
    if action.choices is not None:
        return f"expected one of {', '.join(map(str, action.choices))}"
    kind: Any = action.type
    return f"expected {KINDS[kind]}" if kind in KINDS else error.message
