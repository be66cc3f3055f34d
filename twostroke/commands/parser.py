"""`Parser`: an argument parser that reports all errors of a command line at once."""

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

from twostroke.commands.terminal import MIN_COLUMNS, columns, wrapped
from twostroke.errors import MAX_SHOWN_CHARS, shortened

NUMBER = re.compile(r"-\d+$|-\d*\.\d+$")
MAX_MEANINGS = 3  # options that the message about an abbreviation names
NARROW_COLUMNS = 60  # on narrower terminals an option's help is printed below the option
TYPE_NAMES = {int: "a whole number", float: "a number"}


class HelpFormatter(argparse.HelpFormatter):
    """Formats help for the width of the terminal. It breaks no word and shows `--[no-]x` for a
    switch."""

    def __init__(self, prog: str) -> None:
        width = max(MIN_COLUMNS, get_terminal_size().columns) - 2
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
        """Put the example on its own lines, so that it can be copied."""
        description, example, command = text.partition(" Example: ")
        lines = self._split_lines(description, width - len(indent))
        if example:
            lines += ["", *self._split_lines(f"Example: {command}", width - len(indent))]
        return "\n".join(indent + line for line in lines)


class Parser(argparse.ArgumentParser):
    """An argument parser. With `collects_errors` it collects the errors of a command line until
    `finish` reports them; otherwise it ends the program at the first error. It also collects notes
    on options for the log (`notice`)."""

    collects_errors = False
    command_line_options: tuple[str, ...] = ()  # options whose values are command lines
    usual_options: tuple[str, ...] = ()  # the options that --help shows; empty: all options
    group_aliases: Mapping[str, str] = MappingProxyType({})  # vLLM's group names → twostroke's

    def __init__(self, **options: Any) -> None:
        super().__init__(**{"allow_abbrev": False, "formatter_class": HelpFormatter, **options})
        self.problems: list[str] = []
        self.notes: dict[str, str] = {}  # flag → note
        self.without_effect: dict[str, list[str]] = {}  # reason → the flags without effect

    def format_help(self) -> str:
        if not self.usual_options:
            return super().format_help()
        shown = [self._option_string_actions[flag] for flag in self.usual_options]
        groups = [name for group in self._action_groups if (name := self._group_name(group))]
        ends = (
            f"`{self.prog} --help=all` shows all options, `--help=GROUP` the options of a group "
            f"({', '.join(groups)}), `--help=WORD` the options with the word in their name."
        )
        return self._help_of("usual options", shown, ends)

    def help_about(self, word: str) -> str:
        """Return the help of all options, of one group, or of the options with a word in their
        names."""
        wanted = word.strip().lower().replace("_", "-")
        if wanted == "all":
            return super().format_help()
        wanted = self.group_aliases.get(wanted, wanted)
        for group in self._action_groups:
            if self._group_name(group) == wanted:
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

    def _group_name(self, group: argparse._ArgumentGroup) -> str:
        """Return the name of a group for `--help=GROUP`; an empty name if it has no options."""
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

    def note(self, flag: str, text: str) -> None:
        self.notes[flag] = text

    def note_without_effect(self, flag: str, reason: str) -> None:
        flags = self.without_effect.setdefault(reason, [])
        if flag not in flags:
            flags.append(flag)

    def notice(self) -> str:
        """Return all notes in one line and delete them. Without notes the line is empty."""
        groups = [f"{', '.join(flags)} ({why})" for why, flags in self.without_effect.items()]
        found = [f"{flag}: {text}" for flag, text in self.notes.items()]
        if groups:
            found.insert(0, f"options without effect: {', '.join(groups)}")
        self.notes, self.without_effect = {}, {}
        return "; ".join(found)

    def finish(self) -> None:
        """End the program with status 2 if the command line has errors."""
        problems, self.problems = self.problems, []
        if not problems:
            return
        self.notes, self.without_effect = {}, {}
        width = columns(sys.stderr)
        if len(problems) == 1:
            text = wrapped(f"twostroke: error: {problems[0]}", width, "  ")
        else:
            head = f"twostroke: error: this command line has {len(problems)} errors:"
            lines = [wrapped(f"  {problem}", width, "    ") for problem in problems]
            text = "\n".join([wrapped(head, width, "  "), *lines])
        self.exit(2, f"{text}\nTry `{self.prog} --help`.\n")

    def error(self, message: str) -> NoReturn:
        """Report an error after which the rest of the line cannot be read."""
        self.problem(message)
        self.finish()
        raise AssertionError("unreachable")

    def without_unknown(self, words: Sequence[str]) -> list[str]:
        """Return the words without unknown options. Each unknown option is reported."""
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
            # A short option with a joined value, `-O3` or `-c4096`. Letters after a short option
            # are an unknown option.
            joined = not word[2:].isalpha() and word[:2] in self._option_string_actions
            joined = joined and not word.startswith("--")
            value_of_unknown = False
            if flag in self._option_string_actions or joined:
                kept.append(word)
                continue
            self.problem(f"{shortened(flag)}: unknown option{self.did_you_mean(flag)}")
            value_of_unknown = not equals
        return kept

    def did_you_mean(self, flag: str) -> str:
        """Return `; did you mean --x?`. Options that the help shows go before hidden options. A
        refused option is named only if the flag is an abbreviation of few options."""
        full = [option for option in self._option_string_actions if option.startswith(f"{flag}-")]
        if 0 < len(full) <= MAX_MEANINGS:
            return f"; did you mean {' or '.join(full)}?"
        shown: list[str] = []
        hidden: list[str] = []
        for option, action in self._option_string_actions.items():
            if getattr(action, "is_refused", False):
                continue
            (hidden if action.help == argparse.SUPPRESS else shown).append(option)
        found = nearest_flag(flag, shown) or nearest_flag(flag, hidden)
        return f"; did you mean {found}?" if found else ""

    # ── overrides of the methods in which argparse ends the program at the first error ──────

    def _match_argument(self, action: argparse.Action, arg_strings_pattern: str) -> int:
        try:
            return super()._match_argument(action, arg_strings_pattern)
        except argparse.ArgumentError:
            if not self.collects_errors:
                raise
            self.problem(f"{_flag(action)}: a value is missing")
            return 0

    def _get_values(self, action: argparse.Action, arg_strings: list[str]) -> Any:
        missing = action.option_strings and not arg_strings and action.nargs in (None, "+")
        if self.collects_errors and missing:
            return argparse.SUPPRESS  # `_match_argument` has reported it
        try:
            return super()._get_values(action, arg_strings)
        except argparse.ArgumentError as error:
            if not self.collects_errors:
                raise
            value = shortened(" ".join(arg_strings))
            self.problem(f"{_flag(action)} {value}: {_reason(action, error)}")
            return argparse.SUPPRESS


def nearest_flag(flag: str, known: Iterable[str]) -> str | None:
    """Return the known flag that begins like a misspelt flag or differs from it by few letters."""
    known = list(known)
    if len(flag) > MAX_SHOWN_CHARS:
        return None
    longer = [name for name in known if name.startswith(flag)] if len(flag) > 4 else []
    if len(longer) == 1:
        return longer[0]
    distances = {name: _distance(flag, name) for name in known}
    best = min(distances, key=lambda name: distances[name], default=None)
    if best is not None and distances[best] <= max(1, len(_stem(flag)) // 4):
        return best
    stems = {_stem(name): name for name in known}
    near = get_close_matches(_stem(flag), stems, n=1, cutoff=0.75)
    return stems[near[0]] if near else None


def _stem(flag: str) -> str:
    """Return a flag's name without `--no-`, `--enable-` and `--disable-`."""
    return re.sub(r"^-+(no-)?((enable|disable)-)?", "", flag)


def _distance(one: str, other: str) -> int:
    """Return the number of letters that are added, removed, changed or swapped with the next."""
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
    """Return the longest name of an option."""
    return max(action.option_strings, key=len, default=str(action.metavar or action.dest))


def _reason(action: argparse.Action, error: argparse.ArgumentError) -> str:
    if action.choices is not None:
        return f"expected one of {', '.join(map(str, action.choices))}"
    value_type: Any = action.type
    if value_type in TYPE_NAMES:
        return f"expected {TYPE_NAMES[value_type]}"
    return error.message
